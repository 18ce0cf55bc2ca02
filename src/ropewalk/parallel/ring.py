"""Attention to keys that travel from rank to rank: the method "ring".

A rank holds two shards of keys at a time. Outputs are merged by their log-sum-exp in float32, and gradients of keys are
summed in float32 as they travel home.

Letters: B batch, T tokens, H heads, D head dim, n ranks.

Source: Ring Attention (https://arxiv.org/abs/2310.01889), §3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.parallel.call import ShardedCall, attend, learned_of, with_learned
from ropewalk.parallel.layout import SequenceLayout
from ropewalk.parallel.shards import accumulator


class Piece(NamedTuple):
    """Rows of local queries, and rows of a visiting shard of keys that they attend."""

    q: slice
    k: slice
    causal: bool = False  # query i attends keys 0 to i
    masked: bool = False  # what else is allowed, a mask says


def attend_ring(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Send keys round, attend each shard, and merge."""
    learned = learned_of(call.scheme)
    out, lse = _Ring.apply(call, call.q, call.k, call.v, *learned)
    if call.sinks is not None:  # once, after the merge; padding rows stay as they are
        sinks = call.sinks.to(lse.dtype)[:, None]
        total = torch.where(call.layout.valid, torch.logaddexp(lse, sinks.expand_as(lse)), lse)
        out = out * torch.exp(torch.where(total.isinf(), 0.0, lse - total))[..., None]
        lse = total
    return out.to(call.q.dtype), lse


def find_pieces(call: ShardedCall, source: int) -> list[Piece]:
    """Return what a rank's queries attend of the shard of rank `source`."""
    layout = call.layout
    if layout.kind == "striped":
        return _striped_pieces(call, source)
    pieces = []
    for of_q in layout.runs_of(layout.rank):
        for of_k in layout.runs_of(source):
            if (call.causal and of_k.start >= of_q.stop) or _is_beyond(call, of_q, of_k):
                continue
            is_same = of_q.start == of_k.start
            masked = _cuts(call, of_q, of_k) or not _is_one_document(layout, of_q, of_k)
            if masked and layout.bounds is not None and not _share_documents(layout, of_q, of_k):
                continue
            pieces.append(Piece(of_q.rows, of_k.rows, call.causal and is_same, masked))
    return pieces


def _is_beyond(call: ShardedCall, of_q: Any, of_k: Any) -> bool:
    """Say whether no key of a run is in the window of any query of another."""
    before = call.left is not None and of_q.start - (of_k.stop - 1) > call.left
    return before or (call.right is not None and of_k.start - (of_q.stop - 1) > call.right)


def _cuts(call: ShardedCall, of_q: Any, of_k: Any) -> bool:
    """Say whether some key of a run is outside of the window of some query of another."""
    before = call.left is not None and of_q.stop - 1 - of_k.start > call.left
    return before or (call.right is not None and of_k.stop - 1 - of_q.start > call.right)


def _is_one_document(layout: SequenceLayout, of_q: Any, of_k: Any) -> bool:
    if layout.bounds is None:
        return True
    start, stop = min(of_q.start, of_k.start), max(of_q.stop, of_k.stop)
    return any(begin <= start and stop <= end for begin, end in layout.documents_in(start, stop))


def _share_documents(layout: SequenceLayout, of_q: Any, of_k: Any) -> bool:
    both = layout.documents_in(of_q.start, of_q.stop), layout.documents_in(of_k.start, of_k.stop)
    return bool(set(both[0]) & set(both[1]))


def _striped_pieces(call: ShardedCall, source: int) -> list[Piece]:
    layout = call.layout
    n_q, n_k = ((layout.n_tokens - rank + layout.size - 1) // layout.size for rank in (layout.rank, source))
    if min(n_q, n_k) <= 0:
        return []
    if call.has_window or layout.bounds is not None:
        return [Piece(slice(0, n_q), slice(0, n_k), False, True)]
    if not call.causal:
        return [Piece(slice(0, n_q), slice(0, n_k))]
    if source <= layout.rank:  # query i attends keys 0 to i
        return [Piece(slice(0, n_q), slice(0, n_q), True)]
    return [Piece(slice(1, n_q), slice(0, n_q - 1), True)] if n_q > 1 else []


def _attend_piece(
    call: ShardedCall, piece: Piece, source: int, k: Tensor, v: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend one piece; q, k and v are its rows."""
    layout = call.layout
    keywords: dict[str, Any] = {"causal": piece.causal}
    shards = layout.places.view(layout.size, layout.n_local)
    rows_q, rows_k = shards[layout.rank, piece.q], shards[source, piece.k]
    if piece.masked:
        keywords = {"mask": _mask(call, rows_q, rows_k)[None, None]}
    if call.reads_positions:
        keywords["positions_q"], keywords["positions_k"] = (
            layout.positions_at(rows)[None] for rows in (rows_q, rows_k)
        )
    return attend(call, q, k, v, **keywords)


def _mask(call: ShardedCall, queries: Tensor, keys: Tensor) -> Tensor:
    """Return what tokens at these indices attend, (Tq, Tk)."""
    ahead = keys[None, :] - queries[:, None]
    mask = ahead <= 0 if call.causal else torch.ones_like(ahead, dtype=torch.bool)
    if call.left is not None:
        mask &= ahead >= -call.left
    if call.right is not None:
        mask &= ahead <= call.right
    bounds = call.layout.cu_seqlens
    if bounds is not None:
        of_q, of_k = (torch.searchsorted(bounds, x, right=True) for x in (queries, keys))
        mask &= (of_q[:, None] == of_k[None, :]) & (of_q[:, None] < bounds.numel())
    return mask


def _merge(out: Tensor, lse: Tensor, of_piece: Tensor, lse_of_piece: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two outputs by their log-sum-exp; −inf in both stays zeros."""
    total = torch.logaddexp(lse, lse_of_piece)
    base = torch.where(total.isinf(), 0.0, total)
    weights = (torch.exp(x - base)[..., None] for x in (lse, lse_of_piece))
    return out * next(weights) + of_piece.to(out.dtype) * next(weights), total


def _send_on(tensors: list[Tensor], layout: SequenceLayout) -> tuple[list[Tensor], list[Any]]:
    """Send to the next rank and receive from the one before, without waiting."""
    following, preceding = (dist.get_global_rank(layout.group, (layout.rank + step) % layout.size) for step in (1, -1))
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    operations = [dist.P2POp(dist.isend, x, following, layout.group) for x in sent]
    operations += [dist.P2POp(dist.irecv, x, preceding, layout.group) for x in received]
    return received, dist.batch_isend_irecv(operations)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    """The backward goes round once more: each piece again, differentiated by the merged log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        layout = call.layout
        dtype = accumulator(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        lse = torch.full_like(out[..., 0], -torch.inf).masked_fill_(~layout.valid, 0)
        visiting = [k, v]
        for step in range(layout.size):
            source = (layout.rank - step) % layout.size
            is_last = step + 1 == layout.size
            coming, works = ([], []) if is_last else _send_on(visiting, layout)
            for piece in find_pieces(call, source):
                rows_k, rows_v = (x[:, :, piece.k] for x in visiting)
                part, lse_of_part = _attend_piece(call, piece, source, rows_k, rows_v, q[:, :, piece.q])
                rows = (slice(None), slice(None), piece.q)
                out[rows], lse[rows] = _merge(out[rows], lse[rows], part, lse_of_part)
            _wait(works)
            visiting = coming
        ctx.call = call._replace(q=q[:0], k=k[:0], v=v[:0])  # autograd keeps the tensors
        ctx.save_for_backward(q, k, v, out, lse, *learned)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *learned = ctx.saved_tensors
        call: ShardedCall = ctx.call
        layout = call.layout
        delta = (grad_out * out).sum(-1) - grad_lse
        grads = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (q, k, v, *learned)]
        grad_q, grad_k, grad_v, *grads_learned = grads
        visiting = [k, v, grad_k, grad_v]  # the gradients travel with what they are of
        for step in range(layout.size):
            source = (layout.rank - step) % layout.size
            for piece in find_pieces(call, source):
                rows = (slice(None), slice(None), piece.q)
                rows_k = (slice(None), slice(None), piece.k)
                parts = _differentiate(
                    call,
                    piece,
                    source,
                    (q[rows], visiting[0][rows_k], visiting[1][rows_k]),
                    learned,
                    grad_out[rows],
                    lse[rows],
                    delta[rows],
                )
                for total, part in zip(
                    (grad_q[rows], visiting[2][rows_k], visiting[3][rows_k], *grads_learned), parts, strict=True
                ):
                    if part is not None:
                        total += part
            if layout.size > 1:
                visiting, works = _send_on(visiting, layout)
                _wait(works)
        results = (grad_q, visiting[2], visiting[3], *grads_learned)
        return None, *(grad.to(x.dtype) for grad, x in zip(results, (q, k, v, *learned), strict=True))


def _differentiate(
    call: ShardedCall,
    piece: Piece,
    source: int,
    tensors: tuple[Tensor, Tensor, Tensor],
    learned: list[Tensor],
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return a piece's part of the gradients of its q, k, v and of what is learned.

    With w = exp(lse of the piece − lse), the piece's output has the gradient w · dO, and its log-sum-exp
    w · (O of the piece · dO − delta).
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        params = [x.detach().requires_grad_() for x in learned]
        call = call._replace(scheme=with_learned(call.scheme, iter(params)))
        out, lse_of_piece = _attend_piece(call, piece, source, k, v, q)
    base = torch.where(lse.isinf(), 0.0, lse)
    weight = torch.exp(lse_of_piece.detach() - base)
    inner = (out.detach().to(grad_out.dtype) * grad_out).sum(-1)
    grads = (grad_out * weight[..., None]).to(out.dtype), weight * (inner - delta)
    return torch.autograd.grad((out, lse_of_piece), (q, k, v, *params), grads, allow_unused=True)
