"""The benchmark of the host's part of eager calls, as a user makes them.

A burst of calls is enqueued on an idle GPU and timed on the host alone. The multiple of PyTorch's simplest call,
`x.mul_(1.0)`, carries over to other hosts better than microseconds do: it takes turns with the candidates.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.attention.candidates import AUTO, Candidate, candidates_of, our_candidate
from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs, direction_of, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import AttentionPeer
from ropewalk.bench.attention.run import judge
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.options import check_names, choose_cases, choose_device, choose_dtype, choose_peers
from ropewalk.bench.core.runner import Benchmark, BenchResult, Job, Measured, Plan, Rates, run_plans
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.host.cases import CASES, CONTEXTS, HOST_PEERS, ROTATE
from ropewalk.bench.host.rotations import rotations_of
from ropewalk.bench.host.rows import HostRow, host_row
from ropewalk.bench.host.summary import print_host_summary
from ropewalk.bench.host.timing import MIN_ROUNDS, Timed, spread, time_turns
from ropewalk.bench.rope.run import MULTIPLY
from ropewalk.ops.attention.backends import BACKENDS

IMPLS = {"cuda": ("triton", "gluon", "flash", "sdpa"), "cpu": ("sdpa", "reference")}  # unless some are named
CPU_FLOPS = 2e8  # of a forward that a CPU runs unless a case is named
CALLS = {"cuda": 16, "cpu": 2}  # of a burst; on a GPU hundreds of launches at most, where its queue holds a thousand
SECONDS = {"cuda": 10.0, "cpu": 1.0}  # of the rounds of one mode

# A row so far, and the function that checks the result and returns what is timed.
Checked = tuple[HostRow, Callable[[], tuple[Verdict, Timed]]]


@dataclass(frozen=True)
class _Options:
    impls: Sequence[str]  # `AUTO` among them
    peers: Sequence[AttentionPeer]
    rounds: int
    seed: int
    device: torch.device
    console: Console


def run_host_bench(
    *,
    case_names: Sequence[str] = (),
    impls: Sequence[str] = (),
    modes: Sequence[str] = (),
    peers: str = "auto",
    output: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    rounds: int = 100,
    seed: int = 0,
    cases: Sequence[AttentionCase] = CASES,
    console: Console | None = None,
) -> BenchResult:
    """Measure the host's part of eager calls, write a record, and print a summary.

    Args:
        case_names: which of `cases`; none for all that suit the device.
        impls: which of our implementations of attention are measured beside impl=None; none for all but the reference
            on a GPU, and for SDPA and the reference on a CPU.
        modes: of the cases' modes; none for all.
        peers: "auto" for those that import, "none", or names of `HOST_PEERS` with commas between.
        output: the record's file, which must not exist unless it is resumed, or None for one under ./results/.
        resume: whether to go on with that record.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        dtype: "float16", "bfloat16" or "float32" for all cases; None for each case's own.
        rounds: how many bursts of each candidate are timed, at most.
        seed: of the random inputs.
        cases: what can be chosen from.
        console: where to print.

    Raises:
        ValueError: an unknown name, too few rounds, a device that PyTorch does not find, a record that exists already.
        OursError: at the end, if one of ours was wrong or failed.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console, target = console or default_console(), choose_device(device)
    check_names("impl", impls, BACKENDS)
    check_names("mode", modes, dict.fromkeys(mode for case in cases for mode in case.modes))
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds is {rounds}, but must be at least {MIN_ROUNDS}")
    chosen = choose_cases(
        choose_dtype(cases, dtype), case_names, target, lambda case: case.flops("fwd") > CPU_FLOPS, console
    )
    found, versions = choose_peers(HOST_PEERS, peers, target)
    impls = list(impls or IMPLS[target.type])
    options = _Options((AUTO, *impls), found, rounds, seed, target, console)
    jobs = [
        Job(
            case,
            case.name,
            [mode for mode in case.modes if mode in modes or not modes],
            functools.partial(_measure_case, case, options),
        )
        for case in chosen
    ]
    if not any(job.modes for job in jobs):
        named = ", ".join(case.name for case in chosen) or "none"
        raise ValueError(f"nothing is to be measured: the cases are {named}, and none has a mode that is named")
    if target.type == "cpu":
        console.print("warning: on a CPU a call's time includes its arithmetic", style="yellow", highlight=False)
    plan = Plan(HOST, jobs, versions, {"impls": impls, "rounds": rounds}, None)
    return run_plans("host", [plan], target, output=output, resume=resume, seed=seed, console=console)


HOST = Benchmark("host", host_row, print_host_summary, lambda record, path: False)


def _measure_case(case: AttentionCase, options: _Options, modes: Sequence[str], rates: Rates) -> Iterator[Measured]:
    torch.compiler.reset()  # past its limit of recompilations, Dynamo would run what is compiled eagerly
    inputs = make_attention_inputs(case, options.device, options.seed)
    gate = AttentionGate(case, inputs)
    found = candidates_of(case, inputs, options.impls, options.peers)
    for mode in modes:
        if mode == ROTATE:
            checked = rotations_of(case, mode, options.device, options.seed)
        else:
            checked = [_checked(mode, x, gate) for x in _candidates(case, mode, inputs, found, options.impls)]
        yield mode, _measure_mode(case, mode, checked, options)
    del inputs, gate, found, checked
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def _candidates(
    case: AttentionCase,
    mode: str,
    inputs: AttentionInputs,
    found: Mapping[str, Sequence[Candidate]],
    impls: Sequence[str],
) -> list[Candidate]:
    """List ours, then the peers; one that has no adapter with the mode's setting is listed to say so."""
    if case.form == "cache":
        return list({candidate.label: candidate for candidate in found["decode"]}.values())
    setting = mode.rpartition("-")[0]
    ours = [our_candidate(case, inputs, impl, setting) for impl in impls]
    peers = [candidate for candidate in found["train" if setting == "rope" else "fwd"] if candidate.kind == "peer"]
    if setting not in ("none", "rope"):
        reason = f"the benchmark has no adapter of it with {setting}"
        peers = [replace(peer, position=setting, choose=lambda backward: (None, reason)) for peer in peers]
    return [*ours, *peers]


def _checked(mode: str, candidate: Candidate, gate: AttentionGate) -> Checked:
    """Make the row of a candidate of attention and the check of its result."""
    trains = direction_of(mode) == "train"
    served_by, reason = candidate.choose(trains)
    status = "ok" if reason is None else "unsupported"
    row = HostRow(candidate.case, mode, candidate.impl, candidate.position, candidate.kind, status, reason, served_by)

    def check() -> tuple[Verdict, Timed]:
        attend, context = candidate.build(), CONTEXTS.get(candidate.impl, nullcontext)
        with context():
            verdict = gate.check(attend, candidate.setting, backward=trains, parameters=candidate.parameters)
        if not trains:
            return verdict, Timed(functools.partial(attend, *candidate.tensors()), context=context)
        leaves, grad = candidate.inputs.leaves(), candidate.inputs.grad
        wanted = (*leaves, *candidate.parameters)

        def backward(out: Tensor) -> object:
            return torch.autograd.grad(out, wanted, grad)

        return verdict, Timed(functools.partial(attend, *leaves), backward, context)

    return row, check


def _measure_mode(
    case: AttentionCase, mode: str, candidates: Sequence[Checked], options: _Options
) -> Iterator[HostRow]:
    """Gate all candidates, then time those that are right in turns with `mul_`."""
    device = options.device
    small = torch.ones(64, device=device)
    rows = {MULTIPLY: HostRow(case, mode, MULTIPLY, "none", "anchor", "ok")}
    timed = {MULTIPLY: Timed(functools.partial(small.mul_, 1.0))}
    for row, check in candidates:
        if row.status != "ok":
            yield row
            continue
        judged, call = judge(row, check, options.console)
        if call is None:
            yield judged
        else:
            rows[row.label], timed[row.label] = judged, call
    # A rotation's inputs say if it records.
    with torch.set_grad_enabled(mode == ROTATE or direction_of(mode) == "train"):
        calls, seconds = CALLS[device.type], SECONDS[device.type]
        samples = time_turns(timed, device, calls=calls, rounds=options.rounds, max_seconds=seconds)
    unit = spread([burst.total for burst in samples[MULTIPLY]]).median
    for name, bursts in samples.items():
        host = spread([burst.total for burst in bursts])
        forwards = [burst.forward for burst in bursts if burst.forward is not None]
        backwards = [burst.backward for burst in bursts if burst.backward is not None]
        yield replace(
            rows[name],
            host=host,
            multiple=host.over(unit),
            forward=spread(forwards) if forwards else None,
            backward=spread(backwards) if backwards else None,
            calls=calls,
            bursts=len(bursts),
        )
