"""BERT by other position schemes: against a BERT in plain PyTorch with explicit scores, in float64, and trained."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.huggingface_models import ROUNDINGS, VOCABULARY, B, T, build, padding, tokens, transformers
from safetensors.torch import load_model
from torch import nn

import ropewalk
from ropewalk import get_attention_class
from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import convert_bert
from ropewalk.testing import assert_close_to_truth

LONGEST, WINDOW = 16, 4
OPTIONS = {"rerope": {"window": WINDOW}}
NAMES = ("none", "standard", "absolute", "rope", "exposb", "alibi", "t5", "rerope")
OWN = {  # what a scheme has to learn
    "standard": "position_embeddings.weight",
    "exposb": "band_weights",
    "t5": "relative_attention_bias.weight",
}


def make(device, **changes):
    """A BertForMaskedLM of transformers, and in float32 and for evaluation."""
    return build("Bert", device, max_position_embeddings=LONGEST, **changes)


def convert(model, name, **options):
    """The model by a scheme whose own parameters are no constants."""
    torch.manual_seed(1)
    convert_bert(model, name, **{**OPTIONS.get(name, {}), **options})
    with torch.no_grad():
        for attention in attentions(model):
            if name == "standard":
                attention.position_embeddings.weight.mul_(50)
            if name == "t5":
                attention.relative_attention_bias.weight.mul_(50)
            if name == "exposb":
                attention.band_weights.copy_(torch.linspace(0.4, 0.9, attention.num_heads))
    return model


def attentions(model):
    return [layer.attention.self for layer in model.base_model.encoder.layer]


def omega(width, device):
    return 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def turned(q, k, relative):
    """The scores of interleaved pairs of q turned by (B or 1, T, T) relative positions, against k."""
    angles = (relative[..., None] * omega(q.shape[-1], q.device))[:, None]
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.promote_types(q.dtype, torch.complex64))
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    return (q[:, :, :, None] * k[:, :, None].conj() * turns).sum(-1).real


def scores_of(name, attention, q, k, p):
    """Before they are divided by √D; p is (B or 1, T), in float64."""
    relative = p[:, :, None] - p[:, None]
    head_dim = q.shape[-1]
    if name == "rope":
        return turned(q, k, relative)
    if name == "rerope":
        return turned(q, k, relative.clamp(-WINDOW, WINDOW))
    if name == "alibi":
        heads = torch.arange(1, q.shape[1] + 1, device=q.device)
        slopes = (2.0 ** (-8 * heads / q.shape[1]))[:, None, None].to(q.dtype)
        return q @ k.mT - head_dim**0.5 * slopes * relative.abs()[:, None].to(q.dtype)
    if name == "t5":  # 32 buckets: 8 distances alone each way, then by logarithms up to 128
        past = relative.abs()
        far = 8 + (past.clamp(min=8) / 8).log() / math.log(16) * 8
        bucket = torch.where(past < 8, past, far.clamp(max=15)).long() + 16 * (relative < 0)
        return q @ k.mT + head_dim**0.5 * attention.relative_attention_bias.weight[bucket].permute(0, 3, 1, 2)
    if name == "exposb":
        feature = torch.arange(head_dim, dtype=torch.float64, device=q.device)
        gain = 0.8 + 0.4 * torch.exp(-((feature - head_dim // 4) ** 2) / (2 * (head_dim // 8) ** 2))
        amplitude = (1 + 0.2 * torch.exp(-0.001 * p))[:, None, :, None].to(q.dtype)
        angles = (p[..., None] * omega(head_dim, q.device))[:, None]
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        weights = attention.band_weights[:, None, None] * gain.to(q.dtype)

        def change(x):
            a, b = x[..., 0::2], x[..., 1::2]
            return weights * amplitude * torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        return change(q) @ change(k).mT
    return q @ k.mT


def attend(name, attention, x, p, is_token):
    """What a layer's self-attention is to give; a query that may attend nothing gives zeros."""
    for_scores = for_values = x
    if name == "standard":
        for_scores = for_values = x + attention.position_embeddings.weight[p]
    if name == "absolute":
        angles = p.double()[..., None] * omega(x.shape[-1], x.device)
        for_scores = x + torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).to(x.dtype)
    parts = (attention.query, for_scores), (attention.key, for_scores), (attention.value, for_values)
    q, k, v = (part(y).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part, y in parts)
    scores = scores_of(name, attention, q, k, p.double()) / q.shape[-1] ** 0.5
    if is_token is not None:
        scores = scores.masked_fill(~is_token.bool()[:, None, None], -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def plain(name, model, ids, is_token=None, p=None):
    """The logits of a BERT with a position scheme, of a converted model's parameters."""
    p = torch.arange(ids.shape[1], device=ids.device)[None] if p is None else p
    embeddings, head = model.bert.embeddings, model.cls.predictions
    x = embeddings.LayerNorm(embeddings.word_embeddings.weight[ids] + embeddings.token_type_embeddings.weight[0])
    for layer in model.bert.encoder.layer:
        y = layer.attention.output.dense(attend(name, layer.attention.self, x, p, is_token))
        x = layer.attention.output.LayerNorm(x + y)
        x = layer.output.LayerNorm(x + layer.output.dense(F.gelu(layer.intermediate.dense(x))))
    return head.decoder(head.transform(x))


def logits_and_grads(call, model):
    """The logits, and the gradients for one random cotangent; those of a layer's self-attention come as one."""
    model.zero_grad()
    logits = call(model)
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits))
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            group = name.partition(".self.")[0] if ".self." in name else name.rpartition(".")[0]
            groups.setdefault(group, []).append(parameter.grad.flatten())
    return {"logits": logits.detach(), **{name: torch.cat(grads) for name, grads in groups.items()}}


def check(name, model, ids, is_token=None, p=None):
    """A converted model's logits and gradients are as near to the truth as plain PyTorch's."""
    keywords = {"attention_mask": is_token, "position_ids": p}
    actual = logits_and_grads(lambda model: model(ids, **keywords).logits, model)
    baseline = logits_and_grads(lambda model: plain(name, model, ids, is_token, p), model)
    truth = logits_and_grads(lambda model: plain(name, model, ids, is_token, p), copy.deepcopy(model).double())
    assert actual.keys() == baseline.keys() == truth.keys()
    for part in truth:
        assert_close_to_truth(actual[part], truth[part], baseline[part], ROUNDINGS)


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_model_in_plain_pytorch(device, name, kind):
    check(name, convert(make(device), name), tokens(device), padding(kind, device))


@pytest.mark.parametrize("name", NAMES)
def test_position_ids_are_the_schemes(device, name):
    model = convert(make(device), name)
    per_token = torch.stack([torch.randperm(LONGEST)[:T] for _ in range(B)]).to(device)
    for ids in (per_token, per_token[:1]):
        check(name, model, tokens(device), padding("right", device), ids)
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(tokens(device), position_ids=per_token[:, 1:])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "standard"])
def test_nothing_limits_the_length(device, name):
    check(name, convert(make(device), name), tokens(device, length=3 * LONGEST + 1))


def test_the_learned_table_limits_the_length(device):
    model = convert(make(device), "standard")
    with pytest.raises(ValueError, match="hidden_states has 17 tokens, but max_position_embeddings is 16"):
        model(tokens(device, length=LONGEST + 1))


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_outside_of_it(device, name):
    model, ids, is_token = convert(make(device), name), tokens(device), padding("right", device)
    other = torch.where(is_token.bool(), ids, (ids + 7) % VOCABULARY)
    with torch.no_grad():
        logits = model(ids, attention_mask=is_token).logits
        assert torch.equal(model(other, attention_mask=is_token).logits[is_token.bool()], logits[is_token.bool()])
        for row, length in enumerate(is_token.sum(1)):
            alone = model(ids[row : row + 1, :length]).logits
            torch.testing.assert_close(logits[row : row + 1, :length], alone)


@pytest.mark.parametrize("name", NAMES)
def test_what_stays_and_what_goes(device, name):
    model = make(device, attention_probs_dropout_prob=0.25).bfloat16()
    before, parts = set(model.state_dict()), [[part.query, part.key, part.value] for part in attentions(model)]
    word_embeddings = model.get_input_embeddings()
    parts[0][0].weight.requires_grad_(False)
    attentions(model)[1].train()
    assert convert_bert(model, name) is model
    for attention, (query, key, value) in zip(attentions(model), parts, strict=True):
        assert type(attention) is get_attention_class(name)
        assert (attention.query, attention.key, attention.value) == (query, key, value)
        assert (attention.dropout, attention.max_position_embeddings, attention.out) == (0.25, LONGEST, None)
    assert [attention.training for attention in attentions(model)] == [False, True]
    assert not parts[0][0].weight.requires_grad
    assert model.get_input_embeddings() is word_embeddings
    own = {f"bert.encoder.layer.{i}.attention.self.{OWN[name]}" for i in range(2)} if name in OWN else set()
    assert set(model.state_dict()) == (before - {"bert.embeddings.position_embeddings.weight"}) | own
    assert set(dict(model.named_parameters())) == set(model.state_dict())
    for parameter in model.parameters():
        assert (parameter.dtype, parameter.device.type) == (torch.bfloat16, device.type)
    assert model.config._attn_implementation == "ropewalk"
    assert model(tokens(device), attention_mask=padding("left", device)).logits.dtype == torch.bfloat16


def test_an_optimizer_goes_on_with_the_parameters(device):
    model = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_bert(model)
    before = attentions(model)[0].query.weight.clone()
    model(tokens(device), labels=tokens(device)).loss.backward()
    optimizer.step()
    assert not torch.equal(attentions(model)[0].query.weight, before)


@pytest.mark.parametrize("head", ["BertModel", "BertForSequenceClassification", "BertForQuestionAnswering"])
def test_every_bert_and_what_holds_some(device, head):
    model = getattr(transformers, head)(make(device).config).to(device).eval()
    held = convert_bert(nn.ModuleDict({"one": model, "other": make(device)}), "alibi")
    assert {type(attention) for part in held.values() for attention in attentions(part)} == {
        ropewalk.ALiBiBERTAttention
    }
    for part in held.values():
        assert part(tokens(device, length=LONGEST + 1), attention_mask=None)[0].isfinite().all()


def test_one_layer_that_stands_twice_is_one(device):
    model = make(device)
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    convert_bert(model)
    one, other = attentions(model)
    assert one is other


def test_a_part_without_embeddings_is_converted(device):
    encoder = convert_bert(make(device).bert.encoder)
    assert type(encoder.layer[0].attention.self) is ropewalk.RoPEBERTAttention


def test_embeddings_take_what_berts_do(device):
    # In float64, as the last comparison adds in another order, and layers enlarge its roundings.
    model, ids = convert(make(device), "alibi").double(), tokens(device)
    words = model.get_input_embeddings()(ids)
    types = (ids % 2).long()
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=words).logits, model(ids).logits)
        assert torch.equal(model(ids, token_type_ids=torch.zeros_like(ids)).logits, model(ids).logits)
        typed = model(ids, token_type_ids=types).logits
        assert not torch.allclose(typed, model(ids).logits)
        shifted = words + model.bert.embeddings.token_type_embeddings.weight[types]
        shifted = shifted - model.bert.embeddings.token_type_embeddings.weight[0]
        torch.testing.assert_close(model(inputs_embeds=shifted).logits, typed)


def test_embeddings_drop_out_in_training(device):
    embeddings = convert_bert(make(device, hidden_dropout_prob=0.5)).bert.embeddings
    still = embeddings(tokens(device))
    assert not (still == 0).any()
    dropped = embeddings.train()(tokens(device))
    kept = dropped != 0
    assert 0.4 < kept.double().mean() < 0.6
    torch.testing.assert_close(dropped[kept], 2 * still[kept])


def test_layers_get_a_mask_of_keys(device, monkeypatch):
    asked = []

    def record(*tensors, **keywords):
        asked.append(keywords)
        return ropewalk.attention(*tensors, **keywords)

    monkeypatch.setattr("ropewalk.modules.bert.attention", record)
    model = convert(make(device), "alibi")
    model(tokens(device), attention_mask=padding("left", device))
    first, second = asked
    assert first["mask"].shape == (B, 1, 1, T)
    assert first["key_starts"].tolist() == [4, 0, 1]
    for name in ("mask", "key_starts", "key_lengths"):
        assert torch.equal(first[name], second[name])


def test_what_it_does_not_hold_is_refused_by_name(device):
    with pytest.raises(ValueError, match=r"output_attentions must be None .* by RoPEBERTAttention"):
        convert(make(device), "rope")(tokens(device), output_attentions=True)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(device, name, tmp_path):
    model = convert(make(device, tie_word_embeddings=True), name)
    model.save_pretrained(tmp_path)
    config = transformers.BertConfig.from_pretrained(tmp_path)
    loaded = convert_bert(transformers.BertForMaskedLM(config), name, **OPTIONS.get(name, {}))
    load_model(loaded, tmp_path / "model.safetensors")
    again = copy.deepcopy(loaded)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        for other in (loaded, again):
            assert torch.equal(other.to(device).eval()(tokens(device)).logits, model(tokens(device)).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(device, reentrant):
    model, is_token = convert(make(device), "standard"), padding("left", device)
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for attention in attentions(model):
        attention.dropout = 0.0

    def run(model):
        return model(tokens(device), attention_mask=is_token).logits

    expected = logits_and_grads(run, model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    attentions(model)[0].register_forward_hook(lambda *_: calls.append(1))
    actual = logits_and_grads(run, model)
    assert len(calls) == 2
    assert actual.keys() == expected.keys()
    for part in expected:
        torch.testing.assert_close(actual[part], expected[part])


@pytest.mark.parametrize("name", ["standard", "rope"])
def test_compiles_without_a_graph_break(device, name):
    model, ids, is_token = convert(make(device), name), tokens(device), padding("left", device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_by = {"attention_mask": is_token}
    actual = logits_and_grads(lambda _: compiled(ids, **check_by).logits, model)
    baseline = logits_and_grads(lambda model: plain(name, model, ids, is_token), model)
    truth = logits_and_grads(lambda model: plain(name, model, ids, is_token), copy.deepcopy(model).double())
    for part in truth:
        assert_close_to_truth(actual[part], truth[part], baseline[part], ROUNDINGS)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_from_one_seed_are_equal(device, name):
    def run(seed):
        model = make(device)
        torch.manual_seed(seed)
        convert_bert(model, name).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss = model(tokens(device), attention_mask=padding("right", device), labels=tokens(device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.detach(), *(parameter.detach() for parameter in model.parameters())]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


class AnAttentionOfOnesOwn(transformers.models.bert.modeling_bert.BertSelfAttention):
    pass


def with_another_attention():
    model = make("cpu")
    model.bert.encoder.layer[0].attention.self = AnAttentionOfOnesOwn(model.config)
    return model


def with_config(**changes):
    model = make("cpu")
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def with_crossattention():
    return build("BertDecoder", "cpu", is_decoder=True, add_cross_attention=True)


REFUSED = {
    "no module": (lambda: "bert-base-uncased", {}, TypeError, "model is str, but must be a torch.nn.Module"),
    "no BERT": (
        lambda: nn.Linear(2, 2),
        {},
        ValueError,
        "model is Linear, but must have transformers' BertSelfAttention",
    ),
    "another model": (lambda: build("Llama", "cpu"), {}, ValueError, "model is LlamaForCausalLM, but must have"),
    "unknown position": (
        lambda: make("cpu"),
        {"position": "sinusoidal"},
        ValueError,
        "Unknown attention type: 'sinusoidal'",
    ),
    "another class": (
        lambda: make("cpu"),
        {"position": nn.Linear},
        TypeError,
        "but must be a name or a subclass of BERTAttention",
    ),
    "unknown option": (lambda: make("cpu"), {"theta": 1.0}, TypeError, "unexpected keyword argument 'theta'"),
    "bad option": (lambda: make("cpu"), {"base": -1.0}, ValueError, "base is -1"),
    "sizes": (
        lambda: make("cpu"),
        {"hidden_size": 64, "dropout": 0.5},
        TypeError,
        "options hold hidden_size, dropout, but",
    ),
    "projection": (lambda: make("cpu"), {"output_projection": True}, TypeError, "options hold output_projection, but"),
    "head dim": (
        lambda: make("cpu", hidden_size=24),
        {"position": "exposb"},
        ValueError,
        "the head dim is 6, but must be even and at least 8 for ExpoSB",
    ),
    "converted": (
        lambda: convert_bert(make("cpu"), "alibi"),
        {},
        ValueError,
        r"model\.bert\.encoder\.layer\.0\.attention\.self is ALiBiBERTAttention, but the model must not be converted",
    ),
    "half converted": (
        lambda: nn.ModuleList([make("cpu"), convert_bert(make("cpu"))]),
        {},
        ValueError,
        r"model\.1\..* is RoPEBERTAttention, but the model must not be converted already",
    ),
    "decoder": (
        lambda: build("BertDecoder", "cpu"),
        {},
        ValueError,
        r"attention\.self is a decoder's, by config\.is_d",
    ),
    "cross-attention": (with_crossattention, {}, ValueError, "is cross-attention|is a decoder's"),
    "relative": (
        lambda: with_config(position_embedding_type="relative_key"),
        {},
        ValueError,
        r"config\.position_embedding_type 'relative_key', but it must be 'absolute'",
    ),
    "attentions": (lambda: with_config(output_attentions=True), {}, ValueError, r"config\.output_attentions True"),
    "a class of one's own": (
        with_another_attention,
        {},
        ValueError,
        "is AnAttentionOfOnesOwn, but must be transformers' BertSelfAttention itself",
    ),
    "bare": (
        lambda: attentions(make("cpu"))[0],
        {},
        ValueError,
        "model is BertSelfAttention, but must be inside the model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_stays_as_it_was(case):
    make_model, keywords, error, message = REFUSED[case]
    model = make_model()
    parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    implementation = model.config._attn_implementation if hasattr(model, "config") else None
    with pytest.raises(error, match=message):
        convert_bert(model, **keywords)
    if parts:
        assert dict(model.named_modules()) == parts
    if implementation is not None:
        assert model.config._attn_implementation == implementation


def test_without_transformers_the_error_says_so(monkeypatch):
    model = make("cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="transformers is not installed"):
        convert_bert(model)


def test_a_name_that_someone_else_took_changes_nothing(monkeypatch):
    model = make("cpu")
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "ropewalk", print)
    with pytest.raises(ValueError, match="name is 'ropewalk', but must be free: AttentionInterface has another"):
        huggingface.convert_bert(model)
    assert "bert.embeddings.position_embeddings.weight" in model.state_dict()
    assert model.config._attn_implementation == "eager"
