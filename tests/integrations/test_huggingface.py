"""transformers' models by our attention and our rotation: against transformers' own "eager", and that in float64."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ropewalk import attention
from ropewalk.integrations import huggingface
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
OTHER_ROTATIONS = {"Cohere": GROUPED, "Glm": {**GROUPED, "attention_bias": False}, "NanoChat": GROUPED}
NAMES = [*CAUSAL, "Bert", "BertDecoder"]


class InDouble(TorchFunctionMode):
    """What transformers computes in float32 whatever the model's dtype, in float64: norms, softmax and tables."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


def build(name, device, **changes):
    """A model with random weights of its own, the same each time, in float32 and for evaluation."""
    torch.manual_seed(0)
    if name.startswith("Bert"):
        config = transformers.BertConfig(**{**SIZES, "is_decoder": name == "BertDecoder", **changes})
        model_class = transformers.BertLMHeadModel if config.is_decoder else transformers.BertForMaskedLM
    else:
        sizes = {**CAUSAL, **OTHER_ROTATIONS}[name]
        config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
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


@pytest.fixture
def calls(monkeypatch):
    """What the layers ask of `attention`, from here on."""
    asked = []

    def record(*tensors, **keywords):
        asked.append(keywords)
        return attention(*tensors, **keywords)

    monkeypatch.setattr(huggingface, "attention", record)
    return asked


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", NAMES)
def test_models_agree_with_eager_in_logits_and_gradients(name, kind, device):
    mask = padding(kind, device)
    assert_agrees(name, device, lambda model: logits_and_grads(model, "ropewalk", tokens(device), mask), mask=mask)


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_decoders_attend_both_ways_when_asked(name, kind, device):
    if '"is_causal"' not in inspect.getsource(transformers.masking_utils.create_causal_mask):
        pytest.skip("the masks of this transformers know no is_causal")
    mask = padding(kind, device)
    assert_agrees(
        name,
        device,
        lambda model: logits_and_grads(model, "ropewalk", tokens(device), mask, is_causal=False),
        mask=mask,
        is_causal=False,
    )


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_packed_sequences_are_told_apart_by_their_positions(name, device):
    positions = torch.cat((torch.arange(4), torch.arange(T - 4))).expand(B, -1).to(device)
    assert_agrees(
        name,
        device,
        lambda model: logits_and_grads(model, "ropewalk", tokens(device), None, position_ids=positions),
        position_ids=positions,
    )


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_packed_sequences_are_told_apart_by_cu_seq_lens(name, calls, device):
    model, ids = build(name, device), tokens(device, batch=1)
    parts = ids.split((4, T - 4), dim=1)
    model.set_attn_implementation("ropewalk")
    with torch.no_grad():
        packed = model(
            ids,
            position_ids=torch.cat((torch.arange(4), torch.arange(T - 4)))[None].to(device),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, T], device=device)),
            **dict.fromkeys(("max_length_q", "max_length_k"), T - 4),
            use_cache=True,  # or transformers makes a mask of the positions
        ).logits
    assert all(keywords["layout"] == "thd" for keywords in calls)
    for part, actual in zip(parts, packed.split((4, T - 4), dim=1), strict=True):
        assert_close_to_truth(actual, *truth_and_baseline(name, device, part, None), ROUNDINGS)


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation_is_that_of_eager_token_for_token(name, cache, kind, device):
    model, ids, mask = build(name, device), tokens(device, length=9), padding(kind, device, length=9)
    generated = []
    for implementation in ("eager", "ropewalk"):
        model.set_attn_implementation(implementation)
        keywords = {} if cache is None else {"cache_implementation": cache}
        generated.append(model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, **keywords))
    assert generated[0].shape == (B, 16)
    assert torch.equal(*generated)
    assert len(generated[0][:, 9:].unique()) > 3


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_a_cache_takes_its_tokens_in_pieces(name, kind, device):
    model, ids, mask = build(name, device), tokens(device), padding(kind, device)
    model.set_attn_implementation("ropewalk")
    cache, pieces = transformers.DynamicCache(config=model.config), []
    for start, end in ((0, 3), (3, 10), (10, 11), (11, T)):
        given = None if mask is None else mask[:, :end]
        with torch.no_grad():
            pieces.append(model(ids[:, start:end], attention_mask=given, past_key_values=cache, use_cache=True).logits)
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    truth, baseline = (whole[kept] for whole in truth_and_baseline(name, device, ids, mask))
    assert_close_to_truth(torch.cat(pieces, dim=1)[kept], truth, baseline, ROUNDINGS)


def describe(keywords):
    """What a layer asked for, in short."""
    mask = keywords.get("mask")
    shape = None if mask is None else tuple(mask.shape)
    return keywords["causal"], keywords["window"], shape, "key_lengths" in keywords


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("Llama", "none", [(True, None, None, False)] * 2),
        ("Llama", "right", [(True, None, (B, 1, 1, T), True)] * 2),
        ("Mistral", "none", [(True, WINDOW, None, False)] * 2),
        ("Mistral", "left", [(True, WINDOW, (B, 1, 1, T), True)] * 2),
        ("Qwen2", "none", [(True, None, None, False), (True, WINDOW, None, False)]),
        ("Gemma2", "left", [(True, WINDOW, (B, 1, 1, T), True), (True, None, (B, 1, 1, T), True)]),
        ("Bert", "none", [(False, None, None, False)] * 2),
        ("Bert", "right", [(False, None, (B, 1, 1, T), True)] * 2),
        ("BertDecoder", "right", [(True, None, (B, 1, 1, T), True)] * 2),
    ],
)
def test_masks_say_no_more_than_they_must(name, kind, expected, calls, device):
    model, mask = build(name, device), padding(kind, device)
    model.set_attn_implementation("ropewalk")
    model(tokens(device), attention_mask=mask)
    assert [describe(keywords) for keywords in calls] == expected
    for keywords in calls:
        if mask is not None:
            index = torch.arange(T, device=device)
            assert torch.equal(keywords["key_starts"], torch.where(mask.bool(), index, T).amin(1).int())
            assert torch.equal(keywords["key_lengths"], torch.where(mask.bool(), index + 1, 0).amax(1).int())
            assert keywords["mask"].untyped_storage().nbytes() == B * T  # nothing was expanded in memory


def test_nothing_is_worked_out_twice_for_one_forward(calls, device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    model(tokens(device), attention_mask=padding("right", device))
    first, second = (keywords["key_lengths"] for keywords in calls)
    assert first.data_ptr() == second.data_ptr()


def test_one_query_of_a_preallocated_cache_walks_what_is_filled(calls, device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    model.generate(tokens(device), max_new_tokens=2, cache_implementation="static", do_sample=False)
    last = calls[-1]
    assert describe(last)[2] == (B, 1, 1, last["mask"].shape[3])
    assert last["mask"].shape[3] > T
    assert last["key_lengths"].tolist() == [T + 1] * B


def layer(device="cpu", training=False, **attributes):
    module = nn.Module().train(training)
    for name, value in {"is_causal": True, **attributes}.items():
        setattr(module, name, value)
    return module


def heads(device="cpu", batch=2, queries=6, keys=6, n_heads=4, n_key_heads=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((n_heads, queries), (n_key_heads, keys), (n_key_heads, keys))
    return [torch.randn(batch, *shape, 16, generator=generator).to(device) for shape in shapes]


def attend(q, k, v, mask=None, module=None, **keywords):
    function = transformers.AttentionInterface()["ropewalk"]
    return function(layer() if module is None else module, q, k, v, mask, **keywords)


def bhtd(q, k, v, **keywords):
    return attention(q, k, v, layout="bhtd", **keywords).transpose(1, 2)


def test_keywords_change_what_they_say(device):
    q, k, v = heads(device)
    sinks = torch.randn(4).to(device)
    assert torch.equal(attend(q, k, v)[0], bhtd(q, k, v, causal=True))
    for theirs, ours in (
        ({"scaling": 0.7}, {"scale": 0.7}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"s_aux": sinks}, {"sinks": sinks}),
        ({"sliding_window": 2}, {"window": 2}),
        ({"sliding_window": 6}, {}),
        ({"is_causal": False}, {"causal": False}),
        ({"position_ids": torch.arange(6), "use_cache": True, "output_attentions": False, "head_mask": None}, {}),
    ):
        out, weights = attend(q, k, v, **theirs)
        assert weights is None
        assert out.is_contiguous()
        assert torch.equal(out, bhtd(q, k, v, **{"causal": True, **ours})), theirs
    module = layer(is_causal=False)
    assert torch.equal(attend(q, k, v, module=module)[0], bhtd(q, k, v))
    assert torch.equal(attend(q, k, v, module=module, is_causal=True)[0], bhtd(q, k, v, causal=True))
    torch.testing.assert_close(attend(q[:, :, -1:], k, v)[0], attend(q, k, v)[0][:, -1:])


PATTERNS = {
    "causal": ("causal_mask_function", ()),
    "window": ("sliding_window_causal_mask_function", (WINDOW,)),
    "window of one": ("sliding_window_causal_mask_function", (1,)),
    "chunks": ("chunked_causal_mask_function", (WINDOW, torch.zeros(2, dtype=torch.long))),
    "both ways": ("bidirectional_mask_function", ()),
    "window both ways": ("sliding_window_bidirectional_mask_function", (WINDOW,)),
}
PLACES = {  # queries, keys, and where the first of each stands
    "whole": (9, 9, 0, 0),
    "within the window": (WINDOW, WINDOW, 0, 0),
    "one more": (1, 9, 8, 0),
    "some more": (3, 9, 6, 0),
    "preallocated": (3, 9, 2, 0),
    "one preallocated": (1, 9, 2, 0),
    "of a cache that slides": (2, 6, 8, 4),
}


def mask_arguments(pattern, places, attention_mask, device):
    """What transformers gives to a mask function."""
    masking = transformers.masking_utils
    name, arguments = PATTERNS[pattern]
    if not hasattr(masking, name):
        pytest.skip(f"this transformers has no {name}")
    function = getattr(masking, name)
    function = (
        function(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments)) if arguments else function
    )
    queries, keys, query_offset, key_offset = PLACES[places]
    if "cache_position" in inspect.signature(masking.sdpa_mask).parameters:
        which = {"cache_position": torch.arange(query_offset, query_offset + queries, device=device)}
    else:
        which = {"q_length": queries, "q_offset": query_offset, "device": device}
    size = arguments[0] if arguments else None
    return {
        "batch_size": 2,
        **which,
        "kv_length": keys,
        "kv_offset": key_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": "both" not in pattern,
        "allow_is_bidirectional_skip": "both" in pattern,
        "dtype": torch.float32,
        "use_vmap": False,
        "config": SimpleNamespace(**{"attention_chunk_size" if pattern == "chunks" else "sliding_window": size}),
        **({} if size is None else {"local_size": size}),
    }


def make_mask(**arguments):
    return transformers.AttentionMaskInterface()["ropewalk"](**arguments)


def whole_mask(**arguments):
    skip = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return transformers.masking_utils.sdpa_mask(**{**arguments, **skip})


@pytest.mark.parametrize("kind", ["none", "left", "right", "short"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_mask_means_what_transformers_own_says(pattern, places, kind, device):
    queries, keys, query_offset, key_offset = PLACES[places]
    attention_mask = None if kind == "none" else torch.ones(2, key_offset + keys, dtype=torch.bool, device=device)
    if kind == "left":
        attention_mask[0, : key_offset + 2] = False
    elif kind == "right":
        attention_mask[1, -2:] = False
    elif kind == "short":  # of a preallocated cache
        attention_mask = attention_mask[:, : query_offset + queries]
    arguments = mask_arguments(pattern, places, attention_mask, device)
    q, k, v = heads(device, queries=queries, keys=keys)
    # A layer that says nothing of windows: not every model that has one does.
    actual = attend(q, k, v, make_mask(**arguments), module=layer(is_causal="both" not in pattern))[0]
    torch.testing.assert_close(actual, bhtd(q, k, v, mask=whole_mask(**arguments)))


def test_the_bounds_of_a_mask_of_keys():
    rows = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
    starts, ends = huggingface._bounds(torch.tensor(rows, dtype=torch.uint8)[:, None, None])
    assert starts.tolist() == [0, 0, 1, 1, 3]
    assert ends.tolist() == [0, 4, 4, 2, 4]


@pytest.mark.parametrize("pattern", ["causal", "window", "both ways"])
def test_a_mask_that_must_be_whole_is(pattern, device):
    """What a model will cut or join."""
    attention_mask = torch.ones(2, 9, dtype=torch.bool, device=device)
    arguments = mask_arguments(pattern, "whole", attention_mask, device)
    arguments.update(dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False))
    assert torch.equal(make_mask(**arguments), whole_mask(**arguments))


def test_a_place_that_only_the_device_knows_is_not_asked_for(device):
    arguments = mask_arguments("causal", "whole", None, device)
    if "q_offset" not in arguments:
        pytest.skip("this transformers gives no offset")
    arguments["q_offset"] = torch.tensor(0, device=device)
    assert torch.equal(make_mask(**arguments), whole_mask(**arguments))


def test_padding_of_a_causal_model_is_causal_whatever_the_layer_says(device):
    q, k, v = heads(device)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.uint8, device=device)
    expected = bhtd(q, k, v, causal=True)
    torch.testing.assert_close(attend(q, k, v, mask, module=layer(is_causal=False))[0], expected)


def test_one_query_is_not_said_to_be_causal(calls, device):
    attend(*heads(device, queries=1))  # it stands at the last key, and libraries that could serve it do not know
    assert describe(calls[0]) == (False, None, None, False)


def test_determinism_may_be_asked_for_and_not_forbidden(calls, device):
    for asked in (True, False, None):
        attend(*heads(device), deterministic=asked)
    assert [keywords["deterministic"] for keywords in calls] == [True, None, None]


@pytest.mark.parametrize(
    "keyword",
    [
        {"output_attentions": True},
        {"head_mask": torch.ones(4)},
        {"position_bias": torch.zeros(1, 4, 6, 6)},
        {"cache": object()},
        {"indices": torch.zeros(1)},
        {"sofcap": 3.0},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
def test_what_it_cannot_do_raises_by_name(keyword):
    with pytest.raises(ValueError, match=f"{next(iter(keyword))} was passed to Ropewalk's attention"):
        attend(*heads(), **keyword)


def test_output_attentions_of_a_model_raises(device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(device), output_attentions=True)


def test_masks_with_four_dimensions_say_everything(device):
    q, k, v = heads(device)
    allowed = (torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(4)) < 0.6).to(device)
    additive = torch.zeros(2, 1, 6, 6, device=device).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = bhtd(q, k, v, mask=allowed)
    for mask in (allowed, additive, additive.clamp(min=-torch.inf), additive.bfloat16()):
        assert torch.equal(attend(q, k, v, mask, sliding_window=2)[0], expected)
    of_keys = additive[:, :, :1]
    assert torch.equal(attend(q, k, v, of_keys)[0], bhtd(q, k, v, mask=allowed[:, :, :1]))


def test_a_mask_that_was_written_to_is_read_again(device):
    q, k, v = heads(device)
    mask = torch.zeros(2, 1, 1, 6, device=device)
    torch.testing.assert_close(attend(q, k, v, mask)[0], bhtd(q, k, v))
    mask[:, :, :, 4:] = -torch.inf
    expected = bhtd(q, k, v, key_lengths=torch.tensor([4, 4], device=device))
    torch.testing.assert_close(attend(q, k, v, mask)[0], expected)


def test_masks_are_not_kept_alive(device):
    q, k, v = heads(device)
    before = len(huggingface._MADE)
    mask = torch.zeros(2, 1, 1, 6, device=device)
    attend(q, k, v, mask)
    assert len(huggingface._MADE) == before + 1
    del mask
    assert len(huggingface._MADE) == before


def test_a_mask_seen_in_inference_serves_training(calls, device):
    q, k, v = heads(device)
    mask = torch.zeros(2, 1, 1, 6, device=device)
    with torch.inference_mode():
        attend(q, k, v, mask)
    q.requires_grad_()
    attend(q, k, v, mask)[0].sum().backward()
    assert q.grad is not None
    assert not any(calls[-1][name].is_inference() for name in ("mask", "key_starts", "key_lengths"))


@pytest.mark.parametrize(
    ("mask", "keywords", "message"),
    [
        (torch.randn(2, 1, 6, 6), {}, "attention_mask holds other numbers"),
        (torch.tensor([0, -torch.inf, 0, 0, 0, 0.5]).expand(2, 1, 6, 6), {}, "attention_mask holds other numbers"),
        (torch.zeros(2, 1, 6, 6, requires_grad=True), {}, "attention_mask requires grad"),
        (torch.full((2, 1, 6, 6), torch.nan), {}, "attention_mask holds other numbers"),
        (torch.zeros(1, 5, 1, 0, dtype=torch.uint8), {"sliding_window": 3}, "sliding_window is 3, but the config's"),
        (
            torch.ones(2, 1, 1, 6, dtype=torch.uint8),
            {"cu_seq_lens_q": torch.tensor([0, 6])},
            "cu_seq_lens_q was passed",
        ),
        (None, {"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q was passed"),
    ],
)
def test_masks_that_do_not_fit_raise(mask, keywords, message):
    with pytest.raises(ValueError, match=message):
        attend(*heads(), mask, **keywords)


@pytest.mark.parametrize(("batch", "mask"), [(1, torch.ones(1, 1, 1, 6, dtype=torch.uint8)), (2, None)])
def test_cu_seq_lens_go_with_one_row_and_no_mask_alone(batch, mask):
    with pytest.raises(ValueError, match="cu_seq_lens_q was passed"):
        attend(*heads(batch=batch), mask, cu_seq_lens_q=torch.tensor([0, 2, 6]))


def test_masks_of_other_dtypes_raise():
    with pytest.raises(TypeError, match=r"attention_mask has dtype torch\.int64"):
        attend(*heads(), torch.ones(2, 1, 6, 6, dtype=torch.long))


def test_dropout_is_for_training_alone(device):
    q, k, v = heads(device)
    plain = attend(q, k, v)[0]
    assert torch.equal(attend(q, k, v, dropout=0.5)[0], plain)
    torch.manual_seed(5)
    dropped = attend(q, k, v, module=layer(training=True), dropout=0.5)[0]
    torch.manual_seed(5)
    assert torch.equal(dropped, bhtd(q, k, v, causal=True, dropout_p=0.5))
    assert not torch.equal(dropped, plain)


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_models_train_with_dropout(name, calls, device):
    changes = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.0}
    model = build(name, device, **(changes if name == "Bert" else {"attention_dropout": 0.3}))
    still = logits_and_grads(model, "ropewalk", tokens(device), padding("right", device))
    model.train()
    moved = logits_and_grads(model, "ropewalk", tokens(device), padding("right", device))
    assert [keywords["dropout_p"] for keywords in calls] == [0.0, 0.0, 0.3, 0.3]
    assert not torch.equal(still["logits"], moved["logits"])
    assert all(grad.isfinite().all() for grad in moved.values())


@pytest.mark.parametrize("kind", ["none", "left"])
def test_a_compiled_model_equals_an_eager_one(kind, device):
    model, mask = build("Gemma2", device), padding(kind, device)
    model.set_attn_implementation("ropewalk")
    torch._dynamo.reset()
    with huggingface.use_ropewalk_rope(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected = model(tokens(device), attention_mask=mask, use_cache=False).logits
        logits = compiled(tokens(device), attention_mask=mask, use_cache=False).logits
    assert torch.equal(logits, expected)


def test_from_pretrained_takes_it_by_name(tmp_path, device):
    model = build("Llama", device)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ropewalk").to(device)
    assert loaded.config._attn_implementation == "ropewalk"
    model.set_attn_implementation("ropewalk")
    assert torch.equal(loaded(tokens(device)).logits, model(tokens(device)).logits)


@pytest.fixture
def interfaces():
    """transformers' two registers, put back afterwards."""
    found = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    before = [dict(interface._global_mapping) for interface in found]
    yield found
    for interface, mapping in zip(found, before, strict=True):
        interface._global_mapping.clear()
        interface._global_mapping.update(mapping)


def test_a_second_registration_changes_nothing(interfaces):
    before = [dict(interface._global_mapping) for interface in interfaces]
    huggingface.register()
    assert [dict(interface._global_mapping) for interface in interfaces] == before


def test_another_name_is_another_door(interfaces):
    huggingface.register("mine")
    for interface in interfaces:
        assert interface()["mine"] is interface()["ropewalk"]


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "my_flash", "someone/kernel", "paged|ropewalk"])
def test_names_that_mean_something_else_are_refused(name, interfaces):
    with pytest.raises(ValueError, match="means something else to transformers"):
        huggingface.register(name)


@pytest.mark.parametrize("which", [0, 1])
def test_another_implementation_is_not_pushed_aside(which, interfaces):
    interfaces[which].register("theirs", print)
    with pytest.raises(ValueError, match=f"name is 'theirs', but {interfaces[which].__name__} has another function"):
        huggingface.register("theirs")
    assert interfaces[which]()["theirs"] is print
    assert "theirs" not in interfaces[1 - which]()


def test_without_transformers_the_error_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="transformers is not installed"):
        huggingface.register()


@pytest.mark.parametrize("missing", ["AttentionMaskInterface", "sdpa_mask"])
def test_another_interface_is_refused(missing, monkeypatch):
    masking = importlib.import_module("transformers.masking_utils")
    stub = SimpleNamespace(__version__="9.9", __name__="transformers", AttentionInterface=1, AttentionMaskInterface=1)
    without = SimpleNamespace(**{**vars(masking), "__name__": "masking"})
    delattr(stub if missing.startswith("Att") else without, missing)
    modules = {"transformers": stub, "transformers.masking_utils": without}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    with pytest.raises(
        RuntimeError, match=rf"transformers 9\.9 is not what it must be: \w+ has no {missing}; .*5\.0 to"
    ):
        huggingface.register()


def modeling(model):
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("name", [*CAUSAL, *OTHER_ROTATIONS])
def test_our_rotation_agrees_in_logits_and_gradients(name, monkeypatch, device):
    rotations = []
    monkeypatch.setattr(
        huggingface, "apply_rope", lambda *xs, **flags: rotations.append(flags) or apply_rope(*xs, **flags)
    )
    apply_rope = importlib.import_module("ropewalk").apply_rope
    mask = padding("left", device)

    def run(model):
        original = modeling(model).apply_rotary_pos_emb
        with huggingface.use_ropewalk_rope(model) as handle:
            assert handle.modules == (type(model).__module__,)
            assert modeling(model).apply_rotary_pos_emb is not original
            rotations.clear()
            result = logits_and_grads(model, "ropewalk", tokens(device), mask)
        assert modeling(model).apply_rotary_pos_emb is original
        assert len(rotations) == LAYERS
        assert rotations[0]["interleaved"] is (name in ("Cohere", "Glm"))
        assert rotations[0]["inverse"] is (name == "NanoChat")
        return result

    assert_agrees(name, device, run, mask=mask)
    assert len(rotations) == LAYERS


def test_handles_count(device):
    one, two = build("Llama", device), build("Llama", device)
    original = modeling(one).apply_rotary_pos_emb
    first, second = huggingface.use_ropewalk_rope(one), huggingface.use_ropewalk_rope(two)
    first.remove()
    first.remove()
    assert modeling(one).apply_rotary_pos_emb is not original
    second.remove()
    assert modeling(one).apply_rotary_pos_emb is original
    assert not huggingface._ROTATIONS


def test_another_replacement_is_left_alone(monkeypatch, device):
    model = build("Llama", device)
    monkeypatch.setattr(modeling(model), "apply_rotary_pos_emb", modeling(model).apply_rotary_pos_emb)
    handle = huggingface.use_ropewalk_rope(model)
    modeling(model).apply_rotary_pos_emb = print
    with pytest.raises(RuntimeError, match=r"was replaced by someone else since, .*modeling_llama"):
        handle.remove()
    assert modeling(model).apply_rotary_pos_emb is print


def test_models_without_such_a_function_are_refused(device):
    with pytest.raises(ValueError, match="BertForMaskedLM has no apply_rotary_pos_emb"):
        huggingface.use_ropewalk_rope(build("Bert", device))


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def plainly(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def like_llama(q, k, cos, sin, unsqueeze_dim=1):
    return plainly(q, cos, sin, unsqueeze_dim), plainly(k, cos, sin, unsqueeze_dim)


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return like_llama(q, k, cos, sin, unsqueeze_dim)


def keys_the_other_way(q, k, cos, sin, unsqueeze_dim=1):
    return plainly(q, cos, sin, unsqueeze_dim), plainly(k, cos, -sin, unsqueeze_dim)


def slightly_scaled(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x * 1.0001 for x in like_llama(q, k, cos, sin, unsqueeze_dim))


def last_features(q, k, cos, sin, unsqueeze_dim=1):
    def rotate(x):
        rest = x.shape[-1] - cos.shape[-1]
        return torch.cat((x[..., :rest], plainly(x[..., rest:], cos, sin, unsqueeze_dim)), dim=-1)

    return rotate(q), rotate(k)


def interleaved_to_halves(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return like_llama(q, k, cos, sin, unsqueeze_dim)


def heads_first_alone(q, k, cos, sin, unsqueeze_dim=1):
    return like_llama(q, k, cos, sin, 1)


def three(q, k, cos, sin, unsqueeze_dim=1):
    return *like_llama(q, k, cos, sin, unsqueeze_dim), None


def of_one(x, cos, sin, unsqueeze_dim=1):
    return plainly(x, cos, sin, unsqueeze_dim)


class LikeAHubKernel(nn.Module):
    def forward(self, *args, **kwargs):
        return like_llama(*args, **kwargs)


@pytest.fixture
def stub(monkeypatch):
    """A model of a modeling module with a rotation of its own, whose forward calls it."""

    def make(function, name="modeling_stub"):
        module = ModuleType(name)
        module.apply_rotary_pos_emb = function
        monkeypatch.setitem(sys.modules, name, module)
        body = {
            "__module__": name,
            "forward": lambda self, *args, **kwargs: module.apply_rotary_pos_emb(*args, **kwargs),
        }
        return type("Stub", (nn.Module,), body)()

    return make


@pytest.mark.parametrize(
    "function",
    [
        keys_the_other_way,
        slightly_scaled,
        last_features,
        interleaved_to_halves,
        heads_first_alone,
        three,
        of_one,
        lambda q, k, cos, sin, unsqueeze_dim=1: None,
    ],
)
def test_other_rotations_are_refused_and_nothing_is_replaced(function, stub):
    good, bad = stub(like_llama, "modeling_good"), stub(function, "modeling_bad")
    with pytest.raises(ValueError, match=r"modeling_bad\.apply_rotary_pos_emb\(.*\) rotates in no way"):
        huggingface.use_ropewalk_rope(nn.ModuleList([good, bad]))
    assert sys.modules["modeling_good"].apply_rotary_pos_emb is like_llama
    assert sys.modules["modeling_bad"].apply_rotary_pos_emb is function
    assert not huggingface._ROTATIONS


def angles(*shape, twice="halves"):
    half = torch.rand(*shape, generator=torch.Generator().manual_seed(6)) * 6
    half = torch.cat((half, half), -1) if twice == "halves" else half
    return half.cos(), half.sin()


@pytest.mark.parametrize("function", [like_llama, with_positions, LikeAHubKernel()])
def test_every_layout_that_the_function_has(function, stub):
    model = stub(function)
    q, k, _ = heads(n_heads=3)
    cos, sin = angles(2, 6, 8)
    with huggingface.use_ropewalk_rope(model):
        for x, y, tables, flags in (
            (q, k, (cos, sin), {}),
            (q, k, (cos[:1], sin[:1]), {}),
            (q, k, (cos, sin), {"unsqueeze_dim": -3}),
            (q.transpose(1, 2), k.transpose(1, 2), (cos, sin), {"unsqueeze_dim": 2}),
            (q, k, (cos[0], sin[0]), {"unsqueeze_dim": 0}),
            (q.transpose(1, 2), k.transpose(1, 2), (cos[0], sin[0]), {"unsqueeze_dim": 1}),
        ):
            expected = like_llama(x.double(), y.double(), *(table.double() for table in tables), **flags)
            baseline = like_llama(x, y, *tables, **flags)
            for actual, truth, theirs in zip(model(x, y, *tables, **flags), expected, baseline, strict=True):
                assert_close_to_truth(actual, truth, theirs)


def test_what_the_function_has_no_use_for_raises(stub):
    q, k, _ = heads()
    cos, sin = angles(2, 6, 8)
    with huggingface.use_ropewalk_rope(stub(with_positions)) as handle:
        rotate = sys.modules[handle.modules[0]].apply_rotary_pos_emb
        once = angles(2, 6, 16, twice="once")
        for tables in (once, (once[0], sin), (cos, once[1])):
            with pytest.raises(
                ValueError, match=r"does not hold every angle twice, but must for modeling_stub\.apply_"
            ):
                rotate(q, k, *tables)
        rotate(q, k, cos, sin)
        with pytest.raises(ValueError, match="unsqueeze_dim is 3"):
            rotate(q, k, cos, sin, unsqueeze_dim=3)
        with pytest.raises(ValueError, match=r"position_ids were passed to modeling_stub\.apply_rotary_pos_emb"):
            rotate(q, k, cos, sin, position_ids=torch.arange(6))
        with pytest.raises(ValueError, match="per token it must be"):
            rotate(q, k, cos[:, :5], sin[:, :5])
