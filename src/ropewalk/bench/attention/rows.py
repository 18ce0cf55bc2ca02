"""Rows of attention's records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.core.load import Unit
from ropewalk.bench.core.timing import HostTime, Quantiles


def label(impl: str, position: str, yardstick: str | None = None) -> str:
    """Name an implementation with its source of positions, and with its case if it is a yardstick."""
    name = impl if position == "none" else f"{impl} + {position}"
    return name if yardstick is None else f"{name} on {yardstick}"


@dataclass(frozen=True)
class GatedRow:
    """The verdict on one implementation on one case and mode: the part of a row that is known before it is timed."""

    case: AttentionCase
    mode: str
    impl: str
    position: str  # "none", the kernel's scheme, or another way: "apply_rope", "two calls", …
    kind: str  # "ours", "peer", or "anchor": what others are held against
    status: str  # "ok", "wrong", "failed" or "unsupported": anything but "ok" was not timed
    reason: str | None = None
    served_by: str | None = None  # ours: which implementation `explain_choice` names
    error: float | None = None  # against float64, where it comes nearest to its budget; None where it is infinite
    error_budget: float | None = None

    @property
    def description(self) -> str:
        """The implementation, the case and the mode in words."""
        return f"{self.label} on {self.case.name} {self.mode}"

    @property
    def label(self) -> str:
        """The name among the rows of its case and mode."""
        return label(self.impl, self.position)


@dataclass(frozen=True)
class AttentionRow(GatedRow):
    """The result of one implementation on one case, mode and protocol. Times are in microseconds."""

    protocol: str | None = None  # "hot" or "cool"
    time: Quantiles | None = None  # on the device, of a call (on a CPU: of the call)
    rounds: int | None = None
    tflops: float | None = None  # by the median
    ratios: dict[str, float] | None = None  # by label, how many times as long others took: medians over rounds
    host: HostTime | None = None  # what an eager call costs the host, where that matters beside its work
    peak_bytes: int | None = None  # memory: of the inputs, and of all that a call holds at its peak
    floor_bytes: int | None = None  # memory: of q, k, v, out, their gradients, and rotated q and k
    yardstick: str | None = None  # anchors: the case that was computed, timed together with `case`; tflops are its
    gb_per_s: float | None = None  # decode: of the keys and values that are there; a copy's of all that it moves
    matrix_ratio: float | None = None  # tflops over those of a hot matrix product, of the run's line; not of decode

    @property
    def unit(self) -> Unit:
        """The case and the mode: their rows are measured together."""
        return "attention", self.case, self.mode

    @property
    def label(self) -> str:
        """The name in `ratios`."""
        return label(self.impl, self.position, self.yardstick)


def attention_row(line: dict[str, Any]) -> AttentionRow:
    """Make a row of a record's line."""
    case = attention_case(line.pop("case"))
    for name, kind in (("time", Quantiles), ("host", HostTime)):
        if line[name] is not None:
            line[name] = kind(**line[name])
    return AttentionRow(case, **line)


def attention_case(fields: dict[str, Any]) -> AttentionCase:
    """Make a case of a record's fields."""
    return AttentionCase(**{**fields, "modes": tuple(fields["modes"])})


def attention_groups(rows: Sequence[AttentionRow]) -> Iterator[list[AttentionRow]]:
    """Group the rows of each case, mode and protocol that were timed together, or measured in bytes."""
    together: dict[tuple[object, ...], list[AttentionRow]] = {}
    for row in rows:
        if row.status == "ok":
            together.setdefault((row.mode, row.case, row.protocol), []).append(row)
    yield from together.values()
