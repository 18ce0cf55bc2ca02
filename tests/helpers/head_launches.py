"""Launches of the kernels for tables per head, for the compile checks and tools/kernel_figures.py."""

from __future__ import annotations

from typing import Any

import torch

from helpers.noted_steps import Noted, NotingSteps
from helpers.rope_launches import DTYPES
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotation
from ropewalk.ops.rope.heads.launch import differentiate, rotate
from ropewalk.ops.rope.heads.reference import HeadGradients

HEAD_KERNELS = ("rotate_heads_kernel", "head_gradients_kernel")


def specialise_heads(
    kernel: str,
    *,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    heads: int = 12,
    batch: int = 8,
    tokens: int = 4096,
    dtype: str = "bf16",
    table_dtype: str = "fp32",
    kind: str = "one-row",  # of positions; or "tokens", "offsets", and "per-token" without them
    has_k: bool = True,
    needs_dx: bool = True,
    layout: str = "bthd",
    alignment: int = 16,
    **flags: Any,
) -> Noted:
    """The launch of such a call, or of the sum of its tables' gradients: tensors without memory are enough to ask."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    shape = (batch, heads, tokens) if layout == "bhtd" else (batch, tokens, heads)
    xs = [empty(*shape, head_dim, dtype=DTYPES[dtype]) for _ in range(1 + has_k)]
    rows = (batch, tokens) if kind == "per-token" else (tokens,)
    cos = empty(*rows, heads, (rotary_dim or head_dim) // 2, dtype=DTYPES[table_dtype])
    positions = {"one-row": (1, tokens), "tokens": (batch, tokens), "offsets": (batch,)}.get(kind)
    index = None if positions is None else empty(*positions, dtype=torch.int64)
    call = RopeCall(cos, cos, index, None, 0, RopeFlags(layout, **flags))
    on = NotingSteps(alignment)
    q, k = (*xs, None)[:2]
    if kernel == "rotate_heads_kernel":
        rotate(Rotation(q, k, call), on)
    else:
        differentiate(HeadGradients(q, k, q, k, call, needs_dx), on)
    return on.launches[kernel]
