"""In place means in place: the memory, the version, the gradient; and what must be refused is, before any write."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from helpers.rope_definition import assert_rotated, definition, plain, random_tables, random_tensor, rotate
from torch.utils.checkpoint import checkpoint

from ropewalk import apply_rope
from ropewalk.ops.rope.validate import share_memory
from ropewalk.testing import assert_close_to_truth, unchanged

HQ, HK, D, T = 3, 2, 8, 4


def make(device, *n_heads, dtype=torch.float32):
    return [random_tensor(2, T, heads, D, dtype=dtype, device=device) for heads in n_heads]


@pytest.fixture
def tables(device):
    return random_tables(T, D // 2, device=device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wants_grad", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("with_k", [True, False])
def test_values_gradients_and_versions_of_non_leaves(impl, device, tables, with_k, wants_grad, interleaved):
    leaves = [x.requires_grad_(wants) for x, wants in zip(make(device, HQ, HK), wants_grad, strict=True)]
    xs = [leaf * 2 for leaf in leaves][: 2 if with_k else 1]
    before, versions = [x.detach().clone() for x in xs], [x._version for x in xs]
    outs = rotate(xs[0], xs[1] if with_k else None, *tables, impl=impl, inplace=True, interleaved=interleaved)
    for x, out, old, version, leaf in zip(xs, outs, before, versions, leaves, strict=False):
        assert out.data_ptr() == x.data_ptr()
        assert x._version > version
        assert_rotated(x, old, *tables, interleaved=interleaved)
        assert x.requires_grad == out.requires_grad == leaf.requires_grad
    cotangents = [random_tensor(*out.shape, device=device) for out in outs]
    recorded = [(x, out, c) for x, out, c in zip(xs, outs, cotangents, strict=True) if out.requires_grad]
    if recorded:
        # What was overwritten and what came back are the same node: gradients meet there.
        sum(((x + out) * c / 2).sum() for x, out, c in recorded).backward()
    for leaf, cotangent in zip(leaves, cotangents, strict=False):
        if leaf.requires_grad:
            assert_rotated(leaf.grad / 2, cotangent, *tables, interleaved=interleaved, inverse=True)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("spoiled", ["q", "k"])
@pytest.mark.parametrize("wants_grad", [(True, True), (True, False), (False, True)])
def test_a_consumer_that_saved_the_unrotated_tensor_raises(impl, device, tables, spoiled, wants_grad):
    q, k = (x.requires_grad_(wants) * 1 for x, wants in zip(make(device, HQ, HK), wants_grad, strict=True))
    weight = torch.ones((), device=device, requires_grad=True)
    other = (q if spoiled == "q" else k) * weight  # saves q or k for the weight's gradient
    apply_rope(q, k, *tables, impl=impl, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@pytest.mark.parametrize("used", ["outputs", "projection", "both"])
def test_slices_of_a_fused_projection(impl, device, tables, used):
    leaf = random_tensor(2, T, HQ + 2 * HK, D, device=device).requires_grad_()
    fused = leaf * 1
    q, k = fused[:, :, :HQ], fused[:, :, HQ : HQ + HK]
    out_q, out_k = apply_rope(q, k, *tables, impl=impl, inplace=True)
    assert_rotated(out_q, leaf[:, :, :HQ], *tables)
    assert_rotated(out_k, leaf[:, :, HQ : HQ + HK], *tables)
    assert torch.equal(fused[:, :, HQ + HK :], leaf[:, :, HQ + HK :])
    assert torch.equal(fused[:, :, :HQ], out_q)
    cotangent = random_tensor(*leaf.shape, device=device)
    loss = torch.zeros((), device=device)
    if used != "outputs":
        loss = loss + (fused * cotangent).sum()
    if used != "projection":
        loss = loss + (out_q * cotangent[:, :, :HQ]).sum() + (out_k * cotangent[:, :, HQ : HQ + HK]).sum()
    loss.backward()
    scale = torch.ones(HQ + 2 * HK, 1, device=device)
    scale[: HQ + HK] = 2.0 if used == "both" else 1.0
    scale[HQ + HK :] = 0.0 if used == "outputs" else 1.0
    whole = cotangent * scale
    rotated = definition(whole[:, :, : HQ + HK], *tables, inverse=True)
    truth = torch.cat((rotated, whole[:, :, HQ + HK :].cpu().double()), dim=2)
    baseline = torch.cat((plain(whole[:, :, : HQ + HK], *tables, inverse=True), whole[:, :, HQ + HK :].cpu()), dim=2)
    assert_close_to_truth(leaf.grad.cpu(), truth, baseline)


@pytest.mark.parametrize("chain", ["twice in place", "in place, then out of place"])
def test_gradients_through_two_rotations(impl, device, tables, chain):
    (leaf,) = make(device, HQ)
    leaf.requires_grad_()
    q = apply_rope(leaf * 1, None, *tables, impl=impl, inplace=True)
    q = apply_rope(q, None, *tables, impl=impl, inplace=chain == "twice in place", inverse=True, interleaved=True)
    cotangent = random_tensor(*q.shape, device=device)
    q.backward(cotangent)
    middle = definition(cotangent, *tables, interleaved=True)
    baseline = plain(plain(cotangent, *tables, interleaved=True), *tables, inverse=True)
    assert_close_to_truth(leaf.grad.cpu(), definition(middle, *tables, inverse=True), baseline)


def test_gradcheck_in_place(impl, device):
    cos, sin = random_tables(2, 2, dtype=torch.float64, device=device)
    q, k = (random_tensor(1, 2, h, 6, dtype=torch.float64, device=device).requires_grad_() for h in (2, 1))

    def function(q, k):
        return apply_rope(q * 1, k * 1, cos, sin, impl=impl, inplace=True, rotary_offset=1)

    assert torch.autograd.gradcheck(function, (q, k), fast_mode=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(function, (q, k), fast_mode=True, check_undefined_grad=False)


def refused_views(leaf):
    """Name and what autograd must not see overwritten, made from a leaf that requires grad."""
    inner = leaf * 1
    yield "leaf", leaf
    yield "slice of a leaf", leaf[:, :, :HQ]
    yield "transposed leaf", leaf.transpose(0, 1)
    yield "split", inner.split(1, dim=2)[0]
    yield "chunk", inner.chunk(2, dim=1)[1]
    yield "unbind", torch.stack((inner, inner)).unbind(0)[0]
    with torch.no_grad():
        view = inner[:, :, :HQ]
    yield "slice made without grad", view


@pytest.mark.parametrize("role", ["q", "k"])
@pytest.mark.parametrize("name", [name for name, _ in refused_views(torch.ones(2, T, HQ, D, requires_grad=True))])
def test_what_autograd_forbids_is_refused_before_anything_is_written(impl, device, name, role):
    leaf = random_tensor(T, T, HQ, D, device=device).requires_grad_()
    view = dict(refused_views(leaf))[name]
    if not view.requires_grad:
        pytest.skip("this view does not require grad here")
    other = random_tensor(*view.shape, device=device).requires_grad_() * 1
    cos, sin = random_tables(T, D // 2, device=device)
    q, k = (view, other) if role == "q" else (other, view)
    with unchanged([q, k, leaf]), pytest.raises(RuntimeError, match=rf"^{role} is a"):
        apply_rope(q, k, cos, sin, impl=impl, inplace=True)


@pytest.mark.parametrize("role", ["q", "k"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_expanded_memory_is_refused(impl, device, tables, role, axis):
    x, other = make(device, HQ, HQ)
    expanded = x.narrow(axis, 0, 1).expand(x.shape)
    q, k = (expanded, other) if role == "q" else (other, expanded)
    with unchanged([x, other]), pytest.raises(ValueError, match=f"^{role} has strides .*share memory"):
        apply_rope(q, k, *tables, impl=impl, inplace=True)


def pairs_that_share_memory(x):
    """Name, q and k of which k has an element of q; x is (2, T, 2·HQ, D)."""
    yield "the same tensor", x, x
    yield "the same heads", x[:, :, :HQ], x[:, :, :HQ]
    yield "one head in common", x[:, :, :HQ], x[:, :, HQ - 1 : 2 * HQ - 1]
    yield "one head in common, k first", x[:, :, HQ - 1 : 2 * HQ - 1], x[:, :, :HQ]
    yield "a feature in common", x[..., : D // 2], x[..., D // 2 - 1 : D - 1]
    yield "a token in common", x[:1, :2], x[:1, 1:3]


def test_memory_is_shared_exactly_where_bytes_are():
    draw = random.Random(0)
    answers = [0, 0]
    for _ in range(4000):
        shapes = [[draw.randint(1, 3) for _ in range(3)] for _ in range(2)]
        strides = [[draw.choice((0, 1, 2, 3, 4, 6, 9, 12, 31)) for _ in range(3)] for _ in range(2)]
        if draw.random() < 0.5:
            strides[1] = strides[0]
        itemsize, distance = draw.choice((1, 2, 4)), draw.randint(-40, 40)

        def bytes_of(shape, strides, start, itemsize=itemsize):
            offsets = (sum(map(operator.mul, index, strides)) for index in itertools.product(*map(range, shape)))
            return {start + offset * itemsize + byte for offset in offsets for byte in range(itemsize)}

        expected = not bytes_of(shapes[0], strides[0], 0).isdisjoint(bytes_of(shapes[1], strides[1], distance))
        pairs = [tuple(x) for pair in zip(shapes, strides, strict=True) for x in pair]
        assert share_memory(*pairs, distance, itemsize) == expected, (pairs, distance, itemsize)
        answers[expected] += 1
    assert min(answers) > 500
    assert not share_memory((0, 2), (1, 1), (2, 2), (1, 1), 0, 4)


@pytest.mark.parametrize("name", [name for name, *_ in pairs_that_share_memory(torch.empty(2, T, 2 * HQ, D))])
def test_q_and_k_that_share_memory_are_refused(impl, device, name):
    x = random_tensor(2, T, 2 * HQ, D, device=device)
    q, k = next(pair for case, *pair in pairs_that_share_memory(x) if case == name)
    cos, sin = random_tables(T, q.shape[-1] // 2, device=device)
    with unchanged([x]), pytest.raises(ValueError, match="q and k share memory"):
        apply_rope(q, k, cos, sin, impl=impl, inplace=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_leaves_may_be_overwritten_where_grad_is_off(impl, device, tables, mode):
    q, k = (x.requires_grad_() for x in make(device, HQ, HK))
    before = [x.detach().clone() for x in (q, k)]
    versions = [x._version for x in (q, k)]
    with mode():
        outs = apply_rope(q, k, *tables, impl=impl, inplace=True)
    for x, out, old, version in zip((q, k), outs, before, versions, strict=True):
        assert out is x
        assert x._version > version
        assert_rotated(x, old, *tables)


def test_tensors_made_in_inference_mode(impl, device, tables):
    with torch.inference_mode():
        q, k = make(device, HQ, HK)
        before = [x.clone() for x in (q, k)]
        for x, out, old in zip((q, k), apply_rope(q, k, *tables, impl=impl, inplace=True), before, strict=True):
            assert out is x
            assert_rotated(x, old, *tables)
        outs = apply_rope(q, k, *tables, impl=impl)
        for x, out in zip((q, k), outs, strict=True):
            assert_rotated(out, x, *tables)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(impl, device, tables, use_reentrant):
    q, k = (x.requires_grad_() for x in make(device, HQ, HQ))

    def layer(q, k):
        q, k = apply_rope(q * 2, k * 3, *tables, impl=impl, inplace=True)
        return (q * k).sin()

    cotangent = random_tensor(*q.shape, device=device)
    expected = torch.autograd.grad(layer(q, k), (q, k), cotangent)
    checkpoint(layer, q, k, use_reentrant=use_reentrant).backward(cotangent)
    assert torch.equal(q.grad, expected[0])
    assert torch.equal(k.grad, expected[1])


def test_the_cotangent_is_never_overwritten(impl, device, tables):
    (leaf,) = make(device, HQ)
    leaf.requires_grad_()
    out = apply_rope(leaf * 1, None, *tables, impl=impl, inplace=True)
    cotangent = random_tensor(*out.shape, device=device)
    with unchanged([cotangent]):
        out.backward(cotangent)
