"""Running a backend eagerly, and what autograd keeps of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.ops.attention import plans
from ropewalk.ops.attention.backend import LN_2, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.call import AttentionCall, FarQK, flatten


def attend(call: AttentionCall, backend: KernelBackend) -> tuple[Tensor, Tensor | None]:
    """Attend by a backend's kernels: the output, (B, H, Tq, Dv), and the natural log-sum-exp if the call returns it."""
    differentiable = differentiable_tensors(call)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        result: tuple[Tensor, Tensor | None] = _Attend.apply(*differentiable, call, backend)
        return result
    out, saved, _ = plans.forward(call, backend, False)
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
        *_, call, ctx.backend = inputs
        out, saved, ctx.plan = plans.forward(call, ctx.backend, True)
        leaves = flatten(without_inputs(call, saved))
        ctx.numbers = plans.pick_numbers(leaves)
        ctx.save_for_backward(out, *saved[2:], *plans.pick_tensors(leaves))
        ctx.set_materialize_grads(False)
        return out, saved.lse * LN_2 if call.return_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, q_past, q_future, k_far, *tensors = ctx.saved_tensors
        call = plans.call_of(tensors, ctx.numbers)
        needed = ctx.needs_input_grad
        saved, wanted = Saved(call.q, call.k, lse, q_past, q_future, k_far), Wanted(needed[3], needed[4], needed[8])
        reads_v = grad_out is not None  # the log-sum-exp alone does not: v has no gradient then, as in plain PyTorch
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = plans.backward(ctx.plan, call, ctx.backend, out, saved, grad_out, grad_lse, wanted)
        grad_q, grad_k, grad_v, *rest = grads
        return grad_q, grad_k, grad_v if reads_v else None, *rest, None, None


_NODES = (_Attend._backward_cls, plans.NODE)
