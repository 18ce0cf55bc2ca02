"""Going on with a record of a run that was stopped: what is whole in it, and whether this is the same machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.attention_records import AttentionRow
from ropewalk.bench.reading import BENCHMARKS, bench_row
from ropewalk.bench.records import END, Row, check_run_line

# Of the lines about the runs; what a line lacks counts as None.
SAME = (
    "benchmark",
    "device",
    "driver_version",
    "threads",
    "python",
    "torch",
    "cuda",
    "hip",
    "triton",
    "ropewalk",
    "commit",
    "dirty",
    "seed",
    "peers",
    "options",
)
Unit = tuple[str, object, str]  # a benchmark, a case of it, and a direction or mode


@dataclass(frozen=True)
class Stopped:
    """What a record has of a run that was stopped, or came to its end."""

    run: dict[str, Any]
    lines: list[dict[str, Any]]  # of the whole units
    units: set[Unit]  # that are whole
    ended: bool


def unit_of(row: Row | AttentionRow) -> Unit:
    """To what a row belongs; the rows of a unit are measured together, and one unit after another."""
    if isinstance(row, Row):
        return "rope", row.case, row.direction
    return "attention", row.case, row.mode


def read_stopped(path: Path) -> Stopped:
    """Read a record that may be cut off. Its last unit is not whole, unless the run came to its end."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: there is no record to resume")
    texts = path.read_text(encoding="utf-8").splitlines()
    lines: list[Any] = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number == len(texts) > 1:
                break  # the run was stopped while it wrote
            raise ValueError(f"{path.name} is not a record: line {number} is not JSON") from error
    check_run_line(path, lines, *BENCHMARKS)
    run, *rows = lines
    ended = bool(rows) and rows[-1].keys() == {END}
    rows = [line for line in rows if line.keys() != {END}]
    units = [unit_of(bench_row(path, run, line)) for line in rows]
    half = None if ended or not units else units[-1]
    kept = [line for line, unit in zip(rows, units, strict=True) if unit != half]
    return Stopped(run, kept, {unit for unit in units if unit != half}, ended)


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a run can go on with another's record, and name all that differs."""
    different = [f"{name} was {old!r}, and is {new!r}" for name, old, new in differences(SAME, before, now)]
    if different:
        raise ValueError(f"{path} cannot be resumed: {'; '.join(different)}")


def differences(
    keys: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two lines about runs: the name, what it was and what it is; mappings entry by entry."""
    for key in keys:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(dict.fromkeys((*old, *new)), old, new, f"{prefix}{key} ")
        elif old != new:
            yield f"{prefix}{key}", old, new
