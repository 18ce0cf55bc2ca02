"""The run that the kernels' benchmarks share: what is planned is measured case by case, recorded and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ropewalk.bench.attention_records import AttentionRecord, AttentionRow
from ropewalk.bench.attention_summary import print_attention_summary
from ropewalk.bench.rates import measure_rates
from ropewalk.bench.reading import BenchRecord, read_bench_record
from ropewalk.bench.records import Record, RecordWriter, Row, describe_run
from ropewalk.bench.resuming import Stopped, Unit, check_same, read_stopped
from ropewalk.bench.running import MISSING, choose_path, progress_bar
from ropewalk.bench.summary import print_summary

_KINDS = ("rope", "attention")
# A mode, and the rows that come of measuring it; what precedes a mode is done when it is asked for.
Measured = tuple[str, Iterator[Row] | Iterator[AttentionRow]]
Rates = Mapping[str, Any]  # as `measure_rates` returns them


class OursError(RuntimeError):
    """One of our own implementations was wrong or failed; the record is complete, and says which."""


@dataclass(frozen=True)
class Job:
    """One case, and the directions or modes that are measured of it."""

    case: object
    label: str
    modes: Sequence[str]
    measure: Callable[[Sequence[str], Rates], Iterator[Measured]]  # the modes in this order, each to its end


@dataclass(frozen=True)
class Plan:
    """All that is going to be measured of one benchmark."""

    benchmark: str  # "rope" or "attention"
    jobs: Sequence[Job]
    peers: Mapping[str, str]  # their versions, or why they are missing
    options: Mapping[str, Any]  # that rows depend on, as JSON has them
    dtypes: Sequence[str] | None  # of the matrix products that rows are held against; None: of no rates at all


@dataclass(frozen=True)
class BenchResult:
    """Where the record is, what is in it, and whether the run was stopped before its end."""

    path: Path
    record: BenchRecord
    interrupted: bool


def run_plans(
    benchmark: str,
    plans: Sequence[Plan],
    device: torch.device,
    *,
    output: Path | None,
    resume: bool,
    seed: int,
    console: Console,
) -> BenchResult:
    """Measure what is planned, write a record and figures beside it, and print a summary.

    Args:
        benchmark: what the record is of: a plan's benchmark, or "all".
        plans: one after another.
        output: the record's file, or None for one under ./results/.
        resume: whether the file is a record that is gone on with: what is whole in it stays and is not measured again.
            Otherwise it must not exist.
        seed: of the inputs.
        console: where to print.

    Raises:
        ValueError: the file exists; or it cannot be resumed, since it was measured by something else.
        OursError: at the end, if one of ours was wrong or failed.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    peers: dict[str, str] = {}
    for name, version in (peer for plan in plans for peer in plan.peers.items()):
        if peers.get(name, MISSING).startswith(MISSING):  # a part of a library may be there, and another not
            peers[name] = version
    options = {plan.benchmark: dict(plan.options) for plan in plans}
    run = {**describe_run(benchmark, device, peers), "seed": seed, "options": options}
    stopped = None
    if resume:
        path, run, stopped = _resume(output, run)
        console.print(f"{len(stopped.units)} measurements in {path} are whole, and stay", highlight=False)
    else:
        path = choose_path(output, run)
    left = list(_left(plans, set() if stopped is None else stopped.units))
    for name, version in peers.items():
        console.print(f"peer {name}: {version}", highlight=False)
    interrupted = False
    if left or stopped is None or not stopped.ended:
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device:
            run = _with_rates(plans, run, device, console)
            with RecordWriter(path, run, None if stopped is None else stopped.lines) as writer:
                interrupted = _measure(left, benchmark, run.get("rates", {}), writer, console)
    else:
        console.print("nothing is left to measure")
    return _show(path, interrupted, console)


def _resume(output: Path | None, run: dict[str, Any]) -> tuple[Path, dict[str, Any], Stopped]:
    """The record's path, the line about the run as it will be, and what there is already."""
    if output is None:
        raise ValueError("there is no record to resume: say with output which")
    stopped = read_stopped(output)
    check_same(output, stopped.run, run)
    resumed = [*stopped.run.get("resumed", ()), run["date"]]
    return output, {**stopped.run, "resumed": resumed}, stopped


def _left(plans: Sequence[Plan], done: set[Unit]) -> Iterator[tuple[str, Job, list[str]]]:
    """What of the plans is not done: the benchmark, the job and its modes."""
    for plan in plans:
        for job in plan.jobs:
            modes = [mode for mode in job.modes if (plan.benchmark, job.case, mode) not in done]
            if modes:
                yield plan.benchmark, job, modes


def _with_rates(plans: Sequence[Plan], run: dict[str, Any], device: torch.device, console: Console) -> dict[str, Any]:
    """The line about the run with the device's rates, where a plan asks for them."""
    wanted = [plan.dtypes for plan in plans if plan.dtypes is not None]
    if not wanted:
        return run
    rates = measure_rates(dict.fromkeys(dtype for dtypes in wanted for dtype in dtypes), device, run.get("rates"))
    products = ", ".join(f"{dtype} {tflops:.4g} TFLOP/s" for dtype, tflops in rates["matmul_tflops"].items())
    console.print(f"copy: {rates['copy_gb_per_s']:.4g} GB/s; matrix product: {products or 'none'}", highlight=False)
    return {**run, "rates": rates}


def _measure(
    left: Sequence[tuple[str, Job, list[str]]], benchmark: str, rates: Rates, writer: RecordWriter, console: Console
) -> bool:
    """Measure what is left, and return whether Ctrl-C ended it."""
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=sum(len(modes) for _, _, modes in left))
        try:
            for of, job, modes in left:
                progress.update(task, description=f"{job.label} {modes[0]}")
                for mode, rows in job.measure(modes, rates):
                    progress.update(task, description=f"{job.label} {mode}")
                    for row in rows:
                        writer.append(row, None if of == benchmark else of)
                    progress.advance(task)
        except KeyboardInterrupt:
            return True
    writer.end()
    return False


def _show(path: Path, interrupted: bool, console: Console) -> BenchResult:
    """Print what a record says, draw its figures, and raise if one of ours was wrong or failed."""
    record = read_bench_record(path)
    rotations, attentions = Record(record.run, record.rotations), AttentionRecord(record.run, record.attentions)
    if record.rotations:
        print_summary(rotations, console)
    if record.attentions:
        print_attention_summary(attentions, console)
    if interrupted:
        text = f"stopped: the {len(record.rows)} rows measured so far are kept; --resume goes on from there"
        console.print(text, style="yellow", highlight=False)
    console.print(f"record: {path}", highlight=False)
    _draw(rotations, attentions, path, console)
    bad = [_describe(row) for row in record.rows if row.kind != "peer" and row.status in ("wrong", "failed")]
    if bad:
        raise OursError(f"{', '.join(bad)}; {path.name} has the rest")
    return BenchResult(path, record, interrupted)


def _describe(row: Row | AttentionRow) -> str:
    if isinstance(row, Row):
        return f"{row.impl} on {row.case.name} {row.case.variant} {row.direction} is {row.status}"
    return f"{row.label} on {row.case.name} {row.mode} is {row.status}"


def _draw(rotations: Record, attentions: AttentionRecord, path: Path, console: Console) -> None:
    try:
        from ropewalk.bench.attention_figure import draw_attention_record
        from ropewalk.bench.figure import draw_record
    except ModuleNotFoundError as error:
        console.print(f"no figure: {error.name} is not installed (pip install 'ropewalk\\[bench]')")
        return
    both = bool(rotations.rows and attentions.rows)
    of_rotations, of_attentions = (
        path.with_name(f"{path.stem}-{name}.png") if both else path.with_suffix(".png")
        for name in ("rope", "attention")
    )
    if draw_record(rotations, of_rotations):
        console.print(f"figure: {of_rotations}", highlight=False)
    if draw_attention_record(attentions, of_attentions):
        console.print(f"figure: {of_attentions}", highlight=False)
