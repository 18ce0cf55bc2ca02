"""The tensors and the numbers among a call's leaves, by their names, as plans take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention.call import IS_TENSOR, LEAVES, AttentionCall, flatten, unflatten


class Given(NamedTuple):
    """The caller's tensors before they are validated, and the tables of their lists of blocks.

    `attention` passes them as a plain tuple, which costs the host less. `of_given`, or an index that is made of a
    field's name, reads it. The names are those of a call's leaves.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    key_lengths: Tensor | None
    key_starts: Tensor | None
    query_starts: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    positions_q: Tensor | None
    positions_k: Tensor | None
    blocks_rows: Tensor | None
    blocks_columns: Tensor | None
    blocks_slots: Tensor | None
    blocks_bits: Tensor | None
    blocks_spans: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    gate: Tensor | None
    sinks: Tensor | None


class Flags(NamedTuple):
    """The caller's arguments that are neither tensors nor schemes; a plain tuple too."""

    causal: Any
    window: Any
    scale: Any
    softcap: Any
    dropout_p: Any
    keys_rotated: Any
    return_lse: Any
    layout: Any
    deterministic: Any
    impl: Any


N_GIVEN = len(Given._fields)
_OF_SCHEME = ("score_mod_params", "tables_", "far_")  # beginnings of the names of tensors that a scheme makes
_tensors = [name for name, is_tensor in zip(LEAVES, IS_TENSOR, strict=True) if is_tensor]
OF_SCHEME = tuple([name for name in _tensors if name.startswith(_OF_SCHEME)])
TENSORS = (*Given._fields, "seed", *OF_SCHEME)
if sorted(TENSORS) != sorted(_tensors):
    raise TypeError(f"a call has the tensors {sorted(_tensors)}, but plans know {sorted(TENSORS)}: see `Given`")
NUMBERS = tuple([name for name in LEAVES if name not in TENSORS])

# One call each, where loops over all leaves would cost the host microseconds.
pick_tensors = itemgetter(*map(LEAVES.index, TENSORS))
pick_numbers = itemgetter(*map(LEAVES.index, NUMBERS))
_put_back = itemgetter(*map((*TENSORS, *NUMBERS).index, LEAVES))


def call_of(tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> AttentionCall:
    """Undo `pick_tensors` and `pick_numbers` of a call's leaves."""
    return unflatten(_put_back((*tensors, *numbers)))


def of_given(*names: str) -> Callable[[Sequence[Any]], Any]:
    """Return the function that picks the caller's tensors of these names."""
    return itemgetter(*map(Given._fields.index, names))


def lies_as_given(call: AttentionCall, given: Sequence[Tensor | None], *, casts_sinks: bool = False) -> bool:
    """Say whether a call has each of the caller's tensors where it lies, whatever its shape; a gate may act later."""
    for name, x, mine in zip(Given._fields, given, pick_tensors(flatten(call)), strict=False):
        acts_after = name == "gate" and mine is None
        if acts_after or (x is None and mine is None):
            continue
        is_cast = name == "sinks" and casts_sinks
        if x is None or mine is None or not (is_cast or x.data_ptr() == mine.data_ptr()):
            return False
    return True


def shares_table(call: AttentionCall) -> bool:
    """Say whether q and k have one table: launchers then rotate both at once."""
    q, k = call.tables.q, call.tables.k
    return q is not None and k is not None and q.cos is k.cos


def describe(tensors: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], ...]:
    """Return all that a key holds of tensors: which are given, which of them are one object, and their metadata."""
    firsts: dict[int, int] = {}
    described: list[tuple[Any, ...]] = []
    for index, x in enumerate(tensors):  # a comprehension is a call of Python's
        if x is not None:
            described.append(
                (
                    index,
                    firsts.setdefault(id(x), index),
                    type(x),
                    x.shape,
                    x.stride(),
                    x.dtype,
                    x.get_device(),
                    x.is_neg(),
                    x.requires_grad,
                )
            )
    return tuple(described)


_is_deterministic = torch._C._get_deterministic_algorithms
_allows_tf32 = torch._C._get_cublas_allow_tf32
_allows_cudnn = torch._C._get_cudnn_sdp_enabled


def switches() -> tuple[bool, ...]:
    """Return PyTorch's switches that decide what is launched."""
    return _is_deterministic(), _allows_tf32(), _allows_cudnn()
