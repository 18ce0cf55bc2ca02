"""`append_kv` beside the stores of vLLM and SGLang, as their semantics are in plain Python.

Both store keys that are rotated and rounded to their dtype by then; with a rotation by 0 the bits must be the same.
Shape letters: N tokens, K key heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from helpers.modes import needs_kernels

from ropewalk import append_kv, apply_rope, attention, inverse_frequencies, rope_table

N, K, D, PAGES, PAGE_SIZE = 11, 2, 32, 4, 16
FP8 = torch.float8_e4m3fn
IMPLS = ["reference", pytest.param("triton", marks=needs_kernels)]
STANDING = {"cos": torch.ones(1, D // 2), "sin": torch.zeros(1, D // 2)}


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """vLLM's: pages (pages, page_size, K, D) of any strides; one scale, or one a head, divides; slots below 0 skip.

    There may be fewer slots than tokens, as graphs are padded. fp8 ends at 448, in uint8 pages.
    """
    for index, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, key_cache.shape[1])
        for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            row = x[index]
            if kv_cache_dtype == "fp8":
                scaled = row.float() / scale.reshape(-1, 1)
                row = scaled.clamp(-448, 448).to(FP8).view(torch.uint8)
            cache[page, offset] = row


def set_kv_buffer(k_buffer, v_buffer, loc, cache_k, cache_v, k_scale, v_scale):
    """SGLang's: pools (slots, K, D), of uint8 for fp8; the division is in the tensors' dtype, without bounds."""
    for x, buffer, scale in ((cache_k, k_buffer, k_scale), (cache_v, v_buffer, v_scale)):
        if buffer.dtype == torch.uint8:
            x = (x / scale).to(FP8).view(torch.uint8)
        buffer[loc] = x


def make_kv_cache(layout, dtype, device):
    """Return vLLM's caches of keys and of values as its backends see them, over memory of either layout."""
    if layout == "NHD":
        return torch.zeros(2, PAGES, PAGE_SIZE, K, D, dtype=dtype, device=device).unbind(0)
    return torch.zeros(2, PAGES, K, PAGE_SIZE, D, dtype=dtype, device=device).transpose(2, 3).unbind(0)


def draw(dtype, device):
    """Return keys and values as a projection gives them: slices of one tensor, with some that fp8 cannot hold."""
    both = torch.randn(N, 2 * K * D, device=device).to(dtype) * 4
    both[3, 5], both[4, K * D] = 400.0, -900.0
    return (x.unflatten(-1, (K, D)) for x in both.split(K * D, -1))


def standing(device):
    """Return the keywords of a rotation by 0."""
    zeros = torch.zeros(N, dtype=torch.int64, device=device)
    return {name: x.to(device) for name, x in STANDING.items()} | {"positions": zeros}


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scales", ["none", "one", "heads"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_vllm(layout, scales, impl, device):
    for dtype in (torch.float16, torch.float32):
        key, value = draw(dtype, device)
        kind = "auto" if scales == "none" else "fp8"
        stored = dtype if scales == "none" else torch.uint8
        k_scale, v_scale = (torch.tensor(x, device=device) for x in (0.7, 0.3))
        if scales == "heads":
            k_scale, v_scale = (torch.rand(K, device=device) + 0.2 for _ in range(2))
        slots = torch.tensor([17, 3, -1, 63, 0, 40, -1, 18], device=device)  # 3 tokens pad a graph
        theirs, ours = make_kv_cache(layout, stored, device), make_kv_cache(layout, stored, device)
        reshape_and_cache_flash(key, value, *theirs, slots, kind, k_scale, v_scale)
        given = {} if scales == "none" else {"k_scale": k_scale, "v_scale": v_scale}
        caches = ours if scales == "none" else [x.view(FP8) for x in ours]
        append_kv(key, value, *caches, slots, **standing(device), **given, impl=impl)
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("stored", ["own", "fp8"])
def test_sglang(stored, impl, device):
    for dtype in (torch.float16, torch.float32):
        key, value = draw(dtype, device)
        key, value = (x.clamp(-100, 100) for x in (key, value))  # its cast would give NaN past 448
        k_scale, v_scale = (torch.tensor(x, device=device) for x in (0.7, 0.3))
        loc = torch.randperm(PAGES * PAGE_SIZE, device=device)[:N]
        theirs, ours = (
            torch.zeros(2, PAGES * PAGE_SIZE, K, D, dtype=dtype if stored == "own" else torch.uint8, device=device)
            for _ in range(2)
        )
        set_kv_buffer(*theirs, loc, key, value, k_scale, v_scale)
        given = {} if stored == "own" else {"k_scale": k_scale, "v_scale": v_scale}
        pages = [x.unsqueeze(1) if stored == "own" else x.view(FP8).unsqueeze(1) for x in ours]
        append_kv(key, value, *pages, loc, **standing(device), **given, impl=impl)
        if stored == "own" or dtype == torch.float32:
            assert torch.equal(ours, theirs)
        else:  # its quotient is rounded to 16 bits before fp8: a tie may go to the other neighbour
            steps = (ours.int() - theirs.int()).abs()
            assert steps.max() <= 1
            assert (steps != 0).float().mean() < 0.01


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_a_step_of_vllm(is_neox_style, impl, device):
    """Rotary embedding, store and attention over pages, as an engine's layer does them, by two calls of ours."""
    key, value = draw(torch.float32, device)
    query = torch.randn(N, 2 * K, D, device=device)
    cos_sin_cache = torch.cat(rope_table(64, inverse_frequencies("default", rotary_dim=D, base=100.0)[0]), -1)
    cos, sin = cos_sin_cache.to(device).chunk(2, dim=-1)
    cu_seqlens_q, seqused_k = torch.tensor([0, 4, 11], device=device), torch.tensor([20, 7], device=device)
    positions = torch.cat([torch.arange(16, 20), torch.arange(7)]).to(device)
    block_table = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32, device=device)
    row = torch.tensor([0] * 4 + [1] * 7, device=device)
    slots = block_table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    theirs, ours = make_kv_cache("NHD", torch.float32, device), make_kv_cache("NHD", torch.float32, device)
    for caches in (theirs, ours):  # the tokens that were there
        for cache, seed in zip(caches, (1, 2), strict=True):
            cache[2] = torch.randn(PAGE_SIZE, K, D, generator=torch.Generator().manual_seed(seed)).to(device)
    rotary = {"positions": positions, "interleaved": not is_neox_style}
    q, k = apply_rope(query, key, cos, sin, layout="thd", impl="reference", **rotary)
    reshape_and_cache_flash(k, value, *theirs, slots, "auto", None, None)
    rotated = append_kv(key, value, *ours, slots, cos=cos, sin=sin, q=query, impl=impl, **rotary)
    torch.testing.assert_close(rotated, q)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)
    where = {"layout": "thd", "cu_seqlens_q": cu_seqlens_q, "key_lengths": seqused_k, "block_table": block_table}
    out = attention(rotated, *ours, causal=True, impl=impl, **where)
    for start, stop, length, pages in ((0, 4, 20, [2, 1]), (4, 11, 7, [3, 0])):
        k, v = (x[pages].flatten(0, 1)[:length].double() for x in theirs)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].double(), k.repeat_interleave(2, 1)) * D**-0.5
        last = torch.arange(length - (stop - start), length, device=device)
        scores = scores.masked_fill(torch.arange(length, device=device) > last[:, None], -torch.inf)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
        torch.testing.assert_close(out[start:stop].double(), expected, rtol=1e-4, atol=1e-5)
