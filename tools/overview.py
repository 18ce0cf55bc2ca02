"""Write README.md's figure and table, the table of choices in docs/results.md, and results/report-h200.html.

`python tools/overview.py` writes them all from the records in results/; tests compare them with the records.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.core.load import Record, variant_of
from ropewalk.bench.report.gains import READ, Choice, describe_case, newest_choices, read_records
from ropewalk.bench.report.page import CHOICE_PEERS, NOT_MEASURED, NOTHING, duration, write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FIGURE = RESULTS / "overview-h200.png"
REPORT = RESULTS / "report-h200.html"
README = ROOT / "README.md"
_MODES = {
    "train": "training",
    "decode": "decoding",
    "rerope-fwd": "ReRoPE, forward",
    "rerope-train": "ReRoPE, training",
}
PAGE = ROOT / "docs" / "results.md"
MARKS = {README: "overview", PAGE: "choices"}  # of the tables

# By the name that records have: the name that people know, and its colour.
PEERS = {
    "compiled": ("compiled PyTorch", "#e07b39"),
    "huggingface": ("transformers, eager", "#c9a400"),
    "liger_kernel": ("Liger", "#3a9d5d"),
    "quack": ("QuACK", "#8e5ab5"),
    "flash_attn": ("flash-attn's Triton", "#d8a0a8"),
    "flash_attn_4": ("FlashAttention-4", "#c23b4b"),
    "flashinfer": ("FlashInfer", "#2aa5a5"),
    "vllm": ("vLLM", "#4d4d4d"),
    "cudnn": ("cuDNN", "#6b8e23"),
    "flex": ("FlexAttention", "#b5651d"),
    "sdpa_flash": ("SDPA's FlashAttention-2", "#8a8a8a"),
    "sdpa_default": ("SDPA", "#b0b0b0"),
    "eager": ("eager PyTorch", "#d4b483"),
}

_MARKERS = "osD^vPX"
_PICKED: dict[str, Any] = {"marker": "o", "facecolors": "none", "edgecolors": "#1c5fc4", "linewidths": 1.2}


@dataclass(frozen=True)
class Line:
    """One comparison: of our rotation in a record, or of attention in the newest record of a case."""

    label: str
    case: str
    mode: str  # a direction of the rotation, or a mode of attention
    variant: str = ""  # of the rotation
    time: str = "time"  # of the rotation: "time" with a cold cache, "graph" in a CUDA graph, "host"
    in_table: bool = False  # the figure has all lines, README's table these


_HALF, _INPLACE = "half/out of place", "half/in place"
# The rotation's lines are of the one run that has flash-attn's, FlashInfer's and vLLM's rotations too: in three of
# the five the best other is one of theirs.
ROTATION, OURS = "rope-h200", "native"
LINES = (
    Line("RoPE forward, Llama 3 8B, 2 × 8192", "llama3-8b", "fwd", _HALF, in_table=True),
    Line("RoPE forward, in place", "llama3-8b", "fwd", _INPLACE),
    Line("RoPE backward", "llama3-8b", "bwd", _HALF),
    Line("RoPE of 64 decoding tokens, in a CUDA graph", "decode-64", "decode", _INPLACE, "graph"),
    Line("host time of rotating 64 decoding tokens, eager", "decode-64", "decode", _INPLACE, "host", in_table=True),
    Line("training, causal, 4 × 4096, H32 D128", "causal-4k-d128", "train", in_table=True),
    Line("training, causal, 2 × 8192, H32/8 D128", "gqa-8k-d128", "train"),
    Line("training, causal, 1 × 8192, H32 D64", "causal-8k-d64", "train"),
    Line("training, BERT-base, 32 × 512 with padding", "bert-512-lengths", "train"),
    Line("training, 64 packed sequences", "packed-4k-d128", "train", in_table=True),
    Line("decoding, 64 caches of up to 8192 keys", "decode-8k-d128", "decode"),
    Line("decoding, one cache of 8192 keys", "decode-1", "decode", in_table=True),
)


@dataclass(frozen=True)
class Comparison:
    """Times in µs: our kernels', each peer's, and of attention what `impl=None` picks."""

    line: Line
    record: str
    ours: float
    choice: Choice | None
    peers: dict[str, float]


def paths() -> list[Path]:
    """All records that the report reads."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            if json.loads(next(lines)).get("benchmark") in READ:
                found.append(path)
    return found


@functools.cache
def records() -> list[Record]:
    """The records, read once."""
    return read_records(paths())


@functools.cache
def hot_choices() -> list[Choice]:
    """What `impl=None` picks, by the newest run of each case."""
    return [choice for choice in newest_choices(records()) if choice.lead["protocol"] == "hot"]


def compare(line: Line) -> Comparison:
    """Look up a line's times."""
    if line.variant:
        times = _rotations(line)
        peers = {name: time for (name, kind), time in times.items() if kind == "peer"}
        return Comparison(line, "rope-h200", times[OURS, "ours"], None, peers)
    (choice,) = (one for one in hot_choices() if (one.lead["case"]["name"], one.lead["mode"]) == (line.case, line.mode))
    assert choice.picks[0] is not None
    return Comparison(line, "attention-h200", choice.picks[0][0], choice, choice.peers)


def _rotations(line: Line) -> dict[tuple[str, str], float]:
    quantile = "median" if line.time == "host" else "p50"
    return {
        (row["impl"], row["kind"]): row[line.time][quantile]
        for record in records()
        for row in record.of("rope")
        if row["record"] == ROTATION and line.time in row
        if (row["case"]["name"], variant_of(row["case"]), row["mode"]) == (line.case, line.variant, line.mode)
    }


def make_table(comparisons: Sequence[Comparison]) -> str:
    """Return README's table: our kernels, what `impl=None` picks, and the best peer."""
    lines = [
        "| one H200, bf16 | our kernels | `impl=None` without flash-attn 4 | with it | best other | times as fast |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for found in comparisons:
        if not found.line.in_table:
            continue
        name = min(found.peers, key=found.peers.__getitem__)
        ratio = found.peers[name] / found.ours
        verdict = f"[{ratio:.2f} ×](results/{found.record}.jsonl){'' if ratio >= 0.98 else ', **slower**'}"
        picks = (
            [duration(found.ours), "the same", "the same"]
            if found.choice is None
            else map(show_pick, found.choice.picks)
        )
        cells = (found.line.label, *picks, f"{duration(found.peers[name])}, {PEERS[name][0]}", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def make_choices(found: Sequence[Choice]) -> str:
    """Return the page's table: our kernels, what `impl=None` picks, and other libraries, of every case."""
    lines = [
        "| case | record | our kernels | `impl=None` without flash-attn 4 | with flash-attn 4 "
        f"| {' | '.join(CHOICE_PEERS.values())} |",
        f"| --- | --- {'| --- ' * (3 + len(CHOICE_PEERS))}|",
    ]
    for one in found:
        peers = (duration(one.peers[name]) if name in one.peers else NOTHING for name in CHOICE_PEERS)
        record = f"[{_MODES[one.lead['mode']]}](results/attention-h200.jsonl)"
        case = describe_case(one.lead).replace(", bfloat16", "")
        lines.append(f"| {' | '.join((case, record, *map(show_pick, one.picks), *peers))} |")
    return "\n".join(lines) + "\n"


def show_pick(pick: tuple[float, str] | None) -> str:
    return NOT_MEASURED if pick is None else f"{duration(pick[0])}, {pick[1]}"


def draw(comparisons: list[Comparison], path: Path) -> None:
    """Draw the speed over each peer: a dot per peer, a line per comparison."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.33 * len(comparisons) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    used: dict[str, None] = {}
    for y, found in enumerate(comparisons):
        ratios = {name: time / found.ours for name, time in found.peers.items()}
        axes.plot([min(ratios.values()), max(ratios.values())], [y, y], color="#dddddd", linewidth=1, zorder=1)
        picked = found.choice and found.choice.picks[2]
        if picked:
            axes.scatter(picked[0] / found.ours, y, s=90, zorder=1, **_PICKED)
        for name, ratio in ratios.items():
            used.setdefault(name)
            colour, marker = PEERS[name][1], _MARKERS[list(PEERS).index(name) % len(_MARKERS)]
            axes.scatter(ratio, y, color=colour, marker=marker, s=42, zorder=2, edgecolors="white", linewidths=0.5)
    axes.axvline(1, color="#222222", linewidth=1, zorder=0)
    axes.set_xscale("log")
    ticks = (0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 40)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(comparisons)), [found.line.label for found in comparisons], fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("our kernels, times as fast as the other: right of the line they are faster", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [axes.scatter([], [], s=90, label="impl=None with flash-attn 4", **_PICKED)]
    handles += [
        axes.scatter(
            [], [], color=PEERS[name][1], marker=_MARKERS[list(PEERS).index(name) % len(_MARKERS)], label=PEERS[name][0]
        )
        for name in sorted(used, key=list(PEERS).index)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=130, facecolor="white")


def place_table(text: str, table: str, name: str) -> str:
    """Return a page with the table between its marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}{table}{end}{after}"


def tables() -> dict[Path, str]:
    """The table of each page."""
    return {README: make_table([compare(line) for line in LINES]), PAGE: make_choices(hot_choices())}


if __name__ == "__main__":
    draw([compare(line) for line in LINES], FIGURE)
    for page, table in tables().items():
        page.write_text(place_table(page.read_text(encoding="utf-8"), table, MARKS[page]), encoding="utf-8")
    write_report(paths(), REPORT, force=True)
