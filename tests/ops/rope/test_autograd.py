"""Gradients out of place: against numbers, against autograd of the definition, and what they cost in memory."""

from __future__ import annotations

import pytest
import torch
from helpers.rope_definition import (
    assert_rotated,
    definition,
    is_interpreted,
    plain,
    random_tables,
    random_tensor,
    rotate,
)
from torch.utils.checkpoint import checkpoint

from ropewalk import apply_rope
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

LAYOUTS = {"bthd": (1, 2, 2, 6), "bhtd": (1, 2, 2, 6), "thd": (3, 1, 6)}
FULL, MIDDLE = (6, 0), (2, 3)  # rotary dim and offset, of a head dim of 6


def make(layout, device, dtype=torch.float64, n_heads=(2, 1)):
    shapes = {"bthd": lambda h: (2, 3, h, 8), "bhtd": lambda h: (2, h, 3, 8), "thd": lambda h: (3, h, 8)}
    return [random_tensor(*shapes[layout](h), dtype=dtype, device=device).requires_grad_() for h in n_heads]


def lengths(layout, device):
    return {"cu_seqlens": torch.tensor([0, 1, 3], device=device)} if layout == "thd" else {}


@pytest.mark.parametrize(
    ("wants_grad", "partial", "interleaved"),
    [
        ("both", FULL, False),
        ("both", FULL, True),
        ("both", MIDDLE, False),
        ("both", MIDDLE, True),
        ("q alone", FULL, True),
        ("k", MIDDLE, False),
        ("q", FULL, False),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_and_gradgradcheck(impl, device, layout, interleaved, partial, wants_grad):
    rotary_dim, rotary_offset = partial
    q, k = (random_tensor(*LAYOUTS[layout], dtype=torch.float64, device=device) for _ in range(2))
    cos, sin = random_tables(3, rotary_dim // 2, dtype=torch.float64, device=device)
    q.requires_grad_(wants_grad != "k")
    k.requires_grad_(wants_grad in ("both", "k"))
    flags = {"layout": layout, "interleaved": interleaved, "rotary_offset": rotary_offset, "impl": impl}
    flags |= lengths(layout, device)

    def function(*xs):
        results = rotate(xs[0], None if wants_grad == "q alone" else xs[1], cos, sin, **flags)
        return tuple(result for result in results if result.requires_grad)

    # In the interpreter a launch takes long: there a random direction stands for all, and one layout for the second.
    slow = is_interpreted(impl, device)
    how = {"fast_mode": True, "check_undefined_grad": False} if slow else {}
    assert torch.autograd.gradcheck(function, (q, k), **how)
    if not slow or layout == "bthd":
        assert torch.autograd.gradgradcheck(function, (q, k), **how)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_random_cotangents(impl, device, layout, interleaved, inverse, dtype):
    q, k = make(layout, device, dtype)
    cos, sin = random_tables(5, 4, device=device)
    flags = {"layout": layout, "interleaved": interleaved, "inverse": inverse, **lengths(layout, device)}
    with poisoned_memory(), unchanged([q, k, cos, sin]):
        outs = rotate(q, k, cos, sin, impl=impl, **flags)
        cotangents = [random_tensor(*out.shape, dtype=dtype, device=device) for out in outs]
        with unchanged(cotangents):
            grads = torch.autograd.grad(outs, (q, k), cotangents)
    for x, cotangent, grad in zip((q, k), cotangents, grads, strict=True):
        exact = x.detach().cpu().double().requires_grad_()
        (truth,) = torch.autograd.grad(definition(exact, cos, sin, **flags), exact, cotangent.cpu().double())
        baseline = plain(cotangent, cos, sin, **flags | {"inverse": not inverse})
        assert_close_to_truth(grad.cpu(), truth, baseline)


@pytest.mark.parametrize("kind", ["offset", "per row", "per token", "tables per token"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gradients_with_positions(impl, device, kind, index_dtype):
    q, k = make("bthd", device, torch.float32)
    cos, sin = random_tables(*((2, 3) if kind == "tables per token" else (9,)), 3, device=device)
    positions = {
        "offset": 4,
        "per row": torch.tensor([5, 1], dtype=index_dtype, device=device),
        "per token": torch.tensor([[4, 4, 0], [8, 1, 2]], dtype=index_dtype, device=device),
    }.get(kind)
    where = {"offsets" if kind == "per row" else "positions": positions}
    outs = rotate(q, k, cos, sin, impl=impl, rotary_offset=1, **where)
    cotangents = [random_tensor(*out.shape, device=device) for out in outs]
    grads = torch.autograd.grad(outs, (q, k), cotangents)
    for cotangent, grad in zip(cotangents, grads, strict=True):
        assert_rotated(grad, cotangent, cos, sin, inverse=True, rotary_offset=1, **where)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expanded_and_strided_cotangents(impl, device, layout):
    q, k = make(layout, device, torch.float32)
    cos, sin = random_tables(5, 4, device=device)
    flags = {"layout": layout, **lengths(layout, device)}
    out_q, out_k = rotate(q, k, cos, sin, impl=impl, **flags)
    (out_q.sum() + out_k.sum()).backward()
    for x in (q, k):
        assert_rotated(x.grad, torch.ones_like(x), cos, sin, inverse=True, **flags)
    cotangents = [random_tensor(*x.shape[::-1], device=device).permute(*range(x.ndim)[::-1]) for x in (q, k)]
    grads = torch.autograd.grad(rotate(q, k, cos, sin, impl=impl, **flags), (q, k), cotangents)
    for cotangent, grad in zip(cotangents, grads, strict=True):
        assert_rotated(grad, cotangent, cos, sin, inverse=True, **flags)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(impl, device, used):
    xs = make("bthd", device, torch.float32)
    cos, sin = random_tables(3, 4, device=device)
    out = rotate(*xs, cos, sin, impl=impl)[used]
    cotangent = random_tensor(*out.shape, device=device)
    out.backward(cotangent)
    assert_rotated(xs[used].grad, cotangent, cos, sin, inverse=True)
    other = xs[1 - used].grad
    assert other is None or not other.any()


@pytest.mark.parametrize("which", [0, 1])
def test_only_one_input_requires_grad(impl, device, which):
    xs = make("bthd", device, torch.float32)
    xs[1 - which].requires_grad_(False)
    cos, sin = random_tables(3, 4, device=device)
    outs = rotate(*xs, cos, sin, impl=impl)
    cotangents = [random_tensor(*out.shape, device=device) for out in outs]
    sum((out * c).sum() for out, c in zip(outs, cotangents, strict=True)).backward()
    assert_rotated(xs[which].grad, cotangents[which], cos, sin, inverse=True)
    assert xs[1 - which].grad is None


def test_q_and_k_may_be_one_tensor(impl, device):
    (q,) = make("bthd", device, torch.float32, n_heads=(2,))
    cos, sin = random_tables(3, 4, device=device)
    first, second = rotate(q, q, cos, sin, impl=impl)
    assert torch.equal(first, second)
    (first + second).sum().backward()
    assert_rotated(q.grad, torch.full_like(q, 2.0), cos, sin, inverse=True)


def test_gradient_of_a_gradient_is_the_rotation_again(impl, device):
    (q,) = make("bthd", device, torch.float32, n_heads=(2,))
    cos, sin = random_tables(3, 4, device=device)
    cotangent = random_tensor(*q.shape, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(apply_rope(q, None, cos, sin, impl=impl), q, cotangent, create_graph=True)
    weights = random_tensor(*q.shape, device=device)
    (second,) = torch.autograd.grad((grad * weights).sum(), cotangent)
    assert_rotated(second, weights, cos, sin)


def test_positions_outside_the_table_leave_other_gradients_alone(impl, device):
    (q,) = make("bthd", device, torch.float32, n_heads=(2,))
    cos, sin = random_tables(3, 3, device=device)
    positions = torch.tensor([[0, -1, 2], [1, 1, 2**40]], device=device)
    cotangent = random_tensor(*q.shape, device=device)
    apply_rope(q, None, cos, sin, positions=positions, impl=impl).backward(cotangent)
    assert_rotated(q.grad, cotangent, cos, sin, positions=positions, inverse=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(impl, device, use_reentrant):
    q, k = make("bthd", device, torch.float32)
    cos, sin = random_tables(3, 4, device=device)

    def layer(q, k):
        q, k = apply_rope(q, k, cos, sin, impl=impl)
        return (q * k).sin()

    cotangent = random_tensor(*q.shape, device=device)
    expected = torch.autograd.grad(layer(q, k), (q, k), cotangent)
    checkpoint(layer, q, k, use_reentrant=use_reentrant).backward(cotangent)
    assert torch.equal(q.grad, expected[0])
    assert torch.equal(k.grad, expected[1])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("which", ["cos", "sin"])
def test_tables_that_require_grad_are_refused(impl, device, which, inplace):
    q, k = (x.detach() for x in make("bthd", device))
    tables = dict(zip(("cos", "sin"), random_tables(3, 4, device=device), strict=True))
    tables[which].requires_grad_()
    with unchanged([q, k]), pytest.raises(ValueError, match="neither is differentiated"):
        apply_rope(q, k, **tables, impl=impl, inplace=inplace)


@pytest.mark.parametrize("inplace", [False, True])
def test_autograd_saves_neither_q_nor_k(impl, device, inplace):
    q, k = (x + 0 for x in make("bthd", device, torch.float32))
    cos, sin = random_tables(3, 4, device=device)
    positions = torch.zeros(2, 3, dtype=torch.int64, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        outs = rotate(q, k, cos, sin, positions=positions, impl=impl, inplace=inplace)
    allowed = {x.untyped_storage().data_ptr() for x in (cos, sin, positions)}
    assert {x.untyped_storage().data_ptr() for x in saved} <= allowed
    assert all(out.requires_grad for out in outs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_recorded(impl, device, mode):
    q, k = make("bthd", device, torch.float32)
    cos, sin = random_tables(3, 4, device=device)
    with mode():
        outs = rotate(q, k, cos, sin, impl=impl)
    assert not any(out.requires_grad for out in outs)
    for x, out in zip((q, k), outs, strict=True):
        assert_rotated(out, x, cos, sin)


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_what_requires_grad_has_a_result_that_does(impl, device, wanted):
    xs = [random_tensor(1, 3, 2, 8, device=device) for _ in range(2)]
    xs[wanted].requires_grad_()
    rotated = apply_rope(*xs, *random_tables(3, 4, device=device), impl=impl)
    assert [x.requires_grad for x in rotated] == [x.requires_grad for x in xs]
