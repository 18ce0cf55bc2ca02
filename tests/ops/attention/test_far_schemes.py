"""Attention with ReRope and SelfExtend against their formulas, and as models call it: decoding, padding, packing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from helpers.attention_calls import ROUNDINGS, draw, plainly, refusal_of, value_and_grads
from helpers.modes import needs_kernels
from torch._dynamo.testing import CompileCounterWithBackend

from ropewalk import PositionScheme, ReRope, Rope, SelfExtend, attention, explain_choice
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.launch import remembered
from ropewalk.testing import assert_close_to_truth

IMPLS = [pytest.param("triton", marks=needs_kernels), "reference"]
T, H, K, D, W = 40, 2, 1, 16, 9
SCHEMES = {
    "rerope": ReRope(W),
    "leaky": ReRope(W, leak=2.5),
    "extend": SelfExtend(W, 4),
    "rerope-log": ReRope(W, log_n=8),
    "leaky-log": ReRope(W, leak=4, log_n=16, rope=Rope(500.0)),
    "extend-log": SelfExtend(W, 3, log_n=8),
    "rerope-factor": ReRope(W, rope=Rope(attention_factor=1.2)),
    "extend-interleaved": SelfExtend(W, 2, rope=Rope(interleaved=True, attention_factor=0.9)),
    # log_n multiplies queries, and not their rotated features alone.
    "rerope-log-partial": ReRope(W, log_n=8, rope=Rope(rotary_dim=8)),
    "leaky-log-offset": ReRope(W, leak=4, log_n=8, rope=Rope(rotary_dim=6, rotary_offset=4, interleaved=True)),
    "extend-log-last": SelfExtend(W, 3, log_n=8, rope=Rope(rotary_offset=10)),
}


def draw_one(device, dtype=torch.float32, **sizes):
    return draw(device, dtype, **{"batch": 1, "queries": T, "keys": T, "heads": H, "key_heads": K, **sizes})


# The formulas: one dense matrix of relative positions, and pairs of features as complex numbers that turn by them


def relative_positions(scheme, m, n):
    """By how many positions a score turns, float64, for queries at m (Tq, 1) and keys at n (Tk,)."""
    w, d = scheme.window, m - n
    if isinstance(scheme, SelfExtend):
        shift = w - w // scheme.group
        far = torch.div(m, scheme.group, rounding_mode="floor") - torch.div(n, scheme.group, rounding_mode="floor")
        far = far + d.sign() * shift
    elif scheme.leak is None:
        far = d.clamp(-w, w)
    else:
        far = d.sign() * (w + (d.abs() - w) / scheme.leak)
    return torch.where(d.abs() < w, d.double(), far.double())


def naive(scheme, q, k, v, *, causal=False, positions=None):
    """Attention by the formula, every step but the angles in the tensors' dtype; q, k and v are (B, T, H, D)."""
    rope = scheme.rope or Rope()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    m, n = torch.arange(tokens_k - tokens_q, tokens_k, device=q.device), torch.arange(tokens_k, device=q.device)
    ahead = n > m[:, None]
    if positions is not None:
        m, n = positions
    start = rope.rotary_offset
    half = (rope.rotary_dim or q.shape[3] - start) // 2
    stop = start + 2 * half
    omega = rope.base ** (-torch.arange(half, device=q.device).double() / half)
    angles = relative_positions(scheme, m[:, None], n)[..., None] * omega
    turned = torch.polar(torch.ones_like(angles), angles).to(q.dtype.to_complex())

    def pairs(x):
        x = x[..., start:stop]
        if rope.interleaved:
            return torch.complex(x[..., 0::2], x[..., 1::2])
        return torch.complex(x[..., :half], x[..., half:])

    scores = torch.einsum("bhmi,bhni,mni->bhmn", pairs(q), pairs(k).conj(), turned).real * rope.attention_factor**2
    scores = scores + sum(q[..., rest] @ k[..., rest].mT for rest in (slice(start), slice(stop, None)))
    scores = scores / math.sqrt(q.shape[3])
    if scheme.log_n is not None:
        scores = scores * ((m + 1).double().log() / math.log(scheme.log_n)).clamp(min=1).to(q.dtype)[:, None]
    if causal:
        scores = scores.masked_fill(ahead, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


# The formula turns a product once, by an angle in float64; attention turns q and k each, by rounded cosines and sines.
ROUNDINGS_OF_BOTH = 2 * ROUNDINGS


def assert_is_the_formula(scheme, tensors, impl, positions=None, **keywords):
    """The output and all gradients, in float32; the tables of cos and sin are float32 anyway."""
    weights = torch.randn_like(tensors[0], dtype=torch.float64)
    at = {} if positions is None else {"positions_q": positions[0][None], "positions_k": positions[1][None]}
    actual = value_and_grads(attention, tensors, weights, position=scheme, impl=impl, **at, **keywords)
    truth, baseline = (
        value_and_grads(lambda *x: naive(scheme, *x, positions=positions, **keywords), inputs, weights)
        for inputs in ([x.double() for x in tensors], tensors)
    )
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert_close_to_truth(mine, exact, plain, ROUNDINGS_OF_BOTH)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_schemes_are_their_formulas(device, impl, scheme, causal):
    assert_is_the_formula(SCHEMES[scheme], draw_one(device), impl, causal=causal)


MADE = {
    "rerope": ReRope,
    "leaky": lambda window: ReRope(window, leak=3),
    "extend": lambda window: SelfExtend(window, 3),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, T // 2, T - 1, T, T + 1, 10 * T])
@pytest.mark.parametrize("scheme", MADE)
@pytest.mark.parametrize("impl", IMPLS)
def test_windows_up_to_the_length_and_beyond(device, impl, scheme, window, causal):
    assert_is_the_formula(MADE[scheme](window), draw_one(device), impl, causal=causal)


@pytest.mark.parametrize("scheme", ["rerope", "leaky", "extend-log"])
@pytest.mark.parametrize("impl", IMPLS)
def test_positions_of_the_callers_are_those_of_the_formula(device, impl, scheme):
    tensors = draw_one(device, queries=30)
    positions = torch.randint(0, 60, (30,), device=device), torch.randint(0, 60, (T,), device=device)
    for causal in (False, True):
        assert_is_the_formula(SCHEMES[scheme], tensors, impl, positions=positions, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", MADE)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_window_of_all_tokens_is_rope(device, impl, scheme, causal):
    tensors = draw_one(device)
    weights = torch.randn_like(tensors[0])

    def run(position):
        return value_and_grads(attention, tensors, weights, position=position, causal=causal, impl=impl)

    expected = run(Rope())
    for window in (T, T + 1, 2**40):
        for mine, theirs in zip(run(MADE[scheme](window)), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.allclose(run(MADE[scheme](T // 2))[0], expected[0])


def test_what_does_nothing_to_far_pairs_is_rope(device):
    """A leak or a group of 1."""
    tensors = draw_one(device)
    for scheme in (ReRope(W, leak=1), SelfExtend(W, 1)):
        for causal in (False, True):
            expected = attention(*tensors, position=Rope(), causal=causal)
            torch.testing.assert_close(attention(*tensors, position=scheme, causal=causal), expected)


@pytest.mark.parametrize("of", ["near", "past", "future"])
def test_log_n_multiplies_queries(device, of):
    """By max(1, ln(m + 1) / ln(log_n)), whatever they meet; nothing happens to keys."""
    at = torch.tensor([[-7, 0, 1, 6, 7, 8, 100, 10**6]], device=device)
    factor = (at.clamp(min=0) + 1).double().log() / math.log(8)
    assert bool((factor > 1).any())
    assert bool((factor < 1).any())
    factor = factor.clamp(min=1).float()[..., None]

    def table(scheme, tokens):
        if of != "near":
            return scheme.far_rotation(at, D, of if tokens == "queries" else "keys")
        return scheme.query_rotation(at, D) if tokens == "queries" else scheme.rotation(at, D)

    for plain, grown in (
        (ReRope(W), ReRope(W, log_n=8)),
        (ReRope(W, leak=2), ReRope(W, leak=2, log_n=8)),
        (SelfExtend(W, 2), SelfExtend(W, 2, log_n=8)),
    ):
        expected = table(plain, "queries") or plain.rotation(at, D)
        mine = table(grown, "queries")
        torch.testing.assert_close(mine.cos, expected.cos * factor, rtol=2**-23, atol=0)
        torch.testing.assert_close(mine.sin, expected.sin * factor, rtol=2**-23, atol=0)
        of_keys, expected = table(grown, "keys"), table(plain, "keys")
        if expected is None:
            assert of_keys is None
        else:
            assert torch.equal(of_keys.cos, expected.cos)
            assert torch.equal(of_keys.sin, expected.sin)


# As models call it


@pytest.mark.parametrize("scheme", ["rerope-log", "leaky", "extend", "rerope-factor"])
@pytest.mark.parametrize("impl", IMPLS)
def test_keys_are_kept_as_they_are(device, impl, scheme):
    """Token by token, and chunk by chunk: a key is kept unrotated, and serves near and far queries to come."""
    q, k, v = draw_one(device, batch=2)
    call = {"position": SCHEMES[scheme], "causal": True, "impl": impl}
    expected = attention(q, k, v, **call)
    for start, stop in ((0, 5), (5, 6), (6, 30), (30, T - 1), (T - 1, T)):
        chunk = attention(q[:, start:stop], k[:, :stop], v[:, :stop], **call)
        torch.testing.assert_close(chunk, expected[:, start:stop])
    # In a cache that was allocated for more than it holds, whose rows stand at other tokens.
    first = torch.tensor([12, 37], device=device)
    places = first[:, None] + torch.arange(3, device=device)
    rows = torch.arange(2, device=device)[:, None]
    arguments = {"query_starts": first, "key_lengths": first + 3}
    chunk = attention(q[rows, places], k, v, **arguments, **call)
    torch.testing.assert_close(chunk, expected[rows, places])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", ["rerope", "leaky-log", "extend"])
@pytest.mark.parametrize("impl", IMPLS)
def test_padding_on_the_left_changes_nothing(device, impl, scheme, causal):
    tensors = draw_one(device, batch=2)
    weights = torch.randn_like(tensors[0])
    call = {"position": SCHEMES[scheme], "causal": causal, "impl": impl}
    starts = [0, 13]
    weights[1, : starts[1]] = 0  # what padding gives is of no account
    padded = value_and_grads(attention, tensors, weights, key_starts=torch.tensor(starts, device=device), **call)
    for row, start in enumerate(starts):
        alone = [x[row : row + 1, start:] for x in (*tensors, weights)]
        for mine, expected in zip(padded, value_and_grads(attention, alone[:3], alone[3], **call), strict=True):
            torch.testing.assert_close(mine[row : row + 1, start:], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", ["rerope-log", "leaky", "extend"])
@pytest.mark.parametrize("impl", IMPLS)
def test_packed_sequences_are_calls_of_their_own(device, impl, scheme, causal):
    ends_q, ends_k = (torch.tensor(ends, device=device) for ends in ([0, 20, 20, 21, 38], [0, 15, 18, 30, 39]))
    tensors = [x[0] for x in draw_one(device)]
    weights = torch.randn_like(tensors[0])
    call = {"position": SCHEMES[scheme], "causal": causal, "impl": impl}
    packed = value_and_grads(
        attention, tensors, weights, layout="thd", cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **call
    )
    spans = [[slice(*bounds) for bounds in pairwise(ends.tolist())] for ends in (ends_q, ends_k)]
    for of_q, of_k in zip(*spans, strict=True):
        alone = [x[None, rows] for x, rows in zip((*tensors, weights), (of_q, of_k, of_k, of_q), strict=True)]
        expected = value_and_grads(attention, alone[:3], alone[3], **call)
        for mine, theirs, rows in zip(packed, expected, (of_q, of_q, of_k, of_k), strict=True):
            torch.testing.assert_close(mine[rows], theirs[0])


@pytest.mark.parametrize("scheme", ["rerope", "leaky-log", "extend-interleaved"])
@pytest.mark.parametrize("impl", IMPLS)
def test_long_caches_are_decoded(device, impl, scheme):
    """As many keys as have kernels of their own, with another window in every row."""
    q, k, v = draw_one(device, batch=2, queries=2, keys=300)
    first = torch.tensor([297, 60], device=device)
    call = {"position": SCHEMES[scheme], "causal": True, "query_starts": first, "key_lengths": first + 2}
    for more in ({}, {"key_starts": torch.tensor([250, 3], device=device)}, {"window": 100}):
        out = attention(q, k, v, impl=impl, **call, **more)
        truth, baseline = (plainly(dtype)(q, k, v, **call, **more) for dtype in (torch.float64, torch.float32))
        assert_close_to_truth(out, truth, baseline, ROUNDINGS)


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_hold_keys_as_they_are(device, impl):
    q, k, v = draw_one(device, batch=2, queries=3, keys=48)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], device=device)
    pages_k, pages_v = (torch.empty(6, 16, K, D, device=device) for _ in range(2))
    pages_k[table], pages_v[table] = (x.reshape(2, 3, 16, K, D) for x in (k, v))
    lengths = torch.tensor([48, 20], device=device)
    call = {"position": ReRope(W), "key_lengths": lengths, "query_starts": lengths - 3}
    for causal in (True, False):
        out = attention(q, pages_k, pages_v, block_table=table, causal=causal, impl=impl, **call)
        expected = attention(q, k, v, causal=causal, impl="reference", **call)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scheme", [ReRope(W), SelfExtend(W, 2)])
def test_keys_that_were_rotated_are_refused(device, scheme):
    with pytest.raises(ValueError, match=f"keys_rotated is True, but {type(scheme).__name__} rotates a key in one way"):
        attention(*draw_one(device), position=scheme, keys_rotated=True)


def test_a_choice_is_explained(device):
    tensors = draw_one(device, torch.float16)
    explained = explain_choice(*tensors, position=ReRope(W), causal=True)
    assert refusal_of("sdpa", *tensors, position=ReRope(W), causal=True) == "far"
    if device.type == "cpu":
        assert explained.name == "reference"
    # Where nothing is far it is RoPE, which all know.
    of_rope = explain_choice(*tensors, position=Rope(), causal=True)
    nothing_far = explain_choice(*tensors, position=ReRope(T), causal=True)
    assert (nothing_far.name, nothing_far.others) == (of_rope.name, of_rope.others)
    # Positions may be further apart than there are tokens.
    positions = torch.arange(T, device=device)[None]
    assert refusal_of("sdpa", *tensors, position=ReRope(T), positions_q=positions, positions_k=positions) == "far"


# What is remembered


@pytest.mark.parametrize("scheme", [lambda rope: ReRope(W, rope=rope), lambda rope: SelfExtend(W, 2, rope=rope)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_nested_tensor_that_was_written_to_is_noticed(device, impl, scheme):
    tensors = draw_one(device)
    inv_freq = 10000.0 ** (-torch.arange(D // 2, device=device).double() / (D // 2))
    position = scheme(Rope(inv_freq=inv_freq))
    before = attention(*tensors, position=position, impl=impl)
    torch.testing.assert_close(before, attention(*tensors, position=scheme(Rope()), impl=impl))
    inv_freq.mul_(0.5)
    after = attention(*tensors, position=position, impl=impl)
    assert not torch.allclose(after, before)
    assert torch.equal(after, attention(*tensors, position=scheme(Rope(inv_freq=inv_freq.clone())), impl=impl))


def test_tables_are_made_once_for_many_lengths(device, monkeypatch):
    calls = []
    make = ReRope.far_rotation
    monkeypatch.setattr(ReRope, "far_rotation", lambda *rest: (calls.append(rest[3]), make(*rest))[1])
    remembered._remembered.clear()

    def run(tokens, position):
        q, k, v = (x.transpose(1, 2) for x in draw_one(device, queries=tokens, keys=tokens))
        return make_call(q, k, v, position=position, layout="bhtd")

    for tokens in (10, 20, 40, 256):
        for position in (ReRope(W, leak=2, rope=Rope(77.0)), ReRope(W, leak=2, rope=Rope(77.0))):
            run(tokens, position)
    assert calls == ["past", "future", "keys"]
    for other in (ReRope(W + 1, leak=2, rope=Rope(77.0)), ReRope(W, leak=3, rope=Rope(77.0)), ReRope(W, leak=2)):
        assert not torch.equal(run(40, other).far.tables.q_past.cos, run(40, position).far.tables.q_past.cos)
    assert calls == ["past", "future", "keys"] * 4
    run(W, position)  # nothing is far
    assert len(calls) == 12


# torch.compile


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize(("scheme", "causal"), [("rerope", True), ("leaky-log", False), ("extend", True)])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.slow
def test_one_graph_serves_many_lengths(device, impl, scheme, causal):
    call = {"position": SCHEMES[scheme], "causal": causal, "impl": impl}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **call), backend=counter, fullgraph=True)
    for length in (17, 23, 5, 40):  # in the shortest nothing is far
        tensors = draw_one(device, queries=length, keys=length)
        weights = torch.randn_like(tensors[0])
        expected = value_and_grads(attention, tensors, weights, **call)
        for mine, theirs in zip(value_and_grads(compiled, tensors, weights), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counter.frame_count <= 2  # the first length, and all others


@needs_kernels
def test_kernels_and_reference_are_one(device):
    """With everything at once."""
    tensors = draw_one(device, batch=2, queries=20)
    call = {
        "position": ReRope(W, leak=2, log_n=16),
        "causal": True,
        "window": 30,
        "softcap": 3.0,
        "sinks": torch.randn(H, device=device),
        "key_starts": torch.tensor([0, 4], device=device),
        "mask": torch.rand(2, 1, 20, T, device=device) > 0.2,
        "dropout_p": 0.2,
        "return_lse": True,
    }
    results = []
    for impl in ("triton", "reference"):
        leaves = [x.detach().requires_grad_() for x in tensors]
        torch.manual_seed(3)
        out, lse = attention(*leaves, impl=impl, **call)
        grads = torch.autograd.grad(out.sin().sum() + lse.clamp(min=-5).sin().sum(), leaves)
        results.append((out, lse, *grads))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# Schemes of one's own


@dataclass(frozen=True, eq=False)
class FarAlone(PositionScheme):
    """Near pairs turn, far ones do not."""

    def rotation(self, positions, head_dim):
        return Rope().rotation(positions, head_dim)

    def far_window(self):
        return W


@dataclass(frozen=True, eq=False)
class NearAlone(PositionScheme):
    """Far pairs turn, near ones do not."""

    def far_window(self):
        return W

    def far_rotation(self, positions, head_dim, of):
        return Rope().rotation(positions, head_dim)


@dataclass(frozen=True, eq=False)
class Learned(NearAlone):
    """What stretches far pairs is to be learned."""

    stretch: torch.Tensor

    def rotation(self, positions, head_dim):
        return Rope().rotation(positions, head_dim)

    def far_rotation(self, positions, head_dim, of):
        table = self.rotation(positions, head_dim)
        return table._replace(cos=table.cos * self.stretch, sin=table.sin * self.stretch)


@pytest.mark.both_modes
def test_what_kernels_cannot_turn_is_refused_with_a_reason(device):
    tensors = draw_one(device)
    stretch = torch.ones((), device=device, requires_grad=True)
    for scheme, code in ((FarAlone(), "far_tables"), (NearAlone(), "far_tables"), (Learned(stretch), "learned_tables")):
        explained = explain_choice(*tensors, position=scheme, causal=True)
        assert explained.name == "reference"
        assert refusal_of("triton", *tensors, position=scheme, causal=True) == code
        out = attention(*tensors, position=scheme, causal=True)
        assert out.isfinite().all()
    (grad,) = torch.autograd.grad(out.sum(), stretch)
    assert grad.abs() > 0


def test_schemes_may_be_made_in_what_is_compiled(device):
    tensors = draw_one(device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        return attention(q, k, v, position=ReRope(W, leak=2.0), causal=True)

    torch.testing.assert_close(attend(*tensors), attention(*tensors, position=ReRope(W, leak=2.0), causal=True))


@needs_kernels
def test_windows_are_no_constants_of_what_is_compiled(device):
    tensors = draw_one(device)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def attend(q, k, v, window):
        return attention(q, k, v, position=ReRope(window), causal=True, impl="triton")

    for window in (5, 7, 11, 19):
        expected = attention(*tensors, position=ReRope(window), causal=True, impl="triton")
        torch.testing.assert_close(attend(*tensors, window), expected)
    assert counter.frame_count <= 2


@needs_kernels
def test_far_windows_past_what_int32_holds(device):
    q, k, v = (torch.randn(1, tokens, 1, D, device=device) for tokens in (1, 2, 2))
    positions = {
        "positions_q": torch.tensor([[2**31 + 5]], device=device),
        "positions_k": torch.tensor([[0, 2**31 + 5]], device=device),
    }
    for window in (2**30, 2**31 + 5, 2**31 + 6):
        scheme = SelfExtend(window, 7)
        expected = attention(q, k, v, position=scheme, impl="reference", **positions)
        torch.testing.assert_close(attention(q, k, v, position=scheme, impl="triton", **positions), expected)
