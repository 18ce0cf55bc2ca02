"""The build of the native extension, `csrc/`: ahead of time with `ropewalk build`, or when it is first used.

The cache holds a finished library under a hash of its sources, flags and versions, so that finding it takes no
compiler. One rename puts it there: no process reads half of it. Processes that build the same library wait for each
other, and all but the first find it done.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ropewalk import device as gpu

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = "ropewalk_native.so"
LOG = "build.log"

_SUFFIXES = {".cu", ".cpp", ".h"}
_FAILURE = "failed.txt"  # beside the log: why the last build failed
_SCRATCH = "build-"  # the folder of a build under way
_LEAST_ARCHITECTURE = 80  # bfloat16 arithmetic
_DEFAULT_TOOLKIT = Path("/usr/local/cuda")

# nvcc compiles operators.cpp too: it finds its own headers, wherever it is installed.
_FLAGS = ("-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden")
_CUDA_FLAGS = ("-O3", "--threads=0")  # files and architectures side by side
_CXX_FLAGS = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)  # the stable ABI of torch 2.10
# The operators need libtorch_cuda, which a torch without CUDA lacks; libtorch depends on what there is. Unless it is
# named, some linkers leave libstdc++ out because of libtorch's, and the first exception ends the process.
_LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--no-as-needed,-lstdc++,-ltorch,-ltorch_cpu")

_CXX_RUNTIME = b"libstdc++.so.6"
_STALE = 24 * 3600.0  # seconds
_LOGGED = 1 << 18  # bytes of a compiler's output, from its start and from its end
_LAST_LINES = 20  # of the output that an error shows


class BuildError(RuntimeError):
    """The native extension could not be compiled; the message says why."""


class Compilers(NamedTuple):
    """The programs that compile the extension."""

    nvcc: str | None
    cxx: str | None  # the host compiler, for nvcc to call
    missing: str | None  # the missing program and the folders without it; None if both exist


# Names and places of libraries


def cache_dir() -> Path:
    """Return the folder of compiled libraries: $ROPEWALK_CACHE_DIR, $XDG_CACHE_HOME/ropewalk, or ~/.cache/ropewalk."""
    if chosen := os.environ.get("ROPEWALK_CACHE_DIR"):
        return Path(chosen).absolute()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches).absolute() / "ropewalk"
    try:
        return Path.home() / ".cache" / "ropewalk"
    except RuntimeError as error:
        raise BuildError(
            "there is no home folder for compiled libraries: set ROPEWALK_CACHE_DIR to a folder"
        ) from error


def parse_architecture(text: str) -> str:
    """Read a compute capability.

    >>> [parse_architecture(text) for text in ("90", "9.0", "sm_90", "12.1")]
    ['90', '90', '90', '121']
    """
    match = re.fullmatch(r"(?:sm_)?(\d{2,3}|\d{1,2}\.\d)", text)
    number = int(match[1].replace(".", "")) if match else 0
    if number < _LEAST_ARCHITECTURE:
        raise ValueError(
            f"architecture is {text!r}, but must be a compute capability of 8.0 or more, as in 90, 9.0 or sm_90"
        )
    return str(number)


def visible_architectures() -> tuple[str, ...]:
    """Return the compute capabilities of PyTorch's NVIDIA GPUs, as "80", "90" and so on, from 8.0 on."""
    if gpu.is_rocm() or not torch.cuda.is_available():
        return ()
    found = {gpu.capability(index) for index in range(torch.cuda.device_count())}
    numbers = sorted(10 * major + minor for major, minor in found)
    return tuple(str(number) for number in numbers if number >= _LEAST_ARCHITECTURE)


def cache_key(architectures: Sequence[str]) -> str:
    """Hash all that a library is made from, to 16 hexadecimal digits; not the compilers, as a look-up needs none."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in _SUFFIXES)
    parts = (
        [(path.name, path.read_bytes()) for path in sources],
        (_FLAGS, _CUDA_FLAGS, _CXX_FLAGS, _LINK_FLAGS),
        (str(torch.__version__), torch.version.cuda, platform.machine()),
        _sorted(architectures),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def library_path(architectures: Sequence[str]) -> Path:
    """Return the path of the library for exactly these architectures, built or not; its log is beside it."""
    name = "-".join(("native", cache_key(architectures), *_sorted(architectures)))
    return cache_dir() / name / LIBRARY


def find_library(architectures: Sequence[str]) -> Path | None:
    """Find a built library for these architectures, or for these and others; None if there is none."""
    own = library_path(architectures)
    if os.path.isfile(own):  # unlike Path.is_file, this takes a folder that it may not read for an empty one
        return own
    wanted, caches = set(_sorted(architectures)), cache_dir()
    try:
        folders = sorted(os.listdir(caches))
    except OSError:
        return None
    for folder in folders:
        name = re.fullmatch(r"native-([0-9a-f]{16})-(\d+(?:-\d+)+)", folder)
        if name is None or not wanted < set(built := name[2].split("-")) or name[1] != cache_key(built):
            continue
        if os.path.isfile(caches / folder / LIBRARY):
            return caches / folder / LIBRARY
    return None


def failed_before(architectures: Sequence[str]) -> str | None:
    """Return the reason why the last build of this library failed; None if it did not, or there was none."""
    try:
        return (library_path(architectures).parent / _FAILURE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def may_build_on_first_use() -> str | None:
    """Say why the extension must not be compiled when it is first used; None if it may be."""
    wish = os.environ.get("ROPEWALK_BUILD_ON_FIRST_USE", "1")
    # Only 1 is a yes: "off" and "false" mean no.
    return None if wish in ("", "1") else f"ROPEWALK_BUILD_ON_FIRST_USE is {wish!r}"


def _sorted(architectures: Sequence[str]) -> tuple[str, ...]:
    if isinstance(architectures, str) or not architectures:
        raise ValueError(f'architectures is {architectures!r}, but must name at least one, as in ("90",)')
    return tuple(sorted({parse_architecture(text) for text in architectures}, key=int))


# The compilers


def find_compilers() -> Compilers:
    """Find nvcc and the host compiler, without running either."""
    if sys.platform != "linux":
        return Compilers(None, None, f"it is built on Linux, and this is {sys.platform}")
    nvcc, no_nvcc = _find_nvcc()
    cxx, no_cxx = _find_cxx()
    return Compilers(nvcc, cxx, "; ".join(reason for reason in (no_nvcc, no_cxx) if reason) or None)


def _find_nvcc() -> tuple[str | None, str | None]:
    if (chosen := _chosen("CUDACXX")) is not None:
        return chosen
    folders = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit := os.environ.get(variable):
            folders.append((f"${variable}/bin", os.path.join(toolkit, "bin")))
    folders.append(("PATH", os.environ.get("PATH", os.defpath)))
    packages = Path(torch.__file__).parents[1]  # the package nvidia-cuda-nvcc goes beside torch
    folders.append(("the Python packages", os.pathsep.join(map(str, packages.glob("nvidia/cu*/bin")))))
    folders.append((f"{_DEFAULT_TOOLKIT}/bin", os.path.join(_DEFAULT_TOOLKIT, "bin")))
    for _, path in folders:
        if nvcc := shutil.which("nvcc", path=path):
            return os.path.abspath(nvcc), None
    looked = ", ".join(name for name, _ in folders)
    return None, f"nvcc is missing: it is not in {looked}, and CUDACXX is not set"


def _find_cxx() -> tuple[str | None, str | None]:
    # $CXX is not read: it may be a compiler with libraries of its own, and what nvcc takes suits the system's.
    if (chosen := _chosen("NVCC_CCBIN")) is not None:
        return chosen
    if cxx := shutil.which("g++") or shutil.which("c++"):
        return os.path.abspath(cxx), None
    return None, "a C++ compiler is missing: neither g++ nor c++ is in PATH, and NVCC_CCBIN is not set"


def _chosen(variable: str) -> tuple[str | None, str | None] | None:
    """Return the program that an environment variable names, or an error; None if the variable is not set."""
    name = os.environ.get(variable)
    if not name:
        return None
    program = shutil.which(name)
    if program is None:
        return None, f"{variable} is {name!r}, but must be the name or the path of one program that can be run"
    return os.path.abspath(program), None


def _command(compilers: Compilers, architectures: Sequence[str], library: Path) -> list[str]:
    """Return the command that compiles and links the library."""
    package = Path(torch.__file__).parent
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    targets.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")  # for GPUs to come
    # nvcc takes its default by itself: an installation may name a host compiler that suits it better.
    host = [] if compilers.cxx == shutil.which("g++") else ["-ccbin", str(compilers.cxx)]
    folders = [package / "lib"]
    # From Python packages the runtime is in lib, and nvcc looks for it in lib64.
    toolkit = Path(str(compilers.nvcc)).resolve().parents[1]
    if (toolkit / "lib" / "libcudart_static.a").is_file():
        folders.append(toolkit / "lib")
    return [
        *(str(compilers.nvcc), *host, *_FLAGS, *_CUDA_FLAGS, *_CXX_FLAGS, *targets),
        *("-isystem", str(package / "include"), str(SOURCES / "rotate.cu"), str(SOURCES / "operators.cpp")),
        # No run path: a process that loads the library has loaded torch.
        *(*(f"-L{folder}" for folder in folders), *_LINK_FLAGS, "-o", str(library)),
    ]


# Building


def build(architectures: Sequence[str], *, force: bool = False) -> Path:
    """Return the library for these architectures, compiled now unless it is there; BuildError if that fails.

    A compilation that fails is remembered, for `failed_before`, until one succeeds. force: compile in any case.
    """
    architectures = _sorted(architectures)
    if not force and (found := find_library(architectures)) is not None:
        return found
    library = library_path(architectures)
    folder = library.parent
    compilers = find_compilers()
    if compilers.missing is not None:
        raise BuildError(f"the native extension cannot be built: {compilers.missing}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        asked = _stamp(folder / _FAILURE)
        with _lock(folder):
            if not force and library.is_file():
                return library  # another process was faster
            _clear(folder)
            if not force and _stamp(folder / _FAILURE) not in (None, asked):
                raise BuildError(failed_before(architectures))  # another process has just tried in vain
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder, ignore_cleanup_errors=True) as scratch:
                _build(_command(compilers, architectures, Path(scratch, LIBRARY)), folder, Path(scratch))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise BuildError(
            f"the native extension cannot be built in {folder}: {error.strerror or error}{where}"
        ) from error
    return library


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, in which one process builds at a time."""
    import fcntl  # Linux only, as the extension

    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # A network file system may have no locks. Then two processes may compile, and the second one's rename wins.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        yield


def _clear(folder: Path) -> None:
    """Remove the files of a process that was killed."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            # By age, not by the lock: a build on another machine, which shares no locks, must keep its files.
            if time.time() - scratch.stat().st_mtime > _STALE:
                shutil.rmtree(scratch)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is written anew; None where there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _build(command: Sequence[str], folder: Path, scratch: Path) -> None:
    """Run the command, and put the library, or the reason why there is none, into a folder."""
    log, library = scratch / "log", scratch / LIBRARY
    code = _run(command, scratch, log)
    output, shown = _read(log), shlex.join(command)
    _publish(f"$ {shown}\n{output}", scratch, folder / LOG)
    failure = ""
    if code < 0:
        failure = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    elif code > 0:
        failure = f"exited with {code}"
    elif not library.is_file():
        failure = "wrote no library"
    if failure:
        lines = "\n".join(f"    {line}" for line in output.splitlines()[-_LAST_LINES:]) or "    (nothing)"
        failure = f"{os.path.basename(command[0])} {failure}\n  command: {shown}\n  the end of its output:\n{lines}"
    elif _CXX_RUNTIME not in library.read_bytes():
        failure = (
            f"it does not use {_CXX_RUNTIME.decode()} as PyTorch does, and its first exception would end the process; "
            "name another C++ compiler in NVCC_CCBIN"
        )
    if failure:
        reason = f"the native extension was not built: {failure}\n  the whole log: {folder / LOG}"
        _publish(reason, scratch, folder / _FAILURE)
        raise BuildError(reason)
    with library.open("rb") as file:
        os.fsync(file.fileno())  # or a machine that loses power may keep the name and lose the bytes
    os.replace(library, folder / LIBRARY)
    (folder / _FAILURE).unlink(missing_ok=True)


def _run(command: Sequence[str], scratch: Path, log: Path) -> int:
    """Run the command, its output into a file; returns its exit code. It and all that it started end with this."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": scratch, "start_new_session": True}
    # Temporary files of compilers are removed with the folder.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(command, stdout=file, env=environment, **options)  # type: ignore[call-overload]
        except OSError as error:
            raise BuildError(
                f"the native extension cannot be built: {command[0]} does not run: {error.strerror}"
            ) from error
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code: int = process.wait()
    return code


def _read(log: Path) -> str:
    """Read a compiler's output, without the middle of a very long one: its first errors and its last lines matter."""
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(2 * _LOGGED)
        if size > 2 * _LOGGED:
            file.seek(-_LOGGED, os.SEEK_END)
            text = b"%s\n[%d bytes are left out]\n%s" % (text[:_LOGGED], size - 2 * _LOGGED, file.read())
    return text.decode(errors="replace")


def _publish(text: str, scratch: Path, path: Path) -> None:
    draft = scratch / f"{path.name}.draft"
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
