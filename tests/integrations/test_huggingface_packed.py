"""Packed rows of transformers' models by our attention: position_ids that restart are bounds of documents."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from helpers.huggingface_models import (
    LAYERS,
    ROUNDINGS,
    VOCABULARY,
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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropewalk import attention
from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import attention as door
from ropewalk.integrations.huggingface import packing
from ropewalk.testing import assert_close_to_truth

LENGTHS = [(4, 1, T - 5), (1, 1, T - 2)]  # of the documents in each row


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

    monkeypatch.setattr(door, "attention", record)
    monkeypatch.setattr(door, "repeat_plain", lambda *plain: None)
    return asked


@pytest.fixture
def readings(monkeypatch):
    """The positions that were read, from here on."""
    read = packing._read
    found = []
    monkeypatch.setattr(packing, "_read", lambda *given: found.append(given) or read(*given))
    return found


def restarting(device, rows=1, lengths=LENGTHS):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths[:rows]]).to(device)


def test_what_a_view_of_positions_says_is_not_what_all_say(device):
    positions = restarting(device)
    first = positions[:, : LENGTHS[0][0]]  # at the same address
    assert packing.find_documents(first, 1) is None
    assert not packing.has_none(positions)
    assert packing.find_documents(positions, 1) is not None


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    ("name", "rows"), [("Mistral", 2), ("Gemma2", 1), pytest.param("GptOss", 2, marks=pytest.mark.slow)]
)
def test_documents_are_as_each_alone(name, rows, use_cache, calls, device):
    model, ids, positions = build(name, device), tokens(device, batch=rows), restarting(device, rows)
    model.set_attn_implementation("ropewalk")
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=use_cache).logits
    assert [keywords["layout"] for keywords in calls] == ["thd"] * LAYERS
    assert all(keywords["mask"] is None for keywords in calls)
    for row, lengths in enumerate(LENGTHS[:rows]):
        parts = ids[row : row + 1].split(lengths, dim=1)
        for part, actual in zip(parts, packed[row : row + 1].split(lengths, dim=1), strict=True):
            assert_close_to_truth(actual, *truth_and_baseline(name, device, part, None), ROUNDINGS)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_gradients_with_a_cache_are_those_of_eagers_mask(name, checkpoints, device):
    """eager has that mask without a cache alone."""
    positions, ids = restarting(device, 2), tokens(device, batch=2)

    def run(model):
        if checkpoints:
            model.train().gradient_checkpointing_enable()
        forward = model.forward
        model.forward = lambda *given, use_cache, **keywords: forward(*given, use_cache=True, **keywords)
        try:
            return logits_and_grads(model, "ropewalk", ids, None, position_ids=positions)
        finally:
            model.forward = forward
            model.eval()

    assert_agrees(name, device, run, ids=ids, position_ids=positions)


def test_one_row_of_positions_is_shared_by_all_rows(device):
    ids, positions = tokens(device, batch=2), restarting(device)
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    with torch.no_grad():
        shared = model(ids, position_ids=positions).logits
        assert torch.equal(shared, model(ids, position_ids=positions.repeat(2, 1)).logits)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operator returns, in bytes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not func.is_view:
                self.size = max(self.size, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_no_mask_of_queries_and_keys_is_made(name, use_cache, monkeypatch, device):
    """The attention itself stands aside: on a CPU it makes all scores."""
    monkeypatch.setattr(door, "attention", lambda q, k, v, **keywords: q * 1)
    length = 1024
    ids = tokens(device, batch=1, length=length)
    positions = restarting(device, lengths=[(length // 2, 1, length // 2 - 1)])
    model = build(name, device, max_position_embeddings=length, head_dim=16)
    model.set_attn_implementation("ropewalk")
    with Largest() as largest:
        model(ids, position_ids=positions, use_cache=use_cache).logits.sum().backward()
    assert 0 < largest.size < length**2


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_positions_are_read_once_a_step(name, use_cache, readings, calls, device):
    model, ids, positions = build(name, device), tokens(device, batch=1), restarting(device)
    model.set_attn_implementation("ropewalk")
    model(ids, position_ids=positions, use_cache=use_cache)
    # The mask functions of transformers before 5.24 hold numbers of documents alone, made anew for each mask.
    has_positions = use_cache or hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence")
    once = 1 if has_positions or name == "Llama" else 2
    assert len(readings) == once
    assert [keywords["cu_seqlens_q"].tolist() for keywords in calls] == [[0, 4, 5, T]] * LAYERS
    calls.clear()
    positions.copy_(restarting(device, lengths=[(2, T - 2)]))
    model(ids, position_ids=positions, use_cache=use_cache)
    assert len(readings) == 2 * once
    assert [keywords["cu_seqlens_q"].tolist() for keywords in calls] == [[0, 2, T]] * LAYERS


def test_positions_are_read_anew_in_each_forward_of_inference(readings, calls, device):
    """Inference tensors count no writes."""
    model, ids = build("Llama", device), tokens(device, batch=1)
    model.set_attn_implementation("ropewalk")
    with torch.inference_mode():
        positions = restarting(device).clone()
        model(ids, position_ids=positions)
        positions.copy_(torch.arange(T))
        model(ids, position_ids=positions)
    assert len(readings) == 2
    assert [keywords["layout"] for keywords in calls] == ["thd"] * LAYERS + ["bhtd"] * LAYERS


def test_copies_of_positions_keep_nothing(calls, device):
    model, ids = build("Llama", device), tokens(device, batch=1)
    model.set_attn_implementation("ropewalk")
    positions = torch.arange(T, device=device)[None].clone()
    model(ids, position_ids=positions)
    twin = copy.deepcopy(positions)
    twin.copy_(restarting(device))
    calls.clear()
    model(ids, position_ids=twin)
    model(ids, position_ids=positions)
    assert [keywords["layout"] for keywords in calls] == ["thd"] * LAYERS + ["bhtd"] * LAYERS


def test_numbers_of_documents_make_few_kinds_of_calls():
    """As the plans of calls are keyed by shapes; the last bounds repeat the end."""
    shapes = set()
    for count in range(2, 65):
        positions = restarting("cpu", lengths=[(1,) * (count - 1) + (65 - count,)])
        bounds = packing.find_documents(positions, 1).bounds
        assert bounds.dtype == torch.int32
        assert bounds[: count + 1].tolist() == [*range(count), 64]
        assert set(bounds[count:].tolist()) == {64}
        assert bounds.shape[0] - 1 <= 1.25 * count
        shapes.add(bounds.shape)
    assert len(shapes) < 20


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_flattening_collators_batch_as_it_comes(use_cache, calls, device):
    """TRL's padding_free and packing give the same fields."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    ids = tokens(device, batch=1)
    parts = ids.split(LENGTHS[0], dim=1)
    batch = collator([{"input_ids": part[0].tolist()} for part in parts])
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    given = batch["cu_seq_lens_q"]
    out = model(**batch, use_cache=use_cache)
    assert all(keywords["cu_seqlens_q"] is given for keywords in calls)
    assert torch.isfinite(out.loss)
    for part, actual in zip(parts, out.logits.split(LENGTHS[0], dim=1), strict=True):
        assert_close_to_truth(actual, *truth_and_baseline("Llama", device, part, None), ROUNDINGS)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_bounds_that_say_other_than_the_positions_are_refused(name, use_cache, device):
    model, ids = build("Llama", device), tokens(device, batch=1)
    model.set_attn_implementation("ropewalk")
    bounds = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, 4, 5, T], device=device))
    given = {"position_ids": restarting(device), "use_cache": use_cache}
    model(ids, **given, **bounds)
    bounds[name] = torch.tensor([0, 5, 5, 5, T], device=device)
    with pytest.raises(ValueError, match=f"{name} tells other documents apart than position_ids"):
        model(ids, **given, **bounds)


def test_bounds_beside_positions_that_go_on_are_taken(calls, device):
    model, ids = build("Llama", device), tokens(device, batch=1)
    model.set_attn_implementation("ropewalk")
    model(ids, cu_seq_lens_q=torch.tensor([0, 4, T], device=device))
    assert [keywords["cu_seqlens_q"].tolist() for keywords in calls] == [[0, 4, T]] * LAYERS


@pytest.mark.parametrize(
    "kind", ["left padding", "a chunk", "a late start", "a gap", "a step of 2", "a repeat", "three axes", "not causal"]
)
def test_other_positions_are_no_packed_rows(kind, calls, device):
    module = nn.Module()
    module.is_causal = kind != "not causal"
    q, k, v = heads(device, batch=1, queries=6, keys=9 if kind == "a chunk" else 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    mask = None
    if kind == "left padding":
        mask = torch.ones(1, 1, 1, 6, dtype=torch.uint8, device=device)
    elif kind == "a late start":
        positions = positions + 1
    elif kind == "a gap":
        positions = torch.tensor([[0, 1, 2, 7, 8, 9]], device=device)
    elif kind == "a step of 2":
        positions = torch.arange(0, 12, 2, device=device)[None]
    elif kind == "a repeat":
        positions = torch.tensor([[0, 1, 1, 1, 2, 3]], device=device)
    elif kind == "three axes":
        positions = positions.expand(3, 1, 6)
    door._attend(module, q, k, v, mask, position_ids=positions)
    assert [keywords["layout"] for keywords in calls] == ["bhtd"]


@pytest.mark.parametrize("kind", ["left", "right"])
def test_padding_is_no_packed_row_in_a_model(kind, calls, device):
    """Its positions restart too: 1, 1, 1, 0, 1, …"""
    mask = padding(kind, device)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    model = build("Llama", device)
    model.set_attn_implementation("ropewalk")
    for use_cache in (False, True):
        model(tokens(device), attention_mask=mask, position_ids=positions, use_cache=use_cache)
    assert {keywords["layout"] for keywords in calls} == {"bhtd"}


def test_a_late_start_without_a_cache_is_told_apart_as_by_transformers(device):
    positions = restarting(device, 2) + 3
    ids = tokens(device, batch=2)
    assert_agrees(
        "Llama",
        device,
        lambda model: logits_and_grads(model, "ropewalk", ids, None, position_ids=positions),
        ids=ids,
        position_ids=positions,
    )


def test_patterns_of_ones_own_keep_transformers_mask(device):
    masking = transformers.masking_utils
    if "cache_position" in inspect.signature(masking.create_causal_mask).parameters:
        pytest.skip("this transformers makes masks by other arguments")
    model, positions = build("Llama", device), restarting(device)
    model.set_attn_implementation("ropewalk")
    given = (model.config, torch.zeros(1, T, 64, device=device), None, None, positions)
    own = masking.create_causal_mask(*given, or_mask_function=lambda b, h, q, k: q == k + 1)
    assert own.dtype == torch.bool
    assert own.shape == (1, 1, T, T)
    assert masking.create_causal_mask(*given).dtype == torch.uint32


@pytest.mark.slow
def test_a_compiled_layer_takes_bounds_that_were_made_outside(device):
    torch._dynamo.reset()
    q, k, v = heads(device, batch=1)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    marker, module = bounds.view(torch.uint32)[None, None, None], nn.Module()
    compiled = torch.compile(lambda *given: door._attend(module, *given)[0], backend="aot_eager", fullgraph=True)
    q_, k_, v_ = (x[0].transpose(0, 1) for x in (q, k, v))
    expected = attention(q_, k_, v_, causal=True, cu_seqlens_q=bounds, layout="thd")
    torch.testing.assert_close(compiled(q, k, v, marker)[0], expected)


@pytest.mark.slow
def test_a_compiled_model_without_a_cache_tells_documents_apart(device):
    torch._dynamo.reset()
    model, ids, positions = build("Llama", device), tokens(device, batch=1), restarting(device)
    model.set_attn_implementation("ropewalk")
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        actual = compiled(ids, position_ids=positions, use_cache=False).logits
        with InDouble():
            truth = model.double()(ids, position_ids=positions, use_cache=False).logits
    assert actual.shape[-1] == VOCABULARY
    assert_close_to_truth(actual, truth, expected, ROUNDINGS)
