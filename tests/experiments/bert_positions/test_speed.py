"""Speed: what is measured, on which batch, and how times become rows."""

import pytest
import torch
from rich.console import Console

from ropewalk.experiments.bert_positions import speed
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.speed import Effort, make_batch, measure_speed, plain_bert

pytest.importorskip("transformers")

VOCABULARY = 600
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "vocab_size": VOCABULARY}
CONFIG = Config(**SIZES, train_length=16, batch_size=16, accumulation_steps=2, schemes=("standard", "exposb"))
CPU = torch.device("cpu")
CANDIDATES = [
    ("standard", "ropewalk"),
    ("exposb", "ropewalk"),
    ("Hugging Face BERT", "sdpa"),
    ("Hugging Face BERT", "eager"),
    ("Hugging Face BERT", "ropewalk"),
]


@pytest.fixture(autouse=True)
def little(monkeypatch):
    for kind in ("cpu", "cuda"):
        effort = Effort(tokens=1 << 10, warmup=1, steps=2, least_rounds=2, most_rounds=4, seconds=0.0)
        monkeypatch.setitem(speed.EFFORTS, kind, effort)


def measure(config=CONFIG, device=CPU):
    return measure_speed(config, VOCABULARY, device, Console(quiet=True))


@pytest.mark.parametrize("multiples", [(1, 2, 4, 8), (1, 2), (1, 3)])  # the last are shorter than what is measured
def test_all_candidates_are_measured_at_both_lengths(device, multiples):
    rows = measure(Config(**(vars(CONFIG) | {"length_multiples": multiples})), device)
    assert [(row.model, row.attention) for row in rows] == CANDIDATES * 2
    assert [(row.length, row.batch) for row in rows] == [(16, 8)] * 5 + [(64, 2)] * 5
    for row in rows:
        p20, p50, p80 = row.step_ms
        assert 0 < p20 <= p50 <= p80
        n_tokens = row.tokens_per_second * p50 / 1e3
        assert n_tokens == pytest.approx(make_batch(CONFIG, row.length // 16, VOCABULARY, CPU, 1 << 10).n_tokens)
        assert (row.peak_bytes is None) if device.type == "cpu" else (row.peak_bytes > 1 << 10)


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_batch_is_one_of_training(multiple):
    config = Config(**(vars(CONFIG) | {"train_length": 100, "batch_size": 200, "accumulation_steps": 1}))
    batch = make_batch(config, multiple, VOCABULARY, CPU, 1 << 20)
    again = make_batch(config, multiple, VOCABULARY, CPU, 1 << 20)
    length = 100 * multiple
    assert batch.input_ids.shape == batch.attention_mask.shape == (200 // multiple, length)
    lengths = batch.attention_mask.sum(1)
    assert length / 2 <= lengths.min() < length * 0.6
    assert length * 0.9 < lengths.max() <= length
    assert torch.equal(batch.attention_mask, (torch.arange(length) < lengths[:, None]).long())
    assert batch.n_tokens == int(lengths.sum())
    assert torch.equal(batch.input_ids != 0, batch.attention_mask.bool())
    assert batch.input_ids.max() == VOCABULARY - 1
    scored = batch.labels != -100
    assert scored.sum(1).tolist() == [int(0.15 * n + 0.5) for n in lengths.tolist()]
    assert batch.n_labels == int(scored.sum())
    assert torch.equal(batch.labels[scored], batch.input_ids.gather(1, batch.masked)[scored])
    assert bool((batch.masked < lengths[:, None])[scored].all())
    assert all(len(set(row.tolist())) == len(row) for row in batch.masked)
    for x, y in zip(vars(batch).values(), vars(again).values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("most_tokens", "rows"), [(1 << 20, [8, 2]), (120, [4, 1]), (10, [4, 1])], ids=["all", "fewer", "at-least"]
)
def test_both_batches_have_as_many_tokens_as_fit(most_tokens, rows):
    batches = [make_batch(CONFIG, multiple, VOCABULARY, CPU, most_tokens) for multiple in (1, 4)]
    assert [len(batch.input_ids) for batch in batches] == rows
    assert batches[0].input_ids.numel() == batches[1].input_ids.numel()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ropewalk"])
def test_hugging_faces_bert_is_as_it_is(attention):
    from transformers import BertConfig, BertForMaskedLM

    model = plain_bert(CONFIG, VOCABULARY, attention)
    assert type(model) is BertForMaskedLM
    assert model.config._attn_implementation == attention
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    same = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes))
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in same.named_parameters()}
    assert model.bert.embeddings.position_embeddings.weight.shape == (128, 32)


def test_dropout_is_that_of_the_configuration():
    model = plain_bert(Config(**(vars(CONFIG) | {"dropout": 0.25})), VOCABULARY, "eager")
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}


def test_a_step_trains(device):
    model = plain_bert(CONFIG, VOCABULARY, "sdpa").eval()
    step = speed._make_step(model, CONFIG, device)
    batch = make_batch(CONFIG, 1, VOCABULARY, device, 1 << 10)
    assert model.training
    losses = []
    for _ in range(8):
        losses.append(speed.mlm_loss(model, batch).item())
        step(batch)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.05


def test_gradients_are_clipped_as_in_training(monkeypatch):
    norms = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: norms.append((parameters, most)))
    model = plain_bert(CONFIG, VOCABULARY, "sdpa")
    speed._make_step(model, CONFIG, CPU)(make_batch(CONFIG, 1, VOCABULARY, CPU, 1 << 10))
    ((parameters, most),) = norms
    assert most == CONFIG.max_grad_norm
    assert len(parameters) == len(list(model.parameters()))


def test_candidates_take_turns(monkeypatch):
    monkeypatch.setitem(speed.EFFORTS, "cpu", Effort(1 << 10, 1, 1, least_rounds=3, most_rounds=5, seconds=60.0))
    timed = []

    def canned(candidate, batch, device, steps):
        timed.append((batch.input_ids.shape[1], candidate.name, candidate.attention))
        return float(len(timed))

    monkeypatch.setattr(speed, "_time_steps", canned)
    measure()
    assert len(timed) == 2 * 5 * len(CANDIDATES)
    orders = [tuple(timed[start : start + 5]) for start in range(0, len(timed), 5)]
    for order in orders:
        assert {one[1:] for one in order} == set(CANDIDATES)
        assert len({one[0] for one in order}) == 1
    assert len({tuple(one[1:] for one in order) for order in orders}) > 3  # in new orders


def test_no_round_begins_after_the_last_second(monkeypatch):
    timed = []
    monkeypatch.setattr(speed, "_time_steps", lambda *arguments: timed.append(1) or 1.0)
    measure()
    assert len(timed) == 2 * 2 * len(CANDIDATES)  # the least number of rounds


def test_times_become_quantiles(monkeypatch):
    monkeypatch.setitem(speed.EFFORTS, "cpu", Effort(1 << 10, 1, 1, least_rounds=6, most_rounds=6, seconds=0.0))
    times = {}

    def canned(candidate, *others):
        of_candidate = times.setdefault(id(candidate), [60.0, 10.0, 30.0, 20.0, 50.0, 40.0])
        return of_candidate.pop()

    monkeypatch.setattr(speed, "_time_steps", canned)
    for row in measure():
        assert row.step_ms == pytest.approx((20.0, 35.0, 50.0))


@pytest.mark.parametrize("broken", ["standard", "Hugging Face BERT"])
def test_what_does_not_fit_is_left_out(monkeypatch, broken):
    make = speed._candidates

    def steps(*arguments):
        for candidate in make(*arguments):
            if candidate.name == broken and candidate.attention != "sdpa":

                def fail(batch):
                    raise torch.OutOfMemoryError("no more")

                candidate.step = fail
            yield candidate

    monkeypatch.setattr(speed, "_candidates", steps)
    rows = measure()
    assert [(row.model, row.attention) for row in rows] == CANDIDATES * 2
    for row in rows:
        missing = row.model == broken and row.attention != "sdpa"
        assert (row.tokens_per_second is None, row.step_ms is None) == (missing, missing)


def test_any_other_failure_is_not_hidden(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("something else")

    monkeypatch.setattr(speed, "mlm_loss", fail)
    with pytest.raises(RuntimeError, match="something else"):
        measure()
