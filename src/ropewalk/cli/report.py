"""`ropewalk report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.options import user_errors


def report(
    records: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Records of bench rope, attention, all or training."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The page, a new file.")] = Path(
        "report.html"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the page if it exists.")] = False,
) -> None:
    """Write a page of records: gains, losses, machines, every row. One file that loads nothing from anywhere."""
    with user_errors():
        from ropewalk.bench.report.page import write_report

        path = write_report(records, output, force=force)
    typer.echo(f"report: {path} ({path.stat().st_size / 2**20:.1f} MiB)")
