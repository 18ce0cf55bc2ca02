"""Tracers of every kind record attention, or are refused by name; the operators are what their schemas say."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
from helpers.attention_calls import TK, TQ, D, H, K, draw
from helpers.modes import needs_kernels
from helpers.plain_kernels import PlainKernels
from torch.fx.experimental.proxy_tensor import make_fx

from ropewalk import Alibi, ExpoSB, NoPosition, ReRope, Rope, T5Bias, attention
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import flatten

SCHEMES = {"none": NoPosition(), "rope": Rope(), "alibi": Alibi(), "rerope": ReRope(5), "weights": ExpoSB()}


class Block(torch.nn.Module):
    """Projections, and attention between them."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(D, (H + 2 * K) * D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).split((H, K, K), dim=2)
        return attention(q, k, v, position=Rope(), causal=True, window=6)


@pytest.fixture
def kernels(monkeypatch):
    """A backend "plain" with a backward of its own."""
    for registry in (backends.KERNELS, backends.BACKENDS):
        monkeypatch.setitem(registry, "plain", PlainKernels())


# Tracers


@pytest.mark.parametrize("scheme", [x if x == "rope" else pytest.param(x, marks=pytest.mark.slow) for x in SCHEMES])
def test_symbolic_graphs_serve_other_lengths(device, scheme):
    def function(q, k, v):
        return attention(q, k, v, position=SCHEMES[scheme], causal=True, window=6, return_lse=True)

    graph = make_fx(function, tracing_mode="symbolic")(*draw(device, keys=TK + 4))
    longer = draw(device, batch=3, queries=TQ + 6, keys=TK + 13)
    torch.testing.assert_close(graph(*longer), function(*longer))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_is_refused(device):
    with pytest.raises(TypeError, match=r"q is traced by torch.jit.trace, .* use torch.export or torch.compile"):
        torch.jit.trace(attention, draw(device))
    attention(*draw(device))  # what comes after is not


@pytest.mark.slow
def test_strict_export_keeps_the_length_free(device):
    block = Block().to(device)
    length = torch.export.Dim("length", min=4, max=64)
    x = torch.randn(2, 16, D, device=device)
    program = torch.export.export(block, (x,), dynamic_shapes=({1: length},), strict=True)
    longer = torch.randn(2, 23, D, device=device)
    torch.testing.assert_close(program.module()(longer), block(longer))


@pytest.mark.slow
def test_aot_inductor_compiles_it(device, tmp_path):
    if device.type != "cpu":  # seen with torch 2.11: the package of a lone nn.Linear crashed the process there
        pytest.skip("AOTInductor is tried on a CPU")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no C++ compiler")
    block, x = Block().to(device), torch.randn(2, 16, D, device=device)
    with torch.no_grad():
        program = torch.export.export(block, (x,), strict=True)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), block(x))


# The operators' schemas. `test_attention_operator.py` has every kind of call, with Triton's kernels.


@pytest.mark.parametrize("requires_grad", [True, False])
def test_attend_is_what_its_schema_says(device, kernels, requires_grad):
    tensors = [x.requires_grad_(requires_grad) for x in draw(device, layout="bhtd")]
    call = make_call(*tensors, layout="bhtd", position=Rope(), causal=True)
    arguments = (*flatten(call), requires_grad, "plain")
    torch.library.opcheck(torch.ops.ropewalk.attend.default, arguments)


def test_attend_backward_is_what_its_schema_says(device, kernels):
    call = make_call(*draw(device), position=Rope(), causal=True)
    out, lse, q, k, *_ = torch.ops.ropewalk.attend(*flatten(call), True, "plain")
    far, wanted = (None, None, None), [False, False, False]
    rest = (*far, wanted, "plain", *flatten(call._replace(q=q, k=k)))
    for grad_lse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), grad_lse, out, lse, *rest)
        torch.library.opcheck(torch.ops.ropewalk.attend_backward.default, arguments)


# The gradient of the log-sum-exp alone


def log_sum_exp(impl, position):
    return lambda q, k, v: attention(q, k, v, position=position, causal=True, return_lse=True, impl=impl)[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("position", [NoPosition(), Rope()], ids=["none", "rope"])
@pytest.mark.parametrize("impl", [None, "reference", "plain", pytest.param("triton", marks=needs_kernels)], ids=str)
def test_v_has_no_gradient_where_the_log_sum_exp_alone_is_read(device, kernels, impl, position, compiled):
    function = log_sum_exp(impl, position)
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    tensors = [x.requires_grad_() for x in draw(device)]
    grads = torch.autograd.grad(function(*tensors).sin().sum(), tensors, allow_unused=True)
    assert grads[2] is None
    expected = log_sum_exp("reference", position)(*tensors).sin().sum()
    torch.testing.assert_close(grads[:2], torch.autograd.grad(expected, tensors[:2]), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(function(*tensors).sum(), tensors)


@pytest.mark.parametrize("impl", ["reference", "plain", pytest.param("triton", marks=needs_kernels)])
def test_v_has_its_gradient_where_both_results_are_read(device, kernels, impl):
    tensors = [x.requires_grad_() for x in draw(device)]

    def grads(impl):
        out, lse = attention(*tensors, position=Rope(), causal=True, return_lse=True, impl=impl)
        return torch.autograd.grad(out.sin().sum() + lse.sin().sum(), tensors)

    torch.testing.assert_close(grads(impl), grads("reference"), rtol=1e-4, atol=1e-4)


# Numbers of NumPy

NUMBERS = {
    "window": (np.int64(4), 4, True),
    "scale": (np.float64(0.1), 0.1, True),
    "scale of float32": (np.float32(0.125), 0.125, False),
    "softcap": (np.float32(3), 3.0, False),
    "dropout_p": (np.float32(0.25), 0.25, False),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(device, name):
    given, plain, fullgraph = NUMBERS[name]  # torch.compile breaks the graph to read a float32 of NumPy
    name, tensors = name.partition(" ")[0], draw(device)

    def function(*tensors):
        return attention(*tensors, **{name: given})

    torch._dynamo.reset()
    runs = [lambda *tensors: attention(*tensors, **{name: plain}), function]
    if torch.__version__ >= "2.12":  # torch.compile of 2.11 fails on most numbers of NumPy, with an error of its own
        runs.append(torch.compile(function, backend="eager", fullgraph=fullgraph))
    results = []
    for run in runs:
        torch.manual_seed(0)
        results.append(run(*tensors))
    expected, eager, *compiled = results
    assert torch.equal(eager, expected)
    for result in compiled:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "weights", "t5"])
def test_no_head_gives_no_output(device, position):
    scheme = {**SCHEMES, "t5": T5Bias(torch.randn(32, 0, device=device))}[position]
    q, k, v = draw(device)
    assert attention(q[:, :, :0], k, v, position=scheme).shape == (*q.shape[:2], 0, D)
