"""Training: what it learns, and that a stopped run goes on as if nothing had been."""

import dataclasses
import io
import shutil

import pytest
import torch
from helpers.bert_runs import TINY, make_corpus
from rich.console import Console
from torch import nn

from ropewalk.experiments.bert_positions import training
from ropewalk.experiments.bert_positions.batches import TrainingBatches
from ropewalk.experiments.bert_positions.config import SCHEMES
from ropewalk.experiments.bert_positions.model import make_model
from ropewalk.experiments.bert_positions.training import BertTrainer, learning_rate, make_optimizer, train_run

CORPUS = make_corpus()


def train(folder, device, scheme="exposb", config=TINY, console=None):
    return train_run(config, CORPUS, scheme, 0, folder, device, console or Console(quiet=True))


def same(row, other):
    return (row.steps, row.losses, row.parameters) == (other.steps, other.losses, other.parameters)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("run")
    console = Console(file=io.StringIO())
    model, row = train(folder, device, console=console)
    return folder, model, row, console.file.getvalue()


def test_a_run_learns_and_says_so(trained, device):
    folder, model, row, said = trained
    assert row.steps == [2, 4, 6, 8, 10, 12]
    assert row.losses[-1] < row.losses[0] - 0.1
    assert row.tokens_per_second > 0
    assert row.parameters == sum(x.numel() for x in model.parameters())
    assert said.splitlines()[-1].startswith("exposb, seed 0: step 12 of 12, loss")
    assert 2 <= len(said.splitlines()) <= 5
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-12"]
    before = [x.clone() for x in model.parameters()]
    again, same_row = train(folder, device)  # it is not trained again
    assert same_row == row
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))


def test_it_trains_as_a_plain_loop_does(tmp_path, device):
    config = dataclasses.replace(TINY, dropout=0.0, precision="no", log_every=1)
    _, row = train(tmp_path, device, config=config)
    model = make_model(config, "exposb", 0, 30, 0).to(device).train()
    optimizer, batches, losses = make_optimizer(model, config), TrainingBatches(CORPUS, config, 0), []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.learning_rate * learning_rate(config, step)
        optimizer.param_groups[1]["lr"] = config.learning_rate * learning_rate(config, step)
        batch = batches.__getitems__(range(step * 8, step * 8 + 8))
        loss = model(**{name: x.to(device) for name, x in batch.items()})["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert row.losses == pytest.approx(losses, rel=1e-4)


def test_accumulated_steps_are_as_one(tmp_path, device):
    config = dataclasses.replace(TINY, dropout=0.0, precision="no")
    _, whole = train(tmp_path / "a", device, config=config)
    _, parts = train(tmp_path / "b", device, config=dataclasses.replace(config, accumulation_steps=4))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("stop", [3, 8, 10])
def test_what_was_stopped_goes_on_exactly(trained, tmp_path, device, monkeypatch, stop):
    def stop_there(trainer, *arguments, step=BertTrainer.training_step):
        if trainer.state.global_step == stop:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BertTrainer, "training_step", stop_there)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, device)
    if stop == 10:  # the newest checkpoint was not finished
        shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-10")
        (tmp_path / "checkpoint-10" / training.STATE).write_text("{")
    model, row = train(tmp_path, device)
    _, expected, expected_row, _ = trained
    assert same(row, expected_row)
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_all_schemes_of_a_seed_see_the_same_batches(tmp_path, device, monkeypatch):
    seen = {}

    def look(trainer, model, inputs, *arguments, step=BertTrainer.training_step):
        seen.setdefault(trainer.title, []).append({name: x.cpu() for name, x in inputs.items()})
        return step(trainer, model, inputs, *arguments)

    monkeypatch.setattr(BertTrainer, "training_step", look)
    config = dataclasses.replace(TINY, steps=3)
    for scheme in SCHEMES:
        train(tmp_path / scheme, device, scheme, config)
    first, *others = seen.values()
    assert len(others) == len(SCHEMES) - 1
    for batches in others:
        for a, b in zip(first, batches, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_cannot_be_resumed_is_named(trained, tmp_path, device):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    (folder / "checkpoint-12" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"checkpoint-12 cannot be resumed: delete .*run to start this run anew"):
        train(folder, device)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, device):
    config = dataclasses.replace(TINY, learning_rate=1e30, max_grad_norm=1e30, precision="no")
    with pytest.raises(ValueError, match=r"the loss of rope, seed 0 is nan at step .*: learning_rate may be too large"):
        train(tmp_path, device, "rope", config)


def test_the_learning_rate_rises_and_falls_along_lines():
    config = dataclasses.replace(TINY, steps=20, warmup=0.25)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(1 / 15)
    config = dataclasses.replace(TINY, steps=3, warmup=0.99)
    assert [learning_rate(config, step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 0])


def test_what_has_one_dimension_does_not_decay():
    model = make_model(TINY, "exposb", 0, 30, 0)
    decaying, constant = make_optimizer(model, TINY).param_groups
    assert (decaying["weight_decay"], constant["weight_decay"]) == (0.01, 0.0)
    assert all(x.ndim > 1 for x in decaying["params"])
    assert len(decaying["params"]) + len(constant["params"]) == len(list(model.parameters()))
