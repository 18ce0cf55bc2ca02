"""Ours against the best peer, case by case: what is gained, what is lost, and what nothing was held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ropewalk.bench.attention.candidates import AUTO, COMPILED, backends_of_today
from ropewalk.bench.attention.cases import REROPE, AttentionCase
from ropewalk.bench.core.load import Record, Row, groups, label, read_record, variant_of
from ropewalk.bench.core.timing import COPY
from ropewalk.bench.report.peers import EAGER
from ropewalk.bench.rope.cases import Case

READ = ("rope", "attention", "training", "all")  # the benchmarks whose records are read here
SAME = 0.02  # times within so much of each other are taken for equal
FASTER, LEVEL, SLOWER, ABSENT, ALONE = "faster", "level", "slower", "absent", "alone"
KERNELS = ("triton", "gluon")
ROTATIONS = ("native", "triton", "reference")  # in the order of apply_rope's `impl=None`
FLASH, FLASH_PEER = "flash", "flash_attn_4"  # the library as our backend, and as a peer
# The title; ours and the peers' positions, and ours by name where it is one implementation that users get.
Compared = tuple[str, str, str, "str | None"]
_PLAIN: tuple[str, str, None] = ("none", "none", None)
COMPARED: dict[tuple[str, str], Compared] = {
    ("rope", "fwd"): ("Rotation, forward", *_PLAIN),
    ("rope", "bwd"): ("Rotation, backward", *_PLAIN),
    ("rope", "decode"): ("Rotation, decode", *_PLAIN),
    ("attention", "train"): ("RoPE and attention, training", "rope", COMPILED, AUTO),
    ("attention", "decode"): ("RoPE and attention, decode", "rope", COMPILED, AUTO),
    ("attention", "rerope-fwd"): ("ReRoPE, forward", "rerope", "rerope", AUTO),
    ("attention", "rerope-train"): ("ReRoPE, training", "rerope", "rerope", AUTO),
    ("attention", "fwd"): ("Attention alone, forward", *_PLAIN),
    ("attention", "bwd"): ("Attention alone, backward", *_PLAIN),
    ("training", "autocast"): ("Whole models, training, autocast", *_PLAIN),
    ("training", "bf16"): ("Whole models, training, bfloat16", *_PLAIN),
}


class Gain(NamedTuple):
    """The comparison of one case of one run: `times` is the best peer's time over ours."""

    lead: Row  # any of the rows, for what they have in common
    ours: Row | None
    peer: Row | None
    times: float | None
    quantity: str  # that is compared: "time", or "graph" in a CUDA graph
    timed: frozenset[str]  # the peers with a time
    reason: str = ""  # why there is nothing of ours

    @property
    def outcome(self) -> str:
        """Faster, level or slower; absent: nothing of ours was measured; alone: no peer was."""
        if self.ours is None or self.times is None:
            return ABSENT if self.ours is None else ALONE
        return FASTER if self.times > 1 + SAME else LEVEL if self.times >= 1 / (1 + SAME) else SLOWER

    @property
    def title(self) -> str:
        """Name the comparison and its protocol."""
        return ", ".join(filter(None, (_compared(self.lead)[0], self.lead.get("protocol"))))


class Choice(NamedTuple):
    """Our fastest kernel on one case, what `impl=None` picks without flash-attn 4 and with it, and the peers' times.

    A record has `impl=None` as "auto", on a machine where flash-attn 4 is installed or missing. Where "auto" picked
    `flash`, `impl=None` without it is the next backend in today's order, timed by its name, and with it, too, where
    that goes first today. If "auto" picked another backend although flash-attn 4 was installed, it picks the same one
    without. All else was not measured: None.
    """

    lead: Row
    picks: tuple[tuple[float, str] | None, ...]  # time and backend of the three
    peers: dict[str, float]
    best_peer: tuple[float, str] | None  # how many times as fast the last pick is as the fastest peer, and that one


def _compared(row: Row) -> Compared:
    mode = row["benchmark"], row["mode"]
    return COMPARED.get(mode, (", ".join(mode), *_PLAIN))


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Read records; the rows get their file and the name, date and machine of their run. Two are never compared."""
    records = [read_record(path, *READ) for path in paths]
    for record in records:
        for run in record.runs:
            if not isinstance(run.get("device"), str) or not isinstance(run.get("date"), str):
                raise ValueError(f"{record.path}: the line about the run must have the device and the date")
        for row in record.rows:
            run = record.runs[row["run"]]
            keys = {"driver_version": "driver ", "power_limit": "power limit ", "system": ""}
            machine = ", ".join([run["device"], *(f"{said}{run[key]}" for key, said in keys.items() if run.get(key))])
            row |= {"path": str(record.path), "record": record.name_of(row), "date": run["date"], "machine": machine}
            row["device"] = run["device"]
            row["capability"] = run.get("capability")
    return records


def describe_case(row: Row) -> str:
    fields = row["case"]
    if row["benchmark"] == "training":
        return f"{fields.get('words', '')}, batch {fields.get('batch')} of {fields.get('tokens')} tokens".lstrip(", ")
    text = ", ".join(filter(None, (_case_of(row).description, variant_of(fields))))
    return text.replace(", bthd", "").replace(", positions by index", "")


def _case_of(row: Row) -> Any:
    """Return the case of a row, of rotation or of attention."""
    kind: Any = Case if row["benchmark"] == "rope" else AttentionCase
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row["case"].items()})


def share_of_roof(row: Row) -> float | None:
    """Return the reached part of what the device can do: of a copy's speed, or of a matrix product's rate."""
    share: float | None = row.get("copy_ratio", row.get("matrix_ratio"))
    return row.get("ratios", {}).get(COPY, share) if row["impl"] != COPY else 1.0


def find_gains(rows: Iterable[Row], *, in_graph: bool = True) -> list[Gain]:
    """Compare every case by the newest run that timed its best peer; in the order of `COMPARED`.

    Small rotations are compared by their times in a CUDA graph, or without `in_graph` launched singly like all others.
    """
    found: dict[tuple[object, ...], list[Gain]] = {}
    for group in groups(_with_refused(rows), "protocol"):
        gain = _compare(group, in_graph)
        if gain is None:
            continue
        lead = gain.lead
        case = tuple(sorted((k, repr(v)) for k, v in lead["case"].items() if k not in ("modes", "yardstick")))
        key = lead["machine"], lead["benchmark"], case, lead["mode"], lead.get("protocol")
        found.setdefault(key, []).append(gain)
    newest = [one for gains in found.values() for one in gains if not _is_superseded(one, gains)]
    rank = {mode: number for number, mode in enumerate(COMPARED)}
    return sorted(newest, key=lambda one: (rank.get((one.lead["benchmark"], one.lead["mode"]), len(rank)), one.title))


def _with_refused(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows; one without protocol, that was not measured, once for each protocol of its case and mode."""
    for group in groups(rows):
        protocols = dict.fromkeys(row["protocol"] for row in group if "protocol" in row)
        for row in group:
            yield from [row] if "protocol" in row or not protocols else [{**row, "protocol": one} for one in protocols]


def _is_superseded(gain: Gain, others: Sequence[Gain]) -> bool:
    """Whether a newer run timed ours and the best peer of this one; without peers, whether another run had some."""
    if gain.outcome == ALONE:
        return any(other.outcome not in (ALONE, ABSENT) for other in others) or gain is not others[-1]
    newer = (other for other in others if other.ours is not None and other.lead["date"] > gain.lead["date"])
    return gain.peer is not None and any(gain.peer["impl"] in other.timed for other in newer)


def _compare(group: Sequence[Row], in_graph: bool) -> Gain | None:
    """Compare what was timed together; None: the mode holds no peers against ours, or there is nothing to say."""
    lead, name = group[0], _compared(group[0])[3]
    if lead["benchmark"] == "attention" and ("attention", lead["mode"]) not in COMPARED:
        return None
    ours, peers = _sides(group)
    if name == AUTO:
        pick = taken(ours)
        ours = [] if pick is None else [pick]
    elif lead["benchmark"] == "rope":
        pick = rotation_of(ours)
        ours = ours if pick is None else [pick]
    quantity = "graph" if in_graph and any("graph" in row for row in ours) else "time"
    timed = [row for row in peers if "time" in row]
    names = frozenset(row["impl"] for row in timed)
    best = min((row for row in ours if quantity in row), key=lambda row: row[quantity]["p50"], default=None)
    if best is None:
        fastest = min(timed, key=lambda row: row["time"]["p50"], default=None)
        bad = [row for row in ours if row["status"] in ("wrong", "failed")]
        said = "; ".join(f"{label(row)} is {row['status']}: {row.get('reason')}" for row in bad or ours)
        gain = Gain(lead, None, fastest, None, "time", names, said or "none was asked for")
        return gain if fastest is not None or bad else None
    times, peer = against_peers(best, peers, quantity) or (None, None)
    return Gain(lead, best, peer, times, quantity, names)


def against_peers(ours: Row, peers: Iterable[Row], quantity: str = "time") -> tuple[float, Row] | None:
    """Return how many times as fast ours is as the fastest peer, and that one; None: no peer was timed.

    That is the median over rounds if the record has it, else the quotient of both medians.
    """
    ratios, own = ours.get("ratios", {}), ours[quantity]["p50"]
    over = [(ratios.get(label(row), row[quantity]["p50"] / own), row) for row in peers if quantity in row]
    return min(over, key=lambda one: one[0], default=None)


def _sides(group: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return ours and the peers' rows of a group, with the positions that are compared; eager PyTorch is no peer.

    No library computes ReRoPE in one call: its peer is FlashAttention-4 called twice, by our backend.
    """
    _, position, peer_position, _ = _compared(group[0])
    ours = [row for row in group if (row["kind"], row["position"]) == ("ours", position)]
    peers = [row for row in group if (row["kind"], row["position"]) == ("peer", peer_position)]
    twice = [row for row in ours if row["impl"] == FLASH and group[0]["mode"] in REROPE]
    return ours, [*twice, *(row for row in peers if row["impl"] not in EAGER)]


def newest_choices(records: Sequence[Record]) -> list[Choice]:
    """The choices of the newest run of each device, case, mode and protocol, in the order of the first one."""
    newest: dict[tuple[object, ...], Choice] = {}
    for record in records:
        for group in groups((row for row in record.of("attention") if "time" in row), "protocol"):
            choice = _choose(group, record.runs[group[0]["run"]])
            if choice is not None:
                lead = choice.lead
                key = lead["device"], describe_case(lead), lead["mode"], lead.get("protocol")
                newest[key] = max(newest.get(key, choice), choice, key=lambda one: one.lead["date"])
    return list(newest.values())


def _choose(group: Sequence[Row], run: Row) -> Choice | None:
    ours, peers = _sides(group)
    auto, pick = next((row for row in ours if row["impl"] == AUTO), None), taken(ours)
    if _compared(group[0])[3] != AUTO or auto is None or pick is None or run["device"].startswith("CPU"):
        return None
    by_name = {row["impl"]: (row["time"]["p50"], row["impl"]) for row in ours if row is not auto}
    kernels = min((by_name[impl] for impl in KERNELS if impl in by_name), default=None)
    picked = pick["time"]["p50"], str(pick.get("served_by", pick["impl"]))
    found = against_peers(pick, peers)
    best_peer = None if found is None else (found[0], found[1]["impl"])
    peer_times = {row["impl"]: row["time"]["p50"] for row in peers}
    if picked[1] == FLASH:
        return Choice(auto, (kernels, by_name.get(after_flash(auto)), picked), peer_times, best_peer)
    has_flash = not str((run.get("peers") or {}).get(FLASH_PEER, "missing")).startswith("missing")
    return Choice(auto, (kernels, picked, picked if has_flash else None), peer_times, best_peer)


def taken(ours: Sequence[Row]) -> Row | None:
    """Return the row of what `impl=None` takes: "auto"; where that was flash, what goes before it today, if timed."""
    by_name = {row["impl"]: row for row in ours}
    auto = by_name.get(AUTO)
    if auto is None or auto.get("served_by") != FLASH:
        return auto
    sooner = takewhile(lambda name: name != FLASH, _order_of(auto))
    return next((by_name[name] for name in sooner if "time" in by_name.get(name, {})), auto)


def rotation_of(rows: Iterable[Row]) -> Row | None:
    """Return the row of what apply_rope's `impl=None` takes, of a case's rows; None: nothing of it was timed."""
    known = {row["impl"]: row for row in rows if row["kind"] == "ours" and "time" in row}
    return next((known[impl] for impl in ROTATIONS if impl in known), None)


def after_flash(auto: Row) -> str:
    """Return the backend that `impl=None` takes for a row's call where flash-attn is missing."""
    return next(name for name in _order_of(auto) if name != FLASH)


def _order_of(auto: Row) -> tuple[str, ...]:
    return backends_of_today(_case_of(auto), auto["mode"], auto["position"], auto.get("capability"))
