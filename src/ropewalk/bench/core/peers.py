"""Other libraries, found by import."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch

from ropewalk.bench.core.records import version_of


@dataclass(frozen=True)
class Library:
    name: str
    module: str  # must import
    distribution: str  # has the version
    needs_gpu: bool


def load_module(name: str) -> ModuleType:
    """Import a peer's module.

    FlashAttention-4 is in the package `flash_attn` too. xFormers takes any such package for FlashAttention-2 and would
    not import; FlashAttention-3 it would run in its own stead. Without the compiled part of FlashAttention-2 it sees
    none of them, and runs PyTorch's FlashAttention-2.
    """
    find = importlib.util.find_spec
    if name.partition(".")[0] != "xformers" or find("flash_attn_2_cuda") is not None:
        return importlib.import_module(name)
    hidden = ("flash_attn", "flash_attn_3")
    importlib.util.find_spec = lambda name, package=None: (
        None if name.partition(".")[0] in hidden else find(name, package)
    )
    try:
        return importlib.import_module(name)
    finally:
        importlib.util.find_spec = find


def find_peer(peer: Library, device: torch.device) -> tuple[str | None, str | None]:
    """Return (version, None) if the peer can be used on `device`, otherwise (None, why not)."""
    if peer.needs_gpu and device.type != "cuda":
        return None, "needs a GPU"
    try:
        load_module(peer.module)
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Exception as error:  # a broken installation raises anything; the message may hold paths of this machine
        return None, f"{peer.module} does not import: {type(error).__name__}"
    return version_of(peer.distribution) or "of unknown version", None
