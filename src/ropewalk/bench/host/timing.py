"""Host times of eager calls: short bursts between synchronizations, the candidates in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ropewalk.bench.core.timing import interleave

_WARMUP = 2  # rounds that are not recorded


class Timed(NamedTuple):
    """A call to time: a forward, and the backward that takes its result where there is one."""

    forward: Callable[[], Any]
    backward: Callable[[Any], object] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # of a burst, entered before the clock starts


class Burst(NamedTuple):
    """The microseconds of one call, a mean over a burst; its two parts where there is a backward."""

    total: float
    forward: float | None = None
    backward: float | None = None


def spread(microseconds: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the 95 % quantile of the times of some bursts."""
    samples = torch.tensor(microseconds, dtype=torch.float64)
    found = samples.quantile(torch.tensor([0.0, 0.5, 0.95], dtype=torch.float64)).tolist()
    return dict(zip(("least", "median", "p95"), found, strict=True))


def time_turns(
    timed: Mapping[str, Timed], device: torch.device, *, calls: int, rounds: int, max_seconds: float
) -> dict[str, list[Burst]]:
    """Time one burst of each candidate per round; a slow moment of the machine spreads over all of them."""

    def one_round(order: Sequence[str]) -> dict[str, Burst]:
        return {name: time_burst(timed[name], device, calls) for name in order}

    return interleave(timed, one_round, warmup=_WARMUP, rounds=rounds, max_seconds=max_seconds)


def time_burst(timed: Timed, device: torch.device, calls: int) -> Burst:
    """Time a burst of calls on an idle device: `calls` must be too few to fill the launch queue.

    One call goes before the clock starts: another candidate's burst has left the host's caches cold.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with timed.context():
        if timed.backward is None:
            return Burst(_time_forward(timed.forward, calls))
        forward, backward = _time_both(timed.forward, timed.backward, calls)
        return Burst(forward + backward, forward, backward)


def _time_forward(forward: Callable[[], Any], calls: int) -> float:
    """Return the microseconds of a call."""
    now = time.perf_counter_ns
    forward()
    start = now()
    for _ in range(calls):
        forward()
    return (now() - start) / 1e3 / calls


def _time_both(forward: Callable[[], Any], backward: Callable[[Any], object], calls: int) -> tuple[float, float]:
    """Return the microseconds of a forward, and of the backward with which it takes turns."""
    now, in_forward = time.perf_counter_ns, 0
    backward(forward())
    start = now()
    for _ in range(calls):
        before = now()
        out = forward()
        in_forward += now() - before
        backward(out)
        del out
    total = now() - start
    return in_forward / 1e3 / calls, (total - in_forward) / 1e3 / calls
