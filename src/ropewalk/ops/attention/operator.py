"""Attention as PyTorch operators, for whoever looks at a program rather than runs it.

`torch.ops.ropewalk.attend` is what `torch.compile`, dispatch modes and tensor subclasses see. Plain eager calls go
around it: the dispatcher and an operator's autograd formula cost the host more than all launches.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.eager import LN_2, join, split
from ropewalk.ops.attention.prepare import Prepared

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_PREPARED = (
    "Tensor? cos_q, Tensor? sin_q, Tensor? cos_k, Tensor? sin_k, Tensor? weights, bool interleaved, str? score, "
    "Tensor? parameters, Tensor? positions_q, Tensor? positions_k, Tensor? mask, Tensor? key_lengths, bool causal, "
    "SymInt? window, float scale"
)
# The log-sum-exp is to base 2. mapped_q and mapped_k are what the backward reads; they are empty where the scheme
# leaves features alone, and without `keep`: then no backward may come.
_LIBRARY.define(
    f"attend(Tensor q, Tensor k, Tensor v, bool keep, {_PREPARED}) "
    "-> (Tensor out, Tensor lse, Tensor mapped_q, Tensor mapped_k)"
)
_LIBRARY.define(
    "attend_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_PREPARED}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)

_PLAIN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)}


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call is eager, its tensors are what they seem, and no mode or tracer looks on."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        # A lazily negated view's memory holds the opposite values, and the dispatcher settles that.
        or any(type(x) not in _PLAIN_TYPES or (x is not None and x.is_neg()) for x in tensors)
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, return_lse: bool, backward: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend in a way that the onlooker understands; `backward` says whether one will come.

    The other arguments and the results are those of `eager.attend`.
    """
    out, lse, *_ = torch.ops.ropewalk.attend(q, k, v, backward, *prepared)
    return out, lse * LN_2 if return_lse else None


def _attend(q: Tensor, k: Tensor, v: Tensor, keep: bool, *prepared: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ropewalk.ops.attention import triton_launch

    with torch.no_grad():
        out, saved = triton_launch.forward(q, k, v, Prepared(*prepared))
        mapped_q, mapped_k = q.new_empty(0), k.new_empty(0)
        if keep and _maps_features(prepared):
            mapped_q, mapped_k = _laid_out_like(q, saved.q), _laid_out_like(k, saved.k)
        return _laid_out_like(q, out), saved.lse, mapped_q, mapped_k


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, keep: bool, *prepared: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mapped_q, mapped_k = q.new_empty(0), k.new_empty(0)
    if keep and _maps_features(prepared):
        mapped_q, mapped_k = torch.empty_like(q), torch.empty_like(k)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), mapped_q, mapped_k


def _maps_features(prepared: Sequence[Any]) -> bool:
    return Prepared(*prepared).cos_q is not None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.keep, *prepared = inputs
    out, lse, mapped_q, mapped_k = output
    if _maps_features(prepared):
        q, k = mapped_q, mapped_k
    tensors, ctx.rest = split(prepared)
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.keep:
        raise RuntimeError("torch.ops.ropewalk.attend was called with keep=False, and has kept nothing for a backward")
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    prepared = join(tensors, ctx.rest)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.ops.ropewalk.attend_backward(grad_out, grad_lse, q, k, v, out, lse, *prepared)
    return *grads, None, *[None] * len(prepared)


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *prepared: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from ropewalk.ops.attention import triton_launch

    with torch.no_grad():
        if grad_lse is not None:
            grad_lse = grad_lse / LN_2  # the kernels take the gradient of the natural logarithm
        saved = triton_launch.Saved(q, k, lse)
        grads = triton_launch.backward(grad_out, grad_lse, v, out, saved, Prepared(*prepared))
        grad_q, grad_k, grad_v = (_laid_out_like(x, grad) for x, grad in zip((q, k, v), grads, strict=True))
    return grad_q, grad_k, grad_v


def _attend_backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *prepared: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The result with the strides that the fake kernels promise, those of `torch.empty_like(x)`; never x itself."""
    if result is not x and result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x).copy_(result)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_to_differentiate_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("attention by Triton kernels is differentiable once; impl='reference' is as often as you like")


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::attend_backward", _attend_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::attend", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd(
    "ropewalk::attend_backward", _refuse_to_differentiate_twice, setup_context=_save_nothing, lib=_LIBRARY
)
