"""The Gluon kernels of attention where pairs of tokens that are far apart have another encoding: on a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.far_schemes import CAUSAL, SCHEMES, Jump
from helpers.hopper_calls import LENGTHS, TK, VARIANTS, check_supported, check_what_is_read, draw, on_hopper, pack
from helpers.ready_pairs import check_full_tiles, draw_pairs

from ropewalk import ReRope, Rope, SelfExtend

pytestmark = on_hopper


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request):
    return VARIANTS[request.param]


@pytest.mark.parametrize(
    ("scheme", "causal"), [*((name, False) for name in SCHEMES), *((name, True) for name in CAUSAL)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_scheme(kernels, device, scheme, head_dim, causal):
    check_supported(kernels, draw(device, head_dim=head_dim), position=SCHEMES[scheme], causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [1, 63, 64, 65, 127, 128, 129, 192, 332])
def test_windows_around_the_edges_of_tiles(kernels, device, window, head_dim, causal):
    tensors = draw(device, queries=333, head_dim=head_dim)
    check_supported(kernels, tensors, position=Jump(window, rope=Rope(attention_factor=1.2)), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 1500), (1500, 64), (1000, 1000), (513, 1025), (128, 129)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(kernels, device, head_dim, queries, keys, causal):
    tensors = draw(device, queries=queries, keys=keys, head_dim=head_dim)
    check_supported(kernels, tensors, position=Jump(100), causal=causal)


@pytest.mark.parametrize("dims", [(24, 40), (64, 128), (96, 96), (128, 64)], ids=str)
@pytest.mark.parametrize("scheme", [ReRope(70), SelfExtend(70, 4, rope=Rope(interleaved=True))], ids=str)
def test_head_dims(kernels, device, scheme, dims):
    tensors = draw(device, head_dim=dims[0], v_head_dim=dims[1])
    check_supported(kernels, tensors, position=scheme, causal=True)


@pytest.mark.parametrize("heads", [(6, 6), (6, 1)], ids=str)
def test_heads_share_keys(kernels, device, heads):
    check_supported(kernels, draw(device, heads=heads[0], key_heads=heads[1]), position=ReRope(70), causal=True)


def test_float16(kernels, device):
    check_supported(kernels, draw(device, torch.float16, head_dim=128), position=ReRope(70), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "call",
    [
        {"causal": True, "window": 150},
        {"window": 100},
        {"causal": True, "softcap": 3.0, "sinks": [0.3, -torch.inf, 4.0, -20.0]},
        {"key_lengths": [TK, 130], "key_starts": [0, 70]},
        {"causal": True, "key_starts": [0, 300], "key_lengths": [200, TK]},
        {"key_lengths": [0, 1]},
    ],
    ids=str,
)
def test_what_else_a_call_asks(kernels, device, head_dim, call):
    tensors = {name: torch.tensor(value, device=device) for name, value in call.items() if isinstance(value, list)}
    check_supported(kernels, draw(device, head_dim=head_dim), position=Jump(50), **(call | tensors))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scheme", [Jump(60), ReRope(60, rope=Rope(rotary_dim=24))], ids=["jump", "partial"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(kernels, device, lengths, scheme, head_dim, causal):
    tensors, starts = pack(device, *LENGTHS[lengths], head_dim=head_dim)
    check_supported(kernels, tensors, layout="thd", position=scheme, causal=causal, **starts)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_lies_outside_starts_and_lengths_is_not_read(kernels, device, head_dim):
    check_what_is_read(kernels, draw(device, queries=TK, head_dim=head_dim), Jump(50))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "v_head_dim"),
    [(torch.bfloat16, 64, 64), (torch.bfloat16, 128, 128), (torch.bfloat16, 96, 40), (torch.float16, 128, 128)],
    ids=str,
)
def test_ready_pairs(device, dtype, head_dim, v_head_dim, causal):
    tensors = draw_pairs(device, dtype, tokens=1000, head_dim=head_dim, v_head_dim=v_head_dim)
    check_full_tiles("gluon", tensors, causal, (1, 64, 65, 300, 999))
