"""Interleaved timing: on the device with a cold cache, in a CUDA graph, and on the host.

All times are in microseconds. Results of calls are dropped.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]
COPY = "copy_"  # what records call a copy

_MIN_ROUNDS = 3
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
    """Summarise some times."""
    samples = torch.tensor(microseconds, dtype=torch.float64)
    p10, p50, p90 = samples.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Quantiles(p10, p50, p90)


def check_device(device: torch.device) -> None:
    """Raise unless calls on `device` can be timed here."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device is {device.type!r}, but only 'cpu' and 'cuda' can be timed")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device is 'cuda', but PyTorch finds no GPU here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"the device is '{device}', but PyTorch finds {torch.cuda.device_count()} GPUs here")


def time_rounds(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    warmup: int = 10,
    rounds: int = 100,
    max_seconds: float = 10.0,
) -> dict[str, Quantiles]:
    """Time each call once per round, in a new random order each round, on the device and with a cold L2 cache.

    Rounds make the calls comparable: whatever drifts, clocks and temperature, drifts for all of them. After
    `max_seconds` no further round begins, but three are always timed.
    """
    check_device(device)
    one_round = _cuda_rounds(calls, device) if device.type == "cuda" else _cpu_round
    order, shuffle = list(calls), random.Random(0).shuffle
    deadline = time.perf_counter() + max_seconds
    for _ in range(warmup):
        one_round(calls, order)
        if time.perf_counter() > deadline:
            break
    deadline = time.perf_counter() + max_seconds
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        if done >= _MIN_ROUNDS and time.perf_counter() > deadline:
            break
        shuffle(order)
        for name, microseconds in one_round(calls, order).items():
            samples[name].append(microseconds)
    return {name: quantiles(times) for name, times in samples.items()}


def _cpu_round(calls: Mapping[str, Call], order: Sequence[str]) -> dict[str, float]:
    times = {}
    for name in order:
        start = time.perf_counter()
        calls[name]()
        times[name] = (time.perf_counter() - start) * 1e6
    return times


def _cuda_rounds(
    calls: Mapping[str, Call], device: torch.device
) -> Callable[[Mapping[str, Call], Sequence[str]], dict[str, float]]:
    """Make the function that times one round on a GPU.

    Before each call a buffer of four times the L2 cache is written, outside the events. It is written as often as it
    takes to keep the GPU busy until the host has enqueued the call: otherwise a short call's time would be the host's.
    """
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _DEFAULT_L2
    buffer = torch.empty(4 * l2, dtype=torch.uint8, device=device)
    flush_time = _time_flush(buffer)
    flushes = {name: 1 + math.ceil(1.5 * host_once(call, device) / flush_time) for name, call in calls.items()}

    def one_round(calls: Mapping[str, Call], order: Sequence[str]) -> dict[str, float]:
        events = {}
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(flushes[name]):
                buffer.zero_()
            start.record()
            calls[name]()
            end.record()
            events[name] = start, end
        torch.cuda.synchronize(device)
        return {name: start.elapsed_time(end) * 1e3 for name, (start, end) in events.items()}

    return one_round


def _time_flush(buffer: Tensor, repeats: int = 20) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    buffer.zero_()
    start.record()
    for _ in range(repeats):
        buffer.zero_()
    end.record()
    torch.cuda.synchronize(buffer.device)
    return max(float(start.elapsed_time(end)) * 1e3 / repeats, 1.0)


def host_once(call: Call, device: torch.device) -> float:
    """Estimate the host time, after the first calls, which build and load."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize(device)
    return statistics.median(times)


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
        except Exception as error:  # another library's call may fail in any way; that it failed is the result
            failures[name] = type(error).__name__
            torch.cuda.synchronize(device)
            _renew_generator(device)
        else:
            graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order, shuffle = list(graphs), random.Random(0).shuffle
    warmup = 5
    for replay in range(warmup + replays):
        shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if replay >= warmup:
                samples[name].append(start.elapsed_time(end) * 1e3 / calls_per_graph)
    return {name: quantiles(times) for name, times in samples.items()}, failures


def _renew_generator(device: torch.device) -> None:
    """Renew the device's default generator: a failed capture leaves it in the capture's state."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    seed = generator.initial_seed()
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    generator.manual_seed(seed)


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
