"""Models start equal; what they learn; a stopped run goes on as if nothing had been; their loss on held-out text."""

import dataclasses
import io
import shutil

import pytest
import torch
from helpers.bert_runs import TINY, make_corpus
from rich.console import Console
from torch import nn
from transformers import BertForMaskedLM, Trainer

from ropewalk.experiments.bert_positions.config import SCHEMES
from ropewalk.experiments.bert_positions.data import TrainingBatches, evaluation_batches
from ropewalk.experiments.bert_positions.training import (
    evaluate,
    learning_rate,
    make_model,
    make_optimizer,
    train_run,
)

CORPUS = make_corpus()
QUIET = dataclasses.replace(TINY, dropout=0.0, precision="no")
BATCH = TrainingBatches(CORPUS, QUIET, 0).__getitems__(range(8))


def train(folder, device, scheme="exposb", config=TINY, console=None):
    return train_run(config, CORPUS, scheme, 0, folder, device, console or Console(quiet=True))


def make(scheme, seed=0, config=QUIET):
    return make_model(config, scheme, seed, 30, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("run")
    console = Console(file=io.StringIO())
    model, row = train(folder, device, console=console)
    return folder, model, row, console.file.getvalue()


def test_all_schemes_of_a_seed_start_from_the_same_weights():
    models = {scheme: dict(make(scheme).named_parameters()) for scheme in SCHEMES}
    common = set.intersection(*(set(parameters) for parameters in models.values()))
    assert len(common) > 30
    for parameters in models.values():
        assert all(torch.equal(parameters[name], models["rope"][name]) for name in common)
    again, other = dict(make("standard").named_parameters()), dict(make("standard", seed=1).named_parameters())
    assert all(torch.equal(again[name], x) for name, x in models["standard"].items())
    assert not any(torch.equal(other[name], again[name]) for name in again.keys() - common)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loss_is_transformers_own_at_the_masked_tokens(scheme, device):
    model, batch = make(scheme).to(device), {name: x.to(device) for name, x in BATCH.items()}
    found = model(**batch, num_items_in_batch=len(batch["labels"]))
    logits = BertForMaskedLM.forward(model, batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits.flatten(0, 1)[batch["masked"]]
    torch.testing.assert_close(found["logits"], logits)
    expected = -logits.double().log_softmax(-1)[torch.arange(len(logits)), batch["labels"]].mean()
    torch.testing.assert_close(found["loss"].double(), expected, rtol=1e-5, atol=1e-5)
    halved = model(**batch, num_items_in_batch=2 * len(batch["labels"]))["loss"]
    torch.testing.assert_close(2 * halved, found["loss"])
    found["loss"].backward()
    without = {name for name, x in model.named_parameters() if x.grad is None or not x.grad.any()}
    assert not {name for name in without if "position" not in name}, without


def test_a_run_learns_and_says_so(trained, device):
    folder, model, row, said = trained
    assert row["steps"] == [2, 4, 6, 8, 10, 12]
    assert row["losses"][-1] < row["losses"][0] - 0.1
    assert row["tokens_per_second"] > 0
    assert row["parameters"] == sum(x.numel() for x in model.parameters())
    assert said.splitlines()[-1].startswith("exposb, seed 0: step 12 of 12, loss")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-12"]
    before = [x.clone() for x in model.parameters()]
    again, same_row = train(folder, device)  # it is not trained again
    assert same_row == row
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))


def test_it_trains_as_a_plain_loop_does_whatever_its_parts(tmp_path, device):
    config = dataclasses.replace(QUIET, log_every=1)
    _, row = train(tmp_path / "whole", device, config=config)
    _, parts = train(tmp_path / "parts", device, config=dataclasses.replace(config, accumulation_steps=4))
    model = make("exposb").to(device).train()
    optimizer, batches, losses = make_optimizer(model, config), TrainingBatches(CORPUS, config, 0), []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate(config, step)
        batch = batches.__getitems__(range(step * 8, step * 8 + 8))
        loss = model(**{name: x.to(device) for name, x in batch.items()})["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert row["losses"] == pytest.approx(losses, rel=1e-4)
    assert parts["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
def test_compiled_layers_learn_the_same(tmp_path, device):
    config = dataclasses.replace(QUIET, log_every=1)
    (_, plain), (model, compiled) = (
        train(tmp_path / str(x), device, config=dataclasses.replace(config, compile_layers=x)) for x in (False, True)
    )
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    with torch.compiler.set_stance("force_eager"):
        assert evaluate(model, CORPUS, config, "exposb", 0, device)


@pytest.mark.parametrize("stop", [3, 10])
def test_what_was_stopped_goes_on_exactly(trained, tmp_path, device, monkeypatch, stop):
    def stop_there(trainer, *arguments, step=Trainer.training_step):
        if trainer.state.global_step == stop:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", stop_there)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, device)
    if stop == 10:  # the newest checkpoint was not finished
        shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-10")
        (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{")
    model, row = train(tmp_path, device)
    assert all(row[key] == trained[2][key] for key in ("steps", "losses", "parameters"))
    for (name, a), b in zip(model.named_parameters(), trained[1].parameters(), strict=True):
        assert torch.equal(a, b), name


def test_all_schemes_of_a_seed_see_the_same_batches(tmp_path, device, monkeypatch):
    seen = []

    def look(trainer, model, inputs, *arguments, step=Trainer.training_step):
        seen.append({name: x.cpu() for name, x in inputs.items()})
        return step(trainer, model, inputs, *arguments)

    monkeypatch.setattr(Trainer, "training_step", look)
    for scheme in SCHEMES:
        train(tmp_path / scheme, device, scheme, dataclasses.replace(TINY, steps=3))
    assert len(seen) == 3 * len(SCHEMES)
    for number, batch in enumerate(seen):
        assert all(torch.equal(x, seen[number % 3][name]) for name, x in batch.items())


def test_what_cannot_be_resumed_is_named(trained, tmp_path, device):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    (folder / "checkpoint-12" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"checkpoint-12 cannot be resumed: delete .*run to start this run anew"):
        train(folder, device)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, device):
    config = dataclasses.replace(TINY, learning_rate=1e30, max_grad_norm=1e30, precision="no")
    with pytest.raises(ValueError, match=r"the loss of rope, seed 0 is nan at step .*: learning_rate may be too large"):
        train(tmp_path, device, "rope", config)


def test_the_learning_rate_rises_and_falls():
    config = dataclasses.replace(TINY, steps=20, warmup=0.25)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(1 / 15)
    cosine = dataclasses.replace(config, decay="cosine")
    rates = [learning_rate(cosine, step) for step in (4, 5, 10, 15, 20)]
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.25, 0.0])
    quadratic = dataclasses.replace(config, decay="quadratic")
    rates = [learning_rate(quadratic, step) for step in (4, 5, 8, 11, 20)]
    assert rates == pytest.approx([1.0, 1.0, 0.64, 0.36, 0.0])


def test_what_has_one_dimension_does_not_decay():
    model = make("exposb")
    decaying, constant = make_optimizer(model, TINY).param_groups
    assert (decaying["weight_decay"], constant["weight_decay"]) == (0.01, 0.0)
    assert all(x.ndim > 1 for x in decaying["params"])
    assert len(decaying["params"]) + len(constant["params"]) == len(list(model.parameters()))


def test_evaluation_is_the_mean_over_held_out_tokens(device):
    model = make("rope", config=TINY).to(device)  # with dropout, which evaluation turns off
    rows = evaluate(model, CORPUS, TINY, "rope", 5, device)
    assert [(row["scheme"], row["seed"], row["length"]) for row in rows] == [("rope", 5, 16), ("rope", 5, 32)]
    for row in rows:
        (batch,) = evaluation_batches(CORPUS, TINY, row["length"], 1 << 20)
        with torch.no_grad():
            found = model(**{name: x.to(device) for name, x in batch.items()})
        right = (found["logits"].argmax(-1).cpu() == batch["labels"]).double().mean()
        tolerance = 1e-5 if device.type == "cpu" else 1e-2
        assert row["loss"] == pytest.approx(float(found["loss"]), rel=tolerance)
        assert row["accuracy"] == pytest.approx(float(right), abs=tolerance)
        assert row["n_labels"] == len(batch["labels"])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the loss of rope, seed 5, is nan at length 16: it diverged"):
        evaluate(model, CORPUS, TINY, "rope", 5, device)
