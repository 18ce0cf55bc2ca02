"""BERT with one of the position schemes: its training by transformers' Trainer, its held-out loss, its speed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import default_convert
from transformers import BertConfig, BertForMaskedLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ropewalk.bench.core.timing import at_parts, interleave, peak_memory, time_on_cpu
from ropewalk.experiments.bert_positions import data
from ropewalk.experiments.bert_positions.config import Config, attention_class_of
from ropewalk.experiments.bert_positions.data import Corpus, TrainingBatches, derive_seed, make_batch
from ropewalk.experiments.bert_positions.figures import HUGGING_FACE
from ropewalk.integrations.huggingface import convert_bert, register

ATTENTIONS = ("sdpa", "eager", "ropewalk")
MULTIPLES = (1, 4)  # of the training length: where speed is measured
TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 16}  # in a forward of an evaluation
_PAD_ID = _SEED = 0  # of what speed is measured by
Row = dict[str, Any]  # of a record


# Tokens of a batch that is timed, at most, with the padding; steps to warm up each candidate; steps of one between two
# waits for the device; seconds, after which no further round of a length begins.
EFFORTS = {"cpu": (1 << 9, 1, 1, 1.5), "cuda": (1 << 15, 3, 5, 7.0)}


class MaskedBert(BertForMaskedLM):  # type: ignore[misc]
    """BERT whose wide head reads the masked tokens alone, one in seven; a batch is that of `make_batch`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, masked: Tensor, labels: Tensor, **step: Any) -> Any:
        """Return logits (M, vocab), and the sum of the cross-entropies over the number of labels of the whole step."""
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.cls(hidden.flatten(0, 1).index_select(0, masked)).float()
        total = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / step.get("num_items_in_batch", len(labels)), "logits": logits}


def plain_bert(config: Config, vocab_size: int, pad_id: int, **more: Any) -> MaskedBert:
    """Make transformers' BERT, with its table of positions, of the experiment's sizes."""
    more |= {"vocab_size": vocab_size, "pad_token_id": pad_id, "max_position_embeddings": config.longest}
    more |= {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    more |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    more |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.dropout}
    return MaskedBert(BertConfig(**more))


def make_model(config: Config, scheme: str, seed: int, vocab_size: int, pad_id: int) -> MaskedBert:
    """Make a BERT of the scheme, in float32 on the CPU; the common weights of all schemes of a seed start equal."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed("weights", seed))
        model = plain_bert(config, vocab_size, pad_id)
        torch.default_generator.manual_seed(derive_seed("positions", scheme, seed))  # of what the scheme adds
        return convert_bert(model, attention_class_of(scheme), **config.options_of(scheme))


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Make AdamW; biases, norms and other parameters of one dimension do not decay."""
    groups: list[Row] = [{"params": [x for x in model.parameters() if x.ndim > 1], "weight_decay": config.weight_decay}]
    groups.append({"params": [x for x in model.parameters() if x.ndim <= 1], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)


def learning_rate(config: Config, step: int) -> float:
    """Return the share of the rate at a step, from 0 on: along a line up to 1, then to 0 as `decay` says.

    `decay` is a line, half a period of a cosine, or the square of the share of the steps that is left.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return (step + 1) / warmup
    left = (config.steps - step) / max(1, config.steps - warmup)
    return {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "quadratic": left**2}[config.decay]


def autocast(config: Config, device: torch.device) -> torch.autocast:
    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision_on(device)]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def train_run(
    config: Config, corpus: Corpus, scheme: str, seed: int, folder: Path, device: torch.device, console: Console
) -> tuple[MaskedBert, Row]:
    """Train a BERT, from the newest checkpoint in its folder if there is one: the model, and its row of the record."""
    model = make_model(config, scheme, seed, len(corpus.tokenizer), corpus.tokenizer.pad_token_id)
    batches = TrainingBatches(corpus, config, seed)
    arguments = training_arguments(config, folder, device, derive_seed("dropout", seed) % 2**32)
    model.to(arguments.device)
    if config.compile_layers:
        for layer in model.bert.encoder.layer:
            layer.compile()  # in place, once for all: the names of the weights stay
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    optimizer, progress = make_optimizer(model, config), _Progress(f"{scheme}, seed {seed}", console)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(config, step))
    parts = {"optimizers": (optimizer, schedule), "callbacks": [progress]}
    trainer = Trainer(model, arguments, default_convert, batches, **parts)  # the data set makes a batch at once
    trainer.remove_callback(PrinterCallback)
    with arguments.main_process_first():  # which deletes what is not whole
        checkpoint = newest_checkpoint(folder)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except (OSError, RuntimeError, SafetensorError) as error:
        if checkpoint is None or progress.started:
            raise
        raise ValueError(f"{checkpoint} cannot be resumed: delete {folder} to start this run anew ({error})") from error
    lines = pd.DataFrame([line for line in trainer.state.log_history if "loss" in line])
    rates = lines.step.diff().fillna(lines.step) / lines.seconds.diff().fillna(lines.seconds).clip(lower=1e-3)
    tokens = int(corpus.windows[batches.order, 1].sum()) / config.steps  # of a step
    row = {"kind": "training", "scheme": scheme, "seed": seed}
    row |= {"steps": lines.step.tolist(), "losses": lines.loss.tolist()}  # nats per masked token, means since the last
    row |= {"tokens_per_second": tokens * rates.median(), "seconds": lines.seconds.iloc[-1]}  # without padding
    return model, row | {"parameters": model.num_parameters()}


def training_arguments(config: Config, folder: Path, device: torch.device, seed: int) -> TrainingArguments:
    """Make the arguments of a Trainer that waits for the device at a line of metrics alone."""
    precision, on_cpu = config.precision_on(device), device.type == "cpu"
    if precision == "fp16" and on_cpu:
        raise ValueError("precision is 'fp16', but on a CPU must be 'no', 'bf16' or 'auto'")
    settings: Row = {
        "train_sampling_strategy": "sequential",  # the data set is in the order of training
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # it would wait for the device at each step; the callback looks at the loss
        "disable_tqdm": True,
        "save_total_limit": 1,
        "ddp_find_unused_parameters": False,
        "ddp_timeout": 86_400,  # of processes that wait while the main one evaluates
    }
    settings |= {"output_dir": str(folder), "seed": seed, "use_cpu": on_cpu, "max_steps": config.steps}
    settings |= {"bf16": precision == "bf16", "fp16": precision == "fp16", "max_grad_norm": config.max_grad_norm}
    settings |= {"gradient_accumulation_steps": config.accumulation_steps, "logging_steps": config.log_every}
    settings |= {
        "report_to": "tensorboard" if find_spec("tensorboard") else "none",
        "save_steps": config.checkpoint_every,
    }
    # Masks are drawn on the CPU, ahead.
    settings |= {"dataloader_num_workers": 0 if on_cpu else 2, "dataloader_pin_memory": not on_cpu}
    arguments = TrainingArguments(**settings)
    arguments._n_gpu = 1  # of a process: with more, the Trainer would wrap the model in DataParallel
    parts = config.accumulation_steps * arguments.world_size
    arguments.per_device_train_batch_size, rest = divmod(config.batch_size, parts)
    if rest:
        must = f"be divisible by {parts}, accumulation_steps times the processes"
        raise ValueError(f"batch_size is {config.batch_size}, but must {must}")
    return arguments


class _Progress(TrainerCallback):  # type: ignore[misc]
    """Log seconds, over all resumes, and the last step; show how far it is; refuse a loss that is not finite."""

    def __init__(self, title: str, console: Console) -> None:
        self.title, self.console, self.started, self.seconds = title, console, 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seconds = max((line.get("seconds", 0.0) for line in state.log_history), default=0.0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_log |= state.global_step == state.max_steps

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        line, step, steps = state.log_history[-1], state.global_step, state.max_steps
        if "loss" not in line:
            return
        if not math.isfinite(line["loss"]):
            what = f"the loss of {self.title} is {line['loss']} at step {step}"
            raise ValueError(f"{what}: learning_rate may be too large, or precision too low")
        line["seconds"] = round(self.seconds + time.perf_counter() - self.started, 3)
        is_due = step * 4 // steps > (step - args.logging_steps) * 4 // steps
        if state.is_world_process_zero and (is_due or step == steps):
            text = f"{self.title}: step {step} of {steps}, loss {line['loss']:.3f}, {line['seconds']:.0f} s"
            self.console.print(text, markup=False, highlight=False)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run; what a kill left unfinished after it is deleted."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2])):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))  # its last file
            return path
        except (OSError, ValueError):
            shutil.rmtree(path)
    return None


@torch.no_grad()
def evaluate(
    model: MaskedBert, corpus: Corpus, config: Config, scheme: str, seed: int, device: torch.device
) -> list[Row]:
    """Compute a row of the record for each length: the same masked tokens, in the precision of the training."""
    model.eval()
    rows = []
    for length in (config.train_length * multiple for multiple in config.length_multiples):
        totals, n_labels = torch.zeros(2, dtype=torch.float64, device=device), 0
        for batch in data.evaluation_batches(corpus, config, length, TOKENS_AT_ONCE[device.type]):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with autocast(config, device):
                found = model(**batch, num_items_in_batch=1)
            n_right = (found["logits"].argmax(-1) == batch["labels"]).sum()
            totals += torch.stack((found["loss"].double(), n_right.double()))
            n_labels += len(batch["labels"])
        if n_labels == 0:
            raise ValueError(f"the held-out text has no masked token at length {length}, but must have one")
        loss, accuracy = (totals / n_labels).tolist()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of {scheme}, seed {seed}, is {loss} at length {length}: it diverged")
        run_keys = {"kind": "evaluation", "scheme": scheme, "seed": seed, "length": length}
        rows.append(run_keys | {"loss": loss, "accuracy": accuracy, "n_labels": n_labels})
    return rows


def measure_speed(config: Config, vocab_size: int, device: torch.device, console: Console) -> list[Row]:
    """Measure training steps, interleaved, at the training length and at four times that: rows of the record.

    A candidate is a BERT of each scheme by Ropewalk, and transformers' as it is by three attentions, on one batch that
    lies on the device, of as many tokens, with the padding, at both lengths. Numbers are None where one ran out of
    memory. The peak is what a step allocates beyond weights, the optimiser's moments and the batch.
    """
    if max(config.length_multiples) < max(MULTIPLES):  # tables of positions must have as many rows
        config = dataclasses.replace(config, length_multiples=list(MULTIPLES))
    register()
    rows = []
    for multiple in MULTIPLES:
        console.print(f"speed: step of {config.train_length * multiple} tokens", highlight=False)
        rows += _measure(config, multiple, vocab_size, device)
    return rows


def _measure(config: Config, multiple: int, vocab_size: int, device: torch.device) -> list[Row]:
    (most_tokens, warmup, n_steps, seconds), wait = EFFORTS[device.type], torch.get_device_module(device).synchronize
    batch = {name: x.to(device) for name, x in draw_batch(config, multiple, vocab_size, most_tokens).items()}
    (n_rows, length), n_tokens = batch["input_ids"].shape, int(batch["attention_mask"].sum())
    models = {(x, "ropewalk"): make_model(config, x, _SEED, vocab_size, _PAD_ID) for x in config.schemes}
    for x in ATTENTIONS:
        models[HUGGING_FACE, x] = plain_bert(config, vocab_size, _PAD_ID, attn_implementation=x)
    steps = {"/".join(name): _make_step(model, config, device, batch) for name, model in models.items()}
    rows, peaks = [], dict[str, int | None]()
    for name, step in steps.items():
        try:
            for _ in range(warmup):
                step()
            peaks[name] = peak_memory(step, device) if device.type == "cuda" else None
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()

    def some_steps(name: str) -> None:
        for _ in range(n_steps):
            steps[name]()
        wait()

    def one_round(names: Sequence[str]) -> dict[str, float]:
        return {name: time_on_cpu(partial(some_steps, name)) / 1e3 / n_steps for name in names}

    wait()
    times = interleave(peaks, one_round, warmup=0, rounds=15, max_seconds=seconds)
    for (model, attention), name in zip(models, steps, strict=True):
        step_ms = at_parts(times[name], 0.2, 0.5, 0.8) if name in times else None
        row = {"kind": "speed", "model": model, "attention": attention, "length": length, "batch": n_rows}
        row |= {"tokens_per_second": step_ms and n_tokens / step_ms[1] * 1e3, "step_ms": step_ms}
        rows.append(row | {"peak_bytes": peaks.get(name)})
    return rows


def draw_batch(config: Config, multiple: int, vocab_size: int, most_tokens: int) -> dict[str, Tensor]:
    """Draw random tokens, as many windows, a multiple of four, as training has in a part, or as fit."""
    windows = min(config.batch_size // config.accumulation_steps, most_tokens // config.train_length)
    n_rows, length = max(1, windows // max(MULTIPLES)) * max(MULTIPLES) // multiple, config.train_length * multiple
    generator = torch.Generator().manual_seed(_SEED)
    is_token = torch.arange(length) < torch.randint((length + 1) // 2, length + 1, (n_rows, 1), generator=generator)
    ids = torch.randint(_PAD_ID + 1, vocab_size, (n_rows, length), generator=generator)
    is_masked = is_token & (torch.rand(n_rows, length, generator=generator) < config.mask_probability)
    is_masked[0, 0] = True
    return make_batch(ids.masked_fill(~is_token, _PAD_ID), is_token, ids.masked_fill(~is_masked, -100))


def _make_step(model: nn.Module, config: Config, device: torch.device, batch: dict[str, Tensor]) -> Callable[[], None]:
    optimizer = make_optimizer(model.to(device).train(), config)
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
