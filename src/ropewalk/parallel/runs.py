"""Attention from a rank's runs of queries to keys that were gathered: the methods "gather" and "halo".

Each run attends a range of keys that ends where the run ends, so that `causal`, `window` and default positions mean
what they always do. No log-sum-exp is merged, and nothing is rounded twice.

Letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.parallel import shards
from ropewalk.parallel.call import ShardedCall, attend, learned_of
from ropewalk.parallel.layout import Run


class Keys(NamedTuple):
    """Keys and values that a rank gathered, (B, K, n, D)."""

    k: Tensor
    v: Tensor
    indices: Tensor | None = None  # the tokens that they are of, rising, on the CPU; None: all of the sequence

    def range(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return those of tokens low to below high."""
        first = low if self.indices is None else int(torch.searchsorted(self.indices, low))
        rows = slice(first, first + high - low)
        return self.k[:, :, rows], self.v[:, :, rows]


def attend_gathered(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Gather all keys, and attend them."""
    return _attend_runs(call, Keys(*shards.gather(call.layout, call.k, call.v)))


def attend_halo(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Fetch the keys that the window reaches from other ranks, and attend them."""
    halo = shards.find_halo(call.layout, call.left, 0 if call.causal else call.right)
    k, v = shards.fetch(call.layout, halo, call.k, call.v)
    return _attend_runs(call, Keys(k, v, halo.needed))


def _attend_runs(call: ShardedCall, keys: Keys) -> tuple[Tensor, Tensor]:
    """Attend each run, and fill in rows of padding."""
    q, layout = call.q, call.layout
    runs = layout.runs_of(layout.rank)
    has_padding = layout.n_local != sum(run.stop - run.start for run in runs)
    if layout.bounds is None and not (has_padding or call.causal or call.has_window or call.reads_positions):
        return attend(call, q, keys.k, keys.v, sinks=call.sinks)  # every query attends every key
    parts: list[tuple[Tensor, Tensor]] = []
    end = 0
    for run in runs:
        if run.local > end:
            parts.append(_pad(call, run.local - end))
        if layout.bounds is None:
            parts.append(_attend_range(call, q[:, :, run.rows], run.start, run.stop, 0, layout.n_tokens, keys))
        else:
            parts += _attend_packed(call, run, keys)
        end = run.rows.stop
    if end < layout.n_local:
        parts.append(_pad(call, layout.n_local - end))
    out, lse = (torch.cat(results, 2) for results in zip(*parts, strict=True))
    if not runs:
        sinks = () if call.sinks is None else (call.sinks,)
        out = shards.tie(out, q, keys.k, keys.v, *learned_of(call.scheme), *sinks)
    return out, lse


def _pad(call: ShardedCall, count: int) -> tuple[Tensor, Tensor]:
    """Return the results of padding tokens: zeros."""
    batch, heads = call.q.shape[:2]
    lse = call.q.new_zeros(batch, heads, count, dtype=shards.accumulator(call.q.dtype))
    return call.q.new_zeros(batch, heads, count, call.v.shape[3]), lse


def _attend_range(
    call: ShardedCall, q: Tensor, start: int, stop: int, begin: int, end: int, keys: Keys
) -> tuple[Tensor, Tensor]:
    """Attend from tokens start to below stop to their keys, of those from begin to below end."""
    low = begin if call.left is None else max(begin, start - call.left)
    high = stop if call.causal else end if call.right is None else min(end, stop + call.right)
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": call.sinks}
    if not call.causal and (call.has_window or call.reads_positions):
        keywords["query_starts"] = torch.full((q.shape[0],), start - low, dtype=torch.int64, device=q.device)
    if call.is_two_range and low > begin:
        keywords["positions_q"], keywords["positions_k"] = (
            torch.arange(*bounds, device=q.device)[None] - begin for bounds in ((start, stop), (low, high))
        )
    return attend(call, q, *keys.range(low, high), **keywords)


def _attend_packed(call: ShardedCall, run: Run, keys: Keys) -> Iterator[tuple[Tensor, Tensor]]:
    """Attend the keys of the documents of a run.

    Documents that are whole, or end where the run ends, go packed. The window of others is not aligned at the bottom
    right: they go one by one.
    """
    documents = call.layout.documents_in(run.start, run.stop)
    start = run.start
    packed: list[tuple[int, int]] = []
    for begin, end in documents:
        is_cut = begin < run.start or end > run.stop
        if not (is_cut and call.has_window and not call.causal):
            packed.append((begin, end))
            continue
        if packed:
            stop = packed[-1][1]
            yield _attend_documents(call, run, start, stop, packed, keys)
            packed, start = [], stop
        stop = min(end, run.stop)
        rows = _rows(call.q, run, start, stop)
        yield _attend_range(call, rows, start, stop, begin, end, keys)
        start = stop
    if start < run.stop:
        yield _attend_documents(call, run, start, run.stop, packed, keys)


def _rows(q: Tensor, run: Run, start: int, stop: int) -> Tensor:
    """Return the rows of tokens start to below stop of a run."""
    return q[:, :, run.local + start - run.start : run.local + stop - run.start]


def _attend_documents(
    call: ShardedCall, run: Run, start: int, stop: int, documents: list[tuple[int, int]], keys: Keys
) -> tuple[Tensor, Tensor]:
    """Attend from tokens start to below stop of a run to their documents; tokens of no document come last."""
    bounds_q, bounds_k = [0], [0]
    low = high = start
    for begin, end in documents:
        begin_q, end_q = max(begin, start), min(end, stop)
        begin_k = begin if call.left is None else max(begin, begin_q - call.left)
        end_k = end_q if call.causal else end if call.right is None else min(end, end_q + call.right)
        if len(bounds_q) == 1:
            low = begin_k
        high = end_k
        bounds_q.append(end_q - start)
        bounds_k.append(end_k - low)
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": call.sinks, "layout": "thd"}
    device = call.q.device
    for name, bounds in (("cu_seqlens_q", bounds_q), ("cu_seqlens_k", bounds_k)):
        keywords[name] = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    if call.is_two_range or (call.reads_positions and not call.causal):
        for name, (first, last) in (("positions_q", (start, stop)), ("positions_k", (low, max(high, low + 1)))):
            keywords[name] = call.layout.positions_at(torch.arange(first, last, device=device))
    k, v = keys.range(low, max(high, low + 1))  # a kernel wants a key, if only one that nothing attends
    rows = _rows(call.q, run, start, stop)
    results = [
        attend(call, *(x[row].transpose(0, 1) for x in (rows, k, v)), **keywords) for row in range(call.q.shape[0])
    ]
    return torch.stack([out.transpose(0, 1) for out, _ in results]), torch.stack([lse for _, lse in results])
