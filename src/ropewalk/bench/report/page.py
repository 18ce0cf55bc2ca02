"""The page of records: tables by a template, charts and all rows by Bokeh, in one file that loads nothing."""

from __future__ import annotations

import base64
import gzip
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropewalk.bench.core.load import Record, Row, label
from ropewalk.bench.report import gains as g
from ropewalk.bench.report.gains import Gain, describe_case
from ropewalk.bench.report.peers import NAMES, name_measured

BEST_TWO = ("best other", "second best")  # of a table that would not hold a column for each library
NOT_MEASURED, NOTHING = "not measured", "–"
# By outcome, on a light and on a dark page alike; the marker tells them apart too.
_LOOKS = {g.FASTER: ("#2f7fe0", "circle"), g.LEVEL: ("#8a929c", "square"), g.SLOWER: ("#e0652f", "diamond")}
_LINES = ("#2f7fe0", "#e0652f", "#37a67a", "#b06ad0", "#c9a400", "#8a929c")
_TEXT, _GRID = "#868d96", "#868d9640"
_TICKS = [0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50]
_EAGER = "reference"  # of our backends, PyTorch operator by operator
_FEWEST_LENGTHS = 5  # of one shape, to be drawn over the length
# The columns of the table of all rows: texts with their widths, and numbers between them with a key.
_FIRST = {"case": 150, "implementation": 170, "mode": 85, "protocol": 85, "status": 85}
_LAST = {"shape": 300, "record": 220, "kind": 85, "served_by": 85, "reason": 300}
_NUMBERS = {"µs": "time.p50", "10 %": "time.p10", "90 %": "time.p90"}
_NUMBERS |= {"graph, µs": "graph.p50", "host, µs": "host.median"}
_NUMBERS |= {"GB/s": "gb_per_s", "TFLOP/s": "tflops", "peak, MiB": "peak_bytes"}
_NUMBERS |= {"error": "error", "budget": "error_budget", "of the roof": "share"}
_DARK = """
@media (prefers-color-scheme: dark) {
  .slick-row, .slick-header-column, .slick-viewport { background: #14171b !important; color: #d9dde2 !important; }
  .slick-row.odd { background: #1a1e23 !important; }
  .bk-input { background: #1a1e23; color: #d9dde2; border-color: #2e343b; }
}
"""
_FILTER = """
const words = field.value_input.toLowerCase().split(" ");
return source.data.words.map((text) => words.every((word) => text.includes(word)));
"""


def write_report(records: Sequence[Path], output: Path, *, force: bool = False) -> Path:
    """Write the page of some records, at least one, to a new file, or over another page with `force`."""
    if output.resolve() in {path.resolve() for path in records}:
        raise ValueError(f"output is {output}, which is one of the records")
    if output.exists() and not force:
        raise ValueError(f"{output} exists already, and is not overwritten without --force")
    page = render(g.read_records(records))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def render(records: Sequence[Record]) -> str:
    """Render the page as HTML; its script unpacks Bokeh's, and the charts and the table by the element's name."""
    import jinja2
    from bokeh.embed import json_item
    from bokeh.models import TabPanel, Tabs
    from bokeh.resources import Resources

    records = _with_devices(records)
    rows = [row for record in records for row in record.rows]
    runs = [(record.path.stem, run) for record in records for run in record.runs]
    runs_by_path = {str(record.path): record.runs for record in records}
    gains, groups = g.find_gains(rows), dict[str, list[Gain]]()

    def run_of(gain: Gain) -> dict[str, Any]:
        return runs_by_path[gain.lead["path"]][gain.lead["run"]]

    for gain in gains:
        if gain.outcome in _LOOKS:
            groups.setdefault(gain.title, []).append(gain)
    counts = Counter(gain.outcome for gain in gains)
    lengths = [TabPanel(child=chart, title=title) for title, chart in _draw_lengths(rows)]
    models: dict[str, Any] = {"table": _make_table(rows)}
    models |= {"gains": _draw_gains(groups)} if groups else {}
    models |= {"lengths": Tabs(tabs=lengths, sizing_mode="stretch_width")} if lengths else {}
    items = json.dumps([dict(json_item(model, target=name)) for name, model in models.items()])
    script = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"], minified=True).js_raw
    packed = [base64.b64encode(gzip.compress(x.encode(), mtime=0)).decode() for x in ("\n".join(script), items)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(time=duration, side=_side, describe=describe_case, share=g.share_of_roof, label=label)
    environment.globals.update(best_two=peers_of_choice, best_two_names=BEST_TWO)
    template = environment.from_string((files(__package__) / "report.html").read_text(encoding="utf-8"))
    return template.render(
        devices=" · ".join(dict.fromkeys(run["device"] for _, run in runs)),
        groups={title: (_sentence(group), group) for title, group in groups.items()},
        counts=counts,
        n_lengths=len(lengths),
        n_compared=sum(counts[outcome] for outcome in _LOOKS),
        measured=name_measured({name for gain in gains for name in gain.timed}, map(run_of, gains)),
        same=g.SAME,
        choices=[choice for choice in g.newest_choices(records) if choice.lead.get("protocol") == "hot"],
        not_measured=NOT_MEASURED,
        losses=sorted((one for one in gains if one.outcome in (g.SLOWER, g.ABSENT)), key=lambda one: one.times or 0.0),
        bad=[row for row in rows if row["status"] in ("wrong", "failed")],
        runs=runs,
        on_cpu=any(run["device"].startswith("CPU") for _, run in runs),
        n_rows=len(rows),
        packed=packed,
    )


def _with_devices(records: Sequence[Record]) -> list[Record]:
    """Return records whose rows name the device beside their run, if there are several devices."""
    if len({row["device"] for record in records for row in record.rows}) < 2:
        return list(records)

    def named(row: Row) -> Row:
        return {**row, "record": f"{row['record']}, {row['device']}"}

    return [replace(record, rows=[named(row) for row in record.rows]) for record in records]


def duration(microseconds: float | None) -> str:
    """Format a time with its unit, to three significant digits."""
    if microseconds is None:
        return NOTHING
    unit, size = next(((unit, size) for unit, size in (("s", 1e6), ("ms", 1e3)) if microseconds >= size), ("µs", 1.0))
    value = microseconds / size
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(3 - whole, 0)}f}\u00a0{unit}" if whole else f"{value:.3g}\u00a0{unit}"


def best_two(times: Mapping[str, float], show: Callable[[str], str], first: str | None = None) -> list[str]:
    """Return two cells, the other libraries of least time, as `show` has each; `first` comes first among equals."""
    order = sorted(times, key=times.__getitem__)
    equal = [name for name in order if show(name) == show(order[0])]
    if first in equal:
        order.sort(key=lambda name: name != first)
    cells = [f"{show(name)}, {NAMES[name]}" for name in order[:2]]
    return cells + [NOTHING] * (2 - len(cells))


def peers_of_choice(choice: g.Choice) -> list[str]:
    """Return the two best other libraries of a choice, with their times."""
    first = None if choice.best_peer is None else choice.best_peer[1]
    return best_two(choice.peers, lambda name: duration(choice.peers[name]), first)


def _side(gain: Gain, row: Row | None) -> str:
    """Say how long one side of a comparison takes, and by which implementation."""
    if row is None:
        return NOTHING
    time = duration(row.get(gain.quantity, {}).get("p50")) + (" in a CUDA graph" if gain.quantity == "graph" else "")
    if row["kind"] == "peer" or row is gain.peer:
        return f"{time}, {NAMES.get(row['impl'], row['impl'])}"
    by = row.get("served_by", row["impl"])
    return f"{time}, {row['impl']}{'' if by == row['impl'] else f' ({by})'}"


def _sentence(group: Sequence[Gain]) -> str:
    counts = Counter(gain.outcome for gain in group)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _LOOKS if counts[outcome])
    return f"{said}; median {statistics.median(gain.times for gain in group if gain.times is not None):.2f} ×"


def _draw_gains(groups: dict[str, list[Gain]]) -> Any:
    """A line for each mode, and a mark for each case at how many times as fast ours is."""
    import pandas as pd
    from bokeh.transform import factor_cmap, factor_mark

    outcomes, titles = list(_LOOKS), list(reversed(groups))
    gains = sorted((x for group in groups.values() for x in group), key=lambda gain: outcomes.index(gain.outcome))
    marks = [
        {
            "x": gain.times,
            "y": (gain.title, 0.5 * math.modf(number * 0.6180339887)[0] - 0.25),  # beside marks that it would cover
            "case": f"{gain.lead['case']['name']}: {describe_case(gain.lead)}",
            "record": gain.lead["record"],
            "ours": _side(gain, gain.ours),
            "peer": _side(gain, gain.peer),
            "outcome": gain.outcome,
        }
        for number, gain in enumerate(gains)
    ]
    figure = _figure("log", "times as fast", y_range=titles, height=90 + 34 * len(titles))
    figure.xaxis.ticker = _TICKS
    figure.xaxis.major_label_overrides = {tick: f"{tick:g}" for tick in _TICKS}
    figure.vspan(x=1, line_color=_TEXT, line_width=1.5)
    colours, markers = zip(*_LOOKS.values(), strict=True)
    looks = {"color": factor_cmap("outcome", colours, outcomes), "marker": factor_mark("outcome", markers, outcomes)}
    source = pd.DataFrame(marks).to_dict("list")
    figure.scatter("x", "y", source=source, size=9, alpha=0.75, legend_group="outcome", name="dots", **looks)
    figure.legend.orientation = "horizontal"
    figure.add_layout(figure.legend[0], "above")
    tips = {"case": "@case", "record": "@record", "ours": "@ours", "best other": "@peer", "times as fast": "@x{0.00}"}
    return _hover(figure, tips)


def _draw_lengths(rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Yield charts of the time over the tokens, of shapes that were measured at many lengths."""
    import pandas as pd

    several = len({row["device"] for row in rows}) > 1

    def title_of(row: Row) -> str:
        pairs = "interleaved" if row["case"]["interleaved"] else "half-split"
        return ", ".join((pairs, row["mode"], *([row["device"]] if several else [])))

    points = [
        (title_of(row), label(row), case["tokens"], time)
        for row in rows
        if (case := row["case"])["name"].startswith("tokens-") and row["benchmark"] == "rope" and row["impl"] != _EAGER
        if (time := row.get("time", {}).get("p50")) is not None
    ]
    frame = pd.DataFrame(points, columns=["title", "name", "x", "y"])
    frame = frame.drop_duplicates(["title", "name", "x"], keep="last").sort_values("x", kind="stable")
    for title, lines in frame.groupby("title", sort=False):
        if lines["name"].value_counts().max() >= _FEWEST_LENGTHS:
            figure = _figure("log", "tokens", y_axis_type="log", y_axis_label="µs, cold cache", height=360)
            for number, (name, line) in enumerate(lines.groupby("name", sort=False)):
                looks = {"source": line.to_dict("list"), "color": _LINES[number % len(_LINES)], "legend_label": name}
                figure.line("x", "y", line_width=2, **looks)
                figure.scatter("x", "y", size=7, name="dots", **looks)
            figure.legend.click_policy = "hide"
            figure.legend.location = "top_left"
            yield title, _hover(figure, {"": "@name", "tokens": "@x", "µs": "@y{0.00}"})


def _figure(scale: str, across: str, **options: Any) -> Any:
    """Make an empty chart that is readable on a light page and on a dark one, at any width."""
    from bokeh.plotting import figure

    plain = {"sizing_mode": "stretch_width", "toolbar_location": None, "tools": ""}
    chart = figure(x_axis_type=scale, x_axis_label=across, **plain, **options)
    chart.background_fill_color = chart.border_fill_color = chart.outline_line_color = None
    chart.axis.major_label_text_color = chart.axis.axis_label_text_color = _TEXT
    chart.axis.axis_line_color = chart.axis.major_tick_line_color = chart.axis.minor_tick_line_color = _TEXT
    chart.grid.grid_line_color = _GRID
    return chart


def _hover(figure: Any, tooltips: dict[str, str]) -> Any:
    from bokeh.models import HoverTool

    figure.add_tools(HoverTool(tooltips=list(tooltips.items()), renderers=figure.select({"name": "dots"})))
    figure.legend.background_fill_color = figure.legend.border_line_color = None
    figure.legend.label_text_color = _TEXT
    return figure


def _make_table(rows: Sequence[Row]) -> Any:
    """Make the table of all rows, with a field that filters it."""
    import pandas as pd
    from bokeh import models

    def flat(row: Row) -> Row:
        more = {"shape": describe_case(row), "share": g.share_of_roof(row), "case": row["case"]["name"], "ratios": None}
        return {**row, **more, "implementation": label(row)}

    frame = pd.json_normalize([flat(row) for row in sorted(rows, key=lambda row: row["status"] == "unsupported")])
    texts = frame.reindex(columns=[*_FIRST, *_LAST]).astype(object).fillna("")
    known = {name: frame[key] / (2**20 if "MiB" in name else 1) for name, key in _NUMBERS.items() if key in frame}
    numbers = {name: column.to_numpy("float32") for name, column in known.items()}
    words = texts.agg(" ".join, axis=1).str.lower().to_list()
    source = models.ColumnDataSource({**texts.to_dict("list"), **numbers, "words": words})
    dark, hint = models.InlineStyleSheet(css=_DARK), "words that a row must have: llama triton bwd …"
    field = models.TextInput(placeholder=hint, sizing_mode="stretch_width", stylesheets=[dark])
    view = models.CDSView(filter=models.CustomJSFilter(args={"field": field}, code=_FILTER))
    field.js_on_change("value_input", models.CustomJS(args={"source": source}, code="source.change.emit()"))
    plain = {"formatter": models.NumberFormatter(format="0,0.[000]", nan_format=NOTHING)}
    shown = {**_FIRST, **dict.fromkeys(numbers, 85), **_LAST}
    columns = [
        models.TableColumn(field=name, title=name, width=width, **(plain if name in numbers else {}))
        for name, width in shown.items()
    ]
    looks = {"height": 520, "sizing_mode": "stretch_width", "autosize_mode": "none", "stylesheets": [dark]}
    table = models.DataTable(source=source, view=view, columns=columns, index_position=None, **looks)
    return models.Column(field, table, sizing_mode="stretch_width")
