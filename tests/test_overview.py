"""README, the pages and the report have the numbers of the records."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("bokeh")

import overview
import tables

from ropewalk.bench.core.load import to_digits
from ropewalk.bench.report import gains as g
from ropewalk.bench.report import peers
from ropewalk.bench.report.page import render
from ropewalk.ops.attention import backends

ROOT = Path(__file__).parents[1]
RUN = "run python tools/overview.py"
TARGETS = ROOT / "tests/helpers/targets.py"
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


def lines_of(name, folder):
    """The lines of a table, without what is said under it."""
    return tables.make(name, folder).partition("\n\n")[0].splitlines()


@pytest.fixture
def folder(tmp_path):
    """A folder with attention's record alone, in which neither memory nor FlexAttention was measured."""
    lines = (tables.RESULTS / f"attention-{tables.CARD}.jsonl").read_text(encoding="utf-8").splitlines()
    parsed = zip(lines, map(json.loads, lines), strict=True)
    kept = [line for line, row in parsed if row.get("mode") != "memory" and row.get("impl") != "flex"]
    (tmp_path / f"attention-{tables.CARD}.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return tmp_path


def test_what_was_not_measured_is_an_empty_cell_and_a_missing_table_an_error(folder):
    text = "\n".join(lines_of("backward", folder))
    assert "FlexAttention" not in text
    assert "FlexAttention" in tables.make("choices")
    settings = "\n".join(lines_of("settings", folder))
    assert f"| {tables.NOTHING} / {tables.NOTHING} |" in settings
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
    head, _, *lines = (line.split(" | ") for line in lines_of("forward", folder))
    at, again = (head.index(name) for name in ("gluon", "gluon, H100"))
    known = [(float(cells[again]), float(cells[at])) for cells in lines if cells[at] != tables.NOTHING]
    assert known
    assert all(twice == pytest.approx(2 * once, abs=1) for twice, once in known)
    losses = lines_of("losses", folder)[2:]
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
    head, _, *lines = (line.split(" | ") for line in lines_of("forward", folder))
    column = [cells[head.index("gluon, H100")] for cells in lines]
    assert len([cell for cell in column if cell != tables.NOTHING]) == 1
    # Of the settings' columns it has another one than the first card's first, and of ReRoPE none.
    assert all(tables.make(name, folder) == alone[name] for name in ("rerope", "settings"))
    record_of("h100", folder, ("causal-4k-d128", "schemes-fwd"))
    tables.books.cache_clear()
    *_, last = lines_of("settings", folder)[0].split(" | ")
    assert last == "B4 T4096 H32 D128, causal, forward, H100 |"
    one, both = alone["records"].splitlines(), tables.make("records", folder).splitlines()
    assert both[: len(one)] == one
    assert ["[attention-h100](../results/attention-h100.jsonl)" in line for line in both[len(one) :]] == [True]


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
    found, models = overview.comparisons(), overview.trained_models()
    table = overview.make_overview(found, models).partition("\n\n")[0]
    shown = [one for one in found if one.line.in_table]
    slower = [one for one in shown if min(one.peers.values()) < 0.98 * one.ours]
    losers = [one for one in models if one.outcome == g.SLOWER]
    assert len(table.splitlines()) == len(shown) + len(overview.USUAL_MODELS) + 2 + 2 > 10
    assert table.count("**slower**") == len(slower) + min(len(losers), 1)
    of_one = overview.Comparison(shown[0].line, 2.0, None, {"vllm": 1.0}, shown[0].run)
    assert "| 2.00\u00a0µs | [0.50 × vLLM](results/rope-h200.jsonl), **slower**" in overview.make_overview([of_one])
    for one in found:
        assert min(one.peers.values()) > 0
        assert set(one.peers) <= set(overview.COLOURS)


def test_the_overview_has_the_best_model_and_the_worst():
    models = overview.trained_models()
    assert {(one.lead["case"]["name"], one.lead["mode"]) for one in models} > {*overview.USUAL_MODELS}
    *_, best, worst = overview.make_overview([], models).partition("\n\n")[0].splitlines()
    times = [one.times for one in models]
    assert f"[{max(times):.2f} × " in best
    assert f"[{min(times):.2f} × " in worst
    counts = [sum(one.outcome == outcome for one in models) for outcome in (g.FASTER, g.LEVEL, g.SLOWER)]
    said = "{} of {} train faster, {} within 2 %, {} slower".format(counts[0], len(models), *counts[1:])
    assert said in " ".join(overview.make_overview([], models).split())


def test_no_column_of_a_table_repeats_another():
    for name in [*tables.TABLES, overview.OVERVIEW]:
        text = tables.make(name) if name in tables.TABLES else overview.make_overview(overview.comparisons())
        if name in tables.LATER and not text.startswith("|"):
            continue
        head, _, *rows = (line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines())
        columns = [*zip(*rows, strict=True)]
        same = [head[i] for i, column in enumerate(columns) if column in columns[:i]]
        # Records of one commit have one date and one version.
        assert not same or name in ("records", "targets"), f"{name}: {same}"


def test_readme_and_results_have_one_factor_for_a_case():
    [book, *_] = tables.books()
    # A factor over another library than the best one by medians names it.
    factors = {row[0]: f"{row[-1].strip('*').partition(' ×')[0]} ×" for row in tables.choices(book).rows}
    gains = g.find_gains(row for record in book.compared for row in record.rows)
    times = {
        (one.lead["case"]["name"], one.lead["mode"]): one.times for one in gains if one.lead.get("protocol") == "hot"
    }
    shown = [one for one in overview.comparisons() if one.line.in_table and one.choice is not None]
    assert len(shown) > 2
    for one in shown:
        case = f"{tables.in_words(one.choice.lead)}, {tables.MODES[one.choice.lead['mode']]}"
        assert factors[case] == f"{times[one.line.case, one.line.mode]:.2f} ×"
        assert f"[{factors[case]} " in overview.make_overview([one])


# Tables whose benchmark knows libraries that were not installed.
MISSING_OF = dict.fromkeys(("forward", "backward", "choices", "rerope", "layer", "decoding"), "attention")
MISSING_OF |= dict.fromkeys(("rotation", "decode-rotation", "host-rotation"), "rope")
OTHERS = sorted({re.escape(name) for name in peers.NAMES.values()} | {"other library", "best other"})


@pytest.mark.parametrize("name", [*tables.TABLES, overview.OVERVIEW])
def test_a_table_of_factors_says_which_libraries_were_measured(name):
    text = overview.fill(f"<!-- {name} -->\n<!-- end of {name} -->\n").partition("\n")[2]
    table, _, said = text.partition("\n\n")
    if name == "records" or not re.search("|".join(OTHERS), table):  # the records have a column of all versions
        return
    said = said[said.index("Other libraries that were measured: ") :].partition("<!--")[0]
    measured, _, missing = " ".join(said.split()).partition("Not installed, and so not measured: ")
    shown = [other for other in set(peers.NAMES.values()) if re.search(rf"{re.escape(other)}\b", table)]
    eager = {peers.NAMES[one] for one in peers.EAGER}
    assert all(other in measured for other in shown if other not in eager and not other.startswith("compiled RoPE"))
    assert not any(other in measured for other in eager)
    assert "FlashAttention-4" not in measured or "(a beta)" in measured or "two calls" in measured
    benchmark = MISSING_OF.get(name)
    runs = tables.books()[0].runs[benchmark] if benchmark else []
    found = [(peers.NAMES[key], value.startswith("missing")) for run in runs for key, value in run["peers"].items()]
    absent = {one for one, _ in found} - {one for one, is_missing in found if not is_missing}
    assert all(one in missing for one in absent)
    assert bool(absent) is bool(benchmark)


def test_no_verdict_is_against_eager_pytorch():
    assert set(peers.NAMES) >= peers.EAGER
    assert all(of == "eager PyTorch" or of.endswith(", eager") for one in peers.EAGER for of in [peers.NAMES[one]])
    assert all("eager" not in name.lower() or key in peers.EAGER for key, name in peers.NAMES.items())
    for book in tables.books():
        gains = g.find_gains(row for record in book.compared for row in record.rows)
        assert not [one for one in gains if one.peer is not None and one.peer["impl"] in peers.EAGER]
        assert not [one for one in gains if one.timed & peers.EAGER]
        rerope = [one for one in gains if one.lead["mode"].startswith("rerope") and one.times is not None]
        assert {one.peer["impl"] for one in rerope} == {"flash"}
        assert all(one.ours["impl"] != "flash" and one.times < 2 for one in rerope)
        choices = tables.hot_choices(book)
        assert not [one for one in choices if {*one.peers} & peers.EAGER]
    assert not [one for one in overview.comparisons() if {*one.peers} & peers.EAGER]
    assert "eager" not in tables.make("rotation").partition("\n\n")[0]


@pytest.mark.parametrize("name", ["forward", "backward", "choices"])
def test_a_row_is_marked_where_its_run_lacked_a_library_of_others(name):
    book = tables.books()[0]
    table, lines = tables.TABLES[name](book), tables.make(name).splitlines()[2:]
    lacked = [run["peers"]["flash_attn_3"].startswith("missing") for run in table.of_runs]
    assert 0 < sum(lacked) < len(lacked) == len(table.rows)
    for row, line, is_marked in zip(table.rows, lines, lacked, strict=False):
        for at in table.against:
            assert line.strip("| ").split(" | ")[at] == row[at] + is_marked * " †"
    assert "† The run of this cell lacked FlashAttention-3, " in tables.make(name)


def test_the_better_of_two_libraries_is_first():
    units = {"µs": 1.0, "ms": 1e3}
    for row in tables.choices(tables.books()[0]).rows:
        times = [float(cell.split()[0]) * units[cell.split()[1].strip(",")] for cell in row[2:4] if cell != "–"]
        assert times == sorted(times)


def test_verdicts_count_comparisons_with_flash_attention_3_and_decoding_without_a_graph():
    book = tables.books()[0]
    text = " ".join(tables.make("verdicts").split())
    slower = total = 0
    for group in book.rows("rope"):
        if group[0]["mode"] == "decode":
            ours = g.rotation_of(group)
            peer = min(row["time"]["p50"] for row in group if tables.is_peer(row))
            slower += peer / ours["time"]["p50"] < 1 / (1 + g.SAME)
            total += 1
    assert f"another library is more than 2 % faster in {slower} of {total} decode cases" in text
    found = re.search(r"FlashAttention-3 was installed in the runs of (\d+) of (\d+) comparisons", text)
    said = text[found.end() :].partition("Other libraries")[0]
    assert sum(map(int, re.findall(r"(\d+) (?:faster|within|slower)", said))) == int(found[1]) < int(found[2])


def test_every_record_is_on_the_page_of_results():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    names = [path.name for path in tables.RESULTS.iterdir() if path.suffix in (".json", ".jsonl")]
    assert [name for name in names if f"](../results/{name})" not in text] == []


def test_a_loss_shows_no_time_that_says_the_opposite():
    for line in tables.make("losses").partition("\n\n")[0].splitlines()[2:]:
        *_, ours, factor = line.strip("| ").split(" | ")
        assert re.fullmatch(r"[\d.]+\u00a0(µs|ms), \w+", ours)
        assert float(factor.partition(" × ")[0]) < 1


@pytest.mark.parametrize("path", ["README.md", "docs/platforms.md"])
def test_where_it_ran_and_where_it_was_compiled_is_of_the_records(path):
    text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
    cards, capabilities = set(), set()
    for file in tables.RESULTS.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"format"') and (run := json.loads(line)).get("capability"):
                cards.add(run["device"].split()[1])
                capabilities.add(f"sm_{run['capability'].replace('.', '')}")
    targets = {*re.findall(r'"(\w+)": GPUTarget', TARGETS.read_text(encoding="utf-8"))}
    assert targets > capabilities
    ran = re.search(r"Ran on: NVIDIA ([^.]+)\.|NVIDIA ([^|]+) \| ran:", text)
    assert {*re.split(", ", ran[1] or ran[2])} == cards
    compiled = re.findall(r"never run: (.+?)\. |\| ([^|]+) \| compiled only:", text)
    assert {*re.findall(r"sm_\d+|gfx\w+", str(compiled))} == targets - capabilities


def test_pages_say_where_the_order_of_backends_was_measured():
    assert {*backends.ORDER} == {(9, 0)}, "say on pages which GPUs were measured"
    found = []
    for path in overview.PAGES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert "fastest backend" not in line or path.name == "style.md", path
            if "measured order of backends" in line:
                found.append(path.name)
                assert "on Hopper, and by an expected one elsewhere" in line, path
    assert {"README.md", "platforms.md", "attention.md", "support.md", "flash-attn.md"} <= {*found}


def test_readme_names_the_targets_that_try_it():
    """Each `make` on a page is a target, and README has what a visitor runs first."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "".join(path.read_text(encoding="utf-8") for path in (*overview.PAGES, ROOT / "CONTRIBUTING.md"))
    for target in re.findall(r"(?:`|\$ |&& )make ([a-z-]+)", text):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target
    for name in ("make demo", "make test"):
        assert name in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_page_names_the_extra_that_its_commands_need():
    pages = {path.name: path.read_text(encoding="utf-8") for path in overview.PAGES}
    assert all("[train]" in pages[name] for name in pages if "ropewalk experiment bert-positions" in pages[name])
    assert "`doctor` needs no extra" in pages["platforms.md"]


def test_numbers_have_three_digits_and_losses_are_bold():
    assert [tables.us(x) for x in (0.79812, 7.7, 85.94, 149.4, 17231.0)] == ["0.798", "7.70", "85.9", "149", "17231"]
    assert [tables.ratio(x, 1.0) for x in (1.04, 0.985, 0.97)] == ["1.04 ×", "0.98 ×", "**0.97 ×**"]


def test_no_number_of_a_table_has_an_exponent():
    assert [to_digits(x, 4) for x in (0.0, 0.01234, 7.04, 999.96, 14300.2)] == [
        "0",
        "0.01234",
        "7.040",
        "1000.0",
        "14300",
    ]
    for path in overview.PAGES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith("|") or not re.search(r"\de[+-]\d\d\b", line), f"{path.name}: {line}"


def test_results_have_one_record_of_a_subject_and_card():
    names = sorted(path.stem for path in overview.RESULTS.glob("*.jsonl"))
    assert len({(name.split("-")[0], name.rpartition("-")[2]) for name in names}) == len(names)
