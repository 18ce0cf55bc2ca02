"""Rings of tiles in shared memory, between the load warp and the compute warp groups of the kernels for Hopper."""

# No `from __future__ import annotations`: an aggregate's annotations must be the classes themselves.

from ropewalk.ops.attention.hopper.gluon_compat import aggregate, gl, gluon, load_tile, mbarrier, reinterpret


@gluon.jit
def _for_descriptor(tile, descriptor):
    """View a stage's memory as a tile of the descriptor, whose type may differ from the ring's but not its bytes."""
    if descriptor.dtype != tile.dtype:
        tile = reinterpret(tile, descriptor.dtype, descriptor.block_shape, descriptor.layout)
    return tile


@gluon.jit
def allocate_chunks(descriptor, COUNT: gl.constexpr):
    """Allocate so many of a descriptor's tiles."""
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, 1, 1, descriptor.block_shape[2], descriptor.block_shape[3]], descriptor.layout
    )


@gluon.jit
def load_chunks(descriptor, coordinates, full, tiles, index, CHUNKS: gl.constexpr):
    """Load the chunks of some rows, from the first feature on, into the tiles of an index."""
    batch, head, row, feature = coordinates
    for chunk in gl.static_range(CHUNKS):
        tile = _for_descriptor(tiles.index(index * CHUNKS + chunk), descriptor)
        load_tile(descriptor, [batch, head, row, feature + chunk * descriptor.block_shape[3]], full, tile)


@gluon.jit
def chunks_of(tiles, index, CHUNKS: gl.constexpr):
    """Return the memory of the chunks of an index, a tuple of one or three of [rows, features]."""
    if CHUNKS == 1:
        result = (_rows_of(tiles.index(index)),)
    else:
        result = (
            _rows_of(tiles.index(index * CHUNKS)),
            _rows_of(tiles.index(index * CHUNKS + 1)),
            _rows_of(tiles.index(index * CHUNKS + 2)),
        )
    return result


@gluon.jit
def _rows_of(tile):
    """Return a tile's memory as [rows, features]."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@aggregate
class Ring:
    """A circular buffer of tiles that the load warp fills and the compute warp groups read.

    The full barrier of a stage protects its tile from being read early, the empty barrier from being overwritten early.
    Use n of a ring is of stage n % stages; the barriers' phase changes each time round. A stage has one tile, or three
    chunks of a row's features: 192 is no power of two, but thrice one.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    chunks: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages, chunks):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.chunks = gl.constexpr(chunks)

    @gluon.jit
    def load(self, use, descriptor, coordinates):
        """Load a tile into a stage that is known to be empty; for the load warp."""
        stage = use % self.stages
        full = self.full.index(stage)
        mbarrier.expect(full, self.chunks * descriptor.block_type.nbytes)
        load_chunks(descriptor, coordinates, full, self.tiles, stage, self.chunks)

    @gluon.jit
    def fill(self, use, descriptor, coordinates):
        """Wait for an empty stage and load a tile; for the load warp."""
        mbarrier.wait(self.empty.index(use % self.stages), (use // self.stages & 1) ^ 1)
        self.load(use, descriptor, coordinates)

    @gluon.jit
    def wait_full(self, use):
        """Wait until a tile is loaded; for the compute warp groups."""
        mbarrier.wait(self.full.index(use % self.stages), use // self.stages & 1)

    @gluon.jit
    def tile(self, use):
        """Return the memory of a tile, [rows, features]."""
        tile = self.tiles.index(use % self.stages)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def chunk_tiles(self, use):
        """Return the memory of a tile's chunks, a tuple of one or three of [rows, features]."""
        return chunks_of(self.tiles, use % self.stages, self.chunks)

    @gluon.jit
    def tile_of(self, use, descriptor):
        """Return the memory of a tile that another descriptor than the ring's loaded, [rows, columns]."""
        tile = _for_descriptor(self.tiles.index(use % self.stages), descriptor)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def release(self, use):
        """Arrive on the stage's empty barrier."""
        mbarrier.arrive(self.empty.index(use % self.stages), count=1)


@gluon.jit
def make_ring(descriptor, STAGES: gl.constexpr, READERS: gl.constexpr, CHUNKS: gl.constexpr = 1):
    """Make a ring of the descriptor's tiles, so many a stage, for so many reading warp groups."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=READERS)
    return _allocate_ring(descriptor, empty, STAGES, CHUNKS)


@gluon.jit
def make_ring_beside(ring, descriptor):
    """Make a ring whose tiles are filled and released together with those of another ring.

    It shares that ring's empty barriers. The compiler treats barriers without a wait as dead, and gives their memory to
    tiles; on a GPU that processes share they are then restored over those tiles.
    """
    return _allocate_ring(descriptor, ring.empty, ring.stages, 1)


@gluon.jit
def _allocate_ring(descriptor, empty, STAGES: gl.constexpr, CHUNKS: gl.constexpr):
    """Allocate the tiles of a ring and their full barriers, given the empty ones."""
    tiles = allocate_chunks(descriptor, STAGES * CHUNKS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return Ring(tiles, full, empty, STAGES, CHUNKS)
