"""Rows of the records of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk.bench.core.load import Unit
from ropewalk.bench.core.timing import Quantiles
from ropewalk.bench.parallel.cases import ParallelCase

BENCHMARK = "parallel"
ONE = "one process"  # the anchor: the whole call on each rank at once
OURS = "ropewalk"


@dataclass(frozen=True)
class ParallelRow:
    """The result of one candidate on one case. Times are of forward and backward, the slowest rank's, in µs."""

    case: ParallelCase
    impl: str
    kind: str  # "ours", "peer" or "anchor"
    status: str  # "ok", "wrong", "failed" or "unsupported"
    ranks: int
    reason: str | None = None
    served_by: str | None = None  # ours: the method; one process: the implementation
    error: float | None = None  # the largest, as multiples of its budget
    time: Quantiles | None = None
    rounds: int | None = None
    efficiency: float | None = None  # the time on one process over n times this one, the median over rounds
    bytes_received: int | None = None  # ours: by a rank, forward and backward, as the method's plan has it
    peak_bytes: int | None = None  # of PyTorch's allocator that a call adds, the largest over ranks
    device_bytes: int | None = None  # of the device that the first call takes: with symmetric memory, and reserves
    tokens_per_second: float | None = None
    speed_over: dict[str, float] | None = None  # ours: the time of each other candidate over its, medians over rounds

    @property
    def unit(self) -> Unit:
        """The case: its rows are measured together."""
        return BENCHMARK, self.case, "train"

    @property
    def description(self) -> str:
        """The candidate and the case in words."""
        return f"{self.impl} on {self.case.name}"


def parallel_row(line: dict[str, Any]) -> ParallelRow:
    """Make a row of a record's line."""
    case = ParallelCase(**line.pop("case"))
    time = line.pop("time")
    return ParallelRow(case, time=None if time is None else Quantiles(**time), **line)
