"""The native extension compiles with this machine's compilers, from Python and by CMake, and PyTorch loads it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    assert schemas(library).splitlines() == [
        "ropewalk::_check_device False",
        "ropewalk::_rotate True",
        "ropewalk::_rotated True",
    ]
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
        "ropewalk::_rotated True",
        "ropewalk::rotary_embedding True",
    ]
    # Together with what Python defines, whichever comes first.
    load = f"torch.ops.load_library({str(library)!r})"
    use = "ropewalk.rotary_embedding(torch.arange(3), torch.rand(3, 64), None, 64, torch.rand(8, 32), True)"
    for first, second in ((load, use), (use, load)):
        run(sys.executable, "-c", f"import torch, ropewalk\n{first}\n{second}\n{use}")


# rotate.cu for CPU tensors of float32: half-split pairs and no cu_seqlens.
HOST_ROTATE = """
#include <cmath>
#include "rotate.h"
namespace ropewalk {
int compute_major(int) { return 9; }
cudaError_t check_device() { return cudaSuccess; }
void rotate(const Rotation& r, const Heads& heads) {
  for (int64_t b = 0; b < r.batches; ++b)
    for (int64_t t = 0; t < r.tokens; ++t)
      for (int64_t h = 0; h < heads.count; ++h) {
        const float* x = static_cast<const float*>(heads.x) + b * heads.x_stride_batch + t * heads.x_stride_token +
                         h * heads.x_stride_head;
        float* out = static_cast<float*>(heads.out) + b * heads.out_stride_batch + t * heads.out_stride_token +
                     h * heads.out_stride_head;
        int64_t row = r.offset + (r.by_index ? t : 0);
        if (r.positions) {
          row += static_cast<const int64_t*>(r.positions)[b * r.positions_stride_batch + t * r.positions_stride_token];
        }
        for (int d = 0; d < r.head_dim; ++d) {
          if (d < r.rotary_offset || d >= r.rotary_offset + 2 * r.half) out[d] = x[d];
        }
        for (int i = 0; i < r.half; ++i) {
          const float c = static_cast<const float*>(r.cos.data)[b * r.cos.stride_batch + row * r.cos.stride_row + i];
          float s = static_cast<const float*>(r.sin.data)[b * r.sin.stride_batch + row * r.sin.stride_row + i];
          if (r.inverse) s = -s;
          const int first = r.rotary_offset + i, second = first + r.half;
          const float a = x[first], b2 = x[second];
          out[first] = a * c - b2 * s;
          out[second] = a * s + b2 * c;
        }
      }
}
cudaError_t rotate(const Rotation& r, Access, cudaStream_t) {
  rotate(r, r.q);
  rotate(r, r.k);
  return cudaSuccess;
}
}  // namespace ropewalk
extern "C" int aoti_torch_get_current_cuda_stream(int, void** stream) { *stream = nullptr; return 0; }
extern "C" cudaError_t cudaGetDevice(int* device) { *device = -1; return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return ""; }
"""

# With `apply_rope` as it is: a CPU tensor is one of CUDA's here.
HOST_CALLS = """
import itertools, sys
import torch
from torch.testing import assert_close
from ropewalk import apply_rope
from ropewalk.ops.rope import autograd
from ropewalk.ops.rope.cuda import load as native

torch.ops.load_library(sys.argv[1])
assert native.load()
torch.Tensor.is_cuda = property(torch.Tensor.is_cpu.__get__)
run = autograd._run
autograd._run = lambda xs, call: sys.exit(f"the library refused {[x.shape for x in xs]}, {call.flags}")

def expect(q, k, *tables, **call):
    autograd._run, own = run, autograd._run
    torch.Tensor.is_cuda, fake = torch._C.TensorBase.is_cuda, torch.Tensor.is_cuda
    expected = apply_rope(q, k, *tables, impl="reference", **call)
    autograd._run, torch.Tensor.is_cuda = own, fake
    return (expected,) if k is None else expected

def call(*arguments, **keywords):
    rotated = apply_rope(*arguments, **keywords)
    return rotated if isinstance(rotated, tuple) else (rotated,)

fused = torch.randn(2, 5, 6, 16)
tensors = [
    (torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), "bthd"),
    (torch.randn(2, 5, 4, 16), None, "bthd"),
    (fused[:, :, :4], fused[:, :, 4:], "bthd"),  # with gaps
    (fused[:, :, :4].transpose(1, 2), fused[:, :, 4:].transpose(1, 2), "bhtd"),
    (torch.randn(2, 4, 5, 16).transpose(1, 2), torch.randn(2, 2, 5, 16).transpose(1, 2), "bthd"),
    (torch.randn(1, 5, 4, 16).expand(2, 5, 4, 16), None, "bthd"),
    (torch.randn(2, 5, 0, 16), torch.randn(2, 5, 2, 16), "bthd"),
]
angles = torch.rand(12, 4)
tables = angles.cos(), angles.sin()
keywords = [
    {}, {"positions": 3}, {"positions": torch.randint(12, (2, 5))}, {"offsets": torch.tensor([1, 4])},
    {"rotary_offset": 8}, {"rotary_dim": 8, "inverse": True, "positions": torch.randint(12, (1, 5))},
]
for (q, k, layout), keyword in itertools.product(tensors, keywords):
    keyword = {"layout": layout, **keyword}
    expected = expect(q, k, *tables, **keyword)
    rotated = call(q, k, *tables, **keyword)
    assert_close(rotated, expected)
    xs = (q,) if k is None else (q, k)
    assert [x.stride() for x in rotated] == [torch.empty_like(x).stride() for x in xs]
    # Recorded: q and k, or one of them; their gradients by the inverse rotation, and its gradient in turn.
    for needed in itertools.product((True, False), repeat=len(xs)):
        if not any(needed):
            continue
        leaves = [x.detach().clone().requires_grad_(need) for x, need in zip(xs, needed)]
        rotated = call(*leaves, *[None][len(xs) - 1:], *tables, **keyword)
        assert_close(tuple(x.detach() for x in rotated), expected)
        assert [x.requires_grad for x in rotated] == list(needed)
        inputs = [x for x in leaves if x.requires_grad]
        ends = [x for x in rotated if x.requires_grad]
        seeds = [torch.randn_like(x).requires_grad_() for x in ends]
        grads = torch.autograd.grad(ends, inputs, seeds, create_graph=True)
        inverse = {**keyword, "inverse": not keyword.get("inverse", False)}
        for grad, seed in zip(grads, seeds):
            assert_close(grad, expect(seed, None, *tables, **inverse)[0])
        again = torch.autograd.grad(grads, seeds, [x.detach() for x in grads])
        for back, seed in zip(again, seeds):
            assert_close(back, seed.detach())
    if 0 not in q.stride():
        versions = [x._version for x in xs]
        assert all(x is y for x, y in zip(call(q, k, *tables, inplace=True, **keyword), xs))
        assert_close(xs, expected)
        assert [x._version for x in xs] >= [1 + version for version in versions]
"""


def test_operators_do_the_same_on_the_host(tmp_path: Path) -> None:
    """Check the operators, but for the kernel, and the calls of `apply_rope` that reach them: no GPU is needed."""
    need()
    source = (native_build.SOURCES / "operators.cpp").read_text()
    assert source.count("(ropewalk, CUDA,") == 1
    source = source.replace("(ropewalk, CUDA,", "(ropewalk, CPU,").replace("DeviceType::CUDA", "DeviceType::CPU")
    (tmp_path / "operators.cpp").write_text(source)
    (tmp_path / "rotate.cpp").write_text(HOST_ROTATE)
    torch_folder = Path(torch.__file__).parent
    run(
        *(str(native_build.find_compilers().nvcc), *native_build._FLAGS, *native_build._CXX_FLAGS),
        *("-shared", "-cudart=none", "-isystem", torch_folder / "include", f"-I{native_build.SOURCES}"),
        *(tmp_path / "operators.cpp", tmp_path / "rotate.cpp", f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu"),
        *("-o", tmp_path / "host.so"),
    )
    run(sys.executable, "-c", HOST_CALLS, tmp_path / "host.so")
