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
    positions_q: Tensor | None  # (B or 1, Tq), for score functions and what is far; None: index + Tk − Tq
    positions_k: Tensor | None  # (B or 1, Tk), likewise; None: index
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
    far_window: int | None = None  # from how many positions apart on a pair is far; None: none is
    cos_past: Tensor | None = None  # (B or 1, Tq, R/2), float32: of queries that meet far keys behind them
    sin_past: Tensor | None = None
    cos_future: Tensor | None = None  # of those that meet far keys ahead; None: none are
    sin_future: Tensor | None = None
    cos_far: Tensor | None = None  # (B or 1, Tk, R/2): of far keys; None: their features are left alone
    sin_far: Tensor | None = None


def tables_of(prepared: Prepared) -> tuple[Tensor | None, ...]:
    """What maps features: all tables and weights."""
    near = (prepared.cos_q, prepared.sin_q, prepared.cos_k, prepared.sin_k, prepared.weights)
    queries = (prepared.cos_past, prepared.sin_past, prepared.cos_future, prepared.sin_future)
    return *near, *queries, prepared.cos_far, prepared.sin_far


class FarFeatures(NamedTuple):
    """What pairs that are far apart meet with, mapped: queries (B, H, Tq, D) and keys (B, K, Tk, D)."""

    past: Tensor  # queries that meet keys behind them
    future: Tensor | None  # those that meet keys ahead; None: none are far
    keys: Tensor


def prepare(q: Tensor, k: Tensor, call: Call) -> Prepared:
    """Turn a call's scheme into tables and numbers.

    q is (B, H, Tq, D), and k is (B, K, Tk, D), or with a block table (pages, K, page_size, D).
    """
    scheme, positions_q, positions_k = call.position, call.positions_q, call.positions_k
    score, known_by, far_window = scheme.score_functions(), _identity(scheme), _far_window(q, k, call)
    rotations = _Rotations(q, k, call, known_by)
    rotation_q, rotation_k = rotations.near()
    far = rotations.far() if far_window is not None else _NOTHING_FAR
    parameters = None
    if score is None and far_window is None:
        positions_q = positions_k = None
    elif (positions_q is None) is not (positions_k is None) and (call.key_starts is not None or score is None):
        positions_q, positions_k = token_positions(q, k, call)  # kernels count by index where neither is given
    if score is not None:
        heads = q.shape[1]

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
        far_window,
        *far,
    )


def map_features(q: Tensor, k: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Do to q and k what the scheme does to features; what weighs them, to k alone. Differentiable.

    k comes back as it is where it was mapped before. It does not lie in pages.
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


def map_far_features(q: Tensor, k: Tensor, prepared: Prepared) -> FarFeatures | None:
    """Do to q and k what the scheme does to features of pairs that are far apart; None if none are. Differentiable."""
    if prepared.far_window is None or prepared.cos_past is None or prepared.sin_past is None:
        return None
    how: dict[str, Any] = {
        "layout": "bhtd",
        "interleaved": prepared.interleaved,
        "rotary_offset": prepared.rotary_offset,
    }
    past, future, keys = apply_rope(q, None, prepared.cos_past, prepared.sin_past, **how), None, k
    if prepared.cos_future is not None and prepared.sin_future is not None:
        future = apply_rope(q, None, prepared.cos_future, prepared.sin_future, **how)
    if prepared.cos_far is not None and prepared.sin_far is not None:
        keys = apply_rope(k, None, prepared.cos_far, prepared.sin_far, **how)
    return FarFeatures(past, future, keys)


_NO_ROTATION: tuple[Tensor | None, Tensor | None, bool, Tensor | None, int] = (None, None, False, None, 0)
_NOTHING_FAR: tuple[Tensor | None, ...] = (None,) * 6


def _far_window(q: Tensor, k: Tensor, call: Call) -> int | None:
    """From how many positions apart on a pair is far; None where it is known that none is."""
    window = call.position.far_window()
    if window is None or torch.compiler.is_compiling():  # lengths are not to be constants there
        return window
    by_index = call.positions_q is None and call.positions_k is None
    return None if by_index and max(q.shape[2], count_keys(k, call)) <= window else window


class _Rotations:
    """The maps of features of one call."""

    def __init__(self, q: Tensor, k: Tensor, call: Call, known_by: Identity | None) -> None:
        self.call, self.known_by = call, known_by
        self.head_dim, self.device = q.shape[3], q.device
        self.queries, self.keys = q.shape[2], count_keys(k, call)
        self.places_q: Tensor | None = None
        self.places_k: Tensor | None = None
        self.lowest = self.keys - self.queries
        if not (call.cu_seqlens_q is None and call.key_starts is None and call.query_starts is None):
            self.places_q, self.places_k = _places(self.queries, self.keys, call, q.device)
            # Queries may stand before the first key; of those causal attention makes nothing.
            before = call.key_starts is not None or (
                call.cu_seqlens_q is not None and self.places_q is not self.places_k
            )
            self.lowest = -max(self.queries, self.keys) if before and not call.causal else 0

    def near(self) -> tuple[Rotation | None, Rotation | None]:
        """Those of q's and of k's features; one for both where their tokens stand at the same positions."""
        call, places_q, places_k = self.call, self.places_q, self.places_k
        has_its_own = type(call.position).query_rotation is not PositionScheme.query_rotation
        of_queries = self._of_queries("query_rotation") if has_its_own else None
        rotation_k = None
        if not call.keys_rotated:
            rotation_k = self._of_keys("rotation")
            same = call.positions_q is call.positions_k and (
                call.positions_q is not None
                or (places_q is places_k and (places_q is not None or self.queries == self.keys))
            )
            if same and of_queries is None:
                return rotation_k, rotation_k
        return of_queries or self._of_queries("rotation"), rotation_k

    def far(self) -> tuple[Tensor | None, ...]:
        """cos and sin of far queries, as `Prepared` has them, and of far keys."""
        past, future = self._of_queries("far_rotation", "past"), None
        by_index = self.call.positions_q is None and self.call.positions_k is None
        if not (self.call.causal and by_index):
            future = self._of_queries("far_rotation", "future")
        keys = self._of_keys("far_rotation", "keys")
        return tuple(x for table in (past, future, keys) for x in (table or _NO_ROTATION)[:2])

    def _of_queries(self, method: str, *of: str) -> Rotation | None:
        return self._tabulate(self.call.positions_q, self.places_q, self.lowest, self.keys, method, *of)

    def _of_keys(self, method: str, *of: str) -> Rotation | None:
        start = 0 if self.places_k is None else self.lowest
        return self._tabulate(self.call.positions_k, self.places_k, start, self.keys, method, *of)

    def _tabulate(
        self, positions: Tensor | None, places: Tensor | None, start: int, stop: int, method: str, *of: str
    ) -> Rotation | None:
        """What a scheme's method returns for `positions`; without them `places`, all from start to below stop; or all.

        It has a batch dimension in front.
        """
        make: Callable[..., Rotation | None] = getattr(self.call.position, method)
        device = self.device
        if positions is not None:
            return make(positions.long(), self.head_dim, *of)
        if self.known_by is None:
            every = torch.arange(start, stop, device=device)[None] if places is None else places.long()
            return make(every, self.head_dim, *of)
        # One table serves every length up to the next power of two, in both directions.
        low = 0 if start >= 0 else -_power_of_two(-start)
        high = _power_of_two(stop)
        table = _remember(
            (method, *of, self.head_dim, low, high),
            self.call.position,
            self.known_by,
            device,
            lambda: make(torch.arange(low, high, device=device)[None], self.head_dim, *of),
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
        elif isinstance(value, PositionScheme):
            within = _identity(value)
            if within is None:
                return None
            identity.append(within)
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
