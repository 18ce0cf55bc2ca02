"""Launching the Triton rotation at the lowest cost to the host.

`prepare` does once, per combination of shapes, strides and flags, all that does not depend on the data; the `Launch` that
it returns reads addresses and launches a compiled kernel that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk.ops.rope.checks import as_bthd
from ropewalk.ops.rope.triton_kernels import (
    Positions,
    Specialisation,
    compile_kernel,
    kernel_constants,
    rotate_kernel,
)

_LETTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_WIDEST_ACCESS = 16  # bytes


class Tiles(NamedTuple):
    """How the work is cut: the tile of one program, its warps, and how many programs share a token's heads."""

    block_tokens: int
    block_heads: int
    num_warps: int
    head_programs: int


def choose_tiles(tokens: int, n_q_heads: int, n_k_heads: int, half: int, itemsize: int) -> Tiles:
    """The tiles that were fastest on an H200 (docs/log.md); `tokens` counts all batch rows."""
    # Lanes that cover half a row of one head in 16-byte accesses, or one head's row of pairs in two.
    lanes = max(1, triton.next_power_of_2(half) * itemsize // _WIDEST_ACCESS)
    n_heads = n_q_heads + n_k_heads
    if tokens < 1024:
        block_heads = max(1, 32 // lanes)
        return Tiles(1, block_heads, 1, max(1, _groups(n_q_heads, block_heads) + _groups(n_k_heads, block_heads)))
    block_heads = min(8, triton.next_power_of_2(max(1, n_heads)))
    num_warps = min(4, max(1, block_heads * lanes // 32))
    return Tiles(1, block_heads, num_warps, 1)


def _groups(n_heads: int, block_heads: int) -> int:
    return -(-n_heads // block_heads)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return not hasattr(rotate_kernel, "cache_key")


@lru_cache(maxsize=None)
def _binary(spec: Specialisation, device: int) -> Callable[..., None]:
    """The compiled kernel, ready to launch on `device`; it takes the grid, the stream, then the kernel's arguments."""
    with torch.cuda.device(device):
        compiled = compile_kernel(spec)
        run = compiled.run  # loads the binary onto the device
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(grid_x: int, grid_y: int, stream: int, *arguments: Any) -> None:
        run(grid_x, grid_y, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


@dataclass
class Launch:
    """One prepared rotation: call it with tensors of the shapes and strides that it was prepared for."""

    spec: Specialisation
    grid: tuple[int, int]
    device: int
    constants: tuple[Any, ...]  # the arguments that stay the same from call to call, in the kernel's order

    def __post_init__(self) -> None:
        self._by_alignment: dict[int, Callable[..., None]] = {}

    def __call__(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        offset: int,
        inverse: bool,
    ) -> None:
        """Write the rotation of `xs` into `outs`, on the current stream of their device."""
        grid_x, grid_y = self.grid
        if grid_x == 0:
            return
        q, q_out = xs[0].data_ptr(), outs[0].data_ptr()
        k, k_out = (xs[1].data_ptr(), outs[1].data_ptr()) if len(xs) == 2 else (0, 0)
        cos_ptr, sin_ptr = cos.data_ptr(), sin.data_ptr()
        addresses = q | q_out | k | k_out | cos_ptr | sin_ptr | _WIDEST_ACCESS
        alignment = addresses & -addresses
        launch = self._by_alignment.get(alignment)
        if launch is None:
            spec = replace(self.spec, pointer_alignment=alignment)
            launch = self._by_alignment[alignment] = _binary(spec, self.device)
        arguments = (
            q,
            k,
            q_out,
            k_out,
            cos_ptr,
            sin_ptr,
            0 if positions is None else positions.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            offset,
            -1 if inverse else 1,
        )
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                stream = torch._C._cuda_getCurrentRawStream(self.device)
                launch(grid_x, grid_y, stream, *arguments, *self.constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        launch(grid_x, grid_y, stream, *arguments, *self.constants)


class InterpretedLaunch(Launch):
    """The same through Triton's interpreter, on CPU tensors."""

    def __call__(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        offset: int,
        inverse: bool,
    ) -> None:
        """Write the rotation of `xs` into `outs`."""
        if self.grid[0] == 0:
            return
        q, q_out, k, k_out = xs[0], outs[0], xs[-1], outs[-1]
        indices = (q if positions is None else positions, q if cu_seqlens is None else cu_seqlens)
        direction = -1 if inverse else 1
        rotate_kernel[self.grid](q, k, q_out, k_out, cos, sin, *indices, offset, direction, *self.constants)


def prepare(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    layout: str,
    interleaved: bool,
    rotary_offset: int,
    inplace: bool,
    tiles: Tiles | None = None,
) -> Launch:
    """Work out the launch for tensors like these; arguments are those of `ropewalk.apply_rope`, already checked."""
    xs = [q] if k is None else [q, k]
    outs = xs if inplace else [torch.empty_like(x, device="meta") for x in xs]
    batch, tokens, n_q_heads, head_dim = as_bthd(q, layout).shape
    n_k_heads = as_bthd(k, layout).shape[2] if k is not None else 0
    half = cos.shape[-1]

    x_strides = [_strides(as_bthd(x, layout)) for x in xs]
    out_strides = [_strides(as_bthd(x, layout)) for x in outs]
    if k is None:
        x_strides.append((0, 0, 0, 0))
        out_strides.append((0, 0, 0, 0))
    every = [*x_strides, *out_strides]
    stride_unit = _unit(stride for strides in every for stride in strides[:3])
    # (batch, row, pair) of each; one table for all batch rows is a stride of 0 between them.
    table_strides = [(0, *_strides(table))[-3:] for table in (cos, sin)]
    table_stride_unit = _unit(stride for strides in table_strides for stride in strides[:2])
    unit_feature_stride = all(strides[-1] in (0, 1) for strides in (*every, *table_strides))

    positions_strides = (0, 0)  # (batch, token)
    if positions is None or cos.ndim == 3:
        kind = Positions.PACKED if cu_seqlens is not None and cos.ndim == 2 else Positions.INDEX
    elif positions.ndim == 1 and layout != "thd":
        kind, positions_strides = Positions.OFFSETS, (positions.stride(0), 0)
    else:
        kind, positions_strides = Positions.TOKENS, ((0, *_strides(positions))[-2:])
    index = positions if positions is not None else cu_seqlens
    n_sequences = cu_seqlens.numel() - 1 if cu_seqlens is not None else 0
    n_rows = cos.shape[-2]  # tables per token have T, and positions 0 … T − 1

    if tiles is None:
        tiles = choose_tiles(batch * tokens, n_q_heads, n_k_heads, half, q.element_size())
    spec = Specialisation(
        dtype=_LETTERS[q.dtype],
        table_dtype=_LETTERS[cos.dtype],
        index_dtype=_LETTERS[index.dtype] if index is not None else "i64",
        positions=kind,
        head_dim=head_dim,
        half=half,
        rotary_offset=rotary_offset,
        interleaved=interleaved,
        inplace=inplace,
        pointer_alignment=_WIDEST_ACCESS,
        stride_unit=stride_unit,
        table_stride_unit=table_stride_unit,
        unit_feature_stride=unit_feature_stride,
        block_tokens=tiles.block_tokens,
        block_heads=tiles.block_heads,
        num_warps=tiles.num_warps,
    )
    scaled = [
        (b // stride_unit, t // stride_unit, h // stride_unit, feature)
        for b, t, h, feature in (x_strides[0], x_strides[1], out_strides[0], out_strides[1])
    ]
    constants = (
        batch,
        tokens,
        n_q_heads,
        n_k_heads,
        n_rows,
        n_sequences,
        n_sequences.bit_length(),
        *(stride for strides in scaled for stride in strides),
        *(stride for b, row, pair in table_strides for stride in (b // table_stride_unit, row // table_stride_unit, pair)),
        *positions_strides,
        *kernel_constants(spec).values(),
    )
    empty = batch * tokens * (n_q_heads + n_k_heads) * head_dim == 0
    grid = (0 if empty else batch * math.ceil(tokens / tiles.block_tokens), tiles.head_programs)
    if interpreted():
        return InterpretedLaunch(spec, grid, -1, constants)
    return Launch(spec, grid, q.device.index, constants)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides in elements, with 0 for a dimension along which nobody walks."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))


def _unit(strides: Iterable[int]) -> int:
    """The largest power of two, up to 16, that divides every stride."""
    union = _WIDEST_ACCESS
    for stride in strides:
        union |= stride
    return union & -union
