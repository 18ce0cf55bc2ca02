"""A scheme's tables and numbers for one call, made once and remembered for the calls that follow.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim, S
packed sequences.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk.ops.attention.checks import Call, count_keys, token_positions
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
    rotary_offset: int  # the first feature that turns
    score: str | None  # “module:NAME” of the score functions
    parameters: Tensor | None  # (H, anything), float32: what they read
    positions_q: Tensor | None  # (B or 1, Tq), for score functions; None: index + Tk − Tq
    positions_k: Tensor | None  # (B or 1, Tk), for score functions; None: index
    mask: Tensor | None  # (B or 1, H or 1, Tq, Tk), bool
    key_lengths: Tensor | None  # (B,)
    causal: bool
    window: int | None
    scale: float
    key_starts: Tensor | None = None  # (B,)
    query_starts: Tensor | None = None  # (B,)
    cu_seqlens_q: Tensor | None = None  # (S + 1,); None: the batch is dense
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    block_table: Tensor | None = None  # (B, n_pages)
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,), float32
    dropout_p: float = 0.0
    seed: Tensor | None = None  # (1,), int64: of what is dropped
    learned: int = 0  # so many columns of the parameters, from the first, may be learned; 0: all


def prepare(q: Tensor, k: Tensor, call: Call) -> Prepared:
    """Turn a call's scheme into tables and numbers.

    q is (B, H, Tq, D), and k is (B, K, Tk, D), or with a block table (pages, K, page_size, D).
    """
    scheme, positions_q, positions_k = call.position, call.positions_q, call.positions_k
    score, known_by = scheme.score_functions(), _identity(scheme)
    rotation_q, rotation_k = _rotations(q, k, call, known_by)
    parameters = None
    if score is None:
        positions_q = positions_k = None
    else:
        heads = q.shape[1]
        if call.key_starts is not None and (positions_q is None) is not (positions_k is None):
            positions_q, positions_k = token_positions(q, k, call)  # kernels count by index where neither is given

        def make_parameters() -> Tensor | None:
            return scheme.score_parameters(heads, q.device)

        parameters = _remember(("parameters", heads), scheme, known_by, q.device, make_parameters)
    cos_q, sin_q, interleaved, weights, rotary_offset = rotation_q or _NO_ROTATION
    for name, x in (("cos", cos_q), ("sin", sin_q), ("weights", weights), ("parameters", parameters)):
        if x is not None and x.dtype != torch.float32:
            raise TypeError(f"{type(scheme).__name__} gives {name} in {x.dtype}, but must give float32")
    cos_k, sin_k, _, weights, _ = rotation_k or _NO_ROTATION
    return Prepared(
        cos_q,
        sin_q,
        cos_k,
        sin_k,
        weights,
        interleaved,
        rotary_offset,
        score,
        parameters,
        positions_q,
        positions_k,
        call.mask,
        call.key_lengths,
        call.causal,
        call.window,
        call.scale,
        call.key_starts,
        call.query_starts,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.block_table,
        call.softcap,
        None if call.sinks is None else call.sinks.float(),
        call.dropout_p,
        call.seed,
        0 if parameters is None else scheme.learned_columns(),
    )


def map_features(q: Tensor, k: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; what weighs them, to k alone. Differentiable.

    k comes back as it is where it was mapped before, or lies in pages.
    """
    cos_q, sin_q, cos_k, sin_k, weights, interleaved, offset, *_ = prepared
    if cos_q is None or sin_q is None:
        return q, k
    how: dict[str, Any] = {"layout": "bhtd", "interleaved": interleaved, "rotary_offset": offset}
    if cos_k is None or sin_k is None:
        return apply_rope(q, None, cos_q, sin_q, **how), k
    if cos_q is cos_k:
        q, k = apply_rope(q, k, cos_q, sin_q, **how)
    else:
        q, k = apply_rope(q, None, cos_q, sin_q, **how), apply_rope(k, None, cos_k, sin_k, **how)
    return q, k if weights is None else k.mul_(weights)  # it is ours by now


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


_NO_ROTATION: tuple[Tensor | None, Tensor | None, bool, Tensor | None, int] = (None, None, False, None, 0)


def _rotations(q: Tensor, k: Tensor, call: Call, known_by: Identity | None) -> tuple[Rotation | None, Rotation | None]:
    """The maps of q's and of k's features; one for both where their tokens stand at the same positions."""
    queries, head_dim, scheme = q.shape[2], q.shape[3], call.position
    keys = k.shape[2] if call.block_table is None else count_keys(k, call)
    places_q: Tensor | None = None
    places_k: Tensor | None = None
    lowest = keys - queries
    if not (call.cu_seqlens_q is None and call.key_starts is None and call.query_starts is None):
        places_q, places_k = _places(queries, keys, call, q.device)
        # Queries may stand before the first key; of those causal attention makes nothing.
        before = call.key_starts is not None or (call.cu_seqlens_q is not None and places_q is not places_k)
        lowest = -max(queries, keys) if before and not call.causal else 0
    same = call.positions_q is call.positions_k and (
        call.positions_q is not None or (places_q is places_k and (places_q is not None or queries == keys))
    )
    rotation_k = None
    if not (call.keys_rotated or call.block_table is not None):
        start = 0 if places_k is None else lowest
        rotation_k = _rotation(scheme, call.positions_k, places_k, start, keys, head_dim, q.device, known_by)
        if same:
            return rotation_k, rotation_k
    return _rotation(scheme, call.positions_q, places_q, lowest, keys, head_dim, q.device, known_by), rotation_k


def _places(queries: int, keys: int, call: Call, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The positions of `token_positions` where none are given, in few launches; None for keys by their index.

    Those of tokens in no sequence may be anything.
    """
    bounds_q, bounds_k = call.cu_seqlens_q, call.cu_seqlens_k
    if bounds_q is not None and bounds_k is not None:
        index_q, sequences = _unpack(bounds_q, queries)
        if bounds_q is bounds_k and queries == keys:
            return index_q, index_q
        shift = bounds_k.diff() - bounds_q.diff()  # how many keys a sequence has more than queries
        return index_q + F.pad(shift, (0, 1))[sequences], _unpack(bounds_k, keys)[0]
    starts = None if call.key_starts is None else call.key_starts[:, None]
    places_k = None if starts is None else torch.arange(keys, device=device) - starts
    if call.query_starts is None:
        if queries == keys:
            return places_k, places_k
        places_q = torch.arange(keys - queries, keys, device=device)[None]
    else:
        places_q = torch.arange(queries, device=device) + call.query_starts[:, None]
    return places_q if starts is None else places_q - starts, places_k


def _unpack(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The index of each packed token in its sequence, (1, total), and the sequence, S for none, likewise."""
    tokens = torch.arange(total, dtype=bounds.dtype, device=bounds.device)[None]
    sequences = torch.searchsorted(bounds[1:], tokens, right=True)
    return tokens - bounds[sequences], sequences


def _rotation(
    scheme: PositionScheme,
    positions: Tensor | None,
    places: Tensor | None,
    start: int,
    stop: int,
    head_dim: int,
    device: torch.device,
    known_by: Identity | None,
) -> Rotation | None:
    """The map of features at `positions`; without them at `places`, all from start to below stop; or at all of those.

    It has a batch dimension in front.
    """
    if positions is not None:
        return scheme.rotation(positions.long(), head_dim)
    if known_by is None:
        every = torch.arange(start, stop, device=device)[None] if places is None else places.long()
        return scheme.rotation(every, head_dim)
    # One table serves every length up to the next power of two, in both directions.
    low = 0 if start >= 0 else -_power_of_two(-start)
    high = _power_of_two(stop)
    table = _remember(
        ("rotation", head_dim, low, high),
        scheme,
        known_by,
        device,
        lambda: scheme.rotation(torch.arange(low, high, device=device)[None], head_dim),
    )
    if table is None:
        return None
    cos, sin = table.cos, table.sin
    if places is None:
        cos, sin = cos[:, start - low : stop - low], sin[:, start - low : stop - low]
    else:
        rows = (places if low == 0 else places - low).clamp(0, high - low - 1)  # whatever the device holds
        cos, sin = F.embedding(rows, cos[0]), F.embedding(rows, sin[0])
    return Rotation(cos, sin, table.interleaved, table.weights, table.offset)


def _power_of_two(count: int) -> int:
    return max(256, 1 << max(0, count - 1).bit_length())


_MOST_REMEMBERED = 16
_remembered: OrderedDict[Any, tuple[PositionScheme, Any]] = OrderedDict()
_captured: dict[Any, Any] = {}  # read by CUDA graphs: they are never told that memory is gone, so it must not go
_lock = threading.Lock()


Identity = tuple[Any, ...]
_PLAIN_TYPES = {bool, int, float, str, type(None)}


def _identity(scheme: PositionScheme) -> Identity | None:
    """What tells a scheme apart from others, if it is plain data, and this call is neither traced nor faked."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not hasattr(scheme, "__dict__"):
        return None
    identity: list[Any] = [type(scheme)]
    for name, value in vars(scheme).items():
        identity.append(name)
        if type(value) in _PLAIN_TYPES:
            identity.append(value)
        elif isinstance(value, Tensor):
            if isinstance(value, FakeTensor) or value.requires_grad or value.is_inference():
                return None
            identity.append((id(value), value._version))  # which one it is, and how often it was written
        elif isinstance(value, Hashable):
            identity.append(value)
        else:
            return None
    return tuple(identity)


def _remember(
    kind: tuple[Any, ...],
    scheme: PositionScheme,
    known_by: Identity | None,
    device: torch.device,
    make: Callable[[], Any],
) -> Any:
    """What `make` returns, made once for a kind, a scheme of this identity and a device; anew where it has none."""
    if known_by is None:
        return make()
    key = (kind, device, known_by)
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
