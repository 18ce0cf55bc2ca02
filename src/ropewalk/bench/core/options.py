"""Options of a run: cases, implementations, peers, the device, and the record's path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ropewalk.bench.core.peers import Library, find_peer
from ropewalk.bench.core.records import default_path
from ropewalk.bench.core.timing import check_device

AnyPeer = TypeVar("AnyPeer", bound=Library)
MISSING = "missing"  # begins what records say of a peer that cannot be measured
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Options:
    """The choices that a user has. A benchmark refuses those that it does not know.

    Args:
        cases: names of cases; none for all that suit the device.
        impls: our implementations; none for those that the benchmark chooses.
        modes: of the benchmark's; none for all.
        peers: "auto" for those that import, "none", or names with commas between.
        protocols: "hot", "cool"; none for each mode's own.
        dtype: "float16", "bfloat16" or "float32" for all cases; None for each case's own.
        rounds: how often each call is timed, at most; None for the benchmark's own number.
        seed: of the random inputs.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        output: the record's file, or None for one under ./results/.
        resume: whether the file is a record to go on with; otherwise it must not exist.
        quick: small cases, for correctness; of several processes alone.
        processes: how many to start, where torchrun did not; None: one for each GPU, or 2 on a CPU.
    """

    cases: Sequence[str] = ()
    impls: Sequence[str] = ()
    modes: Sequence[str] = ()
    peers: str = "auto"
    protocols: Sequence[str] = ()
    dtype: str | None = None
    rounds: int | None = None
    seed: int = 0
    device: str | None = None
    output: Path | None = None
    resume: bool = False
    quick: bool = False
    processes: int | None = None


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


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise unless all names are known."""
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r} does not exist; there are: {', '.join(known)}")


def choose_peers(
    known: Mapping[str, AnyPeer], peers: str, device: torch.device
) -> tuple[list[AnyPeer], dict[str, str]]:
    """Choose the peers to measure by `Options.peers`; returns them, and for each its version, or why it is missing."""
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
