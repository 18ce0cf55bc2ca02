"""Length extrapolation: a small transformer learns with RoPE at one length, and reads longer texts by other schemes.

Nothing is trained for the other schemes. The loss is that of the last bytes of windows of held-out text, with the same
ends at all lengths: the same bytes are predicted at each, by each scheme.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.bench.core.options import choose_path
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.terminal import default_console, progress_bar
from ropewalk.experiments import byte_model
from ropewalk.experiments.byte_model import ModelSize, as_tokens, byte_losses
from ropewalk.frequencies import inverse_frequencies
from ropewalk.schemes import PositionScheme, ReRope, Rope, SelfExtend

BENCHMARK = "length-extrapolation"
BASE = 10000.0
SCORED_BYTES = 256  # at the end of each window, or half of the training length where that is less
LEAST_TRAIN_LENGTH = 4
HELD_OUT_FILES = 10  # one file in so many is held out; of a text in one file, its last tenth
ZOOM = 0.25  # nats per byte that the figure shows large
SMOKE_BYTES = 10_000_000  # of a training, below which schemes cannot be compared
SIZES = {  # the first takes about two minutes on a core
    "cpu": ModelSize(2, 128, 2, context=128, batch=16, steps=1000, learning_rate=3e-3, multiples=(1, 2, 4)),
    "cuda": ModelSize(6, 384, 6, 512, 64, 3000, 1e-3, (1, 2, 4, 8, 16), windows=256, tokens_at_once=1 << 17),
}
# A row of a record: scheme, its settings, length; loss, in nats per byte, of the last bytes of the windows, and its
# standard_error over windows, None where there is but one; loss_all, of all bytes of the windows.
Row = dict[str, Any]


def run_length_extrapolation(
    text: Path | None = None,
    steps: int | None = None,
    train_length: int | None = None,
    lengths: Sequence[int] = (),
    device: str | None = None,
    output: Path | None = None,
    figure: Path | None = None,
    seed: int = 0,
) -> None:
    """Train a byte-level transformer with RoPE at one length, evaluate it at others by each scheme, write a record."""
    import matplotlib.figure  # noqa: F401, before the training if it is missing

    console = default_console()
    target, size = byte_model.choose_size(SIZES, device, steps=steps, context=train_length)
    if size.context < LEAST_TRAIN_LENGTH:
        raise ValueError(f"train_length is {size.context}, but must be at least {LEAST_TRAIN_LENGTH}")
    lengths = sorted({*lengths} or {size.context * multiple for multiple in size.multiples})
    scored = min(SCORED_BYTES, size.context // 2)
    if lengths[0] < scored:
        raise ValueError(f"lengths has {lengths[0]}, but the last {scored} bytes are scored: that is the least length")
    name, training, held_out = read_corpus(text)
    if len(training) <= size.context:
        found = f"the text has {len(training)} bytes to learn from"
        raise ValueError(f"{found}, but must have more than train_length, {size.context}")
    windows = cut_windows(held_out, lengths[-1] + 1, size.windows)
    torch.manual_seed(seed)
    model = byte_model.ByteTransformer(size).to(target)
    run = describe_run(BENCHMARK, target, {}) | {"seed": seed, "text": name}
    run |= {"training_bytes": len(training), "held_out_bytes": sum(map(len, held_out))}
    run |= {"model": {key: getattr(size, key) for key in ("n_layers", "d_model", "n_heads")}}
    run |= {"position": f"Rope({BASE})", "train_length": size.context, "batch": size.batch, "steps": size.steps}
    run |= {"learning_rate": size.learning_rate, "dtype": "bfloat16 autocast" if target.type == "cuda" else "float32"}
    run |= {"lengths": lengths, "scored_bytes": scored, "windows": len(windows), "parameters": model.n_parameters}
    path = choose_path(output, run)
    said = f"Training {model.title} at length {size.context} on {run['device']}, on {name} ({len(training):,} bytes)"
    console.print(said, markup=False, highlight=False)
    start = time.perf_counter()
    last = byte_model.train(model, training, size, console)[-max(1, size.steps // 20) :]
    run["training_loss"] = sum(last) / len(last)  # of the last 5 % of the steps
    run["training_seconds"] = round(time.perf_counter() - start, 1)
    rows = []
    with RecordWriter(path, run) as writer, progress_bar(console) as progress:
        task = progress.add_task("starting", total=len(lengths))
        for length in lengths:
            progress.update(task, description=f"length {length}")
            for row in evaluate_at(model, size, windows, length, lengths[-1], scored):
                writer.append(row)
                rows.append(row)
            progress.advance(task)
    figure = figure or path.with_suffix(".png")
    draw_length_record(run, rows, figure)
    title = f"Loss of the last {scored} bytes, nats/byte, by length"
    caption = f"learnt at {size.context}; {len(windows)} held-out windows"
    texts = [(label, *(f"{row['loss']:.3f}" for row in line)) for label, line in _lines(rows).items()]
    console.print(byte_model.make_table(title, caption, ["scheme"], map(str, lengths), texts))
    console.print(f"record: {path}\nfigure: {figure}", highlight=False)


def read_corpus(text: Path | None) -> tuple[str, Tensor, list[Tensor]]:
    """Read a name, bytes to learn from and held-out documents of `text`, or of PyTorch's own Python sources.

    Those are everywhere, more than can be learnt by heart, and have names that come back far from their definition.
    """
    if text is not None:
        tokens = as_tokens(text.read_bytes())
        cut = len(tokens) - len(tokens) // HELD_OUT_FILES
        return text.name, tokens[:cut], [tokens[cut:]]
    files = sorted(Path(torch.__file__).parent.rglob("*.py"), key=Path.as_posix)
    documents = [path.read_bytes() for path in files]
    held_out = [as_tokens(document) for document in documents[::HELD_OUT_FILES]]
    del documents[::HELD_OUT_FILES]
    return "PyTorch's Python sources", as_tokens(b"\n".join(documents)), held_out


def cut_windows(documents: Sequence[Tensor], n_bytes: int, most: int) -> Tensor:
    """Cut windows of so many bytes, each within one document, (windows, n_bytes); their ends are spread evenly."""
    # So far apart that no byte is scored twice.
    ends = [(document, end) for document in documents for end in range(n_bytes, len(document) + 1, SCORED_BYTES)]
    if not ends:
        raise ValueError(
            f"the longest text that is held out has {max(map(len, documents), default=0)} bytes, but must have at "
            f"least {n_bytes}, one more than the largest of the lengths"
        )
    count = min(most, len(ends))
    chosen = [ends[index * len(ends) // count] for index in range(count)]
    return torch.stack([document[end - n_bytes : end] for document, end in chosen])


def schemes_at(
    length: int, *, train_length: int, longest: int, head_dim: int
) -> dict[str, tuple[PositionScheme, dict[str, float]]]:
    """Make the schemes by which a model with RoPE reads a text of this length, and their settings, by name.

    The base of NTK goes with the length. The others are chosen for the `longest`: the window is half of the training
    length, leak and group are the least whole number by which no relative position is larger than in training,
    window + (longest − 1 − window)/leak ≤ train_length − 1.
    """
    window, rope = train_length // 2, Rope(BASE)
    squeeze = max(1, math.ceil((longest - 1 - window) / (train_length - 1 - window)))
    factor = max(1.0, length / train_length)
    inv_freq, _ = inverse_frequencies("ntk", head_dim, BASE, factor=factor)
    return {
        "RoPE": (rope, {"base": BASE}),
        "RoPE, NTK": (Rope(inv_freq=inv_freq), {"factor": factor}),
        "ReRoPE": (ReRope(window, rope=rope), {"window": window}),
        "ReRoPE, log n": (ReRope(window, log_n=train_length, rope=rope), {"window": window, "log_n": train_length}),
        "leaky ReRoPE": (ReRope(window, leak=squeeze, rope=rope), {"window": window, "leak": squeeze}),
        "SelfExtend": (SelfExtend(window, squeeze, rope=rope), {"window": window, "group": squeeze}),
    }


@torch.no_grad()
def evaluate_at(
    model: nn.Module, size: ModelSize, windows: Tensor, length: int, longest: int, scored: int
) -> list[Row]:
    """Compute the losses by each scheme of the windows' last `scored` bytes, where `length` bytes are read."""
    model.eval()
    parts = windows[:, -(length + 1) :].split(max(1, size.tokens_at_once // length))
    schemes = schemes_at(length, train_length=size.context, longest=longest, head_dim=size.d_model // size.n_heads)
    rows = []
    for name, (position, settings) in schemes.items():
        losses = torch.cat([byte_losses(model, part, position=position).cpu().double() for part in parts])
        last = losses[:, -scored:].mean(1)
        error = float(last.std() / len(last) ** 0.5) if len(last) > 1 else None
        row = {"scheme": name, "settings": settings, "length": length, "loss": float(last.mean())}
        rows.append({**row, "standard_error": error, "loss_all": float(losses.mean())})
    return rows


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows of each scheme, by its name and those of its settings that are the same at all lengths."""
    lines = {}
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        line = [row for row in rows if row["scheme"] == scheme]
        settings = line[0]["settings"].items()
        same = [f"{key} {value:g}" for key, value in settings if all(row["settings"][key] == value for row in line)]
        lines[f"{scheme} ({', '.join(same)})" if same else scheme] = line
    return lines


def draw_length_record(run: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Draw the loss against the length, a line for each scheme, as PNG; beside it once more, with the low losses large.

    A smoke run learnt from too few bytes for its schemes to be compared: it has the first panel alone.
    """
    from matplotlib.figure import Figure

    is_smoke = run["steps"] * run["batch"] * run["train_length"] < SMOKE_BYTES
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 1 if is_smoke else 2, squeeze=False)[0]
    for axes in panels:
        for number, (label, line) in enumerate(_lines(rows).items()):
            style = "o-" if number % 2 == 0 else "s--"  # lines may lie on each other
            axes.plot([row["length"] for row in line], [row["loss"] for row in line], style, markersize=4, label=label)
        axes.axvline(run["train_length"], color="#555555", linestyle=":", zorder=0, label="training length")
        axes.set_xscale("log", base=2)
        axes.set_xticks(run["lengths"], run["lengths"])
        axes.minorticks_off()
        axes.set_xlabel("length, bytes")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"loss of the last {run['scored_bytes']} bytes, nats per byte")
    if not is_smoke:
        least = min(row["loss"] for row in rows)
        panels[1].set_ylim(least - ZOOM / 10, least + ZOOM)
        panels[1].set_title(f"the same, up to {ZOOM} above the least", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    title = f"{'Smoke: no comparison. ' if is_smoke else ''}Trained with RoPE at length {run['train_length']} on "
    title += f"{run['text']}, {run['parameters'] / 1e6:.1f} million parameters, {run['device']}"
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", format="png")
