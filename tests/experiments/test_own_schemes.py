"""Schemes of users, by “module:Name”."""

import sys

import pytest
import torch

pytest.importorskip("typer")

from ropewalk.experiments.own_schemes import make_scheme
from ropewalk.schemes import Alibi, Rope

SOURCE = """
from dataclasses import dataclass
import torch
from ropewalk import Alibi, PositionScheme, Rope

@dataclass(frozen=True, eq=False)
class Fall(PositionScheme):
    slope: float = 0.5

    def score_mod(self, scores, distance):
        return scores - self.slope * distance.abs()

ROPE = Rope(500.0)

def slopes(n_heads, power=1):
    return Alibi(torch.arange(1.0, n_heads + 1) ** power)

def nothing(n_heads):
    return None

class NoScheme:
    pass

@dataclass(frozen=True, eq=False)
class Needs(PositionScheme):
    slope: float

def two(n_heads, x):
    return ROPE

def fails(n_heads):
    raise RuntimeError("no\\nluck")

LAYER = torch.nn.Linear(2, 2)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder."""
    (tmp_path / "their_schemes.py").write_text(SOURCE)
    (tmp_path / "their_import.py").write_text("import no_such_package\n")
    (tmp_path / "their_syntax.py").write_text("def\n")
    (tmp_path / "their_fault.py").write_text("import math\nmath.no_such_function()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "their_schemes"
    for name in ("their_schemes", "their_import"):
        sys.modules.pop(name, None)


def test_a_class_a_scheme_and_a_function_make_schemes(module):
    assert make_scheme(f"{module}:Fall", 4).slope == 0.5
    assert make_scheme(f"{module}:Fall", 4, slope=2.0).slope == 2.0
    assert isinstance(make_scheme(f"{module}:ROPE", 4), Rope)
    found = make_scheme(f"{module}:slopes", 3, power=2)
    assert isinstance(found, Alibi)
    assert torch.equal(found.slopes, torch.tensor([1.0, 4.0, 9.0]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_schemes", "but must be module:Name"),
        ("../their_schemes:Fall", "is '../their_schemes:Fall', but must be module:Name"),
        (".their_schemes:Fall", "but must be module:Name"),
        ("their_schemes:", "but must be module:Name"),
        ("their_syntax:Fall", "module 'their_syntax' cannot be imported: SyntaxError"),
        ("their_fault:Fall", "module 'their_fault' cannot be imported: AttributeError"),
        (
            "their_schemes:Needs",
            r"is the class Needs, and a call of it with \(\) raised TypeError: .*'slope'; it must be a Pos",
        ),
        ("their_schemes:two", r"is a function, and a call of it with \(4\) raised TypeError: .*'x'; it must be a Pos"),
        ("their_schemes:fails", r"raised RuntimeError: no luck; it must be a PositionScheme"),
        ("their_schemes:LAYER", r"is a Linear, and a call of it with \(4\) raised TypeError"),
        ("their_schemes:PositionScheme", "PositionScheme defines neither rotation nor score_mod"),
        ("no_such_module:Fall", "there is no module 'no_such_module' here or among packages"),
        ("their_schemes:Rise", "module 'their_schemes' has no 'Rise'"),
        ("their_schemes:nothing", "is, or returns, NoneType, but must be a PositionScheme"),
        ("their_schemes:NoScheme", "is, or returns, NoScheme, but must be a PositionScheme"),
    ],
)
@pytest.mark.usefixtures("module")
def test_what_is_no_scheme_is_named(name, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_scheme(name, 4)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("module")
def test_a_package_that_their_module_lacks_is_named_itself():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        make_scheme("their_import:Fall", 4)
