"""Training one BERT, of one scheme and seed, by transformers' Trainer; a stopped run resumes exactly."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import default_convert
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ropewalk.experiments.bert_positions.batches import TrainingBatches, derive_seed
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus
from ropewalk.experiments.bert_positions.model import MaskedBert, make_model
from ropewalk.experiments.bert_positions.record import TrainingRow

STATE = "trainer_state.json"  # a checkpoint's last file
_REPORTS = 4  # lines of a run on the console


def train_run(
    config: Config, corpus: Corpus, scheme: str, seed: int, folder: Path, device: torch.device, console: Console
) -> tuple[MaskedBert, TrainingRow]:
    """Train a BERT of one scheme and seed, from the newest checkpoint in its folder if there is one.

    A run that is finished is not trained again. Weights and data are the same for all schemes of a seed.

    Returns:
        The trained model, on the device, and the losses and speed of its training.

    Raises:
        ValueError: a checkpoint that is damaged; a loss that is not finite.
    """
    model = make_model(config, scheme, seed, len(corpus.tokenizer), corpus.tokenizer.pad_token_id)
    batches = TrainingBatches(corpus, config, seed)
    arguments = training_arguments(config, folder, device, derive_seed("dropout", seed) % 2**32)
    model.to(arguments.device)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trainer = BertTrainer(config, f"{scheme}, seed {seed}", console, model, arguments, batches)
    with arguments.main_process_first():  # which deletes what is not whole
        checkpoint = newest_checkpoint(folder)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except (OSError, RuntimeError, SafetensorError) as error:
        if checkpoint is None or trainer.started:
            raise
        raise ValueError(f"{checkpoint} cannot be resumed: delete {folder} to start this run anew ({error})") from error
    losses = [line for line in trainer.state.log_history if "loss" in line]
    ends = [(line["step"], line["seconds"]) for line in losses]
    rates = [(b[0] - a[0]) / max(b[1] - a[1], 1e-3) for a, b in zip([(0, 0.0), *ends], ends, strict=False)]
    tokens_of_a_step = statistics.mean(map(batches.tokens_of, range(config.steps)))
    row = TrainingRow(
        scheme=scheme,
        seed=seed,
        steps=[line["step"] for line in losses],
        losses=[line["loss"] for line in losses],
        tokens_per_second=tokens_of_a_step * statistics.median(rates),
        seconds=losses[-1]["seconds"],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return model, row


def training_arguments(config: Config, folder: Path, device: torch.device, seed: int) -> TrainingArguments:
    """Make the arguments of a Trainer that waits for the device at a line of metrics alone."""
    precision, on_cpu = config.precision_on(device), device.type == "cpu"
    if precision == "fp16" and on_cpu:
        raise ValueError("precision is 'fp16', but on a CPU must be 'no', 'bf16' or 'auto'")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        gradient_accumulation_steps=config.accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        seed=seed,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=on_cpu,
        train_sampling_strategy="sequential",  # the data set is in the order of training
        remove_unused_columns=False,
        dataloader_num_workers=0 if on_cpu else 2,  # masks are drawn on the CPU, ahead
        dataloader_pin_memory=not on_cpu,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # it would wait for the device at each step; `log` looks at the loss
        save_steps=config.checkpoint_every,
        save_total_limit=1,
        ddp_find_unused_parameters=False,
        ddp_timeout=24 * 3600,  # of processes that wait while the main one evaluates
        report_to="tensorboard" if find_spec("tensorboard") else "none",
        disable_tqdm=True,
    )
    parts = config.accumulation_steps * arguments.world_size
    arguments._n_gpu = 1  # of a process: with more, the Trainer would wrap the model in DataParallel
    if config.batch_size % parts:
        raise ValueError(
            f"batch_size is {config.batch_size}, but must be divisible by the accumulation steps times the processes, "
            f"{config.accumulation_steps} × {arguments.world_size}"
        )
    arguments.per_device_train_batch_size = config.batch_size // parts
    return arguments


class BertTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that logs seconds, over all resumes, shows how far it is, and refuses a loss that is not finite."""

    def __init__(
        self,
        config: Config,
        title: str,
        console: Console,
        model: MaskedBert,
        arguments: TrainingArguments,
        batches: TrainingBatches,
    ) -> None:
        self.title, self.console, self.started, self.seconds = title, console, 0.0, 0.0
        optimizer = make_optimizer(model, config)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(config, step))
        super().__init__(
            model,
            arguments,
            default_convert,  # a batch is made at once, by the data set
            batches,
            optimizers=(optimizer, schedule),
            callbacks=[_LogLast(self)],
        )
        self.remove_callback(PrinterCallback)  # `log` prints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the seconds, and print a line now and then."""
        if "loss" in logs:
            step, steps = self.state.global_step, self.args.max_steps
            if not math.isfinite(logs["loss"]):
                raise ValueError(
                    f"the loss of {self.title} is {logs['loss']} at step {step}: learning_rate may be too large, or "
                    "precision too low"
                )
            logs["seconds"] = round(self.seconds + time.perf_counter() - self.started, 3)
            due = step * _REPORTS // steps > (step - self.args.logging_steps) * _REPORTS // steps
            if self.is_world_process_zero() and (due or step == steps):
                line = f"{self.title}: step {step} of {steps}, loss {logs['loss']:.3f}, {logs['seconds']:.0f} s"
                self.console.print(line, markup=False, highlight=False)
        super().log(logs, start_time)


class _LogLast(TrainerCallback):  # type: ignore[misc]
    """Log the last step, whatever `logging_steps`, and count seconds from where a run is resumed."""

    def __init__(self, trainer: BertTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.seconds = max((line.get("seconds", 0.0) for line in state.log_history), default=0.0)
        self.trainer.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_log |= state.global_step == state.max_steps


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run; what a kill left unfinished after it is deleted."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2])):
        try:
            json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(path)
            continue
        return path
    return None


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Make AdamW; biases, norms and other parameters of one dimension do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)


def learning_rate(config: Config, step: int) -> float:
    """Return the share of the rate at a step, counted from 0: along a line up to 1, then along one to 0."""
    warmup = round(config.warmup * config.steps)
    return (step + 1) / warmup if step < warmup else (config.steps - step) / max(1, config.steps - warmup)
