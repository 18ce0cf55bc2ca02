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

from ropewalk.ops.attention import api
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.backend import LN_2, Saved, Wanted
from ropewalk.ops.attention.backends import KERNELS, backward_of, choose
from ropewalk.ops.attention.tables import map_far_features, map_features
from ropewalk.ops.once import differentiable_once
from ropewalk.parallel.call import ShardedCall, attend, learned_of, outside, with_learned
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
    for run_q in layout.runs_of(layout.rank):
        for run_k in layout.runs_of(source):
            if (call.causal and run_k.start >= run_q.stop) or _is_beyond(call, run_q, run_k):
                continue
            is_same = run_q.start == run_k.start
            masked = _cuts(call, run_q, run_k) or not _is_one_document(layout, run_q, run_k)
            if masked and layout.bounds is not None and not _share_documents(layout, run_q, run_k):
                continue
            pieces.append(Piece(run_q.rows, run_k.rows, call.causal and is_same, masked))
    return pieces


def _is_beyond(call: ShardedCall, run_q: Any, run_k: Any) -> bool:
    """Say whether no key of a run is in the window of any query of another."""
    before = call.left is not None and run_q.start - (run_k.stop - 1) > call.left
    return before or (call.right is not None and run_k.start - (run_q.stop - 1) > call.right)


def _cuts(call: ShardedCall, run_q: Any, run_k: Any) -> bool:
    """Say whether some key of a run is outside of the window of some query of another."""
    before = call.left is not None and run_q.stop - 1 - run_k.start > call.left
    return before or (call.right is not None and run_k.stop - 1 - run_q.start > call.right)


def _is_one_document(layout: SequenceLayout, run_q: Any, run_k: Any) -> bool:
    if layout.bounds is None:
        return True
    start, stop = min(run_q.start, run_k.start), max(run_q.stop, run_k.stop)
    return any(begin <= start and stop <= end for begin, end in layout.documents_in(start, stop))


def _share_documents(layout: SequenceLayout, run_q: Any, run_k: Any) -> bool:
    both = layout.documents_in(run_q.start, run_q.stop), layout.documents_in(run_k.start, run_k.stop)
    return bool(set(both[0]) & set(both[1]))


def _striped_pieces(call: ShardedCall, source: int) -> list[Piece]:
    layout = call.layout
    n_q, n_k = layout.counts[layout.rank], layout.counts[source]
    if min(n_q, n_k) == 0:
        return []
    if call.has_window or layout.bounds is not None or (call.causal and not layout.is_interleaved):
        return [Piece(slice(0, n_q), slice(0, n_k), False, True)]
    if not call.causal:
        return [Piece(slice(0, n_q), slice(0, n_k))]
    if source <= layout.rank:  # query i attends keys 0 to i
        return [Piece(slice(0, n_q), slice(0, n_q), True)]
    return [Piece(slice(1, n_q), slice(0, n_q - 1), True)] if n_q > 1 else []


def _keywords(call: ShardedCall, piece: Piece, source: int) -> dict[str, Any]:
    """Return the keywords of `attention` for a piece."""
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
    return keywords


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
        document_q, document_k = (torch.searchsorted(bounds, x, right=True) for x in (queries, keys))
        mask &= (document_q[:, None] == document_k[None, :]) & (document_q[:, None] < bounds.numel())
    return mask


def _merge(out: Tensor, lse: Tensor, piece_out: Tensor, piece_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two outputs by their log-sum-exp; −inf in both stays zeros."""
    total = torch.logaddexp(lse, piece_lse)
    base = torch.where(total.isinf(), 0.0, total)
    weights = (torch.exp(x - base)[..., None] for x in (lse, piece_lse))
    return out * next(weights) + piece_out.to(out.dtype) * next(weights), total


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
    """The backward goes round once more, and differentiates each piece by the merged log-sum-exp."""

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
                keywords = _keywords(call, piece, source)
                part, lse_of_part = attend(call, q[:, :, piece.q], rows_k, rows_v, **keywords)
                rows = (slice(None), slice(None), piece.q)
                out[rows], lse[rows] = _merge(out[rows], lse[rows], part, lse_of_part)
            _wait(works)
            visiting = coming
        ctx.call = call._replace(q=q[:0], k=k[:0], v=v[:0])  # autograd keeps the tensors
        ctx.save_for_backward(q, k, v, out, lse, *learned)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *learned = ctx.saved_tensors
        call: ShardedCall = ctx.call
        layout = call.layout
        whole = _Whole(out, lse, grad_out, grad_lse, (grad_out * out).sum(-1) - grad_lse)
        grad_q, *grads_learned = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (q, *learned))
        visiting = [k, v]
        arriving: tuple[list[Tensor], list[Any]] = [], []
        for step in range(layout.size):
            source = (layout.rank - step) % layout.size
            is_last = step + 1 == layout.size
            coming, works = ([], []) if is_last else _send_on(visiting, layout)
            grads_kv = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in visiting]
            for piece in find_pieces(call, source):
                rows, rows_k = ((slice(None), slice(None), x) for x in (piece.q, piece.k))
                tensors = q[rows], visiting[0][rows_k], visiting[1][rows_k]
                piece_whole = _Whole(*(x[rows] for x in whole))
                parts = _differentiate(call, _keywords(call, piece, source), tensors, learned, piece_whole)
                totals = grad_q[rows], grads_kv[0][rows_k], grads_kv[1][rows_k], *grads_learned
                for total, part in zip(totals, parts, strict=True):
                    if part is not None:
                        total += part
            # Gradients follow what they are of, and arrive while the next shard is differentiated.
            received, works_of_grads = arriving
            _wait(works_of_grads)
            for total, part in zip(grads_kv, received, strict=False):
                total += part
            arriving = _send_on(grads_kv, layout) if layout.size > 1 else (grads_kv, [])
            _wait(works)
            visiting = coming
        received, works_of_grads = arriving
        _wait(works_of_grads)
        results = (grad_q, *received, *grads_learned)
        return None, *(grad.to(x.dtype) for grad, x in zip(results, (q, k, v, *learned), strict=True))


class _Whole(NamedTuple):
    """The merged results of queries, and their gradients."""

    out: Tensor  # (B, H, n, Dv)
    lse: Tensor  # (B, H, n), natural
    grad_out: Tensor
    grad_lse: Tensor
    delta: Tensor  # O · dO − the log-sum-exp's gradient


def _differentiate(
    call: ShardedCall,
    keywords: dict[str, Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    learned: list[Tensor],
    whole: _Whole,
) -> tuple[Tensor | None, ...]:
    """Return a piece's part of the gradients of its q, k, v and of what is learned.

    Kernels take the merged output and log-sum-exp in the place of the piece's own.
    """
    arguments = {"position": call.scheme, "layout": "bhtd", "return_lse": True, **call.options, **keywords}
    impl = arguments.pop("impl")
    with outside(), torch.enable_grad():  # parameters of scores may be learned
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        params = [x.detach().requires_grad_() for x in learned]
        arguments["position"] = with_learned(call.scheme, iter(params))
        piece_call = api.make_call(q, k, v, **arguments)
        backend = KERNELS.get(choose(piece_call, impl).name)
    if backend is None or (params and call.is_two_range):
        call = call._replace(scheme=arguments["position"])
        return _differentiate_again(call, keywords, (q, k, v), params, whole)
    with torch.no_grad():
        far = map_far_features(piece_call)
        saved = Saved(*map_features(piece_call), whole.lse.contiguous() / LN_2, *(far or ()))
        piece_call = without_inputs(piece_call, saved)
        score_params = piece_call.score_mod_params
        wanted = Wanted(score_mod_params=score_params is not None and score_params.requires_grad)
        grads = backward_of(backend, piece_call, wanted).backward(
            piece_call, whole.out.to(q.dtype), saved, whole.grad_out.to(q.dtype), whole.grad_lse.contiguous(), wanted
        )
    param_grads: tuple[Tensor | None, ...] = (None,) * len(params)
    if wanted.score_mod_params:
        assert score_params is not None
        assert grads.score_mod_params is not None
        param_grads = torch.autograd.grad(score_params, params, grads.score_mod_params, allow_unused=True)
    return grads.q, grads.k, grads.v, *param_grads


def _differentiate_again(
    call: ShardedCall,
    keywords: dict[str, Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    params: list[Tensor],
    whole: _Whole,
) -> tuple[Tensor | None, ...]:
    """Do it by attending again, for a backend that has no backward of its own.

    With w = exp(lse of the piece − lse), the piece's output has the gradient w · dO, and its log-sum-exp
    w · (O of the piece · dO − delta).
    """
    with torch.enable_grad():
        out, lse_of_piece = attend(call, *tensors, **keywords)
    base = torch.where(whole.lse.isinf(), 0.0, whole.lse)
    weight = torch.exp(lse_of_piece.detach() - base)
    inner = (out.detach().to(whole.grad_out.dtype) * whole.grad_out).sum(-1)
    grads = (whole.grad_out * weight[..., None]).to(out.dtype), weight * (inner - whole.delta)
    return torch.autograd.grad((out, lse_of_piece), (*tensors, *params), grads, allow_unused=True)
