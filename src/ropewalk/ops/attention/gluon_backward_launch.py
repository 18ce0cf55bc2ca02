"""Launching the backward of attention for Hopper: a pass over the rows of queries, the kernel, and a second pass.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk.ops.attention import triton_launch
from ropewalk.ops.attention.gluon_hopper_backward import backward_kernel
from ropewalk.ops.attention.gluon_hopper_tiles import KEYS, PART
from ropewalk.ops.attention.gluon_launch import CACHED_BYTES, block_of_features, described, rows_of
from ropewalk.ops.attention.gluon_passes import finish_kernel, rows_kernel
from ropewalk.ops.attention.prepare import Prepared, empty_aligned
from ropewalk.ops.attention.triton_arguments import place_table, score_functions
from ropewalk.ops.attention.triton_configuration import Features
from ropewalk.ops.attention.triton_launch import (
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
    turn_back,
    turns_in_registers,
)

_LINE = 32  # elements: as many as a swizzled row of shared memory has


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

    That of q is a sum in float32 in an order that differs from run to run. What a scheme learns for its scores, and far
    pairs, have no gradient here: the Triton kernels take such calls, as they take what the Gluon forward leaves.
    """
    lse = saved.lse
    if learned.parameters or saved.far_keys is not None or lse.numel() == 0 or saved.k.shape[2] == 0:
        return triton_launch.backward(grad_out, grad_lse, v, out, saved, prepared, learned)
    q, k, v, out, grad_out = (aligned(x) for x in (saved.q, saved.k, v, out, grad_out))
    grad_q, grad_k, grad_v = empty_aligned(q), empty_aligned(k), empty_aligned(v)
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    block = block_of_features(head_dim, v.shape[3])
    rows = BACKWARD[block].QUERIES
    functions = score_functions(prepared)
    conditions = conditions_of(prepared, functions)
    turns = turns_in_registers(prepared, head_dim, Features(block, 1, block))
    table_q, width_q = place_table(prepared.cos_q, prepared.sin_q) if turns else (None, 0)
    table_k, width_k = place_table(prepared.cos_k, prepared.sin_k) if turns else (None, 0)

    sequences, n_tiles = schedule_tiles(prepared, "q", batch, queries, rows)
    # Tiles are whole, and each sequence's rows begin with one.
    places = n_tiles // batch * rows if sequences is None else n_tiles * rows
    sums = torch.empty(batch * heads * places * block // _LINE, _LINE, dtype=torch.float32, device=q.device)
    delta = torch.empty_like(lse)
    of_rows: dict[str, Any] = {
        "sequences": sequences, "bounds": conditions["bounds"], "n_heads": heads, "n_queries": queries, "n_keys": keys,
        "rows_of_head": places, "BLOCK_M": rows, "BLOCK_D": block,
    }  # fmt: skip
    rows_kernel[(n_tiles * heads,)](
        tiled(out, rows, block), tiled(grad_out, rows, block), lse,
        None if grad_lse is None else grad_lse.contiguous(), delta, sums, **of_rows,
    )  # fmt: skip
    _launch_kernel(
        (q, k, v, grad_out), sums, (grad_k, grad_v), lse, delta, (table_k, width_k), prepared, places, conditions
    )  # fmt: skip
    finish_kernel[(n_tiles * heads,)](
        sums, place(grad_q, rows, block, sequences), table_q, grad_factor=prepared.scale, R=width_q,
        INTERLEAVED=prepared.interleaved, **of_rows,
    )  # fmt: skip
    if not turns:
        grad_q = turn_back(grad_q, prepared.cos_q, prepared.sin_q, prepared)
        grad_k = turn_back(grad_k, prepared.cos_k, prepared.sin_k, prepared)
    grad_sinks = None
    if learned.sinks and prepared.sinks is not None:
        grad_sinks = gradient_of_sinks(prepared.sinks, lse, delta)
    return Gradients(grad_q, grad_k, grad_v, None, grad_sinks)


def _launch_kernel(
    tensors: tuple[Tensor, ...], sums: Tensor, gradients: tuple[Tensor, ...], lse: Tensor, delta: Tensor,
    turned: tuple[Any, int], prepared: Prepared, places: int, conditions: dict[str, Any],
) -> None:  # fmt: skip
    """Launch the kernel on q, k, v and grad_out, for the gradients of k and v.

    `turned` is k's table and its width; `places` is how many rows the workspace has of each head.
    """
    q, k, v, grad_out = tensors
    (batch, heads, queries, head_dim), (key_heads, keys) = q.shape, k.shape[1:3]
    block = block_of_features(head_dim, v.shape[3])
    configuration = BACKWARD[block]
    rows, part = configuration.QUERIES, PART.value**2 // _LINE
    layout = gl.NVMMASharedLayout.get_default_for([part, _LINE], gl.float32)
    functions = score_functions(prepared)
    sequences, n_tiles = schedule_tiles(prepared, "k", batch, keys, KEYS.value)
    cut = prepared.causal or prepared.window is not None or sequences is not None or keys % KEYS.value != 0
    backward_kernel[(n_tiles * key_heads,)](
        described(q, rows, block), described(k, KEYS.value, block), described(v, KEYS.value, block),
        described(grad_out, rows, block),
        TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [part, _LINE], layout),
        *(rows_of(x) for x in gradients), lse, delta,
        None if prepared.weights is None else prepared.weights.contiguous(), turned[0], sequences=sequences,
        **{name: conditions[name] for name in ("bounds", "parameters", "scale", "softcap", "factor", "window")},
        grad_factor=prepared.scale, n_tiles=n_tiles if sequences is not None else n_tiles // batch,
        n_rows=batch * key_heads, n_key_heads=key_heads, heads_per_key=heads // key_heads,
        heads_together=_heads_together(q, heads // key_heads, block), n_queries=queries, n_keys=keys,
        rows_of_head=places, R=turned[1], INTERLEAVED=prepared.interleaved, CAUSAL=prepared.causal,
        WINDOWED=prepared.window is not None,
        EDGES=cut or any(x is not None for x in conditions["bounds"]),
        SCORE=None if functions is None else functions.score, ADJOINT=None if functions is None else functions.adjoint,
        SOFTCAP=prepared.softcap is not None, **configuration._asdict(), num_warps=4,
    )  # fmt: skip


def _heads_together(q: Tensor, heads_per_key: int, block: int) -> int:
    """How many key heads are taken at a time: those whose queries, and what is read and added beside, stay cached."""
    bytes_of_head = heads_per_key * q.shape[2] * block * (2 * q.element_size() + 4)
    return max(1, CACHED_BYTES // bytes_of_head)
