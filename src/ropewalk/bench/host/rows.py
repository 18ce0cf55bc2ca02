"""Rows of the host's records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk.bench.attention.rows import GatedRow, attention_case
from ropewalk.bench.core.load import Unit
from ropewalk.bench.host.timing import Spread


@dataclass(frozen=True)
class HostRow(GatedRow):
    """The result of one implementation on one case and mode. Times are microseconds of the host for each call."""

    host: Spread | None = None  # of a call; of a forward and its backward where the mode trains
    multiple: Spread | None = None  # the same over the median of `mul_` in the same rounds
    forward: Spread | None = None  # the two parts of `host`, where the mode trains
    backward: Spread | None = None
    calls: int | None = None  # of a burst
    bursts: int | None = None

    @property
    def unit(self) -> Unit:
        """The case and the mode: their rows are measured together."""
        return "host", self.case, self.mode


def host_row(line: dict[str, Any]) -> HostRow:
    """Make a row of a record's line."""
    case = attention_case(line.pop("case"))
    for name in ("host", "multiple", "forward", "backward"):
        if line[name] is not None:
            line[name] = Spread(**line[name])
    return HostRow(case, **line)
