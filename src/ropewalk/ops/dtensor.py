"""Calls with DTensors: tensor parallelism by heads, data parallelism by the batch, and shards of a sequence's tokens.

A call takes each rank's part of every argument, runs as any other call, and gives DTensors. It does so above the
operators, as a sharding rule could neither slice a scheme's heads nor say that what ranks share gets partial gradients.

Letters: B batch, T tokens, H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ropewalk.ops.arguments import why_unread
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.schemes import PositionScheme
from ropewalk.schemes.heads import OfHeads

_HEADS = {"bthd": 2, "bhtd": 1, "thd": 1}  # the dimension of heads
_TOKENS = {"bthd": 1, "bhtd": 2, "thd": 0}  # that of tokens
_PER_ROW = ("key_lengths", "key_starts", "query_starts")
# The keywords of `attention` and of `apply_rope` that ranks read: a call in which another one is set is refused.
ATTENTION_READS = (
    *("position", "causal", "window", "scale", "mask", *_PER_ROW, "cu_seqlens_q", "cu_seqlens_k", "positions_q"),
    *("positions_k", "block_table", "softcap", "sinks", "keys_rotated", "norm", "gate", "k_scale", "v_scale"),
    *("return_lse", "return_max_logits", "layout", "deterministic", "precision", "impl"),
)
ROTATION_READS = (
    *("cos", "sin", "positions", "offsets", "axes", "cu_seqlens", "norm", "layout", "interleaved", "pair_block"),
    *("inverse", "rotary_dim", "rotary_offset", "impl"),
)


class _Shards(NamedTuple):
    """The parts of a call's tensors that a rank holds."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    layout: str
    heads: int  # how many parts there are
    head_part: int  # this rank's
    rows: int
    row_part: int
    token_dims: tuple[int, ...] = ()  # the mesh's dimensions that share the sequence
    adds_tokens: bool = True  # whether a shared DTensor's gradient is added up over these

    def local(self, name: str, x: Any) -> Tensor:
        """Return this rank's part of q, k, v or the gate."""
        if not isinstance(x, DTensor) or x.device_mesh != self.mesh or tuple(x.placements) != self.placements:
            what = f"has placements {x.placements}" if isinstance(x, DTensor) else f"is {type(x).__name__}"
            raise ValueError(f"{name} {what}, but must be a DTensor with q's mesh and placements, {self.placements}")
        result: Tensor = x.to_local()
        return result

    def shared(self, x: Tensor) -> Tensor:
        """Return a tensor that all ranks have; its gradient is the sum of their parts.

        A plain tensor gets its rank's part of the sequence alone, as in every sharded call.
        """
        replicated = [Replicate()] * self.mesh.ndim
        adds_tokens = isinstance(x, DTensor) and self.adds_tokens
        if isinstance(x, DTensor):
            x = x.redistribute(self.mesh, replicated)
        else:
            x = DTensor.from_local(x, self.mesh, replicated, run_check=False)
        parts = [
            Partial() if isinstance(placement, Shard) and (adds_tokens or index not in self.token_dims) else Replicate()
            for index, placement in enumerate(self.placements)
        ]
        result: Tensor = x.to_local(grad_placements=parts)
        return result

    def take_heads(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's heads of a shared tensor."""
        return x if self.heads == 1 else x.chunk(self.heads, dim)[self.head_part]

    def take_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's batch rows of a shared tensor, of one row for all of them too."""
        return x if self.rows == 1 or x.shape[dim] == 1 else x.chunk(self.rows, dim)[self.row_part]

    def distribute(self, x: Tensor, heads: int | None, rows: int | None, tokens: int | None = None) -> DTensor:
        """Return a result with its heads, rows and tokens in these dimensions; rows None where it is a maximum."""
        batch = 0 if self.layout != "thd" else None
        placements: list[Placement] = []
        for index, placement in enumerate(self.placements):
            if index in self.token_dims:
                assert tokens is not None
                placements.append(Shard(tokens))
            elif not isinstance(placement, Shard):
                placements.append(Replicate())
            elif placement.dim == batch:
                placements.append(Partial("max") if rows is None else Shard(rows))
            else:
                assert heads is not None
                placements.append(Shard(heads))
        return DTensor.from_local(x, self.mesh, placements, run_check=False)


def _read(
    q: DTensor, layout: str, key_heads: int, shares_tokens: Callable[[DeviceMesh, list[int]], bool] | None = None
) -> _Shards:
    """Return how q is sharded, or raise.

    shares_tokens: says whether these dimensions of a mesh are those over which the sequence is sharded; None: none may.
    """
    if layout not in _HEADS or q.ndim != len(layout):
        raise ValueError(f"q has {q.ndim} dimensions in layout {layout!r}, but must have those of the layout")
    heads, batch = _HEADS[layout], 0 if layout != "thd" else None
    mesh = q.device_mesh
    counts, parts = {heads: 1, batch: 1}, {heads: 0, batch: 0}
    token_dims: list[int] = []
    for index, placement in enumerate(q.placements):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim % q.ndim if type(placement) is Shard else None
        if shares_tokens is not None and dim == _TOKENS[layout]:
            token_dims.append(index)
            continue
        if dim is None or dim not in (heads, batch):
            raise ValueError(
                f"q has the placement {placement}, but must be replicated or sharded by heads, dimension {heads}"
                + (", or by the batch" if batch is not None else "")
                + (": ropewalk.parallel shards the sequence" if shares_tokens is None else ", or by its tokens")
            )
        size = mesh.size(index)
        counts[dim] *= size
        parts[dim] = parts[dim] * size + mesh.get_local_rank(index)
    for name, count in (("q", q.shape[heads]), ("k", key_heads)):
        if count % counts[heads]:
            raise ValueError(f"{name} has {count} heads, but they must be a multiple of {counts[heads]} ranks")
    if batch is not None and q.shape[batch] % counts[batch]:
        raise ValueError(f"q has {q.shape[batch]} batch rows, but they must be a multiple of {counts[batch]} ranks")
    if shares_tokens is not None and token_dims and not shares_tokens(mesh, token_dims):
        raise ValueError(
            f"q has the placements {tuple(q.placements)} on {mesh}, but its tokens must be sharded over the ranks of "
            f"the layout"
        )
    return _Shards(
        mesh, tuple(q.placements), layout, counts[heads], parts[heads], counts[batch], parts[batch], tuple(token_dims)
    )


def _shard_scheme(shards: _Shards, scheme: Any, n_heads: int) -> Any:
    """Return a scheme for this rank's heads, whose learned tensors get the sum of all ranks' gradients."""
    if not isinstance(scheme, PositionScheme) or not scheme.has_score_mod():
        return scheme
    fields = {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme) if field.init}
    tensors = {name: shards.shared(x) for name, x in fields.items() if isinstance(x, Tensor)}
    slopes = tensors.get("slopes")
    if slopes is not None and slopes.ndim == 2:
        tensors["slopes"] = shards.take_rows(slopes)
    if tensors:
        scheme = dataclasses.replace(scheme, **tensors)
    else:
        params = scheme.score_mod_params(n_heads, torch.device(shards.mesh.device_type))
        if params is not None and params.requires_grad:
            raise ValueError(
                f"position is {type(scheme).__name__}, but for DTensors must hold what it learns in fields of a "
                f"dataclass"
            )
    return scheme if shards.heads == 1 else OfHeads(scheme, shards.head_part * (n_heads // shards.heads), n_heads)


def _shard_norm(shards: _Shards, norm: Any) -> Any:
    """Return a norm with this rank's weights."""
    if not isinstance(norm, QKNorm):
        return norm
    if norm.across_heads and shards.heads > 1:
        raise ValueError("norm.across_heads is True, but must be False where heads are sharded: one sum needs them all")

    def weight(x: Tensor | None) -> Tensor | None:
        if not isinstance(x, Tensor):
            return x
        shared = shards.shared(x)
        return shards.take_heads(shared, 0) if shared.ndim == 2 else shared

    return dataclasses.replace(norm, q_weight=weight(norm.q_weight), k_weight=weight(norm.k_weight))


def _shard_positions(shards: _Shards, x: Any) -> Any:
    """Return this rank's rows of positions, (B or 1, T) or (A, B or 1, T)."""
    if not isinstance(x, Tensor) or shards.layout == "thd":
        return x.full_tensor() if isinstance(x, DTensor) else x
    return shards.take_rows(shards.shared(x), 1 if x.ndim == 3 else 0)


def _shard_scale(shards: _Shards, scale: Tensor) -> Tensor:
    """Return the scales of this rank's key heads: (), (K,), or those of each token, (pages, page_size, K, …)."""
    shared = shards.shared(scale)
    return shared if shared.ndim == 0 else shards.take_heads(shared, 0 if shared.ndim == 1 else 2)


def attend(attention: Callable[..., Any], q: Any, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Any:
    """Run `attention` on this rank's parts."""
    shards, parts, local = to_parts(attention, q, k, v, keywords)
    return to_dtensors(shards, attention(*parts, **local), keywords)


def to_parts(
    attention: Callable[..., Any],
    q: Any,
    k: Tensor,
    v: Tensor,
    keywords: dict[str, Any],
    shares_tokens: Callable[[DeviceMesh, list[int]], bool] | None = None,
    adds_tokens: bool = True,
) -> tuple[_Shards, tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return how a call is sharded, and this rank's parts of q, k and v and of the keywords, those of `attention`."""
    layout, heads = keywords["layout"], _HEADS.get(keywords["layout"], 0)
    if not isinstance(k, Tensor) or k.ndim != q.ndim:
        what = f"has {k.ndim} dimensions" if isinstance(k, Tensor) else f"is {type(k).__name__}"
        raise ValueError(f"k {what}, but must be a DTensor with as many as q, {q.ndim}")
    shards = _read(q, layout, k.shape[heads], shares_tokens)._replace(adds_tokens=adds_tokens)
    if keywords["dropout_p"]:
        raise ValueError(f"dropout_p is {keywords['dropout_p']}, but must be 0 for DTensors: ranks would drop alike")
    if keywords["block_table"] is not None and shards.rows > 1:
        raise ValueError("block_table was given, but must be None where the batch is sharded")
    unread = why_unread(attention, keywords, (*ATTENTION_READS, "dropout_p"))
    if unread is not None:
        raise ValueError(f"{unread} for DTensors")
    local = dict(keywords)
    if keywords["gate"] is not None:
        local["gate"] = shards.local("gate", keywords["gate"])
    for name in _PER_ROW:
        if keywords[name] is not None:
            local[name] = shards.take_rows(shards.shared(keywords[name]))
    for name in ("positions_q", "positions_k"):
        local[name] = _shard_positions(shards, keywords[name])
    if keywords["positions_q"] is keywords["positions_k"]:
        local["positions_k"] = local["positions_q"]  # one rotation for both
    if keywords["mask"] is not None:
        mask = shards.shared(keywords["mask"])
        if mask.ndim > 2:
            mask = shards.take_rows(mask)
        if mask.ndim == 4 and mask.shape[1] > 1:
            mask = shards.take_heads(mask, 1)
        local["mask"] = mask
    if keywords["sinks"] is not None:
        local["sinks"] = shards.take_heads(shards.shared(keywords["sinks"]), 0)
    for name in ("k_scale", "v_scale"):
        if keywords[name] is not None:
            local[name] = _shard_scale(shards, keywords[name])
    local["position"] = _shard_scheme(shards, keywords["position"], q.shape[heads])
    local["norm"] = _shard_norm(shards, keywords["norm"])
    for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"):
        if isinstance(keywords[name], DTensor):
            local[name] = keywords[name].full_tensor()
    return shards, (shards.local("q", q), shards.local("k", k), shards.local("v", v)), local


def to_dtensors(shards: _Shards, result: Any, keywords: dict[str, Any]) -> Any:
    """Return DTensors of a rank's results."""
    layout = shards.layout
    heads, tokens, batch = _HEADS[layout], _TOKENS[layout], None if layout == "thd" else 0
    if not isinstance(result, tuple):
        return shards.distribute(result, heads, batch, tokens)
    lse_dims = (0, None, 1) if layout == "thd" else (1, 0, 2)
    others = [shards.distribute(result[1], *lse_dims)] if keywords["return_lse"] else []
    if keywords["return_max_logits"]:
        others.append(shards.distribute(result[-1], 0, None))
    return (shards.distribute(result[0], heads, batch, tokens), *others)


def rotate(apply_rope: Callable[..., Any], q: Any, k: Any, keywords: dict[str, Any]) -> Any:
    """Run `apply_rope` on this rank's parts."""
    layout = keywords["layout"]
    heads = _HEADS.get(layout, 0)
    shards = _read(q, layout, 0 if k is None else k.shape[heads])
    if keywords["inplace"]:
        raise ValueError("inplace is True, but must be False for DTensors")
    unread = why_unread(apply_rope, keywords, (*ROTATION_READS, "inplace"))
    if unread is not None:
        raise ValueError(f"{unread} for DTensors")
    local = dict(keywords)
    is_looked_up = isinstance(keywords["positions"], Tensor) or keywords["offsets"] is not None
    for name in ("cos", "sin"):
        table = shards.shared(keywords[name])
        if table.ndim == 4 or (table.ndim == 3 and is_looked_up):
            table = shards.take_heads(table, table.ndim - 2)
        local[name] = shards.take_rows(table) if table.ndim == 4 or (table.ndim == 3 and not is_looked_up) else table
    local["positions"] = _shard_positions(shards, keywords["positions"])
    if isinstance(keywords["offsets"], Tensor):
        local["offsets"] = shards.take_rows(shards.shared(keywords["offsets"]))
    for name in ("axes", "cu_seqlens"):
        if isinstance(keywords[name], DTensor):
            local[name] = keywords[name].full_tensor()
    local["norm"] = _shard_norm(shards, keywords["norm"])
    result = apply_rope(shards.local("q", q), None if k is None else shards.local("k", k), **local)
    batch = None if layout == "thd" else 0
    if k is None:
        return shards.distribute(result, heads, batch)
    return tuple(shards.distribute(x, heads, batch) for x in result)
