"""Other libraries, found by import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from ropewalk.bench.core.records import version_of


@dataclass(frozen=True)
class Library:
    name: str
    module: str  # must import
    distribution: str  # has the version
    needs_gpu: bool


def find_peer(peer: Library, device: torch.device) -> tuple[str | None, str | None]:
    """Return (version, None) if the peer can be used on `device`, otherwise (None, why not)."""
    if peer.needs_gpu and device.type != "cuda":
        return None, "needs a GPU"
    try:
        importlib.import_module(peer.module)
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Exception as error:  # a broken installation raises anything; the message may hold paths of this machine
        return None, f"{peer.module} does not import: {type(error).__name__}"
    return version_of(peer.distribution) or "of unknown version", None
