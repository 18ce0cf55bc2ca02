"""The comparison: pre-train a BERT for each scheme and seed, evaluate, time, and write a record.

Everything goes into one folder, from which a run that was stopped goes on. In several processes all of them train; the
main one does the rest.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from ropewalk.bench.core.options import choose_device
from ropewalk.bench.core.terminal import default_console
from ropewalk.experiments.bert_positions.checkpoint import first_difference
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus, prepare_corpus
from ropewalk.experiments.bert_positions.evaluation import evaluate
from ropewalk.experiments.bert_positions.exposb import check_exposb
from ropewalk.experiments.bert_positions.exposb_training import trained_band_weights
from ropewalk.experiments.bert_positions.figures import bert_tables, draw_learning, draw_speed, markdown_tables
from ropewalk.experiments.bert_positions.record import (
    EvaluationRow,
    TrainingRow,
    describe_experiment,
    read_bert_record,
    row_of_line,
    write_bert_record,
)
from ropewalk.experiments.bert_positions.side_by_side import DATA, folder_of, list_runs, train_side_by_side
from ropewalk.experiments.bert_positions.speed import measure_speed
from ropewalk.experiments.bert_positions.training import make_accelerator, train_run
from ropewalk.experiments.bert_positions.training_log import read_metrics

CONFIG = "config.yaml"
RECORD = "record.jsonl"
LEARNING, SPEED, TABLES = "learning.png", "speed.png", "tables.md"
EVALUATION = "evaluation.json"
# Requirements beside Ropewalk's own, by the names that are imported.
_PACKAGES = ("transformers", "tokenizers", "accelerate", "yaml", "tensorboard", "matplotlib")


def run_bert_positions(
    config: Config,
    *,
    output: Path,
    resume: bool = False,
    device: str | None = None,
    jobs: int = 1,
    record: Path | None = None,
    console: Console | None = None,
) -> Path:
    """Train, evaluate and compare a BERT for each position scheme and seed.

    Args:
        config: what to train, and on what; `load_config` makes one.
        output: the folder of all results, new or empty: `config.yaml`; the text as tokens in `data`; metrics,
            TensorBoard's files and trained weights of each model in `runs/SCHEME-SEED`; `record.jsonl`, and what is
            made of it, `learning.png`, `speed.png` and `tables.md`.
        resume: go on with what is in `output`, which must be of the same configuration.
        device: "cpu" or "cuda"; None for the GPU, if there is one. In several processes, started by torchrun, each has
            its own GPU.
        jobs: how many models are trained at a time, each in a process of its own on the same device: a small model
            alone does not fill a GPU. Each learns the same there.
        record: where the record goes too, a new file.
        console: where to print.

    Returns:
        The path of the record in `output`.

    Raises:
        ValueError: an output that holds something, or has nothing to resume, or is of another configuration; files in
            it that are damaged; a corpus that is empty or too small; a device that is not there; a loss that is not
            finite. The message names the file and the key.
        ModuleNotFoundError: a package that is missing.

    Example:
        >>> from pathlib import Path
        >>> from ropewalk.experiments.bert_positions.config import load_config
        >>> from ropewalk.experiments.bert_positions.run import run_bert_positions
        >>> run_bert_positions(load_config("smoke"), output=Path("bert-positions"))  # doctest: +SKIP
    """
    _check_packages(config)
    target = choose_device(device)
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, but must be at least 1")
    if record is not None and record.exists() and not resume:
        raise ValueError(f"{record} exists already, and is not overwritten")
    with make_accelerator(config, target) as accelerator:
        _check_batch(config, accelerator)
        if jobs > 1 and accelerator.num_processes > 1:
            raise ValueError(f"jobs is {jobs}, but must be 1 where several processes train one model")
        console = (console or default_console()) if accelerator.is_main_process else Console(quiet=True)
        with accelerator.main_process_first(), _claimed(output, config, resume or not accelerator.is_main_process):
            corpus = prepare_corpus(config, output / DATA, console)
        if jobs > 1:  # what is done, is loaded below
            train_side_by_side(config, output, target, jobs, console)
        rows, band_weights = _train_and_evaluate(config, corpus, output, accelerator, console)
        if accelerator.is_main_process:
            _report(config, corpus, output, accelerator, jobs, console, record, rows, band_weights)
        accelerator.wait_for_everyone()
    return output / RECORD


def _train_and_evaluate(
    config: Config, corpus: Corpus, output: Path, accelerator: Any, console: Console
) -> tuple[list[TrainingRow | EvaluationRow], dict[int, Tensor]]:
    """Train all models in turn; returns rows, on the main process alone, and ExpoSB's learned weights by seed."""
    rows: list[TrainingRow | EvaluationRow] = []
    band_weights = {}
    runs = list_runs(config)
    for number, (scheme, seed) in enumerate(runs, start=1):
        folder = folder_of(output, scheme, seed)
        title = f"{scheme}, seed {seed} ({number} of {len(runs)})"
        model = train_run(config, corpus, scheme, seed, folder, accelerator, console, title)
        if accelerator.is_main_process:
            n_parameters = sum(parameter.numel() for parameter in model.parameters())
            rows.append(training_row(scheme, seed, read_metrics(folder), n_parameters))
            rows += _evaluate_once(model, corpus, config, scheme, seed, folder, accelerator)
            if scheme == "exposb":
                band_weights[seed] = trained_band_weights(model)
        accelerator.wait_for_everyone()
    return rows, band_weights


def training_row(scheme: str, seed: int, metrics: list[dict[str, Any]], n_parameters: int) -> TrainingRow:
    """Summarise the metrics of a finished run; the speed is the median over their lines."""
    before = [{"tokens": 0, "seconds": 0.0}, *metrics[:-1]]
    speeds = [
        (line["tokens"] - last["tokens"]) / max(line["seconds"] - last["seconds"], 1e-3)
        for last, line in zip(before, metrics, strict=True)
    ]
    return TrainingRow(
        scheme=scheme,
        seed=seed,
        steps=[line["step"] for line in metrics],
        losses=[line["loss"] for line in metrics],
        tokens_per_second=statistics.median(speeds),
        seconds=metrics[-1]["seconds"],
        parameters=n_parameters,
    )


def _evaluate_once(
    model: Any, corpus: Corpus, config: Config, scheme: str, seed: int, folder: Path, accelerator: Any
) -> list[EvaluationRow]:
    """Evaluate a run, or read an earlier evaluation of it."""
    path = folder / EVALUATION
    if path.exists():
        try:
            rows = [row_of_line(line) for line in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: delete it to evaluate the model anew ({error})") from error
        return [row for row in rows if isinstance(row, EvaluationRow)]
    found = evaluate(model, corpus, config, scheme, seed, accelerator.device)
    _write(path, json.dumps([dataclasses.asdict(row) for row in found]))
    return found


def _report(
    config: Config,
    corpus: Corpus,
    output: Path,
    accelerator: Any,
    jobs: int,
    console: Console,
    copy: Path | None,
    rows: Sequence[TrainingRow | EvaluationRow],
    band_weights: Mapping[int, Tensor],
) -> None:
    """Measure speed, check the claims about ExpoSB, and write and print it all."""
    evaluation = [row for row in rows if isinstance(row, EvaluationRow)]
    found = check_exposb(config, evaluation, band_weights)
    speed = measure_speed(config, corpus.vocab_size, accelerator.device, console)
    run = {
        **describe_experiment(config, corpus, accelerator.device),
        "processes": accelerator.num_processes,
        "jobs": jobs,
        "precision": accelerator.mixed_precision,
    }
    for path in (output / RECORD, *(() if copy is None else (copy,))):
        write_bert_record(path, run, [*rows, *speed, *found])
    result = read_bert_record(output / RECORD)
    draw_learning(result, output / LEARNING)
    draw_speed(result, output / SPEED)
    _write(output / TABLES, markdown_tables(result))
    for table in bert_tables(result):
        console.print(table)
    for path in (RECORD, LEARNING, SPEED, TABLES):
        console.print(str(output / path), highlight=False, markup=False)


def _check_packages(config: Config) -> None:
    wanted = (*_PACKAGES, *(("datasets",) if config.dataset is not None else ()))
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ModuleNotFoundError(f"{names}: not installed, but needed for training (pip install 'ropewalk[train]')")


def _check_batch(config: Config, accelerator: Any) -> None:
    parts = config.accumulation_steps * accelerator.num_processes
    if config.batch_size % parts:
        raise ValueError(
            f"batch_size is {config.batch_size}, but must be divisible by the accumulation steps times the processes, "
            f"{config.accumulation_steps} × {accelerator.num_processes}"
        )


@contextmanager
def _claimed(output: Path, config: Config, resume: bool) -> Iterator[None]:
    """Claim the folder to write to: new, or of this configuration. A failure within leaves no new folder behind."""
    import yaml

    file = output / CONFIG
    if resume:
        _check_same(file, config)
        yield
        return
    was_there = output.exists()
    if was_there and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already and is not an empty folder: resume it, or choose another output")
    output.mkdir(parents=True, exist_ok=True)
    _write(file, yaml.safe_dump(config.as_dict(), sort_keys=False))
    try:
        yield
    except (ValueError, ModuleNotFoundError):
        shutil.rmtree(output / DATA, ignore_errors=True)
        file.unlink()
        if not was_there:
            output.rmdir()
        raise


def _check_same(file: Path, config: Config) -> None:
    """Raise unless the configuration in a file is this one."""
    import yaml

    if not file.is_file():
        raise ValueError(f"{file} is missing: there is nothing to resume in {file.parent}")
    try:
        before = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(before, Mapping):
        raise ValueError(f"{file} is damaged: it has no keys and values")
    difference = first_difference(before, config.as_dict())
    if difference is not None:
        key, there, here = difference
        raise ValueError(f"{file}: {key} is {there!r} there, but {here!r} here: only the same run can be resumed")


def _write(path: Path, text: str) -> None:
    """Write a file in whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
