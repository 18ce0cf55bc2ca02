"""The plans of one direction each: launchers run on tensors without memory, and their launches are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import Gradients, KernelBackend, Saved, Wanted
from ropewalk.ops.attention.backends import backward_of
from ropewalk.ops.attention.call import AttentionCall, flatten
from ropewalk.ops.attention.plans.cache import (
    FORWARDS,
    UNKNOWN,
    addresses_of,
    existing,
    keep_backward,
    may_plan,
    plan_or_none,
)
from ropewalk.ops.attention.plans.leaves import call_of, pick_numbers, pick_tensors, shares_table


class ForwardPlan:
    """The plan of a forward, and those of its backward by the gradients that come."""

    def __init__(self, call: AttentionCall, backend: KernelBackend, save: bool, longest: int | None = None) -> None:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(call.q.device, longest)
        twin = _twin(call, builder)
        out, saved = builder.follow(backend.forward, twin, save)
        features = (saved.q, saved.k, *saved[3:]) if save else (None,) * 5
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
        twin_saved = Saved(twin.q, twin.k, *map(builder.input, saved[2:]))  # type: ignore[arg-type]
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
        return Gradients._make(self.pick((*self.plan.run(inputs, addresses, results), None)))


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
    flags = (backend.name, save, call.return_lse, shares_table(call), torch._C._get_cublas_allow_tf32())
    key = (*shapes, *pick_numbers(leaves), *flags, _shares_bounds(call), call.q.get_device())
    return key, lambda: plan_or_none(ForwardPlan, call, backend, save)


def backward(
    plan: ForwardPlan | None,
    call: AttentionCall,
    backend: KernelBackend,
    out: Tensor,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Run a backend's backward, by a plan where the forward had one."""
    if plan is not None and may_plan(grad_out):
        grad_out, grad_lse = as_dense(grad_out), None if grad_lse is None else grad_lse.contiguous()
        inputs = existing((*pick_tensors(flatten(call)), *saved[2:], out, grad_out, grad_lse))
        found = find_backward(plan, grad_out, grad_lse, wanted, lambda: (call, out, saved))
        done = None if found is None else found.run(inputs)
        if done is not None:
            return done
    return backward_of(backend, call, wanted).backward(call, out, saved, grad_out, grad_lse, wanted)


def find_backward(
    plan: ForwardPlan,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
    describe: Callable[[], tuple[AttentionCall, Tensor, Saved]],
) -> BackwardPlan | None:
    """Return the plan of a backward after a planned forward; None where none is possible."""
    key = (grad_out.stride(), grad_out.dtype, None if grad_lse is None else grad_lse.stride(), wanted)
    found = plan.backwards.get(key, UNKNOWN)
    if found is UNKNOWN:
        call, out, saved = describe()
        backend = backward_of(plan.backend, call, wanted)
        found = plan_or_none(BackwardPlan, call, backend, out, saved, grad_out, grad_lse, wanted)
        keep_backward(plan.backwards, key, found)
    return found  # type: ignore[return-value]


def as_dense(grad: Tensor) -> Tensor:
    """Return a gradient, or a copy of one that is expanded, as that of a sum is."""
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
