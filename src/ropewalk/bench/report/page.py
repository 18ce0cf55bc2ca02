"""The page of records: tables by a template, charts and all rows by Bokeh, in one file that loads nothing."""

from __future__ import annotations

import base64
import gzip
import json
import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropewalk.bench.core.load import Record, Row, label
from ropewalk.bench.report.gains import (
    ABSENT,
    AHEAD,
    ALONE,
    BEHIND,
    FLASH_PEER,
    LEVEL,
    SAME,
    Choice,
    Gain,
    describe_case,
    find_gains,
    median,
    newest_choices,
    read_records,
    share_of_roof,
)

CHOICE_PEERS = {FLASH_PEER: "FlashAttention-4", "cudnn": "cuDNN", "flex": "FlexAttention"}
NOT_MEASURED, NOTHING = "not measured", "–"
# By outcome, on a light and on a dark page alike; the marker tells them apart too.
_LOOKS = {AHEAD: ("#2f7fe0", "circle"), LEVEL: ("#8a929c", "square"), BEHIND: ("#e0652f", "diamond")}
_LINES = ("#2f7fe0", "#e0652f", "#37a67a", "#b06ad0", "#c9a400", "#8a929c")
_TEXT, _GRID = "#868d96", "#868d9640"
_TICKS = [0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50]
_FEWEST_LENGTHS = 5  # of one shape, to be drawn over the length


def write_report(records: Sequence[Path], output: Path, *, force: bool = False) -> Path:
    """Write the page of some records.

    Args:
        records: the files, at least one.
        output: the page, which must not exist unless `force` is true, and is never one of the records.

    Raises:
        ValueError: a file is no record, or the output exists.
        ModuleNotFoundError: Bokeh, Jinja2 or pandas is not installed.
    """
    if not records:
        raise ValueError("records is empty, but must name at least one file")
    if output.resolve() in {path.resolve() for path in records}:
        raise ValueError(f"output is {output}, which is one of the records")
    if output.is_dir():
        raise ValueError(f"output is {output}, which is a folder, but must be a file")
    if output.exists() and not force:
        raise ValueError(f"{output} exists already, and is not overwritten without --force")
    page = render(read_records(records))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def render(records: Sequence[Record]) -> str:
    """Render the page as HTML."""
    import jinja2

    rows = [row for record in records for row in record.rows]
    gains = find_gains(rows)
    compared = [gain for gain in gains if gain.outcome not in (ALONE, ABSENT)]
    by_title: dict[str, list[Gain]] = {}
    for gain in compared:
        by_title.setdefault(gain.title, []).append(gain)
    losses = sorted((gain for gain in gains if gain.outcome in (BEHIND, ABSENT)), key=lambda gain: gain.times or 0.0)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(time=duration, describe=describe_case, share=share_of_roof, label=label)
    template = environment.from_string((files(__package__) / "report.html").read_text(encoding="utf-8"))
    runs = [run for record in records for run in record.runs]
    script, items = _bokeh(rows, by_title)
    return template.render(
        devices=" · ".join(dict.fromkeys(run["device"] for run in runs)),
        groups={title: (_sentence(group), group) for title, group in by_title.items()},
        good=sum(gain.outcome in (AHEAD, LEVEL) for gain in compared),
        n_compared=len(compared),
        same=SAME,
        choices=[_choice(choice) for choice in newest_choices(records) if choice.lead.get("protocol") == "hot"],
        choice_peers=CHOICE_PEERS.values(),
        losses=losses,
        bad=[row for row in rows if row["status"] in ("wrong", "failed")],
        n_alone=sum(gain.outcome == ALONE for gain in gains),
        runs=[(record.path.stem, run) for record in records for run in record.runs],
        on_cpu=any(run["device"].startswith("CPU") for run in runs),
        n_rows=len(rows),
        script=_pack(script),
        items=_pack(json.dumps(items)),
    )


def duration(microseconds: float | None) -> str:
    """Format a time with its unit, to three significant digits."""
    if microseconds is None:
        return NOTHING
    unit, size = next(((unit, size) for unit, size in (("s", 1e6), ("ms", 1e3)) if microseconds >= size), ("µs", 1.0))
    value = microseconds / size
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(3 - whole, 0)}f}\u00a0{unit}" if whole else f"{value:.3g}\u00a0{unit}"


def _sentence(group: Sequence[Gain]) -> str:
    counts = ", ".join(
        f"{count} {outcome}" for outcome in _LOOKS if (count := sum(gain.outcome == outcome for gain in group))
    )
    times = statistics.median(gain.times for gain in group if gain.times is not None)
    return f"{counts}; median {times:.2f} ×"


def _choice(choice: Choice) -> dict[str, Any]:
    picks = [NOT_MEASURED if pick is None else f"{duration(pick[0])}, {pick[1]}" for pick in choice.picks]
    peers = [duration(choice.peers.get(name)) for name in CHOICE_PEERS]
    return {"lead": choice.lead, "picks": picks, "peers": peers}


def _pack(text: str) -> str:
    """Compress a text for the page, whose script unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _bokeh(rows: Sequence[Row], groups: dict[str, list[Gain]]) -> tuple[str, list[dict[str, Any]]]:
    """Return Bokeh's script, and the charts and the table as it embeds them, by the element's name."""
    from bokeh.embed import json_item
    from bokeh.models import TabPanel, Tabs
    from bokeh.resources import Resources

    resources = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"], minified=True)
    lengths = [TabPanel(child=chart, title=title) for title, chart in _draw_lengths(rows)]
    models: dict[str, Any] = {"table": _make_table(rows)}
    if groups:
        models["gains"] = _draw_gains(groups)
    if lengths:
        models["lengths"] = Tabs(tabs=lengths, sizing_mode="stretch_width")
    return "\n".join(resources.js_raw), [dict(json_item(model, target=name)) for name, model in models.items()]


def _draw_gains(groups: dict[str, list[Gain]]) -> Any:
    """A line for each mode, and a mark for each case at how many times as fast ours is."""
    titles = list(reversed(groups))
    figure = _figure(
        y_range=titles, x_axis_type="log", height=90 + 34 * len(titles), x_axis_label="times the best other's speed"
    )
    figure.xaxis.ticker = _TICKS
    figure.xaxis.major_label_overrides = {tick: f"{tick:g}" for tick in _TICKS}
    figure.vspan(x=1, line_color=_TEXT, line_width=1.5)
    for outcome, (colour, marker) in _LOOKS.items():
        chosen = [gain for group in groups.values() for gain in group if gain.outcome == outcome]
        if not chosen:
            continue
        names = [gain.peer["impl"] if gain.peer else "" for gain in chosen]
        data = {
            "x": [gain.times for gain in chosen],
            "y": [(gain.title, _jitter(number)) for number, gain in enumerate(chosen)],
            "case": [f"{gain.lead['case']['name']}: {describe_case(gain.lead)}" for gain in chosen],
            "ours": [f"{duration(gain.time_of(gain.ours))}, {gain.ours['impl']}" for gain in chosen if gain.ours],
            "peer": [f"{duration(gain.time_of(gain.peer))}, {name}" for gain, name in zip(chosen, names, strict=True)],
        }
        figure.scatter(
            "x", "y", source=data, marker=marker, color=colour, size=9, alpha=0.75, legend_label=outcome, name="dots"
        )
    figure.legend.orientation = "horizontal"
    figure.add_layout(figure.legend[0], "above")
    _hover(figure, [("case", "@case"), ("ours", "@ours"), ("best other", "@peer"), ("times as fast", "@x{0.00}")])
    return figure


def _jitter(number: int) -> float:
    """Spread marks that would cover each other, the same at each run."""
    return 0.5 * math.modf(number * 0.6180339887)[0] - 0.25


def _draw_lengths(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """Charts of the time over the tokens, of shapes that were measured at many lengths."""
    shapes: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        case = row["case"]
        if "time" in row and row["benchmark"] == "rope" and case["name"].startswith("tokens-"):
            place = "interleaved" if case["interleaved"] else "half-split"
            shapes.setdefault(f"{place}, {row['mode']}", {}).setdefault(label(row), {})[case["tokens"]] = row
    charts = []
    for title, lines in shapes.items():
        if max(map(len, lines.values())) < _FEWEST_LENGTHS:
            continue
        axes = {"x_axis_type": "log", "y_axis_type": "log", "x_axis_label": "tokens", "y_axis_label": "µs, cold cache"}
        figure = _figure(height=360, **axes)
        for number, (name, found) in enumerate(lines.items()):
            tokens = sorted(found)
            data = {"x": tokens, "y": [median(found[count], "time") for count in tokens], "name": [name] * len(tokens)}
            colour = _LINES[number % len(_LINES)]
            figure.line("x", "y", source=data, color=colour, line_width=2, legend_label=name)
            figure.scatter("x", "y", source=data, color=colour, size=7, legend_label=name, name="dots")
        figure.legend.click_policy = "hide"
        figure.legend.location = "top_left"
        _hover(figure, [("", "@name"), ("tokens", "@x"), ("µs", "@y{0.00}")])
        charts.append((title, figure))
    return charts


def _figure(**options: Any) -> Any:
    """Make an empty chart that is readable on a light page and on a dark one, at any width."""
    from bokeh.plotting import figure

    made = figure(sizing_mode="stretch_width", toolbar_location=None, tools="", **options)
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.axis.major_label_text_color = made.axis.axis_label_text_color = _TEXT
    made.axis.axis_line_color = made.axis.major_tick_line_color = made.axis.minor_tick_line_color = _TEXT
    made.grid.grid_line_color = _GRID
    return made


def _hover(figure: Any, tooltips: list[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    figure.add_tools(HoverTool(tooltips=tooltips, renderers=figure.select({"name": "dots"})))
    figure.legend.background_fill_color = figure.legend.border_line_color = None
    figure.legend.label_text_color = _TEXT


_NUMBERS = {
    "µs": ("time.p50", 1.0),
    "10 %": ("time.p10", 1.0),
    "90 %": ("time.p90", 1.0),
    "graph, µs": ("graph.p50", 1.0),
    "host, µs": ("host.median", 1.0),
    "GB/s": ("gb_per_s", 1.0),
    "TFLOP/s": ("tflops", 1.0),
    "peak, MiB": ("peak_bytes", 2.0**20),
    "error": ("error", 1.0),
    "budget": ("error_budget", 1.0),
}
_DARK = """
@media (prefers-color-scheme: dark) {
  .slick-row, .slick-header-column, .slick-viewport { background: #14171b !important; color: #d9dde2 !important; }
  .slick-row.odd { background: #1a1e23 !important; }
  .bk-input { background: #1a1e23; color: #d9dde2; border-color: #2e343b; }
}
"""


def _make_table(rows: Sequence[Row]) -> Any:
    """Make the table of all rows, with a field that filters it."""
    import pandas as pd
    from bokeh import models

    rows = sorted(rows, key=lambda row: row["status"] == "unsupported")
    keys = ("mode", "protocol", "status", "record", "kind", "served_by", "reason")
    texts = pd.DataFrame(
        {
            "case": [row["case"]["name"] for row in rows],
            "implementation": [label(row) for row in rows],
            "shape": [describe_case(row) for row in rows],
            **{key: [row.get(key, "") for row in rows] for key in keys},
        }
    )
    flat = pd.json_normalize([{key: value for key, value in row.items() if key != "ratios"} for row in rows])
    numbers = pd.DataFrame(
        {name: (flat[key] / scale).astype("float32") for name, (key, scale) in _NUMBERS.items() if key in flat}
    )
    numbers["of the roof"] = pd.Series([share_of_roof(row) for row in rows], dtype="float32")
    words = texts.agg(" ".join, axis=1).str.lower()
    columns_of = {**texts.to_dict("list"), **{name: numbers[name].to_numpy() for name in numbers}}
    source = models.ColumnDataSource({**columns_of, "words": words.to_list()})
    dark, hint = models.InlineStyleSheet(css=_DARK), "words that a row must have: llama triton bwd …"
    field = models.TextInput(placeholder=hint, sizing_mode="stretch_width", stylesheets=[dark])
    code = "const words = field.value_input.toLowerCase().split(' '); "
    code += "return source.data.words.map((text) => words.every((word) => text.includes(word)))"
    view = models.CDSView(filter=models.CustomJSFilter(args={"field": field}, code=code))
    field.js_on_change("value_input", models.CustomJS(args={"source": source}, code="source.change.emit()"))
    plain = models.NumberFormatter(format="0,0.[000]", nan_format=NOTHING)
    wide = {"case": 150, "implementation": 170, "shape": 300, "reason": 300, "record": 220}
    first, last = (
        ("case", "implementation", "mode", "protocol", "status"),
        ("shape", "record", "kind", "served_by", "reason"),
    )
    columns = [
        models.TableColumn(
            field=name, title=name, width=wide.get(name, 85), **({"formatter": plain} if name in numbers else {})
        )
        for name in (*first, *numbers, *last)
    ]
    table = models.DataTable(
        source=source,
        view=view,
        columns=columns,
        index_position=None,
        height=520,
        sizing_mode="stretch_width",
        autosize_mode="none",
        stylesheets=[dark],
    )
    return models.Column(field, table, sizing_mode="stretch_width")
