"""Write all that shows numbers of the records: the tables between marks in README.md and docs/, the times of kernel
pages, the figures, and results/report-h200.html.

`python tools/overview.py` writes them from results/; with --check it fails and says what is not of the records.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tables import CARD, RESULTS, Book, Marks, books, fold, hot_choices, is_peer, make, show_picks, time_of

from ropewalk.bench.attention.bench import AttentionBench
from ropewalk.bench.core.figure import COLOURS, OURS, marker_of, page_figure
from ropewalk.bench.core.load import Row
from ropewalk.bench.report.gains import FASTER, LEVEL, SAME, SLOWER, Choice, Gain, find_gains
from ropewalk.bench.report.page import duration, write_report
from ropewalk.bench.report.peers import NAMES, name_measured
from ropewalk.bench.rope.bench import RopeBench

ROOT = Path(__file__).parents[1]
FIGURE, REPORT = RESULTS / f"overview-{CARD}.png", RESULTS / f"report-{CARD}.html"
README = ROOT / "README.md"
PAGES = (README, *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "notes" not in path.parts))
OVERVIEW = "overview"  # README's table, which is made of the lines below
_MARKS = re.compile(r"<!-- (?P<name>[a-z0-9-]+) -->\n(?P<table>.*?)<!-- end of (?P=name) -->\n", re.DOTALL)
# A row of a kernel page: the record's run, case, mode, what, µs and rate. The middle three are written by hand.
_TIMES = re.compile(r"^\| record \| case \| mode \| what \| µs \| rate \|\n\|[ -|]+\n((?:\|.*\n)+)", re.MULTILINE)

_PICKED: dict[str, Any] = {"marker": "o", "facecolors": "none", "edgecolors": OURS, "linewidths": 1.2, "s": 60}


@dataclass(frozen=True)
class Line:
    """One comparison, of our rotation or of attention."""

    label: str
    case: str
    mode: str  # a direction of the rotation, or a mode of attention
    variant: str = ""  # of the rotation
    time: str = "time"  # of the rotation: "time" with a cold cache, "graph" in a CUDA graph, "host"
    in_table: bool = False  # the figure has all lines, README's table these


_HALF, _INPLACE = "half/out of place", "half/in place"
LINES = (
    Line("RoPE forward, Llama 3 8B, 2 × 8192", "llama3-8b", "fwd", _HALF, in_table=True),
    Line("RoPE forward, in place", "llama3-8b", "fwd", _INPLACE),
    Line("RoPE backward", "llama3-8b", "bwd", _HALF),
    Line("RoPE of 64 decoding tokens, in a CUDA graph", "decode-64", "decode", _INPLACE, "graph", in_table=True),
    Line("host time of rotating 64 decoding tokens, eager", "decode-64", "decode", _INPLACE, "host"),
    Line("training, causal, 4 × 4096, H32 D128", "causal-4k-d128", "train", in_table=True),
    Line("training, causal, 2 × 8192, H32/8 D128", "gqa-8k-d128", "train"),
    Line("training, causal, 1 × 8192, H32 D64", "causal-8k-d64", "train"),
    Line("training, causal, 2 × 8192, H24/4 D256", "gqa-8k-d256", "train", in_table=True),
    Line("training, BERT-base, 32 × 512 with padding", "bert-512-lengths", "train"),
    Line("training, 64 packed sequences", "packed-4k-d128", "train", in_table=True),
    Line("decoding, 64 caches of up to 8192 keys", "decode-8k-d128", "decode"),
    Line("decoding, one cache of 8192 keys", "decode-1", "decode", in_table=True),
)
# Of whole models README has these, by case and mode, and beside them the best one and the worst.
USUAL_MODELS = (("bert-base", "autocast"), ("llama-8-layers", "bf16"))


@dataclass(frozen=True)
class Comparison:
    """Times in µs: our kernels', each peer's, and of attention what `impl=None` picks."""

    line: Line
    ours: float
    choice: Choice | None
    peers: dict[str, float]
    run: dict[str, Any]  # the line about it

    @property
    def record(self) -> str:
        return f"{'attention' if self.choice else 'rope'}-{CARD}"


def compare(line: Line) -> Comparison | None:
    """Look up a line's times; None: ours or no peer was measured."""
    book = books()[0]
    if line.variant:
        rows = [*book.find("rope", line.case, line.mode, line.variant).values()]
        times = {
            (row["kind"], row["impl"]): time
            for row in rows
            if (row["kind"] == "ours" or is_peer(row)) and (time := time_of(row, line.time))
        }
        ours = times.get(("ours", "native"), times.get(("ours", "triton")))
        peers, choice = {name: time for (kind, name), time in times.items() if kind == "peer"}, None
        lead = rows[0] if rows else None
    else:
        leads = {(one.lead["case"]["name"], one.lead["mode"]): one for one in hot_choices(book)}
        choice = leads.get((line.case, line.mode))
        kernels = None if choice is None else choice.picks[0]
        ours, peers = None if kernels is None else kernels[0], {} if choice is None else choice.peers
        lead = None if choice is None else choice.lead
    return (
        None if lead is None or ours is None or not peers else Comparison(line, ours, choice, peers, book.run_of(lead))
    )


def comparisons() -> list[Comparison]:
    return [found for line in LINES if (found := compare(line)) is not None]


def make_overview(found: Sequence[Comparison], models: Sequence[Gain] = ()) -> str:
    """Return README's table: ours, by what `impl=None` picks, and how many times as fast as the best peer that is."""
    in_table = [one for one in found if one.line.in_table]
    names = {name for one in in_table for name in one.peers}.union(*(one.timed for one in models))
    runs = [*(one.run for one in in_table), *(books()[0].run_of(one.lead) for one in models)]
    marks = Marks([*names], runs)
    lines = ["| one H200, bf16 | Ropewalk | times as fast as the best other |", "| --- | --- | --- |"]
    for one in in_table:
        if one.choice is not None and one.choice.best_peer is not None:
            times, name = one.choice.best_peer
        else:
            name = min(one.peers, key=one.peers.__getitem__)
            times = one.peers[name] / one.ours
        shown = duration(one.ours) if one.choice is None else show_picks(one.choice)
        lines.append(f"| {one.line.label} | {shown} | {_verdict(times, name, one.record)}{marks.of(one.run)} |")
    for label, gain in _shown_models(models):
        assert gain.ours is not None
        assert gain.peer is not None
        verdict = _verdict(gain.times or 0.0, gain.peer["impl"], f"training-{CARD}")
        lines.append(f"| {label} | {duration(time_of(gain.ours))} | {verdict} |")
    said = marks.explain()
    if models:
        counts = [sum(gain.outcome == one for gain in models) for one in (FASTER, LEVEL, SLOWER)]
        said.append(
            "Models are of transformers, and the other is its own attention. "
            f"{counts[0]} of {len(models)} train faster, {counts[1]} within 2 %, {counts[2]} slower; "
            "the table has two usual ones, the best and the worst."
        )
    return "\n".join(lines) + "\n\n" + fold([*said, *name_measured(names, runs)])


def _verdict(times: float, name: str, record: str) -> str:
    slower = "" if times >= 1 / (1 + SAME) else ", **slower**"
    return f"[{times:.2f} × {NAMES[name]}](results/{record}.jsonl){slower}"


def trained_models() -> list[Gain]:
    """Return the comparisons of whole models' training steps with what transformers has."""
    rows = (row for record in books()[0].compared for row in record.of("training"))
    return [gain for gain in find_gains(rows) if gain.times is not None]


def _shown_models(models: Sequence[Gain]) -> Iterator[tuple[str, Gain]]:
    """Yield the usual models, the best one and the worst, each with its label."""
    by_case = {(gain.lead["case"]["name"], gain.lead["mode"]): gain for gain in models}
    shown = [(f"training {_describe_model(by_case[key].lead)}", by_case[key]) for key in USUAL_MODELS if key in by_case]
    ranked = sorted(models, key=lambda gain: gain.times or 0.0)
    for word, gain in zip(("best", "worst"), (*ranked[-1:], *ranked[:1]), strict=False):
        shown.append((f"the {word} model: {_describe_model(gain.lead)}", gain))
    yield from shown


def _describe_model(lead: Row) -> str:
    case, config = lead["case"], lead["case"]["config"]
    family, _, part = case["family"].partition("-")
    words = [{"bert": "BERT"}.get(family, family.capitalize()) + (" with RoPE" if part == "rope" else "")]
    if "num_hidden_layers" in config:
        words.append(f"{config['num_hidden_layers']} layers of {config['hidden_size']}")
    else:
        words[0] = words[0].replace("BERT", "BERT-base")
    words += [f"{case['batch']} × {case['tokens']}", *(["autocast"] if lead["mode"] == "autocast" else [])]
    return f"{', '.join(words)} (`{case['name']}`)"


def measured_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each row of a kernel page's tables of times, and its cells."""
    for table in _TIMES.findall(text):
        for line in table.splitlines(keepends=True):
            yield line, [cell.strip() for cell in line.strip("|\n ").split("|")]


def measured(book: Book, case: str, mode: str, what: str) -> tuple[str, float, str] | None:
    """Return the run, the time in µs and the rate of a row of a kernel page; None: it was not measured.

    The mode of a rotation ends with ", in a graph" where it is in a CUDA graph; `what` is the implementation with its
    position, or of a rotation with its order of pairs and its place.
    """
    direction, _, in_graph = mode.partition(", ")
    impl, _, position = what.partition(", ")
    if position.endswith("place"):
        variant = position.replace("half-split", "half").replace(", ", "/")
        row, key, unit = book.newest(case, direction, variant, impl), "gb_per_s", "GB/s"
    else:
        row = book.newest(case, mode, "", impl if position == "none" else f"{impl} + {position}")
        key, unit = ("gb_per_s", "GB/s") if mode == "decode" else ("tflops", "TFLOP/s")
    time = time_of(row, "graph" if in_graph else "time")
    if row is None or time is None:
        return None
    return book.name_of(row), time, "–" if in_graph else f"{row[key]:.0f} {unit}"


def refresh(text: str) -> str:
    """Return a page with the times of the records in the rows of its tables of times."""
    for line, (_, case, mode, what, old, _) in list(measured_rows(text)):
        found = measured(books()[0], case, mode, what)
        if found is None:
            raise SystemExit(f"{case} {mode} {what} is in a kernel page, but was not measured")
        name, time, rate = found
        decimals = len(old.partition(".")[2])
        text = text.replace(line, f"| {name} | {case} | {mode} | {what} | {time:.{decimals}f} | {rate} |\n", 1)
    return text


def fill(text: str) -> str:
    """Return a page with the tables of the records between its marks."""

    def put(found: re.Match[str]) -> str:
        name = found["name"]
        table = make_overview(comparisons(), trained_models()) if name == OVERVIEW else make(name)
        return f"<!-- {name} -->\n{table}<!-- end of {name} -->\n"

    return _MARKS.sub(put, text)


def page_of(path: Path) -> str:
    """Return a page as the records have it."""
    text = path.read_text(encoding="utf-8")
    return refresh(fill(text)) if "kernels" in path.parts else fill(text)


def draw(found: list[Comparison], path: Path) -> None:
    """Draw the speed over each peer: a dot per peer, a line per comparison."""
    used: dict[str, None] = {}
    labels = [textwrap.fill(one.line.label.replace(" × ", "\u00a0×\u00a0"), 30) for one in found]
    with page_figure(path, 0.33 * len(found) + 1.3) as figure:
        axes = figure.subplots()
        for y, one in enumerate(found):
            ratios = {name: time / one.ours for name, time in one.peers.items()}
            axes.plot([min(ratios.values()), max(ratios.values())], [y, y], color="#dddddd", linewidth=1, zorder=1)
            picked = one.choice and one.choice.picks[2]
            if picked:
                axes.scatter(picked[0] / one.ours, y, zorder=2, **_PICKED)
            for name, ratio in ratios.items():
                used.setdefault(name)
                axes.scatter(ratio, y, zorder=2, **_looks(name))
        axes.axvline(1, color="#222222", linewidth=1, zorder=1)
        axes.set_xscale("log")
        ticks = (0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 40)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_yticks(range(len(found)), labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        figure.suptitle("our kernels, times as fast as the other: right of the line they are faster")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        handles = [axes.scatter([], [], label="impl=None with flash-attn 4", **_PICKED)]
        handles += [
            axes.scatter([], [], label=NAMES[name], **_looks(name)) for name in sorted(used, key=list(COLOURS).index)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _looks(name: str) -> dict[str, Any]:
    return {"color": COLOURS[name], "marker": marker_of(name), "s": 28, "edgecolors": "white", "linewidths": 0.4}


def draw_records() -> None:
    """Draw what the benchmarks draw of their records: of each case the newest run, without the sweep over lengths."""
    for bench in (RopeBench, AttentionBench):
        book = books()[0]
        rows = [row for group in book.rows(bench.name) for row in group]
        rows = [row for row in rows if not row["case"]["name"].startswith("tokens-")]
        bench.draw(replace(book.record(bench.name), rows=rows), RESULTS / f"{bench.name}-{CARD}.png", NAMES)


def report_paths() -> list[Path]:
    """The records that the report reads, of every card."""
    return [record.path for book in books() for record in book.compared]


def main() -> None:
    """Write the pages, or with --check only say which ones are not of the records."""
    pages = {path: page_of(path) for path in PAGES}
    changed = [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(path.relative_to(ROOT)) for path in changed)
        sys.exit(f"not of the records, so run python tools/overview.py: {names}" if changed else None)
    for path in changed:
        path.write_text(pages[path], encoding="utf-8")
    draw(comparisons(), FIGURE)
    draw_records()
    write_report(report_paths(), REPORT, force=True)


if __name__ == "__main__":
    main()
