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
from ropewalk.ops.attention.plans.leaves import BOUNDS, LENGTHS, POSITIONS, SEED, STARTS, pick_tensors, shares_table
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.attention.tables import row_source
from ropewalk.schemes import T5Bias


class Rows:
    """The launch that makes cos and sin of all tokens of one side, or of both, in each call."""

    def __init__(self, call: AttentionCall, side: int, slots: Sequence[int]) -> None:
        from ropewalk.ops.attention.triton.plan import Builder
        from ropewalk.ops.attention.triton.table_rows import RowInputs, make_rows

        source = row_source(call, side)
        if source is None:
            raise UnplannableError("rows of tables that no kernel makes")
        queries, keys = call.q.shape[2], kv_capacity(call)
        positions = (call.positions_q, call.positions_k)[side]
        bounds = key_starts = query_starts = of_keys = key_lengths = None
        if positions is None and call.cu_seqlens_q is not None:
            bounds = (call.cu_seqlens_q, call.cu_seqlens_k)[side]
            if side == 0 and not (call.cu_seqlens_q is call.cu_seqlens_k and queries == keys):
                of_keys = call.cu_seqlens_k
                key_lengths = call.key_lengths if of_keys is None else None
        elif positions is None:
            key_starts, query_starts = call.key_starts, call.query_starts if side == 0 else None
        self.slots, self.reads = slots, source.table is None and source.frequencies is None
        frequencies = call.scheme.inv_freq if self.reads else source.frequencies  # type: ignore[union-attr]
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
        given = (POSITIONS[side], BOUNDS[side], BOUNDS[1], *STARTS, LENGTHS)
        self.of_given = [index for index, x in zip(given, of_call, strict=True) if x is not None]

    def make(self, given: Sequence[Any], position: Any) -> list[Tensor] | None:
        """Return cos and sin; None where a tensor is misaligned."""
        inputs = [*self.fixed, *[given[index] for index in self.of_given]]
        if self.reads:
            inputs.insert(self.reads_at, position.inv_freq)
        addresses = addresses_of(inputs)
        return None if addresses is None else self.plan.run(inputs, addresses, self.plan.results)[:2]


# Of the tensors after the seed: a scheme's parameters, then the tables of q and of k.
_PARAMS, _TABLES = 0, range(1, 5)


class MadeCall(PlannedCall):
    """A kind of call whose tables, parameters or sinks are made in each call, of values that no key holds."""

    def __init__(
        self, call: AttentionCall, plan: ForwardPlan, layout: str, *, has_rows: bool, is_learned: bool
    ) -> None:
        super().__init__(call, plan, layout)
        of_scheme = pick_tensors(flatten(call))[SEED + 1 :]
        present = [index for index, x in enumerate(of_scheme) if x is not None]
        self.of_scheme: list[Any] = self.constants
        self.rows: list[Rows] = []
        if has_rows:
            sides = ((0, _TABLES),) if shares_table(call) else ((0, _TABLES[:2]), (1, _TABLES[2:]))
            for side, leaves in sides:
                slots = [present.index(leaf) for leaf in leaves if leaf in present]
                if slots:
                    self.rows.append(Rows(call, side, slots))
        self.make_params: Callable[[Any], Tensor] | None = None
        if is_learned:
            assert call.score_mod_params is not None
            self.make_params, self.params_like = _maker_of_params(call), _metadata(call.score_mod_params)
        made = {slot for rows in self.rows for slot in rows.slots} | ({_PARAMS} if is_learned else set())
        self.of_scheme = [None if slot in made else x for slot, x in enumerate(self.constants)]
        self.constants = existing([*self.of_scheme, *(x for rows in self.rows for x in rows.fixed)])  # kept alive
        self.pick_given = itemgetter(*self.given)
        self.casts_sinks = call.sinks is not None  # a cast of float32 is none

    def make_inputs(self, given: Sequence[Any], position: Any) -> tuple[list[Any], list[int], Any, Any] | None:
        """Return the plan's inputs and their addresses, the parameters and the sinks.

        None where a tensor is misaligned.
        """
        params, sinks, of_scheme = None, given[-1], self.of_scheme.copy()
        inputs = [*self.pick_given(given)]
        if self.casts_sinks:
            sinks = inputs[-1] = sinks.float()
        for rows in self.rows:
            made = rows.make(given, position)
            if made is None:
                return None
            for index, slot in enumerate(rows.slots):
                of_scheme[slot] = made[index % 2]
        if self.make_params is not None:
            params = of_scheme[_PARAMS] = self.make_params(position)
            if _metadata(params) != self.params_like:
                return None
        if self.drops:
            inputs.append(make_seed(inputs[0]))
        inputs += of_scheme
        addresses = addresses_of(inputs)
        return None if addresses is None else (inputs, addresses, params, sinks)


def _metadata(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _maker_of_params(call: AttentionCall) -> Callable[[Any], Tensor]:
    """Return the parameters of a call's scheme as a differentiable function of the scheme."""
    heads, device, scheme, params = call.q.shape[1], call.q.device, call.scheme, call.score_mod_params
    if type(scheme) is T5Bias and params is not None:  # all but the biases are the same in each call
        stop = call.n_learned_params
        before, after = (x.detach().clone() for x in (params[:, :2], params[:, stop:]))
        return lambda position: torch.cat((before, position.table.to(device, torch.float32).T, after), dim=1)
    return lambda position: position.score_mod_params(heads, device)
