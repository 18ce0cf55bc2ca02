"""Launch the kernels that decode from pages on Hopper: say which calls they are for, and count shares.

Shape letters: B batch, Tq queries, H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.call import AttentionCall, kv_capacity
from ropewalk.ops.attention.gate import kernel as gate_kernel
from ropewalk.ops.attention.hopper.decode import (
    UNIT,
    WARP_KEYS,
    PagedConfig,
    PagedTensors,
    Partials,
    RowBounds,
    TokenStrides,
    combine_shares_kernel,
    decode_pages_kernel,
)
from ropewalk.ops.attention.tables import empty_aligned, with_dense_features
from ropewalk.ops.attention.triton.launch_common import (
    LOG2_E,
    bounds_args,
    first_logits,
    on_its_device,
    rope_table_args,
    window_args,
)
from ropewalk.ops.cache.formats import QUANTIZED, Format
from ropewalk.ops.launch.steps import AT_ONCE, Steps


class PagedTiles(NamedTuple):
    """Sizes of tiles, stages of loads, and the programs that a multiprocessor runs at a time."""

    warps: int
    heads: int  # key heads of a program, where their number is a multiple
    blocks: int  # of 16 keys that each warp attends in a step
    stages: int
    programs: int
    max_registers: int


# By the bytes of a key: for as many rows and key heads as there are multiprocessors, or more. Four heads are enough at
# one place for memory to be fast.
TILES = {
    256: PagedTiles(4, 1, 1, 2, 2, 255),
    128: PagedTiles(4, 4, 1, 4, 3, 168),
    64: PagedTiles(4, 4, 2, 2, 3, 168),
    32: PagedTiles(4, 4, 2, 2, 3, 168),
}
# For fewer, whose rows are cut into many parts.
FEW_TILES = {
    256: PagedTiles(4, 1, 1, 3, 2, 255),
    128: PagedTiles(4, 4, 2, 2, 2, 168),
    64: PagedTiles(4, 1, 1, 4, 2, 168),
    32: PagedTiles(4, 1, 1, 4, 2, 168),
}
# For fewer than a quarter as many: programs of one head leave few results to combine.
LONE_TILES = {**FEW_TILES, 128: PagedTiles(4, 1, 1, 3, 2, 168)}
SHORT = 2048  # keys for each multiprocessor, in all: for so few one program is enough
MIN_SHARE = 256  # keys and heads: a part of a row costs the kernel that combines them as much as a few keys


def choose_tiles(row_bytes: int, columns: int, batch: int, n_kv_heads: int, n_keys: int, n_sms: int) -> PagedTiles:
    """Return the tiles for a cache of so many rows of so many keys; by shapes alone, as lengths are on the device.

    Keys change the number of programs alone, so that a cache that grows needs no other binary.
    """
    n_lines = batch * n_kv_heads
    tiles = (TILES if n_lines >= n_sms else FEW_TILES if n_lines >= n_sms // 4 else LONE_TILES)[row_bytes]
    if n_lines < n_sms and n_lines * n_keys < SHORT * n_sms:
        tiles = tiles._replace(programs=1)
    if columns > 8:  # accumulators take twice as many registers
        tiles = tiles._replace(heads=1, blocks=1, stages=3, programs=min(tiles.programs, 2), max_registers=255)
    return tiles._replace(heads=math.gcd(tiles.heads, n_kv_heads))


@on_its_device
def forward(call: AttentionCall, on: Steps = AT_ONCE) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, Tq, D), and the base-2 log-sum-exp, (B, H, Tq), float32; on the current device."""
    k, v, table = call.k, call.v, call.block_table
    assert table is not None
    q = with_dense_features(call.q)
    batch, n_heads, n_queries, dim = q.shape
    n_kv_heads, page_size = k.shape[1:3]
    out = empty_aligned(q)
    lse = torch.empty(batch, n_heads, n_queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    kind = Format.OWN if call.k_scale is None else QUANTIZED[k.dtype]
    if kind is not Format.OWN:
        k, v = k.view(torch.int16), v.view(torch.int16)
    rows, n_keys = n_queries * (n_heads // n_kv_heads), kv_capacity(call)
    columns = 8 if rows <= 8 else 16
    tiles = choose_tiles(
        k.shape[3] * k.element_size(), columns, batch, n_kv_heads, n_keys, gpu.num_sms(on.device_of(q))
    )
    rotary_table, rotary_dim = rope_table_args(call.tables.q)
    block_n = tiles.warps // tiles.heads * tiles.blocks * int(WARP_KEYS.value)
    min_share = -(-MIN_SHARE // (block_n * tiles.heads))
    config = PagedConfig(
        D=dim,
        N=columns,
        WARPS=tiles.warps,
        HEADS=tiles.heads,
        BLOCKS=tiles.blocks,
        STAGES=tiles.stages,
        FORMAT=int(kind),
        PAGE_SIZE=page_size,
        HEADS_PER_KEY=n_heads // n_kv_heads,
        ROTARY_DIM=rotary_dim,
        ROTARY_OFFSET=call.tables.rotary_offset if rotary_dim else 0,
        INTERLEAVED=call.tables.interleaved and rotary_dim > 0,
        PAIR_BLOCK=call.tables.pair_block or rotary_dim,
        CAUSAL=call.causal,
        WINDOWED=call.has_window,
        ONE_ROW=batch == 1,
        MIN_SHARE=min_share,
    )
    most = -(-batch * -(-n_keys // block_n) // min_share)
    n_programs = n_kv_heads // tiles.heads  # of a share
    n_shares = max(1, min(gpu.num_sms(on.device_of(q)) * tiles.programs // n_programs, most))
    sides = n_shares * n_kv_heads * 2
    partials = Partials(
        torch.empty(sides, config.N, dim, dtype=torch.float32, device=q.device),
        torch.empty(sides, config.N, dtype=torch.float32, device=q.device),
    )
    logits = first_logits(call)
    shared = {
        "partials": partials,
        "out_strides": _strides(out, 1),
        "bounds": RowBounds(*bounds_args(call)),
        **window_args(call),
        "n_rows": batch,
        "n_kv_heads": n_kv_heads,
        "n_queries": n_queries,
        "n_keys": n_keys,
        "CONFIG": config,
    }
    if shared["window_right"] is None:
        shared["window_right"] = shared["window"]
    unit = int(UNIT.value)
    on.launch(
        decode_pages_kernel,
        n_shares * n_programs,
        tensors=PagedTensors(q, k, v, call.k_scale, call.v_scale, out, lse, logits),
        q_strides=_strides(q, 1),
        k_strides=_strides(k, unit),
        v_strides=_strides(v, unit),
        k_scale_strides=_scale_strides(call.k_scale, kind, dim),
        v_scale_strides=_scale_strides(call.v_scale, kind, dim),
        table_ptr=table,
        table_stride_row=table.stride(0),
        table_stride_page=table.stride(1),
        n_pages=k.shape[0],
        exp2_scale=call.scale * LOG2_E,
        rotary_table=rotary_table,
        table_start=call.tables.q_start,
        table_rows=None if rotary_table is None or call.tables.q_start is None else rotary_table.cos.shape[1],
        **shared,
        num_warps=tiles.warps,
        maxnreg=tiles.max_registers,
    )
    if n_shares > 1:
        on.launch(
            combine_shares_kernel,
            batch * n_heads * n_queries,
            out_ptr=out,
            lse_ptr=lse,
            first_logits_ptr=logits,
            n_shares=n_shares,
            **shared,
            num_warps=1,
            launch_pdl=True,  # what comes before its wait runs beside the end of the first kernel
        )
    if call.gate is not None:
        (gated,) = gate_kernel.forward(gate_kernel.GatedOutput(out, call.gate), on)
        assert gated is not None
        out = gated
    return out, lse


def _strides(x: Tensor, unit: int) -> TokenStrides:
    """Return the strides of batch rows or pages, heads and tokens in units; 0 for a dimension of one."""
    return TokenStrides(*(s // unit if size > 1 else 0 for size, s in zip(x.shape[:3], x.stride()[:3], strict=True)))


def _scale_strides(scale: Tensor | None, kind: Format, dim: int) -> TokenStrides | None:
    """Return the strides of scales by page, head and token, of 4-bit pages in groups of a token."""
    if scale is None:
        return None
    strides = [stride if size > 1 else 0 for stride, size in zip(scale.stride(), scale.shape, strict=True)]
    if kind is Format.FP8:
        return TokenStrides(0, strides[0] if strides else 0, 0)
    unit = dim // 32 if kind is Format.INT4 else 1
    page, token, head = (stride // unit for stride in strides[:3])
    return TokenStrides(page, head, token)
