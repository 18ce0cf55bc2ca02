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

from ropewalk.ops.attention.gluon_hopper_pipeline import locate_number, make_ring, meet
from ropewalk.ops.attention.gluon_hopper_softmax import clear_missing
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from ropewalk.ops.attention.triton_sequences import EITHER_SIDE, PAST, may_attend, measure_sequence, query_ranges
from ropewalk.ops.attention.triton_softmax import saturate
from ropewalk.ops.attention.triton_tiles import UNSPECIALISED, parameters_of_head

ROWS = gl.constexpr(64)  # of keys that a consumer has: four warps' instructions take so many
KEYS = gl.constexpr(128)  # that a program has
QUERIES = gl.constexpr(64)  # in a step


@gluon.jit
def _walk(
    sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
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
def _next_step(m_start, member, start, stop):
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
    batch, key_head, q_offset, k_offset, _row, n_start, lengths, _places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    if steps > 0:
        mbarrier.expect(keys_full, k.block_type.nbytes + v.block_type.nbytes)
        load_tile(k, [batch, key_head, k_offset + n_start, 0], keys_full, keys)
        load_tile(v, [batch, key_head, k_offset + n_start, 0], keys_full, values)
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    column = gl.arange(0, QUERIES, layout=layout)
    m_start = ranges[0]
    member = 0
    for use in range(steps):
        head = key_head * heads_per_key + member
        q_ring.fill(use, q, [batch, head, q_offset + m_start, 0])
        stage = use % q_ring.stages
        offset = (batch * (n_key_heads * heads_per_key) + head).to(gl.int64) * n_queries + q_offset + m_start
        exists = column < lengths[0] - m_start
        lse = gl.load(lse_ptr + offset + column, exists, other=float("-inf"))
        delta = gl.load(delta_ptr + offset + column, exists, other=0.0)
        # Of a row that attends nothing, or is none, the exponentials are to be zero.
        rows.index(2 * stage).store(gl.where(lse == float("-inf"), float("inf"), lse))
        rows.index(2 * stage + 1).store(delta)
        mbarrier.arrive(rows_full.index(stage), count=1)
        out_ring.fill(use, grad_out, [batch, head, q_offset + m_start, 0])
        m_start, member = _next_step(m_start, member, ranges[0], ranges[3])


@gluon.jit
def _add(
    sums, tiles, full, empty, sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together,
    n_queries, n_keys, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Add what the consumers have for each step's queries, each for half of the features, to the workspace."""
    batch, key_head, _q_offset, _k_offset, row, _n_start, _lengths, _places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    m_start = ranges[0]
    member = 0
    for use in range(steps):
        head = key_head * heads_per_key + member
        mbarrier.wait(full, use & 1)
        tma_add(sums, [batch, head, row + m_start, 0], tiles.index(0))
        tma_add(sums, [batch, head, row + m_start, sums.block_shape[3]], tiles.index(1))
        await_stores(0)
        mbarrier.arrive(empty, count=1)
        m_start, member = _next_step(m_start, member, ranges[0], ranges[3])


@gluon.jit
def _take_probabilities(
    scores, lse, m_start, n, is_edge, lengths, scale, softcap, factor, parameters_ptr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_STARTS: gl.constexpr, EDGES: gl.constexpr,
    SCORE: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Probabilities of a tile of raw scores, and what a score function was given."""
    layout: gl.constexpr = scores.type.layout
    if SOFTCAP:
        scores = saturate(scores * scale, True)
    scaled = scores
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))
    if SCORE is not None:
        scaled = scores * (softcap if SOFTCAP else scale)
        theirs = (n - (m_start + lengths[3])).to(gl.float32)
        changed = SCORE(scaled, column.to(gl.float32)[None, :], theirs[:, None], parameters_ptr, CAUSAL)
    else:
        changed = scores
    p = gl.exp2(changed * factor - lse[None, :])
    if EDGES:  # noqa: SIM102
        if is_edge:
            SIDE: gl.constexpr = PAST if CAUSAL else EITHER_SIDE
            from_here = (lengths[0], lengths[1], lengths[2], lengths[3] + m_start, lengths[4])
            may = may_attend(
                column[None, :], n[:, None], from_here, None, None, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED
            )  # fmt: skip
            p = gl.where(may, p, 0.0)
    return p, scores, scaled


@gluon.jit
def _consume(
    grad_k, grad_v, weights_ptr, table, q_ring, out_ring, rows, rows_full, keys, values, keys_full, gradients, tiles,
    tiles_full, tiles_empty, sequences, bounds, parameters, scale, softcap, factor, grad_factor, window, n_tiles,
    n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys, CONSUMER: gl.constexpr,
    R: gl.constexpr, INTERLEAVED: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, EDGES: gl.constexpr,
    SCORE: gl.constexpr, ADJOINT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Compute with ROWS keys of the tile, and half of the features of the queries' gradients."""
    DTYPE: gl.constexpr = keys.dtype
    BLOCK_D: gl.constexpr = keys.shape[3]
    HALF: gl.constexpr = BLOCK_D // 2
    PACKED: gl.constexpr = sequences is not None
    HAS_LENGTHS: gl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: gl.constexpr = bounds[1] is not None
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_keys, 2)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    batch, key_head, _q_offset, k_offset, _row, n_start, lengths, places, ranges, steps = _walk(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    all_keys = keys.reshape([KEYS, BLOCK_D])
    own_keys = all_keys.slice(CONSUMER * ROWS, ROWS, 0)
    own_values = values.reshape([KEYS, BLOCK_D]).slice(CONSUMER * ROWS, ROWS, 0)
    features = all_keys.slice(CONSUMER * HALF, HALF, 1)
    own_tile = tiles.index(CONSUMER).reshape([QUERIES, HALF])
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
        q_ring.await_tile(0)
        if PACKED:
            clear_missing(q_ring.tile(0), m_start, 0, lengths[0], QUERIES, False)
        scores = warpgroup_mma(
            own_keys, q_ring.tile(0).permute((1, 0)), gl.zeros([ROWS, QUERIES], gl.float32, of_scores),
            use_acc=False, is_async=True,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=(scores,))
        # The product of grad_keys goes on while the next step begins.
        products = warpgroup_mma_init(grad_keys)
        for use in range(steps):
            stage = use % q_ring.stages
            out_ring.await_tile(use)
            if PACKED:
                clear_missing(out_ring.tile(use), m_start, 0, lengths[0], QUERIES, False)
            grad_p = warpgroup_mma(
                own_values, out_ring.tile(use).permute((1, 0)), gl.zeros([ROWS, QUERIES], gl.float32, of_scores),
                use_acc=False, is_async=True,
            )  # fmt: skip
            parameters_ptr = None
            if parameters is not None:
                parameters_ptr = parameters_of_head(parameters, key_head * heads_per_key + member)
            mbarrier.wait(rows_full.index(stage), use // q_ring.stages & 1)
            lse = rows.index(2 * stage).load(of_columns)
            p, raw, scaled = _take_probabilities(
                scores, lse, m_start, n, (m_start < ranges[1]) | (m_start >= ranges[2]), lengths, scale, softcap,
                factor, parameters_ptr, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, EDGES, SCORE, SOFTCAP,
            )  # fmt: skip
            weights = gl.convert_layout(p.to(DTYPE), of_p)
            grad_values = warpgroup_mma(weights, out_ring.tile(use), grad_values, is_async=True)
            if SOFTCAP:  # before p and raw are both needed
                p *= 1 - raw * raw
            products, grad_p = warpgroup_mma_wait(1, deps=(products, grad_p))
            if use > 0:
                q_ring.release(use - 1)
            delta = rows.index(2 * stage + 1).load(of_columns)
            grad_scores = p * (grad_p - delta[None, :])
            if ADJOINT is not None:
                column = gl.arange(0, QUERIES, layout=of_columns)
                theirs = (n - (m_start + lengths[3])).to(gl.float32)
                grad_scores = ADJOINT(
                    grad_scores, scaled, column.to(gl.float32)[None, :], theirs[:, None], parameters_ptr, CAUSAL
                )  # fmt: skip
            rounded = grad_scores.to(DTYPE)
            step_gradients = gradients.index(use % 2)
            step_gradients.slice(CONSUMER * ROWS, ROWS, 0).store(rounded)
            fence_async_shared()
            m_start, member = _next_step(m_start, member, ranges[0], ranges[3])
            # The scores of the next step; after the last one of the same again, of no account.
            following = gl.minimum(use + 1, steps - 1)
            q_ring.await_tile(following)
            if PACKED:  # noqa: SIM102
                if use + 1 < steps:
                    clear_missing(q_ring.tile(following), m_start, 0, lengths[0], QUERIES, False)
            next_scores = warpgroup_mma(
                own_keys, q_ring.tile(following).permute((1, 0)),
                gl.zeros([ROWS, QUERIES], gl.float32, of_scores), use_acc=False, is_async=True,
            )  # fmt: skip
            meet()
            grad_queries = warpgroup_mma(
                step_gradients.permute((1, 0)), features, gl.zeros([QUERIES, HALF], gl.float32, of_queries),
                use_acc=False, is_async=True,
            )  # fmt: skip
            # From shared memory: a tile more in registers, and the assembler lets products wait for each other.
            products = warpgroup_mma(
                step_gradients.slice(CONSUMER * ROWS, ROWS, 0), q_ring.tile(use), products, is_async=True
            )
            scores, grad_queries, grad_values, weights = warpgroup_mma_wait(
                1, deps=(next_scores, grad_queries, grad_values, weights)
            )  # fmt: skip
            out_ring.release(use)
            mbarrier.wait(tiles_empty, (use & 1) ^ 1)
            own_tile.store(grad_queries)
            fence_async_shared()
            mbarrier.arrive(tiles_full, count=1)
        grad_keys = warpgroup_mma_wait(0, deps=(products,))
    exists = (n >= lengths[1]) & (n < lengths[2])
    exists = gl.convert_layout(exists, gl.SliceLayout(1, of_keys))[:, None]
    grad_keys = grad_keys * grad_factor
    if weights_ptr is not None:
        feature = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, of_keys))
        grad_keys = grad_keys * gl.load(weights_ptr + feature, feature < grad_k[4], other=0.0)[None, :]
    own_values.store(gl.where(exists, grad_values, 0.0).to(DTYPE))
    _store_rows(grad_v, own_values, batch, key_head, k_offset, own_start, places)
    grad_keys = gl.where(exists, grad_keys, 0.0)
    if table is not None:
        grad_keys = _turn_back(grad_keys, table, batch, k_offset + own_start, k_offset + places, R, INTERLEAVED)
    own_values.store(grad_keys.to(DTYPE))
    _store_rows(grad_k, own_values, batch, key_head, k_offset, own_start, places)


@gluon.jit
def _turn_back(tile, table, batch, rows, n_rows, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Rotate a tile's gradients back, [ROWS, D] in float32: each thread has both features of a pair, or of both halves.

    Half-split pairs must be those of the whole tile: R = D.
    """
    cos_ptr, sin_ptr, stride_batch, stride_token = table
    PAIRS: gl.constexpr = tile.shape[1] // 2
    if INTERLEAVED:
        a, b = gl.split(gl.reshape(tile, [ROWS, PAIRS, 2]))
    else:
        a, b = gl.split(gl.permute(gl.reshape(tile, [ROWS, 2, PAIRS]), (0, 2, 1)))
    layout: gl.constexpr = a.type.layout
    row = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
    mask = (row < n_rows)[:, None] & (pair < R // 2)
    offsets = batch.to(gl.int64) * stride_batch + row.to(gl.int64)[:, None] * stride_token + pair
    cos = gl.load(cos_ptr + offsets, mask, other=1.0)
    sin = gl.load(sin_ptr + offsets, mask, other=0.0)
    turned = gl.join(a * cos + b * sin, b * cos - a * sin)
    if not INTERLEAVED:
        turned = gl.permute(turned, (0, 2, 1))
    return gl.reshape(turned, tile.shape)


@gluon.jit
def _store_rows(place, tile, batch, head, offset, start, n_rows):
    """Store a tile's rows that exist: no descriptor ends where a packed batch's next sequence follows."""
    ptr, stride_batch, stride_head, stride_token, head_dim = place
    width: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    feature = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    offsets = (offset + row).to(gl.int64)[:, None] * stride_token + feature[None, :]
    mask = (row < n_rows)[:, None] & (feature < head_dim)[None, :]
    first = batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head
    gl.store(ptr + first + offsets, tile.load(layout), mask)


@gluon.jit(do_not_specialize=(*UNSPECIALISED, "n_tiles", "n_rows", "heads_together"))
def backward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of QUERIES; features mapped already, as those of k
    k,  # (B, K, Tk, D), for tiles of KEYS
    v,  # (B, K, Tk, Dv), likewise
    grad_out,  # (B, H, Tq, Dv), for tiles of QUERIES
    sums,  # the workspace, (B, H, rows, D), for tiles of QUERIES and half of the features
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
    Q_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr,
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
    q_ring = make_ring(q, Q_STAGES, 2)
    out_ring = make_ring(grad_out, OUT_STAGES, 2)
    rows = gl.allocate_shared_memory(gl.float32, [2 * Q_STAGES, QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    keys = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    values = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    gradients_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], k.dtype)
    gradients = gl.allocate_shared_memory(k.dtype, [2, KEYS, QUERIES], gradients_layout)
    tiles = gl.allocate_shared_memory(gl.float32, [2] + sums.block_shape, sums.layout)  # noqa: RUF005
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tiles_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tiles_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
    mbarrier.init(keys_full, count=1)
    mbarrier.init(tiles_full, count=2)
    mbarrier.init(tiles_empty, count=1)
    gl.warp_specialize(
        [
            (_consume, (
                grad_k, grad_v, weights_ptr, table, q_ring, out_ring, rows, rows_full, keys, values, keys_full,
                gradients, tiles, tiles_full, tiles_empty, sequences, bounds, parameters, scale, softcap, factor,
                grad_factor, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
                0, R, INTERLEAVED, CAUSAL, WINDOWED, EDGES, SCORE, ADJOINT, SOFTCAP,
            )),
            (_consume, (
                grad_k, grad_v, weights_ptr, table, q_ring, out_ring, rows, rows_full, keys, values, keys_full,
                gradients, tiles, tiles_full, tiles_empty, sequences, bounds, parameters, scale, softcap, factor,
                grad_factor, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries, n_keys,
                1, R, INTERLEAVED, CAUSAL, WINDOWED, EDGES, SCORE, ADJOINT, SOFTCAP,
            )),
            (_produce, (
                q, k, v, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, keys, values, keys_full,
                sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_per_key, heads_together, n_queries,
                n_keys, CAUSAL, WINDOWED,
            )),
            (_add, (
                sums, tiles, tiles_full, tiles_empty, sequences, bounds, window, n_tiles, n_rows, n_key_heads,
                heads_per_key, heads_together, n_queries, n_keys, CAUSAL, WINDOWED,
            )),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
    )  # fmt: skip
