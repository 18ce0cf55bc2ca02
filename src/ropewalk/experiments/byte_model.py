"""A small causal transformer over bytes, and its training: common to the experiments.

Shape letters: B batch, T tokens (here bytes), H heads, D head dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn

from ropewalk.ops.attention.api import attention
from ropewalk.schemes import PositionScheme, Rope

N_BYTES = 256
ROPE = Rope()
_REPORTS = 8  # lines of a training


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, and its training."""

    n_layers: int
    d_model: int
    n_heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


class AnyPositionAttention(nn.Module):
    """Self-attention of several heads, (B, T, d_model), or (total, d_model) if packed; options are `attention`'s."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, *, position: PositionScheme = ROPE, **options: Any) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.n_heads, -1)).unbind(-3)
        out: Tensor = attention(q, k, v, position=position, **options)
        y: Tensor = self.out_proj(out.flatten(-2))
        return y


class Block(nn.Module):
    """One pre-norm transformer block around a layer of attention."""

    def __init__(self, d_model: int, attention_layer: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = attention_layer
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, **options: object) -> Tensor:
        x = x + self.attention(self.attention_norm(x), causal=True, **options)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class ByteTransformer(nn.Module):
    """A causal language model over bytes: (B, T) int64 to logits (B, T, 256).

    `make_attention`, (d_model, n_heads) -> module, makes each block's attention. Further arguments of a forward go
    to that: `model(tokens, position=Rope())`, where it is `AnyPositionAttention`.
    """

    def __init__(self, size: ModelSize, make_attention: Callable[[int, int], nn.Module] = AnyPositionAttention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_BYTES, size.d_model)
        layers = (make_attention(size.d_model, size.n_heads) for _ in range(size.n_layers))
        self.blocks = nn.ModuleList([Block(size.d_model, layer) for layer in layers])
        self.norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, N_BYTES)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        x = self.embedding(tokens)
        # On a GPU in bfloat16, as models are trained there.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            for block in self.blocks:
                x = block(x, **options)
            logits: Tensor = self.head(self.norm(x))
        return logits.float()


def byte_losses(model: nn.Module, windows: Tensor, **options: object) -> Tensor:
    """Return the loss, in nats, of predicting each byte of (B, T + 1) windows from those before it, (B, T)."""
    windows = windows.to(next(model.parameters()).device).long()
    logits = model(windows[:, :-1], **options)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1)


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats per byte, of predicting each byte of (B, T + 1) windows."""
    return byte_losses(model, windows).mean()


def linear_decay(done: float) -> float:
    """Decay from 1 to 0 along a line, as `done` goes from 0 to 1."""
    return 1 - done


def cosine_decay(done: float) -> float:
    """Decay from 1 to 0 along half a wave, as `done` goes from 0 to 1."""
    return (1 + math.cos(math.pi * done)) / 2


def train(
    model: nn.Module,
    tokens: Tensor,
    size: ModelSize,
    steps: int,
    console: Console,
    max_seconds: float = math.inf,
    decay: Callable[[float], float] = linear_decay,
) -> list[float]:
    """Train by AdamW on random windows of the text, showing the loss; returns it for each step.

    The learning rate rises, then falls by `decay` to zero where the steps or the seconds end, whichever comes first;
    the bar and the time left go by that too. The limit in seconds is printed before the first step.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    warmup = max(1, steps // 20)
    window = torch.arange(size.context + 1)
    n_recent = max(1, steps // _REPORTS)
    reported = 0
    losses: list[float] = []
    columns = (
        TextColumn(f"step {{task.fields[step]}} of {'at most ' if max_seconds < math.inf else ''}{steps}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f} nats/byte"),
        TextColumn("{task.fields[left]}"),
    )
    if max_seconds < math.inf:
        console.print(f"It ends after {steps} steps or {max_seconds:.0f} s, whichever comes first.", highlight=False)
    model.train()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=1.0, step=0, loss=math.log(N_BYTES), left="")
        start = time.monotonic()
        for step in range(steps):
            done = max(step / steps, (time.monotonic() - start) / max_seconds)
            if done >= 1:
                console.print(f"  the {max_seconds:.0f} s are over after {step} steps", highlight=False)
                break
            for group in optimiser.param_groups:
                group["lr"] = size.learning_rate * min(1.0, (step + 1) / warmup) * decay(done)
            starts = torch.randint(tokens.numel() - size.context, (size.batch, 1))
            loss = next_byte_loss(model, tokens[starts + window])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
            if step == 0:
                start = time.monotonic()  # the first step is slow: were it counted, it would tilt the learning rate
            recent = losses[-n_recent:]
            mean = sum(recent) / len(recent)
            seconds = time.monotonic() - start
            done = min(1.0, max((step + 1) / steps, seconds / max_seconds))
            left = min(seconds / max(step, 1) * (steps - step - 1), max_seconds - seconds)
            shown = f"{max(left, 0.0):.0f} s left" if step else ""
            progress.update(task, completed=done, step=step + 1, loss=mean, left=shown)
            if int(done * _REPORTS) > reported:
                reported = int(done * _REPORTS)
                console.print(f"  step {step + 1:5}  loss {mean:.3f} nats/byte", highlight=False)
    return losses
