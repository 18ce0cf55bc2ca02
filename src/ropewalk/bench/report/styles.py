"""The look of each implementation: the same colour and marker everywhere on the page.

Colours come in pairs, for a light and a dark page. They are told apart with any kind of colour vision together with the
marker: ours are blues, peers are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ropewalk.bench.core.timing import COPY
from ropewalk.bench.report.entries import Entry
from ropewalk.bench.rope.run import MULTIPLY


@dataclass(frozen=True)
class Style:
    """Colours on a light and on a dark page, and the marker."""

    light: str
    dark: str
    symbol: str
    dash: str = "solid"


_KNOWN = {
    "auto": Style("#0a3a8c", "#9cc2ff", "circle"),
    "native": Style("#0a3a8c", "#9cc2ff", "circle"),
    "triton": Style("#2f7fe0", "#4c9bff", "square"),
    "gluon": Style("#1565a8", "#7fb4f5", "diamond-tall"),
    "rotary_embedding": Style("#0092b8", "#5fd3ee", "diamond"),
    "flash": Style("#5b62cf", "#a8aeff", "diamond"),
    "sdpa": Style("#0092b8", "#5fd3ee", "hexagon"),
    "reference": Style("#7f93ae", "#93a5bd", "hexagon2"),
    "compiled": Style("#d55e00", "#ff8f45", "triangle-up"),
    "flex": Style("#d55e00", "#ff8f45", "triangle-up"),
    "huggingface": Style("#a87b00", "#e8bf45", "triangle-down"),
    "sdpa_default": Style("#6a5788", "#bfa8e0", "hourglass"),
    "liger_kernel": Style("#00875f", "#37cf9f", "cross"),
    "eager": Style("#00875f", "#37cf9f", "cross"),
    "quack": Style("#9c4a97", "#e59ae1", "x"),
    "sdpa_flash": Style("#9c4a97", "#e59ae1", "x"),
    "flash_attn": Style("#bd2430", "#ff7d7d", "star"),
    "flash_attn_4": Style("#bd2430", "#ff7d7d", "star"),
    "flash_attn_2": Style("#d2544c", "#ffb3a8", "star-square"),
    "flash_attn_3": Style("#8c1d52", "#ff7fb6", "star-diamond"),
    "flashinfer": Style("#657500", "#c0cf4d", "pentagon"),
    "cudnn": Style("#1f7278", "#57c7c7", "hexagram"),
    "vllm": Style("#3c3f44", "#d4d6da", "triangle-left"),
    "xformers": Style("#835327", "#d3a473", "triangle-right"),
    "transformer_engine": Style("#3f7f30", "#97da86", "bowtie"),
    COPY: Style("#868d96", "#9aa1aa", "line-ns"),
    MULTIPLY: Style("#868d96", "#9aa1aa", "line-ew"),
}
_OTHERS = (
    Style("#835327", "#d3a473", "star-triangle-up"),
    Style("#8c1d52", "#ff7fb6", "star-triangle-down"),
    Style("#3f7f30", "#97da86", "diamond-wide"),
    Style("#5d5d00", "#d6d36a", "octagon"),
)
_MAIN = ("rerope", "rope", "compiled rope", "none")  # where positions come in, of which the first gets the plain marker
_FILLS = ("", "-open", "-open-dot")
_FURTHER = ("diamond-tall", "hourglass", "bowtie-open", "star-square")
_DASHES = ("solid", "dot", "dash", "dashdot")


def style_of(impl: str) -> Style:
    """The look of an implementation by its name; of one that is not known, always the same one too."""
    return _KNOWN.get(impl) or _OTHERS[sum(impl.encode()) % len(_OTHERS)]


def colours_of(impl: str) -> dict[str, str]:
    """An implementation's colours, by the names that the page's styles have for them."""
    style = style_of(impl)
    return {"--light": style.light, "--dark": style.dark}


def styles_in(entries: Iterable[Entry]) -> dict[str, Style]:
    """By label, for one chart: where positions come in shows in the marker's filling and in dashes, not in colour."""
    by_impl: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        by_impl.setdefault(entry.impl, {}).setdefault(entry.label, entry)
    found: dict[str, Style] = {}
    for impl, labels in by_impl.items():
        ordered = sorted(labels.values(), key=_rank)
        found |= {entry.label: _nth(style_of(impl), n) for n, entry in enumerate(ordered)}
    return found


def _rank(entry: Entry) -> tuple[bool, int, str]:
    rank = _MAIN.index(entry.position) if entry.position in _MAIN else len(_MAIN)
    return entry.yardstick is not None, rank, entry.label


def _nth(style: Style, n: int) -> Style:
    fills = len(_FILLS)
    symbol = style.symbol + _FILLS[n] if n < fills else _FURTHER[(n - fills) % len(_FURTHER)]
    if style.symbol.startswith("line"):
        symbol = style.symbol
    return Style(style.light, style.dark, symbol, _DASHES[n % len(_DASHES)])
