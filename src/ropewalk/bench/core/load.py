"""Reading records back: a line of a record becomes a row of the benchmark that it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from ropewalk.bench.core.records import read_lines

ALL = "all"  # the benchmark of a record whose lines name their own
Unit = tuple[str, object, str]  # a benchmark, a case of it, and a direction or mode


class Row(Protocol):
    """The result of one implementation on one case, a frozen dataclass of whichever benchmark."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> str:
        """The origin: "ours", "peer" or "anchor"."""

    @property
    def status(self) -> str:
        """The verdict: "ok", "wrong", "failed" or "unsupported"."""

    @property
    def unit(self) -> Unit:
        """The unit that the row belongs to: its rows are measured together, and one unit after another."""

    @property
    def description(self) -> str:
        """The implementation, the case and the direction or mode in words."""


AnyRow = TypeVar("AnyRow")
ParseRow = Callable[[dict[str, Any]], Row]


@dataclass(frozen=True)
class BenchRecord:
    """A record: the file, the line about the run, and the rows in their order."""

    path: Path
    run: dict[str, Any]
    rows: Sequence[Row]

    def of(self, kind: type[AnyRow]) -> list[AnyRow]:
        """The rows of one benchmark, by their class."""
        return [row for row in self.rows if isinstance(row, kind)]


def load_record(path: Path, parsers: Mapping[str, ParseRow]) -> BenchRecord:
    """Read a record; `parsers` has the function that makes a row of a line, for each benchmark."""
    run, lines = read_lines(path, *parsers, ALL)
    return BenchRecord(path, run, [parse_row(path, run, line, parsers) for line in lines])


def parse_row(path: Path, run: Mapping[str, Any], line: Mapping[str, Any], parsers: Mapping[str, ParseRow]) -> Row:
    """Make a row of a line; the line names its benchmark where the run does not."""
    fields = dict(line)
    benchmark = fields.pop("benchmark", run["benchmark"])
    try:
        return parsers[benchmark](fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} has a line that is not a row of the benchmark {benchmark!r}: {error}") from error
