"""Hold records against the project's targets: `python tools/targets.py RECORD …` prints each.

It exits with 1 if one is missed.

`targets.json` has them. A value is how many times as fast "ours" is as "other" (`at_least`), or how many times its time
"ours" takes (`at_most`), by the medians over rounds; `*` stands for every case. "best peer" is the fastest of `peers`,
or of all; "yardstick" compares TFLOP/s with those of the same kernels on another case. A target with a `protocol` is of
its rows alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ropewalk.bench.core.load import Record, Row, groups, label, read_record

TARGETS: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class Verdict(NamedTuple):
    """One target on one case."""

    what: str
    case: str
    value: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        verdict, sign = "met" if self.met else "MISSED", "≥" if self.at_least else "≤"
        return f"{verdict}: {self.case}: {self.what}: {self.value:.3f}, ought to be {sign} {self.bound}"


def judge(record: Record) -> Iterator[Verdict]:
    """Yield every target that the record has measurements of; a CPU has none."""
    for group in groups((row for row in record.rows if row["status"] == "ok"), "protocol"):
        run = record.runs[group[0]["run"]]
        if run["device"].startswith("CPU") or run.get("options", {}).get("parallel", {}).get("quick"):
            continue
        case = group[0]["case"]["name"]
        mode = " ".join(part for part in (group[0]["mode"], group[0].get("protocol")) if part)
        for target in TARGETS:
            bounds = target.get("at_least") or target["at_most"]
            bound = bounds.get(case, bounds.get("*"))
            is_of = (group[0]["benchmark"], group[0]["mode"]) in ((target["benchmark"], one) for one in target["modes"])
            is_of = is_of and target.get("protocol", group[0].get("protocol")) == group[0].get("protocol")
            if bound is not None and is_of and case not in target.get("not_cases", ()):
                for what, value in _values(target, group):
                    yield Verdict(f"{mode}: {what}", case, value, bound, "at_least" in target)


def _values(target: Mapping[str, Any], group: Sequence[Row]) -> Iterator[tuple[str, float]]:
    rows = {label(row): row for row in group}
    if "bytes" in target:
        yield from ((name, row["peak_bytes"] / row["floor_bytes"]) for name, row in rows.items())
        return
    ours = rows.get(target["ours"])
    if ours is None or target.get("served_by", ours.get("served_by")) != ours.get("served_by"):
        return
    if "value" in target:
        if target["value"] in ours and ours.get("ranks") == target["ranks"]:
            yield target["value"], ours[target["value"]]
        return
    ratios, other = ours.get("ratios", {}), target["other"]
    if other == "best peer":
        known = target.get("peers") or [name for name, row in rows.items() if row["kind"] == "peer"]
        found = [name for name in known if name in ratios]
        complete = len(found) == len(known) or "at_most" in target
        other = min(found, key=ratios.__getitem__) if found and complete else other
    times = ratios.get(other)
    if other == "yardstick":
        same = (
            row
            for row in group
            if "yardstick" in row and (row["impl"], row["position"]) == (ours["impl"], ours["position"])
        )
        times = next((ours["tflops"] / row["tflops"] for row in same), None)
    if times is not None:
        yield f"{target['ours']} against {other}", times if "at_least" in target else 1 / times


if __name__ == "__main__":
    verdicts = [verdict for name in sys.argv[1:] for verdict in judge(read_record(Path(name)))]
    print(*verdicts, sep="\n")
    sys.exit(not all(verdict.met for verdict in verdicts))
