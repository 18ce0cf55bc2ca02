"""Launchers of the Gluon kernels of attention for Hopper, forward and backward.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import AT_ONCE, Gradients, Saved, Steps, Wanted
from ropewalk.ops.attention.blocks.mask_kernel import list_mask
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.dropout import rescale
from ropewalk.ops.attention.hopper.backward import backward_kernel
from ropewalk.ops.attention.hopper.backward_warps import ALTERNATING, BY_HEADS, STAGGERED
from ropewalk.ops.attention.hopper.backward_wide import backward_wide_kernel
from ropewalk.ops.attention.hopper.bias_grad import bias_grad_kernel
from ropewalk.ops.attention.hopper.forward import forward_kernel
from ropewalk.ops.attention.hopper.prepost import bwd_postprocess_kernel, bwd_preprocess_kernel
from ropewalk.ops.attention.hopper.ranges import goes_by_ranges, list_ranges
from ropewalk.ops.attention.hopper.scores import bias_table_kernel, relative_positions_kernel
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, DQ_CHUNK, WG_ROWS
from ropewalk.ops.attention.tables import empty_aligned, with_rows
from ropewalk.ops.attention.triton.arguments import Bounds, Lists, Packed, Schedule, Scores
from ropewalk.ops.attention.triton.config import Features
from ropewalk.ops.attention.triton.gather import copy_pages
from ropewalk.ops.attention.triton.launch_common import (
    NO_FAR,
    aligned,
    begin_forward,
    bounds_args,
    counter_of,
    dropout_args,
    far_window_arg,
    gate_args,
    gate_grads,
    gives_far_features,
    gradient_of_sinks,
    inverse_rotate_all,
    lists_args,
    load_score_mod,
    on_its_device,
    positions_args,
    rope_table_args,
    rotates_in_registers,
    row_target,
    schedule_tiles,
    scores_args,
    store_target,
    strides_of_tiles,
    sum_param_grads,
    tiled,
    window_args,
    windowed_arg,
)
from ropewalk.ops.attention.triton.score_mods import BIAS_MARGIN, ScoreMod

L2_SECTION_BYTES = 24 << 20  # half of the L2 cache: tensors of the heads that programs work on at a time
_PROGRAMS_PER_SECTION = 128  # nearly one for each multiprocessor of an H100 or H200
_FAST_MEMORY = 4e12  # bytes a second: an H100 has 3.35e12, an H200 4.8e12
_LINE = 32  # float32 elements of a line of the dQ workspace: as many as a swizzled row of shared memory has
_CHUNK_LINES = DQ_CHUNK.value**2 // _LINE


class ForwardConfig(NamedTuple):
    """Constants of the forward kernel's pipeline."""

    CONSUMERS: int
    BLOCK_N: int
    K_STAGES: int
    V_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PIN_EXP2: bool
    CONVERT_P_EARLY: bool
    PINGPONG: bool
    OUT_IN_Q: bool = False
    Q_STAGES: int = 1  # of each compute warp group; two load the next tile's queries before this one's last step
    HALVES: int = 1  # of a program, each with a load warp, and work items of its own
    LAGS: bool = False  # look for a row's maximum only where sums of exponentials are large

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.CONSUMERS * int(WG_ROWS.value)


class FeatureBlocks(NamedTuple):
    """Blocks of a row's features, powers of two: d_chunks of block_d for q and k, one of block_dv for v."""

    block_d: int
    d_chunks: int
    block_dv: int

    @property
    def widest(self) -> int:
        """Return the features of a row of q, by which configurations are chosen."""
        return self.block_d * self.d_chunks


# By `FeatureBlocks.widest`, and causality, as measured.
FORWARD = {
    (64, False): ForwardConfig(3, 128, 2, 2, 160, 32, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=True),
    (64, True): ForwardConfig(3, 128, 2, 2, 160, 32, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=True),
    (128, False): ForwardConfig(
        2, 128, 2, 2, 232, 40, False, CONVERT_P_EARLY=True, PINGPONG=True, Q_STAGES=2, LAGS=True
    ),
    (128, True): ForwardConfig(
        2, 128, 2, 2, 232, 40, False, CONVERT_P_EARLY=False, PINGPONG=False, Q_STAGES=2, LAGS=True
    ),
    (192, False): ForwardConfig(2, 128, 2, 2, 232, 40, False, CONVERT_P_EARLY=True, PINGPONG=False, OUT_IN_Q=True),
    (192, True): ForwardConfig(
        2, 128, 2, 2, 232, 40, False, CONVERT_P_EARLY=True, PINGPONG=True, OUT_IN_Q=True, LAGS=True
    ),
    (256, False): ForwardConfig(2, 64, 2, 2, 240, 24, False, CONVERT_P_EARLY=True, PINGPONG=False, OUT_IN_Q=True),
    (256, True): ForwardConfig(
        2, 64, 2, 2, 240, 24, PIN_EXP2=True, CONVERT_P_EARLY=False, PINGPONG=True, OUT_IN_Q=True
    ),
}
# Where each tile's maximum is needed, or scores are changed, which takes the registers of lagging maxima.
FORWARD_CHANGED = FORWARD | {
    (128, False): ForwardConfig(2, 128, 2, 2, 232, 40, False, CONVERT_P_EARLY=True, PINGPONG=False, Q_STAGES=2),
    (128, True): ForwardConfig(2, 128, 2, 2, 232, 40, True, CONVERT_P_EARLY=False, PINGPONG=True, Q_STAGES=2),
    (192, True): FORWARD[192, True]._replace(LAGS=False),
}
# A score function at 64 features takes more registers than three compute warp groups have.
FORWARD_SCORE_MOD = ForwardConfig(2, 128, 2, 2, 240, 24, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=True)
# Causal dropout: three groups have no registers for it.
FORWARD_TWO_LAGGING = FORWARD_SCORE_MOD._replace(LAGS=True)
# At 64 features: two halves with tiles of 128 queries, each of which begins and ends beside the other's steps.
FORWARD_HALVES = ForwardConfig(2, 64, 4, 4, 112, 32, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=False, HALVES=2)
HALVES_COST = 1.09  # their time for a tile's row, of that of three groups, whose tiles have 192 rows
HALVES_TILES_PER_SM = 4  # with fewer tiles, halves fill the multiprocessors unevenly
NARROW_WINDOW = 1024  # keys: tiles of 192 queries have more pairs outside of windows up to that
SHORT_LENGTHS = 2048  # keys: up to so many, tiles of three groups are not the fastest with key lengths
SHORT_KEYS = 768  # up to so many, each step of 128 features has its maxima, which takes less time than lagging ones
# A bias by distance at 128 features.
FORWARD_BIAS = FORWARD[128, True]._replace(PINGPONG=True)
# A tile of queries is one block of lists. By `FeatureBlocks.widest`, as measured.
FORWARD_LISTS = {64: FORWARD_HALVES, 128: FORWARD[128, True]}
# Bits and a score function at 64 features take more registers than two halves have.
FORWARD_LISTS_WHOLE = ForwardConfig(2, 128, 3, 3, 240, 24, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=True)
# Tiles of lists, of ranges of pairs by positions.
FORWARD_RANGES = {64: FORWARD_LISTS_WHOLE, 128: FORWARD_LISTS[128]}
# With dropout, and lists or not, P is converted before the wait for O: 16 bits of each number are masked in registers.
FORWARD_DROPOUT = {
    (64, False): FORWARD_SCORE_MOD,
    (64, True): FORWARD_TWO_LAGGING,
    **{(widest, causal): FORWARD_CHANGED[widest, False] for widest in (128, 192, 256) for causal in (False, True)},
}


class BackwardConfig(NamedTuple):
    """Constants of the backward kernel's pipeline."""

    BLOCK_M: int
    DEFER_DQ: bool
    STAGES: int
    CONSUMER_REGISTERS: int
    OTHER_REGISTERS: int


# By the block of features, as measured.
BACKWARD = {64: BackwardConfig(128, True, 2, 240, 24), 128: BackwardConfig(64, False, 2, 240, 24)}
# Queries of a step of the backward kernel, and keys of its warp groups: what is far to one kernel is so to the other.
BIAS_GRAD = {widest: (config.BLOCK_M, WG_ROWS.value) for widest, config in BACKWARD.items()}


class WideConfig(NamedTuple):
    """Constants of a backward kernel's pipeline for head dims above 128."""

    BLOCK_M: int
    Q_STAGES: int
    DO_STAGES: int
    CONSUMER_REGISTERS: int
    OTHER_REGISTERS: int


# By `FeatureBlocks.widest`, as measured: of the kernel of dV, and of that of dK and dQ, or of all.
BACKWARD_DV = {192: WideConfig(64, 2, 2, 240, 24), 256: WideConfig(64, 2, 2, 240, 24)}
BACKWARD_DK = {192: WideConfig(64, 2, 2, 240, 24), 256: WideConfig(64, 1, 1, 240, 24)}
# Lines of dQ that a warp group gives away at a time: 64 features, or as many as shared memory has room for.
WIDE_DQ_LINES = {192: _CHUNK_LINES, 256: _CHUNK_LINES // 2}


@on_its_device
def forward(call: AttentionCall, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
    """Attend, as the Triton kernels' launcher does."""
    if call.block_table is not None:
        call = copy_pages(call, on)
    out, v, saved, is_empty = begin_forward(call, on)
    if is_empty:
        return out, saved
    call = _with_lists_of_mask(call, "rows", on)
    batch, heads, queries, head_dim = saved.q.shape
    key_heads, keys = saved.k.shape[1:3]
    blocks = cut_features(head_dim, v.shape[3])
    score_mod = _score_mod_of(call)
    config = _forward_config(call, blocks.widest, gpu.num_sms(on.device_of(call.q)))
    packed, n_tiles = schedule_tiles(call, "q", batch, queries, config.block_m, on)
    n_work = n_tiles * heads
    schedule = Schedule(
        n_tiles=n_tiles // batch if packed is None else n_tiles,
        n_rows=batch * heads,
        n_heads=heads,
        heads_per_key=heads // key_heads,
        heads_per_l2_section=_heads_per_l2_section(heads, saved.k, v, saved.k_far),
    )
    bounds = bounds_args(call)
    on.launch(
        forward_kernel,
        min(n_work, gpu.num_sms(on.device_of(saved.q))),
        **_describe_inputs(saved, v, WG_ROWS.value, config.BLOCK_N, blocks),
        out=_describe(out, WG_ROWS.value, blocks.block_dv) if packed is None else row_target(out),
        lse_ptr=saved.lse,
        row_logits_ptr=call.row_logits,
        counter_ptr=on.per_stream(counter_of, saved.q),
        packed=packed,
        bounds=bounds,
        lists=_lists_args(call, "rows", packed, on),
        dropout=dropout_args(call),
        scores=_scores_args(call, packed, on),
        gate=gate_args(call.gate, v.shape[3]),
        sinks_ptr=None if call.sinks is None else call.sinks.float().contiguous(),
        **window_args(call),
        far_window=far_window_arg(call),
        **schedule._asdict(),
        n_queries=queries,
        n_keys=keys,
        n_work=n_work,
        D_CHUNKS=blocks.d_chunks,
        CAUSAL=call.causal,
        WINDOWED=windowed_arg(call),
        HAS_PARTIAL_TILES=_has_partial_tiles(call, saved, packed, bounds, config.BLOCK_N),
        MOD=None if score_mod is None else score_mod.forward,
        SOFTCAP=call.softcap is not None,
        **config._asdict(),
        num_warps=4,
    )
    return out, saved


@on_its_device
def backward(
    call: AttentionCall,
    out: Tensor,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
    on: Steps = AT_ONCE,
) -> Gradients:
    """Compute the gradients, as the Triton kernels' launcher does.

    dQ is a float32 sum in an order that differs from run to run, unless the call is deterministic. The registry sends
    elsewhere what this backward does not support.
    """
    call = _with_lists_of_mask(with_rows(call), "columns", on)
    bounds = bounds_args(call)  # with copies made here: the backward kernel reads them before it waits
    call = call._replace(**bounds._asdict())
    lse, given, tables = saved.lse, gives_far_features(call), call.tables
    saved = Saved(aligned(saved.q), aligned(saved.k), lse, *(None if x is None else aligned(x) for x in saved[3:]))
    v, out, grad_out = (aligned(x) for x in (call.v, out, grad_out))
    batch, heads, queries, head_dim = saved.q.shape
    keys = saved.k.shape[2]
    blocks = cut_features(head_dim, v.shape[3])
    is_wide = blocks.widest > 128
    block_m = BACKWARD_DK[blocks.widest].BLOCK_M if is_wide else BACKWARD[blocks.widest].BLOCK_M
    rotates = rotates_in_registers(call, head_dim, Features(*blocks)) and (not is_wide or call.tables.q is None)
    # Far pairs' gradients share sums with near ones where the kernels can rebase their rotation.
    separate_far_grads = given or not rotates
    grad_q, grad_k, grad_v = empty_aligned(saved.q), empty_aligned(saved.k), empty_aligned(v)
    far_grads = [None if x is None or not separate_far_grads else empty_aligned(x) for x in saved[3:]]

    packed, n_tiles = schedule_tiles(call, "q", batch, queries, block_m, on)
    # Tiles are whole, and each sequence's rows begin with one.
    workspace_rows = n_tiles // batch * block_m if packed is None else n_tiles * block_m
    workspaces = sum(x is not None for x in (saved.q, saved.q_past, saved.q_future))
    n_elements = batch * heads * workspace_rows * blocks.widest
    dq_accum = torch.empty(workspaces * n_elements // _LINE, _LINE, dtype=torch.float32, device=lse.device)
    dq_order = None
    if call.deterministic:
        n_tiles_of_dq = workspaces * batch * heads * (workspace_rows // block_m)
        dq_order = torch.empty(n_tiles_of_dq, dtype=torch.int32, device=lse.device)
    delta = torch.empty_like(lse)
    of_rows: dict[str, Any] = {
        "dq_accum_ptr": dq_accum,
        "packed": packed,
        "bounds": bounds,
        "n_heads": heads,
        "n_queries": queries,
        "n_keys": keys,
        "workspace_rows": workspace_rows,
        "n_elements": n_elements,
        "BLOCK_M": block_m,
        "BLOCK_D": blocks.block_d,
        "D_CHUNKS": blocks.d_chunks,
        "BLOCK_DV": blocks.block_dv,
        "OVERLAPS": not gpu.is_interpreted(),
    }
    score_mod = load_score_mod(call) if wanted.score_mod_params else None
    is_factor = score_mod is not None and score_mod.is_factor
    param_sums = None
    if score_mod is not None and not is_factor and not is_wide:
        n_slots, of_slot = triton.cdiv(keys, BLOCK_N.value), 2 if score_mod.bias is None else 4
        if call.cu_seqlens_k is not None:
            n_slots = keys // BLOCK_N.value + call.cu_seqlens_k.shape[0]
        param_sums = torch.empty(batch * heads, n_slots, of_slot, dtype=torch.float32, device=lse.device)
    do_ungated, grad_gate = gate_grads(call, grad_out, wanted)
    on.launch(
        bwd_preprocess_kernel,
        n_tiles * heads,
        out=tiled(out, block_m, blocks.block_dv),
        do=tiled(grad_out, block_m, blocks.block_dv),
        lse_ptr=lse,
        grad_lse_ptr=None if grad_lse is None else grad_lse.contiguous(),
        delta_ptr=delta,
        dq_order_ptr=dq_order,
        param_sums_ptr=param_sums,
        gate=gate_args(call.gate, v.shape[3]),
        grad_gate=gate_args(grad_gate, v.shape[3]),
        do_ungated=None if do_ungated is None else store_target(do_ungated, block_m, blocks.block_dv, packed),
        **of_rows,
        n_sums=0 if param_sums is None else param_sums.numel(),
        WORKSPACES=workspaces,
        num_warps=8 if is_wide else 4,
    )
    if do_ungated is not None:
        grad_out = do_ungated
    kv_grads = (grad_k, far_grads[2], grad_v)
    scores = _scores_args(call, packed, on)
    if is_wide:
        _launch_wide_kernels(
            call, saved, v, grad_out, (dq_accum, dq_order), kv_grads, scores, delta, rotates, workspace_rows, on
        )
    else:
        _launch_kernel(
            call,
            saved,
            v,
            grad_out,
            (dq_accum, dq_order),
            kv_grads,
            param_sums,
            scores,
            delta,
            rotates,
            workspace_rows,
            on,
        )
    factor_grads = torch.empty(n_tiles * heads, 1, dtype=torch.float32, device=lse.device) if is_factor else None
    table, width = rope_table_args(tables.q if rotates else None)
    far = None if call.far is None or separate_far_grads else call.far.tables
    past_table, future_table = (
        (None, None) if far is None else (rope_table_args(far.q_past)[0], rope_table_args(far.q_future)[0])
    )
    for workspace, grad in enumerate((grad_q, *far_grads[:2])):
        if grad is not None:
            on.launch(
                bwd_postprocess_kernel,
                n_tiles * heads,
                q=tiled(saved.q, block_m, blocks.block_d) if is_factor else None,
                scores=scores if is_factor else None,
                factor_grads_ptr=factor_grads,
                dq=store_target(grad, block_m, blocks.block_d, packed),
                table=table if workspace == 0 else None,
                past_table=past_table,
                future_table=future_table,
                grad_scale=call.scale * rescale(call.dropout_p),
                workspace=workspace,
                R=width,
                INTERLEAVED=call.tables.interleaved,
                **of_rows,
                num_warps=8 if is_wide or future_table is not None else 4,
                launch_pdl=True,
            )
    if not rotates:
        grad_q, grad_k = inverse_rotate_all(grad_q, grad_k, far_grads, call, on)
    grad_sinks = None
    if wanted.sinks and call.sinks is not None:
        grad_sinks = gradient_of_sinks(call.sinks, lse, delta, on)
    grad_params, params = None, call.score_mod_params
    if score_mod is not None and params is not None:
        if factor_grads is not None:
            grad_params = sum_param_grads(params, factor_grads, batch, heads, packed is not None, on)
        elif score_mod.bias is not None and param_sums is not None:
            grad_params = _bias_grad(call, saved, v, grad_out, delta, param_sums, scores, packed, on)
        elif param_sums is not None:
            grad_params = sum_param_grads(params, param_sums.view(-1, 1), batch, heads, False, on)
    grads = Gradients(grad_q, grad_k, grad_v, grad_params, grad_sinks, *(far_grads if given else NO_FAR))
    return grads._replace(gate=grad_gate)


def _forward_config(call: AttentionCall, widest: int, n_sms: int) -> ForwardConfig:
    """Return the configuration of a call's forward."""
    key, source, score_mod = (widest, call.causal), load_score_mod(call), _score_mod_of(call)
    if call.dropout_p > 0:
        return FORWARD_DROPOUT[key]
    if goes_by_ranges(call):
        return FORWARD_RANGES[widest]
    if call.blocks is not None:
        config = FORWARD_LISTS[widest]
        is_whole = config.HALVES > 1 and (call.blocks.bits is not None or source is not None)
        return FORWARD_LISTS_WHOLE if is_whole else config
    if widest == 64:
        return _forward_config_64(call, n_sms)
    is_short = widest == 128 and call.far is None and call.k.shape[2] <= SHORT_KEYS
    if score_mod is None and source is not None and source.bias is not None and widest == 128 and not is_short:
        return FORWARD_BIAS
    keeps_lagging = source is None or (score_mod is None and (source.is_factor or (source.is_slope and call.causal)))
    if not keeps_lagging or call.softcap is not None or call.row_logits is not None:
        return FORWARD_CHANGED[key]
    return FORWARD[key]._replace(LAGS=False) if is_short else FORWARD[key]


def _forward_config_64(call: AttentionCall, n_sms: int) -> ForwardConfig:
    """Return the configuration of a forward at up to 64 features, without dropout and lists."""
    source, (batch, heads, queries, _), keys = load_score_mod(call), call.q.shape, call.k.shape[2]
    if _score_mod_of(call) is not None:
        return FORWARD_SCORE_MOD
    has_lengths = not call.causal and call.key_lengths is not None
    is_short = has_lengths and keys <= SHORT_LENGTHS
    if call.far is not None:
        return FORWARD_SCORE_MOD if is_short else FORWARD[64, call.causal]
    has_slopes, has_bias = source is not None and source.is_slope, source is not None and source.bias is not None
    if is_short or _wastes_tiles_of_three(call):
        takes_registers = has_bias if call.causal else has_slopes
        n_tiles = batch * heads * triton.cdiv(queries, FORWARD_HALVES.block_m)
        is_small = keys <= FORWARD_SCORE_MOD.BLOCK_N or n_tiles < HALVES_TILES_PER_SM * n_sms
        return FORWARD_SCORE_MOD if takes_registers or is_small else FORWARD_HALVES
    lags = has_bias or (has_slopes and call.causal) or (has_lengths and source is None and call.softcap is None)
    return FORWARD[64, call.causal]._replace(LAGS=lags)


def _wastes_tiles_of_three(call: AttentionCall) -> bool:
    """Say whether tiles of three groups have so many rows or pairs too many that those of two are faster."""
    left, right = call.window_left, 0 if call.causal else call.window_right
    if left is not None and right is not None and left + right <= NARROW_WINDOW:
        return True
    sizes = (FORWARD_HALVES.block_m, FORWARD[64, call.causal].block_m)
    queries = call.q.shape[2]
    if call.cu_seqlens_q is None:
        of_two, of_three = (triton.cdiv(queries, size) * size for size in sizes)
    else:  # half of a sequence's last tile is empty, in the mean; tokens may be of no sequence
        mean = queries / max(1, call.cu_seqlens_q.shape[0] - 1)
        of_two, of_three = (mean + size / 2 for size in sizes)
    return bool(HALVES_COST * of_two < of_three)


def _with_lists_of_mask(call: AttentionCall, of: str, on: Steps) -> AttentionCall:
    """Return the call with the lists of "rows" or "columns" of its mask, which its loops walk, in the mask's place."""
    return call if call.mask is None else call._replace(mask=None, blocks=list_mask(call.mask, of, on))


def _lists_args(call: AttentionCall, of: str, packed: Packed | None, on: Steps) -> Lists:
    """Return the lists of a call's "rows" or "columns", or those of each range of pairs by positions."""
    return list_ranges(call, of, packed, on) if goes_by_ranges(call) else lists_args(call, of)


def _launch_kernel(
    call: AttentionCall,
    saved: Saved,
    v: Tensor,
    grad_out: Tensor,
    dq_sums: tuple[Tensor, Tensor | None],
    kv_grads: tuple[Tensor, Tensor | None, Tensor],
    param_sums: Tensor | None,
    scores: Scores,
    delta: Tensor,
    rotates: bool,
    workspace_rows: int,
    on: Steps,
) -> None:
    """Launch the backward kernel, for the gradients of k, of far keys if separate, and of v."""
    blocks, block_n = cut_features(saved.q.shape[3], v.shape[3]), BLOCK_N.value
    block_d = blocks.block_d
    config = BACKWARD[block_d]
    dq_accum, dq_order = dq_sums
    rotation = call.tables.k if rotates else None
    table, width = rope_table_args(rotation)
    cos, sin = (
        None if x is None else _describe(aligned(x[:, None]), config.BLOCK_M, block_d // 2)
        for x in rotation or (None, None)
    )
    far = None if call.far is None or not rotates else call.far.tables
    weights = call.tables.feature_weights
    grad_k, grad_k_far, grad_v = kv_grads
    n_programs, arguments = _backward_args(call, saved, blocks, scores, workspace_rows, on)
    packed = arguments["packed"]
    # At 128 features it was slower, and with score functions it spills more (note 097).
    by_tma = block_d == 64 and packed is None and _has_plain_scores(call)
    dk, dv = (_describe(x, WG_ROWS.value, block_d) if by_tma else row_target(x) for x in (grad_k, grad_v))
    on.launch(
        backward_kernel,
        n_programs,
        **_describe_inputs(saved, v, config.BLOCK_M, block_n, blocks),
        do=_describe(grad_out, config.BLOCK_M, block_d),
        dq_accum=_describe_workspace(dq_accum, _CHUNK_LINES),
        dq_order_ptr=dq_order,
        dk=dk,
        dk_far=None if grad_k_far is None else row_target(grad_k_far),
        dv=dv,
        lists=_lists_args(call, "columns", packed, on),
        dropout=dropout_args(call),
        lse_ptr=saved.lse,
        delta_ptr=delta,
        feature_weights_ptr=None if weights is None else weights.contiguous(),
        param_sums_ptr=param_sums,
        cos=cos,
        sin=sin,
        table=None if saved.k_far is None else table,
        far_table=None if far is None else rope_table_args(far.k)[0],
        **arguments,
        R=width,
        INTERLEAVED=call.tables.interleaved,
        GRADS_BY_TMA=by_tma,
        **config._asdict(),
        launch_pdl=True,  # keys and values are loaded beside the end of the kernel before
    )


def _launch_wide_kernels(
    call: AttentionCall,
    saved: Saved,
    v: Tensor,
    grad_out: Tensor,
    dq_sums: tuple[Tensor, Tensor | None],
    kv_grads: tuple[Tensor, Tensor | None, Tensor],
    scores: Scores,
    delta: Tensor,
    rotates: bool,
    workspace_rows: int,
    on: Steps,
) -> None:
    """Launch the backward kernels for head dims above 128, which rotate nothing."""
    blocks = cut_features(saved.q.shape[3], v.shape[3])
    config = BACKWARD_DK[blocks.widest]
    weights = call.tables.feature_weights
    dk, dk_far, dv = (None if x is None else row_target(x) for x in kv_grads)
    n_programs, arguments = _backward_args(call, saved, blocks, scores, workspace_rows, on)
    tiles = _describe_inputs(saved, v, config.BLOCK_M, BLOCK_N.value, blocks)
    arguments |= {"do": _describe(grad_out, config.BLOCK_M, blocks.block_dv), "lse_ptr": saved.lse}
    arguments["dropout"] = dropout_args(call)
    # With 192 features one kernel has registers for dK and dV, unless scores or a second range take more of them.
    is_fused = blocks.d_chunks > 1 and _has_plain_scores(call)
    if not is_fused:
        on.launch(
            backward_wide_kernel,
            n_programs,
            **tiles | {"v": None},
            dq_accum=None,
            dk=None,
            dk_far=None,
            dv=dv,
            delta_ptr=None,
            feature_weights_ptr=None,
            D_CHUNKS=blocks.d_chunks,
            **arguments,
            **BACKWARD_DV[blocks.widest]._asdict(),
        )
    on.launch(
        backward_wide_kernel,
        n_programs,
        **tiles,
        dq_accum=_describe_workspace(dq_sums[0], WIDE_DQ_LINES[blocks.widest]),
        dk=dk,
        dk_far=dk_far,
        dv=dv if is_fused else None,
        delta_ptr=delta,
        feature_weights_ptr=None if weights is None else weights.contiguous(),
        D_CHUNKS=blocks.d_chunks,
        **arguments,
        **config._asdict(),
    )


def _bias_grad(
    call: AttentionCall,
    saved: Saved,
    v: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    far_sums: Tensor,
    scores: Scores,
    packed: Packed | None,
    on: Steps,
) -> Tensor:
    """Return the gradient of the parameters of a bias by distance, given sums over far pairs."""
    score_mod, params = load_score_mod(call), call.score_mod_params
    assert score_mod is not None
    assert params is not None
    (batch, heads, queries, head_dim), (key_heads, keys) = saved.q.shape, saved.k.shape[1:3]
    blocks = cut_features(head_dim, v.shape[3])
    block_m, block_n = BIAS_GRAD[blocks.widest]
    rows = heads * (batch if packed is None else packed.n_sequences)
    diagonals = (2 * scores.largest + block_m + block_n) // block_n + 1
    splits = triton.next_power_of_2(triton.cdiv(gpu.num_sms(on.device_of(saved.q)), rows * diagonals))
    n_params = triton.next_power_of_2(call.n_learned_params)
    parts = torch.empty(rows * diagonals * splits, n_params, dtype=torch.float32, device=params.device)
    on.launch(
        bias_grad_kernel,
        parts.shape[0],
        q=tiled(saved.q, block_m, blocks.block_d),
        k=tiled(saved.k, block_n, blocks.block_d),
        v=tiled(v, block_n, blocks.block_dv),
        do=tiled(grad_out, block_m, blocks.block_dv),
        lse_ptr=saved.lse,
        delta_ptr=delta,
        far_sums_ptr=far_sums,
        parts_ptr=parts,
        params_ptr=params.contiguous(),
        params_stride=params.shape[-1],
        table_ptr=scores.params,
        table_stride=scores.params_stride,
        packed=packed,
        bounds=bounds_args(call),
        scale=1.0 if _score_mod_of(call) is None else scores.scale,
        exp2_scale=scores.exp2_scale,
        **window_args(call),
        n_heads=heads,
        heads_per_key=heads // key_heads,
        n_queries=queries,
        n_keys=keys,
        n_slots=far_sums.shape[1],
        largest=scores.largest,
        n_diagonals=diagonals,
        SPLITS=splits,
        CAUSAL=call.causal,
        WINDOWED=windowed_arg(call),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=blocks.block_d,
        BLOCK_DV=blocks.block_dv,
        N_PARAMS=n_params,
        PARAM_GRAD=score_mod.param_grad,
        num_warps=8,
        num_stages=2,
    )
    return sum_param_grads(params, parts, rows // heads, heads, False, on)


def _backward_args(
    call: AttentionCall, saved: Saved, blocks: FeatureBlocks, scores: Scores, workspace_rows: int, on: Steps
) -> tuple[int, dict[str, Any]]:
    """Return the programs of a backward kernel, and the arguments that all of them take."""
    (batch, heads, queries, _), (key_heads, keys) = saved.q.shape, saved.k.shape[1:3]
    block_n = BLOCK_N.value
    score_mod, source = _score_mod_of(call), load_score_mod(call)
    packed, n_tiles = schedule_tiles(call, "k", batch, keys, block_n, on)
    schedule = Schedule(
        n_tiles=n_tiles // batch if packed is None else n_tiles,
        n_rows=batch * key_heads,
        n_heads=key_heads,
        heads_per_key=heads // key_heads,
        heads_per_l2_section=_key_heads_per_l2_section(saved.q, heads // key_heads, keys, blocks.widest),
    )
    bounds = bounds_args(call)
    return n_tiles * key_heads, {
        "packed": packed,
        "bounds": bounds,
        "scores": scores,
        "grad_scale": call.scale * rescale(call.dropout_p),
        **window_args(call),
        "far_window": far_window_arg(call),
        **schedule._asdict(),
        "n_queries": queries,
        "n_keys": keys,
        "workspace_rows": workspace_rows,
        "STEP_ORDER": _choose_step_order(call, on.device_of(saved.q), heads // key_heads, keys, blocks.widest),
        "CAUSAL": call.causal,
        "WINDOWED": windowed_arg(call),
        "HAS_PARTIAL_TILES": _has_partial_tiles(call, saved, packed, bounds, block_n),
        "MOD": None if score_mod is None else score_mod.forward,
        "MOD_BWD": None if source is None else source.backward,
        "SOFTCAP": call.softcap is not None,
        "num_warps": 4,
    }


def _choose_step_order(call: AttentionCall, device: torch.device, heads_per_key: int, keys: int, widest: int) -> int:
    """Choose the order of a backward's steps, a value of `Problem.STEP_ORDER`, as measured.

    Where heads alternate, nothing of a step may depend on its head. Programs of a section must run at the same time.
    The order costs a few instructions of a step, and saves loads from memory. Longer loops do not gain, and groups of 4
    and 5 heads up to 128 features do where memory is slow.
    """
    is_dense = call.cu_seqlens_q is None and call.blocks is None and not goes_by_ranges(call)
    has_scores = load_score_mod(call) is not None or call.far is not None or call.dropout_p > 0
    if not is_dense or has_scores or call.has_window or call.deterministic:
        return int(BY_HEADS.value)
    if not call.causal:
        return int((STAGGERED if widest == 128 else BY_HEADS).value)
    fewest_heads = 4 if widest > 128 or gpu.memory_bandwidth(device) < _FAST_MEMORY else 6
    most_tiles = 128 if widest > 128 else 64
    alternates = widest >= 128 and heads_per_key >= fewest_heads and triton.cdiv(keys, BLOCK_N.value) <= most_tiles
    return int((ALTERNATING if alternates else BY_HEADS).value)


def _score_mod_of(call: AttentionCall) -> ScoreMod | None:
    """Return the `ScoreMod` that kernels apply; None where they have another way, in the unit of products.

    That is a bias by distance, and slopes, unless positions are read too, and factors of heads. All take fewer
    instructions and registers of a thread; the scale, which must be above 0, waits for the exponents.
    """
    score_mod = load_score_mod(call)
    if score_mod is None or not _takes_products(call):
        return score_mod
    by_index = call.goes_by_index and (score_mod.bias is not None or score_mod.is_slope)
    return None if by_index or (score_mod.is_factor and not score_mod.reads_positions) else score_mod


def _has_plain_scores(call: AttentionCall) -> bool:
    """Say whether a call has no score function, soft cap, far pairs or dropout."""
    return load_score_mod(call) is None and call.softcap is None and call.far is None and call.dropout_p == 0


def _takes_products(call: AttentionCall) -> bool:
    """Say whether the scale may wait for the exponents, where a score mod allows it."""
    return call.scale > 0 and call.softcap is None


def _scores_args(call: AttentionCall, packed: Packed | None, on: Steps) -> Scores:
    """Return `scores_args` as these kernels read them: with positions, a table of biases, slopes or factors."""
    score_mod, params, source = _score_mod_of(call), call.score_mod_params, load_score_mod(call)
    scores = scores_args(call, score_mod)
    if source is None:
        return scores
    if source.reads_positions and not call.goes_by_index:
        scores = scores._replace(**_relative_positions(call, packed, on))
    if score_mod is not None and score_mod.multiplies and _takes_products(call):
        scores = scores._replace(scale=None, exp2_scale=scores.exp2_scale * call.scale)
    if score_mod is None and source.is_slope:
        return scores._replace(params=None, slopes=scores.params)
    if score_mod is None and source.is_factor:
        return scores._replace(factors=scores.params)
    if source.bias is None or params is None:
        return scores
    heads, n_params = params.shape
    largest = (n_params - call.n_learned_params - 1) // 2
    width = 2 * (largest + BIAS_MARGIN.value) + 1
    table = torch.empty(heads, width, dtype=torch.float32, device=params.device)
    on.launch(
        bias_table_kernel,
        heads,
        table_ptr=table,
        params_ptr=scores.params,
        params_stride=n_params,
        largest=largest,
        scale=call.scale if score_mod is None else 1.0,
        BIAS=source.bias,
        MARGIN=BIAS_MARGIN.value,
        BLOCK=1024,
    )
    return scores._replace(params=table, params_stride=width, largest=largest)


def _relative_positions(call: AttentionCall, packed: Packed | None, on: Steps) -> dict[str, Any]:
    """Return the fields of `Scores` for positions that the tokens are given."""
    (batch, _, queries, _), keys = call.q.shape, call.k.shape[2]
    q_pos, k_pos = (torch.empty(batch, n, dtype=torch.float32, device=call.q.device) for n in (queries, keys))
    programs = 16
    on.launch(
        relative_positions_kernel,
        programs * (batch if packed is None else packed.n_sequences),
        q_out_ptr=q_pos,
        k_out_ptr=k_pos,
        positions_q=positions_args(call.positions_q),
        positions_k=positions_args(call.positions_k),
        packed=packed,
        bounds=bounds_args(call),
        n_queries=queries,
        n_keys=keys,
        PROGRAMS=programs,
        BLOCK=1024,
    )
    return {"q_pos": q_pos, "k_pos": k_pos, "q_pos_stride_batch": queries, "k_pos_stride_batch": keys}


def cut_features(head_dim: int, v_head_dim: int) -> FeatureBlocks:
    """Return the blocks of features of q and k, and of v: values are not wider than keys, but for 192."""
    widest = max(head_dim, v_head_dim)
    if widest <= 64:
        return FeatureBlocks(64, 1, 64)
    if widest <= 128:
        return FeatureBlocks(128, 1, 128)
    if widest <= 192 and v_head_dim <= 128:
        return FeatureBlocks(64, 3, 128)
    return FeatureBlocks(256, 1, 256)


def _has_partial_tiles(call: AttentionCall, saved: Saved, packed: Packed | None, bounds: Bounds, block_n: int) -> bool:
    """Say whether a tile of scores may have pairs that are not attended."""
    if call.causal or call.has_window or saved.q_past is not None or packed is not None:
        return True
    if call.blocks is not None and (call.blocks.slots is not None or call.blocks.spans is not None):
        return True
    return any(x is not None for x in bounds) or saved.k.shape[2] % block_n != 0


def _describe_inputs(saved: Saved, v: Tensor, block_m: int, block_n: int, blocks: FeatureBlocks) -> dict[str, Any]:
    """Return descriptors of q, k, v and the features of far pairs, for tiles of some queries and keys."""
    tensors = {
        "q": (saved.q, block_m, blocks.block_d),
        "k": (saved.k, block_n, blocks.block_d),
        "v": (v, block_n, blocks.block_dv),
        "q_far_past": (saved.q_past, block_m, blocks.block_d),
        "q_far_future": (saved.q_future, block_m, blocks.block_d),
        "k_far": (saved.k_far, block_n, blocks.block_d),
    }
    return {name: None if x is None else _describe(x, rows, width) for name, (x, rows, width) in tensors.items()}


def _describe(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Return a descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    shape = [1, 1, rows, block_d]
    return TensorDescriptor(x, list(x.shape), strides_of_tiles(x), shape, _shared_layout(rows, block_d, x.dtype))


@functools.lru_cache
def _shared_layout(rows: int, block_d: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    names = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], names[dtype])


def _describe_workspace(dq_accum: Tensor, lines: int) -> TensorDescriptor:
    """Return a descriptor of the workspaces of dQ, for tiles of some lines."""
    layout = gl.NVMMASharedLayout.get_default_for([lines, _LINE], gl.float32)
    return TensorDescriptor(dq_accum, list(dq_accum.shape), list(dq_accum.stride()), [lines, _LINE], layout)


def _heads_per_l2_section(heads: int, *read: Tensor | None) -> int:
    """Return how many query heads a section has: those whose keys and values stay in the L2 cache."""
    tensors = [x for x in read if x is not None]
    bytes_of_head = sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)
    return max(1, L2_SECTION_BYTES // bytes_of_head) * (heads // tensors[0].shape[1])


def _key_heads_per_l2_section(q: Tensor, heads_per_key: int, keys: int, block_d: int) -> int:
    """Return how many key heads a section of the backward has: those whose Q, dO and dQ stay in the L2 cache.

    It has at least one program for each multiprocessor. Causal programs differ in length; with fewer heads the longest
    ones of the last section would begin late, and leave most multiprocessors idle at the end.
    """
    bytes_of_head = heads_per_key * q.shape[2] * block_d * (2 * q.element_size() + 4)
    tiles: int = math.ceil(keys / BLOCK_N.value)
    return max(L2_SECTION_BYTES // bytes_of_head, math.ceil(_PROGRAMS_PER_SECTION / tiles))
