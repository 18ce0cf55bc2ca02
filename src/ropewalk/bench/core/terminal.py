"""The console and the progress of a run: a bar in a terminal, a line a step elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn


class StepProgress(Progress):
    """A bar in a terminal; elsewhere, as in a file, a line when a step is done."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        if not self.console.is_terminal:
            task = self._tasks[task_id]
            done = f"{task.completed:.0f}/{task.total or 0:.0f} {task.description}, {task.elapsed or 0.0:.0f} s"
            self.console.print(done, markup=False, highlight=False)


def default_console() -> Console:
    """Make a console as wide as the terminal, or wide enough for the summary where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def progress_bar(console: Console) -> StepProgress:
    """Make a bar with steps done, time taken and time left; where there is no terminal, lines."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    return StepProgress(*columns, console=console, disable=not console.is_terminal)
