"""Eager calls of the rotation: the choice of an implementation, the memory of past choices, and autograd.

A decode step calls the rotation once per layer, so what a call costs the host counts. Whatever depends on shapes, strides,
dtypes and flags alone is worked out once and remembered under them; a call that was seen before looks it up, allocates its
results and launches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ropewalk.ops.rope import reference
from ropewalk.ops.rope.checks import (
    check_apart,
    check_arguments,
    check_inplace,
    check_offset,
    check_overwritable,
    check_values,
)

# xs, outs, cos, sin, positions, cu_seqlens, offset, inverse: writes the rotation of xs into outs.
Rotate = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor, Tensor | None, Tensor | None, int, bool], None]

IMPLEMENTATIONS = ("triton", "reference")  # the fastest first


class Flags(NamedTuple):
    """What a caller can ask for beyond the tensors."""

    layout: str = "bthd"
    interleaved: bool = False
    inverse: bool = False
    rotary_dim: int | None = None
    rotary_offset: int = 0
    inplace: bool = False
    impl: str | None = None


def why_not(impl: str, device: torch.device) -> str | None:
    """Say why `impl` cannot serve tensors on `device`; None if it can."""
    if impl == "reference":
        return None
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
        # Triton's interpreter is for tests: nobody wants it unasked.
        return "triton" if device.type == "cuda" and why_not("triton", device) is None else "reference"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}, but must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    reason = why_not(impl, device)
    if reason is not None:
        raise ValueError(f"impl is {impl!r}, but it cannot serve this call: {reason}")
    return impl


def _prepare(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    flags: Flags,
) -> Rotate:
    """Check all that shapes, strides, dtypes and devices can tell, and return what will serve calls like this one."""
    check_arguments(q, k, cos, sin, positions, cu_seqlens, flags.layout, flags.rotary_dim, flags.rotary_offset)
    if flags.inplace:
        check_inplace(q, k)
    how: dict[str, Any] = {
        "layout": flags.layout,
        "interleaved": flags.interleaved,
        "rotary_offset": flags.rotary_offset,
    }
    if choose(flags.impl, q.device) == "reference":
        return partial(reference.rotate, **how)
    from ropewalk.ops.rope import triton_launch

    return triton_launch.prepare(q, k, cos, sin, positions, cu_seqlens, inplace=flags.inplace, **how)


_PREPARED: dict[Any, Rotate] = {}
_MAX_PREPARED = 4096  # a stream of ever new lengths must not fill the memory


def _looks(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _find(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    flags: Flags,
) -> Rotate:
    """Check a call, values included, and return what serves it: from memory, if a call like it came before."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    key = (_looks(q), _looks(k), _looks(cos), _looks(sin), _looks(positions), _looks(cu_seqlens), flags)
    run = _PREPARED.get(key)
    if run is None:
        run = _prepare(q, k, cos, sin, positions, cu_seqlens, flags)
        if len(_PREPARED) >= _MAX_PREPARED:
            _PREPARED.clear()
        _PREPARED[key] = run
    if positions is None:
        check_offset(offset, q, cos, cu_seqlens, flags.layout)
    if cu_seqlens is not None:
        check_values(cu_seqlens, q.shape[0])
    if flags.inplace and k is not None:
        check_apart(q, k)
    return run


def rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    flags: Flags,
) -> tuple[Tensor, ...]:
    """Rotate `xs`, (q,) or (q, k), and let autograd know; returns the rotated tensors."""
    needs_grad = torch.is_grad_enabled() and any([x.requires_grad for x in xs])
    run = _find(xs, cos, sin, positions, cu_seqlens, offset, flags)
    if flags.inplace:
        return _rotate_inplace(run, xs, cos, sin, positions, cu_seqlens, offset, flags, needs_grad)
    if needs_grad:
        rotated: tuple[Tensor, ...] = _Rotate.apply(run, cos, sin, positions, cu_seqlens, offset, flags, *xs)
        return rotated
    outs = tuple([torch.empty_like(x) for x in xs])
    run(xs, outs, cos, sin, positions, cu_seqlens, offset, flags.inverse)
    return outs


def _rotate_inplace(
    run: Rotate,
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    flags: Flags,
    needs_grad: bool,
) -> tuple[Tensor, ...]:
    recorded = [x.requires_grad for x in xs] if needs_grad else [False] * len(xs)
    for name, x, is_recorded in zip("qk", xs, recorded, strict=False):
        if is_recorded:
            check_overwritable(name, x)
    increment_version([x for x, is_recorded in zip(xs, recorded, strict=True) if not is_recorded])
    with torch.no_grad():
        run(xs, xs, cos, sin, positions, cu_seqlens, offset, flags.inverse)
    if not needs_grad:
        return tuple(xs)
    # The values are there; what is left is to put the rotation on autograd's record. A view has to be recorded alone:
    # autograd allows a function that overwrites a view no second result.
    together = [i for i, x in enumerate(xs) if recorded[i] and not x._is_view()]
    alone = [[i] for i, x in enumerate(xs) if recorded[i] and x._is_view()]
    results = list(xs)
    for group in (together, *alone):
        if group:
            outs = _Overwritten.apply(cos, sin, positions, cu_seqlens, offset, flags, *(xs[i] for i in group))
            for i, out in zip(group, outs, strict=True):
                results[i] = out
    return tuple(results)


class _Rotate(torch.autograd.Function):
    """The rotation out of place; its derivative is the inverse rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Rotate,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        offset: int,
        flags: Flags,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        outs = tuple([torch.empty_like(x) for x in xs])
        run(xs, outs, cos, sin, positions, cu_seqlens, offset, flags.inverse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, positions, cu_seqlens)
        ctx.offset, ctx.flags = offset, flags
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 7 + _rotate_back(ctx, grads, ctx.needs_input_grad[7:])


class _Overwritten(torch.autograd.Function):
    """Puts a rotation that has just been done in place on record."""

    @staticmethod
    def forward(
        ctx: Any,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        offset: int,
        flags: Flags,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*xs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin, positions, cu_seqlens)
        ctx.offset, ctx.flags = offset, flags
        return xs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 6 + _rotate_back(ctx, grads, ctx.needs_input_grad[6:])


def _rotate_back(ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Turn the gradients back, those that exist and are wanted, in one launch."""
    flags: Flags = ctx.flags
    present = [i for i, grad in enumerate(grads) if grad is not None and needed[i]]
    results: list[Tensor | None] = [None] * len(grads)
    if present:
        xs = tuple([grads[i] for i in present])
        back = flags._replace(inverse=not flags.inverse, inplace=False)
        turned = rotate(xs, *ctx.saved_tensors, ctx.offset, back)  # type: ignore[arg-type]
        for i, grad in zip(present, turned, strict=True):
            results[i] = grad
    return tuple(results)
