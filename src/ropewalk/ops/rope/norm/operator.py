"""The rotation with a norm as PyTorch operators, for torch.compile, tracing, tensor subclasses and dispatch modes.

They are `torch.ops.ropewalk.norm_rope` and `torch.ops.ropewalk.norm_rope_backward`, which returns the gradients that
are needed. Plain eager calls bypass them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.norm import Needed, NormCall, Normed, NormFlags, check_flags, operation, reference
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


def norm_and_rotate_traced(normed: Normed) -> tuple[Tensor, ...]:
    """Run the operator, or PyTorch's own under a transform; the signature of `operation.norm_and_rotate`."""
    *tensors, call = normed
    rope = call.rope
    if not torch.compiler.is_compiling():
        operation.check(normed)
        if rope.cu_seqlens is not None and not is_hidden(rope.cu_seqlens):
            check_values(rope.cu_seqlens, normed.q.shape[0])
        if rope.axes is not None and not is_hidden(rope.axes):
            assert rope.positions is not None
            check_axes(rope.axes, rope.positions.shape[0])
        check_fixed(rope.cos, rope.sin)
        if is_transformed():
            return _run_transformed(normed)
    else:
        check_fixed(rope.cos, rope.sin)
        check_flags(call)
    flags = rope.flags
    rope_leaves = (*rope[:4], rope.axes, rope.offset)
    others = (flags.layout, flags.interleaved, flags.rotary_dim, flags.rotary_offset, flags.impl, flags.pair_block)
    return tuple(torch.ops.ropewalk.norm_rope(*tensors, *rope_leaves, *others, *call.flags))


def _run_transformed(normed: Normed) -> tuple[Tensor, ...]:
    """Normalise and rotate by PyTorch's own operations, which every transform supports."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    impl = call.rope.flags.impl
    if impl not in (None, "reference"):
        raise ValueError(
            f"impl is {impl!r}, but under torch.func transforms and forward-mode differentiation it must be None or "
            f"'reference'"
        )
    sides = ((q, q_weight, q_bias), (k, k_weight, k_bias))
    return tuple(reference.norm_rope(x, weight, bias, call) for x, weight, bias in sides if x is not None)


def _make_normed(arguments: Sequence[Any]) -> Normed:
    """Make a call of an operator's arguments."""
    tensors, (cos, sin, positions, cu_seqlens, axes, offset, *rest) = arguments[:_N_TENSORS], arguments[_N_TENSORS:]
    layout, interleaved, rotary_dim, rotary_offset, impl, pair_block, *norm_flags = rest
    flags = RopeFlags(layout, interleaved, False, rotary_dim, rotary_offset, False, impl, pair_block)
    call = NormCall(RopeCall(cos, sin, positions, cu_seqlens, offset, flags, axes), NormFlags(*norm_flags))
    return Normed._make((*tensors, call))


def _norm_rope(*arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(operation.forward(_make_normed(arguments)))


def _norm_rope_fake(*arguments: Any) -> list[Tensor]:
    normed = _make_normed(arguments)
    operation.check(normed)
    return [torch.empty_like(x) for x in (normed.q, normed.k) if x is not None]


def _split_gradients(arguments: Sequence[Any]) -> tuple[Normed, Needed]:
    """Return the call of the operator's arguments after the gradients, and which gradients are needed."""
    tensors, (needed, *rest) = arguments[:_N_TENSORS], arguments[_N_TENSORS:]
    return _make_normed((*tensors, *rest)), Needed(*needed)


def _norm_rope_backward(q_grad: Tensor | None, k_grad: Tensor | None, *arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        found = operation.backward(q_grad, k_grad, *_split_gradients(arguments))
    return [grad for grad in found if grad is not None]


def _norm_rope_backward_fake(q_grad: Tensor | None, k_grad: Tensor | None, *arguments: Any) -> list[Tensor]:
    (*inputs, _), needed = _split_gradients(arguments)
    return [torch.empty_like(x) for x, is_needed in zip(inputs, needed, strict=True) if is_needed and x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_N_SAVED])
    ctx.rest = inputs[_N_SAVED:]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors, rest = ctx.saved_tensors[:_N_TENSORS], (*ctx.saved_tensors[_N_TENSORS:], *ctx.rest)
    q_grad, k_grad = (*grads, None)[:2]
    has_grads = [q_grad is not None, k_grad is not None] * 3
    needed = Needed(*[a and b for a, b in zip(ctx.needs_input_grad[:_N_TENSORS], has_grads, strict=True)])
    results: Sequence[Tensor | None] = [None] * _N_TENSORS
    if torch.is_grad_enabled():  # create_graph=True: PyTorch's own operations have further derivatives
        results = reference.norm_rope_backward(q_grad, k_grad, _make_normed((*tensors, *rest)), needed)
    elif any(needed):
        found = iter(torch.ops.ropewalk.norm_rope_backward(q_grad, k_grad, *tensors, list(needed), *rest))
        results = [next(found) if is_needed else None for is_needed in needed]
    return *results, *[None] * len(rest)


_LIBRARY.impl("norm_rope", _norm_rope, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rope_backward", _norm_rope_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::norm_rope", _norm_rope_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::norm_rope_backward", _norm_rope_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::norm_rope", _differentiate, setup_context=_save, lib=_LIBRARY)
