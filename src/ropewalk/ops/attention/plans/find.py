"""Kinds of calls of `attention`: found before arguments are validated, built at a kind's second call."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ropewalk.ops.attention.backend import Backend, KernelBackend
from ropewalk.ops.attention.backends import KERNELS, LIBRARIES, REFERENCE, choose, takes_gate
from ropewalk.ops.attention.call import RECORD, AttentionCall, as_bhtd
from ropewalk.ops.attention.plans.inputs import (
    UNCHECKED,
    Maker,
    Rows,
    find_paths,
    maker_of_params,
    sides_of,
    tensors_of_caller,
)
from ropewalk.ops.attention.plans.library import LibraryCall, is_plain
from ropewalk.ops.attention.plans.planned import GrowingCall, PlannedCall
from ropewalk.ops.attention.tables import identify_scheme, identity_of, with_rows
from ropewalk.ops.attention.validate import Unchecked, resolve
from ropewalk.ops.launch.kinds import (
    KINDS,
    MAX_RECENT,
    Operation,
    addresses_of,
    existing,
    key_or_none,
    may_plan,
    plan_or_none,
)
from ropewalk.ops.launch.record import Record, switches
from ropewalk.ops.tracing import has_guards, has_saved_tensor_hooks, is_intercepted, is_plain_eager
from ropewalk.schemes import Alibi, ExpoSB, PositionScheme, T5Bias

# As the kernels for few queries: their most rows that share a key, and so many keys, but for one query.
_MOST_ROWS, _FEWEST_KEYS = 64, 257
_LEARNED = (Alibi, T5Bias, ExpoSB)  # what kernels these schemes name depends on no value of their tensors
_FIXED = object()  # in place of the plan of caches of all lengths, where a call is planned by its own length alone
# All of a call over a cache but the tensors that grow.
_REST = Record(Unchecked, ("k", "v", "mask"), {PositionScheme: identify_scheme})


class _Attention(Operation[Unchecked]):
    reads_switches = True

    def __init__(self) -> None:
        super().__init__(UNCHECKED, resolve)  # type: ignore[arg-type]
        self.looks = self.repeat, self._repeat_growing  # the one first that found the last call's kind

    def forget(self) -> None:
        """Forget the last kinds."""
        super().forget()
        self.growing: tuple[Any, ...] = ()  # over caches that grow

    def find(self, record: Unchecked) -> Any:
        """Return the kind of a call; None for the first one, and for a call that no plan is for."""
        try:
            if not may_plan(record.q):
                return None
            first, second = self.looks
            kind = first(record)
            if kind is None:
                kind = second(record)
                if kind is not None:
                    self.looks = second, first
            if kind is not None or is_intercepted():
                return kind
            extents = _growing_extents(record)
        except (AttributeError, RuntimeError, TypeError):  # no strides of sparse tensors, no hash of lists, no tensor
            return None
        kind = _FIXED if extents is None else self._find_growing(record, extents)
        return self.look_up(record) if kind is _FIXED else kind

    def _repeat_growing(self, record: Unchecked) -> Any:
        """Return the kind of a call over a cache, if it is one of the last such calls'."""
        if not self.growing or forward_ad._current_level >= 0:  # a matcher does not see tangents
            return None
        extents = _growing_extents(record)
        for kind in self.growing if extents is not None else ():
            if kind.extents == extents and kind.matches(record):
                return kind
        return None

    def _find_growing(self, record: Unchecked, extents: tuple[Any, ...]) -> Any:
        """Return the kind of a call over a cache; `_FIXED` where it is planned by its own length alone."""
        rest = key_or_none(_REST, record)
        kind = None if rest is None else KINDS.find((extents, rest), lambda: _plan_growing(record))
        if kind is not None and kind is not _FIXED and has_guards():
            kind.extents, kind.matches = extents, _REST.make_match(record)
            self.growing = (kind, *[x for x in self.growing if x is not kind])[:MAX_RECENT]
        return kind

    def make(self, record: Unchecked) -> PlannedCall | LibraryCall | None:
        """Return the kind of a call; None where it reads what no key knows, or what no plan makes in each call."""
        call, backend = _choose(record)
        if call.needs_backward and has_saved_tensor_hooks():
            return None  # hooks, as those of checkpoints, count what a forward saves: with a plan that differs
        if backend.name in KERNELS:
            return plan_or_none(_plan_kernels, call, KERNELS[backend.name], record)  # type: ignore[no-any-return]
        has_rows = (call.tables.q is not None and call.tables.q_start is None) or call.far is not None
        # Rows of tables may depend on values on the device.
        if _paths_of(call, record) is None or (has_rows and _is_placed(call)):
            return None
        if backend is REFERENCE or not _is_of_qkv(record):
            return None
        layout, impl = record.arguments.layout, record.impl
        return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=is_plain(call, layout, impl))


def _choose(record: Unchecked) -> tuple[AttentionCall, Backend]:
    """Return the call of arguments, with what a plan's needs, and its backend."""
    call = resolve(record)
    backend, gate = choose(call, record.impl), record.arguments.gate
    if gate is not None and takes_gate(backend, call, gate):
        call = call._replace(gate=as_bhtd(gate, record.arguments.layout))
    if call.dropout_p > 0:
        call = call._replace(seed=torch.empty(1, dtype=torch.int64, device=call.q.device))
    return call, backend


def _paths_of(call: AttentionCall, record: Unchecked, *, reads: bool = False) -> dict[str, str] | None:
    """Return the paths of a call's tensors; None if more than addresses and values differs between calls of a key.

    reads: each call reads the scheme's tensors, and casts sinks.
    """
    tensors = RECORD.tensors_of(call)
    if not is_plain_eager(*tensors_of_caller(record), *tensors) or addresses_of(existing(tensors)) is None:
        return None
    is_known = call.scheme is None or identity_of(call.scheme) is not None
    if not reads and not (is_known and (call.sinks is None or call.sinks.dtype == torch.float32)):
        return None
    return find_paths(call, record, cast="sinks" if reads else None)


def _is_placed(call: AttentionCall) -> bool:
    """Say whether positions may depend on values on the device."""
    placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
    return any(x is not None for x in placed)


def _is_of_qkv(record: Unchecked) -> bool:
    """Say whether the caller passed q, k and v alone, and a gate, which no library applies."""
    passed = zip(UNCHECKED.tensors, tensors_of_caller(record), strict=True)
    return all(x is None or name in _QKV_AND_GATE for name, x in passed)


_NOTHING = {None}
_QKV_AND_GATE = ("q", "k", "v", "arguments_gate")


def _plan_kernels(call: AttentionCall, backend: KernelBackend, record: Unchecked) -> PlannedCall | None:
    """Return the plan of a call that kernels run."""
    scheme, tables, layout = call.scheme, call.tables, record.arguments.layout
    assert scheme is not None
    is_read, is_placed = identity_of(scheme) is None, _is_placed(call)
    is_learned = is_read and call.score_mod_params is not None
    has_rows = tables.q is not None and tables.q_start is None
    has_rows = has_rows and (is_placed or (is_read and type(scheme) is not ExpoSB))
    makers: dict[str, Maker] = {}
    if is_learned:
        makers["score_mod_params"] = maker_of_params(call)
    if call.sinks is not None and call.sinks.dtype != torch.float32:
        makers["sinks"] = lambda unchecked: unchecked.arguments.sinks.float()  # type: ignore[union-attr]
        call = call._replace(sinks=call.sinks.float())
    paths = _paths_of(call, record, reads=has_rows or bool(makers))
    if paths is None or (call.far is not None and (is_placed or is_read)):
        return None
    if is_read and not (has_rows or (is_learned and type(scheme) in _LEARNED)):
        return None
    if tables.k is not None and call.cu_seqlens_q is not None and call.block_table is not None:
        return None  # keys of packed sequences that the call rotates: no kernel reads them in place
    if has_rows or not (is_placed and tables.q_start is not None):
        rows = [Rows(call, *sides) for sides in sides_of(call)] if has_rows else []
        return PlannedCall(call, backend, layout, paths, rows, makers)
    plan: PlannedCall | None = plan_or_none(PlannedCall, call, backend, layout, paths, [], makers)
    if plan is None:  # short caches: their kernel reads a row a query
        call = with_rows(call)
        plan = PlannedCall(call, backend, layout, paths, [Rows(call, *sides) for sides in sides_of(call)], makers)
    return plan


def _plan_growing(record: Unchecked) -> Any:
    """Return the plan of a call over caches of all lengths; `_FIXED` where something else depends on the length."""
    call, backend = _choose(record)
    tables, scheme, paths = call.tables, call.scheme, _paths_of(call, record)
    rotates_rows = tables.k is not None or (tables.q is not None and tables.q_start is None)
    if paths is None or rotates_rows or scheme is None or scheme.far_window() is not None or call.seed is not None:
        return _FIXED
    layout = record.arguments.layout
    if backend.name in KERNELS:
        longest = max(256, 1 << (call.k.shape[2] - 1).bit_length())
        kernels = KERNELS[backend.name]
        plan = plan_or_none(GrowingCall, call, kernels, layout, paths, [], {}, longest)
        return _FIXED if plan is None or plan.sizes is None else plan
    if backend is REFERENCE or tables.q is not None or not _is_of_qkv(record):
        return _FIXED
    return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=False)  # its length changes in each call


def _growing_extents(record: Unchecked) -> tuple[Any, ...] | None:
    """Return what a key holds of the tensors of a call over a cache that grow; None if the call is no such one.

    It has the powers of two, from 256 on, that the length lies between: they decide the size of tables and whether
    there are splits, and the rules of the choice of a backend are by them.
    """
    q, k, v, arguments, *_ = record
    layout, mask = arguments.layout, arguments.mask
    others = (arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.block_table, arguments.blocks)
    if {*others, arguments.positions_q, arguments.positions_k} != _NOTHING:
        return None
    if torch.is_grad_enabled() and _needs_grad(record):
        return None
    # Where the keys come unrotated, a call maps the features of all.
    if not arguments.keys_rotated and type(arguments.position).rotation is not PositionScheme.rotation:
        return None
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or (layout != "bthd" and layout != "bhtd"):
        return None
    head, token = (2, 1) if layout == "bthd" else (1, 2)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    queries, keys = q_shape[token], k_shape[token]
    if keys < (_FEWEST_KEYS if queries > 1 else 2) or keys < queries or v_shape[token] != keys:
        return None
    if queries * q_shape[head] > _MOST_ROWS * k_shape[head]:
        return None
    mask_key = None
    if mask is not None:
        if mask.ndim != 4 or mask.shape[3] != keys:
            return None
        strides = mask.stride()
        is_expanded = (strides[0] == 0, strides[1] == 0, strides[2] == 0)
        mask_key = (type(mask), mask.shape[:3], is_expanded, strides[3], mask.dtype, mask.device, mask.is_neg())
    k_strides, v_strides = k.stride(), v.stride()
    # Those that are not in the key are multiples of 16 bytes.
    if (k_strides[0] | k_strides[head] | v_strides[0] | v_strides[head]) * q.element_size() & 15:
        return None
    return (
        *("cache", max(8, (keys - 1).bit_length()), max(8, keys.bit_length())),
        *(type(k), k_shape[0], k_shape[head], k_shape[3], k_strides[token], k_strides[3], k.dtype, k.get_device()),
        *(type(v), v_shape[0], v_shape[head], v_shape[3], v_strides[token], v_strides[3], v.dtype, v.get_device()),
        *(k.is_neg(), v.is_neg(), q is k, q is v, k is v, mask_key, switches()),
    )


def _needs_grad(record: Unchecked) -> bool:
    """Say whether a call is differentiated, but for its scheme, where gradients are recorded."""
    gate, sinks = record.arguments.gate, record.arguments.sinks
    learns = (gate is not None and gate.requires_grad) or (sinks is not None and sinks.requires_grad)
    return learns or record.q.requires_grad or record.k.requires_grad or record.v.requires_grad


ATTENTION = _Attention()
