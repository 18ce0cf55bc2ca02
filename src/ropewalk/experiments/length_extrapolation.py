"""Length extrapolation: a small transformer learns with RoPE at one length, and reads longer texts by other schemes.

Nothing is trained for the other schemes. The loss is that of the last bytes of windows of held-out text, with the same
ends at all lengths: the same bytes are predicted at each, by each scheme. The passkey test states a key of five digits
far back in the text, and asks for it at the end.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.bench.core.figure import mark_smoke, page_figure
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
# The key of the passkey test, as a line that assigns it; it is asked for by the begin of the same line.
KEY_DIGITS = 5
KEY_NAME, KEY_END = b"\nPASSKEY = ", b"\n"
KEY_LINE = len(KEY_NAME) + KEY_DIGITS + len(KEY_END)
LEAST_KEY_LENGTH = 2 * len(KEY_NAME) + 2 * KEY_DIGITS + len(KEY_END) - 1  # of a text that has room for both lines
KEY_DEPTHS = (0.5, 1.0)  # where the key is stated: so much of the greatest distance back
SMOKE_BYTES = 10_000_000  # of a training, below which schemes cannot be compared
SIZES = {  # the first takes about two minutes on a core
    "cpu": ModelSize(2, 128, 2, context=128, batch=16, steps=1000, learning_rate=3e-3, multiples=(1, 2, 4)),
    "cuda": ModelSize(6, 384, 6, 512, 64, 3000, 1e-3, (1, 2, 4, 8, 16), windows=256, keys=100, tokens_at_once=1 << 17),
    # Ten times the bytes of the second, on a GPU: four times the batch, so that the host keeps up.
    "long": ModelSize(
        *(6, 384, 6, 512, 256, 7500, 1.5e-3, (1, 2, 4, 8, 16, 32)),
        windows=256,
        keys=100,
        tokens_at_once=1 << 17,
        compiled=True,
    ),
}
# A row of a record: scheme, its settings, length; loss, in nats per byte, of the last bytes of the windows, its
# standard_error over windows, None where there is but one, and perplexity; loss_all, of all bytes of the windows.
# A row of kind "passkey": the distance of the key in bytes, None in the control without it; right, the share of keys of
# which all digits are; digits_right, the share of digits; n_keys.
Row = dict[str, Any]


def run_length_extrapolation(
    preset: str | None = None,
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
    target, size = byte_model.choose_size(SIZES, device, preset, steps=steps, context=train_length)
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
    run |= {"preset": preset, "compiled": size.compiled, "unigram_loss": unigram_loss(training, windows[:, -scored:])}
    path = choose_path(output, run)
    said = f"Training {model.title} at length {size.context} on {run['device']}, on {name} ({len(training):,} bytes)"
    console.print(said, markup=False, highlight=False)
    start = time.perf_counter()
    last = byte_model.train(model, training, size, console)[-max(1, size.steps // 20) :]
    run["training_loss"] = sum(last) / len(last)  # of the last 5 % of the steps
    run["training_seconds"] = round(time.perf_counter() - start, 1)
    rows = []
    eager = torch.compiler.set_stance("force_eager")  # blocks are compiled for the training length alone
    with RecordWriter(path, run) as writer, progress_bar(console) as progress, eager:
        task = progress.add_task("starting", total=len(lengths))
        for length in lengths:
            progress.update(task, description=f"length {length}")
            rows_at = evaluate_at(model, size, windows, length, lengths[-1], scored)
            for row in rows_at + measure_passkey(model, size, windows, length, lengths[-1]):
                writer.append(row)
                rows.append(row)
            progress.advance(task)
    figure = figure or path.with_suffix(".png")
    draw_length_record(run, rows, figure)
    title = f"Loss of the last {scored} bytes, nats/byte (perplexity), by length"
    caption = f"learnt at {size.context}; {len(windows)} held-out windows"
    texts = [
        (label, *(f"{row['loss']:.3f} ({row['perplexity']:.2f})" for row in line))
        for label, line in _lines(losses_of(rows)).items()
    ]
    console.print(byte_model.make_table(title, caption, ["scheme"], map(str, lengths), texts))
    title = f"Keys of {KEY_DIGITS} digits right, %, by length, the key at the start of the text"
    caption = "without the key: " + ", ".join(f"{share:.0%}" for share in sorted({*_controls(rows)}))
    texts = [
        (label, *(f"{row['right'] * 100:.0f}" for row in line)) for label, line in _lines(_farthest_keys(rows)).items()
    ]
    with_keys = [str(length) for length in lengths if length >= LEAST_KEY_LENGTH]
    console.print(byte_model.make_table(title, caption, ["scheme"], with_keys, texts))
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


def unigram_loss(training: Tensor, scored: Tensor) -> float:
    """Return the loss, in nats, of guessing each scored byte by its frequency in the text to learn from."""
    counts = torch.bincount(training.int(), minlength=byte_model.N_BYTES).double() + 1
    return -(counts / counts.sum()).log()[scored.long()].mean().item()


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

    The factor of interpolation, NTK and YaRN goes with the length. The others are chosen for the `longest`: the window
    is half of the training length, leak and group are the least whole number by which no relative position is larger
    than in training, window + (longest − 1 − window)/leak ≤ train_length − 1.
    """
    window, rope = train_length // 2, Rope(BASE)
    squeeze = max(1, math.ceil((longest - 1 - window) / (train_length - 1 - window)))
    factor = max(1.0, length / train_length)
    scaled = {}
    for name, kind in (("interpolated", "linear"), ("NTK", "ntk"), ("YaRN", "yarn")):
        more = {"original_max_position_embeddings": train_length} if kind == "yarn" else {}
        inv_freq, attention_factor = inverse_frequencies(kind, head_dim, BASE, factor=factor, **more)
        scaled[f"RoPE, {name}"] = (Rope(inv_freq=inv_freq, attention_factor=attention_factor), {"factor": factor})
    return {
        "RoPE": (rope, {"base": BASE}),
        **scaled,
        "ReRoPE": (ReRope(window, rope=rope), {"window": window}),
        "ReRoPE, log n": (ReRope(window, log_n=train_length, rope=rope), {"window": window, "log_n": train_length}),
        "leaky ReRoPE": (ReRope(window, leak=squeeze, rope=rope), {"window": window, "leak": squeeze}),
        "SelfExtend": (SelfExtend(window, squeeze, rope=rope), {"window": window, "group": squeeze}),
        "SelfExtend, log n": (
            SelfExtend(window, squeeze, log_n=train_length, rope=rope),
            {"window": window, "group": squeeze, "log_n": train_length},
        ),
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
        loss = float(last.mean())
        row = {"scheme": name, "settings": settings, "length": length, "loss": loss, "standard_error": error}
        rows.append({**row, "perplexity": math.exp(loss), "loss_all": float(losses.mean())})
    return rows


def plant_keys(windows: Tensor, distance: int | None, seed: int) -> Tensor:
    """Put a random key into each window, and the question for it and its digits at the end: windows, (N, T + 1).

    The digits in the line that states it, "PASSKEY = 12345", are `distance` bytes before those asked for; None: there
    is no such line. Both lines replace bytes of the text.
    """
    generator = torch.Generator().manual_seed(seed)
    digits = ord("0") + torch.randint(10, (len(windows), KEY_DIGITS), generator=generator)
    name, end = (as_tokens(text).expand(len(windows), -1) for text in (KEY_NAME, KEY_END))
    line = torch.cat((name, digits.to(windows.dtype), end), 1)
    planted = windows.clone()
    planted[:, -(len(KEY_NAME) + KEY_DIGITS) :] = line[:, : -len(KEY_END)]
    if distance is not None:
        first = planted.shape[1] - KEY_DIGITS - distance - len(KEY_NAME)
        planted[:, first : first + KEY_LINE] = line
    return planted


@torch.no_grad()
def measure_passkey(model: nn.Module, size: ModelSize, windows: Tensor, length: int, longest: int) -> list[Row]:
    """Test which keys each scheme finds where `length` bytes are read: rows by distance, and one without a key.

    A digit is right if it is the most likely byte after the true ones before it; a key, if all are: greedy decoding
    then writes it.
    """
    if length < LEAST_KEY_LENGTH:
        return []
    model.eval()
    farthest = length + 1 - KEY_DIGITS - len(KEY_NAME)  # the line is at the start of the text
    distances = sorted({max(KEY_LINE, round(depth * farthest)) for depth in KEY_DEPTHS})
    schemes = schemes_at(length, train_length=size.context, longest=longest, head_dim=size.d_model // size.n_heads)
    rows = []
    for name, (position, settings) in schemes.items():
        for distance in (None, *distances):
            planted = plant_keys(windows[: size.keys, -(length + 1) :], distance, seed=length)
            parts = planted.split(max(1, size.tokens_at_once // length))
            is_right = torch.cat([_right_digits(model, part, position) for part in parts]).double()
            row = {"kind": "passkey", "scheme": name, "settings": settings, "length": length, "distance": distance}
            row |= {"right": float(is_right.prod(1).mean()), "digits_right": float(is_right.mean())}
            rows.append(row | {"n_keys": len(planted)})
    return rows


def _right_digits(model: nn.Module, windows: Tensor, position: PositionScheme) -> Tensor:
    """Return which digits at the end are the most likely bytes, (N, digits) bool."""
    windows = windows.to(next(model.parameters()).device).long()
    logits = model(windows[:, :-1], position=position)[:, -KEY_DIGITS:]
    is_right: Tensor = logits.argmax(-1) == windows[:, -KEY_DIGITS:]
    return is_right.cpu()


def losses_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


def _keys_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind") == "passkey" and row["distance"] is not None]


def _farthest_keys(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of keys at the start of the text."""
    keys = _keys_of(rows)
    farthest = dict[int, int]()
    for row in keys:
        farthest[row["length"]] = max(row["distance"], farthest.get(row["length"], 0))
    return [row for row in keys if row["distance"] == farthest[row["length"]]]


def _controls(rows: Sequence[Row]) -> list[float]:
    return [row["right"] for row in rows if row.get("kind") == "passkey" and row["distance"] is None]


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
    """Draw the loss against the length from 0, a line for each scheme, as PNG; and keys by distance, if any was found.

    A smoke run learnt from too few bytes for its schemes to be compared: its figure says so.
    """
    is_smoke = run["steps"] * run["batch"] * run["train_length"] < SMOKE_BYTES
    losses, keys, unigram = losses_of(rows), _farthest_keys(rows), run.get("unigram_loss")
    drawn = [(losses, "length", "loss", 1)]
    drawn += [(keys, "distance", "right", 100)] if any(row["right"] for row in keys) else []
    title = f"{'Smoke: no comparison. ' if is_smoke else ''}Trained with RoPE at length {run['train_length']} on "
    title += f"{run['text']}, {run['parameters'] / 1e6:.1f} million parameters, {run['device']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with page_figure(path, 1.5 + 2.7 * len(drawn)) as figure:
        figure.suptitle(textwrap.fill(title, 80))
        panels = figure.subplots(len(drawn), squeeze=False)[:, 0]
        for axes, (panel_rows, x, y, factor) in zip(panels, drawn, strict=True):
            for number, (label, line) in enumerate(_lines(panel_rows).items()):
                look = {"linestyle": ("-", "--", ":")[number % 3], "marker": "os^"[number % 3]}
                errors = [factor * _standard_error(row) for row in line]
                at, values = [row[x] for row in line], [factor * row[y] for row in line]
                axes.errorbar(at, values, errors, markersize=4, capsize=2, label=label, color=f"C{number % 10}", **look)
            axes.axvline(run["train_length"], color="#555555", linestyle=":", zorder=1, label="training length")
            axes.set_xscale("log", base=2)
            axes.set_xticks(run["lengths"], run["lengths"])
            axes.minorticks_off()
        panels[0].set(ylim=(0, 1.05 * max([unigram or 0.0, *(row["loss"] for row in losses)])), xlabel="length, bytes")
        panels[0].set_ylabel(f"loss of the last {run['scored_bytes']} bytes, nats per byte")
        if unigram:
            panels[0].axhline(
                unigram, color="#888888", linestyle="--", linewidth=1, label="guess by frequency of bytes"
            )
        if len(drawn) > 1:
            panels[1].axhline(100 * max(_controls(rows)), color="#888888", linewidth=1)
            panels[1].set(ylim=(0, 102), xlabel="distance of the key, at the start of the text, bytes")
            panels[1].set_ylabel(f"keys of {KEY_DIGITS} digits right, %\n(grey: without the key, at most)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        if is_smoke:
            mark_smoke(figure)


def _standard_error(row: Row) -> float:
    """Return that of a mean loss, or of a share of keys; 0 where there is but one window."""
    if "loss" in row:
        return float(row["standard_error"] or 0.0)
    return float((row["right"] * (1 - row["right"]) / row["n_keys"]) ** 0.5)
