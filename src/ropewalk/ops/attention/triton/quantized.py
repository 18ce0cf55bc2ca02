"""Tiles of 8-bit operands: their units, and the products that these multiply."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.quantise import call as quantise
from ropewalk.ops.attention.triton.arguments import QuantizedBlocks, QuantizedRows
from ropewalk.ops.attention.triton.tiles import wide

BLOCK = tl.constexpr(quantise.BLOCK)
GROUPS = tl.constexpr(quantise.GROUPS)
EXPONENT = tl.constexpr(8)  # P's largest number in e4m3 is 2⁸, of 448 that there are: smaller ones have more bits


@triton.jit
def describe(x, batch, n_heads, n_rows, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a descriptor of a `RowTarget` of n_rows rows, for its batch rows up to one, and tiles of BLOCK_ROWS.

    Where a GPU has no TMA, those of the host become one load for each element; of these the compiler knows the strides.
    """
    return tl.make_tensor_descriptor(
        x.ptr,
        [batch + 1, n_heads, n_rows, x.head_dim],
        [wide(x.stride_batch), wide(x.stride_head), wide(x.stride_token), 1],
        [1, 1, BLOCK_ROWS, BLOCK_D],
    )


@triton.jit
def first_block(k_offset, sequence, PACKED: tl.constexpr):
    """Return the first block of a sequence whose keys begin at an offset in a packed batch; 0 in a dense one."""
    block = 0
    if PACKED:
        block = k_offset // BLOCK + tl.maximum(sequence, 0)
    return block


@triton.jit
def query_rows(x, unit_ptr, shift_ptr, row):
    """Return queries whose numbers begin at a row of all heads."""
    return QuantizedRows(x, unit_ptr + row, shift_ptr + row)


@triton.jit
def key_blocks(x, unit_ptr, unit, block):
    """Return keys or values whose units begin at one of all heads, and whose rows at a block."""
    return QuantizedBlocks(x, unit_ptr + unit, block * BLOCK)


@triton.jit
def load_query_units(q, start, n_queries, BLOCK_M: tl.constexpr):
    """Load the units and shifts of a tile of queries."""
    row = start + tl.arange(0, BLOCK_M)
    unit = tl.load(q.unit + row, row < n_queries, other=0.0)
    shift = tl.load(q.shift + row, row < n_queries, other=0.0)
    return unit, shift


@triton.jit
def load_key_units(unit_ptr, start, BLOCK_N: tl.constexpr):
    """Load the unit of each key's group."""
    group = tl.arange(0, BLOCK_N) % 8 // 2
    return tl.load(unit_ptr + start // BLOCK * GROUPS + group)


@triton.jit
def scale_products(products, queries, key_units):
    """Return products of features, float32, of the integers'."""
    return products.to(tl.float32) * key_units[None, :] * queries.unit[:, None] + queries.shift[:, None]


@triton.jit
def multiply_values(p, v, unit, row_max, MASKED: tl.constexpr):
    """Return the product of a tile's P, rounded to e4m3, and its values [DV, BLOCK_N], in float32.

    It has an accumulator of its own, because those of e4m3 may be short. row_max is of the tile's scores: −inf in rows
    that attend none of its keys, for which a unit of NaN is not.
    """
    product = tl.dot(p.to(v.dtype), v.T, out_dtype=tl.float32) * unit
    if MASKED:
        product = tl.where((row_max != float("-inf"))[:, None], product, 0.0)
    return product


@triton.jit
def load_mean(units, sequence, n_sequences, head, n_heads, BLOCK_DV: tl.constexpr):
    """Load what was taken off the values of a sequence's head; 0 for tokens of no sequence."""
    feature = tl.arange(0, BLOCK_DV)
    exists = (feature < units.v_dim) & (sequence >= 0)
    if n_sequences is not None:
        exists = exists & (sequence < n_sequences)
    return tl.load(units.v_mean + wide(sequence * n_heads + head) * units.v_dim + feature, exists, other=0.0)
