"""The method of a call of sharded attention, and what each one moves.

Letters: B batch, T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ropewalk.parallel.call import ShardedCall, learned_of
from ropewalk.parallel.exchange import find_exchange
from ropewalk.parallel.gathered import groups_of
from ropewalk.parallel.layout import SequenceLayout, flatten

METHODS = ("gather", "halo", "ulysses", "ring")
_MEMORY_SHARE = 4  # exchanged tensors may take one part in so many of a device's memory
# Of an H200: attention's rate in bfloat16, FLOP/s; of copies between two by NVLink each way, of NCCL's exchanges, of
# links between nodes and of its memory, bytes/s; seconds of an exchange's beginning, and of a launch with what its
# tiles leave idle.
_RATE, _NVLINK, _NCCL, _NETWORK, _MEMORY = 600e12, 350e9, 240e9, 45e9, 3.8e12
_LATENCY, _LAUNCH = 20e-6, 10e-6
_FORWARD_AND_BACKWARD = 3.5  # times the forward's operations
# Attention beside copies is slower by this part of their time: 1.46 ms of them lengthen 9.63 ms to 10.41.
_CONTENTION = 0.5
# Seconds that the host needs for forward and backward: a shorter call is bounded by them. Of four H200s at 16k gather
# and Ulysses took 5.0 ms, where attention takes 3; beside Ulysses within nodes gather took 7.2, and a ring 15.6.
# A halo has a gather's code for one neighbour: its time is that of a gather of two, not measured since that was cut.
_HOST = {"gather": 2.8e-3, "halo": 3.8e-3, "ulysses": 5e-3, "ring": 0.0}
_HOST_OF_RANK = {"gather": 0.55e-3, "halo": 0.0, "ulysses": 0.0, "ring": 7e-3}  # more for each rank
_HOST_WITHIN = 3e-3
_MERGE = 30  # passes over a float32 output that a ring's step costs beside its attention: 23 ms of 436 at 128k on two


@dataclass(frozen=True)
class ContextParallelChoice:
    """The method of a call, why no other one, and its costs on each rank."""

    method: str
    others: dict[str, str]  # a reason for each other method
    bytes_received: int  # by the forward, on the rank that receives the most
    bytes_received_backward: int
    bytes_held: int  # of exchanged tensors, at once
    transfer_ms: float  # of forward and backward, predicted at 350 GB/s, as two H200 copy by NVLink
    compute_ms: float  # of forward and backward, predicted at 600 TFLOP/s
    exposed_ms: float = 0.0  # transfers, copies, launches and the host's time that attention does not hide, predicted
    steps: int = 1  # exchanges of a forward, one after another

    def __str__(self) -> str:
        lines = [
            f"method: {self.method}, in {self.steps} {'step' if self.steps == 1 else 'steps'}",
            f"received: {self.bytes_received / 1e6:.1f} MB forward, "
            f"{self.bytes_received_backward / 1e6:.1f} MB backward",
            f"held: {self.bytes_held / 1e6:.1f} MB of exchanged tensors",
            f"predicted for H200s: {self.transfer_ms:.2f} ms of transfers beside {self.compute_ms:.2f} ms of attention",
            f"predicted exposure: {self.exposed_ms:.2f} ms that attention does not hide",
        ]
        return "\n".join([*lines, *(f"not {name}: {reason}" for name, reason in self.others.items())])


class Cost(NamedTuple):
    """The predicted costs of a method on the busiest rank: bytes, and seconds on H200s."""

    received: int  # by the forward
    received_backward: int
    held: int
    transfer: float  # forward and backward
    exposed: float
    steps: int


class _Sizes(NamedTuple):
    """The sizes of a call on a layout of one dimension."""

    layout: SequenceLayout
    heads: int
    key_heads: int
    bytes_of_q: int  # a shard's, of one head of queries and of the output
    bytes_of_k: int  # of one head of keys and values
    seconds: float  # of attention, forward
    wide: float  # bytes of a sum's number by those of a number
    link: float


def why_not(call: ShardedCall, method: str) -> str | None:
    """Return why a method cannot run a call, beginning with an argument's name; None if it can."""
    reason = _why_not_at_all(call, method)
    if reason is None and method == "ring" and not learned_of(call.scheme):
        params = call.scheme.score_mod_params(call.q.shape[1], call.q.device)
        if params is not None and params.requires_grad:
            return f"position is {type(call.scheme).__name__}, but must hold what it learns in fields of a dataclass"
    return reason


def _why_not_at_all(call: ShardedCall, method: str) -> str | None:
    """Return why a method cannot run a call whatever the scheme learns."""
    layout = call.layout
    if layout.between is not None and layout.within is not None:
        if method == "ulysses":
            return "method is that between nodes on a mesh of two dimensions, and 'ulysses' runs within one"
        reason = _why_not_by_heads(call, layout.within.size)
        return _why_not_at_all(call._replace(layout=layout.between), method) if reason is None else reason
    if method in ("halo", "ring") and torch.compiler.is_compiling():
        return "method is not traced by torch.compile, which has no exchange that depends on the rank"
    if method != "ulysses" and call.dropout_p > 0:
        return f"dropout_p is {call.dropout_p}, but must be 0: each method but 'ulysses' attends a query in parts"
    if method in ("gather", "halo") and layout.kind == "striped":
        return "layout is 'striped', but must be another: its shards have no runs of tokens"
    if method == "halo" and (call.left is None or not (call.causal or call.right is not None)):
        return "window is None on a side, but must bound it"
    return _why_not_by_heads(call, layout.size) if method == "ulysses" else None


def _why_not_by_heads(call: ShardedCall, n: int) -> str | None:
    heads, key_heads = call.q.shape[1], call.k.shape[1]
    if heads % n or (key_heads % n and n % key_heads):
        return f"q has {heads} heads and k {key_heads}, but both must be multiples of {n} ranks, or k's a divisor"
    return None


def flatten_nodes(call: ShardedCall, method: str | None) -> ShardedCall:
    """Return the call to run: over all ranks alike, where no method is named and none between nodes can run it."""
    if call.layout.between is None or method is not None or any(why_not(call, name) is None for name in METHODS):
        return call
    return call._replace(layout=flatten(call.layout))


def choose(call: ShardedCall, method: str | None) -> str:
    """Return the method of a call, or raise."""
    if method is None:
        return _fastest(call)[0]
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be None or one of {', '.join(map(repr, METHODS))}")
    reason = why_not(call, method)
    if reason is not None:
        raise NotImplementedError(f"method is {method!r}, which cannot run the call: {reason}")
    return method


def _fastest(call: ShardedCall) -> tuple[str, str]:
    """Return the method for a call that names none, and why.

    It leaves the least exposed, of those that run the call and whose tensors fit. Ranks find the same one: costs are
    those of the busiest rank.
    """
    layout = call.layout
    shapes = call.q.shape, call.k.shape, call.v.shape, call.q.element_size()
    key = ("costs", *shapes, call.causal, call.left, call.right, call.dropout_p > 0, torch.compiler.is_compiling())
    costs: list[tuple[str, Cost]] | None = layout.tables.get(key)
    if costs is None:
        possible = [(name, predict(call, name)) for name in METHODS if _why_not_at_all(call, name) is None]
        # The first of equal ones; those that do not fit come last, the smallest first.
        costs = sorted(
            possible, key=lambda x: (not _fits(call, x[1]), x[1].exposed if _fits(call, x[1]) else x[1].held)
        )
        layout.tables[key] = costs
    for place, (name, cost) in enumerate(costs):
        if why_not(call, name) is None:
            if len(costs) == 1:
                return name, "no other method runs the call"
            if place + 1 < len(costs) and _fits(call, cost) > _fits(call, costs[place + 1][1]):
                return name, "the exchanged tensors of others would take too much memory"
            return (
                name,
                f"of those that run the call, it leaves the least exposed, {cost.exposed * 1e3:.3f} ms predicted",
            )
    if call.dropout_p > 0:
        raise NotImplementedError(f"dropout_p is {call.dropout_p}, but must be 0: {why_not(call, 'ulysses')}")
    raise NotImplementedError(f"layout is {layout.kind!r}, but must be another: {why_not(call, 'ring')}")


def _fits(call: ShardedCall, cost: Cost) -> bool:
    """Say whether exchanged tensors fit; the answer is the same on equal devices."""
    if call.q.device.type != "cuda":
        return True
    return cost.held < torch.cuda.get_device_properties(call.q.device).total_memory / _MEMORY_SHARE


def explain(call: ShardedCall, method: str | None) -> ContextParallelChoice:
    """Return the method of a call, and why no other one."""
    call = flatten_nodes(call, method)
    taken = choose(call, method)
    cost = predict(call, taken)
    reason = f"{taken!r} was named" if method is not None else f"{taken!r} is taken: {_fastest(call)[1]}"
    others = {}
    for name in METHODS:
        if name == taken:
            continue
        other = why_not(call, name)
        if other is None:
            other = f"{reason}, and {name!r} {predict(call, name).exposed * 1e3:.3f} ms"
        others[name] = other
    compute_ms = _FORWARD_AND_BACKWARD * 1e3 * _seconds(call, call.layout)
    return ContextParallelChoice(
        taken,
        others,
        cost.received,
        cost.received_backward,
        cost.held,
        cost.transfer * 1e3,
        compute_ms,
        cost.exposed * 1e3,
        cost.steps,
    )


def _seconds(call: ShardedCall, layout: SequenceLayout) -> float:
    """Return what attention takes forward."""
    batch, heads, _, head_dim = call.q.shape
    pairs = (layout.between or layout).pairs_per_rank(call.causal, call.left, call.right)
    if layout.within is not None:
        pairs /= layout.within.size
    return 2 * batch * heads * pairs * (head_dim + call.v.shape[3]) / _RATE


def predict(call: ShardedCall, method: str) -> Cost:
    """Predict what a method costs."""
    layout = call.layout
    cost = _predict_on_device(call, method)
    if layout.size == 1:
        return cost
    host = _HOST[method] + _HOST_OF_RANK[method] * (layout.between or layout).size
    if layout.within is not None:
        host += _HOST_WITHIN
    return cost._replace(exposed=max(cost.exposed, host - _FORWARD_AND_BACKWARD * _seconds(call, layout)))


def _predict_on_device(call: ShardedCall, method: str) -> Cost:
    layout = call.layout
    batch, heads, n_local, head_dim = call.q.shape
    key_heads, size = call.k.shape[1], call.k.element_size()
    per_head = batch * n_local * (head_dim + call.v.shape[3]) * size
    wide = max(1.0, 4 / size)
    sizes = _Sizes(layout, heads, key_heads, per_head, per_head, _seconds(call, layout), wide, _NVLINK)
    reach = call.left, 0 if call.causal else call.right
    if layout.between is None or layout.within is None:
        return _predict(sizes, method, reach)
    n = layout.within.size
    swap = _ulysses_cost(sizes, n)
    node_bytes = per_head * n
    sizes = sizes._replace(
        layout=layout.between,
        heads=heads // n,
        key_heads=max(1, key_heads // n),
        bytes_of_q=node_bytes,
        bytes_of_k=node_bytes,
        link=_NETWORK,
    )
    cost = _predict(sizes, method, reach)
    return Cost(
        cost.received + swap.received,
        cost.received_backward + swap.received_backward,
        cost.held + swap.held,
        cost.transfer + swap.transfer,
        cost.exposed + swap.exposed,
        cost.steps + swap.steps,
    )


def _predict(sizes: _Sizes, method: str, reach: tuple[int | None, int | None]) -> Cost:
    if method == "ulysses":
        return _ulysses_cost(sizes, sizes.layout.size)
    if method == "ring":
        return _ring_cost(sizes)
    left, right = reach if method == "halo" else (None, reach[1])
    return _gather_cost(sizes, find_exchange(sizes.layout, left, right).n_received)


def _gather_cost(sizes: _Sizes, n_received: int) -> Cost:
    """Keys and values by groups of heads, one group ahead; in the backward again, and their gradients."""
    n, shard = sizes.layout.size, sizes.bytes_of_k * sizes.key_heads
    received = shard * n_received // sizes.layout.n_local
    groups = groups_of(sizes.key_heads, sizes.seconds * _RATE, received) if n > 1 else 1
    arrival = received / sizes.link / groups
    attention = sizes.seconds / groups
    forward = arrival + (groups - 1) * max(0.0, arrival - attention)
    backward = 2 * arrival + (groups - 1) * max(0.0, 2 * arrival - 2.5 * attention)
    transfer = 3 * received / sizes.link
    slowed = _CONTENTION * max(0.0, transfer - forward - backward)
    copies = (2 * 2 * shard + 2 * shard * (n + 1)) / _MEMORY if n > 1 else 0.0
    launches = 2 * (groups - 1) * _LAUNCH + (3 * _LATENCY if n > 1 else 0.0)
    held = (shard + received) * min(2, groups) // groups + (2 * shard + n * shard if n > 1 else 0)
    exposed = forward + backward + slowed + copies + launches
    return Cost(received, 2 * received, held, transfer, exposed, 1)


def _ulysses_cost(sizes: _Sizes, n: int) -> Cost:
    """Queries, keys, values and the output, and all their gradients: nothing is hidden, and all is reordered."""
    if n == 1:
        return Cost(0, 0, 0, 0.0, 0.0, 1)
    repeats = n // sizes.key_heads if sizes.key_heads % n else 1
    whole = sizes.bytes_of_q * sizes.heads + sizes.bytes_of_k * sizes.key_heads * repeats
    moved = whole * (n - 1) // n
    transfer = 2 * moved / _NCCL
    return Cost(moved, moved, whole, transfer, transfer + 2 * 4 * whole / _MEMORY + 8 * _LATENCY, 2)


def _ring_cost(sizes: _Sizes) -> Cost:
    """Keys and values in hops; gradients of keys, in float32, follow. Outputs are merged in float32."""
    n, shard = sizes.layout.size, sizes.bytes_of_k * sizes.key_heads
    if n == 1:
        return Cost(0, 0, 2 * shard, 0.0, 0.0, 1)
    gradients = int(shard * sizes.wide)
    hop, hop_back = shard / sizes.link, (shard + gradients) / sizes.link
    step = sizes.seconds / n
    hidden = (n - 1) * (max(0.0, hop - step) + max(0.0, hop_back - 2.5 * step)) + gradients / sizes.link
    merged = sizes.bytes_of_q * sizes.heads / 2 * sizes.wide
    copies = (_MERGE * merged * n + 3 * gradients * n) / _MEMORY
    received, back = shard * (n - 1), shard * (n - 1) + gradients * n
    transfer = (received + back) / sizes.link
    slowed = _CONTENTION * max(0.0, transfer - hidden)
    exposed = hidden + slowed + copies + (3 * n - 2) * _LATENCY + 8 * n * _LAUNCH  # a merge is several small kernels
    return Cost(received, back, 2 * shard + 2 * gradients, transfer, exposed, n)
