"""The rotation that layer after layer of a model repeats: the last kind of call, known by one check.

In a model code and objects are out of the processor's caches by the next layer, so that each function counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk.ops.rope.autograd import find_run, inverse_rotate, rotated, save
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotate
from ropewalk.ops.tracing import is_plain_eager, is_transformed, make_matcher


class Repeater:
    """One caller's last kind of rotation: q and k by tables with a row for each token, out of place."""

    __slots__ = ("flags", "inverse_run", "matches", "matches_grads", "run")

    def __init__(self) -> None:
        self.flags: RopeFlags | None = None
        self.matches = self.matches_grads = _matches_nothing
        self.run: Rotate | None = None
        self.inverse_run: Rotate | None = None

    def rotate(self, q: Tensor, k: Tensor, call: RopeCall) -> tuple[Tensor, ...] | None:
        """Do what `apply_rope` does with a call that it ran before; None for a call of another kind.

        Dynamo must not trace it. The call has neither positions nor bounds.
        """
        if not self.matches(q, k, call[0], call[1]) or call[5] != self.flags or forward_ad._current_level >= 0:
            return None
        if q.requires_grad and torch.is_grad_enabled():
            return _record(self, call, q, k)
        return rotated((q, k), call, self.run)

    def learn(self, q: Tensor, k: Tensor, call: RopeCall) -> None:
        """Remember the kind of a call that `apply_rope` ran."""
        cos, sin = call[:2]
        if (
            is_plain_eager(q, k, cos, sin)
            and not is_transformed()
            and q.requires_grad == k.requires_grad
            and not (cos.requires_grad or sin.requires_grad)
            and q is not k
        ):
            self.run, self.flags = find_run((q, k), call), call.flags
            self.matches, self.matches_grads = make_matcher(q, k, cos, sin), _matches_nothing


class _Repeated(torch.autograd.Function):
    """A repeated rotation; the derivative is the inverse one."""

    @staticmethod
    def forward(ctx: Any, repeater: Repeater, call: RopeCall, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        ctx.repeater = repeater
        save(ctx, call)
        return rotated((q, k), call, repeater.run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = grads
        if grad_q is None or grad_k is None or torch.is_grad_enabled():
            return None, None, *inverse_rotate(ctx, grads, ctx.needs_input_grad[2:])
        repeater: Repeater = ctx.repeater
        cos, sin, *_ = ctx.saved_tensors
        offset, flags = ctx.rest
        call = RopeCall(cos, sin, None, None, offset, flags._replace(inverse=not flags.inverse))
        if not repeater.matches_grads(grad_q, grad_k, cos, sin):
            if not is_plain_eager(grad_q, grad_k) or grad_q is grad_k:
                return None, None, *inverse_rotate(ctx, grads, ctx.needs_input_grad[2:])
            repeater.inverse_run = find_run((grad_q, grad_k), call)
            repeater.matches_grads = make_matcher(grad_q, grad_k, cos, sin)
        return None, None, *rotated((grad_q, grad_k), call, repeater.inverse_run)


# As in `autograd`.
_record: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Repeated).apply


def _matches_nothing(*tensors: Tensor) -> bool:
    return False
