"""Attention in plain PyTorch: the definition that every other implementation is measured against.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropewalk.ops.attention import dropout
from ropewalk.ops.attention.backend import LibraryBackend, Refusal
from ropewalk.ops.attention.call import (
    AttentionCall,
    FarQK,
    allowed,
    rope_tables,
    token_indices,
    token_positions,
    zero_unattended,
)
from ropewalk.ops.attention.quantise.call import Quantized
from ropewalk.ops.attention.quantise.follow import follow
from ropewalk.ops.attention.quantise.reference import dequantise, quantise
from ropewalk.ops.cache.formats import dequantize
from ropewalk.ops.rope.reference import apply_rope
from ropewalk.ops.tracing import is_transformed
from ropewalk.schemes import PositionScheme, Rotation

BLOCK_SCORES = 1 << 24  # held at a time: 64 MiB in float32


class Reference(LibraryBackend):
    """The backend "reference"."""

    name = "reference"
    # Score mod, tables and far range are the scheme's, which it reads itself.
    reads: tuple[str, ...] = (
        *("q", "k", "v", "scheme", "causal", "window_left", "window_right", "mask", "key_lengths", "key_starts"),
        *("query_starts", "cu_seqlens_q", "cu_seqlens_k", "block_table", "positions_q", "positions_k", "blocks"),
        *("scale", "softcap", "k_scale", "v_scale", "sinks", "dropout_p", "seed", "keys_rotated", "score_mod"),
        *("score_mod_params", "n_learned_params", "tables", "far", "return_lse", "deterministic", "needs_backward"),
        *("return_max_logits", "precision"),
    )

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """It runs every call."""
        return None

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Attend by differentiable PyTorch operations, in blocks of queries: no (Tq, Tk) matrix is ever whole.

        The log-sum-exp of the scores is in float32 or more. The arithmetic is in float32 or in q's dtype, whichever is
        larger, rounded once. Where a gradient is needed, a block is computed again in the backward, unless a transform
        of `torch.func` is active. A `score_mod` of another package gets the matrix of all scores, which is whole then.
        """
        dtype = call.q.dtype
        call = in_dtype(call, torch.promote_types(dtype, torch.float32))
        out, lse = attend(call)
        if call.precision is not None and _needs_grad(call):
            out, lse = _follow_quantised(call, out.detach().to(dtype).to(out.dtype), lse.detach())
        return out.to(dtype), lse


def in_dtype(call: AttentionCall, dtype: torch.dtype) -> AttentionCall:
    """The call with q, k, v and the caller's features of far pairs in another dtype, quantised pages as numbers."""
    far = call.far
    if far is not None and far.given is not None:
        q_past, q_future, k_far = far.given
        features = FarQK(q_past.to(dtype), None if q_future is None else q_future.to(dtype), k_far.to(dtype))
        far = far._replace(given=features)
    if call.k_scale is not None and call.v_scale is not None:
        k, v = read_pages(call.k, call.k_scale, dtype), read_pages(call.v, call.v_scale, dtype)
    else:
        k, v = call.k.to(dtype), call.v.to(dtype)
    return call._replace(q=call.q.to(dtype), k=k, v=v, k_scale=None, v_scale=None, far=far)


def read_pages(pages: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of quantised pages (pages, K, page_size, D), in a dtype."""
    if scale.ndim:
        scale = scale[:, None] if scale.ndim == 1 else scale.transpose(1, 2)
    return dequantize(pages, scale, dtype)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attend in the dtype of q, k and v, every step rounded to it: the output and the log-sum-exp.

    Those of 8-bit products have no gradient.
    """
    if call.precision is None:
        return _attend_in_blocks(call, _attend_block)
    with torch.no_grad():
        return _attend_in_blocks(call, _attend_block)


_AttendBlock = Callable[..., tuple[Tensor, Tensor]]


def _attend_in_blocks(call: AttentionCall, attend_block: _AttendBlock) -> tuple[Tensor, Tensor]:
    """Attend by a function of a block of queries, which gets their features mapped."""
    call, scheme = gather_cache(call), scheme_of(call)
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    rows = max(1, BLOCK_SCORES // max(1, batch * heads * keys))
    # A score mod of another package may read the shape of scores: it is called once, with all of them.
    is_split = rows < queries and scheme.is_elementwise()
    recomputes = is_split and _needs_grad(call) and not is_transformed()  # under a transform autograd saves no hooks
    if recomputes:
        call = _with_own_indices(call)
    positions_q, positions_k = (positions.long() for positions in token_positions(call))
    far = map_far_features(call, positions_q, positions_k)
    q, k = map_features(call, positions_q, positions_k)
    if call.precision is not None:
        q, k, far, v = dequantise(quantise(q, k, far, call), call)
        call = call._replace(v=v)
    if scheme.has_axes():  # scores do not depend on them
        indices = token_indices(call)
        positions_q, positions_k = indices.queries, indices.keys
    if not is_split:
        return attend_block(q, k, far, positions_q, positions_k, slice(0, queries), call)
    if recomputes:
        attend_block = _bind_recomputed(attend_block, q, k, far, call)
    outs, lses = [], []
    for start in range(0, queries, rows):
        block = slice(start, min(start + rows, queries))
        far_block = _far_block(far, block)
        out, lse = attend_block(q[:, :, block], k, far_block, positions_q[:, block], positions_k, block, call)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _needs_grad(call: AttentionCall) -> bool:
    """Say whether a gradient flows to a tensor of a call."""
    features = () if call.far is None or call.far.given is None else call.far.given
    learned = (call.q, call.k, call.v, call.sinks, call.score_mod_params, *features, *rope_tables(call))
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)


_INDICES = (
    *("key_lengths", "key_starts", "query_starts", "cu_seqlens_q", "cu_seqlens_k"),
    *("positions_q", "positions_k"),
)


def _with_own_indices(call: AttentionCall) -> AttentionCall:
    """Return the call with copies of its indices, which the caller may write to before the backward."""
    indices = {name: getattr(call, name) for name in _INDICES}
    return call._replace(**{name: x.clone() for name, x in indices.items() if x is not None})


def _follow_quantised(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of 8-bit products with the gradients of products in 16 bits.

    With s the scores of features as they are, and p = exp(s − lse), these are dV = pᵀdO, ds = p(dO·vᵀ − δ + dlse) and
    dsink = exp(sink − lse)(dlse − δ), where δ = Σ dO·out. They are those of two functions of s and v, in which p, out
    and lse are constants, at s₀ = s: Σ p v + Σ p (s − s₀)(v − out), and Σ p (s − s₀) for the log-sum-exp.
    """

    def attend_block(*arguments: Any) -> tuple[Tensor, Tensor]:
        *_, block, block_call = arguments
        scores, _, v = _score_block(*arguments)
        never = scores == -torch.inf
        scores = scores.masked_fill(never, 0)
        block_out, block_lse = out[:, :, block], lse[:, :, block, None]
        p = torch.exp(scores.detach() - block_lse).masked_fill(never, 0)
        moved = p * (scores - scores.detach())
        grad_lse = moved.sum(-1)
        if block_call.sinks is not None:
            sinks = block_call.sinks.to(lse.dtype)[:, None]
            p_sink = torch.exp(sinks.detach() - block_lse[..., 0])
            grad_lse = grad_lse + p_sink * (sinks - sinks.detach())
        weights = (p + moved).unflatten(1, (v.shape[1], -1))
        return (weights @ v.unsqueeze(2)).flatten(1, 2) - block_out * grad_lse[..., None], grad_lse

    results = _attend_in_blocks(call._replace(precision=None), attend_block)
    learned = (call.q, call.k, call.v, call.sinks, call.score_mod_params, *rope_tables(call))
    return follow(out, lse, *results, *(x for x in learned if x is not None and x.requires_grad))


def quantise_call(call: AttentionCall) -> Quantized:
    """Return the operands of a call with 8-bit products, as `quantise` gives them: the definition of the prepass."""
    call = in_dtype(call, torch.promote_types(call.q.dtype, torch.float32))
    positions_q, positions_k = (positions.long() for positions in token_positions(call))
    with torch.no_grad():
        far = map_far_features(call, positions_q, positions_k)
        return quantise(*map_features(call, positions_q, positions_k), far, call)


def _bind_recomputed(
    attend_block: _AttendBlock, q: Tensor, k: Tensor, far: FarQK | None, call: AttentionCall
) -> _AttendBlock:
    """Return a block's attention computed again in the backward, where it raises if a tensor was written to since."""
    if torch.compiler.is_compiling():
        return functools.partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    tensors = [q, k, *(far or ()), call.v, call.mask, call.sinks, *_tensors_in(scheme_of(call))]
    read = [x for x in tensors if x is not None and not x.is_inference()]
    versions = [x._version for x in read]

    def attend_unchanged(*arguments: Any) -> tuple[Tensor, Tensor]:
        if [x._version for x in read] != versions:
            raise RuntimeError(
                "a tensor of this call of attention was written to before the backward, which computes scores again: "
                "q, k, v, mask, sinks and tensors of the scheme must stay as they are until then"
            )
        return attend_block(*arguments)

    return functools.partial(checkpoint, attend_unchanged, use_reentrant=False, preserve_rng_state=False)


def _tensors_in(scheme: PositionScheme) -> Iterator[Tensor]:
    """Yield the tensors that a scheme holds, and those of schemes in it."""
    for value in vars(scheme).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, PositionScheme):
            yield from _tensors_in(value)


def max_logits(call: AttentionCall) -> Tensor:
    """Return each head's largest scaled score over the pairs that attend, (H,), float32; −inf where there are none."""
    call = in_dtype(call, torch.promote_types(call.q.dtype, torch.float32))
    call = gather_cache(call)
    positions_q, positions_k = (positions.long() for positions in token_positions(call))
    far, (q, k) = map_far_features(call, positions_q, positions_k), map_features(call, positions_q, positions_k)
    if call.precision is not None:
        q, k, far, _ = dequantise(quantise(q, k, far, call), call)
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    rows = max(1, BLOCK_SCORES // max(1, batch * heads * keys))
    if scheme_of(call).has_axes():  # scores do not depend on them
        indices = token_indices(call)
        positions_q, positions_k = indices.queries, indices.keys

    def find_largest(block: slice) -> Tensor:
        distance = (positions_q[:, block, None] - positions_k[:, None])[:, None]
        scores = scores_of(q[:, :, block], k, _far_block(far, block), distance, scheme_of(call).far_window())
        may = allowed(block, call)
        scores = scores * call.scale
        scores = scores if may is None else scores.masked_fill(~may, -torch.inf)
        return scores.amax((0, 2, 3))

    if batch * queries * keys == 0:
        return q.new_full((heads,), -torch.inf, dtype=torch.float32)
    if rows >= queries:  # a loop would make the length a constant of a traced program
        return find_largest(slice(0, queries)).float()
    blocks = [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]
    return torch.stack([find_largest(block) for block in blocks]).amax(0).float()


def _far_block(far: FarQK | None, block: slice) -> FarQK | None:
    """Return the features of far pairs of a block of queries."""
    if far is None:
        return None
    q_future = None if far.q_future is None else far.q_future[:, :, block]
    return far._replace(q_past=far.q_past[:, :, block], q_future=q_future)


def gather_cache(call: AttentionCall) -> AttentionCall:
    """Lay the pages of a call out: a row for each batch row, or end to end the existing keys of packed sequences."""
    block_table, key_lengths, bounds = call.block_table, call.key_lengths, call.cu_seqlens_q
    if block_table is None:
        return call
    k, v = gather_pages(call.k, block_table), gather_pages(call.v, block_table)
    call = call._replace(k=k, v=v, block_table=None)
    if bounds is None or key_lengths is None:
        return call
    ends = key_lengths.long().clamp(0, k.shape[2]).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))
    tokens = torch.arange(k.shape[0] * k.shape[2], device=k.device)
    row = torch.searchsorted(ends, tokens, right=True).clamp(max=max(0, k.shape[0] - 1))
    index = (tokens - starts[row]).clamp(0, max(0, k.shape[2] - 1))
    k, v = (x[row, :, index].transpose(0, 1)[None] for x in (k, v))
    positions_k = None if call.positions_k is None else call.positions_k[:, index]
    return call._replace(k=k, v=v, key_lengths=None, cu_seqlens_k=starts, positions_k=positions_k)


def gather_pages(x: Tensor, block_table: Tensor) -> Tensor:
    """Lay pages (pages, K, page_size, D) out as (B, K, Tk, D); whatever the table holds, only pages are read."""
    if x.shape[0] == 0:
        x = x.new_zeros(1, *x.shape[1:])
    pages = x[block_table.clamp(0, x.shape[0] - 1)]  # (B, n_pages, K, page_size, D)
    return pages.transpose(1, 2).flatten(2, 3)


def map_features(call: AttentionCall, positions_q: Tensor, positions_k: Tensor) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; weigh those of k alone. Rotated keys are left alone."""
    q, k, scheme, head_dim = call.q, call.k, scheme_of(call), call.q.shape[-1]
    table_q = scheme.query_rotation(positions_q, head_dim) or scheme.rotation(positions_q, head_dim)
    if table_q is not None:
        q = _rotate(q, table_q)
    table_k = None if call.keys_rotated else scheme.rotation(positions_k, head_dim)
    if table_k is not None:
        k = _rotate(k, table_k)
        k = k if table_k.weights is None else k * table_k.weights.to(k.dtype)
    return q, k


def map_far_features(call: AttentionCall, positions_q: Tensor, positions_k: Tensor) -> FarQK | None:
    """Rotate q and k as far pairs score them, or return the caller's; None if the scheme has one range."""
    if call.far is not None and call.far.given is not None:
        return call.far.given
    scheme = scheme_of(call)
    if scheme.far_window() is None:
        return None

    def rotate(x: Tensor, positions: Tensor, of: str) -> Tensor:
        table = scheme.far_rotation(positions, x.shape[-1], of)
        return x if table is None else _rotate(x, table)

    none_ahead = call.causal and call.positions_q is None and call.positions_k is None
    q_future = None if none_ahead else rotate(call.q, positions_q, "future")
    return FarQK(rotate(call.q, positions_q, "past"), q_future, rotate(call.k, positions_k, "keys"))


def scheme_of(call: AttentionCall) -> PositionScheme:
    """The scheme, which every call has that was not flattened."""
    assert call.scheme is not None
    return call.scheme


def scores_of(q: Tensor, k: Tensor, far: FarQK | None, distance: Tensor, window: int | None) -> Tensor:
    """The scores of mapped features before they are scaled, (B, H, M, Tk): near ones, or far ones from a distance on.

    distance: query's position minus key's, (B or 1, 1, M, Tk).
    """

    def multiply(q: Tensor, k: Tensor) -> Tensor:
        grouped: Tensor = q.unflatten(1, (k.shape[1], -1))  # (B, K, H/K, M, D)
        return (grouped @ k.unsqueeze(2).mT).flatten(1, 2)

    scores = multiply(q, k)
    if far is None or window is None:
        return scores
    scores = torch.where(distance >= window, multiply(far.q_past, far.k), scores)
    if far.q_future is None:
        return scores
    return torch.where(distance <= -window, multiply(far.q_future, far.k), scores)


def _rotate(x: Tensor, table: Rotation) -> Tensor:
    return apply_rope(
        x,
        table.cos,
        table.sin,
        layout="bhtd",
        interleaved=table.interleaved,
        rotary_offset=table.offset,
        pair_block=table.pair_block,
    )


def dropout_mask(block: slice, call: AttentionCall) -> Tensor:
    """Return the mask of probabilities of a block of queries that dropout keeps, (B, H, M, Tk)."""
    if call.seed is None:
        raise ValueError("seed is None, but dropout_p is above 0: the call needs a seed, (1,), int64")
    (batch, heads, queries, _), keys, device = call.q.shape, call.k.shape[2], call.q.device
    rows = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    m, n = torch.arange(queries, device=device)[None], torch.arange(keys, device=device)[None]
    sequences = torch.zeros_like(m)
    if call.cu_seqlens_q is not None:  # tokens count in their sequence
        indices = token_indices(call)
        assert indices.sequences_q is not None
        sequences = indices.sequences_q.clamp(min=0)
        m, n = m - call.cu_seqlens_q.long()[sequences], indices.keys
    m, sequences = (x[:, None, block, None] for x in (m, sequences))
    return dropout.dropout_mask(call.seed, call.dropout_p, rows, sequences, m, n[:, None, None])


def _attend_block(
    q: Tensor,
    k: Tensor,
    far: FarQK | None,
    positions_q: Tensor,
    positions_k: Tensor,
    block: slice,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Attend from a block of queries, by q and k with their features mapped; the other tensors are the call's."""
    scores, attends_nothing, v = _score_block(q, k, far, positions_q, positions_k, block, call)
    if attends_nothing is not None:
        # Such a row attends all keys alike, and what comes of it is dropped: no NaN, and no gradient.
        scores = scores.masked_fill(attends_nothing, 0)
    lse = scores.logsumexp(dim=-1)
    nothing = torch.full((), -torch.inf, dtype=lse.dtype, device=lse.device)
    if call.sinks is not None:
        nothing = call.sinks.to(lse.dtype)[:, None]
        lse = torch.stack((lse, nothing.expand_as(lse))).logsumexp(dim=0)
    p = torch.exp(scores - lse[..., None])
    if call.dropout_p > 0:
        p = p.masked_fill(~dropout_mask(block, call), 0) * dropout.rescale(call.dropout_p)
    out = _sum_values(p, v, allowed(block, call) if call.precision is not None else None)
    if attends_nothing is not None:
        out = out.masked_fill(attends_nothing, 0)
        lse = torch.where(attends_nothing[..., 0], nothing, lse)
    return out, lse


def _sum_values(p: Tensor, v: Tensor, may: Tensor | None) -> Tensor:
    """Return the values weighed by probabilities.

    may: the pairs that attend, where a value that is not finite changes no other row. None: 0 · NaN is NaN.
    """

    def multiply(p: Tensor, v: Tensor) -> Tensor:
        grouped: Tensor = p.unflatten(1, (v.shape[1], -1))
        return (grouped @ v.unsqueeze(2)).flatten(1, 2)

    if may is None:
        return multiply(p, v)
    lost = ~v.isfinite()
    hits = multiply(may.expand_as(p).to(p.dtype), lost.to(p.dtype)) > 0
    return multiply(p, v.masked_fill(lost, 0)).masked_fill(hits, torch.nan)


def _score_block(
    q: Tensor,
    k: Tensor,
    far: FarQK | None,
    positions_q: Tensor,
    positions_k: Tensor,
    block: slice,
    call: AttentionCall,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the scores of a block of queries, −inf where none attends, the rows that attend nothing, and values.

    The rows are None where each attends a key. Values that none attends are zeros.
    """
    scheme, may, v = scheme_of(call), allowed(block, call), call.v
    if may is not None:
        # Rows and keys that attend nothing may hold anything: no NaN of theirs is multiplied, nor gets a gradient.
        k, v = zero_unattended(may, k, v)
        nowhere = ~may.any(dim=-1, keepdim=True)
        q = q.masked_fill(nowhere, 0)
        if far is not None:
            q_future = None if far.q_future is None else far.q_future.masked_fill(nowhere, 0)
            far = FarQK(far.q_past.masked_fill(nowhere, 0), q_future, *zero_unattended(may, far.k))
    distance = (positions_q[:, :, None] - positions_k[:, None])[:, None]
    scores = scores_of(q, k, far, distance, scheme.far_window()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = _modify(scores, distance, scheme)
    if may is not None:
        scores = scores.masked_fill(~may, -torch.inf)
    attends_nothing = None
    if may is not None or scheme.has_score_mod():
        attends_nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores, attends_nothing, v


def _modify(scores: Tensor, distance: Tensor, scheme: PositionScheme) -> Tensor:
    """Change scores by a scheme, or raise an error that names it."""
    if not scheme.has_score_mod():
        return scores
    changed = (scheme.score_mod if torch.compiler.is_compiling() else _bind_named(scheme))(scores, distance)
    name, shape = _name_of(scheme), tuple(scores.shape)
    if not isinstance(changed, Tensor) or changed.shape != scores.shape or changed.dtype != scores.dtype:
        kind = f"{changed.dtype} of shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
        raise TypeError(
            f"score_mod of {name} returned {kind}, but must return the scores changed: {scores.dtype} of shape {shape}"
        )
    return changed


def _name_of(scheme: PositionScheme) -> str:
    """Return the name of a scheme's class, of one that narrows another the other's."""
    inner = getattr(scheme, "inner", None)
    return _name_of(inner) if isinstance(inner, PositionScheme) else type(scheme).__name__


def _bind_named(scheme: PositionScheme) -> Callable[[Tensor, Tensor], Any]:
    """Return a scheme's `score_mod`, whose errors name the scheme and what it got."""

    def score_mod(scores: Tensor, distance: Tensor) -> Any:
        try:
            return scheme.score_mod(scores, distance)
        except Exception as error:
            if type(error) not in _PLAIN_ERRORS:  # those of torch's own, out of memory too, stay as they are
                raise
            raise type(error)(
                f"score_mod of {_name_of(scheme)} raised: {error}; scores have shape {tuple(scores.shape)}, "
                f"(B, H, Tq, Tk), and distance has {tuple(distance.shape)}: if heads and tokens are swapped, layout is "
                "the wrong one"
            ) from error

    return score_mod


_PLAIN_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)
