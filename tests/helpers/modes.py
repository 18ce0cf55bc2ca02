"""Say where this run computes, and mark tests that need one place.

A run on the CPU has one of two modes. With TRITON_INTERPRET=1 it takes the tests that run Triton's kernels, in Triton's
interpreter; without, all others. A run on a GPU, by ROPEWALK_TEST_DEVICE=cuda, takes both. `tests/conftest.py` selects.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"
HAS_KERNELS = INTERPRETED or ON_GPU

needs_kernels = pytest.mark.kernels
on_gpu = pytest.mark.gpu
# The interpreter cuts to bfloat16 and does not round.
KERNEL_DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


def runs_here(item: pytest.Item) -> bool:
    """Whether a test belongs to this run's mode."""
    if item.get_closest_marker("gpu") is not None:
        return ON_GPU
    if item.get_closest_marker("kernels") is not None:
        return HAS_KERNELS
    return not INTERPRETED or item.get_closest_marker("both_modes") is not None
