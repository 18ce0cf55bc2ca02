"""The speed and memory of a training step by each scheme, against Hugging Face's own BERT.

A candidate is a model of the experiment's size with an optimiser of its own: one by Ropewalk for each scheme, and
transformers' BERT as it is, with its learned table of positions, by attention "sdpa", "eager" and "ropewalk". A step is
a forward, the loss of the masked tokens alone, a backward, the clipping of gradients and AdamW, in the precision of the
training, on one batch that lies on the device. The batches of both lengths have the same number of tokens with the
padding; a row has, by a seed, half of the length or more in tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor, nn

from ropewalk.bench.core.timing import interleave, peak_memory, time_on_cpu
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.data import make_batch
from ropewalk.experiments.bert_positions.figures import HUGGING_FACE
from ropewalk.experiments.bert_positions.training import autocast, make_model, make_optimizer, plain_bert
from ropewalk.integrations.huggingface import register

ATTENTIONS = ("sdpa", "eager", "ropewalk")
MULTIPLES = (1, 4)  # of the training length
_PAD_ID = _SEED = 0


class Effort(NamedTuple):
    """The amount of measurement on a kind of device."""

    tokens: int  # of a batch, at most, with the padding
    warmup: int  # steps of each candidate
    steps: int  # of one candidate between two waits for the device
    seconds: float  # after so many, no further round of a length begins


EFFORTS = {"cpu": Effort(1 << 9, warmup=1, steps=1, seconds=1.5), "cuda": Effort(1 << 15, 3, steps=5, seconds=7.0)}


def measure_speed(config: Config, vocab_size: int, device: torch.device, console: Console) -> list[dict[str, Any]]:
    """Measure all candidates, interleaved, at the training length and at four times that: rows of the record.

    Numbers are None where one ran out of memory. The peak is what a step allocates at the most beyond what it found:
    activations, gradients and what is temporary, but not weights, the optimiser's moments and the batch.
    """
    if max(config.length_multiples) < max(MULTIPLES):  # tables of positions must have as many rows
        config = dataclasses.replace(config, length_multiples=list(MULTIPLES))
    register()
    rows = []
    for multiple in MULTIPLES:
        console.print(f"speed: step of {config.train_length * multiple} tokens", highlight=False)
        rows += _measure(config, multiple, vocab_size, device)
    return rows


def _measure(config: Config, multiple: int, vocab_size: int, device: torch.device) -> list[dict[str, Any]]:
    """Warm up, measure memory, then time in rounds those that did not run out of memory."""
    effort, peaks = EFFORTS[device.type], dict[str, int | None]()
    batch = draw_batch(config, multiple, vocab_size, effort.tokens)
    (n_rows, length), n_tokens = batch["input_ids"].shape, int(batch["attention_mask"].sum())
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    models = {f"{x}/ropewalk": make_model(config, x, _SEED, vocab_size, _PAD_ID) for x in config.schemes}
    for x in ATTENTIONS:
        models[f"{HUGGING_FACE}/{x}"] = plain_bert(config, vocab_size, _PAD_ID, attn_implementation=x)
    steps = {name: _make_step(model, config, device, batch) for name, model in models.items()}
    for name, step in steps.items():
        try:
            for _ in range(effort.warmup):
                step()
            peaks[name] = peak_memory(step, device) if device.type == "cuda" else None
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def some_steps(step: Callable[[], None]) -> None:
        for _ in range(effort.steps):
            step()
        wait()

    def one_round(names: Sequence[str]) -> dict[str, float]:
        wait()
        return {name: time_on_cpu(partial(some_steps, steps[name])) / 1e3 / effort.steps for name in names}

    times = interleave(peaks, one_round, warmup=0, rounds=15, max_seconds=effort.seconds)
    rows = []
    for name in steps:
        model, attention = name.split("/")
        step_ms = pd.Series(times[name]).quantile([0.2, 0.5, 0.8]).tolist() if name in times else None
        row = {"kind": "speed", "model": model, "attention": attention, "length": length, "batch": n_rows}
        row |= {"tokens_per_second": step_ms and n_tokens / step_ms[1] * 1e3, "step_ms": step_ms}
        rows.append(row | {"peak_bytes": peaks.get(name)})
    return rows


def draw_batch(config: Config, multiple: int, vocab_size: int, most_tokens: int) -> dict[str, Tensor]:
    """Draw random tokens, as many windows, a multiple of four, as training has in a part, or as fit."""
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
