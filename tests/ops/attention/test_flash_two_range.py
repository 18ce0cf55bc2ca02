"""What flash-attn serves: near and far pairs in two calls, by a stand-in where it is not installed; other head dims."""

import math

import pytest
import torch
from helpers.attention_calls import assert_correct
from helpers.modes import needs_kernels, on_gpu
from products.imagined import imagined_gpu, refusal_on_gpu

from ropewalk import ReRope, Rope, SelfExtend, attention, explain_choice, torch_attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.libraries import flash_two_range as flash_far
from ropewalk.ops.launch import kinds
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
def test_merging_takes_any_number_of_heads(monkeypatch, device):
    """A grid has 65535 programs in all dimensions but the first: those of rows and heads are one number."""
    from ropewalk.ops.attention.libraries import merge

    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    monkeypatch.setattr(merge, "merge_kernel", Recorder())
    out, lse = torch.zeros(700, 3, 100, 1, device=device), torch.zeros(700, 100, 3, device=device)
    merge.merge(out, lse, out[:, 1:], lse[..., 1:])
    assert grids == [(70000,)]


@needs_kernels
def test_merging_by_a_plan_changes_no_bit(monkeypatch, device):
    from ropewalk.ops.attention.libraries import merge

    monkeypatch.setattr(kinds, "on_cpu", True)
    merged = []
    for _ in range(3):
        torch.manual_seed(0)
        out, lse = torch.randn(2, 40, 3, 16, device=device), torch.randn(2, 3, 40, device=device)
        merge.merge(out, lse, torch.randn_like(out[:, 5:]), torch.randn_like(lse[..., 5:]))
        merged.append((out, lse))
    assert all(torch.equal(x, y) for others in merged[1:] for x, y in zip(merged[0], others, strict=True))


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
    ("changed", "code"),
    [
        ({}, None),
        ({"causal": False}, "far_causal"),
        ({"window": 5}, "far_window"),
        ({"positions_q": torch.arange(T)[None]}, "far_positions"),
        ({"queries": 20}, "far_lengths"),
        ({"return_lse": True}, "return_lse"),
        ({"softcap": 3.0}, "softcap"),
        ({"version": 3}, "far_version"),
    ],
    ids=str,
)
def test_what_cannot_be_two_calls_is_refused(stand_in, changed, code):
    keywords = {**REQUEST, **changed}
    queries, version = keywords.pop("queries", T), keywords.pop("version", 4)
    q, k = torch.randn(1, queries, 2, 16), torch.randn(1, T, 2, 16)
    with imagined_gpu(flash_attn=version):
        refusal = refusal_on_gpu("flash", make_call(q.half(), k.half(), k.half(), **keywords))
    assert (None if refusal is None else refusal.code) == code


def test_flash_says_why_it_is_missing(monkeypatch):
    monkeypatch.setattr(flash_far, "load_functions", lambda: (None, "it cannot be imported"))
    with pytest.raises(RuntimeError, match="it cannot be imported"):
        flash_far._functions()


@on_gpu
@pytest.mark.parametrize("scheme", [ReRope(200), ReRope(100, leak=2.5), SelfExtend(64, 4)], ids=["re", "leaky", "self"])
def test_flash_attn_itself(device, scheme):
    q, k, v = (torch.randn(2, 500, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    reason = explain_choice(q, k, v, position=scheme, causal=True).others.get("flash", "")
    if "is not installed" in reason:
        pytest.skip(reason)
    assert_correct(lambda *x, **more: attention(*x, impl="flash", **more), [q, k, v], position=scheme, causal=True)


@on_gpu
def test_flash_attn_with_the_head_dims_of_latent_attention(device):
    q, k = (torch.randn(2, 500, 4, 192, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(2, 500, 4, 128, device=device, dtype=torch.bfloat16)
    rope = Rope(rotary_dim=64, rotary_offset=128, interleaved=True)
    reason = explain_choice(q, k, v, position=rope, causal=True).others.get("flash", "")
    if "is not installed" in reason or "must be q's" in reason:
        pytest.skip(reason)
    assert_correct(lambda *x, **more: attention(*x, impl="flash", **more), [q, k, v], position=rope, causal=True)


@pytest.mark.parametrize(
    ("dims", "version", "capability", "position", "runs"),
    [
        ((192, 128), 4, (9, 0), None, True),
        ((192, 128), 3, (9, 0), None, False),
        ((192, 128), 4, (10, 0), None, False),
        ((128, 64), 4, (9, 0), None, False),
        ((192, 128), 4, (9, 0), ReRope(100), False),
    ],
    ids=str,
)
def test_other_head_dims_of_values(dims, version, capability, position, runs):
    q, k = (torch.randn(1, 200, 2, dims[0]).half() for _ in range(2))
    call = make_call(q, k, q[..., : dims[1]], causal=True, position=position or Rope())
    with imagined_gpu(capability, version):
        refusal = refusal_on_gpu("flash", call)
    assert (None if refusal is None else refusal.code) == (None if runs else "v_head_dim")
