"""Docstrings as the site shows them: what our style writes otherwise than Markdown and griffe read it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMES_AN_ERROR = re.compile(r"    [A-Z]\w*(, [A-Z]\w*)*: ")


class Docstrings(griffe.Extension):
    """Literal blocks end in one colon, an “Example:” is code, and a remark under “Raises:” is a paragraph."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _move_remarks(re.sub(r"::$", ":", text, flags=re.MULTILINE))


def _move_remarks(text: str) -> str:
    """Lines under “Raises:” that name no error go behind that section."""
    before, heading, rest = text.partition("\nRaises:\n")
    if not heading:
        return text
    section, blank, after = rest.partition("\n\n")
    errors: list[str] = []
    remarks: list[str] = []
    target = errors
    for line in section.splitlines():
        if not line.startswith("     "):
            target = errors if _NAMES_AN_ERROR.match(line) else remarks
        target.append(line if target is errors else line.strip())
    kept = f"{heading}{chr(10).join(errors)}" if errors else ""
    moved = f"\n\n{chr(10).join(remarks)}" if remarks else ""
    return f"{before}{kept}{moved}{blank}{after}"
