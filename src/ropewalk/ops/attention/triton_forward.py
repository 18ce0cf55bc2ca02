"""The forward kernel of attention: an online softmax over the keys that a tile of queries may attend."""

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
    first_position,
    load_parts,
    load_positions,
    load_tile,
    load_whole_positions,
    multiply_parts,
    parameters_of_head,
    positions_to_meet,
    start_of_head,
    store_tile,
    wide,
)


@triton.jit
def _attend_keys(
    state, queries, m, query_position, ranges, lengths, k, v, place, mask, mask_stride_query, positions_k, origin,
    parameters_ptr, factors, drop, far_window, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, SIDE: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr, PAIRS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr, SOFTCAP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys to a tile's running output, maximum (in base 2) and sum: both edges if MASKED, else the middle."""
    out, row_max, row_sum = state
    batch, key_head, k_offset = place
    scale, softcap, factor = factors
    NONE_AHEAD: tl.constexpr = CLOSE and SIDE == PAST and not MASKED
    for step in tl.range(0, steps_of(ranges, MASKED), BLOCK_N):
        n_start = after_steps(step, ranges, MASKED)
        n = n_start + tl.arange(0, BLOCK_N)
        keys = load_parts(k, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_D, PARTS)
        scores = multiply_parts(queries, keys, PRECISION, PARTS)
        if SOFTCAP:
            scores = saturate(scores * scale, FAST)
            if SCORE is not None:
                scores *= softcap
        elif SCORE is not None:
            scores *= scale
        if SCORE is not None:
            ours, theirs = positions_to_meet(
                query_position, positions_k, batch, k_offset, n_start, n_start, origin, BLOCK_N, CLOSE,
            )  # fmt: skip
            scores = SCORE(scores, ours[:, None], theirs[None, :], parameters_ptr, NONE_AHEAD)
        if MASKED:
            may = may_attend(
                m[:, None], n[None, :], lengths, mask, mask_stride_query, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED,
            )  # fmt: skip
            if PAIRS != EVERY_PAIR and not CLOSE:
                theirs = load_whole_positions(positions_k, batch, k_offset, n_start, BLOCK_N)
                may = may & are_pairs(query_position[:, None], theirs[None, :], far_window, PAIRS)
            scores = tl.where(may, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended nothing yet
        p = tl.exp2(scores * factor - shift[:, None])
        kept = tl.exp2(row_max - shift)
        row_sum = row_sum * kept + tl.sum(p, 1)
        if drop is not None:
            p = tl.where(keep(drop, m, n_start, BLOCK_N, False), p, drop[5])
        values = load_tile(v, batch, key_head, k_offset + n_start, BLOCK_N, BLOCK_V)
        if MASKED and (HAS_LENGTHS or HAS_STARTS):
            _, first_key, n_keys, _, _ = lengths
            exists = n < n_keys
            if HAS_STARTS:
                exists = exists & (n >= first_key)
            values = tl.where(exists[:, None], values, 0.0)  # zero times NaN is NaN
        out = tl.dot(p.to(values.dtype), values, out * kept[:, None], input_precision=PRECISION)
        row_max = new_max
    return out, row_max, row_sum


@triton.jit
def _attend_pairs(
    state, q, k, v, place, q_offset, m_start, lengths, mask, mask_stride_query, query_position, positions_k, origin,
    parameters_ptr, factors, drop, far_window, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SIDE: tl.constexpr, WINDOWED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr, PAIRS: tl.constexpr, CLOSE: tl.constexpr, SCORE: tl.constexpr, SOFTCAP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add all keys that a tile of queries meets in pairs of one kind, with the features of these queries and keys.

    Far pairs are causal ones, of queries that stand as far back as the window is long; near ones are those of a sliding
    window. So nothing is chosen between scores: a tile that straddles the window's end is walked in both ways.
    """
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
        state = _attend_keys(
            state, queries, m, query_position, ranges, lengths, k, v, (batch, key_head, k_offset), mask,
            mask_stride_query, positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V,
            BLOCK_N, PARTS, SIDE_OF_PAIRS, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, PAIRS, CLOSE, SCORE, SOFTCAP, FAST,
            PRECISION, False,
        )  # fmt: skip
    return _attend_keys(
        state, queries, m, query_position, ranges, lengths, k, v, (batch, key_head, k_offset), mask, mask_stride_query,
        positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V, BLOCK_N, PARTS, SIDE_OF_PAIRS,
        WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, PAIRS, CLOSE, SCORE, SOFTCAP, FAST, PRECISION, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q,  # descriptors of (B, H, Tq, D); features mapped already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    past,  # of queries as they meet far keys behind them, like q; or None
    future,  # of queries as they meet far keys ahead, like q; or None
    far_keys,  # like k; or None
    out,  # a place to `store_tile` at, (B, H, Tq, Dv)
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    mask,  # a pointer, and the strides of batch, head and key; or None
    mask_stride_query,  # None: the mask is the same for all queries
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    positions_q,  # a pointer, the strides of batch and token, and their number; None: their index
    positions_k,
    parameters,  # a pointer, and the stride of head; or None
    sinks_ptr,  # (H,); or None
    drop,  # a pointer to a seed, how many steps of 1 / 65536 drop, and what makes up for it; or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
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
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a tile of BLOCK_M queries of one head."""
    tile, batch, head, sequence = locate_tile(sequences, n_queries, n_heads, BLOCK_M, CAUSAL)
    lse_ptr += wide(batch * n_heads + head) * n_queries
    q_offset, k_offset, n_queries, first_key, n_keys, _, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys,
    )  # fmt: skip
    PACKED: tl.constexpr = sequences is not None
    HAS_LENGTHS: tl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: tl.constexpr = bounds[1] is not None
    key_head = head // heads_per_key
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
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
    makes_up = 1.0
    if drop is not None:
        makes_up = drop[2]
        drop = begin_drop(drop, batch * n_heads + head, sequence if PACKED else head * 0)

    place = (batch, head, key_head, k_offset)
    lengths = (n_queries, first_key, n_keys, tokens_apart, window)
    factors = (scale, softcap, factor)
    SIDE: tl.constexpr = PAST if CAUSAL else EITHER_SIDE
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        row_max = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head) * 1.4426950408889634
        row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    state = (tl.zeros((BLOCK_M, BLOCK_V), tl.float32), row_max, row_sum)
    if far_window is not None:
        state = _attend_pairs(
            state, past, far_keys, v, place, q_offset, m_start, lengths, mask, mask_stride_query, query_position,
            positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS,
            SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, FAR_PAST, CLOSE, SCORE, SOFTCAP, FAST, PRECISION,
        )  # fmt: skip
        if future is not None:
            state = _attend_pairs(
                state, future, far_keys, v, place, q_offset, m_start, lengths, mask, mask_stride_query, query_position,
                positions_k, origin, parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
                PARTS, SIDE, WINDOWED, HAS_LENGTHS, HAS_STARTS, FAR_FUTURE, CLOSE, SCORE, SOFTCAP, FAST, PRECISION,
            )  # fmt: skip
    sums, row_max, row_sum = _attend_pairs(
        state, q, k, v, place, q_offset, m_start, lengths, mask, mask_stride_query, query_position, positions_k, origin,
        parameters_ptr, factors, drop, far_window, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, PARTS, SIDE, WINDOWED,
        HAS_LENGTHS, HAS_STARTS, EVERY_PAIR if far_window is None else NEAR, CLOSE, SCORE, SOFTCAP, FAST, PRECISION,
    )  # fmt: skip

    attends = row_sum != 0  # NaN is to be seen
    row_sum = tl.where(attends, row_sum, 1.0)
    sums = tl.where(attends[:, None], sums * (makes_up / row_sum)[:, None], 0.0)
    store_tile(out, sums, batch, head, q_offset, m_start, n_queries, 0, BLOCK_M, BLOCK_V, PACKED)
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + q_offset + m, lse, m < n_queries)
