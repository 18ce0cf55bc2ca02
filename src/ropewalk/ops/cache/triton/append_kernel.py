"""Norm, rotation, quantisation and the write into pages as one Triton kernel.

Shape letters: N tokens, H query heads, K key heads, D head dim, Dv that of values, R rotary dim (R/2 pairs).

A tile holds a head as two halves, the first and the second features of its half-split pairs, as `norm_kernel` does;
or, of interleaved pairs and of values, in the order of memory. 4-bit numbers need that order too, so that a group that
shares a scale, and the two numbers of a byte, are neighbours in a thread: where a half is not a whole number of groups,
the partners of pairs are loaded again, from the cache of the multiprocessor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.launch.kernel import Kernel


class Pages(NamedTuple):
    """A cache, or the scales beside it."""

    ptr: Any
    stride_page: Any
    stride_offset: Any
    stride_head: Any


class Tables(NamedTuple):
    """cos and sin, and what a token's row is looked up by."""

    cos_ptr: Any
    sin_ptr: Any
    cos_stride: Any
    sin_stride: Any
    n_rows: Any
    positions_ptr: Any  # None: row n is token n's
    positions_stride: Any
    positions_stride_axis: Any
    axes_ptr: Any  # None: one position for each token


class Rotation(NamedTuple):
    """Constants of the rotation of a row, all constexpr."""

    D: Any
    HALF: Any
    OFFSET: Any
    INTERLEAVED: Any
    N_AXES: Any
    UNIT: Any  # of the tables' strides
    BLOCK: Any  # features of a tile


class Norm(NamedTuple):
    """Constants of the norm, all constexpr."""

    IS_ON: Any
    EPS: Any
    OFFSET: Any
    AFTER: Any
    ACROSS: Any


@triton.jit
def _wide(index):
    return index.to(tl.int64)


@triton.jit
def _positions_of_pairs(token, token_mask, pair, is_rotated, tables, ROTATION: tl.constexpr):
    """Return the row of the tables of each rotated feature, and whether it is one; with axes, its pair's own."""
    if tables.axes_ptr is not None:
        axis = tl.load(tables.axes_ptr + pair, is_rotated, other=-1)
        is_axis = (axis >= 0) & (axis < ROTATION.N_AXES)
        ptrs = tables.positions_ptr + token * _wide(tables.positions_stride)
        ptrs += _wide(axis) * _wide(tables.positions_stride_axis)
        row = _wide(tl.load(ptrs, token_mask & is_rotated & is_axis, other=-1))
    elif tables.positions_ptr is not None:
        row = _wide(tl.load(tables.positions_ptr + token * _wide(tables.positions_stride), token_mask, other=-1))
    else:
        row = token
    return row, (row >= 0) & (row < tables.n_rows)


@triton.jit
def _load_tables(token, token_mask, pair, is_rotated, tables, ROTATION: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Load cos and sin of pairs, at a tile's shape: 1 and 0 where a feature is not rotated, NaN outside the tables."""
    if tables.axes_ptr is None:
        # The copies for each head have the same addresses, and the layout in which they are multiplied.
        pair += tl.zeros((1, BLOCK_HEADS, 1), tl.int32)
    row, inside = _positions_of_pairs(token, token_mask, pair, is_rotated, tables, ROTATION)
    mask = inside & is_rotated
    row = tl.where(inside, row, 0)
    cos_ptrs = tables.cos_ptr + row * _wide(tables.cos_stride) * ROTATION.UNIT + pair
    sin_ptrs = tables.sin_ptr + row * _wide(tables.sin_stride) * ROTATION.UNIT + pair
    if tables.axes_ptr is not None:  # one pair outside makes its token NaN
        inside = tl.min((inside | (is_rotated == 0)).to(tl.int32), axis=2, keep_dims=True) > 0
        cos = tl.load(cos_ptrs, mask, other=1.0).to(tl.float32)
        cos = tl.where(inside, cos, float("nan"))
    else:
        cos = tl.load(cos_ptrs, mask, other=tl.where(inside, 1.0, float("nan")).to(tables.cos_ptr.dtype.element_ty))
    sin = tl.load(sin_ptrs, mask, other=0.0).to(tl.float32)
    return cos.to(tl.float32), sin


@triton.jit
def _rstd(squares, width, NORM: tl.constexpr):
    total = tl.sum(squares, axis=2, keep_dims=True)
    if NORM.ACROSS:
        total = tl.sum(total, axis=1, keep_dims=True)
    return tl.rsqrt(total / width + NORM.EPS)


@triton.jit
def _load_weights(ptr, head, feature, mask, PER_HEAD: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr):
    """Load the factors of features: at a tile's shape, as the copies for each head cost little."""
    ptrs = ptr + (feature + head * D if PER_HEAD else feature + head * 0)
    weights = tl.load(ptrs, mask, other=0.0).to(tl.float32)
    if OFFSET != 0:
        weights += OFFSET
    return weights


@triton.jit
def half_features(ROTATION: tl.constexpr):
    """Return the first and the second features of half-split pairs, and masks of those that exist.

    The pairs after the first HALF are of features that are not rotated; an odd one of these has no partner.
    """
    HALF: tl.constexpr = ROTATION.HALF
    REST: tl.constexpr = ROTATION.D - 2 * HALF
    REST_HALF: tl.constexpr = (REST + 1) // 2
    pair = tl.arange(0, ROTATION.BLOCK // 2)[None, None, :]
    if REST == 0:
        first = pair
        second = pair + HALF
    elif ROTATION.OFFSET == 0:
        first = tl.where(pair < HALF, pair, pair + HALF)
        second = tl.where(pair < HALF, pair + HALF, pair + (HALF + REST_HALF))
    else:
        is_rotated = pair < HALF
        rest = pair - HALF
        partner = rest + REST_HALF
        first = tl.where(is_rotated, pair + ROTATION.OFFSET, rest + tl.where(rest < ROTATION.OFFSET, 0, 2 * HALF))
        second = partner + tl.where(partner < ROTATION.OFFSET, 0, 2 * HALF)
        second = tl.where(is_rotated, pair + (HALF + ROTATION.OFFSET), second)
    return first, second, pair < HALF + REST_HALF, pair < HALF + REST // 2


@triton.jit
def map_halves(
    ptrs, mask, head, token, token_mask, weight_ptr, width, tables, PER_HEAD: tl.constexpr, NORM: tl.constexpr,
    ROTATION: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Load heads, normalise and rotate them, in float32: the first and the second features of half-split pairs."""
    D: tl.constexpr = ROTATION.D
    first, second, has_first, has_second = half_features(ROTATION)
    a = tl.load(ptrs + first, mask & has_first, other=0.0)
    b = tl.load(ptrs + second, mask & has_second, other=0.0)
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    if HAS_WEIGHT:
        weight_a = _load_weights(weight_ptr, head, first, mask & has_first, PER_HEAD, NORM.OFFSET, D)
        weight_b = _load_weights(weight_ptr, head, second, mask & has_second, PER_HEAD, NORM.OFFSET, D)
    pair = tl.arange(0, ROTATION.BLOCK // 2)[None, None, :]
    cos, sin = _load_tables(token, token_mask, pair, pair < ROTATION.HALF, tables, ROTATION, BLOCK_HEADS)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if NORM.IS_ON and NORM.AFTER:
        a, b = a * cos - b * sin, a * sin + b * cos
    if NORM.IS_ON:
        rstd = _rstd(a * a + b * b, width, NORM)
        a = a * rstd
        b = b * rstd
        if HAS_WEIGHT:
            a = a * weight_a
            b = b * weight_b
    if not (NORM.IS_ON and NORM.AFTER):
        a, b = a * cos - b * sin, a * sin + b * cos
    return a, b


@triton.jit
def map_features(
    ptrs, mask, head, token, token_mask, weight_ptr, width, tables, PER_HEAD: tl.constexpr, NORM: tl.constexpr,
    ROTATION: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Load heads, normalise and rotate them, in float32 and in the order of memory: [tokens, heads, features]."""
    D: tl.constexpr = ROTATION.D
    HALF: tl.constexpr = ROTATION.HALF
    BLOCK: tl.constexpr = ROTATION.BLOCK
    IN_REGISTERS: tl.constexpr = ROTATION.INTERLEAVED and ROTATION.OFFSET % 2 == 0
    feature = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (feature < D)
    x = tl.load(ptrs + feature, mask, other=0.0)
    if IN_REGISTERS:  # the pairs are neighbours: one wide load, split in registers
        column = tl.arange(0, BLOCK // 2)[None, None, :] - ROTATION.OFFSET // 2
        is_rotated = (column >= 0) & (column < HALF)
        cos, sin = _load_tables(token, token_mask, column, is_rotated, tables, ROTATION, BLOCK_HEADS)
    else:
        rotary_feature = feature - ROTATION.OFFSET
        is_rotated = (rotary_feature >= 0) & (rotary_feature < 2 * HALF)
        if ROTATION.INTERLEAVED:
            is_second = rotary_feature % 2 == 1
            pair = rotary_feature // 2
            partner = tl.where(is_second, feature - 1, feature + 1)
        else:
            # Remainders, because the compiler keeps neighbours neighbours through them: loads of 16 bytes.
            is_second = rotary_feature >= HALF
            pair = rotary_feature % HALF
            partner = (rotary_feature + HALF) % (2 * HALF) + ROTATION.OFFSET
        cos, sin = _load_tables(token, token_mask, pair, is_rotated, tables, ROTATION, BLOCK_HEADS)
        sin = tl.where(is_second, sin, -sin)
        partner_mask = mask & is_rotated
        y = tl.load(ptrs + partner, partner_mask, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    if HAS_WEIGHT:
        weight = _load_weights(weight_ptr, head, feature, mask, PER_HEAD, NORM.OFFSET, D)
    if NORM.IS_ON and not NORM.AFTER:
        rstd = _rstd(x * x, width, NORM)
        x = x * rstd
        if HAS_WEIGHT:
            x = x * weight
        if not IN_REGISTERS:
            y = y * rstd
            if HAS_WEIGHT:
                y = y * _load_weights(weight_ptr, head, partner, partner_mask, PER_HEAD, NORM.OFFSET, D)
    if IN_REGISTERS:
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK // 2, 2)))
        x = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (x.shape[0], x.shape[1], BLOCK))
    else:
        x = x * cos + y * sin
    if NORM.IS_ON and NORM.AFTER:
        x = x * _rstd(x * x, width, NORM)
        if HAS_WEIGHT:
            x = x * weight
    return x


@triton.jit
def _round(x):
    """Round numbers of less than 2²² to the nearest integer, half to even: int32, of which the low bits count."""
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _to_fp8(x, NATIVE: tl.constexpr):
    """Round to float8_e4m3fn, saturating: its bits, uint8. GPUs before sm_89 have no instruction for it."""
    if NATIVE:
        number = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.abs(x)
        clamped = tl.minimum(magnitude, 448.0)
        of_normal = clamped.to(tl.int32, bitcast=True)
        of_normal = ((of_normal + 0x7FFFF + ((of_normal >> 20) & 1)) >> 20) - (120 << 3)
        of_subnormal = (clamped + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        number = tl.where(clamped < 0.015625, of_subnormal, of_normal)
        number = tl.where(magnitude == magnitude, number, 0x7F)
        number = (number | ((bits >> 24) & 0x80)).to(tl.uint8)
    return number


@triton.jit
def _largest(x, axis: tl.constexpr):
    """Return the largest magnitude along an axis, infinity where there is a NaN: no NaN is lost by the comparison."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude == magnitude, magnitude, float("inf")), axis=axis, keep_dims=True)


@triton.jit
def store_4bit(
    x, rows, scale_rows, group_stride, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, FEATURE_STRIDE: tl.constexpr
):
    """Store WIDTH features from FIRST on as 4-bit numbers in groups of 32, two in a byte, and their scales."""
    T: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = x.shape[2]
    groups = tl.reshape(x, (T, H, BLOCK // 32, 32))
    largest = _largest(groups, 3)
    scale = tl.where(largest < float("inf"), tl.minimum(largest * (1.0 / 7.0), 65504.0), largest).to(tl.float16)
    scale_as_read = scale.to(tl.float32)
    inverse = tl.where(scale_as_read > 0.0, 1.0 / scale_as_read, 0.0)
    number = _round(tl.minimum(tl.maximum(groups * inverse, -7.0), 7.0) + 8.0)
    low, high = tl.split(tl.reshape(number, (T, H, BLOCK // 2, 2)))
    byte = tl.arange(0, BLOCK // 2)[None, None, :]
    ptrs = rows + (byte + FIRST // 2) * FEATURE_STRIDE
    tl.store(ptrs, ((low & 15) | (high << 4)).to(tl.uint8), mask & (byte < WIDTH // 2))
    group = tl.arange(0, BLOCK // 32)[None, None, :]
    ptrs = scale_rows + (group + FIRST // 32) * _wide(group_stride)
    tl.store(ptrs, tl.reshape(scale, (T, H, BLOCK // 32)), mask & (group < WIDTH // 32))


@triton.jit
def factors_of_8bit(largest, scales, mask, FORMAT: tl.constexpr):
    """Return two factors that make values numbers, and store the scale of int8: [tokens, heads, 1]."""
    small = tl.full(mask.shape, 1.0, tl.float32)
    if FORMAT == 1:
        inverse = 1.0 / scales
    else:
        tl.store(scales, largest * (1.0 / 127.0), mask)
        small = tl.where(largest < 7.9e-31, 1.8446744073709552e19, 1.0)  # 2⁶⁴, before the inverse would be infinite
        inverse = tl.where(largest > 0.0, 127.0 / (largest * small), 0.0)
    return small, inverse


@triton.jit
def store_8bit(x, small, inverse, ptrs, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Store features as 8-bit numbers."""
    if FORMAT == 1:
        tl.store(ptrs, _to_fp8(x * inverse, NATIVE), mask)
    else:
        tl.store(ptrs, _round(x * small * inverse).to(tl.int8), mask)


@triton.jit
def store_features(
    x, rows, scales, group_stride, mask, FORMAT: tl.constexpr, D: tl.constexpr, FEATURE_STRIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Store heads whose features are in the order of memory as a cache's numbers, with the scales that are written.

    `scales` are values that are read (float8) or pointers to what is written.
    """
    feature = tl.arange(0, x.shape[2])[None, None, :]
    ptrs = rows + feature * FEATURE_STRIDE
    if FORMAT == 3:
        store_4bit(x.to(tl.float32), rows, scales, group_stride, mask, 0, D, FEATURE_STRIDE)
    elif FORMAT == 0:
        tl.store(ptrs, x.to(rows.dtype.element_ty), mask & (feature < D))
    else:
        x = x.to(tl.float32)
        small, inverse = factors_of_8bit(_largest(x, 2), scales, mask, FORMAT)
        store_8bit(x, small, inverse, ptrs, mask & (feature < D), FORMAT, NATIVE)


@triton.jit
def store_halves(
    a, b, rows, scales, group_stride, mask, FORMAT: tl.constexpr, ROTATION: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store first and second features of half-split pairs as a cache's numbers, with the scales that are written."""
    if FORMAT == 3:  # then all features are rotated, and each half has groups of its own
        store_4bit(a, rows, scales, group_stride, mask, 0, ROTATION.HALF, FEATURE_STRIDE)
        store_4bit(b, rows, scales, group_stride, mask, ROTATION.HALF, ROTATION.HALF, FEATURE_STRIDE)
    else:
        first, second, has_first, has_second = half_features(ROTATION)
        first_ptrs = rows + first * FEATURE_STRIDE
        second_ptrs = rows + second * FEATURE_STRIDE
        has_first = mask & has_first
        has_second = mask & has_second
        if FORMAT == 0:
            tl.store(first_ptrs, a.to(rows.dtype.element_ty), has_first)
            tl.store(second_ptrs, b.to(rows.dtype.element_ty), has_second)
        else:
            largest = tl.maximum(_largest(a, 2), _largest(b, 2))
            small, inverse = factors_of_8bit(largest, scales, mask, FORMAT)
            store_8bit(a, small, inverse, first_ptrs, has_first, FORMAT, NATIVE)
            store_8bit(b, small, inverse, second_ptrs, has_second, FORMAT, NATIVE)


@triton.jit
def _rows_of(pages, page, offset, head, UNIT: tl.constexpr):
    """Point at heads of tokens in a cache, or at their first scales."""
    rows = page * _wide(pages.stride_page) + offset * _wide(pages.stride_offset) + head * _wide(pages.stride_head)
    return pages.ptr + rows * UNIT


@triton.jit
def append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,  # None where there is none, and so are all that follow but the slots
    k_weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    axes_ptr,
    positions_ptr,
    slots_ptr,
    n_tokens,
    n_written,  # tokens that have a slot
    n_slots,  # of the cache
    n_rows,  # of cos and sin
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    q_out_stride_token,
    q_out_stride_head,
    k_cache_stride_page,
    k_cache_stride_offset,
    k_cache_stride_head,
    v_cache_stride_page,
    v_cache_stride_offset,
    v_cache_stride_head,
    k_scale_stride_page,
    k_scale_stride_offset,
    k_scale_stride_head,
    k_scale_stride_group,
    v_scale_stride_page,
    v_scale_stride_offset,
    v_scale_stride_head,
    v_scale_stride_group,
    cos_stride_row,
    sin_stride_row,
    positions_stride_token,
    positions_stride_axis,
    slots_stride,
    FORMAT: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    N_AXES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    AFTER: tl.constexpr,
    ACROSS: tl.constexpr,
    Q_PER_HEAD: tl.constexpr,
    K_PER_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_FEATURE_STRIDE: tl.constexpr,
    V_FEATURE_STRIDE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CACHE_STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NATIVE: tl.constexpr,  # instructions round to float8
):
    """Map the features of a group of heads of some tokens, and write them: groups of q, then of k, then of v."""
    Q_GROUPS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_GROUPS: tl.constexpr = (HK + BLOCK_HEADS - 1) // BLOCK_HEADS
    ROTATION: tl.constexpr = Rotation(D, HALF, ROTARY_OFFSET, INTERLEAVED, N_AXES, TABLE_STRIDE_UNIT, BLOCK_D)
    NORM: tl.constexpr = Norm(HAS_NORM, EPS, WEIGHT_OFFSET, AFTER, ACROSS)
    group = tl.program_id(0) % (Q_GROUPS + 2 * K_GROUPS)
    block = tl.program_id(0) // (Q_GROUPS + 2 * K_GROUPS)
    token = (_wide(block + tl.zeros((), tl.int32)) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None, None]
    token_mask = token < n_tokens
    tables = Tables(
        cos_ptr, sin_ptr, cos_stride_row, sin_stride_row, n_rows, positions_ptr, positions_stride_token,
        positions_stride_axis, axes_ptr,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK_HEADS)[None, :, None]
    if group < Q_GROUPS:
        q_head = group * BLOCK_HEADS + lane
        q_mask = token_mask & (q_head < HQ)
        q_ptrs = q_ptr + (token * _wide(q_stride_token) + q_head * _wide(q_stride_head)) * STRIDE_UNIT
        out_ptrs = q_out_ptr + (token * _wide(q_out_stride_token) + q_head * _wide(q_out_stride_head)) * STRIDE_UNIT
        Q_WIDTH: tl.constexpr = HQ * D if ACROSS else D
        if INTERLEAVED:
            q = map_features(
                q_ptrs, q_mask, q_head, token, token_mask, q_weight_ptr, Q_WIDTH, tables, Q_PER_HEAD, NORM, ROTATION,
                BLOCK_HEADS,
            )  # fmt: skip
            store_features(q, out_ptrs, None, None, q_mask, 0, D, 1, NATIVE)
        else:
            q_a, q_b = map_halves(
                q_ptrs, q_mask, q_head, token, token_mask, q_weight_ptr, Q_WIDTH, tables, Q_PER_HEAD, NORM, ROTATION,
                BLOCK_HEADS,
            )  # fmt: skip
            store_halves(q_a, q_b, out_ptrs, None, None, q_mask, 0, ROTATION, 1, NATIVE)
    else:
        # Loads need not wait for the slots: features of a token that is not written are read in vain.
        has_slot = token < n_written
        slot = _wide(tl.load(slots_ptr + token * _wide(slots_stride), has_slot, other=-1))
        is_written = (slot >= 0) & (slot < n_slots)
        slot = tl.where(is_written, slot, 0)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        head = (group - Q_GROUPS) % K_GROUPS * BLOCK_HEADS + lane
        exists = has_slot & (head < HK)
        mask = is_written & (head < HK)
        if group < Q_GROUPS + K_GROUPS:
            k_ptrs = k_ptr + (token * _wide(k_stride_token) + head * _wide(k_stride_head)) * STRIDE_UNIT
            k_pages = Pages(k_cache_ptr, k_cache_stride_page, k_cache_stride_offset, k_cache_stride_head)
            k_rows = _rows_of(k_pages, page, offset, head, CACHE_STRIDE_UNIT)
            k_scales = None
            if FORMAT == 1:  # loaded first: nothing waits for it later
                k_scales = tl.load(k_scale_ptr + head * k_scale_stride_head, head < HK, other=1.0)
            elif FORMAT > 0:
                k_scales = Pages(k_scale_ptr, k_scale_stride_page, k_scale_stride_offset, k_scale_stride_head)
                k_scales = _rows_of(k_scales, page, offset, head, 1)
            K_WIDTH: tl.constexpr = HK * D if ACROSS else D
            if INTERLEAVED or (FORMAT == 3 and (2 * HALF != D or HALF % 32 != 0)):
                k = map_features(
                    k_ptrs, exists, head, token, has_slot, k_weight_ptr, K_WIDTH, tables, K_PER_HEAD, NORM, ROTATION,
                    BLOCK_HEADS,
                )  # fmt: skip
                store_features(k, k_rows, k_scales, k_scale_stride_group, mask, FORMAT, D, K_FEATURE_STRIDE, NATIVE)
            else:
                k_a, k_b = map_halves(
                    k_ptrs, exists, head, token, has_slot, k_weight_ptr, K_WIDTH, tables, K_PER_HEAD, NORM, ROTATION,
                    BLOCK_HEADS,
                )  # fmt: skip
                store_halves(
                    k_a, k_b, k_rows, k_scales, k_scale_stride_group, mask, FORMAT, ROTATION, K_FEATURE_STRIDE, NATIVE
                )
        else:
            feature = tl.arange(0, BLOCK_DV)[None, None, :]
            v_ptrs = v_ptr + (token * _wide(v_stride_token) + head * _wide(v_stride_head)) * STRIDE_UNIT
            v = tl.load(v_ptrs + feature, exists & (feature < DV), other=0.0)
            v_pages = Pages(v_cache_ptr, v_cache_stride_page, v_cache_stride_offset, v_cache_stride_head)
            v_rows = _rows_of(v_pages, page, offset, head, CACHE_STRIDE_UNIT)
            v_scales = None
            if FORMAT == 1:
                v_scales = tl.load(v_scale_ptr + head * v_scale_stride_head, head < HK, other=1.0)
            elif FORMAT > 0:
                v_scales = Pages(v_scale_ptr, v_scale_stride_page, v_scale_stride_offset, v_scale_stride_head)
                v_scales = _rows_of(v_scales, page, offset, head, 1)
            store_features(v, v_rows, v_scales, v_scale_stride_group, mask, FORMAT, DV, V_FEATURE_STRIDE, NATIVE)


APPEND = Kernel(
    append_kernel, unaligned=("k_scale_ptr", "v_scale_ptr", "axes_ptr", "positions_ptr", "slots_ptr"), wide=("n_slots",)
)
