"""The tables of numbers in the pages, each a function from the records of a card to headings and cells.

`tools/overview.py` puts them between the marks of their names. A cell whose row was not measured is “–”; a table
without any row is an error. Where results/ has records of a second card, its numbers follow in columns of their own,
or its records in rows; a column without a number is left out.
"""

from __future__ import annotations

import functools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import targets

from ropewalk.bench.attention.bench import AttentionBench
from ropewalk.bench.attention.candidates import COMPILED
from ropewalk.bench.attention.cases import EIGHT_BITS, LAYER, REROPE
from ropewalk.bench.core.load import Record, Row, groups, label, read_record, to_digits, variant_of
from ropewalk.bench.core.records import parse_lines
from ropewalk.bench.core.timing import COPY
from ropewalk.bench.host.bench import HostBench
from ropewalk.bench.report import gains as g
from ropewalk.bench.report.page import BEST_TWO, NOT_MEASURED, NOTHING, best_two, duration, peers_of_choice
from ropewalk.bench.report.peers import EAGER, NAMES, lacked_by, name_measured
from ropewalk.bench.rope.bench import MULTIPLY, NormBench, RopeBench, SweepBench
from ropewalk.bench.training.bench import TrainingBench

RESULTS = Path(__file__).parents[1] / "results"
CARD = "h200"  # that the pages are of
WIDTH = 120  # of a line of a page
_TIMES = ("time", "graph", "host")
BENCHMARKS = ("rope", "attention", "host", "training", "serving")  # with rows of one schema; blocks has its own

CASES: dict[str, Sequence[Any]] = {  # of each benchmark, in the order of tables
    "rope": (*RopeBench.cases, *SweepBench.cases, *NormBench.cases),
    **{bench.name: bench.cases for bench in (AttentionBench, HostBench, TrainingBench)},
}

MODES = {
    "fwd": "forward",
    "bwd": "backward",
    "train": "training",
    "decode": "decoding",
    "rerope-fwd": "ReRoPE, forward",
    "rerope-train": "ReRoPE, training",
    "layer-fwd": "forward",
    "layer-train": "training",
    "autocast": "bf16 autocast",
    "bf16": "bf16",
}
SETTINGS = {
    "alibi": "ALiBi",
    "alibi-learned": "ALiBi, learned",
    "t5": "T5's bias",
    "t5-learned": "T5's bias, learned",
    "exposb": "ExpoSB",
    "exposb-decay": "ExpoSB with decay",
    "exposb-bands-learned": "ExpoSB, learned weights",
    "dropout": "dropout 0.1",
    "softcap": "softcap",
    "sinks": "sinks",
    "deterministic": "`deterministic=True`",
}
MASKS = {
    "topk": "12.5 % by top-k, lists per head",
    "frames": "frames of video",
    "sinks": "window and sinks",
    "documents": "documents",
    "dense": "all blocks",
}


_OURS = ("gluon", "triton")
# Tables of runs that a card need not have.
LATER = ("8-bit", "precision-errors", "precision-quality", "4-bit-qk", "4-bit-pv")
_MARKS = "†‡§¶"  # of cells whose run lacked a library, one for each set of them
FLASH_3 = "flash_attn_3"  # which few runs had, and which is the fastest other library where they had it


class Book:
    """The records of one card: of each case, mode and protocol the rows of the newest run, as in `gains`."""

    def __init__(self, card: str, folder: Path = RESULTS) -> None:
        self.card, self.folder = card, folder
        self.paths = {path.stem.split("-")[0]: path for path in sorted(folder.glob(f"*-{card}.jsonl"))}

    @functools.cached_property
    def compared(self) -> list[Record]:
        """The records that the report reads."""
        return g.read_records([self.paths[name] for name in ("rope", "attention", "training") if name in self.paths])

    @functools.cached_property
    def runs(self) -> dict[str, list[Row]]:
        """The lines about the runs of each record."""
        found = {name: self.record(name).runs for name in BENCHMARKS if name in self.paths}
        for name in ("blocks", "precision"):
            if name in self.paths:
                found[name] = [line for line in parse_lines(self.paths[name]) if "format" in line]
        return found

    @functools.cache  # noqa: B019  books live as long as the process
    def record(self, benchmark: str) -> Record:
        return read_record(self.paths[benchmark], benchmark)

    @functools.cache  # noqa: B019
    def runs_of_cases(self, benchmark: str) -> list[list[Row]]:
        """The rows that are right, by what was timed together, hot where there are protocols; the oldest first."""
        if benchmark not in self.paths:
            return []
        record = self.record(benchmark)
        right = (row for row in record.rows if row["status"] == "ok" and row.get("protocol", "hot") == "hot")
        return sorted(groups(right), key=lambda group: str(record.runs[group[0]["run"]]["date"]))

    @functools.cache  # noqa: B019
    def rows(self, benchmark: str) -> list[list[Row]]:
        """Of each case and mode the rows of the newest run, in the order of the benchmark's cases."""
        newest = dict[Any, list[Row]]()
        for group in self.runs_of_cases(benchmark):
            case = {k: str(v) for k, v in group[0]["case"].items() if k not in ("modes", "yardstick") and v is not None}
            newest[tuple(sorted(case.items())), group[0]["mode"]] = group
        names = [case.name for case in CASES.get(benchmark, ())]
        order = {name: number for number, name in reversed([*enumerate(names)])}
        return sorted(newest.values(), key=lambda group: order.get(group[0]["case"]["name"], len(order)))

    def each(self, benchmark: str, mode: str) -> Iterator[tuple[Row, dict[str, Row]]]:
        """Yield each case in a mode: any of its rows, and all of them by label; a yardstick is another case."""
        for group in self.rows(benchmark):
            if group[0]["mode"] == mode:
                yield group[0], {label(row): row for row in group if "yardstick" not in row}

    def find(self, benchmark: str, case: str, mode: str, variant: str = "") -> dict[str, Row]:
        """Return the rows of one case and mode by label; none if it was not measured."""
        found = (rows for lead, rows in self.each(benchmark, mode) if _is_of(lead, case, variant))
        return next(found, {})

    def newest(self, case: str, mode: str, variant: str, name: str) -> Row | None:
        """Return the newest row of an implementation, of a rotation where there is a variant, else of attention."""
        groups = reversed(self.runs_of_cases("rope" if variant else "attention"))
        found = (
            row for group in groups if group[0]["mode"] == mode and _is_of(group[0], case, variant) for row in group
        )
        return next((row for row in found if label(row) == name), None)

    def name_of(self, row: Row) -> str:
        """Return the name of a row's run."""
        return self.record(row["benchmark"]).name_of(row)

    def run_of(self, row: Row) -> Row:
        """Return the line about a row's run."""
        return self.runs[row["benchmark"]][row["run"]]

    def precision(self, mode: str, card: str | None = None) -> list[Row]:
        """Return the rows of products of few bits of a mode, such as "errors"; of the newest run that has some."""
        path = self.folder / f"precision-{card or self.card}.jsonl"
        lines = parse_lines(path) if path.exists() else []
        runs = list[list[Row]]()
        for line in lines:
            if "benchmark" in line:
                runs.append([])
            elif line.get("mode") == mode:
                runs[-1].append(line)
        return next((rows for rows in reversed(runs) if rows), [])

    def blocks(self) -> dict[tuple[Any, ...], Row]:
        """Return the rows of lists of blocks by mask, head dim and implementation."""
        lines = parse_lines(self.paths["blocks"]) if "blocks" in self.paths else []
        return {(line["row"], line.get("dim"), line.get("impl")): line for line in lines if "row" in line}


def _is_of(row: Row, case: str, variant: str) -> bool:
    return row["case"]["name"] == case and (not variant or variant_of(row["case"]) == variant)


class Table(NamedTuple):
    """Headings, rows of cells whose first one names the row, and the columns that a second card has too.

    Without columns a second card adds rows, if rows are `of_all` cards. `beside` are the rows of records that are held
    against other libraries: under the table it says which ones were timed in them. None: the table compares ours alone.
    Where rows are `of_runs`, the lines about the runs, the cells `against` other libraries are marked if their run
    lacked one that others had. `said` are more sentences under the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    again: tuple[int, ...] = ()
    of_all: bool = False
    beside: Sequence[Row] | None = None
    of_runs: Sequence[Row] = ()
    against: tuple[int, ...] = ()
    said: Sequence[str] = ()

    def render(self, others: Mapping[str, Table]) -> str:
        """Return Markdown; `others` are the same tables of other cards, by their names."""
        headings, rows = list(self.headings), [list(row) for row in self.rows]
        for card, table in others.items():
            known = {row[0]: row for row in table.rows}
            for heading in (self.headings[i] for i in self.again):
                # Which columns there are may depend on what was measured: another card's are found by their headings.
                at = table.headings.index(heading) if heading in table.headings else None
                cells = [NOTHING if at is None or row[0] not in known else known[row[0]][at] for row in self.rows]
                if any(map(str.isdigit, "".join(cells))):
                    headings.append(f"{heading}, {card.upper()}")
                    rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
            rows += [list(row) for row in table.rows if self.of_all]
        lines = [headings, ["---"] * len(headings), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Cells.


def us(microseconds: float | None) -> str:
    """Format microseconds to three digits, or all before the point."""
    return NOTHING if microseconds is None else to_digits(microseconds)


def time_of(row: Row | None, quantity: str = "time") -> float | None:
    """Return the median of a row: "time", in a CUDA graph "graph", or of the host "host"."""
    found = (row or {}).get(quantity)
    return None if found is None else float(found["median" if "median" in found else "p50"])


def ratio(theirs: float | None, ours: float | None) -> str:
    """Return how many times as fast ours is, bold where it is slower by more than what counts as equal."""
    if theirs is None or ours is None:
        return NOTHING
    text = f"{theirs / ours:.2f} ×"
    return text if theirs / ours >= 1 / (1 + g.SAME) else f"**{text}**"


def _rows(found: Iterable[tuple[Row, Mapping[str, Row]]]) -> list[Row]:
    """Return all rows of cases."""
    return [row for _, rows in found for row in rows.values()]


def number(row: Row | None, key: str, form: str = ".0f", scale: float = 1.0) -> str:
    return NOTHING if row is None or key not in row else f"{row[key] / scale:{form}}"


def best(rows: Iterable[Row], kind: str, quantity: str = "time") -> tuple[float | None, str]:
    """Return the least time of a kind of implementation, and its name; eager PyTorch is in no verdict."""
    ranked = (row for row in rows if row["kind"] == kind and row["impl"] not in EAGER)
    known = [(time, row["impl"]) for row in ranked if (time := time_of(row, quantity))]
    return min(known, default=(None, ""))


def versus(rows: Iterable[Row], ours: float | None, quantity: str = "time") -> str:
    """Name the fastest peer, with its time and how many times as fast ours is."""
    theirs, name = best(rows, "peer", quantity)
    return NOTHING if theirs is None else f"{us(theirs)}, {NAMES[name]}, {ratio(theirs, ours)}"


def in_words(row: Row) -> str:
    """Describe a case without what all cases of a table have in common."""
    text = g.describe_case({"benchmark": "attention", **row}).replace(", bfloat16", "")
    text = text.replace(f" R{row['case'].get('head_dim')}", "")
    return text.replace("half/", "half-split, ").replace("interleaved/", "interleaved, ").replace(", out of place", "")


# The rotation.


def rotation(book: Book) -> Table:
    """Rotations of many tokens: both kernels, a copy of the same bytes, and the fastest other library."""
    headings = ["case"]
    for way in ("forward", "backward"):
        headings += [f"{way}: CUDA", "Triton", "of a copy", "best other, µs, and × of it"]
    found, beside, runs, firsts = list[list[str]](), list[Row](), list[Row](), dict[str, bool]()
    for lead, rows in book.each("rope", "fwd"):
        case = lead["case"]
        # One order of pairs is enough but for one shape.
        first = firsts.setdefault(case["name"], case["interleaved"])
        is_other = first != case["interleaved"] and case["name"] != "llama3-8b"
        if case["name"].startswith("tokens-") or _is_norm(case) or is_other:
            continue
        cells = [in_words(lead)]
        for of in (rows, book.find("rope", case["name"], "bwd", variant_of(case))):
            ours = g.rotation_of(of.values())
            kernels = (of.get(name) for name in ("native", "triton"))
            cells += [*(us(time_of(row)) for row in kernels), number(ours, "copy_ratio", ".2f")]
            cells.append(versus(of.values(), time_of(ours)))
            beside += of.values()
        found.append(cells)
        runs.append(book.run_of(lead))
    return Table(headings, found, again=(1, 5), beside=beside, of_runs=runs, against=(4, 8))


def _is_norm(case: Mapping[str, Any]) -> bool:
    """Say whether a case is one of `--only norm`: with a norm, or beside one on three axes of positions."""
    return case.get("norm_offset") is not None or case.get("positions") in ("axes", "ordered")


def _peers_of(table: Iterable[Mapping[str, Row]], quantity: str) -> list[str]:
    """Return the peers with a time in any row of a table, in the order of `NAMES`."""
    timed = {name for rows in table for name, row in rows.items() if row["kind"] == "peer" and quantity in row}
    return [name for name in NAMES if name in timed]


def decode_rotation(book: Book) -> Table:
    """Rotations of one token a sequence, in a CUDA graph."""
    found = [(lead, rows) for lead, rows in book.each("rope", "decode") if not _is_norm(lead["case"])]
    ours = {"native": "CUDA", "rotary_embedding": "`rotary_embedding`", "triton": "Triton"}
    cells = []
    for lead, rows in found:
        times = {row["impl"]: time for row in rows.values() if is_peer(row) and (time := time_of(row, "graph"))}
        peers = best_two(times, lambda name, times=times: us(times[name]))
        cells.append([in_words(lead), *(us(time_of(rows.get(name), "graph")) for name in ours), *peers])
    return Table(["case", *ours.values(), *BEST_TWO], cells, (1,), beside=_rows(found))


def host_rotation(book: Book) -> Table:
    """The host's time of eager rotations of one token and of 64; a peer's in place if it has that."""
    cases, inside, outside = ("decode-1", "decode-64"), "half/in place", "half/out of place"
    known = {(case, place): book.find("rope", case, "decode", place) for case in cases for place in (inside, outside)}
    calls = [
        ("PyTorch's own `x.mul_(1.0)`", MULTIPLY, inside),
        ("`rotary_embedding`", "rotary_embedding", inside),
        ("`apply_rope`, in place", "native", inside),
        ("`apply_rope`, out of place", "native", outside),
    ]
    for name in _peers_of(known.values(), "host"):
        place = inside if any(name in known[case, inside] for case in cases) else outside
        calls.append((f"{NAMES[name]}, {place.partition('/')[2]}", name, place))
    found = []
    for title, name, place in calls:
        cells = [title]
        for case in cases:
            host, unit = (time_of(known[case, place].get(one), "host") for one in (name, MULTIPLY))
            cells.append(NOTHING if host is None or not unit else f"{us(host)} ({host / unit:.2f})")
        found.append(cells)
    recording = book.find("rope", "decode-1", "bwd", outside).get("native")
    found.append(["`apply_rope`, recording for autograd", us(time_of(recording, "host_forward")), NOTHING])
    beside = [row for rows in known.values() for row in rows.values() if "host" in row]
    return Table(["eager call, µs (× `mul_`)", "one token", "64 tokens"], found, (1,), beside=beside)


def lengths(book: Book) -> Table:
    """One shape at many lengths: in a CUDA graph up to 2048 tokens, with cold caches from there on."""
    known: dict[int, dict[bool, dict[str, Row]]] = {}
    for lead, rows in book.each("rope", "fwd"):
        if lead["case"]["name"].startswith("tokens-"):
            known.setdefault(lead["case"]["tokens"], {})[lead["case"]["interleaved"]] = rows
    found = []
    for tokens, pairs in sorted(known.items()):
        if tokens.bit_length() % 2 == 0:  # every other power of two shows as much
            continue
        quantity = "graph" if tokens <= 2048 else "time"
        times = (
            time_of(pairs.get(pair, {}).get(name), quantity) for pair in (False, True) for name in ("native", "triton")
        )
        found.append([str(tokens), *map(us, times)])
    return Table(["tokens", "half-split: CUDA", "Triton", "interleaved: CUDA", "Triton"], found, (1,))


def norm(book: Book) -> Table:
    """QK-norm with the rotation, and positions on three axes."""
    found, beside = [], list[Row]()
    names = ("compiled", "liger_kernel", "eager")
    for mode in ("fwd", "bwd", "decode"):
        for lead, rows in book.each("rope", mode):
            case = lead["case"]
            if not _is_norm(case):
                continue
            ours = g.rotation_of(rows.values())
            quantity = "graph" if "graph" in (ours or {}) else "time"
            cells = [f"{case['name']}: {in_words(lead)}, {MODES[mode]}", us(time_of(ours, quantity))]
            cells.append(number(ours if quantity == "time" else None, "copy_ratio", ".2f"))
            found.append([*cells, *(us(time_of(rows.get(peer), quantity)) for peer in names)])
            beside += rows.values()
    return Table(["case", "Ropewalk, µs", "of a copy", *(NAMES[name] for name in names)], found, (1,), beside=beside)


# Attention.


def kernels(mode: str) -> Callable[[Book], Table]:
    """Make the table of the kernels alone in a mode: TFLOP/s of ours and of the two best other libraries."""

    def make(book: Book) -> Table:
        found, runs = [], list[Row]()
        for lead, rows in book.each("attention", mode):
            _, name = best(rows.values(), "ours")
            peers = {row["impl"]: row for row in rows.values() if is_peer(row)}
            times, other = (g.against_peers(rows[name], peers.values()) if name else None) or (None, None)
            spent = {one: time for one, row in peers.items() if (time := time_of(row))}
            two = best_two(
                spent, lambda one, peers=peers: number(peers[one], "tflops"), None if other is None else other["impl"]
            )
            verdict = NOTHING if other is None else f"{ratio(times, 1.0)} {NAMES[other['impl']]}"
            found.append([in_words(lead), *(number(rows.get(one), "tflops") for one in _OURS), *two, verdict])
            runs.append(book.run_of(lead))
        headings = ["case", *_OURS, *BEST_TWO, "our faster one, × the best other"]
        beside = _rows(book.each("attention", mode))
        return Table(headings, found, (1, 5), beside=beside, of_runs=runs, against=(3, 5))

    return make


def choices(book: Book) -> Table:
    """RoPE and attention: the pick of `impl=None`, and the two best other libraries."""
    found, runs = [], list[Row]()
    for one in hot_choices(book):
        case = f"{in_words(one.lead)}, {MODES[one.lead['mode']]}"
        first, second = peers_of_choice(one)
        times, name = one.best_peer or (None, "")
        # Over rounds another library may be the best one than by medians.
        of = "" if not name or first.endswith(f", {NAMES[name]}") else f" {NAMES[name]}"
        found.append([case, show_picks(one), first, second, f"{ratio(times, 1.0)}{of}"])
        runs.append(book.run_of(one.lead))
    beside = [row for mode in ("train", "decode", *REROPE) for row in _rows(book.each("attention", mode))]
    headings = ["case", "`impl=None`", *BEST_TWO, "× the best other"]
    return Table(headings, found, (1, 4), beside=beside, of_runs=runs, against=(2, 4))


@functools.cache
def hot_choices(book: Book) -> list[g.Choice]:
    order = {case.name: number for number, case in enumerate(CASES["attention"])}
    found = (choice for choice in g.newest_choices(book.compared) if choice.lead["protocol"] == "hot")
    return sorted(found, key=lambda choice: order.get(choice.lead["case"]["name"], len(order)))


def show_pick(pick: tuple[float, str] | None) -> str:
    return NOT_MEASURED if pick is None else f"{duration(pick[0])}, {pick[1]}"


def show_picks(choice: g.Choice) -> str:
    """Show what `impl=None` picks; where flash-attn 4 changes that, both."""
    _, without, has_flash = choice.picks
    if without is None or has_flash is None or without[1] == has_flash[1]:
        return show_pick(has_flash or without)
    return f"{show_pick(has_flash)}; without flash-attn 4 {show_pick(without)}"


def settings(book: Book) -> Table:
    """Schemes, dropout, softcap, sinks and the deterministic backward, as multiples of the time without."""
    shapes, times = dict[str, str](), dict[tuple[str, str, str, str], float]()
    for kind in ("schemes-fwd", "schemes-bwd", "variants-fwd", "variants-bwd", "learned-bwd"):
        for lead, rows in book.each("attention", kind):
            name, way = lead["case"]["name"], kind.rpartition("-")[2]
            shapes[name] = in_words(lead)
            for impl in _OURS:
                plain = time_of(rows.get(impl))
                for setting in SETTINGS:
                    time = time_of(rows.get(f"{impl} + {setting}"))
                    if time and plain:
                        times.setdefault((setting, name, way, impl), time / plain)
    columns = [(name, way) for name in shapes for way in ("fwd", "bwd")]
    found = []
    for setting, title in SETTINGS.items():
        cells = [
            " / ".join(f"{times[key]:.2f}" if (key := (setting, *column, impl)) in times else NOTHING for impl in _OURS)
            for column in columns
        ]
        found += [[title, *cells]] if any(key[0] == setting for key in times) else []
    return Table(["gluon / triton", *(f"{shapes[name]}, {MODES[way]}" for name, way in columns)], found, (1,))


def rerope(book: Book) -> Table:
    """ReRoPE beside RoPE in the same kernels, two calls of FlashAttention-4, and eager PyTorch."""
    found, beside = [], list[Row]()
    for mode in REROPE:
        for lead, rows in book.each("attention", mode):
            cells = [f"{in_words(lead)}, {MODES[mode].partition(', ')[2]}"]
            for impl in _OURS:
                time, plain = (time_of(rows.get(f"{impl} + {position}")) for position in ("rerope", "rope"))
                cells.append(NOTHING if not time or not plain else f"{us(time)}, {time / plain:.2f} × RoPE")
            cells += [us(time_of(rows.get("flash + rerope"))), us(time_of(rows.get("eager + rerope")))]
            found.append(cells)
            beside += rows.values()
    return Table(["case, µs", *_OURS, NAMES[g.FLASH], NAMES["eager"]], found, (1, 3), beside=beside)


def layer(book: Book) -> Table:
    """Attention with QK-norm, RoPE of half the features and an output gate."""
    parts = {
        "half-rope": "bare",
        "norm": "norm",
        "gate": "gate",
        "norm-gate": "norm and gate",
        "max logits": "max logits",
    }
    found, beside = [], list[Row]()
    for mode in LAYER:
        for lead, rows in book.each("attention", mode):
            shape, picked = f"{in_words(lead)}, {MODES[mode]}", rows.get("auto + norm-gate", {}).get("served_by")
            for impl in ("auto", *_OURS):
                times = {part: time_of(rows.get(f"{impl} + {part}")) for part in parts}
                bare = times["half-rope"]
                cells = [f"{us(time)} ({time / bare:.3f})" if time and bare else us(time) for time in times.values()]
                found.append([f"{shape}: {f'`impl=None`, {picked}' if impl == 'auto' else impl}", *cells])
            for row in (row for row in rows.values() if row["kind"] == "peer"):
                title = f"{NAMES[row['impl']]}, {row['position'].partition(' ')[0]} norm, RoPE and gate"
                cells = [NOTHING] * 3 + [us(time_of(row)), NOTHING]
                found.append([f"{shape}: {title}", *cells])
            beside += rows.values()
    return Table(["µs (× bare)", *parts.values()], found, (4,), beside=beside)


def eight_bits(book: Book) -> Table:
    """8-bit products with RoPE and all that quantises, beside 16 bits and other libraries; and the kernel alone."""
    found, beside, runs = [], list[Row](), list[Row]()
    plain, ours = "gluon + rope", {"int8": "gluon + rope-int8", "int8-fp8": "gluon + rope-int8-fp8"}
    others = ("sageattention_1", "sageattention_2", "cudnn_fp8")
    for lead, rows in book.each("attention", EIGHT_BITS):
        cells = [in_words(lead), number(rows.get(plain), "tflops")]
        for name, with_rope in ours.items():
            row, alone = rows.get(with_rope, {}), rows.get(f"gluon + {name}, kernel alone", {})
            cells += [number(row, "tflops"), ratio(row.get("ratios", {}).get(plain), 1.0)]
            cells.append(ratio(alone.get("ratios", {}).get("gluon"), 1.0))
        cells += [number(rows.get(f"{name} + {COMPILED}"), "tflops") for name in others]
        found.append(cells)
        beside += rows.values()
        runs.append(book.run_of(lead))
    headings = ["case, TFLOP/s", "16 bits"]
    headings += [cell for name in ours for cell in (f"`{name}`", "× 16 bits", "kernel alone")]
    return Table([*headings, *(NAMES[name] for name in others)], found, (2, 5), beside=beside, of_runs=runs)


def precision_errors(book: Book) -> Table:
    """Errors against float64 by precision, those against an 8-bit precision's definition, and the log-sum-exp's."""
    known = dict[str, dict[str, Row]]()
    for row in book.precision("errors"):
        case = row["case"]
        words = [f"{case['name']}, D {case['head_dim']}", *(["RoPE"] if case["rotated"] else [])]
        words += ["causal" if case["causal"] else "full", f"{case['tokens']} tokens"]
        known.setdefault(", ".join(words), {})[row["precision"]] = row
    found = []
    for title, rows in known.items():
        cells = [number(rows.get(name), "error", ".2f", 0.01) for name in ("16-bit", "int8", "int8-fp8")]
        cells += [number(rows.get(name), "kernel_error", ".2f", 0.01) for name in ("int8", "int8-fp8")]
        # Scores are the same of both.
        found.append([title, *cells, number(rows.get("int8"), "lse_error", ".4f")])
    headings = ["error, %", "16 bits", "`int8`", "`int8-fp8`"]
    headings += ["`int8`, of its definition", "`int8-fp8`, of its definition", "log-sum-exp, 8 bits"]
    return Table(headings, found)


def four_bits(product: str) -> Callable[[Book], Table]:
    """Make the table of a product's errors by the format of its operands, in %, by arithmetic on a CPU."""

    def make(book: Book) -> Table:
        known = dict[str, dict[str, str]]()
        for row in book.precision("bits", "cpu"):
            if row["product"] == product:
                title = f"{row['case']['name']}{', RoPE' if row['case']['rotated'] else ''}"
                known.setdefault(title, {})[row["format"]] = f"{row['error'] * 100:.1f}"
        formats = list(dict.fromkeys(name for cells in known.values() for name in cells))
        return Table(["error, %", *formats], [[title, *cells.values()] for title, cells in known.items()])

    return make


def precision_quality(book: Book) -> Table:
    """Small language models by each precision, the GPU's and the CPU's: perplexity, and keys that they recall."""
    found = []
    for place, card in (("", None), ("CPU, ", "cpu")):
        plain = dict[int, Row]()
        for row in book.precision("quality", card):
            exact = plain.setdefault(row["length"], row)
            name = "16 bits" if row["precision"] == "16-bit" else f"`{row['precision']}`"
            more, error = ((math.exp(row[key]) - 1) * 100 for key in ("more", "standard_error"))
            cells = [
                f"{row['perplexity']:.4f}",
                NOTHING if row is exact else f"{more:+.3f} ± {error:.3f}",
                f"{row['recalled'] * 100:.0f}",
            ]
            found.append([f"{place}{row['length']} bytes, {name}", *cells, f"{row['digit_loss']:.4f}"])
    return Table(["text", "perplexity of a byte", "more, %", "keys recalled, %", "loss of a digit, nats"], found)


def decoding(book: Book) -> Table:
    """One query a row over a cache, contiguous and in pages."""
    found = []
    for lead, rows in book.each("attention", "decode"):
        for name, row in rows.items():
            if row["kind"] != "anchor":
                ours = name.replace(" + rope", "").replace("auto", "`impl=None`")
                title = NAMES[row["impl"]] if row["kind"] == "peer" else ours
                cells = [us(time_of(row)), number(row, "gb_per_s"), f"{row['ratios'][COPY]:.2f}"]
                found.append([f"{in_words(lead)}: {title}", *cells])
    return Table(["case", "µs", "GB/s", "of a copy"], found, (1,), beside=_rows(book.each("attention", "decode")))


def memory(book: Book) -> Table:
    """Bytes at the peak of training, over those of inputs, outputs, gradients and rotated q and k."""
    found = []
    for lead, rows in book.each("attention", "memory"):
        # "auto" goes by what it took in this record: today it may take another backend.
        by_backend = {(row.get("served_by", row["impl"]), row["position"]): row for row in rows.values()}
        for (backend, position), row in by_backend.items():
            title = f"{in_words(lead)}: {backend}, {'ReRoPE' if position == 'rerope' else 'RoPE'}"
            found.append([title, f"{row['peak_bytes'] / row['floor_bytes']:.3f}"])
    return Table(["case", "peak, of what training must hold"], found, (1,))


# Serving, lists of blocks, the host, training.


def serving(book: Book) -> Table:
    """Decoding, appending and prefill over pages of each format."""
    kinds = {"bf16": "bfloat16", "fp8": "float8", "int8": "int8", "int4": "4-bit"}
    peers = {f"flashinfer + {kind}": f"{NAMES['flashinfer']}, {kinds[kind]}" for kind in ("bf16", "fp8")}
    found, beside = [], list[Row]()
    for mode in ("decode", "append", "prefill"):
        for lead, rows in book.each("serving", mode):
            times = (time_of(rows.get(name)) for name in (*kinds, *peers))
            found.append([lead["case"]["name"], *map(us, times)])
            beside += rows.values()
    # A column for each that any row has, and of a second card our own.
    shown = [0, *(i for i in range(1, 7) if i <= len(kinds) or any(row[i] != NOTHING for row in found))]
    headings = ["µs", *kinds.values(), *peers.values()]
    return Table([headings[i] for i in shown], [[row[i] for i in shown] for row in found], (1, 2, 3, 4), beside=beside)


def append_host(book: Book) -> Table:
    """The host's time of an eager append of 64 tokens, and as multiples of `rotary_embedding`'s."""
    rows = book.find("serving", "host, append 64 tokens", "host")
    unit = time_of(rows.get("rotary_embedding"))
    found = [
        [
            f"`append_kv`, {name}" if name in ("bf16", "fp8", "int8", "int4") else f"`{name}`",
            us(time),
            f"{time / unit:.2f}",
        ]
        for name, row in rows.items()
        if (time := time_of(row)) and unit
    ]
    return Table(["eager call of 64 tokens", "host, µs", "× `rotary_embedding`"], found, (2,), beside=[*rows.values()])


def blocks(book: Book) -> Table:
    """Attention over lists of blocks, beside no lists, Triton and FlexAttention."""
    rows, found = book.blocks(), list[list[str]]()
    for dim in (128, 64):
        for name, title, ours in (("dense", "no lists", "no lists"), *((*x, "ropewalk") for x in MASKS.items())):
            cells = [f"D {dim}, {title}"]
            for way in ("forward", "backward"):
                cells.append(number(rows.get((name, dim, ours)), f"{way}_ms", ".2f"))
                others = ("triton", "flex") if ours == "ropewalk" else ("", "")
                cells += [number(rows.get((name, dim, impl)), f"{way}_tflops") for impl in (ours, *others)]
            found.append(cells)
    headings = (
        x for way in ("forward", "backward") for x in (f"{way}, ms", f"{way}, TFLOP/s", "Triton", "FlexAttention")
    )
    plain = {"benchmark": "blocks", "run": 0, "case": {}, "mode": "", "time": {}}  # its rows have a schema of their own
    beside = [{**plain, **row, "kind": "peer"} for row in rows.values() if row.get("impl") in NAMES]
    return Table(["mask", *headings], found, (2, 6), beside=beside)


def host(book: Book) -> Table:
    """The host's part of eager calls, in µs and as multiples of `mul_`."""
    names = {"auto": "`impl=None`", **{impl: impl for impl in ("triton", "gluon", "flash", "sdpa")}}
    peers = ("sdpa_default", "cudnn", "flash_attn_4", "flex")
    found = []
    for group in book.rows("host"):
        rows, mode = {label(row): row for row in group}, group[0]["mode"]
        setting, _, way = mode.rpartition("-")
        if setting == "rotate":
            continue
        ends = {"none": ("", ""), "rope": (" + rope", " + compiled rope")}.get(
            setting, (f" + {setting}", f" + {setting}")
        )
        cells = [f"{group[0]['case']['name']}, {setting}, {MODES[way]}"]
        for name in (*(f"{name}{ends[0]}" for name in names), *(f"{name}{ends[1]}" for name in peers)):
            row = rows.get(name)
            cells.append(NOTHING if row is None else f"{us(time_of(row, 'host'))} ({row['multiple']['median']:.1f})")
        found.append(cells)
    beside = [row for group in book.rows("host") for row in group]
    return Table(["case, µs (× `mul_`)", *names.values(), *(NAMES[name] for name in peers)], found, (1,), beside=beside)


def rotate_host(book: Book) -> Table:
    """The host's part of eager rotations in the rounds of its own benchmark."""
    found = []
    for lead, rows in book.each("host", "rotate-fwd"):
        for row in (row for row in rows.values() if row["impl"] != MULTIPLY):
            cells = [us(time_of(row, "host")), f"{row['multiple']['median']:.2f}"]
            found.append([f"{lead['case']['name']}: `{row['impl']}`, {row['position']}", *cells])
    return Table(["call", "µs", "× `mul_`"], found, (2,))


def training(book: Book) -> Table:
    """Steps of whole models: tokens per second and memory of ours, and how many times as fast as others."""
    found, beside = [], list[Row]()
    for mode in ("autocast", "bf16"):
        for lead, rows in book.each("training", mode):
            ours = rows.get("ropewalk")
            sdpa = next((rows[name] for name in ("sdpa", "compiled RoPE + sdpa") if name in rows), None)
            eager = next((rows[name] for name in ("eager", "RoPE + eager") if name in rows), None)
            others = (sdpa, rows.get("flash_attention_4"), eager)
            shape = g.describe_case({**lead, "benchmark": "training"})
            case = f"{lead['case']['name']}: {shape}, {MODES[mode]}"
            cells = [number(ours, "tokens_per_second", ",.0f"), number(ours, "peak_bytes", ".1f", 2**30)]
            cells += [number(sdpa, "peak_bytes", ".1f", 2**30), *(_over(ours, other) for other in others)]
            found.append([case, *cells])
            beside += rows.values()
    headings = ["model", "tokens/s", "GiB", "SDPA's GiB", "× SDPA", "× FlashAttention-4", "× eager"]
    return Table(headings, found, (1, 4), beside=beside)


def _over(ours: Row | None, other: Row | None) -> str:
    """Return how many times as fast a step of ours is, by the median over rounds."""
    if ours is None or other is None:
        return NOTHING
    return ratio(ours["ratios"].get(label(other)), 1.0)


# What is gained and lost.


def verdicts(book: Book) -> Table:
    """By kind of comparison, in how many cases ours are ahead of the best other library, level or behind."""
    kinds = dict[str, list[g.Gain]]()
    for gain in g.find_gains(row for record in book.compared for row in record.rows):
        if gain.times is not None and gain.lead.get("protocol", "hot") == "hot":
            kinds.setdefault(gain.title.removesuffix(", hot"), []).append(gain)
    found = []
    for title, group in kinds.items():
        counts = (str(sum(gain.outcome == one for gain in group)) for one in (g.FASTER, g.LEVEL, g.SLOWER))
        times = [gain.times for gain in group if gain.times is not None]
        found.append([title, *counts, *(f"{of(times):.2f} ×" for of in (statistics.median, min, max))])
    headings = ["ours over the best other library", "faster", "within 2 %", "slower", "median", "least", "most"]
    said = [*_say_cold(book), *_say_with(book, FLASH_3, kinds)]
    return Table(headings, found, (1, 2, 3), beside=_compared(book), said=said)


def _say_cold(book: Book) -> Iterator[str]:
    """Say how the rotations that are compared in a CUDA graph fare without one."""
    rows = [row for record in book.compared for row in record.of("rope") if "graph" in row]
    counts = []
    for mode, what in (("decode", "decode cases"), ("fwd", "forwards")):
        cold = g.find_gains((row for row in rows if row["mode"] == mode), in_graph=False)
        known = [gain.outcome for gain in cold if gain.times is not None]
        counts += [f"{known.count(g.SLOWER)} of {len(known)} {what}"] if known else []
    if counts:
        said = "Launched singly, with a cold cache, another library is more than 2 % faster in"
        yield f"{said} {' and '.join(counts)} that are compared in a CUDA graph{_on(book)}."


def _say_with(book: Book, peer: str, kinds: Mapping[str, Sequence[g.Gain]]) -> Iterator[str]:
    """Count the outcomes of the comparisons whose run had a library."""
    lacking = {NAMES[peer]}
    had, of = dict[str, list[g.Gain]](), 0
    for title, group in kinds.items():
        known = [gain for gain in group if peer in (book.run_of(gain.lead).get("peers") or {})]
        runs = [book.run_of(gain.lead) for gain in known]
        found = [one for one, run in zip(known, runs, strict=True) if not lacking & {*lacked_by(run, [peer], runs)}]
        of += len(known)
        had |= {title: found} if found else {}
    if had:
        count = sum(map(len, had.values()))
        outcomes = "; ".join(f"{title}: {_count(group)}" for title, group in had.items())
        said = f"was installed in the runs of {count} of {of} comparisons of attention{_on(book)}"
        yield f"{NAMES[peer]} {said}. {outcomes}."


def _count(group: Sequence[g.Gain]) -> str:
    words = {g.FASTER: "faster", g.LEVEL: "within 2 %", g.SLOWER: "slower"}
    counts = ((sum(gain.outcome == one for gain in group), word) for one, word in words.items())
    return ", ".join(f"{count} {word}" for count, word in counts if count)


def _on(book: Book) -> str:
    return "" if book.card == CARD else f" on one {book.card.upper()}"


def _compared(book: Book) -> list[Row]:
    """Return the rows of the modes that verdicts are of."""
    rows = (row for record in book.compared for row in record.rows)
    return [row for row in rows if (row["benchmark"], row["mode"]) in g.COMPARED]


def losses(book: Book) -> Table:
    """Every case where another library is faster, the worst first; those of another card than `CARD` name it."""
    card = "" if book.card == CARD else f", {book.card.upper()}"
    gains = g.find_gains(row for record in book.compared for row in record.rows)
    behind = [gain for gain in gains if gain.outcome == g.SLOWER and gain.lead.get("protocol", "hot") == "hot"]
    found, runs = [], list[Row]()
    for gain in sorted(behind, key=lambda one: one.times or 0.0):
        assert gain.ours is not None
        assert gain.peer is not None
        title = gain.title.removesuffix(", hot") + (", in a CUDA graph" if gain.quantity == "graph" else "")
        case = f"{gain.lead['case']['name']}: {in_words(gain.lead)}{card}"
        ours = f"{duration(time_of(gain.ours, gain.quantity))}, {gain.ours.get('served_by', gain.ours['impl'])}"
        # The median over rounds alone: beside it a median of the other's own might say the opposite.
        found.append([case, title, ours, f"{gain.times:.2f} × {NAMES[gain.peer['impl']]}"])
        runs.append(book.run_of(gain.lead))
    headings = ["case", "comparison", "ours", "ours, × the faster"]
    return Table(headings, found, of_all=True, beside=_compared(book), of_runs=runs, against=(3,))


def goals(book: Book) -> Table:
    """Count the project's targets that the records meet and miss."""
    found = []
    for name in ("attention", "training", "parallel"):
        verdicts = [one.met for one in targets.judge(book.record(name))] if name in book.paths else []
        if verdicts:
            file = f"{name}-{book.card}.jsonl"
            found.append(
                [f"[{name}-{book.card}](../results/{file})", *map(str, (sum(verdicts), verdicts.count(False)))]
            )
    return Table(["record", "targets met", "missed"], found, of_all=True)


def records(book: Book) -> Table:
    """The records: commits, dates, GPUs and versions of their runs."""
    found = []
    for name, runs in book.runs.items():
        texts = [
            ", ".join(dict.fromkeys(str(run.get(key))[:length] for run in runs))
            for key, length in (("commit", 7), ("date", 10), ("device", 40), ("torch", 6), ("triton", 6))
        ]
        peers = {
            f"{NAMES[peer]} {version}": None
            for run in runs
            for peer, version in (run.get("peers") or {}).items()
            if peer in NAMES and not version.startswith("missing") and version != run.get("torch", "")[: len(version)]
        }
        if any(run.get("dirty") for run in runs):
            texts[0] += ", with changes"
        found.append(
            [f"[{name}-{book.card}](../results/{name}-{book.card}.jsonl)", *texts, ", ".join(peers) or NOTHING]
        )
    headings = ["record", "commit", "date", "GPU", "torch", "Triton", "other libraries"]
    return Table(headings, found, of_all=True)


TABLES: dict[str, Callable[[Book], Table]] = {
    "rotation": rotation,
    "decode-rotation": decode_rotation,
    "host-rotation": host_rotation,
    "lengths": lengths,
    "norm": norm,
    "forward": kernels("fwd"),
    "backward": kernels("bwd"),
    "choices": choices,
    "settings": settings,
    "rerope": rerope,
    "layer": layer,
    "8-bit": eight_bits,
    "precision-errors": precision_errors,
    "precision-quality": precision_quality,
    "4-bit-qk": four_bits("QK"),
    "4-bit-pv": four_bits("PV"),
    "decoding": decoding,
    "memory": memory,
    "serving": serving,
    "append-host": append_host,
    "blocks": blocks,
    "host": host,
    "rotate-host": rotate_host,
    "training": training,
    "verdicts": verdicts,
    "losses": losses,
    "targets": goals,
    "records": records,
}


@functools.cache
def books(folder: Path = RESULTS) -> list[Book]:
    """Return a book for each card that anything was measured on, `CARD` first, on which attention was."""
    if not (folder / f"attention-{CARD}.jsonl").exists():
        raise SystemExit(f"{folder.name}/ has no attention-{CARD}.jsonl: tools/record_all.py makes it")
    paths = (path for name in (*BENCHMARKS, "blocks") for path in folder.glob(f"{name}-*.jsonl"))
    others = sorted({path.stem.partition("-")[2] for path in paths} - {CARD})
    return [Book(card, folder) for card in (CARD, *others)]


def make(name: str, folder: Path = RESULTS) -> str:
    """Return a table by name, with the columns of other cards; raise if nothing of it was measured."""
    if name not in TABLES:
        raise SystemExit(f"a page has a mark {name!r}, but there are tables {', '.join(TABLES)} and README's overview")
    card, *others = books(folder)
    made = {book: TABLES[name](book) for book in (card, *others)}
    timed, runs = list[str](), list[Row]()
    for book, table in made.items():
        timed += [row["impl"] for row in table.beside or () if is_peer(row)]
        runs += [book.run_of(rows[0]) for rows in groups(table.beside or ())]
    marks = Marks(timed, runs)
    tables = {book: _without_empty_rows(marks.put(table)) for book, table in made.items()}
    if not tables[card].rows and name in LATER:
        return f"The records of the {card.card.upper()} have no row of this table yet.\n"
    if not tables[card].rows and name != "losses":
        raise SystemExit(f"the records of {card.card} have no row of table {name!r}: tools/record_all.py measures all")
    text = tables[card].render({book.card: tables[book] for book in others if tables[book].rows})
    if tables[card].beside is None:
        return text
    said = [*marks.explain(), *(one for table in tables.values() for one in table.said)]
    return f"{text}\n{fold([*said, *name_measured(timed, runs)])}"


class Marks:
    """Mark cells whose run lacked a library that was timed in other runs of the table, and say which."""

    def __init__(self, timed: Sequence[str], runs: Sequence[Row]) -> None:
        self.timed, self.runs = timed, runs
        self.known: dict[tuple[str, ...], str] = {}

    def of(self, run: Row) -> str:
        """Return the mark of a run, after a space; nothing for one that had all."""
        lacked = lacked_by(run, self.timed, self.runs)
        return f" {self.known.setdefault(lacked, _MARKS[len(self.known)])}" if lacked else ""

    def put(self, table: Table) -> Table:
        """Return a table with marks in its cells against other libraries."""
        rows = [list(row) for row in table.rows]
        for row, run in zip(rows, table.of_runs, strict=False):
            for at in table.against:
                row[at] += "" if row[at] == NOTHING else self.of(run)
        return table._replace(rows=rows)

    def explain(self) -> list[str]:
        return [f"{mark} The run of this cell lacked {', '.join(names)}." for names, mark in self.known.items()]


def is_peer(row: Row) -> bool:
    """Say whether a row is of another library that was timed; two calls of FlashAttention-4 are, for ReRoPE."""
    is_twice = row["impl"] == g.FLASH and row["mode"] in REROPE and row.get("position") == "rerope"
    return (row["kind"] == "peer" or is_twice) and row["impl"] not in EAGER and any(key in row for key in _TIMES)


def fold(sentences: Iterable[str]) -> str:
    """Break sentences, each of which begins a line, at the width of pages."""
    return "".join(f"{line}\n" for one in sentences for line in textwrap.wrap(one, WIDTH, break_on_hyphens=False))


def _without_empty_rows(table: Table) -> Table:
    return table._replace(rows=[row for row in table.rows if {*row[1:]} != {NOTHING}])
