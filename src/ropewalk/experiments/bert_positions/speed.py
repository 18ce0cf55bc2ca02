"""The speed and memory of a training step by each scheme, against Hugging Face's own BERT.

A candidate is a model of the experiment's size with an optimiser of its own: one by Ropewalk for each scheme, and
transformers' BERT as it is, with its learned table of positions, by attention "sdpa", "eager" and "ropewalk". A step is
a forward, the loss of the masked tokens alone, a backward, the clipping of gradients and AdamW, in the precision of the
training, on one batch that lies on the device. The batches of both lengths have the same number of tokens with the
padding; a row has, by a seed, half of the length or more in tokens.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from ropewalk.bench.core.terminal import progress_bar
from ropewalk.bench.core.timing import peak_memory
from ropewalk.experiments.bert_positions.batches import make_batch
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.model import autocast, make_model, plain_bert
from ropewalk.experiments.bert_positions.record import HUGGING_FACE, SpeedRow
from ropewalk.experiments.bert_positions.training import make_optimizer
from ropewalk.integrations.huggingface import register

ATTENTIONS = ("sdpa", "eager", "ropewalk")
MULTIPLES = (1, 4)  # of the training length
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
_PAD_ID = _SEED = 0


class Effort(NamedTuple):
    """The amount of measurement on a kind of device."""

    tokens: int  # of a batch, at most, with the padding
    warmup: int  # steps of each candidate
    steps: int  # of one candidate between two waits for the device
    seconds: float  # after so many, no further round of a length begins


EFFORTS = {
    "cpu": Effort(tokens=1 << 9, warmup=1, steps=1, seconds=1.5),
    "cuda": Effort(tokens=1 << 15, warmup=3, steps=5, seconds=7.0),
}


def measure_speed(config: Config, vocab_size: int, device: torch.device, console: Console) -> list[SpeedRow]:
    """Measure all candidates at the training length and at four times that.

    They take turns, a few steps each, in a new order each round; the device is waited for before and after those alone.
    Times are the 20 %, 50 % and 80 % quantiles over rounds, tokens/s the tokens without padding over the median. The
    peak of memory is of one step, after the first: what PyTorch has allocated at the most in it, beyond what it found,
    which is weights, the optimiser's moments and the batch. So it has activations, gradients and what is temporary.
    """
    effort = EFFORTS[device.type]
    if max(config.length_multiples) < max(MULTIPLES):  # tables of positions must have as many rows
        config = dataclasses.replace(config, length_multiples=list(MULTIPLES))
    rows: list[SpeedRow] = []
    with progress_bar(console) as progress:
        task = progress.add_task("speed", total=len(MULTIPLES))
        for multiple in MULTIPLES:
            batch = draw_batch(config, multiple, vocab_size, effort.tokens)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            models = {
                (scheme, "ropewalk"): make_model(config, scheme, _SEED, vocab_size, _PAD_ID)
                for scheme in config.schemes
            }
            register()
            for name in ATTENTIONS:
                models[HUGGING_FACE, name] = plain_bert(config, vocab_size, _PAD_ID, attn_implementation=name)
            steps = {name: _make_step(model, config, device, batch) for name, model in models.items()}
            rows += _measure(steps, batch, device, effort)
            progress.advance(task)
            del models, steps
    return rows


def draw_batch(config: Config, multiple: int, vocab_size: int, most_tokens: int) -> dict[str, Tensor]:
    """Draw random tokens, as many windows as training has in a part, or as fit; a fourth of them four times as long.

    At the training length there are four windows or more, a multiple of four.
    """
    windows = min(config.batch_size // config.accumulation_steps, most_tokens // config.train_length)
    n_rows, length = max(1, windows // max(MULTIPLES)) * max(MULTIPLES) // multiple, config.train_length * multiple
    generator = torch.Generator().manual_seed(_SEED)
    lengths = torch.randint((length + 1) // 2, length + 1, (n_rows, 1), generator=generator)
    is_token = torch.arange(length) < lengths
    ids = torch.randint(_PAD_ID + 1, vocab_size, (n_rows, length), generator=generator)
    is_masked = is_token & (torch.rand(n_rows, length, generator=generator) < config.mask_probability)
    is_masked[0, 0] = True
    return make_batch(ids.masked_fill(~is_token, _PAD_ID), is_token, ids.masked_fill(~is_masked, -100))


def _make_step(model: nn.Module, config: Config, device: torch.device, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Make a training step of a model, as training does it."""
    model.to(device).train()
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def step() -> None:
        with autocast(config, device):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure(
    steps: dict[tuple[str, str], Callable[[], None]], batch: dict[str, Tensor], device: torch.device, effort: Effort
) -> list[SpeedRow]:
    """Warm up, measure memory, then time in rounds those that did not run out of memory."""
    milliseconds: dict[tuple[str, str], list[float]] = {}
    peaks: dict[tuple[str, str], int] = {}
    for name, step in steps.items():
        try:
            for _ in range(effort.warmup):
                step()
            if device.type == "cuda":
                peaks[name] = peak_memory(step, device)
            milliseconds[name] = []
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    order, shuffle = list(milliseconds), random.Random(_SEED).shuffle
    deadline = time.perf_counter() + effort.seconds
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        shuffle(order)
        for name in order:
            milliseconds[name].append(_time(steps[name], effort.steps, device))
    n_rows, length = batch["input_ids"].shape
    n_tokens = int(batch["attention_mask"].sum())
    rows = []
    for name in steps:
        if name not in milliseconds:
            rows.append(SpeedRow(*name, length, n_rows, None, None, None))
            continue
        p20, *_, p80 = statistics.quantiles(milliseconds[name], n=5, method="inclusive")
        p50 = statistics.median(milliseconds[name])
        rows.append(SpeedRow(*name, length, n_rows, n_tokens / p50 * 1e3, (p20, p50, p80), peaks.get(name)))
    return rows


def _time(step: Callable[[], None], times: int, device: torch.device) -> float:
    """Time some steps: their mean in milliseconds, between two idle points of the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(times):
        step()
    wait()
    return (time.perf_counter() - start) * 1e3 / times
