"""The summary of a record of attention, as tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ropewalk.bench.attention.cases import MODES
from ropewalk.bench.attention.rows import AttentionRow, attention_groups
from ropewalk.bench.attention.targets import targets
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note

_CAPTION = (
    "TFLOP/s or GB/s; median µs; ×: the first column's speed over this one's; of matmul: of a matrix product's rate"
)


def print_attention_summary(record: BenchRecord, console: Console) -> None:
    """Print times and bytes, the targets that are met, and the results that were wrong or failed."""
    rows = record.of(AttentionRow)
    for mode in MODES:
        groups = [group for group in attention_groups(rows) if group[0].mode == mode]
        if not groups:
            continue
        if mode == "memory":
            console.print(_memory_table(groups))
        else:
            device = record.run["device"]
            console.print(_times_table(f"{device}: {mode}, {MODES[mode]}{cpu_note(device)}", groups))
    _print_targets(record, console)
    for row in rows:
        if row.status in ("wrong", "failed") or (row.status == "unsupported" and row.kind != "peer"):
            error = "" if row.error is None else f" (error {row.error:.3g}, budget {row.error_budget:.3g})"
            console.print(f"{row.status}: {row.description}: {row.reason}{error}", style="red", highlight=False)


def _times_table(title: str, groups: list[list[AttentionRow]]) -> Table:
    """Make a line for each case and protocol; the first column is ours, and the others compare ours to them."""
    labels = list(dict.fromkeys(row.label for group in groups for row in group))
    table = Table(title=title, caption=_CAPTION)
    table.add_column("case", overflow="fold")
    table.add_column("protocol")
    for name in labels:
        table.add_column(name, justify="right")
    for group in groups:
        rows = {row.label: row for row in group}
        lead = group[0]
        cells = [_cell(rows[name], lead) if name in rows else "–" for name in labels]
        table.add_row(lead.case.name, lead.protocol, *cells)
    return table


def _cell(row: AttentionRow, lead: AttentionRow) -> str:
    assert row.time is not None
    rate = f"{row.tflops:.3g}" if row.gb_per_s is None else f"{row.gb_per_s:.4g} GB/s"
    parts = [rate, f"{row.time.p50:.{1 if row.time.p50 < 1000 else 0}f} µs"]
    ratio = (lead.ratios or {}).get(row.label)
    if ratio is not None:
        parts.append(f"{ratio:.3f}×")
    if row.matrix_ratio is not None:
        parts.append(f"{row.matrix_ratio:.2f} of matmul")
    if row.host is not None:
        parts.append(f"host {row.host.median:.0f}")
    if row.served_by not in (None, row.impl):
        parts.append(f"by {row.served_by}")
    return " ".join(parts)


def _memory_table(groups: list[list[AttentionRow]]) -> Table:
    table = Table(title=MODES["memory"])
    for heading in ("case", "impl", "peak, MiB", "inputs, outputs, gradients, rotated q and k, MiB", "ratio"):
        table.add_column(heading)
    for group in groups:
        for row in group:
            assert row.peak_bytes is not None
            assert row.floor_bytes is not None
            peak, floor = row.peak_bytes / 2**20, row.floor_bytes / 2**20
            table.add_row(row.case.name, row.label, f"{peak:.0f}", f"{floor:.0f}", f"{peak / floor:.3f}")
    return table


def _print_targets(record: BenchRecord, console: Console) -> None:
    found = targets(record)
    if not found:
        return
    table = Table(title="targets")
    for heading in ("what", "case", "protocol", "is", "ought to be", "met"):
        table.add_column(heading, overflow="fold")
    for target in found:
        bound = f"{'≥' if target.at_least else '≤'} {target.bound:.2f}"
        met = "yes" if target.met else "[red]no[/red]"
        table.add_row(target.what, target.case, target.protocol or "–", f"{target.value:.3f}", bound, met)
    console.print(table)
