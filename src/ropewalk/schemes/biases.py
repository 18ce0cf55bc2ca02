"""Biases added to the scores, by distance: ALiBi and T5's.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ropewalk.schemes.base import PositionScheme, check_learnable, elementwise, is_int


@dataclass(frozen=True, eq=False)
class Alibi(PositionScheme):
    """Attention with linear biases (ALiBi): scores fall with distance, at a slope per head.

    The same in PyTorch, for positions m of queries and n of keys::

        scores = q @ k.mT * scale - slopes[..., None, None] * (m[:, None] - n[None, :]).abs()

    Args:
        slopes: (H,), each head's, or (B, H), differentiable; None for the published ones: 2^(−8h/H) for h = 1 … H, and
            for an H that is not a power of two those of the next smaller one, then every second of the next larger
            one's. Packed sequences are one batch row, and have slopes (H,).

    Raises:
        TypeError: slopes that are not a floating-point tensor.
        ValueError: in a call, slopes of another number than q's heads, or for another number of batch rows.

    Source: ALiBi (https://arxiv.org/abs/2108.12409), §3, and its code for an H that is not a power of two.

    Example:
        >>> from ropewalk.schemes import Alibi, alibi_slopes
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> Alibi()
        Alibi(slopes=None)
    """

    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.slopes is not None:
            check_learnable("slopes", self.slopes, "(H,) or (B, H)")

    def kernel_score_mod(self) -> str:
        """Name the bias by distance."""
        return "ropewalk.ops.attention.triton.score_mods:ALIBI"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        """Return the slopes, (H, 1) or (B, H, 1)."""
        return self._slopes(n_heads, device, torch.float32)[..., None]

    @elementwise
    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Subtract slope times distance."""
        slopes = self._slopes(scores.shape[1], scores.device, scores.dtype)
        return scores - slopes[..., None, None] * distance.abs().to(scores.dtype)

    def _slopes(self, n_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self.slopes is None and n_heads == 0:
            return torch.empty(0, device=device, dtype=dtype)
        if self.slopes is None:  # mps has no float64
            return alibi_slopes(n_heads, None if device.type == "mps" else device).to(device, dtype)
        if self.slopes.ndim not in (1, 2) or self.slopes.shape[-1] != n_heads:
            raise ValueError(
                f"slopes has shape {tuple(self.slopes.shape)}, but must be (H,) or (B, H) with H = {n_heads}"
            )
        return self.slopes.to(device, dtype)


def alibi_slopes(n_heads: int, device: torch.device | None = None) -> Tensor:
    """Return the published slopes of ALiBi for `n_heads` heads, (H,), float32."""
    if n_heads < 1:
        raise ValueError(f"n_heads is {n_heads}, but must be at least 1")

    def geometric(count: int) -> Tensor:
        return 2 ** (torch.arange(1, count + 1, dtype=torch.float64, device=device) * (-8 / count))

    whole = 1 << (n_heads.bit_length() - 1)
    if n_heads == whole:
        return geometric(whole).float()
    return torch.cat((geometric(whole), geometric(2 * whole)[0::2][: n_heads - whole])).float()


@dataclass(frozen=True, eq=False)
class T5Bias(PositionScheme):
    """T5's learned relative position biases: one per head and bucket of distances, added to the scores.

    The same in PyTorch, for positions m of queries and n of keys, N = num_buckets, halved if bidirectional, and E = N/2
    buckets of one distance each::

        ahead = n[None, :] - m[:, None]
        past = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
        far = E + (torch.log(past.float() / E) / math.log(max_distance / E) * (N - E)).long()  # in float32
        bucket = torch.where(past < E, past, far.clamp(max=N - 1))
        if bidirectional:
            bucket = bucket + N * (ahead > 0)
        scores = q @ k.mT * scale + table[bucket].movedim(-1, 0)

    The divisions by two round down. T5 itself does not scale its scores: pass `scale=1.0` for a model of its kind. All
    distances from max_distance on share a bucket.

    Args:
        table: (num_buckets, H), differentiable: the weight of transformers' `relative_attention_bias`.
        bidirectional: keep half of the buckets for keys ahead of the query, as T5's encoder does; its decoder counts
            those as at no distance.
        max_distance: where the last bucket begins at the latest; 128 in the published models.

    Raises:
        TypeError: a table that is not a floating-point tensor.
        ValueError: a table that is not 2-D or has fewer than 2 buckets (4 if bidirectional), a max_distance that is no
            int above the number E of buckets of one distance; in a call, a table for another number than q's heads.

    Source: T5 (https://arxiv.org/abs/1910.10683), §2.1; the buckets are those of transformers'
    `T5Attention._relative_position_bucket`.

    Example:
        >>> import torch
        >>> from ropewalk import T5Bias, attention
        >>> table = torch.nn.Embedding(32, 8).weight
        >>> q = k = v = torch.randn(2, 16, 8, 64)
        >>> attention(q, k, v, position=T5Bias(table), scale=1.0).shape
        torch.Size([2, 16, 8, 64])
    """

    table: Tensor
    _: KW_ONLY
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_learnable("table", self.table, "(num_buckets, H)")
        fewest = 4 if self.bidirectional else 2
        if self.table.ndim != 2 or self.table.shape[0] < fewest:
            raise ValueError(
                f"table has shape {tuple(self.table.shape)}, but must be (num_buckets, H) with {fewest} buckets or more"
            )
        exact = self._one_way()[1]
        if not is_int(self.max_distance) or self.max_distance <= exact:
            raise ValueError(f"max_distance is {self.max_distance!r}, but must be an int above {exact}")

    def _one_way(self) -> tuple[int, int]:
        """Count the buckets of one direction, and those of them that hold one distance each."""
        buckets = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        return buckets, buckets // 2

    def _buckets(self, device: torch.device) -> Tensor:
        """Return the bucket of n − m = −max_distance … max_distance, float32."""
        buckets, exact = self._one_way()
        past = torch.arange(self.max_distance + 1, dtype=torch.float32, device=device)
        # Each step is rounded as transformers rounds it: a bucket may begin at a distance whose logarithm is exact.
        far = torch.log(past / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        bucket = torch.where(past < exact, past, (far.trunc() + exact).clamp(max=buckets - 1))
        ahead = bucket[1:] + buckets if self.bidirectional else bucket[:1].expand(self.max_distance)
        return torch.cat((bucket.flip(0), ahead))

    def _biases(self, n_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the table, (H, num_buckets)."""
        if self.table.shape[1] != n_heads:
            raise ValueError(
                f"table has shape {tuple(self.table.shape)}, but must be (num_buckets, H) with H = {n_heads}"
            )
        return self.table.to(device, dtype).T

    def kernel_score_mod(self) -> str:
        """Name the bias by bucket."""
        return "ropewalk.ops.attention.triton.score_mods:T5_BIAS"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        """Return [max_distance, num_buckets, the head's biases, the bucket of n − m = −max_distance … max_distance]."""
        biases = self._biases(n_heads, device, torch.float32)
        sizes = [biases.new_full((n_heads, 1), size) for size in (self.max_distance, self.table.shape[0])]
        return torch.cat((*sizes, biases, self._buckets(device).expand(n_heads, -1)), dim=1)

    def n_learned_params(self) -> int:
        """Count the two sizes and the biases."""
        return 2 + self.table.shape[0]

    @elementwise
    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Add the bias of the distance's bucket."""
        biases = self._biases(scores.shape[1], scores.device, scores.dtype)
        distance_bias = biases[:, self._buckets(scores.device).long()]  # (H, 2 · max_distance + 1)
        furthest = self.max_distance
        index = (-distance[:, 0]).clamp(-furthest, furthest) + furthest
        return scores + distance_bias[:, index].transpose(0, 1)
