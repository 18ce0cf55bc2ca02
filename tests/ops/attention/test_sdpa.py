"""cuDNN's call: bound as it attends, and traced. An operator of its name on the CPU stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.modes import ON_GPU
from torch import Tensor

from ropewalk import NoPosition, Rope
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.libraries.sdpa import Sdpa

pytestmark = pytest.mark.skipif(ON_GPU, reason="the operator is the GPU's own there, and other tests call it")
B, H, T, D = 2, 2, 18, 16


def draw() -> list[Tensor]:
    return [torch.randn(B, H, T, D) for _ in range(3)]


@pytest.fixture
def cudnn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU have an operator of cuDNN's name, and pass for an NVIDIA GPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float) -> tuple[Any, ...]:
        empty, number = q.new_empty(0), torch.empty((), dtype=torch.int64)
        out = torch.softmax(q @ k.mT * scale, dim=-1) @ v
        return out, empty, empty, empty, 1, 1, number, number, empty

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", attend, "CPU")
    monkeypatch.setattr(gpu, "is_nvidia", lambda device: True)
    yield
    library._destroy()


POSITIONS = {
    "none": NoPosition(),
    "rope": Rope(),
    "interleaved": Rope(interleaved=True),
    "blocks": Rope(pair_block=D // 2),
    "a part": Rope(rotary_dim=D // 2, rotary_offset=D // 2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_bound_call_is_what_the_library_attends(cudnn_on_a_cpu: None, name: str) -> None:
    q, k, v = draw()
    call = make_call(q, k, v, position=POSITIONS[name], layout="bhtd")
    expected, _ = Sdpa().attend(call)
    assert torch.equal(Sdpa().bind(call)(q, k, v), expected)
    assert name == "none" or not torch.equal(expected, Sdpa().attend(make_call(q, k, v, layout="bhtd"))[0])


def test_cudnns_call_is_traced(cudnn_on_a_cpu: None) -> None:
    q, k, v = draw()
    call = make_call(q, k, v, layout="bhtd")
    attend = torch.compile(lambda q: Sdpa().attend(call._replace(q=q))[0], fullgraph=True, backend="eager")
    assert torch.equal(attend(q), Sdpa().attend(call)[0])
