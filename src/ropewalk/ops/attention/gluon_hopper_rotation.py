"""The rotation of queries in the forward kernel for Hopper: two warps turn a tile while tensor cores work on another.

The rotator brings each consumer's queries into shared memory by TMA, turns them where they lie, and hands them over. It
is a tile ahead of the consumers, who wait for it in a program's first tile, and where walks over keys are shorter than
a rotation.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim.
"""

from ropewalk.ops.attention.gluon_hopper_pipeline import locate_queries
from ropewalk.ops.attention.gluon_hopper_tiles import ROWS
from ropewalk.ops.attention.gluon_shim import fence_async_shared, gl, gluon

ROTATING_WARPS = gl.constexpr(2)
_SLICE = gl.constexpr(8)  # rows that are turned at a time: shared memory's swizzle repeats after so many


@gluon.jit
def rotate(
    q, rotated, table, numbers, raw_ring, q_ring, sequences, bounds, window, n_tiles, n_rows, n_heads, heads_together,
    n_queries, n_keys, total, CONSUMERS: gl.constexpr, R: gl.constexpr, INTERLEAVED: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load the queries of each number, turn them, and hand them over: all that exist, whether they attend or not."""
    tiles_done = 0
    use = 0
    number = numbers.receive(tiles_done)
    while number < total:
        batch, head, q_offset, _k_offset, tile_start, lengths = locate_queries(
            number, sequences, bounds, window, n_tiles, n_rows, n_heads, heads_together, n_queries, n_keys,
            CONSUMERS * ROWS, CAUSAL,
        )  # fmt: skip
        if tile_start < lengths[0]:
            for consumer in gl.static_range(CONSUMERS):
                raw_ring.fill(use + consumer, q, [batch, head, q_offset + tile_start + consumer * ROWS, 0])
            for consumer in range(CONSUMERS):
                _turn_tile(
                    rotated, table, raw_ring, use, batch, head, q_offset, tile_start + consumer * ROWS, lengths[0], R,
                    INTERLEAVED,
                )  # fmt: skip
                fence_async_shared()
                q_ring.hand_over(use)
                use += 1
        tiles_done += 1
        number = numbers.receive(tiles_done)


@gluon.jit
def _turn_tile(
    rotated, table, raw_ring, use, batch, head, q_offset, m_start, n_queries, R: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Rotate a tile, [ROWS, D], as soon as it has come, and store it in memory too where `rotated` is a place.

    Each thread has both features of a pair, so that nothing moves between threads, and reads and writes as many bytes
    at a time as there are instructions for. At D 128 it has cos and sin of the next rows on their way while it turns
    these; at D 64 three consumers leave no registers for that.
    """
    tile = raw_ring.tile(use)
    D: gl.constexpr = tile.shape[1]
    PAIRS: gl.constexpr = D // 2
    AHEAD: gl.constexpr = D > 64
    VECTOR: gl.constexpr = 8 if INTERLEAVED else PAIRS // 8  # features: neighbours, or of one half and of the other
    THREADS: gl.constexpr = (D if INTERLEAVED else PAIRS) // VECTOR  # of a row
    of_tile: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // THREADS, THREADS], [ROTATING_WARPS, 1], [1, 0])
    of_pairs: gl.constexpr = gl.BlockedLayout(
        [1, PAIRS // THREADS], [32 // THREADS, THREADS], [ROTATING_WARPS, 1], [1, 0]
    )
    cos_ptr, sin_ptr, stride_batch, stride_token = table
    # Rows past the last one are turned as it is: nobody reads them.
    first = gl.minimum(m_start, n_queries - 1)
    last = n_queries - 1 - first
    first_row = batch.to(gl.int64) * stride_batch + (q_offset + first).to(gl.int64) * stride_token
    place = (cos_ptr + first_row, sin_ptr + first_row, stride_token)
    cos, sin = _load_angles(place, 0, last, PAIRS, R, of_pairs)
    raw_ring.await_tile(use)
    for start in gl.static_range(0, ROWS, _SLICE):
        rows = tile.slice(start, _SLICE, 0)
        if not AHEAD and start > 0:
            cos, sin = _load_angles(place, start, last, PAIRS, R, of_pairs)
        next_cos, next_sin = cos, sin
        if AHEAD and start + _SLICE < ROWS:
            next_cos, next_sin = _load_angles(place, start + _SLICE, last, PAIRS, R, of_pairs)
        turned = _turn(rows.load(of_tile), cos, sin, of_pairs, INTERLEAVED)
        turned = gl.convert_layout(turned, of_tile, assert_trivial=True)
        rows.store(turned)
        if rotated is not None:
            _store_rows(rotated, turned, batch, head, q_offset, m_start + start, n_queries, of_tile)
        cos, sin = next_cos, next_sin


@gluon.jit
def _load_angles(place, start, last, PAIRS: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """cos and sin of some rows of a tile, [_SLICE, PAIRS], up to its last row; pairs past R turn by nothing."""
    cos_ptr, sin_ptr, stride_token = place
    row = start + gl.minimum(gl.arange(0, _SLICE, layout=gl.SliceLayout(1, layout)), last - start)
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))
    offsets = (row * stride_token)[:, None] + pair[None, :]
    if R // 2 < PAIRS:
        exists = (pair < R // 2)[None, :]
        cos = gl.load(cos_ptr + offsets, exists, other=1.0)
        sin = gl.load(sin_ptr + offsets, exists, other=0.0)
    else:
        cos = gl.load(cos_ptr + offsets)
        sin = gl.load(sin_ptr + offsets)
    return cos, sin


@gluon.jit
def _turn(x, cos, sin, of_pairs: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Rotate rows, in float32 and rounded once, as `apply_rope` does."""
    PAIRS: gl.constexpr = cos.shape[1]
    if INTERLEAVED:
        a, b = gl.split(gl.reshape(x, [_SLICE, PAIRS, 2]))
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [_SLICE, 2, PAIRS]), (0, 2, 1)))
    a = gl.convert_layout(a.to(gl.float32), of_pairs, assert_trivial=True)
    b = gl.convert_layout(b.to(gl.float32), of_pairs, assert_trivial=True)
    turned = gl.join((a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype))
    if not INTERLEAVED:
        turned = gl.permute(turned, (0, 2, 1))
    return gl.reshape(turned, x.shape)


@gluon.jit
def _store_rows(place, x, batch, head, q_offset, start, n_queries, layout: gl.constexpr):
    """Store rows that exist, from registers: so the tile's memory need not wait until they have been read."""
    ptr, stride_batch, stride_head, stride_token, head_dim = place
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    feature = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    first = batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head
    first += (q_offset + start).to(gl.int64) * stride_token
    # The head dim is a multiple of 8, and the compiler must know it to store eight features at once.
    mask = (row < n_queries - start)[:, None] & (feature < head_dim // 8 * 8)[None, :]
    gl.store(ptr + first + (row * stride_token)[:, None] + feature[None, :], x, mask)
