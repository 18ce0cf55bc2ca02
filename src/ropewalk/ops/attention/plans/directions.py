"""The plans of one direction each: launchers run on tensors without memory, and their launches are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import Gradients, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.backends import backward_of
from ropewalk.ops.attention.call import AttentionCall, as_bhtd, flatten, from_bhtd
from ropewalk.ops.attention.plans.cache import (
    FORWARDS,
    SEEN,
    UNKNOWN,
    addresses_of,
    existing,
    keep_backward,
    may_plan,
    plan_or_none,
)
from ropewalk.ops.attention.plans.leaves import call_of, pick_numbers, pick_tensors, shares_table, switches
from ropewalk.ops.tracing import has_saved_tensor_hooks, with_memory

OUT, LSE = range(2)  # of a forward's results


class ForwardPlan:
    """The plan of a forward, and those of its backward by the gradients that come."""

    def __init__(self, call: AttentionCall, backend: KernelBackend, save: bool, longest: int | None = None) -> None:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(call.q.device, longest)
        twin = _twin(call, builder)
        out, saved = builder.follow(backend.forward, twin, save)
        features = (saved.q, saved.k, saved.q_past, saved.q_future, saved.k_far) if save else (None,) * 5
        results = [out, saved.lse] if save or call.return_lse else [out]
        results += [x for x in features if x is not None and not builder.is_input(x)]
        self.plan = builder.finish(results)
        # Indices among inputs and results.
        self.out = builder.slot_of(out)
        self.lse = builder.slot_of(saved.lse) if len(results) > 1 else None
        self.features = tuple(None if x is None else builder.slot_of(x) for x in features)
        self.backend, self.sizes = backend, builder.sizes
        self.backwards: dict[Any, BackwardPlan | None] = {}

    def run(self, call: AttentionCall) -> tuple[Tensor, Saved] | None:
        """Do what the backend's forward does; return None where a tensor is misaligned."""
        inputs = existing(pick_tensors(flatten(call)))
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        results = self.plan.run(inputs, addresses, self.plan.results)
        memory = (*inputs, *results)
        q, k, *far = [None if index is None else memory[index] for index in self.features]
        return memory[self.out], Saved(q, k, None if self.lse is None else memory[self.lse], *far)  # type: ignore[arg-type]


class BackwardPlan:
    """The plan of a backward. Its inputs: the call's tensors, those saved but q and k, the output, the gradients."""

    def __init__(
        self,
        call: AttentionCall,
        backend: KernelBackend,
        out: Tensor,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: Wanted,
    ) -> None:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(call.q.device)
        twin = _twin(call, builder)
        rest = (saved.lse, saved.q_past, saved.q_future, saved.k_far)
        twin_saved = Saved(twin.q, twin.k, *map(builder.input, rest))  # type: ignore[arg-type]
        gradients = builder.follow(
            backend.backward, twin, builder.input(out), twin_saved, *map(builder.input, (grad_out, grad_lse)), wanted
        )
        n_inputs = builder.n_slots
        self.plan = builder.finish(existing(gradients))
        # Of the results, and of None behind them.
        self.pick = itemgetter(*[-1 if x is None else builder.slot_of(x) - n_inputs for x in gradients])

    def run(self, inputs: Sequence[Tensor]) -> Gradients | None:
        """Do what the backend's backward does; return None where a tensor is misaligned."""
        addresses = addresses_of(inputs)
        return None if addresses is None else self.run_at(inputs, addresses, self.plan.results)

    def run_at(self, inputs: Sequence[Tensor], addresses: list[int], results: Sequence[Tensor]) -> Gradients:
        """Do it at aligned addresses, with results of another layout."""
        picked = self.pick((*self.plan.run(inputs, addresses, results), None))
        return tuple.__new__(Gradients, picked)  # its own constructor is a call of Python's


def forward(call: AttentionCall, backend: KernelBackend, save: bool) -> tuple[Tensor, Saved, ForwardPlan | None]:
    """Run a backend's forward, by a plan where there is one, and return that too."""
    if call.row_logits is None and may_plan(call.q):
        plan = FORWARDS.find(*forward_key(call, backend, save))
        done = None if plan is None else plan.run(call)
        if done is not None:
            return *done, plan
    return *backend.forward(call, save), None


def forward_key(call: AttentionCall, backend: KernelBackend, save: bool) -> tuple[Any, Callable[[], Any]]:
    """Return the key of a forward's plan, and the function that makes it."""
    leaves = flatten(call)
    shapes = [None if x is None else (x.shape, x.stride(), x.dtype) for x in pick_tensors(leaves)]
    flags = (backend.name, save, call.return_lse, shares_table(call), _shares_bounds(call), switches())
    key = (*shapes, *pick_numbers(leaves), *flags, call.q.get_device())
    return key, lambda: plan_or_none(ForwardPlan, call, backend, save)


Describe = Callable[[Sequence[Tensor]], tuple[AttentionCall, Tensor, Saved]]


class Backwards:
    """The backward of recorded calls whose tensors, output and gradients are in the caller's layout, and its plans.

    Most calls without a plan are differentiated once, so that a plan of their backward is for the second time.
    """

    def __init__(self, plan: ForwardPlan | None, backend: KernelBackend, layout: str) -> None:
        self.backend, self.layout, self.waits = backend, layout, plan is None
        # Hooks give back other tensors than were saved, of any strides: as `save_on_cpu` does, dense ones.
        self.plans = not has_saved_tensor_hooks()
        self.of_forward: dict[Any, BackwardPlan | None] = {} if plan is None else plan.backwards
        self.found: dict[Any, Any] = {}  # a `BackwardPlan` and its results in the caller's layout; None; or `SEEN`

    def __len__(self) -> int:
        return len(self.found)

    def run(
        self, saved: Sequence[Tensor], describe: Describe, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Return the gradients.

        saved: the inputs of a `BackwardPlan` but for the gradients. describe: makes the call, its output and what its
        forward saved of them. grad_lse: (B, H, Tq).
        """
        strides, of_lse = grad_out.stride(), None
        if 0 in strides or grad_out.is_neg():
            grad_out = as_dense(grad_out)
            strides = grad_out.stride()
        if grad_lse is not None:
            grad_lse = with_memory(grad_lse).contiguous()
            of_lse = grad_lse.stride()
        if not self.plans:
            return self._launch(saved, describe, grad_out, grad_lse, wanted)
        key = (strides, of_lse, wanted, switches())
        found = self.found.get(key, UNKNOWN)
        if found is UNKNOWN or found is SEEN:
            is_first = found is UNKNOWN and self.waits
            found = SEEN if is_first else self._plan(saved, describe, grad_out, grad_lse, wanted)
            keep_backward(self.found, key, found)
        if found is not None and found is not SEEN and may_plan(grad_out):
            inputs = [*saved, grad_out] if grad_lse is None else [*saved, grad_out, grad_lse]
            addresses = addresses_of(inputs)  # None for a gradient that is known as zero
            if addresses is not None:
                backward_plan, results = found
                gradients: Gradients = backward_plan.run_at(inputs, addresses, results)
                return gradients
        return self._launch(saved, describe, grad_out, grad_lse, wanted)

    def _launch(
        self, saved: Sequence[Tensor], describe: Describe, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Return the gradients without a plan."""
        grad_out = as_dense(grad_out)
        call, out, rest = describe(saved)
        backend, layout = backward_of(self.backend, call, wanted), self.layout
        gradients = backend.backward(call, out, rest, as_bhtd(grad_out, layout), grad_lse, wanted)
        grad_q, grad_k, grad_v = (from_bhtd(x, layout) for x in (gradients.q, gradients.k, gradients.v))
        grad_gate = None if gradients.gate is None else from_bhtd(gradients.gate, layout)
        return gradients._replace(q=grad_q, k=grad_k, v=grad_v, gate=grad_gate)

    def _plan(
        self,
        saved: Sequence[Tensor],
        describe: Describe,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: Wanted,
    ) -> tuple[BackwardPlan, list[Tensor]] | None:
        """Return the plan of a backward, and its results in the caller's layout; None where none is possible."""
        if not may_plan(grad_out):
            return None
        grad_out = as_bhtd(grad_out, self.layout)
        key = (grad_out.stride(), None if grad_lse is None else grad_lse.stride(), wanted, switches())
        made: Any = self.of_forward.get(key, UNKNOWN)
        if made is UNKNOWN:
            call, out, of_forward = describe(saved)
            backend = backward_of(self.backend, call, wanted)
            made = plan_or_none(BackwardPlan, call, backend, out, of_forward, grad_out, grad_lse, wanted)
            keep_backward(self.of_forward, key, made)
        if made is None:
            return None
        results = list(made.plan.results)
        indices: Gradients = Gradients._make(made.pick((*range(len(results)), None)))
        for index in (indices.q, indices.k, indices.v, indices.gate):
            if index is not None:
                results[index] = lay_out(results[index], self.layout)
        return made, results


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


def _twin(call: AttentionCall, builder: Any) -> AttentionCall:
    """Return a call whose tensors have no memory."""
    leaves = flatten(call)
    twin = call_of([builder.input(x) for x in pick_tensors(leaves)], pick_numbers(leaves))
    twin = twin._replace(return_lse=call.return_lse, needs_backward=call.needs_backward)
    if shares_table(call):
        twin = twin._replace(tables=twin.tables._replace(k=twin.tables.q))
    if _shares_bounds(call):  # kernels of windows need not look for keys outside of all
        twin = twin._replace(cu_seqlens_k=twin.cu_seqlens_q)
    return twin


def _shares_bounds(call: AttentionCall) -> bool:
    """Say whether packed queries and keys have the same bounds."""
    return call.cu_seqlens_q is not None and call.cu_seqlens_k is call.cu_seqlens_q
