"""Launching the Triton kernels of attention: which tiles, which tables, which strides.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk.ops.attention.checks import Call, token_positions
from ropewalk.ops.attention.triton_backward import delta_kernel, keys_kernel, queries_kernel
from ropewalk.ops.attention.triton_forward import forward_kernel
from ropewalk.ops.attention.triton_scores import UNCHANGED, ScoreFunctions
from ropewalk.ops.rope.api import apply_rope
from ropewalk.positions import Rotation

LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """How a kernel's work is cut: tiles of so many queries and keys, in so many warps and stages of loads."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kernel, the block of features and the bytes of an element. From the compiler's reports of registers and spills, not
# from measurements.
_TILES: dict[str, dict[tuple[int, int], Tiles]] = {
    "forward": {
        (64, 2): Tiles(128, 64, 8, 3),
        (128, 2): Tiles(128, 64, 8, 3),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(64, 32, 8, 1),
        (128, 4): Tiles(64, 16, 8, 1),
        (256, 4): Tiles(32, 16, 8, 1),
    },
    "keys": {
        (64, 2): Tiles(32, 128, 8, 2),
        (128, 2): Tiles(32, 64, 8, 2),
        (256, 2): Tiles(32, 64, 8, 1),
        (64, 4): Tiles(32, 16, 4, 1),
        (128, 4): Tiles(16, 64, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
    "queries": {
        (64, 2): Tiles(128, 64, 8, 2),
        (128, 2): Tiles(128, 64, 8, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 8, 1),
        (128, 4): Tiles(16, 16, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
}
_TILES_TO_INTERPRET = Tiles(32, 16, 1, 1)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return not hasattr(forward_kernel, "cache_key")


def on_amd() -> bool:
    """Whether the GPUs are AMD's: they have 64 KiB of shared memory, hence room for one stage."""
    return torch.version.hip is not None


def choose_tiles(kernel: str, block_d: int, dtype: torch.dtype) -> Tiles:
    """The tiles of "forward", "keys" or "queries"."""
    if interpreted():
        return _TILES_TO_INTERPRET
    tiles = _TILES[kernel][max(block_d, 64), dtype.itemsize]
    return tiles._replace(num_stages=1) if on_amd() else tiles


class Saved(NamedTuple):
    """What the forward leaves for the backward, beside q, v and the output."""

    k: Tensor  # its features mapped
    lse: Tensor  # (B, H, Tq), base 2


def score_functions(call: Call) -> ScoreFunctions | None:
    """The scheme's score functions; None where the scores go into the softmax as they are, but for a scale above 0."""
    name = call.position.score_functions()
    if name is None:
        return None if call.scale > 0 else UNCHANGED
    module, _, attribute = name.partition(":")
    functions = getattr(importlib.import_module(module), attribute)
    if not isinstance(functions, ScoreFunctions):
        raise TypeError(f"{name} is {type(functions).__name__}, but must be ScoreFunctions")
    return functions


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Attend: q (B, H, Tq, D), k and v (B, K, Tk, D), of any strides; the output has q's shape."""
    q, v = dense(q), dense(v)
    out = torch.empty_like(q)
    batch, heads, queries, head_dim = q.shape
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    table_q, table_k = rotations(q, k, call)
    k = dense(map_keys(k, table_k))
    if lse.numel() == 0:
        return out, Saved(k, lse)
    functions = score_functions(call)
    shared = _Shared(q, k, call, functions)
    tiles = choose_tiles("forward", shared.block_d, q.dtype)
    cos, sin, width, interleaved = _tables(table_q, q)
    grid = (triton.cdiv(queries, tiles.block_m), batch * heads)
    forward_kernel[grid](
        q, k, v, out, lse, cos, sin, *shared.pointers, *_strides(q), *_strides(k), *_strides(v), *_strides(out),
        *_broadcast_strides(cos, 2), *shared.strides, *shared.factors, heads, heads // k.shape[1], queries, k.shape[2],
        D=head_dim, BLOCK_D=shared.block_d, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, R=width,
        INTERLEAVED=interleaved, **shared.constants, SCORE=None if functions is None else functions.score,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, Saved(k, lse)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, v: Tensor, out: Tensor, saved: Saved, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; grad_lse (B, H, Tq) is that of the natural log-sum-exp."""
    k, lse = saved
    q, v, grad_out = dense(q), dense(v), dense(grad_out)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    if lse.numel() == 0 or keys == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    table_q, table_k = rotations(q, k, call)
    if table_q is not None:
        q = rotate(q, table_q)
    functions = score_functions(call)
    shared = _Shared(q, k, call, functions)
    constants = {
        **shared.constants,
        "D": head_dim,
        "BLOCK_D": shared.block_d,
        "SCORE": None if functions is None else functions.score,
        "ADJOINT": None if functions is None else functions.adjoint,
    }

    delta = torch.empty_like(lse)
    delta_rows = 16 if interpreted() else 64
    delta_kernel[triton.cdiv(queries, delta_rows), batch * heads](
        out, grad_out, lse if grad_lse is None else grad_lse.contiguous(), delta, *_strides(out), *_strides(grad_out),
        heads, queries, D=head_dim, BLOCK_D=shared.block_d, BLOCK_M=delta_rows, HAS_GRAD_LSE=grad_lse is not None,
    )  # fmt: skip

    fused = can_rotate_back(table_k, head_dim, shared.block_d)
    cos, sin, width, interleaved = _tables(table_k if fused else None, k)
    weights = None if table_k is None else table_k.weights
    tiles = choose_tiles("keys", shared.block_d, q.dtype)
    keys_kernel[triton.cdiv(keys, tiles.block_n), batch * key_heads](
        q, k, v, grad_out, grad_k, grad_v, lse, delta, cos, sin, k if weights is None else weights, *shared.pointers,
        *_strides(q), *_strides(k), *_strides(v), *_strides(grad_out), *_strides(grad_k), *_strides(grad_v),
        *_broadcast_strides(cos, 2), *shared.strides, *shared.factors, key_heads, heads // key_heads, queries, keys,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, R=width, INTERLEAVED=interleaved, WEIGHTED=weights is not None,
        **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip

    cos, sin, width, interleaved = _tables(table_q if fused else None, q)
    tiles = choose_tiles("queries", shared.block_d, q.dtype)
    queries_kernel[triton.cdiv(queries, tiles.block_m), batch * heads](
        q, k, v, grad_out, grad_q, lse, delta, cos, sin, *shared.pointers, *_strides(q), *_strides(k), *_strides(v),
        *_strides(grad_out), *_strides(grad_q), *_broadcast_strides(cos, 2), *shared.strides, *shared.factors, heads,
        heads // key_heads, queries, keys, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, R=width,
        INTERLEAVED=interleaved, **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if table_q is not None and table_k is not None and not fused:
        grad_q, grad_k = rotate(grad_q, table_q, inverse=True), rotate(grad_k, table_k, inverse=True)
    return grad_q, grad_k, grad_v


def rotations(q: Tensor, k: Tensor, call: Call) -> tuple[Rotation | None, Rotation | None]:
    """The scheme's maps of the features of q and of k."""
    positions_q, positions_k = token_positions(q, k, call)
    head_dim = q.shape[-1]
    return call.position.rotation(positions_q, head_dim), call.position.rotation(positions_k, head_dim)


def rotate(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Turn and stretch the features of x (B, H, T, D); with `inverse`, the transpose of that."""
    rotated: Tensor = apply_rope(
        x, None, rotation.cos, rotation.sin, layout="bhtd", interleaved=rotation.interleaved, inverse=inverse
    )
    return rotated


def map_keys(k: Tensor, rotation: Rotation | None) -> Tensor:
    """Do to k what the scheme does to features: all that weighs them is k's."""
    if rotation is None:
        return k
    if rotation.weights is None:
        return rotate(k, rotation)
    return (rotate(k.to(torch.promote_types(k.dtype, torch.float32)), rotation) * rotation.weights).to(k.dtype)


def can_rotate_back(rotation: Rotation | None, head_dim: int, block_d: int) -> bool:
    """Whether the backward kernels can undo a rotation in registers."""
    if rotation is None:
        return True
    return rotation.interleaved or 2 * rotation.cos.shape[-1] == head_dim == block_d


def dense(x: Tensor) -> Tensor:
    """`x`, or a copy of it, with its features dense in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Shared:
    """The arguments that all kernels have in common, in their order."""

    def __init__(self, q: Tensor, k: Tensor, call: Call, functions: ScoreFunctions | None) -> None:
        mask, lengths = call.mask, call.key_lengths
        explicit = functions is not None and not (call.positions_q is None and call.positions_k is None)
        positions = token_positions(q, k, call) if explicit else (None, None)
        parameters = call.position.score_parameters(q.shape[1], q.device)
        self.block_d = max(16, triton.next_power_of_2(q.shape[-1]))
        # A pointer that is not read is q's.
        pointers = (None if mask is None else mask.view(torch.uint8), lengths, *positions, parameters)
        self.pointers = tuple(q if x is None else x for x in pointers)
        self.strides = (
            *_broadcast_strides(mask, 4),
            *_broadcast_strides(positions[0], 2),
            *_broadcast_strides(positions[1], 2),
            0 if parameters is None else parameters.stride(0),
        )
        factor = call.scale * LOG2_E if functions is None else LOG2_E
        self.factors = (call.scale, factor, 0 if call.window is None else min(call.window, 2**30))
        self.constants: dict[str, Any] = {
            "CAUSAL": call.causal,
            "WINDOWED": call.window is not None,
            "HAS_MASK": mask is not None,
            "HAS_LENGTHS": lengths is not None,
            "EXPLICIT_POSITIONS": explicit,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        }


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token."""
    return x.stride(0), x.stride(1), x.stride(2)


def _broadcast_strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides; 0 for a dimension that serves any index, and for what is not there."""
    if x is None:
        return (0,) * count
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))


def _tables(rotation: Rotation | None, x: Tensor) -> tuple[Tensor, Tensor, int, bool]:
    """cos, sin, R and the pairing; R is 0 where nothing is rotated."""
    if rotation is None:
        return x[:, 0], x[:, 0], 0, False
    return rotation.cos, rotation.sin, 2 * rotation.cos.shape[-1], rotation.interleaved
