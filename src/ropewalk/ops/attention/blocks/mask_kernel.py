"""The Triton kernel that reads a bool mask into lists of blocks and bits, and its launch: the host waits for nothing.

Kernels that walk lists attend a mask by them. A call makes them anew: nothing says that a mask is what it was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.blocks.kernel import FULL, PARTIAL, compact
from ropewalk.ops.attention.call import BlockTables
from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.steps import AT_ONCE, Steps

BLOCK = 128  # tokens of a block, of queries and of keys


@triton.jit(do_not_specialize=("n_heads", "n_rows", "n_blocks", "n_slot_rows"))
def pack_kernel(
    marks_ptr,  # (B, H, M, N) of bytes
    slots_ptr,  # (B, H, M, N), int32
    bits_ptr,  # (slots, BLOCK, BLOCK / 32), int32: those of partial blocks are written
    mask_ptr,  # (B, H, Tq, Tk) of bytes
    stride_batch,
    stride_head,
    stride_query,
    stride_key,
    n_heads,
    n_queries,
    n_keys,
    n_rows,
    n_blocks,
    n_slot_rows,  # 1: all queries have one mask, and all rows the bits of the first; or n_rows
    FULL: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark one block of a mask as FULL, PARTIAL or without a pair, and pack the bits of a partial one."""
    program = tl.program_id(0)
    block = program % n_blocks
    row = program // n_blocks % n_rows
    head = program // n_blocks // n_rows % n_heads
    batch = program // n_blocks // n_rows // n_heads
    mask_ptr += wide(batch) * stride_batch + wide(head) * stride_head
    mask_ptr += wide(row) * BLOCK * stride_query + wide(block) * BLOCK * stride_key
    line = tl.arange(0, BLOCK)
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    n = word[:, None] * 32 + bit[None, :]
    inside = (row * BLOCK + line < n_queries)[:, None, None] & (block * BLOCK + n < n_keys)[None, :, :]
    ptrs = mask_ptr + wide(line)[:, None, None] * stride_query + wide(n)[None, :, :] * stride_key
    pairs = (tl.load(ptrs, inside, other=0) != 0).to(tl.int32)
    count = tl.sum(tl.sum(tl.sum(pairs, 2), 1), 0)
    n_inside = tl.minimum(n_queries - row * BLOCK, BLOCK) * tl.minimum(n_keys - block * BLOCK, BLOCK)
    is_partial = (count > 0) & (count < n_inside)
    mark = tl.where(count == n_inside, FULL, tl.where(is_partial, PARTIAL, 0))
    tl.store(marks_ptr + program, mark.to(tl.uint8))
    slot = (program // n_blocks // n_rows * n_slot_rows + row % n_slot_rows) * n_blocks + block
    tl.store(slots_ptr + program, slot)
    if is_partial & (row < n_slot_rows):
        words = tl.sum(pairs << bit[None, None, :], 2)
        bits_ptr += wide(slot) * (BLOCK * BLOCK // 32)
        tl.store(bits_ptr + line[:, None] * (BLOCK // 32) + word[None, :], words)


def list_mask(mask: Tensor, of: str, on: Steps = AT_ONCE) -> BlockTables:
    """Return the tables of a bool mask (B or 1, H or 1, Tq, Tk): lists of "rows", or "columns" instead, and bits."""
    for dim in range(2):
        if mask.stride(dim) == 0:  # expanded: all have one mask
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    batch, heads, n_queries, n_keys = mask.shape
    shape = (batch, heads, triton.cdiv(n_queries, BLOCK), triton.cdiv(n_keys, BLOCK))
    marks = torch.empty(shape, dtype=torch.uint8, device=mask.device)
    slots = torch.empty(shape, dtype=torch.int32, device=mask.device)
    n_slot_rows = min(1, shape[2]) if mask.stride(2) == 0 else shape[2]
    n_slots = batch * heads * n_slot_rows * shape[3]
    bits = torch.empty(n_slots, BLOCK, BLOCK // 32, dtype=torch.int32, device=mask.device)
    on.launch(
        pack_kernel,
        marks.numel(),
        marks_ptr=marks,
        slots_ptr=slots,
        bits_ptr=bits,
        mask_ptr=mask.view(torch.uint8),
        **dict(zip(("stride_batch", "stride_head", "stride_query", "stride_key"), mask.stride(), strict=True)),
        n_heads=heads,
        n_queries=n_queries,
        n_keys=n_keys,
        n_rows=shape[2],
        n_blocks=shape[3],
        n_slot_rows=n_slot_rows,
        FULL=FULL,
        PARTIAL=PARTIAL,
        BLOCK=BLOCK,
        num_warps=8,
    )
    lists = compact(marks, of, shape[3] if of == "rows" else shape[2], True, on)
    none = slots.new_empty(0)
    rows, columns = (lists, none) if of == "rows" else (none, lists)
    return BlockTables(rows, columns, slots, bits, None, BLOCK, BLOCK)
