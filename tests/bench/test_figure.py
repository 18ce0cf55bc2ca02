"""The figure of a record."""

from pathlib import Path

import pytest

from ropewalk.bench.cases import CASES
from ropewalk.bench.records import Record, Row
from ropewalk.bench.timing import Quantiles

pytest.importorskip("matplotlib")
from ropewalk.bench.figure import draw_record


def row(impl: str, kind: str, time: float, graph: float | None = None) -> Row:
    times = Quantiles(time, time, time)
    graph_times = None if graph is None else Quantiles(graph, graph, graph)
    return Row(CASES[0], "fwd", impl, kind, "ok", time=times, graph=graph_times)


def test_it_is_drawn(tmp_path: Path) -> None:
    rows = [row("copy_", "anchor", 1.0, 1.0), row("triton", "ours", 1.1, 1.2), row("a new peer", "peer", 2.0)]
    path = tmp_path / "figure.png"
    assert draw_record(Record({"device": "some GPU"}, rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [[], [row("copy_", "anchor", 1.0)], [Row(CASES[0], "fwd", "triton", "ours", "wrong")]])
def test_nothing_is_drawn_of_nothing(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    assert not draw_record(Record({"device": "some GPU"}, rows), path)
    assert not path.exists()


def test_cases_narrow_it_down(tmp_path: Path) -> None:
    rows = [row("copy_", "anchor", 1.0), row("triton", "ours", 1.1)]
    assert not draw_record(Record({"device": "some GPU"}, rows), tmp_path / "figure.png", cases=("decode-1",))
