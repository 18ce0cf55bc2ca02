"""Lists of blocks in the kernels for Hopper: the tiles of a loop, which the load warp finds and tells the other warps.

A line of `Lists` has the blocks of keys of one block of queries, or the other way round: first those that are listed
whole, then those that bits or spans cut, both in order. Every warp reads there by itself where its tiles begin, but for
the compute warp groups of the backward, which the load warp tells with each step.
"""

# No `from __future__ import annotations`: an aggregate's annotations must be the classes themselves.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.hopper.gluon_compat import aggregate, gl, gluon, mbarrier
from ropewalk.ops.attention.hopper.tiles import WG_ROWS
from ropewalk.ops.attention.triton.masking import BITS, list_range_by

LISTED = gl.constexpr(128)  # tokens of a block, of queries and of keys
_STOP = gl.constexpr(2**31 - 1)  # the end of a span of all keys


class ListedTiles(NamedTuple):
    """Tiles of a line's blocks that a loop is over, by their number in the line."""

    first: Any
    count: Any
    first_partial: Any  # of blocks that bits or spans cut
    n_partial: Any


@triton.jit
def find_tiles(lanes, tile_range, ptr, BLOCK: tl.constexpr, HAS_PARTIAL: tl.constexpr):
    """Return the `ListedTiles` of BLOCK tokens that are in a range, by lanes as `list_range_by` does."""
    whole = list_range_by(lanes, tile_range, ptr, BLOCK, LISTED, True)
    first_partial = 0
    n_partial = 0
    if HAS_PARTIAL:
        partial = list_range_by(lanes, tile_range, ptr, BLOCK, LISTED, BITS)
        first_partial = partial.start // BLOCK
        n_partial = (partial.stop - partial.start) // BLOCK
    return ListedTiles(whole.start // BLOCK, (whole.stop - whole.start) // BLOCK, first_partial, n_partial)


@triton.jit
def start_of_tile(index, tiles, ptr, BLOCK: tl.constexpr, HAS_PARTIAL: tl.constexpr):
    """Return the first token of a loop's tile, the partial ones last."""
    TILES: tl.constexpr = LISTED // BLOCK  # of a block
    number = tiles.first + index
    if HAS_PARTIAL:
        number = tl.where(index < tiles.count, number, tiles.first_partial + (index - tiles.count))
    start = tl.load(ptr + 2 + number // TILES) * LISTED
    if TILES > 1:
        start += number % TILES * BLOCK
    return start


@gluon.jit
def tell_tiles(ring, use, tile_range, ptr, BLOCK: gl.constexpr, HAS_PARTIAL: gl.constexpr):
    """Find a loop's tiles, tell the other warps, and return them; for the load warp."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    tiles = find_tiles(lanes, tile_range, ptr, BLOCK, HAS_PARTIAL)
    ring.publish(use, tiles)
    return tiles


@aggregate
class ListedRing:
    """`ListedTiles` on their way from the load warp to the other warps: a ring of two in shared memory."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def publish(self, use, tiles):
        """Tell the other warps a loop's tiles; for the load warp."""
        mbarrier.wait(self.empty.index(use % 2), (use // 2 & 1) ^ 1)
        self._store(use % 2 * 4, tiles.first)
        self._store(use % 2 * 4 + 1, tiles.count)
        self._store(use % 2 * 4 + 2, tiles.first_partial)
        self._store(use % 2 * 4 + 3, tiles.n_partial)
        mbarrier.arrive(self.full.index(use % 2), count=1)

    @gluon.jit
    def receive(self, use):
        """Return a loop's tiles; for the other warps."""
        mbarrier.wait(self.full.index(use % 2), use // 2 & 1)
        first = self._load(use % 2 * 4)
        count = self._load(use % 2 * 4 + 1)
        first_partial = self._load(use % 2 * 4 + 2)
        n_partial = self._load(use % 2 * 4 + 3)
        mbarrier.arrive(self.empty.index(use % 2), count=1)
        return ListedTiles(first, count, first_partial, n_partial)

    @gluon.jit
    def _store(self, index, number):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(index).store(gl.full([1], number, gl.int32, layout))

    @gluon.jit
    def _load(self, index):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.numbers.index(index).load(layout), 0)


@gluon.jit
def make_listed_ring(READERS: gl.constexpr):
    """Make a ring for so many partitions of warps beside the load warp."""
    numbers = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return ListedRing(numbers, full, empty)


@gluon.jit
def _load_spans(m, mask):
    """Return the first key of each query's span, and the one past its last; all keys where the block is whole."""
    cut = (m < mask.seqlens.n_queries) & mask.is_partial
    ptr = mask.slots + m * 2
    return gl.load(ptr, cut, other=0), gl.load(ptr + 1, cut, other=_STOP)


@gluon.jit
def _load_words(m, slot, word, mask):
    """Return 32 bits of each query, from a word of its block's row on; all ones where the block is whole."""
    ptr = mask.bits + (slot.to(gl.int64) * LISTED + m % LISTED) * (LISTED // 32) + word
    return gl.load(ptr, (m >= 0) & mask.is_partial, other=-1)


@gluon.jit
def listed_keys(m, n_start, column, mask):
    """Return whether queries m attend a tile's keys by bits or spans; slots are at their block of queries."""
    if mask.bits is None:
        start, stop = _load_spans(m, mask)
        n = (n_start + column)[None, :]
        attends = (n >= start[:, None]) & (n < stop[:, None])
    else:
        slot = gl.load(mask.slots + n_start // LISTED)
        n = column[None, :]
        low = gl.where(n < 32, _load_words(m, slot, 0, mask)[:, None], _load_words(m, slot, 1, mask)[:, None])
        high = gl.where(n < 96, _load_words(m, slot, 2, mask)[:, None], _load_words(m, slot, 3, mask)[:, None])
        attends = (gl.where(n < 64, low, high) >> n % 32 & 1) != 0
    return attends


@gluon.jit
def listed_queries(m, m_start, k_idx, mask):
    """Return whether a warp group's keys are attended by queries m by bits or spans.

    Slots are at the keys' block, and bits at the words of the warp group's keys.
    """
    if mask.bits is None:
        start, stop = _load_spans(m, mask)
        n = k_idx[:, None]
        attends = (n >= start[None, :]) & (n < stop[None, :])
    else:
        slot = gl.load(mask.slots + (m_start // LISTED).to(gl.int64) * mask.slots_stride_query)
        n = k_idx[:, None] % WG_ROWS
        words = gl.where(n < 32, _load_words(m, slot, 0, mask)[None, :], _load_words(m, slot, 1, mask)[None, :])
        attends = (words >> n % 32 & 1) != 0
    return attends
