"""The record of a call of `append_kv`.

Shape letters: N tokens, H query heads, K key heads, D head dim, Dv that of values, R rotary dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AppendCall(NamedTuple):
    """The arguments of a call, those of the operator in their order."""

    k: Tensor  # (N, K, D)
    v: Tensor  # (N, K, Dv)
    k_cache: Tensor  # (pages, page_size, K, D); D/2 of 4-bit numbers
    v_cache: Tensor
    slots: Tensor  # (n,)
    cos: Tensor  # (rows, R/2)
    sin: Tensor
    q: Tensor | None  # (N, H, D)
    positions: Tensor | None  # (N,), or (A, N) with axes
    axes: Tensor | None  # (R/2,)
    q_weight: Tensor | None
    k_weight: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    interleaved: bool = False
    rotary_offset: int = 0
    has_norm: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0
    after: bool = False
    across_heads: bool = False
    impl: str | None = None
