"""The length extrapolation experiment, with a tiny model."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from ropewalk import ReRope, SelfExtend
from ropewalk.bench.core.records import read_lines
from ropewalk.cli import app
from ropewalk.experiments import length_extrapolation
from ropewalk.experiments.byte_model import ByteTransformer, ModelSize, train
from ropewalk.experiments.length_extrapolation import (
    KEY_NAME,
    cut_windows,
    draw_length_record,
    evaluate_at,
    losses_of,
    measure_passkey,
    plant_keys,
    run_length_extrapolation,
    schemes_at,
)

SIZES_AS_THEY_ARE = dict(length_extrapolation.SIZES)
SIZES = {"multiples": (1, 2, 4), "windows": 5, "keys": 3, "tokens_at_once": 100}
TINY = ModelSize(2, 32, 2, context=16, batch=4, steps=3, learning_rate=1e-2, **SIZES)
TEXT = b"All that a rope maker makes is rope, and rope again.\n" * 60
SCHEMES = [
    *("RoPE", "RoPE, interpolated", "RoPE, NTK", "RoPE, YaRN", "ReRoPE", "ReRoPE, log n", "leaky ReRoPE"),
    *("SelfExtend", "SelfExtend, log n"),
]


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
    counts, scored = Counter(TEXT[:2862]), TEXT[2862 + 57 : 2862 + 65]  # of the window that ends with the 65th byte
    assert run["unigram_loss"] == pytest.approx(-sum(math.log((counts[x] + 1) / (2862 + 256)) for x in scored) / 8)
    losses, keys = losses_of(rows), [row for row in rows if row.get("kind") == "passkey"]
    assert len(losses) + len(keys) == len(rows)
    assert [(row["scheme"], row["length"]) for row in losses] == [(s, n) for n in (16, 32, 64) for s in SCHEMES]
    expected = [(s, n, d) for n, at in ((32, (None, 17)), (64, (None, 24, 49))) for s in SCHEMES for d in at]
    assert [(row["scheme"], row["length"], row["distance"]) for row in keys] == expected  # 16 bytes have no room
    for row in losses:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert 3 < row["loss"] < 6  # a uniform guess has 5.5
        assert row["standard_error"] is None  # of one window
    assert [row["settings"]["factor"] for row in losses if row["scheme"] == "RoPE, NTK"] == [1, 2, 4]
    assert str(tmp_path) not in path.read_text()


def test_the_same_seed_gives_the_same_losses(tmp_path, text):
    losses = []
    for index, seed in enumerate((0, 0, 1)):
        path = tmp_path / f"{index}.jsonl"
        run_length_extrapolation(
            text=text, device="cpu", output=path, seed=seed, train_length=8, lengths=(24, 12), figure=tmp_path / "a.png"
        )
        rows = losses_of(read_lines(path, length_extrapolation.BENCHMARK)[1])
        assert [row["length"] for row in rows] == [12] * len(SCHEMES) + [24] * len(SCHEMES)
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1] != losses[2]
    assert (tmp_path / "a.png").exists()
    assert not path.with_suffix(".png").exists()


@pytest.mark.parametrize(("batch", "smoke"), [(1, True), (300, False)])
def test_losses_are_drawn_from_zero_and_a_small_training_is_called_smoke(batch, smoke, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **look: drawn.append(figure))
    run = {"format": 1, "benchmark": "length-extrapolation", "train_length": 16, "lengths": [16, 32], "batch": batch}
    run |= {"scored_bytes": 8, "text": "a text", "parameters": 1000, "device": "a device", "steps": 3000}
    row = {"scheme": "a", "settings": {}, "loss": 1.0, "standard_error": 0.1, "loss_all": 1.1}
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (run, *({**row, "length": n} for n in (16, 32)))))
    run, rows = read_lines(path, length_extrapolation.BENCHMARK)
    draw_length_record(run, rows, tmp_path / "figure.png")
    key = {"kind": "passkey", "scheme": "a", "settings": {}, "length": 32, "n_keys": 4, "digits_right": 0.5}
    more = [{**key, "distance": distance, "right": 0.25} for distance in (None, 17)]
    none = [{**row, "right": 0.0} for row in more]
    draw_length_record(run, [*rows, *none], tmp_path / "figure.png")
    draw_length_record(run | {"unigram_loss": 3.0}, [*rows, *more], tmp_path / "figure.png")
    without, not_found, figure = drawn
    assert len(not_found.axes) == 1, "the panel of keys would be empty"
    assert [axes.get_ylim() for axes in without.axes] == [(0, pytest.approx(1.05))]
    assert [axes.get_ylim() for axes in figure.axes] == [(0, pytest.approx(3.15)), (0, 102)]
    for figure in drawn:
        assert figure._suptitle.get_text().startswith("Smoke: no comparison. ") is smoke
        assert any(text.get_text() == "smoke: this shows nothing" for text in figure.texts) is smoke


def test_the_committed_record_is_drawn(tmp_path):
    path = Path(__file__).parents[2] / "results/length-extrapolation-h200.jsonl"
    draw_length_record(*read_lines(path, length_extrapolation.BENCHMARK), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


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


class Finds(nn.Module):
    """A model that looks for the key in the text, and writes it at the end; x, where it is not."""

    def __init__(self, first_digits=5):
        super().__init__()
        self.weight, self.first_digits = nn.Parameter(torch.zeros(1)), first_digits

    def forward(self, tokens, position):
        logits = torch.zeros(*tokens.shape, 256)
        for row, text in enumerate(tokens.tolist()):
            text = bytes(text)
            at, asked = text.find(KEY_NAME), text.rfind(KEY_NAME)
            key = text[at + len(KEY_NAME) :][: self.first_digits] if at < asked else b""
            for index, byte in enumerate(key.ljust(5, b"x")):
                logits[row, asked + len(KEY_NAME) - 1 + index, byte] = 1.0
        return logits


@pytest.mark.parametrize("length", [32, 33, 64, 500])
def test_who_finds_the_key_is_right_at_each_distance(length):
    windows = torch.randint(97, 123, (5, 600), dtype=torch.uint8)
    rows = measure_passkey(Finds(), TINY, windows, length, longest=500)
    greatest = length - 15  # the line starts the text: 11 bytes to its digits, and 4 from the asked ones to the end
    distances = sorted({max(17, round(greatest / 2)), greatest})
    assert [(row["scheme"], row["distance"]) for row in rows] == [(s, d) for s in SCHEMES for d in (None, *distances)]
    for row in rows:
        assert (row["length"], row["n_keys"]) == (length, 3)
        assert row["right"] == row["digits_right"] == (row["distance"] is not None)
    for row in measure_passkey(Finds(3), TINY, windows, length, longest=500):
        assert row["right"] == 0
        assert row["digits_right"] == pytest.approx(0.6 if row["distance"] else 0)
    assert measure_passkey(Finds(), TINY, windows, 31, longest=500) == []


def test_keys_are_stated_so_far_back_and_nothing_else_changes():
    windows = torch.randint(97, 123, (40, 101), dtype=torch.uint8)
    planted = plant_keys(windows, 60, seed=1)
    for before, text in zip(windows.tolist(), (bytes(row.tolist()) for row in planted), strict=True):
        key = text[-5:]
        assert key.isdigit()
        assert text[-16:-5] == b"\nPASSKEY = "
        assert text[96 - 60 : 96 - 55] == key
        assert text[96 - 71 : 96 - 54] == b"\nPASSKEY = " + key + b"\n"
        assert [a == b for a, b in zip(before, text, strict=True)].count(False) == 17 + 16
    assert len(planted[:, -5:].unique(dim=0)) == 40
    control = plant_keys(windows, None, seed=1)
    assert torch.equal(control[:, -16:], planted[:, -16:])
    assert torch.equal(control[:, :-16], windows[:, :-16])


@pytest.mark.slow
def test_compiled_blocks_learn_the_same(device):
    losses, tokens = [], torch.randint(256, (500,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for compiled in (False, True):
        torch.manual_seed(0)
        model = ByteTransformer(TINY).to(device)
        losses.append(train(model, tokens, dataclasses.replace(TINY, compiled=compiled), Console(quiet=True)))
        with torch.compiler.set_stance("force_eager"):
            assert measure_passkey(model, TINY, tokens[None, :101], 100, longest=100)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if device.type == "cpu" else 1e-2)


def test_the_long_preset_learns_ten_times_the_bytes():
    long, short = SIZES_AS_THEY_ARE["long"], SIZES_AS_THEY_ARE["cuda"]
    bytes_of = [size.steps * size.batch * size.context for size in (long, short)]
    assert bytes_of[0] == 10 * bytes_of[1]
    assert long.context * max(long.multiples) == 16384
    assert (long.n_layers, long.d_model, long.context) == (short.n_layers, short.d_model, short.context)


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
        (["--preset", "longer"], "preset is 'longer', but must be one of cpu, cuda, long"),
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
