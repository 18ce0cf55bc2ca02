"""Every test here that takes `impl` runs once for each implementation that supports the device under test."""

from __future__ import annotations

import pytest
import torch
from helpers.modes import ON_GPU, needs_kernels

from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" not in metafunc.fixturenames:
        return
    device = torch.device("cuda" if ON_GPU else "cpu")
    names = [impl for impl in IMPLEMENTATIONS if why_not(impl, device) is None]
    metafunc.parametrize(
        "impl", [pytest.param(name, marks=needs_kernels) if name == "triton" else name for name in names]
    )
