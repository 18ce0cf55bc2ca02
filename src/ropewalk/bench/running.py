"""What every benchmark's run needs: the names it was given, its peers, its record's path, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropewalk.bench.attention_cases import AttentionCase
from ropewalk.bench.cases import Case
from ropewalk.bench.peers import Library, find_peer
from ropewalk.bench.records import default_path
from ropewalk.bench.timing import check_device

AnyPeer = TypeVar("AnyPeer", bound=Library)
AnyCase = TypeVar("AnyCase", Case, AttentionCase)
MISSING = "missing"  # begins what records say of a peer that cannot be measured
DTYPES = ("float16", "bfloat16", "float32")


def choose_device(name: str | None) -> torch.device:
    """The device of a name, or the GPU if there is one; raise unless calls can be timed there."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device(device)
    return device


def check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise unless all names are known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} does not exist; there are: {', '.join(known)}")


def choose_dtype(cases: Sequence[AnyCase], dtype: str | None) -> list[AnyCase]:
    """The cases in another dtype, or as they are where there is none."""
    if dtype is None:
        return list(cases)
    check_names("dtype", [dtype], DTYPES)
    return [replace(case, dtype=dtype) for case in cases]


def choose_cases(
    cases: Sequence[AnyCase],
    names: Sequence[str],
    device: torch.device,
    too_large: Callable[[AnyCase], bool],
    console: Console,
) -> list[AnyCase]:
    """The cases of these names, or where none is named all but those that are too large for a CPU; it says which."""
    check_names("case", names, dict.fromkeys(case.name for case in cases))
    if names or device.type != "cpu":
        return [case for case in cases if case.name in names or not names]
    left_out = dict.fromkeys(case.name for case in cases if too_large(case))
    if left_out:
        console.print(f"left out on a CPU unless named with --case: {', '.join(left_out)}", highlight=False)
    return [case for case in cases if case.name not in left_out]


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
        versions[name] = version or f"{MISSING}: {reason}"
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
