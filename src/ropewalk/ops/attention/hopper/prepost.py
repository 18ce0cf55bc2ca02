"""The passes before and after the backward kernel for Hopper, over rows of queries.

Programs of the kernel add dQ to a workspace of float32, in whole tiles of rows: for each batch and head as many as its
queries need, and in a packed batch for each sequence its own. A two-range encoding has two or three workspaces after
each other: of near pairs, of far ones behind a query, of far ones ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ropewalk.ops.attention.triton.scheduler import sequence_info, tile_of_program
from ropewalk.ops.attention.triton.tiles import (
    DO_NOT_SPECIALIZE,
    differentiate_gate,
    inverse_rotate,
    load_tile,
    params_of_head,
    store_tile,
    wide,
)


@triton.jit
def workspace_start(q_offset, sequence, packed, BLOCK_M: tl.constexpr):
    """Return a sequence's first row in a workspace, after room for a partial tile of each sequence before it."""
    row = 0
    if packed is not None:
        row = (q_offset // BLOCK_M + tl.maximum(sequence, 0)) * BLOCK_M
    return row


@triton.jit
def _workspace_offsets(
    row,
    start,
    workspace_rows,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    D_CHUNKS: tl.constexpr,
):
    """Return the offsets of a tile's elements in the workspace, [BLOCK_M · BLOCK_D]: neighbours, in thread order.

    Chunks of a tile's features follow each other.
    """
    first = (wide(row) * workspace_rows + start) * (D_CHUNKS * BLOCK_D)
    return first + CHUNK * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)


@triton.jit
def _from_wide_thread_order(elements, BLOCK_D: tl.constexpr):
    """Return a tile of the workspace as [64, BLOCK_D], of head dims above 128.

    Its elements go by features eight at a time, then as `_from_thread_order` says of a warp group's threads.
    """
    pieces = tl.reshape(elements, (BLOCK_D // 8, 4, 8, 4, 2, 2))
    return tl.reshape(tl.permute(pieces, (1, 4, 2, 0, 3, 5)), (64, BLOCK_D))


@triton.jit
def _from_thread_order(elements, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tile of the workspace as [BLOCK_M, BLOCK_D].

    It has chunks of 64 rows and 64 features, in the order of a warp group's threads after a product. In a warp they go
    by features eight at a time, then by threads; a thread has two features of two rows that are eight apart.
    """
    pieces = tl.reshape(elements, (BLOCK_M // 64, BLOCK_D // 64, 4, 8, 8, 4, 2, 2))
    return tl.reshape(tl.permute(pieces, (0, 2, 6, 4, 1, 3, 5, 7)), (BLOCK_M, BLOCK_D))


@triton.jit
def _zero_share(ptr, n_elements):
    """Write this program's share of zeros."""
    BLOCK: tl.constexpr = 256
    share = tl.cdiv(n_elements, tl.num_programs(0))
    start = tl.program_id(0) * share
    stop = tl.minimum(start + share, n_elements)
    for first in range(start, stop, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(ptr + offsets, tl.zeros((BLOCK,), tl.float32), offsets < stop)


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "workspace_rows", "n_elements", "n_sums"))
def bwd_preprocess_kernel(
    out,  # descriptors of (B, H, Tq, Dv); gated if there is a gate
    do,
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    dq_accum_ptr,  # the workspaces; zeroed here
    dq_order_ptr,  # a number of each of their tiles; zeroed here; or None
    param_sums_ptr,  # for the gradient of a score mod's parameters; zeroed here; or None
    gate,  # Gate
    grad_gate,  # likewise, of the gradient; written here
    do_ungated,  # descriptor, RowTarget or None: the gradient of the output before the gate; written here
    packed,  # Packed | None
    bounds,  # Bounds
    n_heads,
    n_queries,
    n_keys,
    workspace_rows,  # of each head
    n_elements,  # of a workspace
    n_sums,  # of parameters
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,  # features of a chunk of dQ
    D_CHUNKS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WORKSPACES: tl.constexpr,
    OVERLAPS: tl.constexpr,  # let the next kernel begin, as far as it does not wait; the interpreter cannot
):
    """Write zeros and delta = rowsum(dO · O) - grad_lse of each query, and differentiate the gate."""
    if OVERLAPS:
        gdc_launch_dependents()
    tile, batch, head, sequence = tile_of_program(packed, n_queries, n_heads, BLOCK_M, False)
    row_offsets = wide(batch * n_heads + head) * n_queries
    q_offset, _, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, 0, None)
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    row_offsets += q_offset + m
    out_tile = load_tile(out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_DV)
    do_tile = load_tile(do, batch, head, q_offset + m_start, BLOCK_M, BLOCK_DV)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if gate.ptr is not None:
        exists = m < seqlens.n_queries
        do_tile = differentiate_gate(
            out_tile, do_tile, gate, grad_gate, batch, head, q_offset + m, exists, tl.arange(0, BLOCK_DV)
        )
        store_tile(
            do_ungated,
            do_tile,
            batch,
            head,
            q_offset,
            m_start,
            seqlens.n_queries,
            0,
            BLOCK_M,
            BLOCK_DV,
            packed is not None,
        )
    if grad_lse_ptr is not None:
        attends = tl.load(lse_ptr + row_offsets, m < seqlens.n_queries, other=0.0) > float("-inf")
        delta -= tl.load(grad_lse_ptr + row_offsets, attends & (m < seqlens.n_queries), other=0.0)
    tl.store(delta_ptr + row_offsets, delta, m < seqlens.n_queries)
    start = workspace_start(q_offset, sequence, packed, BLOCK_M) + m_start
    row = batch * n_heads + head
    for chunk in tl.static_range(D_CHUNKS):
        offsets = _workspace_offsets(row, start, workspace_rows, chunk, BLOCK_M, BLOCK_D, D_CHUNKS)
        for workspace in tl.static_range(WORKSPACES):
            tl.store(dq_accum_ptr + workspace * wide(n_elements) + offsets, tl.zeros((BLOCK_M * BLOCK_D,), tl.float32))
    if dq_order_ptr is not None:
        index = (row * workspace_rows + start) // BLOCK_M
        for workspace in tl.static_range(WORKSPACES):
            tl.store(dq_order_ptr + workspace * (n_elements // (BLOCK_M * BLOCK_D * D_CHUNKS)) + index, 0)
    if param_sums_ptr is not None:
        _zero_share(param_sums_ptr, n_sums)


@triton.jit
def _dot_rows(q_tile, dq_tile, exists, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return Σ q · dQ of a tile's rows that exist: NaN in a query that attends nothing shows nowhere.

    Pairs of features are split first: the layout that dQ has of the workspace's order is one over which Triton below
    3.8 reduces wrong.
    """
    q_even, q_odd = tl.split(tl.reshape(q_tile, (BLOCK_M, BLOCK_D // 2, 2)))
    dq_even, dq_odd = tl.split(tl.reshape(dq_tile, (BLOCK_M, BLOCK_D // 2, 2)))
    products = tl.where(dq_even == 0, 0.0, q_even.to(tl.float32) * dq_even)
    products += tl.where(dq_odd == 0, 0.0, q_odd.to(tl.float32) * dq_odd)
    return tl.sum(tl.where(exists, tl.sum(products, 1), 0.0), 0)


@triton.jit(do_not_specialize=(*DO_NOT_SPECIALIZE, "workspace_rows", "n_elements", "workspace"))
def bwd_postprocess_kernel(
    dq_accum_ptr,  # the workspaces
    q,  # descriptor of (B, H, Tq, D), as the backward kernel reads it; None: factor_grads_ptr is, too
    scores,  # Scores, whose parameter is a factor of a head's scores; or None
    factor_grads_ptr,  # (programs,): a program's part of its gradient; or None
    dq,  # descriptor, or RowTarget
    table,  # RopeTable of the queries; None: their gradient is not rotated
    past_table,  # of `Far.q_past`; None: that workspace is not part of this gradient
    future_table,  # of `Far.q_future`, likewise
    packed,  # Packed | None
    bounds,  # Bounds
    grad_scale,
    n_heads,
    n_queries,
    n_keys,
    workspace_rows,
    n_elements,
    workspace,  # the first one of the gradient
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    D_CHUNKS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr,  # wait for the kernel before, beside whose end this one begins; the interpreter cannot
):
    """Store dQ of a tile of queries, from one workspace or from all of them.

    Where the scores are w times others, S, the gradient of w is Σ dS · S, by pairs; as S is w · scale · q · k, that is
    Σ q · dQ / w, by queries. No square has a gradient where w is 0.
    """
    if OVERLAPS:
        gdc_wait()
    tile, batch, head, sequence = tile_of_program(packed, n_queries, n_heads, BLOCK_M, False)
    q_offset, _, _, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, 0, None)
    n_queries = seqlens.n_queries
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    start = workspace_start(q_offset, sequence, packed, BLOCK_M) + m_start
    row = batch * n_heads + head
    dq_accum_ptr += workspace * wide(n_elements)
    total = 0.0
    if D_CHUNKS * BLOCK_D > 128:
        for chunk in tl.static_range(D_CHUNKS):
            offsets = _workspace_offsets(row, start, workspace_rows, chunk, BLOCK_M, BLOCK_D, D_CHUNKS)
            dq_tile = _from_wide_thread_order(tl.load(dq_accum_ptr + offsets), BLOCK_D) * grad_scale
            if factor_grads_ptr is not None:
                q_tile = q.load([batch, head, q_offset + m_start, chunk * BLOCK_D]).reshape(BLOCK_M, BLOCK_D)
                total += _dot_rows(q_tile, dq_tile, m < n_queries, BLOCK_M, BLOCK_D)
            store_tile(
                dq, dq_tile, batch, head, q_offset, m_start, n_queries, chunk, BLOCK_M, BLOCK_D, packed is not None
            )
    else:
        offsets = _workspace_offsets(row, start, workspace_rows, 0, BLOCK_M, BLOCK_D, D_CHUNKS)
        rows = q_offset + m
        rows_end = q_offset + n_queries
        dq_tile = _from_thread_order(tl.load(dq_accum_ptr + offsets), BLOCK_M, BLOCK_D)
        if factor_grads_ptr is not None:
            q_tile = load_tile(q, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D)
            total = _dot_rows(q_tile, dq_tile, m < n_queries, BLOCK_M, BLOCK_D) * grad_scale
        if table is not None:
            dq_tile = inverse_rotate(dq_tile, table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
        if past_table is not None:
            dq_past = _from_thread_order(tl.load(dq_accum_ptr + wide(n_elements) + offsets), BLOCK_M, BLOCK_D)
            dq_tile += inverse_rotate(dq_past, past_table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
        if future_table is not None:
            dq_future = _from_thread_order(tl.load(dq_accum_ptr + 2 * wide(n_elements) + offsets), BLOCK_M, BLOCK_D)
            dq_tile += inverse_rotate(dq_future, future_table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
        dq_tile *= grad_scale
        store_tile(dq, dq_tile, batch, head, q_offset, m_start, n_queries, 0, BLOCK_M, BLOCK_D, packed is not None)
    if factor_grads_ptr is not None:
        factor = tl.load(params_of_head(scores, batch, head))
        total = tl.where(factor == 0, 0.0, total / tl.where(factor == 0, 1.0, factor))
        tl.store(factor_grads_ptr + tl.program_id(0), total)
