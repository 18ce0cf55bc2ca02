"""Resolving a call's scheme to tables and numbers, which are remembered for the calls that follow.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim, S
packed sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.ops.attention.call import (
    NO_TABLES,
    AttentionCall,
    FarQK,
    FarRange,
    FarTables,
    RopeTable,
    Tables,
    kv_capacity,
    token_positions,
)
from ropewalk.ops.launch.remembered import Identity, remember
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.api import apply_rope, norm_and_rotate, normalize
from ropewalk.ops.rope.autograd import rotate as rotate_eagerly
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.norm import NormCall, QKNorm, check_norm, split_norm
from ropewalk.schemes import ExpoSB, NoPosition, PositionScheme, Rope, Rotation
from ropewalk.schemes.rope import default_frequencies


def resolve_scheme(call: AttentionCall) -> AttentionCall:
    """Resolve a call's scheme to tables and numbers."""
    scheme = call.scheme
    assert scheme is not None
    score_mod, known_by, far_window = scheme.kernel_score_mod(), _identity(scheme), _far_window(call)
    tables = _Rotations(call, _identity_of_map(scheme))
    rotation_q, rotation_k = tables.near()
    positions_q, positions_k = call.positions_q, call.positions_k
    reads_positions = score_mod is not None or far_window is not None
    one_alone = (positions_q is None) is not (positions_k is None)
    if reads_positions and one_alone and (call.key_starts is not None or far_window is not None):
        positions_q, positions_k = token_positions(call)  # kernels count by index where both are None
    params = None
    if score_mod is not None:
        heads, device = call.q.shape[1], call.q.device
        params = remember(("params", heads), known_by, device, lambda: scheme.score_mod_params(heads, device))
    either = rotation_q or rotation_k
    rotated = {} if either is None else {"cos": either.cos, "sin": either.sin, "weights": either.weights}
    for name, x in (*rotated.items(), ("parameters", params)):
        if x is not None and x.dtype != torch.float32:
            raise TypeError(f"{type(scheme).__name__} gives {name} in {x.dtype}, but must give float32")
    if params is not None and params.shape[:-1] not in (call.q.shape[1:2], call.q.shape[:2]):
        raise ValueError(
            f"{type(scheme).__name__}'s parameters, such as slopes, have shape {tuple(params.shape)}, but must be "
            f"(H, n) or (B, H, n) with B = {call.q.shape[0]} and H = {call.q.shape[1]}"
        )
    return call._replace(
        q=call.q if rotation_q is None else _scale_unrotated(call.q, rotation_q),
        positions_q=positions_q,
        positions_k=positions_k,
        score_mod=score_mod,
        score_mod_params=params,
        n_learned_params=0 if params is None else scheme.n_learned_params(),
        tables=NO_TABLES
        if rotation_q is None
        else Tables(
            _table_of(rotation_q),
            _table_of(rotation_k),
            None if rotation_k is None else rotation_k.weights,
            rotation_q.interleaved,
            rotation_q.offset,
            tables.q_start,
            rotation_q.pair_block,
        ),
        far=None if far_window is None else FarRange(far_window, tables.far()),
    )


def _scale_unrotated(q: Tensor, rotation: Rotation) -> Tensor:
    """Multiply the features of q (B, H, T, D) that are not rotated by the rotation's scale. Differentiable."""
    start, stop = rotation.offset, rotation.offset + 2 * rotation.cos.shape[-1]
    if rotation.scale is None or (start, stop) == (0, q.shape[3]):
        return q
    scale = rotation.scale[:, None, :, None]
    before, after = ((x * scale).to(q.dtype) for x in (q[..., :start], q[..., stop:]))
    return torch.cat((before, q[..., start:stop], after), dim=-1)


def _table_of(rotation: Rotation | None) -> RopeTable | None:
    return None if rotation is None else RopeTable(rotation.cos, rotation.sin)


def with_rows(call: AttentionCall) -> AttentionCall:
    """Return the call with q's table cut to a row for each query."""
    tables, start = call.tables, call.tables.q_start
    if tables.q is None or start is None:
        return call
    queries, keys = call.q.shape[2], kv_capacity(call)
    if call.key_starts is None and call.query_starts is None:
        table = RopeTable(*(x[:, keys - queries - start : keys - start] for x in tables.q))
    else:
        indices, _ = _indices(queries, keys, call, call.q.device)
        assert indices is not None
        rows = _rows_of(indices, start, tables.q.cos.shape[1])
        table = RopeTable(*(F.embedding(rows, x[0]) for x in tables.q))
    return call._replace(tables=tables._replace(q=table, q_start=None))


def map_features(call: AttentionCall, on: Steps | None = None) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the call's tables, and weigh the features of k. Differentiable without `on`.

    With `on` k's features are not weighed: `triton/weigh.py:map_and_weigh` does it by a kernel.
    k comes back as it is where it was rotated before. It is not paged.
    """
    call = with_rows(call)
    q, k, tables = call.q, call.k, call.tables
    if tables.q is None:
        return q, k
    if tables.k is None:
        return rotate(q, tables.q, tables, on), k
    if tables.q.cos is tables.k.cos:
        q, k = _rope_of(on)(q, k, *tables.q, **pairing_of(tables))
    else:
        q, k = rotate(q, tables.q, tables, on), rotate(k, tables.k, tables, on)
    if tables.feature_weights is not None and on is None:
        k.mul_(tables.feature_weights)  # k is ours by now
    return q, k


def bind_map(call: AttentionCall) -> Callable[[Tensor, Tensor], Any]:
    """Return `map_features` as a function of q and k, for eager calls whose other arguments are those of one call."""
    call = with_rows(call)
    tables = call.tables
    if tables.q is None:
        return lambda q, k: (q, k)
    if tables.k is None or tables.q.cos is not tables.k.cos or tables.feature_weights is not None:
        empty = call.q.new_empty(0)  # the function keeps none of the call's features
        call = call._replace(q=empty, k=empty, v=empty)
        return lambda q, k: map_features(call._replace(q=q, k=k))
    rotation = RopeCall(*tables.q, None, None, 0, RopeFlags("bhtd", **pairing_of(tables)))
    return lambda q, k: rotate_eagerly((q, k), rotation)


def check_norm_fits(norm: QKNorm, keys_rotated: bool, block_table: Tensor | None) -> None:
    """Raise unless a call may have a norm."""
    if not isinstance(norm, QKNorm):
        raise TypeError(f"norm is {type(norm).__name__}, but must be a ropewalk.QKNorm")
    by_name = {"keys_rotated": keys_rotated, "block_table": block_table is not None}
    for name, is_set in by_name.items():
        if is_set:
            raise ValueError(f"norm was passed with {name}, but must be None: k was normed when it was cached")


def goes_with_rotation(norm: QKNorm, position: PositionScheme | None) -> bool:
    """Say whether `norm_call` makes a call's norm, because a rotation goes with it or must be looked for."""
    return norm.after or type(position) is Rope


def check_mapped_alone(call: AttentionCall) -> None:
    """Raise if a norm cannot come after the map of a call's features."""
    if type(call.scheme) is not Rope and not (call.tables.q is None and call.far is None):
        raise ValueError(
            f"norm.after is True, but must be False for {type(call.scheme).__name__}: of schemes that map features, "
            f"Rope alone takes a norm after it"
        )


def norm_call(call: AttentionCall, norm: QKNorm, impl: str | None) -> AttentionCall:
    """Return a call with q and k normed; those of `Rope` are rotated in the same launch, and are left no position."""
    check_mapped_alone(call)
    q, k = call.q, call.k
    if type(call.scheme) is Rope:
        q, k = norm_by_tables(q, k, norm, with_rows(call).tables, "bhtd", impl)
        call = call._replace(scheme=NoPosition(), tables=NO_TABLES, positions_q=None, positions_k=None)
    else:
        q, k = normalize((q, k), norm, "bhtd", impl)
    needs_backward = call.needs_backward or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    return call._replace(q=q, k=k, needs_backward=needs_backward)


def norm_by_tables(
    q: Tensor, k: Tensor, norm: QKNorm, tables: Tables, layout: str, impl: str | None
) -> tuple[Tensor, Tensor]:
    """Return q and k normed and rotated by tables with a row for each token, in one launch if both have the same."""
    assert tables.q is not None
    assert tables.k is not None  # keys that come rotated have no norm
    flags = RopeFlags(layout, **pairing_of(tables), impl=impl)
    rope_q, rope_k = (RopeCall(*table, None, None, 0, flags) for table in (tables.q, tables.k))
    if tables.q.cos is tables.k.cos:
        q, k = norm_and_rotate((q, k), norm, rope_q)
    else:
        weights, norm_flags = split_norm(norm, 2)
        check_norm((q, k), weights, NormCall(rope_q, norm_flags))  # which names k's weight
        (q,) = norm_and_rotate((q,), norm, rope_q)
        (k,) = norm_and_rotate((k,), dataclasses.replace(norm, q_weight=norm.k_weight), rope_k)
    return q, k


def bind_norm(tables: Tables, layout: str, impl: str | None) -> Callable[[Tensor, Tensor, QKNorm], tuple[Tensor, ...]]:
    """Return `norm_by_tables` as a function of q, k and a norm, with what tables decide computed once."""
    if tables.q is None or tables.k is None or tables.q.cos is not tables.k.cos:
        return lambda q, k, norm: norm_by_tables(q, k, norm, tables, layout, impl)
    call = RopeCall(*tables.q, None, None, 0, RopeFlags(layout, **pairing_of(tables), impl=impl))
    return lambda q, k, norm: norm_and_rotate((q, k), norm, call)


def rotate(x: Tensor, table: RopeTable, tables: Tables, on: Steps | None = None, *, inverse: bool = False) -> Tensor:
    """Rotate x (B, H, T, D) by one table of a call."""
    rope = _rope_of(on)
    rotated: Tensor = rope(x, None, *table, **pairing_of(tables), inverse=inverse)
    return rotated


def pairing_of(tables: Tables) -> dict[str, Any]:
    """Return the keywords of `apply_rope` that say which features form pairs."""
    return {
        "interleaved": tables.interleaved,
        "rotary_offset": tables.rotary_offset,
        "pair_block": tables.pair_block,
    }


differentiable_rope = functools.partial(apply_rope, layout="bhtd")


def _rope_of(on: Steps | None) -> Callable[..., Any]:
    if on is None:
        return differentiable_rope
    from ropewalk.ops.rope.launch import rotate_features

    return functools.partial(rotate_features, on=on)


def map_far_features(call: AttentionCall, on: Steps | None = None) -> FarQK | None:
    """Rotate q and k as far pairs score them, or return the caller's; None if no pair is far.

    Differentiable without `on`.
    """
    far = call.far
    if far is None or far.given is not None:
        return None if far is None else far.given
    if far.tables is None or far.tables.q_past is None:
        return None
    q_past, q_future, k_far = far.tables.q_past, far.tables.q_future, far.tables.k
    return FarQK(
        rotate(call.q, q_past, call.tables, on),
        None if q_future is None else rotate(call.q, q_future, call.tables, on),
        call.k if k_far is None else rotate(call.k, k_far, call.tables, on),
    )


def with_dense_features(x: Tensor) -> Tensor:
    """Return x, or a copy of it, with dense features: kernels read rows (..., D) by no stride of features."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_aligned(x: Tensor, *, dense: bool = False) -> Tensor:
    """Return memory for a tensor of x's shape (B, H, T, D): dense features, other strides in multiples of 16 bytes.

    It has x's order of dimensions where that allows it, unless it must be dense; where D does not fill 16 bytes, rows
    are longer than D.
    """
    vector = 16 // x.element_size()
    head_dim = x.shape[3]
    if head_dim % vector == 0 and x.stride(3) == 1 and not dense:
        memory = torch.empty_like(x)
        if memory.stride(3) == 1:  # not so where another stride of x is 1 or less
            return memory
    width = (head_dim + vector - 1) // vector * vector
    memory = torch.empty(*x.shape[:3], width, dtype=x.dtype, device=x.device)
    return memory if width == head_dim else memory[..., :head_dim]


def _far_window(call: AttentionCall) -> int | None:
    """Return from how many positions apart on a pair is far; None where none can be."""
    assert call.scheme is not None
    window = call.scheme.far_window()
    if window is None or torch.compiler.is_compiling():  # lengths are not to be constants there
        return window
    by_index = call.positions_q is None and call.positions_k is None
    return None if by_index and max(call.q.shape[2], kv_capacity(call)) <= window else window


class _Rotations:
    """Makes a call's tables."""

    def __init__(self, call: AttentionCall, known_by: Identity | None) -> None:
        assert call.scheme is not None
        self.call, self.scheme, self.known_by = call, call.scheme, known_by
        self.head_dim, self.device = call.q.shape[3], call.q.device
        self.queries, self.keys = call.q.shape[2], kv_capacity(call)
        is_placed = call.key_starts is not None or call.query_starts is not None
        self.has_indices = is_placed or call.cu_seqlens_q is not None
        self._found: tuple[Tensor | None, Tensor | None] | None = None
        self.lowest = self.keys - self.queries
        if self.has_indices:
            # Queries may stand before the first key; of those causal attention makes nothing.
            before = is_placed or self.indices()[0] is not self.indices()[1]
            self.lowest = -max(self.queries, self.keys) if before and not call.causal else 0
        self.q_start: int | None = None  # the position of the first row, if q's rotation of near pairs is whole

    def indices(self) -> tuple[Tensor | None, Tensor | None]:
        """Return positions of queries and of keys by their index; None where they count from the last and from 0."""
        if self._found is None:  # no cached_property: torch.compile traces this, and would find its lock
            self._found = (
                _indices(self.queries, self.keys, self.call, self.device) if self.has_indices else (None, None)
            )
        return self._found

    def near(self) -> tuple[Rotation | None, Rotation | None]:
        """Return the rotations of q and of k; one for both where their tokens have the same positions."""
        call = self.call
        kind = type(self.scheme)
        has_its_own = kind.query_rotation is not PositionScheme.query_rotation
        if kind.rotation is PositionScheme.rotation and not has_its_own:
            return None, None  # before indices are computed: on a GPU they are kernels
        if call.keys_rotated and not has_its_own:
            whole = self._whole()
            if whole is not None:
                return whole, None
        query_rotation = self._query_rotation("query_rotation") if has_its_own else None
        rotation_k = None
        if not call.keys_rotated:
            rotation_k = self._key_rotation("rotation")
            indices_q, indices_k = self.indices()
            same = call.positions_q is call.positions_k and (
                call.positions_q is not None
                or (indices_q is indices_k and (indices_q is not None or self.queries == self.keys))
            )
            if same and query_rotation is None:
                return rotation_k, rotation_k
        return query_rotation or self._query_rotation("rotation"), rotation_k

    def _whole(self) -> Rotation | None:
        """Return the rotation of all positions; None if q needs rows of it now: see `with_rows`."""
        call = self.call
        if self.known_by is None or call.positions_q is not None or call.cu_seqlens_q is not None:
            return None
        table, low = self._remembered(self.lowest, self.keys, "rotation")
        if table is None or table.scale is not None:
            return None
        self.q_start = low
        return table

    def far(self) -> FarTables:
        """Return the rotations of far pairs."""
        past, future = self._query_rotation("far_rotation", "past"), None
        by_index = self.call.positions_q is None and self.call.positions_k is None
        if not (self.call.causal and by_index):
            future = self._query_rotation("far_rotation", "future")
        keys = self._key_rotation("far_rotation", "keys")
        return FarTables(_table_of(past), _table_of(future), _table_of(keys))

    def whole(self, side: int) -> tuple[Rotation | None, int]:
        """Return the rotation of all positions that a side's indices have, and the first one."""
        counts_from_zero = side == 1 and self.call.key_starts is None and self.call.cu_seqlens_k is None
        return self._remembered(0 if counts_from_zero else self.lowest, self.keys, "rotation")

    def _query_rotation(self, method: str, *of: str) -> Rotation | None:
        return self._tabulate(self.call.positions_q, 0, self.lowest, self.keys, method, *of)

    def _key_rotation(self, method: str, *of: str) -> Rotation | None:
        start = 0 if self.call.key_starts is None and self.call.cu_seqlens_k is None else self.lowest
        return self._tabulate(self.call.positions_k, 1, start, self.keys, method, *of)

    def _tabulate(
        self, positions: Tensor | None, side: int, start: int, stop: int, method: str, *of: str
    ) -> Rotation | None:
        """Return a scheme's table for `positions`; without them for indices of a side: 0 for queries, 1 for keys.

        Without both it is for start to below stop. It has a batch dimension in front.
        """
        make: Callable[..., Rotation | None] = getattr(self.scheme, method)
        device = self.device
        if positions is not None:
            return make(positions.long(), self.head_dim, *of)
        if self.known_by is None:
            indices = self.indices()[side]
            every = torch.arange(start, stop, device=device)[None] if indices is None else indices.long()
            return make(every, self.head_dim, *of)
        table, low = self._remembered(start, stop, method, *of)
        if table is None:
            return None
        indices = self.indices()[side]
        cos, sin, scale = table.cos, table.sin, table.scale
        if indices is None:
            tokens = slice(start - low, stop - low)
            cos, sin, scale = cos[:, tokens], sin[:, tokens], None if scale is None else scale[:, tokens]
        else:
            rows = _rows_of(indices, low, cos.shape[1])
            cos, sin = F.embedding(rows, cos[0]), F.embedding(rows, sin[0])
            scale = None if scale is None else scale[0][rows]
        return table._replace(cos=cos, sin=sin, scale=scale)

    def _remembered(self, start: int, stop: int, method: str, *of: str) -> tuple[Rotation | None, int]:
        """Return a scheme's table for all positions from `start` to below `stop` and more, and its first position."""
        make: Callable[..., Rotation | None] = getattr(self.scheme, method)
        # One table is for every length up to the next power of two, in both directions.
        low = 0 if start >= 0 else -_power_of_two(-start)
        high = _power_of_two(stop)
        table = remember(
            (method, *of, self.head_dim, low, high),
            self.known_by,
            self.device,
            lambda: make(torch.arange(low, high, device=self.device)[None], self.head_dim, *of),
        )
        return table, low


class RowSource(NamedTuple):
    """The source of one side's row of cos and sin for each position: a table of all positions, or frequencies."""

    table: RopeTable | None
    lowest: int  # the position of the table's first row
    frequencies: Tensor | None  # (R/2,); None without a table too: the scheme's own, which each call reads
    factor: float  # of cos and sin that are computed of frequencies


def row_source(call: AttentionCall, side: int) -> RowSource | None:
    """Return what gives the rows of q (side 0) or of k (1), for positions that calls have; None if nothing does."""
    scheme = call.scheme
    assert scheme is not None
    if type(scheme).query_rotation is not PositionScheme.query_rotation:
        return None
    known_by, head_dim, device = _identity_of_map(scheme), call.q.shape[3], call.q.device
    if known_by is None or (call.positions_q, call.positions_k)[side] is not None:
        if type(scheme) is not Rope or scheme.axes is not None:
            return None
        inv_freq = scheme.inv_freq
        if inv_freq is not None and inv_freq.device == device and not _is_readable(inv_freq):
            return RowSource(None, 0, None, scheme.attention_factor)
        if known_by is None:
            return None
        width = scheme.rotary_dim or head_dim - scheme.rotary_offset
        frequencies = remember(
            ("frequencies", head_dim),
            known_by,
            device,
            lambda: (
                default_frequencies(width, scheme.base, device) if inv_freq is None else inv_freq.to(device).double()
            ),
        )
        return RowSource(None, 0, frequencies, scheme.attention_factor)
    table, lowest = _Rotations(call, known_by).whole(side)
    return None if table is None or table.scale is not None else RowSource(_table_of(table), lowest, None, 1.0)


def _rows_of(indices: Tensor, low: int, n_rows: int) -> Tensor:
    """Return the rows of a table whose first one is for position `low`, whatever the device holds."""
    return (indices if low == 0 else indices - low).clamp(0, n_rows - 1)


def _indices(queries: int, keys: int, call: AttentionCall, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The positions of `token_positions` where both are None, in few launches; None for keys by their index.

    Those of tokens in no sequence may be anything.
    """
    bounds_q, bounds_k = call.cu_seqlens_q, call.cu_seqlens_k
    if bounds_q is not None and bounds_k is not None:
        index_q, sequences = _unpack(bounds_q, queries)
        if bounds_q is bounds_k and queries == keys:
            return index_q, index_q
        shift = bounds_k.diff() - bounds_q.diff()  # how many keys a sequence has more than queries
        return index_q + F.pad(shift, (0, 1))[sequences], _unpack(bounds_k, keys)[0]
    if bounds_q is not None and call.key_lengths is not None:  # over a cache
        index_q, sequences = _unpack(bounds_q, queries)
        shift = call.key_lengths.clamp(max=keys) - bounds_q.diff()
        return index_q + F.pad(shift, (0, 1))[sequences], None
    starts = None if call.key_starts is None else call.key_starts[:, None]
    indices_k = None if starts is None else torch.arange(keys, device=device) - starts
    if call.query_starts is None:
        if queries == keys:
            return indices_k, indices_k
        indices_q = torch.arange(keys - queries, keys, device=device)[None]
    else:
        indices_q = torch.arange(queries, device=device) + call.query_starts[:, None]
    return indices_q if starts is None else indices_q - starts, indices_k


def _unpack(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The index of each packed token in its sequence, (1, total), and the sequence, S for none, likewise."""
    tokens = torch.arange(total, dtype=bounds.dtype, device=bounds.device)[None]
    sequences = torch.searchsorted(bounds[1:], tokens, right=True)
    return tokens - bounds[sequences], sequences


def _power_of_two(count: int) -> int:
    return max(256, 1 << max(0, count - 1).bit_length())


_PLAIN_TYPES = {bool, int, float, str, type(None), torch.dtype, torch.device}
_MOST_VALUES = 4096  # of a tensor that is read in each call


def _identity(scheme: PositionScheme) -> Identity | None:
    """Return a key of all that a scheme holds; None if it is not plain data, or if the call is traced or fake."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    return identity_of(scheme)


_UNWEIGHTED = ExpoSB()


def _identity_of_map(scheme: PositionScheme) -> Identity | None:
    """Return a key of all that a scheme's map of features depends on: ExpoSB's weights of heads change scores alone."""
    return _identity(_UNWEIGHTED if type(scheme) is ExpoSB else scheme)


def signature_of(scheme: PositionScheme) -> Identity | None:
    """Return a key of all that a scheme holds but the values of tensors that `identity_of` does not read."""
    if not hasattr(scheme, "__dict__"):
        return None
    signature: list[Any] = [type(scheme)]
    for name, value in vars(scheme).items():
        signature.append(name)
        if type(value) in _PLAIN_TYPES:
            signature.append(_exactly(value))
        elif type(value) in (Tensor, torch.nn.Parameter):
            metadata = (type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
            signature.append((*metadata, value.is_neg(), *(_values_of(value) if _is_readable(value) else ())))
        else:
            return None
    return tuple(signature)


def identify_scheme(scheme: PositionScheme) -> tuple[Any, ...]:
    """Return a key of all that plans take of a scheme; they read values of tensors that no key can hold."""
    identity = identity_of(scheme)
    return ("read", signature_of(scheme)) if identity is None else identity


_fixed: dict[int, tuple[weakref.ref[PositionScheme], Identity]] = {}  # of schemes that cannot change, by their id


def identity_of(scheme: PositionScheme) -> Identity | None:
    """Return a key of all that a scheme holds; None if it is not plain data.

    A tensor on the CPU is known by its values: writes through `.data` or a NumPy view leave its version as it was.
    Values on a device cannot be read without waiting for it, so what derives from them is computed in each call.
    """
    known = _fixed.get(id(scheme))
    if known is not None and known[0]() is scheme:
        return known[1]
    if not hasattr(scheme, "__dict__"):
        return None
    identity: list[Any] = [type(scheme)]
    parameters = vars(type(scheme)).get("__dataclass_params__")
    is_fixed = parameters is not None and parameters.frozen
    for name, value in vars(scheme).items():
        identity.append(name)
        if type(value) in _PLAIN_TYPES:
            identity.append(_exactly(value))
        elif isinstance(value, PositionScheme):
            within = identity_of(value)
            if within is None:
                return None
            identity.append(within)
            is_fixed = is_fixed and id(value) in _fixed
        elif isinstance(value, Tensor):
            if not _is_readable(value):
                return None
            identity.append((value.dtype, value.shape, *_values_of(value)))
            is_fixed = False
        else:
            return None
    result = tuple(identity)
    if is_fixed:
        number = id(scheme)
        _fixed[number] = weakref.ref(scheme, lambda _: _fixed.pop(number, None)), result
    return result


def _exactly(value: Any) -> Any:
    """Return a number's type and text, and other plain data as it is: 1, 1.0 and True are equal, and so are zeros."""
    return (type(value), repr(value)) if isinstance(value, (int, float)) else value


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _values_of(x: Tensor) -> list[Any]:
    """Return a tensor's numbers by their bits, which tell 0.0 from -0.0 and find a NaN again."""
    bits = _BITS.get(x.element_size())
    numbers: list[Any] = (x.flatten() if bits is None else x.resolve_neg().flatten().view(bits)).tolist()
    return numbers


def _is_readable(x: Tensor) -> bool:
    """Say whether a constant's values can be read in each call, for next to nothing."""
    if x.device.type != "cpu" or x.requires_grad or x.numel() > _MOST_VALUES:
        return False
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
