"""Triton's kernels on the heads of a DTensor, by its interpreter."""

from __future__ import annotations

import pytest
from helpers import dtensor_calls, processes
from helpers.modes import ON_GPU

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")]


@pytest.mark.slow
def test_each_rank_attends_its_heads() -> None:
    processes.run(2, dtensor_calls.compare_kernels)
