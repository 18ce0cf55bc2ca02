"""Kinds of calls of `attention` that kernels run: their plans, and what these read beside the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import LN_2, Gradients, Saved, Wanted
from ropewalk.ops.attention.backends import backward_of
from ropewalk.ops.attention.call import AttentionCall, as_bhtd, flatten, from_bhtd
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.plans.cache import UNKNOWN, addresses_of, existing, keep_backward, may_plan
from ropewalk.ops.attention.plans.directions import BackwardPlan, ForwardPlan, as_dense, find_backward
from ropewalk.ops.attention.plans.leaves import GATE, GATE_GRADIENT, SEED, call_of, pick_numbers, pick_tensors


class PlannedCall:
    """A kind of call of `attention`: its plan, and the tensors that the plan reads beside the caller's."""

    def __init__(self, call: AttentionCall, plan: ForwardPlan, layout: str) -> None:
        tensors = pick_tensors(flatten(call))
        self.plan, self.layout, self.return_lse = plan, layout, call.return_lse
        self.given = [index for index, x in enumerate(tensors[:SEED]) if x is not None]
        self.constants = existing(tensors[SEED + 1 :])
        self.constant_addresses = [x.data_ptr() for x in self.constants]
        self.numbers, self.is_given = pick_numbers(flatten(call)), [x is not None for x in tensors]
        self.needs_backward, self.drops = call.needs_backward, call.dropout_p > 0
        self.gates = call.gate is not None
        self.results = [lay_out(plan.plan.results[0], layout), *plan.plan.results[1:]]
        self.n_inputs = len(self.given) + self.drops + len(self.constants)
        if self.needs_backward:
            later = range(2, self.n_inputs)
            saved = (*plan.features[:2], *later, plan.lse, *plan.features[2:], plan.out)
            self.pick_saved = itemgetter(*existing(saved))
        self.backwards: dict[Any, Any] = {}  # a `BackwardPlan` and its results in the caller's layout; or None

    def inputs_of(self, given: Sequence[Tensor | None]) -> tuple[list[Any], list[int]] | None:
        """Return the plan's inputs for a call's tensors, and their addresses; None where one is misaligned."""
        inputs: list[Any] = [given[index] for index in self.given]
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        if self.drops:
            seed = make_seed(inputs[0])
            inputs.append(seed)
            addresses.append(seed.data_ptr())
        return inputs + self.constants, addresses + self.constant_addresses

    def returned(self, results: Sequence[Tensor]) -> Any:
        """Return what `attention` returns."""
        if not self.return_lse:
            return results[0]
        lse = results[1] * LN_2
        return results[0], lse[0] if self.layout == "thd" else lse

    def describe(self, saved: Sequence[Tensor]) -> tuple[AttentionCall, Tensor, Saved]:
        """Return the call whose backward comes, its output and what was saved, as `backward` takes them."""
        layout, n_inputs = self.layout, self.n_inputs
        *tensors, out = saved
        leaves = iter(tensors[:n_inputs])
        every = [next(leaves) if is_given else None for is_given in self.is_given]
        # The caller's tensors are in its layout; q and k that were mapped are not the caller's.
        for index, slot in enumerate((*self.plan.features[:2], 2)):
            if slot == index:
                every[index] = as_bhtd(every[index], layout)  # type: ignore[arg-type]
        if self.gates:
            every[GATE] = as_bhtd(every[GATE], layout)  # type: ignore[arg-type]
        others = iter(tensors[n_inputs + 1 :])
        far = [None if slot is None else next(others) for slot in self.plan.features[2:]]
        far = [
            as_bhtd(x, layout) if slot == 1 and x is not None else x
            for x, slot in zip(far, self.plan.features[2:], strict=True)
        ]
        call = call_of(every, self.numbers)
        return call, as_bhtd(out, layout), Saved(call.q, call.k, tensors[n_inputs], *far)

    def differentiate(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Return the gradients, those of q, k, v and the gate in the caller's layout."""
        grad_out = as_dense(grad_out)
        if grad_lse is not None:
            grad_lse = (grad_lse[None] if self.layout == "thd" else grad_lse).contiguous()
        key = (grad_out.stride(), None if grad_lse is None else grad_lse.stride(), wanted)
        found = self.backwards.get(key, UNKNOWN)
        inputs = [*saved, grad_out] if grad_lse is None else [*saved, grad_out, grad_lse]
        if found is UNKNOWN:
            found = self._plan_backward(saved, grad_out, grad_lse, wanted)
            keep_backward(self.backwards, key, found)
        addresses = None if found is None or not may_plan(grad_out) else addresses_of(inputs)
        if addresses is not None:
            backward_plan, results = found
            gradients: Gradients = backward_plan.run_at(inputs, addresses, results)
            return gradients
        call, out, rest = self.describe(saved)
        backend = backward_of(self.plan.backend, call, wanted)
        gradients = backend.backward(call, out, rest, as_bhtd(grad_out, self.layout), grad_lse, wanted)
        grad_q, grad_k, grad_v = (from_bhtd(x, self.layout) for x in gradients[:3])
        grad_gate = None if gradients.gate is None else from_bhtd(gradients.gate, self.layout)
        return gradients._replace(q=grad_q, k=grad_k, v=grad_v, gate=grad_gate)

    def _plan_backward(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> tuple[BackwardPlan, list[Tensor]] | None:
        """Return the plan of a backward, and its results in the caller's layout."""
        grad_out = as_bhtd(grad_out, self.layout)
        made = find_backward(self.plan, grad_out, grad_lse, wanted, lambda: self.describe(saved))
        if made is None:
            return None
        results = list(made.plan.results)
        indices = made.pick((*range(len(results)), None))
        for index in (*indices[:3], indices[GATE_GRADIENT]):
            if index is not None:
                results[index] = lay_out(results[index], self.layout)
        return made, results


def lay_out(result: Tensor, layout: str) -> Tensor:
    """Return a result (B, H, T, D) or (B, H, T), which has no memory, in a layout."""
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    laid_out = from_bhtd(like, layout)
    laid_out.untyped_storage().resize_(0)
    return laid_out


class GrowingCall(PlannedCall):
    """A kind of call over caches of all lengths between two powers of two, and its plan."""

    def __init__(self, call: AttentionCall, plan: ForwardPlan, layout: str) -> None:
        super().__init__(call, plan, layout)
        assert plan.sizes is not None
        self.measure, self.work, indices = plan.sizes
        self.pick_given, self.pick_sizes = itemgetter(*self.given), itemgetter(*indices)
        self.head, self.token = (2, 1) if layout == "bthd" else (1, 2)

    def inputs_of(self, given: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """Return the plan's inputs, and their addresses; None where one is misaligned, or the cache too large."""
        inputs = list(self.pick_given(given)) + self.constants
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        _, k, v, mask, *_ = given
        numbers = [*self.pick_sizes(self.measure(self.work, k, v, mask, k.shape[self.token], self.head))]
        return None if max(numbers) > _MOST else (inputs + numbers, addresses + numbers)


FIXED = object()  # in place of the plan of caches of all lengths, where a call is planned by its own length alone
_MOST = 2**31 - 1  # numbers of a launch are int32
