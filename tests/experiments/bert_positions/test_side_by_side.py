"""Models trained in processes side by side: they learn what they learn one after another, and end with their parent."""

import io
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.bert_runs import TEXT
from rich.console import Console

from ropewalk.experiments.bert_positions.config import load_config
from ropewalk.experiments.bert_positions.corpus import prepare_corpus
from ropewalk.experiments.bert_positions.run import run_bert_positions
from ropewalk.experiments.bert_positions.side_by_side import DATA, folder_of, list_runs, train_side_by_side
from ropewalk.experiments.bert_positions.training import make_accelerator, train_run
from ropewalk.experiments.bert_positions.training_log import read_metrics

QUIET = Console(quiet=True)
PARENT = """
import sys
from pathlib import Path
import torch
from rich.console import Console
from ropewalk.experiments.bert_positions.config import load_config
from ropewalk.experiments.bert_positions.side_by_side import train_side_by_side

if __name__ == "__main__":
    settings = {"schemes": ["alibi", "rope"], "steps": 100000, "checkpoint_every": 100000, "log_every": 1}
    config = load_config("smoke", Path(sys.argv[1]), corpus=[sys.argv[2]], **settings)
    train_side_by_side(config, Path(sys.argv[3]), torch.device("cpu"), 2, Console(quiet=True))
"""


@pytest.fixture
def one_thread():
    """As many as each of several jobs has here: on a CPU the order of sums depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    choose, words = random.Random(0), TEXT.split()
    for index in range(4):
        (folder / f"{index}.txt").write_text("\n".join(" ".join(choose.choices(words, k=12)) for _ in range(90)))
    return folder


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "{vocab_size: 512, hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 32, dropout: 0.1, "
        "train_length: 16, length_multiples: [1, 2], batch_size: 4, steps: 12, evaluation_windows: 8, log_every: 3}"
    )
    return path


def losses(folder):
    return [(line["step"], line["loss"], line["tokens"]) for line in read_metrics(folder)]


def test_models_learn_the_same_side_by_side(tmp_path, text, settings, device, one_thread):
    config = load_config("smoke", settings, schemes=["rope", "exposb"], seeds=[0, 1], corpus=[str(text)])
    corpus = prepare_corpus(config, tmp_path / DATA, QUIET)
    shown = io.StringIO()
    train_side_by_side(config, tmp_path, torch.device(device.type), 2, Console(file=shown, width=200))
    assert sorted(line.split(" (")[0] for line in shown.getvalue().splitlines()) == [
        "exposb, seed 0",
        "exposb, seed 1",
        "rope, seed 0",
        "rope, seed 1",
    ]
    for scheme, seed in list_runs(config)[:2]:
        alone = tmp_path / "alone" / scheme
        with make_accelerator(config, torch.device(device.type)) as accelerator:
            train_run(config, corpus, scheme, seed, alone, accelerator, QUIET)
        assert losses(alone) == losses(folder_of(tmp_path, scheme, seed))


def test_the_error_of_one_is_raised(tmp_path, text, settings):
    config = load_config(
        "smoke", settings, schemes=["rope", "alibi"], corpus=[str(text)], learning_rate=1e30, max_grad_norm=1e30
    )
    prepare_corpus(config, tmp_path / DATA, QUIET)
    with pytest.raises(ValueError, match=r"the loss of \w+, seed 0, is (nan|inf) at step"):
        train_side_by_side(config, tmp_path, torch.device("cpu"), 2, QUIET)


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_are_counted(tmp_path, settings, jobs):
    with pytest.raises(ValueError, match=f"jobs is {jobs}, but must be at least 1"):
        run_bert_positions(load_config("smoke", settings), output=tmp_path / "out", jobs=jobs)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_parent_leaves_nobody_behind(tmp_path, text, settings):
    config = load_config("smoke", settings, schemes=["alibi", "rope"], corpus=[str(text)])
    prepare_corpus(config, tmp_path / DATA, QUIET)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(settings), str(text), str(tmp_path)]
    parent = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    metrics = [folder_of(tmp_path, scheme, 0) / "metrics.jsonl" for scheme in ("alibi", "rope")]
    try:
        wait_until(lambda: all(path.exists() and path.stat().st_size for path in metrics), seconds=120)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_until(lambda: not is_growing(metrics), seconds=20)
    finally:
        os.killpg(parent.pid, signal.SIGKILL) if is_growing(metrics) else None


def is_growing(paths):
    before = [path.stat().st_size for path in paths]
    time.sleep(0.5)
    return before != [path.stat().st_size for path in paths]


def wait_until(happens, seconds):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
