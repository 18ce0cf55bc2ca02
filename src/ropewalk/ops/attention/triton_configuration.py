"""How the work of the Triton kernels of attention is cut, for a call and a GPU.

Shape letters: D head dim (Dv of v).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention.prepare import Prepared
from ropewalk.ops.attention.triton_forward import forward_kernel
from ropewalk.ops.attention.triton_scores import ScoreFunctions


class Tiles(NamedTuple):
    """How a kernel's work is cut: tiles of so many queries and keys, in so many warps and stages of loads."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread: 168 lets three programs of four warps share an NVIDIA processor

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launcher takes of it."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None and not on_amd():
            options["maxnreg"] = self.max_registers
        return options


# By kernel, the block of features and the bytes of an element. Those of halves are from measurements (docs/log.md), the
# others from the compiler's reports of registers and spills.
_TILES: dict[str, dict[tuple[int, int], Tiles]] = {
    "forward": {
        (64, 2): Tiles(64, 128, 4, 2, 168),
        (128, 2): Tiles(64, 64, 4, 3),
        (192, 2): Tiles(128, 128, 8, 2, 224),
        (256, 2): Tiles(128, 64, 8, 2),
        (64, 4): Tiles(32, 32, 8, 1),
        (128, 4): Tiles(32, 32, 8, 1),
        (192, 4): Tiles(32, 16, 8, 1),
        (256, 4): Tiles(32, 16, 8, 1),
    },
    "keys": {
        (64, 2): Tiles(128, 64, 4, 2),
        (128, 2): Tiles(64, 64, 4, 2),
        (192, 2): Tiles(32, 64, 4, 2),
        (256, 2): Tiles(64, 64, 8, 2),
        (64, 4): Tiles(16, 16, 8, 1),
        (128, 4): Tiles(16, 16, 8, 1),
        (192, 4): Tiles(16, 16, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
    "queries": {
        (64, 2): Tiles(64, 64, 4, 2, 128),
        (128, 2): Tiles(64, 64, 4, 2),
        (192, 2): Tiles(128, 64, 8, 3),
        (256, 2): Tiles(128, 32, 8, 2),
        (64, 4): Tiles(16, 32, 8, 1),
        (128, 4): Tiles(16, 16, 8, 1),
        (192, 4): Tiles(16, 16, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
}
# Where score functions and their adjoints, which need registers, want others; and masks, from the compiler's reports.
_TILES_WITH_SCORES = {("forward", 64, 2): Tiles(64, 128, 4, 3), ("queries", 64, 2): Tiles(64, 64, 4, 3, 168)}
_TILES_WITH_ADJOINT = {("keys", 64, 2): Tiles(64, 64, 4, 2)}
_TILES_WITH_PADDING = {("forward", 64, 2): Tiles(64, 64, 4, 3, 168)}
_TILES_WITH_SOFTCAP = {("forward", 128, 2): Tiles(64, 64, 4, 3, 168)}
_TILES_WITH_DROPOUT = {
    ("forward", 64, 2): Tiles(64, 64, 4, 3, 168),
    ("keys", 64, 2): Tiles(64, 64, 4, 2),
    ("keys", 128, 2): Tiles(32, 64, 4, 3),
}
_TILES_WITH_MASK = {
    ("forward", 64, 2): Tiles(64, 32, 4, 2),
    ("forward", 128, 2): Tiles(64, 32, 4, 2),
    ("forward", 256, 2): Tiles(64, 32, 8, 2),
    ("keys", 64, 2): Tiles(32, 64, 4, 2),
    ("keys", 128, 2): Tiles(32, 64, 4, 2),
    ("keys", 256, 2): Tiles(32, 64, 8, 2),
    ("queries", 64, 2): Tiles(64, 32, 4, 2),
    ("queries", 128, 2): Tiles(64, 32, 4, 2),
    ("queries", 256, 2): Tiles(64, 32, 8, 2),
}
_TILES_TO_INTERPRET = Tiles(32, 16, 1, 1)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return not hasattr(forward_kernel, "cache_key")


def on_amd() -> bool:
    """Whether the GPUs are AMD's: they have 64 KiB of shared memory, hence room for one stage."""
    return torch.version.hip is not None


def on_hopper() -> bool:
    """Whether the GPU has compute capability 9.0, whose shared memory the tiles were made for."""
    return not on_amd() and torch.cuda.get_device_capability() == (9, 0)


class Features(NamedTuple):
    """How a row's features are cut, q's and k's into as many blocks as there are parts."""

    block_d: int
    parts: int
    block_v: int

    @property
    def widest(self) -> int:
        """What tiles are chosen by."""
        wide_q = self.block_d * self.parts
        if wide_q < self.block_v:
            return max(self.block_v, 64)
        return max(wide_q, 64) if wide_q != 192 or self.block_v <= 128 else 256


def cut_features(head_dim: int, v_head_dim: int) -> Features:
    """Blocks for these head dims: powers of two, but thrice 64 for 192."""
    block_v = 1 << max(4, (v_head_dim - 1).bit_length())
    if 128 < head_dim <= 192:
        return Features(64, 3, block_v)
    return Features(1 << max(4, (head_dim - 1).bit_length()), 1, block_v)


def choose_tiles(
    kernel: str, features: Features, dtype: torch.dtype, functions: ScoreFunctions | None, prepared: Prepared
) -> Tiles:
    """The tiles of "forward", "keys" or "queries"."""
    if interpreted():
        return _TILES_TO_INTERPRET
    key = (kernel, features.widest, dtype.itemsize)
    tiles = _TILES[kernel][key[1:]]
    if functions is not None:
        tiles = _TILES_WITH_SCORES.get(key, tiles)
        if functions.adjoint is not None:
            tiles = _TILES_WITH_ADJOINT.get(key, tiles)
    if prepared.softcap is not None:
        tiles = _TILES_WITH_SOFTCAP.get(key, tiles)
    if prepared.dropout_p > 0:
        tiles = _TILES_WITH_DROPOUT.get(key, tiles)
    if prepared.mask is not None:
        with_mask = _TILES_WITH_PADDING if is_of_keys(prepared.mask) else _TILES_WITH_MASK
        tiles = with_mask.get(key, tiles)
    one_stage = on_amd() or (features.widest >= 192 and not on_hopper())
    return tiles._replace(num_stages=1) if one_stage else tiles


def is_of_keys(mask: Tensor) -> bool:
    """Whether a mask is the same for all queries, as padding is."""
    return mask.stride(2) == 0 or mask.shape[2] == 1
