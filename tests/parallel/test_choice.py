"""The method that a call without a name takes is the one that was measured to be the fastest, on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.modes import ON_GPU
from torch.testing._internal.distributed.fake_pg import FakeStore

from ropewalk import Rope
from ropewalk.bench.core.load import read_record
from ropewalk.parallel import SequenceLayout, explain_context_parallel

RECORD = read_record(Path(__file__).parents[2] / "results/parallel-h200.jsonl")
NOISE = 0.03  # of an efficiency: two runs of one call on the same GPUs

pytestmark = pytest.mark.skipif(ON_GPU, reason="nothing is computed")


def measured() -> Iterator[tuple[int, int, int, int, dict[str, float]]]:
    """Yield tokens, key heads, head dim, ranks, and the efficiency of each method, where there are several.

    A call that was timed once was the first one of its shape, and set up what it exchanges.
    """
    found: dict[tuple[int, int, int, int], dict[str, float]] = {}
    for row in RECORD.of("parallel"):
        case = row["case"]
        is_plain = case["setting"] == "rope" and not case["window"] and not case["shortest"] and not case.get("once")
        if row["kind"] == "ours" and is_plain and row.get("served_by") in ("gather", "ulysses", "ring"):
            key = (case["tokens"], case["k_heads"], case["head_dim"], row["ranks"])
            found.setdefault(key, {})[row["served_by"]] = row["efficiency"]
    yield from ((*key, methods) for key, methods in found.items() if len(methods) > 1)


def test_there_are_measurements_of_several_methods() -> None:
    assert len(list(measured())) >= 3


@pytest.mark.parametrize(("tokens", "key_heads", "head_dim", "ranks", "methods"), [*measured()])
def test_the_fastest_method_is_taken(
    tokens: int, key_heads: int, head_dim: int, ranks: int, methods: dict[str, float]
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        layout = SequenceLayout(dist.group.WORLD, tokens)
        q, k, v = (
            torch.empty(1, dtype=torch.bfloat16).expand(1, layout.n_local, heads, head_dim)
            for heads in (32, key_heads, key_heads)
        )
        choice = explain_context_parallel(q, k, v, layout=layout, position=Rope(), causal=True)
    finally:
        dist.destroy_process_group()
    assert choice.method in methods
    assert methods[choice.method] >= max(methods.values()) - NOISE
