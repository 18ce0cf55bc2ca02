"""Making the plans of calls: for what nothing but the caller's tensors differs between the calls of a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import Backend, KernelBackend
from ropewalk.ops.attention.backends import KERNELS, LIBRARIES, REFERENCE
from ropewalk.ops.attention.call import AttentionCall, flatten
from ropewalk.ops.attention.plans.cache import CALLS, FORWARDS, addresses_of, existing, plan_or_none
from ropewalk.ops.attention.plans.directions import ForwardPlan, forward_key
from ropewalk.ops.attention.plans.leaves import Given, lies_as_given, pick_tensors
from ropewalk.ops.attention.plans.library import LibraryCall, is_plain
from ropewalk.ops.attention.plans.made import MadeCall
from ropewalk.ops.attention.plans.planned import FIXED, GrowingCall, PlannedCall
from ropewalk.ops.attention.tables import identity_of, with_rows
from ropewalk.ops.tracing import is_plain_eager
from ropewalk.schemes import Alibi, ExpoSB, T5Bias


def note_call(
    key: Any, call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str, impl: str | None
) -> None:
    """Plan calls of a key, from its second call on, where nothing but the caller's tensors differs between them."""
    if key[0] == "cache":
        CALLS.find(key, lambda: _plan_growing(call, backend, given, layout))
    else:
        CALLS.find(key, lambda: _plan_call(call, backend, given, layout, impl))


def _plan_growing(call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str) -> Any:
    """Return the plan of a call over caches of all lengths; `FIXED` where something else depends on the length."""
    tables, scheme = call.tables, call.scheme
    rotates_rows = tables.k is not None or (tables.q is not None and tables.q_start is None)
    if not _may_keep(call, given) or rotates_rows or scheme is None or scheme.far_window() is not None:
        return FIXED
    if call.seed is not None:
        return FIXED
    if backend.name in KERNELS:
        longest = max(256, 1 << (call.k.shape[2] - 1).bit_length())
        plan = plan_or_none(ForwardPlan, call, KERNELS[backend.name], False, longest)
        return FIXED if plan is None or plan.sizes is None else GrowingCall(call, plan, layout)
    if backend is REFERENCE or tables.q is not None or not _is_of_qkv(given):
        return FIXED
    return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=False)  # its length changes in each call


def _is_of_qkv(given: Sequence[Tensor | None]) -> bool:
    """Say whether the caller passed q, k and v alone, and a gate, which no library applies."""
    passed = {name for name, x in zip(Given._fields, given, strict=True) if x is not None}
    return passed <= {"q", "k", "v", "gate"}


def _may_keep(call: AttentionCall, given: Sequence[Tensor | None], *, reads: bool = False) -> bool:
    """Say whether nothing but the tensors' addresses and values differs between calls of a key.

    reads: each call reads the scheme's tensors, and casts sinks.
    """
    of_call = pick_tensors(flatten(call))
    if not is_plain_eager(*given, *of_call) or addresses_of(existing(of_call)) is None:
        return False
    if not lies_as_given(call, given, casts_sinks=reads):
        return False
    is_known = call.scheme is None or identity_of(call.scheme) is not None
    return reads or (is_known and (call.sinks is None or call.sinks.dtype == torch.float32))


def _plan_call(
    call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str, impl: str | None
) -> PlannedCall | LibraryCall | None:
    """Return the plan of a call; None where it reads what no key knows, or what no plan makes in each call."""
    if backend.name in KERNELS:
        return plan_or_none(_plan_kernels, call, KERNELS[backend.name], given, layout)  # type: ignore[no-any-return]
    placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
    has_rows = (call.tables.q is not None and call.tables.q_start is None) or call.far is not None
    # Rows of tables may depend on values on the device.
    if not _may_keep(call, given) or (has_rows and any(x is not None for x in placed)):
        return None
    if backend is REFERENCE or not _is_of_qkv(given):
        return None
    return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=is_plain(call, layout, impl))


def _plan_kernels(
    call: AttentionCall, backend: KernelBackend, given: Sequence[Tensor | None], layout: str
) -> PlannedCall | None:
    """Return the plan of a call that kernels run."""
    scheme, tables = call.scheme, call.tables
    assert scheme is not None
    is_read = identity_of(scheme) is None
    placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
    is_placed = any(x is not None for x in placed)
    is_learned = is_read and call.score_mod_params is not None
    has_rows = tables.q is not None and tables.q_start is None
    has_rows = has_rows and (is_placed or (is_read and type(scheme) is not ExpoSB))
    casts_sinks = call.sinks is not None and call.sinks.dtype != torch.float32
    if casts_sinks:
        call = call._replace(sinks=call.sinks.float())  # type: ignore[union-attr]
    is_made = has_rows or is_learned or casts_sinks
    if not _may_keep(call, given, reads=is_made) or (call.far is not None and (is_placed or is_read)):
        return None
    if is_read and not (has_rows or (is_learned and type(scheme) in _LEARNED)):
        return None
    if tables.k is not None and call.cu_seqlens_q is not None and call.block_table is not None:
        return None  # keys of packed sequences that the call rotates: no kernel reads them in place
    plan = FORWARDS.find(*forward_key(call, backend, call.needs_backward))
    if plan is None and is_placed and tables.q_start is not None:  # short caches: their kernel reads a row a query
        call, has_rows, is_made = with_rows(call), True, True
        plan = ForwardPlan(call, backend, call.needs_backward)
    if plan is None:
        return None
    if is_made:
        return MadeCall(call, plan, layout, has_rows=has_rows, is_learned=is_learned)
    return PlannedCall(call, plan, layout)


_LEARNED = (Alibi, T5Bias, ExpoSB)  # what kernels these schemes name depends on no value of their tensors
