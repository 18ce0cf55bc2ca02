"""Targets of the kernels, and a record's verdict on each.

All are ratios of times from rounds in which both were measured, but for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ropewalk.bench.attention.candidates import (
    AUTO,
    COMPILED,
    COMPILED_LAYER,
    MAX_LOGITS,
    OUTSIDE,
    PAGE_SIZES,
    TWO_CALLS,
)
from ropewalk.bench.attention.rows import AttentionRow, attention_groups, label
from ropewalk.bench.attention.settings import SCHEMES
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.timing import COPY

_KERNEL = "triton"
# case -> at least so many times as fast as FlexAttention, forward and backward
_FLEX = {"causal-16k-d128": (1.12, 1.0), "full-4k-d128": (1.12, 1.0), "causal-8k-d64": (1.10, 1.05)}
# case -> at most so many times the time without RoPE
_ROPE_COST = {
    "causal-16k-d128": 1.03,
    "full-4k-d128": 1.03,
    "gqa-8k-d128": 1.03,
    "causal-8k-d64": 1.03,
    "full-4k-d64": 1.03,
    "causal-4k-d128": 1.08,
    "causal-2k-d128": 1.08,
}
_BERT = "bert-512-lengths"
_BERT_PEERS = ("cudnn", "flex")
_PACKED = "packed-4k-d128"
_DECODING = "decode-8k-d128"  # its share of a copy's bandwidth; one row alone cannot keep a GPU busy
# case -> at least so much of the yardstick's TFLOP/s
_YARDSTICKS = {_PACKED: 0.95, "mla-8k-d192": 0.9}
# argument -> at most so many times the time without
_VARIANTS = {"dropout": 1.15, "softcap": 1.10, "sinks": 1.10}
# of a layer -> at most so many times the time of the bare kernels
_LAYERS = {"norm-gate": 1.05, "gate": 1.02, MAX_LOGITS: 1.03}
_REROPE_SOURCE = "rerope-8k-d64"
# case and mode -> ReRoPE takes at most so many times the time of RoPE in the same kernels
_REROPE_COST = {
    ("rerope-8k-d64", "rerope-train"): 1.15,
    ("rerope-8k-d64-fp16", "rerope-train"): 1.15,
    ("rerope-16k-d128", "rerope-fwd"): 1.10,
    ("rerope-16k-d128", "rerope-train"): 1.15,
}


@dataclass(frozen=True)
class Target:
    """One target on one case."""

    what: str
    case: str
    protocol: str | None
    value: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def targets(record: BenchRecord) -> list[Target]:
    """List every target that the record has measurements of, in the record's order; a CPU has none."""
    found: list[Target] = []
    if record.run["device"].startswith("CPU"):
        return found
    for group in attention_groups(record.of(AttentionRow)):
        rows = {row.label: row for row in group}
        row = group[0]
        for what, value, bound, at_least in _of_group(row, rows):
            found.append(Target(what, row.case.name, row.protocol, value, bound, at_least))
    return found


def _of_group(row: AttentionRow, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    case, mode = row.case.name, row.mode
    if mode in ("fwd", "bwd") and case in _FLEX:
        faster = _times_as_fast(rows, _KERNEL, "flex")
        if faster is not None:
            yield f"{mode}: {_KERNEL}, times as fast as FlexAttention", faster, _FLEX[case][mode == "bwd"], True
    if mode == "train":
        yield from _of_training(case, rows)
    if mode == "decode":
        yield from _of_decoding(case, rows)
    if case in _YARDSTICKS:
        yield from _of_yardstick(case, mode, rows)
    if mode.startswith("rerope"):
        yield from _of_rerope(case, mode, rows)
    if mode.startswith("layer"):
        yield from _of_layer(mode, rows)
    if mode.startswith("schemes"):
        for name in SCHEMES:
            cost = _times_as_fast(rows, _KERNEL, label(_KERNEL, name))
            if cost is not None:
                yield f"{mode}: {name} over no position", cost, 1.15, False
    if mode.startswith("variants"):
        for name, bound in _VARIANTS.items():
            cost = _times_as_fast(rows, _KERNEL, label(_KERNEL, name))
            if cost is not None:
                yield f"{mode}: {name} over the same kernels without", cost, bound, False
    if mode == "memory":
        for measured in rows.values():
            if measured.peak_bytes is not None and measured.floor_bytes is not None:
                ratio = measured.peak_bytes / measured.floor_bytes
                yield f"memory: {measured.label} over what it cannot do without", ratio, 1.3, False


def _of_training(case: str, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    auto, inside, outside = label(AUTO, "rope"), label(_KERNEL, "rope"), label(_KERNEL, OUTSIDE)
    cost = _times_as_fast(rows, _KERNEL, inside)
    if cost is not None and case in _ROPE_COST:
        yield f"train: {inside} over the same kernels without", cost, _ROPE_COST[case], False
    against = _times_as_fast(rows, outside, inside)
    if against is not None:
        yield f"train: {inside} over {outside}", against, 1.0, False
    if case == _PACKED:
        faster = _times_as_fast(rows, inside, label("flex", COMPILED))
        if faster is not None:
            yield f"train: {inside}, times as fast as FlexAttention", faster, 1.1, True
        return
    compared = _over_peers(rows, auto)
    if compared:
        best = max(compared, key=lambda name: compared[name])
        yield f"train: {auto} over the best peer, {best}", compared[best], 1.02, False
    if case == _BERT and all(name in compared for name in _BERT_PEERS):
        best = max(_BERT_PEERS, key=lambda name: compared[name])
        yield f"train: {auto}, times as fast as the better of cuDNN and FlexAttention", 1 / compared[best], 1.15, True


def _of_layer(mode: str, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    for impl in dict.fromkeys(row.impl for row in rows.values() if row.kind == "ours" and row.impl != AUTO):
        for name, bound in _LAYERS.items():
            cost = _times_as_fast(rows, label(impl, "half-rope"), label(impl, name))
            if cost is not None:
                yield f"{mode}: {label(impl, name)} over the bare kernels", cost, bound, False
    faster = _times_as_fast(rows, label(AUTO, "norm-gate"), label("flash_attn_4", COMPILED_LAYER))
    if faster is not None:
        yield f"{mode}: {AUTO}, times as fast as compiled PyTorch around flash-attn 4", faster, 1.25, True


def _of_rerope(case: str, mode: str, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    auto, own, rope = label(AUTO, "rerope"), label(_KERNEL, "rerope"), label(_KERNEL, "rope")
    cost = _times_as_fast(rows, rope, own)
    if cost is not None and (case, mode) in _REROPE_COST:
        yield f"{mode}: {own} over {rope}", cost, _REROPE_COST[case, mode], False
    if mode == "rerope-train":
        two_calls, chosen = label(_KERNEL, TWO_CALLS), rows.get(auto)
        against = _times_as_fast(rows, two_calls, own)
        if against is not None:
            yield f"{mode}: {own} over {two_calls}", against, 1.0, False
        by_flash = chosen is not None and chosen.served_by == "flash"
        for name, bound in ((own, 25.0), (auto, 33.0)):
            faster = _times_as_fast(rows, name, label("eager", "rerope"))
            if faster is not None and case == _REROPE_SOURCE and (name == own or by_flash):
                yield f"{mode}: {name}, times as fast as eager PyTorch", faster, bound, True
    named = {name: _times_as_fast(rows, name, auto) for name in (own, label("flash", "rerope"))}
    compared = {name: value for name, value in named.items() if value is not None}
    if compared:
        best = max(compared, key=lambda name: compared[name])
        yield f"{mode}: {auto} over the best named one, {best}", compared[best], 1.02, False


def _of_decoding(case: str, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    positions = ("rope", *(f"rope, pages of {size}" for size in PAGE_SIZES)) if case == _DECODING else ()
    for position in positions:
        name = label(_KERNEL, position)
        share = _times_as_fast(rows, name, COPY)  # a copy moves as many bytes as are read
        if share is not None:
            yield f"decode: {name}, of a copy's bandwidth", share, 0.8, True
    auto = label(AUTO, "rope")
    compared = _over_peers(rows, auto)
    if compared:
        best = max(compared, key=lambda name: compared[name])
        yield f"decode: {auto} over the best peer, {best}", compared[best], 1.02, False


def _of_yardstick(case: str, mode: str, rows: dict[str, AttentionRow]) -> Iterator[tuple[str, float, float, bool]]:
    own = rows.get(label(_KERNEL, "rope" if mode == "train" else "none"))
    for other in rows.values():
        if other.yardstick is None or own is None or (other.impl, other.position) != (own.impl, own.position):
            continue
        times = (own.ratios or {}).get(other.label)
        if times is not None:
            share = times * _work(own) / _work(other)
            yield f"{mode}: {own.label}, TFLOP/s over those on {other.yardstick}", share, _YARDSTICKS[case], True


def _work(row: AttentionRow) -> float:
    """Return the operations of a row's TFLOP/s, but for a constant."""
    assert row.tflops is not None
    assert row.time is not None
    return row.tflops * row.time.p50


def _over_peers(rows: dict[str, AttentionRow], own: str) -> dict[str, float]:
    """Return how many times each peer's time `own` takes, RoPE included."""
    peers = {row.impl: _times_as_fast(rows, row.label, own) for row in rows.values() if row.position == COMPILED}
    return {name: value for name, value in peers.items() if value is not None}


def _times_as_fast(rows: dict[str, AttentionRow], one: str, other: str) -> float | None:
    """Return how many times as fast `one` is as `other`, if both were measured."""
    row = rows.get(one)
    return None if row is None or row.ratios is None else row.ratios.get(other)
