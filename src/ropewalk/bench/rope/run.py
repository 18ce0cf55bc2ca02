"""The benchmark of the rotation: ours against the peers and against a copy of the same bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.options import check_names, choose_cases, choose_device, choose_dtype, choose_peers
from ropewalk.bench.core.runner import Benchmark, BenchResult, Job, Measured, Plan, Rates, run_plans
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.core.timing import COPY, Call, peak_memory, time_graphs, time_host, time_rounds
from ropewalk.bench.rope.cases import CASES, DIRECTIONS, Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import NORM_EPS, Gate, Rotation
from ropewalk.bench.rope.peers import PEERS, Peer
from ropewalk.bench.rope.rows import RopeRow, rope_row
from ropewalk.bench.rope.summary import print_rope_summary
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, NORM_IMPLEMENTATIONS, why_not
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.rope.rotary_embedding import rotary_embedding

MULTIPLY = "mul_"  # of one token's head by one, in place: what PyTorch's own simplest call costs the host
SMALL_BYTES = 64 << 20  # moved by a call whose launch matters as much as its work: it is timed in a CUDA graph too
CPU_ELEMENTS = 1 << 21  # of q and k, that a CPU rotates unless a case is named: all of them take about a minute
CPU_SECONDS = 0.5  # that a CPU times one direction for


@dataclass(frozen=True)
class Candidate:
    """An implementation to measure."""

    name: str
    kind: str  # "ours" or "peer"
    why_not: Callable[[Case, str], str | None]
    build: Callable[[Case, Inputs, bool], Rotation]


@dataclass(frozen=True)
class _Options:
    candidates: Sequence[Candidate]
    rounds: int
    seed: int
    device: torch.device
    console: Console


def run_rope_bench(
    *,
    case_names: Sequence[str] = (),
    impls: Sequence[str] = (),
    modes: Sequence[str] = DIRECTIONS,
    peers: str = "auto",
    output: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    rounds: int = 100,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    known_peers: Mapping[str, Peer] | None = None,
    console: Console | None = None,
) -> BenchResult:
    """Measure rotations, write a record and a figure beside it, and print a summary.

    Args:
        case_names: which of `cases`; none for all that suit the device.
        impls: which of our implementations; none for all that the device has.
        modes: "fwd", "bwd" and "decode" (the forward of one token for each sequence).
        peers: "auto" for those that import, "none", or names with commas between.
        output: the record's file, which must not exist unless it is resumed, or None for one under ./results/.
        resume: whether to go on with that record.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        dtype: "float16", "bfloat16" or "float32" for all cases; None for each case's own.
        rounds: how often each call is timed, at most.
        seed: of the random inputs.
        cases: what can be chosen from.
        known_peers: the same of peers; by default `PEERS`.
        console: where to print.

    Raises:
        OursError: at the end, if one of ours was wrong.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console, target = console or default_console(), choose_device(device)
    plan = plan_rotations(
        case_names=case_names,
        impls=impls,
        modes=modes,
        peers=peers,
        dtype=dtype,
        rounds=rounds,
        seed=seed,
        cases=cases,
        known_peers=known_peers,
        device=target,
        console=console,
    )
    return run_plans("rope", [plan], target, output=output, resume=resume, seed=seed, console=console)


def plan_rotations(
    *,
    case_names: Sequence[str],
    impls: Sequence[str],
    modes: Sequence[str],
    peers: str,
    dtype: str | None,
    rounds: int,
    seed: int,
    cases: Sequence[Case],
    device: torch.device,
    console: Console,
    known_peers: Mapping[str, Peer] | None = None,
) -> Plan:
    """Plan the measurements, of arguments as `run_rope_bench` takes them."""
    check_names("mode", modes, DIRECTIONS)
    chosen = choose_cases(
        choose_dtype(cases, dtype), case_names, device, lambda case: case.elements > CPU_ELEMENTS, console
    )
    found, versions = choose_peers(PEERS if known_peers is None else known_peers, peers, device)
    candidates = _our_candidates(impls, device)
    candidates += [Candidate(peer.name, "peer", peer.why_not, peer.build) for peer in found]
    options = _Options(candidates, rounds, seed, device, console)
    jobs = [
        Job(
            case,
            f"{case.name} {case.variant}",
            [direction for direction in case.directions if direction in modes],
            functools.partial(_measure_case, case, options),
        )
        for case in chosen
    ]
    ours = [candidate.name for candidate in candidates if candidate.kind == "ours"]
    return Plan(ROPE, jobs, versions, {"impls": ours, "rounds": rounds}, None)


def _draw(record: BenchRecord, path: Path) -> bool:
    from ropewalk.bench.rope.figure import draw_rope_record

    return draw_rope_record(record, path)


ROPE = Benchmark("rope", rope_row, print_rope_summary, _draw)


def _our_candidates(impls: Sequence[str], device: torch.device) -> list[Candidate]:
    check_names("impl", impls, IMPLEMENTATIONS)
    for impl in impls:
        reason = why_not(impl, device)
        if reason is not None:
            raise ValueError(f"impl {impl!r} cannot be measured: {reason}")
    chosen = impls or [impl for impl in IMPLEMENTATIONS if why_not(impl, device) is None]
    ours = [
        Candidate(impl, "ours", functools.partial(_why_not, impl), functools.partial(_build, impl)) for impl in chosen
    ]
    if "native" in chosen:
        ours.append(Candidate("rotary_embedding", "ours", _rotary_embedding_why_not, _build_rotary_embedding))
    return ours


def _why_not(impl: str, case: Case, direction: str) -> str | None:
    """Say why an implementation does not support a case: norms and axes have the same ones."""
    is_special = case.norm_offset is not None or case.positions == "axes"
    return "no norm, and no axes" if is_special and impl not in NORM_IMPLEMENTATIONS else None


def _rotary_embedding_why_not(case: Case, direction: str) -> str | None:
    if case.norm_offset is not None or case.positions == "axes":
        return "no norm, and no axes"
    if direction == "bwd":
        return "no backward"
    if not case.inplace:
        return "it overwrites q and k"
    return "token-major tensors alone" if case.layout == "bhtd" else None


def _build_rotary_embedding(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build our version of vLLM's operator, with a position for every token."""
    table = torch.cat((inputs.cos, inputs.sin), -1)
    positions, head_dim, is_neox = inputs.token_positions, case.head_dim, not case.interleaved

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotary_embedding(positions, q, k, head_dim, table, is_neox)
        return q, k

    return Rotation(overwrite, lambda x: x.flatten(-2), lambda x: x.unflatten(-1, (-1, head_dim)))


def _build(impl: str, case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build our rotation of a case by the implementation `impl`."""
    cos, sin, cu_seqlens = inputs.cos, inputs.sin, inputs.cu_seqlens
    positions, offsets = (None, inputs.positions) if case.positions == "offsets" else (inputs.positions, None)
    layout, interleaved, inplace = case.layout, case.interleaved, case.inplace
    weights = tuple(weight.detach().clone().requires_grad_(differentiable) for weight in inputs.weights)
    norm = None
    if case.norm_offset is not None:
        norm = QKNorm(weights[0], weights[1], eps=NORM_EPS, offset=case.norm_offset)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(
            q,
            k,
            cos,
            sin,
            positions=positions,
            offsets=offsets,
            cu_seqlens=cu_seqlens,
            layout=layout,
            interleaved=interleaved,
            inplace=inplace,
            axes=inputs.axes,
            norm=norm,
            impl=impl,
        )
        return rotated

    return Rotation(rotate, weights=weights)


def _measure_case(case: Case, options: _Options, directions: Sequence[str], rates: Rates) -> Iterator[Measured]:
    """Measure directions one after another; rotations are held against a copy of as many bytes, not against rates."""
    for direction in directions:
        yield direction, _measure_unit(case, direction, options)


def _measure_unit(case: Case, direction: str, options: _Options) -> Iterator[RopeRow]:
    """Gate all candidates, then time those that are right against each other and against a copy."""
    candidates = options.candidates
    inputs = make_inputs(case, options.device, options.seed)
    gate = Gate(case, inputs, direction)
    verdicts: dict[str, Verdict] = {}
    right: dict[str, Rotation] = {}
    kinds = {COPY: "anchor", MULTIPLY: "anchor", **{candidate.name: candidate.kind for candidate in candidates}}
    for candidate in candidates:
        row = functools.partial(RopeRow, case, direction, candidate.name, candidate.kind)
        reason = candidate.why_not(case, direction)
        if reason is not None:
            yield row("unsupported", reason)
            continue
        try:
            rotation = candidate.build(case, inputs, direction == "bwd")
            verdict = gate.check(rotation)
            if direction == "bwd" and verdict.complaint is None:
                backward, _ = _backward_calls(case, inputs, [grad.clone() for grad in gate.grads], rotation)
                for _ in range(2):  # not every backward can run again over one forward
                    backward()
        except Exception as error:
            if candidate.kind == "ours":
                raise
            # Another library may fail in any way. Its message may hold paths: it is printed, and kept out of records.
            what = f"{candidate.name} failed on {case.name} {case.variant} {direction}: {error}"
            options.console.print(what, markup=False)
            yield row("failed", type(error).__name__)
            continue
        verdicts[candidate.name] = verdict
        if verdict.complaint is None:
            right[candidate.name] = rotation
        else:
            finite = verdict.error if math.isfinite(verdict.error) else None
            yield row("wrong", verdict.complaint, finite, verdict.budget)
    grads = gate.grads
    del gate  # its float64 tensors are many times the inputs
    yield from _time_unit(case, direction, inputs, grads, right, verdicts, kinds, options)


def _time_unit(
    case: Case,
    direction: str,
    inputs: Inputs,
    grads: Sequence[Tensor],
    rotations: dict[str, Rotation],
    verdicts: dict[str, Verdict],
    kinds: dict[str, str],
    options: _Options,
) -> list[RopeRow]:
    """Time everything that is right, and a copy of the same bytes, against each other."""
    device, rounds = options.device, options.rounds
    on_gpu = device.type == "cuda"
    moved = case.bytes_of(direction)
    source = torch.randn(moved // (2 * case.torch_dtype.itemsize), device=device).to(case.torch_dtype)
    copied = torch.empty_like(source)
    calls: dict[str, Call] = {COPY: lambda: copied.copy_(source)}
    if direction == "decode":
        head = torch.ones(case.head_dim, device=device)
        calls[MULTIPLY] = lambda: head.mul_(1.0)
    forwards: dict[str, Call] = {}
    for name, rotation in rotations.items():
        if direction == "bwd":
            calls[name], forward = _backward_calls(case, inputs, grads, rotation)
            if forward is not None:
                forwards[name] = forward
        else:
            calls[name] = functools.partial(rotation.rotate, rotation.to_native(inputs.q), rotation.to_native(inputs.k))
    small = case.bytes_moved <= SMALL_BYTES and direction != "bwd"
    with torch.set_grad_enabled(direction == "bwd"):
        if on_gpu:
            times = time_rounds(calls, device, rounds=rounds)
        else:
            times = time_rounds(calls, device, warmup=1, rounds=rounds, max_seconds=CPU_SECONDS)
        graphs, failures = time_graphs(calls, device) if on_gpu and small else ({}, {})
        return [
            RopeRow(
                case,
                direction,
                name,
                kinds[name],
                "ok",
                error=verdicts[name].error if name in verdicts else None,
                error_budget=verdicts[name].budget if name in verdicts else None,
                time=times[name],
                gb_per_s=None if name == MULTIPLY else moved / times[name].p50 / 1e3,
                copy_ratio=None if name == MULTIPLY else times[COPY].p50 / times[name].p50,
                graph=graphs.get(name),
                graph_reason=failures.get(name),
                host=time_host(call, device) if on_gpu else None,
                host_forward=time_host(forwards[name], device) if on_gpu and name in forwards else None,
                peak_bytes=peak_memory(call, device) if on_gpu else None,
            )
            for name, call in calls.items()
        ]


def _backward_calls(
    case: Case, inputs: Inputs, grads: Sequence[Tensor], rotation: Rotation
) -> tuple[Call, Call | None]:
    """Make the backward of one rotation, and the forward that records it if it can be repeated: out of place."""
    backward = rotation.prepare_backward(inputs.q, inputs.k, case.inplace)
    call = functools.partial(backward, *(rotation.to_native(grad) for grad in grads))
    if case.inplace:
        return call, None
    leaves = [rotation.to_native(x).detach().requires_grad_() for x in (inputs.q, inputs.k)]
    return call, functools.partial(rotation.rotate, *leaves)
