"""Eager calls of the rotation with a norm: their kinds, and autograd.

q and k are saved for the backward: recovering them from the results divides by weights, which may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.launch.autograd import Recorder, unwrap_if_dead
from ropewalk.ops.launch.kinds import Launcher, Operation
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.norm import Needed, NormCall, Normed, NormGradients, check_norm, reference
from ropewalk.ops.rope.validate import (
    check_arguments,
    check_axes,
    check_fixed,
    check_offset,
    check_tensors,
    check_values,
)
from ropewalk.ops.tracing import with_memory


def check(normed: Normed) -> None:
    """Raise unless a call's arguments fit together, by their metadata alone."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    rope = call.rope
    if rotates(call):
        check_arguments(q, k, *rope[:4], rope.axes, rope.flags)
        check_offset(rope.offset, q, rope.cos, rope.positions, rope.cu_seqlens, rope.flags.layout)
    else:
        check_tensors(q, k, rope.flags.layout)
    xs = (q,) if k is None else (q, k)
    check_norm(xs, (q_weight, k_weight), call, (q_bias, k_bias))


def rotates(call: NormCall) -> bool:
    """Say whether the call rotates: `api.normalize` passes tables without columns."""
    return not (isinstance(call.rope.cos, Tensor) and tuple(call.rope.cos.shape) == (1, 1, 0))


class _Checked:
    """The launcher of a kind of calls, whose metadata is checked, and the checks that every one of them needs."""

    __slots__ = ("before", "is_plain", "launcher")

    def __init__(self, normed: Normed) -> None:
        check(normed)
        rope = normed.call.rope
        self.launcher: Launcher = backends.choose_norm(rope.flags.impl, normed.q.device).forward
        self.is_plain = getattr(self.launcher, "is_plain", False)
        self.before = None if rope.cu_seqlens is None and rope.axes is None else _check_indices

    def __call__(self, normed: Normed, on: Steps) -> Sequence[Tensor | None]:
        """Run the launcher."""
        return self.launcher(normed, on)


def _check_indices(normed: Normed, addresses: Sequence[int]) -> None:
    rope = normed.call.rope
    if rope.cu_seqlens is not None:
        check_values(rope.cu_seqlens, normed.q.shape[0])
    if rope.axes is not None:
        assert rope.positions is not None
        check_axes(rope.axes, rope.positions.shape[0])


def _choose_gradients(gradients: NormGradients) -> Launcher:
    q, flags = gradients.normed.q, gradients.normed.call.rope.flags
    launcher: Launcher = backends.choose_norm(flags.impl, q.device).backward
    return launcher


_RECORDER = Recorder("NormRotate")
NORM, GRADIENTS = Operation(Normed, _Checked), Operation(NormGradients, _choose_gradients)


def forward(normed: Normed) -> tuple[Tensor, ...]:
    """Check a call, and return q and k normed and rotated in new tensors."""
    outs: Any = NORM.run(normed)
    return tuple(outs)


def backward(q_grad: Tensor | None, k_grad: Tensor | None, normed: Normed, needed: Needed) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, weights and biases that are needed, of a call that `forward` has checked."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    has_q = q_grad is not None and (needed.q or needed.q_weight or needed.q_bias)
    has_k = k_grad is not None and (needed.k or needed.k_weight or needed.k_bias)
    if q_grad is not None and k_grad is not None and has_q and has_k:
        return GRADIENTS.run(NormGradients(with_memory(q_grad), with_memory(k_grad), normed, needed))
    if q_grad is not None and has_q:
        needed_of_q = Needed(needed.q, False, needed.q_weight, False, needed.q_bias, False)
        normed = Normed(q, None, q_weight, None, q_bias, None, call)
        return GRADIENTS.run(NormGradients(with_memory(q_grad), None, normed, needed_of_q))
    if k_grad is not None and k is not None and has_k:
        needed_of_k = Needed(needed.k, False, needed.k_weight, False, needed.k_bias, False)
        normed = Normed(k, None, k_weight, None, k_bias, None, call)
        dk, _, dk_weight, _, dk_bias, _ = GRADIENTS.run(NormGradients(with_memory(k_grad), None, normed, needed_of_k))
        return None, dk, None, dk_weight, None, dk_bias
    return [None] * len(needed)


def norm_and_rotate(normed: Normed) -> tuple[Tensor, ...]:
    """Normalise and rotate q, or q and k, record it for autograd, and return the results."""
    *tensors, call = normed
    check_fixed(call.rope.cos, call.rope.sin)
    if torch.is_grad_enabled():
        for x in tensors:  # `any` would call a generator for each
            if x is not None and x.requires_grad:
                outs: tuple[Tensor, ...] = _RECORDER.record(
                    _NormRotate, call, *[None if x is None else unwrap_if_dead(x) for x in tensors]
                )
                return outs
    return forward(normed)


class _NormRotate:
    """The rotation with a norm, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, call: NormCall, *tensors: Any) -> tuple[Tensor, ...]:
        outs = forward(Normed._make((*tensors, call)))
        _, _, *needs = ctx.needs_input_grad
        needed = Needed(*needs)
        differentiable = needed.q or needed.q_weight or needed.q_bias, needed.k or needed.k_weight or needed.k_bias
        if constant := [out for out, is_needed in zip(outs, differentiable, strict=False) if not is_needed]:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *call.rope[:4], call.rope.axes)
        ctx.rest = call.rope.offset, call.rope.flags, call.flags
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, cos, sin, positions, cu_seqlens, axes = ctx.saved_tensors
        offset, rope_flags, flags = ctx.rest
        rope = RopeCall(cos, sin, positions, cu_seqlens, offset, rope_flags, axes)
        _, _, *needed = ctx.needs_input_grad
        q_grad, k_grad = (*grads, None)[:2]
        # create_graph=True: PyTorch's own operations have further derivatives
        run = reference.norm_rope_backward if torch.is_grad_enabled() else backward
        return (None, *run(q_grad, k_grad, Normed._make((*tensors, NormCall(rope, flags))), Needed(*needed)))
