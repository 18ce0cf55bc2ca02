"""The rotation by tables of each head as Triton kernels: forward, and the gradients of q, k, cos and sin.

Shape letters: B batch, T tokens, H heads (of q, of k and of the tables), D head dim, R rotary dim (R/2 pairs).

A row is one head of one token. A tile has the same rows of q and of k, so that both are rotated by tables read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.rope.kernel import (
    Heads,
    Lookup,
    Table,
    _divide,
    _load_pairs,
    _pass_through,
    _token_positions,
    _wide,
    rotated_features,
)


@triton.jit
def _locate(
    unit_multiplier, unit_shift, n_units, chunk_blocks, chunk_multiplier, chunk_shift, token_blocks, n_tokens,
    H: tl.constexpr, HEADS_ARE_NEAR: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Return a program's unit of batch rows, and token, head and mask of its rows: [BLOCK_ROWS, 1, 1] each.

    Chunk by chunk of rows, all units: the next one finds the chunk's part of the tables in cache.
    """
    program = tl.program_id(0)
    chunk_of_unit = _divide(program, chunk_multiplier, chunk_shift)
    chunk = _divide(chunk_of_unit, unit_multiplier, unit_shift)
    unit = chunk_of_unit - chunk * n_units
    block = (chunk - chunk_of_unit) * chunk_blocks + program
    lane = tl.arange(0, BLOCK_ROWS)[:, None, None]
    if HEADS_ARE_NEAR:
        row = block * BLOCK_ROWS + lane
        token = row // H
        head = _wide(row - token * H)
        mask = token < n_tokens
        token = _wide(token)
    else:
        head = block // token_blocks
        token = _wide(block - head * token_blocks) * BLOCK_ROWS + lane
        mask = (token < n_tokens) & (head < H)
        head = _wide(head) + tl.zeros_like(token)
    return unit, token, head, mask


@triton.jit
def _row_pointers(x, batch, token, head, STRIDE_UNIT: tl.constexpr):
    """Point at the first feature of each row: [BLOCK_ROWS, 1, 1]."""
    row = batch * _wide(x.stride_batch) + token * _wide(x.stride_token) + head * _wide(x.stride_head)
    return x.ptr + row * STRIDE_UNIT


@triton.jit
def _load_table(table, batch, position, head, stride_head, inside, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load cos or sin of each row, [BLOCK_ROWS, 1, BLOCK_HALF]: NaN where the position is outside the table."""
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    position = tl.where(inside, position, 0)
    row = batch * _wide(table.stride_batch) + position * _wide(table.stride_row) + head * _wide(stride_head)
    ptrs = table.ptr + row * table.stride_unit + pair
    return tl.load(ptrs, inside & mask & (pair < HALF), other=float("nan"))


@triton.jit
def _split_pairs(a, b, INTERLEAVED: tl.constexpr, COMPUTE_DTYPE: tl.constexpr):
    """Return first and second features of the pairs that `_load_pairs` loads."""
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(a, (a.shape[0], a.shape[1], a.shape[2] // 2, 2)))
    return a.to(COMPUTE_DTYPE), b.to(COMPUTE_DTYPE)


@triton.jit
def _store_pairs(
    ptrs, a, b, mask, HALF: tl.constexpr, ROTARY_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store first and second features of pairs."""
    if INTERLEAVED:
        x = tl.join(a, b)
        x = tl.reshape(x, (x.shape[0], x.shape[1], 2 * x.shape[2]))
        feature = tl.arange(0, x.shape[2])[None, None, :]
        tl.store(ptrs + (feature + ROTARY_OFFSET), x, mask & (feature < 2 * HALF))
    else:
        pair = tl.arange(0, a.shape[2])[None, None, :]
        mask = mask & (pair < HALF)
        first, second = rotated_features(pair, HALF, PAIR_BLOCK)
        tl.store(ptrs + (first + ROTARY_OFFSET), a, mask)
        tl.store(ptrs + (second + ROTARY_OFFSET), b, mask)


@triton.jit
def rotate_heads_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    direction,  # +1 rotates by θ, −1 by −θ
    n_units,  # batch rows
    unit_multiplier,  # these two divide by n_units: see _divide
    unit_shift,
    chunk_blocks,  # blocks of rows of one unit that follow each other
    chunk_multiplier,
    chunk_shift,
    token_blocks,
    n_tokens,
    n_rows,  # of cos and sin
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
    cos_stride_head,
    sin_stride_batch,
    sin_stride_row,
    sin_stride_head,
    positions_stride_batch,
    positions_stride_token,
    POSITIONS: tl.constexpr,
    H: tl.constexpr,
    HAS_K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    INPLACE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    HEADS_ARE_NEAR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate a block of rows of q and k by their own rows of the tables."""
    unit, token, head, mask = _locate(
        unit_multiplier, unit_shift, n_units, chunk_blocks, chunk_multiplier, chunk_shift, token_blocks, n_tokens, H,
        HEADS_ARE_NEAR, BLOCK_ROWS,
    )  # fmt: skip
    batch = _wide(unit)
    # Load the tiles first: looking up the tables' rows takes longer.
    q_ptrs = _row_pointers(Heads(q_ptr, q_stride_batch, q_stride_token, q_stride_head), batch, token, head, STRIDE_UNIT)
    q_a, q_b = _load_pairs(q_ptrs, mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
    if HAS_K:
        k = Heads(k_ptr, k_stride_batch, k_stride_token, k_stride_head)
        k_ptrs = _row_pointers(k, batch, token, head, STRIDE_UNIT)
        k_a, k_b = _load_pairs(k_ptrs, mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
    lookup = Lookup(
        positions_ptr, positions_stride_batch, positions_stride_token, None, None, None, None, None, 0, n_rows
    )
    position = _token_positions(token, batch, lookup, mask, POSITIONS)
    inside = (position >= 0) & (position < n_rows)
    cos_table = Table(cos_ptr, cos_stride_batch, cos_stride_row, TABLE_STRIDE_UNIT)
    sin_table = Table(sin_ptr, sin_stride_batch, sin_stride_row, TABLE_STRIDE_UNIT)
    cos = _load_table(cos_table, batch, position, head, cos_stride_head, inside, mask, HALF, BLOCK_HALF)
    sin = _load_table(sin_table, batch, position, head, sin_stride_head, inside, mask, HALF, BLOCK_HALF)
    # Synchronise the warps of a program before they store, as `rotate_kernel` does.
    tl.debug_barrier()
    cos = cos.to(COMPUTE_DTYPE)
    sin = sin.to(COMPUTE_DTYPE) * direction

    q_out = Heads(q_out_ptr, q_out_stride_batch, q_out_stride_token, q_out_stride_head)
    out_ptrs = _row_pointers(q_out, batch, token, head, STRIDE_UNIT)
    a, b = _split_pairs(q_a, q_b, INTERLEAVED, COMPUTE_DTYPE)
    _store_pairs(out_ptrs, a * cos - b * sin, a * sin + b * cos, mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK)
    if 2 * HALF < D:
        _pass_through(out_ptrs, q_ptrs, inside, mask, D, HALF, ROTARY_OFFSET, INPLACE, BLOCK_D)
    if HAS_K:
        k_out = Heads(k_out_ptr, k_out_stride_batch, k_out_stride_token, k_out_stride_head)
        out_ptrs = _row_pointers(k_out, batch, token, head, STRIDE_UNIT)
        a, b = _split_pairs(k_a, k_b, INTERLEAVED, COMPUTE_DTYPE)
        _store_pairs(out_ptrs, a * cos - b * sin, a * sin + b * cos, mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK)
        if 2 * HALF < D:
            _pass_through(out_ptrs, k_ptrs, inside, mask, D, HALF, ROTARY_OFFSET, INPLACE, BLOCK_D)


@triton.jit
def head_gradients_kernel(
    q_ptr,
    k_ptr,
    q_grad_ptr,  # of the rotated q
    k_grad_ptr,
    dq_ptr,
    dk_ptr,
    cos_ptr,
    sin_ptr,
    dcos_ptr,  # (units, T, H, R/2), dense
    dsin_ptr,
    positions_ptr,
    direction,
    n_batches,
    rows_of_unit,  # batch rows that are summed: they share the tables' rows
    n_units,
    unit_multiplier,
    unit_shift,
    chunk_blocks,
    chunk_multiplier,
    chunk_shift,
    token_blocks,
    n_tokens,
    n_rows,
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
    cos_stride_head,
    sin_stride_batch,
    sin_stride_row,
    sin_stride_head,
    positions_stride_batch,
    positions_stride_token,
    POSITIONS: tl.constexpr,
    H: tl.constexpr,
    HAS_K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    HEADS_ARE_NEAR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate the gradients of a block of rows back, and sum the gradients of their rows of the tables.

    The sum is over q and k and over the batch rows of a unit, in one order.
    """
    unit, token, head, mask = _locate(
        unit_multiplier, unit_shift, n_units, chunk_blocks, chunk_multiplier, chunk_shift, token_blocks, n_tokens, H,
        HEADS_ARE_NEAR, BLOCK_ROWS,
    )  # fmt: skip
    first_batch = _wide(unit * rows_of_unit)
    q = Heads(q_ptr, q_stride_batch, q_stride_token, q_stride_head)
    k = Heads(k_ptr, k_stride_batch, k_stride_token, k_stride_head)
    q_grad = Heads(q_grad_ptr, q_grad_stride_batch, q_grad_stride_token, q_grad_stride_head)
    k_grad = Heads(k_grad_ptr, k_grad_stride_batch, k_grad_stride_token, k_grad_stride_head)
    dq = Heads(dq_ptr, dq_stride_batch, dq_stride_token, dq_stride_head)
    dk = Heads(dk_ptr, dk_stride_batch, dk_stride_token, dk_stride_head)
    inside = mask
    cos = tl.full((BLOCK_ROWS, 1, BLOCK_HALF), 0, COMPUTE_DTYPE)
    sin = tl.full((BLOCK_ROWS, 1, BLOCK_HALF), 0, COMPUTE_DTYPE)
    if NEEDS_DX:
        lookup = Lookup(
            positions_ptr, positions_stride_batch, positions_stride_token, None, None, None, None, None, 0, n_rows
        )
        position = _token_positions(token, first_batch, lookup, mask, POSITIONS)
        inside = (position >= 0) & (position < n_rows)
        cos_table = Table(cos_ptr, cos_stride_batch, cos_stride_row, TABLE_STRIDE_UNIT)
        sin_table = Table(sin_ptr, sin_stride_batch, sin_stride_row, TABLE_STRIDE_UNIT)
        cos = _load_table(cos_table, first_batch, position, head, cos_stride_head, inside, mask, HALF, BLOCK_HALF)
        sin = _load_table(sin_table, first_batch, position, head, sin_stride_head, inside, mask, HALF, BLOCK_HALF)
        cos = cos.to(COMPUTE_DTYPE)
        sin = sin.to(COMPUTE_DTYPE) * direction

    dcos = tl.zeros((BLOCK_ROWS, 1, BLOCK_HALF), COMPUTE_DTYPE)
    dsin = tl.zeros((BLOCK_ROWS, 1, BLOCK_HALF), COMPUTE_DTYPE)
    for i in range(rows_of_unit):
        batch = first_batch + i
        row_mask = mask & (batch < n_batches)
        # Load every tile before the first store, over which the compiler moves no load.
        q_ptrs = _row_pointers(q, batch, token, head, STRIDE_UNIT)
        q_a, q_b = _load_pairs(q_ptrs, row_mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
        q_ptrs = _row_pointers(q_grad, batch, token, head, STRIDE_UNIT)
        q_grad_a, q_grad_b = _load_pairs(q_ptrs, row_mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
        if HAS_K:
            k_ptrs = _row_pointers(k, batch, token, head, STRIDE_UNIT)
            k_a, k_b = _load_pairs(k_ptrs, row_mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
            k_ptrs = _row_pointers(k_grad, batch, token, head, STRIDE_UNIT)
            k_grad_a, k_grad_b = _load_pairs(k_ptrs, row_mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK, BLOCK_HALF)
        for n in tl.static_range(2 if HAS_K else 1):
            a, b = _split_pairs(q_a if n == 0 else k_a, q_b if n == 0 else k_b, INTERLEAVED, COMPUTE_DTYPE)
            grad_a, grad_b = _split_pairs(
                q_grad_a if n == 0 else k_grad_a, q_grad_b if n == 0 else k_grad_b, INTERLEAVED, COMPUTE_DTYPE
            )
            if NEEDS_DX:
                dx_ptrs = _row_pointers(dq if n == 0 else dk, batch, token, head, STRIDE_UNIT)
                dx_a = grad_a * cos + grad_b * sin
                dx_b = grad_b * cos - grad_a * sin
                _store_pairs(dx_ptrs, dx_a, dx_b, row_mask, HALF, ROTARY_OFFSET, INTERLEAVED, PAIR_BLOCK)
                if 2 * HALF < D:
                    grad_ptrs = q_ptrs if n == 0 else k_ptrs
                    _pass_through(dx_ptrs, grad_ptrs, inside, row_mask, D, HALF, ROTARY_OFFSET, False, BLOCK_D)
            dcos += grad_a * a + grad_b * b
            dsin += grad_b * a - grad_a * b

    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    row = (_wide(unit) * n_tokens + token) * H + head
    pair_mask = mask & (pair < HALF)
    tl.store(dcos_ptr + row * HALF + pair, dcos, pair_mask)
    tl.store(dsin_ptr + row * HALF + pair, dsin * direction, pair_mask)


@triton.jit
def row_sum_kernel(
    dcos_ptr,  # (units, T, H, R/2), dense: T tokens in any order
    dsin_ptr,
    cos_sum_ptr,  # (rows, H, R/2), dense
    sin_sum_ptr,
    order_ptr,  # (T,): the tokens, sorted by their rows
    bounds_ptr,  # (rows + 1,): where the tokens of each row begin
    n_units,
    n_tokens,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Sum the gradients of the tokens of one row of the tables, in one order, for a block of columns."""
    N_COLUMNS: tl.constexpr = H * HALF
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    unit_stride = _wide(n_tokens) * N_COLUMNS
    first = tl.load(bounds_ptr + row).to(tl.int32)
    last = tl.load(bounds_ptr + row + 1).to(tl.int32)
    cos_sum = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), dcos_ptr.dtype.element_ty)
    sin_sum = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), dcos_ptr.dtype.element_ty)
    for start in range(first, last, BLOCK_TOKENS):
        index = start + tl.arange(0, BLOCK_TOKENS)[:, None]
        token = tl.load(order_ptr + index, index < last, other=0)
        mask = (index < last) & (column < N_COLUMNS)
        offset = token * N_COLUMNS + column
        for _ in range(n_units):
            cos_sum += tl.load(dcos_ptr + offset, mask, other=0.0)
            sin_sum += tl.load(dsin_ptr + offset, mask, other=0.0)
            offset += unit_stride
    offset = _wide(row) * N_COLUMNS + column
    mask = column < N_COLUMNS
    tl.store(cos_sum_ptr + offset, tl.sum(cos_sum, axis=0, keep_dims=True), mask)
    tl.store(sin_sum_ptr + offset, tl.sum(sin_sum, axis=0, keep_dims=True), mask)
