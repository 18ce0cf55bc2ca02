"""RMS norm and rotation in plain PyTorch: the definition that every other implementation is tested against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope.norm import NormCall, is_per_head, split_parameters
from ropewalk.ops.rope.reference import broadcast_rows, join_pairs, rotate_pairs, split_pairs, split_tables


def norm_rope(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall) -> Tensor:
    """Normalise and rotate one tensor out of place by differentiable, composable PyTorch operations."""
    y = _biased(x, bias, call)
    if call.flags.after:
        y = _rotate(y, call)
    y = y * _rstd(y, call)
    if weight is not None:
        y = y * _factors(weight, y, call)
    return (y if call.flags.after else _rotate(y, call)).to(x.dtype)


def norm_rope_backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *parameters) that are needed; they are differentiable too."""
    n = len(xs)
    results: list[Tensor | None] = [None] * (3 * n)
    for i, (grad, x, weight, bias) in enumerate(zip(grads, xs, *split_parameters(parameters), strict=True)):
        if grad is None:
            continue
        g, y = grad.to(_compute_dtype(x)), _biased(x, bias, call)
        is_given = (g != 0).any(_axes(call), keepdim=True)
        if call.flags.after:
            y = _rotate(y, call)
        else:
            g = _rotate(g, call, inverse=True)
        y = _fill_lost(y, is_given, call)
        rstd = _rstd(y, call)
        y = y * rstd
        if needed[n + i] and weight is not None:
            results[n + i] = _sum(g * y, weight, call, per_head=is_per_head(weight, call.flags))
        if needed[i] or needed[2 * n + i]:
            if weight is not None:
                g = g * _factors(weight, y, call)
            dx = rstd * (g - y * (y * g).mean(_axes(call), keepdim=True))
            dx = _rotate(dx, call, inverse=True) if call.flags.after else dx
            if needed[i]:
                results[i] = dx.to(x.dtype)
            if needed[2 * n + i] and bias is not None:
                results[2 * n + i] = _sum(dx, bias, call, per_head=True)
    return results


def forward(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Normalise and rotate outside of autograd."""
    with torch.no_grad():
        parts = zip(xs, *split_parameters(parameters), strict=True)
        return tuple(_strided_like(norm_rope(x, weight, bias, call), x) for x, weight, bias in parts)


def backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *parameters) that are needed, outside of autograd."""
    with torch.no_grad():
        found = norm_rope_backward(grads, xs, parameters, needed, call)
        return [
            None if grad is None or x is None else _strided_like(grad, x)
            for grad, x in zip(found, (*xs, *parameters), strict=True)
        ]


def prepare_forward(*_: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function for any call."""
    return forward


def prepare_backward(
    grads: Any, xs: Any, parameters: Any, needed: Sequence[bool], call: NormCall
) -> Callable[..., list[Tensor | None]]:
    """Return the function of (grads, xs, parameters, call) for calls that need the same gradients."""
    return lambda grads, xs, parameters, call: backward(grads, xs, parameters, needed, call)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _biased(x: Tensor, bias: Tensor | None, call: NormCall) -> Tensor:
    """Return x and its bias, of the arithmetic's dtype."""
    y = x.to(_compute_dtype(x))
    return y if bias is None else y + _by_head(bias.to(y.dtype), y, call)


def _sum(x: Tensor, parameter: Tensor, call: NormCall, *, per_head: bool) -> Tensor:
    """Return the gradient of a weight or a bias: the sum over batch and tokens, and over heads that share it."""
    dims = [d for d in range(x.ndim - 1) if not (per_head and d == _head_axis(call))]
    return x.sum(dims).reshape(parameter.shape).to(parameter.dtype)


def _by_head(parameter: Tensor, x: Tensor, call: NormCall) -> Tensor:
    """Return a number for each head's features, which broadcasts against x."""
    parameter = parameter.reshape(-1, x.shape[-1])  # (H, D)
    return parameter.unsqueeze(1) if call.rope.flags.layout == "bhtd" else parameter


def _head_axis(call: NormCall) -> int:
    return call.rope.flags.layout.index("h")


def _axes(call: NormCall) -> tuple[int, ...]:
    """Return the axes of one statistic."""
    return (_head_axis(call), -1) if call.flags.across_heads else (-1,)


def _rstd(x: Tensor, call: NormCall) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps), which broadcasts against x."""
    return torch.rsqrt(x.square().mean(_axes(call), keepdim=True) + call.flags.eps)


def _fill_lost(x: Tensor, is_given: Tensor, call: NormCall) -> Tensor:
    """Return x with ones in rows that get no gradient and have no finite norm: they may hold anything, 0 · NaN is NaN.

    Other rows without a gradient stay, for the second derivatives.
    """
    rstd = _rstd(x.detach(), call)
    is_finite = (rstd > 0) & (rstd < torch.inf)
    return x.masked_fill(~(is_given | is_finite), 1.0)


def _factors(weight: Tensor, x: Tensor, call: NormCall) -> Tensor:
    """Return the weights and their offset, which broadcast against x."""
    factors = weight.to(x.dtype) + call.flags.offset
    return _by_head(factors, x, call) if is_per_head(weight, call.flags) else factors


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
