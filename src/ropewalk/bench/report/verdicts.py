"""Verdicts case by case: our best implementation against the best peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ropewalk.bench.attention.candidates import AUTO, COMPILED
from ropewalk.bench.attention.cases import MODES
from ropewalk.bench.core.timing import COPY
from ropewalk.bench.report.entries import Entry
from ropewalk.bench.report.formats import ratio

_NAMED = 3  # losses that the sentence names, and then a number
SAME = 0.02  # times within so much of each other are taken for equal
AHEAD, LEVEL, BEHIND, ABSENT, ALONE, SUPERSEDED = "ahead", "level", "behind", "absent", "alone", "superseded"

TITLES = {
    ("rope", "fwd"): "Rotation, forward",
    ("rope", "bwd"): "Rotation, backward",
    ("rope", "decode"): "Rotation, decode",
    ("attention", "fwd"): "Attention, forward",
    ("attention", "bwd"): "Attention, backward",
    ("attention", "train"): "RoPE and attention, training",
    ("attention", "decode"): "RoPE and attention, decode",
    ("attention", "rerope-fwd"): "ReRoPE, forward",
    ("attention", "rerope-train"): "ReRoPE, training",
    ("attention", "schemes-fwd"): "Position schemes, forward",
    ("attention", "schemes-bwd"): "Position schemes, backward",
    ("attention", "variants-fwd"): "Dropout, softcap and sinks, forward",
    ("attention", "variants-bwd"): "Dropout, softcap and sinks, backward",
    ("attention", "learned-bwd"): "Learned parameters, backward",
    ("attention", "memory"): "Memory at the peak",
}
_NOTES = {
    "fwd": "q and k of one layer are rotated",
    "bwd": "the gradients of q and k",
    "decode": "one token for each sequence",
}
# mode -> ours and the peers' positions, and ours by name where it is one implementation that users get
COMPARED: dict[str, tuple[str, str, str | None]] = {
    "fwd": ("none", "none", None),
    "bwd": ("none", "none", None),
    "train": ("rope", COMPILED, AUTO),
    "decode": ("rope", COMPILED, AUTO),
    "rerope-fwd": ("rerope", "rerope", AUTO),
    "rerope-train": ("rerope", "rerope", AUTO),
}


@dataclass(frozen=True)
class Side:
    """One of the two that are compared, and its time in microseconds."""

    entry: Entry
    time: float
    in_graph: bool


@dataclass(frozen=True)
class Verdict:
    """The comparison of one case: `times_as_fast` is the peer's time over ours."""

    lead: Entry  # any of the rows, for what they have in common
    ours: Side | None
    peer: Side | None
    times_as_fast: float | None
    share: float | None  # of the roof, by ours
    absent: str | None = None  # why there is nothing of ours
    excluded: tuple[tuple[str, str], ...] = ()  # peers that are not compared, and why
    timed: frozenset[str] = frozenset()  # the peers with a time
    superseded_by: str | None = None  # the newer record that decides the case

    @property
    def outcome(self) -> str:
        """Ahead, level or behind; absent: nothing of ours was measured; alone: no peer was; or superseded."""
        if self.superseded_by is not None:
            return SUPERSEDED
        if self.ours is None:
            return ABSENT
        if self.times_as_fast is None:
            return ALONE
        if self.times_as_fast > 1 + SAME:
            return AHEAD
        return LEVEL if self.times_as_fast >= 1 / (1 + SAME) else BEHIND

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.ours is None:
            return f"no time of ours: {self.absent}"
        if self.peer is None or self.times_as_fast is None:
            return "no peer was measured"
        times, name = f"{ratio(self.times_as_fast)}\u00a0×", self.peer.entry.impl
        if self.outcome == SUPERSEDED:
            return f"{times} {name}"
        if self.outcome == AHEAD:
            return f"{times} as fast as {name}"
        return f"{times}: as fast as {name}" if self.outcome == LEVEL else f"{times}: {name} is faster"

    @property
    def host_ratio(self) -> float | None:
        """The host time of a peer's eager call over that of ours."""
        if self.ours is None or self.peer is None:
            return None
        ours, peer = self.ours.entry.host, self.peer.entry.host
        return None if ours is None or peer is None else peer.median / ours.median

    @property
    def case_name(self) -> str:
        """The case, short, but not to be taken for another."""
        variant = f" ({self.lead.variant})" if self.lead.benchmark == "rope" else ""
        return f"{self.lead.case}{variant}"


@dataclass(frozen=True)
class Group:
    """The verdicts of a benchmark's direction or mode, by one protocol."""

    title: str
    note: str
    verdicts: list[Verdict]
    superseded: list[Verdict] = field(default_factory=list)  # that newer records decide: they count nowhere

    def count(self, *outcomes: str) -> int:
        """Count the verdicts with one of these outcomes."""
        return sum(verdict.outcome in outcomes for verdict in self.verdicts)

    @property
    def compared(self) -> int:
        """The number of cases that had a peer."""
        return len(self.verdicts) - self.count(ALONE)


@dataclass(frozen=True)
class Cost:
    """The cost of a position scheme, or a variant, over the same kernels without it."""

    entry: Entry
    baseline: Entry
    times: float


def together(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Rows of the same record, case, mode and protocol; a row without protocol, not measured, goes with each."""
    protocols: dict[tuple[object, ...], dict[str | None, None]] = {}
    for entry in entries:
        protocols.setdefault(entry.group[:-1], {}).setdefault(entry.protocol)
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        known = [protocol for protocol in protocols[entry.group[:-1]] if protocol is not None]
        for protocol in [entry.protocol] if entry.protocol is not None or not known else known:
            groups.setdefault((*entry.group[:-1], protocol), []).append(entry)
    yield from groups.values()


def verdict_groups(entries: Sequence[Entry], dates: Mapping[str, str] | None = None) -> list[Group]:
    """The verdicts of rows of one machine, by title.

    Args:
        dates: of the records, by name: a newer record's verdict on a case supersedes an older one's if it has a time of
            the older one's best peer. None: no verdict supersedes another.
    """
    by_case: dict[tuple[tuple[object, ...], str | None], list[Verdict]] = {}
    for rows in together(entries):
        verdict = _of_rotation(rows) if rows[0].benchmark == "rope" else _of_attention(rows)
        if verdict is not None:
            timed = frozenset(row.impl for row in rows if row.kind == "peer" and row.time is not None)
            verdict = replace(verdict, excluded=tuple(_excluded(rows, verdict)), timed=timed)
            protocol = next((row.protocol for row in rows if row.protocol is not None), None)
            by_case.setdefault((rows[0].group[1:-1], protocol), []).append(verdict)
    found: dict[tuple[str, str, str | None], list[Verdict]] = {}
    for (_, protocol), verdicts in by_case.items():
        for verdict in verdicts if dates is None else _supersede(verdicts, dates):
            found.setdefault((verdict.lead.benchmark, verdict.lead.mode, protocol), []).append(verdict)
    order = list(TITLES)
    keys = sorted(found, key=lambda key: (order.index(key[:2]) if key[:2] in order else len(order), key[2] or ""))
    return [
        Group(
            title_of(*key),
            note_of(*key[:2]),
            [one for one in found[key] if one.outcome != SUPERSEDED],
            [one for one in found[key] if one.outcome == SUPERSEDED],
        )
        for key in keys
    ]


def _supersede(verdicts: Sequence[Verdict], dates: Mapping[str, str]) -> Iterator[Verdict]:
    """Mark the verdicts on one case that the newest record with a time of their best peer overrules."""
    for verdict in verdicts:
        peer, date = verdict.peer, dates[verdict.lead.record]
        newer = [
            other
            for other in verdicts
            if peer is not None
            and other.ours is not None
            and peer.entry.impl in other.timed
            and dates[other.lead.record] > date
        ]
        newest = max(newer, key=lambda other: dates[other.lead.record], default=None)
        yield verdict if newest is None else replace(verdict, superseded_by=newest.lead.record)


def _excluded(rows: Sequence[Entry], verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Peers that were wrong or failed, or were not timed as ours was."""
    in_graph = verdict.ours is not None and verdict.ours.in_graph
    for row in rows:
        if row.kind != "peer":
            continue
        if row.status in ("wrong", "failed"):
            yield row.impl, row.status
        elif in_graph and row.time is not None and row.graph is None:
            yield row.impl, "not in a graph"


def title_of(benchmark: str, mode: str, protocol: str | None = None) -> str:
    """A benchmark's direction or mode in words."""
    title = TITLES.get((benchmark, mode), f"{benchmark}, {mode}")
    return title if protocol is None else f"{title}, {protocol}"


def note_of(benchmark: str, mode: str) -> str:
    """Describe the content of a mode's time."""
    if benchmark == "rope":
        return _NOTES.get(mode, "")
    said = MODES.get(mode, "")
    return f"{said}; ours is what impl=None picked" if AUTO in COMPARED.get(mode, ()) else said


def sentence(groups: Sequence[Group]) -> str:
    """The verdict over all cases that had a peer."""
    compared = sum(group.compared for group in groups)
    if compared == 0:
        return "No peer was measured beside ours: there is nothing to compare with."
    good = sum(group.count(AHEAD, LEVEL) for group in groups)
    text = f"Faster than or equal to (within {100 * SAME:.0f} %) every peer in {good} of {compared} comparisons"
    behind = sum(group.count(BEHIND) for group in groups)
    absent = sum(group.count(ABSENT) for group in groups)
    if behind:
        named: dict[str, str] = {}  # the worst of a case stands for hot and cool
        for _, one in losses(groups):
            if one.outcome == BEHIND:
                named.setdefault(f"{one.lead.case} {one.lead.mode}", one.text)
        worst = [f"{case} ({said})" for case, said in named.items()][:_NAMED]
        more = f" and {len(named) - len(worst)} more cases" if len(named) > len(worst) else ""
        text += f"; behind in: {', '.join(worst)}{more}"
    if absent:
        text += f"; without a time of ours in {absent}"
    return text + "."


def host_sentence(groups: Sequence[Group]) -> str | None:
    """Count the eager calls of ours that cost the host no more than the best peer's; None: none was timed."""
    both = [one.host_ratio for group in groups for one in group.verdicts if one.host_ratio is not None]
    if not both:
        return None
    good = sum(ratio >= 1 / (1 + SAME) for ratio in both)
    where = f"{good} of the {len(both)} where both were timed"
    return f"An eager call costs the host no more than the best peer's does in {where}."


def losses(groups: Sequence[Group]) -> list[tuple[Group, Verdict]]:
    """List the cases in which a peer is faster, or nothing of ours was measured: the worst first."""
    found = [(group, one) for group in groups for one in group.verdicts if one.outcome in (BEHIND, ABSENT)]
    return sorted(found, key=lambda pair: pair[1].times_as_fast or 0.0)


def _of_rotation(rows: Sequence[Entry]) -> Verdict | None:
    """Compare rotations: small cases by their times in a CUDA graph, as far as ours have them."""
    ours = [row for row in rows if row.kind == "ours"]
    in_graph = any(row.graph is not None for row in ours)
    best = _fastest(ours, in_graph)
    peer = _fastest([row for row in rows if row.kind == "peer"], in_graph)
    if best is None:
        return _without_ours(rows, ours, peer)
    copy = _fastest([row for row in rows if row.impl == COPY], in_graph)
    share = None if copy is None else copy.time / best.time
    return Verdict(rows[0], best, peer, None if peer is None else peer.time / best.time, share)


def _fastest(rows: Sequence[Entry], in_graph: bool) -> Side | None:
    times = [(row.graph if in_graph else row.time, row) for row in rows]
    sides = [Side(row, time.p50, in_graph) for time, row in times if time is not None]
    return min(sides, key=lambda side: side.time, default=None)


def _of_attention(rows: Sequence[Entry]) -> Verdict | None:
    """By the ratios of times from the same rounds. None: the mode holds no peers against ours."""
    compared = COMPARED.get(rows[0].mode)
    if compared is None:
        return None
    position, of_peers, name = compared
    ours = [row for row in rows if row.kind == "ours" and row.position == position and name in (None, row.impl)]
    peers = [row for row in rows if row.kind == "peer" and row.position == of_peers]
    best = _fastest(ours, in_graph=False)
    if best is None:
        return _without_ours(rows, ours, _fastest(peers, in_graph=False))
    times = {row.label: times for row in peers if (times := best.entry.ratios.get(row.label)) is not None}
    against = [row for row in peers if row.label in times and row.time is not None]
    if not against:
        return Verdict(rows[0], best, None, None, best.entry.share)
    peer = min(against, key=lambda row: times[row.label])
    assert peer.time is not None
    return Verdict(rows[0], best, Side(peer, peer.time.p50, False), times[peer.label], best.entry.share)


def _without_ours(rows: Sequence[Entry], ours: Sequence[Entry], peer: Side | None) -> Verdict | None:
    """Nothing of ours was timed: that is said where a peer was, or where ours is wrong or failed."""
    complaints = [row for row in ours if row.status in ("wrong", "failed")]
    if peer is None and not complaints:
        return None
    said = [f"{row.label} is {row.status}" + (f", {row.reason}" if row.reason else "") for row in complaints or ours]
    return Verdict(rows[0], None, peer, None, None, "; ".join(said) or "none was asked for")


def costs(entries: Sequence[Entry]) -> list[Cost]:
    """Compare ours with the same implementation without positions, or ReRoPE with RoPE, of the same rounds."""
    found = []
    for rows in together([entry for entry in entries if entry.kind == "ours" and entry.time is not None]):
        if rows[0].benchmark != "attention" or rows[0].mode in ("decode", "memory"):
            continue
        base = "rope" if rows[0].mode.startswith("rerope") else "none"
        baselines = {row.impl: row for row in rows if row.position == base}
        for row in rows:
            baseline = baselines.get(row.impl)
            times = None if baseline is None else baseline.ratios.get(row.label)
            if baseline is not None and times is not None:
                found.append(Cost(row, baseline, times))
    return found
