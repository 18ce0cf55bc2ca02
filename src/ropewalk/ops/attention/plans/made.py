"""Kinds of calls whose tables, parameters or sinks are made in each call, of values that no key holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import UnplannableError
from ropewalk.ops.attention.call import AttentionCall, flatten, kv_capacity
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.plans.cache import addresses_of, existing
from ropewalk.ops.attention.plans.directions import ForwardPlan
from ropewalk.ops.attention.plans.leaves import N_GIVEN, OF_SCHEME, Given, of_given, pick_tensors, shares_table
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.attention.tables import row_source
from ropewalk.ops.tracing import is_plain_eager
from ropewalk.schemes import T5Bias


class Rows:
    """The launch that makes cos and sin of all tokens of one side, or of both, in each call."""

    def __init__(self, call: AttentionCall, side: int, slots: Sequence[tuple[int, int]]) -> None:
        from ropewalk.ops.attention.triton.plan import Builder
        from ropewalk.ops.attention.triton.table_rows import RowInputs, make_rows

        source = row_source(call, side)
        if source is None:
            raise UnplannableError("rows of tables that no kernel makes")
        queries, keys = call.q.shape[2], kv_capacity(call)
        name_of_positions, name_of_bounds = ("positions_k", "cu_seqlens_k") if side else ("positions_q", "cu_seqlens_q")
        positions = getattr(call, name_of_positions)
        bounds = key_starts = query_starts = of_keys = key_lengths = None
        if positions is None and call.cu_seqlens_q is not None:
            bounds = getattr(call, name_of_bounds)
            if side == 0 and not (call.cu_seqlens_q is call.cu_seqlens_k and queries == keys):
                of_keys = call.cu_seqlens_k
                key_lengths = call.key_lengths if of_keys is None else None
        elif positions is None:
            key_starts, query_starts = call.key_starts, call.query_starts if side == 0 else None
        self.slots, self.reads = slots, source.table is None and source.frequencies is None
        frequencies = call.scheme.inv_freq if self.reads else source.frequencies  # type: ignore[union-attr]
        if not is_plain_eager(frequencies):
            raise UnplannableError("frequencies whose memory does not hold their values")
        factor = None
        if source.factor != 1.0:
            factor = torch.tensor([source.factor], dtype=torch.float64, device=call.q.device)
        builder = Builder(call.q.device)
        table = source.table or (None, None)
        of_call = (positions, bounds, of_keys, key_starts, query_starts, key_lengths)
        inputs = RowInputs(*map(builder.input, (*table, frequencies, factor, *of_call)))
        first = 0 if side else keys - queries
        made = builder.follow(make_rows, inputs, (queries, keys)[side], first, source.lowest, keys)
        self.plan = builder.finish(made)
        # In the order of the plan's inputs; each call gives the frequencies that are read, and its own tensors.
        self.fixed = existing((*table, None if self.reads else frequencies, factor))
        self.reads_at = len(existing(table))
        names = (name_of_positions, name_of_bounds, "cu_seqlens_k", "key_starts", "query_starts", "key_lengths")
        self.of_given = [Given._fields.index(name) for name, x in zip(names, of_call, strict=True) if x is not None]

    def make(self, given: Sequence[Any], position: Any) -> list[Tensor] | None:
        """Return cos and sin; None where a tensor is misaligned."""
        inputs = [*self.fixed, *[given[index] for index in self.of_given]]
        if self.reads:
            inputs.insert(self.reads_at, position.inv_freq)
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        cos, sin, *_ = self.plan.run(inputs, addresses, self.plan.results)
        return [cos, sin]


_TABLES_Q, _TABLES_K = (("tables_q_cos", "tables_q_sin"), ("tables_k_cos", "tables_k_sin"))
_sinks = of_given("sinks")


class MadeCall(PlannedCall):
    """A kind of call whose tables, parameters or sinks are made in each call, of values that no key holds."""

    def __init__(
        self, call: AttentionCall, plan: ForwardPlan, layout: str, *, has_rows: bool, is_learned: bool
    ) -> None:
        super().__init__(call, plan, layout)
        _, *of_scheme = pick_tensors(flatten(call))[N_GIVEN:]  # the first is the seed
        present = [name for name, x in zip(OF_SCHEME, of_scheme, strict=True) if x is not None]
        self.rows: list[Rows] = []
        if has_rows:
            sides = ((0, (_TABLES_Q, _TABLES_K)),) if shares_table(call) else ((0, (_TABLES_Q,)), (1, (_TABLES_K,)))
            for side, tables in sides:
                slots = [(present.index(cos), present.index(sin)) for cos, sin in tables if cos in present]
                if slots:
                    self.rows.append(Rows(call, side, slots))
        self.make_params: Callable[[Any], Tensor] | None = None
        kept: list[Tensor] = []
        made = {slot for rows in self.rows for slots in rows.slots for slot in slots}
        if is_learned:
            assert call.score_mod_params is not None
            self.make_params, kept = _maker_of_params(call)
            self.params_like, self.params_slot = _metadata(call.score_mod_params), present.index("score_mod_params")
            made.add(self.params_slot)
        self.of_scheme: list[Any] = [None if slot in made else x for slot, x in enumerate(self.constants)]
        self.constants = existing([*self.of_scheme, *(x for rows in self.rows for x in rows.fixed), *kept])
        self.pick_given = itemgetter(*self.given)
        self.casts_sinks = call.sinks is not None  # a cast of float32 is none
        self.sinks_slot = len(self.given) - 1  # the caller's last tensor

    def make_inputs(self, given: Sequence[Any], position: Any) -> tuple[list[Any], list[int], Any, Any] | None:
        """Return the plan's inputs and their addresses, the parameters and the sinks.

        None where a tensor is misaligned.
        """
        params, sinks, of_scheme = None, _sinks(given), self.of_scheme.copy()
        inputs = [*self.pick_given(given)]
        if self.casts_sinks:
            sinks = inputs[self.sinks_slot] = sinks.float()
        for rows in self.rows:
            made = rows.make(given, position)
            if made is None:
                return None
            cos, sin = made
            for slot_of_cos, slot_of_sin in rows.slots:
                of_scheme[slot_of_cos], of_scheme[slot_of_sin] = cos, sin
        if self.make_params is not None:
            params = of_scheme[self.params_slot] = self.make_params(position)
            if _metadata(params) != self.params_like:
                return None
        n_given, inputs = len(inputs), inputs + of_scheme
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        if self.drops:  # a call that goes on without the plan draws its own
            seed = make_seed(*inputs[:1])
            inputs.insert(n_given, seed)
            addresses.insert(n_given, seed.data_ptr())
        return inputs, addresses, params, sinks


def _metadata(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _maker_of_params(call: AttentionCall) -> tuple[Callable[[Any], Tensor], list[Tensor]]:
    """Return the parameters of a call's scheme as a differentiable function of the scheme, and what that keeps."""
    heads, device, scheme, params = call.q.shape[1], call.q.device, call.scheme, call.score_mod_params
    if type(scheme) is T5Bias and params is not None:  # all but the biases are the same in each call
        stop = call.n_learned_params
        before, after = (x.detach().clone() for x in (params[:, :2], params[:, stop:]))

        def make(position: Any) -> Tensor:
            return torch.cat((before, position.table.to(device, torch.float32).T, after), dim=1)

        return make, [before, after]
    return lambda position: position.score_mod_params(heads, device), []
