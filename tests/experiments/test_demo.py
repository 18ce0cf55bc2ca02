"""The demo, and its parts."""

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ropewalk.cli import app
from ropewalk.experiments import byte_model, demo
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
    for name, _, ours, _ in checks:
        assert ours < (1e-5 if device.type == "cpu" else 1e-2), name
    assert checks[0][3] > 1e-3
    assert checks[1][2] < checks[1][3]


def test_packed_sequences_give_the_same(device):
    lengths, found, difference = demo.measure_packing(TINY, device, seed=0, max_seconds=0.0)
    assert lengths[0] == 16
    assert {name: tokens for name, (_, tokens, _) in found.items()} == {"padded": 64, "packed": sum(lengths)}
    assert difference < (1e-4 if device.type == "cpu" else 0.1)


@pytest.mark.parametrize("run", ["demo", "length-extrapolation"])
def test_the_gpu_that_is_named_becomes_the_current_one(run, monkeypatch):
    def stop(device):
        raise ValueError(f"current: {device}")

    monkeypatch.setattr(byte_model, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", stop)
    command = [run] if run == "demo" else ["experiment", run]
    result = CliRunner().invoke(app, [*command, "--device", "cuda:1"])
    assert result.stderr == "error: current: cuda:1\n"
