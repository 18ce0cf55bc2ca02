"""The interface of a position scheme: a map of features, a change of scores, or both.

A scheme describes them, and the backends of `ropewalk.ops.attention` compute them.

1. The map applies to each token's features before the scores: tables of cos and sin rotate and scale their pairs, and
   weights multiply features. It is linear, so the gradient is mapped by its transpose. A two-range encoding has a
   second map for far pairs of tokens (`ropewalk.schemes.two_range`).
2. The change of scores is a function (score, query position, key position) -> score. Its reference form is the method
   `score_mod`. The form for Triton kernels is a set of jitted functions, named here and imported when a kernel is
   compiled.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

ScoreFunction = TypeVar("ScoreFunction", bound=Callable[[Any, Tensor, Tensor], Tensor])


class Rotation(NamedTuple):
    """A map of features: tables as `apply_rope` takes them, and weights."""

    cos: Tensor  # (..., T, R/2), float32, times the token's amplitude
    sin: Tensor
    interleaved: bool
    weights: Tensor | None  # (D,), float32: of a feature of q times the same feature of k
    offset: int = 0  # the first rotated feature
    scale: Tensor | None = None  # (..., T), float32: multiplies a query's features that are not rotated
    pair_block: int | None = None  # pairs are half-split inside blocks of so many features; None: inside all of them


@dataclass(frozen=True, eq=False)
class PositionScheme:
    """The base class of all schemes, those of other packages too (CONTRIBUTING.md has the recipe).

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from ropewalk import PositionScheme, attention
        >>> @dataclass(frozen=True, eq=False)
        ... class Recency(PositionScheme):
        ...     def score_mod(self, scores, distance):
        ...         return scores - 0.1 * distance.abs()
        >>> q = k = v = torch.randn(1, 16, 2, 32)
        >>> attention(q, k, v, position=Recency()).shape
        torch.Size([1, 16, 2, 32])
    """

    def kernel_score_mod(self) -> str | None:
        """Name a `ropewalk.ops.attention.triton.score_mods.ScoreMod`, as “package.module:name”; None for none."""
        return None

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """Return the map of features for tokens at `positions` (..., T), int64; None for the identity."""
        return None

    def query_rotation(self, positions: Tensor, head_dim: int) -> Rotation | None:
        """Return the map of queries' features, if `rotation` is that of keys alone; None if it is that of both."""
        return None

    def has_axes(self) -> bool:
        """Say whether a token's positions have several axes: positions that a call gives are then (A, B or 1, T)."""
        return False

    def far_window(self) -> int | None:
        """Return the window of a two-range encoding: pairs with |m − n| ≥ window are far; None if no pair is."""
        return None

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """Return the map of features for far pairs; None for the identity. It rotates the same features as `rotation`.

        of: "keys" for the map of k; "past" for that of q with earlier keys, "future" for that of q with later keys.
        """
        return None

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor | None:
        """Return the parameters of the `ScoreMod`, (H, n) or (B, H, n), float32; None if it reads none.

        Learned parameters stay differentiable. All are on the device, as a CUDA graph may not copy from the host.
        """
        return None

    def n_learned_params(self) -> int:
        """Count the columns of `score_mod_params`, from the first, that may be learned; 0 for all."""
        return 0

    def has_score_mod(self) -> bool:
        """Say whether scores change: by default, whether the class has its own `score_mod`."""
        return type(self).score_mod is not PositionScheme.score_mod

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Change scores before the softmax: the reference form, in plain PyTorch.

        Unlike FlexAttention's function of this name, which maps one score and its indices, it maps whole tensors: the
        reference calls it once with the matrix of all scores, which takes memory for B · H · Tq · Tk numbers. Positions
        are in `distance`: with a cache, packed sequences or several processes a row of scores is not its position.

        scores: (B, H, Tq, Tk), scaled. distance: query's position minus key's, (B or 1, 1, Tq, Tk), int64.

        Returns the changed scores, in their shape and dtype. A row of −∞ attends nothing, as if it were masked.
        """
        return scores

    def is_elementwise(self) -> bool:
        """Say whether the reference may call `score_mod` with the scores of some queries at a time, to save memory.

        By default it may for Ropewalk's own functions, and not for an override of one. Return True where yours goes by
        distance, head and batch row alone.
        """
        return not self.has_score_mod() or hasattr(type(self).score_mod, _ELEMENTWISE)


_ELEMENTWISE = "_is_elementwise"


def elementwise(score_mod: ScoreFunction) -> ScoreFunction:
    """Mark a `score_mod` that changes each score by itself, by its head, batch row and distance alone."""
    setattr(score_mod, _ELEMENTWISE, True)
    return score_mod


# What a class defines so that something reads it: without one of them it is no position at all.
_READ = ("rotation", "query_rotation", "far_window", "score_mod")
# Methods that say nothing without another one.
_NEEDED = {"kernel_score_mod": "score_mod", "score_mod_params": "score_mod", "far_rotation": "far_window"}


def check_class(scheme: PositionScheme) -> None:
    """Raise unless a scheme's class defines what attention reads, under its right name."""
    kind = type(scheme)
    if kind is not PositionScheme and kind.__module__.startswith("ropewalk."):
        inner = getattr(scheme, "inner", None)  # of a scheme that narrows another
        if isinstance(inner, PositionScheme):
            check_class(inner)
        return
    defined = {name for name in (*_READ, *_NEEDED) if getattr(kind, name) is not getattr(PositionScheme, name)}
    misspelt = None if torch.compiler.is_compiling() else _find_misspelt(kind)
    alone = next((name for name, needed in _NEEDED.items() if name in defined and needed not in defined), None)
    hint = ""
    if alone is not None:
        hint = f"; {alone} is read beside {_NEEDED[alone]} alone"
    if misspelt is not None:
        hint = f"; it defines {misspelt[0]}, which nothing reads: did you mean {misspelt[1]}?"
    if defined.isdisjoint(_READ):
        raise TypeError(f"{kind.__name__} defines neither rotation nor score_mod, but must define one of them{hint}")
    if hint:
        raise TypeError(f"{kind.__name__} is a scheme with a method that nothing reads{hint}")


def _find_misspelt(kind: type) -> tuple[str, str] | None:
    """Return a public method that looks like one of the interface which its class lacks, and that one.

    A class that defines something that is read may have helpers of any name.
    """
    interface = {name for name, x in vars(PositionScheme).items() if isinstance(x, FunctionType) and name[0] != "_"}
    theirs: set[str] = set()
    for owner in kind.__mro__:
        if issubclass(owner, PositionScheme) and not owner.__module__.startswith("ropewalk."):
            theirs |= {name for name, x in vars(owner).items() if isinstance(x, FunctionType) and name[0] != "_"}
    if not theirs.isdisjoint(_READ):
        return None
    pairs = ((name, right) for name in sorted(theirs - interface) for right in sorted(interface - theirs))
    return next((pair for pair in pairs if _looks_like(*pair)), None)


def _looks_like(name: str, right: str) -> bool:
    """Say whether a name is a longer or a misspelt form of another of as many words."""
    if name.replace("_", "").lower() == right.replace("_", ""):
        return True
    if name.count("_") != right.count("_"):
        return False
    return name.startswith(right) or SequenceMatcher(None, name, right).ratio() > _LIKE


_LIKE = 0.85


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_learnable(name: str, x: object, shape: str) -> None:
    """Raise unless x is a floating-point tensor: a gradient may flow to it."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}, but must be a floating-point tensor, {shape}")


def per_head(name: str, x: Tensor, n_heads: int) -> Tensor:
    if x.shape != (n_heads,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (H,) with H = {n_heads}")
    return x
