"""Rows of the training benchmark's records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.bench.core.records import read_lines
from ropewalk.bench.core.timing import Quantiles

BENCHMARK = "training"


@dataclass(frozen=True)
class TrainingRow:
    """The result of one candidate on one case, in one precision. Times are of one step, in microseconds."""

    case: str
    precision: str  # "autocast": float32 weights under bfloat16 autocast; "bf16": everything in bfloat16
    candidate: str
    batch: int
    tokens: int  # of a row, with padding
    n_tokens: int  # of the batch, without
    parameters: int
    status: str  # "ok", or "wrong": then it was not timed
    hidden_error: float  # root mean square over tokens, over their norm, against the same model in float32
    gradient_error: float  # the same, of the first layer's gradients
    time: Quantiles | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None  # that a step holds beyond weights and the optimiser's state
    speed_over: dict[str, float] | None = None  # ours: speed over each other candidate's, median of rounds


@dataclass(frozen=True)
class TrainingRecord:
    """A record file: the line about the run, and the rows."""

    run: dict[str, Any]
    rows: list[TrainingRow]


def read_training_record(path: Path) -> TrainingRecord:
    """Read a record of a run."""
    run, lines = read_lines(path, BENCHMARK)
    for line in lines:
        line["time"] = None if line["time"] is None else Quantiles(**line["time"])
    return TrainingRecord(run, [TrainingRow(**line) for line in lines])
