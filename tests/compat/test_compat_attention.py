"""Document 002's four attentions against their formulas, written out in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_calls import ROUNDINGS
from helpers.modes import HAS_KERNELS
from torch import Tensor

import ropewalk
from ropewalk.testing import assert_close_to_truth, unchanged

pytestmark = pytest.mark.both_modes  # the fastest implementation that a mode has
NAMES = ("standard", "absolute", "rope", "exposb")
SHAPES = [(2, 12, 40, 64), (1, 2, 33, 32), (3, 1, 1, 16)]
if HAS_KERNELS:
    SHAPES = [(1, 2, 40, 64), (1, 2, 33, 32), (3, 1, 1, 16)]


def mapped(x: Tensor, name: str) -> Tensor:
    """What the document does to q and k, (B, H, T, D), in x's dtype."""
    tokens, head_dim = x.shape[2:]
    if name in ("standard", "absolute"):
        return x
    omega = 10000.0 ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    position = torch.arange(tokens, dtype=torch.float64)[:, None]
    cos, sin = ((position * omega).cos().to(x), (position * omega).sin().to(x))
    even, odd = x[..., 0::2], x[..., 1::2]
    y = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    if name == "rope":
        return y
    amplitude = 1 + 0.2 * torch.exp(-0.001 * position)
    d = torch.arange(head_dim, dtype=torch.float64)
    gain = 0.8 + 0.4 * torch.exp(-((d - head_dim // 4) ** 2) / (2 * (head_dim // 8) ** 2))
    return amplitude.to(x) * gain.to(x) * y


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, name: str) -> Tensor:
    """The attention of one name, every step in the dtype of its arguments."""
    tokens = q.shape[2]
    scores = mapped(q, name) @ mapped(k, name).mT * sm_scale
    if name == "exposb":
        index = torch.arange(tokens, device=q.device)
        scores = scores * (0.7 + 0.3 * torch.exp(-0.005 * (index[:, None] - index).abs().to(q.dtype)))
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, device=q.device).triu(1) > 0, -torch.inf)
    return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_are_the_definition(device, name, shape, causal):
    attend = getattr(ropewalk, f"{name}_attention")
    tensors = [torch.randn(shape, device=device) for _ in range(3)]
    weights = torch.randn(shape, device=device, dtype=torch.float64)
    sm_scale = 0.7 * shape[-1] ** -0.5

    def results(dtype, function, *more):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = function(*leaves, causal, sm_scale, *more)
        return [out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)]

    with unchanged(tensors):
        actual = results(torch.float32, attend)
    truth, baseline = results(torch.float64, formula, name), results(torch.float32, formula, name)
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert mine.any() or not exact.any(), "a gradient has vanished"
        # The softmax of one key has no gradient, but for what rounding leaves.
        if shape[2] > 1 or exact.any():
            assert_close_to_truth(mine, exact, plain, 2 * ROUNDINGS)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(device, name):
    tensors = [torch.randn(2, 2, 40, 32, device=device, dtype=torch.float16) for _ in range(3)]
    out = getattr(ropewalk, f"{name}_attention")(*tensors, True, 0.2)
    assert out.dtype == torch.float16
    truth = formula(*(x.double() for x in tensors), True, 0.2, name)
    assert_close_to_truth(out, truth, formula(*tensors, True, 0.2, name), ROUNDINGS)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_they_are_our_own_kernels(device, name, monkeypatch):
    asked = []
    right = ropewalk.compat.attention.attention

    def note(*arguments, impl, **keywords):
        asked.append(impl)
        return right(*arguments, impl=impl, **keywords)

    monkeypatch.setattr(ropewalk.compat.attention, "attention", note)
    q = torch.randn(1, 2, 16, 16, device=device)
    getattr(ropewalk, f"{name}_attention")(q, q, q, False, 0.25)
    assert asked == ["triton" if device.type == "cuda" else "reference"]


def test_bad_arguments_are_refused(device):
    q = torch.randn(1, 2, 16, 16, device=device)
    with pytest.raises(ValueError, match="q has shape"):
        ropewalk.rope_attention(q[0], q, q, True, 0.25)
    with pytest.raises(ValueError, match="scale is inf"):
        ropewalk.standard_attention(q, q, q, True, float("inf"))
    with pytest.raises(ValueError, match="must be even and at least 8 for ExpoSB"):
        ropewalk.exposb_attention(*[q[..., :6]] * 3, True, 0.25)
