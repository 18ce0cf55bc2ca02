"""transformers' attention layers with QK-norm and rotation in one launch: against their own, and that in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.huggingface_models import EXPERTS, GROUPED, LAYERS, ROUNDINGS, WINDOW, InDouble, padding, tokens
from torch import nn

from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import layers
from ropewalk.testing import assert_close_to_truth

transformers = pytest.importorskip("transformers")
modeling_qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
ALL_ATTENTION_FUNCTIONS = modeling_qwen3.ALL_ATTENTION_FUNCTIONS
eager_attention_forward = modeling_qwen3.eager_attention_forward

MIXED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXTURE = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# The model, its config, what the config has beside GROUPED, and the layers with QK-norm.
FAMILIES = {
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}, [0, 1]),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MIXTURE, [0, 1]),
    "Qwen3VL": ("Qwen3VLTextModel", "Qwen3VLTextConfig", {}, [0, 1]),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**MIXED, **MIXTURE, "shared_expert_intermediate_size": 16},
        [1],
    ),
    "Qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", MIXED, [1]),
    "Gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        [0, 1],
    ),
    "Olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}, [0, 1]),
    "Glm4Moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {"use_qk_norm": True, "first_k_dense_replace": 2},
        [0, 1],
    ),
    "Llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**EXPERTS, "no_rope_layers": [1, 0], "intermediate_size_mlp": 16, "attention_chunk_size": 8},
        [0],
    ),
    "HunYuanDenseV1": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {}, [0, 1]),
    "Cohere": ("CohereForCausalLM", "CohereConfig", {"use_qk_norm": True}, []),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}, []),
}
SUPPORTED = [name for name, (*_, indices) in FAMILIES.items() if indices]


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


def build(name, device, **changes):
    """A model with random weights of its own, the same each time, in float32 and for evaluation."""
    torch.manual_seed(0)
    model, config, sizes, _ = FAMILIES[name]
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    config = getattr(transformers, config)(**{**GROUPED, **sizes, **changes})
    config._experts_implementation = "eager"  # others do not support float64
    model = getattr(transformers, model)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # weights of norms differ from each other, and from their first value
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.to(device).eval()


def layer_names(name):
    root = "" if name == "Qwen3VL" else "model."
    return tuple(f"{root}layers.{index}.self_attn" for index in FAMILIES[name][3])


def positions(name, device):
    """Three axes that differ, where a model has them."""
    if name != "Qwen3VL":
        return {}
    return {"position_ids": torch.randint(0, 40, (3, 3, 13), generator=torch.Generator().manual_seed(4)).to(device)}


def outputs_and_grads(model, mask, device, **keywords):
    """The outputs of all tokens that are none of padding, and each parameter's gradient for one random cotangent."""
    model.zero_grad()
    out = model(tokens(device), attention_mask=mask, use_cache=False, **keywords)[0]
    out = out if mask is None else out[mask.bool()]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"outputs": out.detach(), **grads}


@pytest.fixture
def calls(monkeypatch):
    """The norms of the calls of `apply_rope` by layers."""
    norms = []
    apply_rope = layers.apply_rope
    monkeypatch.setattr(
        layers, "apply_rope", lambda *xs, **flags: norms.append(flags["norm"]) or apply_rope(*xs, **flags)
    )
    return norms


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "eager") for name in SUPPORTED), *((name, "ropewalk") for name in ("Gemma3", "Olmo2", "Qwen3_5"))],
)
def test_outputs_and_gradients_agree(name, implementation, calls, device):
    model, mask, keywords = build(name, device), padding("left", device), positions(name, device)
    parameters = dict(model.state_dict())
    with huggingface.use_ropewalk_layers(model) as handle:
        assert handle.layers == layer_names(name)
        assert model.state_dict().keys() == parameters.keys()
        calls.clear()
        model.set_attn_implementation(implementation)
        actual = outputs_and_grads(model, mask, device, **keywords)
        assert len(calls) == len(handle.layers)
    model.set_attn_implementation("eager")
    baseline = outputs_and_grads(model, mask, device, **keywords)
    assert len(calls) == len(handle.layers)
    with InDouble():
        truth = outputs_and_grads(model.double(), mask, device, **keywords)
    assert actual.keys() == baseline.keys() == truth.keys()
    assert any("norm" in name for name in truth)
    for part in truth:
        assert_close_to_truth(actual[part], truth[part], baseline[part], ROUNDINGS)


@pytest.mark.parametrize(
    ("name", "eps", "offset", "across_heads", "after"),
    [
        ("Qwen3", 1e-5, 0.0, False, False),
        ("Qwen3_5", 1e-6, 1.0, False, False),
        ("Gemma3", 1e-8, 1.0, False, False),
        ("Olmo2", 3e-4, 0.0, True, False),
        ("Llama4", 1e-12, 0.0, False, True),
        ("HunYuanDenseV1", 1e-5, 0.0, False, True),
    ],
)
def test_the_convention_is_found(name, eps, offset, across_heads, after, calls, device):
    model = build(name, device, rms_norm_eps=eps)
    with torch.no_grad(), huggingface.use_ropewalk_layers(model):
        calls.clear()
        model(tokens(device))
    for norm in calls:
        assert (norm.eps, norm.offset, norm.across_heads, norm.after) == (eps, offset, across_heads, after)
        assert (norm.q_weight is None) == (name == "Llama4")


@pytest.mark.parametrize("name", ["Qwen3", "Olmo2"])
def test_one_key_head(name, device):
    model = build(name, device, num_key_value_heads=1)
    with torch.no_grad():
        expected = model(tokens(device)).logits
        with huggingface.use_ropewalk_layers(model) as handle:
            assert handle.layers == layer_names(name)
            torch.testing.assert_close(model(tokens(device)).logits, expected)


@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_of_pytorch(has_weight, calls, device):
    model = build("Qwen3", device)
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.RMSNorm(16, eps=1e-4, elementwise_affine=has_weight, device=device)
    with torch.no_grad():
        assert_refused(model, "its q_norm and k_norm have different conventions")
        for layer in model.model.layers:
            layer.self_attn.k_norm = nn.RMSNorm(16, eps=1e-4, device=device)
        expected = model(tokens(device)).logits
        with huggingface.use_ropewalk_layers(model):
            torch.testing.assert_close(model(tokens(device)).logits, expected)
    assert {(norm.eps, norm.q_weight is None) for norm in calls} == {(1e-4, not has_weight)}
    model.model.layers[0].self_attn.k_norm = nn.RMSNorm(16, device=device)
    assert_refused(model, r"its k_norm \(RMSNorm\) has eps None, so that it depends on the dtype$")


def test_modes_around_the_comparison_do_not_count(device):
    model = build("Llama4", device).bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast("cpu"), huggingface.use_ropewalk_layers(model) as handle:
            assert handle.layers == layer_names("Llama4")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SUPPORTED)
def test_bfloat16_is_no_less_accurate_than_the_models_own(name, device):
    """The attention layer alone, by its root mean square error over draws, and that of both norms' weights as one.

    In one draw their gradients are 16 numbers, of which chance alone makes the errors differ by a factor of 2.
    """
    model, n_draws, shape = build(name, device), 12, (6, 16)
    layer = model.get_submodule(layer_names(name)[0])
    width = 8 if name in ("Qwen3Next", "Qwen3_5", "Glm4Moe") else 16
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    kinds = ["output", "input", *("norm" if x.ndim == 1 else key for key, x in layer.named_parameters())]

    def run(dtype):
        generator, results = torch.Generator().manual_seed(7), []
        layer.to(dtype)
        for _ in range(n_draws):
            x = torch.randn(*shape, 64, generator=generator).to(device, torch.bfloat16)
            angles = (6 * torch.rand(*shape, width // 2, generator=generator)).to(device)
            tables = [torch.cat((y, y), -1).bfloat16().to(dtype) for y in (angles.cos(), angles.sin())]
            if name == "Llama4":
                tables = torch.polar(torch.ones_like(angles), angles)
                tables = tables.to(torch.complex128) if dtype == torch.float64 else tables
            y = x.to(dtype).requires_grad_()
            out, _ = layer(y, position_embeddings=tables, attention_mask=None)
            cotangent = torch.randn(out.shape, generator=generator).to(out)
            results.append((out.detach(), *torch.autograd.grad(out, [y, *layer.parameters()], cotangent)))
        return results

    with huggingface.use_ropewalk_layers(model):
        ours = run(torch.bfloat16)
    theirs = run(torch.bfloat16)
    with InDouble():
        truth = run(torch.float64)
    errors = {kind: [0.0, 0.0] for kind in kinds}  # mean squares, of ours and of the model's own
    for draws in zip(ours, theirs, truth, strict=True):
        for kind, *pair, exact in zip(kinds, *draws, strict=True):
            for index, y in enumerate(pair):
                errors[kind][index] += float((y.double() - exact).square().mean() / exact.square().mean())
    for kind, (error, own) in errors.items():
        assert error**0.5 <= 1.1 * own**0.5, kind


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in SUPPORTED if name != "Qwen3VL"), ("Qwen3", "static"), ("Gemma3", "static")],
)
def test_generate(name, cache, calls, device):
    model = build(name, device)
    ids, mask = tokens(device), padding("left", device)
    keywords = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if cache == "static":
        keywords.update(cache_implementation="static", disable_compile=True)
    expected = model.generate(ids, **keywords)
    with huggingface.use_ropewalk_layers(model) as handle:
        calls.clear()
        actual = model.generate(ids, **keywords)
    assert len(calls) == 6 * len(handle.layers)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, calls, device):
    model = build("Qwen3", device).train()
    with huggingface.use_ropewalk_layers(model) as handle:
        expected = outputs_and_grads(model, None, device)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls.clear()
        actual = outputs_and_grads(model, None, device)
    assert len(calls) == 2 * len(handle.layers)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_after_the_removal_recomputes_what_the_forward_ran(reentrant, calls, device):
    model = build("Qwen3", device).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with huggingface.use_ropewalk_layers(model) as handle:
        copy.deepcopy(model)  # its checkpoints hold nothing
        calls.clear()
        x = model.get_input_embeddings()(tokens(device))
        loss = model(inputs_embeds=x).logits.square().sum()
        assert "self_attn" in repr(handle)
    loss.backward()
    assert len(calls) == 2 * LAYERS
    calls.clear()
    model(inputs_embeds=x.detach())
    assert not calls
    assert not any("forward" in vars(part) for part in model.modules())
    with_grad = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with huggingface.use_ropewalk_layers(model):
        model(inputs_embeds=model.get_input_embeddings()(tokens(device))).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, with_grad[name]), name


def test_compiled_without_a_graph_break(device):
    model = build("Qwen3_5", device, layer_types=["full_attention", "full_attention"])
    ids = tokens(device)
    with torch.no_grad(), huggingface.use_ropewalk_layers(model):
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)


def test_a_copy_reads_its_own_weights(device):
    model = build("Qwen3", device)
    with torch.no_grad(), huggingface.use_ropewalk_layers(model):
        expected, twin = model(tokens(device)).logits, copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(tokens(device)).logits.any()
        assert torch.equal(model(tokens(device)).logits, expected)


def test_handles_count_and_undo_all(device):
    model = build("Qwen3", device)
    before = [dict(vars(part)) for part in model.modules()]
    first, second = huggingface.use_ropewalk_layers(model), huggingface.use_ropewalk_layers(model.model.layers[0])
    assert second.layers == ("self_attn",)
    assert repr(second) == "<LayersHandle of self_attn>"
    first.remove()
    first.remove()
    assert "forward" in vars(model.model.layers[0].self_attn)
    assert "forward" not in vars(model.model.layers[1].self_attn)
    second.remove()
    assert [dict(vars(part)) for part in model.modules()] == before
    assert layers._PROBE not in ALL_ATTENTION_FUNCTIONS


def test_another_replacement_is_left_alone(device):
    model = build("Qwen3", device)
    handle = huggingface.use_ropewalk_layers(model)
    model.model.layers[0].self_attn.forward = print
    with pytest.raises(RuntimeError, match=r"has replaced model\.layers\.0\.self_attn\.forward since"):
        handle.remove()
    assert vars(model.model.layers[0].self_attn)["forward"] is print
    assert "forward" not in vars(model.model.layers[1].self_attn)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn .* other code has replaced it$"):
        huggingface.use_ropewalk_layers(model)


def test_models_without_such_a_layer_are_refused(device):
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has no attention layer with norms of q and k, but must have one"
    ):
        huggingface.use_ropewalk_layers(build("Llama", device))


def assert_refused(model, reason):
    with pytest.raises(ValueError, match=reason):
        huggingface.use_ropewalk_layers(model)
    assert not any("forward" in vars(part) for part in model.modules())
    assert layers._PROBE not in ALL_ATTENTION_FUNCTIONS


def test_layer_norm_is_refused(device):
    assert_refused(
        build("Cohere", device),
        r"^model\.layers\.0\.self_attn \(CohereAttention\) must keep its forward: its q_norm \(CohereLayerNorm\) is no "
        r"RMS norm of a head; model\.layers\.1\.",
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen3", {"eps": 1.1e-6}),
        ("Qwen3", {"offset": 1e-3}),
        ("Qwen3", {"offset": 1.0}),
        ("Gemma3", {"offset": 0.0}),
        ("Gemma3", {"eps": 0.0}),
        ("Olmo2", {"across_heads": False}),
        ("Olmo2", {"eps": 1e-5}),
        ("Llama4", {"eps": 9e-7}),
    ],
)
def test_the_comparison_finds_another_convention(name, change, monkeypatch, device):
    """A wrong field of the norm, as if it had been read so from the layer."""
    read = layers._read_norms
    monkeypatch.setattr(layers, "_read_norms", lambda *given: read(*given)._replace(**change))
    assert_refused(build(name, device, rms_norm_eps=1e-6), "before or after the rotation, computes something else")


class Changed(modeling_qwen3.Qwen3Attention):
    """Qwen 3's attention, and one change by name."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        change, shape = type(self).__name__, (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), (self.q_norm if change == "one_norm" else self.k_norm)(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if change != "no_rotation":
            q, k = modeling_qwen3.apply_rotary_pos_emb(q, k, *position_embeddings)
        if change == "scaled":
            q = q * 1.0001
        if change == "detached":
            k = k.detach()
        if past_key_values is not None:
            keywords = {"cache_kwargs": {}} if change == "more_to_the_cache" else {}
            k, v = past_key_values.update(k, v, self.layer_idx + (change == "next_layer"), **keywords)
        kwargs |= {"softcap": 2.0} if change == "softcap" else {}
        dropout = 0.5 if change == "dropout" and self.training else 0.0
        out, weights = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)(
            self,
            q,
            k,
            v,
            None if change == "no_mask" else attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            sliding_window=3 if change == "window" else self.sliding_window,
            **kwargs,
        )
        if change == "gate":
            out = out * torch.sigmoid(out)
        return self.o_proj(out.flatten(2)), weights


@pytest.mark.parametrize(
    "change",
    [
        *("nothing", "one_norm", "no_rotation", "scaled", "detached", "more_to_the_cache", "next_layer", "softcap"),
        *("dropout", "no_mask", "window", "gate"),
    ],
)
def test_the_comparison_finds_another_layer(change, device):
    model = build("Qwen3", device)
    model.model.layers[1].self_attn.__class__ = type(change, (Changed,), {})
    if change == "nothing":
        huggingface.use_ropewalk_layers(model).remove()
    else:
        assert_refused(
            model, rf"^model\.layers\.1\.self_attn \({change}\) must keep its forward: apply_rope with QKNorm"
        )


def test_layers_that_lack_a_part_are_refused(device):
    model = build("Qwen3", device)
    del model.model.layers[0].self_attn.k_norm
    assert_refused(model, r"it has no norm of both q and k$")
    model = build("Qwen3", device)
    model.model.layers[0].self_attn.k_proj = nn.Identity()
    assert_refused(model, r"it has no k_proj$")


def test_hooks_of_norms_are_refused(device):
    model = build("Qwen3", device)
    model.model.layers[0].self_attn.k_norm.register_forward_hook(print)
    assert_refused(model, r"its k_norm \(Qwen3RMSNorm\) has hooks or a replaced forward, which would not run$")


def test_hooks_that_a_norm_gets_later_are_named_in_the_forward(device):
    """As fully_shard and offloading add them: the weight is read, and the hooks that gather it do not run."""
    model = build("Qwen3", device)
    with huggingface.use_ropewalk_layers(model):
        hook = model.model.layers[1].self_attn.k_norm.register_forward_pre_hook(lambda *given: None)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_norm has hooks, as fully_shard"):
            model(tokens(device))
        hook.remove()
        model(tokens(device))


def test_tables_of_another_form_raise(device):
    model = build("Qwen3", device)
    layer = model.model.layers[0].self_attn
    cos, sin = torch.rand(2, 1, 3, 16, device=device)
    x = torch.randn(1, 3, 64, device=device)
    with (
        huggingface.use_ropewalk_layers(model),
        pytest.raises(
            ValueError,
            match=r"must hold every angle twice for model\.layers\.0\.self_attn$",
        ),
    ):
        layer(x, position_embeddings=(cos, sin), attention_mask=None)
