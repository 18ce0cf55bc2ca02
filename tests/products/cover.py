"""The covering array: few rows in which every two values occur together that a backend runs together.

`make` takes minutes, and writes rows.jsonl, which runs read. `uncovered` says what a set of rows leaves out.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from products import calls
from products.imagined import imagined_gpu, refusal_on_gpu
from products.table import FEATURES, NEUTRAL, Row, plainest
from ropewalk import PositionScheme, explain_choice
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import NO_TABLES
from ropewalk.ops.attention.tables import goes_with_rotation

ARRAY = Path(__file__).with_name("rows.jsonl")
IMPLS = ("triton", "gluon")  # the kernels; `impl=None` takes what some backend runs
Choice = tuple[str, str]  # a feature and its value
Combination = frozenset[Choice]


def refusal(
    row: Row, impl: str | None, sizes: calls.Sizes = calls.GPU, position: PositionScheme | None = None
) -> str | None:
    """Say why `attention`, or a backend on a GPU, does not run a row; None if it does. position: not its own."""
    return refusals(row, (impl,), sizes, position)[impl]


def refusals(
    row: Row, impls: Iterable[str | None], sizes: calls.Sizes = calls.GPU, position: PositionScheme | None = None
) -> dict[str | None, str | None]:
    """Return why each of some backends, or `attention` for None, does not run a row; None if it does."""
    call = calls.build(row, 0, torch.device("cpu"), sizes, is_empty=True)
    leaves = {name: x.requires_grad_() if name in call.learned else x for name, x in call.leaves.items()}
    with torch.set_grad_enabled(row["gradients"] != "none"), imagined_gpu():
        keywords = call.keywords(leaves)
        if position is not None:
            keywords["position"] = position
        try:
            explain_choice(**keywords)
            norm = keywords.pop("norm", None)
            made = make_call(**keywords)
        except (TypeError, ValueError) as error:
            return dict.fromkeys(impls, str(error))
        if norm is not None and goes_with_rotation(norm, made.scheme):
            made = made._replace(tables=NO_TABLES)
        found = {impl: refusal_on_gpu(impl, made) for impl in (*IMPLS, *impls) if impl is not None}
        # By default kernels alone run 8-bit products; other calls have the reference.
        found[None] = None if made.precision is None or None in found.values() else found[IMPLS[0]]
        found = {impl: found[impl] for impl in impls}
    return {impl: None if refused is None else refused.reason for impl, refused in found.items()}


def all_pairs() -> Iterator[tuple[Choice, Choice]]:
    """Go through all pairs of values of two features."""
    for (a, of_a), (b, of_b) in itertools.combinations(FEATURES.items(), 2):
        for x, y in itertools.product(of_a.values, of_b.values):
            yield (a, x), (b, y)


@functools.cache
def supported_pairs() -> dict[str | None, set[Combination]]:
    """Return the pairs of values that each backend runs together, in the plainest call that has both."""
    found: dict[str | None, set[Combination]] = {impl: set() for impl in (*IMPLS, None)}
    for pair in all_pairs():
        row = plainest(*pair)
        for impl, refused in ({} if row is None else refusals(row, found)).items():
            if refused is None:
                found[impl].add(frozenset(pair))
    return found


def pairs_of(row: Row) -> set[Combination]:
    """Return all pairs of a row's values."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def uncovered(rows: Iterable[Row], pairs: set[Combination]) -> set[Combination]:
    """Return the pairs that no row has."""
    return pairs.difference(*(pairs_of(row) for row in rows))


def find_rows(impl: str | None, missing: set[Combination]) -> list[Row]:
    """Return rows that a backend runs, with every pair of those that are missing.

    A row grows by the value that covers most, as long as a backend runs the plainest call with all values so far. The
    libraries that make such arrays take rules that are known beforehand, and minutes once there are as many as
    refusals here.
    """
    partners: dict[Choice, set[Choice]] = {}
    for a, b in missing:
        partners.setdefault(a, set()).add(b)
        partners.setdefault(b, set()).add(a)

    def runs(chosen: list[Choice]) -> Row | None:
        row = plainest(*chosen)
        return row if row is not None and refusal(row, impl) is None else None

    rows = []
    while any(partners.values()):
        first = max(sorted(partners), key=lambda choice: len(partners[choice]))
        chosen = [first, min(partners[first], key=lambda choice: (-len(partners[choice]), choice))]
        row = runs(chosen)
        assert row is not None, chosen
        while len(chosen) < len(FEATURES):
            taken = {name for name, _ in chosen}
            gains = [
                (len(partners.get((name, value), set()).intersection(chosen)), len(partners.get((name, value), ())))
                for name, feature in FEATURES.items()
                for value in feature.values
                if name not in taken
            ]
            choices = [(n, v) for n, feature in FEATURES.items() for v in feature.values if n not in taken]
            order = sorted(zip(gains, choices, strict=True), key=lambda each: (-each[0][0], -each[0][1], each[1]))
            for gain, choice in order:
                grown = None if gain == (0, 0) else runs([*chosen, choice])
                if grown is not None:
                    row = grown
                    chosen.append(choice)
                    break
            else:
                break
        rows.append(row)
        for a, b in itertools.combinations(row.items(), 2):
            partners.get(a, set()).discard(b)
            partners.get(b, set()).discard(a)
    return rows


def make() -> list[Row]:
    """Return rows in which each backend runs all pairs that it can, and `impl=None` all that there are."""
    rows: list[Row] = []
    for impl in (*reversed(IMPLS), None):
        have = [row for row in rows if refusal(row, impl) is None]
        rows += find_rows(impl, uncovered(have, supported_pairs()[impl]))
    return rows


class Entry(NamedTuple):
    """A row of the array, and the backends that run it, None among them."""

    row: Row
    impls: tuple[str | None, ...]


def save(rows: Iterable[Row]) -> None:
    """Write the array: of each row the values that are not neutral, and the kernels that run it."""
    lines = []
    for row in rows:
        impls = [impl for impl in IMPLS if refusal(row, impl) is None]
        lines.append(json.dumps({"impls": impls, "row": {k: v for k, v in row.items() if v != NEUTRAL[k]}}))
    ARRAY.write_text("\n".join(lines) + "\n")


def load() -> list[Entry]:
    """Return the rows of the array."""
    entries = [json.loads(line) for line in ARRAY.read_text().splitlines()]
    return [Entry({**NEUTRAL, **entry["row"]}, (*entry["impls"], None)) for entry in entries]
