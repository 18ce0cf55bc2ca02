"""The launches of forwards and backwards of calls that are validated, and the backwards of recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import Gradients, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.backends import KERNELS, backward_of
from ropewalk.ops.attention.call import AttentionCall, as_bhtd, from_bhtd
from ropewalk.ops.launch.autograd import Recorder
from ropewalk.ops.launch.kinds import (
    MAX_BACKWARDS,
    UNKNOWN,
    Operation,
    addresses_of,
    make_plan,
    may_plan,
    plan_or_none,
)
from ropewalk.ops.launch.record import Record, pick_at, switches
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.once import differentiable_once
from ropewalk.ops.tracing import has_saved_tensor_hooks, with_memory

_NOT_READ = ("scheme", "return_max_logits", "row_logits")


class ForwardCall(NamedTuple):
    """The forward of a call by a backend's kernels."""

    call: AttentionCall
    backend: str
    save: bool


class BackwardCall(NamedTuple):
    """The backward of a call: its q and k are those that its forward saved."""

    call: AttentionCall
    lse: Tensor
    q_past: Tensor | None
    q_future: Tensor | None
    k_far: Tensor | None
    out: Tensor  # (B, H, Tq, Dv)
    grad_out: Tensor
    grad_lse: Tensor | None  # (B, H, Tq)
    wanted: Wanted
    backend: str


class _Launches(Operation[Any]):
    reads_switches = True


def _launch_forward(record: ForwardCall, on: Steps) -> tuple[Tensor | None, ...]:
    """Return the output, the log-sum-exp, and the features that the forward saved and mapped."""
    call = record.call
    out, saved = KERNELS[record.backend].forward(call, record.save, on)
    if not record.save:
        return out, saved.lse if call.return_lse else None
    memory = {x.untyped_storage()._cdata for x in _plain_features(call) if x is not None}
    mapped = [None if x is None or x.untyped_storage()._cdata in memory else x for x in features_of(saved)]
    return out, saved.lse, *mapped


def _launch_backward(record: BackwardCall, on: Steps) -> Gradients:
    call, wanted = record.call, record.wanted
    saved = Saved(call.q, call.k, record.lse, record.q_past, record.q_future, record.k_far)
    backend = backward_of(KERNELS[record.backend], call, wanted)
    return backend.backward(call, record.out, saved, record.grad_out, record.grad_lse, wanted, on)


def features_of(saved: Saved) -> tuple[Tensor | None, ...]:
    """Return the features that a forward saved."""
    return saved.q, saved.k, saved.q_past, saved.q_future, saved.k_far


def _plain_features(call: AttentionCall) -> tuple[Tensor | None, ...]:
    """Return the features that a forward saves where it maps none."""
    far = call.far
    if far is None:
        return call.q, call.k, None, None, None
    if far.given is not None:
        return call.q, call.k, *far.given
    maps = far.tables is not None and far.tables.q_past is not None  # queries of far pairs always
    return call.q, call.k, None, None, call.k if maps else None


ATTEND = Recorder("Attend")
FORWARDS = _Launches(Record(ForwardCall, _NOT_READ), lambda record: _launch_forward)
BACKWARDS = _Launches(Record(BackwardCall, _NOT_READ), lambda record: _launch_backward)


def forward(call: AttentionCall, backend: KernelBackend, save: bool) -> tuple[Tensor, Saved]:
    """Do what a backend's forward does, by a plan where there is one."""
    if call.row_logits is not None:
        return backend.forward(call, save)
    results: Any = FORWARDS.run(ForwardCall(call, backend.name, save))
    out, lse, *mapped = results
    if not save:
        return out, Saved(call.q, call.k, lse)
    features: list[Any] = [x if y is None else y for x, y in zip(_plain_features(call), mapped, strict=True)]
    q, k, *far = features
    return out, Saved(q, k, lse, *far)


Describe = Callable[[Sequence[Tensor], Tensor, "Tensor | None", Wanted], BackwardCall]


class Backwards:
    """The backward of recorded calls whose tensors, output and gradients are in the caller's layout, and its plans.

    A call that is recorded without a plan is mostly differentiated once: its own plan is for the second time, and the
    first time is a kind among all backwards.
    """

    def __init__(self, describe: Describe, layout: str, *, waits: bool) -> None:
        self.describe, self.layout, self.waits = describe, layout, waits
        # Hooks give back other tensors than were saved, of any strides: as `save_on_cpu` does, dense ones.
        self.plans = not has_saved_tensor_hooks()
        self.found: dict[
            Any, Any
        ] = {}  # a plan, its results in the caller's layout, and what picks the gradients; None

    def run(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients, in the order of `Gradients`.

        saved: the tensors of a `BackwardCall` but the gradients.
        """
        strides, lse_strides = grad_out.stride(), None
        if 0 in strides or grad_out.is_neg():
            grad_out = as_dense(grad_out)
            strides = grad_out.stride()
        if grad_lse is not None:
            grad_lse = with_memory(grad_lse).contiguous()
            lse_strides = grad_lse.stride()
        inputs = [*saved, grad_out] if grad_lse is None else [*saved, grad_out, grad_lse]
        if self.plans and may_plan(grad_out):
            key = (strides, lse_strides, wanted, switches())
            found = self.found.get(key, UNKNOWN)
            if found is UNKNOWN and self.waits:
                self.waits = False
            elif found is UNKNOWN:
                found = plan_or_none(self._plan, saved, grad_out, grad_lse, wanted)
                if len(self.found) >= MAX_BACKWARDS:
                    self.found.clear()
                self.found[key] = found
            addresses = addresses_of(inputs)  # None for a gradient that is known as zero
            if found is not UNKNOWN and found is not None and addresses is not None:
                plan, results, pick = found
                gradients: tuple[Tensor | None, ...] = pick(plan.run(inputs, addresses, results))
                return gradients
        layout = self.layout
        grad_bhtd = as_bhtd(as_dense(grad_out), layout)
        found = BACKWARDS.run(self.describe(saved, grad_bhtd, grad_lse, wanted))
        pairs = zip(Gradients._fields, found, strict=True)
        return tuple([from_bhtd(x, layout) if name in _IN_LAYOUT and x is not None else x for name, x in pairs])

    def _plan(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> tuple[Any, list[Tensor], Callable[..., Any]]:
        """Return the plan of a backward, its results in the caller's layout, and what picks the gradients of them."""
        record = self.describe(saved, as_bhtd(grad_out, self.layout), grad_lse, wanted)
        plan, indices = make_plan(BACKWARDS.record, record, _launch_backward)
        results = list(plan.results)
        placed: Gradients = Gradients._make(indices)
        for name in _IN_LAYOUT:
            index = getattr(placed, name)
            if index is not None:
                results[index] = lay_out(results[index], self.layout)
        return plan, results, pick_at(indices)


_IN_LAYOUT = ("q", "k", "v", "gate")  # gradients in the caller's layout
_wanted = itemgetter(
    *[1 + Gradients._fields.index(name) for name in Wanted._fields]
)  # of a step and differentiable tensors


def differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the gradients of a recorded call, in the order of `Gradients`, and None for what else was passed."""
    if torch.is_grad_enabled():
        return _differentiate_again(ctx, grad_out, grad_lse)
    saved = ctx.saved_tensors
    reads_v = grad_out is not None  # the log-sum-exp alone does not: v has no gradient then, as in plain PyTorch
    if grad_out is None:
        *_, out = saved
        grad_out = torch.zeros_like(out)
    if grad_lse is not None and grad_lse.ndim == 2:  # of packed sequences
        grad_lse = grad_lse.unsqueeze(0)
    wanted = tuple.__new__(Wanted, _wanted(ctx.needs_input_grad))  # its constructor is a call of Python's
    grads: tuple[Tensor | None, ...] = ctx.backwards.run(saved, grad_out, grad_lse, wanted)
    if not reads_v:
        grads = Gradients(*grads)._replace(v=None)  # type: ignore[arg-type]
    return (*grads, None)


_differentiate_again = differentiable_once(differentiate)


def lay_out(result: Tensor, layout: str) -> Tensor:
    """Return a result (B, H, T, D) or (B, H, T), which has no memory, in a layout."""
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    laid_out = from_bhtd(like, layout)
    laid_out.untyped_storage().resize_(0)
    return laid_out


def as_dense(grad: Tensor) -> Tensor:
    """Return a gradient whose address holds its values: a copy of one that is expanded, as that of a sum is."""
    if grad.is_neg() or grad._is_zerotensor():
        grad = with_memory(grad)
    return grad.contiguous() if 0 in grad.stride() else grad
