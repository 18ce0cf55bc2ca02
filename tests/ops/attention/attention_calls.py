"""Calls of attention that several tests make, and which implementations this run can make them with."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.checks import as_bhtd, check_call
from ropewalk.positions import Alibi, ExpoSB, NoPosition, Rope
from ropewalk.testing import assert_close_to_truth

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"
HAS_KERNELS = INTERPRETED or ON_GPU
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU, or Triton's interpreter")

ROUNDINGS = 6  # results on the way that are rounded: mapped features, scores, probabilities, and what comes of them
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-interleaved": Rope(interleaved=True, rotary_dim=8, attention_factor=1.1),
    "alibi": Alibi(),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
}
B, TQ, TK, H, K, D = 2, 21, 21, 4, 2, 16


def draw(device: torch.device, dtype: torch.dtype = torch.float32, **sizes: int) -> list[Tensor]:
    """q, k and v in layout "bthd"."""
    batch, heads, head_dim = sizes.get("batch", B), sizes.get("heads", H), sizes.get("head_dim", D)
    queries, keys, key_heads = sizes.get("queries", TQ), sizes.get("keys", TK), sizes.get("key_heads", K)
    shapes = [(batch, queries, heads, head_dim), *[(batch, keys, key_heads, head_dim)] * 2]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def plainly(dtype: torch.dtype) -> Any:
    """A stand-in for `attention` in layout "bthd" that computes in a dtype, each step rounded to it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **keywords: Any) -> Any:
        call = check_call(q, k, v, layout="bthd", **keywords)
        out, lse = reference.attend(*(as_bhtd(x, "bthd").to(dtype) for x in (q, k, v)), call)
        out = as_bhtd(out, "bthd")
        return (out, lse) if return_lse else out

    return attend


def value_and_grads(function: Any, tensors: list[Tensor], weights: Tensor, **keywords: Any) -> list[Tensor]:
    """The output of a call, and the gradients of q, k and v of its sum with these weights."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, **keywords)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def assert_correct(function: Any, tensors: list[Tensor], **keywords: Any) -> None:
    """The output of a call, and the gradients of q, k and v, against the reference in float64."""
    q, _k, v = tensors
    weights = torch.randn(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    actual = value_and_grads(function, tensors, weights, **keywords)
    truth = value_and_grads(plainly(torch.float64), [x.double() for x in tensors], weights, **keywords)
    baseline = value_and_grads(plainly(tensors[0].dtype), tensors, weights, **keywords)
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert_close_to_truth(mine, exact, plain, ROUNDINGS)
