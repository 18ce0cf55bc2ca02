"""Attention's benchmark from end to end, on cases of a few tokens."""

import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import ropewalk
from ropewalk.bench.attention import candidates as attention_candidates
from ropewalk.bench.attention import run as attention
from ropewalk.bench.attention import two_scores as attention_two_scores
from ropewalk.bench.attention.cases import CASES, LAYER, MODES, REROPE, AttentionCase, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import ATTENTION_PEERS, AttentionPeer
from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core import roofline
from ropewalk.bench.core.runner import BenchResult, OursError
from ropewalk.bench.report.load import read_bench_record
from ropewalk.cli import app

OF_OTHERS = ("decode", *LAYER, *REROPE)
CASE = AttentionCase(
    "small", 2, 19, 4, 2, 16, causal=True, modes=tuple(mode for mode in MODES if mode not in OF_OTHERS)
)
LAYERED = AttentionCase("layered", 2, 40, 4, 2, 16, causal=True, modes=LAYER)
FAR = AttentionCase("far", 1, 136, 4, 2, 64, causal=True, modes=(*REROPE, "memory"), far_window=40)
PACKED = AttentionCase(
    "packed", 4, 21, 4, 2, 16, causal=True, modes=("train",), form="packed", shortest=3, yardstick="small"
)
CACHE = AttentionCase("cache", 3, 80, 4, 2, 16, causal=True, modes=("decode",), form="cache", shortest=9)
MLA = AttentionCase("mla", 1, 33, 2, 2, 24, causal=True, modes=("fwd", "bwd"), v_head_dim=16, yardstick="other")
YARDSTICK = AttentionCase("other", 1, 33, 2, 2, 16, causal=True, modes=())
PADDED = replace(CASE, name="padded", causal=False, padded=True, modes=("train",))


@pytest.fixture(autouse=True)
def _small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, size in ((roofline.SIZES, 64), (roofline.COPIED_BYTES, 4096)):
        for kind in sizes:
            monkeypatch.setitem(sizes, kind, size)


@pytest.fixture(autouse=True)
def _nothing_compiled(device: torch.device) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def run(tmp_path: Path, target: torch.device, **options: Any) -> tuple[BenchResult, str]:
    text = io.StringIO()
    given: dict[str, Any] = {
        "output": tmp_path / "record.jsonl",
        "device": str(target),
        "impls": ("reference",),
        "peers": "none",
        "rounds": 3,
        "cases": (CASE, PADDED),
        "console": Console(file=text, width=300),
    }
    return attention.run_attention_bench(**{**given, **options}), text.getvalue()


def add_peer(monkeypatch: pytest.MonkeyPatch, name: str, attend: Any, why_not: Any = lambda case: None) -> None:
    peer = AttentionPeer(name, "torch", "torch", False, why_not, lambda case, inputs: attend)
    monkeypatch.setitem(ATTENTION_PEERS, name, peer)


def rows_of(rows: Sequence[AttentionRow], impl: str) -> list[AttentionRow]:
    return [row for row in rows if row.impl == impl]


def test_every_mode_is_measured_by_its_protocols(tmp_path: Path, device: torch.device) -> None:
    result, text = run(tmp_path, device, peers="sdpa_flash")
    rows = [row for row in result.record.rows if row.case == CASE and row.mode != "memory"]
    measured = {(row.mode, row.protocol): row.label for row in rows if row.kind == "ours"}
    hot = [(mode, "hot") for mode in CASE.modes if mode != "memory"]
    assert set(measured) == {*hot, ("fwd", "cool"), ("bwd", "cool")}
    for row in rows:
        assert row.status == "ok", row
        assert row.time is not None
        assert row.tflops is not None
        assert row.error is not None
        assert row.error_budget is not None
        assert row.rounds == 3
        assert 0 < row.error <= row.error_budget
        together = [other for other in rows if (other.mode, other.protocol) == (row.mode, row.protocol)]
        assert row.ratios is not None
        assert set(row.ratios) == {other.label for other in together} - {row.label}
        assert (row.served_by is None) == (row.kind == "peer")
    assert [row.protocol for row in rows_of(rows, "sdpa_flash")] == ["hot", "cool", "hot", "cool", "hot"]
    assert {row.status for row in result.record.rows if row.case == PADDED and row.impl == "sdpa_flash"} == {
        "unsupported"
    }
    assert not result.interrupted
    assert read_bench_record(result.path) == result.record
    assert read_bench_record(result.path) == result.record
    assert result.path.with_suffix(".png").exists()
    assert "RoPE, attention and both their backwards" in text
    if device.type == "cuda":
        assert all(row.peak_bytes is not None for row in result.record.rows if row.mode == "memory")


def test_a_yardstick_is_timed_in_the_same_rounds(tmp_path: Path, device: torch.device) -> None:
    cases = (CASE, PACKED, MLA, YARDSTICK)
    result, text = run(tmp_path, device, cases=cases, case_names=("packed", "mla"), protocols=("hot",))
    anchors = {(row.case.name, row.mode): row for row in result.record.rows if row.kind == "anchor"}
    assert set(anchors) == {("packed", "train"), ("mla", "fwd"), ("mla", "bwd")}
    for (name, mode), anchor in anchors.items():
        other = CASE if name == "packed" else YARDSTICK
        assert (anchor.status, anchor.yardstick) == ("ok", other.name)
        assert anchor.tflops is not None
        assert anchor.time is not None
        assert anchor.tflops == pytest.approx(other.flops(mode) / anchor.time.p50 / 1e6)
        label = "reference + rope" if mode == "train" else "reference"
        own = next(row for row in result.record.rows if (row.case.name, row.mode, row.label) == (name, mode, label))
        assert own.ratios is not None
        assert f"{label} on {other.name}" in own.ratios
        assert own.rounds == anchor.rounds == 3
    assert "reference on other" in text
    with pytest.raises(ValueError, match="yardstick 'other' does not exist"):
        run(tmp_path / "again", device, cases=(MLA,))


def test_a_decoding_step_is_held_against_a_copy(tmp_path: Path, device: torch.device) -> None:
    result, text = run(tmp_path, device, cases=(CACHE,), peers="sdpa_default,sdpa_flash")
    rows = {row.label: row for row in result.record.rows}
    assert rows["sdpa_flash + compiled rope"].status == "unsupported"
    timed = {name: row for name, row in rows.items() if row.status == "ok"}
    pages = [f"reference + rope, pages of {size}" for size in (64, 16)]
    assert set(timed) == {"auto + rope", "reference + rope", *pages, "sdpa_default + compiled rope", "copy_"}
    for name, row in timed.items():
        assert row.gb_per_s is not None
        assert row.time is not None
        assert row.gb_per_s == pytest.approx(CACHE.cache_bytes() / row.time.p50 / 1e3)
        assert name == "copy_" or (row.ratios is not None and "copy_" in row.ratios)
    assert rows["copy_"].kind == "anchor"
    assert "GB/s" in text


def test_rerope_is_held_against_other_ways_to_it(tmp_path: Path, device: torch.device) -> None:
    result, text = run(tmp_path, device, cases=(FAR,), peers="eager,sdpa_flash")
    rows = [row for row in result.record.rows if row.impl != "flash"]
    one_call = ["auto + rerope", "reference + rerope"]
    others = ["reference + rope", "reference + two calls", "reference + ready pairs", "eager + rerope"]
    for mode in REROPE:
        of_mode = [row for row in rows if row.mode == mode]
        assert [row.label for row in of_mode] == [*one_call, *others]
        for row in of_mode:
            assert (row.status, row.protocol) == ("ok", "hot"), row
            assert row.time is not None
            assert row.tflops == pytest.approx(FAR.flops(mode) / row.time.p50 / 1e6)
            assert row.ratios is not None
            assert {other.label for other in of_mode} - {row.label} <= set(row.ratios)
            assert (row.served_by is None) == (row.label == "eager + rerope")
    memory = [row for row in rows if row.mode == "memory"]
    expected = ["auto + rope", "reference + rope", "reference + rerope"] if device.type == "cuda" else []
    assert [row.label for row in memory] == expected
    assert all(row.peak_bytes is not None for row in memory)
    assert "rerope-train, ReRoPE, attention and both their backwards" in text


def test_layers_are_held_against_the_bare_kernels_and_against_pytorch(tmp_path: Path, device: torch.device) -> None:
    peers = "cudnn,sdpa_flash" if device.type == "cuda" else "sdpa_flash"
    result, text = run(tmp_path, device, cases=(LAYERED,), peers=peers)
    rows = result.record.of(AttentionRow)
    parts = ["norm-gate", "gate", "norm", "half-rope", "max logits"]
    expected = ["auto + norm-gate", *(f"reference + {part}" for part in parts)]
    whole = ["cudnn + compiled norm, rope, gate", "cudnn + eager norm, rope, gate"]
    for mode in LAYER:
        of_mode = [row for row in rows if row.mode == mode and row.status == "ok"]
        ours = [row.label for row in of_mode if row.kind == "ours"]
        assert ours == expected
        assert "sdpa_flash + compiled norm, rope, gate" in [row.label for row in of_mode]
        for row in of_mode:
            assert row.time is not None
            assert row.error is not None
            assert row.tflops == pytest.approx(LAYERED.flops(mode) / row.time.p50 / 1e6)
            assert row.ratios is not None
            assert "reference + half-rope" in {*row.ratios, row.label}
    if device.type == "cuda":
        assert set(whole) <= {row.label for row in rows if row.status == "ok"}
    assert "layer-train, the same" in text


@pytest.mark.parametrize("part", ["gate", "norm", "rope"])
def test_a_wrong_layer_is_not_timed(device: torch.device, part: str) -> None:
    """The gate's and the weights' gradients are checked as the output is."""
    inputs = make_attention_inputs(LAYERED, device)
    found = attention_candidates.candidates_of(LAYERED, inputs, ("reference",), [])["layer-train"]
    whole = next(x for x in found if x.label == "reference + norm-gate")
    gate = AttentionGate(LAYERED, inputs)
    check = functools.partial(gate.check, setting="norm-gate", backward=True, parameters=whole.parameters)
    attend = whole.from_inputs(whole.build())
    assert check(attend).complaint is None
    _, *weights = whole.parameters

    class Spoil(torch.autograd.Function):
        """Changes nothing but a gradient."""

        @staticmethod
        def forward(ctx: Any, out: Tensor, x: Tensor) -> Tensor:
            ctx.like = x
            return out.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], torch.ones_like(ctx.like)

    if part == "rope":
        assert check(lambda q, k, v: attend(q.roll(1, 1), k, v)).complaint is not None
        return
    spoiled = whole.parameters[0] if part == "gate" else weights[0]
    complaint = check(lambda q, k, v: Spoil.apply(attend(q, k, v), spoiled)).complaint
    assert complaint == "the error of a parameter's gradient is past the budget"


@pytest.mark.parametrize("mode", REROPE)
def test_ready_pairs_are_not_rotated_while_the_clock_runs(
    mode: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_attention_inputs(FAR, device)
    found = attention_candidates.candidates_of(FAR, inputs, ("reference",), [])[mode]
    calls = {
        candidate.position: attention._call(mode, candidate, candidate.build())
        for candidate in found
        if candidate.impl == "reference"
    }

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("rotated")

    monkeypatch.setattr(attention_two_scores, "apply_rope", fail)
    result: Any = calls["ready pairs"]()
    assert len(result) == (5 if mode == "rerope-train" else FAR.batch)  # gradients, or the output
    with pytest.raises(AssertionError, match="rotated"):
        calls["two calls"]()


def test_modes_cases_and_protocols_can_be_chosen(tmp_path: Path, device: torch.device) -> None:
    result, _ = run(tmp_path, device, case_names=("small",), modes=("fwd",), protocols=("cool",))
    assert [(row.case.name, row.mode, row.protocol) for row in result.record.rows] == [("small", "fwd", "cool")]


def test_a_window_is_measured_as_one(tmp_path: Path, device: torch.device) -> None:
    case = replace(CASE, name="windowed", modes=("fwd", "train", "schemes-bwd"), window=7)
    result, _ = run(tmp_path, device, cases=(case,), protocols=("hot",), peers="sdpa_flash,huggingface")
    for row in result.record.of(AttentionRow):
        assert row.status == ("unsupported" if row.impl == "sdpa_flash" else "ok"), row
        if row.status == "ok":
            assert row.time is not None
            assert row.tflops == pytest.approx(case.flops(row.mode) / row.time.p50 / 1e6)


def test_rows_are_held_against_a_matrix_product(tmp_path: Path, device: torch.device) -> None:
    result, text = run(tmp_path, device, cases=(replace(CASE, modes=("fwd", "memory")), CACHE), protocols=("hot",))
    rates_of_run = result.record.run["rates"]
    assert set(rates_of_run["matmul_tflops"]) == {"bfloat16"}
    assert f"{rates_of_run['copy_gb_per_s']:.4g} GB/s" in text
    for row in result.record.of(AttentionRow):
        if row.mode == "fwd":
            assert row.tflops is not None
            assert row.matrix_ratio == pytest.approx(row.tflops / rates_of_run["matmul_tflops"]["bfloat16"])
        else:
            assert row.matrix_ratio is None
    assert " of matmul" in text


def test_cases_can_be_asked_for_in_another_dtype_and_by_their_models(tmp_path: Path, device: torch.device) -> None:
    cases = (replace(CASE, name="bert-512"), replace(PADDED, yardstick="bert-512"))
    result, _ = run(tmp_path, device, cases=cases, case_names=("bert-base",), modes=("fwd",), dtype="float32")
    assert {(row.case.name, row.case.dtype) for row in result.record.of(AttentionRow)} == {("bert-512", "float32")}
    assert set(result.record.run["rates"]["matmul_tflops"]) == {"float32"}
    beside, _ = run(
        tmp_path, device, cases=cases, case_names=("padded",), dtype="float32", output=tmp_path / "beside.jsonl"
    )
    assert {row.yardstick for row in beside.record.of(AttentionRow)} == {None, "bert-512"}
    assert {row.case.dtype for row in beside.record.of(AttentionRow)} == {"float32"}
    assert all(row.status == "ok" for row in beside.record.of(AttentionRow))


def test_a_backward_that_cannot_be_repeated_is_a_failure(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(torch.autograd.Function):
        """Its backward gives its buffers away."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.kept = [x.detach().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                ctx.out = ropewalk.attention(*ctx.kept, causal=True, impl="reference")
            return ctx.out.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            kept, ctx.kept = ctx.kept, None
            return torch.autograd.grad(ctx.out, kept, grads[0])

    add_peer(monkeypatch, "once", Once.apply)
    result, _ = run(tmp_path, device, peers="once", modes=("fwd", "bwd", "train"), cases=(CASE,))
    found = {row.mode: row.status for row in rows_of(result.record.of(AttentionRow), "once")}
    assert found == {"fwd": "ok", "bwd": "failed", "train": "ok"}


def test_a_wrong_peer_is_reported_and_not_timed(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return q * k.sum() * v.sum()

    add_peer(monkeypatch, "wrong", wrong)
    result, text = run(tmp_path, device, peers="wrong", modes=("fwd", "train"), cases=(CASE,))
    rows = rows_of(result.record.rows, "wrong")
    assert [(row.mode, row.status) for row in rows] == [("fwd", "wrong"), ("train", "wrong")]
    assert all(row.time is None and row.error_budget is not None for row in rows)
    assert calls == 2
    assert "wrong: wrong on small fwd: the error of the output is past the budget" in text


def test_a_failing_peer_does_not_stop_the_run(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise OSError("/secret/place/lib.so")

    def never(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError

    add_peer(monkeypatch, "broken", fail)
    add_peer(monkeypatch, "narrow", never, why_not=lambda case: "too narrow")
    result, text = run(tmp_path, device, peers="broken,narrow", modes=("bwd",), cases=(CASE,))
    found = {row.impl: (row.status, row.reason) for row in result.record.rows if row.kind == "peer"}
    assert found == {"broken": ("failed", "OSError"), "narrow": ("unsupported", "too narrow")}
    assert "/secret/place" in text
    assert "/secret/place" not in result.path.read_text()
    assert len(rows_of(result.record.rows, "reference")) == 2


@pytest.mark.parametrize(("spoil", "status"), [(lambda out: out * 1.5, "wrong"), (lambda out: 1 / 0, "failed")])
def test_ours_must_be_right(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, spoil: Any, status: str
) -> None:
    """The record is complete before the error is raised."""
    right = attention_candidates.attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        out = right(q, k, v, **keywords)
        return spoil(out) if keywords["impl"] == "reference" else out

    monkeypatch.setattr(attention_candidates, "attention", attend)
    with pytest.raises(OursError, match=rf"reference \+ rope on padded train is {status}"):
        run(tmp_path, device, cases=(PADDED,))
    rows = read_bench_record(tmp_path / "record.jsonl").of(AttentionRow)
    assert [row.status for row in rows_of(rows, "reference")] == [status] * 3
    assert [row.status for row in rows_of(rows, "auto")] == ["ok"]


def test_an_implementation_that_cannot_run_has_a_row_with_the_reason(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    result, text = run(tmp_path, cpu, impls=("flash", "reference"), modes=("fwd",), cases=(CASE,))
    row = rows_of(result.record.rows, "flash")[0]
    assert row.status == "unsupported"
    assert "cannot run this call" in (row.reason or "")
    assert "unsupported: flash on small fwd" in text


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = attention._time_mode

    def stop_at_padded(case: AttentionCase, *arguments: Any) -> Any:
        if case.name == "padded":
            raise KeyboardInterrupt
        return measure(case, *arguments)

    monkeypatch.setattr(attention, "_time_mode", stop_at_padded)
    result, text = run(tmp_path, device, modes=("fwd", "train"))
    assert result.interrupted
    assert {row.case.name for row in read_bench_record(result.path).of(AttentionRow)} == {"small"}
    assert "rows measured so far are kept" in text


def test_large_cases_are_left_out_on_a_cpu_and_it_says_so(tmp_path: Path) -> None:
    result, text = run(tmp_path, torch.device("cpu"), cases=(CASE, CASES[0]), modes=("fwd",), protocols=("hot",))
    assert {row.case.name for row in result.record.rows} == {"small"}
    assert f"left out on a CPU unless named with --case: {CASES[0].name}" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case_names": ("llama",)}, "case 'llama' does not exist; there are: small, padded"),
        ({"modes": ("forward",)}, "mode 'forward' does not exist"),
        ({"impls": ("cuda",)}, "impl 'cuda' does not exist"),
        ({"protocols": ("warm",)}, "protocol 'warm' does not exist; there are: hot, cool"),
        ({"peers": "tiger"}, "peer 'tiger' does not exist"),
        ({"peers": "flex"}, "peer 'flex' cannot be measured: needs a GPU"),
        ({"device": "meta"}, "only 'cpu' and 'cuda' can be timed"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, torch.device("cpu"), **options)
    assert not (tmp_path / "record.jsonl").exists()


def test_the_command_lists_cases_and_modes() -> None:
    result = CliRunner().invoke(app, ["bench", "attention", "--list"])
    assert result.exit_code == 0
    assert (
        "gqa-8k-d128 (llama3-8b, qwen3-8b)\n    B2 T8192 H32/8 D128, bfloat16, causal\n    modes: fwd, bwd, train\n"
        in result.stdout
    )
    assert "mode memory: " in result.stdout
    assert "decode-8k-d128 (decode-64)\n    64 caches of 1024 to 8192 keys, H32/8 D128, bfloat16\n" in result.stdout
    assert "modes: none of its own" in result.stdout


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def fake(**options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(interrupted=len(given) > 1)

    monkeypatch.setattr("ropewalk.bench.attention.run.run_attention_bench", fake)
    options = ["--case", "a", "--case", "b", "--impl", "triton", "--mode", "fwd, bwd", "--protocol", "hot"]
    assert CliRunner().invoke(app, ["bench", "attention", *options, "--peers", "flex"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "attention"]).exit_code == 130
    expected = {"case_names": ["a", "b"], "impls": ["triton"], "modes": ["fwd", "bwd"], "protocols": ["hot"]}
    rest = {"peers": "flex", "output": None, "resume": False, "device": None, "dtype": None, "rounds": None}
    assert given[0] == {**expected, **rest}
    assert given[1]["modes"] == tuple(MODES)
    assert given[1]["protocols"] == []


def test_the_command_shows_what_is_wrong_as_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> Any:
        raise OursError("triton on small fwd is wrong")

    monkeypatch.setattr("ropewalk.bench.attention.run.run_attention_bench", fail)
    result = CliRunner().invoke(app, ["bench", "attention"])
    assert result.exit_code == 2
    assert result.stderr == "error: triton on small fwd is wrong\n"
