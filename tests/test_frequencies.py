"""Frequencies against transformers' own code, and tables against exactly reduced angles."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropewalk import FREQUENCIES, frequencies, inverse_frequencies, rope_table

TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")

# Both sides compute in float64. Twelve bits are for how far a formula may amplify a rounding: a ramp between values
# that are `factor` apart, over few pairs. An error in a formula is orders of magnitude above it.
FLOAT64_AGREEMENT = 2.0**-53 * 2**12

YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = [
    ("default", {}),
    ("linear", {"factor": 1.0}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 2.0, "max_position_embeddings": 4096}),
    ("dynamic", {"factor": 2.0, "max_position_embeddings": 4096, "seq_len": 100}),
    ("dynamic", {"factor": 2.0, "max_position_embeddings": 4096, "seq_len": 4097}),
    ("dynamic", {"factor": 4.0, "max_position_embeddings": 4096, "seq_len": 50_000}),
    ("yarn", YARN),
    ("yarn", {**YARN, "factor": 1.0}),
    ("yarn", {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("yarn", {**YARN, "mscale": 0.707}),
    ("yarn", {**YARN, "attention_factor": 1.25}),
    ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {**YARN, "truncate": False}),
    ("yarn", {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}),
    ("yarn", {**YARN, "original_max_position_embeddings": 3}),
    ("yarn", {**YARN, "factor": None, "max_position_embeddings": 6144}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": 64}),
    ("proportional", {}),
    ("proportional", {"partial_rotary_factor": 0.25}),
    ("proportional", {"partial_rotary_factor": 0.3, "factor": 8.0}),
    ("proportional", {"partial_rotary_factor": 0.0}),
    # transformers warns of these and goes on.
    ("llama3", {**LLAMA3, "high_freq_factor": 1.0}),  # Llama 4 Scout's
    ("llama3", {**LLAMA3, "low_freq_factor": 9.0, "high_freq_factor": 0.5}),
    ("llama3", {**LLAMA3, "factor": 0.5, "original_max_position_embeddings": 1}),
    ("linear", {"factor": 0.5}),
    ("dynamic", {"factor": 0.5, "max_position_embeddings": 4096, "seq_len": 50_000}),
    ("yarn", {**YARN, "factor": 0.5, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", {**YARN, "beta_fast": 1.0, "beta_slow": 32.0}),
    ("yarn", {**YARN, "attention_factor": -1.0}),
    ("yarn", {**YARN, "original_max_position_embeddings": 1}),
    ("proportional", {"factor": 0.5}),
]
LONGROPE = [
    {"factor": 4.0},
    {"factor": 1.0},
    {"factor": 4.0, "attention_factor": 1.5},
    {"max_position_embeddings": 131_072},
    {"max_position_embeddings": 512},
    {"factor": 4.0, "seq_len": 1024},
    {"factor": 4.0, "seq_len": 1025},
    {"factor": 0.5},  # transformers warns of these and goes on
    {"factor": 4.0, "attention_factor": -1.5},
]


def longrope_parameters(rotary_dim):
    pairs = range(rotary_dim // 2)
    return {
        "short_factor": [1 + 0.01 * i for i in pairs],
        "long_factor": [1.5 + 0.75 * i for i in pairs],
        "original_max_position_embeddings": 1024,
    }


def by_transformers(name, rotary_dim, base, parameters):
    parameters = dict(parameters)
    seq_len = parameters.pop("seq_len", None)
    config = LlamaConfig(
        hidden_size=2 * rotary_dim,
        num_attention_heads=2,
        head_dim=rotary_dim,
        max_position_embeddings=parameters.pop("max_position_embeddings", 16_384),
        rope_parameters={"rope_type": name, "rope_theta": base, **parameters},
    )
    if name == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=seq_len)


def check_against_transformers(name, rotary_dim, base, parameters, monkeypatch):
    inv_freq, attention_factor = inverse_frequencies(name, rotary_dim, base, **parameters)
    assert inv_freq.dtype == torch.float64
    assert inv_freq.shape == (rotary_dim // 2,)
    assert isinstance(attention_factor, float)
    with monkeypatch.context() as patch:  # transformers' own code, computing in float64
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected, expected_attention_factor = by_transformers(name, rotary_dim, base, parameters)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(inv_freq, expected, rtol=FLOAT64_AGREEMENT, atol=0)
    assert attention_factor == pytest.approx(expected_attention_factor, rel=FLOAT64_AGREEMENT, abs=0)


@pytest.mark.parametrize("base", [10_000.0, 1_000_000])
@pytest.mark.parametrize("rotary_dim", [8, 80, 128])
@pytest.mark.parametrize(("name", "parameters"), SCALINGS)
def test_scaling_equals_transformers(name, parameters, rotary_dim, base, monkeypatch):
    check_against_transformers(name, rotary_dim, base, parameters, monkeypatch)


@pytest.mark.parametrize("rotary_dim", [8, 96])
@pytest.mark.parametrize("parameters", LONGROPE)
def test_longrope_equals_transformers(parameters, rotary_dim, monkeypatch):
    parameters = {**longrope_parameters(rotary_dim), **parameters}
    check_against_transformers("longrope", rotary_dim, 10_000.0, parameters, monkeypatch)


@pytest.mark.parametrize("base", [500.0, 10_000.0, 1_000_000.0])
def test_transformers_is_within_its_float32_rounding(base):
    inv_freq, _ = inverse_frequencies("default", 128, base)
    by_float32, _ = by_transformers("default", 128, base, {})
    # The exponent is rounded (which costs ln(base) as much), then the power twice, then the quotient.
    torch.testing.assert_close(by_float32.double(), inv_freq, rtol=(math.log(base) + 4) * 2.0**-24, atol=0)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_ntk_leaves_the_fastest_and_divides_the_slowest(factor):
    plain, _ = inverse_frequencies("default", 64, 10_000.0)
    inv_freq, attention_factor = inverse_frequencies("ntk", 64, 10_000.0, factor=factor)
    base = 10_000.0 * factor ** (64 / 62)
    expected = torch.tensor([base ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected, rtol=FLOAT64_AGREEMENT, atol=0)
    assert inv_freq[0] == plain[0]
    assert inv_freq[-1].item() == pytest.approx(plain[-1].item() / factor, rel=FLOAT64_AGREEMENT)
    assert attention_factor == 1.0


@pytest.mark.parametrize("base", [10_000.0, 500.0])
@pytest.mark.parametrize("rotary_dim", [4, 8, 128])
def test_half_truncated_includes_both_ends_then_zeros(rotary_dim, base):
    inv_freq, attention_factor = inverse_frequencies("half_truncated", rotary_dim, base)
    quarter = rotary_dim // 4
    expected = np.concatenate([(1 / base) ** np.linspace(0, 1, quarter), np.zeros(quarter)])
    np.testing.assert_allclose(inv_freq.numpy(), expected, rtol=FLOAT64_AGREEMENT, atol=0)
    assert attention_factor == 1.0


def test_frequencies_do_not_follow_the_default_device():
    with torch.device("meta"):
        for name, parameters in SCALINGS:
            assert inverse_frequencies(name, 64, 10_000.0, **parameters)[0].device.type == "cpu"
        assert inverse_frequencies("half_truncated", 64, 10_000.0)[0].device.type == "cpu"
        assert (
            inverse_frequencies("longrope", 64, 10_000.0, **longrope_parameters(64), factor=2.0)[0].device.type == "cpu"
        )


def test_every_name_is_a_function_of_dim_base_and_keywords():
    assert list(FREQUENCIES) == [
        "default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional", "half_truncated",
        "axial",
    ]  # fmt: skip
    inv_freq, _ = FREQUENCIES["linear"](64, 10_000.0, factor=2.0)
    assert torch.equal(inv_freq, inverse_frequencies("linear", 64, 10_000.0, factor=2.0)[0])


@pytest.mark.parametrize(
    ("name", "rotary_dim", "base", "message"),
    [
        ("yaarn", 8, 1e4, "'yaarn', but must be one of 'default', 'linear', .*'half_truncated'"),
        ("default", 7, 1e4, "rotary_dim is 7, but must be a positive even integer"),
        ("default", 0, 1e4, "rotary_dim is 0, but must be a positive even integer"),
        ("default", -8, 1e4, "rotary_dim is -8, but must be a positive even integer"),
        ("default", 8.0, 1e4, r"rotary_dim is 8\.0, but must be a positive even integer"),
        ("half_truncated", 6, 1e4, "rotary_dim is 6, but for 'half_truncated' it must be a multiple of 4"),
        ("half_truncated", -8, 1e4, "rotary_dim is -8, but must be a positive even integer"),
        ("default", 8, 0, "base is 0, but must be greater than 0"),
        ("default", 8, -1.0, r"base is -1\.0, but must be greater than 0"),
        ("default", 8, math.nan, "base is nan, but must be greater than 0"),
    ],
)
def test_bad_names_dims_and_bases_are_refused(name, rotary_dim, base, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(name, rotary_dim, base)


LONG = longrope_parameters(8)
DYNAMIC = {"factor": 2.0, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("linear", {"factor": 0}, "factor is 0, but must be greater than 0"),
        ("linear", {"factor": math.nan}, "factor is nan, but must be greater than 0"),
        ("ntk", {"factor": 0}, "factor is 0, but must be greater than 0"),
        ("dynamic", {**DYNAMIC, "factor": 0}, "factor is 0, but must be greater than 0"),
        ("dynamic", {**DYNAMIC, "max_position_embeddings": 0}, "max_position_embeddings is 0, but must be at least 1"),
        ("yarn", {**YARN, "factor": 0}, "factor is 0, but must be greater than 0"),
        ("yarn", {**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, but must be"),
        ("yarn", {**YARN, "beta_fast": -1.0}, r"beta_fast is -1\.0, but must be greater than 0"),
        ("yarn", {**YARN, "attention_factor": math.inf}, "attention_factor is inf, but must be finite"),
        ("longrope", {**LONG, "factor": 0}, "factor is 0, but must be greater than 0"),
        ("longrope", {**LONG, "factor": 2.0, "long_factor": [1.0] * 3}, "long_factor has 3 values, but must .* 4 for"),
        (
            "longrope",
            {**LONG, "factor": 2.0, "short_factor": [1.0] * 8},
            "short_factor has 8 values, but must .* 4 for",
        ),
        ("longrope", {**LONG, "factor": 2.0, "long_factor": [1.0, 1.0, 0, 1.0]}, "long_factor holds 0, but all"),
        ("llama3", {**LLAMA3, "factor": 0}, "factor is 0, but must be greater than 0"),
        ("llama3", {**LLAMA3, "low_freq_factor": 0}, "low_freq_factor is 0, but must be greater than 0"),
        ("llama3", {**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, but"),
        ("proportional", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5, but must be in 0 … 1"),
        ("proportional", {"factor": 0}, "factor is 0, but must be greater than 0"),
    ],
)
def test_values_out_of_range_are_refused(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(name, 8, 10_000.0, **parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("default", {"factor": 2.0}, "factor is not a parameter of 'default'; its parameters are: none"),
        ("linear", {"faktor": 2.0}, "faktor is not a parameter of 'linear'; its parameters are: factor"),
        ("linear", {}, "factor was not passed, but is a required parameter of 'linear'"),
        ("yarn", {**YARN, "factor": None}, "factor was not passed, so max_position_embeddings must be"),
        ("longrope", LONG, "factor was not passed, so max_position_embeddings must be"),
    ],
)
def test_parameters_that_do_not_belong_or_are_missing_are_refused(name, parameters, message):
    with pytest.raises(TypeError, match=message):
        inverse_frequencies(name, 8, 10_000.0, **parameters)


def test_dims_and_bases_that_a_scaling_cannot_use_are_refused():
    with pytest.raises(ValueError, match="rotary_dim is 2, but must be at least 4"):
        inverse_frequencies("ntk", 2, 10_000.0, factor=2.0)
    with pytest.raises(ValueError, match=r"base is 0\.5, but for 'yarn' it must be greater than 1"):
        inverse_frequencies("yarn", 8, 0.5, **YARN)


def exact_cos_sin(positions, inv_freq):
    """cos and sin of position·frequency with the product exact, in float64."""
    angles = np.empty((len(positions), len(inv_freq)))
    for row, position in enumerate(positions):
        for column, omega in enumerate(inv_freq.tolist()):
            angle = position * Fraction(omega)
            angles[row, column] = float(angle - round(angle / TWO_PI) * TWO_PI)
    return np.cos(angles), np.sin(angles)


def table_error_bound(truth, positions, inv_freq):
    """Half a unit in the last place of float32, and what rounding the angle and its cosine to float64 adds."""
    half_ulp = np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64) / 2
    angles = np.array(positions)[:, None] * inv_freq.numpy()
    return half_ulp + angles * 2.0**-53 + 2.0**-52


FAR = [131_071, 1_000_003, 10_000_019, 2**24 - 1, 2**24, 2**24 + 1]
POSITIONS = [0, 1, 2, 3, 100, 2047, 4096, 65_537, *FAR]


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
def test_table_is_right_to_the_last_bit_up_to_16m(base, device):
    inv_freq, _ = inverse_frequencies("default", 128, base)
    for dtype in (torch.int64, torch.int32):
        tables = rope_table(torch.tensor(POSITIONS, dtype=dtype, device=device), inv_freq)
        for table, truth in zip(tables, exact_cos_sin(POSITIONS, inv_freq), strict=True):
            assert table.dtype == torch.float32
            assert table.device.type == device.type
            error = np.abs(table.cpu().double().numpy() - truth)
            assert (error <= table_error_bound(truth, POSITIONS, inv_freq)).all()


def test_the_bound_rejects_a_float32_product():
    inv_freq, _ = inverse_frequencies("default", 128, 10_000.0)
    truth, _ = exact_cos_sin(FAR, inv_freq)
    by_float32 = (torch.tensor(FAR).float()[:, None] * inv_freq.float()).cos()
    error = np.abs(by_float32.double().numpy() - truth)
    assert (error.max(axis=1) > 1000 * table_error_bound(truth, FAR, inv_freq).max(axis=1)).all()


def test_length_means_positions_from_zero(device):
    inv_freq, _ = inverse_frequencies("default", 64, 10_000.0)
    for length in (0, 1, 37):
        cos, sin = rope_table(length, inv_freq, device=device)
        assert cos.shape == sin.shape == (length, 32)
        expected = rope_table(torch.arange(length, device=device), inv_freq)
        assert torch.equal(cos, expected[0])
        assert torch.equal(sin, expected[1])


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_positions_of_any_shape_and_integer_dtype(shape, dtype, device):
    inv_freq, _ = inverse_frequencies("default", 16, 10_000.0)
    positions = torch.randint(0, 100, shape, device=device).to(dtype)
    whole = rope_table(100, inv_freq, device=device)
    for table, rows in zip(rope_table(positions, inv_freq), whole, strict=True):
        assert table.shape == (*shape, 8)
        assert torch.equal(table, rows[positions.long()])


def test_negative_and_strided_positions(device):
    inv_freq, _ = inverse_frequencies("default", 16, 10_000.0)
    positions = torch.arange(12, device=device).reshape(3, 4).T
    cos, sin = rope_table(positions, inv_freq)
    back_cos, back_sin = rope_table(-positions, inv_freq)
    assert torch.equal(cos[1, 2], rope_table(12, inv_freq, device=device)[0][9])
    assert torch.equal(back_cos, cos)
    assert torch.equal(back_sin, -sin)


def test_attention_factor_multiplies_before_the_rounding(device):
    inv_freq, _ = inverse_frequencies("default", 64, 10_000.0)
    angles = torch.arange(50).double()[:, None] * inv_freq
    cos, sin = rope_table(50, inv_freq, attention_factor=1.1386294361119891, device=device)
    # A GPU's float64 cosine may differ in its last bit, and so may then the float32 one.
    rtol = 0 if device.type == "cpu" else 2.0**-23
    torch.testing.assert_close(cos.cpu(), (1.1386294361119891 * angles.cos()).float(), rtol=rtol, atol=0)
    torch.testing.assert_close(sin.cpu(), (1.1386294361119891 * angles.sin()).float(), rtol=rtol, atol=0)


def test_blocks_do_not_show(monkeypatch):
    inv_freq, _ = inverse_frequencies("default", 64, 10_000.0)
    whole = rope_table(1000, inv_freq)
    for block in (1, 32, 33, 7 * 32, 999 * 32, 1000 * 32):
        monkeypatch.setattr(frequencies, "BLOCK_ELEMENTS", block)
        for table, expected in zip(rope_table(1000, inv_freq), whole, strict=True):
            assert torch.equal(table, expected)


def test_float64_temporaries_are_bounded():
    class LargestFloat64(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                self.numel = max(self.numel, result.numel())
            return result

    inv_freq, _ = inverse_frequencies("default", 128, 10_000.0)
    with LargestFloat64() as largest:
        rope_table(50_000, inv_freq)
    assert 0 < largest.numel <= frequencies.BLOCK_ELEMENTS < 50_000 * 64


def test_table_devices(device):
    inv_freq, _ = inverse_frequencies("default", 16, 10_000.0)
    assert rope_table(4, inv_freq)[0].device.type == "cpu"
    assert rope_table(4, inv_freq.to(device))[0].device.type == device.type
    assert rope_table(torch.arange(4, device=device), inv_freq)[0].device.type == device.type
    assert rope_table(torch.arange(4, device=device), inv_freq, device="cpu")[1].device.type == "cpu"
    assert rope_table(4, inv_freq, device="meta")[0].is_meta


def test_table_is_not_differentiated():
    inv_freq = inverse_frequencies("default", 16, 10_000.0)[0].requires_grad_()
    cos, sin = rope_table(4, inv_freq)
    assert not cos.requires_grad
    assert not sin.requires_grad


def test_positions_may_lie_between_whole_ones():
    inv_freq, _ = inverse_frequencies("default", 16, 10000.0)
    positions = torch.tensor([0.5, 1e6 + 0.25, -3.75], dtype=torch.float64)
    cos, sin = rope_table(positions, inv_freq)
    angles = positions[:, None] * inv_freq
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


@pytest.mark.parametrize(
    ("positions", "inv_freq", "error", "message"),
    [
        (-1, torch.ones(4), ValueError, "the length is -1, but must not be negative"),
        (4.0, torch.ones(4), TypeError, "the length is float, but must be an int or a tensor of positions"),
        (torch.ones(4), torch.ones(4), TypeError, "positions is a tensor of torch.float32, but must be .* integers"),
        (
            torch.ones(4).half(),
            torch.ones(4),
            TypeError,
            "positions is a tensor of torch.float16, but must be .* float64",
        ),
        (
            torch.ones(4).bool(),
            torch.ones(4),
            TypeError,
            "positions is a tensor of torch.bool, but must be .* integers",
        ),
        (
            4,
            torch.ones(4).long(),
            TypeError,
            "inv_freq is a tensor of torch.int64, but must be a floating-point tensor",
        ),
        (4, [1.0, 0.1], TypeError, "inv_freq is list, but must be a floating-point tensor"),
        (4, torch.ones(1, 4), ValueError, r"inv_freq has shape \(1, 4\), but must be 1-D"),
        (4, torch.tensor(1.0), ValueError, r"inv_freq has shape \(\), but must be 1-D"),
    ],
)
def test_bad_tables_are_refused(positions, inv_freq, error, message):
    with pytest.raises(error, match=message):
        rope_table(positions, inv_freq)


def test_a_table_on_a_gpu_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inv_freq = torch.ones(4)
    for length in (3, torch.arange(3)):
        with pytest.raises(ValueError, match=r"device is 'cuda', but must be one of this machine: PyTorch (finds|is)"):
            rope_table(length, inv_freq, device="cuda")


def test_axial_repeats_or_deals_the_default():
    of_one_axis, _ = inverse_frequencies("default", 8, 100.0)
    of_all, _ = inverse_frequencies("default", 16, 100.0)
    assert torch.equal(inverse_frequencies("axial", 16, 100.0)[0], of_one_axis.repeat(2))
    dealt, factor = inverse_frequencies("axial", 16, 100.0, dealt=True)
    assert torch.equal(dealt, torch.cat((of_all[0::2], of_all[1::2])))
    assert factor == 1.0
    alternating = inverse_frequencies("axial", 16, 100.0, alternating=True)[0]
    assert torch.equal(alternating, of_one_axis.repeat_interleave(2))
    assert torch.equal(inverse_frequencies("axial", 24, 100.0, n_axes=3)[0], of_one_axis.repeat(3))
    with pytest.raises(ValueError, match="dealt and alternating are both True"):
        inverse_frequencies("axial", 16, 100.0, dealt=True, alternating=True)
    with pytest.raises(ValueError, match="rotary_dim is 16, but for 'axial' it must be a multiple of 6"):
        inverse_frequencies("axial", 16, 100.0, n_axes=3)
