"""Figures and tables say what the record says, and need nothing else."""

import io
import itertools
import re

import pytest
from rich.console import Console

from ropewalk.experiments.bert_positions import figures
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.figures import bert_tables, draw_learning, draw_speed, markdown_tables
from ropewalk.experiments.bert_positions.record import (
    HUGGING_FACE,
    EvaluationRow,
    ExpoSBRow,
    SpeedRow,
    TrainingRow,
    read_bert_record,
    write_bert_record,
)

pytest.importorskip("matplotlib")

SCHEMES = ("rope", "standard")  # not in the order of the tables
STEPS = list(range(10, 1010, 10))


def loss_of(scheme, seed, length):
    return 2.0 + 0.5 * (scheme == "standard") + 0.1 * seed + length / 100


def make_record(path, seeds=(0, 2), peak=1 << 30, out_of_memory=False):
    rows = []
    for scheme, seed in itertools.product(SCHEMES, seeds):
        losses = [loss_of(scheme, seed, 0) + (9.0 if step < 30 else 0.0) for step in STEPS]
        rows.append(TrainingRow(scheme, seed, STEPS, losses, 1e5 + 1e4 * seed, 10.0 + seed, 123456))
        for length in (128, 32):
            rows.append(EvaluationRow(scheme, seed, length, loss_of(scheme, seed, length), 0.5 - length / 1000, 99))
    models = [("rope", "ropewalk", 2.0), ("standard", "ropewalk", 1.5), (HUGGING_FACE, "sdpa", 1.0)]
    for length, (model, attention, fast) in itertools.product((32, 128), [*models, (HUGGING_FACE, "eager", 0.5)]):
        speed = fast * 1e6 / (length / 32)
        numbers = (speed, (2.0, 4.0, 5.0), peak and peak * length // 32)
        fails = out_of_memory and attention == "eager"
        rows.append(SpeedRow(model, attention, length, 4096 // length, *((None,) * 3 if fails else numbers)))
    rows.append(ExpoSBRow("A claim | with a bar", {"a number": 1.5}, "in part", "It was 1.50."))
    run = {
        "benchmark": "bert-positions",
        "date": "2026-01-02T03:04:05+00:00",
        "device": "a device",
        "torch": "2.99",
        "ropewalk": "0.1.0",
        "peers": {"transformers": "5.99"},
        "config": Config(seeds=seeds, schemes=SCHEMES, steps=1000).as_dict(),
        "corpus": {"name": "a text"},
    }
    write_bert_record(path, run, rows)
    return read_bert_record(path)


@pytest.fixture
def record(tmp_path):
    return make_record(tmp_path / "record.jsonl")


@pytest.fixture
def drawn(monkeypatch):
    """The drawn figures, instead of a file."""
    found = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: found.append(figure))
    return found


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize("seeds", [(0, 2), (5,)])
def test_figures_are_files(tmp_path, seeds):
    record = make_record(tmp_path / "record.jsonl", seeds)
    for draw in (draw_learning, draw_speed):
        path = tmp_path / "new" / f"{draw.__name__}.png"
        draw(record, path)
        width, height = size_of(path)
        assert width == 1320
        assert height > 600


def curves(axes):
    """The lines of a panel that go through more points than markers do: x and y by colour."""
    long = [line for line in axes.lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 2]
    return {line.get_color(): (list(line.get_xdata()), list(line.get_ydata())) for line in long}


def test_the_curves_are_means_over_seeds(record, drawn):
    draw_learning(record, None)
    training, end, *_ = drawn[0].axes
    for axes in (training, end):
        by_colour = curves(axes)
        assert list(by_colour) == [figures._STYLES[scheme].colour for scheme in ("standard", "rope")]
        for scheme, (x, y) in zip(("standard", "rope"), by_colour.values(), strict=True):
            assert x == STEPS
            assert y[50:] == pytest.approx([loss_of(scheme, 1, 0)] * 50)  # of seeds 0 and 2
            assert y[0] > loss_of(scheme, 1, 0) + 3
        bands = [band.get_paths()[0].get_extents() for band in axes.collections]
        assert [band.y0 for band in bands] == pytest.approx([2.5, 2.0])
        assert 1.6 < axes.get_ylim()[0] < 2.0
    assert training.get_xlim()[0] < 10
    assert training.get_ylim()[1] > 5
    assert end.get_xlim()[0] == pytest.approx(600)
    assert 2.7 < end.get_ylim()[1] < 2.8


def test_curves_are_smoothed_a_little():
    assert figures._smooth([1.0, 2.0, 6.0]) == [1.0, 2.0, 6.0]
    smooth = figures._smooth([0.0] * 50 + [5.0] + [0.0] * 49)
    assert smooth == [0.0] * 48 + [1.0] * 5 + [0.0] * 47
    assert figures._smooth([float(n) for n in range(100)])[50] == 50
    assert figures._smooth([float(n) for n in range(100)])[99] == 98


def test_losses_and_accuracies_are_drawn_against_length(record, drawn):
    draw_learning(record, None)
    _, _, loss, accuracy = drawn[0].axes
    points = {container.get_label(): container for container in loss.containers}
    assert list(points) == ["Standard (learned)", "RoPE"]
    line, _, (bars,) = points["RoPE"].lines
    assert list(line.get_xdata()) == [32, 128]
    assert list(line.get_ydata()) == pytest.approx([loss_of("rope", 1, 32), loss_of("rope", 1, 128)])
    low, high = bars.get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(0.2 / 2**0.5)  # the standard deviation of two seeds 0.2 apart
    line, *_ = accuracy.containers[0].lines
    assert list(line.get_ydata()) == pytest.approx([46.8, 37.2])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["Standard (learned)", "RoPE"]
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["32", "128"]


def bars_of(axes):
    return [patch.get_width() for patch in axes.patches], [text.get_text() for text in axes.texts]


def test_speed_and_memory_are_bars(record, drawn):
    draw_speed(record, None)
    speed, memory = drawn[0].axes
    models = ["RoPE", "Standard (learned)", "Hugging Face, sdpa", "Hugging Face, eager"]
    assert [tick.get_text() for tick in speed.get_yticklabels()] == models
    widths, texts = bars_of(speed)
    assert widths == [2e6, 1.5e6, 1e6, 5e5, 5e5, 3.75e5, 2.5e5, 1.25e5]
    assert texts[:5] == ["2.00M at 32", "1.50M at 32", "1.00M at 32", "500k at 32", "500k at 128"]
    assert bars_of(memory) == ([1.0] * 4 + [4.0] * 4, ["1 at 32"] * 4 + ["4 at 128"] * 4)
    places = [patch.get_y() + patch.get_height() / 2 for patch in speed.patches]
    assert places == pytest.approx([-0.2, 0.8, 1.8, 2.8, 0.2, 1.2, 2.2, 3.2])


def test_what_ran_out_of_memory_has_no_bar(tmp_path, drawn):
    draw_speed(make_record(tmp_path / "record.jsonl", out_of_memory=True), None)
    for axes in drawn[0].axes:
        widths, texts = bars_of(axes)
        assert len(widths) == 6
        assert [n for n, text in enumerate(texts) if text == "out of memory"] == [3, 7]


def test_on_a_cpu_there_is_no_memory_to_draw(tmp_path, drawn):
    draw_speed(make_record(tmp_path / "record.jsonl", peak=None), None)
    (speed,) = drawn[0].axes
    assert len(speed.patches) == 8


def test_schemes_are_told_apart_without_colours():
    looks = [(style.marker, style.line) for style in figures._STYLES.values()]
    assert len({marker for marker, _ in looks}) == len(looks) == 6
    assert len({style.colour for style in figures._STYLES.values()}) == 6
    assert set(figures._STYLES) == set(Config().schemes)


EXPECTED = """\
# BERT of 2 layers × 64, trained at length 32 on a text, 1000 steps of 32 windows, 2 seeds, a device

Ropewalk 0.1.0, PyTorch 2.99, transformers 5.99; 2026-01-02T03:04:05+00:00.

## Loss

Nats per masked token of held-out text; mean ± standard deviation over seeds.

| scheme | 32 (1×) | 128 (4×) |
| :--- | ---: | ---: |
| Standard (learned) | 2.920 ± 0.141 | 3.880 ± 0.141 |
| RoPE | 2.420 ± 0.141 | 3.380 ± 0.141 |

## Accuracy

Masked tokens guessed right, in %; mean ± standard deviation over seeds.

| scheme | 32 (1×) | 128 (4×) |
| :--- | ---: | ---: |
| Standard (learned) | 46.80 ± 0.00 | 37.20 ± 0.00 |
| RoPE | 46.80 ± 0.00 | 37.20 ± 0.00 |

## Training

As it was run, tokens without padding; mean ± standard deviation over seeds.

| scheme | loss at the end | thousand tokens/s | seconds | parameters |
| :--- | ---: | ---: | ---: | ---: |
| Standard (learned) | 2.600 ± 0.141 | 110.0 ± 14.1 | 11.0 ± 1.4 | 123,456 |
| RoPE | 2.100 ± 0.141 | 110.0 ± 14.1 | 11.0 ± 1.4 | 123,456 |
"""
SPEED = """\
 at 128 | × sdpa | × eager | peak at 128 |
| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| RoPE | ropewalk | 2.00M (1.60M–4.00M) | 2.00 | 4.00 | 1,024 MiB | 500k (400k–1.00M) | 2.00 | 4.00 | 4,096 MiB |
"""
EXPOSB = """
| claim | verdict | what was measured |
| :--- | :--- | :--- |
| A claim \\| with a bar | in part | It was 1.50. |
"""


def test_the_tables_as_markdown(record):
    text = markdown_tables(record)
    assert text.startswith(EXPECTED)
    assert SPEED in text
    assert text.endswith(EXPOSB)


def test_the_tables_of_one_seed_have_no_spread(tmp_path):
    text = markdown_tables(make_record(tmp_path / "record.jsonl", (5,), peak=None, out_of_memory=True))
    assert "| RoPE | 2.820 | 3.780 |" in text
    assert "±" not in text
    assert "held-out text; of one seed." in text
    assert "1 seed, a device" in text
    assert f"| {HUGGING_FACE} | eager | out of memory | – | – | – | out of memory | – | – | – |" in text
    assert "| RoPE | ropewalk | 2.00M (1.60M–4.00M) | 2.00 | – | – |" in text


def test_the_tables_on_the_console(record):
    console = Console(file=io.StringIO(), width=160)
    tables = bert_tables(record)
    assert [table.title for table in tables] == ["Loss", "Accuracy", "Training", "Speed", "ExpoSB"]
    for table in tables:
        console.print(table)
    text = console.file.getvalue()
    for cells in (["RoPE", r"2\.420 ± 0\.141", r"3\.380 ± 0\.141"], [r"A claim \| with a bar", "in part"]):
        assert re.search(r" +│ +".join(cells), text)
    assert "…" not in text  # nothing was cut off


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "1.5"), (999.4, "999"), (999.6, "1.00k"), (12345, "12.3k"), (123456, "123k"), (999600, "1.00M"), (0, "0")],
)
def test_numbers_are_short(value, text):
    assert figures._short(value) == text


def test_a_smoke_run_says_that_it_compares_nothing(tmp_path):
    record = make_record(tmp_path / "record.jsonl")
    assert not figures._title(record).startswith("Smoke")
    record.run["config"]["steps"] = Config().steps
    assert figures._title(record).startswith("Smoke: no comparison. BERT of")
    record.run["device"] = "CPU x86_64"
    assert figures._title(record).endswith("(on a CPU: for correctness, not speed)")
