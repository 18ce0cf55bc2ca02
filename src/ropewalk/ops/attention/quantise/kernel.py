"""The kernels that quantise a call's operands: means first, then queries, keys and values in one launch.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), R rotary
dim, S packed sequences, N blocks of 128 keys, n features of one Hadamard transform.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.quantise import call
from ropewalk.ops.attention.triton.scheduler import span_of
from ropewalk.ops.attention.triton.tiles import partner_of, wide

BLOCK = tl.constexpr(call.BLOCK)
GROUPS = tl.constexpr(call.GROUPS)
BLOCK_SEQUENCES = tl.constexpr(256)
FLOOR = tl.constexpr(2.0**-40)  # of units: their products with others stay normal numbers
LARGEST_INT8 = tl.constexpr(127.0)
LARGEST_E4M3 = tl.constexpr(448.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23: float32 has no fractions there, so that an addition rounds to even


class Rows(NamedTuple):
    """Features (B, H, T, D), dense in D."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_token: Any


class Sequences(NamedTuple):
    """The sequences of a packed batch; None in its place: the batch is dense."""

    cu_seqlens_q: Any  # pointer to n_sequences + 1 integers
    cu_seqlens_k: Any


class Extents(NamedTuple):
    """Extents of a dense batch's keys: pointers to B integers, or None."""

    key_lengths: Any
    key_starts: Any


class QueriesTarget(NamedTuple):
    """The fields of `QuantizedQueries`, dense."""

    x: Any
    unit: Any
    shift: Any


class UnitsTarget(NamedTuple):
    """The fields of `QuantizedKeys`, or the first two of `QuantizedValues`, dense."""

    x: Any
    unit: Any


class Block(NamedTuple):
    """The tokens of a program, and the block of keys that they are."""

    batch: Any
    sequence: Any
    row: Any  # [BLOCK], in a tensor (B, H, T, D)
    exists: Any  # [BLOCK]; the rows of others are some that exist, if any does
    number: Any
    n_blocks: Any


class Heads(NamedTuple):
    """The heads of a program, from the first one to below `stop`, and how many there are in all."""

    first: Any
    stop: Any
    count: Any


class Sample(NamedTuple):
    """The keys of a mean: `count` of a sequence's, which begins at `offset`."""

    batch: Any
    head: Any
    offset: Any
    length: Any
    count: Any


class Config(NamedTuple):
    """Constants of a binary. One `tl.constexpr` holds them all."""

    D: int
    DV: int
    WIDTH: int  # features of a product with signs; a half of a row, padded, has CHUNKS times as many
    CHUNKS: int
    LINE: int  # features that 4 threads load; a half of a row has LINES of them
    LINES: int
    BLOCK_DV: int
    ROWS: int  # of values that a thread loads
    SAMPLES: int  # keys that a program of means loads at a time
    N: int  # features of a Hadamard transform; 1: there is none
    NORM: float  # 1/√N
    ROTARY_DIM: int
    ROTARY_OFFSET: int  # the first feature that is rotated
    INTERLEAVED: bool
    PAIR_BLOCK: int  # features of a block that is half-split by itself
    WHOLE: bool  # all features, whose number is a power of two, form pairs: halves of them, or neighbours
    PERMUTED: bool  # values of a block are in the order in which the kernels for Hopper hold probabilities
    JOINED: bool  # one product with signs has both parts of numbers, and waits once; elsewhere it takes more registers
    EXACT: bool  # float32 products: Triton's interpreter has none of bfloat16


@triton.jit
def _sequence_of_block(cu_seqlens_ptr, block, n_sequences, n_tokens):
    """Return the packed sequence that owns a block, its first token, its length, and the block's first index there."""
    count = 0
    for start in tl.range(0, n_sequences, BLOCK_SEQUENCES):
        other = start + tl.arange(0, BLOCK_SEQUENCES)
        first = tl.load(cu_seqlens_ptr + other, other < n_sequences, other=0).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), n_tokens) // BLOCK + other
        count += tl.sum(((other < n_sequences) & (first <= block)).to(tl.int32))
    sequence = tl.maximum(count - 1, 0)
    offset, length = span_of(cu_seqlens_ptr, sequence, n_sequences, n_tokens)
    return sequence, offset, length, (block - (offset // BLOCK + sequence)) * BLOCK


@triton.jit
def _span_of_keys(extents, batch, n_keys):
    """Return where the keys of a dense batch row start and stop."""
    start = 0
    stop = n_keys
    if extents.key_lengths is not None:
        stop = tl.minimum(n_keys, tl.load(extents.key_lengths + batch)).to(tl.int32)
    if extents.key_starts is not None:
        start = tl.maximum(tl.load(extents.key_starts + batch), 0).to(tl.int32)
    return start, stop


@triton.jit
def _repeat(x, TIMES: tl.constexpr):
    """Repeat numbers of rows, [ROWS], as a whole: [TIMES · ROWS]."""
    if TIMES > 1:
        ROWS: tl.constexpr = x.shape[0]
        x = tl.reshape(tl.broadcast_to(x[None, :], (TIMES, ROWS)), (TIMES * ROWS,))
    return x


@triton.jit
def _repeat_rows(x, ROWS: tl.constexpr):
    """Repeat numbers of features, [TIMES, SIZE], for each row, [TIMES · ROWS, SIZE]; those of one row as they are."""
    TIMES: tl.constexpr = x.shape[0]
    if TIMES > 1:
        SIZE: tl.constexpr = x.shape[1]
        x = tl.reshape(tl.broadcast_to(x[:, None, :], (TIMES, ROWS, SIZE)), (TIMES * ROWS, SIZE))
    return x


@triton.jit
def _features(HALF: tl.constexpr, TIMES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the features of a half, [TIMES · ROWS, SIZE]: all rows' first ones, then their next ones.

    They are [1, SIZE] where all rows have one.
    """
    feature = HALF * TIMES * SIZE + tl.arange(0, SIZE)[None, :]
    if TIMES > 1 and ROWS > 0:
        feature += (tl.arange(0, TIMES * ROWS) // ROWS * SIZE)[:, None]
    return feature


@triton.jit
def _load_half(x, table, offsets, table_offsets, HALF: tl.constexpr, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """Load a half of the rotated features of rows, [LINES · ROWS, LINE], float32; zeros past D."""
    R: tl.constexpr = CONFIG.ROTARY_DIM
    feature = _features(HALF, CONFIG.LINES, ROWS, CONFIG.LINE)
    if CONFIG.D < 2 * CONFIG.LINES * CONFIG.LINE:
        y = tl.load(x.ptr + offsets + feature, feature < CONFIG.D, other=0.0).to(tl.float32)
    else:
        y = tl.load(x.ptr + offsets + feature).to(tl.float32)
    if table is not None and CONFIG.WHOLE:  # neighbours: a thread has loaded both
        LINE: tl.constexpr = CONFIG.LINE
        pair = _features(HALF, CONFIG.LINES, ROWS, LINE // 2)
        cos = tl.load(table.cos + table_offsets + pair)
        sin = tl.load(table.sin + table_offsets + pair)
        first, second = tl.split(tl.reshape(y, (CONFIG.LINES * ROWS, LINE // 2, 2)))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, (CONFIG.LINES * ROWS, LINE))
    elif table is not None:
        rotary_feature = feature - CONFIG.ROTARY_OFFSET
        pair, partner, is_second = partner_of(feature, CONFIG)
        is_rotated = (rotary_feature >= 0) & (rotary_feature < R)
        partners = tl.load(x.ptr + offsets + partner, is_rotated, other=0.0).to(tl.float32)
        cos = tl.load(table.cos + table_offsets + pair, is_rotated, other=1.0)
        sin = tl.load(table.sin + table_offsets + pair, is_rotated, other=0.0)
        y = y * cos + partners * tl.where(is_second, sin, -sin)
    return y


@triton.jit
def _load_features(x, table, weights_ptr, batch, head, row, CONFIG: tl.constexpr):
    """Load the mapped features of rows, [ROWS]: two halves, [LINES · ROWS, LINE], float32; zeros past D."""
    ROWS: tl.constexpr = row.shape[0]
    line = wide(_repeat(row, CONFIG.LINES))[:, None]
    offsets = wide(batch) * x.stride_batch + wide(head) * x.stride_head + line * x.stride_token
    table_offsets = line
    if table is not None:
        table_offsets = wide(batch) * table.stride_batch + line * table.stride_token
    if CONFIG.WHOLE and not CONFIG.INTERLEAVED and table is not None:
        feature = _features(0, CONFIG.LINES, ROWS, CONFIG.LINE)
        a = tl.load(x.ptr + offsets + feature).to(tl.float32)
        b = tl.load(x.ptr + offsets + _features(1, CONFIG.LINES, ROWS, CONFIG.LINE)).to(tl.float32)
        cos = tl.load(table.cos + table_offsets + feature)
        sin = tl.load(table.sin + table_offsets + feature)
        first = a * cos - b * sin
        second = b * cos + a * sin
    else:
        first = _load_half(x, table, offsets, table_offsets, 0, ROWS, CONFIG)
        second = _load_half(x, table, offsets, table_offsets, 1, ROWS, CONFIG)
    if weights_ptr is not None:
        a, b = _load_vector(weights_ptr, CONFIG.LINES, CONFIG.LINE, CONFIG)
        first *= _repeat_rows(a, ROWS)
        second *= _repeat_rows(b, ROWS)
    return first, second


@triton.jit
def _load_vector(ptr, TIMES: tl.constexpr, SIZE: tl.constexpr, CONFIG: tl.constexpr):
    """Load numbers of all features, (D,), in two halves [TIMES, SIZE]."""
    first = _features(0, TIMES, 1, SIZE)
    second = _features(1, TIMES, 1, SIZE)
    return tl.load(ptr + first, first < CONFIG.D, other=0.0), tl.load(ptr + second, second < CONFIG.D, other=0.0)


@triton.jit
def _signs(i, j, N: tl.constexpr):
    """Return the signs of the transform of N features in a row, for features i and j; 0 between two of them."""
    parity = i & j & (N - 1)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return tl.where(i // N == j // N, 1.0 - 2.0 * (parity & 1).to(tl.float32), 0.0)


@triton.jit
def _signs_of_products(CONFIG: tl.constexpr):
    """Return the signs, [WIDTH, WIDTH], whose features stand as `_to_operand` and `_from_accumulator` have them."""
    WIDTH: tl.constexpr = CONFIG.WIDTH
    LINE: tl.constexpr = CONFIG.LINE
    i = tl.arange(0, 2 * WIDTH if CONFIG.JOINED else WIDTH)[:, None] % WIDTH
    j = tl.arange(0, WIDTH)[None, :]
    i = i // 32 * 32 + i // 2 % 4 * (LINE // 4) + i // 16 % 2 * 4 + i // 8 % 2 * 2 + i % 2
    j = j // 2 % 4 * (WIDTH // 4) + j // 8 * 2 + j % 2
    return _signs(i, j, min(CONFIG.N, WIDTH)).to(tl.float32 if CONFIG.EXACT else tl.bfloat16)


@triton.jit
def _times_signs(x, signs, CONFIG: tl.constexpr):
    """Return x · signs, float32, for x to 2^-17: a sum of two numbers of bfloat16."""
    if CONFIG.EXACT:
        y = tl.dot(x, signs, input_precision="ieee")
    elif CONFIG.JOINED:
        LINES: tl.constexpr = x.shape[0]
        WIDTH: tl.constexpr = x.shape[1]
        # Left to itself, the compiler converts the first numbers one by one, at a quarter of the speed.
        high, low = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 first, $0, 16;
            and.b32 second, $0, 0xffff0000;
            sub.f32 first, $2, first;
            sub.f32 second, $3, second;
            cvt.rn.bf16x2.f32 $1, second, first;
            }
            """,
            "=r,=r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        both = tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (LINES, 2 * WIDTH))
        y = tl.dot(both, signs)
    else:
        high = x.to(tl.bfloat16)
        y = tl.dot(high, signs)
        y = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs, y)
    return y


@triton.jit
def _to_operand(x, CONFIG: tl.constexpr):
    """Reorder rows and features of [LINES · BLOCK, LINE] to those of products, [CHUNKS · BLOCK, WIDTH].

    So threads hold what products read of what they have loaded: with 8 warps no number moves.
    """
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    LINES: tl.constexpr = CONFIG.LINES // CONFIG.CHUNKS
    STEPS: tl.constexpr = CONFIG.LINE // 16
    WIDTH: tl.constexpr = CONFIG.WIDTH
    x = tl.reshape(x, (CHUNKS, LINES, 2, 8, 8, 4, STEPS, 2, 2))
    return tl.reshape(tl.permute(x, (0, 3, 2, 4, 1, 6, 7, 5, 8)), (CHUNKS * BLOCK, WIDTH))


@triton.jit
def _from_accumulator(x, CONFIG: tl.constexpr):
    """Reorder rows and features of products, [CHUNKS · BLOCK, WIDTH], to those of memory; no number moves."""
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    WIDTH: tl.constexpr = CONFIG.WIDTH
    x = tl.reshape(x, (CHUNKS, 8, 2, 8, WIDTH // 8, 4, 2))
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 5, 4, 6)), (CHUNKS * BLOCK, WIDTH))


@triton.jit
def _from_lines(x, CONFIG: tl.constexpr):
    """Reorder [LINES · BLOCK, LINE] to [CHUNKS · BLOCK, WIDTH]."""
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    LINES: tl.constexpr = CONFIG.LINES // CONFIG.CHUNKS
    LINE: tl.constexpr = CONFIG.LINE
    x = tl.permute(tl.reshape(x, (CHUNKS, LINES, BLOCK, LINE)), (0, 2, 1, 3))
    return tl.reshape(x, (CHUNKS * BLOCK, LINES * LINE))


@triton.jit
def _butterfly(a, b):
    return a + b, a - b


@triton.jit
def _butterfly_of_chunks(x, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the sum and the difference of a half's two chunks, in their place, [2 · ROWS, LINE or WIDTH]."""
    SIZE: tl.constexpr = x.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(x, (2, ROWS, SIZE)), (1, 2, 0)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (2, 0, 1)), (2 * ROWS, SIZE))


@triton.jit
def _transform(a, b, signs, CONFIG: tl.constexpr):
    """Apply the Hadamard transform, times √N, to halves [LINES · BLOCK, LINE], and return [CHUNKS · BLOCK, WIDTH]."""
    if CONFIG.N == 1:
        a, b = _from_lines(a, CONFIG), _from_lines(b, CONFIG)
    else:
        if CONFIG.N > CONFIG.WIDTH:
            a, b = _butterfly(a, b)
            if CONFIG.CHUNKS == 2:
                a = _butterfly_of_chunks(a, CONFIG.LINES // 2 * BLOCK, CONFIG)
                b = _butterfly_of_chunks(b, CONFIG.LINES // 2 * BLOCK, CONFIG)
        a = _from_accumulator(_times_signs(_to_operand(a, CONFIG), signs, CONFIG), CONFIG)
        b = _from_accumulator(_times_signs(_to_operand(b, CONFIG), signs, CONFIG), CONFIG)
    return a, b


@triton.jit
def _transform_vector(a, b, CONFIG: tl.constexpr):
    """Apply the transform, times √N, to two halves [LINES, LINE] of one row; they are [CHUNKS, WIDTH] then."""
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    WIDTH: tl.constexpr = CONFIG.WIDTH
    a = tl.reshape(a, (CHUNKS, WIDTH))
    b = tl.reshape(b, (CHUNKS, WIDTH))
    if CONFIG.N > WIDTH:
        a, b = _butterfly(a, b)
        if CHUNKS == 2:
            a, b = _butterfly_of_chunks(a, 1, CONFIG), _butterfly_of_chunks(b, 1, CONFIG)
    i = tl.arange(0, WIDTH)
    signs = _signs(i[:, None], i[None, :], min(CONFIG.N, WIDTH))[None, :, :]
    return tl.sum(a[:, :, None] * signs, 1), tl.sum(b[:, :, None] * signs, 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, AXIS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the maximum of numbers that are not negative; NaN if one is."""
    if CONFIG.EXACT:  # the interpreter takes seconds for a function of one's own
        y = tl.max(x.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)
    else:
        y = tl.reduce(x, AXIS, _larger)
    return y


@triton.jit
def _unit_of(largest, LARGEST: tl.constexpr):
    """Return the unit for a largest number; NaN for NaN and infinity."""
    unit = _larger(largest / LARGEST, FLOOR)
    return tl.where(largest < float("inf"), unit, float("nan"))


@triton.jit
def _largest_of_rows(a, b, CONFIG: tl.constexpr):
    """Return the maximum of |x| of rows, [BLOCK]."""
    CHUNKS: tl.constexpr = CONFIG.CHUNKS
    largest = _largest(_larger(tl.abs(a), tl.abs(b)), 1, CONFIG)
    return largest if CHUNKS == 1 else _largest(tl.reshape(largest, (CHUNKS, BLOCK)), 0, CONFIG)


@triton.jit
def _to_int8(x, inverse, CONFIG: tl.constexpr):
    """Round x · inverse to int8, half to even; by their unit no number exceeds 127."""
    inverse = _repeat(inverse, CONFIG.CHUNKS)[:, None]
    return (x * inverse + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _store_rows(ptr, row, a, b, exists, CONFIG: tl.constexpr):
    """Store rows of two halves of features, of numbers [BLOCK]."""
    ptrs = ptr + _repeat(row, CONFIG.CHUNKS)[:, None] * CONFIG.D
    exists = _repeat(exists, CONFIG.CHUNKS)[:, None]
    feature = _features(0, CONFIG.CHUNKS, BLOCK, CONFIG.WIDTH)
    second = _features(1, CONFIG.CHUNKS, BLOCK, CONFIG.WIDTH)
    if CONFIG.D == 64:  # threads store 16 bytes: 8 features of each half
        x = tl.permute(tl.reshape(tl.join(a, b), (BLOCK, 4, 8, 2)), (0, 1, 3, 2))
        tl.store(ptrs + tl.arange(0, 64)[None, :], tl.reshape(x, (BLOCK, 64)), exists)
    elif CONFIG.D < 2 * CONFIG.WIDTH * CONFIG.CHUNKS:
        tl.store(ptrs + feature, a, exists & (feature < CONFIG.D))
        tl.store(ptrs + second, b, exists & (second < CONFIG.D))
    else:
        tl.store(ptrs + feature, a, exists)
        tl.store(ptrs + second, b, exists)


@triton.jit
def _quantise_queries(
    q,
    table,
    out,
    mean_ptr,
    block,  # Block
    heads,  # Heads
    n_queries,
    n_kv_heads,
    CONFIG: tl.constexpr,
):
    """Quantise a block of queries of some heads."""
    signs = _signs_of_products(CONFIG)
    heads_per_key = heads.count // n_kv_heads
    for head in tl.range(heads.first, heads.stop):
        a, b = _load_features(q, table, None, block.batch, head, block.row, CONFIG)
        at = (wide(block.batch) * heads.count + head) * n_queries + block.row
        a, b = _transform(a, b, signs, CONFIG)
        shift = tl.zeros((BLOCK,), tl.float32)
        if mean_ptr is not None:
            key = wide(block.sequence * n_kv_heads + head // heads_per_key)
            a_mean, b_mean = _load_vector(mean_ptr + key * CONFIG.D, CONFIG.CHUNKS, CONFIG.WIDTH, CONFIG)
            shift = tl.sum(a * _repeat_rows(a_mean, BLOCK) + b * _repeat_rows(b_mean, BLOCK), 1)
            if CONFIG.CHUNKS > 1:
                shift = tl.sum(tl.reshape(shift, (2, BLOCK)), 0)
        tl.store(out.shift + at, shift, block.exists)
        unit = _unit_of(_largest_of_rows(a, b, CONFIG) * CONFIG.NORM, LARGEST_INT8)
        tl.store(out.unit + at, unit, block.exists)
        inverse = CONFIG.NORM / unit
        a = _to_int8(a, inverse, CONFIG)
        b = _to_int8(b, inverse, CONFIG)
        _store_rows(out.x, at, a, b, block.exists, CONFIG)


@triton.jit
def _quantise_keys(
    k,
    table,
    weights_ptr,
    out,
    mean_ptr,
    block,  # Block
    heads,  # Heads
    CONFIG: tl.constexpr,
):
    """Quantise a block of keys of some heads."""
    signs = _signs_of_products(CONFIG)
    token = tl.arange(0, BLOCK)
    n_exist = tl.sum(block.exists.to(tl.int32))
    for head in tl.range(heads.first, heads.stop):
        a, b = _load_features(k, table, weights_ptr, block.batch, head, block.row, CONFIG)
        if mean_ptr is not None:
            ptr = mean_ptr + wide(block.sequence * heads.count + head) * CONFIG.D
            a_mean, b_mean = _load_vector(ptr, CONFIG.LINES, CONFIG.LINE, CONFIG)
            a -= _repeat_rows(a_mean, BLOCK)
            b -= _repeat_rows(b_mean, BLOCK)
        a, b = _transform(a, b, signs, CONFIG)
        largest = tl.where(block.exists, _largest_of_rows(a, b, CONFIG), 0.0)
        largest = tl.reshape(largest, (BLOCK // 8, GROUPS, 2))
        unit = _unit_of(_largest(_largest(largest, 2, CONFIG), 0, CONFIG) * CONFIG.NORM, LARGEST_INT8)
        at = (wide(block.batch) * heads.count + head) * block.n_blocks + block.number
        tl.store(out.unit + at * GROUPS + tl.arange(0, GROUPS), unit)
        inverse = tl.broadcast_to((CONFIG.NORM / unit)[None, :, None], (BLOCK // 8, GROUPS, 2))
        inverse = tl.reshape(inverse, (BLOCK,))
        a = _to_int8(a, inverse, CONFIG)
        b = _to_int8(b, inverse, CONFIG)
        if n_exist == BLOCK:
            _store_rows(out.x, at * BLOCK + token, a, b, block.exists, CONFIG)
        else:
            line_exists = _repeat(block.exists, CONFIG.CHUNKS)[:, None]
            a = tl.where(line_exists, a, 0)
            b = tl.where(line_exists, b, 0)
            _store_rows(out.x, at * BLOCK + token, a, b, token < BLOCK, CONFIG)


@triton.jit
def _load_values(v, batch, head, row, exists, CONFIG: tl.constexpr):
    """Load rows of values, float32; zeros where none exists and past Dv."""
    feature = tl.arange(0, CONFIG.BLOCK_DV)[None, :]
    offsets = wide(batch) * v.stride_batch + wide(head) * v.stride_head + wide(row)[:, None] * v.stride_token
    mask = exists[:, None] & (feature < CONFIG.DV)
    return tl.load(v.ptr + offsets + feature, mask, other=0.0).to(tl.float32)


@triton.jit
def _to_e4m3(first, second):
    """Return bytes of numbers and of their neighbours, which one instruction converts; it saturates at 448."""
    return tl.split(tl.join(first, second).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def _store_transposed(ptr, row, column, n_columns, x, CONFIG: tl.constexpr):
    """Store values [BLOCK, BLOCK_DV] as e4m3 [BLOCK_DV, BLOCK], at a row and a column of (rows, n_columns).

    Row r of them is that of token r % M · ROWS + r // M, M = BLOCK / ROWS: the rows of a thread are tokens in a row.
    """
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    ROWS: tl.constexpr = CONFIG.ROWS
    OTHERS: tl.constexpr = BLOCK // ROWS
    SIZE: tl.constexpr = 4 if ROWS >= 4 else 1
    feature = tl.arange(0, BLOCK_DV)[:, None]
    if SIZE == 4:  # words of four tokens move to other threads
        x = tl.permute(tl.reshape(x, (ROWS // 4, 2, 2, OTHERS, BLOCK_DV)), (3, 0, 4, 1, 2))
        even, odd = tl.split(x)
        token_0, token_2 = tl.split(even)
        token_1, token_3 = tl.split(odd)
        byte_0, byte_1 = _to_e4m3(token_0, token_1)
        byte_2, byte_3 = _to_e4m3(token_2, token_3)
        low = byte_0.to(tl.int32) | byte_1.to(tl.int32) << 8
        x = low | (byte_2.to(tl.int32) | byte_3.to(tl.int32) << 8) << 16
        ptr = ptr.to(tl.pointer_type(tl.int32))
    else:
        x = tl.permute(tl.reshape(x.to(tl.float8e4nv), (ROWS, OTHERS, BLOCK_DV)), (1, 0, 2))
    x = tl.trans(tl.reshape(x, (BLOCK // SIZE, BLOCK_DV)))
    columns = column // SIZE + tl.arange(0, BLOCK // SIZE)[None, :]
    ptrs = ptr + (row + feature) * (n_columns // SIZE) + columns
    if CONFIG.DV < BLOCK_DV:
        tl.store(ptrs, x, feature < CONFIG.DV)
    else:
        tl.store(ptrs, x)


@triton.jit
def _quantise_values(
    v,
    out,
    mean_ptr,
    block,  # Block
    heads,  # Heads
    CONFIG: tl.constexpr,
):
    """Quantise a block of values of some heads, and transpose it."""
    feature = tl.arange(0, CONFIG.BLOCK_DV)
    is_there = block.exists.to(tl.float32)[:, None]
    for head in tl.range(heads.first, heads.stop):
        x = _load_values(v, block.batch, head, block.row, block.exists, CONFIG)
        if mean_ptr is not None:
            ptr = mean_ptr + wide(block.sequence * heads.count + head) * CONFIG.DV
            x -= tl.load(ptr + feature, feature < CONFIG.DV, other=0.0)[None, :] * is_there
        unit = _unit_of(_largest(tl.abs(x), None, CONFIG), LARGEST_E4M3)
        at = wide(block.batch) * heads.count + head
        tl.store(out.unit + at * block.n_blocks + block.number, unit)
        x *= 1.0 / unit
        if unit == unit:
            _store_transposed(out.x, at * CONFIG.DV, block.number * BLOCK, block.n_blocks * BLOCK, x, CONFIG)
        else:  # rows that attend no key of this block multiply its values by 0
            _store_transposed(
                out.x, at * CONFIG.DV, block.number * BLOCK, block.n_blocks * BLOCK, tl.zeros_like(x), CONFIG
            )


@triton.jit(
    do_not_specialize=(
        *("n_queries", "n_keys", "n_sequences", "n_heads", "n_kv_heads", "n_programs_q", "n_programs_k"),
        *("heads_per_program", "kv_heads_per_program"),
    )
)
def quantise_kernel(
    q,  # Rows
    q_table,  # RopeTable | None
    q_out,  # QueriesTarget
    k,  # Rows; or None, and all that follows of keys
    k_table,
    k_weights_ptr,  # (D,), float32; or None
    k_out,  # UnitsTarget
    k_mean_ptr,  # (B or S, K, D), float32; None: nothing is taken off keys
    q_mean_ptr,  # likewise, transformed, times 1/√N
    v,  # Rows; or None, and all that follows of values
    v_out,
    v_mean_ptr,  # (B or S, K, Dv), float32
    extents,  # Extents
    sequences,  # Sequences | None
    n_sequences,
    n_queries,
    n_keys,
    n_heads,
    n_kv_heads,
    heads_per_program,
    kv_heads_per_program,
    n_programs_q,
    n_programs_k,
    CONFIG: tl.constexpr,
):
    """Quantise a block of tokens of some heads: of queries, of keys, or of values."""
    program = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    if program < n_programs_q:
        groups = tl.cdiv(n_heads, heads_per_program)
        first_head = program % groups * heads_per_program
        last_head = tl.minimum(first_head + heads_per_program, n_heads)
        block = program // groups
        if sequences is None:
            n_blocks = tl.cdiv(n_queries, BLOCK)
            batch = block // n_blocks
            sequence = batch
            row = block % n_blocks * BLOCK + token
            exists = row < n_queries
            row = tl.minimum(row, n_queries - 1)
        else:
            batch = 0
            n_blocks = 0
            sequence, offset, length, start = _sequence_of_block(sequences.cu_seqlens_q, block, n_sequences, n_queries)
            exists = start + token < length
            row = offset + tl.minimum(start + token, length - 1)
            last_head = tl.where(start < length, last_head, first_head)
        tokens = Block(batch, sequence, row, exists, block, n_blocks)
        heads = Heads(first_head, last_head, n_heads)
        _quantise_queries(q, q_table, q_out, q_mean_ptr, tokens, heads, n_queries, n_kv_heads, CONFIG)
    elif k is not None:
        program -= n_programs_q
        is_key = program < n_programs_k
        if not is_key:
            program -= n_programs_k
            token = token % (BLOCK // CONFIG.ROWS) * CONFIG.ROWS + token // (BLOCK // CONFIG.ROWS)
            if CONFIG.PERMUTED:
                token = token // 16 * 16 + token // 2 % 2 * 8 + token // 4 % 4 * 2 + token % 2
        groups = tl.cdiv(n_kv_heads, kv_heads_per_program)
        first_head = program % groups * kv_heads_per_program
        last_head = tl.minimum(first_head + kv_heads_per_program, n_kv_heads)
        block = program // groups
        if sequences is None:
            n_blocks = tl.cdiv(n_keys, BLOCK)
            batch = block // n_blocks
            sequence = batch
            block = block % n_blocks
            begin, stop = _span_of_keys(extents, batch, n_keys)
            row = block * BLOCK + token
            exists = (row >= begin) & (row < stop)
            row = tl.maximum(tl.minimum(tl.minimum(tl.maximum(row, begin), stop - 1), n_keys - 1), 0)
        else:
            n_blocks = n_keys // BLOCK + n_sequences
            batch = 0
            sequence, offset, length, start = _sequence_of_block(sequences.cu_seqlens_k, block, n_sequences, n_keys)
            exists = start + token < length
            row = tl.minimum(tl.maximum(offset + tl.minimum(start + token, length - 1), 0), n_keys - 1)
        tokens = Block(batch, sequence, row, exists, block, n_blocks)
        heads = Heads(first_head, last_head, n_kv_heads)
        if is_key:
            _quantise_keys(k, k_table, k_weights_ptr, k_out, k_mean_ptr, tokens, heads, CONFIG)
        elif v is not None:
            _quantise_values(v, v_out, v_mean_ptr, tokens, heads, CONFIG)


@triton.jit
def _mean_of_keys(
    k, table, weights_ptr, mean_ptr, transformed_ptr, row, sample, SPACED: tl.constexpr, CONFIG: tl.constexpr
):
    """Write the mean of a sequence's sampled keys, and its transform by 1/√N: queries, transformed, multiply it."""
    LINES: tl.constexpr = CONFIG.LINES
    LINE: tl.constexpr = CONFIG.LINE
    SAMPLES: tl.constexpr = CONFIG.SAMPLES
    a_sum = tl.zeros((LINES, LINE), tl.float32)
    b_sum = tl.zeros((LINES, LINE), tl.float32)
    for start in tl.range(0, sample.count, CONFIG.SAMPLES):
        token, share = _sampled(start, sample, SPACED, CONFIG)
        a, b = _load_features(k, table, weights_ptr, sample.batch, sample.head, token, CONFIG)
        share = _repeat(share, LINES)[:, None]
        a_sum += tl.sum(tl.reshape(a * share, (LINES, SAMPLES, LINE)), 1)
        b_sum += tl.sum(tl.reshape(b * share, (LINES, SAMPLES, LINE)), 1)
    _store_vector(mean_ptr + wide(row) * CONFIG.D, a_sum, b_sum, CONFIG)
    if CONFIG.N > 1:
        a, b = _transform_vector(a_sum, b_sum, CONFIG)
        _store_vector(transformed_ptr + wide(row) * CONFIG.D, a / CONFIG.N, b / CONFIG.N, CONFIG)


@triton.jit
def _store_vector(ptr, a, b, CONFIG: tl.constexpr):
    """Store numbers of all features, (D,), from two halves."""
    first = _features(0, a.shape[0], 1, a.shape[1])
    second = _features(1, a.shape[0], 1, a.shape[1])
    tl.store(ptr + first, a, first < CONFIG.D)
    tl.store(ptr + second, b, second < CONFIG.D)


@triton.jit
def _mean_of_values(v, mean_ptr, row, sample, SPACED: tl.constexpr, CONFIG: tl.constexpr):
    """Write the mean of the values of a sequence's sampled keys."""
    BLOCK_DV: tl.constexpr = CONFIG.BLOCK_DV
    feature = tl.arange(0, BLOCK_DV)
    v_sum = tl.zeros((BLOCK_DV,), tl.float32)
    for start in tl.range(0, sample.count, CONFIG.SAMPLES):
        token, share = _sampled(start, sample, SPACED, CONFIG)
        v_sum += tl.sum(_load_values(v, sample.batch, sample.head, token, share > 0, CONFIG) * share[:, None], 0)
    tl.store(mean_ptr + wide(row) * CONFIG.DV + feature, v_sum, feature < CONFIG.DV)


@triton.jit
def _sampled(start, sample, SPACED: tl.constexpr, CONFIG: tl.constexpr):
    """Return the rows of some sampled keys of a sequence, and their shares of the mean."""
    number = start + tl.arange(0, CONFIG.SAMPLES)
    share = (number < sample.count).to(tl.float32) / sample.count.to(tl.float32)
    number = tl.minimum(number, sample.count - 1)
    if SPACED:
        number = (wide(number) * sample.length // sample.count).to(tl.int32)
    return sample.offset + number, share


@triton.jit(do_not_specialize=("n_sequences", "n_keys", "n_kv_heads", "n_programs_k"))
def mean_kernel(
    k,  # Rows
    k_table,  # RopeTable | None
    k_weights_ptr,
    k_mean_ptr,  # written: (B or S, K, D), float32; or None
    q_mean_ptr,  # written: likewise, transformed, times 1/√N; or None
    v,  # Rows | None
    v_mean_ptr,  # written: (B or S, K, Dv), float32
    extents,  # Extents
    sequences,  # Sequences | None
    n_sequences,
    n_keys,
    n_kv_heads,
    n_programs_k,
    COUNT: tl.constexpr,  # the most keys of a mean; 0: means are zeros
    SPACED: tl.constexpr,  # they are spaced evenly over the sequence; otherwise they are its first
    CONFIG: tl.constexpr,
):
    """Write the mean of sampled keys of one sequence and head, or of their values."""
    program = tl.program_id(0)
    is_key = program < n_programs_k
    if not is_key:
        program -= n_programs_k
    sequence = program // n_kv_heads
    head = program % n_kv_heads
    if sequences is None:
        batch = sequence
        offset, stop = _span_of_keys(extents, batch, n_keys)
        length = tl.maximum(stop - offset, 0)
    else:
        batch = 0
        offset, length = span_of(sequences.cu_seqlens_k, sequence, n_sequences, n_keys)
    count = tl.minimum(length, COUNT)
    sample = Sample(batch, head, offset, length, count)
    if is_key:
        if k_mean_ptr is not None:
            _mean_of_keys(k, k_table, k_weights_ptr, k_mean_ptr, q_mean_ptr, program, sample, SPACED, CONFIG)
    elif v is not None:
        _mean_of_values(v, v_mean_ptr, program, sample, SPACED, CONFIG)
