"""Small models of transformers with random weights, and what is right for them: "eager", in float64."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ropewalk.testing import assert_close_to_truth

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, T, WINDOW, VOCABULARY, LAYERS = 3, 13, 5, 50, 2
# In each layer: two norms, the projections, rotation, scores, probabilities, their product with the values, the output
# projection, two sums, and three steps of the MLP; and as many again on the way back.
ROUNDINGS = 2 * 13 * LAYERS
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that attention is no mean
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # or a model may say for ever what it heard last
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # all of them: no choice that rounding may turn
CAUSAL = {
    "Llama": GROUPED,
    "Qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Mistral": {**GROUPED, "sliding_window": WINDOW},
    "Gemma": GROUPED,
    "Gemma2": {**GROUPED, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GPTNeoX": {**SIZES, "rotary_pct": 0.25},
    "GptOss": {**GROUPED, "sliding_window": WINDOW, **EXPERTS},
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
OTHER_ROTATIONS = {
    "Cohere": GROUPED,
    "Glm": {**GROUPED, "attention_bias": False},
    "NanoChat": GROUPED,
    "DeepseekV3": {**SIZES, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": LAYERS},
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
WIDE = {  # 512 features in a head of the last layer
    "Gemma4": {
        **GROUPED,
        "num_key_value_heads": 1,
        "sliding_window": WINDOW,
        "layer_types": LAYER_TYPES,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    }
}
NAMES = [*CAUSAL, "Bert", "BertDecoder"]


class InDouble(TorchFunctionMode):
    """What transformers computes in float32 whatever the model's dtype, in float64: norms, softmax and tables."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def build(name, device, **changes):
    """A model with random weights of its own, the same each time, in float32 and for evaluation."""
    torch.manual_seed(0)
    if name.startswith("Bert"):
        config = transformers.BertConfig(**{**SIZES, "is_decoder": name == "BertDecoder", **changes})
        model_class = transformers.BertLMHeadModel if config.is_decoder else transformers.BertForMaskedLM
    else:
        sizes = {**CAUSAL, **OTHER_ROTATIONS, **WIDE}[name]
        config = getattr(transformers, f"{name}TextConfig" if name in WIDE else f"{name}Config")(**{**sizes, **changes})
        model_class = getattr(transformers, f"{name}ForCausalLM")
    config._experts_implementation = "eager"  # others know no float64
    model = model_class._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases, and sinks: nothing may be zero
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.to(device).eval()


def tokens(device, batch=B, length=T):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def padding(kind, device, batch=B, length=T):
    """An attention_mask; its second row is never padded."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if kind == "right":
        mask[0, -4:], mask[2, -1:] = 0, 0
    elif kind == "left":
        mask[0, :4], mask[2, :1] = 0, 0
    elif kind == "holes":
        mask[0, 2:5], mask[0, -2:], mask[2, :6] = 0, 0, 0
    return None if kind == "none" else mask.to(device)


def logits_and_grads(model, implementation, ids, mask, **keywords):
    """The logits of all tokens that are none of padding, and the gradients for one random cotangent.

    Those of a layer's projections come as one: a bias of keys has a gradient of exactly zero, in truth.
    """
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, attention_mask=mask, use_cache=False, **keywords).logits
    logits = logits if mask is None else logits[mask.bool()]
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits))
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(name.rsplit(".", 2)[0], []).append(parameter.grad.flatten())
    return {"logits": logits.detach(), **{name: torch.cat(grads) for name, grads in groups.items()}}


def assert_agrees(name, device, run, ids=None, mask=None, changes=None, **keywords):
    """Compare what `run(model)` gives with transformers' own, whose truth is the same in float64."""
    ids = tokens(device) if ids is None else ids
    model = build(name, device, **(changes or {}))
    actual = run(model)
    baseline = logits_and_grads(model, "eager", ids, mask, **keywords)
    with InDouble():
        truth = logits_and_grads(model.double(), "eager", ids, mask, **keywords)
    assert actual.keys() == baseline.keys() == truth.keys()
    for part in truth:
        assert_close_to_truth(actual[part], truth[part], baseline[part], ROUNDINGS)


@torch.no_grad()
def truth_and_baseline(name, device, ids, mask):
    """The logits by transformers' own attention, in float64 and in float32."""
    model = build(name, device)
    baseline = model(ids, attention_mask=mask).logits
    with InDouble():
        return model.double()(ids, attention_mask=mask).logits, baseline


def heads(device="cpu", batch=2, queries=6, keys=6, n_heads=4, n_key_heads=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((n_heads, queries), (n_key_heads, keys), (n_key_heads, keys))
    return [torch.randn(batch, *shape, 16, generator=generator).to(device) for shape in shapes]
