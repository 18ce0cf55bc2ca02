"""Options of a run: cases, implementations, peers, the device, and the record's path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.bench.core.peers import find_peer
from ropewalk.bench.core.records import default_path
from ropewalk.bench.core.timing import check_device

MISSING = "missing"  # begins what records say of a peer that cannot be measured
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Options:
    """The choices that a user has. A benchmark refuses those that it does not know."""

    cases: Sequence[str] = ()  # by name; none: all that suit the device
    impls: Sequence[str] = ()  # of ours; none: those that the benchmark chooses
    modes: Sequence[str] = ()  # of the benchmark's; none: all
    peers: str = "auto"  # those that import; or "none", or names with commas between
    protocols: Sequence[str] = ()  # "hot", "cool"; none: each mode's own
    dtype: str | None = None  # one of `DTYPES` for all cases; None: each case's own
    rounds: int | None = None  # how often each call is timed, at most; None: the benchmark's own number
    seed: int = 0  # of the random inputs
    device: str | None = None  # "cuda" or "cpu"; None: the GPU if there is one
    output: Path | None = None  # the record's file; None: one under ./records/
    resume: bool = False  # whether the file is a record to go on with; otherwise it must not exist
    quick: bool = False  # small cases, for correctness; of several processes alone
    processes: int | None = None  # to start, where torchrun did not; None: one for each GPU, or 2 on a CPU

    def __post_init__(self) -> None:
        if self.resume and self.output is None:
            raise ValueError("there is no record to resume: say with output which")

    @property
    def named_peers(self) -> list[str]:
        return [] if self.peers in ("auto", "none") else [name.strip() for name in self.peers.split(",")]


def choose_device(name: str | None) -> torch.device:
    """Choose the device by name, or the GPU if there is one; raise unless calls can be timed there."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    try:
        device = torch.device(name)
    except RuntimeError:  # torch lists every device that it has ever had
        raise ValueError(f"the device is {name!r}, but must be 'cpu', 'cuda', or one GPU as in 'cuda:0'") from None
    check_device(device)
    return device


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} does not exist; there are: {', '.join(known)}")


def choose_peers(known: Mapping[str, Any], options: Options, device: torch.device) -> tuple[list[Any], dict[str, str]]:
    """Choose the peers to measure; returns them, and for each its version, or why it is missing."""
    check_names("peer", options.named_peers, known)
    found, versions = list[Any](), dict[str, str]()
    for name in dict.fromkeys(known if options.peers == "auto" else options.named_peers):
        version, reason = find_peer(known[name], device)
        if reason is not None and options.peers != "auto":
            raise ValueError(f"peer {name!r} cannot be measured: {reason}")
        found += [known[name]] if reason is None else []
        versions[name] = version or f"{MISSING}: {reason}"
    return found, versions


def choose_path(output: Path | None, run: Mapping[str, Any]) -> Path:
    """Choose the record's path; raise if a file is there."""
    path = output or default_path(run)
    if path.exists():
        raise ValueError(f"{path} exists already, and is not overwritten")
    return path
