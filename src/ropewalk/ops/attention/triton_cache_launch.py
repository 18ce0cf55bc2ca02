"""Launching the kernels of attention for few queries and many keys: which tiles, how many splits of the keys.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, Dv that of values,
R rotary dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk.ops.attention.checks import PAGE_SIZES
from ropewalk.ops.attention.prepare import Prepared, map_features
from ropewalk.ops.attention.triton_arguments import LOG2_E, broadcast_strides, place_table, score_functions
from ropewalk.ops.attention.triton_cache import cache_kernel, combine_kernel
from ropewalk.ops.attention.triton_configuration import interpreted, on_amd

MOST_ROWS = 64  # queries times heads that share keys: with more, the other kernels have rows enough to be busy
FEWEST_KEYS = 256
PROGRAMS = 4  # of a multiprocessor, if there are keys enough
SMALLEST_SPLIT = 128  # keys
# Keys, for 16 rows: what a split leaves to be combined is then next to nothing beside what it reads.
LARGEST_SPLIT = 1024
MOST_PROGRAMS = 64  # of a multiprocessor, where rows may be far shorter than the cache


class CacheTiles(NamedTuple):
    """How a kernel's work is cut."""

    block_n: int
    num_warps: int
    num_stages: int
    apart: bool = False  # whether keys that every row attends are walked without masks
    max_registers: int | None = None  # of a thread: 168 lets three programs of four warps share an NVIDIA processor


# By the rows of a tile, the larger of the blocks of features, and the bytes of an element; from the compiler's reports.
_TILES: dict[tuple[int, int, int], CacheTiles] = {
    (16, 64, 2): CacheTiles(128, 4, 3),
    (16, 128, 2): CacheTiles(64, 4, 3),
    (16, 256, 2): CacheTiles(32, 4, 3),
    (32, 64, 2): CacheTiles(64, 4, 3),
    (32, 128, 2): CacheTiles(64, 4, 3),
    (32, 256, 2): CacheTiles(32, 8, 3),
    (64, 64, 2): CacheTiles(64, 4, 3, True),
    (64, 128, 2): CacheTiles(64, 8, 3, True),
    (64, 256, 2): CacheTiles(32, 8, 2),
    (128, 64, 2): CacheTiles(64, 8, 3, True),
    (128, 128, 2): CacheTiles(64, 8, 3, True),
    (16, 64, 4): CacheTiles(32, 4, 2),
    (16, 128, 4): CacheTiles(32, 8, 2),
    (16, 256, 4): CacheTiles(16, 8, 2),
    (32, 64, 4): CacheTiles(32, 8, 2),
    (32, 128, 4): CacheTiles(16, 8, 2),
    (32, 256, 4): CacheTiles(16, 8, 1),
}
_TILES_TO_INTERPRET = CacheTiles(16, 1, 1)

# For tuning and tests: "block_n", "num_warps", "num_stages", "apart", "block_m", "splits", "smallest_split",
# "max_registers".
OVERRIDES: dict[str, Any] = {}


def serves(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> bool:
    """Whether these kernels are meant for a call: pages, or few queries and many keys. Looks at no values.

    q is (B, H, Tq, D), k (B, K, Tk, D) or (pages, K, page_size, D).
    """
    if prepared.dropout_p > 0 or prepared.cu_seqlens_q is not None:
        return False
    if prepared.far_window is not None and (not prepared.causal or prepared.positions_q is not None):
        return False
    if q.dtype.itemsize > 4 or max(q.shape[3], v.shape[3]) > 256:
        return False
    if prepared.block_table is not None:
        return k.shape[2] in PAGE_SIZES
    return q.shape[2] * (q.shape[1] // k.shape[1]) <= MOST_ROWS and k.shape[2] >= FEWEST_KEYS


def forward(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Attend: q (B, H, Tq, D), k (B, K, Tk, D) and v (B, K, Tk, Dv), or pages of them; any strides.

    Returns the output, (B, H, Tq, Dv), and the base-2 log-sum-exp, (B, H, Tq), float32.
    """
    if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _forward(q, k, v, prepared)
    return _forward(q, k, v, prepared)


def _forward(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    batch, heads, queries, head_dim = q.shape
    pages, key_heads, page_size = k.shape[:3]
    value_dim = v.shape[3]
    table = prepared.block_table
    keys = page_size if table is None else table.shape[1] * page_size
    out = _empty_output(q, value_dim)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    sinks = None if prepared.sinks is None else prepared.sinks.float().contiguous()
    if keys == 0 or pages == 0:
        lse.copy_((torch.full((heads,), -math.inf, device=q.device) if sinks is None else sinks * LOG2_E)[:, None])
        return out.zero_(), lse
    if prepared.cos_k is not None and table is None and prepared.far_window is None:
        q, k = map_features(q, k, prepared)  # both in one launch; otherwise the kernel turns q, and k where it must
        prepared = prepared._replace(cos_q=None, sin_q=None, cos_k=None, sin_k=None)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))

    functions = score_functions(prepared)
    group = heads // key_heads
    block_d, block_dv = _block_of(head_dim), _block_of(value_dim)
    block_m = _rows_of_a_tile(queries * group, max(block_d, block_dv), q.element_size())
    mask, mask_rows = _place_mask(prepared.mask)
    is_crowded = prepared.cos_k is not None or mask_rows is not None
    tiles = _choose_tiles(block_m, max(block_d, block_dv), q.element_size(), is_crowded)
    if mask is not None:
        tiles = tiles._replace(apart=False)
    programs = triton.cdiv(queries * group, block_m) * key_heads * batch
    smallest = triton.cdiv(OVERRIDES.get("smallest_split", SMALLEST_SPLIT), tiles.block_n) * tiles.block_n
    n_splits = _count_splits(programs, _most_attended(keys, queries, prepared), block_m, _processors(q.device))
    partial, partial_lse = out, lse
    if n_splits > 1:
        partial = torch.empty(batch, heads, queries, n_splits, value_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(batch, heads, queries, n_splits, dtype=torch.float32, device=q.device)
    options = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    unit = _unit(q, k, v)
    rotation, width = place_table(prepared.cos_q, prepared.sin_q)
    past_rotation, key_rotation, far_key_rotation = (
        place_table(cos, sin)[0]
        for cos, sin in (
            (prepared.cos_past, prepared.sin_past),
            (prepared.cos_k, prepared.sin_k),
            (prepared.cos_far, prepared.sin_far),
        )
    )
    cache_kernel[(programs * n_splits,)](
        q, k, v, partial, partial_lse, _strides(q, unit), _strides(k, unit), _strides(v, unit), _strides(out, 1),
        *(None if x is None else x.contiguous() for x in (prepared.key_lengths, prepared.key_starts)),
        None if prepared.query_starts is None else prepared.query_starts.contiguous(),
        None if table is None else (table, *table.stride()), rotation, past_rotation, key_rotation, far_key_rotation,
        mask, mask_rows,
        *(None if x is None else (x, *broadcast_strides(x, 2)) for x in (prepared.positions_q, prepared.positions_k)),
        None if prepared.parameters is None else (prepared.parameters.contiguous(), prepared.parameters[0].numel()),
        sinks if n_splits == 1 else None, prepared.scale,
        prepared.scale * LOG2_E if functions is None and prepared.softcap is None else LOG2_E, prepared.softcap,
        0 if prepared.window is None else min(prepared.window, 2**30), None if prepared.far_window is None else
        min(prepared.far_window, 2**29), key_heads, group, queries, keys, pages, n_splits, smallest, D=head_dim,
        DV=value_dim, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=tiles.block_n, R=width,
        ROTARY_OFFSET=prepared.rotary_offset if width else 0, INTERLEAVED=prepared.interleaved if width else 0,
        PAGE=0 if table is None else page_size, UNIT=unit, SPREAD=max(k.stride(2), v.stride(2)) * 256 >= 2**31,
        CAUSAL=prepared.causal, WINDOWED=prepared.window is not None,
        SCORE=None if functions is None else functions.score, SPLIT=n_splits > 1, APART=tiles.apart,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee", num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **options,
    )  # fmt: skip
    if n_splits > 1:
        combine_kernel[(batch * heads * queries,)](
            partial, partial_lse, out, lse, _strides(out, 1), sinks, heads, queries, n_splits, DV=value_dim,
            BLOCK_DV=block_dv, BLOCK_SPLITS=min(16, triton.next_power_of_2(n_splits)), num_warps=4,
        )  # fmt: skip
    return out, lse


def _rows_of_a_tile(rows: int, block_d: int, size: int) -> int:
    """BLOCK_M: all rows that share a key head, if their sums fit into registers."""
    most = 32 if size > 2 else 64 if block_d > 128 or on_amd() else 128
    return int(OVERRIDES.get("block_m", min(max(16, triton.next_power_of_2(rows)), most)))


def _place_mask(mask: Tensor | None) -> tuple[tuple[Any, ...] | None, tuple[int, int] | None]:
    """A mask with its strides of batch and key, and those of head and query unless all rows attend the same."""
    if mask is None:
        return None, None
    batch, head, query, key = broadcast_strides(mask, 4)
    return (mask.view(torch.uint8), batch, key), ((head, query) if head or query else None)


def _choose_tiles(block_m: int, block_d: int, size: int, is_crowded: bool) -> CacheTiles:
    if interpreted():
        tiles = _TILES_TO_INTERPRET
    else:
        tiles = _TILES[block_m, max(block_d, 64), size]
        if is_crowded:  # in registers: keys, their pairs' other halves, cos and sin; or where a mask has each pair
            tiles = tiles._replace(block_n=max(16, tiles.block_n // 2), apart=False)
        if on_amd():  # 64 KiB of shared memory
            block_n = min(tiles.block_n, 32) if block_m * block_d > 4096 else tiles.block_n
            tiles = tiles._replace(block_n=block_n, num_stages=1, max_registers=None)
    return tiles._replace(**{name: value for name, value in OVERRIDES.items() if name in CacheTiles._fields})


def _most_attended(keys: int, queries: int, prepared: Prepared) -> int:
    """The most keys that a row of the batch may have to walk."""
    if prepared.window is None:
        return keys
    return min(keys, (1 if prepared.causal else 2) * prepared.window + queries)


def _count_splits(programs: int, keys: int, block_m: int, processors: int) -> int:
    """Into how many parts each row's keys are cut, at most: from shapes alone, as lengths are the device's to know.

    Enough that all multiprocessors have several programs, and that programs of the longest rows end with the others.
    """
    if "splits" in OVERRIDES:
        return int(OVERRIDES["splits"])
    wanted = triton.cdiv(PROGRAMS * processors, programs)
    length = triton.cdiv(keys, wanted)
    length = min(max(length, SMALLEST_SPLIT), LARGEST_SPLIT * block_m // 16)
    most = max(wanted, MOST_PROGRAMS * processors // programs)
    return int(max(1, min(triton.cdiv(keys, length), most)))


@functools.lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _block_of(head_dim: int) -> int:
    return int(max(16, triton.next_power_of_2(head_dim)))


def _empty_output(q: Tensor, value_dim: int) -> Tensor:
    """Memory for the output, its tokens and heads in q's order."""
    batch, heads, queries, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(batch, queries, heads, value_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(batch, heads, queries, value_dim, dtype=q.dtype, device=q.device)


def _unit(*tensors: Tensor) -> int:
    """Elements that all strides are multiples of: as many as 16 bytes hold, or fewer."""
    strides = (s for x in tensors for size, s in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
    return math.gcd(16 // tensors[0].element_size(), *strides)


def _strides(x: Tensor, unit: int) -> tuple[int, ...]:
    """The strides of batch, head and token in units; 0 for a dimension of one."""
    return tuple(s // unit if size > 1 else 0 for size, s in zip(x.shape[:3], x.stride()[:3], strict=True))
