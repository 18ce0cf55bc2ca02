"""Launching the backward of attention for Hopper: a pass over the rows of queries, the kernel, and a second pass.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk.ops.attention import triton_launch
from ropewalk.ops.attention.gluon_hopper_backward import backward_kernel
from ropewalk.ops.attention.gluon_hopper_tiles import KEYS, PART
from ropewalk.ops.attention.gluon_launch import CACHED_BYTES, CONDITIONS, block_of_features, described, rows_of
from ropewalk.ops.attention.gluon_passes import finish_kernel, rows_kernel
from ropewalk.ops.attention.prepare import Prepared, empty_aligned
from ropewalk.ops.attention.triton_arguments import place_table, score_functions
from ropewalk.ops.attention.triton_configuration import Features
from ropewalk.ops.attention.triton_launch import (
    NOTHING_FAR,
    NOTHING_LEARNED,
    Gradients,
    Learned,
    Saved,
    aligned,
    conditions_of,
    gradient_of_sinks,
    on_its_device,
    place,
    schedule_tiles,
    tiled,
    turn_back_all,
    turns_in_registers,
)
from ropewalk.ops.attention.triton_scores import ScoreFunctions

_LINE = 32  # elements: as many as a swizzled row of shared memory has
_PROGRAMS_TOGETHER = 128  # nearly one for each processor of an H100 or H200


class Configuration(NamedTuple):
    """What the backward kernel is compiled for, beside what the call asks."""

    QUERIES: int
    APART: bool
    STAGES: int
    CONSUMER_REGISTERS: int
    OTHER_REGISTERS: int


# By the block of features. docs/log.md has what else was measured.
BACKWARD = {64: Configuration(128, True, 2, 240, 24), 128: Configuration(64, False, 2, 240, 24)}


@on_its_device
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    v: Tensor,
    out: Tensor,
    saved: Saved,
    prepared: Prepared,
    learned: Learned = NOTHING_LEARNED,
) -> Gradients:
    """The gradients, as `triton_launch.backward` has them, which has the same arguments and results.

    That of q is a sum in float32 in an order that differs from run to run. What a scheme learns for its scores has no
    gradient here: the Triton kernels take such calls, as they take what the Gluon forward leaves.
    """
    lse = saved.lse
    if learned.parameters or lse.numel() == 0 or saved.k.shape[2] == 0:
        return triton_launch.backward(grad_out, grad_lse, v, out, saved, prepared, learned)
    given = prepared.far_window is not None and prepared.cos_past is None
    saved = Saved(aligned(saved.q), aligned(saved.k), lse, *(None if x is None else aligned(x) for x in saved[3:]))
    v, out, grad_out = (aligned(x) for x in (v, out, grad_out))
    q, k = saved.q, saved.k
    batch, heads, queries, head_dim = q.shape
    block = block_of_features(head_dim, v.shape[3])
    rows = BACKWARD[block].QUERIES
    turns = turns_in_registers(prepared, head_dim, Features(block, 1, block))
    # Far pairs' gradients share sums with near ones where the kernels can turn what they have from one to the other.
    apart = given or not turns
    grad_q, grad_k, grad_v = empty_aligned(q), empty_aligned(k), empty_aligned(v)
    grads_of_far = [None if x is None or not apart else empty_aligned(x) for x in saved[3:]]

    sequences, n_tiles = schedule_tiles(prepared, "q", batch, queries, rows)
    # Tiles are whole, and each sequence's rows begin with one.
    places = n_tiles // batch * rows if sequences is None else n_tiles * rows
    workspaces = sum(x is not None for x in (q, saved.past, saved.future))
    n_elements = batch * heads * places * block
    sums = torch.empty(workspaces * n_elements // _LINE, _LINE, dtype=torch.float32, device=q.device)
    delta = torch.empty_like(lse)
    functions = score_functions(prepared)
    conditions = conditions_of(prepared, functions)
    of_rows: dict[str, Any] = {
        "sequences": sequences, "bounds": conditions["bounds"], "n_heads": heads, "n_queries": queries,
        "n_keys": k.shape[2], "rows_of_head": places, "n_elements": n_elements, "BLOCK_M": rows, "BLOCK_D": block,
    }  # fmt: skip
    rows_kernel[(n_tiles * heads,)](
        tiled(out, rows, block), tiled(grad_out, rows, block), lse,
        None if grad_lse is None else grad_lse.contiguous(), delta, sums, **of_rows, WORKSPACES=workspaces,
    )  # fmt: skip
    gradients = (grad_k, grads_of_far[2], grad_v)
    _launch_kernel(saved, v, grad_out, sums, gradients, delta, prepared, functions, conditions, turns, places)
    table, width = place_table(prepared.cos_q, prepared.sin_q) if turns else (None, 0)
    past_table, future_table = (
        None if apart else place_table(cos, sin)[0]
        for cos, sin in ((prepared.cos_past, prepared.sin_past), (prepared.cos_future, prepared.sin_future))
    )
    for workspace, grad in enumerate((grad_q, *grads_of_far[:2])):
        if grad is not None:
            finish_kernel[(n_tiles * heads,)](
                sums, place(grad, rows, block, sequences), table if workspace == 0 else None, past_table,
                future_table, grad_factor=prepared.scale, workspace=workspace, R=width,
                INTERLEAVED=prepared.interleaved, **of_rows, num_warps=4 if future_table is None else 8,
            )  # fmt: skip
    if not turns:
        grad_q, grad_k = turn_back_all(grad_q, grad_k, grads_of_far, prepared)
    grad_sinks = None
    if learned.sinks and prepared.sinks is not None:
        grad_sinks = gradient_of_sinks(prepared.sinks, lse, delta)
    return Gradients(grad_q, grad_k, grad_v, None, grad_sinks, *(grads_of_far if given else NOTHING_FAR))


def _launch_kernel(
    saved: Saved, v: Tensor, grad_out: Tensor, sums: Tensor, gradients: tuple[Tensor | None, ...], delta: Tensor,
    prepared: Prepared, functions: ScoreFunctions | None, conditions: dict[str, Any], turns: bool, places: int,
) -> None:  # fmt: skip
    """Launch the kernel, for the gradients of k, of far keys apart from those, and of v.

    It turns back those of k if `turns`; `places` is how many rows a workspace has of each head.
    """
    q, k, lse, past, future, far_keys = saved
    (batch, heads, queries, head_dim), (key_heads, keys) = q.shape, k.shape[1:3]
    block = block_of_features(head_dim, v.shape[3])
    configuration = BACKWARD[block]
    rows, part = configuration.QUERIES, PART.value**2 // _LINE
    layout = gl.NVMMASharedLayout.get_default_for([part, _LINE], gl.float32)
    angles = (prepared.cos_k, prepared.sin_k) if turns else (None, None)
    table, width = place_table(*angles)
    far_table = place_table(prepared.cos_far, prepared.sin_far)[0] if turns else None
    sequences, n_tiles = schedule_tiles(prepared, "k", batch, keys, KEYS.value)
    whole = not prepared.causal and prepared.window is None and past is None and sequences is None
    whole = whole and not any(x is not None for x in conditions["bounds"]) and keys % KEYS.value == 0
    backward_kernel[(n_tiles * key_heads,)](
        described(q, rows, block), described(k, KEYS.value, block), described(v, KEYS.value, block),
        *(None if x is None else described(x, rows, block) for x in (past, future)),
        None if far_keys is None else described(far_keys, KEYS.value, block), described(grad_out, rows, block),
        TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [part, _LINE], layout),
        *(None if x is None else rows_of(x) for x in gradients), lse, delta,
        None if prepared.weights is None else prepared.weights.contiguous(),
        *(None if x is None else described(aligned(x[:, None]), rows, block // 2) for x in angles),
        None if far_keys is None else table, far_table, sequences=sequences,
        **{name: conditions[name] for name in CONDITIONS}, grad_factor=prepared.scale,
        n_tiles=n_tiles if sequences is not None else n_tiles // batch, n_rows=batch * key_heads,
        n_key_heads=key_heads, heads_per_key=heads // key_heads,
        heads_together=_heads_together(q, heads // key_heads, keys, block), n_queries=queries, n_keys=keys,
        rows_of_head=places, R=width, INTERLEAVED=prepared.interleaved, CAUSAL=prepared.causal,
        WINDOWED=prepared.window is not None, EDGES=not whole,
        SCORE=None if functions is None else functions.score, ADJOINT=None if functions is None else functions.adjoint,
        SOFTCAP=prepared.softcap is not None, **configuration._asdict(), num_warps=4,
    )  # fmt: skip


def _heads_together(q: Tensor, heads_per_key: int, keys: int, block: int) -> int:
    """How many key heads are taken at a time: those whose queries, and what is read and added beside, stay cached.

    But at least as many as have a program for each processor: in causal attention programs differ in length, and with
    fewer heads the last ones' longest would begin late, and leave most processors without work at the end.
    """
    bytes_of_head = heads_per_key * q.shape[2] * block * (2 * q.element_size() + 4)
    tiles: int = math.ceil(keys / KEYS.value)
    return max(CACHED_BYTES // bytes_of_head, math.ceil(_PROGRAMS_TOGETHER / tiles))
