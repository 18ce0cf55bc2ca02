"""The position schemes against their equations, written out in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import inverse_frequencies, rope_table
from ropewalk.schemes import (
    Alibi,
    ExpoSB,
    NoPosition,
    PositionScheme,
    ReRope,
    Rope,
    Rotation,
    SelfExtend,
    T5Bias,
    alibi_slopes,
)

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
    "rope-offset": Rope(rotary_offset=2),
    "alibi": Alibi(),
    "alibi-slopes": Alibi(torch.ones(3)),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
    "exposb-bands": ExpoSB(band_weights=torch.tensor([0.5, 1.5, 2.0])),
    "t5": T5Bias(torch.randn(32, 3, generator=torch.Generator().manual_seed(0))),
    "t5-decoder": T5Bias(torch.ones(8, 3), bidirectional=False, max_distance=20),
    "rerope": ReRope(4),
    "rerope-leak": ReRope(4, leak=2),
    "rerope-log": ReRope(4, log_n=8, rope=Rope(500000.0)),
    "extend": SelfExtend(4, 2),
    "extend-log": SelfExtend(4, 2, log_n=8),
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
    published = Alibi().score_mod_params(12, device)
    assert published.device.type == device.type
    assert torch.equal(published.cpu(), alibi_slopes(12)[:, None])
    given = torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64)
    own = Alibi(given).score_mod_params(3, device)
    assert own.dtype == torch.float32
    assert own.tolist() == [[0.5], [3.0], [0.0]]


@pytest.mark.parametrize("slopes", [torch.ones(3), torch.ones(4, 1), torch.tensor(1.0)])
def test_alibi_slopes_of_another_number_of_heads_are_refused(slopes, device):
    with pytest.raises(ValueError, match=r"slopes has shape .*, but must be \(H,\) or \(B, H\) with H = 4"):
        Alibi(slopes).score_mod_params(4, device)


def test_alibi_subtracts_slope_times_distance_on_both_sides(device):
    scores = torch.zeros(1, 2, 2, 3, dtype=torch.float64, device=device)
    distance = torch.tensor([[1, 0, -1], [2, 1, 7]], device=device)[None, None]
    changed = Alibi(torch.tensor([0.5, 2.0])).score_mod(scores, distance)
    assert changed.tolist() == [[[[-0.5, 0, -0.5], [-1, -0.5, -3.5]], [[-2, 0, -2], [-4, -2, -14]]]]


BAD_ROPES = {
    "odd": ({"rotary_dim": 7}, "rotary_dim is 7, but must be an even int of at least 2"),
    "none": ({"rotary_dim": 0}, "rotary_dim is 0, but must be an even int of at least 2"),
    "negative": ({"rotary_dim": -2}, "rotary_dim is -2, but must be an even int of at least 2"),
    "wider": ({"rotary_dim": 8, "inv_freq": torch.ones(3)}, "rotary_dim is 8, but inv_freq has 3 values, for 6"),
    "narrower": ({"rotary_dim": 4, "inv_freq": torch.ones(4)}, "rotary_dim is 4, but inv_freq has 4 values, for 8"),
    "2-D": ({"inv_freq": torch.ones(1, 4)}, r"inv_freq has shape \(1, 4\), but must be \(R/2,\)"),
    "0-D": ({"inv_freq": torch.tensor(1.0)}, r"inv_freq has shape \(\), but must be \(R/2,\)"),
    "learned": ({"inv_freq": torch.ones(4, requires_grad=True)}, "inv_freq requires a gradient, but frequencies are"),
    "empty": ({"inv_freq": torch.ones(0)}, r"inv_freq has shape \(0,\), but must be \(R/2,\)"),
    "infinite": ({"attention_factor": math.inf}, "attention_factor is inf, but must be finite"),
    "base": ({"base": -1.0}, "base is -1.0, but must be finite and above 0"),
    "offset": ({"rotary_offset": -2}, "rotary_offset is -2, but must be an int of at least 0"),
    "fraction of an offset": ({"rotary_offset": 2.0}, "rotary_offset is 2.0, but must be an int of at least 0"),
    "offset or not": ({"rotary_offset": True}, "rotary_offset is True, but must be an int of at least 0"),
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
        (Rope(rotary_dim=10), 8, "Rope rotates 10 features, but they must fit the head dim, 8"),
        (Rope(inv_freq=torch.ones(5)), 8, "Rope rotates 10 features, but they must fit the head dim, 8"),
        (
            Rope(rotary_dim=6, rotary_offset=4),
            8,
            "Rope rotates 6 features after the first 4, but they must fit the head dim, 8",
        ),
        (Rope(rotary_offset=8), 8, "rotary_offset is 8, but must be below the head dim, 8"),
        (Rope(rotary_offset=3), 8, "rotary_dim is 5, but must be a positive even"),
        (Rope(), 7, "rotary_dim is 7, but must be a positive even"),
    ],
)
def test_a_rope_that_does_not_fit_the_head_is_refused(rope, head_dim, pattern):
    with pytest.raises(ValueError, match=pattern):
        rope.rotation(torch.arange(3), head_dim)


def test_a_rope_as_wide_as_the_head_is_not_refused():
    for rope in (Rope(rotary_dim=8), Rope(inv_freq=torch.ones(4)), Rope(rotary_dim=8, inv_freq=torch.ones(4))):
        assert rope.rotation(torch.arange(3), 8).cos.shape == (3, 4)


def test_a_rope_may_turn_the_last_features():
    positions = torch.arange(5)
    for rope in (Rope(rotary_dim=4, rotary_offset=8), Rope(rotary_offset=8)):
        rotation = rope.rotation(positions, 12)
        assert rotation.offset == 8
        alone = Rope().rotation(positions, 4)
        assert torch.equal(rotation.cos, alone.cos)
        assert torch.equal(rotation.sin, alone.sin)
    assert Rope(rotary_dim=4, rotary_offset=2).rotation(positions, 12).offset == 2


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
    with pytest.raises(ValueError, match=rf"head dim is {head_dim}, but must be even and at least 8 for ExpoSB"):
        ExpoSB().rotation(torch.arange(3), head_dim)


def test_exposb_decays_by_the_distance_where_asked(device):
    scores = torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=torch.float64, device=device)[None, None]
    distance = torch.tensor([[0, 200, -200, 100_000]], device=device)[None, None]
    factors = torch.tensor([1.0, 0.7 + 0.3 / math.e, 0.7 + 0.3 / math.e, 0.7], dtype=torch.float64, device=device)
    torch.testing.assert_close(ExpoSB(distance_decay=True).score_mod(scores, distance), scores * factors)
    assert torch.equal(ExpoSB().score_mod(scores, distance), scores)


def test_exposb_weighs_heads_by_the_square(device):
    bands = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
    scores = torch.randn(2, 3, 2, 2, dtype=torch.float64, device=device)
    distance = torch.tensor([[3, 1], [4, -2]], device=device)[None, None]
    weights = torch.tensor([0.25, 4.0, 0.0], dtype=torch.float64, device=device)[:, None, None]
    for decay in (False, True):
        plain = ExpoSB(distance_decay=decay).score_mod(scores, distance)
        scheme = ExpoSB(distance_decay=decay, band_weights=bands)
        torch.testing.assert_close(scheme.score_mod(scores, distance), plain * weights)
        assert scheme.kernel_score_mod().endswith(":EXPOSB_BANDS_DECAY" if decay else ":EXPOSB_BANDS")
        numbers = scheme.score_mod_params(3, device)
        assert (numbers.dtype, numbers.tolist()) == (torch.float32, [[0.25], [4.0], [0.0]])
        assert scheme.rotation(distance[0, 0], 8).cos.equal(ExpoSB().rotation(distance[0, 0], 8).cos)
    assert ExpoSB(distance_decay=True).score_mod_params(3, device) is None


# Two encodings


BAD_FAR_SCHEMES = {
    "no window": (ValueError, lambda: ReRope(0), "window is 0, but must be an int of at least 1"),
    "negative": (ValueError, lambda: SelfExtend(-3, 2), "window is -3, but must be an int of at least 1"),
    "fraction": (ValueError, lambda: ReRope(4.0), r"window is 4\.0, but must be an int of at least 1"),
    "window or not": (ValueError, lambda: SelfExtend(True, 2), "window is True, but must be an int of at least 1"),
    "none": (ValueError, lambda: ReRope(None), "window is None, but must be an int of at least 1"),
    "leak below 1": (ValueError, lambda: ReRope(4, leak=0.5), r"leak is 0\.5, but must be None or a finite number of"),
    "infinite leak": (ValueError, lambda: ReRope(4, leak=math.inf), "leak is inf, but must be None or a finite number"),
    "leak of nan": (ValueError, lambda: ReRope(4, leak=math.nan), "leak is nan, but must be None or a finite number"),
    "leak or not": (ValueError, lambda: ReRope(4, leak=True), "leak is True, but must be None or a finite number"),
    "leak in words": (ValueError, lambda: ReRope(4, leak="2"), "leak is '2', but must be None or a finite number"),
    "no group": (ValueError, lambda: SelfExtend(4, 0), "group is 0, but must be an int of at least 1"),
    "part of a group": (ValueError, lambda: SelfExtend(4, 1.5), r"group is 1\.5, but must be an int of at least 1"),
    "group or not": (ValueError, lambda: SelfExtend(4, True), "group is True, but must be an int of at least 1"),
    "log_n of 1": (ValueError, lambda: ReRope(4, log_n=1), "log_n is 1, but must be None or an int of at least 2"),
    "fraction of log_n": (
        ValueError,
        lambda: SelfExtend(4, 2, log_n=512.0),
        r"log_n is 512\.0, but must be None or an int of at least 2",
    ),
    "another scheme": (TypeError, lambda: SelfExtend(4, 2, rope=Alibi()), "rope is Alibi.*, but must be None or"),
    "leak by place": (TypeError, lambda: ReRope(4, 2.0), "positional argument"),
    "log_n by place": (TypeError, lambda: SelfExtend(4, 2, 512), "positional argument"),
    "nothing": (TypeError, ReRope, "window"),
    "no word of the group": (TypeError, lambda: SelfExtend(4), "group"),
}


@pytest.mark.parametrize("case", BAD_FAR_SCHEMES)
def test_a_far_scheme_that_contradicts_itself_is_refused(case):
    error, make, pattern = BAD_FAR_SCHEMES[case]
    with pytest.raises(error, match=pattern):
        make()


def test_what_far_schemes_take_at_the_least_is_not_refused():
    for scheme in (ReRope(1, leak=1, log_n=2), SelfExtend(1, 1, log_n=2), ReRope(2**40, leak=1e9), SelfExtend(4, 9)):
        assert scheme.far_window() == scheme.window


def test_far_schemes_turn_near_pairs_as_rope_does(device):
    rope = Rope(500.0, rotary_dim=8, interleaved=True, attention_factor=1.1, rotary_offset=2)
    positions = torch.tensor([[0, 5, 10**6, -2]], device=device)
    expected = rope.rotation(positions, 16)
    for scheme in (ReRope(3, rope=rope), ReRope(3, leak=2, rope=rope), SelfExtend(3, 2, rope=rope)):
        assert scheme.query_rotation(positions, 16) is None
        near = scheme.rotation(positions, 16)
        assert torch.equal(near.cos, expected.cos)
        assert torch.equal(near.sin, expected.sin)
        for of in ("past", "future", "keys"):
            far = scheme.far_rotation(positions, 16, of)
            for table in (near,) if far is None else (near, far):
                assert table[2:] == expected[2:]
                assert table.cos.shape == expected.cos.shape
    for scheme in (Rope(), Alibi(), ExpoSB()):
        assert scheme.far_window() is None


@pytest.mark.parametrize("scheme", [ReRope(3, rope=Rope(rotary_dim=10)), SelfExtend(3, 2, rope=Rope(rotary_dim=10))])
def test_a_rope_that_does_not_fit_the_head_is_refused_within_another_scheme(scheme):
    for make in (lambda: scheme.rotation(torch.arange(3), 8), lambda: scheme.far_rotation(torch.arange(3), 8, "past")):
        with pytest.raises(ValueError, match="Rope rotates 10 features, but they must fit the head dim, 8"):
            make()


# T5's buckets


def bucket_of(scheme, ahead):
    """The bucket of n − m, as score_mod finds it: the table's rows count up."""
    table = torch.arange(scheme.table.shape[0], dtype=torch.float64, device=ahead.device)[:, None]
    counting = dataclasses.replace(scheme, table=table)
    scores = torch.zeros(1, 1, 1, ahead.numel(), dtype=torch.float64, device=ahead.device)
    return counting.score_mod(scores, -ahead[None, None, None]).flatten().long()


BUCKETS = list(
    itertools.product((4, 5, 8, 31, 32, 33, 64, 128), (17, 20, 64, 100, 128, 500, 1000, 2000), (True, False))
)


def test_t5_finds_the_buckets_of_transformers(device):
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    ahead = torch.arange(-1000, 1001, device=device)
    compared = 0
    for buckets, furthest, bidirectional in BUCKETS:
        if furthest <= (buckets // 2 if bidirectional else buckets) // 2:
            continue
        scheme = T5Bias(torch.randn(buckets, 3), bidirectional=bidirectional, max_distance=furthest)
        expected = attention._relative_position_bucket(ahead, bidirectional, buckets, furthest)
        assert torch.equal(bucket_of(scheme, ahead), expected), (buckets, furthest, bidirectional)
        compared += 1
    assert compared > 100


def test_t5_finds_the_published_buckets(device):
    ahead = torch.tensor([0, 1, 7, 8, 11, 12, 15, 17, 22, 23, 90, 91, 127, 10**9], device=device)
    past = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 14, 15, 15, 15]
    encoder, decoder = T5Bias(torch.ones(32, 1)), T5Bias(torch.ones(32, 1), bidirectional=False)
    assert bucket_of(encoder, -ahead).tolist() == past
    assert bucket_of(encoder, ahead).tolist() == [0, *(bucket + 16 for bucket in past[1:])]
    assert not bucket_of(decoder, ahead).any()
    ahead = torch.tensor([0, 1, 15, 16, 18, 19, 112, 113, 10**9], device=device)
    assert bucket_of(decoder, -ahead).tolist() == [0, 1, 15, 16, 16, 17, 30, 31, 31]


@pytest.mark.parametrize("name", ["t5", "t5-decoder"])
def test_t5_passes_all_that_a_lookup_needs(device, name):
    scheme = SCHEMES[name]
    buckets, furthest = scheme.table.shape[0], scheme.max_distance
    numbers = scheme.score_mod_params(3, device)
    assert (numbers.dtype, numbers.device.type) == (torch.float32, device.type)
    assert numbers.shape == (3, 2 + buckets + 2 * furthest + 1)
    ahead = torch.arange(-furthest, furthest + 1, device=device)
    for head in range(3):
        assert numbers[head, :2].tolist() == [furthest, buckets]
        assert torch.equal(numbers[head, 2 : 2 + buckets].cpu(), scheme.table[:, head])
        assert torch.equal(numbers[head, 2 + buckets :].long(), bucket_of(scheme, ahead))


def test_t5_adds_the_bias_of_head_and_batch_row(device):
    scheme = SCHEMES["t5"]
    scores = torch.randn(2, 3, 4, 5, device=device)
    distance = torch.randint(-200, 200, (2, 1, 4, 5), device=device)
    bias = scheme.table.to(device)[bucket_of(scheme, -distance.flatten())].reshape(2, 4, 5, 3).permute(0, 3, 1, 2)
    assert torch.equal(scheme.score_mod(scores, distance), scores + bias)
    assert torch.equal(scheme.score_mod(scores, distance[:1]), scores + bias[:1])


BAD_T5S = {
    "a list": (TypeError, [[1.0]], {}, "table is list, but must be a floating-point tensor"),
    "integers": (TypeError, torch.ones(32, 4, dtype=torch.long), {}, r"table is a tensor of torch\.int64, but must be"),
    "1-D": (ValueError, torch.ones(32), {}, r"table has shape \(32,\), but must be \(num_buckets, H\) with 4 buckets"),
    "few": (ValueError, torch.ones(3, 4), {}, "with 4 buckets or more"),
    "fewer": (ValueError, torch.ones(1, 4), {"bidirectional": False}, "with 2 buckets or more"),
    "near": (ValueError, torch.ones(32, 4), {"max_distance": 8}, "max_distance is 8, but must be an int above 8"),
    "nearer": (
        ValueError,
        torch.ones(32, 4),
        {"max_distance": 16, "bidirectional": False},
        "max_distance is 16, but must be an int above 16",
    ),
    "fraction": (ValueError, torch.ones(32, 4), {"max_distance": 64.0}, r"max_distance is 64\.0, but must be an int"),
}


@pytest.mark.parametrize("case", BAD_T5S)
def test_a_t5_table_that_cannot_be_one_is_refused(case):
    error, table, arguments, pattern = BAD_T5S[case]
    with pytest.raises(error, match=pattern):
        T5Bias(table, **arguments)


def test_what_is_learned_must_be_for_as_many_heads(device):
    for scheme, name in (
        (T5Bias(torch.ones(32, 3)), "table"),
        (ExpoSB(band_weights=torch.ones(3)), "band_weights"),
        (Alibi(torch.ones(3)), "slopes"),
    ):
        scores = torch.zeros(1, 4, 1, 1, device=device)
        for call in (
            lambda scheme=scheme: scheme.score_mod_params(4, device),
            lambda scheme=scheme, scores=scores: scheme.score_mod(scores, scores.long()),
        ):
            with pytest.raises(ValueError, match=rf"{name} has shape .*, but must be .* with H = 4"):
                call()


@pytest.mark.parametrize("make", [Alibi, lambda x: ExpoSB(band_weights=x)])
@pytest.mark.parametrize("x", [[0.5], torch.ones(4, dtype=torch.int32)], ids=["list", "integers"])
def test_what_is_learned_must_be_floating_point(make, x):
    with pytest.raises(TypeError, match=r"is .*, but must be a floating-point tensor, \(H,\)"):
        make(x)


LEARNED = {
    "alibi": (Alibi, (3,)),
    "exposb": (lambda x: ExpoSB(band_weights=x), (3,)),
    "exposb-decay": (lambda x: ExpoSB(band_weights=x, distance_decay=True), (3,)),
    "t5": (lambda x: T5Bias(x, max_distance=9), (8, 3)),
    "t5-decoder": (lambda x: T5Bias(x, max_distance=9, bidirectional=False), (8, 3)),
}


@pytest.mark.parametrize("name", LEARNED)
def test_schemes_are_differentiable(name, device):
    make, shape = LEARNED[name]
    weight = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    scores = torch.randn(2, 3, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    distance = torch.randint(-12, 12, (2, 1, 3, 4), device=device)
    changed = lambda weight, scores: make(weight).score_mod(scores, distance)  # noqa: E731
    assert torch.autograd.gradcheck(changed, (weight, scores))
    assert torch.autograd.gradgradcheck(changed, (weight, scores))
    numbers = make(weight).score_mod_params(3, device)
    (grad,) = torch.autograd.grad(numbers, weight, torch.ones_like(numbers))
    torch.testing.assert_close(grad, 2 * weight.detach() if "exposb" in name else torch.ones_like(grad))
    columns = make(weight).n_learned_params() or numbers.shape[1]
    (grad_columns,) = torch.autograd.grad(make(weight).score_mod_params(3, device)[:, :columns].sum(), weight)
    assert torch.equal(grad_columns, grad)


class _Watch(TorchDispatchMode):
    """Lets nothing be made but on one kind of device, and no value be waited for."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert "_local_scalar_dense" not in str(function)
        made = function(*arguments, **(keywords or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            assert not isinstance(x, torch.Tensor) or x.device.type == self.kind, function
        return made


@pytest.mark.parametrize("name", ["alibi", "alibi-slopes", "exposb-bands", "t5", "t5-decoder"])
def test_numbers_are_made_on_the_device(name):
    scheme = SCHEMES[name]
    for field in dataclasses.fields(scheme):
        if isinstance(getattr(scheme, field.name), torch.Tensor):
            there = nn.Parameter(getattr(scheme, field.name).to("meta"))
            scheme = dataclasses.replace(scheme, **{field.name: there})
    with _Watch("meta"):
        scheme.score_mod_params(3, torch.device("meta"))
        scores = torch.empty(1, 3, 4, 5, device="meta")
        scheme.score_mod(scores, torch.empty(1, 1, 4, 5, dtype=torch.long, device="meta"))


@pytest.mark.parametrize("scheme", [NoPosition(), Alibi(), T5Bias(torch.ones(32, 1)), PositionScheme()])
def test_schemes_that_leave_features_alone_say_so(scheme):
    assert scheme.rotation(torch.arange(3), 8) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_that_leave_scores_alone_say_so(name, device):
    scheme = SCHEMES[name]
    scores = torch.randn(2, 3, 4, 5, device=device)
    distance = torch.arange(20, device=device).reshape(1, 1, 4, 5)
    stays = torch.equal(scheme.score_mod(scores, distance), scores)
    assert stays is (scheme.kernel_score_mod() is None) is not scheme.has_score_mod()
    assert stays is (name == "none" or name.startswith(("rope", "rerope", "extend")) or name == "exposb")


def test_a_rotation_unpacks_in_the_order_of_apply_rope():
    assert Rotation._fields == ("cos", "sin", "interleaved", "weights", "offset", "scale", "pair_block")
    assert Rotation(torch.ones(1, 1), torch.ones(1, 1), False, None)[4:] == (0, None, None)


def test_two_of_no_position_are_one():
    assert NoPosition() == NoPosition()
    assert hash(NoPosition()) == hash(NoPosition())
    assert len({NoPosition(), NoPosition()}) == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_found_again_in_a_dictionary(name):
    assert {SCHEMES[name]: name}[SCHEMES[name]] == name


@pytest.mark.parametrize("kind", [Rope, Alibi, ExpoSB, T5Bias, ReRope, SelfExtend])
def test_schemes_that_differ_are_not_equal(kind):
    schemes = [scheme for scheme in SCHEMES.values() if type(scheme) is kind]
    assert len(schemes) > 1
    assert not any(a == b for a, b in itertools.combinations(schemes, 2))
    assert len(set(schemes)) == len(schemes)


def test_schemes_of_different_kinds_are_not_equal():
    kinds = {type(scheme): scheme for scheme in SCHEMES.values()}.values()
    assert len(kinds) == 7
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
