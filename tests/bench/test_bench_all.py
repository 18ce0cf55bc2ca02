"""Both benchmarks in one record, and going on with a record that was stopped, on cases of a few tokens."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ropewalk.bench.all import run_all_benches
from ropewalk.bench.attention import run as attention
from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.attention.rows import attention_row
from ropewalk.bench.core import roofline
from ropewalk.bench.core.records import END
from ropewalk.bench.core.resume import read_stopped
from ropewalk.bench.core.runner import BenchResult
from ropewalk.bench.report.load import read_bench_record
from ropewalk.bench.rope import run as rope
from ropewalk.bench.rope.cases import Case
from ropewalk.bench.rope.peers import PEERS
from ropewalk.bench.rope.rows import RopeRow, rope_row
from ropewalk.cli import app

ROTATE = Case("rotate", 2, 6, 3, 1, 16)
ROTATIONS = (ROTATE, replace(ROTATE, name="shared", inplace=True, directions=("fwd",)))
ATTEND = AttentionCase("attend", 2, 19, 4, 2, 16, causal=True, modes=("fwd", "train"))
ATTENTIONS = (ATTEND, replace(ATTEND, name="shared", modes=("fwd",), dtype="float32"))
UNITS = [
    ("rope", "rotate", "fwd"),
    ("rope", "rotate", "bwd"),
    ("rope", "shared", "fwd"),
    ("attention", "attend", "fwd"),
    ("attention", "attend", "train"),
    ("attention", "shared", "fwd"),
]


@pytest.fixture(autouse=True)
def _small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, size in ((roofline.SIZES, 64), (roofline.COPIED_BYTES, 4096)):
        for kind in sizes:
            monkeypatch.setitem(sizes, kind, size)


@pytest.fixture(autouse=True)
def _nothing_compiled(device: torch.device) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def run(path: Path, target: torch.device, **options: Any) -> tuple[BenchResult, str]:
    text = io.StringIO()
    given: dict[str, Any] = {
        "output": path,
        "device": str(target),
        "impls": ("reference",),
        "peers": "none",
        "rounds": 3,
        "rotations": ROTATIONS,
        "attentions": ATTENTIONS,
        "console": Console(file=text, width=300),
    }
    return run_all_benches(**{**given, **options}), text.getvalue()


def identities(path: Path) -> list[tuple[Any, ...]]:
    """The identity of each row, in the order of the record."""
    return [
        (*row.unit, row.description, getattr(row, "protocol", None), row.status) for row in read_bench_record(path).rows
    ]


def units_of(path: Path) -> list[tuple[str, str, str]]:
    """By name, each once, in the order of the record."""
    found: dict[tuple[str, str, str], None] = {}
    for benchmark, case, mode, *_ in identities(path):
        found[benchmark, case.name, mode] = None
    return list(found)


def test_both_are_in_one_record(tmp_path: Path, device: torch.device) -> None:
    path = tmp_path / "record.jsonl"
    result, text = run(path, device, peers="compiled,sdpa_flash")
    first, *lines = path.read_text().splitlines()
    header = json.loads(first)
    assert header["benchmark"] == "all"
    assert set(header["peers"]) == {"compiled", "sdpa_flash"}
    assert set(header["rates"]["matmul_tflops"]) == {"bfloat16", "float32"}
    assert list(json.loads(lines[-1])) == [END]
    kinds = [line.split(",")[0] for line in lines[:-1]]
    count = len(result.record.of(RopeRow))
    assert kinds == ['{"benchmark": "rope"'] * count + ['{"benchmark": "attention"'] * (len(kinds) - count)
    assert units_of(path) == UNITS
    assert not result.interrupted
    assert read_bench_record(path) == result.record
    assert {path.name for path in tmp_path.iterdir()} == {"record.jsonl", "record-rope.png", "record-attention.png"}
    assert text.count("times in µs (medians)") == 1
    assert "fwd, the kernels alone, forward" in text


def test_a_name_goes_to_those_that_know_it(tmp_path: Path, device: torch.device) -> None:
    def units(name: str, **options: Any) -> list[tuple[str, str, str]]:
        run(tmp_path / name, device, **options)
        return units_of(tmp_path / name)

    assert units("attention", case_names=("attend",)) == [unit for unit in UNITS if unit[1] == "attend"]
    assert units("both", case_names=("shared",)) == [unit for unit in UNITS if unit[1] == "shared"]
    assert units("impl", impls=("sdpa",)) == [unit for unit in UNITS if unit[0] == "attention"]
    assert "rates" not in run(tmp_path / "rotate", device, case_names=("rotate",))[0].record.run
    alias = replace(ATTEND, name="bert-512", modes=("fwd",))
    assert units("alias", case_names=("bert-base",), attentions=(alias,)) == [("attention", "bert-512", "fwd")]


@pytest.mark.parametrize("missing_of", ["rope", "attention"])
def test_a_peer_of_which_a_part_is_missing_has_a_version(
    missing_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: Any = PEERS if missing_of == "rope" else ATTENTION_PEERS
    monkeypatch.setitem(known, "huggingface", replace(known["huggingface"], module="a_module_that_is_not_there"))
    pytest.importorskip("transformers")
    for module, peers in ((rope, PEERS), (attention, ATTENTION_PEERS)):
        name = "PEERS" if module is rope else "ATTENTION_PEERS"
        monkeypatch.setattr(module, name, {"huggingface": peers["huggingface"]})
    attentions = (replace(ATTEND, modes=("fwd",)),)
    result, _ = run(tmp_path / "record.jsonl", torch.device("cpu"), peers="auto", attentions=attentions)
    assert result.record.run["peers"] == {"huggingface": version("transformers")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case_names": ("llama",)}, "case 'llama' does not exist; there are: rotate, shared, attend, bert-base"),
        ({"impls": ("cuda",)}, "impl 'cuda' does not exist; there are: native, triton, reference, gluon, flash, sdpa"),
        ({"peers": "tiger"}, "peer 'tiger' does not exist; there are: compiled"),
        ({"case_names": ("rotate",), "impls": ("sdpa",)}, "no benchmark has both"),
        ({"dtype": "int8"}, "dtype 'int8' does not exist"),
        ({"device": "meta"}, "only 'cpu' and 'cuda' can be timed"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "record.jsonl", torch.device("cpu"), **options)
    assert not list(tmp_path.iterdir())


# Going on


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise KeyboardInterrupt when this unit, counted from 0, is going to be timed."""
    counted = 0

    def stopping(measure: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted > number:
                raise KeyboardInterrupt
            return measure(*arguments)

        return call

    monkeypatch.setattr(rope, "_time_unit", stopping(rope._time_unit))
    monkeypatch.setattr(attention, "_time_mode", stopping(attention._time_mode))


def count_units(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The names and modes of the units that are timed from now on."""
    timed: list[tuple[str, str]] = []

    def counting(measure: Any) -> Any:
        def call(case: Any, mode: str, *arguments: Any) -> Any:
            timed.append((case.name, mode))
            return measure(case, mode, *arguments)

        return call

    monkeypatch.setattr(rope, "_time_unit", counting(rope._time_unit))
    monkeypatch.setattr(attention, "_time_mode", counting(attention._time_mode))
    return timed


@pytest.mark.parametrize("whole", [0, 2, 4])
def test_a_stopped_run_can_be_gone_on_with(
    whole: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, uninterrupted = tmp_path / "record.jsonl", tmp_path / "uninterrupted.jsonl"
    run(uninterrupted, device)
    with monkeypatch.context() as patch:
        stop_at(patch, whole)
        result, text = run(path, device)
    assert result.interrupted
    assert "--resume goes on from there" in text
    before = path.read_text().splitlines()
    kept = [line for line in before[1:] if unit_name(line) in UNITS[: max(whole - 1, 0)]]
    timed = count_units(monkeypatch)
    result, text = run(path, device, resume=True)
    assert not result.interrupted
    # The last unit of a run that was stopped may be whole or not: it is measured again.
    assert timed == [(name, mode) for _, name, mode in UNITS[max(whole - 1, 0) :]]
    assert f"{max(whole - 1, 0)} measurements in" in text
    after = path.read_text().splitlines()
    assert after[1 : 1 + len(kept)] == kept
    assert identities(path) == identities(uninterrupted)
    assert list(json.loads(after[-1])) == [END]
    old, new = json.loads(before[0]), json.loads(after[0])
    assert new.pop("resumed") != []
    assert new == old


def unit_name(line: str) -> tuple[str, str, str]:
    row = json.loads(line)
    return row["benchmark"], row["case"]["name"], row["direction" if row["benchmark"] == "rope" else "mode"]


@pytest.mark.parametrize("cut", ["in a line", "in a unit"])
def test_what_was_cut_off_is_measured_anew(cut: str, tmp_path: Path, device: torch.device) -> None:
    path = tmp_path / "record.jsonl"
    run(path, device)
    expected = identities(path)
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines[1:-1] if unit_name(line) in UNITS[:4]]
    half = lines[len(whole) + 1]
    assert unit_name(half) == UNITS[4]
    path.write_text("".join([lines[0], *whole, half[:40] if cut == "in a line" else half]))
    units = read_stopped(path, json.loads(lines[0]), {"rope": rope_row, "attention": attention_row}).units
    # Of a unit of which no line is whole nothing is known, so that the one before it counts as the last.
    assert len(units) == (3 if cut == "in a line" else 4)
    if cut == "in a line":
        with pytest.raises(ValueError, match=r"line .* is not JSON, or was cut off"):
            read_bench_record(path)
    run(path, device, resume=True)
    assert identities(path) == expected
    assert not list(tmp_path.glob("*.new"))


def test_a_run_that_came_to_its_end_stays_as_it_is(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    run(path, device)
    before, timed = path.read_text(), count_units(monkeypatch)
    result, text = run(path, device, resume=True)
    assert "nothing is left to measure" in text
    assert "record: " in text
    assert timed == []
    assert path.read_text() == before
    more = (*ROTATIONS, replace(ROTATE, name="more", directions=("fwd",)))
    result, _ = run(path, device, resume=True, rotations=more)
    assert timed == [("more", "fwd")]
    assert len(result.record.rows) > len(before.splitlines()) - 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "NVIDIA H300"}, "device was 'NVIDIA H300', and is "),
        ({"torch": "1.0", "triton": "1.1"}, "torch was '1.0', and is .*; triton was '1.1', and is "),
        ({"ropewalk": "0.0.1"}, "ropewalk was '0.0.1', and is "),
        ({"commit": "abc"}, "commit was 'abc', and is "),
        ({"dirty": "unlike"}, "dirty was 'unlike', and is "),
        ({"peers": {"quack": "0.6.5"}}, "peers quack was '0.6.5', and is None"),
        ({"seed": 1}, "seed was 1, and is 0"),
        ({"benchmark": "rope"}, "benchmark was 'rope', and is 'all'"),
    ],
)
def test_another_machine_does_not_go_on(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, cpu = tmp_path / "record.jsonl", torch.device("cpu")
    run(path, cpu, case_names=("rotate",))
    first, *lines = path.read_text().splitlines()
    altered = "\n".join([json.dumps({**json.loads(first), **changes}), *lines[:-1]]) + "\n"
    path.write_text(altered)
    with pytest.raises(ValueError, match=f"record.jsonl cannot be resumed: {message}"):
        run(path, cpu, case_names=("rotate",), resume=True)
    assert path.read_text() == altered


def test_other_options_do_not_go_on(tmp_path: Path) -> None:
    path, cpu = tmp_path / "record.jsonl", torch.device("cpu")
    run(path, cpu, case_names=("rotate",))
    with pytest.raises(ValueError, match="options rope rounds was 3, and is 4"):
        run(path, cpu, case_names=("rotate",), resume=True, rounds=4)
    with pytest.raises(ValueError, match=r"missing\.jsonl does not exist: there is no record to resume"):
        run(tmp_path / "missing.jsonl", cpu, resume=True)
    with pytest.raises(ValueError, match="there is no record to resume: say with output which"):
        run(None, cpu, resume=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exists already"):
        run(path, cpu)


@pytest.mark.parametrize("text", ["", "no JSON\n", "[1]\n", '{"format": 1, "benchmark": "training"}\n'])
def test_another_file_is_not_gone_on_with(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.jsonl is not a record"):
        run(path, torch.device("cpu"), resume=True)
    assert path.read_text() == text


# The command


def test_the_command_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def fake(**options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(interrupted=len(given) > 1)

    monkeypatch.setattr("ropewalk.bench.all.run_all_benches", fake)
    path = tmp_path / "r.jsonl"
    options = ["--case", "a", "--impl", "triton", "--peers", "flex", "-o", str(path), "--resume", "--device", "cpu"]
    assert CliRunner().invoke(app, ["bench", "all", *options, "--dtype", "float16", "--rounds", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "all"]).exit_code == 130
    expected = {"case_names": ["a"], "impls": ["triton"], "peers": "flex", "output": path, "resume": True}
    assert given[0] == {**expected, "device": "cpu", "dtype": "float16", "rounds": 5}
    nothing: dict[str, Any] = {"case_names": (), "impls": (), "peers": "auto", "output": None, "resume": False}
    assert given[1] == {**nothing, "device": None, "dtype": None, "rounds": None}


@pytest.mark.parametrize("command", ["rope", "attention", "all"])
def test_what_is_resumed_must_be_named(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--resume"])
    assert result.exit_code == 2
    assert "--output" in result.output


def test_the_command_lists_the_cases_of_both() -> None:
    result = CliRunner().invoke(app, ["bench", "all", "--list"])
    assert result.exit_code == 0
    rotation, attention_cases = result.stdout.split("ATTENTION\n")
    assert "gemma3-27b\n    B1 T8192 H32/16 D128 R128, bfloat16" in rotation
    assert "bert-512 (bert-base)\n    B32 T512 H12 D64, bfloat16, full\n" in attention_cases
