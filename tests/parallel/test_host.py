"""What a sharded call asks of the host: at 16k tokens on four GPUs its time is the call's."""

from __future__ import annotations

import pytest
from helpers import sharded_counts, stub_gpu
from helpers.modes import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="a stub stands for the GPUs")


def test_a_gather_asks_for_few_operators() -> None:
    """One copy moves keys and values of a run, and two their gradients. There were 270 operators, 38 of them copies."""
    counts = stub_gpu.run(sharded_counts.count, "gather")
    assert counts["copies"] <= 23
    assert counts["operators"] <= 140
    assert counts["calls"] <= 520


def test_ulysses_exchanges_queries_keys_and_values_at_once() -> None:
    """Both ways: an exchange of all three, and one of the output. There were eight."""
    counts = stub_gpu.run(sharded_counts.count, "ulysses")
    assert counts["exchanges"] == 4
    assert counts["operators"] <= 96
    assert counts["calls"] <= 360
