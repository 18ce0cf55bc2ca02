"""The forward kernel of attention: an online softmax over the keys that a tile of queries attends."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import (
    Blocks,
    Far,
    Lists,
    Mask,
    Masking,
    Pages,
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
from ropewalk.ops.attention.triton.quantized import (
    BLOCK,
    EXPONENT,
    GROUPS,
    describe,
    first_block,
    key_blocks,
    load_key_units,
    load_mean,
    load_query_units,
    multiply_values,
    query_rows,
    scale_products,
)
from ropewalk.ops.attention.triton.scheduler import sequence_info, tile_of_program
from ropewalk.ops.attention.triton.softmax import (
    add_first_logit,
    begin_dropout,
    begin_rows,
    cap_scores,
    dropout_mask,
    logit_factor,
    scale_logits,
    scale_scores,
)
from ropewalk.ops.attention.triton.tiles import (
    DO_NOT_SPECIALIZE,
    dot_chunks,
    load_chunks,
    load_int_positions,
    load_page_chunks,
    load_pages,
    load_positions,
    load_sigmoid,
    load_tile,
    mask_of_head,
    params_of_head,
    position_origin,
    relative_positions,
    store_tile,
    wide,
)


@triton.jit
def _mainloop_kv(
    state, queries, k, v, tile, tile_range, masking, scoring, flags, score_flags, blocks, MASKED: tl.constexpr
):
    """Add keys to a tile's O, row maxima (in base 2) and row sums: partial tiles if MASKED, else the middle.

    The fourth of the state is each row's largest score before the score function, which `logit_factor` scales; without
    MAX_LOGITS it is never read.
    """
    acc_o, row_max, row_sum, row_logit = state
    scores = scoring.scores
    seqlens = masking.seqlens
    q_index = tile.start + tl.arange(0, blocks.M)
    NONE_AHEAD: tl.constexpr = flags.INDEX_POSITIONS and flags.SIDE == PAST and not MASKED
    if masking.lists.ptr is not None:  # loaded one step ahead: the loads of tiles wait for it
        upcoming = listed_token(loop_index(0, tile_range, MASKED), masking.lists.ptr, blocks.LIST_K)
    for step in tl.range(0, loop_length(tile_range, MASKED), blocks.N):
        if masking.lists.ptr is None:
            k_start = loop_index(step, tile_range, MASKED)
        else:
            k_start = upcoming
            upcoming = listed_token(loop_index(step + blocks.N, tile_range, MASKED), masking.lists.ptr, blocks.LIST_K)
        k_index = k_start + tl.arange(0, blocks.N)
        if blocks.INT8:
            k_tile = load_chunks(k.x, tile.batch, tile.kv_head, k.offset + k_start, blocks.N, blocks.D, blocks.D_CHUNKS)
        elif blocks.PAGE_SIZE is None:
            k_tile = load_chunks(
                k, tile.batch, tile.kv_head, tile.k_offset + k_start, blocks.N, blocks.D, blocks.D_CHUNKS
            )
        else:
            k_tile = load_page_chunks(
                k,
                tile.kv_head,
                k_start,
                seqlens,
                blocks.N,
                blocks.D,
                blocks.D_CHUNKS,
                blocks.PAGE_SIZE,
                flags.HAS_STARTS,
            )
        s = dot_chunks(queries.q, k_tile, blocks.PRECISION, blocks.D_CHUNKS)
        if blocks.INT8:
            s = scale_products(s, queries, load_key_units(k.unit, k_start, blocks.N))
        if score_flags.MAX_LOGITS:
            logit = scale_logits(s, scores, score_flags)
        s = cap_scores(s, scores, score_flags)
        if score_flags.MOD is not None:
            s = scale_scores(s, scores, score_flags)
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
            s = score_flags.MOD(s, q_pos[:, None], k_pos[None, :], scores.params, NONE_AHEAD)
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
            s = tl.where(attends, s, float("-inf"))
            if score_flags.MAX_LOGITS:
                logit = tl.where(attends, logit, float("-inf"))
        if score_flags.MAX_LOGITS:
            row_logit = tl.maximum(row_logit, tl.max(logit, 1))
        tile_max = tl.max(s, 1)
        new_max = tl.maximum(row_max, tile_max * scores.exp2_scale)
        shift = new_max
        if MASKED or score_flags.HIDES_KEYS:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended nothing yet
        if blocks.FLOAT8:
            p = tl.exp2(s * scores.exp2_scale - (shift - EXPONENT)[:, None])
        else:
            p = tl.exp2(s * scores.exp2_scale - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if scoring.dropout is not None:
            stays = dropout_mask(scoring.dropout, q_index, k_start, blocks.N, False)
            p = tl.where(stays, p, scoring.dropout.zero)
        if blocks.FLOAT8:
            v_tile = v.x.load([tile.batch, tile.kv_head, 0, v.offset + k_start]).reshape(blocks.DV, blocks.N)
        elif blocks.PAGE_SIZE is None:
            v_tile = load_tile(v, tile.batch, tile.kv_head, tile.k_offset + k_start, blocks.N, blocks.DV)
        else:
            v_tile = load_pages(
                v, tile.kv_head, k_start, seqlens, 0, blocks.N, blocks.DV, blocks.PAGE_SIZE, flags.HAS_STARTS
            )
        if MASKED and (flags.HAS_LENGTHS or flags.HAS_STARTS) and not blocks.FLOAT8:
            exists = k_index < seqlens.n_keys
            if flags.HAS_STARTS:
                exists = exists & (k_index >= seqlens.kv_start)
            v_tile = tl.where(exists[:, None], v_tile, 0.0)  # zero times NaN is NaN
        if blocks.FLOAT8:
            unit = tl.load(v.unit + k_start // BLOCK)
            acc_o = acc_o * alpha[:, None] + multiply_values(p, v_tile, unit, tile_max, MASKED)
        else:
            acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o * alpha[:, None], input_precision=blocks.PRECISION)
        row_max = new_max
    return acc_o, row_max, row_sum, row_logit


@triton.jit
def _attend_range(state, q, k, v, q_pos, tile, masking, scoring, flags, score_flags, blocks, RANGE: tl.constexpr):
    """Add the keys of one range of pairs, with the features that queries and keys have in it.

    Far pairs are those of causal attention whose queries are earlier by the window, near pairs those of a sliding
    window. No score is chosen from two: a tile across the window's end is in both loops.
    """
    q_start = tile.q_offset + tile.start
    if blocks.INT8:
        q_tile = load_chunks(q.x, tile.batch, tile.head, q_start, blocks.M, blocks.D, blocks.D_CHUNKS)
        unit, shift = load_query_units(q, tile.start, masking.seqlens.n_queries, blocks.M)
        queries = QueryTile(q_tile, q_pos, None, None, None, unit, shift)
    else:
        q_tile = load_chunks(q, tile.batch, tile.head, q_start, blocks.M, blocks.D, blocks.D_CHUNKS)
        queries = QueryTile(q_tile, q_pos)
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
def _attend(state, q, k, v, far, q_pos, tile, masking, scoring, flags, score_flags, blocks):
    """Attend with a tile of queries: far pairs first, where there are any."""
    if far.window is not None:
        state = _attend_range(
            state, far.q_past, far.k, v, q_pos, tile, masking, scoring, flags, score_flags, blocks, FAR_PAST
        )
        if far.q_future is not None:
            state = _attend_range(
                state, far.q_future, far.k, v, q_pos, tile, masking, scoring, flags, score_flags, blocks, FAR_FUTURE
            )
    return _attend_range(
        state,
        q,
        k,
        v,
        q_pos,
        tile,
        masking,
        scoring,
        flags,
        score_flags,
        blocks,
        ALL if far.window is None else NEAR,
    )


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "n_key_blocks"))
def forward_kernel(
    q,  # descriptors of (B, H, Tq, D); features rotated already, as those of k
    k,  # (B, K, Tk, D); or Pages; or of 8 bits, as those of q then, (B, K, blocks · BLOCK, D)
    v,  # (B, K, Tk, Dv); or Pages; or of 8 bits, (B, K, Dv, blocks · BLOCK)
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    units,  # Units
    out,  # descriptor of (B, H, Tq, Dv), or RowTarget
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    row_logits_ptr,  # likewise: each row's largest scaled score; or None
    mask,  # Mask
    lists,  # Lists, of rows
    packed,  # Packed | None
    bounds,  # Bounds
    positions_q,  # Positions | None
    positions_k,
    gate,  # Gate
    first_logits_ptr,  # (H,), float32, of each row's softmax; or None
    dropout,  # Dropout | None
    scores,  # Scores
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many positions apart are far; or None
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    n_key_blocks,  # of a row of keys of 8 bits; or None
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    LIST_Q: tl.constexpr,
    LIST_K: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    DESCRIBES: tl.constexpr,  # operands of 8 bits, and v and out beside them, come as `RowTarget`s
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MOD: tl.constexpr,
    HIDES_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a tile of BLOCK_M queries of one head."""
    tile_index, batch, head, sequence = tile_of_program(packed, n_queries, n_heads, BLOCK_M, CAUSAL)
    row_offset = wide(batch * n_heads + head) * n_queries
    lse_ptr += row_offset
    q_offset, k_offset, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, window, window_right)
    tile = Tile(batch, head, head // heads_per_key, q_offset, k_offset, tile_index * BLOCK_M)
    q_index = tile.start + tl.arange(0, BLOCK_M)
    PACKED: tl.constexpr = packed is not None
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
    if PAGE_SIZE is not None:
        row = wide(tl.minimum(tl.maximum(sequence, 0), packed.n_sequences - 1))
        k_table, v_table = k.table + row * k.stride_row, v.table + row * v.stride_row
        k = Pages(
            k.ptr, k.stride_page, k.stride_head, k.stride_token, k.head_dim, k.n_pages, k_table, None, k.stride_column
        )
        v = Pages(
            v.ptr, v.stride_page, v.stride_head, v.stride_token, v.head_dim, v.n_pages, v_table, None, v.stride_column
        )
    INT8: tl.constexpr = units.k is not None
    FLOAT8: tl.constexpr = units.v is not None
    n_key_heads = n_heads // heads_per_key
    if DESCRIBES:
        n_rows = n_key_blocks * BLOCK
        q = describe(q, batch, n_heads, n_queries, BLOCK_M, BLOCK_D)
        k = describe(k, batch, n_key_heads, n_rows, BLOCK_N, BLOCK_D)
        if far_window is not None:
            q_far_past = describe(q_far_past, batch, n_heads, n_queries, BLOCK_M, BLOCK_D)
            if q_far_future is not None:
                q_far_future = describe(q_far_future, batch, n_heads, n_queries, BLOCK_M, BLOCK_D)
            k_far = describe(k_far, batch, n_key_heads, n_rows, BLOCK_N, BLOCK_D)
        if FLOAT8:
            v = describe(v, batch, n_key_heads, units.v_dim, BLOCK_DV, BLOCK_N)
        else:
            v = describe(v, batch, n_key_heads, n_keys, BLOCK_N, BLOCK_DV)
        if not PACKED:
            out = describe(out, batch, n_heads, n_queries, BLOCK_M, BLOCK_DV)
    if INT8:
        block = first_block(k_offset, sequence, PACKED)
        key_row = wide(batch * n_key_heads + tile.kv_head) * n_key_blocks + block
        q = query_rows(q, units.q, units.q_shift, row_offset + q_offset)
        k = key_blocks(k, units.k, key_row * GROUPS, block)
        if far_window is not None:
            q_far_past = query_rows(q_far_past, units.q_past, units.q_past_shift, row_offset + q_offset)
            if q_far_future is not None:
                q_far_future = query_rows(q_far_future, units.q_future, units.q_future_shift, row_offset + q_offset)
            k_far = key_blocks(k_far, units.k_far, key_row * GROUPS, block)
        if FLOAT8:
            v = key_blocks(v, units.v, key_row, block)
    origin = position_origin(positions_k, batch, k_offset)
    if far_window is not None and not INDEX_POSITIONS:
        q_pos = load_int_positions(positions_q, batch, q_offset, tile.start, BLOCK_M)
    else:
        first = tile.start + seqlens.causal_offset
        q_pos = load_positions(positions_q, batch, q_offset, tile.start, first, origin, BLOCK_M)
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
    rescale = 1.0
    if dropout is not None:
        rescale = dropout.rescale
        dropout = begin_dropout(dropout, batch * n_heads + head, sequence if PACKED else head * 0)
    scoring = Scoring(scores, positions_k, origin, dropout)

    zeros = tl.zeros((BLOCK_M,), tl.float32)
    row_max, row_sum = begin_rows(zeros, zeros, first_logits_ptr, head, None, 1.0, 0.0 if FLOAT8 else 1.0)
    MAX_LOGITS: tl.constexpr = row_logits_ptr is not None
    row_logit = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc_o, row_max, row_sum, row_logit = _attend(
        (tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), row_max, row_sum, row_logit),
        q,
        k,
        v,
        Far(q_far_past, q_far_future, k_far, far_window),
        q_pos,
        tile,
        masking,
        scoring,
        FLAGS,
        ScoreFlags(MOD, None, None, CAPPED, FAST_TANH, MAX_LOGITS, HIDES_KEYS),
        Blocks(
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            D_CHUNKS,
            PRECISION,
            LIST_Q,
            LIST_K,
            PAGE_SIZE,
            ONE_LOOP,
            None,
            None,
            INT8,
            FLOAT8,
        ),
    )

    if FLOAT8:
        share = row_sum  # of keys alone
        row_sum = add_first_logit(row_sum, row_max, first_logits_ptr, head, EXPONENT)
        row_max -= EXPONENT
    attends = row_sum != 0  # NaN is to be seen
    row_sum = tl.where(attends, row_sum, 1.0)
    if FLOAT8:
        n_sequences = packed.n_sequences if PACKED else None
        mean = load_mean(units, sequence, n_sequences, tile.kv_head, n_key_heads, BLOCK_DV)
        acc_o = (acc_o + share[:, None] * mean[None, :]) * (1 / row_sum)[:, None]
        acc_o = tl.where((share != 0)[:, None], acc_o, 0.0)
    else:
        acc_o = tl.where(attends[:, None], acc_o * (rescale / row_sum)[:, None], 0.0)
    if gate.ptr is not None:
        exists = q_index < seqlens.n_queries
        acc_o *= load_sigmoid(gate, batch, head, q_offset + q_index, exists, tl.arange(0, BLOCK_DV))
    store_tile(out, acc_o, batch, head, q_offset, tile.start, seqlens.n_queries, 0, BLOCK_M, BLOCK_DV, PACKED)
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + q_offset + q_index, lse, q_index < seqlens.n_queries)
    if MAX_LOGITS:
        row_logit *= logit_factor(scores, MOD, CAPPED)
        tl.store(row_logits_ptr + row_offset + q_offset + q_index, row_logit, q_index < seqlens.n_queries)
