"""Attention kernels for few queries and many keys: decoding, and chunks of a prompt, from dense caches and from pages.

A program attends with the queries of all heads that share a key head, so that each key is read once for them: row r of
its tile is query r // G of head r % G, of the G = `heads_per_key` heads. It attends to one split of the keys, so that a
few queries keep a whole GPU reading; a second kernel combines the splits.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, Dv that of values,
R rotary dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import Scores
from ropewalk.ops.attention.triton.softmax import begin_rows, tanh
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, params_of_head, partner_of, wide


class DecodeTensors(NamedTuple):
    """Pointers to what the kernel reads and writes; specialised, because their alignment decides the width of loads."""

    q: Any  # (B, H, Tq, D)
    k: Any  # (B, K, Tk, D); or (pages, K, PAGE_SIZE, D)
    v: Any  # with Dv for D
    out: Any  # (B, H, Tq, Dv); if SPLIT (B, H, Tq, n_splits, Dv), dense and float32
    lse: Any  # (B, H, Tq), dense, base 2; if SPLIT (B, H, Tq, n_splits)
    first_logits: Any  # (H,), float32, of each row's softmax; or None: if SPLIT, the combine kernel adds them


class RowStrides(NamedTuple):
    """Strides of rows of features, in STRIDE_UNITs of elements; 0 for a dimension of one."""

    batch: Any  # or page
    head: Any
    token: Any


class DecodeStrides(NamedTuple):
    """Strides of q, and of the output, whose unit is one element; specialised, but no cache's length changes them."""

    q: Any
    out: Any


class Pages(NamedTuple):
    """One batch row of the block table of paged keys and values; a dense cache has None in its place."""

    ptr: Any
    stride_page: Any


class KeyMask(NamedTuple):
    """A mask of keys at one batch row, or with a row for each query."""

    ptr: Any  # or None; or [BLOCK_M, 1]
    stride_key: Any


class Scales(NamedTuple):
    """Scales of quantised pages; strides in SCALE_UNITs. Their pages have the numbers of the pages of k and v.

    Strides are no groups of their own: Triton 3.6 may lose a constant, as a stride of 1 is, two groups deep.
    """

    k_ptr: Any
    k_stride_page: Any
    k_stride_token: Any
    k_stride_head: Any
    k_stride_group: Any  # in elements
    v_ptr: Any
    v_stride_page: Any
    v_stride_token: Any
    v_stride_head: Any
    v_stride_group: Any


class HeadScales(NamedTuple):
    """Scales of one key head's keys, or of their values."""

    ptr: Any
    stride_page: Any
    stride_token: Any
    stride_group: Any


class RopeTables(NamedTuple):
    """A `RopeTable`, or None where features are not rotated, for each side of near and of far pairs."""

    q: Any
    q_far: Any  # queries, as they read far keys
    k: Any
    k_far: Any


class Heads(NamedTuple):
    """Numbers of heads; specialised, so that a group of one costs no division."""

    n_kv_heads: Any
    heads_per_key: Any


class DecodeConfig(NamedTuple):
    """Constants of a binary. One `tl.constexpr` holds them all."""

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    SUM_COLUMNS: int  # of the product that sums probabilities over 4-bit pages
    ROTARY_DIM: int
    ROTARY_OFFSET: int  # the first feature that is rotated
    INTERLEAVED: bool
    PAIR_BLOCK: int  # features of a block that is half-split by itself
    PAGE_SIZE: int
    STRIDE_UNIT: int  # elements; all strides of q, k and v are multiples of it
    SCALE_UNIT: int  # elements: all strides of scales but those of groups are multiples of it
    FORMAT: int  # of pages, a `cache.formats.Format`: 0 has no scales
    PTX: bool  # numbers of quantised pages are unpacked by inline assembly
    INT64_STRIDES: bool  # keys of one tile may be 2³¹ elements apart
    INDEX_POSITIONS: bool  # positions are indices of tokens
    CAUSAL: bool
    WINDOWED: bool
    HAS_STARTS: bool  # the first key of a row may not be its key 0
    SPLIT: bool  # there is more than one split
    SPLIT_MASKED_LOOP: bool  # keys that all rows attend have a loop of their own, without masks
    PRECISION: str


class Rows(NamedTuple):
    """The rows of a program, [BLOCK_M] each: queries of all heads that share its key head."""

    q_ptr: Any
    q_offsets: Any
    batch: Any
    token: Any
    exists: Any
    q_pos: Any  # as score functions read it


class Cache(NamedTuple):
    """Keys and values of one key head and one batch row."""

    k_ptr: Any
    k_strides: Any
    v_ptr: Any
    v_strides: Any
    pages: Any
    n_pages: Any
    positions: Any  # of keys, or None
    origin: Any  # the position that others are counted from
    kv_start: Any  # the first key that exists
    k_scales: Any  # `HeadScales`, or None
    v_scales: Any


class Accumulator(NamedTuple):
    """Running results of the online softmax."""

    acc_o: Any  # [BLOCK_M, BLOCK_DV], not divided by row_sum
    row_max: Any  # [BLOCK_M], base 2
    row_sum: Any


class PairAccumulator(NamedTuple):
    """The same of 8-bit pages: even and odd features. A field of None would not pass a return by Triton 3.6."""

    acc_o: Any  # [BLOCK_M, BLOCK_DV / 2]; of int8 in `unit`s
    acc_1: Any
    row_max: Any
    row_sum: Any
    unit: Any  # of int8 the largest scale of values so far: float16 holds probabilities times scales in it


class QuadAccumulator(NamedTuple):
    """The same of 4-bit pages: features 4 i, 4 i + 1, 4 i + 2 and 4 i + 3."""

    acc_o: Any  # [BLOCK_M, BLOCK_DV / 4]
    acc_1: Any
    acc_2: Any
    acc_3: Any
    row_max: Any
    row_sum: Any  # [BLOCK_M, SUM_COLUMNS], all of them alike


class Split(NamedTuple):
    """Keys of one split; every row attends [full, full_stop). `split_start` and `full` are at tile boundaries."""

    start: Any  # no row attends keys before this one, in any split
    stop: Any
    split_start: Any
    full: Any
    full_stop: Any
    split_stop: Any


class KeyRange(NamedTuple):
    """One split of the near or of the far keys, with what masks and rotates its pairs."""

    split: Any
    kv_index: Any  # [BLOCK_M]: the last key that causality admits
    window: Any  # attended keys n are more than kv_index − window
    window_right: Any  # and without causality less than kv_index + window_right
    q_table: Any
    q_row: Any  # [BLOCK_M], of q_table
    k_table: Any


@triton.jit
def row_offsets(strides, batch, head, token, STRIDE_UNIT: tl.constexpr):
    """Return how many elements rows are from the first one."""
    offset = wide(batch) * wide(strides.batch) + wide(head) * wide(strides.head) + wide(token) * wide(strides.token)
    return offset * STRIDE_UNIT


@triton.jit
def load_rotated(ptr, offsets, table, batch, table_row, row_exists, CONFIG: tl.constexpr):
    """Load rows of q or k, [rows, BLOCK_D], and rotate them, rounded once; zeros where there is none."""
    R: tl.constexpr = CONFIG.ROTARY_DIM
    feature = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    exists = row_exists[:, None] & (feature < CONFIG.D)
    rows = tl.load(ptr + (offsets[:, None] + feature), exists, other=0.0)
    if table is not None:
        rotary_feature = feature - CONFIG.ROTARY_OFFSET
        is_rotated = exists & (rotary_feature >= 0) & (rotary_feature < R)
        pair, partner, is_second = partner_of(feature, CONFIG)
        table_offsets = (wide(batch) * table.stride_batch + wide(table_row) * table.stride_token)[:, None] + pair
        cos = tl.load(table.cos + table_offsets, is_rotated, other=1.0)
        sin = tl.load(table.sin + table_offsets, is_rotated, other=0.0)
        partners = tl.load(ptr + (offsets[:, None] + partner), is_rotated, other=0.0).to(tl.float32)
        rotated = rows.to(tl.float32) * cos + partners * tl.where(is_second, sin, -sin)
        rows = tl.where(is_rotated, rotated.to(rows.dtype), rows)
    return rows


@triton.jit
def key_origin(positions, batch):
    """Return the position that others are counted from, so that float32 holds them: the first key's, or 0."""
    origin = 0
    if positions is not None:
        origin = wide(tl.load(positions.ptr + wide(batch) * positions.stride_batch))
    return origin


@triton.jit
def positions_of(positions, batch, index, exists, default, origin):
    """Return positions of tokens from the origin, in float32; without given positions, `default` less the origin."""
    if positions is not None:
        offsets = wide(batch) * positions.stride_batch + wide(index) * positions.stride_token
        default = wide(tl.load(positions.ptr + offsets, exists, other=0))
    return (default - origin).to(tl.float32)


@triton.jit
def split_keys(
    first,
    last,
    kv_start,
    n_keys,
    window,
    window_right,
    n_splits,
    min_split,
    split_idx,
    CONFIG: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return one split of the keys that some queries attend, whose indices among the keys are `first` to `last`.

    Splits begin at a multiple of BLOCK_N, and so does the range in which every query attends every key.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    start = kv_start
    stop = n_keys
    full = kv_start
    full_stop = n_keys
    if CONFIG.CAUSAL:
        stop = tl.minimum(stop, last + 1)
        full_stop = tl.minimum(full_stop, first + 1)
    if WINDOWED:
        start = tl.maximum(start, first - window + 1)
        full = tl.maximum(full, last - window + 1)
        if not CONFIG.CAUSAL:
            stop = tl.minimum(stop, last + window_right)
            full_stop = tl.minimum(full_stop, first + window_right)
    aligned_start = start // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(tl.maximum(stop - aligned_start, 0), n_splits), BLOCK_N) * BLOCK_N
    length = tl.maximum(length, min_split)
    split_start = aligned_start + split_idx * length
    split_stop = tl.minimum(split_start + length, stop)
    aligned_stop = split_start + tl.cdiv(tl.maximum(split_stop - split_start, 0), BLOCK_N) * BLOCK_N
    full = tl.minimum(tl.maximum(tl.cdiv(full, BLOCK_N) * BLOCK_N, split_start), aligned_stop)
    full_stop = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N * BLOCK_N, full), aligned_stop)
    return Split(start, stop, split_start, full, full_stop, split_stop)


@triton.jit
def page_offset(page, stride):
    """Return page · stride, int64, of numbers that are not negative: one instruction, where signed ones need four."""
    return (page.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64)).to(tl.int64)


@triton.jit
def skip_full_tiles(n_start, split, SKIP: tl.constexpr):
    """Return the start of a tile of the masked loop, which continues after the keys that all rows attend."""
    if SKIP:
        n_start = tl.where(n_start >= split.full, n_start + (split.full_stop - split.full), n_start)
    return n_start


@triton.jit
def load_page(pages, n_start, stop, CONFIG: tl.constexpr):
    """Load the block table's entry of a tile, or of each of its keys if pages are shorter; 0 from `stop` on."""
    n = n_start
    if CONFIG.PAGE_SIZE % CONFIG.BLOCK_N != 0:
        n = n_start + tl.arange(0, CONFIG.BLOCK_N)
    return tl.load(pages.ptr + wide(n // CONFIG.PAGE_SIZE) * pages.stride_page, n < stop, other=0)


class QuantizedQueries(NamedTuple):
    """Rows of queries divided by a power of two, so that float16 holds them, and the factors of their products."""

    rows: Any  # [BLOCK_M, BLOCK_D]; or, if keys are not rotated here, a tuple of the features of each part
    factor: Any  # [BLOCK_M]


SCALE_4BIT = tl.constexpr(8.0)  # 4-bit numbers are read as eighths, so that float16 holds them times any scale


@triton.jit
def split_parts(x, FORMAT: tl.constexpr):
    """Return the features of each part of an element of 16 bits: two of 8-bit numbers, four of 4-bit ones."""
    WIDTH: tl.constexpr = x.shape[1]
    if FORMAT == 3:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], WIDTH // 4, 2, 2)))
        part_0, part_2 = tl.split(even)
        part_1, part_3 = tl.split(odd)
        parts = (part_0, part_1, part_2, part_3)
    else:
        parts = tl.split(tl.reshape(x, (x.shape[0], WIDTH // 2, 2)))
    return parts


@triton.jit
def join_parts(acc, FORMAT: tl.constexpr):
    """Return an accumulator's features in their order."""
    if FORMAT == 3:
        x = tl.join(tl.join(acc.acc_o, acc.acc_2), tl.join(acc.acc_1, acc.acc_3))
        x = tl.reshape(x, (x.shape[0], x.shape[1] * 4))
    elif FORMAT > 0:
        x = tl.join(acc.acc_o, acc.acc_1)
        x = tl.reshape(x, (x.shape[0], x.shape[1] * 2))
    else:
        x = acc.acc_o
    return x


@triton.jit
def prepare_queries(queries, scales, SPLIT: tl.constexpr, CONFIG: tl.constexpr):
    """Return queries for products with stored numbers: in float16, or in float32 if they are."""
    factor = tl.full((CONFIG.BLOCK_M,), 1.0, tl.float32)
    if queries.dtype != tl.float32:
        largest = tl.max(tl.abs(queries.to(tl.float32)), axis=1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where((power > 0) & (power < float("inf")), power, 1.0)
        queries = (queries.to(tl.float32) / factor[:, None]).to(tl.float16)
    if SPLIT:
        queries = split_parts(queries, CONFIG.FORMAT)
    if CONFIG.FORMAT == 3:
        factor = factor * SCALE_4BIT
    elif CONFIG.FORMAT == 1:
        factor = factor * tl.load(scales.ptr)
    return QuantizedQueries(queries, factor)


@triton.jit
def number_of_byte(byte, FORMAT: tl.constexpr):
    """Return the number of a byte, int32, as float16: float8_e4m3fn or int8."""
    if FORMAT == 1:
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # the number times 2⁻⁸
        number = half.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        number = tl.where((byte & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    else:
        number = ((byte ^ 0x80) - 128).to(tl.float16)
    return number


@triton.jit
def load_8bit(rows, exists, FORMAT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Load 8-bit numbers as float16: even and odd features, [BLOCK_N, BLOCK / 2] each.

    They are loaded in pairs of 16 bits, since matrices of bytes are not transposed by one instruction.
    """
    pair = tl.arange(0, BLOCK // 2)[None, :]
    stored = tl.load(rows[:, None] + pair, exists[:, None] & (pair < WIDTH // 2), other=0)
    if PTX and FORMAT == 1:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 x;
            .reg .b16 low, high;
            prmt.b32 x, $2, 0, 0x3120;
            mov.b32 {low, high}, x;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [stored],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif PTX:
        # A byte plus 128 in the mantissa of 1024: a conversion has a quarter of an instruction's rate or less.
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 x, y, z, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 x, $2, 0x80808080;
            prmt.b32 y, x, 0x64646464, 0x4240;
            prmt.b32 z, x, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, y, bias;
            sub.rn.f16x2 $1, z, bias;
            }
            """,
            "=r,=r,r",
            [stored],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = number_of_byte(stored.to(tl.int32) & 0xFF, FORMAT)
        odd = number_of_byte((stored.to(tl.int32) >> 8) & 0xFF, FORMAT)
    return even, odd


@triton.jit
def scale_offsets(scales, page, token, CONFIG: tl.constexpr):
    """Return how many elements the scales of a tile's tokens are from those of token 0 in page 0."""
    return (page_offset(page, scales.stride_page) + wide(token) * scales.stride_token) * CONFIG.SCALE_UNIT


@triton.jit
def load_scales(scales, page, token, exists, CONFIG: tl.constexpr):
    """Load one scale for each key of a tile."""
    return tl.load(scales.ptr + scale_offsets(scales, page, token, CONFIG), exists, other=0.0)


@triton.jit
def load_4bit(
    rows,
    scales,
    page,
    token,
    exists,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CONFIG: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load 4-bit numbers times an eighth of their scales: a matrix of each part, [BLOCK_N, BLOCK / 4].

    They are loaded in fours of 16 bits, which one instruction brings from shared memory to the layout of a product.
    """
    GROUPS: tl.constexpr = BLOCK // 32
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    element = tl.arange(0, BLOCK // 4)[None, :]
    stored = tl.load(rows[:, None] + element, exists[:, None] & (element < WIDTH // 4), other=0)
    group = tl.arange(0, GROUPS)[None, :]
    offsets = (scale_offsets(scales, page, token, CONFIG) + tl.zeros_like(token))[:, None]
    offsets += group * scales.stride_group
    scale = tl.load(scales.ptr + offsets, exists[:, None] & (group < WIDTH // 32), other=0.0)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, 8)), (BLOCK_N, BLOCK // 4))
    if CONFIG.PTX and tl.float16 == DTYPE:
        # A number in the mantissa of 1024, in its lowest bits or 16 times as large; then less 8, and an eighth of that.
        part_0, part_1, part_2, part_3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 y, a, b, c, d, low, low_zero, high, high_zero;
            mov.b32 low, 0x30003000;
            mov.b32 low_zero, 0xD808D808;
            mov.b32 high, 0x20002000;
            mov.b32 high_zero, 0xC880C880;
            shr.u32 y, $4, 8;
            lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 b, $4, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 c, y, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 d, y, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 a, a, low, low_zero;
            fma.rn.f16x2 b, b, high, high_zero;
            fma.rn.f16x2 c, c, low, low_zero;
            fma.rn.f16x2 d, d, high, high_zero;
            mul.rn.f16x2 $0, a, $5;
            mul.rn.f16x2 $1, b, $5;
            mul.rn.f16x2 $2, c, $5;
            mul.rn.f16x2 $3, d, $5;
            }
            """,
            "=r,=r,=r,=r,r,r",
            [stored, scale],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = stored.to(tl.int32)
        part_0 = (((bits & 15) - 8).to(tl.float32) * 0.125 * scale).to(DTYPE)
        part_1 = ((((bits >> 4) & 15) - 8).to(tl.float32) * 0.125 * scale).to(DTYPE)
        part_2 = ((((bits >> 8) & 15) - 8).to(tl.float32) * 0.125 * scale).to(DTYPE)
        part_3 = ((((bits >> 12) & 15) - 8).to(tl.float32) * 0.125 * scale).to(DTYPE)
    return part_0, part_1, part_2, part_3


@triton.jit
def load_parts(
    rows,
    scales,
    page,
    token,
    exists,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CONFIG: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load a tile of quantised pages: a matrix of each part, without scales that all of a token's features share."""
    if CONFIG.FORMAT == 3:
        parts = load_4bit(rows, scales, page, token, exists, WIDTH, BLOCK, CONFIG, DTYPE)
    else:
        even, odd = load_8bit(rows, exists, CONFIG.FORMAT, WIDTH, BLOCK, CONFIG.PTX)
        parts = (even.to(DTYPE), odd.to(DTYPE))
    return parts


@triton.jit
def load_features(rows, feature, scales, offsets, exists, CONFIG: tl.constexpr):
    """Load keys at features of any order, float32; times their scales if those differ within a head."""
    if CONFIG.FORMAT == 3:
        stored = tl.load(rows[:, None] + feature // 4, exists, other=0).to(tl.int32)
        numbers = (((stored >> (feature % 4 * 4)) & 15) - 8).to(tl.float32)
        scale_ptrs = scales.ptr + offsets[:, None] + (feature // 32) * scales.stride_group
        numbers *= tl.load(scale_ptrs, exists, other=0.0).to(tl.float32) * 0.125
    else:
        stored = tl.load(rows[:, None] + feature // 2, exists, other=0).to(tl.int32)
        numbers = number_of_byte((stored >> (feature % 2 * 8)) & 0xFF, CONFIG.FORMAT).to(tl.float32)
    return numbers


@triton.jit
def load_rotated_numbers(rows, scales, page, token, table, batch, table_row, exists, CONFIG: tl.constexpr):
    """Load keys of quantised pages and rotate them, [BLOCK_N, BLOCK_D], float32."""
    R: tl.constexpr = CONFIG.ROTARY_DIM
    feature = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    exists = exists[:, None] & (feature < CONFIG.D)
    offsets = scale_offsets(scales, page, token, CONFIG)
    x = load_features(rows, feature, scales, offsets, exists, CONFIG)
    rotary_feature = feature - CONFIG.ROTARY_OFFSET
    is_rotated = exists & (rotary_feature >= 0) & (rotary_feature < R)
    pair, partner, is_second = partner_of(feature, CONFIG)
    table_offsets = (wide(batch) * table.stride_batch + wide(table_row) * table.stride_token)[:, None] + pair
    cos = tl.load(table.cos + table_offsets, is_rotated, other=1.0)
    sin = tl.load(table.sin + table_offsets, is_rotated, other=0.0)
    partner = tl.where(is_rotated, partner, 0)
    y = load_features(rows, partner, scales, offsets, is_rotated, CONFIG)
    return x * cos + y * tl.where(is_second, sin, -sin)


@triton.jit
def quantized_scores(
    queries, rows, page, token, exists, table, batch, n, scales, CONFIG: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the products of queries with a tile of keys of quantised pages, [BLOCK_M, BLOCK_N], without `factor`."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    if table is not None:
        keys = load_rotated_numbers(rows, scales, page, token, table, batch, n, exists, CONFIG)
        s = tl.dot(queries.rows, keys.to(DTYPE).T, input_precision=CONFIG.PRECISION)
    else:
        parts = load_parts(rows, scales, page, token, exists, CONFIG.D, CONFIG.BLOCK_D, CONFIG, DTYPE)
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in tl.static_range(4 if CONFIG.FORMAT == 3 else 2):
            s = tl.dot(queries.rows[part], parts[part].T, s, input_precision=CONFIG.PRECISION)
    if CONFIG.FORMAT == 2:
        s = s * load_scales(scales, page, token, exists, CONFIG)[None, :]
    return s


@triton.jit
def mainloop_kv(
    acc,
    queries,
    rows,
    keys,
    cache,
    mask,
    scores,
    SCORE_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys of a split to the accumulator.

    If MASKED, each key is masked; with SPLIT_MASKED_LOOP these are the keys that some row does not attend, and the
    other ones without MASKED.
    """
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    D: tl.constexpr = CONFIG.D
    DV: tl.constexpr = CONFIG.DV
    SUM_COLUMNS: tl.constexpr = CONFIG.SUM_COLUMNS
    UNIT: tl.constexpr = CONFIG.STRIDE_UNIT
    SKIP: tl.constexpr = MASKED and CONFIG.SPLIT_MASKED_LOOP
    NO_FUTURE_KEYS: tl.constexpr = CONFIG.INDEX_POSITIONS and CONFIG.CAUSAL and not MASKED
    acc_o = acc.acc_o
    if CONFIG.FORMAT > 0:
        acc_1 = acc.acc_1
    if CONFIG.FORMAT > 0 and CONFIG.FORMAT != 3:
        unit = acc.unit
    if CONFIG.FORMAT == 3:
        acc_2 = acc.acc_2
        acc_3 = acc.acc_3
    row_max = acc.row_max
    row_sum = acc.row_sum
    pages = cache.pages
    row_scale = scores.exp2_scale
    pair_scale = scores.exp2_scale
    IS_PLAIN: tl.constexpr = SCORE_MOD is None and scores.cap is None
    DTYPE: tl.constexpr = tl.float32 if rows.q_ptr.dtype.element_ty == tl.float32 else tl.float16  # of products
    if CONFIG.FORMAT > 0 and IS_PLAIN:  # one product for each score: these kernels wait for instructions
        row_scale = queries.factor * scores.exp2_scale
        pair_scale = row_scale[:, None]
    if CONFIG.FORMAT == 3:
        ones = tl.full((BLOCK_N, SUM_COLUMNS), 1.0, DTYPE)
    split = keys.split
    if not MASKED:
        start = split.full
        length = split.full_stop - split.full
    elif SKIP:
        start = split.split_start
        length = (split.full - split.split_start) + tl.maximum(split.split_stop - split.full_stop, 0)
    else:
        start = split.split_start
        length = tl.maximum(split.split_stop - split.split_start, 0)
    offset = tl.arange(0, BLOCK_N)
    feature = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    feature_v = tl.arange(0, CONFIG.BLOCK_DV)[None, :]
    page_of_tile = rows.batch
    if pages is not None:
        page_of_tile = load_page(pages, skip_full_tiles(start, split, SKIP), split.stop, CONFIG)
    # Loads ahead would keep tiles of cos, sin and the pairs' partners in shared memory, which has no room for them.
    STAGES: tl.constexpr = 1 if keys.k_table is not None or (SKIP and CONFIG.FORMAT > 0) else None
    for step in tl.range(0, length, BLOCK_N, num_stages=STAGES):
        n_start = skip_full_tiles(start + step, split, SKIP)
        n = n_start + offset
        exists = n < split.stop
        if CONFIG.HAS_STARTS or WINDOWED:
            exists = exists & (n >= split.start)
        if not MASKED:
            exists = tl.full((BLOCK_N,), 1, tl.int1)
        page = page_of_tile
        if pages is not None:
            page = tl.minimum(tl.maximum(page, 0), cache.n_pages - 1)  # any other entry would read outside the memory
        if pages is None:
            token_start = n_start
            token = offset
        elif CONFIG.PAGE_SIZE % BLOCK_N == 0:  # one page holds the tile
            token_start = n_start % CONFIG.PAGE_SIZE
            token = offset
        elif BLOCK_N % CONFIG.PAGE_SIZE == 0:  # a tile begins where a page does
            token_start = 0
            token = offset % CONFIG.PAGE_SIZE
        else:
            token_start = 0
            token = n % CONFIG.PAGE_SIZE
        k_start = (page_offset(page, cache.k_strides.batch) + token_start * wide(cache.k_strides.token)) * UNIT
        v_start = (page_offset(page, cache.v_strides.batch) + token_start * wide(cache.v_strides.token)) * UNIT
        k_stride_token = cache.k_strides.token
        v_stride_token = cache.v_strides.token
        if CONFIG.INT64_STRIDES:
            k_stride_token = wide(k_stride_token)
            v_stride_token = wide(v_stride_token)
        k_rows = cache.k_ptr + k_start + token * k_stride_token * UNIT
        v_rows = cache.v_ptr + v_start + token * v_stride_token * UNIT
        k_ptrs = k_rows[:, None] + feature
        v_ptrs = v_rows[:, None] + feature_v
        page_token = token_start + token
        if pages is not None:  # the next tile's, so that its loads need not wait for the table
            n_next = skip_full_tiles(start + step + BLOCK_N, split, SKIP)
            page_of_tile = load_page(pages, n_next, split.stop, CONFIG)
        # Zeros in place of missing keys: zero times NaN is NaN.
        if CONFIG.FORMAT > 0:
            s = quantized_scores(
                queries, k_rows, page, page_token, exists, keys.k_table, rows.batch, n, cache.k_scales, CONFIG, DTYPE
            )
        elif keys.k_table is not None:
            k_offsets = k_start + token * k_stride_token * UNIT
            k_tile = load_rotated(cache.k_ptr, k_offsets, keys.k_table, rows.batch, n, exists, CONFIG)
        elif MASKED:
            k_tile = tl.load(k_ptrs, exists[:, None] & (feature < D), other=0.0)
        elif D == CONFIG.BLOCK_D:
            k_tile = tl.load(k_ptrs)
        else:
            k_tile = tl.load(k_ptrs, feature < D, other=0.0)
        if CONFIG.FORMAT == 0:
            s = tl.dot(queries, k_tile.T, input_precision=CONFIG.PRECISION)
        elif not IS_PLAIN:
            s = s * queries.factor[:, None]
        if scores.cap is not None:
            s = tanh(s * scores.scale, False)
        if SCORE_MOD is not None:
            s *= scores.scale if scores.cap is None else scores.cap
            if CONFIG.INDEX_POSITIONS:  # the origin is the tile's first key
                q_pos = (rows.q_pos - n_start).to(tl.float32)
                k_pos = offset.to(tl.float32)
            else:
                q_pos = rows.q_pos
                index = wide(n - cache.kv_start)
                k_pos = positions_of(cache.positions, rows.batch, n, exists, index, cache.origin)
            s = SCORE_MOD(s, q_pos[:, None], k_pos[None, :], scores.params, NO_FUTURE_KEYS)
        if MASKED:
            ahead = n[None, :] - keys.kv_index[:, None]
            is_attended = exists[None, :]
            if CONFIG.CAUSAL:
                is_attended = is_attended & (ahead <= 0)
            if WINDOWED:
                is_attended = is_attended & (ahead > -keys.window)
                if not CONFIG.CAUSAL:
                    is_attended = is_attended & (ahead < keys.window_right)
            if mask.ptr is not None:
                mask_ptrs = mask.ptr + (wide(n) * mask.stride_key)[None, :]
                is_attended = is_attended & (tl.load(mask_ptrs, exists[None, :], other=0) != 0)
            s = tl.where(is_attended, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * row_scale)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has attended no key yet
        p = tl.exp2(s * pair_scale - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        if CONFIG.FORMAT != 3:
            row_sum = row_sum * alpha + tl.sum(p, 1)

        if CONFIG.FORMAT > 0:
            if CONFIG.FORMAT == 2:
                scale = load_scales(cache.v_scales, page, page_token, exists, CONFIG)
                new_unit = tl.maximum(unit, tl.max(scale, 0))
                p = p * (scale * (1.0 / new_unit))[None, :]
                alpha = alpha * (unit / new_unit)
                unit = new_unit
            p = p.to(DTYPE)
            alpha = alpha[:, None]
            values = load_parts(
                v_rows, cache.v_scales, page, page_token, exists, CONFIG.DV, CONFIG.BLOCK_DV, CONFIG, DTYPE
            )
            if CONFIG.FORMAT == 3:
                v_0, v_1, v_2, v_3 = values
            else:
                v_0, v_1 = values
            acc_o = tl.dot(p, v_0, acc_o * alpha, input_precision=CONFIG.PRECISION)
            acc_1 = tl.dot(p, v_1, acc_1 * alpha, input_precision=CONFIG.PRECISION)
            if CONFIG.FORMAT == 3:
                acc_2 = tl.dot(p, v_2, acc_2 * alpha, input_precision=CONFIG.PRECISION)
                acc_3 = tl.dot(p, v_3, acc_3 * alpha, input_precision=CONFIG.PRECISION)
                # A product sums without waiting for other warps. From a loop's last product Triton learns how warps
                # share them all: by keys and features where it has more columns than rows.
                row_sum = tl.dot(p, ones, row_sum * alpha, input_precision=CONFIG.PRECISION)
        elif MASKED:
            v_tile = tl.load(v_ptrs, exists[:, None] & (feature_v < DV), other=0.0)
        elif DV == CONFIG.BLOCK_DV:
            v_tile = tl.load(v_ptrs)
        else:
            v_tile = tl.load(v_ptrs, feature_v < DV, other=0.0)
        if CONFIG.FORMAT == 0:
            acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o * alpha[:, None], input_precision=CONFIG.PRECISION)
        row_max = new_max
    if CONFIG.FORMAT == 3:
        acc = QuadAccumulator(acc_o, acc_1, acc_2, acc_3, row_max, row_sum)
    elif CONFIG.FORMAT > 0:
        acc = PairAccumulator(acc_o, acc_1, row_max, row_sum, unit)
    else:
        acc = Accumulator(acc_o, row_max, row_sum)
    return acc


@triton.jit
def attend_range(
    acc,
    rows,
    keys,
    cache,
    mask,
    scores,
    SCORE_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Add near or far keys to the accumulator, with queries rotated for them."""
    queries = load_rotated(rows.q_ptr, rows.q_offsets, keys.q_table, rows.batch, keys.q_row, rows.exists, CONFIG)
    if CONFIG.FORMAT > 0:
        queries = prepare_queries(queries, cache.k_scales, keys.k_table is None, CONFIG)
    if CONFIG.SPLIT_MASKED_LOOP:
        acc = mainloop_kv(acc, queries, rows, keys, cache, mask, scores, SCORE_MOD, CONFIG, WINDOWED, False)
    return mainloop_kv(acc, queries, rows, keys, cache, mask, scores, SCORE_MOD, CONFIG, WINDOWED, True)


# Numbers that change as a cache grows: by its length, or by its strides.
OF_CACHE = (
    *("k_stride_batch", "k_stride_head", "k_stride_token", "v_stride_batch", "v_stride_head", "v_stride_token"),
    *("mask_stride_batch", "mask_stride_head", "mask_stride_query", "block_table_stride_batch"),
    *("table_start", "table_rows", "n_pages", "n_splits", "min_split"),
)


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, *OF_CACHE))
def decode_kernel(
    tensors,
    strides,
    k_stride_batch,  # these six in STRIDE_UNITs of elements; or of a page
    k_stride_head,
    k_stride_token,
    v_stride_batch,
    v_stride_head,
    v_stride_token,
    bounds,
    block_table,  # (B, pages of a row); or None
    block_table_stride_batch,
    block_table_stride_page,
    scales,  # `Scales` of quantised pages, or None
    tables,
    table_start,  # q's table of near pairs has a row for each position from this one on; None: one for each query
    table_rows,
    mask,  # as bytes, or None
    mask_stride_batch,
    mask_stride_head,  # None, as that of queries, if all rows attend the same keys
    mask_stride_query,
    mask_stride_key,
    positions_q,  # `Positions`, or None
    positions_k,
    scores,  # `Scores`, whose cap may be None
    window,  # attended keys n are more than kv_index − window
    window_right,  # and less than kv_index + window_right; None: as `window`
    far_window,  # keys so many positions behind or more are far; None: none is
    heads,
    n_queries,
    n_keys,
    n_pages,  # in memory; of a dense cache its batch rows
    n_splits,
    min_split,  # keys of a split, at least: a multiple of BLOCK_N
    SCORE_MOD: tl.constexpr,  # outside CONFIG, where Triton's cache on disk would not hash the function's source
    CONFIG: tl.constexpr,
):
    """Attend to one split of the keys with BLOCK_M rows that share a key head."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    SUM_COLUMNS: tl.constexpr = CONFIG.SUM_COLUMNS
    SPLIT: tl.constexpr = CONFIG.SPLIT
    HAS_FAR: tl.constexpr = far_window is not None
    NEAR_WINDOWED: tl.constexpr = CONFIG.WINDOWED or HAS_FAR
    heads_per_key = heads.heads_per_key

    # === prologue: neighbouring programs share keys, then pages ===
    n_tiles = tl.cdiv(n_queries * heads_per_key, BLOCK_M)
    k_strides = RowStrides(k_stride_batch, k_stride_head, k_stride_token)
    v_strides = RowStrides(v_stride_batch, v_stride_head, v_stride_token)
    program = tl.program_id(0)
    tile = program % n_tiles
    program = program // n_tiles
    kv_head = program % heads.n_kv_heads
    program = program // heads.n_kv_heads
    split_idx = program % n_splits
    batch = program // n_splits

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < n_queries * heads_per_key
    token = row // heads_per_key
    head = kv_head * heads_per_key + row % heads_per_key
    first_result = wide(batch) * (heads.n_kv_heads * heads_per_key) * n_queries
    result = first_result + (head * n_queries + token)  # 32 bits of each row, to hold fewer registers over the loops
    if SPLIT:
        result = result * n_splits + split_idx

    causal_offset = n_keys - n_queries
    if bounds.query_starts is not None:
        causal_offset = tl.load(bounds.query_starts + batch).to(tl.int32)
    if bounds.key_lengths is not None:
        n_keys = tl.minimum(n_keys, tl.load(bounds.key_lengths + batch).to(tl.int32))
    kv_start = 0
    table_row = token
    if table_start is not None:
        table_row = token + causal_offset - table_start
    if bounds.key_starts is not None:
        key_start = tl.load(bounds.key_starts + batch).to(tl.int32)
        kv_start = tl.maximum(key_start, 0)
        if table_start is not None:
            table_row -= key_start
    if table_start is not None:  # whatever the device holds
        table_row = tl.minimum(tl.maximum(table_row, 0), table_rows - 1)
    first = tile * BLOCK_M // heads_per_key + causal_offset
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // heads_per_key, n_queries - 1) + causal_offset
    if window_right is None:
        window_right = window
    near_window = window
    if HAS_FAR:
        # Far pairs are those of causal attention by queries that are `far_window` positions further back.
        far_first = first - far_window
        far_last = last - far_window
        last_far = window - far_window
        far_split = split_keys(
            far_first,
            far_last,
            kv_start,
            n_keys,
            last_far,
            last_far,
            n_splits,
            min_split,
            split_idx,
            CONFIG,
            CONFIG.WINDOWED,
        )
        near_window = far_window
        if CONFIG.WINDOWED:
            near_window = tl.minimum(window, far_window)
    near_split = split_keys(
        first,
        last,
        kv_start,
        n_keys,
        near_window,
        window_right,
        n_splits,
        min_split,
        split_idx,
        CONFIG,
        NEAR_WINDOWED,
    )
    if SPLIT:
        is_empty = near_split.split_start >= near_split.split_stop
        if HAS_FAR:
            is_empty = is_empty & (far_split.split_start >= far_split.split_stop)
        if is_empty:
            tl.store(tensors.lse + result, tl.full((BLOCK_M,), float("-inf"), tl.float32), row_exists)
            return

    q_offsets = row_offsets(strides.q, batch, head, token, CONFIG.STRIDE_UNIT)
    kv_index = token + causal_offset
    origin = key_origin(positions_k, batch)
    q_pos = kv_index
    if not CONFIG.INDEX_POSITIONS:
        q_pos = positions_of(positions_q, batch, token, row_exists, wide(kv_index - kv_start), origin)
    rows = Rows(tensors.q, q_offsets, batch, token, row_exists, q_pos)
    numbers = Scores(None, None, None, scores.scale, scores.cap, scores.exp2_scale)
    if scores.params is not None:
        params = params_of_head(scores, batch, tl.where(row_exists, head, 0))[:, None]
        numbers = Scores(
            params, scores.params_stride, scores.params_stride_batch, scores.scale, scores.cap, scores.exp2_scale
        )
    mask_ptr = None
    if mask is not None:
        mask_ptr = mask + wide(batch) * mask_stride_batch
        if mask_stride_query is not None:
            mask_offsets = wide(head) * mask_stride_head + wide(token) * mask_stride_query
            mask_ptr += tl.where(row_exists, mask_offsets, 0)[:, None]
    key_mask = KeyMask(mask_ptr, mask_stride_key)
    pages = None
    if block_table is not None:
        pages = Pages(block_table + wide(batch) * block_table_stride_batch, block_table_stride_page)
    k_ptr = tensors.k + wide(kv_head) * wide(k_stride_head) * CONFIG.STRIDE_UNIT
    v_ptr = tensors.v + wide(kv_head) * wide(v_stride_head) * CONFIG.STRIDE_UNIT
    # A stride of 1 is a constant, which has no other type.
    k_scales = None
    v_scales = None
    if CONFIG.FORMAT > 0:
        k_scales = HeadScales(
            scales.k_ptr + wide(kv_head) * scales.k_stride_head * CONFIG.SCALE_UNIT,
            scales.k_stride_page,
            scales.k_stride_token,
            scales.k_stride_group,
        )
        v_scales = HeadScales(
            scales.v_ptr + wide(kv_head) * scales.v_stride_head * CONFIG.SCALE_UNIT,
            scales.v_stride_page,
            scales.v_stride_token,
            scales.v_stride_group,
        )
    cache = Cache(k_ptr, k_strides, v_ptr, v_strides, pages, n_pages, positions_k, origin, kv_start, k_scales, v_scales)

    # === mainloop ===
    zeros = tl.zeros((BLOCK_M,), tl.float32)
    row_max, row_sum = begin_rows(zeros, zeros, tensors.first_logits, head, row_exists, 1.0, 1.0)
    if CONFIG.FORMAT == 3:
        zeros = tl.zeros((BLOCK_M, BLOCK_DV // 4), tl.float32)
        row_sum = row_sum[:, None] + tl.zeros((BLOCK_M, SUM_COLUMNS), tl.float32)
        acc = QuadAccumulator(zeros, zeros, zeros, zeros, row_max, row_sum)
    elif CONFIG.FORMAT > 0:
        zeros = tl.zeros((BLOCK_M, BLOCK_DV // 2), tl.float32)
        acc = PairAccumulator(zeros, zeros, row_max, row_sum, tl.full((), 1e-30, tl.float32))
    else:
        acc = Accumulator(tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), row_max, row_sum)
    if HAS_FAR:
        far_range = KeyRange(far_split, kv_index - far_window, last_far, last_far, tables.q_far, token, tables.k_far)
        acc = attend_range(acc, rows, far_range, cache, key_mask, numbers, SCORE_MOD, CONFIG, CONFIG.WINDOWED)
    near_range = KeyRange(near_split, kv_index, near_window, window_right, tables.q, table_row, tables.k)
    acc = attend_range(acc, rows, near_range, cache, key_mask, numbers, SCORE_MOD, CONFIG, NEAR_WINDOWED)

    # === epilogue ===
    row_sum = acc.row_sum
    if CONFIG.FORMAT == 3:
        row_sum = tl.sum(row_sum, 1) / SUM_COLUMNS
    attends = row_sum != 0  # true for NaN, which results must show
    row_sum = tl.where(attends, row_sum, 1.0)
    acc_o = join_parts(acc, CONFIG.FORMAT)
    if CONFIG.FORMAT == 3:
        acc_o = acc_o * SCALE_4BIT
    elif CONFIG.FORMAT == 2:
        acc_o = acc_o * acc.unit
    elif CONFIG.FORMAT == 1:
        acc_o = acc_o * tl.load(cache.v_scales.ptr)
    acc_o = acc_o / row_sum[:, None]
    lse = tl.where(attends, acc.row_max + tl.log2(row_sum), float("-inf"))
    tl.store(tensors.lse + result, lse, row_exists)
    feature = tl.arange(0, BLOCK_DV)[None, :]
    exists = row_exists[:, None] & (feature < CONFIG.DV)
    if SPLIT:
        tl.store(tensors.out + (result[:, None] * CONFIG.DV + feature), acc_o, exists)
    else:
        offsets = row_offsets(strides.out, batch, head, token, 1)
        tl.store(tensors.out + (offsets[:, None] + feature), acc_o.to(tensors.out.dtype.element_ty), exists)


@triton.jit(do_not_specialize=("n_queries", "n_splits"))
def combine_kernel(
    partial_ptr,  # (B, H, Tq, n_splits, Dv), dense, float32
    partial_lse_ptr,  # (B, H, Tq, n_splits), base 2; where it is −inf, the partial output was never written
    out_ptr,  # (B, H, Tq, Dv)
    lse_ptr,  # (B, H, Tq)
    out_strides,  # `RowStrides`, in elements
    first_logits_ptr,  # as of `DecodeTensors`
    n_heads,
    n_queries,
    n_splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Combine the splits' results of one row."""
    row = tl.program_id(0)
    token = row % n_queries
    head = row // n_queries % n_heads
    batch = row // n_queries // n_heads
    feature = tl.arange(0, BLOCK_DV)
    zero = tl.full((), 0.0, tl.float32)
    row_max, row_sum = begin_rows(zero, zero, first_logits_ptr, head, None, 1.0, 1.0)
    acc_o = tl.zeros((BLOCK_DV,), tl.float32)
    for start in range(0, n_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        index = wide(row) * n_splits + split
        exists = split < n_splits
        # Both loads at once: a partial output that need not be read costs less than the wait for its log-sum-exp.
        lse = tl.load(partial_lse_ptr + index, exists, other=float("-inf"))
        partial_ptrs = partial_ptr + (index[:, None] * DV + feature[None, :])
        partial = tl.load(partial_ptrs, exists[:, None] & (feature < DV)[None, :], other=0.0)
        partial = tl.where((lse == float("-inf"))[:, None], 0.0, partial)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(lse - shift)
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 0)
        acc_o = acc_o * alpha + tl.sum(partial * p[:, None], 0)
        row_max = new_max
    attends = row_sum != 0
    row_sum = tl.where(attends, row_sum, 1.0)
    lse = tl.where(attends, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + row, lse)
    offsets = row_offsets(out_strides, batch, head, token, 1) + feature
    tl.store(out_ptr + offsets, (acc_o / row_sum).to(out_ptr.dtype.element_ty), feature < DV)
