"""Records of the comparison: what is written is read back, and says nothing of the machine's folders."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from ropewalk.experiments.bert_positions import record
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.record import (
    EvaluationRow,
    ExpoSBRow,
    SpeedRow,
    TrainingRow,
    describe_experiment,
    read_bert_record,
    row_of_line,
    write_bert_record,
)

RUN = {"benchmark": "bert-positions", "device": "a device"}
ROWS = [
    ExpoSBRow("a claim", {"a number": 0.5}, "in part", "In words."),
    SpeedRow("rope", "ropewalk", 128, 4, 1000.0, (1.0, 2.0, 3.0), 1 << 30),
    SpeedRow("Hugging Face BERT", "eager", 512, 1, None, None, None),
    EvaluationRow("rope", 0, 128, 2.5, 0.5, 100),
    TrainingRow("rope", 0, [10, 20], [3.0, 2.0], 1e5, 12.5, 1000),
    EvaluationRow("rope", 0, 256, 2.75, 0.25, 100),
]


def corpus():
    return SimpleNamespace(
        name="a text",
        n_documents=3,
        n_bytes=1000,
        sha256="00ff",
        vocab_size=300,
        tokens=torch.zeros(700, dtype=torch.int32),
        windows=torch.zeros(5, 2, dtype=torch.int64),
        held_out=torch.zeros(4, 64, dtype=torch.int32),
    )


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "record.jsonl"
    write_bert_record(path, RUN, ROWS)
    read = read_bert_record(path)
    assert RUN.items() <= read.run.items()
    assert (read.training, read.evaluation) == ([ROWS[4]], [ROWS[3], ROWS[5]])
    assert (read.speed, read.exposb) == ([ROWS[1], ROWS[2]], [ROWS[0]])
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()[1:]]
    assert kinds == ["exposb", "speed", "speed", "evaluation", "training", "evaluation"]


def test_a_record_is_replaced_once_the_new_one_is_whole(tmp_path):
    path = tmp_path / "record.jsonl"
    write_bert_record(path, RUN, ROWS[:1])
    before = path.read_text()

    def rows():
        yield ROWS[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bert_record(path, RUN, rows())
    assert path.read_text() == before
    write_bert_record(path, RUN, ROWS[3:4])
    assert read_bert_record(path).evaluation == [ROWS[3]]
    assert read_bert_record(path).exposb == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.jsonl"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_a_row_comes_back_from_json(row):
    assert row_of_line(json.loads(json.dumps(asdict(row)))) == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "speeds"}, r"line 3: kind is 'speeds', but must be one of 'training', 'evaluation', 'speed'"),
        ({"kind": None}, r"line 3: kind is None"),
        ({"loss": ...}, r"line 3: a row of kind 'evaluation' lacks \['loss'\] and has \[\]"),
        ({"losses": 1}, r"lacks \[\] and has \['losses'\], which are unknown"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, message):
    path = tmp_path / "record.jsonl"
    write_bert_record(path, RUN, [ROWS[0]])
    line = {key: value for key, value in (asdict(ROWS[3]) | change).items() if value is not ...}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"record\.jsonl, " + message if message.startswith("line") else message):
        read_bert_record(path)


def test_another_benchmarks_record_is_refused(tmp_path):
    path = tmp_path / "record.jsonl"
    write_bert_record(path, {**RUN, "benchmark": "rope"}, [])
    with pytest.raises(ValueError, match=r"record\.jsonl is not a record .* of the benchmark 'bert-positions'"):
        read_bert_record(path)


def test_the_run_says_what_was_trained_on_what_and_by_what():
    config = Config(seeds=(3, 4), scheme_options={"rerope": {"window": 8}}, corpus=("/somewhere/texts/a.txt", "b"))
    run = describe_experiment(config, corpus(), torch.device("cpu"))
    assert run["benchmark"] == "bert-positions"
    assert run["config"]["seeds"] == [3, 4] == json.loads(json.dumps(run))["config"]["seeds"]
    assert run["config"]["scheme_options"] == {"rerope": {"window": 8}}
    assert run["config"]["corpus"] == ["a.txt", "b"]
    assert run["corpus"] == {
        "name": "a text",
        "n_documents": 3,
        "n_bytes": 1000,
        "sha256": "00ff",
        "vocab_size": 300,
        "n_tokens": 700,
        "n_windows": 5,
        "held_out": [4, 64],
    }
    assert run["torch"] == str(torch.__version__)
    assert set(run["peers"]) == {"transformers", "tokenizers", "accelerate", "datasets"}
    assert "somewhere" not in json.dumps(run)


def test_a_dataset_in_a_folder_of_the_machine_is_named_without_it():
    def dataset(name):
        return describe_experiment(Config(dataset=name), corpus(), torch.device("cpu"))["config"]["dataset"]

    assert dataset("/somewhere/texts") == "texts"
    assert dataset("wikimedia/wikipedia:20231101.en") == "wikimedia/wikipedia:20231101.en"
    assert dataset(None) is None


def test_a_missing_package_is_recorded_as_missing(monkeypatch):
    monkeypatch.setattr(record, "version_of", lambda name: None if name == "datasets" else "1.0")
    run = describe_experiment(Config(), corpus(), torch.device("cpu"))
    assert run["peers"] == {"transformers": "1.0", "tokenizers": "1.0", "accelerate": "1.0", "datasets": "missing"}
