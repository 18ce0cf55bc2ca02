"""A record of several calls."""

import json

import pytest

from ropewalk.experiments.bert_positions.merge import extend_record

RUN = {"benchmark": "bert-positions", "date": "2026-01-01", "commit": "a", "dirty": False, "device": "a GPU"}
RUN |= {"torch": "2", "ropewalk": "0", "peers": {"transformers": "5"}, "corpus": {"sha256": "1"}, "jobs": 3}
CONFIG = {"schemes": ["rope", "none"], "seeds": [0, 1, 2], "steps": 7}


def rows_of(*schemes):
    return [{"kind": "training", "scheme": scheme, "seed": seed} for scheme in schemes for seed in CONFIG["seeds"]]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = [{"format": 1, **RUN, "config": CONFIG}, *rows_of("rope", "none"), {"kind": "speed", "model": "rope"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def another(schemes, **changes):
    config = CONFIG | {"schemes": schemes} | changes.pop("config", {})
    return RUN | {"date": "2026-01-02", "commit": "b", "config": config} | changes


def test_schemes_are_added(path):
    run, rows = extend_record(path, another(["t5"]), rows_of("t5"))
    assert run["config"] == CONFIG | {"schemes": ["none", "rope", "t5"]}
    first, second = run["parts"]
    assert first == {"schemes": ["rope", "none"], "date": "2026-01-01", "commit": "a", "dirty": False}
    assert second == {"schemes": ["t5"], "date": "2026-01-02", "commit": "b", "dirty": False}
    assert rows == [*rows_of("rope", "none"), {"kind": "speed", "model": "rope"}, *rows_of("t5")]
    path.write_text("\n".join(map(json.dumps, [run, *rows])))
    run, _ = extend_record(path, another(["alibi"]), rows_of("alibi"))
    assert [part["schemes"] for part in run["parts"]] == [["rope", "none"], ["t5"], ["alibi"]]


def test_a_call_that_goes_on_replaces_its_schemes(path):
    changed = [{**row, "seconds": 1} for row in rows_of("none")]
    run, rows = extend_record(path, another(["none"]), changed, replace=True)
    assert run["config"]["schemes"] == ["none", "rope"]
    assert [part["schemes"] for part in run["parts"]] == [["rope"], ["none"]]
    assert rows == [*rows_of("rope"), {"kind": "speed", "model": "rope"}, *changed]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ["t5", "none"]}, "has scheme 'none' already: leave it out of schemes"),
        ({"config": {"steps": 8}}, "steps is 7 there, but 8 here"),
        ({"corpus": {"sha256": "2"}}, "corpus is {'sha256': '1'} there"),
        ({"device": "another GPU"}, "device is 'a GPU' there, but 'another GPU' here"),
        ({"torch": "3"}, "torch is '2' there"),
        ({"ropewalk": "1"}, "ropewalk is '0' there"),
        ({"peers": {"transformers": "6"}}, "peers is"),
        ({"jobs": 1}, "jobs is 3 there"),
    ],
)
def test_another_comparison_is_refused(path, changes, message):
    with pytest.raises(ValueError, match=message):
        extend_record(path, another(**{"schemes": ["t5"]} | changes), [])


def test_another_benchmark_is_refused(path):
    path.write_text(json.dumps({"format": 1, "benchmark": "rope"}))
    with pytest.raises(ValueError, match="is not a record of format 1 of the benchmark 'bert-positions'"):
        extend_record(path, another(["t5"]), [])
