"""What imports what, what `import ropewalk` costs, and whether the examples in docstrings are true."""

import ast
import doctest
import functools
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

# What each folder or module may import of Ropewalk beside itself and OPEN. The longest name that fits a module counts;
# "x" is x without what has a line of its own, "x.*" is all below x.
OPEN = "device frequencies testing ops.tracing ops.arguments ops.once"
_SHARED_BY_KERNELS = "ops.launch ops.attention.call ops.attention.backend ops.attention.pages ops.attention.tables"
_PREPASS = "ops.attention.quantise.call ops.attention.quantise.launch"
_TRITON_FOR_HOPPER = "arguments tiles masking scheduler softmax score_mods config gather launch_common support"
LAYERS = {
    **dict.fromkeys(OPEN.split(), ""),
    "schemes": "",
    "ops.launch": "",
    "ops.dtensor": "ops.rope.norm schemes",
    "ops.rope": "ops.launch ops.rope.* ops.dtensor",
    **dict.fromkeys(("ops.rope.norm", "ops.rope.heads", "ops.rope.pages"), "ops.launch ops.rope"),
    "ops.rope.cuda": "ops.rope.call ops.rope.validate",
    "ops.cache": "ops.launch ops.rope.norm ops.rope.reference ops.rope.validate ops.cache.*",
    "ops.cache.triton": "ops.launch ops.cache.call ops.cache.formats ops.cache.written",
    "ops.attention": "ops.launch ops.dtensor schemes ops.cache.formats ops.cache.validate "
    "ops.rope.api ops.rope.autograd ops.rope.call ops.rope.launch ops.rope.norm ops.rope.reference "
    "ops.attention.backends ops.attention.plans ops.attention.gate.operation ops.attention.blocks.tables "
    "ops.attention.quantise.call ops.attention.quantise.follow ops.attention.quantise.precision "
    "ops.attention.quantise.reference",
    "ops.attention.blocks": "ops.launch ops.attention.call ops.attention.backend ops.attention.triton.tiles",
    "ops.attention.gate": "ops.launch ops.attention.backend ops.attention.plans ops.attention.triton.tiles",
    "ops.attention.quantise": "ops.launch ops.cache.formats ops.attention.call ops.attention.tables "
    "ops.attention.triton.launch_common ops.attention.triton.scheduler ops.attention.triton.tiles",
    "ops.attention.backends": "schemes ops.attention ops.attention.*",
    "ops.attention.plans": "ops.launch ops.rope.launch ops.rope.norm schemes ops.attention ops.attention.backends "
    "ops.attention.triton.table_rows",
    "ops.attention.triton": f"{_SHARED_BY_KERNELS} ops.cache.formats ops.attention.dropout ops.rope.api "
    f"ops.attention.gate.kernel {_PREPASS}",
    "ops.attention.hopper": f"{_SHARED_BY_KERNELS} ops.cache.formats ops.attention.dropout ops.rope.api "
    f"ops.attention.gate.kernel ops.attention.blocks.kernel ops.attention.blocks.mask_kernel {_PREPASS} "
    + " ".join(f"ops.attention.triton.{name}" for name in _TRITON_FOR_HOPPER.split()),
    "ops.attention.libraries": f"{_SHARED_BY_KERNELS} ops.attention.libraries.merge",
    "ops.attention.libraries.merge": "ops.launch ops.attention.triton.tiles",
    "compat": "ops.* schemes",
    "modules": "ops.launch ops.rope.api ops.rope.norm ops.attention.api schemes",
    "parallel": "ops.* schemes",
    "integrations": "ops.rope.api ops.rope.call ops.rope.repeat ops.rope.norm ops.rope.rotary_embedding "
    "ops.attention.api parallel.call parallel.agreement schemes modules",
    "bench.core": "",
    "bench.rope": "bench.core ops.* schemes",
    "bench.attention": "bench.core bench.rope compat ops.* schemes",
    "bench.host": "bench.core bench.attention bench.rope ops.*",
    "bench.parallel": "bench.core bench.attention bench.rope parallel ops.* schemes",
    "bench.training": "bench.core integrations ops.* schemes",
    "bench.report": "bench.core bench.rope bench.attention",
    "experiments": "bench.core modules integrations ops.* schemes",
    "doctor": "*",
    "cli": "*",
}
# Every name of theirs, loaded when it is asked for; and the package of packages, which imports nothing.
ROOTS = ("ropewalk", "ropewalk.__main__", "ropewalk.ops", "ropewalk.bench")
KERNELS = (
    *("ropewalk.ops.*.triton.*", "ropewalk.ops.*.hopper.*", "ropewalk.ops.attention.gate.kernel"),
    *(f"ropewalk.ops.rope.{family}{name}" for family in ("", "*.") for name in ("arguments", "kernel", "launch")),
    *(f"ropewalk.ops.launch.{name}" for name in ("bind", "kernel", "launcher", "plan")),
    *(f"ropewalk.ops.attention.quantise.{name}" for name in ("kernel", "launch")),
    *(f"ropewalk.ops.attention.blocks.{name}" for name in ("kernel", "build_kernel", "mask_kernel")),
    "ropewalk.ops.attention.libraries.merge",
    "ropewalk.modules.mask_kernel",
)
NO_TRITON = ("ropewalk.ops.*.support",)  # beside kernels, and read before they are loaded
# Packages that a user may lack: these alone may load them, and only once they are called.
MAY_USE_OPTIONAL = ("ropewalk.bench.*", "ropewalk.experiments.*", "ropewalk.integrations.*")
COMMANDS = {"typer", "rich"}  # of the extra "bench": these folders alone load them, and nothing outside loads these
MAY_USE_COMMANDS = ("ropewalk.cli", "ropewalk.cli.*", "ropewalk.bench.*", "ropewalk.experiments.*")
REQUIRED = {"torch", *COMMANDS, *sys.stdlib_module_names}
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


@functools.cache
def all_imports():
    return [found for name, path in MODULES.items() for found in imports_of(name, path.read_text())]


def matches(module, patterns):
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def layer(module):
    """The line of LAYERS that counts for a module."""
    name = module.removeprefix("ropewalk.")
    found = [key for key in LAYERS if f"{name}.".startswith(f"{key}.")]
    assert found, f"{module} is in no layer: say in LAYERS where it belongs"
    return max(found, key=len)


def breaks_layers(found):
    """Whether a module imports what its layer may not."""
    if found.imported.partition(".")[0] != "ropewalk" or found.importer in ROOTS or found.imported == "ropewalk":
        return False
    importer, imported = layer(found.importer), layer(found.imported)
    name = found.imported.removeprefix("ropewalk.")
    allowed = f"{OPEN} {LAYERS[importer]}".split()
    return imported != importer and not any(rule in (imported, name) or matches(name, [rule]) for rule in allowed)


def loads_a_launcher(found):
    """Whether a module of kernels imports a launcher of another folder, but that of the one prepass."""
    if not matches(found.importer, (*KERNELS, "ropewalk.ops.*.cuda.*", "ropewalk.ops.*.libraries.*")):
        return False
    folder, _, name = found.imported.rpartition(".")
    is_launcher = name == "launch" or name.endswith("_launch")
    is_prepass = found.imported == "ropewalk.ops.attention.quantise.launch"
    return is_launcher and not is_prepass and folder != found.importer.rpartition(".")[0]


def find_circle(imports):
    """Modules that import each other, in order; none if there are none."""
    graph = {}
    for found in imports:
        if found.importer not in ROOTS and found.imported in MODULES and found.imported not in ROOTS:
            graph.setdefault(found.importer, set()).add(found.imported)
    done = set()

    def visit(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                if circle := visit(imported, [*path, module]):
                    return circle
            done.add(module)
        return None

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), None)


def loads_optional(found):
    """Whether an import loads a package that may be missing, when its module is imported."""
    package = found.imported.partition(".")[0]
    return found.at_once and package != "ropewalk" and package not in REQUIRED


@functools.cache
def heavy_modules():
    return {found.importer for found in all_imports() if loads_optional(found)}


def test_every_module_has_a_layer_and_every_layer_a_module():
    assert len(MODULES) > 20
    assert {layer(module) for module in MODULES if module not in ROOTS} == set(LAYERS)


def test_imports_keep_to_the_layers():
    assert not [str(found) for found in all_imports() if breaks_layers(found)]


def test_kernels_import_no_launcher_of_others():
    assert not [str(found) for found in all_imports() if loads_a_launcher(found)]


def test_no_module_imports_itself_in_a_circle():
    assert find_circle(all_imports()) is None


def test_what_may_be_missing_is_loaded_by_those_who_may_miss_it():
    assert not [module for module in heavy_modules() if not matches(module, (*MAY_USE_OPTIONAL, *KERNELS))]
    triton = {found.importer for found in all_imports() if found.imported.partition(".")[0] == "triton"}
    assert triton
    assert not [module for module in triton if not matches(module, (*KERNELS, *MAY_USE_OPTIONAL, "ropewalk.device"))]


def test_the_library_needs_no_package_of_the_commands():
    users = {found.importer for found in all_imports() if found.imported.partition(".")[0] in COMMANDS}
    assert users
    assert not [module for module in users if not matches(module, MAY_USE_COMMANDS)]
    reached = [
        found
        for found in all_imports()
        if matches(found.imported, MAY_USE_COMMANDS)
        # The doctor reads the lists of peers, in modules that load no package of the commands; test_cli.py runs it so.
        and not matches(found.importer, (*MAY_USE_COMMANDS, *ROOTS, "ropewalk.doctor"))
    ]
    assert not [str(found) for found in reached]


def test_who_loads_what_may_be_missing_is_loaded_when_called():
    kernels = {module for module in MODULES if matches(module, KERNELS) and not matches(module, NO_TRITON)}
    trained = {module for module in MODULES if matches(module, ("ropewalk.experiments.bert_positions.*",))}
    lazy = heavy_modules() | kernels | trained | {"ropewalk.ops.rope.cuda.build"}

    def are_loaded_together(found):
        both_kernels = all(matches(module, KERNELS) for module in (found.importer, found.imported))
        return found.importer in lazy and (both_kernels or layer(found.importer) == layer(found.imported))

    early = [found for found in all_imports() if found.at_once and found.imported in lazy]
    assert not [str(found) for found in early if not are_loaded_together(found)]


def test_the_rules_can_fail():
    def found(importer, source):
        return imports_of(importer, source)[0]

    attention, rope = "ropewalk.ops.attention", "ropewalk.ops.rope"
    for importer, source in (
        ("ropewalk.frequencies", f"from {rope}.api import apply_rope"),
        (f"{rope}.heads.launch", f"def f():\n    from {rope}.norm import reference"),
        (f"{rope}.api", "import ropewalk.modules.rotary"),
        (f"{attention}.api", f"def f():\n    from {attention}.triton import launch"),
        (f"{attention}.hopper.launch", f"from {attention}.triton.forward import forward_kernel"),
        (f"{attention}.libraries.flash", f"from {attention}.triton.tiles import load"),
        ("ropewalk.modules.rotary", f"from {attention} import reference"),
        ("ropewalk.experiments.demo", "from ropewalk.bench.attention import cases"),
    ):
        assert breaks_layers(found(importer, source)), (importer, source)
    for importer, source in (
        ("ropewalk.modules.attention", "from ropewalk.modules.rotary import RotaryEmbedding"),
        (f"{attention}.backends", f"def f():\n    from {attention}.hopper import launch"),
        (f"{attention}.hopper.launch", f"from {attention}.triton import launch_common"),
        (f"{rope}.cuda.load", "from ropewalk import device as gpu"),
    ):
        assert not breaks_layers(found(importer, source)), (importer, source)
    launch = f"from {attention}.triton.decode_launch import forward"
    assert loads_a_launcher(found(f"{attention}.hopper.launch", launch))
    assert not loads_a_launcher(found(f"{attention}.triton.launch", launch))
    names = "ropewalk.modules.masks", "ropewalk.modules.rotary"
    ahead, back = (found(a, f"def f():\n    import {b}") for a, b in (names, names[::-1]))
    assert find_circle([ahead]) is None
    assert find_circle([ahead, back]) == [*names, names[0]]
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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_files_speak_of_no_machine(path):
    assert not re.findall(r"(?<![\w.~])/(?:home|work|root|Users|tmp|mnt)/\S*", path.read_text())
