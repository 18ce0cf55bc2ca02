"""What a position scheme is, for attention: how positions enter the scores.

A scheme may do two things, and says here what they are; the implementations in `ropewalk.ops.attention` do them.

1. It maps each token's features before scores are taken: pairs are turned and stretched by tables of cos and sin, and
   features weighted. The map is linear, so the gradient goes back through its transpose.
2. It changes scores: (score, query position, key position) -> score. The reference form is a method here; the form for
   Triton kernels is a pair of jitted functions, named here and imported when a kernel is compiled.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table


class Rotation(NamedTuple):
    """A scheme's map of features: tables in the forms of `apply_rope`, and weights."""

    cos: Tensor  # (..., T, R/2), float32, stretched by the token's amplitude
    sin: Tensor
    interleaved: bool
    weights: Tensor | None  # (D,), float32: of a feature of q times the same feature of k


@dataclass(frozen=True, eq=False)
class PositionScheme:
    """The base of all schemes, and what a scheme of one's own inherits from (CONTRIBUTING.md has the recipe).

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from ropewalk import PositionScheme, attention
        >>> @dataclass(frozen=True, eq=False)
        ... class Recency(PositionScheme):
        ...     def change_scores(self, scores, distance):
        ...         return scores - 0.1 * distance.abs()
        >>> q = k = v = torch.randn(1, 16, 2, 32)
        >>> attention(q, k, v, position=Recency()).shape
        torch.Size([1, 16, 2, 32])
    """

    def score_functions(self) -> str | None:
        """“package.module:name” of a `ropewalk.ops.attention.triton_scores.ScoreFunctions`; None: scores stay."""
        return None

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """The map of features for tokens at `positions` (..., T), int64; None where features are left alone."""
        return None

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor | None:
        """The numbers that the score functions read, (H, anything), float32; None if they read none."""
        return None

    def changes_scores(self) -> bool:
        """Whether scores change at all: they do where a scheme has its own `change_scores`."""
        return type(self).change_scores is not PositionScheme.change_scores

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """The reference form of the score functions.

        scores: (B, H, Tq, Tk), scaled, before the softmax. distance: query's position minus key's, (B or 1, 1, Tq, Tk),
        int64.
        """
        return scores


@dataclass(frozen=True)
class NoPosition(PositionScheme):
    """Attention that knows no positions, or whose positions were added before the projections.

    The same in PyTorch::

        scores = q @ k.mT * scale

    Example:
        >>> from ropewalk.positions import NoPosition
        >>> NoPosition()
        NoPosition()
    """


@dataclass(frozen=True, eq=False)
class Rope(PositionScheme):
    """Rotary position embedding of q and k.

    The same in PyTorch, for positions p (T,)::

        cos, sin = rope_table(p, inv_freq, attention_factor=attention_factor)
        q, k = apply_rope(q, k, cos[None], sin[None], interleaved=interleaved)
        scores = q @ k.mT * scale

    Args:
        base: of the frequencies ω_i = base^(−2i/R), where `inv_freq` is not given.
        inv_freq: ω of each pair, (R/2,); of any scaling variant, from `inverse_frequencies`.
        rotary_dim: R, the first R features turn; None for all of the head, or twice the width of inv_freq.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + R/2).
        attention_factor: multiplies the rotated features of q and of k (YaRN's; 1 for most).

    Raises:
        TypeError: an inv_freq that is no tensor.
        ValueError: a base that is not above 0, an odd rotary_dim, one that disagrees with inv_freq, an inv_freq of
            another shape, an infinite attention_factor; in a call, more features to turn than the head has.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.

    Example:
        >>> import torch
        >>> from ropewalk.positions import Rope
        >>> rotation = Rope(base=500000.0).rotation(torch.arange(16), head_dim=64)
        >>> rotation.cos.shape
        torch.Size([16, 32])
    """

    base: float = 10000.0
    _: KW_ONLY
    inv_freq: Tensor | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.base < math.inf:
            raise ValueError(f"base is {self.base}, but must be finite and above 0")
        if self.inv_freq is not None and not isinstance(self.inv_freq, Tensor):
            raise TypeError(f"inv_freq is {type(self.inv_freq).__name__}, but must be a tensor, (R/2,)")
        width = None if self.inv_freq is None else 2 * self.inv_freq.numel()
        if self.inv_freq is not None and (self.inv_freq.ndim != 1 or width == 0):
            raise ValueError(f"inv_freq has shape {tuple(self.inv_freq.shape)}, but must be (R/2,)")
        if self.rotary_dim is not None and (
            not isinstance(self.rotary_dim, int) or self.rotary_dim < 2 or self.rotary_dim % 2
        ):
            raise ValueError(f"rotary_dim is {self.rotary_dim}, but must be an even int of at least 2")
        if width is not None and self.rotary_dim not in (None, width):
            raise ValueError(f"rotary_dim is {self.rotary_dim}, but inv_freq has {width // 2} values, for {width}")
        if not abs(self.attention_factor) < math.inf:
            raise ValueError(f"attention_factor is {self.attention_factor}, but must be finite")

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """The tables of `rope_table` at these positions."""
        inv_freq = self.inv_freq
        if inv_freq is None:
            inv_freq = _default_frequencies(self.rotary_dim or head_dim, self.base, positions.device)
        if 2 * inv_freq.numel() > head_dim:
            raise ValueError(f"Rope turns {2 * inv_freq.numel()} features, but the head dim is {head_dim}")
        cos, sin = rope_table(positions, inv_freq, attention_factor=self.attention_factor, device=positions.device)
        return Rotation(cos, sin, self.interleaved, None)


def _default_frequencies(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    """ω of each pair, (R/2,), in float64."""
    if device.type == "cuda":  # made there: neither a compiled program nor a CUDA graph may copy them from the host
        return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -rotary_dim)
    return inverse_frequencies("default", rotary_dim, base)[0]


@dataclass(frozen=True, eq=False)
class Alibi(PositionScheme):
    """Attention with linear biases: a head's scores fall with the distance, each head's at its own slope.

    The same in PyTorch, for positions m of queries and n of keys::

        scores = q @ k.mT * scale - slopes[:, None, None] * (m[:, None] - n[None, :]).abs()

    Args:
        slopes: (H,), each head's; None for the published ones: 2^(−8h/H) for h = 1 … H, and for an H that is no
            power of two those of the next smaller power of two, then every second of the next larger one's.

    Raises:
        ValueError: in a call, slopes of another number than q's heads.

    Source: ALiBi (https://arxiv.org/abs/2108.12409), §3, and its code for an H that is no power of two.

    Example:
        >>> from ropewalk.positions import Alibi, alibi_slopes
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> Alibi()
        Alibi(slopes=None)
    """

    slopes: Tensor | None = None

    def score_functions(self) -> str:
        """A bias."""
        return "ropewalk.ops.attention.triton_scores:ALIBI"

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor:
        """The slopes, (H, 1)."""
        slopes = self.slopes
        if slopes is None:
            slopes = alibi_slopes(n_heads, None if device.type == "mps" else device)  # mps has no float64
        if slopes.shape != (n_heads,):
            raise ValueError(f"slopes has shape {tuple(slopes.shape)}, but must be (H,) with H = {n_heads}")
        return slopes.to(device, torch.float32)[:, None]

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Subtract slope times distance."""
        slopes = self.score_parameters(scores.shape[1], scores.device).to(scores.dtype)
        return scores - slopes[..., None] * distance.abs().to(scores.dtype)


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Tensor:
    """The published slopes of ALiBi for `n_heads` heads, (H,), float32."""
    if n_heads < 1:
        raise ValueError(f"n_heads is {n_heads}, but must be at least 1")

    def geometric(count: int) -> Tensor:
        return 2 ** (torch.arange(1, count + 1, dtype=torch.float64, device=device) * (-8 / count))

    whole = 1 << (n_heads.bit_length() - 1)
    if n_heads == whole:
        return geometric(whole).float()
    return torch.cat((geometric(whole), geometric(2 * whole)[0::2][: n_heads - whole])).float()


@dataclass(frozen=True, eq=False)
class ExpoSB(PositionScheme):
    """“Exponential stick breaking”: rotated q and k, stretched by position and weighted by feature.

    The same in PyTorch, for positions p (T,) and interleaved pairs::

        a = 1 + 0.2 * torch.exp(-0.001 * p)  # (T,)
        d = torch.arange(D)
        g = 0.8 + 0.4 * torch.exp(-((d - D // 4) ** 2) / (2 * (D // 8) ** 2))  # (D,)
        q, k = (g * a[:, None] * rotate(x, p) for x in (q, k))  # rotate: Rope(interleaved=True)
        scores = q @ k.mT * scale
        if distance_decay:
            scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * (m[:, None] - n[None, :]).abs()))

    It is no rotation (norms change) and not relative. No stick is broken: the name is a label.

    Args:
        distance_decay: whether scores fall with the distance of their positions.

    Raises:
        ValueError: in a call, an odd head dim, or one below 8.

    Source: Ropewalk's document 002.

    Example:
        >>> from ropewalk.positions import ExpoSB
        >>> ExpoSB(distance_decay=True)
        ExpoSB(distance_decay=True)
    """

    _: KW_ONLY
    distance_decay: bool = False

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """The tables of interleaved RoPE, stretched by the amplitude, and the squares of the features' weights."""
        if head_dim < 8 or head_dim % 2:
            raise ValueError(f"the head dim is {head_dim}, but ExpoSB needs an even one of at least 8")
        inv_freq = _default_frequencies(head_dim, 10000.0, positions.device)
        cos, sin = rope_table(positions, inv_freq, device=positions.device)
        amplitude = (1 + 0.2 * torch.exp(-0.001 * positions.double()))[..., None].float()
        feature = torch.arange(head_dim, device=positions.device, dtype=torch.float64)
        bump = torch.exp(-((feature - head_dim // 4) ** 2) / (2 * (head_dim // 8) ** 2))
        return Rotation(cos * amplitude, sin * amplitude, True, (0.8 + 0.4 * bump).square().float())

    def score_functions(self) -> str | None:
        """The decay, if it is on."""
        return "ropewalk.ops.attention.triton_scores:EXPOSB_DECAY" if self.distance_decay else None

    def changes_scores(self) -> bool:
        """Only with the decay."""
        return self.distance_decay

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Multiply by the decay, if it is on."""
        if not self.distance_decay:
            return scores
        return scores * (0.7 + 0.3 * torch.exp(-0.005 * distance.abs().to(scores.dtype)))
