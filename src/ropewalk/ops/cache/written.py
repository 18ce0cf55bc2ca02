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
    """Two tensors of a call that are written: whether they lie apart, by their addresses."""

    def __init__(self, call: AppendCall, name: str, other_name: str) -> None:
        self.names = name, other_name
        x, other = getattr(call, name), getattr(call, other_name)
        self.kinds = x.shape, x.stride(), other.shape, other.stride()
        self.itemsize = x.element_size()
        there = [name for name, x in call._asdict().items() if isinstance(x, Tensor)]
        self.indices = there.index(name), there.index(other_name)  # among the addresses of a call
        self.distances: set[int] = set()  # at which they are known to share nothing

    def check(self, distance: int) -> None:
        """Raise where they share memory."""
        if share_memory(*self.kinds, distance, self.itemsize):
            name, other_name = self.names
            raise ValueError(
                f"{other_name} shares memory with {name}, and starts {distance} bytes after it, but must have memory "
                f"of its own"
            )
        if len(self.distances) >= _MAX_DISTANCES:
            self.distances.clear()
        self.distances.add(distance)


def find_written(call: AppendCall) -> list[WrittenPair]:
    """Return the caches of a call, and its scales where they are written."""
    writes_scales = format_of(call.k_cache, call.k) in (Format.INT8, Format.INT4)
    pairs = (("k_cache", "v_cache"), *((("k_scale", "v_scale"),) if writes_scales else ()))
    return [WrittenPair(call, *names) for names in pairs]
