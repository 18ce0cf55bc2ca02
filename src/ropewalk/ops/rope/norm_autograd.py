"""Eager calls of the rotation with a norm: plans, which are kept from call to call, and autograd.

q and k are kept for the backward: recovering them from the results divides by weights, which may be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.arguments import check_dense
from ropewalk.ops.rope import backends, norm_reference
from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.norm import NormCall, check_norm, split_parameters
from ropewalk.ops.rope.validate import (
    check_arguments,
    check_axes,
    check_fixed,
    check_offset,
    check_tensors,
    check_values,
)
from ropewalk.ops.tracing import with_memory

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # of a transform that has ended

_PLANS: dict[Any, Callable[..., Any]] = {}
_MAX_PLANS = 4096  # a stream of ever new lengths must not fill the memory


def check(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> None:
    """Raise unless a call's arguments fit together, by their metadata alone."""
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    rope = call.rope
    if rotates(call):
        check_arguments(q, k, *rope[:4], rope.axes, rope.flags)
        check_offset(rope.offset, q, rope.cos, rope.positions, rope.cu_seqlens, rope.flags.layout)
    else:
        check_tensors(q, k, rope.flags.layout)
    weights, biases = split_parameters(parameters)
    check_norm(xs, weights, call, biases)


def rotates(call: NormCall) -> bool:
    """Say whether the call rotates: `api.normalize` passes tables without columns."""
    return not (isinstance(call.rope.cos, Tensor) and tuple(call.rope.cos.shape) == (1, 1, 0))


def _metadata(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    try:
        return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout) for x in tensors])
    except RuntimeError:  # a nested tensor has no shape
        for x in tensors:
            if x is not None:
                check_dense("a tensor of the call", x)
        raise


def _remember(key: Any, plan: Callable[..., Any]) -> Callable[..., Any]:
    if len(_PLANS) >= _MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def forward(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Check a call, and return the normed and rotated `xs` in new tensors."""
    rope, flags = call
    cos, sin, positions, cu_seqlens, offset, rope_flags, axes = rope
    of_axes = None if axes is None else _metadata((axes,))  # most calls have none
    eps, weight_offset, after, across_heads = flags
    kinds = (type(eps), type(weight_offset), type(after), type(across_heads))  # True is 1.0 to a dict, and no eps
    tensors = (*xs, *parameters, cos, sin, positions, cu_seqlens)
    key = (len(xs), _metadata(tensors), of_axes, offset, rope_flags, flags, kinds)
    plan = _PLANS.get(key)
    if plan is None:
        check(xs, parameters, call)
        backend = backends.choose_norm(rope_flags.impl, xs[0].device)
        plan = _remember(key, backend.prepare_forward(xs, parameters, call))
    if cu_seqlens is not None:
        check_values(cu_seqlens, xs[0].shape[0])
    if axes is not None:
        assert positions is not None
        check_axes(axes, positions.shape[0])
    outs: tuple[Tensor, ...] = plan(xs, parameters, call)
    return outs


def backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *parameters) that are needed, of a call that `forward` has checked."""
    n = len(xs)  # needed, and the results, are of xs, weights and biases
    slots = [i for i in range(n) if grads[i] is not None and any(needed[i::n])]
    results: list[Tensor | None] = [None] * (3 * n)
    if not slots:
        return results
    given = [with_memory(grad) for i in slots if (grad := grads[i]) is not None]
    xs, parameters = [xs[i] for i in slots], [parameters[j + i] for j in (0, n) for i in slots]
    wanted = tuple([needed[j + i] for j in (0, n, 2 * n) for i in slots])
    rope = call.rope
    of_axes = None if rope.axes is None else _metadata((rope.axes,))
    key = (wanted, _metadata((*given, *xs, *parameters, *rope[:4])), of_axes, rope.flags, call.flags)
    plan = _PLANS.get(key)
    if plan is None:
        backend = backends.choose_norm(rope.flags.impl, xs[0].device)
        plan = _remember(key, backend.prepare_backward(given, xs, parameters, wanted, call))
    found = plan(given, xs, parameters, call)
    for i, grad in enumerate(found):
        results[i // len(slots) * n + slots[i % len(slots)]] = grad
    return results


def norm_and_rotate(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Normalise and rotate `xs`, (q,) or (q, k), record it for autograd, and return the results."""
    check_fixed(call.rope.cos, call.rope.sin)
    tensors = (*xs, *parameters)
    if torch.is_grad_enabled():
        for x in tensors:  # `any` would call a generator for each
            if x is not None and x.requires_grad:
                return _record(call, *[None if x is None else _unwrap_if_dead(x) for x in tensors])
    return forward(xs, parameters, call)


class _NormRotate(torch.autograd.Function):
    """Normalise and rotate; `tensors` are (*xs, *parameters)."""

    @staticmethod
    def forward(ctx: Any, call: NormCall, *tensors: Any) -> tuple[Tensor, ...]:
        n = len(tensors) // 3
        outs = forward(tensors[:n], tensors[n:], call)
        needed = ctx.needs_input_grad[1:]
        if constant := [out for i, out in enumerate(outs) if not any(needed[i::n])]:
            ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *call.rope[:4], call.rope.axes)
        ctx.rest = call.rope.offset, call.rope.flags, call.flags
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, cos, sin, positions, cu_seqlens, axes = ctx.saved_tensors
        n = len(tensors) // 3
        offset, rope_flags, flags = ctx.rest
        rope = RopeCall(cos, sin, positions, cu_seqlens, offset, rope_flags, axes)
        arguments = grads, tensors[:n], tensors[n:], ctx.needs_input_grad[1:], NormCall(rope, flags)
        if torch.is_grad_enabled():  # create_graph=True: PyTorch's own operations have further derivatives
            return (None, *norm_reference.norm_rope_backward(*arguments))
        return (None, *backward(*arguments))


# As `autograd._record`: `apply` without its tests for a setup_context and for active transforms.
_record: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _NormRotate).apply
