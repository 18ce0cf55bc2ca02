"""Attention in plain PyTorch: the definition that every other implementation is measured against.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropewalk.ops.attention import philox
from ropewalk.ops.attention.checks import Call, token_places, token_positions
from ropewalk.ops.attention.prepare import FarFeatures
from ropewalk.ops.rope.reference import apply_rope
from ropewalk.positions import Rotation

BLOCK_SCORES = 1 << 24  # held at a time: 64 MiB in float32


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, far: FarFeatures | None = None) -> tuple[Tensor, Tensor]:
    """Attend by differentiable PyTorch operations, in blocks of queries: no (Tq, Tk) matrix is ever whole.

    q is (B, H, Tq, D), k (B, K, Tk, D) and v (B, K, Tk, Dv), where packed sequences are one batch row; or k and v are
    pages, (pages, K, page_size, D or Dv). Returns the output, (B, H, Tq, Dv), and the log-sum-exp of the scores,
    (B, H, Tq), in float32 or more. The arithmetic is in float32 or in q's dtype, whichever is larger, rounded once.
    What pairs that are far apart meet with may be given, as `far`. Where a gradient is needed, a block is computed
    again in the backward.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if far is not None:
        far = FarFeatures(*(None if x is None else x.to(dtype) for x in far))  # type: ignore[arg-type]
    out, lse = attend(q.to(dtype), k.to(dtype), v.to(dtype), call, far)
    return out.to(q.dtype), lse


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, far: FarFeatures | None = None) -> tuple[Tensor, Tensor]:
    """`attention` in the dtype of q, k and v, every step rounded to it."""
    if call.block_table is not None:
        k, v = gather_pages(k, call.block_table), gather_pages(v, call.block_table)
        call = call._replace(block_table=None)
    queries, keys = q.shape[2], k.shape[2]
    positions_q, positions_k = (positions.long() for positions in token_positions(q, k, call))
    exist = existing(queries, keys, call, k.device)
    if exist is not None:
        # What does not exist may be anything, NaN too.
        missing = ~exist[:, None, :, None]
        k, v = k.masked_fill(missing, 0), v.masked_fill(missing, 0)
    rotated_q, rotated_k = map_features(q, k, positions_q, positions_k, call)
    if far is None:
        far = map_far_features(q, k, positions_q, positions_k, call)
    batch, heads = q.shape[:2]
    if batch * heads * queries * keys <= BLOCK_SCORES:
        block = slice(0, queries)
        return _attend_block(rotated_q, rotated_k, v, far, positions_q, positions_k, block, queries, call)
    learned = (rotated_q, rotated_k, v, *(far or ()), call.sinks, *getattr(call.position, "__dict__", {}).values())
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in learned)
    rows = max(1, BLOCK_SCORES // max(1, batch * heads * keys))
    outs, lses = [], []
    for start in range(0, queries, rows):
        block = slice(start, min(start + rows, queries))
        of_block = far
        if far is not None:
            future = None if far.future is None else far.future[:, :, block]
            of_block = far._replace(past=far.past[:, :, block], future=future)
        arguments = (
            *(rotated_q[:, :, block], rotated_k, v, of_block),
            *(positions_q[:, block], positions_k, block, queries, call),
        )
        if needs_grad and rows < queries:
            out, lse = checkpoint(_attend_block, *arguments, use_reentrant=False)
        else:
            out, lse = _attend_block(*arguments)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def gather_pages(x: Tensor, block_table: Tensor) -> Tensor:
    """Lay pages (pages, K, page_size, D) out as (B, K, Tk, D); whatever the table holds, only pages are read."""
    if x.shape[0] == 0:
        x = x.new_zeros(1, *x.shape[1:])
    pages = x[block_table.clamp(0, x.shape[0] - 1)]  # (B, n_pages, K, page_size, D)
    return pages.transpose(1, 2).flatten(2, 3)


def existing(queries: int, keys: int, call: Call, device: torch.device) -> Tensor | None:
    """Which keys exist, (B or 1, Tk); None where all do."""
    if call.cu_seqlens_k is not None:
        sequences = token_places(queries, keys, call, device).sequences_k
        return None if sequences is None else sequences >= 0
    columns = torch.arange(keys, device=device)
    starts, ends = call.key_starts, call.key_lengths
    after = None if starts is None else columns >= starts[:, None]
    before = None if ends is None else columns < ends[:, None]
    if after is None or before is None:
        return before if after is None else after
    return after & before


def map_features(q: Tensor, k: Tensor, positions_q: Tensor, positions_k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; what weighs them, to k alone. Rotated keys are left alone."""
    scheme, head_dim = call.position, q.shape[-1]
    table_q = scheme.query_rotation(positions_q, head_dim) or scheme.rotation(positions_q, head_dim)
    if table_q is not None:
        q = _rotate(q, table_q)
    table_k = None if call.keys_rotated else scheme.rotation(positions_k, head_dim)
    if table_k is not None:
        k = _rotate(k, table_k)
        k = k if table_k.weights is None else k * table_k.weights.to(k.dtype)
    return q, k


def map_far_features(q: Tensor, k: Tensor, positions_q: Tensor, positions_k: Tensor, call: Call) -> FarFeatures | None:
    """Do to q and k what the scheme does to features of pairs that are far apart; None if it knows none."""
    scheme = call.position
    if scheme.far_window() is None:
        return None

    def turn(x: Tensor, positions: Tensor, of: str) -> Tensor:
        table = scheme.far_rotation(positions, x.shape[-1], of)
        return x if table is None else _rotate(x, table)

    none_ahead = call.causal and call.positions_q is None and call.positions_k is None
    future = None if none_ahead else turn(q, positions_q, "future")
    return FarFeatures(turn(q, positions_q, "past"), future, turn(k, positions_k, "keys"))


def scores_of(q: Tensor, k: Tensor, far: FarFeatures | None, distance: Tensor, window: int | None) -> Tensor:
    """The scores of mapped features before they are scaled, (B, H, M, Tk): near ones, or far ones from a distance on.

    distance: query's position minus key's, (B or 1, 1, M, Tk).
    """

    def multiply(q: Tensor, k: Tensor) -> Tensor:
        grouped: Tensor = q.unflatten(1, (k.shape[1], -1))  # (B, K, H/K, M, D)
        return (grouped @ k.unsqueeze(2).mT).flatten(1, 2)

    scores = multiply(q, k)
    if far is None or window is None:
        return scores
    scores = torch.where(distance >= window, multiply(far.past, far.keys), scores)
    if far.future is None:
        return scores
    return torch.where(distance <= -window, multiply(far.future, far.keys), scores)


def _rotate(x: Tensor, table: Rotation) -> Tensor:
    return apply_rope(x, table.cos, table.sin, layout="bhtd", interleaved=table.interleaved, rotary_offset=table.offset)


def allowed(block: slice, queries: int, keys: int, call: Call, device: torch.device) -> Tensor | None:
    """Which keys a block of queries may attend, (B or 1, H or 1, M, Tk); None where it may attend all.

    Causal and window go by places.
    """
    places = token_places(queries, keys, call, device)
    parts = []
    if places.sequences_q is not None and places.sequences_k is not None:
        sequences_q, sequences_k = places.sequences_q[:, block, None], places.sequences_k[:, None]
        parts.append(((sequences_q == sequences_k) & (sequences_k >= 0))[:, None])
    if call.causal or call.window is not None:
        ahead = (places.keys[:, None] - places.queries[:, block, None])[:, None]
        if call.causal:
            parts.append(ahead <= 0)
        if call.window is not None:
            parts.append(ahead.abs() < call.window)
    if call.key_starts is not None or call.key_lengths is not None:
        exist = existing(queries, keys, call, device)
        if exist is not None:
            parts.append(exist[:, None, None])
    if call.mask is not None:
        parts.append(call.mask[:, :, block])
    if not parts:
        return None
    every = parts[0]
    for part in parts[1:]:
        every = every & part
    return every


def kept(block: slice, batch: int, heads: int, queries: int, keys: int, call: Call, device: torch.device) -> Tensor:
    """Which probabilities of a block of queries dropout keeps, (B, H, M, Tk)."""
    if call.seed is None:
        raise ValueError("seed is None, but dropout_p is above 0: the call needs a seed, (1,), int64")
    rows = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    m, n = torch.arange(queries, device=device)[None], torch.arange(keys, device=device)[None]
    sequences = torch.zeros_like(m)
    if call.cu_seqlens_q is not None:  # tokens count in their sequence
        places = token_places(queries, keys, call, device)
        assert places.sequences_q is not None
        sequences = places.sequences_q.clamp(min=0)
        m, n = m - call.cu_seqlens_q.long()[sequences], places.keys
    m, sequences = (x[:, None, block, None] for x in (m, sequences))
    return philox.keep(call.seed, call.dropout_p, rows, sequences, m, n[:, None, None])


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: FarFeatures | None,
    positions_q: Tensor,
    positions_k: Tensor,
    block: slice,
    queries: int,
    call: Call,
) -> tuple[Tensor, Tensor]:
    keys, key_heads = k.shape[2], k.shape[1]
    may = allowed(block, queries, keys, call, q.device)
    attends_nothing = None
    if may is not None:
        # A row without a single key attends all of them, as zeros, and what comes of it is dropped: no NaN, and no
        # gradient, whatever the row holds.
        attends_nothing = ~may.any(dim=-1, keepdim=True)
        q = q.masked_fill(attends_nothing, 0)
        if far is not None:
            future = None if far.future is None else far.future.masked_fill(attends_nothing, 0)
            far = far._replace(past=far.past.masked_fill(attends_nothing, 0), future=future)
    distance = (positions_q[:, :, None] - positions_k[:, None])[:, None]
    scores = scores_of(q, k, far, distance, call.position.far_window()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = call.position.change_scores(scores, distance)
    if may is not None and attends_nothing is not None:
        scores = scores.masked_fill(~(may | attends_nothing), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    nothing = torch.full((), -torch.inf, dtype=lse.dtype, device=lse.device)
    if call.sinks is not None:
        nothing = call.sinks.to(lse.dtype)[:, None]
        lse = torch.stack((lse, nothing.expand_as(lse))).logsumexp(dim=0)
    p = torch.exp(scores - lse[..., None])
    if call.dropout_p > 0:
        keep = kept(block, q.shape[0], q.shape[1], queries, keys, call, q.device)
        p = p.masked_fill(~keep, 0) * philox.rescale(call.dropout_p)
    out = (p.unflatten(1, (key_heads, -1)) @ v.unsqueeze(2)).flatten(1, 2)
    if attends_nothing is not None:
        out = out.masked_fill(attends_nothing, 0)
        lse = torch.where(attends_nothing[..., 0], nothing, lse)
    return out, lse
