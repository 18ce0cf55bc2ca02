"""Figures of a record, tables for the terminal, and the same tables as Markdown."""

from __future__ import annotations

import io
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.records import cpu_note
from ropewalk.experiments.bert_positions.record import HUGGING_FACE, BertRecord, EvaluationRow, SpeedRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Style(NamedTuple):
    """The name and look of a scheme; colours are Okabe and Ito's, which the colour-blind can distinguish."""

    name: str
    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]


_STYLES = {
    "standard": _Style("Standard (learned)", "#000000", "o", (0, (1, 1))),
    "absolute": _Style("Absolute (sinusoids)", "#E69F00", "s", (0, (5, 1))),
    "rope": _Style("RoPE", "#0072B2", "^", "solid"),
    "exposb": _Style("ExpoSB", "#D55E00", "D", (0, (3, 1, 1, 1))),
    "alibi": _Style("ALiBi", "#009E73", "v", (0, (4, 2))),
    "rerope": _Style("ReRoPE", "#CC79A7", "P", "solid"),
}
_GREYS = {"sdpa": "#555555", "eager": "#999999", "ropewalk": "#7FB2D9"}
SMOKE_TOKENS = 1_000_000  # of a training, below which models learn too little to be compared
_SMOOTH = 0.04  # of the training: a point of the curve is the mean over as much
_FIRST = 0.03  # of the training, in which the loss falls from where nothing else is
_LAST = 0.6  # of the training is over where its end begins


def draw_learning(record: BertRecord, path: Path) -> None:
    """Draw loss against steps, all of them and the last ones large, and loss and accuracy against length, as PNG."""
    figure = _make_figure(record, 9.5)
    (training, end), (loss, accuracy) = figure.subplots(2, 2)
    _draw_training(training, record, _FIRST, "training")
    _draw_training(end, record, _LAST, "the end of the training")
    _draw_lengths(loss, record, _loss, "loss, nats per masked token")
    _draw_lengths(accuracy, record, _percent, "masked tokens guessed right, %")
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11)
    figure.savefig(path, dpi=120, facecolor="white", format="png")


def draw_speed(record: BertRecord, path: Path) -> None:
    """Draw tokens/s and, where it was measured, the peak of memory of a training step, as PNG."""
    measured_memory = any(row.peak_bytes is not None for row in record.speed)
    figure = _make_figure(record, 5.5)
    panels = figure.subplots(1, 1 + measured_memory, sharey=True, squeeze=False)[0]
    _draw_bars(panels[0], record.speed, lambda row: row.tokens_per_second, "tokens/s of a training step")
    if measured_memory:
        title = "GiB at its peak, beyond weights, optimiser and batch"
        _draw_bars(panels[1], record.speed, lambda row: row.peak_bytes and row.peak_bytes / (1 << 30), title)
    figure.savefig(path, dpi=120, facecolor="white", format="png")


def _make_figure(record: BertRecord, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(textwrap.fill(_title(record), 100), fontsize=12)
    return figure


def _title(record: BertRecord) -> str:
    config, corpus, seeds = record.run["config"], record.run["corpus"], len(record.run["config"]["seeds"])
    tokens = config["steps"] * config["batch_size"] * config["train_length"]
    smoke = "Smoke: no comparison. " if tokens < SMOKE_TOKENS else ""
    device = record.run["device"]
    return (
        f"{smoke}BERT of {config['num_layers']} layers × {config['hidden_size']}, trained at length "
        f"{config['train_length']} on {corpus['name']}, {config['steps']} steps of {config['batch_size']} windows, "
        f"{seeds} seed{'s' * (seeds > 1)}, {device}{cpu_note(device)}"
    )


def _draw_training(axes: Axes, record: BertRecord, since: float, title: str) -> None:
    """Draw the training loss of each scheme: the mean over seeds, and the band from the least to the greatest.

    since: what part of the training is left out of the view's height, and of its width where it is a large one.
    """
    shown: list[float] = []
    for scheme, rows in _by_scheme(record.training).items():
        style, steps = _STYLES[scheme], rows[0].steps
        over_seeds = list(zip(*(_smooth(row.losses) for row in rows), strict=True))
        mean, least, greatest = ([of(values) for values in over_seeds] for of in (statistics.mean, min, max))
        inside = [index for index, step in enumerate(steps) if step >= since * steps[-1]]
        marked = inside[len(inside) // 12 :: max(1, len(inside) // 6)]
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markevery": marked, "markersize": 6}
        axes.plot(steps, mean, linestyle=style.line, linewidth=1.6, **look)
        axes.fill_between(steps, least, greatest, color=style.colour, alpha=0.18, linewidth=0)
        shown += [value for index in inside for value in (least[index], greatest[index])]
        if since > _FIRST:
            axes.set_xlim(since * steps[-1], steps[-1] * (1 + (1 - since) * 0.03))
    room = (max(shown) - min(shown)) * 0.04 or 0.1
    axes.set_ylim(min(shown) - room, max(shown) + room)
    _label(axes, title, "steps", "loss, nats per masked token")


def _smooth(values: Sequence[float]) -> list[float]:
    """Average over `_SMOOTH` of all entries, centred, over fewer at both ends."""
    reach = round(len(values) * _SMOOTH / 2)
    return [statistics.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def _draw_lengths(axes: Axes, record: BertRecord, value: Callable[[EvaluationRow], float], label: str) -> None:
    """Draw a value against the length, with the standard deviation over seeds as bars."""
    lengths = sorted({row.length for row in record.evaluation})
    for scheme, rows in _by_scheme(record.evaluation).items():
        style = _STYLES[scheme]
        at = [[value(row) for row in rows if row.length == length] for length in lengths]
        means, spreads = zip(*map(_mean_and_spread, at), strict=True)
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": style.line}
        axes.errorbar(lengths, means, spreads, capsize=3, markersize=6, linewidth=1.6, label=style.name, **look)
    axes.axvline(record.run["config"]["train_length"], color="#888888", linestyle=":", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    _label(axes, "held-out text", "length read at once, tokens (dotted: the training length)", label)


def _draw_bars(axes: Axes, rows: Sequence[SpeedRow], value: Callable[[SpeedRow], float | None], title: str) -> None:
    """Draw a group of bars for each model, a bar for each length."""
    lengths, models = sorted({row.length for row in rows}), list(dict.fromkeys(map(_model, rows)))
    height = 0.8 / len(lengths)
    for row in rows:
        number, length = value(row), lengths.index(row.length)
        y = models.index(_model(row)) + (length - (len(lengths) - 1) / 2) * height
        if number is not None:
            colour = _GREYS[row.attention] if row.model == HUGGING_FACE else _STYLES[row.model].colour
            look: dict[str, Any] = {"alpha": 0.55, "hatch": "//"} if length else {}
            axes.barh(y, number, height=height * 0.94, edgecolor="white", color=colour, **look)
        text = "out of memory" if number is None else f"{_short(number)} at {row.length}"
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
    run = record.run
    versions = "".join(f", {name} {version}" for name, version in run["peers"].items())
    lines = [f"# {_title(record)}", "", f"Ropewalk {run['ropewalk']}, PyTorch {run['torch']}{versions}; {run['date']}."]
    for table in bert_tables(record):
        title, note, table.title, table.caption, table.box = table.title, table.caption, None, None, box.MARKDOWN
        for column in table.columns:
            column.no_wrap, column.overflow = True, "ignore"
        console = Console(file=io.StringIO(), width=10_000)
        console.print(table)
        rows = [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
        rows[1] = "".join("| ---: " if column.justify == "right" else "| :--- " for column in table.columns) + "|"
        lines += ["", f"## {title}", "", f"{note}.", "", *rows]
    return "\n".join(lines) + "\n"


def bert_tables(record: BertRecord) -> list[Table]:
    """Make the tables, for the console."""
    seeds = "mean ± standard deviation over seeds" if len(record.run["config"]["seeds"]) > 1 else "of one seed"
    jobs = record.run.get("jobs", 1)
    how = "As it was run" if jobs == 1 else f"{jobs} models at a time on one device"
    lengths, trained = sorted({row.length for row in record.evaluation}), record.run["config"]["train_length"]
    at_lengths = [f"{length} ({length // trained}×)" for length in lengths]
    loss = _table("Loss", f"Nats per masked token of held-out text; {seeds}", ["scheme", *at_lengths])
    accuracy = _table("Accuracy", f"Masked tokens guessed right, in %; {seeds}", ["scheme", *at_lengths])
    for scheme, rows in _by_scheme(record.evaluation).items():
        for table, value, digits in ((loss, _loss, 3), (accuracy, _percent, 2)):
            at = [[value(row) for row in rows if row.length == length] for length in lengths]
            table.add_row(_STYLES[scheme].name, *(_with_spread(values, digits) for values in at))
    headings = ["scheme", "loss at the end", "thousand tokens/s", "seconds", "parameters"]
    training = _table("Training", f"{how}, tokens without padding; {seeds}", headings)
    for scheme, rows in _by_scheme(record.training).items():
        training.add_row(
            _STYLES[scheme].name,
            _with_spread([_smooth(row.losses)[-1] for row in rows], 3),
            _with_spread([row.tokens_per_second / 1e3 for row in rows], 1),
            _with_spread([row.seconds for row in rows], 1),
            f"{rows[0].parameters:,}",
        )
    claims = _table("ExpoSB", "Its name and its parts claim or suggest this", ["claim", "verdict", "measured"], words=3)
    for row in record.exposb:
        claims.add_row(row.claim, row.verdict, row.finding)
    tables = [loss, accuracy, training, _speed_table(record.speed), claims]
    return [table for table in tables if table.row_count]


def _speed_table(speed: Sequence[SpeedRow]) -> Table:
    """Make the table of tokens/s, against Hugging Face's attention, and the peak of memory, at each length."""
    lengths = sorted({row.length for row in speed})
    at = {(row.model, row.attention, row.length): row for row in speed}
    headings = ["model", "attention"]
    for length in lengths:
        headings += [f"tokens/s at {length}", "× sdpa", "× eager", f"peak at {length}"]
    note = (
        "Of a training step; tokens without padding, the 20 % to 80 % quantiles; peak: the most that a step allocates "
        "beyond weights, optimiser and batch"
    )
    table = _table("Speed", note, headings, words=2)
    for model, attention in dict.fromkeys((row.model, row.attention) for row in speed):
        cells = [model if model == HUGGING_FACE else _STYLES[model].name, attention]
        for length in lengths:
            row = at[model, attention, length]
            if row.tokens_per_second is None or row.step_ms is None:
                cells += ["out of memory", "–", "–", "–"]
                continue
            low, high = (_short(row.tokens_per_second * row.step_ms[1] / step) for step in row.step_ms[::-2])
            cells.append(f"{_short(row.tokens_per_second)} ({low}–{high})")
            for name in ("sdpa", "eager"):
                theirs = at[HUGGING_FACE, name, length].tokens_per_second
                cells.append(f"{row.tokens_per_second / theirs:.2f}" if theirs else "–")
            cells.append(f"{row.peak_bytes / (1 << 20):,.0f} MiB" if row.peak_bytes else "–")
        table.add_row(*cells)
    return table


def _table(title: str, note: str, headings: Sequence[str], words: int = 1) -> Table:
    """Make a table whose first columns, so many, are words, and the others numbers."""
    table = Table(title=title, caption=note, show_lines=words == len(headings))
    for index, heading in enumerate(headings):
        is_word = index < words
        table.add_column(heading, justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word)
    return table


def _loss(row: EvaluationRow) -> float:
    return row.loss


def _percent(row: EvaluationRow) -> float:
    return row.accuracy * 100


def _short(value: float) -> str:
    """Format to three digits: 1.23, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f}{unit}"
    return f"{value:.3g}"


def _model(row: SpeedRow) -> str:
    return f"Hugging Face, {row.attention}" if row.model == HUGGING_FACE else _STYLES[row.model].name


def _by_scheme(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Group rows by scheme, in the order of `_STYLES`."""
    return {scheme: found for scheme in _STYLES if (found := [row for row in rows if row.scheme == scheme])}


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the standard deviation, 0 for one value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _with_spread(values: Sequence[float], digits: int) -> str:
    mean, spread = _mean_and_spread(values)
    return f"{mean:.{digits}f} ± {spread:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"
