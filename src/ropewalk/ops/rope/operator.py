"""The rotation as PyTorch operators, for torch.compile, tracing, tensor subclasses and dispatch modes.

They are `torch.ops.ropewalk.rope`, `torch.ops.ropewalk.rope_` (in place) and, for tables that are learned,
`torch.ops.ropewalk.rope_gradients`, which returns the gradients of xs, if they are needed, of cos and of sin. Plain
eager calls bypass them: the dispatcher takes more host time than the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk.ops.rope import reference
from ropewalk.ops.rope.autograd import differentiate, rotate
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.heads import reference as head_reference
from ropewalk.ops.rope.validate import (
    check_arguments,
    check_axes,
    check_disjoint,
    check_inplace,
    check_learned,
    check_offset,
    check_overwritable,
    check_values,
)
from ropewalk.ops.tracing import is_transformed

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, SymInt offset, str layout, bool interleaved, "
    "bool inverse, int? rotary_dim, int rotary_offset, str? impl, int? pair_block, Tensor? axes"
)
_LIBRARY.define(f"rope(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"rope_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()")
_LIBRARY.define(f"rope_gradients(Tensor[] grads, Tensor[] xs, {_ARGUMENTS}, bool needs_dx) -> Tensor[]")


def rotate_traced(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    """Rotate `xs` by an operator, or by PyTorch's own under a transform; the signature of `autograd.rotate`."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check(xs, call)
        if is_transformed():
            return _rotate_transformed(xs, call)
    elif call.cos.requires_grad or call.sin.requires_grad:
        check_learned(*call[:3], call.flags.inplace)
    arguments = _arguments_of(call)
    if not call.flags.inplace:
        return tuple(torch.ops.ropewalk.rope(xs, *arguments))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if needs_grad or (not compiling and any(x.is_neg() for x in xs)):
        # An operator that overwrites its arguments can neither have a derivative nor take lazily negated ones: rotate
        # out of place, and copy.
        for x, rotated in zip(xs, torch.ops.ropewalk.rope(xs, *arguments), strict=True):
            x.copy_(rotated)
    else:
        torch.ops.ropewalk.rope_(xs, *arguments)
    return tuple(xs)


def _rotate_transformed(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...]:
    """Rotate by PyTorch's own operations, which every transform supports."""
    cos, sin, positions, cu_seqlens, offset, flags, axes = call
    if flags.impl not in (None, "reference"):
        raise ValueError(
            f"impl is {flags.impl!r}, but under torch.func transforms and forward-mode differentiation it must be None "
            f"or 'reference'"
        )
    outs = tuple(
        reference.apply_rope(
            x,
            cos,
            sin,
            positions=positions,
            cu_seqlens=cu_seqlens,
            offset=offset,
            layout=flags.layout,
            interleaved=flags.interleaved,
            inverse=flags.inverse,
            rotary_offset=flags.rotary_offset,
            axes=axes,
            pair_block=flags.pair_block,
        )
        for x in xs
    )
    return tuple(x.copy_(out) for x, out in zip(xs, outs, strict=True)) if flags.inplace else outs


def _check(xs: Sequence[Tensor], call: RopeCall) -> None:
    """Make every check of an eager call, but those of values that a transform or a fake tensor hides."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    cos, sin, positions, cu_seqlens, offset, flags, axes = call
    check_arguments(q, k, *call[:4], axes, flags)
    if cos.requires_grad or sin.requires_grad:
        check_learned(cos, sin, positions, flags.inplace)
    check_offset(offset, q, cos, positions, cu_seqlens, flags.layout)
    if cu_seqlens is not None and not is_hidden(cu_seqlens):
        check_values(cu_seqlens, q.shape[0])
    if axes is not None and not is_hidden(axes):
        assert positions is not None
        check_axes(axes, positions.shape[0])
    if flags.inplace:
        check_inplace(q, k)
        if k is not None and not is_hidden(q) and not is_hidden(k):
            check_disjoint(q, k)
        for name, x in zip("qk", xs, strict=False):
            if torch.is_grad_enabled() and x.requires_grad:
                check_overwritable(name, x)


def is_hidden(x: Tensor) -> bool:
    """Say whether `x` has no memory whose values can be read."""
    return isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _arguments_of(call: RopeCall) -> tuple[Any, ...]:
    """Return the operators' arguments after xs."""
    cos, sin, positions, cu_seqlens, offset, flags, axes = call
    *rest, _, impl, pair_block = flags
    return cos, sin, positions, cu_seqlens, offset, *rest, impl, pair_block, axes


def _make_call(arguments: Sequence[Any], inplace: bool = False) -> RopeCall:
    """Make a call of the operators' arguments after xs."""
    *tensors, offset, layout, interleaved, inverse, rotary_dim, rotary_offset, impl, pair_block, axes = arguments
    flags = RopeFlags(layout, interleaved, inverse, rotary_dim, rotary_offset, inplace, impl, pair_block)
    call: RopeCall = RopeCall._make((*tensors, offset, flags, axes))
    return call


def _rope(xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(rotate(xs, _make_call(arguments)))


def _rope_(xs: list[Tensor], *arguments: Any) -> None:
    with torch.no_grad():
        rotate(xs, _make_call(arguments, inplace=True))


def _rope_fake(xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    _check(xs, _make_call(arguments))
    return [torch.empty_like(x) for x in xs]


def _rope_fake_(xs: list[Tensor], *arguments: Any) -> None:
    _check(xs, _make_call(arguments, inplace=True))


def _rope_gradients(grads: list[Tensor], xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    *arguments, needs_dx = arguments  # type: ignore[assignment]
    with torch.no_grad():
        dxs, dcos, dsin = differentiate(grads, xs, _make_call(arguments), needs_dx)
    return [*(dxs or ()), dcos, dsin]


def _rope_gradients_fake(grads: list[Tensor], xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    cos, sin, *_, needs_dx = arguments
    dtables = [torch.empty(table.shape, dtype=table.dtype, device=table.device) for table in (cos, sin)]
    return [*([torch.empty_like(x) for x in xs] if needs_dx else ()), *dtables]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, cos, sin, positions, cu_seqlens, *ctx.rest, axes = inputs
    saved = xs if cos.requires_grad or sin.requires_grad else ()
    ctx.save_for_backward(cos, sin, positions, cu_seqlens, axes, *saved)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    cos, sin, positions, cu_seqlens, axes, *xs = ctx.saved_tensors
    call = _make_call((cos, sin, positions, cu_seqlens, *ctx.rest, axes))
    if xs:
        return _backward_of_tables(ctx, grads, xs, call)
    arguments = _arguments_of(call._replace(flags=call.flags.inverted()))
    return torch.ops.ropewalk.rope(grads, *arguments), *[None] * len(arguments)


def _backward_of_tables(ctx: Any, grads: list[Tensor], xs: Sequence[Tensor], call: RopeCall) -> tuple[Any, ...]:
    needs_dxs, needs_dcos, needs_dsin, *others = ctx.needs_input_grad
    needs_dx = any(needs_dxs)
    if torch.is_grad_enabled():  # create_graph=True: PyTorch's own operations have further derivatives
        dxs, dcos, dsin = head_reference.differentiate(grads, xs, call, needs_dx)
    else:
        *dxs, dcos, dsin = torch.ops.ropewalk.rope_gradients(grads, list(xs), *_arguments_of(call), needs_dx)
    results = list(dxs) if dxs else [None] * len(xs)
    return results, dcos if needs_dcos else None, dsin if needs_dsin else None, *[None] * len(others)


_LIBRARY.impl("rope", _rope, "CompositeExplicitAutograd")
_LIBRARY.impl("rope_", _rope_, "CompositeExplicitAutograd")
_LIBRARY.impl("rope_gradients", _rope_gradients, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::rope_gradients", _rope_gradients_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::rope", _rope_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::rope_", _rope_fake_, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::rope", _backward, setup_context=_save, lib=_LIBRARY)
