"""Measure everything that the pages show, on all GPUs of a machine, into one record a benchmark.

python tools/record_all.py FOLDER [--plan] [--limit 560] [--only attention,host] [--gpus 4] [--quick]
    [--device h200] [--needs flash_attn.cute,quack,liger_kernel] [--into results]

A task is one process on one GPU with a record of its own, FOLDER/parts/TASK.jsonl, and its output beside that. Tasks
whose times are the host's run last, one at a time. Call it again to go on: a task is done when its record has its end.
Each call joins the parts into FOLDER/BENCHMARK-GPU.jsonl: copy those to results/, then run `python tools/overview.py`.
With --into they go into the records of a folder instead: a run replaces the one of its name, and the others stay.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.bench.core.load import differences
from ropewalk.bench.core.peers import load_module
from ropewalk.bench.core.records import END, parse_lines

TOOLS = Path(__file__).parent
SCRIPTS = ("serving", "blocks", "precision")  # benchmarks that are tools, and not commands
RESUMABLE = ("rope", "attention", "host")
SAME = ("device", "commit", "dirty", "torch", "triton", "cuda")  # of all runs that are joined
LONGEST, MARGIN = 3, 30  # a task may take so many times its predicted seconds, and so many more


@dataclass(frozen=True)
class Task:
    """One process: a benchmark with its arguments, and its predicted seconds on an H200 where nothing is compiled."""

    name: str
    benchmark: str
    arguments: str
    seconds: int
    is_host_timed: bool = False  # which any other process would disturb


def _attention(name: str, seconds: int, cases: str, more: str = "") -> Task:
    """Return a task of attention: the kernels by name beside what `impl=None` picks, at the power limit."""
    arguments = f"{_cases(cases)} --impl gluon --impl triton --protocol hot {more}"
    return Task(f"attention-{name}", "attention", arguments.strip(), seconds)


def _products(name: str, cases: str) -> Task:
    """Return a task of 8-bit products: the kernel of Hopper beside other libraries."""
    arguments = f"{_cases(cases)} --impl gluon --mode 8bit-fwd --protocol hot --rounds 7"
    return Task(f"attention-8bit-{name}", "attention", arguments, 110)


def _cases(names: str) -> str:
    return " ".join(f"--case {name}" for name in names.split())


_KERNELS = "--mode fwd,bwd,train"
_SETTINGS = "--mode schemes-fwd,schemes-bwd,variants-fwd,variants-bwd --peers none"
_FEW = "--peers sdpa_default,cudnn --rounds 30"  # FlexAttention compiles for minutes
_MODELS = "llama3-8b llama3-70b bert-base qwen3-8b gemma3-27b"
_LAYOUTS = (
    "deepseek-mla rerope-8k api-4x512 vllm-4096-fp32 llama3-8b-positions llama3-8b-thd llama3-8b-bhtd glm4-9b-partial"
)
_LARGE = "llama-8-layers qwen3-8-layers gemma-4-layers llama-4x4096-attention llama-4x4096"
_SMALL = "bert-4x256 bert-4x256-dropout bert-4x256-full bert-base-8x128"
_STACKS = "llama-12x1024-attention llama-12x1024 qwen3-12x1024-attention qwen3-12x1024"
# In the order in which they start, the longest first. A process takes 10 to 20 s until it measures, so that cases share
# one, for 190 s at most. Together they have every case; a test holds them to it.
TASKS: tuple[Task, ...] = (
    _products("d128", "causal-16k-d128 full-4k-d128 causal-4k-d128 gqa-8k-d128"),
    _products("d256-d64", "gqa-16k-d256 full-8k-d256 causal-8k-d64 full-4k-d64"),
    Task("training", "training", _cases(f"bert-base-rope bert-base bert-base-64x512 {_LARGE}"), 190),
    _attention("d256-llama3", 190, "gqa-16k-d256 gqa-8k-d256 llama3-70b", _KERNELS),
    _attention("rerope-fp16-causal-2k", 180, "rerope-8k-d64-fp16 causal-2k-d128"),
    _attention("bert-packed", 180, "bert-512 bert-512-lengths packed-4k-d128"),
    _attention("mla-layer", 175, "mla-8k-d192 qwen3-next-d128"),
    Task("rope-models", "rope", _cases(_MODELS), 175),
    _attention("rerope-d64-gemma3", 165, "rerope-8k-d64 gemma3-27b"),
    Task("rope-layouts", "rope", _cases(_LAYOUTS), 165),
    _attention("d128", 165, "causal-4k-d128 causal-16k-d128 full-4k-d128", _KERNELS),
    Task("rope-sweep", "rope", "--sweep --peers none", 155),
    _attention("rerope-gqa-d128", 150, "rerope-16k-d128 gqa-8k-d128", f"{_KERNELS},rerope-fwd,rerope-train"),
    _attention("settings-d64", 140, "causal-8k-d64", _SETTINGS),
    _attention("settings-d128", 135, "causal-4k-d128", _SETTINGS),
    Task("rope-norm", "rope", "--only norm --rounds 60", 130),
    _attention("decode-memory", 130, "decode-8k-d128 decode-1 memory-64k"),
    Task("blocks", "blocks", "topk frames sinks documents dense --dim 128 64", 125),
    _attention("d64", 115, "causal-8k-d64 full-4k-d64", _KERNELS),
    _attention("learned-d128", 85, "causal-4k-d128", "--mode learned-bwd --peers none"),
    Task("serving", "serving", "decode append prefill", 70),
    Task("precision-errors", "precision", "errors", 60),
    Task("precision-quality", "precision", "quality", 190),
    Task(
        "host-small",
        "host",
        "--case small --mode none-fwd,none-train,rope-fwd,rope-train,rotate-fwd --rounds 50",
        65,
        is_host_timed=True,
    ),
    Task(
        "host-settings",
        "host",
        "--case small --mode dropout-fwd,dropout-train,sinks-fwd,sinks-train,alibi-learned-fwd,alibi-learned-train "
        "--peers sdpa_default,cudnn --rounds 50",
        60,
        is_host_timed=True,
    ),
    Task(
        "host-models",
        "host",
        _cases("bert-lengths decode-1 decode-8 small-lengths small-packed small-window small-rerope") + f" {_FEW}",
        145,
        is_host_timed=True,
    ),
    Task("rope-decode", "rope", _cases("decode-1 decode-64 decode-256 decode-64-positions"), 85, is_host_timed=True),
    Task("training-small", "training", _cases(f"{_SMALL} {_STACKS}"), 85, is_host_timed=True),
    Task("blocks-host", "blocks", "masks host", 30, is_host_timed=True),
    Task("serving-host", "serving", "host", 10, is_host_timed=True),
)
# On a CPU, for a minute: that processes start, records are joined, and pages are written.
_ON_CPU = "--device cpu --rounds 3"
QUICK: tuple[Task, ...] = (
    Task("rope-quick", "rope", f"--case decode-64 --peers none {_ON_CPU}", 20),
    Task("attention-quick", "attention", f"--case decode-1 --peers none {_ON_CPU}", 20),
    Task(
        "host-quick",
        "host",
        f"--case small --mode rope-fwd --impl reference --peers none {_ON_CPU}",
        20,
        is_host_timed=True,
    ),
)


class Folder:
    """The records of a run: a part for each task, and the joined ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.parts = path, path / "parts"
        self.parts.mkdir(parents=True, exist_ok=True)

    def part(self, task: Task) -> Path:
        return self.parts / f"{task.name}.jsonl"

    def lines(self, task: Task) -> list[dict[str, Any]]:
        """Return the lines of a task's record; of one that was cut off the whole ones, and none if there are none."""
        path = self.part(task)
        return parse_lines(path, may_be_cut_off=True) if path.exists() and path.stat().st_size else []

    def is_done(self, task: Task) -> bool:
        lines = self.lines(task)
        return bool(lines) and lines[-1].keys() == {END}

    def command(self, task: Task) -> list[str]:
        """Return the command that begins a task, or goes on with it; a record that cannot go on is removed."""
        path = self.part(task)
        if task.benchmark not in RESUMABLE or not self.lines(task):
            path.unlink(missing_ok=True)
        if task.benchmark in SCRIPTS:
            tool = str(TOOLS / f"bench_{task.benchmark}.py")
            return [sys.executable, tool, *task.arguments.split(), "--out", str(path)]
        resume = ["--resume"] if path.exists() else []
        bench = [sys.executable, "-m", "ropewalk", "bench", task.benchmark]
        return [*bench, *task.arguments.split(), "-o", str(path), *resume]

    def join(self, tasks: Sequence[Task]) -> list[Path]:
        """Write a record for each benchmark: the runs of its tasks, each named, with their rows."""
        first: dict[str, Any] = {}
        found: dict[str, list[str]] = {}
        for task in tasks:
            run, *rows = self.lines(task) or [{}]
            if not rows:
                continue
            first = first or run
            if unlike := [f"{name} was {old!r}, and is {new!r}" for name, old, new in differences(SAME, first, run)]:
                raise SystemExit(f"{self.part(task)} is of another run, so remove it: {'; '.join(unlike)}")
            name = f"{task.benchmark}-{short_name(run['device'])}.jsonl"
            lines = ({**run, "name": task.name}, *rows)
            found.setdefault(name, []).extend(json.dumps(line, ensure_ascii=False) for line in lines)
        for name, texts in found.items():
            (self.path / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
        return [self.path / name for name in found]


def update(record: Path, newer: Path) -> None:
    """Put the runs of a newer record into another: each replaces those of its name, and the others stay."""
    runs = {**_runs_of(record), **_runs_of(newer)} if record.exists() else _runs_of(newer)
    parsed = (json.loads(line) for lines in runs.values() for line in lines)
    devices = {line["device"] for line in parsed if "format" in line}
    if len(devices) > 1:
        raise SystemExit(f"{record} is of {', '.join(sorted(devices))}, but must be of one GPU")
    record.write_text("".join(f"{line}\n" for lines in runs.values() for line in lines), encoding="utf-8")


def _runs_of(record: Path) -> dict[Any, list[str]]:
    """Return the lines of runs by their name, in their order; a run without one has a key that no other run has."""
    runs = dict[Any, list[str]]()
    for line in record.read_text(encoding="utf-8").splitlines():
        parsed = json.loads(line)
        if "format" in parsed:
            lines = runs.setdefault(parsed.get("name", (record, len(runs))), [])
        lines.append(line)
    return runs


def why_not_here(device: str, gpu: str, modules: Sequence[str]) -> str | None:
    """Say why a run would not be the one that is wanted: by the GPU's name in records, and modules of peers."""
    if device and short_name(gpu) != device:
        return f"--device is {device!r}, and the GPU is {gpu!r}"
    for module in modules:
        try:
            load_module(module)
        except Exception as error:  # a peer's module may raise anything
            return f"--needs names {module!r}, which cannot be imported: {error}"
    return None


def short_name(device: str) -> str:
    """Return the name of a GPU in names of records: "h200" of "NVIDIA H200", "h100" of "NVIDIA H100 80GB HBM3"."""
    maker, *words = device.lower().split()
    return words[0] if words and maker != "cpu" else maker


def plan(tasks: Sequence[Task], n_gpus: int) -> list[tuple[float, int, Task]]:
    """Return when each task starts, on which GPU, if all take as long as predicted."""
    free, found = [0.0] * n_gpus, []
    for host_timed in (False, True):
        free = [max(free)] * (1 if host_timed else n_gpus)
        for task in (task for task in tasks if task.is_host_timed == host_timed):
            gpu = min(range(len(free)), key=free.__getitem__)
            found.append((free[gpu], gpu, task))
            free[gpu] += task.seconds
    return found


def run(tasks: Sequence[Task], folder: Folder, gpus: Sequence[str], limit: float) -> None:
    """Run tasks side by side, one on each GPU, and start none that would not end in time."""
    begun = time.monotonic()
    waiting, running = list(tasks), dict[str, tuple[Task, subprocess.Popen[bytes], float]]()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {text}", flush=True)

    def fits(task: Task) -> bool:
        left = limit - (time.monotonic() - begun)
        return left > (60 if task.benchmark in RESUMABLE else task.seconds)

    def start(task: Task, gpu: str) -> None:
        waiting.remove(task)
        with (folder.parts / f"{task.name}.log").open("ab") as log:
            process = subprocess.Popen(
                folder.command(task),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                start_new_session=True,
            )
        running[gpu] = task, process, time.monotonic()
        say(f"{task.name}: started on GPU {gpu}")

    def finish(gpu: str) -> None:
        """Forget the task of a GPU; one that still runs is stopped, and the whole lines of its record stay."""
        task, process, started = running.pop(gpu)
        is_late = process.poll() is None
        if is_late:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = "stopped" if is_late else f"failed with exit {process.returncode}, see {task.name}.log"
        if folder.is_done(task):
            said = "done, but one of ours was wrong or failed" if process.returncode and not is_late else "done"
        say(f"{task.name}: {said}, {time.monotonic() - started:.0f} s (predicted {task.seconds})")

    try:
        while True:
            for gpu, (task, process, started) in list(running.items()):
                now = time.monotonic()
                if process.poll() is not None or now - begun > limit or now - started > _longest(task):
                    finish(gpu)
            for gpu in (gpu for gpu in gpus if gpu not in running):
                following = _next(waiting, bool(running), fits)
                if following is None:
                    break
                start(following, gpu)
            if not running:
                break
            time.sleep(0.2)
    finally:
        for gpu in list(running):
            finish(gpu)
    for task in waiting:
        say(f"{task.name}: not started")


def _longest(task: Task) -> float:
    return LONGEST * task.seconds + MARGIN


def _next(waiting: Sequence[Task], is_running: bool, fits: Callable[[Task], bool]) -> Task | None:
    """Return the next task that may start now: one that is host-timed when all others ended or do not fit."""
    fitting = [task for task in waiting if fits(task)]
    others = [task for task in fitting if not task.is_host_timed]
    if others or is_running:
        return others[0] if others else None
    return fitting[0] if fitting else None


def main() -> None:
    """Print the plan, or run what is left of it, and join the records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the records, new or of a call before")
    parser.add_argument("--plan", action="store_true", help="print what would run, and when, and stop")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of this call; later calls go on")
    parser.add_argument("--only", default="", help="parts of tasks' names, with commas between")
    parser.add_argument("--gpus", type=int, help="how many to use; by default all")
    parser.add_argument("--quick", action="store_true", help="small cases on a CPU, for correctness")
    parser.add_argument("--device", default="", help="stop where the GPU has another name, as in names of records")
    parser.add_argument("--needs", default="", help="modules of peers, with commas between: stop where one is missing")
    parser.add_argument("--into", type=Path, help="a folder of records whose runs of the same names are replaced")
    options = parser.parse_args()
    folder, names = Folder(options.folder), options.only.split(",")
    every = QUICK if options.quick else TASKS
    tasks = [task for task in every if any(name in task.name for name in names) and not folder.is_done(task)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if options.quick or (options.plan and not gpus):
        gpus = [str(index) for index in range(options.gpus or 1)]
    gpus = gpus[: options.gpus]
    if not gpus and options.limit > 0:  # nothing runs with --limit 0, and records are joined
        raise SystemExit("no GPU was found: on a CPU, --quick runs small cases")
    if options.plan:
        starts = plan(tasks, len(gpus))
        for start, gpu, task in starts:
            kind = "host-timed" if task.is_host_timed else ""
            print(f"{start:5.0f} s  GPU {gpus[gpu]}  {kind:10}  {task.seconds:4} s  {task.name}")
        print(f"{max((start + task.seconds for start, _, task in starts), default=0):5.0f} s  end")
        return
    gpu = torch.cuda.get_device_name() if options.device and torch.cuda.is_available() else "cpu"
    if reason := why_not_here(options.device, gpu, [name for name in options.needs.split(",") if name]):
        raise SystemExit(reason)
    run(tasks, folder, gpus, options.limit)
    for path in folder.join(every):
        print(f"record: {path}")
        if options.into is not None:
            update(options.into / path.name, path)
    left = [task.name for task in every if not folder.is_done(task)]
    print(f"left: {', '.join(left)}" if left else "all is measured")


if __name__ == "__main__":
    main()
