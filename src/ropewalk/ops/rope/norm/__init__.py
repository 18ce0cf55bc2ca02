"""`QKNorm`, the RMS norm of q and k beside the rotation, and the checks of its fields.

Shape letters: H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ropewalk.ops.arguments import check_dense
from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.validate import DTYPES


@dataclass(frozen=True, eq=False)
class QKNorm:
    """Normalise q and k by their root mean square (RMS norm), in one pass with the rotation.

    The same in PyTorch, before the rotation and for one head's features x (..., D)::

        x = x.float()
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (weight + offset)

    The statistic is in float32 (float64 for float64 tensors), and the result is rounded once, together with the
    rotation. All D features are normalised, also where fewer are rotated. The weights are trained: they may have
    another dtype than q, and their gradients have their dtype and shape.

    Args:
        q_weight: (D,), or (H, D), one row per head; with `across_heads` (H·D,). None: no weight.
        k_weight: likewise, with k's heads. It is not read where k is None.
        eps: a finite number of at least 0, added to the mean of the squares.
        offset: a finite number added to the weights: 1.0 for the (1 + w) of Gemma and Qwen3-Next. A tensor without a
            weight takes no offset: 0.0 is required there.
        after: normalise after the rotation (Hunyuan, Llama 4, nanochat) rather than before.
        across_heads: one statistic over all heads of a token, H·D features of q and K·D of k (OLMo 2).

    Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467; for q and k https://arxiv.org/abs/2302.05442.

    Example:
        >>> import torch
        >>> from ropewalk import QKNorm, apply_rope, inverse_frequencies, rope_table
        >>> cos, sin = rope_table(128, inverse_frequencies("default", rotary_dim=64, base=10000.0)[0])
        >>> q, k = torch.randn(2, 128, 8, 64), torch.randn(2, 128, 2, 64)
        >>> weight = torch.ones(64, requires_grad=True)
        >>> q, k = apply_rope(q, k, cos, sin, norm=QKNorm(weight, weight))
        >>> round(q.square().mean().item(), 3)
        1.0
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    after: bool = False
    across_heads: bool = False


class NormFlags(NamedTuple):
    """The fields of a norm that are not tensors."""

    eps: float = 1e-6
    offset: float = 0.0
    after: bool = False
    across_heads: bool = False


class NormCall(NamedTuple):
    """The arguments of a call with a norm, but q, k, weights and biases. Tables without columns rotate nothing."""

    rope: RopeCall
    flags: NormFlags


class Normed(NamedTuple):
    """A call, with q, k, their weights and biases."""

    q: Tensor
    k: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    call: NormCall


class Needed(NamedTuple):
    """Says which gradients are needed."""

    q: bool
    k: bool
    q_weight: bool
    k_weight: bool
    q_bias: bool
    k_bias: bool


class NormGradients(NamedTuple):
    """The gradients of a call's results, which the needed gradients are computed from."""

    q_grad: Tensor
    k_grad: Tensor | None
    normed: Normed
    needed: Needed


def split_norm(norm: QKNorm, n_tensors: int) -> tuple[tuple[Tensor | None, ...], NormFlags]:
    """Return the weights of q, or of q and k, and the other fields. Raise if `norm` is no QKNorm."""
    if not isinstance(norm, QKNorm):
        raise TypeError(f"norm is {type(norm).__name__}, but must be a ropewalk.QKNorm")
    # A named tuple's own constructor is a call of Python's.
    flags = tuple.__new__(NormFlags, (norm.eps, norm.offset, norm.after, norm.across_heads))
    return (norm.q_weight, norm.k_weight)[:n_tensors], flags


def check_norm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    call: NormCall,
    biases: Sequence[Tensor | None] = (None, None),
) -> None:
    """Raise unless the norm and the biases fit q and k, which were checked before."""
    check_flags(call)
    layout = call.rope.flags.layout
    for name, x, weight, bias in zip("qk", xs, weights, biases, strict=False):
        n_heads, head_dim = x.shape[layout.index("h")], x.shape[-1]
        _check_weight(f"norm.{name}_weight", weight, x, n_heads, head_dim, call.flags)
        _check_bias(f"{name}_bias", bias, x, n_heads, head_dim)


def check_flags(call: NormCall) -> None:
    """Raise unless the numbers of a norm are in range, and the rotation's flags allow one."""
    eps, offset, after, across_heads = call.flags
    for name, number in (("eps", eps), ("offset", offset)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"norm.{name} is {number!r}, but must be a float")
        if not abs(number) < math.inf:  # torch.compile traces no math.isfinite
            raise ValueError(f"norm.{name} is {number}, but must be finite")
    if eps < 0:
        raise ValueError(f"norm.eps is {eps}, but must be at least 0")
    for name, flag in (("after", after), ("across_heads", across_heads)):
        if not isinstance(flag, bool):
            raise TypeError(f"norm.{name} is {flag!r}, but must be a bool")
    flags = call.rope.flags
    if flags.inverse:
        raise ValueError("inverse is True, but must be False with a norm, which has no inverse")
    if flags.inplace:
        raise ValueError("inplace is True, but must be False with a norm: its gradient needs q and k as they were")


def _check_weight(name: str, weight: Tensor | None, x: Tensor, n_heads: int, head_dim: int, flags: NormFlags) -> None:
    if weight is None:
        if flags.offset != 0:
            raise ValueError(f"norm.offset is {flags.offset}, but must be 0.0 where {name} is None")
        return
    _check_parameter(name, weight, x)
    shape = tuple(weight.shape)
    if flags.across_heads:
        if shape != (n_heads * head_dim,):
            raise ValueError(
                f"{name} has shape {shape}, but with across_heads it must be (heads * D,), ({n_heads * head_dim},)"
            )
    elif shape not in ((head_dim,), (n_heads, head_dim)):
        raise ValueError(
            f"{name} has shape {shape}, but must be (D,) or (heads, D), ({head_dim},) or ({n_heads}, {head_dim})"
        )


def _check_bias(name: str, bias: Tensor | None, x: Tensor, n_heads: int, head_dim: int) -> None:
    if bias is None:
        return
    _check_parameter(name, bias, x)
    shape = tuple(bias.shape)
    if shape not in ((n_heads, head_dim), (n_heads * head_dim,)):
        raise ValueError(
            f"{name} has shape {shape}, but must be (heads, D) or (heads * D,), ({n_heads}, {head_dim}) or "
            f"({n_heads * head_dim},)"
        )


def _check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"{name} is {type(parameter).__name__}, but must be a tensor or None")
    check_dense(name, parameter)
    if parameter.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {parameter.dtype}, but must be float16, bfloat16, float32 or float64")
    if parameter.device != x.device:
        raise ValueError(f"{name}.device is {parameter.device}, but must be q.device, {x.device}")


def is_per_head(weight: Tensor, flags: NormFlags) -> bool:
    """Say whether each head has weights of its own."""
    return flags.across_heads or weight.ndim == 2
