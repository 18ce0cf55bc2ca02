"""RMS norm of q and k beside the rotation: values and gradients against float64, for each convention of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.modes import KERNEL_DTYPES, ON_GPU, needs_kernels
from helpers.norm_definition import BIASES, CASES, Case, check, draw, make_norm, norm_definition, run
from helpers.rope_definition import is_interpreted, random_tables, random_tensor, skip_bfloat16_in_interpreter

from ropewalk import QKNorm, apply_rope
from ropewalk.ops.rope import api
from ropewalk.ops.rope.norm import NormFlags
from ropewalk.testing import assert_close_to_truth

HALF_PRECISION = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_conventions(norm_impl, device, name):
    check(CASES[name], *draw(CASES[name], device, torch.float32), norm_impl)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "hunyuan", "odd-offset-interleaved", "axes", "blocks-axes"])
def test_dtypes(norm_impl, device, name, dtype):
    skip_bfloat16_in_interpreter(norm_impl, device, dtype)
    for weight_dtype in (torch.float32, dtype):
        check(CASES[name], *draw(CASES[name], device, dtype, weight_dtype), norm_impl)


def test_weights_of_two_dtypes_and_shapes(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    per_head = random_tensor(2, 16, dtype=torch.float16, device=device)
    check(CASES["qwen3"], xs, [weights[0], per_head], tables, call, norm_impl)
    check(CASES["qwen3"], xs, [None, per_head], tables, call, norm_impl)
    check(CASES["qwen3"], xs, [weights[0], None], tables, call, norm_impl)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "hunyuan"])
def test_weights_at_and_near_zero(norm_impl, device, name):
    xs, weights, tables, call = draw(CASES[name], device, torch.float32)
    zero = -CASES[name].norm.get("offset", 0.0)
    for weight in weights:
        weight[:4] = torch.tensor([zero, zero, zero + 1e-3, zero - 1e-3], device=device)
    check(CASES[name], xs, weights, tables, call, norm_impl)
    check(CASES[name], xs, [torch.full_like(weight, zero) for weight in weights], tables, call, norm_impl)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "llama4"])
def test_rows_of_zeros(norm_impl, device, name):
    xs, weights, tables, call = draw(CASES[name], device, torch.float32)
    for x in xs:
        x[0, 2] = 0
    check(CASES[name], xs, weights, tables, call, norm_impl)


def test_eps_0_leaves_other_rows_alone(norm_impl, device):
    case = replace(CASES["qwen3"], norm={"eps": 0.0})
    check(case, *draw(case, device, torch.float32), norm_impl)


@pytest.mark.parametrize("held", [torch.nan, torch.inf, 0.0], ids=str)
@pytest.mark.parametrize(
    "name",
    ["qwen3", "olmo2", "olmo2-after", "cohere-weights", "biases-bhtd", "biases-across", "odd-head-dim", "packed"],
)
def test_rows_without_a_gradient_may_hold_anything(norm_impl, device, name, held):
    """Neither their own gradients nor the weights' and biases' know of it; with eps = 0 zeros have no norm either."""
    case = replace(CASES[name], norm={**CASES[name].norm, "eps": 0.0})
    xs, weights, tables, call = draw(case, device, torch.float32)
    call = {key: x.detach().requires_grad_() if key in BIASES else x for key, x in call.items()}
    learned = [x.detach().requires_grad_() for x in weights] + [call[key] for key in BIASES if key in call]
    masks = []
    for x in xs:
        tokens = torch.zeros(x.shape, dtype=torch.bool, device=device)
        of_token = tokens if call.get("layout") == "thd" else tokens[0]
        if call.get("layout") == "bhtd":
            of_token = of_token.transpose(0, 1)
        of_token[2] = True
        if "across_heads" not in case.norm:
            of_token[4, 1:] = True  # of one head, another has a gradient
        masks.append(tokens)
    found = []
    for value in (1.0, held):
        leaves = [x.masked_fill(mask, value).requires_grad_() for x, mask in zip(xs, masks, strict=True)]
        outs = run(case, leaves, learned[: len(xs)], tables, call, norm_impl)
        grads = [torch.ones_like(out).masked_fill(mask, 0.0) for out, mask in zip(outs, masks, strict=True)]
        inputs = [*leaves, *learned]
        found.append(torch.autograd.grad(outs, inputs, grads, retain_graph=True))
        again = torch.autograd.grad(outs, inputs, grads, create_graph=True)
        assert not any(x.isnan().any() for x in again)
    for grad, mask in zip(found[1], masks, strict=False):
        assert not grad[mask].any()
    for grad, expected in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("held", [torch.nan, torch.inf], ids=str)
def test_rows_with_a_gradient_show_what_they_hold(norm_impl, device, held):
    q = random_tensor(1, 3, 2, 16, device=device)
    q[0, 1, 0, 5] = held
    weight = random_tensor(16, device=device).requires_grad_()
    q.requires_grad_()
    tables = random_tables(4, 8, device=device)
    out = apply_rope(q, None, *tables, norm=QKNorm(weight), impl=norm_impl)
    grad = torch.zeros_like(out)
    grad[0, 1, 0, 0] = 1e-30
    of_q, of_weight = torch.autograd.grad(out, (q, weight), grad)
    assert of_q[0, 1, 0].isnan().any()
    assert of_weight.isnan().any() or held == torch.inf  # its norm is 0 beside the feature that holds it
    assert not of_q[0, [0, 2]].any()


def test_large_float16_does_not_overflow(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float16)
    check(CASES["qwen3"], [x * 10_000 for x in xs], weights, tables, call, norm_impl)


def test_positions_outside_the_table(norm_impl, device):
    case = replace(CASES["qwen3"], rotary_dim=8, call={"positions": [[0, 1, -1, 3, 4, 128, 5]]})
    xs, weights, tables, call = draw(case, device, torch.float32)
    outs = run(case, [x.requires_grad_() for x in (y.detach() for y in xs)], weights, tables, call, norm_impl)
    norm = make_norm(case, weights)
    for x, weight, out in zip(xs, weights, outs, strict=True):
        truth = norm_definition(x, weight, *tables, norm, **call)
        assert_close_to_truth(out.detach().cpu(), truth, truth.float(), 12)


def test_gradients_at_positions_outside_the_table_are_nan(norm_impl, device):
    q = random_tensor(1, 3, 2, 16, device=device).requires_grad_()
    weight = random_tensor(16, device=device).requires_grad_()
    positions = torch.tensor([[0, -1, 2]], device=device)
    tables = random_tables(4, 4, device=device)
    apply_rope(q, None, *tables, positions=positions, norm=QKNorm(weight), impl=norm_impl).sum().backward()
    assert q.grad[:, 1].isnan().all()
    assert not q.grad[:, ::2].isnan().any()
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("call", [{}, {"rotary_offset": 3, "interleaved": True}, {"pair_block": 4}], ids=str)
def test_a_position_outside_the_table_on_one_axis(norm_impl, device, call):
    """Its token is NaN with all its gradients, and no other; an axis of no pair may be anywhere."""
    q = random_tensor(1, 4, 2, 13, device=device).requires_grad_()
    weight = random_tensor(13, device=device).requires_grad_()
    positions = torch.tensor([[[0, 1, 2, 3]], [[3, -1, 0, 2]], [[9, 9, 9, 9]]], device=device)
    axes = torch.tensor([0, 1, 1, 0], device=device)
    tables = random_tables(4, 4, device=device)
    call = {**call, "positions": positions, "axes": axes}
    norm = QKNorm(weight)
    out = apply_rope(q, None, *tables, norm=norm, impl=norm_impl, **call)
    truth = norm_definition(q.detach(), weight.detach(), *tables, norm, **call)
    assert_close_to_truth(out.detach().cpu(), truth.detach(), truth.detach().float(), 12)
    assert out.isnan().flatten(2).all(-1).tolist() == [[False, True, False, False]]
    out.sum().backward()
    assert q.grad.isnan().flatten(2).any(-1).tolist() == [[False, True, False, False]]
    assert q.grad[:, 1].isnan().all()
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("axis", range(2))
def test_each_axis_moves_its_own_pairs(norm_impl, device, axis):
    q = random_tensor(2, 3, 2, 16, device=device)
    tables = random_tables(16, 8, device=device)
    positions = torch.stack((torch.arange(6), torch.arange(6, 12))).view(2, 2, 3).to(device)
    moved = positions.clone()
    moved[axis] += 1
    axes = torch.arange(2, device=device).repeat_interleave(4)
    call = {"norm": QKNorm(), "axes": axes, "pair_block": 8, "impl": norm_impl}
    before, after = (apply_rope(q, None, *tables, positions=p, **call) for p in (positions, moved))
    changed = (before != after).flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
    assert changed == list(range(8 * axis, 8 * axis + 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_strided_positions_and_axes(norm_impl, device, dtype):
    case = CASES["axes"]
    xs, weights, tables, call = draw(case, device, torch.float32)
    call = {name: x.to(dtype) for name, x in call.items()}
    check(case, xs, weights, tables, {**call, "positions": call["positions"].mT.contiguous().mT}, norm_impl)
    wide = torch.stack((call["axes"], call["axes"] + 9), dim=1)
    check(case, xs, weights, tables, {**call, "axes": wide[:, 0]}, norm_impl)


def test_tables_per_token(norm_impl, device):
    xs, weights, _, call = draw(CASES["qwen3"], device, torch.float32)
    tables = random_tables(2, 7, 8, device=device)
    check(CASES["qwen3"], xs, weights, tables, call, norm_impl)


@pytest.mark.slow
def test_many_blocks_of_tokens(norm_impl, device, monkeypatch):
    """A program of the backward has several blocks, and the last one is not whole."""
    from ropewalk import device as gpu

    monkeypatch.setattr(gpu, "num_sms", lambda device: 1)
    case = CASES["qwen3"]
    xs, weights, tables, call = draw(case, device, torch.float32)
    xs = [torch.cat([x] * 17, dim=1)[:, :115] for x in xs]
    check(case, xs, weights, tables, call, norm_impl, roundings=40)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_no_tokens(norm_impl, device, name):
    case = CASES[name]
    xs, weights, tables, call = draw(case, device, torch.float32)
    xs = [x[:, :0].requires_grad_() for x in (y.detach() for y in xs)]
    weights = [weight.requires_grad_() for weight in weights]
    outs = run(case, xs, weights, tables, call, norm_impl)
    assert [x.shape for x in outs] == [x.shape for x in xs]
    grads = torch.autograd.grad(sum(x.sum() for x in outs), [*xs, *weights])
    assert all(not grad.any() for grad in grads)


def test_tensors_whose_features_are_not_dense(norm_impl, device):
    case = CASES["cohere-weights"]
    xs, weights, tables, call = draw(case, device, torch.float32)
    xs = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in xs]
    weights = [weight.t().contiguous().t() for weight in weights]
    check(case, xs, weights, tables, call, norm_impl)


def test_expanded_gradients(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]
    sums = sum(x.sum() for x in run(CASES["qwen3"], leaves[:2], leaves[2:], tables, call, norm_impl))
    found = torch.autograd.grad(sums, leaves)
    outs = run(CASES["qwen3"], leaves[:2], leaves[2:], tables, call, norm_impl)
    expected = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("wanted", [(4,), (5,), (0, 5), (2, 4)])
def test_only_the_biases_that_require_grad_get_one(norm_impl, device, wanted):
    xs, weights, tables, call = draw(CASES["biases"], device, torch.float32)
    tensors = [x.detach() for x in (*xs, *weights, call.pop("q_bias"), call.pop("k_bias"))]
    cotangents = [random_tensor(*x.shape, device=device) for x in xs]

    def gradients(wanted):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
        biases = dict(zip(BIASES, leaves[4:], strict=True))
        outs = run(CASES["biases"], leaves[:2], leaves[2:4], tables, {**call, **biases}, norm_impl)
        given = [(out, grad) for out, grad in zip(outs, cotangents, strict=True) if out.requires_grad]
        return torch.autograd.grad([out for out, _ in given], [leaves[i] for i in wanted], [grad for _, grad in given])

    expected = gradients(range(6))
    for i, grad in zip(wanted, gradients(wanted), strict=True):
        assert torch.equal(grad, expected[i])


def test_a_bias_is_the_projections(norm_impl, device):
    """Added before the norm, and its gradient is dq summed over batch and tokens."""
    xs, weights, tables, call = draw(CASES["biases"], device, torch.float64, torch.float64)
    biases = [call.pop(name).requires_grad_() for name in BIASES]
    leaves = [x.detach().requires_grad_() for x in xs]
    norm = make_norm(CASES["biases"], weights)
    inside = apply_rope(*leaves, *tables, norm=norm, impl=norm_impl, q_bias=biases[0], k_bias=biases[1], **call)
    outside = apply_rope(
        *(x + bias.view(-1, 16) for x, bias in zip(leaves, biases, strict=True)), *tables, norm=norm, **call
    )
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b)
    found = torch.autograd.grad(sum(x.square().sum() + x.sum() for x in inside), [*leaves, *biases])
    for dx, db in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(db.view(-1, 16), dx.sum((0, 1)))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (2, 3), (1, 2)])
def test_only_what_requires_grad_gets_one(norm_impl, device, wanted):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    tensors = [x.detach() for x in (*xs, *weights)]
    everything = [x.clone().requires_grad_() for x in tensors]
    cotangents = [random_tensor(*x.shape, device=device) for x in xs]
    outs = run(CASES["qwen3"], everything[:2], everything[2:], tables, call, norm_impl)
    expected = torch.autograd.grad(outs, everything, cotangents)
    some = [x.requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    outs = run(CASES["qwen3"], some[:2], some[2:], tables, call, norm_impl)
    assert [x.requires_grad for x in outs] == [some[i].requires_grad or some[2 + i].requires_grad for i in range(2)]
    given = [cotangent for out, cotangent in zip(outs, cotangents, strict=True) if out.requires_grad]
    found = torch.autograd.grad([out for out in outs if out.requires_grad], [some[i] for i in wanted], given)
    for i, grad in zip(wanted, found, strict=True):
        assert torch.equal(grad, expected[i])


def test_a_loss_of_q_alone(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]
    run(CASES["qwen3"], leaves[:2], leaves[2:], tables, call, norm_impl)[0].sum().backward()
    assert [x.grad is not None for x in leaves] == [True, False, True, False]


def test_one_weight_for_both(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    both = [weights[0].detach().clone().requires_grad_() for _ in range(2)]
    cotangents = [random_tensor(*x.shape, device=device) for x in xs]
    outs = run(CASES["qwen3"], xs, both, tables, call, norm_impl)
    first, second = torch.autograd.grad(outs, both, cotangents)
    outs = run(CASES["qwen3"], xs, [both[0]] * 2, tables, call, norm_impl)
    (total,) = torch.autograd.grad(outs, both[0], cotangents)
    assert torch.equal(total, first + second)


def test_gradients_have_the_same_bits_each_time(norm_impl, device):
    case = CASES["qwen3"]
    xs, weights, tables, call = draw(case, device, torch.float32)
    xs = [torch.cat([x] * (400 if ON_GPU else 4), dim=1)[:, :128] for x in xs]
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]
    cotangents = [random_tensor(*x.shape, device=device) for x in xs]
    runs = [
        torch.autograd.grad(run(case, leaves[:2], leaves[2:], tables, call, norm_impl), leaves, cotangents)
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        *("olmo2-after", "axes-packed", "biases"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "cohere-weights", "packed", "blocks-rest")),
    ],
)
def test_gradcheck_and_gradgradcheck(norm_impl, device, name):
    case = CASES[name]
    if "axes" not in case.call:
        case = replace(case, heads=(2, 1), head_dim=8, rotary_dim=8 if name != "olmo2-after" else 4)
    xs, weights, tables, call = draw(case, device, torch.float64, torch.float64)
    xs = [x.detach()[..., :2, :, :] if call.get("layout") != "thd" else x.detach() for x in xs]
    leaves = [x.clone().requires_grad_() for x in (*xs, *weights)]

    def function(*tensors):
        return tuple(run(case, list(tensors[:2]), list(tensors[2:]), tables, call, norm_impl))

    how = {"fast_mode": True, "check_undefined_grad": not is_interpreted(norm_impl, device)}
    assert torch.autograd.gradcheck(function, leaves, **how)
    assert torch.autograd.gradgradcheck(function, leaves, **how)


@pytest.mark.parametrize("name", ["qwen3", "heads-bhtd", "olmo2"])
def test_the_norm_alone(norm_impl, device, name):
    case = CASES[name]
    xs, weights, _, call = draw(case, device, torch.float32)
    layout = call.get("layout", "bthd")
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]
    outs = api.normalize(tuple(leaves[:2]), make_norm(case, leaves[2:]), layout, norm_impl)
    cotangents = [random_tensor(*x.shape, device=device) for x in xs]
    found = [*outs, *torch.autograd.grad(outs, leaves, cotangents)]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    unit = torch.ones(128, 8, dtype=torch.float64), torch.zeros(128, 8, dtype=torch.float64)  # rotate by 0
    norm = make_norm(case, exact[2:])
    truths = [norm_definition(x, w, *unit, norm, **call) for x, w in zip(exact[:2], exact[2:], strict=True)]
    truths += torch.autograd.grad(truths, exact, [x.cpu().double() for x in cotangents])
    for mine, truth in zip(found, truths, strict=True):
        assert_close_to_truth(mine.detach().cpu(), truth.detach(), truth.detach().float(), 12)


def test_autocast_leaves_dtypes_alone(norm_impl, device):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    expected = run(CASES["qwen3"], xs, weights, tables, call, norm_impl)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        outs = run(CASES["qwen3"], xs, weights, tables, call, norm_impl)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@needs_kernels
def test_wide_heads_and_all_heads_in_one_program(device, dtype):
    for case in (
        Case(head_dim=512, rotary_dim=64, heads=(2, 1)),
        Case("across", {"across_heads": True}, heads=(20, 3), head_dim=128, rotary_dim=128),
    ):
        check(case, *draw(case, device, dtype), "triton", roundings=24)


def test_flags_default_to_those_of_a_norm():
    norm = QKNorm()
    assert NormFlags() == (norm.eps, norm.offset, norm.after, norm.across_heads)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """The last tokens, whose offsets pass 2³¹, are normed as in a call of their own, and so are their gradients."""
    tokens, heads, d, last = 2**20 + 5, 8, 256, 5
    q = torch.zeros(1, tokens, heads, d, dtype=torch.bfloat16, device=device)
    grad = torch.zeros_like(q)
    for x in (q, grad):
        x[:, -last:] = random_tensor(1, last, heads, d, dtype=torch.bfloat16, device=device)
    cos, sin = random_tables(tokens, 8, device=device)
    weight = random_tensor(d, device=device).requires_grad_()
    norm = QKNorm(weight)
    small, small_grad = q[:, -last:].clone().requires_grad_(), grad[:, -last:]
    expected = apply_rope(small, None, cos[-last:], sin[-last:], norm=norm, impl="triton")
    expected_grads = torch.autograd.grad(expected, (small, weight), small_grad)
    out = apply_rope(q.requires_grad_(), None, cos, sin, norm=norm, impl="triton")
    assert torch.equal(out[:, -last:], expected)
    dq, dw = torch.autograd.grad(out, (q, weight), grad)
    assert torch.equal(dq[:, -last:], expected_grads[0])
    assert not dq[:, :-last].any()
    torch.testing.assert_close(dw, expected_grads[1])
