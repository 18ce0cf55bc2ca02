"""The rotation in plain PyTorch: the definition that every other implementation is measured against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotate_pairs(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False, rotary_offset: int = 0
) -> Tensor:
    """Turn each pair (a, b) of `x` into (a·cos − b·sin, a·sin + b·cos); `inverse` turns it back.

    x is (..., D); cos and sin are (..., R/2) and broadcast against it. Features outside
    [rotary_offset, rotary_offset + R) pass through. The arithmetic is in float32 or in x's dtype, whichever is
    larger, and is rounded once.
    """
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute_dtype), sin.to(compute_dtype)
    if inverse:
        sin = -sin
    half = cos.shape[-1]
    before, turned, after = x.split([rotary_offset, 2 * half, x.shape[-1] - rotary_offset - 2 * half], dim=-1)
    pairs = turned.to(compute_dtype).unflatten(-1, (half, 2) if interleaved else (2, half))
    pair_axis = -1 if interleaved else -2
    a, b = pairs.unbind(pair_axis)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), pair_axis).flatten(-2)
    return torch.cat((before, turned.to(x.dtype), after), -1)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each packed token in its own sequence, (total,); −1 for a token that no sequence covers."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if ends.numel() == 0:
        return torch.full_like(tokens, -1)
    sequence = torch.searchsorted(ends, tokens, right=True)
    covered = sequence < ends.numel()
    return torch.where(covered, tokens - starts[torch.where(covered, sequence, 0)], -1)


def token_rows(
    cos: Tensor,
    sin: Tensor,
    tokens: int,
    *,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Look up each token's cos and sin, (B or 1, T, R/2), and whether its position lies in the table, (B or 1, T).

    The last is None where every position lies in the table by construction. Rows outside it are undefined.
    """
    if cos.ndim == 3:
        return cos, sin, None
    if positions is None and cu_seqlens is None:
        rows = slice(offset, offset + tokens)
        return cos[None, rows], sin[None, rows], None
    if positions is None:
        assert cu_seqlens is not None
        in_sequence = packed_positions(cu_seqlens, tokens)
        position = torch.where(in_sequence >= 0, in_sequence + offset, -1)[None]
    elif positions.ndim == 2:
        position = positions.long()
    elif layout == "thd":
        position = positions.long()[None]
    else:
        position = positions.long()[:, None] + torch.arange(tokens, device=positions.device)
    n_rows = cos.shape[0]
    inside = (position >= 0) & (position < n_rows)
    if n_rows == 0:
        cos = sin = cos.new_zeros(1, cos.shape[1])
    row = torch.where(inside, position, 0)
    return cos[row], sin[row], inside


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    layout: str = "bthd",
    interleaved: bool = False,
    inverse: bool = False,
    rotary_offset: int = 0,
) -> Tensor:
    """Rotate one tensor out of place by differentiable, composable PyTorch operations.

    Arguments are those of `ropewalk.apply_rope`, already checked, with an int `positions` given as `offset`.
    """
    token_axis, head_axis = (-2, -3) if layout == "bhtd" else (-3, -2)
    cos, sin, inside = token_rows(
        cos, sin, x.shape[token_axis], positions=positions, cu_seqlens=cu_seqlens, offset=offset, layout=layout
    )
    if layout == "thd":
        cos, sin = cos[0], sin[0]
        inside = None if inside is None else inside[0]
    cos, sin = cos.unsqueeze(head_axis), sin.unsqueeze(head_axis)
    rotated = rotate_pairs(x, cos, sin, interleaved=interleaved, inverse=inverse, rotary_offset=rotary_offset)
    if inside is None:
        return rotated
    return torch.where(inside[..., None].unsqueeze(head_axis), rotated, torch.nan)


@torch.no_grad()
def rotate(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    inverse: bool,
    *,
    layout: str,
    interleaved: bool,
    rotary_offset: int,
) -> None:
    """Write the rotation of each tensor of `xs` into its partner in `outs`, which may be the tensor itself."""
    for x, out in zip(xs, outs, strict=True):
        rotated = apply_rope(
            x,
            cos,
            sin,
            positions=positions,
            cu_seqlens=cu_seqlens,
            offset=offset,
            layout=layout,
            interleaved=interleaved,
            inverse=inverse,
            rotary_offset=rotary_offset,
        )
        out.copy_(rotated)
