"""Keys and values of a configuration: read from YAML or TOML, and made of the types that they must have."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file in YAML or TOML; ValueError, which names the file, if that is not keys and values."""
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"{path}: a configuration file must end in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the configuration file cannot be read: {error}") from error
    content = _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, but must hold keys and values")
    return content


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path}: PyYAML is not installed (pip install 'ropewalk[train]')") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is no YAML: {error}") from error


def _parse_toml(path: Path, text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{path}: tomli is not installed (pip install 'ropewalk[train]')") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is no TOML: {error}") from error


def convert(source: str, key: Any, value: Any, kinds: Mapping[str, Any]) -> Any:
    """Convert a value to its key's kind; ValueError, which names the source and the key, if there is no such key."""
    if key not in kinds:
        near = difflib.get_close_matches(str(key), kinds, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(kinds)}"
        raise ValueError(f"{source}: there is no key {key!r}; {hint}")
    as_kind, wanted = _KINDS[kinds[key]]
    try:
        return as_kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{source}: {key} is {value!r}, but must be {wanted}") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: Any) -> float:
    """Convert to a finite number; YAML reads 1e-3, which has no point, as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(float(value)):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if value is False:
        return "no"  # which YAML reads so
    if not isinstance(value, (str, Path)):
        raise TypeError
    return str(value)


def _sequence(value: Any) -> Iterable[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return value


def _options(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(options, dict) and all(isinstance(key, str) for key in options)
        for name, options in value.items()
    ):
        raise TypeError
    return {name: dict(options) for name, options in value.items()}


_KINDS: dict[Any, tuple[Any, str]] = {
    int: (_whole, "a whole number"),
    float: (_number, "a number"),
    str: (_text, "text"),
    str | None: (lambda value: None if value is None else _text(value), "text, or nothing"),
    tuple[str, ...]: (lambda value: tuple(_text(item) for item in _sequence(value)), "a list of texts"),
    tuple[int, ...]: (lambda value: tuple(_whole(item) for item in _sequence(value)), "a list of whole numbers"),
    dict[str, dict[str, Any]]: (_options, "a mapping of schemes to their arguments, as {rerope: {window: 64}}"),
}
