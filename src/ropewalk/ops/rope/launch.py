"""The launch of the rotation's Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from ropewalk.ops.launch.kernel import WIDEST_ACCESS, Kernel, compute_dtype, division_by
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.arguments import (
    Tiles,
    are_dense,
    are_near,
    head_args,
    pair_args,
    position_args,
    rotate_copies,
    table_args,
)
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotation
from ropewalk.ops.rope.kernel import rotate_kernel
from ropewalk.ops.rope.validate import as_bthd

KERNEL = Kernel(
    rotate_kernel,
    unaligned=("positions_ptr", "cu_seqlens_ptr"),
    unsigned=("batch_multiplier", "chunk_multiplier"),
)
_CHUNK_TOKENS = 4096  # of one batch row, before those of the next one
_MANY_TOKENS = 1024  # bandwidth limits calls from here on, latency those below


def choose_tiles(
    batch: int,
    tokens: int,
    n_heads: int,
    head_dim: int,
    half: int,
    itemsize: int,
    *,
    interleaved: bool,
    heads_are_near: bool,
    by_axes: bool = False,
) -> Tiles:
    """Return the tiles that were fastest on an H200 (docs/notes/001-rotation-in-triton.md).

    n_heads is the larger of q's and k's; heads_are_near says that a token's heads lie nearer to each other in memory
    than a head's tokens do; by_axes says that each pair gathers its own row of the tables.
    """
    # Half a row of one head is read in 16-byte accesses by this many threads.
    per_row = max(1, triton.next_power_of_2(half) * itemsize // WIDEST_ACCESS)
    if interleaved and batch * tokens >= _MANY_TOKENS:
        rows, threads = 64 // per_row, 32
    elif interleaved:
        rows, threads = 64 // per_row, 128
    elif by_axes:
        # One tile of the tables is for all heads: a thread takes more of them than it could load tables for.
        rows = min(16, 128 // per_row)
        threads = max(32, rows * per_row // 2) if heads_are_near else 64
    elif heads_are_near:
        rows, threads = 128 // per_row, 128
    else:
        rows, threads = 64 // per_row, 64
    if 2 * half < head_dim:
        # The other features are copied by whole rows: 32 features a thread fit its registers.
        rows = min(rows, 32 * threads // triton.next_power_of_2(head_dim))
    block_heads = min(max(1, rows), triton.next_power_of_2(max(1, n_heads)))
    if not heads_are_near:
        block_heads = min(block_heads, 4)
    block_tokens = min(max(1, rows // block_heads), triton.next_power_of_2(max(1, tokens)))
    return Tiles(block_tokens, block_heads, threads)


def rotate(rotation: Rotation, on: Steps) -> Sequence[Tensor]:
    """Rotate q and k, and return the results that are not in place."""
    q, k, call = rotation
    cos, sin, flags = call.cos, call.sin, call.flags
    outs = rotation.make_results()
    if not are_dense(q, k, *outs, cos, sin, call.cu_seqlens, call.axes):
        rotate_copies(rotate, rotation, outs, on)
        return outs
    q_out, k_out = (*outs, None)[:2] if outs else (q, k)
    batch, tokens, n_q_heads, head_dim = as_bthd(q, flags.layout).shape
    n_k_heads = 0 if k is None else as_bthd(k, flags.layout).shape[2]
    heads = head_args(flags.layout, q=q, k=k, q_out=q_out, k_out=k_out)
    tiles = choose_tiles(
        batch,
        tokens,
        max(n_q_heads, n_k_heads),
        head_dim,
        cos.shape[-1],
        q.element_size(),
        interleaved=flags.interleaved,
        heads_are_near=are_near(heads, tokens, n_q_heads),
        by_axes=call.axes is not None,
    )
    token_blocks = math.ceil(tokens / tiles.block_tokens)
    n_chunks = max(1, round(tokens / _CHUNK_TOKENS)) if batch > 1 else 1
    chunk_blocks = math.ceil(token_blocks / n_chunks)
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + math.ceil(n_k_heads / tiles.block_heads)
    if 0 in (batch, tokens, n_q_heads + n_k_heads, head_dim):
        return outs
    batch_multiplier, batch_shift = division_by(batch)
    chunk_multiplier, chunk_shift = division_by(chunk_blocks)
    on.launch(
        KERNEL,
        n_chunks * batch * chunk_blocks * n_groups,
        **heads,
        **table_args(cos, sin),
        **position_args(call, q),
        **pair_args(call),
        direction=-1 if flags.inverse else 1,
        n_batches=batch,
        batch_multiplier=batch_multiplier,
        batch_shift=batch_shift,
        chunk_blocks=chunk_blocks,
        chunk_multiplier=chunk_multiplier,
        chunk_shift=chunk_shift,
        n_tokens=tokens,
        HQ=n_q_heads,
        HK=n_k_heads,
        D=head_dim,
        INPLACE=flags.inplace,
        COMPUTE_DTYPE=compute_dtype(q),
        BLOCK_TOKENS=tiles.block_tokens,
        BLOCK_HEADS=tiles.block_heads,
        BLOCK_HALF=triton.next_power_of_2(cos.shape[-1]),
        BLOCK_D=triton.next_power_of_2(head_dim),
        # The next batch row reads them again: 0.7 % more bandwidth for many tokens, 4 % more latency for few.
        KEEP_TABLES=batch * tokens >= _MANY_TOKENS,
        threads=tiles.threads,
    )
    return outs


def rotate_features(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    on: Steps,
    *,
    interleaved: bool,
    rotary_offset: int,
    pair_block: int | None,
    inverse: bool = False,
) -> Any:
    """Rotate q and k, (B, H, T, D), by tables with a row for each token, as `apply_rope` does out of autograd."""
    flags = RopeFlags("bhtd", interleaved, inverse, rotary_offset=rotary_offset, pair_block=pair_block)
    outs = rotate(Rotation(q, k, RopeCall(cos, sin, None, None, 0, flags)), on)
    return tuple(outs) if k is not None else outs[0]
