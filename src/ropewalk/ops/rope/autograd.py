"""Eager calls of the rotation: their kinds, and autograd.

A decode step calls the rotation once per layer, so a call's host time counts. The CUDA extension, once loaded, checks
each call by itself. Every other call is of a kind, which depends on shapes, strides, dtypes and flags alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.launch.autograd import Recorder, unwrap_if_dead
from ropewalk.ops.launch.kinds import Launcher, Operation, existing
from ropewalk.ops.launch.record import Record
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.call import RopeCall, Rotation, ShiftedRotation
from ropewalk.ops.rope.cuda import load as native
from ropewalk.ops.rope.heads import reference as head_reference
from ropewalk.ops.rope.heads.reference import HeadGradients
from ropewalk.ops.rope.validate import (
    check_arguments,
    check_axes,
    check_disjoint,
    check_inplace,
    check_learned,
    check_offset,
    check_overwritable,
    check_values,
    max_offset,
    reach,
)
from ropewalk.ops.tracing import refuse_tangents, with_memory

_increment_version = torch._C._increment_version


class _Checked:
    """The launcher of a kind of calls, whose metadata is checked, and the checks that every one of them needs."""

    __slots__ = ("backward_reach", "before", "forward_reach", "is_plain", "launcher", "max_offset")

    def __init__(self, record: Rotation | ShiftedRotation) -> None:
        rotation = record.rotation
        q, k, call = rotation
        cos, _, positions, cu_seqlens, offset, flags, axes = call
        check_arguments(q, k, *call[:4], axes, flags)
        if flags.inplace:
            check_inplace(q, k)
        self.launcher = backends.choose_launcher(rotation)
        self.is_plain = getattr(self.launcher, "is_plain", False)
        self.max_offset = max_offset(q, cos, positions, cu_seqlens, flags.layout)
        check_offset(offset, q, cos, positions, cu_seqlens, flags.layout)
        # In bytes: q and k can share memory only where the distance of their first elements is within these.
        self.forward_reach, self.backward_reach = reach(q), -1 if k is None else reach(k)
        differs = type(record) is ShiftedRotation or cu_seqlens is not None or axes is not None
        self.before = self._check_values if differs or (flags.inplace and k is not None) else None

    def _check_values(self, record: Any, addresses: Sequence[int]) -> None:
        q, k, (cos, _, positions, cu_seqlens, _, flags, axes), *starts = record
        for start in starts:
            if not 0 <= start <= self.max_offset:
                check_offset(start, q, cos, positions, cu_seqlens, flags.layout)
        if cu_seqlens is not None:
            check_values(cu_seqlens, q.shape[0])
        if axes is not None:
            check_axes(axes, positions.shape[0])
        if k is not None and flags.inplace:
            q_address, k_address, *_ = addresses
            if -self.backward_reach <= k_address - q_address <= self.forward_reach:
                check_disjoint(q, k)

    def __call__(self, record: Rotation | ShiftedRotation, on: Steps) -> Sequence[Tensor | None]:
        """Run the launcher."""
        return self.launcher(record.rotation, on)


ROTATED = Recorder("Rotate")
ROTATE = Operation(Rotation, _Checked)
INVERSE = Operation(Rotation, _Checked)  # training rotates back and forth: each finds its last kind first
SHIFTED = Operation(Record(ShiftedRotation, leave_out=("offset",)), _Checked)


def _run(xs: Sequence[Tensor], call: RopeCall) -> Sequence[Any]:
    """Check a call, run it, and return the results that are not in place."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    offset, flags = call.offset, call.flags
    # A named tuple's own constructor is a call of Python's.
    if type(offset) is int and offset != 0:
        return SHIFTED.run(tuple.__new__(ShiftedRotation, (q, k, call, offset)))
    return (INVERSE if flags.inverse else ROTATE).run(tuple.__new__(Rotation, (q, k, call)))


def _overwrite(xs: Sequence[Tensor], call: RopeCall) -> None:
    """Check a call, and rotate `xs` in place."""
    # The CUDA extension checks a call in less time than its kind takes to find.
    if not native.rotate(xs, xs, call):
        _run(xs, call)


def rotated(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    """Check a call, and return the rotation of `xs` in new tensors."""
    outs = native.rotated(xs, call)
    return tuple(_run(xs, call)) if outs is None else outs


def rotate(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    """Rotate `xs`, (q,) or (q, k), record it for autograd, and return the rotated tensors."""
    inplace = call.flags.inplace
    if call[0].requires_grad or call[1].requires_grad:
        check_learned(*call[:3], inplace)
        if torch.is_grad_enabled():
            learned: tuple[Tensor, ...] = ROTATED.record(
                _RotateLearned, call, *call[:2], *[unwrap_if_dead(x) for x in xs]
            )
            return learned
    if (xs[0].requires_grad or xs[-1].requires_grad) and torch.is_grad_enabled():
        if inplace:
            return _rotate_inplace_with_grad(xs, call)
        outs: tuple[Tensor, ...] = ROTATED.record(Rotate, call, *[unwrap_if_dead(x) for x in xs])
        return outs
    if inplace:
        if not native.rotate(xs, xs, call):  # as `_overwrite`, without a function
            _run(xs, call)
        _increment_version(xs)
        return tuple(xs)
    return rotated(xs, call)


def _rotate_inplace_with_grad(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    recorded = [i for i, x in enumerate(xs) if x.requires_grad]
    for i in recorded:
        check_overwritable("qk"[i], xs[i])
    _overwrite(xs, call)
    _increment_version([x for x in xs if not x.requires_grad])
    # The values are written; autograd's record of them is missing. A view is recorded by itself: a function that
    # overwrites a view may have no second result.
    views = any(xs[i]._is_view() for i in recorded)
    groups = [[i] for i in recorded] if views else [recorded]
    results = list(xs)
    for group in groups:
        outs = _Overwritten.apply(call, *(xs[i] for i in group))
        for i, out in zip(group, outs, strict=True):
            results[i] = out
    return tuple(results)


class Rotate:
    """The rotation out of place, as autograd records it; the derivative is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, call: RopeCall, *xs: Tensor) -> tuple[Tensor, ...]:
        outs = rotated(xs, call)
        _, _, *needed = ctx.needs_input_grad
        if False in needed:
            ctx.mark_non_differentiable(*(out for out, is_needed in zip(outs, needed, strict=True) if not is_needed))
        save(ctx, call)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, *needed = ctx.needs_input_grad
        return (None, *inverse_rotate(ctx, grads, needed))


class _RotateLearned:
    """The rotation by tables per head that require grad, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, call: RopeCall, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        outs = rotated(xs, call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, call.positions, call.cu_seqlens, *xs)
        ctx.rest = call.offset, call.flags
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, positions, cu_seqlens, *xs = ctx.saved_tensors
        _, _, needs_dcos, needs_dsin, *needs_dx = ctx.needs_input_grad
        offset, flags = ctx.rest
        call = RopeCall(cos, sin, positions, cu_seqlens, offset, flags)
        results: list[Tensor | None] = [None] * len(xs)
        slots = [i for i, grad in enumerate(grads) if grad is not None]
        if not slots:
            return (None, None, None, *results)
        with_values = [with_memory(grad) for grad in grads if grad is not None]
        wants_dx = any(needs_dx[i] for i in slots)
        run = head_reference.differentiate if torch.is_grad_enabled() else differentiate
        dxs, dcos, dsin = run(with_values, [xs[i] for i in slots], call, wants_dx)
        for i, dx in zip(slots, dxs or (), strict=False):
            results[i] = dx if needs_dx[i] else None
        return (None, dcos if needs_dcos else None, dsin if needs_dsin else None, *results)


def _choose_gradients(record: HeadGradients) -> Launcher:
    return backends.choose_gradients(record.call.flags.impl, record.q.device, record.call)


GRADIENTS = Operation(HeadGradients, _choose_gradients)


def differentiate(
    grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall, needs_dx: bool
) -> tuple[list[Tensor] | None, Tensor, Tensor]:
    """Return the gradients of `xs`, if they are needed, of cos and of sin, for a call that `rotate` has checked.

    `grads` are those of the rotated `xs`; none is None.
    """
    (q_grad, k_grad), (q, k) = ((*tensors, None)[:2] for tensors in (grads, xs))
    found: Any = GRADIENTS.run(HeadGradients(q_grad, k_grad, q, k, call, needs_dx))  # type: ignore[arg-type]
    dq, dk, dcos, dsin = found
    return existing((dq, dk)) or None, dcos, dsin


class _Overwritten(torch.autograd.Function):
    """Record a rotation that has just been done in place."""

    @staticmethod
    def forward(ctx: Any, call: RopeCall, *xs: Tensor) -> Any:
        # No tensor may precede xs: where a function overwrites a view, autograd takes its first tensor for that view.
        ctx.mark_dirty(*xs)
        save(ctx, call)
        return xs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_tangents(grads)
        # Every tensor that was recorded requires grad.
        return (None, *inverse_rotate(ctx, grads, [True] * len(grads)))


def save(ctx: Any, call: RopeCall) -> None:
    """Keep for a backward what a rotation read."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:4], call.axes)
    ctx.rest = call.offset, call.flags


def inverse_rotate(ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Rotate back the gradients that exist and are needed, in one launch."""
    present = {i: grad for i, grad in enumerate(grads) if grad is not None and needed[i]}
    results: list[Tensor | None] = [None] * len(grads)
    if present:
        offset, flags = ctx.rest
        cos, sin, positions, cu_seqlens, axes = ctx.saved_tensors
        call = tuple.__new__(RopeCall, (cos, sin, positions, cu_seqlens, offset, flags.inverted(), axes))
        with_values = [x if not (x.is_neg() or x._is_zerotensor()) else with_memory(x) for x in present.values()]
        run = rotate if torch.is_grad_enabled() else rotated
        for i, grad in zip(present, run(with_values, call), strict=True):
            results[i] = grad
    return tuple(results)
