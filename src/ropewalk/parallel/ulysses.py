"""Attention of whole sequences by some heads on each rank: the method "ulysses".

Letters: B batch, T tokens, H query heads, K key heads, D head dim, n ranks.

Source: DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509), §3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.parallel import shards
from ropewalk.parallel.call import ShardedCall, attend
from ropewalk.schemes.heads import OfHeads


def attend_by_heads(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Exchange tokens for heads, attend, and exchange back."""
    layout, n = call.layout, call.layout.size
    heads, key_heads = call.q.shape[1], call.k.shape[1]
    k, v = call.k, call.v
    if key_heads % n:  # each rank gets the key head of its queries
        k, v = (x.repeat_interleave(n // key_heads, 1) for x in (k, v))
    q, k, v = (shards.split_heads(layout, x) for x in (call.q, k, v))
    mine = heads // n
    first = layout.rank * mine
    sinks = None if call.sinks is None else call.sinks[first : first + mine]
    if call.scheme.has_score_mod():
        call = call._replace(scheme=OfHeads(call.scheme, first, heads))
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": sinks}
    if layout.cu_seqlens is None:
        out, lse = attend(call, q, k, v, **keywords)
    else:
        keywords |= {"cu_seqlens_q": layout.cu_seqlens, "layout": "thd"}
        packed = [attend(call, *(x[row].transpose(0, 1) for x in (q, k, v)), **keywords) for row in range(q.shape[0])]
        out = torch.stack([out.transpose(0, 1) for out, _ in packed])
        lse = torch.stack([lse for _, lse in packed])
    return shards.join_heads(layout, out), shards.join_heads(layout, lse[..., None])[..., 0]
