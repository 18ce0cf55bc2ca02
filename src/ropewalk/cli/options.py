"""Common code of the commands: errors without tracebacks, and lists in one option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

# The packages that commands may lack, by their import names, and the extra that has each.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "huggingface_hub", "safetensors"), "train"),
    **dict.fromkeys(("tensorboard", "tokenizers", "tomli", "yaml"), "train"),
    **dict.fromkeys(("bokeh", "jinja2", "matplotlib", "pandas", "rich", "transformers", "typer"), "bench"),
}


@contextmanager
def user_errors(*more: type[Exception]) -> Iterator[None]:
    """Show errors that a user can fix, and those of the classes `more`, by their message, without a traceback."""
    expected: tuple[type[Exception], ...] = (ValueError, ModuleNotFoundError, *more)
    try:
        yield
    except expected as error:
        typer.secho(f"error: {_describe(error)}", fg="red", err=True)
        raise typer.Exit(2) from error


def _describe(error: Exception) -> str:
    """Return an error's message; for a package of an extra that is missing, how to install it."""
    if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            return f"{package} is not installed: pip install 'ropewalk[{EXTRAS[package]}]'"
    return str(error)


def split_names(text: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    """Split whole numbers at commas."""
    names = split_names(text)
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{option} is {text!r}, but must be whole numbers with commas between, as in 512,1024")
    return [int(name) for name in names]
