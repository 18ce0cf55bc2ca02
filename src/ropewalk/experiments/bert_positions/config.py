"""The configuration of a comparison: presets, a file (YAML or TOML) and the command line, the last of which wins.

`strict` checks types, as transformers does for its own configurations.
"""

import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ropewalk.modules.bert import get_attention_class

SCHEMES = ("standard", "absolute", "rope", "exposb", "alibi", "rerope")


@strict
@dataclass(kw_only=True)
class Config:
    """A comparison, with the sizes of the preset "smoke"."""

    schemes: list[str] = field(default_factory=lambda: list(SCHEMES))
    seeds: list[int] = field(default_factory=lambda: [0])
    corpus: list[str] = field(default_factory=list)  # files and folders of text; none: Python and its packages
    dataset: str | None = None  # a Hugging Face dataset, NAME or NAME:CONFIGURATION, of which "train" is read
    dataset_column: str = "text"
    max_megabytes: float | int = 2  # of text, at most
    held_out: float = 0.1  # of the documents, for the evaluation
    vocab_size: int = 2048
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 256
    dropout: float | int = 0.0  # of hidden states and attention
    scheme_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # arguments of a scheme's attention class
    train_length: int = 32  # tokens of a window
    batch_size: int = 32  # windows of a step, over all processes and accumulation steps
    accumulation_steps: int = 1
    steps: int = 200
    learning_rate: float = 3e-3
    warmup: float | int = 0.1  # of the steps
    weight_decay: float | int = 0.01
    max_grad_norm: float | int = 1.0
    mask_probability: float = 0.15
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # bf16 on a GPU, else no
    length_multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # of train_length: where it is evaluated
    evaluation_windows: int = 32  # of the greatest length, at most
    checkpoint_every: int = 100  # steps
    log_every: int = 10  # steps

    def validate_values(self) -> None:
        """Raise ValueError unless each number is in its range, and what belongs together fits; `strict` calls it."""
        for key, least in _LEAST.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key} is {getattr(self, key)}, but must be at least {least}")
        for key, (low, high, bounds) in _BETWEEN.items():
            value = getattr(self, key)
            if not low < value < high and not (value == low and bounds[0] == "["):
                raise ValueError(f"{key} is {value}, but must be in {bounds[0]}{low:g}, {high:g})")
        for key in ("schemes", "seeds", "length_multiples"):
            values = getattr(self, key)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{key} is {values}, but must have one or more values, each only once")
        for key in ("schemes", "scheme_options"):
            if unknown := [name for name in getattr(self, key) if name not in SCHEMES]:
                raise ValueError(f"{key} has {unknown[0]!r}, but must be of {', '.join(SCHEMES)}")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds has {min(self.seeds)}, but must be 0 or more")
        if self.dataset is not None and self.corpus:
            raise ValueError(f"dataset is {self.dataset!r}, but corpus is given too: choose one of them")
        multiples = self.length_multiples
        if min(multiples) < 1 or multiples != sorted(multiples) or any(multiples[-1] % n for n in multiples):
            raise ValueError(f"length_multiples is {multiples}, but must rise from 1 or more, and divide the last")
        for divisor, whole in _DIVIDES:
            if getattr(self, whole) % getattr(self, divisor):
                raise ValueError(
                    f"{divisor} is {getattr(self, divisor)}, but must divide {whole}, {getattr(self, whole)}"
                )

    def validate_schemes(self) -> None:
        """Raise ValueError unless each scheme can be made with its options."""
        for scheme in {*self.schemes, *self.scheme_options}:
            try:
                with torch.device("meta"):
                    make = get_attention_class(scheme)
                    make(self.hidden_size, self.num_heads, self.longest, self.dropout, **self.options_of(scheme))
            except (TypeError, ValueError) as error:
                options = self.scheme_options.get(scheme, {})
                raise ValueError(f"scheme_options: {scheme!r} cannot be made with {options}: {error}") from error

    @property
    def longest(self) -> int:
        """The greatest length that the models are evaluated at, in tokens."""
        return self.train_length * max(self.length_multiples)

    def options_of(self, scheme: str) -> dict[str, Any]:
        """Return a scheme's arguments beside the sizes; ReRoPE's window is half a training window."""
        default = {"window": max(1, self.train_length // 2)} if scheme == "rerope" else {}
        return {**default, **self.scheme_options.get(scheme, {})}

    def precision_on(self, device: torch.device) -> str:
        """Return "no", "bf16" or "fp16"; for "auto", that of the device."""
        return ("bf16" if device.type == "cuda" else "no") if self.precision == "auto" else self.precision

    def as_dict(self) -> dict[str, Any]:
        """Return all keys, for JSON, YAML and `load_config`."""
        return asdict(self)


_POSITIVE = (
    *("hidden_size", "num_layers", "num_heads", "intermediate_size", "batch_size", "accumulation_steps"),
    *("steps", "evaluation_windows", "checkpoint_every", "log_every"),
)
_LEAST = {**dict.fromkeys(_POSITIVE, 1), "train_length": 8, "vocab_size": 512}
_BETWEEN = {
    **dict.fromkeys(("max_megabytes", "learning_rate", "max_grad_norm"), (0.0, float("inf"), "()")),
    **dict.fromkeys(("held_out", "mask_probability"), (0.0, 1.0, "()")),
    **dict.fromkeys(("dropout", "warmup"), (0.0, 1.0, "[)")),
    "weight_decay": (0.0, float("inf"), "[)"),
}
# A mean loss of some steps is logged; a checkpoint in the midst of them would lose its first half.
_DIVIDES = (
    ("num_heads", "hidden_size"),
    ("accumulation_steps", "batch_size"),
    ("log_every", "checkpoint_every"),
)

PRESETS: dict[str, dict[str, Any]] = {
    # A CPU, in about three minutes: the parts work together. Such models learn little.
    "smoke": {},
    # One GPU, in minutes: three epochs of 15 million tokens.
    "small": {
        "seeds": [0, 1, 2],
        "max_megabytes": 64,
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
        "checkpoint_every": 360,
        "log_every": 20,
    },
    # BERT-base, over night on several GPUs: 13 billion tokens for each scheme.
    "base": {
        "dataset": "wikimedia/wikipedia:20231101.en",
        "max_megabytes": 4000,
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


def load_config(preset: str, file: Path | None = None, **overrides: Any) -> Config:
    """Load a preset, changed by a file in YAML (.yaml, .yml) or TOML (.toml), and that by `overrides` but for None.

    Raises:
        ValueError: an unknown preset; a file that cannot be read; an unknown key, or a value that cannot be.
        ModuleNotFoundError: tomli is missing, before Python 3.11.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} does not exist; there are: {', '.join(PRESETS)}")
    values = dict(PRESETS[preset])
    given = {key: value for key, value in overrides.items() if value is not None}
    for layer in ({} if file is None else _read(file), given):
        values |= layer
        if layer.get("corpus") and "dataset" not in layer:  # where the text is from, the later says alone
            values["dataset"] = None
        elif layer.get("dataset") is not None and "corpus" not in layer:
            values["corpus"] = []
    source = "" if file is None else f"{file} or the command line: "
    known = [entry.name for entry in fields(Config)]
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{source}there is no key {unknown[0]!r}; there are: {', '.join(known)}")
    try:
        return Config(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{source}{error.__cause__}") from error


def _read(path: Path) -> dict[str, Any]:
    import yaml

    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"{path}: a configuration file must end in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix != ".toml" else _toml().loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, (dict, type(None))):
        raise ValueError(f"{path}: holds a {type(content).__name__}, but must hold keys and values")
    return content or {}


def _toml() -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    import tomli

    return tomli
