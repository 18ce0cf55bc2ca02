"""Launchers of the Gluon kernels of attention for Hopper, forward and backward.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Gradients, Saved, Wanted
from ropewalk.ops.attention.blocks.mask_kernel import list_mask
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.dropout import rescale
from ropewalk.ops.attention.hopper.backward import backward_kernel
from ropewalk.ops.attention.hopper.backward_wide import backward_wide_kernel
from ropewalk.ops.attention.hopper.bias_grad import bias_grad_kernel
from ropewalk.ops.attention.hopper.config import (
    BACKWARD,
    BACKWARD_DK,
    BACKWARD_DV,
    DQ_LINES,
    LINE,
    choose_forward,
    choose_step_order,
    cut_features,
    has_plain_scores,
    heads_per_l2_section,
    key_heads_per_l2_section,
)
from ropewalk.ops.attention.hopper.forward import forward_kernel
from ropewalk.ops.attention.hopper.prepost import bwd_postprocess_kernel, bwd_preprocess_kernel
from ropewalk.ops.attention.hopper.ranges import goes_by_ranges, list_ranges
from ropewalk.ops.attention.hopper.scores import bias_table_kernel, relative_positions_kernel
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, WG_ROWS
from ropewalk.ops.attention.tables import empty_aligned, with_rows
from ropewalk.ops.attention.triton.arguments import Lists, Packed, Schedule, Scores
from ropewalk.ops.attention.triton.config import Features
from ropewalk.ops.attention.triton.gather import copy_pages
from ropewalk.ops.attention.triton.launch_common import (
    add_first_logits_grad,
    aligned,
    begin_forward,
    bounds_args,
    counter_of,
    dropout_args,
    far_window_arg,
    first_logits,
    gate_args,
    gate_grads,
    gives_far_features,
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
from ropewalk.ops.attention.triton.score_mods import BIAS_MARGIN, DECAY, ScoreMod
from ropewalk.ops.launch.steps import AT_ONCE, Steps


@on_its_device
def forward(call: AttentionCall, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
    """Attend, as the Triton kernels' launcher does."""
    if call.block_table is not None:
        call = copy_pages(call, on)
    out, v, saved, is_empty = begin_forward(call, on)
    if is_empty:
        return out, saved
    call = with_lists_of_mask(call, "rows", on)
    batch, heads, queries, head_dim = saved.q.shape
    key_heads, keys = saved.k.shape[1:3]
    features = cut_features(head_dim, v.shape[3])
    score_mod = score_mod_of(call)
    config = choose_forward(call, score_mod, features.widest, gpu.num_sms(on.device_of(call.q)))
    packed, n_tiles = schedule_tiles(call, "q", batch, queries, config.block_m, on)
    n_work = n_tiles * heads
    schedule = Schedule(
        n_tiles=n_tiles // batch if packed is None else n_tiles,
        n_rows=batch * heads,
        n_heads=heads,
        heads_per_key=heads // key_heads,
        heads_per_l2_section=heads_per_l2_section(heads, saved.k, v, saved.k_far),
    )
    on.launch(
        forward_kernel,
        min(n_work, gpu.num_sms(on.device_of(saved.q))),
        **_describe_inputs(saved, v, WG_ROWS.value, config.BLOCK_N, features),
        out=describe(out, WG_ROWS.value, features.block_dv) if packed is None else row_target(out),
        lse_ptr=saved.lse,
        row_logits_ptr=call.row_logits,
        counter_ptr=on.per_stream(counter_of, saved.q),
        packed=packed,
        bounds=bounds_args(call),
        lists=hopper_lists_args(call, "rows", packed, on),
        dropout=dropout_args(call),
        scores=hopper_scores_args(call, packed, on),
        gate=gate_args(call.gate, v.shape[3]),
        first_logits_ptr=first_logits(call),
        **window_args(call),
        far_window=far_window_arg(call),
        **schedule._asdict(),
        n_queries=queries,
        n_keys=keys,
        n_work=n_work,
        D_CHUNKS=features.d_chunks,
        CAUSAL=call.causal,
        WINDOWED=windowed_arg(call),
        HAS_PARTIAL_TILES=has_partial_tiles(call, config.BLOCK_N),
        MOD=None if score_mod is None else score_mod.forward,
        CAPPED=call.is_capped,
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
    call = with_lists_of_mask(with_rows(call), "columns", on)
    # With copies: the backward kernel reads them before it waits.
    call = call._replace(**bounds_args(call)._asdict())
    out, grad_out = aligned(out), aligned(grad_out)
    do_ungated, grad_gate = gate_grads(call, grad_out, wanted)
    buffers = _allocate(call, saved, grad_out if do_ungated is None else do_ungated, wanted, on)
    features, block_m, packed, sums = buffers.features, buffers.block_m, buffers.packed, buffers.param_sums
    batch, heads, queries, _ = buffers.saved.q.shape
    n_programs = buffers.n_tiles * heads
    row_args: dict[str, Any] = {
        "dq_accum_ptr": buffers.dq_accum,
        "packed": packed,
        "bounds": bounds_args(call),
        "n_heads": heads,
        "n_queries": queries,
        "n_keys": buffers.saved.k.shape[2],
        "workspace_rows": buffers.workspace_rows,
        "n_elements": buffers.dq_accum.numel() // buffers.workspaces,
        "BLOCK_M": block_m,
        "BLOCK_D": features.block_d,
        "D_CHUNKS": features.d_chunks,
        "BLOCK_DV": features.block_dv,
        "OVERLAPS": not gpu.is_interpreted(),
    }
    on.launch(
        bwd_preprocess_kernel,
        n_programs,
        out=tiled(out, block_m, features.block_dv),
        do=tiled(grad_out, block_m, features.block_dv),
        lse_ptr=saved.lse,
        grad_lse_ptr=None if grad_lse is None else grad_lse.contiguous(),
        delta_ptr=buffers.delta,
        dq_order_ptr=buffers.dq_order,
        param_sums_ptr=sums,
        gate=gate_args(call.gate, out.shape[3]),
        grad_gate=gate_args(grad_gate, out.shape[3]),
        do_ungated=None if do_ungated is None else store_target(do_ungated, block_m, features.block_dv, packed),
        **row_args,
        n_sums=0 if sums is None else sums.numel(),
        WORKSPACES=buffers.workspaces,
        num_warps=8 if features.widest > 128 else 4,
    )
    scores = hopper_scores_args(call, packed, on)
    (_launch_wide_kernels if features.widest > 128 else _launch_kernel)(call, buffers, scores, on)
    score_mod, params, factor_grads = load_score_mod(call), call.score_mod_params, None
    if wanted.score_mod_params and score_mod is not None and score_mod.is_factor:
        factor_grads = torch.empty(n_programs, 1, dtype=torch.float32, device=out.device)
    _launch_postprocess(call, buffers, scores, factor_grads, n_programs, row_args, on)
    grads = buffers.grads._replace(gate=grad_gate)
    if not buffers.rotates:
        far_grads = (grads.q_past, grads.q_future, grads.k_far)
        grad_q, grad_k = inverse_rotate_all(grads.q, grads.k, far_grads, call, on)
        grads = grads._replace(q=grad_q, k=grad_k)
    if not gives_far_features(call):
        grads = grads._replace(q_past=None, q_future=None, k_far=None)
    grads = add_first_logits_grad(grads, call, saved.lse, buffers.delta, wanted, on)
    if params is None or score_mod is None:
        return grads
    if factor_grads is not None:
        grad_params = sum_param_grads(params, factor_grads, batch, heads, packed is not None, on)
        return grads._replace(score_mod_params=grad_params)
    if sums is None:
        return grads
    if score_mod.bias is not None:
        return grads._replace(score_mod_params=_bias_grad(call, buffers, params, sums, scores, on))
    return grads._replace(score_mod_params=sum_param_grads(params, sums.view(-1, 1), batch, heads, False, on))


class BackwardBuffers(NamedTuple):
    """Tensors and sizes that the launches of a backward share."""

    saved: Saved
    v: Tensor
    grad_out: Tensor  # of the output before the gate
    grads: Gradients  # of far pairs only where they do not share sums with near ones
    delta: Tensor
    dq_accum: Tensor  # the workspaces
    dq_order: Tensor | None
    param_sums: Tensor | None
    features: Features
    rotates: bool  # gradients of q and k, in registers
    packed: Packed | None  # of tiles of queries
    n_tiles: int
    block_m: int
    workspaces: int
    workspace_rows: int  # of each head


def _allocate(call: AttentionCall, saved: Saved, grad_out: Tensor, wanted: Wanted, on: Steps) -> BackwardBuffers:
    """Align what the kernels read, and allocate what they write."""
    lse, v = saved.lse, aligned(call.v)
    far = (None if x is None else aligned(x) for x in (saved.q_past, saved.q_future, saved.k_far))
    saved = Saved(aligned(saved.q), aligned(saved.k), lse, *far)
    batch, heads, queries, head_dim = saved.q.shape
    keys = saved.k.shape[2]
    features = cut_features(head_dim, v.shape[3])
    is_wide = features.widest > 128
    block_m = BACKWARD_DK[features.widest].BLOCK_M if is_wide else BACKWARD[features.widest].BLOCK_M
    rotates = rotates_in_registers(call, head_dim, features) and (not is_wide or call.tables.q is None)
    # Far pairs' gradients share sums with near ones where the kernels can rebase their rotation.
    separate = gives_far_features(call) or not rotates
    far_grads = (
        empty_aligned(x) if x is not None and separate else None for x in (saved.q_past, saved.q_future, saved.k_far)
    )
    packed, n_tiles = schedule_tiles(call, "q", batch, queries, block_m, on)
    # Tiles are whole, and each sequence's rows begin with one.
    workspace_rows = n_tiles // batch * block_m if packed is None else n_tiles * block_m
    workspaces = sum(x is not None for x in (saved.q, saved.q_past, saved.q_future))
    n_rows = workspaces * batch * heads * workspace_rows
    score_mod = load_score_mod(call) if wanted.score_mod_params else None
    param_sums = None
    if score_mod is not None and not score_mod.is_factor and not is_wide:
        n_slots, numbers_per_slot = triton.cdiv(keys, BLOCK_N.value), 2 if score_mod.bias is None else 4
        if call.cu_seqlens_k is not None:
            n_slots = keys // BLOCK_N.value + call.cu_seqlens_k.shape[0]
        param_sums = torch.empty(batch * heads, n_slots, numbers_per_slot, dtype=torch.float32, device=lse.device)
    return BackwardBuffers(
        saved=saved,
        v=v,
        grad_out=grad_out,
        grads=Gradients(empty_aligned(saved.q), empty_aligned(saved.k), empty_aligned(v), None, None, *far_grads),
        delta=torch.empty_like(lse),
        dq_accum=torch.empty(n_rows * features.widest // LINE, LINE, dtype=torch.float32, device=lse.device),
        dq_order=torch.empty(n_rows // block_m, dtype=torch.int32, device=lse.device) if call.deterministic else None,
        param_sums=param_sums,
        features=features,
        rotates=rotates,
        packed=packed,
        n_tiles=n_tiles,
        block_m=block_m,
        workspaces=workspaces,
        workspace_rows=workspace_rows,
    )


def _launch_postprocess(
    call: AttentionCall,
    buffers: BackwardBuffers,
    scores: Scores,
    factor_grads: Tensor | None,
    n_programs: int,
    row_args: dict[str, Any],
    on: Steps,
) -> None:
    """Launch the kernel that stores dQ, for the gradient of q, and of far queries if separate."""
    features, grads, block_m = buffers.features, buffers.grads, buffers.block_m
    table, width = rope_table_args(call.tables.q if buffers.rotates else None)
    far = None if call.far is None or grads.k_far is not None else call.far.tables
    past_table = None if far is None else rope_table_args(far.q_past)[0]
    future_table = None if far is None else rope_table_args(far.q_future)[0]
    for workspace, grad in enumerate((grads.q, grads.q_past, grads.q_future)):
        if grad is not None:
            on.launch(
                bwd_postprocess_kernel,
                n_programs,
                q=None if factor_grads is None else tiled(buffers.saved.q, block_m, features.block_d),
                scores=None if factor_grads is None else scores,
                factor_grads_ptr=factor_grads,
                dq=store_target(grad, block_m, features.block_d, buffers.packed),
                table=table if workspace == 0 else None,
                past_table=past_table,
                future_table=future_table,
                grad_scale=call.scale * rescale(call.dropout_p),
                workspace=workspace,
                R=width,
                INTERLEAVED=call.tables.interleaved,
                **row_args,
                num_warps=8 if features.widest > 128 or future_table is not None else 4,
                launch_pdl=True,
            )


def with_lists_of_mask(call: AttentionCall, of: str, on: Steps) -> AttentionCall:
    """Return the call with the lists of "rows" or "columns" of its mask, which its loops walk, in the mask's place."""
    return call if call.mask is None else call._replace(mask=None, blocks=list_mask(call.mask, of, on))


def hopper_lists_args(call: AttentionCall, of: str, packed: Packed | None, on: Steps) -> Lists:
    """Return the lists of a call's "rows" or "columns", or those of each range of pairs by positions."""
    return list_ranges(call, of, packed, on) if goes_by_ranges(call) else lists_args(call, of)


def _launch_kernel(call: AttentionCall, buffers: BackwardBuffers, scores: Scores, on: Steps) -> None:
    """Launch the backward kernel, for the gradients of k, of far keys if separate, and of v."""
    block_d = buffers.features.block_d
    config = BACKWARD[block_d]
    rotation = call.tables.k if buffers.rotates else None
    table, width = rope_table_args(rotation)
    cos, sin = (
        None if x is None else describe(aligned(x[:, None]), config.BLOCK_M, block_d // 2)
        for x in rotation or (None, None)
    )
    far = None if call.far is None or not buffers.rotates else call.far.tables
    n_programs, arguments = _backward_args(call, buffers, scores, on)
    on.launch(
        backward_kernel,
        n_programs,
        dq_order_ptr=buffers.dq_order,
        lists=hopper_lists_args(call, "columns", arguments["packed"], on),
        param_sums_ptr=buffers.param_sums,
        cos=cos,
        sin=sin,
        table=None if buffers.saved.k_far is None else table,
        far_table=None if far is None else rope_table_args(far.k)[0],
        **arguments,
        R=width,
        INTERLEAVED=call.tables.interleaved,
        **config._asdict(),
        launch_pdl=True,  # keys and values are loaded beside the end of the kernel before
    )


def _launch_wide_kernels(call: AttentionCall, buffers: BackwardBuffers, scores: Scores, on: Steps) -> None:
    """Launch the backward kernels for head dims above 128, which rotate nothing."""
    features = buffers.features
    n_programs, arguments = _backward_args(call, buffers, scores, on)
    arguments["D_CHUNKS"] = features.d_chunks
    # With 192 features one kernel has registers for dK and dV, unless scores or a second range take more of them.
    if features.d_chunks == 1 or not has_plain_scores(call):
        no_dk_args = dict.fromkeys(("v", "dq_accum", "dk", "dk_far", "delta_ptr", "feature_weights_ptr"))
        on.launch(backward_wide_kernel, n_programs, **arguments | no_dk_args, **BACKWARD_DV._asdict())
        arguments["dv"] = None
    on.launch(backward_wide_kernel, n_programs, **arguments, **BACKWARD_DK[features.widest]._asdict())


def _bias_grad(
    call: AttentionCall, buffers: BackwardBuffers, params: Tensor, far_sums: Tensor, scores: Scores, on: Steps
) -> Tensor:
    """Return the gradient of the parameters of a bias by distance, given sums over far pairs."""
    score_mod, saved, features, packed = load_score_mod(call), buffers.saved, buffers.features, buffers.packed
    assert score_mod is not None
    (batch, heads, queries, _), (key_heads, keys) = saved.q.shape, saved.k.shape[1:3]
    # Of the backward kernel's warp groups: what is far to one kernel is so to the other.
    block_m, block_n = buffers.block_m, WG_ROWS.value
    rows = heads * (batch if packed is None else packed.n_sequences)
    diagonals = (2 * scores.largest + block_m + block_n) // block_n + 1
    splits = triton.next_power_of_2(triton.cdiv(gpu.num_sms(on.device_of(saved.q)), rows * diagonals))
    n_params = triton.next_power_of_2(call.n_learned_params)
    parts = torch.empty(rows * diagonals * splits, n_params, dtype=torch.float32, device=params.device)
    on.launch(
        bias_grad_kernel,
        parts.shape[0],
        q=tiled(saved.q, block_m, features.block_d),
        k=tiled(saved.k, block_n, features.block_d),
        v=tiled(buffers.v, block_n, features.block_dv),
        do=tiled(buffers.grad_out, block_m, features.block_dv),
        lse_ptr=saved.lse,
        delta_ptr=buffers.delta,
        far_sums_ptr=far_sums,
        parts_ptr=parts,
        params_ptr=params.contiguous(),
        params_stride=params.shape[-1],
        table_ptr=scores.params,
        table_stride=scores.params_stride,
        packed=packed,
        bounds=bounds_args(call),
        scale=1.0 if score_mod_of(call) is None else scores.scale,
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
        BLOCK_D=features.block_d,
        BLOCK_DV=features.block_dv,
        N_PARAMS=n_params,
        PARAM_GRAD=score_mod.param_grad,
        num_warps=8,
        num_stages=2,
    )
    return sum_param_grads(params, parts, rows // heads, heads, False, on)


def _backward_args(
    call: AttentionCall, buffers: BackwardBuffers, scores: Scores, on: Steps
) -> tuple[int, dict[str, Any]]:
    """Return the programs of a backward kernel, and the arguments that all of them take."""
    saved, features, grads, block_n = buffers.saved, buffers.features, buffers.grads, BLOCK_N.value
    (batch, heads, queries, _), (key_heads, keys) = saved.q.shape, saved.k.shape[1:3]
    score_mod, source, weights = score_mod_of(call), load_score_mod(call), call.tables.feature_weights
    packed, n_tiles = schedule_tiles(call, "k", batch, keys, block_n, on)
    schedule = Schedule(
        n_tiles=n_tiles // batch if packed is None else n_tiles,
        n_rows=batch * key_heads,
        n_heads=key_heads,
        heads_per_key=heads // key_heads,
        heads_per_l2_section=key_heads_per_l2_section(saved.q, heads // key_heads, keys, features.widest),
    )
    return n_tiles * key_heads, {
        **_describe_inputs(saved, buffers.v, buffers.block_m, block_n, features),
        "do": describe(buffers.grad_out, buffers.block_m, features.block_dv),
        "dq_accum": _describe_workspace(buffers.dq_accum, DQ_LINES[features.widest]),
        "dk": row_target(grads.k),
        "dk_far": None if grads.k_far is None else row_target(grads.k_far),
        "dv": row_target(grads.v),
        "dropout": dropout_args(call),
        "lse_ptr": saved.lse,
        "delta_ptr": buffers.delta,
        "feature_weights_ptr": None if weights is None else weights.contiguous(),
        "packed": packed,
        "bounds": bounds_args(call),
        "scores": scores,
        "grad_scale": call.scale * rescale(call.dropout_p),
        **window_args(call),
        "far_window": far_window_arg(call),
        **schedule._asdict(),
        "n_queries": queries,
        "n_keys": keys,
        "workspace_rows": buffers.workspace_rows,
        "STEP_ORDER": choose_step_order(call, on.device_of(saved.q), heads // key_heads, keys, features.widest),
        "CAUSAL": call.causal,
        "WINDOWED": windowed_arg(call),
        "HAS_PARTIAL_TILES": has_partial_tiles(call, block_n),
        "MOD": None if score_mod is None else score_mod.forward,
        "MOD_BWD": None if source is None else (score_mod or source).backward,
        "CAPPED": call.is_capped,
        "num_warps": 4,
    }


def score_mod_of(call: AttentionCall) -> ScoreMod | None:
    """Return the `ScoreMod` that kernels apply; None where they have another way, in the unit of products.

    That is a bias by distance, and slopes, unless positions are read too, and factors of heads. All take fewer
    instructions and registers of a thread; the scale, which must be above 0, waits for the exponents.
    """
    score_mod = load_score_mod(call)
    if score_mod is not None and score_mod.decays and call.goes_by_index:
        return score_mod._replace(forward=DECAY.value, backward=DECAY.value)
    if score_mod is None or not _takes_products(call):
        return score_mod
    by_index = call.goes_by_index and (score_mod.bias is not None or score_mod.is_slope)
    return None if by_index or (score_mod.is_factor and not score_mod.reads_positions) else score_mod


def _takes_products(call: AttentionCall) -> bool:
    """Say whether the scale may wait for the exponents, where a score mod allows it."""
    return call.scale > 0 and not call.is_capped


def hopper_scores_args(call: AttentionCall, packed: Packed | None, on: Steps) -> Scores:
    """Return `scores_args` as these kernels read them: with positions, a table of biases, slopes or factors."""
    score_mod, params, source = score_mod_of(call), call.score_mod_params, load_score_mod(call)
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
    """Return the fields of `Scores` for positions per token."""
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


def has_partial_tiles(call: AttentionCall, block_n: int) -> bool:
    """Say whether a tile of scores may have pairs that are not attended."""
    if call.causal or call.has_window or call.far is not None or call.cu_seqlens_q is not None:
        return True
    if call.blocks is not None and (call.blocks.slots is not None or call.blocks.spans is not None):
        return True
    return any(x is not None for x in bounds_args(call)) or call.k.shape[2] % block_n != 0


def _describe_inputs(saved: Saved, v: Tensor, block_m: int, block_n: int, features: Features) -> dict[str, Any]:
    """Return descriptors of q, k, v and the features of far pairs, for tiles of some queries and keys."""
    tensors = {
        "q": (saved.q, block_m, features.block_d),
        "k": (saved.k, block_n, features.block_d),
        "v": (v, block_n, features.block_dv),
        "q_far_past": (saved.q_past, block_m, features.block_d),
        "q_far_future": (saved.q_future, block_m, features.block_d),
        "k_far": (saved.k_far, block_n, features.block_d),
    }
    return {name: None if x is None else describe(x, rows, width) for name, (x, rows, width) in tensors.items()}


def describe(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Return a descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    shape = [1, 1, rows, block_d]
    return TensorDescriptor(x, list(x.shape), strides_of_tiles(x), shape, shared_layout(rows, block_d, x.dtype))


@functools.lru_cache
def shared_layout(rows: int, block_d: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    names = {
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
        torch.float32: gl.float32,
        torch.int8: gl.int8,
        torch.float8_e4m3fn: gl.float8e4nv,
    }
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], names[dtype])


def _describe_workspace(dq_accum: Tensor, lines: int) -> TensorDescriptor:
    """Return a descriptor of the workspaces of dQ, for tiles of some lines."""
    layout = gl.NVMMASharedLayout.get_default_for([lines, LINE], gl.float32)
    return TensorDescriptor(dq_accum, list(dq_accum.shape), list(dq_accum.stride()), [lines, LINE], layout)
