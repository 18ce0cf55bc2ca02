"""Calls of `rerope_attention`: queries and keys that were rotated before, in two ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk import rerope_attention, torch_attention
from ropewalk.testing import assert_close_to_truth

Z, H, K, N, D = 1, 2, 1, 45, 16
ROUNDINGS = 8  # results on the way that are rounded: scores of both kinds, probabilities, and what comes of them


def draw_pairs(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch: int = Z,
    heads: int = H,
    key_heads: int = K,
    tokens: int = N,
    head_dim: int = D,
    v_head_dim: int | None = None,
) -> list[Tensor]:
    """Draw q1, q2, k1, k2 and v independently: a score of the wrong pair has another value."""
    shapes = [(heads, head_dim)] * 2 + [(key_heads, head_dim)] * 2 + [(key_heads, v_head_dim or head_dim)]
    return [torch.randn(batch, count, tokens, width, device=device).to(dtype) for count, width in shapes]


def value_and_grads(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], weights: Tensor, *arguments: Any, **keywords: Any
) -> list[Tensor]:
    """The output, and the gradients of all five tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, *arguments, **keywords)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def by(impl: str | None) -> Callable[..., Tensor]:
    """`rerope_attention` by an implementation."""
    return lambda *arguments: rerope_attention(*arguments, impl=impl)


def check_full_tiles(impl: str, tensors: Sequence[Tensor], causal: bool, windows: Iterable[int]) -> None:
    """Compare output and gradients with `torch_attention` in float64: with whole matrices, where pairs are many."""
    q, v = tensors[0], tensors[4]
    weights = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    for window in windows:
        arguments = (causal, q.shape[3] ** -0.5, window)
        actual = value_and_grads(by(impl), tensors, weights, *arguments)
        truth = value_and_grads(torch_attention, [x.double() for x in tensors], weights, *arguments)
        baseline = value_and_grads(_attend_in_dtype, tensors, weights, *arguments)
        for mine, exact, plain in zip(actual, truth, baseline, strict=True):
            assert_close_to_truth(mine, exact, plain, ROUNDINGS)


def _attend_in_dtype(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, causal: bool, sm_scale: float, window: int
) -> Tensor:
    """`torch_attention` with every step in the tensors' dtype."""
    k1, k2, v = (x.repeat_interleave(q1.shape[1] // k1.shape[1], 1) for x in (k1, k2, v))
    ahead = torch.arange(q1.shape[2], device=q1.device) - torch.arange(q1.shape[2], device=q1.device)[:, None]
    scores = torch.where(ahead.abs() < window, q1 @ k1.mT, q2 @ k2.mT) * sm_scale
    return (scores.masked_fill(ahead > 0, -math.inf) if causal else scores).softmax(-1) @ v
