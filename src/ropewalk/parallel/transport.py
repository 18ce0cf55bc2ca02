"""Transports of shards: copies through symmetric memory where GPUs can read each other's, else messages.

An exchange has three steps, which all ranks take in the same order: `shelve` keys and values, `open`, and then `fetch`
or `give` parts while attention runs. Copies go by copy engines, which leave the multiprocessors to attention.

Letters: n ranks.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.parallel.exchange import Exchange, Part
from ropewalk.parallel.layout import SequenceLayout

Shapes = list[tuple[int, ...]]
Parts = tuple[Part, ...]
Rows = Sequence[Sequence[Tensor]]  # of each shape, the rows of each part that is read
Pairs = Iterable[tuple[Tensor, Tensor]]  # a target and what is copied to it, on this rank
Wait = Callable[[], None]  # let the current stream, or a CPU, wait until parts have arrived
_TIMEOUT_MS = 600_000  # of ranks that wait for each other
_ALIGNMENT = 256  # bytes
_MOST_ROWS = 256  # lists of views of the ranks' rows that are cached: packed documents are ever-new

symmetric_is_allowed = True  # False: messages everywhere


class Transport(Protocol):
    """A way for the tokens of shards."""

    name: str
    rank: int

    def shelve(self, shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
        """Return memory for what this rank lends; it is this exchange's until the next one but one."""

    def inbox(self, shapes: Shapes, dtype: torch.dtype, exchange: Exchange) -> tuple[list[Tensor], bool]:
        """Return memory for gradients that come, (n, …) each, by the rank that they come from.

        And whether it was the last inbox of the exchange, too: what no rank writes is as it was left then.
        """

    def open(self) -> None:
        """Let others read what was shelved, and write into the inbox."""

    def open_inbox(self) -> None:
        """Let others write into the inbox, where nothing was shelved."""

    def fetch(self, index: int, into: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Start to copy rows of other ranks' shelves at an index, (tokens, …), into those of each part, for each shape.

        own: copies within this rank's memory, which follow.
        """

    def give(self, index: int, grads: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Start to send rows of gradients to the inboxes of those who own the tokens, at an index; own: as above."""

    def close(self) -> None:
        """Wait until every rank's gradients have arrived."""


class OfGroup:
    """A group that is not kept alive: one that outlives its destruction may abort the process at its end."""

    find_group: Callable[[], dist.ProcessGroup | None]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group."""
        group = self.find_group()
        assert group is not None
        return group


class Messages(OfGroup):
    """Point-to-point messages of torch.distributed."""

    name = "messages"

    def __init__(self, layout: SequenceLayout) -> None:
        self.rank, self.device = layout.rank, layout.device
        self.find_group = weakref.ref(layout.group)
        self.ranks = [dist.get_global_rank(layout.group, rank) for rank in range(layout.size)]
        self.size = layout.size
        self.shelves: list[Tensor] = []
        self.inboxes: list[Tensor] = []

    def shelve(self, shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
        """Return new memory."""
        self.shelves = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        return self.shelves

    def inbox(self, shapes: Shapes, dtype: torch.dtype, exchange: Exchange) -> tuple[list[Tensor], bool]:
        """Return new memory."""
        self.inboxes = [torch.empty(self.size, *shape, dtype=dtype, device=self.device) for shape in shapes]
        return self.inboxes, False

    def open(self) -> None:
        """Do nothing: a message waits for its sender."""

    def open_inbox(self) -> None:
        """Do nothing: likewise."""

    def fetch(self, index: int, into: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Send and receive rows."""
        sent = [(shelf[index, part.rows_of_shard], part.rank) for part in lent for shelf in self.shelves]
        received = [(x, part.rank) for part, xs in zip(read, zip(*into, strict=True), strict=True) for x in xs]
        return self._exchange(sent, received, own)

    def give(self, index: int, grads: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Send and receive rows."""
        sent = [(x, part.rank) for part, xs in zip(read, zip(*grads, strict=True), strict=True) for x in xs]
        received = [(inbox[part.rank, index, part.rows_of_shard], part.rank) for part in lent for inbox in self.inboxes]
        return self._exchange(sent, received, own)

    def close(self) -> None:
        """Drop the memory: every message was waited for."""
        self.shelves, self.inboxes = [], []

    def _exchange(self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]], own: Pairs) -> Wait:
        group = self.group
        operations = [dist.P2POp(dist.isend, x, self.ranks[rank], group) for x, rank in sent]
        operations += [dist.P2POp(dist.irecv, x, self.ranks[rank], group) for x, rank in received]
        works = dist.batch_isend_irecv(operations) if operations else []
        for target, source in own:
            target.copy_(source)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class SymmetricMemory(OfGroup):
    """Copies from and to the memory of other GPUs of the host, on a stream of their own.

    Two shelves take turns: a rank that opens an exchange has fetched all of the one before, so that nobody reads a
    shelf that is written again. Memory is allocated by all ranks at once, where a call needs more than any before.
    """

    name = "symmetric memory"

    def __init__(self, layout: SequenceLayout) -> None:
        self.rank, self.size, self.device = layout.rank, layout.size, layout.device
        self.find_group = weakref.ref(layout.group)
        self.turn = 0
        self.shelf_bytes = self.inbox_bytes = 0
        self.peers: list[Tensor] = []  # each rank's memory, as bytes
        self.shelves: list[list[Tensor]] = []  # of each shape, by rank
        self.inboxes: list[list[Tensor]] = []
        self.views: dict[Any, list[list[Tensor]]] = {}
        self.rows: dict[Any, list[list[Tensor]]] = {}  # of the ranks' shelves and inboxes, by part
        self.shelf_key: Any = None
        self.inbox_key: Any = None
        self.last: tuple[Any, Exchange | None] = None, None  # the inbox of the last exchange
        self.is_captured = False  # a graph that is replayed writes into an inbox unseen
        self.is_free = False  # whether ranks have met since they read their inboxes

    def shelve(self, shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
        """Return the shelf whose turn it is."""
        self._reserve(_n_bytes(shapes, dtype), self.inbox_bytes)
        self.turn = 1 - self.turn
        self.shelf_key = (self.turn * self.shelf_bytes, *shapes, dtype)
        self.shelves = self._views(self.shelf_key, shapes, dtype)
        return [views[self.rank] for views in self.shelves]

    def inbox(self, shapes: Shapes, dtype: torch.dtype, exchange: Exchange) -> tuple[list[Tensor], bool]:
        """Return the inbox."""
        shapes = [(self.size, *shape) for shape in shapes]
        self._reserve(self.shelf_bytes, _n_bytes(shapes, dtype))
        self.inbox_key = (2 * self.shelf_bytes, *shapes, dtype)
        self.inboxes = self._views(self.inbox_key, shapes, dtype)
        self.is_captured |= self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        last_key, last_exchange = self.last
        is_last = not self.is_captured and last_key == self.inbox_key and last_exchange is exchange
        self.last = self.inbox_key, exchange
        return [views[self.rank] for views in self.inboxes], is_last

    def open(self) -> None:
        """Wait for the other ranks, on the device."""
        self._meet()
        self.is_free = True

    def open_inbox(self) -> None:
        """Wait for the other ranks, unless they met since they read their inboxes: in the forward of the call."""
        if self.is_captured or not self.is_free:
            self.open()

    def fetch(self, index: int, into: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Copy rows from the ranks' shelves."""
        key = (self.shelf_key, index, read)
        found = self.rows.get(key)
        if found is None:
            found = self._keep(
                key, [[ranks[part.rank][index, part.rows_of_shard] for part in read] for ranks in self.shelves]
            )
        return self._copy([*_pairs(into, found), *own])

    def give(self, index: int, grads: Rows, read: Parts, lent: Parts, own: Pairs = ()) -> Wait:
        """Copy rows to the ranks' inboxes."""
        key = (self.inbox_key, index, read)
        found = self.rows.get(key)
        if found is None:
            rank = self.rank
            found = self._keep(
                key, [[ranks[part.rank][rank, index, part.rows_of_shard] for part in read] for ranks in self.inboxes]
            )
        return self._copy([*_pairs(found, grads), *own])

    def close(self) -> None:
        """Wait for the other ranks, on the device."""
        self._meet()
        self.is_free = False

    def _keep(self, key: Any, found: list[list[Tensor]]) -> list[list[Tensor]]:
        """Keep views of the ranks' rows, and return them."""
        if len(self.rows) >= _MOST_ROWS:
            self.rows.clear()
        self.rows[key] = found
        return found

    def _meet(self) -> None:
        """Let the current stream wait for those of the other ranks."""
        self.handle.barrier(channel=0, timeout_ms=_TIMEOUT_MS)

    def _copy(self, copies: list[tuple[Tensor, Tensor]]) -> Wait:
        """Start to copy, to the first of each pair, beside the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, source in copies:
                target.copy_(source)
            event = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def _reserve(self, shelf_bytes: int, inbox_bytes: int) -> None:
        """Allocate more memory, where it is needed: on all ranks, as their calls are alike."""
        if shelf_bytes <= self.shelf_bytes and inbox_bytes <= self.inbox_bytes:
            return
        self.shelf_bytes, self.inbox_bytes = max(shelf_bytes, self.shelf_bytes), max(inbox_bytes, self.inbox_bytes)
        self.views, self.rows, self.last, self.is_free = {}, {}, (None, None), False
        self.peers = self._allocate(2 * self.shelf_bytes + self.inbox_bytes)

    def _allocate(self, n_bytes: int) -> list[Tensor]:
        """Return the memory of each rank, as bytes."""
        import torch.distributed._symmetric_memory as symm_mem

        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody reads the memory before it
        self.peers = []
        self.memory = symm_mem.empty(n_bytes, dtype=torch.uint8, device=self.device)
        self.handle = symm_mem.rendezvous(self.memory, self.group)
        self.stream = torch.cuda.Stream(self.device)
        return [
            self.memory if rank == self.rank else self.handle.get_buffer(rank, (n_bytes,), torch.uint8, 0)
            for rank in range(self.size)
        ]

    def _views(self, key: Any, shapes: Shapes, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return views of all ranks' memory from an offset on, the key's first, one shape after another."""
        offset = key[0]
        if key not in self.views:
            found: list[list[Tensor]] = []
            for shape in shapes:
                n_bytes = torch.Size(shape).numel() * dtype.itemsize
                found.append([peer[offset : offset + n_bytes].view(dtype).view(shape) for peer in self.peers])
                offset += _round_up(n_bytes)
            self.views[key] = found
        return self.views[key]


def _pairs(targets: Rows, sources: Rows) -> list[tuple[Tensor, Tensor]]:
    """Return the rows of each part with what is copied to them."""
    return [pair for rows in zip(targets, sources, strict=True) for pair in zip(*rows, strict=True)]


def _n_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    return sum(_round_up(torch.Size(shape).numel() * dtype.itemsize) for shape in shapes)


def _round_up(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


# By group, for as long as that lives; whether symmetric memory was allowed.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, Transport]] = weakref.WeakKeyDictionary()


def transport_of(layout: SequenceLayout) -> Transport:
    """Return the transport of a layout's group, the same on each rank. All ranks ask at once."""
    by_allowance = _transports.setdefault(layout.group, {})
    if symmetric_is_allowed not in by_allowance:
        is_symmetric = symmetric_is_allowed and can_copy(layout)
        by_allowance[symmetric_is_allowed] = SymmetricMemory(layout) if is_symmetric else Messages(layout)
    return by_allowance[symmetric_is_allowed]


def can_copy(layout: SequenceLayout) -> bool:
    """Say whether each rank's GPU reads the memory of each other one. All ranks ask at once."""
    if layout.device.type != "cuda" or torch.version.hip is not None or layout.size == 1:
        return False
    mine = (socket.gethostname(), layout.device.index, _has_symmetric_memory())
    every: list[Any] = [None] * layout.size
    dist.all_gather_object(every, mine, group=layout.group)
    hosts, devices = {host for host, *_ in every}, {device for _, device, _ in every}
    can = all(has for *_, has in every) and len(hosts) == 1 and len(devices) == layout.size
    can = can and all(
        device == layout.device.index
        or (device < torch.cuda.device_count() and torch.cuda.can_device_access_peer(layout.device.index, device))
        for device in devices
    )
    dist.all_gather_object(every, can, group=layout.group)
    return all(every)


def _has_symmetric_memory() -> bool:
    try:
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError:
        return False
    return hasattr(symm_mem, "rendezvous") and hasattr(symm_mem, "empty")
