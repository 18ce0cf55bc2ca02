"""The tensors and the numbers among a call's leaves, as plans take them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.backend import Gradients
from ropewalk.ops.attention.call import IS_TENSOR, LEAVES, AttentionCall, unflatten

# One call each, where loops over all leaves would cost the host microseconds.
_TENSORS = [index for index in range(len(LEAVES)) if IS_TENSOR[index]]
_NUMBERS = [index for index in range(len(LEAVES)) if not IS_TENSOR[index]]
pick_tensors, pick_numbers = itemgetter(*_TENSORS), itemgetter(*_NUMBERS)
_put_back = itemgetter(*sorted(range(len(LEAVES)), key=[*_TENSORS, *_NUMBERS].__getitem__))


def call_of(tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> AttentionCall:
    """Undo `pick_tensors` and `pick_numbers` of a call's leaves."""
    return unflatten(_put_back((*tensors, *numbers)))


# The tensors of a call's leaves before the seed are the caller's, the last one of them its sinks; those after it are
# the scheme's.
SEED, GATE = (_TENSORS.index(LEAVES.index(name)) for name in ("seed", "gate"))
GATE_GRADIENT = Gradients._fields.index("gate")


# Indices among the caller's tensors.
LENGTHS, STARTS, BOUNDS, POSITIONS = 4, (5, 6), (7, 8), (10, 11)
BLOCKS = slice(9, 14)  # after q, k and v


def shares_table(call: AttentionCall) -> bool:
    """Say whether q and k have one table: launchers then rotate both at once."""
    q, k = call.tables.q, call.tables.k
    return q is not None and k is not None and q.cos is k.cos


def but_gate(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return a call's tensors without its gate, which may act after the call."""
    return (*tensors[:GATE], *tensors[GATE + 1 :])
