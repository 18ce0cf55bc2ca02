"""The rotation's values, over head dims, dtypes, pairings, directions, head counts, partial rotary and layouts."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.rope_definition import (
    DTYPES,
    assert_rounded_once,
    check_in_place,
    check_out_of_place,
    check_rotation,
    random_tables,
    random_tensor,
    rotate,
    skip_bfloat16_in_interpreter,
)

from ropewalk.testing import assert_close_to_truth

HEAD_DIMS = (2, 8, 16, 40, 64, 80, 96, 128, 192, 256, 512)
# Head dim, rotary dim, offset: at the front, at the tail, in the middle, at odd places, a single pair.
PARTIAL = (
    (8, 4, 0),
    (8, 4, 4),
    (8, 4, 2),
    (16, 2, 13),
    (40, 10, 7),
    (80, 32, 48),
    (96, 24, 0),
    (128, 64, 32),
    (9, 6, 1),
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_dtype_and_pairing(impl, device, head_dim, dtype, interleaved):
    q = random_tensor(2, 2, 3, head_dim, dtype=dtype, device=device)
    k = random_tensor(2, 2, 1, head_dim, dtype=dtype, device=device)
    cos, sin = random_tables(5, head_dim // 2, device=device)
    check_out_of_place(q, k, cos, sin, impl=impl, interleaved=interleaved)
    check_in_place(q, k, cos, sin, impl=impl, interleaved=interleaved, inverse=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_float32_and_rounded_once(impl, device, dtype, interleaved):
    skip_bfloat16_in_interpreter(impl, device, dtype)
    q = random_tensor(1, 9, 4, 64, dtype=dtype, device=device)
    cos, sin = random_tables(9, 32, device=device)
    for inverse in (False, True):
        (result,) = rotate(q, None, cos, sin, impl=impl, interleaved=interleaved, inverse=inverse)
        assert_rounded_once(result, q, cos, sin, interleaved=interleaved, inverse=inverse)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "rotary_offset"), PARTIAL)
def test_partial_rotary(impl, device, head_dim, rotary_dim, rotary_offset, interleaved, inverse):
    q, k = (random_tensor(2, 4, heads, head_dim, dtype=torch.float16, device=device) for heads in (2, 3))
    cos, sin = random_tables(4, rotary_dim // 2, device=device)
    flags = {"interleaved": interleaved, "inverse": inverse, "rotary_dim": rotary_dim, "rotary_offset": rotary_offset}
    check_rotation(q, k, cos, sin, impl=impl, **flags)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_partial_rotary_in_other_dtypes(impl, device, dtype):
    skip_bfloat16_in_interpreter(impl, device, dtype)
    q, k = (random_tensor(2, 4, heads, 24, dtype=dtype, device=device) for heads in (2, 3))
    cos, sin = random_tables(4, 5, device=device)
    check_rotation(q, k, cos, sin, impl=impl, rotary_offset=6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_that_pass_through_keep_every_bit(impl, device, dtype, interleaved):
    skip_bfloat16_in_interpreter(impl, device, dtype)
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-40, torch.finfo(dtype).max], dtype=dtype)
    x = torch.cat((special, torch.ones(4, dtype=dtype), special)).to(device).expand(1, 2, 3, 16).contiguous()
    cos, sin = random_tables(2, 2, device=device)
    (result,) = rotate(x, None, cos, sin, impl=impl, interleaved=interleaved, rotary_offset=6)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for features in (slice(0, 6), slice(10, 16)):
        assert torch.equal(result[..., features].view(bits), x[..., features].view(bits))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_pair(impl, device, bad, interleaved):
    x = random_tensor(1, 3, 2, 8, device=device)
    cos, sin = random_tables(3, 4, device=device)
    (clean,) = rotate(x, None, cos, sin, impl=impl, interleaved=interleaved)
    pair = [2, 3] if interleaved else [1, 5]
    x[0, 1, 0, pair[0]] = bad
    (result,) = rotate(x, None, cos, sin, impl=impl, interleaved=interleaved)
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[0, 1, 0, pair] = True
    assert not result[hit].isfinite().any()
    assert torch.equal(result[~hit], clean[~hit])


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize(
    ("n_q_heads", "n_k_heads"), [(4, 4), (6, 2), (5, 1), (1, 5), (3, 4), (9, 2), (3, None), (2, 0)]
)
def test_head_counts(impl, device, n_q_heads, n_k_heads, layout):
    def make(heads):
        shape = {"bthd": (2, 3, heads, 8), "bhtd": (2, heads, 3, 8), "thd": (6, heads, 8)}[layout]
        return random_tensor(*shape, device=device)

    packed = {"cu_seqlens": torch.tensor([0, 2, 6], device=device)} if layout == "thd" else {}
    cos, sin = random_tables(4, 4, device=device)
    k = None if n_k_heads is None else make(n_k_heads)
    check_rotation(make(n_q_heads), k, cos, sin, impl=impl, layout=layout, **packed)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 0), (0, 3), (1, 1), (3, 1), (2, 7), (1, 9), (3, 2)])
def test_lengths(impl, device, batch, tokens, layout):
    make = {"bthd": lambda h: (batch, tokens, h, 8), "bhtd": lambda h: (batch, h, tokens, 8)}[layout]
    q, k = (random_tensor(*make(heads), device=device) for heads in (2, 1))
    cos, sin = random_tables(9, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout=layout)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "ends",
    [
        [0, 5],
        [0, 1, 5],
        [0, 0, 0, 5],
        [0, 5, 5, 5],
        [0, 2, 2, 2, 5, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 3, 4, 9],
        [0, 0],
        [0, 0, 0, 0],
        [0],
        [0, 1],
    ],
    ids=str,
)
def test_packed_sequences(impl, device, ends, index_dtype):
    q, k = (random_tensor(ends[-1], heads, 8, device=device) for heads in (3, 2))
    cos, sin = random_tables(9, 4, device=device)
    cu_seqlens = torch.tensor(ends, dtype=index_dtype, device=device)
    check_out_of_place(q, k, cos, sin, impl=impl, layout="thd", cu_seqlens=cu_seqlens)
    check_in_place(q, k, cos, sin, impl=impl, layout="thd", cu_seqlens=cu_seqlens, interleaved=True, inverse=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_first_middle_and_last_token_by_hand(impl, device, interleaved, inverse):
    tokens, head_dim = 9, 6
    x = random_tensor(1, tokens, 2, head_dim, dtype=torch.float64, device=device)
    angles = [[t * 100.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)] for t in range(tokens)]
    cos = torch.tensor([[math.cos(a) for a in row] for row in angles], dtype=torch.float64, device=device)
    sin = torch.tensor([[math.sin(a) for a in row] for row in angles], dtype=torch.float64, device=device)
    (result,) = rotate(x, None, cos, sin, impl=impl, interleaved=interleaved, inverse=inverse)
    for t in (0, tokens // 2, tokens - 1):
        for h in range(2):
            row = x[0, t, h].tolist()
            expected = [0.0] * head_dim
            for i in range(head_dim // 2):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + head_dim // 2)
                turn = -angles[t][i] if inverse else angles[t][i]
                expected[first] = row[first] * math.cos(turn) - row[second] * math.sin(turn)
                expected[second] = row[first] * math.sin(turn) + row[second] * math.cos(turn)
            truth = torch.tensor(expected, dtype=torch.float64)
            assert_close_to_truth(result[0, t, h].cpu(), truth, truth)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_of_the_tables(impl, device, dtype, table_dtype, interleaved):
    q, k = (random_tensor(2, 3, heads, 16, dtype=dtype, device=device) for heads in (2, 1))
    cos, sin = random_tables(4, 8, dtype=table_dtype, device=device)
    check_out_of_place(q, k, cos, sin, impl=impl, interleaved=interleaved)


def test_default_implementation_is_one_of_them(device):
    q, k = (random_tensor(2, 3, heads, 16, device=device) for heads in (2, 1))
    cos, sin = random_tables(4, 8, device=device)
    check_rotation(q, k, cos, sin, impl=None)
