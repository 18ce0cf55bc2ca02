"""Runs of each benchmark on small cases: one path that works, one that is wrong, one that is stopped."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ropewalk.bench.attention import cases as attention_cases
from ropewalk.bench.attention.bench import AttentionBench
from ropewalk.bench.core.load import read_record, unit_of
from ropewalk.bench.core.options import Options
from ropewalk.bench.core.runner import Bench, OursError, run
from ropewalk.bench.host import bench as host_bench
from ropewalk.bench.parallel import bench as parallel_bench
from ropewalk.bench.parallel import cases
from ropewalk.bench.parallel.bench import ParallelBench, choose_parts, run_parallel_bench
from ropewalk.bench.rope.bench import NormBench, RopeBench
from ropewalk.bench.rope.cases import Case
from ropewalk.bench.rope.peers import PEERS, Peer
from ropewalk.bench.training.bench import TrainingBench, TrainingCase

CPU = {"device": "cpu", "rounds": 3}
HEADS = {"batch": 2, "tokens": 48, "q_heads": 2, "k_heads": 2, "head_dim": 16, "dtype": "float32"}
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


def small(case: attention_cases.AttentionCase) -> attention_cases.AttentionCase:
    windows = {name: 8 if getattr(case, name) else None for name in ("window", "far_window")}
    return replace(case, **HEADS, v_head_dim=None, shortest=min(case.shortest, 24), **windows)  # type: ignore[arg-type]


class SmallRope(RopeBench):
    cases = (Case("tiny", 1, 4, 2, 1, 8, "float32"), Case("step", 1, 1, 2, 1, 8, "float32", modes=("decode",)))


class SmallNorm(NormBench):
    cases = (Case("normed", 1, 4, 2, 1, 8, "float32", norm_offset=0.0, source="fused"),)


class SmallAttention(AttentionBench):
    cases = tuple(map(small, attention_cases.CASES))


class SmallHost(host_bench.HostBench):
    cases = tuple(map(small, host_bench.CASES))


class SmallTraining(TrainingBench):
    cases = (TrainingCase("bert", "a small BERT", "bert", BERT, 2, 16, 8, ("autocast", "bf16")),)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Compiling for a CPU takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def measure(*benches: type[Bench], path: Path, **options: Any) -> tuple[list[dict[str, Any]], str]:
    console = Console(file=io.StringIO(), width=200)
    run(benches, Options(output=path, **{**CPU, **options}), console)
    return read_record(path).rows, console.file.getvalue()  # type: ignore[attr-defined]


def test_rotations_are_held_against_a_copy_and_peers(tmp_path: Path, nothing_compiled: None) -> None:
    rows, text = measure(SmallRope, path=tmp_path / "rope.jsonl", peers="compiled")
    assert {(row["mode"], row["impl"]) for row in rows} >= {("fwd", "copy_"), ("bwd", "reference"), ("decode", "mul_")}
    ours = next(row for row in rows if row["kind"] == "ours")
    assert ours["error"] <= ours["error_budget"]
    assert ours["copy_ratio"] > 0
    assert "for correctness, not speed" in text
    assert (tmp_path / "rope.png").stat().st_size > 1000


def test_norms_have_their_own_peers(tmp_path: Path, nothing_compiled: None) -> None:
    rows, _ = measure(SmallNorm, path=tmp_path / "norm.jsonl", peers="eager")
    assert {(row["impl"], row["status"]) for row in rows} == {("copy_", "ok"), ("reference", "ok"), ("eager", "ok")}


def test_attention_is_measured_by_every_mode(tmp_path: Path, nothing_compiled: None) -> None:
    names = ("causal-4k-d128", "packed-4k-d128", "decode-64", "rerope-8k-d64", "qwen3-next-d128", "gemma3-27b")
    rows, text = measure(SmallAttention, path=tmp_path / "attention.jsonl", peers="sdpa_flash", cases=names)
    assert {row["mode"] for row in rows} == set(attention_cases.MODES) - {"memory"}
    assert all(row["status"] in ("ok", "unsupported") for row in rows)
    timed = [row for row in rows if row["status"] == "ok"]
    assert {row["protocol"] for row in timed} == {"hot", "cool"}
    assert all(row["ratios"] and row["time"]["p50"] > 0 for row in timed if row["mode"] == "schemes-fwd")
    assert any(row.get("yardstick") == "gqa-4k-d128" for row in timed)
    assert "reference + alibi" in text


def test_host_times_are_multiples_of_the_simplest_call(tmp_path: Path, nothing_compiled: None) -> None:
    options = {"cases": ["small"], "modes": ["rope-train", "rotate-fwd", "dropout-fwd"], "peers": "sdpa_default"}
    rows, text = measure(SmallHost, path=tmp_path / "host.jsonl", **options)
    timed = {(row["mode"], row["impl"]): row for row in rows if row["status"] == "ok"}
    assert timed["rope-train", "mul_"]["multiple"]["median"] == 1
    assert {"forward", "backward"} <= timed["rope-train", "auto"].keys()
    assert ("rotate-fwd", "complex") in timed
    assert [row["reason"] for row in rows if row["kind"] == "peer" and row["mode"] == "dropout-fwd"]
    assert "warning: on a CPU" in text


def test_training_steps_are_timed_with_right_gradients(tmp_path: Path) -> None:
    rows, _ = measure(SmallTraining, path=tmp_path / "training.jsonl", modes=["bf16"])
    assert {row["impl"]: row["status"] for row in rows} == {
        "ropewalk": "ok",
        "sdpa": "ok",
        "eager": "ok",
        "flash_attention_4": "unsupported",
    }
    assert all(row["tokens_per_second"] > 0 and row["error"] <= 2 for row in rows if row["status"] == "ok")


@pytest.mark.slow
def test_context_parallelism_is_measured_on_two_processes(tmp_path: Path) -> None:
    path, names = tmp_path / "parallel.jsonl", choose_parts(["gqa-16k", "llama"])
    run_parallel_bench(Options(cases=names, quick=True, output=path, peers="by_hand", **CPU))  # type: ignore[arg-type]
    record = read_record(path)
    assert record.run["options"]["parallel"]["ranks"] == 2
    timed = {row["impl"]: row for row in record.rows if row["status"] == "ok"}
    assert timed.keys() == {"one process", "ropewalk", "ropewalk_ulysses", "by_hand"}  # by default: gather
    assert timed["ropewalk_ulysses"]["served_by"] == "ulysses"
    assert all(row["efficiency"] > 0 for row in record.rows if row["kind"] == "ours" and row["status"] == "ok")
    reasons = {row["impl"]: row["reason"] for row in record.rows if row["status"] == "unsupported"}
    assert reasons["ropewalk_2d_ring"] == "on 2 processes, which are no 2 nodes of several"


@pytest.mark.slow
def test_context_parallelism_by_two_dimensions_is_right_on_four_processes(tmp_path: Path) -> None:
    path, names = tmp_path / "parallel.jsonl", choose_parts(["gqa-1m"])
    run_parallel_bench(Options(cases=names, quick=True, output=path, peers="none", processes=4, **CPU))  # type: ignore[arg-type]
    rows = {row["impl"]: row for row in read_record(path).rows}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["rounds"] for row in rows.values()} == {1}  # after the run that was checked
    assert rows["ropewalk_2d_gather"]["served_by"] == "gather, 2 × 2"
    assert rows["ropewalk_2d_ring"]["served_by"] == "ring, 2 × 2"
    [gather] = [row for row in rows.values() if row.get("served_by") == "gather"]
    assert rows["ropewalk_2d_gather"]["bytes_received"] != gather["bytes_received"]


def test_a_yardstick_that_does_not_fit_is_a_quarter_times_sixteen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "fit_yardstick", lambda inputs, mesh: cases.first_tokens(inputs, mesh, 24))
    monkeypatch.setattr(ParallelBench, "_clock", lambda self, run: [run(), 1e5][1])
    path, names = tmp_path / "parallel.jsonl", ["gqa-16k", "gqa-1m"]
    store = f"file://{tmp_path}/store"
    parallel_bench._work(0, Options(cases=names, quick=True, output=path, peers="none", **CPU), store, 1)  # type: ignore[arg-type]
    rows = [row for row in read_record(path).rows if row["status"] == "ok"]
    assert {row["case"]["tokens"] for row in rows} == {96}
    for row in rows:  # each takes as long: a quarter of the tokens has a sixteenth of the pairs
        assert row["yardstick_tokens"] == 24
        assert row["time"]["p50"] == (16e5 if row["kind"] == "anchor" else 1e5)
        assert row["kind"] == "anchor" or row["efficiency"] == 16.0


def test_a_run_that_compiles_is_not_timed() -> None:
    knobs = pytest.importorskip("triton").knobs
    before, times = knobs.compilation.listener, knobs.CompileTimes(5, [("ttir", 30)], 7)
    with parallel_bench._builds() as built:
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=True)
        assert not built
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=False)
    assert built == [42]
    assert knobs.compilation.listener is before


def test_context_parallelism_on_a_cpu_must_be_quick() -> None:
    with pytest.raises(ValueError, match="--quick has small ones"):
        run_parallel_bench(Options(device="cpu"))
    with pytest.raises(ValueError, match="no case has 'nothing' in its name"):
        choose_parts(["nothing"])


def test_two_benchmarks_share_a_record(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    rows, _ = measure(SmallRope, SmallAttention, path=path, peers="none", cases=["tiny", "gemma3-27b"])
    assert {row["benchmark"] for row in rows} == {"rope", "attention"}
    assert {found.name for found in tmp_path.glob("*.png")} == {"all-rope.png", "all-attention.png"}
    rows, _ = measure(SmallRope, SmallAttention, path=tmp_path / "one.jsonl", peers="none", cases=["tiny"])
    assert {row["benchmark"] for row in rows} == {"rope"}
    with pytest.raises(ValueError, match="case 'nothing' does not exist; there are: tiny, step, causal-16k-d128"):
        measure(SmallRope, SmallAttention, path=path, cases=["nothing"])


def test_whatever_is_wrong_is_not_timed_and_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(case: Any, inputs: Any, differentiable: bool) -> Any:
        raise OSError("a path of this machine")

    broken = Peer("broken", "torch", "torch", False, lambda case, mode: None, build)
    monkeypatch.setattr(SmallRope, "peers", {"broken": broken})
    monkeypatch.setattr("ropewalk.bench.rope.gate.error_budget", lambda truth, plain: 0.0)
    path = tmp_path / "wrong.jsonl"
    with pytest.raises(OursError, match=r"reference on tiny half/out of place fwd is wrong.*wrong\.jsonl has the rest"):
        measure(SmallRope, path=path, peers="broken", cases=["tiny"])
    rows = [row for row in read_record(path).rows if row["kind"] != "anchor"]
    assert {(row["impl"], row["status"], "time" in row) for row in rows} == {
        ("reference", "wrong", False),
        ("broken", "failed", False),
    }
    assert "this machine" not in path.read_text()


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, time = tmp_path / "stopped.jsonl", SmallRope.time

    def stop(self: Any, case: Any, mode: str, *rest: Any) -> Any:
        if mode == "bwd":
            raise KeyboardInterrupt
        return time(self, case, mode, *rest)

    monkeypatch.setattr(SmallRope, "time", stop)
    _, text = measure(SmallRope, path=path, peers="none", cases=["tiny"])
    assert "--resume goes on from there" in text
    monkeypatch.setattr(SmallRope, "time", time)
    # The last unit of a run that was stopped is not known to be whole.
    rows, text = measure(SmallRope, path=path, peers="none", cases=["tiny"], resume=True)
    assert [row["mode"] for row in rows if row["kind"] == "ours"] == ["fwd", "bwd"]
    assert len({unit_of("rope", row["case"], row["mode"]) for row in rows}) == 2
    _, text = measure(SmallRope, path=path, peers="none", cases=["tiny"], resume=True)
    assert "nothing is left to measure" in text
    with pytest.raises(ValueError, match="exists already"):
        measure(SmallRope, path=path, peers="none", cases=["tiny"])
    with pytest.raises(ValueError, match="options rope rounds was 3, and is 4"):
        measure(SmallRope, path=path, peers="none", cases=["tiny"], resume=True, rounds=4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"impls": ["none"]}, "impl 'none' does not exist"),
        ({"modes": ["train"]}, "mode 'train' does not exist"),
        ({"dtype": "int8"}, "dtype 'int8' does not exist"),
        ({"peers": "nobody"}, "peer 'nobody' does not exist"),
        ({"peers": "vllm"}, "peer 'vllm' cannot be measured: needs a GPU"),
        ({"cases": ["step"], "modes": ["bwd"]}, "nothing is to be measured: the cases are step"),
        ({"impls": ["triton"]}, "impl 'triton' cannot be measured"),
    ],
)
def test_names_that_cannot_be_measured_are_refused(options: Any, expected: str, tmp_path: Path) -> None:
    assert PEERS
    with pytest.raises(ValueError, match=expected):
        measure(SmallRope, path=tmp_path / "record.jsonl", **options)
    assert not list(tmp_path.iterdir())
