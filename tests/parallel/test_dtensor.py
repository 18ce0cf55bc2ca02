"""DTensors in attention, in the rotation and in modules, within a group of processes."""

from __future__ import annotations

import pytest
from helpers import dtensor_calls, processes
from helpers.modes import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")


@pytest.mark.slow
def test_each_rank_finds_what_one_process_finds() -> None:
    processes.run(2, dtensor_calls.run_all)


@pytest.mark.slow
def test_meshes_of_two_dimensions() -> None:
    processes.run(4, dtensor_calls.check_meshes)
