"""Pictures of schemes and masks: their numbers are those of definitions, and the gallery's are those of the code."""

import math
import re
import xml.etree.ElementTree as ElementTree

import gallery as tool
import pytest
import torch

from ropewalk.experiments import gallery
from ropewalk.schemes import Alibi, ReRope, Rope, SelfExtend

T = 32
DISTANCE = torch.arange(T)[:, None] - torch.arange(T)
PAST = DISTANCE >= 0


def attended(name):
    call = gallery.arguments_of(gallery.PICTURES[name].call)
    matrix = gallery.measure(gallery.PICTURES[name].tokens, **call)
    assert matrix.name == "attended"
    return ~matrix.values.isnan()


def test_masks_are_those_of_their_definitions():
    m, n = torch.arange(T)[:, None], torch.arange(T)
    sequence = torch.bucketize(torch.arange(T), torch.tensor([8, 20]), right=True)
    expected = {
        "causal": PAST,
        "window": PAST & (DISTANCE < 8),
        "window-two-sided": (DISTANCE <= 8) & (DISTANCE >= -2),
        "prefix": (n <= m) | (n < 10),
        "padding": (n < 24).expand(T, T),
        "packed": PAST & (sequence[:, None] == sequence),
    }
    assert expected.keys() == gallery.MASKS.keys()
    for name, mask in expected.items():
        assert torch.equal(attended(name), mask), name


def test_sinks_are_a_window_and_the_first_keys():
    m, n = torch.arange(1024)[:, None], torch.arange(1024)
    assert torch.equal(attended("sinks"), (n <= m) & ((m - n < 256) | (n < 64)))


def test_biases_are_what_is_added():
    matrix = gallery.measure(T, head=1, heads=8, position=Alibi(), causal=True)
    assert matrix.name == "added to the score"
    expected = (-0.25 * DISTANCE.double()).masked_fill(~PAST, math.nan)
    torch.testing.assert_close(matrix.values, expected, equal_nan=True)


def test_rope_is_a_sum_of_cosines():
    matrix = gallery.measure(T, position=Rope())
    frequencies = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    expected = (DISTANCE[..., None] * frequencies).cos().mean(-1)
    assert matrix.name == "score of equal features"
    torch.testing.assert_close(matrix.values, expected, atol=1e-5, rtol=0)  # tables are float32


def relative(scheme):
    return gallery.read_relative(T, scheme).round(decimals=3)


def test_relative_positions_are_those_of_their_definitions():
    near, sign = DISTANCE.abs() < 8, DISTANCE.sign()
    m, n = torch.arange(T)[:, None] // 4, torch.arange(T) // 4
    far = {
        Rope(): DISTANCE.double(),
        ReRope(8): 8.0 * sign,
        ReRope(8, leak=3.0): sign * (8 + (DISTANCE.abs() - 8) / 3),
        SelfExtend(8, 4): m - n + sign * (8 - 8 // 4.0),
    }
    for scheme, positions in far.items():
        expected = torch.where(near, DISTANCE.double(), positions.double())
        torch.testing.assert_close(relative(scheme), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", [*gallery.PICTURES, gallery.RELATIVE])
def test_a_picture_of_the_page_is_that_of_the_code(name):
    text = tool.figure_path(name).read_text(encoding="utf-8")
    assert text == gallery.draw(name), "python tools/gallery.py draws it anew"
    assert "\n\n" not in text, "a blank line ends raw HTML in Markdown"
    root = ElementTree.fromstring(text)
    assert root.get("viewBox").startswith("0 0 360 ")
    assert root.get("fill") == "currentColor"
    texts = [element for element in root.iter() if element.tag.endswith("}text")]
    assert {element.get("fill") for element in texts} == {None}, "text has the page's colour, in light and in dark"
    assert min(float(element.get("font-size")) for element in texts) >= 9


def test_the_page_is_that_of_the_code():
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.write_page(page), "python tools/gallery.py writes it anew"
    assert re.findall(r"^`ropewalk draw (\S+)` draws this", page, re.MULTILINE) == list(gallery.PICTURES)


def test_no_picture_is_left_over():
    assert {path.name for path in tool.FIGURES.glob("gallery-*")} == {
        tool.figure_path(name).name for name in (*gallery.PICTURES, gallery.RELATIVE)
    }


def test_another_number_is_another_picture(monkeypatch):
    name = "rerope"
    monkeypatch.setitem(gallery.PICTURES, name, gallery.PICTURES[name]._replace(call="position=ReRope(9), causal=True"))
    assert gallery.draw(name) != tool.figure_path(name).read_text(encoding="utf-8")


def test_many_tokens_are_drawn_by_their_middle_pairs():
    text = gallery.draw("alibi", tokens=256)
    assert "keys, 0 to 255 →; a cell is 8 × 8" in text
    assert max(map(int, re.findall(r"M\d+ (\d+)\.5", text))) == 31


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ropes", {}, "name is 'ropes', but must be one of none, rope,"),
        ("causal", {"tokens": 64}, "the mask causal is of 32"),
        ("alibi", {"head": 4}, "head is 4, but must be from 0 to 3"),
        ("alibi", {"heads": 8}, "heads is 8, but must be 4 for alibi"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        gallery.draw(name, **options)
