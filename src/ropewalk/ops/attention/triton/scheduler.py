"""The tile of each program, the extents of its sequence, and the schedule of a packed batch.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import Seqlens


@triton.jit
def tile_of_program(packed, n_tokens, n_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return this program's tile of tokens, batch row, head and sequence.

    In a dense batch a sequence is a batch row, and the tiles of one head are neighbours. In a packed one the schedule
    names sequence and tile, and the heads of one tile are neighbours.
    """
    if packed is None:
        n_tiles = tl.cdiv(n_tokens, BLOCK)
        tile = tl.program_id(0) % n_tiles
        row = tl.program_id(0) // n_tiles
        if LAST_FIRST:
            tile = n_tiles - 1 - tile
        batch = row // n_heads
        head = row % n_heads
        sequence = batch
    else:
        entry_ptr = packed.schedule + tl.program_id(0) // n_heads * 2
        sequence = tl.load(entry_ptr)
        tile = tl.load(entry_ptr + 1)
        batch = 0
        head = tl.program_id(0) % n_heads
    return tile, batch, head, sequence


@triton.jit
def span_of(cu_seqlens_ptr, sequence, n_sequences, n_tokens):
    """Return a sequence's first token and length; past the last sequence, of the tokens that belong to none."""
    start = tl.load(cu_seqlens_ptr + sequence)
    start = tl.minimum(tl.maximum(start, 0), n_tokens).to(tl.int32)
    stop = tl.load(cu_seqlens_ptr + tl.minimum(sequence + 1, n_sequences))
    stop = tl.minimum(tl.maximum(stop, 0), n_tokens).to(tl.int32)
    stop = tl.where(sequence == n_sequences, n_tokens, stop)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def sequence_info(sequence, packed, bounds, n_queries, n_keys, window, window_right):
    """Return a sequence's first query and key, its `kv_capacity`, and its `Seqlens`.

    `kv_capacity` counts the keys that memory has for the sequence, `n_keys` of the `Seqlens` those that exist.
    """
    if packed is None:
        q_offset = 0
        k_offset = 0
        kv_start = 0
        kv_capacity = n_keys
        causal_offset = n_keys - n_queries
        if bounds.query_starts is not None:
            causal_offset = tl.load(bounds.query_starts + sequence).to(tl.int32)
        if bounds.key_lengths is not None:
            n_keys = tl.minimum(n_keys, tl.load(bounds.key_lengths + sequence).to(tl.int32))
        if bounds.key_starts is not None:
            kv_start = tl.maximum(tl.load(bounds.key_starts + sequence).to(tl.int32), 0)
    else:
        has_tile = sequence >= 0  # otherwise the schedule has no more tiles
        sequence = tl.maximum(sequence, 0)
        q_offset, n_queries = span_of(packed.cu_seqlens_q, sequence, packed.n_sequences, n_queries)
        if bounds.key_lengths is not None:  # over a cache
            k_offset = 0
            kv_capacity = tl.load(bounds.key_lengths + sequence, sequence < packed.n_sequences, other=0)
            kv_capacity = tl.minimum(tl.maximum(kv_capacity, 0), n_keys).to(tl.int32)
        else:
            k_offset, kv_capacity = span_of(packed.cu_seqlens_k, sequence, packed.n_sequences, n_keys)
        n_queries = tl.where(has_tile, n_queries, 0)
        kv_capacity = tl.where(has_tile, kv_capacity, 0)
        n_keys = tl.where(sequence == packed.n_sequences, 0, kv_capacity)  # tokens of no sequence attend nothing
        kv_start = 0
        causal_offset = kv_capacity - n_queries
    if window_right is None:
        window_right = window
    return q_offset, k_offset, kv_capacity, Seqlens(n_queries, kv_start, n_keys, causal_offset, window, window_right)


@triton.jit
def schedule_kernel(
    schedule_ptr,  # (n_entries, 2): a sequence and one of its tiles, the longest sequence first; −1 after the last
    cu_seqlens_ptr,
    n_sequences,
    n_tokens,
    n_entries,
    BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write one sequence's tiles into the schedule; the sequence past the last has the tokens that belong to none."""
    sequence = tl.program_id(0)
    _start, length = span_of(cu_seqlens_ptr, sequence, n_sequences, n_tokens)
    n_tiles = tl.cdiv(length, BLOCK)
    first = 0
    total = 0
    for start in tl.range(0, n_sequences + 1, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        exists = other <= n_sequences
        other = tl.minimum(other, n_sequences)
        _other_start, others = span_of(cu_seqlens_ptr, other, n_sequences, n_tokens)
        tiles = tl.where(exists, tl.cdiv(others, BLOCK), 0)
        before = (others > length) | ((others == length) & (other < sequence))
        first += tl.sum(tl.where(before, tiles, 0))
        total += tl.sum(tiles)
    for start in tl.range(0, n_tiles, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        tile = index
        if LAST_FIRST:
            tile = n_tiles - 1 - index
        entry_ptrs = schedule_ptr + (first + index) * 2
        exists = (index < n_tiles) & (first + index < n_entries)
        tl.store(entry_ptrs, tl.zeros((BLOCK_S,), tl.int32) + sequence, exists)
        tl.store(entry_ptrs + 1, tile, exists)
    if sequence == n_sequences:
        for start in tl.range(total, n_entries, BLOCK_S):
            index = start + tl.arange(0, BLOCK_S)
            tl.store(schedule_ptr + index * 2, tl.full((BLOCK_S,), -1, tl.int32), index < n_entries)
            tl.store(schedule_ptr + index * 2 + 1, tl.zeros((BLOCK_S,), tl.int32), index < n_entries)
