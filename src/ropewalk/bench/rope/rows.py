"""Rows of the rotation's records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk.bench.core.load import Unit
from ropewalk.bench.core.timing import HostTime, Quantiles
from ropewalk.bench.rope.cases import Case


@dataclass(frozen=True)
class RopeRow:
    """The result of one implementation on one case and direction. Times are in microseconds."""

    case: Case
    direction: str  # "fwd", "bwd" or "decode"
    impl: str
    kind: str  # "ours", "peer" or "anchor"
    status: str  # "ok", "wrong", "failed" or "unsupported": anything but "ok" was not timed
    reason: str | None = None
    error: float | None = None  # the largest absolute error against float64; None where it is infinite
    error_budget: float | None = None
    time: Quantiles | None = None  # on the device, cold cache (on a CPU: of the call)
    gb_per_s: float | None = None
    copy_ratio: float | None = None  # the time of a copy of the same bytes over this time
    graph: Quantiles | None = None  # a call inside a CUDA graph of many, warm cache
    graph_reason: str | None = None  # why there is no `graph`, where there ought to be one
    host: HostTime | None = None  # what an eager call costs the host
    host_forward: HostTime | None = None  # bwd: the forward call that records for autograd
    peak_bytes: int | None = None  # device memory beyond the inputs

    @property
    def unit(self) -> Unit:
        """The case and the direction: their rows are measured together."""
        return "rope", self.case, self.direction

    @property
    def description(self) -> str:
        """The implementation, the case and the direction in words."""
        return f"{self.impl} on {self.case.name} {self.case.variant} {self.direction}"

    def best_time(self, graph: bool) -> float | None:
        """Return the median in a graph, or on the cold device."""
        times = self.graph if graph else self.time
        return None if times is None else times.p50


def rope_row(line: dict[str, Any]) -> RopeRow:
    """Make a row of a record's line."""
    case = line.pop("case")
    tuples = {name: tuple(case[name]) for name in ("sequences", "directions")}
    for name, kind in (("time", Quantiles), ("graph", Quantiles), ("host", HostTime), ("host_forward", HostTime)):
        if line[name] is not None:
            line[name] = kind(**line[name])
    return RopeRow(Case(**{**case, **tuples}), **line)
