"""The backward kernels of attention for Hopper for head dims above 128: one for all gradients, or two.

dK and dV of 128 keys and 256 features take all registers of a processor, so that no kernel can hold both beside scores.
Half as many keys would double what is read for each product, and what is added to dQ. Two kernels compute scores twice,
six products a step in place of five, and hold 128 keys each. With 192 features, and values of 128, dK and dV leave
registers for scores, one tile of float32 at a time: one kernel has both, unless a score mod or soft-capping needs more.

A program has a tile of keys, and loops over the queries that attend them. Scores are transposed, [keys, queries], so
that P and dS go from registers into the products that sum over queries. Five roles share a program: two compute warp
groups, with half of the keys each; a load warp; and a dQ-reduce warp of each compute warp group, which adds its part
of a step's dQ to a workspace in memory. There programs add in any order: that sum differs from run to run. With 256
features, and where dK and dV share a kernel, a step computes the dQ of the step before, so that warp groups need not
wait for each other's dS. A two-range encoding has loops over far pairs first, whose keys lie in the same memory.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.backward import begin_dropout_of_head, differentiate_scores, init_dp, p_operand
from ropewalk.ops.attention.hopper.backward_warps import (
    ALTERNATING,
    BY_HEADS,
    Inputs,
    Workspace,
    has_keys,
    loop_over_queries,
    next_in_loop,
    next_step,
    order_steps,
    ranges_of,
    tile_of_program,
    wg_query_range,
)
from ropewalk.ops.attention.hopper.barriers import (
    DQ_FREE,
    DQ_FULL,
    DS_READ,
    DS_STORED,
    RANGE_DONE,
    named_barrier_arrive,
    named_barrier_sync,
)
from ropewalk.ops.attention.hopper.dropout import dropped_queries, negate_dropped
from ropewalk.ops.attention.hopper.gluon_compat import (
    await_stores,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    tma_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ropewalk.ops.attention.hopper.pipeline import allocate_chunks, chunks_of, load_chunks, make_ring
from ropewalk.ops.attention.hopper.scheduler import Problem
from ropewalk.ops.attention.hopper.scores import (
    HeadScores,
    exp2_scale_of_head,
    load_bias,
    load_positions,
    load_slope,
    shift_lse,
)
from ropewalk.ops.attention.hopper.softmax import TileMask, recompute_p
from ropewalk.ops.attention.hopper.tiles import (
    BLOCK_N,
    WG_ROWS,
    init_neg_delta,
    key_mask,
    store_rows,
    wgmma_layout,
    zero_missing_rows,
    zero_of_step,
)
from ropewalk.ops.attention.triton.arguments import Far, Schedule, ScoreFlags
from ropewalk.ops.attention.triton.masking import ALL, FAR_FUTURE, FAR_PAST, NEAR, PAST, mask_flags, range_flags
from ropewalk.ops.attention.triton.softmax import differentiate_cap
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, params_of_head


class Smem(NamedTuple):
    """Shared memory of a program."""

    q: Any  # Ring
    do: Any  # Ring
    stats: Any  # [2 · stages of q, BLOCK_M]: lse and delta of a stage's queries
    stats_full: Any  # mbarrier of each stage
    k: Any  # chunks of the keys: first of far ones, then of near ones
    k_full: Any  # mbarrier; its first phase is of the first keys, and of the values
    k_empty: Any  # mbarrier: far keys are read no more
    v: Any
    ds: Any  # [2, BLOCK_N, BLOCK_M]: of even and odd steps; or [1, ...], of all
    dv: Any  # [2, WG_ROWS, Dv]: on its way to memory
    dq: Any  # [2, lines, 32]: of each compute warp group, a piece of dQ on its way to memory


class Options(NamedTuple):
    """Constants of a kernel: chunks of features, whether keys ahead may be far, and registers of a thread."""

    D_CHUNKS: Any
    HAS_FUTURE: Any
    CONSUMER_REGISTERS: Any
    OTHER_REGISTERS: Any


class Step(NamedTuple):
    """One tile of queries, as a warp group takes it."""

    use: Any  # of the rings
    m_start: Any  # the first query
    masked: Any  # some pairs with the warp group's keys are not attended
    is_first: Any  # of a range of pairs
    n_start: Any  # the warp group's first key
    dropout: Any  # RowDropout; None: nothing is dropped


class Targets(NamedTuple):
    """Targets of the gradients."""

    dv: Any  # RowTarget; None: another kernel computes dV
    dk: Any  # RowTarget
    dk_far: Any  # RowTarget; or None
    feature_weights: Any  # pointer to (D,), of the keys' features; or None


@gluon.jit
def _load_loop(use, q, inputs, smem, tile, seqlens, n_heads, problem, flags, RANGE: gl.constexpr):
    """Load each step's dO, Q, lse and delta; return the next use of the rings."""
    BLOCK_M: gl.constexpr = q.block_shape[2]
    _, tile_range, per_head, n_steps = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    column = gl.arange(0, BLOCK_M, layout=layout)
    heads_per_key = problem.schedule.heads_per_key
    order = order_steps(tile, tile_range, per_head, 0, problem, BLOCK_M)
    m_start = order.first
    member = 0
    for _step in range(n_steps):
        head = tile.kv_head * heads_per_key + member
        offset = (tile.batch * n_heads + head).to(gl.int64) * problem.n_queries + tile.q_offset + m_start
        exists = column < seqlens.n_queries - m_start
        lse = gl.load(inputs.lse + offset + column, exists, other=float("-inf"))
        delta = lse  # never read
        if inputs.delta is not None:
            delta = gl.load(inputs.delta + offset + column, exists, other=0.0)
            if problem.dropout is not None:  # gradients are rescaled at the end
                delta /= problem.dropout.rescale
        if inputs.v is None:  # the kernel of dV needs a step's dO last
            smem.q.fill(use, q, [tile.batch, head, tile.q_offset + m_start, 0])
        else:  # that of dK releases it first
            smem.do.fill(use, inputs.do, [tile.batch, head, tile.q_offset + m_start, 0])
            smem.q.fill(use, q, [tile.batch, head, tile.q_offset + m_start, 0])
        stage = use % smem.q.stages
        # A row that attends nothing, or does not exist, has P = exp2(S - inf) = 0.
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
        ahead = tile.start - (m_start + seqlens.causal_offset)
        lse = shift_lse(lse, problem.scores, tile.batch, head, ahead, column, flags, BLOCK_N)
        smem.stats.index(2 * stage).store(lse)
        if inputs.delta is not None:
            smem.stats.index(2 * stage + 1).store(delta)
        mbarrier.arrive(smem.stats_full.index(stage), count=1)
        if inputs.v is None:
            smem.do.fill(use, inputs.do, [tile.batch, head, tile.q_offset + m_start, 0])
        m_start, member = next_step(m_start, member, order, tile_range, problem)
        use += 1
    return use


@gluon.jit
def _load_keys(k, inputs, smem, tile, options, WITH_VALUES: gl.constexpr):
    """Load a tile's keys, and its values."""
    coordinates = [tile.batch, tile.kv_head, tile.k_offset + tile.start, 0]
    if WITH_VALUES:
        mbarrier.expect(smem.k_full, options.D_CHUNKS * k.block_type.nbytes + inputs.v.block_type.nbytes)
    else:
        mbarrier.expect(smem.k_full, options.D_CHUNKS * k.block_type.nbytes)
    load_chunks(k, coordinates, smem.k_full, smem.k, 0, options.D_CHUNKS)
    if WITH_VALUES:
        load_tile(inputs.v, coordinates, smem.k_full, smem.v.index(0))


@gluon.jit
def _load_warp(inputs, smem, problem, flags, options):
    """Load keys and values, and the steps of each range of pairs."""
    q, k, far = inputs.q, inputs.k, inputs.far
    tile, _, _, seqlens = tile_of_program(problem, flags, q.block_shape[2])
    n_heads = problem.schedule.n_heads * problem.schedule.heads_per_key
    exist = has_keys(tile.start, seqlens)
    use = 0
    if problem.far_window is not None:
        if exist:
            _load_keys(far.k, inputs, smem, tile, options, inputs.v is not None)
        use = _load_loop(use, far.q_past, inputs, smem, tile, seqlens, n_heads, problem, flags, FAR_PAST)
        if options.HAS_FUTURE:
            use = _load_loop(use, far.q_future, inputs, smem, tile, seqlens, n_heads, problem, flags, FAR_FUTURE)
        if exist:
            mbarrier.wait(smem.k_empty, 0)
            _load_keys(k, inputs, smem, tile, options, False)
    elif exist:
        _load_keys(k, inputs, smem, tile, options, inputs.v is not None)
    _load_loop(
        use, q, inputs, smem, tile, seqlens, n_heads, problem, flags, ALL if problem.far_window is None else NEAR
    )


@gluon.jit
def _await_keys(smem, k_tiles, start, tile, seqlens, flags, options, PHASE: gl.constexpr):
    """Wait for the keys of the first or second phase, and write zeros over those that do not exist, from `start` on."""
    if has_keys(tile.start, seqlens):
        mbarrier.wait(smem.k_full, PHASE)
        if flags.PARTIAL_TILES:
            for chunk in gl.static_range(options.D_CHUNKS):
                k_tile = k_tiles[chunk]
                zero_missing_rows(k_tile, start, seqlens.kv_start, seqlens.n_keys, k_tile.shape[0], flags.HAS_STARTS)


@gluon.jit
def _wg_rows(tiles, CONSUMER: gl.constexpr):
    """Return a warp group's rows of the chunks of a tile of keys."""
    start: gl.constexpr = CONSUMER * WG_ROWS
    if len(tiles) == 1:
        (tile,) = tiles
        result = (tile.slice(start, WG_ROWS, 0),)
    else:
        a, b, c = tiles
        result = (a.slice(start, WG_ROWS, 0), b.slice(start, WG_ROWS, 0), c.slice(start, WG_ROWS, 0))
    return result


@gluon.jit
def _zero_acc(options, BLOCK_D: gl.constexpr):
    """Return zeros for the sums of a warp group's keys, in chunks of features."""
    zeros = gl.zeros([WG_ROWS, BLOCK_D], gl.float32, wgmma_layout(BLOCK_D))
    if options.D_CHUNKS == 1:  # noqa: SIM108
        result = (zeros,)
    else:
        result = (zeros, zeros, zeros)
    return result


@gluon.jit
def _start_s(wg_k, q_tiles, m_start, seqlens, flags, options, BLOCK_M: gl.constexpr):
    """Start the product S = K Q' of a step's queries."""
    if flags.PACKED:
        for chunk in gl.static_range(options.D_CHUNKS):
            zero_missing_rows(q_tiles[chunk], m_start, 0, seqlens.n_queries, BLOCK_M, False)
    s = gl.zeros([WG_ROWS, BLOCK_M], gl.float32, wgmma_layout(BLOCK_M))
    for chunk in gl.static_range(options.D_CHUNKS):
        s = warpgroup_mma(wg_k[chunk], q_tiles[chunk].permute((1, 0)), s, use_acc=chunk > 0, is_async=True)
    return s


# === dV


@gluon.jit
def _skip_step(use, smem):
    """Release a step's queries, which attend none of the warp group's keys."""
    mbarrier.wait(smem.stats_full.index(use % smem.q.stages), use // smem.q.stages & 1)
    smem.q.wait_full(use)
    smem.q.release(use)
    smem.do.wait_full(use)
    smem.do.release(use)


@gluon.jit
def _mainloop_dv(
    state,
    k_idx,
    smem,
    tile,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the queries of a range of pairs to dV; return it with the next use of the rings.

    Each step, but for the first product of S and the last one of dV, is::

        wgmma    S(j+1) = K Q'   | dV += P(j)' dO
        threads  lse             | P(j+1)         | release dO
    """
    acc_dv, first_use = state
    DTYPE: gl.constexpr = smem.do.tiles.dtype
    BLOCK_M: gl.constexpr = smem.do.tiles.shape[3]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    lse_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_dv.type.layout, 2)
    seqlens, tile_range, steps_per_head, n_steps = loop_over_queries(
        tile.start, seqlens, problem, flags, BLOCK_M, RANGE
    )
    n_start = tile.start + CONSUMER * WG_ROWS
    wg_range = wg_query_range(n_start, seqlens, range_flags(flags, RANGE), BLOCK_M)
    # Of each head's steps the first ones, in which no query attends a key of this warp group; see `backward.py`.
    SKIPS: gl.constexpr = problem.STEP_ORDER == BY_HEADS or (CONSUMER == 1 and flags.SIDE == PAST)
    n_skipped = 0
    if SKIPS:
        n_skipped = gl.minimum((wg_range.start - tile_range.start) // BLOCK_M, steps_per_head)
    order = order_steps(tile, tile_range, steps_per_head, n_skipped, problem, BLOCK_M)
    positions = None
    if problem.scores.q_pos is not None:
        positions = load_positions(problem.scores, tile, seqlens, k_idx, True)
    for member in range(order.loops):
        head = tile.kv_head * problem.schedule.heads_per_key + member
        scores = problem.scores
        params = params_of_head(scores, tile.batch, head)
        bias = load_bias(scores, tile.batch, head, n_start, tile.start)
        slope = load_slope(scores, tile.batch, head, n_start, tile.start)
        exp2_scale = exp2_scale_of_head(scores, tile.batch, head)
        scores = HeadScores(params, scores.scale, scores.cap, exp2_scale, bias, slope, positions)
        dropout = begin_dropout_of_head(problem, tile, member)
        use = first_use + member * order.steps
        for _skipped in range(order.skipped_first):
            _skip_step(use, smem)
            use += 1
        if order.skipped_first + order.skipped_last < order.steps:
            m_start = order.first
            alternate = 0  # the member of the group, if heads alternate
            mbarrier.wait(smem.stats_full.index(use % smem.q.stages), use // smem.q.stages & 1)
            lse = smem.stats.index(2 * (use % smem.q.stages)).load(lse_layout)
            smem.q.wait_full(use)
            k_tiles = chunks_of(smem.k, zero_of_step(use), options.D_CHUNKS)
            q_tiles = smem.q.chunk_tiles(use)
            s = _start_s(_wg_rows(k_tiles, CONSUMER), q_tiles, m_start, seqlens, flags, options, BLOCK_M)
            dropped = None
            if dropout is not None:
                dropped = dropped_queries(dropout, use, m_start, n_start, BLOCK_M)
            s = warpgroup_mma_wait(0, deps=(s,))
            smem.q.release(use)
            masked = (m_start < wg_range.full) | (m_start >= wg_range.full_stop)
            mask = TileMask(masked, seqlens)
            p, _, _ = recompute_p(s, lse, m_start, k_idx, mask, scores, range_flags(flags, RANGE), score_flags)
            if dropped is not None:
                p = negate_dropped(p, dropped)
            p_half = p_operand(p, dropped, DTYPE, p_layout)
            for _step in range(order.skipped_first + 1, order.steps - order.skipped_last):
                stage = (use + 1) % smem.q.stages
                mbarrier.wait(smem.stats_full.index(stage), (use + 1) // smem.q.stages & 1)
                lse = smem.stats.index(2 * stage).load(lse_layout)
                smem.q.wait_full(use + 1)
                smem.do.wait_full(use)
                if flags.PACKED:
                    zero_missing_rows(smem.do.tile(use), m_start, 0, seqlens.n_queries, BLOCK_M, False)
                m_start, alternate = next_in_loop(m_start, alternate, order, tile_range, problem)
                k_tiles = chunks_of(smem.k, zero_of_step(use), options.D_CHUNKS)
                q_tiles = smem.q.chunk_tiles(use + 1)
                s = _start_s(_wg_rows(k_tiles, CONSUMER), q_tiles, m_start, seqlens, flags, options, BLOCK_M)
                acc_dv = warpgroup_mma(p_half, smem.do.tile(use), acc_dv, is_async=True)
                next_dropped = None
                if dropout is not None:
                    next_dropped = dropped_queries(dropout, use + 1, m_start, n_start, BLOCK_M)
                s = warpgroup_mma_wait(1, deps=(s,))
                smem.q.release(use + 1)
                masked = (m_start < wg_range.full) | (m_start >= wg_range.full_stop)
                mask = TileMask(masked, seqlens)
                p, _, _ = recompute_p(s, lse, m_start, k_idx, mask, scores, range_flags(flags, RANGE), score_flags)
                if next_dropped is not None:
                    p = negate_dropped(p, next_dropped)
                next_p_half = p_operand(p, next_dropped, DTYPE, p_layout)
                acc_dv, p_half, next_p_half = warpgroup_mma_wait(0, deps=(acc_dv, p_half, next_p_half))
                smem.do.release(use)
                p_half = next_p_half
                use += 1
            smem.do.wait_full(use)
            if flags.PACKED:
                zero_missing_rows(smem.do.tile(use), m_start, 0, seqlens.n_queries, BLOCK_M, False)
            acc_dv = warpgroup_mma(p_half, smem.do.tile(use), acc_dv, is_async=True)
            acc_dv, p_half = warpgroup_mma_wait(0, deps=(acc_dv, p_half))
            smem.do.release(use)
            use += 1
        if problem.STEP_ORDER == ALTERNATING and SKIPS:
            for _skipped in range(order.skipped_last):
                _skip_step(use, smem)
                use += 1
    return acc_dv, first_use + n_steps


@gluon.jit
def _compute_dv(targets, smem, problem, flags, score_flags, options, CONSUMER: gl.constexpr):
    """Compute dV of WG_ROWS keys of the tile."""
    # === prologue
    BLOCK_M: gl.constexpr = smem.do.tiles.shape[3]
    BLOCK_DV: gl.constexpr = smem.do.tiles.shape[4]
    dv_layout: gl.constexpr = wgmma_layout(BLOCK_DV)
    tile, kv_capacity, _, seqlens = tile_of_program(problem, flags, BLOCK_M)
    k_tiles = chunks_of(smem.k, 0, options.D_CHUNKS)
    wg_k = _wg_rows(k_tiles, CONSUMER)
    wg_start = tile.start + CONSUMER * WG_ROWS
    k_idx = wg_start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, wgmma_layout(BLOCK_M)))
    _await_keys(smem, wg_k, wg_start, tile, seqlens, flags, options, 0)

    # === mainloop
    state = (gl.zeros([WG_ROWS, BLOCK_DV], gl.float32, dv_layout), 0)
    RANGES: gl.constexpr = ranges_of(problem.far_window is not None, options.HAS_FUTURE)
    for i in gl.static_range(len(RANGES)):
        state = _mainloop_dv(
            state, k_idx, smem, tile, seqlens, problem, flags, score_flags, options, CONSUMER, RANGES[i]
        )
        if i + 2 == len(RANGES):  # far keys are read no more
            fence_async_shared()
            mbarrier.arrive(smem.k_empty, count=1)
            _await_keys(smem, wg_k, wg_start, tile, seqlens, flags, options, 1)

    # === epilogue
    acc_dv, _ = state
    if problem.dropout is not None:
        acc_dv = acc_dv * problem.dropout.rescale
    if options.D_CHUNKS == 1:
        (dv_tile,) = wg_k  # which the other warp group does not read
    else:
        dv_tile = smem.dv.index(CONSUMER)
        dv_tile = dv_tile.reshape([WG_ROWS, BLOCK_DV])
    dv_tile.store(gl.where(key_mask(k_idx, seqlens, dv_layout), acc_dv, 0.0).to(dv_tile.dtype))
    store_rows(targets.dv, dv_tile, tile.batch, tile.kv_head, tile.k_offset, wg_start, kv_capacity)


# === dK and dQ


@gluon.jit
def _accumulate(ds_operand, q_tiles, acc, options):
    """Start the products dK += dS' Q of all chunks of features."""
    if options.D_CHUNKS == 1:
        (q_tile,) = q_tiles
        (total,) = acc
        result = (warpgroup_mma(ds_operand, q_tile, total, is_async=True),)
    else:
        q_a, q_b, q_c = q_tiles
        a, b, c = acc
        result = (
            warpgroup_mma(ds_operand, q_a, a, is_async=True),
            warpgroup_mma(ds_operand, q_b, b, is_async=True),
            warpgroup_mma(ds_operand, q_c, c, is_async=True),
        )
    return result


@gluon.jit
def _await_dk(acc, ds_operand, options, PENDING: gl.constexpr):
    """Wait for the products of dK, and leave so many others going."""
    if options.D_CHUNKS == 1:
        (total,) = acc
        total, ds_operand = warpgroup_mma_wait(PENDING, deps=(total, ds_operand))
        result = (total,)
    else:
        a, b, c = acc
        a, b, c, ds_operand = warpgroup_mma_wait(PENDING, deps=(a, b, c, ds_operand))
        result = (a, b, c)
    return result


@gluon.constexpr_function
def defers_dq(D_CHUNKS, FUSED):
    """Say whether a step stores the dQ of the step before."""
    return D_CHUNKS == 1 or FUSED


@gluon.jit
def _start_dq(ds, k_tile):
    """Start the product dQ = dS' K of some features, over all keys."""
    WIDTH: gl.constexpr = k_tile.shape[1]
    BLOCK_M: gl.constexpr = ds.shape[1]
    acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, wgmma_layout(WIDTH))
    return warpgroup_mma(ds.permute((1, 0)), k_tile, acc, use_acc=False, is_async=True)


@gluon.jit
def _put_piece(dq, smem, CONSUMER: gl.constexpr):
    """Give a piece of dQ [64, features] to the dQ-reduce warp, four elements of a thread at a time: no element moves.

    They go by features eight at a time, then by threads, of which each has two neighbouring features of two rows that
    are eight apart. `bwd_postprocess_kernel` undoes it.
    """
    named_barrier_sync(DQ_FREE, CONSUMER)
    pieces = gl.permute(gl.reshape(dq, [4, 2, 8, dq.shape[1] // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    smem.dq.index(CONSUMER).store(gl.reshape(pieces, [dq.shape[0] * dq.shape[1] // 32, 32]))
    fence_async_shared()
    named_barrier_arrive(DQ_FULL, CONSUMER)


@gluon.jit
def _put_dq(dq, smem, CONSUMER: gl.constexpr):
    """Give 64 features of a step's dQ to the dQ-reduce warp, all at once or half of them after the others."""
    if smem.dq.shape[1] * smem.dq.shape[2] == dq.shape[0] * dq.shape[1]:
        _put_piece(dq, smem, CONSUMER)
    else:
        a, b = gl.split(gl.permute(gl.reshape(dq, [dq.shape[0], 2, dq.shape[1] // 2]), (0, 2, 1)))
        _put_piece(a, smem, CONSUMER)
        _put_piece(b, smem, CONSUMER)


@gluon.jit
def _parity(use, smem):
    """Return which tile of dS a step has."""
    parity = use % 2
    if smem.ds.shape[0] == 1:
        parity = 0
    return parity


@gluon.jit
def _step_chunks(
    acc,
    step,
    k_idx,
    smem,
    seqlens,
    scores,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
):
    """Add a tile of queries to dK, in three chunks of features, and store its dQ. Warp groups are in one step::

    wgmma    S=KQ', dP=VdO'-delta |   | dK+=dS'Q             | dQ=dS K
    threads  lse, -delta          | P | dS -> smem, sync dS  | release Q, dQ -> smem
    """
    DTYPE: gl.constexpr = smem.ds.dtype
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    BLOCK_D: gl.constexpr = smem.k.shape[4]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, wgmma_layout(BLOCK_D), 2)
    stage = step.use % smem.q.stages
    zero = zero_of_step(step.use)
    k_tiles = chunks_of(smem.k, zero, options.D_CHUNKS)
    q_tiles = chunks_of(smem.q.tiles, zero + stage, options.D_CHUNKS)
    (do_tile,) = chunks_of(smem.do.tiles, zero + step.use % smem.do.stages, 1)
    (v_tile,) = chunks_of(smem.v, zero, 1)
    wg_v = v_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    # All reads go before products: reads wait in one queue behind those.
    mbarrier.wait(smem.stats_full.index(stage), step.use // smem.q.stages & 1)
    lse = smem.stats.index(2 * stage).load(gl.SliceLayout(0, s_layout))
    dropped = None
    dp = init_dp(smem.stats.index(2 * stage + 1), step, s_layout)
    smem.q.wait_full(step.use)
    s = _start_s(_wg_rows(k_tiles, CONSUMER), q_tiles, step.m_start, seqlens, flags, options, BLOCK_M)
    smem.do.wait_full(step.use)
    if flags.PACKED:
        zero_missing_rows(do_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    dp = warpgroup_mma(wg_v, do_tile.permute((1, 0)), dp, is_async=True)
    if step.dropout is not None:
        dropped = dropped_queries(step.dropout, step.use, step.m_start, step.n_start, BLOCK_M)
    s = warpgroup_mma_wait(1, deps=(s,))
    p, capped, scaled = recompute_p(
        s, lse, step.m_start, k_idx, TileMask(step.masked, seqlens), scores, flags, score_flags
    )
    if dropped is not None:
        p = negate_dropped(p, dropped)
    p = differentiate_cap(p, capped, score_flags)  # before p and the scores are both needed
    dp = warpgroup_mma_wait(0, deps=(dp,))
    smem.do.release(step.use)
    delta = None if dropped is None else smem.stats.index(2 * stage + 1)
    ds = differentiate_scores(step.m_start, p, dp, delta, scaled, k_idx, seqlens, scores, flags, score_flags)
    ds_half = ds.to(DTYPE)
    # Of two tiles in turn: when a warp group stores one, both have read its content of two steps before.
    ds_tile = smem.ds.index(step.use % 2)
    ds_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(ds_half)
    ds_operand = gl.convert_layout(ds_half, operand_layout)
    acc = _accumulate(ds_operand, q_tiles, acc, options)
    fence_async_shared()
    named_barrier_sync(DS_STORED, 0)
    dq = _start_dq(ds_tile, k_tiles[CONSUMER])
    acc = _await_dk(acc, ds_operand, options, 1)
    smem.q.release(step.use)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _put_dq(dq, smem, CONSUMER)
    # The last chunk is a warp group's in every second step.
    _, _, last_tile = k_tiles
    if (step.use + CONSUMER) % 2 == 0:
        dq = _start_dq(ds_tile, last_tile)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _put_dq(dq, smem, CONSUMER)
    return acc


# Operands: P dP of two pairs; P of both in one register, dP.
_TIMES_BF16 = gl.constexpr(
    "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000; mul.f32 $0, low, $3; "
    "mul.f32 $1, high, $4; }"
)
_TIMES_FP16 = gl.constexpr(
    "{ .reg .b16 a, b; .reg .f32 low, high; mov.b32 {a, b}, $2; cvt.f32.f16 low, a; cvt.f32.f16 high, b; "
    "mul.f32 $0, low, $3; mul.f32 $1, high, $4; }"
)


@gluon.jit
def _times_half(p_half, dp):
    """Return P dP, given P in 16 bits.

    The compiler would hold each P in a register of its own, from the product with dO on.
    """
    PTX: gl.constexpr = _TIMES_BF16 if p_half.dtype == gl.bfloat16 else _TIMES_FP16
    return gl.inline_asm_elementwise(PTX, "=f,=f,r,f,f", [p_half, dp], gl.float32, True, 2)


@gluon.jit
def _put_last_chunk(ds_tile, k_tiles, use, is_first, smem, CONSUMER: gl.constexpr):
    """Compute and store the last chunk of the dQ of the step before, which a warp group has in every second step."""
    _, _, last_tile = k_tiles
    if (use + CONSUMER) % 2 == 0:
        dq = _start_dq(ds_tile, last_tile)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if not is_first:
            _put_dq(dq, smem, CONSUMER)


@gluon.jit
def _step_fused(
    acc,
    step,
    k_idx,
    smem,
    seqlens,
    scores,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
):
    """Add a tile of queries to dK and dV, and store the dQ of the step before. Warp groups may be a step apart::

    wgmma    S=KQ' |   | dQ(j-1)=dS K, dV+=P'dO | its last chunk  | dP=VdO'-delta |                    | dK+=dS'Q
    threads  lse   | P | dQ(j-1) -> smem        | dQ(j-1) -> smem |               | dS -> smem, arrive | release

    Registers beside dK and dV hold one tile of float32 at a time: P is in 16 bits when dP comes.
    """
    acc_dk, acc_dv = acc
    DTYPE: gl.constexpr = smem.ds.dtype
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    BLOCK_D: gl.constexpr = smem.k.shape[4]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, wgmma_layout(BLOCK_D), 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_dv.type.layout, 2)
    stage = step.use % smem.q.stages
    zero = zero_of_step(step.use)
    k_tiles = chunks_of(smem.k, zero, options.D_CHUNKS)
    q_tiles = chunks_of(smem.q.tiles, zero + stage, options.D_CHUNKS)
    (do_tile,) = chunks_of(smem.do.tiles, zero + step.use % smem.do.stages, 1)
    (v_tile,) = chunks_of(smem.v, zero, 1)
    wg_v = v_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    last_ds = smem.ds.index((step.use + 1) % 2)
    # All reads go before products: reads wait in one queue behind those.
    mbarrier.wait(smem.stats_full.index(stage), step.use // smem.q.stages & 1)
    lse = smem.stats.index(2 * stage).load(gl.SliceLayout(0, s_layout))
    smem.q.wait_full(step.use)
    s = _start_s(_wg_rows(k_tiles, CONSUMER), q_tiles, step.m_start, seqlens, flags, options, BLOCK_M)
    s = warpgroup_mma_wait(0, deps=(s,))
    p, _, _ = recompute_p(s, lse, step.m_start, k_idx, TileMask(step.masked, seqlens), scores, flags, score_flags)
    p_half = gl.convert_layout(p.to(DTYPE), p_layout)
    smem.do.wait_full(step.use)
    if flags.PACKED:
        zero_missing_rows(do_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    # The first step computes from what lies there, and stores nothing.
    named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER), (step.use + 1) % 2)
    dq = _start_dq(last_ds, k_tiles[CONSUMER])
    acc_dv = warpgroup_mma(p_half, do_tile, acc_dv, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if not step.is_first:
        _put_dq(dq, smem, CONSUMER)
    acc_dv, p_half = warpgroup_mma_wait(0, deps=(acc_dv, p_half))
    _put_last_chunk(last_ds, k_tiles, step.use, step.is_first, smem, CONSUMER)
    dp = init_neg_delta(smem.stats.index(2 * stage + 1), s_layout)
    dp = warpgroup_mma(wg_v, do_tile.permute((1, 0)), dp, is_async=True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    smem.do.release(step.use)
    ds_half = _times_half(gl.convert_layout(p_half, s_layout), dp).to(DTYPE)
    # Of two tiles in turn: when a warp group stores one, both have read its content of two steps before.
    smem.ds.index(step.use % 2).slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(ds_half)
    fence_async_shared()
    named_barrier_arrive(DS_STORED, 2 * CONSUMER, step.use % 2)
    ds_operand = gl.convert_layout(ds_half, operand_layout)
    acc_dk = _accumulate(ds_operand, q_tiles, acc_dk, options)
    acc_dk = _await_dk(acc_dk, ds_operand, options, 0)
    smem.q.release(step.use)
    return acc_dk, acc_dv


@gluon.jit
def _quarter(k_tiles, CONSUMER: gl.constexpr, PART: gl.constexpr):
    """Return a quarter of the keys' features: of the two that a warp group has of dQ, one."""
    (k_tile,) = k_tiles
    WIDTH: gl.constexpr = k_tile.shape[1] // 4
    return k_tile.slice((2 * CONSUMER + PART) * WIDTH, WIDTH, 1)


@gluon.jit
def _step_whole(
    acc,
    step,
    k_idx,
    smem,
    seqlens,
    scores,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
):
    """Add a tile of queries to dK, and store the dQ of the step before. Warp groups may be a step apart::

    wgmma    dQ(j-1)=dS K       | S=KQ'                       | dP=VdO'-delta |                    | dK+=dS'Q
    threads  half of dQ(j-1) -> | other half -> smem, stats   | P             | dS -> smem, arrive | release Q
    """
    DTYPE: gl.constexpr = smem.ds.dtype
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    BLOCK_D: gl.constexpr = smem.k.shape[4]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, wgmma_layout(BLOCK_D), 2)
    stage = step.use % smem.q.stages
    zero = zero_of_step(step.use)
    k_tiles = chunks_of(smem.k, zero, 1)
    q_tiles = chunks_of(smem.q.tiles, zero + stage, 1)
    (do_tile,) = chunks_of(smem.do.tiles, zero + step.use % smem.do.stages, 1)
    (v_tile,) = chunks_of(smem.v, zero, 1)
    wg_v = v_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    ds_tile = smem.ds.index(0)
    # The first step computes from what lies there, and stores nothing.
    named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER))
    dq_a = _start_dq(ds_tile, _quarter(k_tiles, CONSUMER, 0))
    dq_b = _start_dq(ds_tile, _quarter(k_tiles, CONSUMER, 1))
    dq_a = warpgroup_mma_wait(1, deps=(dq_a,))
    if not step.is_first:
        _put_dq(dq_a, smem, CONSUMER)
    mbarrier.wait(smem.stats_full.index(stage), step.use // smem.q.stages & 1)
    smem.q.wait_full(step.use)
    s = _start_s(_wg_rows(k_tiles, CONSUMER), q_tiles, step.m_start, seqlens, flags, options, BLOCK_M)
    dq_b = warpgroup_mma_wait(1, deps=(dq_b,))
    named_barrier_arrive(DS_READ, 2 * CONSUMER)
    if not step.is_first:
        _put_dq(dq_b, smem, CONSUMER)
    lse = smem.stats.index(2 * stage).load(gl.SliceLayout(0, s_layout))
    dropped = None
    dp = init_dp(smem.stats.index(2 * stage + 1), step, s_layout)
    smem.do.wait_full(step.use)
    if flags.PACKED:
        zero_missing_rows(do_tile, step.m_start, 0, seqlens.n_queries, BLOCK_M, False)
    dp = warpgroup_mma(wg_v, do_tile.permute((1, 0)), dp, is_async=True)
    if step.dropout is not None:
        dropped = dropped_queries(step.dropout, step.use, step.m_start, step.n_start, BLOCK_M)
    s = warpgroup_mma_wait(1, deps=(s,))
    p, capped, scaled = recompute_p(
        s, lse, step.m_start, k_idx, TileMask(step.masked, seqlens), scores, flags, score_flags
    )
    if dropped is not None:
        p = negate_dropped(p, dropped)
    p = differentiate_cap(p, capped, score_flags)  # before p and the scores are both needed
    dp = warpgroup_mma_wait(0, deps=(dp,))
    smem.do.release(step.use)
    delta = None if dropped is None else smem.stats.index(2 * stage + 1)
    ds = differentiate_scores(step.m_start, p, dp, delta, scaled, k_idx, seqlens, scores, flags, score_flags)
    ds_half = ds.to(DTYPE)
    named_barrier_sync(DS_READ, 2 * (1 - CONSUMER))
    ds_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, 0).store(ds_half)
    fence_async_shared()
    named_barrier_arrive(DS_STORED, 2 * CONSUMER)
    ds_operand = gl.convert_layout(ds_half, operand_layout)
    acc = _accumulate(ds_operand, q_tiles, acc, options)
    acc = _await_dk(acc, ds_operand, options, 0)
    smem.q.release(step.use)
    return acc


@gluon.jit
def _flush_dq(use, smem, options, CONSUMER: gl.constexpr):
    """Store the dQ of the last step of a range, before use `use` of the rings."""
    parity = _parity(use + 1, smem)
    named_barrier_sync(DS_STORED, 2 * (1 - CONSUMER), parity)
    ds_tile = smem.ds.index(parity)
    k_tiles = chunks_of(smem.k, 0, options.D_CHUNKS)
    if options.D_CHUNKS == 1:
        for part in gl.static_range(2):
            dq = _start_dq(ds_tile, _quarter(k_tiles, CONSUMER, part))
            dq = warpgroup_mma_wait(0, deps=(dq,))
            _put_dq(dq, smem, CONSUMER)
    else:
        dq = _start_dq(ds_tile, k_tiles[CONSUMER])
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _put_dq(dq, smem, CONSUMER)
        _put_last_chunk(ds_tile, k_tiles, use, False, smem, CONSUMER)


@gluon.jit
def _mainloop_dk(
    state,
    k_idx,
    targets,
    smem,
    tile,
    seqlens,
    problem,
    flags,
    score_flags,
    options,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add the queries of a range of pairs to dK, or dK and dV, and store their dQ; return also the rings' next use."""
    acc, first_use = state
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    seqlens, tile_range, steps_per_head, n_steps = loop_over_queries(
        tile.start, seqlens, problem, flags, BLOCK_M, RANGE
    )
    n_start = tile.start + CONSUMER * WG_ROWS
    wg_range = wg_query_range(n_start, seqlens, range_flags(flags, RANGE), BLOCK_M)
    order = order_steps(tile, tile_range, steps_per_head, 0, problem, BLOCK_M)
    FUSED: gl.constexpr = targets.dv is not None
    DEFERS_DQ: gl.constexpr = defers_dq(options.D_CHUNKS, FUSED)
    if DEFERS_DQ and n_steps > 0:  # for what was stored before the first step
        named_barrier_arrive(DS_STORED, 2 * CONSUMER, _parity(first_use + 1, smem))
    positions = None
    if problem.scores.q_pos is not None:
        positions = load_positions(problem.scores, tile, seqlens, k_idx, True)
    for member in range(order.loops):
        head = tile.kv_head * problem.schedule.heads_per_key + member
        scores = problem.scores
        params = params_of_head(scores, tile.batch, head)
        bias = load_bias(scores, tile.batch, head, n_start, tile.start)
        slope = load_slope(scores, tile.batch, head, n_start, tile.start)
        exp2_scale = exp2_scale_of_head(scores, tile.batch, head)
        scores = HeadScores(params, scores.scale, scores.cap, exp2_scale, bias, slope, positions)
        dropout = begin_dropout_of_head(problem, tile, member)
        use = first_use + member * order.steps
        m_start = order.first
        alternate = 0  # the member of the group, if heads alternate
        for _step in range(order.steps):
            masked = (m_start < wg_range.full) | (m_start >= wg_range.full_stop)
            take_step: gl.constexpr = _step_fused if FUSED else _step_whole if DEFERS_DQ else _step_chunks
            acc = take_step(
                acc,
                Step(use, m_start, masked, use == first_use, n_start, dropout),
                k_idx,
                smem,
                seqlens,
                scores,
                range_flags(flags, RANGE),
                score_flags,
                options,
                CONSUMER,
            )
            use += 1
            m_start, alternate = next_in_loop(m_start, alternate, order, tile_range, problem)
    if DEFERS_DQ and n_steps > 0:
        _flush_dq(first_use + n_steps, smem, options, CONSUMER)
    if RANGE != ALL and RANGE != NEAR:  # the far keys' memory is written next
        named_barrier_sync(RANGE_DONE, 0)
    return acc, first_use + n_steps


@gluon.jit
def _store_dk(
    acc,
    target,
    wg_tiles,
    weights,
    grad_scale,
    exists,
    tile,
    wg_start,
    kv_capacity,
    options,
    BLOCK_D: gl.constexpr,
):
    """Store dK of a warp group's keys by way of shared memory, a chunk of features after another."""
    for chunk in gl.static_range(options.D_CHUNKS):
        dk = acc[chunk] * grad_scale
        if weights is not None:
            feature = chunk * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, wgmma_layout(BLOCK_D)))
            dk = dk * gl.load(weights + feature, feature < target.head_dim, other=0.0)[None, :]
        wg_tile = wg_tiles[chunk]
        wg_tile.store(gl.where(exists, dk, 0.0).to(wg_tile.dtype))
        store_rows(target, wg_tile, tile.batch, tile.kv_head, tile.k_offset, wg_start, kv_capacity, chunk * BLOCK_D)


@gluon.jit
def _compute_dk(targets, smem, problem, flags, score_flags, options, CONSUMER: gl.constexpr):
    """Compute dK of WG_ROWS keys of the tile, dV if no other kernel does, and half of each step's dQ."""
    # === prologue
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    BLOCK_D: gl.constexpr = smem.k.shape[4]
    BLOCK_DV: gl.constexpr = smem.v.shape[4]
    tile, kv_capacity, _, seqlens = tile_of_program(problem, flags, BLOCK_M)
    k_tiles = chunks_of(smem.k, 0, options.D_CHUNKS)
    wg_k = _wg_rows(k_tiles, CONSUMER)
    wg_v = smem.v.index(0).reshape([BLOCK_N, BLOCK_DV]).slice(CONSUMER * WG_ROWS, WG_ROWS, 0)
    wg_start = tile.start + CONSUMER * WG_ROWS
    k_idx = wg_start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, wgmma_layout(BLOCK_M)))
    exists = key_mask(k_idx, seqlens, wgmma_layout(BLOCK_D))
    _await_keys(smem, k_tiles, tile.start, tile, seqlens, flags, options, 0)
    if flags.PARTIAL_TILES:
        zero_missing_rows(wg_v, wg_start, seqlens.kv_start, seqlens.n_keys, WG_ROWS, flags.HAS_STARTS)

    # === mainloop
    FUSED: gl.constexpr = targets.dv is not None
    acc = _zero_acc(options, BLOCK_D)
    if FUSED:
        acc = (acc, gl.zeros([WG_ROWS, BLOCK_DV], gl.float32, wgmma_layout(BLOCK_DV)))
    use = 0
    RANGES: gl.constexpr = ranges_of(problem.far_window is not None, options.HAS_FUTURE)
    for i in gl.static_range(len(RANGES)):
        acc, use = _mainloop_dk(
            (acc, use),
            k_idx,
            targets,
            smem,
            tile,
            seqlens,
            problem,
            flags,
            score_flags,
            options,
            CONSUMER,
            RANGES[i],
        )
        if i + 2 == len(RANGES):  # far keys are read no more
            acc_dk = acc
            if FUSED:
                acc_dk, acc_dv = acc
            _store_dk(
                acc_dk,
                targets.dk_far,
                wg_k,
                None,
                problem.grad_scale,
                exists,
                tile,
                wg_start,
                kv_capacity,
                options,
                BLOCK_D,
            )
            fence_async_shared()
            mbarrier.arrive(smem.k_empty, count=1)
            _await_keys(smem, k_tiles, tile.start, tile, seqlens, flags, options, 1)
            acc = _zero_acc(options, BLOCK_D)
            if FUSED:
                acc = (acc, acc_dv)

    # === epilogue
    if FUSED:
        acc, acc_dv = acc
        wg_v.store(gl.where(key_mask(k_idx, seqlens, wgmma_layout(BLOCK_DV)), acc_dv, 0.0).to(wg_v.dtype))
        store_rows(targets.dv, wg_v, tile.batch, tile.kv_head, tile.k_offset, wg_start, kv_capacity)
    if options.D_CHUNKS == 1:
        wg_tiles = (wg_v,)  # keys are read by both warp groups
    else:
        first, second = wg_v.slice(0, BLOCK_D, 1), wg_v.slice(BLOCK_D, BLOCK_D, 1)
        wg_tiles = (first, second, first)
    _store_dk(
        acc,
        targets.dk,
        wg_tiles,
        targets.feature_weights,
        problem.grad_scale,
        exists,
        tile,
        wg_start,
        kv_capacity,
        options,
        BLOCK_D,
    )


# === dQ-reduce


@gluon.jit
def _reduce_piece(dq_accum, line, smem, CONSUMER: gl.constexpr):
    """Add a warp group's next piece of dQ to the workspace, from a line on."""
    await_stores(0)
    named_barrier_arrive(DQ_FREE, CONSUMER)
    named_barrier_sync(DQ_FULL, CONSUMER)
    tma_add(dq_accum, [line, 0], smem.dq.index(CONSUMER))


@gluon.jit
def _reduce_loop(
    dq_accum,
    use,
    workspace,
    smem,
    tile,
    seqlens,
    problem,
    flags,
    options,
    FUSED: gl.constexpr,
    CONSUMER: gl.constexpr,
    RANGE: gl.constexpr,
):
    """Add a warp group's part of dQ to the workspace of a range of pairs; return the next use of the rings."""
    BLOCK_M: gl.constexpr = smem.ds.shape[2]
    LINES: gl.constexpr = dq_accum.block_shape[0]  # of a piece
    PIECES: gl.constexpr = BLOCK_M * workspace.LINES_PER_ROW // LINES // 2
    STEPS_LATE: gl.constexpr = 1 if defers_dq(options.D_CHUNKS, FUSED) else 0
    _, tile_range, per_head, n_steps = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    order = order_steps(tile, tile_range, per_head, 0, problem, BLOCK_M)
    m_start = order.first
    member = 0
    for _step in range(n_steps):
        line = workspace.line + (member * workspace.rows + m_start) * workspace.LINES_PER_ROW
        for piece in gl.static_range(PIECES):
            _reduce_piece(dq_accum, line + (CONSUMER * PIECES + piece) * LINES, smem, CONSUMER)
        # Of three chunks the last one is a warp group's in every second step.
        if options.D_CHUNKS > 1 and (use + STEPS_LATE + CONSUMER) % 2 == 0:
            _reduce_piece(dq_accum, line + 2 * LINES, smem, CONSUMER)
        m_start, member = next_step(m_start, member, order, tile_range, problem)
        use += 1
    return use


@gluon.jit
def _reduce_dq_warp(
    dq_accum, workspace_rows, smem, problem, flags, options, FUSED: gl.constexpr, CONSUMER: gl.constexpr
):
    """Add a warp group's part of each step's dQ to the workspaces: one for each range of pairs."""
    tile, _, workspace_row, seqlens = tile_of_program(problem, flags, smem.ds.shape[2])
    LINES_PER_ROW: gl.constexpr = options.D_CHUNKS * smem.k.shape[4] // dq_accum.block_shape[1]
    head = (tile.batch * problem.schedule.n_heads + tile.kv_head) * problem.schedule.heads_per_key
    line = (head * workspace_rows + workspace_row) * LINES_PER_ROW
    use = 0
    n_lines = problem.schedule.n_rows * problem.schedule.heads_per_key * workspace_rows * LINES_PER_ROW
    RANGES: gl.constexpr = ranges_of(problem.far_window is not None, options.HAS_FUTURE)
    for i in gl.static_range(len(RANGES)):
        first_line = line + (i + 1) % len(RANGES) * n_lines  # the workspace of near pairs is the first one
        use = _reduce_loop(
            dq_accum,
            use,
            Workspace(first_line, workspace_rows, LINES_PER_ROW),
            smem,
            tile,
            seqlens,
            problem,
            flags,
            options,
            FUSED,
            CONSUMER,
            RANGES[i],
        )
    await_stores(0)


@gluon.jit
def _start_warps(inputs, targets, dq_accum, workspace_rows, smem, problem, flags, score_flags, options):
    """Start the roles of a program; that of dV has no dQ-reduce warps."""
    OTHER_REGISTERS: gl.constexpr = options.OTHER_REGISTERS
    FUSED: gl.constexpr = targets.dv is not None
    if inputs.v is None:
        gl.warp_specialize(
            [
                (_compute_dv, (targets, smem, problem, flags, score_flags, options, 0)),
                (_compute_dv, (targets, smem, problem, flags, score_flags, options, 1)),
                (_load_warp, (inputs, smem, problem, flags, options)),
            ],
            [4, 1],
            [options.CONSUMER_REGISTERS, options.OTHER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute_dk, (targets, smem, problem, flags, score_flags, options, 0)),
                (_compute_dk, (targets, smem, problem, flags, score_flags, options, 1)),
                (_load_warp, (inputs, smem, problem, flags, options)),
                (_reduce_dq_warp, (dq_accum, workspace_rows, smem, problem, flags, options, FUSED, 0)),
                (_reduce_dq_warp, (dq_accum, workspace_rows, smem, problem, flags, options, FUSED, 1)),
            ],
            [4, 1, 1, 1],
            [options.CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
        )


@gluon.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "n_tiles", "n_rows", "heads_per_l2_section", "workspace_rows"))
def backward_wide_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of BLOCK_M; features rotated already, as those of k
    k,  # (B, K, Tk, D), for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise; None: compute dV, otherwise dK and dQ, and dV if it has a target
    q_far_past,  # fields of `Far`
    q_far_future,
    k_far,
    do,  # (B, H, Tq, Dv), for tiles of BLOCK_M
    dq_accum,  # the workspaces, as lines of 32 elements, for tiles of a piece: near pairs, far ones behind, then ahead
    dk,  # RowTarget; or None
    dk_far,  # RowTarget, of far keys; or None
    dv,  # RowTarget; or None
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,  # likewise; or None
    feature_weights_ptr,  # (D,), of the keys' features; or None
    packed,  # Packed | None
    bounds,  # Bounds
    scores,  # Scores
    dropout,  # Dropout | None
    grad_scale,  # of dK; with dropout the host rescales it
    window,
    window_right,  # or None: as `window`
    far_window,  # pairs at least so many tokens apart are far; or None
    n_tiles,  # fields of `Schedule`, of keys' tiles and heads
    n_rows,
    n_heads,
    heads_per_key,
    heads_per_l2_section,
    n_queries,
    n_keys,
    workspace_rows,  # of each head
    BLOCK_M: gl.constexpr,  # queries of a step
    Q_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    D_CHUNKS: gl.constexpr,  # of q's and k's features, as wide as their tiles
    CONSUMER_REGISTERS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
    STEP_ORDER: gl.constexpr,  # a field of `Problem`
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_PARTIAL_TILES: gl.constexpr,
    MOD: gl.constexpr,
    MOD_BWD: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """Compute dV of a tile of one key head; or dK, or both, and add its part of dQ.

    `_mainloop_dv`, `_step_whole`, `_step_chunks` and `_step_fused` show the timelines of a step.
    """
    schedule = Schedule(n_tiles, n_rows, n_heads, heads_per_key, heads_per_l2_section)
    q_ring = make_ring(q, Q_STAGES, 2, D_CHUNKS)
    do_ring = make_ring(do, DO_STAGES, 2)
    stats = gl.allocate_shared_memory(gl.float32, [2 * Q_STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stats_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(stats_full.index(stage), count=1)
    k_tiles = allocate_chunks(k, D_CHUNKS)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    k_empty = k_full  # never read
    if k_far is not None:
        k_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(k_empty, count=2)
    v_tiles = k_tiles  # never read, as the next ones
    ds = k_tiles
    dv_tiles = k_tiles
    dq_tiles = k_tiles
    if v is not None:
        v_tiles = allocate_chunks(v, 1)
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k.dtype)
        DS_TILES: gl.constexpr = 1 if D_CHUNKS == 1 else 2
        ds = gl.allocate_shared_memory(k.dtype, [DS_TILES, BLOCK_N, BLOCK_M], ds_layout)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2] + dq_accum.block_shape, dq_accum.layout)  # noqa: RUF005
    elif D_CHUNKS > 1:
        dv_tiles = gl.allocate_shared_memory(do.dtype, [2, 1, 1, WG_ROWS, do.block_shape[3]], do.layout)
    FLAGS: gl.constexpr = mask_flags(
        packed is not None,
        bounds.key_lengths,
        bounds.key_starts,
        bounds.query_starts,
        CAUSAL,
        WINDOWED,
        True,
        HAS_PARTIAL_TILES,
    )
    _start_warps(
        Inputs(q, k, v, Far(q_far_past, q_far_future, k_far, far_window), do, None, None, lse_ptr, delta_ptr),
        Targets(dv, dk, dk_far, feature_weights_ptr),
        dq_accum,
        workspace_rows,
        Smem(q_ring, do_ring, stats, stats_full, k_tiles, k_full, k_empty, v_tiles, ds, dv_tiles, dq_tiles),
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
            None,
            dropout,
            None,
            STEP_ORDER,
        ),
        FLAGS,
        ScoreFlags(MOD, MOD_BWD, None, CAPPED, True),
        Options(D_CHUNKS, q_far_future is not None, CONSUMER_REGISTERS, OTHER_REGISTERS),
    )
