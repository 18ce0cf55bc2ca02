"""The load warp and the dQ-reduce warp of the backward kernel for Hopper, and the loops that all its warps run.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.barriers import (
    DQ_FREE,
    DQ_FULL,
    await_kernel_before,
    named_barrier_arrive,
    named_barrier_sync,
)
from ropewalk.ops.attention.hopper.gluon_compat import await_stores, gl, gluon, load_tile, mbarrier, tma_add
from ropewalk.ops.attention.hopper.lists import line_of_tile, start_of_tile, tell_tiles
from ropewalk.ops.attention.hopper.prepost import workspace_start
from ropewalk.ops.attention.hopper.scheduler import section_of_tile, work_to_tile
from ropewalk.ops.attention.hopper.scores import shift_lse
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, WG_ROWS
from ropewalk.ops.attention.triton.arguments import Tile, TileRange
from ropewalk.ops.attention.triton.masking import (
    ALL,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    attended_keys,
    query_ranges,
    range_flags,
    range_seqlens,
)
from ropewalk.ops.attention.triton.scheduler import sequence_info


class Inputs(NamedTuple):
    """Tensors that the load warp reads: descriptors, but for lse and delta."""

    q: Any
    k: Any
    v: Any  # None: the kernel of dV above 128 features, which reads no values
    far: Any  # Far
    do: Any
    cos: Any  # of the keys; None: their gradient is not rotated
    sin: Any
    lse: Any  # pointers to (B, H, Tq)
    delta: Any  # or None, likewise


class QuerySmem(NamedTuple):
    """Shared memory of the queries of a step."""

    q: Any  # Ring
    do: Any  # Ring; stages are released with those of q
    stats: Any  # [2 · stages, BLOCK_M]: lse and delta of a stage's queries
    stats_full: Any  # mbarrier of each stage
    listed: Any = None  # ListedRing; None without lists
    starts: Any = None  # [stages, 1]: the first query of a stage, and 1 more if its block is partial; likewise
    param_sums: Any = None  # ParamSums; None: no gradient of parameters is wanted


class KvSmem(NamedTuple):
    """Shared memory of a program's keys and values."""

    k: Any
    k_far: Any  # the same as k where no pair is far
    v: Any
    full: Any  # mbarrier


class DqSmem(NamedTuple):
    """Shared memory of dS and dQ on their way between warps."""

    ds: Any  # [2, BLOCK_N, BLOCK_M]: of even and odd steps
    dq: Any  # [2, ...]: a chunk of each compute warp group; inside one its own


# Values of `Problem.STEP_ORDER`: orders of a program's steps, which `StepOrder` describes.
BY_HEADS = gl.constexpr(0)
ALTERNATING = gl.constexpr(1)


class StepOrder(NamedTuple):
    """The order in which a program takes the queries that attend its keys, of all heads that share the keys.

    BY_HEADS: head after head, from the first queries to the last. In causal attention a program begins with the queries
    at its keys, so programs of other keys are at other queries.

    ALTERNATING: a tile of queries of all heads, and then the next tile. In causal attention programs have loops of all
    lengths, and by heads they would soon be at queries of all heads, which exceed the L2 cache. Here they meet. The
    programs of the first section of heads start together, and walk back from the last queries; so they end one after
    another, the shortest loops first. Those of the next section start so, the longest loops first, walk on from their
    first queries, catch up with each other, and end together.
    """

    loops: Any  # over heads that follow each other
    steps: Any  # of each loop
    skipped_first: Any  # of these: the first ones, in which no query attends a key of a warp group
    skipped_last: Any  # the last ones likewise
    first: Any  # the first query of a loop's first step that is not skipped
    stride: Any  # from a tile of queries to the next


class Workspace(NamedTuple):
    """A workspace of dQ at the first query head of a tile's keys."""

    line: Any  # the first one
    rows: Any  # of each head
    LINES_PER_ROW: Any


@gluon.jit
def tile_of_program(problem, flags, BLOCK_M: gl.constexpr):
    """Return this program's tile, its sequence's `kv_capacity`, first row in a workspace, and extents.

    In causal attention the first keys have the longest loops, and come first; last where dQ has an order.
    """
    work_idx = gl.program_id(0)
    if problem.dq_order is not None:
        work_idx = gl.num_programs(0) - 1 - work_idx
    tile, batch, kv_head, sequence = work_to_tile(work_idx, problem.packed, problem.schedule, False)
    q_offset, k_offset, kv_capacity, seqlens = sequence_info(
        sequence,
        problem.packed,
        problem.bounds,
        problem.n_queries,
        problem.n_keys,
        problem.window,
        problem.window_right,
    )
    seqlens = attended_keys(seqlens, flags)
    workspace_row = workspace_start(q_offset, sequence, problem.packed, BLOCK_M)
    in_batch = sequence
    if problem.packed is None:
        in_batch *= 0
    tile = Tile(batch, kv_head, kv_head, q_offset, k_offset, tile * BLOCK_N, in_batch)
    return tile, kv_capacity, workspace_row, seqlens


@gluon.jit
def loop_over_queries(start, seqlens, problem, flags, BLOCK_M: gl.constexpr, RANGE: gl.constexpr):
    """Return the extents for a range of pairs, the tile range of its queries, and steps of a head and of all heads."""
    seqlens = range_seqlens(seqlens, problem.far_window, flags, RANGE)
    tile_range = query_ranges(start, seqlens, range_flags(flags, RANGE), BLOCK_M, BLOCK_N, False)
    steps_per_head = (tile_range.stop - tile_range.start + BLOCK_M - 1) // BLOCK_M
    return seqlens, tile_range, steps_per_head, steps_per_head * problem.schedule.heads_per_key


@gluon.jit
def wg_query_range(wg_start, seqlens, flags, BLOCK_M: gl.constexpr):
    """Return the tile range of queries for the keys of one warp group; no middle where some do not exist."""
    tile_range = query_ranges(wg_start, seqlens, flags, BLOCK_M, WG_ROWS, False)
    full = tile_range.full
    full_stop = tile_range.full_stop
    if (wg_start < seqlens.kv_start) | (wg_start + WG_ROWS > seqlens.n_keys):
        full = tile_range.start
        full_stop = tile_range.start
    return TileRange(tile_range.start, full, full_stop, tile_range.stop)


@gluon.jit
def has_keys(start, seqlens):
    """Return whether a tile has keys, and its sequence queries: then keys and values are loaded, and waited for."""
    return (seqlens.n_queries > 0) & (start < seqlens.n_keys) & (start + BLOCK_N > seqlens.kv_start)


@gluon.jit
def order_steps(tile, tile_range, steps_per_head, n_skipped, problem, BLOCK_M: gl.constexpr):
    """Return the `StepOrder` of a program, given how many of a head's first steps a warp group skips."""
    heads_per_key = problem.schedule.heads_per_key
    first = tile_range.start + n_skipped * BLOCK_M
    if problem.STEP_ORDER == ALTERNATING:
        steps = steps_per_head * heads_per_key
        skipped = n_skipped * heads_per_key
        goes_back = section_of_tile(tile, problem.schedule) % 2 == 0
        last = tile_range.start + (steps_per_head - 1) * BLOCK_M
        skipped_first = gl.where(goes_back, 0, skipped)
        first = gl.where(goes_back, last, first)
        stride = gl.where(goes_back, -BLOCK_M, BLOCK_M)
        order = StepOrder(1, steps, skipped_first, skipped - skipped_first, first, stride)
    else:
        order = StepOrder(heads_per_key, steps_per_head, n_skipped, 0, first, BLOCK_M)
    return order


@gluon.jit
def next_step(m_start, member, order, tile_range, problem):
    """Return the next step's queries, and the member of the key head's group that they are of."""
    if problem.STEP_ORDER == ALTERNATING:
        is_last = member + 1 == problem.schedule.heads_per_key
        following = gl.where(is_last, m_start + order.stride, m_start)
        member = gl.where(is_last, 0, member + 1)
    else:
        following = m_start + order.stride
        following = gl.where(following >= tile_range.stop, tile_range.start, following)
        member = gl.where(following == order.first, member + 1, member)
    return following, member


@gluon.jit
def next_in_loop(m_start, member, order, tile_range, problem):
    """Return what `next_step` does, within one loop."""
    if problem.STEP_ORDER == BY_HEADS:
        m_start += order.stride
    else:
        m_start, member = next_step(m_start, member, order, tile_range, problem)
    return m_start, member


@gluon.constexpr_function
def ranges_of(HAS_FAR, HAS_FUTURE):
    """Return the ranges of pairs that a program loops over, in this order."""
    far = (FAR_PAST.value, FAR_FUTURE.value)[: 1 + HAS_FUTURE]
    return (*far, NEAR.value) if HAS_FAR else (ALL.value,)


@gluon.constexpr_function
def loops_before(RANGE, HAS_FUTURE):
    """Return how many loops over ranges of pairs come before that over a range."""
    return {FAR_FUTURE.value: 1, NEAR.value: 1 + HAS_FUTURE}.get(RANGE, 0)


@gluon.jit
def _load_step(use, q, inputs, smem, tile, head, m_start, is_partial, column, seqlens, problem, flags):
    """Load a step's Q, dO, and, by column, lse and delta; with lists, tell where it is."""
    smem.q.fill(use, q, [tile.batch, head, tile.q_offset + m_start, 0])
    smem.do.load(use, inputs.do, [tile.batch, head, tile.q_offset + m_start, 0])
    stage = use % smem.q.stages
    n_heads = problem.schedule.n_heads * problem.schedule.heads_per_key
    offset = (tile.batch * n_heads + head).to(gl.int64) * problem.n_queries + tile.q_offset + m_start
    exists = column < seqlens.n_queries - m_start
    lse = gl.load(inputs.lse + offset + column, exists, other=float("-inf"))
    delta = gl.load(inputs.delta + offset + column, exists, other=0.0)
    if problem.dropout is not None:  # gradients are rescaled at the end
        delta /= problem.dropout.rescale
    # A row that attends nothing, or does not exist, has P = exp2(S - inf) = 0.
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    ahead = tile.start - (m_start + seqlens.causal_offset)
    lse = shift_lse(lse, problem.scores, tile.batch, head, ahead, column, flags, BLOCK_N)
    smem.stats.index(2 * stage).store(lse)
    smem.stats.index(2 * stage + 1).store(delta)
    if smem.starts is not None:
        start_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        smem.starts.index(stage).store(gl.full([1], m_start + is_partial, gl.int32, start_layout))
    mbarrier.arrive(smem.stats_full.index(stage), count=1)


@gluon.jit
def _load_loop(use, q, inputs, smem, tile, seqlens, problem, flags, RANGE: gl.constexpr):
    """Load each step's Q, dO, lse and delta; return the next use of the rings."""
    BLOCK_M: gl.constexpr = q.block_shape[2]
    _, tile_range, per_head, n_steps = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    column = gl.arange(0, BLOCK_M, layout=layout)
    heads_per_key = problem.schedule.heads_per_key
    lists = problem.lists
    if lists.ptr is None:
        order = order_steps(tile, tile_range, per_head, 0, problem, BLOCK_M)
        m_start = order.first
        member = 0
        for _step in range(n_steps):
            head = tile.kv_head * heads_per_key + member
            _load_step(use, q, inputs, smem, tile, head, m_start, None, column, seqlens, problem, flags)
            m_start, member = next_step(m_start, member, order, tile_range, problem)
            use += 1
    else:
        listed_use = loops_before(RANGE, inputs.far.q_future is not None) * heads_per_key
        for member in range(heads_per_key):
            head = tile.kv_head * heads_per_key + member
            line = line_of_tile(problem, tile, head, tile.k_offset, seqlens.n_keys, RANGE)
            tiles = tell_tiles(smem.listed, listed_use + member, tile_range, line, BLOCK_M, lists.slots is not None)
            n_tiles = tiles.count + tiles.n_partial
            upcoming = start_of_tile(0, tiles, line, BLOCK_M, lists.slots is not None) if n_tiles > 0 else 0
            for i in range(n_tiles):
                m_start = upcoming  # read a step before it is needed
                upcoming = start_of_tile(gl.minimum(i + 1, n_tiles - 1), tiles, line, BLOCK_M, lists.slots is not None)
                is_partial = (i >= tiles.count).to(gl.int32)
                _load_step(use, q, inputs, smem, tile, head, m_start, is_partial, column, seqlens, problem, flags)
                use += 1
    return use


@gluon.jit
def _load_rotation(use, cos, sin, smem, batch, first_row):
    """Load the keys' rotation tables into the rings' next stages."""
    ROWS: gl.constexpr = cos.block_shape[2]
    for start in gl.static_range(0, BLOCK_N, ROWS):
        coordinates = [gl.minimum(batch, cos.shape[0] - 1), 0, first_row + start, 0]
        smem.q.fill(use, cos, coordinates)
        smem.do.load(use, sin, coordinates)
        use += 1


@gluon.jit
def load_warp(inputs, smem, kv, problem, flags):
    """Load keys and values, the steps of each range of pairs, and the keys' rotation tables."""
    q, k, v, far = inputs.q, inputs.k, inputs.v, inputs.far
    if problem.packed is not None:  # whose schedule is written between the pass before and this kernel
        await_kernel_before()
    tile, _, _, seqlens = tile_of_program(problem, flags, q.block_shape[2])
    if has_keys(tile.start, seqlens):
        N_TILES: gl.constexpr = 2 if far.k is None else 3
        mbarrier.expect(kv.full, N_TILES * k.block_type.nbytes)
        coordinates = [tile.batch, tile.kv_head, tile.k_offset + tile.start, 0]
        load_tile(k, coordinates, kv.full, kv.k)
        load_tile(v, coordinates, kv.full, kv.v)
        if far.k is not None:
            load_tile(far.k, coordinates, kv.full, kv.k_far)
    if problem.packed is None:
        await_kernel_before()
    use = 0
    if problem.far_window is not None:
        use = _load_loop(use, far.q_past, inputs, smem, tile, seqlens, problem, flags, FAR_PAST)
        if far.q_future is not None:
            use = _load_loop(use, far.q_future, inputs, smem, tile, seqlens, problem, flags, FAR_FUTURE)
    use = _load_loop(use, q, inputs, smem, tile, seqlens, problem, flags, ALL if problem.far_window is None else NEAR)
    if inputs.cos is not None:
        _load_rotation(use, inputs.cos, inputs.sin, smem, tile.batch, tile.k_offset + tile.start)


@gluon.jit
def _reduce_step(dq_accum, dq_chunks, line):
    """Add each compute warp group's chunk of a step's dQ to the workspace, from a line on."""
    for consumer in gl.static_range(2):
        await_stores(1 - consumer)
        named_barrier_arrive(DQ_FREE, consumer)
    for consumer in gl.static_range(2):
        named_barrier_sync(DQ_FULL, consumer)
        tma_add(dq_accum, [line + consumer * dq_accum.block_shape[0], 0], dq_chunks.index(consumer))


# Operands: where the last step's tile has its number, what to write there, and whether there is a last step; where this
# step's tile has its, what it must be, and whether it must. It is read before the last step's addition is complete: one
# fence is for both.
_PASS_ON = gl.constexpr(
    "{ .reg .pred last, waits; .reg .b32 number; ld.relaxed.gpu.global.b32 number, [$4]; "
    "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; "  # one thread, which has added, waited
    "setp.ne.b32 last, $3, 0; @last st.relaxed.gpu.global.b32 [$1], $2; "
    "setp.ne.b32 waits, $6, 0; setp.ne.and.b32 waits, number, $5, waits; "
    "again: @!waits bra done; ld.acquire.gpu.global.b32 number, [$4]; setp.ne.b32 waits, number, $5; bra again; "
    "done: fence.proxy.async.global; mov.b32 $0, 0; }"
)
_SAY_ADDED = gl.constexpr(
    "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; "
    "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;"
)


@gluon.jit
def _pass_on(last_ptr, key_tile, has_last, ptr, waits):
    """Say that the last step's tile has been added, and wait until this step's may be."""
    last_address, address = last_ptr.to(gl.int64), ptr.to(gl.int64)
    operands = [last_address, key_tile, has_last.to(gl.int32), address, key_tile + 1, waits.to(gl.int32)]
    gl.inline_asm_elementwise(_PASS_ON, "=r,l,r,r,l,r,r", operands, gl.int32, False, 1)


@gluon.jit
def _reduce_in_order(dq_accum, dq_smem, workspace, tile, seqlens, problem, flags, options, RANGE: gl.constexpr):
    """Add chunks of dQ as `_reduce_loop` does, to each tile of queries from the last tile of keys to the first.

    The number of a tile of queries is that of the tile of keys that was added last, counted from 1. Loops begin with
    the first queries of their keys, so that the tile of keys behind is ahead of this one. Its program began sooner:
    nobody waits for a program that has yet to begin. Tiles of keys that attend queries are neighbours.
    """
    BLOCK_M: gl.constexpr = options.BLOCK_M
    _, tile_range, per_head, n_steps = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    _, behind, _, _ = loop_over_queries(tile.start + BLOCK_N, seqlens, problem, flags, BLOCK_M, RANGE)
    key_tile = tile.start // BLOCK_N + 1
    order = order_steps(tile, tile_range, per_head, 0, problem, BLOCK_M)
    m_start = order.first
    member = 0
    ptr = problem.dq_order
    for step in range(n_steps):
        for consumer in gl.static_range(2):
            await_stores(1 - consumer)
            named_barrier_arrive(DQ_FREE, consumer)
        line = workspace.line + (member * workspace.rows + m_start) * workspace.LINES_PER_ROW
        last_ptr = ptr
        ptr = problem.dq_order + line // (BLOCK_M * workspace.LINES_PER_ROW)
        _pass_on(last_ptr, key_tile, step > 0, ptr, (m_start >= behind.start) & (m_start < behind.stop))
        for consumer in gl.static_range(2):
            named_barrier_sync(DQ_FULL, consumer)
            tma_add(dq_accum, [line + consumer * dq_accum.block_shape[0], 0], dq_smem.dq.index(consumer))
        m_start, member = next_step(m_start, member, order, tile_range, problem)
    if n_steps > 0:
        gl.inline_asm_elementwise(_SAY_ADDED, "=r,l,r", [ptr.to(gl.int64), key_tile], gl.int32, False, 1)


@gluon.jit
def _reduce_loop(dq_accum, smem, dq_smem, workspace, tile, seqlens, problem, flags, options, RANGE: gl.constexpr):
    """Add each compute warp group's chunks of dQ to the workspace of a range of pairs."""
    BLOCK_M: gl.constexpr = options.BLOCK_M
    _, tile_range, per_head, n_steps = loop_over_queries(tile.start, seqlens, problem, flags, BLOCK_M, RANGE)
    lists = problem.lists
    if problem.dq_order is not None:
        _reduce_in_order(dq_accum, dq_smem, workspace, tile, seqlens, problem, flags, options, RANGE)
    elif lists.ptr is None:
        order = order_steps(tile, tile_range, per_head, 0, problem, BLOCK_M)
        m_start = order.first
        member = 0
        for _step in range(n_steps):
            row = member * workspace.rows + m_start
            _reduce_step(dq_accum, dq_smem.dq, workspace.line + row * workspace.LINES_PER_ROW)
            m_start, member = next_step(m_start, member, order, tile_range, problem)
    else:
        heads_per_key = problem.schedule.heads_per_key
        listed_use = loops_before(RANGE, options.HAS_FUTURE) * heads_per_key
        for member in range(heads_per_key):
            head = tile.kv_head * heads_per_key + member
            line = line_of_tile(problem, tile, head, tile.k_offset, seqlens.n_keys, RANGE)
            tiles = smem.listed.receive(listed_use + member)
            for i in range(tiles.count + tiles.n_partial):
                row = member * workspace.rows + start_of_tile(i, tiles, line, BLOCK_M, lists.slots is not None)
                _reduce_step(dq_accum, dq_smem.dq, workspace.line + row * workspace.LINES_PER_ROW)


@gluon.jit
def reduce_dq_warp(dq_accum, workspace_rows, smem, kv, dq_smem, problem, flags, options):
    """Add each step's dQ to the workspaces: one for each range of pairs."""
    await_kernel_before()
    tile, _, workspace_row, seqlens = tile_of_program(problem, flags, options.BLOCK_M)
    LINES_PER_ROW: gl.constexpr = kv.k.shape[3] // dq_accum.block_shape[1]
    head = (tile.batch * problem.schedule.n_heads + tile.kv_head) * problem.schedule.heads_per_key
    line = (head * workspace_rows + workspace_row) * LINES_PER_ROW
    n_lines = problem.schedule.n_rows * problem.schedule.heads_per_key * workspace_rows * LINES_PER_ROW
    RANGES: gl.constexpr = ranges_of(problem.far_window is not None, options.HAS_FUTURE)
    for i in gl.static_range(len(RANGES)):
        first_line = line + (i + 1) % len(RANGES) * n_lines  # the workspace of near pairs is the first one
        _reduce_loop(
            dq_accum,
            smem,
            dq_smem,
            Workspace(first_line, workspace_rows, LINES_PER_ROW),
            tile,
            seqlens,
            problem,
            flags,
            options,
            RANGES[i],
        )
    await_stores(0)
