"""The benchmark of context parallelism: forward and backward on all processes, against the whole call on each.

Every rank runs the same program; the first one writes and prints. Under torchrun the processes are there already.
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import load_record
from ropewalk.bench.core.options import choose_device, choose_path, choose_peers
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.resume import read_stopped
from ropewalk.bench.core.runner import OursError
from ropewalk.bench.core.sustained import ratios
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.core.timing import quantiles
from ropewalk.bench.parallel.cases import CASES, LLAMA, ParallelCase, make_inputs, quick, shrink
from ropewalk.bench.parallel.gate import SHORT, Gate
from ropewalk.bench.parallel.llama import Trainee
from ropewalk.bench.parallel.peers import (
    NO_ROPE,
    PEERS,
    Candidate,
    ParallelPeer,
    barrier,
    one_process,
    ours,
    peers_of,
)
from ropewalk.bench.parallel.rows import BENCHMARK, ONE, OURS, ParallelRow, parallel_row
from ropewalk.bench.parallel.summary import print_parallel_summary

ROUNDS = (2, 20)  # of a case: at least and at most
SECONDS = 5.0  # of a case's rounds, unless the least ones take longer
_TIMEOUT = datetime.timedelta(seconds=180)  # of an exchange: kernels are compiled before some
_BURST = 30e-3  # seconds that the repeats of a call take together, or one call
_LONG = 1.0  # seconds of a call
_LOSS = 2.0**-8  # a rounding to bfloat16: how far the losses of one and of several processes may be apart


@dataclass(frozen=True)
class ParallelOptions:
    """Options of a run, the same on each rank."""

    only: Sequence[str] = ()  # parts of the names of cases; none: all
    peers: str = "auto"
    output: Path | None = None
    resume: bool = False
    device: str | None = None
    quick: bool = False
    rounds: int = ROUNDS[1]
    seed: int = 0


def run_parallel_bench(options: ParallelOptions, processes: int | None = None) -> None:
    """Measure context parallelism, write a record, draw a figure, and print a summary.

    Under torchrun each process calls this. Otherwise it starts `processes` of them: one for each GPU, or 2 on a CPU.

    Args:
        options: the same on each rank.
        processes: how many to start, where torchrun did not.

    Raises:
        ValueError: no case has such a name, a CPU without `quick`, a record that exists or cannot be resumed.
        OursError: at the end, if ours was wrong or failed.
    """
    device = choose_device(options.device)
    chosen = choose_parts(options.only)
    if device.type == "cpu" and not options.quick:
        raise ValueError("the device is a CPU, where the cases take hours: --quick has small ones")
    if options.resume and options.output is None:
        raise ValueError("there is no record to resume: say with output which")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        try:
            measure_all(options, chosen)
        finally:
            dist.destroy_process_group()
        return
    count = processes or (torch.cuda.device_count() if device.type == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        try:
            spawn(_work, (count, store, options, chosen), count)
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            raise OursError(last.removeprefix(f"{OursError.__module__}.{OursError.__name__}: ")) from error


def choose_parts(parts: Sequence[str]) -> list[ParallelCase]:
    """Choose the cases that have one of the parts in their names; all by default."""
    for part in parts:
        if not any(part in case.name for case in CASES):
            raise ValueError(f"no case has {part!r} in its name; there are: {', '.join(case.name for case in CASES)}")
    return [case for case in CASES if not parts or any(part in case.name for part in parts)]


def _work(rank: int, size: int, store: str, options: ParallelOptions, cases: Sequence[ParallelCase]) -> None:
    """Run one of the processes that were started here."""
    device = choose_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        measure_all(options, cases)
    finally:
        dist.destroy_process_group()


def measure_all(options: ParallelOptions, cases: Sequence[ParallelCase], console: Console | None = None) -> None:
    """Measure the cases within a group that is there. Called by every rank."""
    bench = Bench(options)
    if options.quick:
        cases = [quick(case, bench.device) for case in cases]
    error: Exception | None = None
    path = None
    if bench.rank == 0:
        try:
            path, run, kept, done = _open(options, bench)
        except ValueError as raised:
            error = raised
    left = bench.share(None if error else [case for case in cases if bench.rank == 0 and case not in done])
    if error is not None:
        raise error
    if left is None:
        return  # the first rank raises
    if bench.rank != 0:
        for case in left:
            for _ in bench.measure(case):
                pass
        return
    console = console or default_console()
    assert path is not None
    bench.note(f"measuring {len(left)} cases")
    with RecordWriter(path, run, kept) as writer:
        for case in left:
            started = time.perf_counter()
            for row in bench.measure(case):
                writer.append(row)
            console.print(f"{case.name}: {time.perf_counter() - started:.1f} s", highlight=False)
        writer.end()
    _show(path, console)


def _open(
    options: ParallelOptions, bench: Bench
) -> tuple[Path, dict[str, Any], list[dict[str, Any]] | None, set[object]]:
    """Return the record's path, the line about the run, and of a resumed record the rows and cases that stay."""
    described = {"ranks": bench.size, "quick": options.quick, "rounds": options.rounds}
    run = {
        **describe_run(BENCHMARK, bench.device, bench.versions),
        "ranks": bench.size,
        "transport": str(dist.get_backend()),
        "seed": options.seed,
        "options": {BENCHMARK: described},
    }
    if not options.resume:
        return choose_path(options.output, run), run, None, set()
    assert options.output is not None
    stopped = read_stopped(options.output, run, {BENCHMARK: parallel_row})
    run = {**stopped.run, "resumed": [*stopped.run.get("resumed", ()), run["date"]]}
    return options.output, run, stopped.lines, {unit[1] for unit in stopped.units}


def _show(path: Path, console: Console) -> None:
    """Print and draw a record; raise if ours was wrong or failed."""
    record = load_record(path, {BENCHMARK: parallel_row})
    print_parallel_summary(record, console)
    console.print(f"record: {path}", highlight=False)
    try:
        from ropewalk.bench.parallel.figure import draw_parallel_record  # it loads matplotlib

        if draw_parallel_record(record, path.with_suffix(".png")):
            console.print(f"figure: {path.with_suffix('.png')}", highlight=False)
    except ModuleNotFoundError as error:
        console.print(rf"no figure: {error.name} is not installed (pip install 'ropewalk\[bench]')")
    bad = [row for row in record.of(ParallelRow) if row.kind != "peer" and row.status in ("wrong", "failed")]
    if bad:
        names = ", ".join(f"{row.description} is {row.status}: {row.reason}" for row in bad)
        raise OursError(f"{names}; {path.name} has the rest")


class Bench:
    """One rank's part of the measurements. Whether something is right or failed is agreed on by all."""

    def __init__(self, options: ParallelOptions) -> None:
        self.options = options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        kind = choose_device(options.device).type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.mesh: DeviceMesh = init_device_mesh(kind, (self.size,))
        self.control = dist.new_group(backend="gloo", timeout=_TIMEOUT)  # for words and times, beside the device
        peers, self.versions = choose_peers(PEERS, options.peers, self.device)
        self.peers: list[ParallelPeer] = peers
        self._before = self._peak = self._grown = 0.0  # bytes
        self._free = 0
        self._begun = self._seconds = 0.0
        self._noted = time.perf_counter()

    def note(self, text: str) -> None:
        """Print what is done, with the seconds since the last note: building kernels may take most of them."""
        if self.rank == 0:
            now = time.perf_counter()
            print(f"{text}, {now - self._noted:.1f} s", file=sys.stderr, flush=True)
            self._noted = now

    def share(self, value: Any) -> Any:
        """Return the first rank's value on all."""
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def agree(self, verdict: Verdict | Exception) -> tuple[str, str | None, float | None]:
        """Return the worst status of all ranks, its reason, and the largest error."""
        if isinstance(verdict, Exception):
            mine: tuple[str, str | None, float] = ("failed", f"{type(verdict).__name__}: {verdict}"[:300], 0.0)
        else:
            mine = ("ok" if verdict.complaint is None else "wrong", verdict.complaint, verdict.error)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=self.control)
        status, reason, _ = max(every, key=lambda one: ("ok", "wrong", "failed").index(one[0]))
        error = max(one[2] for one in every)
        return status, reason, error if error < float("inf") else None

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks, number by number."""
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control)
        return numbers.tolist()

    def measure(self, case: ParallelCase) -> Iterator[ParallelRow]:
        """Check all candidates of a case, then time those that are right in turns."""
        yield from self._train(case) if case.setting == LLAMA else self._attend(case)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _attend(self, case: ParallelCase) -> Iterator[ParallelRow]:
        short = shrink(case, SHORT // 2 if self.options.quick else SHORT)
        verdicts: dict[str, Any] = {}
        inputs = make_inputs(short, self.mesh, self.device, self.options.seed)
        gates = {bare: Gate(inputs, bare) for bare in (False, True)}
        for candidate in self._candidates(inputs):
            check = functools.partial(gates[candidate.impl in NO_ROPE].check_all, whole=candidate.kind == "anchor")
            verdicts[candidate.impl] = self._try(candidate, check)
            self.note(f"{case.name}: {candidate.impl}, {short.tokens} tokens: {verdicts[candidate.impl][0]}")
        del inputs, gates
        inputs = make_inputs(case, self.mesh, self.device, self.options.seed)
        gates = {bare: Gate(inputs, bare) for bare in (False, True)}
        rows, calls, contexts, seconds = {}, {}, {}, {}
        for candidate in self._candidates(inputs):
            row = ParallelRow(case, candidate.impl, candidate.kind, "ok", self.size, served_by=candidate.served_by)
            row = replace(row, bytes_received=candidate.bytes_received)
            status, reason, error = verdicts[candidate.impl]
            peak = grown = duration = 0.0
            if status == "ok":
                gate, whole = gates[candidate.impl in NO_ROPE], candidate.kind == "anchor"
                self._reset()
                status, reason, of_rows = self._try(candidate, functools.partial(self._check_rows, gate, whole))
                peak, grown, duration = self.largest([self._peak, self._grown, self._seconds])
                error = None if error is None or of_rows is None else max(error, of_rows)
                self.note(f"{case.name}: {candidate.impl}, {case.tokens} tokens: {status}")
            row = replace(row, status=status, reason=reason, error=error)
            row = replace(row, peak_bytes=int(peak) or None, device_bytes=int(grown) or None)
            if status != "ok":
                yield row
                continue
            rows[candidate.impl], calls[candidate.impl] = row, candidate
            contexts[candidate.impl], seconds[candidate.impl] = candidate.context, duration
        for peer in self.peers:
            unsupported = peer.why_not(case)
            if unsupported is not None:
                yield ParallelRow(case, peer.name, "peer", "unsupported", self.size, unsupported)
        yield from self._timed(rows, calls, contexts, seconds)

    def _candidates(self, inputs: Any) -> list[Candidate]:
        return [one_process(inputs), ours(inputs), *peers_of(inputs, self.peers, self.mesh)]

    def _check_rows(self, gate: Gate, whole: bool, results: Sequence[Any]) -> Verdict:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._peak = float(torch.cuda.max_memory_allocated(self.device) - self._before)
            self._grown = float(self._free - torch.cuda.mem_get_info(self.device)[0])
        self._seconds = time.perf_counter() - self._begun
        return gate.check_rows(results, whole)

    def _reset(self) -> None:
        """Begin to count the seconds and the bytes of a call."""
        self._peak = self._grown = self._before = self._seconds = 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._free = torch.cuda.mem_get_info(self.device)[0]
            self._before = float(torch.cuda.memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begun = time.perf_counter()

    def _try(self, candidate: Candidate, check: Callable[[list[Any]], Verdict]) -> tuple[str, str | None, float | None]:
        """Run a candidate once and judge it."""
        try:
            with candidate.context():
                results = candidate()
            verdict: Verdict | Exception = check(results)
        except Exception as error:  # another library's call may fail in any way; that it failed is the result
            verdict = error
        return self.agree(verdict)

    def _train(self, case: ParallelCase) -> Iterator[ParallelRow]:
        trainees: dict[str, Trainee] = {}
        rows: dict[str, ParallelRow] = {}
        losses: dict[str, list[float]] = {}
        for name, kind in ((ONE, "anchor"), (OURS, "ours")):
            try:
                trainees[name] = Trainee(case, self.mesh, self.device, name == OURS, self.options.seed)
                losses[name] = [self._loss(trainees[name]) for _ in range(2)]  # the second one after an update
                share = max(abs(a / b - 1) for a, b in zip(losses[name], losses[ONE], strict=True)) / _LOSS
                complaint = f"the losses are {losses[name]}, of one process {losses[ONE]}"
                verdict: Verdict | Exception = Verdict(share, 1.0, None if share <= 1 else complaint)
            except Exception as error:  # out of memory, for one
                verdict = error
            status, reason, share_of_all = self.agree(verdict)
            rows[name] = ParallelRow(case, name, kind, status, self.size, reason, error=share_of_all)
        for row in rows.values():
            if row.status != "ok":
                yield row
        right = {name: row for name, row in rows.items() if row.status == "ok"}
        calls: dict[str, Callable[[], object]] = {name: trainees[name].step for name in right}
        for row in self._timed(right, calls, {}, {}):
            assert row.time is not None
            sequences = self.size if row.kind == "anchor" else 1  # on one process each trains on a whole one
            yield replace(row, tokens_per_second=sequences * case.tokens / row.time.p50 * 1e6)

    def _loss(self, trainee: Trainee) -> float:
        loss = trainee.step().clone()
        if trainee.layout is not None:
            dist.all_reduce(loss)
        return float(loss)

    def _timed(
        self,
        rows: Mapping[str, ParallelRow],
        calls: Mapping[str, Callable[[], object]],
        contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
        seconds: Mapping[str, float],
    ) -> Iterator[ParallelRow]:
        """Time the calls in turns, in an order that all ranks shuffle alike. A round has the slowest rank's time."""

        def time_of(name: str, repeats: int) -> float:
            with contexts.get(name, nullcontext)():
                return self.largest([self._time(calls[name], repeats)])[0]

        names = list(calls)
        # A long call was timed well enough when it was checked.
        once = {name: 1e6 * seconds[name] if seconds.get(name, 0) > _LONG else time_of(name, 1) for name in names}
        repeats = {name: max(1, min(10, round(_BURST * 1e6 / once[name]))) for name in names}
        of_round = sum(repeats[name] * once[name] for name in names) / 1e6
        rounds = max(ROUNDS[0], min(self.options.rounds, int(SECONDS / of_round) if of_round else ROUNDS[1]))
        order, shuffle = list(names), random.Random(0).shuffle
        samples: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                samples[name].append(time_of(name, repeats[name]))
        for name, row in rows.items():
            efficiency = None
            if ONE in samples and row.kind != "anchor":
                pairs = zip(samples[ONE], samples[name], strict=True)
                efficiency = statistics.median(one / (self.size * other) for one, other in pairs)
            others = ratios(samples, OURS) if name == OURS else None
            row = replace(row, time=quantiles(samples[name]), rounds=rounds)
            yield replace(row, efficiency=efficiency, speed_over=others)

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        """Time a call on this rank, in µs, from when all ranks are there."""
        if self.device.type != "cuda":
            barrier(self.device)
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - begun) * 1e6 / repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        barrier(self.device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) * 1e3 / repeats
