"""RMS norm and rotation in plain PyTorch: the definition that every other implementation is tested against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.ops.launch.kinds import plain
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.norm import Needed, NormCall, Normed, NormGradients, is_per_head
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
    q_grad: Tensor | None, k_grad: Tensor | None, normed: Normed, needed: Needed
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, weights and biases that are needed; they are differentiable too."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    needed_of_q, needed_of_k = (needed.q, needed.q_weight, needed.q_bias), (needed.k, needed.k_weight, needed.k_bias)
    dq, dq_weight, dq_bias = _gradients(q_grad, q, q_weight, q_bias, needed_of_q, call)
    dk, dk_weight, dk_bias = _gradients(k_grad, k, k_weight, k_bias, needed_of_k, call)
    return dq, dk, dq_weight, dk_weight, dq_bias, dk_bias


def _gradients(
    grad: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: tuple[bool, bool, bool],
    call: NormCall,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, of its weight and of its bias that are needed."""
    if grad is None or x is None:
        return None, None, None
    needs_dx, needs_dw, needs_db = needed
    dx = dw = db = None
    g, y = grad.to(_compute_dtype(x)), _biased(x, bias, call)
    has_grad = (g != 0).any(_axes(call), keepdim=True)
    if call.flags.after:
        y = _rotate(y, call)
    else:
        g = _rotate(g, call, inverse=True)
    y = _fill_lost(y, has_grad, call)
    rstd = _rstd(y, call)
    y = y * rstd
    if needs_dw and weight is not None:
        dw = _sum(g * y, weight, call, per_head=is_per_head(weight, call.flags))
    if needs_dx or needs_db:
        if weight is not None:
            g = g * _factors(weight, y, call)
        grad_x = rstd * (g - y * (y * g).mean(_axes(call), keepdim=True))
        grad_x = _rotate(grad_x, call, inverse=True) if call.flags.after else grad_x
        if needs_dx:
            dx = grad_x.to(x.dtype)
        if needs_db and bias is not None:
            db = _sum(grad_x, bias, call, per_head=True)
    return dx, dw, db


@plain
@torch.no_grad()
def forward(normed: Normed, on: Steps) -> Sequence[Tensor]:
    """Normalise and rotate outside of autograd."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    sides = ((q, q_weight, q_bias), (k, k_weight, k_bias))
    return [_strided_like(norm_rope(x, weight, bias, call), x) for x, weight, bias in sides if x is not None]


@plain
@torch.no_grad()
def backward(gradients: NormGradients, on: Steps) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, weights and biases that are needed, outside of autograd."""
    *inputs, _ = gradients.normed
    found = norm_rope_backward(*gradients)
    return [
        None if grad is None or x is None else _strided_like(grad, x) for grad, x in zip(found, inputs, strict=True)
    ]


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


def _fill_lost(x: Tensor, has_grad: Tensor, call: NormCall) -> Tensor:
    """Return x with ones in rows that get no gradient and have no finite norm: they may hold anything, 0 · NaN is NaN.

    Other rows without a gradient stay, for the second derivatives.
    """
    rstd = _rstd(x.detach(), call)
    is_finite = (rstd > 0) & (rstd < torch.inf)
    return x.masked_fill(~(has_grad | is_finite), 1.0)


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
