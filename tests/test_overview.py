"""README's figure and table match the records."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import overview  # noqa: E402


@pytest.fixture(scope="module")
def comparisons():
    return [overview.compare(line) for line in overview.LINES]


def test_the_readme_has_the_table_of_the_records(comparisons):
    text = overview.README.read_text(encoding="utf-8")
    assert overview.place_table(text, overview.make_table(comparisons)) == text, "run python tools/overview.py"
    assert f"results/{overview.FIGURE.name}" in text


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
