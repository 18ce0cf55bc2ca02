"""Attention from a rank's runs of queries to keys that were gathered.

Each run attends a range of keys that ends where the run ends, so that `causal`, `window` and default positions mean
what they always do. No log-sum-exp is merged, and nothing is rounded twice.

Letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ropewalk.parallel import shards
from ropewalk.parallel.call import ShardedCall, attend, attend_packed
from ropewalk.parallel.layout import Run


class Source(Protocol):
    """The features that runs attend from and to."""

    def queries(self, rows: slice) -> Tensor:
        """Return local queries, (B, H, n, D)."""

    def keys(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens low to below high, (B, K, n, D)."""


class Result(NamedTuple):
    """The output, (B, H, n, D), and the log-sum-exp of local queries."""

    rows: slice
    out: Tensor
    lse: Tensor


def attend_runs(call: ShardedCall, source: Source) -> Iterator[Result]:
    """Attend from each run, in the order of the shard. Rows of padding are left out."""
    layout = call.layout
    runs = layout.runs_of(layout.rank)
    has_padding = layout.n_local != sum(run.stop - run.start for run in runs)
    if layout.bounds is None and not (has_padding or call.causal or call.has_window or call.reads_positions):
        rows = slice(0, layout.n_local)  # every query attends every key
        yield Result(rows, *attend(call, source.queries(rows), *source.keys(0, layout.n_tokens), sinks=call.sinks))
        return
    for run in runs:
        if layout.bounds is None:
            yield _attend_range(call, source, run, run.start, run.stop, 0, layout.n_tokens)
        else:
            yield from _attend_packed(call, source, run)


def join(call: ShardedCall, results: list[Result]) -> tuple[Tensor, Tensor]:
    """Join results, differentiably, with zeros for the rows of padding."""
    parts: list[tuple[Tensor, Tensor]] = []
    end = 0
    for result in results:
        if result.rows.start > end:
            parts.append(_pad(call, result.rows.start - end))
        parts.append((result.out, result.lse))
        end = result.rows.stop
    if end < call.layout.n_local:
        parts.append(_pad(call, call.layout.n_local - end))
    out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out, lse


def _pad(call: ShardedCall, count: int) -> tuple[Tensor, Tensor]:
    """Return the results of padding tokens: zeros."""
    batch, heads = call.q.shape[:2]
    lse = call.q.new_zeros(batch, heads, count, dtype=shards.accumulator(call.q.dtype))
    return call.q.new_zeros(batch, heads, count, call.v.shape[3]), lse


def _rows(run: Run, start: int, stop: int) -> slice:
    """Return the rows of tokens start to below stop of a run."""
    return slice(run.local + start - run.start, run.local + stop - run.start)


def _attend_range(call: ShardedCall, source: Source, run: Run, start: int, stop: int, begin: int, end: int) -> Result:
    """Attend from tokens start to below stop of a run to their keys, of those from begin to below end."""
    rows = _rows(run, start, stop)
    q = source.queries(rows)
    low = begin if call.left is None else max(begin, start - call.left)
    high = stop if call.causal else end if call.right is None else min(end, stop + call.right)
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": call.sinks}
    if not call.causal and (call.has_window or call.reads_positions):
        keywords["query_starts"] = torch.full((q.shape[0],), start - low, dtype=torch.int64, device=q.device)
    if call.is_two_range and low > begin:
        keywords["positions_q"], keywords["positions_k"] = (
            torch.arange(*bounds, device=q.device)[None] - begin for bounds in ((start, stop), (low, high))
        )
    return Result(rows, *attend(call, q, *source.keys(low, high), **keywords))


def _attend_packed(call: ShardedCall, source: Source, run: Run) -> Iterator[Result]:
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
            yield _attend_documents(call, source, run, start, stop, packed)
            packed, start = [], stop
        stop = min(end, run.stop)
        yield _attend_range(call, source, run, start, stop, begin, end)
        start = stop
    if start < run.stop:
        yield _attend_documents(call, source, run, start, run.stop, packed)


class _Documents(NamedTuple):
    """The bounds of a run's documents, and the keys that they attend."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    low: int
    high: int


def _find_documents(call: ShardedCall, start: int, stop: int, documents: list[tuple[int, int]]) -> _Documents:
    """Return the bounds for tokens start to below stop; cached, because copies to a device take time."""
    key = ("documents", start, stop, call.causal, call.left, call.right)
    found: _Documents | None = call.layout.tables.get(key)
    if found is not None:
        return found
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
    device = call.q.device
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in (bounds_q, bounds_k)
    )
    # A kernel wants a key, if only one that nothing attends.
    found = call.layout.tables[key] = _Documents(cu_seqlens_q, cu_seqlens_k, low, max(high, low + 1))
    return found


def _attend_documents(
    call: ShardedCall, source: Source, run: Run, start: int, stop: int, documents: list[tuple[int, int]]
) -> Result:
    """Attend from tokens start to below stop of a run to their documents; tokens of no document come last."""
    cu_seqlens_q, cu_seqlens_k, low, high = _find_documents(call, start, stop, documents)
    keywords: dict[str, Any] = {"causal": call.causal, "window": call.window, "sinks": call.sinks}
    keywords["cu_seqlens_q"], keywords["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_k
    if call.is_two_range or (call.reads_positions and not call.causal):
        for name, (first, last) in (("positions_q", (start, stop)), ("positions_k", (low, high))):
            keywords[name] = call.layout.positions_at(torch.arange(first, last, device=call.q.device))
    rows = _rows(run, start, stop)
    q, k, v = source.queries(rows), *source.keys(low, high)
    return Result(rows, *attend_packed(call, q, k, v, **keywords))
