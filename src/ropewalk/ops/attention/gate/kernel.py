"""The Triton kernels of the output gate, forward and backward, and their launches.

Both read and write each element once. A program has some rows of features; rows are in the order of the output's
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.steps import AT_ONCE, Steps

_ELEMENTS = 4096  # of a program: 16 for each thread
_WARPS = 8


class Rows(NamedTuple):
    """A tensor (outer, middle, inner, features); one number for a row has None for the last stride."""

    ptr: Any
    stride_outer: Any
    stride_middle: Any
    stride_inner: Any
    stride_feature: Any


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _row_index(n_rows, n_inner, BLOCK: tl.constexpr):
    """Return a program's outer index, its rows' middle and inner ones, and which of the rows exist."""
    n_blocks = tl.cdiv(n_rows, BLOCK)
    row = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0) // n_blocks, row // n_inner, row % n_inner, row < n_rows


@triton.jit
def _pointers(rows, outer, middle, inner, feature):
    """Return pointers to rows [BLOCK, features]; [BLOCK, 1] where a row has one number."""
    offsets = wide(outer) * rows.stride_outer + wide(middle) * rows.stride_middle + wide(inner) * rows.stride_inner
    offsets = offsets[:, None]
    if rows.stride_feature is not None:
        offsets = offsets + wide(feature)[None, :] * rows.stride_feature
    return rows.ptr + offsets


@triton.jit(do_not_specialize=("n_rows", "n_inner"))
def gate_forward_kernel(
    out,  # Rows
    gate,
    gated,  # written
    n_rows,  # of an outer index: middle · inner
    n_inner,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply BLOCK rows by the sigmoid of their gate."""
    outer, middle, inner, exists = _row_index(n_rows, n_inner, BLOCK)
    feature = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (feature < D)[None, :]
    gate_mask = exists[:, None] if gate.stride_feature is None else mask
    sigma = _sigmoid(tl.load(_pointers(gate, outer, middle, inner, feature), gate_mask, other=0.0).to(tl.float32))
    x = tl.load(_pointers(out, outer, middle, inner, feature), mask, other=0.0).to(tl.float32)
    tl.store(_pointers(gated, outer, middle, inner, feature), (x * sigma).to(gated.ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=("n_rows", "n_inner"))
def gate_backward_kernel(
    grad,  # Rows
    out,  # or None: grad_gate is not wanted
    gate,
    grad_out,  # written; or None
    grad_gate,  # likewise
    n_rows,
    n_inner,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Differentiate BLOCK rows, in one pass over all that is read."""
    outer, middle, inner, exists = _row_index(n_rows, n_inner, BLOCK)
    feature = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (feature < D)[None, :]
    gate_mask = exists[:, None] if gate.stride_feature is None else mask
    sigma = _sigmoid(tl.load(_pointers(gate, outer, middle, inner, feature), gate_mask, other=0.0).to(tl.float32))
    d = tl.load(_pointers(grad, outer, middle, inner, feature), mask, other=0.0).to(tl.float32)
    if grad_out is not None:
        dx = (d * sigma).to(grad_out.ptr.dtype.element_ty)
        tl.store(_pointers(grad_out, outer, middle, inner, feature), dx, mask)
    if out is not None:  # not grad_gate: Triton 3.6 compares no tuple that holds None
        d *= tl.load(_pointers(out, outer, middle, inner, feature), mask, other=0.0).to(tl.float32)
        if gate.stride_feature is None:
            d = tl.sum(d, 1)[:, None]
        dg = (d * sigma * (1.0 - sigma)).to(grad_gate.ptr.dtype.element_ty)
        tl.store(_pointers(grad_gate, outer, middle, inner, feature), dg, gate_mask)


class GatedOutput(NamedTuple):
    """An output and its gate."""

    out: Tensor
    gate: Tensor


class GateGradients(NamedTuple):
    """The gradient of a gated output, and which gradients are wanted of it."""

    out: Tensor
    gate: Tensor
    grad: Tensor
    wants_out: bool
    wants_gate: bool


def forward(record: GatedOutput, on: Steps = AT_ONCE) -> list[Tensor | None]:
    """Return [out · σ(gate)], with out's strides if it is dense."""
    out, gate = record
    gated = torch.empty_like(out)
    _launch(on, gate_forward_kernel, out, out=out, gate=gate, gated=gated)
    return [gated]


def backward(record: GateGradients, on: Steps = AT_ONCE) -> list[Tensor | None]:
    """Return the gradients of out and gate; None for one that is not wanted."""
    out, gate, grad, wants_out, wants_gate = record
    grad_out = torch.empty_like(out) if wants_out else None
    grad_gate = torch.empty_like(gate) if wants_gate else None
    tensors = {"grad": grad, "out": out if wants_gate else None, "gate": gate}
    _launch(on, gate_backward_kernel, out, **tensors, grad_out=grad_out, grad_gate=grad_gate)
    return [grad_out, grad_gate]


def _launch(on: Steps, kernel: Any, like: Tensor, **tensors: Tensor | None) -> None:
    """Launch a kernel over the rows of tensors like one, in the order of its memory."""
    *sizes, features = like.shape
    strides = like.stride()
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], dim))
    *outer, middle, inner = (sizes[dim] for dim in order)
    n_rows, block_d = middle * inner, triton.next_power_of_2(features)
    block = max(1, _ELEMENTS // block_d)
    with torch.cuda.device_of(like):
        on.launch(
            kernel,
            triton.cdiv(n_rows, block) * (outer[0] if outer else 1),
            **{name: None if x is None else _rows(x, order) for name, x in tensors.items()},
            n_rows=n_rows,
            n_inner=inner,
            D=features,
            BLOCK=block,
            BLOCK_D=block_d,
            num_warps=_WARPS,
        )


def _rows(x: Tensor, order: list[int]) -> Rows:
    """Return a tensor with the dimensions of its rows in an order."""
    strides = x.stride()
    *outer, middle, inner = (strides[dim] for dim in order)
    return Rows(x, outer[0] if outer else 0, middle, inner, strides[-1] if x.ndim > len(order) else None)
