"""HTML that is escaped where it is made."""

from __future__ import annotations

from html import escape

_VOID = ("br", "col", "link", "meta")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | bool | None) -> Markup:
    """An element. Children that are not `Markup` are escaped, as attributes are; None is left out.

    In an attribute's name, a last underscore is dropped, and the others are written as hyphens.
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: str | None) -> Markup:
    """Children one after another, without an element around them."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))
