"""Reading records of `ropewalk bench`, and going on with one that was stopped.

A row is a mapping, the same one as in the file: `docs/measure.md` lists its keys. One that is missing was not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.bench.core.records import END, check_run_line, parse_lines

Row = dict[str, Any]
Unit = tuple[str, str, str]  # a benchmark, a case of it as JSON, and a mode: its rows are measured together
ALL = "all"  # the benchmark of a record whose rows name their own
BENCHMARKS = ("rope", "attention", "host", "training", "parallel", ALL)
# Keys of the lines about the runs that must agree for one to go on with another; a missing key counts as None.
SAME = (
    *("benchmark", "device", "driver_version", "threads", "python", "torch", "cuda", "hip", "triton"),
    *("ropewalk", "commit", "dirty", "seed", "peers", "options"),
)


def to_digits(value: float, digits: int = 3) -> str:
    """Format a number to so many digits, or all before the point: `.4g` of 14300 has an exponent."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(decimals, 0)}f}"


@dataclass(frozen=True)
class Record:
    """A record: the lines about its runs, and the rows in their order, each with the number of its run."""

    path: Path
    runs: list[dict[str, Any]]
    rows: list[Row]
    ended: bool = True

    @property
    def run(self) -> dict[str, Any]:
        return self.runs[-1]

    @property
    def units(self) -> list[Unit]:
        return [unit_of(row["benchmark"], row["case"], row["mode"]) for row in self.rows]

    def name_of(self, row: Row) -> str:
        """The name of a row's run: its own, or the file's."""
        return str(self.runs[row["run"]].get("name", self.path.stem))

    def of(self, benchmark: str) -> list[Row]:
        return [row for row in self.rows if row["benchmark"] == benchmark]


def read_record(path: Path, *benchmarks: str, may_be_cut_off: bool = False) -> Record:
    """Read a record of one of these benchmarks, by default of any."""
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    for line in (lines := parse_lines(path, may_be_cut_off=may_be_cut_off)):
        if "format" in line or not runs:
            check_run_line(path, line, benchmarks or BENCHMARKS)
            runs.append(line)
        elif line.keys() != {END}:
            if [type(line.get(key)) for key in ("case", "mode", "impl", "kind")] != [dict, str, str, str]:
                raise ValueError(f"{path.name} has a line that is no row: {json.dumps(line)[:80]}")
            row = {"run": len(runs) - 1, "benchmark": runs[-1]["benchmark"], **line}
            rows.append({key: value for key, value in row.items() if value is not None})
    return Record(path, runs, rows, ended=lines[-1].keys() == {END})


def label(row: Mapping[str, Any]) -> str:
    """Name an implementation with its source of positions, and with its case if it is a yardstick."""
    position = row.get("position", "none")
    name: str = row["impl"] if position == "none" else f"{row['impl']} + {position}"
    return f"{name} on {row['yardstick']}" if row.get("yardstick") else name


def variant_of(case: Mapping[str, Any]) -> str:
    """Describe a rotation's pairing and whether its result overwrites the input; nothing for other cases."""
    if "inplace" not in case:
        return ""
    return f"{'interleaved' if case['interleaved'] else 'half'}/{'in place' if case['inplace'] else 'out of place'}"


def words(*parts: str | None) -> str:
    return " ".join(filter(None, parts))


def describe(row: Mapping[str, Any]) -> str:
    return words(label(row), "on", row["case"]["name"], variant_of(row["case"]), row["mode"])


def unit_of(benchmark: str, case: Any, mode: str) -> Unit:
    """Name a unit of a benchmark; its case is a dataclass, or as records have it."""
    fields = dict(case) if isinstance(case, Mapping) else asdict(case)
    known = {name: value for name, value in fields.items() if value is not None}
    return benchmark, json.dumps(known, sort_keys=True), mode


def groups(rows: Iterable[Row], *keys: str) -> Iterator[list[Row]]:
    """Group rows by run, benchmark, case, mode, and more keys, in the order of the first of each group.

    Rows of several files have their file's "path": names and numbers of runs may be the same in two.
    """
    together: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        unit = unit_of(row["benchmark"], row["case"], row["mode"])
        together.setdefault((*unit, *map(row.get, ("path", "run", *keys))), []).append(row)
    yield from together.values()


def read_stopped(path: Path, now: Mapping[str, Any]) -> Record:
    """Read the whole units of a record that may be cut off: its last unit is not, unless the run came to its end."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: there is no record to resume")
    record = read_record(path, may_be_cut_off=True)
    different = [f"{name} was {old!r}, and is {new!r}" for name, old, new in differences(SAME, record.run, now)]
    if different or len(record.runs) > 1:
        raise ValueError(f"{path} cannot be resumed: {'; '.join(different) or 'it has several runs'}")
    half = None if record.ended or not record.rows else record.units[-1]
    whole = [row for row, unit in zip(record.rows, record.units, strict=True) if unit != half]
    for row in whole:
        del row["run"]  # it is written again
    return replace(record, rows=whole)


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
