"""What attention accepts, and its errors.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.positions import NoPosition, PositionScheme

LAYOUTS = ("bthd", "bhtd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
NO_POSITION = NoPosition()


class Call(NamedTuple):
    """What attention is asked for, beside q, k and v: checked, and with defaults filled in."""

    position: PositionScheme
    causal: bool
    window: int | None
    scale: float
    mask: Tensor | None  # (B or 1, H or 1, Tq, Tk), bool
    key_lengths: Tensor | None  # (B,)
    positions_q: Tensor | None  # (B or 1, Tq); None: index + Tk − Tq
    positions_k: Tensor | None  # (B or 1, Tk); None: index


def as_bhtd(x: Tensor, layout: str) -> Tensor:
    """View x as (B, H, T, D)."""
    return x if layout == "bhtd" else x.transpose(1, 2)


def token_positions(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Every token's position, (B or 1, Tq) and (B or 1, Tk); q is (B, H, Tq, D) and k (B, K, Tk, D)."""
    queries, keys = q.shape[2], k.shape[2]
    positions_q, positions_k = call.positions_q, call.positions_k
    if positions_q is None:
        positions_q = torch.arange(keys - queries, keys, device=q.device)[None]
    if positions_k is None:
        positions_k = torch.arange(keys, device=q.device)[None]
    return positions_q, positions_k


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
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
    layout: str = "bthd",
) -> Call:
    """Raise unless the arguments of `attention` fit each other; return them with defaults filled in."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be one of {', '.join(map(repr, LAYOUTS))}")
    if not isinstance(position, PositionScheme):
        raise TypeError(f"position is {position!r}, but must be a scheme of ropewalk.positions, such as Rope()")
    batch, heads, queries, head_dim = _check_tensors(q, k, v, layout)
    keys = as_bhtd(k, layout).shape[2]
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window is {window!r}, but must be None or an int of at least 1")
    if scale is None:
        scale = head_dim**-0.5
    elif not isinstance(scale, (int, float)) or not abs(scale) < math.inf:
        raise ValueError(f"scale is {scale!r}, but must be a finite number")
    if mask is not None:
        mask = _as_mask(mask, batch, heads, queries, keys)
        _check_device("mask", mask, q)
    if key_lengths is not None:
        _check_key_lengths(key_lengths, batch, keys, q)
    for name, positions, tokens in (("positions_q", positions_q, queries), ("positions_k", positions_k, keys)):
        if positions is not None:
            _check_positions(name, positions, batch, tokens, q)
    return Call(position, bool(causal), window, float(scale), mask, key_lengths, positions_q, positions_k)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[int, int, int, int]:
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
        if x.ndim != 4:
            expected = "(B, T, H, D)" if layout == "bthd" else "(B, H, T, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {expected}")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} has dtype {x.dtype}, but q, k and v must share one of {kinds}")
        _check_device(name, x, q)
    batch, heads, queries, head_dim = as_bhtd(q, layout).shape
    k_shape, v_shape = as_bhtd(k, layout).shape, as_bhtd(v, layout).shape
    if k_shape != v_shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, but must have k's, {tuple(k.shape)}")
    if k_shape[0] != batch or k_shape[3] != head_dim:
        raise ValueError(
            f"k has batch {k_shape[0]} and head dim {k_shape[3]}, but must have q's, {batch} and {head_dim}"
        )
    if k_shape[1] < 1 or heads % k_shape[1]:
        raise ValueError(f"q has {heads} heads, but they must be a multiple of k's {k_shape[1]}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim is {head_dim}, but must be from 1 to {MAX_HEAD_DIM}")
    return batch, heads, queries, head_dim


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, but must be on q's device, {q.device}")


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


def _check_key_lengths(key_lengths: Tensor, batch: int, keys: int, q: Tensor) -> None:
    _check_integers("key_lengths", key_lengths)
    if key_lengths.shape != (batch,):
        raise ValueError(f"key_lengths has shape {tuple(key_lengths.shape)}, but must be (B,) with B = {batch}")
    _check_device("key_lengths", key_lengths, q)
    if key_lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = (key_lengths < 0) | (key_lengths > keys)
        if bool(outside.any()):
            raise ValueError(f"key_lengths holds {int(key_lengths[outside][0])}, but must be from 0 to Tk = {keys}")


def _check_integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor of int32 or int64")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is a tensor of {x.dtype}, but must be a tensor of int32 or int64")


def _check_positions(name: str, positions: Tensor, batch: int, tokens: int, q: Tensor) -> None:
    _check_integers(name, positions)
    if tuple(positions.shape) not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"{name} has shape {tuple(positions.shape)}, but must be (B, T) or (1, T) with B = {batch} and T = {tokens}"
        )
    _check_device(name, positions, q)
