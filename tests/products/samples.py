"""A few calls, for tests of packs."""

from __future__ import annotations

import os

import torch
from helpers.modes import ON_GPU

from ropewalk import Alibi, Rope, attention

DEVICE = "cuda" if ON_GPU else "cpu"


def attend(impl: str | None, head_dim: int = 64, tokens: int = 128, scheme: str = "rope", causal: bool = True) -> bool:
    """Run a forward and a backward, and say whether all results are finite."""
    shape = (2, tokens, 4, head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE).to(torch.bfloat16).requires_grad_() for _ in range(3))
    position = {"rope": Rope(), "alibi": Alibi()}[scheme]
    out = attention(q, k, v, layout="bthd", impl=impl, position=position, causal=causal)
    out.backward(torch.randn_like(out))
    return all(bool(x.isfinite().all()) for x in (out, q.grad, k.grad, v.grad) if x is not None)


def fail() -> None:
    """Fail."""
    raise ValueError("this job fails")


def die() -> None:
    """End the process."""
    os.abort()
