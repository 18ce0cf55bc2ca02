"""Lists of the blocks that have pairs of each range, by the positions of their tokens: the kernel, and its launch.

The kernels for Hopper walk them where a two-range encoding reads positions per token: all roles of a program then agree
on the tiles of a loop. The smallest and the largest position of two blocks decide: all of their pairs are in a range,
or none, or some; the kernels mask the last by positions. The host waits for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ropewalk.ops.attention.blocks.kernel import FULL, PARTIAL, compact
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper.prepost import workspace_start
from ropewalk.ops.attention.triton.arguments import Lists, Packed
from ropewalk.ops.attention.triton.launch_common import NO_LISTS, bounds_args, far_window_arg, positions_args
from ropewalk.ops.attention.triton.scheduler import sequence_info, tile_of_program
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, wide
from ropewalk.ops.launch.steps import AT_ONCE, Steps

BLOCK = 128  # tokens of a block, of queries and of keys
RANGES = 3  # near pairs, far ones behind, and those ahead: the range r of masking.py has the lists of "head" r − 1
_FARTHEST = tl.constexpr(2**61)  # no position is as far from 0; differences of two are below 2^63


@triton.jit
def _extents(positions, batch, offset, first, stop, block, BLOCK: tl.constexpr):
    """Return the smallest and the largest position of some blocks of a sequence's tokens; without tokens, reversed."""
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = (token >= first) & (token < stop)
    ptrs = positions.ptr + wide(batch) * positions.stride_batch + wide(offset + token) * positions.stride_token
    position = wide(tl.load(ptrs, exists, other=0))
    low = tl.min(tl.where(exists, position, _FARTHEST), 1)
    return low, tl.max(tl.where(exists, position, -_FARTHEST), 1)


@triton.jit
def _copy_part(out_ptr, positions, n_rows, n_tokens, width, BLOCK: tl.constexpr):
    """Copy this program's part of positions to rows that are dense, and longer."""
    for start in tl.range(tl.program_id(0) * BLOCK, n_rows * n_tokens, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        row, token = wide(index // n_tokens), wide(index % n_tokens)
        exists = index < n_rows * n_tokens
        ptrs = positions.ptr + row * positions.stride_batch + token * positions.stride_token
        tl.store(out_ptr + row * width + token, wide(tl.load(ptrs, exists, other=0)), exists)


@triton.jit
def _mark_of(all_are, none_is, exists, FULL: tl.constexpr, PARTIAL: tl.constexpr):
    """Return the marks of blocks, given whether all and whether none of their pairs are in a range."""
    return tl.where(all_are, FULL, tl.where(none_is, 0, PARTIAL)) * exists.to(tl.int32)


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "n_lines", "n_items", "n_rows_q", "n_rows_k", "width_q", "width_k"))
def mark_ranges_kernel(
    marks_ptr,  # (B, RANGES, lines, items) of bytes
    q_out_ptr,  # (B or 1, width_q) and (B or 1, width_k), int64: positions, and then room
    k_out_ptr,
    positions_q,  # Positions
    positions_k,
    packed,  # Packed | None: its schedule has tiles of BLOCK of the lines' tokens
    bounds,  # Bounds
    n_queries,
    n_keys,
    far_window,
    n_lines,
    n_items,
    n_rows_q,  # of positions
    n_rows_k,
    width_q,
    width_k,
    OF_QUERIES: tl.constexpr,  # a line is a block of queries, and its items are blocks of keys; or the other way round
    RANGES: tl.constexpr,
    FULL: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Mark the blocks of one line, for each range, as FULL, PARTIAL or without a pair; and copy a part of positions.

    Lines of a packed batch go by sequences, with room for a partial block of each; items count from a sequence's first.
    """
    _copy_part(q_out_ptr, positions_q, n_rows_q, n_queries, width_q, 1024)
    _copy_part(k_out_ptr, positions_k, n_rows_k, n_keys, width_k, 1024)
    n_tokens = n_queries if OF_QUERIES else n_keys
    tile, batch, _, sequence = tile_of_program(packed, n_tokens, 1, BLOCK, False)
    q_offset, k_offset, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, 0, None)
    kv_start, q_stop, k_stop = seqlens.kv_start, seqlens.n_queries, seqlens.n_keys
    line = tile + workspace_start(q_offset if OF_QUERIES else k_offset, sequence, packed, BLOCK) // BLOCK
    own = tile + tl.zeros((1,), tl.int32)
    if OF_QUERIES:
        q_low, q_high = _extents(positions_q, batch, q_offset, 0, q_stop, own, BLOCK)
    else:
        k_low, k_high = _extents(positions_k, batch, k_offset, kv_start, k_stop, own, BLOCK)
    marks_ptr += (wide(batch) * RANGES * n_lines + line) * n_items
    stride_range = wide(n_lines) * n_items
    window = wide(far_window)
    for first in tl.range(0, n_items, ITEMS):
        item = first + tl.arange(0, ITEMS)
        if OF_QUERIES:
            k_low, k_high = _extents(positions_k, batch, k_offset, kv_start, k_stop, item, BLOCK)
        else:
            q_low, q_high = _extents(positions_q, batch, q_offset, 0, q_stop, item, BLOCK)
        exists = (q_low <= q_high) & (k_low <= k_high)
        low, high = q_low - k_high, q_high - k_low  # of distances
        near = _mark_of((low > -window) & (high < window), (low >= window) | (high <= -window), exists, FULL, PARTIAL)
        past = _mark_of(low >= window, high < window, exists, FULL, PARTIAL)
        future = _mark_of(high <= -window, low > -window, exists, FULL, PARTIAL)
        stored = (item < n_items) & (sequence >= 0)
        tl.store(marks_ptr + item, near.to(tl.uint8), stored)
        tl.store(marks_ptr + stride_range + item, past.to(tl.uint8), stored)
        tl.store(marks_ptr + 2 * stride_range + item, future.to(tl.uint8), stored)


def goes_by_ranges(call: AttentionCall) -> bool:
    """Say whether kernels tell far pairs from near ones by positions per token."""
    return call.far is not None and not call.goes_by_index


def list_ranges(call: AttentionCall, of: str, packed: Packed | None, on: Steps = AT_ONCE) -> Lists:
    """Return lists of the "rows" or "columns" of each range's blocks; `packed` schedules blocks of the lines."""
    assert call.positions_q is not None
    assert call.positions_k is not None
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    own, other = (queries, keys) if of == "rows" else (keys, queries)
    n_lines, n_items = triton.cdiv(own, BLOCK), triton.cdiv(other, BLOCK)
    programs = batch * n_lines
    if packed is not None:
        n_lines = programs = own // BLOCK + packed.n_sequences + 1
    marks = torch.empty(batch, RANGES, n_lines, n_items, dtype=torch.uint8, device=call.q.device)
    # Kernels read positions to the end of a tile. All strides are multiples of 16: others would make other binaries.
    q_pos, k_pos = (
        torch.empty(x.shape[0], triton.cdiv(x.shape[1] + BLOCK, 16) * 16, dtype=torch.int64, device=x.device)
        for x in (call.positions_q, call.positions_k)
    )
    on.launch(
        mark_ranges_kernel,
        programs,
        marks_ptr=marks,
        q_out_ptr=q_pos,
        k_out_ptr=k_pos,
        positions_q=positions_args(call.positions_q),
        positions_k=positions_args(call.positions_k),
        packed=packed,
        bounds=bounds_args(call),
        n_queries=queries,
        n_keys=keys,
        far_window=far_window_arg(call),
        n_lines=n_lines,
        n_items=n_items,
        n_rows_q=q_pos.shape[0],
        n_rows_k=k_pos.shape[0],
        width_q=q_pos.shape[1],
        width_k=k_pos.shape[1],
        OF_QUERIES=of == "rows",
        RANGES=RANGES,
        FULL=FULL,
        PARTIAL=PARTIAL,
        BLOCK=BLOCK,
        ITEMS=16,
        num_warps=4,
    )
    lists = compact(marks, "rows", triton.cdiv(n_items + 3, 16) * 16 - 3, True, on)
    return NO_LISTS._replace(
        ptr=lists,
        stride_batch=lists.stride(0) if batch > 1 else 0,
        stride_head=lists.stride(1),
        stride_line=lists.stride(2),
        slots=q_pos,
        slots_stride_batch=q_pos.stride(0) if q_pos.shape[0] > 1 else 0,
        slots_stride_head=0,
        k_pos=k_pos,
        k_pos_stride_batch=k_pos.stride(0) if k_pos.shape[0] > 1 else 0,
    )
