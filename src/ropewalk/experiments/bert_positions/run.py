"""The comparison: train a BERT for each scheme and seed, in all processes; in the main one evaluate, time, record."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path, PurePath
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.console import Console
from rich.markdown import Markdown
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from ropewalk.bench.core.options import choose_device
from ropewalk.bench.core.records import RecordWriter, describe_run, version_of
from ropewalk.bench.core.terminal import default_console
from ropewalk.experiments.bert_positions import figures
from ropewalk.experiments.bert_positions.config import Config, load_config
from ropewalk.experiments.bert_positions.data import Corpus, prepare_corpus, unigram_loss
from ropewalk.experiments.bert_positions.exposb import check_exposb, trained_band_weights
from ropewalk.experiments.bert_positions.merge import extend_record, parts_of
from ropewalk.experiments.bert_positions.probes import measure_probe, measure_recall
from ropewalk.experiments.bert_positions.training import evaluate, measure_speed, train_run

CONFIG, DATA, RECORD, ROWS = "config.yaml", "data", "record.jsonl", "rows.json"


def run_bert_positions(
    preset: str | None,
    config: Path | None,
    device: str | None,
    output: Path,
    resume: bool,
    jobs: int,
    record: Path | None,
    **overrides: Any,
) -> None:
    """Train, evaluate and compare a BERT for each position scheme and seed, in the folder `output`, new or empty.

    `jobs` models are trained at a time, each in a process of its own: a small model alone does not fill a GPU. The GPUs
    take turns, unless `device` names one. A `record` that exists already gets the rows of the schemes that it lacks:
    `extend_record`. Bad input is a ValueError; a package that is missing, ModuleNotFoundError.
    """
    file = output / CONFIG if resume and preset is None and config is None else config
    settings = load_config(preset or "smoke", file, **{key: value for key, value in overrides.items() if value != []})
    target = choose_device(device)
    state = PartialState(cpu=target.type == "cpu")
    if jobs < 1 or (jobs > 1 and state.num_processes > 1):
        raise ValueError(f"jobs is {jobs}, but must be at least 1, and 1 where several processes train one model")
    console = default_console() if state.is_main_process else Console(quiet=True)
    with state.main_process_first():
        _claim(output, settings, resume or not state.is_main_process)
        try:
            corpus = prepare_corpus(settings, output / DATA, console)
            run = _describe(settings, corpus, target, state.num_processes, jobs) if state.is_main_process else {}
            if state.is_main_process and record is not None and record.exists():  # before hours of training
                extend_record(record, run, [], resume)
        except (ValueError, ModuleNotFoundError):
            if not resume and state.is_main_process:  # another text, or record, may go here
                shutil.rmtree(output / DATA, ignore_errors=True)
                (output / CONFIG).unlink()
            raise
    if jobs > 1:  # what is done, is read below
        # If each process had as many threads as there are cores, they would wait for each other.
        threads = 1 if target.type == "cuda" else max(1, torch.get_num_threads() // jobs)
        try:
            spawn(_train_share, (jobs, threads, settings, output, target, _visible_gpus(target)), nprocs=jobs)
        except ProcessRaisedException as error:
            raise ValueError(f"a model could not be trained: {str(error).strip().splitlines()[-1]}") from error
    rows = list[dict[str, Any]]()
    for seed, scheme in product(settings.seeds, settings.schemes):
        folder = _folder(output, scheme, seed)
        rows += _run_one(settings, corpus, scheme, seed, folder, target, console, state.is_main_process)
        state.wait_for_everyone()
    if state.is_main_process:
        if record is not None and record.exists():
            run, rows = extend_record(record, run, rows, resume)
        else:
            run["parts"] = parts_of(run)
            rows += measure_speed(settings, len(corpus.tokenizer), target, console) if settings.time_steps else []
        has_exposb = any(row.get("scheme") == "exposb" for row in rows)
        rows = [
            *(row for row in rows if row["kind"] != "exposb"),
            *(check_exposb(settings, rows) if has_exposb else []),
        ]
        for path in {output / RECORD, record or output / RECORD}:
            with RecordWriter(path, run, rows_before=rows):  # whole, or not at all
                pass
        result = figures.read_bert_record(output / RECORD)
        figures.draw_learning(result, output / "learning.png")
        outputs = [RECORD, "learning.png", "tables.md"]
        if len(result.speed):
            figures.draw_speed(result, output / "speed.png")
            outputs.append("speed.png")
        tables = figures.markdown_tables(result)
        (output / "tables.md").write_text(tables, encoding="utf-8")
        console.print(Markdown(tables))
        for name in outputs:
            console.print(str(output / name), highlight=False, markup=False)
    state.wait_for_everyone()


def _describe(config: Config, corpus: Corpus, device: torch.device, processes: int, jobs: int) -> dict[str, Any]:
    """Describe the run, without a path of the machine."""
    packages = ("transformers", "tokenizers", "accelerate", "datasets")
    run = describe_run(figures.BENCHMARK, device, {name: version_of(name) or "missing" for name in packages})
    told = asdict(config) | {"corpus": [PurePath(path).name for path in config.corpus]}
    if config.dataset is not None and PurePath(config.dataset).is_absolute():
        told["dataset"] = PurePath(config.dataset).name
    text = corpus.facts | {"vocab_size": len(corpus.tokenizer), "n_tokens": len(corpus.tokens)}
    text |= {"n_windows": len(corpus.windows), "held_out": list(corpus.held_out.shape)}
    run |= {"config": told, "corpus": text | {"unigram_loss": unigram_loss(corpus)}}
    return run | {"processes": processes, "jobs": jobs, "precision": config.precision_on(device)}


def _run_one(
    config: Config,
    corpus: Corpus,
    scheme: str,
    seed: int,
    folder: Path,
    device: torch.device,
    console: Console,
    is_main: bool,
) -> list[dict[str, Any]]:
    """Train a model and, in the main process, evaluate it: its rows, from its folder if they are there."""
    file = folder / ROWS
    if file.exists():
        done: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return done
    model, training = train_run(config, corpus, scheme, seed, folder, device, console)
    if not is_main:
        return []
    if scheme == "exposb":
        training["band_weights"] = trained_band_weights(model).tolist()  # of layers and heads
    with torch.compiler.set_stance("force_eager"):  # it was compiled for the trained length alone
        rows = [training, *evaluate(model, corpus, config, scheme, seed, model.device)]
        for kind, measure in (("recall", measure_recall), ("probe", measure_probe)):
            run_keys = {"kind": kind, "scheme": scheme, "seed": seed}
            rows += [run_keys | row for row in measure(model, corpus, config, model.device)]
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(rows), encoding="utf-8")
    os.replace(unfinished, file)
    return rows


def _visible_gpus(device: torch.device) -> list[str]:
    """Return the GPUs among which processes are shared, as CUDA_VISIBLE_DEVICES names them; none for one device."""
    if device.type != "cuda" or device.index is not None:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if named is None else named.split(",")


def _train_share(
    number: int, jobs: int, threads: int, config: Config, output: Path, device: torch.device, gpus: Sequence[str]
) -> None:
    """Train and evaluate each jobs-th model, from one on, in a process of its own, which sees one GPU."""
    if gpus:  # before CUDA is initialised
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    torch.set_num_threads(threads)
    corpus = prepare_corpus(config, output / DATA, Console(quiet=True))
    for seed, scheme in list(product(config.seeds, config.schemes))[number::jobs]:
        _run_one(config, corpus, scheme, seed, _folder(output, scheme, seed), device, default_console(), True)


def _folder(output: Path, scheme: str, seed: int) -> Path:
    """Return the folder of a model; no file of every system may have a colon in its name."""
    return output / f"runs/{scheme.replace(':', '.')}-{seed}"


def _claim(output: Path, config: Config, resume: bool) -> None:
    """Claim the folder to write to: new, or of this configuration, perhaps of other schemes."""
    file, settings = output / CONFIG, asdict(config)
    if not resume:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ValueError(f"{output} exists already and is not an empty folder: resume it, or choose another output")
        output.mkdir(parents=True, exist_ok=True)
        _write(file, settings)
        return
    try:
        before = dict(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"there is nothing to resume in {output}: {error}") from error
    for key, now in settings.items():
        if before.get(key) != now and key != "schemes":
            raise ValueError(f"{file}: {key} is {before.get(key)!r} there, but {now!r} here: it must be the same run")
    if before != settings:
        _write(file, settings)


def _write(file: Path, settings: dict[str, Any]) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    os.replace(unfinished, file)
