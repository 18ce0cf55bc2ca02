"""What a language model loses by 8-bit products: it is trained, and reads held-out text by each.

On a GPU it learns to read 32k bytes, on a CPU 1024. It attends in bfloat16 when it reads, on a CPU by the reference.

The model learns the text, and to copy a key that lines further back state, at growing lengths. A row has,
of one precision at one length, the perplexity of a byte over held-out windows, the share of keys that are recalled with
all digits, and the loss of those digits. Each window is its own control: `more` is the difference of its loss from that
with 16-bit products, with the standard error of the difference over windows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cache_quality import check_losses
from torch import Tensor, nn

from ropewalk import Rope, attention
from ropewalk.experiments import byte_model
from ropewalk.experiments.byte_model import ByteTransformer, ModelSize, as_tokens, byte_losses
from ropewalk.experiments.length_extrapolation import (
    KEY_DIGITS,
    KEY_END,
    KEY_LINE,
    KEY_NAME,
    cut_windows,
    plant_keys,
    read_corpus,
)

Row = dict[str, Any]
POSITION = Rope(base=500000.0)
PRECISIONS: Mapping[str, str | None] = {"16-bit": None, "int8": "int8", "int8-fp8": "int8-fp8"}
PLACES = 8  # of a training window where its key may be stated
DEPTHS = (0.5, 1.0)  # where a key is stated: so much of the greatest distance back


@dataclass(frozen=True)
class Stage:
    """A part of the training: so many steps on so many windows of a length."""

    length: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """A model, its training, and the evaluation."""

    size: ModelSize
    stages: tuple[Stage, ...]
    lengths: tuple[int, ...]
    windows: int


PLANS = {
    "cuda": Plan(
        ModelSize(6, 512, 4, context=32768, batch=1, learning_rate=1e-3),
        (Stage(512, 64, 2500), Stage(4096, 8, 500), Stage(32768, 1, 400)),
        (512, 8192, 16384, 32768),
        64,
    ),
    "cpu": Plan(  # five minutes on a core
        ModelSize(2, 128, 2, context=1024, batch=1, learning_rate=3e-3),
        (Stage(256, 8, 2000), Stage(1024, 2, 200)),
        (256, 512, 1024),
        64,
    ),
}


def draw_windows(text: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """Draw windows of the text with keys, and say which losses are of digits that an earlier line states.

    A window states its key at one to `PLACES` places, and asks for it at the end.
    """
    rows, length = stage.batch, stage.length
    starts = torch.randint(text.numel() - length, (rows, 1))
    windows = text[starts + torch.arange(length + 1)]
    digits = (ord("0") + torch.randint(10, (rows, KEY_DIGITS))).to(windows.dtype)
    name, end = (as_tokens(part).expand(rows, -1) for part in (KEY_NAME, KEY_END))
    line = torch.cat((name, digits, end), 1)
    is_asked = torch.zeros(rows, length, dtype=torch.bool)
    cell = (length - KEY_LINE) // PLACES
    first = torch.randint(PLACES, (rows,))
    is_stated = torch.rand(rows, PLACES) < torch.rand(rows, 1)
    for place in range(PLACES):
        at = place * cell + torch.randint(cell - KEY_LINE + 1, (rows, 1)) + torch.arange(KEY_LINE)
        stated = ((first == place) | (is_stated[:, place] & (first < place)))[:, None]
        windows.scatter_(1, at, torch.where(stated, line, windows.gather(1, at)))
        of_digits = at[:, len(KEY_NAME) : len(KEY_NAME) + KEY_DIGITS] - 1  # the loss of a byte is before it
        is_asked.scatter_(1, of_digits, stated & (first != place)[:, None] | is_asked.gather(1, of_digits))
    windows[:, -(len(KEY_NAME) + KEY_DIGITS) :] = line[:, : -len(KEY_END)]
    is_asked[:, -KEY_DIGITS:] = True
    return windows, is_asked


def _farthest(length: int) -> int:
    """Return the distance of a key that is stated by the first line of a window."""
    return length + 1 - KEY_DIGITS - len(KEY_NAME)


def train(model: nn.Module, text: Tensor, stages: Sequence[Stage], learning_rate: float) -> Iterator[str]:
    """Train by AdamW on all bytes, and as much on the digits that are asked for; yields a line now and then."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    total, done, begun = sum(stage.steps for stage in stages), 0, time.monotonic()
    model.train()
    for stage in stages:
        for step in range(stage.steps):
            warm, share = min(1.0, (done + 1) / max(1, total // 20)), done / total
            optimiser.param_groups[0]["lr"] = learning_rate * warm * (1 + math.cos(math.pi * share)) / 2
            windows, is_asked = draw_windows(text, stage)
            losses = byte_losses(model, windows, position=POSITION)
            is_asked = is_asked.to(losses.device)
            digits = (losses * is_asked).sum() / is_asked.sum()
            optimiser.zero_grad()
            (losses.mean() + digits).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            done += 1
            if (step + 1) % max(1, stage.steps // 5) == 0:
                seconds = f"{time.monotonic() - begun:.0f} s"
                yield f"{seconds}: length {stage.length}, a byte {losses.mean():.3f}, a digit {digits:.3f} nats"


@torch.no_grad()
def read(model: nn.Module, windows: Tensor, precision: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each window the mean loss of its bytes, that of its last digits, and whether it recalls all of these.

    (windows,) each, in float64.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), precision=precision, **options)
        return out.to(v.dtype)

    before = byte_model.attention
    # A tracer would not see the change, so nothing here is compiled.
    byte_model.attention = attend  # type: ignore[assignment]
    device = next(model.parameters()).device
    found = []
    try:
        for window in windows.split(1):
            tokens = window.to(device).long()
            logits = model(tokens[:, :-1], position=POSITION)[0]
            losses = nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none").double()
            is_right = (logits[-KEY_DIGITS:].argmax(-1) == tokens[0, -KEY_DIGITS:]).all().double()
            found.append(torch.stack((losses.mean(), losses[-KEY_DIGITS:].mean(), is_right)))
    finally:
        byte_model.attention = before
    bytes_, digits, right = torch.stack(found).cpu().unbind(1)
    return bytes_, digits, right


def measure(model: nn.Module, windows: Tensor, length: int) -> Iterator[Row]:
    """Yield a row for each precision: of the text as it is, and of keys halfway back and at the start."""
    text = windows[:, -(length + 1) :]
    planted = torch.cat(
        [plant_keys(text, max(KEY_LINE, round(depth * _farthest(length))), seed=length) for depth in DEPTHS]
    )
    exact, exact_digits = None, None
    for name, precision in PRECISIONS.items():
        losses = check_losses(name, read(model, text, precision)[0])[1]
        _, digits, right = read(model, planted, precision)
        exact, exact_digits = (losses, digits) if exact is None else (exact, exact_digits)
        assert exact_digits is not None
        more, more_digits = losses - exact, digits - exact_digits
        yield {
            "precision": name,
            "length": length,
            "windows": len(text),
            "perplexity": math.exp(losses.mean()),
            "loss": float(losses.mean()),
            "more": float(more.mean()),
            "standard_error": float(more.std() / len(more) ** 0.5),
            "keys": len(planted),
            "recalled": float(right.mean()),
            "digit_loss": float(digits.mean()),
            "digit_more": float(more_digits.mean()),
            "digit_standard_error": float(more_digits.std() / len(more_digits) ** 0.5),
        }


def run(device: torch.device, share: float, say: Callable[[str], object]) -> tuple[dict[str, Any], Iterator[Row]]:
    """Train, and return what the record says of the run, and the rows; `share` is of the steps."""
    plan = PLANS[device.type]
    stages = [Stage(one.length, one.batch, max(1, round(share * one.steps))) for one in plan.stages]
    name, text, held_out = read_corpus(None)
    windows = cut_windows(held_out, plan.lengths[-1] + 1, plan.windows)
    torch.manual_seed(0)
    model = ByteTransformer(plan.size).to(device)
    about = {"text": name, "model": model.title, "position": f"Rope({POSITION.base})"}
    say(f"{model.title}, on {name} ({len(text):,} bytes)")
    for line in train(model, text, stages, plan.size.learning_rate):
        say(line)
    model.eval()
    about |= {"stages": [asdict(stage) for stage in stages]}
    return about, (row for length in plan.lengths for row in measure(model, windows, length))
