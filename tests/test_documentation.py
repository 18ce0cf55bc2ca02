"""The documentation: the site builds, its code runs, its commands, links and public names exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from helpers.browser import open_browser
from helpers.documentation_families import (
    B,
    H,
    T,
    check_base,
    make_config,
    read_families,
    rotate_as_family,
    rotate_by_row,
    share_rotated,
)
from helpers.documentation_pages import (
    PAGES,
    ROOT,
    blocks,
    check_command,
    check_link,
    cut_items,
    links,
    shell_lines,
)
from helpers.documentation_stand_ins import stand_in
from torch import Tensor

import ropewalk
from ropewalk.cli import app
from ropewalk.integrations.huggingface.rotation import RopeHandle
from ropewalk.schemes import alibi_slopes
from ropewalk.testing import error_budget

pytestmark = pytest.mark.docs
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
MIGRATIONS = {path.stem for path in (ROOT / "docs" / "migrate").glob("*.md")}
# The two sides of an example: each rounds its result, may round tables and probabilities, and adds up in its own order.
ROUNDINGS = 8
ANGLE = 64 * torch.finfo(torch.float32).eps  # of a position up to 64 times a frequency, both in float32


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def optional(package: str) -> None:
    """Skip the test without a package, but not in CI."""
    try:
        __import__(package)
    except ModuleNotFoundError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def _undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a page switches on is off after it; what it writes goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield
    page = sys.modules.pop("documentation_page", None)
    for value in [] if page is None else list(vars(page).values()):
        if isinstance(value, RopeHandle):
            value.remove()


def run_page(page: Path) -> list[str]:
    """Run a page's blocks in one namespace; return the texts of the blocks that made both sides of a comparison."""
    module = ModuleType("documentation_page")
    module.__file__ = str(page)
    sys.modules[module.__name__] = module  # a scheme names its kernels by their module
    namespace = vars(module)
    compared = []
    for block in blocks(page):
        if block.language != "python":
            continue
        # Tracebacks and dataclasses name the page and the line.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
        if "theirs" in namespace and "ours" in namespace:
            compare(namespace.pop("theirs"), namespace.pop("ours"))
            compared.append(block.text)
    assert "theirs" not in namespace, "a block has theirs, and no block has ours"
    assert "ours" not in namespace, "a block has ours, and no block has theirs"
    return compared


def compare(theirs: Any, ours: Any) -> None:
    """Hold two results of an example against each other, tensors or tuples of them."""
    pair = [(x,) if isinstance(x, Tensor) else x for x in (theirs, ours)]
    for a, b in zip(*pair, strict=True):
        assert a is not b
        assert a.shape == b.shape
        distance = float((b.detach().double() - a.detach().double()).abs().max())
        budget = error_budget(a.double(), a, ROUNDINGS) + ANGLE * float(a.abs().max())
        assert distance <= budget, f"theirs and ours differ by {distance:.3e}, and may by {budget:.3e}"


@pytest.mark.both_modes  # for the test of docs/schemes.md in the interpreter
@pytest.mark.usefixtures("_undone")
@pytest.mark.parametrize("page", WITH_CODE, ids=page_name)
def test_every_block_runs(page, device, monkeypatch):
    text = page.read_text(encoding="utf-8")
    for package in ("transformers", "peft"):
        if package in text:
            optional(package)
    if page.stem in MIGRATIONS:
        stand_in(monkeypatch, device.type)
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compared = run_page(page)
    tabs = re.findall(r'^=== "Ropewalk"$', text, re.MULTILINE)
    assert len(compared) >= len(tabs), "a tab of ours was not compared with theirs"
    if page.stem in MIGRATIONS:
        assert compared


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_set_of_tabs_has_no_name_twice(page):
    """Two pairs of tabs with no sentence between them are one set of four on the site."""
    names: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        tab = re.match(r'=== "(.*)"$', line)
        if tab:
            assert tab[1] not in names, line
            names.append(tab[1])
        elif line.strip() and not line.startswith("    "):
            names = []


def test_a_wrong_side_is_noticed(device):
    a = torch.randn(3, 4, device=device)
    compare((a, a + 1), (a.clone(), (a + 1).clone()))
    for wrong in ((a, a), (-a, a + 1), (a, (a + 1) * (1 + 1e-4))):
        with pytest.raises(AssertionError):
            compare((a, a + 1), tuple(x.clone() for x in wrong))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_exist(page):
    command = typer.main.get_command(app)
    wrong = [check_command(command, words) for words in shell_lines(page)]
    assert [reason for reason in wrong if reason] == []


def test_commands_that_do_not_exist_are_noticed():
    command = typer.main.get_command(app)
    assert check_command(command, ["bench", "rope", "--case", "decode-1", "-o", "x.jsonl"]) is None
    assert check_command(command, ["bench", "rope|attention"]) is None
    assert "no command ropes" in (check_command(command, ["bench", "rope|ropes"]) or "")
    assert "no command bnch" in (check_command(command, ["bnch"]) or "")
    assert "no option --cases" in (check_command(command, ["bench", "rope", "--cases", "x"]) or "")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    wrong = [check_link(page, target) for target in links(page)]
    assert [reason for reason in wrong if reason] == []


def test_links_to_nowhere_are_noticed():
    page = ROOT / "docs" / "index.md"
    assert check_link(page, "https://example.org/x#y") is None
    assert check_link(page, "faq.md") is None
    assert check_link(page, "faq.md#no-such-heading") == "faq.md has no heading no-such-heading"
    assert check_link(page, "no-such-page.md") == "no-such-page.md does not exist"
    assert "outside of docs" in (check_link(page, "../README.md") or "")
    assert check_link(page, "../results/rope-h200.jsonl") is None
    assert check_link(page, "results/rope-h200.jsonl") == "results/rope-h200.jsonl does not exist"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_numbered_list_is_not_cut(page):
    assert list(cut_items(page.read_text(encoding="utf-8"))) == []


def test_a_numbered_list_that_is_cut_is_noticed():
    assert list(cut_items("1. a\n   b\n\n   ```\n   c\n   ```\n2. d\n")) == []
    assert list(cut_items("1. a\n\nA paragraph.\n\n2. b\n3. c\n")) == ["2. b"]
    assert list(cut_items("1. a\n\n```\nc\n```\n\n2. b\n")) == ["2. b"]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_blank_line_ends_a_table(page):
    """Without one the next sentence is a row of it."""
    assert re.findall(r"^\| .*\n(?!\||<!--)(.+)", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_the_first_page_links_every_page():
    """But notes and the pages of single kernels, which have an index each."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"- (?:.*: )?(\S+\.md)$", nav, re.MULTILINE)
    assert len(pages) > 100
    apart = re.compile(r"(notes|kernels)/(?!index\.md)")
    expected = {page for page in pages if not apart.match(page)} - {"index.md"}
    linked = {target.partition("#")[0].removeprefix("../") for target in links(ROOT / "docs" / "index.md")}
    assert sorted(expected - linked) == []


NOTES = sorted((ROOT / "docs" / "notes").glob("[0-9]*.md"))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_a_note_begins_with_its_decision_and_what_undoing_it_costs(note):
    title, _, rest = note.read_text(encoding="utf-8").partition("\n\n")
    first = rest.partition("\n\n")[0]
    assert title.startswith(f"# {note.stem[:3]} "), "a note begins with its number"
    assert re.fullmatch(r"\*\*Decision\.\*\* .+\n\*\*Undoing it\*\* .+", first, re.DOTALL), first


def test_the_index_and_the_site_list_every_note_once():
    names = [note.name for note in NOTES]
    index = (ROOT / "docs" / "notes" / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[\d{3}\]\((\S+)\)", index, re.MULTILINE)) == names
    assert re.findall(r"- notes/(\d\S+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")) == names


def test_every_public_name_is_documented():
    api = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    directives = set(re.findall(r"^::: (\S+)$", api, re.MULTILINE))
    expected = {f"{module}.{name}" for name, module in ropewalk._MODULE_OF.items()} - {
        "ropewalk.frequencies.FREQUENCIES"
    }
    expected |= {f"ropewalk.frequencies.{name}" for name in ropewalk.FREQUENCIES}
    for module in ("testing", "integrations.vllm_ops"):
        expected |= {f"ropewalk.{module}.{name}" for name in public_functions(f"ropewalk.{module}")}
    expected |= {
        f"{getattr(ropewalk_huggingface(), name).__module__}.{name}" for name in ropewalk_huggingface().__all__
    }
    assert expected - directives == set()
    assert "`FREQUENCIES`" in api
    assert "`ropewalk.__version__`" in api


def ropewalk_huggingface() -> Any:
    from ropewalk.integrations import huggingface

    return huggingface


def public_functions(module: str) -> list[str]:
    """The functions that a module itself defines, and does not hide."""
    __import__(module)
    values = vars(sys.modules[module])
    return [
        name
        for name, value in values.items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module
    ]


def skip_unless_known(model_type: str) -> None:
    """Skip the test where an older transformers lacks a family, but not in CI."""
    from transformers import CONFIG_MAPPING

    if os.environ.get("CI") != "true" and model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")


@pytest.mark.parametrize("family", read_families(), ids=str)
def test_a_family_rotates_as_its_row_says(family):
    optional("transformers")
    skip_unless_known(family.model_type)
    config = make_config(family)
    check_base(family, config)
    head_dim, rotated, first = share_rotated(family, config)
    q = torch.randn(B, H, T, head_dim)
    positions = torch.randint(0, 200, (B, T))
    positions[:, 0] = 199
    part = q[..., first : first + rotated]
    theirs, ours = rotate_as_family(family, config, part, positions), rotate_by_row(family, config, part, positions)
    # Theirs takes the angle in float32: positions up to 200 times frequencies that are rounded too.
    budget = (200 + ROUNDINGS) * torch.finfo(torch.float32).eps * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= budget


def test_the_table_of_families_has_rows():
    assert len(read_families()) > 50


# Falcon rounds its biases to bfloat16, which changes none of 8 heads'.
@pytest.mark.parametrize(("family", "n_heads"), [("bloom", 8), ("bloom", 12), ("mpt", 8), ("mpt", 12), ("falcon", 8)])
def test_alibi_is_as_its_families_have_it(family, n_heads):
    optional("transformers")
    q, k, v = (torch.randn(B, T, n_heads, 16) for _ in range(3))
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "mpt":
        bias = module.build_mpt_alibi_tensor(n_heads, T)
    else:
        bias = module.build_alibi_tensor(torch.ones(B, T, dtype=torch.long), n_heads, torch.float32)
        bias = bias.view(B, n_heads, 1, T)  # by the key's position: the same for the softmax
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k)
    if family == "falcon":
        scores, position = (scores + bias) / 4, ropewalk.Alibi(alibi_slopes(n_heads) / 16**0.5)
    else:
        scores, position = scores / 4 + bias, ropewalk.Alibi()
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = torch.einsum("bhmn,bnhd->bmhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(ropewalk.attention(q, k, v, position=position, causal=True), expected)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5_is_as_its_row_says(is_decoder):
    optional("transformers")
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=32, d_kv=8, num_heads=H, is_decoder=is_decoder, dropout_rate=0.0)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    torch.nn.init.normal_(layer.relative_attention_bias.weight)
    x = torch.randn(B, 40, 32)
    mask = torch.zeros(1, 1, 40, 40)
    if is_decoder:
        mask = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = layer(x, mask=mask)[0]
    q, k, v = (project(x).unflatten(-1, (H, 8)) for project in (layer.q, layer.k, layer.v))
    position = ropewalk.T5Bias(layer.relative_attention_bias.weight, bidirectional=not is_decoder)
    out = ropewalk.attention(q, k, v, position=position, scale=1.0, causal=is_decoder)
    torch.testing.assert_close(layer.o(out.flatten(2)), expected)


def test_the_schemes_kernels_run_in_the_interpreter(device):
    """The page's own kernels: here the suite runs without them, unless there is a GPU."""
    if device.type == "cuda":  # and the interpreter of Triton 3.6 fails with NumPy 2.5
        pytest.skip("test_every_block_runs runs them on the GPU itself")
    pytest.importorskip("triton")
    changes = {"TRITON_INTERPRET": "1", "ROPEWALK_TEST_DEVICE": "cpu", "PYTHONPATH": str(ROOT / "src")}
    chosen = ["-q", __file__, "-k", "every_block and docs/schemes"]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, **changes}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
        optional(package)
    built = tmp_path_factory.mktemp("documentation") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_the_site_builds_and_loads_nothing(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md"))) / 2
    for page in pages:
        check_built(page)
    formulas = [found for page in pages for found in re.findall("<math.*?</math>", page.read_text(encoding="utf-8"))]
    assert len(formulas) == sum(block.language == "math" for page in PAGES for block in blocks(page)) > 20
    assert [formula for formula in formulas if "\\" in formula] == [], "a command of LaTeX that is not known"
    for page, drawing in (("gallery", "gallery-rope"), ("kernels/rotation-cuda", "rotation-cuda")):
        assert f'<title id="{drawing}-title">' in (site / page / "index.html").read_text(encoding="utf-8"), page
    assert '<span id="line-5-2" style="--indent: 4ch">' in (site / "quickstart/index.html").read_text(encoding="utf-8")
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_a_formula_that_is_none_fails_a_strict_build(tmp_path):
    for package in ("mkdocs", "latex2mathml", "pymdownx"):
        optional(package)
    extensions = "markdown_extensions: [pymdownx.superfences]"
    settings = f"site_name: a\ntheme: mkdocs\n{extensions}\nhooks: [{ROOT}/docs/assets/formulas.py]\n"
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "docs").mkdir()

    def build(formula):
        (tmp_path / "docs/index.md").write_text(f"```math\n{formula}\n```\n", encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    done = build(r"a \text{ if <b> & c}")
    assert done.returncode == 0, done.stderr
    refused = build(r"\left( a")
    assert refused.returncode
    assert r"\left( a" in refused.stderr


def test_words_of_a_formula_are_escaped():
    optional("latex2mathml")
    formulas = load_hook("formulas")
    html = formulas.typeset(r"a \text{ if <b> & c}", "math", "formula", {}, None)
    assert "<mtext>\xa0if\xa0&lt;b&gt;\xa0&amp;\xa0c</mtext>" in html


def test_a_folder_in_results_is_no_file_of_the_site(tmp_path, monkeypatch):
    optional("mkdocs")
    results = load_hook("results")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").write_text("")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results.File, "generated", lambda config, uri, **_: uri)
    assert results.on_files([], None) == ["results/a.jsonl"]


def load_hook(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/assets/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WIDE_FORMULAS = """
    [...document.querySelectorAll('.formula')].filter(x => x.scrollWidth > x.clientWidth).map(x => x.textContent)
"""


@pytest.mark.browser
def test_every_page_fits_a_phone(site):
    """Wide tables scroll in their own box; formulas are short enough to need none."""
    wide = []
    with open_browser() as browser:
        view = browser.new_page(viewport={"width": 390, "height": 800})
        for page in sorted(site.rglob("index.html")):
            view.goto(page.as_uri())
            if view.evaluate("document.documentElement.scrollWidth") > 390:
                wide.append(str(page.relative_to(site)))
            wide += [f"{page.relative_to(site)}: {formula}" for formula in view.evaluate(WIDE_FORMULAS)]
    assert wide == []


def check_built(page: Path) -> None:
    """Everything that a page loads lies beside it, and every directive of mkdocstrings became text."""
    html = page.read_text(encoding="utf-8")
    loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", html)
    loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]* href=\"?([^\s\">]+)", html)
    assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page.name
    assert "::: ropewalk" not in html, page.name
