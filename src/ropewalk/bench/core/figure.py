"""The figure of a record: bars of one quantity, a panel for each mode. It loads matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ropewalk.bench.core.load import Row, groups, label, variant_of

# By implementation, so that the same colour means the same in every figure.
COLOURS = {
    "auto": "#0b2f6b",
    "native": "#0b2f6b",
    "triton": "#1f5fbf",
    "gluon": "#3a8fd9",
    "rotary_embedding": "#5b7fd1",
    "sdpa": "#5b7fd1",
    "flash": "#7f9fe0",
    "reference": "#9dbde8",
    "compiled": "#e07b39",
    "flex": "#e07b39",
    "eager": "#f2b78b",
    "huggingface": "#c9a400",
    "liger_kernel": "#3a9d5d",
    "transformer_engine": "#6b8e23",
    "cudnn": "#6b8e23",
    "quack": "#8e5ab5",
    "flash_attn": "#c23b4b",
    "flash_attn_4": "#c23b4b",
    "flash_attn_3": "#8f2c5b",
    "flash_attn_2": "#d07f8c",
    "sdpa_flash": "#d8a0a8",
    "flashinfer": "#2aa5a5",
    "vllm": "#4d4d4d",
    "xformers": "#8a6d54",
}
_BAR = 0.16  # inches

# The rows of a unit that were timed together -> the length of each one's bar; None: it has none.
Lengths = Callable[[Sequence[Row]], Sequence[float | None]]


def draw_bars(
    rows: Sequence[Row], panels: Mapping[str, str], lengths: Lengths, *, title: str, across: str, path: Path
) -> bool:
    """Draw bars, in groups of what was timed together; False: there are none.

    Args:
        panels: the titles of the modes that are drawn.
        across: the label of the axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn: dict[str, list[tuple[str, list[tuple[Row, float]]]]] = {}
    for group in groups((row for row in rows if row["mode"] in panels), "protocol"):
        bars = [(row, length) for row, length in zip(group, lengths(group), strict=True) if length is not None]
        if bars:
            case = group[0]["case"]
            name = "\n".join(filter(None, (case["name"], variant_of(case))))
            drawn.setdefault(group[0]["mode"], []).append((name, bars))
    if not drawn:
        return False
    height = max(sum(len(bars) + 1 for _, bars in panel) for panel in drawn.values())
    figure = Figure(figsize=(6.5 * len(drawn), max(2.5, _BAR * height + 1.6)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (mode, panel) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        y, ticks = 0, []
        for _, bars in panel:
            ticks.append(y + (len(bars) - 1) / 2)
            for row, length in bars:
                axes.barh(y, length, height=0.9, color=COLOURS.get(row["impl"], "#555555"))
                text = f"{length:.3g}  {label(row)}"
                axes.annotate(text, (length, y), (2, 0), textcoords="offset points", va="center", fontsize=6)
                y += 1
            y += 1
        axes.set_yticks(ticks, [name for name, _ in panel], fontsize=7)
        axes.set_ylim(height - 0.5, -1)  # bars are equally thick in all panels
        axes.margins(x=0.3)
        axes.set_title(panels[mode], fontsize=11)
        axes.set_xlabel(across, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=120, facecolor="white")
    return True
