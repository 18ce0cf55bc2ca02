"""Timing in bursts, on a CPU and with a stand-in for a GPU's clock; and the roofline."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from ropewalk.bench.core import sustained
from ropewalk.bench.core.sustained import PROTOCOLS, measure_rates, plan_burst, time_bursts
from ropewalk.bench.core.timing import ratios


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_round_times_every_call(protocol: str, device: torch.device) -> None:
    counts = {"slow": 0, "fast": 0}
    large, small = torch.randn(1 << 23, device=device), torch.randn(1 << 4, device=device)

    def slow() -> None:
        counts["slow"] += 1
        large.mul_(1.0)

    def fast() -> None:
        counts["fast"] += 1
        small.mul_(1.0)

    samples = time_bursts({"slow": slow, "fast": fast}, device, PROTOCOLS[protocol], rounds=3)
    assert {name: len(times) for name, times in samples.items()} == {"slow": 3, "fast": 3}
    assert min(counts.values()) >= 3
    assert ratios(samples, "fast")["slow"] > 1 > ratios(samples, "slow")["fast"]


def test_ratios_are_medians_over_rounds() -> None:
    samples = {"a": [1.0, 2.0, 4.0], "b": [2.0, 6.0, 40.0], "c": [1.0, 1.0, 1.0]}
    assert ratios(samples, "a") == {"b": 3.0, "c": 0.5}


def test_a_burst_is_long_enough_and_no_call_is_late() -> None:
    assert plan_burst(100.0, 7000.0) == (1, 150.0)
    assert plan_burst(100.0, 50_000.0) == (1, 150.0)
    assert plan_burst(100.0, 1000.0) == (7, 150.0)
    repeats, spin = plan_burst(1000.0, 300.0)
    assert repeats == 23
    for index in range(repeats):  # each call is enqueued before the GPU has done those before it
        assert (index + 1) * 1000.0 <= spin + index * 300.0
    assert plan_burst(10.0, 1.0)[0] == 32


class FakeGpu:
    """Clocks of a host and a GPU, that begins what the host has enqueued; and the CUDA names that bursts use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.host = 0.0
        self.naps: list[float] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.work(0.0)
                self.at = gpu.now

            def elapsed_time(self, end: Any) -> float:
                elapsed: float = (end.at - self.at) / 1e3
                return elapsed

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work(cycles / 1000))
        monkeypatch.setattr(sustained.timing, "check_device", lambda device: None)
        monkeypatch.setattr(sustained.timing, "host_once", lambda call, device: 20.0)
        monkeypatch.setattr(sustained, "_cycles_per_microsecond", lambda device: 1000.0)
        monkeypatch.setattr(sustained.time, "sleep", self.naps.append)
        monkeypatch.setattr(sustained.time, "perf_counter", lambda: self.host / 1e6)

    def work(self, microseconds: float) -> None:
        self.now = max(self.now, self.host) + microseconds

    def wait(self) -> None:
        self.host = max(self.host, self.now)

    def call(self, microseconds: float, host: float = 20.0) -> None:
        self.host += host
        self.work(microseconds)


def test_a_gpus_bursts_hold_nothing_but_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    calls = {"long": lambda: gpu.call(5000.0), "short": lambda: gpu.call(250.0), "bound": lambda: gpu.call(5.0)}
    hot = time_bursts(calls, torch.device("cuda"), PROTOCOLS["hot"])
    assert gpu.now > 250e3 + 2 * 150e3
    assert gpu.naps == []
    for name, microseconds in (("long", 5000.0), ("short", 250.0), ("bound", 5.0)):
        assert len(hot[name]) == 40  # as many as there may be: bursts of the shortest are 160 µs
        assert hot[name] == pytest.approx([microseconds] * 40)
    cool = time_bursts(calls, torch.device("cuda"), PROTOCOLS["cool"], rounds=6)
    assert [len(times) for times in cool.values()] == [6, 6, 6]
    assert gpu.naps == [0.2] * 18


@pytest.mark.parametrize("late", [lambda _: True, lambda done: done % 50 < 10], ids=["throughout", "at times"])
@pytest.mark.parametrize("slower", [3.0, 10.0])
def test_a_burst_is_measured_again_where_the_host_was_late(
    monkeypatch: pytest.MonkeyPatch, slower: float, late: Callable[[int], bool]
) -> None:
    """It was planned with a host that is now slower."""
    gpu, done = FakeGpu(monkeypatch), count()
    times = time_bursts(
        {"call": lambda: gpu.call(5.0, 20.0 * (slower if late(next(done)) else 1.0))},
        torch.device("cuda"),
        PROTOCOLS["hot"],
    )
    assert times["call"] == pytest.approx([5.0] * 40)


def test_the_least_is_taken_of_a_burst_that_is_late_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    hosts = iter([0.0, 0.0, 1e6, 3e5, 2e5, 4e5])  # two for the plan, then four tries of one call
    times = time_bursts(
        {"late": lambda: gpu.call(7000.0, next(hosts, 0.0))}, torch.device("cuda"), PROTOCOLS["cool"], rounds=1
    )
    assert 2e5 < times["late"][0] < 2e5 + 7000.0  # the third's, less what the GPU spun


@pytest.fixture
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, size in ((sustained.SIZES, 64), (sustained.COPIED_BYTES, 4096)):
        for kind in sizes:
            monkeypatch.setitem(sizes, kind, size)


def test_a_product_for_each_dtype_and_a_copy_are_measured(small_rates: None, device: torch.device) -> None:
    found = measure_rates(["bfloat16", "float32"], device)
    assert list(found) == ["copy_gb_per_s", "matmul_tflops"]
    assert list(found["matmul_tflops"]) == ["bfloat16", "float32"]
    assert all(rate > 0 for rate in (found["copy_gb_per_s"], *found["matmul_tflops"].values()))


def test_rates_count_operations_and_bytes_read_and_written(small_rates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sustained, "time_bursts", lambda calls, *_: {name: [1.0, 2.0, 9.0] for name in calls})
    found = measure_rates(["float32"], torch.device("cpu"))
    assert found["copy_gb_per_s"] == pytest.approx(2 * 4096 / 2e-6 / 1e9)
    assert found["matmul_tflops"]["float32"] == pytest.approx(2 * 64**3 / 2e-6 / 1e12)


def test_what_is_known_is_not_measured_again(
    small_rates: None, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    timed: list[list[str]] = []
    monkeypatch.setattr(sustained, "time_bursts", lambda calls, *_: timed.append([*calls]) or {x: [1.0] for x in calls})
    known = {"copy_gb_per_s": 5.0, "matmul_tflops": {"float16": 7.0}}
    assert measure_rates(["float16"], device, known) == known
    more = measure_rates(["float16", "float32"], device, known)
    assert timed == [["float32"]]
    assert (more["copy_gb_per_s"], more["matmul_tflops"]["float16"]) == (5.0, 7.0)
    assert set(more["matmul_tflops"]) == {"float16", "float32"}
    assert known["matmul_tflops"] == {"float16": 7.0}
