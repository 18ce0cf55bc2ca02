"""Timing of calls that take long: bursts of a few milliseconds, in rounds, by one of two protocols; and the roofline.

Hot: a warm-up, then rounds without pauses, at the power limit. Cool: a pause before each burst, for high clocks.

A burst is timed by device events. The GPU stays busy before it until the host has enqueued as much as it takes, so no
host time is in it: where the host was slower than planned, the burst is measured again. Caches are as the call before
left them. All times are in microseconds.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ropewalk.bench.core import timing
from ropewalk.bench.core.timing import Call, cuda_events, time_on_cpu, time_on_gpu

SIZES = {"cuda": 8192, "cpu": 1024}  # of the roofline's square matrices
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_BURST = 7e3  # microseconds that a burst should take
_MOST_CALLS = 32  # in a burst: more launches than the driver's queue holds would make the host wait
_LONGEST_SPIN = 1e5
_TRIES = 4  # of a burst whose host is late; the least is taken if it is late every time
_ROUNDS = (5, 40)  # at least, at most


class Protocol(NamedTuple):
    pause: float  # seconds before each burst
    warmup: float  # microseconds of all calls together, before the first round
    measured: float  # microseconds of each call, over all rounds


PROTOCOLS = {"hot": Protocol(0.0, 250e3, 150e3), "cool": Protocol(0.2, 0.0, 5 * _BURST)}


def time_bursts(
    calls: Mapping[str, Call], device: torch.device, protocol: Protocol, *, rounds: int | None = None
) -> dict[str, list[float]]:
    """Time each call once per round, in at most `rounds`, by default as many as the protocol's measured time takes."""
    timing.check_device(device)
    pause, warmup, measured = protocol
    bursts: dict[str, Callable[[], float]] = {}  # each returns microseconds for each call in it
    if device.type == "cpu":
        bursts |= {name: functools.partial(time_on_cpu, call) for name, call in calls.items()}
        pause, warmup, wanted = 0.0, 0.0, _ROUNDS[0]
    else:
        cycles, shortest = _cycles_per_microsecond(device), measured
        for name, call in calls.items():
            host = timing.host_once(call, device)
            once = _burst(call, 2, 0.0, 4 * host, cycles, device)
            repeats, spin = plan_burst(host, once)
            bursts[name] = functools.partial(_burst, call, repeats, once, spin, cycles, device)
            shortest = min(shortest, repeats * once)
        wanted = min(max(_ROUNDS[0], math.ceil(measured / shortest)), _ROUNDS[1])
    warm_until = time.perf_counter() + warmup / 1e6
    while time.perf_counter() < warm_until:
        for burst in bursts.values():
            burst()

    def one_round(order: Sequence[str]) -> dict[str, float]:
        times = {}
        for name in order:
            if pause:
                time.sleep(pause)
            times[name] = bursts[name]()
        return times

    return timing.interleave(calls, one_round, warmup=0, rounds=wanted if rounds is None else min(rounds, wanted))


def plan_burst(host: float, once: float) -> tuple[int, float]:
    """Choose the calls of a burst and the GPU's spin before it, by a call's host and device time.

    The first call must be enqueued before the spin ends, and no later one may come too late either.
    """
    repeats = min(max(1, round(_BURST / once)), _MOST_CALLS)
    return repeats, min(1.5 * host + repeats * max(0.0, 1.2 * host - once), _LONGEST_SPIN)


def _burst(call: Call, repeats: int, once: float, spin: float, cycles: float, device: torch.device) -> float:
    """Time a burst behind `spin` microseconds of so many cycles each; a call takes the GPU `once` at least."""
    start, end = cuda_events()
    least = math.inf
    for _ in range(_TRIES):
        late, begun = False, time.perf_counter()
        torch.cuda._sleep(int(spin * cycles))
        start.record()
        for before in range(repeats):
            call()
            late |= (time.perf_counter() - begun) * 1e6 > spin + before * once
        end.record()
        torch.cuda.synchronize(device)
        us_per_call = max(float(start.elapsed_time(end)) * 1e3 / repeats, 1e-3)
        if not late:
            return us_per_call
        spin, least = min(3 * spin, _LONGEST_SPIN), min(least, us_per_call)
    return least


def _cycles_per_microsecond(device: torch.device) -> float:
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # wakes the clocks
    return cycles / max(time_on_gpu(lambda: torch.cuda._sleep(cycles), device), 1.0)


def measure_rates(
    dtypes: Iterable[str], device: torch.device, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure the roofline: GB/s of a copy, reads and writes counted, and TFLOP/s of a square product in each dtype.

    Rates in `known` are not measured again. float32 is multiplied as PyTorch is told to: its default is without TF32.
    """
    size, copied = SIZES[device.type], COPIED_BYTES[device.type]
    products: dict[str, float] = {} if known is None else dict(known["matmul_tflops"])
    calls: dict[str, Call] = {}
    for dtype in (dtype for dtype in dtypes if dtype not in products):
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        calls[dtype] = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    if known is None:
        source = torch.randn(copied // 4, device=device)
        calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    samples = time_bursts(calls, device, PROTOCOLS["hot"]) if calls else {}
    medians = {name: timing.quantiles(times).p50 for name, times in samples.items()}
    bandwidth = 2 * copied / medians.pop("copy") / 1e3 if known is None else known["copy_gb_per_s"]
    measured = {dtype: 2 * size**3 / microseconds / 1e6 for dtype, microseconds in medians.items()}
    return {"copy_gb_per_s": bandwidth, "matmul_tflops": {**products, **measured}}
