"""Lists of blocks in the kernels for Hopper: the tiles of a loop, which the load warp finds and tells the other warps.

A line of `Lists` has the blocks of keys of one block of queries, or the other way round: first those that are listed
whole, then those that bits or spans cut, both in order. Every warp reads there by itself where its tiles begin, but for
the compute warp groups of the backward, which the load warp tells with each step.

Where positions per token say which pairs are far, each range of pairs has lists of its own (`ranges.list_ranges`): its
blocks that have no other pair, then those that it cuts. A packed batch has them, too.
"""

# No `from __future__ import annotations`: an aggregate's annotations must be the classes themselves.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.hopper.gluon_compat import aggregate, gl, gluon, mbarrier
from ropewalk.ops.attention.hopper.prepost import workspace_start
from ropewalk.ops.attention.hopper.tiles import WG_ROWS
from ropewalk.ops.attention.triton.masking import BITS, FAR_PAST, NEAR, list_range_by, lists_of_line
from ropewalk.ops.attention.triton.tiles import wide

LISTED = gl.constexpr(128)  # tokens of a block, of queries and of keys
_STOP = gl.constexpr(2**31 - 1)  # the end of a span of all keys


class ListedTiles(NamedTuple):
    """Tiles of a line's blocks that a loop is over, by their number in the line."""

    first: Any
    count: Any
    first_partial: Any  # of blocks that bits or spans cut
    n_partial: Any


class RangePositions(NamedTuple):
    """Positions of one sequence's tokens, which say of what range a pair is: int64, readable to the end of a tile."""

    queries: Any  # pointer to the first one's
    keys: Any
    far_window: Any


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
def line_of_tile(problem, tile, head, first, n_tokens, RANGE: gl.constexpr):
    """Return the pointer of a tile's line in the lists, or in those of a range; None without lists.

    `first` and `n_tokens` are of the tokens that the tile is of. A tile past the last has the first line, and no range.
    """
    lists = problem.lists
    line = tile.start // LISTED
    if lists.k_pos is not None:
        head = head * 0 + (RANGE - 1)
        line += workspace_start(first, tile.sequence, problem.packed, LISTED) // LISTED
        line = gl.where(tile.start < n_tokens, line, 0)
    return lists_of_line(lists, tile.batch, head, line)


@gluon.jit
def range_positions(lists, tile, far_window):
    """Return the `RangePositions` of a tile's sequence."""
    q_pos = lists.slots + wide(tile.batch) * lists.slots_stride_batch
    k_pos = lists.k_pos + wide(tile.batch) * lists.k_pos_stride_batch
    return RangePositions(q_pos + tile.q_offset, k_pos + tile.k_offset, wide(far_window))


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


_AT_ONCE = gl.constexpr(16)  # numbers of a thread: in the layout of a product of two rows and four times two columns


@gluon.constexpr_function
def _selecting(TEST, other):
    """Return PTX of _AT_ONCE numbers, or another one where the position of a column is not in range for its row.

    Operands are the numbers, for each the bound of its row, the address of the first column's position, and how many
    positions are in range from the bound on. Positions are loaded a few at a time: a tile of them, or of masks, would
    take as many registers as the scores.
    """
    n = _AT_ONCE.value
    lines = []
    for column in range(n // 2):  # a thread has two of every eight
        address = f"[${3 * n} + {8 * (column // 2 * 8 + column % 2)}]"
        lines.append(f"ld.global.s64 at, {address};")
        for row in range(2):
            index = column // 2 * 4 + row * 2 + column % 2
            bound = f"${2 * n + index}"
            if TEST == "within":
                lines.append(f"sub.s64 past, at, {bound}; setp.lt.u64 holds, past, ${4 * n};")
            else:
                lines.append(f"setp.{TEST}.s64 holds, at, {bound};")
            lines.append(f"selp.f32 ${index}, ${n + index}, {other}, holds;")
    return "{ .reg .pred holds; .reg .s64 at, past; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _operands():
    """Return the constraints of `_selecting`: the numbers are read and written in place."""
    n = _AT_ONCE.value
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["l"] * 3 * n)


@gluon.constexpr_function
def _test_of(RANGE, STREAMS_KEYS):
    """Return how positions of columns are compared with bounds of rows."""
    below, above = ("le", "ge") if STREAMS_KEYS else ("ge", "le")
    return {NEAR.value: "within", FAR_PAST.value: below}.get(RANGE, above)


@gluon.jit
def _select(tile, rows, row, n_rows, columns, column, far_window, TEST: gl.constexpr, OTHER: gl.constexpr):
    """Return a tile of numbers, or another number where positions of rows and columns say so."""
    PTX: gl.constexpr = _selecting(TEST, OTHER)
    OPERANDS: gl.constexpr = _operands()
    bound = gl.load(rows + row, row < n_rows, other=0)
    if TEST == "within":
        bound += 1 - far_window
    elif TEST == "le":
        bound -= far_window
    else:
        bound += far_window
    # The first column of those at once that a thread has: four times two of 32.
    address = (columns + (column & -26)).to(gl.int64)
    operands = [tile, bound[:, None], address[None, :], 2 * far_window - 1]
    return gl.inline_asm_elementwise(PTX, OPERANDS, operands, gl.float32, True, _AT_ONCE)


@gluon.jit
def select_keys(s, q_idx, n_start, column, mask, RANGE: gl.constexpr):
    """Return scores [queries, keys], or -inf where positions say that a pair is not in a range."""
    TEST: gl.constexpr = _test_of(RANGE, True)
    ranges = mask.ranges
    columns, n_queries = ranges.keys + n_start, mask.seqlens.n_queries
    return _select(s, ranges.queries, q_idx, n_queries, columns, column, ranges.far_window, TEST, "0fFF800000")


@gluon.jit
def select_queries(p, m_start, column, k_idx, mask, RANGE: gl.constexpr):
    """Return P [keys, queries], or 0 where positions say that a pair is not in a range."""
    TEST: gl.constexpr = _test_of(RANGE, False)
    ranges = mask.ranges
    columns, n_keys = ranges.queries + m_start, mask.seqlens.n_keys
    return _select(p, ranges.keys, k_idx, n_keys, columns, column, ranges.far_window, TEST, "0f00000000")


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
