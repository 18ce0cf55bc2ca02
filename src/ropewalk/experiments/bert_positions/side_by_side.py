"""Several models trained at a time on one device, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import prepare_corpus
from ropewalk.experiments.bert_positions.training import make_accelerator, train_run
from ropewalk.experiments.bert_positions.training_log import read_metrics

DATA = "data"


def list_runs(config: Config) -> list[tuple[str, int]]:
    """List the scheme and seed of each model, in the order of training."""
    return [(scheme, seed) for seed in config.seeds for scheme in config.schemes]


def folder_of(output: Path, scheme: str, seed: int) -> Path:
    """Return the folder of a model's checkpoint, metrics and evaluation."""
    return output / "runs" / f"{scheme}-{seed}"


def train_side_by_side(config: Config, output: Path, device: torch.device, jobs: int, console: Console) -> None:
    """Train all models, `jobs` at a time; the corpus is prepared in `output`. They are left in their folders.

    Raises what a model's training raises; others are trained to their end before, and none is begun any more.
    """
    runs = list_runs(config)
    context = multiprocessing.get_context("spawn")  # a GPU cannot be used after a fork
    # If each process had as many threads as there are cores, they would wait for each other.
    threads = 1 if device.type == "cuda" else max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(min(jobs, len(runs)), context, _begin, (threads,)) as pool:
        futures = {pool.submit(_train, config, output, device, *run): run for run in runs}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                scheme, seed = futures[future]
                loss, seconds = future.result()
                what = f"{scheme}, seed {seed} ({number} of {len(runs)} done): loss {loss:.3f}, {seconds:.0f} s"
                console.print(what, highlight=False, markup=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train(config: Config, output: Path, device: torch.device, scheme: str, seed: int) -> tuple[float, float]:
    """Train one model, and print its loss at the end and its duration."""
    quiet, folder = Console(quiet=True), folder_of(output, scheme, seed)
    with make_accelerator(config, device) as accelerator:
        corpus = prepare_corpus(config, output / DATA, quiet)
        train_run(config, corpus, scheme, seed, folder, accelerator, quiet)
    last = read_metrics(folder)[-1]
    return last["loss"], last["seconds"]


def _begin(threads: int) -> None:
    """Let this process end when its parent does, in whatever way: nothing must go on to write to the folder."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
