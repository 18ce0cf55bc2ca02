"""Attention with rotary positions on several axes, against float64 that rotates each pair by its own axis."""

import pytest
import torch
from helpers import attention_definition
from helpers.attention_calls import ROUNDINGS
from helpers.modes import ON_GPU, needs_kernels

from ropewalk import Alibi, ReRope, Rope, attention, mrope_axes
from ropewalk.testing import assert_close_to_truth, unchanged

B, H, K, T, D = 2, 4, 2, 6, 16
AXES = mrope_axes([3, 3, 2])
IMPLS = [None, "reference", *([] if ON_GPU else ["sdpa"]), pytest.param("triton", marks=needs_kernels)]


def rotated(x, positions, axes):
    """Rotate x (B, H, T, D) in the dtype of x: pair p of a token by its position on the pair's axis."""
    half = len(axes)
    omega = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    where = torch.stack([positions[axis] for axis in axes.tolist()], dim=-1).double()  # (B or 1, T, R/2)
    cos, sin = ((where * omega).cos()[:, None].to(x.dtype), (where * omega).sin()[:, None].to(x.dtype))
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attend(q, k, v, positions_q, positions_k, axes, causal):
    """Attention by its definition, for (B, H, T, D)."""
    return attention_definition.attend(rotated(q, positions_q, axes), rotated(k, positions_k, axes), v, causal)


def make(queries=T, keys=T):
    shapes = (B, H, queries, D), (B, K, keys, D), (B, K, keys, D)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def several(tokens, rows=B):
    """Positions on three axes that differ from each other."""
    return torch.stack([torch.randperm(40)[:tokens] for _ in range(3 * rows)]).view(3, rows, tokens)


@pytest.fixture(params=IMPLS, ids=str)
def impl(request):
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("queries", [T, 2])
def test_attention_and_its_gradients(impl, device, causal, rows, queries):
    q, k, v = make(queries)
    positions_k = several(T, rows)
    positions_q = positions_k if queries == T else several(queries, rows)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = attend(*exact, positions_q, positions_k, AXES, causal)
    cotangent = torch.randn_like(truth)
    wanted = [truth.detach(), *torch.autograd.grad(truth, exact, cotangent)]
    plain = [x.float().requires_grad_() for x in (q, k, v)]
    baseline = attend(*plain, positions_q, positions_k, AXES, causal)
    baselines = [baseline.detach(), *torch.autograd.grad(baseline, plain, cotangent.float())]

    xs = [x.float().to(device).requires_grad_() for x in (q, k, v)]
    where = positions_q.to(device), positions_k.to(device)
    given = where if queries != T else (where[0], where[0])
    scheme = Rope(axes=AXES.to(device))
    with unchanged([*xs, *where]):
        out = attention(
            *xs, position=scheme, causal=causal, positions_q=given[0], positions_k=given[1], layout="bhtd", impl=impl
        )
        grads = torch.autograd.grad(out, xs, cotangent.float().to(device))
    for actual, right, theirs in zip((out, *grads), wanted, baselines, strict=True):
        assert_close_to_truth(actual.detach().cpu(), right, theirs, ROUNDINGS)


def test_packed_sequences(impl, device):
    cu_seqlens = torch.tensor([0, 2, T], device=device)
    positions = several(T, 1)
    q, k, v = ((x[:1]).float() for x in make())
    arguments = {"position": Rope(axes=AXES.to(device)), "impl": impl}
    packed = attention(
        *(x[0].transpose(0, 1).to(device) for x in (q, k, v)), cu_seqlens_q=cu_seqlens, layout="thd",
        positions_q=positions[:, 0].to(device), positions_k=positions[:, 0].to(device), **arguments,
    )  # fmt: skip
    for start, stop in ((0, 2), (2, T)):
        piece = [x[:, :, start:stop].double() for x in (q, k, v)]
        where = positions[:, :, start:stop]
        truth = attend(*piece, where, where, AXES, False)
        baseline = attend(*(x.float() for x in piece), where, where, AXES, False)
        assert_close_to_truth(packed[start:stop].transpose(0, 1)[None].cpu(), truth, baseline, ROUNDINGS)


@pytest.mark.parametrize("axis", range(3))
def test_the_result_changes_with_each_axis(impl, device, axis):
    q, k, v = (x.float().to(device) for x in make())
    positions = several(T).to(device)
    moved = positions.clone()
    moved[axis, :, 1] += 1
    before, after = (
        attention(q, k, v, position=Rope(axes=AXES.to(device)), positions_q=p, positions_k=p, layout="bhtd", impl=impl)
        for p in (positions, moved)
    )
    assert not torch.equal(before, after)


def test_tokens_without_positions_have_their_index_on_every_axis(impl, device):
    q, k, v = (x.float().to(device) for x in make())
    arguments = {"causal": True, "layout": "bhtd", "impl": impl}
    expected = attention(q, k, v, position=Rope(), **arguments)
    scheme = Rope(axes=AXES)
    assert torch.equal(attention(q, k, v, position=scheme, **arguments), expected)
    by_index = torch.arange(T, device=device).expand(3, 1, T)
    given = attention(q, k, v, position=scheme, positions_q=by_index, positions_k=by_index, **arguments)
    assert torch.equal(given, expected)
    assert torch.equal(attention(q, k, v, position=scheme, positions_q=by_index, **arguments), expected)


def test_calls_in_a_row_read_their_own_positions(device):
    q, k, v = (x.float().to(device) for x in make())
    scheme = Rope(axes=AXES.to(device))
    for _ in range(4):
        positions = several(T).to(device)
        out = attention(q, k, v, position=scheme, positions_q=positions, positions_k=positions, layout="bhtd")
        right = attend(*(x.cpu() for x in (q, k, v)), *(positions.cpu(),) * 2, AXES, False)
        torch.testing.assert_close(out.cpu(), right, rtol=1e-4, atol=1e-5)


def test_compiled_calls_equal_eager_ones(device):
    q, k, v = (x.float().to(device) for x in make())
    scheme, positions = Rope(axes=AXES.to(device)), several(T).to(device)

    def function(q, k, v, positions):
        return attention(q, k, v, position=scheme, positions_q=positions, positions_k=positions, layout="bhtd")

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, positions), function(q, k, v, positions))


SHAPE = (
    r"positions_q has shape \({}\), but where Rope has axes it must be \(A, B, T\) or \(A, 1, T\) with B = 2 and T = 6"
)


@pytest.mark.parametrize(
    ("scheme", "positions", "error", "pattern"),
    [
        (Rope(axes=AXES), torch.zeros(B, T).long(), ValueError, SHAPE.format("2, 6")),
        (Rope(axes=AXES), torch.zeros(T).long(), ValueError, SHAPE.format("6,")),
        (Rope(axes=AXES), torch.zeros(0, B, T).long(), ValueError, SHAPE.format("0, 2, 6")),
        (Rope(axes=AXES), torch.zeros(3, 3, T).long(), ValueError, SHAPE.format("3, 3, 6")),
        (Rope(axes=AXES), torch.zeros(3, B, 5).long(), ValueError, SHAPE.format("3, 2, 5")),
        (Rope(axes=AXES), torch.zeros(3, B, T), TypeError, "positions_q is a tensor of torch.float32"),
        (Rope(axes=AXES), torch.zeros(2, B, T).long(), ValueError, "values from 0 to 2, but .* 0 to 1: .* have 2 axes"),
        (Rope(axes=AXES - 1), torch.zeros(3, B, T).long(), ValueError, "values from -1 to 1, but .* from 0 to 2"),
        (
            Rope(axes=AXES[:-1]),
            torch.zeros(3, B, T).long(),
            ValueError,
            r"axes has shape \(7,\), but .*\(R/2,\), \(8,\)",
        ),
        (Rope(), torch.zeros(3, B, T).long(), ValueError, r"positions_q has shape \(3, 2, 6\), but must be \(B, T\)"),
        (Alibi(), torch.zeros(3, B, T).long(), ValueError, r"positions_q has shape \(3, 2, 6\), but must be \(B, T\)"),
    ],
)
def test_positions_that_do_not_fit_are_refused(scheme, positions, error, pattern):
    q, k, v = (x.float() for x in make())
    with unchanged([q, k, v]), pytest.raises(error, match=pattern):
        attention(q, k, v, position=scheme, positions_q=positions, positions_k=positions, layout="bhtd")


@pytest.mark.parametrize(
    ("axes", "error", "pattern"),
    [
        ([0, 1], TypeError, "axes is list, but must be a tensor of int32 or int64"),
        (torch.zeros(8), TypeError, "axes is a tensor of torch.float32, but must be a tensor of int32 or int64"),
        (torch.zeros(1, 8, dtype=torch.int64), ValueError, r"axes has shape \(1, 8\), but must be \(R/2,\)"),
    ],
)
def test_axes_of_another_kind_are_refused(axes, error, pattern):
    with pytest.raises(error, match=pattern):
        Rope(axes=axes)


def test_two_ranges_refuse_axes():
    with pytest.raises(ValueError, match="rope has axes, but must have none"):
        ReRope(4, rope=Rope(axes=AXES))
