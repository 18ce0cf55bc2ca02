"""The benchmark of attention: our kernels against the peers, and position schemes against none.

Device times hold no time of the host (`ropewalk.bench.bursts` says how); what an eager call costs the host is recorded
beside them for the cases where it matters. A backward is timed alone, over one recorded forward; "train" is forward and
backward together, from q, k and v to their gradients, with RoPE on the way. Beside some cases a yardstick is timed in
the same rounds: our kernels on another case, or a copy of as many bytes as must be read.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.attention_candidates import Candidate, candidates_of, yardsticks_of
from ropewalk.bench.attention_cases import CASES, MODES, AttentionCase, direction_of, make_attention_inputs
from ropewalk.bench.attention_gate import AttentionGate
from ropewalk.bench.attention_peers import ATTENTION_PEERS, AttentionPeer
from ropewalk.bench.attention_records import AttentionRecord, AttentionRow, read_attention_record
from ropewalk.bench.attention_summary import print_attention_summary
from ropewalk.bench.bursts import PROTOCOLS, ratios, time_bursts
from ropewalk.bench.records import RecordWriter, describe_run
from ropewalk.bench.rope import COPY
from ropewalk.bench.running import check_names, choose_path, choose_peers, progress_bar
from ropewalk.bench.summary import default_console
from ropewalk.bench.timing import Call, check_device, peak_memory, quantiles, time_host
from ropewalk.ops.attention.choice import IMPLEMENTATIONS

CPU_FLOPS = 1e9  # of a forward that a CPU is asked for unless a case is named
SMALL_FLOPS = 1e11  # of a forward whose launches matter as much as its work: the host's time is recorded too


class OursError(RuntimeError):
    """One of our own implementations was wrong or failed; the record is complete, and says which."""


@dataclass(frozen=True)
class AttentionResult:
    """Where the record is, what is in it, and whether the run was stopped before its end."""

    path: Path
    record: AttentionRecord
    interrupted: bool


@dataclass(frozen=True)
class _Options:
    modes: Sequence[str]
    impls: Sequence[str]
    peers: Sequence[AttentionPeer]
    protocols: Sequence[str]  # none: each mode's own
    rounds: int | None
    seed: int
    device: torch.device
    console: Console
    cases: Mapping[str, AttentionCase]  # by name: yardsticks are found among them


def run_attention_bench(
    *,
    case_names: Sequence[str] = (),
    impls: Sequence[str] = (),
    modes: Sequence[str] = tuple(MODES),
    peers: str = "auto",
    protocols: Sequence[str] = (),
    output: Path | None = None,
    device: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    cases: Sequence[AttentionCase] = CASES,
    console: Console | None = None,
) -> AttentionResult:
    """Measure attention, write a record and a figure beside it, and print a summary.

    Args:
        case_names: which of `cases`; none for all that the device can be asked for.
        impls: which of our implementations are measured as kernels, beside what impl=None takes; none for "triton" on a
            GPU and "reference" on a CPU.
        modes: of `MODES`.
        peers: "auto" for those that import, "none", or names with commas between.
        protocols: "hot", "cool"; none for both where kernels are alone, and hot elsewhere.
        output: the record's file, which must not exist, or None for one under ./results/.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        rounds: how many rounds of bursts there are at most; None for as many as the protocol asks for.
        seed: of the random inputs.
        cases: what can be chosen from.
        console: where to print.

    Raises:
        OursError: at the end, if one of ours was wrong or failed.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console = console or default_console()
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device(target)
    check_names("mode", modes, MODES)
    check_names("impl", impls, IMPLEMENTATIONS)
    check_names("protocol", protocols, PROTOCOLS)
    chosen = _choose_cases(cases, case_names, target, console)
    found, versions = choose_peers(ATTENTION_PEERS, peers, target)
    by_name = {case.name: case for case in cases}
    check_names("yardstick", [case.yardstick for case in chosen if case.yardstick is not None], by_name)
    impls = impls or (("triton",) if target.type == "cuda" else ("reference",))
    options = _Options(modes, impls, found, protocols, rounds, seed, target, console, by_name)
    run = {**describe_run("attention", target, versions), "seed": seed}
    path = choose_path(output, run)
    for name, version in versions.items():
        console.print(f"peer {name}: {version}", highlight=False)
    interrupted = False
    on_device = torch.cuda.device(target) if target.type == "cuda" else nullcontext()
    with RecordWriter(path, run) as writer, progress_bar(console) as progress, on_device:
        task = progress.add_task("starting", total=sum(len(_modes_of(case, options)) for case in chosen))
        try:
            for case in chosen:
                start = time.perf_counter()
                for row in _measure_case(case, options):
                    progress.update(task, description=f"{case.name} {row.mode}")
                    writer.append(row)
                progress.advance(task, len(_modes_of(case, options)))
                seconds = time.perf_counter() - start
                console.print(f"{case.name}: {seconds:.0f} s, with what had to be compiled", highlight=False)
        except KeyboardInterrupt:
            interrupted = True
    record = read_attention_record(path)
    print_attention_summary(record, console)
    if interrupted:
        console.print(f"stopped: the {len(record.rows)} rows measured so far are kept", style="yellow")
    console.print(f"record: {path}", highlight=False)
    _draw(record, path.with_suffix(".png"), console)
    bad = [row for row in record.rows if row.kind != "peer" and row.status in ("wrong", "failed")]
    if bad:
        what = ", ".join(f"{row.label} on {row.case.name} {row.mode} is {row.status}" for row in bad)
        raise OursError(f"{what}; {path.name} has the rest")
    return AttentionResult(path, record, interrupted)


def _draw(record: AttentionRecord, path: Path, console: Console) -> None:
    try:
        from ropewalk.bench.attention_figure import draw_attention_record
    except ModuleNotFoundError as error:
        console.print(f"no figure: {error.name} is not installed (pip install 'ropewalk\\[bench]')")
        return
    if draw_attention_record(record, path):
        console.print(f"figure: {path}", highlight=False)


def _choose_cases(
    cases: Sequence[AttentionCase], names: Sequence[str], device: torch.device, console: Console
) -> list[AttentionCase]:
    check_names("case", names, [case.name for case in cases])
    chosen = [case for case in cases if case.modes and (case.name in names or not names)]
    if device.type == "cpu" and not names:
        too_large = [case.name for case in chosen if case.flops("fwd") > CPU_FLOPS]
        if too_large:
            console.print(f"left out on a CPU unless named with --case: {', '.join(too_large)}", highlight=False)
        chosen = [case for case in chosen if case.name not in too_large]
    return chosen


def _modes_of(case: AttentionCase, options: _Options) -> list[str]:
    on_gpu = options.device.type == "cuda"
    return [mode for mode in case.modes if mode in options.modes and (on_gpu or mode != "memory")]


def _measure_case(case: AttentionCase, options: _Options) -> Iterator[AttentionRow]:
    modes = _modes_of(case, options)
    if not modes:
        return
    torch.compiler.reset()  # past its limit of recompilations, Dynamo would run what is compiled eagerly
    inputs = make_attention_inputs(case, options.device, options.seed)
    gates = {case.name: AttentionGate(case, inputs)}
    candidates = candidates_of(case, inputs, options.impls, options.peers)
    if case.yardstick is not None:
        other = options.cases[case.yardstick]
        other_inputs = make_attention_inputs(other, options.device, options.seed)
        gates[other.name] = AttentionGate(other, other_inputs)
        for mode, more in yardsticks_of(other, other_inputs, options.impls).items():
            candidates[mode] += more
        del other_inputs
    for mode in modes:
        yield from _measure_mode(case, mode, gates, candidates[mode], options)
    del inputs, gates, candidates
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def _measure_mode(
    case: AttentionCase,
    mode: str,
    gates: Mapping[str, AttentionGate],
    candidates: Sequence[Candidate],
    options: _Options,
) -> Iterator[AttentionRow]:
    """Gate all candidates, then measure those that are right against each other."""
    backward = direction_of(mode) != "fwd"
    right: list[_Right] = []
    for candidate in candidates:
        served_by, reason = candidate.serves(backward)
        row = AttentionRow(
            case,
            mode,
            candidate.impl,
            candidate.position,
            candidate.kind,
            "ok",
            served_by=served_by,
            yardstick=candidate.yardstick,
        )
        if reason is not None:
            yield replace(row, status="unsupported", reason=reason)
            continue
        try:
            attend = candidate.build()
            gate, whole = gates[candidate.case.name], candidate.from_inputs(attend)
            verdict = gate.check(whole, candidate.setting, backward=backward, parameters=candidate.parameters)
        except torch.AcceleratorError:
            raise  # nothing that runs on the GPU after it can be trusted
        except Exception as error:
            # Another library may fail in any way, and of ours the others are still worth measuring. The message may
            # hold paths: it is printed, and kept out of records.
            options.console.print(f"{candidate.label} failed on {case.name} {mode}: {error}", markup=False)
            yield replace(row, status="failed", reason=type(error).__name__)
            continue
        finite = verdict.error if math.isfinite(verdict.error) else None
        row = replace(row, error=finite, error_budget=verdict.budget)
        if verdict.complaint is None:
            right.append(_Right(candidate, attend, row))
        else:
            yield replace(row, status="wrong", reason=verdict.complaint)
    if mode == "memory":
        for candidate, attend, row in right:
            inputs = candidate.inputs
            held = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
            peak = held + peak_memory(_call(mode, candidate, attend), options.device)
            yield replace(row, peak_bytes=peak, floor_bytes=case.training_bytes())
    elif right:
        yield from _time_mode(case, mode, right, options)


class _Right(NamedTuple):
    """A candidate whose results are right, and what is known of it so far."""

    candidate: Candidate
    attend: Callable[..., Tensor]
    row: AttentionRow


def _time_mode(case: AttentionCase, mode: str, right: Sequence[_Right], options: _Options) -> list[AttentionRow]:
    """Time everything that is right against each other, by each protocol."""
    measured = []
    seed, device = options.seed, options.device
    rows = {row.label: row for _, _, row in right}
    flops = {row.label: candidate.case.flops(mode, seed) for candidate, _, row in right}
    read = case.cache_bytes(seed) if case.form == "cache" else None
    with torch.set_grad_enabled(direction_of(mode) != "fwd"):
        calls = {row.label: _call(mode, candidate, attend) for candidate, attend, row in right}
        hosts = {}
        if device.type == "cuda" and case.flops("fwd", seed) < SMALL_FLOPS:
            hosts = {name: time_host(call, device, calls=8, repeats=10) for name, call in calls.items()}
        if read is not None:
            rows[COPY], calls[COPY] = AttentionRow(case, mode, COPY, "none", "anchor", "ok"), _copy(read, device)
        for protocol in options.protocols or (("hot", "cool") if mode in ("fwd", "bwd") else ("hot",)):
            samples = time_bursts(calls, device, PROTOCOLS[protocol], rounds=options.rounds)
            for name, times in samples.items():
                spread = quantiles(times)
                row = replace(
                    rows[name],
                    protocol=protocol,
                    time=spread,
                    rounds=len(times),
                    tflops=flops[name] / spread.p50 / 1e6 if name in flops else None,
                    gb_per_s=None if read is None else read / spread.p50 / 1e3,
                    ratios=ratios(samples, name),
                    host=hosts.get(name),
                )
                measured.append(row)
    return measured


def _copy(moved: int, device: torch.device) -> Call:
    """A copy that reads half so many bytes, and writes the other half."""
    source = torch.randn(moved // 4, device=device).bfloat16()
    copied = torch.empty_like(source)
    return lambda: copied.copy_(source)


def _call(mode: str, candidate: Candidate, attend: Callable[..., Tensor]) -> Call:
    """What is timed, or measured in bytes, of one candidate."""
    grad, direction = candidate.inputs.grad, direction_of(mode)
    if direction == "fwd":
        return functools.partial(attend, *candidate.tensors())
    leaves = [x.detach().requires_grad_() for x in candidate.tensors()]
    wanted = (*leaves, *candidate.parameters)
    if direction == "bwd":
        out = attend(*leaves)
        return functools.partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*leaves), wanted, grad)
