"""What flash-attn serves: near and far pairs in two calls, by a stand-in where it is not installed; other head dims."""

import math

import pytest
import torch
from attention_calls import ON_GPU, assert_correct, needs_kernels
from torch._subclasses import FakeTensorMode

from ropewalk import ReRope, Rope, SelfExtend, attention, explain_choice, torch_attention
from ropewalk.ops.attention import cores, flash_far
from ropewalk.testing import assert_close_to_truth, unchanged

T, W = 50, 13


def scores_of(q, k, scale, causal, window_size_left):
    q, k = (x.transpose(1, 2) for x in (q, k))
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    assert q.shape[2] == k.shape[2]
    assert causal or window_size_left is not None
    may = distance >= 0
    if window_size_left is not None:
        may = may & (distance <= window_size_left)
    return (q @ k.mT * scale).masked_fill(~may, -math.inf)


def forward(q, k, v, *, softmax_scale, return_lse, causal=False, window_size_left=None, window_size_right=0):
    assert return_lse
    assert window_size_right == 0
    scores = scores_of(q, k, softmax_scale, causal, window_size_left)
    out = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).contiguous()
    return out, scores.logsumexp(-1).contiguous(), None


def backward(q, k, v, out, grad_out, lse, scale, causal=False, window_size_left=None, window_size_right=0):
    assert window_size_right == 0
    p = torch.exp(scores_of(q, k, scale, causal, window_size_left) - lse[..., None])
    delta = (out * grad_out).sum(-1).transpose(1, 2)
    q, k, v, grad_out = (x.transpose(1, 2) for x in (q, k, v, grad_out))
    grad_scores = p * (grad_out @ v.mT - delta[..., None]) * scale
    return tuple(x.transpose(1, 2).contiguous() for x in (grad_scores @ k, grad_scores.mT @ q, p.mT @ grad_out))


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(flash_far, "load_functions", lambda: ((forward, backward), None))


def ready_pairs(device, dtype=torch.float32):
    return [torch.randn(2, T, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(5)]


@needs_kernels
@pytest.mark.parametrize("window", [1, W, T - 1])
def test_two_calls_are_one_attention(stand_in, device, window):
    tensors = ready_pairs(device)
    q1, q2, k1, k2, v = tensors
    with unchanged(tensors):
        out = flash_far.attend(q1, k1, q2, k2, v, 0.3, window)
        grad_out = torch.randn_like(out)
        actual = [out, *torch.autograd.grad(out, tensors, grad_out)]
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        plain = torch_attention(*(x.transpose(1, 2) for x in leaves), True, 0.3, window).transpose(1, 2)
        results.append([plain, *torch.autograd.grad(plain, leaves, grad_out.to(dtype))])
    for mine, truth, baseline in zip(actual, *results, strict=True):
        assert_close_to_truth(mine.detach(), truth.detach(), baseline.detach(), roundings=6)


@needs_kernels
def test_merging_takes_sums_of_any_size(stand_in, device):
    q1, q2, k1, k2, v = (x.detach() for x in ready_pairs(device))
    for scale in (100.0, 1e-3):  # one of the two is all there is, or they are alike
        out = flash_far.attend(q1, k1, q2, k2, v, scale, W)
        tensors = [x.transpose(1, 2) for x in (q1, q2, k1, k2, v)]
        truth = torch_attention(*(x.double() for x in tensors), True, scale, W)
        baseline = torch_attention(*tensors, True, scale, W)
        assert_close_to_truth(out.transpose(1, 2), truth, baseline, roundings=6)


REQUEST = {"position": ReRope(W), "causal": True}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"causal": False}, "only if both are causal"),
        ({"window": 5}, "not asked for a window beside"),
        ({"positions_q": torch.arange(T)[None]}, "go by positions_q and positions_k"),
        ({"queries": 20}, "only for as many queries as keys"),
        ({"return_lse": True}, "its log-sum-exp is not differentiated"),
        ({"softcap": 3.0}, "not asked for a softcap"),
        ({"version": 3}, "merged with flash-attn 4 alone, not with 3"),
    ],
    ids=str,
)
def test_what_cannot_be_two_calls_is_refused(stand_in, changed, reason):
    keywords = {**REQUEST, **changed}
    queries, version = keywords.pop("queries", T), keywords.pop("version", 4)
    return_lse = keywords.pop("return_lse", False)
    q, k = torch.randn(1, queries, 2, 16), torch.randn(1, T, 2, 16)
    from ropewalk.ops.attention.api import _ask

    request = _ask(q, k, k, return_lse=return_lse, **keywords)
    refused = cores._why_no_far(request, version) or cores._why_no_core(request)
    assert refused is None if reason is None else reason in refused


def test_flash_says_why_it_is_missing(monkeypatch):
    monkeypatch.setattr(flash_far, "load_functions", lambda: (None, "it cannot be imported"))
    with pytest.raises(RuntimeError, match="it cannot be imported"):
        flash_far._functions()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("scheme", [ReRope(200), ReRope(100, leak=2.5), SelfExtend(64, 4)], ids=["re", "leaky", "self"])
def test_flash_attn_itself(device, scheme):
    q, k, v = (torch.randn(2, 500, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    reason = explain_choice(q, k, v, position=scheme, causal=True).others.get("flash", "")
    if "is not installed" in reason:
        pytest.skip(reason)
    assert_correct(lambda *x, **more: attention(*x, impl="flash", **more), [q, k, v], position=scheme, causal=True)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_flash_attn_with_the_head_dims_of_latent_attention(device):
    q, k = (torch.randn(2, 500, 4, 192, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(2, 500, 4, 128, device=device, dtype=torch.bfloat16)
    rope = Rope(rotary_dim=64, rotary_offset=128, interleaved=True)
    reason = explain_choice(q, k, v, position=rope, causal=True).others.get("flash", "")
    if "is not installed" in reason or "another than q's" in reason:
        pytest.skip(reason)
    assert_correct(lambda *x, **more: attention(*x, impl="flash", **more), [q, k, v], position=rope, causal=True)


@pytest.mark.parametrize(
    ("dims", "version", "capability", "position", "serves"),
    [
        ((192, 128), 4, (9, 0), None, True),
        ((192, 128), 3, (9, 0), None, False),
        ((192, 128), 4, (10, 0), None, False),
        ((128, 64), 4, (9, 0), None, False),
        ((192, 128), 4, (9, 0), ReRope(100), False),
    ],
    ids=str,
)
def test_other_head_dims_of_values(monkeypatch, dims, version, capability, position, serves):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(cores, "_find_capability", lambda device: capability)
    monkeypatch.setattr(cores, "flash_version", lambda device: version)
    monkeypatch.setattr(cores, "load_flash", lambda version: (None, None))
    monkeypatch.setattr(flash_far, "load_functions", lambda: (None, None))
    from ropewalk.ops.attention.api import _ask

    q, k = (torch.randn(1, 200, 2, dims[0]).half() for _ in range(2))
    request = _ask(q, k, q[..., : dims[1]], causal=True, position=position or Rope())
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in request[:3]]
    monkeypatch.setattr(cores, "FakeTensor", type(None))
    monkeypatch.setattr(cores, "_why_misaligned", lambda *tensors: None)
    reason = cores.why_not_flash(request._replace(q=fakes[0], k=fakes[1], v=fakes[2]))
    expected = None if serves else f"v's head dim is {dims[1]}, and it is not asked for another than q's {dims[0]}"
    assert reason == expected
