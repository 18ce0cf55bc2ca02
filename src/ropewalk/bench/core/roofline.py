"""The roofline of a device by PyTorch: a copy's bandwidth and the rate of a matrix product, hot, in the same rounds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ropewalk.bench.core.sustained import PROTOCOLS, time_bursts
from ropewalk.bench.core.timing import Call, quantiles

SIZES = {"cuda": 8192, "cpu": 1024}  # of square matrices
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_COPY = "copy"


def measure_rates(
    dtypes: Iterable[str], device: torch.device, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure GB/s of a copy, reads and writes counted, and TFLOP/s of a square product in each dtype.

    Rates in `known` are not measured again. float32 is multiplied as PyTorch is told to: its default does
    without TF32.

    Returns:
        {"copy_gb_per_s": …, "matmul_tflops": {dtype: …}}, as records have it.
    """
    size, copied = SIZES[device.type], COPIED_BYTES[device.type]
    products: dict[str, float] = {} if known is None else dict(known["matmul_tflops"])
    calls: dict[str, Call] = {
        dtype: _product(size, getattr(torch, dtype), device) for dtype in dtypes if dtype not in products
    }
    if known is None:
        source = torch.randn(copied // 4, device=device)
        calls[_COPY] = functools.partial(torch.empty_like(source).copy_, source)
    samples = time_bursts(calls, device, PROTOCOLS["hot"]) if calls else {}
    medians = {name: quantiles(times).p50 for name, times in samples.items()}
    bandwidth = 2 * copied / medians.pop(_COPY) / 1e3 if known is None else known["copy_gb_per_s"]
    measured = {dtype: 2 * size**3 / microseconds / 1e6 for dtype, microseconds in medians.items()}
    return {"copy_gb_per_s": bandwidth, "matmul_tflops": {**products, **measured}}


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))
