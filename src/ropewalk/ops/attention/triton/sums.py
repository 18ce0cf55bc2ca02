"""Sums of the backward's parts: the gradients of sinks and of score parameters, the same bits every time."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # numbers that a program adds at a time


@triton.jit
def sinks_grad_kernel(grad_ptr, sinks_ptr, lse_ptr, delta_ptr, n_heads, n_queries, n_rows, BLOCK: tl.constexpr):
    """Write −Σ p · delta of a head over the n_rows rows of a batch, where p is the sink's probability.

    lse (base 2) and delta are (B, H, Tq).
    """
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        batch = row // n_queries
        index = (batch.to(tl.int64) * n_heads + head) * n_queries + (row - batch * n_queries)
        lse = tl.load(lse_ptr + index, row < n_rows, other=float("-inf"))
        delta = tl.load(delta_ptr + index, row < n_rows, other=0.0)
        # −inf: the row attends nothing, and its sink of −inf has no gradient.
        total += tl.where(lse == float("-inf"), 0.0, tl.exp2(sink - lse) * delta)
    tl.store(grad_ptr + head, -tl.sum(total, 0))


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
