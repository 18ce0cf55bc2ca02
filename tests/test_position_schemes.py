"""The position schemes against their equations, written out in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from ropewalk import inverse_frequencies, rope_table
from ropewalk.positions import Alibi, ExpoSB, NoPosition, PositionScheme, Rope, Rotation, alibi_slopes

EPS = torch.finfo(torch.float32).eps

# The exponents of two, without their sign.
OF_8 = [1, 2, 3, 4, 5, 6, 7, 8]
OF_16 = [0.5 * head for head in range(1, 17)]
OF_32 = [0.25 * head for head in range(1, 33)]
SLOPE_EXPONENTS = {
    1: [8],
    2: [4, 8],
    3: [4, 8, 2],
    6: [2, 4, 6, 8, 1, 3],
    8: OF_8,
    12: [*OF_8, 0.5, 1.5, 2.5, 3.5],
    16: OF_16,
    40: [*OF_32, 0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875],
}
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-base": Rope(base=500000.0),
    "rope-interleaved": Rope(interleaved=True),
    "rope-partial": Rope(rotary_dim=4),
    "rope-factor": Rope(attention_factor=1.5),
    "rope-inv_freq": Rope(inv_freq=torch.ones(4)),
    "alibi": Alibi(),
    "alibi-slopes": Alibi(torch.ones(3)),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
}
POSITIONS = {
    "in order": torch.arange(9),
    "out of order, by row": torch.tensor([[5, 0, 5, 1], [131_071, 3, 3, 2]]),
    "before the first": torch.tensor([[-3, -1, 0, 7]]),
    "far": torch.tensor([[1, 1_000_003, 16_000_000, 2**24 + 1]]),
}


@pytest.mark.parametrize("n_heads", SLOPE_EXPONENTS)
def test_alibi_slopes_are_the_published_ones(n_heads):
    slopes = alibi_slopes(n_heads)
    assert slopes.dtype == torch.float32
    exact = torch.tensor([2.0**-exponent for exponent in SLOPE_EXPONENTS[n_heads]], dtype=torch.float64)
    assert torch.equal(slopes, exact.float())


@pytest.mark.parametrize("n_heads", [0, -4])
def test_alibi_slopes_of_no_head_are_refused(n_heads):
    with pytest.raises(ValueError, match=rf"n_heads is {n_heads}, but must be at least 1"):
        alibi_slopes(n_heads)


def test_alibi_passes_its_slopes_to_the_score_functions(device):
    published = Alibi().score_parameters(12, device)
    assert published.device.type == device.type
    assert torch.equal(published.cpu(), alibi_slopes(12)[:, None])
    given = torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64)
    own = Alibi(given).score_parameters(3, device)
    assert own.dtype == torch.float32
    assert own.tolist() == [[0.5], [3.0], [0.0]]


@pytest.mark.parametrize("slopes", [torch.ones(3), torch.ones(4, 1), torch.tensor(1.0)])
def test_alibi_slopes_of_another_number_of_heads_are_refused(slopes, device):
    with pytest.raises(ValueError, match=r"slopes has shape .*, but must be \(H,\) with H = 4"):
        Alibi(slopes).score_parameters(4, device)


def test_alibi_subtracts_slope_times_distance_on_both_sides(device):
    scores = torch.zeros(1, 2, 2, 3, dtype=torch.float64, device=device)
    distance = torch.tensor([[1, 0, -1], [2, 1, 7]], device=device)[None, None]
    changed = Alibi(torch.tensor([0.5, 2.0])).change_scores(scores, distance)
    assert changed.tolist() == [[[[-0.5, 0, -0.5], [-1, -0.5, -3.5]], [[-2, 0, -2], [-4, -2, -14]]]]


BAD_ROPES = {
    "odd": ({"rotary_dim": 7}, "rotary_dim is 7, but must be an even int of at least 2"),
    "none": ({"rotary_dim": 0}, "rotary_dim is 0, but must be an even int of at least 2"),
    "negative": ({"rotary_dim": -2}, "rotary_dim is -2, but must be an even int of at least 2"),
    "wider": ({"rotary_dim": 8, "inv_freq": torch.ones(3)}, "rotary_dim is 8, but inv_freq has 3 values, for 6"),
    "narrower": ({"rotary_dim": 4, "inv_freq": torch.ones(4)}, "rotary_dim is 4, but inv_freq has 4 values, for 8"),
    "2-D": ({"inv_freq": torch.ones(1, 4)}, r"inv_freq has shape \(1, 4\), but must be \(R/2,\)"),
    "0-D": ({"inv_freq": torch.tensor(1.0)}, r"inv_freq has shape \(\), but must be \(R/2,\)"),
    "empty": ({"inv_freq": torch.ones(0)}, r"inv_freq has shape \(0,\), but must be \(R/2,\)"),
    "infinite": ({"attention_factor": math.inf}, "attention_factor is inf, but must be finite"),
    "base": ({"base": -1.0}, "base is -1.0, but must be finite and above 0"),
    "fraction": ({"rotary_dim": 8.0}, "rotary_dim is 8.0, but must be an even int of at least 2"),
    "nan": ({"attention_factor": math.nan}, "attention_factor is nan, but must be finite"),
}


@pytest.mark.parametrize("case", BAD_ROPES)
def test_a_rope_that_contradicts_itself_is_refused(case):
    arguments, pattern = BAD_ROPES[case]
    with pytest.raises(ValueError, match=pattern):
        Rope(**arguments)


@pytest.mark.parametrize(
    ("rope", "head_dim", "pattern"),
    [
        (Rope(rotary_dim=10), 8, "Rope turns 10 features, but the head dim is 8"),
        (Rope(inv_freq=torch.ones(5)), 8, "Rope turns 10 features, but the head dim is 8"),
        (Rope(), 7, "rotary_dim is 7, but must be a positive even"),
    ],
)
def test_a_rope_that_does_not_fit_the_head_is_refused(rope, head_dim, pattern):
    with pytest.raises(ValueError, match=pattern):
        rope.rotation(torch.arange(3), head_dim)


def test_a_rope_as_wide_as_the_head_is_not_refused():
    for rope in (Rope(rotary_dim=8), Rope(inv_freq=torch.ones(4)), Rope(rotary_dim=8, inv_freq=torch.ones(4))):
        assert rope.rotation(torch.arange(3), 8).cos.shape == (3, 4)


ROPES = {
    "default": (Rope(), 16, 10000.0, 1.0),
    "base": (Rope(base=500000.0), 16, 500000.0, 1.0),
    "partial": (Rope(rotary_dim=6), 6, 10000.0, 1.0),
    "factor": (Rope(attention_factor=1.25, interleaved=True), 16, 10000.0, 1.25),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("case", ROPES)
def test_rope_takes_its_tables_from_rope_table(case, positions, device):
    rope, rotary_dim, base, factor = ROPES[case]
    positions = positions.to(device)
    rotation = rope.rotation(positions, 16)
    inv_freq, _ = inverse_frequencies("default", rotary_dim, base)
    cos, sin = rope_table(positions, inv_freq, attention_factor=factor)
    assert rotation.cos.device.type == device.type
    assert rotation.cos.dtype == torch.float32
    assert torch.equal(rotation.cos, cos)
    assert torch.equal(rotation.sin, sin)
    assert rotation.interleaved is rope.interleaved
    assert rotation.weights is None


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rope_turns_by_the_frequencies_that_it_is_given(positions, device):
    inv_freq = torch.tensor([1.0, 0.3, 0.004], dtype=torch.float64)
    rotation = Rope(inv_freq=inv_freq, attention_factor=0.5).rotation(positions.to(device), 16)
    angles = positions[..., None].double() * inv_freq
    # A unit in the last place below 0.5: the rounding takes half of it, and what float64 leaves open in an angle of 16
    # million less than the other half.
    tolerance = EPS / 4
    torch.testing.assert_close(rotation.cos.cpu().double(), angles.cos() / 2, rtol=0, atol=tolerance)
    torch.testing.assert_close(rotation.sin.cpu().double(), angles.sin() / 2, rtol=0, atol=tolerance)


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("head_dim", [8, 18, 20, 64, 96])
def test_exposb_stretches_by_its_amplitude_and_weighs_by_its_gain_squared(head_dim, positions, device):
    rotation = ExpoSB().rotation(positions.to(device), head_dim)
    p = positions[..., None].double()
    omega = torch.tensor([10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    amplitude = 1 + 0.2 * torch.exp(-0.001 * p)
    middle, width = head_dim // 4, head_dim // 8
    gain = torch.tensor(
        [0.8 + 0.4 * math.exp(-((d - middle) ** 2) / (2 * width**2)) for d in range(head_dim)], dtype=torch.float64
    )
    # Cosine, amplitude and their product are each rounded to float32; the weights once.
    table_tolerance = 3 * EPS / 2 * float(amplitude.max())
    torch.testing.assert_close(rotation.cos.cpu().double(), amplitude * (p * omega).cos(), rtol=0, atol=table_tolerance)
    torch.testing.assert_close(rotation.sin.cpu().double(), amplitude * (p * omega).sin(), rtol=0, atol=table_tolerance)
    torch.testing.assert_close(rotation.weights.cpu().double(), gain * gain, rtol=EPS / 2, atol=0)
    assert rotation.interleaved is True
    assert {x.dtype for x in (rotation.cos, rotation.sin, rotation.weights)} == {torch.float32}


@pytest.mark.parametrize("head_dim", [4, 6, 7, 9, 65])
def test_exposb_refuses_head_dims_that_its_gain_is_not_made_for(head_dim):
    with pytest.raises(ValueError, match=rf"head dim is {head_dim}, but ExpoSB needs an even one of at least 8"):
        ExpoSB().rotation(torch.arange(3), head_dim)


def test_exposb_decays_by_the_distance_where_asked(device):
    scores = torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=torch.float64, device=device)[None, None]
    distance = torch.tensor([[0, 200, -200, 100_000]], device=device)[None, None]
    factors = torch.tensor([1.0, 0.7 + 0.3 / math.e, 0.7 + 0.3 / math.e, 0.7], dtype=torch.float64, device=device)
    torch.testing.assert_close(ExpoSB(distance_decay=True).change_scores(scores, distance), scores * factors)
    assert torch.equal(ExpoSB().change_scores(scores, distance), scores)


@pytest.mark.parametrize("scheme", [NoPosition(), Alibi(), PositionScheme()])
def test_schemes_that_leave_features_alone_say_so(scheme):
    assert scheme.rotation(torch.arange(3), 8) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_that_leave_scores_alone_say_so(name, device):
    scheme = SCHEMES[name]
    scores = torch.randn(2, 3, 4, 5, device=device)
    distance = torch.arange(20, device=device).reshape(1, 1, 4, 5)
    stays = torch.equal(scheme.change_scores(scores, distance), scores)
    assert stays == (scheme.score_functions() is None) == (name not in ("alibi", "alibi-slopes", "exposb-decay"))


def test_a_rotation_unpacks_in_the_order_of_apply_rope():
    assert Rotation._fields == ("cos", "sin", "interleaved", "weights")


def test_two_of_no_position_are_one():
    assert NoPosition() == NoPosition()
    assert hash(NoPosition()) == hash(NoPosition())
    assert len({NoPosition(), NoPosition()}) == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_found_again_in_a_dictionary(name):
    assert {SCHEMES[name]: name}[SCHEMES[name]] == name


@pytest.mark.parametrize("kind", [Rope, Alibi, ExpoSB])
def test_schemes_that_differ_are_not_equal(kind):
    schemes = [scheme for scheme in SCHEMES.values() if type(scheme) is kind]
    assert len(schemes) > 1
    assert not any(a == b for a, b in itertools.combinations(schemes, 2))
    assert len(set(schemes)) == len(schemes)


def test_schemes_of_different_kinds_are_not_equal():
    kinds = {type(scheme): scheme for scheme in SCHEMES.values()}.values()
    assert len(kinds) == 4
    assert not any(a == b for a, b in itertools.combinations(kinds, 2))


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_are_frozen(name):
    scheme = SCHEMES[name]
    for field in (*dataclasses.fields(scheme), *dataclasses.fields(Rope())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(scheme, field.name, None)


def test_inv_freq_must_be_a_tensor():
    with pytest.raises(TypeError, match=r"inv_freq is list, but must be a tensor, \(R/2,\)"):
        Rope(inv_freq=[1.0])


def test_only_the_base_goes_by_its_place():
    with pytest.raises(TypeError):
        Rope(10000.0, torch.ones(4))
    with pytest.raises(TypeError):
        ExpoSB(True)
