"""README, docs/results.md and the report have the numbers of the records."""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("plotly")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import overview  # noqa: E402

from ropewalk.bench.report import sections  # noqa: E402
from ropewalk.bench.report.entries import read_sources  # noqa: E402
from ropewalk.bench.report.page import data_of  # noqa: E402

RUN = "run python tools/overview.py"


@pytest.fixture(scope="module")
def comparisons():
    return [overview.compare(line) for line in overview.LINES]


@pytest.fixture(scope="module")
def sources():
    return read_sources(overview.records())


@pytest.fixture(scope="module")
def report():
    return overview.REPORT.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", overview.MARKS, ids=lambda page: page.name)
def test_a_page_has_the_table_of_the_records(page):
    text, table = page.read_text(encoding="utf-8"), overview.tables()[page]
    assert overview.place_table(text, table, overview.MARKS[page]) == text, RUN
    assert overview.place_table(text, table.replace("1", "2", 1), overview.MARKS[page]) != text


def test_the_report_is_of_all_records(sources, report):
    """Its rows, charts and verdicts; its look may be older."""
    others = {"training-h200", "host-h200", "bert-positions-h200", "length-extrapolation-h200"}
    kernels = {path.stem for path in overview.RESULTS.glob("*.jsonl") if not path.stem.startswith("parallel-")}
    assert {source.name for source in sources} == kernels - others
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', report, re.DOTALL)[1])
    assert data == json.loads(json.dumps(data_of(sources))), RUN
    assert sections.header(sources) in report, RUN
    assert sections.verdicts(sources) in report, RUN


def test_the_three_pages_have_the_same_choices(comparisons, report):
    """A time of README's table is in the page's table, and in the report's."""
    page = overview.PAGE.read_text(encoding="utf-8")
    assert f"results/{overview.FIGURE.name}" in overview.README.read_text(encoding="utf-8")
    chosen = [found.choice for found in comparisons if found.choice is not None]
    assert len(chosen) >= 5
    for choice in chosen:
        cells = [overview.show_pick(pick) for pick in choice.picks]
        assert f"results/{choice.lead.record}.jsonl) | {' | '.join(cells)} |" in page
        start = report.index("<h3>Kernels and choices</h3>")
        row = next(row for row in report[start:].split("<tr>") if f'"row">{choice.lead.case}<' in row)
        times = [cell.split(", ")[0].replace("\u00a0", " ") for cell in cells]
        assert all(time in row for time in times), choice.lead.case


def test_the_table_names_what_is_slower(comparisons):
    table = overview.make_table(comparisons)
    shown = [found for found in comparisons if found.line.in_table]
    slower = [found for found in shown if min(found.peers.values()) < 0.98 * found.ours]
    assert len(shown) == 5
    assert table.count("**slower**") == len(slower) == 2
    for found in comparisons:
        assert min(found.peers.values()) > 0
        assert set(found.peers) <= set(overview.PEERS)


def test_the_figure_is_drawn(comparisons, tmp_path):
    pytest.importorskip("matplotlib")
    overview.draw(comparisons, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()
