"""The warps of the backward kernel for Hopper that move tiles, a producer and an adder; and the walks that all take.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from ropewalk.ops.attention.gluon_hopper_pipeline import await_others, come_to, locate_number
from ropewalk.ops.attention.gluon_hopper_tiles import KEYS, ROWS
from ropewalk.ops.attention.gluon_passes import first_row
from ropewalk.ops.attention.gluon_shim import await_stores, gl, gluon, load_tile, mbarrier, tma_add
from ropewalk.ops.attention.triton_sequences import (
    EITHER_SIDE,
    EVERY_PAIR,
    FAR_FUTURE,
    FAR_PAST,
    NEAR,
    PAST,
    lengths_of_pairs,
    measure_sequence,
    query_ranges,
    side_of_pairs,
)

# Named barriers: of each consumer and the adder.
PART_FULL = gl.constexpr(12)
PART_FREE = gl.constexpr(14)
WITH_ADDER = gl.constexpr(160)  # one consumer's threads and the adder's


@gluon.jit
def locate(
    sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_together, n_queries, n_keys, QUERIES: gl.constexpr,
):  # fmt: skip
    """Where a program's tile lies, and what lengths its sequence has.

    With the past alone to attend, the first keys have the longest walks.
    """
    tile, batch, key_head, sequence = locate_number(
        gl.program_id(0), sequences, n_tiles, n_rows, n_key_heads, heads_together, False
    )  # fmt: skip
    q_offset, k_offset, queries, first_key, keys, places, tokens_apart = measure_sequence(
        sequence, sequences, bounds, n_queries, n_keys
    )  # fmt: skip
    lengths = (queries, first_key, keys, tokens_apart, window)
    row = first_row(q_offset, sequence, sequences, QUERIES)
    return batch, key_head, q_offset, k_offset, row, tile * KEYS, lengths, places


@gluon.jit
def cut_walk(
    n_start, lengths, far_window, heads_per_key, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The walk over pairs of one kind: its lengths, first and last query, and steps of one head and of all together."""
    of_pairs = lengths_of_pairs(lengths, far_window, PAIRS, WINDOWED)
    SIDE: gl.constexpr = side_of_pairs(PAIRS, PAST if CAUSAL else EITHER_SIDE, True)
    start, _full, _full_stop, stop = query_ranges(
        n_start, of_pairs, QUERIES, KEYS, SIDE, WINDOWED or PAIRS == NEAR, False
    )  # fmt: skip
    steps_of_head = (stop - start + QUERIES - 1) // QUERIES
    return of_pairs, start, stop, steps_of_head, steps_of_head * heads_per_key


@gluon.jit
def own_steps(n_start, of_pairs, QUERIES: gl.constexpr, SIDE: gl.constexpr, WINDOWED: gl.constexpr):
    """The first step in which a query attends a key of a consumer; and from which one on, and up to which, every query
    attends every key of it, and these exist.
    """
    start, full, full_stop, _stop = query_ranges(n_start, of_pairs, QUERIES, ROWS, SIDE, WINDOWED, False)
    if (n_start < of_pairs[1]) | (n_start + ROWS > of_pairs[2]):
        full = start
        full_stop = start
    return start, full, full_stop


@gluon.jit
def has_keys(n_start, lengths):
    """Whether a tile has keys, and their sequence queries: then its keys are loaded, and awaited."""
    return (lengths[0] > 0) & (n_start < lengths[2]) & (n_start + KEYS > lengths[1])


@gluon.jit
def next_step(m_start, member, start, stop, QUERIES: gl.constexpr):
    """The queries after some, and the head that they are of: one head's after another's."""
    m_start += QUERIES
    is_last = m_start >= stop
    return gl.where(is_last, start, m_start), gl.where(is_last, member + 1, member)


@gluon.jit
def _load_walk(
    use, q, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, place, n_start, lengths, far_window,
    n_heads, heads_per_key, n_queries, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Load for each step the queries, their gradients, and the numbers of their rows; returns the uses of the rings."""
    QUERIES: gl.constexpr = q.block_shape[2]
    batch, key_head, q_offset = place
    _of_pairs, start, stop, _steps_of_head, steps = cut_walk(
        n_start, lengths, far_window, heads_per_key, QUERIES, CAUSAL, WINDOWED, PAIRS
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([QUERIES // 32], [32], [1], [0])
    column = gl.arange(0, QUERIES, layout=layout)
    m_start = start
    member = 0
    for _step in range(steps):
        head = key_head * heads_per_key + member
        q_ring.fill(use, q, [batch, head, q_offset + m_start, 0])
        out_ring.load(use, grad_out, [batch, head, q_offset + m_start, 0])
        stage = use % q_ring.stages
        offset = (batch * n_heads + head).to(gl.int64) * n_queries + q_offset + m_start
        exists = column < lengths[0] - m_start
        lse = gl.load(lse_ptr + offset + column, exists, other=float("-inf"))
        delta = gl.load(delta_ptr + offset + column, exists, other=0.0)
        # Of a row that attends nothing, or is none, the exponentials are to be zero.
        rows.index(2 * stage).store(gl.where(lse == float("-inf"), float("inf"), lse))
        rows.index(2 * stage + 1).store(delta)
        mbarrier.arrive(rows_full.index(stage), count=1)
        m_start, member = next_step(m_start, member, start, stop, QUERIES)
        use += 1
    return use


@gluon.jit
def _load_angles(use, cos, sin, q_ring, out_ring, batch, first_row):
    """Load what turns the gradient of the keys back into the stages of the rings, as the last steps leave them."""
    QUERIES: gl.constexpr = cos.block_shape[2]
    for start in gl.static_range(0, KEYS, QUERIES):
        coordinates = [gl.minimum(batch, cos.shape[0] - 1), 0, first_row + start, 0]
        q_ring.fill(use, cos, coordinates)
        out_ring.load(use, sin, coordinates)
        use += 1


@gluon.jit
def produce(
    q, k, v, past, future, far_keys, grad_out, cos, sin, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, keys,
    far, values, keys_full, sequences, bounds, window, far_window, n_tiles, n_rows, n_key_heads, heads_per_key,
    heads_together, n_queries, n_keys, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load the keys and values, what each walk's steps need, and what turns the gradient of the keys back."""
    batch, key_head, q_offset, k_offset, _row, n_start, lengths, _places = locate(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_together, n_queries, n_keys, q.block_shape[2]
    )  # fmt: skip
    n_heads = n_key_heads * heads_per_key
    if has_keys(n_start, lengths):
        KINDS: gl.constexpr = 2 if far_keys is None else 3
        mbarrier.expect(keys_full, KINDS * k.block_type.nbytes)
        load_tile(k, [batch, key_head, k_offset + n_start, 0], keys_full, keys)
        load_tile(v, [batch, key_head, k_offset + n_start, 0], keys_full, values)
        if far_keys is not None:
            load_tile(far_keys, [batch, key_head, k_offset + n_start, 0], keys_full, far)
    place = (batch, key_head, q_offset)
    use = 0
    if far_window is not None:
        use = _load_walk(
            use, past, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, place, n_start, lengths,
            far_window, n_heads, heads_per_key, n_queries, CAUSAL, WINDOWED, FAR_PAST,
        )  # fmt: skip
        if future is not None:
            use = _load_walk(
                use, future, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, place, n_start, lengths,
                far_window, n_heads, heads_per_key, n_queries, CAUSAL, WINDOWED, FAR_FUTURE,
            )  # fmt: skip
    use = _load_walk(
        use, q, grad_out, lse_ptr, delta_ptr, q_ring, out_ring, rows, rows_full, place, n_start, lengths, far_window,
        n_heads, heads_per_key, n_queries, CAUSAL, WINDOWED, EVERY_PAIR if far_window is None else NEAR,
    )  # fmt: skip
    if cos is not None:
        _load_angles(use, cos, sin, q_ring, out_ring, batch, k_offset + n_start)


@gluon.jit
def _add_walk(
    sums, parts, first_line, rows_of_head, n_start, lengths, far_window, heads_per_key, QUERIES: gl.constexpr,
    LINES_PER_ROW: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Add what each consumer has for the queries of a walk's steps."""
    _of_pairs, start, stop, _steps_of_head, steps = cut_walk(
        n_start, lengths, far_window, heads_per_key, QUERIES, CAUSAL, WINDOWED, PAIRS
    )  # fmt: skip
    m_start = start
    member = 0
    for _step in range(steps):
        line = first_line + (member * rows_of_head + m_start) * LINES_PER_ROW
        for consumer in gl.static_range(2):
            await_stores(1 - consumer)
            come_to(PART_FREE + consumer, WITH_ADDER)
        for consumer in gl.static_range(2):
            await_others(PART_FULL + consumer, WITH_ADDER)
            tma_add(sums, [line + consumer * sums.block_shape[0], 0], parts.index(consumer))
        m_start, member = next_step(m_start, member, start, stop, QUERIES)


@gluon.jit
def add(
    sums, parts, rows_of_head, sequences, bounds, window, far_window, n_tiles, n_rows, n_key_heads, heads_per_key,
    heads_together, n_queries, n_keys, QUERIES: gl.constexpr, BLOCK_D: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, FUTURE_TOO: gl.constexpr,
):  # fmt: skip
    """Add what each consumer has for a step's queries to the workspace: to one for each kind of pairs."""
    batch, key_head, _q_offset, _k_offset, row, n_start, lengths, _places = locate(
        sequences, bounds, window, n_tiles, n_rows, n_key_heads, heads_together, n_queries, n_keys, QUERIES
    )  # fmt: skip
    LINES_PER_ROW: gl.constexpr = BLOCK_D // sums.block_shape[1]
    head = (batch * n_key_heads + key_head) * heads_per_key
    line = (head * rows_of_head + row) * LINES_PER_ROW
    if far_window is not None:
        lines = n_rows * heads_per_key * rows_of_head * LINES_PER_ROW  # of each workspace
        _add_walk(
            sums, parts, line + lines, rows_of_head, n_start, lengths, far_window, heads_per_key, QUERIES,
            LINES_PER_ROW, CAUSAL, WINDOWED, FAR_PAST,
        )  # fmt: skip
        if FUTURE_TOO:
            _add_walk(
                sums, parts, line + 2 * lines, rows_of_head, n_start, lengths, far_window, heads_per_key, QUERIES,
                LINES_PER_ROW, CAUSAL, WINDOWED, FAR_FUTURE,
            )  # fmt: skip
    _add_walk(
        sums, parts, line, rows_of_head, n_start, lengths, far_window, heads_per_key, QUERIES, LINES_PER_ROW, CAUSAL,
        WINDOWED, EVERY_PAIR if far_window is None else NEAR,
    )  # fmt: skip
    await_stores(0)
