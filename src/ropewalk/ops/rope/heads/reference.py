"""Tables with rows for each head: which calls have them, and their gradients in plain PyTorch.

Tables are (n, H, R/2), looked up by positions, or (B or 1, T, H, R/2), a row for each token and head.

Shape letters: B batch, T tokens, H heads (of q, of k and of the tables), D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.launch.kinds import existing, plain
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.reference import apply_rope, split_pairs
from ropewalk.ops.rope.validate import as_bthd


class HeadGradients(NamedTuple):
    """The gradients of the results of a rotation by tables per head, which its own gradients are computed from."""

    q_grad: Tensor
    k_grad: Tensor | None
    q: Tensor
    k: Tensor | None
    call: RopeCall
    needs_dx: bool  # of q and k, beside those of the tables


class TableRows(NamedTuple):
    """The memory to which a kernel writes the gradient of a table: (units, T, H, R/2)."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    batch_rows: int  # of a unit, which are summed

    @property
    def n_units(self) -> int:
        return self.shape[0]


def share_rows(cos: Tensor, positions: Tensor | None, layout: str) -> bool:
    """Say whether all batch rows read the same rows of the tables."""
    table_rows = cos.shape[0] if positions is None else positions.shape[0]
    return table_rows == 1 and (positions is None or (positions.ndim == 2 and layout != "thd"))


def table_rows(x: Tensor, call: RopeCall, most_units: int) -> TableRows:
    """Say what a kernel writes for x like these, in at most so many parts where batch rows share the tables' rows."""
    cos, positions, layout = call.cos, call.positions, call.flags.layout
    batch, tokens, n_heads, _ = as_bthd(x, layout).shape
    batch_rows = 1
    if batch > 1 and share_rows(cos, positions, layout):
        batch_rows = math.ceil(batch / most_units)
    n_units = math.ceil(batch / batch_rows)
    is_final = positions is None and n_units == cos.shape[0]
    sum_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32  # `promote_types` is an operator
    dtype = cos.dtype if is_final else sum_dtype
    return TableRows((n_units, tokens, n_heads, cos.shape[-1]), dtype, batch_rows)


def token_positions(tokens: int, positions: Tensor, layout: str) -> Tensor:
    """Return each token's position, (B or 1, T) or (total,), of a call with positions or offsets."""
    if layout == "thd" or positions.ndim == 2:
        return positions
    return positions[:, None] + torch.arange(tokens, device=positions.device)


def add_to_rows(grads: Tensor, table: Tensor, call: RopeCall) -> Tensor:
    """Return the gradient of a table from that of each token, (B or fewer, T, H, R/2): the same bits every time."""
    positions, layout = call.positions, call.flags.layout
    if positions is None:
        if grads.shape[0] != table.shape[0]:
            grads = grads.sum(0, keepdim=True)
        return grads.to(table.dtype)
    if share_rows(table, positions, layout):
        grads = grads.sum(0, keepdim=True) if grads.shape[0] > 1 else grads
    position = token_positions(grads.shape[1], positions, layout).long()
    n_rows = table.shape[0]
    # The last row takes tokens whose positions are outside the table.
    row = torch.where((position >= 0) & (position < n_rows), position, n_rows).flatten()
    total = grads.new_zeros(n_rows + 1, *table.shape[1:])
    grads = grads.flatten(0, 1)
    if grads.is_cuda:
        total.index_put_((row,), grads, accumulate=True)  # sorts the rows: `index_add_` adds in any order
    else:
        total.index_add_(0, row, grads)
    return total[:n_rows].to(table.dtype)


def table_gradients(grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin; they are differentiable too. `grads` are those of the rotated `xs`."""
    cos, sin, flags = call.cos, call.sin, call.flags
    dtype = torch.promote_types(xs[0].dtype, torch.float32)
    rotary = slice(flags.rotary_offset, flags.rotary_offset + 2 * cos.shape[-1])
    totals: list[Tensor] = []
    for x, grad in zip(xs, grads, strict=True):
        pairs = []
        for tensor in (x, grad):
            tensor = as_bthd(tensor, flags.layout)[..., rotary].to(dtype)
            a, b = split_pairs(tensor, flags.interleaved, flags.pair_block)
            pairs += [a, b] if flags.pair_block is None else [a.flatten(-2), b.flatten(-2)]
        a, b, grad_a, grad_b = pairs
        dcos, dsin = grad_a * a + grad_b * b, grad_b * a - grad_a * b
        totals = [dcos, dsin] if not totals else [totals[0] + dcos, totals[1] + dsin]
    dcos, dsin = totals
    return add_to_rows(dcos, cos, call), add_to_rows(-dsin if flags.inverse else dsin, sin, call)


def differentiate(
    grads: Sequence[Tensor], xs: Sequence[Tensor], call: RopeCall, needs_dx: bool
) -> tuple[list[Tensor] | None, Tensor, Tensor]:
    """Return the gradients of `xs`, if they are needed, and those of cos and sin; they are differentiable too."""
    cos, sin, positions, cu_seqlens, offset, flags, _ = call
    dxs = None
    if needs_dx:
        dxs = [
            apply_rope(
                grad,
                cos,
                sin,
                positions=positions,
                cu_seqlens=cu_seqlens,
                offset=offset,
                layout=flags.layout,
                interleaved=flags.interleaved,
                inverse=not flags.inverse,
                rotary_offset=flags.rotary_offset,
                pair_block=flags.pair_block,
            )
            for grad in grads
        ]
    return dxs, *table_gradients(grads, xs, call)


@plain
@torch.no_grad()
def launch_gradients(record: HeadGradients, on: Steps) -> Sequence[Tensor | None]:
    """Return the gradients of q and k, if they are needed, of cos and of sin, outside of autograd."""
    q_grad, k_grad, q, k, call, needs_dx = record
    grads, xs = existing((q_grad, k_grad)), existing((q, k))
    found, dcos, dsin = differentiate(grads, xs, call, needs_dx)
    dxs = [torch.empty_like(x).copy_(dx) for x, dx in zip(xs, found or (), strict=False)]
    dq, dk = (*dxs, None, None)[:2]
    return dq, dk, dcos.contiguous(), dsin.contiguous()
