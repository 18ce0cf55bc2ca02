"""Tiles of rows and their features, their rotation, and their positions, for all attention kernels.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Parameters whose values differ from call to call, and must not make another binary.
DO_NOT_SPECIALIZE = ("n_queries", "n_keys", "window", "window_right", "far_window")


@triton.jit
def wide(index):
    """Return an index as int64: the product with a stride may need it."""
    return tl.cast(index, tl.int64)


@triton.jit
def load_tile(descriptor, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load whole rows of one head, [BLOCK, BLOCK_D]; zeros past the last row and past D."""
    return descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D)


@triton.jit
def load_chunks(descriptor, batch, head, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, D_CHUNKS: tl.constexpr):
    """Load rows as `load_tile` does, in one chunk of features, or in three: 192 is no power of two, but thrice one."""
    if D_CHUNKS == 1:
        result = (descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D),)
    else:
        result = (
            descriptor.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D),
            descriptor.load([batch, head, start, BLOCK_D]).reshape(BLOCK, BLOCK_D),
            descriptor.load([batch, head, start, 2 * BLOCK_D]).reshape(BLOCK, BLOCK_D),
        )
    return result


@triton.jit
def load_pages(
    pages,
    head,
    start,
    seqlens,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Load the rows of a sequence's keys from pages, as `load_tile` does; zeros in place of those that do not exist.

    No page of such keys is read, whatever the table names.
    """
    token = start + tl.arange(0, BLOCK)
    feature = CHUNK * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = token < seqlens.n_keys
    if HAS_STARTS:
        exists = exists & (token >= seqlens.kv_start)
    if PAGE_SIZE == 0:
        page = tl.load(pages.table)
        row = token
    else:
        page = tl.load(pages.table + wide(token // PAGE_SIZE) * pages.stride_column, exists, other=0)
        row = token % PAGE_SIZE
    page = tl.minimum(tl.maximum(page, 0), pages.n_pages - 1)
    offsets = wide(page) * pages.stride_page + wide(row) * pages.stride_token + wide(head) * pages.stride_head
    mask = exists[:, None] & (feature < pages.head_dim)[None, :]
    return tl.load(pages.ptr + offsets[:, None] + feature[None, :], mask, other=0.0)


@triton.jit
def load_page_chunks(
    pages,
    head,
    start,
    seqlens,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Load rows as `load_pages` does, in chunks as those of `load_chunks`."""
    if D_CHUNKS == 1:
        result = (load_pages(pages, head, start, seqlens, 0, BLOCK, BLOCK_D, PAGE_SIZE, HAS_STARTS),)
    else:
        result = (
            load_pages(pages, head, start, seqlens, 0, BLOCK, BLOCK_D, PAGE_SIZE, HAS_STARTS),
            load_pages(pages, head, start, seqlens, 1, BLOCK, BLOCK_D, PAGE_SIZE, HAS_STARTS),
            load_pages(pages, head, start, seqlens, 2, BLOCK, BLOCK_D, PAGE_SIZE, HAS_STARTS),
        )
    return result


@triton.jit
def zero_chunks(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, D_CHUNKS: tl.constexpr):
    """Return float32 zeros in chunks."""
    zeros = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if D_CHUNKS == 1:  # noqa: SIM108
        result = (zeros,)
    else:
        result = (zeros, zeros, zeros)
    return result


@triton.jit
def zero_missing_rows(chunks, exists, D_CHUNKS: tl.constexpr):
    """Write zeros into the rows that do not exist, by a mask [BLOCK]: zero times NaN is NaN."""
    if D_CHUNKS == 1:
        result = (tl.where(exists[:, None], chunks[0], 0.0),)
    else:
        result = (
            tl.where(exists[:, None], chunks[0], 0.0),
            tl.where(exists[:, None], chunks[1], 0.0),
            tl.where(exists[:, None], chunks[2], 0.0),
        )
    return result


@triton.jit
def dot_chunks(a_chunks, b_chunks, PRECISION: tl.constexpr, D_CHUNKS: tl.constexpr):
    """Return a · bᵀ, summed over all chunks: float32, or int32 of int8."""
    product = tl.dot(a_chunks[0], b_chunks[0].T, input_precision=PRECISION)
    if D_CHUNKS == 3:
        product = tl.dot(a_chunks[1], b_chunks[1].T, product, input_precision=PRECISION, out_dtype=product.dtype)
        product = tl.dot(a_chunks[2], b_chunks[2].T, product, input_precision=PRECISION, out_dtype=product.dtype)
    return product


@triton.jit
def accumulate_chunks(a, chunks, acc_chunks, PRECISION: tl.constexpr, D_CHUNKS: tl.constexpr):
    """Return acc + a · chunks."""
    a = a.to(chunks[0].dtype)
    if D_CHUNKS == 1:
        result = (tl.dot(a, chunks[0], acc_chunks[0], input_precision=PRECISION),)
    else:
        result = (
            tl.dot(a, chunks[0], acc_chunks[0], input_precision=PRECISION),
            tl.dot(a, chunks[1], acc_chunks[1], input_precision=PRECISION),
            tl.dot(a, chunks[2], acc_chunks[2], input_precision=PRECISION),
        )
    return result


@triton.jit
def store_tile(
    target,
    tile,
    batch,
    head,
    offset,
    start,
    n_rows,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Store the rows of a tile [BLOCK, BLOCK_D] that lie below n_rows, counted from an offset.

    The target is a descriptor, whose last row is n_rows, and the offset is 0. If PACKED, where the next sequence
    follows, it is a `RowTarget` of batch 0.
    """
    if PACKED:
        row = start + tl.arange(0, BLOCK)
        feature = CHUNK * BLOCK_D + tl.arange(0, BLOCK_D)
        offsets = wide(head) * target.stride_head + wide(offset + row)[:, None] * target.stride_token + feature[None, :]
        mask = (row < n_rows)[:, None] & (feature < target.head_dim)[None, :]
        tl.store(target.ptr + offsets, tile.to(target.ptr.dtype.element_ty), mask)
    else:
        target.store([batch, head, start, CHUNK * BLOCK_D], tile.to(target.dtype).reshape(1, 1, BLOCK, BLOCK_D))


@triton.jit
def load_table(table, batch, rows, n_rows, N_PAIRS: tl.constexpr, R: tl.constexpr):
    """Load cos and sin of rows, [BLOCK, N_PAIRS]; 1 and 0 past the last row, and past R."""
    pair = tl.arange(0, N_PAIRS)[None, :]
    mask = (rows < n_rows)[:, None] & (pair < R // 2)
    offsets = wide(batch) * table.stride_batch + wide(rows)[:, None] * table.stride_token + pair
    cos = tl.load(table.cos + offsets, mask, other=1.0)
    sin = tl.load(table.sin + offsets, mask, other=0.0)
    return cos, sin


@triton.jit
def _inverse_rotate_by(tile, cos, sin, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate pairs of features back, [BLOCK, BLOCK_D] of float32, by cos and sin [BLOCK, BLOCK_D / 2]."""
    N_PAIRS: tl.constexpr = BLOCK_D // 2
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(tile, (BLOCK, N_PAIRS, 2)))
        tile = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (BLOCK, BLOCK_D))
    else:
        a, b = tl.split(tl.permute(tl.reshape(tile, (BLOCK, 2, N_PAIRS)), (0, 2, 1)))
        rotated = tl.permute(tl.join(a * cos + b * sin, b * cos - a * sin), (0, 2, 1))
        tile = tl.reshape(rotated, (BLOCK, BLOCK_D))
    return tile


@triton.jit
def inverse_rotate(
    tile,
    table,
    batch,
    rows,
    n_rows,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate a gradient back, [BLOCK, BLOCK_D] of float32: the transpose of the features' map.

    Half-split pairs must be those of the whole tile: R = BLOCK_D.
    """
    cos, sin = load_table(table, batch, rows, n_rows, BLOCK_D // 2, R)
    return _inverse_rotate_by(tile, cos, sin, BLOCK, BLOCK_D, INTERLEAVED)


@triton.jit
def rebase_rotation(
    tile,
    old_table,
    new_table,
    batch,
    rows,
    n_rows,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return x with inverse_rotate(x, new_table) = inverse_rotate(tile, old_table), or = tile without an old table."""
    cos, sin = load_table(new_table, batch, rows, n_rows, BLOCK_D // 2, R)
    square = cos * cos + sin * sin
    inverse = tl.where(square > 0, 1 / square, 0.0)
    cos *= inverse
    sin *= inverse
    if old_table is None:
        by_cos = cos
        by_sin = -sin
    else:
        old_cos, old_sin = load_table(old_table, batch, rows, n_rows, BLOCK_D // 2, R)
        by_cos = old_cos * cos + old_sin * sin
        by_sin = old_sin * cos - old_cos * sin
    return _inverse_rotate_by(tile, by_cos, by_sin, BLOCK, BLOCK_D, INTERLEAVED)


@triton.jit
def mask_of_head(mask, batch, head):
    """Return the mask's pointer at one head; None without a mask."""
    ptr = None
    if mask.ptr is not None:
        ptr = mask.ptr + wide(batch) * mask.stride_batch + wide(head) * mask.stride_head
    return ptr


@triton.jit
def numbers_of_head(ptr, scores, batch, head):
    """Return a pointer with the strides of the score function's numbers, at one head."""
    ptr += wide(head) * scores.params_stride
    if scores.params_stride_batch is not None:
        ptr += wide(batch) * scores.params_stride_batch
    return ptr


@triton.jit
def params_of_head(scores, batch, head):
    """Return the pointer to the score function's numbers at one head; None without any."""
    ptr = None
    if scores.params is not None:
        ptr = numbers_of_head(scores.params, scores, batch, head)
    return ptr


@triton.jit
def position_origin(positions, batch, offset):
    """Return the position that others are counted from, so that float32 holds them: the first key's, or 0."""
    origin = 0
    if positions is not None:
        ptr = positions.ptr + wide(batch) * positions.stride_batch + wide(offset) * positions.stride_token
        origin = wide(tl.load(ptr, offset < positions.n_tokens, other=0))
    return origin


@triton.jit
def load_positions(positions, batch, offset, start, default, origin, BLOCK: tl.constexpr):
    """Load the positions of a tile's tokens, from the origin, in float32; `default` is that of token `start`."""
    token = tl.arange(0, BLOCK)
    if positions is not None:
        position = (load_int_positions(positions, batch, offset, start, BLOCK) - origin).to(tl.float32)
    else:
        # One conversion for each tile: they are as slow as exponentials.
        position = (default - origin).to(tl.float32) + token.to(tl.float32)
    return position


@triton.jit
def load_int_positions(positions, batch, offset, start, BLOCK: tl.constexpr):
    """Load the positions of a tile's tokens, int64; 0 past the last token."""
    index = offset + start + tl.arange(0, BLOCK)
    ptrs = positions.ptr + wide(batch) * positions.stride_batch + wide(index) * positions.stride_token
    return wide(tl.load(ptrs, index < positions.n_tokens, other=0))


@triton.jit
def relative_positions(
    held, streamed, batch, offset, start, default, origin, BLOCK: tl.constexpr, INDEX_POSITIONS: tl.constexpr
):
    """Return positions of the tile that a program holds, and of one that it streams, from a common origin.

    With INDEX_POSITIONS the origin is the streamed tile's first token. Its positions then are the same in every step,
    so a score function's terms of them are computed once.
    """
    if INDEX_POSITIONS:
        streamed_pos = tl.arange(0, BLOCK).to(tl.float32)
        held_pos = held - default.to(tl.float32)
    else:
        streamed_pos = load_positions(streamed, batch, offset, start, default, origin, BLOCK)
        held_pos = held
    return held_pos, streamed_pos


@triton.jit
def gate_pointers(gate, batch, head, row, feature):
    """Return pointers to rows of a gate, [rows, features]; [rows, 1] where a row has one number."""
    offsets = wide(batch) * gate.stride_batch + wide(head) * gate.stride_head + wide(row) * gate.stride_token
    offsets = offsets[:, None]
    if gate.stride_feature is not None:
        offsets = offsets + wide(feature)[None, :] * gate.stride_feature
    return gate.ptr + offsets


@triton.jit
def gate_mask(gate, exists, feature):
    """Return which elements of `gate_pointers` there are."""
    mask = exists[:, None]
    if gate.stride_feature is not None:
        mask = mask & (feature < gate.head_dim)[None, :]
    return mask


@triton.jit
def load_sigmoid(gate, batch, head, row, exists, feature):
    """Load σ of a gate's rows, [rows, features] or [rows, 1], float32; one half where there is none."""
    pointers = gate_pointers(gate, batch, head, row, feature)
    x = tl.load(pointers, gate_mask(gate, exists, feature), other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def differentiate_gate(out, do, gate, grad_gate, batch, head, row, exists, feature):
    """Return dO · σ(g), of tiles of the gated output and its gradient, and store the gate's gradient if it is wanted.

    The output O before the gate is not read: dg = dO · O · σ · (1 − σ), and O · σ is the gated one.
    """
    sigma = load_sigmoid(gate, batch, head, row, exists, feature)
    if grad_gate.ptr is not None:
        dg = do.to(tl.float32) * out.to(tl.float32)
        if gate.stride_feature is None:
            dg = tl.sum(dg, 1)[:, None]
        dg *= 1.0 - sigma
        pointers = gate_pointers(grad_gate, batch, head, row, feature)
        tl.store(pointers, dg.to(grad_gate.ptr.dtype.element_ty), gate_mask(grad_gate, exists, feature))
    return (do.to(tl.float32) * sigma).to(do.dtype)


@triton.jit
def partner_of(feature, CONFIG: tl.constexpr):
    """Return the pair of each rotated feature, the pair's other feature, and whether the feature is its second one."""
    R: tl.constexpr = CONFIG.ROTARY_DIM
    rotary_feature = feature - CONFIG.ROTARY_OFFSET
    if CONFIG.INTERLEAVED:
        pair = rotary_feature // 2
        is_second = rotary_feature % 2 == 1
        partner = tl.where(is_second, feature - 1, feature + 1)
    else:
        # Remainders, because the compiler keeps neighbours neighbours through them: loads of 16 bytes.
        P: tl.constexpr = CONFIG.PAIR_BLOCK
        if P == R:
            is_second = rotary_feature >= R // 2
            pair = rotary_feature % (R // 2)
            partner = (rotary_feature + R // 2) % R + CONFIG.ROTARY_OFFSET
        else:
            block = rotary_feature // P
            is_second = rotary_feature % P >= P // 2
            pair = block * (P // 2) + rotary_feature % (P // 2)
            partner = block * P + (rotary_feature + P // 2) % P + CONFIG.ROTARY_OFFSET
    return pair, partner, is_second
