"""The record, its figures and its tables, and the speed that is measured for it."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers.bert_runs import TINY
from matplotlib.figure import Figure
from rich.console import Console

from ropewalk.experiments.bert_positions import training
from ropewalk.experiments.bert_positions.config import SCHEMES, load_config
from ropewalk.experiments.bert_positions.figures import (
    HUGGING_FACE,
    draw_learning,
    draw_speed,
    fall_at_end,
    markdown_tables,
    read_bert_record,
    styles_of,
)

RESULTS = Path(__file__).parents[3] / "results"


def test_labels_of_schemes_are_distinct():
    own = ["mine:rope", "mine:LogBias", "mine:Fall", "pkg.mine:Fall", "pkg:AliBi"]
    labels = [label for label, *_ in styles_of([*SCHEMES, *own]).values()]
    assert len({label.casefold() for label in labels}) == len(SCHEMES) + len(own)
    assert labels[len(SCHEMES) :] == ["mine:Fall", "LogBias", "mine:rope", "pkg.mine:Fall", "pkg:AliBi"]


def test_figures_and_tables_of_a_record(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **look: titles.append(text))
    record = read_bert_record(RESULTS / "bert-positions-h200.jsonl")
    for draw, drawn in ((draw_learning, record), (draw_speed, with_speed(record))):
        draw(drawn, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    record.run["config"]["steps"] = 1
    lines = markdown_tables(record).splitlines()
    assert titles[0].startswith("BERT of 3 layers × 128, trained at length 128 on the sources of Python 3.12.3")
    assert lines[0].startswith("# Smoke: no comparison. BERT of 3 layers")
    committed = (RESULTS / "bert-positions-h200.md").read_text().splitlines()
    cells, expected = (
        [[cell.strip() for cell in line.split("|")] for line in text if line.startswith("|") and line.strip("|-: ")]
        for text in (lines, committed)
    )
    assert [row for row in cells if len(row) > 5] == [row for row in expected if len(row) > 5]  # all but the claims
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.jsonl is not a record of format 1 of the benchmark 'bert-positions'"):
        read_bert_record(tmp_path / "a.jsonl")


def with_speed(record):
    rows = [
        {"model": model, "attention": attention, "length": length, "batch": 1024 // length, "peak_bytes": 1 << 30}
        | {"tokens_per_second": 1e6, "step_ms": [1.0, 1.1, 1.2]}
        for length in (128, 1024)
        for model, attention in (("rope", "ropewalk"), (HUGGING_FACE, "sdpa"))
    ]
    return record._replace(speed=pd.DataFrame(rows, dtype=object))


def with_more(record, unigram=6.0):
    """The record, of two seeds, with what newer ones have: recall, the probe, and the loss of guessing by frequency."""
    of = [{"scheme": scheme, "seed": seed} for scheme in ("none", "rope") for seed in (0, 1)]
    recall = [
        {**x, "length": length, "distance": distance, "accuracy": 0.5 + 0.1 * x["seed"], "control_accuracy": 0.015}
        | {"n_words": 100, "loss": 2.0 + x["seed"], "control_loss": 9.0}
        for x in of
        for length, distances in ((128, (8, 64)), (1024, (8, 64, 512)))
        for distance in distances
    ]
    probe = [
        {**x, "tag": tag, "length": length, "accuracy": 0.75 + 0.01 * x["seed"], "majority": 0.5}
        for x in of
        for length in (128, 1024)
        for tag in ("kind", "depth")
    ]
    record.run["corpus"]["unigram_loss"] = unigram
    return record._replace(recall=pd.DataFrame(recall, dtype=object), probe=pd.DataFrame(probe, dtype=object))


def draw(record, path, monkeypatch):
    """Draw the figure of what was learnt; its axes by title, and its texts."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *path, **look: figures.append(figure))
    draw_learning(record, path)
    (figure,) = figures
    return {axes.get_title(): axes for axes in figure.axes}, [text.get_text() for text in figure.texts]


def test_losses_have_one_axis_from_zero_and_shares_another(tmp_path, monkeypatch):
    record = read_bert_record(RESULTS / "bert-positions-h200.jsonl")
    panels, texts = draw(with_more(record), tmp_path, monkeypatch)
    assert len(panels) == 5
    losses = [axes for axes in panels["training (band: all seeds)"].figure.axes if "nats" in axes.get_ylabel()]
    shares = [axes for axes in losses[0].figure.axes if axes not in losses]
    assert (len(losses), len(shares)) == (2, 3)
    for axes in losses:
        assert axes.get_ylim() == (0, pytest.approx(1.05 * 6.0, abs=0.01))
    assert {axes.get_ylim() for axes in shares} == {(0, 100)}
    for axes in losses:  # the loss that needs no context
        assert any(set(line.get_ydata()) == {6.0} for line in axes.lines)
    assert not any("smoke" in text for text in texts)
    record.run["config"]["steps"] = 1
    assert "smoke: this shows nothing" in draw(record, tmp_path, monkeypatch)[1]


def test_tables_of_recall_the_probe_and_convergence():
    record = with_more(read_bert_record(RESULTS / "bert-positions-h200.jsonl"))
    lines = markdown_tables(record).splitlines()
    assert "| read 1024 at once | 8 | 64 | 512 | control |" in lines
    assert "| RoPE | 6.50 ± 0.71 | 6.50 ± 0.71 |" in lines  # read at 128 at once
    assert "| RoPE | 55.0 ± 7.1 | 55.0 ± 7.1 | 55.0 ± 7.1 | 1.5 |" in lines
    assert "| scheme | kind at 128 | depth at 128 | kind at 1024 | depth at 1024 |" in lines
    assert "| the most frequent class | 50.0 | 50.0 | 50.0 | 50.0 |" in lines
    assert f"| None (the floor){' | 75.5 ± 0.7' * 4} |" in lines
    assert "| Standard (learned) | 0.81 ± 0.07 |" in lines


def test_the_losses_of_the_record_rest():
    rows = read_bert_record(RESULTS / "bert-positions-h200.jsonl").training
    falls = {scheme: fall_at_end(rows[rows.scheme == scheme]).mean() for scheme in SCHEMES}
    assert max(falls.values()) < 1, falls  # in %


def test_the_fall_at_the_end_is_of_the_last_fifth():
    losses = [5.0] * 40 + [4.0] * 40 + [3.0] * 20  # of 100 lines, smoothed over 5 of them
    rows = pd.DataFrame([{"seed": 0, "steps": [*range(10, 1001, 10)], "losses": losses}])
    before = (3 * 4.0 + 2 * 3.0) / 5  # at step 800, the 80th line
    assert fall_at_end(rows).tolist() == pytest.approx([(before - 3) / before * 100])


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


def test_the_page_has_the_losses_of_the_laptops_record():
    record = read_bert_record(RESULTS / "bert-positions-cpu.jsonl")
    page = (RESULTS.parent / "docs/experiments.md").read_text(encoding="utf-8")
    section = page.partition("### Preset laptop")[2].partition("\n### ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line][2:]
    by_scheme = record.evaluation.groupby("scheme", sort=False)
    assert len(table) == len(by_scheme)
    for (_, *cells), (_, rows) in zip(table, by_scheme, strict=True):
        assert [float(cell) for cell in cells] == [round(loss, 2) for loss in rows.loss]
    assert record.run["config"]["schemes"] == load_config("laptop").schemes
    losses = {scheme: rows.loss.tolist() for scheme, rows in by_scheme}
    assert losses["none"][0] - losses["rope"][0] > 1  # positions count at the trained length
    assert losses["rope"][-1] - losses["alibi"][-1] > 0.5  # and ALiBi keeps what it learnt beyond it
