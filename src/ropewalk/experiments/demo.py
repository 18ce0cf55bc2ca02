"""The demo: learn text with RoPE, check every result against float64, and pack sequences instead of padding them.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ropewalk.bench.core.timing import time_rounds
from ropewalk.experiments.byte_model import (
    N_BYTES,
    ByteTransformer,
    ModelSize,
    byte_losses,
    check_steps,
    choose_target,
    make_table,
    train,
)
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import choose
from ropewalk.schemes import Alibi, PositionScheme, ReRope, Rope

HELD_OUT = 0.1  # of the text, its end
THETA = 10000.0
NOT_SPEED = "On a CPU Ropewalk is for correctness, not speed."
FAR = 1_048_575  # a position where angles in float32 are wrong
WINDOW = 64  # of ReRoPE
MAX_SECONDS = 40.0  # of training, unless the caller says how many steps; for slow and busy machines

# The model that learns, in about half a minute on two CPU cores, and a larger one whose sequences are packed.
SIZES = {
    "cpu": ModelSize(4, 128, 2, context=128, batch=8, steps=600, learning_rate=3e-3),
    "cuda": ModelSize(4, 256, 2, context=256, batch=32, steps=800, learning_rate=2e-3),
}
PACKED_SIZES = {
    "cpu": ModelSize(2, 256, 4, context=512, batch=8, steps=0, learning_rate=0.0),
    "cuda": ModelSize(4, 1024, 16, context=2048, batch=32, steps=0, learning_rate=0.0),
}


class Check(NamedTuple):
    """One computation against float64: the largest error of Ropewalk's, and of plain PyTorch's in the same dtype."""

    what: str
    backend: str
    ours: float
    plain: float


class Packing(NamedTuple):
    """Forwards of one model over the same sequences, padded and packed."""

    lengths: tuple[int, ...]
    padded_tokens: int  # with the padding
    rates: dict[str, float]  # "padded", "packed": tokens per second, padding not counted
    backends: dict[str, str]  # of attention
    difference: float  # the largest between their logits, over the largest logit


def run_demo(text: Path | None, steps: int | None, device: str | None, figure: Path, seed: int = 0) -> None:
    """Train a small byte-level transformer on `text`, check results against float64, and time packed sequences."""
    from matplotlib.figure import Figure

    target = choose_target(device)
    size = SIZES[target.type]
    size = dataclasses.replace(size, steps=size.steps if steps is None else steps)
    check_steps(size.steps)
    training, held_out = split(read_text(text), size.context)
    source = "the documentation that ships with Python" if text is None else str(text)
    hardware, note = f"the CPU, {torch.get_num_threads()} threads", NOT_SPEED
    if target.type == "cuda":
        hardware, note = torch.cuda.get_device_name(target), ""

    console = Console(highlight=False)
    console.print("Three parts: training; errors against float64; packed sequences. The last two take some 20 s.")
    torch.manual_seed(seed)
    model = ByteTransformer(size).to(target)
    said = f"Training {model.n_parameters:,} parameters {model.shape} on {hardware}, on {source}"
    console.print(f"{said} ({training.numel():,} bytes)", markup=False)
    losses = train(model, training, size, console, MAX_SECONDS if steps is None else math.inf)
    held_out_loss, entropy = evaluate(model, held_out, size), byte_entropy(held_out)
    console.print(
        f"Held-out loss {held_out_loss:.3f} nats/byte. Knowing nothing but how often each byte occurs there, no model "
        f"could get below {entropy:.3f}."
    )
    prompt = opening(held_out)
    line = generate(model, prompt, 120, size.context, seed)
    console.print(Text.assemble("It writes: ", (as_line(prompt), "dim"), " ", (as_line(line), "bold")))
    checks = [*check_rotation(target, seed), *check_attention(target, seed)]
    rows = [(check.what, check.backend, f"{check.ours:.1e}", f"{check.plain:.1e}") for check in checks]
    errors, caption = ("Ropewalk", "plain PyTorch"), f"Largest, in float32. {note}"
    console.print(make_table("Errors against float64", caption, "computation, backend", errors, rows))
    packing = measure_packing(PACKED_SIZES[target.type], target, seed)
    console.print(packing_table(packing, note))
    console.print("`impl=None` takes the first backend that supports a call. Measured speeds: docs/results.md.")

    drawing = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, rate_axes = drawing.subplots(1, 2)
    loss_axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    label = f"held out, at the end: {held_out_loss:.2f}"
    loss_axes.axhline(held_out_loss, color="tab:green", linestyle="--", label=label)
    loss_axes.axhline(entropy, color="tab:gray", linestyle=":", label=f"byte frequencies alone: {entropy:.2f}")
    loss_axes.set(xlabel="step", ylabel="nats per byte", title="Learning text with RoPE")
    loss_axes.legend()
    bars = rate_axes.barh([f"{name},\n{packing.backends[name]}" for name in packing.rates], packing.rates.values())
    rate_axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in packing.rates.values()], padding=4)
    room = 1.4 * max(packing.rates.values())
    rate_axes.set(xlim=(0, room), xlabel="tokens/s", title="Packed and padded sequences")
    rate_axes.locator_params(axis="x", nbins=4)
    drawing.suptitle(f"On {hardware}. {note}", fontsize="medium")
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=150, format="png")
    console.print(f"Figure: {figure}", markup=False)


def read_text(path: Path | None) -> bytes:
    """Read the bytes of `path`, or of the documentation that ships with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode() if path is None else path.read_bytes()


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
    return float(torch.special.entr(tokens.bincount(minlength=N_BYTES).double() / tokens.numel()).sum())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, size: ModelSize, max_windows: int = 64) -> float:
    """Return the mean loss over the text's windows, in nats per byte."""
    model.eval()
    windows = tokens.unfold(0, size.context + 1, size.context)[:max_windows]
    return float(torch.cat([byte_losses(model, part) for part in windows.split(size.batch)]).mean())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, n_bytes: int, context: int, seed: int, temperature: float = 0.6
) -> Tensor:
    """Let the model continue `prompt` (T,) byte by byte; returns the new bytes."""
    model.eval()
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(n_bytes):
        logits = model(tokens[None, -context:].to(device))[0, -1].cpu()
        tokens = torch.cat((tokens, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokens[len(prompt) :]


def opening(tokens: Tensor) -> Tensor:
    """Return three words to begin with, from the first line of the text that looks like prose."""
    lines = bytes(tokens.tolist()).decode(errors="replace").splitlines()
    words = next((words for line in lines if line[:1].isalpha() and len(words := line.split()) >= 6), ["The"])
    return torch.tensor(list(f"\n{' '.join(words[:3])} ".encode()))


def as_line(tokens: Tensor) -> str:
    """Decode bytes as text on one line."""
    return " ".join(bytes(tokens.tolist()).decode(errors="replace").split())


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (B, T, H, D) by (T, D/2) angles, as complex numbers in their precision, as models do in eager PyTorch."""
    pairs = torch.view_as_complex(x.to(angles.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2).to(x.dtype)


def check_rotation(device: torch.device, seed: int, tokens: int = 2048) -> list[Check]:
    """Check the table of cos and sin far from the start, and the rotation of a query."""
    inv_freq, _ = inverse_frequencies("default", 64, THETA)
    exact = (FAR * inv_freq).cos()
    plain = (torch.tensor(float(FAR)) * inv_freq.float()).cos()
    errors = [float((cos - exact).abs().max()) for cos in (rope_table(torch.tensor([FAR]), inv_freq)[0][0], plain)]
    table = Check(f"cos at position {FAR:,}", "rope_table", *errors)

    q = torch.randn(1, tokens, 8, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    truth = rotate_complex(q.double(), (torch.arange(tokens).double()[:, None] * inv_freq).to(device))
    ours = apply_rope(q, None, *rope_table(tokens, inv_freq, device=device), interleaved=True)[0]
    in_float32 = rotate_complex(q, torch.arange(tokens, device=device)[:, None] * inv_freq.float().to(device))
    errors = [_relative_error(x, truth) for x in (ours, in_float32)]
    return [table, Check(f"rotation of {tokens:,} tokens", choose(None, device), *errors)]


def _relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def check_attention(device: torch.device, seed: int, tokens: int = 256) -> list[Check]:
    """Check output and gradients of causal attention by three schemes, in float32; plain PyTorch is the reference."""
    torch.manual_seed(seed)
    *inputs, grad = (torch.randn(1, tokens, 4, 64, device=device) for _ in range(4))

    def run(scheme: PositionScheme, impl: str | None, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out: Tensor = attention(*qkv, position=scheme, causal=True, impl=impl)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad.to(dtype))]

    checks = []
    for name, scheme in {"RoPE": Rope(THETA), "ALiBi": Alibi(), "ReRoPE": ReRope(WINDOW)}.items():
        truth = run(scheme, "reference", torch.float64)
        found = [run(scheme, impl, torch.float32) for impl in (None, "reference")]
        errors = [max(map(_relative_error, tensors, truth)) for tensors in found]
        q = inputs[0].clone().requires_grad_()
        backend = explain_choice(q, q, q, position=scheme, causal=True).name
        checks.append(Check(f"attention with {name}, and its gradients", backend, *errors))
    return checks


@torch.no_grad()
def measure_packing(size: ModelSize, device: torch.device, seed: int, max_seconds: float = 3.0) -> Packing:
    """Time forwards of a larger, untrained model over sequences of many lengths, padded and packed.

    Lengths are up to the context, their logarithms uniform, and the longest among them. Padding on the right needs no
    mask: no token attends a later one.
    """
    torch.manual_seed(seed)
    model = ByteTransformer(size).to(device).eval()
    numbers, least = random.Random(seed), max(1, size.context // 16)
    drawn = (round(least * (size.context / least) ** numbers.random()) for _ in range(size.batch - 1))
    lengths = (size.context, *drawn)
    tokens = torch.randint(N_BYTES, (len(lengths), size.context), device=device)
    key_lengths = torch.tensor(lengths, device=device)
    is_token = torch.arange(size.context, device=device) < key_lengths[:, None]
    cu_seqlens = torch.nn.functional.pad(key_lengths.cumsum(0), (1, 0)).int()
    layout: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": cu_seqlens}
    packed = tokens[is_token]
    expected = model(tokens)[is_token]
    difference = float((model(packed, **layout) - expected).abs().max() / expected.abs().max())
    del expected
    calls = {"packed": lambda: model(packed, **layout), "padded": lambda: model(tokens)}
    times = time_rounds(calls, device, warmup=1, rounds=20, max_seconds=max_seconds)
    backends = {}
    for name, x, options in (("packed", packed, layout), ("padded", tokens, {})):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        q = torch.empty(*x.shape, size.n_heads, size.d_model // size.n_heads, dtype=dtype, device=device)
        backends[name] = explain_choice(q, q, q, position=Rope(), causal=True, **options).name
    rates = {name: sum(lengths) * 1e6 / times[name].p50 for name in calls}
    return Packing(lengths, tokens.numel(), rates, backends, difference)


def packing_table(packing: Packing, note: str) -> Table:
    """Make the table of padded and packed forwards, for the console."""
    lengths, rates = packing.lengths, packing.rates
    caption = (
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all; the logits "
        f"differ by {packing.difference:.0e} of the largest. {note}"
    )
    rows = [
        (name, packing.backends[name], f"{computed:,}", f"{rates[name]:,.0f}", f"{rates[name] / rates['padded']:.2f}")
        for name, computed in (("padded", packing.padded_tokens), ("packed", sum(lengths)))
    ]
    numbers = ("tokens computed", "tokens/s", "× padded")
    return make_table("Packed sequences compute no padding", caption, "model, attention by", numbers, rows)
