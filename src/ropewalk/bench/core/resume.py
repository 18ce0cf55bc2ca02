"""Resuming a stopped run: the whole units of its record, and a check that machine and options are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.core.load import ALL, ParseRow, Unit, parse_row
from ropewalk.bench.core.records import END, check_run_line

_BENCHMARKS = ("rope", "attention", "host", "parallel", ALL)  # whose runs can be resumed

# Keys of the lines about the runs; a missing key counts as None.
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


@dataclass(frozen=True)
class Stopped:
    """The whole part of a record, of a run that was stopped or ended."""

    run: dict[str, Any]
    lines: list[dict[str, Any]]  # of the whole units
    units: set[Unit]  # that are whole
    ended: bool


def read_stopped(path: Path, now: Mapping[str, Any], parsers: Mapping[str, ParseRow]) -> Stopped:
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
    check_run_line(path, lines, *_BENCHMARKS)
    run, *rows = lines
    check_same(path, run, now)
    ended = bool(rows) and rows[-1].keys() == {END}
    rows = [line for line in rows if line.keys() != {END}]
    units = [parse_row(path, run, line, parsers).unit for line in rows]
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
    """Yield the differences of two lines about runs, (name, old, new); mappings entry by entry."""
    for key in keys:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(dict.fromkeys((*old, *new)), old, new, f"{prefix}{key} ")
        elif old != new:
            yield f"{prefix}{key}", old, new
