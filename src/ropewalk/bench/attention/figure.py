"""A figure of a record of attention: TFLOP/s of each implementation, by mode and case."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ropewalk.bench.attention.rows import AttentionRow, attention_groups
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note

# By implementation, so that the same colour means the same in every figure.
_COLOURS = {
    "auto": "#0b2f6b",
    "triton": "#1f5fbf",
    "gluon": "#3a8fd9",
    "sdpa": "#5b7fd1",
    "flash": "#7f9fe0",
    "reference": "#9dbde8",
    "cudnn": "#6b8e23",
    "flash_attn_4": "#c23b4b",
    "flash_attn_3": "#8f2c5b",
    "flash_attn_2": "#d07f8c",
    "flex": "#e07b39",
    "sdpa_flash": "#d8a0a8",
    "transformer_engine": "#3a9d5d",
    "xformers": "#8a6d54",
    "flashinfer": "#2aa5a5",
    "huggingface": "#c9a400",
}
_BAR = 0.16  # inches
_TITLES = {"fwd": "forward", "bwd": "backward", "train": "RoPE, forward and backward"}


def draw_attention_record(record: BenchRecord, path: Path, *, protocol: str = "hot") -> bool:
    """Draw bars of TFLOP/s by one protocol, a panel for each of fwd, bwd and train. False: nothing to draw."""
    panels: dict[str, list[list[AttentionRow]]] = {}
    rows = record.of(AttentionRow)
    for group in attention_groups(rows):
        first = group[0]
        if first.mode in _TITLES and first.protocol == protocol:
            panels.setdefault(first.mode, []).append(group)
    if not panels:
        return False
    bars = max(sum(len(group) + 1 for group in panel) for panel in panels.values())
    figure = Figure(figsize=(6.5 * len(panels), max(2.5, _BAR * bars + 1.6)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (mode, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_panel(axes, panel)
        axes.set_ylim(bars - 0.5, -1)  # bars are equally thick in all panels
        axes.set_title(_TITLES[mode], fontsize=11)
    dtypes = ", ".join(dict.fromkeys(row.case.dtype for row in rows))
    device = record.run["device"]
    figure.suptitle(f"Attention on {device}, {dtypes}, {protocol}{cpu_note(device)}", fontsize=13)
    figure.savefig(path, dpi=120, facecolor="white")
    return True


def _draw_panel(axes: Axes, panel: list[list[AttentionRow]]) -> None:
    y = 0.0
    ticks, labels = [], []
    for group in panel:
        top = y
        for row in group:
            assert row.tflops is not None
            pale = row.kind == "anchor" or (row.kind == "ours" and row.position != "rope" and row.mode == "train")
            axes.barh(y, row.tflops, height=0.9, color=_COLOURS.get(row.impl, "#555555"), alpha=0.45 if pale else 1)
            text = f"{row.tflops:.3g}  {row.label}"
            axes.annotate(text, (row.tflops, y), (2, 0), textcoords="offset points", va="center", fontsize=6)
            y += 1
        ticks.append((top + y - 1) / 2)
        labels.append(group[0].case.name)
        y += 1
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.margins(x=0.3)
    axes.set_xlabel("TFLOP/s", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
