"""The console and the progress bar of a run."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def default_console() -> Console:
    """Make a console as wide as the terminal, or wide enough for the summary where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def progress_bar(console: Console) -> Progress:
    """Make a bar with steps done, time taken and time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
