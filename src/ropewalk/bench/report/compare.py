"""Changes between two records of the kernels' benchmarks, beyond the noise.

Rows are compared if benchmark, case, direction or mode, implementation, source of positions and protocol are the same:
their time on the device, time in a CUDA graph, host time and peak of memory, each if both have it. A value changed if

- the measurements are apart: the intervals from the 10 % to the 90 % quantile have nothing in common (for the host:
  the least of one is above the median of the other; bytes have no noise);
- and the median, or the bytes, changed by more than `FLOOR`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.timing import COPY, Quantiles
from ropewalk.bench.rope.rows import RopeRow

FLOOR = 0.01
GONE, ABSENT = "gone", "not there"


class Interval(NamedTuple):
    """The interval of most measurements, and its middle."""

    low: float
    middle: float
    high: float


class Key(NamedTuple):
    """The identity of a row, but for the protocol."""

    benchmark: str
    case: object  # without the modes in which it is measured, which say nothing of one of them
    mode: str
    impl: str
    position: str
    yardstick: str | None


@dataclass
class Entry:
    """The measurements of one key in a record."""

    label: str
    impl: str
    kind: str
    status: str
    measured: dict[str | None, dict[str, Interval]] = field(default_factory=dict)  # by protocol, by quantity


@dataclass(frozen=True)
class Change:
    """One difference between the records."""

    label: str
    impl: str
    kind: str
    quantity: str  # "device", "graph", "host", "host, recording" or "memory"; "status"
    before: str
    after: str
    ratio: float | None  # of what was measured: after over before
    regression: bool

    @property
    def alone(self) -> bool:
        """Whether it is in one of the records alone."""
        return self.after == GONE or self.before == ABSENT

    @property
    def verdict(self) -> str:
        """The meaning in one word."""
        if self.regression:
            return "regression"
        if self.ratio is None:
            return "in one alone" if self.alone else "changed"
        if self.quantity == "memory":
            return "more" if self.ratio > 1 else "less"
        return "slower" if self.ratio > 1 else "faster"


@dataclass(frozen=True)
class Comparison:
    """All that changed, the worst first, and how many rows were compared."""

    changes: list[Change]
    compared: int

    @property
    def regressions(self) -> list[Change]:
        """Those that ought to fail."""
        return [change for change in self.changes if change.regression]


def compare_records(
    before: BenchRecord, after: BenchRecord, *, threshold: float = 0.05, relative: bool = False, every: bool = False
) -> Comparison:
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
    old, new = _entries(before, relative), _entries(after, relative)
    if old.keys().isdisjoint(new):
        raise ValueError(f"{before.path.name} and {after.path.name} have no row in common: nothing can be compared")
    changes: list[Change] = []
    compared = 0
    for key in dict.fromkeys((*old, *new)):
        compared += key in old and key in new
        changes += _compare_entries(old.get(key), new.get(key), threshold, relative, every)
    return Comparison(sorted(changes, key=_rank), compared)


def _rank(change: Change) -> tuple[bool, bool, float]:
    return not change.regression, change.ratio is not None, -(change.ratio or 0.0)


def _entries(record: BenchRecord, relative: bool) -> dict[Key, Entry]:
    """Collect a record's measurements by key; `unsupported` rows have none."""
    entries: dict[Key, Entry] = {}
    scale = _scales(record) if relative else None
    rows: list[RopeRow | AttentionRow] = [*record.of(RopeRow), *record.of(AttentionRow)]
    for row in rows:
        if row.status == "unsupported":
            continue
        key, protocol, label = _identify(row)
        entry = entries.setdefault(key, Entry(label, _impl(row), row.kind, row.status))
        if row.status == "ok" and (scale is None or row.kind != "anchor"):
            entry.measured[protocol] = dict(_quantities(row, scale))
    return entries


def _identify(row: RopeRow | AttentionRow) -> tuple[Key, str | None, str]:
    case = row.case
    if isinstance(row, RopeRow):
        key = Key("rope", replace(row.case, directions=()), row.direction, row.impl, "", None)
        return key, None, f"{case.name} {case.dtype} {row.case.variant} {row.direction}"
    key = Key("attention", replace(row.case, modes=()), row.mode, row.impl, row.position, row.yardstick)
    return key, row.protocol, f"{case.name} {case.dtype} {row.mode}"


def _impl(row: RopeRow | AttentionRow) -> str:
    return row.impl if isinstance(row, RopeRow) else row.label


# A row, and whether it is of its time in a graph -> what its times are multiplied by.
Scale = Callable[[RopeRow | AttentionRow, bool], float]


def _quantities(row: RopeRow | AttentionRow, scale: Scale | None) -> Iterator[tuple[str, Interval]]:
    def times(of: Quantiles, graph: bool) -> Interval:
        factor = 1.0 if scale is None else scale(row, graph)
        return Interval(of.p10 * factor, of.p50 * factor, of.p90 * factor)

    if row.time is not None:
        yield "device", times(row.time, False)
    if isinstance(row, RopeRow) and row.graph is not None:
        yield "graph", times(row.graph, True)
    hosts = {"host": row.host, "host, recording": row.host_forward if isinstance(row, RopeRow) else None}
    for name, host in hosts.items():
        if host is not None and scale is None:
            yield name, Interval(host.least, host.median, host.median)
    if row.peak_bytes is not None:
        yield "memory", Interval(row.peak_bytes, row.peak_bytes, row.peak_bytes)


def _scales(record: BenchRecord) -> Scale:
    """Make the factor that turns a record's times into multiples of its anchors."""
    copies = {(row.case, row.direction): row for row in record.of(RopeRow) if row.impl == COPY}
    rates: Mapping[str, Any] = record.run.get("rates", {})

    def scale(row: RopeRow | AttentionRow, graph: bool) -> float:
        if isinstance(row, RopeRow):
            copy = copies.get((row.case, row.direction))
            time = None if copy is None else copy.best_time(graph)
            rate = None if time is None else 1 / time
        elif row.case.form == "cache":
            rate = rates.get("copy_gb_per_s")
        else:
            rate = rates.get("matmul_tflops", {}).get(row.case.dtype)
        if rate is None:
            label = _identify(row)[2]
            raise ValueError(f"{record.path.name} does not have what the times of {label} would be relative to")
        return rate

    return scale


def _compare_entries(
    old: Entry | None, new: Entry | None, threshold: float, relative: bool, every: bool
) -> Iterator[Change]:
    known = old or new
    assert known is not None
    counts = every or known.kind == "ours"

    def status(label: str, before: str, after: str) -> Change:
        worse = before == "ok" and after != "ok"
        return Change(label, known.impl, known.kind, "status", before, after, None, worse and counts)

    was, now = (GONE if entry is None else entry.status for entry in (old, new))
    if was != now:
        yield status(known.label, ABSENT if old is None else was, now)
    if old is None or new is None:
        return
    for protocol in dict.fromkeys((*old.measured, *new.measured)):
        label = known.label if protocol is None else f"{known.label} {protocol}"
        before, after = old.measured.get(protocol, {}), new.measured.get(protocol, {})
        for quantity in dict.fromkeys((*before, *after)):
            if quantity in before and quantity in after:
                ratio = changed(before[quantity], after[quantity])
                if ratio is not None:
                    a, b = (_text(quantity, x[quantity].middle, relative) for x in (before, after))
                    worse = ratio > 1 + threshold
                    yield Change(label, known.impl, known.kind, quantity, a, b, ratio, worse and counts)
            elif was == now == "ok":
                there = ("ok", GONE) if quantity in before else (ABSENT, "ok")
                yield status(f"{label}, {quantity}", *there)


def changed(before: Interval, after: Interval) -> float | None:
    """Return the middle over the earlier middle, or None if that is noise or too little."""
    if before.low <= after.high and after.low <= before.high:
        return None
    ratio = after.middle / before.middle if before.middle else math.inf
    return ratio if abs(ratio - 1) > FLOOR else None


def _text(quantity: str, value: float, relative: bool) -> str:
    if quantity == "memory":
        return f"{value / 2**20:.4g} MiB"
    return f"{value:.4g}" if relative else f"{value:.4g} µs"
