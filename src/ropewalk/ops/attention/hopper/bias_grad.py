"""Gradients of biases by distance, and of ALiBi's slopes, for the kernels for Hopper.

The backward kernel sums dS · −distance of a slope as it goes.

Of a bias by distance far pairs, at least `largest` apart, have one number on each side. The backward kernel sums their
dS, a tile at a time. Tiles with a nearer pair are left to a kernel of their own, which recomputes S and dP: two
products of five. A program of it has one offset of keys from queries, and goes along that diagonal of tiles: each pair
of a tile then has the same distance throughout, and the sum of all tiles is sorted into buckets once.

All sums have one order.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, D head dim (Dv of v).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon
from ropewalk.ops.attention.hopper.scores import has_near_pair, sum_distances
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, WG_ROWS, sum_in_threads, wgmma_layout
from ropewalk.ops.attention.triton.masking import PAST, attention_mask, mask_flags
from ropewalk.ops.attention.triton.scheduler import sequence_info
from ropewalk.ops.attention.triton.tiles import DO_NOT_SPECIALIZE, load_tile, wide


class ParamSums(NamedTuple):
    """Sums for the gradient of a score mod's parameters, of a program of the backward kernel.

    For a bias by distance they are of dS over far pairs behind, and ahead; for a slope, of dS times −distance.
    """

    tiles: (
        Any  # shared memory, [2 · sides, WG_ROWS, 4]: of both warp groups, as threads hold them; a slope has one side
    )
    ptr: Any  # (B · H, slots, 2 · sides): the same, whole; a slot is a tile of keys
    n_slots: Any


@gluon.jit
def _zero_sums(BLOCK_M: gl.constexpr):
    """Return sums of a tile [keys, queries] in threads, all zero."""
    return sum_in_threads(gl.zeros([WG_ROWS, BLOCK_M], gl.float32, wgmma_layout(BLOCK_M)))


@gluon.jit
def begin_sums(param_sums, BLOCK_M: gl.constexpr, CONSUMER: gl.constexpr):
    """Set a warp group's sums to zero."""
    SIDES: gl.constexpr = param_sums.tiles.shape[0] // 2
    zero = _zero_sums(BLOCK_M)
    for side in gl.static_range(SIDES):
        param_sums.tiles.index(SIDES * CONSUMER + side).store(zero)


@gluon.jit
def add_to_sums(param_sums, ds, m_start, k_idx, seqlens, scores, flags, CONSUMER: gl.constexpr):
    """Add what dS of a tile [keys, queries] gives: to a bias by distance if all its pairs are far, or to a slope."""
    if scores.bias is not None:
        ahead = scores.bias.start - (m_start + seqlens.causal_offset)
        if not has_near_pair(ahead, scores.bias.largest, ds.shape[1], ds.shape[0]):
            tile = param_sums.tiles.index(2 * CONSUMER + (ahead > 0).to(gl.int32))
            sums = sum_in_threads(ds)
            tile.store(tile.load(sums.type.layout) + sums)
    else:
        tile = param_sums.tiles.index(CONSUMER)
        sums = sum_distances(ds, m_start, k_idx, seqlens, flags)
        tile.store(tile.load(sums.type.layout) - sums)


@gluon.jit
def store_sums(param_sums, tile, head, problem, BLOCK_M: gl.constexpr, CONSUMER: gl.constexpr):
    """Store a warp group's sums for one query head."""
    slot = tile.start // BLOCK_N if problem.packed is None else gl.program_id(0) // problem.schedule.n_heads
    n_heads = problem.schedule.n_heads * problem.schedule.heads_per_key
    row = (tile.batch * n_heads + head).to(gl.int64)
    SIDES: gl.constexpr = param_sums.tiles.shape[0] // 2
    ptr = param_sums.ptr + (row * param_sums.n_slots + slot) * (2 * SIDES) + SIDES * CONSUMER
    zero = _zero_sums(BLOCK_M)
    for side in gl.static_range(SIDES):
        sums = param_sums.tiles.index(SIDES * CONSUMER + side).load(zero.type.layout)
        total = gl.sum(gl.sum(sums, 1), 0)
        if problem.dropout is not None:
            total *= problem.dropout.rescale
        gl.store(ptr + side, total)


@triton.jit
def _sum_far(ptr, count, BLOCK: tl.constexpr):
    """Return the sums behind and ahead, of a head's numbers in turn."""
    behind = tl.zeros((BLOCK,), tl.float32)
    ahead = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        sums = tl.load(ptr + index, index < count, other=0.0)
        behind += tl.where(index % 2 == 0, sums, 0.0)
        ahead += tl.where(index % 2 == 0, 0.0, sums)
    return tl.sum(behind, 0), tl.sum(ahead, 0)


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "n_slots", "largest", "n_diagonals"))
def bias_grad_kernel(
    q,  # descriptors of (B, H, Tq, D), for tiles of BLOCK_M; features mapped already, as those of k
    k,  # (B, K, Tk, D), for tiles of BLOCK_N
    v,  # (B, K, Tk, Dv), likewise
    do,  # (B, H, Tq, Dv), for tiles of BLOCK_M
    lse_ptr,  # (B, H, Tq), dense
    delta_ptr,
    far_sums_ptr,  # (B · H, n_slots, 4), as in `ParamSums`
    parts_ptr,  # (programs, N_PARAMS): a program's part of the parameters' gradient
    params_ptr,  # (H, params_stride)
    params_stride,
    table_ptr,  # (H, table_stride): biases by distance
    table_stride,
    packed,  # Packed | None
    bounds,  # Bounds
    scale,  # of products, before the bias
    exp2_scale,
    window,
    window_right,
    n_heads,
    heads_per_key,
    n_queries,
    n_keys,
    n_slots,
    largest,
    n_diagonals,  # of tiles, at most
    SPLITS: tl.constexpr,  # parts of a diagonal
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # a multiple of BLOCK_N
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    N_PARAMS: tl.constexpr,
    PARAM_GRAD: tl.constexpr,
):
    """Sum dS over the tiles of one diagonal of one head, by parameters; the first program of a head adds far sums."""
    split = tl.program_id(0) % SPLITS
    diagonal = tl.program_id(0) // SPLITS % n_diagonals
    row = tl.program_id(0) // (SPLITS * n_diagonals)
    sequence = row // n_heads
    head = row % n_heads
    batch = sequence if packed is None else sequence * 0
    q_offset, k_offset, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, window, window_right)
    FLAGS: tl.constexpr = mask_flags(
        packed is not None,
        bounds.key_lengths,
        bounds.key_starts,
        bounds.query_starts,
        CAUSAL,
        WINDOWED,
        True,
        True,
    )
    offset = seqlens.causal_offset
    # The first key of a tile is `ahead` of its first query, from the lowest number that a near pair allows.
    ahead = ((1 - largest + offset) & -BLOCK_N) - offset + diagonal * BLOCK_N
    first = (tl.maximum(-offset - ahead, 0) + (BLOCK_M - 1)) // BLOCK_M * BLOCK_M
    stop = tl.minimum(seqlens.n_queries, seqlens.n_keys - offset - ahead)
    if not has_near_pair(ahead, largest, BLOCK_M, BLOCK_N):
        stop = first
    if FLAGS.SIDE == PAST:
        stop = tl.where(ahead >= BLOCK_M, first, stop)
    length = (tl.cdiv(tl.maximum(stop - first, 0), BLOCK_M) + (SPLITS - 1)) // SPLITS * BLOCK_M
    first += split * length
    stop = tl.minimum(stop, first + length)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if stop > first:
        centre = table_ptr + wide(head) * table_stride + table_stride // 2
        bias = tl.load(centre + (ahead + n[None, :] - m[:, None]))
        row_offset = wide(batch * n_heads + head) * n_queries + q_offset
        kv_head = head // heads_per_key
        for m_start in range(first, stop, BLOCK_M):
            n_start = m_start + offset + ahead
            exists = m_start + m < seqlens.n_queries
            lse = tl.load(lse_ptr + row_offset + m_start + m, exists, other=float("-inf"))
            delta = tl.load(delta_ptr + row_offset + m_start + m, exists, other=0.0)
            exists = exists & (lse > float("-inf"))
            q_tile = load_tile(q, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D)
            k_tile = load_tile(k, batch, kv_head, k_offset + n_start, BLOCK_N, BLOCK_D)
            s = tl.dot(q_tile, k_tile.T) * scale + bias
            p = tl.exp2(s * exp2_scale - lse[:, None])
            do_tile = load_tile(do, batch, head, q_offset + m_start, BLOCK_M, BLOCK_DV)
            v_tile = load_tile(v, batch, kv_head, k_offset + n_start, BLOCK_N, BLOCK_DV)
            dp = tl.dot(do_tile, v_tile.T)
            attends = attention_mask((m_start + m)[:, None], (n_start + n)[None, :], seqlens, FLAGS)
            acc += tl.where(attends & exists[:, None], p * (dp - delta[:, None]), 0.0)
    params_ptr += wide(head) * params_stride
    sums = tl.zeros((BLOCK_M, N_PARAMS), tl.float32)
    if stop > first:
        k_pos = (ahead + n).to(tl.float32)
        sums = PARAM_GRAD(sums, acc, acc, m.to(tl.float32)[:, None], k_pos[None, :], params_ptr, False)
    if (diagonal == 0) & (split == 0) & (sequence == batch):
        behind, in_front = _sum_far(far_sums_ptr + wide(batch * n_heads + head) * n_slots * 4, n_slots * 4, 1024)
        # As two pairs, so far that both are beyond the largest distance.
        is_pair = (m[:, None] == 0) & ((n[None, :] == 0) | (n[None, :] == BLOCK_N - 1))
        gradient = tl.where(is_pair, tl.where(n[None, :] == 0, behind, in_front), 0.0)
        k_pos = tl.where(n == 0, -largest, largest).to(tl.float32)
        q_pos = tl.zeros((BLOCK_M,), tl.float32)
        sums = PARAM_GRAD(sums, gradient, gradient, q_pos[:, None], k_pos[None, :], params_ptr, False)
    tl.store(parts_ptr + wide(tl.program_id(0)) * N_PARAMS + tl.arange(0, N_PARAMS), tl.sum(sums, 0))
