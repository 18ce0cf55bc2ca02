"""What the kernels are meant to reach, and what a record says of it.

All are ratios of times from rounds in which both were measured, but for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ropewalk.bench.attention_candidates import AUTO, COMPILED, OUTSIDE
from ropewalk.bench.attention_records import AttentionRecord, AttentionRow, attention_groups, label

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


@dataclass(frozen=True)
class Target:
    """One thing to reach on one case."""

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


def targets(record: AttentionRecord) -> list[Target]:
    """Every target of which the record has the measurements, in the order of the record."""
    found: list[Target] = []
    for group in attention_groups(record.rows):
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
    if mode.startswith("schemes"):
        for name in ("alibi", "exposb", "exposb-decay"):
            cost = _times_as_fast(rows, _KERNEL, label(_KERNEL, name))
            if cost is not None:
                yield f"{mode}: {name} over no position", cost, 1.15, False
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
    peers = {row.impl: _times_as_fast(rows, label(row.impl, COMPILED), auto) for row in rows.values()}
    compared = {name: value for name, value in peers.items() if value is not None}
    if compared:
        best = max(compared, key=lambda name: compared[name])
        yield f"train: {auto} over the best peer, {best}", compared[best], 1.02, False
    if case == _BERT and all(name in compared for name in _BERT_PEERS):
        best = max(_BERT_PEERS, key=lambda name: compared[name])
        yield f"train: {auto}, times as fast as the better of cuDNN and FlexAttention", 1 / compared[best], 1.15, True


def _times_as_fast(rows: dict[str, AttentionRow], one: str, other: str) -> float | None:
    """How many times as fast `one` is as `other`, where both were measured."""
    row = rows.get(one)
    return None if row is None or row.ratios is None else row.ratios.get(other)
