"""Eager calls of the rotation: the choice of an implementation, the memory of past choices, and autograd.

A decode step calls the rotation once per layer, so what a call costs the host counts. The CUDA extension, once loaded,
checks each call by itself. For the others, and for calls that it does not take, whatever depends on shapes, strides,
dtypes and flags alone is worked out once and remembered under them; a call like one seen before looks that up,
allocates its results and launches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope import native, reference
from ropewalk.ops.rope.checks import (
    Call,
    check_apart,
    check_arguments,
    check_fixed,
    check_inplace,
    check_offset,
    check_overwritable,
    check_values,
    max_offset,
    reach,
)

Rotate = Callable[[Sequence[Tensor], Sequence[Tensor], Call], None]  # writes the rotation of the first into the second

IMPLEMENTATIONS = ("native", "triton", "reference")  # the fastest first


def why_not(impl: str, device: torch.device) -> str | None:
    """Say why `impl` cannot serve tensors on `device`; None if it can."""
    if impl == "reference":
        return None
    if impl == "native":
        return native.why_not(device)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from ropewalk.ops.rope import triton_launch

    if triton_launch.interpreted():
        return None if device.type == "cpu" else f"Triton's interpreter takes CPU tensors, not {device.type} tensors"
    if device.type != "cuda":
        return f"Triton kernels need a GPU, and the tensors are on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def choose(impl: str | None, device: torch.device) -> str:
    """Name the implementation that serves a call: `impl`, or the fastest that this device has."""
    if impl is None:
        # On the CPU Triton means its interpreter, which is for tests: nobody wants it unasked.
        names = IMPLEMENTATIONS if device.type == "cuda" else ("reference",)
        return next(name for name in names if why_not(name, device) is None)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}, but must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    reason = why_not(impl, device)
    if reason is not None:
        raise ValueError(f"impl is {impl!r}, but it cannot serve this call: {reason}")
    return impl


def _prepare(xs: Sequence[Tensor], call: Call) -> Rotate:
    """Check all that shapes, strides, dtypes and devices can tell, and return what will serve calls like this one."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    flags = call.flags
    check_arguments(q, k, *call[:4], flags.layout, flags.rotary_dim, flags.rotary_offset)
    if flags.inplace:
        check_inplace(q, k)
    impl = choose(flags.impl, q.device)
    if impl == "native" and not native.load():
        impl = choose(flags.impl, q.device)  # it knows now, and raises if that was the one asked for
    if impl == "native":
        return native.rotate_unusual
    if impl == "reference":
        return reference.rotate
    from ropewalk.ops.rope import triton_launch

    return triton_launch.prepare(xs, call)


class _Prepared:
    """What is remembered of a kind of call: who serves it, and what is left to check of each."""

    __slots__ = ("backward_reach", "forward_reach", "max_offset", "run")

    def __init__(self, run: Rotate, q: Tensor, k: Tensor | None, max_offset: int) -> None:
        self.run = run
        self.max_offset = max_offset
        # How far, in bytes, k's first element may lie from q's when the two can share memory.
        self.forward_reach = reach(q)
        self.backward_reach = -1 if k is None else reach(k)


_PREPARED: dict[Any, _Prepared] = {}
_NATIVE_SERVES = (None, "native")
_MAX_PREPARED = 4096  # a stream of ever new lengths must not fill the memory


def _find(xs: Sequence[Tensor], call: Call) -> _Prepared:
    """Check a call, and return what serves it: from memory, if a call like it came before."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    cos, sin, positions, cu_seqlens, offset, flags = call
    key = (
        (q.shape, q.stride(), q.dtype, q.device),
        None if k is None else (k.shape, k.stride(), k.dtype, k.device),
        (cos.shape, cos.stride(), cos.dtype, cos.device),
        (sin.shape, sin.stride(), sin.dtype, sin.device),
        None if positions is None else (positions.shape, positions.stride(), positions.dtype, positions.device),
        None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.dtype, cu_seqlens.device),
        flags,
    )
    prepared = _PREPARED.get(key)
    if prepared is None:
        run = _prepare(xs, call)
        if len(_PREPARED) >= _MAX_PREPARED:
            _PREPARED.clear()
        prepared = _Prepared(run, q, k, max_offset(q, cos, positions, cu_seqlens, flags.layout))
        _PREPARED[key] = prepared
    if not 0 <= offset <= prepared.max_offset:
        check_offset(offset, q, cos, positions, cu_seqlens, flags.layout)
    if cu_seqlens is not None:
        check_values(cu_seqlens, q.shape[0])
    if flags.inplace and k is not None:
        distance = k.data_ptr() - q.data_ptr()
        if -prepared.backward_reach <= distance <= prepared.forward_reach:
            check_apart(q, k)
    return prepared


def _rotate_natively(xs: Sequence[Tensor], outs: Sequence[Tensor], call: Call) -> None:
    """Let the CUDA extension look at the call: it checks faster than memory can be searched."""
    if not native.rotate(xs, outs, call):
        _find(xs, call).run(xs, outs, call)


def rotate(xs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Rotate `xs`, (q,) or (q, k), and let autograd know; returns the rotated tensors."""
    check_fixed(call.cos, call.sin)
    flags = call.flags
    if native.is_loaded() and xs[0].is_cuda and flags.impl in _NATIVE_SERVES:
        run: Rotate = _rotate_natively
    else:
        run = _find(xs, call).run
    needs_grad = torch.is_grad_enabled() and (xs[0].requires_grad or xs[-1].requires_grad)
    if needs_grad:
        if flags.inplace:
            return _rotate_inplace_with_grad(run, xs, call)
        rotated: tuple[Tensor, ...] = _Rotate.apply(run, call, *xs)
        return rotated
    outs = xs if flags.inplace else [torch.empty_like(x) for x in xs]
    run(xs, outs, call)
    if flags.inplace:
        torch._C._increment_version(xs)
    return tuple(outs)


def _rotate_inplace_with_grad(run: Rotate, xs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    recorded = [i for i, x in enumerate(xs) if x.requires_grad]
    for i in recorded:
        check_overwritable("qk"[i], xs[i])
    run(xs, xs, call)
    torch._C._increment_version([x for x in xs if not x.requires_grad])
    # The values are there; what is left is to put the rotation on autograd's record. A view is recorded by itself: a
    # function that overwrites a view may have no second result.
    views = any(xs[i]._is_view() for i in recorded)
    groups = [[i] for i in recorded] if views else [recorded]
    results = list(xs)
    for group in groups:
        outs = _Overwritten.apply(call, *(xs[i] for i in group))
        for i, out in zip(group, outs, strict=True):
            results[i] = out
    return tuple(results)


class _Rotate(torch.autograd.Function):
    """The rotation out of place; its derivative is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, run: Rotate, call: Call, *xs: Tensor) -> tuple[Tensor, ...]:
        outs = tuple([torch.empty_like(x) for x in xs])
        run(xs, outs, call)
        if not all(needed := ctx.needs_input_grad[2:]):
            ctx.mark_non_differentiable(*(out for out, is_needed in zip(outs, needed, strict=True) if not is_needed))
        ctx.set_materialize_grads(False)
        _save(ctx, call)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 2 + _rotate_back(ctx, grads, ctx.needs_input_grad[2:])


class _Overwritten(torch.autograd.Function):
    """Puts a rotation that has just been done in place on record."""

    @staticmethod
    def forward(ctx: Any, call: Call, *xs: Tensor) -> Any:
        # No tensor may come before xs: where a function overwrites a view, autograd takes its first tensor for that.
        ctx.mark_dirty(*xs)
        ctx.set_materialize_grads(False)
        _save(ctx, call)
        return xs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # All that was recorded requires grad.
        return (None, *_rotate_back(ctx, grads, [True] * len(grads)))


def _save(ctx: Any, call: Call) -> None:
    ctx.save_for_backward(*call[:4])
    ctx.offset, ctx.flags = call.offset, call.flags


def _rotate_back(ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Turn the gradients back, those that exist and are wanted, in one launch."""
    flags = ctx.flags
    present = {i: grad.resolve_neg() for i, grad in enumerate(grads) if grad is not None and needed[i]}
    results: list[Tensor | None] = [None] * len(grads)
    if present:
        back = flags._replace(inverse=not flags.inverse, inplace=False)
        cos, sin, positions, cu_seqlens = ctx.saved_tensors
        turned = rotate(tuple(present.values()), Call(cos, sin, positions, cu_seqlens, ctx.offset, back))
        for i, grad in zip(present, turned, strict=True):
            results[i] = grad
    return tuple(results)
