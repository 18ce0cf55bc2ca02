"""The launch of the Triton rotation, in as little host time as possible.

`prepare` computes what depends on shapes, strides and flags alone. The `Launch` that it returns reads addresses and
launches a compiled kernel that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.rope.call import RopeCall, Rotate
from ropewalk.ops.rope.triton.kernel import (
    Positions,
    Specialisation,
    compile_kernel,
    kernel_constants,
    rotate_kernel,
)
from ropewalk.ops.rope.validate import as_bthd

_LETTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_WIDEST_ACCESS = 16  # bytes
_CHUNK_TOKENS = 4096  # of one batch row, before those of the next one
_MANY_TOKENS = 1024  # bandwidth limits calls from here on, latency those below


class Tiles(NamedTuple):
    """The work of a program: `block_heads` heads of `block_tokens` tokens, by so many threads."""

    block_tokens: int
    block_heads: int
    threads: int


def choose_tiles(
    batch: int,
    tokens: int,
    n_heads: int,
    head_dim: int,
    half: int,
    itemsize: int,
    *,
    interleaved: bool,
    heads_are_near: bool,
    by_axes: bool = False,
) -> Tiles:
    """Return the tiles that were fastest on an H200 (docs/notes/001-rotation-in-triton.md).

    n_heads is the larger of q's and k's; heads_are_near says that a token's heads lie nearer to each other in memory
    than a head's tokens do; by_axes says that each pair gathers its own row of the tables.
    """
    # Half a row of one head is read in 16-byte accesses by this many threads.
    per_row = max(1, triton.next_power_of_2(half) * itemsize // _WIDEST_ACCESS)
    if interleaved and batch * tokens >= _MANY_TOKENS:
        rows, threads = 64 // per_row, 32
    elif interleaved:
        rows, threads = 64 // per_row, 128
    elif by_axes:
        # One tile of the tables is for all heads: a thread takes more of them than it could load tables for.
        rows = min(16, 128 // per_row)
        threads = max(32, rows * per_row // 2) if heads_are_near else 64
    elif heads_are_near:
        rows, threads = 128 // per_row, 128
    else:
        rows, threads = 64 // per_row, 64
    if 2 * half < head_dim:
        # The other features are copied by whole rows: 32 features a thread fit its registers.
        rows = min(rows, 32 * threads // triton.next_power_of_2(head_dim))
    block_heads = min(max(1, rows), triton.next_power_of_2(max(1, n_heads)))
    if not heads_are_near:
        block_heads = min(block_heads, 4)
    block_tokens = min(max(1, rows // block_heads), triton.next_power_of_2(max(1, tokens)))
    return Tiles(block_tokens, block_heads, threads)


@cache
def _binary(spec: Specialisation, device: int) -> tuple[Callable[..., None], Any, Any]:
    """Compile the kernel for `device`: Triton's launcher, the driver's function and what the launcher reads of it."""
    with torch.cuda.device(device):
        compiled = compile_kernel(spec)
        run = compiled.run  # loads the binary onto the device
    return run, compiled.function, compiled.packed_metadata


@dataclass
class Launch:
    """A prepared rotation, for tensors of the shapes and strides that it was prepared for."""

    spec: Specialisation
    n_programs: int
    device: int
    constants: tuple[Any, ...]  # the arguments that stay the same from call to call, in the kernel's order

    def __post_init__(self) -> None:
        self._by_alignment: dict[int, tuple[Callable[..., None], Any, Any]] = {}

    def __call__(self, xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
        """Write the rotation of `xs` into `outs`, on the current stream of their device."""
        if self.n_programs == 0:
            return
        q, q_out = xs[0].data_ptr(), outs[0].data_ptr()
        k, k_out = (xs[1].data_ptr(), outs[1].data_ptr()) if len(xs) == 2 else (0, 0)
        cos, sin, positions, cu_seqlens, offset, flags, axes = call
        cos_ptr, sin_ptr = cos.data_ptr(), sin.data_ptr()
        axes_ptr = None if axes is None else axes.data_ptr()
        addresses = q | q_out | k | k_out | cos_ptr | sin_ptr | (axes_ptr or 0) | _WIDEST_ACCESS
        alignment = addresses & -addresses
        binary = self._by_alignment.get(alignment)
        if binary is None:
            spec = replace(self.spec, pointer_alignment=alignment)
            binary = self._by_alignment[alignment] = _binary(spec, self.device)
        launch, function, metadata = binary
        arguments = (
            self.n_programs,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(self.device),
            function,
            metadata,
            None,
            None,
            None,
            q,
            k,
            q_out,
            k_out,
            cos_ptr,
            sin_ptr,
            0 if positions is None else positions.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            axes_ptr,
            offset,
            -1 if flags.inverse else 1,
            *self.constants,
        )
        if torch._C._cuda_getDevice() == self.device:
            launch(*arguments)
        else:
            with torch.cuda.device(self.device):
                launch(*arguments)


class InterpretedLaunch(Launch):
    """The same by Triton's interpreter, on CPU tensors."""

    def __call__(self, xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
        """Write the rotation of `xs` into `outs`."""
        if self.n_programs == 0:
            return
        q, q_out, k, k_out = xs[0], outs[0], xs[-1], outs[-1]
        cos, sin, positions, cu_seqlens, offset, flags, axes = call
        indices = (q if positions is None else positions, q if cu_seqlens is None else cu_seqlens)
        direction = -1 if flags.inverse else 1
        values = (q, k, q_out, k_out, cos, sin, *indices, axes, offset, direction, *self.constants)
        rotate_kernel[(self.n_programs,)](**dict(zip(rotate_kernel.arg_names, values, strict=True)))


def prepare(xs: Sequence[Tensor], call: RopeCall, tiles: Tiles | None = None) -> Rotate:
    """Make the launch for tensors like these, whose call is checked."""
    cos, sin, positions, cu_seqlens, _, flags, axes = call
    layout, interleaved, inplace = flags.layout, flags.interleaved, flags.inplace
    q, k = xs[0], xs[1] if len(xs) == 2 else None
    outs = xs if inplace else [torch.empty_like(x, device="meta") for x in xs]
    dense = (*xs, *outs, cos, sin, cu_seqlens, axes)
    if any(x is not None and x.stride(-1) != 1 and x.shape[-1] > 1 for x in dense):
        return _rotate_clones
    batch, tokens, n_q_heads, head_dim = as_bthd(q, layout).shape
    n_k_heads = as_bthd(k, layout).shape[2] if k is not None else 0
    half = cos.shape[-1]

    # (batch, token, head) of each.
    x_strides = [_strides(as_bthd(x, layout))[:3] for x in xs]
    out_strides = [_strides(as_bthd(x, layout))[:3] for x in outs]
    if k is None:
        x_strides.append((0, 0, 0))
        out_strides.append((0, 0, 0))
    strides = [stride for of_tensor in (*x_strides, *out_strides) for stride in of_tensor]
    stride_unit = _unit(strides)
    # (batch, row) of each; one table for all batch rows is a stride of 0 between them.
    table_strides = [stride for table in (cos, sin) for stride in (0, *_strides(table))[-3:-1]]
    table_stride_unit = _unit(table_strides)

    kind, positions_strides = describe_positions(call)
    index = positions if positions is not None else cu_seqlens
    n_sequences = cu_seqlens.numel() - 1 if cu_seqlens is not None else 0
    n_rows = cos.shape[-2]  # tables per token have T, and positions 0 … T − 1

    if tiles is None:
        tiles = choose_tiles(
            batch,
            tokens,
            max(n_q_heads, n_k_heads),
            head_dim,
            half,
            q.element_size(),
            interleaved=interleaved,
            heads_are_near=tokens <= 1 or n_q_heads <= 1 or x_strides[0][2] <= x_strides[0][1],
            by_axes=kind == Positions.AXES,
        )
    all_strides = (
        *(stride // stride_unit for stride in strides),
        *(stride // table_stride_unit for stride in table_strides),
        *positions_strides,
    )
    spec = Specialisation(
        dtype=_LETTERS[q.dtype],
        table_dtype=_LETTERS[cos.dtype],
        index_dtype=_LETTERS[index.dtype] if index is not None else "i64",
        positions=kind,
        n_q_heads=n_q_heads,
        n_k_heads=n_k_heads,
        head_dim=head_dim,
        half=half,
        rotary_offset=flags.rotary_offset,
        interleaved=interleaved,
        inplace=inplace,
        pointer_alignment=_WIDEST_ACCESS,
        stride_unit=stride_unit,
        table_stride_unit=table_stride_unit,
        stride_dtype="i32" if max(all_strides) < 2**31 else "i64",
        block_tokens=tiles.block_tokens,
        block_heads=tiles.block_heads,
        threads=tiles.threads,
        # The next batch row reads them again: 0.7 % more bandwidth for many tokens, 4 % more latency for few.
        keep_tables=batch * tokens >= _MANY_TOKENS,
        n_axes=0 if axes is None or positions is None else positions.shape[0],
        axes_dtype="i32" if axes is None else _LETTERS[axes.dtype],
        pair_block=block_of_pairs(flags.pair_block, half),
    )
    token_blocks = math.ceil(tokens / tiles.block_tokens)
    n_chunks = max(1, round(tokens / _CHUNK_TOKENS)) if batch > 1 else 1
    chunk_blocks = math.ceil(token_blocks / n_chunks)
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + math.ceil(n_k_heads / tiles.block_heads)
    empty = 0 in (batch, tokens, n_q_heads + n_k_heads, head_dim)
    n_programs = 0 if empty else n_chunks * batch * chunk_blocks * n_groups
    constants = (
        batch,
        *_division(batch),
        chunk_blocks,
        *_division(chunk_blocks),
        tokens,
        n_rows,
        n_sequences,
        n_sequences.bit_length(),
        *all_strides,
        *(() if axes is not None else (None,)),  # the stride between axes
        *kernel_constants(spec).values(),
    )
    launch_class = InterpretedLaunch if gpu.is_interpreted() else Launch
    return launch_class(spec, n_programs, q.device.index, constants)


def block_of_pairs(pair_block: int | None, half: int) -> int:
    """Return the kernels' PAIR_BLOCK: 0 where one block has all the rotated features."""
    return 0 if pair_block is None or pair_block == 2 * half else pair_block


def describe_positions(call: RopeCall) -> tuple[Positions, tuple[int, ...]]:
    """Return where a token's position comes from, and the strides of positions: (batch, token), and axis of several."""
    cos, _, positions, cu_seqlens, _, flags, axes = call
    if positions is None:
        return Positions.PACKED if cu_seqlens is not None and cos.ndim == 2 else Positions.INDEX, (0, 0)
    if axes is not None:
        axis, *rest = _strides(positions)
        return Positions.AXES, (*(0, *rest)[-2:], axis)
    if positions.ndim == 1 and flags.layout != "thd":
        return Positions.OFFSETS, (positions.stride(0), 0)
    return Positions.TOKENS, (0, *_strides(positions))[-2:]


@torch.no_grad()
def _rotate_clones(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
    """Rotate dense copies, for tensors whose last dimension is not dense in memory."""
    clones = [x.clone(memory_format=torch.contiguous_format) for x in xs]
    dense = call._replace(
        cos=call.cos.contiguous(),
        sin=call.sin.contiguous(),
        cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens.contiguous(),
        axes=None if call.axes is None else call.axes.contiguous(),
        flags=call.flags._replace(inplace=True),
    )
    prepare(clones, dense)(clones, clones, dense)
    for out, clone in zip(outs, clones, strict=True):
        out.copy_(clone)


def _division(divisor: int) -> tuple[int, int]:
    """Return a multiplier m and a shift s such that n // divisor == n · m >> s for all 0 ≤ n < 2³¹."""
    shift = 31 + max(divisor - 1, 0).bit_length()
    return -(-(1 << shift) // max(divisor, 1)), shift


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return strides in elements, 0 for a dimension of one element."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))


def _unit(strides: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides every stride."""
    union = _WIDEST_ACCESS
    for stride in strides:
        union |= stride
    return union & -union
