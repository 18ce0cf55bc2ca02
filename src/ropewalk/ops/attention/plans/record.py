"""The run of a kind of call, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import Wanted
from ropewalk.ops.attention.plans.leaves import of_given
from ropewalk.ops.attention.plans.library import LibraryCall
from ropewalk.ops.attention.plans.made import MadeCall
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.once import differentiable_once
from ropewalk.schemes import PositionScheme


def run_plan(planned: PlannedCall | LibraryCall, given: Sequence[Tensor | None], position: PositionScheme) -> Any:
    """Return what `attention` does before a gate that no kernel applies; None where a tensor is misaligned."""
    if isinstance(planned, LibraryCall):
        return planned.run(given)
    if isinstance(planned, MadeCall):
        return run_made(planned, given, position)
    return run_planned(planned, given)


def run_planned(planned: PlannedCall, given: Sequence[Tensor | None]) -> Any:
    """Return what `attention` does, by a plan; None where a tensor is misaligned."""
    found = planned.inputs_of(given)
    if found is None:
        return None
    if planned.needs_backward:
        results: Any = _record(*_differentiable(given), None, planned, found)
        return results
    return planned.returned(planned.plan.plan.run(*found, planned.results))


def run_made(made: MadeCall, given: Sequence[Tensor | None], position: PositionScheme) -> Any:
    """Return what `attention` does, by a plan for which tensors are made now; None where one is misaligned."""
    found = made.make_inputs(given, position)
    if found is None:
        return None
    inputs, addresses, params, sinks = found
    if made.needs_backward:
        return _record(*_features(given), sinks, params, made, (inputs, addresses))
    return made.returned(made.plan.plan.run(inputs, addresses, made.results))


_features, _differentiable = of_given("q", "k", "v", "gate"), of_given("q", "k", "v", "gate", "sinks")


class _Planned(torch.autograd.Function):
    """A planned call, with tensors in the caller's layout; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        sinks: Tensor | None,
        params: Tensor | None,
        planned: PlannedCall,
        found: tuple[list[Tensor], list[int]],
    ) -> Any:
        results = planned.plan.plan.run(*found, planned.results)
        ctx.planned = planned
        inputs, _ = found
        ctx.save_for_backward(*planned.pick_saved((*inputs, *results)))
        ctx.set_materialize_grads(False)
        return planned.returned(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (_differentiate_again if torch.is_grad_enabled() else _differentiate)(ctx, *grads)


# `_Planned.apply` without its tests for a setup_context and for active transforms, under which no plan runs.
_record: Callable[..., Any] = super(torch.autograd.Function, _Planned).apply
NODE: Any = _Planned._backward_cls  # of a planned call's results


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    reads_v = grad_out is not None  # as in `_Attend`
    if grad_out is None:
        *_, out = saved
        grad_out = torch.zeros_like(out)
    _, _, _, wants_gate, wants_sinks, wants_params, _, _ = ctx.needs_input_grad
    planned = ctx.planned
    wanted = tuple.__new__(Wanted, (wants_params, wants_sinks, wants_gate))  # its constructor is a call of Python's
    if grad_lse is not None and planned.layout == "thd":
        grad_lse = grad_lse.unsqueeze(0)
    grads = planned.backwards.run(saved, planned.describe, grad_out, grad_lse, wanted)
    return (
        *(grads.q, grads.k, grads.v if reads_v else None),
        grads.gate if wants_gate else None,
        grads.sinks if wants_sinks else None,
        grads.score_mod_params if wants_params else None,
        *(None, None),
    )


_differentiate_again = differentiable_once(_differentiate)
