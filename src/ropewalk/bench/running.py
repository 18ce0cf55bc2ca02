"""What every benchmark's run needs: the names it was given, its peers, its record's path, a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropewalk.bench.peers import Library, find_peer
from ropewalk.bench.records import default_path

AnyPeer = TypeVar("AnyPeer", bound=Library)


def check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise unless all names are known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} does not exist; there are: {', '.join(known)}")


def choose_peers(
    known: Mapping[str, AnyPeer], peers: str, device: torch.device
) -> tuple[list[AnyPeer], dict[str, str]]:
    """The peers to measure, and for each that was looked for its version, or why it is missing.

    `peers` is "auto" for those that import, "none", or names with commas between.
    """
    if peers == "none":
        return [], {}
    names = list(known) if peers == "auto" else [name.strip() for name in peers.split(",")]
    chosen: list[AnyPeer] = []
    versions = {}
    check_names("peer", names, known)
    for name in names:
        version, reason = find_peer(known[name], device)
        if reason is None:
            chosen.append(known[name])
        elif peers != "auto":
            raise ValueError(f"peer {name!r} cannot be measured: {reason}")
        versions[name] = version or f"missing: {reason}"
    return chosen, versions


def choose_path(output: Path | None, run: Mapping[str, Any]) -> Path:
    """Where the record goes; raise if there is something."""
    path = output or default_path(run)
    if path.exists():
        raise ValueError(f"{path} exists already, and is not overwritten")
    return path


def progress_bar(console: Console) -> Progress:
    """Steps done, time taken, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
