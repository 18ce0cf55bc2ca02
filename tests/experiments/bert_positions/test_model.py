"""Models: equal weights for all schemes of a seed, and their loss, in training and on held-out text."""

import dataclasses

import pytest
import torch
from helpers.bert_runs import TINY, make_corpus
from transformers import BertForMaskedLM

from ropewalk.experiments.bert_positions.batches import TrainingBatches, evaluation_batches
from ropewalk.experiments.bert_positions.config import SCHEMES
from ropewalk.experiments.bert_positions.model import evaluate, make_model

CORPUS = make_corpus()
QUIET = dataclasses.replace(TINY, dropout=0.0)
BATCH = TrainingBatches(CORPUS, QUIET, 0).__getitems__(range(8))


def make(scheme, seed=0, config=QUIET):
    return make_model(config, scheme, seed, 30, 0)


def test_all_schemes_of_a_seed_start_from_the_same_weights():
    models = {scheme: dict(make(scheme).named_parameters()) for scheme in SCHEMES}
    common = set.intersection(*(set(parameters) for parameters in models.values()))
    assert len(common) > 30
    for parameters in models.values():
        assert all(torch.equal(parameters[name], models["rope"][name]) for name in common)
    again, other = dict(make("standard").named_parameters()), dict(make("standard", seed=1).named_parameters())
    assert all(torch.equal(again[name], x) for name, x in models["standard"].items())
    own = [name for name in again if name not in common]
    assert own
    assert not any(torch.equal(other[name], again[name]) for name in own)


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


def test_padding_changes_nothing(device):
    model, batch = make("rope").to(device), {name: x.to(device) for name, x in BATCH.items()}
    batch["attention_mask"][0, 12:] = 0
    changed = batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 9)}
    assert not torch.equal(changed["input_ids"], batch["input_ids"])
    keep = batch["masked"][(batch["masked"] < 12) | (batch["masked"] >= 16)]
    batch, changed = (x | {"masked": keep, "labels": keep % 20} for x in (batch, changed))
    torch.testing.assert_close(model(**changed)["loss"], model(**batch)["loss"])


def test_evaluation_is_the_mean_over_held_out_tokens(device):
    model = make("rope", config=TINY).to(device)  # with dropout, which evaluation turns off
    rows = evaluate(model, CORPUS, TINY, "rope", 5, device)
    assert [(row.scheme, row.seed, row.length) for row in rows] == [("rope", 5, 16), ("rope", 5, 32)]
    for row in rows:
        (batch,) = evaluation_batches(CORPUS, TINY, row.length, 1 << 20)
        with torch.no_grad():
            found = model(**{name: x.to(device) for name, x in batch.items()})
        right = (found["logits"].argmax(-1).cpu() == batch["labels"]).double().mean()
        tolerance = 1e-5 if device.type == "cpu" else 1e-2
        assert row.loss == pytest.approx(float(found["loss"]), rel=tolerance)
        assert row.accuracy == pytest.approx(float(right), abs=tolerance)
        assert row.n_labels == len(batch["labels"])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the loss of rope, seed 5, is nan at length 16: it diverged"):
        evaluate(model, CORPUS, TINY, "rope", 5, device)
