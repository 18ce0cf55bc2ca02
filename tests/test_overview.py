"""README, the pages and the report have the numbers of the records."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("bokeh")

import overview
import tables

from ropewalk.bench.report import gains as g
from ropewalk.bench.report.page import render

ROOT = Path(__file__).parents[1]
RUN = "run python tools/overview.py"
MARKED = [path for path in overview.PAGES if "<!-- end of " in path.read_text(encoding="utf-8")]
KERNELS = [path for path in overview.PAGES if "kernels" in path.parts]


@pytest.mark.parametrize("path", [*MARKED, *KERNELS], ids=lambda path: path.name)
def test_a_page_is_of_the_records(path):
    text = path.read_text(encoding="utf-8")
    assert overview.page_of(path) == text, RUN


def test_every_table_is_in_a_page_and_is_written_anew():
    names = [name for path in MARKED for name in re.findall(r"<!-- end of (\S+) -->", path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted([*tables.TABLES, overview.OVERVIEW])
    empty = "<!-- memory -->\n| an | old | table |\n<!-- end of memory -->\n"
    assert overview.fill(empty) == f"<!-- memory -->\n{tables.make('memory')}<!-- end of memory -->\n"
    with pytest.raises(SystemExit, match="a page has a mark 'nothing'"):
        overview.fill("<!-- nothing -->\n<!-- end of nothing -->\n")


def test_times_of_kernel_pages_are_written_anew():
    rows = [cells for path in KERNELS for _, cells in overview.measured_rows(path.read_text(encoding="utf-8"))]
    assert len(rows) > 40
    text = next(path for path in KERNELS if path.name == "rotation-cuda.md").read_text(encoding="utf-8")
    line, (name, *what, time, rate) = next(overview.measured_rows(text))
    other = line.replace(f"| {name} |", "| older |").replace(f"| {time} |", f"| 9{time} |").replace(rate, "7 GB/s")
    assert other != line
    assert overview.refresh(text.replace(line, other)) == text
    with pytest.raises(SystemExit, match="was not measured"):
        overview.refresh(text.replace(line, line.replace(what[0], "no-such-case")))


@pytest.fixture
def folder(tmp_path):
    """A folder with attention's record alone, in which neither memory nor FlexAttention was measured."""
    lines = (tables.RESULTS / f"attention-{tables.CARD}.jsonl").read_text(encoding="utf-8").splitlines()
    parsed = zip(lines, map(json.loads, lines), strict=True)
    kept = [line for line, row in parsed if row.get("mode") != "memory" and row.get("impl") != "flex"]
    (tmp_path / f"attention-{tables.CARD}.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return tmp_path


def test_what_was_not_measured_is_an_empty_cell_and_a_missing_table_an_error(folder):
    head, _, *lines = (line.split(" | ") for line in tables.make("forward", folder).splitlines())
    assert {cells[head.index("FlexAttention")] for cells in lines} == {tables.NOTHING}
    for name in ("memory", "rotation", "serving", "blocks", "host", "training"):
        with pytest.raises(SystemExit, match=f"the records of {tables.CARD} have no row of table '{name}'"):
            tables.make(name, folder)


def test_a_folder_without_a_record_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="has no attention-h200"):
        tables.make("forward", tmp_path)


def test_a_second_card_has_columns_of_its_own(folder):
    path = folder / f"attention-{tables.CARD}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row.get("impl") == "gluon" and "tflops" in row:
            row["tflops"] *= 2
    (folder / "attention-h100.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    head, _, *lines = (line.split(" | ") for line in tables.make("forward", folder).splitlines())
    at, again = (head.index(name) for name in ("gluon", "gluon, H100"))
    known = [(float(cells[again]), float(cells[at])) for cells in lines if cells[at] != tables.NOTHING]
    assert known
    assert all(twice == pytest.approx(2 * once, abs=1) for twice, once in known)
    losses = tables.make("losses", folder).splitlines()[2:]
    once = [line for line in losses if "H100" not in line]
    assert once
    assert losses == [*once, *(line.replace(" | ", ", H100 | ", 1) for line in once)]


def record_of(card, folder, *wanted):
    """Write the rows of some cases, or cases in a mode, of attention's record as another card's."""
    name = f"attention-{tables.CARD}.jsonl"
    rows = [json.loads(line) for line in (tables.RESULTS / name).read_text(encoding="utf-8").splitlines()]
    kept, run = [], None
    for row in rows:
        if "format" in row:
            run = {**row, "device": f"NVIDIA {card.upper()} 80GB HBM3"}
        elif row.keys() != {"end"} and {row["case"]["name"], (row["case"]["name"], row["mode"])} & {*wanted}:
            kept += [row] if run is None else [run, row]
            run = None
    (folder / name.replace(tables.CARD, card)).write_text("\n".join(map(json.dumps, kept)) + "\n", encoding="utf-8")


def test_a_second_card_with_few_cases_has_only_columns_with_numbers(folder):
    alone = {name: tables.make(name, folder) for name in ("forward", "rerope", "settings", "records")}
    record_of("h100", folder, ("causal-4k-d128", "fwd"), ("causal-8k-d64", "schemes-fwd"))
    tables.books.cache_clear()
    head, _, *lines = (line.split(" | ") for line in tables.make("forward", folder).splitlines())
    column = [cells[head.index("gluon, H100")] for cells in lines]
    assert len([cell for cell in column if cell != tables.NOTHING]) == 1
    # Of the settings' columns it has another one than the first card's first, and of ReRoPE none.
    assert all(tables.make(name, folder) == alone[name] for name in ("rerope", "settings"))
    record_of("h100", folder, ("causal-4k-d128", "schemes-fwd"))
    tables.books.cache_clear()
    *_, last = tables.make("settings", folder).splitlines()[0].split(" | ")
    assert last == "B4 T4096 H32 D128, causal, forward, H100 |"
    one, both = alone["records"].splitlines(), tables.make("records", folder).splitlines()
    assert both[: len(one)] == one
    assert ["[attention-h100](results/attention-h100.jsonl)" in line for line in both[len(one) :]] == [True]


def test_a_second_card_may_have_other_records_than_attention(folder):
    text = (tables.RESULTS / f"serving-{tables.CARD}.jsonl").read_text(encoding="utf-8")
    for card in (tables.CARD, "h100"):
        (folder / f"serving-{card}.jsonl").write_text(text, encoding="utf-8")
    tables.books.cache_clear()
    assert "| bfloat16, H100 |" in tables.make("serving", folder).splitlines()[0]
    assert "H100" not in tables.make("forward", folder) + tables.make("verdicts", folder)


def test_a_report_of_two_cards_compares_each_alone_and_names_it(folder):
    record_of("h100", folder, "causal-4k-d128")
    paths = sorted(folder.glob("attention-*.jsonl"))
    one, other, both = (g.read_records(some) for some in (paths[:1], paths[1:], paths))
    counts = [len(g.find_gains(row for record in records for row in record.rows)) for records in (one, other, both)]
    assert counts[0] + counts[1] == counts[2] > counts[1] > 1
    counts = [len(g.newest_choices(records)) for records in (one, other, both)]
    assert counts[0] + counts[1] == counts[2] > counts[1] >= 1
    page = render(both).partition("<body>")[2].partition('<script type="application/gzip"')[0]
    assert ", NVIDIA H100 80GB HBM3</small>" in page
    assert ", NVIDIA H200</small>" in page
    assert ", NVIDIA H200</small>" not in render(other)


def test_the_newest_run_of_a_case_counts(tmp_path):
    run = {"format": 1, "benchmark": "attention", "device": "NVIDIA H200"}
    row = {"case": {"name": "full-4k-d128", "batch": 4, "tokens": 4096, "q_heads": 32, "k_heads": 32, "head_dim": 128}}
    row |= {"mode": "fwd", "impl": "gluon", "position": "none", "kind": "ours", "status": "ok", "protocol": "hot"}
    lines = []
    for date, tflops in (("2026-01-02", 600.0), ("2026-01-01", 500.0)):
        lines += [{**run, "date": date, "name": date}, {**row, "time": {"p50": 1.0}, "tflops": tflops}]
    path = tmp_path / f"attention-{tables.CARD}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert "| 600 |" in tables.make("forward", tmp_path)
    name, time, rate = overview.measured(tables.books(tmp_path)[0], "full-4k-d128", "fwd", "gluon, none")
    assert (name, time, rate) == ("2026-01-02", 1.0, "600 TFLOP/s")


def test_the_report_is_of_all_records():
    """What it says, but for charts and the table of rows, whose script goes by Bokeh's version."""

    def said(page):
        return page.partition("<body>")[2].partition('<script type="application/gzip"')[0]

    report = overview.REPORT.read_text(encoding="utf-8")
    records = [record for book in tables.books() for record in book.compared]
    assert said(report) == said(render(records)), RUN
    assert len(report) < 2_000_000
    for record in records:
        for run in record.runs:
            assert f"<b>{run['name']}</b>" in report


def test_the_overview_names_what_is_slower():
    found = overview.comparisons()
    table = overview.make_overview(found)
    shown = [one for one in found if one.line.in_table]
    slower = [one for one in shown if min(one.peers.values()) < 0.98 * one.ours]
    assert table.count("\n") == len(shown) + 2 > 6
    assert table.count("**slower**") == len(slower)
    of_one = overview.Comparison(shown[0].line, 2.0, None, {"vllm": 1.0})
    assert "1.00\u00a0µs, vLLM | [0.50 ×](results/rope-h200.jsonl), **slower** |" in overview.make_overview([of_one])
    for one in found:
        assert min(one.peers.values()) > 0
        assert set(one.peers) <= set(overview.PEERS)


def test_readme_and_results_have_one_factor_for_a_case():
    [book, *_] = tables.books()
    factors = {row[0]: row[-1].strip("*") for row in tables.choices(book).rows}
    gains = g.find_gains(row for record in book.compared for row in record.rows)
    times = {
        (one.lead["case"]["name"], one.lead["mode"]): one.times for one in gains if one.lead.get("protocol") == "hot"
    }
    shown = [one for one in overview.comparisons() if one.line.in_table and one.choice is not None]
    assert len(shown) > 2
    for one in shown:
        case = f"{tables.in_words(one.choice.lead)}, {tables.MODES[one.choice.lead['mode']]}"
        assert factors[case] == f"{times[one.line.case, one.line.mode]:.2f} ×"
        assert f"[{factors[case]}](" in overview.make_overview([one])


def test_numbers_have_three_digits_and_losses_are_bold():
    assert [tables.us(x) for x in (0.79812, 7.7, 85.94, 149.4, 17231.0)] == ["0.798", "7.70", "85.9", "149", "17231"]
    assert [tables.ratio(x, 1.0) for x in (1.04, 0.985, 0.97)] == ["1.04 ×", "0.98 ×", "**0.97 ×**"]


def test_results_have_one_record_of_a_subject_and_card():
    names = sorted(path.stem for path in overview.RESULTS.glob("*.jsonl"))
    assert len({(name.split("-")[0], name.rpartition("-")[2]) for name in names}) == len(names)
