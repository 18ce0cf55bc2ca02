"""The tensors that `append_kv` writes: whether they lie apart, by their addresses.

A plan holds for calls at other addresses, so each call asks; a distance that is known costs a look into a set.
"""

from __future__ import annotations

from torch import Tensor

from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.formats import Format, format_of
from ropewalk.ops.rope.validate import share_memory

_MAX_DISTANCES = 4096  # a stream of ever new caches must not fill the memory


class WrittenPair:
    """Two tensors of these kinds that are written: whether they lie apart, by their addresses."""

    def __init__(self, names: tuple[str, str], x: Tensor, other: Tensor) -> None:
        self.names = names
        self.kinds = x.shape, x.stride(), other.shape, other.stride()
        self.itemsize = x.element_size()
        self.distances: set[int] = set()  # at which they are known to share nothing

    def check(self, address: int, other: int) -> None:
        """Raise where they share memory."""
        distance = other - address
        if share_memory(*self.kinds, distance, self.itemsize):
            name, other_name = self.names
            raise ValueError(
                f"{other_name} shares memory with {name}, and starts {distance} bytes after it, but must have memory "
                f"of its own"
            )
        if len(self.distances) >= _MAX_DISTANCES:
            self.distances.clear()
        self.distances.add(distance)


def find_written(call: AppendCall) -> tuple[WrittenPair, WrittenPair | None]:
    """Return the caches of a call, and its scales where they are written."""
    caches = WrittenPair(("k_cache", "v_cache"), call.k_cache, call.v_cache)
    if call.k_scale is None or call.v_scale is None or not writes_scales(call):
        return caches, None
    return caches, WrittenPair(("k_scale", "v_scale"), call.k_scale, call.v_scale)


def check_written(call: AppendCall) -> None:
    """Raise where caches share memory, or scales that are written."""
    caches, scales = find_written(call)
    caches.check(call.k_cache.data_ptr(), call.v_cache.data_ptr())
    if scales is not None and call.k_scale is not None and call.v_scale is not None:
        scales.check(call.k_scale.data_ptr(), call.v_scale.data_ptr())


def writes_scales(call: AppendCall) -> bool:
    """Say whether the scales of a call are written; else they are read."""
    return format_of(call.k_cache, call.k) in (Format.INT8, Format.INT4)
