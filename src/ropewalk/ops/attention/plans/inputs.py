"""The inputs of plans: the caller's tensors, those computed in each call, and those that a kind keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.call import RECORD, AttentionCall, RopeTable, flatten, kv_capacity, unflatten
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.tables import identify_scheme, row_source
from ropewalk.ops.attention.validate import Unchecked
from ropewalk.ops.launch.kinds import addresses_of
from ropewalk.ops.launch.record import Record, write
from ropewalk.ops.launch.steps import Steps, UnplannableError
from ropewalk.ops.tracing import is_plain_eager
from ropewalk.schemes import PositionScheme, T5Bias

UNCHECKED = Record(Unchecked, identify={PositionScheme: identify_scheme})
# The expressions that read the caller's tensors, by the names that a call's have.
_PATHS = {leaf.name.removeprefix("arguments_"): leaf.path for leaf in UNCHECKED.leaves if leaf.kind is Tensor}
_READERS = {name: write(path) for name, path in _PATHS.items()}
tensors_of_caller = UNCHECKED.tensors_of
Maker = Callable[[Unchecked], "Tensor | None"]


def find_paths(call: AttentionCall, unchecked: Unchecked, cast: str | None = None) -> dict[str, str] | None:
    """Return the expressions that read a call's tensors from what the caller gave, by name.

    None where one lies elsewhere, but for the one that is cast. A gate may act later.
    """
    paths: dict[str, str] = {}
    leaves = dict(zip(RECORD.names, flatten(call), strict=True))
    for name, read in _READERS.items():
        x, mine, path = read(unchecked), leaves[name], _PATHS[name]
        if x is None and name == "cu_seqlens_k":
            x, path = unchecked.arguments.cu_seqlens_q, _PATHS["cu_seqlens_q"]
        if mine is None and (x is None or name in ("gate", "cu_seqlens_k")):
            continue
        if x is None or mine is None or not (name == cast or x.data_ptr() == mine.data_ptr()):
            return None
        paths[name] = path
    return paths


class Rows:
    """The rows of cos and sin of all tokens of one side, or of both, which a launch makes in each call."""

    def __init__(self, call: AttentionCall, *sides: int) -> None:
        side, *_ = sides
        source = row_source(call, side)
        if source is None:
            raise UnplannableError("rows of tables that no kernel makes")
        queries, keys = call.q.shape[2], kv_capacity(call)
        positions, bounds = ("positions_k", "cu_seqlens_k") if side else ("positions_q", "cu_seqlens_q")
        read: dict[str, str] = {}  # fields of the call, by what the kernel calls them
        if getattr(call, positions) is not None:
            read["positions"] = positions
        elif call.cu_seqlens_q is not None:
            read["bounds"] = bounds
            if side == 0 and not (call.cu_seqlens_q is call.cu_seqlens_k and queries == keys):
                read["bounds_of_keys"] = "cu_seqlens_k"
                if call.cu_seqlens_k is None:
                    read["key_lengths"] = "key_lengths"
        else:
            read["key_starts"] = "key_starts"
            if side == 0:
                read["query_starts"] = "query_starts"
        self.read = read
        self.names = [f"tables_{'qk'[side]}_{part}" for side in sides for part in RopeTable._fields]
        table = source.table or (None, None)
        frequencies, is_read = source.frequencies, source.table is None and source.frequencies is None
        self.frequencies = call.scheme.inv_freq if is_read else None  # type: ignore[union-attr]
        if not is_plain_eager(frequencies, self.frequencies):
            raise UnplannableError("frequencies whose memory does not hold their values")
        factor = None
        if source.factor != 1.0:
            factor = torch.tensor([source.factor], dtype=torch.float64, device=call.q.device)
        constants = {**dict(zip(RopeTable._fields, table, strict=True)), "frequencies": frequencies, "factor": factor}
        self.constants = {f"{side} {name}": x for name, x in constants.items() if x is not None}  # of the kind
        self.side, self.sides = side, sides
        self.numbers = ((queries, keys)[side], 0 if side else keys - queries, source.lowest, keys)

    def launch(self, call: AttentionCall, tensors: dict[str, Tensor], on: Steps) -> AttentionCall:
        """Return a call with its rows. tensors: those of the kind, and frequencies that are read, by their names."""
        from ropewalk.ops.attention.triton.table_rows import RowInputs, make_rows

        constants = {name: tensors.get(f"{self.side} {name}") for name in ("cos", "sin", "frequencies", "factor")}
        call_tensors = {name: getattr(call, field) for name, field in self.read.items()}
        table = RopeTable(*make_rows(RowInputs(**{**_NO_ROWS, **constants, **call_tensors}), *self.numbers, on))
        tables: dict[str, Any] = {"qk"[side]: table for side in self.sides}
        return call._replace(tables=call.tables._replace(**tables))


_NO_ROWS = dict.fromkeys(("positions", "bounds", "bounds_of_keys", "key_starts", "query_starts", "key_lengths"))


def sides_of(call: AttentionCall) -> list[tuple[int, ...]]:
    """Return the sides that have rows of their own: q and k, together where they have one table."""
    if shares_table(call):
        return [(0, 1)]
    return [(side,) for side, table in enumerate((call.tables.q, call.tables.k)) if table is not None]


class Inputs:
    """The inputs of a plan, in its order.

    paths: of the caller's tensors. rows: tables that a launch makes. makers: by name, what makes a tensor of each call;
    it returns None where that is of another kind.
    """

    def __init__(
        self, call: AttentionCall, paths: dict[str, str], rows: list[Rows], makers: dict[str, Maker], builder: Any
    ) -> None:
        leaves = dict(zip(RECORD.names, flatten(call), strict=True))
        tensors: dict[str, Tensor] = {name: x for name in RECORD.tensors if (x := leaves[name]) is not None}
        for side in rows:
            for name in side.names:
                del tensors[name]
            if side.frequencies is not None:
                makers = {**makers, f"{side.side} frequencies": _read_frequencies}
                tensors[f"{side.side} frequencies"] = side.frequencies
            tensors |= side.constants
        self.drops = "seed" in tensors
        order = [*(name for name in paths if name not in makers), *makers, *(["seed"] if self.drops else [])]
        constants = {name: x for name, x in tensors.items() if name not in order}
        self.views = [(x.shape, x.stride()) for x in map(tensors.__getitem__, order)][: len(paths)]
        meta_tensors = {name: builder.input(tensors[name]) for name in (*order, *constants)}
        leaves |= dict.fromkeys(RECORD.tensors) | {name: x for name, x in meta_tensors.items() if name in leaves}
        meta_call = unflatten([leaves[name] for name in RECORD.names])
        if shares_table(call):
            meta_call = meta_call._replace(tables=meta_call.tables._replace(k=meta_call.tables.q))
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is call.cu_seqlens_q:
            # Kernels of windows need not look for keys outside of all.
            meta_call = meta_call._replace(cu_seqlens_k=meta_call.cu_seqlens_q)
        self.meta_call = meta_call._replace(return_lse=call.return_lse, needs_backward=call.needs_backward)
        for side in rows:
            self.meta_call = side.launch(self.meta_call, meta_tensors, builder)
        self.names = [*order, *constants]
        self.pick: Callable[[Unchecked], tuple[Tensor, ...]] = write(
            f"({''.join(f'{path}, ' for name, path in paths.items() if name not in makers)})"
        )
        self.makers = list(makers.values())
        self.constants = list(constants.values())
        self.addresses = [x.data_ptr() for x in self.constants]
        self.all_constants = self.constants + [x for make in self.makers for x in getattr(make, "keeps", ())]

    def gather(self, unchecked: Unchecked) -> tuple[list[Any], list[int]] | None:
        """Return the inputs for a call, and their addresses; None where one is misaligned, or of another kind."""
        inputs: list[Any] = [*self.pick(unchecked)]
        for make in self.makers:
            x = make(unchecked)
            if x is None:
                return None
            inputs.append(x)
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        if self.drops:  # a call that goes on without the plan draws its own
            seed = make_seed(unchecked.q)
            inputs.append(seed)
            addresses.append(seed.data_ptr())
        return inputs + self.constants, addresses + self.addresses


def _read_frequencies(unchecked: Unchecked) -> Tensor:
    frequencies: Tensor = unchecked.arguments.position.inv_freq  # type: ignore[attr-defined]
    return frequencies


def maker_of_params(call: AttentionCall) -> Maker:
    """Return the parameters of a call's scheme as a differentiable function of the scheme, whatever its values."""
    heads, device, params = call.q.shape[1], call.q.device, call.score_mod_params
    assert params is not None
    like = (params.shape, params.stride(), params.dtype, params.device)
    keeps: list[Tensor] = []
    if type(call.scheme) is T5Bias:  # all but the biases are the same in each call
        keeps = [x.detach().clone() for x in (params[:, :2], params[:, call.n_learned_params :])]

    def make(unchecked: Unchecked) -> Tensor | None:
        position: Any = unchecked.arguments.position
        if type(position) is T5Bias:
            before, after = keeps
            found = torch.cat((before, position.table.to(device, torch.float32).T, after), dim=1)
        else:
            found = position.score_mod_params(heads, device)
        return found if (found.shape, found.stride(), found.dtype, found.device) == like else None

    make.keeps = keeps  # type: ignore[attr-defined]
    return make


def shares_table(call: AttentionCall) -> bool:
    """Say whether q and k have one table: launchers then rotate both at once."""
    q, k = call.tables.q, call.tables.k
    return q is not None and k is not None and q.cos is k.cos
