"""The Triton kernels of attention against the reference in float64: in Triton's interpreter, or on a GPU."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from helpers import attention_calls
from helpers.kernel_checks import check, launch_backward
from helpers.modes import KERNEL_DTYPES, needs_kernels, on_gpu

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import REFERENCE, TRITON
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, Rope, Rotation
from ropewalk.testing import assert_close_to_truth

pytestmark = needs_kernels

SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-interleaved": Rope(interleaved=True, attention_factor=1.1),
    "rope-partial": Rope(rotary_dim=8),
    "rope-partial-interleaved": Rope(rotary_dim=8, interleaved=True),
    "rope-blocks": Rope(rotary_dim=12, rotary_offset=2, pair_block=6),
    "alibi": Alibi(),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
}


def lengths(*numbers):
    return lambda device: {"key_lengths": torch.tensor(numbers, device=device)}


def random_mask(*shape):
    return lambda device: {"mask": torch.rand(shape, device=device) > 0.6}


def fixed(**keywords):
    return lambda device: keywords


Q, K, B, H, HK = 45, 37, 2, 2, 1
MASKS = {
    "full": fixed(),
    "causal": fixed(causal=True),
    "window": fixed(window=9),
    "causal-window": fixed(window=20, causal=True),
    "window-of-one": fixed(window=1),
    "window-left": fixed(window=(20, 3)),
    "window-right": fixed(window=(2, 18)),
    "window-ahead": fixed(window=(4, -1)),
    "window-behind": fixed(window=(-1, 5)),
    "before-the-keys": lambda device: {"causal": True, "query_starts": torch.tensor([-21, -8], device=device)},
    "before-the-window": lambda device: {"window": (3, 9), "query_starts": torch.tensor([-30, -17], device=device)},
    "lengths": lengths(K, 20),
    "no-keys": lengths(0, 1),
    "mask": random_mask(Q, K),
    "mask-per-batch": random_mask(B, Q, K),
    "mask-per-head": random_mask(1, H, Q, K),
    "mask-of-keys": random_mask(B, 1, 1, K),
    "everything": lambda device: {
        "causal": True,
        "window": 20,
        **lengths(K, 20)(device),
        **random_mask(B, H, Q, K)(device),
    },
}


@pytest.fixture(scope="module")
def kernels():
    return TRITON


draw = partial(attention_calls.draw, layout="bhtd", batch=B, queries=Q, keys=K, heads=H, key_heads=HK)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_under_every_mask(kernels, device, scheme, mask):
    check(kernels, draw(device), position=SCHEMES[scheme], **MASKS[mask](device))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64])
@pytest.mark.parametrize("scheme", ["none", "rope", "rope-interleaved", "exposb-decay"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_dtype_and_head_dim(kernels, device, dtype, scheme, head_dim, causal):
    check(kernels, draw(device, dtype, queries=21, keys=19, head_dim=head_dim), position=SCHEMES[scheme], causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 50), (50, 1), (16, 16), (17, 31), (32, 33), (33, 15), (60, 10), (5, 0), (0, 5)],
)
def test_lengths_around_the_edges_of_tiles(kernels, device, queries, keys, causal):
    for window in (None, 8, (3, 11)):
        check(kernels, draw(device, queries=queries, keys=keys), position=Rope(), causal=causal, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 1)], ids=str)
def test_heads_share_keys(kernels, device, heads):
    check(kernels, draw(device, heads=heads[0], key_heads=heads[1]), position=Alibi(), causal=True)


@pytest.mark.parametrize(
    # ALiBi's scores grow with the distance, and with them what float32 rounds off: far ones would test nothing else.
    ("scheme", "dtype", "end"),
    [("rope", torch.int64, 10**4), ("alibi", torch.int32, 200), ("exposb-decay", torch.int64, 10**4)],
)
def test_positions_are_the_callers(kernels, device, scheme, dtype, end):
    tensors = draw(device)
    positions_q = torch.randint(0, end, (B, Q), device=device).to(dtype)
    positions_k = torch.randint(0, end, (1, K), device=device).to(dtype)
    for positions in (
        {"positions_q": positions_q},
        {"positions_k": positions_k},
        {"positions_q": positions_q[:1].expand(B, Q), "positions_k": positions_k},
    ):
        check(kernels, tensors, position=SCHEMES[scheme], causal=True, **positions)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
@pytest.mark.parametrize("scheme", ["none", "alibi"])
def test_any_scale(kernels, device, scheme, scale):
    check(kernels, draw(device), position=SCHEMES[scheme], scale=scale)


def test_any_strides(kernels, device):
    fused = torch.randn(B, Q, H + 2 * HK, 16, device=device)
    q, k, v = (x.transpose(1, 2) for x in fused.split([H, HK, HK], dim=2))
    check(kernels, (q, k, v), position=Rope(), causal=True)
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]  # features are not dense
    check(kernels, transposed, position=Rope(), causal=True)


@dataclass(frozen=True, eq=False)
class Scattered(Rope):
    """Rope whose tables are not dense, and lie differently."""

    def rotation(self, positions, head_dim):
        cos, sin, *rest = super().rotation(positions, head_dim)
        return Rotation(cos.mT.contiguous().mT, torch.stack((sin, sin), -1)[..., 0], *rest)


def test_any_strides_of_what_comes_with_them(kernels, device):
    tensors = draw(device)
    lengths = torch.tensor([K, 0, 20, 0], device=device)[::2]
    slopes = torch.tensor([0.5, 9.0, 0.1], device=device)[::2]
    check(kernels, tensors, position=Alibi(slopes), key_lengths=lengths)
    check(kernels, tensors, position=Alibi(torch.rand(H, B, device=device).mT), causal=True)
    check(kernels, tensors, position=Scattered(), key_lengths=lengths)
    positions = torch.randint(0, 100, (Q, B), device=device).mT
    check(kernels, tensors, position=Alibi(slopes), positions_q=positions)


def test_the_same_bits_every_time(kernels, device):
    tensors = draw(device)
    call = make_call(*tensors, position=Rope(), causal=True, layout="bhtd")
    grad_out = torch.randn_like(tensors[0])
    runs = []
    for _ in range(2):
        out, saved = kernels.forward(call, True)
        runs.append((out, saved.lse, *launch_backward(kernels, call, out, saved, grad_out)[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_rows_that_attend_nothing_are_zero_and_give_nothing_back(kernels, device):
    tensors = draw(device)
    mask = torch.ones(Q, K, dtype=torch.bool, device=device)
    mask[3:7] = False
    out, lse, grads = check(kernels, tensors, position=Rope(), mask=mask)
    assert torch.equal(out[:, :, 3:7], torch.zeros_like(out[:, :, 3:7]))
    assert bool((lse[:, :, 3:7] == -math.inf).all())
    assert torch.equal(grads[0][:, :, 3:7], torch.zeros_like(out[:, :, 3:7]))
    # Not even what must not be: a log-sum-exp of −inf has whatever gradient its user's formula gives it.
    call = make_call(*tensors, position=Rope(), mask=mask, layout="bhtd")
    out, saved = kernels.forward(call, True)
    grad_out, grad_lse = torch.randn_like(out), torch.zeros_like(lse)
    expected = launch_backward(kernels, call, out, saved, grad_out, grad_lse)[:3]
    grads = launch_backward(kernels, call, out, saved, grad_out, grad_lse.masked_fill(lse.isinf(), math.nan))[:3]
    assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))


def test_what_lies_past_the_lengths_is_not_read(kernels, device):
    q, k, v = draw(device)
    k[1, :, 20:] = v[1, :, 20:] = torch.nan
    call = make_call(q, k, v, position=Rope(), key_lengths=torch.tensor([K, 20], device=device), layout="bhtd")
    out, saved = kernels.forward(call, True)
    grads = launch_backward(kernels, call, out, saved, torch.randn_like(q))[:3]
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert not grads[1][1, :, 20:].any()
    assert not grads[2][1, :, 20:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen_where_the_definition_has_it(kernels, device, which, causal):
    """A row whose sum is NaN attends, and must not pass for one that attends nothing."""
    tensors = draw(device, keys=Q)
    tensors[which][0, 0, 17, 3] = torch.nan
    call = make_call(*tensors, position=Rope(), causal=causal, layout="bhtd")
    expected = reference.attend(call)
    out, saved = kernels.forward(call, True)
    assert torch.equal(out.isnan(), expected[0].isnan())
    assert torch.equal(saved.lse.isnan(), expected[1].isnan())
    grads = launch_backward(kernels, call, out, saved, torch.ones_like(out))[:3]
    assert bool(grads[0][0, 0, 17].isnan().all())
    assert not grads[0][1].isnan().any()  # the other batch row


def test_gradients_are_those_that_differences_show(kernels, device):
    """Along a random direction, no derivation asked: as near as differences of the float32 reference are."""
    step = 2**-6
    tensors = [x * 0.5 for x in draw(device)]
    call = make_call(*tensors, position=ExpoSB(distance_decay=True), causal=True, window=30, layout="bhtd")
    weights = torch.randn_like(tensors[0])
    direction = [torch.randn_like(x) for x in tensors]

    def of(tensors):
        return call._replace(**dict(zip("qkv", tensors, strict=True)))

    def along(attend):
        ends = [attend([x + sign * step * d for x, d in zip(tensors, direction, strict=True)]) for sign in (1, -1)]
        return float(((ends[0].double() - ends[1].double()) * weights.double()).sum() / (2 * step))

    leaves = [x.double().requires_grad_() for x in tensors]
    truth = torch.autograd.grad((REFERENCE.attend(of(leaves))[0] * weights.double()).sum(), leaves)
    exact = sum(float((x * d.double()).sum()) for x, d in zip(truth, direction, strict=True))
    baseline = along(lambda x: REFERENCE.attend(of(x))[0])
    out, saved = kernels.forward(call, True)
    grads = launch_backward(kernels, call, out, saved, weights)[:3]
    ours = sum(float((x.double() * d.double()).sum()) for x, d in zip(grads, direction, strict=True))
    noise = torch.finfo(torch.float32).eps * float((out.abs() * weights.abs()).sum()) / step
    assert abs(along(lambda x: kernels.forward(of(x), True)[0]) - exact) <= 2 * abs(baseline - exact) + noise
    assert abs(ours - exact) <= 2 * abs(baseline - exact) + noise


# Between them, every table of tiles: plain, with score functions, with an adjoint, with a mask.
KINDS = {
    "plain": ("none", fixed()),
    "rope-causal": ("rope", fixed(causal=True)),
    "rope-lengths": ("rope-interleaved", lengths(333, 130)),
    "alibi-causal": ("alibi", fixed(causal=True)),
    "alibi-mask": ("alibi", random_mask(2, 1, 200, 333)),
    "rope-padding": ("rope", random_mask(2, 1, 1, 333)),
    "decay-causal": ("exposb-decay", fixed(causal=True)),
    "decay-window": ("exposb-decay", fixed(causal=True, window=150)),
    "window": ("exposb", fixed(window=100)),
}


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_configuration_of_halves(kernels, device, dtype, head_dim, kind):
    scheme, mask = KINDS[kind]
    tensors = draw(device, dtype, queries=200, keys=333, head_dim=head_dim, heads=4, key_heads=2)
    check(kernels, tensors, position=SCHEMES[scheme], **mask(device))


@on_gpu
@pytest.mark.parametrize("kind", ["plain", "rope-causal", "alibi-mask", "decay-window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_configuration_of_float32(kernels, device, head_dim, kind):
    scheme, mask = KINDS[kind]
    tensors = draw(device, queries=200, keys=333, head_dim=head_dim)
    check(kernels, tensors, position=SCHEMES[scheme], **mask(device))


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 129])
def test_lengths_around_the_edges_of_full_tiles(kernels, device, queries, keys, head_dim):
    tensors = draw(device, torch.bfloat16, queries=queries, keys=keys, head_dim=head_dim)
    for keywords in ({}, {"causal": True}, {"window": 64}, {"causal": True, "window": 65}):
        check(kernels, tensors, position=Rope(), **keywords)


@on_gpu
@pytest.mark.parametrize("scheme", ["none", "rope"])
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_past_two_to_the_31(kernels, device, dimension, scheme):
    """Batches, heads or tokens more than 2³¹ elements apart."""
    shape, far = (2, 2, 2, 64), 2**31 + 8
    strides = [4096 * 3, 4096, 64, 1]
    strides[dimension] = far
    memory = torch.empty(far + 4096 * 6, dtype=torch.float16, device=device)

    def place(x):
        return memory.as_strided(shape, strides).copy_(x)

    q, k, v = (torch.randn(shape, device=device).half() for _ in range(3))
    call = make_call(q, k, v, position=SCHEMES[scheme], causal=True, layout="bhtd")
    grad_out = torch.randn_like(q)

    def run(q, k, v):
        placed = call._replace(q=q, k=k, v=v)
        out, saved = kernels.forward(placed, True)
        return out, saved.lse, *launch_backward(kernels, placed, out, saved, grad_out)[:3]

    expected = run(q, k, v)
    for result in (run(place(q), k, v), run(q, place(k), v), run(q, k, place(v))):
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@on_gpu
def test_more_rows_than_a_grid_has_in_its_second_dimension(kernels, device):
    q, k, v = (torch.randn(70000, 1, 3, 16, device=device, dtype=torch.float16) for _ in range(3))
    call = make_call(q, k, v, layout="bhtd")
    out, _ = kernels.forward(call, True)
    last = call._replace(q=q[-2:], k=k[-2:], v=v[-2:])
    expected, _ = REFERENCE.attend(last)
    assert_close_to_truth(out[-2:], REFERENCE.attend(reference.in_dtype(last, torch.float64))[0], expected)
