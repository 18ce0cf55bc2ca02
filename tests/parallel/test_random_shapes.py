"""Sharded attention of random shapes, kinds and methods, beside the reference in float64."""

from __future__ import annotations

import pytest
import torch
from helpers import processes, sharded_shapes
from helpers.modes import ON_GPU


@pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_random_shapes(size: int) -> None:
    processes.run(size, sharded_shapes.compare, "cpu", torch.float32, 40, 97)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_random_shapes_on_two_gpus() -> None:
    processes.run(2, sharded_shapes.compare, "cuda", torch.bfloat16, 200, 1500, backend="nccl")
