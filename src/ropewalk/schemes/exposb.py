"""ExpoSB: rotated, scaled and weighted features, and scores that fall with distance.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ropewalk.frequencies import rope_table
from ropewalk.schemes.base import PositionScheme, Rotation, check_learnable, elementwise, per_head
from ropewalk.schemes.rope import default_frequencies


@dataclass(frozen=True, eq=False)
class ExpoSB(PositionScheme):
    """“Exponential stick breaking”: rotated q and k, scaled by position and weighted by feature.

    The same in PyTorch, for positions p (T,) and interleaved pairs::

        a = 1 + 0.2 * torch.exp(-0.001 * p)  # (T,)
        d = torch.arange(D)
        g = 0.8 + 0.4 * torch.exp(-((d - D // 4) ** 2) / (2 * (D // 8) ** 2))  # (D,)
        q, k = (g * a[:, None] * rotate(x, p) for x in (q, k))  # rotate: Rope(interleaved=True)
        scores = q @ k.mT * scale
        if distance_decay:
            scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * (m[:, None] - n[None, :]).abs()))
        if band_weights is not None:
            scores = scores * band_weights[:, None, None] ** 2  # q and k of a head, each times the head's weight

    The map is not a rotation (norms change), and the scores are not relative. The name is a label: no stick-breaking
    process is involved.

    Args:
        distance_decay: whether scores fall with the distance of their positions.
        band_weights: (H,), differentiable: a weight for each query head, of its q and of its k; None for 1. A `softcap`
            comes before it, as before every change of scores.

    Raises:
        TypeError: band_weights that are not a floating-point tensor.
        ValueError: in a call, an odd head dim, or one below 8; band_weights of another number than q's heads.

    Source: unpublished; the code above defines it.

    Example:
        >>> from ropewalk.schemes import ExpoSB
        >>> ExpoSB(distance_decay=True)
        ExpoSB(distance_decay=True, band_weights=None)
    """

    _: KW_ONLY
    distance_decay: bool = False
    band_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.band_weights is not None:
            check_learnable("band_weights", self.band_weights, "(H,)")

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Return the tables of interleaved RoPE times the amplitude, and the squares of the features' weights."""
        if head_dim < 8 or head_dim % 2:
            raise ValueError(f"the head dim is {head_dim}, but must be even and at least 8 for ExpoSB")
        inv_freq = default_frequencies(head_dim, 10000.0, positions.device)
        cos, sin = rope_table(positions, inv_freq, device=positions.device)
        amplitude = (1 + 0.2 * torch.exp(-0.001 * positions.double()))[..., None].float()
        feature = torch.arange(head_dim, device=positions.device, dtype=torch.float64)
        bump = torch.exp(-((feature - head_dim // 4) ** 2) / (2 * (head_dim // 8) ** 2))
        return Rotation(cos * amplitude, sin * amplitude, True, (0.8 + 0.4 * bump).square().float())

    def kernel_score_mod(self) -> str | None:
        """Name the decay, the heads' weights, or both."""
        names = {(True, False): "EXPOSB_DECAY", (False, True): "EXPOSB_BANDS", (True, True): "EXPOSB_BANDS_DECAY"}
        name = names.get((self.distance_decay, self.band_weights is not None))
        return name and f"ropewalk.ops.attention.triton.score_mods:{name}"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor | None:
        """Return the squares of the heads' weights, (H, 1)."""
        if self.band_weights is None:
            return None
        return per_head("band_weights", self.band_weights, n_heads).to(device, torch.float32).square()[:, None]

    def has_score_mod(self) -> bool:
        """Say whether there is a decay or are weights."""
        return self.distance_decay or self.band_weights is not None

    @elementwise
    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Multiply by the decay, and by the squares of the heads' weights."""
        if self.distance_decay:
            scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * distance.abs().to(scores.dtype)))
        if self.band_weights is None:
            return scores
        weights = per_head("band_weights", self.band_weights, scores.shape[1]).to(scores.device, scores.dtype)
        return scores * weights.square()[:, None, None]
