"""The configuration of a comparison: presets, a file (YAML or TOML) and the command line, the last of which wins."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ropewalk.experiments.bert_positions.config_values import convert, read_mapping
from ropewalk.modules.bert import get_attention_class

SCHEMES = ("standard", "absolute", "rope", "exposb", "alibi", "rerope")
PRECISIONS = ("auto", "no", "bf16", "fp16")
COMMAND_LINE = "the command line"


class ConfigError(ValueError):
    """A key whose value cannot be; `load_config` adds its source."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Config:
    """A comparison, with the sizes of the preset "smoke". A value that cannot be raises `ConfigError`, a ValueError."""

    schemes: tuple[str, ...] = SCHEMES
    seeds: tuple[int, ...] = (0,)
    corpus: tuple[str, ...] = ()  # files and folders of text; none: text that ships with Python and its packages
    dataset: str | None = None  # a Hugging Face dataset, NAME or NAME:CONFIGURATION, of which "train" is read
    dataset_column: str = "text"
    max_megabytes: float = 2.0  # of text, at most
    held_out: float = 0.1  # of the documents, for the evaluation
    vocab_size: int = 2048
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 256
    dropout: float = 0.0  # of hidden states and attention
    scheme_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # arguments of a scheme's attention class
    train_length: int = 32  # tokens of a window
    batch_size: int = 32  # windows of a step, over all processes and accumulation steps
    accumulation_steps: int = 1
    steps: int = 200
    learning_rate: float = 3e-3
    warmup: float = 0.1  # of the steps
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    mask_probability: float = 0.15
    precision: str = "auto"  # bf16 on a GPU, else no
    length_multiples: tuple[int, ...] = (1, 2, 4, 8)  # of train_length: where the models are evaluated
    evaluation_windows: int = 32  # of the greatest length, at most
    checkpoint_every: int = 100  # steps
    log_every: int = 10  # steps

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` unless all values can be, each and together."""
        for key, lowest in _LOWEST.items():
            if getattr(self, key) < lowest:
                raise ConfigError(key, f"{key} is {getattr(self, key)}, but must be at least {lowest}")
        for key, (low, high) in _BETWEEN.items():
            value = getattr(self, key)
            if not low < value < high and value != _MAY_BE.get(key):
                closed = "[" if _MAY_BE.get(key) == low else "("
                raise ConfigError(key, f"{key} is {value}, but must be in {closed}{low:g}, {high:g})")
        self._check_names()
        self._check_lengths()
        self._check_schemes()

    def _check_names(self) -> None:
        for key, allowed in (("schemes", SCHEMES), ("scheme_options", SCHEMES), ("precision", PRECISIONS)):
            values = getattr(self, key)
            for name in (values,) if isinstance(values, str) else values:
                if name not in allowed:
                    raise ConfigError(key, f"{key} has {name!r}, but must be of {', '.join(allowed)}")
        for key in ("schemes", "seeds", "length_multiples"):
            values = getattr(self, key)
            if not values or len(set(values)) < len(values):
                raise ConfigError(key, f"{key} is {list(values)}, but must have one or more values, each only once")
        if self.dataset is not None and self.corpus:
            raise ConfigError("dataset", f"dataset is {self.dataset!r}, but corpus is given too: choose one of them")
        for key in ("dataset", "dataset_column"):
            if getattr(self, key) == "":
                raise ConfigError(key, f"{key} is empty, but must be a name")

    def _check_lengths(self) -> None:
        multiples = self.length_multiples
        if min(multiples) < 1 or list(multiples) != sorted(multiples) or any(multiples[-1] % n for n in multiples):
            raise ConfigError(
                "length_multiples",
                f"length_multiples is {list(multiples)}, but must be positive numbers in rising order, each of which "
                "divides the last",
            )
        if min(self.seeds) < 0:
            raise ConfigError("seeds", f"seeds has {min(self.seeds)}, but must be 0 or more")
        if self.batch_size % self.accumulation_steps:
            sizes = f"accumulation_steps is {self.accumulation_steps}, but must divide batch_size, {self.batch_size}"
            raise ConfigError("accumulation_steps", sizes)

    def _check_schemes(self) -> None:
        if self.hidden_size % self.num_heads:
            sizes = f"num_heads is {self.num_heads}, but must divide hidden_size, {self.hidden_size}"
            raise ConfigError("num_heads", sizes)
        for scheme in sorted({*self.schemes, *self.scheme_options}):
            try:
                with torch.device("meta"):
                    make = get_attention_class(scheme)
                    make(self.hidden_size, self.num_heads, self.longest, self.dropout, **self.options_of(scheme))
            except (TypeError, ValueError) as error:
                key = "scheme_options" if self.scheme_options.get(scheme) else "hidden_size"
                options = f" with {self.scheme_options[scheme]}" if key == "scheme_options" else ""
                raise ConfigError(key, f"{key}: the scheme {scheme!r} cannot be made{options}: {error}") from error

    @property
    def longest(self) -> int:
        """The greatest length that the models are evaluated at, in tokens."""
        return self.train_length * max(self.length_multiples)

    def options_of(self, scheme: str) -> dict[str, Any]:
        """Return a scheme's arguments beside the sizes; ReRoPE's window is half a training window."""
        default = {"window": max(1, self.train_length // 2)} if scheme == "rerope" else {}
        return {**default, **self.scheme_options.get(scheme, {})}

    def as_dict(self) -> dict[str, Any]:
        """Return all keys, for JSON, YAML and `load_config`: lists instead of tuples."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


_POSITIVE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "batch_size",
    "accumulation_steps",
    "steps",
    "evaluation_windows",
    "checkpoint_every",
    "log_every",
)
_LOWEST = {**dict.fromkeys(_POSITIVE, 1), "train_length": 8, "vocab_size": 512}
_BETWEEN = {
    "max_megabytes": (0.0, math.inf),
    "held_out": (0.0, 1.0),
    "dropout": (0.0, 1.0),
    "learning_rate": (0.0, math.inf),
    "warmup": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
    "max_grad_norm": (0.0, math.inf),
    "mask_probability": (0.0, 1.0),
}
_MAY_BE = {"dropout": 0.0, "warmup": 0.0, "weight_decay": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    # A CPU, in about three minutes: the parts work together. Such models learn little.
    "smoke": {},
    # One GPU, in minutes: three epochs of 15 million tokens.
    "small": {
        "seeds": (0, 1, 2),
        "max_megabytes": 64.0,
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 1024,
        "train_length": 128,
        "batch_size": 512,
        "steps": 700,
        "learning_rate": 2e-3,
        "evaluation_windows": 256,
        "checkpoint_every": 350,
        "log_every": 20,
    },
    # BERT-base, over night on several GPUs: 13 billion tokens for each scheme.
    "base": {
        "dataset": "wikimedia/wikipedia:20231101.en",
        "max_megabytes": 4000.0,
        "held_out": 0.01,
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "intermediate_size": 3072,
        "dropout": 0.1,
        "train_length": 512,
        "batch_size": 256,
        "steps": 100_000,
        "learning_rate": 2e-4,
        "warmup": 0.05,
        "evaluation_windows": 512,
        "checkpoint_every": 2000,
        "log_every": 100,
    },
}


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision itself, of `PRECISIONS`; for "auto", that of the device."""
    return ("bf16" if device.type == "cuda" else "no") if precision == "auto" else precision


def load_config(preset: str, file: Path | None = None, **overrides: Any) -> Config:
    """Load a preset, changed by the file, and that by the command line.

    Args:
        preset: one of `PRESETS`.
        file: a mapping of any keys of `Config`, in YAML (.yaml, .yml) or TOML (.toml).
        overrides: the same keys; None where the command line gave nothing.

    Raises:
        ValueError: an unknown preset; a file that cannot be read; an unknown key, or a value that cannot be. The
            message names the file, or the command line, and the key.
        ModuleNotFoundError: PyYAML, or before Python 3.11 tomli, is missing.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} does not exist; there are: {', '.join(PRESETS)}")
    kinds = typing.get_type_hints(Config)
    given = {key: value for key, value in overrides.items() if value is not None}
    values = dict(PRESETS[preset])
    sources = dict.fromkeys(values, f"preset {preset}")
    for source, layer in (() if file is None else ((str(file), read_mapping(file)),)) + ((COMMAND_LINE, given),):
        for key, value in layer.items():
            values[key] = convert(source, key, value, kinds)
            sources[key] = source
        if layer.get("corpus") and "dataset" not in layer:  # where the text is from, the later says alone
            values["dataset"] = None
        elif layer.get("dataset") is not None and "corpus" not in layer:
            values["corpus"] = ()
    try:
        return Config(**values)
    except ConfigError as error:
        raise ValueError(f"{_blame(error, sources, preset)}: {error}") from error


def _blame(error: ConfigError, sources: Mapping[str, str], preset: str) -> str:
    """Return the source of a wrong value: of several keys that the message names, the first that was changed."""
    named = [error.key, *(key for key in sources if key in str(error))]
    changed = [sources[key] for key in named if key in sources and sources[key] != f"preset {preset}"]
    return changed[0] if changed else f"preset {preset}"
