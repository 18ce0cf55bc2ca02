"""Length extrapolation: a small transformer learns with RoPE at one length, and reads longer texts by other schemes.

The model is trained once. Nothing is trained for the other schemes: they are exchanged in the model as it is. At each
length the loss is that of the last bytes of windows of held-out text. The windows of all lengths have the same ends, so
the same bytes are predicted at each length and by each scheme, and what differs is how much comes before them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ropewalk.bench.core.options import choose_device, choose_path
from ropewalk.bench.core.records import RecordWriter, describe_run, read_lines
from ropewalk.bench.core.terminal import default_console, progress_bar
from ropewalk.experiments.byte_model import ByteTransformer, ModelSize, byte_losses, cosine_decay, train
from ropewalk.frequencies import inverse_frequencies
from ropewalk.schemes import PositionScheme, ReRope, Rope, SelfExtend

BENCHMARK = "length-extrapolation"
BASE = 10000.0
SCORED_BYTES = 256  # at the end of each window, or half of the training length where that is less
LEAST_TRAIN_LENGTH = 4
HELD_OUT_FILES = 10  # one file in so many is held out; of a text in one file, its last tenth
ZOOM = 0.25  # nats per byte that the figure shows large
SMOKE_BYTES = 10_000_000  # of a training, below which schemes cannot be compared


@dataclass(frozen=True)
class Size(ModelSize):
    """The size of the model, its training and its evaluation."""

    multiples: tuple[int, ...]  # of the training length: at which lengths, unless the caller says
    windows: int  # of held-out text, at most
    tokens_at_once: int  # in a forward of the evaluation


# Training takes about two minutes on a CPU core.
SIZES = {
    "cpu": Size(
        2,
        128,
        2,
        context=128,
        batch=16,
        steps=1000,
        learning_rate=3e-3,
        multiples=(1, 2, 4),
        windows=64,
        tokens_at_once=1 << 12,
    ),
    "cuda": Size(
        6,
        384,
        6,
        context=512,
        batch=64,
        steps=3000,
        learning_rate=1e-3,
        multiples=(1, 2, 4, 8, 16),
        windows=256,
        tokens_at_once=1 << 17,
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and the documents that are held out; all uint8."""

    name: str
    training: Tensor
    held_out: list[Tensor]


@dataclass(frozen=True)
class LengthRow:
    """The loss by one scheme at one length, in nats per byte."""

    scheme: str
    settings: dict[str, float]
    length: int
    loss: float  # of the last bytes of the windows
    standard_error: float | None  # of `loss`, over windows; None where there is but one
    loss_all: float  # of all bytes of the windows, those that have little before them too


@dataclass(frozen=True)
class LengthRecord:
    """A record file: the line about the run, and the rows."""

    run: dict[str, Any]
    rows: list[LengthRow]


def run_length_extrapolation(
    *,
    text: Path | None = None,
    steps: int | None = None,
    train_length: int | None = None,
    lengths: Sequence[int] = (),
    device: str | None = None,
    output: Path | None = None,
    figure: Path | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Path:
    """Train a byte-level transformer with RoPE at one length, evaluate it at others by each scheme, and write a record.

    Args:
        text: a file to learn from, whose last tenth is held out; None for PyTorch's own Python sources.
        steps: how many training steps; None for as many as suit the device.
        train_length: the length of the windows it learns from; None for 512 on a GPU and 128 on a CPU.
        lengths: those at which it is evaluated; none for the training length times 1, 2, 4, 8 and 16 on a GPU, and
            times 1, 2 and 4 on a CPU.
        device: "cpu" or "cuda"; None for the GPU, if there is one.
        output: the record's file, which must not exist, or None for one under ./results/.
        figure: where the losses are drawn, as PNG; None for a file beside the record.
        seed: of the weights and the batches.
        console: where to print.

    Returns:
        The record's path.

    Raises:
        ValueError: a text too short, fewer than one step, a training length or a length too small, a record that exists
            already, or a device that is neither a CPU nor a GPU that PyTorch finds.
        ModuleNotFoundError: with a `figure`, where matplotlib is missing.

    Example:
        >>> from ropewalk.experiments.length_extrapolation import run_length_extrapolation
        >>> run_length_extrapolation(device="cpu", steps=100, lengths=(128, 512))  # doctest: +SKIP
    """
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if figure is not None and not can_draw:
        raise ModuleNotFoundError("the figure is drawn with matplotlib: pip install 'ropewalk[bench]'")
    console = console or default_console()
    target = choose_device(device)
    size = SIZES[target.type]
    size = dataclasses.replace(
        size,
        context=size.context if train_length is None else train_length,
        steps=size.steps if steps is None else steps,
    )
    if size.steps < 1:
        raise ValueError(f"steps is {size.steps}, but must be at least 1")
    if size.context < LEAST_TRAIN_LENGTH:
        raise ValueError(f"train_length is {size.context}, but must be at least {LEAST_TRAIN_LENGTH}")
    lengths = sorted({*lengths} or {size.context * multiple for multiple in size.multiples})
    scored = min(SCORED_BYTES, size.context // 2)
    if lengths[0] < scored:
        raise ValueError(f"lengths has {lengths[0]}, but the last {scored} bytes are scored: that is the least length")
    corpus = read_corpus(text)
    if corpus.training.numel() <= size.context:
        raise ValueError(
            f"the text has {corpus.training.numel()} bytes to learn from, but must have more than the training "
            f"length, {size.context}"
        )
    windows = cut_windows(corpus.held_out, lengths[-1] + 1, size.windows)
    run = {
        **describe_run(BENCHMARK, target, {}),
        "seed": seed,
        "text": corpus.name,
        "training_bytes": corpus.training.numel(),
        "held_out_bytes": sum(document.numel() for document in corpus.held_out),
        "model": {key: getattr(size, key) for key in ("n_layers", "d_model", "n_heads")},
        "position": f"Rope({BASE})",
        "train_length": size.context,
        **{key: getattr(size, key) for key in ("batch", "steps", "learning_rate")},
        "dtype": "bfloat16 autocast" if target.type == "cuda" else "float32",
        "lengths": lengths,
        "scored_bytes": scored,
        "windows": len(windows),
    }
    path = choose_path(output, run)

    torch.manual_seed(seed)
    model = ByteTransformer(size).to(target)
    run["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Training {run['parameters']:,} parameters ({size.n_layers} layers, {size.n_heads} heads of "
        f"{size.d_model // size.n_heads}) at length {size.context} on {run['device']}, on {corpus.name} "
        f"({corpus.training.numel():,} bytes)",
        markup=False,
        highlight=False,
    )
    start = time.perf_counter()
    losses = train(model, corpus.training, size, size.steps, console, decay=cosine_decay)
    last = losses[-max(1, size.steps // 20) :]
    run["training_loss"] = sum(last) / len(last)  # of the last 5 % of the steps
    run["training_seconds"] = round(time.perf_counter() - start, 1)
    with RecordWriter(path, run) as writer, progress_bar(console) as progress:
        task = progress.add_task("starting", total=len(lengths))
        for length in lengths:
            progress.update(task, description=f"length {length}")
            for row in evaluate_at(model, size, windows, length, lengths[-1], scored):
                writer.append(row)
            progress.advance(task)
    record = read_length_record(path)
    console.print(length_table(record))
    console.print(f"record: {path}", highlight=False)
    if can_draw:
        figure = figure or path.with_suffix(".png")
        draw_length_record(record, figure)
        console.print(f"figure: {figure}", highlight=False)
    else:
        console.print("no figure: matplotlib is not installed (pip install 'ropewalk\\[bench]')")
    return path


def read_corpus(text: Path | None) -> Corpus:
    """Read the bytes of `text`, its last tenth held out; or PyTorch's own Python sources, one file in ten held out.

    Those are on every machine that this runs on, and more than 40 MB, so that the default training reads them twice or
    so and cannot learn them by heart; the documentation that ships with Python has less than 1 MB. Source code also
    has what long contexts are for: names that come back far from where they were defined. Whole files are held out, so
    that what is held out does not go on from what was learnt.
    """
    if text is not None:
        tokens = _as_tokens(text.read_bytes())
        cut = tokens.numel() - tokens.numel() // HELD_OUT_FILES
        return Corpus(text.name, tokens[:cut], [tokens[cut:]])
    root = Path(torch.__file__).parent
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    documents = [path.read_bytes() for path in files]
    held_out = [_as_tokens(document) for document in documents[::HELD_OUT_FILES] if document]
    del documents[::HELD_OUT_FILES]
    return Corpus("PyTorch's Python sources", _as_tokens(b"\n".join(documents)), held_out)


def _as_tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def cut_windows(documents: Sequence[Tensor], n_bytes: int, most: int) -> Tensor:
    """Cut windows of so many bytes, each within one document, (windows, n_bytes); their ends are spread evenly."""
    ends = [
        (document, end) for document in documents for end in range(n_bytes, document.numel() + 1, SCORED_BYTES)
    ]  # so far apart that no byte is scored twice
    if not ends:
        longest = max((document.numel() for document in documents), default=0)
        raise ValueError(
            f"the longest text that is held out has {longest} bytes, but must have at least {n_bytes}, one more than "
            "the largest of the lengths"
        )
    count = min(most, len(ends))
    chosen = [ends[index * len(ends) // count] for index in range(count)]
    return torch.stack([document[end - n_bytes : end] for document, end in chosen])


def schemes_at(
    length: int, *, train_length: int, longest: int, head_dim: int
) -> dict[str, tuple[PositionScheme, dict[str, float]]]:
    """Make the schemes by which a model with RoPE reads a text of this length, and their settings, by name.

    The base of NTK goes with the length, and is RoPE's up to the training length. The others are the same at all
    lengths, chosen for the `longest`: the window is half of the training length, which leaves the other half to what is
    farther away, and leak and group are the least whole number by which no relative position is larger than in
    training, window + (longest − 1 − window)/leak ≤ train_length − 1. Queries grow (log_n) in one of them alone.
    """
    window = train_length // 2
    squeeze = max(1, math.ceil((longest - 1 - window) / (train_length - 1 - window)))
    factor = max(1.0, length / train_length)
    inv_freq, _ = inverse_frequencies("ntk", head_dim, BASE, factor=factor)
    return {
        "RoPE": (Rope(BASE), {"base": BASE}),
        "RoPE, NTK": (Rope(inv_freq=inv_freq), {"factor": factor}),
        "ReRoPE": (ReRope(window, rope=Rope(BASE)), {"window": window}),
        "ReRoPE, log n": (
            ReRope(window, log_n=train_length, rope=Rope(BASE)),
            {"window": window, "log_n": train_length},
        ),
        "leaky ReRoPE": (ReRope(window, leak=squeeze, rope=Rope(BASE)), {"window": window, "leak": squeeze}),
        "SelfExtend": (SelfExtend(window, squeeze, rope=Rope(BASE)), {"window": window, "group": squeeze}),
    }


def evaluate_at(
    model: nn.Module, size: Size, windows: Tensor, length: int, longest: int, scored: int
) -> list[LengthRow]:
    """Compute the losses by each scheme at one length."""
    schemes = schemes_at(length, train_length=size.context, longest=longest, head_dim=size.d_model // size.n_heads)
    rows = []
    for name, (position, settings) in schemes.items():
        last, loss_all = evaluate(model, windows, length, position, scored, size.tokens_at_once)
        error = float(last.std() / len(last) ** 0.5) if len(last) > 1 else None
        rows.append(LengthRow(name, settings, length, float(last.mean()), error, loss_all))
    return rows


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Tensor, length: int, position: PositionScheme, scored: int, tokens_at_once: int
) -> tuple[Tensor, float]:
    """Compute the loss of the last `scored` bytes of each window, of which `length` at its end are read, and of all."""
    model.eval()
    parts = windows[:, -(length + 1) :].split(max(1, tokens_at_once // length))
    losses = [byte_losses(model, part, position=position).cpu().double() for part in parts]
    last = torch.cat([part[:, -scored:].mean(1) for part in losses])
    return last, float(torch.cat([part.mean(1) for part in losses]).mean())


def read_length_record(path: Path) -> LengthRecord:
    """Read a record of a run."""
    run, lines = read_lines(path, BENCHMARK)
    return LengthRecord(run, [LengthRow(**line) for line in lines])


def _by_scheme(record: LengthRecord) -> dict[str, list[LengthRow]]:
    """Group the rows of each scheme, by length."""
    schemes: dict[str, list[LengthRow]] = {}
    for row in record.rows:
        schemes.setdefault(row.scheme, []).append(row)
    return schemes


def _label(rows: Sequence[LengthRow]) -> str:
    """Name a scheme, with those of its settings that are the same at all lengths."""
    settings = rows[0].settings.items()
    kept = [f"{key} {value:g}" for key, value in settings if all(row.settings[key] == value for row in rows)]
    return f"{rows[0].scheme} ({', '.join(kept)})" if kept else rows[0].scheme


def length_table(record: LengthRecord) -> Table:
    """Make the table of losses, for the console."""
    run = record.run
    table = Table(
        title=f"Loss of the last {run['scored_bytes']} bytes, nats/byte, by length",
        caption=f"learnt at {run['train_length']}; {run['windows']} held-out windows",
    )
    table.add_column("scheme", no_wrap=True)
    for length in run["lengths"]:
        table.add_column(str(length), justify="right")
    for rows in _by_scheme(record).values():
        table.add_row(_label(rows), *(f"{row.loss:.3f}" for row in rows))
    return table


def is_smoke(run: Mapping[str, Any]) -> bool:
    """Say whether a run learnt from so few bytes that its schemes cannot be compared."""
    return int(run["steps"] * run["batch"] * run["train_length"]) < SMOKE_BYTES


def figure_title(run: Mapping[str, Any]) -> str:
    """Name the run, and a smoke run as one."""
    return (
        f"{'Smoke: no comparison. ' if is_smoke(run) else ''}Trained with RoPE at length {run['train_length']} on "
        f"{run['text']}, {run['parameters'] / 1e6:.1f} million parameters, {run['device']}"
    )


def draw_length_record(record: LengthRecord, path: Path) -> None:
    """Draw the loss against the length, a line for each scheme, as PNG; beside it once more, with the low losses large.

    RoPE's loss past the training length is so high that the others would not be told apart. A smoke run has the first
    panel alone: its small differences say nothing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = record.run
    zoomed = not is_smoke(run)
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + zoomed, squeeze=False)[0]
    for axes in panels:
        for number, rows in enumerate(_by_scheme(record).values()):
            style = "o-" if number % 2 == 0 else "s--"  # lines may lie on each other
            axes.plot([row.length for row in rows], [row.loss for row in rows], style, markersize=4, label=_label(rows))
        axes.axvline(run["train_length"], color="#555555", linestyle=":", zorder=0, label="training length")
        axes.set_xscale("log", base=2)
        axes.set_xticks(run["lengths"], [str(length) for length in run["lengths"]])
        axes.minorticks_off()
        axes.set_xlabel("length, bytes")
        axes.spines[["top", "right"]].set_visible(False)
    least = min(row.loss for row in record.rows)
    panels[0].set_ylabel(f"loss of the last {run['scored_bytes']} bytes, nats per byte")
    if zoomed:
        panels[1].set_ylim(least - ZOOM / 10, least + ZOOM)
        panels[1].set_title(f"the same, up to {ZOOM} above the least", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(figure_title(run), fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", format="png")
