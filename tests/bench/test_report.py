"""The report's data and its page: verdicts, losses, shares, charts, the table, escaping, and what is refused."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest
import support
import torch

pytest.importorskip("plotly")

import typer
from typer.testing import CliRunner

from ropewalk.bench.attention.cases import CASES as ATTENTION_CASES
from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core.records import FORMAT
from ropewalk.bench.core.timing import COPY, HostTime, Quantiles
from ropewalk.bench.report import charts, formats, sections
from ropewalk.bench.report.choices import Pick, after_flash, choices
from ropewalk.bench.report.entries import read_sources
from ropewalk.bench.report.markup import Markup, element
from ropewalk.bench.report.page import data_of, write_report
from ropewalk.bench.report.strip import draw_strip, scale_of
from ropewalk.bench.report.styles import style_of
from ropewalk.bench.report.table import table_of
from ropewalk.bench.report.verdicts import costs, host_sentence, losses, sentence, verdict_groups
from ropewalk.bench.rope.cases import CASES, SWEEP, Case
from ropewalk.bench.rope.peers import PEERS
from ropewalk.bench.rope.rows import RopeRow
from ropewalk.bench.rope.run import MULTIPLY
from ropewalk.cli.report import report
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.libraries import flash
from ropewalk.schemes import ReRope, Rope

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'{{plotly}}"
GPU = {
    "date": "2026-11-21T03:37:22+00:00",
    "device": "Some Accelerator",
    "driver_version": "580.1",
    "system": "Linux x86_64",
    "torch": "2.11.0",
    "commit": "0123456789abcdef",
    "dirty": True,
    "peers": {"quack": "0.6.5", "xformers": f"missing: {HOSTILE}"},
}
CPU = {"date": "2026-11-22T03:37:22+00:00", "device": "CPU x86_64", "threads": 2, "commit": None, "peers": {}}
LARGE, SMALL = CASES[0], next(case for case in CASES if case.name == "decode-64")
BY_NAME = {case.name: case for case in ATTENTION_CASES}
TRAINING, DECODING = BY_NAME["bert-512-lengths"], BY_NAME["decode-8k-d128"]


def spread(time: float) -> Quantiles:
    return Quantiles(0.9 * time, time, 1.2 * time)


def rotation(
    case: Case,
    direction: str,
    impl: str,
    kind: str,
    time: float,
    *,
    graph: float | None = None,
    host: float | None = None,
    copy: float = 10.0,
) -> RopeRow:
    """A row that was timed."""
    return RopeRow(
        case,
        direction,
        impl,
        kind,
        "ok",
        error=1e-3,
        error_budget=4e-3,
        time=spread(time),
        gb_per_s=case.bytes_moved / time / 1e3,
        copy_ratio=copy / time,
        graph=None if graph is None else spread(graph),
        host=None if host is None else HostTime(0.9 * host, host),
        peak_bytes=3 << 20,
    )


def attention(case, mode: str, times: dict[tuple[str, str, str], float], ratios: dict[str, float] | None = None):
    """Rows that were timed together; `ratios` replaces what the first would have against the others."""
    rows = [
        AttentionRow(
            case,
            mode,
            impl,
            position,
            kind,
            "ok",
            protocol="hot",
            time=spread(time),
            tflops=case.flops(mode) / time / 1e6,
        )
        for (impl, position, kind), time in times.items()
    ]
    rows = [replace(row, ratios={o.label: o.time.p50 / row.time.p50 for o in rows if o != row}) for row in rows]
    return rows if ratios is None else [replace(rows[0], ratios=ratios), *rows[1:]]


def write(path: Path, run: dict, rows: Sequence[RopeRow | AttentionRow]) -> Path:
    """A record; of both benchmarks where rows are."""
    kinds = {"attention" if isinstance(row, AttentionRow) else "rope" for row in rows} or {"rope"}
    benchmark = kinds.pop() if len(kinds) == 1 else "all"
    lines: list[dict] = [{"format": FORMAT, "benchmark": benchmark, **run}]
    for row in rows:
        kind = {"benchmark": "attention" if isinstance(row, AttentionRow) else "rope"} if benchmark == "all" else {}
        lines.append({**kind, **asdict(row)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


ROTATIONS = [
    rotation(LARGE, "fwd", "copy_", "anchor", 10.0),
    rotation(LARGE, "fwd", "native", "ours", 11.0, host=12.0),
    rotation(LARGE, "fwd", "triton", "ours", 10.5, host=15.0),
    rotation(LARGE, "fwd", "quack", "peer", 12.6, host=10.0),
    rotation(LARGE, "fwd", "compiled", "peer", 20.0),
    RopeRow(LARGE, "fwd", "vllm", "peer", "wrong", HOSTILE, 0.7, 0.5),
    RopeRow(LARGE, "fwd", "flashinfer", "peer", "failed", "OSError"),
    rotation(LARGE, "bwd", "copy_", "anchor", 10.0),
    rotation(LARGE, "bwd", "native", "ours", 20.0),
    rotation(LARGE, "bwd", "liger_kernel", "peer", 16.0),
    rotation(SMALL, "decode", "copy_", "anchor", 3.0, graph=1.0),
    rotation(SMALL, "decode", "mul_", "anchor", 3.0, graph=1.0, host=5.0),
    rotation(SMALL, "decode", "native", "ours", 5.0, graph=1.25, host=9.0),
    rotation(SMALL, "decode", "quack", "peer", 4.0, graph=1.255, host=12.0),
    rotation(SMALL, "decode", "compiled", "peer", 2.0),
]
ATTENTIONS = [
    *attention(
        TRAINING,
        "train",
        {
            ("auto", "rope", "ours"): 10.0,
            ("triton", "none", "ours"): 5.0,
            ("triton", "rope", "ours"): 6.0,
            ("cudnn", "compiled rope", "peer"): 11.0,
            ("flash_attn_4", "compiled rope", "peer"): 12.0,
            ("eager", "none", "peer"): 1.0,
        },
        # By rounds the order of the peers is another one than by medians.
        ratios={"cudnn + compiled rope": 1.2, "flash_attn_4 + compiled rope": 0.9, "eager": 0.1},
    ),
    AttentionRow(TRAINING, "train", "sdpa_flash", "compiled rope", "peer", "unsupported", "no key lengths"),
    *attention(
        DECODING,
        "decode",
        {("auto", "rope", "ours"): 100.0, ("cudnn", "compiled rope", "peer"): 99.0, ("copy_", "none", "anchor"): 80.0},
    ),
]


def sources_of(tmp_path: Path, rows: Sequence[RopeRow | AttentionRow], run: dict = GPU, name: str = "record"):
    return read_sources([write(tmp_path / f"{name}.jsonl", run, rows)])


def groups_of(tmp_path: Path, rows: Sequence[RopeRow | AttentionRow], run: dict = GPU):
    return {group.title: group for group in verdict_groups(sources_of(tmp_path, rows, run)[0].entries)}


def test_rotations_are_compared_best_against_best(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ROTATIONS)
    assert list(groups) == ["Rotation, forward", "Rotation, backward", "Rotation, decode"]
    (ahead,) = groups["Rotation, forward"].verdicts
    assert (ahead.ours.entry.impl, ahead.peer.entry.impl, ahead.outcome) == ("triton", "quack", "ahead")
    assert ahead.times_as_fast == pytest.approx(1.2)
    assert ahead.share == pytest.approx(10 / 10.5)
    assert ahead.text == "1.20\u00a0× as fast as quack"
    assert ahead.excluded == (("vllm", "wrong"), ("flashinfer", "failed"))
    (behind,) = groups["Rotation, backward"].verdicts
    assert behind.outcome == "behind"
    assert behind.text == "0.80\u00a0×: liger_kernel is faster"


def test_small_rotations_are_compared_in_a_graph(tmp_path: Path) -> None:
    (level,) = groups_of(tmp_path, ROTATIONS)["Rotation, decode"].verdicts
    assert level.ours.in_graph
    assert level.outcome == "level"  # by the time of a call the peer would be faster
    assert level.times_as_fast == pytest.approx(1.255 / 1.25)
    assert level.share == pytest.approx(0.8)
    assert level.text == "1.00\u00a0×: as fast as quack"
    assert level.host_ratio == pytest.approx(12 / 9)
    assert level.excluded == (("compiled", "not in a graph"),)


@pytest.mark.parametrize(
    ("time", "outcome"), [(10.25, "ahead"), (10.15, "level"), (9.85, "level"), (9.75, "behind"), (1.0, "behind")]
)
def test_two_percent_count_as_equal(time: float, outcome: str, tmp_path: Path) -> None:
    rows = [rotation(LARGE, "fwd", "native", "ours", 10.0), rotation(LARGE, "fwd", "quack", "peer", time)]
    (verdict,) = groups_of(tmp_path, rows)["Rotation, forward"].verdicts
    assert verdict.outcome == outcome


def test_attention_is_compared_by_ratios_over_rounds_and_with_rope_on_both_sides(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ATTENTIONS)
    (training,) = groups["RoPE and attention, training, hot"].verdicts
    assert (training.ours.entry.label, training.peer.entry.impl) == ("auto + rope", "flash_attn_4")
    assert training.times_as_fast == 0.9
    assert training.outcome == "behind"
    (decoding,) = groups["RoPE and attention, decode, hot"].verdicts
    assert decoding.outcome == "level"
    assert decoding.share == pytest.approx(0.8)  # of the copy


def test_hot_and_cool_are_apart(tmp_path: Path) -> None:
    rows = attention(BY_NAME["full-4k-d128"], "fwd", {("triton", "none", "ours"): 1.0, ("flex", "none", "peer"): 2.0})
    cool = [replace(row, protocol="cool") for row in rows]
    wrong = AttentionRow(
        BY_NAME["full-4k-d128"], "fwd", "cudnn", "none", "peer", "wrong", "the error is past the budget"
    )
    groups = groups_of(tmp_path, [wrong, *rows, *cool])
    assert list(groups) == ["Attention, forward, cool", "Attention, forward, hot"]
    for group in groups.values():
        (verdict,) = group.verdicts
        assert verdict.lead.case == "full-4k-d128"
        assert verdict.excluded == (("cudnn", "wrong"),)


def test_the_sentence_counts_and_names_the_losses(tmp_path: Path) -> None:
    groups = list(groups_of(tmp_path, [*ROTATIONS, *ATTENTIONS]).values())
    said = sentence(groups)
    assert said.startswith("Faster than or equal to (within 2 %) every peer in 3 of 5 comparisons; behind in: ")
    assert "llama3-8b bwd (0.80\u00a0×: liger_kernel is faster), bert-512-lengths train (0.90\u00a0×" in said
    assert [one.times_as_fast for _, one in losses(groups[::-1])] == [0.8, 0.9]
    assert host_sentence(groups) == (
        "An eager call costs the host no more than the best peer's does in 1 of the 2 where both were timed."
    )


@pytest.mark.parametrize(
    ("dates", "peers", "decided_by"),
    [
        (("2026-11-21", "2026-11-22"), ("quack", "quack"), {"new"}),
        (("2026-11-22", "2026-11-21"), ("quack", "quack"), {"old"}),
        (("2026-11-21", "2026-11-22"), ("vllm", "quack"), {"old", "new"}),  # the new one lacks the older's best peer
    ],
)
def test_a_newer_record_with_the_same_best_peer_decides(dates, peers, decided_by, tmp_path: Path) -> None:
    paths = []
    for name, date, peer, time in zip(("old", "new"), dates, peers, (8.0, 12.0), strict=True):
        rows = [rotation(LARGE, "fwd", "native", "ours", 10.0), rotation(LARGE, "fwd", peer, "peer", time)]
        paths.append(write(tmp_path / f"{name}.jsonl", {**GPU, "date": date}, rows))
    sources = read_sources(paths)
    entries = [entry for source in sources for entry in source.entries]
    (group,) = verdict_groups(entries, {source.name: source.date for source in sources})
    assert {one.lead.record for one in group.verdicts} == decided_by
    assert group.compared == len(decided_by)
    assert [one.superseded_by for one in group.superseded] == [*decided_by] * (2 - len(decided_by))
    page = sections.verdicts(sources)
    assert f"in {2 - len(group.superseded) - ('old' in decided_by)} of {len(decided_by)} comparisons" in page
    assert ("superseded by" in page) is (len(decided_by) == 1)


def make_choice(
    tmp_path: Path, served_by: str, flash: str | None, *, case=BY_NAME["causal-4k-d128"], gluon: bool = True
):
    """The choice of a record where a backend ran `impl=None`, and flash-attn 4 was found, missing or not looked for."""
    times = {("auto", "rope", "ours"): 5.0, ("triton", "rope", "ours"): 9.0, ("triton", "none", "ours"): 1.0}
    times |= {("gluon", "rope", "ours"): 7.0} if gluon else {}
    times |= {("flash_attn_4", "compiled rope", "peer"): 6.0}
    rows = [
        replace(row, served_by=served_by if row.impl == "auto" else row.impl) for row in attention(case, "train", times)
    ]
    run = {**GPU, "capability": "9.0", "peers": {} if flash is None else {"flash_attn_4": flash}}
    (choice,) = choices(sources_of(tmp_path, rows, run)[0])
    return choice


def test_kernels_and_choices_are_told_apart(tmp_path: Path) -> None:
    choice = make_choice(tmp_path, "flash", "4.0")
    assert choice.picks == (Pick("gluon", 7.0, True), Pick("gluon", 7.0, True), Pick("flash", 5.0, False))
    assert choice.peers == {"flash_attn_4": 6.0}


def test_a_time_that_no_row_has_is_not_measured(tmp_path: Path) -> None:
    choice = make_choice(tmp_path, "flash", "4.0", gluon=False)
    assert choice.picks == (Pick("triton", 9.0, True), None, Pick("flash", 5.0, False))
    # At 512 tokens Gluon's kernels follow flash-attn, below cuDNN's do; no row has them.
    assert make_choice(tmp_path, "flash", "4.0", gluon=False, case=BY_NAME["bert-512"]).without_flash is None
    short = replace(BY_NAME["bert-512"], tokens=511)
    assert make_choice(tmp_path, "flash", "4.0", case=short).without_flash is None
    page = sections.verdicts(sources_of(tmp_path, ATTENTIONS, {**GPU, "peers": {}}))
    assert "not measured" in page


@pytest.mark.parametrize(
    ("flash", "with_flash"), [("4.0", Pick("gluon", 5.0, False)), ("missing: x", None), (None, None)]
)
def test_a_pick_beside_flash_attn_is_the_same_without(flash, with_flash, tmp_path: Path) -> None:
    choice = make_choice(tmp_path, "gluon", flash)
    assert (choice.without_flash, choice.with_flash) == (Pick("gluon", 5.0, False), with_flash)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "train") for name in ("causal-4k-d128", "full-4k-d64", "causal-2k-d128", "bert-512", "gemma3-27b")),
        *((name, mode) for name in ("rerope-8k-d64", "rerope-16k-d128") for mode in ("rerope-fwd", "rerope-train")),
    ],
)
def test_what_follows_flash_attn_is_what_attention_picks_without(name: str, mode: str, tmp_path: Path) -> None:
    """By the backends' own refusals, on one head of the case."""
    pytest.importorskip("triton")
    case = BY_NAME[name]
    far, training = case.far_window is not None, mode.endswith("train")
    position = ReRope(case.far_window) if far else Rope()
    (row, *_) = attention(case, mode, {("auto", "rerope" if far else "rope", "ours"): 1.0})
    run = {**GPU, "capability": "9.0"}
    source = sources_of(tmp_path, [replace(row, served_by="flash")], run)[0]
    with torch.set_grad_enabled(training), support.imagined_gpu():
        q, k, v = (
            torch.zeros(1, case.tokens, 1, case.head_dim, dtype=torch.bfloat16, requires_grad=training)
            for _ in range(3)
        )
        call = make_call(q, k, v, position=position, causal=case.causal, window=case.window)
        call = call._replace(**{x: support.on_gpu(getattr(call, x)) for x in "qkv"})
        assert backends.choose(call, None).name == "flash"
        with mock.patch.object(flash, "flash_version", return_value=None):
            assert after_flash(source.entries[0], source) == backends.choose(call, None).name


def test_without_peers_nothing_is_claimed(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, [row for row in ROTATIONS if row.kind != "peer"])
    assert sentence(list(groups.values())) == "No peer was measured beside ours: there is nothing to compare with."
    assert {one.outcome for group in groups.values() for one in group.verdicts} == {"alone"}
    assert host_sentence(list(groups.values())) is None


@pytest.mark.parametrize("with_peer", [True, False])
def test_our_own_failures_count_against_us(with_peer: bool, tmp_path: Path) -> None:
    rows = [RopeRow(LARGE, "fwd", "native", "ours", "wrong", "the error is past the budget", 1.0, 0.5)]
    rows += [rotation(LARGE, "fwd", "quack", "peer", 12.0)] if with_peer else []
    groups = list(groups_of(tmp_path, rows).values())
    assert "in 0 of 1 comparisons; without a time of ours in 1" in sentence(groups)
    (found,) = losses(groups)
    assert found[1].text == "no time of ours: native is wrong, the error is past the budget"


def test_the_share_of_a_matrix_products_rate_is_the_recorded_one(tmp_path: Path) -> None:
    case = BY_NAME["full-4k-d128"]
    (row,) = attention(case, "fwd", {("triton", "none", "ours"): 2000.0})
    recorded = replace(row, matrix_ratio=0.25)
    shares = [sources_of(tmp_path, [one], GPU)[0].entries[0].share for one in (row, recorded)]
    assert shares == [None, 0.25]


def test_what_positions_cost_is_ours_over_ours(tmp_path: Path) -> None:
    (found,) = costs(sources_of(tmp_path, ATTENTIONS)[0].entries)
    assert (found.entry.label, found.baseline.label, found.times) == ("triton + rope", "triton", pytest.approx(1.2))


def test_records_of_two_machines_are_never_compared(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.jsonl", GPU, [rotation(LARGE, "fwd", "native", "ours", 10.0)])
    others = {**GPU, "device": "Another Accelerator"}
    theirs = write(tmp_path / "theirs.jsonl", others, [rotation(LARGE, "fwd", "quack", "peer", 5.0)])
    again = write(tmp_path / "again.jsonl", {**GPU, "driver_version": "590.1"}, [])
    sources = read_sources([ours, theirs, again])
    assert len(sections.by_machine(sources)) == 3
    page = sections.verdicts(sources)
    assert page.count("machine") == 3
    assert "is faster" not in page
    assert {panel["record"] for panel in charts.speed_panels(sources[0])} == {"ours"}


def test_two_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "record.jsonl", GPU, ROTATIONS)
    sources = read_sources([tmp_path / "a" / "record.jsonl", tmp_path / "b" / "record.jsonl"])
    assert [source.name for source in sources] == ["record", "record (2)"]
    (ahead, again) = verdict_groups([entry for source in sources for entry in source.entries])[0].verdicts
    assert ahead.times_as_fast == again.times_as_fast == pytest.approx(1.2)


def test_a_sweep_is_drawn_over_the_length(tmp_path: Path) -> None:
    cases = [case for case in SWEEP if not case.interleaved]
    rows = [rotation(case, "fwd", "native", "ours", float(case.tokens)) for case in reversed(cases)]
    (panel,) = charts.speed_panels(sources_of(tmp_path, rows)[0])
    assert panel["axis"] == "length"
    assert panel["x"] == [2**n for n in range(18)]
    (series,) = panel["series"]
    assert [point["time"] for point in series["points"]] == panel["x"]
    assert series["points"][0]["time_low"] == pytest.approx(0.1)
    assert series["points"][0]["time_high"] == pytest.approx(0.2)
    assert list(panel["metrics"]) == ["time", "gb_per_s", "share"]


def test_other_cases_are_drawn_side_by_side(tmp_path: Path) -> None:
    panels = charts.speed_panels(sources_of(tmp_path, [*ROTATIONS, *ATTENTIONS])[0])
    assert [(panel["what"], panel["axis"], panel["x"]) for panel in panels] == [
        ("Rotation, forward", "case", ["llama3-8b"]),
        ("Rotation, backward", "case", ["llama3-8b"]),
        ("Rotation, decode", "case", ["decode-64"]),
        ("RoPE and attention, training, hot", "case", ["bert-512-lengths"]),
        ("RoPE and attention, decode, hot", "case", ["decode-8k-d128"]),
    ]
    assert [series["name"] for series in panels[0]["series"]] == ["native", "triton", "quack", "compiled", "copy_"]
    assert "graph" in panels[2]["metrics"]
    assert "mul_" not in [series["name"] for series in panels[2]["series"]]


def test_looks_are_an_implementations_own(tmp_path: Path) -> None:
    panels = charts.speed_panels(sources_of(tmp_path, ATTENTIONS)[0])
    styles = {series["name"]: series["style"] for series in panels[0]["series"]}
    assert styles["triton"]["light"] == styles["triton + rope"]["light"] == style_of("triton").light
    assert styles["triton"]["symbol"] == "square-open"
    assert styles["triton + rope"]["symbol"] == "square"
    assert len({style["symbol"] for style in styles.values()}) == len(styles)
    assert style_of("a new peer") == style_of("a new peer")


@pytest.mark.parametrize(
    "names",
    [
        ("native", "triton", "rotary_embedding", "reference", COPY, MULTIPLY, *PEERS),
        ("auto", "triton", "gluon", "flash", "sdpa", "reference", COPY, *ATTENTION_PEERS),
    ],
)
def test_implementations_that_stand_together_look_different(names: tuple[str, ...]) -> None:
    styles = [style_of(name) for name in names]
    assert len({style.symbol for style in styles}) == len(styles)
    assert len({style.light for style in styles}) == len({style.dark for style in styles}) >= len(styles) - 2


def test_rooflines_have_the_roofs_that_were_measured(tmp_path: Path) -> None:
    panels = charts.roofline_panels(sources_of(tmp_path, ROTATIONS)[0])
    assert panels[0]["roofs"] == {"copy": pytest.approx(LARGE.bytes_moved / 1e4), "matmul": None}
    assert "the copy's roof is drawn alone" in panels[0]["note"]
    series = {one["name"]: one for one in panels[0]["series"]}
    assert set(series) == {"native", "triton", "quack", "compiled"}
    assert series["native"]["x"] == [pytest.approx(0.75)]  # three operations for an element that is read and written
    assert series["native"]["y"] == [pytest.approx(3 * LARGE.elements / 11.0 / 1e6)]
    rates = {"copy_gb_per_s": 4000.0, "matmul_tflops": {"bfloat16": 800.0}}
    measured = charts.roofline_panels(sources_of(tmp_path, ATTENTIONS, {**GPU, "rates": rates})[0])[0]
    assert measured["roofs"] == {"copy": 4000.0, "matmul": 800.0}
    intensity = TRAINING.flops("train") / (3 * 32 * 512 * 24 * 128 * 2)
    assert measured["series"][0]["x"] == [pytest.approx(intensity)]


def test_bars_are_sorted_and_host_time_begins_with_decoding(tmp_path: Path) -> None:
    source = sources_of(tmp_path, ROTATIONS)[0]
    host, memory = charts.bar_panels(source, "host"), charts.bar_panels(source, "memory")
    assert [panel["what"] for panel in host] == ["Rotation, decode", "Rotation, forward"]
    assert [bar["name"] for bar in host[0]["bars"]] == ["mul_", "native", "quack"]
    assert all("copy_" not in [bar["name"] for bar in panel["bars"]] for panel in memory)
    assert memory[0]["bars"][0]["value"] == 3
    assert charts.bar_panels(sources_of(tmp_path, [])[0], "host") == []


def test_the_table_has_every_row_and_no_empty_columns(tmp_path: Path) -> None:
    table = table_of(sources_of(tmp_path, ROTATIONS)[0].entries)
    keys = [column["key"] for column in table["columns"]]
    assert len(table["rows"]) == len(ROTATIONS)
    assert not {"record", "protocol", "tflops", "served_by"} & set(keys)
    wrong = dict(zip(keys, table["rows"][5], strict=True))
    assert (wrong["status"], wrong["reason"], wrong["time"]) == ("wrong", HOSTILE, None)
    assert wrong["error"] == [0.7, "0.7"]
    timed = dict(zip(keys, table["rows"][2], strict=True))
    assert timed["time"] == [10.5, "10.5"]
    assert timed["share"] == [pytest.approx(10 / 10.5), "95 %"]
    assert timed["peak"] == [3.0, "3.00"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98765, "0.988 µs"),
        (12.345, "12.3 µs"),
        (999.9, "1000 µs"),
        (1234.0, "1.23 ms"),
        (2.5e6, "2.50 s"),
        (0.0, "0 µs"),
    ],
)
def test_times_have_their_unit(value: float, text: str) -> None:
    assert formats.duration(value) == text


def test_markup_escapes_what_is_not_markup() -> None:
    made = element("p", HOSTILE, element("br"), None, title=HOSTILE, hidden=True, open=False)
    assert "<img" not in made
    assert made.count("<br>") == 1
    assert made.startswith('<p title="&lt;/script&gt;')
    assert " hidden>" in made
    assert "open" not in made
    assert element("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"


def test_strips_put_marks_on_their_side(tmp_path: Path) -> None:
    rows = [rotation(LARGE, "fwd", "native", "ours", 10.0), rotation(LARGE, "fwd", "quack", "peer", 9.79)]
    rows += [rotation(replace(LARGE, name="b"), "fwd", "native", "ours", 10.0)]
    rows += [rotation(replace(LARGE, name="b"), "fwd", "quack", "peer", 99.0)]
    (group,) = groups_of(tmp_path, rows).values()
    scale = scale_of([group])
    assert scale == (0.8, 3.0)
    svg = draw_strip(group, scale)
    line = float(re.search(r'x1="([\d.]+)"[^>]*class="one"', svg)[1])
    marks = re.findall(r'<polygon points="([\d.]+)[^"]*" class="(\w+)"', svg)
    assert [name for _, name in marks] == ["behind", "ahead"]
    assert float(marks[0][0]) + 3.4 < line < float(marks[1][0])  # the middle of the one, the left of the other


@pytest.mark.parametrize("theme", [":root", '[data-theme="dark"]'])
def test_text_has_contrast(theme: str) -> None:
    style = (files("ropewalk.bench.report") / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", style[style.index(theme) :].partition("}")[0]))
    grounds = [
        (name, ground) for name in ("text", "muted", "ahead", "behind", "level") for ground in ("page", "raised")
    ]
    for name, ground in [*grounds, *((name, f"{name}-pale") for name in ("ahead", "behind", "level"))]:
        low, high = sorted(luminance(colours[one]) for one in (name, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def luminance(colour: str) -> float:
    """Relative luminance, as the WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class Page(HTMLParser):
    """Elements with what they load, and texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.in_script = False
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append("")
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts[-1] += data


def test_the_page_is_one_file_and_what_records_say_is_text(tmp_path: Path) -> None:
    run = {**GPU, "device": f"GPU {HOSTILE}", HOSTILE: HOSTILE}
    record = write(tmp_path / "record.jsonl", run, [*ROTATIONS, *ATTENTIONS])
    text = write_report([record], tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert set(page.loads) <= {"data:,", "#verdict", "#charts", "#rows", "#systems"}
    data, plotly, script = page.scripts
    assert json.loads(data) == json.loads(json.dumps(data_of(read_sources([record]))))
    assert HOSTILE in json.dumps(json.loads(data)["table"], ensure_ascii=False).replace('\\"', '"')
    assert len(plotly) > 1e6
    own = text.replace(plotly, "")
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|//cdn", own.replace(data, ""))
    assert "alert(1)</script" not in own
    assert "default-src 'none'" in own
    assert script.count("{{") == 0
    assert str(tmp_path) not in text


def test_nothing_of_a_cpu_is_said_to_be_of_a_gpu(tmp_path: Path) -> None:
    rows = [
        replace(row, host=None, graph=None, peak_bytes=None)
        for row in ROTATIONS
        if row.kind != "peer" and row.direction == "fwd"
    ]
    record = write(tmp_path / "record.jsonl", CPU, rows)
    text = write_report([record], tmp_path / "report.html").read_text(encoding="utf-8")
    own = text.replace(Page(text).scripts[1], "")
    body = own[own.index("<main>") : own.index('id="data"')]
    assert "CPU x86_64" in body
    for word in ("GPU", "CUDA", "on the device", "in a graph", "bursts"):
        assert word not in body
    data = data_of(read_sources([record]))
    assert data["host"] == data["memory"] == []
    assert {column["key"] for column in data["table"]["columns"]}.isdisjoint({"graph", "host", "peak"})
    assert data["speed"][0]["metrics"]["time"] == "time of the call, µs"


@pytest.mark.parametrize("rows", [[], [RopeRow(LARGE, "fwd", "native", "ours", "wrong", "why")], ATTENTIONS])
def test_any_rows_make_a_page(rows: Sequence[RopeRow], tmp_path: Path) -> None:
    output = tmp_path / "new" / "report.html"
    assert write_report([write(tmp_path / "record.jsonl", GPU, rows)], output) == output
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "no JSON\n",
        "\udcff is not UTF-8\n",
        "[1]\n",
        '{"format": 1, "benchmark": "training", "device": "x", "date": "y"}\n',
        '{"format": 1, "benchmark": "rope", "device": "x", "date": "y"}\n{"case": 3}\n',
        '{"format": 1, "benchmark": "rope", "date": "y"}\n',
    ],
)
def test_another_file_is_refused_by_its_name_and_nothing_is_written(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"other\.jsonl is not a record|other\.jsonl: the line about the run has no"):
        write_report([write(tmp_path / "record.jsonl", GPU, ROTATIONS), path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_what_exists_is_overwritten_only_by_force(tmp_path: Path) -> None:
    record, output = write(tmp_path / "record.jsonl", GPU, ROTATIONS), tmp_path / "report.html"
    output.write_text("mine")
    with pytest.raises(ValueError, match=r"report\.html exists already, .* --force"):
        write_report([record], output)
    assert output.read_text() == "mine"
    write_report([record], output, force=True)
    assert output.read_text(encoding="utf-8") != "mine"
    before = record.read_text()
    with pytest.raises(ValueError, match="one of the records"):
        write_report([record], record, force=True)
    assert record.read_text() == before
    for records, wrong, message in (([], output, "records is empty"), ([record], tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=message):
            write_report(records, wrong, force=True)
    with pytest.raises(ValueError, match="is not a file"):
        write_report([tmp_path / "missing.jsonl"], output, force=True)


def test_without_plotly_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    record = write(tmp_path / "record.jsonl", GPU, ROTATIONS)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ropewalk\[bench\]'"):
        write_report([record], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)
    record, output = write(tmp_path / "record.jsonl", GPU, ROTATIONS), tmp_path / "report.html"
    runner = CliRunner()
    assert runner.invoke(app, []).exit_code == 2
    assert runner.invoke(app, [str(tmp_path / "missing.jsonl")]).exit_code == 2
    done = runner.invoke(app, [str(record), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert output.exists()
    refused = runner.invoke(app, [str(record), "-o", str(output)])
    assert refused.exit_code == 2
    assert "exists already" in refused.output
    assert runner.invoke(app, [str(record), "-o", str(output), "--force"]).exit_code == 0
