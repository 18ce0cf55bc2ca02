"""The record of a comparison: rows of four kinds, as JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ropewalk.bench.core.records import RecordWriter, read_lines

BENCHMARK = "bert-positions"
HUGGING_FACE = "Hugging Face BERT"  # as it is, in rows of speed


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
    rows: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for number, line in enumerate(lines, start=2):
        values = dict(line)
        kind = values.pop("kind", None)
        try:
            rows[kind].append(_KINDS[kind](**values))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number}: is no row of {', '.join(_KINDS)}: {error}") from None
    return BertRecord(run, *rows.values())
