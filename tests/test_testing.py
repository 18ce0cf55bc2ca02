"""The library's help for tests of numerical code."""

import pytest
import torch

from ropewalk.testing import assert_close_to_truth, error_budget


def test_an_infinite_truth_leaves_the_budget_for_the_rest_as_it_is():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with_infinity = torch.tensor([1.0, 2.0, -torch.inf], dtype=torch.float64)
    assert error_budget(with_infinity, with_infinity.float()) == error_budget(truth, truth.float())
    assert_close_to_truth(with_infinity.float(), with_infinity, with_infinity.float())
    with pytest.raises(AssertionError, match="the error is"):
        assert_close_to_truth(torch.tensor([5e30, 2.0, -torch.inf]), with_infinity, with_infinity.float())


def test_an_infinity_that_should_not_be_there_is_an_error():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with pytest.raises(AssertionError, match="the error is"):
        assert_close_to_truth(torch.tensor([1.0, torch.inf]), truth, truth.float())
