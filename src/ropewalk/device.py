"""The machine: compute capability, vendor, multiprocessors, and support of Triton.

Callers go through the module (`device.is_rocm()`), so that a test can fake a GPU here alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant(function: Function) -> Function:
    """Let torch.compile call a function while it traces, and take the result as a constant."""
    # This is torch.compiler.assume_constant_result, which would load the whole compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; nothing where it is none, as that of a build of one's own may be."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return () if numbers is None else tuple(map(int, numbers.groups()))


def ensure_context() -> None:
    """Give this thread the CUDA context of the current device, which Triton needs for descriptors, if it has none.

    A new thread has none until a call of CUDA's runtime, which memory from PyTorch's cache does not need.
    """
    if getattr(_thread, "has_context", False) or is_rocm() or not torch.cuda.is_initialized():
        return  # no tensor is on a GPU of NVIDIA's
    driver, context, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        driver.cuDeviceGet(ctypes.byref(number), torch.cuda.current_device())
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        driver.cuCtxSetCurrent(context)
    _thread.has_context = True


_thread = threading.local()


@assume_constant
def capability(device: torch.device | int) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return _capability(device)


_capability = functools.lru_cache(torch.cuda.get_device_capability)


def current_capability() -> tuple[int, int]:
    """Return the compute capability of the current NVIDIA GPU."""
    return capability(torch.cuda.current_device())


def is_rocm() -> bool:
    """Say whether the GPUs are AMD's."""
    return torch.version.hip is not None


def is_nvidia(device: torch.device) -> bool:
    """Say whether a device is an NVIDIA GPU."""
    return device.type == "cuda" and not is_rocm()


def is_fake(x: Tensor) -> bool:
    """Say whether a tensor has no memory: a tracer's, which no library's kernels can read."""
    return isinstance(x, FakeTensor)


@functools.lru_cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache
def memory_bandwidth(device: torch.device) -> float:
    """Return the bandwidth of a GPU's memory, by its bus and clock, in bytes a second; infinity for a CPU."""
    if device.type == "cpu":
        return math.inf
    properties = torch.cuda.get_device_properties(device)
    return 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8  # kHz, two transfers a clock


@functools.cache
def is_interpreted() -> bool:
    """Say whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1). Triton must be installed."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@assume_constant
def why_no_triton(device: torch.device) -> str | None:
    """Say why Triton kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if is_interpreted():
        return None if device.type == "cpu" else f"Triton's interpreter takes CPU tensors, not {device.type} tensors"
    if device.type != "cuda":
        return f"Triton kernels need a GPU, and the tensors are on {device.type}"
    if not is_rocm() and capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def is_launch_watched() -> bool:
    """Say whether a profiler wants to be told of Triton's launches."""
    triton = sys.modules.get("triton")
    hook = None if triton is None else triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))  # Triton 3.6 has None, later ones a chain of hooks
