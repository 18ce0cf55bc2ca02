"""Launching the Triton kernels of attention: which tiles, which tables, which strides.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ropewalk.ops.attention import triton_cache_launch
from ropewalk.ops.attention.philox import dropped_steps, rescale
from ropewalk.ops.attention.prepare import FarFeatures, Prepared, empty_aligned, map_far_features, map_features
from ropewalk.ops.attention.triton_arguments import LOG2_E, broadcast_strides, place_table, score_functions
from ropewalk.ops.attention.triton_backward_keys import keys_kernel
from ropewalk.ops.attention.triton_backward_queries import queries_kernel
from ropewalk.ops.attention.triton_configuration import (
    Features,
    choose_tiles,
    cut_features,
    interpreted,
    is_of_keys,
    on_amd,
)
from ropewalk.ops.attention.triton_forward import forward_kernel
from ropewalk.ops.attention.triton_scores import ScoreFunctions
from ropewalk.ops.attention.triton_sequences import schedule_kernel
from ropewalk.ops.rope.api import apply_rope

Launch = TypeVar("Launch", bound=Callable[..., Any])


class Saved(NamedTuple):
    """What the forward leaves for the backward, beside v and the output."""

    q: Tensor  # its features mapped
    k: Tensor  # likewise
    lse: Tensor  # (B, H, Tq), base 2
    past: Tensor | None = None  # `FarFeatures`, where there are some
    future: Tensor | None = None
    far_keys: Tensor | None = None


def on_its_device(launch: Launch) -> Launch:
    """Let a function's launches go to the device of its first argument."""

    @functools.wraps(launch)
    def launch_there(x: Tensor, *rest: Any) -> Any:
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return launch(x, *rest)
        with torch.cuda.device(x.device):
            return launch(x, *rest)

    return cast(Launch, launch_there)


class Gradients(NamedTuple):
    """What the backward returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Tensor | None  # (H, anything), like the parameters
    sinks: Tensor | None  # (H,)
    past: Tensor | None = None  # of `FarFeatures` that the forward was given
    future: Tensor | None = None
    far_keys: Tensor | None = None


class Learned(NamedTuple):
    """Of which tensors beside q, k and v the backward computes gradients."""

    parameters: bool = False
    sinks: bool = False


NOTHING_LEARNED = Learned()


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, keep: bool = True, far: FarFeatures | None = None
) -> tuple[Tensor, Saved]:
    """Attend: q (B, H, Tq, D), k (B, K, Tk, D) and v (B, K, Tk, Dv), of any strides; the output is (B, H, Tq, Dv).

    A packed batch is one row of all sequences' tokens; k and v may be pages, (pages, K, page_size, D or Dv). Unless it
    must `keep` them, for a backward, what is saved of q and k is of no account. What pairs that are far apart meet with
    is given as `far`, or else made by the scheme.
    """
    if not keep and triton_cache_launch.serves(q, k, v, prepared):
        out, lse = triton_cache_launch.forward(q, k, v, prepared)
        return out, Saved(q, k, lse)
    out, v, saved, is_empty = begin_forward(q, k, v, prepared, far)
    if is_empty:
        return out, saved
    q, k, lse = saved.q, saved.k, saved.lse
    batch, heads, queries, head_dim = q.shape
    functions = score_functions(prepared)
    features = cut_features(head_dim, v.shape[3])
    tiles = choose_tiles("forward", features, q.dtype, functions, prepared)
    sequences, n_tiles = schedule_tiles(prepared, "q", batch, queries, tiles.block_m)
    forward_kernel[(n_tiles * heads,)](
        *_tiled_all(saved, v, tiles.block_m, tiles.block_n, features),
        place(out, tiles.block_m, features.block_v, sequences), lse,
        sequences=sequences, sinks_ptr=None if prepared.sinks is None else prepared.sinks.contiguous(),
        **conditions_of(prepared, functions), n_heads=heads, heads_per_key=heads // k.shape[1], n_queries=queries,
        n_keys=k.shape[2], BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, **_constants(prepared, functions, features, q),
        **tiles.options,
    )  # fmt: skip
    return out, saved


NOTHING_FAR = (None, None, None)


def begin_forward(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, far: FarFeatures | None
) -> tuple[Tensor, Tensor, Saved, bool]:
    """What comes before the kernel: memory for the output, v, what is saved, and whether nothing is left to do."""
    out = empty_output(q, v.shape[3])
    far = map_far_features(q, k, prepared) if far is None else far
    q, k = (aligned(x) for x in map_features(q, k, prepared))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    saved = Saved(q, k, lse, *(None if x is None else aligned(x) for x in far or NOTHING_FAR))
    if lse.numel() and k.shape[2]:
        return out, aligned(v), saved, False
    if lse.numel():
        lse.fill_(-math.inf) if prepared.sinks is None else lse.copy_(prepared.sinks[:, None] * LOG2_E)
        out.zero_()
    return out, v, saved, True


def _tiled_all(saved: Saved, v: Tensor, rows_q: int, rows_k: int, features: Features) -> tuple[Any, ...]:
    """Descriptors of q, k, v and what far pairs meet with, for tiles of some queries and keys."""
    past, future, far_keys = saved[3:]
    of_queries, of_keys = (rows_q, features.block_d), (rows_k, features.block_d)
    return (
        tiled(saved.q, *of_queries),
        tiled(saved.k, *of_keys),
        tiled(v, rows_k, features.block_v),
        None if past is None else tiled(past, *of_queries),
        None if future is None else tiled(future, *of_queries),
        None if far_keys is None else tiled(far_keys, *of_keys),
    )


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
    """The gradients of q, k and v, and what else is learned; grad_lse (B, H, Tq) is that of the natural log-sum-exp.

    Those of what far pairs meet with are apart only if it was given to the forward: the scheme's have no tables then.
    """
    lse = saved.lse
    given = prepared.far_window is not None and prepared.cos_past is None
    saved = Saved(aligned(saved.q), aligned(saved.k), lse, *(None if x is None else aligned(x) for x in saved[3:]))
    v, out, grad_out = aligned(v), aligned(out), aligned(grad_out)
    q, k = saved.q, saved.k
    grad_q, grad_k, grad_v = empty_aligned(q), empty_aligned(k), empty_aligned(v)
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    if lse.numel() == 0 or keys == 0:
        grad_parameters = torch.zeros_like(prepared.parameters) if prepared.parameters is not None else None
        grad_sinks = torch.zeros_like(prepared.sinks) if prepared.sinks is not None else None
        if grad_sinks is not None and grad_lse is not None:
            grad_sinks = grad_sinks + grad_lse.sum((0, 2))
        far = (None if x is None or not given else torch.zeros_like(x) for x in saved[3:])
        return Gradients(grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), grad_parameters, grad_sinks, *far)
    functions = score_functions(prepared)
    features = cut_features(head_dim, v.shape[3])
    block_d, _, block_v = features
    conditions = conditions_of(prepared, functions)
    constants = _constants(prepared, functions, features, q)
    constants["ADJOINT"] = None if functions is None else functions.adjoint
    constants["INTERLEAVED"] = prepared.interleaved
    constants["grad_factor"] = prepared.scale

    turns = turns_in_registers(prepared, head_dim, features)
    table_q, width_q = place_table(prepared.cos_q, prepared.sin_q) if turns else (None, 0)
    table_k, width_k = place_table(prepared.cos_k, prepared.sin_k) if turns else (None, 0)
    # Far pairs' gradients share sums with near ones where the kernels can turn what they have from one to the other.
    apart = given or not turns
    tables_of_far = [
        None if apart else place_table(cos, sin)[0]
        for cos, sin in (
            (prepared.cos_past, prepared.sin_past),
            (prepared.cos_future, prepared.sin_future),
            (prepared.cos_far, prepared.sin_far),
        )
    ]
    grads_of_far = [None if x is None or not apart else empty_aligned(x) for x in saved[3:]]
    weights = None if prepared.weights is None else prepared.weights.contiguous()
    delta = torch.empty_like(lse)
    tiles = choose_tiles("queries", features, q.dtype, functions, prepared)
    rows_q, rows_k = tiles.block_m, tiles.block_n
    sequences, n_tiles = schedule_tiles(prepared, "q", batch, queries, rows_q)
    n_learned, sums = 1, None
    if learned.parameters and functions is not None and prepared.parameters is not None:
        n_learned = triton.next_power_of_2(prepared.learned or prepared.parameters.shape[1])
        sums = torch.empty(n_tiles * heads, n_learned, dtype=torch.float32, device=q.device)
    queries_kernel[(n_tiles * heads,)](
        *_tiled_all(saved, v, rows_q, rows_k, features), tiled(out, rows_q, block_v),
        tiled(grad_out, rows_q, block_v),
        *(None if x is None else place(x, rows_q, block_d, sequences) for x in (grad_q, *grads_of_far[:2])),
        lse, None if grad_lse is None else grad_lse.contiguous(), delta, sums, table_q, *tables_of_far[:2],
        sequences=sequences, **conditions, n_heads=heads, heads_per_key=heads // key_heads, n_queries=queries,
        n_keys=keys, BLOCK_M=rows_q, BLOCK_N=rows_k, R=width_q, LEARNED=n_learned,
        LEARN=None if sums is None or functions is None else functions.parameter_gradient, **constants, **tiles.options,
    )  # fmt: skip

    tiles = choose_tiles("keys", features, q.dtype, functions, prepared)
    rows_q, rows_k = tiles.block_m, tiles.block_n
    sequences, n_tiles = schedule_tiles(prepared, "k", batch, keys, rows_k)
    keys_kernel[(n_tiles * key_heads,)](
        *_tiled_all(saved, v, rows_q, rows_k, features), tiled(grad_out, rows_q, block_v),
        *(None if x is None else place(x, rows_k, block_d, sequences) for x in (grad_k, grads_of_far[2])),
        place(grad_v, rows_k, block_v, sequences), lse, delta, table_k, tables_of_far[2], weights,
        sequences=sequences, **conditions, n_key_heads=key_heads, heads_per_key=heads // key_heads, n_queries=queries,
        n_keys=keys, D=head_dim, BLOCK_M=rows_q, BLOCK_N=rows_k, R=width_k, **constants, **tiles.options,
    )  # fmt: skip
    if not turns:
        grad_q, grad_k = turn_back_all(grad_q, grad_k, grads_of_far, prepared)

    grad_parameters = grad_sinks = None
    if sums is not None and prepared.parameters is not None:
        if prepared.cu_seqlens_q is None:
            of_heads = sums.view(batch, heads, -1, n_learned).sum((0, 2))
        else:
            of_heads = sums.view(-1, heads, n_learned).sum(0)
        grad_parameters = torch.zeros_like(prepared.parameters)
        columns = min(n_learned, grad_parameters.shape[1])
        grad_parameters[:, :columns] = of_heads[:, :columns]
    if learned.sinks and prepared.sinks is not None:
        grad_sinks = gradient_of_sinks(prepared.sinks, lse, delta)
    return Gradients(grad_q, grad_k, grad_v, grad_parameters, grad_sinks, *(grads_of_far if given else NOTHING_FAR))


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Of (H,) sinks, from base-2 log-sum-exps and what the softmax takes off gradients, both (B, H, Tq)."""
    # A sink of −inf takes no part, not even where there is nothing else.
    of_sinks = torch.exp2(sinks[:, None] * LOG2_E - lse).masked_fill(lse == -math.inf, 0)
    return -(of_sinks * delta).sum((0, 2))


def empty_output(q: Tensor, v_head_dim: int) -> Tensor:
    """Memory for the output, as descriptors want it: like q, or with (B, T, H, Dv) in a row where Dv is another."""
    if v_head_dim == q.shape[3]:
        return empty_aligned(q)
    batch, heads, queries, _ = q.shape
    return empty_aligned(q.new_empty(batch, queries, heads, v_head_dim).transpose(1, 2))


def schedule_tiles(
    prepared: Prepared, of: str, batch: int, n_tokens: int, block: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What kernels that walk over tiles of the queries ("q") or keys ("k") are told of sequences; how many tiles."""
    cu_seqlens_q, cu_seqlens_k = prepared.cu_seqlens_q, prepared.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None, triton.cdiv(n_tokens, block) * batch
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    count = cu_seqlens_q.shape[0] - 1
    # As many as there may be: each sequence, and what belongs to none, may have a tile that is not full.
    n_tiles = n_tokens // block + count + 1
    schedule = torch.empty(n_tiles, 2, dtype=torch.int32, device=cu_seqlens_q.device)
    schedule_kernel[(count + 1,)](
        schedule, cu_seqlens_q if of == "q" else cu_seqlens_k, count, n_tokens, n_tiles, BLOCK=block,
        LAST_FIRST=of == "q" and prepared.causal, BLOCK_S=256,
    )  # fmt: skip
    return (cu_seqlens_q, cu_seqlens_k, schedule, count), n_tiles


def turn_back(grad: Tensor, cos: Tensor | None, sin: Tensor | None, prepared: Prepared) -> Tensor:
    """Undo the rotation of a gradient, where the kernels cannot."""
    if cos is None or sin is None:
        return grad
    turned: Tensor = apply_rope(
        grad,
        None,
        cos,
        sin,
        layout="bhtd",
        interleaved=prepared.interleaved,
        rotary_offset=prepared.rotary_offset,
        inverse=True,
    )
    return turned


def turn_back_all(
    grad_q: Tensor, grad_k: Tensor, grads_of_far: Sequence[Tensor | None], prepared: Prepared
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k where the kernels could not undo the rotations: with those that far pairs gave apart.

    Far gradients belong to q and k only if the scheme made what far pairs meet with.
    """
    it = prepared
    grad_q = turn_back(grad_q, it.cos_q, it.sin_q, it)
    grad_k = turn_back(grad_k, it.cos_k, it.sin_k, it)
    if it.cos_past is not None:
        past, future, far_keys = grads_of_far
        if past is not None:
            grad_q = grad_q.add_(turn_back(past, it.cos_past, it.sin_past, it))
        if future is not None:
            grad_q = grad_q.add_(turn_back(future, it.cos_future, it.sin_future, it))
        if far_keys is not None:
            grad_k = grad_k.add_(turn_back(far_keys, it.cos_far, it.sin_far, it))
    return grad_q, grad_k


def turns_in_registers(prepared: Prepared, head_dim: int, features: Features) -> bool:
    """Whether the kernels can undo the rotation, if there is one, with a tile in registers."""
    if prepared.cos_q is None:
        return True
    if features.parts > 1 or prepared.rotary_offset:
        return False
    return prepared.interleaved or 2 * prepared.cos_q.shape[-1] == head_dim == features.block_d


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it, laid out as descriptors want it: dense features, all else in steps of 16 bytes."""
    vector = 16 // x.element_size()
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
            if size > 1 and (stride % vector or stride == 0):
                break
        else:
            return x
    return empty_aligned(x, dense=True).copy_(x)


def tiled(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """A descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    return TensorDescriptor(x, list(x.shape), strides_of_tiles(x), [1, 1, rows, block_d])


def strides_of_tiles(x: Tensor) -> list[int]:
    """The strides of x (B, H, T, D) for a descriptor, which checks those of dimensions of one index too."""
    strides = [stride if size > 1 else x.shape[3] * 16 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return [*strides[:3], 1]


def place(x: Tensor, rows: int, block_d: int, sequences: tuple[Any, ...] | None) -> Any:
    """Where a kernel stores tiles: a descriptor, or in a packed batch, whose sequences end within tiles, a pointer."""
    return tiled(x, rows, block_d) if sequences is None else place_rows(x)


def place_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Where the rows of a packed batch lie, (1, H, T, D): a pointer, the strides of head and token, and D."""
    return x, x.stride(1), x.stride(2), x.shape[3]


def conditions_of(prepared: Prepared, functions: ScoreFunctions | None) -> dict[str, Any]:
    """The arguments that say which keys a query attends, and how their score comes about."""
    mask, parameters, softcap = prepared.mask, prepared.parameters, prepared.softcap
    bounds = (prepared.key_lengths, prepared.key_starts, prepared.query_starts)
    placed_mask = mask_stride_query = None
    if mask is not None:
        batch, head, query, key = broadcast_strides(mask, 4)
        placed_mask = (mask.view(torch.uint8), batch, head, key)
        mask_stride_query = None if is_of_keys(mask) else query
    # What multiplies scores waits, where it can, for the multiplication that makes them exponents of 2.
    factor = prepared.scale * LOG2_E if softcap is None else softcap * LOG2_E
    return {
        "mask": placed_mask,
        "mask_stride_query": mask_stride_query,
        "bounds": tuple(None if x is None else x.contiguous() for x in bounds),
        "positions_q": _positions(prepared.positions_q),
        "positions_k": _positions(prepared.positions_k),
        "parameters": None if parameters is None else (parameters.contiguous(), parameters[0].numel()),
        "drop": _drop(prepared),
        "scale": prepared.scale if softcap is None else prepared.scale / softcap,
        "softcap": 1.0 if softcap is None else softcap,
        "factor": factor if functions is None else LOG2_E,
        "window": 0 if prepared.window is None else min(prepared.window, 2**30),
        "far_window": _far_window(prepared),
    }


def _far_window(prepared: Prepared) -> int | None:
    """The window, as far as what it is compared with goes: indices, or positions in int64."""
    if prepared.far_window is None:
        return None
    return min(prepared.far_window, 2**29 if prepared.positions_q is None else 2**62)


def _positions(positions: Tensor | None) -> tuple[Any, ...] | None:
    return None if positions is None else (positions, *broadcast_strides(positions, 2), positions.shape[1])


def _drop(prepared: Prepared) -> tuple[Any, ...] | None:
    """The seed, how many steps of 2⁻¹⁶ drop, and what the others are multiplied by."""
    steps = dropped_steps(prepared.dropout_p)
    return None if steps == 0 else (prepared.seed, steps, rescale(prepared.dropout_p))


def _constants(prepared: Prepared, functions: ScoreFunctions | None, features: Features, q: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        "BLOCK_D": features.block_d,
        "PARTS": features.parts,
        "BLOCK_V": features.block_v,
        "CAUSAL": prepared.causal,
        "WINDOWED": prepared.window is not None,
        "SCORE": None if functions is None else functions.score,
        "SOFTCAP": prepared.softcap is not None,
        "FAST": q.dtype.itemsize == 2 and not (interpreted() or on_amd()),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }
