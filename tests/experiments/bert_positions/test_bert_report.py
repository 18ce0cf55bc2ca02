"""The record, its figures and its tables, and the speed that is measured for it."""

import dataclasses
import io

import pytest
import torch
from helpers.bert_runs import TINY
from matplotlib.figure import Figure
from rich.console import Console

from ropewalk.experiments.bert_positions import speed
from ropewalk.experiments.bert_positions.figures import (
    bert_tables,
    draw_learning,
    draw_speed,
    markdown_tables,
)
from ropewalk.experiments.bert_positions.record import (
    HUGGING_FACE,
    EvaluationRow,
    ExpoSBRow,
    SpeedRow,
    TrainingRow,
    read_bert_record,
    write_bert_record,
)

ROWS = [
    *(TrainingRow("rope", seed, [10, 20, 30], [3.0, 2.0, 1.5 + seed], 1234.0, 3.2, 99) for seed in (0, 1)),
    *(EvaluationRow("rope", seed, n, 1.25 + seed, 0.5, 10) for seed in (0, 1) for n in (16, 32)),
    SpeedRow("rope", "ropewalk", 16, 8, 1.5e6, (1.0, 1.25, 2.5), 1 << 22),
    SpeedRow(HUGGING_FACE, "sdpa", 16, 8, 1e6, (1.0, 2.0, 3.0), 1 << 21),
    SpeedRow(HUGGING_FACE, "eager", 16, 8, None, None, None),
    ExpoSBRow("a claim", {"a": 1.0}, "false", "It has two."),
]
RUN = {
    "benchmark": "bert-positions",
    "device": "NVIDIA H200",
    "ropewalk": "1",
    "torch": "2",
    "date": "today",
    "peers": {"transformers": "5"},
    "config": TINY.as_dict() | {"seeds": [0, 1]},
    "corpus": {"name": "a text"},
    "jobs": 2,
}


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "record.jsonl"
    for _ in range(2):  # the second replaces the first
        write_bert_record(path, RUN, ROWS)
    return path


def test_a_record_is_read_as_it_was_written(record):
    found = read_bert_record(record)
    assert found.run == {"format": 1, **RUN}
    assert [*found.training, *found.evaluation, *found.speed, *found.exposb] == [
        dataclasses.replace(row, step_ms=list(row.step_ms)) if isinstance(row, SpeedRow) and row.step_ms else row
        for row in ROWS
    ]
    record.write_text(record.read_text() + '{"kind": "other"}\n')
    with pytest.raises(ValueError, match=r"record\.jsonl, line 12: is no row of training"):
        read_bert_record(record)


def test_figures_and_tables(record, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **look: titles.append((text, len(figure.axes))))
    found = read_bert_record(record)
    for draw in (draw_learning, draw_speed):
        draw(found, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert all(title.startswith("Smoke: no comparison. BERT of 2 layers") for title, _ in titles)

    text = markdown_tables(found)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[2] == "Ropewalk 1, PyTorch 2, transformers 5; today."
    for expected in (
        "| scheme | 16 (1×) | 32 (2×) |",
        "| :--- | ---: | ---: |",
        "| RoPE | 1.750 ± 0.707 | 1.750 ± 0.707 |",
        "| RoPE | 2.000 ± 0.707 | 1.2 ± 0.0 | 3.2 ± 0.0 | 99 |",
        "| RoPE | ropewalk | 1.50M (750k–1.88M) | 1.50 | – | 4 MiB |",
        "| Hugging Face BERT | eager | out of memory | – | – | – |",
        "| a claim | false | It has two. |",
    ):
        assert expected in lines
    assert "2 models at a time on one device, tokens without padding; mean ± standard deviation over seeds." in lines
    console = Console(file=io.StringIO(), width=200)
    for table in bert_tables(found):
        console.print(table)
    assert "1.750 ± 0.707" in console.file.getvalue()


def test_speed_of_all_candidates_at_both_lengths(device, monkeypatch):
    effort = speed.Effort(tokens=128, warmup=1, steps=1, seconds=0.0)
    monkeypatch.setitem(speed.EFFORTS, device.type, effort)

    def fail(config, vocab_size, pad_id, attn_implementation, make=speed.plain_bert):
        if attn_implementation == "eager":
            raise_oom = torch.nn.Module()
            raise_oom.weight = torch.nn.Parameter(torch.zeros(1))
            raise_oom.forward = lambda **batch: (_ for _ in ()).throw(torch.OutOfMemoryError())
            return raise_oom
        return make(config, vocab_size, pad_id, attn_implementation=attn_implementation)

    monkeypatch.setattr(speed, "plain_bert", fail)
    config = dataclasses.replace(TINY, schemes=["rope", "exposb"])
    rows = speed.measure_speed(config, 30, device, Console(quiet=True))
    names = [("rope", "ropewalk"), ("exposb", "ropewalk"), *((HUGGING_FACE, name) for name in speed.ATTENTIONS)]
    assert [(row.model, row.attention, row.length, row.batch) for row in rows] == [
        (*name, length, 128 // length) for length in (16, 64) for name in names
    ]
    for row in rows:
        if row.attention == "eager":
            assert (row.tokens_per_second, row.step_ms, row.peak_bytes) == (None, None, None)
            continue
        assert 0 < row.step_ms[0] <= row.step_ms[1] <= row.step_ms[2]
        assert 64 / row.step_ms[1] * 1e3 <= row.tokens_per_second <= 128 / row.step_ms[1] * 1e3
        assert (row.peak_bytes or 0) > 0 if device.type == "cuda" else row.peak_bytes is None


def test_batches_of_both_lengths_have_as_many_tokens():
    short, long = (speed.draw_batch(TINY, multiple, 30, 128) for multiple in (1, 4))
    assert (short["input_ids"].shape, long["input_ids"].shape) == ((8, 16), (2, 64))
    for batch in (short, long):
        lengths = batch["attention_mask"].sum(1)
        assert (2 * lengths >= batch["input_ids"].shape[1]).all()
        assert (batch["input_ids"].flatten()[batch["masked"]] == batch["labels"]).all()
        assert (batch["attention_mask"].flatten()[batch["masked"]] == 1).all()
