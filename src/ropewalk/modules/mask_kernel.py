"""The Triton kernel that reads a mask of keys, and its launch in as little host time as possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from ropewalk import device as gpu

POINTERS = {
    torch.bool: "*u8",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
_THREADS = 128
_BLOCKS = (512, 2048)  # keys of one step: two sizes, as each is a binary


@triton.jit
def read_keys_kernel(
    mask_ptr,
    allowed_ptr,
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
        kept = inside & ((x == 0) if ADDITIVE else (x != 0))
        starts = tl.minimum(starts, tl.where(kept, key, n_keys))
        ends = tl.maximum(ends, tl.where(kept, key + 1, 0))
        if STORE:
            tl.store(allowed_ptr + batch * n_keys + key, kept.to(tl.uint8), inside)
    end = tl.max(ends, 0)
    tl.store(starts_ptr + batch, tl.minimum(tl.min(starts, 0), end))
    tl.store(ends_ptr + batch, end)


def kernel_source(dtype: torch.dtype, additive: bool, store: bool, block: int) -> ASTSource:
    """Return the source that Triton compiles for masks of a dtype; it needs no GPU."""
    signature = {"mask_ptr": POINTERS[dtype], "allowed_ptr": "*u8", "starts_ptr": "*i32", "ends_ptr": "*i32"}
    signature |= {"n_keys": "i32", "stride_batch": "i64", "stride_key": "i64"}
    signature |= dict.fromkeys(("ADDITIVE", "STORE", "BLOCK"), "constexpr")
    return ASTSource(read_keys_kernel, signature, {"ADDITIVE": additive, "STORE": store, "BLOCK": block})


def compile_kernel(source: ASTSource, target: Any = None) -> Any:
    """Compile the kernel for `target`, by default the current GPU."""
    target = target or triton.runtime.driver.active.get_current_target()
    return triton.compile(source, target=target, options={"num_warps": _THREADS // target.warp_size})


@cache
def _binary(dtype: torch.dtype, additive: bool, store: bool, block: int, device: int) -> Callable[..., None]:
    """Compile the kernel for `device`; call the result with the number of programs, the stream and its arguments."""
    with torch.cuda.device(device):
        compiled = compile_kernel(kernel_source(dtype, additive, store, block))
        run = compiled.run  # loads the binary onto the device
    function, metadata = compiled.function, compiled.packed_metadata

    def launch_binary(n_programs: int, stream: int, *arguments: int) -> None:
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *arguments, additive, store, block)

    return launch_binary


def launch(
    mask: Tensor,
    strides: tuple[int, int],
    n_keys: int,
    additive: bool,
    allowed: Tensor | None,
    starts: Tensor,
    ends: Tensor,
) -> None:
    """Read a mask of keys into starts and ends, (B,) int32 each, and into `allowed`, bool, dense, B rows of n_keys.

    strides: those of mask between batch rows and between keys; 0 for a dimension that is broadcast. Without `allowed`
    no mask is written.
    """
    batch, store = starts.shape[0], allowed is not None
    if batch == 0:
        return
    block = _BLOCKS[0] if n_keys <= _BLOCKS[0] else _BLOCKS[1]
    if gpu.is_interpreted():
        read_keys_kernel[(batch,)](
            mask_ptr=mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
            allowed_ptr=starts if allowed is None else allowed.view(torch.uint8),
            starts_ptr=starts,
            ends_ptr=ends,
            n_keys=n_keys,
            stride_batch=strides[0],
            stride_key=strides[1],
            ADDITIVE=additive,
            STORE=store,
            BLOCK=block,
        )
        return
    device = mask.get_device()
    launch_binary = _binary(mask.dtype, additive, store, block, device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    arguments = (
        mask.data_ptr(),
        0 if allowed is None else allowed.data_ptr(),
        starts.data_ptr(),
        ends.data_ptr(),
        n_keys,
        *strides,
    )
    if torch._C._cuda_getDevice() == device:
        launch_binary(batch, stream, *arguments)
    else:
        with torch.cuda.device(device):
            launch_binary(batch, stream, *arguments)
