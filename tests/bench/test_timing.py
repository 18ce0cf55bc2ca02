"""Timing itself, which must run wherever the library runs."""

import pytest
import torch

from ropewalk.bench.core import timing


def test_quantiles_are_those_of_the_samples() -> None:
    assert timing.quantiles([float(n) for n in range(11)]) == timing.Quantiles(1.0, 5.0, 9.0)


def test_every_round_times_every_call_once(device: torch.device) -> None:
    counts = {"slow": 0, "fast": 0}
    large, small = torch.randn(1 << 22, device=device), torch.randn(1 << 4, device=device)

    def slow() -> None:
        counts["slow"] += 1
        large.mul_(1.0)

    def fast() -> None:
        counts["fast"] += 1
        small.mul_(1.0)

    times = timing.time_rounds({"slow": slow, "fast": fast}, device, warmup=2, rounds=5)
    assert counts["slow"] == counts["fast"] >= 7
    assert 0 < times["fast"].p50 < times["slow"].p50
    assert times["slow"].p10 <= times["slow"].p50 <= times["slow"].p90


def test_three_rounds_are_timed_when_time_is_short() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    timing.time_rounds({"call": call}, torch.device("cpu"), warmup=0, rounds=50, max_seconds=0.0)
    assert calls == 3


def test_a_device_that_cannot_be_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        timing.check_device(torch.device("meta"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no GPU"):
            timing.check_device(torch.device("cuda"))


@pytest.mark.gpu
def test_graphs_host_and_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    x = torch.randn(1 << 10, device=device)
    times, failures = timing.time_graphs({"double": lambda: x * 2, "wait": lambda: x.sum().item()}, device, replays=5)
    torch.randn(1, device=device)  # the failed capture left the generator usable
    assert 0 < times["double"].p50 < 100
    assert list(failures) == ["wait"]
    host = timing.time_host(lambda: x * 2, device, repeats=3)
    assert 0 < host.least <= host.median
    assert timing.peak_memory(lambda: x * 2, device) == x.numel() * 4
    assert timing.peak_memory(lambda: x.mul_(2), device) == 0
