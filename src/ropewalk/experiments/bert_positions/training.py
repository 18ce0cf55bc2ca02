"""Training one BERT, of one scheme and seed; a stopped run resumes exactly.

No step waits for the device: the loss is added up there, and read when a line of metrics is due.
"""

from __future__ import annotations

import datetime
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.batches import training_batch
from ropewalk.experiments.bert_positions.checkpoint import load_checkpoint, save_checkpoint
from ropewalk.experiments.bert_positions.config import Config, resolve_precision
from ropewalk.experiments.bert_positions.corpus import Corpus
from ropewalk.experiments.bert_positions.model import TrainingLoss, make_model
from ropewalk.experiments.bert_positions.seeds import derive_seed
from ropewalk.experiments.bert_positions.training_log import TrainingLog

PATIENCE = datetime.timedelta(days=1)  # of processes that wait while the main one reads a corpus, or evaluates
_OF_OTHER_RUNS = ("schemes", "seeds")  # what of a configuration a run does not depend on


@dataclass
class _Totals:
    """Counts of one process's training. Those of tokens and of the loss begin anew with each line of metrics."""

    loss: Tensor  # this process's part of the batches' mean losses, float64, on the device
    tokens: int = 0
    all_tokens: int = 0  # of all processes, up to the last line of metrics
    steps_logged: int = 0  # at the last line of metrics
    seconds: float = 0.0  # of training, before `since`
    since: float = 0.0


def train_run(
    config: Config,
    corpus: Corpus,
    scheme: str,
    seed: int,
    folder: Path,
    accelerator: Any,
    console: Console,
    title: str = "",
) -> Any:
    """Train a BERT of one scheme and seed, from the newest checkpoint in its folder if there is one.

    The folder gets `metrics.jsonl`, a line for every so many steps; `tensorboard`, the same for TensorBoard; and a
    checkpoint, the last of which has the trained weights. A run that is finished is not trained again.

    Args:
        config: sizes, steps, how often to write what.
        corpus: what it learns from.
        scheme: of `SCHEMES`.
        seed: of weights, data and dropout. Weights and data are the same for all schemes.
        folder: of this run, made where it is missing.
        accelerator: accelerate's, which says on what, by how many processes and in which precision.
        console: where the main process shows how far it is.
        title: what is shown there of this run.

    Returns:
        The trained `BertForMaskedLM`, on the accelerator's device, in evaluation mode.

    Raises:
        ValueError: a checkpoint that is damaged or of another configuration; a loss that is not finite.
    """
    settings = {
        **{key: value for key, value in config.as_dict().items() if key not in _OF_OTHER_RUNS},
        "scheme": scheme,
        "seed": seed,
        "corpus_sha256": corpus.sha256,
        "processes": accelerator.num_processes,
    }
    with _own_random_state(derive_seed("dropout", seed, accelerator.process_index), accelerator.device):
        model = make_model(config, scheme, seed, corpus.vocab_size, corpus.pad_id)
        checkpoint = load_checkpoint(folder, settings)
        if checkpoint is not None:
            model.load_state_dict(checkpoint.parts["model"])
        if checkpoint is None or checkpoint.step < config.steps:
            run = _Run(config, corpus, seed, folder, settings, accelerator, model)
            start = 0 if checkpoint is None else run.restore(checkpoint.step, checkpoint.parts)
            logged = run.totals.steps_logged
            if accelerator.is_main_process:
                title = title or f"{scheme}, seed {seed}"
                with TrainingLog(folder, start, logged, config.steps, console, title) as log:
                    run.train(start, log)
            else:
                run.train(start, None)
            accelerator.free_memory()
    return model.to(accelerator.device).eval()


@contextmanager
def make_accelerator(config: Config, device: torch.device) -> Iterator[Any]:
    """Make accelerate's Accelerator; its process-wide state is cleared afterwards if there was none before."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, is_initialized

    precision = resolve_precision(config.precision, device)
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision is 'fp16', but on a CPU must be 'no', 'bf16' or 'auto'")
    was_there = is_initialized()
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=device.type == "cpu",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PATIENCE),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    try:
        yield accelerator
        if not was_there:
            accelerator.end_training()
    finally:
        if not was_there and accelerator.num_processes == 1:
            AcceleratorState._reset_state(reset_partial_state=True)


class _Run:
    """A model in training, with all that its next step depends on."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        seed: int,
        folder: Path,
        settings: Mapping[str, Any],
        accelerator: Any,
        model: nn.Module,
    ) -> None:
        self.config, self.corpus, self.seed = config, corpus, seed
        self.folder, self.settings, self.accelerator, self.model = folder, settings, accelerator, model
        model.to(accelerator.device)
        self.loss = accelerator.prepare_model(TrainingLoss(model, accelerator.num_processes))
        self.optimizer = make_optimizer(model, config)
        self.parameters = list(model.parameters())
        self.totals = _Totals(torch.zeros((), dtype=torch.float64, device=accelerator.device))

    def train(self, start: int, log: TrainingLog | None) -> None:
        """Run all steps from `start` on, with their metrics and checkpoints."""
        config, totals = self.config, self.totals
        self.model.train()
        totals.since = time.perf_counter()
        for step in range(start, config.steps):
            self.step(step)
            done = step + 1
            if done % config.log_every == 0 or done == config.steps:
                self.log(done, log)
            if done % config.checkpoint_every == 0 or done == config.steps:
                if log is not None:
                    log.bring_to_disk()
                self.save(done)
        self.accelerator.wait_for_everyone()

    def step(self, step: int) -> None:
        """Run one step of the optimiser, without waiting for the device."""
        config, accelerator, scaler = self.config, self.accelerator, self.accelerator.scaler
        n_parts = config.accumulation_steps * accelerator.num_processes
        for index in range(config.accumulation_steps):
            batch = training_batch(
                self.corpus,
                config,
                self.seed,
                step,
                accelerator.device,
                part=index * accelerator.num_processes + accelerator.process_index,
                n_parts=n_parts,
            )
            is_last = index == config.accumulation_steps - 1
            with nullcontext() if is_last else accelerator.no_sync(self.loss):
                loss = self.loss(batch)
                (loss if scaler is None else scaler.scale(loss)).backward()
            self.totals.loss += loss.detach()
            self.totals.tokens += batch.n_tokens
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # accelerate's own wrappers of what follows look for packages and signatures in every step.
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def log(self, done: int, log: TrainingLog | None) -> None:
        """Write a line of metrics: the mean loss over the steps since the last one."""
        totals, processes = self.totals, self.accelerator.num_processes
        tokens = torch.tensor(totals.tokens, dtype=torch.float64, device=totals.loss.device)
        sums = self.accelerator.reduce(torch.stack((totals.loss, tokens)), reduction="sum").tolist()
        loss = sums[0] / processes / (done - totals.steps_logged)  # each process has its part times their number
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of {self.settings['scheme']}, seed {self.seed}, is {loss} at step {done}: learning_rate, "
                f"{self.config.learning_rate}, may be too large, or precision too low"
            )
        totals.loss.zero_()
        totals.all_tokens += int(sums[1])
        totals.tokens, totals.steps_logged = 0, done
        if log is not None:
            rate, seconds = learning_rate(self.config, done - 1), round(self.seconds(), 3)
            line = {"step": done, "loss": loss, "learning_rate": rate, "tokens": totals.all_tokens, "seconds": seconds}
            log.append(line)

    def seconds(self) -> float:
        """Return the seconds of training, over all resumes."""
        return self.totals.seconds + time.perf_counter() - self.totals.since

    def save(self, done: int) -> None:
        """Write a checkpoint; of a finished run one that has nothing but the weights."""
        from accelerate.utils import gather_object

        parts: dict[str, Any] = {"model": self.model.state_dict()}
        if done < self.config.steps:
            totals, scaler = self.totals, self.accelerator.scaler
            own = {"random": _random_state(self.accelerator.device), "loss": totals.loss.cpu(), "tokens": totals.tokens}
            parts["optimizer"] = self.optimizer.state_dict()
            parts["state"] = {
                "processes": gather_object([own]),
                "all_tokens": totals.all_tokens,
                "steps_logged": totals.steps_logged,
                "seconds": self.seconds(),
                "scaler": None if scaler is None else scaler.state_dict(),
            }
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder, done, self.settings, parts)

    def restore(self, step: int, parts: Mapping[str, Any]) -> int:
        """Go on from a checkpoint's step; the model has its weights already."""
        totals, state = self.totals, parts["state"]
        self.optimizer.load_state_dict(parts["optimizer"])
        own = state["processes"][self.accelerator.process_index]
        _set_random_state(own["random"], self.accelerator.device)
        totals.loss.copy_(own["loss"])
        totals.tokens = own["tokens"]
        totals.all_tokens, totals.steps_logged = state["all_tokens"], state["steps_logged"]
        totals.seconds = state["seconds"]
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        return step


def make_optimizer(model: nn.Module, config: Config, fused: bool = True) -> torch.optim.AdamW:
    """Make AdamW; biases, norms and other parameters of one dimension do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=fused)


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of a step, counted from 0: along a line up to the configuration's, then along one to 0."""
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (config.steps - step) / (config.steps - warmup)


def _random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def _own_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all generators within, and restore them afterwards."""
    before = _random_state(device)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        _set_random_state(before, device)
