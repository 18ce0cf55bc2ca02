"""Ours against the best peer, case by case: what is gained, what is lost, and what nothing was held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.attention.candidates import AUTO, COMPILED
from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.core.load import Record, Row, groups, label, read_record, variant_of
from ropewalk.bench.core.timing import COPY
from ropewalk.bench.rope.cases import Case

READ = ("rope", "attention", "training", "all")  # the benchmarks whose records are read here
SAME = 0.02  # times within so much of each other are taken for equal
AHEAD, LEVEL, BEHIND, ABSENT, ALONE = "ahead", "level", "behind", "absent", "alone"
TITLES = {
    ("rope", "fwd"): "Rotation, forward",
    ("rope", "bwd"): "Rotation, backward",
    ("rope", "decode"): "Rotation, decode",
    ("attention", "train"): "RoPE and attention, training",
    ("attention", "decode"): "RoPE and attention, decode",
    ("attention", "rerope-fwd"): "ReRoPE, forward",
    ("attention", "rerope-train"): "ReRoPE, training",
    ("attention", "fwd"): "Attention alone, forward",
    ("attention", "bwd"): "Attention alone, backward",
    ("training", "autocast"): "Whole models, training, autocast",
    ("training", "bf16"): "Whole models, training, bfloat16",
}
# mode of attention -> ours and the peers' positions, and ours by name where it is one implementation that users get
COMPARED: dict[str, tuple[str, str, str | None]] = {
    "fwd": ("none", "none", None),
    "bwd": ("none", "none", None),
    "train": ("rope", COMPILED, AUTO),
    "decode": ("rope", COMPILED, AUTO),
    "rerope-fwd": ("rerope", "rerope", AUTO),
    "rerope-train": ("rerope", "rerope", AUTO),
}


@dataclass(frozen=True)
class Gain:
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
        """Ahead, level or behind; absent: nothing of ours was measured; alone: no peer was."""
        if self.ours is None or self.times is None:
            return ABSENT if self.ours is None else ALONE
        return AHEAD if self.times > 1 + SAME else LEVEL if self.times >= 1 / (1 + SAME) else BEHIND

    @property
    def title(self) -> str:
        """The benchmark's mode in words, with the protocol."""
        key = self.lead["benchmark"], self.lead["mode"]
        return ", ".join(filter(None, (TITLES.get(key, ", ".join(key)), self.lead.get("protocol"))))

    def time_of(self, row: Row | None) -> float | None:
        """Return a side's time in µs."""
        return None if row is None else median(row, self.quantity)


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Read records; the rows get the name, the date and the machine of their run."""
    records = [read_record(path, *READ) for path in paths]
    for record in records:
        for run in record.runs:
            if not isinstance(run.get("device"), str) or not isinstance(run.get("date"), str):
                raise ValueError(f"{record.path}: the line about the run must have the device and the date")
        for row in record.rows:
            run = record.runs[row["run"]]
            row |= {"record": record.name_of(row), "date": run["date"], "machine": machine_of(run)}
    return records


def machine_of(run: Row) -> str:
    """The device, and by what machines with the same one differ. Rows of two machines are never compared."""
    keys = {"driver_version": "driver ", "power_limit": "power limit ", "system": ""}
    return ", ".join([run["device"], *(f"{said}{run[key]}" for key, said in keys.items() if run.get(key))])


def median(row: Row, quantity: str) -> float | None:
    """Return a row's median of "time" or "graph", in µs."""
    return (row.get(quantity) or {}).get("p50")


def describe_case(row: Row) -> str:
    """Describe a row's case: its shape, its dtype, and anything unusual."""
    fields = dict(row["case"])
    if row["benchmark"] == "training":
        return f"{fields.get('words', '')}, batch {fields.get('batch')} of {fields.get('tokens')} tokens".lstrip(", ")
    kind: Any = Case if row["benchmark"] == "rope" else AttentionCase
    case = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    text = ", ".join(filter(None, (case.description, variant_of(fields))))
    return text.replace(", bthd", "").replace(", positions by index", "")


def share_of_roof(row: Row) -> float | None:
    """Return the reached part of what the device can do: of a copy's speed, or of a matrix product's rate."""
    share: float | None = row.get("copy_ratio", row.get("matrix_ratio"))
    return row.get("ratios", {}).get(COPY, share) if row["impl"] != COPY else 1.0


def find_gains(rows: Iterable[Row]) -> list[Gain]:
    """Compare every case by the newest run that timed its best peer; in the order of `TITLES`."""
    found: dict[tuple[object, ...], list[Gain]] = {}
    for group in groups(_with_refused(rows), "protocol"):
        for gain in _compare(group):
            lead = gain.lead
            case = tuple(sorted((k, repr(v)) for k, v in lead["case"].items() if k not in ("modes", "yardstick")))
            key = lead["machine"], lead["benchmark"], case, lead["mode"], lead.get("protocol")
            found.setdefault(key, []).append(gain)
    newest = [one for gains in found.values() for one in gains if not _is_superseded(one, gains)]
    rank = {title: number for number, title in enumerate(TITLES)}
    return sorted(newest, key=lambda one: (rank.get((one.lead["benchmark"], one.lead["mode"]), len(rank)), one.title))


def _with_refused(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows; one without protocol, that was not measured, once for each protocol of its case and mode."""
    for group in groups(rows):
        protocols = dict.fromkeys(row["protocol"] for row in group if "protocol" in row)
        for row in group:
            missing = protocols if "protocol" not in row else ()
            yield from [{**row, "protocol": protocol} for protocol in missing] or [row]


def _is_superseded(gain: Gain, others: Sequence[Gain]) -> bool:
    """Whether a newer run timed ours and the best peer of this one; without peers, whether another run had some."""
    if gain.outcome == ALONE:
        return any(other.outcome not in (ALONE, ABSENT) for other in others) or gain is not others[-1]
    return gain.peer is not None and any(
        other.ours is not None and gain.peer["impl"] in other.timed and other.lead["date"] > gain.lead["date"]
        for other in others
    )


def _compare(group: Sequence[Row]) -> Iterator[Gain]:
    """Compare what was timed together, unless the mode holds no peers against ours, or there is nothing to say."""
    lead = group[0]
    if lead["benchmark"] == "attention" and lead["mode"] not in COMPARED:
        return
    sides = COMPARED[lead["mode"]] if lead["benchmark"] == "attention" else ("none", "none", None)
    ours, peers = _sides(group, *sides)
    # Small rotations are compared by their times in a CUDA graph, as far as ours have them.
    quantity = "graph" if any("graph" in row for row in ours) else "time"
    timed = frozenset(row["impl"] for row in peers if "time" in row)
    best = min((row for row in ours if quantity in row), key=lambda row: row[quantity]["p50"], default=None)
    if best is None:
        fastest = min((row for row in peers if "time" in row), key=lambda row: row["time"]["p50"], default=None)
        bad = [row for row in ours if row["status"] in ("wrong", "failed")]
        if fastest is not None or bad:
            said = "; ".join(f"{label(row)} is {row['status']}: {row.get('reason')}" for row in bad or ours)
            yield Gain(lead, None, fastest, None, "time", timed, said or "none was asked for")
        return
    # By the median over rounds if the record has it, else by medians.
    over = {
        number: best.get("ratios", {}).get(label(row), row[quantity]["p50"] / best[quantity]["p50"])
        for number, row in enumerate(peers)
        if quantity in row
    }
    first = min(over, key=over.__getitem__, default=None)
    peer, times = (None, None) if first is None else (peers[first], over[first])
    yield Gain(lead, best, peer, times, quantity, timed)


def _sides(group: Sequence[Row], position: str, of_peers: str, name: str | None) -> tuple[list[Row], list[Row]]:
    """Return ours and the peers' rows of a group, with those positions; of ours those with this name, if any."""
    ours = [
        row for row in group if (row["kind"], row["position"]) == ("ours", position) and name in (None, row["impl"])
    ]
    return ours, [row for row in group if (row["kind"], row["position"]) == ("peer", of_peers)]


@dataclass(frozen=True)
class Choice:
    """Our fastest kernel on one case, what `impl=None` picks without flash-attn 4 and with it, and the peers' times.

    A record has `impl=None` as "auto", on a machine where flash-attn 4 is installed or missing. Where "auto" picked
    `flash`, `impl=None` without it is the next backend in today's order, timed by its name. If "auto" picked another
    backend although flash-attn 4 was installed, it picks the same one without. All else was not measured: None.
    """

    lead: Row
    picks: tuple[tuple[float, str] | None, ...]  # time and backend of the three
    peers: dict[str, float]


KERNELS = ("triton", "gluon")
FLASH, FLASH_PEER = "flash", "flash_attn_4"  # the library as our backend, and as a peer
_GLUON_FROM = {"rope": 512, "rerope": 4096}  # tokens, on Hopper


def newest_choices(records: Sequence[Record]) -> list[Choice]:
    """The choices of the newest run of each case, mode and protocol, in the order of the first one."""
    newest: dict[tuple[object, ...], Choice] = {}
    for record in records:
        for group in groups((row for row in record.of("attention") if "time" in row), "protocol"):
            choice = _choose(group, record.runs[group[0]["run"]])
            if choice is not None:
                key = describe_case(choice.lead), choice.lead["mode"], choice.lead.get("protocol")
                if key not in newest or newest[key].lead["date"] < choice.lead["date"]:
                    newest[key] = choice
    return list(newest.values())


def _choose(group: Sequence[Row], run: Row) -> Choice | None:
    position, of_peers, name = COMPARED.get(group[0]["mode"], ("", "", None))
    ours, peers = _sides(group, position, of_peers, None)
    auto = next((row for row in ours if row["impl"] == AUTO), None)
    if name != AUTO or auto is None or run["device"].startswith("CPU"):
        return None
    by_name = {row["impl"]: (row["time"]["p50"], row["impl"]) for row in ours if row is not auto}
    kernels = min((by_name[impl] for impl in KERNELS if impl in by_name), default=None)
    picked = auto["time"]["p50"], str(auto["served_by"])
    times = {row["impl"]: row["time"]["p50"] for row in peers}
    if picked[1] == FLASH:
        return Choice(auto, (kernels, by_name.get(after_flash(auto, run)), picked), times)
    has_flash = not str((run.get("peers") or {}).get(FLASH_PEER, "missing")).startswith("missing")
    return Choice(auto, (kernels, picked, picked if has_flash else None), times)


def after_flash(auto: Row, run: Row) -> str:
    """The backend that follows `flash` in the order of a dense call; a test compares it with the registry."""
    least = _GLUON_FROM["rerope" if auto["position"] == "rerope" else "rope"]
    return "gluon" if run.get("capability") == "9.0" and auto["case"]["tokens"] >= least else "sdpa"
