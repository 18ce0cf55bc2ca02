"""The record of a comparison, and what is made of it: figures, and tables as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from ropewalk.bench.core.records import cpu_note, read_lines
from ropewalk.experiments.bert_positions.speed import HUGGING_FACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BENCHMARK = "bert-positions"
# Name, colour, marker and line of a scheme; colours are Okabe and Ito's, which the colour-blind can distinguish.
_STYLES: dict[str, tuple[str, str, str, Any]] = {
    "standard": ("Standard (learned)", "#000000", "o", (0, (1, 1))),
    "absolute": ("Absolute (sinusoids)", "#E69F00", "s", (0, (5, 1))),
    "rope": ("RoPE", "#0072B2", "^", "solid"),
    "exposb": ("ExpoSB", "#D55E00", "D", (0, (3, 1, 1, 1))),
    "alibi": ("ALiBi", "#009E73", "v", (0, (4, 2))),
    "rerope": ("ReRoPE", "#CC79A7", "P", "solid"),
}
_GREYS = {"sdpa": "#555555", "eager": "#999999", "ropewalk": "#7FB2D9"}
_SMOKE_TOKENS = 1_000_000  # of a training, below which models learn too little to be compared
_SMOOTH = 0.04  # of the training: a point of the curve is the mean over as much
_FIRST = 0.03  # of the training, in which the loss falls from where nothing else is
_LAST = 0.6  # of the training is over where its end begins


class BertRecord(NamedTuple):
    """A record file: the line about the run, and the rows of each kind."""

    run: dict[str, Any]
    training: pd.DataFrame
    evaluation: pd.DataFrame
    speed: pd.DataFrame
    exposb: pd.DataFrame


def read_bert_record(path: Path) -> BertRecord:
    """Read a record."""
    run, lines = read_lines(path, BENCHMARK)
    kinds = ("training", "evaluation", "speed", "exposb")
    return BertRecord(run, *(pd.DataFrame([x for x in lines if x["kind"] == kind], dtype=object) for kind in kinds))


def draw_learning(record: BertRecord, path: Path) -> None:
    """Draw loss against steps, all of them and the last ones large, and loss and accuracy against length, as PNG."""
    figure = _make_figure(record, 9.5)
    (training, end), (loss, accuracy) = figure.subplots(2, 2)
    _draw_training(training, record, _FIRST, "training")
    _draw_training(end, record, _LAST, "the end of the training")
    _draw_lengths(loss, record, "loss", 1, "loss, nats per masked token")
    _draw_lengths(accuracy, record, "accuracy", 100, "masked tokens guessed right, %")
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11)
    figure.savefig(path, dpi=120, facecolor="white", format="png")


def draw_speed(record: BertRecord, path: Path) -> None:
    """Draw tokens/s and, where it was measured, the peak of memory of a training step, as PNG."""
    titles = {"tokens_per_second": "tokens/s of a training step"}
    if record.speed.peak_bytes.notna().any():
        titles["peak_bytes"] = "GiB at its peak, beyond weights, optimiser and batch"
    figure = _make_figure(record, 5.5)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        _draw_bars(axes, record.speed, column, title)
    figure.savefig(path, dpi=120, facecolor="white", format="png")


def _make_figure(record: BertRecord, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(textwrap.fill(_title(record), 100), fontsize=12)
    return figure


def _title(record: BertRecord) -> str:
    config, seeds, device = record.run["config"], len(record.run["config"]["seeds"]), record.run["device"]
    tokens = config["steps"] * config["batch_size"] * config["train_length"]
    smoke = "Smoke: no comparison. " if tokens < _SMOKE_TOKENS else ""
    return (
        f"{smoke}BERT of {config['num_layers']} layers × {config['hidden_size']}, trained at length "
        f"{config['train_length']} on {record.run['corpus']['name']}, {config['steps']} steps of "
        f"{config['batch_size']} windows, {seeds} seed{'s' * (seeds > 1)}, {device}{cpu_note(device)}"
    )


def _draw_training(axes: Axes, record: BertRecord, since: float, title: str) -> None:
    """Draw each scheme's mean and range over seeds; the view's height, and width where large, begins at `since`."""
    shown = []
    for (_, colour, marker, line), rows in _by_scheme(record.training):
        curves = _smooth(rows)
        steps, least, greatest = curves.index, curves.min(axis=1), curves.max(axis=1)
        inside = [index for index, step in enumerate(steps) if step >= since * steps[-1]]
        marked = inside[len(inside) // 12 :: max(1, len(inside) // 6)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markevery": marked, "markersize": 6}
        axes.plot(steps, curves.mean(axis=1), linestyle=line, linewidth=1.6, **look)
        axes.fill_between(steps, least, greatest, color=colour, alpha=0.18, linewidth=0)
        shown += [least.iloc[inside].min(), greatest.iloc[inside].max()]
        if since > _FIRST:
            axes.set_xlim(since * steps[-1], steps[-1] * (1 + (1 - since) * 0.03))
    room = (max(shown) - min(shown)) * 0.04 or 0.1
    axes.set_ylim(min(shown) - room, max(shown) + room)
    _label(axes, title, "steps", "loss, nats per masked token")


def _smooth(rows: pd.DataFrame) -> pd.DataFrame:
    """Average each seed's losses over `_SMOOTH` of all entries, centred, over fewer at both ends."""
    curves = pd.DataFrame(dict(zip(rows.seed, rows.losses, strict=True)), index=rows.steps.iloc[0])
    return curves.rolling(2 * round(len(curves) * _SMOOTH / 2) + 1, center=True, min_periods=1).mean()


def _draw_lengths(axes: Axes, record: BertRecord, column: str, factor: float, label: str) -> None:
    """Draw a value against the length, with the standard deviation over seeds as bars."""
    lengths = sorted(record.evaluation.length.unique())
    for (name, colour, marker, line), rows in _by_scheme(record.evaluation):
        over_seeds = (rows[column].astype(float) * factor).groupby(rows.length)
        look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "capsize": 3, "label": name}
        axes.errorbar(lengths, over_seeds.mean(), over_seeds.std().fillna(0), markersize=6, linewidth=1.6, **look)
    axes.axvline(record.run["config"]["train_length"], color="#888888", linestyle=":", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    _label(axes, "held-out text", "length read at once, tokens (dotted: the training length)", label)


def _draw_bars(axes: Axes, speed: pd.DataFrame, column: str, title: str) -> None:
    """Draw a group of bars for each model, a bar for each length."""
    names = [
        f"Hugging Face, {x.attention}" if x.model == HUGGING_FACE else _STYLES[x.model][0] for x in speed.itertuples()
    ]
    lengths, models = sorted(speed.length.unique()), list(dict.fromkeys(names))
    height = 0.8 / len(lengths)
    for row, model in zip(speed.to_dict("records"), names, strict=True):
        number, length = row[column], lengths.index(row["length"])
        y = models.index(model) + (length - (len(lengths) - 1) / 2) * height
        if number is not None:
            number /= 1 << 30 if column == "peak_bytes" else 1
            colour = _GREYS[row["attention"]] if row["model"] == HUGGING_FACE else _STYLES[row["model"]][1]
            look: dict[str, Any] = {"alpha": 0.55, "hatch": "//"} if length else {}
            axes.barh(y, number, height=height * 0.94, edgecolor="white", color=colour, **look)
        text = "out of memory" if number is None else f"{_short(number)} at {row['length']}"
        axes.annotate(text, (number or 0, y), (3, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(models)), models, fontsize=10)
    axes.set_ylim(len(models) - 0.4, -0.6)
    axes.margins(x=0.25)
    axes.xaxis.set_major_formatter(lambda number, _: _short(number))
    _label(axes, title, "", "")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=12)
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def markdown_tables(record: BertRecord) -> str:
    """Make the tables as Markdown, below a line about the run and its machine."""
    run, trained = record.run, record.run["config"]["train_length"]
    versions = "".join(f", {name} {version}" for name, version in run["peers"].items())
    lines = [f"# {_title(record)}", "", f"Ropewalk {run['ropewalk']}, PyTorch {run['torch']}{versions}; {run['date']}."]

    def add(title: str, note: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
        rule = [":---"] * words + ["---:"] * (len(headings) - words)
        table = [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]
        lines.extend(["", f"## {title}", "", f"{note}.", "", *table] if rows else [])

    seeds = "mean ± standard deviation over seeds" if len(run["config"]["seeds"]) > 1 else "of one seed"
    at_lengths = [f"{length} ({length // trained}×)" for length in sorted(record.evaluation.length.unique())]
    loss, accuracy = "Nats per masked token of held-out text", "Masked tokens guessed right, in %"
    for title, note, factor, digits in (("Loss", loss, 1, 3), ("Accuracy", accuracy, 100, 2)):
        rows = [
            [name, *(_spread(at * factor, digits) for _, at in of_scheme.groupby("length")[title.lower()])]
            for (name, *_), of_scheme in _by_scheme(record.evaluation)
        ]
        add(title, f"{note}; {seeds}", ["scheme", *at_lengths], rows)
    jobs = run.get("jobs", 1)
    how = "As it was run" if jobs == 1 else f"{jobs} models at a time on one device"
    rows = [
        [
            name,
            _spread(_smooth(of_scheme).iloc[-1], 3),
            _spread(of_scheme.tokens_per_second / 1e3, 1),
            _spread(of_scheme.seconds, 1),
            f"{of_scheme.parameters.iloc[0]:,}",
        ]
        for (name, *_), of_scheme in _by_scheme(record.training)
    ]
    headings = ["scheme", "loss at the end", "thousand tokens/s", "seconds", "parameters"]
    add("Training", f"{how}, tokens without padding; {seeds}", headings, rows)
    add("Speed", *_speed_table(record.speed), words=2)
    claims = [[row.claim, row.verdict, row.finding] for row in record.exposb.itertuples()]
    add("ExpoSB", "Its name and its parts claim or suggest this", ["claim", "verdict", "measured"], claims, words=3)
    return "\n".join(lines) + "\n"


def _speed_table(speed: pd.DataFrame) -> tuple[str, list[str], list[list[str]]]:
    """Make the table of tokens/s, against Hugging Face's attention, and the peak of memory, at each length."""
    lengths = sorted(speed.length.unique())
    headings = ["model", "attention"]
    for length in lengths:
        headings += [f"tokens/s at {length}", "× sdpa", "× eager", f"peak at {length}"]
    note = (
        "Of a training step; tokens without padding, the 20 % to 80 % quantiles; peak: the most that a step allocates "
        "beyond weights, optimiser and batch"
    )
    at, rows = {(row.model, row.attention, row.length): row for row in speed.itertuples()}, []
    for model, attention in dict.fromkeys(zip(speed.model, speed.attention, strict=True)):
        cells = [model if model == HUGGING_FACE else _STYLES[model][0], attention]
        for length in lengths:
            row = at[model, attention, length]
            if row.tokens_per_second is None:
                cells += ["out of memory", "–", "–", "–"]
                continue
            low, high = (_short(row.tokens_per_second * row.step_ms[1] / step) for step in row.step_ms[::-2])
            cells.append(f"{_short(row.tokens_per_second)} ({low}–{high})")
            for name in ("sdpa", "eager"):
                theirs = at[HUGGING_FACE, name, length].tokens_per_second
                cells.append(f"{row.tokens_per_second / theirs:.2f}" if theirs else "–")
            cells.append(f"{row.peak_bytes / (1 << 20):,.0f} MiB" if row.peak_bytes else "–")
        rows.append(cells)
    return note, headings, rows


def _short(value: float) -> str:
    """Format to three digits: 1.23, 12.3k, 4.56M."""
    unit, size = ("M", 1e6) if abs(value) >= 999_500 else ("k", 1e3) if abs(value) >= 999.5 else ("", 1)
    return f"{value / size:#.3g}".rstrip(".") + unit if unit else f"{value:.3g}"


def _by_scheme(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str, Any], pd.DataFrame]]:
    """Group rows by scheme, in the order of `_STYLES`, whose entry comes first."""
    return ((style, rows[rows.scheme == scheme]) for scheme, style in _STYLES.items() if (rows.scheme == scheme).any())


def _spread(values: pd.Series[float], digits: int) -> str:
    mean = f"{values.mean():.{digits}f}"
    return f"{mean} ± {values.astype(float).std():.{digits}f}" if len(values) > 1 else mean
