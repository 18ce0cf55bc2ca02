"""The summary of a record, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.rope.rows import RopeRow


def groups(rows: Sequence[RopeRow]) -> Iterator[list[RopeRow]]:
    """Group the rows of each case, variant and direction, which were measured together."""
    together: dict[tuple[object, str], list[RopeRow]] = {}
    for row in rows:
        together.setdefault((row.case, row.direction), []).append(row)
    yield from together.values()


def best_peer(row: RopeRow, group: Sequence[RopeRow]) -> tuple[str, float] | None:
    """Return the fastest peer of a group, and how many times as fast `row` is: in a graph if `row` has one."""
    in_graph = row.graph is not None
    own = row.best_time(in_graph)
    peers = [(time, peer.impl) for peer in group if peer.kind == "peer" and (time := peer.best_time(in_graph))]
    if own is None or not peers:
        return None
    time, name = min(peers)
    return name, time / own


def print_rope_summary(record: BenchRecord, console: Console) -> None:
    """Print a line for each of our implementations on each case, and the results that were wrong or failed."""
    rows = record.of(RopeRow)
    table = Table(title=f"{record.run['device']}, times in µs (medians){cpu_note(record.run['device'])}")
    for heading in ("case", "variant", "direction", "impl"):
        table.add_column(heading, overflow="fold")
    for heading in ("time", "in graph", "GB/s", "of copy", "host", "best peer", "against it"):
        table.add_column(heading, justify="right")
    for group in groups(rows):
        for row in group:
            if row.kind == "ours" and row.time is not None:
                table.add_row(row.case.name, row.case.variant, row.direction, row.impl, *_figures(row, group))
    console.print(table)
    for row in rows:
        if row.status in ("wrong", "failed"):
            error = "" if row.error is None else f" (error {row.error:.3g}, budget {row.error_budget:.3g})"
            console.print(f"{row.status}: {row.description}: {row.reason}{error}", style="red", highlight=False)


def _figures(row: RopeRow, group: Sequence[RopeRow]) -> list[str]:
    assert row.time is not None
    peer = best_peer(row, group)
    return [
        f"{row.time.p50:.1f}",
        f"{row.graph.p50:.2f}" if row.graph else "–",
        f"{row.gb_per_s:.4g}" if row.gb_per_s is not None else "–",
        f"{row.copy_ratio:.3f}" if row.copy_ratio is not None else "–",
        f"{row.host.median:.1f}" if row.host else "–",
        peer[0] if peer else "–",
        f"{peer[1]:.2f}×" if peer else "–",
    ]
