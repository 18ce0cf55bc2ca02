"""The figure of a record: measured efficiencies on the curves of the cost model, and what it predicts beyond."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.parallel.cost import LLAMA, predict_efficiency, predict_nodes
from ropewalk.bench.parallel.rows import ParallelRow

RANKS = (2, 4, 8)
_TOKENS = [1 << power for power in range(13, 21)]
_COLOURS = {2: "#1f5fbf", 4: "#e07b39", 8: "#3a9d5d"}
_MARKERS = {"ours": "o", "peer": "x"}
_FAR = {1 << 20: "#5b7fd1", 1 << 22: "#c9a400", 1 << 24: "#8e5ab5"}


def draw_parallel_record(record: BenchRecord, path: Path) -> bool:
    """Draw the rows of causal attention with RoPE and grouped heads. False: there are none."""
    rows = [row for row in record.of(ParallelRow) if row.efficiency is not None and row.case.name.startswith("gqa")]
    if not rows:
        return False
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    measured, predicted = figure.subplots(1, 2)
    low = min(row.efficiency or 0.0 for row in rows)
    for ranks in RANKS:
        curve = [predict_efficiency(tokens, ranks) for tokens in _TOKENS]
        low = min(low, *curve)
        measured.plot(_TOKENS, curve, color=_COLOURS[ranks], label=f"{ranks} GPUs, cost model of H200s (predicted)")
    for kind, marker in _MARKERS.items():
        points = [row for row in rows if row.kind == kind]
        colour = _COLOURS.get(record.run["ranks"], "#333333")
        at, values = [row.case.tokens for row in points], [row.efficiency for row in points]
        name = {"ours": "ropewalk", "peer": "others"}[kind]
        if points:
            label = f"{record.run['ranks']} ranks, {name} (measured)"
            measured.scatter(at, values, marker=marker, color=colour, label=label, zorder=3)
    _finish(
        measured,
        "tokens of the sequence",
        f"{LLAMA.q_heads} / {LLAMA.k_heads} heads of {LLAMA.head_dim}, bfloat16, causal, forward and backward",
        low,
    )
    for tokens, colour in _FAR.items():
        gpus = [8 << power for power in range(1, 10) if tokens / (8 << power) >= 512]
        curve = [predict_nodes(tokens, count) for count in gpus]
        predicted.plot(gpus, curve, "--", color=colour, label=f"{tokens >> 20}M tokens")
    _finish(predicted, "GPUs, 8 in a node", "prediction, nothing measured: Ulysses in a node, ring between", 0.0)
    device = record.run["device"]
    figure.suptitle(f"Context parallelism on {device}: efficiency{cpu_note(device)}", fontsize=13)
    figure.savefig(path, dpi=120, facecolor="white")
    return True


def _finish(axes: Axes, across: str, title: str, low: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(max(0.0, low - 0.05), 1.02)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel("time on one GPU / (n × time on n)", fontsize=9)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
