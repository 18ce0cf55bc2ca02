"""Correctness before speed: the verdict on a result, and its distance from the truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """The largest absolute error of a result, its budget, and the complaint if there is one."""

    error: float
    budget: float
    complaint: str | None


def max_error(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest absolute difference; NaN and another shape count as infinite."""
    return worst(_distance(result, exact) for result, exact in zip(results, truth, strict=True))


def relative_error(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest number; NaN counts as infinite."""
    tiny = torch.finfo(torch.float64).tiny  # two tensors of zeros are equal
    pairs = zip(results, truth, strict=True)
    return worst(_distance(x, y) / max(float(y.abs().max()), tiny) if y.numel() else 0.0 for x, y in pairs)


def _distance(result: Tensor, exact: Tensor) -> float:
    if result.shape != exact.shape:
        return math.inf
    return (result.double() - exact).abs().max().item() if exact.numel() else 0.0


def worst(errors: Iterable[float]) -> float:
    """Return the largest error. NaN counts as infinite: `max` passes over it, and `>` calls it no larger."""
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def is_within(error: float, budget: float) -> bool:
    """Whether an error is within its budget; NaN and infinity never are."""
    return math.isfinite(error) and error <= budget
