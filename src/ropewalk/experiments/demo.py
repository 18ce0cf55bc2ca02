"""The demo: learn text with RoPE, check every result against float64, and pack sequences instead of padding them.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ropewalk.bench.core.options import choose_device
from ropewalk.bench.core.timing import time_rounds
from ropewalk.experiments.byte_model import N_BYTES, ByteTransformer, ModelSize, next_byte_loss, train
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention import backends as attention_backends
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, choose, why_not
from ropewalk.schemes import Alibi, PositionScheme, ReRope, Rope, alibi_slopes

HELD_OUT = 0.1  # of the text, its end
THETA = 10000.0
EAGER = "eager PyTorch, complex"
REFERENCE = "reference"
NOT_SPEED = "On a CPU Ropewalk is for correctness, not speed."
FAR = 1_048_575  # a position where angles in float32 are wrong
WINDOW = 64  # of ReRoPE

QK = tuple[Tensor, Tensor]


PACKING = ModelSize(2, 256, 4, context=512, batch=8, steps=0, learning_rate=0.0)


@dataclass(frozen=True)
class Size(ModelSize):
    """The size of the model, its training, the shape of the rotated q and k, and the sequences that are packed."""

    rotated_tokens: int
    rotated_q_heads: int = 32
    rotated_k_heads: int = 8
    max_seconds: float = 40.0  # of training, unless the caller says how many steps; for slow and busy machines
    packing: ModelSize = PACKING
    packing_seconds: float = 6.0


# The training takes about half a minute on two CPU cores.
SIZES = {
    "cpu": Size(4, 128, 2, context=128, batch=8, steps=600, learning_rate=3e-3, rotated_tokens=2048),
    "cuda": Size(
        4,
        256,
        2,
        context=256,
        batch=32,
        steps=800,
        learning_rate=2e-3,
        rotated_tokens=16384,
        packing=ModelSize(4, 1024, 16, context=2048, batch=32, steps=0, learning_rate=0.0),
    ),
}


@dataclass(frozen=True)
class Check:
    """One computation against float64: the largest error of Ropewalk's, and of plain PyTorch's in the same dtype."""

    what: str
    backend: str
    ours: float
    plain: float


@dataclass(frozen=True)
class Rotation:
    """The time of one implementation's rotation of q and k."""

    name: str
    error: float  # the largest ‖y − truth‖ / ‖truth‖ of a token's head
    microseconds: float  # the median
    gigabytes_per_second: float  # of q and k, read and written


@dataclass(frozen=True)
class Packing:
    """Forwards of one model over the same sequences, padded and packed."""

    lengths: tuple[int, ...]
    padded_tokens: int  # with the padding
    padded: float  # tokens per second, padding not counted
    packed: float
    difference: float  # the largest between their logits, over the largest logit
    padded_by: str  # the backend of attention
    packed_by: str


def make_model(size: ModelSize) -> ByteTransformer:
    """Make a byte-level transformer whose attention is `ropewalk.attention` with RoPE."""
    return ByteTransformer(size)


def run_demo(text: Path | None, steps: int | None, device: str | None, figure: Path, seed: int = 0) -> None:
    """Train a small byte-level transformer on `text`, check results against float64, and time packed sequences.

    Args:
        text: a file to learn from; None for the documentation that ships with Python (pydoc_data.topics).
        steps: how many training steps; None for as many as suit the device, in a time that is printed first.
        device: "cpu" or "cuda"; None for the GPU, if there is one.
        figure: where the loss curve, the tokens per second and the times are drawn, as PNG.
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
    target = choose_device(device)
    size = SIZES[target.type]
    max_seconds = size.max_seconds if steps is None else math.inf
    steps = size.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1")
    source = "the documentation that ships with Python" if text is None else str(text)
    training, held_out = split(read_text(text), size.context)

    console = Console(highlight=False)
    console.print("Three parts: training; errors against float64; packed sequences. The last two take some 20 s.")
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
    console.print(check_table([*check_rotation(q, k), *check_attention(target, seed)], target))
    packing = measure_packing(size, target, seed)
    console.print(packing_table(packing, target))
    timed = [name for name in IMPLEMENTATIONS if why_untimed(name, target) is None]
    rotations = compare_rotations(q, k, timed) if timed else []
    if rotations:
        console.print(rotation_table(rotations, q, k))
    console.print(gpu_table())
    console.print("`impl=None` takes the first that supports a call. Measured speeds: docs/results.md.")
    draw(figure, losses, held_out_loss, entropy, packing, rotations, describe(target))
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
def evaluate(model: nn.Module, tokens: Tensor, size: Size, max_windows: int = 64) -> float:
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
    projection = model.get_submodule(f"blocks.{size.n_layers // 2}.attention.qkv_proj")
    handle = projection.register_forward_hook(lambda _, inputs, output: captured.append(output))
    windows = tokens.unfold(0, size.context, size.context)[: size.batch]
    model(windows.to(next(model.parameters()).device))
    handle.remove()

    def repeat(x: Tensor, heads: int) -> Tensor:
        x = x.flatten(0, 1)
        wanted = (size.rotated_tokens, heads)
        repeats = [math.ceil(n / have) for n, have in zip(wanted, x.shape, strict=False)]
        return x.repeat(*repeats, 1)[: wanted[0], : wanted[1]].contiguous()[None]

    q, k, _ = captured[0].unflatten(-1, (3, size.n_heads, -1)).unbind(2)
    return repeat(q, size.rotated_q_heads), repeat(k, size.rotated_k_heads)


def why_untimed(name: str, device: torch.device) -> str | None:
    """Say why the implementation `name` is not timed on `device`; None if it is."""
    if name == REFERENCE:
        return "the reference is the definition, for correctness and not for speed"
    if name == "triton" and device.type == "cpu" and why_not(name, device) is None:
        return "on the CPU there is only Triton's interpreter, which is for tests"
    return why_not(name, device)


def rotate_complex(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate (B, T, H, D) by (T, D/2) complex numbers, in their precision, as models do in eager PyTorch."""
    pairs = torch.view_as_complex(x.to(freqs_cis.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).to(x.dtype)


def exact_rotation(q: Tensor, k: Tensor) -> QK:
    """Rotate q and k (B, T, H, D) in float64, by angles in float64."""
    tokens, head_dim = q.shape[1], q.shape[3]
    inv_freq, _ = inverse_frequencies("default", head_dim, THETA)
    angles = torch.arange(tokens, device=q.device).double()[:, None] * inv_freq.to(q.device)
    exact = torch.polar(torch.ones_like(angles), angles)
    return rotate_complex(q.double(), exact), rotate_complex(k.double(), exact)


def rotation_error(rotated: QK, truth: QK) -> float:
    """Return the largest ‖y − truth‖ / ‖truth‖ of a token's head."""
    worst = [((y - true).norm(dim=-1) / true.norm(dim=-1)).max() for y, true in zip(rotated, truth, strict=True)]
    return float(torch.stack(worst).max())


def rotations_of(q: Tensor, k: Tensor, implementations: Sequence[str | None]) -> dict[str, Callable[[], QK]]:
    """Return calls that rotate q and k: by eager PyTorch, and by each implementation of ours (None: the default)."""
    tokens, head_dim = q.shape[1], q.shape[3]
    inv_freq, _ = inverse_frequencies("default", head_dim, THETA)
    cos, sin = rope_table(tokens, inv_freq, device=q.device)
    freqs_cis = torch.complex(cos, sin)

    def ours(name: str | None) -> Callable[[], QK]:
        def call() -> QK:
            rotated: QK = apply_rope(q, k, cos, sin, interleaved=True, impl=name)
            return rotated

        return call

    return {
        EAGER: lambda: (rotate_complex(q, freqs_cis), rotate_complex(k, freqs_cis)),
        **{f"ropewalk, {name or 'default'}": ours(name) for name in implementations},
    }


def check_rotation(q: Tensor, k: Tensor) -> list[Check]:
    """Check the table of cos and sin far from the start, and the rotation of q and k (B, T, H, D)."""
    inv_freq, _ = inverse_frequencies("default", q.shape[3], THETA)
    exact = (FAR * inv_freq).cos()
    cos, _ = rope_table(torch.tensor([FAR]), inv_freq)
    plain = (torch.tensor(float(FAR)) * inv_freq.float()).cos()
    errors = float((cos[0] - exact).abs().max()), float((plain - exact).abs().max())
    table = Check(f"cos at position {FAR:,}", "rope_table", *errors)
    truth = exact_rotation(q, k)
    eager, ours = (rotation_error(call(), truth) for call in rotations_of(q, k, [None]).values())
    return [table, Check("rotation of the model's q and k", choose(None, q.device), ours, eager)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scheme: str) -> Tensor:
    """Attend causally in plain PyTorch, (B, T, H, D): scores of a scheme, softmax, values."""
    tokens, heads, head_dim = q.shape[1:]
    positions = torch.arange(tokens, device=q.device)
    distance = positions[:, None] - positions
    angles = positions[:, None] * (THETA ** (-torch.arange(0, head_dim, 2, device=q.device, dtype=q.dtype) / head_dim))

    def rotate(x: Tensor, at: Tensor) -> Tensor:
        return rotate_complex(x, torch.polar(torch.ones_like(at), at))

    def score(q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = torch.einsum("bmhd,bnhd->bhmn", q, k) / head_dim**0.5
        return scores

    if scheme == "ALiBi":
        slopes = alibi_slopes(heads).to(q)
        scores = score(q, k) - slopes[:, None, None] * distance.abs()
    else:
        scores = score(rotate(q, angles), rotate(k, angles))
    if scheme == "ReRoPE":
        far = score(rotate(q, angles[WINDOW].expand_as(angles)), k)
        scores = torch.where(distance < WINDOW, scores, far)
    p = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    out: Tensor = torch.einsum("bhmn,bnhd->bmhd", p, v)
    return out


def check_attention(device: torch.device, seed: int, tokens: int = 256) -> list[Check]:
    """Check output and gradients of causal attention with each of three schemes, in float32."""
    rope = Rope(THETA, interleaved=True)
    schemes: dict[str, PositionScheme] = {"RoPE": rope, "ALiBi": Alibi(), "ReRoPE": ReRope(WINDOW, rope=rope)}
    torch.manual_seed(seed)
    inputs = [torch.randn(1, tokens, 4, 64, device=device) for _ in range(4)]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in (x.clone() for x in inputs[:3]))
        out = attend(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))]

    checks = []
    for name, scheme in schemes.items():

        def plain(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> Tensor:
            return plain_attention(q, k, v, name)

        def ours(q: Tensor, k: Tensor, v: Tensor, scheme: PositionScheme = scheme) -> Tensor:
            out: Tensor = attention(q, k, v, position=scheme, causal=True)
            return out

        truth = run(plain, torch.float64)

        def error(found: list[Tensor], truth: list[Tensor] = truth) -> float:
            return max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))

        q = inputs[0].clone().requires_grad_()
        backend = explain_choice(q, q, q, position=scheme, causal=True).name
        errors = error(run(ours, torch.float32)), error(run(plain, torch.float32))
        checks.append(Check(f"attention with {name}, and its gradients", backend, *errors))
    return checks


def check_table(checks: Sequence[Check], device: torch.device) -> Table:
    """Make the table of errors, for the console."""
    note = f" {NOT_SPEED}" if device.type == "cpu" else ""
    table = Table(title="Errors against float64", caption=f"Largest, in float32.{note}")
    table.add_column("computation")
    table.add_column("backend")
    for column in ("Ropewalk", "plain PyTorch"):
        table.add_column(column, justify="right")
    for check in checks:
        table.add_row(check.what, check.backend, f"{check.ours:.1e}", f"{check.plain:.1e}")
    return table


def draw_lengths(size: ModelSize, seed: int) -> tuple[int, ...]:
    """Draw lengths of sequences up to the context, their logarithms uniform, and the longest among them."""
    numbers = random.Random(seed)
    least = max(1, size.context // 16)
    drawn = (round(least * (size.context / least) ** numbers.random()) for _ in range(size.batch - 1))
    return (size.context, *drawn)


@torch.no_grad()
def measure_packing(size: Size, device: torch.device, seed: int) -> Packing:
    """Time forwards of a larger, untrained model over sequences of many lengths, padded and packed.

    Padding on the right needs no mask: no token attends a later one.
    """
    torch.manual_seed(seed)
    model = make_model(size.packing).to(device).eval()
    lengths = draw_lengths(size.packing, seed)
    tokens = torch.randint(N_BYTES, (len(lengths), size.packing.context), device=device)
    key_lengths = torch.tensor(lengths, device=device)
    is_token = torch.arange(size.packing.context, device=device) < key_lengths[:, None]
    packed_tokens = tokens[is_token]
    cu_seqlens = torch.nn.functional.pad(key_lengths.cumsum(0), (1, 0)).int()
    layout = {"layout": "thd", "cu_seqlens_q": cu_seqlens}

    def padded() -> Tensor:
        logits: Tensor = model(tokens)
        return logits

    def packed() -> Tensor:
        logits: Tensor = model(packed_tokens, **layout)
        return logits

    expected = padded()[is_token]
    difference = float((packed() - expected).abs().max() / expected.abs().max())
    del expected
    calls = {"padded": padded, "packed": packed}
    times = time_rounds(calls, device, warmup=1, rounds=20, max_seconds=size.packing_seconds / 2)
    heads = (size.packing.n_heads, size.packing.d_model // size.packing.n_heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.empty(*tokens.shape, *heads, dtype=dtype, device=device)
    rope = Rope()
    padded_by = explain_choice(q, q, q, position=rope, causal=True).name
    q = torch.empty(len(packed_tokens), *heads, dtype=dtype, device=device)
    packed_by = explain_choice(q, q, q, position=rope, causal=True, **layout).name
    rates = {name: sum(lengths) * 1e6 / times[name].p50 for name in calls}
    return Packing(lengths, tokens.numel(), rates["padded"], rates["packed"], difference, padded_by, packed_by)


def packing_table(packing: Packing, device: torch.device) -> Table:
    """Make the table of padded and packed forwards, for the console."""
    n_tokens = sum(packing.lengths)
    caption = (
        f"{len(packing.lengths)} sequences of {min(packing.lengths)} to {max(packing.lengths)} tokens, {n_tokens:,} in "
        f"all; the logits differ by {packing.difference:.0e} of the largest."
    )
    table = Table(
        title="Packed sequences compute no padding", caption=caption + (f" {NOT_SPEED}" if device.type == "cpu" else "")
    )
    table.add_column("model")
    table.add_column("attention by")
    for column in ("tokens computed", "tokens/s", "× padded"):
        table.add_column(column, justify="right")
    for name, by, computed, rate in (
        ("padded", packing.padded_by, packing.padded_tokens, packing.padded),
        ("packed", packing.packed_by, n_tokens, packing.packed),
    ):
        table.add_row(name, by, f"{computed:,}", f"{rate:,.0f}", f"{rate / packing.padded:.2f}")
    return table


def gpu_table() -> Table:
    """Make the table of backends that calls try on GPUs, in order, for the console."""
    table = Table(title="On a GPU it would use, the first that supports the call")
    for column in ("GPU", "call", "backends in order"):
        table.add_column(column)
    table.add_row("any", "rotation", "native (NVIDIA), triton")
    for (major, minor), rules in attention_backends.ORDER.items():
        for rule in rules:
            kind = "attention with two-range encoding" if rule.far else "attention"
            kind += f", {rule.tokens} tokens or more" if rule.tokens else ", fewer tokens"
            kind += ", in training" if rule.backward else ""
            if rule.host_bound:
                kind += " with a rotation" if rule.backward else ", with a rotation or without a backward"
            table.add_row(f"compute capability {major}.{minor}", kind, _without_reference(rule.order))
    table.add_row("others", "attention", _without_reference(attention_backends.FLASH_FIRST))
    return table


def _without_reference(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if name != REFERENCE)


def compare_rotations(q: Tensor, k: Tensor, implementations: Sequence[str]) -> list[Rotation]:
    """Rotate q and k (B, T, H, D) by each implementation and by eager PyTorch: first the errors, then the times."""
    calls, truth = rotations_of(q, k, implementations), exact_rotation(q, k)
    errors = {name: rotation_error(call(), truth) for name, call in calls.items()}
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
    path: Path,
    losses: list[float],
    held_out_loss: float,
    entropy: float,
    packing: Packing,
    rotations: list[Rotation],
    device: str,
) -> None:
    """Save the loss curve, the tokens per second, and the times of rotations that are there, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15 if rotations else 11, 4), layout="constrained")
    loss_axes, rate_axes, *time_axes = figure.subplots(1, 3 if rotations else 2)
    loss_axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    loss_axes.axhline(
        held_out_loss, color="tab:green", linestyle="--", label=f"held out, at the end: {held_out_loss:.2f}"
    )
    loss_axes.axhline(entropy, color="tab:gray", linestyle=":", label=f"byte frequencies alone: {entropy:.2f}")
    loss_axes.set(xlabel="step", ylabel="nats per byte", title="Learning text with RoPE")
    loss_axes.legend()
    rates = [packing.packed, packing.padded]
    bars = rate_axes.barh([f"packed,\n{packing.packed_by}", f"padded,\n{packing.padded_by}"], rates)
    rate_axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=4)
    rate_axes.set(xlim=(0, 1.4 * max(rates)), xlabel="tokens/s", title="Packed and padded sequences")
    rate_axes.locator_params(axis="x", nbins=4)
    for axes in time_axes:
        slowest_first = rotations[::-1]
        bars = axes.barh([r.name for r in slowest_first], [r.microseconds for r in slowest_first])
        labels = [f"{r.microseconds:,.0f} µs, {speed_up(r, rotations):.2f}×" for r in slowest_first]
        axes.bar_label(bars, labels=labels, padding=4)
        room_for_labels = 1.6 * max(r.microseconds for r in rotations)
        axes.set(xlim=(0, room_for_labels), xlabel="µs", title="Rotating the model's q and k")
        axes.locator_params(axis="x", nbins=5)
    figure.suptitle(f"On {device}" + (". " + NOT_SPEED if device.startswith("the CPU") else ""), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
