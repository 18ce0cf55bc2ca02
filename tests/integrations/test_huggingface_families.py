"""Families of transformers that supports "eager" attention alone for, in whole or in part, and the tool for all."""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import families
import pytest
import torch
from helpers.huggingface_models import transformers

from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import attention as door


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Their decoders never say that they are causal, their layers add a mask themselves, or join another to it.
@pytest.mark.parametrize(
    "family",
    [
        "nllb-moe",
        "git",
        "bridgetower",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("informer", "bigbird_pegasus", "deepseek_v4")),
    ],
)
def test_families_with_eager_attention_alone_agree_with_it(family):
    if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    result = families.judge(family)
    assert families.verdict(result) in ("agrees", "keeps"), result


@pytest.mark.parametrize(
    ("name", "config", "supported"),
    [
        ("llama", "LlamaConfig", "flash"),
        ("gemma2", "Gemma2Config", "flash"),  # and not "sdpa"
        ("gpt_oss", "GptOssConfig", "flash"),
        ("llama4", "Llama4TextConfig", "sdpa"),
        ("nllb_moe", "NllbMoeConfig", "eager"),
        ("gemma4", "Gemma4TextConfig", "flash"),
        ("gemma4", "Gemma4AudioConfig", "eager"),  # of one module
    ],
)
def test_the_class_is_asked_and_not_the_file(name, config, supported):
    pytest.importorskip(f"transformers.models.{name}")
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    assert door._supported(configuration.__name__, config) == supported


def test_a_family_with_eager_attention_alone_is_named(monkeypatch):
    modeling = importlib.import_module("transformers.models.nllb_moe.modeling_nllb_moe")
    monkeypatch.setattr(door, "_SUPPORTED", {})
    with pytest.warns(UserWarning, match="neither 'sdpa' nor flash attention for .*NllbMoeDecoder.*: Ropewalk gives"):
        assert door._supported_by_classes(modeling.NllbMoeConfig) == "eager"


def test_a_class_that_is_loaded_later_is_asked_too(monkeypatch):
    """As remote code defines one: what its config's other classes support is not enough."""
    package = "transformers_modules.late"
    config = type("LateConfig", (transformers.PreTrainedConfig,), {"__module__": f"{package}.configuration"})

    def define(name, supports):
        flags = {"_supports_sdpa": supports, "_supports_flash_attn": supports}
        body = {"__module__": f"{package}.{name}", "config_class": config, **flags}
        monkeypatch.setitem(sys.modules, f"{package}.{name}", types.ModuleType(name))
        return type("LateModel", (transformers.PreTrainedModel,), body)

    first = define("first", True)
    assert door._supported_by_classes(config) == "flash"
    second = define("second", False)
    assert door._supported_by_classes(config) == "eager"
    del first, second


def test_an_audio_tower_keeps_its_own_attention():
    """Gemma 4's computes in blocks, of a mask with a number for each query and key."""
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    torch.manual_seed(0)
    config = modeling.Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        output_proj_dims=16,
        subsampling_conv_channels=(128, 32),
    )
    # Before transformers 5.24 the class says that it supports "sdpa", and reads the mask of "eager" the wrong way.
    plain = "sdpa" if modeling.Gemma4AudioModel._supports_sdpa else "eager"
    model = modeling.Gemma4AudioModel._from_config(config, attn_implementation=plain).eval()
    sound = torch.randn(2, 96, 128)
    mask = torch.ones(2, 96, dtype=torch.bool)
    mask[0, 60:] = False
    with torch.no_grad():
        expected = model(sound, mask).last_hidden_state
        config._attn_implementation_internal = "ropewalk"
        actual = model(sound, mask).last_hidden_state
    assert torch.equal(actual, expected)


def test_a_result_of_each_kind_has_its_verdict():
    """Of several cases the gravest counts, so that no difference hides."""
    for cases, expected in (
        (["agrees", "agrees"], "agrees"),
        (["agrees", "eager: documents see each other"], "agrees"),
        (["keeps its own", "as eager: documents see each other"], "keeps"),
        (["agrees", "differs by 62% (…)"], "differs"),
        (["refused: ValueError: …", "refused: …"], "refused"),
        (["agrees", "died: RuntimeError: …"], "died"),
    ):
        assert families.verdict({"cases": dict(enumerate(cases))}) == expected
    assert families.verdict({"cases": {}, "unbuilt": "…"}) == "not built"
