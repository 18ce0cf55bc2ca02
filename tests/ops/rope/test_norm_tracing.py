"""The rotation with a norm under torch.compile, opcheck, transforms, checkpointing and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from helpers.modes import on_gpu
from helpers.norm_definition import BIASES, CASES, draw, make_norm, run
from helpers.rope_definition import random_tables, random_tensor
from torch.utils.checkpoint import checkpoint

from ropewalk import QKNorm, apply_rope

NAMES = ["biases", "olmo2-after", "cohere-weights", "packed", "bias-alone", "no-weight", "axes-after", "blocks-axes"]


def operator_arguments(name, device):
    case = CASES[name]
    xs, weights, (cos, sin), call = draw(case, device, torch.float32)
    biases = [call.get(name) for name, _ in zip(BIASES, xs, strict=False)]
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (*xs, *weights, *biases)]
    tensors = leaves if len(xs) == 2 else [x for of_q in leaves for x in (of_q, None)]
    norm = make_norm(case, [])
    others = (
        call.get("layout", "bthd"),
        call.get("interleaved", False),
        None,
        call.get("rotary_offset", 0),
        None,
        call.get("pair_block"),
        norm.eps,
        norm.offset,
        norm.after,
        norm.across_heads,
    )
    indices = (call.get("positions"), call.get("cu_seqlens"), call.get("axes"))
    return *tensors, cos, sin, *indices, 0, *others


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    torch.library.opcheck(torch.ops.ropewalk.norm_rope.default, operator_arguments(name, device))


@pytest.mark.parametrize(
    "needed",
    [(True,) * 6, (False, False, True, True, False, False), (True, False, False, True, False, True)],
)
def test_opcheck_of_the_backward(device, needed):
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments("biases", device)]
    grads = [random_tensor(*x.shape, device=device) for x in arguments[:2]]
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.ropewalk.norm_rope_backward.default
    torch.library.opcheck(operator, (*grads, *arguments[:6], needed, *arguments[6:]), test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_with_a_norm_made_inside(device, name):
    case = CASES[name]
    xs, weights, tables, call = draw(case, device, torch.float32)

    def function(*tensors):
        n = len(xs)
        norm = QKNorm(*tensors[n:], **case.norm)
        return apply_rope(tensors[0], tensors[1] if n == 2 else None, *tables, norm=norm, **call)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [None if x is None else x.detach().requires_grad_() for x in (*xs, *weights)]
    given = [x for x in leaves if x is not None]
    results = []
    for f in (function, compiled):
        outs = f(*leaves)
        outs = [outs] if len(xs) == 1 else outs
        results.append([*outs, *torch.autograd.grad(sum(x.sin().sum() for x in outs), given)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_compiled_code_is_not_compiled_again_for_lengths(device):
    cos, sin = random_tables(64, 8, device=device)
    weight = random_tensor(16, device=device)

    def function(q):
        return apply_rope(q, None, cos, sin, norm=QKNorm(weight))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 33):
        q = random_tensor(2, tokens, 2, 16, device=device)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 5):
            assert torch.equal(compiled(q), function(q))


def test_refusals_of_compiled_calls_name_the_argument(device):
    q = random_tensor(2, 3, 2, 16, device=device)
    tables = random_tables(8, 8, device=device)
    compiled = torch.compile(lambda x: apply_rope(x, None, *tables, norm=QKNorm(eps=-1.0)), backend="aot_eager")
    with pytest.raises(Exception, match=r"norm\.eps is -1\.0"):
        compiled(q)


@pytest.mark.parametrize("name", ["gemma3", "hunyuan", "olmo2", "cohere-weights", "axes-after", "blocks-axes"])
def test_vmap_and_jvp(device, name):
    case = CASES[name]
    xs, weights, tables, call = draw(case, device, torch.float64, torch.float64)
    many = [torch.stack([x, x * 2, -x]) for x in xs]

    def function(q, k):
        return tuple(run(case, [q, k], weights, tables, call, None))

    mapped = torch.func.vmap(function)(*many)
    for i in range(3):
        for a, b in zip(mapped, function(*(x[i] for x in many)), strict=True):
            torch.testing.assert_close(a[i], b)
    tangents = tuple(random_tensor(*x.shape, dtype=torch.float64, device=device) for x in xs)
    _, found = torch.func.jvp(function, tuple(xs), tangents)
    steps = [function(*(x + s * t for x, t in zip(xs, tangents, strict=True))) for s in (1e-6, -1e-6)]
    for tangent, above, below in zip(found, *steps, strict=True):
        torch.testing.assert_close(tangent, (above - below) / 2e-6, rtol=1e-5, atol=1e-6)


def test_impl_under_a_transform_is_refused(device):
    tables = random_tables(8, 8, device=device)
    q = random_tensor(3, 2, 3, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"impl is 'triton', but under torch\.func"):
        torch.func.vmap(lambda x: apply_rope(x, None, *tables, norm=QKNorm(), impl="triton"))(q)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(norm_impl, device, use_reentrant):
    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]

    def layer(*tensors):
        q, k = run(CASES["qwen3"], list(tensors[:2]), list(tensors[2:]), tables, call, norm_impl)
        return q.sin().sum() + k.sin().sum()

    expected = torch.autograd.grad(layer(*leaves), leaves)
    checkpoint(layer, *leaves, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, expected, strict=True))


def test_a_dispatch_mode_sees_one_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    xs, weights, tables, call = draw(CASES["qwen3"], device, torch.float32)
    expected = run(CASES["qwen3"], xs, weights, tables, call, None)
    with Mode():
        outs = run(CASES["qwen3"], xs, weights, tables, call, None)
    assert seen == ["ropewalk.norm_rope.default"]
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@on_gpu
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "packed", "axes", "blocks-axes"])
def test_forward_and_backward_in_a_cuda_graph(device, name):
    case = CASES[name]
    xs, weights, tables, call = draw(case, device, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (*xs, *weights)]
    cotangents = [random_tensor(*x.shape, dtype=x.dtype, device=device) for x in xs]

    def step():
        outs = run(case, leaves[:2], leaves[2:], tables, call, "triton")
        return [*outs, *torch.autograd.grad(outs, leaves, cotangents)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5).add_(0.25)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gemma3", "q-alone", "axes-packed", "blocks", "biases"])
def test_gradgradcheck_of_the_operator(device, name):
    arguments = operator_arguments(name, device)
    given = [i for i, x in enumerate(arguments[:6]) if x is not None]
    leaves = [arguments[i].detach()[:1, :2] if arguments[i].ndim == 4 else arguments[i].detach() for i in given]
    leaves = [x.double().clone().requires_grad_() for x in leaves]

    def function(*tensors):
        six = [None] * 6
        for i, x in zip(given, tensors, strict=True):
            six[i] = x
        return tuple(torch.ops.ropewalk.norm_rope(*six, *arguments[6:]))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
