"""The launches of the rotation by tables of each head, and of its gradients.

As `launch.py` does, `prepare` and `prepare_gradients` compute what depends on shapes, strides and flags alone, and the
launches that they return read addresses and launch compiled kernels that they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.rope.call import RopeCall, Rotate
from ropewalk.ops.rope.head_tables import TableRows, add_to_rows, share_rows, table_rows, token_positions
from ropewalk.ops.rope.triton import launch as shared
from ropewalk.ops.rope.triton.head_kernel import (
    SUM_BLOCK_COLUMNS,
    HeadSpecialisation,
    compile_kernel,
    head_gradients_kernel,
    kernel_constants,
    rotate_heads_kernel,
    row_sum_kernel,
)
from ropewalk.ops.rope.validate import as_bthd

_CHUNK_BYTES = 2**22  # of tables, which batch rows that share them read one after another
_PROGRAMS_PER_SM = 8  # of the gradients: fewer sum fewer batch rows each


class Tiles(NamedTuple):
    """The work of a program: so many rows, by so many threads."""

    rows: int
    threads: int


def choose_tiles(half: int, head_dim: int, itemsize: int, *, backward: bool) -> Tiles:
    """Return tiles in which a thread has 16 bytes of each half of a row."""
    per_row = max(1, triton.next_power_of_2(half) * itemsize // 16)
    threads = 128
    rows = max(1, threads // per_row)
    if 2 * half < head_dim:
        # The other features are copied by whole rows: 32 features a thread fit its registers.
        rows = max(1, min(rows, 32 * threads // triton.next_power_of_2(head_dim)))
    return Tiles(rows, min(threads, max(32, rows * per_row)))


@cache
def _binary(kernel: Any, spec: HeadSpecialisation, device: int) -> Callable[..., None]:
    """Compile a kernel for `device`; call the result with the grid, the stream and its arguments."""
    with torch.cuda.device(device):
        compiled = compile_kernel(kernel, spec)
        run = compiled.run  # loads the binary onto the device
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(n_programs: int, n_blocks: int, stream: int, *arguments: Any) -> None:
        run(n_programs, n_blocks, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


@dataclass
class _Launch:
    """One prepared launch of a kernel."""

    kernel: Any
    spec: HeadSpecialisation
    grid: tuple[int, int]
    device: int
    constants: tuple[Any, ...]  # the numbers that stay the same from call to call, in the kernel's order

    def __post_init__(self) -> None:
        self.constants += tuple(kernel_constants(self.kernel, self.spec).values())
        self._by_alignment: dict[int, Callable[..., None]] = {}

    def __call__(self, tensors: Sequence[Tensor | None], indices: Sequence[Tensor | None], *numbers: int) -> None:
        """Launch on the current stream: tensors, then what rows are looked up by, then numbers."""
        if 0 in self.grid:
            return
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        union = 16
        for pointer in pointers:
            union |= pointer
        alignment = union & -union
        launch = self._by_alignment.get(alignment)
        if launch is None:
            spec = replace(self.spec, pointer_alignment=alignment)
            launch = self._by_alignment[alignment] = _binary(self.kernel, spec, self.device)
        arguments = (*pointers, *[0 if x is None else x.data_ptr() for x in indices], *numbers)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if torch._C._cuda_getDevice() == self.device:
            launch(*self.grid, stream, *arguments, *self.constants)
        else:
            with torch.cuda.device(self.device):
                launch(*self.grid, stream, *arguments, *self.constants)


class _InterpretedLaunch(_Launch):
    """The same by Triton's interpreter, on CPU tensors."""

    def __call__(self, tensors: Sequence[Tensor | None], indices: Sequence[Tensor | None], *numbers: int) -> None:
        """Launch in the interpreter."""
        if 0 in self.grid:
            return
        q = tensors[0]
        arguments = (*[q if x is None else x for x in (*tensors, *indices)], *numbers, *self.constants)
        self.kernel[self.grid](**dict(zip(self.kernel.arg_names, arguments, strict=True)))


def describe(
    roles: Sequence[Sequence[Tensor]],
    call: RopeCall,
    *,
    rows: TableRows | None = None,
    needs_dx: bool = False,
    tiles: Tiles | None = None,
) -> _Launch:
    """Make a launch: `roles` are q, or q and k; then their results, or results' gradients and gradients.

    rows: of the gradients of the tables, for the kernel that computes them.
    """
    xs = roles[0]
    q = xs[0]
    cos, sin, positions, _, _, flags, _ = call
    batch, tokens, n_heads, head_dim = as_bthd(q, flags.layout).shape
    half = cos.shape[-1]
    # (batch, token, head) of each.
    strides: list[int] = []
    for tensors in roles:
        for x in tensors:
            strides += shared._strides(as_bthd(x, flags.layout))[:3]
        strides += [0, 0, 0] * (2 - len(tensors))
    stride_unit = shared._unit(strides)
    # (batch, row, head) of each; one table for all batch rows is a stride of 0 between them.
    table_strides = [stride for table in (cos, sin) for stride in (0, *shared._strides(table))[-4:-1]]
    table_stride_unit = shared._unit(table_strides)
    kind, positions_strides = shared.describe_positions(call)
    if tiles is None:
        tiles = choose_tiles(half, head_dim, q.element_size(), backward=rows is not None)
    all_strides = (
        *(stride // stride_unit for stride in strides),
        *(stride // table_stride_unit for stride in table_strides),
        *positions_strides,
    )
    letters = shared._LETTERS
    heads_are_near = tokens <= 1 or n_heads <= 1 or strides[2] <= strides[1]
    spec = HeadSpecialisation(
        dtype=letters[q.dtype],
        table_dtype=letters[cos.dtype],
        grad_dtype=letters[cos.dtype if rows is None else rows.dtype],
        index_dtype="i64" if positions is None else letters[positions.dtype],
        positions=kind,
        n_heads=n_heads,
        has_k=len(xs) == 2,
        head_dim=head_dim,
        half=half,
        rotary_offset=flags.rotary_offset,
        interleaved=flags.interleaved,
        inplace=flags.inplace,
        needs_dx=needs_dx,
        pointer_alignment=16,
        stride_unit=stride_unit,
        table_stride_unit=table_stride_unit,
        stride_dtype="i32" if max(all_strides) < 2**31 else "i64",
        heads_are_near=heads_are_near,
        block_rows=tiles.rows,
        threads=tiles.threads,
        pair_block=shared.block_of_pairs(flags.pair_block, half),
    )
    token_blocks = math.ceil(tokens / tiles.rows)
    n_blocks = math.ceil(tokens * n_heads / tiles.rows) if heads_are_near else token_blocks * n_heads
    n_units, rows_of_unit = (batch, 1) if rows is None else (rows.n_units, rows.batch_rows)
    chunk_blocks = n_blocks
    if n_units > 1 and table_strides[0] == positions_strides[0] == 0:
        bytes_of_block = 2 * tiles.rows * half * cos.element_size()
        chunk_blocks = min(n_blocks, max(1, _CHUNK_BYTES // bytes_of_block))
    n_chunks = math.ceil(n_blocks / max(1, chunk_blocks))
    is_empty = 0 in (batch, tokens, n_heads, head_dim)
    constants = (
        *(() if rows is None else (batch, rows_of_unit)),
        n_units,
        *shared._division(n_units),
        chunk_blocks,
        *shared._division(chunk_blocks),
        token_blocks,
        tokens,
        cos.shape[-3],  # tables per token have T, and positions 0 … T − 1
        *all_strides,
    )
    kernel = rotate_heads_kernel if rows is None else head_gradients_kernel
    n_programs = 0 if is_empty else n_chunks * n_units * chunk_blocks
    return _make_launch(kernel, spec, (n_programs, 1), q, constants)


def _make_launch(
    kernel: Any, spec: HeadSpecialisation, grid: tuple[int, int], x: Tensor, constants: tuple[Any, ...]
) -> _Launch:
    launch_class = _InterpretedLaunch if gpu.is_interpreted() else _Launch
    return launch_class(kernel, spec, grid, x.device.index, constants)


def _is_dense(x: Tensor) -> bool:
    """Say whether the last dimension is dense in memory."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


@torch.no_grad()
def _rotate_clones(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
    """Rotate dense copies, for tensors that the kernel cannot read."""
    clones = [x.clone(memory_format=torch.contiguous_format) for x in xs]
    flags = call.flags._replace(inplace=True)
    dense = call._replace(cos=call.cos.contiguous(), sin=call.sin.contiguous(), flags=flags)
    prepare(clones, dense)(clones, clones, dense)
    for out, clone in zip(outs, clones, strict=True):
        out.copy_(clone)


def _pair(xs: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    return xs[0], xs[1] if len(xs) == 2 else None


def prepare(xs: Sequence[Tensor], call: RopeCall, tiles: Tiles | None = None) -> Rotate:
    """Make the rotation of tensors like these, whose call is checked."""
    outs = xs if call.flags.inplace else [torch.empty_like(x, device="meta") for x in xs]
    if not all(map(_is_dense, (*xs, *outs, call.cos, call.sin))):
        return _rotate_clones
    launch = describe((xs, outs), call, tiles=tiles)

    def run(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
        tensors = (*_pair(xs), *_pair(outs), call.cos, call.sin)
        launch(tensors, (call.positions,), -1 if call.flags.inverse else 1)

    return run


def prepare_gradients(
    grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall, needs_dx: bool, tiles: Tiles | None = None
) -> Callable[..., tuple[list[Tensor] | None, Tensor, Tensor]]:
    """Make the function of (grads, xs, call) that returns the gradients of `xs`, if they are needed, and the tables'.

    `grads` are those of the rotated `xs`, all given.
    """
    dxs = [torch.empty_like(x, device="meta") for x in xs]
    if not all(map(_is_dense, (*grads, *xs, *dxs, call.cos, call.sin))):
        return lambda *arguments: _dense_gradients(*arguments, needs_dx=needs_dx)
    x = xs[0]
    rows = table_rows(x, call, _units(x, call))
    launch = describe((xs, grads, dxs if needs_dx else xs), call, rows=rows, needs_dx=needs_dx, tiles=tiles)
    sum_rows = None if call.positions is None else _prepare_sums(rows, launch.spec, call)

    def run(
        grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall
    ) -> tuple[list[Tensor] | None, Tensor, Tensor]:
        cos, sin = call.cos, call.sin
        dxs = [torch.empty_like(x) for x in xs] if needs_dx else None
        dcos, dsin = (torch.empty(rows.shape, dtype=rows.dtype, device=cos.device) for _ in range(2))
        tensors = (*_pair(xs), *_pair(grads), *_pair(dxs or xs), cos, sin, dcos, dsin)
        launch(tensors, (call.positions,), -1 if call.flags.inverse else 1)
        if sum_rows is not None:
            return dxs, *sum_rows(dcos, dsin, call)
        return dxs, add_to_rows(dcos, cos, call), add_to_rows(dsin, sin, call)

    return run


def _prepare_sums(
    rows: TableRows, spec: HeadSpecialisation, call: RopeCall
) -> Callable[[Tensor, Tensor, RopeCall], tuple[Tensor, Tensor]]:
    """Make the function that sums the gradients of tokens, (units, T, H, R/2) each, by their rows of the tables."""
    n_units, tokens, n_heads, half = rows.shape
    if not share_rows(call.cos, call.positions, call.flags.layout):
        n_units, tokens = 1, n_units * tokens
    shape = call.cos.shape
    grid = shape[0], math.ceil(n_heads * half / SUM_BLOCK_COLUMNS)
    launch = _make_launch(row_sum_kernel, spec, grid, call.cos, (n_units, tokens))

    def run(dcos: Tensor, dsin: Tensor, call: RopeCall) -> tuple[Tensor, Tensor]:
        position = token_positions(rows.shape[1], call)
        found, order = position.flatten().sort(stable=True)
        bounds = torch.searchsorted(found, torch.arange(shape[0] + 1, dtype=found.dtype, device=found.device))
        sums = [torch.empty(shape, dtype=call.cos.dtype, device=found.device) for _ in range(2)]
        launch((dcos, dsin, *sums), (order, bounds))
        return sums[0], sums[1]

    return run


def _units(x: Tensor, call: RopeCall) -> int:
    """Return in how many parts to sum batch rows that share rows of the tables: enough to fill the device."""
    batch, tokens, n_heads, _ = as_bthd(x, call.flags.layout).shape
    tiles = choose_tiles(call.cos.shape[-1], x.shape[-1], x.element_size(), backward=True)
    n_blocks = max(1, math.ceil(tokens * n_heads / tiles.rows))
    n_sms = 1 if gpu.is_interpreted() else gpu.num_sms(x.device)
    return min(max(1, batch), math.ceil(n_sms * _PROGRAMS_PER_SM / n_blocks))


def _dense_gradients(
    grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall, *, needs_dx: bool
) -> tuple[list[Tensor] | None, Tensor, Tensor]:
    """Compute gradients from dense copies, for tensors that the kernel cannot read."""
    dense = [x.contiguous() for x in grads], [x.contiguous() for x in xs]
    call = call._replace(cos=call.cos.contiguous(), sin=call.sin.contiguous())
    dxs, dcos, dsin = prepare_gradients(*dense, call, needs_dx)(*dense, call)
    if dxs is not None:
        dxs = [torch.empty_like(x).copy_(dx) for x, dx in zip(xs, dxs, strict=True)]
    return dxs, dcos, dsin
