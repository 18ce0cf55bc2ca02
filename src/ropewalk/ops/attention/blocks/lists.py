"""Lists of blocks of queries and keys, which `attention` takes as `blocks`.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.ops.attention.blocks import builders
from ropewalk.ops.attention.blocks.builders import check_integer, check_sizes


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

    Lists may be in any order, and name a block twice. They are sorted once, on their device, and their tables are
    cached beside them until they are written to. PyTorch's operations in place are seen. Writes through `.data` or a
    NumPy array, by a kernel of one's own, or by the replay of a CUDA graph are not: make new `BlockLists` after them.

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

    @classmethod
    def causal(
        cls,
        n_queries: int,
        n_keys: int | None = None,
        *,
        block_q: int = 128,
        block_k: int = 128,
        device: torch.device | str | None = None,
    ) -> BlockLists:
        """List what causality leaves, aligned at the bottom right: the same as `causal=True`, without it.

        The same in PyTorch, as a mask: `torch.ones(Tq, Tk, dtype=torch.bool).tril(Tk - Tq)`.

        Args:
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            device: of the lists; the CPU by default.

        Raises:
            TypeError, ValueError: a number of another type, or out of its range.

        Source: FlexAttention's BlockMask (https://arxiv.org/abs/2412.05496).

        Example:
            >>> from ropewalk import BlockLists
            >>> BlockLists.causal(512).full_counts
            tensor([[[0, 1, 2, 3]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        return cls._from_spans(builders.CAUSAL, None, sizes, (0, 0, 0), True, device)

    @classmethod
    def sliding_window(
        cls,
        n_queries: int,
        n_keys: int | None = None,
        *,
        window: int,
        n_sinks: int = 0,
        block_q: int = 128,
        block_k: int = 128,
        device: torch.device | str | None = None,
    ) -> BlockLists:
        """List a causal window, and the first keys of all (StreamingLLM's sinks).

        The same in PyTorch, as a mask::

            ahead = torch.arange(Tk) - torch.arange(Tk - Tq, Tk)[:, None]
            mask = (ahead <= 0) & ((ahead > -window) | (torch.arange(Tk) < n_sinks))

        Args:
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            window: keys that a query attends, its own among them; at least block_q.
            n_sinks: keys that every later query attends, a multiple of block_k.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            device: of the lists; the CPU by default.

        Raises:
            TypeError, ValueError: a number of another type, or out of its range.

        Source: StreamingLLM (https://arxiv.org/abs/2309.17453).

        Example:
            >>> from ropewalk import BlockLists
            >>> BlockLists.sliding_window(1024, window=256, n_sinks=128).full_counts
            tensor([[[0, 1, 2, 2, 2, 2, 2, 2]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        check_integer("window", window, block_q)
        check_integer("n_sinks", n_sinks, 0)
        if n_sinks % block_k:
            raise ValueError(f"n_sinks is {n_sinks}, but must be a multiple of block_k, {block_k}")
        return cls._from_spans(builders.WINDOW, None, sizes, (window - 1, 0, n_sinks), True, device)

    @classmethod
    def documents(
        cls,
        cu_seqlens: Tensor,
        n_tokens: int,
        *,
        causal: bool = True,
        block_q: int = 128,
        block_k: int = 128,
    ) -> BlockLists:
        """List what documents in one row attend of themselves.

        The same in PyTorch, as a mask::

            document = torch.searchsorted(cu_seqlens, torch.arange(n_tokens), right=True)
            mask = (document[:, None] == document) & (document > 0) & (document < len(cu_seqlens))
            if causal:
                mask = mask.tril()

        Args:
            cu_seqlens: (S + 1,), int32 or int64: document s is tokens cu_seqlens[s] to below cu_seqlens[s + 1]. Tokens
                of no document attend nothing. Its values are not checked.
            n_tokens: Tq and Tk.
            causal: let no query attend a later key.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.

        Raises:
            TypeError, ValueError: an argument of another type or shape, or out of its range.

        Source: FlexAttention's document masks (https://pytorch.org/blog/flexattention/).

        Example:
            >>> import torch
            >>> from ropewalk import BlockLists
            >>> BlockLists.documents(torch.tensor([0, 256, 512]), 512, causal=False).full_indices[..., :2]
            tensor([[[[0, 1],
                      [0, 1],
                      [2, 3],
                      [2, 3]]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_tokens, None, block_q, block_k)
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            kind = str(cu_seqlens.dtype) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens is {kind}, but must be a tensor of int32 or int64")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, but must be (S + 1,)")
        bounds = cu_seqlens.contiguous()
        return cls._from_spans(builders.DOCUMENTS, bounds, sizes, (0, 0, 0), bool(causal), cu_seqlens.device)

    @classmethod
    def frames(
        cls,
        n_queries: int,
        n_keys: int | None = None,
        *,
        tokens_per_frame: int,
        behind: int | None = None,
        ahead: int = 0,
        block_q: int = 128,
        block_k: int = 128,
        device: torch.device | str | None = None,
    ) -> BlockLists:
        """List the frames of a video that each frame attends, all tokens of them: its own, and some on either side.

        The same in PyTorch, as a mask::

            frame = torch.arange(Tk) // tokens_per_frame
            apart = frame - frame[Tk - Tq :, None]
            mask = (apart <= ahead) & (apart >= -behind)  # without a bound where behind is None

        Args:
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            tokens_per_frame: tokens of a frame.
            behind: earlier frames that a frame attends; None for all.
            ahead: later frames that a frame attends; 0 is causal by frame.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            device: of the lists; the CPU by default.

        Raises:
            TypeError, ValueError: a number of another type, or out of its range.

        Source: CausVid (https://arxiv.org/abs/2412.07772), §4.

        Example:
            >>> from ropewalk import BlockLists
            >>> BlockLists.frames(512, tokens_per_frame=256).full_counts
            tensor([[[2, 2, 4, 4]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        check_integer("tokens_per_frame", tokens_per_frame, 1)
        n_frames = -(-sizes.keys // tokens_per_frame)
        if behind is None:
            behind = n_frames
        check_integer("behind", behind, 0)
        check_integer("ahead", ahead, 0)
        numbers = (min(behind, n_frames), tokens_per_frame, min(ahead, n_frames))
        return cls._from_spans(builders.FRAMES, None, sizes, numbers, False, device)

    @classmethod
    def dilated(
        cls,
        n_queries: int,
        n_keys: int | None = None,
        *,
        n_blocks: int,
        dilation: int,
        causal: bool = True,
        block_q: int = 128,
        block_k: int = 128,
        device: torch.device | str | None = None,
    ) -> BlockLists:
        """List each block's own keys, and every so many blocks away n_blocks more; without causality on either side.

        A block of queries has own blocks of keys, those of its tokens by index; how far apart blocks are is counted
        from them. It lists blocks whose distance is a multiple of `dilation`, up to n_blocks times. Inside the own
        blocks causality is the call's: pass `causal=True` there too.

        Args:
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            n_blocks: blocks beside the own ones, to one side.
            dilation: how far they are apart, in blocks.
            causal: list no block whose keys are all later than the queries.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            device: of the lists; the CPU by default.

        Raises:
            TypeError, ValueError: a number of another type, or out of its range.

        Source: Longformer (https://arxiv.org/abs/2004.05150), §3.1, by blocks.

        Example:
            >>> from ropewalk import BlockLists
            >>> BlockLists.dilated(768, n_blocks=2, dilation=2).counts
            tensor([[[1, 1, 2, 2, 3, 3]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        check_integer("n_blocks", n_blocks, 0)
        check_integer("dilation", dilation, 1)
        total = _count_keys(sizes)
        width = min(total, (1 if causal else 2) * n_blocks + 3)
        numbers = builders.Choice(0, n_blocks, dilation, 0, width)
        return cls._chosen(builders.DILATED, None, (1, 1), sizes, numbers, causal, True, device)

    @classmethod
    def big_bird(
        cls,
        n_queries: int,
        n_keys: int | None = None,
        *,
        n_heads: int = 1,
        window: int = 1,
        n_global: int = 1,
        n_random: int = 3,
        seed: int = 0,
        causal: bool = False,
        block_q: int = 128,
        block_k: int = 128,
        device: torch.device | str | None = None,
    ) -> BlockLists:
        """List BigBird's blocks: a window, the first blocks, and random ones.

        Each block lists its own, `window` more on either side, the first n_global blocks, and n_random of the rest,
        which differ by head; the first n_global blocks of queries list all. A seed gives the same blocks on every
        device. Inside blocks causality is the call's: pass `causal=True` there too.

        Args:
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            n_heads: H, or 1 where all heads share lists.
            window: blocks on either side.
            n_global: first blocks, of keys and of queries.
            n_random: random blocks of each block of queries.
            seed: of the random blocks, from 0 to below 2**31.
            causal: list no block whose keys are all later than the queries.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            device: of the lists; the CPU by default.

        Raises:
            TypeError, ValueError: a number of another type, or out of its range.

        Source: BigBird (https://arxiv.org/abs/2007.14062), §2.

        Example:
            >>> from ropewalk import BlockLists
            >>> BlockLists.big_bird(2048, n_random=2).counts
            tensor([[[16,  5,  6,  6,  6,  6,  6,  6,  6,  6,  6,  6,  6,  6,  6,  5]]],
                   dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        check_integer("n_heads", n_heads, 1)
        for name, number in (("window", window), ("n_global", n_global), ("n_random", n_random)):
            check_integer(name, number, 0)
        check_integer("seed", seed, 0, 2**31 - 1)
        numbers = builders.Choice(n_random, window, n_global, seed, _count_keys(sizes))
        return cls._chosen(builders.RANDOM, None, (1, n_heads), sizes, numbers, causal, True, device)

    @classmethod
    def top_k(
        cls,
        scores: Tensor,
        k: int,
        *,
        n_queries: int,
        n_keys: int | None = None,
        causal: bool = False,
        own: bool = False,
        block_q: int = 128,
        block_k: int = 128,
    ) -> BlockLists:
        """List the k blocks of keys with the largest scores, for each block of queries.

        The same in PyTorch, without `causal` and `own`: `indices = scores.topk(k).indices.sort().values`. Of equal
        scores the first ones are taken. The host waits for nothing, and nothing is differentiated.

        Args:
            scores: (B or 1, H or 1, M, N), floating-point. A block with a score of −inf or NaN is never listed.
            k: blocks of a list, at most N.
            n_queries: Tq.
            n_keys: Tk; Tq by default.
            causal: list no block whose keys are all later than the queries. Inside blocks causality is the call's: pass
                `causal=True` there too.
            own: always list the blocks of a block's own tokens by index, as MoBA does; they count among the k.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.

        Raises:
            TypeError, ValueError: an argument of another type or shape, or out of its range.

        Source: MoBA (https://arxiv.org/abs/2502.13189), §2.2.

        Example:
            >>> import torch
            >>> from ropewalk import BlockLists
            >>> scores = torch.tensor([[0.1, 0.3, 0.2], [0.5, 0.4, 0.6]])[None, None]
            >>> BlockLists.top_k(scores, 2, n_queries=256, n_keys=384).indices
            tensor([[[[1, 2],
                      [0, 2]]]], dtype=torch.int32)
        """
        sizes = check_sizes(n_queries, n_keys, block_q, block_k)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            kind = str(scores.dtype) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"scores is {kind}, but must be a floating-point tensor")
        rows, total = -(-sizes.queries // block_q), _count_keys(sizes)
        if scores.ndim != 4 or scores.shape[2:] != (rows, total):
            raise ValueError(
                f"scores has shape {tuple(scores.shape)}, but must be (B or 1, H or 1, M, N) with M = {rows} and "
                f"N = {total}"
            )
        check_integer("k", k, 1, total)
        batch, heads = scores.shape[:2]
        numbers = builders.Choice(k, 0, 0, 0, k)
        return cls._chosen(builders.SCORES, scores.detach(), (batch, heads), sizes, numbers, causal, own, scores.device)

    @classmethod
    def mean_pooled(
        cls,
        q: Tensor,
        k: Tensor,
        n_blocks: int,
        *,
        causal: bool = True,
        block_q: int = 128,
        block_k: int = 128,
        layout: str = "bthd",
    ) -> BlockLists:
        """List the n_blocks blocks of keys whose mean key scores highest with the mean query of a block.

        The same in PyTorch, for `layout="bhtd"`, as many key heads as query heads and whole blocks::

            mean_q, mean_k = q.unflatten(2, (-1, block_q)).mean(3), k.unflatten(2, (-1, block_k)).mean(3)
            lists = BlockLists.top_k(mean_q @ mean_k.mT, n_blocks, n_queries=Tq, n_keys=Tk, causal=causal, own=causal)

        PyTorch computes the means and scores, and one launch lists. The choice is not differentiated.

        Args:
            q: (B, Tq, H, D) for layout "bthd", (B, H, Tq, D) for "bhtd".
            k: (B, Tk, K, D) or (B, K, Tk, D).
            n_blocks: blocks of a list; all where there are fewer.
            causal: list no block whose keys are all later than the queries, and always a block's own. Inside blocks
                causality is the call's: pass `causal=True` there too.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.
            layout: "bthd" or "bhtd".

        Raises:
            TypeError, ValueError: an argument of another type or shape, or out of its range.

        Source: MoBA (https://arxiv.org/abs/2502.13189), §2.2, with one choice for a block of queries.

        Example:
            >>> import torch
            >>> from ropewalk import BlockLists, attention
            >>> q, k, v = torch.randn(1, 512, 4, 64), torch.randn(1, 512, 2, 64), torch.randn(1, 512, 2, 64)
            >>> lists = BlockLists.mean_pooled(q, k, 2)
            >>> lists.counts.shape
            torch.Size([1, 4, 4])
            >>> attention(q, k, v, blocks=lists, causal=True).shape
            torch.Size([1, 512, 4, 64])
        """
        if layout not in ("bthd", "bhtd"):
            raise ValueError(f"layout is {layout!r}, but must be 'bthd' or 'bhtd'")
        for name, x in (("q", q), ("k", k)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                what = f"has {x.ndim} dimensions" if isinstance(x, Tensor) else f"is {type(x).__name__}"
                raise TypeError(f"{name} {what}, but must be a tensor of 4 dimensions")
        tokens, heads = (1, 2) if layout == "bthd" else (2, 1)
        if q.shape[heads] % max(k.shape[heads], 1):
            raise ValueError(f"q has {q.shape[heads]} heads, but they must be a multiple of k's {k.shape[heads]}")
        if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
            raise ValueError(
                f"k has batch {k.shape[0]} and head dim {k.shape[3]}, but must have q's, {q.shape[0]} and {q.shape[3]}"
            )
        check_integer("n_blocks", n_blocks, 1)
        check_sizes(q.shape[tokens], k.shape[tokens], block_q, block_k)

        def pool(x: Tensor, block: int) -> Tensor:
            x = x.detach() if layout == "bhtd" else x.detach().transpose(1, 2)
            missing = -x.shape[2] % block
            sums = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, block)).sum(3, dtype=torch.float32)
            counts = torch.full((sums.shape[2], 1), block, device=x.device)
            counts[-1] -= missing
            means: Tensor = sums / counts
            return means

        mean_q, mean_k = pool(q, block_q), pool(k, block_k)
        scores = (mean_q.unflatten(1, (mean_k.shape[1], -1)) @ mean_k.unsqueeze(2).mT).flatten(1, 2)
        return cls.top_k(
            scores,
            min(n_blocks, scores.shape[3]),
            n_queries=q.shape[tokens],
            n_keys=k.shape[tokens],
            causal=causal,
            own=causal,
            block_q=block_q,
            block_k=block_k,
        )

    @classmethod
    def from_mask(cls, mask: Tensor, *, block_q: int = 128, block_k: int = 128) -> BlockLists:
        """List the blocks in which a mask has a pair; pass the mask beside them, `attention(…, mask=mask, blocks=…)`.

        The same in PyTorch, for whole blocks: `mask.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q)).any(-1)
        .any(3)` is the map of listed blocks.

        Args:
            mask: bool, (B or 1, H or 1, Tq, Tk), True where a query may attend.
            block_q: queries of a block, 64 or 128.
            block_k: keys of a block, 64 or 128.

        Raises:
            TypeError, ValueError: a mask of another dtype or shape; a block of another size.

        Source: FlexAttention's create_block_mask (https://arxiv.org/abs/2412.05496).

        Example:
            >>> import torch
            >>> from ropewalk import BlockLists
            >>> BlockLists.from_mask(torch.eye(256, dtype=torch.bool)[None, None]).indices[..., :1]
            tensor([[[[0],
                      [1]]]], dtype=torch.int32)
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask is {kind}, but must be a bool tensor")
        if mask.ndim != 4 or mask.numel() == 0:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, but must be (B or 1, H or 1, Tq, Tk), not empty")
        check_sizes(mask.shape[2], mask.shape[3], block_q, block_k)
        counts, indices = builders.read_mask(mask, block_q, block_k)
        return cls(counts, indices, None, None, block_q, block_k)

    @classmethod
    def _from_spans(
        cls,
        rule: int,
        bounds: Tensor | None,
        sizes: builders.Sizes,
        numbers: tuple[int, int, int],
        causal: bool,
        device: torch.device | str | None,
    ) -> BlockLists:
        where = torch.device(device or "cpu")
        counts, indices, *full, spans = builders.make_spans(rule, bounds, sizes, numbers, causal, where)
        return cls(counts, indices, full[0], full[1], sizes.block_q, sizes.block_k, spans)

    @classmethod
    def _chosen(
        cls,
        rule: int,
        scores: Tensor | None,
        shape: tuple[int, int],
        sizes: builders.Sizes,
        numbers: builders.Choice,
        causal: bool,
        own: bool,
        device: torch.device | str | None,
    ) -> BlockLists:
        where = torch.device(device or "cpu")
        counts, indices = builders.choose(rule, scores, shape, sizes, numbers, bool(causal), bool(own), where)
        return cls(counts, indices, None, None, sizes.block_q, sizes.block_k)


def _count_keys(sizes: builders.Sizes) -> int:
    """Return how many blocks of keys there are, or raise where they are too many for one program."""
    count = -(-sizes.keys // sizes.block_k)
    if count > builders.MAX_BLOCKS:
        raise ValueError(f"n_keys is {sizes.keys}, but must be at most {builders.MAX_BLOCKS} blocks of {sizes.block_k}")
    return count
