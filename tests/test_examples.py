"""The examples run, and print what they claim."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_rope_api(capsys):
    printed = run("rope_api.py", capsys)
    differences = [float(number) for number in re.findall(r"\d\.\d+e[+-]\d+", printed)]
    assert len(differences) == (8 if torch.cuda.is_available() else 7)
    assert max(differences) < 1e-4
    assert ("rope_triton: not run" in printed) == (not torch.cuda.is_available())


def test_attention_layer(capsys):
    printed = run("attention_layer.py", capsys)
    assert re.search(r"the first half's outputs changed by 0\.0e\+00", printed)
    assert "finite is True; rows that attend nothing: 0.0e+00 + bias" in printed
    errors = [float(error) for error in re.findall(r"mean squared error (\d+\.\d+)", printed)]
    assert len(errors) == 4
    assert errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_tested(path):
    assert f'"{path.name}"' in Path(__file__).read_text()
