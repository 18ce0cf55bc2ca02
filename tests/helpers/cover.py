"""Choose among the cases of a test: few or some that hold many pairs of values, instead of every combination."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

Row = tuple[object, ...]  # a value of each axis
# At most so many cases of a test, by what it does and how deep the run is.
LIMITS = {
    "compiles": {"some": 2, "most": 10},
    "interprets": {"few": 1, "some": 1, "most": 8},
    "other": {"some": 4},
}


def cover(rows: Sequence[Row], strength: int, limit: int | None = None) -> list[int]:
    """Return the indices of few rows in which every `strength` values occur together that do so in any row.

    With a limit there are no more rows, and in them as many values as the greedy choice finds.

    An axis is a position of the rows. The choice depends on nothing but the rows.
    """
    n_axes = len(rows[0]) if rows else 0
    parts = [set(combinations(enumerate(row), min(strength, n_axes))) for row in rows]
    missing = set().union(*parts)
    chosen = []
    while missing and (limit is None or len(chosen) < limit):
        best = max(range(len(rows)), key=lambda index: len(parts[index] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


def axes_of(item: pytest.Item, split: bool = False) -> Row:
    """The value of each axis: the arguments of one `parametrize` are one axis, and so is each fixture's parameter.

    With `split`, each argument is an axis of its own.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    # Of what has no value to compare, each object is itself: all cases are made of the same ones.
    values = {name: x if isinstance(x, str | int | float) else id(x) for name, x in callspec.params.items()}
    groups: list[object] = []
    for mark in [] if split else item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        groups.append(tuple(values.pop(name) for name in names if name in values))
    return (*groups, *(value for _, value in sorted(values.items())))


def select(items: Iterable[pytest.Item], depth: str) -> list[pytest.Item]:
    """Select few, some or most cases of each test, or all of them.

    The cases hold every pair of two parameters' values, as far as LIMITS allows. A test that compiles takes seconds:
    "few" is one case for sm_90 there, and "some" holds each argument's values.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    selected = []
    for cases in tests.values():
        compiles, interprets = (cases[0].get_closest_marker(name) is not None for name in ("compile", "kernels"))
        if compiles and depth == "few":
            selected += [case for case in cases if target_of(case) == "sm_90"][:1]
            continue
        limit = LIMITS["compiles" if compiles else "interprets" if interprets else "other"].get(depth, len(cases))
        if len(cases) > limit:
            rows = [axes_of(case, split=compiles) for case in cases]
            cases = [cases[index] for index in cover(rows, 1 if compiles and depth == "some" else 2, limit)]
        selected += cases
    return selected


def target_of(item: pytest.Item) -> str:
    """The GPU that a test compiles for."""
    callspec = getattr(item, "callspec", None)
    return "sm_90" if callspec is None else callspec.params.get("target", "sm_90")
