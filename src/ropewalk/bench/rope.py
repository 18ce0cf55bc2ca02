"""The benchmark of the rotation: ours against the peers and against a copy of the same bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.cases import CASES, DIRECTIONS, Case, Inputs, make_inputs
from ropewalk.bench.gate import Gate, Rotation, Verdict
from ropewalk.bench.peers import PEERS
from ropewalk.bench.records import Record, RecordWriter, Row, describe_run, read_record
from ropewalk.bench.running import check_names, choose_path, choose_peers, progress_bar
from ropewalk.bench.summary import default_console, print_summary
from ropewalk.bench.timing import Call, check_device, peak_memory, time_graphs, time_host, time_rounds
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.eager import IMPLEMENTATIONS, why_not
from ropewalk.ops.rope.rotary_embedding import rotary_embedding

COPY = "copy_"
MULTIPLY = "mul_"  # of one token's head by one, in place: what PyTorch's own simplest call costs the host
SMALL_BYTES = 64 << 20  # moved by a call whose launch matters as much as its work: it is timed in a CUDA graph too
CPU_ELEMENTS = 1 << 24  # of q and k, that a CPU is asked to rotate unless a case is named


@dataclass(frozen=True)
class Candidate:
    """Something to be measured."""

    name: str
    kind: str  # "ours" or "peer"
    why_not: Callable[[Case, str], str | None]
    build: Callable[[Case, Inputs, bool], Rotation]


@dataclass(frozen=True)
class BenchResult:
    """Where the record is, what is in it, and whether the run was stopped before its end."""

    path: Path
    record: Record
    interrupted: bool


def run_rope_bench(
    *,
    case_names: Sequence[str] = (),
    impls: Sequence[str] = (),
    modes: Sequence[str] = DIRECTIONS,
    peers: str = "auto",
    output: Path | None = None,
    device: str | None = None,
    rounds: int = 100,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    console: Console | None = None,
) -> BenchResult:
    """Measure rotations, write a record and a figure beside it, and print a summary.

    Args:
        case_names: which of `cases`; none for all that the device can be asked for.
        impls: which of our implementations; none for all that the device has.
        modes: "fwd", "bwd" and "decode" (the forward of one token for each sequence).
        peers: "auto" for those that import, "none", or names with commas between.
        output: the record's file, which must not exist, or None for one under ./results/.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        rounds: how often each call is timed, at most.
        seed: of the random inputs.
        cases: what can be chosen from.
        console: where to print.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console = console or default_console()
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device(target)
    units = _choose_units(cases, case_names, modes, target, console)
    found, versions = choose_peers(PEERS, peers, target)
    candidates = _our_candidates(impls, target)
    candidates += [Candidate(peer.name, "peer", peer.why_not, peer.build) for peer in found]
    run = describe_run("rope", target, versions)
    path = choose_path(output, run)
    for name, version in versions.items():
        console.print(f"peer {name}: {version}", highlight=False)
    interrupted = False
    on_device = torch.cuda.device(target) if target.type == "cuda" else nullcontext()
    with RecordWriter(path, run) as writer, progress_bar(console) as progress, on_device:
        task = progress.add_task("starting", total=len(units) * (len(candidates) + 1))
        try:
            for case, direction in units:
                progress.update(task, description=f"{case.name} {case.variant} {direction}")
                advance = functools.partial(progress.advance, task)
                for row in _measure_unit(case, direction, candidates, target, rounds, seed, advance, console):
                    writer.append(row)
        except KeyboardInterrupt:
            interrupted = True
    record = read_record(path)
    print_summary(record, console)
    if interrupted:
        console.print(f"stopped: the {len(record.rows)} rows measured so far are kept", style="yellow")
    console.print(f"record: {path}", highlight=False)
    _draw(record, path.with_suffix(".png"), console)
    return BenchResult(path, record, interrupted)


def _draw(record: Record, path: Path, console: Console) -> None:
    try:
        from ropewalk.bench.figure import draw_record
    except ModuleNotFoundError as error:
        console.print(f"no figure: {error.name} is not installed (pip install 'ropewalk\\[bench]')")
        return
    if draw_record(record, path):
        console.print(f"figure: {path}", highlight=False)


def _choose_units(
    cases: Sequence[Case], names: Sequence[str], modes: Sequence[str], device: torch.device, console: Console
) -> list[tuple[Case, str]]:
    check_names("case", names, dict.fromkeys(case.name for case in cases))
    check_names("mode", modes, DIRECTIONS)
    chosen = [case for case in cases if case.name in names or not names]
    if device.type == "cpu" and not names:
        too_large = {case.name: None for case in chosen if case.elements > CPU_ELEMENTS}
        if too_large:
            console.print(f"left out on a CPU unless named with --case: {', '.join(too_large)}", highlight=False)
        chosen = [case for case in chosen if case.name not in too_large]
    return [(case, direction) for case in chosen for direction in case.directions if direction in modes]


def _our_candidates(impls: Sequence[str], device: torch.device) -> list[Candidate]:
    check_names("impl", impls, IMPLEMENTATIONS)
    for impl in impls:
        reason = why_not(impl, device)
        if reason is not None:
            raise ValueError(f"impl {impl!r} cannot be measured: {reason}")
    chosen = impls or [impl for impl in IMPLEMENTATIONS if why_not(impl, device) is None]
    ours = [Candidate(impl, "ours", lambda case, direction: None, functools.partial(_build, impl)) for impl in chosen]
    if "native" in chosen:
        ours.append(Candidate("rotary_embedding", "ours", _rotary_embedding_why_not, _build_rotary_embedding))
    return ours


def _rotary_embedding_why_not(case: Case, direction: str) -> str | None:
    if direction == "bwd":
        return "no backward"
    if not case.inplace:
        return "it overwrites q and k"
    return "token-major tensors alone" if case.layout == "bhtd" else None


def _build_rotary_embedding(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """vLLM's operator as ours, a position given for every token."""
    table = torch.cat((inputs.cos, inputs.sin), -1)
    positions, head_dim, is_neox = inputs.token_positions, case.head_dim, not case.interleaved

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotary_embedding(positions, q, k, head_dim, table, is_neox)
        return q, k

    return Rotation(overwrite, lambda x: x.flatten(-2), lambda x: x.unflatten(-1, (-1, head_dim)))


def _build(impl: str, case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Our rotation of a case by the implementation called `impl`."""
    cos, sin, positions, cu_seqlens = inputs.cos, inputs.sin, inputs.positions, inputs.cu_seqlens
    layout, interleaved, inplace = case.layout, case.interleaved, case.inplace

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(
            q,
            k,
            cos,
            sin,
            positions=positions,
            cu_seqlens=cu_seqlens,
            layout=layout,
            interleaved=interleaved,
            inplace=inplace,
            impl=impl,
        )
        return rotated

    return Rotation(rotate)


def _measure_unit(
    case: Case,
    direction: str,
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    seed: int,
    advance: Callable[[], None],
    console: Console,
) -> Iterator[Row]:
    """Gate all candidates, then time those that are right against each other and against a copy."""
    inputs = make_inputs(case, device, seed)
    gate = Gate(case, inputs, direction)
    verdicts: dict[str, Verdict] = {}
    right: dict[str, Rotation] = {}
    kinds = {COPY: "anchor", MULTIPLY: "anchor", **{candidate.name: candidate.kind for candidate in candidates}}
    for candidate in candidates:
        row = functools.partial(Row, case, direction, candidate.name, candidate.kind)
        reason = candidate.why_not(case, direction)
        if reason is not None:
            yield row("unsupported", reason)
            advance()
            continue
        try:
            rotation = candidate.build(case, inputs, direction == "bwd")
            verdict = gate.check(rotation)
        except Exception as error:
            if candidate.kind == "ours":
                raise
            # Another library may fail in any way. Its message may hold paths: it is printed, and kept out of records.
            console.print(f"{candidate.name} failed on {case.name} {case.variant} {direction}: {error}", markup=False)
            yield row("failed", type(error).__name__)
            advance()
            continue
        verdicts[candidate.name] = verdict
        if verdict.complaint is None:
            right[candidate.name] = rotation
        else:
            finite = verdict.error if math.isfinite(verdict.error) else None
            yield row("wrong", verdict.complaint, finite, verdict.budget)
        advance()
    grads = gate.grads
    del gate  # its float64 tensors are many times the inputs
    yield from _time_unit(case, direction, inputs, grads, right, verdicts, kinds, device, rounds)
    advance()


def _time_unit(
    case: Case,
    direction: str,
    inputs: Inputs,
    grads: Sequence[Tensor],
    rotations: dict[str, Rotation],
    verdicts: dict[str, Verdict],
    kinds: dict[str, str],
    device: torch.device,
    rounds: int,
) -> list[Row]:
    """Time everything that is right, and a copy of the same bytes, against each other."""
    on_gpu = device.type == "cuda"
    source = torch.randn(case.elements, device=device).to(case.torch_dtype)
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
            times = time_rounds(calls, device, warmup=1, rounds=rounds, max_seconds=2.0)
        graphs, failures = time_graphs(calls, device) if on_gpu and small else ({}, {})
        return [
            Row(
                case,
                direction,
                name,
                kinds[name],
                "ok",
                error=verdicts[name].error if name in verdicts else None,
                error_budget=verdicts[name].budget if name in verdicts else None,
                time=times[name],
                gb_per_s=None if name == MULTIPLY else case.bytes_moved / times[name].p50 / 1e3,
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
    """The backward of one rotation, and the forward that records it, where it can be repeated: out of place."""
    backward = rotation.prepare_backward(inputs.q, inputs.k, case.inplace)
    call = functools.partial(backward, *(rotation.to_native(grad) for grad in grads))
    if case.inplace:
        return call, None
    leaves = [rotation.to_native(x).detach().requires_grad_() for x in (inputs.q, inputs.k)]
    return call, functools.partial(rotation.rotate, *leaves)
