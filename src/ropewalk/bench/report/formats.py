"""Figures as text."""

from __future__ import annotations

MISSING = "–"


def significant(value: float, digits: int = 3) -> str:
    """Format a number to so many significant digits, and to the unit at least: 0.123, 12.3, 1234."""
    if value == 0:
        return "0"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole:
        return f"{value:.{max(digits - whole, 0)}f}"
    return f"{value:.{digits}g}"


def duration(microseconds: float) -> str:
    """Format a time with its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{significant(microseconds / size)} {unit}"
    return f"{significant(microseconds)} µs"


def share(value: float | None) -> str:
    """Format a fraction in percent."""
    return MISSING if value is None else f"{100 * value:.0f} %"


def ratio(value: float) -> str:
    """Format a ratio to two decimals, or more if it is small."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def size(count: int) -> str:
    """Format bytes with their unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count} B"
