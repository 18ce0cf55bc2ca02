"""Attention with two encodings by flash-attn 4: two causal calls, merged by their log-sum-exp.

Near pairs are a sliding window's; far ones are those of plain causal attention of the queries from the window's length
on to the keys before the window. The backward is flash-attn's of both, each with the merged output and log-sum-exp.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.ops.once import differentiable_once


@lru_cache
def load_functions() -> tuple[tuple[Callable[..., Any], Callable[..., Any]] | None, str | None]:
    """flash-attn 4's forward and backward, or why there are none."""
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
        return (interface._flash_attn_fwd, interface._flash_attn_bwd), None
    except Exception as error:  # whatever a build for another torch or CUDA may raise
        return None, f"flash-attn 4's forward and backward cannot be imported: {error}"


def attend(q: Tensor, k: Tensor, q_past: Tensor, k_far: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attend causally, by q and k within a window and by `q_past` and `k_far` beyond it.

    All tensors are (B, T, H, D), and so is the result; there are as many queries as keys, and more than the window has.
    """
    out: Tensor = _Attend.apply(q, k, q_past, k_far, v, scale, window)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_past: Tensor, k_far: Tensor, v: Tensor, scale: float, window: int
    ) -> Tensor:
        from ropewalk.ops.attention.libraries import merge as triton_merge

        attend_forward, _ = _functions()
        out, lse = attend_forward(q, k, v, softmax_scale=scale, **_near(window), return_lse=True)[:2]
        far = _far(q_past, k_far, v, window)
        triton_merge.merge(out, lse, *attend_forward(*far, softmax_scale=scale, causal=True, return_lse=True)[:2])
        ctx.save_for_backward(q, k, q_past, k_far, v, out, lse)
        ctx.scale, ctx.window = scale, window
        result: Tensor = out
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        _, attend_backward = _functions()
        q, k, q_past, k_far, v, out, lse = ctx.saved_tensors
        scale, window = ctx.scale, ctx.window
        grad_q, grad_k, grad_v = attend_backward(q, k, v, out, grad_out, lse, scale, **_near(window))[:3]
        rows = slice(window, None)
        far = _far(q_past, k_far, v, window)
        grad_past, grad_far, grad_values = attend_backward(
            *far, out[:, rows], grad_out[:, rows], lse[:, :, rows].contiguous(), scale, causal=True
        )[:3]
        grad_v[:, :-window] += grad_values
        before, after = (0, 0, 0, 0, window, 0), (0, 0, 0, 0, 0, window)
        return grad_q, grad_k, F.pad(grad_past, before), F.pad(grad_far, after), grad_v, None, None


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    functions, reason = load_functions()
    if functions is None:
        raise RuntimeError(reason)
    return functions


def _near(window: int) -> dict[str, Any]:
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def _far(q_past: Tensor, k_far: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries that have far keys, and the keys and values that are far from some query."""
    return q_past[:, window:], k_far[:, :-window], v[:, :-window]
