"""README, docs/results.md and the report have the numbers of the records."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("bokeh")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import overview  # noqa: E402

from ropewalk.bench.report.page import render  # noqa: E402

RUN = "run python tools/overview.py"


@pytest.fixture(scope="module")
def comparisons():
    return [overview.compare(line) for line in overview.LINES]


@pytest.mark.parametrize("page", overview.MARKS, ids=lambda page: page.name)
def test_a_page_has_the_table_of_the_records(page):
    text, table = page.read_text(encoding="utf-8"), overview.tables()[page]
    assert overview.place_table(text, table, overview.MARKS[page]) == text, RUN
    assert overview.place_table(text, table.replace("1", "2", 1), overview.MARKS[page]) != text


def test_the_report_is_of_all_records():
    """What it says, but for charts and the table of rows, whose script goes by Bokeh's version."""

    def said(page):
        return page.partition("<body>")[2].partition('<script type="application/gzip"')[0]

    report = overview.REPORT.read_text(encoding="utf-8")
    assert said(report) == said(render(overview.records())), RUN
    assert len(report) < 2_000_000
    for record in overview.records():
        for run in record.runs:
            assert f"<b>{run['name']}</b>" in report


def test_the_table_names_what_is_slower(comparisons):
    table = overview.make_table(comparisons)
    shown = [found for found in comparisons if found.line.in_table]
    slower = [found for found in shown if min(found.peers.values()) < 0.98 * found.ours]
    assert len(shown) == 5
    assert table.count("**slower**") == len(slower) == 2
    for found in comparisons:
        assert min(found.peers.values()) > 0
        assert set(found.peers) <= set(overview.PEERS)


def test_results_have_one_record_of_a_subject():
    names = sorted(path.stem for path in overview.RESULTS.glob("*.jsonl"))
    assert len({name.split("-")[0] for name in names}) == len(names)
