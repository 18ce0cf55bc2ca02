"""Helpers for tests of kernels: error budgets from data, poisoned memory, unchanged inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def error_budget(truth: Tensor, baseline: Tensor, roundings: int = 1) -> float:
    """Compute the largest allowed distance to `truth`: twice that of `baseline`, plus units in the last place.

    The same in PyTorch::

        2 * (baseline.double() - truth).abs().max() + roundings * torch.finfo(baseline.dtype).eps * truth.abs().max()

    `truth` is the result in float64, `baseline` that of plain PyTorch in the dtype under test. NaN in both counts as
    agreement here; `assert_close_to_truth` compares their indices. `roundings` counts the intermediate results that are
    rounded to the dtype, 1 for an elementwise operation: each may change the last place once. Infinite values of
    `truth` do not count.
    """
    if truth.numel() == 0:
        return 0.0
    distance = _distance(baseline, truth)
    largest = float(truth.detach().double().abs().nan_to_num(0.0, posinf=0.0).max())
    return 2 * distance + roundings * torch.finfo(baseline.dtype).eps * largest


def assert_close_to_truth(actual: Tensor, truth: Tensor, baseline: Tensor, roundings: int = 1) -> None:
    """Raise AssertionError unless `actual` is as near to `truth` as `error_budget` demands.

    actual and baseline have the dtype under test, truth is float64; all three have one shape, and NaN must be at
    the same indices of `actual` and `truth`.

    Example:
        >>> import torch
        >>> x = torch.randn(1000, dtype=torch.bfloat16)
        >>> assert_close_to_truth(x.float().exp().bfloat16(), x.double().exp(), x.exp())
    """
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, but the truth has {tuple(truth.shape)}"
    assert actual.dtype == baseline.dtype, f"dtype {actual.dtype}, but the baseline has {baseline.dtype}"
    assert torch.equal(actual.isnan(), truth.isnan()), "NaN is at other indices than in the truth"
    if actual.numel() == 0:
        return
    distance, budget = _distance(actual, truth), error_budget(truth, baseline, roundings)
    assert distance <= budget, f"the error is {distance:.3e}, but must be at most {budget:.3e}"


def _distance(x: Tensor, truth: Tensor) -> float:
    return float((x.detach().double() - truth.detach().double()).abs().nan_to_num(nan=0.0).max())


_ALLOCATORS = ("empty", "empty_like", "empty_strided")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill floating-point memory from `torch.empty` and its like with NaN while the context is open.

    A kernel that reads memory it never wrote, or does not write all of its result, then gives NaN.

    Example:
        >>> import torch
        >>> with poisoned_memory():
        ...     torch.empty(2)
        tensor([nan, nan])
    """

    def poisoning(allocate: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            memory: Tensor = allocate(*args, **kwargs)
            if memory.is_floating_point() and memory.device.type != "meta":
                with torch.no_grad():
                    memory.fill_(torch.nan)
            return memory

        return poisoned

    with mock.patch.multiple(torch, **{name: poisoning(getattr(torch, name)) for name in _ALLOCATORS}):
        yield


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Raise AssertionError if the code inside writes to any of the tensors."""
    before = [(x.detach().clone(), x._version) for x in tensors]
    yield
    for index, (x, (values, version)) in enumerate(zip(tensors, before, strict=True)):
        same = torch.equal(x.detach().nan_to_num(), values.nan_to_num()) and torch.equal(x.isnan(), values.isnan())
        assert same, f"tensor {index} was written to"
        assert x._version == version, f"tensor {index} was marked as written to"
