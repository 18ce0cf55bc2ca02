"""Packs of binaries: their keys, what is compiled anew, and that nothing is where a pack is read."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from helpers import stub_gpu

from products import pack
from products.pack import Job, Result, Target

GOOD, FAILING, DYING = (Job(f"products.samples:{name}", []) for name in ("attend", "fail", "die"))
GOOD = GOOD._replace(arguments=["triton", 32])
HERE = Target("", str(sysconfig.get_config_var("EXT_SUFFIX")), sysconfig.get_paths()["include"])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_key_is_of_the_files_of_a_folder(tmp_path):
    # Written apart, in the order of Triton: packages come before what they hold.
    files = ["runtime/cache.py", "compiler/compiler.py"]  # a package itself is not among its modules
    files += ["backends/nvidia/__init__.py", "backends/nvidia/driver.py", "_C/libtriton.so"]
    files += ["language/core.py", "language/extra/__init__.py", "language/extra/cuda/__init__.py", "language/math.py"]
    for name in (*files, "compiler/__init__.py", "language/__init__.py", "tools/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "__init__.py").write_text("__version__ = '3.6.0'\n")
    assert pack.triton_key_of(tmp_path) == "3.6.0" + "-".join(map(sha256, files))
    (tmp_path / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="must be one of Triton: it has no version"):
        pack.triton_key_of(tmp_path)


def test_a_key_is_that_of_the_installed_triton():
    triton = pytest.importorskip("triton")
    from triton.runtime.cache import triton_key

    assert pack.triton_key_of(Path(triton.__file__).parent) == triton_key()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Stand in for the process that compiles, and return the jobs that it is given."""
    jobs: list[Job] = []

    def work(command: Any, *, input: str, **options: Any) -> None:
        folder, missing, *_ = json.loads(input)
        for digest, job in missing.items():
            jobs.append(Job(*job))
            error = "failed" if jobs[-1] == FAILING else None
            pack._write(Path(folder), digest, Result(jobs[-1], 1.0, ["kernel"], ["launcher"], 1, error))

    monkeypatch.setattr(pack.subprocess, "run", work)
    monkeypatch.setattr(stub_gpu, "environment", dict)
    return jobs


def test_what_is_done_is_not_done_again(tmp_path, given, monkeypatch):
    results = pack.compile_calls([GOOD, FAILING], tmp_path, HERE)
    assert given == [GOOD, FAILING]
    assert [result.error for result in results] == [None, "failed"]
    given.clear()
    assert pack.compile_calls([GOOD], tmp_path, HERE) == results[:1]
    assert not given
    changed = GOOD._replace(arguments=["triton", 64])
    pack.compile_calls([GOOD, changed, FAILING], tmp_path, HERE)
    assert given == [changed, FAILING]
    for replaced in (HERE._replace(memory_bandwidth=3.35e12), HERE):
        given.clear()
        monkeypatch.setattr(pack, "_digest_of_sources", lambda found=replaced: str(found == HERE))
        pack.compile_calls([GOOD], tmp_path, replaced)
        assert given == [GOOD]


def test_sources_are_those_that_kernels_are_made_of():
    names = {str(path.relative_to(pack.ROOT)) for path in pack._sources()}
    made_of = {"src/ropewalk/ops/launch/launcher.c", "src/ropewalk/ops/attention/hopper/forward.py"}
    assert made_of | {"tests/products/pack.py", "tests/helpers/stub_cuda.c"} <= names


def run_with(path: str, folder: str, jobs: list[Any]) -> dict[str, Any]:
    """Read a pack on the stub of a GPU, run jobs, and return the manifest and the names of what was compiled."""
    import triton

    triton.knobs.runtime.kernel_load_end_hook.calls.clear()  # it reads PTX, which a pack has not
    manifest = pack.read_pack(Path(path), Path(folder))
    watched = pack.watch()
    for job in jobs:
        pack.run(Job(*job))
    return {"manifest": manifest, **watched._asdict()}


def settle_late() -> str:
    """Settle the keys after a kernel's was read, and return the error."""
    from ropewalk.ops.attention.triton.forward import forward_kernel

    assert forward_kernel.cache_key
    with pytest.raises(RuntimeError) as error:
        pack.settle_keys()
    return str(error.value)


@pytest.mark.compile
@pytest.mark.slow
def test_keys_are_settled_before_launches():
    assert "was launched before its key was settled" in stub_gpu.run(settle_late)


@pytest.mark.compile
@pytest.mark.slow
def test_nothing_is_compiled_where_a_pack_is_read(tmp_path, capfd):
    pytest.importorskip("triton")
    from triton.runtime.build import platform_key
    from triton.runtime.cache import triton_key

    here = HERE._replace(key=triton_key(), platform=platform_key())
    results = pack.compile_calls([GOOD, FAILING, DYING], tmp_path / "made", here)
    errors = [result.error or "" for result in results]
    assert not errors[0]
    assert "ValueError: this job fails" in errors[1]
    assert "ended with" in errors[2]
    assert results[0].n_compiled == len(results[0].kernels) >= 3
    packed, read = tmp_path / "pack.tar.xz", tmp_path / "read"
    manifest = pack.write_pack(tmp_path / "made", packed)
    assert manifest["kernels"] == len(results[0].kernels)
    # Nothing there is of the folder where it was made.
    (tmp_path / "made").rename(tmp_path / "moved")
    found = stub_gpu.run(run_with, str(packed), str(read), [GOOD])
    assert (found["kernels"], found["modules"]) == ([], [])
    assert found["manifest"] == json.loads(json.dumps(manifest))
    assert [tuple(job) for job in found["manifest"]["jobs"]] == [(GOOD.function, GOOD.arguments)]
    assert len(found["manifest"]["failed"]) == 2
    # Another call is compiled, and it is seen.
    other = GOOD._replace(arguments=["triton", 16])
    assert "forward_kernel" in stub_gpu.run(run_with, str(packed), str(read), [other])["kernels"]
    capfd.readouterr()
