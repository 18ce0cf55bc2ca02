"""Two-range attention with fixed signatures: queries and keys are rotated by the caller, for near and for far pairs.

Shape letters: Z batch, H query heads, K key heads, N tokens, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.ops.attention.api import run
from ropewalk.ops.attention.backends import choose
from ropewalk.ops.attention.call import FarQK, FarRange
from ropewalk.ops.attention.tables import resolve_scheme
from ropewalk.ops.attention.triton.support import MAX_HEAD_DIM
from ropewalk.ops.attention.validate import DTYPES, Arguments, validate
from ropewalk.schemes import PositionScheme


@dataclass(frozen=True)
class GivenPairs(PositionScheme):
    """A two-range encoding whose features the caller has mapped."""

    window: int

    def far_window(self) -> int:
        """Return the window."""
        return self.window


def rerope_attention(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    causal: bool,
    sm_scale: float,
    window: int,
    *,
    impl: str | None = None,
) -> Tensor:
    """Attend by the scores of one pair of queries and keys within a window, and of another pair beyond it.

    The same in PyTorch: `torch_attention`, which holds whole (N, N) matrices; this holds none. The window selects q1
    and k1 for near pairs, |m − n| < window, and q2 and k2 for far ones. It masks nothing. Differentiable in all five
    tensors.

    Args:
        q1: (Z, H, N, D), queries of near pairs; float16 or bfloat16 (float32 and, by the reference, float64 too), any
            strides.
        q2: like q1, queries of far pairs, the same for keys of the past and of the future.
        k1: (Z, K, N, D), where H is a multiple of K, keys of near pairs.
        k2: like k1, keys of far pairs.
        v: like k1, but for its head dim.
        causal: let no query attend a later key.
        sm_scale: of the scores, such as 1/√D.
        window: pairs with |m − n| < window are near, all others far.
        impl: None for the choice of `attention`; "triton"; "gluon", on Hopper; "flash", two calls of flash-attn 4
            that are merged by their log-sum-exp, causal alone; or "reference". A named one that cannot run the call
            raises.

    Returns:
        (Z, H, N, Dv), like q1.

    Raises:
        TypeError: an argument of another type or dtype than said here.
        ValueError: shapes, devices or values that do not fit; an `impl` that cannot run the call.

    Source: Su Jianlin, “Rectified Rotary Position Embeddings” (https://github.com/bojone/rerope).

    Example:
        >>> import torch
        >>> from ropewalk import rerope_attention
        >>> q1, q2, k1, k2, v = (torch.randn(1, 4, 256, 64) for _ in range(5))
        >>> rerope_attention(q1, q2, k1, k2, v, True, 0.125, 100).shape
        torch.Size([1, 4, 256, 64])
    """
    _check(q1, q2, k1, k2, v, sm_scale, window)
    arguments = Arguments(position=GivenPairs(window), causal=causal, scale=sm_scale, layout="bhtd")
    call = resolve_scheme(validate(q1, k1, v, arguments))
    call = call._replace(
        far=FarRange(window, None, FarQK(q2, None if causal else q2, k2)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        needs_backward=torch.is_grad_enabled() and any(x.requires_grad for x in (q1, q2, k1, k2, v)),
    )
    backend = choose(call, impl)
    with torch.autocast(q1.device.type, enabled=False):  # its float32 arithmetic must stay float32
        return run(call, backend)[0]


def torch_attention(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, causal: bool, sm_scale: float, window: int
) -> Tensor:
    """Attend as `rerope_attention` does, in plain PyTorch with whole matrices of scores: its definition.

    The same in PyTorch, for as many key heads as query heads::

        m, n = torch.arange(N)[:, None], torch.arange(N)
        scores = torch.where((m - n).abs() < window, q1 @ k1.mT, q2 @ k2.mT) * sm_scale
        if causal:
            scores = scores.masked_fill(n > m, -torch.inf)
        out = scores.softmax(-1) @ v

    The arithmetic is in float32, or in float64 for float64 tensors, rounded once. Arguments, result and errors are
    those of `rerope_attention`.

    Source: Su Jianlin, “Rectified Rotary Position Embeddings” (https://github.com/bojone/rerope).

    Example:
        >>> import torch
        >>> from ropewalk import torch_attention
        >>> q1, q2, k1, k2, v = (torch.randn(1, 4, 256, 64) for _ in range(5))
        >>> torch_attention(q1, q2, k1, k2, v, True, 0.125, 100).shape
        torch.Size([1, 4, 256, 64])
    """
    _check(q1, q2, k1, k2, v, sm_scale, window)
    dtype = torch.promote_types(q1.dtype, torch.float32)
    group = q1.shape[1] // k1.shape[1]
    near_q, far_q = q1.to(dtype), q2.to(dtype)
    near_k, far_k, values = (x.to(dtype).repeat_interleave(group, 1) for x in (k1, k2, v))
    m = torch.arange(q1.shape[2], device=q1.device)[:, None]
    n = torch.arange(k1.shape[2], device=q1.device)
    with torch.autocast(q1.device.type, enabled=False):
        scores = torch.where((m - n).abs() < window, near_q @ near_k.mT, far_q @ far_k.mT) * sm_scale
        if causal:
            scores = scores.masked_fill(n > m, -math.inf)
        return (scores.softmax(-1) @ values).to(q1.dtype)


def _check(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, sm_scale: float, window: int) -> None:
    """Raise unless the tensors fit together, and the scale and the window are valid."""
    tensors = {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
        if x.dtype not in DTYPES or x.dtype != q1.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but all tensors must share float16, bfloat16, or a wider one")
        if x.device != q1.device:
            raise ValueError(f"{name} is on {x.device}, but must be on q1's device, {q1.device}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (Z, H, N, D)")
    batch, heads, tokens, head_dim = q1.shape
    if q2.shape != q1.shape:
        raise ValueError(f"q2 has shape {tuple(q2.shape)}, but must have q1's, {tuple(q1.shape)}")
    key_heads = k1.shape[1]
    if k1.shape != (batch, key_heads, tokens, head_dim) or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"k1 has shape {tuple(k1.shape)}, but must be (Z, K, N, D) with Z = {batch}, N = {tokens}, D = {head_dim} "
            f"and a K that divides {heads}"
        )
    if k2.shape != k1.shape:
        raise ValueError(f"k2 has shape {tuple(k2.shape)}, but must have k1's, {tuple(k1.shape)}")
    if v.shape[:3] != k1.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but must have k1's, {tuple(k1.shape)}, all but the head dim")
    for name, width in (("q1", head_dim), ("v", v.shape[3])):
        if not 1 <= width <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has a head dim of {width}, but must have one from 1 to {MAX_HEAD_DIM}")
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)) or not abs(sm_scale) < math.inf:
        raise ValueError(f"sm_scale is {sm_scale!r}, but must be a finite number")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window is {window!r}, but must be an int of at least 1")
