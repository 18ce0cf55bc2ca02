"""The kernels of attention for few queries and many keys: decoding, and chunks of a prompt, from caches and pages.

A program serves the queries of all heads that share a key head, so that a key is read once for them: row r of its tile
is query r // group of head r % group, of `group` heads. And it serves one split of the keys, so that a few queries keep
a whole GPU reading; what the splits give is combined by a second kernel.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, Dv that of values,
R rotary dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_cache_parts import (
    load_rotated,
    origin_of,
    positions_from,
    row_offsets,
    split_of_keys,
)
from ropewalk.ops.attention.triton_softmax import saturate
from ropewalk.ops.attention.triton_tiles import wide

# What differs from call to call, and must not make another binary.
VARYING = (
    "q_strides",
    "k_strides",
    "v_strides",
    "out_strides",
    "key_lengths_ptr",
    "key_starts_ptr",
    "query_starts_ptr",
    "block_table",
    "rotation",
    "past_rotation",
    "key_rotation",
    "far_key_rotation",
    "mask",
    "mask_rows",
    "positions_q",
    "positions_k",
    "parameters",
    "window",
    "far_window",
    "n_queries",
    "n_keys",
    "n_pages",
    "n_splits",
    "smallest_split",
)


@triton.jit
def _after(n_start, jump_at, jump, JUMPS: tl.constexpr):
    """Where a walk stands: from `jump_at` on, further by `jump`."""
    if JUMPS:
        n_start = tl.where(n_start >= jump_at, n_start + jump, n_start)
    return n_start


@triton.jit
def _load_page(block_table, n_start, past_key, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile's keys, or of each of them, as the table has it; 0 for those that do not exist."""
    table_ptr, table_stride_page = block_table
    n = n_start
    if PAGE < BLOCK_N:
        n = n_start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + wide(n // PAGE) * table_stride_page, n < past_key, other=0)


@triton.jit
def _attend_keys(
    state, queries, place, query_position, steps, start, jump_at, jump, bounds, keys, values, block_table, n_pages,
    batch, positions_k, origin, key_start, parameters_ptr, scale, factor, softcap, window, key_rotation, mask, D:
    tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, R:
    tl.constexpr, ROTARY_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    SPREAD: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_STARTS: tl.constexpr, CLOSE: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys to a tile's running output, maximum (in base 2) and sum, `steps` of them from `start` on.

    If MASKED, which keys exist and are attended is asked for each, and at `jump_at` the walk jumps.
    """
    out, row_max, row_sum = state
    k_ptr, k_strides = keys
    v_ptr, v_strides = values
    first_key, past_key = bounds  # what lies outside is not loaded
    offset = tl.arange(0, BLOCK_N)
    feature = tl.arange(0, BLOCK_D)[None, :]
    feature_v = tl.arange(0, BLOCK_DV)[None, :]
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    page = batch
    if block_table is not None:
        page = _load_page(block_table, _after(start, jump_at, jump, MASKED), past_key, PAGE, BLOCK_N)
    # Loads ahead would keep tiles of cos, sin and pairs' other halves in shared memory, which has no room for them.
    STAGES: tl.constexpr = None if key_rotation is None else 1
    for step in tl.range(0, steps, BLOCK_N, num_stages=STAGES):
        n_start = _after(start + step, jump_at, jump, MASKED)
        n = n_start + offset
        exists = n < past_key
        if HAS_STARTS or WINDOWED:
            exists = exists & (n >= first_key)
        page_of_tile = page
        if block_table is not None:
            page_of_tile = tl.minimum(tl.maximum(page, 0), n_pages - 1)  # whatever the table holds
        if block_table is None:
            token_start = n_start
            token = offset
        elif PAGE >= BLOCK_N:  # one page holds the tile
            token_start = n_start % PAGE
            token = offset
        else:  # a tile begins where a page does
            token_start = 0
            token = offset % PAGE
        k_start = (wide(page_of_tile) * wide(k_strides[0]) + token_start * wide(k_strides[2])) * UNIT
        v_start = (wide(page_of_tile) * wide(v_strides[0]) + token_start * wide(v_strides[2])) * UNIT
        if SPREAD:
            k_step = wide(k_strides[2])
            v_step = wide(v_strides[2])
        else:
            k_step = k_strides[2]
            v_step = v_strides[2]
        k_ptrs = (k_ptr + k_start + token * k_step * UNIT)[:, None] + feature
        v_ptrs = (v_ptr + v_start + token * v_step * UNIT)[:, None] + feature_v
        if block_table is not None:  # the next tile's, so that its loads need not wait for the table
            n_next = _after(start + step + BLOCK_N, jump_at, jump, MASKED)
            page = _load_page(block_table, n_next, past_key, PAGE, BLOCK_N)
        # Zeros in place of what does not exist: zero times NaN is NaN.
        if key_rotation is not None:
            k_tile = load_rotated(
                k_ptr, k_start + token * k_step * UNIT, key_rotation, batch, n, exists, D, BLOCK_D, R, ROTARY_OFFSET,
                INTERLEAVED,
            )  # fmt: skip
        elif MASKED:
            k_tile = tl.load(k_ptrs, exists[:, None] & (feature < D), other=0.0)
        elif D == BLOCK_D:
            k_tile = tl.load(k_ptrs)
        else:
            k_tile = tl.load(k_ptrs, feature < D, other=0.0)

        scores = tl.dot(queries, k_tile.T, input_precision=PRECISION)
        if SCORE is not None or softcap is not None:
            scores = scores * scale
        if softcap is not None:
            scores = softcap * saturate(scores / softcap, False)
        if SCORE is not None:
            if CLOSE:  # all positions are indices, and the origin is the tile's first key
                ours = (query_position - n_start).to(tl.float32)
                theirs = offset.to(tl.float32)
            else:
                ours = query_position
                theirs = positions_from(positions_k, batch, n, exists, wide(n - key_start), origin)
            scores = SCORE(scores, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        if MASKED:
            ahead = n[None, :] - place[:, None]
            may = exists[None, :]
            if CAUSAL:
                may = may & (ahead <= 0)
            if WINDOWED:
                may = may & (ahead > -window)
                if not CAUSAL:
                    may = may & (ahead < window)
            if mask is not None:  # pointers to a key, the same for all rows or one for each; and from key to key
                may = may & (tl.load(mask[0] + (wide(n) * mask[1])[None, :], exists[None, :], other=0) != 0)
            scores = tl.where(may, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended nothing yet
        p = tl.exp2(scores * factor - shift[:, None])
        kept = tl.exp2(row_max - shift)
        row_sum = row_sum * kept + tl.sum(p, 1)

        if MASKED:
            v_tile = tl.load(v_ptrs, exists[:, None] & (feature_v < DV), other=0.0)
        elif DV == BLOCK_DV:
            v_tile = tl.load(v_ptrs)
        else:
            v_tile = tl.load(v_ptrs, feature_v < DV, other=0.0)
        out = tl.dot(p.to(v_tile.dtype), v_tile, out * kept[:, None], input_precision=PRECISION)
        row_max = new_max
    return out, row_max, row_sum


@triton.jit
def _attend_split(
    state, q_ptr, q_offsets, rotation, row_exists, token, place, query_position, ranges, keys, values, block_table,
    n_pages, batch, positions_k, origin, key_start, parameters_ptr, scale, factor, softcap, window, key_rotation, mask,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, R:
    tl.constexpr, ROTARY_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    SPREAD: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_STARTS: tl.constexpr, CLOSE: tl.constexpr,
    SCORE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a split's keys, with the queries rotated by one table and the keys by another."""
    start, stop, split_start, full, full_stop, split_stop = ranges
    queries = load_rotated(
        q_ptr, q_offsets, rotation, batch, token, row_exists, D, BLOCK_D, R, ROTARY_OFFSET, INTERLEAVED
    )  # fmt: skip
    bounds = (start, stop)
    if APART:
        state = _attend_keys(
            state, queries, place, query_position, full_stop - full, full, 0, 0, bounds, keys, values, block_table,
            n_pages, batch, positions_k, origin, key_start, parameters_ptr, scale, factor, softcap, window,
            key_rotation, mask, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, R, ROTARY_OFFSET, INTERLEAVED, PAGE, UNIT, SPREAD,
            CAUSAL, WINDOWED, HAS_STARTS, CLOSE, SCORE, PRECISION, False,
        )  # fmt: skip
    else:
        full = split_start
        full_stop = split_start
    return _attend_keys(
        state, queries, place, query_position, (full - split_start) + tl.maximum(split_stop - full_stop, 0),
        split_start, full, full_stop - full, bounds, keys, values, block_table, n_pages, batch, positions_k, origin,
        key_start, parameters_ptr, scale, factor, softcap, window, key_rotation, mask, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_N, R, ROTARY_OFFSET, INTERLEAVED, PAGE, UNIT, SPREAD, CAUSAL, WINDOWED, HAS_STARTS, CLOSE, SCORE,
        PRECISION, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def cache_kernel(
    q_ptr,  # (B, H, Tq, D)
    k_ptr,  # (B, K, Tk, D); or (pages, K, PAGE, D)
    v_ptr,  # with Dv for D
    out_ptr,  # (B, H, Tq, Dv); if SPLIT (B, H, Tq, n_splits, Dv), dense and float32
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums; if SPLIT (B, H, Tq, n_splits)
    q_strides,  # of batch, head and token, in UNITs; those of k and v of batch or page, head and token
    k_strides,
    v_strides,
    out_strides,
    key_lengths_ptr,  # or None
    key_starts_ptr,  # or None
    query_starts_ptr,  # or None: Tk − Tq
    block_table,  # a pointer, and the strides of batch and page; or None
    rotation,  # of q: pointers to cos and sin, and their strides of batch and token; or None
    past_rotation,  # likewise, of q as it meets far keys
    key_rotation,  # likewise, of k
    far_key_rotation,  # likewise, of far keys
    mask,  # which keys are attended: a pointer, and the strides of batch and key; or None
    mask_rows,  # its strides of head and query; None: all rows attend the same
    positions_q,  # a pointer, and the strides of batch and token; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    sinks_ptr,  # (H,), float32; or None
    scale,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    softcap,  # or None
    window,
    far_window,  # from how many places behind on a key is far; None: none is
    n_key_heads,
    group,
    n_queries,
    n_keys,
    n_pages,
    n_splits,
    smallest_split,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    SPREAD: tl.constexpr,  # whether keys of one tile may lie 2³¹ elements apart
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    SPLIT: tl.constexpr,
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with BLOCK_M rows, which share a key head, to one split of the keys.

    If APART, and there is no mask, keys that every row attends are walked unmasked, and the others after them.
    """
    # Neighbours share keys, then pages.
    n_tiles = tl.cdiv(n_queries * group, BLOCK_M)
    program = tl.program_id(0)
    tile = program % n_tiles
    program = program // n_tiles
    key_head = program % n_key_heads
    program = program // n_key_heads
    split = program % n_splits
    batch = program // n_splits

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < n_queries * group
    token = row // group
    head = key_head * group + row % group
    result = (wide(batch) * (n_key_heads * group) + head) * n_queries + token
    if SPLIT:
        result = result * n_splits + split

    HAS_STARTS: tl.constexpr = key_starts_ptr is not None
    query_start = n_keys - n_queries
    if query_starts_ptr is not None:
        query_start = tl.load(query_starts_ptr + batch).to(tl.int32)
    if key_lengths_ptr is not None:
        n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + batch).to(tl.int32))
    key_start = 0
    if HAS_STARTS:
        key_start = tl.maximum(tl.load(key_starts_ptr + batch).to(tl.int32), 0)
    first = tile * BLOCK_M // group + query_start
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, n_queries - 1) + query_start
    HAS_FAR: tl.constexpr = far_window is not None
    NEAR_WINDOWED: tl.constexpr = WINDOWED or HAS_FAR
    near_window = window
    if HAS_FAR:  # far keys are those of causal attention, of queries that stand as far back as the window is long
        far_ranges = split_of_keys(
            first - far_window, last - far_window, key_start, n_keys, window - far_window, split, n_splits,
            smallest_split, BLOCK_N, CAUSAL, WINDOWED,
        )  # fmt: skip
        near_window = far_window
        if WINDOWED:
            near_window = tl.minimum(window, far_window)
    ranges = split_of_keys(
        first, last, key_start, n_keys, near_window, split, n_splits, smallest_split, BLOCK_N, CAUSAL, NEAR_WINDOWED
    )  # fmt: skip
    if SPLIT:
        is_empty = ranges[2] >= ranges[5]
        if HAS_FAR:
            is_empty = is_empty & (far_ranges[2] >= far_ranges[5])
        if is_empty:
            tl.store(lse_ptr + result, tl.full((BLOCK_M,), float("-inf"), tl.float32), row_exists)
            return

    q_offsets = row_offsets(q_strides, batch, head, token, UNIT)
    place = token + query_start
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = origin_of(positions_k, batch)
    query_position = place
    if not CLOSE:
        query_position = positions_from(positions_q, batch, token, row_exists, wide(place - key_start), origin)
    parameters_ptr = None
    if parameters is not None:
        parameters_ptr = (parameters[0] + wide(tl.where(row_exists, head, 0)) * parameters[1])[:, None]
    if mask is not None:
        mask_ptr = mask[0] + wide(batch) * mask[1]
        if mask_rows is not None:
            of_row = wide(head) * mask_rows[0] + wide(token) * mask_rows[1]
            mask_ptr += tl.where(row_exists, of_row, 0)[:, None]
        mask = (mask_ptr, mask[2])
    if block_table is not None:
        block_table = (block_table[0] + wide(batch) * block_table[1], block_table[2])
    keys = (k_ptr + wide(key_head) * wide(k_strides[1]) * UNIT, k_strides)
    values = (v_ptr + wide(key_head) * wide(v_strides[1]) * UNIT, v_strides)

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None and not SPLIT:
        row_max = tl.load(sinks_ptr + head, row_exists, other=0.0) * 1.4426950408889634
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    state = (tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), row_max, row_sum)
    if HAS_FAR:
        state = _attend_split(
            state, q_ptr, q_offsets, past_rotation, row_exists, token, place - far_window, query_position, far_ranges,
            keys, values, block_table, n_pages, batch, positions_k, origin, key_start, parameters_ptr, scale, factor,
            softcap, window - far_window, far_key_rotation, mask, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, R, ROTARY_OFFSET,
            INTERLEAVED, PAGE, UNIT, SPREAD, CAUSAL, WINDOWED, HAS_STARTS, CLOSE, SCORE, APART, PRECISION,
        )  # fmt: skip
    sums, row_max, row_sum = _attend_split(
        state, q_ptr, q_offsets, rotation, row_exists, token, place, query_position, ranges, keys, values, block_table,
        n_pages, batch, positions_k, origin, key_start, parameters_ptr, scale, factor, softcap, near_window,
        key_rotation, mask, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, R, ROTARY_OFFSET, INTERLEAVED, PAGE, UNIT, SPREAD,
        CAUSAL, NEAR_WINDOWED, HAS_STARTS, CLOSE, SCORE, APART, PRECISION,
    )  # fmt: skip

    attends = row_sum != 0  # NaN is to be seen
    row_sum = tl.where(attends, row_sum, 1.0)
    sums = sums / row_sum[:, None]
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + result, lse, row_exists)
    feature = tl.arange(0, BLOCK_DV)[None, :]
    exists = row_exists[:, None] & (feature < DV)
    if SPLIT:
        tl.store(out_ptr + (result[:, None] * DV + feature), sums, exists)
    else:
        offsets = row_offsets(out_strides, batch, head, token, 1)
        tl.store(out_ptr + (offsets[:, None] + feature), sums.to(out_ptr.dtype.element_ty), exists)


@triton.jit(do_not_specialize=("out_strides", "n_queries", "n_splits"))
def combine_kernel(
    partial_ptr,  # (B, H, Tq, n_splits, Dv), dense, float32
    partial_lse_ptr,  # (B, H, Tq, n_splits), base 2; where it is −inf, the partial output was never written
    out_ptr,  # (B, H, Tq, Dv)
    lse_ptr,  # (B, H, Tq)
    out_strides,  # of batch, head and token
    sinks_ptr,  # (H,), float32; or None
    n_heads,
    n_queries,
    n_splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Combine what the splits of the keys gave one row."""
    row = tl.program_id(0)
    token = row % n_queries
    head = row // n_queries % n_heads
    batch = row // n_queries // n_heads
    feature = tl.arange(0, BLOCK_DV)
    running = tl.full((), float("-inf"), tl.float32)  # the maximum so far
    total = tl.full((), 0.0, tl.float32)
    if sinks_ptr is not None:
        running = tl.load(sinks_ptr + head) * 1.4426950408889634
        total = tl.where(running == float("-inf"), 0.0, 1.0)
    out = tl.zeros((BLOCK_DV,), tl.float32)
    for start in range(0, n_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        index = wide(row) * n_splits + split
        lse = tl.load(partial_lse_ptr + index, split < n_splits, other=float("-inf"))
        holds = lse > float("-inf")
        partial = tl.load(
            partial_ptr + (index[:, None] * DV + feature[None, :]), holds[:, None] & (feature < DV)[None, :], other=0.0
        )  # fmt: skip
        new_max = tl.maximum(running, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - shift)
        kept = tl.exp2(running - shift)
        total = total * kept + tl.sum(weight, 0)
        out = out * kept + tl.sum(partial * weight[:, None], 0)
        running = new_max
    attends = total != 0
    total = tl.where(attends, total, 1.0)
    lse = tl.where(attends, running + tl.log2(total), float("-inf"))
    tl.store(lse_ptr + row, lse)
    offsets = row_offsets(out_strides, batch, head, token, 1) + feature
    tl.store(out_ptr + offsets, (out / total).to(out_ptr.dtype.element_ty), feature < DV)
