"""Eager calls of the Triton and the Gluon kernels, and what autograd keeps of them.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.ops.attention.prepare import FarFeatures, Prepared

LN_2 = math.log(2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    return_lse: bool,
    impl: str,
    far: FarFeatures | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend by kernels that `load_kernels` knows: q is (B, H, Tq, D), k is (B, K, Tk, D) and v (B, K, Tk, Dv).

    What pairs that are far apart meet with is given as `far`, or else made by the scheme. Returns the output, (B, H,
    Tq, Dv), and the natural log-sum-exp, (B, H, Tq), where it is asked for.
    """
    differentiable = (q, k, v, prepared.parameters, prepared.sinks, *(far or _NOTHING_FAR))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        result: tuple[Tensor, Tensor | None] = _Attend.apply(*differentiable, prepared, return_lse, impl)
        return result
    out, saved = load_kernels(impl)[0](q, k, v, prepared, False, far)
    return out, saved.lse * LN_2 if return_lse else None


_NOTHING_FAR = (None, None, None)


def load_kernels(impl: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that launch an implementation's kernels, forward and backward.

    "gluon-deterministic" is the Gluon forward, and the Triton kernels' backward, whose sums have one order.
    """
    from ropewalk.ops.attention import triton_launch

    if impl == "triton":
        return triton_launch.forward, triton_launch.backward
    from ropewalk.ops.attention import gluon_backward_launch, gluon_launch

    return gluon_launch.forward, (gluon_backward_launch if impl == "gluon" else triton_launch).backward


class _Attend(torch.autograd.Function):
    """Attention with its backward kernels, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parameters: Tensor | None,
        sinks: Tensor | None,
        past: Tensor | None,
        future: Tensor | None,
        far_keys: Tensor | None,
        prepared: Prepared,
        return_lse: bool,
        impl: str,
    ) -> tuple[Tensor, Tensor | None]:
        far = None if past is None or far_keys is None else FarFeatures(past, future, far_keys)
        out, saved = load_kernels(impl)[0](q, k, v, prepared, True, far)
        tensors, ctx.numbers = split(prepared)
        ctx.impl = impl
        ctx.save_for_backward(v, out, *saved, *tensors)
        ctx.set_materialize_grads(False)
        return out, saved.lse * LN_2 if return_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        from ropewalk.ops.attention import triton_launch

        v, out, q, k, lse, past, future, far_keys, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        saved = triton_launch.Saved(q, k, lse, past, future, far_keys)
        learned = triton_launch.Learned(*ctx.needs_input_grad[3:5])
        prepared = join(tensors, ctx.numbers)
        grads = load_kernels(ctx.impl)[1](grad_out, grad_lse, v, out, saved, prepared, learned)
        return *grads, None, None, None


_NUMBERS = {
    "interleaved",
    "rotary_offset",
    "score",
    "causal",
    "window",
    "scale",
    "softcap",
    "dropout_p",
    "learned",
    "far_window",
}
_ORDER = sorted(range(len(Prepared._fields)), key=lambda index: Prepared._fields[index] in _NUMBERS)
_TENSORS = len(_ORDER) - len(_NUMBERS)
# One call each, where loops over all fields would cost the host microseconds.
_pick_tensors, _pick_numbers = itemgetter(*_ORDER[:_TENSORS]), itemgetter(*_ORDER[_TENSORS:])
_put_back = itemgetter(*sorted(range(len(_ORDER)), key=_ORDER.__getitem__))


def split(prepared: Sequence[Any]) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Part tensors, which autograd keeps, from numbers."""
    return _pick_tensors(prepared), _pick_numbers(prepared)


def join(tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> Prepared:
    """Undo `split`."""
    return Prepared(*_put_back((*tensors, *numbers)))
