"""The benchmark of training steps from end to end, on models of a few thousand parameters."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ropewalk.bench.training import models as training_models
from ropewalk.bench.training import run as training
from ropewalk.bench.training.cases import CASES, Inputs, TrainingCase, make_inputs
from ropewalk.bench.training.models import CANDIDATES, OURS
from ropewalk.bench.training.rows import TrainingRecord
from ropewalk.bench.training.summary import targets_of
from ropewalk.cli import app

BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA = {**BERT, "num_key_value_heads": 1, "head_dim": 16, "use_cache": False}
# Of each family one case.
NAMES = (
    *("bert-base-rope", "bert-base", "llama-8-layers"),
    *("llama-12x1024-attention", "qwen3-12x1024-attention", "qwen3-12x1024"),
)
SMALL = tuple(
    replace(
        case,
        config=BERT if case.family.startswith("bert") else LLAMA,
        batch=3,
        tokens=24,
        shortest=case.shortest and 9,
    )
    for case in CASES
    if case.name in NAMES
)


def run(tmp_path: Path, device: torch.device, **options: Any) -> tuple[TrainingRecord, str]:
    text = io.StringIO()
    given: dict[str, Any] = {
        "output": tmp_path / "record.jsonl",
        "device": str(device),
        "rounds": 3,
        "cases": SMALL,
        "console": Console(file=text, width=300),
    }
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        path = training.run_training_bench(**{**given, **options})
    return training.read_training_record(path), text.getvalue()


def test_every_candidate_of_every_case_is_right_and_timed(tmp_path: Path, device: torch.device) -> None:
    record, text = run(tmp_path, device)
    found = [(row.case, row.precision, row.candidate) for row in record.rows]
    wanted = [
        (case.name, precision, candidate)
        for case in SMALL
        for precision in case.precisions
        for candidate in CANDIDATES[case.family]
    ]
    assert found == wanted
    for row in record.rows:
        assert row.status == "ok"
        assert 0 < row.hidden_error < 0.1, "not bfloat16's error"
        assert 0 < row.gradient_error < 0.3, "not bfloat16's error"
        assert row.time is not None
        assert row.tokens_per_second == pytest.approx(row.n_tokens / row.time.p50 * 1e6)
        assert (row.speed_over is None) == (row.candidate != OURS)
        assert (row.peak_bytes is None) == (device.type == "cpu")
    assert record.run["benchmark"] == "training"
    assert text.count("met:") + text.count("missed:") == sum(
        len(case.precisions) * len(targets_of(case)) for case in SMALL
    )


def test_every_family_has_a_small_case() -> None:
    assert {case.family for case in SMALL} == set(CANDIDATES) == {case.family for case in CASES}


def test_a_candidate_that_is_wrong_is_not_timed(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_rope(case: TrainingCase, inputs: Inputs) -> training_models.Model:
        return training_models._bert(case, inputs, OURS, None)

    monkeypatch.setitem(CANDIDATES, "bert-rope", {**CANDIDATES["bert-rope"], OURS: without_rope})
    record, text = run(tmp_path, device, case_names=["bert-base-rope"], precisions=["bf16"])
    ours, *others = record.rows
    assert (ours.status, ours.time, ours.speed_over) == ("wrong", None, None)
    assert all(row.status == "ok" for row in others)
    assert "wrong" in text


def test_rows_have_seeded_lengths(device: torch.device) -> None:
    case = SMALL[0]
    one, same, other = (make_inputs(case, 50, device, seed) for seed in (0, 0, 1))
    assert one.attention_mask is not None
    assert same.attention_mask is not None
    assert other.attention_mask is not None
    lengths = one.attention_mask.sum(1)
    assert int(lengths.min()) >= 9
    assert one.n_tokens == int(lengths.sum()) < case.batch * case.tokens
    assert torch.equal(one.attention_mask, same.attention_mask)
    assert torch.equal(one.input_ids, same.input_ids)
    assert not torch.equal(one.input_ids, other.input_ids)
    assert not ((one.labels != -100) & (one.attention_mask == 0)).any()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="case 'gpt' does not exist; there are: bert-base-rope"):
        training.run_training_bench(case_names=["gpt"])
    with pytest.raises(ValueError, match="precision 'fp8' does not exist; there are: autocast, bf16"):
        training.run_training_bench(precisions=["fp8"])
    there = tmp_path / "record.jsonl"
    there.touch()
    with pytest.raises(ValueError, match="exists already"):
        training.run_training_bench(output=there, device="cpu")


def test_the_command_lists_cases_and_says_what_does_not_exist() -> None:
    listed = CliRunner().invoke(app, ["bench", "training", "--list"])
    assert listed.exit_code == 0
    for case in CASES:
        assert f"{case.name}\n    {case.description}, batch {case.batch} of {case.tokens} tokens" in listed.stdout
    wrong = CliRunner().invoke(app, ["bench", "training", "--case", "gpt"])
    assert wrong.exit_code == 2
    assert "case 'gpt' does not exist; there are: bert-base-rope, bert-base, llama-8-layers" in wrong.output


def test_the_record_in_results_reads_back() -> None:
    path = Path(__file__).parents[2] / "results" / "training-h200.jsonl"
    record = training.read_training_record(path)
    measured = {(row.case, row.precision): row.speed_over for row in record.rows if row.candidate == OURS}
    assert set(measured) <= {(case.name, precision) for case in CASES for precision in case.precisions}
    assert len(measured) >= 5
    assert all(row.status == "ok" for row in record.rows)
