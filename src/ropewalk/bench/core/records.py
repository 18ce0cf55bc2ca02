"""Records of runs: JSON lines, one for the run and its machine, then one for each row.

A record says on what it was measured, and holds no path of that machine. The last line of a run that was not stopped
says when it ended. Several runs may follow each other in one file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import ropewalk

FORMAT = 1
END = "end"  # the one key of the line that ends a record


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """A record that is written row by row, so that an interrupted run keeps its rows.

    The file must not exist, unless `rows_before` are its lines: then it becomes the run and those lines, all at once.
    """

    def __init__(
        self, path: Path, run: Mapping[str, Any], rows_before: Iterable[Mapping[str, Any]] | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        started = path if rows_before is None else path.with_name(f"{path.name}.new")
        self._file = started.open("x" if rows_before is None else "w", encoding="utf-8")
        for line in ({"format": FORMAT, **run}, *(rows_before or ())):
            self.append(line)
        if rows_before is not None:
            self._file.close()
            started.replace(path)
            self._file = path.open("a", encoding="utf-8")

    def append(self, row: Any) -> None:
        """Write one row, a mapping or a dataclass, and flush it."""
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=asdict) + "\n")
        self._file.flush()

    def end(self) -> None:
        self.append({END: _now()})

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_lines(path: Path, *benchmarks: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the line about the run and the lines of the rows, of a record of one run of one of these benchmarks."""
    first, *lines = parse_lines(path)
    check_run_line(path, first, benchmarks)
    return first, [line for line in lines if line.keys() != {END}]


def parse_lines(path: Path, *, may_be_cut_off: bool = False) -> list[dict[str, Any]]:
    """Parse a record's lines; one that was stopped while it was written may lack the end of the last one."""
    texts = path.read_text(encoding="utf-8").splitlines()
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if may_be_cut_off and number == len(texts) > 1:
                break
            raise ValueError(f"{path.name} is not a record: line {number} is not JSON, or was cut off") from error
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path.name} is not a record: it must be JSON objects, one to a line")
    return lines


def check_run_line(path: Path, line: Mapping[str, Any], benchmarks: Sequence[str]) -> None:
    """Raise unless a line is about a run of one of these benchmarks."""
    if line.get("format") != FORMAT or line.get("benchmark") not in benchmarks:
        names = " or ".join(map(repr, benchmarks))
        raise ValueError(f"{path.name} is not a record of format {FORMAT} of the benchmark {names}")


def default_path(run: Mapping[str, Any]) -> Path:
    """Return records/BENCHMARK-DEVICE-TIME.jsonl; git ignores that folder in a checkout."""
    device = re.sub(r"[^a-z0-9]+", "-", run["device"].lower()).strip("-")
    time = re.sub(r"[^0-9T]", "", run["date"].split("+")[0])
    return Path("records") / f"{run['benchmark']}-{device}-{time}.jsonl"


def describe_run(benchmark: str, device: torch.device, peers: Mapping[str, str]) -> dict[str, Any]:
    """Describe the run, its machine and its versions; `peers` maps each to its version or why it is missing."""
    return {
        "benchmark": benchmark,
        "date": _now(),
        **_describe_device(device),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "usable_cpu_cores": _count_usable_cores(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": version_of("triton"),
        "ropewalk": ropewalk.__version__,
        **_describe_commit(),
        "peers": dict(peers),
    }


def _count_usable_cores() -> int | None:
    """Count the cores that this process may run on: fewer than the machine's where it is pinned."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_note(device: str) -> str:
    """Return the words that a table or a figure of this device, as records name it, needs: none for a GPU."""
    return " (on a CPU: for correctness, not speed)" if device.startswith("CPU") else ""


def _describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the device; of a GPU also the driver, and clocks and power while it copies, if nvidia-smi answers."""
    if device.type == "cpu":
        return {"device": f"CPU {platform.processor() or platform.machine()}", "threads": torch.get_num_threads()}
    gpu = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {"device": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"}
    found |= {"memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    command.append(f"--id=GPU-{getattr(gpu, 'uuid', None)}")
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        return found
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    while process.poll() is None:
        target.copy_(source)
    torch.cuda.synchronize(device)
    values = [value.strip() for value in process.communicate()[0].split(",")]
    if process.returncode == 0 and len(values) == len(fields):
        found |= dict(zip((field.replace(".", "_") for field in fields), values, strict=True))
    return found


def _describe_commit() -> dict[str, Any]:
    """Return the git commit of the package's source, and whether tracked files differ from it, if git tells.

    A copy of the source that came without its repository takes the commit from ROPEWALK_COMMIT, "…-dirty" where it
    differs.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(ropewalk.__file__).parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (FileNotFoundError, subprocess.CalledProcessError):
            return None

    # An installed copy may lie inside somebody else's repository: only a tracked file makes the commit ours.
    if git("ls-files", "--error-unmatch", "__init__.py") is not None:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    commit = os.environ.get("ROPEWALK_COMMIT")
    dirty = None if commit is None else commit.endswith("-dirty")
    return {"commit": commit and commit.removesuffix("-dirty"), "dirty": dirty}
