"""Kinds of calls of `attention` that kernels run: one plan has all launches, also those that make rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.backend import LN_2, Gradients, KernelBackend, Wanted
from ropewalk.ops.attention.call import RECORD, AttentionCall, as_bhtd, flatten, unflatten
from ropewalk.ops.attention.plans.backward import ATTEND, BackwardCall, Backwards, differentiate, features_of, lay_out
from ropewalk.ops.attention.plans.inputs import Inputs, Maker, Rows
from ropewalk.ops.attention.validate import Unchecked
from ropewalk.ops.launch.kinds import existing, matches_nothing
from ropewalk.ops.launch.record import pick_at

MOST = 2**31 - 1  # numbers of a launch are int32


class PlannedCall:
    """A kind of call of `attention`: its plan, and what autograd keeps of it.

    paths, rows, makers: as `Inputs` takes them. longest: of caches that grow.
    """

    matches = staticmethod(matches_nothing)
    switches: tuple[bool, ...] = ()

    def __init__(
        self,
        call: AttentionCall,
        backend: KernelBackend,
        layout: str,
        paths: dict[str, str],
        rows: Sequence[Rows] = (),
        makers: dict[str, Maker] | None = None,
        longest: int | None = None,
    ) -> None:
        from ropewalk.ops.launch.plan import Builder

        self.layout, self.return_lse, self.gates = layout, call.return_lse, call.gate is not None
        self.needs_backward = call.needs_backward
        builder = Builder(call.q.device, longest)
        self.inputs: Inputs = builder.follow(Inputs, call, paths, list(rows), makers or {})
        self.constants, meta_call = self.inputs.all_constants, self.inputs.meta_call
        out, saved = builder.follow(backend.forward, meta_call, self.needs_backward)
        features = features_of(saved) if self.needs_backward else ()
        leaves = dict(zip(RECORD.names, flatten(meta_call), strict=True))
        row_tables = [leaves[name] for side in rows for name in side.names[:2]] if self.needs_backward else []
        results = [out, saved.lse] if self.needs_backward or self.return_lse else [out]
        results += [x for x in (*features, *row_tables) if x is not None and not builder.is_input(x)]
        self.plan = builder.finish(results)
        like, *others = self.plan.results
        self.results = [lay_out(like, layout), *others]
        self.sizes = builder.sizes
        if longest is not None and self.sizes is not None:
            self.measure, self.work, indices = self.sizes
            self.pick_sizes = pick_at(indices)
            self.head, self.token = (2, 1) if layout == "bthd" else (1, 2)
        if self.needs_backward:
            q, k, *far = features
            tensors = {name: x for name in RECORD.tensors if (x := leaves[name]) is not None} | {"q": q, "k": k}
            order = existing([*tensors.values(), saved.lse, *far, out])
            self.slots = [builder.slot_of(x) for x in order]
            self.pick_saved = pick_at(self.slots)
            self.has_far = [x is not None for x in far]
            # The caller's tensors have its shapes, and the backward's launchers read the call's.
            self.views = dict(enumerate(self.inputs.views))
            self.saved_names, self.numbers, self.backend = list(tensors), leaves, backend.name
            self.backwards = Backwards(self.describe, layout, waits=False)
            names = self.inputs.names
            self.pick_differentiable = pick_at([names.index(x) if x in names else None for x in Gradients._fields])

    def run(self, unchecked: Unchecked) -> Any:
        """Return what `attention` does before a gate that no kernel applies; None where a tensor is misaligned."""
        found = self.inputs.gather(unchecked)
        if found is None:
            return None
        inputs, addresses = found
        if self.needs_backward:
            return ATTEND.record(self, *self.pick_differentiable(inputs), found)
        return self.returned(self.plan.run(inputs, addresses, self.results))

    def forward(self, ctx: Any, *arguments: Any) -> Any:
        """Run the plan, and save what its backward reads."""
        *_, (inputs, addresses) = arguments
        results = self.plan.run(inputs, addresses, self.results)
        ctx.backwards = self.backwards
        ctx.save_for_backward(*self.pick_saved((*inputs, *results)))
        ctx.set_materialize_grads(False)
        return self.returned(results)

    backward = staticmethod(differentiate)

    def returned(self, results: Sequence[Tensor]) -> Any:
        """Return what `attention` returns."""
        out, *rest = results
        if not self.return_lse:
            return out
        natural = rest[0] * LN_2
        return out, natural.squeeze(0) if self.layout == "thd" else natural

    def describe(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> BackwardCall:
        """Return the backward of what was saved."""
        views = {  # what is one tensor stays one: launchers ask whether queries and keys have the same bounds
            slot: x.as_strided(*self.views[slot]) if slot in self.views else x
            for slot, x in zip(self.slots, saved, strict=True)
        }
        rest = iter([views[slot] for slot in self.slots])
        leaves = {**self.numbers, **{name: next(rest) for name in self.saved_names}}
        call = unflatten([leaves[name] for name in RECORD.names])
        lse, q_past, q_future, k_far = next(rest), *[next(rest) if there else None for there in self.has_far]
        out = as_bhtd(next(rest), self.layout)
        return BackwardCall(call, lse, q_past, q_future, k_far, out, grad_out, grad_lse, wanted, self.backend)


class GrowingCall(PlannedCall):
    """A kind of call over caches of all lengths between two powers of two."""

    def run(self, unchecked: Unchecked) -> Any:
        """Return what `attention` does; None where a tensor is misaligned, or the cache too large."""
        found = self.inputs.gather(unchecked)
        if found is None:
            return None
        inputs, addresses = found
        k, v = unchecked.k, unchecked.v
        sizes = self.measure(self.work, k, v, unchecked.arguments.mask, k.shape[self.token], self.head)
        numbers = [*self.pick_sizes(sizes)]
        if max(numbers) > MOST:
            return None
        return self.returned(self.plan.run(inputs + numbers, addresses + numbers, self.results))
