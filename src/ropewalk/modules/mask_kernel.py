"""The Triton kernel that reads a mask of keys, and its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.launch.kernel import LETTERS, Kernel
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.launch.steps import Steps

DTYPES = {torch.bool, *LETTERS}
_THREADS = 128
_BLOCKS = (512, 2048)  # keys of one step: two sizes, as each is a binary


@triton.jit
def read_keys_kernel(
    mask_ptr,
    allowed_ptr,  # None without STORE
    starts_ptr,
    ends_ptr,
    n_keys,
    stride_batch,
    stride_key,
    ADDITIVE: tl.constexpr,  # 0 to attend, rather than anything but 0
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the bounds of the keys that a batch row attends, 0 and 0 without keys; and with STORE its mask as 0 and 1.

    One program a batch row.
    """
    batch = tl.program_id(0).to(tl.int64)
    starts = tl.full((BLOCK,), 0, tl.int32) + n_keys
    ends = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, n_keys, BLOCK):
        key = first + tl.arange(0, BLOCK)
        inside = key < n_keys
        x = tl.load(mask_ptr + batch * stride_batch + key.to(tl.int64) * stride_key, inside, other=0)
        attended = inside & ((x == 0) if ADDITIVE else (x != 0))
        starts = tl.minimum(starts, tl.where(attended, key, n_keys))
        ends = tl.maximum(ends, tl.where(attended, key + 1, 0))
        if STORE:
            tl.store(allowed_ptr + batch * n_keys + key, attended.to(tl.uint8), inside)
    end = tl.max(ends, 0)
    tl.store(starts_ptr + batch, tl.minimum(tl.min(starts, 0), end))
    tl.store(ends_ptr + batch, end)


# Rows and keys have any strides: nothing is read or written in vectors.
READ_KEYS = Kernel(
    read_keys_kernel,
    unaligned=("mask_ptr", "allowed_ptr", "starts_ptr", "ends_ptr"),
    wide=("stride_batch", "stride_key"),
)


class KeysCall(NamedTuple):
    """A mask of keys, and how it is read."""

    mask: Tensor  # of a dtype of DTYPES, (B or 1, Tk or 1) or (B or 1, 1, 1, Tk or 1)
    batch: int
    n_keys: int
    is_additive: bool  # 0 to attend, rather than anything but 0
    stores: bool  # a mask of bytes, too


def read(
    mask: Tensor, batch: int, n_keys: int, is_additive: bool, stores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return where the keys start and end that each batch row attends, (B,) int32, and (B, 1, 1, Tk), bool, or None."""
    starts, ends, allowed = _READ.run(KeysCall(mask, batch, n_keys, is_additive, stores))
    assert starts is not None
    assert ends is not None
    return starts, ends, allowed


def read_keys(call: KeysCall, on: Steps) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read a mask with one launch."""
    mask, batch, n_keys, is_additive, stores = call
    starts = torch.empty(batch, dtype=torch.int32, device=mask.device)
    ends = torch.empty_like(starts)
    allowed = torch.empty(batch, 1, 1, n_keys, dtype=torch.bool, device=mask.device) if stores else None
    if batch:
        on.launch(
            READ_KEYS,
            batch,
            mask_ptr=mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
            allowed_ptr=None if allowed is None else allowed.view(torch.uint8),
            starts_ptr=starts,
            ends_ptr=ends,
            n_keys=n_keys,
            stride_batch=mask.stride(0) if mask.shape[0] == batch else 0,
            stride_key=mask.stride(-1) if mask.shape[-1] == n_keys else 0,
            ADDITIVE=is_additive,
            STORE=stores,
            BLOCK=min(_BLOCKS) if n_keys <= min(_BLOCKS) else max(_BLOCKS),
            threads=_THREADS,
        )
    return starts, ends, allowed


_READ = Operation(KeysCall, lambda call: read_keys)
