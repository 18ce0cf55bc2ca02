"""The backward kernels of attention: one for the gradients of keys and values, one for that of queries.

Both compute the probabilities again from the log-sum-exp that the forward left. No program adds to what another
one writes, so the result is the same every time.
"""

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
    query_ranges,
    start_of_head,
    steps_of,
    store_tile,
    tile_and_row,
    turn_back,
    wide,
)


@triton.jit
def _add_keys(
    grad_q, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, batch, key_head, mask,
    mask_stride_query, positions_k, origin, parameters_ptr, scale, factor, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr,
    ADJOINT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys give a tile of queries: both edges if MASKED, else the middle. Tiles are [queries, keys]."""
    n_keys = lengths[1]
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_N):
        n_start = after_steps(step, ranges, MASKED)
        n = n_start + tl.arange(0, BLOCK_N)
        keys = load_tile(k, batch, key_head, n_start, BLOCK_N, BLOCK_D)
        if MASKED and HAS_LENGTHS:
            keys = tl.where((n < n_keys)[:, None], keys, 0.0)  # zero times NaN is NaN
        raw = tl.dot(queries, keys.T, input_precision=PRECISION)
        scores = raw
        if SCORE is not None:
            ours, theirs = positions_to_meet(
                query_position, positions_k, batch, n_start, n_keys, n_start, origin, BLOCK_N, CLOSE
            )  # fmt: skip
            scores = SCORE(raw * scale, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        p = tl.exp2(scores * factor - lse[:, None])
        values = load_tile(v, batch, key_head, n_start, BLOCK_N, BLOCK_D)
        grad_p = tl.dot(cotangents, values.T, input_precision=PRECISION)
        grad_scores = p * (grad_p - delta[:, None])
        if MASKED:
            may = may_attend(m[:, None], n[None, :], lengths, mask, mask_stride_query, HAS_LENGTHS, CAUSAL, WINDOWED)
            grad_scores = tl.where(may, grad_scores, 0.0)
        if ADJOINT is not None:
            grad_scores = ADJOINT(grad_scores, raw * scale, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        grad_q = tl.dot(grad_scores.to(keys.dtype), keys, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit(do_not_specialize=UNSPECIALISED)
def queries_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,
    out,
    grad_out,
    grad_q,
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    table,  # of the queries: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    key_lengths_ptr,  # or None
    positions_q,  # a pointer, and the strides of batch and token; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    scale,
    factor,
    window,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a tile of BLOCK_M queries of one head."""
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
    cotangents = load_tile(grad_out, batch, head, m_start, BLOCK_M, BLOCK_D)
    row_offsets = wide(row) * n_queries + m
    lse = tl.load(lse_ptr + row_offsets, m < n_queries, other=0.0)
    attends = lse > float("-inf")  # otherwise every p is masked, and nothing flows back
    lse = tl.where(attends, lse, 0.0)
    outputs = load_tile(out, batch, head, m_start, BLOCK_M, BLOCK_D)
    delta = tl.sum(outputs.to(tl.float32) * cotangents.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row_offsets, attends & (m < n_queries), other=0.0)
    tl.store(delta_ptr + row_offsets, delta, m < n_queries)
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
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if mask is None:
        sums = _add_keys(
            sums, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, batch, key_head, mask,
            mask_stride_query, positions_k, origin, parameters_ptr, scale, factor, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED,
            HAS_LENGTHS, CLOSE, SCORE, ADJOINT, PRECISION, False,
        )  # fmt: skip
    sums = _add_keys(
        sums, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, batch, key_head, mask,
        mask_stride_query, positions_k, origin, parameters_ptr, scale, factor, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED,
        HAS_LENGTHS, CLOSE, SCORE, ADJOINT, PRECISION, True,
    )  # fmt: skip

    sums *= scale
    if table is not None:
        sums = turn_back(sums, table, batch, m, n_queries, BLOCK_M, BLOCK_D, R, INTERLEAVED)
    store_tile(grad_q, sums, batch, head, m_start, BLOCK_M, BLOCK_D)


@triton.jit
def _add_queries(
    state, keys, values, n, key_position, ranges, lengths, q, grad_out, batch, head, lse_ptr, delta_ptr, mask,
    mask_stride_query, positions_q, origin, parameters_ptr, scale, factor, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr,
    ADJOINT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what queries give a tile of keys and values: those of both edges if MASKED, else the middle.

    Tiles are [keys, queries].
    """
    grad_k, grad_v = state
    n_queries, _, tokens_apart, _ = lengths
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_M):
        m_start = after_steps(step, ranges, MASKED)
        m = m_start + tl.arange(0, BLOCK_M)
        queries = load_tile(q, batch, head, m_start, BLOCK_M, BLOCK_D)
        # Past the last query: an infinite sum, so that p is zero. No other mask has to ask for it.
        lse = tl.load(lse_ptr + m, m < n_queries, other=float("inf"))
        raw = tl.dot(keys, queries.T, input_precision=PRECISION)
        scores = raw
        if SCORE is not None:
            ours, theirs = positions_to_meet(
                key_position, positions_q, batch, m_start, n_queries, m_start + tokens_apart, origin, BLOCK_M, CLOSE
            )  # fmt: skip
            scores = SCORE(raw * scale, theirs[None, :], ours[:, None], parameters_ptr, PAST)
        if MASKED:
            may = may_attend(m[None, :], n[:, None], lengths, mask, mask_stride_query, HAS_LENGTHS, CAUSAL, WINDOWED)
            shift = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.where(may, tl.exp2(scores * factor - shift[None, :]), 0.0)
        else:
            p = tl.exp2(scores * factor - lse[None, :])
        cotangents = load_tile(grad_out, batch, head, m_start, BLOCK_M, BLOCK_D)
        delta = tl.load(delta_ptr + m, m < n_queries, other=0.0)
        grad_v = tl.dot(p.to(cotangents.dtype), cotangents, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(values, cotangents.T, input_precision=PRECISION)
        grad_scores = p * (grad_p - delta[None, :])
        if ADJOINT is not None:
            grad_scores = ADJOINT(grad_scores, raw * scale, theirs[None, :], ours[:, None], parameters_ptr, PAST)
        grad_k = tl.dot(grad_scores.to(queries.dtype), queries, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=UNSPECIALISED)
def keys_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,
    grad_out,
    grad_k,
    grad_v,
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    table,  # of the keys: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    weights_ptr,  # (D,), of their features; or None
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    key_lengths_ptr,  # or None
    positions_q,  # a pointer, and the strides of batch and token; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    scale,
    factor,
    window,
    n_key_heads,
    heads_per_key,
    n_queries,
    n_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of BLOCK_N keys and values of one key head, from all query heads that share it."""
    tile, row = tile_and_row(n_keys, BLOCK_N)
    batch = row // n_key_heads
    key_head = row % n_key_heads
    tokens_apart = n_keys - n_queries
    existing = n_keys
    HAS_LENGTHS: tl.constexpr = key_lengths_ptr is not None
    if HAS_LENGTHS:
        n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + batch).to(tl.int32))
    n_start = tile * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    keys = load_tile(k, batch, key_head, n_start, BLOCK_N, BLOCK_D)
    values = load_tile(v, batch, key_head, n_start, BLOCK_N, BLOCK_D)
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = first_position(positions_k, batch)
    key_position = load_positions(positions_k, batch, n_start, n_keys, n_start, origin, BLOCK_N)
    lengths = (n_queries, n_keys, tokens_apart, window)
    ranges = query_ranges(n_start, lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, mask is not None)

    sums = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_D), tl.float32))
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        row_offset = wide(batch * n_key_heads * heads_per_key + head) * n_queries
        head_mask = None
        parameters_ptr = None
        if mask is not None:
            head_mask = (start_of_head(mask, batch, head), mask[3])
        if parameters is not None:
            parameters_ptr = parameters_of_head(parameters, head)
        if CAUSAL or WINDOWED or mask is not None:
            sums = _add_queries(
                sums, keys, values, n, key_position, ranges, lengths, q, grad_out, batch, head, lse_ptr + row_offset,
                delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr, scale,
                factor, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED, HAS_LENGTHS, CLOSE, SCORE, ADJOINT, PRECISION, True,
            )  # fmt: skip
        if mask is None:
            sums = _add_queries(
                sums, keys, values, n, key_position, ranges, lengths, q, grad_out, batch, head, lse_ptr + row_offset,
                delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr, scale,
                factor, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED, HAS_LENGTHS, CLOSE, SCORE, ADJOINT, PRECISION, False,
            )  # fmt: skip

    # Full tiles do not ask which keys exist.
    attended = (n < n_keys)[:, None]
    store_tile(grad_v, tl.where(attended, sums[1], 0.0), batch, key_head, n_start, BLOCK_N, BLOCK_D)
    grad_keys = tl.where(attended, sums[0] * scale, 0.0)
    if weights_ptr is not None:
        feature = tl.arange(0, BLOCK_D)
        grad_keys *= tl.load(weights_ptr + feature, feature < D, other=0.0)[None, :]
    if table is not None:
        grad_keys = turn_back(grad_keys, table, batch, n, existing, BLOCK_N, BLOCK_D, R, INTERLEAVED)
    store_tile(grad_k, grad_keys, batch, key_head, n_start, BLOCK_N, BLOCK_D)
