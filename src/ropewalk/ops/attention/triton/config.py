"""Tile sizes, warps and stages per GPU.

Shape letters: D head dim (Dv of v).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.call import AttentionCall, BlockTables
from ropewalk.ops.attention.triton.score_mods import ScoreMod


class Tiles(NamedTuple):
    """Rows of a tile of queries and of one of keys, warps, and stages of loads."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread: 168 lets three programs of four warps share an NVIDIA processor

    @property
    def options(self) -> dict[str, int]:
        """Return the keywords of Triton's launcher."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None and not gpu.is_rocm():
            options["maxnreg"] = self.max_registers
        return options


AnyTiles = TypeVar("AnyTiles", bound=NamedTuple)


def shrink(tiles: AnyTiles, inner: str) -> AnyTiles | None:
    """Return the next smaller tiles for a kernel that does not fit; None if there are none.

    inner: "block_m" or "block_n", the rows of a step; those of a program shrink last, as keys and values are read once
    for each of them.
    """
    sizes: dict[str, Any] = tiles._asdict()
    outer = "block_m" if inner == "block_n" else "block_n"
    for name, least in (("num_stages", 2), (inner, 32), ("num_stages", 1), (inner, 16), (outer, 16)):
        if sizes.get(name, least) > least:
            size = sizes[name]
            return tiles._replace(**{name: size - 1 if name == "num_stages" else size // 2})
    return None


# Of a kind of GPU: by a call's property ("any" without one), and by kernel, block of features, bytes of an element.
# With 512 features dK and dV are launches of their own, and there are halves alone.
Table = dict[str, dict[tuple[str, int, int], Tiles]]

_FLOAT32: dict[tuple[str, int, int], Tiles] = {
    ("forward", 64, 4): Tiles(32, 32, 8, 1),
    ("forward", 128, 4): Tiles(32, 32, 8, 1),
    ("forward", 192, 4): Tiles(32, 16, 8, 1),
    ("forward", 256, 4): Tiles(32, 16, 8, 1),
    ("backward_dkdv", 64, 4): Tiles(16, 16, 8, 1),
    ("backward_dkdv", 128, 4): Tiles(16, 16, 8, 1),
    ("backward_dkdv", 192, 4): Tiles(16, 16, 8, 1),
    ("backward_dkdv", 256, 4): Tiles(16, 16, 8, 1),
    ("backward_dq", 64, 4): Tiles(16, 32, 8, 1),
    ("backward_dq", 128, 4): Tiles(16, 16, 8, 1),
    ("backward_dq", 192, 4): Tiles(16, 16, 8, 1),
    ("backward_dq", 256, 4): Tiles(16, 16, 8, 1),
}
# Tiles of halves are from measurements (docs/notes/006-attention-tiles.md), the others from the compiler's reports.
_HOPPER: Table = {
    "any": {
        **_FLOAT32,
        ("forward", 64, 2): Tiles(64, 128, 4, 2, 168),
        ("forward", 128, 2): Tiles(64, 64, 4, 3),
        ("forward", 192, 2): Tiles(128, 128, 8, 2, 224),
        ("forward", 256, 2): Tiles(128, 64, 8, 2),
        # Both warp groups compute all scores of 64 rows, and half of the accumulator's features each.
        ("forward", 512, 2): Tiles(64, 32, 8, 2),
        ("forward_int8", 64, 2): Tiles(64, 128, 4, 2),
        ("forward_int8", 128, 2): Tiles(64, 64, 4, 3),
        ("forward_int8", 192, 2): Tiles(128, 64, 8, 2),
        ("forward_int8", 256, 2): Tiles(128, 64, 8, 2),
        ("forward_float8", 64, 2): Tiles(64, 128, 4, 2),
        ("forward_float8", 128, 2): Tiles(64, 64, 4, 3),
        ("forward_float8", 192, 2): Tiles(128, 64, 8, 2),
        ("forward_float8", 256, 2): Tiles(64, 64, 8, 2),  # two accumulators of 128 rows do not fit
        ("backward_dkdv", 64, 2): Tiles(128, 64, 4, 2),
        ("backward_dkdv", 128, 2): Tiles(64, 64, 4, 2),
        ("backward_dkdv", 192, 2): Tiles(32, 64, 4, 2),
        ("backward_dkdv", 256, 2): Tiles(64, 64, 8, 2),
        ("backward_dk", 512, 2): Tiles(32, 64, 8, 1),
        ("backward_dv", 512, 2): Tiles(32, 64, 8, 2),
        ("backward_dq", 64, 2): Tiles(64, 64, 4, 2, 128),
        ("backward_dq", 128, 2): Tiles(64, 64, 4, 2),
        ("backward_dq", 192, 2): Tiles(128, 64, 8, 3),
        ("backward_dq", 256, 2): Tiles(128, 32, 8, 2),
        ("backward_dq", 512, 2): Tiles(64, 32, 8, 1),
    },
    "score_mod": {("forward", 64, 2): Tiles(64, 128, 4, 3), ("backward_dq", 64, 2): Tiles(64, 64, 4, 3, 168)},
    "score_mod_bwd": {("backward_dkdv", 64, 2): Tiles(64, 64, 4, 2)},
    "bias": {("forward", 192, 2): Tiles(128, 32, 8, 2), ("backward_dq", 192, 2): Tiles(128, 32, 8, 2)},
    "cap": {("forward", 128, 2): Tiles(64, 64, 4, 3, 168)},
    "dropout": {
        ("forward", 64, 2): Tiles(64, 64, 4, 3, 168),
        ("backward_dkdv", 64, 2): Tiles(64, 64, 4, 2),
        ("backward_dkdv", 128, 2): Tiles(32, 64, 4, 3),
    },
    "packed": {("backward_dv", 512, 2): Tiles(32, 64, 8, 1)},  # whose addresses to store to take registers
    "far": {("backward_dk", 512, 2): Tiles(16, 64, 8, 2), ("backward_dq", 512, 2): Tiles(64, 16, 8, 2)},
    "bits": {("forward", 64, 2): Tiles(64, 64, 4, 3, 168), ("forward", 192, 2): Tiles(128, 32, 8, 2)},
    "padding": {("forward", 64, 2): Tiles(64, 64, 4, 3, 168)},
    "mask": {
        ("forward", 64, 2): Tiles(64, 32, 4, 2),
        ("forward", 128, 2): Tiles(64, 32, 4, 2),
        ("forward", 192, 2): Tiles(128, 32, 8, 2),
        ("forward", 256, 2): Tiles(64, 32, 8, 2),
        ("backward_dkdv", 64, 2): Tiles(32, 64, 4, 2),
        ("backward_dkdv", 128, 2): Tiles(32, 64, 4, 2),
        ("backward_dkdv", 256, 2): Tiles(32, 64, 8, 2),
        ("backward_dq", 64, 2): Tiles(64, 32, 4, 2),
        ("backward_dq", 128, 2): Tiles(64, 32, 4, 2),
        ("backward_dq", 256, 2): Tiles(64, 32, 8, 2),
    },
}


def _in_one_stage(tiles: dict[tuple[str, int, int], Tiles]) -> dict[tuple[str, int, int], Tiles]:
    return {key: each._replace(num_stages=1) for key, each in tiles.items()}


# No such GPU was at hand for the tables below: they are from the compiler's reports alone, Hopper's tiles where it
# reports neither spills nor more memory than there is.
_BLACKWELL: Table = {  # of data centers, with 512 columns of tensor memory; three chunks and 256 features in one stage
    "any": {
        **_HOPPER["any"],
        ("forward", 64, 2): Tiles(64, 64, 4, 3),
        ("forward", 192, 2): Tiles(128, 64, 8, 2),
        ("forward", 256, 2): Tiles(128, 64, 8, 1),
        ("forward_int8", 64, 2): Tiles(64, 64, 4, 3),
        ("forward_int8", 256, 2): Tiles(64, 64, 8, 2),
        ("forward_float8", 64, 2): Tiles(64, 64, 4, 3),
        ("forward_float8", 256, 2): Tiles(64, 32, 8, 2),
        ("backward_dkdv", 64, 2): Tiles(64, 64, 8, 2),
        ("backward_dkdv", 128, 2): Tiles(32, 64, 8, 2),
        ("backward_dkdv", 192, 2): Tiles(32, 64, 4, 1),
        ("backward_dkdv", 256, 2): Tiles(64, 64, 8, 1),
        ("backward_dv", 512, 2): Tiles(32, 64, 8, 1),
        ("backward_dq", 192, 2): Tiles(128, 64, 8, 1),
        ("backward_dq", 256, 2): Tiles(64, 64, 8, 1),
        ("backward_dq", 512, 2): Tiles(64, 16, 8, 2),
    },
    "score_mod": {
        ("forward", 256, 2): Tiles(128, 32, 8, 1),
        ("backward_dkdv", 256, 2): Tiles(32, 64, 8, 1),
        ("backward_dq", 64, 2): Tiles(64, 64, 4, 2),
    },
    "cap": _HOPPER["cap"],
    "mask": {
        **_HOPPER["mask"],
        ("forward", 128, 2): Tiles(64, 32, 8, 2),
        ("forward", 192, 2): Tiles(128, 64, 8, 2),
        ("forward", 256, 2): Tiles(64, 32, 8, 1),
        ("backward_dkdv", 128, 2): Tiles(16, 64, 8, 2),
        ("backward_dkdv", 256, 2): Tiles(32, 64, 8, 1),
        ("backward_dq", 256, 2): Tiles(64, 32, 8, 1),
    },
}
# NVIDIA's other GPUs: multiplication from registers, and as little as 99 KiB of shared memory. Where there is no TMA,
# descriptors become an address and a condition for each element, which is what takes the registers.
_OTHERS: Table = {
    "any": {
        **_FLOAT32,
        ("forward", 64, 2): Tiles(128, 32, 8, 2),
        ("forward", 128, 2): Tiles(64, 16, 8, 2),
        ("forward", 192, 2): Tiles(64, 16, 8, 2),
        ("forward", 256, 2): Tiles(64, 16, 8, 2),
        ("forward", 512, 2): Tiles(32, 16, 8, 1),
        ("forward_int8", 64, 2): Tiles(128, 64, 8, 2),
        ("forward_int8", 128, 2): Tiles(128, 64, 8, 2),
        ("forward_int8", 192, 2): Tiles(64, 64, 4, 2),
        ("forward_int8", 256, 2): Tiles(64, 64, 8, 2),
        ("forward_float8", 64, 2): Tiles(128, 64, 8, 2),
        ("forward_float8", 128, 2): Tiles(128, 64, 8, 2),
        ("forward_float8", 192, 2): Tiles(128, 64, 8, 2),
        ("forward_float8", 256, 2): Tiles(64, 64, 8, 2),
        ("backward_dkdv", 64, 2): Tiles(16, 64, 8, 2),
        ("backward_dkdv", 128, 2): Tiles(16, 64, 8, 2),
        ("backward_dkdv", 192, 2): Tiles(16, 32, 8, 2),
        ("backward_dkdv", 256, 2): Tiles(16, 32, 8, 2),
        ("backward_dk", 512, 2): Tiles(16, 16, 8, 1),
        ("backward_dv", 512, 2): Tiles(16, 16, 8, 1),
        ("backward_dq", 64, 2): Tiles(64, 32, 4, 2),
        ("backward_dq", 128, 2): Tiles(64, 32, 8, 2),
        ("backward_dq", 192, 2): Tiles(32, 32, 8, 2),
        ("backward_dq", 256, 2): Tiles(32, 32, 8, 2),
        ("backward_dq", 512, 2): Tiles(16, 32, 8, 1),
    },
    "score_mod": {("forward", 256, 2): Tiles(32, 32, 8, 2), ("backward_dq", 512, 2): Tiles(16, 16, 8, 1)},
}
_AMD: Table = {special: _in_one_stage(tiles) for special, tiles in _HOPPER.items()}  # 64 KiB of shared memory
_AMD["any"] |= {
    ("forward", 192, 2): Tiles(64, 64, 4, 1),
    ("forward", 256, 2): Tiles(64, 32, 4, 1),
    ("forward", 512, 2): Tiles(16, 32, 4, 1),
    ("forward_int8", 64, 2): Tiles(64, 64, 4, 1),
    ("forward_int8", 128, 2): Tiles(64, 64, 4, 1),
    ("forward_int8", 192, 2): Tiles(64, 64, 4, 1),
    ("forward_int8", 256, 2): Tiles(64, 32, 4, 1),
    ("backward_dkdv", 64, 2): Tiles(64, 64, 4, 1),
    ("backward_dkdv", 256, 2): Tiles(32, 32, 4, 1),
    ("backward_dk", 512, 2): Tiles(32, 16, 4, 1),
    ("backward_dv", 512, 2): Tiles(32, 16, 4, 1),
    ("backward_dq", 192, 2): Tiles(64, 32, 4, 1),
    ("backward_dq", 256, 2): Tiles(32, 32, 4, 1),
    ("backward_dq", 512, 2): Tiles(16, 32, 4, 1),
}
_AMD["score_mod"] |= {("backward_dkdv", 128, 2): Tiles(32, 64, 4, 1), ("backward_dkdv", 256, 2): Tiles(16, 32, 4, 1)}
del _AMD["packed"], _AMD["bias"], _AMD["bits"]["forward", 192, 2], _AMD["mask"]["forward", 192, 2]
_AMD["far"] = {("backward_dkdv", 128, 2): Tiles(32, 64, 4, 1)}
_BY_MAJOR_CAPABILITY = {9: _HOPPER, 10: _BLACKWELL}
_TILES_TO_INTERPRET = Tiles(32, 16, 1, 1)
# The forward of 8-bit products. Features alone choose its tiles: a row has the same bits in calls of any length, packed
# or not. A block of 128 keys holds whole tiles.
QUANTISED_FORWARDS = FORWARD_INT8, FORWARD_FLOAT8 = "forward_int8", "forward_float8"  # values are of 16 bits, or e4m3


def table_of_gpu() -> Table:
    """Return the tiles for the current GPU, with which kernels fit into the shared memory of all GPUs of the table.

    `tools/fit.py` compiles random calls for each; a kernel that does not fit takes smaller tiles (`launch_fitting`).
    """
    if gpu.is_rocm():
        return _AMD
    major, _ = gpu.current_capability()
    return _BY_MAJOR_CAPABILITY.get(major, _OTHERS)


class Features(NamedTuple):
    """Blocks of a row's features: d_chunks of block_d for q and k, one of block_dv for v."""

    block_d: int
    d_chunks: int
    block_dv: int

    @property
    def is_wide(self) -> bool:
        """Say whether an accumulator of all features takes the registers of a multiprocessor."""
        return max(self.block_d, self.block_dv) > 256

    @property
    def widest(self) -> int:
        """Return the width that tiles are chosen by."""
        wide_q = self.block_d * self.d_chunks
        if self.is_wide:
            return 512
        if wide_q < self.block_dv:
            return max(self.block_dv, 64)
        return max(wide_q, 64) if wide_q != 192 or self.block_dv <= 128 else 256


MIN_INT8 = 32  # features of a product of int8


def cut_features(head_dim: int, v_head_dim: int, least: int = 16) -> Features:
    """Cut features into powers of two, but 192 into three chunks of 64; `least` is the smallest block of q and k."""
    block_dv = 1 << max(4, (v_head_dim - 1).bit_length())
    if 128 < head_dim <= 192:
        return Features(64, 3, block_dv)
    return Features(max(least, 1 << (head_dim - 1).bit_length()), 1, block_dv)


def choose_tiles(
    kernel: str, features: Features, dtype: torch.dtype, score_mod: ScoreMod | None, call: AttentionCall
) -> Tiles:
    """Return the tiles of "forward", "backward_dq" and "backward_dkdv", or "backward_dk" and "backward_dv" apart.

    A forward of 8-bit products has names of its own.
    """
    if gpu.is_interpreted():
        return _TILES_TO_INTERPRET if call.precision is None else _TILES_TO_INTERPRET._replace(block_n=32)
    key = (kernel, features.widest, dtype.itemsize)
    table = table_of_gpu()
    tiles = table["any"][key]
    for special in () if kernel in QUANTISED_FORWARDS else _specials(score_mod, call):
        tiles = table.get(special, {}).get(key, tiles)
    return tiles if call.blocks is None else _within_blocks(tiles, call.blocks)


def _within_blocks(tiles: Tiles, blocks: BlockTables) -> Tiles:
    """Return tiles that lie in one block each."""
    return tiles._replace(block_m=min(tiles.block_m, blocks.block_q), block_n=min(tiles.block_n, blocks.block_k))


def _specials(score_mod: ScoreMod | None, call: AttentionCall) -> Iterator[str]:
    """Yield a call's properties that tables may have other tiles for; the last one wins."""
    if score_mod is not None:
        yield "score_mod"
        if score_mod.backward is not None:
            yield "score_mod_bwd"
        if score_mod.bias is not None:
            yield "bias"
    if call.is_capped:
        yield "cap"
    if call.far is not None:
        yield "far"
    if call.dropout_p > 0:
        yield "dropout"
    if call.cu_seqlens_q is not None:
        yield "packed"
    if call.blocks is not None and (call.blocks.slots is not None or call.blocks.spans is not None):
        yield "bits"
    if call.mask is not None:
        yield "padding" if is_of_keys(call.mask) else "mask"


def is_of_keys(mask: Tensor) -> bool:
    """Say whether a mask is the same for all queries, as padding is."""
    return mask.stride(2) == 0 or mask.shape[2] == 1
