"""Sums of the backward's parts: the gradients of score parameters, the same bits every time."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # numbers that a program adds at a time


@triton.jit
def sum_parts_kernel(
    result_ptr,  # (rows, n_columns)
    parts_ptr,  # (…, N_PARAMS)
    n_parts,  # of a row of the result
    n_inner,  # that many of them are neighbours
    outer_stride,  # from one of these runs to the next, in parts
    row_stride,  # from the first part of a row to that of the next
    n_columns,
    N_PARAMS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Sum the programs' parts of one row of the parameters' gradient; columns past N_PARAMS are 0."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_PARTS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, n_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        index = (part // n_inner).to(tl.int64) * outer_stride + part % n_inner + row * row_stride
        mask = (part < n_parts)[:, None] & (column < N_PARAMS)
        total += tl.load(parts_ptr + index[:, None] * N_PARAMS + column, mask, other=0.0)
    tl.store(result_ptr + row * n_columns + column, tl.sum(total, 0), column < n_columns)
