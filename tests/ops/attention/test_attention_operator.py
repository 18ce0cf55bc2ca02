"""What looks at a program rather than running it sees one operator, compiled once, with the results of eager calls."""

from __future__ import annotations

import pytest
import torch
from attention_calls import (
    HAS_KERNELS,
    INTERPRETED,
    ON_GPU,
    SCHEMES,
    TK,
    TQ,
    B,
    D,
    H,
    draw,
    needs_kernels,
    value_and_grads,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ropewalk import Alibi, ExpoSB, NoPosition, Rope, attention
from ropewalk.ops.attention.checks import as_bhtd, check_call
from ropewalk.ops.attention.cores import may_use_cudnn
from ropewalk.ops.attention.prepare import prepare

LENGTHS = [17, 23, 5, 40] + [300, 1000] * ON_GPU
compiles_for_long = pytest.mark.skipif(not ON_GPU, reason="compiles for long")
# The interpreter's runs are for what needs it.
IMPLS = ["triton"] * HAS_KERNELS + ["reference", None] * (not INTERPRETED)

CALLS = {
    "plain": lambda device: {},
    "rope": lambda device: {"position": Rope(), "causal": True},
    "window": lambda device: {"position": Rope(interleaved=True, rotary_dim=8), "window": 7},
    "alibi": lambda device: {"position": Alibi(), "key_lengths": torch.tensor([TK, 4], device=device)},
    "decay": lambda device: {
        "position": ExpoSB(distance_decay=True),
        "mask": torch.rand(B, 1, 1, TK, device=device) > 0.3,
    },
    "positions": lambda device: {"position": Alibi(), "positions_q": torch.arange(TQ, device=device)[None] * 2},
    "scale": lambda device: {"scale": -0.5},
}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


def operator_arguments(tensors, keep, **call):
    """A call as `torch.ops.ropewalk.attend` takes it."""
    q, k, v = (as_bhtd(x, "bthd") for x in tensors)
    return q, k, v, keep, *prepare(q, k, check_call(q, k, v, layout="bhtd", **call))


def agree(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# The schemas


@needs_kernels
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("call", CALLS)
def test_the_operator_is_what_its_schema_says(device, call, requires_grad):
    tensors = [x.requires_grad_(requires_grad) for x in draw(device)]
    arguments = operator_arguments(tensors, requires_grad, **CALLS[call](device))
    torch.library.opcheck(torch.ops.ropewalk.attend.default, arguments)


@needs_kernels
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "slice", "features apart", "odd head dim"])
def test_results_have_the_strides_that_were_promised(device, layout):
    q, k, v = draw(device, head_dim=20 if layout == "odd head dim" else D)
    if layout == "bhtd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "slice":
        q, k, v = torch.cat((q, k, v), dim=2).split([H, 2, 2], dim=2)
    elif layout == "features apart":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.ropewalk.attend.default, operator_arguments(tensors, True, position=Rope()))


@needs_kernels
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_its_backward_is_what_its_schema_says(device, call, with_lse):
    q, k, v, _, *prepared = operator_arguments(draw(device), True, **CALLS[call](device))
    out, lse, mapped_q, mapped_k = torch.ops.ropewalk.attend(q, k, v, True, *prepared)
    if mapped_q.numel():
        q, k = mapped_q, mapped_k
    grad_lse = torch.randn_like(lse) if with_lse else None
    arguments = (torch.randn_like(out), grad_lse, q, k, v, out, lse, *prepared)
    torch.library.opcheck(torch.ops.ropewalk.attend_backward.default, arguments)


@needs_kernels
def test_without_keep_there_is_no_backward(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    out, *_ = torch.ops.ropewalk.attend(*operator_arguments(tensors, False, position=Rope()))
    with pytest.raises(RuntimeError, match="was called with keep=False"):
        out.sum().backward()


@needs_kernels
def test_it_is_differentiable_once(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    out, *_ = torch.ops.ropewalk.attend(*operator_arguments(tensors, True))
    grads = torch.autograd.grad(out.sin().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="attention by Triton kernels is differentiable once"):
        torch.autograd.grad(sum(grad.sum() for grad in grads), tensors)


# torch.compile


@pytest.mark.parametrize(
    ("scheme", "dynamic", "backend"),
    [
        *((scheme, None, "aot_eager") for scheme in SCHEMES),
        *((scheme, True, "aot_eager") for scheme in ("rope", "alibi")),
        *(pytest.param(scheme, None, "inductor", marks=compiles_for_long) for scheme in ("rope", "alibi")),
    ],
)
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_one_graph_serves_many_lengths(device, impl, scheme, dynamic, backend):
    call = {"position": SCHEMES[scheme], "causal": True, "impl": impl}
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, **call), backend=counter, fullgraph=True, dynamic=dynamic
    )
    for length in LENGTHS:
        tensors = draw(device, queries=length, keys=length, heads=2, key_heads=1)
        weights = torch.randn_like(tensors[0])
        agree(value_and_grads(compiled, tensors, weights), value_and_grads(attention, tensors, weights, **call))
    assert counter.frame_count <= 2  # the first length, and all others


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_compiled_calls_equal_eager_ones(device, impl, call):
    keywords = {**CALLS[call](device), "impl": impl}
    compiled = torch.compile(lambda *tensors: attention(*tensors, **keywords), backend="aot_eager", fullgraph=True)
    tensors = draw(device)
    weights = torch.randn_like(tensors[0])
    agree(value_and_grads(compiled, tensors, weights), value_and_grads(attention, tensors, weights, **keywords))
    with torch.no_grad():
        agree([compiled(*tensors)], [attention(*tensors, **keywords)])


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl], ids=str)
def test_the_log_sum_exp_compiles(device, impl):
    def function(q, k, v):
        out, lse = attention(q, k, v, position=Rope(), return_lse=True, impl=impl)
        return out * lse.transpose(1, 2)[..., None].to(out.dtype)

    tensors = draw(device)
    weights = torch.randn_like(tensors[0])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    agree(value_and_grads(compiled, tensors, weights), value_and_grads(function, tensors, weights))


def test_schemes_may_be_made_in_what_is_compiled(device):
    def function(q, k, v, base):
        return attention(q, k, v, position=Rope(base, interleaved=True), scale=base**-0.1, causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    tensors = draw(device)
    for base in (10000.0, 500000.0, 100.0):
        agree([compiled(*tensors, base)], [function(*tensors, base)])


def test_layers_with_schemes_of_their_own_compile(device):
    schemes = [Rope(), Rope(500000.0), Rope(inv_freq=torch.rand(4, device=device)), Alibi(), NoPosition()]

    def function(q, k, v):
        for scheme in schemes:
            q = attention(q, k, v, position=scheme, causal=True)
        return q

    tensors = draw(device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    agree([compiled(*tensors)], [function(*tensors)])


def test_autocast_compiles(device):
    def function(q, k, v):
        with torch.autocast(device.type, torch.bfloat16):
            return attention(q, k, v, position=Rope(), causal=True)

    tensors = draw(device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    agree([compiled(*tensors)], [function(*tensors)])


# Modes, checkpoints


class Onlooker(TorchDispatchMode):
    """Notes the operators that pass by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@needs_kernels
def test_a_mode_sees_the_operator(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    expected = attention(*tensors, position=Rope(), impl="triton")
    with Onlooker() as onlooker:
        out = attention(*tensors, position=Rope(), impl="triton")
        out.sum().backward()
    assert torch.equal(out, expected)
    assert onlooker.seen.count(torch.ops.ropewalk.attend.default) == 1
    assert onlooker.seen.count(torch.ops.ropewalk.attend_backward.default) == 1


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_fake_tensors_have_the_shapes_of_true_ones(device, impl):
    tensors = draw(device)
    expected = attention(*tensors, position=Rope(), impl=impl)
    with FakeTensorMode() as mode:
        out = attention(*(mode.from_tensor(x) for x in tensors), position=Rope(), impl=impl)
    assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)
    # What was fake is not remembered.
    assert torch.equal(attention(*tensors, position=Rope(), impl=impl), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_checkpoints_change_nothing(device, impl, use_reentrant):
    call = {"position": Rope(), "causal": True, "impl": impl}
    leaves = [x.requires_grad_() for x in draw(device)]
    weights = torch.randn_like(leaves[0])
    expected = value_and_grads(attention, leaves, weights, **call)
    out = checkpoint(lambda *tensors: attention(*tensors, **call), *leaves, use_reentrant=use_reentrant)
    (out * weights).sum().backward()
    agree([out, *(x.grad for x in leaves)], expected)


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_compiled_checkpoints_change_nothing(device, impl):
    call = {"position": Rope(), "causal": True, "impl": impl}
    tensors = draw(device)
    weights = torch.randn_like(tensors[0])

    def remembering(q, k, v):
        return checkpoint(lambda *x: attention(*x, **call), q, k, v, use_reentrant=False)

    compiled = torch.compile(remembering, backend="aot_eager", fullgraph=True)
    agree(value_and_grads(compiled, tensors, weights), value_and_grads(attention, tensors, weights, **call))


@needs_kernels
def test_lazily_negated_views(device):
    q, k, v = draw(device)
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, q)
    out = attention(negated, k, v, position=Rope(), impl="triton")
    assert torch.equal(out, attention(q, k, v, position=Rope(), impl="triton"))


# What only a GPU can show


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def warm_up(step):
    """Run a step as a CUDA graph wants it before its capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_graphs_replay_forward_and_backward(cuda, scheme, impl):
    tensors = [x.requires_grad_() for x in draw(cuda, torch.bfloat16, queries=130, keys=130, head_dim=64)]
    weights = torch.randn_like(tensors[0])
    call = {"position": SCHEMES[scheme], "causal": True, "impl": impl}

    def step():
        out = attention(*tensors, **call)
        return out, *torch.autograd.grad((out * weights).sum(), tensors)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for x in (*tensors, weights):
                x.copy_(torch.randn_like(x))
        graph.replay()
        agree(captured, step())


@pytest.mark.gpu
def test_tables_outlive_the_graphs_that_read_them(cuda):
    tensors = draw(cuda, torch.bfloat16, queries=130, keys=130, head_dim=64)
    expected = attention(*tensors, position=Rope(base=4321.0), impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors, position=Rope(base=4321.0), impl="triton")
    for base in range(40):  # as many other tables as push the first out of the memory
        attention(*tensors, position=Rope(base=100.0 + base), impl="triton")
    torch.cuda.empty_cache()
    torch.randn(1 << 24, device=cuda)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_tables_that_a_capture_makes_are_not_remembered(cuda):
    tensors = draw(cuda, torch.bfloat16, queries=130, keys=130, head_dim=64)
    attention(*tensors, impl="triton")
    position = Rope(inv_freq=torch.rand(32, device=cuda))
    attention(*tensors, position=Rope(inv_freq=torch.rand(32, device=cuda)), impl="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors, position=position, impl="triton")
    eager = attention(*tensors, position=position, impl="triton")
    graph.replay()
    assert torch.equal(out, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_call_waits_for_the_device(cuda, scheme, impl):
    tensors = [x.requires_grad_() for x in draw(cuda, torch.bfloat16, head_dim=64)]
    call = {"position": SCHEMES[scheme], "key_lengths": torch.tensor([TK, 4], device=cuda), "impl": impl}
    attention(*tensors, **call).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*tensors, **call).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_tables_are_ready_on_every_stream(cuda):
    tensors = draw(cuda, torch.bfloat16, queries=2048, keys=2048, head_dim=64)
    expected = attention(*tensors, position=Rope(base=50.0, attention_factor=2.0), impl="triton")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    position = Rope(inv_freq=50.0 ** (-torch.arange(32, device=cuda).double() / 32), attention_factor=2.0)
    with torch.cuda.stream(first):
        torch.cuda._sleep(100_000_000)  # on the second stream attention would overtake the making of the tables
        attention(*tensors, position=position, impl="triton")
    with torch.cuda.stream(second):
        out = attention(*tensors, position=position, impl="triton")
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)


def test_what_cudnn_may_do_is_a_constant_to_the_compiler():
    compiled = torch.compile(lambda x: x + 1 if may_use_cudnn() else x - 1, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == (1 if may_use_cudnn() else -1)
