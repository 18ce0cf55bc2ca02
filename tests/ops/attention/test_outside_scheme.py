"""A scheme from outside the package, by the recipe in CONTRIBUTING.md: KERPLE, whose bias is −r1·log(1 + r2·|d|).

Source: KERPLE (https://arxiv.org/abs/2205.09921), equation 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.attention_calls import B, H, assert_correct, draw
from helpers.modes import HAS_KERNELS, needs_kernels
from torch import Tensor, nn

from ropewalk import PositionScheme, attention, explain_choice


@dataclass(frozen=True, eq=False)
class Kerple(PositionScheme):
    """Scores fall with the logarithm of the distance, by two numbers above 0 for each head."""

    r1: Tensor  # (H,)
    r2: Tensor  # (H,)

    def kernel_score_mod(self) -> str:
        return f"{__name__}:KERPLE"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        return torch.stack((self.r1, self.r2), dim=-1).to(device, torch.float32)

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        r1, r2 = (x[:, None, None].to(scores.dtype) for x in (self.r1, self.r2))
        return scores - r1 * torch.log(1 + r2 * distance.abs())


if HAS_KERNELS:
    import triton
    import triton.language as tl

    from ropewalk.ops.attention.triton.score_mods import ScoreMod

    @triton.jit
    def kerple(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
        r1, r2 = tl.load(parameters_ptr), tl.load(parameters_ptr + 1)
        return scores - r1 * tl.log(1 + r2 * tl.abs(query_position - key_position))

    KERPLE = ScoreMod(kerple, None)  # what it adds does not depend on the scores: it needs no adjoint


def make(device: torch.device) -> Kerple:
    return Kerple(torch.rand(H, device=device) + 0.5, torch.rand(H, device=device) * 2)


MASKS = {
    "full": lambda device: {},
    "causal": lambda device: {"causal": True},
    "window": lambda device: {"window": 7},
    "lengths": lambda device: {"key_lengths": torch.tensor([21, 8], device=device)},
    "positions": lambda device: {"positions_q": torch.randint(0, 1000, (B, 21), device=device)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", [pytest.param("triton", marks=needs_kernels), "reference"])
def test_it_attends_as_defined(device, impl, mask):
    tensors = draw(device)
    assert_correct(
        lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords),
        tensors,
        position=make(device),
        **MASKS[mask](device),
    )


@needs_kernels
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_lengths_may_differ(device, queries):
    tensors = draw(device, queries=queries)
    assert_correct(
        lambda *leaves, **keywords: attention(*leaves, impl="triton", **keywords), tensors, position=make(device)
    )


def test_the_definition_is_what_the_paper_says(device):
    q, k, v = draw(device, torch.float64)
    scheme = make(device)
    index = torch.arange(21, device=device)
    bias = -scheme.r1.double()[:, None, None] * torch.log1p(
        scheme.r2.double()[:, None, None] * (index[:, None] - index).abs()
    )
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) / q.shape[-1] ** 0.5 + bias
    expected = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(attention(q, k, v, position=scheme, impl="reference"), expected)


def test_its_numbers_can_be_learned(device):
    tensors = draw(device)
    scheme = Kerple(*(nn.Parameter(torch.rand(H, device=device) + 0.5) for _ in range(2)))
    assert explain_choice(*tensors, position=scheme).name == "reference"
    grads = torch.autograd.grad(attention(*tensors, position=scheme, causal=True).sin().sum(), (scheme.r1, scheme.r2))
    assert all(bool(grad.all()) for grad in grads)


def test_libraries_refuse_it(device):
    for name in ("sdpa", "flash"):
        with pytest.raises(ValueError, match=f"impl is '{name}', but it cannot run this call"):
            attention(*draw(device), position=make(device), impl=name)
