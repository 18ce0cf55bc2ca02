"""The rotation of CPU tensors outside of autograd: the definition's arithmetic, in chunks of tokens.

A pass over a whole tensor leaves the cache, and a temporary of its size costs page faults. So each chunk is rotated
while it is in the cache, and its result is written where it belongs. Interleaved pairs are complex numbers in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.reference import split_blocks, split_pairs, split_tables, token_rows
from ropewalk.ops.rope.validate import as_bthd

# Elements of a chunk, for each thread. Source and result in float32 take 1 MiB of a core's L2 cache.
CHUNK = 1 << 17


@torch.no_grad()
def rotate(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
    """Write the rotation of each tensor of `xs` into its partner in `outs`, which may be the tensor itself."""
    flags = call.flags
    cos, sin, inside = token_rows(
        call.cos,
        call.sin,
        xs[0].shape[flags.layout.index("t")],
        positions=call.positions,
        cu_seqlens=call.cu_seqlens,
        offset=call.offset,
        layout=flags.layout,
        axes=call.axes,
    )
    dtype = torch.promote_types(xs[0].dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    if flags.inverse:
        sin = -sin
    rotary = slice(flags.rotary_offset, flags.rotary_offset + 2 * cos.shape[-1])
    is_per_head = cos.ndim == 4
    cos, sin = split_tables(cos, sin, flags.pair_block)
    forms = (torch.complex(cos, sin),) if flags.interleaved else (torch.cat((cos, cos), dim=-1), sin)
    # (B or 1, T, 1 or H, R/2 or R), or (…, R/P, P) of blocks.
    tables = forms if is_per_head else tuple(table.unsqueeze(2) for table in forms)
    rotate_chunk = _rotate_interleaved if flags.interleaved else _rotate_half_split
    outside = None if inside is None or bool(inside.all()) else ~inside[..., None, None]
    for x, out in zip(xs, outs, strict=True):
        if x.numel() == 0:
            continue
        inplace = out is x
        x, out = as_bthd(x, flags.layout), as_bthd(out, flags.layout)
        rotated, out_rotated = x, out
        if rotary.stop - rotary.start < x.shape[-1]:
            if not inplace:
                out[..., : rotary.start].copy_(x[..., : rotary.start])
                out[..., rotary.stop :].copy_(x[..., rotary.stop :])
            rotated, out_rotated = x[..., rotary], out[..., rotary]
        blocks = (split_blocks(rotated, flags.pair_block), split_blocks(out_rotated, flags.pair_block))
        _rotate_by_chunks(*blocks, tables, inplace, dtype, rotate_chunk)
        if outside is not None:
            out.masked_fill_(outside, torch.nan)


def _rotate_by_chunks(
    x: Tensor,
    out: Tensor,
    tables: tuple[Tensor, ...],
    inplace: bool,
    dtype: torch.dtype,
    rotate_chunk: Callable[..., None],
) -> None:
    """Rotate all features of `x` into `out`: whole batch rows at a time, or a part of one's tokens.

    x is (B, T, H, R), or (B, T, H, R/P, P) of blocks.
    """
    batch, tokens = x.shape[:2]
    most = max(1, CHUNK * torch.get_num_threads() // x.shape[2:].numel())
    in_one_pass = tables[0].is_complex() and _is_complex_in_memory(x, dtype) and _is_complex_in_memory(out, dtype)
    if in_one_pass or batch * tokens <= most:
        rotate_chunk(x, out, *tables, inplace, dtype)
        return
    n_rows, n_tokens = (max(1, most // tokens), tokens) if tokens <= most else (1, most)
    tables = tuple(table.expand(batch, *table.shape[1:]) for table in tables)
    for row in range(0, batch, n_rows):
        for token in range(0, tokens, n_tokens):
            part = slice(row, row + n_rows), slice(token, token + n_tokens)
            rotate_chunk(x[part], out[part], *(table[part] for table in tables), inplace, dtype)


def _rotate_half_split(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inplace: bool, dtype: torch.dtype) -> None:
    """Rotate pairs (i, i + R/2): x · cos, to which each half adds the other times sin; cos holds each angle twice."""
    if inplace or x.dtype != dtype:
        x = x.to(dtype, copy=True)
    rotated = out if out.dtype == dtype else torch.empty_like(x)
    torch.mul(x, cos, out=rotated)
    (a, b), (rotated_a, rotated_b) = split_pairs(x, False), split_pairs(rotated, False)
    rotated_a.addcmul_(b, sin, value=-1)
    rotated_b.addcmul_(a, sin)
    if rotated is not out:
        out.copy_(rotated)


def _rotate_interleaved(x: Tensor, out: Tensor, table: Tensor, inplace: bool, dtype: torch.dtype) -> None:
    """Rotate pairs (2i, 2i + 1) as complex numbers."""
    if _is_complex_in_memory(x, dtype) and _is_complex_in_memory(out, dtype):
        torch.mul(_as_complex(x), table, out=_as_complex(out))
        return
    rotated = x.to(dtype, memory_format=torch.contiguous_format, copy=True)
    _as_complex(rotated).mul_(table)
    out.copy_(rotated)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _is_complex_in_memory(x: Tensor, dtype: torch.dtype) -> bool:
    """Say whether pairs of neighbours in `x` can be viewed as complex numbers of `dtype`'s precision."""
    *outer, last = x.stride()
    return x.dtype == dtype and last == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in outer)
