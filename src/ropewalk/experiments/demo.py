"""The demo: a small transformer learns real text, then every rotation of this machine runs on its own q and k.

Shape letters: B batch, T tokens (here bytes), H heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ropewalk.bench.core.timing import check_device, time_rounds
from ropewalk.experiments.byte_model import N_BYTES, ByteTransformer, ModelSize, next_byte_loss, train
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.modules.attention import RoPEAttention
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not

HELD_OUT = 0.1  # of the text, its end
THETA = 10000.0
EAGER = "eager PyTorch, complex"

QK = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size(ModelSize):
    """The size of the model, its training, and the shape of the rotated q and k."""

    rotated_tokens: int
    rotated_q_heads: int = 32
    rotated_k_heads: int = 8
    max_seconds: float = 100.0  # of training, unless the caller says how many steps; for slow and busy machines


# The training takes about a minute on two CPU cores.
SIZES = {
    "cpu": Size(4, 128, 2, context=128, batch=8, steps=600, learning_rate=3e-3, rotated_tokens=2048),
    "cuda": Size(4, 256, 2, context=256, batch=32, steps=800, learning_rate=2e-3, rotated_tokens=16384),
}


@dataclass(frozen=True)
class Rotation:
    """The error and the time of one implementation's rotation of q and k."""

    name: str
    error: float  # the largest ‖y − truth‖ / ‖truth‖ of a token's head
    microseconds: float  # the median
    gigabytes_per_second: float  # of q and k, read and written


def make_model(size: Size) -> ByteTransformer:
    """Make the demo's model: its attention is `RoPEAttention`."""
    return ByteTransformer(size, lambda d_model, n_heads: RoPEAttention(d_model, n_heads, dropout=0.0, theta=THETA))


def run_demo(text: Path | None, steps: int | None, device: str | None, figure: Path, seed: int = 0) -> None:
    """Train a small byte-level transformer on `text`, let it write, and rotate its q and k in every way there is here.

    Args:
        text: a file to learn from; None for the documentation that ships with Python (pydoc_data.topics).
        steps: how many training steps; None for as many as suit the device.
        device: "cpu" or "cuda"; None for the GPU, if there is one.
        figure: where the loss curve and the times are drawn, as PNG.
        seed: of the weights, the batches and the generated line.

    Raises:
        ValueError: a text too short to learn from, fewer than one step, or a device that cannot be timed.
        ModuleNotFoundError: without matplotlib.

    Example:
        >>> from pathlib import Path
        >>> from ropewalk.experiments.demo import run_demo
        >>> run_demo(text=None, steps=None, device=None, figure=Path("demo.png"))  # doctest: +SKIP
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("the demo draws its figure with matplotlib: pip install 'ropewalk[bench]'")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device(target)
    size = SIZES[target.type]
    max_seconds = size.max_seconds if steps is None else math.inf
    steps = size.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1")
    source = "the documentation that ships with Python" if text is None else str(text)
    training, held_out = split(read_text(text), size.context)

    console = Console(highlight=False)
    torch.manual_seed(seed)
    model = make_model(size).to(target)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Training {n_parameters:,} parameters ({size.n_layers} layers, {size.n_heads} heads of "
        f"{size.d_model // size.n_heads}) on {describe(target)}, on {source} ({training.numel():,} bytes)",
        markup=False,
    )
    losses = train(model, training, size, steps, console, max_seconds)
    held_out_loss = evaluate(model, held_out, size)
    entropy = byte_entropy(held_out)
    console.print(
        f"Held-out loss {held_out_loss:.3f} nats/byte. Knowing nothing but how often each byte occurs there, no model "
        f"could get below {entropy:.3f}."
    )
    prompt = opening(held_out)
    line = generate(model, prompt, 120, size.context, seed)
    console.print(Text.assemble("It writes: ", (as_line(prompt), "dim"), " ", (as_line(line), "bold")))

    q, k = capture_qk(model, held_out, size)
    missing = {name: reason for name in IMPLEMENTATIONS if (reason := why_missing(name, target)) is not None}
    rotations = compare_rotations(q, k, [name for name in IMPLEMENTATIONS if name not in missing])
    console.print(rotation_table(rotations, q, k))
    for name, reason in missing.items():
        console.print(f"Not here: {name}: {reason}.", markup=False)
    draw(figure, losses, held_out_loss, entropy, rotations, describe(target))
    console.print(f"Figure: {figure}", markup=False)


def describe(device: torch.device) -> str:
    """Describe the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU, {torch.get_num_threads()} threads"


def read_text(path: Path | None) -> bytes:
    """Read the bytes of `path`, or of the documentation that ships with Python."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def split(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """Split the text, as int64 bytes, into a training and a held-out part."""
    least = math.ceil((context + 1) / HELD_OUT)
    if len(text) < least:
        raise ValueError(f"the text has {len(text)} bytes, but must have at least {least}")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    n_held_out = math.ceil(HELD_OUT * len(text))
    return tokens[:-n_held_out], tokens[-n_held_out:]


def byte_entropy(tokens: Tensor) -> float:
    """Return the entropy of the bytes' frequencies, in nats per byte."""
    p = tokens.bincount(minlength=N_BYTES).double() / tokens.numel()
    return float(torch.special.entr(p).sum())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, size: Size, max_windows: int = 256) -> float:
    """Return the mean loss over the text's windows, in nats per byte."""
    model.eval()
    windows = tokens.unfold(0, size.context + 1, size.context)[:max_windows]
    total = sum(float(next_byte_loss(model, part)) * len(part) for part in windows.split(size.batch))
    return total / len(windows)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, n_bytes: int, context: int, seed: int, temperature: float = 0.6
) -> Tensor:
    """Let the model continue `prompt` (T,) byte by byte; returns the new bytes."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(n_bytes):
        logits = model(tokens[None, -context:].to(device))[0, -1].cpu()
        tokens = torch.cat((tokens, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokens[len(prompt) :]


def opening(tokens: Tensor) -> Tensor:
    """Return three words to begin with, from the first line of the text that looks like prose."""
    lines = bytes(tokens.tolist()).decode(errors="replace").splitlines()
    prose = (words for line in lines if line[:1].isalpha() and len(words := line.split()) >= 6)
    words = next(prose, ["The"])
    return torch.tensor(list(f"\n{' '.join(words[:3])} ".encode()))


def as_line(tokens: Tensor) -> str:
    """Decode bytes as text on one line."""
    return " ".join(bytes(tokens.tolist()).decode(errors="replace").split())


@torch.no_grad()
def capture_qk(model: ByteTransformer, tokens: Tensor, size: Size) -> QK:
    """Capture the middle layer's q and k on held-out text, repeated to the size that is timed, (1, T, H, D)."""
    captured: list[Tensor] = []
    layer = model.get_submodule(f"blocks.{size.n_layers // 2}.attention")
    projections = [layer.get_submodule(name) for name in ("q_proj", "k_proj")]
    handles = [x.register_forward_hook(lambda _, inputs, output: captured.append(output)) for x in projections]
    windows = tokens.unfold(0, size.context, size.context)[: size.batch]
    model(windows.to(next(model.parameters()).device))
    for handle in handles:
        handle.remove()

    def repeat(x: Tensor, heads: int) -> Tensor:
        x = x.flatten(0, 1)
        wanted = (size.rotated_tokens, heads)
        repeats = [math.ceil(n / have) for n, have in zip(wanted, x.shape, strict=False)]
        return x.repeat(*repeats, 1)[: wanted[0], : wanted[1]].contiguous()[None]

    q, k = (x.unflatten(-1, (size.n_heads, -1)) for x in captured)
    return repeat(q, size.rotated_q_heads), repeat(k, size.rotated_k_heads)


def why_missing(name: str, device: torch.device) -> str | None:
    """Return why the implementation `name` is left out of the comparison on `device`; None if it is in."""
    if name == "triton" and device.type == "cpu" and why_not(name, device) is None:
        return "on the CPU there is only Triton's interpreter, which is for tests"
    return why_not(name, device)


def rotate_complex(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate (B, T, H, D) by (T, D/2) complex numbers, in their precision, as models do in eager PyTorch."""
    pairs = torch.view_as_complex(x.to(freqs_cis.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).to(x.dtype)


def compare_rotations(q: Tensor, k: Tensor, implementations: list[str]) -> list[Rotation]:
    """Rotate q and k (B, T, H, D) by each implementation and by eager PyTorch: first the errors, then the times."""
    tokens, head_dim = q.shape[1], q.shape[3]
    inv_freq, _ = inverse_frequencies("default", head_dim, THETA)
    cos, sin = rope_table(tokens, inv_freq, device=q.device)
    freqs_cis = torch.complex(cos, sin)
    angles = torch.arange(tokens, device=q.device).double()[:, None] * inv_freq.to(q.device)
    exact = torch.polar(torch.ones_like(angles), angles)
    truth = rotate_complex(q.double(), exact), rotate_complex(k.double(), exact)

    def ours(name: str) -> Callable[[], QK]:
        def call() -> QK:
            rotated: QK = apply_rope(q, k, cos, sin, interleaved=True, impl=name)
            return rotated

        return call

    calls: dict[str, Callable[[], QK]] = {
        EAGER: lambda: (rotate_complex(q, freqs_cis), rotate_complex(k, freqs_cis)),
        **{f"ropewalk, {name}": ours(name) for name in implementations},
    }

    def error(rotated: QK) -> float:
        worst = [((y - true).norm(dim=-1) / true.norm(dim=-1)).max() for y, true in zip(rotated, truth, strict=True)]
        return float(torch.stack(worst).max())

    errors = {name: error(call()) for name, call in calls.items()}
    times = time_rounds(calls, q.device, warmup=3, rounds=30, max_seconds=3.0)
    n_bytes = 2 * (q.nbytes + k.nbytes)
    return [
        Rotation(name, errors[name], times[name].p50, n_bytes / times[name].p50 / 1e3)
        for name in sorted(calls, key=lambda name: times[name].p50)
    ]


def speed_up(rotation: Rotation, rotations: list[Rotation]) -> float:
    """Return how many times faster than eager PyTorch it is."""
    eager = next(other for other in rotations if other.name == EAGER)
    return eager.microseconds / rotation.microseconds


def rotation_table(rotations: list[Rotation], q: Tensor, k: Tensor) -> Table:
    """Make the table of the comparison, for the console."""
    dtype = str(q.dtype).removeprefix("torch.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {dtype}"
    table = Table(title="Rotating the model's own q and k", caption=shapes)
    table.add_column("implementation", no_wrap=True)
    for column in ("max error vs float64", "µs", "GB/s", "× eager"):
        table.add_column(column, justify="right")
    for r in rotations:
        numbers = f"{r.error:.1e}", f"{r.microseconds:,.0f}", f"{r.gigabytes_per_second:.1f}"
        table.add_row(r.name, *numbers, f"{speed_up(r, rotations):.2f}")
    return table


def draw(
    path: Path, losses: list[float], held_out_loss: float, entropy: float, rotations: list[Rotation], device: str
) -> None:
    """Save the loss curve and the times of the rotations as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)
    loss_axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    loss_axes.axhline(
        held_out_loss, color="tab:green", linestyle="--", label=f"held out, at the end: {held_out_loss:.2f}"
    )
    loss_axes.axhline(entropy, color="tab:gray", linestyle=":", label=f"byte frequencies alone: {entropy:.2f}")
    loss_axes.set(xlabel="step", ylabel="nats per byte", title="Learning text through RoPEAttention")
    loss_axes.legend()
    slowest_first = rotations[::-1]
    bars = time_axes.barh([r.name for r in slowest_first], [r.microseconds for r in slowest_first])
    labels = [f"{r.microseconds:,.0f} µs, {speed_up(r, rotations):.2f}×" for r in slowest_first]
    time_axes.bar_label(bars, labels=labels, padding=4)
    room_for_labels = 1.6 * max(r.microseconds for r in rotations)
    time_axes.set(xlim=(0, room_for_labels), xlabel="µs", title=f"Rotating its q and k, on {device}")
    time_axes.locator_params(axis="x", nbins=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
