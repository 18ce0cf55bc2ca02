"""Running a backend eagerly, and what autograd keeps of a call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention import plans
from ropewalk.ops.attention.backend import LN_2, Gradients, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.call import AttentionCall, FarQK, as_bhtd, flatten, from_bhtd
from ropewalk.ops.once import differentiable_once
from ropewalk.ops.tracing import is_plain_eager


class Features(NamedTuple):
    """The caller's tensors in its layout, of which a call may have views."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    layout: str


def are_of_call(features: Features, call: AttentionCall) -> bool:
    """Say whether a call's q, k, v and gate are views of the caller's, in a layout of another order."""
    *given, layout = features
    if layout == "bhtd" or not is_plain_eager(*given):
        return False
    for x, mine in zip(given, (call.q, call.k, call.v, call.gate), strict=True):
        if x is None or mine is None:
            if x is not mine:
                return False
        elif not x.data_ptr() == mine.data_ptr() != 0:
            return False
    return True


def attend(
    call: AttentionCall, backend: KernelBackend, features: Features | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attend by a backend's kernels: the output, (B, H, Tq, Dv), and the natural log-sum-exp if the call returns it.

    With features the output is in their layout, and autograd has no node for each view: it takes longer to run four of
    them than all launches.
    """
    differentiable = differentiable_tensors(call)
    layout = "bhtd"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        if features is not None:
            gradients: Any = Gradients._make(differentiable)
            named = features._asdict()
            layout = named.pop("layout")
            differentiable = gradients._replace(**named)
        result: tuple[Tensor, Tensor | None] = _Attend.apply(*differentiable, call, backend, layout)
        return result
    out, saved, _ = plans.forward(call, backend, False)
    out = out if features is None else from_bhtd(out, features.layout)
    return out, saved.lse * LN_2 if call.return_lse else None


def node_of_call(out: Tensor, lse: Tensor) -> Any:
    """Return the node of the one eager call that autograd recorded for results, by kernels; None where there are more.

    Its `apply` takes their gradients, None too, and returns those of q, k and v first.
    """
    node = out.grad_fn
    return node if type(node) in _NODES and lse.grad_fn is node else None


def differentiable_tensors(call: AttentionCall) -> tuple[Tensor | None, ...]:
    """The tensors of a call that may need a gradient, in the order of `Gradients`."""
    given = None if call.far is None else call.far.given
    return (call.q, call.k, call.v, call.score_mod_params, call.sinks, *(given or (None, None, None)), call.gate)


def without_inputs(call: AttentionCall, saved: Saved) -> AttentionCall:
    """The call with what the forward saved in place of features that only the forward reads."""
    far = call.far
    if far is not None and far.given is not None and saved.q_past is not None and saved.k_far is not None:
        far = far._replace(given=FarQK(saved.q_past, saved.q_future, saved.k_far))
    return call._replace(q=saved.q, k=saved.k, far=far)


class _Attend(torch.autograd.Function):
    """Attention with its backward kernels, differentiable once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        *differentiable, call, backend, layout = inputs
        if layout != "bhtd":
            given: Any = Gradients._make(differentiable)
            # A view made here would name another error of writes in place than a detached one does.
            q, k, v = [as_bhtd(x.detach(), layout) for x in (given.q, given.k, given.v)]
            gate = None if given.gate is None else as_bhtd(given.gate.detach(), layout)
            call = call._replace(q=q, k=k, v=v, gate=gate)
        out, saved, plan = plans.forward(call, backend, True)
        out = out if layout == "bhtd" else from_bhtd(out, layout).detach()
        leaves = flatten(without_inputs(call, saved))
        tensors = (*plans.pick_tensors(leaves), saved.lse, saved.q_past, saved.q_future, saved.k_far, out)
        is_saved = [x is not None for x in tensors]
        ctx.describe = functools.partial(_describe, plans.pick_numbers(leaves), is_saved, layout)
        ctx.backwards = plans.Backwards(plan, backend, layout)
        ctx.save_for_backward(*[x for x in tensors if x is not None])
        ctx.set_materialize_grads(False)
        return out, saved.lse * LN_2 if call.return_lse else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (_differentiate_again if torch.is_grad_enabled() else _differentiate)(ctx, *grads)


def _describe(
    numbers: Sequence[Any], is_saved: Sequence[bool], layout: str, saved: Sequence[Tensor]
) -> tuple[AttentionCall, Tensor, Saved]:
    """Return the call whose backward comes, its output, and what its forward saved."""
    found = iter(saved)
    *tensors, lse, q_past, q_future, k_far, out = [next(found) if x else None for x in is_saved]
    assert lse is not None
    assert out is not None
    call = plans.call_of(tensors, numbers)
    return call, as_bhtd(out, layout), Saved(call.q, call.k, lse, q_past, q_future, k_far)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    reads_v = grad_out is not None  # the log-sum-exp alone does not: v has no gradient then, as in plain PyTorch
    if grad_out is None:
        *_, out = saved
        grad_out = torch.zeros_like(out)
    _, _, _, wants_params, wants_sinks, _, _, _, wants_gate, *_ = ctx.needs_input_grad  # the order of `Gradients`
    wanted = Wanted(wants_params, wants_sinks, wants_gate)
    grad_q, grad_k, grad_v, *rest = ctx.backwards.run(saved, ctx.describe, grad_out, grad_lse, wanted)
    return grad_q, grad_k, grad_v if reads_v else None, *rest, None, None, None


_differentiate_again = differentiable_once(_differentiate)
_NODES = (_Attend._backward_cls, plans.NODE)
