"""Claims about ExpoSB: measured on the scheme itself, and different for another scheme."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ropewalk import ExpoSB, ExpoSBBERTAttention, PositionScheme, Rope
from ropewalk.experiments.bert_positions import exposb
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.exposb import (
    break_sticks,
    check_exposb,
    compare_losses,
    draw,
    probabilities_of,
    scores_of,
    trained_band_weights,
)

CONFIG = Config(hidden_size=64, num_heads=4, train_length=32)
D, LONGEST = 16, 256


def encode(x, p):
    """ExpoSB's features by its definition, for one vector at one position."""
    feature = torch.arange(D, dtype=torch.float64)
    angles = p * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    a, b = x[..., ::2], x[..., 1::2]
    turned = torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).flatten(-2)
    gains = 0.8 + 0.4 * torch.exp(-((feature - D // 4) ** 2) / (2 * (D // 8) ** 2))
    return gains * (1 + 0.2 * math.exp(-0.001 * p)) * turned


def measured(row):
    return row["measured"], list(row["measured"].values())


def test_scores_and_probabilities_are_those_of_the_definition():
    q, k = draw(2, 5, D)
    m, n = torch.tensor([0, 7, 200]), torch.tensor([3, 7, 50])
    by_definition = torch.stack([(encode(q, i) * encode(k, j)).sum(-1) / D**0.5 for i, j in zip(m, n, strict=True)])
    torch.testing.assert_close(scores_of(ExpoSB(), q, k, m, n), by_definition, rtol=1e-6, atol=1e-6)
    q, k = draw(2, 6, 3, D)
    encoded = [torch.stack([encode(x[p], p) for p in range(6)]) for x in (q, k)]
    logits = torch.einsum("mhd,nhd->hmn", *encoded) / D**0.5
    torch.testing.assert_close(probabilities_of(ExpoSB(), q, k), logits.softmax(-1), rtol=1e-6, atol=1e-6)


def test_sticks_are_broken_in_their_order():
    scores = torch.tensor([[0.0, 100.0, math.log(3.0)]], dtype=torch.float64)
    forward, backward = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 1, 0]])
    torch.testing.assert_close(break_sticks(scores, forward), torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(break_sticks(scores, backward), torch.tensor([[0.0, 0.25, 0.75]], dtype=torch.float64))


def test_no_stick_is_broken():
    row = exposb.check_stick_breaking(D, 32, LONGEST)
    _, (elsewhere, softmax, first, last) = measured(row)
    assert row["verdict"] == "false"
    assert softmax < 1e-12
    assert 0.3 < elsewhere < 1
    assert 0.005 < first < 0.5
    assert 0.005 < last < 0.5


def test_norms():
    row = exposb.check_norms(D, 32, LONGEST)
    _, (low, high, feature_low, feature_high, first, last, rope) = measured(row)
    assert row["verdict"] == "false"
    assert feature_high == pytest.approx(1.2 * 1.2)
    assert feature_low == pytest.approx((1 + 0.2 * math.exp(-0.255)) * 0.8, rel=1e-3)
    assert feature_low < low < last < first < high < feature_high
    norms = draw(exposb.N_PAIRS, D)
    by_definition = encode(norms, 0).norm(dim=-1) / norms.norm(dim=-1)
    assert first == pytest.approx(float(by_definition.mean()), rel=1e-6)
    assert rope < 1e-6


def test_positions_are_not_relative():
    row = exposb.check_relative(D, 32, LONGEST)
    _, (mean, greatest, by_gains, rope) = measured(row)
    assert row["verdict"] == "false"
    assert 0.1 < mean < greatest < 2
    assert 0.05 < by_gains < mean
    assert rope < 1e-5

    q, k = draw(2, exposb.N_PAIRS, D)
    n = torch.linspace(0, LONGEST - 9, exposb.POSITIONS).long().tolist()
    scores = torch.stack([(encode(q, p + 8) * encode(k, p)).sum(-1) for p in n])
    change = (scores.amax(0) - scores.amin(0)) / scores.std()
    assert (mean, greatest) == pytest.approx((float(change.mean()), float(change.max())), rel=1e-5)
    stretch = torch.tensor([(1 + 0.2 * math.exp(-0.001 * (p + 8))) * (1 + 0.2 * math.exp(-0.001 * p)) for p in n])
    scores = scores / stretch[:, None]
    assert by_gains == pytest.approx(float(((scores.amax(0) - scores.amin(0)) / scores.std()).mean()), rel=1e-5)


def test_the_amplitude():
    row = exposb.check_amplitude(D, 32, LONGEST)
    assert row["verdict"] == "in part"
    by_definition = {f"at position {p}": 1 + 0.2 * math.exp(-0.001 * p) for p in (0, 31, 255, exposb.FAR)}
    assert row["measured"] == pytest.approx(by_definition)


def test_scores_grow_towards_the_beginning():
    row = exposb.check_fall_with_distance(D, 32, LONGEST)
    _, (back, ahead, rope_back, rope_ahead, alike, rope_alike) = measured(row)
    assert row["verdict"] == "false"
    assert 1.02 < back < 1.1
    assert 0.9 < ahead < 0.98
    assert (rope_back, rope_ahead) == pytest.approx((1, 1))
    angles = 32 * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    assert rope_alike == pytest.approx(float(angles.cos().mean()), abs=1e-6)
    assert alike < rope_alike


def test_the_distance_decay_multiplies_scores():
    row = exposb.check_distance_decay(D, 32, LONGEST)
    _, (near, far, limit, raised, *shares) = measured(row)
    assert row["verdict"] == "in part"
    assert (near, far, limit) == pytest.approx((0.7 + 0.3 * math.exp(-0.16), 0.7 + 0.3 * math.exp(-1.275), 0.7))
    assert raised == pytest.approx(0.5, abs=0.03)
    assert shares[1] < shares[2] < shares[0] < 0.35


def test_gains_are_of_features():
    row = exposb.check_band_gains(D, 32, LONGEST)
    _, (least, greatest, feature, low, within) = measured(row)
    assert row["verdict"] == "in part"
    gains = encode(torch.eye(D, dtype=torch.float64), 0).diagonal() / 1.2
    assert (least, greatest) == pytest.approx((float(gains.min()), float(gains.max())))
    assert feature == D // 4
    assert low == 6 / 16
    assert within == pytest.approx(float((gains[::2] / gains[1::2]).log().abs().max().exp()))


@dataclass(frozen=True, eq=False)
class Falling(PositionScheme):
    """Scores that do fall exponentially with distance."""

    def score_mod(self, scores, distance):
        return scores * torch.exp(-0.02 * distance.abs().double())


class ByPair(ExpoSB):
    """Gains that are of pairs."""

    def rotation(self, positions, head_dim):
        table = super().rotation(positions, head_dim)
        return table._replace(weights=table.weights[::2].repeat_interleave(2))


class Decaying(Rope):
    """An amplitude that falls to 0."""

    def rotation(self, positions, head_dim):
        table = super().rotation(positions, head_dim)
        amplitude = torch.exp(-0.01 * positions.double())[..., None].float()
        return table._replace(cos=table.cos * amplitude, sin=table.sin * amplitude)


@pytest.mark.parametrize(
    ("name", "scheme", "check"),
    [
        ("EXPOSB", Rope(interleaved=True), lambda: exposb.check_norms(D, 32, LONGEST)),
        ("EXPOSB", Rope(interleaved=True), lambda: exposb.check_relative(D, 32, LONGEST)),
        ("EXPOSB", Decaying(interleaved=True), lambda: exposb.check_amplitude(D, 32, LONGEST)),
        ("EXPOSB", Falling(), lambda: exposb.check_fall_with_distance(D, 32, LONGEST)),
        ("EXPOSB", ByPair(), lambda: exposb.check_band_gains(D, 32, LONGEST)),
    ],
)
def test_verdicts_go_by_what_is_measured(monkeypatch, name, scheme, check):
    assert check()["verdict"] != "true"
    monkeypatch.setattr(exposb, name, scheme)
    assert check()["verdict"] == "true"


def test_band_weights_are_one_for_each_head():
    trained = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 2.0], [2.0, 2.0]])]
    row = exposb.check_band_weights(64, 4, trained)
    assert row["verdict"] == "false"
    expected = {
        "weights of a layer": 4,
        "heads": 4,
        "trained models": 2,
        "mean after training": 2.25,
        "standard deviation over heads, layers and models": 5.5**0.5 / 8**0.5,
        "least after training": 1,
        "greatest after training": 4,
        "least mean of a model": 2,
        "greatest mean of a model": 2.5,
    }
    assert expected == pytest.approx({key: row["measured"][key] for key in expected})
    assert row["measured"]["largest difference from a head's scores times the square of its weight"] < 1e-12
    assert "From 1 they went to 2.250 ± 0.829 (1.000 to 4.000)" in row["finding"]
    assert "trained" not in exposb.check_band_weights(64, 4, [])["finding"]


def test_the_weights_of_a_trained_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([ExpoSBBERTAttention(64, 4) for _ in range(3)])

    model = Model()
    weights = torch.randn(3, 4)
    for layer, of_layer in zip(model.layers, weights, strict=True):
        layer.band_weights.data.copy_(of_layer)
    found = trained_band_weights(model)
    assert torch.equal(found.float(), weights)
    assert not found.requires_grad


def test_gradients():
    row = exposb.check_gradients(D)
    assert row["verdict"] == "false"
    _, (reached, ours, error) = measured(row)
    assert (reached, ours) == (0, 4)
    assert error < 1e-5


def rows_of(losses, lengths=(32, 256)):
    """Losses as {scheme: a list over seeds of losses at the lengths}."""
    return [
        {"kind": "evaluation", "scheme": scheme, "seed": seed, "length": length, "loss": loss}
        for scheme, seeds in losses.items()
        for seed, at in enumerate(seeds)
        for length, loss in zip(lengths, at, strict=True)
    ]


def test_losses_are_compared_seed_by_seed():
    losses = {"exposb": [[2.0, 3.0], [2.1, 3.3], [2.2, 3.1]], "rope": [[1.9, 3.9], [1.99, 4.0], [2.11, 4.1]]}
    learns, reads = compare_losses(rows_of(losses), 32)
    expected = {
        "seeds": 3,
        "mean of ExpoSB's loss": 2.1,
        "standard deviation of ExpoSB's loss": 0.1,
        "mean of RoPE's loss": 2.0,
        "standard deviation of RoPE's loss": (0.01 + 0.0001 + 0.0121) ** 0.5 / 2**0.5,
        "mean of difference": 0.1,
        "standard deviation of difference": 0.01,
    }
    assert learns["measured"] == pytest.approx(expected)
    assert learns["verdict"] == "false"  # ExpoSB's is greater
    assert reads["verdict"] == "true"
    assert reads["measured"]["mean of ExpoSB's rise"] == pytest.approx((1 + 1.2 + 0.9) / 3)
    assert reads["measured"]["mean of difference"] == pytest.approx((1 + 1.2 + 0.9 - 2 - 2.01 - 1.99) / 3)
    assert (
        "from length 32 to 256: 1.033 ± 0.153 by ExpoSB, 2.000 ± 0.010 by RoPE; difference -0.967" in reads["finding"]
    )


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.1], "not shown"),
        ([-0.1, -0.11], "true"),
        ([-0.1, -0.2], "not shown"),
        ([0.1, 0.11, 0.13], "false"),
        ([-0.1, -0.13, -0.07], "true"),  # 3.3 standard deviations; 2.5 are needed
        ([-0.1, -0.15, -0.05], "not shown"),
        ([0.1, 0.11, 0.3], "not shown"),
        ([-0.1, 0.11, -0.1], "not shown"),
        ([-0.1 - 0.05 * (n % 2) for n in range(30)], "true"),
        ([0.0, 0.0], "not shown"),
    ],
)
def test_a_difference_is_shown_only_beyond_the_spread_of_seeds(differences, verdict):
    losses = {"exposb": [[2 + d, 3.0] for d in differences], "rope": [[2.0, 3.0]] * len(differences)}
    assert compare_losses(rows_of(losses), 32)[0]["verdict"] == verdict


def test_all_claims_are_checked_in_words_and_numbers():
    losses = {"exposb": [[2.0, 3.0]], "rope": [[1.9, 3.9]]}
    trained = {"kind": "training", "scheme": "exposb", "seed": 0, "band_weights": torch.ones(2, 4).tolist()}
    record = [trained, {"kind": "training", "scheme": "rope", "seed": 0}, *rows_of(losses)]
    rows = check_exposb(CONFIG, record)
    assert len({row["claim"] for row in rows}) == len(rows) == 11
    for row in rows:
        assert row["verdict"] in ("true", "false", "in part", "not shown")
        assert row["finding"].endswith(".")
        assert "nan" not in row["finding"]
        assert all(isinstance(value, float) and math.isfinite(value) for value in row["measured"].values())
    assert len(check_exposb(CONFIG)) == 9
    assert check_exposb(CONFIG, record) == rows
