"""The benchmark from end to end, on cases of a few tokens."""

import io
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ropewalk import apply_rope
from ropewalk.bench.core.runner import BenchResult, OursError
from ropewalk.bench.report.load import read_bench_record
from ropewalk.bench.rope import run as rope
from ropewalk.bench.rope.cases import NORM_CASES, Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation
from ropewalk.bench.rope.norm_peers import NORM_PEERS
from ropewalk.bench.rope.peers import PEERS, Peer
from ropewalk.bench.rope.rows import RopeRow
from ropewalk.bench.rope.summary import best_peer

CASE = Case("small", 2, 6, 3, 1, 16)
CASES = (CASE, replace(CASE, inplace=True), replace(CASE, name="one", tokens=1, directions=("decode",)))


def run(tmp_path: Path, target: torch.device, **options: Any) -> tuple[BenchResult, str]:
    text = io.StringIO()
    given: dict[str, Any] = {
        "output": tmp_path / "record.jsonl",
        "device": str(target),
        "impls": ("reference",),
        "peers": "none",
        "rounds": 3,
        "cases": CASES,
        "console": Console(file=text, width=200),
    }
    return rope.run_rope_bench(**{**given, **options}), text.getvalue()


def fake_peer(
    monkeypatch: pytest.MonkeyPatch, name: str, rotate: Any, why_not: Any = lambda case, direction: None
) -> None:
    def build(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
        return Rotation(lambda q, k: rotate(q, k, inputs))

    monkeypatch.setitem(PEERS, name, Peer(name, "torch", "torch", False, why_not, build))


def rows_of(rows: Sequence[RopeRow], impl: str) -> list[RopeRow]:
    return [row for row in rows if row.impl == impl]


def test_every_case_and_direction_is_measured(tmp_path: Path, device: torch.device) -> None:
    result, text = run(tmp_path, device)
    rows = result.record.rows
    expected = [(case, direction) for case in CASES for direction in case.directions]
    for impl in ("reference", "copy_"):
        assert [(row.case, row.direction) for row in rows_of(rows, impl)] == expected
    assert [row.direction for row in rows_of(rows, "mul_")] == ["decode"]
    for row in rows:
        assert row.status == "ok"
        assert row.time is not None
        if row.impl == "mul_":  # other bytes
            assert row.gb_per_s is row.copy_ratio is None
        else:
            assert row.gb_per_s is not None
            assert row.gb_per_s > 0
    assert all(row.copy_ratio == 1 for row in rows_of(rows, "copy_"))
    assert not result.interrupted
    assert read_bench_record(result.path) == result.record
    assert result.path.with_suffix(".png").exists()
    assert "of copy" in text


def test_default_implementations_are_those_of_the_device(tmp_path: Path, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: Triton's interpreter would be timed on a CPU")
    result, _ = run(tmp_path, device, impls=())
    fastest = rows_of(result.record.rows, "triton")
    assert len(fastest) == 5
    for row in fastest:
        assert row.host is not None
        assert row.peak_bytes is not None
        assert (row.graph is None) == (row.direction == "bwd")


def test_a_wrong_peer_is_reported_and_not_timed(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def wrong(q: Tensor, k: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return q * 1.25, k * 1.25

    fake_peer(monkeypatch, "wrong", wrong)
    result, text = run(tmp_path, device, peers="wrong", cases=(CASE,))
    rows = rows_of(result.record.rows, "wrong")
    assert [row.status for row in rows] == ["wrong", "wrong"]
    assert all(row.time is None and row.error is not None and row.error_budget is not None for row in rows)
    assert calls == 2
    assert "wrong: wrong on small half/out of place fwd: the error is past the budget" in text


def test_a_failing_peer_does_not_stop_the_run(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(q: Tensor, k: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise OSError("/secret/place/lib.so")

    fake_peer(monkeypatch, "broken", fail)
    result, text = run(tmp_path, device, peers="broken", cases=(CASE,))
    assert {(row.status, row.reason) for row in rows_of(result.record.rows, "broken")} == {("failed", "OSError")}
    assert "/secret/place" in text
    assert "/secret/place" not in result.path.read_text()
    assert len(rows_of(result.record.rows, "reference")) == 2


def test_a_backward_that_cannot_be_repeated_is_a_failure(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(torch.autograd.Function):
        """Its backward gives its buffers away."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            ctx.tables = cos, sin
            return apply_rope(q, k, cos, sin, impl="reference")

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (cos, sin), ctx.tables = ctx.tables, None
            return *apply_rope(*grads, cos, -sin, impl="reference"), None, None

    fake_peer(monkeypatch, "once", lambda q, k, inputs: Once.apply(q, k, inputs.cos, inputs.sin))
    result, _ = run(tmp_path, device, peers="once", cases=(CASE,))
    found = [(row.direction, row.status) for row in rows_of(result.record.rows, "once")]
    assert found == [("fwd", "ok"), ("bwd", "failed")]


def test_a_peer_runs_only_supported_cases(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(q: Tensor, k: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise AssertionError

    fake_peer(monkeypatch, "narrow", never, why_not=lambda case, direction: "too narrow")
    result, _ = run(tmp_path, device, peers="narrow", cases=(CASE,))
    assert {(row.status, row.reason) for row in rows_of(result.record.rows, "narrow")} == {
        ("unsupported", "too narrow")
    }


def test_a_right_peer_is_compared(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peer(monkeypatch, "right", lambda q, k, inputs: apply_rope(q, k, inputs.cos, inputs.sin, impl="reference"))
    result, text = run(tmp_path, device, peers="right", cases=(CASE,))
    assert result.record.run["peers"] == {"right": version("torch")}
    row = rows_of(result.record.rows, "reference")[0]
    compared = best_peer(row, [other for other in result.record.rows if other.direction == "fwd"])
    assert compared is not None
    assert compared[0] == "right"
    assert "right" in text


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = rope._time_unit, 0

    def stop_at_the_third(*arguments: Any) -> list[RopeRow]:
        nonlocal measured
        measured += 1
        if measured == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(rope, "_time_unit", stop_at_the_third)
    result, text = run(tmp_path, device)
    assert result.interrupted
    assert len(rows_of(result.record.rows, "reference")) == 2
    assert len(read_bench_record(result.path).of(RopeRow)) == 4
    assert "the 4 rows measured so far are kept" in text


def test_large_cases_are_left_out_on_a_cpu_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "CPU_ELEMENTS", 200)
    cpu = torch.device("cpu")
    result, text = run(tmp_path, cpu, modes=("fwd", "decode"))
    assert {row.case.name for row in result.record.rows} == {"one"}
    assert "left out on a CPU unless named with --case: small" in text
    named, _ = run(tmp_path, cpu, modes=("fwd",), case_names=("small",), output=tmp_path / "named.jsonl")
    assert {row.case.name for row in named.record.rows} == {"small"}


def test_ours_must_be_right(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is complete before the error is raised."""
    monkeypatch.setattr(rope, "apply_rope", lambda q, k, *tables, **keywords: (q.clone(), k.clone()))
    with pytest.raises(OursError, match=r"reference on small half/out of place fwd is wrong"):
        run(tmp_path, device, cases=(CASE, CASES[2]), modes=("fwd", "decode"))
    rows = read_bench_record(tmp_path / "record.jsonl").of(RopeRow)
    assert [(row.direction, row.status) for row in rows_of(rows, "reference")] == [("fwd", "wrong"), ("decode", "ok")]


def test_cases_can_be_asked_for_in_another_dtype(tmp_path: Path, device: torch.device) -> None:
    result, _ = run(tmp_path, device, dtype="float32")
    assert {row.case.dtype for row in result.record.of(RopeRow)} == {"float32"}
    assert len(result.record.of(RopeRow)) == 11


def test_a_cpu_is_called_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text, **keywords: titles.append(text))
    result, text = run(tmp_path, torch.device("cpu"), modes=("fwd",))
    assert result.record.run["device"].startswith("CPU ")
    assert "driver_version" not in result.record.run
    assert "CPU" in text
    assert "GPU" not in text
    assert len(titles) == 1
    assert "on CPU " in titles[0]
    for row in result.record.of(RopeRow):
        assert row.graph is row.host is row.host_forward is row.peak_bytes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype 'float64' does not exist; there are: float16, bfloat16, float32"),
        ({"case_names": ("llama",)}, "case 'llama' does not exist; there are: small, one"),
        ({"modes": ("forward",)}, "mode 'forward' does not exist"),
        ({"impls": ("cuda",)}, "impl 'cuda' does not exist"),
        ({"peers": "tiger"}, "peer 'tiger' does not exist"),
        ({"device": "meta"}, "only 'cpu' and 'cuda' can be timed"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, torch.device("cpu"), **options)
    assert not (tmp_path / "record.jsonl").exists()


def test_a_named_peer_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="peer 'quack' cannot be measured: needs a GPU"):
        run(tmp_path, torch.device("cpu"), peers="quack")


def test_an_existing_record_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("precious")
    with pytest.raises(ValueError, match="exists already"):
        run(tmp_path, torch.device("cpu"))
    assert (tmp_path / "record.jsonl").read_text() == "precious"


SMALL_NORMS = [
    replace(case, batch=min(case.batch, 2), tokens=min(case.tokens, 5), q_heads=3, k_heads=1) for case in NORM_CASES
]


def test_norms_and_axes_are_measured_beside_eager_pytorch(tmp_path: Path, device: torch.device) -> None:
    result, _ = run(tmp_path, device, cases=SMALL_NORMS, known_peers=NORM_PEERS, peers="eager")
    rows = read_bench_record(result.path).of(RopeRow)
    for impl in ("reference", "eager"):
        for row in rows_of(rows, impl):
            expected = "ok" if impl == "reference" or row.case.norm_offset is not None else "unsupported"
            assert row.status == expected, row
    assert {row.case for row in rows} == set(SMALL_NORMS)


@pytest.mark.parametrize("which", [0, 2])
def test_a_wrong_gradient_is_found_also_of_a_weight(device: torch.device, which: int) -> None:
    case = SMALL_NORMS[0]
    inputs = make_inputs(case, device)
    gate = Gate(case, inputs, "bwd")
    right = NORM_PEERS["eager"].build(case, inputs, True)

    class Wrong(Rotation):
        def prepare_backward(self, q: Tensor, k: Tensor, inplace: bool) -> Any:
            backward = super().prepare_backward(q, k, inplace)
            return lambda *grads: [2 * x if i == which else x for i, x in enumerate(backward(*grads))]

    assert gate.check(right).complaint is None
    assert gate.check(Wrong(right.rotate, weights=right.weights)).complaint is not None
