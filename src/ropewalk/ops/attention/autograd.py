"""Running a backend eagerly, and what autograd keeps of a call without a plan of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import LN_2, Gradients, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.call import RECORD, AttentionCall, FarQK, as_bhtd, flatten, from_bhtd, unflatten
from ropewalk.ops.attention.plans.backward import ATTEND, BackwardCall, Backwards, differentiate, features_of, forward
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.launch.autograd import step_of
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
    *tensors, layout = features
    if layout == "bhtd" or not is_plain_eager(*tensors):
        return False
    for x, mine in zip(tensors, (call.q, call.k, call.v, call.gate), strict=True):
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
            named = features._asdict()
            layout = named.pop("layout")
            differentiable = differentiable._replace(**named)
        result: tuple[Tensor, Tensor | None] = ATTEND.record_any(_Attend(call, backend, layout), *differentiable)
        return result
    out, saved = forward(call, backend, False)
    out = out if features is None else from_bhtd(out, features.layout)
    return out, saved.lse * LN_2 if call.return_lse else None


def differentiable_tensors(call: AttentionCall) -> Gradients:
    """The tensors of a call that may need a gradient, as those are called."""
    q_past = q_future = k_far = None
    if call.far is not None and call.far.given is not None:
        q_past, q_future, k_far = call.far.given
    learned = {name: getattr(call, name) for name in Wanted._fields}
    return Gradients(call.q, call.k, call.v, q_past=q_past, q_future=q_future, k_far=k_far, **learned)


def without_inputs(call: AttentionCall, saved: Saved) -> AttentionCall:
    """The call with what the forward saved in place of features that only the forward reads."""
    far = call.far
    if far is not None and far.given is not None and saved.q_past is not None and saved.k_far is not None:
        far = far._replace(given=FarQK(saved.q_past, saved.q_future, saved.k_far))
    return call._replace(q=saved.q, k=saved.k, far=far)


class _Attend:
    """The step of a call: attention with its backward kernels, differentiable once."""

    def __init__(self, call: AttentionCall, backend: KernelBackend, layout: str) -> None:
        self.call: AttentionCall | None = call
        self.backend, self.layout = backend, layout
        self.numbers: list[Any] = []  # of the leaves that the backward reads; None for tensors
        self.is_saved: list[bool] = []

    def forward(self, ctx: Any, *differentiable: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend, and save what the backward reads."""
        call, layout = self.call, self.layout
        assert call is not None
        self.call = None  # autograd keeps this step: what it needs of tensors is saved
        if layout != "bhtd":
            inputs: Any = Gradients._make(differentiable)
            # A view created here would name another error of writes in place than a detached one does.
            q, k, v = [as_bhtd(x.detach(), layout) for x in (inputs.q, inputs.k, inputs.v)]
            gate = None if inputs.gate is None else as_bhtd(inputs.gate.detach(), layout)
            call = call._replace(q=q, k=k, v=v, gate=gate)
        out, saved = forward(call, self.backend, True)
        out = out if layout == "bhtd" else from_bhtd(out, layout).detach()
        leaves = flatten(without_inputs(call, saved))
        _, _, *far = features_of(saved)
        tensors = [x for name, x in zip(RECORD.names, leaves, strict=True) if name in RECORD.tensors]
        tensors += [saved.lse, *far, out]
        self.numbers = [None if name in RECORD.tensors else x for name, x in zip(RECORD.names, leaves, strict=True)]
        self.is_saved = [x is not None for x in tensors]
        ctx.backwards = Backwards(self.describe, layout, waits=True)
        ctx.save_for_backward(*[x for x in tensors if x is not None])
        ctx.set_materialize_grads(False)
        return out, saved.lse * LN_2 if call.return_lse else None

    backward = staticmethod(differentiate)

    def describe(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> BackwardCall:
        """Return the backward of what was saved."""
        rest = iter(saved)
        found: list[Any] = [next(rest) if there else None for there in self.is_saved]
        tensors: Any = iter(found)
        leaves = [
            next(tensors) if name in RECORD.tensors else x for name, x in zip(RECORD.names, self.numbers, strict=True)
        ]
        lse, q_past, q_future, k_far, out = tensors
        call, out, backend = unflatten(leaves), as_bhtd(out, self.layout), self.backend.name
        return BackwardCall(call, lse, q_past, q_future, k_far, out, grad_out, grad_lse, wanted, backend)


def find_node(out: Tensor, lse: Tensor) -> Any:
    """Return the node of the one eager call that autograd recorded for results, by kernels; None where there are more.

    Its `apply` takes their gradients, None too, and returns None and those of q, k and v first.
    """
    node = out.grad_fn
    return node if isinstance(step_of(node), (_Attend, PlannedCall)) and lse.grad_fn is node else None
