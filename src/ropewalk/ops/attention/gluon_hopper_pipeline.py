"""The pipeline of attention on Hopper: rings of tiles in shared memory, and the numbers of tiles that programs take.

A program has one producer, a warp that loads, and consumers, groups of four warps that compute. The forward's programs
stay: as many start as the GPU runs at a time, and each takes one tile of queries after another, by a number, until all
are taken. In the backward a program's own number says its one tile.
"""

# No `from __future__ import annotations`: an aggregate's annotations must be the classes themselves.

import triton
import triton.language as tl

from ropewalk.ops.attention.gluon_shim import aggregate, gl, gluon, load_tile, mbarrier, reinterpret


@gluon.jit
def _for_descriptor(tile, descriptor):
    """A stage's memory for a tile of a descriptor whose elements may be others than the ring's, of as many bytes."""
    if descriptor.dtype != tile.dtype:
        tile = reinterpret(tile, descriptor.dtype, descriptor.block_shape, descriptor.layout)
    return tile


@aggregate
class Ring:
    """Tiles that the producer fills and consumers read, one stage after the other, round and round.

    A full barrier says that a stage's tile has come; it protects the tile from being read before. An empty one says
    that all who read it have done so, and protects it from being overwritten. The n-th use of a ring is of its stage
    n % stages, and each time round the barriers' phase changes.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def load(self, use, descriptor, coordinates):
        """Load a tile, whose stage is empty; for the producer."""
        stage = use % self.stages
        full = self.full.index(stage)
        mbarrier.expect(full, descriptor.block_type.nbytes)
        load_tile(descriptor, coordinates, full, _for_descriptor(self.tiles.index(stage), descriptor))

    @gluon.jit
    def fill(self, use, descriptor, coordinates):
        """Load a tile as soon as its stage is empty; for the producer."""
        mbarrier.wait(self.empty.index(use % self.stages), (use // self.stages & 1) ^ 1)
        self.load(use, descriptor, coordinates)

    @gluon.jit
    def await_tile(self, use):
        """Wait until a tile has come; for consumers."""
        mbarrier.wait(self.full.index(use % self.stages), use // self.stages & 1)

    @gluon.jit
    def tile(self, use):
        """The memory of a tile, [rows, features]."""
        tile = self.tiles.index(use % self.stages)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def tile_of(self, use, descriptor):
        """The memory of a tile that another descriptor than the ring's loaded, [rows, columns]."""
        tile = _for_descriptor(self.tiles.index(use % self.stages), descriptor)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def release(self, use):
        """Say that a consumer has read a tile."""
        mbarrier.arrive(self.empty.index(use % self.stages), count=1)


@gluon.jit
def make_ring(descriptor, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of the descriptor's tiles, that so many consumers read."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=READERS)
    return _allocate_ring(descriptor, empty, STAGES)


@gluon.jit
def make_ring_beside(ring, descriptor):
    """A ring of the descriptor's tiles that are filled, and released, with those of another ring.

    It has no empty barriers of its own. Barriers that nobody waits at are dead to the compiler, which gives their
    memory to tiles; and on a GPU that processes share they come back over those.
    """
    return _allocate_ring(descriptor, ring.empty, ring.stages)


@gluon.jit
def _allocate_ring(descriptor, empty, STAGES: gl.constexpr):
    """Tiles, and a full barrier for each stage, beside empty barriers that are there."""
    tiles = gl.allocate_shared_memory(
        descriptor.dtype, [STAGES, 1, 1, descriptor.block_shape[2], descriptor.block_shape[3]], descriptor.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return Ring(tiles, full, empty, STAGES)


@aggregate
class Numbers:
    """The numbers of the tiles that a program takes, from its producer to its consumers: a ring of two."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def publish(self, use, number):
        """Tell the consumers the next number; for the producer."""
        mbarrier.wait(self.empty.index(use % 2), (use // 2 & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(use % 2).store(gl.full([1], number, gl.int32, layout))
        mbarrier.arrive(self.full.index(use % 2), count=1)

    @gluon.jit
    def receive(self, use):
        """The next number; for consumers."""
        mbarrier.wait(self.full.index(use % 2), use // 2 & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        number = gl.max(self.numbers.index(use % 2).load(layout), 0)
        mbarrier.arrive(self.empty.index(use % 2), count=1)
        return number


@gluon.jit
def make_numbers(CONSUMERS: gl.constexpr):
    """A ring of numbers that so many consumers receive."""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return Numbers(numbers, full, empty)


@gluon.constexpr_function
def _barrier_instruction(operation, threads):
    return "bar." + operation + " $1, " + str(threads) + "; mov.u32 $0, 0;"


# A program has sixteen named barriers. Triton takes the first ones for itself, two and one for each role but the first.


@gluon.jit
def await_others(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until so many threads in all have come to it."""
    instruction: gl.constexpr = _barrier_instruction("sync", THREADS)
    gl.inline_asm_elementwise(instruction, "=r,r", [gl.to_tensor(barrier)], gl.int32, False, 1)


@gluon.jit
def come_to(barrier, THREADS: gl.constexpr):
    """Be counted at a named barrier where others wait for so many threads in all, and go on."""
    instruction: gl.constexpr = _barrier_instruction("arrive", THREADS)
    gl.inline_asm_elementwise(instruction, "=r,r", [gl.to_tensor(barrier)], gl.int32, False, 1)


_FIRST_TURN = gl.constexpr(10)  # the first consumer's named barrier


@gluon.jit
def await_turn(CONSUMER: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    await_others(_FIRST_TURN + CONSUMER, 256)


@gluon.jit
def give_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next consumer issue its products."""
    come_to(_FIRST_TURN + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def take_number(counter_ptr, total):
    """The number of the next tile that no program has taken yet; past the total there are none.

    The first ones are the programs' own. Who takes the last number sets the counter back, for the next launch.
    """
    taken = gl.atomic_add(counter_ptr, 1)
    if taken == total - 1:
        gl.store(counter_ptr, 0)
    return taken + gl.num_programs(0)


@triton.jit
def locate_number(number, sequences, n_tiles, n_rows, n_heads, heads_together, LAST_FIRST: tl.constexpr):
    """Which tile of tokens a number means, of which batch row, head and sequence.

    The heads of a dense batch are taken in sections, what is read of which fits into the cache; in a section the
    longest tiles come first, of all its heads. The last section takes what is left over too: a small one would begin
    its longest tiles when others end. In a packed batch the schedule says it, and the heads of one tile follow each
    other.
    """
    if sequences is None:
        last_section = tl.maximum(n_rows // heads_together, 1) - 1
        section = tl.minimum(number // (n_tiles * heads_together), last_section)
        first_row = section * heads_together
        width = tl.where(section < last_section, heads_together, n_rows - first_row)
        within = number - first_row * n_tiles
        tile = within // width
        row = first_row + within - tile * width
        if LAST_FIRST:
            tile = n_tiles - 1 - tile
        batch = row // n_heads
        head = row - batch * n_heads
        sequence = batch
    else:
        entry_ptr = sequences[2] + number // n_heads * 2
        sequence = tl.load(entry_ptr)
        tile = tl.load(entry_ptr + 1)
        batch = 0
        head = number % n_heads
    return tile, batch, head, sequence
