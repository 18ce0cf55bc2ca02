"""What attention accepts, and its errors.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), S packed
sequences.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk.positions import NoPosition, PositionScheme

LAYOUTS = ("bthd", "bhtd", "thd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
PAGE_SIZES = (16, 32, 64, 128, 256)
NO_POSITION = NoPosition()


class Call(NamedTuple):
    """What attention is asked for, beside q, k and v: checked, and with defaults filled in."""

    position: PositionScheme
    causal: bool
    window: int | None
    scale: float
    mask: Tensor | None  # (B or 1, H or 1, Tq, Tk), bool
    key_lengths: Tensor | None  # (B,): where the keys end
    positions_q: Tensor | None  # (B or 1, Tq); None: as `token_positions` says
    positions_k: Tensor | None  # (B or 1, Tk)
    key_starts: Tensor | None = None  # (B,): where the keys start; None: at 0
    query_starts: Tensor | None = None  # (B,): the key that the first query stands at; None: Tk − Tq
    cu_seqlens_q: Tensor | None = None  # (S + 1,); None: the batch is dense
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    block_table: Tensor | None = None  # (B, n_pages); None: k and v are not paged
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    dropout_p: float = 0.0
    seed: Tensor | None = None  # (1,), int64: of what is dropped
    keys_rotated: bool = False


def as_bhtd(x: Tensor, layout: str) -> Tensor:
    """View x as (B, H, T, D); packed as (1, H, total, D), and pages of keys as (pages, K, page_size, D)."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x if layout == "bhtd" else x.transpose(1, 2)


def from_bhtd(x: Tensor, layout: str) -> Tensor:
    """Undo `as_bhtd`."""
    if layout == "thd":
        return x.squeeze(0).transpose(0, 1)
    return x if layout == "bhtd" else x.transpose(1, 2)


def count_keys(k: Tensor, call: Call) -> int:
    """Tk; k is (B, K, Tk, D), or with a block table (pages, K, page_size, D)."""
    return k.shape[2] if call.block_table is None else call.block_table.shape[1] * k.shape[2]


class Places(NamedTuple):
    """Where every token stands, by index: a query at the key whose index it has. Causal and window go by it."""

    queries: Tensor  # (B or 1, Tq)
    keys: Tensor  # (B or 1, Tk)
    sequences_q: Tensor | None  # (1, Tq): of packed tokens, the sequence; −1: none
    sequences_k: Tensor | None  # (1, Tk)


def token_places(queries: int, keys: int, call: Call, device: torch.device) -> Places:
    """The places of a call's tokens: aligned at the bottom right, unless query_starts says otherwise.

    Packed tokens count from the first key of their sequence; what belongs to no sequence stands at 0.
    """
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        sequences_q, index_q, lengths_q = _unpack(call.cu_seqlens_q, queries)
        sequences_k, index_k, lengths_k = _unpack(call.cu_seqlens_k, keys)
        shift = torch.cat((lengths_k - lengths_q, lengths_k.new_zeros(1)))[sequences_q]  # −1 finds the zero
        return Places((index_q + shift)[None], index_k[None], sequences_q[None], sequences_k[None])
    columns = torch.arange(keys, device=device)[None]
    if call.query_starts is None:
        return Places(torch.arange(keys - queries, keys, device=device)[None], columns, None, None)
    return Places(torch.arange(queries, device=device) + call.query_starts[:, None], columns, None, None)


def token_positions(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Every token's position for the scheme, (B or 1, Tq) and (B or 1, Tk): by default its place after key_starts.

    q is (B, H, Tq, D) and k (B, K, Tk, D), or with a block table (pages, K, page_size, D). Queries and keys before
    key_starts have positions below 0, so that distances are those of places.
    """
    positions_q, positions_k = call.positions_q, call.positions_k
    if positions_q is None or positions_k is None:
        places = token_places(q.shape[2], count_keys(k, call), call, q.device)
        default_q, default_k = places.queries, places.keys
        if call.key_starts is not None:
            starts = call.key_starts[:, None]
            default_q, default_k = default_q - starts, default_k - starts
        positions_q = default_q if positions_q is None else positions_q
        positions_k = default_k if positions_k is None else positions_k
    return positions_q, positions_k


def _unpack(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each packed token, −1 for none, and its index there, 0 for none; and the sequences' lengths."""
    bounds = cu_seqlens.long().clamp(0, total)
    starts, ends = bounds[:-1], bounds[1:]
    tokens = torch.arange(total, device=cu_seqlens.device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    index = tokens - torch.cat((starts, starts.new_full((1,), total)))[sequences]  # below 0 in no sequence
    return torch.where(index < 0, -1, sequences), index.clamp(min=0), (ends - starts).clamp(min=0)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: PositionScheme = NO_POSITION,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
    key_starts: Tensor | None = None,
    query_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    keys_rotated: bool = False,
    layout: str = "bthd",
) -> Call:
    """Raise unless the arguments of `attention` fit each other; return them with defaults filled in.

    What is dropped needs a seed beside: `call._replace(seed=...)`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be one of {', '.join(map(repr, LAYOUTS))}")
    if not isinstance(position, PositionScheme):
        raise TypeError(f"position is {position!r}, but must be a scheme of ropewalk.positions, such as Rope()")
    batch, heads, queries, head_dim, keys = _check_tensors(q, k, v, layout, block_table)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window is {window!r}, but must be None or an int of at least 1")
    if scale is None:
        scale = head_dim**-0.5
    elif not isinstance(scale, (int, float)) or not abs(scale) < math.inf:
        raise ValueError(f"scale is {scale!r}, but must be a finite number")
    if layout == "thd":
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_packed(q, queries, keys, cu_seqlens_q, cu_seqlens_k)
        dense = {"mask": mask, "key_lengths": key_lengths, "key_starts": key_starts, "query_starts": query_starts}
        for name, value in (*dense.items(), ("block_table", block_table)):
            if value is not None:
                raise ValueError(f"{name} was given beside cu_seqlens_q, but layout 'thd' takes none")
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        name = "cu_seqlens_k" if cu_seqlens_q is None else "cu_seqlens_q"
        raise ValueError(f"{name} was given with layout {layout!r}, but goes with layout 'thd' alone")
    if mask is not None:
        mask = _as_mask(mask, batch, heads, queries, keys)
        _check_device("mask", mask, q)
    if key_lengths is not None:
        _check_rows("key_lengths", key_lengths, batch, keys, "Tk", q)
    if key_starts is not None:
        _check_rows("key_starts", key_starts, batch, keys, "Tk", q)
    if query_starts is not None:
        _check_rows("query_starts", query_starts, batch, keys - queries, "Tk − Tq", q)
    if positions_q is not None:
        positions_q = _check_positions("positions_q", positions_q, batch, queries, q, layout)
    if positions_k is not None:
        positions_k = _check_positions("positions_k", positions_k, batch, keys, q, layout)
    if block_table is not None:
        _check_pages(q, k, v, block_table, key_starts, key_lengths, sinks, layout)
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf:
            raise ValueError(f"softcap is {softcap!r}, but must be None or a finite number above 0")
        softcap = float(softcap)
    if sinks is not None:
        _check_sinks(sinks, heads, q)
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p!r}, but must be a number from 0 to below 1")
    if keys_rotated and position.far_window() is not None:
        raise ValueError(
            f"keys_rotated is True, but {type(position).__name__} maps a key in one way for near queries and in "
            "another for far ones: pass keys as they are"
        )
    return Call(
        position,
        bool(causal),
        window,
        float(scale),
        mask,
        key_lengths,
        positions_q,
        positions_k,
        key_starts,
        query_starts,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        softcap,
        sinks,
        float(dropout_p),
        None,
        bool(keys_rotated),
    )


_SHAPES = {"bthd": "(B, T, H, D)", "bhtd": "(B, H, T, D)", "thd": "(total, H, D)"}


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, layout: str, block_table: Tensor | None
) -> tuple[int, int, int, int, int]:
    """B, H, Tq, D and Tk."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
        if x.ndim != len(layout):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {_SHAPES[layout]}")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} has dtype {x.dtype}, but q, k and v must share one of {kinds}")
        _check_device(name, x, q)
    batch, heads, queries, head_dim = as_bhtd(q, layout).shape
    rows, key_heads, keys, key_dim = as_bhtd(k, layout).shape
    value_dim = v.shape[-1]
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but must have k's, {tuple(k.shape)}, all but the head dim")
    if block_table is not None and layout != "thd":
        rows, keys = _check_table(block_table, batch, keys, q)
    if rows != batch or key_dim != head_dim:
        raise ValueError(f"k has batch {rows} and head dim {key_dim}, but must have q's, {batch} and {head_dim}")
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"q has {heads} heads, but they must be a multiple of k's {key_heads}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim is {head_dim}, but must be from 1 to {MAX_HEAD_DIM}")
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        raise ValueError(f"v's head dim is {value_dim}, but must be from 1 to {MAX_HEAD_DIM}")
    return batch, heads, queries, head_dim, keys


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, but must be on q's device, {q.device}")


def _has_values(x: Tensor) -> bool:
    """Whether x's values can be looked at: those on a device would have to be waited for, fake ones are none."""
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def _check_packed(q: Tensor, queries: int, keys: int, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q is None, but layout 'thd' needs it, (S + 1,), to tell sequences apart")
    for name, bounds, total in (("cu_seqlens_q", cu_seqlens_q, queries), ("cu_seqlens_k", cu_seqlens_k, keys)):
        _check_integers(name, bounds)
        if bounds.ndim != 1 or bounds.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(bounds.shape)}, but must be (S + 1,)")
        _check_device(name, bounds, q)
        if not _has_values(bounds):
            continue
        values = bounds.tolist()
        if values[0] != 0:
            raise ValueError(f"{name} starts at {values[0]}, but must start at 0")
        for index, (start, end) in enumerate(pairwise(values)):
            if end < start:
                raise ValueError(f"{name} falls from {start} to {end} at index {index + 1}, but must not decrease")
        if values[-1] > total:
            which = "q" if name == "cu_seqlens_q" else "k"
            raise ValueError(f"{name} ends at {values[-1]}, but must end within {which}'s {total} tokens")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}, but must have cu_seqlens_q's, "
            f"{tuple(cu_seqlens_q.shape)}"
        )


def _check_table(block_table: Tensor, batch: int, page_size: int, q: Tensor) -> tuple[int, int]:
    """The batch rows that the table serves, and Tk."""
    _check_integers("block_table", block_table)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}, but must be (B, number of pages) with B = {batch}"
        )
    _check_device("block_table", block_table, q)
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"k has pages of {page_size} keys, but with block_table they must be of one of {sizes}")
    return batch, block_table.shape[1] * page_size


def _check_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    sinks: Tensor | None,
    layout: str,
) -> None:
    if key_lengths is None:
        raise ValueError("key_lengths is None, but block_table needs it: which pages are filled")
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but with block_table there is no backward: call under no_grad")
    if not _has_values(block_table) or not _has_values(k):
        return
    pages, _, page_size, _ = as_bhtd(k, layout).shape
    first = torch.arange(0, block_table.shape[1] * page_size, page_size)
    used = first < key_lengths[:, None]
    if key_starts is not None:
        used &= first + page_size > key_starts[:, None]
    outside = used & ((block_table < 0) | (block_table >= pages))
    if bool(outside.any()):
        page = int(block_table[outside][0])
        raise ValueError(f"block_table holds {page} below key_lengths, but must be from 0 to below {pages} pages")


def _check_sinks(sinks: Tensor, heads: int, q: Tensor) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        kind = str(sinks.dtype) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks is {kind}, but must be a floating-point tensor, (H,)")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, but must be (H,) with H = {heads}")
    _check_device("sinks", sinks, q)


def _as_mask(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """The mask with 4 dimensions. A batch of masks is never read as one for each head, even with B = H."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask is {kind}, but must be a bool tensor, True where a query attends")
    shape, square = tuple(mask.shape), (queries, keys)
    if shape == square:
        return mask[None, None]
    if shape == (batch, *square):
        return mask[:, None]
    if len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads):
        rows, columns = shape[2:]
        if rows in (1, queries) and columns in (1, keys):
            return mask.expand(-1, -1, *square)
    raise ValueError(
        f"mask has shape {shape}, but must be (Tq, Tk), (B, Tq, Tk) or (B or 1, H or 1, Tq or 1, Tk or 1) with "
        f"B = {batch}, H = {heads}, Tq = {queries} and Tk = {keys}"
    )


def _check_rows(name: str, x: Tensor, batch: int, most: int, limit: str, q: Tensor) -> None:
    """Check one index for each batch row, from 0 to `most`."""
    _check_integers(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (B,) with B = {batch}")
    _check_device(name, x, q)
    if _has_values(x):
        outside = (x < 0) | (x > most)
        if bool(outside.any()):
            raise ValueError(f"{name} holds {int(x[outside][0])}, but must be from 0 to {limit} = {most}")


def _check_integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor of int32 or int64")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is a tensor of {x.dtype}, but must be a tensor of int32 or int64")


def _check_positions(name: str, positions: Tensor, batch: int, tokens: int, q: Tensor, layout: str) -> Tensor:
    """The positions with their batch dimension."""
    _check_integers(name, positions)
    _check_device(name, positions, q)
    shape = tuple(positions.shape)
    if layout == "thd":
        if shape != (tokens,):
            raise ValueError(f"{name} has shape {shape}, but must be (total,) with total = {tokens}")
        return positions[None]
    if shape not in ((batch, tokens), (1, tokens)):
        raise ValueError(f"{name} has shape {shape}, but must be (B, T) or (1, T) with B = {batch} and T = {tokens}")
    return positions
