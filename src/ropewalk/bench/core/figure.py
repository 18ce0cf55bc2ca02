"""Figures that are readable at a page's width, and the one of a record: dots of ours and the others. matplotlib."""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.bench.core.load import Row, groups, variant_of, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, DPI = 6.0, 240  # inches; a page shows them on some 700 pixels, half as many as the file has
# The smallest font has 8 points, which are 13 pixels on a page.
_LOOK: dict[str, Any] = {"font.size": 8, "axes.titlesize": 9, "figure.titlesize": 10}
_LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False}
_LOOK |= {"axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "legend.fontsize": 8}
OURS, _OTHERS = "#1c5fc4", "#b0b0b0"
_COLOURED = 4  # other libraries with colours of their own, before the rest is grey
# By implementation, so that the same looks mean the same in every figure. Eager PyTorch is none of them.
COLOURS = {
    "compiled": "#e07b39",
    "liger_kernel": "#3a9d5d",
    "quack": "#8e5ab5",
    "flash_attn": "#d8a0a8",
    "flash_attn_4": "#c23b4b",
    "flash_attn_3": "#8f2c5b",
    "flash_attn_2": "#d07f8c",
    "flashinfer": "#2aa5a5",
    "vllm": "#4d4d4d",
    "cudnn": "#6b8e23",
    "transformer_engine": "#5f7d1f",
    "xformers": "#8a6d54",
    "flex": "#b5651d",
    "sdpa_flash": "#8a8a8a",
    "sdpa_default": "#b0b0b0",
    "sdpa": "#b0b0b0",
    "flash_attention_4": "#c23b4b",
    "flash": "#c23b4b",
    "compiled RoPE + sdpa": "#b0b0b0",
    "cudnn_frontend": "#a4c639",
    "cudnn_fp8": "#7a9a01",
    "sageattention_1": "#d4b483",
    "sageattention_2": "#c08a3e",
}
_MARKERS = "osD^vPX"
# The rows of a unit that were timed together -> the value of each one; None: it is not drawn.
Values = Callable[[Sequence[Row]], Sequence["float | None"]]


def marker_of(impl: str) -> str:
    """Return the marker of another library, which tells it apart without its colour."""
    return _MARKERS[list(COLOURS).index(impl) % len(_MARKERS)]


@contextlib.contextmanager
def page_figure(path: Path, height: float, dpi: int = DPI) -> Iterator[Figure]:
    """Yield a figure of a page's width, so many inches high, and write it as PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_LOOK):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=dpi, facecolor="white", format="png")


def draw_dots(
    rows: Sequence[Row],
    panels: Mapping[str, str],
    values: Values,
    *,
    title: str,
    path: Path,
    names: Mapping[str, str] | None = None,
) -> bool:
    """Draw a line for each case and a panel for each mode in `panels`: ours, and what else was timed with it.

    Ours is what `impl=None` picks, else the fastest. A library is called as in `names`. False: nothing is drawn.
    """
    drawn: dict[str, dict[str, dict[str, float]]] = {}  # by panel, case and implementation
    for group in groups((row for row in rows if row["mode"] in panels), "protocol"):
        pairs, _, place = variant_of(group[0]["case"]).partition("/")
        line: dict[str, float] = {}
        for row, value in zip(group, values(group), strict=True):
            ours = row["kind"] == "ours"
            if value is not None and (ours or row["impl"] in COLOURS):
                name = row["impl"] if not ours or row["impl"] == "auto" else ""
                line[name] = max(value, line.get(name, value))
        if "auto" in line:
            line[""] = line.pop("auto")
        if line:
            panel = drawn.setdefault(", ".join(filter(None, (panels[group[0]["mode"]], place))), {})
            panel[words(group[0]["case"]["name"], pairs)] = line
    if not drawn:
        return False
    lines = [(case, line) for panel in drawn.values() for case, line in panel.items()]
    compared = dict.fromkeys(case for case, line in lines if {*line} - {""})
    cases, names = list(compared or dict.fromkeys(case for case, _ in lines)), names or {}
    best = Counter(name for _, line in lines for name in sorted(filter(None, line), key=line.__getitem__)[-2:])
    others = dict.fromkeys(name for _, line in lines for name in line if name)
    coloured = sorted(sorted(others, key=best.__getitem__)[-_COLOURED:], key=list(COLOURS).index)
    rest = [names.get(name, name) for name in others if name not in coloured]
    labels = [("", "Ropewalk"), *((name, names.get(name, name)) for name in coloured)]
    labels += [("other", textwrap.fill(", ".join(rest), 30))] if rest else []
    n_lines = len(cases) + sum(1 + text.count("\n") for _, text in labels) / 2
    with page_figure(path, 0.165 * n_lines + 1) as figure:
        figure.suptitle(title)
        axes_of = figure.subplots(1, len(drawn), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (mode, panel) in zip(axes_of, drawn.items(), strict=True):
            for y, line in enumerate(panel.get(case, {}) for case in cases):
                for name in sorted(line, key=lambda name: (name != "", name in coloured)):  # ours is the largest
                    axes.scatter(line[name], y, zorder=2, clip_on=False, **_dot(name, coloured))
            axes.set_title(mode.replace(", ", ",\n"))
            axes.tick_params(axis="y", length=0)
        axes_of[0].set_yticks(range(len(cases)), cases)
        axes_of[0].set_ylim(len(cases) - 0.4, -0.6)
        handles = [axes_of[0].scatter([], [], label=label, **_dot(name, coloured)) for name, label in labels]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return True


def _dot(name: str, coloured: Sequence[str]) -> dict[str, Any]:
    if name in coloured:
        return {"color": COLOURS[name], "marker": marker_of(name), "s": 18, "edgecolors": "white", "linewidths": 0.4}
    return {"color": _OTHERS, "s": 8} if name else {"color": OURS, "s": 40}


def mark_smoke(figure: Figure) -> None:
    """Write across a figure that it shows nothing."""
    look: dict[str, Any] = {"fontsize": 24, "color": "#888888", "alpha": 0.35, "rotation": 25}
    figure.text(0.5, 0.5, "smoke: this shows nothing", ha="center", va="center", zorder=9, **look)
