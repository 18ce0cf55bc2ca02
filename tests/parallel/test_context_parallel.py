"""Sharded attention beside one process: all schemes, layouts and methods, in float64, with all gradients."""

from __future__ import annotations

import pytest
from helpers import processes, sharded_calls
from helpers.modes import ON_GPU
from helpers.sharded_calls import CASES, SCHEMES, Case

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
NAMES = tuple(SCHEMES)
FEW = ("rope", "alibi, learned", "rerope, leaky")


def compare(size: int, names: tuple[str, ...], cases: tuple[Case, ...], heads_divide: bool = True) -> None:
    """Gather and halo refuse striped shards, halo calls without a window, Ulysses heads that do not divide."""
    of_cases = [(4 if case.packed else 3, bool(case.window)) for case in cases]
    refused = sum(2 + (0 if windowed else n_kinds - 1) for n_kinds, windowed in of_cases)
    if not heads_divide:
        refused += sum(n_kinds for n_kinds, _ in of_cases)
    processes.run(size, sharded_calls.compare, names, cases, len(names) * refused)


def test_two_ranks_attend_as_one() -> None:
    compare(2, FEW, CASES)


@pytest.mark.slow
def test_four_ranks_attend_as_one() -> None:
    compare(4, ("rope", "exposb"), (CASES[0], CASES[3], CASES[6]))


@pytest.mark.slow
def test_three_ranks_have_heads_that_do_not_divide() -> None:
    compare(3, ("t5",), CASES[:2], heads_divide=False)


@pytest.mark.parametrize("setting", ["groups", "shared files", "kept"])
def test_keys_are_gathered_by_groups_of_heads(setting: str) -> None:
    names, cases = ("alibi, learned",), (CASES[0], CASES[3], CASES[6])
    # Striped shards are refused, and calls without a window by halo.
    refused = len(names) * ((3 + 1) + (1 + 1) + (1 + 1))
    processes.run(2, sharded_calls.compare, names, cases, refused, setting, ("gather", "halo"))


@pytest.mark.slow
def test_nodes_exchange_heads_within_and_keys_between() -> None:
    names, cases = ("alibi, learned",), (CASES[0], CASES[4], CASES[6])
    refused = len(names) * ((1 + 3) + (1 + 3) + (1 + 1))
    processes.run(4, sharded_calls.compare, names, cases, refused, "nodes", ("gather", "halo", "ring", None))


@pytest.mark.slow
def test_kernels_differentiate_by_the_merged_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    processes.run(2, sharded_calls.compare_kernels, start_method="spawn")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_attend_as_one_by_every_scheme(size: int) -> None:
    compare(size, NAMES, CASES)


def test_a_destroyed_group_ends() -> None:
    processes.run(2, sharded_calls.check_a_destroyed_group_ends)
