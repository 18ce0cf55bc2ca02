"""A scheme's tables and numbers for one call, made once and remembered for the calls that follow.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk.ops.attention.checks import Call
from ropewalk.ops.rope.api import apply_rope
from ropewalk.positions import PositionScheme, Rotation


class Prepared(NamedTuple):
    """What a kernel needs beside q, k and v: a call whose scheme has become numbers and tensors."""

    cos_q: Tensor | None  # (B or 1, Tq, R/2), float32; None where features are left alone
    sin_q: Tensor | None
    cos_k: Tensor | None  # (B or 1, Tk, R/2)
    sin_k: Tensor | None
    weights: Tensor | None  # (D,), float32: of k's features
    interleaved: bool
    score: str | None  # “module:NAME” of the score functions
    parameters: Tensor | None  # (H, anything), float32: what they read
    positions_q: Tensor | None  # (B or 1, Tq), for score functions; None: index + Tk − Tq
    positions_k: Tensor | None  # (B or 1, Tk), for score functions; None: index
    mask: Tensor | None  # (B or 1, H or 1, Tq, Tk), bool
    key_lengths: Tensor | None  # (B,)
    causal: bool
    window: int | None
    scale: float


def prepare(q: Tensor, k: Tensor, call: Call) -> Prepared:
    """Turn a call's scheme into tables and numbers; q is (B, H, Tq, D) and k (B, K, Tk, D)."""
    queries, keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    scheme, score = call.position, call.position.score_functions()
    remembers = _may_remember(scheme)
    rotation_q = rotation_k = _rotation(scheme, call.positions_k, 0, keys, head_dim, q.device, remembers)
    if call.positions_q is not call.positions_k or (call.positions_q is None and queries != keys):
        rotation_q = _rotation(scheme, call.positions_q, keys - queries, keys, head_dim, q.device, remembers)
    parameters = None
    if score is not None:
        heads = q.shape[1]

        def make_parameters() -> Tensor | None:
            return scheme.score_parameters(heads, q.device)

        kind = ("parameters", heads)
        parameters = _remember(kind, scheme, q.device, make_parameters) if remembers else make_parameters()
    cos_q, sin_q, interleaved, _ = rotation_q or (None, None, False, None)
    cos_k, sin_k, _, weights = rotation_k or (None, None, False, None)
    for name, x in (("cos", cos_k), ("sin", sin_k), ("weights", weights), ("parameters", parameters)):
        if x is not None and x.dtype != torch.float32:
            raise TypeError(f"{type(scheme).__name__} gives {name} in {x.dtype}, but must give float32")
    return Prepared(
        cos_q,
        sin_q,
        cos_k,
        sin_k,
        weights,
        interleaved,
        score,
        parameters,
        None if score is None else call.positions_q,
        None if score is None else call.positions_k,
        call.mask,
        call.key_lengths,
        call.causal,
        call.window,
        call.scale,
    )


def map_features(q: Tensor, k: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; what weighs them, to k alone. Differentiable."""
    cos_q, sin_q, cos_k, sin_k = prepared.cos_q, prepared.sin_q, prepared.cos_k, prepared.sin_k
    if cos_q is None or sin_q is None or cos_k is None or sin_k is None:
        return q, k
    if cos_q is cos_k:
        q, k = apply_rope(q, k, cos_q, sin_q, layout="bhtd", interleaved=prepared.interleaved)
    else:
        q = apply_rope(q, None, cos_q, sin_q, layout="bhtd", interleaved=prepared.interleaved)
        k = apply_rope(k, None, cos_k, sin_k, layout="bhtd", interleaved=prepared.interleaved)
    return q, k if prepared.weights is None else k.mul_(prepared.weights)  # it is ours by now


def empty_aligned(x: Tensor, *, dense: bool = False) -> Tensor:
    """Memory for a tensor of x's shape (B, H, T, D) that kernels write: dense features, all else in steps of 16 bytes.

    It has x's order of dimensions where that allows it, unless it must be dense; where D does not fill 16 bytes, rows
    are longer than D.
    """
    vector = 16 // x.element_size()
    head_dim = x.shape[3]
    if head_dim % vector == 0 and x.stride(3) == 1 and not dense:
        return torch.empty_like(x)
    width = (head_dim + vector - 1) // vector * vector
    memory = torch.empty(*x.shape[:3], width, dtype=x.dtype, device=x.device)
    return memory if width == head_dim else memory[..., :head_dim]


def _rotation(
    scheme: PositionScheme,
    positions: Tensor | None,
    start: int,
    stop: int,
    head_dim: int,
    device: torch.device,
    remembers: bool,
) -> Rotation | None:
    """The map of features at `positions`, or at those from start to stop, with a batch dimension in front."""
    if positions is not None:
        return scheme.rotation(positions.long(), head_dim)
    if not remembers:
        return scheme.rotation(torch.arange(start, stop, device=device)[None], head_dim)
    # One table serves every length up to the next power of two, in both directions.
    low = 0 if start >= 0 else -_power_of_two(-start)
    high = _power_of_two(stop)
    table = _remember(
        ("rotation", head_dim, low, high),
        scheme,
        device,
        lambda: scheme.rotation(torch.arange(low, high, device=device)[None], head_dim),
    )
    if table is None:
        return None
    rows = slice(start - low, stop - low)
    return Rotation(table.cos[:, rows], table.sin[:, rows], table.interleaved, table.weights)


def _power_of_two(count: int) -> int:
    return max(256, 1 << max(0, count - 1).bit_length())


_MOST_REMEMBERED = 16
_remembered: OrderedDict[Any, tuple[PositionScheme, Any]] = OrderedDict()
_captured: dict[Any, Any] = {}  # read by CUDA graphs: they are never told that memory is gone, so it must not go
_lock = threading.Lock()


def _may_remember(scheme: PositionScheme) -> bool:
    """Whether the scheme is plain data, and this call neither traced nor faked."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not hasattr(scheme, "__dict__"):
        return False
    return all(_is_plain(value) for value in vars(scheme).values())


def _is_plain(value: Any) -> bool:
    """Whether an attribute's value can be told apart from others, and its changes be seen."""
    if isinstance(value, Tensor):
        return not (isinstance(value, FakeTensor) or value.requires_grad or value.is_inference())
    return isinstance(value, Hashable)


def _remember(kind: tuple[Any, ...], scheme: PositionScheme, device: torch.device, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once for a scheme of these values, a kind and a device."""
    values = ((name, _identity(value)) for name, value in vars(scheme).items())
    key = (kind, device, type(scheme), *values)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _lock:
        found = _remembered.get(key)
        if found is not None:
            _remembered.move_to_end(key)
            if capturing:
                _captured[key] = found
            return found[1]
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    if not capturing:  # what a graph makes exists while it is replayed
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the next reader may be on another stream
        with _lock:
            _remembered[key] = scheme, made  # the scheme is kept, so that its tensors keep their identity
            while len(_remembered) > _MOST_REMEMBERED:
                _remembered.popitem(last=False)
    return made


def _identity(value: Any) -> Any:
    """What tells values of a scheme's attribute apart: of a tensor, which one it is and how often it was written."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return value
