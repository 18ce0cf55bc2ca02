"""One call of the rotation of cached keys.

Shape letters: B rows of the block table, T tokens of a row, H heads, D head dim, R rotary dim, A position axes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PageRotation(NamedTuple):
    """The arguments of a call."""

    pages: Tensor  # (pages, page_size, H, D)
    block_table: Tensor  # (B, n)
    positions: Tensor  # (B or 1, T), or (A, B or 1, T) with axes
    cos: Tensor  # (n_rows, R / 2)
    sin: Tensor
    axes: Tensor | None
    pair_block: int  # 2: interleaved
    rotary_offset: int
    inverse: bool
