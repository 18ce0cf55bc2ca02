"""The tile that a program computes: persistent programs take one work item after another.

A work item is one tile of one head; `work_idx` numbers them. The forward starts as many programs as the GPU runs at a
time. The load warp of each takes the next item by an atomic counter, and tells the compute warp groups. In the backward
a program's own number is its one item.
"""

# No `from __future__ import annotations`: an aggregate's annotations must be the classes themselves.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.hopper.gluon_compat import aggregate, gl, gluon, mbarrier


class Problem(NamedTuple):
    """Sequences, scores, windows and heads of a call, as every warp of a kernel reads them."""

    packed: Any  # Packed | None
    bounds: Any  # Bounds
    scores: Any  # Scores
    grad_scale: Any  # of dK; None in the forward
    window: Any
    window_right: Any  # or None: as `window`
    far_window: Any  # pairs at least so many tokens apart are far; or None
    schedule: Any  # Schedule
    n_queries: Any
    n_keys: Any
    n_work: Any  # work items; None in the backward, whose programs have one each
    lists: Any = None  # Lists; None in the kernels that have none
    dropout: Any = None  # Dropout; None: nothing is dropped
    dq_order: Any = None  # pointer to a number of each tile of dQ; None: programs add in any order
    STEP_ORDER: Any = 0  # the order of a backward's steps: `StepOrder`; 0 is BY_HEADS


@aggregate
class TileScheduler:
    """Work indices on their way from the load warp to the compute warp groups: a ring of two in shared memory."""

    work: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, work, full, empty):
        self.work = work
        self.full = full
        self.empty = empty

    @gluon.jit
    def publish(self, use, work_idx):
        """Tell the compute warp groups the next work index; for the load warp."""
        mbarrier.wait(self.empty.index(use % 2), (use // 2 & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.work.index(use % 2).store(gl.full([1], work_idx, gl.int32, layout))
        mbarrier.arrive(self.full.index(use % 2), count=1)

    @gluon.jit
    def receive(self, use):
        """Return the next work index; for the compute warp groups."""
        mbarrier.wait(self.full.index(use % 2), use // 2 & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        work_idx = gl.max(self.work.index(use % 2).load(layout), 0)
        mbarrier.arrive(self.empty.index(use % 2), count=1)
        return work_idx


@gluon.jit
def make_scheduler(CONSUMERS: gl.constexpr):
    """Make a scheduler for so many compute warp groups."""
    work = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return TileScheduler(work, full, empty)


@gluon.jit
def next_work(counter_ptr, n_work, HALVES: gl.constexpr):
    """Take the next work index from the counter; `n_work` and above mean that none is left.

    The first half of each program begins with the program's number, the second half with one behind those. Whoever
    takes the last index sets the counter back to zero, for the next launch.
    """
    taken = gl.atomic_add(counter_ptr, 1)
    if taken == n_work - 1:
        gl.store(counter_ptr, 0)
    return taken + gl.num_programs(0) * HALVES


@triton.jit
def _last_section(schedule):
    """Return the number of the last section of heads, which has as many as the others, or more."""
    return tl.maximum(schedule.n_rows // schedule.heads_per_l2_section, 1) - 1


@triton.jit
def section_of_tile(tile, schedule):
    """Return the number of the section that a tile's head of keys is in, in a dense batch."""
    row = tile.batch * schedule.n_heads + tile.kv_head
    return tl.minimum(row // schedule.heads_per_l2_section, _last_section(schedule))


@triton.jit
def work_to_tile(work_idx, packed, schedule, LAST_FIRST: tl.constexpr):
    """Return a work item's tile of tokens, batch row, head and sequence.

    A dense batch goes by sections of heads whose tensors fit into the L2 cache; in a section the longest tiles of all
    heads come first. The last section takes the heads that are left over: a small one would begin its longest tiles
    when others end. In a packed batch the schedule gives the tile, and the heads of one tile follow each other.
    """
    if packed is None:
        section_heads = schedule.heads_per_l2_section
        last_section = _last_section(schedule)
        section = tl.minimum(work_idx // (schedule.n_tiles * section_heads), last_section)
        first_row = section * section_heads
        width = tl.where(section < last_section, section_heads, schedule.n_rows - first_row)
        within = work_idx - first_row * schedule.n_tiles
        tile = within // width
        row = first_row + within - tile * width
        if LAST_FIRST:
            tile = schedule.n_tiles - 1 - tile
        batch = row // schedule.n_heads
        head = row - batch * schedule.n_heads
        sequence = batch
    else:
        entry_ptr = packed.schedule + work_idx // schedule.n_heads * 2
        sequence = tl.load(entry_ptr)
        tile = tl.load(entry_ptr + 1)
        batch = 0
        head = work_idx % schedule.n_heads
    return tile, batch, head, sequence
