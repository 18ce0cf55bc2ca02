"""Every test here that takes `impl` runs once for each implementation that supports the device under test.

`norm_impl` is the same for calls with a norm, `axes_impl` for those with several axes.
"""

from __future__ import annotations

import pytest
import torch
from helpers.modes import ON_GPU, needs_kernels

from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    for fixture in {"impl", "norm_impl", "axes_impl"} & set(metafunc.fixturenames):
        without_native = fixture == "axes_impl"
        names = [
            impl
            for impl in IMPLEMENTATIONS
            if why_not(impl, device, has_norm=fixture == "norm_impl") is None
            and not (without_native and impl == "native")
        ]
        marked = [pytest.param(name, marks=needs_kernels) if name == "triton" else name for name in names]
        metafunc.parametrize(fixture, marked)


@pytest.fixture(autouse=True)
def _axes_by_implementations_that_take_them(request: pytest.FixtureRequest) -> None:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("impl") == "native" and "axes" in str(params.get("name")):
        pytest.skip("the CUDA extension takes no axes")
