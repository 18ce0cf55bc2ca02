"""The record of a comparison, its figures, and tables as Markdown."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from ropewalk.bench.core.figure import mark_smoke, page_figure
from ropewalk.bench.core.records import cpu_note, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BENCHMARK, HUGGING_FACE = "bert-positions", "Hugging Face BERT"  # as it is
# Name, colour, marker and line of a scheme; colours are Okabe and Ito's, which the colour-blind can distinguish.
_STYLES: dict[str, tuple[str, str, str, Any]] = {
    "none": ("None (the floor)", "#777777", "x", (0, (1, 2))),
    "standard": ("Standard (learned)", "#000000", "o", (0, (1, 1))),
    "absolute": ("Absolute (sinusoids)", "#E69F00", "s", (0, (5, 1))),
    "rope": ("RoPE", "#0072B2", "^", "solid"),
    "exposb": ("ExpoSB", "#D55E00", "D", (0, (3, 1, 1, 1))),
    "alibi": ("ALiBi", "#009E73", "v", (0, (4, 2))),
    "t5": ("T5's bias", "#56B4E9", "<", (0, (6, 1, 1, 1))),
    "rerope": ("ReRoPE", "#CC79A7", "P", "solid"),
}
# Those of schemes from outside, in their order.
_OWN_STYLES: tuple[tuple[str, str, Any], ...] = (
    ("#882255", "*", "solid"),
    ("#44AA99", "X", (0, (5, 1))),
    ("#999933", "p", (0, (1, 1))),
    ("#332288", "h", (0, (3, 1, 1, 1))),
)
_GREYS = {"sdpa": "#555555", "eager": "#999999", "ropewalk": "#7FB2D9"}
_LOOK: dict[str, Any] = {"lines.markersize": 4, "lines.linewidth": 1.3, "errorbar.capsize": 2}
_SMOKE_TOKENS = 1_000_000  # of a training, below which models learn too little to be compared
_SMOOTH = 0.04  # of the training: a point of the curve is the mean over as much


class BertRecord(NamedTuple):
    """A record file: the line about the run, and the rows of each kind."""

    run: dict[str, Any]
    training: pd.DataFrame
    evaluation: pd.DataFrame
    speed: pd.DataFrame
    exposb: pd.DataFrame
    recall: pd.DataFrame
    probe: pd.DataFrame


def read_bert_record(path: Path) -> BertRecord:
    run, lines = read_lines(path, BENCHMARK)
    kinds = BertRecord._fields[1:]
    return BertRecord(run, *(pd.DataFrame([x for x in lines if x["kind"] == kind], dtype=object) for kind in kinds))


def draw_learning(record: BertRecord, path: Path) -> None:
    """Draw what was learnt as PNG: losses above on one axis from 0, shares in percent below on one from 0 to 100.

    Above are the loss against steps, and on held-out text against length; below what was guessed right there, and what
    was recalled by distance and told by the probe, where they were measured. Bands and bars are the spread of seeds.
    """
    shares = ["accuracy", *(kind for kind in ("recall", "probe") if len(getattr(record, kind)))]
    below = [shares[1:] * (4 - len(shares))] if len(shares) > 1 else []
    lengths = sorted(record.evaluation.length.unique())
    trained, unigram = record.run["config"]["train_length"], record.run["corpus"].get("unigram_loss")
    with _figure(record, 6.0 + 2.3 * len(below), path) as figure:
        panels: dict[str, Axes] = figure.subplot_mosaic([["training", "training"], ["loss", "accuracy"], *below])
        for style, rows in _by_scheme(record.training):
            curves, (_, colour, marker, line) = _smooth(rows), style
            look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line}
            panels["training"].plot(curves.mean(axis=1), markevery=max(1, len(curves) // 8), **look)
            steps, least, greatest = curves.index, curves.min(axis=1), curves.max(axis=1)
            panels["training"].fill_between(steps, least, greatest, color=colour, alpha=0.18, linewidth=0)
        panels["training"].set(title="training (band: all seeds)", xlabel="steps")
        for name, column, factor in (("loss", "loss", 1), ("accuracy", "accuracy", 100)):
            for style, rows in _by_scheme(record.evaluation):
                _plot_spread(panels[name], style, rows, "length", column, factor)
            _mark_lengths(panels[name], lengths, "tokens read at once (dotted: trained)")
            panels[name].axvline(trained, color="#888888", linestyle=":", linewidth=1, zorder=1)
            panels[name].set_title("held-out text" if name == "loss" else "held-out text: masked tokens")
        if "recall" in panels:
            read = record.recall[record.recall.length == trained]
            for style, rows in _by_scheme(read):
                _plot_spread(panels["recall"], style, rows, "distance", "accuracy", 100)
            control = read.control_accuracy.astype(float).max() * 100
            panels["recall"].axhline(control, color="#888888", linewidth=1)
            _mark_lengths(panels["recall"], sorted(read.distance.unique()), "distance of the fact, tokens")
            panels["recall"].set_title(f"fact recalled in {trained} tokens\n(grey: without the fact, at most)")
        if "probe" in panels:
            _draw_probe(record.probe, panels["probe"])
        top = max(unigram or 0.0, record.evaluation.groupby(["scheme", "length"]).loss.mean().max())
        for name in ("training", "loss"):  # from 0, and as far for both
            panels[name].set(ylim=(0, 1.05 * top), ylabel="loss, nats per masked token")
            if unigram:
                panels[name].axhline(unigram, color="#888888", linewidth=1, linestyle="--", zorder=1)
        if unigram:
            look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            panels["training"].annotate("guess by frequency of tokens", (1, unigram), (-4, 3), **look)
        for name in shares:
            panels[name].set(ylim=(0, 100), ylabel="right, %")
        handles, labels = panels["loss"].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _plot_spread(axes: Axes, style: tuple[str, str, str, Any], rows: pd.DataFrame, x: str, y: str, factor: int) -> None:
    """Plot the mean over seeds, with bars of a standard deviation up and down."""
    name, colour, marker, line = style
    over_seeds = (rows[y].astype(float) * factor).groupby(rows[x].astype(int))
    mean, deviation = over_seeds.mean(), over_seeds.std().fillna(0)
    axes.errorbar(mean.index, mean, deviation, color=colour, marker=marker, linestyle=line, label=name)


def _mark_lengths(axes: Axes, lengths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.set_xlabel(label)


def _draw_probe(rows: pd.DataFrame, axes: Axes) -> None:
    """Draw the accuracies of the probe, a group of points for each tag and length, and the most frequent class's."""
    groups = list(rows.groupby(["tag", "length"], sort=False).groups)
    for number, group in enumerate(groups):
        group_rows = rows[(rows.tag == group[0]) & (rows.length == group[1])]
        by_scheme = list(_by_scheme(group_rows))
        for index, ((_, colour, marker, _), scheme_rows) in enumerate(by_scheme):
            at, values = number + 0.8 * (index + 0.5) / len(by_scheme) - 0.4, scheme_rows.accuracy.astype(float) * 100
            deviation = values.std() if len(values) > 1 else 0.0
            axes.errorbar(at, values.mean(), deviation, color=colour, marker=marker, linestyle="none")
        majority = float(group_rows.majority.iloc[0]) * 100
        axes.hlines(majority, number - 0.4, number + 0.4, color="#888888", linewidth=1)
    axes.set_xticks(range(len(groups)), [f"{tag}\nat {length}" for tag, length in groups])
    axes.set(title="linear probe\n(grey: the most frequent class)", xlabel="tag, tokens read at once")


def draw_speed(record: BertRecord, path: Path) -> None:
    """Draw tokens/s and, where it was measured, the peak of memory of a training step, as PNG."""
    titles = {"tokens_per_second": "tokens/s of a training step"}
    if record.speed.peak_bytes.notna().any():
        titles["peak_bytes"] = "peak in GiB, beyond weights,\noptimiser and batch"
    with _figure(record, 5.5, path) as figure:
        panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        lengths = sorted(record.speed.length.unique())
        height, styles = 0.8 / len(lengths), styles_of(record.speed.model)
        for axes, (column, title) in zip(panels, titles.items(), strict=True):
            models = dict[str, int]()  # a group of bars for each, a bar for each length
            for row in record.speed.to_dict("records"):
                number, length, greys = row[column], lengths.index(row["length"]), _GREYS.get(row["attention"])
                name, colour, *_ = styles.get(row["model"], (f"Hugging Face, {row['attention']}", greys))
                y = models.setdefault(name, len(models)) + (length - (len(lengths) - 1) / 2) * height
                if number is not None:
                    number /= 1 << 30 if column == "peak_bytes" else 1
                    look: dict[str, Any] = {"alpha": 0.55, "hatch": "//"} if length else {}
                    axes.barh(y, number, height=height * 0.94, edgecolor="white", color=colour, **look)
                text = "out of memory" if number is None else f"{_short(number)} at {row['length']}"
                axes.annotate(text, (number or 0, y), (3, 0), textcoords="offset points", va="center")
            axes.set_yticks(range(len(models)), models)
            axes.set(ylim=(len(models) - 0.4, -0.6), title=title)
            axes.margins(x=0.5)
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda number, _: _short(number))


@contextlib.contextmanager
def _figure(record: BertRecord, height: float, path: Path) -> Iterator[Figure]:
    from matplotlib import rc_context

    with rc_context(_LOOK), page_figure(path, height) as figure:
        figure.suptitle(textwrap.fill(_title(record), 80))
        if _is_smoke(record):
            mark_smoke(figure)
        yield figure


def _is_smoke(record: BertRecord) -> bool:
    config = record.run["config"]
    return bool(config["steps"] * config["batch_size"] * config["train_length"] < _SMOKE_TOKENS)


def _title(record: BertRecord) -> str:
    config, device = record.run["config"], record.run["device"]
    steps, batch, length, seeds = (config[x] for x in ("steps", "batch_size", "train_length", "seeds"))
    smoke = "Smoke: no comparison. " if _is_smoke(record) else ""
    return (
        f"{smoke}BERT of {config['num_layers']} layers × {config['hidden_size']}, trained at length {length} on "
        f"{record.run['corpus']['name']}, {steps} steps of {batch} windows, {len(seeds)} seed{'s' * (len(seeds) > 1)}, "
        f"{device}{cpu_note(device)}"
    )


def _smooth(rows: pd.DataFrame) -> pd.DataFrame:
    """Average each seed's losses over `_SMOOTH` of all entries, centred, over fewer at both ends."""
    curves = pd.DataFrame(dict(zip(rows.seed, rows.losses, strict=True)), index=rows.steps.iloc[0])
    return curves.rolling(2 * round(len(curves) * _SMOOTH / 2) + 1, center=True, min_periods=1).mean()


def fall_at_end(rows: pd.DataFrame) -> pd.Series[float]:
    """Return by how many percent each seed's smoothed loss falls from four fifths of the steps to the end."""
    curves = _smooth(rows)
    before = curves[curves.index <= 0.8 * curves.index[-1]]
    start = before.iloc[-1] if len(before) else curves.iloc[0]
    return (start - curves.iloc[-1]) / start * 100


def markdown_tables(record: BertRecord) -> str:
    """Make the tables as Markdown, below a line about the run and its machine."""
    from jinja2 import Environment

    template = Path(__file__).with_name("tables.md.jinja").read_text(encoding="utf-8")
    page = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(template)
    functions = {"by_scheme": _by_scheme, "spread": spread, "smooth": _smooth, "short": _short, "fall": fall_at_end}
    names = {
        "title": _title(record),
        "styles": styles_of(record.run["config"]["schemes"]),
        "hugging_face": HUGGING_FACE,
    }
    text: str = page.render(record=record, run=record.run, **functions, **names)
    return text


def _short(value: float) -> str:
    """Format to three digits: 1.23, 12.3k, 4.56M."""
    unit, size = ("M", 1e6) if abs(value) >= 999_500 else ("k", 1e3) if abs(value) >= 999.5 else ("", 1)
    return f"{value / size:#.3g}".rstrip(".") + unit if unit else f"{value:.3g}"


def _by_scheme(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str, Any], pd.DataFrame]]:
    """Group rows by scheme, in the order of `_STYLES`, whose entry comes first, and after them those from outside."""
    styles = styles_of(rows.scheme)
    return ((styles[scheme], rows[rows.scheme == scheme]) for scheme in styles if (rows.scheme == scheme).any())


def styles_of(schemes: Iterable[str]) -> dict[str, tuple[str, str, str, Any]]:
    """Return `_STYLES`, and one of each scheme “module:Name” of these, by the order of the alphabet.

    Its label is its name, or “module:Name” where another label is alike.
    """
    own = sorted({scheme for scheme in schemes if ":" in scheme})
    short = {scheme: scheme.partition(":")[2] for scheme in own}
    labels = [*_STYLES, *(label for label, *_ in _STYLES.values()), *short.values()]
    uses = Counter(label.casefold() for label in labels)
    names = (scheme if uses[short[scheme].casefold()] > 1 else short[scheme] for scheme in own)
    return _STYLES | {scheme: (name, *look) for scheme, name, look in zip(own, names, itertools.cycle(_OWN_STYLES))}


def spread(values: pd.Series[float], digits: int, sign: str = "-") -> str:
    """Format the mean, and the standard deviation where there are several values."""
    mean = f"{values.mean():{sign}.{digits}f}"
    return f"{mean} ± {values.astype(float).std():.{digits}f}" if len(values) > 1 else mean
