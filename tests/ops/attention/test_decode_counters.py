"""Counters that launches leave zero: kept for each stream, and for each launch of a CUDA graph. No GPU is needed."""

import types

import pytest
import torch

pytest.importorskip("triton")

from ropewalk.ops.attention.triton import launch_common
from ropewalk.ops.attention.triton.launch_common import counters_of

DEVICE = torch.device("cuda:0")


class Gpu:
    """What a launcher asks of the current stream."""

    def __init__(self):
        self.stream, self.is_capturing, self.zeroed = 1, False, []


@pytest.fixture
def gpu(monkeypatch):
    gpu, zeros = Gpu(), torch.zeros

    def count_zeros(count, *, dtype, device):
        gpu.zeroed.append(count)
        return zeros(count, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", count_zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    stream = lambda device: types.SimpleNamespace(cuda_stream=gpu.stream, synchronize=lambda: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(launch_common, "_counters", {})
    monkeypatch.setattr(launch_common, "_captured_counters", {})
    monkeypatch.setattr(launch_common, "_CAPTURED_BLOCK", 64)
    return gpu


def place(x):
    """The bytes of a tensor."""
    return range(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())


def test_a_stream_keeps_its_counters_and_they_grow(gpu):
    first = counters_of(DEVICE, 8)
    assert counters_of(DEVICE, 9) is first
    gpu.stream = 2
    assert counters_of(DEVICE, 8) is not first
    gpu.stream = 1
    more = counters_of(DEVICE, 3000)
    assert more.numel() >= 3000
    assert counters_of(DEVICE) is more


def test_each_captured_launch_has_its_own_and_zeroes_nothing(gpu):
    counters_of(DEVICE, 5)
    gpu.is_capturing = True
    gpu.zeroed.clear()
    captured = [counters_of(DEVICE, count) for count in (5, 1, 7)]
    assert gpu.zeroed == []
    assert [x.numel() for x in captured] == [5, 1, 7]
    assert all(x.data_ptr() % 16 == captured[0].data_ptr() % 16 for x in captured)
    bytes_of = [set(place(x)) for x in captured]
    assert len(set.union(*bytes_of)) == sum(map(len, bytes_of))


def test_a_graph_zeroes_what_was_not_zeroed_before(gpu):
    gpu.is_capturing = True
    counters_of(DEVICE, 5)
    assert gpu.zeroed == [5]
    gpu.is_capturing = False
    counters_of(DEVICE, 5)
    gpu.is_capturing = True
    gpu.zeroed.clear()
    counters_of(DEVICE, 60)
    counters_of(DEVICE, 60)  # of 64
    assert gpu.zeroed == [60]


def test_blocks_follow_one_another_and_stay(gpu):
    """A graph has the address of its counters alone."""
    counters_of(DEVICE, 5)
    gpu.is_capturing = True
    first = counters_of(DEVICE, 40)
    address = first.data_ptr()
    del first
    gpu.is_capturing = False
    gpu.zeroed.clear()
    counters_of(DEVICE, 5)
    assert gpu.zeroed == [64]
    gpu.is_capturing = True
    assert counters_of(DEVICE, 40).data_ptr() != address
    kept = launch_common._captured_counters[DEVICE]
    assert [address in place(torch.IntTensor().set_(x.untyped_storage())) for x in kept] == [True, False]
