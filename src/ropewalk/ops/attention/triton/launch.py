"""Launchers of the Triton kernels of attention, forward and backward.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Gradients, Saved, Wanted
from ropewalk.ops.attention.call import MAX_PAGE_SIZE, AttentionCall, kv_capacity
from ropewalk.ops.attention.gate import kernel as gate_kernel
from ropewalk.ops.attention.pages import is_copied
from ropewalk.ops.attention.quantise.call import Quantized
from ropewalk.ops.attention.quantise.launch import quantise
from ropewalk.ops.attention.tables import empty_aligned, with_dense_features, with_rows
from ropewalk.ops.attention.triton import decode_launch
from ropewalk.ops.attention.triton.backward_dkdv import backward_dkdv_kernel
from ropewalk.ops.attention.triton.backward_dq import backward_dq_kernel
from ropewalk.ops.attention.triton.config import (
    FORWARD_FLOAT8,
    FORWARD_INT8,
    MIN_INT8,
    Features,
    Tiles,
    choose_tiles,
    cut_features,
)
from ropewalk.ops.attention.triton.forward import forward_kernel
from ropewalk.ops.attention.triton.gather import copy_pages
from ropewalk.ops.attention.triton.launch_common import (
    NO_FAR,
    add_first_logits_grad,
    aligned,
    begin_forward,
    call_args,
    first_logits,
    gate_args,
    gate_grads,
    gives_far_features,
    has_tma,
    inverse_rotate_all,
    launch_fitting,
    lists_args,
    load_score_mod,
    no_keys_grad,
    on_its_device,
    page_args,
    precision,
    rope_table_args,
    rotates_in_registers,
    row_target,
    schedule_tiles,
    store_target,
    sum_param_grads,
    tiled,
    units_args,
    windowed_arg,
)
from ropewalk.ops.attention.triton.score_mods import ScoreMod
from ropewalk.ops.launch.steps import AT_ONCE, Steps

# Launches of `backward_dkdv_kernel`: their tiles' name, and whether they compute dK and dV.
WHOLE_DKDV = (("backward_dkdv", True, True),)
SPLIT_DKDV = (("backward_dk", True, False), ("backward_dv", False, True))  # registers hold one accumulator alone


@on_its_device
def forward(call: AttentionCall, save: bool, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
    """Attend. Without `save`, the saved q and k are undefined."""
    if is_copied(call):
        call = copy_pages(call, on)
    if not save and decode_launch.supports(call):
        out, lse = decode_launch.forward(call, on)
        if call.gate is not None and out.numel():
            (gated,) = gate_kernel.forward(gate_kernel.GatedOutput(out, call.gate), on)
            assert gated is not None
            out = gated
        return out, Saved(call.q, call.k, lse)
    pages = call.block_table  # packed queries over a cache
    if pages is not None:
        k, v = map(with_dense_features, (call.k, call.v))
        call = call._replace(k=k, v=v)
    out, v, saved, is_empty = begin_forward(call, on, maps=save or call.precision is None)
    if is_empty:
        return out, saved
    operands = None if call.precision is None else quantise(call, on, permuted=False)
    q, k, lse = saved.q, saved.k, saved.lse
    batch, heads, queries, head_dim = q.shape
    score_mod = load_score_mod(call)
    features = cut_features(head_dim, v.shape[3], 16 if operands is None else MIN_INT8)
    page_size = None if pages is None else k.shape[2] if k.shape[2] <= MAX_PAGE_SIZE and pages.shape[1] > 1 else 0

    def launch(tiles: Tiles) -> None:
        packed, n_tiles = schedule_tiles(call, "q", batch, queries, tiles.block_m, on)
        if operands is None:
            described = _describe_inputs(saved, v, tiles.block_m, tiles.block_n, features, pages)
        else:
            described = _describe_operands(operands, v, tiles, features)
        described["out"] = store_target(out, tiles.block_m, features.block_dv, packed)
        describes = operands is not None and not has_tma()
        on.launch(
            forward_kernel,
            n_tiles * heads,
            **(_without_tma(described) if describes else described),
            units=units_args(operands),
            n_key_blocks=None if operands is None else operands.k.unit.shape[2],
            DESCRIBES=describes,
            lse_ptr=lse,
            row_logits_ptr=call.row_logits,
            packed=packed,
            lists=lists_args(call, "rows"),
            gate=gate_args(call.gate, v.shape[3]),
            first_logits_ptr=first_logits(call),
            **call_args(call, score_mod),
            n_heads=heads,
            heads_per_key=heads // k.shape[1],
            n_queries=queries,
            n_keys=kv_capacity(call),
            PAGE_SIZE=page_size,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            HIDES_KEYS=score_mod is not None and score_mod.hides_keys,
            **_constants(call, score_mod, features, q),
            **tiles.options,
        )

    kernel = "forward"
    if operands is not None:
        kernel = FORWARD_INT8 if operands.v is None else FORWARD_FLOAT8
    launch_fitting(choose_tiles(kernel, features, q.dtype, score_mod, call), launch, on)
    return out, saved


def _describe_inputs(
    saved: Saved, v: Tensor, rows_q: int, rows_k: int, features: Features, pages: Tensor | None = None
) -> dict[str, Any]:
    """Return descriptors of q, k, v and the features of far pairs, for tiles of some queries and keys.

    Keys and values in pages of a block table have no descriptors.
    """
    q_block, k_block = (rows_q, features.block_d), (rows_k, features.block_d)
    return {
        "q": tiled(saved.q, *q_block),
        "k": tiled(saved.k, *k_block) if pages is None else page_args(saved.k, pages),
        "v": tiled(v, rows_k, features.block_dv) if pages is None else page_args(v, pages),
        "q_far_past": None if saved.q_past is None else tiled(saved.q_past, *q_block),
        "q_far_future": None if saved.q_future is None else tiled(saved.q_future, *q_block),
        "k_far": None if saved.k_far is None else tiled(saved.k_far, *k_block),
    }


def _describe_operands(operands: Quantized, v: Tensor, tiles: Tiles, features: Features) -> dict[str, Any]:
    """Return descriptors as `_describe_inputs` does, of operands of 8 bits; v where values are of 16."""
    q, k, quantised_v, *far = operands
    x = Saved(q.x, k.x, q.unit, *(None if each is None else each.x for each in far))
    inputs = _describe_inputs(x, v, tiles.block_m, tiles.block_n, features)
    if quantised_v is not None:
        inputs["v"] = tiled(quantised_v.x, features.block_dv, tiles.block_n)
    return inputs


def _without_tma(described: dict[str, Any]) -> dict[str, Any]:
    """Return rows in place of descriptors; None and rows stay as they are."""
    return {name: row_target(x.base) if isinstance(x, TensorDescriptor) else x for name, x in described.items()}


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
    """Compute the gradients of q, k and v, and the wanted ones.

    grad_lse (B, H, Tq) is the gradient of the natural log-sum-exp. Far pairs have gradients of their own only if the
    forward got their features.
    """
    call = with_rows(call)
    lse, has_far_features = saved.lse, gives_far_features(call)
    saved = Saved(aligned(saved.q), aligned(saved.k), lse, *(None if x is None else aligned(x) for x in saved[3:]))
    v, out, grad_out = aligned(call.v), aligned(out), aligned(grad_out)
    q, k = saved.q, saved.k
    grad_q, grad_k, grad_v = empty_aligned(q), empty_aligned(k), empty_aligned(v)
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    if lse.numel() == 0 or keys == 0:
        grad_params = None if call.score_mod_params is None else torch.zeros_like(call.score_mod_params)
        grad_logits = no_keys_grad(call, grad_lse)
        far = (None if x is None or not has_far_features else torch.zeros_like(x) for x in saved[3:])
        grad_gate = torch.zeros_like(call.gate) if wanted.gate and call.gate is not None else None
        grads = Gradients(grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), grad_params, grad_logits, *far)
        return grads._replace(gate=grad_gate)
    score_mod = load_score_mod(call)
    features = cut_features(head_dim, v.shape[3])
    rotates = rotates_in_registers(call, head_dim, features)
    # Far pairs' gradients share sums with near ones where the kernels can rebase their rotation.
    separate_far_grads = has_far_features or not rotates
    far_grads = [None if x is None or not separate_far_grads else empty_aligned(x) for x in saved[3:]]
    shared: dict[str, Any] = {
        "SEPARATE_FAR": separate_far_grads,
        **call_args(call, score_mod),
        **_constants(call, score_mod, features, q),
        "MOD_BWD": None if score_mod is None else score_mod.backward,
        "INTERLEAVED": call.tables.interleaved,
        "grad_factor": call.scale,
        "heads_per_key": heads // key_heads,
        "n_queries": queries,
        "n_keys": keys,
    }
    delta = torch.empty_like(lse)

    do_ungated, grad_gate = gate_grads(call, grad_out, wanted)

    def launch_dq(tiles: Tiles) -> Tensor | None:
        packed, n_tiles = schedule_tiles(call, "q", batch, queries, tiles.block_m, on)
        n_params, param_grads, param_grad_fn = 1, None, None
        if wanted.score_mod_params and score_mod is not None and call.score_mod_params is not None:
            n_params = triton.next_power_of_2(call.n_learned_params or call.score_mod_params.shape[-1])
            param_grads = torch.empty(n_tiles * heads, n_params, dtype=torch.float32, device=q.device)
            param_grad_fn = score_mod.param_grad
        dq, dq_far_past, dq_far_future = (
            None if x is None else store_target(x, tiles.block_m, features.block_d, packed)
            for x in (grad_q, *far_grads[:2])
        )
        on.launch(
            backward_dq_kernel,
            n_tiles * heads,
            **_describe_inputs(saved, v, tiles.block_m, tiles.block_n, features),
            out=tiled(out, tiles.block_m, features.block_dv),
            do=tiled(grad_out, tiles.block_m, features.block_dv),
            dq=dq,
            dq_far_past=dq_far_past,
            dq_far_future=dq_far_future,
            lse_ptr=lse,
            grad_lse_ptr=None if grad_lse is None else grad_lse.contiguous(),
            delta_ptr=delta,
            gate=gate_args(call.gate, v.shape[3]),
            grad_gate=gate_args(grad_gate, v.shape[3]),
            do_ungated=None
            if do_ungated is None
            else store_target(do_ungated, tiles.block_m, features.block_dv, packed),
            param_grad_ptr=param_grads,
            **_tables_of_q(call, rotates, separate_far_grads),
            packed=packed,
            lists=lists_args(call, "rows"),
            n_heads=heads,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            N_PARAMS=n_params,
            PARAM_GRAD=param_grad_fn,
            **shared,
            **tiles.options,
        )
        return param_grads

    param_grads = launch_fitting(choose_tiles("backward_dq", features, q.dtype, score_mod, call), launch_dq, on)
    if do_ungated is not None:
        grad_out = do_ungated
    weights = call.tables.feature_weights

    def launch_dkdv(tiles: Tiles, has_dk: bool, has_dv: bool) -> None:
        packed, n_tiles = schedule_tiles(call, "k", batch, keys, tiles.block_n, on)
        dk, dk_far = (
            store_target(x, tiles.block_n, features.block_d, packed) if has_dk and x is not None else None
            for x in (grad_k, far_grads[2])
        )
        on.launch(
            backward_dkdv_kernel,
            n_tiles * key_heads,
            **_describe_inputs(saved, v, tiles.block_m, tiles.block_n, features),
            do=tiled(grad_out, tiles.block_m, features.block_dv),
            dk=dk,
            dk_far=dk_far,
            dv=store_target(grad_v, tiles.block_n, features.block_dv, packed) if has_dv else None,
            lse_ptr=lse,
            delta_ptr=delta,
            **_tables_of_k(call, rotates, separate_far_grads),
            weights_ptr=None if weights is None else weights.contiguous(),
            packed=packed,
            lists=lists_args(call, "columns"),
            n_kv_heads=key_heads,
            D=head_dim,
            HAS_DK=has_dk,
            HAS_DV=has_dv,
            HIDES_KEYS=score_mod is not None and score_mod.hides_keys,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            **shared,
            **tiles.options,
        )

    for kernel, has_dk, has_dv in SPLIT_DKDV if features.is_wide else WHOLE_DKDV:
        tiles = choose_tiles(kernel, features, q.dtype, score_mod, call)
        launch_fitting(tiles, functools.partial(launch_dkdv, has_dk=has_dk, has_dv=has_dv), on, inner="block_m")
    if not rotates:
        grad_q, grad_k = inverse_rotate_all(grad_q, grad_k, far_grads, call, on)

    grad_params = None
    if param_grads is not None and call.score_mod_params is not None:
        grad_params = sum_param_grads(
            call.score_mod_params, param_grads, batch, heads, call.cu_seqlens_q is not None, on
        )
    grads = Gradients(grad_q, grad_k, grad_v, grad_params, None, *(far_grads if has_far_features else NO_FAR))
    grads = grads._replace(gate=grad_gate)
    return add_first_logits_grad(grads, call, lse, delta, wanted, on)


def _tables_of_q(call: AttentionCall, rotates: bool, separate_far_grads: bool) -> dict[str, Any]:
    """Return the tables that dQ is rotated back by, as arguments of its kernel."""
    table, width = rope_table_args(call.tables.q if rotates else None)
    far = None if call.far is None or separate_far_grads else call.far.tables
    return {
        "table": table,
        "table_far_past": None if far is None else rope_table_args(far.q_past)[0],
        "table_far_future": None if far is None else rope_table_args(far.q_future)[0],
        "R": width,
    }


def _tables_of_k(call: AttentionCall, rotates: bool, separate_far_grads: bool) -> dict[str, Any]:
    """Return the tables that dK is rotated back by, as arguments of its kernel."""
    table, width = rope_table_args(call.tables.k if rotates else None)
    far = None if call.far is None or separate_far_grads else call.far.tables
    return {"table": table, "table_far": None if far is None else rope_table_args(far.k)[0], "R": width}


def _constants(call: AttentionCall, score_mod: ScoreMod | None, features: Features, q: Tensor) -> dict[str, Any]:
    """Return the constants that a kernel is compiled for."""
    return {
        "BLOCK_D": features.block_d,
        "D_CHUNKS": features.d_chunks,
        "BLOCK_DV": features.block_dv,
        "LIST_Q": None if call.blocks is None else call.blocks.block_q,
        "LIST_K": None if call.blocks is None else call.blocks.block_k,
        # A second loop would keep addresses of operands in registers, and spill up to 1.5 KB; a mask costs next to
        # nothing beside such products.
        "ONE_LOOP": features.is_wide,
        "CAUSAL": call.causal,
        "WINDOWED": windowed_arg(call),
        "MOD": None if score_mod is None else score_mod.forward,
        "CAPPED": call.is_capped,
        "FAST_TANH": q.dtype.itemsize == 2 and not (gpu.is_interpreted() or gpu.is_rocm()),
        "PRECISION": precision(),
    }
