"""The configuration of a comparison: presets, a file (YAML or TOML) and the command line, the last of which wins."""

import sys
from dataclasses import dataclass, field, fields
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import yaml
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ropewalk.experiments.own_schemes import load_object, make_scheme
from ropewalk.modules.bert import BERTAttention, get_attention_class

SCHEMES = ("none", "standard", "absolute", "rope", "exposb", "alibi", "t5", "rerope")
PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())
_RANGES = {
    pd.Interval(1, inf, "left"): "hidden_size num_layers num_heads intermediate_size batch_size accumulation_steps "
    "steps evaluation_windows checkpoint_every log_every",
    pd.Interval(8, inf, "left"): "train_length",
    pd.Interval(512, inf, "left"): "vocab_size",
    pd.Interval(0, inf, "neither"): "max_megabytes learning_rate max_grad_norm",
    pd.Interval(0, inf, "left"): "weight_decay",
    pd.Interval(0, 1, "neither"): "held_out mask_probability",
    pd.Interval(0, 1, "left"): "dropout warmup",
}


@strict  # checks types, and calls what is named `validate_…`
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
    decay: Literal["linear", "cosine", "quadratic"] = "linear"  # of the learning rate, to 0
    weight_decay: float | int = 0.01
    max_grad_norm: float | int = 1.0
    mask_probability: float = 0.15
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # bf16 on a GPU, else no
    compile_layers: bool = False  # in training, by torch.compile: fewer passes over memory, for a GPU that is filled
    length_multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # of train_length: where it is evaluated
    evaluation_windows: int = 32  # of the greatest length, at most
    checkpoint_every: int = 100  # steps
    log_every: int = 10  # steps
    time_steps: bool = True  # whether the speed of training steps is measured, beside transformers' BERT

    def validate_values(self) -> None:
        """Raise ValueError unless each value is in its range, and what belongs together fits."""
        fits = [(key, getattr(self, key) in x, f"be in {x}") for x, keys in _RANGES.items() for key in keys.split()]
        for key in ("schemes", "seeds", "length_multiples"):
            values = getattr(self, key)
            fits.append((key, 0 < len(set(values)) == len(values), "have one or more values, each only once"))
        fits.append(("seeds", all(seed >= 0 for seed in self.seeds), "be 0 or more"))
        one_text = self.dataset is None or not self.corpus
        fits.append(("dataset", one_text, "be None beside corpus: choose one of them"))
        multiples = [1, *self.length_multiples]
        rise = sorted(multiples) == multiples and not any(multiples[-1] % n for n in multiples)
        fits.append(("length_multiples", rise, "rise from 1 or more, and divide the last"))
        # A mean loss of some steps is logged; a checkpoint in the midst of them would lose its first half.
        for key, whole in (("accumulation_steps", "batch_size"), ("log_every", "checkpoint_every")):
            size = getattr(self, whole)
            fits.append((key, size % max(1, getattr(self, key)) == 0, f"divide {whole}, {size}"))
        for key, is_so, must in fits:
            if not is_so:
                raise ValueError(f"{key} is {getattr(self, key)!r}, but must {must}")

    def validate_schemes(self) -> None:
        """Raise ValueError unless each scheme can be built with its options."""
        for scheme in {*self.schemes, *self.scheme_options}:
            make = attention_class_of(scheme)
            try:
                with torch.device("meta"):
                    make(self.hidden_size, self.num_heads, self.longest, self.dropout, **self.options_of(scheme))
            except Exception as error:  # of their code too, whatever it is
                options = self.scheme_options.get(scheme, {})
                raise ValueError(f"scheme_options: {scheme!r} cannot be built with {options}: {error}") from error

    @property
    def longest(self) -> int:
        """The greatest length that the models are evaluated at, in tokens."""
        return self.train_length * max(self.length_multiples)

    def options_of(self, scheme: str) -> dict[str, Any]:
        """Return a scheme's arguments beside the sizes; ReRoPE's window is half a training window."""
        default = {"window": max(1, self.train_length // 2)} if scheme == "rerope" else {}
        return {**default, **self.scheme_options.get(scheme, {})}

    def precision_on(self, device: torch.device) -> str:
        return ("bf16" if device.type == "cuda" else "no") if self.precision == "auto" else self.precision


def attention_class_of(scheme: str) -> type[BERTAttention]:
    """Return the attention of a scheme: by name, or of your own as “module:Name”.

    That names a subclass of `BERTAttention`, or anything that `make_scheme` makes a scheme of.
    """
    if ":" not in scheme:
        return get_attention_class(scheme)
    found = load_object(scheme)
    if isinstance(found, type) and issubclass(found, BERTAttention):
        return found

    class OwnBERTAttention(BERTAttention):
        """`BERTAttention` with the scores of a scheme from outside of this package."""

        def _make_positions(self, **options: Any) -> None:
            self._position = self._check_position(make_scheme(scheme, self.num_heads, **options))

    return OwnBERTAttention


def load_config(preset: str, file: Path | None = None, **overrides: Any) -> Config:
    """Load a preset, changed by a file (.yaml, .yml, .toml), and that by `overrides` but for None, or ValueError."""
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} does not exist; there are: {', '.join(PRESETS)}")
    values, known = dict(PRESETS[preset]), [entry.name for entry in fields(Config)]
    for layer in (_read(file) if file else {}, {key: x for key, x in overrides.items() if x is not None}):
        if layer.get("corpus"):  # where the text is from, the later says alone
            values["dataset"] = None
        elif layer.get("dataset") is not None:
            values["corpus"] = []
        values |= layer
    source = f"{file} or the command line: " if file else ""
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{source}there is no key {unknown[0]!r}; there are: {', '.join(known)}")
    try:
        return Config(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{source}{error.__cause__}") from error


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"{path}: a configuration file must end in .yaml, .yml or .toml")
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        text = path.read_text(encoding="utf-8")
        content = toml.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, but must hold keys and values")
    return content
