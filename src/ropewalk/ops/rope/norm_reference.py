"""RMS norm and rotation in plain PyTorch: the definition that every other implementation is tested against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope.norm import NormCall, NormFlags, is_per_head
from ropewalk.ops.rope.reference import broadcast_rows, join_pairs, rotate_pairs, split_pairs


def rms_norm(x: Tensor, weight: Tensor | None, flags: NormFlags, layout: str) -> Tensor:
    """Divide each head of x by its root mean square, and multiply by its weights; x has the arithmetic's dtype."""
    head_axis = layout.index("h") - x.ndim
    axes = (head_axis, -1) if flags.across_heads else (-1,)
    x = x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + flags.eps)
    if weight is None:
        return x
    weight = weight.to(x.dtype) + flags.offset
    if is_per_head(weight, flags):
        weight = weight.reshape(-1, x.shape[-1])  # (H, D)
        weight = weight.unsqueeze(1) if head_axis == -3 else weight
    return x * weight


def norm_rope(x: Tensor, weight: Tensor | None, call: NormCall) -> Tensor:
    """Normalise and rotate one tensor out of place by differentiable, composable PyTorch operations."""
    cos, sin, positions, cu_seqlens, offset, rope = call.rope
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    if not call.flags.after:
        y = rms_norm(y, weight, call.flags, rope.layout)
    inside = None
    if cos.shape[-1] > 0:
        cos, sin, inside = broadcast_rows(x, cos, sin, positions, cu_seqlens, offset, False, rope.layout)
        rotary_dim = 2 * cos.shape[-1]
        sizes = [rope.rotary_offset, rotary_dim, x.shape[-1] - rope.rotary_offset - rotary_dim]
        before, middle, after = y.split(sizes, dim=-1)
        a, b = rotate_pairs(*split_pairs(middle, rope.interleaved), cos.to(dtype), sin.to(dtype))
        y = torch.cat((before, join_pairs(a, b, rope.interleaved), after), dim=-1)
    if inside is not None:
        # A product rather than `where`: the gradient of such a token is NaN too, as that of a rotation alone.
        y = y * torch.where(inside, 1.0, torch.nan).to(dtype)
    if call.flags.after:
        y = rms_norm(y, weight, call.flags, rope.layout)
    return y.to(x.dtype)


def norm_rope_backward(
    grads: Sequence[Tensor | None],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of (*xs, *weights) that are needed; differentiable with `create_graph`."""
    n = len(xs)
    results: list[Tensor | None] = [None] * (2 * n)
    with torch.enable_grad():
        # Views of their own: one tensor that is given twice gets each of its gradients.
        leaves: list[Any] = [
            None if x is None else x.view_as(x) if create_graph else x.detach().requires_grad_(is_needed)
            for x, is_needed in zip((*xs, *weights), needed, strict=True)
        ]
        given = {i: grad for i, grad in enumerate(grads) if grad is not None and (needed[i] or needed[n + i])}
        wanted = [i for i, is_needed in enumerate(needed) if is_needed and i % n in given]
        if wanted:
            outs = [norm_rope(leaves[i], leaves[n + i], call) for i in given]
            found = torch.autograd.grad(
                outs, [leaves[i] for i in wanted], list(given.values()), create_graph=create_graph
            )
            for i, grad in zip(wanted, found, strict=True):
                results[i] = grad
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
    """Return the gradients of (*xs, *weights) that are needed."""
    found = norm_rope_backward(grads, xs, weights, needed, call)
    return [
        None if grad is None or x is None else _strided_like(grad, x)
        for grad, x in zip(found, (*xs, *weights), strict=True)
    ]


def _strided_like(result: Tensor, x: Tensor) -> Tensor:
    """Return `result` with the strides that `torch.empty_like(x)` gives."""
    out = torch.empty_like(x)
    return result if result.stride() == out.stride() else out.copy_(result)
