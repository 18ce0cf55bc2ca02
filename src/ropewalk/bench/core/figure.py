"""The figure of a record: bars of one quantity, a panel for each mode. It loads matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.bench.core.load import Row, groups, label, variant_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By implementation, so that the same colour means the same in every figure.
_IMPLS = """
#0b2f6b auto native, #1f5fbf triton, #3a8fd9 gluon, #5b7fd1 rotary_embedding sdpa, #7f9fe0 flash, #9dbde8 reference,
#e07b39 compiled flex, #f2b78b eager, #c9a400 huggingface, #3a9d5d liger_kernel, #6b8e23 transformer_engine cudnn,
#8e5ab5 quack, #c23b4b flash_attn flash_attn_4, #8f2c5b flash_attn_3, #d07f8c flash_attn_2, #d8a0a8 sdpa_flash,
#2aa5a5 flashinfer, #4d4d4d vllm, #8a6d54 xformers"""
COLOURS = {impl: colour for colour, *impls in map(str.split, _IMPLS.split(",")) for impl in impls}
_BAR = 0.16  # inches
# The rows of a unit that were timed together -> the length of each one's bar; None: it has none.
Lengths = Callable[[Sequence[Row]], Sequence[float | None]]


def draw_bars(
    rows: Sequence[Row], panels: Mapping[str, str], lengths: Lengths, *, title: str, across: str, path: Path
) -> bool:
    """Draw bars, in groups of what was timed together, of the modes with titles in `panels`; False: there are none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn: dict[str, list[tuple[str, list[tuple[Row, float]]]]] = {}
    for group in groups((row for row in rows if row["mode"] in panels), "protocol"):
        bars = [(row, length) for row, length in zip(group, lengths(group), strict=True) if length is not None]
        if bars:
            name = f"{group[0]['case']['name']}\n{variant_of(group[0]['case'])}".rstrip()
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
                at = {"xytext": (2, 0), "textcoords": "offset points", "va": "center", "fontsize": 6}
                axes.annotate(f"{length:.3g}  {label(row)}", (length, y), **at)
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


def mark_smoke(figure: Figure) -> None:
    """Write across a figure that it shows nothing."""
    look: dict[str, Any] = {"fontsize": 40, "color": "#888888", "alpha": 0.35, "rotation": 25}
    figure.text(0.5, 0.5, "smoke: this shows nothing", ha="center", va="center", zorder=9, **look)
