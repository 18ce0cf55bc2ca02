"""What the attention kernels share: tiles of rows, their rotation, and which keys a tile of queries may attend.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
A query's index counts from the bottom right: query m stands at key m + tokens_apart, which is m + Tk − Tq.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What differs from call to call, and must not make another binary.
LENGTHS = ("n_queries", "n_keys", "window")


@triton.jit
def wide(index):
    """An index as int64: the product with a stride may need it."""
    return index.to(tl.int64)


@triton.jit
def load_rows(
    ptr, rows, row_stride, n_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr
):  # fmt: skip
    """Load whole rows, [BLOCK, BLOCK_D]; zeros past D, and for rows from n_rows on if MASK_ROWS."""
    feature = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + wide(rows)[:, None] * row_stride + feature
    if MASK_ROWS:
        mask = (rows < n_rows)[:, None]
        if BLOCK_D > D:
            mask = mask & (feature < D)
        tile = tl.load(ptrs, mask, other=0.0)
    elif BLOCK_D > D:
        tile = tl.load(ptrs, feature < D, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(ptr, tile, rows, row_stride, n_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what lies inside of a tile [BLOCK, BLOCK_D]."""
    feature = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + wide(rows)[:, None] * row_stride + feature
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), (rows < n_rows)[:, None] & (feature < D))


@triton.jit
def load_rotated_rows(
    ptr, rows, row_stride, n_rows, cos_ptr, sin_ptr, table_stride, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load rows and rotate them, in float32: each feature and its partner are read, the second time from the cache."""
    HALF: tl.constexpr = R // 2
    feature = tl.arange(0, BLOCK_D)[None, :]
    turns = feature < R
    if INTERLEAVED:
        is_first = feature % 2 == 0
        pair = feature // 2
        partner = tl.where(is_first, feature + 1, feature - 1)
    else:
        is_first = feature < HALF
        pair = tl.where(is_first, feature, feature - HALF)
        partner = tl.where(is_first, feature + HALF, feature - HALF)
    partner = tl.where(turns, partner, feature)
    inside = (rows < n_rows)[:, None]
    row_ptrs = ptr + wide(rows)[:, None] * row_stride
    table_offsets = wide(rows)[:, None] * table_stride + pair
    x = tl.load(row_ptrs + feature, inside & (feature < D), other=0.0).to(tl.float32)
    y = tl.load(row_ptrs + partner, inside & turns, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + table_offsets, inside & turns, other=1.0)
    sin = tl.load(sin_ptr + table_offsets, inside & turns, other=0.0)
    return x * cos + y * tl.where(is_first, -sin, sin)


@triton.jit
def rotate_back(
    tile, rows, n_rows, cos_ptr, sin_ptr, table_stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The transpose of the rotation, of a tile in registers, [BLOCK, BLOCK_D].

    Half-split pairs must be those of the whole tile: R = BLOCK_D.
    """
    PAIRS: tl.constexpr = BLOCK_D // 2
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (rows < n_rows)[:, None] & (pair < R // 2)
    table_offsets = wide(rows)[:, None] * table_stride + pair
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
    m_start, n_keys, tokens_apart, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the keys that a tile of queries may attend: [start, full), [full, full_stop), [full_stop, stop).

    All begin at a multiple of BLOCK_N. In the middle range every query attends every key, and every key exists; of the
    others every element must be asked for.
    """
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
    n_start, n_queries, tokens_apart, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cut the queries that may attend a tile of keys, as `key_ranges` does; all begin at a multiple of BLOCK_M.

    The middle range may run past the last query. Without a window nothing follows it; with a mask all is in the first.
    """
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
        full = stop
    return start, full, full_stop, stop


@triton.jit
def may_attend(
    m, n, n_queries, n_keys, tokens_apart, window, mask_ptr, mask_stride_query, mask_stride_key, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Which of a tile's queries m attend which of its keys n, of shapes that broadcast against each other."""
    ahead = n - (m + tokens_apart)
    may = (n < n_keys) & (m < n_queries)
    if CAUSAL:
        may = may & (ahead <= 0)
    if WINDOWED:
        may = may & (ahead > -window)
        if not CAUSAL:
            may = may & (ahead < window)
    if HAS_MASK:
        mask_ptrs = mask_ptr + wide(m) * mask_stride_query + wide(n) * mask_stride_key
        may = may & (tl.load(mask_ptrs, may, other=0) != 0)
    return may


@triton.jit
def load_positions(ptr, index, stride, n_tokens, default, EXPLICIT: tl.constexpr):
    """The positions of tokens, or their default."""
    if EXPLICIT:
        default = tl.load(ptr + wide(index) * stride, index < n_tokens, other=0)
    return default
