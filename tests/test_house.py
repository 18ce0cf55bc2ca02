"""The rules of the house: few parameters, groups with names, one vocabulary, docstrings that begin well."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OPS = ROOT / "src/ropewalk/ops"
JITTED = re.compile(r"^@(triton|gluon)\.jit\b", re.MULTILINE)
KERNELS = [path for path in SOURCES if OPS in path.parents and JITTED.search(path.read_text(encoding="utf-8"))]
COMPILE = OPS / "launch"
LAUNCHERS = [path for path in SOURCES if COMPILE not in path.parents]
# Names change, and notes and the changelog tell of it.
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "notes" not in path.parts and path.name != "style.md"),
    *sorted((ROOT / "examples").rglob("*.*")),
    *SOURCES,
    *sorted((ROOT / "src").rglob("*.cu")),
]

TESTS = [
    path for folder in ("tests", "tools") for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)
]

# Files that read records on the host.
RECORDS = [OPS / "attention" / f"{name}.py" for name in ("api", "call", "operator", "backend", "backends", "pages")]

MAX_JITTED, MAX_HOST, MAX_FILES, MAX_README = 12, 19, 12, 130
# Their arguments are the public contract; a command's are the options that its help lists.
MANY_ARGUMENTS = re.compile(
    r"ops/(attention/(api\.py:\d+ attention|operator\.py:\d+ \w+)|rope/api\.py:\d+ apply_rope)\b|/cli/|"
    r"parallel/api\.py:\d+ context_parallel_attention\b"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_jitted(function: Function) -> bool:
    """Whether Triton or Gluon compiles a function."""
    return any(re.match(r"(triton|gluon)\.jit\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def is_entry(function: Function) -> bool:
    """Whether a jitted function is launched rather than called."""
    return is_jitted(function) and function.name.endswith("_kernel")


def count_parameters(function: Function) -> int:
    arguments = function.args
    more = [x for x in (arguments.vararg, arguments.kwarg) if x is not None]
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more])


# Rules over Python: each yields (line, what is wrong).


def long_jitted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Jitted functions with many parameters; entry kernels are launched by keyword instead."""
    for function in functions_of(tree):
        count = count_parameters(function)
        if count > MAX_JITTED and is_jitted(function) and not is_entry(function):
            yield function.lineno, f"{function.name} has {count} parameters, but at most {MAX_JITTED} are allowed"


def own_launches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Launches and compilations of kernels, which `Steps` and `Kernel` of ops/launch do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_launch = isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value).endswith("kernel")
            name = ast.unparse(node.func)
            if is_launch or name in ("triton.compile", "ASTSource") or name.endswith("kernel.warmup"):
                yield node.lineno, f"{name} compiles or launches, but launchers ask `on.launch` for it"
        elif isinstance(node, ast.Attribute) and node.attr == "packed_metadata":
            yield node.lineno, f"{ast.unparse(node)} is for a launch of its own"


def long_host(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions in Python with many parameters."""
    for function in functions_of(tree):
        count = count_parameters(function)
        if count > MAX_HOST and not is_jitted(function):
            yield function.lineno, f"{function.name} has {count} parameters, but at most {MAX_HOST} are allowed"


def numbered_fields(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Subscripts by an integer in jitted code, where a group has names; shapes and chunks of features are sequences."""
    for function in filter(is_jitted, functions_of(tree)):
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and re.fullmatch(r"-?\d+", ast.unparse(node.slice)):
                value = ast.unparse(node.value)
                if isinstance(node.value, ast.Name | ast.Attribute) and not value.endswith(("shape", "chunks")):
                    yield node.lineno, f"{ast.unparse(node)} in {function.name} has no name"


def _as_integer(node: ast.expr | None) -> int:
    """The absolute value of a number in the source; 0 for anything else."""
    text = "" if node is None else ast.unparse(node)
    return abs(int(text)) if re.fullmatch(r"-?\d+", text) else 0


def numbered_records(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Subscripts and slices by numbers above 1 on the host: a field in the middle of a record would move what follows.

    Shapes and strides are sequences.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not re.search(r"(shape|stride\(\))$", ast.unparse(node.value)):
            bounds = (node.slice.lower, node.slice.upper) if isinstance(node.slice, ast.Slice) else (node.slice,)
            if max(map(_as_integer, bounds)) > 1:
                yield node.lineno, f"{ast.unparse(node)} has no name"


def weak_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings whose first word is no verb and no noun."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if re.match(r"(What|Of|Which|How|Where)\b", text):
                yield getattr(node, "lineno", 1), f"a docstring begins with “{text.splitlines()[0][:40]}”"


WITHOUT_VERB = re.compile(r"\bmust( not)?( for\b|[^\w ]|$)")


def cut_requirements(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Errors that end with "must": a requirement has a verb."""
    for node in ast.walk(tree):
        texts = [x for x in ast.walk(node) if isinstance(x, ast.JoinedStr)] if isinstance(node, ast.Raise) else []
        parts = {part for text in texts for part in text.values}
        for text in ast.walk(node) if isinstance(node, ast.Raise) else ():
            if isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and text not in parts):
                shown = re.sub(r"{.*?}", "x", ast.unparse(text)).strip("f'\"")
                if WITHOUT_VERB.search(shown):
                    yield text.lineno, f"“{shown[-40:]}” lacks its verb"


# A part of an identifier of the kernels and their launchers, between underscores.
OLD_PARTS = re.compile("places?|turns?|walks?|apart|prepared|theirs|ours|serve[sd]?|movers|adder|cotangents")


def defined_names(tree: ast.AST, *, reads: bool = True) -> Iterator[tuple[int, str]]:
    """Names that a file defines or assigns, and the attributes that it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not reads and isinstance(node.ctx, ast.Load):
            continue
        name = {ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg", ast.Attribute: "attr"}.get(type(node))
        if name is None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = "id"
        if name is not None:
            yield node.lineno, getattr(node, name)


def old_parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Definitions with a part that has another name now."""
    for line, identifier in defined_names(tree):
        if any(map(OLD_PARTS.fullmatch, identifier.lower().split("_"))):
            yield line, f"{identifier} is an old name"


# Words that say that somebody made a thing, and not which thing it is.
VAGUE = re.compile(r"_*of_\w+|(\w+_|_*)(given|made|kept|twins?)(_\w+)?", re.IGNORECASE)


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Definitions by a word that no paper has; those of `FarRange` are in the schemas of operators, and stay."""
    records = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "FarRange"]
    in_schemas = {line for node in records for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    for line, identifier in defined_names(tree, reads=False):
        if VAGUE.fullmatch(identifier) and line not in in_schemas:
            yield line, f"{identifier} does not say which thing it is"


# Rules over text.

OLD_NAMES = (
    "score_functions|change_scores|changes_scores|score_parameters|learned_columns|ScoreFunctions|"
    "parameter_gradient|FarScheme|FarFeatures|Prepared|NOTHING_FAR|OVERRIDES|PAIRS|PARTS|TURNS|APART|PIN|"
    "EARLY|CHANGED|EDGES|CLOSE|UNSPECIALISED|VARYING|SPREAD|_MOST_AHEAD|turn_back|give_turn|await_turn|"
    "tokens_apart|take_number|locate_number|rows_kernel|finish_kernel|queries_kernel|keys_kernel|cache_kernel|"
    "gluon_passes|gluon_shim|place_table|come_to|await_others|await_tile|take_softmax|take_probabilities|"
    "saturate|grad_p|triton_sequences|measure_sequence|locate_tile|may_attend|are_pairs|steps_of|after_steps|"
    "clear_missing|begin_with|as_threads_have_it|change_keys|heads_together|rows_of_head|far_keys|_ask|"
    "first_key"
)
OLD_TEXT = re.compile(
    rf"(?<!\w)({OLD_NAMES})(?!\w)"
    r"|\btriton_cache\w*|gluon-deterministic|\bdocument 00\d"
    r"|\bropewalk[./](positions|position_scheme|far_positions)\b"
    r"|(?<!vllm )(?<!mkdocs )\b[Ss]erve[sd]?\b|\b[Dd]oors?\b"  # kernels run and support, integrations are integrations
)
# The beginning of a sentence that hides its subject; questions and titles may have it.
FIRST_WORD = re.compile(r"(?:^\s*(?:[-*] |\d+\. )?(?:\*\*)?|[.!?] )(What|Of|Which|How|Where|By) [^?]*$")
BY_NAME = re.compile(r'\b(impl|name) == "(triton|gluon|flash|sdpa|native)"')
ON_AMD = re.compile(r"torch\.version\.hip")
MODES = re.compile(r'environ\.get\("(TRITON_INTERPRET|ROPEWALK_TEST_DEVICE)"')
TEST_IMPORTS = re.compile(r"^(from|import) test_\w+")
CONTAINERS = re.compile(r"^class (Prepared|Request|Places|Numbers)\b")


def lines_with(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in pattern.finditer(line):
            yield number, f"“{found[0]}”"


def first_words(page: str) -> Iterator[tuple[int, str]]:
    """Sentences of Markdown that begin with a word that hides the subject; not in code, tables and titles."""
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not re.match(r"\s*[|#<]", line) and FIRST_WORD.search(line):
            yield number, f"“{line.strip()[:60]}”"


def too_long(text: str, limit: int) -> bool:
    return len(text.splitlines()) > limit


# The rules, and what they are for.

BY_TREE = {
    "jitted parameters": (long_jitted, SOURCES),
    "launches by steps": (own_launches, LAUNCHERS),
    "host parameters": (long_host, SOURCES),
    "fields by name": (numbered_fields, SOURCES),
    "records by name": (numbered_records, RECORDS),
    "first words": (weak_docstrings, SOURCES),
    "verbs of errors": (cut_requirements, SOURCES),
    "old parts of names": (old_parts, [path for path in SOURCES if OPS in path.parents]),
    # A kernel's text is in the key of its cached binary: its names change with its code.
    "names of things": (vague_names, [path for path in SOURCES if path not in KERNELS]),
}
BY_TEXT = {
    "old names": (OLD_TEXT, TEXTS),
    "backends by name": (BY_NAME, [path for path in SOURCES if OPS in path.parents]),
    "AMD by device": (ON_AMD, [path for path in SOURCES if OPS in path.parents]),
    "old containers": (CONTAINERS, SOURCES),
    "modes in one place": (MODES, [path for path in TESTS if path.name != "modes.py"]),
    "no test is imported": (TEST_IMPORTS, TESTS),
}


def describe(path: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line} {what}" for line, what in found]


def violations_of(rule: str) -> list[str]:
    """All that breaks a rule, one line each."""
    if rule in BY_TREE:
        check, paths = BY_TREE[rule]
        found = [describe(path, check(tree_of(path))) for path in paths]
    else:
        pattern, paths = BY_TEXT[rule]
        found = [describe(path, lines_with(pattern, path.read_text(encoding="utf-8"))) for path in paths]
    return [line for lines in found for line in lines if rule != "host parameters" or not MANY_ARGUMENTS.search(line)]


@pytest.mark.parametrize("rule", [*BY_TREE, *BY_TEXT])
def test_the_house_keeps_its_rules(rule):
    found = violations_of(rule)
    assert not found, "\n".join([f"{len(found)} violations of “{rule}”", *found])


def test_attention_has_few_files():
    assert len(list((OPS / "attention").glob("*.py"))) <= MAX_FILES


# Files of attention that may name a term of the scores.
TERMS = {"soft_?cap": 6, "sink": 10}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_scores_lives_in_few_files(term):
    found = [
        path for path in sorted((OPS / "attention").rglob("*.py")) if re.search(term, path.read_text("utf-8"), re.I)
    ]
    assert len(found) <= TERMS[term], f"{term} is in {', '.join(path.name for path in found)}"


def test_a_sentence_of_a_page_begins_with_its_subject():
    pages = [path for path in TEXTS if path.suffix == ".md"]
    assert len(pages) > 40
    found = [line for path in pages for line in describe(path, first_words(path.read_text(encoding="utf-8")))]
    assert not found, "\n".join(found)


def test_first_words_are_found():
    page = "# What is\n\n```\nOf\n```\n| Of | By |\nWhich one is it?\nIt is. {}\n- **{}**\n"
    assert not list(first_words(page.format("It runs.", "Kernels run.")))
    assert [line for line, _ in first_words(page.format("Of two it is one.", "By kernels."))] == [8, 9]


def test_no_two_files_of_tests_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted({*names})  # pytest imports them by that name


def test_the_readme_is_short_and_says_how_to_install():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not too_long(text, MAX_README)
    assert "$ pip install ." in text


# Each rule can fail.

THIRTEEN = ", ".join(f"x{i}" for i in range(13))
TWENTY = ", ".join(f"x{i}" for i in range(20))
BAD = {
    "jitted parameters": f"@triton.jit\ndef load({THIRTEEN}):\n    pass",
    "launches by steps": "forward_kernel[grid](q=q, BLOCK_M=64)",
    "host parameters": f"def prepare({TWENTY}):\n    pass",
    "fields by name": "@gluon.jit\ndef count(lengths):\n    return lengths[2]",
    "records by name": "masks = call[4:16]",
    "first words": 'def f():\n    """What it does."""',
    "verbs of errors": 'raise ValueError(f"{name} calls no function, but must")',
    "old parts of names": "def turn_keys(keys):\n    pass",
    "names of things": "def find(given, x):\n    pass",
    "old names": "the scheme's `change_scores`",
    "backends by name": 'if impl == "triton":',
    "AMD by device": "on_amd = torch.version.hip is not None",
    "old containers": "class Prepared(NamedTuple):",
    "modes in one place": 'ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"',
    "no test is imported": "from test_attention import draw",
}
GOOD = {
    "jitted parameters": f"@triton.jit(do_not_specialize=['x1'])\ndef forward_kernel({THIRTEEN}):\n    pass",
    "launches by steps": "on.launch(forward_kernel, n_programs, q=q, BLOCK_M=64)",
    "host parameters": f"def prepare({THIRTEEN}):\n    pass",
    "fields by name": "@triton.jit\ndef count(x, seqlens):\n    return x.shape[0] + seqlens.n_keys + x[:, None]",
    "records by name": "batch, first, rest = x.shape[:3], results[0], results[1:]",
    "first words": 'def f():\n    """Return which it is."""',
    "verbs of errors": 'raise ValueError(f"{name} calls no function, but must {verb} one" + f", but must not be {x}")',
    "old parts of names": "def replace(keys, returns):\n    pass",
    "names of things": "def find(bytes_of_q, forgiven):\n    return bytes_of_q.far.given",
    "old names": "It replaces an observed server, PINNED.",
    "backends by name": "if backend.name == chosen.name:",
    "AMD by device": "on_amd = gpu.is_rocm()",
    "old containers": "class Prepare(NamedTuple):",
    "modes in one place": "from helpers.modes import ON_GPU",
    "no test is imported": "from helpers.attention_calls import draw",
}


@pytest.mark.parametrize("rule", [*BY_TREE, *BY_TEXT])
def test_a_rule_can_fail_and_be_kept(rule):
    def found(source: str) -> list[tuple[int, str]]:
        if rule in BY_TREE:
            return list(BY_TREE[rule][0](ast.parse(source)))
        return list(lines_with(BY_TEXT[rule][0], source))

    assert len(found(BAD[rule])) == 1
    assert not found(GOOD[rule])


def test_texts_are_found():
    assert len(SOURCES) > 100
    assert len(KERNELS) > 30
    assert len(TEXTS) > len(SOURCES) + 20
    assert too_long("a\nb", 1)
    assert MANY_ARGUMENTS.search("src/ropewalk/ops/attention/api.py:80 attention has 30 parameters")
    assert not MANY_ARGUMENTS.search("src/ropewalk/ops/attention/api.py:80 attention_of has 30 parameters")
