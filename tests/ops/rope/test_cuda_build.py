"""Where the native extension is looked for and how it gets there, with a stand-in for the compilers."""

from __future__ import annotations

import ast
import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk import device as gpu
from ropewalk.ops.rope.cuda import build as native_build
from ropewalk.ops.rope.cuda.build import BuildError, build, cache_key, failed_before, find_compilers, find_library

STAND_IN = """\
#!{python} -IS
import os, signal, sys, time
output = sys.argv[sys.argv.index("-o") + 1]
name = os.path.basename(output)
with open({calls!r}, "a") as calls:
    calls.write(repr(sys.argv[1:]) + "\\n")
{code}
with open(output, "w") as file:
    file.write(name + " made by {version} with {runtime}")
"""
FORK = multiprocessing.get_context("fork")  # the children find the stand-ins in place


class Toolchain:
    """A program that passes for nvcc: it writes down how it was called, and makes what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.nvcc = folder / "nvcc"
        self._calls = folder / "calls"

    def becomes(self, code: str = "", *, version: str = "1", runtime: str = "libstdc++.so.6") -> None:
        """Let the program run `code` before it writes its output, whose name is `name`."""
        text = STAND_IN.format(
            python=sys.executable, calls=str(self._calls), code=code, version=version, runtime=runtime
        )
        self.nvcc.unlink(missing_ok=True)  # a process may be running it
        self.nvcc.write_text(text)
        self.nvcc.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """The arguments of each call."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [ast.literal_eval(line) for line in lines]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's compilers nor its cache."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "XDG_CACHE_HOME", "ROPEWALK_BUILD_ON_FIRST_USE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROPEWALK_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    for name in ("rotate.h", "rotate.cu", "operators.cpp"):
        (sources / name).write_text(f"// {name}")
    monkeypatch.setattr(native_build, "SOURCES", sources)


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """A stand-in for nvcc, and one for the host compiler that is never run."""
    programs = tmp_path / "programs"
    programs.mkdir()
    toolchain = Toolchain(programs)
    toolchain.becomes()
    monkeypatch.setenv("CUDACXX", str(toolchain.nvcc))
    shutil.copy(toolchain.nvcc, programs / "g++")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return toolchain


def left(tmp_path: Path) -> list[str]:
    """The names of all files and folders in the libraries' folders."""
    return sorted(path.name for path in (tmp_path / "cache").glob("*/**/*"))


def in_child(work: Callable[[Any], None]) -> tuple[Any, Any]:
    """Start `work` in a process of its own; returns the process and what it sends."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, args=(sender,))
    process.start()
    return process, receiver


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# Which library, and where


def change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    (native_build.SOURCES / "rotate.h").write_text("// rotate.H")


def add_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    (native_build.SOURCES / "more.h").touch()


def change_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_CXX_FLAGS", (*native_build._CXX_FLAGS, "-g"))


def change_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "99.0")


def change_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")


def change_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")


@pytest.mark.parametrize(
    "change", [change_a_byte, add_a_header, change_a_flag, change_torch, change_cuda, change_the_machine]
)
def test_the_key_changes_with_each_input(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache_key(("90",))
    assert cache_key(("90",)) == before
    change(monkeypatch)
    assert cache_key(("90",)) != before


def test_the_key_depends_on_architectures_and_not_on_their_spelling() -> None:
    assert len({cache_key(names) for names in (("80",), ("90",), ("80", "90"), ("90", "100"))}) == 4
    assert cache_key(["9.0", "sm_80", "90"]) == cache_key(("80", "90"))
    assert len(cache_key(("90",))) == 16


def test_the_key_passes_over_what_is_not_compiled() -> None:
    before = cache_key(("90",))
    (native_build.SOURCES / "rotate.cu~").write_text("an editor's copy")
    assert cache_key(("90",)) == before


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_build.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert native_build.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("ROPEWALK_CACHE_DIR", "")
    assert native_build.cache_dir() == tmp_path / "xdg" / "ropewalk"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native_build.cache_dir() == tmp_path / "home" / ".cache" / "ropewalk"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEWALK_CACHE_DIR", "here")
    assert native_build.library_path(("90",)).is_relative_to(tmp_path / "here")


def test_without_a_home_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ROPEWALK_CACHE_DIR")
    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    with pytest.raises(BuildError, match="set ROPEWALK_CACHE_DIR"):
        native_build.cache_dir()


@pytest.mark.parametrize("text", ["7.5", "sm_70", "90a", "compute_90", "9", "", "10.00"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"architecture is '{text}', but must be a compute capability of 8.0 or more"):
        native_build.parse_architecture(text)


@pytest.mark.parametrize("architectures", [(), [], "90"])
def test_architectures_must_be_some(architectures: Any) -> None:
    with pytest.raises(ValueError, match="must name at least one"):
        build(architectures)


def test_the_visible_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [(9, 0), (10, 0), (7, 5), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(gpu, "capability", lambda index: gpus[index])
    monkeypatch.setattr(gpu, "is_rocm", lambda: False)
    assert native_build.visible_architectures() == ("80", "90", "100")
    monkeypatch.setattr(gpu, "is_rocm", lambda: True)
    assert native_build.visible_architectures() == ()
    monkeypatch.setattr(gpu, "is_rocm", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native_build.visible_architectures() == ()


def test_a_library_for_more_architectures_is_found(toolchain: Toolchain) -> None:
    assert find_library(("90",)) is None
    both = build(("80", "90"))
    assert find_library(("90",)) == find_library(("80",)) == find_library(("90", "80")) == both
    assert build(("90",)) == both
    assert find_library(("90", "100")) is None
    assert len(toolchain.calls()) == 1
    (native_build.SOURCES / "rotate.cu").write_text("// another kernel")
    assert find_library(("90",)) is None


@pytest.mark.parametrize("value", [None, "", "1"])
def test_first_use_may_build(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("ROPEWALK_BUILD_ON_FIRST_USE", value)
    assert native_build.may_build_on_first_use() is None


@pytest.mark.parametrize("value", ["0", "off"])
def test_first_use_may_not_build(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWALK_BUILD_ON_FIRST_USE", value)
    assert native_build.may_build_on_first_use() == f"ROPEWALK_BUILD_ON_FIRST_USE is '{value}'"


# The compilers


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_nvcc_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(native_build, "_DEFAULT_TOOLKIT", tmp_path / "default")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "packages" / "torch" / "__init__.py"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda-path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-home"))
    monkeypatch.setenv("NVCC_CCBIN", program(tmp_path / "cxx"))
    for place in ("default/bin", "packages/nvidia/cu13/bin", "path", "cuda-path/bin", "cuda-home/bin"):
        nvcc = program(tmp_path / place / "nvcc")
        assert find_compilers() == (nvcc, str(tmp_path / "cxx"), None)
    monkeypatch.setenv("CUDACXX", program(tmp_path / "chosen"))
    assert find_compilers().nvcc == str(tmp_path / "chosen")


def test_the_host_compiler_is_looked_for_in_order(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("c++", "g++"):
        cxx = program(tmp_path / "path" / name)
        assert find_compilers().cxx == cxx
    monkeypatch.setenv("NVCC_CCBIN", program(tmp_path / "path" / "clang"))
    assert find_compilers().cxx == str(tmp_path / "path" / "clang")
    program(tmp_path / "path" / "mine")
    monkeypatch.setenv("NVCC_CCBIN", "mine")
    assert find_compilers().cxx == str(tmp_path / "path" / "mine")


def test_missing_compilers_are_named_and_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(native_build, "_DEFAULT_TOOLKIT", tmp_path / "default")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    expected = (
        f"nvcc is missing: it is not in $CUDA_HOME/bin, PATH, the Python packages, {tmp_path}/default/bin, and CUDACXX "
        "is not set; a C++ compiler is missing: neither g++ nor c++ is in PATH, and NVCC_CCBIN is not set"
    )
    assert find_compilers() == (None, None, expected)
    with pytest.raises(BuildError) as caught:
        build(("90",))
    assert str(caught.value) == f"the native extension cannot be built: {expected}"
    assert failed_before(("90",)) is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("variable", ["CUDACXX", "NVCC_CCBIN"])
@pytest.mark.parametrize("value", ["no-such-program", "ccache g++"])
def test_a_named_compiler_is_not_replaced_by_another(
    variable: str, value: str, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    missing = find_compilers().missing
    assert missing == f"{variable} is '{value}', but must be the name or the path of one program that can be run"


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert find_compilers() == (None, None, "it is built on Linux, and this is win32")


# What is run


def test_the_commands(toolchain: Toolchain) -> None:
    library = build(("100", "80"))
    assert library.read_text() == "ropewalk_native.so made by 1 with libstdc++.so.6"
    (call,) = toolchain.calls()
    assert [argument for argument in call if argument.startswith("-gencode")] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    package = Path(torch.__file__).parent
    for expected in (
        str(native_build.SOURCES / "rotate.cu"),
        str(native_build.SOURCES / "operators.cpp"),
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-L{package / 'lib'}",
    ):
        assert expected in call
    assert call[call.index("-isystem") + 1] == str(package / "include")
    everything = " ".join(call)
    assert "ROPEWALK_DEFINE_SCHEMA" not in everything  # Python defines the operators
    assert "rpath" not in everything
    assert "-ccbin" not in everything  # g++ is what nvcc takes by itself


def test_a_library_with_a_runtime_of_its_own_is_refused(tmp_path: Path, toolchain: Toolchain) -> None:
    toolchain.becomes(runtime="a static library")
    with pytest.raises(BuildError, match=r"does not use libstdc\+\+\.so\.6 as PyTorch does") as caught:
        build(("90",))
    assert failed_before(("90",)) == str(caught.value)
    assert left(tmp_path) == ["build.log", "failed.txt", "lock"]


def test_nvcc_gets_the_host_compiler_by_ccbin(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = program(tmp_path / "clang++")
    monkeypatch.setenv("NVCC_CCBIN", cxx)
    build(("90",))
    (call,) = toolchain.calls()
    assert call[call.index("-ccbin") + 1] == cxx


def test_the_runtime_of_a_toolkit_from_python_packages_is_found(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = tmp_path / "nvidia" / "cu13"
    for folder in ("bin", "lib"):
        (toolkit / folder).mkdir(parents=True)
    shutil.copy(toolchain.nvcc, toolkit / "bin" / "nvcc")
    (toolkit / "lib" / "libcudart_static.a").touch()
    monkeypatch.setenv("CUDACXX", str(toolkit / "bin" / "nvcc"))
    build(("90",))
    assert f"-L{toolkit / 'lib'}" in toolchain.calls()[0]


def test_a_finished_build_leaves_the_library_and_its_log(tmp_path: Path, toolchain: Toolchain) -> None:
    toolchain.becomes("print('a warning about', name)")
    library = build(("90",))
    assert left(tmp_path) == ["build.log", "lock", "ropewalk_native.so"]
    log = (library.parent / "build.log").read_text()
    assert "a warning about ropewalk_native.so\n" in log
    assert f"$ {toolchain.nvcc} " in log


def test_what_is_there_is_not_compiled_again_unless_forced(toolchain: Toolchain) -> None:
    library = build(("90",))
    toolchain.nvcc.unlink()
    assert build(("90",)) == library
    toolchain._calls.unlink()
    toolchain.becomes(version="2")
    assert build(("90",), force=True) == library
    assert len(toolchain.calls()) == 1
    assert library.read_text() == "ropewalk_native.so made by 2 with libstdc++.so.6"


def test_compilers_leave_nothing_in_the_common_temporary_folder(toolchain: Toolchain) -> None:
    toolchain.becomes("assert os.path.dirname(output) == os.environ['TMPDIR'] == os.getcwd()")
    build(("90",))


# Failures


def test_a_failed_compilation_is_explained_and_remembered(tmp_path: Path, toolchain: Toolchain) -> None:
    toolchain.becomes("for line in range(30):\n    print('error in line', line, flush=True)\nsys.exit(3)")
    with pytest.raises(BuildError) as caught:
        build(("90",))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the native extension was not built: nvcc exited with 3"
    assert lines[1].startswith(f"  command: {toolchain.nvcc} -std=c++17 ")
    assert lines[2] == "  the end of its output:"
    assert lines[3:-1] == [f"    error in line {number}" for number in range(10, 30)]
    log = Path(lines[-1].removeprefix("  the whole log: "))
    assert "error in line 0\n" in log.read_text()
    assert failed_before(("90",)) == str(caught.value)
    assert failed_before(("80",)) is None
    assert left(tmp_path) == ["build.log", "failed.txt", "lock"]

    toolchain._calls.unlink()
    toolchain.becomes()
    library = build(("90",))
    assert failed_before(("90",)) is None
    assert left(tmp_path) == ["build.log", "lock", library.name]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"nvcc was ended by signal 9 \(Killed\)\n"),
        ("sys.exit(0)", r"nvcc wrote no library\n"),
        ("open(output, 'w').close()\nsys.exit(1)", r"nvcc exited with 1\n[^\n]*\n[^\n]*\n    \(nothing\)\n"),
    ],
)
def test_a_compiler_that_ends_without_a_library(tmp_path: Path, toolchain: Toolchain, code: str, message: str) -> None:
    toolchain.becomes(code)
    with pytest.raises(BuildError, match=message):
        build(("90",))
    assert (failed_before(("90",)) or "").startswith("the native extension was not built: nvcc")
    assert left(tmp_path) == ["build.log", "failed.txt", "lock"]


def test_a_compiler_that_does_not_run_is_not_remembered(tmp_path: Path, toolchain: Toolchain) -> None:
    toolchain.nvcc.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(BuildError, match=r"cannot be built: \S*/nvcc does not run: Exec format error$"):
        build(("90",))
    assert failed_before(("90",)) is None
    assert left(tmp_path) == ["lock"]


def test_a_forced_build_that_fails_keeps_the_library(toolchain: Toolchain) -> None:
    library = build(("90",))
    toolchain._calls.unlink()
    toolchain.becomes("sys.exit(1)")
    with pytest.raises(BuildError):
        build(("90",), force=True)
    assert library.read_text() == "ropewalk_native.so made by 1 with libstdc++.so.6"
    assert find_library(("90",)) == library


def test_a_very_long_output_is_cut_in_the_log(tmp_path: Path, toolchain: Toolchain) -> None:
    toolchain.becomes(
        "sys.stdout.buffer.write(b'the first line\\n' + b'\\xff' * 10_000_000 + b'\\nthe last line\\n')\nsys.exit(1)"
    )
    with pytest.raises(BuildError, match=r"    the last line\n  the whole log"):
        build(("90",))
    log = next((tmp_path / "cache").glob("*/build.log"))
    assert log.stat().st_size < 4_000_000  # a byte that is no text takes three
    text = log.read_text()
    assert "the first line" in text
    assert "the last line" in text
    assert "bytes are left out]" in text


def test_a_cache_that_cannot_be_written(tmp_path: Path, toolchain: Toolchain) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert find_library(("90",)) is None
    assert failed_before(("90",)) is None
    with pytest.raises(BuildError, match=rf"cannot be built in {tmp_path}/cache/native-\S*: Not a directory: "):
        build(("90",))
    assert not toolchain.calls()


def test_a_full_disk(tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BuildError, match=r"cannot be built in \S*: No space left on device: "):
        build(("90",))
    assert failed_before(("90",)) is None
    assert left(tmp_path) == ["lock"]


# Several processes, and interruptions


def test_two_processes_compile_once(toolchain: Toolchain) -> None:
    toolchain.becomes("time.sleep(0.3)")

    def work(sender: Any) -> None:
        path = build(("90",))
        sender.send((path, path.read_text()))

    children = [in_child(work) for _ in range(2)]
    results = [receiver.recv() for _, receiver in children]
    for process, _ in children:
        process.join(10)
    assert results == [(native_build.library_path(("90",)), "ropewalk_native.so made by 1 with libstdc++.so.6")] * 2
    assert len(toolchain.calls()) == 1


def test_who_waited_for_a_build_that_failed_does_not_try_again(toolchain: Toolchain) -> None:
    toolchain.becomes("time.sleep(0.3)\nsys.exit(1)")

    def work(sender: Any) -> None:
        try:
            build(("90",))
        except BuildError as error:
            sender.send(str(error))

    children = [in_child(work) for _ in range(2)]
    reasons = [receiver.recv() for _, receiver in children]
    for process, _ in children:
        process.join(10)
    assert reasons[0] == reasons[1] == failed_before(("90",))
    assert len(toolchain.calls()) == 1


def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(tmp_path: Path, toolchain: Toolchain) -> None:
    pids = tmp_path / "pids"
    # As nvcc does, it has another program do the work.
    toolchain.becomes(
        "if os.fork() == 0:\n"
        f"    with open({str(pids)!r}, 'a') as file:\n"
        "        file.write(f'{os.getppid()}\\n{os.getpid()}\\n')\n"
        "time.sleep(60)"
    )

    def work(sender: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            build(("90",))
        except KeyboardInterrupt:
            sender.send("interrupted")

    process, receiver = in_child(work)
    wait_for(lambda: pids.exists() and len(pids.read_text().splitlines()) == 2)
    os.kill(process.pid, signal.SIGINT)
    assert receiver.recv() == "interrupted"
    process.join(10)
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids.read_text().splitlines()))
    assert failed_before(("90",)) is None
    assert left(tmp_path) == ["lock"]


def test_what_a_killed_process_left_is_cleared_when_it_is_old(toolchain: Toolchain) -> None:
    folder = native_build.library_path(("90",)).parent
    old, young = folder / "build-old", folder / "build-young"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "rotate.o").touch()
    os.utime(old, (0, 0))
    build(("90",))
    assert not old.exists()
    assert young.exists()


def test_a_file_system_without_locks_will_do(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    code = errno.ENOTSUP
    assert build(("90",)).is_file()
    code = errno.EIO
    with pytest.raises(BuildError, match="Input/output error"):
        build(("80",))
