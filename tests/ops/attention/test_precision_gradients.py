"""Gradients of 8-bit products: those of products in 16 bits, with the 8-bit output and log-sum-exp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ropewalk import Alibi, QKNorm, QuantizedProducts, ReRope, Rope, T5Bias, apply_rope, attention, rope_table
from ropewalk.ops.attention import reference

H, K, D = 4, 2, 16
PRECISIONS = {values: QuantizedProducts(values=values, backward="16-bit") for values in ("16-bit", "float8")}


def draw(queries: int = 20, keys: int = 140, value_width: int = D) -> list[torch.Tensor]:
    shapes = ((1, H, queries, D), (1, K, keys, D), (1, K, keys, value_width))
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def formulas(
    xs: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, grads: tuple[torch.Tensor, torch.Tensor], **call: Any
) -> list[torch.Tensor]:
    """dq, dk, dv and dsink by the definition's formulas, for a causal call of unmapped features."""
    (q, k, v), (grad_out, grad_lse) = ([x.detach() for x in ys] for ys in (xs, grads))
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    scale, queries, keys = D**-0.5, q.shape[2], k.shape[2]
    s = q @ k.mT * scale
    cap = call.get("softcap")
    capped = s if cap is None else cap * torch.tanh(s / cap)
    hidden = torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries
    p = torch.exp(capped - lse[..., None]).masked_fill(hidden, 0)
    delta = (grad_out * out).sum(-1)
    ds = p * (grad_out @ v.mT - delta[..., None] + grad_lse[..., None])
    if cap is not None:
        ds = ds * (1 - (capped / cap) ** 2)
    found = [ds @ k * scale, ds.mT @ q * scale, p.mT @ grad_out]
    found[1:] = [x.unflatten(1, (K, -1)).sum(2) for x in found[1:]]
    if "sinks" in call:
        found.append((torch.exp(call["sinks"].detach()[:, None] - lse) * (grad_lse - delta)).sum((0, 2)))
    return found


@pytest.mark.parametrize("values", PRECISIONS)
@pytest.mark.parametrize("names", [(), ("sinks",), ("softcap",), ("sinks", "softcap")])
def test_they_are_those_of_the_formulas(monkeypatch, values, names):
    options = {"sinks": torch.linspace(-1, 2, H).double().requires_grad_(), "softcap": 2.0}
    call = {name: options[name] for name in names}
    xs = draw(value_width=24)
    inputs = [*xs, *([options["sinks"]] if "sinks" in names else [])]
    keywords = {"precision": PRECISIONS[values], "layout": "bhtd", "causal": True, "return_lse": True, **call}
    out, lse = attention(*xs, **keywords)
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, grads)
    expected = formulas(xs, out.detach(), lse.detach(), grads, **call)
    torch.testing.assert_close(list(found), expected, rtol=1e-9, atol=1e-9)
    plain = torch.autograd.grad(attention(*xs, **{**keywords, "precision": None}), inputs, grads)
    assert all(0 < (x - y).norm() < 0.2 * y.norm() for x, y in zip(found, plain, strict=True))
    with torch.no_grad():
        for x, y in zip(attention(*xs, **keywords), (out, lse), strict=True):
            assert torch.equal(x, y)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 140 * H * 7)  # blocks of 7 queries
    again = attention(*xs, **keywords)
    torch.testing.assert_close(again, (out, lse))
    torch.testing.assert_close(torch.autograd.grad(again, inputs, grads), found)
    alone = torch.autograd.grad(attention(*xs, **keywords)[1], inputs, grads[1], allow_unused=True)
    zero = formulas(xs, out.detach(), lse.detach(), (torch.zeros_like(out), grads[1]), **call)
    torch.testing.assert_close([alone[0], alone[1]], zero[:2], rtol=1e-9, atol=1e-9)


def test_they_pass_the_map_of_features_a_norm_and_a_gate():
    xs, weights = draw(), [torch.rand(D, dtype=torch.float64).requires_grad_() for _ in range(2)]
    gate = torch.randn(1, H, 20, D, dtype=torch.float64).requires_grad_()
    keywords = {"precision": PRECISIONS["16-bit"], "layout": "bhtd", "causal": True}
    out = attention(*xs, **keywords, position=Rope(), norm=QKNorm(*weights), gate=gate)
    found = torch.autograd.grad(out.sum(), [*xs, *weights, gate])

    def prepare(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        positions = torch.arange(140 - x.shape[2], 140)
        cos, sin = rope_table(positions, 10000.0 ** (-torch.arange(0, D, 2).double() / D))
        return apply_rope(x, None, cos, sin, layout="bhtd")

    q, k, v = xs
    plain = attention(prepare(q, weights[0]), prepare(k, weights[1]), v, **keywords) * torch.sigmoid(gate)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), [*xs, *weights, gate]), rtol=1e-4, atol=1e-4)


SCHEMES = {
    "rerope": (ReRope(20), []),
    "alibi": (Alibi(slopes := torch.rand(H).requires_grad_()), [slopes]),
    "t5": (T5Bias(table := torch.randn(8, H).requires_grad_()), [table]),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_gets_its_own(name):
    scheme, learned = SCHEMES[name]
    xs = draw()
    mask = torch.rand(20, 140) < 0.4
    mask[3] = False
    keywords = {"position": scheme, "layout": "bhtd", "mask": mask[None, None]}
    found, plain = (
        torch.autograd.grad(attention(*xs, **keywords, precision=x).square().sum(), [*xs, *learned])
        for x in (PRECISIONS["16-bit"], None)
    )
    for x, y in zip(found, plain, strict=True):
        assert 0 < (x - y).norm() < 0.05 * y.norm()
    assert (found[0][:, :, 3] == 0).all()


def test_what_attends_nothing_gets_zeros_and_poison_stays_where_it_is():
    xs = draw(140, 140)
    with torch.no_grad():
        for x in xs[1:]:
            x[:, :, 130:] = torch.nan
    keywords = {"precision": PRECISIONS["float8"], "layout": "bhtd", "key_lengths": torch.tensor([130])}
    out = attention(*xs, **keywords)
    dq, dk, dv = torch.autograd.grad(out.sum(), xs)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert (dk[:, :, 130:] == 0).all()
    assert (dv[:, :, 130:] == 0).all()


def test_low_dtypes_round_the_output_first():
    """δ is of the output as it is returned."""
    xs = [x.detach().to(torch.bfloat16).requires_grad_() for x in draw()]
    wide = [x.detach().double().requires_grad_() for x in xs]
    keywords = {"precision": PRECISIONS["16-bit"], "layout": "bhtd", "causal": True, "return_lse": True}
    out, lse = attention(*xs, **keywords)
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), xs, grads)
    expected = formulas(wide, out.double(), lse.double(), tuple(x.double() for x in grads))
    for x, y in zip(found, expected[:3], strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("through", ["q", "all", "penalty"])
def test_a_second_differentiation_raises(through):
    xs = draw()
    inputs = xs[:1] if through == "q" else xs
    out = attention(*xs, layout="bhtd", precision=PRECISIONS["16-bit"])
    first = torch.autograd.grad(out.sum() if through == "penalty" else out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice: attention with precision"):
        torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


def test_they_are_traced():
    torch._dynamo.reset()
    xs = [x.detach()[..., :2].requires_grad_() for x in draw()]
    keywords = {"precision": PRECISIONS["float8"], "layout": "bhtd", "causal": True}
    compiled = torch.compile(lambda *xs: attention(*xs, **keywords), backend="aot_eager", fullgraph=True)
    out, expected = compiled(*xs), attention(*xs, **keywords)
    torch.testing.assert_close(out, expected)
    found, plain = (torch.autograd.grad(x.square().sum(), xs) for x in (out, expected))
    torch.testing.assert_close(found, plain)
