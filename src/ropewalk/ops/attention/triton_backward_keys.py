"""The backward kernel of attention that computes the gradients of keys and values.

Like the one for queries it computes the probabilities again from the log-sum-exp that the forward left. No
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
    lengths_of_pairs,
    locate_tile,
    may_attend,
    measure_sequence,
    query_ranges,
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
def _add_queries(
    state, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, place, lse_ptr, delta_ptr, mask,
    mask_stride_query, positions_q, origin, parameters_ptr, factors, drop, far_window, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SIDE: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, PACKED: tl.constexpr,
    PAIRS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr, ADJOINT: tl.constexpr, SOFTCAP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what queries give a tile of keys and values: those of both edges if MASKED, else the middle.

    Tiles are [keys, queries].
    """
    grad_k, grad_v = state
    batch, head, q_offset = place
    n_queries, _, _, tokens_apart, _ = lengths
    scale, softcap, factor = factors
    NONE_AHEAD: tl.constexpr = CLOSE and SIDE == PAST and not MASKED
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
                key_position, positions_q, batch, q_offset, m_start, m_start + tokens_apart, origin, BLOCK_M, CLOSE,
            )  # fmt: skip
            scores = SCORE(scaled, theirs[None, :], ours[:, None], parameters_ptr, NONE_AHEAD)
        if MASKED:
            may = may_attend(
                m[None, :], n[:, None], lengths, mask, mask_stride_query, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED,
            )  # fmt: skip
            if PAIRS != EVERY_PAIR and not CLOSE:
                theirs = load_whole_positions(positions_q, batch, q_offset, m_start, BLOCK_M)
                may = may & are_pairs(theirs[None, :], key_position[:, None], far_window, PAIRS)
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
            grad_scores = ADJOINT(grad_scores, scaled, theirs[None, :], ours[:, None], parameters_ptr, NONE_AHEAD)
        grad_k = add_products(grad_scores, queries, grad_k, PRECISION, PARTS)
    return grad_k, grad_v


@triton.jit
def _add_pairs(
    sums, q, k, values, grad_out, place, lse_ptr, delta_ptr, n_start, all_queries, n_key_heads, heads_per_key, lengths,
    mask, mask_stride_query, key_position, positions_q, origin, parameters, factors, drop, sequence, far_window,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr,
    PACKED: tl.constexpr, PAIRS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr, ADJOINT: tl.constexpr,
    SOFTCAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries of all heads give that a tile of keys meets in pairs of one kind, as in the forward."""
    batch, key_head, q_offset, k_offset = place
    keys = load_parts(k, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_D, PARTS)
    n = n_start + tl.arange(0, BLOCK_N)
    BY_INDEX: tl.constexpr = PAIRS == EVERY_PAIR or CLOSE
    if BY_INDEX:
        lengths = lengths_of_pairs(lengths, far_window, PAIRS, WINDOWED)
    SIDE_OF_PAIRS: tl.constexpr = side_of_pairs(PAIRS, SIDE, BY_INDEX)
    WINDOWED_PAIRS: tl.constexpr = WINDOWED or (BY_INDEX and PAIRS == NEAR)
    ranges = query_ranges(
        n_start, lengths, BLOCK_M, BLOCK_N, SIDE_OF_PAIRS, WINDOWED_PAIRS, mask is not None or not BY_INDEX,
    )  # fmt: skip
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        row = batch * n_key_heads * heads_per_key + head
        row_offset = wide(row) * all_queries + q_offset
        head_place = (batch, head, q_offset)
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
            sums, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, head_place, lse_ptr +
            row_offset, delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr,
            factors, head_drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE_OF_PAIRS, WINDOWED_PAIRS,
            HAS_LENGTHS, HAS_STARTS, PACKED, PAIRS, CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION, True,
        )  # fmt: skip
        if mask is None and BY_INDEX:
            sums = _add_queries(
                sums, keys, values, n_start, n, key_position, ranges, lengths, q, grad_out, head_place, lse_ptr +
                row_offset, delta_ptr + row_offset, head_mask, mask_stride_query, positions_q, origin, parameters_ptr,
                factors, head_drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE_OF_PAIRS,
                WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, PACKED, PAIRS, CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION,
                False,
            )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=UNSPECIALISED)
def keys_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    past,  # of queries as they meet far keys behind them, like q; or None
    future,  # of queries as they meet far keys ahead, like q; or None
    far_keys,  # like k; or None
    grad_out,  # (B, H, Tq, Dv)
    grad_k,  # places to `store_tile` at
    grad_far,  # of gradients of far keys apart from grad_k; None: they are in grad_k, by the tables
    grad_v,
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    table,  # of the keys: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    table_far,  # likewise, of far keys; None: they are not turned
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
    far_window,  # from how many positions apart on a pair is far; None: none is
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
        sequence, sequences, bounds, n_queries, n_keys,
    )  # fmt: skip
    PACKED: tl.constexpr = sequences is not None
    HAS_LENGTHS: tl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: tl.constexpr = bounds[1] is not None
    n_start = tile * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    values = load_tile(v, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_V)
    CLOSE: tl.constexpr = positions_q is None and positions_k is None
    origin = first_position(positions_k, batch, k_offset)
    if far_window is not None and not CLOSE:
        key_position = load_whole_positions(positions_k, batch, k_offset, n_start, BLOCK_N)
    else:
        key_position = load_positions(positions_k, batch, k_offset, n_start, n_start, origin, BLOCK_N)
    lengths = (n_queries, first_key, n_keys, tokens_apart, window)
    factors = (scale, softcap, factor)
    SIDE: tl.constexpr = PAST if CAUSAL else EITHER_SIDE
    place = (batch, key_head, q_offset, k_offset)
    # Full tiles do not ask which keys exist.
    attended = ((n >= first_key) & (n < n_keys))[:, None]
    rows = k_offset + n
    rows_end = k_offset + places

    sums = (zero_parts(BLOCK_N, BLOCK_D, PARTS), tl.zeros((BLOCK_N, BLOCK_V), tl.float32))
    makes_up = 1.0
    if drop is not None:
        makes_up = drop[2]
    if far_window is not None:
        sums = _add_pairs(
            sums, past, far_keys, values, grad_out, place, lse_ptr, delta_ptr, n_start, all_queries, n_key_heads,
            heads_per_key, lengths, mask, mask_stride_query, key_position, positions_q, origin, parameters, factors,
            drop, sequence, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS,
            HAS_STARTS, PACKED, FAR_PAST, CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION,
        )  # fmt: skip
        if future is not None:
            sums = _add_pairs(
                sums, future, far_keys, values, grad_out, place, lse_ptr, delta_ptr, n_start, all_queries, n_key_heads,
                heads_per_key, lengths, mask, mask_stride_query, key_position, positions_q, origin, parameters, factors,
                drop, sequence, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS,
                HAS_STARTS, PACKED, FAR_FUTURE, CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION,
            )  # fmt: skip
        if grad_far is not None:
            for part in tl.static_range(PARTS):
                grad_keys = tl.where(attended, sums[0][part] * grad_factor, 0.0)
                store_tile(
                    grad_far, grad_keys, batch, key_head, k_offset, n_start, places, part, BLOCK_N, BLOCK_D, PACKED
                )
            sums = (zero_parts(BLOCK_N, BLOCK_D, PARTS), sums[1])
        else:
            changed = change_table(
                sums[0][0], table_far, table, batch, rows, rows_end, BLOCK_N, BLOCK_D, R, INTERLEAVED,
            )  # fmt: skip
            sums = ((changed,), sums[1])
    sums = _add_pairs(
        sums, q, k, values, grad_out, place, lse_ptr, delta_ptr, n_start, all_queries, n_key_heads, heads_per_key,
        lengths, mask, mask_stride_query, key_position, positions_q, origin, parameters, factors, drop, sequence,
        far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
        EVERY_PAIR if far_window is None else NEAR, CLOSE, SCORE, ADJOINT, SOFTCAP, FAST, PRECISION,
    )  # fmt: skip

    grad_values = tl.where(attended, sums[1] * makes_up, 0.0)
    store_tile(grad_v, grad_values, batch, key_head, k_offset, n_start, places, 0, BLOCK_N, BLOCK_V, PACKED)
    for part in tl.static_range(PARTS):
        grad_keys = tl.where(attended, sums[0][part] * grad_factor, 0.0)
        if weights_ptr is not None:
            feature = part * BLOCK_D + tl.arange(0, BLOCK_D)
            grad_keys *= tl.load(weights_ptr + feature, feature < D, other=0.0)[None, :]
        if table is not None:
            grad_keys = turn_back(
                grad_keys, table, batch, rows, rows_end, BLOCK_N, BLOCK_D, R, INTERLEAVED,
            )  # fmt: skip
        store_tile(grad_k, grad_keys, batch, key_head, k_offset, n_start, places, part, BLOCK_N, BLOCK_D, PACKED)
