"""Two-range encodings: RoPE for near pairs of tokens, and another rotation for far pairs.

A pair of a query at position m and a key at position n is *near* if |m − n| < window, and *far* otherwise. A far key
is in the *past* of its query if m > n, and in its *future* if m < n. Each pair has one score, by one of the two
rotations; nothing is masked. So a model that was trained with RoPE reads longer inputs: no relative position is larger,
or much larger, than a window.

Shape letters: B batch, T tokens, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ropewalk.schemes.base import PositionScheme, Rotation
from ropewalk.schemes.rope import Rope


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, eq=False)
class TwoRangeScheme(PositionScheme):
    """The base of ReRope and SelfExtend: RoPE for near pairs, and queries scaled by the logarithm of their position."""

    window: int
    _: KW_ONLY
    log_n: int | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.window, 1):
            raise ValueError(f"window is {self.window!r}, but must be an int of at least 1")
        if self.log_n is not None and not _is_count(self.log_n, 2):
            raise ValueError(f"log_n is {self.log_n!r}, but must be None or an int of at least 2")
        if not (self.rope is None or isinstance(self.rope, Rope)):
            raise TypeError(f"rope is {self.rope!r}, but must be None or a Rope")
        if self.rope is not None and self.rope.has_axes():
            raise ValueError("rope has axes, but must have none: a distance is of positions on one axis")

    def far_window(self) -> int:
        """Return the window."""
        return self.window

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Return RoPE's map, that of near pairs."""
        return self._rope.rotation(positions, head_dim)

    @property
    def _rope(self) -> Rope:
        return Rope() if self.rope is None else self.rope

    def query_rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """Return RoPE's map times log_n's factor, if there is one."""
        return None if self.log_n is None else self._scale_by_log(self.rotation(positions, head_dim), positions)

    def _scale_by_log(self, table: Rotation, positions: Tensor) -> Rotation:
        """Multiply a map of queries by log_n's factor."""
        if self.log_n is None:
            return table
        factor = (positions.clamp(min=0).double().log1p() / math.log(self.log_n)).clamp(min=1).float()
        return _multiply(table, factor[..., None])._replace(scale=factor)


def _multiply(table: Rotation, factor: Tensor | float) -> Rotation:
    return table._replace(cos=table.cos * factor, sin=table.sin * factor)


@dataclass(frozen=True, eq=False)
class ReRope(TwoRangeScheme):
    """Rectified rotary position embedding (ReRoPE): past a window, relative positions stay constant or grow slowly.

    The same in PyTorch, for positions m of queries and n of keys, and R(p) the rotation of `rope` by p::

        near = (R(m) * q) @ (R(n) * k).mT
        if leak is None:  # relative positions of far pairs are window and −window
            past, future = ((R(p) * q) @ k.mT for p in (window, -window))
        else:  # past the window they grow by 1/leak
            jump = window * (leak - 1)
            past, future = ((R((m + j) / leak) * q) @ (R(n / leak) * k).mT for j in (jump, -jump))
        d = m[:, None] - n[None, :]
        scores = torch.where(d.abs() < window, near, torch.where(d > 0, past, future)) * scale

    The `attention_factor` of `rope` multiplies near and far scores alike: without a leak, where far keys are not
    rotated, far queries carry its square. A window of T or more is RoPE.

    Args:
        window: w; pairs with |m − n| < w are near, all others far.
        leak: c of Leaky ReRoPE, at least 1, so that relative positions are w + (|m − n| − w)/c; None: they are w.
        log_n: the length that the model was trained on; queries are multiplied by max(1, ln(m + 1) / ln(log_n)).
        rope: the rotation; None for `Rope()`.

    Raises:
        TypeError: a rope that is not a Rope.
        ValueError: a window below 1, a leak that is not finite or below 1, a log_n below 2; and what `rope` raises.

    Source: Su Jianlin, “Rectified Rotary Position Embeddings” (https://github.com/bojone/rerope).

    Example:
        >>> import torch
        >>> from ropewalk import ReRope, attention
        >>> q = k = v = torch.randn(1, 1024, 8, 64)
        >>> attention(q, k, v, position=ReRope(window=256), causal=True).shape
        torch.Size([1, 1024, 8, 64])
        >>> leaky = ReRope(256, leak=16, rope=Rope(500000.0))
    """

    _: KW_ONLY
    leak: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        leak = self.leak
        if leak is not None and (
            isinstance(leak, bool) or not isinstance(leak, (int, float)) or not 1 <= leak < math.inf
        ):
            raise ValueError(f"leak is {leak!r}, but must be None or a finite number of at least 1")

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """Rotate far queries by ±window and leave keys alone; with a leak, rotate both by their positions over it."""
        if self.leak is None:
            if of == "keys":
                return None
            at = torch.full_like(positions, self.window if of == "past" else -self.window)
            table = _multiply(self._rope.rotation(at, head_dim), self._rope.attention_factor)
            return self._scale_by_log(table, positions)
        jump = {"keys": 0.0, "past": 1.0, "future": -1.0}[of] * self.window * (self.leak - 1)
        table = self._rope.rotation((positions.double() + jump) / self.leak, head_dim)
        return table if of == "keys" else self._scale_by_log(table, positions)


@dataclass(frozen=True, eq=False)
class SelfExtend(TwoRangeScheme):
    """Self-Extend: RoPE for near pairs, and for far pairs RoPE by the positions of groups of tokens.

    The same in PyTorch, for positions m of queries and n of keys, R(p) the rotation of `rope` by p, and g = group::

        near = (R(m) * q) @ (R(n) * k).mT
        jump = window - window // group
        past, future = ((R(m // group + j) * q) @ (R(n // group) * k).mT for j in (jump, -jump))
        d = m[:, None] - n[None, :]
        scores = torch.where(d.abs() < window, near, torch.where(d > 0, past, future)) * scale

    Divisions round down. A window of T or more, or a group of 1, is RoPE.

    Args:
        window: w; pairs with |m − n| < w are near, all others far.
        group: the number of consecutive tokens that share a position in far pairs.
        log_n: the length that the model was trained on; queries are multiplied by max(1, ln(m + 1) / ln(log_n)).
        rope: the rotation; None for `Rope()`.

    Raises:
        TypeError: a rope that is not a Rope.
        ValueError: a window or a group below 1, a log_n below 2; and what `rope` raises.

    Source: Self-Extend (https://arxiv.org/abs/2401.01325), §3.

    Example:
        >>> import torch
        >>> from ropewalk import SelfExtend, attention
        >>> q = k = v = torch.randn(1, 1024, 8, 64)
        >>> attention(q, k, v, position=SelfExtend(window=256, group=8), causal=True).shape
        torch.Size([1, 1024, 8, 64])
    """

    group: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_count(self.group, 1):
            raise ValueError(f"group is {self.group!r}, but must be an int of at least 1")

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation:
        """Rotate by the positions of groups."""
        jump = {"keys": 0, "past": 1, "future": -1}[of] * (self.window - self.window // self.group)
        table = self._rope.rotation(positions // self.group + jump, head_dim)
        return table if of == "keys" else self._scale_by_log(table, positions)
