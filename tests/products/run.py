"""Run rows of the table by each backend, without a plan and with one, and compare every call with the truth."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers.kinds import without_plans

from products import calls, compare, cover, pack
from products.table import NEUTRAL, Row, names_a_call
from ropewalk.testing import poisoned_memory

PLANNED = 3  # calls of one kind: the first, the one behind which a plan is made, and the planned one


OTHERS = 4  # seeds that are asked where a budget is exceeded by a little


class Fault(NamedTuple):
    """A call that is wrong: its row and backend, the seed and the sizes, which of its calls, and why."""

    row: Row
    impl: str | None
    seed: int
    variant: int
    when: str
    reasons: list[str]

    def describe(self) -> dict[str, Any]:
        """Return what tells the call, by its values that are not neutral."""
        return {**self._asdict(), "row": {name: x for name, x in self.row.items() if x != NEUTRAL[name]}}


class Counted(NamedTuple):
    """How many calls were compared, and those that were wrong."""

    calls: int
    faults: list[Fault]


def check(
    row: Row,
    impls: Iterable[str | None],
    seed: int,
    device: torch.device,
    sizes: calls.Sizes,
    variant: int = 0,
    planned: int = PLANNED,
) -> Counted:
    """Compare a row's call with the truth: by each backend once without a plan, and some times with one."""
    call = calls.build(row, seed, device, sizes, variant)
    expected = compare.expect(call)
    faults, n_calls = [], 0
    for impl in impls:
        if variant and compare.backend_of(call, impl) is None:
            continue  # the sizes of the class decide: variant 0 must run
        alone = None
        for number in range(planned + 1):
            when = "without a plan" if number == 0 else f"call {number}"
            try:
                if number == 0:
                    with without_plans(), poisoned_memory():
                        alone = found = compare.attend_by(call, impl)
                else:
                    found = compare.attend_by(call, impl)
                reasons = compare.faults(found, expected)
                if reasons and not compare.faults(found, expected, compare.CLEAR):
                    reasons = reasons if _is_usual(row, impl, seed, device, sizes, variant) else []
                if not reasons and number and alone is not None and has_equal_bits(row, impl):
                    names = compare.differing_bits(found, alone)
                    reasons = [f"{name}: other bits than without a plan" for name in names]
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                lines = str(error).splitlines()[:3]
                reasons = [f"{type(error).__name__}: {' '.join(lines)} ({Path(place.filename).name}:{place.lineno})"]
            n_calls += 1
            if reasons:
                faults.append(Fault(row, impl, seed, variant, when, reasons))
                break
    return Counted(n_calls, faults)


def _is_usual(row: Row, impl: str | None, seed: int, device: torch.device, sizes: calls.Sizes, variant: int) -> bool:
    """Say whether a row exceeds its budgets by a little for most of other seeds, too."""
    n_wrong = 0
    for other in range(OTHERS):
        call = calls.build(row, seed + 7919 * (other + 1), device, sizes, variant)
        with without_plans():
            n_wrong += bool(compare.faults(compare.attend_by(call, impl), compare.expect(call)))
    return 2 * n_wrong > OTHERS


def has_equal_bits(row: Row, impl: str | None) -> bool:
    """Say whether a backend's results are the same bits every time."""
    return impl == "triton" or (impl == "gluon" and (row["gradients"] == "none" or row["deterministic"] == "yes"))


def shrink(fault: Fault, device: torch.device, sizes: calls.Sizes, seconds: float = 60.0) -> Fault:
    """Return a fault of the same kind whose row has as many neutral values as it can."""
    end = time.monotonic() + seconds
    smallest = fault

    def fails(row: Row) -> Fault | None:
        if cover.refusal(row, fault.impl, sizes) is not None and device.type == "cuda":
            return None
        found = check(row, [fault.impl], fault.seed, device, sizes, fault.variant).faults
        return found[0] if found else None

    changed = True
    while changed:
        changed = False
        for name, value in smallest.row.items():
            if value == NEUTRAL[name]:
                continue
            row = {**smallest.row, name: NEUTRAL[name]}
            if time.monotonic() > end:
                return smallest
            found = fails(row) if names_a_call(row) else None
            if found is not None:
                smallest, changed = found, True
                break
    return smallest


# === many processes on one GPU ===


class Work(NamedTuple):
    """What one process does: its part of the rows, again and again with other seeds and sizes, until its time is up."""

    rank: int
    rows: Sequence[cover.Entry]
    seconds: float
    shrinks: float  # seconds
    folder: str


def begin() -> pack.Watched:
    """Make this process use a pack's kernels, and return what it compiles from now on."""
    torch.set_num_threads(1)
    pack.settle_keys()
    return pack.watch()


def run_part(work: Work) -> None:
    """Run a process's part, and write what it found."""
    watched = begin()
    device, sizes = torch.device("cuda"), calls.GPU
    start, seed, n_calls, n_rows = time.monotonic(), 0, 0, 0
    faults: list[Fault] = []
    first_pass = None
    while time.monotonic() - start < work.seconds:
        for row, impls in work.rows:
            if time.monotonic() - start > work.seconds:
                break
            counted = check(row, impls, seed, device, sizes, seed)
            n_calls += counted.calls
            n_rows += 1
            faults += counted.faults
        else:
            first_pass = first_pass or time.monotonic() - start
        seed += 1
    seconds, n_compiled = time.monotonic() - start, len(watched.kernels)
    end = time.monotonic() + work.shrinks
    seen: set[str] = set()
    shrunk = []
    for fault in faults:
        key = f"{fault.impl} {fault.when} {fault.reasons[0][:25]}"
        if key in seen or time.monotonic() > end:
            continue
        seen.add(key)
        shrunk.append(shrink(fault, device, sizes, end - time.monotonic()).describe())
    found = {
        "rank": work.rank,
        "calls": n_calls,
        "rows": n_rows,
        "seconds": seconds,
        "first_pass": first_pass,
        "compiled": n_compiled,
        "faults": [fault.describe() for fault in faults],
        "shrunk": shrunk,
    }
    Path(work.folder, f"part{work.rank}.json").write_text(json.dumps(found))


def spread(task: Callable[[Any], None], works: Sequence[Any], seconds: float) -> list[int | None]:
    """Run each work in a process of its own; return the exit codes, None of those that were stopped."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=task, args=(work,)) for work in works]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_all(rows: Sequence[cover.Entry], workers: int, seconds: float, shrinks: float, folder: str) -> dict[str, Any]:
    """Run rows on a GPU by many processes."""
    os.makedirs(folder, exist_ok=True)
    works = [Work(rank, rows[rank::workers], seconds, shrinks, folder) for rank in range(workers)]
    start = time.monotonic()
    codes = spread(run_part, works, seconds + shrinks + 60)
    parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("part*.json"))]
    return {
        "calls": sum(part["calls"] for part in parts),
        "rows": sum(part["rows"] for part in parts),
        "seconds": max((part["seconds"] for part in parts), default=0.0),
        "with_starts": time.monotonic() - start,
        "first_pass": [part["first_pass"] for part in parts],
        "compiled": sum(part["compiled"] for part in parts),
        "exit_codes": codes,
        "faults": [fault for part in parts for fault in part["faults"]],
        "shrunk": [fault for part in parts for fault in part["shrunk"]],
    }
