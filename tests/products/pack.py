"""Compile here, run there: packs of the kernels that calls launch on an H100 or an H200, made without a GPU.

`compile_calls` runs calls on the stub of a GPU, and keeps the binaries in a folder, by the keys that Triton looks up on
the machine with the GPU. `write_pack` packs them. `read_pack` unpacks them there into Triton's cache, and `watch`
counts kernels that are compiled all the same. A call is a `Job`: a function's name and its arguments, as JSON has them.
"""

from __future__ import annotations

import base64
import datetime
import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
# A job's binaries depend on no more than these files, Triton and the target.
SOURCES = ("src/ropewalk", "tests/products", "tests/helpers/stub_gpu.py", "tests/helpers/stub_cuda.c")
RUNS = 3  # of a call: the first compiles, the second makes a plan, the third runs by it
TIMEOUT = 600  # seconds of a job
_LAUNCHER = "__triton_launcher"
_MANIFEST = "manifest.json"
_PROGBITS = 1  # the kind of a section of an ELF file with contents
_are_settled: list[bool] = []  # keys of this process: one item if they are


class Job(NamedTuple):
    """A call to run."""

    function: str  # "module:function"
    arguments: Sequence[Any]  # as JSON has them


class Target(NamedTuple):
    """A machine with an H100 or H200, as far as binaries and their keys depend on it."""

    key: str  # `triton_key()` there
    suffix: str  # of Python's extension modules there
    headers: str  # a folder of Python.h, of the same minor version
    platform: str = "x86_64,Linux,64bit,ELF"  # `platform_key()` there
    memory_bandwidth: float = 4.8e12  # bytes a second of an H200; an H100 has 3.35e12, and another order of steps


class Result(NamedTuple):
    """A job that ran: the folders of its kernels and of its launchers in Triton's cache."""

    job: Job
    seconds: float
    kernels: list[str]
    launchers: list[str]
    n_compiled: int  # kernels that the cache did not have
    error: str | None


def run(job: Job) -> Any:
    """Run a job in this process."""
    module, _, function = job.function.partition(":")
    return getattr(importlib.import_module(module), function)(*job.arguments)


# Keys.


def triton_key_of(folder: Path) -> str:
    """Return `triton_key()` of Triton 3.6 as it is in a folder, such as an unpacked wheel of another Python."""
    version = re.search(r"__version__ = '([^']+)'", (folder / "__init__.py").read_text())
    if version is None:
        raise ValueError(f"folder is {folder}, but must be one of Triton: it has no version")
    files = [folder / "runtime/cache.py", *_modules(folder / "compiler"), *_modules(folder / "backends")]
    files += [folder / "_C/libtriton.so", *_modules(folder / "language")]
    return version[1] + "-".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _modules(folder: Path) -> Iterator[Path]:
    """Return the modules of a package and its packages, as `pkgutil.walk_packages` orders them."""
    for module in pkgutil.iter_modules([str(folder)]):
        if module.ispkg:
            yield folder / module.name / "__init__.py"
            yield from _modules(folder / module.name)
        else:
            yield folder / f"{module.name}.py"


def settle_keys() -> None:
    """Hash all functions of kernels in one order; a process does so before its first launch.

    Triton's hash of a function, a part of its key, depends on which of its callees were hashed before it.
    """
    from triton.runtime.jit import JITFunction

    from ropewalk import ops

    names = sorted(module.name for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."))
    found = [x for name in names for _, x in sorted(vars(importlib.import_module(name)).items())]
    functions = [x for x in found if isinstance(x, JITFunction)]
    hashed = [function.__name__ for function in functions if function.hash is not None]
    if hashed and not _are_settled:
        raise RuntimeError(f"{hashed[0]} was launched before its key was settled, but all keys must be settled first")
    _are_settled[:] = [True]
    for function in functions:
        assert function.cache_key


def _folder_of(key: str) -> str:
    """Return the folder of a key in Triton's cache."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sources() -> Iterator[Path]:
    """Return the files that a job's binaries depend on."""
    for top in (ROOT / source for source in SOURCES):
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        yield from (file for file in files if file.suffix in (".py", ".c"))


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for file in _sources():
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


# Here, without a GPU.


def compile_calls(jobs: Sequence[Job], folder: Path, target: Target, workers: int = 2) -> list[Result]:
    """Run jobs on the stub of a GPU, each in a process of its own, and return their results, in the same order.

    Jobs that the folder has from before are not run: those that nothing changed for, and that did not fail.
    """
    sources = _digest_of_sources()
    digests = [_digest(json.dumps([job, target, sources])) for job in jobs]
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    missing = {digest: job for digest, job in zip(digests, jobs, strict=True) if _is_missing(folder, digest)}
    if missing:
        from helpers import stub_gpu

        cache = {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_STORE_BINARY_ONLY": "1"}
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        work = json.dumps([str(folder), missing, target, workers])
        program = "import json, sys\nfrom products import pack\npack._work(*json.load(sys.stdin))"
        environment = {**os.environ, **stub_gpu.environment(), **cache, **path}
        subprocess.run([sys.executable, "-c", program], input=work, text=True, check=True, env=environment)
    (folder / "packed.json").write_text(json.dumps([target, digests]))
    return [_result(folder, digest) for digest in digests]


def _result(folder: Path, digest: str) -> Result:
    fields = json.loads((folder / f"jobs/{digest}.json").read_text())
    return Result(**{**fields, "job": Job(**fields["job"])})


def _is_missing(folder: Path, digest: str) -> bool:
    return not (folder / f"jobs/{digest}.json").exists() or _result(folder, digest).error is not None


def _write(folder: Path, digest: str, result: Result) -> None:
    written = folder / f"jobs/{digest}.new"
    written.write_text(json.dumps({**result._asdict(), "job": result.job._asdict()}))
    written.replace(written.with_suffix(".json"))


# In the process with the stub, which forks for each job: what all of them import it imports once.


class _Used:
    """The entries of Triton's cache that this process used, and what it registered."""

    def __init__(self) -> None:
        self.kernels: dict[str, bool] = {}  # whether it was compiled, by the folder
        self.launchers: dict[str, None] = {}
        self.operators: list[Any] = []


_used = _Used()


def _work(folder: str, jobs: dict[str, list[Any]], target: list[Any], workers: int) -> None:
    """Run jobs, by their digests."""
    _install(Target(*target))
    gc.collect()
    gc.freeze()
    gc.disable()
    running: dict[int, str] = {}
    given = {digest: Job(*job) for digest, job in jobs.items()}
    n_done = 0
    for digest in (*given, *(None,) * workers):
        while running and (digest is None or len(running) == workers):
            pid, status = os.wait()
            n_done += 1
            _finish(Path(folder), running.pop(pid), given, status, f"{n_done} of {len(given)}")
        if digest is not None:
            pid = os.fork()
            if pid == 0:
                _run_and_end(Path(folder), digest, given[digest])
            running[pid] = digest


def _finish(folder: Path, digest: str, given: dict[str, Job], status: int, progress: str) -> None:
    """Keep why a job's process ended early, if it did, and print a line."""
    log, job = folder / f"jobs/{digest}.log", given[digest]
    if status != 0:
        error = f"ended with {status}:\n{log.read_text()[-4000:]}"
        _write(folder, digest, Result(job, 0.0, [], [], 0, error))
    log.unlink(missing_ok=True)
    result = _result(folder, digest)
    found = f"{result.n_compiled} of {len(result.kernels)} kernels compiled in {result.seconds:.1f} s"
    print(f"{progress}: {job.function}{tuple(job.arguments)}: {result.error or found}", flush=True)


def _run_and_end(folder: Path, digest: str, job: Job) -> None:
    """Run a job in this process, a fork, and end it."""
    signal.alarm(TIMEOUT)
    log = os.open(folder / f"jobs/{digest}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    start, error = time.time(), None
    try:
        for _ in range(RUNS):
            run(job)
    except Exception:
        error = traceback.format_exc()
    kernels, launchers = list(_used.kernels), list(_used.launchers)
    n_compiled = sum(_used.kernels.values())
    _write(folder, digest, Result(job, time.time() - start, kernels, launchers, n_compiled, error))
    os._exit(0)


def _install(target: Target) -> None:
    """Make this process compile for a target: on the stub of a GPU, with the target's keys and launchers."""
    import triton
    from helpers import stub_gpu
    from triton.runtime import autotuner, cache

    from ropewalk import device as gpu
    from ropewalk.ops.attention import backends
    from ropewalk.ops.attention.blocks import tables as block_tables
    from ropewalk.ops.attention.libraries import sdpa
    from ropewalk.ops.attention.triton.support import Triton
    from ropewalk.ops.launch import kinds, launcher

    if not target.key.startswith(triton.__version__):
        raise ValueError(f"target.key is of Triton {target.key[:8]}…, but must be of Triton {triton.__version__}")
    order, patch = backends.backend_order, stub_gpu._patch
    stub_gpu.install()
    triton.knobs.runtime.kernel_load_end_hook.calls.clear()  # the stub's reads PTX, which is not kept
    triton.knobs.compilation.listener = _note_kernel
    for module in (cache, autotuner):
        patch(module, "triton_key", lambda: target.key)
    patch(gpu, "memory_bandwidth", lambda device: target.memory_bandwidth)
    # The choice of a backend is a GPU's: nothing of it is a CPU's, as the head dims that kernels run there are.
    patch(backends, "backend_order", lambda call: order(_on_gpu(call)))
    for backend in (sdpa.Sdpa, Triton):
        patch(backend, "why_not", _asked_on_gpu(backend.why_not))
    patch(sdpa, "may_use_cudnn", lambda: True)
    patch(block_tables, "_has_values", lambda x: False)  # lists that a kernel makes hold anything here
    _stand_in_for_cudnn()
    kinds.on_cpu = True
    _build_for(target)
    settle_keys()
    # All jobs have these two modules.
    assert triton.runtime.driver.active.utils is not None
    assert launcher.why_missing() is None, launcher.why_missing()


def _stand_in_for_cudnn() -> None:
    """Let cuDNN's attention return memory for its results on a CPU, where it is missing."""
    from torch import _meta_registrations as shapes

    library, name = torch.library.Library("aten", "IMPL"), "_scaled_dot_product_cudnn_attention"
    library.impl(name, shapes.meta__scaled_dot_product_cudnn_attention, "CPU")
    library.impl(f"{name}_backward", shapes.meta__scaled_dot_product_cudnn_backward, "CPU")
    _used.operators.append(library)  # they last as long as it does


class _OnGpu:
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def __init__(self, x: Any) -> None:
        self.x, self.device = x, type(x.device)("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


def _on_gpu(call: Any) -> Any:
    """Return a call whose queries say that they are on a GPU, for what decides by them."""
    return call._replace(q=_OnGpu(call.q))


def _asked_on_gpu(why_not: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda backend, call: why_not(backend, _on_gpu(call))


def _note_kernel(*, metadata: dict[str, Any], cache_hit: bool, **others: Any) -> None:
    """Note a kernel: Triton's listener."""
    _used.kernels.setdefault(_folder_of(metadata["hash"]), not cache_hit)


class _Launch:
    """A launch of a kernel that launches nothing. It is no function, as those of C are none."""

    def launch(self, *arguments: Any) -> None:
        """Return at once."""

    __call__ = launch


def _build_for(target: Target) -> None:
    """Build modules in C for a target's Python; those of launches have a stand-in here."""
    from triton.backends.nvidia import driver
    from triton.runtime import build, cache

    build_here = build.compile_module_from_src

    def compile_module(src: str, name: str, **options: Any) -> Any:
        key = _digest(src + target.platform)
        entry = cache.get_cache_manager(key)
        _used.launchers[_folder_of(key)] = None
        if entry.get_file(f"{name}{target.suffix}") is None:
            entry.put(_build(src, target, **options), f"{name}{target.suffix}")
        return _STAND_IN if name == _LAUNCHER else build_here(src, name, **options)

    build.compile_module_from_src = driver.compile_module_from_src = compile_module


class _StandIn:
    launch = _Launch()


_STAND_IN = _StandIn()


def _build(
    source: str,
    target: Target,
    library_dirs: Sequence[str] = (),
    include_dirs: Sequence[str] = (),
    libraries: Sequence[str] = (),
) -> bytes:
    """Compile a module in C for a target's Python."""
    with tempfile.TemporaryDirectory() as folder:
        written, built = Path(folder, "module.c"), Path(folder, "module.so")
        written.write_text(source)
        includes = [f"-I{include}" for include in (*include_dirs, target.headers)]
        linked = [*(f"-L{directory}" for directory in library_dirs), *(f"-l:{library}" for library in libraries)]
        flags = ["-O1", "-shared", "-fPIC", "-Wno-psabi"]
        command = [os.environ.get("CC", "gcc"), *flags, *includes, str(written), "-o", str(built), *linked]
        subprocess.run(command, check=True)
        return built.read_bytes()


# A pack.


def write_pack(folder: Path, path: Path) -> dict[str, Any]:
    """Pack the binaries of the last `compile_calls` of a folder into a tar.xz, and return its manifest."""
    (key, suffix, *_), digests = json.loads((folder / "packed.json").read_text())
    results = [_result(folder, digest) for digest in digests]
    done = [result for result in results if result.error is None]
    kernels = {entry for result in done for entry in result.kernels}
    launchers = {entry for result in done for entry in result.launchers}
    wanted = [(entry, re.compile(r"(?!__grp__).*\.(cubin|json)")) for entry in kernels]
    wanted += [(entry, re.compile(rf".*{re.escape(suffix)}")) for entry in launchers]
    files = [
        file
        for entry, pattern in wanted
        for file in (folder / "triton" / entry).iterdir()
        if pattern.fullmatch(file.name)
    ]
    files.sort(key=lambda file: (file.suffix, file.name, file.stat().st_size))  # like beside like, for the compressor
    manifest = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "triton_key": key,
        "python": suffix,
        "environment": {},  # nothing that Triton's keys depend on is set while jobs run
        "jobs": [result.job for result in done],
        "failed": [result.job for result in results if result.error is not None],
        "kernels": len(kernels),
        "launchers": len(launchers),
        "bytes": sum(file.stat().st_size for file in files),
    }
    text = json.dumps(manifest, indent=1).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz", preset=6) as tar:
        about = tarfile.TarInfo(_MANIFEST)
        about.size = len(text)
        tar.addfile(about, io.BytesIO(text))
        for file in files:
            data = file.read_bytes()
            entry = tarfile.TarInfo(f"{file.parent.name}/{file.name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(_without_debug(data) if file.suffix == ".cubin" else data))
    return manifest


def _without_debug(cubin: bytes) -> bytes:
    """Return a binary (ELF) whose sections for debuggers hold zeros: they are two thirds of it, compressed."""
    made = bytearray(cubin)
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, n_sections, of_names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(n_sections)]
    names = sections[of_names][4]
    for name, kind, _, _, offset, length in sections:
        start = names + name
        label = cubin[start : cubin.index(0, start)]
        if kind == _PROGBITS and label.startswith((b".debug", b".nv_debug")):
            made[offset : offset + length] = bytes(length)
    return bytes(made)


def _commit() -> str:
    """Return the commit, with a plus where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# There, with a GPU.


def read_pack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a pack into a folder, make it Triton's cache in this process, and return the manifest."""
    from triton.runtime.cache import triton_key

    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
    if manifest["triton_key"] != triton_key():
        raise ValueError(f"path is a pack for another build of Triton {manifest['triton_key'][:5]} than is installed")
    for file in folder.glob("*/*.cubin"):
        about = file.with_suffix(".json")
        paths = {each.name: str(each.absolute()) for each in (file, about)}
        about.with_name(f"__grp__{about.name}").write_text(json.dumps({"child_paths": paths}))
    os.environ.update(manifest["environment"], TRITON_CACHE_DIR=str(folder.absolute()))
    settle_keys()
    return manifest


class Watched(NamedTuple):
    """What was compiled since `watch`: the names."""

    kernels: list[str]
    modules: list[str]


def watch() -> Watched:
    """Watch what Triton compiles in this process from now on: kernels, and modules in C such as launchers."""
    import triton
    from triton.runtime import build

    watched, build_here = Watched([], []), build._build

    def note_kernel(*, metadata: dict[str, Any], cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            watched.kernels.append(metadata["name"])

    def note_build(name: str, *arguments: Any, **keywords: Any) -> str:
        watched.modules.append(name)
        built: str = build_here(name, *arguments, **keywords)
        return built

    triton.knobs.compilation.listener = note_kernel
    build._build = note_build
    return watched
