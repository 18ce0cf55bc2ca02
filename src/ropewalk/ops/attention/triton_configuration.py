"""How the work of the Triton kernels of attention is cut, for a call and a GPU.

Shape letters: D head dim (Dv of v).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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


# Of a kind of GPU: by what a call has ("any": whatever it has), and by kernel, block of features, bytes of an element.
Table = dict[str, dict[tuple[str, int, int], Tiles]]

_FLOAT32: dict[tuple[str, int, int], Tiles] = {
    ("forward", 64, 4): Tiles(32, 32, 8, 1),
    ("forward", 128, 4): Tiles(32, 32, 8, 1),
    ("forward", 192, 4): Tiles(32, 16, 8, 1),
    ("forward", 256, 4): Tiles(32, 16, 8, 1),
    ("keys", 64, 4): Tiles(16, 16, 8, 1),
    ("keys", 128, 4): Tiles(16, 16, 8, 1),
    ("keys", 192, 4): Tiles(16, 16, 8, 1),
    ("keys", 256, 4): Tiles(16, 16, 8, 1),
    ("queries", 64, 4): Tiles(16, 32, 8, 1),
    ("queries", 128, 4): Tiles(16, 16, 8, 1),
    ("queries", 192, 4): Tiles(16, 16, 8, 1),
    ("queries", 256, 4): Tiles(16, 16, 8, 1),
}
# Those of halves are from measurements (docs/log.md), the others from the compiler's reports of registers and spills.
_HOPPER: Table = {
    "any": {
        **_FLOAT32,
        ("forward", 64, 2): Tiles(64, 128, 4, 2, 168),
        ("forward", 128, 2): Tiles(64, 64, 4, 3),
        ("forward", 192, 2): Tiles(128, 128, 8, 2, 224),
        ("forward", 256, 2): Tiles(128, 64, 8, 2),
        ("keys", 64, 2): Tiles(128, 64, 4, 2),
        ("keys", 128, 2): Tiles(64, 64, 4, 2),
        ("keys", 192, 2): Tiles(32, 64, 4, 2),
        ("keys", 256, 2): Tiles(64, 64, 8, 2),
        ("queries", 64, 2): Tiles(64, 64, 4, 2, 128),
        ("queries", 128, 2): Tiles(64, 64, 4, 2),
        ("queries", 192, 2): Tiles(128, 64, 8, 3),
        ("queries", 256, 2): Tiles(128, 32, 8, 2),
    },
    "scores": {("forward", 64, 2): Tiles(64, 128, 4, 3), ("queries", 64, 2): Tiles(64, 64, 4, 3, 168)},
    "adjoint": {("keys", 64, 2): Tiles(64, 64, 4, 2)},
    "softcap": {("forward", 128, 2): Tiles(64, 64, 4, 3, 168)},
    "dropout": {
        ("forward", 64, 2): Tiles(64, 64, 4, 3, 168),
        ("keys", 64, 2): Tiles(64, 64, 4, 2),
        ("keys", 128, 2): Tiles(32, 64, 4, 3),
    },
    "padding": {("forward", 64, 2): Tiles(64, 64, 4, 3, 168)},
    "mask": {
        ("forward", 64, 2): Tiles(64, 32, 4, 2),
        ("forward", 128, 2): Tiles(64, 32, 4, 2),
        ("forward", 256, 2): Tiles(64, 32, 8, 2),
        ("keys", 64, 2): Tiles(32, 64, 4, 2),
        ("keys", 128, 2): Tiles(32, 64, 4, 2),
        ("keys", 256, 2): Tiles(32, 64, 8, 2),
        ("queries", 64, 2): Tiles(64, 32, 4, 2),
        ("queries", 128, 2): Tiles(64, 32, 4, 2),
        ("queries", 256, 2): Tiles(64, 32, 8, 2),
    },
}


def _in_one_stage(tiles: dict[tuple[str, int, int], Tiles]) -> dict[tuple[str, int, int], Tiles]:
    return {key: each._replace(num_stages=1) for key, each in tiles.items()}


# No such GPU was at hand for the tables below: they are from the compiler's reports alone, Hopper's tiles where it
# reports neither spills nor more memory than there is.
_BLACKWELL: Table = {  # of data centers, with 512 columns of tensor memory; three parts and 256 features in one stage
    "any": {
        **_HOPPER["any"],
        ("forward", 64, 2): Tiles(64, 64, 4, 3),
        ("forward", 192, 2): Tiles(128, 64, 8, 2),
        ("forward", 256, 2): Tiles(128, 64, 8, 1),
        ("keys", 64, 2): Tiles(64, 64, 8, 2),
        ("keys", 128, 2): Tiles(32, 64, 8, 2),
        ("keys", 192, 2): Tiles(32, 64, 4, 1),
        ("keys", 256, 2): Tiles(64, 64, 8, 1),
        ("queries", 192, 2): Tiles(128, 64, 8, 1),
        ("queries", 256, 2): Tiles(64, 64, 8, 1),
    },
    "scores": {
        ("forward", 256, 2): Tiles(128, 32, 8, 1),
        ("keys", 256, 2): Tiles(32, 64, 8, 1),
        ("queries", 64, 2): Tiles(64, 64, 4, 2),
    },
    "softcap": _HOPPER["softcap"],
    "mask": {
        **_HOPPER["mask"],
        ("forward", 128, 2): Tiles(64, 32, 8, 2),
        ("forward", 256, 2): Tiles(64, 32, 8, 1),
        ("keys", 128, 2): Tiles(16, 64, 8, 2),
        ("keys", 256, 2): Tiles(32, 64, 8, 1),
        ("queries", 256, 2): Tiles(64, 32, 8, 1),
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
        ("keys", 64, 2): Tiles(16, 64, 8, 2),
        ("keys", 128, 2): Tiles(16, 64, 8, 2),
        ("keys", 192, 2): Tiles(16, 32, 8, 2),
        ("keys", 256, 2): Tiles(16, 32, 8, 2),
        ("queries", 64, 2): Tiles(64, 32, 4, 2),
        ("queries", 128, 2): Tiles(64, 32, 8, 2),
        ("queries", 192, 2): Tiles(32, 32, 8, 2),
        ("queries", 256, 2): Tiles(32, 32, 8, 2),
    },
    "scores": {("forward", 256, 2): Tiles(32, 32, 8, 2)},
}
_AMD: Table = {special: _in_one_stage(tiles) for special, tiles in _HOPPER.items()}  # 64 KiB of shared memory
_AMD["any"] |= {
    ("forward", 192, 2): Tiles(64, 64, 4, 1),
    ("forward", 256, 2): Tiles(64, 32, 4, 1),
    ("keys", 64, 2): Tiles(64, 64, 4, 1),
    ("keys", 256, 2): Tiles(32, 32, 4, 1),
    ("queries", 192, 2): Tiles(64, 32, 4, 1),
    ("queries", 256, 2): Tiles(32, 32, 4, 1),
}
_AMD["scores"] |= {("keys", 128, 2): Tiles(32, 64, 4, 1), ("keys", 256, 2): Tiles(16, 32, 4, 1)}
_AMD["far"] = {("keys", 128, 2): Tiles(32, 64, 4, 1)}
_BY_MAJOR_CAPABILITY = {9: _HOPPER, 10: _BLACKWELL}
_TILES_TO_INTERPRET = Tiles(32, 16, 1, 1)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return not hasattr(forward_kernel, "cache_key")


def on_amd() -> bool:
    """Whether the GPUs are AMD's: they have 64 KiB of shared memory, hence room for one stage."""
    return torch.version.hip is not None


def compute_capability() -> tuple[int, int]:
    """The current NVIDIA GPU's."""
    return _capability_of(torch.cuda.current_device())


@functools.lru_cache
def _capability_of(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def table_of_gpu() -> Table:
    """The tiles for the current GPU: every table fits into the shared memory of all GPUs that it is for."""
    if on_amd():
        return _AMD
    major, _ = compute_capability()
    return _BY_MAJOR_CAPABILITY.get(major, _OTHERS)


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
    table = table_of_gpu()
    tiles = table["any"][key]
    for special in _specials(functions, prepared):
        tiles = table.get(special, {}).get(key, tiles)
    return tiles


def _specials(functions: ScoreFunctions | None, prepared: Prepared) -> Iterator[str]:
    """What a call has that tables may have other tiles for; the last one counts."""
    if functions is not None:
        yield "scores"
        if functions.adjoint is not None:
            yield "adjoint"
    if prepared.softcap is not None:
        yield "softcap"
    if prepared.far_window is not None:
        yield "far"
    if prepared.dropout_p > 0:
        yield "dropout"
    if prepared.mask is not None:
        yield "padding" if is_of_keys(prepared.mask) else "mask"


def is_of_keys(mask: Tensor) -> bool:
    """Whether a mask is the same for all queries, as padding is."""
    return mask.stride(2) == 0 or mask.shape[2] == 1
