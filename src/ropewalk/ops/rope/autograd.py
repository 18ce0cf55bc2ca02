"""Eager calls of the rotation: plans, which are kept from call to call, and autograd.

A decode step calls the rotation once per layer, so a call's host time counts. The CUDA extension, once loaded, checks
each call by itself. Every other call has a plan, which depends on shapes, strides, dtypes and flags alone. A plan is
made once and found again under those; the call then allocates its results and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.arguments import check_dense
from ropewalk.ops.rope import backends, head_tables
from ropewalk.ops.rope.call import RopeCall, Rotate
from ropewalk.ops.rope.cuda import load as native
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
from ropewalk.ops.tracing import with_memory


def _prepare(xs: Sequence[Tensor], call: RopeCall) -> Rotate:
    """Check shapes, strides, dtypes and devices, and return the function for calls like this one."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    flags = call.flags
    check_arguments(q, k, *call[:4], call.axes, flags)
    if flags.inplace:
        check_inplace(q, k)
    return backends.prepare(xs, call)


class _Plan:
    """The function for calls with the same metadata, and the bounds of the checks that every one of them needs."""

    __slots__ = ("backward_reach", "forward_reach", "max_offset", "run")

    def __init__(self, run: Rotate, q: Tensor, k: Tensor | None, max_offset: int) -> None:
        self.run = run
        self.max_offset = max_offset
        # In bytes: q and k can share memory only where the distance of their first elements is within these.
        self.forward_reach = reach(q)
        self.backward_reach = -1 if k is None else reach(k)


_PLANS: dict[Any, _Plan] = {}
_increment_version = torch._C._increment_version
_MAX_PLANS = 4096  # a stream of ever new lengths must not fill the memory


def _find(xs: Sequence[Tensor], call: RopeCall) -> _Plan:
    """Check a call, and return its plan: the one of an earlier call, if its metadata were the same."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    cos, sin, positions, cu_seqlens, offset, flags, axes = call
    layout, _, _, rotary_dim, rotary_offset, inplace, _, pair_block = flags
    try:
        key = (
            (q.shape, q.stride(), q.dtype, q.device, q.layout),
            None if k is None else (k.shape, k.stride(), k.dtype, k.device, k.layout),
            (cos.shape, cos.stride(), cos.dtype, cos.device),
            (sin.shape, sin.stride(), sin.dtype, sin.device),
            None if positions is None else (positions.shape, positions.stride(), positions.dtype, positions.device),
            None
            if cu_seqlens is None
            else (cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.dtype, cu_seqlens.device),
            flags,
            # 1.0 is 1 to a dict, and no width.
            None
            if rotary_dim is None and pair_block is None and type(rotary_offset) is int
            else (type(rotary_dim), type(rotary_offset), type(pair_block)),
            None if axes is None else (axes.shape, axes.stride(), axes.dtype, axes.device),
        )
    except RuntimeError:  # a nested tensor has no shape
        for name, x in zip(("q", "k", *call._fields), (q, k, *call[:4]), strict=False):
            if x is not None:
                check_dense(name, x)
        raise
    plan = _PLANS.get(key)
    if plan is None:
        run = _prepare(xs, call)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        plan = _Plan(run, q, k, max_offset(q, cos, positions, cu_seqlens, layout))
        _PLANS[key] = plan
    if not 0 <= offset <= plan.max_offset:
        check_offset(offset, q, cos, positions, cu_seqlens, layout)
    if cu_seqlens is not None:
        check_values(cu_seqlens, q.shape[0])
    if axes is not None:
        assert positions is not None
        check_axes(axes, positions.shape[0])
    if inplace and k is not None:
        distance = k.data_ptr() - q.data_ptr()
        if -plan.backward_reach <= distance <= plan.forward_reach:
            check_disjoint(q, k)
    return plan


def _overwrite(xs: Sequence[Tensor], call: RopeCall) -> None:
    """Check a call, and rotate `xs` in place."""
    # The CUDA extension checks a call in less time than its plan takes to find.
    if not native.rotate(xs, xs, call):
        _find(xs, call).run(xs, xs, call)


def rotated(xs: Sequence[Tensor], call: RopeCall, run: Rotate | None = None) -> tuple[Tensor, ...]:
    """Return the rotation of `xs` in new tensors; check the call, unless `run` is that of a call like it."""
    outs = native.rotated(xs, call)
    if outs is None:
        run = run or _find(xs, call).run
        outs = tuple(map(torch.empty_like, xs))
        run(xs, outs, call)
    return outs


def find_run(xs: Sequence[Tensor], call: RopeCall) -> Rotate:
    """Check a call, and return the function that writes its rotation where the CUDA extension does not."""
    return _find(xs, call).run


def rotate(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    """Rotate `xs`, (q,) or (q, k), record it for autograd, and return the rotated tensors."""
    inplace = call.flags.inplace
    if call[0].requires_grad or call[1].requires_grad:
        check_learned(*call[:3], inplace)
        if torch.is_grad_enabled():
            return _record_learned(call, *call[:2], *[_unwrap_if_dead(x) for x in xs])
    if (xs[0].requires_grad or xs[-1].requires_grad) and torch.is_grad_enabled():
        if inplace:
            return _rotate_inplace_with_grad(xs, call)
        return _record(call, *[_unwrap_if_dead(x) for x in xs])
    if inplace:
        if not native.rotate(xs, xs, call):  # as `_overwrite`, without a function
            _find(xs, call).run(xs, xs, call)
        _increment_version(xs)
        return tuple(xs)
    return rotated(xs, call)


def _rotate_inplace_with_grad(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    recorded = [i for i, x in enumerate(xs) if x.requires_grad]
    for i in recorded:
        check_overwritable("qk"[i], xs[i])
    _overwrite(xs, call)
    torch._C._increment_version([x for x in xs if not x.requires_grad])
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


class _Rotate(torch.autograd.Function):
    """Rotate out of place; the derivative is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, call: RopeCall, *xs: Tensor) -> tuple[Tensor, ...]:
        outs = rotated(xs, call)
        if False in (needed := ctx.needs_input_grad[1:]):
            ctx.mark_non_differentiable(*(out for out, is_needed in zip(outs, needed, strict=True) if not is_needed))
        save(ctx, call)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *inverse_rotate(ctx, grads, ctx.needs_input_grad[1:]))


# `_Rotate.apply` without its tests for a setup_context and for active transforms: these take 2 us of 7, and `rotate`
# runs under no transform.
_record: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Rotate).apply
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # of a transform that has ended


class _RotateLearned(torch.autograd.Function):
    """Rotate by tables per head that require grad."""

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
        _, needs_dcos, needs_dsin, *needs_dx = ctx.needs_input_grad
        offset, flags = ctx.rest
        call = RopeCall(cos, sin, positions, cu_seqlens, offset, flags)
        results: list[Tensor | None] = [None] * len(xs)
        slots = [i for i, grad in enumerate(grads) if grad is not None]
        if not slots:
            return (None, None, None, *results)
        given = [with_memory(grad) for grad in grads if grad is not None]
        wants_dx = any(needs_dx[i] for i in slots)
        run = head_tables.differentiate if torch.is_grad_enabled() else differentiate
        dxs, dcos, dsin = run(given, [xs[i] for i in slots], call, wants_dx)
        for i, dx in zip(slots, dxs or (), strict=False):
            results[i] = dx if needs_dx[i] else None
        return (None, dcos if needs_dcos else None, dsin if needs_dsin else None, *results)


_record_learned: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _RotateLearned).apply
_GRADIENT_PLANS: dict[Any, Callable[..., Any]] = {}


def differentiate(
    grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall, needs_dx: bool
) -> tuple[list[Tensor] | None, Tensor, Tensor]:
    """Return the gradients of `xs`, if they are needed, of cos and of sin, for a call that `rotate` has checked.

    `grads` are those of the rotated `xs`, all given.
    """
    tensors = (*grads, *xs, *call[:4])
    key = (
        tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]),
        len(xs),
        needs_dx,
        call.flags,
    )
    plan = _GRADIENT_PLANS.get(key)
    if plan is None:
        if len(_GRADIENT_PLANS) >= _MAX_PLANS:
            _GRADIENT_PLANS.clear()
        module = backends.choose_gradients(call.flags.impl, xs[0].device, call)
        plan = _GRADIENT_PLANS[key] = module.prepare_gradients(grads, xs, call, needs_dx)
    gradients: tuple[list[Tensor] | None, Tensor, Tensor] = plan(grads, xs, call)
    return gradients


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
        # Every tensor that was recorded requires grad.
        return (None, *inverse_rotate(ctx, grads, [True] * len(grads)))


def save(ctx: Any, call: RopeCall) -> None:
    """Keep for a backward what a rotation read."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:4], call.axes)
    ctx.rest = call.offset, call.flags


def inverse_rotate(ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Rotate back the gradients that exist and are needed, in one launch."""
    present = {i: with_memory(grad) for i, grad in enumerate(grads) if grad is not None and needed[i]}
    results: list[Tensor | None] = [None] * len(grads)
    if present:
        offset, flags = ctx.rest
        inverse = flags._replace(inverse=not flags.inverse, inplace=False)
        cos, sin, positions, cu_seqlens, axes = ctx.saved_tensors
        rotated = rotate(tuple(present.values()), RopeCall(cos, sin, positions, cu_seqlens, offset, inverse, axes))
        for i, grad in zip(present, rotated, strict=True):
            results[i] = grad
    return tuple(results)
