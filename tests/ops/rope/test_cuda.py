"""The CUDA extension beyond what every implementation is tested for: how it is found, and each of its kernels."""

import subprocess
import sys
import textwrap
import warnings
from contextlib import suppress

import pytest
import torch
from helpers.rope_calls import CALLS, arguments
from helpers.rope_definition import random_tables, random_tensor

from ropewalk import apply_rope
from ropewalk import device as gpu
from ropewalk.ops.rope import backends, reference
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.cuda import build as native_build
from ropewalk.ops.rope.cuda import load as native
from ropewalk.testing import assert_close_to_truth

GPU = torch.device("cuda", 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def no_library(monkeypatch):
    """A GPU for which no library is built, as far as cuda/load.py can tell."""
    monkeypatch.setattr(native, "_rotate", None)
    monkeypatch.setattr(native, "_rotated", None)
    monkeypatch.setattr(native, "_refusal", None)
    monkeypatch.setattr(native, "_is_registered", lambda: False)
    monkeypatch.setattr(native_build, "visible_architectures", lambda: ("90",))
    monkeypatch.setattr(native_build, "find_library", lambda architectures: None)
    monkeypatch.setattr(native_build, "failed_before", lambda architectures: None)
    monkeypatch.setattr(native_build, "may_build_on_first_use", lambda: None)
    monkeypatch.setattr(native_build, "find_compilers", lambda: native_build.Compilers("nvcc", "c++", None))
    monkeypatch.setattr(gpu, "is_rocm", lambda: False)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    native._why_not_built.cache_clear()
    yield monkeypatch
    native._why_not_built.cache_clear()


@pytest.fixture
def library(device):
    """The library, loaded; without one there is nothing to test."""
    reason = native.why_not(device)
    if reason is not None:
        pytest.skip(reason)
    assert native.load()
    return native


# Finding it


def test_a_machine_without_a_compiler_does_without_and_says_so(no_library):
    missing = native_build.Compilers(None, "c++", "nvcc is missing: it is not in PATH")
    no_library.setattr(native_build, "find_compilers", lambda: missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.why_not(GPU) == "it is not built, and nvcc is missing: it is not in PATH"
        assert not native.load()
    with pytest.raises(ValueError, match="impl is 'native', but it cannot run this call: it is not built, and nvcc"):
        backends.choose("native", GPU)


def test_asking_why_not_builds_nothing(no_library):
    no_library.setattr(native_build, "build", lambda architectures: pytest.fail("it was built"))
    assert native.why_not(GPU) is None
    assert backends.choose(None, GPU) == "native"


def test_building_on_first_use_can_be_forbidden(no_library):
    no_library.setattr(native_build, "may_build_on_first_use", lambda: "ROPEWALK_BUILD_ON_FIRST_USE is '0'")
    assert native.why_not(GPU) == "it is not built, and ROPEWALK_BUILD_ON_FIRST_USE is '0'"
    assert not native.load()


def test_a_build_that_failed_before_is_not_tried_again_and_warned_of_once(no_library):
    no_library.setattr(native_build, "failed_before", lambda architectures: "nvcc exited with 1\nits output")
    no_library.setattr(native_build, "build", lambda architectures: pytest.fail("it was tried again"))
    with pytest.warns(RuntimeWarning, match="does without its CUDA extension: nvcc exited with 1\nits output"):
        assert native.why_not(GPU) == "nvcc exited with 1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.why_not(GPU) == "nvcc exited with 1"
        assert not native.load()


def test_a_build_that_fails_warns_once_and_leaves_the_others(no_library):
    tries = []

    def build(architectures):
        tries.append(architectures)
        raise native_build.BuildError("nvcc exited with 1\nits output")

    no_library.setattr(native_build, "build", build)
    with pytest.warns(RuntimeWarning, match="does without its CUDA extension: nvcc exited with 1\nits output"):
        assert not native.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.load()
    assert tries == [("90",)]
    assert native.why_not(GPU) == "nvcc exited with 1"
    assert backends.choose(None, GPU) != "native"
    with pytest.raises(ValueError, match="impl is 'native', but it cannot run this call: nvcc exited with 1"):
        backends.choose("native", GPU)


def test_a_library_that_does_not_load_warns_once_and_leaves_the_others(no_library, tmp_path):
    broken = tmp_path / "ropewalk_native.so"
    broken.write_text("not a library")
    no_library.setattr(native_build, "find_library", lambda architectures: broken)
    with pytest.warns(RuntimeWarning, match="does without its CUDA extension: Could not load this library"):
        assert not native.load()
    assert "Could not load" in native.why_not(GPU)


def test_a_library_of_another_version_is_refused(no_library):
    no_library.setattr(native, "_is_registered", lambda: True)
    operator = type("operator", (), {"default": type("overload", (), {"_schema": "ropewalk::_rotate() -> bool"})})
    no_library.setattr(torch.ops.ropewalk, "_rotate", operator, raising=False)
    with pytest.warns(RuntimeWarning, match="belongs to another version of ropewalk"):
        assert not native.load()
    assert "another version" in native.why_not(GPU)


def test_a_library_whose_kernels_do_not_run_here_is_refused(no_library):
    no_library.setattr(native, "_is_registered", lambda: True)
    for name, schema in native._SCHEMAS.items():
        overload = type("overload", (), {"_schema": schema})
        no_library.setattr(torch.ops.ropewalk, name, type("operator", (), {"default": overload}), raising=False)
    no_library.setattr(torch.ops.ropewalk, "_check_device", lambda: 35, raising=False)
    with pytest.warns(RuntimeWarning, match="do not run with this GPU and this driver: CUDA error 35"):
        assert not native.load()
    assert "CUDA error 35" in native.why_not(GPU)


def test_devices_without_its_kernels_are_refused(no_library):
    assert native.why_not(torch.device("cpu")) == "CUDA kernels need an NVIDIA GPU, and the tensors are on cpu"
    no_library.setattr(gpu, "is_rocm", lambda: True)
    assert native.why_not(GPU) == "CUDA kernels need an NVIDIA GPU, and the tensors are on an AMD GPU"
    no_library.setattr(gpu, "is_rocm", lambda: False)
    no_library.setattr(gpu, "capability", lambda device: (7, 5))
    no_library.setattr(torch.cuda, "get_device_name", lambda device=None: "T4")
    assert native.why_not(GPU) == "CUDA kernels need compute capability 8.0, and T4 has less"


# Its kernels


def rotate(library, access, q, k, cos, sin, positions=None, cu_seqlens=None, offset=0, **flags):
    """The rotation by one way of accessing memory; None where shapes, strides or addresses do not permit it."""
    outs = [torch.full_like(x, float("nan")) for x in (q, k)]
    bits = native.ACCESSES[access]
    with suppress(RuntimeError):
        call = RopeCall(cos, sin, positions, cu_seqlens, offset, RopeFlags(**flags))
        assert library.rotate((q, k), outs, call, bits)
        return outs
    return None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table", ["float32", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "half", "offset"), [(64, 32, 0), (80, 40, 0), (40, 20, 0), (128, 16, 64), (72, 36, 0)]
)
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("tokens", [3, 1200, 30000])  # the kernels for few tokens, for some, and for what is large
def test_every_access_gives_the_same_numbers(
    library, device, tokens, by_index, head_dim, half, offset, dtype, table, interleaved
):
    q, k = (random_tensor(2, tokens, heads, head_dim, dtype=dtype, device=device) for heads in (5, 2))
    tables = random_tables(tokens + 7, half, device=device)
    cos, sin = (x.to(dtype if table == "own" else torch.float32) for x in tables)
    call = {"interleaved": interleaved, "rotary_offset": offset}
    first, positions = (7, None) if by_index else (0, torch.randint(tokens, (2, tokens), device=device))
    anywhere = {"positions": first if by_index else positions, "impl": "reference", **call}
    expected = apply_rope(q, k, cos, sin, **anywhere)
    truth = apply_rope(*(x.double() for x in (q, k, cos, sin)), **anywhere)
    served = set()
    for access in native.ACCESSES:
        results = rotate(library, access, q, k, cos, sin, positions, offset=first, **call)
        if results is None:
            continue
        served.add(access)
        for actual, exact, plain in zip(results, truth, expected, strict=True):
            assert_close_to_truth(actual, exact, plain)
    assert served >= {"best", "scalar"}
    if head_dim in (64, 128):
        assert "wide" in served


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if call.keys().isdisjoint({"axes", "pair_block", "k_heads"})]
)
def test_every_call_through_every_access(library, device, name):
    (q, k, cos, sin), call = arguments(name, device)
    if k is None:
        k = q[:, :, :1].clone()
    expected = apply_rope(q, k, cos, sin, impl="reference", **call)
    positions = call.pop("offsets", call.pop("positions", None))
    offset, positions = (positions, None) if isinstance(positions, int) else (0, positions)
    cu_seqlens = call.pop("cu_seqlens", None)
    for access in native.ACCESSES:
        results = rotate(library, access, q, k, cos, sin, positions, cu_seqlens, offset, **call)
        assert results is not None or access in ("narrow", "wide"), "these alone may not fit"
        if results is not None:
            for actual, right in zip(results, expected, strict=True):
                torch.testing.assert_close(actual, right, equal_nan=True)


def test_more_batch_rows_than_a_grid_is_wide(library, device):
    q = random_tensor(70_000, 1, 1, 8, device=device)
    cos, sin = random_tables(11, 4, device=device)
    offsets = torch.randint(11, (70_000,), device=device)
    actual = apply_rope(q, None, cos, sin, offsets=offsets, impl="native")
    torch.testing.assert_close(actual, apply_rope(q, None, cos, sin, offsets=offsets, impl="reference"))


def test_the_first_call_of_a_process_may_be_captured(library):
    code = """
        import torch
        from ropewalk import apply_rope
        from ropewalk.ops.rope.cuda import load as native
        assert native.load()
        q, table = torch.randn(1, 3, 2, 64, device="cuda"), torch.rand(8, 32, device="cuda")
        x, stream = q.clone(), torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            apply_rope(x, None, table, table, inplace=True)
        graph.replay()
        torch.testing.assert_close(x, apply_rope(q, None, table, table, impl="reference"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_the_reference_does_not_run_where_the_library_does(library, device, monkeypatch):
    def fail(*arguments):
        pytest.fail("the reference was asked")

    monkeypatch.setattr(reference, "rotate", fail)
    (q, k, cos, sin), call = arguments("offsets", device)
    apply_rope(q, k, cos, sin, **call)
    apply_rope(q.transpose(2, 3).contiguous().transpose(2, 3), k, cos.double(), sin.double(), **call)  # through copies
