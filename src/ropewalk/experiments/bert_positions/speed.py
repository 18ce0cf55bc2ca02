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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import nn

from ropewalk.bench.core.terminal import progress_bar
from ropewalk.bench.core.timing import peak_memory
from ropewalk.experiments.bert_positions.batches import NO_LABEL, Batch, n_masked_of
from ropewalk.experiments.bert_positions.evaluation import autocast_of
from ropewalk.experiments.bert_positions.model import bert_config, make_model, mlm_loss
from ropewalk.experiments.bert_positions.record import HUGGING_FACE, SpeedRow
from ropewalk.experiments.bert_positions.training import make_optimizer

if TYPE_CHECKING:
    from ropewalk.experiments.bert_positions.config import Config

ATTENTIONS = ("sdpa", "eager", "ropewalk")
MULTIPLES = (1, 4)  # of the training length
_PAD_ID = 0
_SEED = 0


@dataclass(frozen=True)
class Effort:
    """The amount of measurement on a kind of device."""

    tokens: int  # of a batch, at most, with the padding
    warmup: int  # steps of each candidate
    steps: int  # of one candidate between two waits for the device
    least_rounds: int
    most_rounds: int
    seconds: float  # after so many, no further round of a length begins


EFFORTS = {
    "cpu": Effort(tokens=1 << 9, warmup=1, steps=1, least_rounds=3, most_rounds=15, seconds=1.5),
    "cuda": Effort(tokens=1 << 15, warmup=3, steps=5, least_rounds=3, most_rounds=15, seconds=7.0),
}


@dataclass
class _Candidate:
    """A model to measure, and its times: milliseconds of a step, each the mean of a group."""

    name: str
    attention: str
    step: Callable[[Batch], None]
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    failed: bool = False


def measure_speed(config: Config, vocab_size: int, device: torch.device, console: Console) -> list[SpeedRow]:
    """Measure all candidates at the training length and at four times that.

    They take turns, a few steps each, in a new order each round; the device is waited for before and after those alone.
    Times are the 20 %, 50 % and 80 % quantiles over rounds, tokens/s the tokens without padding over the median. The
    peak of memory is of one step, after the first: what PyTorch has allocated at the most in it, beyond what it found,
    which is weights, the optimiser's moments and the batch. So it has activations, gradients and what is temporary.

    Args:
        config: of the experiment; its scheme's models, sizes, dropout and precision are measured.
        vocab_size: that of the tokeniser.
        device: of the models.
        console: where a bar is shown.
    """
    effort = EFFORTS[device.type]
    if max(config.length_multiples) < max(MULTIPLES):  # tables of positions must have as many rows
        config = dataclasses.replace(config, length_multiples=MULTIPLES)
    rows: list[SpeedRow] = []
    with progress_bar(console, seconds_between_lines=5.0) as progress:
        task = progress.add_task("speed", total=len(MULTIPLES) * effort.most_rounds)
        for multiple in MULTIPLES:
            batch = make_batch(config, multiple, vocab_size, device, effort.tokens)
            candidates = list(_candidates(config, vocab_size, device))
            _measure(candidates, batch, device, effort, progress, task)
            rows += [_as_row(candidate, batch) for candidate in candidates]
            del candidates
    return rows


def make_batch(config: Config, multiple: int, vocab_size: int, device: torch.device, most_tokens: int) -> Batch:
    """Draw random tokens, as many windows as training has in a part, or as fit; a fourth of them four times as long.

    At the training length there are four windows or more, a multiple of four.
    """
    windows = min(config.batch_size // config.accumulation_steps, most_tokens // config.train_length)
    batch, length = max(1, windows // max(MULTIPLES)) * max(MULTIPLES) // multiple, config.train_length * multiple
    generator = torch.Generator().manual_seed(_SEED)
    lengths = torch.randint((length + 1) // 2, length + 1, (batch, 1), generator=generator)
    mask = torch.arange(length) < lengths
    tokens = torch.randint(_PAD_ID + 1, vocab_size, (batch, length), generator=generator)
    count = n_masked_of(length, config.mask_probability)
    masked = torch.rand(batch, length, generator=generator).masked_fill(~mask, -1).topk(count).indices
    scored = torch.arange(count) < (config.mask_probability * lengths.double() + 0.5).long().clamp(1)
    return Batch(
        input_ids=tokens.masked_fill(~mask, _PAD_ID).to(device),
        attention_mask=mask.long().to(device),
        masked=masked.to(device),
        labels=tokens.gather(1, masked).masked_fill(~scored, NO_LABEL).to(device),
        n_labels=int(scored.sum()),
        n_tokens=int(mask.sum()),
    )


def _candidates(config: Config, vocab_size: int, device: torch.device) -> Iterator[_Candidate]:
    """Make Ropewalk's models, and transformers' own of the same size."""
    for scheme in config.schemes:
        model = make_model(config, scheme, _SEED, vocab_size, _PAD_ID)
        yield _Candidate(scheme, "ropewalk", _make_step(model, config, device))
    for attention in ATTENTIONS:
        yield _Candidate(HUGGING_FACE, attention, _make_step(plain_bert(config, vocab_size, attention), config, device))


def plain_bert(config: Config, vocab_size: int, attention: str) -> Any:
    """Make transformers' `BertForMaskedLM` of the experiment's size, by one of its attention implementations."""
    from transformers import BertForMaskedLM

    from ropewalk.integrations.huggingface import register

    register()
    return BertForMaskedLM(bert_config(config, vocab_size, _PAD_ID, attn_implementation=attention))


def _make_step(model: nn.Module, config: Config, device: torch.device) -> Callable[[Batch], None]:
    """Make a training step of a model, as training does it."""
    model.to(device).train()
    optimizer = make_optimizer(model, config, fused=device.type == "cuda")
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def step(batch: Batch) -> None:
        with autocast_of(config.precision, device):
            loss = mlm_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure(
    candidates: Sequence[_Candidate],
    batch: Batch,
    device: torch.device,
    effort: Effort,
    progress: Progress,
    task: TaskID,
) -> None:
    """Warm up, measure memory, then time in rounds; a candidate that runs out of memory is left out from there on."""
    for candidate in candidates:
        progress.update(task, description=f"{candidate.name} at {batch.input_ids.shape[1]}")
        _warm_up(candidate, batch, device, effort)
    order, shuffle = [c for c in candidates if not c.failed], random.Random(_SEED).shuffle
    deadline = time.perf_counter() + effort.seconds
    for done in range(effort.most_rounds):
        if done >= effort.least_rounds and time.perf_counter() > deadline:
            progress.advance(task, effort.most_rounds - done)
            break
        shuffle(order)
        for candidate in order:
            candidate.milliseconds.append(_time_steps(candidate, batch, device, effort.steps))
        progress.advance(task)


def _warm_up(candidate: _Candidate, batch: Batch, device: torch.device, effort: Effort) -> None:
    """Run the first steps, measure the memory of one more, and note candidates without enough."""
    try:
        for _ in range(effort.warmup):
            candidate.step(batch)
        if device.type == "cuda":
            candidate.peak_bytes = peak_memory(lambda: candidate.step(batch), device)
    except torch.OutOfMemoryError:
        candidate.failed = True
        torch.cuda.empty_cache()


def _time_steps(candidate: _Candidate, batch: Batch, device: torch.device, steps: int) -> float:
    """Time some steps: their mean in milliseconds, between two idle points of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        candidate.step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / steps


def _as_row(candidate: _Candidate, batch: Batch) -> SpeedRow:
    size, length = batch.input_ids.shape
    if candidate.failed:
        return SpeedRow(candidate.name, candidate.attention, length, size, None, None, None)
    p20, *_, p80 = statistics.quantiles(candidate.milliseconds, n=5, method="inclusive")
    p50 = statistics.median(candidate.milliseconds)
    tokens_per_second = batch.n_tokens / p50 * 1e3
    step_ms = (p20, p50, p80)
    return SpeedRow(candidate.name, candidate.attention, length, size, tokens_per_second, step_ms, candidate.peak_bytes)
