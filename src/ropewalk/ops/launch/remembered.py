"""Tables and other results of schemes, remembered for the calls that follow and for CUDA graphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Identity = tuple[Any, ...]
_MOST_REMEMBERED = 16
_remembered: OrderedDict[Any, Any] = OrderedDict()
_captured: dict[Any, Any] = {}  # read by CUDA graphs: they are never told that memory is gone, so it must not go
_lock = threading.Lock()


def remember(
    kind: tuple[Any, ...],
    known_by: Identity | None,
    device: torch.device,
    make: Callable[[], Any],
) -> Any:
    """Return a copy of the result of `make`, remembered by kind, scheme and device; make it anew without a key."""
    if known_by is None:
        return make()
    key = (kind, device, known_by)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _lock:
        if key in _remembered:  # None, too: a scheme that rotates nothing is not to be asked again
            _remembered.move_to_end(key)
            if capturing:
                _captured[key] = _remembered[key]
            return _remembered[key]
    with torch.inference_mode(False), torch.no_grad():
        result = _copy(make())  # it may be a view of a scheme's tensor
    if not capturing:  # what a graph makes exists while it is replayed
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the next reader may be on another stream
        with _lock:
            _remembered[key] = result
            while len(_remembered) > _MOST_REMEMBERED:
                _remembered.popitem(last=False)
    return result


def are_remembered(tensors: Iterable[Tensor]) -> bool:
    """Say whether all of some tensors lie in what is remembered, whose making every stream has waited for."""
    with _lock:
        values = [x for entry in _remembered.values() for x in (entry if isinstance(entry, tuple) else (entry,))]
    found = {x.untyped_storage().data_ptr() for x in values if isinstance(x, Tensor)}
    return found.issuperset([x.untyped_storage().data_ptr() for x in tensors])


def _copy(value: Any) -> Any:
    """Return a copy of a tensor or of a named tuple."""
    if isinstance(value, tuple):
        return type(value)(*map(_copy, value))
    return value.clone() if isinstance(value, Tensor) else value
