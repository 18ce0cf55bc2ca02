"""Attention of whole sequences by some heads on each rank: the method "ulysses".

Letters: B batch, T tokens, H query heads, K key heads, D head dim, n ranks.

Source: DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509), §3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ropewalk.parallel import shards
from ropewalk.parallel.call import ShardedCall, attend, attend_packed
from ropewalk.parallel.layout import SequenceLayout, Within
from ropewalk.schemes.heads import OfHeads


def attend_by_heads(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Exchange tokens for heads, attend, and exchange back."""
    layout = call.layout
    return _join(layout, call, *_attend_whole(_split(call, layout)))


def attend_within(
    call: ShardedCall, attend_between: Callable[[ShardedCall], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Exchange tokens for heads within each node, attend between nodes, and exchange back."""
    between, within = call.layout.between, call.layout.within
    assert between is not None
    assert within is not None
    return _join(within, call, *attend_between(_split(call, within)._replace(layout=between)))


def _split(call: ShardedCall, ranks: SequenceLayout | Within) -> ShardedCall:
    """Return the call of this rank's heads."""
    n, heads, key_heads = ranks.size, call.q.shape[1], call.k.shape[1]
    k, v = call.k, call.v
    if key_heads % n:  # each rank gets the key head of its queries
        k, v = (x.repeat_interleave(n // key_heads, 1) for x in (k, v))
    q, k, v = shards.split_heads(ranks, call.q, k, v)
    mine = heads // n
    first = ranks.rank * mine
    sinks = None if call.sinks is None else call.sinks[first : first + mine]
    scheme = OfHeads(call.scheme, first, heads) if call.scheme.has_score_mod() else call.scheme
    return call._replace(q=q, k=k, v=v, sinks=sinks, scheme=scheme)


def _join(ranks: SequenceLayout | Within, call: ShardedCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of this rank's tokens. The log-sum-exp stays that of its heads if nobody reads it."""
    joined = shards.join_heads(ranks, out)
    return joined, shards.join_heads(ranks, lse[..., None])[..., 0] if call.needs_lse else lse


def _attend_whole(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Attend whole sequences."""
    q, k, v, layout = call.q, call.k, call.v, call.layout
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": call.sinks}
    if layout.cu_seqlens is None:
        return attend(call, q, k, v, **keywords)
    return attend_packed(call, q, k, v, cu_seqlens_q=layout.cu_seqlens, **keywords)
