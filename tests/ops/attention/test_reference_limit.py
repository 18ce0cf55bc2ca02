"""Inputs so long that the reference goes by blocks of queries: all that it promises holds past that limit too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, graph

from ropewalk import Alibi, PositionScheme, ReRope, Rope, attention
from ropewalk.ops.attention import reference
from ropewalk.schemes.heads import OfHeads

B, T, H, D = 2, 6, 4, 8
SLOPES = torch.tensor([0.5, 0.1, 1.0, 0.3], dtype=torch.float64)


def attend(q: Tensor, **keywords: Any) -> Tensor:
    out: Tensor = attention(q, q, q, **{"position": Alibi(SLOPES), "causal": True, "impl": "reference", **keywords})
    return out


def loss(q: Tensor, **keywords: Any) -> Tensor:
    return attend(q, **keywords).sin().sum()


def grad_of(function: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    return torch.autograd.grad(function(q), q)[0]


def _tangent(q: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(q.clone().requires_grad_(), q.cos()))).tangent


def _saved(q: Tensor) -> Tensor:
    with graph.save_on_cpu():
        return grad_of(loss, q)


def _twice(q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    out = loss(q)
    torch.autograd.grad(out, q, retain_graph=True)
    return torch.autograd.grad(out, q)[0]


def _second(q: Tensor) -> Tensor:
    return grad_of(lambda x: torch.autograd.grad(loss(x), x, create_graph=True)[0].sin().sum(), q)


def _of_slopes(q: Tensor) -> Tensor:
    slopes = SLOPES.clone().requires_grad_()
    return torch.autograd.grad(loss(q, position=OfHeads(Alibi(slopes), 0, H)), slopes)[0]


def _written(q: Tensor) -> Tensor:
    lengths, q = torch.tensor([3, T]), q.clone().requires_grad_()
    out = loss(q, key_lengths=lengths)
    lengths.fill_(1)
    return torch.autograd.grad(out, q)[0]


def _max_logits(q: Tensor) -> Tensor:
    logits: Tensor = attention(q, q, q, return_max_logits=True, impl="reference")[1]
    return logits


MANY = torch.randn(3, B, T, H, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LENGTHS = torch.tensor([[3, T], [T, 5], [1, 2]])
PROMISES = {
    "grad": lambda q: grad_of(loss, q),
    "grad without causality": lambda q: grad_of(lambda x: loss(x, causal=False), q),
    "two ranges": lambda q: grad_of(lambda x: loss(x, position=ReRope(2)), q),
    "second grad": _second,
    "backward twice": _twice,
    "hooks of saved tensors": _saved,
    "learned slopes": _of_slopes,
    "lengths written before the backward": _written,
    "max logits": _max_logits,
    "func.grad": func.grad(loss),
    "func.grad of grad": func.grad(lambda q: func.grad(loss)(q).sin().sum()),
    "func.vjp": lambda q: func.vjp(attend, q)[1](q.cos())[0],
    "func.jvp": lambda q: func.jvp(attend, (q,), (q.cos(),))[1],
    "func.jacrev": func.jacrev(loss),
    "func.jacfwd": func.jacfwd(loss),
    "func.vmap": lambda q: func.vmap(attend)(q * MANY),
    "func.vmap of grad": lambda q: func.vmap(func.grad(loss))(q * MANY),
    "grad of vmap": lambda q: grad_of(lambda x: func.vmap(loss)(x * MANY).sum(), q),
    "forward mode": _tangent,
    "inference mode": lambda q: torch.inference_mode()(attend)(q),
}


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_holds_past_the_limit(monkeypatch, promise):
    q = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = PROMISES[promise](q)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * B * H * T)
    torch.testing.assert_close(PROMISES[promise](q), expected)


@pytest.mark.parametrize("name", ["q", "slopes", "mask"])
def test_a_write_before_the_backward_is_seen(monkeypatch, name):
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * B * H * T)
    given = {
        "q": torch.randn(B, T, H, D, requires_grad=True),
        "slopes": torch.rand(H),
        "mask": torch.ones(T, T, dtype=torch.bool),
    }
    out = attend(given["q"], position=Alibi(given["slopes"]), mask=given["mask"])
    with torch.no_grad():
        given[name].zero_()
    with pytest.raises(RuntimeError, match=r"written to before the backward|modified by an inplace"):
        out.sum().backward()


@dataclass(frozen=True, eq=False)
class PairBias(PositionScheme):
    """A bias for each pair, (H, T, T), found by the shape of scores."""

    bias: Tensor

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores + self.bias[:, : scores.shape[2], : scores.shape[3]]


class Shifted(Alibi):
    """A subclass of a scheme that goes by blocks, which does not."""

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return super().score_mod(scores, distance) + torch.arange(scores.shape[2]).double()[:, None].sin() * scores


@pytest.mark.parametrize("scheme", [PairBias(torch.rand(H, T + 2, T, dtype=torch.float64)), Shifted()])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_score_mod_of_ones_own_gets_all_scores(monkeypatch, scheme, wrapped):
    scheme = OfHeads(scheme, 0, H) if wrapped else scheme
    q = torch.randn(B, T, H, D, dtype=torch.float64)
    expected = attend(q, position=scheme), grad_of(lambda x: loss(x, position=scheme), q)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * B * H * T)
    actual = attend(q, position=scheme), grad_of(lambda x: loss(x, position=scheme), q)
    torch.testing.assert_close(actual, expected)


class Recency(PositionScheme):
    """A scheme of one's own that goes by distance alone, and says so."""

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores - 0.1 * distance.abs()

    def is_elementwise(self) -> bool:
        return True


def test_a_score_mod_of_ones_own_may_go_by_blocks(monkeypatch):
    q, heights = torch.randn(B, T, H, D, dtype=torch.float64), []
    block = reference._attend_block
    expected = attend(q, position=Recency())
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * B * H * T)
    monkeypatch.setattr(reference, "_attend_block", lambda q, *rest: heights.append(q.shape[2]) or block(q, *rest))
    torch.testing.assert_close(attend(q, position=Recency()), expected)
    assert heights == [2, 2, 2]


# Integers under vmap: their values are read by no check, and by nothing else.

INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "key_lengths": lambda q, n: attend(q, key_lengths=n),
    "key_starts": lambda q, n: attend(q, key_starts=n - 1, causal=False),
    "query_starts": lambda q, n: attention(q[:, :1], q, q, query_starts=n - 1, causal=True, position=Rope()),
    "positions": lambda q, n: attend(q, positions_q=n[:, None] * 3 + torch.arange(T), position=Rope()),
    "cu_seqlens": lambda q, n: attention(
        q[0], q[0], q[0], layout="thd", cu_seqlens_q=torch.cat((n[:1] * 0, n[:1], n[:1] * 0 + T)), position=Rope()
    ),
    "block_table": lambda q, n: attention(
        q[:, :1], PAGES, PAGES, block_table=n[:, None] % 2, key_lengths=n % 2 + 1, position=Rope()
    ),
    "axes": lambda q, n: attention(
        q, q, q, positions_q=POSITIONS, positions_k=POSITIONS, position=Rope(axes=n.repeat(2) % 2)
    ),
}
PAGES = torch.randn(2, 3, H, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
POSITIONS = torch.arange(2 * T).view(2, 1, T)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_may_differ_under_vmap(name):
    function = INTEGERS[name]
    expected = torch.stack([function(q, n) for q, n in zip(MANY, LENGTHS, strict=True)])
    torch.testing.assert_close(func.vmap(function)(MANY, LENGTHS), expected)
