"""Scores and probabilities of attention by a position scheme, as `ropewalk.attention` has them.

A score is the log-sum-exp of a query with one key; probabilities are what attention makes of the rows of an identity.
All in float64 on the CPU, by the plain definition that every kernel is tested against: the same numbers everywhere.

Shape letters: P pairs of positions, N pairs of vectors, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.ops.attention.api import attention
from ropewalk.schemes import PositionScheme

ROUNDING = 1e-3  # what is less than this is no effect: tables of cos and sin are rounded to float32, about 1e-7


def draw(*shape: int) -> Tensor:
    """Draw standard normal numbers, the same for the same shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scores_of(position: PositionScheme, q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Return scores (P, N) of queries at positions m (P,) with keys at n (P,); q and k are (N, D), or (P, N, D)."""
    q, k = (x.expand(len(m), *x.shape[-2:])[:, None] for x in (q, k))  # P batch rows of one token and N heads
    _, lse = attention(
        q,
        k,
        torch.zeros_like(k),
        position=position,
        positions_q=m[:, None],
        positions_k=n[:, None],
        return_lse=True,
        impl="reference",
    )
    scores: Tensor = lse[:, :, 0]
    return scores


def probabilities_of(position: PositionScheme, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention probabilities of tokens at 0 to T − 1, (H, T, T); q and k are (T, H, D)."""
    tokens, heads, _ = k.shape
    v = torch.eye(tokens, dtype=q.dtype)[:, None].expand(tokens, heads, tokens)
    out: Tensor = attention(q[None], k[None], v[None], position=position, impl="reference")
    return out[0].transpose(0, 1)


def break_sticks(scores: Tensor, order: Tensor) -> Tensor:
    """Break sticks of length 1: each key takes the part sigmoid(score) of the rest."""
    part = scores.gather(-1, order).sigmoid()
    left = torch.cat((torch.ones_like(part[..., :1]), (1 - part).cumprod(-1)[..., :-1]), dim=-1)
    return torch.zeros_like(part).scatter(-1, order, part * left)


def size_of_scores(position: PositionScheme, head_dim: int, m: Tensor, n: Tensor) -> Tensor:
    """Return the root mean square, (P,), of scores of independent features of variance 1; exactly."""
    basis = torch.eye(head_dim, dtype=torch.float64)
    q, k = basis.repeat_interleave(head_dim, 0), basis.repeat(head_dim, 1)
    return scores_of(position, q, k, m, n).square().sum(1).sqrt()


def share_of_nearest(position: PositionScheme, head_dim: int, tokens: int) -> float:
    """Return the mean part of the last token's attention to the nearest quarter of random keys."""
    texts = max(1, (1 << 21) // (tokens * head_dim))
    q, k = draw(texts, 1, 1, head_dim), draw(texts, tokens, 1, head_dim)
    nearest = (torch.arange(tokens) >= tokens - tokens // 4).to(q.dtype)[None, :, None, None].expand(texts, -1, 1, 1)
    at = torch.full((texts, 1), tokens - 1)
    share: Tensor = attention(q, k, nearest, position=position, positions_q=at, impl="reference")
    return float(share.mean())
