"""The `ropewalk` command."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import ropewalk
from ropewalk.bench.records import read_record
from ropewalk.cli import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "rope"], ["demo"], ["doctor"]])
def test_help_does_not_import_torch(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from ropewalk.cli import app\n"
        "try:\n"
        f"    app({[*command, '--help']!r})\n"
        "finally:\n"
        "    assert not {'torch', 'triton', 'matplotlib'} & set(sys.modules), 'too much was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_version() -> None:
    assert invoke("--version").stdout == f"ropewalk {ropewalk.__version__}\n"


def test_doctor_says_what_is_here_and_why_the_rest_is_not() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in ("ropewalk", "torch", "triton", "reference", "compiled", "flashinfer"):
        assert word in result.stdout


def test_bench_lists_its_cases() -> None:
    result = invoke("bench", "rope", "--list")
    assert result.exit_code == 0
    assert "llama3-70b\n    B1 T16384 H64/8 D128 R128, bfloat16, bthd, positions by index" in result.stdout


def test_bench_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    options = ["--case", "decode-1", "--impl", "reference", "--peers", "none", "--rounds", "3", "--mode", "decode"]
    result = invoke("bench", "rope", *options, "--device", "cpu", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert {row.direction for row in read_record(path).rows} == {"decode"}
    assert "decode-1" in result.stdout


def test_bench_ends_with_130_when_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = SimpleNamespace(interrupted=True)
    monkeypatch.setattr("ropewalk.bench.rope.run_rope_bench", lambda **options: stopped)
    assert invoke("bench", "rope").exit_code == 130


def test_a_user_error_is_one_line() -> None:
    result = invoke("bench", "rope", "--case", "llama", "--device", "cpu", "--peers", "none")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: case 'llama' does not exist; there are: llama3-8b,")
    assert "Traceback" not in result.output


def test_demo_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(run_demo=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "ropewalk.experiments.demo", fake)
    text = tmp_path / "text.txt"
    text.write_text("a line")
    assert invoke("demo").exit_code == 0
    options = ["--text", str(text), "--steps", "3", "--device", "cpu", "--figure", "f.png", "--seed", "7"]
    assert invoke("demo", *options).exit_code == 0
    assert calls == [(None, None, None, Path("ropewalk-demo.png"), 0), (text, 3, "cpu", Path("f.png"), 7)]


def test_demo_refuses_a_text_that_is_not_there(tmp_path: Path) -> None:
    assert invoke("demo", "--text", str(tmp_path / "missing.txt")).exit_code == 2
