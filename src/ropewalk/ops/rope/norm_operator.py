"""The rotation with a norm as PyTorch operators, for torch.compile, tracing, tensor subclasses and dispatch modes.

They are `torch.ops.ropewalk.norm_rope` and `torch.ops.ropewalk.norm_rope_backward`, which returns the gradients that
are needed. Plain eager calls bypass them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope import norm_autograd, norm_reference
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.norm import NormCall, NormFlags, check_flags, split_parameters
from ropewalk.ops.rope.operator import is_hidden
from ropewalk.ops.rope.validate import check_axes, check_fixed, check_values
from ropewalk.ops.tracing import is_transformed

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_TENSORS = "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias"
_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, Tensor? axes, SymInt offset, str layout, "
    "bool interleaved, int? rotary_dim, int rotary_offset, str? impl, int? pair_block, float eps, float weight_offset, "
    "bool after, bool across_heads"
)
_LIBRARY.define(f"norm_rope({_TENSORS}, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(
    f"norm_rope_backward(Tensor? q_grad, Tensor? k_grad, {_TENSORS}, bool[] needed, {_ARGUMENTS}) -> Tensor[]"
)
_N_TENSORS = 6  # q, k, their weights and their biases
_N_SAVED = 11  # these, the tables and what positions are read from


def norm_and_rotate_traced(
    xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall
) -> tuple[Tensor, ...]:
    """Run the operator, or PyTorch's own under a transform; the signature of `norm_autograd.norm_and_rotate`."""
    rope = call.rope
    if not torch.compiler.is_compiling():
        norm_autograd.check(xs, parameters, call)
        if rope.cu_seqlens is not None and not is_hidden(rope.cu_seqlens):
            check_values(rope.cu_seqlens, xs[0].shape[0])
        if rope.axes is not None and not is_hidden(rope.axes):
            assert rope.positions is not None
            check_axes(rope.axes, rope.positions.shape[0])
        check_fixed(rope.cos, rope.sin)
        if is_transformed():
            return _run_transformed(xs, parameters, call)
    else:
        check_fixed(rope.cos, rope.sin)
        check_flags(call)
    flags = rope.flags
    given = (*xs, *parameters)
    tensors = given if len(xs) == 2 else [x for of_q in given for x in (of_q, None)]
    of_rope = (*rope[:4], rope.axes, rope.offset)
    others = (flags.layout, flags.interleaved, flags.rotary_dim, flags.rotary_offset, flags.impl, flags.pair_block)
    return tuple(torch.ops.ropewalk.norm_rope(*tensors, *of_rope, *others, *call.flags))


def _run_transformed(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Normalise and rotate by PyTorch's own operations, which every transform supports."""
    impl = call.rope.flags.impl
    if impl not in (None, "reference"):
        raise ValueError(
            f"impl is {impl!r}, but under torch.func transforms and forward-mode differentiation it must be None or "
            f"'reference'"
        )
    parts = zip(xs, *split_parameters(parameters), strict=True)
    return tuple(norm_reference.norm_rope(x, weight, bias, call) for x, weight, bias in parts)


def _make_call(
    tensors: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], NormCall]:
    """Make xs, weights and biases, and a call of an operator's arguments."""
    n = 1 if tensors[1] is None else 2
    of_heads = tuple(tensors[::2]) if n == 1 else tuple(tensors)
    cos, sin, positions, cu_seqlens, axes, offset, *rest = arguments
    layout, interleaved, rotary_dim, rotary_offset, impl, pair_block, *of_norm = rest
    flags = RopeFlags(layout, interleaved, False, rotary_dim, rotary_offset, False, impl, pair_block)
    call = NormCall(RopeCall(cos, sin, positions, cu_seqlens, offset, flags, axes), NormFlags(*of_norm))
    return of_heads[:n], of_heads[n:], call


def _norm_rope(*arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(norm_autograd.forward(*_make_call(arguments[:_N_TENSORS], arguments[_N_TENSORS:])))


def _norm_rope_fake(*arguments: Any) -> list[Tensor]:
    xs, parameters, call = _make_call(arguments[:_N_TENSORS], arguments[_N_TENSORS:])
    norm_autograd.check(xs, parameters, call)
    return [torch.empty_like(x) for x in xs]


def _backward_arguments(q_grad: Tensor | None, k_grad: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of `norm_autograd.backward`, with `needed` for (*xs, *parameters)."""
    tensors, needed, rest = arguments[:_N_TENSORS], arguments[_N_TENSORS], arguments[_N_TENSORS + 1 :]
    xs, parameters, call = _make_call(tensors, rest)
    if len(xs) == 1:
        return (q_grad,), xs, parameters, tuple(needed[::2]), call
    return (q_grad, k_grad), xs, parameters, tuple(needed), call


def _norm_rope_backward(*arguments: Any) -> list[Tensor]:
    grads, xs, parameters, needed, call = _backward_arguments(*arguments)
    with torch.no_grad():
        found = norm_autograd.backward(grads, xs, parameters, needed, call)
    return [grad for grad in found if grad is not None]


def _norm_rope_backward_fake(*arguments: Any) -> list[Tensor]:
    _, xs, parameters, needed, _ = _backward_arguments(*arguments)
    inputs = zip((*xs, *parameters), needed, strict=True)
    return [torch.empty_like(x) for x, is_needed in inputs if is_needed and x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_N_SAVED])
    ctx.rest = inputs[_N_SAVED:]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors, rest = ctx.saved_tensors[:_N_TENSORS], (*ctx.saved_tensors[_N_TENSORS:], *ctx.rest)
    q_grad, k_grad = (*grads, None)[:2]
    given = [q_grad is not None, k_grad is not None] * 3
    needed = [a and b for a, b in zip(ctx.needs_input_grad[:_N_TENSORS], given, strict=True)]
    results: list[Tensor | None] = [None] * _N_TENSORS
    if torch.is_grad_enabled():  # create_graph=True: PyTorch's own operations have further derivatives
        arguments = _backward_arguments(q_grad, k_grad, *tensors, needed, *rest)
        found = norm_reference.norm_rope_backward(*arguments)
        results[:: _N_TENSORS // len(found)] = found
    elif any(needed):
        found = iter(torch.ops.ropewalk.norm_rope_backward(q_grad, k_grad, *tensors, needed, *rest))
        results = [next(found) if is_needed else None for is_needed in needed]
    return *results, *[None] * len(rest)


_LIBRARY.impl("norm_rope", _norm_rope, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rope_backward", _norm_rope_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::norm_rope", _norm_rope_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::norm_rope_backward", _norm_rope_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::norm_rope", _differentiate, setup_context=_save, lib=_LIBRARY)
