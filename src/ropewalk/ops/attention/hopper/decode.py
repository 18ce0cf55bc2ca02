"""Decoding from pages on Hopper: few queries of a row, split over the GPU by the rows' lengths, which the GPU reads.

Each warp attends 16 keys of a tile by itself, with keys as rows of its products: S' = K Q', then O' = V' P'. So scores,
probabilities and sums stay in its registers, and warps meet only where a tile is loaded, and at the end. Products have
as few columns as there are queries: 8 or 16.

Numbers of 8 and 4 bits enter products as what their bits are in float16, subnormal numbers, wherever that saves
instructions: a product takes them as they are. Queries and sums carry the powers of two that this leaves out.

All rows' tiles of keys, one row's after another's, are cut into shares of equal length, one for each program of a key
head. A share holds whole rows, whose results are final, and at most two parts of rows, which `combine_shares_kernel`
combines.

Shape letters: B batch, T tokens (Tq of queries), H query heads, K key heads, D head dim; W warps, N columns of a
product.
"""

# No `from __future__ import annotations`: Gluon reads the annotations of constants.

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.barriers import await_kernel_before, let_next_kernel_begin
from ropewalk.ops.attention.hopper.gluon_compat import (
    associative_scan,
    commit_copies,
    copy_to_shared,
    gl,
    gluon,
    mma_v2,
    wait_copies,
)
from ropewalk.ops.attention.triton.softmax import begin_rows
from ropewalk.ops.attention.triton.tiles import partner_of

WARP_KEYS = gl.constexpr(16)  # keys of a block, which is what one warp attends with one product
RESCALE_THRESHOLD = gl.constexpr(8.0)  # a maximum stays until a score is so much larger, in base 2
ROWS_AT_ONCE = gl.constexpr(128)  # of a batch, whose lengths a program reads at a time
LARGEST_P_FACTOR = gl.constexpr(128.0)  # of probabilities over 4-bit pages: times 2^RESCALE_THRESHOLD, 2¹⁵


class PagedTensors(NamedTuple):
    """Pointers to what the kernel reads and writes."""

    q: Any  # (B, H, Tq, D)
    k: Any  # (pages, K, page_size, D), as 16-bit elements
    v: Any
    k_scale: Any  # of quantised pages, as `append_kv` has them; or None
    v_scale: Any
    out: Any  # (B, H, Tq, D)
    lse: Any  # (B, H, Tq), dense, base 2
    first_logits: Any  # (H,), float32, of each row's softmax; or None


class Partials(NamedTuple):
    """Results of parts of rows, for each share, key head, and side of the share: its first row, or a later one."""

    out: Any  # (shares, K, 2, N, D), float32
    lse: Any  # (shares, K, 2, N), base 2


class TokenStrides(NamedTuple):
    """Strides of batch rows or pages, of heads and of tokens."""

    batch: Any
    head: Any
    token: Any


class RowBounds(NamedTuple):
    """Extents of batch rows: pointers to B integers, or None."""

    key_lengths: Any
    key_starts: Any
    query_starts: Any


class PagedConfig(NamedTuple):
    """Constants of a binary. One `gl.constexpr` holds them all."""

    D: int
    N: int  # columns of products: rows of queries that share a key head, or more
    WARPS: int
    HEADS: int  # key heads of a program: neighbouring warps attend the same keys of two
    BLOCKS: int  # of WARP_KEYS keys that a warp attends in a step
    STAGES: int
    FORMAT: int  # of pages, a `cache.formats.Format`: 0 has no scales
    PAGE_SIZE: int
    HEADS_PER_KEY: int
    ROTARY_DIM: int  # of queries; 0: they are not rotated here
    ROTARY_OFFSET: int  # the first feature that is rotated
    INTERLEAVED: bool
    PAIR_BLOCK: int  # features of a block that is half-split by itself
    CAUSAL: bool
    WINDOWED: bool
    ONE_ROW: bool  # the batch has one row
    MIN_SHARE: int  # tiles


class Rotation(NamedTuple):
    """The table that queries are rotated by, and its row of each."""

    table: Any  # `RopeTable`, or None
    start: Any  # the table has a row for each position from this one on; None: one for each query
    n_rows: Any


class Extent(NamedTuple):
    """The keys that some query of a batch row attends: [first, stop), and the start of their first tile."""

    start: Any
    first: Any
    stop: Any
    n_tiles: Any  # one at least, so that each row has a result
    kv_start: Any
    key_start: Any  # as given, which may be below 0
    causal_offset: Any


class Share(NamedTuple):
    """The tiles of a share, counted over all rows, and the row that the first one is of."""

    start: Any
    stop: Any
    row: Any
    row_start: Any  # the first tile of that row
    length: Any  # of each share but the last one


@gluon.constexpr_function
def _width(d, kind):
    """Return how many 16-bit elements hold a key."""
    return d // (1, 2, 2, 4)[kind]


@gluon.constexpr_function
def _mma(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _tile_shared(d, kind):
    """Return the layout of a tile in shared memory, of which eight rows at one offset share no bank."""
    chunks = _width(d, kind) // 8  # of 16 bytes
    per_phase = max(1, 8 // chunks)
    return gl.SwizzledSharedLayout(8, per_phase, 8 // per_phase, order=[2, 1, 0])


@gluon.constexpr_function
def _tile_copies(d, kind, warps):
    """Return the layout of the threads that copy a tile, [W, 16, width]: 16 bytes each."""
    chunks = min(_width(d, kind) // 8, 32)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // chunks, chunks], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _groups(d):
    """Return how many scales a key of 4-bit pages has."""
    return d // 32


@gluon.constexpr_function
def _scale_copies(d, kind, warps):
    """Return the layout of the threads that copy scales: [W, 16, groups] of 4-bit pages, otherwise [W, 16]."""
    if kind == 3:
        return gl.BlockedLayout([1, 1, _groups(d)], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _warp_bases(warps):
    return [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def _group_bases(d):
    return [[0, 0, 1 << bit] for bit in range(_groups(d).bit_length() - 1)]


@gluon.constexpr_function
def _row_scales(d, warps):
    """Return the layout of keys' scales, [W, 16, groups], where keys are rows of an accumulator."""
    registers = [*_group_bases(d), [0, 8, 0]]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(warps), [], [warps, 16, _groups(d)])


@gluon.constexpr_function
def _column_scales(d, warps):
    """Return the layout of keys' scales, [W, 16, groups], where keys are rows of a product's second operand."""
    registers = [*_group_bases(d), [0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(warps), [], [warps, 16, _groups(d)])


# === extents and shares


@gluon.jit
def _extent_of(batch, exists, bounds, n_queries, n_keys, window, window_right, CONFIG: gl.constexpr):
    """Return the extents of batch rows: of one, or of a tensor of rows."""
    BLOCK_N: gl.constexpr = CONFIG.WARPS // CONFIG.HEADS * CONFIG.BLOCKS * WARP_KEYS
    causal_offset = n_keys - n_queries
    if bounds.query_starts is not None:
        causal_offset = gl.load(bounds.query_starts + batch, exists, other=0).to(gl.int32)
    stop = n_keys
    if bounds.key_lengths is not None:
        stop = gl.minimum(gl.load(bounds.key_lengths + batch, exists, other=0).to(gl.int32), n_keys)
    key_start = 0
    if bounds.key_starts is not None:
        key_start = gl.load(bounds.key_starts + batch, exists, other=0).to(gl.int32)
    kv_start = gl.maximum(key_start, 0)
    start = kv_start
    if CONFIG.CAUSAL:
        stop = gl.minimum(stop, causal_offset + n_queries)
    if CONFIG.WINDOWED:
        start = gl.maximum(causal_offset - window + 1, start)
        if not CONFIG.CAUSAL:
            stop = gl.minimum(stop, causal_offset + n_queries - 1 + window_right)
    first = start
    start = first // BLOCK_N * BLOCK_N
    n_tiles = gl.maximum((stop - start + BLOCK_N - 1) // BLOCK_N, 1)
    return Extent(start, first, stop, n_tiles, kv_start, key_start, causal_offset)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles_of_rows(first_row, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG: gl.constexpr):
    """Return the numbers of tiles of ROWS_AT_ONCE rows, 0 where there is no row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = first_row + gl.arange(0, ROWS_AT_ONCE, layout=layout)
    exists = row < n_rows
    extent = _extent_of(row, exists, bounds, n_queries, n_keys, window, window_right, CONFIG)
    return gl.where(exists, extent.n_tiles, 0)


@gluon.jit
def _length_of_shares(n_shares, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG: gl.constexpr):
    """Return the length of a share, and the number of all tiles."""
    if CONFIG.ONE_ROW:
        total = _extent_of(0, True, bounds, n_queries, n_keys, window, window_right, CONFIG).n_tiles
    else:
        total = 0
        for first_row in range(0, n_rows, ROWS_AT_ONCE):
            tiles = _tiles_of_rows(first_row, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG)
            total += gl.sum(tiles, 0)
    length = gl.maximum((total + n_shares - 1) // n_shares, CONFIG.MIN_SHARE)
    return length, total


@gluon.jit
def _share_of(share, n_shares, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG: gl.constexpr):
    """Return a share by its number."""
    length, total = _length_of_shares(n_shares, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG)
    start = share * length
    row = 0
    row_start = 0
    if not CONFIG.ONE_ROW:
        before = 0
        for first_row in range(0, n_rows, ROWS_AT_ONCE):
            tiles = _tiles_of_rows(first_row, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG)
            stops = before + associative_scan(tiles, 0, _add)
            is_before = (tiles > 0) & (stops <= start)
            row += gl.sum(is_before.to(gl.int32), 0)
            row_start = gl.maximum(row_start, gl.max(gl.where(is_before, stops, 0), 0))
            before += gl.sum(tiles, 0)
    return Share(start, gl.minimum(start + length, total), row, row_start, length)


# === numbers


@gluon.jit
def _split_groups(x, KEYS_LAST: gl.constexpr):
    """Split 4-bit numbers of one part, [W, 16, width] or, of values, [W, width, 16], into groups of eight elements."""
    GROUPS: gl.constexpr = x.shape[1 if KEYS_LAST else 2] // 8
    if KEYS_LAST:
        x = gl.permute(gl.reshape(x, [x.shape[0], GROUPS, 8, 16]), (0, 2, 3, 1))
    else:
        x = gl.permute(gl.reshape(x, [x.shape[0], 16, GROUPS, 8]), (0, 1, 3, 2))
    return _split_last(x)


@gluon.jit
def _split_last(x):
    """Split the last dimension of 2 or 4 into a tuple."""
    if x.shape[len(x.shape) - 1] == 2:
        parts = gl.split(x)
    else:
        shape: gl.constexpr = x.shape[: len(x.shape) - 1] + [2, 2]  # noqa: RUF005 (which Triton does not parse)
        even, odd = gl.split(gl.reshape(x, shape))
        part_0, part_2 = gl.split(even)
        part_1, part_3 = gl.split(odd)
        parts = (part_0, part_1, part_2, part_3)
    return parts


@gluon.jit
def _join_parts(a, b, c, d, KEYS_LAST: gl.constexpr, LAYOUT: gl.constexpr):
    """Join a group's four parts along the features, eight of each."""
    x = gl.join(gl.join(a, b), gl.join(c, d))  # [W, 16, 8, 2, 2], or [W, 8, 16, 2, 2]: part 2 j + i at [i, j]
    if KEYS_LAST:
        x = gl.reshape(gl.permute(x, (0, 4, 3, 1, 2)), [x.shape[0], 32, 16])
    else:
        x = gl.reshape(gl.permute(x, (0, 1, 4, 3, 2)), [x.shape[0], 16, 32])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


_FP8_KEYS = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_FP8_VALUES = gl.constexpr(
    "{ .reg .b32 x; .reg .b16 low, high; prmt.b32 x, $2, 0, 0x3120; mov.b32 {low, high}, x; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
# The number plus 128, times 2⁻²⁴: a subnormal number of float16, whose bits are those of an integer.
_INT8_KEYS = gl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $2, 0x80808080; prmt.b32 $0, x, 0, 0x4140; prmt.b32 $1, x, 0, 0x4342; }"
)
# The number times 2⁻²⁴: sums of subnormal numbers are exact.
_INT8_VALUES = gl.constexpr(
    "{ .reg .b32 x, y, z, zero; mov.b32 zero, 0x80808080; xor.b32 x, $2, zero; prmt.b32 y, x, 0, 0x4240; "
    "prmt.b32 z, x, 0, 0x4341; add.rn.f16x2 $0, y, zero; add.rn.f16x2 $1, z, zero; }"
)
# The number plus 8, times 2⁻²⁴ or, of the second and fourth part, 2⁻²⁰.
_INT4_KEYS = gl.constexpr(
    "{ .reg .b32 y; shr.u32 y, $4, 8; and.b32 $0, $4, 0x000F000F; and.b32 $1, $4, 0x00F000F0; "
    "and.b32 $2, y, 0x000F000F; and.b32 $3, y, 0x00F000F0; }"
)
_INT4_VALUES = gl.constexpr(
    "{ .reg .b32 y, a, b, c, d, low, high; mov.b32 low, 0x80088008; mov.b32 high, 0x80808080; shr.u32 y, $4, 8; "
    "and.b32 a, $4, 0x000F000F; and.b32 b, $4, 0x00F000F0; and.b32 c, y, 0x000F000F; and.b32 d, y, 0x00F000F0; "
    "add.rn.f16x2 $0, a, low; add.rn.f16x2 $1, b, high; add.rn.f16x2 $2, c, low; add.rn.f16x2 $3, d, high; }"
)


@gluon.jit
def _unpack(stored, KEYS_LAST: gl.constexpr, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return first operands of products: of keys [W, 16, features], of values [W, features, 16], a tuple of parts.

    Parts of 8-bit keys have features 4 i + j and 4 i + j + 2, for j of 0 and 1; of 8-bit values even and odd ones. Of
    4-bit numbers a part is a group of 32 features in the order 4 i + j, for each j all i.
    """
    if CONFIG.FORMAT == 0:
        parts = (stored,)
    elif CONFIG.FORMAT == 3:
        PTX: gl.constexpr = _INT4_VALUES if KEYS_LAST else _INT4_KEYS
        a, b, c, d = gl.inline_asm_elementwise(
            PTX,
            "=r,=r,=r,=r,r",
            [stored],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
        a = _split_groups(a, KEYS_LAST)
        b = _split_groups(b, KEYS_LAST)
        c = _split_groups(c, KEYS_LAST)
        d = _split_groups(d, KEYS_LAST)
        parts = ()
        for group in gl.static_range(_groups(CONFIG.D)):
            parts += (_join_parts(a[group], b[group], c[group], d[group], KEYS_LAST, LAYOUT),)
    else:
        PTX_8BIT: gl.constexpr = _ptx_of_8bit(CONFIG.FORMAT, KEYS_LAST)
        parts = gl.inline_asm_elementwise(
            PTX_8BIT, "=r,=r,r", [stored], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    return parts


@gluon.constexpr_function
def _ptx_of_8bit(kind, keys_last):
    code = ((_FP8_KEYS, _FP8_VALUES), (_INT8_KEYS, _INT8_VALUES))[kind - 1][keys_last]
    return code.value if isinstance(code, gl.constexpr) else code


@gluon.constexpr_function
def _n_parts(d, kind):
    return (1, 2, 2, d // 32)[kind]


@gluon.jit
def _feature_of(index, part, KEYS_LAST: gl.constexpr, CONFIG: gl.constexpr):
    """Return the feature of an index among a part's features, as `_unpack` orders them."""
    if CONFIG.FORMAT == 0:
        feature = index
    elif CONFIG.FORMAT == 3:
        feature = part * 32 + index % 8 * 4 + index // 8
    elif KEYS_LAST:
        feature = index * 2 + part
    else:
        feature = index // 2 * 4 + index % 2 + part * 2
    return feature


# === queries


class Queries(NamedTuple):
    """Queries as second operands of products, and what belongs to each column, [W, N]."""

    parts: Any  # tuple of [W, features, N]
    bias: Any  # tuple of [W, 16, N]: accumulators begin with it
    scale: Any  # turns products into exponents of 2
    low: Any  # [W, N]: keys from this one on
    high: Any  # to before this one


@gluon.jit
def _rotate(numbers, row_ptrs, feature, exists, batch, token, rotation, extent, CONFIG: gl.constexpr):
    """Rotate features of queries, rounded once."""
    table_row = token
    if rotation.start is not None:
        table_row = token + extent.causal_offset - extent.key_start - rotation.start
        table_row = gl.minimum(gl.maximum(table_row, 0), rotation.n_rows - 1)  # whatever the device holds
    rotary_feature = feature - CONFIG.ROTARY_OFFSET
    is_rotated = exists & (rotary_feature >= 0) & (rotary_feature < CONFIG.ROTARY_DIM)
    pair, partner, is_second = partner_of(feature, CONFIG)
    table = rotation.table
    offsets = batch.to(gl.int64) * table.stride_batch + table_row * table.stride_token + pair
    cos = gl.load(table.cos + offsets, is_rotated, other=1.0)
    sin = gl.load(table.sin + offsets, is_rotated, other=0.0)
    partners = gl.load(row_ptrs + partner, is_rotated, other=0.0).to(gl.float32)
    rotated = numbers.to(gl.float32) * cos + partners * gl.where(is_second, sin, -sin)
    return gl.where(is_rotated, rotated.to(numbers.dtype), numbers)


@gluon.jit
def _load_queries(
    tensors,
    strides,
    scale_stride,
    batch,
    kv_head,
    rotation,
    n_queries,
    exp2_scale,
    extent,
    window,
    window_right,
    CONFIG: gl.constexpr,
):
    """Load the queries of a batch row that share the program's key heads, of which `kv_head` is the first."""
    D: gl.constexpr = CONFIG.D
    W: gl.constexpr = CONFIG.WARPS
    N: gl.constexpr = CONFIG.N
    G: gl.constexpr = CONFIG.HEADS_PER_KEY
    mma: gl.constexpr = _mma(CONFIG.WARPS)
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_column: gl.constexpr = gl.SliceLayout(1, mma)
    N_PARTS: gl.constexpr = _n_parts(CONFIG.D, CONFIG.FORMAT)
    row = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, operand)))[None, None, :]
    exists = row < n_queries * G
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, operand)))[:, None, None]
    head = (kv_head + warp % CONFIG.HEADS) * G + row % G
    row_ptrs = tensors.q + batch.to(gl.int64) * strides.batch + head * strides.head + row // G * strides.token
    index = gl.arange(0, D // N_PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, operand)))[None, :, None]
    loaded = ()
    for part in gl.static_range(N_PARTS):
        feature = _feature_of(index, part, False, CONFIG)
        numbers = gl.load(row_ptrs + feature, exists, other=0.0)
        if CONFIG.ROTARY_DIM > 0:
            numbers = _rotate(numbers, row_ptrs, feature, exists, batch, row // G, rotation, extent, CONFIG)
        loaded += (numbers,)
    scale = gl.full([W, N], exp2_scale, gl.float32, by_column)
    bias = ()
    if CONFIG.FORMAT == 0:
        parts = loaded
        bias = (gl.zeros([W, WARP_KEYS, N], gl.float32, mma),)
    else:
        # A power of two of each row, so that float16 holds the row.
        largest = gl.zeros([W, N], gl.float32, gl.SliceLayout(1, operand))
        for part in gl.static_range(N_PARTS):
            largest = gl.maximum(largest, gl.max(gl.abs(loaded[part].to(gl.float32)), 1))
        power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        power = gl.where((power > 0) & (power < float("inf")), power, 1.0)
        FACTOR: gl.constexpr = 1.0 if CONFIG.FORMAT == 1 else 16384.0
        factor = FACTOR / power
        parts = ()
        for part in gl.static_range(N_PARTS):
            numbers = loaded[part].to(gl.float32) * factor[:, None, :]
            if CONFIG.FORMAT == 1:
                parts += (numbers.to(gl.float16),)
                bias += (gl.zeros([W, WARP_KEYS, N], gl.float32, mma),)
            else:
                if CONFIG.FORMAT == 3:  # numbers of every other part are 16 times as large
                    weight = gl.where(index // 8 % 2 == 1, 16.0, 1.0)
                    half = (numbers / weight).to(gl.float16)
                    total = gl.sum(half.to(gl.float32) * weight, 1) * (-8.0 / 16777216.0)
                else:
                    half = numbers.to(gl.float16)
                    total = gl.sum(half.to(gl.float32), 1) * (-128.0 / 16777216.0)
                parts += (half,)
                total = gl.convert_layout(total, by_column)
                bias += (gl.zeros([W, WARP_KEYS, N], gl.float32, mma) + total[:, None, :],)
        rest: gl.constexpr = 1.0 if CONFIG.FORMAT == 1 else 1024.0  # 2²⁴ over FACTOR
        scale = scale * gl.convert_layout(power, by_column) * rest
        if CONFIG.FORMAT == 1:
            warp = gl.arange(0, W, layout=gl.SliceLayout(1, by_column))
            scale = scale * gl.load(tensors.k_scale + warp % CONFIG.HEADS * scale_stride)[:, None]
    column = gl.arange(0, N, layout=gl.SliceLayout(0, by_column))[None, :]
    kv_index = column // G + extent.causal_offset
    low = extent.kv_start + gl.zeros([W, N], gl.int32, by_column)
    high = extent.stop + gl.zeros([W, N], gl.int32, by_column)
    if CONFIG.CAUSAL:
        high = gl.minimum(high, kv_index + 1)
    if CONFIG.WINDOWED:
        low = gl.maximum(low, kv_index - window + 1)
        if not CONFIG.CAUSAL:
            high = gl.minimum(high, kv_index + window_right)
    return Queries(parts, bias, scale, low, high)


# === tiles


class Memory(NamedTuple):
    """Tiles in shared memory, by stage."""

    k: Any  # [STAGES · BLOCKS, W, 16, width], 16-bit elements
    v: Any
    k_scale: Any  # [STAGES · BLOCKS, W, 16], float32; of 4-bit pages [..., groups], float16; or None
    v_scale: Any


class PageTable(NamedTuple):
    """The block table, at one batch row, and pages at one key head."""

    ptr: Any
    stride_page: Any
    n_pages: Any
    k_ptr: Any
    v_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any
    k_strides: Any  # `TokenStrides`, in UNITs of elements
    v_strides: Any
    k_scale_strides: Any  # in elements; of 4-bit pages in groups of a token
    v_scale_strides: Any


UNIT = gl.constexpr(8)  # elements of 16 bits: a copy has so many


_OF_LANE = gl.constexpr("{ .reg .b32 lane; mov.u32 lane, %laneid; and.b32 $0, lane, $1; }")


@gluon.jit
def _load_pages(pages, n_start, extent, CONFIG: gl.constexpr):
    """Return the page of each warp's block of keys, [W], for each of a tile's blocks.

    Where the assembler knows that all lanes load one number, it waits for it at once, to keep it in a uniform register.
    So lanes add a zero of their own to the address.
    """
    BLOCKS: gl.constexpr = CONFIG.BLOCKS
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _tile_copies(CONFIG.D, CONFIG.FORMAT, CONFIG.WARPS)))
    n = n_start + gl.arange(0, CONFIG.WARPS, layout=layout) // CONFIG.HEADS * WARP_KEYS
    n += gl.inline_asm_elementwise(_OF_LANE, "=r,r", [n * 0 + (pages.n_pages >> 31)], gl.int32, True, 1)
    found = ()
    for _block in gl.static_range(BLOCKS):
        ptrs = pages.ptr + (n // CONFIG.PAGE_SIZE).to(gl.int64) * pages.stride_page
        found += (gl.load(ptrs, n < extent.stop, other=0),)
        n += CONFIG.WARPS // CONFIG.HEADS * WARP_KEYS
    return found


@gluon.jit
def _rows_of_warps(page, strides, n_start, warp, CONFIG: gl.constexpr):
    """Return where the rows of each warp begin, [W], and the first one's key.

    Page numbers and their strides are not negative: of unsigned numbers the product is one instruction.
    """
    n_warp = n_start + warp // CONFIG.HEADS * WARP_KEYS
    start = page.to(gl.uint32).to(gl.uint64) * strides.batch.to(gl.uint32).to(gl.uint64)
    in_page = n_warp % CONFIG.PAGE_SIZE * strides.token
    if CONFIG.HEADS > 1:
        in_page += warp % CONFIG.HEADS * strides.head
    return start.to(gl.int64) + in_page, n_warp


@gluon.jit
def _copy_rows(tile, ptr, strides, page, n_start, extent, CONFIG: gl.constexpr):
    """Copy a tile of keys or values; zeros in place of those that no query attends, which may be NaN."""
    layout: gl.constexpr = _tile_copies(CONFIG.D, CONFIG.FORMAT, CONFIG.WARPS)
    warp = gl.arange(0, CONFIG.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    key = gl.arange(0, WARP_KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    element = gl.arange(0, _width(CONFIG.D, CONFIG.FORMAT), layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    start, n_warp = _rows_of_warps(page, strides, n_start, warp, CONFIG)
    within = (key * (strides.token * UNIT))[None, :, None] + element[None, None, :]  # 32 bits
    n = n_warp[:, None, None] + key[None, :, None] + element[None, None, :] * 0
    copy_to_shared(tile, ptr + ((start * UNIT)[:, None, None] + within), (n >= extent.first) & (n < extent.stop))


@gluon.jit
def _copy_scales(tile, ptr, strides, page, n_start, extent, CONFIG: gl.constexpr):
    """Copy the scales of a tile's keys, or of their values."""
    layout: gl.constexpr = _scale_copies(CONFIG.D, CONFIG.FORMAT, CONFIG.WARPS)
    IN_GROUPS: gl.constexpr = CONFIG.FORMAT == 3
    by_key: gl.constexpr = gl.SliceLayout(2, layout) if IN_GROUPS else layout
    warp = gl.arange(0, CONFIG.WARPS, layout=gl.SliceLayout(1, by_key))
    key = gl.arange(0, WARP_KEYS, layout=gl.SliceLayout(0, by_key))
    page = gl.convert_layout(page, gl.SliceLayout(1, by_key))
    start, n_warp = _rows_of_warps(page, strides, n_start, warp, CONFIG)
    within = (key * strides.token)[None, :]
    n = n_warp[:, None] + key[None, :]
    if IN_GROUPS:
        group = gl.arange(0, _groups(CONFIG.D), layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        offsets = (start * _groups(CONFIG.D))[:, None, None] + (within[:, :, None] * _groups(CONFIG.D) + group)
        n = n[:, :, None] + group * 0
    else:
        offsets = start[:, None] + within
    copy_to_shared(tile, ptr + offsets, (n >= extent.first) & (n < extent.stop))


@gluon.jit
def _copy_tile(memory, stage, pages, found, n_start, extent, CONFIG: gl.constexpr):
    """Begin to copy a tile into a stage."""
    BLOCKS: gl.constexpr = CONFIG.BLOCKS
    for block in gl.static_range(BLOCKS):
        # Other numbers would read outside of the memory.
        page = gl.minimum(gl.maximum(found[block].to(gl.int32), 0), pages.n_pages - 1)
        n = n_start + block * (CONFIG.WARPS // CONFIG.HEADS * WARP_KEYS)
        index = stage * CONFIG.BLOCKS + block
        _copy_rows(memory.k.index(index), pages.k_ptr, pages.k_strides, page, n, extent, CONFIG)
        _copy_rows(memory.v.index(index), pages.v_ptr, pages.v_strides, page, n, extent, CONFIG)
        if CONFIG.FORMAT > 1:
            _copy_scales(memory.k_scale.index(index), pages.k_scale_ptr, pages.k_scale_strides, page, n, extent, CONFIG)
            _copy_scales(memory.v_scale.index(index), pages.v_scale_ptr, pages.v_scale_strides, page, n, extent, CONFIG)


# === softmax and sums


class Sums(NamedTuple):
    """Running results of each warp's keys."""

    acc: Any  # tuple of [W, features, N]: O' of each part of the features
    row_max: Any  # [W, N], base 2
    row_sum: Any  # [W, 16, N]: of probabilities, not yet over a tile's keys
    unit: Any  # [W]: powers of two that probabilities of int8 and 4-bit values are multiplied by


@gluon.constexpr_function
def _rescaling(n):
    """Return PTX that multiplies a thread's n sums by alpha, unless alpha is 1 in all columns of the warp.

    Sums of a column are a multiple of two apart. A thread has two columns, or four: then the others are four or n / 2
    sums after the first ones.
    """
    alpha = [f"${2 * n + i}" for i in range(n)]
    first, *others = (alpha[i] for i in sorted({0, 1, 4, 5, n // 2, n // 2 + 1}))
    compared = " ".join(f"setp.eq.and.f32 whole, {x}, 0f3F800000, whole;" for x in others)
    products = " ".join(f"mul.f32 ${i}, ${i}, {alpha[i]};" for i in range(n))
    return (
        f"{{ .reg .pred whole; setp.eq.f32 whole, {first}, 0f3F800000; {compared} "
        f"vote.sync.all.pred whole, whole, 0xFFFFFFFF; @whole bra.uni done; {products} done: }}"
    )


@gluon.constexpr_function
def _operands(n):
    """Return the constraints of `_rescaling`: n numbers, read and written in place, and an alpha for each."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _rescale(acc, alpha):
    """Multiply the columns of O' by alpha, which is 1 in most steps."""
    PER_THREAD: gl.constexpr = acc.shape[1] * acc.shape[2] // 32
    PTX: gl.constexpr = _rescaling(PER_THREAD)
    OPERANDS: gl.constexpr = _operands(PER_THREAD)
    return gl.inline_asm_elementwise(PTX, OPERANDS, [acc, alpha[:, None, :]], gl.float32, True, PER_THREAD)


@gluon.jit
def _inverse_of_power(x):
    """Return 1 / x of a power of two."""
    return (0x7F000000 - x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def _power_below(x):
    """Return the power of two at or below a positive number."""
    return (x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _scores(queries, keys, k_scale, CONFIG: gl.constexpr):
    """Return exponents of 2, [W, 16, N]."""
    mma: gl.constexpr = _mma(CONFIG.WARPS)
    for part in gl.static_range(_n_parts(CONFIG.D, CONFIG.FORMAT)):
        product = mma_v2(keys[part], queries.parts[part], queries.bias[part])
        if CONFIG.FORMAT == 3:
            product = product * gl.convert_layout(k_scale[part].to(gl.float32), gl.SliceLayout(2, mma))[:, :, None]
        if part == 0:
            s = product
        else:
            s += product
    if CONFIG.FORMAT == 2:
        s = s * k_scale[:, :, None]
    return s * queries.scale[:, None, :]


@gluon.jit
def _mask(s, queries, n_start, CONFIG: gl.constexpr):
    """Return scores of a tile, −∞ where a query does not attend the key."""
    mma: gl.constexpr = _mma(CONFIG.WARPS)
    warp = gl.arange(0, CONFIG.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    key = gl.arange(0, WARP_KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    n = n_start + warp // CONFIG.HEADS * WARP_KEYS + key
    return gl.where((n >= queries.low[:, None, :]) & (n < queries.high[:, None, :]), s, float("-inf"))


@gluon.jit
def _unit_of(v_scales, unit, CONFIG: gl.constexpr):
    """Return the powers of two of each warp, no larger than before, that probabilities times scales need."""
    BLOCKS: gl.constexpr = CONFIG.BLOCKS
    by_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, _mma(CONFIG.WARPS)))
    if CONFIG.FORMAT == 2:  # so that a unit times scales is at most 2
        for block in gl.static_range(BLOCKS):
            if block == 0:  # noqa: SIM108 (before, it has no value)
                most = v_scales[block]
            else:
                most = gl.maximum(most, v_scales[block])
        power = _power_below(gl.maximum(gl.convert_layout(gl.max(most, 1), by_warp), 1e-18))
        unit = gl.minimum(unit, _inverse_of_power(power))
    elif CONFIG.FORMAT == 3:  # at most LARGEST_P_FACTOR
        for block in gl.static_range(BLOCKS):
            for group in gl.static_range(_groups(CONFIG.D)):
                if block + group == 0:  # noqa: SIM108 (before, it has no value)
                    most = v_scales[block][group]
                else:
                    most = gl.maximum(most, v_scales[block][group])
        power = _power_below(gl.maximum(gl.convert_layout(gl.max(most, 1).to(gl.float32), by_warp), 1e-6))
        unit = gl.minimum(unit, _inverse_of_power(power) * (LARGEST_P_FACTOR / 2))
    return unit


@gluon.jit
def _add_values(sums, scores, stored, v_scales, CONFIG: gl.constexpr):
    """Add the values of a tile to the sums, by its scores; all three are tuples of blocks."""
    BLOCKS: gl.constexpr = CONFIG.BLOCKS
    mma: gl.constexpr = _mma(CONFIG.WARPS)
    warp_of_key: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, mma))
    first: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    second: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    N_PARTS: gl.constexpr = _n_parts(CONFIG.D, CONFIG.FORMAT)
    for block in gl.static_range(BLOCKS):
        if block == 0:  # noqa: SIM108 (before, it has no value)
            most = scores[block]
        else:
            most = gl.maximum(most, scores[block])
    largest = gl.max(most, 1)
    new_max = gl.where(largest > sums.row_max + RESCALE_THRESHOLD, largest, sums.row_max)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended no key yet
    alpha = gl.exp2(sums.row_max - shift)
    row_sum = sums.row_sum * alpha[:, None, :]
    unit = _unit_of(v_scales, sums.unit, CONFIG)
    if CONFIG.FORMAT > 1:
        alpha = alpha * (unit * _inverse_of_power(sums.unit))[:, None]
    acc = ()
    for part in gl.static_range(N_PARTS):
        acc += (_rescale(sums.acc[part], alpha),)
    for block in gl.static_range(BLOCKS):
        p = gl.exp2(scores[block] - shift[:, None, :])
        row_sum += p
        if CONFIG.FORMAT == 2:
            of_keys = v_scales[block] * gl.convert_layout(unit, warp_of_key)[:, None]
            p = p * of_keys[:, :, None]
        elif CONFIG.FORMAT == 3:
            p = p * gl.convert_layout(unit, warp_of_key)[:, None, None]
        values = _unpack(stored[block], True, first, CONFIG)
        added = ()
        for part in gl.static_range(N_PARTS):
            if part == 0:
                p_half = gl.convert_layout(p.to(values[part].dtype), second)
            p_part = p_half
            if CONFIG.FORMAT == 3:
                of_group = gl.convert_layout(v_scales[block][part], gl.SliceLayout(2, second))[:, :, None]
                p_part = gl.inline_asm_elementwise(
                    "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [p_half, of_group], gl.float16, True, 2
                )
            added += (mma_v2(values[part], p_part, acc[part]),)
        acc = added
    return Sums(acc, new_max, row_sum, unit)


@gluon.jit
def _begin_sums(CONFIG: gl.constexpr):
    W: gl.constexpr = CONFIG.WARPS
    N: gl.constexpr = CONFIG.N
    mma: gl.constexpr = _mma(CONFIG.WARPS)
    by_column: gl.constexpr = gl.SliceLayout(1, mma)
    N_PARTS: gl.constexpr = _n_parts(CONFIG.D, CONFIG.FORMAT)
    acc = ()
    for _part in gl.static_range(N_PARTS):
        acc += (gl.zeros([W, CONFIG.D // N_PARTS, N], gl.float32, mma),)
    FIRST_UNIT: gl.constexpr = LARGEST_P_FACTOR if CONFIG.FORMAT == 3 else 1152921504606846976.0  # 2⁶⁰
    return Sums(
        acc,
        gl.full([W, N], float("-inf"), gl.float32, by_column),
        gl.zeros([W, WARP_KEYS, N], gl.float32, mma),
        gl.full([W], FIRST_UNIT, gl.float32, gl.SliceLayout(1, by_column)),
    )


@gluon.jit
def _read_scales(scales, stage, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return the scales of a tile: of 4-bit pages a tuple, one for each group."""
    if CONFIG.FORMAT == 3:
        result = _split_last(scales.index(stage).load(LAYOUT))
    elif CONFIG.FORMAT == 2:
        result = scales.index(stage).load(gl.SliceLayout(2, _mma(CONFIG.WARPS)))
    else:
        result = 0
    return result


@gluon.jit
def _begin_copies(memory, pages, start, n_steps, extent, CONFIG: gl.constexpr):
    """Begin to copy the first tiles; return the pages of the one after them."""
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_N: gl.constexpr = CONFIG.WARPS // CONFIG.HEADS * CONFIG.BLOCKS * WARP_KEYS
    first_pages = ()
    for ahead in gl.static_range(STAGES + 1):
        first_pages += (_load_pages(pages, start + ahead * BLOCK_N, extent, CONFIG),)
    for ahead in gl.static_range(STAGES):
        if ahead < n_steps:
            _copy_tile(memory, ahead, pages, first_pages[ahead], start + ahead * BLOCK_N, extent, CONFIG)
        commit_copies()
    return first_pages[STAGES]


@gluon.jit
def _mainloop_kv(sums, queries, memory, pages, found, start, n_steps, extent, full, full_stop, CONFIG: gl.constexpr):
    """Add some tiles of a batch row to the sums. All queries attend keys [full, full_stop)."""
    BLOCKS: gl.constexpr = CONFIG.BLOCKS
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_N: gl.constexpr = CONFIG.WARPS // CONFIG.HEADS * CONFIG.BLOCKS * WARP_KEYS
    operand: gl.constexpr = gl.DotOperandLayout(0, _mma(CONFIG.WARPS), 2)
    for step in range(n_steps):
        n_start = start + step * BLOCK_N
        stage = step % STAGES
        wait_copies(STAGES - 1)
        scores = ()
        stored = ()
        v_scales = ()
        for block in gl.static_range(BLOCKS):
            index = stage * CONFIG.BLOCKS + block
            keys = _unpack(memory.k.index(index).load(operand), False, operand, CONFIG)
            k_scale = _read_scales(memory.k_scale, index, _row_scales(CONFIG.D, CONFIG.WARPS), CONFIG)
            s = _scores(queries, keys, k_scale, CONFIG)
            if (n_start < full) | (n_start + BLOCK_N > full_stop):
                s = _mask(s, queries, n_start + block * (CONFIG.WARPS // CONFIG.HEADS * WARP_KEYS), CONFIG)
            scores += (s,)
        for block in gl.static_range(BLOCKS):
            index = stage * CONFIG.BLOCKS + block
            stored += (memory.v.index(index).permute((0, 2, 1)).load(operand),)
            v_scales += (_read_scales(memory.v_scale, index, _column_scales(CONFIG.D, CONFIG.WARPS), CONFIG),)
        if step + STAGES < n_steps:
            n_ahead = n_start + STAGES * BLOCK_N
            _copy_tile(memory, stage, pages, found, n_ahead, extent, CONFIG)
            found = _load_pages(pages, n_ahead + BLOCK_N, extent, CONFIG)
        commit_copies()
        sums = _add_values(sums, scores, stored, v_scales, CONFIG)
    wait_copies(0)
    return sums


# === results


@gluon.jit
def _over_keys(x, CONFIG: gl.constexpr):
    """View what each warp has, [W, ...], as [warps of different keys, heads, ...]."""
    shape: gl.constexpr = [CONFIG.WARPS // CONFIG.HEADS, CONFIG.HEADS] + x.shape[1:]  # noqa: RUF005
    return gl.reshape(x, shape)


@gluon.jit
def _store_results(
    sums,
    tensors,
    partials,
    out_strides,
    scale_stride,
    batch,
    kv_head,
    first_slot,
    is_whole,
    n_queries,
    n_kv_heads,
    CONFIG: gl.constexpr,
):
    """Add the sums of warps of one key head, and store a row's results, or those of a part of it."""
    D: gl.constexpr = CONFIG.D
    N: gl.constexpr = CONFIG.N
    G: gl.constexpr = CONFIG.HEADS_PER_KEY
    N_PARTS: gl.constexpr = _n_parts(CONFIG.D, CONFIG.FORMAT)
    by_column: gl.constexpr = gl.SliceLayout(1, _mma(CONFIG.WARPS))
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32, 1], [1, 1, CONFIG.WARPS], [1, 2, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, layout)  # of [heads, N]
    warp_max = _over_keys(sums.row_max, CONFIG)
    row_max = gl.max(warp_max, 0)
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    weight = gl.reshape(gl.exp2(warp_max - shift[None, :, :]), [CONFIG.WARPS, N])
    weight = gl.convert_layout(weight, by_column)
    row_sum = gl.sum(_over_keys(gl.sum(sums.row_sum, 1) * weight, CONFIG), 0)
    if CONFIG.FORMAT > 1:
        weight = weight * (_inverse_of_power(sums.unit) * 16777216.0)[:, None]  # 2²⁴
    row_max = gl.convert_layout(row_max, of_row)
    row_sum = gl.convert_layout(row_sum, of_row)
    kv_head += gl.arange(0, CONFIG.HEADS, layout=gl.SliceLayout(1, of_row))[:, None]
    row = gl.arange(0, N, layout=gl.SliceLayout(0, of_row))[None, :]
    exists = row < n_queries * G
    head = kv_head * G + row % G
    token = row // G
    factor = gl.full([CONFIG.HEADS, N], 1.0, gl.float32, of_row)
    if tensors.first_logits is not None:
        logit = gl.load(tensors.first_logits + head, exists & is_whole, other=float("-inf")) * 1.4426950408889634
        new_max = gl.maximum(row_max, logit)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        factor = gl.exp2(row_max - shift)
        row_sum = row_sum * factor + gl.exp2(logit - shift)
        row_max = new_max
    attends = row_sum != 0  # true for NaN, which results must show
    row_sum = gl.where(attends, row_sum, 1.0)
    lse = gl.where(attends, row_max + gl.log2(row_sum), float("-inf"))
    factor = factor / row_sum
    if CONFIG.FORMAT == 1:
        factor = factor * gl.load(tensors.v_scale + kv_head * scale_stride)
    slot = (first_slot + kv_head * 2).to(gl.int64) * N + row
    result = (batch.to(gl.int64) * (n_kv_heads * G) + head) * n_queries + token
    if is_whole:
        gl.store(tensors.lse + result, lse, exists)
    else:
        gl.store(partials.lse + slot, lse, exists)
    offsets = batch.to(gl.int64) * out_strides.batch + head * out_strides.head + token * out_strides.token
    index = gl.arange(0, D // N_PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    for part in gl.static_range(N_PARTS):
        o = gl.sum(_over_keys(sums.acc[part] * weight[:, None, :], CONFIG), 0)
        o = gl.convert_layout(o, layout) * factor[:, None, :]
        if CONFIG.FORMAT == 3:
            o = o * gl.where(index // 8 % 2 == 1, 0.0625, 1.0)
        feature = _feature_of(index, part, True, CONFIG)
        if is_whole:
            gl.store(
                tensors.out + (offsets[:, None, :] + feature), o.to(tensors.out.dtype.element_ty), exists[:, None, :]
            )
        else:
            gl.store(partials.out + ((slot * D)[:, None, :] + feature), o, exists[:, None, :])


# Numbers that change as a cache grows, or its table.
OF_TABLE = (
    *("n_keys", "n_pages", "table_stride_row", "n_rows", "window", "window_right", "n_queries"),
    *("table_start", "table_rows"),
)


@gluon.jit(do_not_specialize=OF_TABLE)
def decode_pages_kernel(
    tensors,
    partials,
    q_strides,  # `TokenStrides`, in elements
    out_strides,
    k_strides,  # of pages, in UNITs of 16-bit elements
    v_strides,
    k_scale_strides,  # in elements; of 4-bit pages in groups of a token; or None
    v_scale_strides,
    table_ptr,  # (B, pages of a row)
    table_stride_row,
    table_stride_page,
    n_pages,  # in memory
    bounds,  # `RowBounds`
    window,
    window_right,
    exp2_scale,
    rotary_table,  # fields of `Rotation`
    table_start,
    table_rows,
    n_rows,
    n_kv_heads,
    n_queries,
    n_keys,
    CONFIG: gl.constexpr,
):
    """Attend with one share of all rows' tiles, for one key head."""
    BLOCK_N: gl.constexpr = CONFIG.WARPS // CONFIG.HEADS * CONFIG.BLOCKS * WARP_KEYS
    let_next_kernel_begin()
    n_programs = n_kv_heads // CONFIG.HEADS  # of a share
    kv_head = gl.program_id(0) % n_programs * CONFIG.HEADS
    share_idx = gl.program_id(0) // n_programs
    n_shares = gl.num_programs(0) // n_programs
    share = _share_of(share_idx, n_shares, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG)
    k_ptr = tensors.k + kv_head.to(gl.int64) * k_strides.head * UNIT
    v_ptr = tensors.v + kv_head.to(gl.int64) * v_strides.head * UNIT
    k_scale_ptr = tensors.k_scale
    v_scale_ptr = tensors.v_scale
    if CONFIG.FORMAT > 1:
        GROUP: gl.constexpr = _groups(CONFIG.D) if CONFIG.FORMAT == 3 else 1
        k_scale_ptr += kv_head.to(gl.int64) * k_scale_strides.head * GROUP
        v_scale_ptr += kv_head.to(gl.int64) * v_scale_strides.head * GROUP
    k_scale_stride = 0
    v_scale_stride = 0
    if CONFIG.FORMAT == 1:
        k_scale_stride = k_scale_strides.head
        v_scale_stride = v_scale_strides.head
        k_scale_ptr += kv_head * k_scale_stride
    at_head = PagedTensors(
        tensors.q, k_ptr, v_ptr, k_scale_ptr, tensors.v_scale, tensors.out, tensors.lse, tensors.first_logits
    )
    rotation = Rotation(rotary_table, table_start, table_rows)
    tile = share.start
    row = gl.to_tensor(share.row)
    row_start = gl.to_tensor(share.row_start)
    while tile < share.stop:
        extent = _extent_of(row, True, bounds, n_queries, n_keys, window, window_right, CONFIG)
        first_tile = tile - row_start
        n_steps = gl.minimum(extent.n_tiles, share.stop - row_start) - first_tile
        # All queries attend the keys from that of the last query's window to the first query's own.
        full = extent.kv_start
        full_stop = extent.stop
        if CONFIG.CAUSAL:
            full_stop = gl.minimum(full_stop, extent.causal_offset + 1)
        if CONFIG.WINDOWED:
            full = gl.maximum(full, extent.causal_offset + n_queries - window)
            if not CONFIG.CAUSAL:
                full_stop = gl.minimum(full_stop, extent.causal_offset + window_right)
        pages = PageTable(
            table_ptr + row.to(gl.int64) * table_stride_row,
            table_stride_page,
            n_pages,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            k_strides,
            v_strides,
            k_scale_strides,
            v_scale_strides,
        )
        start = extent.start + first_tile * BLOCK_N
        memory = _allocate(tensors, CONFIG)  # here, so that the sums of warps take its place
        found = _begin_copies(memory, pages, start, n_steps, extent, CONFIG)
        queries = _load_queries(
            at_head,
            q_strides,
            k_scale_stride,
            row,
            kv_head,
            rotation,
            n_queries,
            exp2_scale,
            extent,
            window,
            window_right,
            CONFIG,
        )
        sums = _begin_sums(CONFIG)
        sums = _mainloop_kv(sums, queries, memory, pages, found, start, n_steps, extent, full, full_stop, CONFIG)
        is_whole = n_steps == extent.n_tiles
        side = gl.where(tile > share.start, 1, 0)
        _store_results(
            sums,
            at_head,
            partials,
            out_strides,
            v_scale_stride,
            row,
            kv_head,
            share_idx * n_kv_heads * 2 + side,
            is_whole,
            n_queries,
            n_kv_heads,
            CONFIG,
        )
        tile += n_steps
        row_start += extent.n_tiles
        row += 1


@gluon.jit
def _allocate(tensors, CONFIG: gl.constexpr):
    """Allocate the stages of tiles."""
    STAGES: gl.constexpr = CONFIG.STAGES * CONFIG.BLOCKS
    W: gl.constexpr = CONFIG.WARPS
    width: gl.constexpr = _width(CONFIG.D, CONFIG.FORMAT)
    ELEMENT: gl.constexpr = tensors.k.dtype.element_ty
    k_tiles = gl.allocate_shared_memory(ELEMENT, [STAGES, W, WARP_KEYS, width], _tile_shared(CONFIG.D, CONFIG.FORMAT))
    v_tiles = gl.allocate_shared_memory(ELEMENT, [STAGES, W, WARP_KEYS, width], _tile_shared(CONFIG.D, CONFIG.FORMAT))
    if CONFIG.FORMAT == 3:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        shape: gl.constexpr = [STAGES, W, WARP_KEYS, _groups(CONFIG.D)]
        memory = Memory(
            k_tiles,
            v_tiles,
            gl.allocate_shared_memory(gl.float16, shape, plain),
            gl.allocate_shared_memory(gl.float16, shape, plain),
        )
    elif CONFIG.FORMAT == 2:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        memory = Memory(
            k_tiles,
            v_tiles,
            gl.allocate_shared_memory(gl.float32, [STAGES, W, WARP_KEYS], flat),
            gl.allocate_shared_memory(gl.float32, [STAGES, W, WARP_KEYS], flat),
        )
    else:
        memory = Memory(k_tiles, v_tiles, 0, 0)
    return memory


@gluon.jit(do_not_specialize=OF_TABLE)
def combine_shares_kernel(
    partials,
    out_ptr,
    lse_ptr,
    first_logits_ptr,
    out_strides,
    bounds,
    window,
    window_right,
    n_rows,
    n_kv_heads,
    n_queries,
    n_keys,
    n_shares,
    CONFIG: gl.constexpr,
):
    """Combine the parts of one row of one query head, where there are several."""
    D: gl.constexpr = CONFIG.D
    AT_ONCE: gl.constexpr = 16 if CONFIG.ONE_ROW else 4  # parts: the fewer rows, the more shares has each
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    by_part: gl.constexpr = gl.SliceLayout(1, layout)
    by_feature: gl.constexpr = gl.SliceLayout(0, layout)
    query_row = gl.program_id(0) % (n_queries * CONFIG.HEADS_PER_KEY)
    kv_head = gl.program_id(0) // (n_queries * CONFIG.HEADS_PER_KEY) % n_kv_heads
    batch = gl.program_id(0) // (n_queries * CONFIG.HEADS_PER_KEY) // n_kv_heads
    length, _ = _length_of_shares(n_shares, n_rows, bounds, n_queries, n_keys, window, window_right, CONFIG)
    start = 0
    for first_row in range(0, batch, ROWS_AT_ONCE):
        tiles = _tiles_of_rows(first_row, batch, bounds, n_queries, n_keys, window, window_right, CONFIG)
        start += gl.sum(tiles, 0)
    n_tiles = _extent_of(batch, True, bounds, n_queries, n_keys, window, window_right, CONFIG).n_tiles
    first_share = start // length
    last_share = (start + n_tiles - 1) // length
    await_kernel_before()
    if first_share < last_share:
        head = kv_head * CONFIG.HEADS_PER_KEY + query_row % CONFIG.HEADS_PER_KEY
        token = query_row // CONFIG.HEADS_PER_KEY
        zero = gl.to_tensor(0.0)
        row_max, row_sum = begin_rows(zero, zero, first_logits_ptr, head, None, 1.0, 1.0)
        feature = gl.arange(0, D, layout=by_feature)
        acc = gl.zeros([D], gl.float32, by_feature)
        for share in range(first_share, last_share + 1, AT_ONCE):
            part = share + gl.arange(0, AT_ONCE, layout=by_part)
            exists = part <= last_share
            side = ((part == first_share) & (start % length != 0)).to(gl.int32)
            index = ((part * n_kv_heads + kv_head) * 2 + side).to(gl.int64) * CONFIG.N + query_row
            lse = gl.load(partials.lse + index, exists, other=float("-inf"))
            o = gl.load(partials.out + (index[:, None] * D + feature[None, :]), exists[:, None], other=0.0)
            new_max = gl.maximum(row_max, gl.max(lse, 0))
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            p = gl.exp2(lse - shift)
            alpha = gl.exp2(row_max - shift)
            row_sum = row_sum * alpha + gl.sum(p, 0)
            acc = acc * alpha + gl.sum(o * p[:, None], 0)
            row_max = new_max
        attends = row_sum != 0
        row_sum = gl.where(attends, row_sum, 1.0)
        lse = gl.where(attends, row_max + gl.log2(row_sum), float("-inf"))
        n_heads = n_kv_heads * CONFIG.HEADS_PER_KEY
        gl.store(lse_ptr + (batch.to(gl.int64) * n_heads + head) * n_queries + token, lse)
        offsets = batch.to(gl.int64) * out_strides.batch + head * out_strides.head + token * out_strides.token
        gl.store(out_ptr + (offsets + feature), (acc / row_sum).to(out_ptr.dtype.element_ty))
