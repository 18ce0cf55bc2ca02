"""Launching the Triton kernels of attention: which tiles, which tables, which strides.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ropewalk.ops.attention.prepare import Prepared, empty_aligned, map_features
from ropewalk.ops.attention.triton_backward import keys_kernel, queries_kernel
from ropewalk.ops.attention.triton_forward import forward_kernel
from ropewalk.ops.attention.triton_scores import UNCHANGED, ScoreFunctions
from ropewalk.ops.rope.api import apply_rope

LOG2_E = math.log2(math.e)
Launch = TypeVar("Launch", bound=Callable[..., Any])


class Tiles(NamedTuple):
    """How a kernel's work is cut: tiles of so many queries and keys, in so many warps and stages of loads."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread: 168 lets three programs of four warps share an NVIDIA processor

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launcher takes of it."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None and not on_amd():
            options["maxnreg"] = self.max_registers
        return options


# By kernel, the block of features and the bytes of an element. Those of halves are from measurements (docs/log.md), the
# others from the compiler's reports of registers and spills.
_TILES: dict[str, dict[tuple[int, int], Tiles]] = {
    "forward": {
        (64, 2): Tiles(64, 128, 4, 2, 168),
        (128, 2): Tiles(64, 64, 4, 3),
        (256, 2): Tiles(128, 64, 8, 2),
        (64, 4): Tiles(32, 32, 8, 1),
        (128, 4): Tiles(32, 32, 8, 1),
        (256, 4): Tiles(32, 16, 8, 1),
    },
    "keys": {
        (64, 2): Tiles(128, 64, 4, 2),
        (128, 2): Tiles(64, 64, 4, 2),
        (256, 2): Tiles(64, 64, 8, 2),
        (64, 4): Tiles(16, 16, 8, 1),
        (128, 4): Tiles(16, 16, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
    "queries": {
        (64, 2): Tiles(64, 64, 4, 2, 128),
        (128, 2): Tiles(64, 64, 4, 2),
        (256, 2): Tiles(128, 32, 8, 2),
        (64, 4): Tiles(16, 32, 8, 1),
        (128, 4): Tiles(16, 16, 8, 1),
        (256, 4): Tiles(16, 16, 8, 1),
    },
}
# Where score functions and their adjoints, which need registers, want others; and masks, from the compiler's reports.
_TILES_WITH_SCORES = {("forward", 64, 2): Tiles(64, 128, 4, 3), ("queries", 64, 2): Tiles(64, 64, 4, 3, 168)}
_TILES_WITH_ADJOINT = {("keys", 64, 2): Tiles(64, 64, 4, 2)}
_TILES_WITH_PADDING = {("forward", 64, 2): Tiles(64, 64, 4, 3, 168)}
_TILES_WITH_MASK = {
    ("forward", 64, 2): Tiles(64, 32, 4, 2),
    ("forward", 128, 2): Tiles(64, 32, 4, 2),
    ("forward", 256, 2): Tiles(64, 32, 8, 2),
    ("keys", 64, 2): Tiles(32, 64, 4, 2),
    ("keys", 128, 2): Tiles(32, 64, 4, 2),
    ("keys", 256, 2): Tiles(32, 64, 8, 2),
    ("queries", 64, 2): Tiles(64, 32, 4, 2),
    ("queries", 128, 2): Tiles(64, 32, 4, 2),
    ("queries", 256, 2): Tiles(64, 32, 8, 2),
}
_TILES_TO_INTERPRET = Tiles(32, 16, 1, 1)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return not hasattr(forward_kernel, "cache_key")


def on_amd() -> bool:
    """Whether the GPUs are AMD's: they have 64 KiB of shared memory, hence room for one stage."""
    return torch.version.hip is not None


def on_hopper() -> bool:
    """Whether the GPU has compute capability 9.0, whose shared memory the tiles were made for."""
    return not on_amd() and torch.cuda.get_device_capability() == (9, 0)


def choose_tiles(
    kernel: str, block_d: int, dtype: torch.dtype, functions: ScoreFunctions | None, prepared: Prepared
) -> Tiles:
    """The tiles of "forward", "keys" or "queries"."""
    if interpreted():
        return _TILES_TO_INTERPRET
    features, size = max(block_d, 64), dtype.itemsize
    tiles = _TILES[kernel][features, size]
    if functions is not None:
        tiles = _TILES_WITH_SCORES.get((kernel, features, size), tiles)
        if functions.adjoint is not None:
            tiles = _TILES_WITH_ADJOINT.get((kernel, features, size), tiles)
    if prepared.mask is not None:
        with_mask = _TILES_WITH_PADDING if is_of_keys(prepared.mask) else _TILES_WITH_MASK
        tiles = with_mask.get((kernel, features, size), tiles)
    one_stage = on_amd() or (features == 256 and not on_hopper())
    return tiles._replace(num_stages=1) if one_stage else tiles


class Saved(NamedTuple):
    """What the forward leaves for the backward, beside v and the output."""

    q: Tensor  # its features mapped
    k: Tensor  # likewise
    lse: Tensor  # (B, H, Tq), base 2


def score_functions(prepared: Prepared) -> ScoreFunctions | None:
    """The scheme's score functions; None where the scores go into the softmax as they are, but for a scale above 0."""
    if prepared.score is None:
        return None if prepared.scale > 0 else UNCHANGED
    module, _, attribute = prepared.score.partition(":")
    functions = getattr(importlib.import_module(module), attribute)
    if not isinstance(functions, ScoreFunctions):
        raise TypeError(f"{prepared.score} is {type(functions).__name__}, but must be ScoreFunctions")
    return functions


def on_its_device(launch: Launch) -> Launch:
    """Let a function's launches go to the device of its first argument."""

    @functools.wraps(launch)
    def launch_there(x: Tensor, *rest: Any) -> Any:
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return launch(x, *rest)
        with torch.cuda.device(x.device):
            return launch(x, *rest)

    return cast(Launch, launch_there)


@on_its_device
def forward(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Saved]:
    """Attend: q (B, H, Tq, D), k and v (B, K, Tk, D), of any strides; the output has q's shape."""
    out = empty_aligned(q)
    batch, heads, queries, head_dim = q.shape
    q, k = (aligned(x) for x in map_features(q, k, prepared))
    v = aligned(v)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, Saved(q, k, lse)
    if k.shape[2] == 0:
        return out.zero_(), Saved(q, k, lse.fill_(-math.inf))
    functions = score_functions(prepared)
    block_d = block_of(head_dim)
    tiles = choose_tiles("forward", block_d, q.dtype, functions, prepared)
    forward_kernel[(triton.cdiv(queries, tiles.block_m) * batch * heads,)](
        _tiled(q, tiles.block_m, block_d), _tiled(k, tiles.block_n, block_d), _tiled(v, tiles.block_n, block_d),
        _tiled(out, tiles.block_m, block_d), lse, *_conditions(prepared, functions), heads, heads // k.shape[1],
        queries, k.shape[2], BLOCK_D=block_d, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        **_constants(prepared, functions), **tiles.options,
    )  # fmt: skip
    return out, Saved(q, k, lse)


@on_its_device
def backward(
    grad_out: Tensor, grad_lse: Tensor | None, v: Tensor, out: Tensor, saved: Saved, prepared: Prepared
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; grad_lse (B, H, Tq) is that of the natural log-sum-exp."""
    lse = saved.lse
    q, k, v, out, grad_out = (aligned(x) for x in (saved.q, saved.k, v, out, grad_out))
    grad_q, grad_k, grad_v = empty_aligned(q), empty_aligned(k), empty_aligned(v)
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    if lse.numel() == 0 or keys == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    functions = score_functions(prepared)
    block_d = block_of(head_dim)
    conditions = _conditions(prepared, functions)
    constants = _constants(prepared, functions)
    constants["ADJOINT"] = None if functions is None else functions.adjoint
    constants["INTERLEAVED"] = prepared.interleaved

    turns = turns_in_registers(prepared, head_dim, block_d)
    table_q, width = _table(prepared.cos_q, prepared.sin_q) if turns else (None, 0)
    table_k, _ = _table(prepared.cos_k, prepared.sin_k) if turns else (None, 0)
    weights = None if prepared.weights is None else prepared.weights.contiguous()
    delta = torch.empty_like(lse)
    tiles = choose_tiles("queries", block_d, q.dtype, functions, prepared)
    rows_q, rows_k = tiles.block_m, tiles.block_n
    queries_kernel[(triton.cdiv(queries, rows_q) * batch * heads,)](
        _tiled(q, rows_q, block_d), _tiled(k, rows_k, block_d), _tiled(v, rows_k, block_d),
        _tiled(out, rows_q, block_d), _tiled(grad_out, rows_q, block_d), _tiled(grad_q, rows_q, block_d), lse,
        None if grad_lse is None else grad_lse.contiguous(), delta, table_q, *conditions, heads, heads // key_heads,
        queries, keys, BLOCK_D=block_d, BLOCK_M=rows_q, BLOCK_N=rows_k, R=width, **constants, **tiles.options,
    )  # fmt: skip

    tiles = choose_tiles("keys", block_d, q.dtype, functions, prepared)
    rows_q, rows_k = tiles.block_m, tiles.block_n
    keys_kernel[(triton.cdiv(keys, rows_k) * batch * key_heads,)](
        _tiled(q, rows_q, block_d), _tiled(k, rows_k, block_d), _tiled(v, rows_k, block_d),
        _tiled(grad_out, rows_q, block_d), _tiled(grad_k, rows_k, block_d), _tiled(grad_v, rows_k, block_d), lse, delta,
        table_k, weights, *conditions, key_heads, heads // key_heads, queries, keys, D=head_dim,
        BLOCK_D=block_d, BLOCK_M=rows_q, BLOCK_N=rows_k, R=width, **constants, **tiles.options,
    )  # fmt: skip
    if not turns:
        grad_q = turn_back(grad_q, prepared.cos_q, prepared.sin_q, prepared.interleaved)
        grad_k = turn_back(grad_k, prepared.cos_k, prepared.sin_k, prepared.interleaved)
    return grad_q, grad_k, grad_v


def turn_back(grad: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """Undo the rotation of a gradient, where the kernels cannot."""
    if cos is None or sin is None:
        return grad
    turned: Tensor = apply_rope(grad, None, cos, sin, layout="bhtd", interleaved=interleaved, inverse=True)
    return turned


def turns_in_registers(prepared: Prepared, head_dim: int, block_d: int) -> bool:
    """Whether the kernels can undo the rotation, if there is one, with a tile in registers."""
    return prepared.cos_q is None or prepared.interleaved or 2 * prepared.cos_q.shape[-1] == head_dim == block_d


def block_of(head_dim: int) -> int:
    """The features of a tile: a power of two."""
    return 1 << max(4, (head_dim - 1).bit_length())


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


def _tiled(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """A descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    strides = [stride if size > 1 else x.shape[3] * 16 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, block_d])


def _table(cos: Tensor | None, sin: Tensor | None) -> tuple[tuple[Any, ...] | None, int]:
    """cos, sin and their strides of batch and token, as kernels take them, and R."""
    if cos is None or sin is None:
        return None, 0
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return (cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)), 2 * cos.shape[2]


def _conditions(prepared: Prepared, functions: ScoreFunctions | None) -> tuple[Any, ...]:
    """The arguments that say which keys a query attends, and how their score comes about."""
    mask, lengths, parameters = prepared.mask, prepared.key_lengths, prepared.parameters
    factor = prepared.scale * LOG2_E if functions is None else LOG2_E
    placed_mask = mask_stride_query = None
    if mask is not None:
        batch, head, query, key = _broadcast_strides(mask, 4)
        placed_mask = (mask.view(torch.uint8), batch, head, key)
        mask_stride_query = None if is_of_keys(mask) else query
    return (
        placed_mask,
        mask_stride_query,
        None if lengths is None else lengths.contiguous(),
        *(None if x is None else (x, *_broadcast_strides(x, 2)) for x in (prepared.positions_q, prepared.positions_k)),
        None if parameters is None else (parameters.contiguous(), parameters[0].numel()),
        prepared.scale,
        factor,
        0 if prepared.window is None else min(prepared.window, 2**30),
    )


def is_of_keys(mask: Tensor) -> bool:
    """Whether a mask is the same for all queries, as padding is."""
    return mask.stride(2) == 0 or mask.shape[2] == 1


def _constants(prepared: Prepared, functions: ScoreFunctions | None) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        "CAUSAL": prepared.causal,
        "WINDOWED": prepared.window is not None,
        "SCORE": None if functions is None else functions.score,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


def _broadcast_strides(x: Tensor, count: int) -> tuple[int, ...]:
    """The first `count` strides; 0 for a dimension that serves any index."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))
