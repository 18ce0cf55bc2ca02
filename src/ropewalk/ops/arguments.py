"""Checks of arguments that both operators share: dense tensors, pairings, and keywords that a function lacks."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def check_dense(name: str, x: Tensor) -> None:
    """Raise if x is sparse, nested or oneDNN's: those have no strides by which a kernel could read them."""
    if x.layout is torch.strided and not x.is_nested:
        return
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, but must be dense: pass the values() of a jagged one in layout 'thd', and its "
            "offsets() as the bounds of the sequences"
        )
    raise TypeError(f"{name} is a tensor of layout {x.layout}, but must be dense, of torch.strided")


def check_flags(arguments: Any, *names: str) -> None:
    """Raise unless these fields of a record are True or False."""
    for name in names:
        value = getattr(arguments, name)
        if not isinstance(value, int) or value not in (False, True):
            raise TypeError(f"{name} is {value!r}, but must be True or False")


def check_pair_block(pair_block: int | None, rotary_dim: int | None, interleaved: bool) -> None:
    """Raise unless blocks of `pair_block` features, half-split each, fill the rotated ones (None: not known)."""
    if pair_block is None:
        return
    if not isinstance(pair_block, int) or isinstance(pair_block, bool):
        raise TypeError(f"pair_block is {pair_block!r}, but must be an int or None")
    if interleaved:
        raise ValueError(f"pair_block is {pair_block}, but must be None where interleaved is True")
    if pair_block < 2 or pair_block % 2:
        raise ValueError(f"pair_block is {pair_block}, but must be even and at least 2")
    if rotary_dim is not None and rotary_dim % pair_block:
        raise ValueError(f"pair_block is {pair_block}, but must divide the number of rotated features, {rotary_dim}")


def is_set(value: Any, neutral: Any) -> bool:
    """Say whether a value is another than the one with which an argument or a field changes nothing."""
    if value is neutral or neutral is None or value is None or isinstance(value, Tensor):
        return value is not neutral
    if isinstance(value, tuple) and isinstance(neutral, tuple):
        return any(is_set(x, nothing) for x, nothing in zip(value, neutral, strict=True))
    return bool(value != neutral)


@functools.cache
def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's arguments: with these they change nothing."""
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


def why_unread(function: Callable[..., Any], keywords: Mapping[str, Any], reads: Collection[str]) -> str | None:
    """Say that a keyword of a function is set which what stands in for the function does not read; None: none is."""
    for name, value in keywords.items():
        neutral = None if name in reads else defaults_of(function).get(name)
        if name not in reads and is_set(value, neutral):
            value_text = f"is {value!r}" if isinstance(value, (bool, int, float, str)) else "was given"
            return f"{name} {value_text}, but must be {neutral!r}"
    return None


def without_unknown(function: Function) -> Function:
    """Leave `**unknown` out of a function's signature: it is there for `refuse_unknown` alone, and costs no wrapper."""
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=named)
    return function


def refuse_unknown(
    function: str, unknown: Collection[str], known: Collection[str], elsewhere: Mapping[str, str]
) -> NoReturn:
    """Raise for the first of the unknown keywords.

    known: the function's own. elsewhere: what other libraries call them; a value with a space in it is a sentence.
    """
    name = next(iter(unknown))
    hint = elsewhere.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    if hint is None:
        hint = f"it takes {', '.join(known)}"
    elif " " not in hint:
        hint = f"did you mean {hint}?"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {hint}")
