"""Interleaved timing of short calls: on the device with a cold cache, in a CUDA graph, and on the host.

All times are in microseconds. Results of calls are dropped.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Sample = TypeVar("Sample")
Round = Callable[[Sequence[str]], Mapping[str, Sample]]  # measures what is named, in this order
COPY = "copy_"  # what records call a copy
MIN_ROUNDS = 3  # that are timed however long they take

_DEFAULT_L2 = 64 << 20  # bytes, for a device whose driver does not say


@dataclass(frozen=True)
class Quantiles:
    """The 10 %, 50 % and 90 % quantiles of some times."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class HostTime:
    """The host time of a call: the least and the median over repeats."""

    least: float
    median: float


def quantiles(microseconds: Sequence[float]) -> Quantiles:
    return Quantiles(*at_parts(microseconds, 0.1, 0.5, 0.9))


def at_parts(samples: Sequence[float], *parts: float) -> list[float]:
    wanted = torch.tensor(parts, dtype=torch.float64)
    return torch.tensor(samples, dtype=torch.float64).quantile(wanted).tolist()


def check_device(device: torch.device) -> None:
    """Raise unless calls on `device` can be timed here."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device is {device.type!r}, but only 'cpu' and 'cuda' can be timed")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        name, found = (str(device), f"{count} GPUs") if count else ("cuda", "no GPU")
        raise ValueError(f"the device is {name!r}, but PyTorch finds {found} here")


def interleave(
    names: Collection[str], one_round: Round[Sample], *, warmup: int, rounds: int, max_seconds: float = math.inf
) -> dict[str, list[Sample]]:
    """Measure all names once per round, in a new random order each round; the n-th samples are of the n-th round.

    Rounds make calls comparable: whatever drifts, clocks and temperature, drifts for all of them. After `max_seconds`
    no further round begins, but `MIN_ROUNDS` are always measured.
    """
    order, shuffle = list(names), random.Random(0).shuffle
    measured: list[Mapping[str, Sample]] = []
    for count, least in ((warmup, 1), (rounds, MIN_ROUNDS)):
        measured, deadline = [], time.perf_counter() + max_seconds
        for done in range(count):
            if done >= least and time.perf_counter() > deadline:
                break
            shuffle(order)
            measured.append(one_round(order))
    return {name: [samples[name] for samples in measured] for name in names}


def ratios(samples: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """Return how many times as long as `name` each of the others took: the medians over rounds."""
    return {
        other: statistics.median(theirs / own for theirs, own in zip(times, samples[name], strict=True))
        for other, times in samples.items()
        if other != name
    }


def time_rounds(
    calls: Mapping[str, Call], device: torch.device, *, warmup: int = 10, rounds: int = 100, max_seconds: float = 10.0
) -> dict[str, Quantiles]:
    """Time each call once per round of `interleave` on the device and with a cold L2 cache."""
    check_device(device)

    def on_cpu(order: Sequence[str]) -> dict[str, float]:
        return {name: time_on_cpu(calls[name]) for name in order}

    one_round: Round[float] = on_cpu if device.type == "cpu" else _cold_rounds(calls, device)
    samples = interleave(calls, one_round, warmup=warmup, rounds=rounds, max_seconds=max_seconds)
    return {name: quantiles(times) for name, times in samples.items()}


def time_on_cpu(call: Call) -> float:
    """Return the microseconds of a call that has ended when it returns."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def time_on_gpu(enqueue: Call, device: torch.device) -> float:
    """Return the microseconds that a GPU takes for what `enqueue` enqueues."""
    start, end = cuda_events()
    start.record()
    enqueue()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e3


def cuda_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _cold_rounds(calls: Mapping[str, Call], device: torch.device) -> Round[float]:
    """Make the function that times one round on a GPU.

    Before each call a buffer of four times the L2 cache is written, outside the events. It is written as often as it
    takes to keep the GPU busy until the host has enqueued the call: otherwise a short call's time would be the host's.
    """
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _DEFAULT_L2
    buffer = torch.empty(4 * l2, dtype=torch.uint8, device=device).zero_()
    flush_time = max(time_on_gpu(lambda: [buffer.zero_() for _ in range(20)], device) / 20, 1.0)
    flushes = {name: 1 + math.ceil(1.5 * host_once(call, device) / flush_time) for name, call in calls.items()}

    def one_round(order: Sequence[str]) -> dict[str, float]:
        events = {}
        for name in order:
            events[name] = start, end = cuda_events()
            for _ in range(flushes[name]):
                buffer.zero_()
            start.record()
            calls[name]()
            end.record()
        torch.cuda.synchronize(device)
        return {name: start.elapsed_time(end) * 1e3 for name, (start, end) in events.items()}

    return one_round


def host_once(call: Call, device: torch.device) -> float:
    """Estimate the host time, after the first calls, which build and load."""
    return time_host(call, device, calls=1, repeats=5).median


def time_graphs(
    calls: Mapping[str, Call], device: torch.device, *, calls_per_graph: int = 100, replays: int = 50
) -> tuple[dict[str, Quantiles], dict[str, str]]:
    """Time each call inside a CUDA graph of many, replayed in rounds: without host time, with a warm cache.

    Returns the times, and for the calls that cannot be captured the kind of error that capturing them raised.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    failures: dict[str, str] = {}
    stream = torch.cuda.Stream(device)
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                call()  # what is built on a first call must not be built while capturing
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls_per_graph):
                    call()
            graphs[name] = graph
        except Exception as error:  # another library's call may fail in any way; that it failed is the result
            failures[name] = type(error).__name__
            torch.cuda.synchronize(device)
            # A failed capture leaves the device's default generator in the capture's state.
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
            seed = generator.initial_seed()
            generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
            generator.manual_seed(seed)

    def one_round(order: Sequence[str]) -> dict[str, float]:
        return {name: time_on_gpu(graphs[name].replay, device) / calls_per_graph for name in order}

    samples = interleave(graphs, one_round, warmup=5, rounds=replays)
    return {name: quantiles(times) for name, times in samples.items()}, failures


def time_host(call: Call, device: torch.device, *, calls: int = 32, repeats: int = 20) -> HostTime:
    """Time the host part of a call, over loops too short to fill the launch queue, where the host would wait."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize(device)
    return HostTime(min(times), statistics.median(times))


def peak_memory(call: Call, device: torch.device) -> int:
    """Measure the bytes of device memory that one call adds at its peak, its result included."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
