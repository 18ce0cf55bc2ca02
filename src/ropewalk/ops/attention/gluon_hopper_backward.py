"""The backward kernel of attention for Hopper: all three gradients in one walk, five matrix products a step.

A program has a tile of keys and values, and walks over the queries that attend them. It keeps the gradients of its
keys and values in registers; what a step gives the gradient of its queries it adds to a workspace in memory, where
programs add in any order: that sum is not the same every time. Scores stand transposed, [keys, queries], so that the
probabilities and their gradients go from registers into the products that sum over queries.

A program has four roles: a producer, a warp that loads; two consumers, of half of the keys each, four warps that
compute; and an adder, a warp that brings what they have for the queries into the workspace. One program for each tile,
not one for each processor as in the forward: between two tiles nothing could overlap, since the sums in registers leave
no room for the next tile's.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from ropewalk.ops.attention.gluon_hopper_pipeline import await_others, come_to, locate_number, make_ring
from ropewalk.ops.attention.gluon_hopper_softmax import take_probabilities
from ropewalk.ops.attention.gluon_hopper_tiles import (
    KEYS,
    PART,
    ROWS,
    as_threads_have_it,
    begin_with,
    clear_missing,
    own_gradients,
    store_rows,
    turn_back_keys,
)
from ropewalk.ops.attention.gluon_passes import first_row
from ropewalk.ops.attention.gluon_shim import (
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
from ropewalk.ops.attention.triton_sequences import EITHER_SIDE, PAST, measure_sequence, query_ranges
from ropewalk.ops.attention.triton_tiles import UNSPECIALISED, parameters_of_head

# Named barriers: where consumers meet, one, or if they may be a step apart two of each, for steps in turn; and of each
# consumer and the adder.
_STORED = gl.constexpr(8)
_PART_FULL = gl.constexpr(12)
_PART_FREE = gl.constexpr(14)
_BOTH = gl.constexpr(256)  # consumers' threads
_WITH_ADDER = gl.constexpr(160)  # one consumer's threads and the adder's


@gluon.jit
def _walk(
    sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
    QUERIES: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Where a program's tile lies, which queries meet it, and in how many steps of all heads that share its key head.

    With the past alone to attend, the first keys have the longest walks.
    """
    tile, batch, key_head, sequence = locate_number(
        gl.program_id(0), sequences, n_tiles, n_rows, n_key_heads, heads_together, False
    )  # fmt: skip
    q_offset, k_offset, queries, first_key, keys, places, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys
    )  # fmt: skip
    n_start = tile * KEYS
    lengths = (queries, first_key, keys, tokens_apart, window)
    SIDE: gl.constexpr = PAST if CAUSAL else EITHER_SIDE
    start, full, full_stop, stop = query_ranges(n_start, lengths, QUERIES, KEYS, SIDE, WINDOWED, False)
    if (n_start < first_key) | (n_start + KEYS > keys):  # no step but must ask which keys exist
        full = start
        full_stop = start
    steps = (stop - start + QUERIES - 1) // QUERIES * heads_per_key
    ranges = (start, full, full_stop, stop)
    row = first_row(q_offset, sequence, sequences, QUERIES)
    return batch, key_head, q_offset, k_offset, row, n_start, lengths, places, ranges, steps


@gluon.jit
def _next_step(m_start, member, start, stop, QUERIES: gl.constexpr):
    """The queries after some, and the head that they are of: one head's after another's."""
    m_start += QUERIES
    is_last = m_start >= stop
    return gl.where(is_last, start, m_start), gl.where(is_last, member + 1, member)


@gluon.jit
def _produce(
    q, k, v, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, keys, values, keys_full, sequences,
    bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load the keys and values, and for each step the queries, their gradients, and the numbers of their rows."""
    QUERIES: gl.constexpr = q.block_shape[2]
    batch, key_head, q_offset, k_offset, _row, n_start, lengths, _places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        QUERIES, CAUSAL, WINDOWED,
    )  # fmt: skip
    if steps > 0:
        mbarrier.expect(keys_full, k.block_type.nbytes + v.block_type.nbytes)
        load_tile(k, [batch, key_head, k_offset + n_start, 0], keys_full, keys)
        load_tile(v, [batch, key_head, k_offset + n_start, 0], keys_full, values)
    layout: gl.constexpr = gl.BlockedLayout([QUERIES // 32], [32], [1], [0])
    column = gl.arange(0, QUERIES, layout=layout)
    m_start = ranges[0]
    member = 0
    for use in range(steps):
        head = key_head * heads_per_key + member
        q_ring.fill(use, q, [batch, head, q_offset + m_start, 0])
        out_ring.load(use, grad_out, [batch, head, q_offset + m_start, 0])
        stage = use % q_ring.stages
        offset = (batch * (n_key_heads * heads_per_key) + head).to(gl.int64) * n_queries + q_offset + m_start
        exists = column < lengths[0] - m_start
        lse = gl.load(lse_ptr + offset + column, exists, other=float("-inf"))
        delta = gl.load(delta_ptr + offset + column, exists, other=0.0)
        # Of a row that attends nothing, or is none, the exponentials are to be zero.
        rows.index(2 * stage).store(gl.where(lse == float("-inf"), float("inf"), lse))
        rows.index(2 * stage + 1).store(delta)
        mbarrier.arrive(rows_full.index(stage), count=1)
        m_start, member = _next_step(m_start, member, ranges[0], ranges[3], QUERIES)


@gluon.jit
def _add(
    sums, parts, rows_of_head, sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together,
    n_queries, n_keys, QUERIES: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Add what each consumer has for a step's queries to the workspace."""
    batch, key_head, _q_offset, _k_offset, row, _n_start, _lengths, _places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        QUERIES, CAUSAL, WINDOWED,
    )  # fmt: skip
    LINE: gl.constexpr = sums.block_shape[1]
    m_start = ranges[0]
    member = 0
    for _use in range(steps):
        head = batch * (n_key_heads * heads_per_key) + key_head * heads_per_key + member
        line = (head * rows_of_head + row + m_start) * (BLOCK_D // LINE)
        for consumer in gl.static_range(2):
            await_stores(1 - consumer)
            come_to(_PART_FREE + consumer, _WITH_ADDER)
        for consumer in gl.static_range(2):
            await_others(_PART_FULL + consumer, _WITH_ADDER)
            tma_add(sums, [line + consumer * sums.block_shape[0], 0], parts.index(consumer))
        m_start, member = _next_step(m_start, member, ranges[0], ranges[3], QUERIES)
    await_stores(0)


@gluon.jit
def _consume(
    grad_k, grad_v, weights_ptr, table, q_ring, out_ring, rows, rows_full, keys, values, keys_full, gradients, parts,
    sequences, bounds, parameters, scale, softcap, factor, grad_factor, window, n_tiles, n_rows, n_key_heads,
    heads_per_key, heads_together, n_queries, n_keys, CONSUMER: gl.constexpr, QUERIES: gl.constexpr,
    APART: gl.constexpr, R: gl.constexpr, INTERLEAVED: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    EDGES: gl.constexpr, SCORE: gl.constexpr, ADJOINT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Compute with ROWS keys of the tile, and a part of the gradients of a step's queries.

    Of 64 queries the consumers have half of the features each, of 128 half of the queries.
    """
    DTYPE: gl.constexpr = keys.dtype
    BLOCK_D: gl.constexpr = keys.shape[3]
    PACKED: gl.constexpr = sequences is not None
    HAS_LENGTHS: gl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: gl.constexpr = bounds[1] is not None
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_keys, 2)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    batch, key_head, _q_offset, k_offset, _row, n_start, lengths, places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        QUERIES, CAUSAL, WINDOWED,
    )  # fmt: skip
    all_keys = keys.reshape([KEYS, BLOCK_D])
    own_keys = all_keys.slice(CONSUMER * ROWS, ROWS, 0)
    own_values = values.reshape([KEYS, BLOCK_D]).slice(CONSUMER * ROWS, ROWS, 0)
    own_features = all_keys.slice(CONSUMER * PART, PART, 1) if QUERIES == PART else all_keys
    own_part = parts.index(CONSUMER)
    own_start = n_start + CONSUMER * ROWS
    n = own_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
    grad_keys = gl.zeros([ROWS, BLOCK_D], gl.float32, of_keys)
    grad_values = gl.zeros([ROWS, BLOCK_D], gl.float32, of_keys)
    if steps > 0:
        mbarrier.wait(keys_full, 0)
        if EDGES:
            clear_missing(all_keys, n_start, lengths[1], lengths[2], KEYS, HAS_STARTS)
            clear_missing(own_values, own_start, lengths[1], lengths[2], ROWS, HAS_STARTS)
        m_start = ranges[0]
        member = 0
        if APART:  # for what was stored before the first step
            come_to(_STORED + 2 * CONSUMER + 1, _BOTH)
        for use in range(steps):
            stage = use % q_ring.stages
            queries, cotangents = q_ring.tile(use), out_ring.tile(use)
            parameters_ptr = None
            if parameters is not None:
                parameters_ptr = parameters_of_head(parameters, key_head * heads_per_key + member)
            # Whatever is to be read goes before products: reads wait in one queue behind those.
            mbarrier.wait(rows_full.index(stage), use // q_ring.stages & 1)
            lse = rows.index(2 * stage).load(of_columns)
            if not APART:
                grad_p = begin_with(rows.index(2 * stage + 1), of_scores)
            q_ring.await_tile(use)
            if PACKED:
                clear_missing(queries, m_start, 0, lengths[0], QUERIES, False)
            scores = warpgroup_mma(
                own_keys, queries.permute((1, 0)), gl.zeros([ROWS, QUERIES], gl.float32, of_scores), use_acc=False,
                is_async=True,
            )  # fmt: skip
            if APART:
                await_others(_STORED + 2 * (1 - CONSUMER) + (use + 1) % 2, _BOTH)
                grad_queries = warpgroup_mma(
                    own_gradients(gradients.index((use + 1) % 2), CONSUMER).permute((1, 0)), own_features,
                    gl.zeros([PART, PART], gl.float32, of_queries), use_acc=False, is_async=True,
                )  # fmt: skip
            else:
                out_ring.await_tile(use)
                if PACKED:
                    clear_missing(cotangents, m_start, 0, lengths[0], QUERIES, False)
                grad_p = warpgroup_mma(own_values, cotangents.permute((1, 0)), grad_p, is_async=True)
                if use > 0:  # the part of the step before, by now in memory
                    fence_async_shared()
                    come_to(_PART_FULL + CONSUMER, _WITH_ADDER)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            p, raw, scaled = take_probabilities(
                scores, lse, m_start, n, (m_start < ranges[1]) | (m_start >= ranges[2]), lengths, scale, softcap,
                factor, parameters_ptr, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, EDGES, SCORE, SOFTCAP,
            )  # fmt: skip
            weights = gl.convert_layout(p.to(DTYPE), of_p)
            if SOFTCAP:  # before p and raw are both needed
                p *= 1 - raw * raw
            if APART:
                grad_queries, weights = warpgroup_mma_wait(0, deps=(grad_queries, weights))
                if use > 0:
                    await_others(_PART_FREE + CONSUMER, _WITH_ADDER)
                    own_part.store(as_threads_have_it(grad_queries))
                    fence_async_shared()
                    come_to(_PART_FULL + CONSUMER, _WITH_ADDER)
                out_ring.await_tile(use)
                if PACKED:
                    clear_missing(cotangents, m_start, 0, lengths[0], QUERIES, False)
                grad_p = begin_with(rows.index(2 * stage + 1), of_scores)
                grad_p = warpgroup_mma(own_values, cotangents.permute((1, 0)), grad_p, is_async=True)
                grad_values = warpgroup_mma(weights, cotangents, grad_values, is_async=True)
                grad_p = warpgroup_mma_wait(1, deps=(grad_p,))
            else:
                grad_p, weights = warpgroup_mma_wait(0, deps=(grad_p, weights))
            grad_scores = p * grad_p
            if ADJOINT is not None:
                column = gl.arange(0, QUERIES, layout=of_columns)
                theirs = (n - (m_start + lengths[3])).to(gl.float32)
                grad_scores = ADJOINT(
                    grad_scores, scaled, column.to(gl.float32)[None, :], theirs[:, None], parameters_ptr, CAUSAL
                )  # fmt: skip
            rounded = grad_scores.to(DTYPE)
            # Of two tiles in turn: when a consumer stores one, both have read what was in it two steps before.
            gradients.index(use % 2).slice(CONSUMER * ROWS, ROWS, 0).store(rounded)
            m_start, member = _next_step(m_start, member, ranges[0], ranges[3], QUERIES)
            if APART:
                fence_async_shared()
                come_to(_STORED + 2 * CONSUMER + use % 2, _BOTH)
            else:
                grad_values = warpgroup_mma(weights, cotangents, grad_values, is_async=True)
                fence_async_shared()
                await_others(_STORED, _BOTH)
                grad_queries = warpgroup_mma(
                    own_gradients(gradients.index(use % 2), CONSUMER).permute((1, 0)), own_features,
                    gl.zeros([PART, PART], gl.float32, of_queries), use_acc=False, is_async=True,
                )  # fmt: skip
                grad_values, weights = warpgroup_mma_wait(1, deps=(grad_values, weights))
            operand = gl.convert_layout(rounded, of_p)
            grad_keys = warpgroup_mma(operand, queries, grad_keys, is_async=True)
            if not APART:
                grad_queries = warpgroup_mma_wait(1, deps=(grad_queries,))
                await_others(_PART_FREE + CONSUMER, _WITH_ADDER)
                own_part.store(as_threads_have_it(grad_queries))
            grad_keys, grad_values, weights, operand = warpgroup_mma_wait(
                0, deps=(grad_keys, grad_values, weights, operand)
            )  # fmt: skip
            q_ring.release(use)
        if APART:
            await_others(_STORED + 2 * (1 - CONSUMER) + (steps + 1) % 2, _BOTH)
            grad_queries = warpgroup_mma(
                own_gradients(gradients.index((steps + 1) % 2), CONSUMER).permute((1, 0)), own_features,
                gl.zeros([PART, PART], gl.float32, of_queries), use_acc=False, is_async=True,
            )  # fmt: skip
            grad_queries = warpgroup_mma_wait(0, deps=(grad_queries,))
            await_others(_PART_FREE + CONSUMER, _WITH_ADDER)
            own_part.store(as_threads_have_it(grad_queries))
        fence_async_shared()
        come_to(_PART_FULL + CONSUMER, _WITH_ADDER)
    exists = (n >= lengths[1]) & (n < lengths[2])
    exists = gl.convert_layout(exists, gl.SliceLayout(1, of_keys))[:, None]
    grad_keys = grad_keys * grad_factor
    if weights_ptr is not None:
        feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, of_keys))
        grad_keys = grad_keys * gl.load(weights_ptr + feature, feature < grad_k[4], other=0.0)[None, :]
    own_values.store(gl.where(exists, grad_values, 0.0).to(DTYPE))
    store_rows(grad_v, own_values, batch, key_head, k_offset, own_start, places)
    grad_keys = gl.where(exists, grad_keys, 0.0)
    if table is not None:
        grad_keys = turn_back_keys(grad_keys, table, batch, k_offset + own_start, k_offset + places, R, INTERLEAVED)
    own_values.store(grad_keys.to(DTYPE))
    store_rows(grad_k, own_values, batch, key_head, k_offset, own_start, places)


@gluon.jit(do_not_specialize=(*UNSPECIALISED, "n_tiles", "n_rows", "heads_together", "rows_of_head"))
def backward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of QUERIES; features mapped already, as those of k
    k,  # (B, K, Tk, D), for tiles of KEYS
    v,  # (B, K, Tk, Dv), likewise
    grad_out,  # (B, H, Tq, Dv), for tiles of QUERIES
    sums,  # the workspace, as lines of 32 elements, for tiles of a part
    grad_k,  # a pointer, the strides of batch, head and token, and D
    grad_v,  # likewise, and Dv
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    weights_ptr,  # (D,), of the keys' features; or None
    table,  # of the keys: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    parameters,  # a pointer, and the stride of head; or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    grad_factor,  # of the gradient of k
    window,
    n_tiles,  # of keys: of one head, or of the schedule
    n_rows,  # B · K
    n_key_heads,
    heads_per_key,
    heads_together,
    n_queries,
    n_keys,
    rows_of_head,  # in the workspace
    QUERIES: gl.constexpr,  # in a step
    APART: gl.constexpr,  # whether consumers may be a step apart
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
    R: gl.constexpr,  # how many features are turned
    INTERLEAVED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    EDGES: gl.constexpr,  # whether there may be queries in a step that do not attend a key
    SCORE: gl.constexpr,
    ADJOINT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """The gradients of a tile of keys and values of one key head, and what it gives the queries that attend it."""
    BLOCK_D: gl.constexpr = k.block_shape[3]
    q_ring = make_ring(q, STAGES, 2)
    out_ring = make_ring(grad_out, STAGES, 2)  # filled, and released, with the other
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    values = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    gradients_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], k.dtype)
    gradients = gl.allocate_shared_memory(k.dtype, [2, KEYS, QUERIES], gradients_layout)
    parts = gl.allocate_shared_memory(gl.float32, [2] + sums.block_shape, sums.layout)  # noqa: RUF005
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
    mbarrier.init(keys_full, count=1)
    gl.warp_specialize(
        [
            (_consume, (
                grad_k, grad_v, weights_ptr, table, q_ring, out_ring, rows, rows_full, keys, values, keys_full,
                gradients, parts, sequences, bounds, parameters, scale, softcap, factor, grad_factor, window, n_tiles,
                n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys, role, QUERIES, APART, R,
                INTERLEAVED, CAUSAL, WINDOWED, EDGES, SCORE, ADJOINT, SOFTCAP,
            ))
            if role < 2 else
            (_produce, (
                q, k, v, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, keys, values, keys_full,
                sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries,
                n_keys, CAUSAL, WINDOWED,
            ))
            if role == 2 else
            (_add, (
                sums, parts, rows_of_head, sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key,
                heads_together, n_queries, n_keys, QUERIES, BLOCK_D, CAUSAL, WINDOWED,
            ))
            for role in (0, 1, 2, 3)
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip
