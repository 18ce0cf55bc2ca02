"""`ropewalk bench` and `ropewalk report`."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from ropewalk.cli.options import Option, command, split_names

app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)

_IMPL = (
    "One of our implementations; repeat for more. The default of rotations is all that exist here; of attention "
    "triton on a GPU, else reference; of the host's times all but the reference on a GPU, else sdpa and reference."
)
_RESUME = (
    "Go on with the record that --output names: what is whole in it stays, what was cut off is measured anew. The "
    "machine, all versions and the other options must be the same."
)
_RELATIVE = "Compare times as multiples of a copy's, or of a matrix product's, for other clocks or another GPU."
_ROUNDS = "Rounds in which each call is timed, at most; by default as the benchmark has it."
_PROCESSES = "Processes to start, without torchrun; by default one for each GPU."
OPTIONS: dict[str, Option] = {
    "case": (list[str] | None, None, "A case by name; repeat for more."),
    "impl": (list[str] | None, None, _IMPL),
    "mode": (split_names, "", "Modes that --list shows, with commas between; by default all."),
    "precision": (split_names, "autocast,bf16", "autocast, bf16 or both, with commas between."),
    "peers": (str, "auto", "auto (those that import), none, or names with commas between."),
    "protocol": (split_names, "", "hot, cool or hot,cool; by default both for the kernels alone, and hot elsewhere."),
    "output": (Path | None, None, "The record, a new file; by default one under ./records/.", "--output -o"),
    "resume": (bool, False, _RESUME, "--resume"),
    "device": (str | None, None, "cuda or cpu; by default the GPU if there is one."),
    "dtype": (str | None, None, "float16, bfloat16 or float32 for all cases; by default each case's own."),
    "rounds": (int | None, None, _ROUNDS, "", {"min": 3}),
    "sweep": (bool, False, "Other cases: one shape at lengths from 1 to 131072."),
    "norm": (str, "", "norm: other cases, of norms and of positions on three axes.", "--only"),
    "parts": (split_names, "", "Parts of cases' names, with commas between; by default all.", "--only"),
    "quick": (bool, False, "Small cases, for correctness. A CPU needs it.", "--quick"),
    "processes": (int | None, None, _PROCESSES, "", {"min": 1}),
    "list_cases": (bool, False, "List the cases and modes, and stop.", "--list"),
}
_EVERY = "case impl peers output resume device dtype rounds list_cases"
_GATED = (
    "\n\nEverything is checked against float64 before it is timed. A run that was stopped keeps its rows: see --resume."
)
# The command, its benchmarks, its options, and its help.
_COMMANDS = (
    (
        *("rope", "rope.RopeBench", f"mode {_EVERY} sweep norm"),
        "Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers.",
    ),
    (
        *("attention", "attention.AttentionBench", f"mode protocol {_EVERY}"),
        "Measure attention: kernels, RoPE and other schemes in them, memory, each against the peers.\n\n"
        "A copy and a product of large matrices are measured first: what the device can do at best.",
    ),
    (
        *("host", "host.HostBench", f"mode {_EVERY}"),
        "Measure the host's part of eager calls, in µs and as multiples of x.mul_(1.0), beside the peers.\n\n"
        "Calls are timed in short bursts, in turns, and a forward in turns with its backward, as training has them. On "
        "a CPU the times include the arithmetic.",
    ),
    (
        *("all", "rope.RopeBench attention.AttentionBench", _EVERY),
        "Measure the rotation, then attention, into one record, with a figure of each.\n\n"
        "A name of a case, an implementation or a peer goes to each of the two benchmarks that has it; one that has "
        "none of the names is left out. Otherwise it is as `bench rope` and `bench attention` are.",
    ),
    (
        *("training", "training.TrainingBench", "case precision output device rounds list_cases"),
        "Measure training steps of BERT and Llama models with attention by Ropewalk, by SDPA and by eager PyTorch.",
    ),
    (
        *("parallel", "parallel.ParallelBench", "peers output resume device rounds parts quick processes list_cases"),
        "Measure context parallelism on several GPUs of a machine, against the whole call on each of them.\n\n"
        "torchrun --nproc-per-node 2 -m ropewalk bench parallel does the same in processes that torchrun starts.",
    ),
)
# What `Options` calls options that name several things.
_SEVERAL = {"case": "cases", "parts": "cases", "impl": "impls", "mode": "modes", "precision": "modes"}
_SEVERAL["protocol"] = "protocols"


def _run(names: str, list_cases: bool, sweep: bool = False, norm: str = "", **values: Any) -> None:
    """Run benchmarks into one record, or list their cases; exit as Ctrl-C and errors require."""
    if norm not in ("", "norm") or (norm and sweep):
        raise typer.BadParameter(f"--only is {norm!r}, but must be 'norm', without --sweep")
    if norm or sweep:
        names = "rope.NormBench" if norm else "rope.SweepBench"
    folders = (name.split(".") for name in names.split())
    benches = [getattr(import_module(f"ropewalk.bench.{folder}.bench"), bench) for folder, bench in folders]
    if list_cases:
        for bench in benches:
            typer.echo(f"{bench.name.upper()}\n" * (len(benches) > 1) + "\n".join(bench.listing()))
        return
    if values.get("resume") and values["output"] is None:
        raise typer.BadParameter("it needs --output, which names the record to go on with", param_hint="--resume")
    from ropewalk.bench.core import runner
    from ropewalk.bench.core.options import Options

    values |= {_SEVERAL[key]: values.pop(key) or () for key in _SEVERAL.keys() & values.keys()}
    launch, options = benches[0].launch, Options(**values)
    if runner.run(benches, options) if launch is None else launch(options):  # it was interrupted
        raise typer.Exit(130)


for _name, _benches, _options, _help in _COMMANDS:
    _chosen = {key: OPTIONS[key] for key in OPTIONS if key in _options.split()}
    command(app, _name, partial(_run, _benches), _chosen, _help + _GATED * ("resume" in _chosen))


def _compare(before: Path, after: Path, threshold: float, **keywords: Any) -> None:
    """Show what B changed against A beyond the noise, and fail if one of ours is worse.

    Compared are times on the device, in CUDA graphs and of the host, and peaks of memory. A change is beyond the noise
    if the intervals from the 10 % to the 90 % quantile do not overlap and the median changed by more than 1 %. Exits
    with 1 where one of ours is worse by more than the threshold, or was right and now is wrong, failed or gone; with 2
    where a file cannot be read or compared; else with 0.
    """
    from ropewalk.bench.core.terminal import default_console
    from ropewalk.bench.report.compare import compare_records, print_changes

    changes = compare_records(before, after, threshold=threshold, **keywords)
    print_changes(changes, threshold, default_console())
    if changes.is_worse:
        raise typer.Exit(1)


_COMPARE: dict[str, Option] = {
    "before": (Path, ..., "A record of bench rope, attention or all.", "", {"metavar": "A"}),
    "after": (Path, ..., "A later record, of the same cases.", "", {"metavar": "B"}),
    "threshold": (float, 0.05, "The part by which worse, beyond the noise, fails.", "", {"min": 0.0}),
    "relative": (bool, False, _RELATIVE, "--relative"),
    "every": (bool, False, "Fail for peers and anchors too, not for ours alone.", "--all"),
}
command(app, "compare", _compare, _COMPARE)

_RECORDS = "Records of bench rope, attention, all or training."
REPORT: dict[str, Option] = {
    "records": (list[Path], ..., _RECORDS, "", {"exists": True, "dir_okay": False}),
    "output": (Path, Path("report.html"), "The page, a new file.", "--output -o", {"dir_okay": False}),
    "force": (bool, False, "Overwrite the page if it exists.", "--force"),
}


def report(records: list[Path], output: Path, force: bool) -> None:
    """Write a page of records: gains, losses, machines, every row. One file that loads nothing from anywhere."""
    from ropewalk.bench.report.page import write_report

    path = write_report(records, output, force=force)
    typer.echo(f"report: {path} ({path.stat().st_size / 2**20:.1f} MiB)")
