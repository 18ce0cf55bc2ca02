"""Kinds of calls whose q and k are normed and rotated in one launch before they attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.call import AttentionCall, RopeTable, as_bhtd, from_bhtd
from ropewalk.ops.attention.plans.cache import NORMS, may_plan, plan_or_none
from ropewalk.ops.attention.plans.leaves import Flags, describe, lies_as_given, shares_table, switches
from ropewalk.ops.attention.plans.made import Rows
from ropewalk.ops.attention.tables import bind_norm, identity_of, signature_of, with_rows
from ropewalk.ops.tracing import is_intercepted, is_plain_eager
from ropewalk.schemes import PositionScheme, Rope

_WINDOW = Flags._fields.index("window")


class NormedCall:
    """A kind of call whose q and k are normed and rotated in one launch, and then attend without positions."""

    def __init__(self, call: AttentionCall, impl: str | None, layout: str) -> None:
        self.tables = with_rows(call).tables
        # Kernels give the same bits for views of another layout; sums of PyTorch's do not.
        self.is_viewed = layout == "thd" or impl is not None or not call.q.is_cuda
        self.layout, self.impl = layout, impl
        placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
        self.rows: list[Rows] = []
        assert call.scheme is not None
        if any(x is not None for x in placed) or identity_of(call.scheme) is None:
            self.rows = [Rows(call, side, ()) for side in ((0,) if shares_table(call) else (0, 1))]
            self.tables = self.tables._replace(q=None, k=None)  # no plan keeps what the call made
        self.norm = bind_norm(self.tables, "bhtd" if self.is_viewed else layout, impl)
        tables = (x for table in (self.tables.q, self.tables.k) for x in table or ())
        self.constants = [*tables, *(x for rows in self.rows for x in rows.fixed)]

    def run(self, norm: Any, given: Sequence[Any], position: Any) -> tuple[Tensor, ...] | None:
        """Return q and k, normed and rotated; None where a tensor is misaligned."""
        q, k, *_ = given
        layout, norm_qk = self.layout, self.norm
        if self.rows:
            made = [rows.make(given, position) for rows in self.rows]
            if None in made:
                return None
            of_q, of_k = (RopeTable(*made[index]) for index in (0, -1))  # type: ignore[misc]
            tables = self.tables._replace(q=of_q, k=of_q if len(made) == 1 else of_k)
            norm_qk = bind_norm(tables, "bhtd" if self.is_viewed else layout, self.impl)
        if not self.is_viewed:
            return norm_qk(q, k, norm)
        q, k = norm_qk(as_bhtd(q, layout), as_bhtd(k, layout), norm)
        return from_bhtd(q, layout), from_bhtd(k, layout)


def find_norm(
    given: Sequence[Any], position: PositionScheme, norm: Any, flags: tuple[Any, ...]
) -> tuple[Any, NormedCall | None]:
    """Return the key of a call with a norm beside a rotation, None for one that no plan is for, and its plan."""
    if is_intercepted():
        return None, None
    q, *_ = given
    window = flags[_WINDOW]
    try:
        if not may_plan(q):
            return None, None
        identity = identity_of(position)
        of_norm = (norm.eps, norm.offset, norm.after, norm.across_heads)
        key = (
            describe((*given, norm.q_weight, norm.k_weight)),
            ("read", signature_of(position)) if identity is None else identity,
            of_norm,
            *map(type, of_norm),
            flags,
            *map(type, flags),
            *(map(type, window) if type(window) is tuple else ()),
            switches(),
        )
        return key, NORMS.found.get(key)
    except (RuntimeError, TypeError, AttributeError):  # as in `find_call`
        return None, None


def note_norm(
    key: Any, call: AttentionCall, norm: Any, given: Sequence[Tensor | None], impl: str | None, layout: str
) -> None:
    """Plan the norms of a key, from its second call on; `call` is as it was before."""
    NORMS.find(key, lambda: plan_or_none(_plan_norm, call, norm, given, impl, layout))


def _plan_norm(
    call: AttentionCall, norm: Any, given: Sequence[Tensor | None], impl: str | None, layout: str
) -> NormedCall | None:
    is_kept = is_plain_eager(*given, norm.q_weight, norm.k_weight) and type(call.scheme) is Rope
    is_kept = is_kept and lies_as_given(call, given) and call.q.device == call.k.device
    return NormedCall(call, impl, layout) if is_kept else None
