"""Arguments that launches of the rotation's families share.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ropewalk.ops.launch.kernel import alignment_of, is_dense, strides_of
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.call import RopeCall, Rotation
from ropewalk.ops.rope.kernel import Positions
from ropewalk.ops.rope.validate import as_bthd

MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


class Tiles(NamedTuple):
    """The work of a program: `block_heads` heads of `block_tokens` tokens, by so many threads."""

    block_tokens: int
    block_heads: int
    threads: int


def head_args(layout: str, **tensors: Tensor | None) -> dict[str, Any]:
    """Return pointers to tensors (B, T, H, D) and their strides; the first stands in for those that are missing."""
    first, *_ = tensors.values()
    pointers = {f"{name}_ptr": first if x is None else x for name, x in tensors.items()}
    strides: dict[str, int] = {}
    for name, x in tensors.items():
        found = (0, 0, 0) if x is None else strides_of(as_bthd(x, layout))
        strides |= zip((f"{name}_stride_batch", f"{name}_stride_token", f"{name}_stride_head"), found, strict=False)
    unit = alignment_of(strides.values())
    return {**pointers, **{name: stride // unit for name, stride in strides.items()}, "STRIDE_UNIT": unit}


def table_args(cos: Tensor, sin: Tensor, axes: Sequence[str] = ("batch", "row")) -> dict[str, Any]:
    """Return pointers to the tables and their strides; one table for all batch rows has a stride of 0 between them."""
    strides: dict[str, int] = {}
    for name, table in (("cos", cos), ("sin", sin)):
        found = (0, *strides_of(table))[-1 - len(axes) : -1]
        strides |= zip([f"{name}_stride_{axis}" for axis in axes], found, strict=True)
    unit = alignment_of(strides.values())
    unit_strides = {name: stride // unit for name, stride in strides.items()}
    return {"cos_ptr": cos, "sin_ptr": sin, **unit_strides, "TABLE_STRIDE_UNIT": unit}


def position_args(call: RopeCall, stand_in: Tensor) -> dict[str, Any]:
    """Return the source of a token's position, and all that it is read from; a tensor stands in where nothing is."""
    cos, _, positions, cu_seqlens, offset, flags, axes = call
    kind, batch, token, axis = Positions.INDEX, 0, 0, None
    if positions is None:
        if cu_seqlens is not None and cos.ndim == 2:
            kind = Positions.PACKED
    elif axes is not None:
        kind = Positions.AXES
        axis, *rest = strides_of(positions)
        batch, token = (0, *rest)[-2:]
    elif positions.ndim == 1 and flags.layout != "thd":
        kind, batch = Positions.OFFSETS, positions.stride(0)
    else:
        kind = Positions.TOKENS
        batch, token = (0, *strides_of(positions))[-2:]
    present = [x for x in (positions, cu_seqlens, stand_in) if x is not None]
    n_sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    return {
        "POSITIONS": int(kind),
        "positions_ptr": present[0],
        "positions_stride_batch": batch,
        "positions_stride_token": token,
        "positions_stride_axis": axis,
        "axes_ptr": axes,
        "N_AXES": 0 if axes is None or positions is None else positions.shape[0],
        "cu_seqlens_ptr": present[0],
        "n_sequences": n_sequences,
        "search_steps": n_sequences.bit_length(),
        "offset": offset,
        "n_rows": cos.shape[-2],  # tables per token have T, and positions 0 … T − 1
    }


def pair_args(call: RopeCall) -> dict[str, Any]:
    """Return the constants that say which features form pairs."""
    half, flags = call.cos.shape[-1], call.flags
    one_block = flags.pair_block is None or flags.pair_block == 2 * half
    return {
        "HALF": half,
        "ROTARY_OFFSET": flags.rotary_offset,
        "INTERLEAVED": flags.interleaved,
        "PAIR_BLOCK": 0 if one_block else flags.pair_block,
    }


def are_near(arguments: dict[str, Any], tokens: int, n_heads: int) -> bool:
    """Say whether a token's heads lie nearer to each other in memory than a head's tokens do."""
    return tokens <= 1 or n_heads <= 1 or arguments["q_stride_head"] <= arguments["q_stride_token"]


def are_dense(*tensors: Tensor | None) -> bool:
    """Say whether kernels can read tensors: whether the last dimension of each is dense in memory."""
    return all(x is None or is_dense(x) for x in tensors)


@torch.no_grad()
def copy_to(out: Tensor, x: Tensor) -> None:
    """Copy x, out of autograd."""
    out.copy_(x)


def dense(x: Tensor, on: Steps) -> Tensor:
    """Return a dense copy."""
    copy = x.new_empty(x.shape)
    on.operate(copy_to, copy, x)
    return copy


def contiguous(x: MaybeTensor, on: Steps) -> MaybeTensor:
    """Return x, or a dense copy if it is not dense."""
    return x if x is None or x.is_contiguous() else dense(x, on)


def with_dense_tables(call: RopeCall, on: Steps) -> RopeCall:
    """Return a call whose tables, bounds and axes kernels can read."""
    cos, sin, _, cu_seqlens, _, _, axes = call
    return call._replace(
        cos=contiguous(cos, on),
        sin=contiguous(sin, on),
        cu_seqlens=contiguous(cu_seqlens, on),
        axes=contiguous(axes, on),
    )


def rotate_copies(rotate: Callable[..., Any], rotation: Rotation, outs: Sequence[Tensor], on: Steps) -> None:
    """Rotate dense copies, for tensors that kernels cannot read."""
    q, k, call = rotation
    call = with_dense_tables(call._replace(flags=call.flags._replace(inplace=True)), on)
    copies = Rotation(dense(q, on), None if k is None else dense(k, on), call)
    rotate(copies, on)
    for out, copy in zip(outs or rotation.xs, copies.xs, strict=True):
        on.operate(copy_to, out, copy)
