"""Sharded calls of random shapes and kinds beside the same call of one process, with NaN in padding."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk import Alibi, NoPosition, ReRope, Rope, attention
from ropewalk.parallel import SequenceLayout, context_parallel_attention, shard_sequence
from ropewalk.testing import assert_close_to_truth

METHODS = ("gather", "halo", "ulysses", "ring", None)
SCHEMES = (NoPosition, Rope, Alibi, lambda: ReRope(9))
ROUNDINGS = 4  # of intermediate results to the dtype


def compare(rank: int, device: str, dtype: torch.dtype, count: int, longest: int) -> None:
    """Compare calls of so many seeds; each rank draws the same."""
    if device == "cuda":
        device = f"cuda:{rank}"
    for seed in range(count):
        try:
            _compare_one(random.Random(seed), torch.device(device), dtype, longest)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def _compare_one(draw: random.Random, device: torch.device, dtype: torch.dtype, longest: int) -> None:
    size = dist.get_world_size()
    tokens, key_heads = draw.randint(1, longest), size * draw.randint(1, 2)
    heads, dim, causal = key_heads * draw.randint(1, 3), draw.choice((16, 64, 128)), draw.random() < 0.7
    window = draw.choice((None, None, draw.randint(1, tokens)))
    window = (window, window) if window and not causal else window
    bounds = None
    if draw.random() < 0.4:
        cuts = sorted(draw.randint(0, tokens) for _ in range(draw.randint(1, 4)))
        bounds = torch.tensor([0, *cuts, tokens], device=device)
    kind = draw.choice(("contiguous", "zigzag", "balanced" if bounds is not None else "zigzag"))
    method = draw.choice(METHODS)
    if method == "halo" and window is None:
        method = "gather"
    keywords: dict[str, Any] = {"position": draw.choice(SCHEMES)(), "causal": causal, "window": window}
    generator = torch.Generator(device).manual_seed(draw.randint(0, 1 << 30))
    shapes = [(1, tokens, n, dim) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = (torch.randn(x, generator=generator, device=device, dtype=dtype) for x in shapes)

    layout = SequenceLayout(dist.group.WORLD, tokens, kind, bounds)
    missing = ~layout.valid[:, None, None]
    leaves = [shard_sequence(x, layout).masked_fill(missing, float("nan")).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*leaves, layout=layout, method=method, **keywords)
    found = [out, *torch.autograd.grad(out, leaves, shard_sequence(grad, layout))]
    truth, plain = (_whole([x.to(kind) for x in (q, k, v)], grad, bounds, keywords) for kind in (torch.float64, dtype))
    for x, right, baseline in zip(found, truth, plain, strict=True):
        if layout.valid.any():  # a rank may have padding alone
            rows = [y.index_select(1, layout.indices[layout.valid]) for y in (right, baseline)]
            assert_close_to_truth(x[:, layout.valid], *rows, roundings=ROUNDINGS)


def _whole(leaves: list[Tensor], grad: Tensor, bounds: Tensor | None, keywords: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    if bounds is None:
        out = attention(*leaves, impl="reference", **keywords)
    else:
        packed = {"layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        out = attention(*(x[0] for x in leaves), impl="reference", **packed, **keywords)[None]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
