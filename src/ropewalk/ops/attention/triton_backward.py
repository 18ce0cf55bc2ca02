"""The backward kernels of attention: one for the gradients of keys and values, one for that of queries.

Both compute the probabilities again from the log-sum-exp that the forward left. No program adds to what another one
writes, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_tiles import (
    LENGTHS,
    key_ranges,
    load_positions,
    load_rows,
    may_attend,
    query_ranges,
    rotate_back,
    store_rows,
    wide,
)


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    out_ptr,
    grad_out_ptr,
    grad_lse_ptr,  # (B, H, Tq), dense
    delta_ptr,  # likewise
    out_stride_batch,
    out_stride_head,
    out_stride_token,
    grad_out_stride_batch,
    grad_out_stride_head,
    grad_out_stride_token,
    n_heads,
    n_queries,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """What every score's gradient has in common with the others of its row: Σ out · grad_out − grad_lse."""
    batch = tl.program_id(1) // n_heads
    head = tl.program_id(1) % n_heads
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ptr += wide(batch) * out_stride_batch + wide(head) * out_stride_head
    grad_out_ptr += wide(batch) * grad_out_stride_batch + wide(head) * grad_out_stride_head
    out = load_rows(out_ptr, m, out_stride_token, n_queries, D, BLOCK_D, True).to(tl.float32)
    grad_out = load_rows(grad_out_ptr, m, grad_out_stride_token, n_queries, D, BLOCK_D, True).to(tl.float32)
    delta = tl.sum(out * grad_out, 1)
    row_offsets = wide(tl.program_id(1)) * n_queries + m
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + row_offsets, m < n_queries, other=0.0)
    tl.store(delta_ptr + row_offsets, delta, m < n_queries)


@triton.jit
def _add_queries(
    grad_k, grad_v, k, v, n, key_position, m_from, m_to, q_ptr, q_stride_token, grad_out_ptr, grad_out_stride_token,
    lse_ptr, delta_ptr, mask_ptr, mask_stride_query, mask_stride_key, positions_q_ptr, positions_q_stride,
    parameters_ptr, scale, factor, n_queries, n_keys, tokens_apart, window, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
    EXPLICIT_POSITIONS: tl.constexpr, SCORE: tl.constexpr, ADJOINT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries from m_from to m_to give a tile of keys and values. Tiles are [keys, queries]."""
    for m_start in tl.range(m_from, m_to, BLOCK_M):
        m = m_start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, m, q_stride_token, n_queries, D, BLOCK_D, True)
        # Past the last query: an infinite sum, so that p is zero. No other mask has to ask for it.
        lse = tl.load(lse_ptr + m, m < n_queries, other=float("inf"))
        delta = tl.load(delta_ptr + m, m < n_queries, other=0.0)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        scores = raw
        query_position = m + tokens_apart
        if SCORE is not None:
            query_position = load_positions(
                positions_q_ptr, m, positions_q_stride, n_queries, query_position, EXPLICIT_POSITIONS
            )
            scores = SCORE(raw * scale, query_position[None, :], key_position[:, None], parameters_ptr)
        if MASKED:
            may = may_attend(
                m[None, :], n[:, None], n_queries, n_keys, tokens_apart, window, mask_ptr, mask_stride_query,
                mask_stride_key, CAUSAL, WINDOWED, HAS_MASK,
            )  # fmt: skip
            shift = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.where(may, tl.exp2(scores * factor - shift[None, :]), 0.0)
        else:
            p = tl.exp2(scores * factor - lse[None, :])
        grad_out = load_rows(grad_out_ptr, m, grad_out_stride_token, n_queries, D, BLOCK_D, True)
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        grad_scores = p * (grad_p - delta[None, :])
        if ADJOINT is not None:
            grad_scores = ADJOINT(
                grad_scores, raw * scale, query_position[None, :], key_position[:, None], parameters_ptr
            )
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    q_ptr,  # features mapped already, as those of k
    k_ptr,
    v_ptr,
    grad_out_ptr,
    grad_k_ptr,
    grad_v_ptr,
    lse_ptr,
    delta_ptr,
    cos_ptr,  # of the keys
    sin_ptr,
    weights_ptr,
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
    grad_out_stride_batch,
    grad_out_stride_head,
    grad_out_stride_token,
    grad_k_stride_batch,
    grad_k_stride_head,
    grad_k_stride_token,
    grad_v_stride_batch,
    grad_v_stride_head,
    grad_v_stride_token,
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
    R: tl.constexpr,  # 0: the gradient is not rotated back here
    INTERLEAVED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXPLICIT_POSITIONS: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of BLOCK_N keys and values of one key head, from all query heads that share it."""
    batch = tl.program_id(1) // n_key_heads
    key_head = tl.program_id(1) % n_key_heads
    tokens_apart = n_keys - n_queries
    existing = n_keys
    if HAS_LENGTHS:
        n_keys = tl.minimum(n_keys, tl.load(key_lengths_ptr + batch).to(tl.int32))
    n_start = tl.program_id(0) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)

    k_ptr += wide(batch) * k_stride_batch + wide(key_head) * k_stride_head
    v_ptr += wide(batch) * v_stride_batch + wide(key_head) * v_stride_head
    q_ptr += wide(batch) * q_stride_batch
    grad_out_ptr += wide(batch) * grad_out_stride_batch
    mask_ptr += wide(batch) * mask_stride_batch
    positions_q_ptr += wide(batch) * positions_q_stride_batch
    positions_k_ptr += wide(batch) * positions_k_stride_batch
    k = load_rows(k_ptr, n, k_stride_token, n_keys, D, BLOCK_D, True)
    v = load_rows(v_ptr, n, v_stride_token, n_keys, D, BLOCK_D, True)
    key_position = load_positions(positions_k_ptr, n, positions_k_stride_token, n_keys, n, EXPLICIT_POSITIONS)
    start, full, full_stop, stop = query_ranges(
        n_start, n_queries, tokens_apart, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK
    )
    if n_start >= n_keys:  # nobody attends these
        full = start
        full_stop = start
        stop = start

    grad_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        head_q_ptr = q_ptr + wide(head) * q_stride_head
        head_grad_out_ptr = grad_out_ptr + wide(head) * grad_out_stride_head
        head_mask_ptr = mask_ptr + wide(head) * mask_stride_head
        head_parameters_ptr = parameters_ptr + wide(head) * parameters_stride_head
        row_offset = wide(batch * n_key_heads * heads_per_key + head) * n_queries
        if CAUSAL or WINDOWED or HAS_MASK:
            grad_k, grad_v = _add_queries(
                grad_k, grad_v, k, v, n, key_position, start, full, head_q_ptr, q_stride_token, head_grad_out_ptr,
                grad_out_stride_token, lse_ptr + row_offset, delta_ptr + row_offset, head_mask_ptr, mask_stride_query,
                mask_stride_key, positions_q_ptr, positions_q_stride_token, head_parameters_ptr, scale, factor,
                n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED, HAS_MASK,
                EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, True,
            )  # fmt: skip
        if not HAS_MASK:
            grad_k, grad_v = _add_queries(
                grad_k, grad_v, k, v, n, key_position, full, full_stop, head_q_ptr, q_stride_token, head_grad_out_ptr,
                grad_out_stride_token, lse_ptr + row_offset, delta_ptr + row_offset, head_mask_ptr, mask_stride_query,
                mask_stride_key, positions_q_ptr, positions_q_stride_token, head_parameters_ptr, scale, factor,
                n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED, HAS_MASK,
                EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, False,
            )  # fmt: skip
        if WINDOWED and not HAS_MASK:
            grad_k, grad_v = _add_queries(
                grad_k, grad_v, k, v, n, key_position, full_stop, stop, head_q_ptr, q_stride_token, head_grad_out_ptr,
                grad_out_stride_token, lse_ptr + row_offset, delta_ptr + row_offset, head_mask_ptr, mask_stride_query,
                mask_stride_key, positions_q_ptr, positions_q_stride_token, head_parameters_ptr, scale, factor,
                n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED, HAS_MASK,
                EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, True,
            )  # fmt: skip

    # Full tiles do not ask which keys exist.
    attended = (n < n_keys)[:, None]
    grad_k = tl.where(attended, grad_k * scale, 0.0)
    grad_v = tl.where(attended, grad_v, 0.0)
    if WEIGHTED:
        feature = tl.arange(0, BLOCK_D)
        grad_k *= tl.load(weights_ptr + feature, feature < D, other=0.0)[None, :]
    if R > 0:
        table_offset = wide(batch) * table_stride_batch
        grad_k = rotate_back(
            grad_k, n, existing, cos_ptr + table_offset, sin_ptr + table_offset, table_stride_token, BLOCK_N, BLOCK_D,
            R, INTERLEAVED,
        )  # fmt: skip
    grad_k_ptr += wide(batch) * grad_k_stride_batch + wide(key_head) * grad_k_stride_head
    grad_v_ptr += wide(batch) * grad_v_stride_batch + wide(key_head) * grad_v_stride_head
    store_rows(grad_k_ptr, grad_k, n, grad_k_stride_token, existing, D, BLOCK_D)
    store_rows(grad_v_ptr, grad_v, n, grad_v_stride_token, existing, D, BLOCK_D)


@triton.jit
def _add_keys(
    grad_q, q, grad_out, lse, delta, m, query_position, n_from, n_to, k_ptr, k_stride_token, v_ptr, v_stride_token,
    mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride, parameters_ptr, scale, factor,
    n_queries, n_keys, tokens_apart, window, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr, EXPLICIT_POSITIONS: tl.constexpr,
    SCORE: tl.constexpr, ADJOINT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the keys from n_from to n_to give a tile of queries. Tiles are [queries, keys]."""
    for n_start in tl.range(n_from, n_to, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, n, k_stride_token, n_keys, D, BLOCK_D, MASKED)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = raw
        key_position = n
        if SCORE is not None:
            key_position = load_positions(positions_k_ptr, n, positions_k_stride, n_keys, n, EXPLICIT_POSITIONS)
            scores = SCORE(raw * scale, query_position[:, None], key_position[None, :], parameters_ptr)
        p = tl.exp2(scores * factor - lse[:, None])
        if MASKED:
            may = may_attend(
                m[:, None], n[None, :], n_queries, n_keys, tokens_apart, window, mask_ptr, mask_stride_query,
                mask_stride_key, CAUSAL, WINDOWED, HAS_MASK,
            )  # fmt: skip
            p = tl.where(may, p, 0.0)
        v = load_rows(v_ptr, n, v_stride_token, n_keys, D, BLOCK_D, MASKED)
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        grad_scores = p * (grad_p - delta[:, None])
        if ADJOINT is not None:
            grad_scores = ADJOINT(
                grad_scores, raw * scale, query_position[:, None], key_position[None, :], parameters_ptr
            )
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit(do_not_specialize=LENGTHS)
def queries_kernel(
    q_ptr,  # features mapped already, as those of k
    k_ptr,
    v_ptr,
    grad_out_ptr,
    grad_q_ptr,
    lse_ptr,
    delta_ptr,
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
    grad_out_stride_batch,
    grad_out_stride_head,
    grad_out_stride_token,
    grad_q_stride_batch,
    grad_q_stride_head,
    grad_q_stride_token,
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
    factor,
    window,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,  # 0: the gradient is not rotated back here
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EXPLICIT_POSITIONS: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a tile of BLOCK_M queries of one head."""
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
    grad_out_ptr += wide(batch) * grad_out_stride_batch + wide(head) * grad_out_stride_head
    mask_ptr += wide(batch) * mask_stride_batch + wide(head) * mask_stride_head
    positions_q_ptr += wide(batch) * positions_q_stride_batch
    positions_k_ptr += wide(batch) * positions_k_stride_batch
    parameters_ptr += wide(head) * parameters_stride_head
    row_offsets = wide(tl.program_id(1)) * n_queries + m
    q = load_rows(q_ptr, m, q_stride_token, n_queries, D, BLOCK_D, True)
    grad_out = load_rows(grad_out_ptr, m, grad_out_stride_token, n_queries, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + row_offsets, m < n_queries, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # such a row attends nothing: every p is masked
    delta = tl.load(delta_ptr + row_offsets, m < n_queries, other=0.0)
    query_position = load_positions(
        positions_q_ptr, m, positions_q_stride_token, n_queries, m + tokens_apart, EXPLICIT_POSITIONS
    )

    grad_q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start, full, full_stop, stop = key_ranges(
        m_start, n_keys, tokens_apart, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, HAS_MASK
    )
    if WINDOWED:
        grad_q = _add_keys(
            grad_q, q, grad_out, lse, delta, m, query_position, start, full, k_ptr, k_stride_token, v_ptr,
            v_stride_token, mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token,
            parameters_ptr, scale, factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL,
            WINDOWED, HAS_MASK, EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, True,
        )  # fmt: skip
    if not HAS_MASK:
        grad_q = _add_keys(
            grad_q, q, grad_out, lse, delta, m, query_position, full, full_stop, k_ptr, k_stride_token, v_ptr,
            v_stride_token, mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token,
            parameters_ptr, scale, factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL,
            WINDOWED, HAS_MASK, EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, False,
        )  # fmt: skip
    grad_q = _add_keys(
        grad_q, q, grad_out, lse, delta, m, query_position, full_stop, stop, k_ptr, k_stride_token, v_ptr,
        v_stride_token, mask_ptr, mask_stride_query, mask_stride_key, positions_k_ptr, positions_k_stride_token,
        parameters_ptr, scale, factor, n_queries, n_keys, tokens_apart, window, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED,
        HAS_MASK, EXPLICIT_POSITIONS, SCORE, ADJOINT, PRECISION, True,
    )  # fmt: skip

    grad_q *= scale
    if R > 0:
        table_offset = wide(batch) * table_stride_batch
        grad_q = rotate_back(
            grad_q, m, n_queries, cos_ptr + table_offset, sin_ptr + table_offset, table_stride_token, BLOCK_M, BLOCK_D,
            R, INTERLEAVED,
        )  # fmt: skip
    grad_q_ptr += wide(batch) * grad_q_stride_batch + wide(head) * grad_q_stride_head
    store_rows(grad_q_ptr, grad_q, m, grad_q_stride_token, n_queries, D, BLOCK_D)
