"""Options of a run: cases, dtypes, peers, the device, and the record's path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from rich.console import Console

from ropewalk.bench.core.peers import Library, find_peer
from ropewalk.bench.core.records import default_path
from ropewalk.bench.core.timing import check_device


class BenchCase(Protocol):
    """A case of any benchmark: a frozen dataclass with a name and a dtype."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str:
        """The name by which it is chosen."""

    @property
    def dtype(self) -> str:
        """The name of PyTorch's dtype."""


AnyPeer = TypeVar("AnyPeer", bound=Library)
AnyCase = TypeVar("AnyCase", bound=BenchCase)
MISSING = "missing"  # begins what records say of a peer that cannot be measured
DTYPES = ("float16", "bfloat16", "float32")


def choose_device(name: str | None) -> torch.device:
    """Choose the device by name, or the GPU if there is one; raise unless calls can be timed there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # torch lists every device that it has ever had
        raise ValueError(f"the device is {name!r}, but must be 'cpu', 'cuda', or one GPU as in 'cuda:0'") from None
    check_device(device)
    return device


def check_names(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise unless all names are known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} does not exist; there are: {', '.join(known)}")


def choose_dtype(cases: Sequence[AnyCase], dtype: str | None) -> list[AnyCase]:
    """Return the cases in another dtype, or as they are where there is none."""
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
    """Choose the cases by name, or all but those too large for a CPU, which are printed."""
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
    """Choose the peers to measure; returns them, and for each its version, or why it is missing.

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
    """Choose the record's path; raise if a file is there."""
    path = output or default_path(run)
    if path.exists():
        raise ValueError(f"{path} exists already, and is not overwritten")
    return path
