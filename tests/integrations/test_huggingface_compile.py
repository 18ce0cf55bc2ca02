"""transformers' models by our attention under torch.compile, where lengths change and a cache grows."""

from __future__ import annotations

import pytest
import torch
from helpers.huggingface_models import CAUSAL, GROUPED, LAYERS, SIZES, VOCABULARY, transformers

from ropewalk.integrations import huggingface

WINDOW = 8
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "Gemma3ForCausalLM": {**GROUPED, **SLIDING},
    "GptOssForCausalLM": {**CAUSAL["GptOss"], **SLIDING},
    "ModernBertForMaskedLM": {**SIZES, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
}
CONFIGS = {"Gemma3ForCausalLM": "Gemma3TextConfig"}
LENGTHS = (24, 20, 6)


def build(name):
    torch.manual_seed(0)
    model_class = getattr(transformers, name, None)
    config_class = getattr(transformers, CONFIGS.get(name, name.split("For")[0] + "Config"), None)
    if model_class is None or config_class is None:
        pytest.skip(f"this transformers has no {name}")
    assert LAYERS == 2
    return model_class(config_class(**MODELS[name])).eval()


def run(model, forward, is_padded):
    """Prefill of several lengths, and decoding of one and of several tokens with the default cache: the logits."""
    logits, generator = [], torch.Generator().manual_seed(1)

    def step(queries, keys, **keywords):
        ids = torch.randint(3, VOCABULARY, (2, queries), generator=generator)
        if is_padded:
            keywords["attention_mask"] = torch.ones(2, keys, dtype=torch.long)
            keywords["attention_mask"][0, :2] = 0
        out = forward(ids, **keywords)
        logits.append(out.logits)
        return out

    for length in LENGTHS:
        step(length, length)
    if "Causal" in type(model).__name__:
        out = step(6, 6, use_cache=True)
        for keys in (7, 8, 9):  # past the window
            out = step(1, keys, past_key_values=out.past_key_values)
        step(3, 12, past_key_values=out.past_key_values)
    return logits


@torch.no_grad()
def compile_and_run(name, implementation, is_padded):
    """The number of graphs, and the logits, compiled and not."""
    model, graphs = build(name), []
    model.set_attn_implementation(implementation)
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = run(model, torch.compile(model, backend=backend, fullgraph=True), is_padded)
    torch._dynamo.reset()
    return len(graphs), compiled, run(model, model, is_padded)


@pytest.mark.parametrize(("name", "is_padded"), [*((name, False) for name in MODELS), ("Gemma3ForCausalLM", True)])
@pytest.mark.slow
def test_lengths_that_change_need_no_more_graphs_than_sdpa(name, is_padded):
    """In one graph each, as `fullgraph` says; "eager" counts for a model without "sdpa"."""
    huggingface.register()
    n_graphs, compiled, eager = compile_and_run(name, "ropewalk", is_padded)
    for actual, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, expected)
    theirs = "sdpa" if build(name)._supports_sdpa else "eager"
    assert n_graphs <= compile_and_run(name, theirs, is_padded)[0]
