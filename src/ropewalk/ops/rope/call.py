"""One call of the rotation, as every part of `ropewalk.ops.rope` passes it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


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


class RopeCall(NamedTuple):
    """The arguments of a call, but q and k."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    cu_seqlens: Tensor | None
    offset: int
    flags: RopeFlags
    axes: Tensor | None = None


# Writes the rotation of the first tensors into the second.
Rotate = Callable[[Sequence[Tensor], Sequence[Tensor], RopeCall], None]
