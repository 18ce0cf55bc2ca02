"""The launches of the rotation by tables of each head, and of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.launch.kernel import Kernel, compute_dtype, division_by
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.arguments import (
    are_dense,
    are_near,
    contiguous,
    copy_to,
    head_args,
    pair_args,
    position_args,
    rotate_copies,
    table_args,
    with_dense_tables,
)
from ropewalk.ops.rope.call import RopeCall, Rotation
from ropewalk.ops.rope.heads.kernel import head_gradients_kernel, rotate_heads_kernel, row_sum_kernel
from ropewalk.ops.rope.heads.reference import HeadGradients, TableRows, share_rows, table_rows, token_positions
from ropewalk.ops.rope.validate import as_bthd

SUM_BLOCK_TOKENS, SUM_BLOCK_COLUMNS, SUM_WARPS = 4, 256, 2
_CHUNK_BYTES = 2**22  # of tables, which batch rows that share them read one after another
_PROGRAMS_PER_SM = 8  # of the gradients: fewer sum fewer batch rows each
_LOOKUP = ("POSITIONS", "positions_ptr", "positions_stride_batch", "positions_stride_token")

ROTATE, GRADIENTS = (
    Kernel(function, unaligned=("positions_ptr",), unsigned=("unit_multiplier", "chunk_multiplier"))
    for function in (rotate_heads_kernel, head_gradients_kernel)
)
SUM = Kernel(row_sum_kernel, unaligned=("order_ptr", "bounds_ptr"))


class Tiles(NamedTuple):
    """The work of a program: so many rows, by so many threads."""

    rows: int
    threads: int


def choose_tiles(half: int, head_dim: int, itemsize: int) -> Tiles:
    """Return tiles in which a thread has 16 bytes of each half of a row."""
    per_row = max(1, triton.next_power_of_2(half) * itemsize // 16)
    threads = 128
    rows = max(1, threads // per_row)
    if 2 * half < head_dim:
        # The other features are copied by whole rows: 32 features a thread fit its registers.
        rows = max(1, min(rows, 32 * threads // triton.next_power_of_2(head_dim)))
    return Tiles(rows, min(threads, max(32, rows * per_row)))


def describe(call: RopeCall, n_units: int | None = None, **tensors: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Return the number of programs, and what both kernels read of a call and of tensors like q."""
    q, k = tensors["q"], tensors["k"]
    assert q is not None
    cos, sin, flags = call.cos, call.sin, call.flags
    half = cos.shape[-1]
    batch, tokens, n_heads, head_dim = as_bthd(q, flags.layout).shape
    rows, threads = choose_tiles(half, head_dim, q.element_size())
    heads = head_args(flags.layout, **tensors)
    tables = table_args(cos, sin, ("batch", "row", "head"))
    positions = position_args(call, q)
    lookup = {name: positions[name] for name in _LOOKUP}
    heads_are_near = are_near(heads, tokens, n_heads)
    token_blocks = math.ceil(tokens / rows)
    n_blocks = math.ceil(tokens * n_heads / rows) if heads_are_near else token_blocks * n_heads
    n_units = batch if n_units is None else n_units
    chunk_blocks = n_blocks
    if n_units > 1 and tables["cos_stride_batch"] == lookup["positions_stride_batch"] == 0:
        chunk_blocks = min(n_blocks, max(1, _CHUNK_BYTES // (2 * rows * half * cos.element_size())))
    n_chunks = math.ceil(n_blocks / max(1, chunk_blocks))
    unit_multiplier, unit_shift = division_by(n_units)
    chunk_multiplier, chunk_shift = division_by(chunk_blocks)
    n_programs = 0 if 0 in (batch, tokens, n_heads, head_dim) else n_chunks * n_units * chunk_blocks
    return n_programs, {
        **heads,
        **tables,
        **lookup,
        **pair_args(call),
        "direction": -1 if flags.inverse else 1,
        "n_units": n_units,
        "unit_multiplier": unit_multiplier,
        "unit_shift": unit_shift,
        "chunk_blocks": chunk_blocks,
        "chunk_multiplier": chunk_multiplier,
        "chunk_shift": chunk_shift,
        "token_blocks": token_blocks,
        "n_tokens": tokens,
        "n_rows": cos.shape[-3],  # tables per token have T, and positions 0 … T − 1
        "H": n_heads,
        "HAS_K": k is not None,
        "D": head_dim,
        "COMPUTE_DTYPE": compute_dtype(q),
        "HEADS_ARE_NEAR": heads_are_near,
        "BLOCK_ROWS": rows,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "threads": threads,
    }


def rotate(rotation: Rotation, on: Steps) -> Sequence[Tensor]:
    """Rotate q and k, and return the results that are not in place."""
    q, k, call = rotation
    outs = rotation.make_results()
    if not are_dense(q, k, *outs, call.cos, call.sin):
        rotate_copies(rotate, rotation, outs, on)
        return outs
    q_out, k_out = (*outs, None)[:2] if outs else (q, k)
    n_programs, arguments = describe(call, q=q, k=k, q_out=q_out, k_out=k_out)
    if n_programs:
        on.launch(ROTATE, n_programs, **arguments, INPLACE=call.flags.inplace)
    return outs


def differentiate(record: HeadGradients, on: Steps) -> Sequence[Tensor | None]:
    """Return the gradients of q and k, if they are needed, of cos and of sin."""
    q_grad, k_grad, q, k, call, needs_dx = record
    dq, dk = (torch.empty_like(x) if needs_dx and x is not None else None for x in (q, k))
    if not are_dense(q_grad, k_grad, q, k, dq, dk, call.cos, call.sin):
        return _differentiate_copies(record, [dq, dk], on)
    rows = table_rows(q, call, _units(q, call, on))
    dcos, dsin = (call.cos.new_empty(rows.shape, dtype=rows.dtype) for _ in range(2))
    n_programs, arguments = describe(
        call,
        rows.n_units,
        q=q,
        k=k,
        q_grad=q_grad,
        k_grad=k_grad,
        dq=dq if needs_dx else q,
        dk=dk if needs_dx else k,
    )
    if n_programs:
        on.launch(
            GRADIENTS,
            n_programs,
            **arguments,
            dcos_ptr=dcos,
            dsin_ptr=dsin,
            n_batches=as_bthd(q, call.flags.layout).shape[0],
            rows_of_unit=rows.batch_rows,
            NEEDS_DX=needs_dx,
        )
    if call.positions is not None:
        return dq, dk, *_sum_rows(dcos, dsin, rows, call, on)
    if rows.n_units == call.cos.shape[0]:
        return dq, dk, dcos, dsin
    sums = [call.cos.new_empty(call.cos.shape) for _ in range(2)]
    for total, grad in zip(sums, (dcos, dsin), strict=True):
        on.operate(_sum_units, total, grad)
    return dq, dk, *sums


def _sum_units(total: Tensor, grads: Tensor) -> None:
    """Sum the gradients of units of batch rows."""
    if total.dtype == grads.dtype:
        torch.sum(grads, 0, keepdim=True, out=total)
    else:
        total.copy_(grads.sum(0, keepdim=True))


def _sum_rows(dcos: Tensor, dsin: Tensor, rows: TableRows, call: RopeCall, on: Steps) -> list[Tensor]:
    """Sum the gradients of tokens, (units, T, H, R/2) each, by their rows of the tables."""
    cos, positions = call.cos, call.positions
    assert positions is not None
    n_units, tokens, n_heads, half = rows.shape
    is_per_token = call.flags.layout == "thd" or positions.ndim == 2
    order = cos.new_empty(positions.numel() * (1 if is_per_token else tokens), dtype=torch.int64)
    bounds = cos.new_empty(cos.shape[0] + 1, dtype=torch.int64)
    sums = [cos.new_empty(cos.shape) for _ in range(2)]
    on.operate(_sort_tokens, order, bounds, positions, tokens, call.flags.layout)
    if not share_rows(cos, positions, call.flags.layout):
        n_units, tokens = 1, n_units * tokens
    grid = cos.shape[0], math.ceil(n_heads * half / SUM_BLOCK_COLUMNS)
    if 0 not in grid:
        dcos_sum, dsin_sum = sums
        on.launch(
            SUM,
            grid,
            dcos_ptr=dcos,
            dsin_ptr=dsin,
            cos_sum_ptr=dcos_sum,
            sin_sum_ptr=dsin_sum,
            order_ptr=order,
            bounds_ptr=bounds,
            n_units=n_units,
            n_tokens=tokens,
            H=n_heads,
            HALF=half,
            BLOCK_TOKENS=SUM_BLOCK_TOKENS,
            BLOCK_COLUMNS=SUM_BLOCK_COLUMNS,
            num_warps=SUM_WARPS,
        )
    return sums


def _sort_tokens(order: Tensor, bounds: Tensor, positions: Tensor, tokens: int, layout: str) -> None:
    """Write the tokens in the order of their rows of the tables, and where those of each row begin."""
    position = token_positions(tokens, positions, layout).flatten()
    found = torch.empty_like(position)
    torch.sort(position, stable=True, out=(found, order))
    rows = torch.arange(bounds.shape[0], dtype=found.dtype, device=found.device)
    torch.searchsorted(found, rows, out=bounds)


def _units(x: Tensor, call: RopeCall, on: Steps) -> int:
    """Return in how many parts to sum batch rows that share rows of the tables: enough to fill the device."""
    batch, tokens, n_heads, _ = as_bthd(x, call.flags.layout).shape
    rows, _ = choose_tiles(call.cos.shape[-1], x.shape[-1], x.element_size())
    n_blocks = max(1, math.ceil(tokens * n_heads / rows))
    n_sms = 1 if gpu.is_interpreted() else gpu.num_sms(on.device_of(x))
    return min(max(1, batch), math.ceil(n_sms * _PROGRAMS_PER_SM / n_blocks))


def _differentiate_copies(
    record: HeadGradients, results: Sequence[Tensor | None], on: Steps
) -> Sequence[Tensor | None]:
    """Compute gradients from dense copies, for tensors that the kernel cannot read."""
    q_grad, k_grad, q, k, call, needs_dx = record
    grads, xs = (contiguous(q_grad, on), contiguous(k_grad, on)), (contiguous(q, on), contiguous(k, on))
    dq, dk, dcos, dsin = differentiate(HeadGradients(*grads, *xs, with_dense_tables(call, on), needs_dx), on)
    for result, dx in zip(results, (dq, dk), strict=True):
        if result is not None:
            on.operate(copy_to, result, dx)
    return *results, dcos, dsin
