"""Changes between two records beyond the noise, of rows whose case, mode, implementation and protocol are the same.

A value changed if the intervals from the 10 % to the 90 % quantile have nothing in common (for the host, from the least
to the median; bytes have no noise), and the median, or the bytes, changed by more than `FLOOR`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from ropewalk.bench.core.load import Record, Row, differences, label, read_record, to_digits, unit_of, variant_of, words
from ropewalk.bench.core.timing import COPY

FLOOR = 0.01
REGRESSION, ALONE = "regression", "in one alone"
# Keys of the line about a run: if one of them differs, times differ not by the code alone.
_TELL = ("device", "driver_version", "clocks_max_sm", "power_limit", "threads", "torch", "cuda", "triton", "python")
_STYLES = {REGRESSION: "red", "slower": "yellow", "more": "yellow", "faster": "green", "less": "green"}
# What is compared of a row: a key in records, and the keys of the interval.
_DEVICE, _HOST = ("p10", "p50", "p90"), ("least", "median", "median")
_QUANTITIES = {"device": ("time", _DEVICE), "graph": ("graph", _DEVICE), "host": ("host", _HOST)}
_QUANTITIES["host, recording"] = ("host_forward", _HOST)


# What was measured, the implementation, its kind and the quantity; text and interval: a status has none.
Line = tuple[tuple[str, str, str, str], str, float, float, float]


class Change(NamedTuple):
    """One change: of which row and quantity, both texts, and the later median over the earlier one."""

    what: str
    impl: str
    kind: str
    quantity: str
    before: str
    after: str
    ratio: float | None
    verdict: str


class Changes(NamedTuple):
    """All that changed, the worst first, and the number of rows that are in both records."""

    records: tuple[Record, Record]
    found: list[Change]
    compared: int

    @property
    def is_worse(self) -> bool:
        return any(change.verdict == REGRESSION for change in self.found)


def compare_records(
    before: Path, after: Path, *, threshold: float = 0.05, relative: bool = False, every: bool = False
) -> Changes:
    """Compare one record with an earlier one; with `relative`, by times over those of a copy or a matrix product.

    A regression is a change of one of ours (with `every`, of any) for the worse by more than `threshold`, a part of the
    median; or a row that was right and now is wrong, fails, is not supported or is missing.
    """
    records = read_record(before, "rope", "attention", "all"), read_record(after, "rope", "attention", "all")
    old, new = (dict(_lines(record, relative)) for record in records)
    compared = sum(key[-1] == "status" for key in old if key in new)
    if not compared:
        raise ValueError(f"{before.name} and {after.name} have no row in common: nothing can be compared")
    judged = (_judge(old.get(key), new.get(key), threshold, every) for key in sorted(old | new))
    found = [change for change in judged if change is not None]
    found.sort(key=lambda one: (one.verdict != REGRESSION, one.ratio is not None, -(one.ratio or 0)))
    return Changes(records, found, compared)


def _judge(old: Line | None, new: Line | None, threshold: float, every: bool) -> Change | None:
    """Compare what two records have of one quantity; None: nothing changed beyond the noise."""
    found: Any = old or new
    (*_, kind, quantity), before, after = found[0], old[1] if old else "not there", new[1] if new else "gone"
    counts = every or kind == "ours"
    if quantity == "status":
        verdict = REGRESSION if counts and before == "ok" else "changed" if old and new else ALONE
        return None if before == after else Change._make((*found[0], before, after, None, verdict))
    if not old or not new or (old[2] <= new[4] and new[2] <= old[4]) or abs((ratio := new[3] / old[3]) - 1) <= FLOOR:
        return None
    worse, better = ("more", "less") if quantity == "memory" else ("slower", "faster")
    verdict = REGRESSION if counts and ratio > 1 + threshold else worse if ratio > 1 else better
    return Change._make((*found[0], before, after, ratio, verdict))


def _lines(record: Record, relative: bool) -> Iterator[tuple[tuple[str, ...], Line]]:
    """Yield the lines of each row by unit, implementation, protocol and quantity; `unsupported` rows have none."""
    copies = {_unit(row): row for row in record.of("rope") if row["impl"] == COPY}
    for row in (row for row in record.rows if row["status"] != "unsupported"):
        case, protocol, key = row["case"], row.get("protocol", ""), (_unit(row), label(row))
        same = words(case["name"], case["dtype"], variant_of(case), row["mode"], protocol), label(row), row["kind"]
        # A row that was not right has no protocol: its status is compared by itself.
        yield (*key, "", "status"), ((*same, "status"), row["status"], 0.0, 0.0, 0.0)
        if row["status"] != "ok" or (relative and row["kind"] == "anchor"):
            continue
        for quantity, (name, marks) in _QUANTITIES.items():
            if name in row and not (relative and marks is _HOST):
                scale = _scale(row, name, record, copies) if relative else 1.0
                low, middle, high = (row[name][mark] * scale for mark in marks)
                text = to_digits(middle, 4) + ("" if relative else " µs")
                yield (*key, protocol, quantity), ((*same, quantity), text, low, middle, high)
        if "peak_bytes" in row:
            peak = row["peak_bytes"]
            yield (*key, protocol, "memory"), ((*same, "memory"), f"{to_digits(peak / 2**20, 4)} MiB", peak, peak, peak)


def _unit(row: Row) -> str:
    return " ".join(unit_of(row["benchmark"], {**row["case"], "modes": None}, row["mode"]))


def _scale(row: Row, name: str, record: Record, copies: dict[str, Row]) -> float:
    """Return the factor that turns a row's time into a multiple of its anchor's."""
    case, rates = row["case"], record.runs[row["run"]].get("rates", {})
    try:
        if row["benchmark"] == "rope":
            return float(1 / copies[_unit(row)][name]["p50"])
        return float(rates["copy_gb_per_s"] if case.get("form") == "cache" else rates["matmul_tflops"][case["dtype"]])
    except KeyError:
        what = f"{case['name']} {row['mode']}"
        raise ValueError(f"{record.path.name} does not have what the times of {what} would be relative to") from None


def print_changes(changes: Changes, threshold: float, console: Console) -> None:
    """Print the two runs, the changes beyond the noise, and the number of regressions."""
    for record, name in zip(changes.records, "AB", strict=True):
        run, dirty = record.run, ", dirty" if record.run.get("dirty") else ""
        at = f"{run['device']}, {run.get('date')}, commit {str(run.get('commit'))[:10]}{dirty}"
        console.print(f"{name}: {record.path.name}, {at}", highlight=False)
    for name, old, new in differences(_TELL, changes.records[0].run, changes.records[1].run):
        console.print(f"NOTE: {name} was {old!r}, and is {new!r}", style="bold yellow", highlight=False)
    headings = ("what", "implementation", "kind", "of", "A", "B", "change", "")
    table = Table(*(Column(heading, overflow="fold") for heading in headings), title="what changed, from A to B")
    for *said, ratio, verdict in changes.found:
        # A record without peers is often compared with one that has them: those are counted, not listed.
        if verdict != ALONE or said[2] == "ours":
            part = "–" if ratio is None else f"{ratio - 1:+.1%}"
            table.add_row(*said, part, verdict, style=_STYLES.get(verdict))
    if table.row_count:
        console.print(table)
    counted = Counter(change.verdict for change in changes.found).most_common()
    text = ", ".join(f"{count} {verdict}" for verdict, count in counted) or "nothing changed beyond the noise"
    console.print(f"{changes.compared} rows compared: {text}", highlight=False)
    if changes.is_worse:
        text = f"regressions: worse by more than {threshold:.1%}, or no longer right"
        console.print(text, style="red", highlight=False)
