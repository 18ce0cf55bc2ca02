"""Records: written row by row, read back as they were, and silent about the machine's paths."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropewalk.bench.core.records import END, RecordWriter, default_path, describe_run
from ropewalk.bench.core.timing import HostTime, Quantiles
from ropewalk.bench.report.load import read_bench_record
from ropewalk.bench.rope.cases import CASES, Case
from ropewalk.bench.rope.rows import RopeRow

RUN = {"benchmark": "rope", "device": "NVIDIA H200", "date": "2026-11-21T03:37:22+00:00"}
ROWS = [
    RopeRow(
        CASES[0],
        "fwd",
        "triton",
        "ours",
        "ok",
        error=1e-3,
        error_budget=2e-3,
        time=Quantiles(1.0, 2.0, 3.0),
        gb_per_s=4.0,
        copy_ratio=0.98,
        graph=Quantiles(1.0, 1.5, 2.0),
        host=HostTime(10.0, 11.0),
        host_forward=HostTime(12.0, 13.0),
        peak_bytes=1 << 40,
    ),
    RopeRow(
        Case("packed", 1, 9, 3, 1, 8, layout="thd", sequences=(4, 1, 4)), "bwd", "quack", "peer", "failed", "OSError"
    ),
    RopeRow(CASES[-1], "decode", "liger_kernel", "peer", "wrong", "the error is past the budget", 0.7, 0.5),
]


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        for row in ROWS:
            writer.append(row)
    record = read_bench_record(path)
    assert record.rows == ROWS
    assert record.run == {"format": 1, **RUN}


def test_rows_are_on_disk_before_the_end(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "record.jsonl", RUN) as writer:
        writer.append(ROWS[0])
        assert read_bench_record(tmp_path / "record.jsonl").rows == ROWS[:1]


def test_what_json_has_no_word_for_is_refused(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "record.jsonl", RUN) as writer, pytest.raises(ValueError, match="JSON compliant"):
        writer.append(replace(ROWS[2], error=float("inf")))


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    RecordWriter(path, RUN).__exit__(None, None, None)
    with pytest.raises(FileExistsError):
        RecordWriter(path, RUN)


def test_lines_can_be_kept_and_the_rest_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        for row in ROWS:
            writer.append(row)
    kept = json.loads(path.read_text().splitlines()[2])
    with RecordWriter(path, {**RUN, "resumed": ["today"]}, [kept]) as writer:
        assert read_bench_record(path).rows == ROWS[1:2]
        writer.append(ROWS[0])
        writer.end()
    record = read_bench_record(path)
    assert record.rows == [ROWS[1], ROWS[0]]
    assert record.run["resumed"] == ["today"]
    assert list(json.loads(path.read_text().splitlines()[-1])) == [END]
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]


def test_a_line_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, RUN) as writer:
        writer.append(ROWS[0])
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"record\.jsonl is not a record: line 2 is not JSON, or was cut off"):
        read_bench_record(path)


@pytest.mark.parametrize("line", ['{"case": 3}', '{"case": {"name": "x"}, "mode": "fwd"}', "{}"])
@pytest.mark.parametrize("name", ["rope", "attention"])
def test_a_line_that_is_no_row_is_refused(line: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(f'{{"format": 1, "benchmark": "{name}"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"record\.jsonl has a line that is not a row of the benchmark '{name}'"):
        read_bench_record(path)


@pytest.mark.parametrize("text", ["", "[]\n", '{"rows": 3}\n'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.jsonl is not a record"):
        read_bench_record(path)


def test_the_default_path_names_device_and_time() -> None:
    assert default_path(RUN) == Path("results/rope-nvidia-h200-20261121T033722.jsonl")


def test_a_run_says_where_it_ran_and_tells_no_paths(device: torch.device) -> None:
    run = describe_run("rope", device, {"quack": "missing: quack is not installed"})
    for key in ("device", "python", "torch", "triton", "ropewalk", "commit", "dirty", "date", "peers"):
        assert key in run
    text = json.dumps(run)
    for path in (Path.home(), Path.cwd(), Path(torch.__file__).parent, os.sep + "home"):
        assert str(path) not in text
