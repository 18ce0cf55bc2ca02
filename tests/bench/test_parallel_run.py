"""The benchmark of context parallelism from end to end, on a CPU: small cases, in two processes and in one."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.modes import ON_GPU
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from ropewalk.bench.core.load import BenchRecord, load_record
from ropewalk.bench.core.runner import OursError
from ropewalk.bench.parallel import peers as parallel_peers
from ropewalk.bench.parallel import run as parallel_run
from ropewalk.bench.parallel.cases import CASES, draw_documents, shrink
from ropewalk.bench.parallel.cost import LLAMA, Shape, predict_efficiency, predict_nodes
from ropewalk.bench.parallel.figure import draw_parallel_record
from ropewalk.bench.parallel.rows import ONE, OURS, ParallelRow, parallel_row
from ropewalk.bench.parallel.run import ParallelOptions
from ropewalk.cli import app

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
FEW = ("gqa-16k", "packed-256k")


def load(path: Path) -> BenchRecord:
    return load_record(path, {"parallel": parallel_row})


def options(path: Path, *only: str, **more: Any) -> ParallelOptions:
    given: dict[str, Any] = {"only": only or FEW, "output": path, "device": "cpu", "quick": True, "rounds": 3}
    return ParallelOptions(**{**given, **more})


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measure(given: ParallelOptions) -> str:
    """Measure in this process."""
    text = io.StringIO()
    cases = parallel_run.choose_parts(given.only)
    parallel_run.measure_all(given, cases, Console(file=text, width=300))
    return text.getvalue()


def test_two_processes_are_checked_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    parallel_run.run_parallel_bench(options(path, "gqa-16k", "llama"), processes=2)
    record = load(path)
    found = {(row.case.name, row.impl): row for row in record.of(ParallelRow) if row.status != "unsupported"}
    assert set(found) == {
        *((case, impl) for case in ("gqa-16k", "llama-64k") for impl in (ONE, OURS)),
        ("gqa-16k", "by_hand"),
    }
    for row in found.values():
        assert (row.status, row.ranks) == ("ok", 2)
        assert row.error is not None
        assert row.error <= 1
        assert row.time is not None
        assert (row.efficiency is None) == (row.kind == "anchor")
    assert found["gqa-16k", OURS].served_by == "gather"
    over = found["gqa-16k", OURS].speed_over
    assert over is not None
    assert set(over) == {ONE, "by_hand"}
    received = found["gqa-16k", OURS].bytes_received
    assert received is not None
    assert received >= 2 * 2 * (96 // 2) * 2 * 16 * 4  # K and V there, gradients back
    assert record.run["ranks"] == 2
    assert record.run["transport"] == "gloo"
    assert path.with_suffix(".png").exists()


def test_a_candidate_that_is_wrong_is_not_timed(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = parallel_peers.context_parallel_attention

    def without_positions(q: Tensor, k: Tensor, v: Tensor, *, position: object, **keywords: Any) -> Any:
        return attend(q, k, v, **keywords)

    monkeypatch.setattr(parallel_peers, "context_parallel_attention", without_positions)
    path = tmp_path / "record.jsonl"
    with pytest.raises(OursError, match="ropewalk on gqa-16k is wrong: the error of the output is past the budget"):
        measure(options(path, "gqa-16k"))
    rows = {row.impl: row for row in load(path).of(ParallelRow)}
    assert (rows[OURS].status, rows[OURS].time) == ("wrong", None)
    assert rows[ONE].time is not None


def test_a_shard_that_is_late_by_a_token_is_wrong_in_the_rows_of_the_whole_case(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = parallel_peers.context_parallel_attention

    def late(q: Tensor, *rest: Tensor, **keywords: Any) -> Any:
        out = attend(q, *rest, **keywords)
        return out.roll(1, 1) if q.shape[1] == 96 else out  # the short case is right

    monkeypatch.setattr(parallel_run, "SHORT", 48)
    monkeypatch.setattr(parallel_peers, "context_parallel_attention", late)
    with pytest.raises(OursError, match="is wrong"):
        measure(options(tmp_path / "record.jsonl", "gqa-16k"))


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, one_rank: None) -> None:
    path = tmp_path / "record.jsonl"
    measure(options(path))
    lines = path.read_text().splitlines()
    kept = [line for line in lines if '"gqa-16k"' in line]
    assert kept
    path.write_text("\n".join([*lines[: 1 + len(kept)], lines[1 + len(kept)], '{"case": ']))  # cut off in a line
    measure(options(path, resume=True))
    again = path.read_text().splitlines()
    assert [line for line in again if '"gqa-16k"' in line] == kept, "a whole case was measured again"
    assert {row.case.name for row in load(path).of(ParallelRow)} == set(FEW)
    assert json.loads(again[0])["resumed"]
    with pytest.raises(ValueError, match="options parallel rounds was 3, and is 4"):
        measure(options(path, resume=True, rounds=4))


def test_bad_arguments(tmp_path: Path, one_rank: None) -> None:
    with pytest.raises(ValueError, match="no case has 'gpt' in its name; there are: gqa-16k"):
        parallel_run.choose_parts(["gpt"])
    with pytest.raises(ValueError, match="--quick has small ones"):
        parallel_run.run_parallel_bench(options(tmp_path / "record.jsonl", quick=False))
    there = tmp_path / "there.jsonl"
    there.touch()
    with pytest.raises(ValueError, match="exists already"):
        measure(options(there))


def test_the_command_lists_cases() -> None:
    listed = CliRunner().invoke(app, ["bench", "parallel", "--list"])
    assert listed.exit_code == 0
    for case in CASES:
        assert f"{case.name}\n    {case.description}" in listed.stdout
    refused = CliRunner().invoke(app, ["bench", "parallel", "--device", "cpu"])
    assert refused.exit_code == 2
    assert "--quick" in refused.output


def test_small_cases_keep_their_proportions() -> None:
    packed = next(case for case in CASES if case.shortest)
    small = shrink(packed, 1 << 12)
    assert (small.tokens, small.shortest, small.longest) == (1 << 12, 16, 1 << 10)
    bounds = draw_documents(small, 0)
    assert bounds is not None
    assert (int(bounds[0]), int(bounds[-1])) == (0, 1 << 12)
    assert shrink(small, 1 << 13) == small


def test_the_cost_model_knows_what_costs() -> None:
    lengths = [1 << power for power in (14, 16, 18)]
    for ranks in (2, 4, 8):
        efficiencies = [predict_efficiency(tokens, ranks) for tokens in lengths]
        assert efficiencies == sorted(efficiencies), "longer sequences hide more"
        assert efficiencies[0] > 0.4
        assert efficiencies[-1] < 1
    assert predict_efficiency(1 << 14, 8, Shape(k_heads=32)) < predict_efficiency(1 << 14, 8, LLAMA)
    assert predict_nodes(1 << 20, 4096) < predict_nodes(1 << 20, 64) < 1


def test_the_pages_predictions_are_the_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 32/(\d+), (\d+)k \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for key_heads, thousands, *held in rows:
        shape = Shape(k_heads=int(key_heads))
        assert held == [f"{predict_efficiency(int(thousands) << 10, ranks, shape):.3f}" for ranks in (2, 4, 8)]


def test_the_figure_needs_causal_rows(tmp_path: Path, one_rank: None) -> None:
    path = tmp_path / "record.jsonl"
    measure(options(path, "packed-256k"))
    record = load(path)
    assert not draw_parallel_record(record, path.with_suffix(".png"))
    rows = [replace(row, case=CASES[0], efficiency=0.9) for row in record.of(ParallelRow)]
    assert draw_parallel_record(replace(record, rows=rows), path.with_suffix(".png"))
