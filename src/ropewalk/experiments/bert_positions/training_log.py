"""The log of a run while it trains: lines of metrics, TensorBoard's files, and a progress bar."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

METRICS = "metrics.jsonl"
_REPORTS = 4  # of a run, where the console is no terminal


class TrainingLog:
    """The log of a run from step `start` on, for the process that writes; for others, nothing.

    Args:
        folder: of the run, made where it is missing.
        start: how many steps are done. Later lines of the log are cut off: their steps are trained once more.
        logged: up to which of these steps there must be lines.
        steps: how many there will be.
        console: where it shows how far it is: a bar on a terminal, else a line now and then.
        title: what it calls the run there.

    Raises:
        ValueError: on entering, metrics that are damaged, or lack steps before `start`.
    """

    def __init__(self, folder: Path, start: int, logged: int, steps: int, console: Console, title: str) -> None:
        self._folder, self._start, self._logged, self._steps = folder, start, logged, steps
        self._console, self._title = console, title
        self._tokens, self._seconds, self._reported = 0, 0.0, start
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal
        )

    def __enter__(self) -> TrainingLog:
        from torch.utils.tensorboard import SummaryWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / METRICS
        kept = _cut(path, self._start, self._logged) if self._start else []
        if kept:
            self._tokens, self._seconds = kept[-1]["tokens"], kept[-1]["seconds"]
        self._file = path.open("a" if self._start else "w", encoding="utf-8")
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._start + 1)
        self._progress.start()
        self._task = self._progress.add_task(
            self._title, total=self._steps, completed=self._start, shown="the first steps"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._board.close()
        self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics, and show it."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        step, tokens, seconds = line["step"], line["tokens"], line["seconds"]
        speed = (tokens - self._tokens) / max(seconds - self._seconds, 1e-3)
        self._tokens, self._seconds = tokens, seconds
        for name, value in (
            ("loss", line["loss"]),
            ("learning_rate", line["learning_rate"]),
            ("tokens_per_second", speed),
        ):
            self._board.add_scalar(name, value, step)
        shown = f"loss {line['loss']:.3f}, {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, shown=shown)
        is_due = step == self._steps or (step - self._reported) * _REPORTS >= self._steps
        if is_due and not (self._console.is_terminal and step < self._steps):
            self._reported = step
            left = datetime.timedelta(seconds=round(seconds / step * (self._steps - step)))
            remaining = f", {left} left" if step < self._steps else ""
            self._console.print(
                f"{self._title}: step {step} of {self._steps}, {shown}{remaining}", highlight=False, markup=False
            )

    def bring_to_disk(self) -> None:
        """Sync the written files to the disk."""
        os.fsync(self._file.fileno())
        self._board.flush()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics in a run's folder, without one that a kill cut short at the end.

    Raises:
        ValueError: a file that is missing or damaged, by name.
    """
    path = folder / METRICS
    if not path.exists():
        raise ValueError(f"{path} is missing: delete {folder} to start this run anew")
    lines: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts[:-1], start=1):
        try:
            line = json.loads(text)
            if line["step"] <= (lines[-1]["step"] if lines else 0) or {"loss", "tokens", "seconds"} - set(line):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}, is damaged: delete {folder} to start this run anew") from None
        lines.append(line)
    return lines


def _cut(path: Path, start: int, logged: int) -> list[dict[str, Any]]:
    """Cut metrics back to the lines before step `start`, and return them."""
    kept = [line for line in read_metrics(path.parent) if line["step"] <= start]
    last = kept[-1]["step"] if kept else 0
    if last != logged:
        raise ValueError(
            f"{path} ends at step {last}, but its checkpoint has metrics up to step {logged}: delete {path.parent} to "
            "start this run anew"
        )
    cut = path.with_name(path.name + ".unfinished")
    cut.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(cut, path)
    return kept
