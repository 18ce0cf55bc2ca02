"""The Triton kernels of attention against the reference in float64: in Triton's interpreter, or on a GPU."""

import math
import os

import pytest
import torch

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.checks import check_call, token_positions
from ropewalk.positions import Alibi, ExpoSB, NoPosition, Rope
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"
pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU, or Triton's interpreter")

# The interpreter does not round to bfloat16.
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-interleaved": Rope(interleaved=True, attention_factor=1.1),
    "rope-partial": Rope(rotary_dim=8),
    "rope-partial-interleaved": Rope(rotary_dim=8, interleaved=True),
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
    from ropewalk.ops.attention import triton_launch

    return triton_launch


def draw(device, dtype, queries=Q, keys=K, head_dim=16, heads=H, key_heads=HK):
    q = torch.randn(B, heads, queries, head_dim, device=device).to(dtype)
    k, v = (torch.randn(B, key_heads, keys, head_dim, device=device).to(dtype) for _ in range(2))
    return q, k, v


# Results on the way that are rounded to the dtype: mapped features, scores, probabilities, and what comes of them.
ROUNDINGS = 4


def compute(function, tensors, call, grad_out, grad_lse):
    """Output, natural log-sum-exp, and the gradients of q, k and v by PyTorch's autograd."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves, call)
    total = (out * grad_out).sum() + (torch.where(lse.detach() > -math.inf, lse, 0) * grad_lse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)


def compute_plainly(tensors, call, grad_out, grad_lse):
    """The same, each step in the tensors' dtype, with the backward that needs no other matrix than p: as kernels do."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    positions = token_positions(q, k, call)
    mapped_q, mapped_k = reference.map_features(q, k, *positions, call)
    scores = mapped_q @ mapped_k.repeat_interleave(groups, 1).mT * call.scale
    scores = call.position.change_scores(scores, (positions[0][:, :, None] - positions[1][:, None])[:, None])
    may = reference.allowed(slice(0, queries), queries, keys, call, q.device)
    attends = torch.ones_like(scores, dtype=torch.bool) if may is None else may.expand_as(scores)
    lse = scores.detach().masked_fill(~attends, -math.inf).logsumexp(-1)
    shift = torch.where(lse.isinf(), 0, lse)[..., None]
    p = torch.where(attends, (scores.detach() - shift).exp(), 0)
    values = v.detach().repeat_interleave(groups, 1)
    out = p @ values
    delta = (out * grad_out).sum(-1) - torch.where(lse.isinf(), 0, grad_lse.to(out.dtype))
    grad_scores = p * (grad_out @ values.mT - delta[..., None])
    grad_q, grad_k = torch.autograd.grad(scores, (q, k), grad_scores)
    return out, lse, grad_q, grad_k, (p.mT @ grad_out).unflatten(1, (-1, groups)).sum(2)


def check(kernels, tensors, **keywords):
    """Everything that the kernels compute, against the reference in float64 and plain PyTorch in the same dtype."""
    call = check_call(*tensors, layout="bhtd", **keywords)
    q, k, v = tensors
    grad_out, grad_lse = torch.randn_like(q), torch.randn(q.shape[:3], device=q.device)
    doubles = [x.double() for x in (*tensors, grad_out, grad_lse)]
    truth = compute(reference.attention, doubles[:3], call, *doubles[3:])
    plain = compute_plainly(tensors, call, grad_out, grad_lse)
    with unchanged([q, k, v, grad_out]), poisoned_memory():
        out, saved = kernels.forward(q, k, v, call)
        grads = kernels.backward(grad_out, grad_lse, q, v, out, saved, call)
    lse = saved.lse * math.log(2)
    assert torch.equal(lse.isinf(), truth[1].isinf())
    plain = (plain[0], plain[1].to(lse.dtype), *plain[2:])
    for actual, exact, baseline in zip((out, lse, *grads), truth, plain, strict=True):
        finite = exact.isfinite()
        assert_close_to_truth(*(torch.where(finite, x, 0) for x in (actual, exact, baseline)), roundings=ROUNDINGS)
    return out, lse, grads


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_under_every_mask(kernels, device, scheme, mask):
    check(kernels, draw(device, torch.float32), position=SCHEMES[scheme], **MASKS[mask](device))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64])
@pytest.mark.parametrize("scheme", ["none", "rope", "rope-interleaved", "exposb-decay"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_head_dim(kernels, device, dtype, scheme, head_dim, causal):
    check(kernels, draw(device, dtype, 21, 19, head_dim), position=SCHEMES[scheme], causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 50), (50, 1), (16, 16), (17, 31), (32, 33), (33, 15), (60, 10), (5, 0), (0, 5)]
)
def test_lengths_around_the_edges_of_tiles(kernels, device, queries, keys, causal):
    for window in (None, 8):
        check(kernels, draw(device, torch.float32, queries, keys), position=Rope(), causal=causal, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 1)], ids=str)
def test_heads_share_keys(kernels, device, heads):
    check(kernels, draw(device, torch.float32, heads=heads[0], key_heads=heads[1]), position=Alibi(), causal=True)


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("rope", torch.int64), ("alibi", torch.int32), ("exposb-decay", torch.int64)]
)
def test_positions_are_the_callers(kernels, device, scheme, dtype):
    tensors = draw(device, torch.float32)
    positions_q = torch.randint(0, 10**4, (B, Q), device=device).to(dtype)
    positions_k = torch.randint(0, 10**4, (1, K), device=device).to(dtype)
    for positions in (
        {"positions_q": positions_q},
        {"positions_k": positions_k},
        {"positions_q": positions_q[:1].expand(B, Q), "positions_k": positions_k},
    ):
        check(kernels, tensors, position=SCHEMES[scheme], causal=True, **positions)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
@pytest.mark.parametrize("scheme", ["none", "alibi"])
def test_any_scale(kernels, device, scheme, scale):
    check(kernels, draw(device, torch.float32), position=SCHEMES[scheme], scale=scale)


def test_any_strides(kernels, device):
    fused = torch.randn(B, Q, H + 2 * HK, 16, device=device)
    q, k, v = (x.transpose(1, 2) for x in fused.split([H, HK, HK], dim=2))
    check(kernels, (q, k, v), position=Rope(), causal=True)
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]  # features are not dense
    check(kernels, transposed, position=Rope(), causal=True)


def test_the_same_bits_every_time(kernels, device):
    tensors = draw(device, torch.float32)
    call = check_call(*tensors, position=Rope(), causal=True, layout="bhtd")
    grad_out = torch.randn_like(tensors[0])
    runs = []
    for _ in range(2):
        out, saved = kernels.forward(*tensors, call)
        runs.append((out, saved.lse, *kernels.backward(grad_out, None, tensors[0], tensors[2], out, saved, call)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_rows_that_attend_nothing_are_zero_and_give_nothing_back(kernels, device):
    tensors = draw(device, torch.float32)
    mask = torch.ones(Q, K, dtype=torch.bool, device=device)
    mask[3:7] = False
    out, lse, grads = check(kernels, tensors, position=Rope(), mask=mask)
    assert torch.equal(out[:, :, 3:7], torch.zeros_like(out[:, :, 3:7]))
    assert bool((lse[:, :, 3:7] == -math.inf).all())
    assert torch.equal(grads[0][:, :, 3:7], torch.zeros_like(out[:, :, 3:7]))


def test_what_lies_past_the_lengths_is_not_read(kernels, device):
    q, k, v = draw(device, torch.float32)
    k[1, :, 20:] = v[1, :, 20:] = torch.nan
    call = check_call(q, k, v, position=Rope(), key_lengths=torch.tensor([K, 20], device=device), layout="bhtd")
    out, saved = kernels.forward(q, k, v, call)
    grads = kernels.backward(torch.randn_like(q), None, q, v, out, saved, call)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert not grads[1][1, :, 20:].any()
    assert not grads[2][1, :, 20:].any()
