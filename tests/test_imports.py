"""What imports what, what `import ropewalk` costs, and whether the examples in docstrings are true."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import ropewalk

ROOT = Path(ropewalk.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 450

# From the bottom up: a module imports only from layers below its own, or from its neighbours where they are a family.
LAYERS = (
    ("ropewalk", "ropewalk.frequencies", "ropewalk.testing"),
    ("ropewalk.position_scheme",),
    ("ropewalk.positions",),
    ("ropewalk.far_positions",),
    ("ropewalk.ops.rope.checks", "ropewalk.ops.rope.native_build"),
    ("ropewalk.ops.rope.reference", "ropewalk.ops.rope.triton_*", "ropewalk.ops.rope.native"),
    ("ropewalk.ops.rope.eager",),
    ("ropewalk.ops.rope.operator",),
    ("ropewalk.ops.rope.api",),
    ("ropewalk.ops.rope.documents", "ropewalk.ops.rope.rotary_embedding"),
    ("ropewalk.ops.attention.checks",),
    ("ropewalk.ops.attention.prepare", "ropewalk.ops.attention.philox"),
    ("ropewalk.ops.attention.reference", "ropewalk.ops.attention.triton_*"),
    ("ropewalk.ops.attention.gluon_*",),
    ("ropewalk.ops.attention.flash_far",),
    ("ropewalk.ops.attention.cores",),
    ("ropewalk.ops.attention.eager", "ropewalk.ops.attention.choice"),
    ("ropewalk.ops.attention.operator",),
    ("ropewalk.ops.attention.api",),
    ("ropewalk.ops.attention.documents", "ropewalk.ops.attention.rerope"),
    ("ropewalk.modules.*",),
    ("ropewalk.integrations.*",),
    ("ropewalk.bench.*", "ropewalk.experiments.*"),
    ("ropewalk.cli*",),
    ("ropewalk.__main__",),
)
FAMILIES = (
    ("ropewalk.ops.*.triton_*",),
    ("ropewalk.ops.*.gluon_*",),
    ("ropewalk.modules.*",),
    ("ropewalk.integrations.huggingface*",),
    ("ropewalk.bench.*", "ropewalk.experiments.*"),
    ("ropewalk.cli*",),
)
KERNELS = ("ropewalk.ops.*.triton_*", "ropewalk.ops.*.gluon_*")
# Packages that a user may lack may be missed by these alone, and only once they are called.
MAY_USE_OPTIONAL = ("ropewalk.bench.*", "ropewalk.experiments.*", "ropewalk.integrations.*")
REQUIRED = {"torch", "typer", "rich", *sys.stdlib_module_names}
# Examples that need a GPU, by module.
NEEDS_GPU: set[str] = set()
WITHOUT_DOCSTRING = {"FREQUENCIES", "__version__"}  # not functions or classes


@dataclass(frozen=True)
class Import:
    """One import: which module it is in, what it names, and whether it runs when that module is imported."""

    importer: str
    imported: str
    at_once: bool
    line: int

    def __str__(self):
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports_of(importer, source):
    """All imports in a module's source, but those that only type checkers see."""

    def visit(node, at_once):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, at_once, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, f"{importer}:{node.lineno} imports relatively"
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(importer, full if full in MODULES else base, at_once, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = [name for name in node.args[:1] if isinstance(name, ast.Constant)]
            yield from (Import(importer, name.value, at_once, node.lineno) for name in named)
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_once and not in_function)

    return list(visit(ast.parse(source), True))


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, path.read_text())]


IMPORTS_BY = {found.importer: found for found in IMPORTS}


def matches(module, patterns):
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def layer(module):
    """The layer of a module; packages that import nothing count as the lowest."""
    found = [index for index, patterns in enumerate(LAYERS) if matches(module, patterns)]
    if not found and not IMPORTS_BY.get(module) and MODULES[module].name == "__init__.py":
        return 0
    assert len(found) == 1, f"{module} is in {len(found)} layers: say in LAYERS where it belongs"
    return found[0]


def is_family(importer, imported):
    same_op = importer.rpartition(".")[0] == imported.rpartition(".")[0] or not importer.startswith("ropewalk.ops.")
    return same_op and any(matches(importer, family) and matches(imported, family) for family in FAMILIES)


def goes_up(found):
    """Whether an import breaks the order of the layers."""
    if found.imported.partition(".")[0] != "ropewalk" or found.importer == "ropewalk":
        return False
    return layer(found.importer) <= layer(found.imported) and not is_family(found.importer, found.imported)


def loads_optional(found):
    """Whether an import loads a package that may be missing, when its module is imported."""
    package = found.imported.partition(".")[0]
    return found.at_once and package != "ropewalk" and package not in REQUIRED


HEAVY = {found.importer for found in IMPORTS if loads_optional(found)}


def test_every_module_has_a_layer():
    assert len(MODULES) > 20
    for module in MODULES:
        layer(module)


def test_imports_go_downwards():
    assert not [str(found) for found in IMPORTS if goes_up(found)]


def test_implementations_do_not_import_each_other():
    families = [
        ("reference", "ropewalk.ops.*.reference"),
        ("triton", "ropewalk.ops.*.triton_*"),
        ("gluon", "ropewalk.ops.*.gluon_*"),
        ("native", "ropewalk.ops.*.native"),
    ]
    shared = ("gluon", "triton")  # what both launch with, and functions that both kernels call

    def family(module):
        return next((name for name, pattern in families if fnmatchcase(module, pattern)), None)

    pairs = {(family(found.importer), family(found.imported)): str(found) for found in IMPORTS}
    assert not [text for (a, b), text in pairs.items() if a and b and a != b and (a, b) != shared]


def test_what_may_be_missing_is_loaded_by_those_who_may_miss_it():
    assert not [module for module in HEAVY if not matches(module, (*MAY_USE_OPTIONAL, *KERNELS))]
    triton = {found.importer for found in IMPORTS if found.imported.partition(".")[0] == "triton"}
    assert triton
    assert not [module for module in triton if not matches(module, (*KERNELS, *MAY_USE_OPTIONAL))]


def test_who_loads_what_may_be_missing_is_loaded_when_called():
    lazy = HEAVY | {module for module in MODULES if matches(module, (*KERNELS, "ropewalk.ops.*.native_build"))}

    def are_loaded_together(found):
        both_kernels = all(matches(module, KERNELS) for module in (found.importer, found.imported))
        return found.importer in lazy and (both_kernels or is_family(found.importer, found.imported))

    early = [found for found in IMPORTS if found.at_once and found.imported in lazy]
    assert not [str(found) for found in early if not are_loaded_together(found)]


def test_the_rules_can_fail():
    def found(importer, source):
        return imports_of(importer, source)[0]

    assert goes_up(found("ropewalk.frequencies", "from ropewalk.ops.rope.api import apply_rope"))
    assert goes_up(found("ropewalk.ops.rope.reference", "def f():\n    from ropewalk.ops.rope import triton_launch"))
    assert goes_up(found("ropewalk.ops.rope.api", "import ropewalk.modules.rotary"))
    assert goes_up(found("ropewalk.modules.rotary", "from ropewalk.bench import timing"))
    assert not goes_up(found("ropewalk.modules.attention", "from ropewalk.modules.rotary import RotaryEmbedding"))
    assert loads_optional(
        found("ropewalk.modules.rotary", "try:\n    import transformers\nexcept ImportError:\n    pass")
    )
    assert loads_optional(found("ropewalk.cli", "class A:\n    from matplotlib import figure"))
    assert not loads_optional(found("ropewalk.cli", "def f():\n    import matplotlib"))


def python(code, **environment):
    """Run code in a fresh interpreter, and return what it prints."""
    search = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, **environment}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


LOADED = "import sys; print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
CPU_CALL = """
import torch, ropewalk
cos, sin = ropewalk.rope_table(8, ropewalk.inverse_frequencies("default", 16, base=10000.0)[0])
ropewalk.apply_rope(torch.randn(1, 8, 2, 16, requires_grad=True), None, cos, sin)[0].sum().backward()
"""
CPU_ATTENTION = """
import torch, ropewalk
q = torch.randn(1, 8, 2, 16, requires_grad=True)
ropewalk.attention(q, q, q, position=ropewalk.Rope(), causal=True).sum().backward()
ropewalk.attention(q, q, q, position=ropewalk.Alibi()).sum().backward()
"""
COSTS = {
    "import": ("import ropewalk", {"torch", "triton", "typer", "rich"}),
    "dir": ("import ropewalk; dir(ropewalk); ropewalk.__version__", {"torch", "triton"}),
    "help": ("from ropewalk.cli import app; app(['--help'], standalone_mode=False)", {"torch", "triton"}),
    "bench-help": (
        "from ropewalk.cli import app; app(['bench', '--help'], standalone_mode=False)",
        {"torch", "triton"},
    ),
    "api": ("import ropewalk.ops.rope.api", {"triton", "typer", "rich"}),
    "all-names": ("from ropewalk import *", {"triton", "matplotlib", "transformers"}),
    "cpu-call": (CPU_CALL, {"triton", "matplotlib", "transformers"}),
    "cpu-attention": (CPU_ATTENTION, {"triton", "matplotlib", "transformers"}),
}


@pytest.mark.parametrize("case", COSTS)
def test_nothing_is_loaded_before_it_is_needed(case):
    code, unwanted = COSTS[case]
    loaded = set(python(f"{code}\n{LOADED}").rpartition("loaded:")[2].split())
    assert "ropewalk" in loaded
    assert not loaded & unwanted


@pytest.mark.parametrize("name", ropewalk.__all__)
def test_public_names_resolve_and_are_explained_by_an_example(name):
    value = getattr(ropewalk, name)
    assert name in dir(ropewalk)
    if name not in WITHOUT_DOCSTRING:
        assert value.__doc__
        assert ">>> " in value.__doc__, "the docstring shows no example"


def test_unknown_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'apply_ropes'"):
        _ = ropewalk.apply_ropes


def test_the_names_for_type_checkers_are_the_public_ones():
    tree = ast.parse(MODULES["ropewalk"].read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    listed = {alias.asname: node.module for block in blocks for node in block.body for alias in node.names}
    assert listed == ropewalk._MODULE_OF


WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_are_true(name):
    if name in NEEDS_GPU:
        pytest.skip("needs a GPU")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name.partition(".")[0] in REQUIRED | {"ropewalk"}:
            raise
        pytest.skip(f"{missing.name} is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_speak_of_no_machine(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"more than {MAX_LINES} lines: it is probably two files"
    assert not re.findall(r"(?<![\w.~])/(?:home|work|root|Users|tmp|mnt)/\S*", text)
