"""A scheme for some of its heads, or for one of its batch rows, where others are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.schemes.base import PositionScheme, Rotation


@dataclass(frozen=True, eq=False)
class _Part(PositionScheme):
    """Another scheme, whose parameters and scores are narrowed."""

    inner: PositionScheme

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """Return the inner scheme's: heads share it."""
        return self.inner.rotation(positions, head_dim)

    def query_rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """Return the inner scheme's."""
        return self.inner.query_rotation(positions, head_dim)

    def has_axes(self) -> bool:
        """Ask the inner scheme."""
        return self.inner.has_axes()

    def far_window(self) -> int | None:
        """Return the inner scheme's."""
        return self.inner.far_window()

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """Return the inner scheme's."""
        return self.inner.far_rotation(positions, head_dim, of)

    def kernel_score_mod(self) -> str | None:
        """Name the inner scheme's."""
        return self.inner.kernel_score_mod()

    def n_learned_params(self) -> int:
        """Count the inner scheme's."""
        return self.inner.n_learned_params()

    def has_score_mod(self) -> bool:
        """Ask the inner scheme."""
        return self.inner.has_score_mod()

    def is_elementwise(self) -> bool:
        """Ask the inner scheme."""
        return self.inner.is_elementwise()


@dataclass(frozen=True, eq=False)
class OfHeads(_Part):
    """A scheme for query heads first_head to below first_head + H, of n_heads in all."""

    first_head: int
    n_heads: int

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor | None:
        """Return the inner scheme's parameters, of these heads."""
        params = self.inner.score_mod_params(self.n_heads, device)
        return None if params is None else params.narrow(-2, self.first_head, n_heads)

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Change scores as the inner scheme does those of all heads."""
        after = self.n_heads - self.first_head - scores.shape[1]
        every = F.pad(scores, (0, 0, 0, 0, self.first_head, after))
        return self.inner.score_mod(every, distance).narrow(1, self.first_head, scores.shape[1])


@dataclass(frozen=True, eq=False)
class OfRow(_Part):
    """A scheme for one batch row, of n_rows in all."""

    row: int
    n_rows: int

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor | None:
        """Return the inner scheme's parameters, of this row."""
        params = self.inner.score_mod_params(n_heads, device)
        return params[self.row] if params is not None and params.ndim == 3 else params

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Change scores as the inner scheme does those of all rows."""
        after = self.n_rows - self.row - scores.shape[0]
        every = F.pad(scores, (0, 0, 0, 0, 0, 0, self.row, after))
        return self.inner.score_mod(every, distance).narrow(0, self.row, scores.shape[0])
