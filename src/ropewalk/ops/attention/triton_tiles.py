"""What the attention kernels share: tiles of rows and their features, their rotation, and their positions.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What differs from call to call, and must not make another binary.
UNSPECIALISED = (
    "mask",
    "mask_stride_query",
    "sequences",
    "positions_q",
    "positions_k",
    "parameters",
    "drop",
    "n_queries",
    "n_keys",
    "window",
    "far_window",
)


@triton.jit
def wide(index):
    """An index as int64: the product with a stride may need it."""
    return tl.cast(index, tl.int64)


@triton.jit
def load_tile(descriptor, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load whole rows of one head, [BLOCK, BLOCK_D]; zeros past the last row and past D."""
    return descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D)


@triton.jit
def load_parts(descriptor, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """`load_tile`, in one part or in three beside each other: 192 features are no power of two, but thrice one."""
    if PARTS == 1:
        result = (descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D),)
    else:
        result = (
            descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D),
            descriptor.load([batch, head, start, BLOCK_D]).reshape(BLOCK, BLOCK_D),
            descriptor.load([batch, head, start, 2 * BLOCK_D]).reshape(BLOCK, BLOCK_D),
        )
    return result


@triton.jit
def zero_parts(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """Zeros in float32, in parts."""
    zeros = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if PARTS == 1:  # noqa: SIM108
        result = (zeros,)
    else:
        result = (zeros, zeros, zeros)
    return result


@triton.jit
def keep_rows(parts, rows, PARTS: tl.constexpr):
    """The parts with zeros in the rows that a mask [BLOCK] leaves out: zero times NaN is NaN."""
    if PARTS == 1:
        result = (tl.where(rows[:, None], parts[0], 0.0),)
    else:
        result = (
            tl.where(rows[:, None], parts[0], 0.0),
            tl.where(rows[:, None], parts[1], 0.0),
            tl.where(rows[:, None], parts[2], 0.0),
        )
    return result


@triton.jit
def multiply_parts(a, b, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """a · bᵀ, over all features."""
    product = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    if PARTS == 3:
        product = tl.dot(a[1], b[1].T, product, input_precision=PRECISION)
        product = tl.dot(a[2], b[2].T, product, input_precision=PRECISION)
    return product


@triton.jit
def add_products(weights, parts, sums, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """sums + weights · parts."""
    weights = weights.to(parts[0].dtype)
    if PARTS == 1:
        result = (tl.dot(weights, parts[0], sums[0], input_precision=PRECISION),)
    else:
        result = (
            tl.dot(weights, parts[0], sums[0], input_precision=PRECISION),
            tl.dot(weights, parts[1], sums[1], input_precision=PRECISION),
            tl.dot(weights, parts[2], sums[2], input_precision=PRECISION),
        )
    return result


@triton.jit
def store_tile(
    place, tile, batch, head, offset, start, n_rows, PART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Store the rows of a tile [BLOCK, BLOCK_D] that lie below n_rows, counted from an offset.

    A place is a descriptor, whose last row is n_rows, and the offset is 0; or, PACKED, where the next sequence follows,
    a pointer, the strides of head and token, and D.
    """
    if PACKED:
        ptr, stride_head, stride_token, head_dim = place
        row = start + tl.arange(0, BLOCK)
        feature = PART * BLOCK_D + tl.arange(0, BLOCK_D)
        offsets = wide(head) * stride_head + wide(offset + row)[:, None] * stride_token + feature[None, :]
        mask = (row < n_rows)[:, None] & (feature < head_dim)[None, :]
        tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask)
    else:
        place.store([batch, head, start, PART * BLOCK_D], tile.to(place.dtype).reshape(1, 1, BLOCK, BLOCK_D))


@triton.jit
def load_table(table, batch, rows, n_rows, PAIRS: tl.constexpr, R: tl.constexpr):
    """cos and sin of rows, [BLOCK, PAIRS]; 1 and 0 past the last row, and for pairs that are not turned."""
    cos_ptr, sin_ptr, table_stride_batch, table_stride_token = table
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (rows < n_rows)[:, None] & (pair < R // 2)
    table_offsets = wide(batch) * table_stride_batch + wide(rows)[:, None] * table_stride_token + pair
    cos = tl.load(cos_ptr + table_offsets, mask, other=1.0)
    sin = tl.load(sin_ptr + table_offsets, mask, other=0.0)
    return cos, sin


@triton.jit
def turn_by(tile, cos, sin, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate pairs of features back, [BLOCK, BLOCK_D] of float32."""
    PAIRS: tl.constexpr = BLOCK_D // 2
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(tile, (BLOCK, PAIRS, 2)))
        tile = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (BLOCK, BLOCK_D))
    else:
        a, b = tl.split(tl.permute(tl.reshape(tile, (BLOCK, 2, PAIRS)), (0, 2, 1)))
        turned = tl.permute(tl.join(a * cos + b * sin, b * cos - a * sin), (0, 2, 1))
        tile = tl.reshape(turned, (BLOCK, BLOCK_D))
    return tile


@triton.jit
def turn_back(
    tile, table, batch, rows, n_rows, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate a gradient back, [BLOCK, BLOCK_D] of float32: the transpose of the features' map.

    Half-split pairs must be those of the whole tile: R = BLOCK_D.
    """
    cos, sin = load_table(table, batch, rows, n_rows, BLOCK_D // 2, R)
    return turn_by(tile, cos, sin, BLOCK, BLOCK_D, INTERLEAVED)


@triton.jit
def change_table(
    tile, of_tile, table, batch, rows, n_rows, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """What `turn_back` by `table` makes the same of as of `tile` by its own table, or as `tile` if it has none."""
    cos, sin = load_table(table, batch, rows, n_rows, BLOCK_D // 2, R)
    square = cos * cos + sin * sin
    inverse = tl.where(square > 0, 1 / square, 0.0)
    cos *= inverse
    sin *= inverse
    if of_tile is None:
        by_cos = cos
        by_sin = -sin
    else:
        cos_of_tile, sin_of_tile = load_table(of_tile, batch, rows, n_rows, BLOCK_D // 2, R)
        by_cos = cos_of_tile * cos + sin_of_tile * sin
        by_sin = sin_of_tile * cos - cos_of_tile * sin
    return turn_by(tile, by_cos, by_sin, BLOCK, BLOCK_D, INTERLEAVED)


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
def first_position(positions, batch, offset):
    """The position that others are counted from, so that float32 holds them: the first key's, or 0."""
    origin = 0
    if positions is not None:
        ptr, stride_batch, stride_token, n_tokens = positions
        origin = wide(
            tl.load(ptr + wide(batch) * stride_batch + wide(offset) * stride_token, offset < n_tokens, other=0)
        )
    return origin


@triton.jit
def load_positions(positions, batch, offset, start, default, origin, BLOCK: tl.constexpr):
    """The positions of a tile's tokens, from the origin, in float32; `default` is that of token `start`."""
    token = tl.arange(0, BLOCK)
    if positions is not None:
        ptr, stride_batch, stride_token, n_tokens = positions
        index = offset + start + token
        loaded = tl.load(ptr + wide(batch) * stride_batch + wide(index) * stride_token, index < n_tokens, other=0)
        position = (wide(loaded) - origin).to(tl.float32)
    else:
        # One conversion for each tile: they are as slow as exponentials.
        position = (default - origin).to(tl.float32) + token.to(tl.float32)
    return position


@triton.jit
def load_whole_positions(positions, batch, offset, start, BLOCK: tl.constexpr):
    """The positions of a tile's tokens, int64; 0 where there is none."""
    ptr, stride_batch, stride_token, n_tokens = positions
    index = offset + start + tl.arange(0, BLOCK)
    return wide(tl.load(ptr + wide(batch) * stride_batch + wide(index) * stride_token, index < n_tokens, other=0))


@triton.jit
def positions_to_meet(
    held, streamed, batch, offset, start, default, origin, BLOCK: tl.constexpr, CLOSE: tl.constexpr
):  # fmt: skip
    """The positions of the tile that a program holds, and of one that it streams, from an origin that they share.

    If they are CLOSE, all positions are indices, and the origin is the streamed tile's first token: its positions then
    are the same in every step, and what a score function makes of them is computed once.
    """
    if CLOSE:
        theirs = tl.arange(0, BLOCK).to(tl.float32)
        ours = held - default.to(tl.float32)
    else:
        theirs = load_positions(streamed, batch, offset, start, default, origin, BLOCK)
        ours = held
    return ours, theirs
