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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.attention.candidates import Candidate, candidates_of, yardsticks_of
from ropewalk.bench.attention.cases import ALIASES, CASES, MODES, AttentionCase, direction_of, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import ATTENTION_PEERS, AttentionPeer
from ropewalk.bench.attention.rows import AttentionRow, GatedRow, attention_row
from ropewalk.bench.attention.summary import print_attention_summary
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.options import check_names, choose_cases, choose_device, choose_dtype, choose_peers
from ropewalk.bench.core.runner import Benchmark, BenchResult, Job, Measured, Plan, Rates, run_plans
from ropewalk.bench.core.sustained import PROTOCOLS, ratios, time_bursts
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.core.timing import COPY, Call, peak_memory, quantiles, time_host
from ropewalk.ops.attention.backends import BACKENDS

AnyRow = TypeVar("AnyRow", bound=GatedRow)
AnyCall = TypeVar("AnyCall")

CPU_FLOPS = 1e9  # of a forward that a CPU runs unless a case is named
SMALL_FLOPS = 1e11  # of a forward whose launches matter as much as its work: the host's time is recorded too


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
    resume: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    cases: Sequence[AttentionCase] = CASES,
    console: Console | None = None,
) -> BenchResult:
    """Measure attention, write a record and a figure beside it, and print a summary.

    Args:
        case_names: which of `cases`, by their names or by those in `ALIASES`; none for all that suit the
            device.
        impls: which of our implementations are measured as kernels, beside what impl=None takes; none for "triton" on a
            GPU and "reference" on a CPU.
        modes: of `MODES`.
        peers: "auto" for those that import, "none", or names with commas between.
        protocols: "hot", "cool"; none for both where kernels are alone, and hot elsewhere.
        output: the record's file, which must not exist unless it is resumed, or None for one under ./results/.
        resume: whether to go on with that record.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        dtype: "float16", "bfloat16" or "float32" for all cases; None for each case's own.
        rounds: how many rounds of bursts there are at most; None for the protocol's own number.
        seed: of the random inputs.
        cases: what can be chosen from.
        console: where to print.

    Raises:
        OursError: at the end, if one of ours was wrong or failed.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console, target = console or default_console(), choose_device(device)
    plan = plan_attentions(
        case_names=case_names,
        impls=impls,
        modes=modes,
        peers=peers,
        protocols=protocols,
        dtype=dtype,
        rounds=rounds,
        seed=seed,
        cases=cases,
        device=target,
        console=console,
    )
    return run_plans("attention", [plan], target, output=output, resume=resume, seed=seed, console=console)


def plan_attentions(
    *,
    case_names: Sequence[str],
    impls: Sequence[str],
    modes: Sequence[str],
    peers: str,
    protocols: Sequence[str],
    dtype: str | None,
    rounds: int | None,
    seed: int,
    cases: Sequence[AttentionCase],
    device: torch.device,
    console: Console,
) -> Plan:
    """Plan the measurements, of arguments as `run_attention_bench` takes them."""
    check_names("mode", modes, MODES)
    check_names("impl", impls, BACKENDS)
    check_names("protocol", protocols, PROTOCOLS)
    by_name = {case.name: case for case in choose_dtype(cases, dtype)}
    case_names = [name if name in by_name else ALIASES.get(name, name) for name in case_names]
    chosen = choose_cases(
        [case for case in by_name.values() if case.modes or case.name in case_names],
        case_names,
        device,
        lambda case: case.flops("fwd") > CPU_FLOPS,
        console,
    )
    found, versions = choose_peers(ATTENTION_PEERS, peers, device)
    check_names("yardstick", [case.yardstick for case in chosen if case.yardstick is not None], by_name)
    impls = list(impls or (("triton",) if device.type == "cuda" else ("reference",)))
    options = _Options(modes, impls, found, protocols, rounds, seed, device, console, by_name)
    jobs = [
        Job(case, case.name, _modes_of(case, options), functools.partial(_measure_case, case, options))
        for case in chosen
    ]
    given = {"impls": impls, "protocols": list(protocols), "rounds": rounds}
    return Plan(ATTENTION, jobs, versions, given, list(dict.fromkeys(case.dtype for case in chosen)))


def _draw(record: BenchRecord, path: Path) -> bool:
    from ropewalk.bench.attention.figure import draw_attention_record

    return draw_attention_record(record, path)


ATTENTION = Benchmark("attention", attention_row, print_attention_summary, _draw)


def _modes_of(case: AttentionCase, options: _Options) -> list[str]:
    on_gpu = options.device.type == "cuda"
    return [mode for mode in case.modes if mode in options.modes and (on_gpu or mode != "memory")]


def _measure_case(case: AttentionCase, options: _Options, modes: Sequence[str], rates: Rates) -> Iterator[Measured]:
    start = time.perf_counter()
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
        yield mode, _measure_mode(case, mode, gates, candidates[mode], options, rates)
    del inputs, gates, candidates
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    options.console.print(f"{case.name}: {seconds:.0f} s, with what had to be compiled", highlight=False)


def _measure_mode(
    case: AttentionCase,
    mode: str,
    gates: Mapping[str, AttentionGate],
    candidates: Sequence[Candidate],
    options: _Options,
    rates: Rates,
) -> Iterator[AttentionRow]:
    """Gate all candidates, then measure those that are right against each other."""
    backward = direction_of(mode) != "fwd"
    right: list[_Right] = []
    for candidate in candidates:
        served_by, reason = candidate.choose(backward)
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
        row, attend = judge(row, functools.partial(_check, candidate, mode, gates), options.console)
        if attend is None:
            yield row
        else:
            right.append(_Right(candidate, attend, row))
    if mode == "memory":
        for candidate, attend, row in right:
            inputs = candidate.inputs
            held = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
            peak = held + peak_memory(_call(mode, candidate, attend), options.device)
            yield replace(row, peak_bytes=peak, floor_bytes=case.training_bytes())
    elif right:
        yield from _time_mode(case, mode, right, options, rates)


def _check(
    candidate: Candidate, mode: str, gates: Mapping[str, AttentionGate]
) -> tuple[Verdict, Callable[..., Tensor]]:
    """Build a candidate's call and compare its results with the right ones."""
    attend = candidate.build()
    gate, whole, backward = gates[candidate.case.name], candidate.from_inputs(attend), direction_of(mode) != "fwd"
    verdict = gate.check(whole, candidate.setting, backward=backward, parameters=candidate.parameters)
    if direction_of(mode) == "bwd" and verdict.complaint is None:
        backward_call = _call(mode, candidate, attend)
        for _ in range(2):  # not every backward can run again over one forward
            backward_call()
    return verdict, attend


def judge(row: AnyRow, check: Callable[[], tuple[Verdict, AnyCall]], console: Console) -> tuple[AnyRow, AnyCall | None]:
    """Return a row with the verdict of its check, and the checked call if its result is right."""
    try:
        verdict, call = check()
    except torch.AcceleratorError:
        raise  # nothing that runs on the GPU after it can be trusted
    except Exception as error:
        # Another library may fail in any way, and of ours the others are still worth measuring. The message may
        # hold paths: it is printed, and kept out of records.
        console.print(f"{row.label} failed on {row.case.name} {row.mode}: {error}", markup=False)
        return replace(row, status="failed", reason=type(error).__name__), None
    finite = verdict.error if math.isfinite(verdict.error) else None
    row = replace(row, error=finite, error_budget=verdict.budget)
    if verdict.complaint is None:
        return row, call
    return replace(row, status="wrong", reason=verdict.complaint), None


class _Right(NamedTuple):
    """A candidate with right results, its call and its row so far."""

    candidate: Candidate
    attend: Callable[..., Tensor]
    row: AttentionRow


def _time_mode(
    case: AttentionCase, mode: str, right: Sequence[_Right], options: _Options, rates: Rates
) -> list[AttentionRow]:
    """Time everything that is right against each other, by each protocol."""
    measured = []
    seed, device = options.seed, options.device
    rows = {row.label: row for _, _, row in right}
    flops = {row.label: candidate.case.flops(mode, seed) for candidate, _, row in right}
    read = case.cache_bytes(seed) if case.form == "cache" else None
    product = rates["matmul_tflops"][case.dtype] if read is None else None
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
                tflops = flops[name] / spread.p50 / 1e6 if name in flops else None
                row = replace(
                    rows[name],
                    protocol=protocol,
                    time=spread,
                    rounds=len(times),
                    tflops=tflops,
                    gb_per_s=None if read is None else read / spread.p50 / 1e3,
                    ratios=ratios(samples, name),
                    host=hosts.get(name),
                    matrix_ratio=tflops / product if tflops is not None and product is not None else None,
                )
                measured.append(row)
    return measured


def _copy(moved: int, device: torch.device) -> Call:
    """Make a copy that reads half so many bytes, and writes the other half."""
    source = torch.randn(moved // 4, device=device).bfloat16()
    copied = torch.empty_like(source)
    return lambda: copied.copy_(source)


def _call(mode: str, candidate: Candidate, attend: Callable[..., Tensor]) -> Call:
    """Make the call of a candidate that is timed, or measured in bytes."""
    grad, direction = candidate.inputs.grad, direction_of(mode)
    if direction == "fwd":
        return functools.partial(attend, *candidate.tensors())
    leaves = [x.detach().requires_grad_() for x in candidate.tensors()]
    wanted = (*leaves, *candidate.parameters)
    if direction == "bwd":
        out = attend(*leaves)
        return functools.partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*leaves), wanted, grad)
