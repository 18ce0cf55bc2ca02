"""Prove products: every pair of features of `attention` by each backend, against an independent truth.

python tools/prove_products.py rows                   draw the covering array anew: tests/products/rows.jsonl
python tools/prove_products.py pack PACK [--python PYTHON] [--triton 3.6.0]
                                                compile what the array launches on an H100 or H200, without a GPU
python tools/prove_products.py gpu PACK RECORD [--seconds 240] [--sequences 240]
                                                run the array and sequences on this GPU, and record what was covered
python tools/prove_products.py feature NAME[=VALUE]   run a feature's values, or one, beside each other one,
                                                by the reference, or by "triton" with TRITON_INTERPRET=1
python tools/prove_products.py page                   write docs/products.md from results/products-h200.json

`pack` goes on where it was stopped, and compiles what changed. PYTHON is a Python of the GPU machine's version: the
launchers need its headers. No other package of the GPU machine is needed, but its version of Triton.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS.parent / "tests"), str(TOOLS)]

VARIANTS = 3  # sizes of a class of tokens
BUILD = TOOLS.parent / "build/products"
SHRINK = 60  # seconds
RECORD = TOOLS.parent / "results/products-h200.json"
PAGE = TOOLS.parent / "docs/products.md"


def draw_rows() -> None:
    """Draw the array."""
    from products import cover

    rows = cover.make()
    cover.save(rows)
    print(f"wrote {len(rows)} rows to {cover.ARRAY}")


def rows_of_feature(which: str, impl: str) -> Iterator[dict[str, str]]:
    """Go through the calls of a backend that have a value of a feature and another one's, in inference and training."""
    from products import calls, cover
    from products.table import FEATURES, names_a_call, plainest

    name, equals, one = which.partition("=")
    if name not in FEATURES:
        raise SystemExit(f"NAME is {name!r}, but must be a feature: {', '.join(FEATURES)}")
    if equals and one not in FEATURES[name].values:
        raise SystemExit(f"VALUE is {one!r}, but must be one of {name}'s: {', '.join(FEATURES[name].values)}")
    values = [one] if one else FEATURES[name].values[1:]
    for value, (other, feature) in itertools.product(values, FEATURES.items()):
        for row in (plainest((name, value), (other, x)) for x in feature.values if other != name):
            for gradients in () if row is None else dict.fromkeys((row["gradients"], "all")):
                made = {**row, "gradients": gradients}
                if made["dtype"] == "bfloat16":  # the interpreter's products are wrong
                    made["dtype"] = "float32"
                if names_a_call(made) and cover.refusal(made, impl, calls.CPU) is None:
                    yield made


def check_feature(which: str) -> None:
    """Run a feature, or one value of it, beside every other one, and print what is wrong."""
    import torch
    from products import calls, run

    from ropewalk import device as gpu

    impl = "triton" if gpu.is_interpreted() else "reference"
    n_calls = n_wrong = 0
    for row in rows_of_feature(which, impl):
        found = run.check(row, [impl], 0, torch.device("cpu"), calls.CPU, planned=0)
        n_calls, n_wrong = n_calls + found.calls, n_wrong + len(found.faults)
        for fault in found.faults:
            print(json.dumps(fault.describe()), flush=True)
    print(f"{impl}: {n_calls} calls, {n_wrong} wrong")
    if n_wrong:
        raise SystemExit(1)


def make_pack(path: Path, python: str, triton: str) -> None:
    """Compile what the array and sequences launch, and pack it."""
    from products import cover, pack, sequences
    from products.table import NEUTRAL

    jobs = []
    for row, impls in cover.load():
        values = {name: value for name, value in row.items() if value != NEUTRAL[name]}
        jobs.append(pack.Job("products.jobs:run_row", [values, list(impls), VARIANTS]))
    jobs += sequences.jobs()
    results = pack.compile_calls(jobs, BUILD, target_of(python, triton), workers=os.cpu_count() or 1)
    for result in results:
        if result.error is not None:
            print(f"failed: {result.job.arguments}\n{result.error}")
    manifest = pack.write_pack(BUILD, path)
    print(f"{path}: {manifest['kernels']} kernels, {path.stat().st_size / 1e6:.1f} MB")
    if manifest["failed"]:
        raise SystemExit(f"{len(manifest['failed'])} calls failed, and are not in the pack")


def target_of(python: str, triton: str) -> Any:
    """Describe the GPU machine: by a Python of its version, and by the wheel of Triton for it."""
    from products import pack

    code = "import sys, sysconfig as s\n"
    code += "print(s.get_config_var('EXT_SUFFIX'), s.get_paths()['include'], *sys.version_info[:2])"
    suffix, headers, *version = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", ".".join(version), "-d", folder, f"triton=={triton}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("triton-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        key = pack.triton_key_of(Path(folder, "triton"))
    return pack.Target(key, suffix, headers)


def run_on_gpu(path: Path, record: Path, seconds: float, of_sequences: float, workers: int) -> None:
    """Run the array and sequences on this machine's GPU by many processes, and write what was covered."""
    import torch
    from products import cover, pack, run

    from ropewalk.bench.core.records import describe_run

    folder = Path(tempfile.mkdtemp())
    manifest = pack.read_pack(path, folder / "triton")
    entries = cover.load()
    found = {
        **describe_run("products", torch.device("cuda"), {}),
        "pack": {name: manifest[name] for name in ("commit", "kernels", "launchers", "bytes")},
        "workers": workers,
    }
    if seconds:
        found["array"] = run.run_all(entries, workers, seconds, SHRINK, str(folder / "array"))
        ran = {impl: [row for row, impls in entries if impl in impls] for impl in (*cover.IMPLS, None)}
        found["pairs"] = {
            str(impl): {"supported": len(pairs), "missing": len(cover.uncovered(ran[impl], pairs))}
            for impl, pairs in cover.supported_pairs().items()
        }
    if of_sequences:
        from products import sequences

        found["sequences"] = sequences.run_all(workers, of_sequences, str(folder / "sequences"))
    found["end"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(found, indent=1) + "\n")
    if "array" in found:
        array = found["array"]
        print(f"array: {array['calls']} calls in {array['seconds']:.0f} s, {len(array['faults'])} wrong")
        print(f"  {array['compiled']} kernels compiled here, first passes {array['first_pass']}")
        for fault in array["shrunk"] or array["faults"]:
            print(" ", json.dumps(fault))
        print("pairs:", json.dumps(found["pairs"]))
    if "sequences" in found:
        part = found["sequences"]
        print(f"sequences: {part['calls']} calls in {part['seconds']:.0f} s, {len(part['faults'])} wrong")
        print(f"  {part['compiled']} kernels compiled here, exit codes {part['exit_codes']}")
        print(*part["faults"], sep="\n\n")
    if wrong := what_is_wrong(found):
        raise SystemExit(f"{wrong}: {record} has the details")


def what_is_wrong(record: dict[str, Any]) -> str | None:
    """Say in one line why a run proves less than all; None if it does not."""
    array, sequences = record.get("array", {}), record.get("sequences", {})
    n_missing = sum(of["missing"] for of in record.get("pairs", {}).values())
    found = {
        "calls of the array are wrong": len(array.get("faults", ())),
        "calls of sequences are wrong": len(sequences.get("faults", ())),
        "pairs have no call": n_missing,
        "processes did not reach the end of their rows": array.get("first_pass", []).count(None),
        "processes failed": sum(code != 0 for part in (array, sequences) for code in part.get("exit_codes", ())),
    }
    return ", ".join(f"{n} {what}" for what, n in found.items() if n) or None


def render(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    from products.table import FEATURES

    array, sequences, pack = record["array"], record["sequences"], record["pack"]
    rows = [
        f"| {'`None`' if impl == 'None' else f'`{impl}`'} | {of['supported']:,} | {of['missing']} |"
        for impl, of in record["pairs"].items()
    ]
    values = sum(len(feature.values) for feature in FEATURES.values())
    return PAGE_TEXT.format(
        features=len(FEATURES),
        values=values,
        device=record["device"],
        date=record["date"][:10],
        commit=record["commit"][:7],
        pairs="\n".join(rows),
        calls=array["calls"],
        seconds=array["seconds"],
        wrong=len(array["faults"]),
        of_sequences=sequences["calls"],
        n_sequences=sequences["sequences"],
        of_seconds=sequences["seconds"],
        of_wrong=len(sequences["faults"]),
        kernels=pack["kernels"],
        compiled=array["compiled"] + sequences["compiled"],
    )


PAGE_TEXT = """\
# Combinations of features

<!-- Written by tools/prove_products.py from results/products-h200.json. Do not edit. -->

A feature of `attention` is proven beside every other feature, not alone.
One table, `tests/products/table.py`, lists {features} features.
They have {values} values.
Few rows of that table hold every pair of values that a backend runs together.
Each row runs once without a plan and three times with one, forward and backward.
Output, log-sum-exp, max logits and all gradients are compared with float64.
The formulas of that truth, `tests/products/truth.py`, share no code with the library.

## On a GPU

This is one run on an {device} of {date}, at commit {commit}.
[The record](../results/products-h200.json) has the versions and the machine.

| `impl=` | pairs of values that run | pairs without a call |
| --- | --- | --- |
{pairs}

| | calls compared | seconds | wrong |
| --- | --- | --- | --- |
| rows of the table, other numbers and sizes each time | {calls:,} | {seconds:.0f} | {wrong} |
| sequences that change one thing at a time | {of_sequences:,} | {of_seconds:.0f} | {of_wrong} |

A sequence begins with a planned call.
Then one thing changes: memory, values, a stream, a graph, a thread, a flag or what needs a gradient.
Calls of before come back in between.
The run had {n_sequences:,} sequences.
An error may be twice that of FlashAttention's steps in plain PyTorch, and a few roundings more.

## Run it

| command | does |
| --- | --- |
| `make products` | runs all rows by the reference, and some by Triton's interpreter, others each day |
| `make products-pack` | compiles the kernels of all rows without a GPU |
| `make products-gpu PACK=…` | runs all rows and sequences on an H100 or H200, and writes a record |

A pack has the kernels and launchers for another machine's Python and Triton, so that it compiles nothing.
That of the run had {kernels:,} kernels; {compiled} more were compiled there.
A failure prints the fewest features, or the shortest sequence of calls, that still fail.

[The support table](support.md) is generated from the same table, and lists the pairs that a backend refuses.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rows")
    pack = commands.add_parser("pack")
    pack.add_argument("path", type=Path)
    pack.add_argument("--python", default=sys.executable)
    pack.add_argument("--triton", default="3.6.0")
    commands.add_parser("feature").add_argument("name")
    commands.add_parser("page")
    gpu = commands.add_parser("gpu")
    gpu.add_argument("path", type=Path)
    gpu.add_argument("record", type=Path)
    gpu.add_argument("--seconds", type=float, default=240)
    gpu.add_argument("--sequences", type=float, default=240)
    gpu.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    if given.command == "rows":
        draw_rows()
    elif given.command == "pack":
        make_pack(given.path, given.python, given.triton)
    elif given.command == "feature":
        check_feature(given.name)
    elif given.command == "page":
        PAGE.write_text(render(json.loads(RECORD.read_text())))
    else:
        run_on_gpu(given.path, given.record, given.seconds, given.sequences, given.workers)


if __name__ == "__main__":
    main()
