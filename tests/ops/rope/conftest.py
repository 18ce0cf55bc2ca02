"""Every test here that takes `impl` runs once for each implementation that serves the device under test."""

from __future__ import annotations

import os

import pytest
import torch

from ropewalk.ops.rope.eager import IMPLEMENTATIONS, why_not


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" not in metafunc.fixturenames:
        return
    device = torch.device(os.environ.get("ROPEWALK_TEST_DEVICE", "cpu"))
    names = [impl for impl in IMPLEMENTATIONS if why_not(impl, device) is None]
    if device.type == "cpu" and len(names) > 1:
        names.remove("reference")  # Triton's interpreter is on: a run without it has tested the reference
    metafunc.parametrize("impl", names)
