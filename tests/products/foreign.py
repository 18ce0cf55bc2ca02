"""Schemes and score mods of a user's own: no backend knows their names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk import Alibi, PositionScheme, Rope
from ropewalk.schemes import Rotation


@dataclass(frozen=True, eq=False)
class OwnInPyTorch(PositionScheme):
    """Have the reference form alone."""

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Let scores fall with the distance."""
        return scores - 0.1 * distance.abs()


@dataclass(frozen=True, eq=False)
class OwnWithFunctions(PositionScheme):
    """Have score functions of one's own."""

    rates: Tensor  # (H,)
    name: str = "LOG_BIAS"  # which says nothing of the gradient of what it reads

    def kernel_score_mod(self) -> str:
        """Name functions that the library does not know."""
        return f"products.foreign_kernels:{self.name}"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        """Return the rates, (H, 1)."""
        return self.rates.to(device, torch.float32)[:, None]

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Let scores fall with the logarithm of the distance."""
        return scores - self.rates[:, None, None].to(scores) * torch.log1p(distance.abs())


@dataclass(frozen=True, eq=False)
class OwnRotation(PositionScheme):
    """Turn pairs by tables which are differentiable."""

    inv_freq: Tensor  # (R/2,)

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Return the tables of Rope."""
        angles = positions[..., None] * self.inv_freq
        return Rotation(angles.cos(), angles.sin(), False, None)


@dataclass(frozen=True, eq=False)
class OwnTwoRanges(OwnRotation):
    """Score far pairs, of a window or more, as at its end."""

    window: int

    def far_window(self) -> int:
        """Return the window."""
        return self.window

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """Put queries a window before or behind position 0, where keys are."""
        if of == "keys":
            return None
        return self.rotation(torch.full_like(positions, self.window if of == "past" else -self.window), head_dim)


@dataclass(frozen=True, eq=False)
class OwnRope(Rope):
    """Turn pairs the other way than the class that it comes from."""

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Return the tables of Rope at negative positions."""
        return super().rotation(-positions, head_dim)


@dataclass(frozen=True, eq=False)
class OwnAlibi(Alibi):
    """Halve the slopes of the class that it comes from."""

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        """Return half of the slopes, (H, 1)."""
        return super().score_mod_params(n_heads, device) / 2

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Subtract half of what Alibi subtracts."""
        return (scores + super().score_mod(scores, distance)) / 2
