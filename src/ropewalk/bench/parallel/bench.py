"""The benchmark of context parallelism: forward and backward on all processes, against the whole call on each.

Every rank runs the same program; the first one writes and prints, the others print failures alone. Under torchrun the
processes are there already.
"""

from __future__ import annotations

import datetime
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from ropewalk.bench.core import timing
from ropewalk.bench.core.gate import Verdict, worst
from ropewalk.bench.core.load import Row, Unit
from ropewalk.bench.core.options import Options, choose_device
from ropewalk.bench.core.runner import Bench, Candidate, OursError, Rates, Right, run_benches
from ropewalk.bench.core.summary import number
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.parallel import cases
from ropewalk.bench.parallel.cases import (
    CASES,
    LLAMA,
    MODES,
    NO_ROPE,
    NODES,
    ONE,
    OURS,
    PEERS,
    VARIANTS,
    Call,
    ParallelCase,
    Variant,
)

SHORT = 2048  # tokens of the case whose gradients are compared
ROUNDS = (2, 20)  # of a case: at least and at most
SECONDS = 3.0  # of a case's rounds, unless the least ones take longer
_TIMEOUT = datetime.timedelta(seconds=180)  # of an exchange: kernels are compiled before some
_BURST = 30e-3  # seconds that the repeats of a call take together, or one call
_LONG = 1e6  # µs of a run beside which a kernel's compilation is short
_BUILT = 0.01  # of a run's time that the compilation of kernels may take: it is beside the kernels before it
_LOSS = 2.0**-8  # a rounding to bfloat16: how far the losses of one and of several processes may be apart
_STATUSES = ("ok", "wrong", "failed")  # the worst one last


class Problem(NamedTuple):
    """The inputs of a case, what is right (with positions or bare), and this rank's shards, once they are asked for."""

    inputs: cases.Inputs
    truths: Callable[[bool], list[cases.Truth]]
    shards: Callable[[], list[torch.Tensor]]


Opened = Callable[[str], Sequence[Problem]]  # a candidate's short problem and its whole one


def run_parallel_bench(options: Options) -> None:
    """Measure, record and print as `run_benches` does; under torchrun in each process, otherwise it starts them."""
    device, options = choose_device(options.device), replace(options, cases=choose_parts(options.cases))
    if device.type == "cpu" and not options.quick:
        raise ValueError("the device is a CPU, where the cases take hours: --quick has small ones")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _work(int(os.environ["LOCAL_RANK"]), options)
    count = options.processes or (torch.cuda.device_count() if device.type == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_work, (options, f"file://{folder}/store", count), count)
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


def _work(rank: int, options: Options, store: str | None = None, size: int = -1) -> None:
    """Run one process on its own GPU; without a store it has what torchrun says."""
    backend, device = "gloo", torch.device("cpu")
    if choose_device(options.device).type == "cuda":
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif store is not None:
        torch.set_num_threads(1)
    dist.init_process_group(backend, store, _TIMEOUT, size, -1 if store is None else rank)
    try:
        bench = ParallelBench(options, device, default_console())
        if dist.get_rank() > 0:
            for case, modes in bench.left(set()):
                for _, rows in bench.measure(case, modes, {}):
                    list(rows)
            return
        try:
            run_benches(bench.name, [bench], options, device, bench.console)
        finally:
            if not bench.is_shared:  # the first rank raises, and the others have nothing to do
                bench.share([])
    finally:
        dist.destroy_process_group()


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
    launch = staticmethod(run_parallel_bench)  # starts the processes
    is_shared = False  # whether the other ranks know what is to be measured

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        if options.quick:
            self.cases = tuple(case.quick(device) for case in self.cases)
        super().__init__(options, device, console)
        self.size, self.rounds = dist.get_world_size(), options.rounds or ROUNDS[1]
        self.mesh, self.on_gpu = init_device_mesh(device.type, (self.size,)), device.type == "cuda"
        self.nodes = None
        if self.size > NODES and self.size % NODES == 0:
            names = ("between", "within")
            self.nodes = init_device_mesh(device.type, (NODES, self.size // NODES), mesh_dim_names=names)
        self.control = dist.new_group(backend="gloo", timeout=_TIMEOUT)  # for words and times, beside the device
        self._losses: list[float] = []  # of one process

    @property
    def row_options(self) -> Mapping[str, object]:
        transport = str(dist.get_backend())
        return {"ranks": self.size, "transport": transport, "quick": self.options.quick, "rounds": self.rounds}

    def left(self, done: set[Unit]) -> list[tuple[Any, list[str]]]:
        return self.share(super().left(done))

    def share(self, value: Any) -> Any:
        values, self.is_shared = [value], True
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def _gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=self.control)
        return every

    def judge(self, row: Row, check: Callable[[], tuple[Verdict, Any]]) -> tuple[Row, Any]:
        """Return the row of the rank with the worst status, then with the largest error as part of its budget."""
        row, timed = super().judge({**row, "ranks": self.size}, check)
        every = self._gather(row)
        return max(every, key=lambda one: (_STATUSES.index(one["status"]), one.get("error", math.inf))), timed

    def open(self, case: ParallelCase) -> Opened | None:
        """Make the inputs of a short case, whose gradients are compared whole, and of the case; what is right later."""
        if case.setting == LLAMA:
            return None
        short = case.shrink(SHORT // 2 if self.options.quick else SHORT)
        inputs = [cases.make_inputs(one, self.mesh, self.device, self.options.seed) for one in (short, case)]

        def problem(index: int, of: cases.Inputs) -> Problem:
            return Problem(of, cache(partial(cases.truths_of, of, index == 0)), cache(partial(cases.shard, of)))

        @cache
        def on(nodes: int) -> list[Problem]:
            mesh = self.mesh if nodes == 1 else self.nodes
            assert mesh is not None
            moved = inputs if nodes == 1 else [cases.on_mesh(one, mesh) for one in inputs]
            return [problem(index, one) for index, one in enumerate(moved)]

        def problems(name: str) -> list[Problem]:
            found = on(VARIANTS[name].nodes if name in VARIANTS else 1)
            part = cases.fit_yardstick(inputs[1], self.mesh) if name == ONE else inputs[1]
            return found if part is inputs[1] else [found[0], problem(1, part)]

        return problems

    def candidates(self, case: ParallelCase, mode: str, opened: Opened | None) -> Iterator[Candidate]:
        """Yield the call on one process, ours by each method, and the peers; or both ways to train a model."""
        if opened is None:
            for name, kind in ((ONE, "anchor"), (OURS, "ours")):
                yield Candidate(name, kind, partial(self._check_training, case, name))
            return
        default = Variant(cases.choose_method(opened(OURS)[1].inputs))
        variants = [(name, VARIANTS[name]) for name in case.variants if VARIANTS[name] != default]
        why = f"on {self.size} processes, which are no {NODES} nodes of several"
        ours = [(name, "ours", why if one.nodes > 1 and self.nodes is None else None) for name, one in variants]
        peers = [(peer.name, "peer", peer.why_not(case)) for peer in self.found]
        for name, kind, reason in ((ONE, "anchor", None), (OURS, "ours", None), *ours, *peers):
            yield Candidate(name, kind, partial(self._check, name, opened), reason=reason)

    def _check(self, name: str, opened: Opened) -> tuple[Verdict, Call]:
        """Compare all results of the short case, then sampled rows of the whole one, whose bytes are counted."""
        verdicts = []
        problems = opened(name)
        for inputs, truths, shards in problems:
            call = cases.make_call(name, inputs, shards, self.mesh)
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
                free, before = torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            results: list[torch.Tensor] = []
            with call.context(), _builds() as built:
                call.first = self._clock(lambda call=call, results=results: results.extend(call.run()))  # type: ignore[misc]
                call.first *= sum(built) <= _BUILT * call.first
                if self.on_gpu:
                    call.more["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) - before
                    call.more["device_bytes"] = free - torch.cuda.mem_get_info(self.device)[0]
                verdicts.append(cases.check_results(results, truths(name in NO_ROPE), whole=name == ONE))
            del results  # before the next one's memory is measured
        if name == ONE:
            whole, part = opened(OURS)[1].inputs.case.tokens, problems[1].inputs.case.tokens
            call.scale = (whole / part) ** 2
            call.more |= {"yardstick_tokens": part} if part < whole else {}
        return max(verdicts, key=lambda verdict: (verdict.complaint is not None, verdict.error)), call

    def _check_training(self, case: ParallelCase, name: str) -> tuple[Verdict, Call]:
        """Compare the losses of two steps, the second one after an update."""
        step = cases.training_step(case, self.mesh, self.device, name == OURS, self.options.seed)
        losses = []
        for _ in range(2):
            loss = step().clone()
            if name == OURS:
                dist.all_reduce(loss)
            losses.append(float(loss))
        if name == ONE:
            self._losses = losses
        share = worst(abs(a / b - 1) for a, b in zip(losses, self._losses, strict=True)) / _LOSS
        complaint = f"the losses are {losses}, of one process {self._losses}"
        return Verdict(share, 1.0, None if share <= 1 else complaint), Call(step)

    def time(self, case: ParallelCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time the calls in turns, in an order that all ranks shuffle alike. A round has the slowest rank's time."""
        calls: dict[str, Call] = {name: call for name, (_, call) in right.items()}
        if not calls:
            return
        first = {name: self._gather(call.first) for name, call in calls.items()}
        # The check's own run may have compiled kernels.
        is_right = {name: not case.once and min(times) > _LONG for name, times in first.items()}
        once = {name: max(first[name]) if is_right[name] else self._time(call, 1) for name, call in calls.items()}
        if case.once:
            rounds, samples = 1, {name: [time] for name, time in once.items()}
        else:
            repeats = {name: max(1, min(10, round(_BURST * 1e6 / once[name]))) for name in calls}
            round_seconds = sum(repeats[name] * once[name] for name in calls) / 1e6
            rounds = max(ROUNDS[0], min(self.rounds, int(SECONDS / round_seconds)))

            def one_round(order: Sequence[str]) -> dict[str, float]:
                return {name: self._time(calls[name], repeats[name]) for name in order}

            samples = timing.interleave(calls, one_round, warmup=0, rounds=rounds)
        samples = {name: [time * calls[name].scale for time in times] for name, times in samples.items()}
        part = calls[ONE].more.get("yardstick_tokens") if ONE in calls else None
        for name, (row, call) in right.items():
            times = timing.quantiles(samples[name])
            more = {key: max(self._gather(x)) if isinstance(x, int) else x for key, x in call.more.items()}
            row = {**row, **more, "time": times, "rounds": rounds, "ratios": timing.ratios(samples, name)}
            if ONE in samples and row["kind"] != "anchor":
                pairs = zip(samples[ONE], samples[name], strict=True)
                row["efficiency"] = statistics.median(alone / (self.size * other) for alone, other in pairs)
                row |= {"yardstick_tokens": part} if part is not None else {}
            if case.setting == LLAMA:  # on one process each trains on a whole sequence
                sequences = self.size if row["kind"] == "anchor" else 1
                row["tokens_per_second"] = sequences * case.tokens / times.p50 * 1e6
            yield row

    def _time(self, call: Call, repeats: int) -> float:
        """Time a call, in µs, on the slowest rank."""

        def repeat() -> None:
            for _ in range(repeats):
                call.run()

        with call.context():
            return max(self._gather(self._clock(repeat) / repeats))

    def _clock(self, run: Callable[[], object]) -> float:
        """Time a function on this rank, in µs, from when all ranks are there."""
        if not self.on_gpu:
            dist.barrier()
            return timing.time_on_cpu(run)
        torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1, device=self.device))  # a barrier in the stream: the host does not wait
        return timing.time_on_gpu(run, self.device)


@contextmanager
def _builds() -> Iterator[list[float]]:
    """Collect the µs of each kernel that Triton compiles meanwhile; nothing where Triton is missing."""
    built: list[float] = []
    if find_spec("triton") is None:
        yield built
        return
    from triton import knobs

    def listen(*, times: Any, cache_hit: bool, **more: Any) -> None:
        built.extend([] if cache_hit else [times.total])

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        yield built
