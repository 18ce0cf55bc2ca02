"""Keys and rows that attend nothing, or that nothing attends, may hold anything: NaN of theirs reaches no result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ropewalk import (
    Alibi,
    BlockLists,
    ExpoSB,
    NoPosition,
    PositionScheme,
    ReRope,
    Rope,
    T5Bias,
    attention,
)

B, H, K, D, TQ, TK = 2, 4, 2, 16, 3, 21
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "alibi": Alibi(),
    "exposb": ExpoSB(distance_decay=True),
    "rerope": ReRope(3),
    "t5": T5Bias(torch.linspace(-1, 1, 8 * H).view(8, H)),
}


class Left(NamedTuple):
    """Keywords of a call, and the keys that no query attends: (B, Tk) or (Tk,), True where none does."""

    out: Callable[[], Tensor]
    keywords: dict[str, Any]


def _before(n: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(TK).expand(B, TK) < n


def _some_heads() -> Tensor:
    """A mask by which the heads of one group attend other keys, and nobody attends key 7."""
    mask = torch.ones(1, H, TQ, TK, dtype=torch.bool)
    mask[:, ::2, :, 5:8] = False
    mask[..., 7] = False
    return mask


DENSE = {
    "window": Left(_before(TK - TQ - 4), {"causal": True, "window": 5}),
    "window of one side": Left(_before(TK - TQ - 4), {"window": (4, -1)}),
    "key_starts": Left(
        lambda: torch.arange(TK) < torch.tensor([[3], [9]]), {"key_starts": torch.tensor([3, 9]), "causal": True}
    ),
    "key_lengths": Left(lambda: torch.arange(TK) >= torch.tensor([[TK], [9]]), {"key_lengths": torch.tensor([TK, 9])}),
    "query_starts": Left(
        lambda: torch.arange(TK) >= torch.tensor([[7], [12]]), {"query_starts": torch.tensor([4, 9]), "causal": True}
    ),
    "mask": Left(lambda: torch.arange(TK).expand(B, TK) == 7, {"mask": _some_heads()}),
    "nothing": Left(_before(TK), {"mask": torch.zeros(TQ, TK, dtype=torch.bool)}),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def run(x: tuple[Tensor, ...], **keywords: Any) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    leaves = [y.clone().requires_grad_() for y in x]
    out = attention(*leaves, **keywords)
    return (out.detach(), *torch.autograd.grad(out.sin().sum(), leaves))


@pytest.mark.parametrize("limit", [40, 1 << 24], ids=["blocked", "whole"])
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("impl", "scheme"), [*(("reference", name) for name in SCHEMES), ("sdpa", "rope")])
def test_keys_that_no_query_attends_may_hold_nan(monkeypatch, scheme, name, impl, limit):
    monkeypatch.setattr("ropewalk.ops.attention.reference.BLOCK_SCORES", limit)
    monkeypatch.setattr("ropewalk.ops.attention.libraries.sdpa.MASK_BLOCK", limit)
    left, position = DENSE[name], SCHEMES[scheme]
    q, k, v = draw(B, TQ, H, D), draw(B, TK, K, D), draw(B, TK, K, D)
    keywords = {"position": position, **left.keywords}
    missing = left.out()[..., None, None]
    expected = run((q, k.masked_fill(missing, 0.5), v.masked_fill(missing, -0.5)), impl=impl, **keywords)
    actual = run((q, k.masked_fill(missing, math.nan), v.masked_fill(missing, math.inf)), impl=impl, **keywords)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    for grad in actual[2:]:
        assert not grad[missing.expand_as(grad)].any()


def test_keys_of_no_listed_block_may_hold_nan():
    lists = BlockLists(torch.tensor([[[1, 1]]]), torch.tensor([[[[0], [2]]]]), block_q=64, block_k=64)
    q, k, v = (draw(1, n, H, D) for n in (128, 192, 192))
    missing = (torch.arange(192) // 64 == 1)[None, :, None, None]
    expected = run((q, k.masked_fill(missing, 0), v.masked_fill(missing, 0)), blocks=lists, impl="reference")
    actual = run((q, *(x.masked_fill(missing, math.nan) for x in (k, v))), blocks=lists, impl="reference")
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("position", [NoPosition(), Rope(), ReRope(3), ExpoSB()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("kind", ["own", "fp8", "int8"])
@pytest.mark.parametrize("packed", [False, True])
def test_pages_before_the_window_may_hold_nan_or_be_none(packed, kind, position):
    """Engines free such pages, and point to a null page or to none."""
    pages, keywords = (draw(3, 8, K, D), draw(3, 8, K, D) + 1), {}
    if kind == "fp8":
        pages = tuple(x.to(torch.float8_e4m3fn) for x in pages)
        keywords = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)}
    elif kind == "int8":
        pages = tuple((10 * x).to(torch.int8) for x in pages)
        keywords = {"k_scale": torch.rand(3, 8, K), "v_scale": torch.rand(3, 8, K)}
    q, keywords["key_lengths"] = draw(1, TQ, H, D), torch.tensor([TK])
    keywords |= {"causal": True, "window": 5, "position": position, "impl": "reference"}
    if packed:
        q, keywords["layout"] = q[0], "thd"
        keywords["cu_seqlens_q"] = torch.tensor([0, TQ])
    else:
        keywords["query_starts"] = torch.tensor([TK - TQ])
    expected = attention(q, *pages, block_table=torch.tensor([[0, 1, 2]]), **keywords)
    assert expected.isfinite().all()
    for x in pages:
        if kind != "int8":
            x.view(torch.uint8 if kind == "fp8" else torch.int32)[0] = -1  # NaN in both
    if kind == "int8":
        keywords |= {name: keywords[name].index_fill(0, torch.tensor([0]), math.nan) for name in ("k_scale", "v_scale")}
    for first in (0, -1, 99):
        actual = attention(q, *pages, block_table=torch.tensor([[first, 1, 2]]), **keywords)
        assert torch.equal(actual, expected)


def test_pages_that_are_read_are_checked():
    pages, q = draw(3, 8, K, D), draw(1, TQ, H, D)
    table, lengths = torch.tensor([[0, 1, -1]]), torch.tensor([TK])

    def call(**keywords: Any) -> Tensor:
        return attention(q, pages, pages, block_table=table, key_lengths=lengths, **keywords)

    call(causal=True, query_starts=torch.tensor([16 - TQ]))  # later pages are not read
    with pytest.raises(ValueError, match="block_table holds -1 below key_lengths"):
        call(causal=True, query_starts=torch.tensor([17 - TQ]))
    with pytest.raises(ValueError, match="block_table holds -1 below key_lengths"):
        call(query_starts=torch.tensor([16 - TQ]))
    table = torch.tensor([[-1, 1, 2]])
    call(causal=True, query_starts=torch.tensor([12]), window=5)
    with pytest.raises(ValueError, match="block_table holds -1 below key_lengths"):
        call(causal=True, query_starts=torch.tensor([11]), window=5)
    packed = {"layout": "thd", "cu_seqlens_q": torch.tensor([0, 0, TQ]), "causal": True}
    table, lengths = torch.tensor([[-1, -1, -1], [0, 1, 2]]), torch.tensor([TK, TK])  # no query reads the first row
    assert attention(q[0], pages, pages, block_table=table, key_lengths=lengths, **packed).isfinite().all()


@dataclass(frozen=True, eq=False)
class Barring(PositionScheme):
    """A bias, and −∞ for pairs that a mask (Tq, Tk) leaves out."""

    may: Tensor
    slope: Tensor

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return torch.where(self.may, scores - self.slope * distance.abs(), -torch.inf)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_row_that_a_score_mod_bars_is_as_if_it_were_masked(with_lse, sinks, causal):
    may = torch.rand(TQ, TK, generator=torch.Generator().manual_seed(0)) > 0.5
    may[1] = False
    results = []
    for barred in (True, False):
        slope = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        scheme = Barring(may if barred else torch.ones_like(may), slope)
        leaves = [x.double().requires_grad_() for x in (draw(B, TQ, H, D), draw(B, TK, K, D), draw(B, TK, K, D))]
        keywords: dict[str, Any] = {"sinks": draw(H).double().requires_grad_()} if sinks else {}
        keywords["mask"] = None if barred else may
        out, lse = attention(*leaves, position=scheme, causal=causal, return_lse=True, **keywords)
        loss = out.sin().sum() + (lse[lse > -torch.inf].sin().sum() if with_lse else 0)
        learned = [*leaves, slope, *([keywords["sinks"]] if sinks else [])]
        results.append((out, lse, *torch.autograd.grad(loss, learned)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    assert not results[0][0][:, 1].any()


def test_second_gradients_past_a_barred_row():
    may = torch.tensor([[True, False, True], [False, False, False]])
    tensors = [draw(1, n, 2, 4).double().requires_grad_() for n in (2, 3, 3)]
    scheme = Barring(may, torch.tensor(0.1, dtype=torch.float64))
    torch.autograd.gradgradcheck(lambda *x: attention(*x, position=scheme), tensors, fast_mode=True)
