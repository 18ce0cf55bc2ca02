"""The rows of cos and sin of all tokens, whose positions depend on values on the device: one launch.

A row is gathered from a table of all positions, or computed from the frequencies, as `rope_table` does.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), R rotary dim, S packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.steps import AT_ONCE, Steps

BLOCK_TOKENS = 16


class RowInputs(NamedTuple):
    """Tensors that give the rows, a table or frequencies, and those that give the positions of the tokens."""

    cos: Tensor | None  # (1, positions, R/2), float32
    sin: Tensor | None
    frequencies: Tensor | None  # (R/2,), in place of a table
    factor: Tensor | None  # (1,), float64: multiplies cos and sin of frequencies; None for 1
    positions: Tensor | None  # (B or 1, T); None: by index
    bounds: Tensor | None  # (S + 1,): of the packed sequences that the tokens are of
    bounds_of_keys: Tensor | None  # (S + 1,): queries are at the ends of these sequences; None: of their own
    key_starts: Tensor | None  # (B,)
    query_starts: Tensor | None  # (B,)
    key_lengths: Tensor | None  # (S,): packed queries are at the ends of so many cached keys


@triton.jit
def packed_index(token, bounds, bounds_of_keys, key_lengths, n_sequences, n_steps, capacity):
    """Return the index of packed tokens in their sequences; those past the last end are counted from it."""
    left = tl.zeros_like(token)
    right = left + n_sequences
    for _ in range(n_steps):
        middle = (left + right) // 2
        searches = left < right
        is_past = tl.load(bounds + 1 + middle, searches, other=0) <= token
        left = tl.where(searches & is_past, middle + 1, left)
        right = tl.where(searches & ~is_past, middle, right)
    start = wide(tl.load(bounds + left))
    index = token - start
    if bounds_of_keys is not None:
        exists = left < n_sequences
        n_queries = wide(tl.load(bounds + left + 1, exists, other=0)) - start
        keys_start = wide(tl.load(bounds_of_keys + left, exists, other=0))
        n_keys = wide(tl.load(bounds_of_keys + left + 1, exists, other=0)) - keys_start
        index += tl.where(exists, n_keys - n_queries, 0)
    if key_lengths is not None:
        exists = left < n_sequences
        n_queries = wide(tl.load(bounds + left + 1, exists, other=0)) - start
        n_keys = tl.minimum(wide(tl.load(key_lengths + left, exists, other=0)), capacity)
        index += tl.where(exists, n_keys - n_queries, 0)
    return index


@triton.jit(
    do_not_specialize=(
        *("positions_stride_batch", "positions_stride_token", "n_sequences", "n_steps", "n_tokens"),
        *("first", "lowest", "n_rows", "capacity"),
    )
)
def table_rows_kernel(
    cos_out,  # (B or 1, T, R/2), float32
    sin_out,
    inputs,  # `RowInputs`
    positions_stride_batch,
    positions_stride_token,
    n_sequences,
    n_steps,  # of a search among the sequences
    n_tokens,
    first,  # the position of the first token, by index
    lowest,  # the position of the table's first row
    n_rows,
    capacity,  # the most keys of a sequence in a cache
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write the rows of a block of tokens of one batch row."""
    n_blocks = tl.cdiv(n_tokens, BLOCK_T)
    batch = wide(tl.program_id(0) // n_blocks)
    token = wide(tl.program_id(0) % n_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < n_tokens
    if inputs.positions is not None:
        offsets = batch * positions_stride_batch + token * positions_stride_token
        position = wide(tl.load(inputs.positions + offsets, exists, other=0))
    elif inputs.bounds is not None:
        bounds_of_keys, key_lengths = inputs.bounds_of_keys, inputs.key_lengths
        position = packed_index(token, inputs.bounds, bounds_of_keys, key_lengths, n_sequences, n_steps, capacity)
    else:
        position = token + first
        if inputs.query_starts is not None:
            position = token + wide(tl.load(inputs.query_starts + batch))
        if inputs.key_starts is not None:
            position -= wide(tl.load(inputs.key_starts + batch))
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = exists[:, None] & (pair < HALF)[None, :]
    out_offsets = ((batch * n_tokens + token) * HALF)[:, None] + pair[None, :]
    if inputs.frequencies is None:
        row = tl.minimum(tl.maximum(position - lowest, 0), n_rows - 1)  # whatever the device holds
        offsets = (row * HALF)[:, None] + pair[None, :]
        cos = tl.load(inputs.cos + offsets, is_pair, other=0.0)
        sin = tl.load(inputs.sin + offsets, is_pair, other=0.0)
    else:
        frequency = tl.load(inputs.frequencies + pair, pair < HALF, other=0.0).to(tl.float64)
        angle = position.to(tl.float64)[:, None] * frequency[None, :]
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        if inputs.factor is not None:
            factor = tl.load(inputs.factor)
            cos = cos * factor
            sin = sin * factor
        cos = cos.to(tl.float32)
        sin = sin.to(tl.float32)
    tl.store(cos_out + out_offsets, cos, is_pair)
    tl.store(sin_out + out_offsets, sin, is_pair)


def make_rows(
    inputs: RowInputs, n_tokens: int, first: int, lowest: int, capacity: int = 0, on: Steps = AT_ONCE
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all tokens, (B or 1, T, R/2)."""
    width = inputs.frequencies if inputs.frequencies is not None else inputs.cos
    assert width is not None
    half, batch = width.shape[-1], 1
    for x in (inputs.positions, inputs.key_starts, inputs.query_starts):
        batch = batch if x is None else max(batch, x.shape[0])
    cos, sin = (torch.empty(batch, n_tokens, half, dtype=torch.float32, device=width.device) for _ in range(2))
    strides: tuple[int, ...] = (0, 0)
    if inputs.positions is not None:
        sizes = zip(inputs.positions.shape, inputs.positions.stride(), strict=True)
        strides = tuple(stride if size > 1 else 0 for size, stride in sizes)
    n_sequences = 0 if inputs.bounds is None else inputs.bounds.shape[0] - 1
    on.launch(
        table_rows_kernel,
        batch * triton.cdiv(n_tokens, BLOCK_TOKENS),
        cos_out=cos,
        sin_out=sin,
        inputs=RowInputs(*[x if x is None or x is inputs.positions else x.contiguous() for x in inputs]),
        positions_stride_batch=strides[0],
        positions_stride_token=strides[1],
        n_sequences=n_sequences,
        n_steps=n_sequences.bit_length(),
        n_tokens=n_tokens,
        first=first,
        lowest=lowest,
        n_rows=0 if inputs.cos is None else inputs.cos.shape[1],
        capacity=capacity,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_T=BLOCK_TOKENS,
    )
    return cos, sin
