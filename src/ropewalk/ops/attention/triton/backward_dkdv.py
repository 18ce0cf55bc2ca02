"""The backward kernel of attention for dK and dV.

It recomputes probabilities from the forward's log-sum-exp, as the kernel for dQ does.
No program adds to the result of another one, so the result is the same every time.
A launch computes both, or one of them: of 512 features a multiprocessor has registers for one accumulator alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import (
    Blocks,
    Far,
    FarGrads,
    KeyTile,
    Lists,
    Mask,
    Masking,
    QueryStream,
    ScoreFlags,
    Scores,
    Scoring,
    Tile,
)
from ropewalk.ops.attention.triton.masking import (
    ALL,
    BITS,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    PAST,
    apply_bits,
    apply_mask,
    attended_keys,
    attention_mask,
    list_range,
    listed_token,
    lists_of_line,
    loop_index,
    loop_length,
    mask_flags,
    masked_of_loop,
    query_ranges,
    range_flags,
    range_mask,
    range_seqlens,
    slots_of_head,
)
from ropewalk.ops.attention.triton.scheduler import sequence_info, tile_of_program
from ropewalk.ops.attention.triton.softmax import (
    begin_dropout,
    cap_scores,
    differentiate_cap,
    dropout_mask,
    scale_scores,
)
from ropewalk.ops.attention.triton.tiles import (
    DO_NOT_SPECIALIZE,
    accumulate_chunks,
    dot_chunks,
    inverse_rotate,
    load_chunks,
    load_int_positions,
    load_positions,
    load_tile,
    mask_of_head,
    params_of_head,
    position_origin,
    rebase_rotation,
    relative_positions,
    store_tile,
    wide,
    zero_chunks,
    zero_missing_rows,
)


@triton.jit
def _mainloop_q(
    state, keys, q, stream, tile, tile_range, masking, scoring, flags, score_flags, blocks, MASKED: tl.constexpr
):
    """Add one head's queries to dK and dV: partial tiles of queries if MASKED, else the middle.

    Tiles are [keys, queries].
    """
    acc_dk, acc_dv = state
    scores = scoring.scores
    seqlens = masking.seqlens
    dropout = scoring.dropout
    k_index = tile.start + tl.arange(0, blocks.N)
    NONE_AHEAD: tl.constexpr = flags.INDEX_POSITIONS and flags.SIDE == PAST and not MASKED
    for step in tl.range(0, loop_length(tile_range, MASKED), blocks.M):
        q_start = loop_index(step, tile_range, MASKED)
        if masking.lists.ptr is not None:
            q_start = listed_token(q_start, masking.lists.ptr, blocks.LIST_Q)
        q_index = q_start + tl.arange(0, blocks.M)
        q_tile = load_chunks(q, tile.batch, tile.head, tile.q_offset + q_start, blocks.M, blocks.D, blocks.D_CHUNKS)
        if MASKED and flags.PACKED:  # rows of another sequence follow, and may hold anything
            q_tile = zero_missing_rows(q_tile, q_index < seqlens.n_queries, blocks.D_CHUNKS)
        # Past the last query: an infinite sum, so that p is zero. No other mask has to check for it.
        if MASKED:
            lse = tl.load(stream.lse + q_index, q_index < seqlens.n_queries, other=float("inf"))
        else:
            lse = tl.load(stream.lse + q_index)
        capped = dot_chunks(keys.k, q_tile, blocks.PRECISION, blocks.D_CHUNKS)
        capped = cap_scores(capped, scores, score_flags)
        s = capped
        if score_flags.MOD is not None:
            scaled = scale_scores(capped, scores, score_flags)
            k_pos, q_pos = relative_positions(
                keys.pos,
                scoring.positions,
                tile.batch,
                tile.q_offset,
                q_start,
                q_start + seqlens.causal_offset,
                scoring.origin,
                blocks.M,
                flags.INDEX_POSITIONS,
            )
            s = score_flags.MOD(scaled, q_pos[None, :], k_pos[:, None], scores.params, NONE_AHEAD)
        if MASKED:
            attends = attention_mask(q_index[None, :], k_index[:, None], seqlens, flags)
            attends = apply_mask(attends, q_index[None, :], k_index[:, None], seqlens, masking.mask)
            if MASKED == BITS:
                attends = apply_bits(
                    attends,
                    q_index[None, :],
                    k_index[:, None],
                    q_start,
                    tile.start,
                    seqlens.n_queries,
                    masking.lists,
                    blocks.LIST_Q,
                    blocks.LIST_K,
                )
            if flags.RANGE != ALL and not flags.INDEX_POSITIONS:
                q_pos = load_int_positions(scoring.positions, tile.batch, tile.q_offset, q_start, blocks.M)
                attends = attends & range_mask(q_pos[None, :], keys.pos[:, None], masking.far_window, flags.RANGE)
            shift = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.where(attends, tl.exp2(s * scores.exp2_scale - shift[None, :]), 0.0)
        else:
            shift = lse
            if score_flags.HIDES_KEYS:
                shift = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.exp2(s * scores.exp2_scale - shift[None, :])
        do_tile = load_tile(stream.do, tile.batch, tile.head, tile.q_offset + q_start, blocks.M, blocks.DV)
        if MASKED and flags.PACKED:
            do_tile = tl.where((q_index < seqlens.n_queries)[:, None], do_tile, 0.0)
        if blocks.HAS_DK:
            if MASKED:
                delta = tl.load(stream.delta + q_index, q_index < seqlens.n_queries, other=0.0)
            else:
                delta = tl.load(stream.delta + q_index)
        p_dropped = p
        if dropout is not None:
            stays = dropout_mask(dropout, q_index, tile.start, blocks.N, True)
            p_dropped = tl.where(stays, p, dropout.zero)
        if blocks.HAS_DV:
            acc_dv = tl.dot(p_dropped.to(do_tile.dtype), do_tile, acc_dv, input_precision=blocks.PRECISION)
        if blocks.HAS_DK:
            p = differentiate_cap(p, capped, score_flags)  # before p and capped are both needed
            dp = tl.dot(keys.v, do_tile.T, input_precision=blocks.PRECISION)
            if dropout is not None:
                dp = tl.where(stays, dp * dropout.rescale, dropout.zero)
            ds = p * (dp - delta[None, :])
            if score_flags.MOD_BWD is not None:
                ds = score_flags.MOD_BWD(ds, scaled, q_pos[None, :], k_pos[:, None], scores.params, NONE_AHEAD)
            acc_dk = accumulate_chunks(ds, q_tile, acc_dk, blocks.PRECISION, blocks.D_CHUNKS)
    return acc_dk, acc_dv


@triton.jit
def _attend_heads(
    state, keys, q, stream, tile, tile_range, masking, scoring, flags, score_flags, blocks, HAS_MIDDLE: tl.constexpr
):
    """Add the queries of all heads that share a key head."""
    for member in range(stream.heads_per_key):
        head = tile.kv_head * stream.heads_per_key + member
        row = tile.batch * stream.n_kv_heads * stream.heads_per_key + head
        row_offset = wide(row) * stream.n_queries + tile.q_offset
        dropout = None
        if scoring.dropout is not None:
            dropout = begin_dropout(scoring.dropout, row, stream.sequence if flags.PACKED else head * 0)
        of_head = Tile(tile.batch, head, tile.kv_head, tile.q_offset, tile.k_offset, tile.start)
        mask = masking.mask
        mask_ptr = mask_of_head(mask, tile.batch, head)
        mask = Mask(mask_ptr, mask.stride_batch, mask.stride_head, mask.stride_key, mask.stride_query)
        lists = masking.lists
        line = tile.start // blocks.LIST_K if lists.ptr is not None else 0
        lists_ptr = lists_of_line(lists, tile.batch, head, line)
        slots = slots_of_head(lists, tile.batch, head)
        lists = Lists(lists_ptr, None, None, None, slots, None, None, lists.slots_stride_query, lists.bits)
        head_masking = Masking(masking.seqlens, mask, masking.far_window, lists)
        scores = scoring.scores
        params = params_of_head(scores, tile.batch, head)
        scores = Scores(
            params, scores.params_stride, scores.params_stride_batch, scores.scale, scores.cap, scores.exp2_scale
        )
        head_scoring = Scoring(scores, scoring.positions, scoring.origin, dropout)
        head_stream = QueryStream(
            stream.do,
            stream.lse + row_offset,
            stream.delta + row_offset,
            stream.n_queries,
            stream.n_kv_heads,
            stream.heads_per_key,
            stream.sequence,
        )
        head_range = tile_range
        HAS_BITS: tl.constexpr = slots is not None
        for LOOP in tl.static_range(3):
            if LOOP == 1 and lists_ptr is not None:
                head_range = list_range(tile_range, lists_ptr, blocks.M, blocks.LIST_Q, True)
            if masked_of_loop(LOOP, HAS_BITS, HAS_MIDDLE, True) is not None:
                state = _mainloop_q(
                    state,
                    keys,
                    q,
                    head_stream,
                    of_head,
                    list_range(tile_range, lists_ptr, blocks.M, blocks.LIST_Q, BITS) if LOOP == 0 else head_range,
                    head_masking,
                    head_scoring,
                    flags,
                    score_flags,
                    blocks,
                    masked_of_loop(LOOP, HAS_BITS, HAS_MIDDLE, True),
                )
    return state


@triton.jit
def _attend_range(state, q, k, keys, stream, tile, masking, scoring, flags, score_flags, blocks, RANGE: tl.constexpr):
    """Add the queries of one range of pairs, as the forward does; `keys` gets its k here."""
    k_tile = load_chunks(k, tile.batch, tile.kv_head, tile.k_offset + tile.start, blocks.N, blocks.D, blocks.D_CHUNKS)
    keys = KeyTile(k_tile, keys.v, keys.pos)
    seqlens = range_seqlens(masking.seqlens, masking.far_window, flags, RANGE)
    masking = Masking(seqlens, masking.mask, masking.far_window, masking.lists)
    HAS_MIDDLE: tl.constexpr = (
        masking.mask.ptr is None and (RANGE == ALL or flags.INDEX_POSITIONS) and not blocks.ONE_LOOP
    )
    tile_range = query_ranges(tile.start, seqlens, range_flags(flags, RANGE), blocks.M, blocks.N, not HAS_MIDDLE)
    return _attend_heads(
        state,
        keys,
        q,
        stream,
        tile,
        tile_range,
        masking,
        scoring,
        range_flags(flags, RANGE),
        score_flags,
        blocks,
        HAS_MIDDLE,
    )


@triton.jit
def _finish_far(state, far_grads, tile, kv_capacity, seqlens, flags, blocks):
    """Store dK of far pairs and begin anew, or rebase its rotation for near pairs."""
    acc_dk, acc_dv = state
    k_index = tile.start + tl.arange(0, blocks.N)
    exists = ((k_index >= seqlens.kv_start) & (k_index < seqlens.n_keys))[:, None]
    if far_grads.SEPARATE:
        for chunk in tl.static_range(blocks.D_CHUNKS):
            dk_tile = tl.where(exists, acc_dk[chunk] * far_grads.factor, 0.0)
            store_tile(
                far_grads.dk,
                dk_tile,
                tile.batch,
                tile.kv_head,
                tile.k_offset,
                tile.start,
                kv_capacity,
                chunk,
                blocks.N,
                blocks.D,
                flags.PACKED,
            )
        acc_dk = zero_chunks(blocks.N, blocks.D, blocks.D_CHUNKS)
    else:
        (acc,) = acc_dk
        acc = rebase_rotation(
            acc,
            far_grads.table_k,
            far_grads.table,
            tile.batch,
            tile.k_offset + k_index,
            tile.k_offset + kv_capacity,
            blocks.N,
            blocks.D,
            far_grads.R,
            far_grads.INTERLEAVED,
        )
        acc_dk = (acc,)
    return acc_dk, acc_dv


@triton.jit
def _attend_far(state, keys, stream, far, far_grads, tile, kv_capacity, masking, scoring, flags, score_flags, blocks):
    """Add the queries of far pairs."""
    state = _attend_range(
        state, far.q_past, far.k, keys, stream, tile, masking, scoring, flags, score_flags, blocks, FAR_PAST
    )
    if far.q_future is not None:
        state = _attend_range(
            state, far.q_future, far.k, keys, stream, tile, masking, scoring, flags, score_flags, blocks, FAR_FUTURE
        )
    if blocks.HAS_DK:
        state = _finish_far(state, far_grads, tile, kv_capacity, masking.seqlens, flags, blocks)
    return state


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def backward_dkdv_kernel(
    q,  # descriptors of (B, H, Tq, D); features rotated already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    do,  # (B, H, Tq, Dv)
    dk,  # descriptors of (B, K, Tk, D or Dv), or RowTargets; or None: another launch computes it
    dk_far,  # likewise, if far gradients are separate; None: they are added to dk, by the tables
    dv,  # like dk
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    table,  # RopeTable | None, of the keys
    table_far,  # of far keys
    weights_ptr,  # (D,), multiplies the features of dk; or None
    mask,  # Mask
    lists,  # Lists, of columns
    packed,  # Packed | None
    bounds,  # Bounds
    positions_q,  # Positions | None
    positions_k,
    dropout,  # Dropout | None
    scores,  # Scores
    grad_factor,  # multiplies dk
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many positions apart are far; or None
    n_kv_heads,
    heads_per_key,
    n_queries,
    n_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    HAS_DK: tl.constexpr,  # Triton 3.6 compares no group that has a field of None
    HAS_DV: tl.constexpr,
    SEPARATE_FAR: tl.constexpr,  # far gradients are stored in targets of their own
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_K: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MOD: tl.constexpr,
    MOD_BWD: tl.constexpr,
    HIDES_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dK, dV or both of a tile of BLOCK_N keys of one key head, from all query heads that share it."""
    tile_index, batch, kv_head, sequence = tile_of_program(packed, n_keys, n_kv_heads, BLOCK_N, False)
    all_queries = n_queries
    q_offset, k_offset, kv_capacity, seqlens = sequence_info(
        sequence, packed, bounds, n_queries, n_keys, window, window_right
    )
    tile = Tile(batch, None, kv_head, q_offset, k_offset, tile_index * BLOCK_N)
    PACKED: tl.constexpr = packed is not None
    k_index = tile.start + tl.arange(0, BLOCK_N)
    v_tile = None
    if HAS_DK:
        v_tile = load_tile(v, batch, kv_head, k_offset + tile.start, BLOCK_N, BLOCK_DV)
    INDEX_POSITIONS: tl.constexpr = positions_q is None and positions_k is None
    FLAGS: tl.constexpr = mask_flags(
        PACKED,
        bounds.key_lengths,
        bounds.key_starts,
        bounds.query_starts,
        CAUSAL,
        WINDOWED,
        INDEX_POSITIONS,
        True,
    )
    seqlens = attended_keys(seqlens, FLAGS)
    origin = position_origin(positions_k, batch, k_offset)
    if far_window is not None and not INDEX_POSITIONS:
        k_pos = load_int_positions(positions_k, batch, k_offset, tile.start, BLOCK_N)
    else:
        k_pos = load_positions(positions_k, batch, k_offset, tile.start, tile.start, origin, BLOCK_N)
    keys = KeyTile(None, v_tile, k_pos)
    stream = QueryStream(do, lse_ptr, delta_ptr, all_queries, n_kv_heads, heads_per_key, sequence)
    masking = Masking(seqlens, mask, far_window, lists)
    rescale = 1.0
    if dropout is not None:
        rescale = dropout.rescale
    scoring = Scoring(scores, positions_q, origin, dropout)
    # Full tiles do not ask which keys exist.
    exists = ((k_index >= seqlens.kv_start) & (k_index < seqlens.n_keys))[:, None]
    rows = k_offset + k_index
    rows_end = k_offset + kv_capacity
    # A scalar stands for the accumulator of another launch, as loops carry no None.
    acc_dk = (0.0,)
    acc_dv = 0.0
    if HAS_DK:
        acc_dk = zero_chunks(BLOCK_N, BLOCK_D, D_CHUNKS)
    if HAS_DV:
        acc_dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    state = (acc_dk, acc_dv)
    if far_window is not None:
        state = _attend_far(
            state,
            keys,
            stream,
            Far(q_far_past, q_far_future, k_far, far_window),
            FarGrads(SEPARATE_FAR, None, None, dk_far, table, None, None, table_far, grad_factor, R, INTERLEAVED),
            tile,
            kv_capacity,
            masking,
            scoring,
            FLAGS,
            ScoreFlags(MOD, MOD_BWD, None, CAPPED, FAST_TANH, None, HIDES_KEYS),
            Blocks(
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, D_CHUNKS, PRECISION, LIST_Q, LIST_K, None, ONE_LOOP, HAS_DK, HAS_DV
            ),
        )
    acc_dk, acc_dv = _attend_range(
        state,
        q,
        k,
        keys,
        stream,
        tile,
        masking,
        scoring,
        FLAGS,
        ScoreFlags(MOD, MOD_BWD, None, CAPPED, FAST_TANH, None, HIDES_KEYS),
        Blocks(
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, D_CHUNKS, PRECISION, LIST_Q, LIST_K, None, ONE_LOOP, HAS_DK, HAS_DV
        ),
        ALL if far_window is None else NEAR,
    )

    if HAS_DV:
        dv_tile = tl.where(exists, acc_dv * rescale, 0.0)
        store_tile(dv, dv_tile, batch, kv_head, k_offset, tile.start, kv_capacity, 0, BLOCK_N, BLOCK_DV, PACKED)
    if HAS_DK:
        for chunk in tl.static_range(D_CHUNKS):
            dk_tile = tl.where(exists, acc_dk[chunk] * grad_factor, 0.0)
            if weights_ptr is not None:
                feature = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
                dk_tile *= tl.load(weights_ptr + feature, feature < D, other=0.0)[None, :]
            if table is not None:
                dk_tile = inverse_rotate(dk_tile, table, batch, rows, rows_end, BLOCK_N, BLOCK_D, R, INTERLEAVED)
            store_tile(dk, dk_tile, batch, kv_head, k_offset, tile.start, kv_capacity, chunk, BLOCK_N, BLOCK_D, PACKED)
