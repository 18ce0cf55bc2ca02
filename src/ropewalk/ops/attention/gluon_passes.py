"""What goes before the backward kernel for Hopper, and after it: two passes over the rows of queries.

The kernel's programs have tiles of keys, and add up the gradient of queries in a workspace of float32, in whole
tiles of rows: for each batch and head as many as its queries need, and in a packed batch for each sequence its own.
Where pairs of tokens that are far apart have another encoding, two or three workspaces follow each other: that of near
pairs, that of far ones behind a query, and that of those ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton_sequences import locate_tile, measure_sequence
from ropewalk.ops.attention.triton_tiles import UNSPECIALISED, load_tile, store_tile, turn_back, wide


@triton.jit
def first_row(q_offset, sequence, sequences, BLOCK_M: tl.constexpr):
    """Where a sequence's rows begin in the workspace: room for a tile that is not full is left for each one before."""
    row = 0
    if sequences is not None:
        row = (q_offset // BLOCK_M + tl.maximum(sequence, 0)) * BLOCK_M
    return row


@triton.jit
def _elements_of_tile(
    q_offset, sequence, sequences, batch, head, m_start, n_heads, rows_of_head, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Where a tile's elements lie in the workspace, [BLOCK_M · BLOCK_D]: together, in the order of `_in_rows`."""
    start = first_row(q_offset, sequence, sequences, BLOCK_M) + m_start
    return (wide(batch * n_heads + head) * rows_of_head + start) * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D)


@triton.jit
def _in_rows(elements, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of the workspace, [BLOCK_M, BLOCK_D].

    It has parts of 64 rows and 64 features, and these lie as a warp group's threads have them after a product: of each
    warp, by features eight at a time; then by threads, of which each has two features of two rows eight apart.
    """
    pieces = tl.reshape(elements, (BLOCK_M // 64, BLOCK_D // 64, 4, 8, 8, 4, 2, 2))
    return tl.reshape(tl.permute(pieces, (0, 2, 6, 4, 1, 3, 5, 7)), (BLOCK_M, BLOCK_D))


@triton.jit(do_not_specialize=(*UNSPECIALISED, "rows_of_head", "n_elements"))
def rows_kernel(
    out,  # descriptors of (B, H, Tq, Dv)
    grad_out,
    lse_ptr,  # (B, H, Tq), dense
    grad_lse_ptr,  # likewise; or None
    delta_ptr,  # likewise; written here
    sums_ptr,  # the workspaces; zeroed here
    sequences,  # of a packed batch: pointers to both cu_seqlens and the schedule, and their number; or None
    bounds,  # of a dense one: pointers to key_lengths, key_starts and query_starts; each may be None
    n_heads,
    n_queries,
    n_keys,
    rows_of_head,  # in a workspace
    n_elements,  # of a workspace
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORKSPACES: tl.constexpr,
):
    """Zeros in the workspaces, and for each query what the softmax takes off the gradients of its probabilities."""
    tile, batch, head, sequence = locate_tile(sequences, n_queries, n_heads, BLOCK_M, False)
    row_offsets = wide(batch * n_heads + head) * n_queries
    q_offset, _, n_queries, _, _, _, _ = measure_sequence(sequence, sequences, bounds, n_queries, n_keys)
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    row_offsets += q_offset + m
    outputs = load_tile(out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D)
    cotangents = load_tile(grad_out, batch, head, q_offset + m_start, BLOCK_M, BLOCK_D)
    delta = tl.sum(outputs.to(tl.float32) * cotangents.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        attends = tl.load(lse_ptr + row_offsets, m < n_queries, other=0.0) > float("-inf")
        delta -= tl.load(grad_lse_ptr + row_offsets, attends & (m < n_queries), other=0.0)
    tl.store(delta_ptr + row_offsets, delta, m < n_queries)
    elements = _elements_of_tile(
        q_offset, sequence, sequences, batch, head, m_start, n_heads, rows_of_head, BLOCK_M, BLOCK_D
    )  # fmt: skip
    for workspace in tl.static_range(WORKSPACES):
        tl.store(sums_ptr + workspace * wide(n_elements) + elements, tl.zeros((BLOCK_M * BLOCK_D,), tl.float32))


@triton.jit(do_not_specialize=(*UNSPECIALISED, "rows_of_head", "n_elements", "workspace"))
def finish_kernel(
    sums_ptr,  # the workspaces
    grad_q,  # a place to `store_tile` at
    table,  # of the queries: cos, sin, and the strides of batch and token; None: their gradient is not turned back
    past_table,  # likewise, as they meet far keys behind them; None: that workspace is not for this gradient
    future_table,  # as they meet far keys ahead
    sequences,  # as above
    bounds,
    grad_factor,
    n_heads,
    n_queries,
    n_keys,
    rows_of_head,
    n_elements,
    workspace,  # the first one that the gradient is of
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The gradient of a tile of queries, from one workspace, or from all of them."""
    tile, batch, head, sequence = locate_tile(sequences, n_queries, n_heads, BLOCK_M, False)
    q_offset, _, n_queries, _, _, _, _ = measure_sequence(sequence, sequences, bounds, n_queries, n_keys)
    m_start = tile * BLOCK_M
    m = m_start + tl.arange(0, BLOCK_M)
    elements = _elements_of_tile(
        q_offset, sequence, sequences, batch, head, m_start, n_heads, rows_of_head, BLOCK_M, BLOCK_D
    )  # fmt: skip
    rows = q_offset + m
    rows_end = q_offset + n_queries
    sums_ptr += workspace * wide(n_elements)
    grad_queries = _in_rows(tl.load(sums_ptr + elements), BLOCK_M, BLOCK_D)
    if table is not None:
        grad_queries = turn_back(grad_queries, table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
    if past_table is not None:
        of_past = _in_rows(tl.load(sums_ptr + wide(n_elements) + elements), BLOCK_M, BLOCK_D)
        grad_queries += turn_back(of_past, past_table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
    if future_table is not None:
        of_future = _in_rows(tl.load(sums_ptr + 2 * wide(n_elements) + elements), BLOCK_M, BLOCK_D)
        grad_queries += turn_back(of_future, future_table, batch, rows, rows_end, BLOCK_M, BLOCK_D, R, INTERLEAVED)
    grad_queries *= grad_factor
    store_tile(
        grad_q, grad_queries, batch, head, q_offset, m_start, n_queries, 0, BLOCK_M, BLOCK_D, sequences is not None
    )  # fmt: skip
