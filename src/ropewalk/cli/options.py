"""Commands of tables of options, whose functions are imported when they run; errors without tracebacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType
from typing import Annotated, Any

import typer

# The packages that commands may lack, by their import names, and the extra that has each.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "huggingface_hub", "safetensors"), "train"),
    **dict.fromkeys(("tensorboard", "tokenizers", "tomli", "yaml"), "train"),
    **dict.fromkeys(("bokeh", "jinja2", "matplotlib", "pandas", "rich", "transformers", "typer"), "bench"),
}
# The type, or a function that parses the text; the default (...: a required argument); the help; then names
# with spaces between, and more of typer's.
Option = tuple[Any, ...]


def split_names(option: str, text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(option: str, text: str) -> list[int]:
    names = split_names(option, text)
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{option} is {text!r}, but must be whole numbers with commas between, as in 512,1024")
    return [int(name) for name in names]


def command(
    app: typer.Typer, name: str, run: Callable[..., None] | str, options: Mapping[str, Option], text: str = ""
) -> None:
    """Add a command that calls a function, or one by its path in this package; its help is `text`, or the docstring.

    Errors that a user can fix, and those of a class of this package, are one line and the exit code 2.
    """
    parsed = {key: kind for key, (kind, *_) in options.items() if isinstance(kind, FunctionType)}

    def call(**values: Any) -> None:
        try:
            values |= {key: parse(key, values[key]) for key, parse in parsed.items()}
            if isinstance(run, str):
                module, _, function = run.rpartition(".")
                getattr(import_module(f"ropewalk.{module}"), function)(**values)
            else:
                run(**values)
        except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not type(error).__module__.startswith("ropewalk."):
                raise
            if isinstance(error, BrokenPipeError):  # a reader like `head` has enough: click ends quietly
                raise
            said, package = str(error), (getattr(error, "name", None) or "").partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and "pip install" not in said and package in EXTRAS:
                said = f"{package} is not installed: pip install 'ropewalk[{EXTRAS[package]}]'"
            typer.secho(f"error: {said}", fg="red", err=True)
            raise typer.Exit(2) from error

    parameters = []
    for key, (kind, default, said, *rest) in options.items():
        names, more = rest[0] if rest else "", rest[1] if len(rest) > 1 else {}
        parameter_kind = typer.Argument if default is ... else typer.Option
        annotation: Any = Annotated[str if key in parsed else kind, parameter_kind(*names.split(), help=said, **more)]
        parameter_default = inspect.Parameter.empty if default is ... else default
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=parameter_default, annotation=annotation)
        )
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=text or inspect.getdoc(run))(call)
