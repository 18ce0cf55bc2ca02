"""Context parallelism with others' engines: DDP, FSDP2, tensor parallelism, torch.compile, checkpoints, Trainer."""

from __future__ import annotations

import pytest
from helpers import engine_calls, processes
from helpers.modes import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one() -> None:
    assert len(engine_calls.TWO) == 5
    processes.run(2, engine_calls.run_two)


@pytest.mark.slow
def test_meshes_of_four_processes_have_the_gradients_of_one() -> None:
    processes.run(4, engine_calls.run_four)
