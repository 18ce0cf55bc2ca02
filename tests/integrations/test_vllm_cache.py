"""`append_kv` against what vLLM's reshape_and_cache means, in plain PyTorch: its layouts, slots and float8 scales.

Written from the operator's description: `key_cache[block, offset] = key / k_scale`, slots below 0 are padding, and
there may be fewer slots than tokens.
"""

from __future__ import annotations

import pytest
import torch

from ropewalk import append_kv, inverse_frequencies, rope_table, rotary_embedding

BLOCKS, BLOCK, K, H, D = 6, 16, 2, 4, 64


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale):
    """Write caches (blocks, block size, heads, D), of key's dtype or float8_e4m3fn."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            if cache.dtype == torch.float8_e4m3fn:
                number = (x[token].float() / scale.float()).clamp(-448, 448).to(cache.dtype)
                cache.view(torch.uint8)[slot // BLOCK, slot % BLOCK] = number.view(torch.uint8)
            else:
                cache[slot // BLOCK, slot % BLOCK] = x[token]


def allocate(layout, dtype):
    """Return K and V of one allocation, as vLLM's FlashAttention backend views them: (2, blocks, block, heads, D)."""
    if layout == "NHD":
        memory = torch.zeros(2, BLOCKS, BLOCK, K, D, dtype=torch.float32).to(dtype)
        return memory[0], memory[1]
    memory = torch.zeros(2, BLOCKS, K, BLOCK, D, dtype=torch.float32).to(dtype)
    return memory[0].transpose(1, 2), memory[1].transpose(1, 2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_write_stores_what_vllms_two_operators_store(layout, dtype, is_neox):
    torch.manual_seed(0)
    own = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    tokens = 10
    qkv = torch.randn(tokens, (H + 2 * K) * D).to(own)
    q, k, v = qkv.split([H * D, K * D, K * D], dim=-1)
    cos_sin = torch.cat(rope_table(64, inverse_frequencies("default", rotary_dim=D, base=10000.0)[0]), dim=-1)
    positions = torch.randint(0, 64, (tokens,))
    slots = torch.randperm(BLOCKS * BLOCK)[:8]  # two tokens pad the graph
    slots[5] = -1
    scales = torch.tensor(0.05), torch.tensor(0.02)

    expected_q, expected_k = q.clone(), k.clone()
    rotary_embedding(positions, expected_q, expected_k, D, cos_sin, is_neox)
    key_cache, value_cache = allocate(layout, dtype)
    reshape_and_cache(expected_k.unflatten(-1, (K, D)), v.unflatten(-1, (K, D)), key_cache, value_cache, slots, *scales)

    k_cache, v_cache = allocate(layout, dtype)
    cos, sin = cos_sin.chunk(2, dim=-1)
    given = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if dtype == torch.float8_e4m3fn else {}
    heads = (x.unflatten(-1, (-1, D)) for x in (k, v))
    rotated = append_kv(
        *heads,
        k_cache,
        v_cache,
        slots,
        cos=cos,
        sin=sin,
        q=q.unflatten(-1, (H, D)),
        positions=positions,
        interleaved=not is_neox,
        **given,
    )
    # In float32 the two rotations add in another order.
    slack = {"rtol": 1e-6, "atol": 1e-6} if own == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(rotated.flatten(1), expected_q, **slack)
    for cache, expected in ((k_cache, key_cache), (v_cache, value_cache)):
        torch.testing.assert_close(cache.float(), expected.float(), **slack)


def test_sglangs_pool_is_pages_of_one_token():
    torch.manual_seed(0)
    pool_k, pool_v = torch.zeros(2, 40, K, D)
    k, v = torch.randn(2, 5, K, D)
    cos, sin = torch.ones(5, D // 2), torch.zeros(5, D // 2)
    out_cache_loc = torch.tensor([3, 39, 7, 0, 21])
    append_kv(k, v, pool_k.unsqueeze(1), pool_v.unsqueeze(1), out_cache_loc, cos=cos, sin=sin)
    assert torch.equal(pool_k[out_cache_loc], k)
    assert torch.equal(pool_v[out_cache_loc], v)
    assert int((pool_k.abs().sum((1, 2)) > 0).sum()) == 5
