"""The truth of `ropewalk.attention`: formulas of its own, by the docstrings and the papers, in plain PyTorch.

In float64 it is what a result is compared with. In another dtype it is the baseline, plain PyTorch in that dtype: maps
of features are in float32 and rounded once, products are of that dtype, and scores, softmax and dropout are in float32.

It imports nothing of `ropewalk.ops`, and reads the fields of schemes: it calls no method of them, but the `score_mod`
and the rotations of a scheme that a user wrote, which define it. Tables of cosines, amplitudes, feature weights and
ALiBi's slopes are float32 in every dtype, as `rope_table`, `Rotation` and `alibi_slopes` say.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), R rotary
dim, S packed sequences, M and N blocks of queries and keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk import (
    Alibi,
    ExpoSB,
    NoPosition,
    PositionScheme,
    QKNorm,
    QuantizedProducts,
    ReRope,
    Rope,
    SelfExtend,
    T5Bias,
)


class Result(NamedTuple):
    """What `attention` returns with return_lse and return_max_logits; the last two in float32 or float64."""

    out: Tensor  # in q's dtype and the layout of the call, gated
    lse: Tensor  # (B, H, Tq) or (H, total_q), to base e
    max_logits: Tensor  # (H,), not differentiable


class Arguments(NamedTuple):
    """The keywords of `attention`."""

    position: PositionScheme = NoPosition()
    causal: bool = False
    window: Any = None
    scale: float | None = None
    mask: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    key_starts: Tensor | None = None
    query_starts: Tensor | None = None
    block_table: Tensor | None = None
    blocks: Any = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    keys_rotated: bool = False
    norm: QKNorm | None = None
    gate: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layout: str = "bthd"
    return_lse: bool = False
    return_max_logits: bool = False
    deterministic: bool | None = None
    precision: str | QuantizedProducts | None = None
    impl: str | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, *, seed: int | Tensor | None = None, **keywords: Any) -> Result:
    """Attend as `ropewalk.attention` does for the same arguments. Differentiable by autograd.

    Under autocast pass q, k, v and gate as it casts them, and call outside of it. Where other tensors are learned, they
    may have any dtype.

    seed: of dropout, as `attention` draws it: `torch.randint(2**63 - 1, (1,), device=q.device)`; a tensor of one
        number saves the wait for a GPU.
    """
    given = Arguments(**keywords)
    dtype = q.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    q = _heads_first(q, given.layout)
    k, v, n_rows = _read_keys(k, v, given, dtype)
    tokens = _index_tokens(q, k, n_rows, given)
    may = _find_pairs(q, k, tokens, given)
    if may is not None:
        q, k, v = _fill_unattended(q, k, v, may if given.precision is None else _existing(k, tokens, given), given.norm)
    distance = (tokens.position_q[..., :, None] - tokens.position_k[..., None, :])[:, None]
    features = _map_features(q.to(work), k.to(work), tokens, given, dtype)
    if given.precision is not None:
        out, lse, largest = _attend_in_8_bits(features, v, tokens, distance, may, given, dtype)
    else:
        out, lse, largest = _attend_features(features, v, tokens, distance, may, seed, given)
    if given.layout == "thd":
        out, lse = out[0].transpose(0, 1), lse[0]
    elif given.layout == "bthd":
        out = out.transpose(1, 2)
    if given.gate is not None:
        gate = given.gate if given.gate.ndim == out.ndim else given.gate[..., None]
        out = (out.to(work) * torch.sigmoid(gate.to(work))).to(dtype)
    return Result(out, lse, largest)


def _attend_features(
    features: Features,
    v: Tensor,
    tokens: Tokens,
    distance: Tensor,
    may: Tensor | None,
    seed: int | Tensor | None,
    given: Arguments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (B, H, Tq, Dv), of v's dtype, the log-sum-exp (B, H, Tq) and the largest scores (H,)."""
    scores, largest = _change_all(_score(features, distance, given.position), features, distance, may, given)
    return *_attend_scores(scores, v, tokens, seed, given), largest


def _change_all(
    scores: Tensor, features: Features, distance: Tensor, may: Tensor | None, given: Arguments
) -> tuple[Tensor, Tensor]:
    """Return the scores that the softmax gets, and the largest ones before they are capped."""
    scores = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    scores = scores * (features.q.shape[-1] ** -0.5 if given.scale is None else float(given.scale))
    largest = _find_largest(scores, may)
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    scores = _change_scores(scores, distance, given.position)
    if may is not None:
        scores = scores.masked_fill(~may, -torch.inf)
    return scores, largest


# Keys and values


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """View x as (B, H, T, D)."""
    if layout == "thd":
        return x.transpose(0, 1)[None]
    return x if layout == "bhtd" else x.transpose(1, 2)


def _read_keys(k: Tensor, v: Tensor, given: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return k and v, (B, K, Tk, D), and how many rows of a cache are end to end in one batch row."""
    over_cache = given.layout == "thd" and k.ndim == 4
    heads_first = given.layout == "bhtd"

    def read(x: Tensor, scale: Tensor | None) -> Tensor:
        if given.block_table is None:
            return x
        if heads_first:
            x = x.transpose(1, 2)
        x = _read_numbers(x, scale, dtype)  # (pages, page_size, K, D)
        if x.shape[0] == 0:
            x = x.new_zeros(1, *x.shape[1:])
        x = x[given.block_table.long().clamp(0, x.shape[0] - 1)].flatten(1, 2)  # (B, Tk, K, D)
        return x.transpose(1, 2) if heads_first else x

    k, v = read(k, given.k_scale).to(dtype), read(v, given.v_scale).to(dtype)
    if over_cache:
        rows, values = (x.flatten(0, 1).transpose(0, 1)[None] for x in (k, v))
        return rows, values, k.shape[0]
    return _heads_first(k, given.layout), _heads_first(v, given.layout), 1


def _read_numbers(pages: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what stored numbers of pages (pages, page_size, K, D) mean: the number times its scale."""
    if scale is None:
        return pages
    work = torch.float64 if dtype == torch.float64 else torch.float32
    scale = scale.to(work)
    if pages.dtype == torch.uint8:  # two a byte, the low one first; 8 is zero; a scale for 32 features
        numbers = torch.stack((pages % 16, pages // 16), dim=-1).flatten(-2).to(work) - 8
        return numbers * scale.repeat_interleave(32, dim=-1)
    # Of int8 each token and head has a scale, of float8 each head or the cache.
    return pages.float().to(work) * (scale[..., None] if scale.ndim else scale)


# Tokens and masks


class Tokens(NamedTuple):
    """Where tokens stand. A batch dimension of 1 is of all rows."""

    index_q: Tensor  # (B or 1, Tq): the key that a query stands at, in its sequence
    index_k: Tensor  # (B or 1, Tk)
    position_q: Tensor  # (B or 1, Tq): for score mods and ranges
    position_k: Tensor
    axes_q: Tensor  # (B or 1, Tq), or (A, B or 1, Tq): for rotations
    axes_k: Tensor
    number_q: Tensor  # (Tq,): of a query in its sequence
    sequence_q: Tensor | None  # (Tq,): S for none; None: the batch is dense
    sequence_k: Tensor | None


def _index_tokens(q: Tensor, k: Tensor, n_rows: int, given: Arguments) -> Tokens:
    n_queries, n_keys, device = q.shape[2], k.shape[2], q.device
    numbers_q, numbers_k = torch.arange(n_queries, device=device), torch.arange(n_keys, device=device)
    number_q, sequence_q, sequence_k = numbers_q, None, None
    index_k = numbers_k[None]
    bounds_q = given.cu_seqlens_q
    if bounds_q is None:
        starts = given.query_starts
        first = n_keys - n_queries if starts is None else starts.long()[:, None]
        index_q = numbers_q[None] + first
    else:
        bounds_q = bounds_q.long()
        sequence_q, number_q = _count_in_sequence(bounds_q, numbers_q)
        if given.key_lengths is None:
            bounds_k = bounds_q if given.cu_seqlens_k is None else given.cu_seqlens_k.long()
            sequence_k, number_k = _count_in_sequence(bounds_k, numbers_k)
            lengths_k = bounds_k.diff()
        else:  # rows of a cache
            capacity = n_keys // max(n_rows, 1)
            sequence_k, number_k = numbers_k // max(capacity, 1), numbers_k % max(capacity, 1)
            lengths_k = given.key_lengths.long().clamp(max=capacity)
        index_k = number_k[None]
        index_q = (number_q + F.pad(lengths_k - bounds_q.diff(), (0, 1))[sequence_q])[None]

    counted_q, counted_k = index_q, index_k
    if given.key_starts is not None:
        counted_q, counted_k = (x - given.key_starts.long()[:, None] for x in (index_q, index_k))
    axes_q, axes_k = (
        counted if positions is None else _with_batch(positions.long(), given)
        for counted, positions in ((counted_q, given.positions_q), (counted_k, given.positions_k))
    )
    if _has_axes(given.position):  # scores do not depend on them
        position_q, position_k = index_q, index_k
    else:
        position_q, position_k = axes_q, axes_k
    return Tokens(index_q, index_k, position_q, position_k, axes_q, axes_k, number_q, sequence_q, sequence_k)


def _count_in_sequence(bounds: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return each packed token's sequence, S for none, and its number there."""
    sequences = torch.searchsorted(bounds[1:], tokens, right=True)
    return sequences, tokens - bounds[sequences]


def _has_axes(scheme: PositionScheme) -> bool:
    return isinstance(scheme, Rope) and scheme.axes is not None


def _with_batch(positions: Tensor, given: Arguments) -> Tensor:
    """Return positions (B or 1, T), or (A, B or 1, T) with axes."""
    return positions.unsqueeze(-2) if given.layout == "thd" else positions


def _find_pairs(q: Tensor, k: Tensor, tokens: Tokens, given: Arguments) -> Tensor | None:
    """Return which pairs attend, (B or 1, H or 1, Tq, Tk); None for all."""
    parts = []
    if tokens.sequence_q is not None and tokens.sequence_k is not None and given.cu_seqlens_q is not None:
        n_sequences = given.cu_seqlens_q.numel() - 1
        same = tokens.sequence_q[:, None] == tokens.sequence_k
        parts.append((same & (tokens.sequence_q < n_sequences)[:, None])[None, None])
    ahead = (tokens.index_k[:, None, :] - tokens.index_q[:, :, None])[:, None]
    left, right = _read_window(given.window)
    if given.causal:
        right = 0
    if left >= 0:
        parts.append(ahead >= -left)
    if right >= 0:
        parts.append(ahead <= right)
    if given.key_lengths is not None:
        if tokens.sequence_k is None:
            parts.append((tokens.index_k < given.key_lengths[:, None])[:, None, None])
        else:
            parts.append((tokens.index_k < given.key_lengths[tokens.sequence_k])[:, None, None])
    if given.key_starts is not None:
        parts.append((tokens.index_k >= given.key_starts[:, None])[:, None, None])
    if given.mask is not None:
        mask = given.mask
        if mask.ndim == 2:
            mask = mask[None, None]
        elif mask.ndim == 3:
            mask = mask[:, None]
        parts.append(mask)
    if given.blocks is not None:
        parts.append(_read_blocks(given.blocks, q.shape[2], k.shape[2]))
    if not parts:
        return None
    may = parts[0]
    for part in parts[1:]:
        may = may & part
    return may.expand(-1, -1, q.shape[2], k.shape[2])


def _read_window(window: Any) -> tuple[int, int]:
    """Return how many keys before its own a query attends, and how many after; −1 for all."""
    if window is None:
        return -1, -1
    if isinstance(window, (tuple, list)):
        left, right = window
        return int(left), int(right)
    return int(window) - 1, int(window) - 1


def _read_blocks(blocks: Any, n_queries: int, n_keys: int) -> Tensor:
    """Return the pairs of listed blocks, of a `BlockLists` or a FlexAttention BlockMask."""
    is_flex = hasattr(blocks, "kv_num_blocks")
    if is_flex:
        block_q, block_k = blocks.BLOCK_SIZE
        lists = blocks.kv_num_blocks, blocks.kv_indices
        full_lists = blocks.full_kv_num_blocks, blocks.full_kv_indices
    else:
        block_q, block_k = blocks.block_q, blocks.block_k
        lists, full_lists = (blocks.counts, blocks.indices), (blocks.full_counts, blocks.full_indices)

    def expand(counts: Tensor, indices: Tensor) -> Tensor:
        n_blocks = -(-n_keys // block_k)
        counts, indices = torch.broadcast_tensors(counts[..., None], indices.long())
        is_listed = torch.arange(indices.shape[3], device=indices.device) < counts
        is_listed = is_listed & (indices >= 0) & (indices < n_blocks)
        found = torch.zeros(*indices.shape[:3], n_blocks + 1, dtype=torch.bool, device=indices.device)
        found = found.scatter(3, torch.where(is_listed, indices, n_blocks), True)[..., :n_blocks]
        return found.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, :n_queries, :n_keys]

    pairs = expand(*lists)
    keys = torch.arange(n_keys, device=pairs.device)
    if is_flex and blocks.mask_mod is not None:
        rows, heads, queries = (
            torch.arange(n, device=pairs.device) for n in (*blocks.kv_num_blocks.shape[:2], n_queries)
        )
        pairs = pairs & blocks.mask_mod(
            rows[:, None, None, None], heads[:, None, None], queries[:, None], keys.expand(1, 1, 1, -1)
        )
    elif not is_flex and blocks.spans is not None:
        first, end = blocks.spans[..., :1], blocks.spans[..., 1:]
        pairs = pairs & (keys >= first) & (keys < end)
    return pairs if full_lists[0] is None else pairs | expand(*full_lists)


def _fill_unattended(
    q: Tensor, k: Tensor, v: Tensor, may: Tensor, norm: QKNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v where no token that attends nothing holds a NaN: such a token gets no gradient.

    Features are ones, as a norm divides by their size; values are zeros.
    """
    is_query = may.any(dim=3)  # (B or 1, H or 1, Tq)
    is_key = may.any(dim=2)
    if is_key.shape[1] > 1:
        is_key = is_key.unflatten(1, (k.shape[1], -1)).any(dim=2)
    is_value = is_key
    if norm is not None and norm.across_heads:  # one head's features are in the statistic of all
        is_query, is_key = is_query.any(dim=1, keepdim=True), is_key.any(dim=1, keepdim=True)
    q, k = (x.masked_fill(~attends[..., None], 1.0) for x, attends in ((q, is_query), (k, is_key)))
    return q, k, v.masked_fill(~is_value[..., None], 0.0)


# Maps of features


class Features(NamedTuple):
    """q (B, H, Tq, D) and k (B, K, Tk, D) as pairs score them; those of far pairs are None without a second range."""

    q: Tensor
    k: Tensor
    q_past: Any = None
    q_future: Any = None
    k_far: Any = None


def _map_features(q: Tensor, k: Tensor, tokens: Tokens, given: Arguments, dtype: torch.dtype) -> Features:
    """Normalise features and map them as the scheme says, rounded to a dtype."""
    scheme, norm = given.position, given.norm
    if norm is not None and not norm.after:
        q, k = _normalize(q, norm.q_weight, norm), _normalize(k, norm.k_weight, norm)
        if type(scheme) is not Rope:  # a pass of its own
            q, k = q.to(dtype).to(q.dtype), k.to(dtype).to(k.dtype)
    if isinstance(scheme, (ReRope, SelfExtend)):
        features = _map_two_ranges(q, k, tokens, scheme)
    elif type(scheme) not in _KNOWN:
        features = _map_by_own(q, k, tokens, scheme, given.keys_rotated)
    else:
        if isinstance(scheme, Rope):
            q = _rotate(q, scheme, tokens.axes_q)
            k = k if given.keys_rotated else _rotate(k, scheme, tokens.axes_k)
        elif isinstance(scheme, ExpoSB):
            pairs = Rope(interleaved=True)
            q = _rotate(q, pairs, tokens.axes_q, _amplitude(tokens.axes_q))
            if not given.keys_rotated:
                k = _rotate(k, pairs, tokens.axes_k, _amplitude(tokens.axes_k))
                k = k * _band_gain(k.shape[-1], k.device).square().float().to(k.dtype)
        features = Features(q, k)
    if norm is not None and norm.after:
        q, k = _normalize(features.q, norm.q_weight, norm), _normalize(features.k, norm.k_weight, norm)
        features = Features(q, k)
    rounded: Any = (None if x is None else x.to(dtype) for x in features)
    return Features(*rounded)


_KNOWN = (NoPosition, Rope, ReRope, SelfExtend, ExpoSB, Alibi, T5Bias)


def _map_by_own(q: Tensor, k: Tensor, tokens: Tokens, scheme: PositionScheme, keys_rotated: bool) -> Features:
    """Turn pairs by the tables of a user's scheme, which define it."""

    def turn(x: Tensor, table: Any) -> Tensor:
        if table is None:
            return x
        if table.weights is not None or table.scale is not None:
            raise TypeError(f"position is {type(scheme).__name__} with weights or a scale, but must have tables alone")
        how = Rope(rotary_offset=table.offset, interleaved=table.interleaved, pair_block=table.pair_block)
        return torch.cat(_turn_pairs(x, table.cos, table.sin, how), dim=-1)

    if type(scheme).query_rotation is not PositionScheme.query_rotation:
        raise TypeError(f"position is {type(scheme).__name__} with a query_rotation, but must have a rotation alone")
    at_q, at_k, head_dim = tokens.position_q, tokens.position_k, q.shape[-1]
    near = turn(q, scheme.rotation(at_q, head_dim)), k if keys_rotated else turn(k, scheme.rotation(at_k, head_dim))
    if scheme.far_window() is None:
        return Features(*near)
    past, future = (turn(q, scheme.far_rotation(at_q, head_dim, of)) for of in ("past", "future"))
    return Features(*near, past, future, turn(k, scheme.far_rotation(at_k, head_dim, "keys")))


def _normalize(x: Tensor, weight: Tensor | None, norm: QKNorm) -> Tensor:
    """Divide x (B, H, T, D) by the root mean square of a head's features, or of all heads'; times the weights."""
    dims = (1, 3) if norm.across_heads else (3,)
    x = x / torch.sqrt((x * x).mean(dims, keepdim=True) + norm.eps)
    if weight is None:
        return x
    weight = weight.to(x.device, x.dtype) + norm.offset
    if weight.numel() > x.shape[3]:
        weight = weight.reshape(x.shape[1], 1, x.shape[3])
    return x * weight.reshape(-1, 1, x.shape[3])


def _rotate(x: Tensor, rope: Rope, positions: Tensor, factor: Tensor | None = None, of_pairs: float = 1.0) -> Tensor:
    """Turn pairs of features of x (B, H, T, D) by position times frequency.

    positions: (B or 1, T), or (A, B or 1, T) with axes. factor: (B or 1, T), float32, of all features; of_pairs: of
    rotated ones.
    """
    if rope.inv_freq is None:
        width = x.shape[-1] - rope.rotary_offset if rope.rotary_dim is None else rope.rotary_dim
        pair = torch.arange(width // 2, dtype=torch.float64, device=x.device)
        frequencies = torch.pow(float(rope.base), -2 * pair / width)
    else:
        frequencies = rope.inv_freq.to(x.device, torch.float64)
    if rope.axes is not None and positions.ndim == 3:
        of_pair = positions[rope.axes.to(x.device).long()].movedim(0, -1)  # (B, T, R/2)
    else:
        of_pair = positions[..., None]
    angles = of_pair.double() * frequencies
    cos, sin = (
        (rope.attention_factor * function(angles)).float() * of_pairs * (1.0 if factor is None else factor[..., None])
        for function in (torch.cos, torch.sin)
    )

    before, rotated, after = _turn_pairs(x, cos, sin, rope)
    if factor is not None:
        of_token = factor[:, None, :, None].to(x.dtype)
        before, after = before * of_token, after * of_token
    return torch.cat((before, rotated, after), dim=-1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
    """Return features before the turned ones, the turned ones, and those after them; cos is (B or 1, T, R/2)."""
    offset, width = rope.rotary_offset, 2 * cos.shape[-1]
    before, middle, after = x.split((offset, width, x.shape[-1] - offset - width), dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if rope.interleaved:
        a, b = middle[..., ::2], middle[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:  # halves of all rotated features, or of each block of them
        half = (rope.pair_block or width) // 2
        cos, sin = cos.unflatten(-1, (-1, half)), sin.unflatten(-1, (-1, half))
        a, b = middle.unflatten(-1, (-1, 2, half)).unbind(-2)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-2).flatten(-3)
    return before, rotated, after


def _amplitude(positions: Tensor) -> Tensor:
    """ExpoSB's, 1 + 0.2·exp(−0.001·p)."""
    return (1 + 0.2 * torch.exp(-0.001 * positions.double())).float()


def _band_gain(head_dim: int, device: torch.device) -> Tensor:
    """ExpoSB's gain of each feature, (D,)."""
    feature = torch.arange(head_dim, dtype=torch.float64, device=device)
    return 0.8 + 0.4 * torch.exp(-((feature - head_dim // 4) ** 2) / (2 * (head_dim // 8) ** 2))


def _map_two_ranges(q: Tensor, k: Tensor, tokens: Tokens, scheme: ReRope | SelfExtend) -> Features:
    """Rotate near pairs by their positions, far ones so that relative positions stay small."""
    rope = Rope() if scheme.rope is None else scheme.rope
    at_q, at_k, window = tokens.position_q, tokens.position_k, scheme.window
    log_factor = None
    if scheme.log_n is not None:
        log_factor = (torch.log1p(at_q.clamp(min=0).double()) / math.log(scheme.log_n)).clamp(min=1).float()
    near = _rotate(q, rope, at_q, log_factor), _rotate(k, rope, at_k)
    if isinstance(scheme, SelfExtend):
        shift = window - window // scheme.group
        of_group = torch.div(at_q, scheme.group, rounding_mode="floor")
        past, future = (_rotate(q, rope, of_group + j, log_factor) for j in (shift, -shift))
        far = _rotate(k, rope, torch.div(at_k, scheme.group, rounding_mode="floor"))
    elif scheme.leak is not None:
        jump = window * (scheme.leak - 1)
        past, future = (_rotate(q, rope, (at_q.double() + j) / scheme.leak, log_factor) for j in (jump, -jump))
        far = _rotate(k, rope, at_k.double() / scheme.leak)
    else:  # keys are not rotated, so that queries carry the attention factor of both
        past, future = (
            _rotate(q, rope, torch.full_like(at_q, at), log_factor, rope.attention_factor) for at in (window, -window)
        )
        far = k
    return Features(*near, past, future, far)


# Scores


def _multiply(q: Tensor, k: Tensor) -> Tensor:
    """Return products (B, H, Tq, Tk) of q (B, H, Tq, D) and k (B, K, Tk, D): H/K heads in a row share a key head."""
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1] * queries, head_dim)
    return (grouped @ k.mT).reshape(batch, heads, queries, k.shape[2])


def _score(features: Features, distance: Tensor, scheme: PositionScheme) -> Tensor:
    """Return the scores before the scale; distance is query's position minus key's, (B or 1, 1, Tq, Tk)."""
    scores = _multiply(features.q, features.k)
    if features.k_far is None:
        return scores
    window = scheme.window if isinstance(scheme, (ReRope, SelfExtend)) else scheme.far_window()
    assert window is not None
    past, future = (_multiply(x, features.k_far) for x in (features.q_past, features.q_future))
    return torch.where(distance.abs() < window, scores, torch.where(distance > 0, past, future))


@torch.no_grad()
def _find_largest(scores: Tensor, may: Tensor | None) -> Tensor:
    """Return each head's largest score over the pairs that attend, −∞ where there are none."""
    if may is not None:
        scores = scores.masked_fill(~may, -torch.inf)
    if scores.numel() == 0:
        return scores.new_full((scores.shape[1],), -torch.inf)
    return scores.amax((0, 2, 3))


def _change_scores(scores: Tensor, distance: Tensor, scheme: PositionScheme) -> Tensor:
    """Add biases, or multiply by decays."""
    if type(scheme) not in _KNOWN:  # its own function defines it
        changed: Tensor = scheme.score_mod(scores, distance)
        return changed
    heads, device, dtype = scores.shape[1], scores.device, scores.dtype
    if isinstance(scheme, Alibi):
        slopes = _alibi_slopes(heads, device) if scheme.slopes is None else scheme.slopes
        return scores - slopes.to(device, dtype)[..., None, None] * distance.abs().to(dtype)
    if isinstance(scheme, T5Bias):
        table = scheme.table.to(device, dtype)
        bucket = _t5_buckets(distance[:, 0], table.shape[0], scheme.bidirectional, scheme.max_distance)
        return scores + F.embedding(bucket, table).movedim(-1, 1)
    if isinstance(scheme, ExpoSB):
        if scheme.distance_decay:
            scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * distance.abs().to(dtype)))
        if scheme.band_weights is not None:
            weights = scheme.band_weights.to(device, dtype)[:, None, None]
            scores = scores * weights * weights
        return scores
    return scores


def _alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's: powers of 2^(−8/H); past a power of two every second slope of twice as many heads."""
    whole = 1
    while 2 * whole <= heads:
        whole *= 2
    own, between = (torch.arange(n, dtype=torch.float64, device=device) for n in (whole, max(heads - whole, 0)))
    own, between = (own + 1) / whole, (2 * between + 1) / (2 * whole)
    return torch.pow(2.0, -8 * torch.cat((own, between))).float()[:heads]


def _t5_buckets(distance: Tensor, n_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """T5's bucket of each distance, query's position minus key's."""
    n_one_way = n_buckets // 2 if bidirectional else n_buckets
    n_exact = n_one_way // 2
    past = distance.abs() if bidirectional else distance.clamp(min=0)
    logarithm = torch.log(past.clamp(min=1).float() / n_exact) / math.log(max_distance / n_exact)
    far = (n_exact + (logarithm * (n_one_way - n_exact)).long()).clamp(max=n_one_way - 1)
    bucket = torch.where(past < n_exact, past, far)
    return bucket + n_one_way * (distance < 0) if bidirectional else bucket


# 8-bit products


class Blocks(NamedTuple):
    """Where keys stand for units and means."""

    exist: Tensor  # (B or 1, Tk)
    sequence: Tensor  # (B, Tk): the number of a key's sequence, or of its row
    n_sequences: int
    block: Tensor  # (B, Tk): a number of each block of 128 keys of a sequence
    group: Tensor  # (B, Tk): one of each four groups of a block
    number: Tensor  # (B or 1, Tk): a key's number among the existing ones of its sequence
    length: Tensor  # (B or 1, Tk): how many these are


def _existing(k: Tensor, tokens: Tokens, given: Arguments) -> Tensor:
    """Return the pairs of all queries and the keys that are no padding, (B or 1, 1, 1, Tk)."""
    if tokens.sequence_k is not None and given.cu_seqlens_q is not None:
        return (tokens.sequence_k < given.cu_seqlens_q.numel() - 1)[None, None, None]
    exist = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
    if given.key_lengths is not None:
        exist = exist & (tokens.index_k < given.key_lengths[:, None])
    if given.key_starts is not None:
        exist = exist & (tokens.index_k >= given.key_starts[:, None])
    return exist[:, None, None]


def _find_blocks(k: Tensor, tokens: Tokens, given: Arguments) -> Blocks:
    batch, n_keys = k.shape[0], k.shape[2]
    exist, index = _existing(k, tokens, given)[:, 0, 0], tokens.index_k
    if tokens.sequence_k is None:
        sequence = torch.arange(batch, device=k.device)[:, None].expand(-1, n_keys)
        n_sequences, first = batch, 0 if given.key_starts is None else given.key_starts.long()[:, None]
        length = exist.sum(1, keepdim=True).expand(-1, n_keys)
    else:
        assert given.cu_seqlens_q is not None
        sequence, n_sequences, first = tokens.sequence_k[None], given.cu_seqlens_q.numel(), 0  # and one of the tail
        length = torch.bincount(tokens.sequence_k, minlength=n_sequences)[tokens.sequence_k][None]
    block = sequence * (n_keys // 128 + 1) + index // 128
    return Blocks(exist, sequence, n_sequences, block, 4 * block + index % 8 // 2, index - first, length)


def _mean_of(x: Tensor, blocks: Blocks, causal: bool) -> Tensor:
    """Return the mean that is taken off each key or value, (B, K, Tk, D)."""
    number, length = blocks.number, blocks.length.clamp(min=1)
    i = (number * 256 + length - 1) // length
    is_read = number < 128 if causal else (length <= 256) | ((i < 256) & (i * length // 256 == number))
    is_read = (is_read & blocks.exist).expand(x.shape[0], -1)
    weight = F.one_hot(blocks.sequence, blocks.n_sequences).to(x.dtype)  # (B, Tk, S)
    read = weight * is_read[..., None]
    total = torch.einsum("bns,bknd->ksd", read, x.masked_fill(~is_read[:, None, :, None], 0))
    mean = total / read.sum((0, 1)).clamp(min=1)[:, None]
    return torch.einsum("bns,ksd->bknd", weight, mean)


def _units(x: Tensor, group: Tensor, most: float) -> Tensor:
    """Return the unit of each key, (B, K, Tk, 1): of the largest number of its group."""
    largest = x.abs().amax(-1)  # (B, K, Tk)
    if largest.numel() == 0:
        return largest[..., None]
    n_groups = int(group.max()) + 1
    of_groups = largest.new_zeros(largest.shape[1], n_groups)
    for row in range(largest.shape[0]):
        of_groups = of_groups.scatter_reduce(1, group[row].expand_as(largest[row]), largest[row], "amax")
    found = torch.stack([of_groups[:, group[row]] for row in range(largest.shape[0])])
    return (found / most).clamp(min=2.0**-40)[..., None]


def _turn(x: Tensor) -> Tensor:
    """Multiply features by Hadamard's matrix, of the largest power of two that divides their number."""
    n = 1
    while x.shape[-1] % (2 * n) == 0:
        n *= 2
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (x.unflatten(-1, (-1, n)) @ matrix * n**-0.5).flatten(-2)


def _multiply_integers(q: Tensor, k: Tensor, blocks: Blocks, products: QuantizedProducts, causal: bool) -> Tensor:
    """Return the products of q and k as those of their integers, (B, H, Tq, Tk)."""
    mean = _mean_of(k, blocks, causal) if products.centre else torch.zeros_like(k)
    rest = (k - mean).masked_fill(~blocks.exist[:, None, :, None], 0)
    q_turned, k_turned = (_turn(q), _turn(rest)) if products.hadamard else (q, rest)
    most = 127 if q.dtype == torch.float64 else 127 / (1 + 2.0**-10)
    unit_q = (q_turned.abs().amax(-1, keepdim=True) / most).clamp(min=2.0**-40)
    unit_k = _units(k_turned, blocks.group, most)
    q_int, k_int = (torch.round(x / unit).clamp(-127, 127) for x, unit in ((q_turned, unit_q), (k_turned, unit_k)))
    return _multiply(q_int * unit_q, k_int * unit_k) + _multiply(q, mean)


def _round_values(v: Tensor, blocks: Blocks, products: QuantizedProducts, causal: bool) -> Tensor:
    """Return what values in e4m3 stand for."""
    mean = _mean_of(v, blocks, causal) if products.centre else torch.zeros_like(v)
    rest = (v - mean).masked_fill(~blocks.exist[:, None, :, None], 0)
    unit = _units(rest, blocks.block, 448)
    return (rest / unit).clamp(-448, 448).to(torch.float8_e4m3fn).to(v.dtype) * unit + mean


def _attend_in_8_bits(
    features: Features,
    v: Tensor,
    tokens: Tokens,
    distance: Tensor,
    may: Tensor | None,
    given: Arguments,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp and the largest scores, with the gradients of products in 16 bits.

    The baseline has units a little larger, since an integer may differ by one where a number is halfway between two. It
    rounds probabilities as kernels do: to bfloat16, or to e4m3 of a row.
    """
    names = {"int8": QuantizedProducts(), "int8-fp8": QuantizedProducts(values="float8")}
    products = names[given.precision] if isinstance(given.precision, str) else given.precision
    assert products is not None
    is_exact, wide = dtype == torch.float64, torch.float64 if dtype == torch.float64 else torch.float32
    causal = given.causal or _read_window(given.window)[1] == 0
    with torch.no_grad():
        blocks = _find_blocks(features.k, tokens, given)
        q, k, past, future, far = (None if x is None else x.to(wide) for x in features)
        scores = _multiply_integers(q, k, blocks, products, causal)
        if far is not None:
            window = getattr(given.position, "window", None) or given.position.far_window()
            behind, ahead = (_multiply_integers(x, far, blocks, products, causal) for x in (past, future))
            scores = torch.where(distance.abs() < window, scores, torch.where(distance > 0, behind, ahead))
        scores, largest = _change_all(scores, features, distance, may, given)
        is_float8 = products.values == "float8"
        values = _round_values(v.to(wide), blocks, products, causal) if is_float8 else v.to(wide)
        p, lse = _softmax(scores, given)
        rounded = p
        if not is_exact and p.numel():
            unit = p.amax(-1, keepdim=True).clamp(min=1e-30) / 448 if is_float8 else 1.0
            rounded = (p / unit).to(torch.float8_e4m3fn if is_float8 else torch.bfloat16).to(wide) * unit
        out = _weigh(rounded, values).to(dtype)
    if torch.is_grad_enabled():
        exact, _ = _change_all(_score(features, distance, given.position), features, distance, may, given)
        never = exact == -torch.inf
        exact = exact.masked_fill(never, 0)
        p = torch.exp(exact.detach() - lse[..., None]).masked_fill(never, 0)
        change = p * (exact - exact.detach())
        of_lse = change.sum(-1)
        if given.sinks is not None:
            sinks = given.sinks.to(lse.device, lse.dtype)[:, None]
            of_lse = of_lse + torch.exp(sinks.detach() - lse) * (sinks - sinks.detach())
        of_out = _weigh((p + change).to(dtype), v).to(wide) - out.to(wide) * of_lse[..., None]
        out = (out.to(wide) + of_out - of_out.detach()).to(dtype)
        lse = torch.where(lse == -torch.inf, lse, lse + of_lse)
    return out, lse, largest


def _softmax(scores: Tensor, given: Arguments) -> tuple[Tensor, Tensor]:
    """Return probabilities, 0 in rows that attend nothing, and the log-sum-exp."""
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if given.sinks is not None:
        lse = torch.logaddexp(lse, given.sinks.to(lse.device, lse.dtype)[:, None])
    return torch.exp(scores - lse[..., None]).masked_fill(scores == -torch.inf, 0), lse


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    """Return the values weighed by probabilities, (B, H, Tq, Dv)."""
    batch, heads, queries, keys = p.shape
    grouped = p.reshape(batch, v.shape[1], heads // v.shape[1] * queries, keys)
    return (grouped @ v).reshape(batch, heads, queries, v.shape[3])


# Softmax, dropout and values


def _attend_scores(
    scores: Tensor, v: Tensor, tokens: Tokens, seed: int | Tensor | None, given: Arguments
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Tq, Dv), of v's dtype, and the log-sum-exp (B, H, Tq), of the scores'."""
    batch, heads, queries, keys = scores.shape
    is_dead = (scores == -torch.inf).all(dim=-1)
    scores = scores.masked_fill(is_dead[..., None], 0.0)  # no NaN comes of such a row, and nothing is kept of it
    lse = torch.logsumexp(scores, dim=-1)
    of_dead = lse.new_full((), -torch.inf)
    if given.sinks is not None:
        of_dead = given.sinks.to(lse.device, lse.dtype)[:, None]
        lse = torch.logaddexp(lse, of_dead)
    p = torch.exp(scores - lse[..., None])
    finite_lse, lse = lse, torch.where(is_dead, of_dead, lse)
    if given.dropout_p > 0:
        if seed is None:
            raise ValueError("seed is None, but with dropout_p it must be an int")
        steps = min(round(given.dropout_p * 2**16), 255 * 2**8)
        stays = _draw(seed, steps, (batch, heads, queries, keys), tokens)
        p = torch.where(stays, p / (1 - steps / 2**16), 0.0)
    p = p.masked_fill(is_dead[..., None], 0.0)

    def multiply(p: Tensor, v: Tensor) -> Tensor:
        grouped = p.reshape(batch, v.shape[1], heads // v.shape[1] * queries, keys)
        return (grouped @ v).reshape(batch, heads, queries, v.shape[3])

    out = multiply(p.to(v.dtype), v)
    if v.dtype != torch.float64 and keys > 0:
        # FlashAttention's backward takes Σ dO·O with the rounded output for Σ P·dP, so rows of dS do not sum to 0.
        # The term is 0, and its gradient is what that differs by.
        lost = multiply(p.detach(), v.detach().to(p.dtype)) - out.detach().to(p.dtype)
        out = out + ((finite_lse - finite_lse.detach())[..., None] * lost).to(out.dtype)
    return out, lse


_LOW = 2**32 - 1


def _draw(seed: int | Tensor, steps: int, shape: tuple[int, int, int, int], tokens: Tokens) -> Tensor:
    """Return which probabilities (B, H, Tq, Tk) stay, by Philox4x32 with 7 rounds.

    A counter (4·block + lane, query, row, sequence) gives numbers of 8 bits for 16 keys of a block of 64: key
    16·word + 8·half + 2·lane + odd of the block has byte 2·half + odd of a word.
    """
    batch, heads, _, keys = shape
    device = tokens.number_q.device
    row = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1, 1)
    query = tokens.number_q[:, None, None]
    sequence = torch.zeros_like(query) if tokens.sequence_q is None else tokens.sequence_q[:, None, None]
    block, lane = torch.arange(-(-keys // 64), device=device)[:, None], torch.arange(4, device=device)
    words = torch.stack(_philox(seed, (4 * block + lane, query & _LOW, row, sequence)), dim=-1)
    numbers = words[..., None] >> torch.arange(0, 32, 8, device=device) & 255  # (..., block, lane, word, byte)
    numbers = numbers.unflatten(-1, (2, 2)).movedim(-4, -2).flatten(-4)  # (..., block, 64)
    phase = (seed & _LOW) + row * 0x2545F491 + sequence * 0x1B873593 + block * 0x61C88647
    dropped = steps // 256 + ((phase & _LOW) >> 24 < steps % 256).long()
    stays: Tensor = (numbers >= dropped).flatten(-2)[..., :keys]
    return stays if tokens.sequence_k is None else stays[..., tokens.index_k[0].clamp(0, max(keys - 1, 0))]


def _philox(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four words of 32 bits, in int64, whose products wrap as those of 64 bits do."""
    a, b, c, d = torch.broadcast_tensors(*counter)
    key_0, key_1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(7):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32 & _LOW) ^ b ^ key_0, right & _LOW, (left >> 32 & _LOW) ^ d ^ key_1, left & _LOW
        key_0, key_1 = (key_0 + 0x9E3779B9) & _LOW, (key_1 + 0xBB67AE85) & _LOW
    return a, b, c, d
