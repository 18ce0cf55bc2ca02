"""A call of sharded attention: its arguments, its features normed and mapped, and one call of `attention` in it.

Tensors are (B, H, T, D) here, for packed documents too. Letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention import api
from ropewalk.ops.attention.backends import choose
from ropewalk.ops.attention.call import AttentionCall, from_bhtd
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.tables import goes_with_rotation, identity_of, map_features, norm_call
from ropewalk.ops.rope.api import normalize
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.parallel.layout import SequenceLayout
from ropewalk.schemes import NoPosition, PositionScheme
from ropewalk.schemes.heads import OfRow


class ShardedCall(NamedTuple):
    """A call of sharded attention. q, k and v are shards, and hold numbers where their tokens are padding."""

    layout: SequenceLayout
    q: Tensor  # (B, H, T_local, D)
    k: Tensor
    v: Tensor
    scheme: PositionScheme  # of the scores that are left: q and k are mapped, but for a scheme with two ranges
    positions: Tensor  # (1 or B, T_local)
    causal: bool
    left: int | None  # keys before its own that a query attends; None: all
    right: int | None  # those after it; None with `causal`
    sinks: Tensor | None
    dropout_p: float
    options: dict[str, Any]  # the other keywords of `attention`
    needs_lse: bool = True  # whether the caller reads the log-sum-exp; else a method may return that of any heads

    @property
    def has_window(self) -> bool:
        """Whether a query attends fewer keys than causality allows."""
        return self.left is not None or self.right is not None

    @property
    def is_two_range(self) -> bool:
        """Whether far pairs have features of their own, which are mapped where they are attended."""
        return self.scheme.far_window() is not None

    @property
    def reads_positions(self) -> bool:
        """Whether scores depend on positions, beyond the features."""
        return self.is_two_range or self.scheme.has_score_mod()

    @property
    def window(self) -> tuple[int, int] | None:
        """The window, as `attention` takes it."""
        if not self.has_window:
            return None
        return tuple(-1 if side is None else side for side in (self.left, self.right))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class ScoresAlone(PositionScheme):
    """The change of scores of a scheme whose map of features is done."""

    inner: PositionScheme

    def kernel_score_mod(self) -> str | None:
        """Name the inner scheme's."""
        return self.inner.kernel_score_mod()

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor | None:
        """Return the inner scheme's."""
        return self.inner.score_mod_params(n_heads, device)

    def n_learned_params(self) -> int:
        """Count the inner scheme's."""
        return self.inner.n_learned_params()

    def has_score_mod(self) -> bool:
        """Ask the inner scheme."""
        return self.inner.has_score_mod()

    def is_elementwise(self) -> bool:
        """Ask the inner scheme."""
        return self.inner.is_elementwise()

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Change scores as the inner scheme does."""
        return self.inner.score_mod(scores, distance)


def prepare_features(call: ShardedCall, norm: QKNorm | None) -> tuple[Tensor, Tensor, Tensor, PositionScheme]:
    """Norm and map the features of a shard; return q, k, v and the scheme of what is left to do."""
    q, k, v, scheme, layout = call.q, call.k, call.v, call.scheme, call.layout
    if layout.n_local * layout.size != layout.n_tokens:  # padding may hold anything: no gradient of a norm may see it
        missing = ~layout.valid[:, None]
        q, k, v = (x.masked_fill(missing, 1) for x in (q, k, v))
    norm_impl = "reference" if call.options["impl"] == "reference" else None
    with outside():
        if norm is not None and not goes_with_rotation(norm, scheme):
            q, k = normalize((q, k), norm, "bhtd", norm_impl)
            norm = None
        if norm is None and not _maps_features(scheme):
            return q, k, v, scheme
        mapped = _call_that_maps(call._replace(q=q, k=k, v=v))
        if norm is not None:
            mapped = norm_call(mapped, norm, norm_impl)
            is_mapped = type(mapped.scheme) is not type(scheme)
            q, k = mapped.q, mapped.k
        else:
            is_mapped = mapped.tables.q is not None
            if is_mapped:
                q, k = map_features(mapped)
    if not is_mapped:
        return q, k, v, scheme
    return q, k, v, ScoresAlone(scheme) if scheme.has_score_mod() else NoPosition()


def _call_that_maps(call: ShardedCall) -> AttentionCall:
    """Return a call whose tables map the features of a shard; tables by the layout's positions are cached."""
    q, k, v, layout, positions = call.q, call.k, call.v, call.layout, call.positions
    key: Any = None
    is_plain = not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled())
    if is_plain and not torch._C._len_torch_dispatch_stack() and positions.data_ptr() == layout.positions.data_ptr():
        identity = identity_of(call.scheme)
        key = None if identity is None else ("maps", identity, q.shape, k.shape, v.shape, q.dtype)
    mapped: AttentionCall | None = None if key is None else layout.tables.get(key)
    if mapped is None:
        mapped = api.make_call(
            q, k, v, position=call.scheme, positions_q=positions, positions_k=positions, layout="bhtd"
        )
        is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if key is not None and mapped.q is q and not is_captured:
            if q.is_cuda:
                torch.cuda.current_stream().synchronize()  # the next reader may be on another stream
            layout.tables[key] = mapped._replace(q=q[:0].detach(), k=k[:0].detach(), v=v[:0].detach())
        return mapped
    return mapped._replace(q=q, k=k, v=v)


def _maps_features(scheme: PositionScheme) -> bool:
    """Say whether features are mapped before they are sent: those of two ranges are where they are attended."""
    kind = type(scheme)
    has_map = (kind.rotation, kind.query_rotation) != (PositionScheme.rotation, PositionScheme.query_rotation)
    return has_map and scheme.far_window() is None


# The layout of the context that a thread is in; _OUTSIDE in the calls that make up a sharded one.
_OUTSIDE = object()
_current: ContextVar[Any] = ContextVar("ropewalk_context_parallel", default=None)
_entered: list[SequenceLayout] = []  # by any thread
_lock = threading.Lock()


@contextmanager
def inside(layout: SequenceLayout, attend_shards: Callable[..., Any]) -> Iterator[None]:
    """Let `attention` take shards, by a function of a layout and its own arguments."""

    def find() -> Callable[..., Any] | None:
        current = current_layout()
        return None if current is None else functools.partial(attend_shards, current)

    token = _current.set(layout)
    with _lock:
        _entered.append(layout)
        api.find_sharded = find
    try:
        yield
    finally:
        _current.reset(token)
        with _lock:
            _entered.remove(layout)
            if not _entered:
                api.find_sharded = None


@contextmanager
def outside() -> Iterator[None]:
    """Let `attention` take whole sequences: the calls that make up a sharded one."""
    if not _entered:  # torch.compile cannot trace a ContextVar
        yield
        return
    token = _current.set(_OUTSIDE)
    try:
        yield
    finally:
        _current.reset(token)


def current_layout() -> SequenceLayout | None:
    """Return the layout of the context that a call is in.

    On a GPU autograd runs a backward in threads of its own, where a ContextVar is unset; activation checkpointing runs
    layers again there.
    """
    layout = _current.get()
    if layout is None and torch._C._current_graph_task_id() != -1:
        with _lock:
            layout = _entered[-1] if _entered else None
    return None if layout is _OUTSIDE else layout


def attend(
    call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Attend from q to k and v, (B, H, T, D), or (total, H, D) for packed ones: the output and the log-sum-exp.

    keywords: those of `attention` that this part of the call has of its own.
    """
    arguments = {"position": call.scheme, "layout": "bhtd", "sinks": sinks, **call.options, **keywords}
    with outside():
        if call.dropout_p == 0:
            out, lse = api.attention(q, k, v, return_lse=True, **arguments)
            return out, lse
        impl = arguments.pop("impl")
        plain_call = api.make_call(q, k, v, return_lse=True, dropout_p=call.dropout_p, **arguments)
        backend = choose(plain_call, impl)
        seed = make_seed(plain_call.q) + call.layout.rank  # ranks must not drop alike
        out, lse_of_call = api.run(plain_call._replace(seed=seed), backend)
        assert lse_of_call is not None
        layout = arguments["layout"]
        return from_bhtd(out, layout), lse_of_call.squeeze(0) if layout == "thd" else lse_of_call


def attend_packed(call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """Attend rows of packed documents, which share their bounds: the output and the log-sum-exp, (B, H, T, …)."""
    batch, heads = q.shape[:2]
    if batch == 0:
        lse = q.sum(3, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.narrow(3, 0, 1).expand(-1, -1, -1, v.shape[3]), lse
    if batch == 1:  # views, both ways
        out, lse = attend(call, *(x.squeeze(0).transpose(0, 1) for x in (q, k, v)), layout="thd", **keywords)
        return out.transpose(0, 1)[None], lse[None]
    params = call.scheme.score_mod_params(heads, q.device)
    has_rows = params is not None and params.ndim == 3 and params.shape[0] == batch
    calls = [call._replace(scheme=OfRow(call.scheme, row, batch)) if has_rows else call for row in range(batch)]
    results = [
        attend(row_call, *(x[row].transpose(0, 1) for x in (q, k, v)), layout="thd", **keywords)
        for row, row_call in enumerate(calls)
    ]
    return torch.stack([out.transpose(0, 1) for out, _ in results]), torch.stack([lse for _, lse in results])


def learned_of(scheme: PositionScheme) -> list[Tensor]:
    """Return the tensors of a scheme that require grad."""
    found: list[Tensor] = []
    for field in dataclasses.fields(scheme) if dataclasses.is_dataclass(scheme) else ():
        value = getattr(scheme, field.name)
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(value)
        elif isinstance(value, PositionScheme):
            found += learned_of(value)
    return found


def with_learned(scheme: PositionScheme, tensors: Iterator[Tensor]) -> PositionScheme:
    """Return the scheme with others for the tensors of `learned_of`, in their order."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(scheme) if dataclasses.is_dataclass(scheme) else ():
        value = getattr(scheme, field.name)
        if isinstance(value, Tensor) and value.requires_grad:
            changes[field.name] = next(tensors)
        elif isinstance(value, PositionScheme) and learned_of(value):
            changes[field.name] = with_learned(value, tensors)
    return dataclasses.replace(scheme, **changes) if changes else scheme
