"""The figure of a record."""

from pathlib import Path

import pytest

from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.timing import Quantiles
from ropewalk.bench.rope.cases import CASES
from ropewalk.bench.rope.rows import RopeRow

pytest.importorskip("matplotlib")
from ropewalk.bench.rope.figure import draw_rope_record


def record(rows: list[RopeRow]) -> BenchRecord:
    return BenchRecord(Path("record.jsonl"), {"device": "some GPU"}, rows)


def row(impl: str, kind: str, time: float, graph: float | None = None) -> RopeRow:
    times = Quantiles(time, time, time)
    graph_times = None if graph is None else Quantiles(graph, graph, graph)
    return RopeRow(CASES[0], "fwd", impl, kind, "ok", time=times, graph=graph_times)


def test_it_is_drawn(tmp_path: Path) -> None:
    rows = [row("copy_", "anchor", 1.0, 1.0), row("triton", "ours", 1.1, 1.2), row("a new peer", "peer", 2.0)]
    path = tmp_path / "figure.png"
    assert draw_rope_record(record(rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "rows", [[], [row("copy_", "anchor", 1.0)], [RopeRow(CASES[0], "fwd", "triton", "ours", "wrong")]]
)
def test_nothing_is_drawn_of_nothing(rows: list[RopeRow], tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    assert not draw_rope_record(record(rows), path)
    assert not path.exists()


def test_cases_narrow_it_down(tmp_path: Path) -> None:
    rows = [row("copy_", "anchor", 1.0), row("triton", "ours", 1.1)]
    assert not draw_rope_record(record(rows), tmp_path / "figure.png", cases=("decode-1",))
