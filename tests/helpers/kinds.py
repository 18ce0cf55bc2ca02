"""The kinds of calls that the library remembers: those of an operation, and calls that are run without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ropewalk.ops.attention.plans.find import ATTENTION
from ropewalk.ops.attention.plans.library import LibraryCall
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS, Operation


def kinds_of(operation: Operation[Any] = ATTENTION) -> list[Any]:
    """Return the kinds of an operation that have plans; of `attention`, also those over caches of all lengths."""
    if operation is ATTENTION:
        return [kind for kind in KINDS.found.values() if isinstance(kind, (PlannedCall, LibraryCall))]
    return [kind for key, kind in KINDS.found.items() if key[0] is operation and kind is not None]


@contextmanager
def without_plans() -> Iterator[None]:
    """Run calls as the first of a process."""
    before = kinds.on_gpu, kinds.on_cpu
    kinds.on_gpu = kinds.on_cpu = False
    try:
        yield
    finally:
        kinds.on_gpu, kinds.on_cpu = before
