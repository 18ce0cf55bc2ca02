"""Ranges of keys and queries that attend each other, and masks of single pairs.

Query m has the index m + causal_offset among the keys: by default the last query has the last key's.
A two-range encoding has loops over ranges of pairs: near ones, those far behind a query, those far ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import MaskFlags, Seqlens, TileRange
from ropewalk.ops.attention.triton.tiles import wide

# MaskFlags.SIDE, the keys that a query attends by index: all; up to its own; from its own on.
EITHER_SIDE = tl.constexpr(0)
PAST = tl.constexpr(1)
FUTURE = tl.constexpr(2)
# MaskFlags.RANGE, the pairs that a loop is over by position: all; near ones; far ones, behind the query or ahead of it.
ALL = tl.constexpr(0)
NEAR = tl.constexpr(1)
FAR_PAST = tl.constexpr(2)
FAR_FUTURE = tl.constexpr(3)
# MaskFlags.WINDOWED, beside False and True: some keys may be in no query's window.
OUTSIDE = tl.constexpr(2)
# MASKED of a main loop, beside False and True: the pairs of each tile are chosen by bits or spans of `Lists` too.
BITS = tl.constexpr(2)


# The flags are one constant: a jitted function of Triton 3.6 can return neither None nor constants, but makes tensors.


@triton.constexpr_function
def mask_flags(PACKED, key_lengths, key_starts, query_starts, CAUSAL, WINDOWED, INDEX_POSITIONS, PARTIAL_TILES):
    """Return the `MaskFlags` of a call, for all pairs; three arguments are the fields of `Bounds`."""
    HAS_LENGTHS = PACKED or key_lengths is not None or query_starts is not None
    HAS_OUTSIDE = OUTSIDE.value == WINDOWED
    HAS_STARTS = key_starts is not None or HAS_OUTSIDE
    UNREAD_KEYS = HAS_OUTSIDE or (query_starts is not None and CAUSAL)
    SIDE = PAST if CAUSAL else EITHER_SIDE
    flags = (SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, ALL, INDEX_POSITIONS, PARTIAL_TILES, UNREAD_KEYS)
    return MaskFlags(*map(tl.constexpr, flags))


@triton.constexpr_function
def range_flags(flags, RANGE):
    """Return the `MaskFlags` of a loop over one range of pairs.

    By index, far pairs are those of causal attention, and near ones those of a sliding window.
    By given positions, `range_mask` decides.
    """
    flags = MaskFlags(*flags)  # Triton 3.6's interpreter hands over a tuple without names
    side, windowed, pairs = flags.SIDE, flags.WINDOWED, tl.constexpr(RANGE).value
    if flags.INDEX_POSITIONS:
        side = {FAR_PAST.value: PAST, FAR_FUTURE.value: FUTURE}.get(pairs, side)
        windowed = windowed or pairs == NEAR.value
    return MaskFlags(*map(tl.constexpr, flags._replace(SIDE=side, WINDOWED=windowed, RANGE=pairs)))


@triton.constexpr_function
def masked_of_loop(LOOP, HAS_BITS, HAS_MIDDLE, MIDDLE_LAST):
    """Return MASKED of one of a range's three main loops, in the order in which they run; None: it does not run."""
    bits, middle = BITS.value if HAS_BITS else None, False if HAS_MIDDLE else None
    return [bits, True, middle][LOOP] if MIDDLE_LAST else [bits, middle, True][LOOP]


@triton.jit
def attended_keys(seqlens, flags):
    """Return the extents without the keys that no query attends by its index; `flags` are those of the call.

    Such keys may hold NaN, and zero times NaN is NaN: loops treat them as keys that do not exist.
    """
    kv_start = seqlens.kv_start
    n_keys = seqlens.n_keys
    if flags.UNREAD_KEYS:
        stop = seqlens.n_queries + seqlens.causal_offset  # one past the last query
        if flags.WINDOWED:
            kv_start = tl.maximum(kv_start, seqlens.causal_offset - seqlens.window + 1)
            if flags.SIDE != PAST:
                stop += seqlens.window_right - 1
        n_keys = tl.minimum(n_keys, tl.maximum(stop, 0))
    return Seqlens(seqlens.n_queries, kv_start, n_keys, seqlens.causal_offset, seqlens.window, seqlens.window_right)


@triton.jit
def range_seqlens(seqlens, far_window, flags, RANGE: tl.constexpr):
    """Return the extents for a loop over one range of pairs; `flags` are those of the call.

    By index, near pairs are those within a window, on the side that the call attends. Far ones are those of one side,
    for a query whose index is far_window lower or higher.
    """
    causal_offset = seqlens.causal_offset
    window = seqlens.window
    window_right = seqlens.window_right
    if RANGE == ALL or flags.INDEX_POSITIONS:
        if RANGE == FAR_PAST:
            causal_offset -= far_window
            window -= far_window
        elif RANGE == FAR_FUTURE:
            causal_offset += far_window
            window_right -= far_window
        elif RANGE == NEAR:
            if flags.WINDOWED:
                window = tl.minimum(window, far_window)
                window_right = tl.minimum(window_right, far_window)
            else:
                window = far_window
                window_right = far_window
    return Seqlens(seqlens.n_queries, seqlens.kv_start, seqlens.n_keys, causal_offset, window, window_right)


@triton.jit
def key_ranges(q_start, seqlens, flags, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NO_MIDDLE: tl.constexpr):
    """Return the `TileRange` of keys that a tile of BLOCK_M queries may attend.

    All bounds but `stop` are multiples of BLOCK_N. In the middle range every query attends every key, and every key
    exists; with NO_MIDDLE, where a mask decides, it is empty.
    """
    first = q_start + seqlens.causal_offset
    last = first + BLOCK_M - 1
    start = seqlens.kv_start
    full = seqlens.kv_start
    stop = seqlens.n_keys
    full_stop = seqlens.n_keys
    if flags.SIDE == PAST:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if flags.SIDE == FUTURE:
        start = tl.maximum(start, first)
        full = tl.maximum(full, last)
    if flags.WINDOWED:
        if flags.SIDE != FUTURE:
            start = tl.maximum(first - seqlens.window + 1, seqlens.kv_start)
            full = tl.maximum(last - seqlens.window + 1, seqlens.kv_start)
        if flags.SIDE != PAST:
            stop = tl.minimum(stop, last + seqlens.window_right)
            full_stop = tl.minimum(full_stop, first + seqlens.window_right)
    start = start // BLOCK_N * BLOCK_N
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_N - 1) // BLOCK_N * BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N * BLOCK_N, full)
    if NO_MIDDLE:
        full = start
        full_stop = start
    return TileRange(start, full, full_stop, stop)


@triton.jit
def query_ranges(n_start, seqlens, flags, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NO_MIDDLE: tl.constexpr):
    """Return the `TileRange` of queries that may attend a tile of BLOCK_N keys, in multiples of BLOCK_M."""
    first = n_start - seqlens.causal_offset
    last = first + BLOCK_N - 1
    start = 0
    full = 0
    stop = seqlens.n_queries
    full_stop = seqlens.n_queries
    if flags.SIDE == PAST:
        start = tl.maximum(first, 0)
        full = tl.maximum(last, 0)
    if flags.SIDE == FUTURE:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if flags.WINDOWED:
        if flags.SIDE != FUTURE:
            stop = tl.minimum(stop, last + seqlens.window)
            full_stop = tl.minimum(full_stop, first + seqlens.window)
        if flags.SIDE != PAST:
            start = tl.maximum(first - seqlens.window_right + 1, 0)
            full = tl.maximum(last - seqlens.window_right + 1, 0)
    start = start // BLOCK_M * BLOCK_M
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_M - 1) // BLOCK_M * BLOCK_M, (stop + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_M * BLOCK_M, full)
    if NO_MIDDLE:
        full = start
        full_stop = start
    if (n_start >= seqlens.n_keys) | (n_start + BLOCK_N <= seqlens.kv_start):  # no query attends these
        full = start
        full_stop = start
        stop = start
    return TileRange(start, full, full_stop, stop)


@triton.jit
def loop_length(tile_range, MASKED: tl.constexpr):
    """Return how many tokens a loop is over: those of partial tiles if MASKED, else those of the middle."""
    length = tile_range.full_stop - tile_range.full
    if MASKED:
        length = (tile_range.full - tile_range.start) + tl.maximum(tile_range.stop - tile_range.full_stop, 0)
    return length


@triton.jit
def loop_index(step, tile_range, MASKED: tl.constexpr):
    """Return the token that a loop is at after `step` tokens: along partial tiles it jumps over the middle."""
    index = tile_range.full + step
    if MASKED:
        index = tile_range.start + step
        index = tl.where(index >= tile_range.full, index + (tile_range.full_stop - tile_range.full), index)
    return index


@triton.jit
def lists_of_line(lists, batch, head, line):
    """Return the lists' pointer at a block of queries, or of keys; None without lists."""
    ptr = None
    if lists.ptr is not None:
        ptr = lists.ptr + wide(batch) * lists.stride_batch + wide(head) * lists.stride_head
        ptr += wide(line) * lists.stride_line
    return ptr


@triton.jit
def slots_of_head(lists, batch, head):
    """Return the pointer of the bits' slots, or of the spans, at one head; None without either."""
    ptr = None
    if lists.slots is not None:
        ptr = lists.slots + wide(batch) * lists.slots_stride_batch + wide(head) * lists.slots_stride_head
    return ptr


@triton.jit
def _count_listed(token, listed, stop, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Return how many tokens the tiles of blocks have that begin below a token."""
    below = (tl.maximum(stop - token, 0) + (BLOCK - 1)) // BLOCK * BLOCK
    return tl.sum(tl.where(listed, tl.minimum(below, LISTED), 0))


@triton.jit
def list_range(tile_range, ptr, BLOCK: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr):
    """Return the `TileRange` of a line's lists, whose blocks of LISTED tokens stand one after another.

    It holds the tiles of BLOCK tokens that are in a range of the sequence. MASKED: of blocks that have bits, all of
    which is partial.
    """
    return list_range_by(tl.arange(0, 128), tile_range, ptr, BLOCK, LISTED, MASKED)


@triton.jit
def list_range_by(lanes, tile_range, ptr, BLOCK: tl.constexpr, LISTED: tl.constexpr, MASKED: tl.constexpr):
    """Return `list_range`, by lanes 0 to below their number, each of which reads every so many-th entry."""
    first = 0
    count = tl.load(ptr)
    if MASKED == BITS:
        first = count
        count = tl.load(ptr + 1)
    start = first * LISTED
    full = start
    full_stop = start
    stop = start
    for step in tl.range(0, count, lanes.shape[0]):
        entry = step + lanes
        listed = entry < count
        token = tl.load(ptr + 2 + first + entry, listed, other=0) * LISTED
        start += _count_listed(token, listed, tile_range.start, BLOCK, LISTED)
        stop += _count_listed(token, listed, tile_range.stop, BLOCK, LISTED)
        if MASKED != BITS:
            full += _count_listed(token, listed, tile_range.full, BLOCK, LISTED)
            full_stop += _count_listed(token, listed, tile_range.full_stop, BLOCK, LISTED)
    if MASKED == BITS:
        full = start
        full_stop = start
    return TileRange(start, full, full_stop, stop)


@triton.jit
def listed_token(index, ptr, LISTED: tl.constexpr):
    """Return the token of a sequence that is at an index of `list_range`; anything at its end."""
    return tl.load(ptr + 2 + index // LISTED) * LISTED + index % LISTED


@triton.jit
def apply_bits(attends, m, n, q_start, k_start, n_queries, lists, LIST_Q: tl.constexpr, LIST_K: tl.constexpr):
    """Return whether queries m attend keys n by the bits of their block, or by their spans, too.

    A tile begins at q_start and k_start.
    """
    if lists.bits is None:
        start = tl.load(lists.slots + wide(m) * 2, m < n_queries, other=0)
        stop = tl.load(lists.slots + wide(m) * 2 + 1, m < n_queries, other=0)
        attends = attends & (n >= start) & (n < stop)
    else:
        slot = tl.load(lists.slots + wide(q_start // LIST_Q) * lists.slots_stride_query + k_start // LIST_K)
        words = tl.load(lists.bits + (wide(slot) * LIST_Q + m % LIST_Q) * (LIST_K // 32) + n % LIST_K // 32)
        attends = attends & ((words >> (n % 32) & 1) != 0)
    return attends


@triton.jit
def attention_mask(m, n, seqlens, flags):
    """Return whether queries m may attend keys n by their index, of shapes that broadcast against each other.

    Rows past n_queries are undefined; stores mask them.
    """
    ahead = n - (m + seqlens.causal_offset)
    if flags.SIDE == PAST:
        attends = ahead <= 0  # so the key exists, unless lengths say otherwise
        if flags.HAS_LENGTHS:
            attends = attends & (n < seqlens.n_keys)
    else:
        attends = n < seqlens.n_keys
    if flags.SIDE == FUTURE:
        attends = attends & (ahead >= 0)
    if flags.HAS_STARTS:
        attends = attends & (n >= seqlens.kv_start)
    if flags.WINDOWED:
        if flags.SIDE != FUTURE:
            attends = attends & (ahead > -seqlens.window)
        if flags.SIDE != PAST:
            attends = attends & (ahead < seqlens.window_right)
    return attends


@triton.jit
def apply_mask(attends, m, n, seqlens, mask):
    """Return whether queries m attend keys n by a mask too, if there is one."""
    if mask.ptr is not None:
        mask_ptrs = mask.ptr + wide(n) * mask.stride_key
        if mask.stride_query is None:  # one number for each key
            attends = attends & (tl.load(mask_ptrs, n < seqlens.n_keys, other=0) != 0)
        else:
            mask_ptrs = mask_ptrs + wide(m) * mask.stride_query
            attends = attends & (tl.load(mask_ptrs, attends & (m < seqlens.n_queries), other=0) != 0)
    return attends


@triton.jit
def range_mask(q_pos, k_pos, far_window, RANGE: tl.constexpr):
    """Return whether pairs of positions, int64, are in a range, of shapes that broadcast against each other."""
    distance = q_pos - k_pos
    if RANGE == FAR_PAST:
        in_range = distance >= far_window
    elif RANGE == FAR_FUTURE:
        in_range = distance <= -far_window
    else:
        in_range = (distance < far_window) & (distance > -far_window)
    return in_range
