"""Pictures of schemes and masks: who attends whom, and what a scheme makes of the scores.

Every number of a picture is read off `attention` itself. Its values are unit vectors, so that its output is the
probabilities; their logarithm plus the log-sum-exp is the score of a pair. A probability that is too small for its
number is read in another call, whose mask leaves the pairs out that have been read. The mask hides the pairs whose
probability is 0 without a scheme and with queries of zeros, by which all other pairs of a row are alike.

Shape letters: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor

import ropewalk
from ropewalk.experiments.own_schemes import make_scheme, say
from ropewalk.ops.attention.api import attention
from ropewalk.schemes import NoPosition, PositionScheme, ReRope, Rope, SelfExtend, TwoRangeScheme

HEADS, HEAD_DIM = 4, 64  # of all pictures, but those of other schemes
TOKENS, LONG = 32, 1024  # of a picture, and of one of blocks
RELATIVE = "relative-positions"  # the picture of several schemes
MOST_HEADS, MOST_TOKENS = 128, 4096
_MOST_SCORES = HEADS * MOST_TOKENS**2  # of all heads: more take gigabytes
_LEAST = 1e-290  # of probabilities, as smaller ones lose digits


class Picture(NamedTuple):
    """A picture of the gallery, by the arguments of its call."""

    title: str
    sentence: str
    call: str  # as the page of the gallery shows it
    tokens: int = TOKENS


_TABLE = "torch.linspace(-1, 1, 32)[:, None].expand(32, 4)"
SCHEMES = {
    "none": Picture("No positions", "All pairs of equal features have the same score.", "position=NoPosition()"),
    "rope": Picture(
        "RoPE",
        "The score of equal features depends on the distance alone: a sum of cosines, one for each pair of features.",
        "position=Rope()",
    ),
    "alibi": Picture(
        "ALiBi",
        "Scores fall in proportion to the distance, at a slope for each head; this is the first of four heads.",
        "position=Alibi(), causal=True",
    ),
    "t5": Picture(
        "T5's bias",
        "Pairs in one bucket of distances share a learned number; here it rises with the number of the bucket.",
        f"position=T5Bias({_TABLE})",
    ),
    "exposb": Picture(
        "ExpoSB, with its decay",
        "It rotates, scales features by position and lowers scores with the distance.",
        "position=ExpoSB(distance_decay=True)",
    ),
    "rerope": Picture(
        "ReRoPE",
        "Within the window a pair has its own relative position; beyond it every pair has the window's.",
        "position=ReRope(8), causal=True",
    ),
    "leaky-rerope": Picture(
        "Leaky ReRoPE",
        "Beyond the window relative positions grow by a part of the distance, here a third.",
        "position=ReRope(8, leak=3.0), causal=True",
    ),
    "self-extend": Picture(
        "Self-Extend",
        "Beyond the window positions count in groups of tokens, here four.",
        "position=SelfExtend(8, 4), causal=True",
    ),
}
MASKS = {
    "causal": Picture("Causal", "No query attends a later key.", "causal=True"),
    "window": Picture(
        "Sliding window", "A query attends the last keys alone, its own among them.", "causal=True, window=8"
    ),
    "window-two-sided": Picture(
        "Window with two sides", "A query attends its own key, eight before it and two after it.", "window=(8, 2)"
    ),
    "prefix": Picture(
        "Prefix",
        "All queries attend the prefix, and what follows it is causal: `mask` takes any pairs.",
        "mask=torch.ones(32, 32).tril().bool() | (torch.arange(32) < 10)",
    ),
    "padding": Picture(
        "Padding",
        "Keys from a row's length on are never read.",
        "key_lengths=torch.tensor([24])",
    ),
    "packed": Picture(
        "Packed sequences",
        "Bounds cut one row of tokens into sequences, each of which attends itself alone.",
        'causal=True, cu_seqlens_q=torch.tensor([0, 8, 20, 32]), layout="thd"',
    ),
}
BLOCKS = {
    "sinks": Picture(
        "Attention sinks",
        "A window, and the first keys beside it, in blocks: StreamingLLM's mask.",
        "blocks=BlockLists.sliding_window(1024, window=256, n_sinks=64, block_q=64, block_k=64)",
        LONG,
    ),
    "frames": Picture(
        "Frames of video",
        "A frame attends itself, two frames behind it and none ahead.",
        "blocks=BlockLists.frames(1024, tokens_per_frame=128, behind=2, block_q=64, block_k=64)",
        LONG,
    ),
    "dilated": Picture(
        "Dilated blocks",
        "A block attends blocks at multiples of a distance.",
        "causal=True, blocks=BlockLists.dilated(1024, n_blocks=4, dilation=3, block_q=64, block_k=64)",
        LONG,
    ),
    "big-bird": Picture(
        "BigBird",
        "A window, global blocks and random blocks, by a seed.",
        "blocks=BlockLists.big_bird(1024, n_random=2, block_q=64, block_k=64)",
        LONG,
    ),
}
PICTURES = SCHEMES | MASKS | BLOCKS
# The schemes of the figure of relative positions: name, scheme, colour, dashes.
_WINDOW = 12
_CURVES: tuple[tuple[str, PositionScheme, str, str], ...] = (
    ("RoPE", Rope(), "#4c8bf5", ""),
    ("leaky ReRoPE", ReRope(_WINDOW, leak=3.0), "#e8912d", "6 2"),
    ("Self-Extend", SelfExtend(_WINDOW, 6), "#3a9d5d", ""),
    ("ReRoPE", ReRope(_WINDOW), "#b06fd8", "2 2"),
)


def arguments_of(call: str) -> dict[str, Any]:
    """Evaluate the arguments of a picture's call, which are this module's own text."""
    names = {name: getattr(ropewalk, name) for name in ropewalk.__all__ if f"{name}(" in call or f"{name}." in call}
    arguments: dict[str, Any] = eval(f"dict({call})", {"torch": torch, **names})
    return arguments


def read_scores(q: Tensor, k: Tensor, cells: slice = slice(None), **call: Any) -> Tensor:
    """Return the scores by which q (T, H, D) attends k, (H, T, T), float64, −∞ where a pair is hidden.

    `cells` are the queries and the keys of the scores that are returned. ValueError if a score is NaN or +∞.
    """
    tokens, heads, _ = q.shape
    unread = _attend(torch.zeros_like(q), k, cells, call | {"position": NoPosition()})[0] > 0
    scores, mask = torch.full(unread.shape, -math.inf, dtype=torch.float64), call.get("mask")
    while True:
        probabilities, lse = _attend(q, k, cells, call)
        if not bool(probabilities.isfinite().all() and (lse < math.inf).all()):
            raise ValueError("its scores hold NaN or infinity, but must be finite, or −∞ where it hides a pair")
        seen = unread & (probabilities > _LEAST)
        scores = torch.where(seen, probabilities.log() + lse, scores)
        before, unread = unread, unread & ~seen & (lse > -math.inf)  # a row of −∞ alone has no more to read
        if not bool(unread.any()):
            return scores[:, cells]
        if "mask" in call and call["mask"] is not mask and torch.equal(before, unread):  # of sinks, or of dropout
            raise ValueError("its scores are too low to be read beside what else takes probability")
        left = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
        left[:, :, cells] = unread
        call["mask"] = left[None] if mask is None else left[None] & mask


def _attend(q: Tensor, k: Tensor, cells: slice, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the probabilities of some keys, (H, T, cells), and the log-sum-exp, (H, T, 1), of a call."""
    tokens, heads, _ = q.shape
    v = torch.eye(tokens, dtype=torch.float64)[:, None, cells].expand(-1, heads, -1)
    if call.get("layout") != "thd":
        q, k, v = q[None], k[None], v[None]
    out, lse = attention(q, k, v, return_lse=True, impl="reference", **call)
    return (out if out.ndim == 3 else out[0]).transpose(0, 1), lse.view(heads, tokens, 1)


def read_equal(tokens: int, heads: int, score: float, cells: slice = slice(None), **call: Any) -> Tensor:
    """Return the scores where all features are equal, and each pair would score so without positions."""
    features = torch.ones(tokens, heads, HEAD_DIM, dtype=torch.float64)
    return read_scores(features, features * score, cells, scale=1 / HEAD_DIM, **call)


def read_relative(tokens: int, scheme: Rope | TwoRangeScheme, cells: slice = slice(None), **call: Any) -> Tensor:
    """Return the relative position by which each pair is scored, (T, T), NaN where it is hidden.

    One pair of features turns by less than half a circle over all tokens. The score of such features is the cosine of
    the angle between them, and that of features a quarter apart is its sine.
    """
    frequency = math.pi / (2 * tokens)
    rope = Rope(inv_freq=torch.tensor([frequency], dtype=torch.float64))
    position = rope if isinstance(scheme, Rope) else dataclasses.replace(scheme, rope=rope)
    q, quarter = (torch.tensor(x, dtype=torch.float64).expand(tokens, 1, 2) for x in ((1.0, 0.0), (0.0, 1.0)))
    cosine, sine = (read_scores(q, k, cells, scale=1.0, position=position, **call)[0] for k in (q, quarter))
    relative = torch.atan2(sine, cosine) / frequency
    return relative.masked_fill(cosine == -math.inf, math.nan)


class Matrix(NamedTuple):
    """Numbers of pairs, (T, T) or of every so many tokens, NaN where a pair is hidden, and their name."""

    values: Tensor
    name: str


def cells_of(tokens: int) -> slice:
    """Return the tokens that a picture draws: each the middle one of as many as a cell stands for."""
    step = -(-tokens // TOKENS)
    return slice(step // 2, None, step)


def measure(tokens: int, head: int = 0, heads: int = HEADS, cells: slice = slice(None), **call: Any) -> Matrix:
    """Measure a call: who attends whom, relative positions, what is added to scores, or the score of equal features."""
    position = call.get("position")
    if position is None:
        hidden = read_equal(tokens, heads, 0.0, cells, **call)[0] == -math.inf
        return Matrix(torch.ones(hidden.shape, dtype=torch.float64).masked_fill(hidden, math.nan), "attended")
    if isinstance(position, TwoRangeScheme):
        others = {key: value for key, value in call.items() if key != "position"}
        return Matrix(read_relative(tokens, position, cells, **others), "relative position")
    scores, name = read_equal(tokens, heads, 0.0, cells, **call)[head], "added to the score"
    if not bool((scores.isfinite() & (scores.abs() > 1e-9)).any()):
        scores, name = read_equal(tokens, heads, 1.0, cells, **call)[head], "score of equal features"
    return Matrix(scores.masked_fill(scores == -math.inf, math.nan), name)


# Drawing. Text has the page's colour, and colours of pairs are more or less opaque: both read on light and on dark.

_WIDTH, _SIDE, _LEFT, _TOP = 360, 192, 22, 26
_LEVELS, _FAINTEST = 10, 0.14
_POSITIVE, _NEGATIVE = "#4c8bf5", "#e8912d"


def draw_matrix(matrix: Matrix, tokens: int, title: str, sentence: str, name: str) -> str:
    """Draw a matrix, of `cells_of` so many tokens, as SVG."""
    step = cells_of(tokens).step
    values = [
        [round(x, 4) for x in row] for row in matrix.values.tolist()
    ]  # so that roundings of machines draw the same
    seen = [x for row in values for x in row if not math.isnan(x)]
    low, high = (min(seen), max(seen)) if seen else (0.0, 0.0)
    scale = _SIDE / len(values)
    parts = []
    for (colour, level), path in _runs(values, low, high).items():
        parts.append(f'<path d="{path}" stroke="{colour}" stroke-opacity="{_opacity(level)}"/>')
    body = [
        _text(_LEFT, 14, title, "600"),
        f'<g transform="translate({_LEFT} {_TOP}) scale({scale:g})" fill="none">{"".join(parts)}</g>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="currentColor" '
        f'stroke-opacity="0.4"/>',
        _text(
            _LEFT,
            _TOP + _SIDE + 13,
            f"keys, 0 to {tokens - 1} →" + (f"; a cell is {step} × {step}" if step > 1 else ""),
        ),
        f'<text transform="translate(15 {_TOP + _SIDE}) rotate(-90)" font-size="10">'
        f"← queries, 0 to {tokens - 1}</text>",
        *_legend(matrix.name, low, high, len(seen) < len(values) ** 2),
    ]
    return _svg(name, title, sentence, _TOP + _SIDE + 20, body)


def _runs(values: Sequence[Sequence[float]], low: float, high: float) -> dict[tuple[str, int], str]:
    """Return a path for each colour and level: of each run of such cells a line, 1 wide."""
    paths: dict[tuple[str, int], str] = {}
    for y, row in enumerate(values):
        looks = [None if math.isnan(x) else _look(x, low, high) for x in row]
        x = 0
        while x < len(looks):
            end = x + 1
            while end < len(looks) and looks[end] == looks[x]:
                end += 1
            look = looks[x]
            if look is not None:
                paths[look] = f"{paths.get(look, '')}M{x} {y}.5h{end - x}"
            x = end
    return dict(sorted(paths.items()))


def _look(value: float, low: float, high: float) -> tuple[str, int]:
    """Return the colour of a number's sign, and its level, of `_LEVELS`, among numbers from low to high."""
    colour = _POSITIVE if value >= 0 else _NEGATIVE
    if low == high:
        return colour, _LEVELS
    top, least = max(abs(low), abs(high)), 0.0 if low < 0 < high else min(abs(low), abs(high))
    return colour, round((abs(value) - least) / (top - least) * _LEVELS + 1e-6)


def _opacity(level: int) -> str:
    return f"{_FAINTEST + (1 - _FAINTEST) * level / _LEVELS:.2f}"


def _legend(name: str, low: float, high: float, has_hidden: bool) -> list[str]:
    """Draw the colours of a matrix, from the greatest number to the least, and how a hidden pair looks."""
    marks = [high] if low == high else [high + (low - high) * part / 4 for part in range(5)]
    box, rows = 'width="12" height="12"', list[tuple[str, str]]()
    for mark in marks:
        colour, level = _look(mark, low, high)
        text = "" if name == "attended" else f"{mark:.3g}".replace("-", "−")
        rows.append((f'fill="{colour}" fill-opacity="{_opacity(level)}"', text))
    if has_hidden:
        rows.append(('fill="none" stroke="currentColor" stroke-opacity="0.4"', "not attended"))
    x, lines = _LEFT + _SIDE + 16, [_text(_LEFT + _SIDE + 16, _TOP + 9, name, "600")]
    for number, (look, text) in enumerate(rows, 1):
        y = _TOP + 9 + 18 * number
        lines.append(f'<rect x="{x}" y="{y - 10}" {box} {look}/>')
        lines += [_text(x + 18, y, text)] if text else []
    return lines


def draw_curves() -> str:
    """Draw the relative position by which the last query scores each key, against their distance."""
    tokens, bottom, left = 48, 214, 30
    scale = _SIDE / (tokens - 1)
    width = 1.2 * scale  # of a distance; a relative position has `scale`
    lines = [
        _text(left, 14, f"The relative position of a pair, window {_WINDOW}", "600"),
        f'<path d="M{left} {bottom - _SIDE}V{bottom}h{width * (tokens - 1):g}" fill="none" stroke="currentColor"/>',
        _text(left, bottom + 24, f"distance of query and key, 0 to {tokens - 1} →"),
        f'<path d="M{left + width * _WINDOW:g} {bottom}v-{_SIDE}" stroke="currentColor" stroke-opacity="0.4" '
        f'stroke-dasharray="2 3"/>',
        _text(left + width * _WINDOW - 20, bottom + 12, "window"),
    ]
    for mark in (0, 12, 24, 36):
        lines.append(_text(8, bottom - mark * scale + 3, str(mark)))
    for name, scheme, colour, dashes in _CURVES:
        relative = read_relative(tokens, scheme, causal=True)[-1].flip(0).tolist()  # type: ignore[arg-type]
        points = " ".join(f"{left + width * x:.1f},{bottom - scale * round(y, 3):.1f}" for x, y in enumerate(relative))
        more = f' stroke-dasharray="{dashes}"' if dashes else ""
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{more}/>')
        lines.append(_text(left + width * (tokens - 1) + 6, bottom - scale * relative[-1] + 3, name))
    said = "RoPE's is the distance. Beyond the window ReRoPE's is constant, and those of the others grow slowly."
    return _svg(RELATIVE, "Relative position against distance", said, bottom + 32, lines)


def _text(x: float, y: float, text: str, weight: str = "400") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="10" font-weight="{weight}">{_escape(text)}</text>'


def _escape(text: str) -> str:
    """Return a text for XML, which has no control characters and no halves of pairs."""
    return escape(re.sub(r"[^\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "�", text))


def _svg(name: str, title: str, sentence: str, height: int, body: Sequence[str]) -> str:
    ids = "gallery-" + re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-labelledby="{ids}-title {ids}-desc" style="width:480px;max-width:100%;height:auto;'
            f'font-family:sans-serif" fill="currentColor">',
            f'<title id="{ids}-title">{_escape(title)}</title>',
            f'<desc id="{ids}-desc">{_escape(sentence)}</desc>',
            "<style>svg:root{background:#fff}</style>",  # of a file by itself; in a page it has the page's
            *body,
            "</svg>\n",
        )
    )


def draw(name: str, head: int = 0, heads: int = HEADS, tokens: int | None = None, **more: Any) -> str:
    """Draw a picture of the gallery, or a scheme “module:Name”, as SVG; `more` arguments go to `attention` too.

    A mask and the picture of several schemes take none of the options.
    """
    if ":" not in name and name not in (*PICTURES, RELATIVE):
        names = ", ".join((*PICTURES, RELATIVE))
        raise ValueError(f"name is {name!r}, but must be one of {names}; or module:Name, a scheme of your own")
    chosen = {"head": head or None, "heads": None if heads == HEADS else heads, "tokens": tokens, **more}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    if chosen and ":" not in name and name not in SCHEMES:
        key, value = next(iter(chosen.items()))
        raise ValueError(f"{key} is {value!r}, but must be left out: {name} is a picture of its own arguments")
    if name == RELATIVE:
        return draw_curves()
    if name in SCHEMES and heads != HEADS:
        raise ValueError(f"heads is {heads}, but must be {HEADS} for {name}")
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"heads is {heads}, but must be from 1 to {MOST_HEADS}")
    if not 0 <= head < heads:
        raise ValueError(f"head is {head}, but must be from 0 to {heads - 1}")
    most = min(MOST_TOKENS, math.isqrt(_MOST_SCORES // heads))
    if tokens is not None and not 1 <= tokens <= most:
        raise ValueError(f"tokens is {tokens}, but must be from 1 to {most} with {heads} heads")
    window = more.get("window")
    if isinstance(window, int) and not 1 <= window <= MOST_TOKENS:
        raise ValueError(f"window is {window}, but must be from 1 to {MOST_TOKENS}")
    if name in PICTURES:
        picture = PICTURES[name]
        call = arguments_of(picture.call)
    else:
        picture = Picture(name.partition(":")[2], f"The scheme {name}.", "")
        call = {"position": make_scheme(name, heads)}
    tokens = tokens or picture.tokens
    try:
        matrix = measure(tokens, head, heads, cells_of(tokens), **call | more)
    except Exception as error:  # of their code, whatever it is
        if name in PICTURES:
            raise
        raise ValueError(f"{name} cannot be drawn with {heads} heads and {tokens} tokens: {say(error)}") from error
    return draw_matrix(matrix, tokens, picture.title, _describe(picture.sentence, head, more), name)


def _describe(sentence: str, head: int, more: dict[str, Any]) -> str:
    """Return the sentence of a scheme as options make it."""
    said = sentence if head == 0 else sentence.replace("; this is the first of four heads", "")
    options = [f"head={head}"] if head else []
    options += [f"{key}={x}" if isinstance(x, (int, float, str, tuple)) else key for key, x in more.items()]
    return f"{said} Drawn with {', '.join(options)}." if options else said


def run_draw(
    name: str, output: Path, head: int, heads: int, tokens: int | None, causal: bool, window: int | None
) -> None:
    """Draw a scheme or a mask into a file, and say where it is."""
    if output.name == ".svg":
        raise ValueError(f"output is {output}, but must have a name before .svg")
    if output.suffix != ".svg":
        raise ValueError(f"output is {output}, but must end in .svg")
    more: dict[str, Any] = {"causal": True} if causal else {}
    more |= {} if window is None else {"window": window}
    text = draw(name, head, heads, tokens, **more)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"picture: {output}")
