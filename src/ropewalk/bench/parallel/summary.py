"""The summary of a record of context parallelism, and its verdict on each target."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.parallel.rows import ParallelRow

TARGET_RANKS = 2  # that the cases' targets are for


def print_parallel_summary(record: BenchRecord, console: Console) -> None:
    """Print the measurements, what was wrong, and whether ours met the targets."""
    run, rows = record.run, record.of(ParallelRow)
    table = Table(
        title=f"{run['ranks']} × {run['device']}: forward and backward{cpu_note(run['device'])}",
        caption="efficiency: the time on one process over n times this one; ×: its time over ours; MB: a rank received",
    )
    for heading in ("case", "candidate", "by"):
        table.add_column(heading, overflow="fold")
    for heading in ("ms", "10 %", "90 %", "efficiency", "×", "MB", "peak, GiB", "tokens/s", "error / budget"):
        table.add_column(heading, justify="right")
    for _, group in groupby((row for row in rows if row.time is not None), key=lambda row: row.unit):
        shown = list(group)
        over = next((row.speed_over or {} for row in shown if row.kind == "ours"), {})
        for row in shown:
            table.add_row(row.case.name, row.impl, row.served_by, *_figures(row, over.get(row.impl)))
        table.add_section()
    console.print(table)
    for row in rows:
        if row.status in ("wrong", "failed"):
            console.print(f"{row.status}: {row.description}: {row.reason}", style="red", markup=False, highlight=False)
    if run["ranks"] != TARGET_RANKS or run["options"]["parallel"]["quick"]:
        return
    for row in rows:
        if row.kind == "ours" and row.efficiency is not None and row.case.target is not None:
            verdict = "met" if row.efficiency >= row.case.target else "missed"
            text = f"{verdict}: {row.case.name}: efficiency {row.efficiency:.3f}, ought to be ≥ {row.case.target}"
            console.print(text, highlight=False, style=None if verdict == "met" else "yellow")


def _figures(row: ParallelRow, over: float | None) -> list[str]:
    assert row.time is not None
    times = [f"{time / 1e3:.3f}" for time in (row.time.p50, row.time.p10, row.time.p90)]
    return [
        *times,
        "–" if row.efficiency is None else f"{row.efficiency:.3f}",
        "–" if over is None else f"{over:.2f}",
        "–" if row.bytes_received is None else f"{row.bytes_received / 1e6:.1f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
        "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "–" if row.error is None else f"{row.error:.2f}",
    ]
