"""The method of a call of sharded attention, and what each one moves.

Letters: B batch, T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropewalk.parallel.call import ShardedCall, learned_of
from ropewalk.parallel.exchange import find_exchange

METHODS = ("gather", "halo", "ulysses", "ring")
# With more ranks and fewer tokens on each, Ulysses' transfers take less time than gather's: predicted, not measured.
_FEW_RANKS, _SHORT = 4, 8192
_MEMORY_SHARE = 4  # gathered keys and values may take one part in so many of a device's memory
_BANDWIDTH, _RATE = 350e9, 600e12  # bytes/s each way between two H200 by copies, FLOP/s of attention in bfloat16


@dataclass(frozen=True)
class ContextParallelChoice:
    """The method of a call, why no other one, and its costs on each rank."""

    method: str
    others: dict[str, str]  # a reason for each other method
    bytes_received: int  # by the forward
    bytes_received_backward: int
    bytes_held: int  # of exchanged tensors, at once
    transfer_ms: float  # of forward and backward, predicted at 350 GB/s, as two H200 copy by NVLink
    compute_ms: float  # of forward and backward, predicted at 600 TFLOP/s

    def __str__(self) -> str:
        lines = [
            f"method: {self.method}",
            f"received: {self.bytes_received / 1e6:.1f} MB forward, "
            f"{self.bytes_received_backward / 1e6:.1f} MB backward",
            f"held: {self.bytes_held / 1e6:.1f} MB of exchanged tensors",
            f"predicted for H200s: {self.transfer_ms:.2f} ms of transfers beside {self.compute_ms:.2f} ms of attention",
        ]
        return "\n".join([*lines, *(f"not {name}: {reason}" for name, reason in self.others.items())])


def why_not(call: ShardedCall, method: str) -> str | None:
    """Return why a method cannot run a call, beginning with an argument's name; None if it can."""
    layout = call.layout
    if layout.between is not None and layout.within is not None:
        if method == "ulysses":
            return "method is that between nodes on a mesh of two dimensions, and 'ulysses' runs within one"
        reason = _why_not_by_heads(call, layout.within.size)
        return why_not(call._replace(layout=layout.between), method) if reason is None else reason
    if method in ("halo", "ring") and torch.compiler.is_compiling():
        return "method is not traced by torch.compile, which has no exchange that depends on the rank"
    if method != "ulysses" and call.dropout_p > 0:
        return f"dropout_p is {call.dropout_p}, but must be 0: each method but 'ulysses' attends a query in parts"
    if method in ("gather", "halo") and layout.kind == "striped":
        return "layout is 'striped', but must be another: its shards have no runs of tokens"
    if method == "halo" and (call.left is None or not (call.causal or call.right is not None)):
        return "window is None on a side, but must bound it"
    if method == "ulysses":
        return _why_not_by_heads(call, layout.size)
    if method == "ring" and not learned_of(call.scheme):
        params = call.scheme.score_mod_params(call.q.shape[1], call.q.device)
        if params is not None and params.requires_grad:
            return f"position is {type(call.scheme).__name__}, but must hold what it learns in fields of a dataclass"
    return None


def _why_not_by_heads(call: ShardedCall, n: int) -> str | None:
    heads, key_heads = call.q.shape[1], call.k.shape[1]
    if heads % n or (key_heads % n and n % key_heads):
        return f"q has {heads} heads and k {key_heads}, but both must be multiples of {n} ranks, or k's a divisor"
    return None


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
    """Return the method for a call that names none, and why."""
    layout = call.layout

    def can(method: str) -> bool:
        return why_not(call, method) is None

    reach = (call.left or 0) + (0 if call.causal else call.right or 0)
    if reach < layout.n_tokens / (2 * layout.size) and can("halo"):
        return "halo", "the window reaches less than half a shard"
    is_short = layout.size > _FEW_RANKS and layout.n_tokens < _SHORT * layout.size
    if (call.dropout_p > 0 or is_short) and can("ulysses"):
        return "ulysses", "dropout needs whole sequences" if call.dropout_p > 0 else "shards are short"
    if call.dropout_p > 0:
        raise NotImplementedError(f"dropout_p is {call.dropout_p}, but must be 0: {why_not(call, 'ulysses')}")
    if layout.between is not None and not can("ring"):
        raise NotImplementedError(f"layout has two dimensions, but {why_not(call, 'ring')}")
    if can("gather"):
        if not _fits(call) and can("ring"):
            return "ring", "gathered keys would take too much memory"
        return "gather", "keys are gathered once, and nothing is merged"
    for method in ("ulysses", "ring"):
        if can(method):
            return method, "the layout's shards have no runs of tokens"
    raise NotImplementedError(f"layout is 'striped', but must be another: {why_not(call, 'ring')}")


def _fits(call: ShardedCall) -> bool:
    """Say whether gathered keys and values fit; the answer is the same on equal devices."""
    if call.q.device.type != "cuda":
        return True
    memory = torch.cuda.get_device_properties(call.q.device).total_memory
    return _bytes_of_keys(call) * call.layout.size < memory / _MEMORY_SHARE


def _bytes_of_keys(call: ShardedCall) -> int:
    """Count the bytes of a shard of keys and values."""
    return (call.k.numel() + call.v.numel()) * call.k.element_size()


def explain(call: ShardedCall, method: str | None) -> ContextParallelChoice:
    """Return the method of a call, and why no other one."""
    taken = choose(call, method)
    reason = f"{taken!r} was named" if method is not None else f"{taken!r} is taken: {_fastest(call)[1]}"
    others = {name: why_not(call, name) or reason for name in METHODS if name != taken}
    forward, backward, held = _moved(call, taken)
    batch, heads, _, head_dim = call.q.shape
    pairs = call.layout.n_tokens**2 / (2 if call.causal else 1)
    if call.left is not None:
        pairs = min(pairs, call.layout.n_tokens * (call.left + 1.0 + (0 if call.causal else call.right or call.left)))
    operations = 3.5 * 2 * batch * heads * pairs * (head_dim + call.v.shape[3]) / call.layout.size
    transfer_ms = (forward + backward) / _BANDWIDTH * 1e3
    return ContextParallelChoice(taken, others, forward, backward, held, transfer_ms, operations / _RATE * 1e3)


def _moved(call: ShardedCall, method: str) -> tuple[int, int, int]:
    """Count the bytes that a rank receives in the forward and in the backward, and those that it holds."""
    n, shard = call.layout.size, _bytes_of_keys(call)
    if method == "gather":
        return shard * (n - 1), shard * (n - 1), shard * n
    if method == "halo":
        layout = call.layout.between or call.layout
        fetched = (
            find_exchange(layout, call.left, 0 if call.causal else call.right).n_received * shard // layout.n_local
        )
        return fetched, fetched, fetched + shard
    if method == "ulysses":
        of_q = (call.q.numel() + call.q.numel() // call.q.shape[3] * call.v.shape[3]) * call.q.element_size()
        repeated = shard * (n // call.k.shape[1] if call.k.shape[1] % n else 1)
        moved = (of_q + repeated) * (n - 1) // n
        return moved, moved, of_q + repeated
    wide = 4 if call.k.element_size() < 4 else call.k.element_size()
    gradients = shard // call.k.element_size() * wide * n if n > 1 else 0
    return shard * (n - 1), (shard * n if n > 1 else 0) + gradients, 2 * shard
