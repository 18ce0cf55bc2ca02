"""Records: written row by row, read back as they were, gone on with, and silent about the machine's paths."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ropewalk.bench.core.load import describe, label, read_record, read_stopped, unit_of
from ropewalk.bench.core.records import END, RecordWriter, default_path, describe_run
from ropewalk.bench.core.runner import new_row
from ropewalk.bench.core.summary import print_summary
from ropewalk.bench.core.timing import Quantiles
from ropewalk.bench.rope.cases import CASES

RUN = {"benchmark": "rope", "device": "NVIDIA H200", "date": "2026-11-21T03:37:22+00:00"}
ROWS = [
    {**new_row(CASES[0], "fwd", "triton", "ours"), "time": Quantiles(1.0, 2.0, 3.0), "peak_bytes": 1 << 40},
    {**new_row(CASES[0], "bwd", "quack", "peer"), "status": "failed", "reason": "OSError"},
    new_row(CASES[-1], "decode", "copy_", "anchor"),
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS, end: bool = True) -> Path:
    with RecordWriter(path, RUN) as writer:
        for row in rows:
            writer.append(row)
        if end:
            writer.end()
    return path


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record = read_record(write(tmp_path / "new" / "record.jsonl"))
    assert record.run == {"format": 1, **RUN}
    assert record.ended
    first, failed, _ = record.of("rope")
    assert first["time"] == {"p10": 1.0, "p50": 2.0, "p90": 3.0}
    assert unit_of("rope", first["case"], "fwd") == unit_of("rope", CASES[0], "fwd")
    assert describe(failed) == f"quack on {CASES[0].name} half/out of place bwd"
    assert "time" not in failed
    assert label({"impl": "triton", "position": "rope", "yardstick": "x"}) == "triton + rope on x"


def test_rows_are_on_disk_before_the_end(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "record.jsonl", RUN) as writer:
        writer.append(ROWS[0])
        assert len(read_record(tmp_path / "record.jsonl").rows) == 1
        with pytest.raises(ValueError, match="JSON compliant"):
            writer.append({**ROWS[2], "error": float("inf")})


def test_a_file_is_not_overwritten_and_may_have_several_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl")
    with pytest.raises(FileExistsError):
        RecordWriter(path, RUN)
    path.write_text(2 * path.read_text())
    record = read_record(path)
    assert [row["run"] for row in record.rows] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="it has several runs"):
        read_stopped(path, RUN)


def test_a_stopped_run_keeps_its_whole_units(tmp_path: Path) -> None:
    path = write(tmp_path / "record.jsonl", end=False)
    path.write_text(path.read_text()[:-9])  # the last line is cut off, and the unit before it may lack rows
    stopped = read_stopped(path, {"format": 1, **RUN})
    assert set(stopped.units) == {unit_of("rope", CASES[0], "fwd")}
    assert not stopped.ended
    with RecordWriter(path, stopped.run, stopped.rows) as writer:
        writer.append(ROWS[2])
        writer.end()
    assert [row["mode"] for row in read_record(path).rows] == ["fwd", "decode"]
    assert list(json.loads(path.read_text().splitlines()[-1])) == [END]
    with pytest.raises(ValueError, match="device was 'NVIDIA H200', and is 'CPU'"):
        read_stopped(path, {**RUN, "device": "CPU"})


def test_a_summary_names_rows_that_are_unsteady() -> None:
    def printed(*spreads: tuple[float, float, float]) -> str:
        console = Console(width=160, file=io.StringIO())
        names, of_record = ("triton", "copy_", "native"), {"benchmark": "rope", "run": 0, "case": vars(CASES[0])}
        rows = [
            {**new_row(CASES[0], "fwd", name, "ours"), **of_record, "time": vars(Quantiles(*spread))}
            for name, spread in zip(names, spreads, strict=False)
        ]
        print_summary(rows, RUN, (), console)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    steady, far = (9.9, 10.0, 10.4), (61.0, 61.5, 11921.0)
    assert "unsteady" not in printed(steady, steady)
    text = printed(steady, far, steady)
    assert "copy_, unsteady" in text
    assert text.count("unsteady") == 2
    assert "the 90 % quantile is more than 1.5 times the 10 % quantile. Is the machine at other work?" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a record"),
        ("[]\n", "is not a record"),
        ('{"rows": 3}\n', "is not a record of format 1"),
        ('{"format": 1, "benchmark": "rope"}\n{"case": 3}\n', "has a line that is no row"),
        ('{"format": 1, "benchmark": "rope"}\n{"ca', "line 2 is not JSON, or was cut off"),
    ],
)
def test_another_file_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"other\.jsonl.* {complaint}"):
        read_record(path)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no processes")
def test_a_run_says_that_it_is_pinned(device: torch.device) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        run = describe_run("rope", device, {})
    finally:
        os.sched_setaffinity(0, before)
    assert (run["usable_cpu_cores"], run["cpu_cores"]) == (1, os.cpu_count())


def test_a_run_says_where_it_ran_and_tells_no_paths(device: torch.device) -> None:
    assert default_path(RUN) == Path("records/rope-nvidia-h200-20261121T033722.jsonl")
    run = describe_run("rope", device, {"quack": "missing: quack is not installed"})
    for key in ("device", "python", "torch", "triton", "ropewalk", "commit", "dirty", "date", "peers"):
        assert key in run
    assert 1 <= run["usable_cpu_cores"] <= run["cpu_cores"]
    text = json.dumps(run)
    for path in (Path.home(), Path.cwd(), Path(torch.__file__).parent, os.sep + "home"):
        assert str(path) not in text
