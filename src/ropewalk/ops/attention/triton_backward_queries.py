"""The backward kernel of attention that computes the gradient of queries.

Like the one for keys and values it computes the probabilities again from the log-sum-exp that the forward left. No
program adds to what another one writes, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_sequences import (
    EITHER_SIDE,
    EVERY_PAIR,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    PAST,
    after_steps,
    are_pairs,
    key_ranges,
    lengths_of_pairs,
    locate_tile,
    may_attend,
    measure_sequence,
    side_of_pairs,
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
    change_table,
    first_position,
    keep_rows,
    load_parts,
    load_positions,
    load_tile,
    load_whole_positions,
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
    positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SIDE: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr,
    ADJOINT: tl.constexpr, LEARN: tl.constexpr, SOFTCAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys give a tile of queries: both edges if MASKED, else the middle. Tiles are [queries, keys]."""
    grad_q, learned = state
    batch, key_head, k_offset = place
    scale, softcap, factor = factors
    NONE_AHEAD: tl.constexpr = CLOSE and SIDE == PAST and not MASKED
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
                query_position, positions_k, batch, k_offset, n_start, n_start, origin, BLOCK_N, CLOSE,
            )  # fmt: skip
            scores = SCORE(scaled, ours[:, None], theirs[None, :], parameters_ptr, NONE_AHEAD)
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
                m[:, None], n[None, :], lengths, mask, mask_stride_query, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED,
            )  # fmt: skip
            if PAIRS != EVERY_PAIR and not CLOSE:
                theirs = load_whole_positions(positions_k, batch, k_offset, n_start, BLOCK_N)
                may = may & are_pairs(query_position[:, None], theirs[None, :], far_window, PAIRS)
            grad_scores = tl.where(may, grad_scores, 0.0)
        if LEARN is not None:
            if PACKED:  # rows past the last query are others'
                grad_scores = tl.where((m < lengths[0])[:, None], grad_scores, 0.0)
            learned = LEARN(learned, grad_scores, scaled, ours[:, None], theirs[None, :], parameters_ptr, NONE_AHEAD)
        if ADJOINT is not None:
            grad_scores = ADJOINT(grad_scores, scaled, ours[:, None], theirs[None, :], parameters_ptr, NONE_AHEAD)
        if SOFTCAP and LEARN is not None:
            grad_scores *= 1 - raw * raw
        grad_q = add_products(grad_scores, keys, grad_q, PRECISION, PARTS)
    return grad_q, learned


@triton.jit
def _add_pairs(
    state, q, k, v, cotangents, lse, delta, place, q_offset, m_start, lengths, mask, mask_stride_query, query_position,
    positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SIDE: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, CLOSE: tl.constexpr,
    SCORE: tl.constexpr, ADJOINT: tl.constexpr, LEARN: tl.constexpr, SOFTCAP: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys give that a tile of queries meets in pairs of one kind, as the forward walks them."""
    batch, head, key_head, k_offset = place
    queries = load_parts(q, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D, PARTS)
    m = m_start + tl.arange(0, BLOCK_M)
    BY_INDEX: tl.constexpr = PAIRS == EVERY_PAIR or CLOSE
    if BY_INDEX:
        lengths = lengths_of_pairs(lengths, far_window, PAIRS, WINDOWED)
    SIDE_OF_PAIRS: tl.constexpr = side_of_pairs(PAIRS, SIDE, BY_INDEX)
    WINDOWED_PAIRS: tl.constexpr = WINDOWED or (BY_INDEX and PAIRS == NEAR)
    ranges = key_ranges(
        m_start, lengths, BLOCK_M, BLOCK_N, SIDE_OF_PAIRS, WINDOWED_PAIRS, mask is not None or not BY_INDEX,
    )  # fmt: skip
    if mask is None and BY_INDEX:
        state = _add_keys(
            state, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, (batch, key_head,
            k_offset), mask, mask_stride_query, positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D,
            BLOCK_V, BLOCK_N, PARTS, SIDE_OF_PAIRS, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, PACKED, PAIRS, CLOSE,
            SCORE, ADJOINT, LEARN, SOFTCAP, FAST, PRECISION, False,
        )  # fmt: skip
    return _add_keys(
        state, queries, cotangents, lse, delta, m, query_position, ranges, lengths, k, v, (batch, key_head, k_offset),
        mask, mask_stride_query, positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V,
        BLOCK_N, PARTS, SIDE_OF_PAIRS, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, PACKED, PAIRS, CLOSE, SCORE, ADJOINT,
        LEARN, SOFTCAP, FAST, PRECISION, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def queries_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    past,  # of queries as they meet far keys behind them, like q; or None
    future,  # of queries as they meet far keys ahead, like q; or None
    far_keys,  # like k; or None
    out,  # (B, H, Tq, Dv)
    grad_out,
    grad_q,  # a place to `store_tile` at
    grad_past,  # likewise, of gradients apart from grad_q; None: theirs are in grad_q, by the tables
    grad_future,
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    learned_ptr,  # (programs, LEARNED), float32: a program's part of the parameters' gradient, written here; or None
    table,  # of the queries: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    table_past,  # likewise, of queries as they meet far keys; or None
    table_future,
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
    far_window,  # from how many positions apart on a pair is far; None: none is
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
        sequence, sequences, bounds, n_queries, n_keys,
    )  # fmt: skip
    PACKED: tl.constexpr = sequences is not None
    HAS_LENGTHS: tl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: tl.constexpr = bounds[1] is not None
    key_head = head // heads_per_key
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
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
    if far_window is not None and not CLOSE:
        query_position = load_whole_positions(positions_q, batch, q_offset, m_start, BLOCK_M)
    else:
        query_position = load_positions(positions_q, batch, q_offset, m_start, m_start + tokens_apart, origin, BLOCK_M)
    parameters_ptr = None
    if mask is not None:
        mask = (start_of_head(mask, batch, head), mask[3])
    if parameters is not None:
        parameters_ptr = parameters_of_head(parameters, head)
    if drop is not None:
        drop = begin_drop(drop, batch * n_heads + head, sequence if PACKED else head * 0)

    place = (batch, head, key_head, k_offset)
    lengths = (n_queries, first_key, n_keys, tokens_apart, window)
    factors = (scale, softcap, factor)
    SIDE: tl.constexpr = PAST if CAUSAL else EITHER_SIDE
    rows = q_offset + m
    rows_end = q_offset + n_queries
    state = (zero_parts(BLOCK_M, BLOCK_D, PARTS), tl.zeros((BLOCK_M, LEARNED), tl.float32))
    if far_window is not None:
        state = _add_pairs(
            state, past, far_keys, v, cotangents, lse, delta, place, q_offset, m_start, lengths, mask,
            mask_stride_query, query_position, positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D,
            BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, FAR_PAST, CLOSE, SCORE,
            ADJOINT, LEARN, SOFTCAP, FAST, PRECISION,
        )  # fmt: skip
        if grad_past is not None:
            for part in tl.static_range(PARTS):
                grad_queries = state[0][part] * grad_factor
                store_tile(
                    grad_past, grad_queries, batch, head, q_offset, m_start, n_queries, part, BLOCK_M, BLOCK_D, PACKED,
                )  # fmt: skip
            state = (zero_parts(BLOCK_M, BLOCK_D, PARTS), state[1])
        else:
            next_table = table if future is None else table_future
            changed = change_table(
                state[0][0], table_past, next_table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED,
            )  # fmt: skip
            state = ((changed,), state[1])
        if future is not None:
            state = _add_pairs(
                state, future, far_keys, v, cotangents, lse, delta, place, q_offset, m_start, lengths, mask,
                mask_stride_query, query_position, positions_k, origin, parameters_ptr, factors, drop, far_window,
                BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, FAR_FUTURE,
                CLOSE, SCORE, ADJOINT, LEARN, SOFTCAP, FAST, PRECISION,
            )  # fmt: skip
            if grad_future is not None:
                for part in tl.static_range(PARTS):
                    grad_queries = state[0][part] * grad_factor
                    store_tile(
                        grad_future, grad_queries, batch, head, q_offset, m_start, n_queries, part, BLOCK_M, BLOCK_D,
                        PACKED,
                    )  # fmt: skip
                state = (zero_parts(BLOCK_M, BLOCK_D, PARTS), state[1])
            else:
                changed = change_table(
                    state[0][0], table_future, table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED,
                )  # fmt: skip
                state = ((changed,), state[1])
    sums, learned = _add_pairs(
        state, q, k, v, cotangents, lse, delta, place, q_offset, m_start, lengths, mask, mask_stride_query,
        query_position, positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M,
        BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, EVERY_PAIR if far_window is None else NEAR,
        CLOSE, SCORE, ADJOINT, LEARN, SOFTCAP, FAST, PRECISION,
    )  # fmt: skip

    if LEARN is not None:
        learned_ptr += wide(tl.program_id(0)) * LEARNED
        tl.store(learned_ptr + tl.arange(0, LEARNED), tl.sum(learned, 0))
    for part in tl.static_range(PARTS):
        grad_queries = sums[part] * grad_factor
        if table is not None:
            grad_queries = turn_back(
                grad_queries, table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED,
            )  # fmt: skip
        store_tile(grad_q, grad_queries, batch, head, q_offset, m_start, n_queries, part, BLOCK_M, BLOCK_D, PACKED)
