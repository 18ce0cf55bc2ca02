"""Tables of the tokens that a rank reads of each shard, and of where they go, the same on every rank.

Letters: T tokens, n ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from ropewalk.parallel.layout import SequenceLayout


class Part(NamedTuple):
    """Consecutive tokens that one rank reads of a shard."""

    rank: int  # the other side: the shard's owner for a reader, the reader for an owner
    local: int  # the first one's row in the shard
    row: int  # its row among those that the reader reads
    length: int

    @property
    def rows_of_shard(self) -> slice:
        """The tokens in their owner's shard."""
        return slice(self.local, self.local + self.length)

    @property
    def rows(self) -> slice:
        """The tokens among those that the reader reads."""
        return slice(self.row, self.row + self.length)


class Exchange(NamedTuple):
    """The tokens that this rank's queries attend, in rising order, and those that it lends."""

    ranges: tuple[tuple[int, int, int], ...]  # tokens low to below high, from a row on
    n_rows: int  # that this rank reads
    own: tuple[Part, ...]  # of this rank's shard
    read: tuple[Part, ...]  # of others' shards
    lent: tuple[Part, ...]  # to others
    lent_rows: tuple[slice, ...]  # the rows of this shard that any other rank reads
    unlent_rows: tuple[slice, ...]  # those that none does
    is_lent_once: bool  # no row to two ranks
    unread: tuple[tuple[int, slice], ...]  # rows of this shard that a rank does not read
    n_received: int  # the tokens that a rank reads of others, at most
    lengths: tuple[int, ...]  # of the parts that this rank reads, its own among them, by their rows
    places_of_own: tuple[int, ...]  # of its own parts among those
    places_of_read: tuple[int, ...]

    def row_of(self, token: int) -> int:
        """Return the row of a token that this rank reads."""
        return next(row + token - low for low, high, row in reversed(self.ranges) if low <= token)


def find_exchange(layout: SequenceLayout, left: int | None, right: int | None) -> Exchange:
    """Return the exchange where each query attends `left` tokens before it and `right` after it; None: all."""
    found: Exchange | None = layout.tables.get((left, right))
    if found is None:
        found = layout.tables[left, right] = _make(layout, left, right)
    return found


def _make(layout: SequenceLayout, left: int | None, right: int | None) -> Exchange:
    mine = layout.rank
    n_received = 0
    read: list[Part] = []
    lent: list[Part] = []
    unread: list[tuple[int, slice]] = []
    for reader in range(layout.size):
        ranges = _ranges(layout, reader, left, right)
        received = sum(high - low for low, high, _ in ranges)
        received -= sum(length for _, _, length in _overlaps(layout, ranges, reader))
        n_received = max(n_received, received)
        owners = range(layout.size) if reader == mine else (mine,)
        for owner in owners:
            parts = _overlaps(layout, ranges, owner)
            if reader == mine:
                read += [Part(owner, *part) for part in parts]
            else:
                lent += [Part(reader, *part) for part in parts]
            if owner == mine:
                end = 0
                for local, _, length in sorted(parts):
                    if local > end:
                        unread.append((reader, slice(end, local)))
                    end = local + length
                if end < layout.n_local:
                    unread.append((reader, slice(end, layout.n_local)))
    ranges = _ranges(layout, mine, left, right)
    n_rows = ranges[-1][2] + ranges[-1][1] - ranges[-1][0] if ranges else 0
    own = tuple(part for part in read if part.rank == mine)
    others = tuple(part for part in read if part.rank != mine)
    by_row = sorted(read, key=lambda part: part.row)
    places_of_own, places_of_read = (tuple(map(by_row.index, parts)) for parts in (own, others))
    rows, is_lent_once = _merge(lent)
    edges = [0, *(edge for part in rows for edge in (part.start, part.stop)), layout.n_local]
    unlent = tuple(slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True) if edge[0] < edge[1])
    return Exchange(
        tuple(ranges),
        n_rows,
        own,
        others,
        tuple(lent),
        rows,
        unlent,
        is_lent_once,
        tuple(unread),
        n_received,
        tuple(part.length for part in by_row),
        places_of_own,
        places_of_read,
    )


def _merge(lent: list[Part]) -> tuple[tuple[slice, ...], bool]:
    """Return the rows of parts of a shard, and whether no row is in two of them."""
    merged: list[list[int]] = []
    is_once = True
    for start, stop in sorted((part.local, part.local + part.length) for part in lent):
        if merged and start <= merged[-1][1]:
            is_once = is_once and start == merged[-1][1]
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    return tuple(slice(*bounds) for bounds in merged), is_once


def _ranges(layout: SequenceLayout, rank: int, left: int | None, right: int | None) -> list[tuple[int, int, int]]:
    """Return the tokens that a rank attends as ranges that rise, (low, high, row)."""
    merged: list[list[int]] = []
    for run in layout.runs_of(rank):
        low = 0 if left is None else max(0, run.start - left)
        high = layout.n_tokens if right is None else min(layout.n_tokens, run.stop + right)
        if layout.bounds is not None:  # no query attends another document
            documents = layout.documents_in(run.start, run.stop) or [(run.start, run.stop)]
            low, high = max(low, min(run.start, documents[0][0])), min(high, max(run.stop, documents[-1][1]))
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(high, merged[-1][1])
        else:
            merged.append([low, high])
    ranges = []
    row = 0
    for low, high in merged:
        ranges.append((low, high, row))
        row += high - low
    return ranges


def _overlaps(layout: SequenceLayout, ranges: list[tuple[int, int, int]], owner: int) -> list[tuple[int, int, int]]:
    """Return (row in the owner's shard, row of the reader, length) for what ranges have of a shard."""
    found = []
    for low, high, row in ranges:
        for run in layout.runs_of(owner):
            start, stop = max(low, run.start), min(high, run.stop)
            if start < stop:
                found.append((run.local + start - run.start, row + start - low, stop - start))
    return found
