"""The Triton kernels of attention where far pairs have another encoding: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import attention_calls
from helpers.far_schemes import CAUSAL, SCHEMES, Jump
from helpers.kernel_checks import check, launch_backward
from helpers.modes import KERNEL_DTYPES, needs_kernels, on_gpu

from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import TRITON
from ropewalk.schemes import ReRope, Rope

pytestmark = needs_kernels

# The interpreter takes tiles of 32 queries and 16 keys.


def fixed(**keywords):
    return lambda device: keywords


def rows(**keywords):
    """Tensors of integers."""
    return lambda device: {name: torch.tensor(values, device=device) for name, values in keywords.items()}


def random_mask(*shape):
    return lambda device: {"mask": torch.rand(shape, device=device) > 0.6}


def both(*parts, **keywords):
    def make(device):
        for part in parts:
            keywords.update(part(device))
        return keywords

    return make


B, H, K, TQ, TK, D = 1, 2, 1, 37, 45, 16


@pytest.fixture(scope="module")
def kernels():
    return TRITON


draw = partial(attention_calls.draw, layout="bhtd", batch=B, queries=TQ, keys=TK, heads=H, key_heads=K)


def pack(device, lengths_q, lengths_k, dtype=torch.float32, head_dim=D, rest=3):
    """q, k and v of packed sequences, some rows that belong to none, and cu_seqlens."""
    shapes = [(sum(lengths_q) + rest, H), (sum(lengths_k) + 2 * rest, K), (sum(lengths_k) + 2 * rest, K)]
    starts = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths], device=device).cumsum(0).int()
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    return [torch.randn(*shape, head_dim, device=device).to(dtype) for shape in shapes], starts


@pytest.mark.parametrize(("scheme", "causal"), [*((name, False) for name in SCHEMES), *((x, True) for x in CAUSAL)])
def test_every_scheme(kernels, device, scheme, causal):
    check(kernels, draw(device), position=SCHEMES[scheme], causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 31, 32, 33, TQ - 1, TQ, TQ + 1])
def test_windows_around_the_edges_of_tiles_and_of_the_sequence(kernels, device, window, causal):
    check(kernels, draw(device, keys=TQ), position=Jump(window), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"), [(2, 2), (1, 50), (50, 3), (16, 16), (17, 31), (33, 15), (20, 64), (5, 0), (0, 5)]
)
def test_lengths_around_the_edges_of_tiles(kernels, device, queries, keys, causal):
    check(kernels, draw(device, queries=queries, keys=keys), position=Jump(7), causal=causal)


MASKS = {
    "window-below": fixed(window=5),
    "window-the-same": fixed(window=9),
    "window-above": fixed(window=20),
    "causal-window-below": fixed(window=5, causal=True),
    "causal-window-above": fixed(window=30, causal=True),
    "lengths": rows(key_lengths=[TK, 20]),
    "causal-lengths": both(rows(key_lengths=[30, 40]), causal=True),
    "no-keys": rows(key_lengths=[0, 1]),
    "starts": rows(key_starts=[17, 0]),
    "causal-starts": both(rows(key_starts=[TK, 33]), causal=True),
    "causal-starts-and-lengths": both(rows(key_starts=[3, 20], key_lengths=[19, TK]), causal=True),
    "query-starts": rows(query_starts=[0, 6]),
    "cache": both(rows(query_starts=[1, 7], key_lengths=[38, 44], key_starts=[3, 0]), causal=True, window=30),
    "mask": random_mask(TQ, TK),
    "causal-mask-per-head": both(random_mask(1, H, TQ, TK), causal=True),
    "mask-of-keys": random_mask(2, 1, 1, TK),
}


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(kernels, device, mask):
    check(kernels, draw(device, batch=2), position=Jump(9), **MASKS[mask](device))


@pytest.mark.parametrize(
    ("scheme", "mask"),
    [("rerope", "causal-starts"), ("rerope-log", "starts"), ("leaky-partial", "cache"), ("rerope-offset", "lengths")],
)
def test_schemes_that_differ_where_tokens_stand_elsewhere(kernels, device, scheme, mask):
    check(kernels, draw(device, batch=2), position=SCHEMES[scheme], **MASKS[mask](device))


CHANGES = {
    "softcap": fixed(softcap=1.5),
    "sinks": lambda device: {"sinks": torch.tensor([4.0, -1.0], device=device)},
    "dropout": fixed(dropout_p=0.3),
    "everything": lambda device: {"dropout_p": 0.1, "softcap": 3.0, "sinks": torch.tensor([0.3, -5.0], device=device)},
    "negative-scale": fixed(scale=-0.3),
}


@pytest.mark.parametrize(("change", "causal"), [*((name, name == "everything") for name in CHANGES), ("sinks", True)])
def test_scores_and_probabilities_that_change(kernels, device, change, causal):
    check(kernels, draw(device), position=Jump(9), causal=causal, **CHANGES[change](device))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2)], ids=str)
def test_heads_share_keys(kernels, device, heads):
    tensors = draw(device, keys=TQ, heads=heads[0], key_heads=heads[1])
    check(kernels, tensors, position=Jump(9), causal=heads[0] == 6)


@pytest.mark.parametrize("dims", [(16, 40), (40, 16), (24, 24), (192, 128), (136, 1)], ids=str)
def test_head_dims(kernels, device, dims):
    tensors = draw(device, head_dim=dims[0], v_head_dim=dims[1])
    check(kernels, tensors, position=Jump(9), causal=dims[0] == 16)
    if dims[0] == 24:  # interleaved pairs turn in a block that is wider than the head
        check(kernels, tensors, position=Jump(9, rope=Rope(interleaved=True)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", ["jump", "rerope-partial"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_dtype(kernels, device, dtype, scheme, causal):
    check(kernels, draw(device, dtype), position=SCHEMES[scheme], causal=causal)


def test_a_rotation_that_leaves_nothing_of_the_features_it_turns(kernels, device):
    """It cannot be undone; nor is there a gradient that it would be undone for."""
    for rope in (Rope(attention_factor=0.0), Rope(attention_factor=0.0, rotary_dim=8, interleaved=True)):
        check(kernels, draw(device, queries=20, keys=20), position=ReRope(5, leak=2.5, rope=rope))
        check(kernels, draw(device, queries=20, keys=20), position=ReRope(5, rope=rope), causal=True)


def test_any_strides(kernels, device):
    fused = torch.randn(B, TQ, H + 2 * K, D, device=device)
    q, k, v = (x.transpose(1, 2) for x in fused.split([H, K, K], dim=2))
    check(kernels, (q, k, v), position=ReRope(9), causal=True)
    features_apart = [x.mT.contiguous().mT for x in (q, k, v)]
    check(kernels, features_apart, position=ReRope(9))
    check(kernels, (q, k[..., :1].expand_as(k), v[:, :, :1].expand_as(v)), position=ReRope(9))


# Packed sequences


LENGTHS = {
    "equal": ([33, 5, 1, 16], [33, 5, 1, 16]),
    "different": ([5, 0, 33, 1, 0, 3], [9, 4, 40, 1, 0, 17]),
    "empty": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize(
    ("lengths", "scheme", "keywords"),
    [
        ("equal", "jump", {"causal": True}),
        ("equal", "rerope-log", {}),
        ("equal", "leaky-partial", {}),
        ("different", "jump", {}),
        ("different", "rerope", {"causal": True}),
        ("different", "rerope-partial", {"causal": True, "softcap": 2.0}),
        ("different", "jump", {"window": 14, "dropout_p": 0.2}),
        ("empty", "jump", {}),
    ],
    ids=str,
)
def test_packed_sequences(kernels, device, lengths, scheme, keywords):
    tensors, starts = pack(device, *LENGTHS[lengths])
    check(kernels, tensors, layout="thd", position=SCHEMES[scheme], **starts, **keywords)


def test_sequences_see_nothing_of_each_other(kernels, device):
    """NaN in one sequence, and in what belongs to none, stays there: in values and in all gradients."""
    tensors, starts = pack(device, *LENGTHS["different"])
    call = make_call(*tensors, layout="thd", position=Jump(3), **starts)
    spoilt = 2
    rows_q, rows_k = (slice(*bounds.tolist()[spoilt : spoilt + 2]) for bounds in starts.values())
    grad_out = torch.randn_like(tensors[0])

    def run():
        out, saved = kernels.forward(call, True)
        grads = launch_backward(kernels, call, out, saved, grad_out.transpose(0, 1)[None])[:3]
        return [x[0].transpose(0, 1) for x in (out, *grads)]

    expected = run()
    for x, of_sequence in zip((*tensors, grad_out), (rows_q, rows_k, rows_k, rows_q), strict=True):
        x[of_sequence] = torch.nan
        x[-3:] = torch.nan
    spoiled = run()
    for mine, clean, of_sequence in zip(spoiled, expected, (rows_q, rows_q, rows_k, rows_k), strict=True):
        mine[of_sequence] = clean[of_sequence] = 0
        rest = 3 if of_sequence is rows_q else 6
        assert torch.equal(mine[:-rest], clean[:-rest])


def test_what_lies_outside_starts_and_lengths_is_not_read(kernels, device):
    q, k, v = draw(device, batch=2)
    bounds = {"key_starts": torch.tensor([0, 9], device=device), "key_lengths": torch.tensor([TK, 40], device=device)}
    call = make_call(q, k, v, position=Jump(5), layout="bhtd", **bounds)
    k[1, :, 40:] = v[1, :, 40:] = k[1, :, :9] = v[1, :, :9] = torch.nan
    out, saved = kernels.forward(call, True)
    grads = launch_backward(kernels, call, out, saved, torch.randn_like(q))[:3]
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    for grad in grads[1:]:
        assert not grad[1, :, 40:].any()
        assert not grad[1, :, :9].any()
        assert grad[1, :, 9:40].any()


def test_the_same_bits_every_time(kernels, device):
    q, k, v = draw(device)
    call = make_call(q, k, v, position=Jump(9), layout="bhtd")
    grad_out = torch.randn_like(q)
    runs = []
    for _ in range(2):
        out, saved = kernels.forward(call, True)
        runs.append((out, saved.lse, *launch_backward(kernels, call, out, saved, grad_out)[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# Positions of the callers


@pytest.mark.parametrize("causal", [False, True])
def test_positions_that_count_the_tokens_change_nothing(kernels, device, causal):
    tensors = draw(device)
    grad_out = torch.randn_like(tensors[0])
    of_queries = torch.arange(TK - TQ, TK, device=device)[None]
    of_keys = torch.arange(TK, device=device)[None]

    def run(**positions):
        call = make_call(*tensors, position=Jump(9), causal=causal, layout="bhtd", **positions)
        out, saved = kernels.forward(call, True)
        return out, saved.lse, *launch_backward(kernels, call, out, saved, grad_out)[:3]

    expected = run()
    for positions in (
        {"positions_q": of_queries, "positions_k": of_keys},
        {"positions_q": of_queries + 10**9, "positions_k": of_keys.int() + 10**9},
    ):
        for mine, theirs in zip(run(**positions), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


POSITIONED = {
    "both": ("jump", "qk", {}),
    "both-causal": ("jump", "qk", {"causal": True}),
    "queries": ("jump", "q", {}),
    "keys-causal": ("jump", "k", {"causal": True}),
    "rerope": ("rerope-log", "qk", {}),
    "leaky-causal": ("leaky", "qk", {"causal": True}),
    "extend": ("extend-factor", "q", {"causal": True}),
    "partial": ("rerope-partial", "qk", {}),
    "window": ("jump", "qk", {"window": 20}),
}


@pytest.mark.parametrize("kind", POSITIONED)
def test_far_goes_by_position_and_causal_by_index(kernels, device, kind):
    """Positions are shuffled and repeated: causal queries meet keys whose position is ahead."""
    scheme, given, keywords = POSITIONED[kind]
    positions = {"q": torch.randint(0, 40, (1, TQ), device=device), "k": torch.randint(0, 40, (B, TK), device=device)}
    positions = {f"positions_{name}": positions[name] for name in given}
    check(kernels, draw(device), position=SCHEMES[scheme], **positions, **keywords)


def test_positions_of_every_kind(kernels, device):
    tensors = draw(device, queries=20, keys=20, batch=2)
    positions = torch.randint(-50, 50, (20, 2), device=device).mT  # below 0 too, and not dense
    starts = torch.tensor([0, 7], device=device)
    check(kernels, tensors, position=Jump(9), positions_q=positions.int(), key_starts=starts)
    check(kernels, tensors, position=Jump(9), positions_k=positions + 2**40, positions_q=positions + 2**40)
    check(kernels, tensors, position=Jump(30), positions_k=positions)  # longer than the sequence: some are far


def test_packed_positions_are_the_callers(kernels, device):
    tensors, starts = pack(device, *LENGTHS["different"])
    positions = {
        name: torch.randint(0, 40, (x.shape[0],), device=device)
        for name, x in zip(("positions_q", "positions_k"), tensors, strict=False)
    }
    check(kernels, tensors, layout="thd", position=Jump(9), causal=True, **starts, **positions)
    del positions["positions_q"]
    check(kernels, tensors, layout="thd", position=Jump(9), **starts, **positions)


# Tiles of full size


@on_gpu
@pytest.mark.parametrize(
    ("scheme", "head_dim", "dtype"),
    [
        (ReRope(300), 64, torch.bfloat16),
        (ReRope(300), 128, torch.bfloat16),
        (ReRope(300), 128, torch.float16),
        (ReRope(300), 256, torch.bfloat16),
        (ReRope(300), 64, torch.float32),
        (ReRope(300, rope=Rope(rotary_dim=32)), 64, torch.float16),
    ],
    ids=str,
)
def test_every_configuration_of_causal_attention(kernels, device, scheme, head_dim, dtype):
    tensors = draw(device, dtype, queries=1000, keys=1100, head_dim=head_dim)
    check(kernels, tensors, position=scheme, causal=True)


@on_gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (256, torch.float16), (128, torch.float32)], ids=str
)
def test_every_configuration_of_full_attention(kernels, device, head_dim, dtype):
    tensors = draw(device, dtype, queries=1100, keys=1000, head_dim=head_dim)
    check(kernels, tensors, position=ReRope(300, leak=4.0, log_n=512))


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_windows_around_the_edges_of_full_tiles(kernels, device, causal):
    for queries, keys in ((1025, 1025), (129, 1000)):
        tensors = draw(device, torch.bfloat16, queries=queries, keys=keys, head_dim=64)
        for window in (1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 512, keys - 1, keys):
            check(kernels, tensors, position=Jump(window), causal=causal)


@on_gpu
def test_packed_sequences_and_positions_of_full_tiles(kernels, device):
    lengths = [300, 64, 65, 0, 1, 129]
    tensors, starts = pack(device, lengths, lengths[::-1], torch.bfloat16, 64)
    check(kernels, tensors, layout="thd", position=Jump(50), causal=True, **starts)
    tensors = draw(device, torch.bfloat16, queries=1000, keys=1100, head_dim=64)
    positions = torch.randint(0, 1000, (1, 1100), device=device)
    check(kernels, tensors, position=Jump(100), positions_q=positions[:, :1000], positions_k=positions, causal=True)
