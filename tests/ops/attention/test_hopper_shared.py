"""The Gluon kernels of attention on a GPU that several processes share: it stops a kernel at any point, for another."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.hopper_calls import on_hopper

PROCESSES = 6


@on_hopper
@pytest.mark.parametrize("window", [0, 200], ids=["no-position", "rerope"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_the_same_beside_other_processes(head_dim, window):
    """Barriers whose memory tiles had too came back over those: of ReRoPE's launches at D 128 one of 30 differed."""
    program = Path(__file__).parents[2] / "helpers/launch_backwards.py"
    command = [sys.executable, program, str(head_dim), str(window), "3000"]

    def launch(_):
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(PROCESSES) as pool:
        ended = list(pool.map(launch, range(PROCESSES)))
    assert [process.stdout.split()[-1:] for process in ended] == [["0"]] * PROCESSES, ended
