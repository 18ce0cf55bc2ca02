"""Shared by the launchers of the Triton and Gluon kernels of attention: argument groups, memory, rotation back.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ropewalk import device as gpu
from ropewalk.ops.attention import call as record
from ropewalk.ops.attention.backend import Gradients, Saved, Wanted
from ropewalk.ops.attention.call import AttentionCall, kv_capacity
from ropewalk.ops.attention.dropout import dropped_steps, rescale
from ropewalk.ops.attention.quantise.call import Quantized
from ropewalk.ops.attention.tables import empty_aligned, map_far_features, rotate
from ropewalk.ops.attention.triton.arguments import (
    Bounds,
    Dropout,
    Gate,
    Lists,
    Mask,
    Packed,
    Pages,
    Positions,
    RopeTable,
    RowTarget,
    Scores,
    Units,
)
from ropewalk.ops.attention.triton.config import AnyTiles, Features, is_of_keys, shrink
from ropewalk.ops.attention.triton.masking import OUTSIDE
from ropewalk.ops.attention.triton.scheduler import schedule_kernel
from ropewalk.ops.attention.triton.score_mods import UNCHANGED, ScoreMod
from ropewalk.ops.attention.triton.softmax import sinks_grad_kernel
from ropewalk.ops.attention.triton.sums import BLOCK as SUM_BLOCK
from ropewalk.ops.attention.triton.sums import sum_parts_kernel
from ropewalk.ops.attention.triton.weigh import map_and_weigh
from ropewalk.ops.launch.steps import Result, Steps

Launch = TypeVar("Launch", bound=Callable[..., Any])
LOG2_E = math.log2(math.e)
NO_MASK = Mask(None, None, None, None, None)
NO_LISTS = Lists(*(None,) * len(Lists._fields))
NO_UNITS = Units(*(None,) * len(Units._fields))
NO_GATE = Gate(None, None, None, None, None, None)


NO_FAR = (None, None, None)
MAX_ROTATED_BLOCK = 256  # features that a gradient is rotated back by in registers: tables of more spill 1.7 KB


def on_its_device(launch: Launch) -> Launch:
    """Launch a function's kernels on the device of its first argument, a call."""

    @functools.wraps(launch)
    def launch_there(call: AttentionCall, *rest: Any) -> Any:
        device = call.q.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launch(call, *rest)
        with torch.cuda.device(device):
            return launch(call, *rest)

    return cast(Launch, launch_there)


def launch_fitting(tiles: AnyTiles, launch: Callable[[AnyTiles], Result], on: Steps, inner: str = "block_n") -> Result:
    """Launch by a function with the tiles, or the largest smaller ones with which its kernel fits on the GPU.

    Triton compares a binary's memory with the GPU's when it loads it, and keeps its answer for this GPU and all that
    the binary is compiled for.
    """
    while True:
        try:
            return on.attempt(launch, tiles)
        except OutOfResources:
            smaller = shrink(tiles, inner)
            if smaller is None:
                raise
            tiles = smaller


def load_score_mod(call: AttentionCall) -> ScoreMod | None:
    """Return the scheme's `ScoreMod`; None where scores enter the softmax as they are, but for a positive scale."""
    if call.score_mod is None:
        return None if call.scale > 0 or call.is_capped else UNCHANGED
    module, _, attribute = call.score_mod.partition(":")
    score_mod = getattr(importlib.import_module(module), attribute)
    if not isinstance(score_mod, ScoreMod):
        raise TypeError(f"{call.score_mod} is {type(score_mod).__name__}, but must be ScoreMod")
    return score_mod


def mask_args(call: AttentionCall) -> Mask:
    """Return the mask as bytes, with its strides; 0 for a dimension of one."""
    mask = call.mask
    if mask is None:
        return NO_MASK
    batch, head, query, key = broadcast_strides(mask, 4)
    return Mask(mask.view(torch.uint8), batch, head, key, None if is_of_keys(mask) else query)


def lists_args(call: AttentionCall, of: str) -> Lists:
    """Return the lists of a call's "rows" or "columns", with their strides; 0 for a dimension of one."""
    blocks = call.blocks
    if blocks is None:
        return NO_LISTS
    lists = blocks.rows if of == "rows" else blocks.columns
    assert lists is not None
    batch, head, line = broadcast_strides(lists, 3)
    args = NO_LISTS._replace(ptr=lists, stride_batch=batch, stride_head=head, stride_line=line)
    if blocks.spans is not None:
        batch, head = broadcast_strides(blocks.spans, 2)
        return args._replace(slots=blocks.spans, slots_stride_batch=batch, slots_stride_head=head)
    if blocks.slots is None:
        return args
    batch, head, query = broadcast_strides(blocks.slots, 3)
    return args._replace(
        slots=blocks.slots,
        slots_stride_batch=batch,
        slots_stride_head=head,
        slots_stride_query=query,
        bits=blocks.bits,
    )


def units_args(operands: Quantized | None) -> Units:
    """Return the numbers beside operands of 8 bits; without these, none."""
    if operands is None:
        return NO_UNITS
    q, k, v, q_past, q_future, k_far = operands
    units = NO_UNITS._replace(q=q.unit, q_shift=q.shift, k=k.unit, k_far=None if k_far is None else k_far.unit)
    if q_past is not None:
        units = units._replace(q_past=q_past.unit, q_past_shift=q_past.shift)
    if q_future is not None:
        units = units._replace(q_future=q_future.unit, q_future_shift=q_future.shift)
    return units if v is None else units._replace(v=v.unit, v_mean=v.mean, v_dim=v.mean.shape[2])


def gate_args(gate: Tensor | None, v_head_dim: int) -> Gate:
    """Return a gate (B, H, Tq, Dv) or (B, H, Tq), or its gradient, with its strides."""
    if gate is None:
        return NO_GATE
    batch, head, token, *feature = gate.stride()
    return Gate(gate, batch if gate.shape[0] > 1 else 0, head, token, feature[0] if feature else None, v_head_dim)


def gate_grads(call: AttentionCall, grad_out: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for the gradients of the output before the gate, and of the gate; None without, or not wanted."""
    if call.gate is None:
        return None, None
    return empty_aligned(grad_out), torch.empty_like(call.gate) if wanted.gate else None


def bounds_args(call: AttentionCall) -> Bounds:
    """Return the extents of a dense batch's sequences."""
    bounds = (call.key_lengths, call.key_starts, call.query_starts)
    return Bounds(*(None if x is None else x.contiguous() for x in bounds))


def positions_args(positions: Tensor | None) -> Positions | None:
    """Return positions (B or 1, T) with their strides."""
    if positions is None:
        return None
    batch, token = broadcast_strides(positions, 2)
    return Positions(positions, batch, token, positions.shape[1])


def scores_args(call: AttentionCall, score_mod: ScoreMod | None) -> Scores:
    """Return the numbers that turn a product into an exponent.

    Without a score function the scale waits for the multiplication that makes scores exponents of 2.
    """
    params, cap = call.score_mod_params, call.softcap
    exp2_scale = call.scale * LOG2_E if cap is None else cap * LOG2_E
    return Scores(
        scale=call.scale if cap is None else call.scale / cap,
        cap=1.0 if cap is None else cap,
        exp2_scale=exp2_scale if score_mod is None else LOG2_E,
        params=None if params is None else params.contiguous(),
        params_stride=None if params is None else params.shape[-1],
        params_stride_batch=None if params is None or params.ndim == 2 else params[0].numel(),
    )


def dropout_args(call: AttentionCall) -> Dropout | None:
    """Return the seed and the rate of dropout; None without any."""
    steps = dropped_steps(call.dropout_p)
    return None if steps == 0 else Dropout(call.seed, steps, rescale(call.dropout_p))


def window_args(call: AttentionCall) -> dict[str, int | None]:
    """Return how far a query attends to either side, exclusive, as far as indices go; None: as far as to the left."""
    if not call.has_window:
        return {"window": 0, "window_right": None}
    left, right = (2**30 if x is None else min(x + 1, 2**30) for x in (call.window_left, call.window_right))
    return {"window": left, "window_right": None if call.causal or left == right else right}


def windowed_arg(call: AttentionCall) -> bool | int:
    """Return whether a call has a window; OUTSIDE where that leaves some keys to no query, by shapes alone."""
    if not call.has_window:
        return False
    if call.cu_seqlens_q is not None:
        some_outside = call.cu_seqlens_k is not call.cu_seqlens_q
    elif call.query_starts is not None:
        some_outside = True
    else:
        some_outside = call.window_left is not None and kv_capacity(call) - call.q.shape[2] > call.window_left
    return int(OUTSIDE.value) if some_outside else True


def far_window_arg(call: AttentionCall) -> int | None:
    """Return the window of near pairs, as far as indices go, or positions in int64; None if no pair is far."""
    if call.far is None:
        return None
    return min(call.far.window, 2**29 if call.positions_q is None else 2**62)


def rope_table_args(table: record.RopeTable | None) -> tuple[RopeTable | None, int]:
    """Return tables of cosines and sines with their strides, and R."""
    if table is None:
        return None, 0
    cos, sin = table
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return RopeTable(cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)), 2 * cos.shape[2]


def row_target(x: Tensor) -> RowTarget:
    """Return where the rows of x (B, H, T, D) are stored."""
    batch, head, token, _ = x.stride()
    return RowTarget(x, batch if x.shape[0] > 1 else 0, head, token, x.shape[3])


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """Return a zero that launches of the current stream count with in turn; each leaves it zero.

    A captured CUDA graph has its own, in the graph's memory: it may be replayed beside other launches.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


def has_tma() -> bool:
    """Say whether the current GPU reads tiles by descriptors; elsewhere the host's are a load for each number."""
    return gpu.is_interpreted() or (not gpu.is_rocm() and gpu.current_capability() >= (9, 0))


def precision() -> str:
    """Return the precision of float32 products, by PyTorch's switch."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def broadcast_strides(x: Tensor, count: int) -> tuple[Any, ...]:
    """Return the first `count` strides; 0 for a dimension of one."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))


def begin_forward(call: AttentionCall, on: Steps, maps: bool = True) -> tuple[Tensor, Tensor, Saved, bool]:
    """Return memory for the output, v, the tensors to save, and whether no kernel needs to run.

    maps: whether somebody reads q and k with their features mapped.
    """
    out = empty_output(call.q, call.v.shape[3])
    far, q, k, v = None, call.q, call.k, call.v
    if maps:
        far = map_far_features(call, on)
        q, k = map_and_weigh(call, on)
        q = aligned(q)
    has_keys = kv_capacity(call) > 0 and k.shape[0] > 0
    if call.block_table is None:  # pages are read where they are
        k, v = aligned(k) if maps else k, aligned(v) if has_keys else v
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    saved = Saved(q, k, lse, *(None if x is None else aligned(x) for x in far or NO_FAR))
    if lse.numel() and has_keys:
        return out, v, saved, False
    if lse.numel():
        write_no_keys(call, out, lse)
        if call.row_logits is not None:
            call.row_logits.fill_(-math.inf)
    return out, call.v, saved, True


def empty_output(q: Tensor, v_head_dim: int) -> Tensor:
    """Return memory for the output, aligned for descriptors: like q, or (B, T, H, Dv) dense if Dv differs from D."""
    if v_head_dim == q.shape[3]:
        return empty_aligned(q)
    batch, heads, queries, _ = q.shape
    return empty_aligned(q.new_empty(batch, queries, heads, v_head_dim).transpose(1, 2))


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it, with dense features and other strides in multiples of 16 bytes, for descriptors."""
    vector = 16 // x.element_size()
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
            if size > 1 and (stride % vector or stride == 0):
                break
        else:
            return x
    return empty_aligned(x, dense=True).copy_(x)


def tiled(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Return a descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    return TensorDescriptor(x, list(x.shape), strides_of_tiles(x), [1, 1, rows, block_d])


def strides_of_tiles(x: Tensor) -> list[int]:
    """Return the strides of x (B, H, T, D) for a descriptor, valid in dimensions of one too."""
    strides = [stride if size > 1 else x.shape[3] * 16 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return [*strides[:3], 1]


def page_args(x: Tensor, block_table: Tensor) -> Pages:
    """Return pages (pages, K, page_size, D) that the rows of a table name, with their strides."""
    page, head, token, _ = broadcast_strides(x, 4)
    return Pages(x, page, head, token, x.shape[3], x.shape[0], block_table, *broadcast_strides(block_table, 2))


def store_target(x: Tensor, rows: int, block_d: int, packed: Packed | None) -> TensorDescriptor | RowTarget:
    """Return where a kernel stores tiles: a descriptor, or rows if sequences of a packed batch end within tiles."""
    # The one row of a packed batch needs no stride of batches, and Triton's kernels read none.
    return tiled(x, rows, block_d) if packed is None else row_target(x)._replace(stride_batch=None)


def schedule_tiles(
    call: AttentionCall, of: str, batch: int, n_tokens: int, block: int, on: Steps
) -> tuple[Packed | None, int]:
    """Return the `Packed` of a kernel whose programs have tiles of queries ("q") or keys ("k"), and how many tiles."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_seqlens_q is None:
        return None, triton.cdiv(n_tokens, block) * batch
    cu_seqlens_q = cu_seqlens_q.contiguous()
    # Over a cache there are none, and none are read; Triton 3.6 does not compile a group with a field of None here.
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k.contiguous()
    count = cu_seqlens_q.shape[0] - 1
    # An upper bound: each sequence, and the tokens of none, may have a tile that is not full.
    n_tiles = n_tokens // block + count + 1
    schedule = torch.empty(n_tiles, 2, dtype=torch.int32, device=cu_seqlens_q.device)
    on.launch(
        schedule_kernel,
        count + 1,
        schedule_ptr=schedule,
        cu_seqlens_ptr=cu_seqlens_q if of == "q" else cu_seqlens_k,
        n_sequences=count,
        n_tokens=n_tokens,
        n_entries=n_tiles,
        BLOCK=block,
        LAST_FIRST=of == "q" and call.causal,
        BLOCK_S=256,
    )
    return Packed(cu_seqlens_q, cu_seqlens_k, schedule, count), n_tiles


def gives_far_features(call: AttentionCall) -> bool:
    """Say whether the caller gave the features of far pairs, whose gradients then are separate."""
    return call.far is not None and call.far.given is not None


def rotates_in_registers(call: AttentionCall, head_dim: int, features: Features) -> bool:
    """Say whether the kernels can rotate a gradient back with a tile in registers."""
    tables = call.tables
    if tables.q is None:
        return True
    if features.d_chunks > 1 or tables.rotary_offset or tables.pair_block is not None:
        return False
    if features.block_d > MAX_ROTATED_BLOCK:
        return False
    return tables.interleaved or 2 * tables.q.cos.shape[-1] == head_dim == features.block_d


def inverse_rotate_all(
    grad_q: Tensor, grad_k: Tensor, far_grads: Sequence[Tensor | None], call: AttentionCall, on: Steps
) -> tuple[Tensor, Tensor]:
    """Rotate the gradients of q and k back where the kernels cannot, and add those of far pairs.

    Far gradients belong to q and k only if the scheme computes the features of far pairs.
    """
    tables = call.tables
    grad_q = grad_q if tables.q is None else rotate(grad_q, tables.q, tables, on, inverse=True)
    grad_k = grad_k if tables.k is None else rotate(grad_k, tables.k, tables, on, inverse=True)
    if call.far is None or call.far.tables is None:
        return grad_q, grad_k
    q_past, q_future, k_far = (
        grad if grad is None or table is None else rotate(grad, table, tables, on, inverse=True)
        for grad, table in zip(far_grads, call.far.tables, strict=True)
    )
    for total, grad in ((grad_q, q_past), (grad_q, q_future), (grad_k, k_far)):
        if grad is not None:
            on.operate(torch.Tensor.add_, total, grad)
    return grad_q, grad_k


def first_logits(call: AttentionCall) -> Tensor | None:
    """Return the sinks (H,), the first logits of rows, as kernels read them; None without any."""
    return None if call.sinks is None else call.sinks.float().contiguous()


def write_no_keys(call: AttentionCall, out: Tensor, lse: Tensor) -> Tensor:
    """Write the results of rows without a key, and return the output."""
    logits = first_logits(call)
    lse.fill_(-math.inf) if logits is None else lse.copy_(logits[:, None] * LOG2_E)
    return out.zero_()


def no_keys_grad(call: AttentionCall, grad_lse: Tensor | None) -> Tensor | None:
    """Return the gradient of sinks where rows have no key: they are the natural log-sum-exps."""
    if call.sinks is None or grad_lse is None:
        return None if call.sinks is None else torch.zeros_like(call.sinks)
    return torch.zeros_like(call.sinks) + grad_lse.sum((0, 2))


def add_first_logits_grad(
    grads: Gradients, call: AttentionCall, lse: Tensor, delta: Tensor, wanted: Wanted, on: Steps
) -> Gradients:
    """Return gradients with that of sinks, if it is wanted, from base-2 log-sum-exps and delta, both (B, H, Tq)."""
    sinks = call.sinks
    if sinks is None or not wanted.sinks:
        return grads
    grad = torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    batch, heads, queries = lse.shape
    on.launch(
        sinks_grad_kernel,
        heads,
        grad_ptr=grad,
        sinks_ptr=sinks.contiguous(),
        lse_ptr=lse,
        delta_ptr=delta,
        n_heads=heads,
        n_queries=queries,
        n_rows=batch * queries,
        BLOCK=SUM_BLOCK,
    )
    return grads._replace(sinks=grad)


def sum_param_grads(params: Tensor, parts: Tensor, batch: int, heads: int, packed: bool, on: Steps) -> Tensor:
    """Sum the programs' parts of the parameters' gradient, (programs, N_PARAMS), to the shape of the parameters."""
    result = torch.empty(params.shape, dtype=params.dtype, device=params.device)
    n_parts, n_params = parts.shape
    n_rows, n_columns = result.numel() // params.shape[-1], params.shape[-1]
    tiles = n_parts // (heads if packed else batch * heads)
    if packed:  # programs are (tile, head)
        strides = {"n_inner": 1, "outer_stride": heads, "row_stride": 1}
    else:  # programs are (batch row, head, tile)
        strides = {"n_inner": tiles, "outer_stride": heads * tiles, "row_stride": tiles}
    block_columns = triton.next_power_of_2(max(n_columns, n_params))
    on.launch(
        sum_parts_kernel,
        n_rows,
        result_ptr=result,
        parts_ptr=parts,
        n_parts=n_parts // n_rows,
        **strides,
        n_columns=n_columns,
        N_PARAMS=n_params,
        BLOCK_PARTS=max(1, SUM_BLOCK // block_columns),
        BLOCK_COLUMNS=block_columns,
    )
    return result


def call_args(call: AttentionCall, score_mod: ScoreMod | None) -> dict[str, Any]:
    """Return the argument groups that the forward and both kernels of the backward take of a call."""
    return {
        "mask": mask_args(call),
        "bounds": bounds_args(call),
        "positions_q": positions_args(call.positions_q) if call.reads_positions else None,
        "positions_k": positions_args(call.positions_k) if call.reads_positions else None,
        "dropout": dropout_args(call),
        "scores": scores_args(call, score_mod),
        **window_args(call),
        "far_window": far_window_arg(call),
    }
