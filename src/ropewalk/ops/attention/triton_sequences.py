"""Which tiles an attention kernel has, of which sequence, and which keys a tile of queries may attend.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads.
Query m stands at key m + tokens_apart: by default the last query stands at the last key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_tiles import wide


@triton.jit
def locate_tile(sequences, n_tokens, n_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Which tile of tokens a program has, of which batch row, head and sequence.

    In a dense batch a sequence is a batch row, and the tiles of one head are neighbours; in a packed one the schedule
    says it, and the heads of one tile are neighbours.
    """
    if sequences is None:
        n_tiles = tl.cdiv(n_tokens, BLOCK)
        tile = tl.program_id(0) % n_tiles
        row = tl.program_id(0) // n_tiles
        if LAST_FIRST:
            tile = n_tiles - 1 - tile
        batch = row // n_heads
        head = row % n_heads
        sequence = batch
    else:
        entry_ptr = sequences[2] + tl.program_id(0) // n_heads * 2
        sequence = tl.load(entry_ptr)
        tile = tl.load(entry_ptr + 1)
        batch = 0
        head = tl.program_id(0) % n_heads
    return tile, batch, head, sequence


@triton.jit
def span_of(cu_seqlens_ptr, sequence, n_sequences, n_tokens):
    """Where a sequence begins, and how many tokens it has; past the last one: the tokens that belong to none."""
    start = tl.load(cu_seqlens_ptr + sequence)
    start = tl.minimum(tl.maximum(start, 0), n_tokens).to(tl.int32)
    stop = tl.load(cu_seqlens_ptr + tl.minimum(sequence + 1, n_sequences))
    stop = tl.minimum(tl.maximum(stop, 0), n_tokens).to(tl.int32)
    stop = tl.where(sequence == n_sequences, n_tokens, stop)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def measure_sequence(sequence, sequences, bounds, n_queries, n_keys):
    """Where a sequence's queries and keys begin; how many queries it has; its keys: from the first one to the last, and
    to the end of the memory that is theirs; and how far ahead of its index, among the keys, a query stands.
    """
    if sequences is None:
        key_lengths_ptr, key_starts_ptr, query_starts_ptr = bounds
        q_offset = 0
        k_offset = 0
        first_key = 0
        places = n_keys
        tokens_apart = n_keys - n_queries
        if query_starts_ptr is not None:
            tokens_apart = tl.load(query_starts_ptr + sequence).to(tl.int32)
        if key_lengths_ptr is not None:
            n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + sequence).to(tl.int32))
        if key_starts_ptr is not None:
            first_key = tl.maximum(tl.load(key_starts_ptr + sequence).to(tl.int32), 0)
    else:
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, _, n_sequences = sequences
        is_one = sequence >= 0  # otherwise the schedule has no more tiles
        sequence = tl.maximum(sequence, 0)
        q_offset, n_queries = span_of(cu_seqlens_q_ptr, sequence, n_sequences, n_queries)
        k_offset, places = span_of(cu_seqlens_k_ptr, sequence, n_sequences, n_keys)
        n_queries = tl.where(is_one, n_queries, 0)
        places = tl.where(is_one, places, 0)
        n_keys = tl.where(sequence == n_sequences, 0, places)  # who belongs to no sequence attends nobody
        first_key = 0
        tokens_apart = places - n_queries
    return q_offset, k_offset, n_queries, first_key, n_keys, places, tokens_apart


@triton.jit
def schedule_kernel(
    schedule_ptr,  # (n_entries, 2): a sequence and a tile of it, those of the longest sequence first; −1 where none is
    cu_seqlens_ptr,
    n_sequences,
    n_tokens,
    n_entries,
    BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Place the tiles of one sequence in the schedule; the sequence past the last is of tokens that belong to none."""
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
        is_one = (index < n_tiles) & (first + index < n_entries)
        tl.store(entry_ptrs, tl.zeros((BLOCK_S,), tl.int32) + sequence, is_one)
        tl.store(entry_ptrs + 1, tile, is_one)
    if sequence == n_sequences:
        for start in tl.range(total, n_entries, BLOCK_S):
            index = start + tl.arange(0, BLOCK_S)
            tl.store(schedule_ptr + index * 2, tl.full((BLOCK_S,), -1, tl.int32), index < n_entries)
            tl.store(schedule_ptr + index * 2 + 1, tl.zeros((BLOCK_S,), tl.int32), index < n_entries)


# Which keys a query attends, by their index: all; those up to where it stands; those from there on.
EITHER_SIDE = tl.constexpr(0)
PAST = tl.constexpr(1)
FUTURE = tl.constexpr(2)
# Which pairs a walk is for, by their positions: all; those near each other; the far ones on one side.
EVERY_PAIR = tl.constexpr(0)
NEAR = tl.constexpr(1)
FAR_PAST = tl.constexpr(2)
FAR_FUTURE = tl.constexpr(3)


@triton.constexpr_function
def side_of_pairs(pairs, side, by_index):
    """The side on which a walk over pairs of one kind goes, in a call that attends `side`."""
    if not by_index:
        return side
    return {FAR_PAST.value: PAST.value, FAR_FUTURE.value: FUTURE.value}.get(pairs, side)


@triton.jit
def lengths_of_pairs(lengths, far_window, PAIRS: tl.constexpr, WINDOWED: tl.constexpr):
    """The lengths for a walk over pairs of one kind alone, where positions are indices.

    Near pairs are those within a window, on the side that the call attends; far ones those of one side, for a query
    that stands far_window places away.
    """
    n_queries, first_key, n_keys, tokens_apart, window = lengths
    if PAIRS == FAR_PAST:
        tokens_apart -= far_window
        window -= far_window
    elif PAIRS == FAR_FUTURE:
        tokens_apart += far_window
        window -= far_window
    elif PAIRS == NEAR:
        if WINDOWED:  # noqa: SIM108
            window = tl.minimum(window, far_window)
        else:
            window = far_window
    return n_queries, first_key, n_keys, tokens_apart, window


@triton.jit
def key_ranges(
    m_start, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the keys that a tile of queries may attend: [start, full), [full, full_stop), [full_stop, stop).

    All begin at a multiple of BLOCK_N. In the middle range every query attends every key, and every key exists; of the
    edges, the other two, every element must be asked for.
    """
    _, first_key, n_keys, tokens_apart, window = lengths
    first = m_start + tokens_apart
    last = first + BLOCK_M - 1
    start = first_key
    full = first_key
    stop = n_keys
    full_stop = n_keys
    if SIDE == PAST:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if SIDE == FUTURE:
        start = tl.maximum(start, first)
        full = tl.maximum(full, last)
    if WINDOWED:
        if SIDE != FUTURE:
            start = tl.maximum(first - window + 1, first_key)
            full = tl.maximum(last - window + 1, first_key)
        if SIDE != PAST:
            stop = tl.minimum(stop, last + window)
            full_stop = tl.minimum(full_stop, first + window)
    start = start // BLOCK_N * BLOCK_N
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_N - 1) // BLOCK_N * BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N * BLOCK_N, full)
    if HAS_MASK:
        full = start
        full_stop = start
    return start, full, full_stop, stop


@triton.jit
def query_ranges(
    n_start, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the queries that may attend a tile of keys, as `key_ranges` does; all begin at a multiple of BLOCK_M."""
    n_queries, first_key, n_keys, tokens_apart, window = lengths
    first = n_start - tokens_apart
    last = first + BLOCK_N - 1
    start = 0
    full = 0
    stop = n_queries
    full_stop = n_queries
    if SIDE == PAST:
        start = tl.maximum(first, 0)
        full = tl.maximum(last, 0)
    if SIDE == FUTURE:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if WINDOWED:
        if SIDE != FUTURE:
            stop = tl.minimum(stop, last + window)
            full_stop = tl.minimum(full_stop, first + window)
        if SIDE != PAST:
            start = tl.maximum(first - window + 1, 0)
            full = tl.maximum(last - window + 1, 0)
    start = start // BLOCK_M * BLOCK_M
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_M - 1) // BLOCK_M * BLOCK_M, (stop + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_M * BLOCK_M, full)
    if HAS_MASK:
        full = start
        full_stop = start
    if (n_start >= n_keys) | (n_start + BLOCK_N <= first_key):  # nobody attends these
        full = start
        full_stop = start
        stop = start
    return start, full, full_stop, stop


@triton.jit
def steps_of(ranges, MASKED: tl.constexpr):
    """How far a walk goes along the middle of `key_ranges` or `query_ranges`, or along both edges if MASKED."""
    start, full, full_stop, stop = ranges
    steps = full_stop - full
    if MASKED:
        steps = (full - start) + tl.maximum(stop - full_stop, 0)
    return steps


@triton.jit
def after_steps(step, ranges, MASKED: tl.constexpr):
    """Where the walk stands after so many steps: along the edges it jumps over the middle."""
    start, full, full_stop, _ = ranges
    index = full + step
    if MASKED:
        index = start + step
        index = tl.where(index >= full, index + (full_stop - full), index)
    return index


@triton.jit
def may_attend(
    m, n, lengths, mask, mask_stride_query, HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, SIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Which of a tile's queries m attend which of its keys n, of shapes that broadcast against each other.

    What it says of queries past the last one is of no account: nothing of theirs is kept.
    """
    n_queries, first_key, n_keys, tokens_apart, window = lengths
    ahead = n - (m + tokens_apart)
    if SIDE == PAST:
        may = ahead <= 0  # and so it exists, unless lengths say otherwise
        if HAS_LENGTHS:
            may = may & (n < n_keys)
    else:
        may = n < n_keys
    if SIDE == FUTURE:
        may = may & (ahead >= 0)
    if HAS_STARTS:
        may = may & (n >= first_key)
    if WINDOWED:
        if SIDE != FUTURE:
            may = may & (ahead > -window)
        if SIDE != PAST:
            may = may & (ahead < window)
    if mask is not None:
        mask_ptr, mask_stride_key = mask
        mask_ptrs = mask_ptr + wide(n) * mask_stride_key
        if mask_stride_query is None:  # the same for all queries: one number for each key is loaded
            may = may & (tl.load(mask_ptrs, n < n_keys, other=0) != 0)
        else:
            mask_ptrs = mask_ptrs + wide(m) * mask_stride_query
            may = may & (tl.load(mask_ptrs, may & (m < n_queries), other=0) != 0)
    return may


@triton.jit
def are_pairs(positions_m, positions_n, far_window, PAIRS: tl.constexpr):
    """Which pairs of positions, int64, are near or far, of shapes that broadcast against each other."""
    distance = positions_m - positions_n
    if PAIRS == FAR_PAST:
        are = distance >= far_window
    elif PAIRS == FAR_FUTURE:
        are = distance <= -far_window
    else:
        are = (distance < far_window) & (distance > -far_window)
    return are
