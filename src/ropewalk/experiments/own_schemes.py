"""Position schemes by name, “module:Name”, from wherever Python finds the module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ropewalk.schemes import PositionScheme
from ropewalk.schemes.base import check_class

_KINDS = "a PositionScheme, a class of them, or a function from the number of heads to one"


def say(error: Exception) -> str:
    """Say in one line which error another's code raised."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def load_object(name: str) -> Any:
    """Import what “module:Name” names; modules of the current folder are found too. ValueError if there is none."""
    module, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"scheme is {name!r}, but must be module:Name, a module by its name and not by its path")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ValueError(f"scheme is {name!r}, but there is no module {module!r} here or among packages") from error
    except Exception as error:  # of their module, whatever it is
        raise ValueError(f"scheme is {name!r}, but module {module!r} cannot be imported: {say(error)}") from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise ValueError(f"scheme is {name!r}, but module {module!r} has no {attribute!r}") from error


def make_scheme(name: str, n_heads: int, **options: Any) -> PositionScheme:
    """Make the scheme that “module:Name” names.

    It is a scheme, a class of schemes that `options` are the arguments of, or a function of the number of heads and of
    `options`.
    """
    named = found = load_object(name)
    kind = named.__name__ if isinstance(named, type) else type(named).__name__
    is_class = isinstance(named, type) and issubclass(named, PositionScheme)
    if is_class or (callable(named) and not isinstance(named, type)):
        arguments = () if is_class else (n_heads,)
        try:
            found = named(*arguments, **options)
        except Exception as error:  # of their code, whatever it is
            passed = ", ".join((*map(str, arguments), *(f"{key}={x!r}" for key, x in options.items())))
            kind = f"{'the class' if is_class else 'a'} {kind}"
            raise ValueError(
                f"{name} is {kind}, and a call of it with ({passed}) raised {say(error)}; it must be {_KINDS}"
            ) from error
    elif options:
        raise ValueError(f"{name} is a {kind}, but must be a class or a function to get {options}")
    if not isinstance(found, PositionScheme):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ValueError(f"{name} is, or returns, {kind}, but must be {_KINDS}")
    try:
        check_class(found)
    except TypeError as error:
        raise ValueError(f"{name} is no scheme that attention can read: {error}") from error
    return found
