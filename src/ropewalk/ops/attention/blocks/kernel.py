"""The Triton kernels that sort, deduplicate and transpose lists of blocks, and their launches.

A map (B, H, M, N) of bytes has FULL or PARTIAL where a block is listed. Its rows are compacted into sorted lists of
blocks of keys, and its columns into those of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.launch.steps import AT_ONCE, Steps

FULL, PARTIAL = 2, 1  # all pairs of a block; those that bits choose
_WIDTHS = {"rows": (8, 128), "columns": (32, 32)}  # lines and items of a step: consecutive bytes in either direction


@triton.jit(do_not_specialize=("n_listed", "n_blocks"))
def mark_kernel(
    map_ptr,  # (B, H, M, N) of bytes
    counts_ptr,  # (B or 1, H or 1, M)
    indices_ptr,  # (B or 1, H or 1, M, n)
    counts_stride_batch,
    counts_stride_head,
    counts_stride_row,
    stride_batch,
    stride_head,
    stride_row,
    stride_entry,
    n_heads,
    n_rows,
    n_listed,
    n_blocks,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the blocks of one row's list; what its count or an index says beyond the memory is left out."""
    program = tl.program_id(0)
    row = program % n_rows
    head = program // n_rows % n_heads
    batch = program // n_rows // n_heads
    counts_ptr += wide(batch) * counts_stride_batch + wide(head) * counts_stride_head + wide(row) * counts_stride_row
    indices_ptr += wide(batch) * stride_batch + wide(head) * stride_head + wide(row) * stride_row
    map_ptr += wide(program) * n_blocks
    count = tl.minimum(tl.maximum(tl.load(counts_ptr), 0), n_listed).to(tl.int32)
    for start in tl.range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        listed = entry < count
        index = tl.load(indices_ptr + wide(entry) * stride_entry, listed, other=-1)
        listed = listed & (index >= 0) & (index < n_blocks)
        tl.store(map_ptr + index, tl.full((BLOCK,), VALUE, tl.uint8), listed)


@triton.jit
def _compact(
    map_ptrs, out_ptrs, line, n_lines, n_items, stride_item, n_before, VALUE, LINES: tl.constexpr, ITEMS: tl.constexpr
):
    """Append the items of some lines that have a value to their lists, and return how many each has then."""
    for start in tl.range(0, n_items, ITEMS):
        item = start + tl.arange(0, ITEMS)
        inside = (line < n_lines)[:, None] & (item < n_items)[None, :]
        found = tl.load(map_ptrs[:, None] + wide(item)[None, :] * stride_item, inside, other=0) == VALUE
        slot = n_before[:, None] + tl.cumsum(found.to(tl.int32), 1) - 1
        tl.store(out_ptrs[:, None] + 2 + slot, tl.zeros((LINES, ITEMS), tl.int32) + item[None, :], found)
        n_before += tl.sum(found.to(tl.int32), 1)
    return n_before


@triton.jit(do_not_specialize=("n_lines", "n_items", "stride_line", "stride_item", "width"))
def compact_kernel(
    out_ptr,  # (B · H, lines, width), int32: two counts, and the items
    map_ptr,
    n_lines,
    n_items,
    stride_line,
    stride_item,
    width,
    HAS_PARTIAL: tl.constexpr,
    FULL: tl.constexpr,
    PARTIAL: tl.constexpr,
    LINES: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Write the lists of LINES rows or columns of one head's map: the FULL ones, then the PARTIAL ones."""
    n_programs = tl.cdiv(n_lines, LINES)
    head = tl.program_id(0) // n_programs
    line = tl.program_id(0) % n_programs * LINES + tl.arange(0, LINES)
    map_ptrs = map_ptr + wide(head) * n_lines * n_items + wide(line) * stride_line
    out_ptrs = out_ptr + (wide(head) * n_lines + line) * width
    none = tl.zeros((LINES,), tl.int32)
    n_full = _compact(map_ptrs, out_ptrs, line, n_lines, n_items, stride_item, none, FULL, LINES, ITEMS)
    n_partial = none
    n_listed = n_full
    if HAS_PARTIAL:
        n_listed = _compact(map_ptrs, out_ptrs, line, n_lines, n_items, stride_item, n_full, PARTIAL, LINES, ITEMS)
        n_partial = n_listed - n_full
    for start in tl.range(0, width - 2, ITEMS):  # defined, so that one list gives the same bits each time
        item = start + tl.arange(0, ITEMS)
        rest = (line < n_lines)[:, None] & (item < width - 2)[None, :] & (item[None, :] >= n_listed[:, None])
        tl.store(out_ptrs[:, None] + 2 + item[None, :], tl.zeros((LINES, ITEMS), tl.int32), rest)
    tl.store(out_ptrs, n_full, line < n_lines)
    tl.store(out_ptrs + 1, n_partial, line < n_lines)


def mark(marks: Tensor, counts: Tensor, indices: Tensor, value: int, on: Steps = AT_ONCE) -> None:
    """Mark lists in a map (B, H, M, N), with one launch."""
    batch, heads, rows, n_blocks = marks.shape
    of_counts = [0 if size == 1 else stride for size, stride in zip(counts.shape[:2], counts.stride(), strict=False)]
    of_indices = [0 if size == 1 else stride for size, stride in zip(indices.shape[:2], indices.stride(), strict=False)]
    on.launch(
        mark_kernel,
        batch * heads * rows,
        map_ptr=marks,
        counts_ptr=counts,
        indices_ptr=indices,
        counts_stride_batch=of_counts[0],
        counts_stride_head=of_counts[1],
        counts_stride_row=counts.stride(2),
        stride_batch=of_indices[0],
        stride_head=of_indices[1],
        stride_row=indices.stride(2),
        stride_entry=indices.stride(3),
        n_heads=heads,
        n_rows=rows,
        n_listed=indices.shape[3],
        n_blocks=n_blocks,
        VALUE=value,
        BLOCK=128,
        num_warps=1,
    )


def compact(marks: Tensor, of: str, width: int, has_partial: bool, on: Steps = AT_ONCE) -> Tensor:
    """Return the lists of a map's "rows" or "columns", (B, H, lines, 3 + width), with one launch."""
    batch, heads, rows, columns = marks.shape
    lines, items, strides = (rows, columns, (columns, 1)) if of == "rows" else (columns, rows, (1, columns))
    out = torch.empty(batch, heads, lines, 3 + width, dtype=torch.int32, device=marks.device)
    block_lines, block_items = _WIDTHS[of]
    on.launch(
        compact_kernel,
        batch * heads * triton.cdiv(lines, block_lines),
        out_ptr=out,
        map_ptr=marks,
        n_lines=lines,
        n_items=items,
        stride_line=strides[0],
        stride_item=strides[1],
        width=3 + width,
        HAS_PARTIAL=has_partial,
        FULL=FULL,
        PARTIAL=PARTIAL,
        LINES=block_lines,
        ITEMS=block_items,
        num_warps=4,
    )
    return out


class ListsCall(NamedTuple):
    """Lists of blocks, in any order and with duplicates."""

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None
    n_blocks: int
    has_partial: bool
    columns: bool  # lists of columns, too


def make_lists(call: ListsCall, on: Steps) -> tuple[Tensor, Tensor | None]:
    """Return sorted lists without duplicates of rows, and of columns if they are wanted."""
    lists = [(call.counts, call.indices, PARTIAL if call.has_partial else FULL)]
    if call.full_counts is not None and call.full_indices is not None:
        lists.append((call.full_counts, call.full_indices, FULL))
    shape = [max(sizes) for sizes in zip(*(counts.shape for counts, *_ in lists), strict=True)]
    marks = torch.empty(*shape, call.n_blocks, dtype=torch.uint8, device=call.counts.device)
    on.operate(Tensor.zero_, marks)
    width = 0
    for counts, indices, value in lists:
        width += indices.shape[3]
        if indices.shape[3]:
            mark(marks, counts, indices, value, on)
    rows = compact(marks, "rows", min(width, call.n_blocks), call.has_partial, on)
    return rows, compact(marks, "columns", marks.shape[2], call.has_partial, on) if call.columns else None


LISTS = Operation(ListsCall, lambda call: make_lists)
