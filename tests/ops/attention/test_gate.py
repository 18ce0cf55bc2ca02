"""The output gate of `attention`: out · σ(gate), against its definition in float64, by kernels and by PyTorch."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.attention_calls import draw
from helpers.attention_launches import launches_of
from helpers.compile import compile_launch
from helpers.kinds import kinds_of
from helpers.modes import HAS_KERNELS, INTERPRETED, KERNEL_DTYPES, needs_kernels
from helpers.targets import SHARED_MEMORY, TARGETS, resources, spilled_bytes
from torch.utils.checkpoint import checkpoint

from ropewalk import Alibi, ReRope, Rope, attention, explain_choice
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import flatten
from ropewalk.ops.attention.gate import operation
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

B, T, H, K, D, DV = 2, 21, 4, 2, 16, 8
IMPLS = [None, "reference"] + (["triton"] if HAS_KERNELS else [])
STRIDES = ["dense", "slice", "transposed", "expanded"]


def rows_of(layout):
    return {"bthd": (B, T, H), "bhtd": (B, H, T), "thd": (T, H)}[layout]


def draw_gate(device, dtype, shape, strides="dense"):
    """A gate whose features lie as a model has them: alone, beside q, in another order, or once for all rows."""
    if strides == "slice":
        return torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)[..., shape[-1] :]
    if strides == "transposed":
        return torch.randn(shape[::-1], device=device).to(dtype).permute(*reversed(range(len(shape))))
    if strides == "expanded":
        return torch.randn(shape[-1], device=device).to(dtype).expand(shape)
    return torch.randn(shape, device=device).to(dtype)


def define(out, gate):
    """The gate in float64."""
    gate = gate.double()
    return out.double() / (1 + torch.exp(-(gate if gate.ndim == out.ndim else gate[..., None])))


def differentiate(grad, out, gate):
    """Its gradients in float64, by hand."""
    grad, out, gate = grad.double(), out.double(), gate.double()
    sigma = 1 / (1 + torch.exp(-(gate if gate.ndim == out.ndim else gate[..., None])))
    of_sigma = grad * out * sigma * (1 - sigma)
    return grad * sigma, of_sigma if gate.ndim == out.ndim else of_sigma.sum(-1)


def compare(actual, out, gate, grad):
    """The result and both gradients, against float64, beside the same in PyTorch."""
    assert_close_to_truth(actual[0], define(out, gate), operation.gate_plainly(out, gate))
    plain = operation.differentiate_plainly(grad, out, gate)
    for mine, exact, baseline in zip(actual[1:], differentiate(grad, out, gate), plain, strict=True):
        assert mine.dtype == out.dtype
        assert_close_to_truth(mine, exact, baseline)


# === the operation ===


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 21, 4, 16), (0, 1, 2, 3)),
        ((2, 4, 21, 16), (0, 2, 1, 3)),  # (B, H, T, D) in memory of (B, T, H, D)
        ((37, 3, 80), (0, 1, 2)),
        ((1, 70, 5, 128), (0, 1, 2, 3)),
        ((2, 3, 1, 1024), (0, 1, 2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("per_feature", [True, False])
def test_kernels(device, dtype, shape, order, strides, per_feature):
    sizes = [shape[dim] for dim in order]
    out = torch.randn(sizes, device=device).to(dtype).permute(*(order.index(dim) for dim in range(len(order))))
    assert out.shape == shape
    gate = draw_gate(device, dtype, shape if per_feature else shape[:-1], strides)
    grad = draw_gate(device, dtype, shape, strides)
    leaves = [out.detach().requires_grad_(), gate.detach().requires_grad_()]
    with unchanged((out, gate, grad)), poisoned_memory():
        gated = operation.apply_gate(*leaves)
        assert type(gated.grad_fn).__name__ == "GateBackward"
        grads = torch.autograd.grad(gated, leaves, grad)
        alone = [torch.autograd.grad(operation.apply_gate(*leaves), x, grad)[0] for x in leaves]
        with torch.no_grad():
            assert torch.equal(operation.apply_gate(*leaves), gated)
    assert gated.stride() == out.stride()
    compare([gated, *grads], out, gate, grad)
    assert all(map(torch.equal, alone, grads))


@needs_kernels
def test_a_gate_of_zero_keeps_its_gradient(device):
    """σ = 0 wipes the output out: the backward reads what was there before."""
    out = torch.ones(1, 3, 1, 16, device=device, requires_grad=True)
    gate = torch.tensor([-math.inf, -80.0, -math.nan], device=device).view(1, 3, 1).requires_grad_()
    gated = operation.apply_gate(out, gate)
    grad_out, grad_gate = torch.autograd.grad(gated, (out, gate), torch.ones_like(gated))
    assert (gated[0, 0] == 0).all()
    assert (grad_out[0, 0] == 0).all()
    assert grad_gate[0, 0] == 0
    torch.testing.assert_close(grad_gate[0, 1], torch.full_like(grad_gate[0, 1], 16 * math.exp(-80)))
    assert all(x[0, 2].isnan().all() for x in (gated, grad_out, grad_gate))


@needs_kernels
def test_the_kernels_are_differentiable_twice_and_transformed(device):
    out, gate = (torch.randn(2, 5, 3, 16, device=device, requires_grad=True) for _ in range(2))

    def twice(function):
        first = torch.autograd.grad(function(out, gate).square().sum(), (out, gate), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (out, gate))

    plain = lambda out, gate: out * torch.sigmoid(gate)  # noqa: E731
    torch.testing.assert_close(twice(operation.apply_gate), twice(plain))
    mapped = torch.func.vmap(operation.apply_gate)(out, gate)
    torch.testing.assert_close(mapped, plain(out, gate))
    _, tangent = torch.func.jvp(operation.apply_gate, (out, gate), (gate, out))
    torch.testing.assert_close(tangent, torch.func.jvp(plain, (out, gate), (gate, out))[1])
    grad_of = torch.func.grad(lambda out: operation.apply_gate(out, gate).sum())
    torch.testing.assert_close(grad_of(out), torch.sigmoid(gate))


def test_the_plain_formula_is_differentiable_twice(device):
    for shape in ((2, 3, 2, 4), (2, 3, 2)):
        out = torch.randn(2, 3, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
        gate = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(operation.apply_gate, (out, gate))
        assert torch.autograd.gradgradcheck(operation.apply_gate, (out, gate))
        grad = torch.randn_like(out)
        mine = operation.differentiate_plainly(grad, out, gate)
        torch.testing.assert_close(mine, torch.autograd.grad(operation.apply_gate(out, gate), (out, gate), grad))


@needs_kernels
def test_offsets_past_int32(device):
    start = 2**31 + 16
    memory = torch.empty(start + 16, dtype=torch.float16, device=device)  # untouched but for two rows
    out = memory.as_strided((2, 1, 16), (start, 16, 1)).copy_(torch.randn(2, 1, 16, device=device))
    gate = torch.randn(2, 1, 16, device=device).half()
    gated = operation.apply_gate(out, gate)
    assert_close_to_truth(gated, define(out, gate), operation.gate_plainly(out, gate))
    grads = torch.autograd.grad(
        operation.apply_gate(out.requires_grad_(), gate.requires_grad_()), (out, gate), torch.ones_like(gate)
    )
    for mine, exact in zip(grads, differentiate(torch.ones_like(gate), out.detach(), gate.detach()), strict=True):
        torch.testing.assert_close(mine, exact.half())


# === `attention` ===


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize("per_feature", [True, False])
@pytest.mark.parametrize("scheme", [Rope(), Alibi(), ReRope(5)], ids=["rope", "alibi", "rerope"])
@pytest.mark.both_modes
def test_attention(device, impl, layout, per_feature, scheme):
    """Output and gradients are those of the same call without a gate, and the gate's definition."""
    packed = layout == "thd"
    tensors = draw(device, layout=layout, batch=None if packed else B, queries=T, keys=T, v_head_dim=DV)
    keywords = {"position": scheme, "causal": True, "layout": layout, "impl": impl}
    if packed:
        keywords["cu_seqlens_q"] = torch.tensor([0, 5, T - 2], device=device)
    gate = draw_gate(device, torch.float32, (*rows_of(layout), DV) if per_feature else rows_of(layout), "slice")
    leaves = [x.requires_grad_() for x in (*tensors, gate.detach())]
    with unchanged(leaves):
        out, lse = attention(*leaves[:3], **keywords, return_lse=True)
        gated, its_lse = attention(*leaves[:3], **keywords, gate=leaves[3], return_lse=True)
        grad = torch.randn_like(out)
        mine = torch.autograd.grad(gated, leaves, grad)
        grad_out, grad_gate = differentiate(grad, out, gate)
        plain = torch.autograd.grad(out, leaves[:3], grad_out.float())
    assert torch.equal(its_lse, lse)
    assert gated.stride() == out.stride()
    torch.testing.assert_close(gated.double(), define(out, gate), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(mine[:3], plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[3].double(), grad_gate, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_a_row_that_attends_nothing(device, impl):
    q, k, v = (x.requires_grad_() for x in draw(device, queries=T, keys=T))
    gate = torch.randn(B, T, H, device=device, requires_grad=True)
    lengths = torch.tensor([T, 0], device=device)
    out = attention(q, k, v, key_lengths=lengths, gate=gate, impl=impl)
    assert (out[1] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v, gate))
    assert all(x.isfinite().all() for x in grads)
    assert (grads[3][1] == 0).all()
    nan = torch.full_like(gate, math.nan)
    assert attention(q, k, v, key_lengths=lengths, gate=nan, impl=impl).isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_decoding(device, impl):
    """One query over a cache, and over pages."""
    q, k, v = draw(device, queries=1, keys=40)
    gate = torch.randn(B, 1, H, D, device=device)
    lengths = torch.tensor([40, 17], device=device)
    out = attention(q, k, v, key_lengths=lengths, impl=impl)
    torch.testing.assert_close(
        attention(q, k, v, key_lengths=lengths, gate=gate, impl=impl).double(), define(out, gate), rtol=2e-6, atol=1e-6
    )
    pages_k, pages_v = (torch.randn(6, 16, K, D, device=device) for _ in range(2))
    paged = {"key_lengths": lengths, "block_table": torch.tensor([[0, 1, 2], [3, 4, 5]], device=device), "impl": impl}
    out = attention(q, pages_k, pages_v, **paged)
    gated = attention(q, pages_k, pages_v, gate=gate, **paged)
    torch.testing.assert_close(gated.double(), define(out, gate), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_rounded_once_more(device, dtype):
    """A gate after a backend multiplies in float32, and rounds once more.

    4 roundings of float32 flip float16's last place, 2 ** 13 times as wide, in 1 of 1000 results at most: twice that.
    """
    q, k, v = draw(device, dtype)
    gate = torch.randn(B, T, H, D, device=device).to(dtype)
    out, gated = (attention(q, k, v, gate=x, impl="reference") for x in (None, gate))
    truth = define(out, gate)
    torch.testing.assert_close(gated, truth.to(dtype))
    assert dtype == torch.float64 or (gated == truth.to(dtype)).double().mean() > 0.998


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("per_feature", [True, False])
def test_kernels_that_gate_their_own_output_round_it_once(device, dtype, per_feature):
    q, k, v = draw(device, dtype)
    gate = torch.randn((B, T, H, D) if per_feature else (B, T, H), device=device).to(dtype)
    truth = define(attention(*(x.double() for x in (q, k, v)), impl="reference"), gate)
    baseline = operation.gate_plainly(attention(q, k, v, impl="reference"), gate)
    assert_close_to_truth(attention(q, k, v, gate=gate, impl="triton"), truth, baseline, roundings=2)


def test_gradcheck(device):
    q, k, v = (x.requires_grad_() for x in draw(device, torch.float64, batch=1, queries=3, keys=3, head_dim=4))
    gate = torch.randn(1, 3, H, dtype=torch.float64, device=device, requires_grad=True)
    function = functools.partial(attention, position=Rope(), causal=True, impl="reference")
    assert torch.autograd.gradcheck(lambda q, k, v, gate: function(q, k, v, gate=gate), (q, k, v, gate))
    assert torch.autograd.gradgradcheck(lambda q, k, v, gate: function(q, k, v, gate=gate), (q, k, v, gate))


@pytest.mark.parametrize("wanting", ["gate", "q"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_one_gradient_alone(device, impl, wanting):
    q, k, v = draw(device)
    gate = torch.randn(B, T, H, D, device=device)
    leaf = {"gate": gate, "q": q}[wanting].requires_grad_()
    out = attention(q, k, v, gate=gate, impl=impl)
    plain = attention(q, k, v, impl=impl) * torch.sigmoid(gate)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.square().sum(), leaf)[0] for x in (out, plain)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_checkpoint(device, impl):
    q, k, v = (x.requires_grad_() for x in draw(device))
    gate = torch.randn(B, T, H, D, device=device, requires_grad=True)
    leaves = (q, k, v, gate)
    function = lambda q, k, v, gate: attention(q, k, v, gate=gate, causal=True, impl=impl)  # noqa: E731
    grad = torch.randn(B, T, H, D, device=device)
    plain = torch.autograd.grad(function(*leaves), leaves, grad)
    again = torch.autograd.grad(checkpoint(function, *leaves, use_reentrant=False), leaves, grad)
    torch.testing.assert_close(again, plain)


@pytest.mark.both_modes
def test_autocast(device):
    q, k, v = draw(device)
    gate = torch.randn(B, T, H, D, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(q, k, v, gate=gate, impl="reference")
        assert explain_choice(q, k, v, gate=gate, impl="reference").name == "reference"
    assert out.dtype == torch.bfloat16
    lowered = [x.bfloat16() for x in (q, k, v, gate)]
    torch.testing.assert_close(out, attention(*lowered[:3], gate=lowered[3], impl="reference"))
    (grad,) = torch.autograd.grad(out.float().sum(), gate)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("per_feature", [True, False])
def test_compile(device, autocast, per_feature):
    q, k, v = (x.requires_grad_() for x in draw(device))
    gate = torch.randn((B, T, H, D) if per_feature else (B, T, H), device=device, requires_grad=True)

    def function(q, k, v, gate):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return attention(q, k, v, position=Rope(), causal=True, gate=gate, impl="reference")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grad = torch.randn(B, T, H, D, device=device)
    results = [
        [x, *torch.autograd.grad(x, (q, k, v, gate), grad.to(x.dtype))]
        for x in (compiled(q, k, v, gate), function(q, k, v, gate))
    ]
    torch.testing.assert_close(*results)


@needs_kernels
def test_compile_around_the_kernels(device):
    """The operator gates its output, both ways, as eager calls do."""
    q, k, v = (x.requires_grad_() for x in draw(device))
    gate = torch.randn(B, T, H, D, device=device, requires_grad=True)
    function = functools.partial(attention, position=Rope(), causal=True, impl="triton")
    compiled = torch.compile(lambda q, k, v, gate: function(q, k, v, gate=gate), fullgraph=True, backend="aot_eager")
    grad = torch.randn(B, T, H, D, device=device)
    results = [
        [x, *torch.autograd.grad(x, (q, k, v, gate), grad)]
        for x in (compiled(q, k, v, gate), function(q, k, v, gate=gate))
    ]
    torch.testing.assert_close(*results)


def test_transforms(device):
    q, k, v = draw(device, torch.float64)
    gate = torch.randn(B, T, H, D, dtype=torch.float64, device=device)
    plain = attention(q, k, v, causal=True) * torch.sigmoid(gate)
    mapped = torch.func.vmap(lambda *x: attention(*(y[None] for y in x[:3]), causal=True, gate=x[3][None])[0])
    torch.testing.assert_close(mapped(q, k, v, gate), plain)
    grad = torch.func.grad(lambda gate: attention(q, k, v, causal=True, gate=gate).sum())(gate)
    sigma = torch.sigmoid(gate)
    torch.testing.assert_close(grad, attention(q, k, v, causal=True) * sigma * (1 - sigma))


@needs_kernels
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_planned_calls_are_gated(device, monkeypatch, layout):
    """A plan gates its output. Calls without a gate, and with gates of other strides, have plans of their own."""
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    KINDS.clear()
    q, k, v = draw(device, layout=layout)
    gates = [draw_gate(device, torch.float32, (*rows_of(layout), D), strides) for strides in STRIDES]
    gates.append(draw_gate(device, torch.float32, rows_of(layout)))
    outs = [attention(q, k, v, gate=gate, layout=layout, impl="triton") for gate in (None, None, *gates)]
    assert [x.gates for x in kinds_of()] == [False]
    again = [attention(q, k, v, gate=gate, layout=layout, impl="triton") for gate in (*gates, *gates)]
    assert [x.gates for x in kinds_of()] == [False, *[True] * len(gates)]
    for gate, gated in zip(3 * gates, outs[2:] + again, strict=True):
        torch.testing.assert_close(gated.double(), define(outs[0], gate), rtol=2e-6, atol=1e-6)
    with pytest.raises(ValueError, match="gate has shape"):
        attention(q, k, v, gate=gates[0][:1], layout=layout, impl="triton")
    for gate in (gates[1], gates[-1]):  # a feature, and a head
        leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
        sigma = torch.sigmoid(leaves[3] if gate.ndim == 4 else leaves[3][..., None])
        plain = attention(*leaves[:3], layout=layout, impl="reference") * sigma
        ones = torch.ones_like(plain)
        truth = torch.autograd.grad(plain, leaves, ones)
        for _ in range(3):
            out = attention(*leaves[:3], gate=leaves[3], layout=layout, impl="triton")
            grads = torch.autograd.grad(out, leaves, ones)
            torch.testing.assert_close(grads, truth, rtol=1e-4, atol=1e-5)
        leaves[3].requires_grad_(False)  # and where the gate is fixed
        for _ in range(3):
            out = attention(*leaves[:3], gate=leaves[3], layout=layout, impl="triton")
            torch.testing.assert_close(torch.autograd.grad(out, leaves[:3], ones), truth[:3], rtol=1e-4, atol=1e-5)
    assert [x.gates for x in kinds_of()] == [False, *[True] * (len(gates) + 4)]


@pytest.mark.parametrize(
    ("gate", "error", "said"),
    [
        (lambda: 1.0, TypeError, "gate is float, but must be a tensor of q's dtype, torch.float32"),
        (lambda: torch.zeros(B, T, H, D).double(), TypeError, "gate is torch.float64, but"),
        (lambda: torch.zeros(B, T, H).long(), TypeError, "gate is torch.int64, but"),
        (lambda: torch.zeros(B, T, H, 1), ValueError, r"gate has shape \(2, 21, 4, 1\), but must be like the output"),
        (lambda: torch.zeros(B, H, T, D), ValueError, r"or one number for each head, \(B, T, H\): \(2, 21, 4\)"),
        (lambda: torch.zeros(B, H, T), ValueError, r"gate has shape \(2, 4, 21\)"),
        (lambda: torch.zeros(H), ValueError, r"gate has shape \(4,\)"),
        (lambda: torch.zeros(B, T, H * D), ValueError, "gate has shape"),
        (lambda: torch.zeros(B, T, H, device="meta"), ValueError, "gate is on meta, but must be on q's device"),
        (lambda: torch.zeros(B, T, H).to_sparse(), TypeError, "gate is a tensor of layout torch.sparse_coo"),
    ],
)
def test_bad_gates(gate, error, said):
    q, k, v = draw(torch.device("cpu"))
    for function in (attention, explain_choice):
        with pytest.raises(error, match=said):
            function(q, k, v, gate=gate())


def test_empty(device):
    q, k, v = (x.requires_grad_() for x in draw(device, queries=0))
    gate = torch.zeros(B, 0, H, D, device=device, requires_grad=True)
    out = attention(q, k, v, gate=gate)
    assert out.shape == (B, 0, H, D)
    assert torch.autograd.grad(out.sum(), gate)[0].shape == gate.shape
    q, k, v = draw(device, keys=0)
    assert (attention(q, k, v, gate=torch.ones(B, T, H, device=device)) == 0).all()


@needs_kernels
@pytest.mark.parametrize("per_feature", [True, False])
def test_operator(device, per_feature):
    """Its schema, fake and autograd formula, with a gate beside q."""
    both = torch.randn(B, H, T, 2 * D, device=device)
    gate = both[..., D:] if per_feature else both[..., D].contiguous()
    q, k, v = draw(device, queries=T, keys=T, layout="bhtd")
    call = make_call(q.requires_grad_(), k, v, causal=True, layout="bhtd")
    leaves = flatten(call._replace(gate=gate.detach().requires_grad_()))
    torch.library.opcheck(torch.ops.ropewalk.attend.default, (*leaves, True, "triton"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_shut_gates_keep_their_gradients(device, impl):
    """Nothing is divided by σ, which may be 0."""
    q, k, v = (x.requires_grad_() for x in draw(device))
    values = torch.tensor([-math.inf, -80.0, 0.0, 80.0, math.inf], device=device)
    gate = values[torch.arange(B * T * H * D, device=device) % 5].view(B, T, H, D).requires_grad_()
    out = attention(q, k, v, causal=True, gate=gate, impl=impl)
    grads = torch.autograd.grad(out.sum(), (q, k, v, gate))
    assert all(x.isfinite().all() for x in grads)
    plain = attention(q.detach(), k.detach(), v.detach(), causal=True, impl="reference").double()
    sigma = torch.sigmoid(gate.detach().double())
    slope = sigma * (1 - sigma)  # from 0 to 1e-35 and a quarter
    assert not grads[3][slope == 0].any()
    torch.testing.assert_close(grads[3].double()[slope > 0] / slope[slope > 0], plain[slope > 0], rtol=1e-4, atol=1e-5)


# === machine code ===


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("per_feature", [True, False])
@pytest.mark.parametrize(("dtype", "features"), [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64)])
def test_kernels_compile_without_spills(tmp_path, target, per_feature, dtype, features):
    """Accesses of 16 bytes, from a gate beside q, and no spills."""
    from ropewalk.ops.attention.gate import kernel

    out = torch.empty(2, 64, 4, features, dtype=dtype)
    gate = torch.empty(2, 64, 4, 2 * features, dtype=dtype)[..., features:] if per_feature else out[..., 0].contiguous()
    launches = []
    steps = SimpleNamespace(launch=lambda kernel, n, /, **given: launches.append((kernel, (), given)))
    kernel.forward(kernel.GatedOutput(out, gate), steps)
    kernel.backward(kernel.GateGradients(out, out, gate, True, True), steps)
    assert len(launches) == 2
    for launch in launches:
        compiled = compile_launch(*launch, TARGETS[target])
        assert spilled_bytes(resources(compiled, tmp_path), target) == 0
        if TARGETS[target].backend == "cuda":
            accesses = re.findall(r"(?:ld|st)\.global\S*?\.(v\d)?\.?b(\d+)", compiled.asm["ptx"])
            wide = [int(vector[1:] or 1) * int(bits) for vector, bits in accesses if vector]
            assert wide
            assert set(wide) == {128}
            assert per_feature == (len(wide) == len(accesses))


@needs_kernels
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "output", "gate"])
def test_its_own_launches_are_planned(device, monkeypatch, wanted):
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    KINDS.clear()
    out = torch.randn(B, T, H, DV, device=device)
    gate = draw_gate(device, torch.float32, out.shape, "slice")
    grad = torch.randn_like(out)
    leaves = [x.detach().requires_grad_(wants) for x, wants in zip((out, gate), wanted, strict=True)]
    results = []
    for _ in range(4):
        gated = operation.apply_gate(*leaves)
        results.append([gated, *torch.autograd.grad(gated, [x for x in leaves if x.requires_grad], grad)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert [len(kinds_of(x)) for x in operation._operations()] == [1, 1]
    assert all(None not in kind.plans.values() for kind in KINDS.found.values())


GATED = {"feature": (256, 1), "head": (1, None)}  # strides of a token, and of a feature


def gate_of(strides, head_dim):
    from ropewalk.ops.attention.triton.arguments import Gate

    stride_token, stride_feature = GATED[strides]
    return Gate(torch.empty(1, dtype=torch.bfloat16), 2048, 512, stride_token, stride_feature, head_dim)


@pytest.mark.compile
@pytest.mark.parametrize("strides", GATED)
@pytest.mark.parametrize(("head_dim", "name"), [(128, "rope-causal"), (64, "rope-causal"), (128, "packed")])
def test_triton_compiles_with_few_more_spills(monkeypatch, tmp_path, head_dim, name, strides):
    launches, _ = launches_of(monkeypatch, "sm_90", head_dim, head_dim, torch.bfloat16, name)
    for kernel, arguments, keywords in launches[:2]:
        given = keywords | {"gate": gate_of(strides, head_dim)}
        if "do_ungated" in kernel.arg_names:
            given |= {"grad_gate": given["gate"], "do_ungated": keywords["dq"]}
        compiled = compile_launch(kernel, arguments, given, TARGETS["sm_90"])
        assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
        assert spilled_bytes(resources(compiled, tmp_path), "sm_90") <= 128  # of dQ at D 64; 64 elsewhere


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("strides", GATED)
@pytest.mark.parametrize(("head_dim", "name"), [(128, "rope-causal"), (64, "rope-causal"), (128, "packed-causal")])
def test_gluon_compiles_with_few_more_spills(monkeypatch, tmp_path, head_dim, name, strides):
    hopper = pytest.importorskip("helpers.compile_hopper")
    from ropewalk.ops.attention.triton.launch_common import row_target

    gate = gate_of(strides, head_dim)
    launch, _ = hopper.forward_launch_of(monkeypatch, head_dim, torch.bfloat16, name)
    report = hopper.ptxas_report(hopper.compile_gluon(launch, gate=gate), tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    assert hopper.spilled_bytes(report) <= hopper.allowed_spills("forward", launch, name) + 64
    (preprocess, arguments, keywords), *_ = hopper.backward_launches_of(monkeypatch, head_dim, torch.bfloat16, name)
    do = keywords["do"] if keywords["packed"] is None else row_target(keywords["do"].base)._replace(stride_batch=None)
    given = keywords | {"gate": gate, "grad_gate": gate, "do_ungated": do}
    compiled = compile_launch(preprocess, arguments, given, TARGETS["sm_90"])
    assert spilled_bytes(resources(compiled, tmp_path), "sm_90") == 0
