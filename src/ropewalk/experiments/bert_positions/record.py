"""The record of a comparison: rows of four kinds, as JSON lines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ropewalk.bench.core.records import RecordWriter, describe_run, read_lines, version_of

if TYPE_CHECKING:
    from ropewalk.experiments.bert_positions.config import Config
    from ropewalk.experiments.bert_positions.corpus import Corpus

BENCHMARK = "bert-positions"
HUGGING_FACE = "Hugging Face BERT"  # as it is, in rows of speed
TRAINED_BY = ("transformers", "tokenizers", "accelerate", "datasets")


@dataclass(frozen=True)
class TrainingRow:
    """The training of one scheme and seed."""

    kind: str = field(default="training", init=False)
    scheme: str
    seed: int
    steps: list[int]  # after how many steps
    losses: list[float]  # nats per masked token, each the mean over the steps since the entry before
    tokens_per_second: float  # without padding
    seconds: float
    parameters: int


@dataclass(frozen=True)
class EvaluationRow:
    """The loss of one scheme and seed on held-out text in windows of one length."""

    kind: str = field(default="evaluation", init=False)
    scheme: str
    seed: int
    length: int
    loss: float  # nats per masked token
    accuracy: float  # the part of masked tokens that are the model's first guess
    n_labels: int  # masked tokens


@dataclass(frozen=True)
class SpeedRow:
    """A training step of one model at one length; numbers are None where it ran out of memory."""

    kind: str = field(default="speed", init=False)
    model: str  # a scheme, or `HUGGING_FACE`
    attention: str  # "ropewalk", "sdpa" or "eager"
    length: int
    batch: int
    tokens_per_second: float | None  # without padding, by the median step
    step_ms: tuple[float, float, float] | None  # the 20 %, 50 % and 80 % quantiles over rounds
    peak_bytes: int | None  # that a step allocates at its peak beyond what it found; None on a CPU


@dataclass(frozen=True)
class ExpoSBRow:
    """A claim about ExpoSB, and its verdict."""

    kind: str = field(default="exposb", init=False)
    claim: str
    measured: dict[str, float]
    verdict: str  # "true", "false", "in part" or "not shown"
    finding: str  # in words


Row: TypeAlias = TrainingRow | EvaluationRow | SpeedRow | ExpoSBRow
_KINDS: dict[str, type[Row]] = {
    "training": TrainingRow,
    "evaluation": EvaluationRow,
    "speed": SpeedRow,
    "exposb": ExpoSBRow,
}


@dataclass(frozen=True)
class BertRecord:
    """A record file: the line about the run, and the rows of each kind."""

    run: dict[str, Any]
    training: list[TrainingRow]
    evaluation: list[EvaluationRow]
    speed: list[SpeedRow]
    exposb: list[ExpoSBRow]


def describe_experiment(config: Config, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Describe the run: machine, versions, configuration and text, without a path of the machine."""
    settings = config.as_dict()
    settings["corpus"] = [PurePath(path).name for path in config.corpus]
    if config.dataset is not None and PurePath(config.dataset).is_absolute():
        settings["dataset"] = PurePath(config.dataset).name
    versions = {name: version_of(name) or "missing" for name in TRAINED_BY}
    facts = ("name", "n_documents", "n_bytes", "sha256", "vocab_size")
    return {
        **describe_run(BENCHMARK, device, versions),
        "config": settings,
        "corpus": {
            **{name: getattr(corpus, name) for name in facts},
            "n_tokens": corpus.tokens.numel(),
            "n_windows": len(corpus.windows),
            "held_out": list(corpus.held_out.shape),
        },
    }


def write_bert_record(path: Path, run: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write a record; it replaces an earlier one once it is whole."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.unlink(missing_ok=True)
    with RecordWriter(unfinished, run) as writer:
        for row in rows:
            writer.append(row)
    os.replace(unfinished, path)


def read_bert_record(path: Path) -> BertRecord:
    """Read a record of `write_bert_record`."""
    run, lines = read_lines(path, BENCHMARK)
    rows: dict[type[Row], list[Any]] = {kind: [] for kind in _KINDS.values()}
    for number, line in enumerate(lines, start=2):
        try:
            row = row_of_line(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        rows[type(row)].append(row)
    return BertRecord(run, *(rows[kind] for kind in _KINDS.values()))


def row_of_line(line: Mapping[str, Any]) -> Row:
    """Make the row that `dataclasses.asdict` made this of, after it was JSON."""
    kind = _KINDS.get(line.get("kind", ""))
    if kind is None:
        raise ValueError(f"kind is {line.get('kind')!r}, but must be one of {', '.join(map(repr, _KINDS))}")
    expected, given = {entry.name for entry in dataclasses.fields(kind)}, set(line)
    if expected != given:
        missing, unknown = sorted(expected - given), sorted(given - expected)
        raise ValueError(f"a row of kind {line['kind']!r} lacks {missing} and has {unknown}, which are unknown")
    values = {name: value for name, value in line.items() if name != "kind"}
    if values.get("step_ms") is not None:
        values["step_ms"] = tuple(values["step_ms"])
    return kind(**values)
