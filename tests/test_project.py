"""Badges, citation and URL are of pyproject.toml, and the URL is in one place."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import dist
import project
import pytest

ROOT = Path(__file__).parents[1]
URL = "https://example.org/somebody/ropewalk"
FILES = [*project.CHANGES, "CITATION.cff", "LICENSE", "src/ropewalk/__init__.py"]
SHOWING = ["README.md", "docs/index.md", "docs/quickstart.md", "docs/platforms.md", "docs/versions.md"]
SHOWING += ["pyproject.toml", "CITATION.cff", "mkdocs.yml"]


@pytest.fixture
def copy(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def texts(root, names):
    return {name: (root / name).read_text(encoding="utf-8") for name in names}


def test_files_are_of_pyproject():
    made = project.make_files(ROOT, project.read_project(ROOT))
    assert made == texts(ROOT, made), "run python tools/project.py"
    assert len([name for name in made if name.endswith(".svg")]) == 5


def test_a_url_is_set_in_one_place_and_shown_in_all(copy):
    project.write(copy, URL + "/")
    found = texts(copy, SHOWING)
    assert all(URL in text for text in found.values())
    assert f'\nurl = "{URL}"\n' in found["pyproject.toml"]
    assert f'Issues = "{URL}/issues"\n\n[project.scripts]' in found["pyproject.toml"]
    assert f"\nrepository-code: {URL}\n" in found["CITATION.cff"]
    assert f"\nrepo_url: {URL}\n" in found["mkdocs.yml"]
    assert f"url     = {{{URL}}}," in found["docs/versions.md"]
    assert f"$ pip install git+{URL}  # no clone needed\n$ pip install .\n" in found["docs/quickstart.md"]
    other = URL.replace("somebody", "another")
    project.write(copy, other)
    moved = texts(copy, SHOWING)
    assert moved == {name: text.replace(URL, other) for name, text in found.items()}
    project.write(copy)  # without one it stays
    assert texts(copy, SHOWING) == moved
    project.write(copy, "")
    gone = texts(copy, SHOWING)
    assert not [name for name, text in gone.items() if other in text]
    if not project.read_project(ROOT).url:
        assert gone == texts(ROOT, SHOWING)


BAD = [
    "ftp://example.org/a/b",
    "example.org/a",
    "https://example.org",
    "///",
    "/",
    "https://e.org//",
    "https://e.org/a//b",
]
BAD += [f"https://e.org/a{letter}b/c" for letter in "\\\n\t \"'<>#?@`{}$|"]
BAD += [r"https://e.org/a\nb/c", r"https://e.org/a/\1", "https://e.org/a/b\n", "https://me:secret@e.org/a/b"]


@pytest.mark.parametrize("url", BAD)
def test_a_url_that_is_none_is_refused(copy, url):
    before = texts(copy, SHOWING)
    with pytest.raises(SystemExit, match="must be like https://"):
        project.write(copy, url)
    assert texts(copy, SHOWING) == before


def test_words_of_badges_are_not_a_template():
    made = project.read_project(ROOT)._replace(version=r"1\n2\1")
    text = project.with_install((ROOT / "README.md").read_text(encoding="utf-8"), made)
    assert r"[![version 1\n2\1](" in text


@pytest.mark.parametrize("target", ["url", "dist"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["URL="], ["--url", ""]),
        (["URL=A B"], ["--url", "A B"]),
        (["URL=it's"], ["--url", "it's"]),
        ([f"URL={URL}"], ["--url", URL]),
    ],
)
def test_make_gives_the_url_as_one_word(target, given, expected, monkeypatch):
    if shutil.which("make") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("make is not installed")
    for name in ("URL", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of a make that runs the tests
        monkeypatch.delenv(name, raising=False)
    said = subprocess.run(["make", "-n", target, *given], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shlex.split(said.splitlines()[-1])[2:] == expected


def test_a_distribution_says_that_its_links_lead_to_another_state(copy, monkeypatch, capsys):
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    run = subprocess.run

    def run_git(command, **keywords):
        return run(command, **keywords) if command[0] == "git" else None

    monkeypatch.setattr(dist, "ROOT", copy)
    monkeypatch.setattr(dist.subprocess, "run", run_git)
    (copy / "untracked").write_text("")
    dist.build(copy / "dist", URL)
    assert capsys.readouterr().out == ""
    (copy / "README.md").write_text((copy / "README.md").read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    dist.build(copy / "dist", URL)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tracked files differ from HEAD")


def test_nothing_shows_a_placeholder():
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "notes" not in path.parts]
    for path in (*pages, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "CITATION.cff"))):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<URL|git\+<|\bTODO\b|\bTBD\b", text), path
    assert "<URL" in "pip install git+<URL of this repository>"


def test_the_supported_versions_are_those_of_pyproject():
    requires = project.read_project(ROOT).requires
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    oldest = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    names = {"python": "Python", "torch": "torch", "triton": "Triton, on Linux"}
    for package, name in names.items():
        (least,) = re.findall(rf"^\| {name} \| ([\d.]+) to ", page, re.MULTILINE)
        assert least == requires[package]
        if package != "python":
            assert f"\n{package}=={least}." in oldest
    tried = {tuple(map(int, one.split("."))) for one in re.findall(r"^\| (3\.\d+)\.\d+ \|", page, re.MULTILINE)}
    (newest,) = re.findall(r"^\| Python \| [\d.]+ to ([\d.]+)", page, re.MULTILINE)
    assert max(tried) == tuple(map(int, newest.split(".")))
    assert min(tried) == (3, 10) <= sys.version_info
    classifiers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'Python :: {major}.{minor}"' in classifiers for major, minor in tried)
