"""NaN, which every comparison denies and `max` may pass over, is no result within a budget."""

import math

import cache_quality
import pytest
import torch

from ropewalk.bench.core.gate import is_within, max_error, relative_error, worst
from ropewalk.bench.parallel.cases import Truth, check_results

RIGHT = [torch.ones(3), torch.full((2,), 4.0)]


@pytest.mark.parametrize("error", [max_error, relative_error])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_infinitely_wrong(error, place, value):
    wrong = [x.clone() for x in RIGHT]
    wrong[place][1] = value
    assert error(RIGHT, RIGHT) == 0
    assert error(wrong, RIGHT) == math.inf
    assert error(RIGHT, wrong) == math.inf
    assert error(wrong, wrong) == math.inf


def test_errors_are_the_largest_of_each_tensor():
    assert max_error([torch.ones(3), torch.full((2,), 3.0)], RIGHT) == 1
    assert relative_error([torch.ones(3), torch.full((2,), 3.0)], RIGHT) == 0.25
    assert relative_error([torch.zeros(2), torch.ones(0)], [torch.zeros(2), torch.ones(0)]) == 0
    assert relative_error([torch.ones(2)], RIGHT[:1]) == max_error([torch.ones(2)], RIGHT[:1]) == math.inf


def test_nan_is_the_worst_wherever_it_is():
    assert worst([]) == 0
    assert worst([1.0, 3.0, 2.0]) == 3
    assert worst([1.0, math.nan]) == worst([math.nan, 1.0]) == math.inf
    assert is_within(0.5, 0.5)
    assert not any(is_within(error, budget) for error in (math.nan, math.inf) for budget in (1.0, math.inf, math.nan))
    assert not is_within(0.5, math.nan)


@pytest.mark.parametrize("budget", [1e-3, 0.0, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_parallel_call_with_nan_is_wrong(budget, place):
    truths = [Truth(number, torch.ones(3), budget, (..., ..., ...)) for number in range(2)]
    results = [torch.ones(3), torch.ones(3)]
    assert check_results(results, truths, whole=True).complaint is None
    results[place] = torch.full((3,), math.nan)
    assert check_results(results, truths, whole=True).complaint


def test_losses_of_a_cache_are_finite():
    assert cache_quality.check_losses("int8", torch.ones(2))[0] == "int8"
    with pytest.raises(SystemExit, match="int8: the losses of windows must be finite"):
        cache_quality.check_losses("int8", torch.tensor([1.0, math.nan]))
