"""The host's benchmark from end to end, on cases of a few tokens."""

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from ropewalk.bench.attention import candidates as attention_candidates
from ropewalk.bench.attention.cases import REROPE, AttentionCase, direction_of
from ropewalk.bench.attention.peers import AttentionPeer
from ropewalk.bench.core.load import load_record
from ropewalk.bench.core.runner import BenchResult, OursError
from ropewalk.bench.host import rotations, run, timing
from ropewalk.bench.host.cases import CASES, CONTEXTS, DIRECTIONS, HOST_PEERS, ROTATE
from ropewalk.bench.host.rows import HostRow, host_row
from ropewalk.bench.host.timing import Burst, Timed, spread, time_burst, time_turns
from ropewalk.bench.report.load import read_bench_record
from ropewalk.cli import app
from ropewalk.ops.attention.api import attention

CPU = torch.device("cpu")
DENSE = AttentionCase("tiny", 2, 19, 4, 2, 16, modes=("none-fwd", "rope-train", "sinks-train", ROTATE))
KINDS = (
    replace(DENSE, name="tiny-lengths", padded=True, modes=("rope-fwd",)),
    replace(DENSE, name="tiny-packed", form="packed", shortest=3, modes=("rope-train",)),
    replace(DENSE, name="tiny-window", causal=True, window=7, modes=("rope-fwd",)),
    replace(DENSE, name="tiny-rerope", causal=True, far_window=8, modes=REROPE),
    AttentionCase("tiny-cache", 3, 80, 4, 2, 16, causal=True, modes=("rope-fwd",), form="cache", shortest=9),
)


@pytest.fixture(autouse=True)
def _nothing_compiled(device: torch.device) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def measure(tmp_path: Path, target: torch.device, **options: Any) -> tuple[BenchResult, str]:
    text = io.StringIO()
    given: dict[str, Any] = {
        "output": tmp_path / "record.jsonl",
        "device": str(target),
        "impls": ("reference",),
        "peers": "sdpa_default",
        "rounds": 3,
        "cases": (DENSE,),
        "console": Console(file=text, width=300),
    }
    return run.run_host_bench(**{**given, **options}), text.getvalue()


def labels_of(result: BenchResult, mode: str, status: str = "ok") -> list[str]:
    return [row.label for row in result.record.of(HostRow) if (row.mode, row.status) == (mode, status)]


def test_a_record_is_complete(tmp_path: Path, device: torch.device) -> None:
    result, text = measure(tmp_path, device)
    assert labels_of(result, "none-fwd") == ["mul_", "auto", "reference", "sdpa_default"]
    compiled = "sdpa_default + compiled rope"
    assert labels_of(result, "rope-train") == ["mul_", "auto + rope", "reference + rope", compiled]
    assert labels_of(result, "sinks-train") == ["mul_", "auto + sinks", "reference + sinks"]
    assert labels_of(result, "sinks-train", "unsupported") == ["sdpa_default + sinks"]
    places = ("in place", "out of place", "recording")
    ours = [*(f"apply_rope + {place}" for place in places), "rotary_embedding + in place"]
    assert labels_of(result, ROTATE) == ["mul_", *ours, "complex + out of place"]
    assert {row.mode for row in result.record.of(HostRow)} == set(DENSE.modes)
    for row in result.record.of(HostRow):
        if row.status == "ok":
            check_figures(row, result.record.of(HostRow))
            assert (row.error is None) == (row.impl == "mul_")
            assert (row.served_by is None) == (row.kind != "ours" or row.mode == ROTATE)
    assert result.record.run["benchmark"] == "host"
    assert result.record.run["peers"]["sdpa_default"] == torch.__version__
    assert load_record(result.path, {"host": host_row}) == result.record
    assert ("on a CPU a call's time includes its arithmetic" in text) == (device.type == "cpu")
    assert "the host's part of an eager call" in text


def check_figures(row: HostRow, rows: list[HostRow]) -> None:
    """Hold a row's figures against each other, and against `mul_` of the same rounds."""
    assert row.host is not None
    assert row.multiple is not None
    assert 0 < row.host.least <= row.host.median <= row.host.p95
    unit = next(other.host for other in rows if (other.case, other.mode, other.impl) == (row.case, row.mode, "mul_"))
    assert unit is not None
    assert row.multiple.median == pytest.approx(row.host.median / unit.median)
    assert row.multiple.least == pytest.approx(row.host.least / unit.median)
    assert row.multiple.p95 == pytest.approx(row.host.p95 / unit.median)
    assert row.bursts == 3
    trains = direction_of(row.mode) == "train" and row.impl != "mul_"
    assert (row.forward is None) == (row.backward is None) == (not trains)
    for part in (row.forward, row.backward):
        if part is not None:
            assert 0 < part.least <= part.median <= part.p95
            assert part.least < row.host.least, "a part takes as long as the whole"


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_every_kind_of_call_is_checked_and_timed(case: AttentionCase, tmp_path: Path, device: torch.device) -> None:
    result, _ = measure(tmp_path, device, cases=(case,))
    rows = result.record.of(HostRow)
    assert {row.mode for row in rows} == set(case.modes)
    for mode in case.modes:
        found = {(row.impl, row.status) for row in rows if row.mode == mode and row.kind != "peer"}
        assert found == {("mul_", "ok"), ("auto", "ok"), ("reference", "ok")}
    labels = [row.label for row in rows]
    assert len(set(labels)) * len(case.modes) == len(labels), "a candidate is there twice"
    pages = [f"{impl} + rope, pages of {size}" for size in (64, 16) for impl in ("auto", "reference")]
    assert sorted(label for label in labels if "pages" in label) == (sorted(pages) if case.form == "cache" else [])
    peers = {row.status for row in rows if row.kind == "peer"}
    assert peers == ({"ok"} if case.name in ("tiny-lengths", "tiny-cache") else {"unsupported"})


def test_the_cases_cover_what_an_eager_call_can_be() -> None:
    by_name = {case.name: case for case in CASES}
    for shape in ("small", "bert"):
        assert by_name[f"{shape}-lengths"].padded
        assert by_name[f"{shape}-packed"].form == "packed"
        assert by_name[f"{shape}-window"].window is not None
        assert by_name[f"{shape}-rerope"].far_window is not None
        assert ROTATE in by_name[shape].modes
    assert (by_name["bert"].batch, by_name["bert"].tokens, by_name["bert"].q_heads) == (32, 512, 12)
    assert [by_name[f"decode-{rows}"].batch for rows in (1, 8, 64)] == [1, 8, 64]
    assert {mode.rpartition("-")[2] for case in CASES for mode in case.modes} == set(DIRECTIONS)


def test_candidates_take_turns() -> None:
    order: list[str] = []
    timed = {name: Timed(lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    samples = time_turns(timed, CPU, calls=2, rounds=9, max_seconds=60)
    per_round = 3 * 3  # two timed calls of each candidate, and one before the clock starts
    rounds = [order[start : start + per_round] for start in range(0, len(order), per_round)]
    assert len(rounds) == 9 + timing._WARMUP
    for names in rounds:
        assert sorted(names[::3]) == ["a", "b", "c"], "a candidate had no turn, or two"
        assert names[::3] == names[1::3] == names[2::3], "a burst was interrupted"
    assert len({tuple(names) for names in rounds}) > 1, "all rounds have one order"
    assert [len(bursts) for bursts in samples.values()] == [9, 9, 9]


def test_no_round_begins_after_the_time_is_over() -> None:
    samples = time_turns({"a": Timed(lambda: None)}, CPU, calls=1, rounds=1000, max_seconds=0)
    assert len(samples["a"]) == timing.MIN_ROUNDS


def test_a_burst_counts_its_calls_alone_and_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock.now)

    def forward() -> str:
        clock.now += 2000
        return "out"

    def backward(out: str) -> None:
        assert out == "out"
        clock.now += 5000

    def context() -> AbstractContextManager[None]:
        clock.now += 100_000
        return nullcontext()

    assert time_burst(Timed(forward), CPU, 4) == pytest.approx((2.0, None, None))
    assert time_burst(Timed(forward, backward), CPU, 4) == pytest.approx((7.0, 2.0, 5.0))
    assert time_burst(Timed(forward, backward, context), CPU, 4) == pytest.approx((7.0, 2.0, 5.0))
    clock.now -= 100_000 + 5 * 7000
    assert clock.now == 5 * 2000 + 5 * 7000, "one call before the clock starts, then four"


def test_a_choice_of_backend_is_made_outside_of_the_call(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    @contextmanager
    def chosen() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert entered[-1] == "in"
        entered.append("in")
        out: Tensor = attention(q, k, v, impl="reference")
        return out

    peer = AttentionPeer("theirs", "torch", "torch", False, lambda case: None, lambda case, inputs: attend)
    monkeypatch.setitem(HOST_PEERS, "theirs", peer)
    monkeypatch.setitem(CONTEXTS, "theirs", chosen)
    result, _ = measure(tmp_path, device, modes=("none-fwd",), peers="theirs")
    assert "theirs" in labels_of(result, "none-fwd")
    assert entered.count("out") == 1 + timing._WARMUP + 3, "not once for the check and for each burst"
    assert set(CONTEXTS) - {"theirs"} == {"cudnn"}


def test_a_spread_is_the_least_the_median_and_the_95_percent_quantile() -> None:
    found = spread([float(x) for x in range(100, -1, -1)])
    assert (found.least, found.median, found.p95) == (0.0, 50.0, 95.0)
    assert found.over(2.0) == timing.Spread(0.0, 25.0, 47.5)


def test_what_is_wrong_is_not_timed(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = attention_candidates.attention, 0

    def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        nonlocal calls
        out = right(q, k, v, **keywords)
        if keywords["impl"] is None:
            return out
        calls += 1
        return out * 1.5

    monkeypatch.setattr(attention_candidates, "attention", attend)
    with pytest.raises(OursError, match="reference on tiny none-fwd is wrong"):
        measure(tmp_path, device, modes=("none-fwd",))
    rows = {row.impl: row for row in load_record(tmp_path / "record.jsonl", {"host": host_row}).of(HostRow)}
    assert (rows["reference"].status, rows["reference"].host, rows["reference"].multiple) == ("wrong", None, None)
    assert rows["reference"].reason == "the error of the output is past the budget"
    assert calls == 1, "it was called after its result was found wrong"
    assert rows["auto"].status == "ok"
    assert rows["auto"].host is not None


def test_a_wrong_rotation_is_not_timed(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rotations.apply_rope

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **keywords: Any) -> Any:
        return right(q, k, cos, -sin, **keywords)

    monkeypatch.setattr(rotations, "apply_rope", backwards)
    with pytest.raises(OursError, match=r"apply_rope \+ recording on tiny rotate-fwd is wrong"):
        measure(tmp_path, device, modes=(ROTATE,))
    record = load_record(tmp_path / "record.jsonl", {"host": host_row})
    found = {row.label: (row.status, row.host is None) for row in record.of(HostRow)}
    wrong = [name for name, verdict in found.items() if verdict == ("wrong", True)]
    assert wrong == ["apply_rope + in place", "apply_rope + out of place", "apply_rope + recording"]
    assert found["rotary_embedding + in place"] == found["complex + out of place"] == ("ok", False)


def test_a_missing_peer_and_an_unsupported_call_are_named(tmp_path: Path) -> None:
    options = {"peers": "auto", "impls": ("flash", "reference"), "modes": ("none-fwd",)}
    result, text = measure(tmp_path, CPU, **options)
    peers = result.record.run["peers"]
    assert set(peers) == set(HOST_PEERS)
    assert {name for name, version in peers.items() if version == "missing: needs a GPU"} == set(peers) - {
        "sdpa_default"
    }
    assert labels_of(result, "none-fwd", "unsupported") == ["flash"]
    assert "unsupported: flash on tiny none-fwd: impl is 'flash', but it cannot run this call" in text


def test_a_stopped_run_is_resumed(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run.time_turns

    def stop(timed: Any, *arguments: Any, **options: Any) -> dict[str, list[Burst]]:
        if "auto + sinks" in timed:
            raise KeyboardInterrupt
        return right(timed, *arguments, **options)

    modes = ("none-fwd", "sinks-train")
    monkeypatch.setattr(run, "time_turns", stop)
    stopped, _ = measure(tmp_path, device, modes=modes)
    assert stopped.interrupted
    monkeypatch.setattr(run, "time_turns", right)
    resumed, text = measure(tmp_path, device, modes=modes, resume=True)
    assert "1 measurements" in text
    kept = [row for row in stopped.record.of(HostRow) if row.mode == "none-fwd"]
    assert [row for row in resumed.record.of(HostRow) if row.mode == "none-fwd"] == kept
    assert labels_of(stopped, "sinks-train", "unsupported") == labels_of(resumed, "sinks-train", "unsupported")
    assert labels_of(resumed, "sinks-train") == ["mul_", "auto + sinks", "reference + sinks"]


def test_a_report_refuses_the_record_in_one_line(tmp_path: Path, device: torch.device) -> None:
    result, _ = measure(tmp_path, device, modes=("none-fwd",))
    with pytest.raises(ValueError, match="is not a record of format 1 of the benchmark 'rope' or 'attention' or 'all'"):
        read_bench_record(result.path)


def test_large_cases_are_left_out_on_a_cpu(tmp_path: Path) -> None:
    bert = next(case for case in CASES if case.name == "bert")
    result, text = measure(tmp_path, CPU, cases=(DENSE, bert), modes=("none-fwd",))
    assert {row.case.name for row in result.record.of(HostRow)} == {"tiny"}
    assert "left out on a CPU unless named with --case: bert" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case_names": ("llama",)}, "case 'llama' does not exist; there are: tiny"),
        ({"modes": ("fwd",)}, "mode 'fwd' does not exist; there are: none-fwd, rope-train, sinks-train, rotate-fwd"),
        ({"impls": ("cuda",)}, "impl 'cuda' does not exist"),
        ({"peers": "liger_kernel"}, "peer 'liger_kernel' does not exist"),
        ({"peers": "flex"}, "peer 'flex' cannot be measured: needs a GPU"),
        ({"device": "gpu"}, "the device is 'gpu', but must be 'cpu', 'cuda'"),
        ({"dtype": "fp8"}, "dtype 'fp8' does not exist"),
        ({"rounds": 2}, "rounds is 2, but must be at least 3"),
        (
            {"cases": (DENSE, KINDS[0]), "case_names": ("tiny-lengths",), "modes": ("none-fwd",)},
            "nothing is to be measured: the cases are tiny-lengths, and none has a mode that is named",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        measure(tmp_path, CPU, **options)
    assert not (tmp_path / "record.jsonl").exists()


def test_the_command_lists_cases_and_says_what_is_bad_in_one_line() -> None:
    listed = CliRunner().invoke(app, ["bench", "host", "--list"])
    assert listed.exit_code == 0
    assert "bert-lengths\n    B32 T512 H12 D64, bfloat16, full, key lengths from T/2 to T\n" in listed.stdout
    assert f"modes that end with -train: {DIRECTIONS['train']}" in listed.stdout
    assert f"mode {ROTATE}: apply_rope in place" in listed.stdout
    for options, message in (
        (["--rounds", "1"], "error: rounds is 1, but must be at least 3\n"),
        (["--peers", "flex", "--device", "cpu"], "error: peer 'flex' cannot be measured: needs a GPU\n"),
        (["--mode", "quick"], "error: mode 'quick' does not exist"),
    ):
        bad = CliRunner().invoke(app, ["bench", "host", *options])
        assert bad.exit_code == 2
        assert bad.stderr.startswith(message)
        assert bad.stderr.count("\n") == 1


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def fake(**options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(interrupted=len(given) > 1)

    monkeypatch.setattr("ropewalk.bench.host.run.run_host_bench", fake)
    options = ["--case", "small", "--impl", "triton", "--mode", "none-fwd, rope-train", "--peers", "none"]
    assert CliRunner().invoke(app, ["bench", "host", *options, "--rounds", "9"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "host"]).exit_code == 130
    expected = {"case_names": ["small"], "impls": ["triton"], "modes": ["none-fwd", "rope-train"], "rounds": 9}
    rest = {"peers": "none", "output": None, "resume": False, "device": None, "dtype": None}
    assert given[0] == {**expected, **rest}
    assert (given[1]["modes"], given[1]["rounds"]) == ([], 100)
