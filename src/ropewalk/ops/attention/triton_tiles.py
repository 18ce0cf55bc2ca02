"""What the attention kernels share: tiles of rows, their rotation, and which keys a tile of queries may attend.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
A query's index counts from the bottom right: query m stands at key m + tokens_apart, which is m + Tk − Tq.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What differs from call to call, and must not make another binary.
UNSPECIALISED = (
    "mask",
    "mask_stride_query",
    "positions_q",
    "positions_k",
    "parameters",
    "n_queries",
    "n_keys",
    "window",
)


@triton.jit
def wide(index):
    """An index as int64: the product with a stride may need it."""
    return index.to(tl.int64)


@triton.jit
def tile_and_row(n_tokens, BLOCK: tl.constexpr):
    """Which tile of tokens a program has, and in which row of all batches' heads. Tiles of a row are neighbours."""
    n_tiles = tl.cdiv(n_tokens, BLOCK)
    return tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles


@triton.jit
def load_tile(descriptor, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load whole rows of one head, [BLOCK, BLOCK_D]; zeros past the last row and past D."""
    return descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D)


@triton.jit
def store_tile(descriptor, tile, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what lies inside of a tile [BLOCK, BLOCK_D]."""
    descriptor.store([batch, head, start, 0], tile.to(descriptor.dtype).reshape(1, 1, BLOCK, BLOCK_D))


@triton.jit
def turn_back(
    tile, table, batch, rows, n_rows, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate a gradient back, [BLOCK, BLOCK_D] of float32: the transpose of the features' map.

    Half-split pairs must be those of the whole tile: R = BLOCK_D.
    """
    cos_ptr, sin_ptr, table_stride_batch, table_stride_token = table
    PAIRS: tl.constexpr = BLOCK_D // 2
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (rows < n_rows)[:, None] & (pair < R // 2)
    table_offsets = wide(batch) * table_stride_batch + wide(rows)[:, None] * table_stride_token + pair
    cos = tl.load(cos_ptr + table_offsets, mask, other=1.0)
    sin = tl.load(sin_ptr + table_offsets, mask, other=0.0)
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(tile, (BLOCK, PAIRS, 2)))
        tile = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (BLOCK, BLOCK_D))
    else:
        a, b = tl.split(tl.permute(tl.reshape(tile, (BLOCK, 2, PAIRS)), (0, 2, 1)))
        turned = tl.permute(tl.join(a * cos + b * sin, b * cos - a * sin), (0, 2, 1))
        tile = tl.reshape(turned, (BLOCK, BLOCK_D))
    return tile


@triton.jit
def key_ranges(
    m_start, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the keys that a tile of queries may attend: [start, full), [full, full_stop), [full_stop, stop).

    All begin at a multiple of BLOCK_N. In the middle range every query attends every key, and every key exists; of the
    edges, the other two, every element must be asked for.
    """
    _, n_keys, tokens_apart, window = lengths
    first = m_start + tokens_apart
    last = first + BLOCK_M - 1
    start = 0
    full = 0
    stop = n_keys
    full_stop = n_keys
    if CAUSAL:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if WINDOWED:
        start = tl.maximum(first - window + 1, 0)
        full = tl.maximum(last - window + 1, 0)
        if not CAUSAL:
            stop = tl.minimum(stop, last + window)
            full_stop = tl.minimum(full_stop, first + window)
    start = start // BLOCK_N * BLOCK_N
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_N - 1) // BLOCK_N * BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N * BLOCK_N, full)
    if HAS_MASK:
        full = start
        full_stop = start
    return start, full, full_stop, stop


@triton.jit
def query_ranges(
    n_start, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the queries that may attend a tile of keys, as `key_ranges` does; all begin at a multiple of BLOCK_M.

    The middle range may run past the last query.
    """
    n_queries, n_keys, tokens_apart, window = lengths
    first = n_start - tokens_apart
    last = first + BLOCK_N - 1
    start = 0
    full = 0
    stop = n_queries
    full_stop = n_queries
    if CAUSAL:
        start = tl.maximum(first, 0)
        full = tl.maximum(last, 0)
    if WINDOWED:
        stop = tl.minimum(stop, last + window)
        full_stop = tl.minimum(full_stop, first + window)
        if not CAUSAL:
            start = tl.maximum(first - window + 1, 0)
            full = tl.maximum(last - window + 1, 0)
    start = start // BLOCK_M * BLOCK_M
    stop = tl.maximum(stop, start)
    full = tl.minimum((full + BLOCK_M - 1) // BLOCK_M * BLOCK_M, (stop + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    if WINDOWED:
        full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK_M * BLOCK_M, full)
    if HAS_MASK:
        full = start
        full_stop = start
    if n_start >= n_keys:  # nobody attends these
        full = start
        full_stop = start
        stop = start
    return start, full, full_stop, stop


@triton.jit
def steps_of(ranges, MASKED: tl.constexpr):
    """How far a walk goes along the middle of `key_ranges` or `query_ranges`, or along both edges if MASKED."""
    start, full, full_stop, stop = ranges
    steps = full_stop - full
    if MASKED:
        steps = (full - start) + tl.maximum(stop - full_stop, 0)
    return steps


@triton.jit
def after_steps(step, ranges, MASKED: tl.constexpr):
    """Where the walk stands after so many steps: along the edges it jumps over the middle."""
    start, full, full_stop, _ = ranges
    index = full + step
    if MASKED:
        index = start + step
        index = tl.where(index >= full, index + (full_stop - full), index)
    return index


@triton.jit
def may_attend(
    m, n, lengths, mask, mask_stride_query, HAS_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Which of a tile's queries m attend which of its keys n, of shapes that broadcast against each other.

    What it says of queries past the last one is of no account: nothing of theirs is kept.
    """
    n_queries, n_keys, tokens_apart, window = lengths
    ahead = n - (m + tokens_apart)
    if CAUSAL:
        may = ahead <= 0  # and so it exists, unless lengths say otherwise
        if HAS_LENGTHS:
            may = may & (n < n_keys)
    else:
        may = n < n_keys
    if WINDOWED:
        may = may & (ahead > -window)
        if not CAUSAL:
            may = may & (ahead < window)
    if mask is not None:
        mask_ptr, mask_stride_key = mask
        mask_ptrs = mask_ptr + wide(n) * mask_stride_key
        if mask_stride_query is None:  # the same for all queries: one number for each key is loaded
            may = may & (tl.load(mask_ptrs, n < n_keys, other=0) != 0)
        else:
            mask_ptrs = mask_ptrs + wide(m) * mask_stride_query
            may = may & (tl.load(mask_ptrs, may & (m < n_queries), other=0) != 0)
    return may


@triton.jit
def start_of_head(mask, batch, head):
    """Where the mask of one head begins."""
    return mask[0] + wide(batch) * mask[1] + wide(head) * mask[2]


@triton.jit
def parameters_of_head(parameters, head):
    """Where the numbers that a score function reads begin."""
    parameters_ptr, stride_head = parameters
    return parameters_ptr + wide(head) * stride_head


@triton.jit
def first_position(positions, batch):
    """The position that others are counted from, so that float32 holds them: the first key's, or 0."""
    origin = 0
    if positions is not None:
        ptr, stride_batch, _ = positions
        origin = wide(tl.load(ptr + wide(batch) * stride_batch))
    return origin


@triton.jit
def load_positions(positions, batch, start, n_tokens, default, origin, BLOCK: tl.constexpr):
    """The positions of a tile's tokens, from the origin, in float32; `default` is that of token `start`."""
    offset = tl.arange(0, BLOCK)
    if positions is not None:
        ptr, stride_batch, stride_token = positions
        index = start + offset
        loaded = tl.load(ptr + wide(batch) * stride_batch + wide(index) * stride_token, index < n_tokens, other=0)
        position = (wide(loaded) - origin).to(tl.float32)
    else:
        # One conversion for each tile: they are as slow as exponentials.
        position = (default - origin).to(tl.float32) + offset.to(tl.float32)
    return position


@triton.jit
def positions_to_meet(
    held, streamed, batch, start, n_tokens, default, origin, BLOCK: tl.constexpr, CLOSE: tl.constexpr
):  # fmt: skip
    """The positions of the tile that a program holds, and of one that it streams, from an origin that they share.

    If they are CLOSE, all positions are indices, and the origin is the streamed tile's first token: its positions then
    are the same in every step, and what a score function makes of them is computed once.
    """
    if CLOSE:
        theirs = tl.arange(0, BLOCK).to(tl.float32)
        ours = held - default.to(tl.float32)
    else:
        theirs = load_positions(streamed, batch, start, n_tokens, default, origin, BLOCK)
        ours = held
    return ours, theirs
