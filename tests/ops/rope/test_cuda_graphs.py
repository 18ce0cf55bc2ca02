"""CUDA graphs, streams and devices: what only a GPU can show."""

import pytest
import torch
from helpers.rope_calls import CALLS, arguments, as_tuple, assert_same
from helpers.rope_definition import random_tables, random_tensor

from ropewalk import apply_rope

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_replays_the_rotation(name, inplace, cuda):
    (q, k, cos, sin), call = arguments(name, cuda)
    xs = [x for x in (q, k) if x is not None]
    source = [x.clone() for x in xs]
    apply_rope(q.clone(), None if k is None else k.clone(), cos, sin, inplace=inplace, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotated = as_tuple(apply_rope(q, k, cos, sin, inplace=inplace, **call))
    for factor in (1, -3):
        for x, original in zip(xs, source, strict=True):
            x.copy_(factor * original)
        expected = apply_rope(*(factor * x for x in source), *[None][: 2 - len(xs)], cos, sin, **call)
        graph.replay()
        assert_same(rotated, expected)


def test_a_cuda_graph_replays_forward_and_backward(cuda):
    (q, k, cos, sin), _ = arguments("plain", cuda)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    weights = [random_tensor(*x.shape, device=cuda) for x in leaves]

    def step():
        rotated = apply_rope(*leaves, cos, sin)
        return torch.autograd.grad(sum((x * w).sum() for x, w in zip(rotated, weights, strict=True)), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    for weight in weights:
        weight.mul_(-2)
    graph.replay()
    assert_same(grads, apply_rope(*weights, cos, sin, inverse=True))


def test_the_current_stream_is_the_one_used(cuda):
    (q, k, cos, sin), _ = arguments("plain", cuda)
    expected = apply_rope(q, k, cos, sin)
    late_q, late_k = torch.zeros_like(q), torch.zeros_like(k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on any other stream the rotation would overtake the copies
        late_q.copy_(q)
        late_k.copy_(k)
        rotated = apply_rope(late_q, late_k, cos, sin)
    stream.synchronize()
    assert_same(rotated, expected)


def test_a_repeated_call_gives_the_same_bits(cuda):
    cos, sin = random_tables(2048, 64, device=cuda)
    q = torch.randn(2, 2048, 16, 128, device=cuda, dtype=torch.bfloat16)
    expected = apply_rope(q, None, cos, sin)
    for _ in range(10):
        assert torch.equal(apply_rope(q, None, cos, sin), expected)


def test_a_second_device_is_served_while_the_first_is_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, _ = arguments("plain", torch.device("cuda:0"))
    expected = apply_rope(*tensors)
    with torch.cuda.device(0):
        rotated = apply_rope(*(x.to("cuda:1") for x in tensors))
        assert torch.cuda.current_device() == 0
    assert all(x.device.index == 1 for x in rotated)
    assert_same([x.to("cuda:0") for x in rotated], expected)
