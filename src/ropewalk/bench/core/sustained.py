"""Timing of calls that take long: bursts of a few milliseconds, in rounds, by one of two protocols.

A GPU under steady load runs at its power limit, and slower than one that has just rested; which of two kernels is
faster may depend on it. So there are two protocols, and a time says by which it was taken:

- hot: a warm-up, then rounds without pauses;
- cool: a pause before each burst, so that clocks are high.

In each round every call is measured once, in a random order. A burst is timed by device events. The GPU is kept busy
before it until the host has enqueued as much as it takes, so no host time is in it: where the host was slower than
planned, the burst is measured again. Caches are as the call before left them. All times are in microseconds.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ropewalk.bench.core.timing import Call, check_device, host_once, interleave, time_on_cpu, time_on_gpu

_BURST = 7e3  # microseconds that a burst should take
_MOST_CALLS = 32  # in a burst: more launches than the driver's queue holds would make the host wait
_LONGEST_SPIN = 1e5
_TRIES = 4  # of a burst whose host is late; the least is taken if it is late every time
_ROUNDS = (5, 40)  # at least, at most


@dataclass(frozen=True)
class Protocol:
    """The pauses and durations of bursts."""

    name: str
    pause: float  # seconds before each burst
    warmup: float  # microseconds of all calls together, before the first round
    measured: float  # microseconds of each call, over all rounds


PROTOCOLS = {"hot": Protocol("hot", 0.0, 250e3, 150e3), "cool": Protocol("cool", 0.2, 0.0, 5 * _BURST)}

# Times one burst and returns microseconds for each call in it.
Burst = Callable[[], float]


def time_bursts(
    calls: Mapping[str, Call], device: torch.device, protocol: Protocol, *, rounds: int | None = None
) -> dict[str, list[float]]:
    """Time each call once per round; the n-th times of all calls were taken in the n-th round.

    `rounds` is how many there are at most; None for as many as the protocol's measured time takes.
    """
    check_device(device)
    if device.type == "cuda":
        (bursts, wanted), pause, warmup = _cuda_bursts(calls, device, protocol), protocol.pause, protocol.warmup
    else:
        bursts = {name: functools.partial(time_on_cpu, call) for name, call in calls.items()}
        wanted, pause, warmup = _ROUNDS[0], 0.0, 0.0
    warm_until = time.perf_counter() + warmup / 1e6
    while time.perf_counter() < warm_until:
        for burst in bursts.values():
            burst()

    def rest_and_burst(name: str) -> float:
        if pause:
            time.sleep(pause)
        return bursts[name]()

    def one_round(order: Sequence[str]) -> dict[str, float]:
        return {name: rest_and_burst(name) for name in order}

    return interleave(calls, one_round, warmup=0, rounds=wanted if rounds is None else min(rounds, wanted))


def _cuda_bursts(calls: Mapping[str, Call], device: torch.device, protocol: Protocol) -> tuple[dict[str, Burst], int]:
    """Make the bursts, and count the protocol's rounds of them."""
    cycles = _cycles_per_microsecond(device)
    bursts, shortest = {}, protocol.measured
    for name, call in calls.items():
        host = host_once(call, device)
        once = _timed(call, 2, 0.0, 4 * host, cycles, device)()
        repeats, spin = plan_burst(host, once)
        bursts[name] = _timed(call, repeats, once, spin, cycles, device)
        shortest = min(shortest, repeats * once)
    return bursts, min(max(_ROUNDS[0], math.ceil(protocol.measured / shortest)), _ROUNDS[1])


def plan_burst(host: float, once: float) -> tuple[int, float]:
    """Choose the calls of a burst and the GPU's spin before it, by a call's host and device time.

    The first call must be enqueued before the spin ends, and no later one may come too late either.
    """
    repeats = min(max(1, round(_BURST / once)), _MOST_CALLS)
    return repeats, min(1.5 * host + repeats * max(0.0, 1.2 * host - once), _LONGEST_SPIN)


def _timed(call: Call, repeats: int, once: float, spin: float, cycles: float, device: torch.device) -> Burst:
    """Make a burst behind `spin` microseconds of so many cycles each; a call takes the GPU `once` at least."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(wait: float) -> tuple[float, bool]:
        """Measure the time of a call, and whether the GPU may have waited for one."""
        late, begun = False, time.perf_counter()
        torch.cuda._sleep(int(wait * cycles))
        start.record()
        for before in range(repeats):
            call()
            late |= (time.perf_counter() - begun) * 1e6 > wait + before * once
        end.record()
        torch.cuda.synchronize(device)
        return max(float(start.elapsed_time(end)) * 1e3 / repeats, 1e-3), late

    def burst() -> float:
        wait, least = spin, math.inf
        for _ in range(_TRIES):
            time_of_call, late = measure(wait)
            if not late:
                return time_of_call
            wait, least = min(3 * wait, _LONGEST_SPIN), min(least, time_of_call)
        return least

    return burst


def _cycles_per_microsecond(device: torch.device) -> float:
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # wakes the clocks
    return cycles / max(time_on_gpu(lambda: torch.cuda._sleep(cycles), device), 1.0)
