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

from ropewalk.ops.attention.eager import LN_2, join, load_kernels, split
from ropewalk.ops.attention.prepare import FarFeatures, Prepared

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_PREPARED = (
    "Tensor? cos_q, Tensor? sin_q, Tensor? cos_k, Tensor? sin_k, Tensor? weights, bool interleaved, int rotary_offset, "
    "str? score, Tensor? parameters, Tensor? positions_q, Tensor? positions_k, Tensor? mask, Tensor? key_lengths, "
    "bool causal, SymInt? window, float scale, Tensor? key_starts, Tensor? query_starts, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? block_table, float? softcap, Tensor? sinks, float dropout_p, Tensor? seed, "
    "int learned, SymInt? far_window, Tensor? cos_past, Tensor? sin_past, Tensor? cos_future, Tensor? sin_future, "
    "Tensor? cos_far, Tensor? sin_far"
)
# What pairs that are far apart meet with: given, or made by the scheme, whose tables then are there.
_FAR = "Tensor? past, Tensor? future, Tensor? far_keys"
# The log-sum-exp is to base 2. What is mapped is what the backward reads; each is empty where the call leaves its
# features alone, or was given them, and without `keep`: then no backward may come.
_LIBRARY.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_FAR}, bool keep, str impl, {_PREPARED}) -> (Tensor out, Tensor lse, "
    "Tensor mapped_q, Tensor mapped_k, Tensor mapped_past, Tensor mapped_future, Tensor mapped_far_keys)"
)
# All gradients but the first three are empty unless they are asked for.
_LIBRARY.define(
    f"attend_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_FAR}, Tensor out, Tensor lse, "
    f"bool learn_parameters, bool learn_sinks, str impl, {_PREPARED}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, "
    "Tensor grad_past, Tensor grad_future, Tensor grad_far_keys, Tensor grad_parameters, Tensor grad_sinks)"
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    return_lse: bool,
    backward: bool,
    impl: str,
    far: FarFeatures | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend in a way that the onlooker understands; `backward` says whether one will come.

    The other arguments and the results are those of `eager.attend`.
    """
    out, lse, *_ = torch.ops.ropewalk.attend(q, k, v, *(far or _NOTHING_FAR), backward, impl, *prepared)
    return out, lse * LN_2 if return_lse else None


_NOTHING_FAR = (None, None, None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    far_keys: Tensor | None,
    keep: bool,
    impl: str,
    *prepared: Any,
) -> tuple[Tensor, ...]:
    far = None if past is None or far_keys is None else FarFeatures(past, future, far_keys)
    with torch.no_grad():
        out, saved = load_kernels(impl)[0](q, k, v, Prepared(*prepared), keep, far)
        mapped = (
            _laid_out_like(x, mine) if keep and maps and mine is not None else q.new_empty(0)
            for x, mine, maps in zip(
                (q, k, q, q, k), (saved.q, saved.k, *saved[3:]), _maps_features(prepared), strict=True
            )
        )
        promised = _output_of(torch.empty_like(q, device="meta"), v)
        return _laid_out_like(promised, out), saved.lse, *mapped


def _attend_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    far_keys: Tensor | None,
    keep: bool,
    impl: str,
    *prepared: Any,
) -> tuple[Tensor, ...]:
    mapped = (
        torch.empty_like(x) if keep and maps else q.new_empty(0)
        for x, maps in zip((q, k, q, q, k), _maps_features(prepared), strict=True)
    )
    return _output_of(q, v), q.new_empty(q.shape[:3], dtype=torch.float32), *mapped


def _output_of(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output: like q, or with (B, T, H, Dv) in a row where Dv is another than D."""
    if q.shape[3] == v.shape[3]:
        return torch.empty_like(q)
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _maps_features(prepared: Sequence[Any]) -> tuple[bool, ...]:
    """Whether the scheme maps the features of q and of k, and in other ways for far pairs: q's two, and k's."""
    it = Prepared(*prepared)
    return tuple(x is not None for x in (it.cos_q, it.cos_k, it.cos_past, it.cos_future, it.cos_far))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, past, future, far_keys, ctx.keep, ctx.impl, *prepared = inputs
    out, lse, *mapped = output
    if Prepared(*prepared).cos_past is not None:
        far_keys = k
    q, k, past, future, far_keys = (
        mine if maps else x
        for x, mine, maps in zip((q, k, past, future, far_keys), mapped, _maps_features(prepared), strict=True)
    )
    tensors, ctx.numbers = split(prepared)
    ctx.save_for_backward(q, k, v, past, future, far_keys, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.keep:
        raise RuntimeError("torch.ops.ropewalk.attend was called with keep=False, and has kept nothing for a backward")
    q, k, v, past, future, far_keys, out, lse, *tensors = ctx.saved_tensors
    prepared = join(tensors, ctx.numbers)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needed = Prepared(*ctx.needs_input_grad[8:])
    grads = torch.ops.ropewalk.attend_backward(
        *(grad_out, grad_lse, q, k, v, past, future, far_keys, out, lse),
        *(needed.parameters, needed.sinks, ctx.impl, *prepared),
    )
    of_far = (grad if needs else None for grad, needs in zip(grads[3:6], ctx.needs_input_grad[3:6], strict=True))
    of_prepared: list[Tensor | None] = [None] * len(prepared)
    for name, grad in zip(("parameters", "sinks"), grads[6:], strict=True):
        if getattr(needed, name):
            of_prepared[Prepared._fields.index(name)] = grad
    return *grads[:3], *of_far, None, None, *of_prepared


def _attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    far_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learn_parameters: bool,
    learn_sinks: bool,
    impl: str,
    *prepared: Any,
) -> tuple[Tensor, ...]:
    from ropewalk.ops.attention import triton_launch

    with torch.no_grad():
        if grad_lse is not None:
            grad_lse = grad_lse / LN_2  # the kernels take the gradient of the natural logarithm
        saved = triton_launch.Saved(q, k, lse, past, future, far_keys)
        learned = triton_launch.Learned(learn_parameters, learn_sinks)
        grads = load_kernels(impl)[1](grad_out, grad_lse, v, out, saved, Prepared(*prepared), learned)

        def of(x: Tensor | None, grad: Tensor | None) -> Tensor:
            return lse.new_empty(0) if x is None or grad is None else _laid_out_like(x, grad)

        return (
            *(of(x, grad) for x, grad in zip((q, k, v), grads[:3], strict=True)),
            *(of(x, grad) for x, grad in zip((past, future, far_keys), grads[5:], strict=True)),
            grads.parameters if learn_parameters and grads.parameters is not None else lse.new_empty(0),
            grads.sinks if learn_sinks and grads.sinks is not None else lse.new_empty(0),
        )


def _attend_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    far_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    learn_parameters: bool,
    learn_sinks: bool,
    impl: str,
    *prepared: Any,
) -> tuple[Tensor, ...]:
    it = Prepared(*prepared)
    given = it.cos_past is None
    far = (torch.empty_like(x) if given and x is not None else lse.new_empty(0) for x in (past, future, far_keys))
    learned = (it.parameters if learn_parameters else None), (it.sinks if learn_sinks else None)
    none = (lse.new_empty(0) if x is None else lse.new_empty(x.shape) for x in learned)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *far, *none


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The result with the strides that the fake kernels promise, those of `torch.empty_like(x)`; never x itself."""
    if result is not x and result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x, device=result.device).copy_(result)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_to_differentiate_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("attention by our kernels is differentiable once; impl='reference' is as often as you like")


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::attend_backward", _attend_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("ropewalk::attend", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd(
    "ropewalk::attend_backward", _refuse_to_differentiate_twice, setup_context=_save_nothing, lib=_LIBRARY
)
