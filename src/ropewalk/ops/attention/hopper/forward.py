"""The forward kernel of attention for Hopper: loads, matrix products and exponentials at the same time.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.barriers import pingpong_arrive, pingpong_sync
from ropewalk.ops.attention.hopper.dropout import drop_keys, kept_keys
from ropewalk.ops.attention.hopper.gluon_compat import (
    await_stores,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_tile,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ropewalk.ops.attention.hopper.lists import (
    LISTED,
    line_of_tile,
    make_listed_ring,
    range_positions,
    start_of_tile,
    tell_tiles,
)
from ropewalk.ops.attention.hopper.pipeline import allocate_chunks, make_ring
from ropewalk.ops.attention.hopper.scheduler import Problem, make_scheduler, next_work, work_to_tile
from ropewalk.ops.attention.hopper.scores import HeadScores, exp2_scale_of_head, load_bias, load_positions, load_slope
from ropewalk.ops.attention.hopper.softmax import TileMask, lagging_softmax, online_softmax, rescale
from ropewalk.ops.attention.hopper.tiles import WG_ROWS, store_rows, sum_in_threads, wgmma_layout, zero_missing_rows
from ropewalk.ops.attention.triton.arguments import Far, Schedule, ScoreFlags, Tile
from ropewalk.ops.attention.triton.masking import (
    ALL,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    PAST,
    attended_keys,
    key_ranges,
    mask_flags,
    range_flags,
    range_seqlens,
    slots_of_head,
)
from ropewalk.ops.attention.triton.scheduler import sequence_info
from ropewalk.ops.attention.triton.softmax import begin_dropout, begin_rows, logit_factor
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, load_sigmoid, params_of_head


class Rings(NamedTuple):
    """Tiles in shared memory."""

    q: Any
    k: Any
    v: Any
    listed: Any  # ListedRing; None without lists


class RowResults(NamedTuple):
    """Pointers to results of rows, (B, H, Tq), dense."""

    lse: Any
    logits: Any  # or None


class Options(NamedTuple):
    """Constants of the pipeline: `config.ForwardConfig`, and whether keys ahead may be far."""

    HALVES: Any
    HALF: Any  # which of them a warp is in
    CONSUMERS: Any
    BLOCK_N: Any
    OUT_IN_Q: Any
    PIN_EXP2: Any
    CONVERT_P_EARLY: Any
    PINGPONG: Any
    LAGS: Any
    HAS_FUTURE: Any


@gluon.jit
def tile_of_work(work_idx, problem, flags, BLOCK_M: gl.constexpr):
    """Return a work item's tile, and the extents of its sequence."""
    tile, batch, head, sequence = work_to_tile(work_idx, problem.packed, problem.schedule, flags.SIDE == PAST)
    q_offset, k_offset, _kv_capacity, seqlens = sequence_info(
        sequence,
        problem.packed,
        problem.bounds,
        problem.n_queries,
        problem.n_keys,
        problem.window,
        problem.window_right,
    )
    seqlens = attended_keys(seqlens, flags)
    start = tile * BLOCK_M
    if not flags.PACKED:
        sequence *= 0
    return Tile(batch, head, head // problem.schedule.heads_per_key, q_offset, k_offset, start, sequence), seqlens


@gluon.jit
def loop_over_keys(
    start, seqlens, far_window, flags, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RANGE: gl.constexpr
):
    """Return the extents for a range of pairs, the tile range of its keys, and the number of steps."""
    seqlens = range_seqlens(seqlens, far_window, flags, RANGE)
    tile_range = key_ranges(start, seqlens, range_flags(flags, RANGE), BLOCK_M, BLOCK_N, False)
    n_steps = (tile_range.stop - tile_range.start + BLOCK_N - 1) // BLOCK_N
    if flags.PACKED:
        n_steps = gl.where(start < seqlens.n_queries, n_steps, 0)  # the schedule has room for more tiles than there are
    return seqlens, tile_range, n_steps


@gluon.constexpr_function
def holds_q(OUT_IN_Q, RANGE):
    """Say whether a loop leaves its queries' memory to the output: then they are loaded also where it has no step."""
    return OUT_IN_Q and (RANGE == ALL or RANGE == NEAR)  # noqa: SIM109


@gluon.jit
def fill_q(q_use, q, rings, tile, options):
    """Load the queries of all compute warp groups; return the next use of their ring."""
    for consumer in gl.static_range(options.CONSUMERS):
        rings.q.fill(q_use, q, [tile.batch, tile.head, tile.q_offset + tile.start + consumer * WG_ROWS, 0])
        q_use += 1
    return q_use


@gluon.jit
def row_of_tile(index, start, tiles, line, tile, lists, BLOCK_N: gl.constexpr):
    """Return the row of a tile's first key, given the loop's first key, which does not matter with lists."""
    if lists.ptr is None:
        start += index * BLOCK_N
    else:
        start = start_of_tile(gl.maximum(index, 0), tiles, line, BLOCK_N, lists.slots is not None)
    return tile.k_offset + start


@gluon.jit
def _load_loop(uses, q, k, v, rings, tile, seqlens, problem, flags, options, RANGE: gl.constexpr):
    """Load queries, and keys one tile ahead of values, from the last tile back; return the uses of the rings."""
    q_use, use, listed_use = uses
    lists = problem.lists
    BLOCK_N: gl.constexpr = options.BLOCK_N
    _, tile_range, n_steps = loop_over_keys(
        tile.start, seqlens, problem.far_window, flags, options.CONSUMERS * WG_ROWS, BLOCK_N, RANGE
    )
    line = line_of_tile(problem, tile, tile.head, tile.q_offset, seqlens.n_queries, RANGE)
    tiles = None
    if lists.ptr is not None:
        tiles = tell_tiles(rings.listed, listed_use, tile_range, line, BLOCK_N, lists.slots is not None)
        listed_use += 1
        n_steps = tiles.count + tiles.n_partial
    if holds_q(options.OUT_IN_Q, RANGE):
        q_use = fill_q(q_use, q, rings, tile, options)
    if n_steps > 0:
        if not holds_q(options.OUT_IN_Q, RANGE):
            q_use = fill_q(q_use, q, rings, tile, options)
        start = tile_range.start
        batch, head = tile.batch, tile.kv_head
        row = row_of_tile(n_steps - 1, start, tiles, line, tile, lists, BLOCK_N)
        upcoming = row_of_tile(n_steps - 2, start, tiles, line, tile, lists, BLOCK_N)
        rings.k.fill(use, k, [batch, head, row, 0])
        for step in range(1, n_steps):
            # A row of lists is read a step before it is needed.
            later = row_of_tile(n_steps - 2 - step, start, tiles, line, tile, lists, BLOCK_N)
            rings.k.fill(use + 1, k, [batch, head, upcoming, 0])
            rings.v.fill(use, v, [batch, head, row, 0])
            row = upcoming
            upcoming = later
            use += 1
        rings.v.fill(use, v, [batch, head, row, 0])
        use += 1
    return q_use, use, listed_use


@gluon.jit
def _load_warp(q, k, v, far, counter_ptr, scheduler, rings, problem, flags, options):
    """Take work items, and load the tiles of each."""
    n_work = problem.n_work
    n_done = 0
    uses = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    work_idx = gl.program_id(0)
    if options.HALF > 0:
        work_idx += gl.num_programs(0) * options.HALF
    while work_idx < n_work:
        scheduler.publish(n_done, work_idx)
        n_done += 1
        tile, seqlens = tile_of_work(work_idx, problem, flags, options.CONSUMERS * WG_ROWS)
        if problem.far_window is not None:
            uses = _load_loop(uses, far.q_past, far.k, v, rings, tile, seqlens, problem, flags, options, FAR_PAST)
            if options.HAS_FUTURE:
                uses = _load_loop(
                    uses, far.q_future, far.k, v, rings, tile, seqlens, problem, flags, options, FAR_FUTURE
                )
        uses = _load_loop(
            uses,
            q,
            k,
            v,
            rings,
            tile,
            seqlens,
            problem,
            flags,
            options,
            ALL if problem.far_window is None else NEAR,
        )
        work_idx = next_work(counter_ptr, n_work, options.HALVES)  # no sooner, or another one could have begun with it
    scheduler.publish(n_done, n_work)


@gluon.jit
def skip_masked_tiles(use, count, rings, options, CONSUMER: gl.constexpr):
    """Release tiles that other warp groups attend but this one does not; return the next use of the rings."""
    for _tile in range(count):
        rings.k.wait_full(use)  # released any sooner, it would count for the use before
        rings.k.release(use)
        if options.PINGPONG:
            pingpong_sync(CONSUMER)
            pingpong_arrive(CONSUMER, options.CONSUMERS)
        rings.v.wait_full(use)
        rings.v.release(use)
        use += 1
    return use


@gluon.jit
def zero_missing_keys(tile, n_start, seqlens, flags):
    """Write zeros over values that do not exist."""
    zero_missing_rows(tile, n_start, seqlens.kv_start, seqlens.n_keys, tile.shape[0], flags.HAS_STARTS)


@gluon.jit
def _start_s(q_tiles, rings, use, options):
    """Start the product S = Q K' of a tile of keys."""
    s = gl.zeros([WG_ROWS, options.BLOCK_N], gl.float32, wgmma_layout(options.BLOCK_N))
    k_tiles = rings.k.chunk_tiles(use)
    for chunk in gl.static_range(rings.k.chunks):
        s = warpgroup_mma(q_tiles[chunk], k_tiles[chunk].permute((1, 0)), s, use_acc=chunk > 0, is_async=True)
    return s


@gluon.jit
def _p_operand(p, kept, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Convert P to 16 bits, with zeros where `kept_keys` says that it does not stay."""
    p_half = p.to(DTYPE)
    if kept is not None:
        p_half = drop_keys(p_half, kept)
    return gl.convert_layout(p_half, layout)


@gluon.jit
def _mainloop_kv(
    state,
    uses,
    rings,
    tile,
    q_idx,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the keys of a range of pairs to a tile's O, row maxima and row sums in threads; return the uses of rings too.

    The fourth of the state is each row's largest score before the score function, never read without MAX_LOGITS.
    Each step, but for the first product of S and the last one of O, is::

        wgmma    S(j+1) = Q K'   | O += P(j) V
        threads                  | mask S, row maxima, P(j+1), row sums | rescale O, release V
    """
    acc_o, row_max, row_sum, row_logit = state
    sums_layout: gl.constexpr = row_sum.type.layout
    q_use, use, listed_use = uses
    lists = problem.lists
    BLOCK_N: gl.constexpr = options.BLOCK_N
    HAS_LISTS: gl.constexpr = lists.ptr is not None
    HAS_PARTIAL: gl.constexpr = lists.slots is not None
    MISSING_KEYS: gl.constexpr = flags.HAS_LENGTHS or flags.HAS_STARTS
    LAGS: gl.constexpr = options.LAGS and not score_flags.MAX_LOGITS  # which need each tile's maximum
    DTYPE: gl.constexpr = rings.v.tiles.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_o.type.layout, 2)
    seqlens, tile_range, n_steps = loop_over_keys(
        tile.start, seqlens, problem.far_window, flags, options.CONSUMERS * WG_ROWS, BLOCK_N, RANGE
    )
    start = tile_range.start
    full = tile_range.full
    full_stop = tile_range.full_stop
    wg_start = tile.start + CONSUMER * WG_ROWS
    positions = None
    if problem.scores.q_pos is not None:
        positions = load_positions(problem.scores, tile, seqlens, q_idx, False)
    first = wg_start + seqlens.causal_offset
    scores = problem.scores
    params = params_of_head(scores, tile.batch, tile.head)
    bias = load_bias(scores, tile.batch, tile.head, first, first)
    slope = load_slope(scores, tile.batch, tile.head, first, first)
    exp2_scale = exp2_scale_of_head(scores, tile.batch, tile.head)
    scores = HeadScores(params, scores.scale, scores.cap, exp2_scale, bias, slope, positions)
    dropout = None
    if problem.dropout is not None:
        row = tile.batch * problem.schedule.n_heads + tile.head
        dropout = begin_dropout(problem.dropout, row, tile.sequence)

    # === prologue
    is_partial = None
    slots = slots_of_head(lists, tile.batch, tile.head)
    if lists.bits is not None:
        slots += (tile.start // LISTED).to(gl.int64) * lists.slots_stride_query
    ranges = None
    if lists.k_pos is not None:
        ranges = range_positions(lists, tile, problem.far_window)
    if HAS_LISTS:
        line = line_of_tile(problem, tile, tile.head, tile.q_offset, seqlens.n_queries, RANGE)
        tiles = rings.listed.receive(listed_use)
        listed_use += 1
        n_steps = tiles.count + tiles.n_partial
    n_before = 0
    n_after = 0
    if options.CONSUMERS * WG_ROWS > BLOCK_N and not HAS_LISTS:  # some tiles may be for other warp groups only
        wg_range = key_ranges(wg_start, seqlens, range_flags(flags, RANGE), WG_ROWS, BLOCK_N, False)
        full = wg_range.full
        full_stop = wg_range.full_stop
        wg_stop = gl.where(wg_start < seqlens.n_queries, wg_range.stop, start)
        n_before = gl.minimum(n_steps - (gl.maximum(wg_stop - start, 0) + BLOCK_N - 1) // BLOCK_N, n_steps - 1)
        n_after = gl.minimum((wg_range.start - start) // BLOCK_N, n_steps - 1 - n_before)
    if n_steps > 0:
        use = skip_masked_tiles(use, n_before, rings, options, CONSUMER)
        rings.q.wait_full(q_use)
        q_tiles = rings.q.chunk_tiles(q_use)
        rings.k.wait_full(use)
        s = _start_s(q_tiles, rings, use, options)
        s = warpgroup_mma_wait(0, deps=(s,))
        rings.k.release(use)
        if HAS_LISTS:
            n_start = start_of_tile(n_steps - 1, tiles, line, BLOCK_N, HAS_PARTIAL)
        else:
            n_start = start + (n_steps - 1 - n_before) * BLOCK_N
        kept = None
        if dropout is not None:
            kept = kept_keys(dropout, q_idx, n_start, sums_layout, BLOCK_N)
        masked = (n_start < full) | (n_start >= full_stop)
        if HAS_PARTIAL:
            is_partial = n_steps - 1 >= tiles.count
            masked = masked | is_partial
        p, alpha, row_max, row_sum, new_logit = online_softmax(
            s,
            row_max,
            row_sum,
            row_logit,
            q_idx,
            n_start,
            TileMask(masked, seqlens, is_partial, slots, lists.slots_stride_query, lists.bits, ranges),
            scores,
            range_flags(flags, RANGE),
            score_flags,
            False,
        )
        if score_flags.MAX_LOGITS:
            row_logit = new_logit
        p_half = _p_operand(p, kept, DTYPE, p_layout)
        if problem.far_window is not None and RANGE != FAR_PAST:  # there was a loop before
            acc_o = rescale(acc_o, alpha)

        # === mainloop
        if LAGS:
            row_max = gl.convert_layout(row_max, gl.SliceLayout(1, sums_layout))[:, None] + row_sum * 0.0
        for step in range(1, n_steps - n_before - n_after):
            if HAS_LISTS:  # no later, or the softmax would wait for it
                upcoming = start_of_tile(n_steps - 1 - step, tiles, line, BLOCK_N, HAS_PARTIAL)
            if MISSING_KEYS:  # noqa: SIM102
                if (n_start + BLOCK_N > seqlens.n_keys) | (n_start < seqlens.kv_start):
                    rings.v.wait_full(use)
                    zero_missing_keys(rings.v.tile(use), n_start, seqlens, flags)
            rings.k.wait_full(use + 1)
            if options.PINGPONG:
                pingpong_sync(CONSUMER)
            s = _start_s(q_tiles, rings, use + 1, options)
            rings.v.wait_full(use)
            acc_o = warpgroup_mma(p_half, rings.v.tile(use), acc_o, is_async=True)
            if options.PINGPONG:
                pingpong_arrive(CONSUMER, options.CONSUMERS)
            next_kept = None
            if dropout is not None:  # while products run
                next_start = upcoming if HAS_LISTS else n_start - BLOCK_N
                next_kept = kept_keys(dropout, q_idx, next_start, sums_layout, BLOCK_N)
            s = warpgroup_mma_wait(1, deps=(s,))
            rings.k.release(use + 1)
            if HAS_LISTS:
                n_start = upcoming
            else:
                n_start -= BLOCK_N
            masked = (n_start < full) | (n_start >= full_stop)
            if HAS_PARTIAL:
                is_partial = n_steps - 1 - step >= tiles.count
                masked = masked | is_partial
            tile_mask = TileMask(masked, seqlens, is_partial, slots, lists.slots_stride_query, lists.bits, ranges)
            if LAGS:
                step_p, step_alpha, row_max, row_sum = lagging_softmax(
                    s,
                    row_max,
                    row_sum,
                    q_idx,
                    n_start,
                    tile_mask,
                    scores,
                    range_flags(flags, RANGE),
                    score_flags,
                    DTYPE,
                )
            else:
                step_p, step_alpha, row_max, row_sum, new_logit = online_softmax(
                    s,
                    row_max,
                    row_sum,
                    row_logit,
                    q_idx,
                    n_start,
                    tile_mask,
                    scores,
                    range_flags(flags, RANGE),
                    score_flags,
                    options.PIN_EXP2,
                )
            if score_flags.MAX_LOGITS:
                row_logit = new_logit
            if options.CONVERT_P_EARLY:  # P takes half the registers before the wait, and not after it
                next_p_half = _p_operand(step_p, next_kept, DTYPE, p_layout)
                acc_o, p_half, next_p_half = warpgroup_mma_wait(0, deps=(acc_o, p_half, next_p_half))
            else:
                acc_o, p_half = warpgroup_mma_wait(0, deps=(acc_o, p_half))
                next_p_half = _p_operand(step_p, next_kept, DTYPE, p_layout)
            rings.v.release(use)
            acc_o = rescale(acc_o, step_alpha)
            p_half = next_p_half
            use += 1

        # === epilogue
        if LAGS:
            row_max = gl.convert_layout(gl.max(row_max, 1), q_idx.type.layout)
        if not holds_q(options.OUT_IN_Q, RANGE):
            rings.q.release(q_use)
            q_use += options.CONSUMERS
        rings.v.wait_full(use)
        if MISSING_KEYS:  # noqa: SIM102
            if (n_start + BLOCK_N > seqlens.n_keys) | (n_start < seqlens.kv_start):
                zero_missing_keys(rings.v.tile(use), n_start, seqlens, flags)
        acc_o = warpgroup_mma(p_half, rings.v.tile(use), acc_o, is_async=True)
        acc_o, p_half = warpgroup_mma_wait(0, deps=(acc_o, p_half))
        rings.v.release(use)
        use += 1
        use = skip_masked_tiles(use, n_after, rings, options, CONSUMER)
    return (acc_o, row_max, row_sum, row_logit), (q_use, use, listed_use)


@gluon.jit
def _attend(state, uses, rings, tile, q_idx, seqlens, problem, flags, score_flags, options, CONSUMER: gl.constexpr):
    """Attend with a tile of queries: far pairs first, where there are any."""
    if problem.far_window is not None:
        state, uses = _mainloop_kv(
            state, uses, rings, tile, q_idx, seqlens, problem, flags, score_flags, options, CONSUMER, FAR_PAST
        )
        if options.HAS_FUTURE:
            state, uses = _mainloop_kv(
                state, uses, rings, tile, q_idx, seqlens, problem, flags, score_flags, options, CONSUMER, FAR_FUTURE
            )
    return _mainloop_kv(
        state,
        uses,
        rings,
        tile,
        q_idx,
        seqlens,
        problem,
        flags,
        score_flags,
        options,
        CONSUMER,
        ALL if problem.far_window is None else NEAR,
    )


@gluon.jit
def _compute_warps(
    out,
    row_results,
    scheduler,
    rings,
    out_tiles,
    gate,
    first_logits_ptr,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
):
    """Attend with WG_ROWS queries of each work item's tile."""
    BLOCK_D: gl.constexpr = rings.v.tiles.shape[4]
    s_layout: gl.constexpr = wgmma_layout(options.BLOCK_N)
    o_layout: gl.constexpr = wgmma_layout(BLOCK_D)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    n_done = 0
    uses = (gl.to_tensor(CONSUMER), gl.to_tensor(0), gl.to_tensor(0))
    if options.PINGPONG and CONSUMER == options.CONSUMERS - 1:
        pingpong_arrive(CONSUMER, options.CONSUMERS)
    work_idx = scheduler.receive(n_done)
    while work_idx < problem.n_work:
        # === prologue
        tile, seqlens = tile_of_work(work_idx, problem, flags, options.CONSUMERS * WG_ROWS)
        wg_start = tile.start + CONSUMER * WG_ROWS
        q_idx = wg_start + gl.arange(0, WG_ROWS, layout=row_layout)
        exp2_scale = exp2_scale_of_head(problem.scores, tile.batch, tile.head)
        zeros = gl.zeros([WG_ROWS], gl.float32, row_layout)
        row_logit = gl.full([WG_ROWS], float("-inf"), gl.float32, row_layout)
        row_sum = sum_in_threads(gl.zeros([WG_ROWS, options.BLOCK_N], gl.float32, s_layout))
        # Four threads have a row.
        row_max, row_sum = begin_rows(zeros, row_sum, first_logits_ptr, tile.head, None, exp2_scale, 0.25)

        # === mainloop
        state = (gl.zeros([WG_ROWS, BLOCK_D], gl.float32, o_layout), row_max, row_sum, row_logit)
        state, uses = _attend(state, uses, rings, tile, q_idx, seqlens, problem, flags, score_flags, options, CONSUMER)

        # === epilogue
        acc_o, row_max, row_sum, row_logit = state
        row_total = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
        attends = row_total != 0  # NaN is to be seen
        row_total = gl.where(attends, row_total, 1.0)
        rescale_kept = 1.0
        if problem.dropout is not None:
            rescale_kept = problem.dropout.rescale
        acc_o = acc_o * gl.convert_layout(rescale_kept / row_total, gl.SliceLayout(1, o_layout))[:, None]
        lse = gl.where(attends, row_max * exp2_scale + gl.log2(row_total), float("-inf"))
        lse_row = (tile.batch * problem.schedule.n_heads + tile.head).to(gl.int64) * problem.n_queries + tile.q_offset
        gl.store(row_results.lse + lse_row + q_idx, lse, q_idx < seqlens.n_queries)
        if score_flags.MAX_LOGITS:
            row_logit *= logit_factor(problem.scores, score_flags.MOD, score_flags.CAPPED)
            gl.store(row_results.logits + lse_row + q_idx, row_logit, q_idx < seqlens.n_queries)
        if gate.ptr is not None:
            row = wg_start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, o_layout))
            feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, o_layout))
            exists = row < seqlens.n_queries
            acc_o *= load_sigmoid(gate, tile.batch, tile.head, tile.q_offset + row, exists, feature)
        q_use, use, listed_use = uses
        if options.OUT_IN_Q:
            rings.q.wait_full(q_use)
            out_memory = rings.q.tiles.index(CONSUMER)
            if rings.q.chunks > 1:  # two of the warp group's three chunks: the first ones, or the last ones
                N_PAIRS: gl.constexpr = rings.q.tiles.shape[0] // 2
                shape: gl.constexpr = [N_PAIRS, 1, 1, WG_ROWS, BLOCK_D]
                pairs = reinterpret(rings.q.tiles, rings.q.tiles.dtype, shape, rings.q.tiles.layout)
                out_memory = pairs.index(2 * CONSUMER)
        else:
            await_stores(0)
            out_memory = out_tiles.index(CONSUMER)
        out_tile = out_memory.reshape([WG_ROWS, BLOCK_D])
        out_tile.store(acc_o.to(out_tile.dtype))
        if flags.PACKED:
            store_rows(out, out_tile, tile.batch, tile.head, tile.q_offset, wg_start, seqlens.n_queries)
        if options.OUT_IN_Q or not flags.PACKED:
            fence_async_shared()
        if not flags.PACKED:
            store_tile(out, [tile.batch, tile.head, wg_start, 0], out_memory)
        if options.OUT_IN_Q:
            await_stores(0)
            rings.q.release(q_use)
            uses = (q_use + options.CONSUMERS, use, listed_use)
        n_done += 1
        work_idx = scheduler.receive(n_done)
    await_stores(0)


@gluon.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, *Schedule._fields, "n_work"))
def forward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of WG_ROWS; features rotated already, as those of k
    k,  # (B, K, Tk, D), for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    out,  # like q, (B, H, Tq, Dv); of a packed batch RowTarget
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    row_logits_ptr,  # likewise: each row's largest scaled score; or None
    counter_ptr,  # zero, and zero afterwards: work items taken
    packed,  # Packed | None
    bounds,  # Bounds
    lists,  # Lists, of rows, or of those of each range of pairs
    dropout,  # Dropout | None
    gate,  # Gate
    first_logits_ptr,  # (H,), float32, of each row's softmax; or None
    scores,  # Scores
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many tokens, or positions, apart are far; or None
    n_tiles,  # fields of `Schedule`
    n_rows,
    n_heads,
    heads_per_key,
    heads_per_l2_section,
    n_queries,
    n_keys,
    n_work,  # work items
    HALVES: gl.constexpr,  # of a program, each with a load warp, and work items of its own
    CONSUMERS: gl.constexpr,  # compute warp groups of each half
    BLOCK_N: gl.constexpr,
    Q_STAGES: gl.constexpr,  # of each compute warp group
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    D_CHUNKS: gl.constexpr,  # of q's and k's features, as wide as their tiles
    OUT_IN_Q: gl.constexpr,  # the output's tile takes the memory of the queries
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_PARTIAL_TILES: gl.constexpr,
    MOD: gl.constexpr,
    CAPPED: gl.constexpr,
    PIN_EXP2: gl.constexpr,  # hold exponentials before the wait for O
    CONVERT_P_EARLY: gl.constexpr,  # convert P before the wait for O
    PINGPONG: gl.constexpr,  # warp groups issue their matrix products in turn
    LAGS: gl.constexpr,  # look for a row's maximum only where sums of exponentials are large
):
    """Attend with tiles of CONSUMERS · WG_ROWS queries of one head each, one after another.

    A load warp fills the rings; each compute warp group has WG_ROWS queries. With PINGPONG and two groups::

        group 0  S, O wgmma | softmax    | S, O wgmma | softmax
        group 1  softmax    | S, O wgmma | softmax    | S, O wgmma
    """
    gl.static_assert(HALVES == 1 or not PINGPONG, "the named barriers of PINGPONG are those of one half")
    q_rings = ()
    k_rings = ()
    v_rings = ()
    listed_rings = ()
    out_tiles = ()
    schedulers = ()
    for half in gl.static_range(HALVES):
        q_rings += (make_ring(q, CONSUMERS * Q_STAGES, 1, D_CHUNKS),)
        k_rings += (make_ring(k, K_STAGES, CONSUMERS, D_CHUNKS),)
        v_rings += (make_ring(v, V_STAGES, CONSUMERS),)
        if OUT_IN_Q:
            out_tiles += (q_rings[half].tiles,)  # never read
        else:
            out_tiles += (allocate_chunks(q, CONSUMERS),)
        schedulers += (make_scheduler(CONSUMERS),)
        if lists.ptr is not None:
            listed_rings += (make_listed_ring(CONSUMERS),)
    schedule = Schedule(n_tiles, n_rows, n_heads, heads_per_key, heads_per_l2_section)
    N_GROUPS: gl.constexpr = HALVES * CONSUMERS  # compute warp groups
    N_OTHERS: gl.constexpr = N_GROUPS - 1
    FLAGS: gl.constexpr = mask_flags(
        packed is not None,
        bounds.key_lengths,
        bounds.key_starts,
        bounds.query_starts,
        CAUSAL,
        WINDOWED,
        lists.k_pos is None,
        HAS_PARTIAL_TILES,
    )
    gl.warp_specialize(
        [
            (
                _compute_warps,
                (
                    out,
                    RowResults(lse_ptr, row_logits_ptr),
                    schedulers[role // CONSUMERS],
                    Rings(
                        q_rings[role // CONSUMERS],
                        k_rings[role // CONSUMERS],
                        v_rings[role // CONSUMERS],
                        None if lists.ptr is None else listed_rings[role // CONSUMERS],
                    ),
                    out_tiles[role // CONSUMERS],
                    gate,
                    first_logits_ptr,
                    Problem(
                        packed,
                        bounds,
                        scores,
                        None,
                        window,
                        window_right,
                        far_window,
                        schedule,
                        n_queries,
                        n_keys,
                        n_work,
                        lists,
                        dropout,
                    ),
                    FLAGS,
                    ScoreFlags(MOD, None, None, CAPPED, True, row_logits_ptr is not None),
                    Options(
                        HALVES,
                        role // CONSUMERS,
                        CONSUMERS,
                        BLOCK_N,
                        OUT_IN_Q,
                        PIN_EXP2,
                        CONVERT_P_EARLY,
                        PINGPONG,
                        LAGS,
                        q_far_future is not None,
                    ),
                    role % CONSUMERS,
                ),
            )
            if role < N_GROUPS
            else (
                _load_warp,
                (
                    q,
                    k,
                    v,
                    Far(q_far_past, q_far_future, k_far, far_window),
                    counter_ptr,
                    schedulers[role - N_GROUPS],
                    Rings(
                        q_rings[role - N_GROUPS],
                        k_rings[role - N_GROUPS],
                        v_rings[role - N_GROUPS],
                        None if lists.ptr is None else listed_rings[role - N_GROUPS],
                    ),
                    Problem(
                        packed,
                        bounds,
                        scores,
                        None,
                        window,
                        window_right,
                        far_window,
                        schedule,
                        n_queries,
                        n_keys,
                        n_work,
                        lists,
                    ),
                    FLAGS,
                    Options(
                        HALVES,
                        role - N_GROUPS,
                        CONSUMERS,
                        BLOCK_N,
                        OUT_IN_Q,
                        PIN_EXP2,
                        CONVERT_P_EARLY,
                        PINGPONG,
                        LAGS,
                        q_far_future is not None,
                    ),
                ),
            )
            for role in (0, 1, 2, 3, 4, 5)[: N_GROUPS + HALVES]
        ],
        [4] * N_OTHERS + [1] * HALVES,
        [CONSUMER_REGISTERS] * N_OTHERS + [PRODUCER_REGISTERS] * HALVES,
    )
