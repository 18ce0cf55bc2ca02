"""The native extension compiles with this machine's compilers, from Python and by CMake, and PyTorch loads it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.ops.rope.cuda import build as native_build

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def need(*tools: str) -> None:
    """Skip a test whose tools are not installed; where everything has to run, fail."""
    missing = [f"{tool} is not installed" for tool in tools if shutil.which(tool) is None]
    if no_compilers := native_build.find_compilers().missing:
        missing.append(no_compilers)
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(missing))


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(library: Path) -> None:
    """The library belongs to torch, and to no folder of this machine."""
    dynamic = run("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch.so" in needed, "without it the functions of libtorch_cuda are not found"
    assert needed.index("libstdc++.so.6") < needed.index("libtorch.so"), "exceptions must be the system's"
    assert not [name for name in needed if "cudart" in name or "python" in name]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def schemas(library: Path) -> str:
    """The operators that a process without ropewalk has once it has loaded the library."""
    return run(
        sys.executable,
        "-c",
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        "for name in sorted(schema.name for schema in torch._C._jit_get_all_schemas()):\n"
        "    if name.startswith('ropewalk::'):\n"
        "        print(name, torch._C._dispatch_has_kernel_for_dispatch_key(name, 'CUDA'))",
    )


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_kernels_spill_nothing_and_access_16_bytes_at_once(tmp_path: Path, architecture: str) -> None:
    need()
    nvcc = str(native_build.find_compilers().nvcc)
    source, ptx = native_build.SOURCES / "rotate.cu", tmp_path / "rotate.ptx"
    flags = ("-O3", "-std=c++17", "-Xptxas=-v", "-Xcompiler=-Wall", "-Werror=all-warnings")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    done = subprocess.run(
        [nvcc, *flags, target, "-c", source, "-o", tmp_path / "rotate.o"], capture_output=True, text=True
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    used = [int(registers) for registers in re.findall(r"Used (\d+) registers", report)]
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(kernels) == len(used) == len(spilled) > 100
    assert set(spilled) == {("0", "0", "0")}
    assert max(used) <= 80
    print(f"sm_{architecture}: {len(kernels)} kernels, {min(used)} to {max(used)} registers, no spills")

    run(nvcc, "-O3", "-std=c++17", f"-arch=compute_{architecture}", "-ptx", source, "-o", ptx)
    bodies = re.split(r"^(?:\.visible )?\.entry ", ptx.read_text(), flags=re.MULTILINE)[1:]
    wide = [body for body in bodies if access(body) in WIDE]
    assert len(wide) == 7 * 12  # 7 pairs of dtypes, both pairings, positions looked up or not, three sizes
    for body in wide:
        assert re.search(r"ld\.global\.v4\.\w32", body), body[:200]
        assert re.search(r"st\.global\.v4\.\w32", body), body[:200]
        overlaps = "griddepcontrol.wait" in body and "griddepcontrol.launch_dependents" in body
        assert overlaps == (int(architecture) >= 90)


# The mangled dtype of q and k, and how many of them are 16 bytes.
WIDE = {("6__half", "8"), ("13__nv_bfloat16", "8"), ("f", "4"), ("d", "2")}


def access(body: str) -> tuple[str, ...]:
    """What a kernel reads at once, by its mangled name."""
    match = re.match(r"\w*rotate_kernelI(6__half|13__nv_bfloat16|f|d)\w*PairingE\dELi(\d)E", body)
    assert match, body[:200]
    return match.groups()


def test_python_builds_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("readelf")
    monkeypatch.setenv("ROPEWALK_CACHE_DIR", str(tmp_path))
    library = native_build.build(("90",))
    check(library)
    # The public operator is Python's to define.
    assert schemas(library).splitlines() == ["ropewalk::_check_device False", "ropewalk::_rotate True"]
    log = (library.parent / "build.log").read_text()
    assert "warning" not in log, log


def test_cmake_builds_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cmake", "readelf")
    for variable in ("CC", "CXX", "CUDAHOSTCXX"):  # these may name compilers with libraries of their own
        monkeypatch.delenv(variable, raising=False)
    nvcc = native_build.find_compilers().nvcc
    run(
        *("cmake", "-S", ROOT, "-B", tmp_path),
        *(f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_ARCHITECTURES=90"),
    )
    run("cmake", "--build", tmp_path)
    library = tmp_path / "ropewalk_native.so"
    check(library)
    assert schemas(library).splitlines() == [
        "ropewalk::_check_device False",  # it takes no tensor, hence no device's kernel
        "ropewalk::_rotate True",
        "ropewalk::rotary_embedding True",
    ]
    # Together with what Python defines, whichever comes first.
    load = f"torch.ops.load_library({str(library)!r})"
    use = "ropewalk.rotary_embedding(torch.arange(3), torch.rand(3, 64), None, 64, torch.rand(8, 32), True)"
    for first, second in ((load, use), (use, load)):
        run(sys.executable, "-c", f"import torch, ropewalk\n{first}\n{second}\n{use}")
