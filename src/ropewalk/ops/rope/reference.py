"""The rotation in plain PyTorch: the definition that every other implementation is tested against.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.ops.rope.call import RopeCall


def rotate_pairs(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (a, b) to (a·cos − b·sin, a·sin + b·cos): the whole of rotary embedding.

    The arithmetic is in float32 or in the pairs' dtype, whichever is larger; the caller rounds the result once.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    a, b, cos, sin = a.to(dtype), b.to(dtype), cos.to(dtype), sin.to(dtype)
    return a * cos - b * sin, a * sin + b * cos


def split_pairs(x: Tensor, interleaved: bool, pair_block: int | None = None) -> tuple[Tensor, Tensor]:
    """View the first and the second features of the pairs of x (..., R), each (..., R/2).

    With a pair_block P, of x (..., R/P, P) as `split_blocks` views it, each (..., R/P, P/2).
    """
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = split_blocks(x, pair_block).chunk(2, dim=-1)
    return first, second


def split_blocks(x: Tensor, width: int | None) -> Tensor:
    """View the last dimension of x as blocks, (..., n, width); None leaves it as it is."""
    return x if width is None else x.unflatten(-1, (-1, width))


def split_tables(cos: Tensor, sin: Tensor, pair_block: int | None) -> tuple[Tensor, Tensor]:
    """View tables (..., R/2) as the pairs that `split_pairs` gives."""
    if pair_block is None:
        return cos, sin
    return split_blocks(cos, pair_block // 2), split_blocks(sin, pair_block // 2)


def join_pairs(a: Tensor, b: Tensor, interleaved: bool, pair_block: int | None = None) -> Tensor:
    """Undo `split_pairs`."""
    if interleaved:
        return torch.stack((a, b), dim=-1).flatten(-2)
    joined = torch.cat((a, b), dim=-1)
    return joined if pair_block is None else joined.flatten(-2)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return each packed token's position in its own sequence, (total,); −1 for a token that no sequence covers."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].contiguous().long()
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
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Look up each token's cos and sin, (B or 1, T, R/2), and whether its position lies in the table, (B or 1, T).

    With axes, the position of each of its pairs. Tables per head give (B or 1, T, H, R/2). The last is None where every
    position lies in the table by construction. Rows outside it are undefined.
    """
    if cos.ndim == 4 or (cos.ndim == 3 and positions is None):
        return cos, sin, None
    if positions is None and cu_seqlens is None:
        rows = slice(offset, offset + tokens)
        return cos[None, rows], sin[None, rows], None
    if positions is None:
        assert cu_seqlens is not None
        in_sequence = packed_positions(cu_seqlens, tokens)
        position = torch.where(in_sequence >= 0, in_sequence + offset, -1)[None]
    elif axes is not None:
        n_axes = positions.shape[0]
        is_axis = (axes >= 0) & (axes < n_axes)
        positions = positions.long().unsqueeze(1) if layout == "thd" else positions.long()
        position = torch.where(is_axis[:, None, None], positions[torch.where(is_axis, axes, 0)], -1)
        position = position.movedim(0, -1).contiguous()  # tables of that layout: the sums of one position, bit for bit
    elif positions.ndim == 2:
        position = positions.long()
    elif layout == "thd":
        position = positions.long()[None]
    else:
        position = positions.long()[:, None] + torch.arange(tokens, device=positions.device)
    n_rows = cos.shape[0]
    inside = (position >= 0) & (position < n_rows)
    if n_rows == 0:
        cos = sin = cos.new_zeros(1, *cos.shape[1:])
    row = torch.where(inside, position, 0)
    if axes is not None:
        pair = torch.arange(cos.shape[1], device=cos.device)
        return cos[row, pair], sin[row, pair], inside.all(dim=-1)
    return cos[row], sin[row], inside


def broadcast_rows(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    inverse: bool,
    layout: str,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Look up `token_rows` in shapes that broadcast against x, with sin negated for `inverse`."""
    token_axis, head_axis = (-2, -3) if layout == "bhtd" else (-3, -2)
    cos, sin, inside = token_rows(
        cos,
        sin,
        x.shape[token_axis],
        positions=positions,
        cu_seqlens=cu_seqlens,
        offset=offset,
        layout=layout,
        axes=axes,
    )
    if layout == "thd":
        cos, sin, inside = cos[0], sin[0], None if inside is None else inside[0]
    if inside is not None:
        inside = inside[..., None].unsqueeze(head_axis)
    if inverse:
        sin = -sin
    if cos.ndim == x.ndim:  # tables per head
        return (cos.transpose(1, 2), sin.transpose(1, 2), inside) if layout == "bhtd" else (cos, sin, inside)
    return cos.unsqueeze(head_axis), sin.unsqueeze(head_axis), inside


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
    axes: Tensor | None = None,
    pair_block: int | None = None,
) -> Tensor:
    """Rotate one tensor out of place by differentiable, composable PyTorch operations.

    Arguments are those of `ropewalk.apply_rope`, already checked, with an int `positions` given as `offset`.
    """
    cos, sin, inside = broadcast_rows(x, cos, sin, positions, cu_seqlens, offset, inverse, layout, axes)
    rotary_dim = 2 * cos.shape[-1]
    before, middle, after = x.split([rotary_offset, rotary_dim, x.shape[-1] - rotary_offset - rotary_dim], dim=-1)
    a, b = rotate_pairs(*split_pairs(middle, interleaved, pair_block), *split_tables(cos, sin, pair_block))
    rotated = torch.cat((before, join_pairs(a, b, interleaved, pair_block).to(x.dtype), after), dim=-1)
    return rotated if inside is None else torch.where(inside, rotated, torch.nan)


@torch.no_grad()
def rotate(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
    """Write the rotation of each tensor of `xs` into its partner in `outs`, which may be the tensor itself.

    The same as `apply_rope`, without the copies that a differentiable form needs.
    """
    flags = call.flags
    cos, sin, inside = broadcast_rows(xs[0], *call[:5], flags.inverse, flags.layout, call.axes)
    rotary = slice(flags.rotary_offset, flags.rotary_offset + 2 * cos.shape[-1])
    pairing = flags.interleaved, flags.pair_block
    cos, sin = split_tables(cos, sin, flags.pair_block)
    for x, out in zip(xs, outs, strict=True):
        if out is not x:
            out[..., : rotary.start].copy_(x[..., : rotary.start])
            out[..., rotary.stop :].copy_(x[..., rotary.stop :])
        a, b = rotate_pairs(*split_pairs(x[..., rotary], *pairing), cos, sin)
        out_a, out_b = split_pairs(out[..., rotary], *pairing)
        out_a.copy_(a)
        out_b.copy_(b)
        if inside is not None:
            out.masked_fill_(~inside, torch.nan)
