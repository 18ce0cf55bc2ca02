"""Keys and values in pages: which calls attend a contiguous copy of them, and such a call.

A copy reads and writes each key once, and the kernels of contiguous keys take half the time of those that read pages.

Shape letters: B batch, Tq queries, Tk keys, H query heads, K key heads, D head dim (Dv of v), S packed sequences.
"""

from __future__ import annotations

from torch import Tensor

from ropewalk.ops.attention.backend import why_unread
from ropewalk.ops.attention.call import SCORE_CHANGES, SOFTMAX, AttentionCall, RopeTable, kv_capacity

# The least that a copy pays for: queries times heads that share a key, for each row of the block table, ...
MIN_ROWS = 512
# ... and queries times heads of the call: contiguous keys are not split, so that fewer do not fill a GPU.
MIN_PROGRAM_ROWS = 4096
# Kernels that read pages in place take so many times as long for packed queries, and for quantised keys.
SLOWER = 2
# The fields of a call that Triton's decode kernels read; any other one takes a copy of pages, and the forward kernel.
DECODE_READS = (
    *("q", "k", "v", "scheme", "causal", "window_left", "window_right", "mask", "key_lengths", "key_starts"),
    *("query_starts", "block_table", "positions_q", "positions_k", *SOFTMAX, *SCORE_CHANGES, "k_scale", "v_scale"),
    *("gate", "keys_rotated", "tables", "far", "return_lse", "deterministic", "needs_backward"),
)


def is_copied(call: AttentionCall) -> bool:
    """Say whether kernels attend a copy of a call's pages. Reads no values."""
    return call.block_table is not None and (needs_copy(call) or pays(call))


def pays(call: AttentionCall) -> bool:
    """Say whether a call of pages is faster with a copy; never where it has more keys than all pages."""
    assert call.block_table is not None
    table_rows, n_heads, n_kv_heads = call.block_table.shape[0], call.q.shape[1], call.k.shape[1]
    queries = call.q.shape[0] * call.q.shape[2]
    if call.cu_seqlens_q is not None or call.k_scale is not None:
        queries *= SLOWER
    if queries * n_heads < max(MIN_PROGRAM_ROWS, MIN_ROWS * n_kv_heads * table_rows):
        return False
    return table_rows * kv_capacity(call) <= call.k.shape[0] * call.k.shape[2]


def needs_copy(call: AttentionCall) -> bool:
    """Say whether no kernel reads a call's pages in place."""
    if call.dropout_p > 0 or call.return_max_logits or call.row_logits is not None:
        return True
    if call.tables.feature_weights is not None and not call.keys_rotated:
        return True
    if call.k_scale is not None and any(_has_odd_strides(x) for x in (call.k, call.v)):
        return True
    if call.cu_seqlens_q is None and why_unread(call, DECODE_READS) is not None:
        return True
    if call.cu_seqlens_q is not None:
        return call.k_scale is not None or call.tables.k is not None or call.far is not None
    return call.far is not None and not (call.causal and call.positions_q is None)


def _has_odd_strides(x: Tensor) -> bool:
    """Say whether numbers of 8 bits or less cannot be read in pairs."""
    offsets = (x.storage_offset(), *x.stride()[:3])
    return x.shape[3] % 2 != 0 or x.stride(3) != 1 or any(offset % 2 for offset in offsets)


def describe(call: AttentionCall) -> AttentionCall:
    """Return a call of pages as one of contiguous keys, whose k and v have a shape and no memory.

    Packed sequences of a cache become packed keys.
    """
    assert call.block_table is not None
    rows, keys, n_kv_heads = call.block_table.shape[0], kv_capacity(call), call.k.shape[1]
    is_packed = call.cu_seqlens_q is not None
    shape = (1, n_kv_heads, rows * keys) if is_packed else (rows, n_kv_heads, keys)
    nothing = call.q.new_empty(1)
    return call._replace(
        k=nothing.expand(*shape, call.q.shape[3]),
        v=nothing.expand(*shape, call.value_dim),
        key_lengths=None if is_packed else call.key_lengths,
        cu_seqlens_k=call.cu_seqlens_q,
        block_table=None,
        k_scale=None,
        v_scale=None,
    )


def tables_of_keys(call: AttentionCall) -> list[Tensor]:
    """Return what a call has for each index of a key, in the order of `with_tables`: (1, Tk) or (1, Tk, R/2)."""
    far = None if call.far is None or call.far.tables is None else call.far.tables.k
    positions = () if call.positions_k is None else (call.positions_k,)
    return [*(call.tables.k or ()), *(far or ()), *positions]


def with_tables(call: AttentionCall, tables: list[Tensor]) -> AttentionCall:
    """Return a call with others in place of `tables_of_keys`."""
    rest = iter(tables)
    if call.tables.k is not None:
        call = call._replace(tables=call.tables._replace(k=RopeTable(next(rest), next(rest))))
    far = call.far
    if far is not None and far.tables is not None and far.tables.k is not None:
        call = call._replace(far=far._replace(tables=far.tables._replace(k=RopeTable(next(rest), next(rest)))))
    return call if call.positions_k is None else call._replace(positions_k=next(rest))
