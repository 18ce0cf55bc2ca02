"""The rotation as one Triton kernel, and how it is specialised and compiled.

Shape letters: B batch, T tokens, H heads (Hq of q, Hk of k), D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource


class Positions(IntEnum):
    """Where a token's position comes from."""

    INDEX = 0  # its index in the batch row, plus an offset
    OFFSETS = 1  # its index, plus a number per batch row
    TOKENS = 2  # a number per token
    PACKED = 3  # its index in its own sequence, found in cu_seqlens, plus an offset


@dataclass(frozen=True)
class Specialisation:
    """All that the compiled kernel depends on: every distinct one is one binary.

    Arguments that vary from call to call, such as lengths, strides and the direction, are not among them.
    """

    dtype: str  # of q and k, in Triton's letters: bf16, fp16, fp32, fp64
    table_dtype: str  # of cos and sin
    index_dtype: str  # of positions and cu_seqlens: i32 or i64
    positions: Positions
    head_dim: int  # D
    half: int  # R / 2
    rotary_offset: int
    interleaved: bool
    inplace: bool
    pointer_alignment: int  # bytes: the largest power of two up to 16 that divides every address
    stride_unit: int  # elements: strides of q, k and their results are given in multiples of it
    table_stride_unit: int  # the same of cos and sin
    unit_feature_stride: bool  # whether neighbouring features, and columns of cos and sin, are neighbours in memory
    block_tokens: int
    block_heads: int
    num_warps: int


@triton.jit
def _token_rows(
    token,
    batch,
    positions_ptr,
    positions_stride_batch,
    positions_stride_token,
    cu_seqlens_ptr,
    n_sequences,
    search_steps,
    offset,
    token_mask,
    POSITIONS: tl.constexpr,
):
    """Position of each token, int64; −1 where a packed token belongs to no sequence."""
    if POSITIONS == 0:
        position = token + offset
    elif POSITIONS == 1:
        position = token + tl.load(positions_ptr + batch * positions_stride_batch).to(tl.int64)
    elif POSITIONS == 2:
        position_ptr = positions_ptr + batch * positions_stride_batch + token * positions_stride_token
        position = tl.load(position_ptr, mask=token_mask, other=-1).to(tl.int64)
    else:
        # How many sequences end at or before the token, by bisection.
        low = tl.zeros_like(token)
        high = low + n_sequences
        for _ in range(search_steps):
            middle = (low + high) // 2
            searching = low < high
            end = tl.load(cu_seqlens_ptr + 1 + middle, mask=searching, other=0).to(tl.int64)
            low = tl.where(searching & (end <= token), middle + 1, low)
            high = tl.where(searching & (end > token), middle, high)
        covered = low < n_sequences
        start = tl.load(cu_seqlens_ptr + low, mask=covered, other=0).to(tl.int64)
        position = tl.where(covered, token - start + offset, -1)
    return position


@triton.jit
def rotate_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    cu_seqlens_ptr,
    offset,
    direction,  # +1 turns forward, −1 back
    n_batches,
    n_tokens,
    n_q_heads,
    n_k_heads,
    n_rows,  # of cos and sin
    n_sequences,
    search_steps,
    q_stride_batch,
    q_stride_token,
    q_stride_head,
    q_stride_feature,
    k_stride_batch,
    k_stride_token,
    k_stride_head,
    k_stride_feature,
    q_out_stride_batch,
    q_out_stride_token,
    q_out_stride_head,
    q_out_stride_feature,
    k_out_stride_batch,
    k_out_stride_token,
    k_out_stride_head,
    k_out_stride_feature,
    cos_stride_batch,
    cos_stride_row,
    cos_stride_pair,
    sin_stride_batch,
    sin_stride_row,
    sin_stride_pair,
    positions_stride_batch,
    positions_stride_token,
    POSITIONS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INPLACE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    TABLE_STRIDE_UNIT: tl.constexpr,
    UNIT_FEATURE_STRIDE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Batch rows run fastest: those that share a table's rows read them while they are in cache.
    batch = (tl.program_id(0) % n_batches).to(tl.int64)
    token_block = (tl.program_id(0) // n_batches).to(tl.int64)
    # Every tile is [BLOCK_TOKENS, BLOCK_HEADS, features].
    token = token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    token_mask = token < n_tokens
    position = _token_rows(
        token, batch, positions_ptr, positions_stride_batch, positions_stride_token, cu_seqlens_ptr, n_sequences,
        search_steps, offset, token_mask, POSITIONS,
    )  # fmt: skip
    inside = (position >= 0) & (position < n_rows)

    head_in_block = tl.arange(0, BLOCK_HEADS)[None, :, None]
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    # The tables are read at the full tile's shape: the copies for each head are the same addresses, hence cost nothing,
    # and arrive in the layout in which they are multiplied. A row outside the table is NaN, and makes its tokens NaN.
    table_mask = inside & (head_in_block < BLOCK_HEADS) & (pair < HALF)
    column = pair + head_in_block * 0
    if UNIT_FEATURE_STRIDE:
        cos_stride_pair = 1
        sin_stride_pair = 1
    cos_ptrs = cos_ptr + batch * (cos_stride_batch * TABLE_STRIDE_UNIT) + column * cos_stride_pair
    sin_ptrs = sin_ptr + batch * (sin_stride_batch * TABLE_STRIDE_UNIT) + column * sin_stride_pair
    cos = tl.load(cos_ptrs + position * (cos_stride_row * TABLE_STRIDE_UNIT), table_mask, other=float("nan"))
    sin = tl.load(sin_ptrs + position * (sin_stride_row * TABLE_STRIDE_UNIT), table_mask, other=float("nan"))
    cos = cos.to(COMPUTE_DTYPE)
    sin = sin.to(COMPUTE_DTYPE) * direction

    n_q_groups = tl.cdiv(n_q_heads, BLOCK_HEADS)
    n_groups = n_q_groups + tl.cdiv(n_k_heads, BLOCK_HEADS)
    for group in range(tl.program_id(1), n_groups, tl.num_programs(1)):
        is_q = group < n_q_groups
        head = (tl.where(is_q, group, group - n_q_groups) * BLOCK_HEADS + head_in_block).to(tl.int64)
        head_mask = token_mask & (head < tl.where(is_q, n_q_heads, n_k_heads))
        x_ptr = tl.where(is_q, q_ptr, k_ptr)
        out_ptr = tl.where(is_q, q_out_ptr, k_out_ptr)
        x_ptr += batch * (tl.where(is_q, q_stride_batch, k_stride_batch) * STRIDE_UNIT)
        out_ptr += batch * (tl.where(is_q, q_out_stride_batch, k_out_stride_batch) * STRIDE_UNIT)
        x_ptrs = (
            x_ptr
            + token * (tl.where(is_q, q_stride_token, k_stride_token) * STRIDE_UNIT)
            + head * (tl.where(is_q, q_stride_head, k_stride_head) * STRIDE_UNIT)
        )
        out_ptrs = (
            out_ptr
            + token * (tl.where(is_q, q_out_stride_token, k_out_stride_token) * STRIDE_UNIT)
            + head * (tl.where(is_q, q_out_stride_head, k_out_stride_head) * STRIDE_UNIT)
        )
        x_stride_feature = tl.where(is_q, q_stride_feature, k_stride_feature)
        out_stride_feature = tl.where(is_q, q_out_stride_feature, k_out_stride_feature)
        if UNIT_FEATURE_STRIDE:
            x_stride_feature = 1
            out_stride_feature = 1

        if INTERLEAVED:
            # Whole pairs in one wide access, taken apart in registers.
            feature = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
            mask = head_mask & (feature < 2 * HALF)
            feature += ROTARY_OFFSET
            x = tl.load(x_ptrs + feature * x_stride_feature, mask=mask, other=0.0).to(COMPUTE_DTYPE)
            a, b = tl.split(tl.reshape(x, (BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF, 2)))
            turned = tl.join(a * cos - b * sin, a * sin + b * cos)
            turned = tl.reshape(turned, (BLOCK_TOKENS, BLOCK_HEADS, 2 * BLOCK_HALF))
            tl.store(out_ptrs + feature * out_stride_feature, turned, mask=mask)
        else:
            mask = head_mask & (pair < HALF)
            first = pair + ROTARY_OFFSET
            second = first + HALF
            a = tl.load(x_ptrs + first * x_stride_feature, mask=mask, other=0.0).to(COMPUTE_DTYPE)
            b = tl.load(x_ptrs + second * x_stride_feature, mask=mask, other=0.0).to(COMPUTE_DTYPE)
            tl.store(out_ptrs + first * out_stride_feature, a * cos - b * sin, mask=mask)
            tl.store(out_ptrs + second * out_stride_feature, a * sin + b * cos, mask=mask)

        if 2 * HALF < D:
            # The features that are not rotated: copied, or NaN where the position is outside the table.
            feature = tl.arange(0, BLOCK_D)[None, None, :]
            rest = (feature < ROTARY_OFFSET) | (feature >= ROTARY_OFFSET + 2 * HALF) & (feature < D)
            if INPLACE:
                rest_mask = head_mask & rest & (inside == 0)
                nans = tl.full((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_D), float("nan"), out_ptr.dtype.element_ty)
                tl.store(out_ptrs + feature * out_stride_feature, nans, mask=rest_mask)
            else:
                rest_mask = head_mask & rest
                x = tl.load(x_ptrs + feature * x_stride_feature, mask=rest_mask, other=0.0)
                x = tl.where(inside, x, float("nan"))
                tl.store(out_ptrs + feature * out_stride_feature, x, mask=rest_mask)


_INT32_ARGUMENTS = {"direction", "n_batches", "n_q_heads", "n_k_heads", "search_steps"}
_COMPUTE_DTYPES = {"fp64": tl.float64}


def kernel_constants(spec: Specialisation) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {
        "POSITIONS": int(spec.positions),
        "D": spec.head_dim,
        "HALF": spec.half,
        "ROTARY_OFFSET": spec.rotary_offset,
        "INTERLEAVED": spec.interleaved,
        "INPLACE": spec.inplace,
        "STRIDE_UNIT": spec.stride_unit,
        "TABLE_STRIDE_UNIT": spec.table_stride_unit,
        "UNIT_FEATURE_STRIDE": spec.unit_feature_stride,
        "COMPUTE_DTYPE": _COMPUTE_DTYPES.get(spec.dtype, tl.float32),
        "BLOCK_TOKENS": spec.block_tokens,
        "BLOCK_HEADS": spec.block_heads,
        "BLOCK_HALF": triton.next_power_of_2(spec.half),
        "BLOCK_D": triton.next_power_of_2(spec.head_dim),
    }


def kernel_source(spec: Specialisation) -> ASTSource:
    """What Triton compiles for `spec`; it needs no GPU."""
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), f"*{spec.dtype}")
    pointers |= dict.fromkeys(("cos_ptr", "sin_ptr"), f"*{spec.table_dtype}")
    pointers |= dict.fromkeys(("positions_ptr", "cu_seqlens_ptr"), f"*{spec.index_dtype}")
    constants = kernel_constants(spec)
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32" if name in _INT32_ARGUMENTS else "i64")
        for name in rotate_kernel.arg_names
    }
    aligned = ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_ptr", "sin_ptr")
    attributes = {
        (rotate_kernel.arg_names.index(name),): [["tt.divisibility", spec.pointer_alignment]] for name in aligned
    }
    return ASTSource(rotate_kernel, signature, constexprs=constants, attrs=attributes)


def compile_kernel(spec: Specialisation, target: Any = None) -> Any:
    """Compile the kernel for `target`, or for the GPU that is there."""
    return triton.compile(kernel_source(spec), target=target, options={"num_warps": spec.num_warps})
