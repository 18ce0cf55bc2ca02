"""The forward kernel of attention for Hopper: loads, matrix products and exponentials at the same time.

While a consumer takes the exponentials of one tile of scores, the tensor cores multiply the next tile's queries and
keys, and this one's probabilities and values. docs/kernels says how a tile goes through it.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from ropewalk.ops.attention.gluon_hopper_pipeline import (
    await_turn,
    give_turn,
    locate_number,
    make_numbers,
    make_ring,
    take_number,
)
from ropewalk.ops.attention.gluon_hopper_softmax import rescale, sum_in_threads, take_softmax
from ropewalk.ops.attention.gluon_hopper_tiles import ROWS, clear_missing, store_rows
from ropewalk.ops.attention.gluon_shim import (
    await_stores,
    fence_async_shared,
    gl,
    gluon,
    store_tile,
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
    key_ranges,
    lengths_of_pairs,
    measure_sequence,
    side_of_pairs,
)
from ropewalk.ops.attention.triton_tiles import parameters_of_head

# What differs from call to call, and must not make another binary.
_UNSPECIALISED = (
    "sequences",
    "parameters",
    "window",
    "far_window",
    "n_tiles",
    "n_rows",
    "n_heads",
    "heads_per_key",
    "heads_together",
    "n_queries",
    "n_keys",
    "total",
)


@gluon.jit
def _locate(
    number, sequences, bounds, window, n_tiles, n_rows, n_heads, heads_together, n_queries, n_keys,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Where the tile of a number lies, and what lengths its sequence has."""
    tile, batch, head, sequence = locate_number(
        number, sequences, n_tiles, n_rows, n_heads, heads_together, CAUSAL
    )  # fmt: skip
    q_offset, k_offset, queries, first_key, keys, _places, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys
    )  # fmt: skip
    return batch, head, q_offset, k_offset, tile * BLOCK_M, (queries, first_key, keys, tokens_apart, window)


@gluon.jit
def _cut_walk(
    m_start, lengths, far_window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, PACKED: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The walk over pairs of one kind: its lengths, its first key, its middle range, and how many tiles it has."""
    of_pairs = lengths_of_pairs(lengths, far_window, PAIRS, WINDOWED)
    SIDE: gl.constexpr = side_of_pairs(PAIRS, PAST if CAUSAL else EITHER_SIDE, True)
    start, full, full_stop, stop = key_ranges(
        m_start, of_pairs, BLOCK_M, BLOCK_N, SIDE, WINDOWED or PAIRS == NEAR, False
    )  # fmt: skip
    steps = (stop - start + BLOCK_N - 1) // BLOCK_N
    if PACKED:
        steps = gl.where(m_start < lengths[0], steps, 0)  # the schedule has room for more tiles than there are
    return of_pairs, start, full, full_stop, steps


@gluon.jit
def _load_walk(
    uses, q, k, v, q_ring, k_ring, v_ring, place, m_start, lengths, far_window, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Load queries, and keys one tile ahead of values, from the last tile back; returns the uses of the rings."""
    q_use, use = uses
    batch, head, key_head, q_offset, k_offset = place
    _of_pairs, start, _full, _full_stop, steps = _cut_walk(
        m_start, lengths, far_window, CONSUMERS * ROWS, BLOCK_N, CAUSAL, WINDOWED, PACKED, PAIRS
    )  # fmt: skip
    if steps > 0:
        for consumer in gl.static_range(CONSUMERS):
            q_ring.fill(q_use, q, [batch, head, q_offset + m_start + consumer * ROWS, 0])
            q_use += 1
        first = k_offset + start
        k_ring.fill(use, k, [batch, key_head, first + (steps - 1) * BLOCK_N, 0])
        for step in range(1, steps):
            k_ring.fill(use + 1, k, [batch, key_head, first + (steps - 1 - step) * BLOCK_N, 0])
            v_ring.fill(use, v, [batch, key_head, first + (steps - step) * BLOCK_N, 0])
            use += 1
        v_ring.fill(use, v, [batch, key_head, first, 0])
        use += 1
    return q_use, use


@gluon.jit
def _produce(
    q, k, v, past, future, far_keys, counter_ptr, numbers, q_ring, k_ring, v_ring, sequences, bounds, window,
    far_window, n_tiles, n_rows, n_heads, heads_per_key, heads_together, n_queries, n_keys, total,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Take numbers, and load what the consumers need for each."""
    PACKED: gl.constexpr = sequences is not None
    tiles_done = 0
    q_use = 0
    use = 0
    number = gl.program_id(0)
    while number < total:
        numbers.publish(tiles_done, number)
        tiles_done += 1
        batch, head, q_offset, k_offset, m_start, lengths = _locate(
            number, sequences, bounds, window, n_tiles, n_rows, n_heads, heads_together, n_queries, n_keys,
            CONSUMERS * ROWS, CAUSAL,
        )  # fmt: skip
        place = (batch, head, head // heads_per_key, q_offset, k_offset)
        if far_window is not None:
            q_use, use = _load_walk(
                (q_use, use), past, far_keys, v, q_ring, k_ring, v_ring, place, m_start, lengths, far_window, CONSUMERS,
                BLOCK_N, CAUSAL, WINDOWED, PACKED, FAR_PAST,
            )  # fmt: skip
            if future is not None:
                q_use, use = _load_walk(
                    (q_use, use), future, far_keys, v, q_ring, k_ring, v_ring, place, m_start, lengths, far_window,
                    CONSUMERS, BLOCK_N, CAUSAL, WINDOWED, PACKED, FAR_FUTURE,
                )  # fmt: skip
        q_use, use = _load_walk(
            (q_use, use), q, k, v, q_ring, k_ring, v_ring, place, m_start, lengths, far_window, CONSUMERS, BLOCK_N,
            CAUSAL, WINDOWED, PACKED, EVERY_PAIR if far_window is None else NEAR,
        )  # fmt: skip
        number = take_number(counter_ptr, total)  # no sooner, or another program could have begun with it
    numbers.publish(tiles_done, total)


@gluon.jit
def _pass_by(
    uses, count, k_ring, v_ring, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """Leave so many tiles to the other consumers; returns the use of the rings after them."""
    use = uses
    for _tile in range(count):
        k_ring.await_tile(use)  # released any sooner, it would count for the use before
        k_ring.release(use)
        if TURNS:
            await_turn(CONSUMER)
            give_turn(CONSUMER, CONSUMERS)
        v_ring.await_tile(use)
        v_ring.release(use)
        use += 1
    return use


@gluon.jit
def _attend_walk(
    state, uses, q_ring, k_ring, v_ring, tile_start, m, lengths, far_window, scale, softcap, factor, parameters_ptr,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_STARTS: gl.constexpr, PACKED: gl.constexpr,
    PAIRS: gl.constexpr, EDGES: gl.constexpr, SCORE: gl.constexpr, SOFTCAP: gl.constexpr, PIN: gl.constexpr,
    EARLY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Add the keys of a walk to a tile's running output, maximum and sums in threads; returns the uses of rings too."""
    sums, row_max, row_sum = state
    q_use, use = uses
    DTYPE: gl.constexpr = v_ring.tiles.dtype
    of_out: gl.constexpr = sums.type.layout
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    SIDE: gl.constexpr = side_of_pairs(PAIRS, PAST if CAUSAL else EITHER_SIDE, True)
    WINDOWED_PAIRS: gl.constexpr = WINDOWED or PAIRS == NEAR
    of_pairs, start, full, full_stop, steps = _cut_walk(
        tile_start, lengths, far_window, CONSUMERS * ROWS, BLOCK_N, CAUSAL, WINDOWED, PACKED, PAIRS
    )  # fmt: skip
    before = 0
    after = 0
    if CONSUMERS * ROWS > BLOCK_N:  # some tiles may be for other consumers only
        m_start = tile_start + CONSUMER * ROWS
        own_start, full, full_stop, own_stop = key_ranges(
            m_start, of_pairs, ROWS, BLOCK_N, SIDE, WINDOWED_PAIRS, False
        )  # fmt: skip
        own_stop = gl.where(m_start < lengths[0], own_stop, start)
        before = gl.minimum(steps - (gl.maximum(own_stop - start, 0) + BLOCK_N - 1) // BLOCK_N, steps - 1)
        after = gl.minimum((own_start - start) // BLOCK_N, steps - 1 - before)
    if steps > 0:
        use = _pass_by(use, before, k_ring, v_ring, CONSUMER, CONSUMERS, TURNS)
        q_ring.await_tile(q_use)
        queries = q_ring.tile(q_use)
        k_ring.await_tile(use)
        scores = warpgroup_mma(
            queries, k_ring.tile(use).permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores),
            use_acc=False, is_async=True,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=(scores,))
        k_ring.release(use)
        n_start = start + (steps - 1 - before) * BLOCK_N
        p, kept, row_max, row_sum = take_softmax(
            scores, row_max, row_sum, m, n_start, (n_start < full) | (n_start >= full_stop), of_pairs, scale, softcap,
            factor, parameters_ptr, SIDE, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, EDGES, SCORE, SOFTCAP, False,
        )  # fmt: skip
        weights = gl.convert_layout(p.to(DTYPE), of_p)
        if far_window is not None and PAIRS != FAR_PAST:  # there was a walk before
            sums = rescale(sums, kept)
        for _step in range(1, steps - before - after):
            if HAS_LENGTHS or HAS_STARTS:  # noqa: SIM102
                if (n_start + BLOCK_N > lengths[2]) | (n_start < lengths[1]):
                    v_ring.await_tile(use)
                    clear_missing(v_ring.tile(use), n_start, lengths[1], lengths[2], BLOCK_N, HAS_STARTS)
            k_ring.await_tile(use + 1)
            if TURNS:
                await_turn(CONSUMER)
            scores = warpgroup_mma(
                queries, k_ring.tile(use + 1).permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores),
                use_acc=False, is_async=True,
            )  # fmt: skip
            v_ring.await_tile(use)
            sums = warpgroup_mma(weights, v_ring.tile(use), sums, is_async=True)
            if TURNS:
                give_turn(CONSUMER, CONSUMERS)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            k_ring.release(use + 1)
            n_start -= BLOCK_N
            p, kept, row_max, row_sum = take_softmax(
                scores, row_max, row_sum, m, n_start, (n_start < full) | (n_start >= full_stop), of_pairs, scale,
                softcap, factor, parameters_ptr, SIDE, WINDOWED_PAIRS, HAS_LENGTHS, HAS_STARTS, EDGES, SCORE, SOFTCAP,
                PIN,
            )  # fmt: skip
            if EARLY:  # the probabilities take half the registers before the wait, and not after it
                next_weights = gl.convert_layout(p.to(DTYPE), of_p)
                sums, weights, next_weights = warpgroup_mma_wait(0, deps=(sums, weights, next_weights))
            else:
                sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
                next_weights = gl.convert_layout(p.to(DTYPE), of_p)
            v_ring.release(use)
            sums = rescale(sums, kept)
            weights = next_weights
            use += 1
        q_ring.release(q_use)
        q_use += CONSUMERS
        v_ring.await_tile(use)
        if HAS_LENGTHS or HAS_STARTS:  # noqa: SIM102
            if (n_start + BLOCK_N > lengths[2]) | (n_start < lengths[1]):
                clear_missing(v_ring.tile(use), n_start, lengths[1], lengths[2], BLOCK_N, HAS_STARTS)
        sums = warpgroup_mma(weights, v_ring.tile(use), sums, is_async=True)
        sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
        v_ring.release(use)
        use += 1
        use = _pass_by(use, after, k_ring, v_ring, CONSUMER, CONSUMERS, TURNS)
    return (sums, row_max, row_sum), (q_use, use)


@gluon.jit
def _consume(
    out, lse_ptr, numbers, q_ring, k_ring, v_ring, out_tiles, sequences, bounds, parameters, sinks_ptr, scale, softcap,
    factor, window, far_window, n_tiles, n_rows, n_heads, heads_together, n_queries, n_keys, total,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, FUTURE_TOO: gl.constexpr, EDGES: gl.constexpr, SCORE: gl.constexpr, SOFTCAP: gl.constexpr,
    PIN: gl.constexpr, EARLY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Attend with ROWS queries of each number's tile."""
    BLOCK_D: gl.constexpr = out_tiles.shape[4]
    PACKED: gl.constexpr = sequences is not None
    HAS_LENGTHS: gl.constexpr = PACKED or bounds[0] is not None or bounds[2] is not None
    HAS_STARTS: gl.constexpr = bounds[1] is not None
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    out_tile = out_tiles.index(CONSUMER).reshape([ROWS, BLOCK_D])
    tiles_done = 0
    uses = (gl.to_tensor(CONSUMER), gl.to_tensor(0))
    if TURNS and CONSUMER == CONSUMERS - 1:
        give_turn(CONSUMER, CONSUMERS)
    number = numbers.receive(tiles_done)
    while number < total:
        batch, head, q_offset, _k_offset, tile_start, lengths = _locate(
            number, sequences, bounds, window, n_tiles, n_rows, n_heads, heads_together, n_queries, n_keys,
            CONSUMERS * ROWS, CAUSAL,
        )  # fmt: skip
        m_start = tile_start + CONSUMER * ROWS
        m = m_start + gl.arange(0, ROWS, layout=of_rows)
        parameters_ptr = None
        if parameters is not None:
            parameters_ptr = parameters_of_head(parameters, head)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
        row_sum = sum_in_threads(gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores))
        if sinks_ptr is not None:
            row_max = gl.zeros([ROWS], gl.float32, of_rows) + gl.load(sinks_ptr + head) * (1.4426950408889634 / factor)
            row_sum += 0.25  # of four threads
        state = (gl.zeros([ROWS, BLOCK_D], gl.float32, of_out), row_max, row_sum)
        if far_window is not None:
            state, uses = _attend_walk(
                state, uses, q_ring, k_ring, v_ring, tile_start, m, lengths, far_window, scale, softcap, factor,
                parameters_ptr, CONSUMER, CONSUMERS, BLOCK_N, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
                FAR_PAST, EDGES, SCORE, SOFTCAP, PIN, EARLY, TURNS,
            )  # fmt: skip
            if FUTURE_TOO:
                state, uses = _attend_walk(
                    state, uses, q_ring, k_ring, v_ring, tile_start, m, lengths, far_window, scale, softcap, factor,
                    parameters_ptr, CONSUMER, CONSUMERS, BLOCK_N, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
                    FAR_FUTURE, EDGES, SCORE, SOFTCAP, PIN, EARLY, TURNS,
                )  # fmt: skip
        state, uses = _attend_walk(
            state, uses, q_ring, k_ring, v_ring, tile_start, m, lengths, far_window, scale, softcap, factor,
            parameters_ptr, CONSUMER, CONSUMERS, BLOCK_N, CAUSAL, WINDOWED, HAS_LENGTHS, HAS_STARTS, PACKED,
            EVERY_PAIR if far_window is None else NEAR, EDGES, SCORE, SOFTCAP, PIN, EARLY, TURNS,
        )  # fmt: skip
        sums, row_max, row_sum = state
        total_of_row = gl.convert_layout(gl.sum(row_sum, 1), of_rows)
        attends = total_of_row != 0  # NaN is to be seen
        total_of_row = gl.where(attends, total_of_row, 1.0)
        sums = sums * gl.convert_layout(1.0 / total_of_row, gl.SliceLayout(1, of_out))[:, None]
        lse = gl.where(attends, row_max * factor + gl.log2(total_of_row), float("-inf"))
        lse_row = (batch * n_heads + head).to(gl.int64) * n_queries + q_offset
        gl.store(lse_ptr + lse_row + m, lse, m < lengths[0])
        await_stores(0)
        out_tile.store(sums.to(out_tile.dtype))
        if PACKED:
            store_rows(out, out_tile, batch, head, q_offset, m_start, lengths[0])
        else:
            fence_async_shared()
            store_tile(out, [batch, head, m_start, 0], out_tiles.index(CONSUMER))
        tiles_done += 1
        number = numbers.receive(tiles_done)
    await_stores(0)


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def forward_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of ROWS; features mapped already, as those of k
    k,  # (B, K, Tk, D), for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise
    past,  # of queries as they meet far keys behind them, like q; or None
    future,  # of queries as they meet far keys ahead, like q; or None
    far_keys,  # like k; or None
    out,  # like q, (B, H, Tq, Dv); of a packed batch a pointer, the strides of batch, head and token, and Dv
    lse_ptr,  # (B, H, Tq), dense: base-2 logarithms of the sums
    counter_ptr,  # zero, and zero afterwards: how many numbers have been taken
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    parameters,  # a pointer, and the stride of head; or None
    sinks_ptr,  # (H,); or None
    scale,  # what scores are multiplied by before they are saturated or changed
    softcap,
    factor,  # what turns scores, as the softmax sees them, into exponents of 2
    window,
    far_window,  # from how many positions apart on a pair is far; None: none is
    n_tiles,  # of queries: of one head, or of the schedule
    n_rows,  # B · H
    n_heads,
    heads_per_key,
    heads_together,
    n_queries,
    n_keys,
    total,  # of numbers
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    EDGES: gl.constexpr,  # whether there may be keys in a tile that a query does not attend
    SCORE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PIN: gl.constexpr,
    EARLY: gl.constexpr,
    TURNS: gl.constexpr,  # whether consumers issue their products in turn
):
    """Attend with tiles of CONSUMERS · ROWS queries of one head each, one after another."""
    q_ring = make_ring(q, CONSUMERS, 1)
    k_ring = make_ring(k, STAGES, CONSUMERS)
    v_ring = make_ring(v, STAGES, CONSUMERS)
    out_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, q.block_shape[3]], q.layout)
    numbers = make_numbers(CONSUMERS)
    OTHERS: gl.constexpr = CONSUMERS - 1  # consumers but the first
    gl.warp_specialize(
        [
            (_consume, (
                out, lse_ptr, numbers, q_ring, k_ring, v_ring, out_tiles, sequences, bounds, parameters, sinks_ptr,
                scale, softcap, factor, window, far_window, n_tiles, n_rows, n_heads, heads_together, n_queries,
                n_keys, total, role, CONSUMERS, BLOCK_N, CAUSAL, WINDOWED, future is not None, EDGES, SCORE, SOFTCAP,
                PIN, EARLY, TURNS,
            ))
            if role < CONSUMERS else
            (_produce, (
                q, k, v, past, future, far_keys, counter_ptr, numbers, q_ring, k_ring, v_ring, sequences, bounds,
                window, far_window, n_tiles, n_rows, n_heads, heads_per_key, heads_together, n_queries, n_keys, total,
                CONSUMERS, BLOCK_N, CAUSAL, WINDOWED,
            ))
            for role in (0, 1, 2, 3)[:CONSUMERS + 1]
        ],
        [4] * OTHERS + [1],
        [CONSUMER_REGISTERS] * OTHERS + [PRODUCER_REGISTERS],
    )  # fmt: skip
