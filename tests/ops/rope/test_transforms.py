"""Function transforms, forward-mode differentiation and lazily negated tensors give what the definition gives."""

import pytest
import torch
from helpers.rope_calls import ROWS, B, T, arguments, assert_same
from helpers.rope_definition import definition, plain, random_tables, random_tensor
from torch.autograd import forward_ad

from ropewalk import apply_rope
from ropewalk.testing import assert_close_to_truth, unchanged


def assert_right(actual, x, cos, sin, **call):
    assert_close_to_truth(actual.cpu(), definition(x, cos, sin, **call), plain(x, cos, sin, **call))


NEGATED = {"view": lambda x: torch._neg_view(-x), "imaginary": lambda x: torch.complex(x, -x).conj().imag}


@pytest.mark.parametrize("how", NEGATED)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "cos", "sin"])
@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
def test_lazily_negated_tensors_count_as_their_values(which, how, inplace, device, impl):
    tensors = list(arguments("plain", device)[0])
    expected = apply_rope(*tensors, impl=impl)
    tensors[which] = NEGATED[how](tensors[which])
    assert tensors[which].is_neg()
    with unchanged(tensors[2 if inplace else 0 :]):
        rotated = apply_rope(*tensors, inplace=inplace, impl=impl)
    for x, y in zip(rotated, expected, strict=True):
        assert torch.equal(x.resolve_neg(), y)
    if inplace:
        assert_same([x.resolve_neg() + 0 for x in tensors[:2]], [y + 0 for y in expected])


def test_lazily_negated_gradients_count_as_their_values(device, impl):
    (q, k, cos, sin), _ = arguments("plain", device)
    q = q.requires_grad_()
    rotated, _ = apply_rope(q, k, cos, sin, impl=impl)
    cotangent = random_tensor(*q.shape, device=device)
    expected = torch.autograd.grad(rotated, q, cotangent, retain_graph=True)
    assert_same(torch.autograd.grad(rotated, q, torch._neg_view(-cotangent)), expected)


TRANSFORMED = ["plain", "interleaved-inverse", "partial", "tokens", "packed", "axes", "packed-axes", "per-token"]
TRANSFORMED += ["blocks", "blocks-partial", "blocks-axes", "heads-per-token", "heads-one-row"]


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_vmap_rotates_each(name, inplace, device):
    (q, k, cos, sin), call = arguments(name, device)
    stack = [torch.stack([x, 2 * x, x.flip(0)], dim=1) for x in (q, k)]

    def function(q, k):
        return apply_rope(q, k, cos, sin, inplace=inplace, **call)

    results = torch.func.vmap(function, in_dims=1)(*(x.clone() for x in stack))
    for rotated, xs in zip(results, stack, strict=True):
        for actual, x in zip(rotated, xs.unbind(1), strict=True):
            assert_right(actual, x, cos, sin, **call)


def test_vmap_over_tables_and_positions(device):
    (q, _, cos, sin), _ = arguments("plain", device)
    positions = torch.randint(ROWS, (3, B, T), device=device)
    tables = torch.stack([cos, sin, -cos]), torch.stack([sin, cos, sin])
    results = torch.func.vmap(lambda p, c, s: apply_rope(q, None, c, s, positions=p))(positions, *tables)
    for actual, p, c, s in zip(results, positions, *tables, strict=True):
        assert_right(actual, q, c, s, positions=p)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_forward_mode_derivatives_are_rotated_tangents(name, device):
    (q, _, cos, sin), call = arguments(name, device)
    tangent = random_tensor(*q.shape, device=device)
    for_func = torch.func.jvp(lambda q: apply_rope(q, None, cos, sin, **call), (q,), (tangent,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(apply_rope(forward_ad.make_dual(q, tangent), None, cos, sin, **call))
    for primal, derivative in (for_func, dual):
        assert_right(primal, q, cos, sin, **call)
        assert_right(derivative, tangent, cos, sin, **call)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_func_grad_is_the_inverse_rotation(name, device):
    (q, _, cos, sin), call = arguments(name, device)
    cotangent = random_tensor(*q.shape, device=device)
    grad = torch.func.grad(lambda q: (apply_rope(q, None, cos, sin, **call) * cotangent).sum())(q)
    assert_right(grad, cotangent, cos, sin, **call | {"inverse": not call.get("inverse", False)})


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_jacobians_and_hessians_equal_the_definition(transform, device):
    q = random_tensor(1, 3, 1, 8, device=device)
    cos, sin = random_tables(3, 4, device=device)
    weights = random_tensor(*q.shape, device=device)

    def rotate(q):
        return apply_rope(q, None, cos, sin)

    def energy(q):
        return (rotate(q) ** 2 * weights).sum()

    actual = transform(energy if transform is torch.func.hessian else rotate)(q).reshape(q.numel(), q.numel())
    units = torch.eye(q.numel(), device=device).view(-1, *q.shape)
    results = []
    for turn, dtype in ((definition, torch.float64), (plain, torch.float32)):
        columns = torch.stack([turn(unit, cos, sin).flatten() for unit in units], dim=1).to(dtype)
        scaled = 2 * weights.cpu().to(dtype).flatten()[:, None] * columns
        results.append(columns.mT @ scaled if transform is torch.func.hessian else columns)
    assert_close_to_truth(actual.cpu(), *results)


TRANSFORMS = {
    "vmap": lambda function, q: torch.func.vmap(function)(q[None]),
    "jvp": lambda function, q: torch.func.jvp(function, (q,), (q,)),
    "grad": lambda function, q: torch.func.grad(lambda q: function(q).sum())(q),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_refuses_an_implementation_that_it_cannot_see_into(transform, device):
    (q, _, cos, sin), _ = arguments("plain", device)
    with pytest.raises(ValueError, match=r"impl is 'triton', but under torch.func .* must be None or 'reference'"):
        TRANSFORMS[transform](lambda q: apply_rope(q, None, cos, sin, impl="triton"), q)
