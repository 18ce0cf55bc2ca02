"""Masks of transformers' models, converted for `ropewalk.attention`.

Each layer converts a user's mask anew: writes through `.data` or a NumPy view leave no trace by which to tell that what
was made of a mask is out of date. On a GPU that is one launch for a mask of keys (`mask_kernel`), and PyTorch's
operators elsewhere.

A mask that this package made itself can keep its conversion (`keep`), so that all layers of a forward share one. It is
a copy, whose memory no user has but by the mask. See `recall` for when layers convert it anew.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk import device as gpu
from ropewalk.ops.tracing import is_plain_eager, is_transformed

_ATTRIBUTE = "_ropewalk_read_mask"  # of a mask that keeps its conversion


class ReadMask(NamedTuple):
    """A mask as `ropewalk.attention` takes it."""

    allowed: Tensor  # bool, (B or 1, H or 1, T or 1, T or 1), True where a query may attend
    key_starts: Tensor  # (B,), int32: the first key that any query of a batch row may attend
    key_lengths: Tensor  # (B,), int32: one past the last


class _CachedMask:
    """The conversion of a mask, and the state of the mask that it was computed in."""

    __slots__ = ("address", "is_captured", "read", "version")

    def __init__(self, mask: Tensor, read: ReadMask) -> None:
        self.read = read
        self.version = mask._version
        self.address = mask.data_ptr()
        self.is_captured = _is_capturing(mask)

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # a copy of the mask keeps nothing, and any unpickler reads an empty set


def keep(mask: Tensor, read: ReadMask) -> Tensor:
    """Let a mask keep its conversion, for `recall`: return it, or a view of it that does."""
    # Inference tensors count no writes, and tensors of XLA have no address. (Dynamo traces the first test alone.)
    if is_plain_eager(mask) and not is_transformed() and (mask.is_cpu or mask.is_cuda) and not mask.is_inference():
        if mask is read.allowed:
            mask = mask.view(mask.shape)  # or it would keep itself, and its memory until garbage is collected
        setattr(mask, _ATTRIBUTE, _CachedMask(mask, read))
    return mask


def recall(mask: Tensor, batch: int, keys: int) -> ReadMask | None:
    """Return what a mask keeps, for that batch and number of keys; None where it is to be converted anew.

    The conversion goes with the very object: none of its copies, views and casts has it. It is not used under
    torch.compile; nor after a write to the mask that PyTorch counts, or new `.data`; nor in the capture of a CUDA graph
    that does not hold the launch that computed it. A write that PyTorch does not count, through `mask.data` or DLPack,
    changes which keys within the old bounds are attended, and not the bounds.
    """
    if torch.compiler.is_compiling():
        return None
    cached = getattr(mask, _ATTRIBUTE, None)
    if (
        not isinstance(cached, _CachedMask)
        or cached.version != mask._version
        or cached.address != mask.data_ptr()
        or cached.read.key_starts.shape[0] != batch
        or cached.read.allowed.shape[3] != keys
        or cached.is_captured != _is_capturing(mask)
    ):
        return None
    return cached.read


def read_mask(mask: Tensor, batch: int, n_heads: int, tokens: int) -> ReadMask:
    """Convert one of transformers' masks for self-attention; `BERTAttention.forward` lists them and the errors."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is {type(mask).__name__}, but must be a tensor")
    cached = recall(mask, batch, tokens) if mask.dtype == torch.bool else None
    if cached is not None:
        return cached
    shape, is_padding = tuple(mask.shape), mask.shape == (batch, tokens)
    full = (batch, n_heads, tokens, tokens)
    if not is_padding and not (mask.ndim == 4 and all(n in (1, size) for n, size in zip(shape, full, strict=True))):
        raise ValueError(
            f"attention_mask has shape {shape}, but must be (B, T) or (B or 1, H or 1, T or 1, T or 1) with "
            f"B = {batch}, H = {n_heads} and T = {tokens}"
        )
    if mask.requires_grad:
        raise _bias_error(mask)
    if not is_padding:
        mask = drop_equal_rows(mask)
    if mask.dtype != torch.bool:
        (_check_padding if is_padding else _check_additive)(mask)
    if is_padding or mask.shape[1:3] == (1, 1):
        return read_keys(mask, batch, tokens)
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if allowed.shape[3] != tokens:
        allowed = allowed.expand(-1, -1, -1, tokens)
    starts, ends = find_key_bounds(allowed)
    return ReadMask(allowed, starts.expand(batch), ends.expand(batch))


def read_keys(mask: Tensor, batch: int, keys: int, *, copy: bool = False) -> ReadMask:
    """Convert a mask of keys, its values unchecked: one launch on a GPU.

    mask is of any dtype, (B or 1, Tk or 1), where all but 0 is attended; or (B or 1, 1, 1, Tk or 1), bool, or additive,
    where 0 is attended. copy: let `allowed` have memory of its own. A bool mask is not copied otherwise.
    """
    rows, width, is_padding = mask.shape[0], mask.shape[-1], mask.ndim == 2
    stores, is_additive = copy or mask.dtype != torch.bool, not (is_padding or mask.dtype == torch.bool)
    read_by_kernel = _find_kernel(mask)
    if read_by_kernel is None:
        allowed = mask
        if stores:
            allowed = mask == 0 if is_additive else mask != 0
        if width != keys:
            allowed = allowed.expand(*mask.shape[:-1], keys)
        starts, ends = _reduce(allowed if is_padding else allowed[:, 0, 0])
        return ReadMask(allowed[:, None, None] if is_padding else allowed, starts.expand(batch), ends.expand(batch))
    starts, ends, stored = read_by_kernel(mask, batch, keys, is_additive, stores)
    if stored is not None:
        return ReadMask(stored, starts, ends)
    allowed = mask.view(rows, 1, 1, width) if is_padding else mask
    return ReadMask(allowed if width == keys else allowed.expand(-1, -1, -1, keys), starts, ends)


def find_key_bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and the end of the keys that any query may attend: (B or 1,) each, int32, 0 without keys.

    mask is bool, or uint8 of 0 and 1, (B or 1, Tk) or (B or 1, H or 1, Tq or 1, Tk). The host does not wait for it.
    """
    attended = mask.view(torch.bool)
    if attended.ndim == 4:
        attended = drop_equal_rows(attended)
        attended = attended[:, 0, 0] if attended.shape[1:3] == (1, 1) else attended.any(dim=2).any(dim=1)
    read_by_kernel = _find_kernel(attended)
    if read_by_kernel is None:
        return _reduce(attended)
    starts, ends, _ = read_by_kernel(attended, *attended.shape, False, False)
    return starts, ends


def _reduce(attended: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bounds of keys, (B, Tk), bool, by PyTorch's operators."""
    batch, keys = attended.shape
    if keys == 0:
        none = torch.zeros(batch, dtype=torch.int32, device=attended.device)
        return none, none
    # In int64 to the end: a dynamic length is an int64 in the kernels that Inductor writes, and int32 reductions over
    # it do not compile with torch 2.11 (“initial type int32 but is re-assigned to int64”).
    index = torch.arange(keys, device=attended.device)
    ends = torch.where(attended, index + 1, 0).amax(dim=1)
    starts = torch.where(attended, index, keys).amin(dim=1).minimum(ends)
    return starts.to(torch.int32), ends.to(torch.int32)


def _find_kernel(mask: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
    """Return the function that reads a mask of keys by a kernel; None where PyTorch is to read this one."""
    if not is_plain_eager(mask) or is_transformed():
        return None
    return _load_kernel(mask.device, mask.dtype)


@lru_cache
def _load_kernel(
    device: torch.device, dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
    if gpu.why_no_triton(device) is not None:
        return None
    from ropewalk.modules import mask_kernel

    return mask_kernel.read if dtype in mask_kernel.DTYPES else None


def _is_capturing(mask: Tensor) -> bool:
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


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
    if x.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)  # vmap's values depend on the row


def _check_padding(mask: Tensor) -> None:
    if is_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask, (B, T), holds other values, but must hold 1 (token) and 0 (padding) alone")


def _check_additive(mask: Tensor) -> None:
    if not mask.is_floating_point():
        kind = f"a tensor of {mask.dtype}"
        raise TypeError(f"attention_mask is {kind}, but with 4 dimensions must be bool or floating point")
    if is_readable(mask) and not bool(masks_only(mask)):
        raise _bias_error(mask)


def _bias_error(mask: Tensor) -> ValueError:
    return ValueError(
        "attention_mask is a bias of the scores, but a floating-point mask must hold 0 (attend) and "
        f"{torch.finfo(mask.dtype).min:.4g} or -inf (mask out) alone, and not require grad; a bias can be a position "
        "scheme, such as T5Bias"
    )
