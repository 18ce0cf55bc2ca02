"""Position schemes by name, “module:Name”, from wherever Python finds the module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ropewalk.schemes import PositionScheme


def load_object(name: str) -> Any:
    """Import what “module:Name” names; modules of the current folder are found too. ValueError if there is none."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"scheme is {name!r}, but must be module:Name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ValueError(f"scheme is {name!r}, but there is no module {module!r} here or among packages") from error
    except AttributeError as error:
        raise ValueError(f"scheme is {name!r}, but module {module!r} has no {attribute!r}") from error


def make_scheme(name: str, n_heads: int, **options: Any) -> PositionScheme:
    """Make the scheme that “module:Name” names.

    It is a scheme, a class of schemes that `options` are the arguments of, or a function of the number of heads and of
    `options`.
    """
    found = load_object(name)
    if isinstance(found, type) and issubclass(found, PositionScheme):
        found = found(**options)
    elif callable(found) and not isinstance(found, type):
        found = found(n_heads, **options)
    elif options:
        raise ValueError(f"{name} is a {type(found).__name__}, but must be a class or a function to get {options}")
    if not isinstance(found, PositionScheme):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{name} is, or returns, {kind}, but must be a PositionScheme, a class of them, "
            f"or a function from the number of heads to one"
        )
    return found
