"""Pictures of schemes and masks: their numbers are those of definitions, and the gallery's are those of the code."""

import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import gallery as tool
import pytest
import torch

from ropewalk.experiments import gallery
from ropewalk.schemes import Alibi, PositionScheme, ReRope, Rope, SelfExtend

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


@pytest.mark.parametrize("slope", [40.0, 1e5])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_whose_probability_underflows_are_read(slope, causal):
    call = {"position": Alibi(torch.full((4,), slope)), "causal": causal}
    expected = -slope * DISTANCE.abs().double()
    expected = expected.masked_fill(~PAST, math.nan) if causal else expected
    for cells in (slice(None), slice(2, None, 8)):
        values = gallery.measure(T, cells=cells, **call).values
        torch.testing.assert_close(values, expected[cells, cells], equal_nan=True)


def test_attended_is_the_masks_alone():
    assert "not attended" not in gallery.draw(f"{__name__}:Steep")
    assert "not attended" in gallery.draw(f"{__name__}:Own")
    mask = torch.eye(T, dtype=torch.bool) | (torch.arange(T) == 0)
    values = gallery.measure(T, position=Alibi(torch.full((4,), 400.0)), mask=mask).values
    assert torch.equal(~values.isnan(), mask)


class Own(PositionScheme):
    """A scheme whose far scores are a number."""

    far = -math.inf

    def score_mod(self, scores, distance):
        return scores.masked_fill(distance.abs() > 4, self.far) - 900 * distance.abs()


class Steep(Own):
    far = -1e6


class Nan(Own):
    far = math.nan


class Infinite(Own):
    far = math.inf


class FourHeads(Own):
    def score_mod(self, scores, distance):
        return scores + torch.ones(4)[:, None, None]


class Odd(Own):
    pass


setattr(sys.modules[__name__], 'a<"&\x01 b', Odd)


def test_a_scheme_may_hide_pairs_itself():
    values = gallery.measure(T, position=Own()).values
    expected = (-900.0 * DISTANCE.abs()).double().masked_fill(DISTANCE.abs() > 4, math.nan)
    torch.testing.assert_close(values, expected, equal_nan=True)


@pytest.mark.parametrize(("name", "said"), [("Nan", "hold NaN or infinity"), ("Infinite", "hold NaN or infinity")])
def test_scores_that_are_no_numbers_are_an_error(name, said):
    with pytest.raises(ValueError, match=f"{__name__}:{name} cannot be drawn with 4 heads and 32 tokens: .*{said}"):
        gallery.draw(f"{__name__}:{name}")


def test_what_a_scheme_raises_is_one_line():
    with pytest.raises(ValueError, match=r":FourHeads cannot be drawn with 8 heads .*raised") as raised:
        gallery.draw(f"{__name__}:FourHeads", heads=8)
    assert "\n" not in str(raised.value)


def test_any_name_is_escaped():
    root = ElementTree.fromstring(gallery.draw(f'{__name__}:a<"&\x01 b'))
    assert root[0].text == 'a<"&\ufffd b'
    ids = root.get("aria-labelledby").split(" ")
    assert ids == [root[0].get("id"), root[1].get("id")]


def test_a_description_follows_the_options():
    def described(name, **options):
        return ElementTree.fromstring(gallery.draw(name, **options))[1].text

    assert described("alibi").endswith("this is the first of four heads.")
    changed = described("alibi", head=1, causal=True, window=4)
    assert changed.endswith("at a slope for each head. Drawn with head=1, causal=True, window=4.")


@pytest.mark.parametrize("name", [gallery.RELATIVE, *gallery.MASKS, *gallery.BLOCKS])
@pytest.mark.parametrize("options", [{"head": 1}, {"heads": 2}, {"tokens": 64}, {"causal": True}, {"window": 4}])
def test_options_that_a_picture_does_not_take_are_refused(name, options):
    (key, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{key} is {value}, but must be left out: {name} "):
        gallery.draw(name, **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["alibi", "--window", "1180591620717411303424"], "window is 1180591620717411303424, but must be from 1 to"),
        (["alibi", "--tokens", "1000000"], "tokens is 1000000, but must be from 1 to 4096"),
        ([f"{__name__}:Own", "--heads", "1000000"], "heads is 1000000, but must be from 1 to 128"),
        ([f"{__name__}:Own", "--heads", "128", "--tokens", "4096"], "tokens is 4096, but must be from 1 to 724"),
        (["ropewalk:T5Bias"], "ropewalk:T5Bias is the class T5Bias, and a call of it with () raised TypeError"),
        (["rope", "-o", ".svg"], "output is .svg, but must have a name before .svg"),
        (["rope", "-o", "a.png"], "output is a.png, but must end in .svg"),
    ],
)
def test_wrong_options_are_one_line(arguments, said, tmp_path, monkeypatch):
    typer = pytest.importorskip("typer.testing")
    from ropewalk.cli import app

    monkeypatch.chdir(tmp_path)
    result = typer.CliRunner().invoke(app, ["draw", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


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
        ("causal", {"tokens": 64}, "tokens is 64, but must be left out: causal is"),
        ("alibi", {"head": 4}, "head is 4, but must be from 0 to 3"),
        ("alibi", {"heads": 8}, "heads is 8, but must be 4 for alibi"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        gallery.draw(name, **options)
