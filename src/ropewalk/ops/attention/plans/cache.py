"""Plans by key: made at a key's second call, bounded in number and in the bytes that they read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import UnplannableError
from ropewalk.ops.attention.tables import are_remembered

MAX_PLANS = 1024
MAX_TABLE_BYTES = 1 << 30  # of the schemes' tables that plans read, and so keep alive
MAX_PLAIN = 64  # causalities and scales of models' layers
MAX_BACKWARDS = 32  # of one forward: gradients that are slices of ever-new lengths have ever-new strides
on_gpu = not gpu.is_rocm()  # plans launch by NVIDIA's driver
on_cpu = False  # in Triton's interpreter, for tests
UNKNOWN, SEEN = object(), object()  # no plan was looked for; one is made the next time


class Cache:
    """Plans by key, made at a key's second call: a length that never comes again is not worth one."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.seen: set[int] = set()
        self.plain: dict[Any, Any] = {}  # the last one for a causality and a scale: `repeat_plain`
        self.tables: dict[int, int] = {}  # bytes that plans keep alive, by the storages' addresses
        self.lock = threading.Lock()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the plan of a key; None where there is none yet, or none is possible.

        A plan's `constants` are all tensors that it keeps.
        """
        plan = self.found.get(key, UNKNOWN)
        if plan is not UNKNOWN:
            return plan
        digest = hash(key)
        with self.lock:
            if digest not in self.seen:
                if len(self.seen) >= 8 * MAX_PLANS:
                    self.seen.clear()
                self.seen.add(digest)
                return None
        plan = make()
        constants = getattr(plan, "constants", ())
        if not are_remembered(constants):
            for device in {x.device for x in constants if x.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # the next reader may be on another stream
        tables = {x.data_ptr(): x.nbytes() for x in (y.untyped_storage() for y in constants)}
        with self.lock:
            if len(self.found) >= MAX_PLANS or sum((self.tables | tables).values()) > MAX_TABLE_BYTES:
                self.found.clear()
                self.plain.clear()
                self.tables.clear()
            self.found[key] = plan
            self.tables |= tables
        return plan

    def clear(self) -> None:
        """Drop all plans."""
        with self.lock:
            self.found.clear()
            self.plain.clear()
            self.seen.clear()
            self.tables.clear()


FORWARDS = Cache()


CALLS = Cache()


NORMS = Cache()


def keep_backward(backwards: dict[Any, Any], key: Any, found: Any) -> None:
    """Keep the plan of a backward, and not too many of them."""
    if len(backwards) >= MAX_BACKWARDS:
        backwards.clear()
    backwards[key] = found


def addresses_of(inputs: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of tensors; None where one is no multiple of 16 bytes, which kernels are compiled for.

    None, too, where a tensor has no memory: it is empty, or PyTorch knows its values without, as those of zeros.
    """
    addresses: list[int] = []
    union = 0
    try:
        for x in inputs:  # one loop: a map, a reduction and a search take the host longer
            address = x.data_ptr()
            if not address:
                return None
            addresses.append(address)
            union |= address
    except RuntimeError:  # a tensor that outlived its transform of torch.func: autograd unwraps it, a plan does not
        return None
    return None if union & 15 else addresses


def plan_or_none(kind: Callable[..., Any], *arguments: Any) -> Any:
    """Make a plan; None where a launcher takes a step that no plan can repeat."""
    try:
        return kind(*arguments)
    except UnplannableError:
        return None


def existing(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def may_plan(x: Tensor) -> bool:
    """Say whether a call may run by a plan now: nothing captures or watches launches, and its device is the current."""
    if not x.is_cuda:
        return on_cpu and x.device.type == "cpu"
    return (
        on_gpu
        and x.get_device() == torch._C._cuda_getDevice()
        and not torch._C._cuda_isCurrentStreamCapturing()
        and not gpu.is_launch_watched()
    )
