"""Launches of the norm's Triton kernels, for the compile checks and tools/kernel_figures.py."""

from __future__ import annotations

from typing import Any

import torch

from helpers.noted_steps import Noted, NotingSteps
from helpers.rope_launches import DTYPES
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.norm import Needed, NormCall, Normed, NormFlags, NormGradients
from ropewalk.ops.rope.norm.launch import backward, forward

KERNELS = ("norm_kernel", "norm_backward_kernel")


def specialise_norm(
    kernel: str,
    *,
    head_dim: int = 128,
    rotary_dim: int | None = None,
    heads: tuple[int, int] = (32, 8),
    batch: int = 2,
    tokens: int = 4096,
    dtype: str = "bf16",
    weight: str | None = "vector",  # None, or of the shapes "vector" (D,), "heads" (H, D) and "across" (H·D,)
    weight_dtype: str = "bf16",
    layout: str = "bthd",
    alignment: int = 16,
    n_axes: int = 0,
    bias: bool = False,
    norm: dict[str, Any] | None = None,
    **flags: Any,
) -> Noted:
    """The launch of such a call, or of the sum of its weights' gradients: tensors without memory are enough to ask."""
    flags = RopeFlags(layout, **flags)

    def empty(*shape: int, dtype: torch.dtype = DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    # Slices of one projection, with room for v.
    fused = empty(batch, tokens, heads[0] + 2 * heads[1], head_dim)
    xs = list(fused.split([*heads, heads[1]], dim=2)[:2])
    dense = [empty(batch, tokens, n, head_dim) for n in heads]
    if layout == "bhtd":
        xs, dense = ([x.transpose(1, 2) for x in tensors] for tensors in (xs, dense))
    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    cos = empty(tokens, half, dtype=torch.float32) if half else empty(1, 1, 0)
    shape = {"vector": (head_dim,), "heads": (heads[0], head_dim), "across": (heads[0] * head_dim,), None: None}[weight]
    weights = None if shape is None else empty(*shape, dtype=DTYPES[weight_dtype])
    positions = empty(n_axes, batch, tokens, dtype=torch.int32) if n_axes else None
    axes = empty(half, dtype=torch.int32) if n_axes else None
    call = NormCall(RopeCall(cos, cos, positions, None, 0, flags, axes), NormFlags(**(norm or {})))
    # One weight and one bias stand for those of q and of k: a kernel reads the shape of neither.
    biases = empty(heads[0], head_dim) if bias else None
    normed = Normed(*xs, weights, weights, biases, biases, call)
    on = NotingSteps(alignment)
    if kernel == "norm_kernel":
        forward(normed, on)
    else:
        needed = [weight is not None] * 2 + [bias] * 2
        backward(NormGradients(*dense, normed, Needed(True, True, *needed)), on)
    return on.launches[kernel]
