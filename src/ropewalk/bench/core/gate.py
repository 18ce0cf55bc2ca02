"""Correctness before speed: the verdict on a result, and its distance from the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """The largest absolute error of a result, its budget, and the complaint if there is one."""

    error: float
    budget: float
    complaint: str | None


def max_error(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest absolute difference; NaN counts as infinite."""
    error = 0.0
    for result, exact in zip(results, truth, strict=True):
        if result.shape != exact.shape:
            return float("inf")
        if exact.numel():
            error = max(error, (result.double() - exact).abs().nan_to_num(nan=float("inf")).max().item())
    return error
