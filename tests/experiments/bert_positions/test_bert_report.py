"""The record, its figures and its tables, and the speed that is measured for it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers.bert_runs import TINY
from matplotlib.figure import Figure
from rich.console import Console

from ropewalk.experiments.bert_positions import training
from ropewalk.experiments.bert_positions.figures import (
    HUGGING_FACE,
    draw_learning,
    draw_speed,
    markdown_tables,
    read_bert_record,
)

RESULTS = Path(__file__).parents[3] / "results"


def test_figures_and_tables_of_a_record(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **look: titles.append(text))
    record = read_bert_record(RESULTS / "bert-positions-h200.jsonl")
    for draw in (draw_learning, draw_speed):
        draw(record, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    record.run["config"]["steps"] = 1
    lines = markdown_tables(record).splitlines()
    assert titles[0].startswith("BERT of 4 layers × 256, trained at length 128 on the sources of Python 3.12.3")
    assert lines[0].startswith("# Smoke: no comparison. BERT of 4 layers")
    committed = (RESULTS / "bert-positions-h200.md").read_text().splitlines()
    cells, expected = (
        [[cell.strip() for cell in line.split("|")] for line in text if line.startswith("|") and line.strip("|-: ")]
        for text in (lines, committed)
    )
    assert [row for row in cells if len(row) > 5] == [row for row in expected if len(row) > 5]  # all but the claims
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.jsonl is not a record of format 1 of the benchmark 'bert-positions'"):
        read_bert_record(tmp_path / "a.jsonl")


def test_speed_of_all_candidates_at_both_lengths(device, monkeypatch):
    monkeypatch.setitem(training.EFFORTS, device.type, (128, 1, 1, 0.0))

    def fail(*arguments, make=training.plain_bert, **more):
        model = make(*arguments, **more)
        if more == {"attn_implementation": "eager"}:
            model.forward = lambda **batch: (_ for _ in ()).throw(torch.OutOfMemoryError())
        return model

    monkeypatch.setattr(training, "plain_bert", fail)
    config = dataclasses.replace(TINY, schemes=["rope", "exposb"])
    rows = training.measure_speed(config, 30, device, Console(quiet=True))
    names = [("rope", "ropewalk"), ("exposb", "ropewalk"), *((HUGGING_FACE, name) for name in training.ATTENTIONS)]
    assert [(row["model"], row["attention"], row["length"], row["batch"]) for row in rows] == [
        (*name, length, 128 // length) for length in (16, 64) for name in names
    ]
    for row in rows:
        if row["attention"] == "eager":
            assert row["tokens_per_second"] is row["step_ms"] is row["peak_bytes"] is None
            continue
        low, median, high = row["step_ms"]
        assert 0 < low <= median <= high
        assert 64 / median * 1e3 <= row["tokens_per_second"] <= 128 / median * 1e3
        assert (row["peak_bytes"] or 0) > 0 if device.type == "cuda" else row["peak_bytes"] is None


def test_batches_of_both_lengths_have_as_many_tokens():
    short, long = (training.draw_batch(TINY, multiple, 30, 128) for multiple in (1, 4))
    assert (short["input_ids"].shape, long["input_ids"].shape) == ((8, 16), (2, 64))
    for batch in (short, long):
        lengths = batch["attention_mask"].sum(1)
        assert (2 * lengths >= batch["input_ids"].shape[1]).all()
        assert (batch["input_ids"].flatten()[batch["masked"]] == batch["labels"]).all()
        assert (batch["attention_mask"].flatten()[batch["masked"]] == 1).all()
