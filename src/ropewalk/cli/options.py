"""Common code of the commands: their options, errors without tracebacks, and lists in one option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

# The packages that commands may lack, by their import names, and the extra that has each.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "huggingface_hub", "safetensors"), "train"),
    **dict.fromkeys(("tensorboard", "tokenizers", "tomli", "yaml"), "train"),
    **dict.fromkeys(("bokeh", "jinja2", "matplotlib", "pandas", "rich", "transformers", "typer"), "bench"),
}
# The type, the default (...: an argument that must be given), the help; then other names, and more of typer's.
Option = tuple[Any, ...]


def command(
    app: typer.Typer, name: str, options: Mapping[str, Option], *errors: type[Exception], text: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that takes the options by keyword; its help is `text`, or the docstring."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            with user_errors(*errors):
                run(**given)

        parameters = []
        for key, (kind, default, said, *rest) in options.items():
            names = [one for one in rest if isinstance(one, str)]
            made = typer.Argument if default is ... else typer.Option
            more = {key: value for one in rest if isinstance(one, dict) for key, value in one.items()}
            annotation: Any = Annotated[kind, made(*names, help=said, **more)]
            given = inspect.Parameter.empty if default is ... else default
            parameters.append(
                inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=annotation)
            )
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__ = text or inspect.getdoc(run)
        app.command(name)(call)
        return run

    return register


@contextmanager
def user_errors(*more: type[Exception]) -> Iterator[None]:
    """Show errors that a user can fix, and those of the classes `more`, by their message, without a traceback."""
    expected: tuple[type[Exception], ...] = (ValueError, ModuleNotFoundError, *more)
    try:
        yield
    except expected as error:
        text, package = str(error), (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and "pip install" not in text and package in EXTRAS:
            text = f"{package} is not installed: pip install 'ropewalk[{EXTRAS[package]}]'"
        typer.secho(f"error: {text}", fg="red", err=True)
        raise typer.Exit(2) from error


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    names = split_names(text)
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{option} is {text!r}, but must be whole numbers with commas between, as in 512,1024")
    return [int(name) for name in names]
