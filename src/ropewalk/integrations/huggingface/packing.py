"""Packed rows of transformers: position_ids that restart, read as bounds of documents.

Shape letters: B batch, T tokens, S documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ropewalk.ops.tracing import PLAIN_TYPES

_ATTRIBUTE = "_ropewalk_documents"  # of a tensor of positions whose documents were read
_CHECKED = "_ropewalk_checked"  # of bounds that were compared with those of positions


class Documents(NamedTuple):
    """The documents of packed rows, all rows in one."""

    bounds: Tensor  # (S + 1 or more,), int32: each document's first token, then B · T
    are_from_zero: bool  # each document's first position is 0


class _CachedReading:
    """The documents of positions, and the state of the tensor that they were read in."""

    __slots__ = ("read", "state")

    def __init__(self, state: tuple[Any, ...], read: Documents | None) -> None:
        self.state, self.read = state, read

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # a copy of the positions keeps nothing, and any unpickler reads an empty set


class _Forwards:
    """A count of forwards, by which readings of inference tensors, which count no writes, go out of date."""

    count = 0


def begin_forward() -> None:
    """Let readings of inference tensors go out of date: masks are built once, before a forward's layers."""
    _Forwards.count += 1


def can_read(x: Tensor) -> bool:
    """Say whether the host can read values: not of a graph that is traced or captured."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN_TYPES or x.is_meta:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._functorch.is_batchedtensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def find_documents(positions: Tensor, batch: int, step: int = 1) -> Documents | None:
    """Return the documents of rows, (B or 1, T); None if each row is one, or if the host cannot read them.

    A document ends where neighbours differ by other than `step`: 1 in positions, 0 in numbers of documents. The host
    waits for the device once for each tensor and each version of it.
    """
    cached = _recall(positions, batch, step)
    return None if cached is None else cached.read


def has_none(positions: Tensor) -> bool:
    """Say whether positions were read, and no row has several documents: few calls, as each layer asks."""
    if is_dynamo_compiling():
        return False
    cached = getattr(positions, _ATTRIBUTE, None)
    if type(cached) is not _CachedReading or cached.read is not None:
        return False
    version, address, (shape, strides, *_) = cached.state
    # An inference tensor counts no writes: its version is no number. The reading may be of a view at this address.
    is_same = type(version) is int and version == positions._version and address == positions.data_ptr()
    return is_same and shape == positions.shape and strides == positions.stride()


def check_bounds(bounds: Tensor, cu_seqlens: Tensor, tokens: int, name: str) -> None:
    """Raise if bounds that were passed beside packed positions tell other documents apart: once in a forward.

    Raises:
        ValueError: `name` says which bounds.
    """
    if not (can_read(bounds) and can_read(cu_seqlens)):
        return
    state = (_Forwards.count, _version(cu_seqlens), cu_seqlens.data_ptr(), bounds.data_ptr())
    if getattr(cu_seqlens, _CHECKED, None) == state:
        return
    # Bounds may repeat: a document without tokens.
    starts = [torch.zeros(tokens + 1, dtype=torch.bool, device=bounds.device) for _ in range(2)]
    for start, ends in zip(starts, (bounds, cu_seqlens), strict=True):
        start[ends.to(bounds.device, torch.int64).clamp(0, tokens)] = True
    if not torch.equal(*starts):
        raise ValueError(
            f"{name} tells other documents apart than position_ids, which restart: pass those of the same documents, "
            f"or one of the two"
        )
    setattr(cu_seqlens, _CHECKED, state)


def _recall(positions: Tensor, batch: int, step: int) -> _CachedReading | None:
    """Return what was read of positions before, or read them; None if the host cannot."""
    if not can_read(positions):
        return None
    # Views, as of the same positions for each mask, count the writes to one tensor.
    owner = positions if positions._base is None else positions._base
    state = (_version(positions), positions.data_ptr(), (positions.shape, positions.stride(), batch, step))
    cached = getattr(owner, _ATTRIBUTE, None)
    if type(cached) is not _CachedReading or cached.state != state:
        cached = _CachedReading(state, _read(positions, batch, step))
        setattr(owner, _ATTRIBUTE, cached)
    if owner is not positions and cached.read is None:
        setattr(positions, _ATTRIBUTE, cached)  # for `has_none`
    return cached


def _version(x: Tensor) -> Any:
    return ("forward", _Forwards.count) if x.is_inference() else x._version


@torch.no_grad()
def _read(positions: Tensor, batch: int, step: int) -> Documents | None:
    """Find documents, waiting once."""
    is_start = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    is_start[:, 1:] = positions[:, 1:] - positions[:, :-1] != step
    count, late = torch.stack((is_start.sum(), (is_start & (positions != 0)).sum())).tolist()
    if count == positions.shape[0]:
        return None
    if positions.shape[0] != batch:
        is_start, count = is_start.expand(batch, -1), count * batch
    # The plans of calls are keyed by shapes: few numbers of bounds, of which the last repeat the end.
    fold = 1 << max(0, count.bit_length() - 3)
    n_documents = -(-count // fold) * fold
    starts = torch.nonzero_static(is_start.flatten(), size=n_documents + 1, fill_value=is_start.numel())
    return Documents(starts.squeeze(1).to(torch.int32), late == 0)
