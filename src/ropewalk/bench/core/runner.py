"""The run of the kernels' benchmarks: measure the plans case by case, record, print and draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ropewalk.bench.core.load import BenchRecord, ParseRow, Row, Unit, load_record
from ropewalk.bench.core.options import MISSING, choose_path
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.resume import Stopped, read_stopped
from ropewalk.bench.core.roofline import measure_rates
from ropewalk.bench.core.terminal import progress_bar

# A mode, and its rows; the work before a mode is done when the iterator reaches it.
Measured = tuple[str, Iterator[Row]]
Rates = Mapping[str, Any]  # as `measure_rates` returns them


class OursError(RuntimeError):
    """One of our own implementations was wrong or failed; the record is complete and has the reason."""


@dataclass(frozen=True)
class Job:
    """One case, and the directions or modes to measure."""

    case: object
    label: str
    modes: Sequence[str]
    measure: Callable[[Sequence[str], Rates], Iterator[Measured]]  # the modes in this order, each to its end


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of kernels: its rows, its summary and its figure."""

    name: str  # as records have it
    parse_row: ParseRow
    print_summary: Callable[[BenchRecord, Console], None]
    draw: Callable[[BenchRecord, Path], bool]  # loads matplotlib; False: there is nothing to draw


@dataclass(frozen=True)
class Plan:
    """The measurements to take of one benchmark."""

    benchmark: Benchmark
    jobs: Sequence[Job]
    peers: Mapping[str, str]  # their versions, or why they are missing
    options: Mapping[str, Any]  # that rows depend on, as JSON has them
    dtypes: Sequence[str] | None  # of the matrix products that rows are held against; None: of no rates at all


@dataclass(frozen=True)
class BenchResult:
    """The record of a run, and whether the run was stopped before its end."""

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
    """Measure the plans, write a record and figures beside it, and print a summary.

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
    options = {plan.benchmark.name: dict(plan.options) for plan in plans}
    run = {**describe_run(benchmark, device, peers), "seed": seed, "options": options}
    stopped = None
    if resume:
        path, run, stopped = _resume(output, run, plans)
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
    return _show(path, [plan.benchmark for plan in plans], interrupted, console)


def _resume(output: Path | None, run: dict[str, Any], plans: Sequence[Plan]) -> tuple[Path, dict[str, Any], Stopped]:
    """Return the record's path, the line about the run as it will be, and the measurements that stay."""
    if output is None:
        raise ValueError("there is no record to resume: say with output which")
    stopped = read_stopped(output, run, {plan.benchmark.name: plan.benchmark.parse_row for plan in plans})
    resumed = [*stopped.run.get("resumed", ()), run["date"]]
    return output, {**stopped.run, "resumed": resumed}, stopped


def _left(plans: Sequence[Plan], done: set[Unit]) -> Iterator[tuple[str, Job, list[str]]]:
    """Yield the rest of the plans: the benchmark, the job and its modes."""
    for plan in plans:
        for job in plan.jobs:
            modes = [mode for mode in job.modes if (plan.benchmark.name, job.case, mode) not in done]
            if modes:
                yield plan.benchmark.name, job, modes


def _with_rates(plans: Sequence[Plan], run: dict[str, Any], device: torch.device, console: Console) -> dict[str, Any]:
    """Add the device's rates to the line about the run, if a plan needs them."""
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
    """Measure the rest, and return whether Ctrl-C ended it."""
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


def _show(path: Path, benchmarks: Sequence[Benchmark], interrupted: bool, console: Console) -> BenchResult:
    """Print and draw a record, and raise if one of ours was wrong or failed."""
    record = load_record(path, {benchmark.name: benchmark.parse_row for benchmark in benchmarks})
    measured = {row.unit[0] for row in record.rows}
    benchmarks = [benchmark for benchmark in benchmarks if benchmark.name in measured]
    for benchmark in benchmarks:
        benchmark.print_summary(record, console)
    if interrupted:
        text = f"stopped: the {len(record.rows)} rows measured so far are kept; --resume goes on from there"
        console.print(text, style="yellow", highlight=False)
    console.print(f"record: {path}", highlight=False)
    try:
        _draw(record, benchmarks, console)
    except ModuleNotFoundError as error:
        console.print(rf"no figure: {error.name} is not installed (pip install 'ropewalk\[bench]')")
    bad = [row for row in record.rows if row.kind != "peer" and row.status in ("wrong", "failed")]
    if bad:
        names = ", ".join(f"{row.description} is {row.status}" for row in bad)
        raise OursError(f"{names}; {path.name} has the rest")
    return BenchResult(path, record, interrupted)


def _draw(record: BenchRecord, benchmarks: Sequence[Benchmark], console: Console) -> None:
    """Draw a figure beside the record, or one for each benchmark if there are several."""
    for benchmark in benchmarks:
        several = len(benchmarks) > 1
        path = record.path
        path = path.with_name(f"{path.stem}-{benchmark.name}.png") if several else path.with_suffix(".png")
        if benchmark.draw(record, path):
            console.print(f"figure: {path}", highlight=False)
