"""The checks of `append_kv`'s arguments, and their errors.

They read shapes, strides, dtypes and devices alone, so that a plan built after them holds for all calls with the same
metadata. `check_values` is the exception: it reads values, of CPU tensors only.

Shape letters: N tokens, H query heads, K key heads, D head dim, Dv that of values, R rotary dim.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from ropewalk.ops.arguments import check_dense
from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.formats import (
    INT4_GROUP,
    NUMBERS_PER_ELEMENT,
    Format,
    format_of,
    scale_shape,
)
from ropewalk.ops.rope.validate import may_overlap_itself
from ropewalk.ops.tracing import has_values

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 512
_KINDS = "that of k, float8_e4m3fn, int8 or uint8"


def check(call: AppendCall) -> None:
    """Raise unless the arguments fit together, by their metadata alone."""
    k = call.k
    _check_heads(call)
    _check_caches(call)
    _check_integers("slots", call.slots, k)
    if call.slots.ndim != 1 or call.slots.shape[0] > k.shape[0]:
        raise ValueError(
            f"slots has shape {tuple(call.slots.shape)}, but must be (n,) with n at most N = {k.shape[0]}, the tokens "
            f"of k"
        )
    _check_tables(call)
    _check_norm(call)


def check_values(call: AppendCall) -> None:
    """Raise unless slots lie in the cache, and axes in positions; on a GPU neither is read."""
    if not all(has_values(x) for x in (call.slots, call.axes) if x is not None):
        return
    n_slots = call.k_cache.shape[0] * call.k_cache.shape[1]
    outside = (call.slots < -1) | (call.slots >= n_slots)
    if bool(outside.any()):
        raise ValueError(
            f"slots holds {int(call.slots[outside][0])}, but must be from 0 to below {n_slots}, the pages times the "
            f"page size of k_cache, or -1 for a token that is not written"
        )
    if call.axes is not None and call.positions is not None:
        n_axes = call.positions.shape[0]
        for pair, axis in enumerate(call.axes.tolist()):
            if not 0 <= axis < n_axes:
                raise ValueError(
                    f"axes is {axis} for pair {pair}, but must be from 0 to {n_axes - 1}: positions has {n_axes} rows"
                )


def check_no_grad(call: AppendCall) -> None:
    """Raise if a tensor would need a gradient: nothing is differentiated."""
    if not torch.is_grad_enabled():
        return
    for name, x in zip(call._fields, call, strict=True):
        if isinstance(x, Tensor) and x.requires_grad:
            name = f"norm.{name}" if name.endswith("_weight") else name
            raise ValueError(f"{name} requires grad, but append_kv has no gradient: call under no_grad")


def _check_heads(call: AppendCall) -> None:
    k, v, q = call.k, call.v, call.q
    tensors: list[tuple[str, Any, str]] = [("k", k, "(N, K, D)"), ("v", v, "(N, K, Dv)")]
    for name, x, rule in tensors if q is None else [*tensors, ("q", q, "(N, H, D)")]:
        _check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {rule}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, but must be float16, bfloat16 or float32")
        if x.dtype != k.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but must have k's, {k.dtype}")
        _check_device(name, x, k)
        if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {x.shape[2]}, but it must be from 1 to {MAX_HEAD_DIM}")
        if x.shape[1] < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must have at least one head")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but must have k's, {tuple(k.shape)}, all but the head dim")
    if q is None:
        return
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, but must have k's, {tuple(k.shape)}, all but the number of heads"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, but they must be a multiple of k's {k.shape[1]}")


def _check_caches(call: AppendCall) -> None:
    k_cache, v_cache = call.k_cache, call.v_cache
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_tensor(name, cache)
        if cache.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}, but must be (pages, page_size, K, D): view other orders by "
                f"transpose"
            )
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}, but must have k_cache's pages and page size, "
            f"{tuple(k_cache.shape[:2])}"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache has dtype {v_cache.dtype}, but must have k_cache's, {k_cache.dtype}")
    page_size = k_cache.shape[1]
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"k_cache has pages of {page_size} tokens, but they must be of 1 to {MAX_PAGE_SIZE}")
    for name, cache, x, of in (("k_cache", k_cache, call.k, "k"), ("v_cache", v_cache, call.v, "v")):
        kind = format_of(cache, x)
        if kind is None:
            raise TypeError(f"{name} has dtype {cache.dtype}, but must have {_KINDS}")
        _check_device(name, cache, call.k)
        heads, dim = x.shape[1:]
        if kind is Format.INT4 and cache.shape[3] == dim:
            refuse_bytes(name, cache)
        if kind is Format.INT4 and dim % INT4_GROUP:
            raise ValueError(
                f"{of} has head dim {dim}, but it must be a multiple of {INT4_GROUP} for {name} of uint8: 4-bit "
                f"numbers in groups of {INT4_GROUP}"
            )
        width = dim // NUMBERS_PER_ELEMENT[kind]
        if tuple(cache.shape[2:]) != (heads, width):
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}, but must be (pages, page_size, {heads}, {width}), by {of} of "
                f"shape {tuple(x.shape)} and its dtype {cache.dtype}"
            )
        if may_overlap_itself(cache):
            raise ValueError(
                f"{name} has strides {cache.stride()} at shape {tuple(cache.shape)}: some of its elements share memory "
                f"(an expanded tensor?), but each must have its own"
            )
        check_scale(name[0] + "_scale", call.k_scale if of == "k" else call.v_scale, cache, kind, head=2)


def refuse_bytes(name: str, cache: Tensor) -> NoReturn:
    """Raise for pages of uint8 with a byte for each number, as vLLM has those of float8."""
    raise ValueError(
        f"{name} is of uint8 and has {cache.shape[-1]} bytes a head, but 4-bit numbers take half as many: for fp8 "
        f"pages pass {name[0]}_cache.view(torch.float8_e4m3fn)"
    )


def check_scale(name: str, scale: Tensor | None, cache: Tensor, kind: Format, *, head: int) -> None:
    """Raise unless the scales fit a cache, whose dimension `head` is that of heads."""
    if kind is Format.OWN:
        if scale is not None:
            raise ValueError(f"{name} was given, but must be None for a cache of {cache.dtype}, which has no scales")
        return
    dtype = torch.float16 if kind is Format.INT4 else torch.float32
    if scale is None:
        raise ValueError(f"{name} is None, but a cache of {cache.dtype} needs it, {dtype}")
    _check_tensor(name, scale)
    if scale.dtype != dtype:
        raise TypeError(f"{name} has dtype {scale.dtype}, but must be {dtype} for a cache of {cache.dtype}")
    _check_device(name, scale, cache)
    heads = cache.shape[head]
    if kind is Format.FP8:
        # torch.compile does not find a tuple with symbols among others by `in`.
        if scale.ndim > 1 or (scale.ndim == 1 and scale.shape[0] != heads):
            raise ValueError(f"{name} has shape {tuple(scale.shape)}, but must be () or (K,) with K = {heads}")
        return
    expected = scale_shape(cache, kind, head)
    if tuple(scale.shape) != expected:
        rule = "(pages, page_size, K)" if kind is Format.INT8 else "(pages, page_size, K, D/32)"
        raise ValueError(f"{name} has shape {tuple(scale.shape)}, but must be {rule}, {expected}")
    if may_overlap_itself(scale):
        raise ValueError(
            f"{name} has strides {scale.stride()} at shape {tuple(scale.shape)}: some of its elements share memory, "
            f"but each must have its own"
        )


def _check_tables(call: AppendCall) -> None:
    k, cos, sin, positions, axes = call.k, call.cos, call.sin, call.positions, call.axes
    tokens, _, head_dim = k.shape
    for name, table in (("cos", cos), ("sin", sin)):
        _check_tensor(name, table)
        if table.dtype not in TABLE_DTYPES:
            raise TypeError(f"{name} has dtype {table.dtype}, but must be float16, bfloat16, float32 or float64")
        _check_device(name, table, k)
    if cos.ndim != 2 or cos.shape[1] == 0:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, but must be (n, R/2), with at least one column")
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {tuple(sin.shape)}, but must have cos's, {tuple(cos.shape)}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin has dtype {sin.dtype}, but must have cos's, {cos.dtype}")
    offset, width = call.rotary_offset, 2 * cos.shape[1]
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"rotary_offset is {offset!r}, but must be an int")
    if not isinstance(call.interleaved, bool):
        raise TypeError(f"interleaved is {call.interleaved!r}, but must be True or False")
    if offset < 0 or offset + width > head_dim:
        raise ValueError(
            f"rotary_offset {offset} and the rotary dim {width} (twice the width of cos) must lie within the head dim, "
            f"{head_dim}"
        )
    if axes is not None:
        _check_integers("axes", axes, k)
        if tuple(axes.shape) != (cos.shape[1],):
            raise ValueError(
                f"axes has shape {tuple(axes.shape)}, but must be (R/2,), ({cos.shape[1]},), as cos has so many columns"
            )
        if positions is None:
            raise ValueError(f"positions is None, but must be (A, N) with N = {tokens} where axes is given")
    if positions is None:
        if cos.shape[0] < tokens:
            raise ValueError(
                f"cos has {cos.shape[0]} rows, but without positions it must have one for each of the {tokens} tokens"
            )
        return
    _check_integers("positions", positions, k)
    shape = tuple(positions.shape)
    if axes is None:
        if shape != (tokens,):
            raise ValueError(
                f"positions has shape {shape}, but must be (N,), ({tokens},); several for each token, (A, N), need axes"
            )
    elif len(shape) != 2 or shape[1] != tokens or shape[0] == 0:
        raise ValueError(f"positions has shape {shape}, but with axes it must be (A, N) with N = {tokens}")


def _check_norm(call: AppendCall) -> None:
    if not call.has_norm:
        return
    for name, number in (("eps", call.eps), ("offset", call.weight_offset)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"norm.{name} is {number!r}, but must be a float")
        if not abs(number) < math.inf:
            raise ValueError(f"norm.{name} is {number}, but must be finite")
    if call.eps < 0:
        raise ValueError(f"norm.eps is {call.eps}, but must be at least 0")
    for name, x, weight in (("q", call.q, call.q_weight), ("k", call.k, call.k_weight)):
        if x is None:
            continue
        name = f"norm.{name}_weight"
        if weight is None:
            if call.weight_offset:
                raise ValueError(f"{name} is None, but norm.offset is {call.weight_offset}: it must be 0.0 there")
            continue
        _check_tensor(name, weight)
        if weight.dtype not in TABLE_DTYPES:
            raise TypeError(f"{name} has dtype {weight.dtype}, but must be float16, bfloat16, float32 or float64")
        _check_device(name, weight, call.k)
        heads, dim = x.shape[1:]
        allowed = ((heads * dim,),) if call.across_heads else ((dim,), (heads, dim))
        if tuple(weight.shape) not in allowed:
            rule = f"(heads * D,), ({heads * dim},)" if call.across_heads else f"(D,), ({dim},), or (heads, D)"
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, but must be {rule}")


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
    check_dense(name, x)


def _check_integers(name: str, x: Any, k: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor of int32 or int64")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {x.dtype}, but must be int32 or int64")
    check_dense(name, x)
    _check_device(name, x, k)


def _check_device(name: str, x: Tensor, k: Tensor) -> None:
    if x.device != k.device:
        raise ValueError(f"{name} is on {x.device}, but must be on k's device, {k.device}")
