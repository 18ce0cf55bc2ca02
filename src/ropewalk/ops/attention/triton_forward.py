"""The forward kernel of attention: an online softmax over the keys that a tile of queries may attend."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_tiles import (
    LENGTHS,
    key_ranges,
    load_positions,
    load_rotated_rows,
    load_rows,
    may_attend,
    store_rows,
    wide,
)


@triton.jit
def _attend_keys(
    out, row_max, row_sum, q, m, query_position, n_from, n_to, k_ptr, k_stride_token, v_ptr, v_stride_token, mask_ptr,
    mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride, parameters_ptr, scale, factor, n_queries,
    n_keys, tokens_apart, window, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr, EXPLICIT_POSITIONS: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from n_from to n_to to a tile's running output, maximum (in base 2) and sum."""
    for n_start in tl.range(n_from, n_to, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, n, k_stride_token, n_keys, D, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCORE is not None:
            key_position = load_positions(positions_k_ptr, n, positions_k_stride, n_keys, n, EXPLICIT_POSITIONS)
            scores = SCORE(scores * scale, query_position[:, None], key_position[None, :], parameters_ptr)
        if MASKED:
            may = may_attend(
                m[:, None], n[None, :], n_queries, n_keys, tokens_apart, window, mask_ptr, mask_stride_query,
                mask_stride_key, CAUSAL, WINDOWED, HAS_MASK,
            )  # fmt: skip
            scores = tl.where(may, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended nothing yet
        p = tl.exp2(scores * factor - shift[:, None])
        kept = tl.exp2(row_max - shift)
        row_sum = row_sum * kept + tl.sum(p, 1)
        v = load_rows(v_ptr, n, v_stride_token, n_keys, D, BLOCK_D, MASKED)
        out = tl.dot(p.to(v.dtype), v, out * kept[:, None], input_precision=PRECISION)
        row_max = new_max
    return out, row_max, row_sum


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr,
    k_ptr,  # its features mapped already
    v_ptr,
    out_ptr,
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    cos_ptr,  # of the queries
    sin_ptr,
    mask_ptr,
    key_lengths_ptr,
    positions_q_ptr,
    positions_k_ptr,
    parameters_ptr,
    q_stride_batch,
    q_stride_head,
    q_stride_token,
    k_stride_batch,
    k_stride_head,
    k_stride_token,
    v_stride_batch,
    v_stride_head,
    v_stride_token,
    out_stride_batch,
    out_stride_head,
    out_stride_token,
    table_stride_batch,
    table_stride_token,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_query,
    mask_stride_key,
    positions_q_stride_batch,
    positions_q_stride_token,
    positions_k_stride_batch,
    positions_k_stride_token,
    parameters_stride_head,
    scale,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    window,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,  # 0: queries are not rotated
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXPLICIT_POSITIONS: tl.constexpr,
    SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a tile of BLOCK_M queries of one head: rotate them as they are loaded, then go over the keys."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest first
    batch = tl.program_id(1) // n_heads
    head = tl.program_id(1) % n_heads
    tokens_apart = n_keys - n_queries
    if HAS_LENGTHS:
        n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + batch).to(tl.int32))
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)

    q_ptr += wide(batch) * q_stride_batch + wide(head) * q_stride_head
    k_ptr += wide(batch) * k_stride_batch + wide(head // heads_per_key) * k_stride_head
    v_ptr += wide(batch) * v_stride_batch + wide(head // heads_per_key) * v_stride_head
    out_ptr += wide(batch) * out_stride_batch + wide(head) * out_stride_head
    mask_ptr += wide(batch) * mask_stride_batch + wide(head) * mask_stride_head
    positions_q_ptr += wide(batch) * positions_q_stride_batch
    positions_k_ptr += wide(batch) * positions_k_stride_batch
    parameters_ptr += wide(head) * parameters_stride_head
    if R > 0:
        table_offset = wide(batch) * table_stride_batch
        q = load_rotated_rows(
            q_ptr, m, q_stride_token, n_queries, cos_ptr + table_offset, sin_ptr + table_offset, table_stride_token, D,
            BLOCK_D, R, INTERLEAVED,
        ).to(q_ptr.dtype.element_ty)  # fmt: skip
    else:
        q = load_rows(q_ptr, m, q_stride_token, n_queries, D, BLOCK_D, True)
    query_position = load_positions(
        positions_q_ptr, m, positions_q_stride_token, n_queries, m + tokens_apart, EXPLICIT_POSITIONS
    )

    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    start, full, full_stop, stop = key_ranges(
        m_start, n_keys, tokens_apart, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK
    )
    # Without a window, nothing comes before the full tiles.
    if WINDOWED:
        out, row_max, row_sum = _attend_keys(
            out, row_max, row_sum, q, m, query_position, start, full, k_ptr, k_stride_token, v_ptr, v_stride_token,
            mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token, parameters_ptr,
            scale, factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK,
            EXPLICIT_POSITIONS, SCORE, PRECISION, True,
        )  # fmt: skip
    if not HAS_MASK:
        out, row_max, row_sum = _attend_keys(
            out, row_max, row_sum, q, m, query_position, full, full_stop, k_ptr, k_stride_token, v_ptr, v_stride_token,
            mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token, parameters_ptr,
            scale, factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK,
            EXPLICIT_POSITIONS, SCORE, PRECISION, False,
        )  # fmt: skip
    out, row_max, row_sum = _attend_keys(
        out, row_max, row_sum, q, m, query_position, full_stop, stop, k_ptr, k_stride_token, v_ptr, v_stride_token,
        mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token, parameters_ptr, scale,
        factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK,
        EXPLICIT_POSITIONS, SCORE, PRECISION, True,
    )  # fmt: skip

    attends = row_sum > 0
    row_sum = tl.where(attends, row_sum, 1.0)
    out = tl.where(attends[:, None], out / row_sum[:, None], 0.0)
    store_rows(out_ptr, out, m, out_stride_token, n_queries, D, BLOCK_D)
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + wide(tl.program_id(1)) * n_queries + m, lse, m < n_queries)
