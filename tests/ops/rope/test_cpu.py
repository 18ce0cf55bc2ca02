"""The CPU's rotation in chunks: every cut of batch rows and tokens, and every form of memory, gives the same."""

from __future__ import annotations

import pytest
import torch
from helpers.rope_definition import check_rotation, random_tables, random_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import apply_rope
from ropewalk.ops.rope import cpu, reference
from ropewalk.ops.rope.call import RopeCall, RopeFlags


@pytest.fixture(autouse=True)
def _needs_a_cpu(device):
    if device.type != "cpu":
        pytest.skip("GPUs do not rotate in chunks")


@pytest.fixture
def in_chunks(monkeypatch):
    """Make chunks of at most so many elements, and let one thread rotate them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda elements: monkeypatch.setattr(cpu, "CHUNK", elements)
    torch.set_num_threads(threads)


# Elements of a chunk: less than a token of 3 heads of 8, two tokens, one batch row and a bit, two batch rows, all.
@pytest.mark.parametrize("elements", [1, 2 * 24, 6 * 24, 10 * 24, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_chunks_of_any_size(in_chunks, layout, interleaved, dtype, elements):
    in_chunks(elements)
    shapes = {"bthd": lambda h: (3, 5, h, 8), "bhtd": lambda h: (3, h, 5, 8), "thd": lambda h: (5, h, 8)}
    q, k = (random_tensor(*shapes[layout](heads), dtype=dtype) for heads in (3, 1))
    positions = torch.tensor([7, 0, 3, 3, 12])  # the last is outside the table
    where = {"positions": positions if layout == "thd" else torch.stack([positions, positions.flip(0), positions])}
    check_rotation(q, k, *random_tables(12, 4), impl="reference", layout=layout, interleaved=interleaved, **where)
    per_token = random_tables(1 if layout == "thd" else 3, 5, 3)
    flags = {"rotary_offset": 1, "inverse": True}  # complex numbers do not begin at odd features
    check_rotation(q, k, *per_token, impl="reference", layout=layout, interleaved=interleaved, **flags)


def test_gradients_in_chunks(in_chunks):
    in_chunks(48)
    cos, sin = random_tables(12, 4)
    q, cotangent = random_tensor(2, 12, 3, 8).requires_grad_(), random_tensor(2, 12, 3, 8)
    for interleaved in (False, True):
        (grad,) = torch.autograd.grad(apply_rope(q, None, cos, sin, interleaved=interleaved), q, cotangent)
        expected = reference.apply_rope(cotangent, cos, sin, interleaved=interleaved, inverse=True)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_temporary_is_as_large_as_a_tensor(in_chunks, interleaved):
    in_chunks(1 << 10)
    q = random_tensor(1, 512, 4, 16, dtype=torch.bfloat16)
    out, sizes = torch.empty_like(q), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype != q.dtype:
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Sizes():
        cpu.rotate((q,), (out,), RopeCall(*random_tables(512, 8), None, None, 0, RopeFlags(interleaved=interleaved)))
    assert sizes
    assert max(sizes) <= 512 * 16 * 4  # the tables of cosines, which every head shares
