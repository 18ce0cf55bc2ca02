"""Every test here that takes `impl` runs once for each implementation that supports the device under test.

`norm_impl` is the same for calls with a norm.
"""

from __future__ import annotations

import pytest
import torch
from helpers.modes import ON_GPU, needs_kernels

from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    for fixture in {"impl", "norm_impl"} & set(metafunc.fixturenames):
        names = [impl for impl in IMPLEMENTATIONS if why_not(impl, device, has_norm=fixture == "norm_impl") is None]
        marked = [pytest.param(name, marks=needs_kernels) if name == "triton" else name for name in names]
        metafunc.parametrize(fixture, marked)
