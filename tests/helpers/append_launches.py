"""Calls of `append_kv` without memory, and their launches, for the compile checks."""

from __future__ import annotations

from typing import Any

import torch

from helpers.noted_steps import Noted, NotingSteps
from helpers.targets import TARGETS
from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.triton.append_launch import append

FORMATS = {"own": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def scales_of(cache: torch.Tensor) -> torch.Tensor | None:
    """Return empty scales of a cache (pages, page_size, K, D), on its device."""
    if cache.dtype == torch.float8_e4m3fn:
        return torch.empty((), device=cache.device)
    if cache.dtype == torch.int8:
        return torch.empty(cache.shape[:3], device=cache.device)
    if cache.dtype == torch.uint8:
        return torch.empty((*cache.shape[:3], cache.shape[3] // 16), dtype=torch.float16, device=cache.device)
    return None


def append_call(
    cache: str,
    *,
    tokens: int = 64,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    value_dim: int | None = None,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    weight: str | None = "shared",
    n_axes: int = 0,
    transposed: bool = False,
    flags: dict[str, Any] | None = None,
) -> AppendCall:
    """Make a call whose tensors have no memory."""
    with torch.device("meta"):
        n_q, n_k = heads
        value_dim = value_dim or head_dim
        k, v = (torch.empty(tokens, n_k, d, dtype=dtype) for d in (head_dim, value_dim))
        stored = FORMATS[cache] or dtype
        halves = 2 if cache == "int4" else 1
        shape = (1000, n_k, page_size) if transposed else (1000, page_size, n_k)
        caches = [torch.empty(*shape, d // halves, dtype=stored) for d in (head_dim, value_dim)]
        if transposed:
            caches = [x.transpose(1, 2) for x in caches]
        table = torch.empty(4096, (rotary_dim or head_dim) // 2)
        positions = torch.empty((n_axes, tokens) if n_axes else (tokens,), dtype=torch.int64)
        axes = torch.empty(table.shape[1], dtype=torch.int64) if n_axes else None
        shapes = {None: None, "shared": (head_dim,), "heads": (n_k, head_dim), "across": (n_k * head_dim,)}
        of_k = shapes[weight]
        k_weight = None if of_k is None else torch.empty(of_k, dtype=dtype)
        q_weight = None
        if of_k is not None:
            q_weight = torch.empty({"shared": (head_dim,), "heads": (n_q, head_dim)}.get(weight, (n_q * head_dim,)))
        q = torch.empty(tokens, n_q, head_dim, dtype=dtype)
        return AppendCall(
            *(k, v, *caches, torch.empty(tokens, dtype=torch.int64), table, table, q, positions, axes),
            *(q_weight, k_weight, *map(scales_of, caches)),
            has_norm=weight is not None,
            across_heads=weight == "across",
            **(flags or {}),
        )


def specialise(cache: str, **keywords: Any) -> Noted:
    """Return the launch of a call."""
    on: Any = NotingSteps()
    append(append_call(cache, **keywords), on)
    noted: Noted = on.launches["append_kernel"]
    return noted


def compile_for(target: str, noted: Noted) -> Any:
    """Compile a launch for a target, of those with an instruction that rounds to float8 by it."""
    return noted.compile(TARGETS[target], NATIVE=target in ("sm_90", "sm_100"))
