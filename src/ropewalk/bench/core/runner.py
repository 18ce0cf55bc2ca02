"""The run of all benchmarks: gate each candidate, time what is right by turns, record, print and draw.

A benchmark is a `Bench`: it declares its cases, and per case and mode the candidates and how they are timed.
"""

from __future__ import annotations

import gc
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from ropewalk.bench.core import load
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import ALL, Record, Row, Unit, describe, label, read_record, unit_of, variant_of
from ropewalk.bench.core.options import DTYPES, MISSING, Options, check_names, choose_device, choose_path, choose_peers
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.summary import Column, print_summary
from ropewalk.bench.core.sustained import measure_rates
from ropewalk.bench.core.terminal import default_console, progress_bar

Rates = Mapping[str, Any]  # as `measure_rates` returns them
# By label: the row so far of a candidate whose result is right, and what its check returned beside the verdict.
Right = Mapping[str, tuple[Row, Any]]


class OursError(RuntimeError):
    """One of our own implementations was wrong or failed; the record is complete and has the reason."""


@dataclass(frozen=True)
class Candidate:
    """An implementation to measure: `check` builds it, runs it once, and returns the verdict and what is timed."""

    impl: str
    kind: str  # "ours", "peer", or "anchor": what others are held against
    check: Callable[[], tuple[Verdict, Any]]
    position: str = "none"  # where positions come in, as records name it
    reason: str | None = None  # why the case is not supported
    served_by: str | None = None  # ours: the implementation that runs the case
    yardstick: str | None = None  # anchors: the case that is computed, where it is another one


def new_row(case: Any, mode: str, impl: str, kind: str, position: str = "none") -> Row:
    return {"case": case, "mode": mode, "impl": impl, "position": position, "kind": kind, "status": "ok"}


class Bench(ABC):
    name: ClassVar[str]  # as records have it
    cases: Sequence[Any]  # dataclasses with a name, a dtype and modes
    modes: ClassVar[Mapping[str, str]]  # with their meanings
    impls: ClassVar[Sequence[str]]  # that can be named
    peers: ClassVar[Mapping[str, Any]]  # likewise
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of cases
    protocols: ClassVar[Sequence[str]] = ()  # that can be chosen from
    columns: ClassVar[Sequence[Column]] = ()  # of the summary, beside the common ones
    launch: ClassVar[Any] = None  # runs it in processes of its own, to the end

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        self.options, self.device, self.console = options, device, console
        check_names("impl", options.impls, self.impls)
        check_names("mode", options.modes, self.modes)
        check_names("protocol", options.protocols, self.protocols)
        check_names("dtype", filter(None, [options.dtype]), DTYPES)
        cases = [case if options.dtype is None else replace(case, dtype=options.dtype) for case in self.cases]
        self.known = {case.name: case for case in cases}
        named = [name if name in self.known else self.aliases.get(name, name) for name in options.cases]
        check_names("case", named, self.known)
        left_out = dict.fromkeys(case.name for case in cases if device.type == "cpu" and self.is_too_large(case))
        if left_out and not named:
            console.print(f"left out on a CPU unless named with --case: {', '.join(left_out)}", highlight=False)
        cases = [case for case in cases if (case.name in named if named else case.name not in left_out)]
        self.jobs = [(case, modes) for case in cases if (modes := self.modes_of(case))]
        if not self.jobs:
            those = ", ".join(dict.fromkeys(case.name for case in cases)) or "none"
            hint = f"; on a CPU name one with --case ({', '.join(left_out)})" if left_out and not named else ""
            raise ValueError(f"nothing is to be measured: the cases are {those}, and none has a chosen mode{hint}")
        self.found, self.versions = choose_peers(self.peers, options, device)

    def modes_of(self, case: Any) -> list[str]:
        """Return the modes of a case that are to be measured."""
        return [mode for mode in case.modes if mode in self.options.modes or not self.options.modes]

    def is_too_large(self, case: Any) -> bool:
        """Whether a CPU takes too long for a case, unless it is named."""
        return False

    def label_of(self, case: Any) -> str:
        return str(case.name)

    @property
    def row_options(self) -> Mapping[str, Any]:
        """The options that rows depend on, as the record has them."""
        return {"impls": list(self.options.impls), "rounds": self.options.rounds}

    @property
    def dtypes(self) -> Sequence[str] | None:
        """The dtypes of the matrix products that rows are held against; None: of no rates at all."""
        return None

    def left(self, done: set[Unit]) -> list[tuple[Any, list[str]]]:
        """Return the cases and their modes that are not done."""
        jobs = [(case, [m for m in modes if unit_of(self.name, case, m) not in done]) for case, modes in self.jobs]
        return [(case, modes) for case, modes in jobs if modes]

    @abstractmethod
    def open(self, case: Any) -> Any:
        """Make what the modes of a case have in common."""

    @abstractmethod
    def candidates(self, case: Any, mode: str, opened: Any) -> Iterator[Candidate]:
        """Yield all that is to be measured; each is checked before the next one is built."""

    @abstractmethod
    def time(self, case: Any, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time all that is right against each other."""

    @classmethod
    def draw(cls, record: Record, path: Path, names: Mapping[str, str] | None = None) -> bool:
        """Draw a figure of a record, with matplotlib; other libraries as in `names`. False: nothing is drawn."""
        return False

    @classmethod
    def listing(cls) -> Iterator[str]:
        """Yield lines on the cases, each name once, and on the modes."""
        for name in dict.fromkeys(case.name for case in cls.cases):
            same = [case for case in cls.cases if case.name == name]
            also = ", ".join(key for key, of in cls.aliases.items() if of == name)
            variants = ", ".join(filter(None, (variant_of(vars(case)) for case in same)))
            yield f"{name} ({also})" if also else name
            yield f"    {same[0].description}"
            yield from [f"    variants: {variants}"] if variants else []
            yield f"    modes: {', '.join(same[0].modes) or 'none of its own'}"
        yield from (f"mode {mode}: {meaning}" for mode, meaning in cls.modes.items())

    def judge(self, row: Row, check: Callable[[], tuple[Verdict, Any]]) -> tuple[Row, Any]:
        """Return a row with the verdict of its check, and what is timed if its result is right."""
        try:
            verdict, timed = check()
        except torch.AcceleratorError:
            raise  # nothing that runs on the GPU after it can be trusted
        except Exception as error:
            # Another library may fail in any way, and of ours the others are still worth measuring. The message may
            # hold paths: it is printed, and stays out of records.
            name = f"{label(row)} failed on {self.label_of(row['case'])} {row['mode']}"
            self.console.print(f"{name}: {error}", markup=False, highlight=False)
            return {**row, "status": "failed", "reason": type(error).__name__}, None
        if math.isfinite(verdict.budget):  # JSON has neither infinity nor NaN
            row = {**row, **({"error": verdict.error} if math.isfinite(verdict.error) else {})}
            row["error_budget"] = verdict.budget
        if verdict.complaint is not None:
            return {**row, "status": "wrong", "reason": verdict.complaint}, None
        return row, timed

    def measure(self, case: Any, modes: Sequence[str], rates: Rates) -> Iterator[tuple[str, Iterator[Row]]]:
        """Yield the rows of each mode, in this order, each to its end."""
        if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled, and loading it takes seconds
            torch.compiler.reset()  # past its limit of recompilations, Dynamo would run what is compiled eagerly
        opened = self.open(case)
        for mode in modes:
            yield mode, self._measure_mode(case, mode, opened, rates)
        del opened
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure_mode(self, case: Any, mode: str, opened: Any, rates: Rates) -> Iterator[Row]:
        right: dict[str, tuple[Row, Any]] = {}
        candidate = None
        for candidate in self.candidates(case, mode, opened):
            row, timed = new_row(case, mode, candidate.impl, candidate.kind, candidate.position), None
            more = {"served_by": candidate.served_by, "yardstick": candidate.yardstick}
            row |= {key: value for key, value in more.items() if value is not None}
            if candidate.reason is None:
                row, timed = self.judge(row, candidate.check)
            else:
                row |= {"status": "unsupported", "reason": candidate.reason}
            if row["status"] == "ok":
                right[label(row)] = row, timed
            else:
                yield row
        del candidate  # its check may hold float64 tensors, many times the inputs
        yield from self.time(case, mode, right, rates)


def run(benches: Sequence[type[Bench]], options: Options, console: Console | None = None) -> bool:
    """Run benchmarks into one record, each with the names that it has; one that has none of them is left out."""
    console, device = console or default_console(), choose_device(options.device)
    if len(benches) == 1:
        return run_benches(benches[0].name, [benches[0](options, device, console)], options, device, console)
    asked = {"case": options.cases, "impl": options.impls, "peer": options.named_peers}
    known = [([*(case.name for case in one.cases), *one.aliases], one.impls, one.peers) for one in benches]
    for (what, names), *those in zip(asked.items(), *known, strict=True):
        check_names(what, names, chain(*those))
    chosen = []
    for bench, those in zip(benches, known, strict=True):
        cases, impls, peers = ([x for x in names if x in of] for names, of in zip(asked.values(), those, strict=True))
        if (cases or not options.cases) and (impls or not options.impls):
            said = ",".join(peers) or "none" if options.named_peers else options.peers
            chosen.append(bench(replace(options, cases=cases, impls=impls, peers=said), device, console))
    if not chosen:
        raise ValueError("no benchmark has both one of the cases and one of the implementations that are named")
    return run_benches(ALL, chosen, options, device, console)


def run_benches(name: str, benches: Sequence[Bench], options: Options, device: torch.device, console: Console) -> bool:
    """Measure, write a record of `name`, a benchmark's or "all", and figures beside it, and print a summary.

    Ctrl-C ends the run, which then returns True; each row is written as soon as it is known, and stays. If one of ours
    was wrong or failed, `OursError` says so at the end.
    """
    peers: dict[str, str] = {}
    for peer, version in chain(*(bench.versions.items() for bench in benches)):
        if peers.get(peer, MISSING).startswith(MISSING):  # a part of a library may be there, and another not
            peers[peer] = version
    row_options = {bench.name: dict(bench.row_options) for bench in benches}
    run = {**describe_run(name, device, peers), "seed": options.seed, "options": row_options}
    stopped, rows_before, done, interrupted = None, None, set[Unit](), False
    if options.resume and options.output is not None:
        stopped = load.read_stopped(options.output, run)
        rows_before, done = stopped.rows, {*stopped.units}
        console.print(f"{len(done)} measurements in {options.output} are whole, and stay", highlight=False)
        run = {**stopped.run, "resumed": [*stopped.run.get("resumed", ()), run["date"]]}
    path = choose_path(options.output, run) if stopped is None else stopped.path
    left = [(bench, case, modes) for bench in benches for case, modes in bench.left(done)]
    for peer, version in peers.items():
        console.print(f"peer {peer}: {version}", highlight=False)
    if not left and stopped is not None and stopped.ended:
        console.print("nothing is left to measure")
        return _show(path, benches, False, console)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dtypes = [bench.dtypes for bench in benches if bench.dtypes is not None]
        if dtypes:
            run["rates"] = measure_rates(dict.fromkeys(chain(*dtypes)), device, run.get("rates"))
            products = (f"{dtype} {tflops:.4g} TFLOP/s" for dtype, tflops in run["rates"]["matmul_tflops"].items())
            text = f"copy: {run['rates']['copy_gb_per_s']:.4g} GB/s; matrix product: {', '.join(products) or 'none'}"
            console.print(text, highlight=False)
        with RecordWriter(path, run, rows_before) as writer, progress_bar(console) as progress:
            task = progress.add_task("starting", total=sum(len(modes) for _, _, modes in left))
            try:
                for bench, case, modes in left:
                    progress.update(task, description=f"{bench.label_of(case)} {modes[0]}")
                    for mode, rows in bench.measure(case, modes, run.get("rates", {})):
                        progress.update(task, description=f"{bench.label_of(case)} {mode}")
                        for row in rows:
                            writer.append({"benchmark": bench.name, **row})
                        progress.advance(task)
                writer.end()
            except KeyboardInterrupt:
                interrupted = True
    return _show(path, benches, interrupted, console)


def _show(path: Path, benches: Sequence[Bench], interrupted: bool, console: Console) -> bool:
    """Print and draw a record, and raise if one of ours was wrong or failed; return whether it was interrupted."""
    record = read_record(path)
    benches = [bench for bench in benches if record.of(bench.name)]
    for bench in benches:
        print_summary(record.of(bench.name), record.run, bench.columns, console)
    if interrupted:
        text = f"stopped: the {len(record.rows)} rows measured so far are kept; --resume goes on from there"
        console.print(text, style="yellow", highlight=False)
    console.print(f"record: {path}", highlight=False)
    try:
        for bench in benches:
            figure = path.with_name(f"{path.stem}-{bench.name}.png") if len(benches) > 1 else path.with_suffix(".png")
            if bench.draw(record, figure):
                console.print(f"figure: {figure}", highlight=False)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        console.print(rf"no figure: {package} is not installed (pip install 'ropewalk\[bench]')")
    bad = [row for row in record.rows if row["kind"] != "peer" and row["status"] in ("wrong", "failed")]
    if bad:
        names = ", ".join(f"{describe(row)} is {row['status']}" for row in bad)
        raise OursError(f"{names}; {path.name} has the rest")
    return interrupted
