"""What users may rely on changes only where the change shows in `public_api.txt`."""

import difflib

from public_api import HELD, describe_api

import ropewalk


def test_public_names_signatures_operators_and_commands_are_as_held():
    held, found = HELD.read_text(encoding="utf-8"), describe_api()
    changes = "\n".join(difflib.unified_diff(held.splitlines(), found.splitlines(), "held", "found", lineterm="", n=0))
    assert held == found, f"if this is meant, run python tests/public_api.py:\n{changes}"


def test_what_is_held_is_complete():
    lines = HELD.read_text(encoding="utf-8")
    assert all(f"ropewalk.{name}" in lines for name in ropewalk.__all__)
    assert "ropewalk doctor" in lines
    assert "ropewalk::attend_backward(" in lines
