"""Masks of transformers' models, converted for `ropewalk.attention`.

Each layer converts its mask anew: writes through `.data` or a NumPy view leave no trace by which to tell that what was
made of a mask is out of date.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class ReadMask(NamedTuple):
    """A mask as `ropewalk.attention` takes it."""

    allowed: Tensor  # bool, (B or 1, H or 1, T or 1, T or 1), True where a query may attend
    key_starts: Tensor  # (B,), int32: the first key that any query of a batch row may attend
    key_lengths: Tensor  # (B,), int32: one past the last


def read_mask(mask: Tensor, batch: int, n_heads: int, tokens: int) -> ReadMask:
    """Convert one of transformers' masks for self-attention; `BERTAttention.forward` lists them and the errors."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is {type(mask).__name__}, but must be a tensor")
    shape, is_padding = tuple(mask.shape), mask.shape == (batch, tokens)
    full = (batch, n_heads, tokens, tokens)
    if not is_padding and not (mask.ndim == 4 and all(n in (1, size) for n, size in zip(shape, full, strict=True))):
        raise ValueError(
            f"attention_mask has shape {shape}, but must be (B, T) or (B or 1, H or 1, T or 1, T or 1) with "
            f"B = {batch}, H = {n_heads} and T = {tokens}"
        )
    if mask.requires_grad:
        raise _bias_error(mask)
    if mask.dtype != torch.bool:
        mask = (_padding_as_bool if is_padding else _additive_as_bool)(mask)
    if not is_padding and mask.shape[3] != tokens:
        mask = mask.expand(-1, -1, -1, tokens)
    starts, ends = find_key_bounds(mask)
    allowed = mask[:, None, None] if is_padding else drop_equal_rows(mask)
    return ReadMask(allowed, starts.expand(batch), ends.expand(batch))


def find_key_bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and the end of the keys that any query may attend: (B or 1,) each, int32, 0 without keys.

    mask is bool, or uint8 of 0 and 1, (B or 1, Tk) or (B or 1, H or 1, Tq or 1, Tk). The host does not wait for it.
    """
    kept = mask.view(torch.bool)
    if kept.ndim == 4:
        kept = drop_equal_rows(kept)
        kept = kept[:, 0, 0] if kept.shape[1:3] == (1, 1) else kept.any(dim=2).any(dim=1)
    batch, keys = kept.shape
    if keys == 0:
        none = torch.zeros(batch, dtype=torch.int32, device=mask.device)
        return none, none
    # In int64 to the end: a dynamic length is an int64 in the kernels that Inductor writes, and int32 reductions over
    # it do not compile with torch 2.11 (“initial type int32 but is re-assigned to int64”).
    index = torch.arange(keys, device=mask.device)
    ends = torch.where(kept, index + 1, 0).amax(dim=1)
    starts = torch.where(kept, index, keys).amin(dim=1).minimum(ends)
    return starts.to(torch.int32), ends.to(torch.int32)


def drop_equal_rows(mask: Tensor) -> Tensor:
    """Undo the expansion of a mask over heads and queries, by which transformers expands padding.

    Masks of other than 4 dimensions are returned unchanged.
    """
    for dim in (1, 2) if mask.ndim == 4 else ():
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def masks_only(mask: Tensor) -> Tensor:
    """Test whether an additive mask holds 0 and the lowest numbers, or −inf, alone: a bool tensor, ()."""
    return ((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all()


def is_readable(x: Tensor) -> bool:
    """Say whether x's values can be read without waiting for a device."""
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def _padding_as_bool(mask: Tensor) -> Tensor:
    if is_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask, (B, T), holds other values, but must hold 1 (token) and 0 (padding) alone")
    return mask != 0


def _additive_as_bool(mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        kind = f"a tensor of {mask.dtype}"
        raise TypeError(f"attention_mask is {kind}, but with 4 dimensions must be bool or floating point")
    mask = drop_equal_rows(mask)
    if is_readable(mask) and not bool(masks_only(mask)):
        raise _bias_error(mask)
    return mask == 0


def _bias_error(mask: Tensor) -> ValueError:
    return ValueError(
        "attention_mask is a bias of the scores, but a floating-point mask must hold 0 (attend) and "
        f"{torch.finfo(mask.dtype).min:.4g} or -inf (mask out) alone, and not require grad; a bias can be a position "
        "scheme, such as T5Bias"
    )
