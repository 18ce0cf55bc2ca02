"""A stub of a GPU: CPU tensors stand for CUDA ones, Triton compiles and launches for sm_90, and nothing runs.

The path of the host is real up to the CUDA driver. `stub_cuda.c` is the driver: it counts and records launches.

A test calls `run` with a function, which a child process runs: the patches here would break the tests of a CPU. The
function uses `launches`, `counts`, `clear`, `python_calls` and `best`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers.modes import ON_GPU
from helpers.processes import FORKED

SOURCE = Path(__file__).with_name("stub_cuda.c")
BUILD = Path(__file__).parents[2] / "build/stub_gpu"  # kept: kernels compile once
# Of glibc's mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD. The allocator of CPU tensors is quick then, as
# PyTorch's is on a GPU.
HEAP = {-3: 2**31 - 1, -1: 2**31 - 1, -2: 2**28}


# In the test's process.


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a child process that has the stub, and return its result; both by JSON."""
    if ON_GPU:
        pytest.skip("a stub stands for the GPU")
    with tempfile.TemporaryDirectory() as folder:
        task = (f"{function.__module__}:{function.__name__}", json.dumps(arguments), Path(folder), environment())
        process = FORKED.Process(target=_work, args=task)
        process.start()
        process.join()
        if process.exitcode != 0:
            pytest.fail(f"{function.__name__} failed on the stub of a GPU:\n{Path(folder, 'output').read_text()}")
        return json.loads(Path(folder, "result").read_text())


def environment() -> dict[str, str]:
    """Return the variables that a process with the stub has beside this one's environment."""
    return {"TRITON_LIBCUDA_PATH": str(build()), "TRITON_CACHE_DIR": str(BUILD / "triton"), "TRITON_INTERPRET": "0"}


def build() -> Path:
    """Compile the driver, and return the folder of libcuda.so.1."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no C compiler")
    triton = pytest.importorskip("triton")
    folder = BUILD / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        include = Path(triton.__file__).parent / "backends/nvidia/include"
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / library.name
            # Triton's launchers look the library up by its soname, and find the one that is loaded.
            flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{library.name}"]
            subprocess.run([compiler, *flags, "-isystem", str(include), str(SOURCE), "-o", str(built)], check=True)
            built.replace(library)  # other workers build it, too
    return folder


# In the child process.


class Launch(NamedTuple):
    """What the driver was given to launch."""

    name: str
    function: int  # the driver's handle: each binary has its own
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    attributes: list[tuple[int, ...]]  # the id, and the first three numbers of the value
    args: list[Any]  # ("address", address), ("descriptor", address, a hash of the rest), or a scalar


class Counts(NamedTuple):
    """How many launches there were since `clear`, and how many descriptors were encoded."""

    launches: int
    descriptors: int


def launches() -> list[Launch]:
    """Return the launches since `clear`."""
    driver = _driver()
    if driver.stub_recorded() != driver.stub_launches():
        raise RuntimeError(f"{driver.stub_launches()} launches since clear(), and {driver.stub_recorded()} have room")
    data = ctypes.string_at(driver.stub_records(), driver.stub_used())
    found, offset = [], 0
    while offset < len(data):
        function, stream, *numbers = _RECORD.unpack_from(data, offset)
        grid, block, (shared, n_attributes) = numbers[:3], numbers[3:6], numbers[6:8]
        attributes = [tuple(numbers[8 + 4 * i : 12 + 4 * i]) for i in range(n_attributes)]
        offset += _RECORD.size
        if function not in _layouts:
            raise RuntimeError(f"a kernel was loaded behind Triton's back: {driver.stub_name(function).decode()}")
        args = []
        for kind, size in _layouts[function]:
            args.append(_read(kind, data[offset : offset + size]))
            offset += size
        name = driver.stub_name(function).decode()
        threads = block[0] * block[1] * block[2]
        found.append(Launch(name, function, tuple(grid), threads, shared, stream, attributes, args))
    return found


def clear() -> None:
    """Forget the launches, and count from zero."""
    _driver().stub_clear()


def counts() -> Counts:
    """Count the launches and the descriptors since `clear`."""
    return Counts(_driver().stub_launches(), _driver().stub_descriptors())


def python_calls(function: Callable[[], Any]) -> int:
    """Count the functions of Python that a call enters in this thread, without itself."""
    n_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    gc.disable()  # finalizers count, too
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n_calls - 1


def best(function: Callable[[], Any], calls: int = 20, rounds: int = 80) -> float:
    """Return the µs of this thread's CPU time that a call takes: the least mean of short rounds."""
    for _ in range(calls):
        function()
    least = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            function()
        least = min(least, time.thread_time() - start)
    return least / calls * 1e6


_RECORD = struct.Struct("QQ3I3III16IQ")  # `Record` of stub_cuda.c; the last is its parameters' size
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w)(\d+)( \.ptr)?.*_param_\d+(?:\[(\d+)\])?")
_INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}
_FLOATS = {4: "f", 8: "d"}
_layouts: dict[int, list[tuple[str, int]]] = {}  # of each function: the kind and the size of each parameter


def _read(kind: str, data: bytes) -> Any:
    """Return the value of a kernel's parameter."""
    if kind == "address":
        return ("address", *struct.unpack("Q", data))
    if kind == "descriptor":
        return ("descriptor", *struct.unpack_from("QQ", data))
    return struct.unpack(kind, data)[0]


def _remember_layout(module: int, function: int, name: str, files: dict[str, str], key: str) -> None:
    """Read from a kernel's PTX its parameters, which the driver must know to record them: a hook of Triton."""
    ptx = Path(files[f"{name}.ptx"]).read_text()
    entry = ptx[ptx.index(f".entry {name}(") :]
    layout = []
    for letter, bits, pointer, length in _PARAMETER.findall(entry[: entry.index("\n)")]):
        size = int(bits) // 8 * int(length or 1)
        if pointer:
            layout.append(("address", size))
        elif size == 128:
            layout.append(("descriptor", size))
        else:
            layout.append(((_FLOATS if letter == "f" else _INTEGERS)[size], size))
    sizes = [size for _, size in layout]
    _layouts[function] = layout
    _driver().stub_set_layout(function, len(sizes), (ctypes.c_uint32 * len(sizes))(*sizes))


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load the stub of the driver, before Triton does."""
    driver = ctypes.CDLL(f"{os.environ['TRITON_LIBCUDA_PATH']}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    for name in ("launches", "descriptors", "recorded", "used"):
        getattr(driver, f"stub_{name}").restype = ctypes.c_uint64
    driver.stub_records.restype = ctypes.c_void_p
    driver.stub_name.argtypes, driver.stub_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    driver.stub_set_layout.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    return driver


class _Stream:
    cuda_stream = 0

    def synchronize(self) -> None:
        """Return at once: nothing runs."""


class _Properties:
    name = "stub"
    multi_processor_count = 132


def install() -> None:
    """Patch what looks at devices, in PyTorch, Triton and Ropewalk. The path enters as many functions as on a GPU."""
    _driver()
    for parameter, value in HEAP.items():
        assert ctypes.CDLL(None).mallopt(parameter, value) == 1
    torch.set_num_threads(1)
    stream, properties, zero = _Stream(), _Properties(), (0).__mul__
    # A CPU's PyTorch lacks them; those of C stay without a frame of Python.
    torch._C._cuda_getDevice = (0).__int__
    torch._C._cuda_getCurrentRawStream = zero
    _patch(torch.cuda, "_exchange_device", zero)
    _patch(torch.cuda, "_maybe_exchange_device", zero)
    _patch(torch.cuda, "_lazy_init", lambda: None)
    _patch(torch.cuda, "is_available", lambda: True)
    _patch(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    _patch(torch.cuda, "get_device_name", lambda device=None: properties.name)
    _patch(torch.cuda, "get_device_properties", lambda device=None: properties)
    _patch(torch.cuda, "current_stream", lambda device=None: stream)
    _patch(torch.cuda, "is_current_stream_capturing", lambda: False)

    import triton

    triton.knobs.runtime.kernel_load_end_hook.add(_remember_layout)

    from ropewalk import device as gpu
    from ropewalk.ops.attention import backends, validate
    from ropewalk.ops.attention.hopper import support
    from ropewalk.ops.attention.triton.support import Triton
    from ropewalk.ops.cache import operator as append_operator
    from ropewalk.ops.launch import plan
    from ropewalk.ops.rope import backends as rope_backends

    _patch(gpu, "capability", lambda device: (9, 0))
    _patch(gpu, "is_nvidia", lambda device: True)
    _patch(gpu, "num_sms", lambda device: 132)
    # An H100's, which changes the order of steps; a plan's tensors are on another device, and must not be asked.
    _patch(gpu, "memory_bandwidth", lambda device: 3.35e12 if device.type == "cpu" else 4.8e12)
    _patch(gpu, "why_no_triton", lambda device: None)
    _patch(support, "why_not_on", lambda device: None)
    _patch(validate, "has_values", lambda x: False)
    _patch(backends, "backend_order", lambda call: _order(backends, call))
    _patch(rope_backends, "choose", lambda *arguments, **keywords: "triton")  # the CUDA extension needs a GPU
    triton_why_not = Triton.why_not

    def why_not_on_gpu(backend: Any, call: Any) -> Any:
        refusal = triton_why_not(backend, call)
        return None if refusal is not None and refusal.code == "interpreter_bfloat16" else refusal

    init_append = append_operator.Launcher.__init__

    def init_append_on_gpu(launcher: Any, call: Any) -> None:
        init_append(launcher, call)
        launcher.checks = False

    _patch(plan, "_no_stream", zero)
    _patch(append_operator.Launcher, "__init__", init_append_on_gpu)
    _patch(Triton, "why_not", why_not_on_gpu)


def _order(backends: Any, call: Any) -> tuple[str, ...]:
    """Return what `backend_order` returns on an H100."""
    return next(rule.order for rule in backends.ORDER[9, 0] if rule.fits(call))


def _patch(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute, which must exist."""
    getattr(owner, name)
    setattr(owner, name, value)


def _work(name: str, arguments: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a function, and write its result, and what is printed."""
    with Path(folder, "output").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.update(environment)
    install()
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    Path(folder, "result").write_text(json.dumps(result))
