"""The figure of a record: each implementation's speed against a copy of the same bytes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.rope.rows import RopeRow
from ropewalk.bench.rope.summary import groups

# By implementation, so that the same colour means the same in every figure.
_COLOURS = {
    "native": "#0b2f6b",
    "rotary_embedding": "#5b7fd1",
    "triton": "#1f5fbf",
    "reference": "#9dbde8",
    "compiled": "#e07b39",
    "eager": "#f2b78b",
    "huggingface": "#c9a400",
    "liger_kernel": "#3a9d5d",
    "quack": "#8e5ab5",
    "flash_attn": "#c23b4b",
    "flashinfer": "#2aa5a5",
    "vllm": "#4d4d4d",
    "xformers": "#8a6d54",
    "transformer_engine": "#6b8e23",
}
_BAR = 0.15  # inches
_TITLES = {"fwd": "forward", "bwd": "backward", "decode": "decode (forward, one token for each sequence)"}


def draw_rope_record(record: BenchRecord, path: Path, *, cases: tuple[str, ...] = ()) -> bool:
    """Draw bars of the time of a copy over each implementation's time; `cases` narrows it down. False: nothing to draw.

    The times in CUDA graphs count for calls that have them, as the small cases do.
    """
    directions: dict[str, list[list[RopeRow]]] = {}
    for group in groups(record.of(RopeRow)):
        measured = [row for row in group if row.time is not None]
        shown = [row for row in measured if row.kind != "anchor" and _fraction(row, measured) is not None]
        if shown and (not cases or shown[0].case.name in cases):
            directions.setdefault(shown[0].direction, []).append(measured)
    if not directions:
        return False
    bars = max(sum(len(group) + 1 for group in panel) for panel in directions.values())
    figure = Figure(figsize=(6.5 * len(directions), max(2.5, _BAR * bars + 1.6)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(directions), squeeze=False)[0]
    used: dict[str, None] = {}
    for axes, (direction, panel) in zip(panels, directions.items(), strict=True):
        _draw_panel(axes, panel, used)
        axes.set_ylim(bars - 0.5, -1)  # bars are equally thick in all panels
        axes.set_title(_TITLES.get(direction, direction), fontsize=11)
    handles = [axes.barh(0, 0, color=_COLOURS.get(name, "#555555")) for name in used]
    figure.legend(handles, list(used), loc="outside lower center", ncols=min(len(used), 6), frameon=False)
    run = record.run
    device = run["device"]
    figure.suptitle(f"RoPE on {device}: speed of a copy of the same bytes reached{cpu_note(device)}", fontsize=13)
    figure.savefig(path, dpi=120, facecolor="white")
    return True


def _draw_panel(axes: Axes, panel: list[list[RopeRow]], used: dict[str, None]) -> None:
    y = 0.0
    ticks, labels = [], []
    for group in panel:
        top = y
        for row in group:
            fraction = _fraction(row, group)
            if row.kind == "anchor" or fraction is None:
                continue
            used.setdefault(row.impl)
            axes.barh(y, fraction, height=0.9, color=_COLOURS.get(row.impl, "#555555"))
            text, at = f"{fraction:.2f}", (fraction, y)
            axes.annotate(text, at, (2, 0), textcoords="offset points", va="center", fontsize=6, color="#333333")
            y += 1
        ticks.append((top + y - 1) / 2)
        case = group[0].case
        labels.append(f"{case.name}\n{case.variant}")
        y += 1
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.margins(x=0.12)
    axes.axvline(1, color="#222222", linewidth=0.8, zorder=0)
    axes.set_xlabel("fraction of the copy's speed (1: the line)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _fraction(row: RopeRow, group: list[RopeRow]) -> float | None:
    """Return the copy's time over the row's, in a graph where the copy was timed in one."""
    anchor = next((other for other in group if other.kind == "anchor"), None)
    if anchor is None:
        return None
    in_graph = anchor.graph is not None
    copy, own = anchor.best_time(in_graph), row.best_time(in_graph)
    return None if copy is None or own is None else copy / own
