"""Kinds of calls of `attention` that kernels run: their plans, and what these read beside the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.backend import LN_2, Saved
from ropewalk.ops.attention.call import AttentionCall, as_bhtd, flatten
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.plans.cache import addresses_of, existing
from ropewalk.ops.attention.plans.directions import LSE, OUT, Backwards, ForwardPlan, lay_out
from ropewalk.ops.attention.plans.leaves import N_GIVEN, call_of, of_given, pick_numbers, pick_tensors

_caches = of_given("k", "v", "mask")


class PlannedCall:
    """A kind of call of `attention`: its plan, and the tensors that the plan reads beside the caller's."""

    def __init__(self, call: AttentionCall, plan: ForwardPlan, layout: str) -> None:
        tensors = pick_tensors(flatten(call))
        self.plan, self.layout, self.return_lse = plan, layout, call.return_lse
        self.given = [index for index, x in enumerate(tensors[:N_GIVEN]) if x is not None]
        _, *of_scheme = tensors[N_GIVEN:]  # the first is the seed
        self.constants = existing(of_scheme)
        self.constant_addresses = [x.data_ptr() for x in self.constants]
        self.numbers, self.is_given = pick_numbers(flatten(call)), [x is not None for x in tensors]
        self.needs_backward, self.drops = call.needs_backward, call.dropout_p > 0
        self.gates = call.gate is not None
        out, *others = plan.plan.results
        self.results = [lay_out(out, layout), *others]
        self.n_inputs = len(self.given) + self.drops + len(self.constants)
        if self.needs_backward:
            # The caller's tensors have its shapes, and the backward's launchers read the call's.
            views = [(x.shape, x.stride()) for x in existing(tensors[:N_GIVEN])]
            q, k, *far = plan.features
            _, _, *later = range(self.n_inputs)  # q and k as their features are mapped
            saved = [slot for slot in (q, k, *later, plan.lse, *far, plan.out) if slot is not None]
            self.pick_saved = itemgetter(*saved)
            self.views = [views[slot] if slot < len(views) else None for slot in saved]
        self.backwards = Backwards(plan, plan.backend, layout)

    def inputs_of(self, given: Sequence[Tensor | None]) -> tuple[list[Any], list[int]] | None:
        """Return the plan's inputs for a call's tensors, and their addresses; None where one is misaligned."""
        inputs: list[Any] = [given[index] for index in self.given]
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        if self.drops:
            seed = make_seed(*inputs[:1])
            inputs.append(seed)
            addresses.append(seed.data_ptr())
        return inputs + self.constants, addresses + self.constant_addresses

    def returned(self, results: Sequence[Tensor]) -> Any:
        """Return what `attention` returns."""
        if not self.return_lse:
            return results[OUT]
        natural = results[LSE] * LN_2
        return results[OUT], natural.squeeze(0) if self.layout == "thd" else natural

    def describe(self, saved: Sequence[Tensor]) -> tuple[AttentionCall, Tensor, Saved]:
        """Return the call whose backward comes, its output and what was saved, as `backward` takes them."""
        of_call = (x if view is None else x.as_strided(*view) for x, view in zip(saved, self.views, strict=True))
        *tensors, out = of_call
        leaves, others = iter(tensors[: self.n_inputs]), iter(tensors[self.n_inputs :])
        call = call_of([next(leaves) if is_given else None for is_given in self.is_given], self.numbers)
        lse = next(others)
        _, _, *far = self.plan.features
        far_features = [None if slot is None else next(others) for slot in far]
        return call, as_bhtd(out, self.layout), Saved(call.q, call.k, lse, *far_features)


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
        k, v, mask = _caches(given)
        numbers = [*self.pick_sizes(self.measure(self.work, k, v, mask, k.shape[self.token], self.head))]
        return None if max(numbers) > _MOST else (inputs + numbers, addresses + numbers)


FIXED = object()  # in place of the plan of caches of all lengths, where a call is planned by its own length alone
_MOST = 2**31 - 1  # numbers of a launch are int32
