"""Attention as PyTorch operators, for torch.compile, tracing and dispatch modes.

`torch.ops.ropewalk.attend` is what `torch.compile`, dispatch modes and tensor subclasses see. Plain eager calls go
around it: the dispatcher and an operator's autograd formula cost the host more than all launches.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import LN_2, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.backends import KERNELS, backward_of
from ropewalk.ops.attention.call import LEAVES, SCHEMA, AttentionCall, FarQK, flatten, unflatten
from ropewalk.ops.once import REFUSAL

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
# The log-sum-exp is to base 2. The rotated features are what the backward reads; each is empty where the call leaves
# its features alone, or got them, and without `save`: then no backward may come.
_ROTATED = ("rotated_q", "rotated_k", "rotated_q_past", "rotated_q_future", "rotated_k_far")
_RESULTS = ", ".join(f"Tensor {name}" for name in ("out", "lse", *_ROTATED))
_LIBRARY.define(f"attend({SCHEMA}, bool save, str impl) -> ({_RESULTS})")
# The same, and each row's largest scaled score, which has no gradient.
_LIBRARY.define(f"attend_with_row_logits({SCHEMA}, bool save, str impl) -> ({_RESULTS}, Tensor row_logits)")
# The call's q, k and the caller's features of far pairs are those that the forward left. All gradients but the first
# three are empty unless they are wanted: score parameters, sinks, the gate. A schema has at most 64 arguments.
_LIBRARY.define(
    "attend_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor? q_past, Tensor? q_future, "
    f"Tensor? k_far, bool[] wanted, str impl, {SCHEMA}) -> (Tensor grad_q, "
    "Tensor grad_k, Tensor grad_v, Tensor grad_q_past, Tensor grad_q_future, Tensor grad_k_far, Tensor grad_params, "
    "Tensor grad_sinks, Tensor grad_gate)"
)
# The leaves that the results of attend_backward are the gradients of.
_LEARNED = ("score_mod_params", "sinks", "gate")
_FAR_NAMES = ("far_given_q_past", "far_given_q_future", "far_given_k")
_DIFFERENTIABLE = ("q", "k", "v", *_FAR_NAMES, *_LEARNED)


def attend(call: AttentionCall, backend: KernelBackend) -> tuple[Tensor, Tensor | None]:
    """Attend as `autograd.attend` does, in a way that tracers and dispatch modes follow."""
    out, lse, *_ = torch.ops.ropewalk.attend(*flatten(call), call.needs_backward, backend.name)
    return out, lse * LN_2 if call.return_lse else None


def attend_with_row_logits(call: AttentionCall, backend: KernelBackend) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attend, and return each row's largest scaled score too, (B, H, Tq)."""
    out, lse, *_, row_logits = torch.ops.ropewalk.attend_with_row_logits(
        *flatten(call), call.needs_backward, backend.name
    )
    return out, lse * LN_2 if call.return_lse else None, row_logits


def _features(call: AttentionCall) -> tuple[tuple[Tensor, bool], ...]:
    """q, k, and q, q, k again for far pairs: the tensors, and whether the scheme rotates them."""
    tables, far = call.tables, None if call.far is None else call.far.tables
    far_tables = (None, None, None) if far is None else far
    tensors = (call.q, call.k, call.q, call.q, call.k)
    rotations = (tables.q, tables.k, *far_tables)
    return tuple((x, table is not None) for x, table in zip(tensors, rotations, strict=True))


def _attend(*arguments: Any) -> tuple[Tensor, ...]:
    *leaves, save, impl = arguments
    return _attend_call(unflatten(leaves), save, impl)


def _attend_with_row_logits(*arguments: Any) -> tuple[Tensor, ...]:
    *leaves, save, impl = arguments
    call = unflatten(leaves)
    row_logits = empty_row_logits(call)
    return *_attend_call(call._replace(row_logits=row_logits), save, impl), row_logits


def empty_row_logits(call: AttentionCall) -> Tensor:
    """Return memory for each row's largest scaled score, (B, H, Tq)."""
    return call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


def _attend_call(call: AttentionCall, save: bool, impl: str) -> tuple[Tensor, ...]:
    with torch.no_grad():
        out, saved = KERNELS[impl].forward(call, save)
        mine = (saved.q, saved.k, saved.q_past, saved.q_future, saved.k_far)
        rotated = (
            _laid_out_like(x, result) if save and is_rotated and result is not None else call.q.new_empty(0)
            for (x, is_rotated), result in zip(_features(call), mine, strict=True)
        )
        promised = _output_of(torch.empty_like(call.q, device="meta"), call.value_dim)
        return _laid_out_like(promised, out), saved.lse, *rotated


def _attend_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *leaves, save, _ = arguments
    call = unflatten(leaves)
    rotated = (torch.empty_like(x) if save and is_rotated else call.q.new_empty(0) for x, is_rotated in _features(call))
    return _output_of(call.q, call.value_dim), call.q.new_empty(call.q.shape[:3], dtype=torch.float32), *rotated


def _attend_with_row_logits_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *leaves, _, _ = arguments
    return *_attend_fake(*arguments), empty_row_logits(unflatten(leaves))


def _output_of(q: Tensor, value_dim: int) -> Tensor:
    """Memory for the output: like q, or with (B, T, H, Dv) in a row where Dv is another than D."""
    if q.shape[3] == value_dim:
        return torch.empty_like(q)
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], value_dim).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *leaves, ctx.save, ctx.impl = inputs
    call = unflatten(leaves)
    out, lse, *rotated = output
    rotated = rotated[: len(_ROTATED)]  # row logits may follow, which have no gradient
    far_features: Any = (None, None, None) if call.far is None or call.far.given is None else call.far.given
    if call.far is not None and call.far.tables is not None:
        far_features = None, None, call.k
    plain: tuple[Any, ...] = (call.q, call.k, *far_features)
    q, k, q_past, q_future, k_far = (
        mine if is_rotated else x for x, mine, (_, is_rotated) in zip(plain, rotated, _features(call), strict=True)
    )
    if call.far is not None and call.far.given is not None:
        call = call._replace(far=call.far._replace(given=FarQK(q_past, q_future, k_far)))
    saved = flatten(call._replace(q=q, k=k))
    ctx.tensors = [index for index, leaf in enumerate(saved) if isinstance(leaf, Tensor)]
    ctx.numbers = [None if isinstance(leaf, Tensor) else leaf for leaf in saved]
    ctx.save_for_backward(out, lse, q_past, q_future, k_far, *(saved[index] for index in ctx.tensors))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.save:
        raise RuntimeError("torch.ops.ropewalk.attend was called with save=False, and saved nothing for a backward")
    out, lse, q_past, q_future, k_far, *tensors = ctx.saved_tensors
    leaves = list(ctx.numbers)
    for index, x in zip(ctx.tensors, tensors, strict=True):
        leaves[index] = x
    reads_v = grad_out is not None
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *needed_of_leaves, _, _ = ctx.needs_input_grad
    needed = dict(zip(LEAVES, needed_of_leaves, strict=True))
    grads = torch.ops.ropewalk.attend_backward(
        *(grad_out, grad_lse, out, lse, q_past, q_future, k_far),
        *([needed[name] for name in _LEARNED], ctx.impl, *leaves),
    )
    grads_by_leaf = dict(zip(_DIFFERENTIABLE, grads, strict=True))
    if not reads_v:  # as `autograd` does
        del grads_by_leaf["v"]
    for name in (*_FAR_NAMES, *_LEARNED):
        if not needed[name]:
            del grads_by_leaf[name]
    return *(grads_by_leaf.get(name) for name in LEAVES), None, None


def _attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_past: Tensor | None,
    q_future: Tensor | None,
    k_far: Tensor | None,
    wanted: Sequence[bool],
    impl: str,
    *leaves: Any,
) -> tuple[Tensor, ...]:
    call, wants = unflatten(leaves), Wanted(*wanted)
    with torch.no_grad():
        if grad_lse is not None:
            grad_lse = grad_lse / LN_2  # the kernels take the gradient of the natural logarithm
        saved = Saved(call.q, call.k, lse, q_past, q_future, k_far)
        backend = backward_of(KERNELS[impl], call, wants)
        grads = backend.backward(call, out, saved, grad_out, grad_lse, wants)

        def of(x: Tensor | None, grad: Tensor | None) -> Tensor:
            return lse.new_empty(0) if x is None or grad is None else _laid_out_like(x, grad)

        return (
            *(of(x, grad) for x, grad in ((call.q, grads.q), (call.k, grads.k), (call.v, grads.v))),
            *(of(x, grad) for x, grad in ((q_past, grads.q_past), (q_future, grads.q_future), (k_far, grads.k_far))),
            grads.score_mod_params
            if wants.score_mod_params and grads.score_mod_params is not None
            else lse.new_empty(0),
            grads.sinks if wants.sinks and grads.sinks is not None else lse.new_empty(0),
            of(call.gate, grads.gate),
        )


def _attend_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_past: Tensor | None,
    q_future: Tensor | None,
    k_far: Tensor | None,
    wanted: Sequence[bool],
    impl: str,
    *leaves: Any,
) -> tuple[Tensor, ...]:
    call = unflatten(leaves)
    has_far_features = call.far is not None and call.far.given is not None
    features = (q_past, q_future, k_far)
    far = (torch.empty_like(x) if has_far_features and x is not None else lse.new_empty(0) for x in features)
    wants_params, wants_sinks, wants_gate = wanted
    learned = (call.score_mod_params if wants_params else None), (call.sinks if wants_sinks else None)
    rest = (lse.new_empty(0) if x is None else lse.new_empty(x.shape) for x in learned)
    grad_gate = torch.empty_like(call.gate) if wants_gate and call.gate is not None else lse.new_empty(0)
    return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v), *far, *rest, grad_gate


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The result with the strides that the fake kernels promise, those of `torch.empty_like(x)`; never x itself."""
    if result is not x and result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x, device=result.device).copy_(result)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_to_differentiate_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(REFUSAL)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_with_row_logits", _attend_with_row_logits, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::attend_with_row_logits", _attend_with_row_logits_fake, lib=_LIBRARY)
torch.library.register_fake("ropewalk::attend_backward", _attend_backward_fake, lib=_LIBRARY)
for _name in ("attend", "attend_with_row_logits"):
    torch.library.register_autograd(f"ropewalk::{_name}", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd(
    "ropewalk::attend_backward", _refuse_to_differentiate_twice, setup_context=_save_nothing, lib=_LIBRARY
)
