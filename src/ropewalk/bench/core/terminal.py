"""The console and the progress of a run: a bar in a terminal, a line a step elsewhere."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StepProgress(Progress):
    """A bar in a terminal; elsewhere, as in a file, a line when a step is done.

    With `seconds_between_lines`, steps that end sooner after a line have none, except the last.
    """

    def __init__(self, console: Console, seconds_between_lines: float = 0.0) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._seconds_between_lines = seconds_between_lines
        self._last_line = -math.inf

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance by `advance` steps."""
        super().advance(task_id, advance)
        if self.console.is_terminal:
            return
        task, now = self._tasks[task_id], self.get_time()
        if now - self._last_line >= self._seconds_between_lines or task.finished:
            self._last_line = now
            done = f"{task.completed:.0f}/{task.total or 0:.0f} {task.description}, {task.elapsed or 0.0:.0f} s"
            self.console.print(done, markup=False, highlight=False)


def default_console() -> Console:
    """Make a console as wide as the terminal, or wide enough for the summary where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def progress_bar(console: Console, seconds_between_lines: float = 0.0) -> StepProgress:
    """Make a bar with steps done, time taken and time left; where there is no terminal, lines."""
    return StepProgress(console, seconds_between_lines)
