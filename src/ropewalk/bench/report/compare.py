"""Changes between two records beyond the noise.

Rows are compared if benchmark, case, mode, implementation, source of positions and protocol are the same: their time on
the device, time in a CUDA graph, host time and peak of memory, each if both have it. A value changed if

- the measurements are apart: the intervals from the 10 % to the 90 % quantile have nothing in common (for the host:
  the least of one is above the median of the other; bytes have no noise);
- and the median, or the bytes, changed by more than `FLOOR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.load import Record, Row, differences, label, read_record, unit_of, variant_of
from ropewalk.bench.core.timing import COPY

if TYPE_CHECKING:
    import pandas as pd

FLOOR = 0.01
GONE, ABSENT = "gone", "not there"
READ = ("rope", "attention", "all")
# Keys of the line about a run: if one of them differs, times differ not by the code alone.
_TELL = ("device", "driver_version", "clocks_max_sm", "power_limit", "threads", "torch", "cuda", "triton", "python")
_STYLES = {"regression": "red", "slower": "yellow", "more": "yellow", "faster": "green", "less": "green"}
_KEY = ["unit", "impl", "protocol", "quantity"]


@dataclass(frozen=True)
class Changes:
    """All that changed, the worst first, with columns what, impl, kind, quantity, A, B, ratio, verdict."""

    records: tuple[Record, Record]
    table: pd.DataFrame
    compared: int  # rows that are in both
    relative: bool

    @property
    def is_worse(self) -> bool:
        """Whether there is a regression."""
        return bool((self.table["verdict"] == "regression").any())


def compare_records(
    before: Path, after: Path, *, threshold: float = 0.05, relative: bool = False, every: bool = False
) -> Changes:
    """Compare one record with an earlier one.

    Args:
        threshold: a regression is a change for the worse beyond the noise by more than this part of the median.
        relative: take times on the device as multiples of what the device could do at best: of the copy beside them
            for rotations and decoding, else of the matrix product in the run's rates. Times of the host do not count.
        every: whether what is not ours can be a regression too.

    A row that was right and now is wrong, fails, is not supported or is missing is a regression too.

    Raises:
        ValueError: no row is in both records, or `relative` lacks what times are relative to.
    """
    records = read_record(before, *READ), read_record(after, *READ)
    old, new = (_frame(record, relative) for record in records)
    both = old.merge(new, how="outer", on=_KEY, suffixes=("_a", "_b"), sort=False)
    for name in ("what", "kind"):
        both[name] = both[f"{name}_a"].fillna(both[f"{name}_b"])
    status = both["quantity"] == "status"
    compared = int((status & both["value_a"].notna() & both["value_b"].notna()).sum())
    if not compared:
        raise ValueError(f"{before.name} and {after.name} have no row in common: nothing can be compared")
    counts = (both["kind"] == "ours") | every
    was, now = both["value_a"].fillna(ABSENT), both["value_b"].fillna(GONE)
    lost = status & (was == "ok") & (now != "ok")
    apart = (both["low_a"] > both["high_b"]) | (both["low_b"] > both["high_a"])
    ratio = (both["middle_b"] / both["middle_a"]).where(~status)
    changed = ~status & apart & ((ratio - 1).abs() > FLOOR)
    verdict = (
        both["quantity"]
        .map(lambda name: "more" if name == "memory" else "slower")
        .where(ratio > 1, both["quantity"].map(lambda name: "less" if name == "memory" else "faster"))
    )
    alone = status & (both["value_a"].isna() | both["value_b"].isna())
    verdict = verdict.mask(status, "changed").mask(alone, "in one alone")
    both["verdict"] = verdict.mask(counts & (lost | (changed & (ratio > 1 + threshold))), "regression")
    both["ratio"], both["A"], both["B"] = ratio, was, now
    table = both[(status & (was != now)) | changed].copy()
    table["order"] = table["verdict"] != "regression"
    table = table.sort_values(["order", "ratio"], ascending=[True, False], na_position="first", kind="stable")
    return Changes(records, table, compared, relative)


def _frame(record: Record, relative: bool) -> pd.DataFrame:
    """A line for each quantity of each row, and one for its status; `unsupported` rows have none."""
    import pandas as pd

    copies = {_unit(row): row for row in record.rows if row["impl"] == COPY and row["benchmark"] == "rope"}
    lines = [
        line
        for row in record.rows
        if row["status"] != "unsupported"
        for line in _lines(row, record, copies if relative else None)
    ]
    columns = [*_KEY, "what", "kind", "value", "low", "middle", "high"]
    return pd.DataFrame(lines, columns=columns).drop_duplicates(_KEY, keep="last")


def _unit(row: Row) -> str:
    case = {name: value for name, value in row["case"].items() if name != "modes"}
    return " ".join(unit_of(row["benchmark"], case, row["mode"]))


def _lines(row: Row, record: Record, copies: dict[str, Row] | None) -> Iterator[tuple[Any, ...]]:
    case, protocol = row["case"], row.get("protocol", "")
    parts = (case["name"], case["dtype"], variant_of(case), row["mode"], protocol)
    what = " ".join(part for part in parts if part)
    key = _unit(row), label(row), protocol
    # A row that was not right has no protocol: its status is compared by itself.
    yield key[0], key[1], "", "status", what, row["kind"], row["status"], None, None, None
    is_anchor = copies is not None and row["kind"] == "anchor"
    if row["status"] != "ok" or is_anchor:
        return
    for quantity, name in (("device", "time"), ("graph", "graph")):
        if name in row:
            scale = 1.0 if copies is None else _scale(row, name, record, copies)
            low, middle, high = (row[name][quantile] * scale for quantile in ("p10", "p50", "p90"))
            yield *key, quantity, what, row["kind"], _text(middle, copies is not None), low, middle, high
    for quantity, name in (("host", "host"), ("host, recording", "host_forward")):
        if name in row and copies is None:
            least, middle = row[name]["least"], row[name]["median"]
            yield *key, quantity, what, row["kind"], _text(middle, False), least, middle, middle
    if "peak_bytes" in row:
        peak = row["peak_bytes"]
        yield *key, "memory", what, row["kind"], f"{peak / 2**20:.4g} MiB", peak, peak, peak


def _text(time: float, relative: bool) -> str:
    return f"{time:.4g}" if relative else f"{time:.4g} µs"


def _scale(row: Row, name: str, record: Record, copies: dict[str, Row]) -> float:
    """Return the factor that turns a row's time into a multiple of its anchor's."""
    rates = record.runs[row["run"]].get("rates", {})
    if row["benchmark"] == "rope":
        copy = copies.get(_unit(row), {}).get(name)
        rate = None if copy is None else 1 / copy["p50"]
    elif row["case"].get("form") == "cache":
        rate = rates.get("copy_gb_per_s")
    else:
        rate = rates.get("matmul_tflops", {}).get(row["case"]["dtype"])
    if rate is None:
        what = f"{row['case']['name']} {row['mode']}"
        raise ValueError(f"{record.path.name} does not have what the times of {what} would be relative to")
    return float(rate)


def print_changes(changes: Changes, threshold: float, console: Console) -> None:
    """Print the two runs, the changes beyond the noise, and the number of regressions."""
    for record, name in zip(changes.records, "AB", strict=True):
        run = record.run
        commit = f"{str(run.get('commit'))[:10]}{', dirty' if run.get('dirty') else ''}"
        text = f"{name}: {record.path.name}, {run['device']}, {run.get('date')}, commit {commit}"
        console.print(text, highlight=False)
    for name, old, new in differences(_TELL, changes.records[0].run, changes.records[1].run):
        console.print(f"NOTE: {name} was {old!r}, and is {new!r}", style="bold yellow", highlight=False)
    found = changes.table
    # A record without peers is often compared with one that has them: those are counted, not listed.
    listed = found[(found["verdict"] != "in one alone") | (found["kind"] == "ours")]
    if len(listed):
        table = Table(title="what changed, from A to B")
        for heading in ("what", "implementation", "kind", "of", "A", "B", "change", ""):
            table.add_column(heading, overflow="fold")
        for row in listed.itertuples():
            part = f"{row.ratio - 1:+.1%}" if row.ratio == row.ratio else "–"
            cells = (row.what, row.impl, row.kind, row.quantity, row.A, row.B, part, row.verdict)
            table.add_row(*map(str, cells), style=_STYLES.get(str(row.verdict)))
        console.print(table)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found["verdict"].value_counts().items())
    said = counts or "nothing changed beyond the noise"
    console.print(f"{changes.compared} rows compared: {said}", highlight=False)
    if changes.is_worse:
        text = f"regressions: worse by more than {threshold:.1%}, or no longer right"
        console.print(text, style="red", highlight=False)
