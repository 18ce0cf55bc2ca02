"""The output gate: attention's output times the sigmoid of a gate, after a backend that does not gate its own.

A kernel runs it eagerly. Whatever traces, transforms or intercepts a call gets the plain formula: torch.compile makes
one kernel of it, each way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.launch.autograd import Recorder
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.tracing import is_plain_eager, is_transformed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_RECORDER = Recorder("Gate")
MAX_FEATURES = 1024  # of a row, which one program holds


def apply_gate(out: Tensor, gate: Tensor) -> Tensor:
    """Return out · σ(gate), rounded once.

    out: (..., H, Dv) or (..., T, Dv), any strides, as attention returns it. gate: like out, or without the last
    dimension: one number for a row.
    """
    if not _runs_kernel(out, gate):
        return gate_plainly(out, gate)
    if torch.is_grad_enabled() and (out.requires_grad or gate.requires_grad):
        gated: Tensor = _RECORDER.record_any(_Gate, out, gate)
        return gated
    return _multiply(out, gate)


def gate_plainly(out: Tensor, gate: Tensor) -> Tensor:
    """Return out · σ(gate) by PyTorch: the definition."""
    wide, sigma = _widen(out, gate)
    return (wide * sigma).to(out.dtype)


def differentiate_plainly(grad: Tensor, out: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of out and gate by PyTorch, differentiable again."""
    wide, sigma = _widen(out, gate)
    grad_sigma = grad.to(wide.dtype) * wide
    if gate.ndim < out.ndim:
        grad_sigma = grad_sigma.sum(-1, keepdim=True)
    grad_gate = (grad_sigma * sigma * (1 - sigma)).to(gate.dtype)
    return (grad.to(wide.dtype) * sigma).to(out.dtype), grad_gate.reshape(gate.shape)


def _widen(out: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and σ(gate) in float32 or more, with as many dimensions."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    sigma = torch.sigmoid(gate.to(dtype))
    return out.to(dtype), sigma if gate.ndim == out.ndim else sigma.unsqueeze(-1)


def _runs_kernel(out: Tensor, gate: Tensor) -> bool:
    return (
        is_plain_eager(out, gate)
        and not is_transformed()
        and out.dtype in DTYPES
        and out.numel() > 0
        and out.shape[-1] <= MAX_FEATURES
        and gpu.why_no_triton(out.device) is None
    )


@functools.cache
def _operations() -> tuple[Operation[Any], Operation[Any]]:
    """Return the operations of the gate and of its gradients, whose kernels are loaded here."""
    from ropewalk.ops.attention.gate import kernel

    forward = Operation(kernel.GatedOutput, lambda record: kernel.forward)
    return forward, Operation(kernel.GateGradients, lambda record: kernel.backward)


def _multiply(out: Tensor, gate: Tensor) -> Tensor:
    """Return out · σ(gate) by the kernel."""
    forward, _ = _operations()
    (gated,) = forward.run(forward.record.kind(out, gate))
    assert gated is not None
    return gated


class _Gate:
    """The step of a gate with its kernels. It saves the output as it was before: σ may be 0."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(out, gate)
        return _multiply(out, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        out, gate = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed() or not is_plain_eager(grad, out, gate):
            return differentiate_plainly(grad, out, gate)
        _, backward = _operations()
        _, *wanted = ctx.needs_input_grad
        grad_out, grad_gate = backward.run(backward.record.kind(out, gate, grad, *wanted))
        return grad_out, grad_gate
