"""Lists of blocks of queries and keys, which `attention` takes as `blocks`.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockLists:
    """List the blocks of keys that each block of queries attends.

    Block i of the queries is queries i · block_q to below (i + 1) · block_q, counted from the first query; blocks of
    keys likewise. M = ⌈Tq / block_q⌉ and N = ⌈Tk / block_k⌉, and the last block may be short. A pair is attended if its
    block is listed and every other mask of the call allows it::

        listed = torch.zeros(B, H, M, N, dtype=torch.bool)
        for b, h, i in itertools.product(range(B), range(H), range(M)):
            listed[b, h, i, indices[b, h, i, : counts[b, h, i]].long()] = True  # and so for the full lists
        mask = listed.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)[:, :, :Tq, :Tk]

    Lists may be in any order, and name a block twice. They are sorted once, on their device, and what was made of them
    is kept beside them until they are written to.

    Args:
        counts: (B or 1, H or 1, M), int32 or int64: how many entries of a row of `indices` count. H is of query heads.
        indices: (B or 1, H or 1, M, n), int32 or int64: blocks of keys, from 0 to N − 1. Entries from the count on are
            never read.
        full_counts: likewise of `full_indices`.
        full_indices: more blocks. They are a promise, for speed alone, that no other mask cuts them: the call's masks
            still act in them.
        block_q: queries of a block, 64 or 128.
        block_k: keys of a block, 64 or 128.
        spans: (B or 1, H or 1, Tq, 2), int32: in blocks of `indices` that `full_indices` does not name, query m attends
            keys from spans[..., m, 0] to below spans[..., m, 1] alone. Full blocks are taken as they are.

    On a GPU no value is checked: a count above n counts as n, and an index of no block is left out.

    Raises:
        TypeError, ValueError: `attention` checks the fields, and raises with the name of the field.

    Source: FlexAttention's BlockMask (https://arxiv.org/abs/2412.05496).

    Example:
        >>> import torch
        >>> from ropewalk import BlockLists, attention
        >>> q = k = v = torch.randn(1, 256, 4, 64)
        >>> counts = torch.tensor([[[1, 2]]])
        >>> indices = torch.tensor([[[[0, -1], [1, 0]]]])  # the second block of queries attends both blocks of keys
        >>> attention(q, k, v, blocks=BlockLists(counts, indices), causal=True).shape
        torch.Size([1, 256, 4, 64])
    """

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None = None
    full_indices: Tensor | None = None
    block_q: int = 128
    block_k: int = 128
    spans: Tensor | None = None
