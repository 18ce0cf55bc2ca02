"""Rotary position embedding, and attention without positions.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.arguments import check_pair_block
from ropewalk.ops.tracing import has_values
from ropewalk.schemes.base import PositionScheme, Rotation, is_int


@dataclass(frozen=True)
class NoPosition(PositionScheme):
    """Attention without positions, or with positions that were added before the projections.

    The same in PyTorch::

        scores = q @ k.mT * scale

    Example:
        >>> from ropewalk.schemes import NoPosition
        >>> NoPosition()
        NoPosition()
    """


@dataclass(frozen=True, eq=False)
class Rope(PositionScheme):
    """Rotary position embedding (RoPE) of q and k.

    The same in PyTorch, for positions p (T,)::

        cos, sin = rope_table(p, inv_freq, attention_factor=attention_factor)
        pairs = dict(interleaved=interleaved, pair_block=pair_block, rotary_offset=rotary_offset)
        q, k = apply_rope(q, k, cos[None], sin[None], **pairs)
        scores = q @ k.mT * scale

    Args:
        base: of the frequencies ω_i = base^(−2i/R), where `inv_freq` is None.
        inv_freq: ω of each pair, (R/2,); of any scaling variant, from `inverse_frequencies`. Keep it on the CPU: its
            tables are then computed once, where those of an inv_freq on a GPU are computed in each call.
        rotary_dim: R, the number of rotated features; None for all of the head, or twice the width of inv_freq.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + R/2).
        pair_block: P, pairs half-split inside blocks of P features, as in `apply_rope`; P is even and divides R, and
            `interleaved` must be False. None: one block of R features. With `axes` each block may have its own axis
            (Gemma 4's vision tower).
        attention_factor: multiplies the rotated features of q and of k (YaRN's; 1 for most).
        rotary_offset: the first rotated feature, for heads that rotate their last ones (DeepSeek's the last 64 of 192);
            R is then all features from it on, unless rotary_dim or inv_freq is passed.
        axes: (R/2,), int32 or int64: the position axis of each pair, for tokens with several positions (multimodal
            RoPE; `mrope_axes` makes it). positions_q and positions_k of a call are then (A, B, T) or (A, 1, T),
            (A, total) in "thd"; a token without them has its index on every axis. Give it on the device of the
            positions, or it is copied there in each call.

    Raises:
        TypeError: an inv_freq that is not a tensor, axes that are no tensor of int32 or int64, or a pair_block that is
            no int.
        ValueError: a base that is not above 0, an odd rotary_dim, one that disagrees with inv_freq, an inv_freq of
            another shape or one that requires a gradient, an odd pair_block, one that does not divide R or comes with
            interleaved, an infinite attention_factor, a negative rotary_offset; in a call, more features to rotate than
            the head has; axes of another shape, or in a call of another length than R/2, or naming an axis that
            positions lack (checked on CPU tensors alone; elsewhere such a pair is NaN).

    Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.

    Example:
        >>> import torch
        >>> from ropewalk.schemes import Rope
        >>> rotation = Rope(base=500000.0).rotation(torch.arange(16), head_dim=64)
        >>> rotation.cos.shape
        torch.Size([16, 32])
    """

    base: float = 10000.0
    _: KW_ONLY
    inv_freq: Tensor | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    pair_block: int | None = None
    attention_factor: float = 1.0
    rotary_offset: int = 0
    axes: Tensor | None = None

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
        check_pair_block(self.pair_block, width or self.rotary_dim, self.interleaved)
        if not abs(self.attention_factor) < math.inf:
            raise ValueError(f"attention_factor is {self.attention_factor}, but must be finite")
        if not is_int(self.rotary_offset) or self.rotary_offset < 0:
            raise ValueError(f"rotary_offset is {self.rotary_offset!r}, but must be an int of at least 0")

        if self.axes is not None:
            if not isinstance(self.axes, Tensor) or self.axes.dtype not in (torch.int32, torch.int64):
                kind = f"a tensor of {self.axes.dtype}" if isinstance(self.axes, Tensor) else type(self.axes).__name__
                raise TypeError(f"axes is {kind}, but must be a tensor of int32 or int64, (R/2,)")
            if self.axes.ndim != 1:
                raise ValueError(f"axes has shape {tuple(self.axes.shape)}, but must be (R/2,)")

    def has_axes(self) -> bool:
        """Say whether pairs have axes."""
        return self.axes is not None

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Return the tables of `rope_table` at these positions; with axes, (A, B, T) or a position for all of them."""
        inv_freq, offset = self.inv_freq, self.rotary_offset
        if offset >= head_dim:
            raise ValueError(f"rotary_offset is {offset}, but must be below the head dim, {head_dim}")
        if inv_freq is None:
            inv_freq = default_frequencies(self.rotary_dim or head_dim - offset, self.base, positions.device)
        if offset + 2 * inv_freq.numel() > head_dim:
            after = f" after the first {offset}" if offset else ""
            raise ValueError(
                f"Rope rotates {2 * inv_freq.numel()} features{after}, but they must fit the head dim, {head_dim}"
            )
        check_pair_block(self.pair_block, 2 * inv_freq.numel(), self.interleaved)
        if self.axes is not None and self.axes.shape != inv_freq.shape:
            raise ValueError(
                f"axes has shape {tuple(self.axes.shape)}, but must be (R/2,), ({inv_freq.numel()},), an axis for each "
                f"pair that Rope rotates"
            )
        cos, sin = rope_table(positions, inv_freq, attention_factor=self.attention_factor, device=positions.device)
        if self.axes is not None and positions.ndim == 3:
            cos, sin = (_pick_axes(table, self.axes) for table in (cos, sin))
        return Rotation(cos, sin, self.interleaved, None, offset, pair_block=self.pair_block)


def _pick_axes(table: Tensor, axes: Tensor) -> Tensor:
    """Return (B, T, R/2) of the tables of all axes, (A, B, T, R/2): each pair's column from its own."""
    n_axes = table.shape[0]
    if has_values(axes):
        lowest, highest = int(axes.min()), int(axes.max())
        if lowest < 0 or highest >= n_axes:
            raise ValueError(
                f"axes has values from {lowest} to {highest}, but must have some from 0 to {n_axes - 1}: positions "
                f"have {n_axes} axes"
            )
    axes = axes.to(table.device, torch.int64)
    is_axis = (axes >= 0) & (axes < n_axes)
    picked = table.gather(0, torch.where(is_axis, axes, 0).expand(1, *table.shape[1:]))[0]
    return torch.where(is_axis, picked, torch.nan)


def default_frequencies(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    """Return ω of each pair, (R/2,), in float64."""
    if device.type == "cuda":  # created there: neither a compiled program nor a CUDA graph may copy them from the host
        return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -rotary_dim)
    return inverse_frequencies("default", rotary_dim, base)[0]
