"""What the kernels for few queries and many keys are made of: which keys a split walks, rotated rows, positions.

Shape letters: T tokens, D head dim, R rotary dim.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_tiles import wide


@triton.jit
def row_offsets(strides, batch, head, token, UNIT: tl.constexpr):
    """How far rows lie from the first: strides of batch, head and token are in UNITs of elements."""
    return (
        wide(batch) * wide(strides[0]) + wide(head) * wide(strides[1]) + wide(token) * wide(strides[2])
    ) * UNIT  # fmt: skip


@triton.jit
def load_rotated(
    ptr, offsets, rotation, batch, token, row_exists, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load rows of q or k, [rows, BLOCK_D], and rotate them, rounded once; zeros where there is none."""
    feature = tl.arange(0, BLOCK_D)[None, :]
    exists = row_exists[:, None] & (feature < D)
    rows = tl.load(ptr + (offsets[:, None] + feature), exists, other=0.0)
    if rotation is not None:
        cos_ptr, sin_ptr, table_stride_batch, table_stride_token = rotation
        turning = feature - ROTARY_OFFSET
        turns = exists & (turning >= 0) & (turning < R)
        if INTERLEAVED:
            pair = turning // 2
            is_second = turning % 2 == 1
            partner = tl.where(is_second, feature - 1, feature + 1)
        else:
            # As remainders, of which the compiler knows that neighbours stay neighbours: loads of 16 bytes.
            is_second = turning >= R // 2
            pair = turning % (R // 2)
            partner = (turning + R // 2) % R + ROTARY_OFFSET
        table_offsets = (wide(batch) * table_stride_batch + wide(token) * table_stride_token)[:, None] + pair
        cos = tl.load(cos_ptr + table_offsets, turns, other=1.0)
        sin = tl.load(sin_ptr + table_offsets, turns, other=0.0)
        others = tl.load(ptr + (offsets[:, None] + partner), turns, other=0.0).to(tl.float32)
        turned = rows.to(tl.float32) * cos + others * tl.where(is_second, sin, -sin)
        rows = tl.where(turns, turned.to(rows.dtype), rows)
    return rows


@triton.jit
def origin_of(positions, batch):
    """The position that others are counted from, so that float32 holds them: the first key's, or 0."""
    origin = 0
    if positions is not None:
        ptr, stride_batch, _ = positions
        origin = wide(tl.load(ptr + wide(batch) * stride_batch))
    return origin


@triton.jit
def positions_from(positions, batch, index, exists, default, origin):
    """Positions of tokens from the origin, in float32; `default` are those that nobody gave."""
    if positions is not None:
        ptr, stride_batch, stride_token = positions
        default = wide(tl.load(ptr + wide(batch) * stride_batch + wide(index) * stride_token, exists, other=0))
    return (default - origin).to(tl.float32)


@triton.jit
def split_of_keys(first, last, key_start, n_keys, window, split, n_splits, smallest_split, BLOCK_N: tl.constexpr,
                   CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):  # fmt: skip
    """Cut what queries standing at keys `first` to `last` attend into splits: where the keys begin and end, and of one
    split where it begins, where every query attends every key, where that ends, and where it ends.

    Splits begin at a multiple of BLOCK_N, and so does the range in which every query attends every key.
    """
    start = key_start
    stop = n_keys
    full = key_start
    full_stop = n_keys
    if CAUSAL:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if WINDOWED:
        start = tl.maximum(start, first - window + 1)
        full = tl.maximum(full, last - window + 1)
        if not CAUSAL:
            stop = tl.minimum(stop, last + window)
            full_stop = tl.minimum(full_stop, first + window)
    aligned_start = start // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(tl.maximum(stop - aligned_start, 0), n_splits), BLOCK_N) * BLOCK_N
    length = tl.maximum(length, smallest_split)
    split_start = aligned_start + split * length
    split_stop = tl.minimum(split_start + length, stop)
    past = split_start + tl.cdiv(tl.maximum(split_stop - split_start, 0), BLOCK_N) * BLOCK_N
    full = tl.minimum(tl.maximum(tl.cdiv(full, BLOCK_N) * BLOCK_N, split_start), past)
    full_stop = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N * BLOCK_N, full), past)
    return start, stop, split_start, full, full_stop, split_stop
