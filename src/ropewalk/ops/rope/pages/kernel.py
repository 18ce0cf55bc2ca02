"""The kernel that rotates pages of cached keys where they are.

Shape letters: B rows of the block table, T tokens of a row, H heads, D head dim, R rotary dim, A position axes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_tokens", "n_pages", "n_rows"])
def rotate_pages_kernel(
    pages_ptr,  # (pages, PAGE_SIZE, H, D)
    stride_page,
    stride_token,
    stride_head,
    stride_feature,
    table_ptr,  # (B, T / PAGE_SIZE)
    table_stride_row,
    table_stride_column,
    positions_ptr,  # (B or 1, T), or (A, B or 1, T)
    positions_stride_axis,
    positions_stride_row,
    positions_stride_token,
    axes_ptr,  # (R / 2,), or None
    cos_ptr,  # (n_rows, R / 2)
    sin_ptr,
    cos_stride_row,
    cos_stride_pair,
    sin_stride_row,
    sin_stride_pair,
    n_tokens,  # T
    n_pages,
    n_rows,
    n_axes,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N_PAIRS: tl.constexpr,
    HALF: tl.constexpr,  # of a block of pairs: 1 where pairs are neighbours
    ROTARY_OFFSET: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Rotate some tokens of a row of the block table, all features of some heads; a page below 0 is left alone."""
    n_tiles = tl.cdiv(n_tokens, BLOCK_TOKENS)
    row = tl.program_id(0) // n_tiles
    token = tl.program_id(0) % n_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_PAIRS)
    exists = token < n_tokens
    page_ptrs = table_ptr + tl.cast(row, tl.int64) * table_stride_row + token // PAGE_SIZE * table_stride_column
    page = tl.load(page_ptrs, exists, other=-1).to(tl.int64)
    exists = exists & (page >= 0) & (page < n_pages)

    is_pair = pair < N_PAIRS
    ptrs = positions_ptr + tl.cast(row, tl.int64) * positions_stride_row + token.to(tl.int64) * positions_stride_token
    if axes_ptr is None:
        position = tl.load(ptrs, exists, other=-1).to(tl.int64)[:, None] + tl.zeros((1, BLOCK_PAIRS), tl.int64)
    else:
        axis = tl.load(axes_ptr + pair, is_pair, other=0).to(tl.int64)
        is_axis = (axis >= 0) & (axis < n_axes)
        axis_ptrs = ptrs[:, None] + (axis * positions_stride_axis)[None, :]
        position = tl.load(axis_ptrs, exists[:, None] & is_axis[None, :], other=-1).to(tl.int64)
    inside = (position >= 0) & (position < n_rows)
    is_inside = tl.min((inside | ~is_pair[None, :]).to(tl.int32), 1) != 0
    mask = inside & is_pair[None, :]
    table_row = tl.where(inside, position, 0)
    cos = tl.load(cos_ptr + table_row * cos_stride_row + pair[None, :] * cos_stride_pair, mask, other=1.0)
    sin = tl.load(sin_ptr + table_row * sin_stride_row + pair[None, :] * sin_stride_pair, mask, other=0.0)
    dtype: tl.constexpr = tl.float64 if pages_ptr.dtype.element_ty == tl.float64 else tl.float32
    cos = cos.to(dtype)[:, None, :]
    sin = sin.to(dtype)[:, None, :]
    if INVERSE:
        sin = -sin

    rows = page * stride_page + (token % PAGE_SIZE).to(tl.int64) * stride_token
    heads = rows[:, None] + head.to(tl.int64)[None, :] * stride_head
    is_head = exists[:, None] & (head < N_HEADS)[None, :]
    feature = ROTARY_OFFSET + pair // HALF * (2 * HALF) + pair % HALF
    a_ptrs = pages_ptr + heads[:, :, None] + feature[None, None, :] * stride_feature
    b_ptrs = a_ptrs + HALF * stride_feature
    mask = is_head[:, :, None] & is_pair[None, None, :]
    a = tl.load(a_ptrs, mask, other=0.0).to(dtype)
    b = tl.load(b_ptrs, mask, other=0.0).to(dtype)
    mask = mask & is_inside[:, None, None]
    tl.store(a_ptrs, (a * cos - b * sin).to(pages_ptr.dtype.element_ty), mask)
    tl.store(b_ptrs, (a * sin + b * cos).to(pages_ptr.dtype.element_ty), mask)
    dim = tl.arange(0, BLOCK_DIM)
    is_lost = is_head & ~is_inside[:, None]
    nan = tl.full((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_DIM), float("nan"), tl.float32)
    ptrs = pages_ptr + heads[:, :, None] + dim[None, None, :] * stride_feature
    tl.store(ptrs, nan.to(pages_ptr.dtype.element_ty), is_lost[:, :, None] & (dim < HEAD_DIM)[None, None, :])
