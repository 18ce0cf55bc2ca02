"""The forward kernel of attention: an online softmax over the keys that a tile of queries may attend."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_tiles import (
    UNSPECIALISED,
    after_steps,
    first_position,
    key_ranges,
    load_positions,
    load_tile,
    may_attend,
    parameters_of_head,
    positions_to_meet,
    start_of_head,
    steps_of,
    store_tile,
    tile_and_row,
    wide,
)


@triton.jit
def _attend_keys(
    state, queries, m, query_position, ranges, lengths, k, v, batch, key_head, mask, mask_stride_query, positions_k,
    origin, parameters_ptr, scale, factor, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys to a tile's running output, maximum (in base 2) and sum: both edges if MASKED, else the middle."""
    out, row_max, row_sum = state
    n_keys = lengths[1]
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_N):
        n_start = after_steps(step, ranges, MASKED)
        n = n_start + tl.arange(0, BLOCK_N)
        scores = tl.dot(queries, load_tile(k, batch, key_head, n_start, BLOCK_N, BLOCK_D).T, input_precision=PRECISION)
        if SCORE is not None:
            ours, theirs = positions_to_meet(
                query_position, positions_k, batch, n_start, n_keys, n_start, origin, BLOCK_N, CLOSE
            )  # fmt: skip
            scores = SCORE(scores * scale, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        if MASKED:
            may = may_attend(m[:, None], n[None, :], lengths, mask, mask_stride_query, HAS_LENGTHS, CAUSAL, WINDOWED)
            scores = tl.where(may, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended nothing yet
        p = tl.exp2(scores * factor - shift[:, None])
        kept = tl.exp2(row_max - shift)
        row_sum = row_sum * kept + tl.sum(p, 1)
        values = load_tile(v, batch, key_head, n_start, BLOCK_N, BLOCK_D)
        if MASKED and HAS_LENGTHS:
            values = tl.where((n < n_keys)[:, None], values, 0.0)  # zero times NaN is NaN
        out = tl.dot(p.to(values.dtype), values, out * kept[:, None], input_precision=PRECISION)
        row_max = new_max
    return out, row_max, row_sum


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,
    out,
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    key_lengths_ptr,  # or None
    positions_q,  # a pointer, and the strides of batch and token; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    scale,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    window,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a tile of BLOCK_M queries of one head."""
    tile, row = tile_and_row(n_queries, BLOCK_M)
    if CAUSAL:
        tile = tl.cdiv(n_queries, BLOCK_M) - 1 - tile  # the longest first
    batch = row // n_heads
    head = row % n_heads
    key_head = head // heads_per_key
    tokens_apart = n_keys - n_queries
    HAS_LENGTHS: tl.constexpr = key_lengths_ptr is not None
    if HAS_LENGTHS:
        n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + batch).to(tl.int32))
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    queries = load_tile(q, batch, head, m_start, BLOCK_M, BLOCK_D)
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = first_position(positions_k, batch)
    query_position = load_positions(positions_q, batch, m_start, n_queries, m_start + tokens_apart, origin, BLOCK_M)
    parameters_ptr = None
    if mask is not None:
        mask = (start_of_head(mask, batch, head), mask[3])
    if parameters is not None:
        parameters_ptr = parameters_of_head(parameters, head)

    lengths = (n_queries, n_keys, tokens_apart, window)
    ranges = key_ranges(m_start, lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, mask is not None)
    state = (
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    if mask is None:
        state = _attend_keys(
            state, queries, m, query_position, ranges, lengths, k, v, batch, key_head, mask, mask_stride_query,
            positions_k, origin, parameters_ptr, scale, factor, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, HAS_LENGTHS, CLOSE,
            SCORE, PRECISION, False,
        )  # fmt: skip
    sums, row_max, row_sum = _attend_keys(
        state, queries, m, query_position, ranges, lengths, k, v, batch, key_head, mask, mask_stride_query, positions_k,
        origin, parameters_ptr, scale, factor, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, HAS_LENGTHS, CLOSE, SCORE, PRECISION,
        True,
    )  # fmt: skip

    attends = row_sum > 0
    row_sum = tl.where(attends, row_sum, 1.0)
    sums = tl.where(attends[:, None], sums / row_sum[:, None], 0.0)
    store_tile(out, sums, batch, head, m_start, BLOCK_M, BLOCK_D)
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + wide(row) * n_queries + m, lse, m < n_queries)
