"""Merging two attentions of the same queries, to different keys, into one."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.launch.steps import Steps


@triton.jit(do_not_specialize=("first", "n_tokens"))
def merge_kernel(
    out_ptr,  # (B, T, H, D); rows from `first` on are written
    lse_ptr,  # (B, H, T), dense, natural; likewise
    other_ptr,  # (B, T − first, H, D)
    other_lse_ptr,  # (B, H, T − first), dense
    out_strides,  # of batch, token and head
    other_strides,
    first,
    n_heads,
    n_tokens,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weigh both outputs of BLOCK rows of one head by their share of the sum."""
    n_blocks = tl.cdiv(n_tokens - first, BLOCK)
    line = tl.program_id(0) // n_blocks
    row = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
    exists = row < n_tokens - first
    batch = line // n_heads
    head = line % n_heads
    lse_ptr += wide(line) * n_tokens + first
    lse = tl.load(lse_ptr + row, exists, other=0.0)
    other_lse = tl.load(other_lse_ptr + wide(line) * (n_tokens - first) + row, exists, other=0.0)
    largest = tl.maximum(lse, other_lse)
    weight = tl.exp(lse - largest)
    other_weight = tl.exp(other_lse - largest)
    total = weight + other_weight
    feature = tl.arange(0, BLOCK_D)[None, :]
    mask = exists[:, None] & (feature < D)
    out_stride_batch, out_stride_token, out_stride_head = out_strides
    other_stride_batch, other_stride_token, other_stride_head = other_strides
    start = wide(batch) * out_stride_batch + head * wide(out_stride_head) + feature
    out_ptrs = out_ptr + start + wide(row + first)[:, None] * out_stride_token
    start = wide(batch) * other_stride_batch + head * wide(other_stride_head) + feature
    other_ptrs = other_ptr + start + wide(row)[:, None] * other_stride_token
    out = tl.load(out_ptrs, mask, other=0.0).to(tl.float32) * (weight / total)[:, None]
    out += tl.load(other_ptrs, mask, other=0.0).to(tl.float32) * (other_weight / total)[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask)
    tl.store(lse_ptr + row, largest + tl.log(total), exists)


class MergeCall(NamedTuple):
    """The arguments of `merge`, all dense in their last dimension."""

    out: Tensor
    lse: Tensor
    other: Tensor
    other_lse: Tensor


def launch_merge(call: MergeCall, on: Steps) -> tuple[()]:
    """Merge with one launch."""
    out, other = call.out, call.other
    batch, tokens, heads, head_dim = out.shape
    rows = other.shape[1]
    block = 32
    on.launch(
        merge_kernel,
        batch * heads * triton.cdiv(rows, block),
        out_ptr=out,
        lse_ptr=call.lse,
        other_ptr=other,
        other_lse_ptr=call.other_lse,
        out_strides=out.stride()[:3],
        other_strides=other.stride()[:3],
        first=tokens - rows,
        n_heads=heads,
        n_tokens=tokens,
        D=head_dim,
        BLOCK=block,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
    )
    return ()


MERGE = Operation(MergeCall, lambda call: launch_merge)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention's output (B, T, H, D) and natural log-sum-exp (B, H, T), in place, with that of the last queries.

    Those are other (B, T', H, D) and other_lse (B, H, T'). Each of these queries must have attended something.
    """
    if other.numel() == 0:
        return
    assert lse.is_contiguous(), "lse is not dense"
    assert out.stride(3) == other.stride(3) == 1, "the features of out and other are not dense"
    MERGE.run(MergeCall(out, lse, other, other_lse.contiguous()))
