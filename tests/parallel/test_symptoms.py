"""Symptoms that users of other libraries reported of context parallelism. docs/parallel.md lists the tests of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import engine_calls, processes, sharded_models, symptom_calls
from helpers.modes import ON_GPU

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
def test_no_symptom_shows() -> None:
    processes.run(2, symptom_calls.run_all)


def test_the_pages_tests_exist() -> None:
    named = set(re.findall(r"`(check_\w+)`", PAGE.read_text(encoding="utf-8")))
    missing = [
        name for name in named if not any(hasattr(m, name) for m in (symptom_calls, sharded_models, engine_calls))
    ]
    assert named
    assert not missing
    checks = {name for name in vars(symptom_calls) if name.startswith("check_")}
    assert checks <= named, "a symptom has no row in docs/parallel.md"
