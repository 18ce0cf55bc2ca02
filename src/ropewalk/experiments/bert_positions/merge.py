"""One record of several calls: schemes of one comparison, trained one after the other, on machines that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.bench.core.records import read_lines
from ropewalk.experiments.bert_positions.config import SCHEMES
from ropewalk.experiments.bert_positions.figures import BENCHMARK

# All that must be the same in all calls, beside the configuration but for its schemes.
_SAME = (
    *("device", "capability", "system", "python", "torch", "cuda", "hip", "triton", "ropewalk", "peers"),
    *("corpus", "precision", "processes", "jobs"),
)
_CALL_KEYS = ("date", "commit", "dirty")
Row = dict[str, Any]


def extend_record(
    path: Path, run: Mapping[str, Any], rows: Sequence[Row], replace: bool = False
) -> tuple[Row, list[Row]]:
    """Return the run and the rows of a record with those of a further call, or raise ValueError.

    Both must have the same configuration but for their schemes, text, device and versions. A scheme may be in one of
    them alone, unless `replace`: then its rows are those of this call. The run gets `parts`: schemes, date and commit
    of each call. Rows of speed stay those of the first call: another call's would not be interleaved with them.
    """
    before, lines = read_lines(path, BENCHMARK)
    schemes, here = before["config"]["schemes"], run["config"]["schemes"]
    keys = [key for key in run["config"] if key != "schemes"]
    pairs = [(key, before["config"].get(key), run["config"][key]) for key in keys]
    pairs += [(key, before.get(key), run.get(key)) for key in _SAME]
    for key, there, now in pairs:
        if there != now:
            raise ValueError(f"{path}: {key} is {there!r} there, but {now!r} here: a record is of one comparison")
    twice = [scheme for scheme in here if scheme in schemes]
    if twice and not replace:
        raise ValueError(f"{path} has scheme {twice[0]!r} already: leave it out of schemes, or choose another record")
    both = [scheme for scheme in dict.fromkeys((*SCHEMES, *schemes, *here)) if scheme in schemes or scheme in here]
    parts = [{**part, "schemes": [x for x in part["schemes"] if x not in here]} for part in parts_of(before)]
    merged: Row = {**before, "config": {**before["config"], "schemes": both}}
    merged["parts"] = [*(part for part in parts if part["schemes"]), *parts_of(run)]
    return merged, [*(line for line in lines if line.get("scheme") not in here), *rows]


def parts_of(run: Mapping[str, Any]) -> list[Row]:
    """Return the calls that wrote a run's record; one, unless the record says more."""
    alone: Row = {"schemes": run["config"]["schemes"], **{key: run.get(key) for key in _CALL_KEYS}}
    parts: list[Row] = run.get("parts", [alone])
    return parts
