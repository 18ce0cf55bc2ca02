"""RMS norm and rotation in plain PyTorch: the definition that every other implementation is tested against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope.norm import NormCall, is_per_head
from ropewalk.ops.rope.reference import broadcast_rows, join_pairs, rotate_pairs, split_pairs, split_tables


def norm_rope(x: Tensor, weight: Tensor | None, call: NormCall) -> Tensor:
    """Normalise and rotate one tensor out of place by differentiable, composable PyTorch operations."""
    y = x.to(_compute_dtype(x))
    if call.flags.after:
        y = _rotate(y, call)
    y = y * _rstd(y, call)
    if weight is not None:
        y = y * _factors(weight, y, call)
    return (y if call.flags.after else _rotate(y, call)).to(x.dtype)


def norm_rope_backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *weights) that are needed; they are differentiable too."""
    n = len(xs)
    results: list[Tensor | None] = [None] * (2 * n)
    for i, (grad, x, weight) in enumerate(zip(grads, xs, weights, strict=True)):
        if grad is None:
            continue
        g, y = grad.to(_compute_dtype(x)), x.to(_compute_dtype(x))
        if call.flags.after:
            y = _rotate(y, call)
        else:
            g = _rotate(g, call, inverse=True)
        rstd = _rstd(y, call)
        y = y * rstd
        if needed[n + i] and weight is not None:
            dims = [d for d in range(y.ndim - 1) if not (is_per_head(weight, call.flags) and d == _head_axis(call))]
            results[n + i] = (g * y).sum(dims).reshape(weight.shape).to(weight.dtype)
        if needed[i]:
            if weight is not None:
                g = g * _factors(weight, y, call)
            dx = rstd * (g - y * (y * g).mean(_axes(call), keepdim=True))
            results[i] = (_rotate(dx, call, inverse=True) if call.flags.after else dx).to(x.dtype)
    return results


def forward(xs: Sequence[Tensor], weights: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Normalise and rotate outside of autograd."""
    with torch.no_grad():
        return tuple(_strided_like(norm_rope(x, weight, call), x) for x, weight in zip(xs, weights, strict=True))


def backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *weights) that are needed, outside of autograd."""
    with torch.no_grad():
        found = norm_rope_backward(grads, xs, weights, needed, call)
        return [
            None if grad is None or x is None else _strided_like(grad, x)
            for grad, x in zip(found, (*xs, *weights), strict=True)
        ]


def prepare_forward(*_: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function for any call."""
    return forward


def prepare_backward(
    grads: Any, xs: Any, weights: Any, needed: Sequence[bool], call: NormCall
) -> Callable[..., list[Tensor | None]]:
    """Return the function of (grads, xs, weights, call) for calls that need the same gradients."""
    return lambda grads, xs, weights, call: backward(grads, xs, weights, needed, call)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _head_axis(call: NormCall) -> int:
    return call.rope.flags.layout.index("h")


def _axes(call: NormCall) -> tuple[int, ...]:
    """Return the axes of one statistic."""
    return (_head_axis(call), -1) if call.flags.across_heads else (-1,)


def _rstd(x: Tensor, call: NormCall) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps), which broadcasts against x."""
    return torch.rsqrt(x.square().mean(_axes(call), keepdim=True) + call.flags.eps)


def _factors(weight: Tensor, x: Tensor, call: NormCall) -> Tensor:
    """Return the weights and their offset, which broadcast against x."""
    factors = weight.to(x.dtype) + call.flags.offset
    if is_per_head(weight, call.flags):
        factors = factors.reshape(-1, x.shape[-1])  # (H, D)
        factors = factors.unsqueeze(1) if call.rope.flags.layout == "bhtd" else factors
    return factors


def _rotate(x: Tensor, call: NormCall, *, inverse: bool = False) -> Tensor:
    """Rotate x, of the arithmetic's dtype; a token outside the table becomes NaN, its gradient too."""
    cos, sin, positions, cu_seqlens, offset, flags, axes = call.rope
    if cos.shape[-1] == 0:
        return x
    cos, sin, inside = broadcast_rows(x, cos, sin, positions, cu_seqlens, offset, inverse, flags.layout, axes)
    pairing = flags.interleaved, flags.pair_block
    rotary_dim = 2 * cos.shape[-1]
    sizes = [flags.rotary_offset, rotary_dim, x.shape[-1] - flags.rotary_offset - rotary_dim]
    before, middle, after = x.split(sizes, dim=-1)
    cos, sin = split_tables(cos.to(x.dtype), sin.to(x.dtype), flags.pair_block)
    a, b = rotate_pairs(*split_pairs(middle, *pairing), cos, sin)
    rotated = torch.cat((before, join_pairs(a, b, *pairing), after), dim=-1)
    # A product rather than `where`, by which the gradient of such a token would be 0.
    return rotated if inside is None else rotated * torch.where(inside, 1.0, torch.nan).to(x.dtype)


def _strided_like(result: Tensor, x: Tensor) -> Tensor:
    """Return `result` with the strides that `torch.empty_like(x)` gives."""
    out = torch.empty_like(x)
    return result if result.stride() == out.stride() else out.copy_(result)
