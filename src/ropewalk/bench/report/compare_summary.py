"""The summary of a comparison of two records, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.resume import differences
from ropewalk.bench.report.compare import Change, Comparison

# Keys of the line about a run: if one of them differs, times differ not by the code alone.
_TELL = ("device", "driver_version", "clocks_max_sm", "power_limit", "threads", "torch", "cuda", "triton", "python")
_STYLES = {"regression": "red", "slower": "yellow", "more": "yellow", "faster": "green", "less": "green"}


def print_comparison(
    comparison: Comparison, before: BenchRecord, after: BenchRecord, threshold: float, console: Console
) -> None:
    """Print the two runs, the changes beyond the noise, and the number of regressions."""
    for record, name in ((before, "A"), (after, "B")):
        run = record.run
        commit = f"{str(run.get('commit'))[:10]}{', dirty' if run.get('dirty') else ''}"
        console.print(
            f"{name}: {record.path.name}, {run['device']}, {run.get('date')}, commit {commit}", highlight=False
        )
    for name, old, new in differences(_TELL, before.run, after.run):
        console.print(f"NOTE: {name} was {old!r}, and is {new!r}", style="bold yellow", highlight=False)
    # A record without peers is often compared with one that has them: those are counted, not listed.
    listed = [change for change in comparison.changes if change.regression or change.kind == "ours" or not change.alone]
    if listed:
        console.print(_table(listed))
    counts: dict[str, int] = {}
    for change in comparison.changes:
        counts[change.verdict] = counts.get(change.verdict, 0) + 1
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing changed beyond the noise"
    console.print(f"{comparison.compared} rows compared: {found}", highlight=False)
    if comparison.regressions:
        console.print(
            f"regressions: worse by more than {threshold:.1%}, or no longer right", style="red", highlight=False
        )


def _table(changes: Sequence[Change]) -> Table:
    table = Table(title="what changed, from A to B")
    for heading in ("what", "implementation", "kind", "of"):
        table.add_column(heading, overflow="fold")
    for heading in ("A", "B", "change"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in changes:
        part = "–" if change.ratio is None else f"{change.ratio - 1:+.1%}"
        cells = (change.label, change.impl, change.kind, change.quantity, change.before, change.after, part)
        table.add_row(*cells, change.verdict, style=_STYLES.get(change.verdict))
    return table
