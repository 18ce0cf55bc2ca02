"""The table of every row: columns, and cells as text with what they sort by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.bench.core.timing import HostTime, Quantiles
from ropewalk.bench.report.entries import Entry
from ropewalk.bench.report.formats import MISSING, share, significant


@dataclass(frozen=True)
class Column:
    """A column; a number sorts as one, and is copied in full."""

    key: str
    title: str
    value: Callable[[Entry], str | float | None]
    text: Callable[[float], str] | None = None  # of a number
    shown: bool = True  # or copied alone

    def cell(self, entry: Entry) -> Any:
        """A text, or a number with its text, or None where there is nothing."""
        value = self.value(entry)
        if value is None or self.text is None:
            return value
        assert not isinstance(value, str)
        return [value, self.text(value)]


def _error(value: float) -> str:
    return f"{value:.2g}"


def _quantile(times: Quantiles | None, name: Literal["p10", "p50", "p90"]) -> float | None:
    return None if times is None else {"p10": times.p10, "p50": times.p50, "p90": times.p90}[name]


def _median(host: HostTime | None) -> float | None:
    return None if host is None else host.median


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


COLUMNS = (
    Column("case", "case", lambda entry: entry.case),
    Column("record", "record", lambda entry: entry.record),
    Column("direction", "direction", lambda entry: f"{entry.benchmark} {entry.mode}"),
    Column("dtype", "dtype", lambda entry: entry.dtype),
    Column("implementation", "implementation", lambda entry: entry.label),
    Column("status", "status", lambda entry: entry.status),
    Column("protocol", "protocol", lambda entry: entry.protocol),
    Column("time", "time, µs", lambda entry: _quantile(entry.time, "p50"), significant),
    Column("time_p10", "10 %", lambda entry: _quantile(entry.time, "p10"), significant),
    Column("time_p90", "90 %", lambda entry: _quantile(entry.time, "p90"), significant),
    Column("graph", "graph, µs", lambda entry: _quantile(entry.graph, "p50"), significant),
    Column("gb_per_s", "GB/s", lambda entry: entry.gb_per_s, significant),
    Column("tflops", "TFLOP/s", lambda entry: entry.tflops, significant),
    Column("share", "of the roof", lambda entry: entry.share, share),
    Column("roof", "roof", lambda entry: entry.roof if entry.share is not None else None, shown=False),
    Column("host", "host, µs", lambda entry: _median(entry.host), significant),
    Column("host_forward", "host fwd, µs", lambda entry: _median(entry.host_forward), significant),
    Column("peak", "peak, MiB", lambda entry: _mebibytes(entry.peak_bytes), significant),
    Column("error", "error", lambda entry: entry.error, _error),
    Column("error_budget", "budget", lambda entry: entry.error_budget, _error),
    Column("shape", "shape", lambda entry: entry.shape),
    Column("variant", "variant", lambda entry: entry.variant or None),
    Column("kind", "kind", lambda entry: entry.kind),
    Column("served_by", "run by", lambda entry: entry.served_by),
    Column("reason", "reason", lambda entry: entry.reason),
)


def table_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """Make the columns that any row has a value for, and the rows."""
    several = len({entry.record for entry in entries}) > 1
    columns = [
        column
        for column in COLUMNS
        if any(column.value(entry) is not None for entry in entries) and (column.key != "record" or several)
    ]
    return {
        "columns": [
            {"key": column.key, "title": column.title, "number": column.text is not None, "shown": column.shown}
            for column in columns
        ],
        "rows": [[column.cell(entry) for column in columns] for entry in entries],
        "missing": MISSING,
    }
