"""Lists of blocks for tests: random ones, and the masks that they stand for, by loops."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ropewalk import BlockLists

JUNK = 2**30  # behind the counts


def draw_lists(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    blocks: tuple[int, int],
    width: int,
    seed: int = 0,
    full: bool = False,
    dtype: torch.dtype = torch.int32,
) -> BlockLists:
    """Random lists in any order, with duplicates, empty rows and junk behind the counts."""
    generator = torch.Generator().manual_seed(seed)
    rows, n_blocks = -(-queries // blocks[0]), -(-keys // blocks[1])

    def draw() -> tuple[Tensor, Tensor]:
        counts = torch.randint(0, width + 1, (batch, heads, rows), generator=generator)
        indices = torch.randint(0, n_blocks, (batch, heads, rows, width), generator=generator)
        indices[torch.arange(width) >= counts[..., None]] = JUNK
        return counts.to(dtype), indices.to(dtype)

    return BlockLists(*draw(), *(draw() if full else (None, None)), *blocks)


def to_device(lists: BlockLists, device: torch.device | str) -> BlockLists:
    """The same lists on a device."""
    tensors = (lists.counts, lists.indices, lists.full_counts, lists.full_indices)
    moved = [None if x is None else x.to(device) for x in tensors]
    spans = None if lists.spans is None else lists.spans.to(device)
    return BlockLists(*moved, lists.block_q, lists.block_k, spans)  # type: ignore[arg-type]


def mark_blocks(counts: Tensor | None, indices: Tensor | None, n_blocks: int) -> Tensor:
    """The map (B, H, M, N) of listed blocks, entry by entry."""
    if counts is None or indices is None:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    marks = torch.zeros(*counts.shape, n_blocks, dtype=torch.bool)
    for b, h, i in itertools.product(*map(range, counts.shape)):
        for entry in range(int(counts[b, h, i])):
            marks[b, h, i, int(indices[b, h, i, entry])] = True
    return marks


def expand_marks(marks: Tensor, blocks: tuple[int, int], queries: int, keys: int) -> Tensor:
    """The mask of pairs (B, H, Tq, Tk) of a map of blocks."""
    if marks.shape[2:] == (1, 1) and (queries, keys) > blocks:
        marks = marks.expand(-1, -1, -(-queries // blocks[0]), -(-keys // blocks[1]))
    return marks.repeat_interleave(blocks[0], 2).repeat_interleave(blocks[1], 3)[:, :, :queries, :keys]


def expand_lists(lists: BlockLists, queries: int, keys: int) -> Tensor:
    """The mask of pairs (B or 1, H or 1, Tq, Tk) that lists stand for."""
    blocks, n_blocks = (lists.block_q, lists.block_k), -(-keys // lists.block_k)
    part = expand_marks(mark_blocks(lists.counts.cpu(), lists.indices.cpu(), n_blocks), blocks, queries, keys)
    if lists.spans is not None:
        start, stop = lists.spans.cpu().unbind(-1)
        n = torch.arange(keys)
        part = part & (n >= start[..., None]) & (n < stop[..., None])
    if lists.full_counts is None or lists.full_indices is None:
        return part
    full = mark_blocks(lists.full_counts.cpu(), lists.full_indices.cpu(), n_blocks)
    return part | expand_marks(full, blocks, queries, keys)
