"""Attention whose pairs are half-split inside blocks, one position axis for each, against float64."""

import pytest
import torch
from helpers import attention_definition
from helpers.attention_calls import ROUNDINGS
from helpers.modes import ON_GPU, needs_kernels
from helpers.rope_definition import pair_features

from ropewalk import QKNorm, ReRope, Rope, SelfExtend, apply_rope, attention
from ropewalk.ops.attention import tables
from ropewalk.testing import assert_close_to_truth, unchanged

B, H, K, T, D, P = 2, 4, 2, 6, 28, 12
START, HALF = 3, 12  # rotated are two blocks of 12 features, from the third on
AXES = torch.tensor([0] * 6 + [1] * 6)
OMEGA = 100.0 ** (-torch.arange(6, dtype=torch.float64).repeat(2) / 6)
IMPLS = [None, "reference", *([] if ON_GPU else ["sdpa"]), pytest.param("triton", marks=needs_kernels)]


def scheme_on(device, **changes):
    fields = {"inv_freq": OMEGA.float(), "rotary_offset": START, "pair_block": P, "axes": AXES.to(device)}
    return Rope(**{**fields, **changes})


def rotated(x, positions):
    """Rotate x (B, H, T, D) in the dtype of x: block b by positions[b], (B or 1, T)."""
    angles = torch.stack([positions[axis] for axis in AXES.tolist()], dim=-1).double() * OMEGA.float().double()
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = ([START + n for n in features] for features in pair_features(HALF, False, P))
    a, b = x[..., first], x[..., second]
    order = [n for n in range(x.shape[-1]) if n not in {*first, *second}] + first + second
    parts = (x[..., order[: -2 * HALF]], a * cos - b * sin, a * sin + b * cos)
    return torch.cat(parts, dim=-1)[..., torch.tensor(order).argsort()]


def attend(q, k, v, positions_q, positions_k, causal=False):
    """Attention by its definition, for (B, H, T, D)."""
    return attention_definition.attend(rotated(q, positions_q), rotated(k, positions_k), v, causal)


def make(queries=T, keys=T):
    shapes = (B, H, queries, D), (B, K, keys, D), (B, K, keys, D)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def two_axes(tokens):
    """Positions, (2, B, tokens), whose axes differ in each token."""
    first = torch.stack([torch.randperm(40)[:tokens] for _ in range(B)])
    return torch.stack((first, 39 - first))


def truths(function, tensors, cotangent):
    """A function's result and gradients in the dtype of its tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


@pytest.fixture(params=IMPLS, ids=str)
def impl(request):
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [T, 2])
def test_attention_and_its_gradients(impl, device, causal, queries):
    tensors, cotangent = make(queries), torch.randn(B, H, queries, D, dtype=torch.float64)
    positions_k = two_axes(T)
    positions_q = positions_k if queries == T else two_axes(queries)

    def define(q, k, v):
        return attend(q, k, v, positions_q, positions_k, causal)

    wanted = truths(define, tensors, cotangent)
    baselines = truths(define, [x.float() for x in tensors], cotangent)
    xs = [x.float().to(device).requires_grad_() for x in tensors]
    of_k = positions_k.to(device)
    of_q = of_k if queries == T else positions_q.to(device)
    keywords = {"position": scheme_on(device), "causal": causal, "positions_q": of_q, "positions_k": of_k}
    with unchanged([*xs, of_k]):
        out = attention(*xs, layout="bhtd", impl=impl, **keywords)
        grads = torch.autograd.grad(out, xs, cotangent.float().to(device))
    for actual, right, theirs in zip((out, *grads), wanted, baselines, strict=True):
        assert_close_to_truth(actual.detach().cpu(), right, theirs, ROUNDINGS)


@pytest.mark.parametrize("after", [False, True])
def test_a_norm_is_in_the_launch_of_the_rotation(impl, device, after, monkeypatch):
    tensors, cotangent = make(), torch.randn(B, H, T, D, dtype=torch.float64)
    tensors += [torch.randn(D, dtype=torch.float64) for _ in range(2)]
    positions = two_axes(T)

    def rms(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def define(q, k, v, q_weight, k_weight):
        if not after:
            return attend(rms(q, q_weight), rms(k, k_weight), v, positions, positions)
        q, k = (rms(rotated(x, positions), w) for x, w in ((q, q_weight), (k, k_weight)))
        zeros = torch.zeros_like(positions)
        return attend(q, k, v, zeros, zeros)

    wanted = truths(define, tensors, cotangent)
    baselines = truths(define, [x.float() for x in tensors], cotangent)
    calls = []
    once = tables.norm_and_rotate
    monkeypatch.setattr(tables, "norm_and_rotate", lambda *arguments: calls.append(1) or once(*arguments))
    xs = [x.float().to(device).requires_grad_() for x in tensors]
    where = positions.to(device)
    norm = QKNorm(*xs[3:], after=after)
    keywords = {"position": scheme_on(device), "positions_q": where, "positions_k": where, "layout": "bhtd"}
    out = attention(*xs[:3], norm=norm, impl=impl, **keywords)
    assert len(calls) == 1, "q and k are normed and rotated together"
    grads = torch.autograd.grad(out, xs, cotangent.float().to(device))
    for actual, right, theirs in zip((out, *grads), wanted, baselines, strict=True):
        assert_close_to_truth(actual.detach().cpu(), right, theirs, 4 * ROUNDINGS)


def test_keys_may_be_rotated_already(impl, device):
    q, k, v = (x.float().to(device) for x in make(2, 300))
    scheme = scheme_on(device, axes=None)
    table = scheme.rotation(torch.arange(300, device=device)[None], D)
    k_rotated = apply_rope(k, None, table.cos, table.sin, layout="bhtd", rotary_offset=START, pair_block=P)
    arguments = {"causal": True, "layout": "bhtd", "impl": impl, "position": scheme}
    found = attention(q, k_rotated, v, keys_rotated=True, **arguments)
    positions = torch.arange(300).expand(2, 1, -1)
    right = attend(*(x.cpu().double() for x in (q, k, v)), positions[..., -2:], positions, True)
    torch.testing.assert_close(found.cpu(), right.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention(q, k, v, **arguments).cpu(), right.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "scheme",
    [lambda rope: ReRope(3, leak=2.0, rope=rope), lambda rope: SelfExtend(3, 2, rope=rope)],
    ids=["leaky", "self-extend"],
)
def test_two_ranges_of_blocks(impl, device, scheme):
    """Far pairs are rotated inside the same blocks: features in half-split order give the same."""
    if impl == "sdpa":
        pytest.skip("sdpa refuses two ranges")
    rope = {"inv_freq": OMEGA.float(), "rotary_offset": START}
    first, second = pair_features(HALF, False, P)
    order = [*range(START), *(START + n for n in (*first, *second)), *range(START + 2 * HALF, D)]
    tensors = [x.float().to(device) for x in make(20, 20)]
    results = []
    for pair_block, features in ((P, slice(None)), (None, order)):
        xs = [x.clone().requires_grad_() for x in tensors]
        position = scheme(Rope(pair_block=pair_block, **rope))
        out = attention(xs[0][..., features], xs[1][..., features], xs[2], position=position, layout="bhtd", impl=impl)
        results.append([out, *torch.autograd.grad(out.square().sum(), xs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_calls_in_a_row_read_their_own_blocks(device):
    q, k, v = (x.float().to(device) for x in make())
    index = torch.arange(T).expand(2, 1, T)
    right = attend(*(x.cpu() for x in (q, k, v)), index, index)
    for _ in range(3):
        blocks = attention(q, k, v, position=scheme_on(device, axes=None), layout="bhtd")
        halves = attention(q, k, v, position=scheme_on(device, axes=None, pair_block=None), layout="bhtd")
        torch.testing.assert_close(blocks.cpu(), right, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(blocks, halves, rtol=1e-2)


def test_compiled_calls_equal_eager_ones(device):
    q, k, v = (x.float().to(device) for x in make())
    scheme, positions = scheme_on(device), two_axes(T).to(device)

    def function(q, k, v, positions):
        return attention(q, k, v, position=scheme, positions_q=positions, positions_k=positions, layout="bhtd")

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, positions), function(q, k, v, positions))


@pytest.mark.parametrize(
    ("fields", "error", "pattern"),
    [
        ({"pair_block": 8.0}, TypeError, "pair_block is 8.0, but must be an int or None"),
        ({"pair_block": 3}, ValueError, "pair_block is 3, but must be even and at least 2"),
        ({"pair_block": 8, "rotary_dim": 12}, ValueError, "pair_block is 8, but must divide .* rotated features, 12"),
        ({"pair_block": 8, "interleaved": True}, ValueError, "pair_block is 8, but must be None where interleaved is"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(fields, error, pattern):
    with pytest.raises(error, match=pattern):
        Rope(**fields)


def test_blocks_that_do_not_fit_the_head_are_refused(device):
    q, k, v = (x.float().to(device) for x in make())
    with pytest.raises(ValueError, match="pair_block is 6, but must divide the number of rotated features, 28"):
        attention(q, k, v, position=Rope(pair_block=6), layout="bhtd")
