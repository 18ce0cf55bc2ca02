"""Specialisations of the kernels for tables per head, for the compile checks and tools/kernel_figures.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from helpers.rope_launches import DTYPES
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.head_tables import table_rows
from ropewalk.ops.rope.triton.head_kernel import HeadSpecialisation, head_gradients_kernel, rotate_heads_kernel
from ropewalk.ops.rope.triton.head_launch import describe

HEAD_KERNELS = {kernel.__name__: kernel for kernel in (rotate_heads_kernel, head_gradients_kernel)}


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
) -> HeadSpecialisation:
    """What the launch of such a call would compile: tensors without memory are enough to ask."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    shape = (batch, heads, tokens) if layout == "bhtd" else (batch, tokens, heads)
    xs = [empty(*shape, head_dim, dtype=DTYPES[dtype]) for _ in range(1 + has_k)]
    rows = (batch, tokens) if kind == "per-token" else (tokens,)
    cos = empty(*rows, heads, (rotary_dim or head_dim) // 2, dtype=DTYPES[table_dtype])
    positions = {"one-row": (1, tokens), "tokens": (batch, tokens), "offsets": (batch,)}.get(kind)
    index = None if positions is None else empty(*positions, dtype=torch.int64)
    call = RopeCall(cos, cos, index, None, 0, RopeFlags(layout, **flags))
    if kernel == "rotate_heads_kernel":
        launch = describe((xs, xs), call)
    else:
        launch = describe((xs, xs, xs), call, rows=table_rows(xs[0], call, 2), needs_dx=needs_dx)
    return replace(launch.spec, pointer_alignment=alignment)
