"""Attention with fixed signatures: (B, H, T, D) tensors, Ropewalk's own kernels forward and backward.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from ropewalk.ops.attention.api import attention
from ropewalk.schemes import ExpoSB, NoPosition, PositionScheme, Rope

_STANDARD = NoPosition()
_ROPE = Rope(interleaved=True)
_EXPOSB = ExpoSB(distance_decay=True)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Attend without positions in the kernel: a learned table was added before the projections.

    The same in PyTorch::

        scores = q @ k.mT * sm_scale
        if causal:
            scores = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        out = scores.softmax(-1) @ v

    On a GPU the Triton kernels run, elsewhere the reference.

    Args:
        q: (B, H, T, D); float16, bfloat16 or float32 (and float64, on the CPU).
        k: like q; it may have fewer heads, or another length.
        v: like k.
        causal: let no query attend a later key.
        sm_scale: of the scores, such as 1/√D.

    Returns:
        (B, H, T, D).

    Raises:
        TypeError, ValueError: as `attention` does.

    Source: Attention Is All You Need (https://arxiv.org/abs/1706.03762), §3.2.1.

    Example:
        >>> import torch
        >>> from ropewalk import standard_attention
        >>> q, k, v = (torch.randn(2, 4, 100, 64) for _ in range(3))
        >>> standard_attention(q, k, v, True, 0.125).shape
        torch.Size([2, 4, 100, 64])
    """
    return _attend(q, k, v, causal, sm_scale, _STANDARD)


def absolute_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Attend without positions in the kernel: sinusoids were added before the projections of q and k.

    The same as `standard_attention`, with its arguments, result and errors.

    Source: Attention Is All You Need (https://arxiv.org/abs/1706.03762), §3.5.

    Example:
        >>> import torch
        >>> from ropewalk import absolute_attention
        >>> q, k, v = (torch.randn(2, 4, 100, 64) for _ in range(3))
        >>> absolute_attention(q, k, v, False, 0.125).shape
        torch.Size([2, 4, 100, 64])
    """
    return _attend(q, k, v, causal, sm_scale, _STANDARD)


def rope_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Attend with q and k rotated by their index: interleaved pairs, ω_i = 10000^(−2i/D).

    The same in PyTorch: `standard_attention` of q and k rotated by `Rope(interleaved=True)`. Arguments, result and
    errors are those of `standard_attention`; D is even.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.

    Example:
        >>> import torch
        >>> from ropewalk import rope_attention
        >>> q, k, v = (torch.randn(2, 4, 100, 64) for _ in range(3))
        >>> rope_attention(q, k, v, True, 0.125).shape
        torch.Size([2, 4, 100, 64])
    """
    return _attend(q, k, v, causal, sm_scale, _ROPE)


def exposb_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Attend by ExpoSB (“exponential stick breaking”), with its decay of scores by distance.

    The same in PyTorch: the scores of `ExpoSB(distance_decay=True)`. Arguments, result and errors are those of
    `standard_attention`; D is even and at least 8.

    Source: unpublished; `ExpoSB` defines it.

    Example:
        >>> import torch
        >>> from ropewalk import exposb_attention
        >>> q, k, v = (torch.randn(2, 4, 100, 64) for _ in range(3))
        >>> exposb_attention(q, k, v, False, 0.125).shape
        torch.Size([2, 4, 100, 64])
    """
    return _attend(q, k, v, causal, sm_scale, _EXPOSB)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, position: PositionScheme) -> Tensor:
    impl = "triton" if isinstance(q, Tensor) and q.is_cuda else "reference"
    out: Tensor = attention(q, k, v, position=position, causal=causal, scale=sm_scale, layout="bhtd", impl=impl)
    return out
