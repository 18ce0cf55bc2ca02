"""The tokens of a sequence that each rank of a group holds.

Letters: T tokens, n ranks, S packed documents.
"""

from __future__ import annotations

import bisect
import copy
import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

KINDS = ("zigzag", "contiguous", "striped", "balanced")
_RUN_TOKENS = 2048  # of the shortest runs that "balanced" deals, in a long sequence
_FEWEST_RUNS = 4  # that "balanced" deals to a rank
_IMBALANCE = 0.003  # of the rank with the most work; below it, more runs are not worth their launches


class Run(NamedTuple):
    """Consecutive tokens of a rank: tokens start to below stop of the sequence lie at `local` and after it."""

    local: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """The run's tokens in its rank's shard."""
        return slice(self.local, self.local + self.stop - self.start)


class Within(NamedTuple):
    """The ranks of a node, which share its tokens in their order, and exchange them for heads."""

    group: dist.ProcessGroup
    rank: int
    size: int


class SequenceLayout:
    """Deal the tokens of a sequence to the ranks of a group, each with its position.

    The same in PyTorch, for n ranks and n_tokens that divide::

        pieces = torch.arange(n_tokens).chunk(2 * n)
        indices = torch.cat((pieces[rank], pieces[2 * n - 1 - rank]))  # "zigzag"
        indices = torch.arange(n_tokens).chunk(n)[rank]  # "contiguous"
        indices = torch.arange(rank, n_tokens, n)  # "striped"

    Other lengths are padded at the end, so that each rank has as many tokens.

    Args:
        mesh_or_group: a DeviceMesh of one dimension, or a ProcessGroup. Of a DeviceMesh of two named dimensions the
            first goes between nodes, and the second within one: tokens are dealt to nodes, and each node's shard is cut
            to its ranks.
        n_tokens: T, the length of the whole sequence.
        kind: "zigzag", which gives each rank as much work in causal attention; "contiguous"; "striped"; or "balanced",
            for packed documents: runs of tokens, dealt so that each rank attends about as many pairs.
        cu_seqlens: (S + 1,), int32 or int64, the bounds of packed documents: from 0, never falling, not past n_tokens.
            Documents attend themselves alone, and positions restart in each; a tail past the last bound belongs to
            none. All ranks pass the same. Its values are read, once.

    Attributes:
        indices: (T_local,), int64: each local token's index in the sequence, −1 for padding.
        positions: (T_local,), int64: each local token's position, in its document where there are some; 0 for padding.
        valid: (T_local,), bool: False for padding.
        n_local: T_local, the same on each rank.
        rank, size: this process's rank in the group, and n.

    Raises:
        TypeError: a group, a number or a tensor of another type than said here.
        ValueError: a mesh of more than two dimensions, or of two without names, n_tokens below 1, an unknown kind,
            "balanced" without cu_seqlens, cu_seqlens of other values.

    Source: zigzag is ring-flash-attention's and Llama 3's (https://arxiv.org/abs/2407.21783), §3.3.2; striped is
    https://arxiv.org/abs/2311.09431.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk.parallel import SequenceLayout
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = SequenceLayout(dist.group.WORLD, 6, "contiguous", cu_seqlens=torch.tensor([0, 2, 6]))
        >>> layout.positions.tolist()
        [0, 1, 0, 1, 2, 3]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup,
        n_tokens: int,
        kind: str = "zigzag",
        cu_seqlens: Tensor | None = None,
    ) -> None:
        group, device, between, within = _read_group(mesh_or_group)
        if isinstance(n_tokens, bool) or not isinstance(n_tokens, int):
            raise TypeError(f"n_tokens is {n_tokens!r}, but must be an int")
        if n_tokens < 1:
            raise ValueError(f"n_tokens is {n_tokens}, but must be at least 1")
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, but must be one of {', '.join(map(repr, KINDS))}")
        if kind == "balanced" and cu_seqlens is None:
            raise ValueError("cu_seqlens is None, but kind 'balanced' needs it: it balances documents")
        bounds = None if cu_seqlens is None else _read_bounds(cu_seqlens, n_tokens)
        self.between: SequenceLayout | None = None  # the shards of nodes, on a mesh of two dimensions
        self.within = within
        if between is not None and within is not None:
            self.between = SequenceLayout.__new__(SequenceLayout)
            self.between.between = self.between.within = None
            self.between._deal(between, device, n_tokens, kind, bounds, within.size)
        self._deal(group, device, n_tokens, kind, bounds, 1)

    def _deal(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        n_tokens: int,
        kind: str,
        bounds: tuple[int, ...] | None,
        multiple: int,
    ) -> None:
        """Deal the tokens, in pieces of a multiple of so many tokens."""
        self.group, self.device, self.n_tokens, self.kind, self.bounds = group, device, n_tokens, kind, bounds
        # On the device, so that no call copies them there.
        self.cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
        self.tables: dict[Any, Any] = {}  # what calls derive from the layout, by what it depends on
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.n_local: int
        if self.between is not None and self.within is not None:
            self.n_local = self.between.n_local // self.within.size
            self._runs = [] if kind == "striped" else [self._cut_runs(rank) for rank in range(self.size)]
            self.is_interleaved = False
        else:
            self.is_interleaved = kind == "striped"  # token i of rank r is token r + i · n of the sequence
            self._pieces, piece = _deal(kind, n_tokens, self.size, bounds)
            self._piece = -(-piece // multiple) * multiple
            self.n_local = self._piece * len(self._pieces[0])
            self._runs = [self._find_runs(rank) for rank in range(self.size)]
        self.n_calls = 0  # of sharded attention, but for traced ones
        self.agreed: set[Any] = set()  # kinds of calls of attention that all ranks have run alike
        self.agreed_gathers: set[Any] = set()  # likewise of unshard_sequence
        self.indices = self.indices_of(self.rank).to(device)
        self.valid = self.indices >= 0
        every = torch.cat([self.indices_of(rank) for rank in range(self.size)])
        # The token in each place of all ranks' shards, one after another, (n · T_local,); T for padding.
        self.places = torch.where(every >= 0, every, n_tokens).to(device)
        # The place of each token, (T,).
        self.order = every.new_empty(n_tokens).index_copy_(0, every[every >= 0], (every >= 0).nonzero().flatten())
        self.order = self.order.to(device)
        # Tokens that are none of padding, by rank.
        self.counts = (every >= 0).view(self.size, self.n_local).sum(1).tolist()
        self.positions = torch.where(self.valid, self.positions_at(self.indices.clamp(min=0)), 0)

    def __repr__(self) -> str:
        documents = "" if self.bounds is None else f", {len(self.bounds) - 1} documents"
        return (
            f"SequenceLayout({self.n_tokens} tokens, {self.kind!r}, rank {self.rank} of {self.size}, "
            f"{self.n_local} local tokens{documents})"
        )

    def indices_of(self, rank: int) -> Tensor:
        """Return the indices of a rank's tokens, (T_local,), on the CPU."""
        if self.between is not None and self.within is not None:
            node, place = divmod(rank, self.within.size)
            return self.between.indices_of(node)[place * self.n_local : (place + 1) * self.n_local]
        if self.kind == "striped":
            indices = torch.arange(self.n_local) * self.size + rank
        else:
            starts = torch.tensor(self._pieces[rank])[:, None] * self._piece
            indices = (starts + torch.arange(self._piece)).flatten()
        return torch.where(indices < self.n_tokens, indices, -1)

    def positions_at(self, indices: Tensor) -> Tensor:
        """Return the positions of the tokens at these indices, on the layout's device."""
        bounds = self.cu_seqlens
        return indices if bounds is None else indices - bounds[torch.searchsorted(bounds, indices, right=True) - 1]

    def runs_of(self, rank: int) -> tuple[Run, ...]:
        """Return a rank's tokens as runs that rise; neighbours that meet are one. Not for "striped"."""
        return self._runs[rank]

    def _find_runs(self, rank: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        for place, number in enumerate(self._pieces[rank]):
            start, stop = number * self._piece, min((number + 1) * self._piece, self.n_tokens)
            if start >= stop:
                continue
            if runs and runs[-1].stop == start:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(place * self._piece, start, stop))
        return tuple(runs)

    def _cut_runs(self, rank: int) -> tuple[Run, ...]:
        """Return a rank's part of its node's runs, on a mesh of two dimensions. Not for "striped"."""
        assert self.between is not None
        assert self.within is not None
        node, place = divmod(rank, self.within.size)
        first, end = place * self.n_local, (place + 1) * self.n_local
        runs = []
        for run in self.between.runs_of(node):
            low, high = max(run.local, first), min(run.local + run.stop - run.start, end)
            if low < high:
                runs.append(Run(low - first, run.start + low - run.local, run.start + high - run.local))
        return tuple(runs)

    @property
    def has_padding(self) -> bool:
        """Whether a token of this rank is padding. Not for "striped"."""
        return bool(self.n_local != sum(run.stop - run.start for run in self.runs_of(self.rank)))

    def pairs_per_rank(self, causal: bool, left: int | None, right: int | None) -> float:
        """Return about how many pairs of tokens a rank attends."""
        bounds = (0, self.n_tokens) if self.bounds is None else self.bounds
        pairs = 0.0
        for begin, end in pairwise(bounds):
            length = end - begin
            keys_per_query = length / 2 if causal else length
            if left is not None and (causal or right is not None):
                keys_per_query = min(keys_per_query, left + 1 + (0 if causal else right or 0))
            pairs += length * keys_per_query
        return pairs / self.size

    def documents_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the bounds of the documents that have tokens from start to below stop. None is empty."""
        assert self.bounds is not None
        first = max(0, bisect.bisect_right(self.bounds, start) - 1)
        found = []
        for begin, end in pairwise(self.bounds[first:]):
            if begin >= stop:
                break
            if max(begin, start) < min(end, stop):
                found.append((begin, end))
        return found


def flatten(layout: SequenceLayout) -> SequenceLayout:
    """Return the same shards, whose ranks are not told apart by nodes."""
    found: SequenceLayout | None = layout.tables.get("flat")
    if found is None:
        found = layout.tables["flat"] = copy.copy(layout)
        found.between = found.within = None
        found.tables = {}
    return found


def is_over(layout: SequenceLayout, mesh: DeviceMesh, dims: list[int]) -> bool:
    """Say whether these dimensions of a mesh are those of a layout."""
    groups = [layout.group]
    if layout.between is not None and layout.within is not None:
        groups = [layout.between.group, layout.within.group]
    layout_ranks, mesh_ranks = (
        [dist.get_process_group_ranks(group) for group in xs] for xs in (groups, map(mesh.get_group, dims))
    )
    return layout_ranks == mesh_ranks


def _read_group(
    mesh_or_group: Any,
) -> tuple[dist.ProcessGroup, torch.device, dist.ProcessGroup | None, Within | None]:
    """Return the group, the device of its tensors, and the groups between nodes and within one."""
    between = within = None
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim > 2 or (mesh_or_group.ndim == 2 and not mesh_or_group.mesh_dim_names):
            names = "without names" if mesh_or_group.ndim == 2 else ""
            raise ValueError(
                f"mesh_or_group has {mesh_or_group.ndim} dimensions {names}".rstrip()
                + ", but must have 1, or 2 with names: "
                "pass mesh[name], the dimension that the sequence is sharded over"
            )
        if mesh_or_group.ndim == 2:
            between, inner = mesh_or_group.get_group(0), mesh_or_group.get_group(1)
            within = Within(inner, dist.get_rank(inner), dist.get_world_size(inner))
            group, kind = mesh_or_group._flatten().get_group(), mesh_or_group.device_type
        else:
            group, kind = mesh_or_group.get_group(), mesh_or_group.device_type
    elif isinstance(mesh_or_group, dist.ProcessGroup):
        group = mesh_or_group
        kind = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    else:
        raise TypeError(f"mesh_or_group is {type(mesh_or_group).__name__}, but must be a DeviceMesh or a ProcessGroup")
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return group, device, between, within


def _read_bounds(cu_seqlens: Tensor, n_tokens: int) -> tuple[int, ...]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = str(cu_seqlens.dtype) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is {kind}, but must be a tensor of int32 or int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, but must be (S + 1,)")
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] > n_tokens or any(end < start for start, end in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}, but must start at 0, never fall, and end within "
            f"n_tokens, {n_tokens}"
        )
    return bounds


def _deal(kind: str, n_tokens: int, size: int, bounds: tuple[int, ...] | None) -> tuple[list[list[int]], int]:
    """Return the numbers of each rank's pieces, and the tokens of a piece."""
    if kind == "zigzag":
        return [[rank, 2 * size - 1 - rank] for rank in range(size)], -(-n_tokens // (2 * size))
    if kind != "balanced":
        return [[rank] for rank in range(size)], -(-n_tokens // size)
    assert bounds is not None
    count, most = _FEWEST_RUNS, n_tokens // (size * _RUN_TOKENS)
    while True:
        dealt, piece, imbalance = _deal_runs(n_tokens, size, bounds, count)
        if imbalance < _IMBALANCE or 2 * count > most:
            return dealt, piece
        count *= 2


def _deal_runs(n_tokens: int, size: int, bounds: tuple[int, ...], count: int) -> tuple[list[list[int]], int, float]:
    """Deal so many runs to each rank, the largest first; return how much more than the mean one has to do, too."""
    piece = -(-n_tokens // (size * count))
    areas = [_area(bounds, number * piece, min((number + 1) * piece, n_tokens)) for number in range(size * count)]
    heap = [(0, rank) for rank in range(size)]
    dealt: list[list[int]] = [[] for _ in range(size)]
    for number in sorted(range(size * count), key=lambda number: (-areas[number], number)):
        area, rank = heapq.heappop(heap)
        dealt[rank].append(number)
        if len(dealt[rank]) < count:
            heapq.heappush(heap, (area + areas[number], rank))
    totals = [sum(areas[number] for number in numbers) for numbers in dealt]
    imbalance = max(totals) * size / max(1, sum(totals)) - 1
    return [sorted(numbers) for numbers in dealt], piece, imbalance


def _area(bounds: Sequence[int], start: int, stop: int) -> int:
    """Count the pairs that causal queries from start to below stop attend."""
    first = max(0, bisect.bisect_right(bounds, start) - 1)
    area = 0
    for begin, end in pairwise(bounds[first:]):
        low, high = max(begin, start), min(end, stop)
        if begin >= stop:
            break
        if low < high:
            area += (high - low) * (low + high + 1 - 2 * begin) // 2
    return area
