"""Host times of eager calls: short bursts between synchronizations, the candidates in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ropewalk.bench.core.timing import at_parts, interleave

_WARMUP = 2  # rounds that are not recorded


class Timed(NamedTuple):
    """A call to time: a forward, and the backward that takes its result where there is one."""

    forward: Callable[[], Any]
    backward: Callable[[Any], object] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # of a burst, entered before the clock starts


def spread(microseconds: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the 95 % quantile of the times of some bursts."""
    return dict(zip(("least", "median", "p95"), at_parts(microseconds, 0.0, 0.5, 0.95), strict=True))


def time_turns(
    timed: Mapping[str, Timed], device: torch.device, *, calls: int, rounds: int, max_seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Time one burst of each candidate per round; a slow moment of the machine spreads over all of them."""

    def one_round(order: Sequence[str]) -> dict[str, dict[str, float]]:
        return {name: time_burst(timed[name], device, calls) for name in order}

    return interleave(timed, one_round, warmup=_WARMUP, rounds=rounds, max_seconds=max_seconds)


def time_burst(timed: Timed, device: torch.device, calls: int) -> dict[str, float]:
    """Time a burst of calls on an idle device: `calls` must be too few to fill the launch queue.

    Returns the microseconds of one call, "host", and where there is a backward those of its "forward" and "backward".
    One call goes before the clock starts: another candidate's burst has left the host's caches cold.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    forward, backward, now, in_forward = timed.forward, timed.backward, time.perf_counter_ns, 0
    with timed.context():
        if backward is None:
            forward()
            start = now()
            for _ in range(calls):
                forward()
            return {"host": (now() - start) / 1e3 / calls}
        backward(forward())
        start = now()
        for _ in range(calls):
            before = now()
            out = forward()
            in_forward += now() - before
            backward(out)
            del out
        total = now() - start
    parts = in_forward / 1e3 / calls, (total - in_forward) / 1e3 / calls
    return {"host": sum(parts), "forward": parts[0], "backward": parts[1]}
