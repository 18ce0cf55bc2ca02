"""The forward kernel of attention by 8-bit products for Hopper: S of int8, and O of 16 bits or e4m3.

It goes as `forward.py` does. Queries, keys and values in e4m3 come quantised (`quantise/`), with a unit of each row of
queries, of each group of keys and of each block of values.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), N
blocks.
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.barriers import pingpong_arrive, pingpong_sync
from ropewalk.ops.attention.hopper.forward import (
    Rings,
    fill_q,
    loop_over_keys,
    row_of_tile,
    skip_masked_tiles,
    tile_of_work,
    zero_missing_keys,
)
from ropewalk.ops.attention.hopper.gluon_compat import (
    await_stores,
    fence_async_shared,
    gl,
    gluon,
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
from ropewalk.ops.attention.hopper.pipeline import make_ring
from ropewalk.ops.attention.hopper.scheduler import Problem, make_scheduler, next_work
from ropewalk.ops.attention.hopper.scores import HeadScores, exp2_scale_of_head, load_bias, load_positions, load_slope
from ropewalk.ops.attention.hopper.softmax import TileMask, rescale
from ropewalk.ops.attention.hopper.softmax_8bit import (
    P_OFFSET,
    SoftmaxOptions,
    Units,
    is_e4m3,
    softmax_8bit,
    unpack_p,
)
from ropewalk.ops.attention.hopper.tiles import WG_ROWS, store_rows, sum_in_threads
from ropewalk.ops.attention.quantise import call as quantise
from ropewalk.ops.attention.triton.arguments import Far, Schedule, ScoreFlags
from ropewalk.ops.attention.triton.masking import (
    ALL,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    key_ranges,
    mask_flags,
    range_flags,
    slots_of_head,
)
from ropewalk.ops.attention.triton.softmax import logit_factor
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, load_sigmoid, params_of_head

BLOCK = gl.constexpr(quantise.BLOCK)
GROUPS = gl.constexpr(quantise.GROUPS)


class RangeUnits(NamedTuple):
    """Pointers to the units of one range of pairs, and of values."""

    q: Any  # (B, H, Tq), float32
    shift: Any  # (B, H, Tq), float32
    k: Any  # (B, K, N, GROUPS), float32
    v: Any  # (B, K, N), float32; None: values are of 16 bits


class Output(NamedTuple):
    """Memory of results."""

    target: Any  # descriptor of (B, H, Tq, Dv), or RowTarget
    tiles: Any  # in shared memory
    lse: Any  # pointers to (B, H, Tq), dense
    logits: Any  # or None


class Options8(NamedTuple):
    """Constants of the pipeline: those of `config.Config8`, and whether keys ahead may be far."""

    CONSUMERS: Any
    BLOCK_N: Any
    PIN_EXP2: Any
    PINGPONG: Any
    FLUSH: Any
    HAS_FUTURE: Any


@gluon.constexpr_function
def _s_layout(n):
    """Return the layout of a warp group's product of 8-bit numbers with n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])


@gluon.constexpr_function
def _o_layout(n, IS_E4M3):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32 if IS_E4M3 else 16])


@gluon.constexpr_function
def _out_layout(width, dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, WG_ROWS.value, width], dtype)


@gluon.jit
def first_key_row(tile, flags):
    """Return the row of a tile's sequence's first key in tensors of 8 bits: each packed sequence has whole blocks."""
    row = tile.k_offset
    if flags.PACKED:
        row = (tile.k_offset // BLOCK + tile.sequence) * BLOCK
    return row


@gluon.jit
def _load_loop(
    uses, q, k, v, rings, tile, seqlens, problem, flags, options, IS_E4M3: gl.constexpr, RANGE: gl.constexpr
):
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
    if n_steps > 0:
        q_use = fill_q(q_use, q, rings, tile, options)
        start = tile_range.start
        batch, head = tile.batch, tile.kv_head
        # Rows of values of 16 bits; keys, and values in e4m3, are so many rows further.
        ahead = first_key_row(tile, flags) - tile.k_offset
        row = row_of_tile(n_steps - 1, start, tiles, line, tile, lists, BLOCK_N)
        upcoming = row_of_tile(n_steps - 2, start, tiles, line, tile, lists, BLOCK_N)
        rings.k.fill(use, k, [batch, head, row + ahead, 0])
        for step in range(1, n_steps):
            # A row of lists is read a step before it is needed.
            later = row_of_tile(n_steps - 2 - step, start, tiles, line, tile, lists, BLOCK_N)
            rings.k.fill(use + 1, k, [batch, head, upcoming + ahead, 0])
            if IS_E4M3:
                rings.v.fill(use, v, [batch, head, 0, row + ahead])
            else:
                rings.v.fill(use, v, [batch, head, row, 0])
            row = upcoming
            upcoming = later
            use += 1
        if IS_E4M3:
            rings.v.fill(use, v, [batch, head, 0, row + ahead])
        else:
            rings.v.fill(use, v, [batch, head, row, 0])
        use += 1
    return q_use, use, listed_use


@gluon.jit
def _load_warp(q, k, v, far, counter_ptr, scheduler, rings, problem, flags, options, IS_E4M3: gl.constexpr):
    """Take work items, and load the tiles of each."""
    n_work = problem.n_work
    n_done = 0
    uses = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    work_idx = gl.program_id(0)
    while work_idx < n_work:
        scheduler.publish(n_done, work_idx)
        n_done += 1
        tile, seqlens = tile_of_work(work_idx, problem, flags, options.CONSUMERS * WG_ROWS)
        if problem.far_window is not None:
            uses = _load_loop(
                uses, far.q_past, far.k, v, rings, tile, seqlens, problem, flags, options, IS_E4M3, FAR_PAST
            )
            if options.HAS_FUTURE:
                uses = _load_loop(
                    uses,
                    far.q_future,
                    far.k,
                    v,
                    rings,
                    tile,
                    seqlens,
                    problem,
                    flags,
                    options,
                    IS_E4M3,
                    FAR_FUTURE,
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
            IS_E4M3,
            ALL if problem.far_window is None else NEAR,
        )
        work_idx = next_work(counter_ptr, n_work, 1)  # no sooner, or another one could have begun with it
    scheduler.publish(n_done, n_work)


@gluon.jit
def _start_s(q_tiles, rings, use, options):
    """Start the product S = Q K' of a tile of keys."""
    s = gl.zeros([WG_ROWS, options.BLOCK_N], gl.int32, _s_layout(options.BLOCK_N))
    return warpgroup_mma(q_tiles, rings.k.tile(use).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _start_o(p, rings, use, acc, DTYPE: gl.constexpr, p_layout: gl.constexpr):
    """Start to add the product of packed P with a tile of values to an accumulator."""
    v_tile = rings.v.tile(use)
    if is_e4m3(DTYPE):
        v_tile = v_tile.permute((1, 0))
    return warpgroup_mma(unpack_p(p, DTYPE, p_layout), v_tile, acc, is_async=True)


@gluon.jit
def _n_blocks(problem):
    """Return N, the blocks of a head's keys in tensors of 8 bits."""
    n_blocks = (problem.n_keys + BLOCK - 1) // BLOCK
    if problem.packed is not None:
        n_blocks = problem.n_keys // BLOCK + problem.packed.n_sequences
    return n_blocks


@gluon.jit
def _load_k_units(ptr, n_start, layout: gl.constexpr):
    """Load the units of a tile's groups of keys, [4]; those of the first block instead of one before it."""
    block = gl.maximum(n_start, 0) // BLOCK
    return gl.load(ptr + block * GROUPS + gl.arange(0, GROUPS, layout=layout))


@gluon.jit
def _load_v_unit(ptr, n_start):
    return gl.load(ptr + gl.maximum(n_start, 0) // BLOCK)


@gluon.jit
def _mainloop_kv(
    state,
    uses,
    rings,
    units,
    tile,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the keys of a range of pairs to a tile's O, row maxima and row sums in threads; return the uses of rings too.

    The steps are those of `forward.py`. In e4m3, products of FLUSH tiles add up in the accumulator of a product, which
    keeps 13 bits below its exponent and cuts the others off, and float32 then adds them to O.
    """
    acc_o, row_max, row_sum, row_logit, row_nan = state
    thread_layout: gl.constexpr = row_sum.type.layout
    o_layout: gl.constexpr = acc_o.type.layout
    BLOCK_DV: gl.constexpr = acc_o.shape[1]
    q_use, use, listed_use = uses
    lists = problem.lists
    BLOCK_N: gl.constexpr = options.BLOCK_N
    IS_E4M3: gl.constexpr = units.v is not None
    HAS_LISTS: gl.constexpr = lists.ptr is not None
    HAS_PARTIAL: gl.constexpr = lists.slots is not None
    MISSING_KEYS: gl.constexpr = (flags.HAS_LENGTHS or flags.HAS_STARTS) and not IS_E4M3
    CHANGES: gl.constexpr = (
        score_flags.CAPPED
        or score_flags.MOD is not None
        or problem.scores.largest is not None
        or problem.scores.slopes is not None
    )
    IS_PLAIN: gl.constexpr = not (CHANGES or score_flags.MAX_LOGITS)
    FLUSH: gl.constexpr = options.FLUSH if IS_E4M3 else 0
    P_DTYPE: gl.constexpr = rings.v.tiles.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if IS_E4M3 else 2)
    row_units_layout: gl.constexpr = gl.SliceLayout(1, thread_layout)
    key_units_layout: gl.constexpr = gl.SliceLayout(0, thread_layout)
    seqlens, tile_range, n_steps = loop_over_keys(
        tile.start, seqlens, problem.far_window, flags, options.CONSUMERS * WG_ROWS, BLOCK_N, RANGE
    )
    start = tile_range.start
    full = tile_range.full
    full_stop = tile_range.full_stop
    wg_start = tile.start + CONSUMER * WG_ROWS
    first_row = first_key_row(tile, flags)
    q_idx = wg_start + gl.arange(0, WG_ROWS, layout=row_max.type.layout)
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
        n_blocks = _n_blocks(problem)
        kv_row = (tile.batch * (problem.schedule.n_heads // problem.schedule.heads_per_key) + tile.kv_head).to(gl.int64)
        first_block = kv_row * n_blocks + first_row // BLOCK
        k_units_ptr = units.k + first_block * GROUPS
        q_row = (tile.batch * problem.schedule.n_heads + tile.head).to(gl.int64) * problem.n_queries + tile.q_offset
        row = wg_start + gl.arange(0, WG_ROWS, layout=row_units_layout)
        q_units = gl.load(units.q + q_row + row, row < seqlens.n_queries, other=1.0)
        shifts = gl.load(units.shift + q_row + row, row < seqlens.n_queries, other=0.0)
        if HAS_LISTS:
            n_start = start_of_tile(n_steps - 1, tiles, line, BLOCK_N, HAS_PARTIAL)
        else:
            n_start = start + (n_steps - 1 - n_before) * BLOCK_N
        k_units = _load_k_units(k_units_ptr, n_start, key_units_layout)
        v_unit = 1.0
        if IS_E4M3:
            v_ptr = units.v + first_block
            v_unit = _load_v_unit(v_ptr, n_start)
        rings.q.wait_full(q_use)
        q_tiles = rings.q.tile(q_use)
        rings.k.wait_full(use)
        s = _start_s(q_tiles, rings, use, options)
        s = warpgroup_mma_wait(0, deps=(s,))
        rings.k.release(use)
        masked = (n_start < full) | (n_start >= full_stop)
        if HAS_PARTIAL:
            is_partial = n_steps - 1 >= tiles.count
            masked = masked | is_partial
        tile_mask = TileMask(masked, seqlens, is_partial, slots, lists.slots_stride_query, lists.bits, ranges)
        row_max = gl.convert_layout(row_max, row_units_layout)
        row_nan = gl.convert_layout(row_nan, row_units_layout)
        p, alpha, row_max, row_sum, new_logit, row_nan = softmax_8bit(
            s,
            Units(q_units, k_units, shifts, v_unit),
            (row_max, row_sum, row_logit, row_nan),
            q_idx,
            n_start,
            tile_mask,
            scores,
            range_flags(flags, RANGE),
            score_flags,
            SoftmaxOptions(P_DTYPE, p_layout, IS_PLAIN, False),
        )
        if score_flags.MAX_LOGITS:
            row_logit = new_logit
        if problem.far_window is not None and RANGE != FAR_PAST:  # there was a loop before
            acc_o = rescale(acc_o, alpha)

        # === mainloop
        if HAS_LISTS:
            upcoming = start_of_tile(gl.maximum(n_steps - 2, 0), tiles, line, BLOCK_N, HAS_PARTIAL)
        else:
            upcoming = n_start - BLOCK_N
        next_k_units = _load_k_units(k_units_ptr, upcoming, key_units_layout)
        next_v_unit = 1.0
        if IS_E4M3:
            next_v_unit = _load_v_unit(v_ptr, upcoming)
        n_own = n_steps - n_before - n_after
        n_chunks = 1
        if FLUSH > 0:
            n_chunks = (n_own - 1 + (FLUSH - 1)) // FLUSH
        for chunk in range(n_chunks):
            acc = acc_o
            first_step = 1
            last_step = n_own
            if FLUSH > 0:
                acc = gl.zeros([WG_ROWS, BLOCK_DV], gl.float32, o_layout)
                pending = gl.full([WG_ROWS], 1.0, gl.float32, row_units_layout)  # what O was not yet multiplied by
                first_step += chunk * FLUSH
                last_step = gl.minimum(first_step + FLUSH, n_own)
            for step in range(first_step, last_step):
                if MISSING_KEYS:  # noqa: SIM102
                    if (n_start + BLOCK_N > seqlens.n_keys) | (n_start < seqlens.kv_start):
                        rings.v.wait_full(use)
                        zero_missing_keys(rings.v.tile(use), n_start, seqlens, flags)
                n_start = upcoming
                k_units = next_k_units
                v_unit = next_v_unit
                if HAS_LISTS:  # no later, or the softmax would wait for it
                    upcoming = start_of_tile(gl.maximum(n_steps - 2 - step, 0), tiles, line, BLOCK_N, HAS_PARTIAL)
                else:
                    upcoming = n_start - BLOCK_N
                next_k_units = _load_k_units(k_units_ptr, upcoming, key_units_layout)
                if IS_E4M3:
                    next_v_unit = _load_v_unit(v_ptr, upcoming)
                rings.k.wait_full(use + 1)
                if options.PINGPONG:
                    pingpong_sync(CONSUMER)
                s = _start_s(q_tiles, rings, use + 1, options)
                rings.v.wait_full(use)
                acc = _start_o(p, rings, use, acc, P_DTYPE, p_layout)
                if options.PINGPONG:
                    pingpong_arrive(CONSUMER, options.CONSUMERS)
                s = warpgroup_mma_wait(1, deps=(s,))
                rings.k.release(use + 1)
                masked = (n_start < full) | (n_start >= full_stop)
                if HAS_PARTIAL:
                    is_partial = n_steps - 1 - step >= tiles.count
                    masked = masked | is_partial
                tile_mask = TileMask(masked, seqlens, is_partial, slots, lists.slots_stride_query, lists.bits, ranges)
                next_p, step_alpha, row_max, row_sum, new_logit, row_nan = softmax_8bit(
                    s,
                    Units(q_units, k_units, shifts, v_unit),
                    (row_max, row_sum, row_logit, row_nan),
                    q_idx,
                    n_start,
                    tile_mask,
                    scores,
                    range_flags(flags, RANGE),
                    score_flags,
                    SoftmaxOptions(P_DTYPE, p_layout, IS_PLAIN, options.PIN_EXP2),
                )
                if score_flags.MAX_LOGITS:
                    row_logit = new_logit
                acc, p, next_p = warpgroup_mma_wait(0, deps=(acc, p, next_p))
                rings.v.release(use)
                acc = rescale(acc, step_alpha)
                if FLUSH > 0:
                    pending *= step_alpha
                p = next_p
                use += 1
            if FLUSH > 0:  # noqa: SIM108
                acc_o = acc_o * gl.convert_layout(pending, gl.SliceLayout(1, o_layout))[:, None] + acc
            else:
                acc_o = acc

        # === epilogue
        row_max = gl.convert_layout(row_max, q_idx.type.layout)
        row_nan = gl.convert_layout(row_nan, q_idx.type.layout)
        rings.q.release(q_use)
        q_use += options.CONSUMERS
        rings.v.wait_full(use)
        if MISSING_KEYS:  # noqa: SIM102
            if (n_start + BLOCK_N > seqlens.n_keys) | (n_start < seqlens.kv_start):
                zero_missing_keys(rings.v.tile(use), n_start, seqlens, flags)
        acc = acc_o
        if FLUSH > 0:
            acc = gl.zeros([WG_ROWS, BLOCK_DV], gl.float32, o_layout)
        acc = _start_o(p, rings, use, acc, P_DTYPE, p_layout)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        if FLUSH > 0:
            acc_o += acc
        else:
            acc_o = acc
        rings.v.release(use)
        use += 1
        use = skip_masked_tiles(use, n_after, rings, options, CONSUMER)
    return (acc_o, row_max, row_sum, row_logit, row_nan), (q_use, use, listed_use)


@gluon.jit
def _attend(state, uses, rings, units, tile, seqlens, problem, flags, score_flags, options, CONSUMER: gl.constexpr):
    """Attend with a tile of queries: far pairs first, where there are any."""
    if problem.far_window is not None:
        state, uses = _mainloop_kv(
            state,
            uses,
            rings,
            RangeUnits(units.q_past, units.q_past_shift, units.k_far, units.v),
            tile,
            seqlens,
            problem,
            flags,
            score_flags,
            options,
            CONSUMER,
            FAR_PAST,
        )
        if options.HAS_FUTURE:
            state, uses = _mainloop_kv(
                state,
                uses,
                rings,
                RangeUnits(units.q_future, units.q_future_shift, units.k_far, units.v),
                tile,
                seqlens,
                problem,
                flags,
                score_flags,
                options,
                CONSUMER,
                FAR_FUTURE,
            )
    return _mainloop_kv(
        state,
        uses,
        rings,
        RangeUnits(units.q, units.q_shift, units.k, units.v),
        tile,
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
    scheduler,
    rings,
    gate,
    first_logits_ptr,
    units,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
):
    """Attend with WG_ROWS queries of each work item's tile."""
    IS_E4M3: gl.constexpr = units.v is not None
    BLOCK_D: gl.constexpr = out.tiles.shape[4]
    s_layout: gl.constexpr = _s_layout(options.BLOCK_N)
    o_layout: gl.constexpr = _o_layout(BLOCK_D, IS_E4M3)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
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
        nothing = gl.full([WG_ROWS], float("-inf"), gl.float32, row_layout)
        row_sum = sum_in_threads(gl.zeros([WG_ROWS, options.BLOCK_N], gl.float32, s_layout))

        # === mainloop
        state = (
            gl.zeros([WG_ROWS, BLOCK_D], gl.float32, o_layout),
            nothing,
            row_sum,
            nothing,
            gl.zeros([WG_ROWS], gl.float32, row_layout),
        )
        state, uses = _attend(state, uses, rings, units, tile, seqlens, problem, flags, score_flags, options, CONSUMER)

        # === epilogue
        acc_o, row_max, row_sum, row_logit, row_nan = state
        row_total = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
        if IS_E4M3:
            row_max -= P_OFFSET
        share = 1.0
        if first_logits_ptr is not None:
            first_logit = gl.load(first_logits_ptr + tile.head) * 1.4426950408889634
            new_max = gl.maximum(row_max, first_logit)
            new_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = gl.where(row_max == float("-inf"), 0.0, gl.exp2(row_max - new_max))
            own_total = row_total * alpha
            row_total = own_total + gl.exp2(first_logit - new_max)
            row_max = new_max
            attends = row_total != 0
            row_total = gl.where(attends, row_total, 1.0)
            share = own_total / row_total
            factor = alpha / row_total
        else:
            attends = row_total != 0  # NaN is to be seen
            row_total = gl.where(attends, row_total, 1.0)
            share = gl.where(attends, 1.0, 0.0)
            factor = 1.0 / row_total
        if IS_E4M3:
            factor += row_nan
        acc_o = acc_o * gl.convert_layout(factor, out_row_layout)[:, None]
        lse = gl.where(attends, row_max + gl.log2(row_total), float("-inf"))
        lse_row = (tile.batch * problem.schedule.n_heads + tile.head).to(gl.int64) * problem.n_queries + tile.q_offset
        gl.store(out.lse + lse_row + q_idx, lse, q_idx < seqlens.n_queries)
        if score_flags.MAX_LOGITS:
            row_logit *= logit_factor(problem.scores, score_flags.MOD, score_flags.CAPPED)
            gl.store(out.logits + lse_row + q_idx, row_logit, q_idx < seqlens.n_queries)
        row = wg_start + gl.arange(0, WG_ROWS, layout=out_row_layout)
        feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, o_layout))
        if IS_E4M3:
            n_kv_heads = problem.schedule.n_heads // problem.schedule.heads_per_key
            sequence = tile.batch
            if flags.PACKED:  # tokens of no sequence attend nothing, and read another one's
                sequence = gl.minimum(gl.maximum(tile.sequence, 0), problem.packed.n_sequences - 1)
            mean_ptr = units.v_mean + (sequence * n_kv_heads + tile.kv_head).to(gl.int64) * units.v_dim
            mean = gl.load(mean_ptr + feature, feature < units.v_dim, other=0.0)
            share = gl.convert_layout(share, out_row_layout)[:, None]
            acc_o += gl.where(share == 0.0, 0.0, share * mean[None, :])  # a mean of NaN is for rows that attend keys
        if gate.ptr is not None:
            exists = row < seqlens.n_queries
            acc_o *= load_sigmoid(gate, tile.batch, tile.head, tile.q_offset + row, exists, feature)
        await_stores(0)
        out_memory = out.tiles.index(CONSUMER)
        out_tile = out_memory.reshape([WG_ROWS, BLOCK_D])
        out_tile.store(acc_o.to(out_tile.dtype))
        if flags.PACKED:
            store_rows(out.target, out_tile, tile.batch, tile.head, tile.q_offset, wg_start, seqlens.n_queries)
        else:
            fence_async_shared()
            store_tile(out.target, [tile.batch, tile.head, wg_start, 0], out_memory)
        n_done += 1
        work_idx = scheduler.receive(n_done)
    await_stores(0)


@gluon.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, *Schedule._fields, "n_work"))
def forward_8bit_kernel(
    q,  # descriptors of (B, H, Tq, D), int8, for tiles of WG_ROWS
    k,  # (B, K, N · BLOCK, D), int8, for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise; or (B, K, Dv, N · BLOCK) in e4m3
    q_far_past,  # fields of `Far`, like q and k
    q_far_future,
    k_far,
    units,  # Units
    out,  # like q, (B, H, Tq, Dv); of a packed batch RowTarget
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    row_logits_ptr,  # likewise: each row's largest scaled score; or None
    counter_ptr,  # zero, and zero afterwards: work items taken
    packed,  # Packed | None
    bounds,  # Bounds
    lists,  # Lists, of rows, or of those of each range of pairs
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
    CONSUMERS: gl.constexpr,  # compute warp groups
    BLOCK_N: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_PARTIAL_TILES: gl.constexpr,
    MOD: gl.constexpr,
    CAPPED: gl.constexpr,
    PIN_EXP2: gl.constexpr,  # hold exponentials before the wait for O
    PINGPONG: gl.constexpr,  # warp groups issue their matrix products in turn
    FLUSH: gl.constexpr,  # see `_mainloop_kv`; 0: products of all tiles add up in the accumulator
):
    """Attend with tiles of CONSUMERS · WG_ROWS queries of one head each, one after another.

    A load warp fills the rings; each compute warp group has WG_ROWS queries.
    """
    PACKED: gl.constexpr = packed is not None
    OUT_DTYPE: gl.constexpr = out.ptr.dtype.element_ty if PACKED else out.dtype
    q_ring = make_ring(q, CONSUMERS, 1)
    k_ring = make_ring(k, K_STAGES, CONSUMERS)
    v_ring = make_ring(v, V_STAGES, CONSUMERS)
    out_tiles = gl.allocate_shared_memory(
        OUT_DTYPE, [CONSUMERS, 1, 1, WG_ROWS, BLOCK_DV], _out_layout(BLOCK_DV, OUT_DTYPE)
    )
    scheduler = make_scheduler(CONSUMERS)
    listed_ring = None
    if lists.ptr is not None:
        listed_ring = make_listed_ring(CONSUMERS)
    schedule = Schedule(n_tiles, n_rows, n_heads, heads_per_key, heads_per_l2_section)
    FLAGS: gl.constexpr = mask_flags(
        PACKED,
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
                    Output(out, out_tiles, lse_ptr, row_logits_ptr),
                    scheduler,
                    Rings(q_ring, k_ring, v_ring, listed_ring),
                    gate,
                    first_logits_ptr,
                    units,
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
                    ScoreFlags(MOD, None, None, CAPPED, True, row_logits_ptr is not None),
                    Options8(
                        CONSUMERS,
                        BLOCK_N,
                        PIN_EXP2,
                        PINGPONG,
                        FLUSH,
                        q_far_future is not None,
                    ),
                    role,
                ),
            )
            if role < CONSUMERS
            else (
                _load_warp,
                (
                    q,
                    k,
                    v,
                    Far(q_far_past, q_far_future, k_far, far_window),
                    counter_ptr,
                    scheduler,
                    Rings(q_ring, k_ring, v_ring, listed_ring),
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
                    Options8(
                        CONSUMERS,
                        BLOCK_N,
                        PIN_EXP2,
                        PINGPONG,
                        FLUSH,
                        q_far_future is not None,
                    ),
                    units.v is not None,
                ),
            )
            for role in (0, 1, 2, 3)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [CONSUMER_REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )
