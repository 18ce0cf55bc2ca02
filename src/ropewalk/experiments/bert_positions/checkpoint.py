"""Checkpoints that are whole or not there: each is a folder of files, and a manifest with their hashes.

A checkpoint is written under another name, brought to disk, and renamed once it is whole; only then the one before it
is deleted. Whatever moment a process is killed at, one whole checkpoint is left.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: its step, and its parts by name, on the CPU."""

    step: int
    parts: dict[str, Any]


def save_checkpoint(folder: Path, step: int, settings: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Write a checkpoint into a run's folder, in the place of those before it.

    Args:
        folder: of the run.
        step: how many steps are done.
        settings: what the run depends on, as JSON can say it: `load_checkpoint` compares it.
        parts: what `torch.save` writes, each into a file of its own.
    """
    path = folder / f"checkpoint-{step:08}"
    unfinished = path.with_name(path.name + _UNFINISHED)
    _clean(folder, keep=None)
    unfinished.mkdir(parents=True)
    hashes = {}
    for name, part in parts.items():
        file = unfinished / f"{name}.pt"
        torch.save(part, file)
        hashes[file.name] = _hash(file.read_bytes())
        _bring_to_disk(file)
    manifest = unfinished / MANIFEST
    content = {"format": FORMAT, "step": step, "settings": settings, "sha256": hashes}
    manifest.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _bring_to_disk(manifest)
    _bring_to_disk(unfinished)
    os.replace(unfinished, path)
    _bring_to_disk(folder)
    _clean(folder, keep=path)


def load_checkpoint(folder: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
    """Load the newest checkpoint of a run's folder, every byte of it verified; None if there is none.

    Raises:
        ValueError: a file that is missing or damaged, or other `settings` than those it was written with; by name.
    """
    found = dict(_checkpoints(folder))
    if not found:
        return None
    path = found[max(found)]
    manifest = _read_manifest(path)
    difference = first_difference(manifest["settings"], json.loads(json.dumps(settings)))
    if difference is not None:
        key, before, now = difference
        raise ValueError(
            f"{path / MANIFEST} is of another configuration: {key} was {before!r} there, and is {now!r} now; "
            f"delete {folder} to start this run anew"
        )
    parts = {}
    for name, expected in manifest["sha256"].items():
        content = _read(path / name)
        if _hash(content) != expected:
            raise ValueError(_damaged(path / name))
        parts[name.removesuffix(".pt")] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return Checkpoint(manifest["step"], parts)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key by which two mappings differ, and its two values; nested names have dots."""
    for key in (*before, *(key for key in now if key not in before)):
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            within = first_difference(a, b)
            if within is not None:
                return f"{key}.{within[0]}", *within[1:]
        elif a != b:
            return key, a, b
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    text = _read(path / MANIFEST)
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(_damaged(path / MANIFEST))
    return content


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ValueError(_damaged(file, "is missing")) from None


def _damaged(file: Path, what: str = "is damaged") -> str:
    return f"{file} {what}: delete {file.parent.parent} to start this run anew"


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """List the whole checkpoints of a folder, by their step."""
    for path in folder.glob("checkpoint-*"):
        if named := _NAME.fullmatch(path.name):
            yield int(named[1]), path


def _clean(folder: Path, keep: Path | None) -> None:
    """Delete unfinished checkpoints, and those other than `keep`; none of these where it is None."""
    for path in folder.glob(f"checkpoint-*{_UNFINISHED}"):
        shutil.rmtree(path)
    for _, path in _checkpoints(folder) if keep is not None else ():
        if path != keep:
            shutil.rmtree(path)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bring_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
