"""Tags of Python source, character by character, by its own tokenizer: the labels of the downstream probe."""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import tokenize
import warnings

import torch
from torch import Tensor

KINDS = ("keyword", "name", "number", "string", "comment", "operator")
DEEPEST = 3  # brackets; more count as as many
# By name: the classes of each kind of tags. A kind can mostly be told from the token, but for a string or a comment;
# a depth needs the order of the brackets before it.
TAGS = {"kind": KINDS, "depth": tuple(range(DEEPEST + 1))}
_OPENS, _CLOSES = "([{", ")]}"


def tag_source(text: str) -> Tensor | None:
    """Tag each character of a Python source, (kinds of tags, characters) int8, or return None of another text.

    The kind is one of `KINDS`; −100 for space between tokens. The depth is the number of brackets that are open, of
    brackets themselves the number outside of them. Brackets in strings and comments do not count.
    """
    if not text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline="").readline))
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return None
    starts = [0, *itertools.accumulate(len(line) for line in io.StringIO(text, newline=""))]
    tags, depth = [bytearray([256 - 100]) * len(text) for _ in TAGS], 0  # −100 as a byte
    for token in tokens:
        kind = _kind_of(token)
        if kind is not None:
            depth -= token.string in _CLOSES and kind == "operator"
            first, last = (starts[line - 1] + column for line, column in (token.start, token.end))
            for kind_tags, tag in zip(tags, (KINDS.index(kind), min(depth, DEEPEST)), strict=True):
                kind_tags[first:last] = bytes([tag]) * (last - first)
            depth += token.string in _OPENS and kind == "operator"
    return torch.stack([torch.frombuffer(kind_tags, dtype=torch.int8) for kind_tags in tags])


def _kind_of(token: tokenize.TokenInfo) -> str | None:
    name = tokenize.tok_name[token.type]
    if name == "NAME":
        return "keyword" if keyword.iskeyword(token.string) else "name"
    if name.startswith(("FSTRING", "TSTRING")):  # its parts, from Python 3.12 on
        return "string"
    known = {"NUMBER": "number", "STRING": "string", "COMMENT": "comment", "OP": "operator"}
    return known.get(name)
