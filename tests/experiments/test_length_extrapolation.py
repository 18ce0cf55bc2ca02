"""The length extrapolation experiment, with a tiny model."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ropewalk import ReRope, SelfExtend
from ropewalk.bench.core.records import read_lines
from ropewalk.cli import app
from ropewalk.experiments import length_extrapolation
from ropewalk.experiments.byte_model import ModelSize
from ropewalk.experiments.length_extrapolation import (
    cut_windows,
    draw_length_record,
    evaluate_at,
    run_length_extrapolation,
    schemes_at,
)

SIZES = {"multiples": (1, 2, 4), "windows": 5, "tokens_at_once": 100}
TINY = ModelSize(2, 32, 2, context=16, batch=4, steps=3, learning_rate=1e-2, **SIZES)
TEXT = b"All that a rope maker makes is rope, and rope again.\n" * 60
SCHEMES = ["RoPE", "RoPE, NTK", "ReRoPE", "ReRoPE, log n", "leaky ReRoPE", "SelfExtend"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(length_extrapolation.SIZES, kind, TINY)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "rope.txt"
    path.write_bytes(TEXT)
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["experiment", "length-extrapolation", *map(str, arguments)])


def test_the_whole_experiment(tmp_path, text, device):
    path = tmp_path / "new" / "record.jsonl"
    result = invoke("--text", text, "--steps", 2, "--seed", 7, "--device", device, "-o", path)
    assert result.exit_code == 0, result.output
    for expected in ("step     2  loss", "leaky ReRoPE (window 8, leak 8)", "SelfExtend (window 8, group 8)", "64"):
        assert expected in result.stdout
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    run, rows = read_lines(path, length_extrapolation.BENCHMARK)
    expected = {
        "seed": 7,
        "text": "rope.txt",
        "training_bytes": 2862,
        "held_out_bytes": 318,
        "model": {"n_layers": 2, "d_model": 32, "n_heads": 2},
        "train_length": 16,
        "steps": 2,
        "dtype": "float32" if device.type == "cpu" else "bfloat16 autocast",
        "lengths": [16, 32, 64],
        "scored_bytes": 8,
        "windows": 1,
    }
    assert expected.items() <= run.items()
    assert 3 < run["training_loss"] < 6
    assert [(row["scheme"], row["length"]) for row in rows] == [(s, n) for n in (16, 32, 64) for s in SCHEMES]
    for row in rows:
        assert 3 < row["loss"] < 6  # a uniform guess has 5.5
        assert row["standard_error"] is None  # of one window
    assert [row["settings"]["factor"] for row in rows if row["scheme"] == "RoPE, NTK"] == [1, 2, 4]
    assert str(tmp_path) not in path.read_text()


def test_the_same_seed_gives_the_same_losses(tmp_path, text):
    losses = []
    for index, seed in enumerate((0, 0, 1)):
        path = tmp_path / f"{index}.jsonl"
        run_length_extrapolation(
            text=text, device="cpu", output=path, seed=seed, train_length=8, lengths=(24, 12), figure=tmp_path / "a.png"
        )
        _, rows = read_lines(path, length_extrapolation.BENCHMARK)
        assert [row["length"] for row in rows] == [12] * len(SCHEMES) + [24] * len(SCHEMES)
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1] != losses[2]
    assert (tmp_path / "a.png").exists()
    assert not path.with_suffix(".png").exists()


@pytest.mark.parametrize(("batch", "smoke"), [(1, True), (300, False)])
def test_a_small_training_is_called_smoke_and_has_no_zoom(batch, smoke, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **look: drawn.append((text, len(figure.axes))))
    run = {"format": 1, "benchmark": "length-extrapolation", "train_length": 16, "lengths": [16, 32], "batch": batch}
    run |= {"scored_bytes": 8, "text": "a text", "parameters": 1000, "device": "a device", "steps": 3000}
    row = {"scheme": "a", "settings": {}, "loss": 1.0, "standard_error": 0.1, "loss_all": 1.1}
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (run, *({**row, "length": n} for n in (16, 32)))))
    draw_length_record(*read_lines(path, length_extrapolation.BENCHMARK), tmp_path / "figure.png")
    ((title, n_panels),) = drawn
    assert title.startswith("Smoke: no comparison. ") is smoke
    assert n_panels == (1 if smoke else 2)


class Bigrams(nn.Module):
    """A model whose prediction depends on the last byte alone, so that its loss tells which bytes are scored."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(256, 256)

    def forward(self, tokens, position):
        return self.logits(tokens)


def test_the_same_bytes_are_scored_at_each_length():
    windows, model = torch.randint(256, (5, 65), dtype=torch.uint8), Bigrams()
    log_p = model.logits.weight.detach().log_softmax(-1).double()
    each = -log_p[windows[:, :-1].long(), windows[:, 1:].long()]
    last = each[:, -8:].mean(1)
    for length in (8, 16, 33, 64):
        rows = evaluate_at(model, TINY, windows, length=length, longest=64, scored=8)
        assert [row["scheme"] for row in rows] == SCHEMES
        for row in rows:
            assert row["loss"] == pytest.approx(float(last.mean()))
            assert row["loss_all"] == pytest.approx(float(each[:, -length:].mean()))
            assert row["standard_error"] == pytest.approx(float(last.var() / 5) ** 0.5)


def test_windows_lie_within_documents_and_score_no_byte_twice():
    documents = [torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate((1000, 99, 400, 5000))]
    windows = cut_windows(documents, 100, most=1000)
    assert (windows == windows[:, :1]).all()
    # A window ends at the 100th byte, and at every 256th after it.
    assert windows[:, 0].bincount().tolist() == [4, 0, 2, 20]
    assert cut_windows(documents, 100, most=13)[:, 0].bincount().tolist() == [2, 0, 1, 10]
    assert cut_windows([torch.arange(600)], 100, most=9)[:, -1].tolist() == [99, 355]


@pytest.mark.parametrize(("train_length", "longest"), [(512, 8192), (128, 512), (16, 1000), (4, 64), (100, 101)])
def test_relative_positions_stay_within_the_training_length(train_length, longest):
    found = schemes_at(longest, train_length=train_length, longest=longest, head_dim=16)
    schemes = {name: scheme for name, (scheme, _) in found.items()}
    window, distances = train_length // 2, torch.arange(longest)
    leak, group = schemes["leaky ReRoPE"].leak, schemes["SelfExtend"].group
    assert {scheme.window for scheme in schemes.values() if isinstance(scheme, (ReRope, SelfExtend))} == {window}
    leaked = torch.where(distances >= window, window + (distances - window) / leak, distances)
    assert leaked.max() <= train_length - 1
    grouped = 0
    for key in range(min(group, longest)):  # where in its group a key stands is all that matters
        queries = torch.arange(key + window, longest)
        grouped = max(grouped, int((queries // group - key // group + window - window // group).max()))
    assert window < grouped <= train_length - 1
    # A smaller whole number would not do.
    assert leak == group == 1 or window + (longest - 1 - window) / (leak - 1) > train_length - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "64,7"], "lengths has 7, but the last 8 bytes are scored: that is the least length"),
        (["--train-length", "3"], "train_length is 3, but must be at least 4"),
        (["--lengths", "318"], "the longest text that is held out has 318 bytes, but must have at least 319"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, text, options, message):
    path = tmp_path / "record.jsonl"
    result = invoke("--text", text, "--device", "cpu", "-o", path, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert not path.exists()
