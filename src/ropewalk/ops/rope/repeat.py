"""The rotation that layer after layer of a model repeats: the last kind of call, known by one check.

In a model code and objects are out of the processor's caches by the next layer, so that each function counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk.ops.rope.autograd import find_run, inverse_rotate, rotated, save
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotate
from ropewalk.ops.tracing import is_plain_eager, is_transformed, make_matcher


def _matches_nothing(*tensors: Tensor) -> bool:
    return False


class _Kind(NamedTuple):
    """A kind of rotation: a check that a call is of it, and the function that runs it."""

    matches: Callable[..., bool]
    run: Rotate | None
    flags: RopeFlags | None


_NO_KIND = _Kind(_matches_nothing, None, None)


class _Recorded:
    """The kind of recorded calls, and that of their last backward. It stays theirs, whatever their caller repeats."""

    __slots__ = ("inverse", "kind")

    def __init__(self, kind: _Kind) -> None:
        self.kind, self.inverse = kind, _NO_KIND


class Repeater:
    """One caller's last kind of rotation: q and k by tables with a row for each token, out of place."""

    __slots__ = ("recorded",)

    def __init__(self) -> None:
        self.recorded = _Recorded(_NO_KIND)

    def rotate(self, q: Tensor, k: Tensor, call: RopeCall) -> tuple[Tensor, ...] | None:
        """Do what `apply_rope` does with a call that it ran before; None for a call of another kind.

        Dynamo must not trace it. The call has neither positions nor bounds.
        """
        recorded = self.recorded  # once: another thread may learn another kind meanwhile
        matches, run, flags = recorded.kind
        if not matches(q, k, call.cos, call.sin) or call.flags != flags or forward_ad._current_level >= 0:
            return None
        if q.requires_grad and torch.is_grad_enabled():
            return _record(recorded, call, q, k)
        return rotated((q, k), call, run)

    def learn(self, q: Tensor, k: Tensor, call: RopeCall) -> None:
        """Remember the kind of a call that `apply_rope` ran."""
        cos, sin = call.cos, call.sin
        if (
            is_plain_eager(q, k, cos, sin)
            and not is_transformed()
            and q.requires_grad == k.requires_grad
            and not (cos.requires_grad or sin.requires_grad)
            and q is not k
        ):
            self.recorded = _Recorded(_Kind(make_matcher(q, k, cos, sin), find_run((q, k), call), call.flags))


class _Repeated(torch.autograd.Function):
    """A repeated rotation; the derivative is the inverse one."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, call: RopeCall, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        save(ctx, call)
        return rotated((q, k), call, recorded.kind.run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, *needed = ctx.needs_input_grad
        grad_q, grad_k = grads
        if grad_q is None or grad_k is None or torch.is_grad_enabled():
            return None, None, *inverse_rotate(ctx, grads, needed)
        cos, sin, *_ = ctx.saved_tensors
        offset, flags = ctx.rest
        call = RopeCall(cos, sin, None, None, offset, flags._replace(inverse=not flags.inverse))
        matches, run, _ = ctx.recorded.inverse
        if not matches(grad_q, grad_k, cos, sin):
            if not is_plain_eager(grad_q, grad_k) or grad_q is grad_k:
                return None, None, *inverse_rotate(ctx, grads, needed)
            run = find_run((grad_q, grad_k), call)
            ctx.recorded.inverse = _Kind(make_matcher(grad_q, grad_k, cos, sin), run, call.flags)
        return None, None, *rotated((grad_q, grad_k), call, run)


# As in `autograd`.
_record: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Repeated).apply
