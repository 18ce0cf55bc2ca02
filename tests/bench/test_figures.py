"""Figures: readable at a page's width, with any number of libraries."""

import struct
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import overview
import parallel_figure
from matplotlib.figure import Figure
from matplotlib.text import Text

from ropewalk.bench.attention.bench import AttentionBench
from ropewalk.bench.attention.cases import CASES
from ropewalk.bench.core.figure import COLOURS, WIDTH
from ropewalk.bench.core.load import Record, read_record
from ropewalk.bench.core.runner import new_row
from ropewalk.bench.report.peers import EAGER, NAMES

RESULTS = overview.RESULTS
FIGURES = sorted(RESULTS.glob("*.png"))


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_committed_figure_is_as_wide_as_a_page_and_sharp(path):
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert 1400 <= width <= 1600
    assert height <= 1.6 * width


@pytest.fixture
def figures(monkeypatch):
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: drawn.__setitem__(Path(path).name, figure))
    return drawn


def check(figure):
    """Whether a figure has a page's width, fonts of 13 pixels there, and something in each panel."""
    figure.draw_without_rendering()
    assert figure.get_figwidth() == WIDTH
    assert figure.get_figheight() <= 1.6 * WIDTH
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 8
    assert all(axes.has_data() for axes in figure.axes)
    box = figure.get_tightbbox().bounds
    assert box[0] >= -0.01, "a text begins left of the figure"
    assert box[0] + box[2] <= WIDTH + 0.01, "a text ends right of it"


def test_the_figures_of_results_are_readable_at_a_pages_width(figures):
    overview.draw(overview.comparisons(), overview.FIGURE)
    overview.draw_records()
    parallel_figure.draw(read_record(RESULTS / "parallel-h200.jsonl"), RESULTS / "parallel-h200.png")
    assert len(figures) == 4
    for figure in figures.values():
        check(figure)


def test_ten_libraries_are_four_colours_and_grey_and_eager_pytorch_is_none(figures, tmp_path):
    case = next(case for case in CASES if case.name == "causal-4k-d128")
    others = [name for name in COLOURS if not name.startswith("sdpa")][:10]
    known = {"run": 0, "benchmark": "attention", "protocol": "hot"}
    rows = [
        {**new_row(case, "fwd", name, kind, "none"), **known, "case": asdict(case), "tflops": rate}
        for kind, names in (("ours", ["gluon", "triton"]), ("peer", [*others, "huggingface"]))
        for rate, name in enumerate(names, 1)
    ]
    record = Record(tmp_path / "a.jsonl", [{"device": "a GPU"}], rows)
    assert AttentionBench.draw(record, tmp_path / "a.png", NAMES)
    check(figures["a.png"])
    *said, grey = [text.get_text() for text in figures["a.png"].legends[0].get_texts()]
    assert said == ["Ropewalk", *(NAMES[name] for name in others[-4:])]
    assert grey.replace("\n", " ") == ", ".join(NAMES[name] for name in others[:-4])
    ours, *dots = figures["a.png"].axes[0].collections[:11]
    assert ours.get_offsets()[0][0] == 2, "the fastest of ours"
    assert len(dots) == 10
    assert not AttentionBench.draw(Record(tmp_path / "a.jsonl", [{"device": "a GPU"}], []), tmp_path / "a.png")


def test_each_library_but_eager_pytorch_has_a_colour():
    assert {*COLOURS} >= {*NAMES} - EAGER
    assert not {*COLOURS} & EAGER
