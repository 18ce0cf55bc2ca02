"""The record of a comparison, and what is made of it: figures, and tables as Markdown."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from ropewalk.bench.core.records import cpu_note, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BENCHMARK, HUGGING_FACE = "bert-positions", "Hugging Face BERT"  # as it is
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
_LOOK: dict[str, Any] = {"axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
_LOOK |= {"axes.labelsize": 10, "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True}
_LOOK |= {"lines.markersize": 6, "lines.linewidth": 1.6, "errorbar.capsize": 3}
_SMOKE_TOKENS = 1_000_000  # of a training, below which models learn too little to be compared
_SMOOTH = 0.04  # of the training: a point of the curve is the mean over as much


class BertRecord(NamedTuple):
    """A record file: the line about the run, and the rows of each kind."""

    run: dict[str, Any]
    training: pd.DataFrame
    evaluation: pd.DataFrame
    speed: pd.DataFrame
    exposb: pd.DataFrame


def read_bert_record(path: Path) -> BertRecord:
    run, lines = read_lines(path, BENCHMARK)
    kinds = BertRecord._fields[1:]
    return BertRecord(run, *(pd.DataFrame([x for x in lines if x["kind"] == kind], dtype=object) for kind in kinds))


def draw_learning(record: BertRecord, path: Path) -> None:
    """Draw loss against steps, all of them and the last ones large, and loss and accuracy against length, as PNG."""
    with _figure(record, 9.5, path) as figure:
        (training, end), (loss, accuracy) = figure.subplots(2, 2)
        # Before that part of the steps the loss falls from where nothing else is.
        for axes, since, title in ((training, 0.03, "training"), (end, 0.6, "the end of the training")):
            shown = []
            for (_, colour, marker, line), rows in _by_scheme(record.training):
                curves = _smooth(rows)
                steps, least, greatest = curves.index, curves.min(axis=1), curves.max(axis=1)
                inside = [index for index, step in enumerate(steps) if step >= since * steps[-1]]
                marked = inside[len(inside) // 12 :: max(1, len(inside) // 6)]
                axes.plot(steps, curves.mean(axis=1), color=colour, marker=marker, markevery=marked, linestyle=line)
                axes.fill_between(steps, least, greatest, color=colour, alpha=0.18, linewidth=0)
                shown += [least.iloc[inside].min(), greatest.iloc[inside].max()]
            room = (max(shown) - min(shown)) * 0.04 or 0.1
            axes.set_ylim(min(shown) - room, max(shown) + room)
            axes.set(title=title, xlabel="steps", ylabel="loss, nats per masked token")
        end.set_xlim(0.6 * end.dataLim.x1, 1.012 * end.dataLim.x1)
        rows, lengths = record.evaluation, sorted(record.evaluation.length.unique())
        accuracies = rows.accuracy * 100
        for axes, values in ((loss, rows.loss), (accuracy, accuracies)):
            for (name, colour, marker, line), of_scheme in _by_scheme(rows):
                over_seeds = values[of_scheme.index].astype(float).groupby(of_scheme.length)
                look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "label": name}
                axes.errorbar(lengths, over_seeds.mean(), over_seeds.std().fillna(0), **look)
            trained = record.run["config"]["train_length"]
            axes.axvline(trained, color="#888888", linestyle=":", linewidth=1, zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, lengths)
            axes.minorticks_off()
            axes.set(title="held-out text", xlabel="length read at once, tokens (dotted: the training length)")
        loss.set_ylabel("loss, nats per masked token")
        accuracy.set_ylabel("masked tokens guessed right, %")
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11)


def draw_speed(record: BertRecord, path: Path) -> None:
    """Draw tokens/s and, where it was measured, the peak of memory of a training step, as PNG."""
    titles = {"tokens_per_second": "tokens/s of a training step"}
    if record.speed.peak_bytes.notna().any():
        titles["peak_bytes"] = "GiB at its peak, beyond weights, optimiser and batch"
    with _figure(record, 5.5, path) as figure:
        panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        lengths = sorted(record.speed.length.unique())
        height = 0.8 / len(lengths)
        for axes, (column, title) in zip(panels, titles.items(), strict=True):
            models = dict[str, int]()  # a group of bars for each, a bar for each length
            for row in record.speed.to_dict("records"):
                number, length, greys = row[column], lengths.index(row["length"]), _GREYS.get(row["attention"])
                name, colour, *_ = _STYLES.get(row["model"], (f"Hugging Face, {row['attention']}", greys))
                y = models.setdefault(name, len(models)) + (length - (len(lengths) - 1) / 2) * height
                if number is not None:
                    number /= 1 << 30 if column == "peak_bytes" else 1
                    look: dict[str, Any] = {"alpha": 0.55, "hatch": "//"} if length else {}
                    axes.barh(y, number, height=height * 0.94, edgecolor="white", color=colour, **look)
                text = "out of memory" if number is None else f"{_short(number)} at {row['length']}"
                axes.annotate(text, (number or 0, y), (3, 0), textcoords="offset points", va="center", fontsize=9)
            axes.set_yticks(range(len(models)), models, fontsize=10)
            axes.set(ylim=(len(models) - 0.4, -0.6), title=title)
            axes.margins(x=0.25)
            axes.xaxis.set_major_formatter(lambda number, _: _short(number))


@contextlib.contextmanager
def _figure(record: BertRecord, height: float, path: Path) -> Iterator[Figure]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_LOOK):
        figure = Figure(figsize=(11, height), layout="constrained")
        figure.suptitle(textwrap.fill(_title(record), 100), fontsize=12)
        yield figure
        figure.savefig(path, dpi=120, facecolor="white", format="png")


def _title(record: BertRecord) -> str:
    config, device = record.run["config"], record.run["device"]
    steps, batch, length, seeds = (config[x] for x in ("steps", "batch_size", "train_length", "seeds"))
    smoke = "Smoke: no comparison. " if steps * batch * length < _SMOKE_TOKENS else ""
    return (
        f"{smoke}BERT of {config['num_layers']} layers × {config['hidden_size']}, trained at length {length} on "
        f"{record.run['corpus']['name']}, {steps} steps of {batch} windows, {len(seeds)} seed{'s' * (len(seeds) > 1)}, "
        f"{device}{cpu_note(device)}"
    )


def _smooth(rows: pd.DataFrame) -> pd.DataFrame:
    """Average each seed's losses over `_SMOOTH` of all entries, centred, over fewer at both ends."""
    curves = pd.DataFrame(dict(zip(rows.seed, rows.losses, strict=True)), index=rows.steps.iloc[0])
    return curves.rolling(2 * round(len(curves) * _SMOOTH / 2) + 1, center=True, min_periods=1).mean()


def markdown_tables(record: BertRecord) -> str:
    """Make the tables as Markdown, below a line about the run and its machine."""
    from jinja2 import Environment

    template = Path(__file__).with_name("tables.md.jinja").read_text(encoding="utf-8")
    made = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(template)
    functions = {"by_scheme": _by_scheme, "spread": spread, "smooth": _smooth, "short": _short}
    names = {"title": _title(record), "styles": _STYLES, "hugging_face": HUGGING_FACE}
    text: str = made.render(record=record, run=record.run, **functions, **names)
    return text


def _short(value: float) -> str:
    """Format to three digits: 1.23, 12.3k, 4.56M."""
    unit, size = ("M", 1e6) if abs(value) >= 999_500 else ("k", 1e3) if abs(value) >= 999.5 else ("", 1)
    return f"{value / size:#.3g}".rstrip(".") + unit if unit else f"{value:.3g}"


def _by_scheme(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str, Any], pd.DataFrame]]:
    """Group rows by scheme, in the order of `_STYLES`, whose entry comes first."""
    return ((style, rows[rows.scheme == scheme]) for scheme, style in _STYLES.items() if (rows.scheme == scheme).any())


def spread(values: pd.Series[float], digits: int, sign: str = "-") -> str:
    """Format the mean, and the standard deviation where there are several values."""
    mean = f"{values.mean():{sign}.{digits}f}"
    return f"{mean} ± {values.astype(float).std():.{digits}f}" if len(values) > 1 else mean
