"""Launch the attention kernels for few queries and many keys: choose tiles, count splits, build argument groups.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, Dv that of values,
R rotary dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import why_unread
from ropewalk.ops.attention.call import NO_TABLES, AttentionCall, FarTables, kv_capacity
from ropewalk.ops.attention.pages import DECODE_READS
from ropewalk.ops.attention.tables import with_dense_features
from ropewalk.ops.attention.triton.arguments import Positions
from ropewalk.ops.attention.triton.decode import (
    DecodeConfig,
    DecodeStrides,
    DecodeTensors,
    Heads,
    RopeTables,
    RowStrides,
    Scales,
    combine_kernel,
    decode_kernel,
)
from ropewalk.ops.attention.triton.launch_common import (
    bounds_args,
    broadcast_strides,
    first_logits,
    launch_fitting,
    load_score_mod,
    positions_args,
    precision,
    rope_table_args,
    scores_args,
    window_args,
    write_no_keys,
)
from ropewalk.ops.attention.triton.weigh import map_and_weigh
from ropewalk.ops.cache.formats import QUANTIZED, Format
from ropewalk.ops.launch.steps import AT_ONCE, Steps

MAX_ROWS = 64  # queries times heads that share keys: with more, the forward kernel has enough rows to fill a GPU
MIN_KEYS = 256  # of calls with several queries; fewer keys are not split
PROGRAMS_PER_SM = 1  # if there are enough keys: one has enough loads in flight, and more splits cost more to combine
MIN_SPLIT = 128  # keys
# Keys, for 16 rows: the partial results are then next to nothing beside the keys that a split reads.
MAX_SPLIT = 1024
MAX_PROGRAMS_PER_SM = 64  # where rows may be far shorter than the cache
COMBINED_AT_ONCE = 32  # splits: a constant, so that no count of them makes another binary


class Work(NamedTuple):
    """The numbers that decide how a cache is split, beside its length."""

    programs: int  # for each split
    block_m: int
    n_sms: int
    reach: int | None  # the most keys that a window lets the queries of one row attend; None: all
    stride_unit: int


class CacheSizes(NamedTuple):
    """Numbers of a launch that the length and the strides of a cache decide."""

    n_programs: int
    n_keys: int
    n_splits: int
    k_stride_batch: int  # these four in stride units
    k_stride_head: int
    v_stride_batch: int
    v_stride_head: int
    mask_stride_batch: int | None
    mask_stride_head: int | None
    mask_stride_query: int | None


class DecodeTiles(NamedTuple):
    """Sizes of tiles, warps and stages of loads."""

    block_n: int
    num_warps: int
    num_stages: int
    split_masked_loop: bool = False  # keys that every row attends have a loop without masks
    max_registers: int | None = None  # per thread: 168 let three programs of four warps share an NVIDIA multiprocessor

    @property
    def options(self) -> dict[str, int]:
        """Return the options of Triton's launcher."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


# By the rows of a tile, the larger of the blocks of features, and the bytes of an element; from the compiler's reports.
_TILES: dict[tuple[int, int, int], DecodeTiles] = {
    (16, 64, 2): DecodeTiles(128, 4, 3),
    (16, 128, 2): DecodeTiles(64, 4, 3),
    (16, 256, 2): DecodeTiles(32, 4, 3),
    (16, 512, 2): DecodeTiles(16, 4, 3),
    (32, 64, 2): DecodeTiles(64, 4, 3),
    (32, 128, 2): DecodeTiles(64, 4, 3),
    (32, 256, 2): DecodeTiles(32, 8, 3),
    (64, 64, 2): DecodeTiles(64, 4, 3, True),
    (64, 128, 2): DecodeTiles(64, 8, 3, True),
    (64, 256, 2): DecodeTiles(32, 8, 2),
    (128, 64, 2): DecodeTiles(64, 8, 3, True),
    (128, 128, 2): DecodeTiles(64, 8, 3, True),
    (16, 64, 4): DecodeTiles(32, 4, 2),
    (16, 128, 4): DecodeTiles(32, 8, 2),
    (16, 256, 4): DecodeTiles(16, 8, 2),
    (32, 64, 4): DecodeTiles(32, 8, 2),
    (32, 128, 4): DecodeTiles(16, 8, 2),
    (32, 256, 4): DecodeTiles(16, 8, 1),
}
# Of quantised pages, by the rows of a tile and the larger of the blocks of features; from counts of instructions.
_QUANTIZED_TILES: dict[tuple[int, int], DecodeTiles] = {
    (16, 64): DecodeTiles(128, 4, 3, True, 168),
    (16, 128): DecodeTiles(128, 4, 3, True, 168),
    (16, 256): DecodeTiles(64, 4, 3, True),
    (32, 64): DecodeTiles(64, 4, 3, True),
    (32, 128): DecodeTiles(64, 4, 3, True),
    (32, 256): DecodeTiles(32, 4, 3, True),
    (64, 64): DecodeTiles(64, 4, 3, True),
    (64, 128): DecodeTiles(64, 8, 3, True),
    (64, 256): DecodeTiles(32, 8, 2),
    (128, 64): DecodeTiles(64, 8, 3, True),
    (128, 128): DecodeTiles(64, 8, 3, True),
}
_TILES_OF_FORMAT: dict[Format, dict[tuple[int, int], DecodeTiles]] = {
    Format.FP8: {},
    Format.INT8: {
        (16, 256): DecodeTiles(32, 4, 3, True),
        (32, 128): DecodeTiles(64, 4, 3),
    },
    # Warps beyond the eights of 16-bit elements in a value would do again what another one does.
    Format.INT4: {
        (16, 64): DecodeTiles(64, 2, 3, True),
        (32, 64): DecodeTiles(64, 2, 3, True),
    },
}
_TILES_TO_INTERPRET = DecodeTiles(16, 1, 1)


def supports(call: AttentionCall) -> bool:
    """Return whether a call is for these kernels: pages, or few queries and many keys. Reads no values."""
    q, k = call.q, call.k
    if why_unread(call, DECODE_READS) is not None:
        return False
    if call.far is not None and (not call.causal or call.positions_q is not None):
        return False
    if q.dtype.itemsize > 4:
        return False
    if call.block_table is not None:
        return True
    is_many = k.shape[2] >= MIN_KEYS or q.shape[2] == 1
    return is_many and q.shape[2] * (q.shape[1] // k.shape[1]) <= MAX_ROWS


def forward(call: AttentionCall, on: Steps = AT_ONCE) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, Tq, Dv), and the base-2 log-sum-exp, (B, H, Tq), float32; on the current device."""
    q, k, v = call.q, call.k, call.v
    batch, n_heads, n_queries, _ = q.shape
    value_dim = call.value_dim
    out = _empty_output(q, value_dim)
    lse = torch.empty(batch, n_heads, n_queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    logits = first_logits(call)
    n_keys = kv_capacity(call)
    if n_keys == 0 or k.shape[0] == 0:
        return write_no_keys(call, out, lse), lse
    if call.tables.k is not None and call.block_table is None and call.far is None:
        q, k = map_and_weigh(call, on)  # both in one launch; otherwise the kernel rotates q, and k where it must
        call = call._replace(tables=NO_TABLES)
    q, k, v = map(with_dense_features, (q, k, v))
    kind = _format(call)
    if kind is not Format.OWN:
        k, v = k.view(torch.int16), v.view(torch.int16)  # the kernel reads two or four numbers at a time
    call = call._replace(q=q, k=k, v=v)

    n_kv_heads = k.shape[1]
    rows = n_queries * (n_heads // n_kv_heads)
    block = max(_block_of(q.shape[3]), _block_of(value_dim))
    block_m = _choose_rows(rows, block, q.element_size())
    mask = None if call.mask is None else call.mask.view(torch.uint8)
    block_table = call.block_table
    # Registers hold keys, their pairs' partners, cos and sin; or a mask of pairs.
    is_crowded = call.tables.k is not None or (call.mask is not None and _has_rows(call.mask))
    programs = triton.cdiv(rows, block_m) * n_kv_heads * batch
    work = Work(programs, block_m, gpu.num_sms(on.device_of(q)), _reach(n_queries, call), _stride_unit(q, k, v))
    sizes = on.measure(measure_cache, work, k, v, call.mask, n_keys)
    n_splits = sizes.n_splits
    score_mod = load_score_mod(call)
    scores = scores_args(call, score_mod)
    partial, partial_lse = out, lse
    if n_splits > 1:
        longest = on.longest(n_keys)
        room = n_splits if longest is None else count_most_splits(work, longest)
        partial = torch.empty(batch, n_heads, n_queries, room, value_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(batch, n_heads, n_queries, room, dtype=torch.float32, device=q.device)

    def launch(tiles: DecodeTiles) -> None:
        config = _config(call, tiles, block_m, n_splits, kind, value_dim)
        k_strides, v_strides = _row_strides(k, config.STRIDE_UNIT), _row_strides(v, config.STRIDE_UNIT)
        on.launch(
            decode_kernel,
            sizes.n_programs,
            tensors=DecodeTensors(q, k, v, partial, partial_lse, logits if n_splits == 1 else None),
            strides=DecodeStrides(_row_strides(q, config.STRIDE_UNIT), _row_strides(out, 1)),
            k_stride_batch=sizes.k_stride_batch,
            k_stride_head=sizes.k_stride_head,
            k_stride_token=k_strides.token,
            v_stride_batch=sizes.v_stride_batch,
            v_stride_head=sizes.v_stride_head,
            v_stride_token=v_strides.token,
            bounds=bounds_args(call),
            block_table=block_table,
            block_table_stride_batch=None if block_table is None else block_table.stride(0),
            block_table_stride_page=None if block_table is None else block_table.stride(1),
            scales=_scale_args(call, config.SCALE_UNIT),
            tables=_table_args(call),
            table_start=call.tables.q_start,
            table_rows=None if call.tables.q is None or call.tables.q_start is None else call.tables.q.cos.shape[1],
            mask=mask,
            mask_stride_batch=sizes.mask_stride_batch,
            mask_stride_head=sizes.mask_stride_head,
            mask_stride_query=sizes.mask_stride_query,
            mask_stride_key=None if call.mask is None else broadcast_strides(call.mask, 4)[3],
            positions_q=_position_args(call.positions_q, call),
            positions_k=_position_args(call.positions_k, call),
            scores=scores if call.is_capped else scores._replace(cap=None),
            **window_args(call),
            far_window=None if call.far is None else min(call.far.window, 2**29),
            heads=Heads(n_kv_heads, n_heads // n_kv_heads),
            n_queries=n_queries,
            n_keys=sizes.n_keys,
            n_pages=k.shape[0],
            n_splits=n_splits,
            min_split=triton.cdiv(MIN_SPLIT, tiles.block_n) * tiles.block_n,
            SCORE_MOD=None if score_mod is None else score_mod.forward,
            CONFIG=config,
            **tiles.options,
        )

    launch_fitting(choose_tiles(block_m, block, q.element_size(), is_crowded, kind), launch, on)
    if n_splits > 1:
        on.launch(
            combine_kernel,
            batch * n_heads * n_queries,
            partial_ptr=partial,
            partial_lse_ptr=partial_lse,
            out_ptr=out,
            lse_ptr=lse,
            out_strides=_row_strides(out, 1),
            first_logits_ptr=logits,
            n_heads=n_heads,
            n_queries=n_queries,
            n_splits=n_splits,
            DV=value_dim,
            BLOCK_DV=_block_of(value_dim, kind),
            BLOCK_SPLITS=COMBINED_AT_ONCE,
            num_warps=8,
        )
    return out, lse


def choose_tiles(
    block_m: int, block: int, element_size: int, is_crowded: bool, kind: Format = Format.OWN
) -> DecodeTiles:
    """Return the tiles for `block_m` rows and blocks of so many features; smaller ones if registers are crowded."""
    if gpu.is_interpreted():
        return _TILES_TO_INTERPRET
    if kind is not Format.OWN and element_size < 4:
        key = block_m, max(block, 64)
        tiles = _TILES_OF_FORMAT[kind].get(key, _QUANTIZED_TILES[key])
        if is_crowded:  # float32 numbers and their pairs' partners
            tiles = tiles._replace(block_n=min(tiles.block_n, 64), max_registers=None)
    else:
        tiles = _TILES[block_m, max(block, 64), element_size]
    if is_crowded:
        tiles = tiles._replace(block_n=max(16, tiles.block_n // 2), split_masked_loop=False)
    if gpu.is_rocm():  # 64 KiB of shared memory
        block_n = min(tiles.block_n, 32) if block_m * block > 4096 else tiles.block_n
        tiles = tiles._replace(block_n=block_n, num_stages=1, max_registers=None)
    return tiles


def measure_cache(work: Work, k: Tensor, v: Tensor, mask: Tensor | None, n_keys: int, head: int = 1) -> CacheSizes:
    """Return the sizes of a cache, with a mask (B or 1, H or 1, Tq or 1, Tk); `head` is the dimension of heads."""
    programs, block_m, n_sms, reach, unit = work
    n_splits = 1
    if n_keys >= MIN_KEYS:
        n_splits = count_splits(programs, n_keys if reach is None else min(n_keys, reach), block_m, n_sms)
    batch_mask = head_mask = query_mask = None
    if mask is not None:
        shape, strides = mask.shape, mask.stride()
        batch_mask = strides[0] if shape[0] > 1 else 0
        head_mask = strides[1] if shape[1] > 1 else 0
        query_mask = strides[2] if shape[2] > 1 else 0
        if not (head_mask or query_mask):
            head_mask = query_mask = None
    k_shape, k_strides, v_strides = k.shape, k.stride(), v.stride()
    is_batch, has_heads = k_shape[0] > 1, k_shape[head] > 1
    sizes = (
        programs * n_splits,
        n_keys,
        n_splits,
        k_strides[0] // unit if is_batch else 0,
        k_strides[head] // unit if has_heads else 0,
        v_strides[0] // unit if is_batch else 0,
        v_strides[head] // unit if has_heads else 0,
        *(batch_mask, head_mask, query_mask),
    )
    return tuple.__new__(CacheSizes, sizes)  # whose own constructor is a call of Python's


def count_splits(programs: int, n_keys: int, block_m: int, n_sms: int) -> int:
    """Return how many splits each row's keys have, at most: from shapes alone, because lengths are on the device.

    There are enough that all multiprocessors have a program, and that the longest rows end with the others.
    """
    wanted = -(-PROGRAMS_PER_SM * n_sms // programs)
    length = min(max(-(-n_keys // wanted), MIN_SPLIT), MAX_SPLIT * block_m // 16)
    most = max(wanted, MAX_PROGRAMS_PER_SM * n_sms // programs)
    return max(1, min(-(-n_keys // length), most))


def count_most_splits(work: Work, longest: int) -> int:
    """Return the most splits that caches of up to so many keys have: as `count_splits`, without rounding lengths."""
    programs, block_m, n_sms, reach, _ = work
    n_keys = longest if reach is None else min(longest, reach)
    wanted = -(-PROGRAMS_PER_SM * n_sms // programs)
    by_length = max(min(wanted, -(-n_keys // MIN_SPLIT)), -(-n_keys // (MAX_SPLIT * block_m // 16)))
    return max(1, min(by_length, max(wanted, MAX_PROGRAMS_PER_SM * n_sms // programs)))


def _choose_rows(rows: int, block: int, element_size: int) -> int:
    """Return BLOCK_M: all rows that share a key head, if their accumulators fit into registers."""
    most = 32 if element_size > 2 else 64 if block > 128 or gpu.is_rocm() else 128
    if block > 256:
        most = 16
    return int(min(max(16, triton.next_power_of_2(rows)), most))


def _reach(n_queries: int, call: AttentionCall) -> int | None:
    """Return the most keys that a window lets the queries of one row attend; None for all."""
    if call.window_left is None or not (call.causal or call.window_right is not None):
        return None
    return call.window_left + (call.window_right or 0) + 1 + n_queries


def _config(
    call: AttentionCall, tiles: DecodeTiles, block_m: int, n_splits: int, kind: Format, value_dim: int
) -> DecodeConfig:
    """Return the kernel's constants."""
    q, k, v, tables = call.q, call.k, call.v, call.tables
    score_mod = load_score_mod(call)
    hides_keys = score_mod is not None and score_mod.hides_keys
    rotary_dim = 0 if tables.q is None else 2 * tables.q.cos.shape[2]
    return DecodeConfig(
        D=q.shape[3],
        DV=value_dim,
        BLOCK_D=_block_of(q.shape[3], kind),
        BLOCK_DV=_block_of(value_dim, kind),
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        SUM_COLUMNS=2 * block_m if block_m <= 32 else 16,
        ROTARY_DIM=rotary_dim,
        ROTARY_OFFSET=tables.rotary_offset if rotary_dim else 0,
        INTERLEAVED=tables.interleaved if rotary_dim else False,
        PAIR_BLOCK=tables.pair_block or rotary_dim,
        PAGE_SIZE=0 if call.block_table is None else k.shape[2],
        STRIDE_UNIT=_stride_unit(q, k, v),
        SCALE_UNIT=_scale_unit(call),
        FORMAT=int(kind),
        PTX=_has_ptx(kind),
        INT64_STRIDES=max(k.stride(2), v.stride(2)) * 256 >= 2**31,
        INDEX_POSITIONS=call.goes_by_index,
        CAUSAL=call.causal,
        WINDOWED=call.has_window,
        HAS_STARTS=call.key_starts is not None,
        SPLIT=n_splits > 1,
        # The loop without masks knows of no row that attends nothing.
        SPLIT_MASKED_LOOP=tiles.split_masked_loop and call.mask is None and not hides_keys,
        PRECISION=precision(),
    )


def _table_args(call: AttentionCall) -> RopeTables:
    """Return the tables of near and far pairs; causal attention has no far keys ahead."""
    far = FarTables() if call.far is None or call.far.tables is None else call.far.tables
    tables = (call.tables.q, far.q_past, call.tables.k, far.k)
    return RopeTables(*(rope_table_args(table)[0] for table in tables))


def _has_rows(mask: Tensor) -> bool:
    """Say whether a mask (B, H, Tq, Tk) differs between the rows of a batch row."""
    _, head, query, _ = broadcast_strides(mask, 4)
    return bool(head or query)


def _position_args(positions: Tensor | None, call: AttentionCall) -> Positions | None:
    """Return positions that the kernel reads, with 0 for their number, which would make a binary for each length."""
    args = positions_args(positions)
    return None if args is None or call.goes_by_index else args._replace(n_tokens=0)


def _block_of(head_dim: int, kind: Format = Format.OWN) -> int:
    least = {Format.OWN: 16, Format.INT4: 64}.get(kind, 32)  # a product has 16 elements of a key at least
    return int(max(least, triton.next_power_of_2(head_dim)))


def _format(call: AttentionCall) -> Format:
    """Return the format of a call's pages."""
    return Format.OWN if call.k_scale is None else QUANTIZED[call.k.dtype]


def _has_ptx(kind: Format) -> bool:
    """Say whether instructions of NVIDIA's unpack the numbers."""
    if kind is Format.OWN or gpu.is_interpreted() or gpu.is_rocm():
        return False
    return kind is not Format.FP8 or gpu.current_capability() >= (8, 9)


def _scale_args(call: AttentionCall, unit: int) -> Scales | None:
    """Return the scales of quantised pages."""
    if call.k_scale is None or call.v_scale is None:
        return None
    k_page, k_token, k_head, k_group = _scale_strides(call.k_scale)
    v_page, v_token, v_head, v_group = _scale_strides(call.v_scale)
    k_strides = k_page // unit, k_token // unit, k_head // unit, k_group
    v_strides = v_page // unit, v_token // unit, v_head // unit, v_group
    return Scales(call.k_scale, *k_strides, call.v_scale, *v_strides)


def _scale_unit(call: AttentionCall) -> int:
    """Return a divisor of all strides of scales but those of groups: as many as 16 bytes hold, or fewer."""
    if call.k_scale is None or call.v_scale is None:
        return 1
    strides = (*_scale_strides(call.k_scale)[:3], *_scale_strides(call.v_scale)[:3])
    return math.gcd(16 // call.k_scale.element_size(), *strides)


def _scale_strides(scale: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of scales by page, token, head and group; 0 for a dimension that is missing or of one."""
    strides = [stride if size > 1 else 0 for stride, size in zip(scale.stride(), scale.shape, strict=True)]
    if scale.ndim < 2:  # of float8
        return 0, 0, strides[0] if strides else 0, 0
    page, token, head, group = (*strides, 0)[:4]
    return page, token, head, group


def _empty_output(q: Tensor, value_dim: int) -> Tensor:
    """Allocate the output, its tokens and heads in q's order."""
    batch, n_heads, n_queries, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(batch, n_queries, n_heads, value_dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(batch, n_heads, n_queries, value_dim, dtype=q.dtype, device=q.device)


def _stride_unit(*tensors: Tensor) -> int:
    """Return a divisor of all strides, in elements: as many as 16 bytes hold, or fewer."""
    strides = (s for x in tensors for size, s in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
    return math.gcd(16 // min(x.element_size() for x in tensors), *strides)


def _row_strides(x: Tensor, unit: int) -> RowStrides:
    """Return the strides of batch, head and token in units; 0 for a dimension of one."""
    return RowStrides(*(s // unit if size > 1 else 0 for size, s in zip(x.shape[:3], x.stride()[:3], strict=True)))
