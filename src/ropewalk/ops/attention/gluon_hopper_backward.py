"""The backward kernel of attention for Hopper: all three gradients in one walk, five matrix products a step.

A program has a tile of keys and values, and walks over the queries that attend them. It keeps the gradients of its
keys and values in registers; what a step gives the gradient of its queries it adds to a workspace in memory, where
programs add in any order: that sum is not the same every time. Scores stand transposed, [keys, queries], so that the
probabilities and their gradients go from registers into the products that sum over queries. Where pairs of tokens that
are far apart have another encoding, there are walks over those first, with other queries and keys, and a workspace for
each kind of pairs; what they give the keys is turned in registers to what near pairs see.

A program has four roles: a producer, a warp that loads; two consumers, of half of the keys each, four warps that
compute; and an adder, a warp that brings what they have for the queries into the workspace. One program for each tile,
not one for each processor as in the forward: programs that stay were slower, as each step of theirs has more to do.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from ropewalk.ops.attention.gluon_hopper_backward_movers import (
    PART_FREE,
    PART_FULL,
    WITH_ADDER,
    add,
    cut_walk,
    has_keys,
    locate,
    own_steps,
    produce,
)
from ropewalk.ops.attention.gluon_hopper_pipeline import await_others, come_to, make_ring, make_ring_beside
from ropewalk.ops.attention.gluon_hopper_softmax import take_probabilities
from ropewalk.ops.attention.gluon_hopper_tiles import (
    KEYS,
    PART,
    ROWS,
    as_threads_have_it,
    begin_with,
    change_keys,
    clear_missing,
    own_gradients,
    read_angles,
    store_rows,
    turn_back_keys,
)
from ropewalk.ops.attention.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ropewalk.ops.attention.triton_sequences import (
    EITHER_SIDE,
    EVERY_PAIR,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    PAST,
    side_of_pairs,
)
from ropewalk.ops.attention.triton_tiles import UNSPECIALISED, parameters_of_head

# Named barriers: where consumers meet between two walks; and in a step, one, or if they may be a step apart
# two of each, for steps in turn.
_WALKED = gl.constexpr(7)
_STORED = gl.constexpr(8)
_BOTH = gl.constexpr(256)  # consumers' threads


@gluon.jit
def _begin_grad_queries(gradients, own_features, CONSUMER: gl.constexpr):
    """Begin the product that gives a step's queries their gradient: this consumer's part of it, of all keys' dS."""
    of_queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    return warpgroup_mma(
        own_gradients(gradients, CONSUMER).permute((1, 0)), own_features,
        gl.zeros([PART, PART], gl.float32, of_queries), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _hand_over(
    use, first_use, q_ring, gradients, own_part, own_features, CONSUMER: gl.constexpr, QUERIES: gl.constexpr
):  # fmt: skip
    """A step whose queries attend none of this consumer's keys: zeros for the other one, and its part of theirs."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    q_ring.await_tile(use)
    nothing = gl.zeros([ROWS, QUERIES], gradients.dtype, of_scores)
    gradients.index(use % 2).slice(CONSUMER * ROWS, ROWS, 0).store(nothing)
    fence_async_shared()
    if use > first_use:
        come_to(PART_FULL + CONSUMER, WITH_ADDER)
    await_others(_STORED, _BOTH)
    grad_queries = _begin_grad_queries(gradients.index(use % 2), own_features, CONSUMER)
    grad_queries = warpgroup_mma_wait(0, deps=(grad_queries,))
    await_others(PART_FREE + CONSUMER, WITH_ADDER)
    own_part.store(as_threads_have_it(grad_queries))
    q_ring.release(use)


@gluon.jit
def _take_walk(
    state, first_use, keys, own_values, q_ring, out_ring, rows, rows_full, gradients, own_part, key_head, n_start, n,
    lengths, far_window, parameters, scale, softcap, factor, heads_per_key, CONSUMER: gl.constexpr,
    QUERIES: gl.constexpr, APART: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_STARTS: gl.constexpr, PACKED: gl.constexpr, PAIRS: gl.constexpr,
    EDGES: gl.constexpr, SCORE: gl.constexpr, ADJOINT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Add what a walk's queries give the sums of keys and values; returns the uses of rings too."""
    grad_keys, grad_values = state
    DTYPE: gl.constexpr = keys.dtype
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, grad_keys.type.layout, 2)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    SIDE: gl.constexpr = side_of_pairs(PAIRS, PAST if CAUSAL else EITHER_SIDE, True)
    WINDOWED_PAIRS: gl.constexpr = WINDOWED or PAIRS == NEAR
    of_pairs, start, _stop, steps_of_head, steps = cut_walk(
        n_start, lengths, far_window, heads_per_key, QUERIES, CAUSAL, WINDOWED, PAIRS
    )  # fmt: skip
    own_start, full, full_stop = own_steps(n_start + CONSUMER * ROWS, of_pairs, QUERIES, SIDE, WINDOWED_PAIRS)
    missed = 0  # steps of each head: the first ones, in which no query attends a key of this consumer
    if not APART:
        missed = gl.minimum((own_start - start) // QUERIES, steps_of_head)
    own_keys = keys.slice(CONSUMER * ROWS, ROWS, 0)
    own_features = keys.slice(CONSUMER * PART, PART, 1) if QUERIES == PART else keys
    if steps > 0:
        if APART:  # for what was stored before the first step
            come_to(_STORED + 2 * CONSUMER + (first_use + 1) % 2, _BOTH)
        for member in range(heads_per_key):
            head_use = first_use + member * steps_of_head
            for step in range(missed):
                _hand_over(
                    head_use + step, first_use, q_ring, gradients, own_part, own_features, CONSUMER, QUERIES
                )  # fmt: skip
            m_start = start + missed * QUERIES
            for step in range(missed, steps_of_head):
                use = head_use + step
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
                    grad_queries = _begin_grad_queries(gradients.index((use + 1) % 2), own_features, CONSUMER)
                else:
                    out_ring.await_tile(use)
                    if PACKED:
                        clear_missing(cotangents, m_start, 0, lengths[0], QUERIES, False)
                    grad_p = warpgroup_mma(own_values, cotangents.permute((1, 0)), grad_p, is_async=True)
                    if use > first_use:  # the part of the step before, by now in memory
                        fence_async_shared()
                        come_to(PART_FULL + CONSUMER, WITH_ADDER)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                p, raw, scaled = take_probabilities(
                    scores, lse, m_start, n, (m_start < full) | (m_start >= full_stop), of_pairs, scale, softcap,
                    factor, parameters_ptr, SIDE, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, EDGES, SCORE, SOFTCAP,
                )  # fmt: skip
                weights = gl.convert_layout(p.to(DTYPE), of_p)
                if SOFTCAP:  # before p and raw are both needed
                    p *= 1 - raw * raw
                if APART:
                    grad_queries, weights = warpgroup_mma_wait(0, deps=(grad_queries, weights))
                    if use > first_use:
                        await_others(PART_FREE + CONSUMER, WITH_ADDER)
                        own_part.store(as_threads_have_it(grad_queries))
                        fence_async_shared()
                        come_to(PART_FULL + CONSUMER, WITH_ADDER)
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
                        grad_scores, scaled, column.to(gl.float32)[None, :], theirs[:, None], parameters_ptr,
                        SIDE == PAST,
                    )  # fmt: skip
                rounded = grad_scores.to(DTYPE)
                # Of two tiles in turn: when a consumer stores one, both have read what was in it two steps before.
                gradients.index(use % 2).slice(CONSUMER * ROWS, ROWS, 0).store(rounded)
                m_start += QUERIES
                if APART:
                    fence_async_shared()
                    come_to(_STORED + 2 * CONSUMER + use % 2, _BOTH)
                else:
                    grad_values = warpgroup_mma(weights, cotangents, grad_values, is_async=True)
                    fence_async_shared()
                    await_others(_STORED, _BOTH)
                    grad_queries = _begin_grad_queries(gradients.index(use % 2), own_features, CONSUMER)
                    grad_values, weights = warpgroup_mma_wait(1, deps=(grad_values, weights))
                operand = gl.convert_layout(rounded, of_p)
                grad_keys = warpgroup_mma(operand, queries, grad_keys, is_async=True)
                if not APART:
                    grad_queries = warpgroup_mma_wait(1, deps=(grad_queries,))
                    await_others(PART_FREE + CONSUMER, WITH_ADDER)
                    own_part.store(as_threads_have_it(grad_queries))
                grad_keys, grad_values, weights, operand = warpgroup_mma_wait(
                    0, deps=(grad_keys, grad_values, weights, operand)
                )  # fmt: skip
                q_ring.release(use)
        if APART:
            await_others(_STORED + 2 * (1 - CONSUMER) + (first_use + steps + 1) % 2, _BOTH)
            grad_queries = _begin_grad_queries(gradients.index((first_use + steps + 1) % 2), own_features, CONSUMER)
            grad_queries = warpgroup_mma_wait(0, deps=(grad_queries,))
            await_others(PART_FREE + CONSUMER, WITH_ADDER)
            own_part.store(as_threads_have_it(grad_queries))
        fence_async_shared()
        come_to(PART_FULL + CONSUMER, WITH_ADDER)
    if PAIRS != EVERY_PAIR and PAIRS != NEAR:  # another walk follows, which begins with these barriers and buffers anew
        await_others(_WALKED, _BOTH)
    return (grad_keys, grad_values), first_use + steps


@gluon.jit
def _exist(n, lengths, layout: gl.constexpr):
    """Which keys exist, for the rows of a layout."""
    exist = (n >= lengths[1]) & (n < lengths[2])
    return gl.convert_layout(exist, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _consume(
    grad_k, grad_far, grad_v, weights_ptr, table, far_table, cos, q_ring, out_ring, rows, rows_full, keys, far, values,
    keys_full, gradients, parts, sequences, bounds, parameters, scale, softcap, factor, grad_factor, window, far_window,
    n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys, CONSUMER: gl.constexpr,
    QUERIES: gl.constexpr, APART: gl.constexpr, R: gl.constexpr, INTERLEAVED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, FUTURE_TOO: gl.constexpr, EDGES: gl.constexpr, SCORE: gl.constexpr, ADJOINT: gl.constexpr,
    SOFTCAP: gl.constexpr,
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
    batch, key_head, _q_offset, k_offset, _row, n_start, lengths, places = locate(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_together, n_queries, n_keys, QUERIES
    )  # fmt: skip
    keys = keys.reshape([KEYS, BLOCK_D])
    own_values = values.reshape([KEYS, BLOCK_D]).slice(CONSUMER * ROWS, ROWS, 0)
    own_part = parts.index(CONSUMER)
    own_start = n_start + CONSUMER * ROWS
    n = own_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
    if has_keys(n_start, lengths):
        mbarrier.wait(keys_full, 0)
        if EDGES:
            clear_missing(keys, n_start, lengths[1], lengths[2], KEYS, HAS_STARTS)
            clear_missing(own_values, own_start, lengths[1], lengths[2], ROWS, HAS_STARTS)
    state = (gl.zeros([ROWS, BLOCK_D], gl.float32, of_keys), gl.zeros([ROWS, BLOCK_D], gl.float32, of_keys))
    use = 0
    if far_window is not None:
        far = far.reshape([KEYS, BLOCK_D])
        clear_missing(far, n_start, lengths[1], lengths[2], KEYS, HAS_STARTS)
        state, use = _take_walk(
            state, use, far, own_values, q_ring, out_ring, rows, rows_full, gradients, own_part, key_head, n_start, n,
            lengths, far_window, parameters, scale, softcap, factor, heads_per_key, CONSUMER, QUERIES, APART, CAUSAL,
            WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, FAR_PAST, EDGES, SCORE, ADJOINT, SOFTCAP,
        )  # fmt: skip
        if FUTURE_TOO:
            state, use = _take_walk(
                state, use, far, own_values, q_ring, out_ring, rows, rows_full, gradients, own_part, key_head, n_start,
                n, lengths, far_window, parameters, scale, softcap, factor, heads_per_key, CONSUMER, QUERIES, APART,
                CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, FAR_FUTURE, EDGES, SCORE, ADJOINT, SOFTCAP,
            )  # fmt: skip
        grad_keys, grad_values = state
        if grad_far is not None:  # nobody reads the far keys any more
            own_far = far.slice(CONSUMER * ROWS, ROWS, 0)
            own_far.store(gl.where(_exist(n, lengths, of_keys), grad_keys * grad_factor, 0.0).to(DTYPE))
            store_rows(grad_far, own_far, batch, key_head, k_offset, own_start, places)
            grad_keys = gl.zeros([ROWS, BLOCK_D], gl.float32, of_keys)
        else:
            grad_keys = change_keys(
                grad_keys, far_table, table, batch, k_offset + own_start, k_offset + places, R, INTERLEAVED
            )  # fmt: skip
        state = (grad_keys, grad_values)
    state, use = _take_walk(
        state, use, keys, own_values, q_ring, out_ring, rows, rows_full, gradients, own_part, key_head, n_start, n,
        lengths, far_window, parameters, scale, softcap, factor, heads_per_key, CONSUMER, QUERIES, APART, CAUSAL,
        WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED, EVERY_PAIR if far_window is None else NEAR, EDGES, SCORE, ADJOINT,
        SOFTCAP,
    )  # fmt: skip
    grad_keys, grad_values = state
    exists = _exist(n, lengths, of_keys)
    grad_keys = grad_keys * grad_factor
    if weights_ptr is not None:
        feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, of_keys))
        grad_keys = grad_keys * gl.load(weights_ptr + feature, feature < grad_k[4], other=0.0)[None, :]
    own_values.store(gl.where(exists, grad_values, 0.0).to(DTYPE))
    store_rows(grad_v, own_values, batch, key_head, k_offset, own_start, places)
    grad_keys = gl.where(exists, grad_keys, 0.0)
    if cos is not None:
        use += CONSUMER * ROWS // QUERIES
        q_ring.await_tile(use)
        out_ring.await_tile(use)
        own_cos, own_sin = read_angles(
            q_ring.tile_of(use, cos).slice(CONSUMER * ROWS % QUERIES, ROWS, 0),
            out_ring.tile_of(use, cos).slice(CONSUMER * ROWS % QUERIES, ROWS, 0), grad_keys, R, INTERLEAVED,
        )  # fmt: skip
        grad_keys = turn_back_keys(grad_keys, own_cos, own_sin, INTERLEAVED)
    own_values.store(grad_keys.to(DTYPE))
    store_rows(grad_k, own_values, batch, key_head, k_offset, own_start, places)


@gluon.jit(do_not_specialize=(*UNSPECIALISED, "n_tiles", "n_rows", "heads_together", "rows_of_head"))
def backward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of QUERIES; features mapped already, as those of k
    k,  # (B, K, Tk, D), for tiles of KEYS
    v,  # (B, K, Tk, Dv), likewise
    past,  # of queries as they meet far keys behind them, like q; or None
    future,  # of queries as they meet far keys ahead, like q; or None
    far_keys,  # like k; or None
    grad_out,  # (B, H, Tq, Dv), for tiles of QUERIES
    sums,  # the workspaces, as lines of 32 elements, for tiles of a part: near pairs', those behind, those ahead
    grad_k,  # a pointer, the strides of batch, head and token, and D
    grad_far,  # likewise, of the gradients of far keys apart from grad_k; None: they are in grad_k, by the tables
    grad_v,  # likewise, and Dv
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    weights_ptr,  # (D,), of the keys' features; or None
    cos,  # of the keys, (B or 1, 1, Tk, R / 2), for tiles as large as q's; None: their gradient is not turned back
    sin,  # likewise
    table,  # of the keys if some are far: cos, sin, and the strides of batch and token; else, or not turned, None
    far_table,  # likewise, of far keys; None: they are not turned
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    parameters,  # a pointer, and the stride of head; or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    grad_factor,  # of the gradient of k
    window,
    far_window,  # from how many indices apart on a pair is far; None: none is
    n_tiles,  # of keys: of one head, or of the schedule
    n_rows,  # B · K
    n_key_heads,
    heads_per_key,
    heads_together,
    n_queries,
    n_keys,
    rows_of_head,  # in a workspace
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
    out_ring = make_ring_beside(q_ring, grad_out)
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    far = keys  # nobody asks for it
    if far_keys is not None:
        far = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    FUTURE_TOO: gl.constexpr = future is not None
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
                grad_k, grad_far, grad_v, weights_ptr, table, far_table, cos, q_ring, out_ring, rows, rows_full, keys,
                far, values, keys_full, gradients, parts, sequences, bounds, parameters, scale, softcap, factor,
                grad_factor, window, far_window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries,
                n_keys, role, QUERIES, APART, R, INTERLEAVED, CAUSAL, WINDOWED, FUTURE_TOO, EDGES, SCORE, ADJOINT,
                SOFTCAP,
            ))
            if role < 2 else
            (produce, (
                q, k, v, past, future, far_keys, grad_out, cos, sin, lse_ptr, delta_ptr, q_ring, out_ring, rows,
                rows_full, keys, far, values, keys_full, sequences, bounds, window, far_window, n_tiles, n_rows,
                n_key_heads, heads_per_key, heads_together, n_queries, n_keys, CAUSAL, WINDOWED,
            ))
            if role == 2 else
            (add, (
                sums, parts, rows_of_head, sequences, bounds, window, far_window, n_tiles, n_rows, n_key_heads,
                heads_per_key, heads_together, n_queries, n_keys, QUERIES, BLOCK_D, CAUSAL, WINDOWED, FUTURE_TOO,
            ))
            for role in (0, 1, 2, 3)
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip
