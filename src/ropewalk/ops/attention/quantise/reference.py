"""The numbers of 8-bit products in plain PyTorch: the definition that kernels are measured against.

All is in float32, or in float64 for such features. No sum is left to a library, so that a block has the same bits
whatever stands beside it.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), S packed
sequences, N blocks of BLOCK keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.ops.attention.call import AttentionCall, FarQK, existing, token_indices
from ropewalk.ops.attention.quantise.call import BLOCK, Quantized, QuantizedKeys, QuantizedQueries, QuantizedValues
from ropewalk.ops.cache.formats import FP8_MAX, INT8_MAX

LEAST_UNIT = 2.0**-40
FIRST_KEYS, SAMPLED_KEYS = 128, 256  # whose mean is taken off


class KeyRows(NamedTuple):
    """The rows of keys: which exist, where sequences start, and where each key stands in whole blocks."""

    exist: Tensor | None  # (B or 1, Tk), bool; None: all do
    starts: Tensor  # (B or S,): the row of each sequence's first existing key
    lengths: Tensor  # (B or S,): its existing keys
    sequences_q: Tensor | None  # (Tq,): of packed tokens, the sequence; S: none
    sequences_k: Tensor | None  # (Tk,)
    slots: Tensor | None  # (Tk,): of packed keys, the row in blocks; N · BLOCK: none. None: a key's own row
    n_keys: int
    n_blocks: int


def find_rows(call: AttentionCall) -> KeyRows:
    """Return the rows of a call's keys, which are not paged."""
    n_keys, device = call.k.shape[2], call.k.device
    exist = existing(call)
    if call.cu_seqlens_k is None:
        batch = call.k.shape[0]
        starts = torch.zeros(batch, dtype=torch.long, device=device)
        ends = torch.full((batch,), n_keys, dtype=torch.long, device=device)
        if call.key_starts is not None:
            starts = call.key_starts.long().clamp(0, n_keys)
        if call.key_lengths is not None:
            ends = call.key_lengths.long().clamp(0, n_keys)
        n_blocks = (n_keys + BLOCK - 1) // BLOCK
        return KeyRows(exist, starts, (ends - starts).clamp(min=0), None, None, None, n_keys, n_blocks)
    indices = token_indices(call)
    assert indices.sequences_q is not None
    assert indices.sequences_k is not None
    bounds = call.cu_seqlens_k.long().clamp(0, n_keys)
    n_sequences = bounds.shape[0] - 1
    n_blocks = n_keys // BLOCK + n_sequences
    sequences_q, sequences_k = (
        torch.where(x[0] < 0, n_sequences, x[0]) for x in (indices.sequences_q, indices.sequences_k)
    )
    slots = (bounds // BLOCK + torch.arange(n_sequences + 1, device=device))[sequences_k] * BLOCK + indices.keys[0]
    slots = torch.where(sequences_k < n_sequences, slots, n_blocks * BLOCK)
    lengths = bounds.diff().clamp(min=0)
    return KeyRows(exist, bounds[:-1], lengths, sequences_q, sequences_k, slots, n_keys, n_blocks)


def quantise(q: Tensor, k: Tensor, far: FarQK | None, call: AttentionCall) -> Quantized:
    """Quantise the features of all maps, and the values: q (B, H, Tq, D), k (B, K, Tk, D).

    Features stand in their order, and keys in that of their sequence, where kernels may read others.
    """
    precision = call.quantised
    assert precision is not None
    rows, hadamard, dtype = find_rows(call), precision.hadamard, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), call.v.to(dtype)
    if far is not None:
        far = FarQK(*(None if x is None else x.to(dtype) for x in far))  # type: ignore[arg-type]
    shift = find_shift(k, rows, call.causal) if precision.centre else None
    q_future = None
    if far is not None:
        far_shift = find_shift(far.k, rows, call.causal) if precision.centre else None
        if far.q_future is not None:
            q_future = quantise_queries(far.q_future, far_shift, rows, hadamard)
    return Quantized(
        quantise_queries(q, shift, rows, hadamard),
        quantise_keys(k, shift, rows, hadamard),
        quantise_values(v, rows, call.causal, precision.centre) if precision.float8_values else None,
        None if far is None else quantise_queries(far.q_past, far_shift, rows, hadamard),
        q_future,
        None if far is None else quantise_keys(far.k, far_shift, rows, hadamard),
    )


def find_shift(x: Tensor, rows: KeyRows, causal: bool) -> Tensor:
    """Return the mean of some existing rows of each sequence's x, (B, K, Tk, D): (B or S, K, D); 0 of none.

    These are the first 128 where no later key may be read, else up to 256, evenly spaced.
    """
    if rows.n_keys == 0:
        return x.new_zeros(rows.starts.shape[0], x.shape[1], x.shape[3])
    number, lengths = torch.arange(FIRST_KEYS if causal else SAMPLED_KEYS, device=x.device), rows.lengths[:, None]
    offset = number if causal else torch.where(lengths <= SAMPLED_KEYS, number, number * lengths // SAMPLED_KEYS)
    index = (rows.starts[:, None] + offset).clamp(0, rows.n_keys - 1)
    if rows.sequences_k is None:
        index = index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        sampled = x.gather(2, index)  # (B, K, 128 or 256, D)
    else:
        sampled = x[0][:, index].transpose(0, 1)  # (S, K, 128 or 256, D)
    is_read = (number < lengths)[:, None, :, None]
    total = sampled.masked_fill(~is_read, 0).sum(2)
    return total / lengths.clamp(1, number.shape[0])[:, :, None].to(x.dtype)


def quantise_queries(x: Tensor, shift: Tensor | None, rows: KeyRows, hadamard: bool) -> QuantizedQueries:
    """Quantise queries (B, H, Tq, D); shift: what was taken off the keys of their map."""
    turned = transform(x) if hadamard else x
    unit = unit_of(turned.abs().amax(-1), INT8_MAX)
    products = x.new_zeros(x.shape[:3])
    if shift is not None:
        shift_rows = _spread(shift, rows.sequences_q)  # (B, K, 1, 1 or Tq, D)
        products = (x.unflatten(1, (shift.shape[1], -1)) * shift_rows).sum(-1).flatten(1, 2)
    return QuantizedQueries(_round(turned, unit[..., None]), unit, products)


def quantise_keys(x: Tensor, shift: Tensor | None, rows: KeyRows, hadamard: bool) -> QuantizedKeys:
    """Quantise keys (B, K, Tk, D)."""
    x = x if shift is None else x - _spread(shift, rows.sequences_k)[:, :, 0]
    x = to_blocks(x, rows)
    x = transform(x) if hadamard else x
    grouped = x.view(*x.shape[:2], rows.n_blocks, BLOCK // 8, 4, 2, x.shape[3])  # key n is in group n % 8 // 2
    unit = unit_of(grouped.abs().amax((3, 5, 6)), INT8_MAX)
    return QuantizedKeys(_round(grouped, unit[:, :, :, None, :, None, None]).view(x.shape), unit)


def quantise_values(v: Tensor, rows: KeyRows, causal: bool, centre: bool) -> QuantizedValues:
    """Quantise values (B, K, Tk, Dv)."""
    mean = v.new_zeros(rows.starts.shape[0], v.shape[1], v.shape[3])
    if centre:
        mean = find_shift(v, rows, causal)
        v = v - _spread(mean, rows.sequences_k)[:, :, 0]
    v = to_blocks(v, rows)
    blocks = v.unflatten(2, (rows.n_blocks, BLOCK))
    unit = unit_of(blocks.abs().amax((3, 4)), FP8_MAX)
    scaled = (blocks * (1 / unit)[..., None, None]).clamp(-FP8_MAX, FP8_MAX)
    return QuantizedValues(scaled.to(torch.float8_e4m3fn).flatten(2, 3).mT, unit, mean)


def unit_of(largest: Tensor, most: float) -> Tensor:
    """Return the unit of numbers of these magnitudes; NaN where one is not finite."""
    return (largest / most).clamp(min=LEAST_UNIT).masked_fill(~largest.isfinite(), torch.nan)


def _round(x: Tensor, unit: Tensor) -> Tensor:
    """Return x / unit as int8: half to even, and 0 where the unit is NaN."""
    return (x * (1 / unit)).round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)


def transform(x: Tensor) -> Tensor:
    """Return the Hadamard transform of each n features in a row, n the largest power of two that divides D."""
    n_features = x.shape[-1]
    n = n_features & -n_features
    step = 1
    while step < n:
        left, right = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((left + right, left - right), -2).flatten(-3)
        step *= 2
    root: float = n**-0.5
    return x * root


def to_blocks(x: Tensor, rows: KeyRows) -> Tensor:
    """Lay rows of keys (B, K, Tk, D) out in whole blocks, (B, K, N · BLOCK, D), with zeros for those that none has."""
    if rows.exist is not None:
        x = x.masked_fill(~rows.exist[:, None, :, None], 0)
    if rows.slots is None:
        return F.pad(x, (0, 0, 0, rows.n_blocks * BLOCK - rows.n_keys)).contiguous()
    laid_out = x.new_zeros(1, x.shape[1], rows.n_blocks * BLOCK + 1, x.shape[3])
    return laid_out.index_copy(2, rows.slots, x)[:, :, :-1].contiguous()


def from_blocks(x: Tensor, rows: KeyRows) -> Tensor:
    """Undo `to_blocks`."""
    if rows.slots is None:
        return x[:, :, : rows.n_keys]
    return F.pad(x, (0, 0, 0, 1)).index_select(2, rows.slots)


def _spread(shift: Tensor, sequences: Tensor | None) -> Tensor:
    """Return what was taken off, (B or S, K, D), for each token: (B, K, 1, 1 or T, D)."""
    if sequences is None:
        return shift[:, :, None, None]
    return F.pad(shift, (0, 0, 0, 0, 0, 1))[sequences].transpose(0, 1)[None, :, None]


class Dequantised(NamedTuple):
    """Tensors whose scores and sums are those of quantised ones."""

    q: Tensor  # (B, H, Tq, D + 1): the last product is that of the shift
    k: Tensor  # (B, K, Tk, D + 1)
    far: FarQK | None
    v: Tensor  # (B, K, Tk, Dv)


def dequantise(quantised: Quantized, call: AttentionCall) -> Dequantised:
    """Return the features and values that quantised ones stand for, in the dtype of the call's."""
    rows, far, dtype = find_rows(call), None, call.q.dtype
    if quantised.q_past is not None and quantised.k_far is not None:
        future = quantised.q_future
        far = FarQK(
            _queries(quantised.q_past, dtype),
            None if future is None else _queries(future, dtype),
            _keys(quantised.k_far, rows, dtype),
        )
    v = call.v
    if quantised.v is not None:
        x, unit, mean = quantised.v
        blocks = x.mT.to(unit.dtype).unflatten(2, (rows.n_blocks, BLOCK)) * unit[..., None, None]
        v = (from_blocks(blocks.flatten(2, 3), rows) + _spread(mean, rows.sequences_k)[:, :, 0]).to(dtype)
    return Dequantised(_queries(quantised.q, dtype), _keys(quantised.k, rows, dtype), far, v)


def _queries(x: QuantizedQueries, dtype: torch.dtype) -> Tensor:
    return torch.cat((x.x.to(x.unit.dtype) * x.unit[..., None], x.shift[..., None]), dim=-1).to(dtype)


def _keys(x: QuantizedKeys, rows: KeyRows, dtype: torch.dtype) -> Tensor:
    grouped = x.x.to(x.unit.dtype).view(*x.x.shape[:2], rows.n_blocks, BLOCK // 8, 4, 2, x.x.shape[3])
    features = (grouped * x.unit[:, :, :, None, :, None, None]).view(x.x.shape)
    return F.pad(from_blocks(features, rows), (0, 1), value=1.0).to(dtype)
