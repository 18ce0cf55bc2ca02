"""Reading a record of any of the kernels' benchmarks: of the rotation, of attention, or of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.attention_records import AttentionRow, attention_row
from ropewalk.bench.records import Row, read_lines, rope_row

BENCHMARKS = ("rope", "attention", "all")


@dataclass(frozen=True)
class BenchRecord:
    """A record file: the line about the run, and the rows of each benchmark."""

    path: Path
    run: dict[str, Any]
    rotations: list[Row]
    attentions: list[AttentionRow]

    @property
    def rows(self) -> list[Row | AttentionRow]:
        """All rows, the rotations first."""
        return [*self.rotations, *self.attentions]


def read_bench_record(path: Path) -> BenchRecord:
    """Read what `ropewalk bench rope`, `attention` or `all` wrote."""
    run, lines = read_lines(path, *BENCHMARKS)
    rows = [bench_row(path, run, line) for line in lines]
    rotations = [row for row in rows if isinstance(row, Row)]
    return BenchRecord(path, run, rotations, [row for row in rows if isinstance(row, AttentionRow)])


def bench_row(path: Path, run: Mapping[str, Any], line: Mapping[str, Any]) -> Row | AttentionRow:
    """A line of a record as a row; a line says of what it is where the run does not."""
    fields = dict(line)
    benchmark = fields.pop("benchmark", run["benchmark"])
    try:
        return rope_row(fields) if benchmark == "rope" else attention_row(fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} has a line that is not a row of the benchmark {benchmark!r}: {error}") from error
