"""Reports of records: gains and losses, choices, changes between two of them, targets, and the page in a browser."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import open_browser
from typer.testing import CliRunner

pytest.importorskip("bokeh")
pytest.importorskip("pandas")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import targets  # noqa: E402

from ropewalk.bench.attention import candidates  # noqa: E402
from ropewalk.bench.attention.cases import CASES, AttentionCase  # noqa: E402
from ropewalk.bench.core.load import label, read_record  # noqa: E402
from ropewalk.bench.core.records import RecordWriter  # noqa: E402
from ropewalk.bench.core.runner import new_row  # noqa: E402
from ropewalk.bench.core.timing import Quantiles  # noqa: E402
from ropewalk.bench.report.compare import compare_records  # noqa: E402
from ropewalk.bench.report.gains import (  # noqa: E402
    after_flash,
    find_gains,
    newest_choices,
    read_records,
    taken,
)
from ropewalk.bench.report.page import best_two, duration, render  # noqa: E402
from ropewalk.bench.report.peers import lacked_by, name_measured  # noqa: E402
from ropewalk.bench.rope.cases import CASES as ROTATIONS  # noqa: E402
from ropewalk.cli import app  # noqa: E402
from ropewalk.ops.attention.backends import CUDNN_FIRST, GLUON_FIRST, Rule  # noqa: E402

RUN = {"device": "some GPU", "date": "2026-11-21T03:37:22+00:00", "peers": {"flash_attn_4": "4.0"}}
BY_NAME = {case.name: case for case in CASES}


def timed(row: dict[str, Any], time: float, **more: Any) -> dict[str, Any]:
    return {**row, "time": Quantiles(0.99 * time, time, 1.01 * time), **more}


def attention(case: AttentionCase, mode: str, times: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Rows of a group in which each implementation took so long."""
    kinds = dict.fromkeys(("auto", "triton", "gluon", "flash", "sdpa"), "ours")
    rows = [
        timed(new_row(case, mode, impl, kinds.get(impl, "peer"), position), time, protocol="hot")
        for (impl, position), time in times.items()
    ]
    for row in rows:
        row["ratios"] = {label(other): other["time"].p50 / row["time"].p50 for other in rows if other is not row}
        if row["impl"] == "auto":
            row["served_by"] = "flash"
    return rows


TRAINING = {
    ("auto", "rope"): 9.0,
    ("triton", "rope"): 10.0,
    ("gluon", "rope"): 9.5,
    ("flash_attn_4", "compiled rope"): 9.9,
}
ROTATION = [
    timed(new_row(ROTATIONS[0], "fwd", "copy_", "anchor"), 9.0),
    timed(new_row(ROTATIONS[0], "fwd", "triton", "ours"), 10.0, peak_bytes=100),
    timed(new_row(ROTATIONS[0], "fwd", "compiled", "peer"), 8.0),
    {**new_row(ROTATIONS[1], "bwd", "triton", "ours"), "status": "wrong", "reason": "<b>past the budget</b>"},
]


def write(path: Path, rows: list[dict[str, Any]], benchmark: str = "attention", **run: Any) -> Path:
    with RecordWriter(path, {"benchmark": benchmark, **RUN, **run}) as writer:
        for row in rows:
            writer.append(row)
    return path


def gains_of(*paths: Path) -> list[Any]:
    return find_gains(row for record in read_records(paths) for row in record.rows)


def test_a_gain_is_against_the_best_peer_and_a_loss_is_not_hidden(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", attention(BY_NAME["gqa-8k-d128"], "train", TRAINING))
    second = write(tmp_path / "b.jsonl", ROTATION, "rope")
    found = {(gain.lead["mode"], gain.outcome): gain for gain in gains_of(first, second)}
    assert found["train", "faster"].times == pytest.approx(1.1)
    assert found["fwd", "slower"].times == pytest.approx(0.8)
    assert "past the budget" in found["bwd", "absent"].reason


def test_rerope_is_against_two_calls_of_flash_attention_and_not_eager_pytorch(tmp_path: Path) -> None:
    times = {("auto", "rerope"): 10.0, ("gluon", "rerope"): 10.0, ("flash", "rerope"): 10.4, ("eager", "rerope"): 400.0}
    rows = attention(BY_NAME["rerope-8k-d64"], "rerope-train", times)
    for row in rows:
        row |= {"kind": "ours" if row["impl"] == "flash" else row["kind"], "served_by": "gluon"}
    path = write(tmp_path / "a.jsonl", rows, capability="9.0")
    records = read_records([path])
    [gain], [choice] = gains_of(path), newest_choices(records)
    assert (gain.peer["impl"], gain.times) == ("flash", pytest.approx(1.04))
    assert choice.peers == {"flash": 10.4}
    assert choice.best_peer == (pytest.approx(1.04), "flash")
    assert "10.4\u00a0µs, two calls of FlashAttention-4" in render(records)
    alone = write(tmp_path / "b.jsonl", [row for row in rows if row["impl"] != "flash"], capability="9.0")
    assert [gain.outcome for gain in gains_of(alone)] == ["alone"]


def test_a_rotation_is_of_what_its_user_gets_and_says_where_it_ran(tmp_path: Path) -> None:
    """CUDA's, also where Triton is faster, and in no case the operator of another name."""
    times = {"native": 10.0, "triton": 8.0, "rotary_embedding": 7.0, "compiled": 9.0}
    kinds = {"compiled": "peer"}
    rows = [timed(new_row(ROTATIONS[0], "fwd", one, kinds.get(one, "ours")), time) for one, time in times.items()]
    path = write(tmp_path / "cold.jsonl", rows, "rope")
    [gain] = gains_of(path)
    assert (gain.ours["impl"], gain.times, gain.outcome) == ("native", pytest.approx(0.9), "slower")
    without = write(tmp_path / "triton.jsonl", rows[1:], "rope")
    assert [gain.ours["impl"] for gain in gains_of(without)] == ["triton"]
    assert "in a CUDA graph, native" not in render(read_records([path]))
    graph = {"native": 2.0, "triton": 3.0, "rotary_embedding": 1.0, "compiled": 4.0}
    warm = write(
        tmp_path / "warm.jsonl", [{**row, "graph": Quantiles(*3 * [graph[row["impl"]]])} for row in rows], "rope"
    )
    [gain], [cold] = gains_of(warm), find_gains(read_records([warm])[0].rows, in_graph=False)
    assert (gain.ours["impl"], gain.times, gain.outcome) == ("native", pytest.approx(2.0), "faster")
    assert (cold.ours["impl"], cold.times, cold.outcome) == ("native", pytest.approx(0.9), "slower")
    assert "2.00\u00a0µs in a CUDA graph, native" in render(read_records([warm]))


def test_the_picks_are_beside_the_two_best_libraries_whatever_they_are(tmp_path: Path) -> None:
    times = {**TRAINING, ("flash_attn_3", "compiled rope"): 9.8, ("cudnn", "compiled rope"): 12.0}
    page = render(read_records([write(tmp_path / "a.jsonl", attention(BY_NAME["gqa-8k-d128"], "train", times))]))
    first, second = '<td data-label="best other">9.80\u00a0µs, FlashAttention-3', '<td data-label="second best">9.90'
    assert f"{first}</td><td" in page
    assert f"{second}\u00a0µs, FlashAttention-4</td>" in page


def test_the_best_two_are_ordered_as_printed() -> None:
    times = {"flash_attn_3": 10.52, "flash_attn_4": 10.48, "cudnn": 12.0}
    shown = ["10.5 ms, FlashAttention-4", "10.5 ms, FlashAttention-3"]
    assert best_two(times, lambda name: f"{times[name]:.1f} ms") == shown
    assert best_two(times, lambda name: f"{times[name]:.1f} ms", "flash_attn_3") == shown[::-1]
    assert best_two(times, lambda name: f"{times[name]:.2f} ms", "flash_attn_3")[0] == "10.48 ms, FlashAttention-4"
    assert best_two({"cudnn": 1.0}, str) == ["cudnn, cuDNN", "–"]


def test_a_run_lacks_what_other_runs_of_its_benchmark_had() -> None:
    missing, base = "missing: flashinfer is not installed", {"benchmark": "attention"}
    old = {**base, "peers": {"cudnn": "2.11.0", "flashinfer": missing}}
    new = {**base, "peers": {"cudnn": "2.11.0", "cudnn_frontend": "1.32.0", "flashinfer": "0.7.4+g0"}}
    few = {**base, "peers": {"cudnn": "2.11.0"}}  # it asked for one library
    rope = {"benchmark": "rope", "peers": {"flashinfer": missing}}
    runs, timed = [old, new, few, rope], ("cudnn", "cudnn_frontend", "flashinfer", "eager")
    lacked = [lacked_by(run, timed, runs) for run in runs]
    assert lacked == [("FlashInfer", "cuDNN by its Python frontend"), (), (), ("FlashInfer",)]
    assert lacked_by(old, ("cudnn",), runs) == ()


def test_the_page_says_which_libraries_were_measured_and_which_were_not(tmp_path: Path) -> None:
    peers = {"flash_attn_4": "4.0.0b36", "flash_attn_3": "missing: x is not installed", "cudnn": "2.11.0"}
    rows = attention(BY_NAME["gqa-8k-d128"], "train", TRAINING)
    page = render(read_records([write(tmp_path / "a.jsonl", rows, peers=peers, torch="2.11.0+cu130")]))
    said = "Other libraries that were measured: FlashAttention-4 4.0.0b36 (a beta). "
    assert f"{said}Not installed, and so not measured: FlashAttention-3." in page
    assert "Against the best other library that was measured, Ropewalk is faster in 1 of 1 comparisons" in page


def test_a_library_that_some_cases_lacked_is_named_with_the_number_of_those_that_had_it() -> None:
    missing, base = "missing: flashinfer is not installed", {"benchmark": "attention", "torch": "2.11.0+cu130"}
    old = {**base, "peers": {"cudnn": "2.11.0", "flashinfer": missing}}
    new = {**base, "peers": {"cudnn": "2.11.0", "cudnn_frontend": "1.32.0", "flashinfer": "0.7.4+g0"}}
    norm = {**base, "benchmark": "rope", "peers": {"compiled": "2.11.0"}}  # a benchmark that never asks for it
    few = {**base, "peers": {"cudnn": "2.11.0"}}  # and a run that asked for one library
    timed = ("cudnn", "cudnn_frontend", "flashinfer")
    [said] = name_measured(timed, [old, old, new, norm, few])
    frontend = "cuDNN by its Python frontend 1.32.0 (installed in 1 of 3 cases)"
    assert (
        said == f"Other libraries that were measured: FlashInfer 0.7.4 (installed in 1 of 3 cases), cuDNN, {frontend}."
    )
    [said] = name_measured(timed, [new, new])
    assert "cases" not in said
    first, last = name_measured(("cudnn",), [old])
    assert (first, last) == (
        "Other libraries that were measured: cuDNN.",
        "Not installed, and so not measured: FlashInfer.",
    )
    assert name_measured(("cudnn",), [old, new]) == ["Other libraries that were measured: cuDNN."]  # as for a backward


def test_a_newer_run_decides_if_it_timed_the_best_peer(tmp_path: Path) -> None:
    case = BY_NAME["gqa-8k-d128"]
    old = write(tmp_path / "old.jsonl", attention(case, "train", TRAINING))
    later = {"date": "2026-11-22T00:00:00+00:00"}
    without = write(tmp_path / "without.jsonl", attention(case, "train", {("auto", "rope"): 5.0}), **later)
    assert [gain.times for gain in gains_of(old, without)] == [pytest.approx(1.1)]
    newer = write(tmp_path / "newer.jsonl", attention(case, "train", {**TRAINING, ("auto", "rope"): 6.6}), **later)
    assert [gain.times for gain in gains_of(old, newer)] == [pytest.approx(1.5)]
    elsewhere = write(tmp_path / "else.jsonl", attention(case, "train", TRAINING), device="another GPU", **later)
    assert len(gains_of(old, elsewhere)) == 2


def test_two_gpus_whose_runs_have_one_name_are_apart(tmp_path: Path) -> None:
    rows = attention(BY_NAME["gqa-8k-d128"], "train", TRAINING)
    paths = [write(tmp_path / f"{gpu}.jsonl", rows, name="d128", device=gpu) for gpu in ("H200", "H100")]
    assert [gain.lead["device"] for gain in gains_of(*paths)] == ["H200", "H100"]
    assert [choice.lead["device"] for choice in newest_choices(read_records(paths))] == ["H200", "H100"]


def test_choices_are_what_was_measured(tmp_path: Path) -> None:
    times = {**TRAINING, ("sdpa", "rope"): 9.8}
    path = write(tmp_path / "a.jsonl", attention(BY_NAME["causal-4k-d128"], "train", times), capability="8.0")
    [choice] = newest_choices(read_records([path]))
    assert choice.picks == ((9.5, "gluon"), (9.8, "sdpa"), (9.0, "flash"))
    assert choice.peers == {"flash_attn_4": 9.9}
    assert choice.best_peer == (pytest.approx(1.1), "flash_attn_4")


def test_a_pick_of_flash_is_gluons_where_that_goes_first_today(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", attention(BY_NAME["causal-4k-d128"], "train", TRAINING), capability="9.0")
    records = read_records([path])
    [choice], [gain] = newest_choices(records), gains_of(path)
    assert choice.picks == ((9.5, "gluon"), (9.5, "gluon"), (9.5, "gluon"))
    assert gain.ours["impl"] == "gluon"


@pytest.mark.parametrize(
    ("case", "mode", "position", "capability", "first"),
    [
        (BY_NAME["causal-4k-d128"], "train", "rope", "9.0", "gluon"),
        (BY_NAME["causal-16k-d128"], "train", "rope", "9.0", "gluon"),
        (BY_NAME["causal-16k-d128"], "fwd", "none", "9.0", "gluon"),
        (BY_NAME["causal-8k-d64"], "train", "rope", "9.0", "gluon"),
        (BY_NAME["bert-512"], "train", "rope", "9.0", "gluon"),
        (replace(BY_NAME["bert-512"], tokens=255), "train", "rope", "9.0", "triton"),
        (BY_NAME["gemma3-27b"], "train", "rope", "9.0", "gluon"),
        (BY_NAME["mla-8k-d192"], "train", "rope", "9.0", "gluon"),
        (BY_NAME["rerope-8k-d64"], "rerope-train", "rerope", "9.0", "gluon"),
        (BY_NAME["causal-4k-d128"], "train", "rope", "8.0", "auto"),
        (BY_NAME["causal-4k-d128"], "train", "rope", None, "auto"),
    ],
    ids=lambda one: f"{one.name}-{one.tokens}" if isinstance(one, AttentionCase) else one,
)
def test_the_order_is_the_registrys(
    case: AttentionCase, mode: str, position: str, capability: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a record whose "auto" was flash."""
    times = {(impl, position): 9.0 for impl in ("auto", "gluon", "triton")}
    run = {"benchmark": "attention", "case": vars(case), "capability": capability}
    rows = [row | run for row in attention(case, mode, times)]
    assert taken(rows)["impl"] == first
    rules = (Rule(GLUON_FIRST), Rule(GLUON_FIRST, far=True))
    monkeypatch.setattr(candidates, "ORDER", {(9, 0): rules, (8, 0): (Rule(CUDNN_FIRST),)})
    is_hopper = capability == "9.0"
    assert taken(rows)["impl"] == ("gluon" if is_hopper else "auto")
    assert after_flash(rows[0]) == ("gluon" if is_hopper else "sdpa")


@pytest.mark.parametrize(
    ("time", "text"), [(0.1234, "0.123 µs"), (85.94, "85.9 µs"), (1404, "1.40 ms"), (2e6, "2.00 s")]
)
def test_durations_have_three_digits(time: float, text: str) -> None:
    assert duration(time).replace("\u00a0", " ") == text


def test_the_page_escapes_and_says_what_is_wrong(tmp_path: Path) -> None:
    page = render(read_records([write(tmp_path / "a.jsonl", ROTATION, "rope")]))
    order = [page.index(f"<h2>{title}") for title in ("Gains", "Losses", "Machines", "Every row")]
    assert order == sorted(order)
    assert "&lt;b&gt;past the budget" in page
    assert "<b>past" not in page
    assert "1 results were wrong or failed" in page


@pytest.mark.parametrize("name", ["host-h200", "bert-positions-h200"])
def test_another_record_has_no_page(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(ROOT / f"results/{name}.jsonl"), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert "is not a record of format 1 of the benchmark 'rope' or 'attention'" in result.stderr


def compare(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_slower_kernel_is_a_regression(tmp_path: Path) -> None:
    before = write(tmp_path / "a.jsonl", ROTATION, "rope")
    slower = [timed(row, 11.0, peak_bytes=50) if row["impl"] == "triton" and "time" in row else row for row in ROTATION]
    after = write(tmp_path / "b.jsonl", slower, "rope", torch="2.99")
    result = compare(before, after)
    assert result.exit_code == 1, result.output
    assert "+10.0%" in result.stdout
    assert "1 regression, 1 less" in result.stdout
    assert "NOTE: torch was None, and is '2.99'" in result.stdout
    assert compare(before, after, "--threshold", "0.2").exit_code == 0
    assert compare(before, before).stdout.endswith("4 rows compared: nothing changed beyond the noise\n")
    # By multiples of a copy that is slower alike, nothing changed.
    scaled = [timed(row, row["time"].p50 * 1.3) if "time" in row else row for row in ROTATION]
    other = write(tmp_path / "c.jsonl", scaled, "rope")
    assert compare(before, other).exit_code == 1
    assert compare_records(before, other, relative=True).found == []


def test_whatever_was_right_and_is_gone_is_a_regression(tmp_path: Path) -> None:
    before = write(tmp_path / "a.jsonl", ROTATION, "rope")
    wrong = [{**row, "status": "wrong"} if row["impl"] in ("triton", "compiled") else row for row in ROTATION]
    found = compare_records(before, write(tmp_path / "b.jsonl", wrong, "rope")).found
    assert {(one.impl, one.verdict) for one in found} == {("triton", "regression"), ("compiled", "changed")}
    gone = compare_records(before, write(tmp_path / "c.jsonl", ROTATION[:1], "rope"), every=True).found
    assert [one.verdict for one in gone].count("regression") == 2


def test_records_without_a_common_row_cannot_be_compared(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{n}.jsonl", ROTATION[n : n + 1], "rope") for n in (0, 1))
    result = compare(one, other)
    assert result.exit_code == 2
    assert "have no row in common" in result.stderr
    assert compare(one, tmp_path / "missing.jsonl").exit_code == 2


def test_targets_are_met_or_missed(tmp_path: Path) -> None:
    times = {("auto", "rope"): 10.0, ("triton", "rope"): 10.5, ("triton", "none"): 9.0}
    peers = {("cudnn", "compiled rope"): 12.0, ("flex", "compiled rope"): 20.0}
    rows = attention(BY_NAME["bert-512-lengths"], "train", {**times, **peers})
    rows += attention(BY_NAME["causal-4k-d128"], "train", {**times, ("flash_attn_4", "compiled rope"): 8.0})
    found = {(one.case, one.what): one for one in targets.judge(read_record(write(tmp_path / "a.jsonl", rows)))}
    good = found["bert-512-lengths", "train hot: auto + rope against cudnn + compiled rope"]
    assert good.met
    assert good.value == pytest.approx(1.2)
    assert not found["causal-4k-d128", "train hot: auto + rope against flash_attn_4 + compiled rope"].met
    assert not found["causal-4k-d128", "train hot: triton + rope against triton"].met


def test_every_target_is_of_a_case_and_a_mode_that_there_is() -> None:
    from ropewalk.bench.attention.cases import MODES
    from ropewalk.bench.parallel.cases import CASES as PARALLEL
    from ropewalk.bench.training.bench import CASES as MODELS

    names = {case.name for case in (*CASES, *MODELS, *PARALLEL)} | {"*"}
    for target in targets.TARGETS:
        assert set(target.get("at_least") or target["at_most"]) <= names
        assert target["benchmark"] != "attention" or set(target["modes"]) <= set(MODES)


@pytest.mark.browser
def test_the_page_opens_on_a_phone_and_loads_nothing(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    made = CliRunner().invoke(app, ["report", str(ROOT / "results/training-h200.jsonl"), "-o", str(output)])
    assert made.exit_code == 0, made.output
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        errors: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(output.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20000)
        assert page.locator("#gains canvas").count() > 0
        rows = page.locator("#table .slick-row")
        rows.first.wait_for()
        page.locator("#table input").fill("no such row")
        page.wait_for_function("document.querySelector('#table') && true")
        rows.first.wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert errors == []
        assert requests == [output.as_uri()]
