"""Attention's records, what they say of the targets, and their figure."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ropewalk.bench.attention.cases import CASES, AttentionCase
from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.attention.summary import print_attention_summary
from ropewalk.bench.attention.targets import targets
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import RecordWriter, read_lines
from ropewalk.bench.core.timing import HostTime, Quantiles
from ropewalk.bench.report.load import read_bench_record

RUN = {"benchmark": "attention", "device": "some GPU", "date": "2026-11-21T03:37:22+00:00"}
BY_NAME = {case.name: case for case in CASES}


def timed(
    case: AttentionCase,
    mode: str,
    times: dict[tuple[str, str], float],
    protocol: str = "hot",
    anchors: dict[str, float] | None = None,
) -> list[AttentionRow]:
    """Rows of a group in which each implementation took so long, and so long its yardstick or a copy."""
    ours = ("auto", "triton", "flash")
    rows = [
        AttentionRow(
            case,
            mode,
            impl,
            position,
            "ours" if impl in ours else "peer",
            "ok",
            protocol=protocol,
            time=Quantiles(time, time, time),
            tflops=case.flops(mode) / time / 1e6,
        )
        for (impl, position), time in times.items()
    ]
    for impl, time in (anchors or {}).items():
        row = AttentionRow(case, mode, impl, "none", "anchor", "ok", protocol="hot", time=Quantiles(time, time, time))
        if case.yardstick is not None:
            flops, position = BY_NAME[case.yardstick].flops(mode), "rope" if mode == "train" else "none"
            row = replace(row, position=position, yardstick=case.yardstick, tflops=flops / time / 1e6)
        rows.append(row)
    return [
        replace(row, ratios={other.label: other.time.p50 / row.time.p50 for other in rows if other != row})  # type: ignore[union-attr]
        for row in rows
    ]


KERNELS = timed(BY_NAME["full-4k-d128"], "fwd", {("triton", "none"): 10.0, ("flex", "none"): 11.0})
TRAINING = timed(
    BY_NAME["bert-512-lengths"],
    "train",
    {
        ("auto", "rope"): 10.0,
        ("triton", "rope"): 10.5,
        ("triton", "apply_rope"): 11.0,
        ("triton", "none"): 9.0,
        ("cudnn", "compiled rope"): 12.0,
        ("flex", "compiled rope"): 20.0,
    },
)
SCHEMES = timed(BY_NAME["causal-8k-d64"], "schemes-bwd", {("triton", "none"): 10.0, ("triton", "alibi"): 11.0})
PACKED_CASE, DECODE_CASE, MLA_CASE = BY_NAME["packed-4k-d128"], BY_NAME["decode-8k-d128"], BY_NAME["mla-8k-d192"]
PACKED = timed(
    PACKED_CASE,
    "train",
    {("auto", "rope"): 10.0, ("triton", "rope"): 10.0, ("flex", "compiled rope"): 12.0},
    anchors={"triton": 10.0 * BY_NAME["gqa-4k-d128"].flops("train") / PACKED_CASE.flops("train") * 0.9},
)
DECODING = [
    replace(row, gb_per_s=4000.0)
    for row in timed(
        DECODE_CASE,
        "decode",
        {
            ("auto", "rope"): 10.0,
            ("triton", "rope"): 10.0,
            ("triton", "rope, pages of 64"): 11.0,
            ("sdpa_default", "compiled rope"): 20.0,
            ("flex", "compiled rope"): 12.5,
        },
        anchors={"copy_": 8.5},
    )
]
VARIANTS = timed(
    BY_NAME["causal-4k-d128"],
    "variants-bwd",
    {("triton", "none"): 10.0, ("triton", "dropout"): 11.2, ("triton", "softcap"): 11.2, ("triton", "sinks"): 10.2},
)
REROPE = [
    replace(row, served_by="flash") if row.impl == "auto" else row
    for row in timed(
        BY_NAME["rerope-8k-d64"],
        "rerope-train",
        {
            ("auto", "rerope"): 10.1,
            ("triton", "rerope"): 12.0,
            ("flash", "rerope"): 10.0,
            ("triton", "rope"): 10.0,
            ("triton", "two calls"): 15.0,
            ("eager", "rerope"): 320.0,
        },
    )
]
REROPE_FORWARD = timed(
    BY_NAME["rerope-16k-d128"],
    "rerope-fwd",
    {("auto", "rerope"): 10.5, ("triton", "rerope"): 10.5, ("triton", "rope"): 10.0, ("triton", "two calls"): 9.0},
)
MLA = timed(MLA_CASE, "bwd", {("triton", "none"): 14.5}, anchors={"triton": 10.0})
NEWER = [*PACKED, *DECODING, *VARIANTS, *MLA]
NEWEST = [*REROPE, *REROPE_FORWARD]
MEMORY = [
    AttentionRow(
        BY_NAME["memory-64k"], "memory", "auto", "rope", "ours", "ok", peak_bytes=140 << 20, floor_bytes=100 << 20
    )
]
OTHERS = [
    AttentionRow(CASES[0], "fwd", "flash_attn_4", "none", "peer", "failed", "OSError"),
    AttentionRow(CASES[0], "fwd", "cudnn", "none", "peer", "wrong", "the error is past", error=0.7, error_budget=0.5),
    AttentionRow(CASES[0], "fwd", "sdpa_flash", "none", "peer", "unsupported", "no reason"),
]


def bench_record(run: dict[str, Any], rows: list[AttentionRow]) -> BenchRecord:
    return BenchRecord(Path("record.jsonl"), run, rows)


RECORD = bench_record({"format": 1, **RUN}, [*KERNELS, *TRAINING, *SCHEMES, *MEMORY, *OTHERS])


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    first = replace(KERNELS[0], host=HostTime(1.0, 2.0), rounds=5, served_by="triton")
    rows = [first, *TRAINING, *MEMORY, *NEWER, *NEWEST, *OTHERS]
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        for row in rows:
            writer.append(row)
    record = read_bench_record(path)
    assert record.rows == rows
    assert record.run == RECORD.run


def test_a_record_without_the_later_fields_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        for row in TRAINING:
            writer.append(row)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        for name in ("v_head_dim", "form", "shortest", "yardstick", "far_window"):
            del line["case"][name]
        for name in ("yardstick", "gb_per_s"):
            del line[name]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_bench_record(path).rows == TRAINING


def test_the_records_in_results_read_back() -> None:
    results = Path(__file__).parents[2] / "results"
    paths = [results / "all-h200.jsonl", *results.glob("attention-*.jsonl")]
    assert all(read_bench_record(path).rows for path in paths)


def test_one_benchmarks_record_is_not_the_others(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    RecordWriter(path, RUN).__exit__(None, None, None)
    with pytest.raises(ValueError, match="not a record of format 1 of the benchmark 'rope'"):
        read_lines(path, "rope")
    assert read_bench_record(path).rows == []


def test_targets_are_met_or_not() -> None:
    found = {target.what: target for target in targets(RECORD)}
    said = {what: (round(target.value, 3), target.bound, target.met) for what, target in found.items()}
    assert said == {
        "fwd: triton, times as fast as FlexAttention": (1.1, 1.12, False),
        "train: triton + rope over triton + apply_rope": (0.955, 1.0, True),
        "train: auto + rope over the best peer, cudnn": (0.833, 1.02, True),
        "train: auto + rope, times as fast as the better of cuDNN and FlexAttention": (1.2, 1.15, True),
        "schemes-bwd: alibi over no position": (1.1, 1.15, True),
        "memory: auto + rope over what it cannot do without": (1.4, 1.3, False),
    }
    assert {target.case for target in found.values()} == {
        "full-4k-d128",
        "bert-512-lengths",
        "causal-8k-d64",
        "memory-64k",
    }


def test_targets_of_packed_sequences_caches_variants_and_head_dims() -> None:
    found = {(target.case, target.what): target for target in targets(bench_record(RUN, NEWER))}
    said = {key: (round(target.value, 3), target.bound, target.met) for key, target in found.items()}
    packed, decode, variants, mla = "packed-4k-d128", "decode-8k-d128", "causal-4k-d128", "mla-8k-d192"
    share = MLA_CASE.flops("bwd") / BY_NAME["causal-8k-h16"].flops("bwd") / 1.45
    assert said == {
        (packed, "train: triton + rope, TFLOP/s over those on gqa-4k-d128"): (0.9, 0.95, False),
        (packed, "train: triton + rope, times as fast as FlexAttention"): (1.2, 1.1, True),
        (decode, "decode: triton + rope, of a copy's bandwidth"): (0.85, 0.8, True),
        (decode, "decode: triton + rope, pages of 64, of a copy's bandwidth"): (0.773, 0.8, False),
        (decode, "decode: auto + rope over the best peer, flex"): (0.8, 1.02, True),
        (variants, "variants-bwd: dropout over the same kernels without"): (1.12, 1.15, True),
        (variants, "variants-bwd: softcap over the same kernels without"): (1.12, 1.1, False),
        (variants, "variants-bwd: sinks over the same kernels without"): (1.02, 1.1, True),
        (mla, "bwd: triton, TFLOP/s over those on causal-8k-h16"): (round(share, 3), 0.9, share >= 0.9),
    }


def test_targets_of_rerope() -> None:
    found = {(target.case, target.what): target for target in targets(bench_record(RUN, NEWEST))}
    said = {key: (round(target.value, 3), target.bound, target.met) for key, target in found.items()}
    train, forward = "rerope-8k-d64", "rerope-16k-d128"
    assert said == {
        (train, "rerope-train: triton + rerope over triton + rope"): (1.2, 1.15, False),
        (train, "rerope-train: triton + rerope over triton + two calls"): (0.8, 1.0, True),
        (train, "rerope-train: triton + rerope, times as fast as eager PyTorch"): (26.667, 25.0, True),
        (train, "rerope-train: auto + rerope, times as fast as eager PyTorch"): (31.683, 33.0, False),
        (train, "rerope-train: auto + rerope over the best named one, flash + rerope"): (1.01, 1.02, True),
        (forward, "rerope-fwd: triton + rerope over triton + rope"): (1.05, 1.1, True),
        (forward, "rerope-fwd: auto + rerope over the best named one, triton + rerope"): (1.0, 1.02, True),
    }


def test_auto_has_a_target_only_where_flash_ran() -> None:
    rows = [replace(row, served_by="triton") for row in REROPE]
    said = [target.what for target in targets(bench_record(RUN, rows)) if "eager" in target.what]
    assert said == ["rerope-train: triton + rerope, times as fast as eager PyTorch"]


def test_targets_are_of_gpus() -> None:
    assert targets(RECORD)
    assert targets(bench_record({**RUN, "device": "CPU x86_64"}, RECORD.of(AttentionRow))) == []


def test_one_row_of_a_cache_need_not_reach_a_copys_bandwidth() -> None:
    times = {("auto", "rope"): 10.0, ("triton", "rope"): 10.0, ("sdpa_default", "compiled rope"): 11.0}
    said = {}
    for name in ("decode-8k-d128", "decode-1"):
        rows = timed(BY_NAME[name], "decode", times, anchors={"copy_": 5.0})
        said[name] = [target.what for target in targets(bench_record(RUN, rows))]
    against = "decode: auto + rope over the best peer, sdpa_default"
    assert said["decode-1"] == [against]
    assert said["decode-8k-d128"] == ["decode: triton + rope, of a copy's bandwidth", against]


def test_what_rope_costs_is_a_target_of_long_sequences() -> None:
    times = {("triton", "rope"): 10.5, ("triton", "none"): 10.0}
    costs = {}
    for name in ("causal-16k-d128", "causal-2k-d128", "bert-512"):
        rows = timed(BY_NAME[name], "train", times)
        costs[name] = [(target.bound, target.met) for target in targets(bench_record(RUN, rows))]
    assert costs == {"causal-16k-d128": [(1.03, False)], "causal-2k-d128": [(1.08, True)], "bert-512": []}


def test_targets_are_of_cases_that_exist() -> None:
    from ropewalk.bench.attention import settings as attention_settings
    from ropewalk.bench.attention import targets as attention_targets

    named = {*attention_targets._FLEX, *attention_targets._ROPE_COST, attention_targets._BERT}
    assert named <= set(BY_NAME)
    assert all(BY_NAME[name].yardstick is not None for name in attention_targets._YARDSTICKS)
    assert set(attention_targets._VARIANTS) == set(attention_settings.VARIANTS)
    assert all(mode in BY_NAME[name].modes for name, mode in attention_targets._REROPE_COST)


def test_the_summary_says_it_all() -> None:
    text = io.StringIO()
    print_attention_summary(
        bench_record(RUN, [*RECORD.of(AttentionRow), *NEWER, *NEWEST]), Console(file=text, width=300)
    )
    for words in (
        "1.100×",
        "train: auto + rope over the best peer, cudnn",
        "1.400",
        "failed: flash_attn_4",
        "error 0.7",
        "4000 GB/s",
        "triton + rope on gqa-4k-d128",
        "rerope-train, ReRoPE, attention and both their backwards",
    ):
        assert words in text.getvalue()


def test_the_figure_is_drawn_of_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ropewalk.bench.attention.figure import draw_attention_record

    path = tmp_path / "figure.png"
    assert draw_attention_record(RECORD, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_attention_record(bench_record(RUN, NEWER), path)
    for rows in (MEMORY, SCHEMES, DECODING, NEWEST, OTHERS):
        assert not draw_attention_record(bench_record(RUN, rows), tmp_path / "none.png")
    assert not draw_attention_record(RECORD, tmp_path / "none.png", protocol="cool")
    assert not (tmp_path / "none.png").exists()
