"""Modules, transformers, wrappers, gradients and refusals within a group of two and of four processes."""

from __future__ import annotations

import pytest
from helpers import processes, sharded_models
from helpers.modes import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_finds_what_one_process_finds(size: int) -> None:
    processes.run(size, sharded_models.run_all)
