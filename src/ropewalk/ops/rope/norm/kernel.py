"""RMS norm and rotation in one Triton kernel forward and one backward, and the sum of the weights' gradients.

Shape letters: B batch, T tokens, H heads (Hq of q, Hk of k), D head dim, R rotary dim (R/2 pairs).

A tile holds a row of D features as two halves, the first and the second features of its pairs. Features that are not
rotated form pairs too, which are rotated by 0: so each access is wide, and the sum over a row stays in few threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ropewalk.ops.rope.kernel import (
    Heads,
    Lookup,
    Table,
    TilePairs,
    _divide,
    _head_mask,
    _head_pointers,
    _wide,
    load_tables,
    rotated_features,
)


class Row(NamedTuple):
    """The features of a head in a tile, all constexpr: D, R / 2, the first rotated one, and how they form pairs."""

    D: Any
    HALF: Any
    ROTARY_OFFSET: Any
    INTERLEAVED: Any
    PAIR_BLOCK: Any  # features of a block that is half-split by itself; 0: all that are rotated
    BLOCK_PAIRS: Any  # of a tile, a power of two


@triton.jit
def _pair_features(row):
    """Return the first and the second feature of each half-split pair, and masks of those that exist.

    The pairs after the first HALF are of features that are not rotated; an odd one of these has no partner.
    """
    pair = tl.arange(0, row.BLOCK_PAIRS)[None, None, :]
    REST: tl.constexpr = row.D - 2 * row.HALF
    REST_HALF: tl.constexpr = (REST + 1) // 2
    rotated_first, rotated_second = rotated_features(pair, row.HALF, row.PAIR_BLOCK)
    if REST == 0:
        first = rotated_first
        second = rotated_second
    elif row.HALF == 0:
        first = pair
        second = pair + REST_HALF
    elif row.ROTARY_OFFSET == 0:
        first = tl.where(pair < row.HALF, rotated_first, pair + row.HALF)
        second = tl.where(pair < row.HALF, rotated_second, pair + (row.HALF + REST_HALF))
    else:
        is_rotated = pair < row.HALF
        rest = pair - row.HALF
        partner = rest + REST_HALF
        first = rest + tl.where(rest < row.ROTARY_OFFSET, 0, 2 * row.HALF)
        second = partner + tl.where(partner < row.ROTARY_OFFSET, 0, 2 * row.HALF)
        first = tl.where(is_rotated, rotated_first + row.ROTARY_OFFSET, first)
        second = tl.where(is_rotated, rotated_second + row.ROTARY_OFFSET, second)
    return first, second, pair < row.HALF + REST_HALF, pair < row.HALF + REST // 2


@triton.jit
def _interleaved_features(row):
    """Return the features of a tile of interleaved pairs, and a mask of those that exist.

    The pairs of an odd offset begin at feature -1.
    """
    feature = tl.arange(0, 2 * row.BLOCK_PAIRS)[None, None, :] - row.ROTARY_OFFSET % 2
    mask = feature < row.D
    if row.ROTARY_OFFSET % 2 == 1:
        mask = mask & (feature >= 0)
    return feature, mask


@triton.jit
def _load_row(ptrs, mask, row):
    """Load all features of heads, as the first and the second of each pair."""
    if row.INTERLEAVED:
        # The pairs are loaded in one wide access, and split in registers.
        feature, feature_mask = _interleaved_features(row)
        x = tl.load(ptrs + feature, mask & feature_mask, other=0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], row.BLOCK_PAIRS, 2)))
    else:
        first, second, first_mask, second_mask = _pair_features(row)
        a = tl.load(ptrs + first, mask & first_mask, other=0.0)
        b = tl.load(ptrs + second, mask & second_mask, other=0.0)
    return a, b


@triton.jit
def _store_row(ptrs, a, b, mask, row):
    """Store the features of heads in the order of memory."""
    if row.INTERLEAVED:
        feature, feature_mask = _interleaved_features(row)
        x = tl.join(a, b)
        tl.store(ptrs + feature, tl.reshape(x, (x.shape[0], x.shape[1], 2 * row.BLOCK_PAIRS)), mask & feature_mask)
    else:
        first, second, first_mask, second_mask = _pair_features(row)
        tl.store(ptrs + first, a, mask & first_mask)
        tl.store(ptrs + second, b, mask & second_mask)


@triton.jit
def _rows_mask(group, token_mask, HQ: tl.constexpr, HK: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Mask the rows of a tile that exist; where every group is whole, its tokens' mask alone, known when compiling."""
    mask = token_mask
    if HQ % BLOCK_HEADS != 0 or HK % BLOCK_HEADS != 0:
        mask = token_mask & _head_mask(group, HQ, HK, BLOCK_HEADS)
    return mask


@triton.jit
def _load_weights(
    q_weight_ptr, k_weight_ptr, group, row, HQ: tl.constexpr, HK: tl.constexpr, PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Load the weights of a group's heads, at the shape of a tile: a copy for each row costs little (L1)."""
    Q_GROUPS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_q = group < Q_GROUPS
    ptrs = tl.where(is_q, q_weight_ptr, k_weight_ptr) + tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, 1), tl.int32)
    mask = tl.full((BLOCK_TOKENS, BLOCK_HEADS, 1), 1, tl.int1)
    if PER_HEAD:
        first_head = tl.where(is_q, group, group - Q_GROUPS) * BLOCK_HEADS
        ptrs += (first_head + tl.arange(0, BLOCK_HEADS))[None, :, None] * row.D
        mask = mask & _head_mask(group, HQ, HK, BLOCK_HEADS)
    return _load_row(ptrs, mask, row)


@triton.jit
def _load_tables(
    token, batch, token_mask, lookup, cos, sin, row, POSITIONS: tl.constexpr, N_AXES: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Load cos and sin of each pair of a tile: 1 and 0 of features that are not rotated, NaN outside the table."""
    FIRST_PAIR: tl.constexpr = (row.ROTARY_OFFSET + 1) // 2 if row.INTERLEAVED else 0
    cos, sin, _ = load_tables(
        token, batch, token_mask, lookup, cos, sin, TilePairs(row.HALF, FIRST_PAIR, row.BLOCK_PAIRS, True), POSITIONS,
        N_AXES, BLOCK_HEADS, True,
    )  # fmt: skip
    return cos.to(COMPUTE_DTYPE), sin.to(COMPUTE_DTYPE)


@triton.jit
def _sum_rows(x, ACROSS: tl.constexpr):
    """Sum over the features of each head, or of all heads of a token."""
    total = tl.sum(x, axis=2, keep_dims=True)
    if ACROSS:
        total = tl.sum(total, axis=1, keep_dims=True)
    return total


@triton.jit
def _sum_two_rows(x, y, ACROSS: tl.constexpr):
    """Sum each of two tiles as `_sum_rows` does, both in one reduction: its barriers cost time."""
    total = tl.sum(tl.join(x, y), axis=2, keep_dims=True)
    if ACROSS:
        total = tl.sum(total, axis=1, keep_dims=True)
    return tl.split(total)


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _inverse_rotate(a, b, cos, sin):
    return a * cos + b * sin, b * cos - a * sin


@triton.jit
def _width(group, D: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, ACROSS: tl.constexpr):
    """Return the number of features of one statistic."""
    return tl.where(group == 0, HQ * D, HK * D) if ACROSS else D


@triton.jit
def _rstd(a, b, width, EPS: tl.constexpr, ACROSS: tl.constexpr):
    """Return 1 / sqrt(mean(x²) + eps) of each row."""
    return tl.rsqrt(_sum_rows(a * a + b * b, ACROSS) / width + EPS)


@triton.jit
def _token_tile(block, row_blocks, row_multiplier, row_shift, n_tokens, BLOCK_TOKENS: tl.constexpr):
    """Return the batch row, the tokens and the mask of a block of tokens."""
    batch = _divide(tl.cast(block, tl.int32), row_multiplier, row_shift)  # the interpreter counts in Python
    token = _wide((block - batch * row_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None, None]
    token_mask = token < n_tokens if BLOCK_TOKENS > 1 else tl.full((1, 1, 1), 1, tl.int1)
    return _wide(batch), token, token_mask


@triton.jit
def norm_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    cos_ptr,
    sin_ptr,
    axes_ptr,  # None, hence no argument of the binary, but for AXES: so is the axes' stride
    positions_ptr,
    cu_seqlens_ptr,
    offset,
    row_blocks,  # token blocks of a batch row
    row_multiplier,  # these two divide by row_blocks: see _divide
    row_shift,
    n_tokens,
    n_rows,  # of cos and sin
    n_sequences,
    search_steps,
    q_stride_batch,
    q_stride_token,
    q_stride_head,
    k_stride_batch,
    k_stride_token,
    k_stride_head,
    q_out_stride_batch,
    q_out_stride_token,
    q_out_stride_head,
    k_out_stride_batch,
    k_out_stride_token,
    k_out_stride_head,
    cos_stride_batch,
    cos_stride_row,
    sin_stride_batch,
    sin_stride_row,
    positions_stride_batch,
    positions_stride_token,
    positions_stride_axis,
    POSITIONS: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    AFTER: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    N_AXES: tl.constexpr,
):
    """Normalise and rotate a group of heads of a block of tokens: one small tile, as in `rotate_kernel`."""
    GROUPS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS + (HK + BLOCK_HEADS - 1) // BLOCK_HEADS
    ROW: tl.constexpr = Row(D, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_PAIRS)
    group = tl.program_id(0) % GROUPS
    block = tl.program_id(0) // GROUPS
    batch, token, token_mask = _token_tile(block, row_blocks, row_multiplier, row_shift, n_tokens, BLOCK_TOKENS)

    # Load the tile first: looking up the tables' rows takes longer.
    q = Heads(q_ptr, q_stride_batch, q_stride_token, q_stride_head)
    k = Heads(k_ptr, k_stride_batch, k_stride_token, k_stride_head)
    head_mask = _rows_mask(group, token_mask, HQ, HK, BLOCK_HEADS)
    x_ptrs = _head_pointers(group, batch, token, q, k, HQ, STRIDE_UNIT, BLOCK_HEADS)
    a, b = _load_row(x_ptrs, head_mask, ROW)
    if HAS_WEIGHT:
        weight_a, weight_b = _load_weights(
            q_weight_ptr, k_weight_ptr, group, ROW, HQ, HK, PER_HEAD, BLOCK_TOKENS, BLOCK_HEADS
        )
    if HALF > 0:
        lookup = Lookup(
            positions_ptr, positions_stride_batch, positions_stride_token, positions_stride_axis, axes_ptr,
            cu_seqlens_ptr, n_sequences, search_steps, offset, n_rows,
        )  # fmt: skip
        cos_table = Table(cos_ptr, cos_stride_batch, cos_stride_row, TABLE_STRIDE_UNIT)
        sin_table = Table(sin_ptr, sin_stride_batch, sin_stride_row, TABLE_STRIDE_UNIT)
        cos, sin = _load_tables(
            token, batch, token_mask, lookup, cos_table, sin_table, ROW, POSITIONS, N_AXES, COMPUTE_DTYPE, BLOCK_HEADS
        )

    a = a.to(COMPUTE_DTYPE)
    b = b.to(COMPUTE_DTYPE)
    if HAS_BIAS:
        bias_a, bias_b = _load_weights(q_bias_ptr, k_bias_ptr, group, ROW, HQ, HK, True, BLOCK_TOKENS, BLOCK_HEADS)
        a += bias_a.to(COMPUTE_DTYPE)
        b += bias_b.to(COMPUTE_DTYPE)
    if AFTER and HALF > 0:
        a, b = _rotate(a, b, cos, sin)
    rstd = _rstd(a, b, _width(group, D, HQ, HK, ACROSS), EPS, ACROSS)
    a = a * rstd
    b = b * rstd
    if HAS_WEIGHT:
        a = a * (weight_a.to(COMPUTE_DTYPE) + WEIGHT_OFFSET)
        b = b * (weight_b.to(COMPUTE_DTYPE) + WEIGHT_OFFSET)
    if not AFTER and HALF > 0:
        a, b = _rotate(a, b, cos, sin)

    q_out = Heads(q_out_ptr, q_out_stride_batch, q_out_stride_token, q_out_stride_head)
    k_out = Heads(k_out_ptr, k_out_stride_batch, k_out_stride_token, k_out_stride_head)
    out_ptrs = _head_pointers(group, batch, token, q_out, k_out, HQ, STRIDE_UNIT, BLOCK_HEADS)
    a = a.to(q_out_ptr.dtype.element_ty)
    b = b.to(q_out_ptr.dtype.element_ty)
    _store_row(out_ptrs, a, b, head_mask, ROW)


@triton.jit
def norm_backward_kernel(
    q_ptr,
    k_ptr,
    q_grad_ptr,  # of the results
    k_grad_ptr,
    dq_ptr,
    dk_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    cos_ptr,
    sin_ptr,
    axes_ptr,  # None, hence no argument of the binary, but for AXES: so is the axes' stride
    positions_ptr,
    cu_seqlens_ptr,
    offset,
    n_blocks,  # token blocks of all batch rows
    n_slots,  # programs of each group of heads
    row_blocks,  # token blocks of a batch row
    row_multiplier,  # these two divide by row_blocks: see _divide
    row_shift,
    n_tokens,
    n_rows,  # of cos and sin
    n_sequences,
    search_steps,
    q_stride_batch,
    q_stride_token,
    q_stride_head,
    k_stride_batch,
    k_stride_token,
    k_stride_head,
    q_grad_stride_batch,
    q_grad_stride_token,
    q_grad_stride_head,
    k_grad_stride_batch,
    k_grad_stride_token,
    k_grad_stride_head,
    dq_stride_batch,
    dq_stride_token,
    dq_stride_head,
    dk_stride_batch,
    dk_stride_token,
    dk_stride_head,
    cos_stride_batch,
    cos_stride_row,
    sin_stride_batch,
    sin_stride_row,
    positions_stride_batch,
    positions_stride_token,
    positions_stride_axis,
    POSITIONS: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    AFTER: tl.constexpr,
    ACROSS: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    N_AXES: tl.constexpr,
):
    """Compute dq, dk, and each program's part of the weights' gradients.

    A program has one group of heads and every n_slots-th block of tokens, so that its sum over tokens stays in
    registers, and that all programs sweep through memory in order. It writes its sum to a row of its own: the sums of
    two runs have the same bits.
    """
    GROUPS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS + (HK + BLOCK_HEADS - 1) // BLOCK_HEADS
    ROW: tl.constexpr = Row(D, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_PAIRS)
    group = tl.program_id(0) % GROUPS
    slot = tl.program_id(0) // GROUPS
    q = Heads(q_ptr, q_stride_batch, q_stride_token, q_stride_head)
    k = Heads(k_ptr, k_stride_batch, k_stride_token, k_stride_head)
    q_grad = Heads(q_grad_ptr, q_grad_stride_batch, q_grad_stride_token, q_grad_stride_head)
    k_grad = Heads(k_grad_ptr, k_grad_stride_batch, k_grad_stride_token, k_grad_stride_head)
    dq = Heads(dq_ptr, dq_stride_batch, dq_stride_token, dq_stride_head)
    dk = Heads(dk_ptr, dk_stride_batch, dk_stride_token, dk_stride_head)
    if HAS_WEIGHT and (NEEDS_DX or NEEDS_DB):
        weight_a, weight_b = _load_weights(
            q_weight_ptr, k_weight_ptr, group, ROW, HQ, HK, PER_HEAD, BLOCK_TOKENS, BLOCK_HEADS
        )
    if HAS_BIAS:
        bias_a, bias_b = _load_weights(q_bias_ptr, k_bias_ptr, group, ROW, HQ, HK, True, BLOCK_TOKENS, BLOCK_HEADS)
    if NEEDS_DW:
        dw_a = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS), COMPUTE_DTYPE)
        dw_b = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS), COMPUTE_DTYPE)
    if NEEDS_DB:
        db_a = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS), COMPUTE_DTYPE)
        db_b = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS), COMPUTE_DTYPE)
    width = _width(group, D, HQ, HK, ACROSS)

    for block in range(slot, n_blocks, n_slots):
        batch, token, token_mask = _token_tile(block, row_blocks, row_multiplier, row_shift, n_tokens, BLOCK_TOKENS)
        head_mask = _rows_mask(group, token_mask, HQ, HK, BLOCK_HEADS)
        x_ptrs = _head_pointers(group, batch, token, q, k, HQ, STRIDE_UNIT, BLOCK_HEADS)
        a, b = _load_row(x_ptrs, head_mask, ROW)
        grad_ptrs = _head_pointers(group, batch, token, q_grad, k_grad, HQ, STRIDE_UNIT, BLOCK_HEADS)
        grad_a, grad_b = _load_row(grad_ptrs, head_mask, ROW)
        if HALF > 0:
            lookup = Lookup(
                positions_ptr, positions_stride_batch, positions_stride_token, positions_stride_axis, axes_ptr,
                cu_seqlens_ptr, n_sequences, search_steps, offset, n_rows,
            )  # fmt: skip
            cos_table = Table(cos_ptr, cos_stride_batch, cos_stride_row, TABLE_STRIDE_UNIT)
            sin_table = Table(sin_ptr, sin_stride_batch, sin_stride_row, TABLE_STRIDE_UNIT)
            cos, sin = _load_tables(
                token, batch, token_mask, lookup, cos_table, sin_table, ROW, POSITIONS, N_AXES, COMPUTE_DTYPE,
                BLOCK_HEADS,
            )  # fmt: skip
        a = a.to(COMPUTE_DTYPE)
        b = b.to(COMPUTE_DTYPE)
        if HAS_BIAS:
            a += bias_a.to(COMPUTE_DTYPE)
            b += bias_b.to(COMPUTE_DTYPE)
        grad_a = grad_a.to(COMPUTE_DTYPE)
        grad_b = grad_b.to(COMPUTE_DTYPE)
        sizes = tl.abs(grad_a) + tl.abs(grad_b)
        if HALF > 0:
            if AFTER:
                a, b = _rotate(a, b, cos, sin)
            else:
                grad_a, grad_b = _inverse_rotate(grad_a, grad_b, cos, sin)
        squares, size = _sum_two_rows(a * a + b * b, sizes, ACROSS)
        # A row without a gradient may hold anything, and 0 · NaN is NaN. A row past the last one is such a row.
        has_grad = size != 0
        rstd = tl.where(has_grad, tl.rsqrt(squares / width + EPS), 0.0)
        a = tl.where(has_grad, a, 0.0)
        b = tl.where(has_grad, b, 0.0)
        grad_a = grad_a * rstd
        grad_b = grad_b * rstd
        if NEEDS_DW:
            dw_a += grad_a * a
            dw_b += grad_b * b
        if NEEDS_DX or NEEDS_DB:
            if HAS_WEIGHT:
                grad_a = grad_a * (weight_a.to(COMPUTE_DTYPE) + WEIGHT_OFFSET)
                grad_b = grad_b * (weight_b.to(COMPUTE_DTYPE) + WEIGHT_OFFSET)
            # rstd · (g - y · mean(y · g)) of y = rstd · x, by one product less of each feature.
            mean = _sum_rows(a * grad_a + b * grad_b, ACROSS) * rstd * rstd / width
            dx_a = grad_a - a * mean
            dx_b = grad_b - b * mean
            if AFTER and HALF > 0:
                dx_a, dx_b = _inverse_rotate(dx_a, dx_b, cos, sin)
            if NEEDS_DB:
                db_a += dx_a
                db_b += dx_b
            if NEEDS_DX:
                dx_ptrs = _head_pointers(group, batch, token, dq, dk, HQ, STRIDE_UNIT, BLOCK_HEADS)
                dx_a = dx_a.to(dq_ptr.dtype.element_ty)
                dx_b = dx_b.to(dq_ptr.dtype.element_ty)
                _store_row(dx_ptrs, dx_a, dx_b, head_mask, ROW)

    if NEEDS_DW:
        # (groups, slots, heads of a group or 1, D)
        dw_a = tl.sum(dw_a, axis=0, keep_dims=True)
        dw_b = tl.sum(dw_b, axis=0, keep_dims=True)
        PARTIAL_HEADS: tl.constexpr = BLOCK_HEADS if PER_HEAD else 1
        if not PER_HEAD:
            dw_a = tl.sum(dw_a, axis=1, keep_dims=True)
            dw_b = tl.sum(dw_b, axis=1, keep_dims=True)
        first = (group * n_slots + slot) * PARTIAL_HEADS
        partial_head = (first + tl.arange(0, PARTIAL_HEADS))[None, :, None]
        mask = tl.full((1, PARTIAL_HEADS, 1), 1, tl.int1)
        _store_row(dw_partial_ptr + partial_head * D, dw_a, dw_b, mask, ROW)

    if NEEDS_DB:
        # (groups, slots, heads of a group, D)
        db_a = tl.sum(db_a, axis=0, keep_dims=True)
        db_b = tl.sum(db_b, axis=0, keep_dims=True)
        partial_head = ((group * n_slots + slot) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
        _store_row(db_partial_ptr + partial_head * D, db_a, db_b, tl.full((1, BLOCK_HEADS, 1), 1, tl.int1), ROW)


@triton.jit
def weight_sum_kernel(
    dw_partial_ptr,
    q_dw_ptr,
    k_dw_ptr,
    n_slots,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum the programs' parts of a weight's gradient, in one order, for a block of one head's features."""
    Q_GROUPS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_GROUPS: tl.constexpr = (HK + BLOCK_HEADS - 1) // BLOCK_HEADS
    feature = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    unit = tl.program_id(1)  # a head of q or of k; without weights for each head, q or k
    Q_UNITS: tl.constexpr = HQ if PER_HEAD else 1
    is_q = unit < Q_UNITS
    head = tl.where(is_q, unit, unit - Q_UNITS)
    STEP: tl.constexpr = BLOCK_HEADS if PER_HEAD else 1
    if PER_HEAD:
        group = tl.where(is_q, 0, Q_GROUPS) + head // BLOCK_HEADS
        first = group * n_slots * BLOCK_HEADS + head % BLOCK_HEADS
        n_partials = n_slots
    else:
        first = tl.where(is_q, 0, Q_GROUPS) * n_slots
        n_partials = tl.where(is_q, Q_GROUPS, K_GROUPS) * n_slots
    if OVERLAPS:
        gdc_wait()  # until the kernel before, which writes the parts, has ended
    total = tl.zeros((BLOCK_ROWS, BLOCK_D), dw_partial_ptr.dtype.element_ty)
    for start in range(0, n_partials, BLOCK_ROWS):
        partial = start + tl.arange(0, BLOCK_ROWS)[:, None]
        ptrs = dw_partial_ptr + (first + partial * STEP) * D + feature
        total += tl.load(ptrs, (partial < n_partials) & (feature < D), other=0.0)
    dw = tl.sum(total, axis=0, keep_dims=True)
    ptrs = tl.where(is_q, q_dw_ptr, k_dw_ptr) + head * D + feature
    tl.store(ptrs, dw.to(q_dw_ptr.dtype.element_ty), feature < D)
