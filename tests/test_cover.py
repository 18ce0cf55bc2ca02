"""The choice among the parameters of a test."""

from itertools import combinations, product

import pytest
from helpers.cover import cover

AXES = [range(4), range(3), range(3), range(2)]
ROWS = list(product(*AXES))


def together(rows, strength):
    return {part for row in rows for part in combinations(enumerate(row), strength)}


@pytest.mark.parametrize(("strength", "few"), [(1, 4), (2, 16)])
def test_few_rows_hold_all_that_is_to_occur_together(strength, few):
    chosen = [ROWS[index] for index in cover(ROWS, strength)]
    assert together(chosen, strength) == together(ROWS, strength)
    assert len(chosen) <= few < len(ROWS)


def test_what_no_row_holds_is_not_asked_for():
    rows = [row for row in ROWS if row[0] != row[1]]
    chosen = [rows[index] for index in cover(rows, 2)]
    assert together(chosen, 2) == together(rows, 2)


def test_one_axis_is_taken_whole():
    assert cover([(1,), (2,), (3,)], 2) == [0, 1, 2]
    assert cover([], 2) == []


def test_a_limit_takes_the_rows_with_the_most_values():
    chosen = [ROWS[index] for index in cover(ROWS, 1, limit=2)]
    assert len(chosen) == 2
    assert all(a != b for a, b in zip(*chosen, strict=True))
