"""Attention's records, what they say of the targets, and their figure."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ropewalk.bench.attention_cases import CASES, AttentionCase
from ropewalk.bench.attention_records import AttentionRecord, AttentionRow, read_attention_record
from ropewalk.bench.attention_summary import print_attention_summary
from ropewalk.bench.attention_targets import targets
from ropewalk.bench.records import RecordWriter, read_record
from ropewalk.bench.timing import HostTime, Quantiles

RUN = {"benchmark": "attention", "device": "some GPU", "date": "2026-11-21T03:37:22+00:00"}
BY_NAME = {case.name: case for case in CASES}


def timed(
    case: AttentionCase, mode: str, times: dict[tuple[str, str], float], protocol: str = "hot"
) -> list[AttentionRow]:
    """Rows of a group in which each implementation took so long."""
    ours = ("auto", "triton")
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
RECORD = AttentionRecord({"format": 1, **RUN}, [*KERNELS, *TRAINING, *SCHEMES, *MEMORY, *OTHERS])


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [replace(KERNELS[0], host=HostTime(1.0, 2.0), rounds=5, served_by="triton"), *TRAINING, *MEMORY, *OTHERS]
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        for row in rows:
            writer.append(row)
    record = read_attention_record(path)
    assert record.rows == rows
    assert record.run == RECORD.run


def test_one_benchmarks_record_is_not_the_others(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    RecordWriter(path, RUN).__exit__(None, None, None)
    with pytest.raises(ValueError, match="not a record of format 1 of the benchmark 'rope'"):
        read_record(path)
    assert read_attention_record(path).rows == []


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


def test_what_rope_costs_is_a_target_of_long_sequences() -> None:
    times = {("triton", "rope"): 10.5, ("triton", "none"): 10.0}
    costs = {}
    for name in ("causal-16k-d128", "causal-2k-d128", "bert-512"):
        rows = timed(BY_NAME[name], "train", times)
        costs[name] = [(target.bound, target.met) for target in targets(AttentionRecord(RUN, rows))]
    assert costs == {"causal-16k-d128": [(1.03, False)], "causal-2k-d128": [(1.08, True)], "bert-512": []}


def test_targets_are_of_cases_that_exist() -> None:
    from ropewalk.bench import attention_targets

    assert {*attention_targets._FLEX, *attention_targets._ROPE_COST, attention_targets._BERT} <= set(BY_NAME)


def test_the_summary_says_it_all() -> None:
    text = io.StringIO()
    print_attention_summary(RECORD, Console(file=text, width=240))
    for words in (
        "1.100×",
        "train: auto + rope over the best peer, cudnn",
        "1.400",
        "failed: flash_attn_4",
        "error 0.7",
    ):
        assert words in text.getvalue()


def test_the_figure_is_drawn_of_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ropewalk.bench.attention_figure import draw_attention_record

    path = tmp_path / "figure.png"
    assert draw_attention_record(RECORD, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    for rows in (MEMORY, SCHEMES, OTHERS):
        assert not draw_attention_record(AttentionRecord(RUN, rows), tmp_path / "none.png")
    assert not draw_attention_record(RECORD, tmp_path / "none.png", protocol="cool")
    assert not (tmp_path / "none.png").exists()
