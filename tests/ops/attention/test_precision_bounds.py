"""Errors of 8-bit products against exact attention: within bounds that follow from their units, and small."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ropewalk import QuantizedProducts, Rope, apply_rope, attention, rope_table
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.quantise.reference import transform
from ropewalk.ops.attention.reference import quantise_call

QUERIES, D = 64, 128


class Case(NamedTuple):
    """q, k and v of one head whose features are mapped, (T, D), and the largest errors of the output."""

    draw: Callable[[], tuple[Tensor, Tensor, Tensor]]
    int8: float
    float8: float


def normal(keys: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(n, D, dtype=torch.float64) for n in (QUERIES, keys, keys))  # type: ignore[return-value]


def rotated(x: Tensor, keys: int = 1024) -> Tensor:
    """As Rope does it to the last tokens of a sequence."""
    positions = torch.arange(keys - x.shape[0], keys)
    cos, sin = rope_table(positions, 10000.0 ** (-torch.arange(0, D, 2).double() / D))
    return apply_rope(x[None, :, None], None, cos, sin)[0, :, 0]


def outliers(*, rotates: bool, widens: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Four channels of the keys with a large mean, or eight times as wide."""
    q, k, v = normal()
    channels = torch.randperm(D)[:4]
    if widens:
        k[:, channels] *= 8
    else:
        k[:, channels] += 10 * torch.randn(4).sign()
    return (rotated(q), rotated(k), v) if rotates else (q, k, v)


def with_sink(mean: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """A first key of 4096 that half of the attention goes to, whose value is small; the others' have a mean."""
    q, k, v = normal(4096)
    v = v + mean * torch.randn(D).sign()
    direction = torch.randn(D, dtype=torch.float64)
    direction /= direction.norm()
    q = q + (3 - q @ direction)[:, None] * direction
    k[0] = 9 / 3 * D**0.5 * direction
    v[0] *= 0.01
    return q, k, v


def with_mean() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal()
    return q, k, v + torch.randn(D).sign()


def with_zero_rows() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal()
    q[::3] = k[::5] = v[::7] = 0
    return q, k, v


CASES = {
    "normal": Case(normal, 0.013, 0.04),
    "outliers": Case(lambda: outliers(rotates=False), 0.022, 0.05),
    "outliers, rotated": Case(lambda: outliers(rotates=True), 0.022, 0.05),
    "wide channels": Case(lambda: outliers(rotates=False, widens=True), 0.022, 0.05),
    "wide channels, rotated": Case(lambda: outliers(rotates=True, widens=True), 0.022, 0.05),
    "sink": Case(lambda: with_sink(mean=0.5), 0.022, 0.05),
    # The mean of 128 or 256 values is noise here, and what rounding it costs is half of a small output.
    "sink, values without a mean": Case(with_sink, 0.022, 0.12),
    "values with a mean": Case(with_mean, 0.013, 0.04),
    "zero rows": Case(with_zero_rows, 0.013, 0.04),
}


class Bounds(NamedTuple):
    """The largest error of each row: of the log-sum-exp, (Tq,), and of the output, (Tq, D)."""

    lse: Tensor
    out: Tensor


def find_bounds(q: Tensor, k: Tensor, v: Tensor, p: Tensor, precision: QuantizedProducts, causal: bool) -> Bounds:
    """Bounds that follow from half a unit's error of each number; p: the exact probabilities."""
    xs = [x[None, None] for x in (q, k, v)]
    numbers = quantise_call(make_call(*xs, precision=precision, causal=causal, layout="bhtd"))
    n = torch.arange(k.shape[0])
    unit_q, unit_k = numbers.q.unit[0, 0], numbers.k.unit[0, 0].flatten()[n // 128 * 4 + n % 8 // 2]
    shift = k[:128].mean(0) if causal else k[torch.arange(256) * len(k) // 256]
    shift = (shift if causal else shift.mean(0)) if precision.centre else torch.zeros_like(k[0])
    x_k = transform(k - shift) if precision.hadamard else k - shift
    sum_q = numbers.q.x[0, 0].double().abs().sum(1) * unit_q
    error = sum_q[:, None] * unit_k / 2 + x_k.abs().sum(1) * unit_q[:, None] / 2
    if causal:
        error = error.masked_fill(n > torch.arange(len(q))[:, None] + len(k) - len(q), 0)
    epsilon = D**-0.5 * error.amax(1)
    out = torch.expm1(2 * epsilon)[:, None] * (p @ v.abs())
    if numbers.v is not None:
        rest = (v - numbers.v.mean[0, 0]).abs()
        rounding = rest / 16 + numbers.v.unit[0, 0][n // 128, None] / 1024
        out = out + torch.exp(2 * epsilon)[:, None] * (p @ rounding)
    return Bounds(epsilon, out)


@pytest.mark.parametrize("values", ["16-bit", "float8"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_within_bounds_and_small(name, values, causal):
    case, precision = CASES[name], QuantizedProducts(values=values)
    q, k, v = (x.bfloat16() for x in case.draw())
    keywords = {"causal": causal, "layout": "bhtd", "return_lse": True}
    exact, exact_lse = attention(*(x.double()[None, None] for x in (q, k, v)), **keywords)
    xs = [x.float()[None, None] for x in (q, k, v)]
    out, lse = attention(*xs, precision=precision, **keywords)
    difference, of_lse = (out - exact)[0, 0].abs(), (lse - exact_lse)[0, 0].abs()
    assert difference.norm() < (case.int8 if values == "16-bit" else case.float8) * exact.norm()
    if name == "normal":
        assert of_lse.square().mean().sqrt() < 0.01
    hidden = torch.arange(len(k)) > torch.arange(QUERIES)[:, None] + len(k) - QUERIES
    scores = q.double() @ k.double().T * D**-0.5
    p = (scores.masked_fill(hidden, -torch.inf) if causal else scores).softmax(1)
    bounds = find_bounds(q.double(), k.double(), v.double(), p, precision, causal)
    assert (of_lse <= bounds.lse + 1e-4).all()
    assert (difference <= bounds.out + 1e-4).all()
    assert (of_lse > bounds.lse / 1000).any()  # the bounds are no larger than they have to be by orders


def test_turning_and_centring_are_what_keeps_errors_small():
    worse = {"outliers": {"hadamard": False, "centre": False}, "wide channels, rotated": {"hadamard": False}}
    for name, options in worse.items():
        q, k, v = (x.float()[None, None] for x in CASES[name].draw())
        exact = attention(q, k, v, layout="bhtd")
        good, bad = (attention(q, k, v, layout="bhtd", precision=QuantizedProducts(**x)) - exact for x in ({}, options))
        assert bad.norm() > 2 * good.norm()


def test_a_sink_among_values_without_a_mean_is_better_off_without_centring():
    q, k, v = (x.float()[None, None] for x in with_sink())
    out = attention(q, k, v, layout="bhtd", precision=QuantizedProducts(values="float8", centre=False))
    exact = attention(q, k, v, layout="bhtd")
    assert (out - exact).norm() < 0.04 * exact.norm()


def test_centred_values_keep_their_mean():
    q, k, v = (x.float()[None, None] for x in with_mean())
    exact = attention(q, k, v + 10, layout="bhtd")
    good, bad = (
        attention(q, k, v + 10, layout="bhtd", precision=QuantizedProducts(values="float8", centre=x)) - exact
        for x in (True, False)
    )
    assert bad.norm() > 3 * good.norm()


def test_padding_and_hidden_keys_leave_the_bounds_alone():
    """Padding with garbage enters no unit; a key that is hidden enters that of its group."""
    q, k, v = (x.float()[None, None] for x in normal())
    keywords = {"layout": "bhtd", "key_lengths": torch.tensor([1000]), "precision": "int8-fp8"}
    out = attention(q, k, v, **keywords)
    for x in (k, v):
        x[:, :, 1000:] = 1e38
    assert torch.equal(attention(q, k, v, **keywords), out)
    mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool)
    mask[..., 8] = False
    clean = attention(q, k, v, mask=mask, **keywords)
    k[:, :, 8] = 1e4
    hidden = attention(q, k, v, mask=mask, **keywords)
    assert not torch.allclose(hidden, clean, atol=1e-2)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("position", [None, Rope()])
def test_scores_of_equal_keys_are_equal(position):
    """Keys that are one are their shift: nothing is left to round."""
    q = torch.randn(1, 20, 1, D)
    k = torch.randn(D).expand(1, 300, 1, D).contiguous()
    v = torch.randn(1, 300, 1, D)
    keywords = {} if position is None else {"position": position}
    out, exact = (attention(q, k, v, precision=x, **keywords) for x in ("int8", None))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4 if position is None else 2e-2)
