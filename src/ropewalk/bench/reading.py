"""Reading a record of any of the kernels' benchmarks: of the rotation, of attention, or of both."""

from __future__ import annotations

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


def read_bench_record(path: Path) -> BenchRecord:
    """Read what `ropewalk bench rope`, `attention` or `all` wrote; a line says of what it is where the run does not."""
    run, lines = read_lines(path, *BENCHMARKS)
    rotations, attentions = [], []
    for line in lines:
        if line.pop("benchmark", run["benchmark"]) == "rope":
            rotations.append(rope_row(line))
        else:
            attentions.append(attention_row(line))
    return BenchRecord(path, run, rotations, attentions)
