"""One call of the rotation, as every part of `ropewalk.ops.rope` passes it on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.launch.record import Varying


class RopeFlags(NamedTuple):
    """The arguments of a call that are not tensors."""

    layout: str = "bthd"
    interleaved: bool = False
    inverse: bool = False
    rotary_dim: int | None = None
    rotary_offset: int = 0
    inplace: bool = False
    impl: str | None = None
    pair_block: int | None = None

    def inverted(self) -> RopeFlags:
        """Return the flags of the inverse rotation, out of place."""
        layout, interleaved, inverse, rotary_dim, rotary_offset, _, impl, pair_block = self
        # A named tuple's own constructor is a call of Python's.
        flags = (layout, interleaved, not inverse, rotary_dim, rotary_offset, False, impl, pair_block)
        return tuple.__new__(RopeFlags, flags)


class RopeCall(NamedTuple):
    """The arguments of a call, but q and k."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    cu_seqlens: Tensor | None
    offset: int = 0
    flags: RopeFlags = RopeFlags()
    axes: Tensor | None = None


class Rotation(NamedTuple):
    """A call, with q and k."""

    q: Tensor
    k: Tensor | None
    call: RopeCall

    @property
    def rotation(self) -> Rotation:
        """Return the call itself, as a call with an offset does."""
        return self

    @property
    def xs(self) -> list[Tensor]:
        """Return q, or q and k."""
        return [self.q] if self.k is None else [self.q, self.k]

    def make_results(self) -> list[Tensor]:
        """Make room for the results; a call in place has none of its own."""
        return [] if self.call.flags.inplace else list(map(torch.empty_like, self.xs))


class ShiftedRotation(NamedTuple):
    """A call whose positions start at an offset, which differs from call to call."""

    q: Tensor
    k: Tensor | None
    call: RopeCall  # whose own offset is not read
    start: Varying

    @property
    def rotation(self) -> Rotation:
        """Return the call with its offset."""
        return Rotation(self.q, self.k, self.call._replace(offset=self.start))
