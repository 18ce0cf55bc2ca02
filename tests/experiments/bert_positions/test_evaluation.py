"""Evaluation: the scored tokens, and their loss and accuracy."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ropewalk.experiments.bert_positions import evaluation
from ropewalk.experiments.bert_positions.batches import evaluation_batches
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.evaluation import autocast_of, evaluate

VOCABULARY, N_WINDOWS = 600, 6
CONFIG = Config(train_length=8, length_multiples=(1, 2, 4), hidden_size=32, num_heads=2, vocab_size=VOCABULARY)
CPU = torch.device("cpu")


def corpus():
    generator = torch.Generator().manual_seed(1)
    held_out = torch.randint(5, VOCABULARY, (N_WINDOWS, CONFIG.longest), generator=generator, dtype=torch.int32)
    return SimpleNamespace(held_out=held_out, mask_id=4, pad_id=0, n_special=5, vocab_size=VOCABULARY)


class TokenByToken(nn.Module):
    """A model whose guess depends on the token that is shown alone, so that the length must not matter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, 16), nn.Dropout(0.5)
        self.cls = nn.Linear(16, VOCABULARY)
        nn.init.normal_(self.cls.weight)
        self.dtypes, self.rows = set(), []

    def bert(self, input_ids, attention_mask):
        assert bool((attention_mask == 1).all())
        self.rows.append(tuple(input_ids.shape))
        hidden = self.dropout(self.embedding(input_ids))
        self.dtypes.add(self.cls(hidden).dtype)
        return SimpleNamespace(last_hidden_state=hidden)


@torch.no_grad()
def expected(model, length):
    """Loss and accuracy by their definition, one masked token at a time."""
    losses, right = [], []
    for batch in evaluation_batches(corpus(), CONFIG, length, CPU, 1):
        for row, masked, labels in zip(batch.input_ids, batch.masked, batch.labels, strict=True):
            for place, label in zip(masked, labels, strict=True):
                if label != -100:
                    p = model.cls(model.embedding(row[place])).double().softmax(-1)
                    losses.append(-p[label].log())
                    right.append(bool(p.argmax() == label))
    return float(torch.stack(losses).mean()), sum(right) / len(right), len(right)


def test_loss_and_accuracy_are_those_of_the_masked_tokens(device):
    model = TokenByToken()
    with torch.no_grad():  # tokens that are shown as they are, are guessed: some are right, not all
        model.cls.weight.copy_(3 * model.embedding.weight)
    by_definition = [expected(model, length) for length in (8, 16, 32)]
    rows = evaluate(model.to(device), corpus(), CONFIG, "rope", 7, device)
    assert [(row.scheme, row.seed, row.length) for row in rows] == [("rope", 7, length) for length in (8, 16, 32)]
    tolerance = 1e-6 if device.type == "cpu" else 2e-2  # of float32, and of bfloat16
    for row, (loss, accuracy, n_labels) in zip(rows, by_definition, strict=True):
        assert row.loss == pytest.approx(loss, rel=tolerance)
        assert row.accuracy == pytest.approx(accuracy)
        assert 0 < row.accuracy < 1
        assert row.n_labels == n_labels == N_WINDOWS * 4  # one token in eight
    assert rows[0].loss == pytest.approx(rows[2].loss, rel=tolerance)


def test_labels_that_are_not_there_count_for_nothing(monkeypatch):
    batches = list(evaluation_batches(corpus(), CONFIG, 8, CPU, 64))
    model = TokenByToken()

    def with_gaps(*arguments):
        for batch in batches:
            unlabelled = torch.full_like(batch.labels, -100)
            both = {"masked": torch.cat((batch.masked, batch.masked * 0), 1)}
            both["labels"] = torch.cat((batch.labels, unlabelled), 1)
            yield SimpleNamespace(**(vars(batch) | both))

    config = Config(**(vars(CONFIG) | {"length_multiples": (1,)}))
    plain = evaluate(model, corpus(), config, "rope", 0, CPU)
    monkeypatch.setattr(evaluation, "evaluation_batches", with_gaps)
    assert evaluate(model, corpus(), config, "rope", 0, CPU) == plain


def test_no_dropout_and_no_gradient_and_the_model_stays_as_it_was():
    model = TokenByToken().train()
    first = evaluate(model, corpus(), CONFIG, "rope", 0, CPU)
    assert model.training
    assert first == evaluate(model.eval(), corpus(), CONFIG, "rope", 0, CPU)
    assert not model.training
    monitored = []
    model.cls.register_forward_hook(lambda module, given, result: monitored.append(result.requires_grad))
    evaluate(model, corpus(), CONFIG, "rope", 0, CPU)
    assert monitored
    assert not any(monitored)


def test_how_many_tokens_are_read_at_once_changes_nothing(monkeypatch):
    model = TokenByToken()
    at_once = evaluate(model, corpus(), CONFIG, "rope", 0, CPU)
    assert model.rows == [(24, 8), (12, 16), (6, 32)]
    model.rows.clear()
    monkeypatch.setitem(evaluation._TOKENS_AT_ONCE, "cpu", 50)
    in_parts = evaluate(model, corpus(), CONFIG, "rope", 0, CPU)
    assert model.rows == [(6, 8)] * 4 + [(3, 16)] * 4 + [(1, 32)] * 6
    for whole, part in zip(at_once, in_parts, strict=True):
        assert (part.loss, part.accuracy) == (pytest.approx(whole.loss), whole.accuracy)


def test_a_model_is_read_in_the_precision_that_it_trained_in(device):
    dtypes = {}
    for precision in ("no", "bf16", "auto"):
        model = TokenByToken().to(device)
        evaluate(model, corpus(), Config(**(vars(CONFIG) | {"precision": precision})), "rope", 0, device)
        dtypes[precision] = model.dtypes
    automatic = torch.float32 if device.type == "cpu" else torch.bfloat16
    assert dtypes == {"no": {torch.float32}, "bf16": {torch.bfloat16}, "auto": {automatic}}
    assert autocast_of("fp16", CPU).fast_dtype == torch.float16


def test_a_model_that_diverged_is_named():
    model = TokenByToken()
    nn.init.constant_(model.cls.bias, math.nan)
    with pytest.raises(ValueError, match="the model of alibi, seed 3, has a loss of nan at length 8: it diverged"):
        evaluate(model, corpus(), CONFIG, "alibi", 3, CPU)


def test_lengths_that_score_different_tokens_are_refused(monkeypatch):
    def fewer(corpus, config, length, *others):
        batches = list(evaluation_batches(corpus, config, length, *others))
        return batches if length == 8 else (SimpleNamespace(**(vars(b) | {"labels": b.labels[:-1]})) for b in batches)

    def shorten(model, batch):
        return torch.zeros(*batch.labels.shape, VOCABULARY)

    monkeypatch.setattr(evaluation, "evaluation_batches", fewer)
    monkeypatch.setattr(evaluation, "masked_logits", shorten)
    with pytest.raises(ValueError, match=r"different numbers of masked tokens, \{8: 24, 16: 22, 32: 20\}"):
        evaluate(TokenByToken(), corpus(), CONFIG, "rope", 0, CPU)


def test_a_text_without_masked_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(evaluation, "evaluation_batches", lambda *arguments: iter(()))
    with pytest.raises(ValueError, match="no masked token at length 8"):
        evaluate(TokenByToken(), corpus(), CONFIG, "rope", 0, CPU)


@pytest.mark.parametrize("scheme", ["standard", "rope", "exposb"])
def test_bert_is_read_at_all_lengths(scheme, device):
    pytest.importorskip("transformers")
    from ropewalk.experiments.bert_positions.model import make_model

    model = make_model(CONFIG, scheme, 0, VOCABULARY, 0).to(device)
    rows = evaluate(model, corpus(), CONFIG, scheme, 0, device)
    for row in rows:
        assert row.loss == pytest.approx(math.log(VOCABULARY), rel=0.05)  # it has learnt nothing
    assert len({row.loss for row in rows}) == 3  # more is seen at once
