"""Triton's interpreter without work that it does for nothing, two thirds of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def make_faster() -> None:
    """Spare the interpreter what changes no result."""
    from triton.runtime import interpreter

    _patch_language_once(interpreter)
    # It computes whether integers overflow, and drops the answer, as `debug` is off.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_language_once(interpreter: Any) -> None:
    """Patch `triton.language` once in a launch for each module, and not in each call of a device function."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # modules' dictionaries

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **keywords: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **keywords)
        finally:
            patched.clear()  # the interpreter takes its patches back

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
