"""The Triton kernels that make lists of blocks: one launch each, and the host waits for nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.launch.steps import Steps

# The rule of a span, and of a choice of blocks.
CAUSAL, WINDOW, DOCUMENTS, FRAMES = range(4)
SCORES, RANDOM, DILATED = range(3)
_CAUSAL, _WINDOW, _DOCUMENTS, _FRAMES = (tl.constexpr(x) for x in range(4))
_SCORES, _RANDOM = tl.constexpr(0), tl.constexpr(1)
_STRIDES = ("stride_batch", "stride_head", "stride_row", "stride_block")  # of scores
_NEVER, _ALWAYS = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # keys of blocks, beyond those of all scores


@triton.jit(do_not_specialize=("n_queries", "n_keys", "n_blocks", "before", "after", "n_first", "n_bounds"))
def span_kernel(
    counts_ptr,  # (rows,): blocks that spans cut
    indices_ptr,  # (rows, N)
    full_counts_ptr,
    full_indices_ptr,
    spans_ptr,  # (Tq, 2)
    bounds_ptr,  # (n_bounds,), of documents; or None
    n_queries,
    n_keys,
    n_blocks,
    before,  # keys of a window before its query; frames behind
    after,  # tokens of a frame; frames ahead are in n_first
    n_first,
    n_bounds,
    RULE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the spans of one block of queries, the blocks of keys that they cut, and those that all of them hold."""
    row = tl.program_id(0)
    m = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    exists = m < n_queries
    index = m + (n_keys - n_queries)  # the query's entry_index among the keys
    start = tl.zeros((BLOCK_Q,), tl.int32)
    stop = tl.zeros((BLOCK_Q,), tl.int32) + n_keys
    if RULE == _WINDOW:
        start = tl.where(index - before <= n_first, 0, index - before)
    if RULE == _FRAMES:
        frame = tl.where(index >= 0, index // after, -1 - (-1 - index) // after)
        start = (frame - before) * after
        stop = (frame + n_first + 1) * after
    if RULE == _DOCUMENTS:
        start -= 1  # of no document
        stop = tl.zeros((BLOCK_Q,), tl.int32)
        for first in tl.range(0, n_bounds, STEP):
            entry_index = first + tl.arange(0, STEP)
            bound = tl.load(bounds_ptr + entry_index, entry_index < n_bounds, other=0).to(tl.int32)
            bound = tl.minimum(tl.maximum(bound, 0), n_keys)
            begun = (bound[None, :] <= index[:, None]) & (entry_index < n_bounds)[None, :]
            start = tl.maximum(start, tl.max(tl.where(begun, bound[None, :], -1), 1))
            later = tl.where(
                (bound[None, :] > index[:, None]) & (entry_index < n_bounds)[None, :], bound[None, :], 2**30
            )
            least = tl.min(later, 1)
            stop = tl.where((least < 2**30) & ((stop == 0) | (least < stop)), least, stop)
        stop = tl.where((index < 0) | (start < 0), 0, stop)
    if CAUSAL:
        stop = tl.minimum(stop, index + 1)
    start = tl.minimum(tl.maximum(start, 0), n_keys)
    stop = tl.maximum(tl.minimum(tl.maximum(stop, 0), n_keys), start)
    tl.store(spans_ptr + m * 2, start, exists)
    tl.store(spans_ptr + m * 2 + 1, stop, exists)

    attends = exists & (start < stop)
    least_start = tl.min(tl.where(attends, start, n_keys))
    most_stop = tl.max(tl.where(attends, stop, 0))
    most_start = tl.max(tl.where(exists, start, 0))
    least_stop = tl.min(tl.where(exists, stop, n_keys))
    first = least_start // BLOCK_K
    last = tl.maximum(tl.cdiv(most_stop, BLOCK_K), first)
    full = tl.minimum(tl.maximum(tl.cdiv(most_start, BLOCK_K), first), last)
    full_stop = tl.where(least_stop == n_keys, n_blocks, least_stop // BLOCK_K)
    full_stop = tl.minimum(tl.maximum(full_stop, full), last)
    n_before = 0
    if RULE == _WINDOW:  # whole blocks of first keys before the first query; that spans cut them too is no matter
        first_index = row * BLOCK_Q + (n_keys - n_queries)
        n_before = tl.maximum(tl.minimum(n_first // BLOCK_K, (first_index + 1) // BLOCK_K), 0)
    after_first = tl.minimum(tl.maximum(full, n_before), full_stop)
    n_full = n_before + (full_stop - after_first)
    n_cut = (full - first) + (last - full_stop)
    tl.store(counts_ptr + row, n_cut)
    tl.store(full_counts_ptr + row, n_full)
    for step in tl.range(0, n_full, STEP):
        entry = step + tl.arange(0, STEP)
        block = tl.where(entry < n_before, entry, after_first + entry - n_before)
        tl.store(full_indices_ptr + wide(row) * n_blocks + entry, block, entry < n_full)
    for step in tl.range(0, n_cut, STEP):
        entry = step + tl.arange(0, STEP)
        block = tl.where(entry < full - first, first + entry, full_stop + entry - (full - first))
        tl.store(indices_ptr + wide(row) * n_blocks + entry, block, entry < n_cut)


@triton.jit
def _hash(x):
    """Return a hash of int32 numbers, from 0 to 2**31 − 2."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.minimum((x >> 1).to(tl.int32), 2**31 - 2)


@triton.jit(do_not_specialize=("n_queries", "n_keys", "n_rows", "n_blocks", "n_chosen", "near", "n_global", "width"))
def choose_kernel(
    counts_ptr,  # (rows of all heads,)
    indices_ptr,  # (rows of all heads, width)
    scores_ptr,  # (B, H, M, N) of floats; or None
    stride_batch,
    stride_head,
    stride_row,
    stride_block,
    n_heads,
    n_queries,
    n_keys,
    n_rows,
    n_blocks,
    n_chosen,  # blocks of a row; beside those that are always listed, if they are chosen at random
    near,  # blocks on either side of a row's own that are listed always
    n_global,  # first blocks, and rows, that are listed whole; the dilation
    seed,
    width,
    RULE: tl.constexpr,
    CAUSAL: tl.constexpr,
    OWN: tl.constexpr,  # a row's own blocks are listed always
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,  # at least N
):
    """List the blocks of one row with the largest keys, those of equal keys from the first one on."""
    program = tl.program_id(0)
    row = program % n_rows
    head = program // n_rows % n_heads
    batch = program // n_rows // n_heads
    block = tl.arange(0, BLOCK)
    offset = n_keys - n_queries
    first = row * BLOCK_Q + offset
    last = tl.minimum((row + 1) * BLOCK_Q, n_queries) - 1 + offset
    own = tl.maximum(first, 0) // BLOCK_K
    own_last = tl.maximum(last, 0) // BLOCK_K
    is_own = (block >= own) & (block <= own_last) & (last >= 0)
    exists = block < n_blocks
    if CAUSAL:
        exists = exists & (block * BLOCK_K <= last)
    if RULE == _SCORES:
        ptrs = scores_ptr + wide(batch) * stride_batch + wide(head) * stride_head + wide(row) * stride_row
        score = tl.load(ptrs + wide(block) * stride_block, block < n_blocks, other=float("-inf")).to(tl.float32)
        exists = exists & (score > float("-inf"))  # nor NaN
        key = (score + 0.0).to(tl.int32, bitcast=True)
        key = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
        key = tl.minimum(key, 2**31 - 2)
        always = is_own
        if not OWN:
            always = block < 0
        n_wanted = n_chosen
    elif RULE == _RANDOM:
        key = _hash(_hash(_hash(seed + head * 0x3C6EF372) + row) + block)
        distance = tl.maximum(own - block, block - own_last)
        always = (distance <= near) | (block < n_global) | (row < n_global)
    else:
        key = block * 0
        distance = tl.maximum(own - block, 0)
        if not CAUSAL:
            distance = tl.maximum(distance, block - own_last)
        always = (distance % n_global == 0) & (distance // n_global <= near)
    always = always & (block < n_blocks)
    if CAUSAL:
        always = always & (block * BLOCK_K <= last)
    key = tl.where(exists, key, _NEVER)
    key = tl.where(always, _ALWAYS, key)
    n_always = tl.sum(always.to(tl.int32))
    if RULE == _RANDOM:
        n_wanted = n_always + n_chosen
    elif RULE != _SCORES:
        n_wanted = n_always
    n_wanted = tl.minimum(n_wanted, tl.minimum(tl.sum((key > _NEVER).to(tl.int32)), width))
    # The largest bound that so many keys reach, bit by bit; bounds are compared without their sign.
    unsigned = key.to(tl.uint32, bitcast=True) ^ 0x80000000
    bound = tl.zeros((1,), tl.uint32)
    for bit in tl.static_range(32):
        higher = bound + (1 << (31 - bit))
        reach = tl.sum((unsigned >= higher).to(tl.int32))
        bound = tl.where(reach >= n_wanted, higher, bound)
    above = unsigned > bound
    equal = (unsigned == bound) & (key > _NEVER)
    n_equal = n_wanted - tl.sum(above.to(tl.int32))
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= n_equal))
    chosen = chosen & (n_wanted > 0)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(counts_ptr + program, n_wanted)
    tl.store(indices_ptr + wide(program) * width + slot, block, chosen)


@triton.jit(do_not_specialize=("n_queries", "n_keys", "n_rows", "n_blocks"))
def mask_kernel(
    counts_ptr,  # (rows of all heads,)
    indices_ptr,  # (rows of all heads, N)
    mask_ptr,  # (B, H, Tq, Tk) of bytes
    stride_batch,
    stride_head,
    stride_query,
    stride_key,
    n_heads,
    n_queries,
    n_keys,
    n_rows,
    n_blocks,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """List the blocks of one row in which a mask has a pair."""
    program = tl.program_id(0)
    row = program % n_rows
    head = program // n_rows % n_heads
    batch = program // n_rows // n_heads
    m = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mask_ptr += wide(batch) * stride_batch + wide(head) * stride_head
    count = 0
    for block in tl.range(0, n_blocks):
        n = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (m < n_queries)[:, None] & (n < n_keys)[None, :]
        ptrs = mask_ptr + wide(m)[:, None] * stride_query + wide(n)[None, :] * stride_key
        found = tl.max(tl.max(tl.load(ptrs, inside, other=0).to(tl.int32), 1), 0)
        if found != 0:
            tl.store(indices_ptr + wide(program) * n_blocks + count, block)
            count += 1
    tl.store(counts_ptr + program, count)


class SpansCall(NamedTuple):
    """A rule by which spans of keys are found, and its numbers."""

    rule: int
    bounds: Tensor | None
    sizes: tuple[int, int, int, int]  # queries, keys, block_q, block_k
    numbers: tuple[int, int, int]
    causal: bool
    device: torch.device


class ChoiceCall(NamedTuple):
    """A rule by which blocks are chosen, and its numbers."""

    rule: int
    scores: Tensor | None
    shape: tuple[int, int]  # B, H
    sizes: tuple[int, int, int, int]
    numbers: tuple[int, int, int, int, int]
    causal: bool
    own: bool
    device: torch.device


class MaskCall(NamedTuple):
    """A bool mask (B, H, Tq, Tk), and the sizes of blocks."""

    mask: Tensor
    block_q: int
    block_k: int


def _empty(like: Tensor | None, device: torch.device, *shape: int) -> Tensor:
    """Allocate a result; in a plan, tensors have no memory."""
    return torch.empty(shape, dtype=torch.int32, device=device if like is None else like.device)


def make_spans(call: SpansCall, on: Steps) -> list[Tensor]:
    """Return counts and indices of blocks that spans cut, those of full ones, and the spans."""
    bounds, (n_queries, n_keys, block_q, block_k) = call.bounds, call.sizes
    rows, n_blocks = triton.cdiv(n_queries, block_q), triton.cdiv(n_keys, block_k)
    shapes = {"counts_ptr": (rows,), "indices_ptr": (rows, n_blocks), "full_counts_ptr": (rows,)}
    shapes |= {"full_indices_ptr": (rows, n_blocks), "spans_ptr": (n_queries, 2)}
    made = {name: _empty(bounds, call.device, 1, 1, *shape) for name, shape in shapes.items()}
    on.launch(
        span_kernel,
        rows,
        **made,
        bounds_ptr=bounds,
        n_queries=n_queries,
        n_keys=n_keys,
        n_blocks=n_blocks,
        **dict(zip(("before", "after", "n_first"), call.numbers, strict=True)),
        n_bounds=0 if bounds is None else bounds.shape[0],
        RULE=call.rule,
        CAUSAL=call.causal,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        STEP=128,
        num_warps=4,
    )
    return list(made.values())


def choose(call: ChoiceCall, on: Steps) -> list[Tensor]:
    """Return counts and indices of chosen blocks, (B, H, M) and (B, H, M, width), sorted."""
    scores, (n_queries, n_keys, block_q, block_k) = call.scores, call.sizes
    rows, n_blocks = triton.cdiv(n_queries, block_q), triton.cdiv(n_keys, block_k)
    *_, width = call.numbers
    strides: tuple[Any, ...] = (0, 0, 0, 0) if scores is None else scores.stride()
    counts = _empty(scores, call.device, *call.shape, rows)
    indices = _empty(scores, call.device, *call.shape, rows, width)
    block = max(32, triton.next_power_of_2(n_blocks))
    on.launch(
        choose_kernel,
        counts.numel(),
        counts_ptr=counts,
        indices_ptr=indices,
        scores_ptr=scores,
        **dict(zip(_STRIDES, strides, strict=True)),
        n_heads=counts.shape[1],
        n_queries=n_queries,
        n_keys=n_keys,
        n_rows=rows,
        n_blocks=n_blocks,
        **dict(zip(("n_chosen", "near", "n_global", "seed", "width"), call.numbers, strict=True)),
        RULE=call.rule,
        CAUSAL=call.causal,
        OWN=call.own,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK=block,
        num_warps=1 if block <= 512 else 8,
    )
    return [counts, indices]


def read_mask(call: MaskCall, on: Steps) -> list[Tensor]:
    """Return counts and indices of the blocks in which a mask has a pair."""
    mask, block_q, block_k = call
    batch, heads, n_queries, n_keys = mask.shape
    rows, n_blocks = triton.cdiv(n_queries, block_q), triton.cdiv(n_keys, block_k)
    counts = _empty(mask, mask.device, batch, heads, rows)
    indices = _empty(mask, mask.device, batch, heads, rows, n_blocks)
    on.launch(
        mask_kernel,
        counts.numel(),
        counts_ptr=counts,
        indices_ptr=indices,
        mask_ptr=mask.view(torch.uint8),
        **dict(zip(("stride_batch", "stride_head", "stride_query", "stride_key"), mask.stride(), strict=True)),
        n_heads=heads,
        n_queries=n_queries,
        n_keys=n_keys,
        n_rows=rows,
        n_blocks=n_blocks,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return [counts, indices]


SPANS = Operation(SpansCall, lambda call: make_spans)
CHOICE = Operation(ChoiceCall, lambda call: choose)
MASK = Operation(MaskCall, lambda call: read_mask)
