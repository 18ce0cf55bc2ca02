"""The rotation as PyTorch operators, for whoever looks at a program rather than runs it.

`torch.ops.ropewalk.rope` and `torch.ops.ropewalk.rope_` (in place) are what `torch.compile`, dispatch modes, tensor
subclasses and tracers see. Plain eager calls go around them: the dispatcher costs the host more than the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from ropewalk.ops.rope import reference
from ropewalk.ops.rope.checks import (
    Call,
    Flags,
    check_apart,
    check_arguments,
    check_fixed,
    check_inplace,
    check_offset,
    check_overwritable,
    check_values,
)
from ropewalk.ops.rope.eager import rotate

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, SymInt offset, str layout, bool interleaved, "
    "bool inverse, int? rotary_dim, int rotary_offset, str? impl"
)
_LIBRARY.define(f"rope(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"rope_(Tensor(a!)[] xs, {_ARGUMENTS}) -> ()")
_INVERSE = 7  # where it stands among the arguments after xs

_PLAIN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_PLAIN_OPTIONAL_TYPES = {*_PLAIN_TYPES, type(None)}


def is_plain(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None
) -> bool:
    """Whether a call is eager, its tensors are what they seem, and no mode, transform or tracer looks on."""
    return not (
        torch.compiler.is_compiling()
        or type(q) not in _PLAIN_TYPES
        or type(k) not in _PLAIN_OPTIONAL_TYPES
        or type(cos) not in _PLAIN_TYPES
        or type(sin) not in _PLAIN_TYPES
        or type(positions) not in _PLAIN_OPTIONAL_TYPES
        or type(cu_seqlens) not in _PLAIN_OPTIONAL_TYPES
        or torch._C._len_torch_dispatch_stack()
        or is_transformed()
        or q.is_neg()  # a lazily negated view: its memory holds the opposite values, and the dispatcher settles that
        or (k is not None and k.is_neg())
        or cos.is_neg()
        or sin.is_neg()
        or torch._C._get_tracing_state() is not None
    )


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def rotate_traced(xs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Rotate `xs` in a way that the onlooker understands; arguments and result are those of `eager.rotate`."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check(xs, call)
        if is_transformed():
            return _rotate_transformed(xs, call)
    else:
        check_fixed(call.cos, call.sin)
    *rest, inplace, impl = call.flags
    arguments = (*call[:-1], *rest, impl)
    if not inplace:
        return tuple(torch.ops.ropewalk.rope(xs, *arguments))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if needs_grad or (not compiling and any(x.is_neg() for x in xs)):
        # An operator that overwrites its arguments can neither have a derivative nor take lazily negated ones: compute,
        # and let PyTorch copy.
        for x, rotated in zip(xs, torch.ops.ropewalk.rope(xs, *arguments), strict=True):
            x.copy_(rotated)
    else:
        torch.ops.ropewalk.rope_(xs, *arguments)
    return tuple(xs)


def _rotate_transformed(xs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Rotate by PyTorch's own operations, which every transform knows."""
    cos, sin, positions, cu_seqlens, offset, flags = call
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
        )
        for x in xs
    )
    return tuple(x.copy_(out) for x, out in zip(xs, outs, strict=True)) if flags.inplace else outs


def _check(xs: Sequence[Tensor], call: Call) -> None:
    """Make every check of an eager call; those of values are left out where a transform or a fake hides them."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    cos, sin, positions, cu_seqlens, offset, flags = call
    check_arguments(q, k, cos, sin, positions, cu_seqlens, flags.layout, flags.rotary_dim, flags.rotary_offset)
    check_fixed(cos, sin)
    check_offset(offset, q, cos, positions, cu_seqlens, flags.layout)
    if cu_seqlens is not None and not _hidden(cu_seqlens):
        check_values(cu_seqlens, q.shape[0])
    if flags.inplace:
        check_inplace(q, k)
        if k is not None and not _hidden(q) and not _hidden(k):
            check_apart(q, k)
        for name, x in zip("qk", xs, strict=False):
            if torch.is_grad_enabled() and x.requires_grad:
                check_overwritable(name, x)


def _hidden(x: Tensor) -> bool:
    """Whether `x` has no memory of its own to look at."""
    return isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _call(arguments: Sequence[Any], inplace: bool) -> Call:
    """The operators' arguments after xs as `eager.rotate` takes them."""
    cos, sin, positions, cu_seqlens, offset, layout, interleaved, inverse, rotary_dim, rotary_offset, impl = arguments
    flags = Flags(layout, interleaved, inverse, rotary_dim, rotary_offset, inplace, impl)
    return Call(cos, sin, positions, cu_seqlens, offset, flags)


def _rope(xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(rotate(xs, _call(arguments, inplace=False)))


def _rope_(xs: list[Tensor], *arguments: Any) -> None:
    with torch.no_grad():
        rotate(xs, _call(arguments, inplace=True))


def _rope_fake(xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    _check(xs, _call(arguments, inplace=False))
    return [torch.empty_like(x) for x in xs]


def _rope_fake_(xs: list[Tensor], *arguments: Any) -> None:
    _check(xs, _call(arguments, inplace=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, positions, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(cos, sin, positions, cu_seqlens)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    arguments = [*ctx.saved_tensors, *ctx.rest]
    arguments[_INVERSE] = not arguments[_INVERSE]
    return torch.ops.ropewalk.rope(grads, *arguments), *[None] * len(arguments)


_LIBRARY.impl("rope", _rope, "CompositeExplicitAutograd")
_LIBRARY.impl("rope_", _rope_, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::rope", _rope_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::rope_", _rope_fake_, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::rope", _backward, setup_context=_save, lib=_LIBRARY)
