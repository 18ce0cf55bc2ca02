"""Write README.md's figure and its table of five rows from records.

`python tools/overview.py` writes both; a test compares the README with the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.report.load import read_bench_record
from ropewalk.bench.rope.rows import RopeRow

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FIGURE = RESULTS / "overview-h200.png"
README = ROOT / "README.md"
BEGIN, END = "<!-- overview -->\n", "<!-- end of overview -->\n"

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
_LIBRARIES = {"flash": "FlashAttention-4", "sdpa": "cuDNN"}  # that `impl=None` may pick, after our rotation


@dataclass(frozen=True)
class Line:
    """One comparison: the rows of a record, and one of their times."""

    label: str
    record: str
    case: str
    mode: str  # a direction of the rotation, or a mode of attention
    ours: str  # an implementation of the rotation, or a label of attention
    variant: str = ""  # of the rotation
    time: str = "time"  # of the rotation: "time" with a cold cache, "graph" in a CUDA graph, "host"
    in_table: bool = False  # the figure has all lines, README's table these


_HALF, _INPLACE = "half/out of place", "half/in place"
# The rotation's lines are of the one record that has flash-attn's, FlashInfer's and vLLM's rotations too: in three of
# the five the best other is one of theirs.
LINES = (
    Line("RoPE forward, Llama 3 8B, 2 × 8192", "rope-h200", "llama3-8b", "fwd", "native", _HALF, in_table=True),
    Line("RoPE forward, in place", "rope-h200", "llama3-8b", "fwd", "native", _INPLACE),
    Line("RoPE backward", "rope-h200", "llama3-8b", "bwd", "native", _HALF),
    Line(
        "RoPE of 64 decoding tokens, in a CUDA graph", "rope-h200", "decode-64", "decode", "native", _INPLACE, "graph"
    ),
    Line(
        "host time of rotating 64 decoding tokens, eager",
        "rope-h200",
        "decode-64",
        "decode",
        "native",
        _INPLACE,
        "host",
        in_table=True,
    ),
    Line("training, causal, 4 × 4096, H32 D128", "all-h200", "causal-4k-d128", "train", "auto + rope"),
    Line("training, causal, 2 × 8192, H32/8 D128", "all-h200", "gqa-8k-d128", "train", "auto + rope"),
    Line("training, causal, 1 × 8192, H32 D64", "all-h200", "causal-8k-d64", "train", "auto + rope"),
    Line(
        "training, BERT-base, 32 × 512 with padding",
        "all-h200",
        "bert-512-lengths",
        "train",
        "auto + rope",
        in_table=True,
    ),
    Line(
        "training, 64 packed sequences",
        "attention-gluon-packed-h200",
        "packed-4k-d128",
        "train",
        "auto + rope",
        in_table=True,
    ),
    Line("training, ReRoPE, 1 × 8192, H32 D64", "all-h200", "rerope-8k-d64", "rerope-train", "auto + rerope"),
    Line("decoding, 64 caches of up to 8192 keys", "all-h200", "decode-8k-d128", "decode", "auto + rope"),
    Line("decoding, one cache of 8192 keys", "all-h200", "decode-1", "decode", "auto + rope", in_table=True),
)


@dataclass(frozen=True)
class Comparison:
    """Times in µs: ours, and each peer's."""

    line: Line
    ours: float
    served_by: str | None
    peers: dict[str, float]


def compare(line: Line) -> Comparison:
    """Look up a line's times."""
    record = read_bench_record(RESULTS / f"{line.record}.jsonl")
    found = dict(_rotations(record, line) if line.variant else _attentions(record, line))
    ((name, served_by, ours),) = [key for key, kind in found.items() if kind == "ours" and key[0] == line.ours]
    peers = {name: time for (name, _, time), kind in found.items() if kind == "peer"}
    return Comparison(line, ours, served_by if name.startswith("auto") else None, peers)


def _rotations(record: BenchRecord, line: Line) -> Iterator[tuple[tuple[str, str | None, float], str]]:
    for row in record.of(RopeRow):
        if (row.case.name, row.case.variant, row.direction) != (line.case, line.variant, line.mode):
            continue
        times = getattr(row, line.time)
        if times is not None:
            yield (row.impl, row.impl, times.median if line.time == "host" else times.p50), row.kind


def _attentions(record: BenchRecord, line: Line) -> Iterator[tuple[tuple[str, str | None, float], str]]:
    for row in record.of(AttentionRow):
        if (row.case.name, row.mode, row.protocol) == (line.case, line.mode, "hot") and row.time is not None:
            ours = row.kind == "ours"
            yield (row.label if ours else row.impl, row.served_by if ours else None, row.time.p50), row.kind


def make_table(comparisons: list[Comparison]) -> str:
    """Return the table: the best peer for each line that is `in_table`."""
    lines = ["| one H200, bf16 | Ropewalk | best other | Ropewalk is |", "| --- | --- | --- | --- |"]
    for found in comparisons:
        if not found.line.in_table:
            continue
        name = min(found.peers, key=found.peers.__getitem__)
        by = "" if found.served_by is None else f", by {_LIBRARIES.get(found.served_by, 'our kernels')}"
        ratio = found.peers[name] / found.ours
        record = f"[{ratio:.2f} ×](results/{found.line.record}.jsonl)"
        shown = f"{record} as fast" if ratio >= 0.98 else f"{record} as fast: **slower**"
        lines.append(
            f"| {found.line.label} | {_show(found.ours)}{by} | {_show(found.peers[name])}, {PEERS[name][0]} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def _show(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds:.3g} µs"


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
    axes.set_xlabel("times as fast as the other: right of the line Ropewalk is faster", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [
        axes.scatter(
            [], [], color=PEERS[name][1], marker=_MARKERS[list(PEERS).index(name) % len(_MARKERS)], label=PEERS[name][0]
        )
        for name in sorted(used, key=list(PEERS).index)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=130, facecolor="white")


def place_table(text: str, table: str) -> str:
    """Return the README with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table}{END}{after}"


if __name__ == "__main__":
    found = [compare(line) for line in LINES]
    draw(found, FIGURE)
    README.write_text(place_table(README.read_text(encoding="utf-8"), make_table(found)), encoding="utf-8")
