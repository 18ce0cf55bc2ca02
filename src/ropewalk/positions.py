"""The position schemes with one encoding for all pairs of tokens: RoPE, ALiBi, T5's biases, ExpoSB, and none.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.position_scheme import PositionScheme as PositionScheme
from ropewalk.position_scheme import Rotation as Rotation


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
        q, k = apply_rope(q, k, cos[None], sin[None], interleaved=interleaved, rotary_offset=rotary_offset)
        scores = q @ k.mT * scale

    Args:
        base: of the frequencies ω_i = base^(−2i/R), where `inv_freq` is not given.
        inv_freq: ω of each pair, (R/2,); of any scaling variant, from `inverse_frequencies`.
        rotary_dim: R, so many features turn; None for all of the head, or twice the width of inv_freq.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + R/2).
        attention_factor: multiplies the rotated features of q and of k (YaRN's; 1 for most).
        rotary_offset: the first feature that turns, for a head whose last features do (DeepSeek's turns the last 64 of
            192); R is then all that follow, where neither rotary_dim nor inv_freq says it.

    Raises:
        TypeError: an inv_freq that is no tensor.
        ValueError: a base that is not above 0, an odd rotary_dim, one that disagrees with inv_freq, an inv_freq of
            another shape or one that requires a gradient, an infinite attention_factor, a negative rotary_offset; in a
            call, more features to turn than the head has.

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
    rotary_offset: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.base < math.inf:
            raise ValueError(f"base is {self.base}, but must be finite and above 0")
        if self.inv_freq is not None and not isinstance(self.inv_freq, Tensor):
            raise TypeError(f"inv_freq is {type(self.inv_freq).__name__}, but must be a tensor, (R/2,)")
        if self.inv_freq is not None and self.inv_freq.requires_grad:
            raise ValueError("inv_freq requires a gradient, but frequencies are constants: pass inv_freq.detach()")
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
        if not _is_int(self.rotary_offset) or self.rotary_offset < 0:
            raise ValueError(f"rotary_offset is {self.rotary_offset!r}, but must be an int of at least 0")

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """The tables of `rope_table` at these positions."""
        inv_freq, offset = self.inv_freq, self.rotary_offset
        if offset >= head_dim:
            raise ValueError(f"Rope turns features from {offset} on, but the head dim is {head_dim}")
        if inv_freq is None:
            inv_freq = _default_frequencies(self.rotary_dim or head_dim - offset, self.base, positions.device)
        if offset + 2 * inv_freq.numel() > head_dim:
            after = f" after the first {offset}" if offset else ""
            raise ValueError(f"Rope turns {2 * inv_freq.numel()} features{after}, but the head dim is {head_dim}")
        cos, sin = rope_table(positions, inv_freq, attention_factor=self.attention_factor, device=positions.device)
        return Rotation(cos, sin, self.interleaved, None, offset)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        slopes: (H,), each head's, differentiable; None for the published ones: 2^(−8h/H) for h = 1 … H, and for an H
            that is no power of two those of the next smaller power of two, then every second of the next larger one's.

    Raises:
        TypeError: slopes that are no floating-point tensor.
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

    def __post_init__(self) -> None:
        if self.slopes is not None:
            _check_learnable("slopes", self.slopes, "(H,)")

    def score_functions(self) -> str:
        """A bias."""
        return "ropewalk.ops.attention.triton_scores:ALIBI"

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor:
        """The slopes, (H, 1)."""
        return self._slopes(n_heads, device, torch.float32)[:, None]

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Subtract slope times distance."""
        slopes = self._slopes(scores.shape[1], scores.device, scores.dtype)
        return scores - slopes[:, None, None] * distance.abs().to(scores.dtype)

    def _slopes(self, n_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self.slopes is None:  # mps has no float64
            return alibi_slopes(n_heads, None if device.type == "mps" else device).to(device, dtype)
        return _of_heads("slopes", self.slopes, n_heads).to(device, dtype)


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


def _check_learnable(name: str, x: object, shape: str) -> None:
    """Raise unless x is a floating-point tensor: a gradient may flow to it."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}, but must be a floating-point tensor, {shape}")


def _of_heads(name: str, x: Tensor, n_heads: int) -> Tensor:
    if x.shape != (n_heads,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (H,) with H = {n_heads}")
    return x


@dataclass(frozen=True, eq=False)
class T5Bias(PositionScheme):
    """T5's learned biases: one for each head and bucket of distances, added to the scores.

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
        TypeError: a table that is no floating-point tensor.
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
        _check_learnable("table", self.table, "(num_buckets, H)")
        fewest = 4 if self.bidirectional else 2
        if self.table.ndim != 2 or self.table.shape[0] < fewest:
            raise ValueError(
                f"table has shape {tuple(self.table.shape)}, but must be (num_buckets, H) with {fewest} buckets or more"
            )
        exact = self._one_way()[1]
        if not _is_int(self.max_distance) or self.max_distance <= exact:
            raise ValueError(f"max_distance is {self.max_distance!r}, but must be an int above {exact}")

    def _one_way(self) -> tuple[int, int]:
        """How many buckets one direction has, and how many of them hold one distance each."""
        buckets = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        return buckets, buckets // 2

    def _buckets(self, device: torch.device) -> Tensor:
        """The bucket of n − m = −max_distance … max_distance, float32."""
        buckets, exact = self._one_way()
        past = torch.arange(self.max_distance + 1, dtype=torch.float32, device=device)
        # Each step is rounded as transformers rounds it: a bucket may begin at a distance whose logarithm is exact.
        far = torch.log(past / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        bucket = torch.where(past < exact, past, (far.trunc() + exact).clamp(max=buckets - 1))
        ahead = bucket[1:] + buckets if self.bidirectional else bucket[:1].expand(self.max_distance)
        return torch.cat((bucket.flip(0), ahead))

    def _biases(self, n_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The table, (H, num_buckets)."""
        if self.table.shape[1] != n_heads:
            raise ValueError(
                f"table has shape {tuple(self.table.shape)}, but must be (num_buckets, H) with H = {n_heads}"
            )
        return self.table.to(device, dtype).T

    def score_functions(self) -> str:
        """A bias that is looked up."""
        return "ropewalk.ops.attention.triton_scores:T5_BIAS"

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor:
        """[max_distance, num_buckets, the head's biases, the bucket of n − m = −max_distance … max_distance]."""
        biases = self._biases(n_heads, device, torch.float32)
        sizes = [biases.new_full((n_heads, 1), size) for size in (self.max_distance, self.table.shape[0])]
        return torch.cat((*sizes, biases, self._buckets(device).expand(n_heads, -1)), dim=1)

    def learned_columns(self) -> int:
        """The biases, and the two before them."""
        return 2 + self.table.shape[0]

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Add the bias of the distance's bucket."""
        biases = self._biases(scores.shape[1], scores.device, scores.dtype)
        of_distance = biases[:, self._buckets(scores.device).long()]  # (H, 2 · max_distance + 1)
        furthest = self.max_distance
        index = (-distance[:, 0]).clamp(-furthest, furthest) + furthest
        return scores + of_distance[:, index].transpose(0, 1)


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
        if band_weights is not None:
            scores = scores * band_weights[:, None, None] ** 2  # q and k of a head, each times the head's weight

    It is no rotation (norms change) and not relative. No stick is broken: the name is a label.

    Args:
        distance_decay: whether scores fall with the distance of their positions.
        band_weights: (H,), differentiable: a weight for each query head, of its q and of the k that it meets; None for
            1. A `softcap` comes before it, as before all that changes scores.

    Raises:
        TypeError: band_weights that are no floating-point tensor.
        ValueError: in a call, an odd head dim, or one below 8; band_weights of another number than q's heads.

    Source: Ropewalk's document 002.

    Example:
        >>> from ropewalk.positions import ExpoSB
        >>> ExpoSB(distance_decay=True)
        ExpoSB(distance_decay=True, band_weights=None)
    """

    _: KW_ONLY
    distance_decay: bool = False
    band_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.band_weights is not None:
            _check_learnable("band_weights", self.band_weights, "(H,)")

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
        """The decay and the heads' weights, if there are any."""
        names = {(True, False): "EXPOSB_DECAY", (False, True): "EXPOSB_BANDS", (True, True): "EXPOSB_BANDS_DECAY"}
        name = names.get((self.distance_decay, self.band_weights is not None))
        return name and f"ropewalk.ops.attention.triton_scores:{name}"

    def score_parameters(self, n_heads: int, device: torch.device) -> Tensor | None:
        """The squares of the heads' weights, (H, 1)."""
        if self.band_weights is None:
            return None
        return _of_heads("band_weights", self.band_weights, n_heads).to(device, torch.float32).square()[:, None]

    def changes_scores(self) -> bool:
        """Only with the decay, or weights."""
        return self.distance_decay or self.band_weights is not None

    def change_scores(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Multiply by the decay, and by the squares of the heads' weights."""
        if self.distance_decay:
            scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * distance.abs().to(scores.dtype)))
        if self.band_weights is None:
            return scores
        weights = _of_heads("band_weights", self.band_weights, scores.shape[1]).to(scores.device, scores.dtype)
        return scores * weights.square()[:, None, None]
