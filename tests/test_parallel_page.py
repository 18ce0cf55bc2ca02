"""The table of docs/parallel.md is of its record."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import parallel_figure  # noqa: E402

from ropewalk.bench.core.load import read_record  # noqa: E402


def test_the_table_is_the_records():
    lines = parallel_figure.table(read_record(ROOT / "results/parallel-h200.jsonl"))
    page = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
    assert len(lines) > 12
    assert "\n".join(lines) in page, "run python tools/parallel_figure.py results/parallel-h200.jsonl"
