"""transformers' models by our attention: against transformers' own "eager", and that in float64."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.huggingface_models import (
    CAUSAL,
    NAMES,
    ROUNDINGS,
    WINDOW,
    B,
    InDouble,
    T,
    assert_agrees,
    build,
    heads,
    logits_and_grads,
    padding,
    tokens,
    transformers,
    truth_and_baseline,
)
from helpers.writes import WRITES
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import ropewalk
from ropewalk import attention
from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import attention as module_of_attention
from ropewalk.modules import masks
from ropewalk.modules.masks import read_keys
from ropewalk.testing import assert_close_to_truth


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


@pytest.fixture
def calls(monkeypatch):
    """What the layers ask of `attention`, from here on."""
    asked = []

    def record(*tensors, **keywords):
        asked.append(keywords)
        return attention(*tensors, **keywords)

    monkeypatch.setattr("ropewalk.integrations.huggingface.attention.attention", record)
    monkeypatch.setattr("ropewalk.integrations.huggingface.attention.repeat_plain", lambda *plain: None)
    return asked


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", NAMES)
def test_models_agree_with_eager_in_logits_and_gradients(name, kind, device):
    mask = padding(kind, device)
    assert_agrees(name, device, lambda model: logits_and_grads(model, "ropewalk", tokens(device), mask), mask=mask)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_block_mask_is_all_that_masks(name, device, calls):
    """As FlexAttention takes it: 4 dimensions, made for the model's tokens."""
    document = torch.arange(T, device=device) // 5

    def mod(b, h, m, n):
        return (document[m] == document[n]) & (m >= n)

    block_mask = create_block_mask(mod, B, None, T, T, device=device)
    pairs = create_mask(mod, B, 1, T, T, device=device)
    model, ids = build(name, device), tokens(device)
    results = []
    for mask in (block_mask, pairs):
        model.set_attn_implementation("ropewalk")
        given = {"full_attention": mask, "sliding_attention": mask} if name == "Gemma2" else mask
        results.append(model(input_ids=ids, attention_mask=given).logits)
    assert_close_to_truth(results[0], results[1].double(), results[1], ROUNDINGS)
    first, last = calls[0], calls[-1]
    assert first["blocks"] is block_mask
    assert first["mask"] is None
    assert not first["causal"]
    assert last["blocks"] is None
    assert last["mask"] is not None


def test_layers_of_gemma_4_with_512_features_a_head_agree_with_eager(device):
    """In float32 PyTorch's attention runs those layers, and Triton's kernels do in halves."""
    assert build("Gemma4", device).model.layers[-1].self_attn.head_dim == 512
    assert_agrees("Gemma4", device, lambda model: logits_and_grads(model, "ropewalk", tokens(device), None))


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
    return keywords["causal"], keywords["window"], shape, keywords["key_lengths"] is not None


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
def test_layers_get_the_shortest_mask(name, kind, expected, calls, device):
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


def test_one_query_of_a_preallocated_cache_walks_what_is_filled(calls, device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    model.generate(tokens(device), max_new_tokens=2, cache_implementation="static", do_sample=False)
    last = calls[-1]
    assert describe(last)[2] == (B, 1, 1, last["mask"].shape[3])
    assert last["mask"].shape[3] > T
    assert last["key_lengths"].tolist() == [T + 1] * B


@pytest.fixture
def readings(monkeypatch):
    """The masks of keys that are converted, from here on."""
    converted = []

    def record(mask, *arguments, **keywords):
        converted.append(mask)
        return read_keys(mask, *arguments, **keywords)

    for module in (module_of_attention, masks):
        monkeypatch.setattr(module, "read_keys", record)
    return converted


# How many masks a forward has.
ONE_FOR_ALL_LAYERS = {"Bert": 1, "BertDecoder": 1, "Llama": 1, "Mistral": 1, "Gemma2": 2}


@pytest.mark.parametrize("name", ONE_FOR_ALL_LAYERS)
def test_a_mask_is_read_once_for_all_layers(name, readings, device):
    model = build(name, device)
    logits_and_grads(model, "ropewalk", tokens(device), padding("right", device))
    assert len(readings) == ONE_FOR_ALL_LAYERS[name]
    model.train().gradient_checkpointing_enable()
    readings.clear()
    logits_and_grads(model, "ropewalk", tokens(device), padding("right", device))
    assert len(readings) == ONE_FOR_ALL_LAYERS[name]


def test_converted_layers_share_the_reading_of_a_mask(readings, device):
    model = huggingface.convert_bert(build("Bert", device))
    model(tokens(device), attention_mask=padding("right", device))
    assert len(readings) == 1


def test_a_step_from_a_preallocated_cache_reads_its_mask_once(readings, calls, device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    cache = transformers.StaticCache(config=model.config, max_cache_len=T + 2)
    with torch.no_grad():
        model(tokens(device), past_key_values=cache)
        readings.clear()
        model(tokens(device, length=1), past_key_values=cache)
    assert len(readings) == 1
    assert [keywords["key_lengths"].tolist() for keywords in calls[-2:]] == [[T + 1] * B] * 2


@pytest.mark.parametrize("change", ["in place", "another"])
@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_a_hook_may_change_the_mask_of_a_layer(name, change, calls, device):
    model = build(name, device)
    model.set_attn_implementation("ropewalk")
    shorter = torch.tensor([T - 6], device=device)

    def hook(module, arguments, keywords):
        mask = keywords["attention_mask"]
        if change == "another":
            mask = keywords["attention_mask"] = mask.clone()
        mask[..., T - 6 :] = 0
        return arguments, keywords

    attentions = [part for part in model.modules() if type(part).__name__ in ("BertSelfAttention", "LlamaAttention")]
    attentions[1].register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(tokens(device), attention_mask=padding("right", device))
    lengths = [keywords["key_lengths"] for keywords in calls]
    assert lengths[0].tolist() == [T - 4, T, T - 1]
    assert torch.equal(lengths[1], shorter.expand(B).int())


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_a_write_to_the_tokens_mask_after_the_mask_was_made_changes_nothing(dtype, device):
    """The layers' mask is a copy of it."""
    attention_mask = torch.ones(2, 6, dtype=dtype, device=device)
    arguments = mask_arguments("both ways", "whole", attention_mask, device) | {"q_length": 6, "kv_length": 6}
    if "cache_position" in arguments:
        arguments["cache_position"] = torch.arange(6, device=device)
    mask = make_mask(**arguments)
    attention_mask.data.zero_()
    q, k, v = heads(device)
    assert torch.equal(attend(q, k, v, mask, module=layer(is_causal=False))[0], bhtd(q, k, v, mask=mask))
    assert mask.all()


def test_a_layer_adds_one_view_and_few_calls_to_attention(monkeypatch, device):
    """Of a mask that our function made: nothing is computed, and no tensor is rearranged."""
    arguments = mask_arguments("both ways", "whole", torch.ones(2, 9, dtype=torch.bool, device=device), device)
    mask, (q, k, v), module = make_mask(**arguments), heads(device, queries=9, keys=9), layer(is_causal=False)
    monkeypatch.setattr(module_of_attention, "attention", lambda q, *others, **keywords: q)
    keywords = {"scaling": 0.3, "dropout": 0.0, "output_attentions": False, "position_ids": None}
    entered = []

    def profiler(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code.co_name)

    function = transformers.AttentionInterface()["ropewalk"]
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as models project it
    with torch.autograd.profiler.profile() as profile:
        function(module, q, k, v, mask, **keywords)
    names = [event.name for event in profile.function_events if event.name.startswith("aten::")]
    assert sorted(names) == ["aten::as_strided", "aten::transpose"]
    sys.setprofile(profiler)
    try:
        function(module, q, k, v, mask, **keywords)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 10, entered  # on a GPU one asks whether a graph is captured


def test_a_compiled_layer_takes_a_mask_that_was_made_outside(device):
    torch._dynamo.reset()
    padding = torch.ones(2, 9, dtype=torch.bool, device=device)
    padding[0, 5:] = False
    arguments = mask_arguments("both ways", "whole", padding, device)
    mask, (q, k, v), module = make_mask(**arguments), heads(device, queries=9, keys=9), layer(is_causal=False)
    compiled = torch.compile(
        lambda q, k, v, mask: attend(q, k, v, mask, module=module)[0], backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v, mask), bhtd(q, k, v, mask=padding[:, None, None]))


def layer(device="cpu", training=False, **attributes):
    module = nn.Module().train(training)
    for name, value in {"is_causal": True, **attributes}.items():
        setattr(module, name, value)
    return module


def attend(q, k, v, mask=None, module=None, **keywords):
    function = transformers.AttentionInterface()["ropewalk"]
    return function(layer() if module is None else module, q, k, v, mask, **keywords)


def bhtd(q, k, v, **keywords):
    return attention(q, k, v, layout="bhtd", **keywords).transpose(1, 2)


def test_keywords_become_arguments_of_attention(device):
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


@pytest.mark.parametrize("pattern", ["causal", "window", "both ways"])
def test_a_mask_that_must_be_whole_is(pattern, device):
    """What a model will cut or join."""
    attention_mask = torch.ones(2, 9, dtype=torch.bool, device=device)
    arguments = mask_arguments(pattern, "whole", attention_mask, device)
    arguments.update(dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False))
    assert torch.equal(make_mask(**arguments), whole_mask(**arguments))


def test_an_offset_on_the_device_gives_the_whole_mask(device):
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
    with pytest.raises(ValueError, match=f"{next(iter(keyword))} is not supported by Ropewalk's attention"):
        attend(*heads(), **keyword)


def test_output_attentions_of_a_model_raises(device):
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(device), output_attentions=True)


def test_t5s_refusal_names_the_call_with_its_biases(device):
    """And that attention gives what the model's own does, with the gradient of the table."""
    sizes = {"vocab_size": 50, "d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes)).to(device).eval()
    model.set_attn_implementation("ropewalk")
    with pytest.raises(
        ValueError, match=r"position_bias is not .*attention\(q, k, v, scale=1\.0, position=ropewalk\.T5Bias"
    ):
        model(tokens(device))
    layer = model.encoder.block[0].layer[0].SelfAttention
    x = torch.randn(B, T, 64, generator=torch.Generator().manual_seed(5)).to(device)
    model.set_attn_implementation("eager")

    def with_gradient(attend, x):
        out, table = attend(x), layer.relative_attention_bias.weight
        return out.detach(), torch.autograd.grad(out.square().sum(), table)[0]

    def by_ours(x):
        q, k, v = (projection(x).unflatten(-1, (4, 16)) for projection in (layer.q, layer.k, layer.v))
        position = ropewalk.T5Bias(layer.relative_attention_bias.weight)
        return layer.o(attention(q, k, v, scale=1.0, position=position).flatten(-2))

    ours, theirs = (with_gradient(attend, x) for attend in (by_ours, lambda x: layer(x)[0]))
    layer.double()
    with InDouble():
        truth = with_gradient(lambda x: layer(x)[0], x.double())
    for actual, exact, baseline in zip(ours, truth, theirs, strict=True):
        assert_close_to_truth(actual, exact, baseline, ROUNDINGS)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Bloom", {"hidden_size": 64, "n_layer": 1, "n_head": 4}),
        ("Mpt", {"d_model": 64, "n_layers": 1, "n_heads": 4}),
        ("GPTNeoXJapanese", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}),
    ],
)
def test_models_without_the_interface_stay_as_they_are_or_raise(name, sizes, device):
    """They would read our masks as theirs, and attend later tokens."""
    config = getattr(transformers, f"{name}Config")(vocab_size=50, bos_token_id=1, eos_token_id=2, **sizes)
    model_class = getattr(transformers, f"{name}Model")
    model = model_class(config).to(device).eval()
    before = model(tokens(device)).last_hidden_state
    model.set_attn_implementation("ropewalk")
    assert torch.equal(model(tokens(device)).last_hidden_state, before)
    model = model_class._from_config(config, attn_implementation="ropewalk").to(device)
    with pytest.raises(ValueError, match=f"attn_implementation must be 'eager' for {name}Config: its model does not"):
        model(tokens(device))


@pytest.mark.parametrize("name", ["GPTJ", "CodeGen"])
def test_models_that_gained_the_interface_run_by_it_or_raise(name, device):
    """They use it from transformers 5.24 on."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, bos_token_id=1, eos_token_id=2, n_embd=64, n_layer=1, n_head=4, rotary_dim=8
    )
    model_class = getattr(transformers, f"{name}Model")
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        # Before, a model either looks its attention up when it is made, or runs eager attention with our masks.
        with pytest.raises((KeyError, ValueError), match=r"ropewalk|must be 'eager' for"):
            model_class._from_config(config, attn_implementation="ropewalk").to(device)(tokens(device))
        return
    eager = model_class(config).to(device).eval()
    model = model_class._from_config(config, attn_implementation="ropewalk").to(device).eval()
    model.load_state_dict(eager.state_dict())
    torch.testing.assert_close(model(tokens(device)).last_hidden_state, eager(tokens(device)).last_hidden_state)


def test_masks_with_four_dimensions_replace_causality_and_window(device):
    q, k, v = heads(device)
    allowed = (torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(4)) < 0.6).to(device)
    additive = torch.zeros(2, 1, 6, 6, device=device).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = bhtd(q, k, v, mask=allowed)
    for mask in (allowed, additive, additive.clamp(min=-torch.inf), additive.bfloat16()):
        assert torch.equal(attend(q, k, v, mask, sliding_window=2)[0], expected)
    of_keys = additive[:, :, :1]
    assert torch.equal(attend(q, k, v, of_keys)[0], bhtd(q, k, v, mask=allowed[:, :, :1]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_mask_by_any_way_is_seen(device, write, dtype):
    q, k, v = heads(device)
    allowed = (torch.arange(6, device=device) < 4).expand(2, 1, 1, 6).contiguous()
    as_mask = (lambda x: x.clone()) if dtype == torch.bool else (lambda x: torch.where(x, 0.0, -torch.inf))
    mask = as_mask(torch.ones_like(allowed))
    torch.testing.assert_close(attend(q, k, v, mask)[0], bhtd(q, k, v))
    WRITES[write](mask, as_mask(allowed))
    expected = bhtd(q, k, v, key_lengths=torch.tensor([4, 4], device=device))
    torch.testing.assert_close(attend(q, k, v, mask)[0], expected)


@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_becomes_a_bias_is_refused(write):
    """On a CPU: on a device values are read once for a mask, as they are to be waited for."""
    q, k, v = heads("cpu")
    mask = torch.zeros(2, 1, 6, 6)
    attend(q, k, v, mask)
    WRITES[write](mask, torch.randn(2, 1, 6, 6))
    with pytest.raises(ValueError, match="attention_mask is a bias"):
        attend(q, k, v, mask)


def test_an_additive_mask_on_a_device_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(module_of_attention, "masks_only", lambda mask: not checked.append(mask))
    mask = torch.zeros(2, 1, 6, 6, device="meta")
    for _ in range(3):
        module_of_attention._check_additive(mask, mask)
    assert len(checked) == 1
    mask.add_(1)
    for other in (mask, mask.clone(), torch.zeros(2, 1, 6, 6), torch.zeros(2, 1, 6, 6)):
        module_of_attention._check_additive(other, other)
    assert len(checked) == 5


def test_a_mask_that_comes_to_be_learned_is_refused(device):
    q, k, v = heads(device)
    mask = torch.zeros(2, 1, 1, 6, device=device)
    attend(q, k, v, mask)
    with pytest.raises(ValueError, match="attention_mask requires grad"):
        attend(q, k, v, mask.requires_grad_())


def test_masks_of_equal_rows_are_masks_of_keys(calls, device):
    q, k, v = heads(device)
    of_keys = (torch.arange(6, device=device) < torch.tensor([[6], [4]], device=device))[:, None, None]
    for mask in (of_keys, torch.where(of_keys, 0.0, -torch.inf)):
        attend(q, k, v, mask.expand(2, 4, 6, 6))
        assert calls[-1]["mask"].shape == (2, 1, 1, 6)
        assert calls[-1]["key_lengths"].tolist() == [6, 4]


def test_a_mask_of_inference_can_be_used_in_training(calls, device):
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
        (torch.randn(2, 1, 6, 6), {}, "attention_mask is a bias"),
        (torch.tensor([0, -torch.inf, 0, 0, 0, 0.5]).expand(2, 1, 6, 6), {}, "attention_mask is a bias"),
        (torch.zeros(2, 1, 6, 6, requires_grad=True), {}, "attention_mask requires grad"),
        (torch.full((2, 1, 6, 6), torch.nan), {}, "attention_mask is a bias"),
        (
            torch.zeros(1, 5, 1, 0, dtype=torch.uint8),
            {"sliding_window": 3},
            "sliding_window is 3, but must be the mask's and the config's, 5",
        ),
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
def test_a_compiled_model_agrees_with_eager(kind, device):
    model, mask = build("Gemma2", device), padding(kind, device)
    model.set_attn_implementation("ropewalk")
    torch._dynamo.reset()
    with huggingface.use_ropewalk_rope(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        logits = compiled(tokens(device), attention_mask=mask, use_cache=False).logits
    truth, baseline = truth_and_baseline("Gemma2", device, tokens(device), mask)
    kept = torch.ones_like(logits[..., 0]).bool() if mask is None else mask.bool()
    assert_close_to_truth(logits[kept], truth[kept], baseline[kept], ROUNDINGS)


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
    with pytest.raises(ValueError, match="which transformers reserves"):
        huggingface.register(name)


@pytest.mark.parametrize("which", [0, 1])
def test_another_implementation_is_not_pushed_aside(which, interfaces):
    interfaces[which].register("theirs", print)
    with pytest.raises(ValueError, match=f"name is 'theirs', but must be free: {interfaces[which].__name__}"):
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
    with pytest.raises(RuntimeError, match=rf"transformers 9\.9 is not supported: \w+ has no {missing}; .*5\.0 to"):
        huggingface.register()


# === 8-bit products ===


@pytest.mark.parametrize("precision", ["int8", "int8-fp8"])
def test_names_of_8_bit_products_run_them_but_for_few_queries(precision):
    huggingface.register()
    function = transformers.AttentionInterface()[f"ropewalk-{precision}"]
    module = SimpleNamespace(is_causal=True, training=False, config=None)
    q, k, v = (torch.randn(1, heads, 40, 16) for heads in (4, 2, 2))
    keywords = {"causal": True, "layout": "bhtd"}
    for queries, expected in ((16, precision), (15, None), (1, None)):
        last = q[:, :, -queries:]
        out, _ = function(module, last, k, v, None, scaling=0.25)
        assert torch.equal(out.transpose(1, 2), ropewalk.attention(last, k, v, precision=expected, **keywords))
    for queries in (16, 1):
        with pytest.raises(ValueError, match=f"precision is '{precision}', whose backward is None"):
            function(module, q[:, :, -queries:].clone().requires_grad_(), k, v, None, scaling=0.25)
    module.training = True
    with pytest.raises(ValueError, match="precision was passed with dropout_p"):
        function(module, q, k, v, None, scaling=0.25, dropout=0.5)


def test_a_model_selects_8_bit_products_by_name():
    huggingface.register()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    tokens, found = torch.arange(20)[None], {}
    for name in ("ropewalk", "ropewalk-int8", "ropewalk-int8-fp8"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=100, attn_implementation=name, **sizes)
        with torch.no_grad():
            found[name] = transformers.LlamaForCausalLM(config).eval()(tokens).logits
    exact = found.pop("ropewalk")
    for logits in found.values():
        assert 0 < (logits - exact).norm() < 0.05 * exact.norm()
