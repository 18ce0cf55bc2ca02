"""The results of 8-bit products with the gradients of a function that stands beside them, differentiable once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.once import differentiable_once


def follow(
    out: Tensor, lse: Tensor, differentiable_out: Tensor, differentiable_lse: Tensor, *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and lse, with the gradients of functions that stand beside them.

    inputs: the tensors that these are of, by which a second differentiation finds its refusal.
    """
    if torch.compiler.is_compiling():  # whose gradients cannot be differentiated
        inputs = ()
    results: tuple[Tensor, Tensor] = (_FollowTraced if not inputs else _Follow).apply(
        out, lse, differentiable_out, differentiable_lse, *inputs
    )
    return results


REFUSAL = (
    "trying to differentiate twice: attention with precision is differentiable once; with precision=None, "
    "impl='reference' is as often as you like"
)


def _hand_on(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, *grads, *[None] * len(ctx.saved_tensors))


class _Follow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, differentiable_out: Tensor, differentiable_lse: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return out.clone(), lse.clone()

    backward = staticmethod(differentiable_once(_hand_on, REFUSAL))


class _FollowTraced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, differentiable_out: Tensor, differentiable_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, grad_out, grad_lse
