"""The launcher of `append_kv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.formats import Format, format_of
from ropewalk.ops.cache.triton.append_kernel import APPEND
from ropewalk.ops.launch.kernel import WIDEST_ACCESS, alignment_of, is_dense, strides_of
from ropewalk.ops.launch.steps import Steps

_FEW_TOKENS = 256  # latency limits calls of so many, bandwidth those of more
# A thread may have as many then. Left to itself, ptxas saves registers and loads cos and sin after the norm's sum.
_FEW_TOKENS_OPTIONS = {"maxnreg": 128}


class Tiles(NamedTuple):
    """The work of a program: `block_heads` heads of `block_tokens` tokens, by so many threads."""

    block_tokens: int
    block_heads: int
    threads: int


def choose_tiles(tokens: int, most_heads: int, head_dim: int, itemsize: int, *, across_heads: bool) -> Tiles:
    """Return the tiles of a call."""
    # A row is read in 16-byte accesses by so many threads.
    per_row = max(1, triton.next_power_of_2(head_dim) * itemsize // WIDEST_ACCESS)
    heads = triton.next_power_of_2(most_heads)
    if across_heads:
        return Tiles(1, heads, min(1024, max(32, heads * per_row)))
    if tokens <= _FEW_TOKENS:
        block_heads = min(heads, max(1, 128 // per_row))
        return Tiles(1, block_heads, min(128, max(32, block_heads * per_row)))
    rows = max(1, 128 // per_row)
    block_heads = min(rows, heads)
    return Tiles(max(1, rows // block_heads), block_heads, 64)  # note 063


def append(call: AppendCall, on: Steps) -> Sequence[Tensor]:
    """Append with one launch, and return q rotated if there is one."""
    result = None if call.q is None else torch.empty_like(call.q)
    k, v, k_cache, v_cache, slots, cos, sin, q, positions, axes, q_weight, k_weight, k_scale, v_scale, *_ = call
    k, v, cos, sin = (_copy_unless(is_dense(x), x, on) for x in (k, v, cos, sin))
    q, axes = (x if x is None else _copy_unless(is_dense(x), x, on) for x in (q, axes))
    weights = (None if q is None else q_weight, k_weight)
    q_weight, k_weight = (x if x is None else _copy_unless(x.is_contiguous(), x, on) for x in weights)
    out = q.new_empty(q.shape) if q is not None and result is not None and not is_dense(result) else result
    kind = format_of(k_cache, k)
    assert kind is not None
    tokens, n_kv_heads, head_dim = k.shape
    value_dim, n_q_heads = v.shape[2], 0 if q is None else q.shape[1]
    across_heads = call.has_norm and call.across_heads
    tiles = choose_tiles(
        tokens, max(n_q_heads, n_kv_heads), max(head_dim, value_dim), k.element_size(), across_heads=across_heads
    )
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + 2 * math.ceil(n_kv_heads / tiles.block_heads)
    n_programs = math.ceil(tokens / tiles.block_tokens) * n_groups
    features, unit = _strides(("token", "head"), q=q, k=k, v=v, q_out=out)
    pages, cache_unit = _strides(("page", "offset", "head"), k_cache=k_cache, v_cache=v_cache)
    tables, table_unit = _strides(("row",), cos=cos, sin=sin)
    scales = {
        f"{name}_stride_{axis}": stride
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        for axis, stride in zip(("page", "offset", "head", "group"), _scale_strides(scale, kind), strict=True)
    }
    token_stride, axis_stride = (0, 0) if positions is None else (*reversed(strides_of(positions)), 0)[:2]
    if kind is Format.FP8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    least_block = 32 if kind is Format.INT4 else 16
    if n_programs:
        on.launch(
            APPEND,
            n_programs,
            q_ptr=k if q is None else q,
            k_ptr=k,
            v_ptr=v,
            q_out_ptr=k if out is None else out,
            k_cache_ptr=k_cache,
            v_cache_ptr=v_cache,
            cos_ptr=cos,
            sin_ptr=sin,
            q_weight_ptr=q_weight,
            k_weight_ptr=k_weight,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            axes_ptr=axes,
            positions_ptr=positions,
            slots_ptr=slots,
            n_tokens=tokens,
            n_written=slots.shape[0],
            n_slots=k_cache.shape[0] * k_cache.shape[1],
            n_rows=cos.shape[0],
            **features,
            **pages,
            **scales,
            **tables,
            positions_stride_token=token_stride,
            positions_stride_axis=axis_stride,
            slots_stride=sum(strides_of(slots)),
            FORMAT=int(kind),
            HQ=n_q_heads,
            HK=n_kv_heads,
            D=head_dim,
            DV=value_dim,
            HALF=cos.shape[1],
            ROTARY_OFFSET=call.rotary_offset,
            INTERLEAVED=call.interleaved,
            N_AXES=0 if axes is None or positions is None else positions.shape[0],
            HAS_NORM=call.has_norm,
            EPS=float(call.eps),
            WEIGHT_OFFSET=float(call.weight_offset),
            AFTER=call.after,
            ACROSS=call.across_heads,
            Q_PER_HEAD=q_weight is not None and q_weight.numel() != head_dim,
            K_PER_HEAD=k_weight is not None and k_weight.numel() != head_dim,
            PAGE_SIZE=k_cache.shape[1],
            K_FEATURE_STRIDE=k_cache.stride(3) if k_cache.shape[3] > 1 else 1,
            V_FEATURE_STRIDE=v_cache.stride(3) if v_cache.shape[3] > 1 else 1,
            STRIDE_UNIT=unit,
            CACHE_STRIDE_UNIT=cache_unit,
            TABLE_STRIDE_UNIT=table_unit,
            BLOCK_TOKENS=tiles.block_tokens,
            BLOCK_HEADS=tiles.block_heads,
            BLOCK_D=max(least_block, triton.next_power_of_2(head_dim)),
            BLOCK_DV=max(least_block, triton.next_power_of_2(value_dim)),
            NATIVE=_rounds_to_fp8(on.device_of(k)),
            threads=tiles.threads,
            **(_FEW_TOKENS_OPTIONS if tokens <= _FEW_TOKENS and not across_heads else {}),
        )
    if result is None:
        return ()
    if out is not result:
        on.operate(Tensor.copy_, result, out)
    return (result,)


def _copy_unless(is_ready: bool, x: Tensor, on: Steps) -> Tensor:
    """Return x where the kernel can read it, else a dense copy."""
    if is_ready:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    on.operate(Tensor.copy_, copy, x)
    return copy


def _rounds_to_fp8(device: torch.device) -> bool:
    """Say whether a GPU rounds to float8 by an instruction."""
    return gpu.is_nvidia(device) and not gpu.is_interpreted() and gpu.capability(device) >= (8, 9)


def _strides(axes: Sequence[str], **tensors: Tensor | None) -> tuple[dict[str, int], int]:
    """Return the strides of the first dimensions of tensors by their names, in multiples of a unit, and the unit."""
    strides = {
        f"{name}_stride_{axis}": stride
        for name, x in tensors.items()
        for axis, stride in zip(axes, (0,) * len(axes) if x is None else strides_of(x), strict=False)
    }
    unit = alignment_of(strides.values())
    return {name: stride // unit for name, stride in strides.items()}, unit


def _scale_strides(scale: Tensor | None, kind: Format) -> tuple[int, int, int, int]:
    """Return the strides of page, offset, head and group."""
    if scale is None or scale.ndim == 0:
        return 0, 0, 0, 0
    strides = strides_of(scale)
    if kind is Format.FP8:
        return 0, 0, strides[0], 0
    page, offset, head, group = (*strides, 0)[:4]
    return page, offset, head, group
