"""Backwards that can be differentiated no further."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.tracing import refuse_tangents

Backward = Callable[..., tuple[Tensor | None, ...]]
REFUSAL = (
    "trying to differentiate twice: attention by our kernels is differentiable once; impl='reference' is as often as "
    "you like, without precision"
)


def differentiable_once(backward: Backward, refusal: str = REFUSAL) -> Backward:
    """Let the gradients of a backward refuse to be differentiated, wherever they are recorded.

    PyTorch's `once_differentiable` refuses where a gradient of the results requires one. With a constant one, as for a
    penalty of gradients, it returns constants: the penalty would silently lack a gradient.
    """

    @functools.wraps(backward)
    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_tangents(grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # What was saved leads to the inputs, so that a gradient of these inputs alone asks the refusal, too.
        leading = [x for x in ctx.saved_tensors if x is not None and x.requires_grad]
        refuse = torch._C._functions.DelayedError(refusal.encode(), len(found) + len(leading))
        leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in found]
        refusing: tuple[Tensor | None, ...] = refuse(*leaves, *leading)
        return refusing[: len(found)]

    return differentiate
