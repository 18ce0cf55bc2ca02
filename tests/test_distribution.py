"""The wheel and the source distribution: what is in them, and that the wheel works where there is no compiler."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.distribution
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ropewalk"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Both distributions, made of a copy of what git tracks, with the packages that are here: nothing is fetched."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: what belongs in a distribution cannot be told")
    pytest.importorskip("build", reason="needs the package build")
    copy, output = (tmp_path_factory.mktemp(name) for name in ("copy", "dist"))
    listed = run("git", "-C", ROOT, "ls-files", "-z").stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, copy)
    return output


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def test_twine_finds_nothing_to_complain_of(dist):
    pytest.importorskip("twine", reason="needs the package twine")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir())).stdout
    assert said.count("PASSED") == 2


def test_the_wheel_has_the_package_and_nothing_else(dist):
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = run("git", "-C", ROOT, "ls-files", "-z", "src").stdout.split("\0")
    assert names == {name.removeprefix("src/") for name in tracked if name and (ROOT / name).exists()}


def test_the_source_distribution_has_the_package_and_its_tests(dist):
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/ropewalk/py.typed"} <= names
    assert {str(path.relative_to(ROOT)) for path in SOURCE.rglob("*.cu")} <= names


@pytest.fixture(scope="module")
def clean(dist, tmp_path_factory):
    """An environment with the wheel in it, the dependencies that are here, and no compiler on its path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", only(dist, "*.whl"))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    theirs = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX")
    }
    empty = tmp_path_factory.mktemp("empty")
    cache = tmp_path_factory.mktemp("cache")
    return folder, {**variables, "PATH": str(empty), "ROPEWALK_CACHE_DIR": str(cache)}


def test_the_wheel_imports_without_a_compiler(clean):
    folder, variables = clean
    code = f"import ropewalk, pathlib; print(pathlib.Path(ropewalk.__file__).is_relative_to({str(folder)!r}))"
    assert run(folder / "bin" / "python", "-c", code, env=variables, cwd=folder).stdout.strip() == "True"


def test_the_command_of_the_wheel_works_without_a_compiler(clean):
    folder, variables = clean
    said = run(folder / "bin" / "ropewalk", "doctor", env=variables, cwd=folder).stdout
    assert "nvcc" in said
    assert "reference" in said


def test_help_answers_at_once(clean):
    """Within half a second of a processor: what else the machine does meanwhile does not count."""
    folder, variables = clean
    times = []
    for _ in range(5):
        before = os.times()
        run(folder / "bin" / "ropewalk", "--help", env=variables, cwd=folder)
        after = os.times()
        times.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(times) < 0.5


def test_the_wheel_rotates_and_attends_without_a_compiler(clean):
    folder, variables = clean
    code = """
import torch
from ropewalk import Rope, apply_rope, attention, inverse_frequencies, rope_table
q = torch.randn(1, 5, 2, 8)
cos, sin = rope_table(5, inverse_frequencies("default", 8, 10000.0)[0])
back, _ = apply_rope(*apply_rope(q, q, cos, sin), cos, sin, inverse=True)
assert torch.allclose(back, q, atol=1e-5)
assert attention(q, q, q, position=Rope(), causal=True).shape == q.shape
"""
    run(folder / "bin" / "python", "-c", code, env={**variables, "CUDA_VISIBLE_DEVICES": ""}, cwd=folder)
