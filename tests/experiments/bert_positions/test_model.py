"""The models of the comparison, which start alike, and their loss."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ropewalk import ReRope
from ropewalk.experiments.bert_positions.batches import Batch
from ropewalk.experiments.bert_positions.config import SCHEMES, Config
from ropewalk.experiments.bert_positions.model import TrainingLoss, make_model, masked_logits, mlm_loss
from ropewalk.experiments.bert_positions.seeds import derive_seed

pytest.importorskip("transformers")

CONFIG = Config(hidden_size=32, num_heads=2, intermediate_size=48, train_length=16, length_multiples=(1, 4))
VOCAB, PAD, MASK = 300, 0, 4
OWN = {"standard": "position_embeddings", "exposb": "band_weights"}  # a scheme's own parameters, in each layer


def make(scheme, seed=0, config=CONFIG):
    return make_model(config, scheme, seed, VOCAB, PAD)


def make_batch(device, rows=3, tokens=16, n_masked=3, generator=None):
    """Rows of 16, 15, 14 … tokens, of which the first ones are masked, the last row has a label less."""
    input_ids = torch.randint(5, VOCAB, (rows, tokens), device=device)
    attention_mask = (torch.arange(tokens) < tokens - torch.arange(rows)[:, None]).long().to(device)
    masked = torch.rand(rows, tokens - rows, device=device).topk(n_masked).indices
    labels = torch.randint(5, VOCAB, (rows, n_masked), device=device)
    labels[-1, -1] = -100
    return Batch(
        input_ids=input_ids.masked_fill(attention_mask == 0, PAD),
        attention_mask=attention_mask,
        masked=masked,
        labels=labels,
        n_labels=rows * n_masked - 1,
        n_tokens=int(attention_mask.sum()),
    )


def part_of(batch, rows):
    tensors = {name: getattr(batch, name)[rows] for name in ("input_ids", "attention_mask", "masked", "labels")}
    return dataclasses.replace(batch, **tensors)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_schemes_of_a_seed_start_from_the_same_weights(scheme):
    own = OWN.get(scheme)
    state, plain = make(scheme).state_dict(), make("rope").state_dict()
    added = {name for name in state if own is not None and own in name}
    assert len(added) == (CONFIG.num_layers if own else 0)
    assert set(state) - added == set(plain)
    assert not [name for name in plain if not torch.equal(state[name], plain[name])]


@pytest.mark.parametrize("scheme", ["standard", "rope"])
def test_a_model_is_drawn_from_its_seed_alone(scheme):
    first = make(scheme, 5).state_dict()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = make(scheme, 5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = make(scheme, 6).state_dict()
    differing = [name for name in first if not torch.equal(first[name], other[name])]
    drawn = [name for name in first if "weight" in name and "LayerNorm" not in name and "bias" not in name]
    assert set(drawn) <= set(differing)


def test_tables_of_a_seed_differ_from_each_other_and_from_those_of_other_seeds():
    def tables(seed):
        return [w for name, w in make("standard", seed).state_dict().items() if "position_embeddings" in name]

    a, b = tables(0)
    c, _ = tables(1)
    assert a.shape == (CONFIG.longest, CONFIG.hidden_size) == (64, 32)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert 0.015 < float(a.std()) < 0.025
    wider = make_model(CONFIG, "standard", 0, 2 * VOCAB, PAD).state_dict()  # whose weights are drawn otherwise
    assert torch.equal(wider["bert.encoder.layer.0.attention.self.position_embeddings.weight"], a)


def test_sizes_dropout_and_options_are_the_configurations():
    config = dataclasses.replace(CONFIG, dropout=0.25, num_layers=3, scheme_options={"rope": {"base": 50.0}})
    model = make("rope", config=config)
    layers = model.bert.encoder.layer
    assert len(layers) == 3
    assert model.config.vocab_size == VOCAB
    assert model.bert.embeddings.word_embeddings.weight.shape == (VOCAB, 32)
    assert model.bert.embeddings.dropout.p == layers[0].output.dropout.p == 0.25
    attention = layers[2].attention.self
    assert (attention.num_heads, attention.dropout, attention.position.base) == (2, 0.25, 50.0)
    assert layers[0].intermediate.dense.out_features == 48
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_rerope_reads_far_pairs_in_training_already():
    def window(config):
        position = make("rerope", config=config).bert.encoder.layer[0].attention.self.position
        assert isinstance(position, ReRope)
        return position.window

    assert window(CONFIG) == 8
    assert window(dataclasses.replace(CONFIG, scheme_options={"rerope": {"window": 3}})) == 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_whole_model_at_the_masked_tokens(scheme, device):
    model, batch = make(scheme).to(device).eval(), make_batch(device)
    with torch.no_grad():
        logits = masked_logits(model, batch)
        whole = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert logits.shape == (3, 3, VOCAB)
    expected = torch.stack([row[at] for row, at in zip(whole, batch.masked, strict=True)])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_mean_over_the_labels_of_the_whole_batch(device):
    model, batch = make("rope").to(device).eval(), make_batch(device)
    logits = masked_logits(model, batch)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())  # a mean over the labels that there are
    torch.testing.assert_close(mlm_loss(model, batch), expected)
    parts = sum(mlm_loss(model, part_of(batch, rows)) for rows in (slice(0, 1), slice(1, 3)))
    torch.testing.assert_close(parts, expected)
    torch.testing.assert_close(TrainingLoss(model, 1)(batch), expected)
    torch.testing.assert_close(TrainingLoss(model, 4)(batch), 4 * expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_lies_in_the_padding_changes_nothing(scheme, device):
    model, batch = make(scheme).to(device).eval(), make_batch(device)
    filled = batch.input_ids.masked_fill(batch.attention_mask == 0, 77)
    assert not torch.equal(filled, batch.input_ids)
    with torch.no_grad():
        before, after = mlm_loss(model, batch), mlm_loss(model, dataclasses.replace(batch, input_ids=filled))
    torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_gets_a_gradient(scheme, device):
    """Queries, keys, values and a scheme's own too; the learned table only where there are tokens."""
    model, batch = make(scheme).to(device).train(), make_batch(device)
    # At first queries and keys are so small that hardly anything depends on them.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(20)
    mlm_loss(model, batch).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    without = [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]
    # A key's bias adds the same to all scores of a query where nothing rotates or scales it.
    assert not [name for name in without if not name.endswith("key.bias")]
    if scheme == "standard":
        table = gradients["bert.encoder.layer.0.attention.self.position_embeddings.weight"]
        assert table[:16].abs().sum(1).all()
        assert not table[16:].any()


def test_seeds_for_different_purposes_differ():
    seeds = {derive_seed(*what) for what in (("weights", 0), ("weights", 1), ("dropout", 0, 0), ("dropout", 0, 1))}
    assert len(seeds) == 4
    assert len({seed % 2**32 for seed in seeds}) == 4  # of which a generator on the CPU looks at 32 bits
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("weights", 0) == derive_seed("weights", 0)
