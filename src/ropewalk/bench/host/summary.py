"""The summary of a record of the host's benchmark, as a table for the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.host.rows import HostRow


def print_host_summary(record: BenchRecord, console: Console) -> None:
    """Print a line for each time, what ours do not support, and the results that were wrong or failed."""
    device, rows = record.run["device"], record.of(HostRow)
    table = Table(
        title=f"{device}: the host's part of an eager call, in µs{cpu_note(device)}",
        caption="×: the median over that of mul_ in the same rounds; forward and backward: medians of the two parts",
    )
    for heading in ("case", "mode", "impl"):
        table.add_column(heading, overflow="fold")
    for heading in ("least", "median", "95 %", "×", "forward", "backward"):
        table.add_column(heading, justify="right")
    table.add_column("by")
    for _, group in groupby((row for row in rows if row.host is not None), key=lambda row: row.unit):
        for row in group:
            table.add_row(row.case.name, row.mode, row.label, *_figures(row), row.served_by)
        table.add_section()
    console.print(table)
    unsupported: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        if row.status == "unsupported" and row.kind != "peer":
            unsupported.setdefault((row.label, row.reason), []).append(f"{row.case.name} {row.mode}")
    for (name, reason), where in unsupported.items():
        console.print(f"unsupported: {name} on {', '.join(where)}: {reason}", markup=False, highlight=False)
    for row in rows:
        if row.status in ("wrong", "failed"):
            error = "" if row.error is None else f" (error {row.error:.3g}, budget {row.error_budget:.3g})"
            console.print(f"{row.status}: {row.description}: {row.reason}{error}", style="red", highlight=False)


def _figures(row: HostRow) -> list[str]:
    assert row.host is not None
    assert row.multiple is not None
    parts = [None if part is None else part.median for part in (row.forward, row.backward)]
    times = [_microseconds(time) for time in (row.host.least, row.host.median, row.host.p95)]
    return [*times, f"{row.multiple.median:.2f}", *map(_microseconds, parts)]


def _microseconds(time: float | None) -> str:
    return "–" if time is None else f"{time:.{1 if time < 1000 else 0}f}"
