"""The demo: learn text with RoPE, check every result against float64, and pack sequences instead of padding them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.distributions import Categorical

from ropewalk.bench.core.timing import time_rounds
from ropewalk.experiments import byte_model
from ropewalk.experiments.byte_model import N_BYTES, ByteTransformer, ModelSize, byte_losses, make_table
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import choose
from ropewalk.schemes import Alibi, PositionScheme, ReRope, Rope

HELD_OUT = 0.1  # of the text, its end
THETA = 10000.0
FAR = 1_048_575  # a position where angles in float32 are wrong
WINDOW = 64  # of ReRoPE
MAX_SECONDS = 40.0  # of training, unless the caller says how many steps; for slow and busy machines

# The model that learns, in about half a minute on two CPU cores, and a larger one whose sequences are packed.
SIZES = {
    "cpu": ModelSize(4, 128, 2, context=128, batch=8, steps=600, learning_rate=3e-3),
    "cuda": ModelSize(4, 256, 2, context=256, batch=32, steps=800, learning_rate=2e-3),
}
PACKED_SIZES = {"cpu": ModelSize(2, 256, 4, context=512, batch=8), "cuda": ModelSize(4, 1024, 16, 2048, batch=32)}

Check = tuple[str, str, float, float]  # a computation, its backend, the largest error of it and of plain PyTorch


def run_demo(text: Path | None, steps: int | None, device: str | None, figure: Path, seed: int) -> None:
    """Train a small byte-level transformer on `text`, check results against float64, and time packed sequences."""
    from matplotlib.figure import Figure

    target, size = byte_model.choose_size(SIZES, device, steps=steps)
    training, held_out = read_text(text, size.context)
    source = "the documentation that ships with Python" if text is None else str(text)
    hardware, note = f"the CPU, {torch.get_num_threads()} threads", "On a CPU Ropewalk is for correctness, not speed."
    if target.type == "cuda":
        hardware, note = torch.cuda.get_device_name(target), ""

    console = Console(highlight=False)
    console.print("Three parts: training; errors against float64; packed sequences. The last two take some 20 s.")
    torch.manual_seed(seed)
    model = ByteTransformer(size).to(target)
    console.print(f"Training {model.title} on {hardware}, on {source} ({training.numel():,} bytes)", markup=False)
    losses = byte_model.train(model, training, size, console, MAX_SECONDS if steps is None else math.inf)
    model.eval()
    windows = held_out.unfold(0, size.context + 1, size.context)[: size.windows].split(size.batch)
    with torch.no_grad():
        held_out_loss = float(torch.cat([byte_losses(model, part) for part in windows]).mean())
    entropy = float(Categorical(held_out.bincount(minlength=N_BYTES).double()).entropy())
    console.print(
        f"Held-out loss {held_out_loss:.3f} nats/byte. Knowing nothing but how often each byte occurs there, no model "
        f"could get below {entropy:.3f}."
    )
    lines = _decode(held_out).splitlines()  # three words to begin with, of the first line that looks like prose
    words = next((words for line in lines if line[:1].isalpha() and len(words := line.split()) >= 6), ["The"])
    prompt = f"\n{' '.join(words[:3])} "
    line = " ".join(_decode(generate(model, prompt, 120, size.context, seed)).split())
    console.print(Text.assemble("It writes: ", (prompt.strip(), "dim"), " ", (line, "bold")))
    checks = [*check_rotation(target, seed), *check_attention(target, seed)]
    cells = [(name, backend, f"{ours:.1e}", f"{plain:.1e}") for name, backend, ours, plain in checks]
    headings, errors = ("computation", "backend"), ("Ropewalk", "plain PyTorch")
    console.print(make_table("Errors against float64", f"Largest, in float32. {note}", headings, errors, cells))
    lengths, packing, difference = measure_packing(PACKED_SIZES[target.type], target, seed)
    caption = (
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all; the logits "
        f"differ by {difference:.0e} of the largest. {note}"
    )
    forwards = [
        (name, backend, f"{computed:,}", f"{rate:,.0f}", f"{rate / packing['padded'][2]:.2f}")
        for name, (backend, computed, rate) in packing.items()
    ]
    headings, numbers = ("model", "attention by"), ("tokens computed", "tokens/s", "× padded")
    console.print(make_table("Packed sequences compute no padding", caption, headings, numbers, forwards))
    console.print("`impl=None` takes the first backend that supports a call. Measured speeds: docs/results.md.")

    drawing = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, rate_axes = drawing.subplots(1, 2)
    loss_axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    label = f"held out, at the end: {held_out_loss:.2f}"
    loss_axes.axhline(held_out_loss, color="tab:green", linestyle="--", label=label)
    loss_axes.axhline(entropy, color="tab:gray", linestyle=":", label=f"byte frequencies alone: {entropy:.2f}")
    loss_axes.set(xlabel="step", ylabel="nats per byte", title="Learning text with RoPE")
    loss_axes.legend()
    rates = {f"{name},\n{backend}": rate for name, (backend, _, rate) in reversed(packing.items())}
    rate_axes.bar_label(rate_axes.barh(list(rates), rates.values()), fmt="{:,.0f}", padding=4)
    rate_axes.set(xlim=(0, 1.4 * max(rates.values())), xlabel="tokens/s", title="Packed and padded sequences")
    rate_axes.locator_params(axis="x", nbins=4)
    drawing.suptitle(f"On {hardware}. {note}", fontsize="medium")
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=150, format="png")
    console.print(f"Figure: {figure}", markup=False)


def read_text(path: Path | None, context: int) -> tuple[Tensor, Tensor]:
    """Read `path`, or the documentation that ships with Python, as bytes: to learn from, and held out."""
    from pydoc_data.topics import topics

    text, least = "\n".join(topics.values()).encode() if path is None else path.read_bytes(), (context + 1) / HELD_OUT
    if len(text) < least:
        raise ValueError(f"the text has {len(text)} bytes, but must have at least {math.ceil(least)}")
    training, held_out = byte_model.as_tokens(text).tensor_split([-math.ceil(HELD_OUT * len(text))])
    return training, held_out


@torch.no_grad()
def generate(model: ByteTransformer, prompt: str, n_bytes: int, context: int, seed: int) -> Tensor:
    """Let the model continue the prompt byte by byte; returns the new bytes."""
    generator, tokens = torch.Generator().manual_seed(seed), torch.tensor(list(prompt.encode()))
    for _ in range(n_bytes):
        p = (model(tokens[None, -context:].to(model.head.weight.device))[0, -1].cpu() / 0.6).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)))
    return tokens[-n_bytes:]


def _decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def _relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (B, T, H, D) by (T, D/2) angles, as complex numbers in their precision, as models do in eager PyTorch."""
    pairs = torch.view_as_complex(x.to(angles.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2).to(x.dtype)


def check_rotation(device: torch.device, seed: int, tokens: int = 2048) -> list[Check]:
    """Check the table of cos and sin far from the start, and the rotation of a query."""
    inv_freq, _ = inverse_frequencies("default", 64, THETA)
    exact, plain = (FAR * inv_freq).cos(), (torch.tensor(float(FAR)) * inv_freq.float()).cos()
    errors = [float((cos - exact).abs().max()) for cos in (rope_table(torch.tensor([FAR]), inv_freq)[0][0], plain)]
    q = torch.randn(1, tokens, 8, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    truth = rotate_complex(q.double(), (torch.arange(tokens).double()[:, None] * inv_freq).to(device))
    ours = apply_rope(q, None, *rope_table(tokens, inv_freq, device=device), interleaved=True)[0]
    in_float32 = rotate_complex(q, torch.arange(tokens, device=device)[:, None] * inv_freq.float().to(device))
    rotation_errors = (_relative_error(ours, truth), _relative_error(in_float32, truth))
    table = (f"cos at position {FAR:,}", "rope_table", errors[0], errors[1])
    return [table, (f"rotation of {tokens:,} tokens", choose(None, device), *rotation_errors)]


def check_attention(device: torch.device, seed: int, tokens: int = 256) -> list[Check]:
    """Check output and gradients of causal attention by three schemes, in float32; plain PyTorch is the reference."""
    torch.manual_seed(seed)
    *inputs, grad = (torch.randn(1, tokens, 4, 64, device=device) for _ in range(4))

    def run(scheme: PositionScheme, impl: str | None, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out: Tensor = attention(*qkv, position=scheme, causal=True, impl=impl)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad.to(dtype))]

    checks, q = [], inputs[0].clone().requires_grad_()
    for name, scheme in {"RoPE": Rope(THETA), "ALiBi": Alibi(), "ReRoPE": ReRope(WINDOW)}.items():
        truth = run(scheme, "reference", torch.float64)
        ours, plain = (max(map(_relative_error, run(scheme, x, torch.float32), truth)) for x in (None, "reference"))
        backend = explain_choice(q, q, q, position=scheme, causal=True).name
        checks.append((f"attention with {name}, and its gradients", backend, ours, plain))
    return checks


@torch.no_grad()
def measure_packing(
    size: ModelSize, device: torch.device, seed: int, max_seconds: float = 3.0
) -> tuple[tuple[int, ...], dict[str, tuple[str, int, float]], float]:
    """Time forwards of a larger, untrained model over sequences of many lengths, padded on the right and packed.

    It returns the lengths; "padded" and "packed" with attention's backend, the tokens computed, and tokens per second,
    padding not counted; and the largest difference over the largest logit.
    """
    torch.manual_seed(seed)
    model = ByteTransformer(size).to(device).eval()
    numbers, least = random.Random(seed), max(1, size.context // 16)  # logarithms of lengths are uniform
    drawn = (round(least * (size.context / least) ** numbers.random()) for _ in range(size.batch - 1))
    lengths = (size.context, *drawn)
    tokens = torch.randint(N_BYTES, (len(lengths), size.context), device=device)
    key_lengths = torch.tensor(lengths, device=device)
    is_token = torch.arange(size.context, device=device) < key_lengths[:, None]
    cu_seqlens = torch.nn.functional.pad(key_lengths.cumsum(0), (1, 0)).int()
    layout: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": cu_seqlens}
    packed, expected = tokens[is_token], model(tokens)[is_token]
    difference = float((model(packed, **layout) - expected).abs().max() / expected.abs().max())
    del expected
    calls = {"packed": lambda: model(packed, **layout), "padded": lambda: model(tokens)}
    times = time_rounds(calls, device, warmup=1, rounds=20, max_seconds=max_seconds)
    found, dtype = {}, torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, x, options in (("padded", tokens, {}), ("packed", packed, layout)):
        q = torch.empty(*x.shape, size.n_heads, size.d_model // size.n_heads, dtype=dtype, device=device)
        backend = explain_choice(q, q, q, position=Rope(), causal=True, **options).name
        found[name] = (backend, x.numel(), sum(lengths) * 1e6 / times[name].p50)
    return lengths, found, difference
