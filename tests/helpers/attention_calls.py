"""Calls of attention that several tests make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention import backends, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import as_bhtd
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, Rope
from ropewalk.testing import assert_close_to_truth

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


def draw(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    layout: str = "bthd",
    batch: int | None = B,
    queries: int = TQ,
    keys: int = TK,
    heads: int = H,
    key_heads: int = K,
    head_dim: int = D,
    v_head_dim: int | None = None,
) -> list[Tensor]:
    """Draw q, k and v from a normal distribution; with `batch=None` they are packed, layout "thd"."""
    sizes = (queries, heads, head_dim), (keys, key_heads, head_dim), (keys, key_heads, v_head_dim or head_dim)
    first = () if batch is None else (batch,)
    shapes = [(*first, n, tokens, dim) if layout == "bhtd" else (*first, tokens, n, dim) for tokens, n, dim in sizes]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def plainly(dtype: torch.dtype) -> Any:
    """A stand-in for `attention` in layout "bthd" that computes in a dtype, each step rounded to it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **keywords: Any) -> Any:
        out, lse = reference.attend(reference.in_dtype(make_call(q, k, v, layout="bthd", **keywords), dtype))
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


def refusal_of(impl: str, *tensors: Tensor, **keywords: Any) -> str | None:
    """The code of a backend's refusal of a call; None where it runs it."""
    refusal = backends.why_not(backends.BACKENDS[impl], make_call(*tensors, **keywords))
    return None if refusal is None else refusal.code
