"""The roofline of the device."""

from typing import Any

import pytest
import torch

from ropewalk.bench.core import sustained
from ropewalk.bench.core.sustained import measure_rates


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, size in ((sustained.SIZES, 64), (sustained.COPIED_BYTES, 4096)):
        for kind in sizes:
            monkeypatch.setitem(sizes, kind, size)


def test_a_product_for_each_dtype_and_a_copy_are_measured(device: torch.device) -> None:
    found = measure_rates(["bfloat16", "float32"], device)
    assert list(found) == ["copy_gb_per_s", "matmul_tflops"]
    assert list(found["matmul_tflops"]) == ["bfloat16", "float32"]
    assert all(rate > 0 for rate in (found["copy_gb_per_s"], *found["matmul_tflops"].values()))


def test_rates_count_operations_and_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sustained, "time_bursts", lambda calls, *_: {name: [1.0, 2.0, 9.0] for name in calls})
    found = measure_rates(["float32"], torch.device("cpu"))
    assert found["copy_gb_per_s"] == pytest.approx(2 * 4096 / 2e-6 / 1e9)
    assert found["matmul_tflops"]["float32"] == pytest.approx(2 * 64**3 / 2e-6 / 1e12)


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    timed: list[list[str]] = []
    right = sustained.time_bursts

    def spy(calls: Any, *arguments: Any) -> Any:
        timed.append(list(calls))
        return right(calls, *arguments)

    monkeypatch.setattr(sustained, "time_bursts", spy)
    known = {"copy_gb_per_s": 5.0, "matmul_tflops": {"float16": 7.0}}
    assert measure_rates(["float16"], device, known) == known
    more = measure_rates(["float16", "float32"], device, known)
    assert timed == [["float32"]]
    assert more["copy_gb_per_s"] == 5.0
    assert more["matmul_tflops"]["float16"] == 7.0
    assert set(more["matmul_tflops"]) == {"float16", "float32"}
    assert known["matmul_tflops"] == {"float16": 7.0}
