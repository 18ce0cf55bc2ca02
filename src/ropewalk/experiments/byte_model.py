"""A small causal transformer over bytes, and its training: common to the experiments."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from ropewalk.bench.core.options import choose_device
from ropewalk.ops.attention.api import attention
from ropewalk.schemes import PositionScheme, Rope

N_BYTES = 256
ROPE = Rope()
_REPORTS = 8  # lines of a training


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, its training, and its evaluation on longer texts."""

    n_layers: int
    d_model: int
    n_heads: int
    context: int
    batch: int
    steps: int = 0
    learning_rate: float = 0.0
    multiples: tuple[int, ...] = ()  # of the training length: at which lengths, unless the caller says
    windows: int = 64  # of held-out text, at most
    keys: int = 16  # of the passkey test, at most
    tokens_at_once: int = 1 << 12  # in a forward of the evaluation
    compiled: bool = False  # in training, its blocks, by torch.compile


class Block(nn.Module):
    """One pre-norm transformer block; further arguments of a forward are `attention`'s."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.qkv_proj = nn.LayerNorm(d_model), nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj, self.mlp_norm = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1)).unbind(-3)
        x = x + self.out_proj(attention(q, k, v, causal=True, **options).flatten(-2))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class ByteTransformer(nn.Module):
    """A causal language model over bytes by any scheme: (B, T), or (total,) if packed, to logits (B, T, 256)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_BYTES, size.d_model)
        self.blocks = nn.ModuleList([Block(size.d_model, size.n_heads) for _ in range(size.n_layers)])
        self.norm, self.head = nn.LayerNorm(size.d_model), nn.Linear(size.d_model, N_BYTES)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.n_parameters = sum(parameter.numel() for parameter in self.parameters())
        shape = f"({size.n_layers} layers, {size.n_heads} heads of {size.d_model // size.n_heads})"
        self.title = f"{self.n_parameters:,} parameters {shape}"

    def forward(self, tokens: Tensor, position: PositionScheme = ROPE, **options: Any) -> Tensor:
        x = self.embedding(tokens)
        # On a GPU in bfloat16, as models are trained there.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            for block in self.blocks:
                x = block(x, position=position, **options)
            logits: Tensor = self.head(self.norm(x))
        return logits.float()


def choose_size(
    sizes: Mapping[str, ModelSize], name: str | None, preset: str | None = None, **changes: int | None
) -> tuple[torch.device, ModelSize]:
    """Choose the device by name, or the GPU if there is one, and a size, but for changes that are not None.

    The size is the preset's, or the one for the device.
    """
    if preset is not None and preset not in sizes:
        raise ValueError(f"preset is {preset!r}, but must be one of {', '.join(sizes)}")
    device = choose_device(name)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # streams, events and kernels that are told no device are there
    named: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return device, dataclasses.replace(sizes[preset or device.type], **named)


def as_tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def make_table(
    title: str, caption: str, words: Sequence[str], numbers: Iterable[str], rows: Iterable[Iterable[str]]
) -> Table:
    """Make a table for the console: columns of words, which wrap unless there is one alone, and columns of numbers."""
    columns = [
        *(Column(name, no_wrap=len(words) == 1) for name in words),
        *(Column(name, justify="right") for name in numbers),
    ]
    table = Table(*columns, title=title, caption=caption)
    for row in rows:
        table.add_row(*row)
    return table


def byte_losses(model: nn.Module, windows: Tensor, **options: Any) -> Tensor:
    """Return the loss, in nats, of predicting each byte of (B, T + 1) windows from those before it, (B, T)."""
    windows = windows.to(next(model.parameters()).device).long()
    logits = model(windows[:, :-1], **options)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1)


def train(
    model: nn.Module, tokens: Tensor, size: ModelSize, console: Console, max_seconds: float = math.inf
) -> list[float]:
    """Train by AdamW on random windows of the text, printing the loss now and then; returns it for each step.

    The learning rate rises, then falls along half a wave to zero where the steps or the seconds end.
    """
    steps, losses, reported, start = size.steps, list[float](), 0, time.monotonic()
    optimiser = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    if size.compiled and isinstance(model, ByteTransformer):
        for block in model.blocks:
            block.compile()  # in place
    if max_seconds < math.inf:
        console.print(f"It ends after {steps} steps or {max_seconds:.0f} s, whichever comes first.", highlight=False)
    model.train()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - start) / max_seconds)
        if done >= 1:
            console.print(f"  the {max_seconds:.0f} s are over after {step} steps", highlight=False)
            break
        rate = size.learning_rate * min(1.0, (step + 1) / max(1, steps // 20))
        optimiser.param_groups[0]["lr"] = rate * ((1 + math.cos(math.pi * done)) / 2)
        starts = torch.randint(tokens.numel() - size.context, (size.batch, 1))
        loss = byte_losses(model, tokens[starts + torch.arange(size.context + 1)]).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if step == 0:
            start = time.monotonic()  # the first step is slow: were it counted, it would tilt the learning rate
        if (report := int(max(done, (step + 1) / steps) * _REPORTS)) > reported:
            reported, recent = report, losses[-max(1, steps // _REPORTS) :]
            console.print(f"  step {step + 1:5}  loss {sum(recent) / len(recent):.3f} nats/byte", highlight=False)
    return losses
