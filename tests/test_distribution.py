"""The wheel and the source distribution: what is in them, and that the wheel works where there is no compiler."""

import functools
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import dist as dist_tool
import pytest

pytestmark = pytest.mark.distribution
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ropewalk"
URL = "https://example.org/somebody/ropewalk"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Both distributions, made of a copy of what git tracks, with the packages that are here: nothing is fetched."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository: what belongs in a distribution cannot be told")
    pytest.importorskip("build", reason="needs the package build")
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "tools" / "dist.py", "--output", output, "--url", URL)
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


def metadata_of(dist):
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return wheel.read(name).decode()


def test_the_metadata_has_urls_and_few_requirements(dist):
    lines = metadata_of(dist).splitlines()
    urls = {line.partition(": ")[2].partition(", ")[0] for line in lines if line.startswith("Project-URL: ")}
    assert urls == {"Repository", "Documentation", "Changelog", "Issues"}
    required = [
        line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert [re.match(r"[\w-]+", line)[0] for line in required] == ["torch", "triton"]
    assert "Linux" in required[1]


def test_the_readme_of_an_index_has_no_relative_link(dist):
    text = metadata_of(dist)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert len(targets) > 10
    assert not [target for target in targets if not target.startswith("https://")]
    assert f"![speed over other libraries]({URL}/raw/" in text
    assert f"({URL}/blob/" in text
    assert f"$ pip install git+{URL}  # no clone needed\n" in text
    assert ".svg" not in text


def test_code_and_absolute_links_stay():
    page = "[a](b.md) [c](https://d.org/e) [f](#g)\n```python\nx = [h](i)\n```\n![j](k.png) [![l](m.svg)](n)\n"
    expected = "[a](U/blob/C/b.md) [c](https://d.org/e) [f](#g)\n```python\nx = [h](i)\n```\n"
    expected += "![j](U/raw/C/k.png) [l](U/blob/C/n)\n"
    assert dist_tool.absolute_links(page, "U", "C") == expected


@pytest.mark.parametrize("how", ["git", "checkout", "wheel"])
def test_it_installs_as_the_readme_says(how, dist, tmp_path):
    """From git, from a checkout and from the wheel: nothing is fetched."""
    if how == "git":
        source = f"git+file://{ROOT}"
    elif how == "checkout":
        source = tmp_path / "checkout"
        dist_tool.copy_tracked(source)
    else:
        source = only(dist, "*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    run(sys.executable, "-m", "pip", "install", *options, source)
    code = f"import ropewalk, pathlib; assert pathlib.Path(ropewalk.__file__).is_relative_to({str(tmp_path)!r})"
    run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path)


def find_pythons():
    """The interpreters of this machine that the wheel is for, on the path or of pyenv, one of each version."""
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
    found = {}
    for path in (path for folder in folders for path in folder.glob("python3.*")):
        minor = path.name.removeprefix("python3.")
        if minor.isdigit() and int(minor) >= 10 and "shims" not in path.parts:
            found.setdefault(path.name, path)
    return found


PYTHONS = find_pythons()


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory):
    """Environments of a Python with the wheel and nothing else."""

    @functools.cache
    def install(python):
        folder = tmp_path_factory.mktemp("bare")
        run(python, "-m", "venv", folder)
        options = ["--quiet", "--no-deps", "--no-index"]
        run(folder / "bin" / "python", "-m", "pip", "install", *options, only(dist, "*.whl"))
        return folder

    return install


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ropewalk", "doctor"], "torch is not installed: pip install torch"),
        (["python", "-m", "ropewalk", "demo"], "typer and rich are not installed: pip install 'ropewalk[bench]'"),
    ],
)
@pytest.mark.parametrize("python", [sys.executable, *PYTHONS.values()], ids=["this", *PYTHONS])
def test_without_the_extra_the_command_is_one_line(bare, python, words, said):
    folder = bare(python)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(folder / "bin" / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder)
    assert done.returncode == 2
    assert done.stderr == f"error: {said}\n"


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
