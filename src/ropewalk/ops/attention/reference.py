"""Attention in plain PyTorch: the definition that every other implementation is measured against.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropewalk.ops.attention.checks import Call, token_positions
from ropewalk.ops.rope.reference import apply_rope

BLOCK_SCORES = 1 << 24  # held at a time: 64 MiB in float32


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attend by differentiable PyTorch operations, in blocks of queries: no (Tq, Tk) matrix is ever whole.

    q is (B, H, Tq, D), k and v are (B, K, Tk, D); returns the output, like q, and the log-sum-exp of the scores,
    (B, H, Tq), in float32 or more. The arithmetic is in float32 or in q's dtype, whichever is larger, rounded once.
    Where a gradient is needed, a block is computed again in the backward.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = attend(q.to(dtype), k.to(dtype), v.to(dtype), call)
    return out.to(q.dtype), lse


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`attention` in the dtype of q, k and v, every step rounded to it."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    positions_q, positions_k = (positions.long() for positions in token_positions(q, k, call))
    if call.key_lengths is not None:
        # What lies past the lengths may be anything, NaN too.
        missing = (torch.arange(keys, device=k.device) >= call.key_lengths[:, None])[:, None, :, None]
        k, v = k.masked_fill(missing, 0), v.masked_fill(missing, 0)
    rotated_q, rotated_k = map_features(q, k, positions_q, positions_k, call)
    if batch * heads * queries * keys <= BLOCK_SCORES:
        return _attend_block(rotated_q, rotated_k, v, positions_q, positions_k, slice(0, queries), queries, call)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    rows = max(1, BLOCK_SCORES // max(1, batch * heads * keys))
    outs, lses = [], []
    for start in range(0, queries, rows):
        block = slice(start, min(start + rows, queries))
        arguments = (rotated_q[:, :, block], rotated_k, v, positions_q[:, block], positions_k, block, queries, call)
        if needs_grad and rows < queries:
            out, lse = checkpoint(_attend_block, *arguments, use_reentrant=False)
        else:
            out, lse = _attend_block(*arguments)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def map_features(q: Tensor, k: Tensor, positions_q: Tensor, positions_k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; what weighs them, to k alone."""
    table_q, table_k = (call.position.rotation(positions, q.shape[-1]) for positions in (positions_q, positions_k))
    if table_q is None or table_k is None:
        return q, k
    q, k = (
        apply_rope(x, table.cos, table.sin, layout="bhtd", interleaved=table.interleaved)
        for x, table in ((q, table_q), (k, table_k))
    )
    return q, k if table_k.weights is None else k * table_k.weights.to(k.dtype)


def allowed(block: slice, queries: int, keys: int, call: Call, device: torch.device) -> Tensor | None:
    """Which keys a block of queries may attend, (B or 1, H or 1, M, Tk); None where it may attend all.

    Causal and window go by index, aligned at the bottom right.
    """
    rows = torch.arange(block.start, block.stop, device=device) + (keys - queries)
    columns = torch.arange(keys, device=device)
    ahead = columns - rows[:, None]
    parts = []
    if call.causal:
        parts.append((ahead <= 0)[None, None])
    if call.window is not None:
        parts.append((ahead.abs() < call.window)[None, None])
    if call.key_lengths is not None:
        parts.append((columns < call.key_lengths[:, None])[:, None, None])
    if call.mask is not None:
        parts.append(call.mask[:, :, block])
    if not parts:
        return None
    every = parts[0]
    for part in parts[1:]:
        every = every & part
    return every


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, positions_q: Tensor, positions_k: Tensor, block: slice, queries: int, call: Call
) -> tuple[Tensor, Tensor]:
    keys = k.shape[2]
    grouped = q.unflatten(1, (k.shape[1], -1))  # (B, K, H/K, M, D)
    scores = (grouped @ k.unsqueeze(2).mT).flatten(1, 2) * call.scale
    scores = call.position.change_scores(scores, (positions_q[:, :, None] - positions_k[:, None])[:, None])
    may = allowed(block, queries, keys, call, q.device)
    attends_nothing = None
    if may is not None:
        # A row without a single key attends all of them, and what comes of it is dropped: no NaN, and no gradient.
        attends_nothing = ~may.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~(may | attends_nothing), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    p = torch.exp(scores - lse[..., None])
    out = (p.unflatten(1, (k.shape[1], -1)) @ v.unsqueeze(2)).flatten(1, 2)
    if attends_nothing is not None:
        out = out.masked_fill(attends_nothing, 0)
        lse = lse.masked_fill(attends_nothing[..., 0], -torch.inf)
    return out, lse
