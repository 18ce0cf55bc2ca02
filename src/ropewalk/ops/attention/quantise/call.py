"""The operands of 8-bit products, as kernels read them.

Shape letters: B batch, T tokens (Tq of queries), H query heads, K key heads, D head dim (Dv of v), S packed sequences,
N blocks of BLOCK keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

BLOCK = 128  # keys of a block, whose values share a unit
GROUPS = 4  # of keys in a block, each with a unit: key n is in group n % 8 // 2


class QuantizedQueries(NamedTuple):
    """Queries of one map of features."""

    x: Tensor  # (B, H, Tq, D), int8, dense; feature 32h + 8l + t of 64 is at 16l + 8h + t, others are in their order
    unit: Tensor  # (B, H, Tq), float32: x · unit are the features
    shift: Tensor  # (B, H, Tq), float32: the products of unrounded queries and what was taken off keys


class QuantizedKeys(NamedTuple):
    """Keys of one map of features, in whole blocks; zeros where none exists.

    Block n // BLOCK of a dense row holds key n. Packed sequence s begins with block cu_seqlens_k[s] // BLOCK + s.
    """

    x: Tensor  # (B, K, N · BLOCK, D), int8, dense; features as those of queries
    unit: Tensor  # (B, K, N, GROUPS), float32


class QuantizedValues(NamedTuple):
    """Values in e4m3, transposed, in blocks as those of keys."""

    x: Tensor  # (B, K, Dv, N · BLOCK), float8_e4m3fn, dense
    unit: Tensor  # (B, K, N), float32
    mean: Tensor  # (B or S, K, Dv), float32: what was taken off values


class Quantized(NamedTuple):
    """All operands of a call."""

    q: QuantizedQueries
    k: QuantizedKeys
    v: QuantizedValues | None  # None: values stay in 16 bits
    q_past: QuantizedQueries | None = None
    q_future: QuantizedQueries | None = None
    k_far: QuantizedKeys | None = None
