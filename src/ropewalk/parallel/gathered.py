"""Attention to keys that are gathered by groups of heads, one group ahead: the methods "gather" and "halo".

While a group is attended, the next one's keys arrive. In the backward the gradients of a group's keys leave while the
next one is differentiated; the parts of all ranks are summed once, at home, in float32.

Letters: B batch, T tokens, H query heads, K key heads, D head dim (Dv of v), G groups of heads, n ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.attention.autograd import find_node
from ropewalk.ops.once import differentiable_once
from ropewalk.parallel import shards
from ropewalk.parallel.call import ShardedCall, attend, learned_of, with_learned
from ropewalk.parallel.exchange import Exchange, find_exchange
from ropewalk.parallel.runs import Result, attend_runs, join
from ropewalk.parallel.transport import Shapes, Transport, Wait, transport_of
from ropewalk.schemes.heads import OfHeads

# A group of fewer operations than these, forward on each rank, is not worth its launches; 0: as many as there may be.
operations_of_group = 4e11
# Nor is one of fewer key heads: the backward is slower then. Nor are groups if keys and values arrive in a smaller part
# of attention's time, by copies at so many bytes/s beside so many FLOP/s.
_KEY_HEADS, _SHARE, _COPIES, _RATE = 8, 0.02, 350e9, 600e12
_MOST_GROUPS = 4
cached_bytes = 256 << 20  # gathered keys and values of at most so many bytes are saved for the backward


def attend_gathered(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Gather the keys that any query attends, and attend them."""
    return _attend(call, find_exchange(call.layout, None, 0 if call.causal else None))


def attend_halo(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Fetch the keys that the window reaches, and attend them."""
    return _attend(call, find_exchange(call.layout, call.left, 0 if call.causal else call.right))


def _attend(call: ShardedCall, exchange: Exchange) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return _attend_traced(call, _Whole(call.q, *shards.gather(call.layout, call.k, call.v)))
    learned = learned_of(call.scheme)
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (call.q, call.k, call.v, call.sinks, *learned)
    )
    groups = _Groups(call, count_groups(call, exchange))
    if not needs_grad or not _is_watched(call, learned):
        tensors = (call.q, call.k, call.v, call.sinks, *learned)
        result: tuple[Tensor, Tensor] = _Overlapped.apply(call, exchange, groups, needs_grad, *tensors)
        return result
    k, v = _Fetch.apply(call, exchange, call.k, call.v)
    return _join_recorded(call, list(attend_runs(call, _Slices(call.q, k, v, exchange))), k, v)


def _attend_traced(call: ShardedCall, whole: _Whole) -> tuple[Tensor, Tensor]:
    """Attend keys of all tokens, where torch.compile traces."""
    results = list(attend_runs(call, whole))
    if results:
        return join(call, results)
    # Padding alone attends too, and its results are dropped. Zeros would do for gradients, but torch.compile finds that
    # those of keys equal those of values, and exchanges them once: other ranks would wait for the second exchange.
    out, lse = attend(call, call.q, *whole.keys(0, 1), sinks=call.sinks)
    valid = call.layout.valid
    return out.where(valid[:, None], 0), lse.where(valid, 0)


def _join_recorded(call: ShardedCall, results: list[Result], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Join results that autograd recorded."""
    out, lse = join(call, results)
    if results:
        return out, lse
    # Nothing is recorded: the others would wait for this rank in their backward.
    learned = learned_of(call.scheme)
    return shards.tie(out, call.q, k, v, *learned, *(() if call.sinks is None else (call.sinks,))), lse


def _is_watched(call: ShardedCall, learned: list[Tensor]) -> bool:
    """Say whether autograd itself must record the attention.

    It must for hooks on what is saved, such as a checkpoint's, and for schemes that learn what is no field of theirs.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    if learned or not call.scheme.has_score_mod():
        return False
    params = call.scheme.score_mod_params(call.q.shape[1], call.q.device)
    return params is not None and params.requires_grad


def count_groups(call: ShardedCall, exchange: Exchange) -> int:
    """Return the number of groups of heads of a call."""
    layout = call.layout
    if layout.size == 1:
        return 1
    batch, heads, _, head_dim = call.q.shape
    head_dims = head_dim + call.v.shape[3]
    operations = 2 * batch * heads * layout.pairs_per_rank(call.causal, call.left, call.right) * head_dims
    n_bytes = exchange.n_received * batch * call.k.shape[1] * head_dims * call.k.element_size()
    return groups_of(call.k.shape[1], operations, n_bytes)


def groups_of(key_heads: int, operations: float, n_bytes: float) -> int:
    """Return the number of groups of so many key heads, where a rank has these operations and receives these bytes."""
    most = _MOST_GROUPS
    if operations_of_group:
        worth = n_bytes / _COPIES / (_SHARE * max(1.0, operations) / _RATE)
        most = int(min(most, key_heads // _KEY_HEADS, operations / operations_of_group, worth))
    return max(count for count in range(1, max(1, most) + 1) if key_heads % count == 0)


class _Whole(NamedTuple):
    """Queries, and keys and values of all tokens."""

    q: Tensor
    k: Tensor
    v: Tensor

    def queries(self, rows: slice) -> Tensor:
        return self.q[:, :, rows]

    def keys(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        return self.k[:, :, low:high], self.v[:, :, low:high]


class _Slices(NamedTuple):
    """Queries, and keys and values of an exchange."""

    q: Tensor
    k: Tensor
    v: Tensor
    exchange: Exchange

    def queries(self, rows: slice) -> Tensor:
        return self.q[:, :, rows]

    def keys(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        row = self.exchange.row_of(low)
        return self.k[:, :, row : row + high - low], self.v[:, :, row : row + high - low]


class _Leaves:
    """The same, each slice a leaf of its own: their gradients come without zeros around them."""

    def __init__(self, slices: _Slices) -> None:
        self.slices = slices
        self.rows_q: list[slice] = []
        self.rows_k: list[slice] = []
        self.q: list[Tensor] = []
        self.kv: list[Tensor] = []

    def queries(self, rows: slice) -> Tensor:
        q = self.slices.queries(rows).detach().requires_grad_()
        self.rows_q.append(rows)
        self.q.append(q)
        return q

    def keys(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        row = self.slices.exchange.row_of(low)
        k, v = (x.detach().requires_grad_() for x in self.slices.keys(low, high))
        self.rows_k.append(slice(row, row + high - low))
        self.kv += [k, v]
        return k, v


class _Groups:
    """The groups of heads of a call, and the memory that holds a group's keys and values.

    A token's keys and values lie side by side, so that one copy moves both.
    """

    def __init__(self, call: ShardedCall, count: int) -> None:
        self.count = count
        self.heads, self.key_heads = call.q.shape[1] // count, call.k.shape[1] // count
        batch, self.dims = call.k.shape[0], (call.k.shape[3], call.v.shape[3])
        self.widths = tuple(batch * self.key_heads * dim for dim in self.dims)
        self.width = sum(self.widths)
        self.batch = batch

    def query_heads(self, index: int) -> slice:
        """Return a group's query heads."""
        return slice(index * self.heads, (index + 1) * self.heads)

    def select(self, call: ShardedCall, index: int) -> ShardedCall:
        """Return the call of a group's query heads; its q, k and v are those of the call."""
        if self.count == 1:
            return call
        heads = self.query_heads(index)
        scheme, n_heads = call.scheme, call.q.shape[1]
        if scheme.has_score_mod():
            scheme = OfHeads(scheme, heads.start, n_heads)
        sinks = None if call.sinks is None else call.sinks[heads]
        return call._replace(q=call.q[:, heads], scheme=scheme, sinks=sinks)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return keys or values, (…, B, heads, dim), of tokens, (…, B · heads · dim)."""
        return x.view(*x.shape[:-1], self.batch, self.key_heads, dim)

    def split_both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (…, B, heads, dim) each, of tokens, (…, numbers)."""
        k, v = x.split_with_sizes(self.widths, -1)
        return self.split(k, self.dims[0]), self.split(v, self.dims[1])

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """Return memory for a group's keys and values, (rows, numbers)."""
        return like.new_empty(rows, self.width)

    def by_group(self, x: Tensor) -> Tensor:
        """Return a view (G, T_local, B, heads, D) of (B, K, T_local, D)."""
        if self.count == 1:
            return x.permute(2, 0, 1, 3)[None]
        grouped: Tensor = x.unflatten(1, (self.count, -1))
        return grouped.permute(1, 3, 0, 2, 4)


class _Fetcher:
    """Fetches the keys and values of groups, in order, one group ahead of the one that is attended."""

    def __init__(
        self, transport: Transport, exchange: Exchange, groups: _Groups, memory: list[Tensor], shelf: _Shelf | None
    ) -> None:
        self.transport, self.exchange, self.groups, self.memory, self.shelf = transport, exchange, groups, memory, shelf
        self.coming: list[Wait] = []

    def start(self, index: int) -> None:
        """Start to fetch a group, if there is such a one."""
        if index < self.groups.count and self.shelf is not None:
            exchange = self.exchange
            pieces = self.memory[index].split_with_sizes(exchange.lengths)
            into = [pieces[place] for place in exchange.places_of_read]
            own = self.shelf.own_rows(index, [pieces[place] for place in exchange.places_of_own])
            later = own if index else []  # beside attention; nothing is attended before the first group
            self.coming.append(self.transport.fetch(index, [into], exchange.read, exchange.lent, later))
            for target, source in own if not index else []:
                target.copy_(source)

    def take(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a group's keys and values, (B, heads, rows, D). The next group is on its way then."""
        self.coming.pop(0)()
        k, v = self.groups.split_both(self.memory[index].data)
        return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


class _Shelf:
    """The memory where others read this rank's keys and values, (G, T_local, numbers), and where it reads its own."""

    def __init__(self, transport: Transport, exchange: Exchange, groups: _Groups, k: Tensor, v: Tensor) -> None:
        self.exchange, self.groups = exchange, groups
        (self.rows,) = transport.shelve([(groups.count, k.shape[2], groups.width)], k.dtype)
        self.kv = [groups.by_group(x) for x in (k, v)]
        n_lent = sum(rows.stop - rows.start for rows in exchange.lent_rows)
        # Where much is lent all is laid out: contiguous rows are copied by fewer launches, and twice as fast.
        self.is_whole = groups.count > 1 or 2 * n_lent >= k.shape[2]
        for shelf, x in zip(groups.split_both(self.rows), self.kv, strict=True):
            if self.is_whole:
                shelf.copy_(x)
                continue
            for rows in exchange.lent_rows:
                shelf[:, rows] = x[:, rows]

    def own_rows(self, index: int, into: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of the rows of this rank's parts, (tokens, numbers), and of what is copied to them."""
        parts = list(zip(into, self.exchange.own, strict=True))
        if self.is_whole:
            shelf = self.rows[index]
            return [(rows, shelf[part.rows_of_shard]) for rows, part in parts]
        kv = [x[index] for x in self.kv]
        return [
            (target, x[part.rows_of_shard])
            for rows, part in parts
            for target, x in zip(self.groups.split_both(rows), kv, strict=True)
        ]


def _release(memory: Tensor) -> None:
    """Give memory back, which views of it keep otherwise."""
    memory.untyped_storage().resize_(0)


def _cat_tokens(xs: list[Tensor]) -> Tensor:
    """Join tensors (B, H, n, dim) by their tokens, in the order (B, T, H, dim)."""
    return torch.cat([x.transpose(1, 2) for x in xs], 1).transpose(1, 2)


def _empty_like_tokens(q: Tensor, dim: int) -> Tensor:
    """Return memory (B, H, T, dim) in the order (B, T, H, dim)."""
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, dim).transpose(1, 2)


class _Overlapped(torch.autograd.Function):
    """Attention to gathered keys. Its forward records each group's graph, and its backward runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ShardedCall,
        exchange: Exchange,
        groups: _Groups,
        needs_grad: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layout = call.layout
        leaves = [x.detach().requires_grad_() for x in learned]
        sinks = None if sinks is None else sinks.detach().requires_grad_(sinks.requires_grad)
        call = call._replace(q=q.detach(), k=k.detach(), v=v.detach(), sinks=sinks)
        call = call._replace(scheme=with_learned(call.scheme, iter(leaves)))
        transport = transport_of(layout)
        shelf = _Shelf(transport, exchange, groups, call.k, call.v)
        transport.open()
        memory = [groups.empty(k, exchange.n_rows)]
        fetcher = _Fetcher(transport, exchange, groups, memory, shelf)
        fetcher.start(0)
        # By the rank that reads the most: where one gathers again in its backward all must lend again.
        n_rows = layout.n_local + exchange.n_received
        is_cached = groups.count * n_rows * groups.width * k.element_size() <= cached_bytes
        is_joined = groups.count == 1 and not layout.has_padding
        if not is_joined:
            out = _empty_like_tokens(q, v.shape[3])
            lse = torch.empty(q.shape[:3], dtype=shards.accumulator(q.dtype), device=q.device)
        if layout.has_padding:
            out.zero_()
            lse.zero_()
        graphs: list[tuple[_Leaves, list[Result]]] = []
        for index in range(groups.count):
            heads = groups.query_heads(index)
            group_k, group_v = fetcher.take(index)
            if index + 1 < groups.count:
                memory.append(groups.empty(k, exchange.n_rows))
                fetcher.start(index + 1)
            with torch.set_grad_enabled(needs_grad):
                group_call = groups.select(call, index)
                source: Any = _Slices(group_call.q, group_k, group_v, exchange)
                source = _Leaves(source) if needs_grad else source
                results = list(attend_runs(group_call, source))
            if is_joined:
                out = _cat_tokens([result.out for result in results])
                lse = torch.cat([result.lse for result in results], 2)
            for result in results if not is_joined else ():
                out[:, heads, result.rows] = result.out
                lse[:, heads, result.rows] = result.lse
            if needs_grad:
                graphs.append((source, results))
            if not is_cached or not needs_grad:
                _release(memory[index])
        if needs_grad:
            ctx.save_for_backward(k, v)
            ctx.call, ctx.exchange, ctx.groups, ctx.graphs = call._replace(k=k[:0], v=v[:0]), exchange, groups, graphs
            ctx.memory, ctx.is_cached, ctx.leaves = memory, is_cached, leaves
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        k, v = ctx.saved_tensors
        call, exchange, groups = ctx.call, ctx.exchange, ctx.groups
        layout, transport = call.layout, transport_of(call.layout)
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        home = _Home(transport, exchange, groups, k, v)
        shelf = None if ctx.is_cached else _Shelf(transport, exchange, groups, k, v)
        fetcher = _Fetcher(transport, exchange, groups, ctx.memory, shelf)
        if ctx.is_cached:
            transport.open_inbox()
        else:
            transport.open()

        def start(index: int) -> None:
            if index < groups.count and not ctx.is_cached:
                memory = ctx.memory[index]
                memory.untyped_storage().resize_(memory.nbytes)
                fetcher.start(index)

        start(0)
        parameters = ctx.leaves + ([call.sinks] if call.sinks is not None and call.sinks.requires_grad else [])
        is_joined = groups.count == 1 and not layout.has_padding
        if not is_joined:
            grad_q = (torch.zeros_like if layout.has_padding else torch.empty_like)(call.q)
        grads_parameters = [torch.zeros_like(x) for x in parameters]
        for index, (source, results) in enumerate(ctx.graphs):
            if not ctx.is_cached:
                fetcher.take(index)
            start(index + 1)
            heads = groups.query_heads(index)
            grads = [
                [None if grad is None else grad[:, heads, result.rows] for grad in (grad_out, grad_lse)]
                for result in results
            ]
            found = _differentiate(source, results, parameters, grads, keeps_graph)
            first = len(source.q)
            last = first + len(source.kv)
            for number, part in enumerate(found[last:]):
                if part is not None:
                    grads_parameters[number] += part
            group_grads_kv = [
                _sum_ranges(source.rows_k, found[first + number : last : 2], exchange.n_rows, x, groups.key_heads)
                for number, x in enumerate((k, v))
            ]
            if not (ctx.is_cached and keeps_graph):
                _release(ctx.memory[index])
            home.send(index, group_grads_kv)  # before the copies below: transfers take longer
            grads_of_runs = found[:first]
            if is_joined:
                grad_q = _cat_tokens(
                    [torch.zeros_like(x) if y is None else y for x, y in zip(source.q, grads_of_runs, strict=True)]
                )
            for rows, part in zip(source.rows_q, grads_of_runs, strict=True) if not is_joined else ():
                grad_q[:, heads, rows] = 0 if part is None else part
        grads_kv = home.collect()
        n_learned = len(ctx.leaves)
        if not keeps_graph:
            ctx.graphs = ctx.memory = None  # the node lives as long as the output
        grad_sinks = grads_parameters[n_learned] if len(grads_parameters) > n_learned else None
        return None, None, None, None, grad_q, *grads_kv, grad_sinks, *grads_parameters[:n_learned]


def _differentiate(
    source: _Leaves,
    results: list[Result],
    parameters: list[Tensor],
    grads: list[list[Tensor | None]],
    keeps_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of leaves and parameters by those of each output and its log-sum-exp."""
    inputs = [*source.q, *source.kv, *parameters]
    nodes = [] if parameters else [find_node(result.out, result.lse) for result in results]
    leaves = list(zip(source.q, source.kv[::2], source.kv[1::2], strict=True))
    if nodes and all(map(_reads_leaves_alone, nodes, leaves)):  # the engine would run these alone, and takes longer
        grads_of_runs = [node.apply(*run_grads)[1:4] for node, run_grads in zip(nodes, grads, strict=True)]
        return [*(grad_q for grad_q, *_ in grads_of_runs), *(x for _, *grads_kv in grads_of_runs for x in grads_kv)]
    outputs = [x for result in results for x in (result.out, result.lse)]
    grad_outputs = [grad for run_grads in grads for grad in run_grads]
    outputs = [x for x, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
    grad_outputs = [grad for grad in grad_outputs if grad is not None]
    if not grad_outputs:
        return [None] * len(inputs)
    return list(torch.autograd.grad(outputs, inputs, grad_outputs, keeps_graph, allow_unused=True))


def _reads_leaves_alone(node: Any, leaves: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Say whether a node is that of a call whose q, k and v are these leaves, and which learns nothing."""
    if node is None:
        return False
    read = [following.variable for following, _ in node.next_functions if hasattr(following, "variable")]
    n_followed = sum(following is not None for following, _ in node.next_functions)
    return n_followed == len(read) == 3 and all(x is leaf for x, leaf in zip(read, leaves, strict=True))


class _Home:
    """The gradients of this rank's keys and values, of which every rank that reads them sends a part.

    Parts are summed in float32 and rounded once: two by an addition, more by a sum.
    """

    def __init__(self, transport: Transport, exchange: Exchange, groups: _Groups, k: Tensor, v: Tensor) -> None:
        self.transport, self.exchange, self.groups = transport, exchange, groups
        shapes: Shapes = [(groups.count, k.shape[2], width) for width in groups.widths]
        self.inboxes, has_zeros = transport.inbox(shapes, k.dtype, exchange)
        self.rank = transport.rank
        n_own = sum(part.length for part in exchange.own)
        # One group's own part is a view of the result; several groups' are contiguous, which is copied faster.
        self.is_direct = exchange.is_lent_once and groups.count == 1
        make = torch.zeros_like if self.is_direct and n_own < k.shape[2] else torch.empty_like
        self.grads = [make(x) for x in (k, v)]
        if self.is_direct:
            self.own = [groups.by_group(x) for x in self.grads]
        else:
            self.own = [groups.split(x[self.rank], dim) for x, dim in zip(self.inboxes, groups.dims, strict=True)]
        for reader, rows in exchange.unread if not has_zeros else ():
            if not exchange.is_lent_once or (reader == self.rank and not self.is_direct):
                for inbox in self.inboxes:
                    inbox[reader, :, rows] = 0
        self.leaving: list[tuple[Wait, list[Tensor]]] = []

    def send(self, index: int, parts: list[Tensor]) -> None:
        """Send a group's gradients, (rows, numbers), to those who own the tokens."""
        if len(self.leaving) > 1:  # no more than two groups wait
            self.leaving.pop(0)[0]()
        exchange = self.exchange
        pieces = [x.split_with_sizes(exchange.lengths) for x in parts]
        sent = [[rows[place] for place in exchange.places_of_read] for rows in pieces]
        own = [
            (target[part.rows_of_shard], self.groups.split(rows[place], dim))
            for rows, target, dim in zip(pieces, [x[index] for x in self.own], self.groups.dims, strict=True)
            for part, place in zip(exchange.own, exchange.places_of_own, strict=True)
        ]
        is_last = index + 1 == self.groups.count  # what follows waits for the transfers alone
        wait = self.transport.give(index, sent, exchange.read, exchange.lent, () if is_last else own)
        self.leaving.append((wait, parts))
        for target, source in own if is_last else []:
            target.copy_(source)

    def collect(self) -> list[Tensor]:
        """Return the sums, (B, K, T_local, D)."""
        for wait, _ in self.leaving:
            wait()
        self.transport.close()
        for inbox, grad, own, dim in zip(self.inboxes, self.grads, self.own, self.groups.dims, strict=True):
            parts, total = self.groups.split(inbox, dim), self.groups.by_group(grad)
            if not self.exchange.is_lent_once:
                torch.sum(parts, 0, out=total)
                continue
            for part in self.exchange.lent:
                rows = part.rows_of_shard
                torch.add(own[:, rows], parts[part.rank, :, rows], out=total[:, rows])
            for rows in self.exchange.unlent_rows if not self.is_direct else ():
                total[:, rows] = own[:, rows]
        return self.grads


def _sum_ranges(ranges: list[slice], parts: list[Tensor | None], n_rows: int, like: Tensor, heads: int) -> Tensor:
    """Return the sum of gradients of ranges of rows, (n_rows, B · heads · D), by token."""
    by_token = [(rows, x.permute(2, 0, 1, 3)) for rows, x in zip(ranges, parts, strict=True) if x is not None]
    whole = [x for rows, x in by_token if rows == slice(0, n_rows)]
    if whole and len(by_token) <= 2:  # one rounding of a sum of two
        total = whole[0].contiguous()
        others = [(rows, x) for rows, x in by_token if x is not whole[0]]
    else:
        dtype = shards.accumulator(like.dtype) if len(by_token) > 2 else like.dtype
        total = like.new_zeros(n_rows, like.shape[0], heads, like.shape[3], dtype=dtype)
        others = by_token
    for rows, x in others:
        total[rows].add_(x)
    return total.to(like.dtype).flatten(1)


class _Fetch(torch.autograd.Function):
    """The keys and values of an exchange at once, (B, K, rows, D), for attention that autograd records."""

    @staticmethod
    def forward(ctx: Any, call: ShardedCall, exchange: Exchange, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups = _Groups(call, 1)
        transport = transport_of(call.layout)
        shelf = _Shelf(transport, exchange, groups, k, v)
        transport.open()
        fetcher = _Fetcher(transport, exchange, groups, [groups.empty(k, exchange.n_rows)], shelf)
        fetcher.start(0)
        ctx.save_for_backward(k, v)
        ctx.layout, ctx.exchange, ctx.groups = call.layout, exchange, groups
        whole_k, whole_v = fetcher.take(0)
        return whole_k, whole_v

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        home = _Home(transport_of(ctx.layout), ctx.exchange, ctx.groups, *ctx.saved_tensors)
        home.transport.open()
        home.send(0, [grad.permute(2, 0, 1, 3).contiguous().flatten(1) for grad in grads])
        return None, None, *home.collect()
