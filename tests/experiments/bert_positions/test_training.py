"""Training: the same run from the same seed, one that was stopped goes on exactly, and processes share the work."""

import dataclasses
import io
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers.bert_runs import SHARED, TINY, make_corpus
from rich.console import Console

from ropewalk.experiments.bert_positions import training
from ropewalk.experiments.bert_positions.batches import training_batch
from ropewalk.experiments.bert_positions.config import SCHEMES
from ropewalk.experiments.bert_positions.model import make_model
from ropewalk.experiments.bert_positions.training import learning_rate, make_optimizer, train_run
from ropewalk.experiments.bert_positions.training_log import TrainingLog, read_metrics

for package in ("transformers", "accelerate", "tensorboard"):
    pytest.importorskip(package)


@pytest.fixture
def accelerator(device):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16" if device.type == "cuda" else "no", cpu=device.type == "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def trained(accelerator, tmp_path):
    """Trains a run: config, scheme and seed in; its model and its folder out."""

    def train(config=TINY, scheme="rope", seed=0, folder=None, corpus=None, console=None):
        folder = folder or tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        console = console or Console(quiet=True)
        return train_run(config, corpus or make_corpus(), scheme, seed, folder, accelerator, console), folder

    return train


def losses(folder):
    return [(line["step"], line["loss"], line["learning_rate"], line["tokens"]) for line in read_metrics(folder)]


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it."""


def stop_after(monkeypatch, step):
    """Let training end, as by a kill, once so many steps are done and, where they are due, logged and saved."""
    ordinary = training.training_batch

    def batch(corpus, config, seed, now, *arguments, **keywords):
        if now == step:
            raise Killed
        return ordinary(corpus, config, seed, now, *arguments, **keywords)

    monkeypatch.setattr(training, "training_batch", batch)


def test_a_run_learns_and_leaves_what_it_says(trained, device):
    config = dataclasses.replace(TINY, steps=60, log_every=20, checkpoint_every=25, dropout=0.0)
    model, folder = trained(config)
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[0]["loss"] < math.log(30)  # of a uniform guess
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert [line["learning_rate"] for line in lines] == [learning_rate(config, step) for step in (19, 39, 59)]
    # Windows of 16, 16, 16 and 12: of 60 · 8 windows, in 6 epochs of 80.
    assert lines[-1]["tokens"] == 6 * 20 * 60
    assert 0 < lines[0]["seconds"] < lines[2]["seconds"]
    assert not model.training
    assert next(model.parameters()).device.type == device.type
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-00000060", "metrics.jsonl", "tensorboard"]
    # What is finished needs no optimiser.
    assert sorted(p.name for p in (folder / "checkpoint-00000060").iterdir()) == ["manifest.json", "model.pt"]


def test_it_trains_as_a_plain_loop_does(trained, device):
    """AdamW on the mean loss, gradients clipped and never carried over, by the schedule; on the CPU in float32."""
    if device.type != "cpu":
        pytest.skip("on a GPU it trains in bfloat16")
    config = dataclasses.replace(TINY, dropout=0.0, steps=4, max_grad_norm=0.5, weight_decay=0.1)
    corpus = make_corpus()
    plain = make_model(config, "exposb", 0, corpus.vocab_size, corpus.pad_id).train()
    parameters = list(plain.parameters())
    decays = [torch.optim.AdamW([p], 1.0, (0.9, 0.98), 1e-6, 0.1 if p.ndim > 1 else 0.0) for p in parameters]
    expected, norms = [], []
    for step in range(4):
        batch = training_batch(corpus, config, 0, step, device)
        logits = plain(batch.input_ids, attention_mask=batch.attention_mask).logits
        chosen = logits.gather(1, batch.masked[..., None].expand(-1, -1, logits.shape[-1]))
        loss = torch.nn.functional.cross_entropy(chosen.flatten(0, 1), batch.labels.flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
        for parameter, gradient, optimizer in zip(parameters, gradients, decays, strict=True):
            parameter.grad = gradient * min(1.0, 0.5 / float(norms[-1]))
            optimizer.param_groups[0]["lr"] = learning_rate(config, step)
            optimizer.step()
        expected.append(float(loss.detach()))
    assert all(norm > 0.5 for norm in norms)
    model, folder = trained(dataclasses.replace(config, log_every=1), "exposb")
    assert [loss for _, loss, *_ in losses(folder)] == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # Adam divides gradients by their size


def test_tensorboard_has_the_metrics(trained):
    _, folder = trained()
    scalars = read_scalars(folder)
    assert set(scalars) == {"loss", "learning_rate", "tokens_per_second"}
    assert [step for step, _ in scalars["loss"]] == [2, 4, 6, 8, 10, 12]
    for (_, value), line in zip(scalars["loss"], read_metrics(folder), strict=True):
        assert value == pytest.approx(line["loss"], rel=1e-6)


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_logged_loss_is_the_mean_over_the_steps_since_the_last_line(trained):
    _, each = trained(dataclasses.replace(TINY, log_every=1))
    _, some = trained(dataclasses.replace(TINY, log_every=5))
    every = [loss for _, loss, *_ in losses(each)]
    means = [sum(every[:5]) / 5, sum(every[5:10]) / 5, sum(every[10:]) / 2]
    assert [loss for _, loss, *_ in losses(some)] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_runs_from_one_seed_are_equal(trained, scheme):
    config = dataclasses.replace(TINY, steps=4)
    (a, first), (b, second), (c, other) = (trained(config, scheme, seed) for seed in (3, 3, 4))
    assert losses(first) == losses(second)
    assert losses(first) != losses(other)
    assert_same_weights(a, b)
    with pytest.raises(AssertionError):
        assert_same_weights(a, c)


def test_dropout_is_on_while_it_trains(trained):
    _, with_dropout = trained(dataclasses.replace(TINY, steps=2))
    _, without = trained(dataclasses.replace(TINY, steps=2, dropout=0.0))
    assert losses(with_dropout) != losses(without)


def test_all_schemes_of_a_seed_see_the_same_data(trained, monkeypatch):
    seen = {}

    def record(corpus, config, seed, step, device, **parts):
        batch = ordinary(corpus, config, seed, step, device, **parts)
        seen.setdefault(scheme, []).append((batch.input_ids.cpu(), batch.masked.cpu(), batch.labels.cpu()))
        return batch

    ordinary = training.training_batch
    monkeypatch.setattr(training, "training_batch", record)
    for scheme in SCHEMES:
        trained(dataclasses.replace(TINY, steps=3), scheme)
    for scheme in SCHEMES[1:]:
        for ours, theirs in zip(seen[scheme], seen[SCHEMES[0]], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    first, second, _ = seen[SCHEMES[0]]
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("stop", [3, 5, 7, 10, 11])
def test_what_was_stopped_goes_on_exactly(trained, tmp_path, monkeypatch, stop):
    """Lines of metrics (every 2 steps) and checkpoints (every 5) have sums in common that a resumed run must know."""
    whole, expected = trained()
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(Killed):
            trained(folder=folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999, "lo')  # a line that a kill cut short
    torch.manual_seed(12345)  # nothing may depend on where the process's own generators are
    resumed, _ = trained(folder=folder)
    assert losses(folder) == losses(expected)
    assert_same_weights(resumed, whole)
    assert [step for step, _ in read_scalars(folder)["loss"]] == [2, 4, 6, 8, 10, 12]
    seconds = [line["seconds"] for line in read_metrics(folder)]
    assert seconds == sorted(seconds)


def test_a_run_may_be_stopped_twice(trained, tmp_path, monkeypatch):
    whole, expected = trained()
    folder = tmp_path / "stopped"
    for stop in (6, 7, 11):
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            with pytest.raises(Killed):
                trained(folder=folder)
    resumed, _ = trained(folder=folder)
    assert losses(folder) == losses(expected)
    assert_same_weights(resumed, whole)


def test_a_finished_run_is_not_trained_again(trained, monkeypatch):
    model, folder = trained()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    stop_after(monkeypatch, 0)
    again, _ = trained(folder=folder)
    assert_same_weights(model, again)
    assert not again.training
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_callers_random_numbers_stay_as_they_were(trained):
    before = torch.get_rng_state()
    trained(dataclasses.replace(TINY, steps=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_accumulated_steps_are_as_one(trained, device):
    """The same but for the order of sums; dropout would be drawn for other shapes."""
    config = dataclasses.replace(TINY, dropout=0.0)
    _, one = trained(config)
    _, four = trained(dataclasses.replace(config, accumulation_steps=4))
    assert_nearly_equal(losses(one), losses(four), "no" if device.type == "cpu" else "bf16")


def assert_nearly_equal(a, b, precision="no"):
    """Losses that differ by rounding, which training makes greater, and tokens that do not differ."""
    assert [(step, tokens) for step, _, _, tokens in a] == [(step, tokens) for step, _, _, tokens in b]
    roundings = {"no": 8 * torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps / 4}
    assert [loss for _, loss, *_ in a] == pytest.approx([loss for _, loss, *_ in b], rel=roundings[precision])


def test_checkpoints_of_another_run_are_refused(trained, tmp_path, monkeypatch):
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Killed):
            trained(folder=folder)
    other = dataclasses.replace(make_corpus(), sha256="1" * 64)
    for changed, key in (
        ({"config": dataclasses.replace(TINY, learning_rate=0.5)}, "learning_rate was 0.01 there, and is 0.5 now"),
        ({"scheme": "alibi"}, "scheme was 'rope' there, and is 'alibi' now"),
        ({"seed": 1}, "seed was 0 there, and is 1 now"),
        ({"corpus": other}, "corpus_sha256 was"),
    ):
        with pytest.raises(ValueError, match="is of another configuration") as error:
            trained(folder=folder, **changed)
        assert key in str(error.value)
        assert "checkpoint-00000005" in str(error.value)
    # Which other runs there are makes no difference to this one.
    trained(dataclasses.replace(TINY, schemes=("rope", "alibi"), seeds=(0, 5)), folder=folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("delete", "metrics.jsonl is missing"),
        ("shorten", "metrics.jsonl ends at step 2, but its checkpoint has metrics up to step 4"),
        ("spoil", "metrics.jsonl, line 1, is damaged"),
        ("model", "model.pt is damaged"),
        ("optimizer", "optimizer.pt is damaged"),
    ],
)
def test_damaged_files_are_named(trained, tmp_path, monkeypatch, damage, message):
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Killed):
            trained(folder=folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    if damage == "delete":
        metrics.unlink()
    elif damage == "shorten":
        metrics.write_text(lines[0])
    elif damage == "spoil":
        metrics.write_text("".join(["{", *lines]))
    else:
        file = folder / "checkpoint-00000005" / f"{damage}.pt"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="to start this run anew") as error:
        trained(folder=folder)
    assert message in str(error.value)
    assert f"delete {folder} to" in str(error.value)


def test_a_loss_that_is_not_finite_ends_the_run(trained):
    with pytest.raises(ValueError, match=r"the loss of rope, seed 0, is (nan|inf) at step \d+: learning_rate, 1e\+30"):
        trained(dataclasses.replace(TINY, learning_rate=1e30, max_grad_norm=1e30))


def test_the_learning_rate_rises_and_falls_along_lines():
    config = dataclasses.replace(TINY, steps=10, warmup=0.4, learning_rate=2.0)
    rates = [learning_rate(config, step) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1.5, 2, 2, 5 / 3, 4 / 3, 1, 2 / 3, 1 / 3])
    assert learning_rate(dataclasses.replace(config, warmup=0.0), 0) == 2.0
    short = dataclasses.replace(config, steps=1, warmup=0.9)
    assert learning_rate(short, 0) == 2.0


@pytest.mark.parametrize("scheme", ["standard", "exposb"])
def test_what_has_one_dimension_does_not_decay(scheme):
    model = make_model(TINY, scheme, 0, 30, 0)
    decaying, others = make_optimizer(model, TINY).param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (TINY.weight_decay, 0)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    every = [id(p) for group in (decaying, others) for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    unwanted = ("bias", "LayerNorm", "band_weights")
    assert all(any(part in names[id(p)] for part in unwanted) for p in others["params"])


def test_no_step_waits_for_the_device(trained, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    ordinary = training._Run.step

    def step(self, now):
        first = now < 2  # a model's first steps compile kernels and make tables, which waits
        torch.cuda.set_sync_debug_mode("default" if first else "error")
        try:
            ordinary(self, now)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(training._Run, "step", step)
    for scheme in SCHEMES:
        trained(TINY, scheme)


def test_a_console_that_is_no_terminal_gets_a_line_now_and_then(trained):
    shown = io.StringIO()
    trained(dataclasses.replace(TINY, log_every=1), console=Console(file=shown, width=200))
    lines = shown.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("rope, seed 0: step 3 of 12, loss ")
    assert lines[0].endswith(" left")
    assert " tokens/s, 0:00:0" in lines[0]
    assert lines[-1].startswith("rope, seed 0: step 12 of 12, loss ")


def test_a_terminal_gets_a_bar(trained):
    shown = io.StringIO()
    trained(TINY, console=Console(file=shown, force_terminal=True, width=200))
    assert "12/12" in shown.getvalue()
    assert "tokens/s" in shown.getvalue()
    assert shown.getvalue().count("step 12 of 12") == 1


def test_what_a_log_has_of_later_steps_is_cut_off(tmp_path):
    def log(start, logged, steps):
        with TrainingLog(tmp_path, start, logged, 10, Console(quiet=True), "x") as log:
            for step in steps:
                log.append({"step": step, "loss": 1.0 + step, "learning_rate": 0.1, "tokens": step, "seconds": step})
            log.bring_to_disk()

    log(0, 0, [2, 4, 6])
    log(5, 4, [6, 8])
    assert [line["step"] for line in read_metrics(tmp_path)] == [2, 4, 6, 8]
    log(0, 0, [2])
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]
    with pytest.raises(ValueError, match="not JSON compliant"):
        log(2, 2, [float("nan")])


# Trains runs in each of several processes on the CPU.
WORKER = """
import dataclasses, sys
from pathlib import Path
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from rich.console import Console
from helpers import bert_runs as t
from ropewalk.experiments.bert_positions.training import train_run

config = dataclasses.replace(t.TINY, dropout=0.0, accumulation_steps=2)
for precision, scheme in t.SHARED:
    AcceleratorState._reset_state()
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[handler])
    folder = Path(sys.argv[1]) / f"{scheme}-{precision}"
    train_run(config, t.make_corpus(), scheme, 0, folder, accelerator, Console(quiet=True))
accelerator.end_training()
"""


def in_processes(tmp_path, n_processes, folder):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes)]
    command = [sys.executable, *(launcher if n_processes > 1 else []), str(script), str(folder)]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        return process.wait(timeout=200), process.stdout.read()
    finally:
        process.terminate()  # which torchrun hands on to its processes


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path):
    """A scheme's own parameters too, in float32 and under autocast; and two processes' run is not one process's."""
    for count in (1, 2):
        returned, said = in_processes(tmp_path, count, tmp_path / str(count))
        assert returned == 0, said
    for precision, scheme in SHARED:
        one, two = (losses(tmp_path / count / f"{scheme}-{precision}") for count in "12")
        assert len(one) == 6
        assert_nearly_equal(one, two, precision)
    returned, said = in_processes(tmp_path, 1, tmp_path / "2")
    assert returned != 0
    assert "processes was 2 there, and is 1 now" in said
