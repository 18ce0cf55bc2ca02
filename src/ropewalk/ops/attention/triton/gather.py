"""One launch that copies keys and values out of pages into contiguous tensors of the queries' dtype.

Shape letters: B batch, H query heads, K key heads, D head dim, Dv that of values, S packed sequences.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.call import MAX_PAGE_SIZE, AttentionCall, kv_capacity
from ropewalk.ops.attention.pages import describe, tables_of_keys, with_tables
from ropewalk.ops.attention.tables import empty_aligned, with_dense_features
from ropewalk.ops.attention.triton.decode import number_of_byte
from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.cache.formats import QUANTIZED, Format
from ropewalk.ops.launch.steps import AT_ONCE, Steps

BLOCK_N = 32  # keys of a program, of one head: 8 KiB of keys and of values at 128 features
WIDEST_TILE = 256  # keys: kernels read whole tiles, so also keys that stand before a window, with probability 0


class Source(NamedTuple):
    """Pages of keys or of values, strides in STRIDE_UNITs; and their scales, if they are quantised."""

    ptr: Any
    stride_page: Any
    stride_head: Any
    stride_token: Any
    scale_ptr: Any
    scale_stride_page: Any
    scale_stride_head: Any
    scale_stride_token: Any
    scale_stride_group: Any


class Extents(NamedTuple):
    """The bounds of each row's keys and queries: of a batch, or of packed sequences."""

    key_lengths: Any
    key_starts: Any
    query_starts: Any
    cu_seqlens_q: Any


@triton.jit
def load_rows(
    source,
    head,
    page,
    token,
    exists,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Load keys or values, [BLOCK_N, BLOCK_D]: as they are, or quantised ones as float32."""
    offsets = wide(page) * source.stride_page + wide(head) * source.stride_head + wide(token) * source.stride_token
    rows = source.ptr + offsets[:, None] * STRIDE_UNIT
    if FORMAT > 0:
        scales = wide(page) * source.scale_stride_page + wide(token) * source.scale_stride_token
        scales = source.scale_ptr + scales + wide(head) * source.scale_stride_head
    if FORMAT == 3:
        byte = tl.arange(0, BLOCK_D // 2)[None, :]
        stored = tl.load(rows + byte, exists[:, None] & (byte < D // 2), other=0)
        numbers = tl.reshape(tl.join(stored & 15, stored >> 4), (BLOCK_N, BLOCK_D // 32, 32)).to(tl.float32) - 8.0
        group = tl.arange(0, BLOCK_D // 32)[None, :]
        scale = tl.load(
            scales[:, None] + group * source.scale_stride_group, exists[:, None] & (group < D // 32), other=0.0
        )
        x = tl.reshape(numbers * scale.to(tl.float32)[:, :, None], (BLOCK_N, BLOCK_D))
    else:
        feature = tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(rows + feature, exists[:, None] & (feature < D), other=0)
        if FORMAT > 0:
            scale = tl.load(scales, exists, other=0.0)
            x = number_of_byte(x.to(tl.int32), FORMAT).to(tl.float32) * scale[:, None]
    return x


@triton.jit
def store_rows(ptr, x, first_row, token, exists, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Store tokens of one head, [BLOCK_N, BLOCK_D], in memory of WIDTH features a row."""
    feature = tl.arange(0, BLOCK_D)[None, :]
    offsets = (first_row + wide(token))[:, None] * WIDTH + feature
    tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), exists[:, None] & (feature < D))


@triton.jit
def attended_length(extents, row, exists, n_keys):
    """Return how many keys rows have; of packed sequences without a query none, as none attends them."""
    length = tl.minimum(tl.maximum(tl.load(extents.key_lengths + row, exists, other=0), 0), n_keys).to(tl.int32)
    if extents.cu_seqlens_q is not None:
        start = tl.load(extents.cu_seqlens_q + row, exists, other=0)
        stop = tl.load(extents.cu_seqlens_q + row + 1, exists, other=0)
        length = tl.where(stop > start, length, 0)
    return length


@triton.jit(do_not_specialize=("n_keys", "n_queries", "n_pages", "n_rows", "reach", "table_stride_row"))
def gather_kernel(
    k,
    v,
    k_out,
    v_out,
    block_table,
    table_stride_row,
    table_stride_column,
    extents,
    cu_seqlens_k_ptr,
    index_ptr,
    n_keys,
    n_queries,
    n_pages,
    reach,
    n_rows,
    n_kv_heads,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Copy a block of keys and values of one head and row of the table: (row, block, head) is a program.

    k_out and v_out are (B, K, n_keys, features), or of packed sequences (1, K, S · n_keys, features), end to end.
    There the bounds of the sequences are stored too, and each key's index in its sequence if that is wanted.
    reach: keys so far before a row's first query are not copied.
    """
    program = tl.program_id(0)
    head = program % n_kv_heads
    n_blocks = (n_keys + BLOCK_N - 1) // BLOCK_N
    row = program // n_kv_heads // n_blocks
    start = program // n_kv_heads % n_blocks * BLOCK_N
    length = attended_length(extents, row, True, n_keys)
    if extents.cu_seqlens_q is None:
        first_row = (wide(row) * n_kv_heads + head) * n_keys
        if extents.query_starts is None:
            first_query = n_keys - n_queries
        else:
            first_query = tl.load(extents.query_starts + row).to(tl.int32)
    else:
        before = 0
        for sequence in range(0, row, BLOCK_S):
            other = sequence + tl.arange(0, BLOCK_S)
            before += tl.sum(attended_length(extents, other, other < row, n_keys), 0)
        first_row = wide(head) * n_rows * n_keys + before
        queries = tl.load(extents.cu_seqlens_q + row + 1) - tl.load(extents.cu_seqlens_q + row)
        first_query = length - queries.to(tl.int32)
        if (start == 0) & (head == 0):
            tl.store(cu_seqlens_k_ptr + row + 1, before + length)
            if row == 0:
                tl.store(cu_seqlens_k_ptr, 0)
    first = 0
    if extents.key_starts is not None:
        first = tl.load(extents.key_starts + row).to(tl.int32)
    if reach is not None:
        first = tl.maximum(first, first_query - reach)
    if (start < length) & (start + BLOCK_N > first):
        token = start + tl.arange(0, BLOCK_N)
        exists = (token >= first) & (token < length)
        table = block_table + wide(row) * table_stride_row
        if PAGE_SIZE == 0:  # a dense cache: one page of all keys
            page = tl.load(table) + tl.zeros_like(token)
            in_page = token
        else:
            page = tl.load(table + wide(token // PAGE_SIZE) * table_stride_column, exists, other=0)
            in_page = token % PAGE_SIZE
        page = tl.minimum(tl.maximum(page, 0), n_pages - 1)
        loads = exists & (n_pages > 0)
        k_tile = load_rows(k, head, page, in_page, loads, D, BLOCK_N, BLOCK_D, STRIDE_UNIT, FORMAT)
        v_tile = load_rows(v, head, page, in_page, loads, DV, BLOCK_N, BLOCK_DV, STRIDE_UNIT, FORMAT)
        store_rows(k_out, k_tile, first_row, token, exists, D, BLOCK_D, WIDTH)
        store_rows(v_out, v_tile, first_row, token, exists, DV, BLOCK_DV, WIDTH_V)
        if index_ptr is not None:
            tl.store(index_ptr + first_row + token, token, exists & (head == 0))


def copy_pages(call: AttentionCall, on: Steps = AT_ONCE) -> AttentionCall:
    """Return a call of pages as one of contiguous keys and values: those that its queries may attend are copied.

    The others are undefined, as no kernel reads them.
    """
    assert call.block_table is not None
    copied = describe(call)
    k, v = (empty_aligned(x, dense=True) for x in (copied.k, copied.v))
    is_packed, device = call.cu_seqlens_q is not None, call.q.device
    n_rows, n_keys = call.block_table.shape[0], kv_capacity(call)
    n_kv_heads, page_size = call.k.shape[1:3]
    tables = tables_of_keys(call) if is_packed else []
    bounds = torch.empty(n_rows + 1, dtype=torch.int32, device=device) if is_packed else None
    index = torch.empty(n_rows * n_keys, dtype=torch.int64, device=device) if tables else None
    copied = copied._replace(k=k, v=v, cu_seqlens_k=bounds)
    if k.numel() == 0:
        return copied
    if index is not None:
        on.operate(Tensor.zero_, index)  # tokens of no sequence
    kind = Format.OWN if call.k_scale is None else QUANTIZED[call.k.dtype]
    pages = [with_dense_features(x) for x in (call.k, call.v)]
    if kind is not Format.OWN:
        pages = [x.view(torch.uint8) for x in pages]
    unit = math.gcd(16 // pages[0].element_size(), *(stride for x in pages for stride in _strides(x)))
    bounds_of_call = (call.key_lengths, call.key_starts, call.query_starts, call.cu_seqlens_q)
    head_dim, value_dim = call.q.shape[3], call.value_dim
    on.launch(
        gather_kernel,
        n_rows * triton.cdiv(n_keys, BLOCK_N) * n_kv_heads,
        k=_source(pages[0], call.k_scale, unit),
        v=_source(pages[1], call.v_scale, unit),
        k_out=k,
        v_out=v,
        block_table=call.block_table,
        table_stride_row=call.block_table.stride(0),
        table_stride_column=call.block_table.stride(1),
        extents=Extents(*(None if x is None else x.contiguous() for x in bounds_of_call)),
        cu_seqlens_k_ptr=bounds,
        index_ptr=index,
        n_keys=n_keys,
        n_queries=call.q.shape[2],
        n_pages=call.k.shape[0],
        reach=None if call.window_left is None else min(call.window_left + WIDEST_TILE, 2**30),
        n_rows=n_rows,
        n_kv_heads=n_kv_heads,
        D=head_dim,
        DV=value_dim,
        WIDTH=k.stride(2),
        WIDTH_V=v.stride(2),
        BLOCK_N=BLOCK_N,
        BLOCK_D=max(32, triton.next_power_of_2(head_dim)),
        BLOCK_DV=max(32, triton.next_power_of_2(value_dim)),
        PAGE_SIZE=page_size if page_size <= MAX_PAGE_SIZE and call.block_table.shape[1] > 1 else 0,
        STRIDE_UNIT=unit,
        FORMAT=int(kind),
        BLOCK_S=256,
        num_warps=4,
    )
    return copied if index is None else with_tables(copied, [_select(table, index, on) for table in tables])


def _select(table: Tensor, index: Tensor, on: Steps) -> Tensor:
    """Return the rows of a table (1, positions, ...) for each key of packed sequences."""
    selected = torch.empty(1, index.shape[0], *table.shape[2:], dtype=table.dtype, device=table.device)
    on.operate(_select_into, selected, table, index)
    return selected


def _select_into(selected: Tensor, table: Tensor, index: Tensor) -> None:
    torch.index_select(table, 1, index, out=selected)


def _strides(x: Tensor) -> list[int]:
    """Return the strides of pages, heads and tokens; 0 for a dimension of one."""
    return [stride if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]


def _source(x: Tensor, scale: Tensor | None, unit: int) -> Source:
    """Return pages (pages, K, page_size, D) and their scales with their strides."""
    page, head, token = (stride // unit for stride in _strides(x))
    if scale is None:
        return Source(x, page, head, token, None, 0, 0, 0, 0)
    strides = [stride if size > 1 else 0 for stride, size in zip(scale.stride(), scale.shape, strict=True)]
    if scale.ndim < 2:  # of float8
        return Source(x, page, head, token, scale, 0, strides[0] if strides else 0, 0, 0)
    of_page, of_token, of_head, of_group = (*strides, 0)[:4]
    return Source(x, page, head, token, scale, of_page, of_head, of_token, of_group)
