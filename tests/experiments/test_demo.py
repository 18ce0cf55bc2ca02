"""The demo, and its parts."""

import math

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from ropewalk.cli import app
from ropewalk.experiments import demo
from ropewalk.experiments.byte_model import ByteTransformer, ModelSize, train

TINY = ModelSize(2, 64, 1, context=16, batch=4, steps=3, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(demo.SIZES, kind, TINY)
        monkeypatch.setitem(demo.PACKED_SIZES, kind, TINY)


def test_the_demo(tmp_path, device):
    figure = tmp_path / "new" / "demo.png"
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--device", str(device), "--figure", str(figure)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    for expected in ("step 3 loss", "Held-out loss", "It writes:", "Errors against float64", "compute no padding"):
        assert expected in said
    assert ("for correctness, not speed" in said) is (device.type == "cpu")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_text_that_is_too_short_is_one_line(tmp_path):
    (tmp_path / "a").write_text("too short")
    result = CliRunner().invoke(app, ["demo", "--text", str(tmp_path / "a"), "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stderr == "error: the text has 9 bytes, but must have at least 170\n"


def test_training_ends_after_its_seconds_and_learns(device):
    console = Console(quiet=True)
    model, text = ByteTransformer(TINY).to(device), torch.arange(64).repeat(20) % 7
    losses = train(model, text, ModelSize(2, 64, 1, context=16, batch=4, steps=60, learning_rate=1e-2), console)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2
    assert len(train(model, text, TINY, console, max_seconds=1e-9)) <= 1


def test_errors_are_small_and_those_of_plain_pytorch_are_not_smaller(device):
    checks = [*demo.check_rotation(device, 0), *demo.check_attention(device, 0)]
    assert len(checks) == 5
    for check in checks:
        assert check.ours < 1e-5 if device.type == "cpu" else check.ours < 1e-2, check
    assert checks[0].plain > 1e-3
    assert checks[1].ours < checks[1].plain


def test_packed_sequences_give_the_same(device):
    packing = demo.measure_packing(TINY, device, seed=0, max_seconds=0.0)
    assert packing.lengths[0] == 16
    assert packing.padded_tokens == 64
    assert set(packing.rates) == {"padded", "packed"}
    assert packing.difference < (1e-4 if device.type == "cpu" else 0.1)


def test_parts_of_the_text():
    training, held_out = demo.split(demo.read_text(None), 16)
    assert len(held_out) == math.ceil(0.1 * (len(training) + len(held_out)))
    assert demo.byte_entropy(torch.tensor([1, 1, 2, 2])) == pytest.approx(math.log(2))
    text = torch.tensor(list(b"  code\nOne line of prose that is long.\n"))
    assert demo.as_line(demo.opening(text)) == "One line of"


def test_it_writes_by_a_seed():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(256))

        def forward(self, tokens):
            return self.logits.expand(*tokens.shape, 256)

    first, again, other = (demo.generate(Fixed(), torch.tensor([1]), 9, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
