"""The comparison: pre-train a BERT for each scheme and seed, evaluate, time, and write a record.

Everything goes into one folder, from which a run that was stopped goes on. In several processes all of them train; the
main one does the rest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.console import Console

from ropewalk.bench.core.options import choose_device
from ropewalk.bench.core.records import describe_run, version_of
from ropewalk.bench.core.terminal import default_console
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus, prepare_corpus
from ropewalk.experiments.bert_positions.exposb import check_exposb, trained_band_weights
from ropewalk.experiments.bert_positions.figures import bert_tables, draw_learning, draw_speed, markdown_tables
from ropewalk.experiments.bert_positions.model import evaluate
from ropewalk.experiments.bert_positions.record import (
    BENCHMARK,
    EvaluationRow,
    ExpoSBRow,
    SpeedRow,
    TrainingRow,
    read_bert_record,
    write_bert_record,
)
from ropewalk.experiments.bert_positions.speed import measure_speed
from ropewalk.experiments.bert_positions.training import train_run

CONFIG, DATA, RESULT = "config.yaml", "data", "result.json"
RECORD, LEARNING, SPEED, TABLES = "record.jsonl", "learning.png", "speed.png", "tables.md"
TRAINED_BY = ("transformers", "tokenizers", "accelerate", "datasets")


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
        output: the folder of all results, new or empty: `config.yaml`; the text as tokens in `data`; checkpoints of
            each model and what came of it in `runs/SCHEME-SEED`; `record.jsonl`, and what is made of it,
            `learning.png`, `speed.png` and `tables.md`.
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
            finite.
        ModuleNotFoundError: a package that is missing.

    Example:
        >>> from pathlib import Path
        >>> from ropewalk.experiments.bert_positions.config import load_config
        >>> from ropewalk.experiments.bert_positions.run import run_bert_positions
        >>> run_bert_positions(load_config("smoke"), output=Path("bert-positions"))  # doctest: +SKIP
    """
    target = choose_device(device)
    state = PartialState(cpu=target.type == "cpu")
    if jobs < 1 or (jobs > 1 and state.num_processes > 1):
        raise ValueError(f"jobs is {jobs}, but must be at least 1, and 1 where several processes train one model")
    if record is not None and record.exists() and not resume:
        raise ValueError(f"{record} exists already, and is not overwritten")
    console = (console or default_console()) if state.is_main_process else Console(quiet=True)
    with state.main_process_first():
        _claim(output, config, resume or not state.is_main_process)
        try:
            corpus = prepare_corpus(config, output / DATA, console)
        except (ValueError, ModuleNotFoundError):
            if not resume and state.is_main_process:  # another text may go here
                shutil.rmtree(output / DATA, ignore_errors=True)
                (output / CONFIG).unlink()
            raise
    runs = [(scheme, seed) for seed in config.seeds for scheme in config.schemes]
    if jobs > 1:  # what is done, is read below
        _train_side_by_side(config, output, target, jobs, runs, console)
    results = [_train_and_evaluate(config, corpus, output, target, console, *run) for run in runs]
    if state.is_main_process:
        rows: list[Any] = [row for training, evaluation, _ in results for row in (training, *evaluation)]
        evaluation_rows = [row for _, evaluation, _ in results for row in evaluation]
        weights = {training.seed: found for training, _, found in results if found is not None}
        rows += measure_speed(config, len(corpus.tokenizer), target, console)
        rows += check_exposb(config, evaluation_rows, weights)
        run = _describe(config, corpus, target) | {"processes": state.num_processes, "jobs": jobs}
        _report(output, run, rows, record, console)
    state.wait_for_everyone()
    return output / RECORD


def _train_and_evaluate(
    config: Config, corpus: Corpus, output: Path, device: torch.device, console: Console, scheme: str, seed: int
) -> tuple[TrainingRow, list[EvaluationRow], torch.Tensor | None]:
    """Train and evaluate a model, or read what came of it: its rows, and ExpoSB's learned weights."""
    folder = output / "runs" / f"{scheme}-{seed}"
    path = folder / RESULT
    state = PartialState()
    if not path.exists():
        model, training = train_run(config, corpus, scheme, seed, folder, device, console)
        if state.is_main_process:
            rows = evaluate(model, corpus, config, scheme, seed, next(model.parameters()).device)
            learnt = trained_band_weights(model).tolist() if scheme == "exposb" else None
            content = {"training": asdict(training), "evaluation": [asdict(row) for row in rows], "weights": learnt}
            _write(path, json.dumps(content))
    state.wait_for_everyone()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in (found["training"], *found["evaluation"]):
            del row["kind"]
        evaluation = [EvaluationRow(**row) for row in found["evaluation"]]
        weights = None if found["weights"] is None else torch.tensor(found["weights"], dtype=torch.float64)
        return TrainingRow(**found["training"]), evaluation, weights
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: delete it to evaluate the model anew ({error})") from error


def _train_side_by_side(
    config: Config, output: Path, device: torch.device, jobs: int, runs: Sequence[tuple[str, int]], console: Console
) -> None:
    """Train all models, `jobs` at a time. If one fails, no further one is begun."""
    context = multiprocessing.get_context("spawn")  # a GPU cannot be used after a fork
    # If each process had as many threads as there are cores, they would wait for each other.
    threads = 1 if device.type == "cuda" else max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(min(jobs, len(runs)), context, _begin, (threads,)) as pool:
        futures = [pool.submit(_train_alone, config.as_dict(), output, device, *run) for run in runs]
        try:
            for number, future in enumerate(futures, start=1):
                row = future.result()
                line = f"{row.scheme}, seed {row.seed} ({number} of {len(runs)}): loss {row.losses[-1]:.3f}"
                console.print(f"{line}, {row.seconds:.0f} s", highlight=False, markup=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train_alone(config: dict[str, Any], output: Path, device: torch.device, scheme: str, seed: int) -> TrainingRow:
    own, quiet = Config(**config), Console(quiet=True)
    corpus = prepare_corpus(own, output / DATA, quiet)
    return _train_and_evaluate(own, corpus, output, device, quiet, scheme, seed)[0]


def _begin(threads: int) -> None:
    """Let this process end when its parent does, in whatever way: nothing must go on to write to the folder."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _describe(config: Config, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Describe the run: machine, versions, configuration and text, without a path of the machine."""
    settings = config.as_dict()
    settings["corpus"] = [PurePath(path).name for path in config.corpus]
    if config.dataset is not None and PurePath(config.dataset).is_absolute():
        settings["dataset"] = PurePath(config.dataset).name
    return {
        **describe_run(BENCHMARK, device, {name: version_of(name) or "missing" for name in TRAINED_BY}),
        "config": settings,
        "corpus": {
            **corpus.facts,
            "vocab_size": len(corpus.tokenizer),
            "n_tokens": len(corpus.tokens),
            "n_windows": len(corpus.windows),
            "held_out": list(corpus.held_out.shape),
        },
        "precision": config.precision_on(device),
    }


def _report(
    output: Path,
    run: dict[str, Any],
    rows: Iterable[TrainingRow | EvaluationRow | SpeedRow | ExpoSBRow],
    copy: Path | None,
    console: Console,
) -> None:
    """Write the record, and draw and print what it says."""
    for path in (output / RECORD, *(() if copy is None else (copy,))):
        write_bert_record(path, run, rows)
    result = read_bert_record(output / RECORD)
    draw_learning(result, output / LEARNING)
    draw_speed(result, output / SPEED)
    _write(output / TABLES, markdown_tables(result))
    for table in bert_tables(result):
        console.print(table)
    for name in (RECORD, LEARNING, SPEED, TABLES):
        console.print(str(output / name), highlight=False, markup=False)


def _claim(output: Path, config: Config, resume: bool) -> None:
    """Claim the folder to write to: new, or of this configuration."""
    file = output / CONFIG
    if not resume:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ValueError(f"{output} exists already and is not an empty folder: resume it, or choose another output")
        output.mkdir(parents=True, exist_ok=True)
        _write(file, yaml.safe_dump(config.as_dict(), sort_keys=False))
        return
    if not file.is_file():
        raise ValueError(f"{file} is missing: there is nothing to resume in {output}")
    try:
        before = dict(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    for key, now in config.as_dict().items():
        if before.get(key) != now:
            raise ValueError(f"{file}: {key} is {before.get(key)!r} there, but {now!r} here: it must be the same run")


def _write(path: Path, text: str) -> None:
    """Write a file in whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
