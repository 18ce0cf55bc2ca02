"""Eager calls of the Triton kernels, and what autograd keeps of them.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.ops.attention.prepare import Prepared

LN_2 = math.log(2)


def attend(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attend by the Triton kernels: q is (B, H, Tq, D), k is (B, K, Tk, D) and v (B, K, Tk, Dv).

    Returns the output, (B, H, Tq, Dv), and the natural log-sum-exp, (B, H, Tq), where it is asked for.
    """
    differentiable = (q, k, v, prepared.parameters, prepared.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        result: tuple[Tensor, Tensor | None] = _Attend.apply(*differentiable, prepared, return_lse)
        return result
    from ropewalk.ops.attention import triton_launch

    out, saved = triton_launch.forward(q, k, v, prepared, False)
    return out, saved.lse * LN_2 if return_lse else None


class _Attend(torch.autograd.Function):
    """Attention with its backward kernels, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parameters: Tensor | None,
        sinks: Tensor | None,
        prepared: Prepared,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        from ropewalk.ops.attention import triton_launch

        out, saved = triton_launch.forward(q, k, v, prepared)
        tensors, ctx.rest = split(prepared)
        ctx.save_for_backward(v, out, *saved, *tensors)
        ctx.set_materialize_grads(False)
        return out, saved.lse * LN_2 if return_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        from ropewalk.ops.attention import triton_launch

        v, out, q, k, lse, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        saved = triton_launch.Saved(q, k, lse)
        learned = triton_launch.Learned(*ctx.needs_input_grad[3:5])
        prepared = join(tensors, ctx.rest)
        return *triton_launch.backward(grad_out, grad_lse, v, out, saved, prepared, learned), None, None


def split(prepared: Sequence[Any]) -> tuple[list[Tensor | None], list[Any]]:
    """Part tensors, which autograd keeps, from numbers: each list has None where the other has a value."""
    tensors = [x if isinstance(x, Tensor) else None for x in prepared]
    return tensors, [None if isinstance(x, Tensor) else x for x in prepared]


def join(tensors: list[Tensor | None], rest: list[Any]) -> Prepared:
    """Undo `split`."""
    values: list[Any] = [y if x is None else x for x, y in zip(tensors, rest, strict=True)]
    return Prepared(*values)
