"""The whole comparison, as the command runs it: its artefacts, its end by a kill and what comes after, its errors."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.bert_runs import TEXT
from typer.testing import CliRunner

from ropewalk.cli import app
from ropewalk.experiments.bert_positions import run, speed
from ropewalk.experiments.bert_positions.checkpoint import load_checkpoint
from ropewalk.experiments.bert_positions.config import SCHEMES, load_config
from ropewalk.experiments.bert_positions.model import make_model
from ropewalk.experiments.bert_positions.record import read_bert_record
from ropewalk.experiments.bert_positions.run import run_bert_positions, training_row
from ropewalk.experiments.bert_positions.training_log import read_metrics

for package in ("transformers", "tokenizers", "accelerate", "yaml", "tensorboard", "matplotlib"):
    pytest.importorskip(package)

TINY = """
max_megabytes: 1
vocab_size: 512
hidden_size: 32
num_layers: 1
num_heads: 2
intermediate_size: 32
dropout: 0.1
train_length: 16
length_multiples: [1, 2]
batch_size: 4
steps: 150
evaluation_windows: 8
checkpoint_every: 50
log_every: 5
"""
ARTEFACTS = ["config.yaml", "data", "learning.png", "record.jsonl", "runs", "speed.png", "tables.md"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of texts."""
    folder = tmp_path_factory.mktemp("texts")
    choose, words = random.Random(0), TEXT.split()
    for index in range(10):
        sentences = (" ".join(choose.choices(words, k=12)).capitalize() + "." for _ in range(60))
        (folder / f"{index}.txt").write_text("\n".join(sentences))
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A configuration file of a tiny run."""
    path = tmp_path_factory.mktemp("settings") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Speed is measured in no time, but for the test of the preset."""
    for kind, effort in speed.EFFORTS.items():
        quicker = dataclasses.replace(effort, tokens=64, warmup=1, steps=1, most_rounds=3, seconds=0.0)
        monkeypatch.setitem(speed.EFFORTS, kind, quicker)


def arguments(*options):
    return ["experiment", "bert-positions", *map(str, options)]


def invoke(*options):
    return CliRunner().invoke(app, arguments(*options))


def succeed(*options):
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    return result


def metrics(output, name="rope-0"):
    keys = ("step", "loss", "learning_rate", "tokens")
    return [tuple(line[key] for key in keys) for line in read_metrics(output / "runs" / name)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_the_preset_smoke(tmp_path, device, monkeypatch):
    """From the text that ships with Python to the figures, as `--preset smoke` does it."""
    monkeypatch.undo()
    output, record = tmp_path / "new" / "output", tmp_path / "copy.jsonl"
    start = time.monotonic()
    result = succeed("--preset", "smoke", "--device", device, "--output", output, "--record", record)
    assert device.type != "cpu" or time.monotonic() - start < 180
    assert names(output) == ARTEFACTS

    found = read_bert_record(output / "record.jsonl")
    assert record.read_bytes() == (output / "record.jsonl").read_bytes()
    assert str(tmp_path) not in record.read_text()
    config = load_config("smoke", output / "config.yaml")
    assert config == load_config("smoke")
    assert found.run["precision"] == ("no" if device.type == "cpu" else "bf16")
    assert found.run["processes"] == 1
    assert [(row.scheme, row.seed) for row in found.training] == [(scheme, 0) for scheme in SCHEMES]
    for row in found.training:
        assert row.steps == list(range(config.log_every, config.steps + 1, config.log_every))
        assert row.losses[-1] < row.losses[0] - 1
        assert row.tokens_per_second > 0
    lengths = [32, 64, 128, 256]
    assert [(row.scheme, row.length) for row in found.evaluation] == [(s, n) for s in SCHEMES for n in lengths]
    for row in found.evaluation:
        assert row.loss < 7  # a uniform guess has 7.6
        assert 0.02 < row.accuracy < 0.9
    assert {row.model for row in found.speed} >= set(SCHEMES)
    assert found.exposb

    for scheme in SCHEMES:
        folder = output / "runs" / f"{scheme}-0"
        assert names(folder) == ["checkpoint-00000200", "evaluation.json", "metrics.jsonl", "tensorboard"]
        check_events(folder)
        check_weights(folder, config, scheme)
    for name in ("learning.png", "speed.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    tables = (output / "tables.md").read_text()
    assert tables.startswith("# ")
    for heading in ("Loss", "Accuracy", "Speed", "ExpoSB"):
        assert heading in tables
        assert heading in result.stdout
    assert "rerope, seed 0 (6 of 6): step 200 of 200, loss " in result.stdout


def check_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [line["step"] for line in read_metrics(folder)]


def check_weights(folder, config, scheme):
    """The last checkpoint has what the record's model had: the weights fit, and are no longer those of the start."""
    manifest = json.loads((folder / "checkpoint-00000200" / "manifest.json").read_text())
    weights = load_checkpoint(folder, manifest["settings"]).parts["model"]
    model = make_model(config, scheme, 0, len(weights["cls.predictions.bias"]), 0)
    first = model.state_dict()
    assert not torch.equal(weights["cls.predictions.bias"], first["cls.predictions.bias"])
    model.load_state_dict(weights)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus, settings):
    """Two models, trained without a break."""
    output = tmp_path_factory.mktemp("uninterrupted") / "output"
    succeed("--config", settings, "--corpus", corpus, "--schemes", "rope,exposb", "--device", "cpu", "-o", output)
    return output


# The command, killed while its second checkpoint of the second model is whole but has another name still.
KILLED_WHILE_SAVING = """
import os, signal
from ropewalk.cli import app

replace, names = os.replace, []

def deadly(source, target):
    names.append(os.path.basename(target))
    if names[-1] == "checkpoint-00000100" and names.count("checkpoint-00000100") == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = deadly
app()
"""


@pytest.mark.parametrize("moment", ["training", "saving"])
@pytest.mark.slow
def test_killed_and_resumed_it_is_as_if_nothing_had_been(tmp_path, corpus, settings, uninterrupted, moment):
    output = tmp_path / "output"
    options = ("--config", settings, "--corpus", corpus, "--schemes", "rope,exposb", "--device", "cpu", "-o", output)
    command = ["-m", "ropewalk"] if moment == "training" else ["-c", KILLED_WHILE_SAVING]
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, *command, *arguments(*options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        if moment == "training":
            wait_for(process, output / "runs" / "exposb-0" / "metrics.jsonl", step=60)
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, said
    assert metrics(output, "rope-0") == metrics(uninterrupted, "rope-0")
    before = metrics(output, "exposb-0")
    assert 50 <= before[-1][0] < 150
    assert before == metrics(uninterrupted, "exposb-0")[: len(before)]
    assert "record.jsonl" not in names(output)
    (checkpoint,) = (path.name for path in (output / "runs" / "exposb-0").glob("checkpoint-*[0-9]"))
    assert checkpoint in (["checkpoint-00000050"] if moment == "saving" else [f"checkpoint-{n:08}" for n in (50, 100)])

    result = succeed("--resume", "--device", "cpu", "-o", output)  # by the settings that are there
    assert "rope, seed 0 (1 of 2): step" not in result.stdout
    assert metrics(output, "exposb-0") == metrics(uninterrupted, "exposb-0")
    assert names(output) == ARTEFACTS
    assert names(output / "runs" / "exposb-0") == names(uninterrupted / "runs" / "exposb-0")
    ours, theirs = (read_bert_record(folder / "record.jsonl") for folder in (output, uninterrupted))
    assert ours.evaluation == theirs.evaluation
    assert [row.losses for row in ours.training] == [row.losses for row in theirs.training]


def wait_for(process, path, step):
    """Until a line of metrics says that so many steps are done."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > 1 and json.loads(lines[-2])["step"] >= step:
            return
        time.sleep(0.005)
    pytest.fail(f"the process did not come to step {step}")


def test_what_is_finished_is_not_done_again(uninterrupted, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in (uninterrupted / "runs").rglob("*")}
    record = read_bert_record(uninterrupted / "record.jsonl")
    monkeypatch.setattr(run, "evaluate", None)
    succeed("--resume", "--device", "cpu", "-o", uninterrupted)
    assert {path: path.stat().st_mtime_ns for path in (uninterrupted / "runs").rglob("*")} == before
    again = read_bert_record(uninterrupted / "record.jsonl")
    assert (again.training, again.evaluation) == (record.training, record.evaluation)


def test_the_record_says_what_was_run(uninterrupted, corpus):
    record = read_bert_record(uninterrupted / "record.jsonl")
    assert record.run["config"]["corpus"] == [corpus.name]
    assert record.run["config"]["steps"] == 150
    assert str(corpus.parent) not in (uninterrupted / "record.jsonl").read_text()
    assert [row.scheme for row in record.training] == ["rope", "exposb"]
    assert len(record.training[0].steps) == 30
    learned = [row for row in record.exposb if "learned" in row.claim]
    assert "1 trained model" in learned[0].finding


def test_seeds_and_schemes_make_a_run_each(tmp_path, corpus, settings, device):
    output = tmp_path / "output"
    options = ("--schemes", "alibi, rope", "--seeds", "3,4", "--steps", 4, "--device", device)
    succeed("--config", settings, "--corpus", corpus, "-o", output, *options)
    assert names(output / "runs") == ["alibi-3", "alibi-4", "rope-3", "rope-4"]
    record = read_bert_record(output / "record.jsonl")
    assert [(row.scheme, row.seed) for row in record.training] == [
        ("alibi", 3),
        ("rope", 3),
        ("alibi", 4),
        ("rope", 4),
    ]
    assert metrics(output, "rope-3") != metrics(output, "rope-4")
    assert record.training[0].steps == [4]


@pytest.mark.slow
def test_two_processes_do_it_together(tmp_path, corpus, settings):
    """By torchrun on the CPU: one record, printed once, and the losses of one process but for rounding."""
    config = tmp_path / "settings.yaml"
    config.write_text(settings.read_text().replace("dropout: 0.1", "dropout: 0.0"))
    options = ("--config", config, "--corpus", corpus, "--schemes", "standard", "--steps", 20, "--device", "cpu")
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(*options, "-o", one)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ropewalk"]
    path = os.pathsep.join(sys.path)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # Accelerate's barrier names a GPU of each process, on the CPU too
    process = subprocess.Popen(
        [sys.executable, *launcher, *arguments(*options, "-o", two)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **hidden},
    )
    try:
        said, _ = process.communicate(timeout=200)
    finally:
        process.terminate()
    assert process.returncode == 0, said
    assert names(two) == ARTEFACTS
    assert said.count("standard, seed 0 (1 of 1): step 20 of 20") == 1
    record = read_bert_record(two / "record.jsonl")
    assert record.run["processes"] == 2
    ours, theirs = metrics(two, "standard-0"), metrics(one, "standard-0")
    assert [(step, tokens) for step, _, _, tokens in ours] == [(step, tokens) for step, _, _, tokens in theirs]
    rounding = 8 * torch.finfo(torch.float32).eps
    assert [loss for _, loss, *_ in ours] == pytest.approx([loss for _, loss, *_ in theirs], rel=rounding)


def fail(*options):
    """Return the output of a command that ends with code 2."""
    result = invoke(*options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    return result.stderr


def test_a_wrong_key_is_named_with_its_file(tmp_path, corpus):
    output = tmp_path / "output"
    file = tmp_path / "wrong.yaml"
    file.write_text("step: 5\n")
    said = fail("--config", file, "--corpus", corpus, "-o", output)
    assert f"{file}: there is no key 'step'; did you mean 'steps'?" in said
    file.write_text("steps: many\n")
    assert f"{file}: steps is 'many', but must be a whole number" in fail("--config", file, "-o", output)
    assert "the command line: steps is 0, but must be at least 1" in fail("--steps", 0, "-o", output)
    assert "seeds is '1,x', but must be whole numbers" in fail("--seeds", "1,x", "-o", output)
    assert "schemes has 'nope'" in fail("--schemes", "rope,nope", "-o", output)
    assert "preset 'huge' does not exist" in fail("--preset", "huge", "-o", output)
    assert not output.exists()


def test_an_empty_corpus_is_named_and_leaves_nothing_behind(tmp_path, settings):
    output, empty = tmp_path / "output", tmp_path / "empty.txt"
    empty.touch()
    assert "empty.txt" in fail("--config", settings, "--corpus", empty, "-o", output, "--device", "cpu")
    assert not output.exists()
    output.mkdir()
    missing = tmp_path / "missing.txt"
    assert "missing.txt" in fail("--config", settings, "--corpus", missing, "-o", output, "--device", "cpu")
    assert names(output) == []


def test_a_corrupt_checkpoint_is_named(tmp_path, corpus, settings, device):
    output = tmp_path / "output"
    options = ("--schemes", "rope", "--steps", 4, "--device", device, "-o", output)
    succeed("--config", settings, "--corpus", corpus, *options)
    file = output / "runs" / "rope-0" / "checkpoint-00000004" / "model.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = fail("--resume", "--device", device, "-o", output)
    assert f"{file} is damaged: delete {output / 'runs' / 'rope-0'} to start this run anew" in said
    file.write_bytes(content)
    damaged = output / "runs" / "rope-0" / "evaluation.json"
    damaged.write_text("[{}]")
    assert f"{damaged} is damaged: delete it to evaluate" in fail("--resume", "--device", device, "-o", output)
    damaged.unlink()
    succeed("--resume", "--device", device, "-o", output)


def test_only_the_same_run_can_be_resumed(tmp_path, corpus, settings, device):
    output = tmp_path / "output"
    nothing = fail("--config", settings, "--resume", "-o", output, "--device", device)
    assert f"{output / 'config.yaml'} is missing: there is nothing to resume" in nothing
    assert not output.exists()
    options = ("--config", settings, "--corpus", corpus, "--schemes", "rope", "--device", device, "-o", output)
    succeed(*options, "--steps", 4)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    file = output / "config.yaml"
    assert f"{file}: steps is 4 there, but 6 here" in fail(*options, "--steps", 6, "--resume")
    assert f"{output} exists already and is not an empty folder" in fail(*options, "--steps", 4)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    text = file.read_text()
    file.write_text("[1, 2")
    assert f"{file} is damaged" in fail(*options, "--steps", 4, "--resume")
    file.write_text("[1, 2]")
    assert f"{file} is damaged" in fail(*options, "--steps", 4, "--resume")
    file.write_text(text)
    succeed(*options, "--steps", 4, "--resume")


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, corpus, settings, monkeypatch):
    output = tmp_path / "output"
    options = ("--config", settings, "--corpus", corpus, "-o", output)
    assert "the device is 'meta'" in fail(*options, "--device", "meta")
    if not torch.cuda.is_available():
        assert "the device is 'cuda', but PyTorch finds no GPU" in fail(*options, "--device", "cuda")
    record = tmp_path / "record.jsonl"
    record.touch()
    assert f"{record} exists already, and is not overwritten" in fail(*options, "--record", record, "--device", "cpu")
    config = load_config("smoke", None, precision="fp16")
    with pytest.raises(ValueError, match="precision is 'fp16', but on a CPU must be"):
        run_bert_positions(config, output=output, device="cpu")
    found = run.importlib.util.find_spec
    missing = {"tensorboard", "yaml"}
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    assert "yaml, tensorboard: not installed, but needed for training (pip install 'ropewalk[train]')" in fail(*options)
    assert not output.exists()


def test_nothing_of_accelerate_is_left_for_the_next_run(tmp_path, corpus, settings):
    """One process can run in one precision, then in another."""
    for precision in ("no", "bf16", "no"):
        config = load_config(
            "smoke", settings, precision=precision, steps=2, schemes=["rope"], corpus=[str(corpus)], log_every=1
        )
        output = tmp_path / f"output-{len(names(tmp_path))}"
        run_bert_positions(config, output=output, device="cpu", console=None)
        assert read_bert_record(output / "record.jsonl").run["precision"] == precision
    first, other, third = (metrics(tmp_path / f"output-{index}") for index in range(3))
    assert first == third != other


def test_the_speed_of_a_run_is_the_median_over_its_lines():
    lines = [
        {"step": step, "loss": float(step), "tokens": tokens, "seconds": seconds}
        for step, tokens, seconds in ((10, 100, 10.0), (20, 300, 11.0), (30, 600, 12.0), (35, 700, 12.25))
    ]
    row = training_row("rope", 3, lines, 77)
    assert row.tokens_per_second == 250  # of 10, 200, 300 and 400
    assert (row.scheme, row.seed, row.parameters, row.seconds) == ("rope", 3, 77, 12.25)
    assert (row.steps, row.losses) == ([10, 20, 30, 35], [10.0, 20.0, 30.0, 35.0])
