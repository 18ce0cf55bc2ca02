"""The benchmark of context parallelism: forward and backward on all processes, against the whole call on each.

Every rank runs the same program; the first one writes and prints. Under torchrun the processes are there already.
"""

from __future__ import annotations

import datetime
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import Row, Unit
from ropewalk.bench.core.options import Options, choose_device
from ropewalk.bench.core.runner import Bench, Candidate, OursError, Rates, Right, run_benches
from ropewalk.bench.core.summary import number
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.core.timing import interleave, quantiles, ratios
from ropewalk.bench.parallel.cases import CASES, LLAMA, MODES, Inputs, ParallelCase, make_inputs, quick, shrink
from ropewalk.bench.parallel.gate import SHORT, Gate
from ropewalk.bench.parallel.llama import Trainee
from ropewalk.bench.parallel.peers import NO_ROPE, ONE, OURS, PEERS, Call, barrier, one_process, ours, run_of_peer

ROUNDS = (2, 20)  # of a case: at least and at most
SECONDS = 5.0  # of a case's rounds, unless the least ones take longer
_TIMEOUT = datetime.timedelta(seconds=180)  # of an exchange: kernels are compiled before some
_BURST = 30e-3  # seconds that the repeats of a call take together, or one call
_LONG = 1.0  # seconds of a call
_LOSS = 2.0**-8  # a rounding to bfloat16: how far the losses of one and of several processes may be apart


def run_parallel_bench(options: Options) -> None:
    """Measure context parallelism, write a record, and print a summary.

    Under torchrun each process calls this. Otherwise it starts them.

    Raises:
        ValueError: a CPU without `quick`, a record that exists or cannot be resumed.
        OursError: at the end, if ours was wrong or failed.
    """
    device = choose_device(options.device)
    if device.type == "cpu" and not options.quick:
        raise ValueError("the device is a CPU, where the cases take hours: --quick has small ones")
    if options.resume and options.output is None:
        raise ValueError("there is no record to resume: say with output which")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=_TIMEOUT)
        try:
            measure_all(options)
        finally:
            dist.destroy_process_group()
        return
    count = options.processes or (torch.cuda.device_count() if device.type == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_work, (count, backend, str(Path(folder, "store")), options), count)
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            raise OursError(last.removeprefix(f"{OursError.__module__}.{OursError.__name__}: ")) from error


def choose_parts(parts: Sequence[str]) -> list[str]:
    """Choose the names of cases that have one of the parts in them; all by default."""
    names = [case.name for case in CASES]
    for part in parts:
        if not any(part in name for name in names):
            raise ValueError(f"no case has {part!r} in its name; there are: {', '.join(names)}")
    return [name for name in names if not parts or any(part in name for part in parts)]


def _work(rank: int, size: int, backend: str, store: str, options: Options) -> None:
    """Run one of the processes that were started here."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        measure_all(options)
    finally:
        dist.destroy_process_group()


def measure_all(options: Options, console: Console | None = None) -> None:
    """Measure the cases within a group that is there. Called by every rank."""
    kind = choose_device(options.device).type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    console = console or default_console()
    bench = ParallelBench(options, device, console)
    if bench.rank == 0:
        try:
            run_benches(bench.name, [bench], options, device, console)
        finally:
            if not bench.is_shared:  # the first rank raises, and the others have nothing to do
                bench.share([])
        return
    for case, modes in bench.left(set()):
        for _, rows in bench.measure(case, modes, {}):
            for _ in rows:
                pass


@dataclass(frozen=True)
class _Timed:
    """A call, the seconds of its first run, and what the row says of it."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)


class _Opened(NamedTuple):
    inputs: Sequence[Inputs]  # of the short case, and of the whole one
    gates: Sequence[Mapping[bool, Gate]]  # of both, with positions and without


class ParallelBench(Bench):
    """One rank's part of the measurements. Whether something is right or failed is agreed on by all."""

    name = "parallel"
    cases = CASES
    modes = MODES
    impls = ()
    peers = PEERS
    columns = (
        ("efficiency", number("efficiency", ".3f")),
        ("MB", number("bytes_received", ".1f", 1e6)),
        ("peak, GiB", number("peak_bytes", ".2f", 2**30)),
        ("tokens/s", number("tokens_per_second", ",.0f")),
        ("error / budget", number("error", ".2f")),
    )

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        self.rank, self.size, self.is_shared = dist.get_rank(), dist.get_world_size(), False
        if options.quick:
            self.cases = tuple(quick(case, device) for case in self.cases)
        super().__init__(options, device, console)
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))
        self.control = dist.new_group(backend="gloo", timeout=_TIMEOUT)  # for words and times, beside the device
        self._noted = time.perf_counter()
        self._losses: list[float] = []  # of one process

    @classmethod
    def launch(cls, options: Options) -> bool:
        """Start the processes."""
        run_parallel_bench(options)
        return True

    @property
    def given(self) -> Mapping[str, object]:
        transport = str(dist.get_backend())
        return {"ranks": self.size, "transport": transport, "quick": self.options.quick, "rounds": self._rounds}

    @property
    def _rounds(self) -> int:
        return self.options.rounds or ROUNDS[1]

    def left(self, done: set[Unit]) -> list[tuple[Any, list[str]]]:
        """Return what the first rank has to measure."""
        return self.share(super().left(done))

    def share(self, value: Any) -> Any:
        """Return the first rank's value on all."""
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        self.is_shared = True
        return values[0]

    def note(self, text: str) -> None:
        """Print what is done, with the seconds since the last note: building kernels may take most of them."""
        if self.rank == 0:
            now = time.perf_counter()
            print(f"{text}, {now - self._noted:.1f} s", file=sys.stderr, flush=True)
            self._noted = now

    def judge(self, row: Row, check: Callable[[], tuple[Verdict, Any]]) -> tuple[Row, Any]:
        """Return a row with the worst status of all ranks, its reason, and the largest error as part of its budget."""
        timed = None
        try:
            verdict, timed = check()
            mine = ("ok" if verdict.complaint is None else "wrong", verdict.complaint, verdict.error)
        except Exception as error:  # another library's call may fail in any way; that it failed is the result
            mine = ("failed", f"{type(error).__name__}: {error}"[:300], 0.0)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=self.control)
        status, reason, _ = max(every, key=lambda one: ("ok", "wrong", "failed").index(one[0]))
        error_of_all = max(one[2] for one in every)
        self.note(f"{row['case'].name}: {row['impl']}: {status}")
        row = {**row, "ranks": self.size, "status": status}
        row |= {} if reason is None else {"reason": reason}
        row |= {"error": error_of_all, "error_budget": 1.0} if error_of_all < float("inf") else {}
        return row, timed

    def open(self, case: ParallelCase) -> _Opened | None:
        """Make the inputs and gates of a short case, whose gradients are compared whole, and of the case."""
        if case.setting == LLAMA:
            return None
        short = shrink(case, SHORT // 2 if self.options.quick else SHORT)
        inputs = [make_inputs(one, self.mesh, self.device, self.options.seed) for one in (short, case)]
        return _Opened(inputs, [{bare: Gate(one, bare) for bare in (False, True)} for one in inputs])

    def candidates(self, case: ParallelCase, mode: str, opened: _Opened | None) -> Iterator[Candidate]:
        """Yield the call on one process, ours, and the peers; or both ways to train a model."""
        if opened is None:
            for name, kind in ((ONE, "anchor"), (OURS, "ours")):
                yield Candidate(name, kind, functools.partial(self._check_training, case, name))
            return
        for name, kind, make in ((ONE, "anchor", one_process), (OURS, "ours", ours)):
            yield Candidate(name, kind, functools.partial(self._check, name, make, opened))
        for peer in self.found:
            make = functools.partial(run_of_peer, peer=peer, mesh=self.mesh)
            check = functools.partial(self._check, peer.name, make, opened)
            yield Candidate(peer.name, "peer", check, reason=peer.why_not(case))

    def _check(self, name: str, make: Callable[[Inputs], Call], opened: _Opened) -> tuple[Verdict, _Timed]:
        """Compare all results of the short case, then sampled rows of the whole one, whose bytes are counted."""
        whole = name == ONE
        (short, inputs), gates = opened.inputs, [gates[name in NO_ROPE] for gates in opened.gates]
        call = make(short)
        with call.context():
            of_short = gates[0].check_all(call(), whole)
        call = make(inputs)
        on_gpu, free, before = self.device.type == "cuda", 0, 0
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            free, before = torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        begun = time.perf_counter()
        with call.context():
            results = call()
            more = dict(call.more)
            if on_gpu:
                torch.cuda.synchronize(self.device)
                more["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) - before
                more["device_bytes"] = free - torch.cuda.mem_get_info(self.device)[0]
            seconds = time.perf_counter() - begun
            of_rows = gates[1].check_rows(results, whole)
        worst = max(of_short, of_rows, key=lambda verdict: (verdict.complaint is not None, verdict.error))
        return worst, _Timed(call, call.context, seconds, more)

    def _check_training(self, case: ParallelCase, name: str) -> tuple[Verdict, _Timed]:
        trainee = Trainee(case, self.mesh, self.device, name == OURS, self.options.seed)
        losses = []
        for _ in range(2):  # the second one after an update
            loss = trainee.step().clone()
            if trainee.layout is not None:
                dist.all_reduce(loss)
            losses.append(float(loss))
        if name == ONE:
            self._losses = losses
        share = max(abs(a / b - 1) for a, b in zip(losses, self._losses, strict=True)) / _LOSS
        complaint = f"the losses are {losses}, of one process {self._losses}"
        return Verdict(share, 1.0, None if share <= 1 else complaint), _Timed(trainee.step)

    def time(self, case: ParallelCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time the calls in turns, in an order that all ranks shuffle alike. A round has the slowest rank's time."""
        timed: dict[str, _Timed] = {name: one for name, (_, one) in right.items()}
        if not timed:
            return

        def time_of(name: str, repeats: int) -> float:
            with timed[name].context():
                return self._largest(self._time(timed[name].call, repeats))

        # A long call was timed well enough when it was checked.
        seconds = {name: self._largest(one.seconds) for name, one in timed.items()}
        once = {name: 1e6 * seconds[name] if seconds[name] > _LONG else time_of(name, 1) for name in timed}
        repeats = {name: max(1, min(10, round(_BURST * 1e6 / once[name]))) for name in timed}
        of_round = sum(repeats[name] * once[name] for name in timed) / 1e6
        rounds = max(ROUNDS[0], min(self._rounds, int(SECONDS / of_round) if of_round else ROUNDS[1]))
        samples = interleave(
            timed, lambda order: {name: time_of(name, repeats[name]) for name in order}, warmup=0, rounds=rounds
        )
        for name, (row, one) in right.items():
            times = quantiles(samples[name])
            more = {key: int(self._largest(x)) if isinstance(x, int) else x for key, x in one.more.items()}
            row = {**row, **more, "time": times, "rounds": rounds, "ratios": ratios(samples, name)}
            if ONE in samples and row["kind"] != "anchor":
                pairs = zip(samples[ONE], samples[name], strict=True)
                row["efficiency"] = statistics.median(alone / (self.size * other) for alone, other in pairs)
            if case.setting == LLAMA:  # on one process each trains on a whole sequence
                sequences = self.size if row["kind"] == "anchor" else 1
                row["tokens_per_second"] = sequences * case.tokens / times.p50 * 1e6
            yield row

    def _largest(self, value: float) -> float:
        """Return the largest of all ranks."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return float(found)

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
