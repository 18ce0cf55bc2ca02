"""The rotation that layer after layer of a model repeats: the last kind of call, known by one check.

In a model code and objects are out of the processor's caches by the next layer, so that each function counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk.ops.rope.autograd import INVERSE, ROTATE, ROTATED, inverse_rotate, save
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotation
from ropewalk.ops.rope.cuda import load as native
from ropewalk.ops.tracing import is_plain_eager, is_transformed, make_matcher


def _matches_nothing(*tensors: Tensor) -> bool:
    return False


class _Known:
    """A kind of rotation, and that of its last backward. It stays that of what it recorded."""

    __slots__ = ("flags", "inverse", "matches")

    def __init__(self, matches: Callable[..., bool] = _matches_nothing, flags: RopeFlags | None = None) -> None:
        self.matches, self.flags = matches, flags
        self.inverse: _Known | None = None

    def run(self, q: Tensor, k: Tensor, call: RopeCall) -> tuple[Tensor, ...]:
        """Rotate by the CUDA extension, or as calls of the kind do."""
        outs: Any = native.rotated((q, k), call)
        if outs is None:  # a named tuple's own constructor is a call of Python's
            outs = (INVERSE if call.flags.inverse else ROTATE).run(tuple.__new__(Rotation, (q, k, call)))
        return tuple(outs)

    def forward(self, ctx: Any, call: RopeCall, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Rotate, for autograd."""
        save(ctx, call)
        return self.run(q, k, call)

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Rotate gradients back."""
        _, _, *needed = ctx.needs_input_grad
        grad_q, grad_k = grads
        if grad_q is None or grad_k is None or torch.is_grad_enabled():
            return (None, *inverse_rotate(ctx, grads, needed))
        cos, sin, *_ = ctx.saved_tensors
        offset, flags = ctx.rest
        call = RopeCall(cos, sin, None, None, offset, flags.inverted())
        inverse = self.inverse
        if inverse is None or not inverse.matches(grad_q, grad_k, cos, sin):
            if not is_plain_eager(grad_q, grad_k) or grad_q is grad_k:
                return (None, *inverse_rotate(ctx, grads, needed))
            inverse = self.inverse = _Known(make_matcher(grad_q, grad_k, cos, sin), call.flags)
        return (None, *inverse.run(grad_q, grad_k, call))


class Repeater:
    """One caller's last kind of rotation: q and k by tables with a row for each token, out of place."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known = _Known()

    def rotate(self, q: Tensor, k: Tensor, call: RopeCall) -> tuple[Tensor, ...] | None:
        """Do what `apply_rope` does with a call that it ran before; None for a call of another kind.

        Dynamo must not trace it. The call has neither positions nor bounds.
        """
        known = self.known  # once: another thread may learn another kind meanwhile
        if not known.matches(q, k, call.cos, call.sin) or call.flags != known.flags or forward_ad._current_level >= 0:
            return None
        if q.requires_grad and torch.is_grad_enabled():
            outs: tuple[Tensor, ...] = ROTATED.record(known, call, q, k)
            return outs
        return known.run(q, k, call)

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
            self.known = _Known(make_matcher(q, k, cos, sin), call.flags)
