"""The backward kernel of attention for Hopper: dQ, dK and dV in one pass, five matrix products a step.

A program has a tile of keys and values, and loops over the queries that attend them. dK and dV stay in registers. Each
step's dQ is added to a workspace in memory, where programs add in any order: that sum differs from run to run, unless
they add in one order (`backward_warps._reduce_in_order`). Scores are transposed, [keys, queries], so that P and dS go
from registers into the products that sum over queries. A two-range encoding has loops over far pairs first, with other
queries and keys, and a workspace for each range of pairs; dK of far pairs is rotated in registers to join that of near
pairs.

Four roles share a program: two compute warp groups, each with half of the keys; a load warp; a dQ-reduce warp, which
adds dQ to the workspace. One program has one tile. Persistent programs, as in the forward, were slower: each step of
theirs has more to do.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.backward_warps import (
    ALTERNATING,
    BY_HEADS,
    DqSmem,
    Inputs,
    KvSmem,
    QuerySmem,
    has_keys,
    load_warp,
    loop_over_queries,
    loops_before,
    next_in_loop,
    order_steps,
    ranges_of,
    reduce_dq_warp,
    tile_of_program,
    wg_query_range,
)
from ropewalk.ops.attention.hopper.barriers import (
    DQ_FREE,
    DQ_FULL,
    DS_STORED,
    RANGE_DONE,
    await_kernel_before,
    let_next_kernel_begin,
    named_barrier_arrive,
    named_barrier_sync,
)
from ropewalk.ops.attention.hopper.bias_grad import ParamSums, add_to_sums, begin_sums, store_sums
from ropewalk.ops.attention.hopper.dropout import (
    differentiate_dropped,
    dropped_queries,
    negate_dropped,
    to_half_or_zero,
)
from ropewalk.ops.attention.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ropewalk.ops.attention.hopper.lists import LISTED, make_listed_ring, range_positions
from ropewalk.ops.attention.hopper.pipeline import make_ring, make_ring_beside
from ropewalk.ops.attention.hopper.scheduler import Problem
from ropewalk.ops.attention.hopper.scores import (
    HeadScores,
    differentiate_mod,
    exp2_scale_of_head,
    load_bias,
    load_positions,
    load_slope,
)
from ropewalk.ops.attention.hopper.softmax import TileMask, recompute_p
from ropewalk.ops.attention.hopper.tiles import (
    BLOCK_N,
    DQ_CHUNK,
    WG_ROWS,
    init_neg_delta,
    inverse_rotate,
    key_mask,
    load_shared_table,
    rebase_rotation,
    store_rows,
    to_thread_order,
    wg_ds,
    wgmma_layout,
    zero_missing_rows,
)
from ropewalk.ops.attention.triton.arguments import Far, KeyTile, Schedule, ScoreFlags
from ropewalk.ops.attention.triton.masking import (
    ALL,
    NEAR,
    PAST,
    mask_flags,
    range_flags,
    slots_of_head,
)
from ropewalk.ops.attention.triton.softmax import begin_dropout, differentiate_cap
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, params_of_head


class KvGrads(NamedTuple):
    """Targets of the gradients of keys and values."""

    dk: Any  # RowTarget
    dk_far: Any  # RowTarget; None: rebased and added to dk
    dv: Any  # RowTarget
    feature_weights: Any  # pointer to (D,), of the keys' features; or None


class KeyRotation(NamedTuple):
    """Rotation of the keys, to be undone in their gradients."""

    table: Any  # RopeTable, where pairs are far
    far_table: Any  # RopeTable of `Far.k`; None: far keys are not rotated
    cos: Any  # descriptor of the table that the load warp brings; None: gradients are not rotated
    R: Any  # constants: features that are rotated
    INTERLEAVED: Any


class Options(NamedTuple):
    """Constants of the pipeline: `config.BackwardConfig`, and whether keys ahead may be far."""

    BLOCK_M: Any
    DEFER_DQ: Any
    HAS_FUTURE: Any
    CONSUMER_REGISTERS: Any
    OTHER_REGISTERS: Any


class WgKv(NamedTuple):
    """The keys and values of one compute warp group."""

    k: Any  # [WG_ROWS, D]
    k_for_dq: Any  # of all keys, the features of the warp group's chunk of dQ
    v: Any  # [WG_ROWS, D]
    idx: Any  # [WG_ROWS]: indices of the keys


class Step(NamedTuple):
    """One tile of queries, as a warp group takes it."""

    use: Any  # of the rings
    first_use: Any  # of the loop's first step
    m_start: Any  # the first query
    full: Any  # queries of [full, full_stop) attend all keys of the warp group
    full_stop: Any
    n_start: Any  # the warp group's first key
    dropout: Any  # RowDropout | None
    is_partial: Any = None  # fields of `TileMask`
    slots: Any = None
    slots_stride_query: Any = None
    bits: Any = None
    ranges: Any = None


@gluon.jit
def _wg_kv(keys, BLOCK_M: gl.constexpr, CONSUMER: gl.constexpr):
    """Return a warp group's keys and values, given a `KeyTile` of all keys and its own values.

    Of 64 queries the warp groups' chunks of dQ have half of the features each, of 128 half of the queries.
    """
    k = keys.k.slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    k_for_dq = keys.k
    if BLOCK_M == DQ_CHUNK:
        k_for_dq = keys.k.slice(CONSUMER * DQ_CHUNK, DQ_CHUNK, 1)
    return WgKv(k, k_for_dq, keys.v, keys.pos)


@gluon.jit
def _start_dq(ds, wg_kv, CONSUMER: gl.constexpr):
    """Start the product dQ = dS' K of this warp group's chunk, over all keys."""
    return warpgroup_mma(
        wg_ds(ds, CONSUMER).permute((1, 0)),
        wg_kv.k_for_dq,
        gl.zeros([DQ_CHUNK, DQ_CHUNK], gl.float32, wgmma_layout(DQ_CHUNK)),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _store_zero_ds(use, first_use, smem, dq_smem, wg_kv, BLOCK_M: gl.constexpr, CONSUMER: gl.constexpr):
    """Take a step whose queries attend none of this warp group's keys: store dS = 0, and compute the chunk of dQ."""
    smem.q.wait_full(use)
    zero = gl.zeros([WG_ROWS, BLOCK_M], dq_smem.ds.dtype, wgmma_layout(BLOCK_M))
    dq_smem.ds.index(use % 2).slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(zero)
    fence_async_shared()
    if use > first_use:
        named_barrier_arrive(DQ_FULL, CONSUMER)
    named_barrier_sync(DS_STORED, 0)
    dq = _start_dq(dq_smem.ds.index(use % 2), wg_kv, CONSUMER)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    named_barrier_sync(DQ_FREE, CONSUMER)
    dq_smem.dq.store(to_thread_order(dq))
    smem.q.release(use)


@gluon.jit
def _start_s(step, q_tile, wg_kv, seqlens, flags, BLOCK_M: gl.constexpr):
    """Start the product S = K Q' of a step's queries."""
    if flags.PACKED:
        zero_missing_rows(q_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    return warpgroup_mma(
        wg_kv.k,
        q_tile.permute((1, 0)),
        gl.zeros([WG_ROWS, BLOCK_M], gl.float32, wgmma_layout(BLOCK_M)),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def differentiate_scores(m_start, p, dp, delta, scaled, k_idx, seqlens, scores, flags, score_flags):
    """Return dS = P dP, through the backward of the score function; with dropout delta is apart from dP."""
    if delta is None:  # noqa: SIM108
        ds = p * dp
    else:
        ds = differentiate_dropped(p, dp, delta)
    if score_flags.MOD_BWD is not None:
        ds = differentiate_mod(ds, scaled, m_start, k_idx, seqlens, scores, flags, score_flags)
    return ds


@gluon.jit
def p_operand(p, dropped, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Convert P to 16 bits; with dropout it is negative where it does not stay, and there becomes zero."""
    if dropped is None:  # noqa: SIM108
        p_half = p.to(DTYPE)
    else:
        p_half = to_half_or_zero(p, DTYPE)
    return gl.convert_layout(p_half, layout)


@gluon.jit
def init_dp(delta, step, layout: gl.constexpr):
    """Initialise dP to -delta; with dropout to 0."""
    BLOCK_M: gl.constexpr = delta.shape[0]
    if step.dropout is None:  # noqa: SIM108
        dp = init_neg_delta(delta, layout)
    else:
        dp = gl.zeros([WG_ROWS, BLOCK_M], gl.float32, layout)
    return dp


@gluon.jit
def step_d128(acc, step, smem, dq_smem, wg_kv, seqlens, scores, flags, score_flags, CONSUMER: gl.constexpr):
    """Add a tile of queries to dK and dV, and store the chunk of its dQ. Both warp groups are in one step::

    wgmma    S=KQ', dP=VdO'-delta |   | dV+=P'dO   | dQ=dS K | dK+=dS'Q
    threads  lse, -delta          | P | dS -> smem | sync dS | dQ -> smem, release
    """
    acc_dk, acc_dv = acc
    DTYPE: gl.constexpr = dq_smem.ds.dtype
    BLOCK_M: gl.constexpr = dq_smem.ds.shape[2]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_dk.type.layout, 2)
    stage = step.use % smem.q.stages
    q_tile, do_tile = smem.q.tile(step.use), smem.do.tile(step.use)
    # All reads go before products: reads wait in one queue behind those.
    mbarrier.wait(smem.stats_full.index(stage), step.use // smem.q.stages & 1)
    lse = smem.stats.index(2 * stage).load(gl.SliceLayout(0, s_layout))
    dropped = None
    dp = init_dp(smem.stats.index(2 * stage + 1), step, s_layout)
    smem.q.wait_full(step.use)
    s = _start_s(step, q_tile, wg_kv, seqlens, flags, BLOCK_M)
    smem.do.wait_full(step.use)
    if flags.PACKED:
        zero_missing_rows(do_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    dp = warpgroup_mma(wg_kv.v, do_tile.permute((1, 0)), dp, is_async=True)
    if step.use > step.first_use:  # the chunk of the step before, by now in memory
        fence_async_shared()
        named_barrier_arrive(DQ_FULL, CONSUMER)
    if step.dropout is not None:
        dropped = dropped_queries(step.dropout, step.use, step.m_start, step.n_start, BLOCK_M)
    s = warpgroup_mma_wait(1, deps=(s,))
    masked = (step.m_start < step.full) | (step.m_start >= step.full_stop)
    if step.is_partial is not None:
        masked = masked | step.is_partial
    mask = TileMask(masked, seqlens, step.is_partial, step.slots, step.slots_stride_query, step.bits, step.ranges)
    p, capped, scaled = recompute_p(s, lse, step.m_start, wg_kv.idx, mask, scores, flags, score_flags)
    if dropped is not None:
        p = negate_dropped(p, dropped)
    p_half = p_operand(p, dropped, DTYPE, p_layout)
    p = differentiate_cap(p, capped, score_flags)  # before p and the scores are both needed
    dp, p_half = warpgroup_mma_wait(0, deps=(dp, p_half))
    delta = None if dropped is None else smem.stats.index(2 * stage + 1)
    ds = differentiate_scores(step.m_start, p, dp, delta, scaled, wg_kv.idx, seqlens, scores, flags, score_flags)
    if smem.param_sums is not None:
        add_to_sums(smem.param_sums, ds, step.m_start, wg_kv.idx, seqlens, scores, flags, CONSUMER)
    ds_half = ds.to(DTYPE)
    # Of two tiles in turn: when a warp group stores one, both have read its content of two steps before.
    dq_smem.ds.index(step.use % 2).slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(ds_half)
    acc_dv = warpgroup_mma(p_half, do_tile, acc_dv, is_async=True)
    fence_async_shared()
    named_barrier_sync(DS_STORED, 0)
    dq = _start_dq(dq_smem.ds.index(step.use % 2), wg_kv, CONSUMER)
    acc_dv, p_half = warpgroup_mma_wait(1, deps=(acc_dv, p_half))
    ds_operand = gl.convert_layout(ds_half, p_layout)
    acc_dk = warpgroup_mma(ds_operand, q_tile, acc_dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    named_barrier_sync(DQ_FREE, CONSUMER)
    dq_smem.dq.store(to_thread_order(dq))
    acc_dk, acc_dv, p_half, ds_operand = warpgroup_mma_wait(0, deps=(acc_dk, acc_dv, p_half, ds_operand))
    smem.q.release(step.use)
    return acc_dk, acc_dv


@gluon.jit
def step_d64(acc, step, smem, dq_smem, wg_kv, seqlens, scores, flags, score_flags, CONSUMER: gl.constexpr):
    """Add a tile of queries to dK and dV, and store dQ of the step before. Warp groups may be a step apart::

    wgmma    S=KQ', dQ(j-1)=dS K |                    | dP=VdO'-delta, dV+=P'dO | dK+=dS'Q
    threads  lse                 | P, dQ(j-1) -> smem | dS -> smem, arrive      | release
    """
    acc_dk, acc_dv = acc
    DTYPE: gl.constexpr = dq_smem.ds.dtype
    BLOCK_M: gl.constexpr = dq_smem.ds.shape[2]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_dk.type.layout, 2)
    stage = step.use % smem.q.stages
    q_tile, do_tile = smem.q.tile(step.use), smem.do.tile(step.use)
    # All reads go before products: reads wait in one queue behind those.
    mbarrier.wait(smem.stats_full.index(stage), step.use // smem.q.stages & 1)
    lse = smem.stats.index(2 * stage).load(gl.SliceLayout(0, s_layout))
    dropped = None
    smem.q.wait_full(step.use)
    s = _start_s(step, q_tile, wg_kv, seqlens, flags, BLOCK_M)
    named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER), (step.use + 1) % 2)
    dq = _start_dq(dq_smem.ds.index((step.use + 1) % 2), wg_kv, CONSUMER)
    if step.dropout is not None:
        dropped = dropped_queries(step.dropout, step.use, step.m_start, step.n_start, BLOCK_M)
    s = warpgroup_mma_wait(1, deps=(s,))
    masked = (step.m_start < step.full) | (step.m_start >= step.full_stop)
    if step.is_partial is not None:
        masked = masked | step.is_partial
    mask = TileMask(masked, seqlens, step.is_partial, step.slots, step.slots_stride_query, step.bits, step.ranges)
    p, capped, scaled = recompute_p(s, lse, step.m_start, wg_kv.idx, mask, scores, flags, score_flags)
    if dropped is not None:
        p = negate_dropped(p, dropped)
    p_half = p_operand(p, dropped, DTYPE, p_layout)
    p = differentiate_cap(p, capped, score_flags)  # before p and the scores are both needed
    dq, p_half = warpgroup_mma_wait(0, deps=(dq, p_half))
    if step.use > step.first_use:
        named_barrier_sync(DQ_FREE, CONSUMER)
        dq_smem.dq.store(to_thread_order(dq))
        fence_async_shared()
        named_barrier_arrive(DQ_FULL, CONSUMER)
    smem.do.wait_full(step.use)
    if flags.PACKED:
        zero_missing_rows(do_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    dp = init_dp(smem.stats.index(2 * stage + 1), step, s_layout)
    dp = warpgroup_mma(wg_kv.v, do_tile.permute((1, 0)), dp, is_async=True)
    acc_dv = warpgroup_mma(p_half, do_tile, acc_dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = None if dropped is None else smem.stats.index(2 * stage + 1)
    ds = differentiate_scores(step.m_start, p, dp, delta, scaled, wg_kv.idx, seqlens, scores, flags, score_flags)
    if smem.param_sums is not None:
        add_to_sums(smem.param_sums, ds, step.m_start, wg_kv.idx, seqlens, scores, flags, CONSUMER)
    ds_half = ds.to(DTYPE)
    # Of two tiles in turn: when a warp group stores one, both have read its content of two steps before.
    dq_smem.ds.index(step.use % 2).slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(ds_half)
    fence_async_shared()
    named_barrier_arrive(DS_STORED, 2 * CONSUMER, step.use % 2)
    ds_operand = gl.convert_layout(ds_half, p_layout)
    acc_dk = warpgroup_mma(ds_operand, q_tile, acc_dk, is_async=True)
    acc_dk, acc_dv, p_half, ds_operand = warpgroup_mma_wait(0, deps=(acc_dk, acc_dv, p_half, ds_operand))
    smem.q.release(step.use)
    return acc_dk, acc_dv


@gluon.jit
def begin_dropout_of_head(problem, tile, member):
    """Return the `RowDropout` of a query head of a tile's keys; None without dropout."""
    dropout = None
    if problem.dropout is not None:
        head = tile.kv_head * problem.schedule.heads_per_key + member
        n_heads = problem.schedule.n_heads * problem.schedule.heads_per_key
        dropout = begin_dropout(problem.dropout, tile.batch * n_heads + head, tile.sequence)
    return dropout


@gluon.jit
def _mainloop_q(
    state,
    keys,
    smem,
    dq_smem,
    tile,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the queries of a range of pairs to dK and dV; return them with the next use of the rings."""
    acc_dk, acc_dv, first_use = state
    BLOCK_M: gl.constexpr = options.BLOCK_M
    seqlens, tile_range, steps_per_head, n_steps = loop_over_queries(
        tile.start, seqlens, problem, flags, BLOCK_M, RANGE
    )
    wg_start = tile.start + CONSUMER * WG_ROWS
    wg_range = wg_query_range(wg_start, seqlens, range_flags(flags, RANGE), BLOCK_M)
    # Of each head's steps the first ones, in which no query attends a key of this warp group. The first group has none,
    # as the tile's steps begin with those of its keys. Where heads follow each other it counts them all the same: a
    # constant costs registers there (note 096).
    IS_PART: gl.constexpr = problem.STEP_ORDER == BY_HEADS or (CONSUMER == 1 and flags.SIDE == PAST)
    SKIPS: gl.constexpr = IS_PART and not options.DEFER_DQ
    n_skipped = 0
    if SKIPS:
        n_skipped = gl.minimum((wg_range.start - tile_range.start) // BLOCK_M, steps_per_head)
    order = order_steps(tile, tile_range, steps_per_head, n_skipped, problem, BLOCK_M)
    wg_kv = _wg_kv(keys, BLOCK_M, CONSUMER)
    positions = None
    if problem.scores.q_pos is not None:
        positions = load_positions(problem.scores, tile, seqlens, keys.pos, True)
    if n_steps > 0:
        if options.DEFER_DQ:  # for what was stored before the first step
            named_barrier_arrive(DS_STORED, 2 * CONSUMER, (first_use + 1) % 2)
        for member in range(order.loops):
            loop_use = first_use + member * order.steps
            dropout = begin_dropout_of_head(problem, tile, member)
            for skipped in range(order.skipped_first):
                _store_zero_ds(loop_use + skipped, first_use, smem, dq_smem, wg_kv, BLOCK_M, CONSUMER)
            m_start = order.first
            alternate = 0  # the member of the group, if heads alternate
            head = tile.kv_head * problem.schedule.heads_per_key + member
            scores = problem.scores
            params = params_of_head(scores, tile.batch, head)
            bias = load_bias(scores, tile.batch, head, wg_start, tile.start)
            slope = load_slope(scores, tile.batch, head, wg_start, tile.start)
            exp2_scale = exp2_scale_of_head(scores, tile.batch, head)
            scores = HeadScores(params, scores.scale, scores.cap, exp2_scale, bias, slope, positions)
            if smem.param_sums is not None:
                begin_sums(smem.param_sums, BLOCK_M, CONSUMER)
            for i in range(order.skipped_first, order.steps - order.skipped_last):
                step = Step(loop_use + i, first_use, m_start, wg_range.full, wg_range.full_stop, wg_start, dropout)
                take_step: gl.constexpr = step_d64 if options.DEFER_DQ else step_d128
                acc_dk, acc_dv = take_step(
                    (acc_dk, acc_dv),
                    step,
                    smem,
                    dq_smem,
                    wg_kv,
                    seqlens,
                    scores,
                    range_flags(flags, RANGE),
                    score_flags,
                    CONSUMER,
                )
                m_start, alternate = next_in_loop(m_start, alternate, order, tile_range, problem)
            if problem.STEP_ORDER == ALTERNATING and SKIPS:
                for skipped in range(order.steps - order.skipped_last, order.steps):
                    _store_zero_ds(loop_use + skipped, first_use, smem, dq_smem, wg_kv, BLOCK_M, CONSUMER)
            if smem.param_sums is not None:
                store_sums(smem.param_sums, tile, head, problem, BLOCK_M, CONSUMER)
        if options.DEFER_DQ:
            last_ds = (first_use + n_steps + 1) % 2
            named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER), last_ds)
            dq = _start_dq(dq_smem.ds.index(last_ds), wg_kv, CONSUMER)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            named_barrier_sync(DQ_FREE, CONSUMER)
            dq_smem.dq.store(to_thread_order(dq))
        fence_async_shared()
        named_barrier_arrive(DQ_FULL, CONSUMER)
    if RANGE != ALL and RANGE != NEAR:  # another loop follows, which begins with these barriers and buffers anew
        named_barrier_sync(RANGE_DONE, 0)
    return acc_dk, acc_dv, first_use + n_steps


@gluon.jit
def _mainloop_listed_q(
    state,
    keys,
    smem,
    dq_smem,
    tile,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the listed queries of a range of pairs, as `_mainloop_q` does; each query head may have its own."""
    acc_dk, acc_dv, first_use = state
    BLOCK_M: gl.constexpr = options.BLOCK_M
    lists = problem.lists
    HAS_PARTIAL: gl.constexpr = lists.slots is not None
    start_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    heads_per_key = problem.schedule.heads_per_key
    seqlens, _, _, _ = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    wg_start = tile.start + CONSUMER * WG_ROWS
    wg_range = wg_query_range(wg_start, seqlens, range_flags(flags, RANGE), BLOCK_M)
    wg_kv = _wg_kv(keys, BLOCK_M, CONSUMER)
    positions = None
    if problem.scores.q_pos is not None:
        positions = load_positions(problem.scores, tile, seqlens, keys.pos, True)
    bits = lists.bits
    if bits is not None:
        bits += CONSUMER * WG_ROWS // 32
    ranges = None
    if lists.k_pos is not None:
        ranges = range_positions(lists, tile, problem.far_window)
    listed_use = loops_before(RANGE, options.HAS_FUTURE) * heads_per_key
    use = first_use
    if options.DEFER_DQ:  # for what was stored before the first step, if there is one
        named_barrier_arrive(DS_STORED, 2 * CONSUMER, (first_use + 1) % 2)
    for member in range(heads_per_key):
        head = tile.kv_head * heads_per_key + member
        dropout = begin_dropout_of_head(problem, tile, member)
        slots = slots_of_head(lists, tile.batch, head)
        if bits is not None:
            slots += tile.start // LISTED
        tiles = smem.listed.receive(listed_use + member)
        scores = problem.scores
        params = params_of_head(scores, tile.batch, head)
        bias = load_bias(scores, tile.batch, head, wg_start, tile.start)
        slope = load_slope(scores, tile.batch, head, wg_start, tile.start)
        exp2_scale = exp2_scale_of_head(scores, tile.batch, head)
        scores = HeadScores(params, scores.scale, scores.cap, exp2_scale, bias, slope, positions)
        if smem.param_sums is not None:
            begin_sums(smem.param_sums, BLOCK_M, CONSUMER)
        for _step in range(tiles.count + tiles.n_partial):
            stage = use % smem.q.stages
            mbarrier.wait(smem.stats_full.index(stage), use // smem.q.stages & 1)
            mark = gl.max(smem.starts.index(stage).load(start_layout), 0)
            is_partial = None
            if HAS_PARTIAL:
                is_partial = (mark & 1) != 0
            take_step: gl.constexpr = step_d64 if options.DEFER_DQ else step_d128
            acc_dk, acc_dv = take_step(
                (acc_dk, acc_dv),
                Step(
                    use,
                    first_use,
                    mark & -2,
                    wg_range.full,
                    wg_range.full_stop,
                    wg_start,
                    dropout,
                    is_partial,
                    slots,
                    lists.slots_stride_query,
                    bits,
                    ranges,
                ),
                smem,
                dq_smem,
                wg_kv,
                seqlens,
                scores,
                range_flags(flags, RANGE),
                score_flags,
                CONSUMER,
            )
            use += 1
        if smem.param_sums is not None:
            store_sums(smem.param_sums, tile, head, problem, BLOCK_M, CONSUMER)
    if options.DEFER_DQ:
        last_ds = (use + 1) % 2
        named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER), last_ds)
        if use > first_use:
            dq = _start_dq(dq_smem.ds.index(last_ds), wg_kv, CONSUMER)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            named_barrier_sync(DQ_FREE, CONSUMER)
            dq_smem.dq.store(to_thread_order(dq))
    if use > first_use:
        fence_async_shared()
        named_barrier_arrive(DQ_FULL, CONSUMER)
    if RANGE != ALL and RANGE != NEAR:  # another loop follows, which begins with these barriers and buffers anew
        named_barrier_sync(RANGE_DONE, 0)
    return acc_dk, acc_dv, use


@gluon.jit
def _store_grad(target, rows, grad, tile, kv_capacity, CONSUMER: gl.constexpr):
    """Store a warp group's part of dK or dV, by way of rows in memory that no warp reads any more."""
    rows.store(grad.to(rows.dtype))
    start = tile.start + CONSUMER * WG_ROWS
    store_rows(target, rows, tile.batch, tile.kv_head, tile.k_offset, start, kv_capacity)


@gluon.jit
def _compute_warps(grads, rotation, smem, kv, dq_smem, problem, flags, score_flags, options, CONSUMER: gl.constexpr):
    """Compute dK and dV of WG_ROWS keys of the tile, and a chunk of each step's dQ."""
    # === prologue
    await_kernel_before()
    DTYPE: gl.constexpr = kv.k.dtype
    BLOCK_D: gl.constexpr = kv.k.shape[3]
    BLOCK_M: gl.constexpr = options.BLOCK_M
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    dk_layout: gl.constexpr = wgmma_layout(BLOCK_D)
    tile, kv_capacity, _, seqlens = tile_of_program(problem, flags, BLOCK_M)
    k_tile = kv.k.reshape([BLOCK_N, BLOCK_D])
    wg_v = kv.v.reshape([BLOCK_N, BLOCK_D]).slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    dq_smem = DqSmem(dq_smem.ds, dq_smem.dq.index(CONSUMER))
    wg_start = tile.start + CONSUMER * WG_ROWS
    k_idx = wg_start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, s_layout))
    if has_keys(tile.start, seqlens):
        mbarrier.wait(kv.full, 0)
        if flags.PARTIAL_TILES:
            zero_missing_rows(k_tile, tile.start, seqlens.kv_start, seqlens.n_keys, BLOCK_N, flags.HAS_STARTS)
            zero_missing_rows(wg_v, wg_start, seqlens.kv_start, seqlens.n_keys, WG_ROWS, flags.HAS_STARTS)

    # === mainloop
    mainloop: gl.constexpr = _mainloop_q if problem.lists.ptr is None else _mainloop_listed_q
    zeros = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, dk_layout)
    state = (zeros, zeros, 0)
    far_tile = kv.k_far.reshape([BLOCK_N, BLOCK_D])
    if problem.far_window is not None:
        zero_missing_rows(far_tile, tile.start, seqlens.kv_start, seqlens.n_keys, BLOCK_N, flags.HAS_STARTS)
    RANGES: gl.constexpr = ranges_of(problem.far_window is not None, options.HAS_FUTURE)
    for i in gl.static_range(len(RANGES)):
        state = mainloop(
            state,
            KeyTile(k_tile if i + 1 == len(RANGES) else far_tile, wg_v, k_idx),
            smem,
            dq_smem,
            tile,
            seqlens,
            problem,
            flags,
            score_flags,
            options,
            CONSUMER,
            RANGES[i],
        )
        if i + 2 == len(RANGES):  # no warp reads the far keys any more
            acc_dk, acc_dv, use = state
            if grads.dk_far is not None:
                wg_far = far_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
                wg_far.store(gl.where(key_mask(k_idx, seqlens, dk_layout), acc_dk * problem.grad_scale, 0.0).to(DTYPE))
                store_rows(grads.dk_far, wg_far, tile.batch, tile.kv_head, tile.k_offset, wg_start, kv_capacity)
                acc_dk = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, dk_layout)
            else:
                acc_dk = rebase_rotation(
                    acc_dk,
                    rotation.far_table,
                    rotation.table,
                    tile.batch,
                    tile.k_offset + wg_start,
                    tile.k_offset + kv_capacity,
                    rotation.R,
                    rotation.INTERLEAVED,
                )
            state = (acc_dk, acc_dv, use)

    # === epilogue
    acc_dk, acc_dv, use = state
    exists = key_mask(k_idx, seqlens, dk_layout)
    acc_dk = acc_dk * problem.grad_scale
    if problem.dropout is not None:
        acc_dv = acc_dv * problem.dropout.rescale
    if grads.feature_weights is not None:
        feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, dk_layout))
        acc_dk = acc_dk * gl.load(grads.feature_weights + feature, feature < grads.dk.head_dim, other=0.0)[None, :]
    _store_grad(grads.dv, wg_v, gl.where(exists, acc_dv, 0.0), tile, kv_capacity, CONSUMER)
    acc_dk = gl.where(exists, acc_dk, 0.0)
    if rotation.cos is not None:
        use += CONSUMER * WG_ROWS // BLOCK_M
        smem.q.wait_full(use)
        smem.do.wait_full(use)
        cos, sin = load_shared_table(
            smem.q.tile_of(use, rotation.cos).slice(CONSUMER * WG_ROWS % BLOCK_M, WG_ROWS, 0),
            smem.do.tile_of(use, rotation.cos).slice(CONSUMER * WG_ROWS % BLOCK_M, WG_ROWS, 0),
            acc_dk,
            rotation.R,
            rotation.INTERLEAVED,
        )
        acc_dk = inverse_rotate(acc_dk, cos, sin, rotation.INTERLEAVED)
    _store_grad(grads.dk, wg_v, acc_dk, tile, kv_capacity, CONSUMER)


@gluon.jit
def _start_warps(
    inputs, grads, dq_accum, workspace_rows, rotation, smem, kv, dq_smem, problem, flags, score_flags, options
):
    """Start the roles of a program."""
    gl.warp_specialize(
        [
            (_compute_warps, (grads, rotation, smem, kv, dq_smem, problem, flags, score_flags, options, 0)),
            (_compute_warps, (grads, rotation, smem, kv, dq_smem, problem, flags, score_flags, options, 1)),
            (load_warp, (inputs, smem, kv, problem, flags)),
            (reduce_dq_warp, (dq_accum, workspace_rows, smem, kv, dq_smem, problem, flags, options)),
        ],
        [4, 1, 1],
        [options.CONSUMER_REGISTERS, options.OTHER_REGISTERS, options.OTHER_REGISTERS],
    )


@gluon.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "n_tiles", "n_rows", "heads_per_l2_section", "workspace_rows"))
def backward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of BLOCK_M; features rotated already, as those of k
    k,  # (B, K, Tk, D), for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    do,  # (B, H, Tq, Dv), for tiles of BLOCK_M
    dq_accum,  # the workspaces, as lines of 32 elements, for tiles of a chunk: near pairs, far ones behind, then ahead
    dq_order_ptr,  # a number of each tile of the workspaces, 0 before; or None: programs add in any order
    dk,  # RowTarget of (B, K, Tk, D)
    dk_far,  # likewise, of far keys; None: added to dk
    dv,  # likewise
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    feature_weights_ptr,  # (D,), of the keys' features; or None
    param_sums_ptr,  # (B · H, n_tiles, 2 or 4), zeros: as in `ParamSums`; or None
    cos,  # of the keys, (B or 1, 1, Tk, R / 2), for tiles as large as q's; None: their gradient is not rotated
    sin,  # likewise
    table,  # RopeTable of the keys, where pairs are far; or None
    far_table,  # RopeTable of `k_far`; None: far keys are not rotated
    packed,  # Packed | None
    bounds,  # Bounds
    lists,  # Lists, of columns, or of those of each range of pairs
    dropout,  # Dropout | None
    scores,  # Scores
    grad_scale,  # of dK; with dropout the host rescales it
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many tokens, or positions, apart are far; or None
    n_tiles,  # fields of `Schedule`, of keys' tiles and heads
    n_rows,
    n_heads,
    heads_per_key,
    heads_per_l2_section,
    n_queries,
    n_keys,
    workspace_rows,  # of each head
    BLOCK_M: gl.constexpr,  # queries of a step
    DEFER_DQ: gl.constexpr,  # compute dQ a step late: warp groups may be a step apart
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
    R: gl.constexpr,  # features that are rotated
    INTERLEAVED: gl.constexpr,
    STEP_ORDER: gl.constexpr,  # a field of `Problem`
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_PARTIAL_TILES: gl.constexpr,
    MOD: gl.constexpr,
    MOD_BWD: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """Compute dK and dV of a tile of one key head, and add its part of dQ.

    `step_d128` and `step_d64` (DEFER_DQ) show the timeline of a step.
    """
    let_next_kernel_begin()
    schedule = Schedule(n_tiles, n_rows, n_heads, heads_per_key, heads_per_l2_section)
    q_ring = make_ring(q, STAGES, 2)
    do_ring = make_ring_beside(q_ring, do)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stats_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_tile = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    k_far_tile = k_tile  # never read
    if k_far is not None:
        k_far_tile = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
    ds_tiles = gl.allocate_shared_memory(k.dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    dq_chunks = gl.allocate_shared_memory(gl.float32, [2] + dq_accum.block_shape, dq_accum.layout)  # noqa: RUF005
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(stats_full.index(stage), count=1)
    mbarrier.init(kv_full, count=1)
    listed_ring = None
    starts = None
    if lists.ptr is not None:
        starts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        listed_ring = make_listed_ring(3)  # of readers: compute warp groups, and the dQ-reduce warp
    param_sums = None
    if param_sums_ptr is not None:
        sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        SIDES: gl.constexpr = 1 if scores.largest is None else 2
        sums_tiles = gl.allocate_shared_memory(gl.float32, [2 * SIDES, WG_ROWS, 4], sums_layout)
        param_sums = ParamSums(sums_tiles, param_sums_ptr, n_tiles)
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
    _start_warps(
        Inputs(q, k, v, Far(q_far_past, q_far_future, k_far, far_window), do, cos, sin, lse_ptr, delta_ptr),
        KvGrads(dk, dk_far, dv, feature_weights_ptr),
        dq_accum,
        workspace_rows,
        KeyRotation(table, far_table, cos, R, INTERLEAVED),
        QuerySmem(q_ring, do_ring, stats, stats_full, listed_ring, starts, param_sums),
        KvSmem(k_tile, k_far_tile, v_tile, kv_full),
        DqSmem(ds_tiles, dq_chunks),
        Problem(
            packed,
            bounds,
            scores,
            grad_scale,
            window,
            window_right,
            far_window,
            schedule,
            n_queries,
            n_keys,
            None,
            lists,
            dropout,
            dq_order_ptr,
            STEP_ORDER,
        ),
        FLAGS,
        ScoreFlags(MOD, MOD_BWD, None, CAPPED, True),
        Options(BLOCK_M, DEFER_DQ, q_far_future is not None, CONSUMER_REGISTERS, OTHER_REGISTERS),
    )
