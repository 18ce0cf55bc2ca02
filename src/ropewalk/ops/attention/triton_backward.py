"""The backward kernels of attention: one for the gradients of keys and values, one for that of queries.

Both compute the probabilities again from the log-sum-exp that the forward left. No program adds to what another
one writes, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_sequences import (
    after_steps,
    key_ranges,
    locate_tile,
    may_attend,
    measure_sequence,
    query_ranges,
    steps_of,
)
from ropewalk.ops.attention.triton_softmax import (
    begin_drop,
    keep,
    saturate,
)
from ropewalk.ops.attention.triton_tiles import (
    UNSPECIALISED,
    add_products,
    first_position,
    keep_rows,
    load_parts,
    load_positions,
    load_tile,
    multiply_parts,
    parameters_of_head,
    positions_to_meet,
    start_of_head,
    store_tile,
    turn_back,
    wide,
    zero_parts,
)


@triton.jit
def _add_keys(
    state, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, place, mask, mask_stride_query,
    positions_k, origin, parameters_ptr, factors, drop, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr, PACKED: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr, ADJOINT: tl.constexpr,
    LEARN: tl.constexpr, SOFTCAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys give a tile of queries: both edges if MASKED, else the middle. Tiles are [queries, keys]."""
    grad_q, learned = state
    batch, key_head, k_offset = place
    scale, softcap, factor = factors
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_N):
        n_start = after_steps(step, ranges, MASKED)
        n = n_start + tl.arange(0, BLOCK_N)
        keys = load_parts(k, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_D, PARTS)
        if MASKED and (HAS_LENGTHS or HAS_STARTS):
            _, first_key, n_keys, _, _ = lengths
            exists = n < n_keys
            if HAS_STARTS:
                exists = exists & (n >= first_key)
            keys = keep_rows(keys, exists, PARTS)
        raw = multiply_parts(queries, keys, PRECISION, PARTS)
        if SOFTCAP:
            raw = saturate(raw * scale, FAST)
        scores = raw
        if SCORE is not None:
            scaled = raw * (softcap if SOFTCAP else scale)
            ours, theirs = positions_to_meet(
                query_position, positions_k, batch, k_offset, n_start, n_start, origin, BLOCK_N, CLOSE
            )  # fmt: skip
            scores = SCORE(scaled, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        p = tl.exp2(scores * factor - lse[:, None])
        values = load_tile(v, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_V)
        grad_p = tl.dot(cotangents, values.T, input_precision=PRECISION)
        if drop is not None:
            kept = keep(drop, m, n_start, BLOCK_N, False)
            grad_p = tl.where(kept, grad_p * drop[4], drop[5])
        if SOFTCAP and LEARN is None:  # before p and raw are both needed
            p *= 1 - raw * raw
        grad_scores = p * (grad_p - delta[:, None])
        if MASKED:
            may = may_attend(
                m[:, None], n[None, :], lengths, mask, mask_stride_query, HAS_LENGTHS, HAS_STARTS, CAUSAL, WINDOWED
            )  # fmt: skip
            grad_scores = tl.where(may, grad_scores, 0.0)
        if LEARN is not None:
            if PACKED:  # rows past the last query are others'
                grad_scores = tl.where((m < lengths[0])[:, None], grad_scores, 0.0)
            learned = LEARN(learned, grad_scores, scaled, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        if ADJOINT is not None:
            grad_scores = ADJOINT(grad_scores, scaled, ours[:, None], theirs[None, :], parameters_ptr, PAST)
        if SOFTCAP and LEARN is not None:
            grad_scores *= 1 - raw * raw
        grad_q = add_products(grad_scores, keys, grad_q, PRECISION, PARTS)
    return grad_q, learned


@triton.jit(do_not_specialize=UNSPECIALISED)
def queries_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    out,  # (B, H, Tq, Dv)
    grad_out,
    grad_q,  # a place to `store_tile` at
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    learned_ptr,  # (programs, LEARNED), float32: a program's part of the parameters' gradient, written here; or None
    table,  # of the queries: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    positions_q,  # a pointer, the strides of batch and token, and their number; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    drop,  # a pointer to a seed, how many steps of 1 / 65536 drop, and what makes up for it; or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,
    grad_factor,  # of the gradient of q
    window,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    LEARNED: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    LEARN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a tile of BLOCK_M queries of one head."""
    tile, batch, head, sequence = locate_tile(sequences, n_queries, n_heads, BLOCK_M, CAUSAL)
    row_offsets = wide(batch * n_heads + head) * n_queries
    q_offset, k_offset, n_queries, first_key, n_keys, _, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys
    )  # fmt: skip
    PACKED: tl.constexpr = sequences is not None
    HAS_LENGTHS: tl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: tl.constexpr = bounds[1] is not None
    key_head = head // heads_per_key
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    queries = load_parts(q, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D, PARTS)
    cotangents = load_tile(grad_out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_V)
    row_offsets += q_offset + m
    lse = tl.load(lse_ptr + row_offsets, m < n_queries, other=0.0)
    attends = lse > float("-inf")  # otherwise every p is masked, and nothing flows back
    lse = tl.where(attends, lse, 0.0)
    outputs = load_tile(out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_V)
    delta = tl.sum(outputs.to(tl.float32) * cotangents.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row_offsets, attends & (m < n_queries), other=0.0)
    tl.store(delta_ptr + row_offsets, delta, m < n_queries)
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = first_position(positions_k, batch, k_offset)
    query_position = load_positions(positions_q, batch, q_offset, m_start, m_start + tokens_apart, origin, BLOCK_M)
    parameters_ptr = None
    if mask is not None:
        mask = (start_of_head(mask, batch, head), mask[3])
    if parameters is not None:
        parameters_ptr = parameters_of_head(parameters, head)
    if drop is not None:
        drop = begin_drop(drop, batch * n_heads + head, sequence if PACKED else head * 0)

    place = (batch, key_head, k_offset)
    lengths = (n_queries, first_key, n_keys, tokens_apart, window)
    factors = (scale, softcap, factor)
    ranges = key_ranges(m_start, lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, mask is not None)
    state = (zero_parts(BLOCK_M, BLOCK_D, PARTS), tl.zeros((BLOCK_M, LEARNED), tl.float32))
    if mask is None:
        state = _add_keys(
            state, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, place, mask,
            mask_stride_query, positions_k, origin, parameters_ptr, factors, drop, BLOCK_D, BLOCK_V, BLOCK_N, PARTS,
            CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, CLOSE, SCORE, ADJOINT, LEARN, SOFTCAP, FAST, PRECISION,
            False,
        )  # fmt: skip
    sums, learned = _add_keys(
        state, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, place, mask,
        mask_stride_query, positions_k, origin, parameters_ptr, factors, drop, BLOCK_D, BLOCK_V, BLOCK_N, PARTS, CAUSAL,
        WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, CLOSE, SCORE, ADJOINT, LEARN, SOFTCAP, FAST, PRECISION, True,
    )  # fmt: skip

    if LEARN is not None:
        learned_ptr += wide(tl.program_id(0)) * LEARNED
        tl.store(learned_ptr + tl.arange(0, LEARNED), tl.sum(learned, 0))
    for part in tl.static_range(PARTS):
        grad_queries = sums[part] * grad_factor
        if table is not None:
            grad_queries = turn_back(
                grad_queries, table, batch, q_offset + m, q_offset + n_queries, BLOCK_M, BLOCK_D, R, INTERLEAVED
            )  # fmt: skip
        store_tile(grad_q, grad_queries, batch, head, q_offset, m_start, n_queries, part, BLOCK_M, BLOCK_D, PACKED)


@triton.jit
def _add_queries(
    state, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, place, lse_ptr, delta_ptr, mask,
    mask_stride_query, positions_q, origin, parameters_ptr, factors, drop, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, PACKED: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr,
    ADJOINT: tl.constexpr, SOFTCAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what queries give a tile of keys and values: those of both edges if MASKED, else the middle.

    Tiles are [keys, queries].
    """
    grad_k, grad_v = state
    batch, head, q_offset = place
    n_queries, _, _, tokens_apart, _ = lengths
    scale, softcap, factor = factors
    PAST: tl.constexpr = CLOSE and CAUSAL and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_M):
        m_start = after_steps(step, ranges, MASKED)
        m = m_start + tl.arange(0, BLOCK_M)
        queries = load_parts(q, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D, PARTS)
        if MASKED and PACKED:  # others' follow, of which nothing is known
            queries = keep_rows(queries, m < n_queries, PARTS)
        # Past the last query: an infinite sum, so that p is zero. No other mask has to ask for it.
        lse = tl.load(lse_ptr + m, m < n_queries, other=float("inf")) if MASKED else tl.load(lse_ptr + m)
        raw = multiply_parts(keys, queries, PRECISION, PARTS)
        if SOFTCAP:
            raw = saturate(raw * scale, FAST)
        scores = raw
        if SCORE is not None:
            scaled = raw * (softcap if SOFTCAP else scale)
            ours, theirs = positions_to_meet(
                key_position, positions_q, batch, q_offset, m_start, m_start + tokens_apart, origin, BLOCK_M, CLOSE
            )  # fmt: skip
            scores = SCORE(scaled, theirs[None, :], ours[:, None], parameters_ptr, PAST)
        if MASKED:
            may = may_attend(
                m[None, :], n[:, None], lengths, mask, mask_stride_query, HAS_LENGTHS, HAS_STARTS, CAUSAL, WINDOWED
            )  # fmt: skip
            shift = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.where(may, tl.exp2(scores * factor - shift[None, :]), 0.0)
        else:
            p = tl.exp2(scores * factor - lse[None, :])
        cotangents = load_tile(grad_out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_V)
        if MASKED and PACKED:
            cotangents = tl.where((m < n_queries)[:, None], cotangents, 0.0)
        delta = tl.load(delta_ptr + m, m < n_queries, other=0.0) if MASKED else tl.load(delta_ptr + m)
        kept_p = p
        if drop is not None:
            kept = keep(drop, m, n_start, BLOCK_N, True)
            kept_p = tl.where(kept, p, drop[5])
        grad_v = tl.dot(kept_p.to(cotangents.dtype), cotangents, grad_v, input_precision=PRECISION)
        if SOFTCAP:  # before p and raw are both needed
            p *= 1 - raw * raw
        grad_p = tl.dot(values, cotangents.T, input_precision=PRECISION)
        if drop is not None:
            grad_p = tl.where(kept, grad_p * drop[4], drop[5])
        grad_scores = p * (grad_p - delta[None, :])
        if ADJOINT is not None:
            grad_scores = ADJOINT(grad_scores, scaled, theirs[None, :], ours[:, None], parameters_ptr, PAST)
        grad_k = add_products(grad_scores, queries, grad_k, PRECISION, PARTS)
    return grad_k, grad_v


@triton.jit(do_not_specialize=UNSPECIALISED)
def keys_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    grad_out,  # (B, H, Tq, Dv)
    grad_k,  # places to `store_tile` at
    grad_v,
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    table,  # of the keys: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    weights_ptr,  # (D,), of their features; or None
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    positions_q,  # a pointer, the strides of batch and token, and their number; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    drop,  # a pointer to a seed, how many steps of 1 / 65536 drop, and what makes up for it; or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,
    grad_factor,  # of the gradient of k
    window,
    n_key_heads,
    heads_per_key,
    n_queries,
    n_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    ADJOINT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of BLOCK_N keys and values of one key head, from all query heads that share it."""
    tile, batch, key_head, sequence = locate_tile(sequences, n_keys, n_key_heads, BLOCK_N, False)
    all_queries = n_queries
    q_offset, k_offset, n_queries, first_key, n_keys, places, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys
    )  # fmt: skip
    PACKED: tl.constexpr = sequences is not None
    HAS_LENGTHS: tl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: tl.constexpr = bounds[1] is not None
    n_start = tile * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    keys = load_parts(k, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_D, PARTS)
    values = load_tile(v, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_V)
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = first_position(positions_k, batch, k_offset)
    key_position = load_positions(positions_k, batch, k_offset, n_start, n_start, origin, BLOCK_N)
    lengths = (n_queries, first_key, n_keys, tokens_apart, window)
    factors = (scale, softcap, factor)
    ranges = query_ranges(n_start, lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, mask is not None)

    sums = (zero_parts(BLOCK_N, BLOCK_D, PARTS), tl.zeros((BLOCK_N, BLOCK_V), tl.float32))
    makes_up = 1.0
    if drop is not None:
        makes_up = drop[2]
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        row = batch * n_key_heads * heads_per_key + head
        row_offset = wide(row) * all_queries + q_offset
        place = (batch, head, q_offset)
        head_mask = None
        head_drop = None
        parameters_ptr = None
        if drop is not None:
            head_drop = begin_drop(drop, row, sequence if PACKED else head * 0)
        if mask is not None:
            head_mask = (start_of_head(mask, batch, head), mask[3])
        if parameters is not None:
            parameters_ptr = parameters_of_head(parameters, head)
        sums = _add_queries(
            sums, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, place, lse_ptr + row_offset,
            delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr, factors,
            head_drop, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
            CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION, True,
        )  # fmt: skip
        if mask is None:
            sums = _add_queries(
                sums, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, place, lse_ptr + row_offset,
                delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr, factors,
                head_drop, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
                CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION, False,
            )  # fmt: skip

    # Full tiles do not ask which keys exist.
    attended = ((n >= first_key) & (n < n_keys))[:, None]
    grad_values = tl.where(attended, sums[1] * makes_up, 0.0)
    store_tile(grad_v, grad_values, batch, key_head, k_offset, n_start, places, 0, BLOCK_N, BLOCK_V, PACKED)
    for part in tl.static_range(PARTS):
        grad_keys = tl.where(attended, sums[0][part] * grad_factor, 0.0)
        if weights_ptr is not None:
            feature = part * BLOCK_D + tl.arange(0, BLOCK_D)
            grad_keys *= tl.load(weights_ptr + feature, feature < D, other=0.0)[None, :]
        if table is not None:
            grad_keys = turn_back(
                grad_keys, table, batch, k_offset + n, k_offset + places, BLOCK_N, BLOCK_D, R, INTERLEAVED
            )  # fmt: skip
        store_tile(grad_k, grad_keys, batch, key_head, k_offset, n_start, places, part, BLOCK_N, BLOCK_D, PACKED)
