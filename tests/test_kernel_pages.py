"""The pages of kernels and of their maths say what is so: names, and figures of the compilers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from ropewalk.ops.attention.hopper import support as gluon_support  # noqa: E402

ROOT = Path(__file__).parents[1]
DOCS, SOURCES = ROOT / "docs", ROOT / "src/ropewalk"
PAGES = {str(path.relative_to(DOCS)): path for folder in ("kernels", "maths") for path in (DOCS / folder).glob("*.md")}
PAGES["architecture.md"] = DOCS / "architecture.md"
KERNEL_PAGES = [name for name in PAGES if name.startswith("kernels/") and not name.endswith("index.md")]
EXACTLY = [
    "rotate_kernel: half-split",
    "forward_kernel: RoPE, causal, D 128",
    "forward_kernel for Hopper: RoPE, causal, D 128",
    "decode_kernel: 1 query, D 128",
]


def load():
    spec = importlib.util.spec_from_file_location("kernel_figures", DOCS.parent / "tools/kernel_figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_figures"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


kernel_figures = load()
FIGURES = json.loads(kernel_figures.FIGURES.read_text(encoding="utf-8"))


def text_of(name):
    return PAGES[name].read_text(encoding="utf-8")


def prose_of(name):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text_of(name), flags=re.MULTILINE | re.DOTALL)


# Figures of the compilers.


@pytest.mark.parametrize("name", kernel_figures.page_names())
def test_tables_are_those_of_figures_json(name):
    page = text_of(f"kernels/{name}.md")
    current = kernel_figures.replace_table(page, kernel_figures.render(name, FIGURES))
    assert page == current, "python tools/kernel_figures.py writes it anew"


def test_every_kernel_page_has_a_table_and_every_row_its_figures():
    assert {f"kernels/{name}.md" for name in kernel_figures.page_names()} == set(KERNEL_PAGES)
    rows = [row for rows in kernel_figures.ROWS.values() for row in rows]
    assert [row.key for row in rows] == list(FIGURES["kernels"])
    assert all(set(FIGURES["kernels"][row.key]) == set(row.targets) for row in rows)


def test_every_kernel_has_figures_and_is_in_the_index():
    kernels = {
        (found, "ops" in path.parts)
        for path in SOURCES.rglob("*.py")
        for found in re.findall(
            r"^@(?:triton|gluon)\.jit(?:\(\n(?:  .*\n)*\))?.*\ndef (\w+_kernel)\(",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    }
    of_ops = {found for found, is_of_ops in kernels if is_of_ops}
    assert {row.kernel for rows in kernel_figures.ROWS.values() for row in rows} == of_ops
    assert set(re.findall(r"`(\w+_kernel)\b", text_of("kernels/index.md"))) == {found for found, _ in kernels}


@pytest.mark.parametrize("name", kernel_figures.ROWS)
def test_tiles_are_those_that_ship(name):
    missing = gluon_support.why_missing()
    for row in kernel_figures.ROWS[name]:
        if row.for_hopper and missing is not None:
            pytest.skip(missing)
        tiles = {target: measured["tile"] for target, measured in FIGURES["kernels"][row.key].items()}
        shipped = {target: kernel_figures.plan(row, target)[1] for target in row.targets}
        assert tiles == shipped, f"{row.key}: python tools/kernel_figures.py measures it anew"


@pytest.mark.compile
@pytest.mark.parametrize("key", EXACTLY)
def test_figures_are_what_this_compiler_says(key):
    if FIGURES["triton"] != triton.__version__:
        pytest.skip(f"the figures are of Triton {FIGURES['triton']}, and this is {triton.__version__}")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("this Triton comes without cuobjdump")
    [row] = [x for rows in kernel_figures.ROWS.values() for x in rows if x.key == key]
    assert kernel_figures.measure(row, "sm_90") == FIGURES["kernels"][row.key]["sm_90"]


@pytest.mark.compile
@pytest.mark.slow
def test_figures_of_cuda_are_what_nvcc_says():
    version = kernel_figures.nvcc_version()
    if version != FIGURES["nvcc"]:
        pytest.skip(f"the figures are of nvcc {FIGURES['nvcc']}, and this is {version}")
    assert kernel_figures.measure_cuda("90") == FIGURES["cuda"]["90"]


@pytest.mark.compile
def test_a_kernel_that_wants_more_tensor_memory_than_there_is_is_told_apart():
    [row] = [x for x in kernel_figures.ROWS["attention-forward"] if "D 192" in x.name]
    measured = FIGURES["kernels"][row.key]
    assert ("tensor_memory" in measured["sm_100"]) == (
        "does not run" in kernel_figures.render("attention-forward", FIGURES)
    )
    cell = kernel_figures._cell({**measured["sm_90"], "tensor_memory": 600}, measured["sm_90"]["tile"])
    assert "600 of 512" in cell


# Names.


def files_named(name):
    """Files of the repository whose path ends so."""
    places = [path for folder in (SOURCES, ROOT / "tools", ROOT / "tests") for path in folder.rglob("*.[pc][yu]")]
    return [path for path in places if f"/{path}".endswith(f"/{name}")]


def defines(path, name):
    """Whether a file defines a function, a class, a method or a name at its top."""
    text = path.read_text(encoding="utf-8")
    *classes, last = name.split(".")
    if path.suffix == ".cu":
        return re.search(rf"\b{last}\(", text) is not None
    if classes and not re.search(rf"^class {classes[0]}\b", text, re.MULTILINE):
        return False
    return re.search(rf"^ *(?:def|class) {last}\b|^{last}\b.* = ", text, re.MULTILINE) is not None


def references(name):
    """(file, what it is to define) that a page names: `file.py:name`, and `name` in `file.py`."""
    text = text_of(name)
    yield from re.findall(r"\b([\w./]+\.(?:py|cu)):([A-Za-z_][\w.]*\w)", text)
    yield from ((file, what) for what, file in re.findall(r"`(\w+)` in\s`([\w./]+\.(?:py|cu))`", text))


@pytest.mark.parametrize("name", PAGES)
def test_files_and_functions_exist(name):
    for file, what in references(name):
        found = files_named(file.removeprefix("src/ropewalk/"))
        assert found, f"{file} does not exist"
        assert any(defines(path, what) for path in found), f"{file} does not define {what}"
    for file in re.findall(r"`([\w./]+\.(?:py|cu))`", text_of(name)):
        assert files_named(file.removeprefix("src/ropewalk/")), f"{file} does not exist"
    for file in re.findall(r"`((?:results|src|docs|tools)/[\w./-]+)`", text_of(name)):
        assert (ROOT / file).exists(), f"{file} does not exist"


def test_pages_name_functions():
    found = [reference for name in PAGES for reference in references(name)]
    assert len(found) > 60
    assert not defines(SOURCES / "ops/attention/libraries/merge.py", "merges")


EVERY_WORD = {
    word
    for path in [*SOURCES.rglob("*.py"), *SOURCES.rglob("*.cu"), *DOCS.glob("notes/*.md"), *ROOT.glob("tools/*.py")]
    for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", PAGES)
def test_identifiers_exist(name):
    for identifier in re.findall(r"`([A-Za-z]\w*_\w+)(?:=\w+)?`", prose_of(name)):
        assert identifier in EVERY_WORD, f"{identifier} occurs nowhere in the sources"


def anchors(path):
    headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_exist(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(name)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (PAGES[name].parent / file).resolve() if file else PAGES[name]
        assert path.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(path), f"{target} has no such heading"


# Diagrams.


@pytest.mark.parametrize("name", KERNEL_PAGES)
def test_a_kernel_page_has_one_diagram(name):
    [figure] = re.findall(r"^!\[.+\]\(\.\./(figures/[\w-]+\.svg)\)$", text_of(name), re.MULTILINE)
    text = (DOCS / figure).read_text(encoding="utf-8")
    assert "\n\n" not in text, "a blank line ends raw HTML in Markdown"
    root = ElementTree.fromstring(text)
    namespace = "{http://www.w3.org/2000/svg}"
    for kind in ("title", "desc"):
        element = root.find(f"{namespace}{kind}")
        assert element.text
        assert element.get("id") in root.get("aria-labelledby").split()
    assert root.get("viewBox").startswith("0 0 360 ")
    assert root.get("fill") == "currentColor"
    painted = {element.get("fill") for element in root.iter(f"{namespace}text")}
    assert painted == {None}, "text has the page's colour, in light and in dark"
    assert min(float(element.get("font-size")) for element in root.iter(f"{namespace}text")) >= 9


def test_ids_in_diagrams_are_unique():
    ids = [found for path in (DOCS / "figures").glob("*.svg") for found in re.findall(r' id="(.*?)"', path.read_text())]
    assert len(ids) == len(set(ids)) > 0
