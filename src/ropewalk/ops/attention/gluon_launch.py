"""Launching the Gluon kernels of attention for Hopper.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk.ops.attention.gluon_hopper_forward import forward_kernel
from ropewalk.ops.attention.gluon_hopper_tiles import ROWS
from ropewalk.ops.attention.prepare import FarFeatures, Prepared
from ropewalk.ops.attention.triton_arguments import score_functions
from ropewalk.ops.attention.triton_launch import (
    Saved,
    begin_forward,
    conditions_of,
    on_its_device,
    schedule_tiles,
    strides_of_tiles,
)

CACHED_BYTES = 24 << 20  # of what programs read, or add to, at a time: half of the cache
CONDITIONS = ("bounds", "parameters", "scale", "softcap", "factor", "window", "far_window")


class Configuration(NamedTuple):
    """What the forward kernel is compiled for, beside what the call asks."""

    CONSUMERS: int
    BLOCK_N: int
    STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PIN: bool
    EARLY: bool
    TURNS: bool

    @property
    def rows(self) -> int:
        """Of queries in a tile."""
        return self.CONSUMERS * int(ROWS.value)


# By the block of features, and whether attention is causal; docs/log.md has what else was measured.
FORWARD = {
    (64, False): Configuration(3, 128, 2, 160, 32, PIN=False, EARLY=True, TURNS=True),
    (64, True): Configuration(3, 128, 2, 160, 32, PIN=False, EARLY=True, TURNS=True),
    (128, False): Configuration(2, 128, 2, 232, 40, PIN=False, EARLY=True, TURNS=False),
    (128, True): Configuration(2, 128, 2, 232, 40, PIN=True, EARLY=False, TURNS=True),
}
# Of 64 features where a scheme changes scores, which takes more registers than three consumers have.
CHANGED = Configuration(2, 128, 2, 240, 24, PIN=False, EARLY=True, TURNS=True)


def block_of_features(head_dim: int, v_head_dim: int) -> int:
    """How many features tiles have: a power of two, of queries, keys and values alike."""
    return 64 if max(head_dim, v_head_dim) <= 64 else 128


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, keep: bool = True, far: FarFeatures | None = None
) -> tuple[Tensor, Saved]:
    """Attend, as `triton_launch.forward` does, which has the same arguments and results."""
    out, v, saved, is_empty = begin_forward(q, k, v, prepared, far)
    if is_empty:
        return out, saved
    q, k, lse, past, future, far_keys = saved
    batch, heads, queries, head_dim = q.shape
    block = block_of_features(head_dim, v.shape[3])
    functions = score_functions(prepared)
    configuration = FORWARD[block, prepared.causal] if functions is None or block == 128 else CHANGED
    rows, block_n = ROWS.value, configuration.BLOCK_N
    sequences, n_tiles = schedule_tiles(prepared, "q", batch, queries, configuration.rows)
    total = n_tiles * heads
    conditions = conditions_of(prepared, functions)
    whole = not prepared.causal and prepared.window is None and sequences is None and past is None
    whole = whole and not any(x is not None for x in conditions["bounds"]) and k.shape[2] % block_n == 0
    forward_kernel[(min(total, _multiprocessors(q.device)),)](
        described(q, rows, block), described(k, block_n, block), described(v, block_n, block),
        None if past is None else described(past, rows, block),
        None if future is None else described(future, rows, block),
        None if far_keys is None else described(far_keys, block_n, block),
        described(out, rows, block) if sequences is None else rows_of(out), lse, counter_of(q.device),
        sequences=sequences, sinks_ptr=None if prepared.sinks is None else prepared.sinks.contiguous(),
        **{name: conditions[name] for name in CONDITIONS},
        n_tiles=n_tiles if sequences is not None else n_tiles // batch, n_rows=batch * heads, n_heads=heads,
        heads_per_key=heads // k.shape[1], heads_together=_heads_together(heads, k, v, far_keys), n_queries=queries,
        n_keys=k.shape[2], total=total, CAUSAL=prepared.causal, WINDOWED=prepared.window is not None, EDGES=not whole,
        SCORE=None if functions is None else functions.score, SOFTCAP=prepared.softcap is not None,
        **configuration._asdict(), num_warps=4,
    )  # fmt: skip
    return out, saved


def described(x: Tensor, rows: int, block: int) -> TensorDescriptor:
    """A descriptor of x (B, H, T, D), for tiles of some rows of one head."""
    shape = [1, 1, rows, block]
    return TensorDescriptor(x, list(x.shape), strides_of_tiles(x), shape, _layout_of(rows, block, x.dtype))


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Where the rows of x (B, H, T, D) lie: a pointer, the strides of batch, head and token, and D."""
    batch, head, token, _ = x.stride()
    return x, batch, head, token, x.shape[3]


@functools.lru_cache
def _layout_of(rows: int, block: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    names = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block], names[dtype])


def _heads_together(heads: int, *read: Tensor | None) -> int:
    """How many rows of query heads are taken at a time: those of which all that is read of keys stays in the cache."""
    there = [x for x in read if x is not None]
    bytes_of_head = sum(x.shape[2] * x.shape[3] * x.element_size() for x in there)
    return max(1, CACHED_BYTES // bytes_of_head) * (heads // there[0].shape[1])


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """A zero that launches of this stream count with, one after another; each leaves it zero.

    What a CUDA graph captures has its own, in the graph's memory: it may be replayed beside anything.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter
