"""`RotaryEmbedding` against the rotary modules of transformers: the same config, the same calls."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, Gemma4TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ropewalk import RotaryEmbedding, inverse_frequencies

FLOAT64_AGREEMENT = 2.0**-53 * 2**12  # see tests/test_frequencies.py
DIM = 16
LONGROPE = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}

# Families with keys in rope_parameters that no layer has, or that unlike layers share; old transformers lack some.
WITH_KEYS = [
    name
    for name in ("deepseek_v4", "gemma3_text", "gemma4_text", "laguna", "mellum", "modernbert", "neomme", "zaya")
    if name in CONFIG_MAPPING
]
WITH_BETA = [name for name in ("ministral3", "mistral4") if name in CONFIG_MAPPING]


def llama_config(rope_parameters, **options):
    return LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 50_000.0, **rope_parameters},
        **options,
    )


def phi3_config():
    return Phi3Config(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **LONGROPE},
    )


class TestLengthDependentFrequencies:
    """transformers' `dynamic_rope_update` in a first call of each length, whatever calls ours has had."""

    LENGTHS = (10, 64, 65, 200, 150, 64, 63, 100, 300, 5)

    def follow(self, rotary, make_peer, device):
        for length in self.LENGTHS:
            peer = make_peer().to(device)
            q = torch.randn(1, length, 2, DIM, device=device)
            rotary(q)
            cos, sin = peer(q, torch.arange(length, device=device)[None])
            # transformers rounds frequency, angle and cosine to float32; the angle's error grows with it.
            bound = 2.0**-24 * (2 + 16 * length)
            torch.testing.assert_close(rotary.cos[:length], cos[0, :, : DIM // 2], rtol=0, atol=bound)
            torch.testing.assert_close(rotary.sin[:length], sin[0, :, : DIM // 2], rtol=0, atol=bound)
            # Two float32 computations of a frequency; the next length, or the other factor list, is far outside.
            torch.testing.assert_close(rotary.inv_freq.float(), peer.inv_freq.cpu(), rtol=2.0**-24 * 32, atol=0)
            assert rotary.attention_factor == pytest.approx(peer.attention_scaling, rel=FLOAT64_AGREEMENT)

    def test_dynamic(self, device):
        config = llama_config({"rope_type": "dynamic", "factor": 2.0})
        self.follow(RotaryEmbedding.from_hf_config(config, device=device), lambda: LlamaRotaryEmbedding(config), device)

    def test_longrope(self, device):
        config = phi3_config()
        self.follow(RotaryEmbedding.from_hf_config(config, device=device), lambda: Phi3RotaryEmbedding(config), device)


class TestFromHfConfig:
    def check(self, monkeypatch, config, peer_class, *, prefix="", **options):
        with monkeypatch.context() as patch:  # transformers' own code, computing in float64
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            peer = peer_class(config)
        inv_freq = getattr(peer, f"{prefix}inv_freq")
        assert inv_freq.dtype == torch.float64
        rotary = RotaryEmbedding.from_hf_config(config, **options)
        torch.testing.assert_close(rotary.inv_freq, inv_freq, rtol=FLOAT64_AGREEMENT, atol=0)
        attention_factor = getattr(peer, f"{prefix}attention_scaling")
        assert rotary.attention_factor == pytest.approx(attention_factor, rel=FLOAT64_AGREEMENT)
        assert rotary.cos.shape == (config.max_position_embeddings, len(inv_freq))
        return rotary

    @pytest.mark.parametrize(
        "rope_parameters",
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 2.0},
            {"type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 3.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": None},
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
            {"rope_type": "longrope", **LONGROPE},
            {"rope_type": "longrope", **LONGROPE, "factor": 8.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 32},
            {"rope_type": "proportional", "partial_rotary_factor": 0.25},
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        ],
    )  # fmt: skip
    def test_llama(self, rope_parameters, monkeypatch):
        rotary = self.check(monkeypatch, llama_config(rope_parameters), LlamaRotaryEmbedding)
        assert rotary.base == 50_000.0
        assert rotary.scaling == rope_parameters.get("rope_type", "linear")

    def test_llama_with_its_own_head_dim(self, monkeypatch):
        rotary = self.check(monkeypatch, llama_config({"rope_type": "default"}, head_dim=48), LlamaRotaryEmbedding)
        assert rotary.dim == 48

    def test_llama_written_before_version_5(self, monkeypatch):
        config = LlamaConfig(
            hidden_size=32,
            num_attention_heads=2,
            max_position_embeddings=64,
            rope_theta=20_000.0,
            rope_scaling={"type": "linear", "factor": 4.0},
        )
        assert self.check(monkeypatch, config, LlamaRotaryEmbedding).base == 20_000.0

    def test_gpt_neox_rotates_a_part(self, monkeypatch):
        config = GPTNeoXConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=64, rotary_pct=0.25)
        assert self.check(monkeypatch, config, GPTNeoXRotaryEmbedding).dim == 16

    def test_phi3_keeps_its_original_length_beside_the_parameters(self, monkeypatch):
        assert self.check(monkeypatch, phi3_config(), Phi3RotaryEmbedding).scaling == "longrope"

    @pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
    def test_gemma3_has_parameters_for_each_type_of_layer(self, layer_type, monkeypatch):
        config = Gemma3TextConfig(
            head_dim=DIM, max_position_embeddings=64, rope_scaling={"rope_type": "linear", "factor": 8.0}
        )
        rotary = self.check(monkeypatch, config, Gemma3RotaryEmbedding, prefix=f"{layer_type}_", layer_type=layer_type)
        assert rotary.scaling == ("linear" if layer_type == "full_attention" else "default")

    @pytest.mark.parametrize(("layer_type", "dim"), [("sliding_attention", 256), ("full_attention", 512)])
    def test_gemma4_has_a_head_dim_for_each_type_of_layer(self, layer_type, dim, monkeypatch):
        config = Gemma4TextConfig(max_position_embeddings=64)
        rotary = self.check(
            monkeypatch, config, Gemma4TextRotaryEmbedding, prefix=f"{layer_type}_", layer_type=layer_type
        )
        assert rotary.dim == dim

    def test_layer_type_must_be_known_where_it_matters(self):
        config = Gemma3TextConfig(head_dim=DIM, max_position_embeddings=64)
        for layer_type in (None, "global"):
            with pytest.raises(ValueError, match=f"layer_type is {layer_type!r}, but .*'sliding_attention', 'full_att"):
                RotaryEmbedding.from_hf_config(config, layer_type=layer_type)
        without = SimpleNamespace(head_dim=8, rope_parameters={"full": {"rope_theta": 1e4}, "none": None})
        with pytest.raises(ValueError, match=r"layer_type is 'none', but .* must be one of 'full'$"):
            RotaryEmbedding.from_hf_config(without, layer_type="none")
        shared = llama_config({"rope_type": "default"})
        assert RotaryEmbedding.from_hf_config(shared, layer_type="full_attention").dim == DIM

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (
                {"rope_theta": 2e4, "rope_scaling": None, "partial_rotary_factor": 0.5, "hidden_size": 64},
                {"dim": 16, "base": 2e4},
            ),
            (
                {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 8},
                {"dim": 8, "scaling": "dynamic", "factor": 2.0, "max_position_embeddings": 48},
            ),
            (
                {"rope_theta": 2e4, "rope_scaling": {"type": "yarn", "factor": 2.0}, "head_dim": 8},
                {"dim": 8, "base": 2e4, "scaling": "yarn", "factor": 2.0, "original_max_position_embeddings": 48},
            ),
            ({"rotary_emb_base": 3e4, "rotary_pct": 0.25, "hidden_size": 64}, {"dim": 8, "base": 3e4}),
        ],
    )
    def test_configs_from_before_version_5(self, config, expected):
        config = SimpleNamespace(num_attention_heads=2, max_position_embeddings=48, **config)
        rotary = RotaryEmbedding.from_hf_config(config)
        expected = RotaryEmbedding(max_positions=48, **expected)
        assert torch.equal(rotary.cos, expected.cos)
        assert torch.equal(rotary.sin, expected.sin)

    def test_an_original_length_of_the_whole_config_is_not_that_of_a_type_of_layer(self):
        parameters = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
        shared = SimpleNamespace(
            head_dim=8, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=parameters
        )
        assert RotaryEmbedding.from_hf_config(shared).parameters_of_scaling["original_max_position_embeddings"] == 16
        shared.rope_parameters = {"full": parameters}
        nested = RotaryEmbedding.from_hf_config(shared, layer_type="full")
        assert nested.parameters_of_scaling["original_max_position_embeddings"] == 32

    def test_a_config_without_sizes_is_refused(self):
        with pytest.raises(TypeError, match="config is a dict, but must have attributes"):
            RotaryEmbedding.from_hf_config({})
        with pytest.raises(ValueError, match=r"config .* has no head_dim, and hidden_size and .* are 64 and None"):
            RotaryEmbedding.from_hf_config(SimpleNamespace(hidden_size=64))
        assert RotaryEmbedding.from_hf_config(SimpleNamespace(), dim=8).dim == 8

    def test_overrides_prevail(self, device):
        config = llama_config({"rope_type": "linear", "factor": 2.0})
        rotary = RotaryEmbedding.from_hf_config(
            config, factor=4.0, base=100.0, max_positions=7, layout="bhtd", interleaved=True, device=device
        )
        assert rotary.cos.shape[0] == 7
        assert rotary.cos.device.type == device.type
        expected, _ = inverse_frequencies("linear", DIM, 100.0, factor=4.0)
        assert torch.equal(rotary.inv_freq, expected)
        assert (rotary.layout, rotary.interleaved) == ("bhtd", True)
        rescaled = RotaryEmbedding.from_hf_config(config, scaling="dynamic", factor=3.0, dim=8)
        expected, _ = inverse_frequencies("dynamic", 8, 50_000.0, factor=3.0, max_position_embeddings=64)
        assert torch.equal(rescaled.inv_freq, expected)

    def test_a_parameter_that_does_not_belong_is_refused_unless_taken_away(self):
        config = SimpleNamespace(head_dim=8, max_position_embeddings=64, rope_parameters={"sections": [1, 1, 2]})
        with pytest.raises(TypeError, match="sections is not a parameter of 'default'"):
            RotaryEmbedding.from_hf_config(config)
        assert RotaryEmbedding.from_hf_config(config, sections=None).dim == 8

    def test_a_parameter_of_another_scaling_is_not_read(self):
        parameters = {"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0, "original_max_position_embeddings": 8}
        config = SimpleNamespace(head_dim=8, max_position_embeddings=64, rope_parameters=parameters)
        assert RotaryEmbedding.from_hf_config(config).parameters_of_scaling == {"factor": 2.0}

    @pytest.mark.parametrize("name", WITH_BETA)
    def test_a_beta_of_queries_is_refused_with_the_way_out(self, name):
        config = CONFIG_MAPPING[name]()
        with pytest.raises(TypeError, match=r"the beta multiplies q by .*, and pass llama_4_scaling_beta=None to read"):
            RotaryEmbedding.from_hf_config(config)
        rotary = RotaryEmbedding.from_hf_config(config, llama_4_scaling_beta=None, max_positions=4)
        assert rotary.scaling == "yarn"

    @pytest.mark.parametrize("name", WITH_KEYS)
    def test_every_key_of_rope_parameters_is_a_layer_type(self, name):
        config = CONFIG_MAPPING[name]()
        keys = [name for name, value in config.rope_parameters.items() if isinstance(value, dict)]
        for key in keys:
            rotary = RotaryEmbedding.from_hf_config(config, layer_type=key, max_positions=4)
            assert rotary.base == config.rope_parameters[key]["rope_theta"]

    def test_the_config_is_left_alone(self):
        config = llama_config({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
        before = copy.deepcopy(config.rope_parameters)
        RotaryEmbedding.from_hf_config(config, factor=2.0)
        assert config.rope_parameters == before

    def test_transformers_is_not_imported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it would now raise
        assert RotaryEmbedding.from_hf_config(SimpleNamespace(head_dim=8, max_position_embeddings=64)).dim == 8
