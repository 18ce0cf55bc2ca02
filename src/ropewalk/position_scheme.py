"""What a position scheme is, for attention: how positions enter the scores.

A scheme may do two things, and says here what they are; the implementations in `ropewalk.ops.attention` do them.

1. It maps each token's features before scores are taken: pairs are turned and stretched by tables of cos and sin, and
   features weighted. The map is linear, so the gradient goes back through its transpose. Some schemes map them in
   another way for pairs of tokens that are far from each other: those are in `ropewalk.far_positions`.
2. It changes scores: (score, query position, key position) -> score. The reference form is a method here; the form for
   Triton kernels is a pair of jitted functions, named here and imported when a kernel is compiled.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """A scheme's map of features: tables in the forms of `apply_rope`, and weights."""

    cos: Tensor  # (..., T, R/2), float32, stretched by the token's amplitude
    sin: Tensor
    interleaved: bool
    weights: Tensor | None  # (D,), float32: of a feature of q times the same feature of k
    offset: int = 0  # the first feature that turns


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

    def query_rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """The map of queries' features, where it is another than `rotation`'s, which then is keys' alone."""
        return None

    def far_window(self) -> int | None:
        """From how many positions apart on a pair's score comes from `far_rotation`; None: from `rotation` always."""
        return None

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """The map of features for far pairs: `of` "keys", or of the queries that meet keys of their "past" or "future".

        None where features are left alone. Pairs of features are those of `rotation`.
        """
        return None

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor | None:
        """The numbers that the score functions read, (H, anything), float32; None if they read none.

        What is to be learned stays differentiable, and all of it is made on the device: a number that is copied there
        from the host has no place in a CUDA graph.
        """
        return None

    def learned_columns(self) -> int:
        """How many columns of `score_parameters`, from the first, may be learned; 0: all."""
        return 0

    def changes_scores(self) -> bool:
        """Whether scores change at all: they do where a scheme has its own `change_scores`."""
        return type(self).change_scores is not PositionScheme.change_scores

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """The reference form of the score functions.

        scores: (B, H, Tq, Tk), scaled, before the softmax. distance: query's position minus key's, (B or 1, 1, Tq, Tk),
        int64.
        """
        return scores
