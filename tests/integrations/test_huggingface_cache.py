"""transformers' caches: taken in pieces by our attention, cropped and reordered, and moved into pages and back."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers.huggingface_models import GROUPED, ROUNDINGS, B, T, build, tokens, transformers, truth_and_baseline

from ropewalk import append_kv, attention
from ropewalk.integrations import huggingface
from ropewalk.testing import assert_close_to_truth

PIECES = ((0, 3), (3, 10), (10, 11), (11, T))
CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=T + 4),
}


@pytest.fixture(autouse=True)
def registered():
    huggingface.register()


def run(model, ids, cache, pieces=PIECES):
    """The logits of a model that takes tokens in pieces."""
    model.set_attn_implementation("ropewalk")
    with torch.no_grad():
        logits = [model(ids[:, start:end], past_key_values=cache, use_cache=True).logits for start, end in pieces]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_every_cache_takes_its_tokens_in_pieces(name, kind, device):
    model, ids = build(name, device), tokens(device)
    truth, baseline = truth_and_baseline(name, device, ids, None)
    assert_close_to_truth(run(model, ids, CACHES[kind](model.config)), truth, baseline, ROUNDINGS)


def test_a_cache_is_cropped_and_reordered(device):
    """As assisted generation takes tokens back, and beam search exchanges rows."""
    model, ids = build("Llama", device), tokens(device)
    cache = transformers.DynamicCache(config=model.config)
    run(model, ids, cache, ((0, 11),))
    order = torch.tensor([2, 0, 1], device=device)
    cache.crop(-3)  # of 11
    cache.reorder_cache(order)
    truth, baseline = (x[order, 8:] for x in truth_and_baseline("Llama", device, ids, None))
    assert_close_to_truth(run(model, ids[order], cache, ((8, 9), (9, T))), truth, baseline, ROUNDINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_cache_moves_into_pages_and_back(dtype, device):
    """Keys of a DynamicCache are rotated: `append_kv` writes them by a rotation of 0, and attention reads them."""
    page_size, heads, dim = 4, GROUPED["num_key_value_heads"], GROUPED["head_dim"]
    model, ids = build("Llama", device), tokens(device)
    cache = transformers.DynamicCache(config=model.config)
    run(model, ids, cache)
    keys, values = cache.layers[0].keys, cache.layers[0].values  # (B, K, T, D)
    n_pages = -(-T // page_size)
    table = torch.randperm(B * n_pages, device=device).view(B, n_pages)
    index = torch.arange(T, device=device)
    slots = (table[:, index // page_size] * page_size + index % page_size).flatten()
    pages = torch.zeros(2, B * n_pages, page_size, heads, dim, dtype=dtype, device=device)
    scales = {}
    if dtype == torch.int8:
        k_scale, v_scale = torch.zeros(2, B * n_pages, page_size, heads, device=device)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    tables = {"cos": torch.ones(1, dim // 2, device=device), "sin": torch.zeros(1, dim // 2, device=device)}
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
    append_kv(k, v, *pages, slots, positions=torch.zeros(B * T, dtype=torch.int64, device=device), **tables, **scales)
    q = torch.randn(B, 1, 4, dim, device=device)
    where = {"block_table": table, "key_lengths": torch.full((B,), T, device=device)}
    paged = attention(q, *pages, **where, **scales)
    if dtype == torch.float32:
        back = (x[table].flatten(1, 2)[:, :T].transpose(1, 2) for x in pages)
        assert all(map(torch.equal, back, (keys, values)))
    else:
        steps = (scale[table].flatten(1, 2)[:, :T].transpose(1, 2)[..., None] for scale in scales.values())
        numbers = (x[table].flatten(1, 2)[:, :T].transpose(1, 2).float() for x in pages)
        keys, values = (number * step for number, step in zip(numbers, steps, strict=True))
    expected = attention(q.transpose(1, 2), keys, values, layout="bhtd").transpose(1, 2)
    torch.testing.assert_close(paged, expected)


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("optimum", "hqq")),
    reason="transformers' QuantizedCache needs optimum-quanto or hqq",
)
def test_a_quantised_cache_generates(device):
    backend = "hqq" if importlib.util.find_spec("hqq") else "quanto"
    model, ids = build("Llama", device), tokens(device)
    config = {"backend": backend, "nbits": 4, "q_group_size": 16, "residual_length": 4}
    generated = []
    for implementation in ("eager", "ropewalk"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "quantized", "cache_config": config}
        generated.append(model.generate(ids, **options))
    assert torch.equal(*generated)
