"""Hash the machine code of every kernel that the compile checks build, to see whether a change of source changes it.

Usage, from a checkout (no GPU is needed)::

    python tools/machine_code.py record before.jsonl          # compile checks with the installed Triton, CUDA sources
    python tools/machine_code.py compare before.jsonl after.jsonl

`record` runs the compile checks in this checkout with an empty cache, as a plugin of pytest; more arguments go to
pytest, such as `-k` or a file. It appends, so that several runs make a set for each kernel: a few kernels compile to
one of two variants. `compare` fails if a kernel of the second file has code that the first has nowhere.

A hash is of the instructions alone. Addresses of code, names and comments are left out; the place of an argument in
constant memory is replaced by the order in which arguments are first read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTPUT = "ROPEWALK_MACHINE_CODE"  # the file that the plugin appends to
ARCHITECTURES = ("80", "90", "100")  # of the CUDA sources


def sass_of(binary: bytes, tool: str) -> dict[str, list[str]]:
    """The instructions of each function of a cubin, without their addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for part in text.split("Function : ")[1:]:
        name = part.partition("\n")[0].strip()
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\*", part)
        found[name] = [re.sub(r"`\(.*?\)", "`()", line) for line in lines]
    return found


def amd_of(text: str) -> list[str]:
    """The instructions of an AMD kernel's assembly, without labels' names, directives and comments."""
    lines = (line.partition(";")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith((".", "//")) and not line.endswith(":")]


def normalise(instructions: list[str]) -> list[str]:
    """Arguments by the order in which they are first read, in place of where they lie."""
    places: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        return places.setdefault(match[0], f"argument {len(places)}")

    return [re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", rename, line) for line in instructions]


def digest(instructions: list[str]) -> str:
    """A short hash of some lines."""
    return hashlib.sha256("\n".join(instructions).encode()).hexdigest()[:20]


def describe(instructions: list[str]) -> dict[str, Any]:
    """What is recorded of a kernel's instructions."""
    return {
        "exact": digest(instructions),
        "hash": digest(normalise(instructions)),
        "instructions": len(instructions),
    }


def append(entry: dict[str, Any]) -> None:
    """Add a line to the output; several processes may."""
    with open(os.environ[OUTPUT], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


@functools.cache
def version() -> str:
    """Of Triton."""
    import triton

    return str(triton.__version__)


def note(compiled: Any) -> None:
    """Record what Triton has compiled, under the running test's parameters."""
    import triton

    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        functions = sass_of(compiled.asm["cubin"], str(tool))
        instructions = functions.get(compiled.metadata.name) or next(iter(functions.values()))
    else:
        instructions = amd_of(compiled.asm["amdgcn"])
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    append(
        {
            "triton": version(),
            "case": test.partition("[")[2].rstrip("]"),
            "test": test,
            "kernel": compiled.metadata.name,
            "shared": compiled.metadata.shared,
            **describe(instructions),
        }
    )


def pytest_configure(config: Any) -> None:
    """The plugin: see what Triton compiles."""
    import triton

    plain = triton.compile

    def compile_and_note(*arguments: Any, **keywords: Any) -> Any:
        compiled = plain(*arguments, **keywords)
        note(compiled)
        return compiled

    triton.compile = compile_and_note
    triton.compiler.compile = compile_and_note


def record_cuda(output: Path) -> None:
    """Compile the CUDA sources, if nvcc is there."""
    (source,) = ROOT.glob("src/ropewalk/ops/rope/**/csrc/rotate.cu")
    os.environ[OUTPUT] = str(output)
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "rotate.cubin")
            target = f"-arch=sm_{architecture}"
            subprocess.run(["nvcc", "-O3", "-std=c++17", target, "-cubin", source, "-o", cubin], check=True)
            for name, instructions in sass_of(cubin.read_bytes(), "cuobjdump").items():
                append({"triton": "nvcc", "case": architecture, "kernel": name, **describe(instructions)})


def record(output: Path, arguments: list[str]) -> int:
    """Run the compile checks with this file as a plugin of pytest."""
    environment = {**os.environ, OUTPUT: str(output.resolve())}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, "-m", "pytest", "-p", "machine_code", "-m", "compile", *(arguments or ["tests/ops"])]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def load(path: Path) -> dict[str, dict[str, Any]]:
    """The last entry of each hash."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {f"{entry['triton']} {entry['hash']}": entry for entry in map(json.loads, lines)}


def compare(before: Path, after: Path) -> int:
    """Print what is in one file alone; the exit status is 1 if the second has something new."""
    old, new = load(before), load(after)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for side, entries, others in ((0, old, new), (1, new, old)):
        for key, entry in entries.items():
            if key not in others:
                counts[entry["triton"], entry["case"]][side] += 1
                where = ("before", "after")[side]
                print(f"{where} alone: {entry['kernel']} [{entry['case']}] {entry['instructions']} instructions, {key}")
    fresh = sum(new_count for _, new_count in counts.values())
    print(f"{len(old)} and {len(new)} different binaries; {fresh} of the second are new")
    return int(fresh > 0)


def main(arguments: list[str]) -> int:
    """Record or compare."""
    match arguments:
        case ["record", output, *rest]:
            return record(Path(output), rest)
        case ["record-cuda", output]:
            record_cuda(Path(output).resolve())
            return 0
        case ["compare", before, after]:
            return compare(Path(before), Path(after))
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
