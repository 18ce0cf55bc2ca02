"""The backward kernel of attention for dQ, and for what a score function learns.

It recomputes probabilities from the forward's log-sum-exp, as the kernel for dK and dV does.
No program adds to the result of another one, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import (
    Blocks,
    Far,
    FarGrads,
    Lists,
    Mask,
    Masking,
    QueryTile,
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
    key_ranges,
    list_range,
    listed_token,
    lists_of_line,
    loop_index,
    loop_length,
    mask_flags,
    masked_of_loop,
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
    differentiate_gate,
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
def _mainloop_kv(
    state, queries, k, v, tile, tile_range, masking, scoring, flags, score_flags, blocks, MASKED: tl.constexpr
):
    """Add dS·K to dQ, over partial tiles of keys if MASKED, else over the middle. Tiles are [queries, keys]."""
    acc_dq, grad_params = state
    scores = scoring.scores
    seqlens = masking.seqlens
    dropout = scoring.dropout
    q_index = tile.start + tl.arange(0, blocks.M)
    NONE_AHEAD: tl.constexpr = flags.INDEX_POSITIONS and flags.SIDE == PAST and not MASKED
    for step in tl.range(0, loop_length(tile_range, MASKED), blocks.N):
        k_start = loop_index(step, tile_range, MASKED)
        if masking.lists.ptr is not None:
            k_start = listed_token(k_start, masking.lists.ptr, blocks.LIST_K)
        k_index = k_start + tl.arange(0, blocks.N)
        k_tile = load_chunks(k, tile.batch, tile.kv_head, tile.k_offset + k_start, blocks.N, blocks.D, blocks.D_CHUNKS)
        if MASKED and (flags.HAS_LENGTHS or flags.HAS_STARTS):
            exists = k_index < seqlens.n_keys
            if flags.HAS_STARTS:
                exists = exists & (k_index >= seqlens.kv_start)
            k_tile = zero_missing_rows(k_tile, exists, blocks.D_CHUNKS)
        capped = dot_chunks(queries.q, k_tile, blocks.PRECISION, blocks.D_CHUNKS)
        capped = cap_scores(capped, scores, score_flags)
        s = capped
        if score_flags.MOD is not None:
            scaled = scale_scores(capped, scores, score_flags)
            q_pos, k_pos = relative_positions(
                queries.pos,
                scoring.positions,
                tile.batch,
                tile.k_offset,
                k_start,
                k_start,
                scoring.origin,
                blocks.N,
                flags.INDEX_POSITIONS,
            )
            s = score_flags.MOD(scaled, q_pos[:, None], k_pos[None, :], scores.params, NONE_AHEAD)
        p = tl.exp2(s * scores.exp2_scale - queries.lse[:, None])
        v_tile = load_tile(v, tile.batch, tile.kv_head, tile.k_offset + k_start, blocks.N, blocks.DV)
        dp = tl.dot(queries.do, v_tile.T, input_precision=blocks.PRECISION)
        if dropout is not None:
            stays = dropout_mask(dropout, q_index, k_start, blocks.N, False)
            dp = tl.where(stays, dp * dropout.rescale, dropout.zero)
        if score_flags.PARAM_GRAD is None:  # before p and capped are both needed
            p = differentiate_cap(p, capped, score_flags)
        ds = p * (dp - queries.delta[:, None])
        if MASKED:
            attends = attention_mask(q_index[:, None], k_index[None, :], seqlens, flags)
            attends = apply_mask(attends, q_index[:, None], k_index[None, :], seqlens, masking.mask)
            if MASKED == BITS:
                attends = apply_bits(
                    attends,
                    q_index[:, None],
                    k_index[None, :],
                    tile.start,
                    k_start,
                    seqlens.n_queries,
                    masking.lists,
                    blocks.LIST_Q,
                    blocks.LIST_K,
                )
            if flags.RANGE != ALL and not flags.INDEX_POSITIONS:
                k_pos = load_int_positions(scoring.positions, tile.batch, tile.k_offset, k_start, blocks.N)
                attends = attends & range_mask(queries.pos[:, None], k_pos[None, :], masking.far_window, flags.RANGE)
            ds = tl.where(attends, ds, 0.0)
        if score_flags.PARAM_GRAD is not None:
            if flags.PACKED:  # rows past the last query belong to another sequence
                ds = tl.where((q_index < seqlens.n_queries)[:, None], ds, 0.0)
            grad_params = score_flags.PARAM_GRAD(
                grad_params, ds, scaled, q_pos[:, None], k_pos[None, :], scores.params, NONE_AHEAD
            )
        if score_flags.MOD_BWD is not None:
            ds = score_flags.MOD_BWD(ds, scaled, q_pos[:, None], k_pos[None, :], scores.params, NONE_AHEAD)
        if score_flags.CAPPED and score_flags.PARAM_GRAD is not None:
            ds = differentiate_cap(ds, capped, score_flags)
            if MASKED:  # a row that attends nothing may hold NaN
                ds = tl.where(attends, ds, 0.0)
        acc_dq = accumulate_chunks(ds, k_tile, acc_dq, blocks.PRECISION, blocks.D_CHUNKS)
    return acc_dq, grad_params


@triton.jit
def _attend_range(state, q, queries, k, v, tile, masking, scoring, flags, score_flags, blocks, RANGE: tl.constexpr):
    """Add the keys of one range of pairs, as the forward does; `queries` gets its q here."""
    q_tile = load_chunks(q, tile.batch, tile.head, tile.q_offset + tile.start, blocks.M, blocks.D, blocks.D_CHUNKS)
    queries = QueryTile(q_tile, queries.pos, queries.do, queries.lse, queries.delta)
    seqlens = range_seqlens(masking.seqlens, masking.far_window, flags, RANGE)
    masking = Masking(seqlens, masking.mask, masking.far_window, masking.lists)
    HAS_MIDDLE: tl.constexpr = (
        masking.mask.ptr is None and (RANGE == ALL or flags.INDEX_POSITIONS) and not blocks.ONE_LOOP
    )
    tile_range = key_ranges(tile.start, seqlens, range_flags(flags, RANGE), blocks.M, blocks.N, not HAS_MIDDLE)
    HAS_BITS: tl.constexpr = masking.lists.slots is not None
    for LOOP in tl.static_range(3):
        if LOOP == 1 and masking.lists.ptr is not None:
            tile_range = list_range(tile_range, masking.lists.ptr, blocks.N, blocks.LIST_K, True)
        if masked_of_loop(LOOP, HAS_BITS, HAS_MIDDLE, False) is not None:
            state = _mainloop_kv(
                state,
                queries,
                k,
                v,
                tile,
                list_range(tile_range, masking.lists.ptr, blocks.N, blocks.LIST_K, BITS) if LOOP == 0 else tile_range,
                masking,
                scoring,
                range_flags(flags, RANGE),
                score_flags,
                blocks,
                masked_of_loop(LOOP, HAS_BITS, HAS_MIDDLE, False),
            )
    return state


@triton.jit
def _finish_far(state, target, old_table, new_table, far_grads, tile, n_queries, flags, blocks):
    """Store dQ of far pairs and begin anew, or rebase its rotation for the pairs that follow."""
    acc_dq, grad_params = state
    if far_grads.SEPARATE:
        for chunk in tl.static_range(blocks.D_CHUNKS):
            store_tile(
                target,
                acc_dq[chunk] * far_grads.factor,
                tile.batch,
                tile.head,
                tile.q_offset,
                tile.start,
                n_queries,
                chunk,
                blocks.M,
                blocks.D,
                flags.PACKED,
            )
        acc_dq = zero_chunks(blocks.M, blocks.D, blocks.D_CHUNKS)
    else:
        (acc,) = acc_dq
        rows = tile.q_offset + (tile.start + tl.arange(0, blocks.M))
        acc = rebase_rotation(
            acc,
            old_table,
            new_table,
            tile.batch,
            rows,
            tile.q_offset + n_queries,
            blocks.M,
            blocks.D,
            far_grads.R,
            far_grads.INTERLEAVED,
        )
        acc_dq = (acc,)
    return acc_dq, grad_params


@triton.jit
def _attend_far(state, queries, v, far, far_grads, tile, masking, scoring, flags, score_flags, blocks):
    """Add the keys of far pairs."""
    n_queries = masking.seqlens.n_queries
    state = _attend_range(
        state, far.q_past, queries, far.k, v, tile, masking, scoring, flags, score_flags, blocks, FAR_PAST
    )
    next_table = far_grads.table if far.q_future is None else far_grads.table_future
    state = _finish_far(
        state, far_grads.dq_past, far_grads.table_past, next_table, far_grads, tile, n_queries, flags, blocks
    )
    if far.q_future is not None:
        state = _attend_range(
            state, far.q_future, queries, far.k, v, tile, masking, scoring, flags, score_flags, blocks, FAR_FUTURE
        )
        state = _finish_far(
            state,
            far_grads.dq_future,
            far_grads.table_future,
            far_grads.table,
            far_grads,
            tile,
            n_queries,
            flags,
            blocks,
        )
    return state


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def backward_dq_kernel(
    q,  # descriptors of (B, H, Tq, D); features rotated already, as those of k
    k,  # (B, K, Tk, D)
    v,  # (B, K, Tk, Dv)
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    out,  # (B, H, Tq, Dv), gated if there is a gate
    do,
    dq,  # descriptor of (B, H, Tq, D), or RowTarget
    dq_far_past,  # likewise, if far gradients are separate; None: they are added to dq, by the tables
    dq_far_future,
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    gate,  # Gate
    grad_gate,  # likewise, of the gradient; written here
    do_ungated,  # like dq, (B, H, Tq, Dv), or None: the gradient of the output before the gate; written here
    param_grad_ptr,  # (programs, N_PARAMS), float32: a program's part of the parameters' gradient; or None
    table,  # RopeTable | None, of the queries
    table_far_past,  # of the queries as far keys read them
    table_far_future,
    mask,  # Mask
    lists,  # Lists, of rows
    packed,  # Packed | None
    bounds,  # Bounds
    positions_q,  # Positions | None
    positions_k,
    dropout,  # Dropout | None
    scores,  # Scores
    grad_factor,  # multiplies dq
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many positions apart are far; or None
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    N_PARAMS: tl.constexpr,
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
    PARAM_GRAD: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dQ of a tile of BLOCK_M queries of one head."""
    tile_index, batch, head, sequence = tile_of_program(packed, n_queries, n_heads, BLOCK_M, CAUSAL)
    row_offsets = wide(batch * n_heads + head) * n_queries
    q_offset, k_offset, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, window, window_right)
    tile = Tile(batch, head, head // heads_per_key, q_offset, k_offset, tile_index * BLOCK_M)
    n_queries = seqlens.n_queries
    PACKED: tl.constexpr = packed is not None
    q_index = tile.start + tl.arange(0, BLOCK_M)
    do_tile = load_tile(do, batch, head, q_offset + tile.start, BLOCK_M, BLOCK_DV)
    row_offsets += q_offset + q_index
    lse = tl.load(lse_ptr + row_offsets, q_index < n_queries, other=0.0)
    attends = lse > float("-inf")  # otherwise every p is masked, and nothing flows back
    lse = tl.where(attends, lse, 0.0)
    out_tile = load_tile(out, batch, head, q_offset + tile.start, BLOCK_M, BLOCK_DV)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if gate.ptr is not None:
        do_tile = differentiate_gate(
            out_tile,
            do_tile,
            gate,
            grad_gate,
            batch,
            head,
            q_offset + q_index,
            q_index < n_queries,
            tl.arange(0, BLOCK_DV),
        )
        store_tile(do_ungated, do_tile, batch, head, q_offset, tile.start, n_queries, 0, BLOCK_M, BLOCK_DV, PACKED)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row_offsets, attends & (q_index < n_queries), other=0.0)
    tl.store(delta_ptr + row_offsets, delta, q_index < n_queries)
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
        q_pos = load_int_positions(positions_q, batch, q_offset, tile.start, BLOCK_M)
    else:
        first = tile.start + seqlens.causal_offset
        q_pos = load_positions(positions_q, batch, q_offset, tile.start, first, origin, BLOCK_M)
    queries = QueryTile(None, q_pos, do_tile, lse, delta)
    mask_ptr = mask_of_head(mask, batch, head)
    mask = Mask(mask_ptr, mask.stride_batch, mask.stride_head, mask.stride_key, mask.stride_query)
    lists_ptr = lists_of_line(lists, batch, head, tile.start // LIST_Q if lists.ptr is not None else 0)
    slots = slots_of_head(lists, batch, head)
    lists = Lists(lists_ptr, None, None, None, slots, None, None, lists.slots_stride_query, lists.bits)
    masking = Masking(seqlens, mask, far_window, lists)
    params = params_of_head(scores, batch, head)
    scores = Scores(
        params, scores.params_stride, scores.params_stride_batch, scores.scale, scores.cap, scores.exp2_scale
    )
    if dropout is not None:
        dropout = begin_dropout(dropout, batch * n_heads + head, sequence if PACKED else head * 0)
    scoring = Scoring(scores, positions_k, origin, dropout)

    rows = q_offset + q_index
    rows_end = q_offset + n_queries
    state = (zero_chunks(BLOCK_M, BLOCK_D, D_CHUNKS), tl.zeros((BLOCK_M, N_PARAMS), tl.float32))
    if far_window is not None:
        state = _attend_far(
            state,
            queries,
            v,
            Far(q_far_past, q_far_future, k_far, far_window),
            FarGrads(
                SEPARATE_FAR,
                dq_far_past,
                dq_far_future,
                None,
                table,
                table_far_past,
                table_far_future,
                None,
                grad_factor,
                R,
                INTERLEAVED,
            ),
            tile,
            masking,
            scoring,
            FLAGS,
            ScoreFlags(MOD, MOD_BWD, PARAM_GRAD, CAPPED, FAST_TANH),
            Blocks(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, D_CHUNKS, PRECISION, LIST_Q, LIST_K, None, ONE_LOOP),
        )
    acc_dq, grad_params = _attend_range(
        state,
        q,
        queries,
        k,
        v,
        tile,
        masking,
        scoring,
        FLAGS,
        ScoreFlags(MOD, MOD_BWD, PARAM_GRAD, CAPPED, FAST_TANH),
        Blocks(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, D_CHUNKS, PRECISION, LIST_Q, LIST_K, None, ONE_LOOP),
        ALL if far_window is None else NEAR,
    )

    if PARAM_GRAD is not None:
        param_grad_ptr += wide(tl.program_id(0)) * N_PARAMS
        tl.store(param_grad_ptr + tl.arange(0, N_PARAMS), tl.sum(grad_params, 0))
    for chunk in tl.static_range(D_CHUNKS):
        dq_tile = acc_dq[chunk] * grad_factor
        if table is not None:
            dq_tile = inverse_rotate(dq_tile, table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
        store_tile(dq, dq_tile, batch, head, q_offset, tile.start, n_queries, chunk, BLOCK_M, BLOCK_D, PACKED)
