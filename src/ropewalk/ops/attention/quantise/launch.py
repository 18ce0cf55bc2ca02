"""The launches that quantise a call's operands.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), R rotary
dim, S packed sequences, N blocks of BLOCK keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention import call as record
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.quantise.call import (
    BLOCK,
    GROUPS,
    Quantized,
    QuantizedKeys,
    QuantizedQueries,
    QuantizedValues,
)
from ropewalk.ops.attention.quantise.kernel import (
    Config,
    Extents,
    QueriesTarget,
    Rows,
    Sequences,
    UnitsTarget,
    mean_kernel,
    quantise_kernel,
)
from ropewalk.ops.attention.tables import with_dense_features, with_rows
from ropewalk.ops.attention.triton.launch_common import broadcast_strides, rope_table_args
from ropewalk.ops.launch.steps import Steps

_SAMPLES = 256  # keys of a sequence whose mean is taken off all
_FIRST = 128  # they are the first ones where later keys may not change the numbers of earlier rows
_PROGRAMS = 1024  # on a GPU: fewer heads a program where there would be fewer
_MOST_REGISTERS = 128  # of a thread, so that a processor has two programs
_MOST_HEADS = 8  # of a program, which read the same rows of cos and sin


class _Features(NamedTuple):
    """Queries or keys, and what maps their features."""

    x: Tensor
    table: record.RopeTable | None
    weights: Tensor | None = None


def quantise(call: AttentionCall, on: Steps, *, permuted: bool) -> Quantized:
    """Return the operands of a call's 8-bit products.

    With `permuted` key 16b + 8g + 2l + e of a block of values is at 16b + 4l + 2g + e, for g, e < 2 and l < 4.
    """
    call = with_rows(call)
    tables, far = call.tables, call.far
    precision = call.quantised
    assert precision is not None, "the call has no precision"
    # As `map_features` has it: keys without a table come mapped, and so do their weights.
    is_mapped = tables.q is not None and tables.k is not None
    near_k = _Features(call.k, tables.k if is_mapped else None, tables.feature_weights if is_mapped else None)
    q, k, _, v = _quantise(call, _Features(call.q, tables.q), near_k, on, permuted, with_values=precision.float8_values)
    assert k is not None
    result = Quantized(q, k, v)
    if far is None:
        return result
    if far.given is not None:
        past, future = _Features(far.given.q_past, None), far.given.q_future
        far_k, far_future = _Features(far.given.k, None), None if future is None else _Features(future, None)
    else:
        assert far.tables is not None, "a range has tables or features"
        if far.tables.q_past is None:
            return result
        past, far_k = _Features(call.q, far.tables.q_past), _Features(call.k, far.tables.k)
        far_future = None if far.tables.q_future is None else _Features(call.q, far.tables.q_future)
    q_past, k_far, far_mean, _ = _quantise(call, past, far_k, on, permuted)
    q_future = None if far_future is None else _quantise(call, far_future, None, on, permuted, q_mean=far_mean)[0]
    return result._replace(q_past=q_past, q_future=q_future, k_far=k_far)


def _quantise(
    call: AttentionCall,
    q: _Features,
    k: _Features | None,
    on: Steps,
    permuted: bool,
    *,
    with_values: bool = False,
    q_mean: Tensor | None = None,
) -> tuple[QuantizedQueries, QuantizedKeys | None, Tensor | None, QuantizedValues | None]:
    """Quantise queries, and keys and values where they are wanted; return the mean of keys too."""
    precision, device = call.quantised, call.q.device
    assert precision is not None
    batch, heads, queries, head_dim = call.q.shape
    kv_heads, keys, v_dim = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    sequences = _sequences(call)
    n_sequences = 0 if call.cu_seqlens_k is None else call.cu_seqlens_k.shape[0] - 1
    blocks_q, blocks_k = (
        batch * triton.cdiv(x, BLOCK) if sequences is None else x // BLOCK + n_sequences for x in (queries, keys)
    )
    n_blocks = triton.cdiv(keys, BLOCK) if sequences is None else blocks_k
    n_means = batch if sequences is None else n_sequences
    out_q = QuantizedQueries(
        torch.empty(batch, heads, queries, head_dim, dtype=torch.int8, device=device),
        torch.empty(batch, heads, queries, dtype=torch.float32, device=device),
        torch.empty(batch, heads, queries, dtype=torch.float32, device=device),
    )
    out_k, out_v, k_mean = None, None, None
    config = _config(call, q.table if k is None or k.table is None else k.table, permuted)
    if k is not None:
        out_k = QuantizedKeys(
            torch.empty(batch, kv_heads, n_blocks * BLOCK, head_dim, dtype=torch.int8, device=device),
            torch.empty(batch, kv_heads, n_blocks, GROUPS, dtype=torch.float32, device=device),
        )
        if precision.centre:
            k_mean = torch.empty(n_means, kv_heads, head_dim, dtype=torch.float32, device=device)
            q_mean = torch.empty_like(k_mean) if config.N > 1 else k_mean
    if with_values:
        out_v = QuantizedValues(
            torch.empty(batch, kv_heads, v_dim, n_blocks * BLOCK, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(batch, kv_heads, n_blocks, dtype=torch.float32, device=device),
            torch.empty(n_means, kv_heads, v_dim, dtype=torch.float32, device=device),
        )
    shared: dict[str, Any] = {
        "extents": Extents(*(None if x is None else x.contiguous() for x in (call.key_lengths, call.key_starts))),
        "sequences": sequences,
        "n_sequences": n_sequences,
        "n_keys": keys,
        "n_kv_heads": kv_heads,
        "k": None if k is None else _rows(k.x),
        "k_table": None if k is None else rope_table_args(k.table)[0],
        "k_weights_ptr": None if k is None or k.weights is None else k.weights.contiguous(),
        "k_mean_ptr": k_mean,
        "q_mean_ptr": q_mean,
        "v": _rows(call.v) if out_v is not None else None,
        "v_mean_ptr": None if out_v is None else out_v.mean,
        "CONFIG": config,
    }
    means_k = n_means * kv_heads if k is not None and precision.centre else 0
    means_v = 0 if out_v is None else n_means * kv_heads
    if means_k + means_v:
        is_first = call.causal or call.window_right == 0
        on.launch(
            mean_kernel,
            means_k + means_v,
            **shared,
            n_programs_k=means_k,
            COUNT=0 if not precision.centre else _FIRST if is_first else _SAMPLES,
            SPACED=not is_first,
            num_warps=16,
        )
    heads_q, heads_k = _heads_per_program(blocks_q, heads), _heads_per_program(blocks_k, kv_heads)
    programs_q = blocks_q * triton.cdiv(heads, heads_q)
    programs_k = 0 if out_k is None else blocks_k * triton.cdiv(kv_heads, heads_k)
    programs_v = 0 if out_v is None else programs_k
    if programs_q + programs_k:
        on.launch(
            quantise_kernel,
            programs_q + programs_k + programs_v,
            **shared,
            q=_rows(q.x),
            q_table=rope_table_args(q.table)[0],
            q_out=QueriesTarget(*out_q),
            k_out=None if out_k is None else UnitsTarget(*out_k),
            v_out=None if out_v is None else UnitsTarget(*out_v[:2]),
            n_queries=queries,
            n_heads=heads,
            heads_per_program=heads_q,
            kv_heads_per_program=heads_k,
            n_programs_q=programs_q,
            n_programs_k=programs_k,
            num_stages=1,
            num_warps=_warps(head_dim),
            **_most_registers(head_dim),
        )
    return out_q, out_k, q_mean, out_v


def _rows(x: Tensor) -> Rows:
    x = with_dense_features(x)
    return Rows(x, *broadcast_strides(x, 3))


def _sequences(call: AttentionCall) -> Sequences | None:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return None
    return Sequences(call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous())


def _warps(head_dim: int) -> int:
    """Return the warps of a program: 8, as the kernel's layouts have it, but on Blackwell, whose tensor memory is full.

    Triton takes no tensor memory for products of 16 warps.
    """
    return 16 if head_dim > 128 and _is_capability(10) else 8


def _most_registers(head_dim: int) -> dict[str, int]:
    """Return the bound on a thread's registers, where two programs on a processor are worth the few that spill."""
    return {"maxnreg": _MOST_REGISTERS} if head_dim <= 128 and _is_capability(9) else {}


def _is_capability(major: int) -> bool:
    return not gpu.is_interpreted() and not gpu.is_rocm() and gpu.current_capability()[0] == major


def _heads_per_program(blocks: int, heads: int) -> int:
    return min(_MOST_HEADS, max(1, blocks * heads // _PROGRAMS))


def _config(call: AttentionCall, table: record.RopeTable | None, permuted: bool) -> Config:
    tables, head_dim, v_dim = call.tables, call.q.shape[3], call.v.shape[3]
    assert call.quantised is not None
    n = head_dim & -head_dim if call.quantised.hadamard else 1
    rotary_dim = 0 if table is None else 2 * table.cos.shape[2]
    padded = max(triton.next_power_of_2(head_dim), 32)
    return Config(
        D=head_dim,
        DV=v_dim,
        WIDTH=min(padded // 2, 64),
        CHUNKS=max(padded // 128, 1),
        LINE=min(padded // 2, 32),
        LINES=max(padded // 64, 1),
        BLOCK_DV=triton.next_power_of_2(v_dim),
        ROWS=max(1, triton.next_power_of_2(v_dim) * BLOCK // (32 * 8 * _warps(head_dim))),  # of 8 features a thread
        SAMPLES=128 if padded <= 128 else 64,
        N=n,
        NORM=1 / math.sqrt(n),
        ROTARY_DIM=rotary_dim,
        ROTARY_OFFSET=tables.rotary_offset if rotary_dim else 0,
        INTERLEAVED=tables.interleaved if rotary_dim else False,
        PAIR_BLOCK=tables.pair_block or rotary_dim,
        WHOLE=rotary_dim == head_dim == padded and tables.pair_block in (None, rotary_dim),
        PERMUTED=permuted,
        JOINED=_is_capability(9),
        EXACT=gpu.is_interpreted(),
    )
