"""Tiles of the kernels for Hopper: their layouts, rows that no sequence has, rotation, and stores."""

from ropewalk.ops.attention.hopper.gluon_compat import fence_async_shared, gl, gluon

WG_ROWS = gl.constexpr(64)  # queries or keys of a compute warp group: one wgmma of four warps has so many rows
BLOCK_N = gl.constexpr(128)  # keys of a program of the backward
DQ_CHUNK = gl.constexpr(64)  # queries, and features, of a warp group's chunk of a step's dQ


@gluon.constexpr_function
def wgmma_layout(n):
    """Return the layout of a warp group's product with n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def sum_in_threads(p):
    """Sum a tile's rows as far as each thread holds them, [rows, 4].

    A thread holds two of eight neighbouring columns, by its lane.
    """
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def zero_missing_rows(tile, start, first, stop, BLOCK: gl.constexpr, HAS_FIRST: gl.constexpr):
    """Write zeros over the rows of a tile in shared memory that are not in [first, stop): zero times NaN is NaN.

    Each warp group writes all of them before it reads the tile. Others may write the same zeros meanwhile.
    """
    SLICE: gl.constexpr = 16
    width: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    for offset in gl.static_range(0, BLOCK, SLICE):
        n = start + offset
        missing = n + SLICE > stop
        if HAS_FIRST:
            missing = missing | (n < first)
        if missing:
            rows = tile.slice(offset, SLICE, 0)
            token = n + gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
            exists = token < stop
            if HAS_FIRST:
                exists = exists & (token >= first)
            rows.store(gl.where(exists[:, None], rows.load(layout), gl.zeros([SLICE, width], tile.dtype, layout)))
    fence_async_shared()


@gluon.jit
def key_mask(k_idx, seqlens, layout: gl.constexpr):
    """Return whether keys exist, for the rows of a layout."""
    exists = (k_idx >= seqlens.kv_start) & (k_idx < seqlens.n_keys)
    return gl.convert_layout(exists, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def store_rows(target, tile, batch, head, offset, start, n_rows, FEATURE: gl.constexpr = 0):
    """Store a tile's rows below n_rows to a `RowTarget`, from FEATURE on: a packed batch's next sequence may follow."""
    width: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
    feature = FEATURE + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    offsets = (offset + row).to(gl.int64)[:, None] * target.stride_token + feature[None, :]
    mask = (row < n_rows)[:, None] & (feature < target.head_dim)[None, :]
    first = batch.to(gl.int64) * target.stride_batch + head.to(gl.int64) * target.stride_head
    gl.store(target.ptr + first + offsets, tile.load(layout), mask)


@gluon.jit
def _split_pairs(tile, INTERLEAVED: gl.constexpr):
    """Return the first and second features of a tile's pairs, [WG_ROWS, D / 2]: a thread has both of a pair."""
    N_PAIRS: gl.constexpr = tile.shape[1] // 2
    if INTERLEAVED:
        a, b = gl.split(gl.reshape(tile, [WG_ROWS, N_PAIRS, 2]))
    else:
        a, b = gl.split(gl.permute(gl.reshape(tile, [WG_ROWS, 2, N_PAIRS]), (0, 2, 1)))
    return a, b


@gluon.jit
def load_table(table, batch, rows, n_rows, tile, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Load cos and sin for the pairs of a tile's tokens, [WG_ROWS, D / 2]: 1 and 0 past the last token, and past R."""
    pairs, _ = _split_pairs(tile, INTERLEAVED)
    N_PAIRS: gl.constexpr = pairs.shape[1]
    layout: gl.constexpr = pairs.type.layout
    row = rows + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, N_PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
    mask = (row < n_rows)[:, None] & (pair < R // 2)
    offsets = batch.to(gl.int64) * table.stride_batch + row.to(gl.int64)[:, None] * table.stride_token + pair
    return gl.load(table.cos + offsets, mask, other=1.0), gl.load(table.sin + offsets, mask, other=0.0)


@gluon.jit
def load_shared_table(cos_tile, sin_tile, tile, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Load cos and sin for the pairs of a tile's tokens from shared memory, [WG_ROWS, D / 2]: 1 and 0 past R."""
    pairs, _ = _split_pairs(tile, INTERLEAVED)
    N_PAIRS: gl.constexpr = pairs.shape[1]
    layout: gl.constexpr = pairs.type.layout
    cos = cos_tile.load(layout)
    if R < 2 * N_PAIRS:  # where the table has no columns TMA writes zeros
        pair = gl.arange(0, N_PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
        cos = gl.where(pair < R // 2, cos, 1.0)
    return cos, sin_tile.load(layout)


@gluon.jit
def inverse_rotate(tile, cos, sin, INTERLEAVED: gl.constexpr):
    """Rotate a tile's gradients back, [WG_ROWS, D] of float32. Half-split pairs need R = D."""
    FEATURES: gl.constexpr = tile.shape[1]
    a, b = _split_pairs(tile, INTERLEAVED)
    rotated = gl.join(a * cos + b * sin, b * cos - a * sin)
    if not INTERLEAVED:
        rotated = gl.permute(rotated, (0, 2, 1))
    return gl.convert_layout(gl.reshape(rotated, [WG_ROWS, FEATURES]), tile.type.layout)  # which moves nothing


@gluon.jit
def rebase_rotation(tile, old_table, new_table, batch, rows, n_rows, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Return x with inverse_rotate(x, new_table) = inverse_rotate(tile, old_table), or = tile without an old table."""
    cos, sin = load_table(new_table, batch, rows, n_rows, tile, R, INTERLEAVED)
    square = cos * cos + sin * sin
    inverse = gl.where(square > 0, 1 / square, 0.0)
    cos *= inverse
    sin *= inverse
    if old_table is None:
        by_cos = cos
        by_sin = -sin
    else:
        old_cos, old_sin = load_table(old_table, batch, rows, n_rows, tile, R, INTERLEAVED)
        by_cos = old_cos * cos + old_sin * sin
        by_sin = old_sin * cos - old_cos * sin
    return inverse_rotate(tile, by_cos, by_sin, INTERLEAVED)


@gluon.jit
def wg_ds(ds, CONSUMER: gl.constexpr):
    """Return the part of a step's dS [keys, queries] that a warp group's chunk of dQ needs.

    Of 64 queries a warp group has half of the features, of 128 half of the queries.
    """
    result = ds
    if ds.shape[1] > DQ_CHUNK:
        result = ds.slice(CONSUMER * DQ_CHUNK, DQ_CHUNK, 1)
    return result


@gluon.jit
def to_thread_order(dq_chunk):
    """Return a chunk of dQ as [128, 32], with each thread's elements four by four: no element moves.

    A thread has two neighbouring features of every eight, of two rows that are eight apart.
    `bwd_postprocess_kernel` undoes it.
    """
    pieces = gl.permute(gl.reshape(dq_chunk, [4, 2, 8, 8, 4, 2]), (0, 3, 2, 4, 1, 5))
    return gl.reshape(pieces, [128, 32])


@gluon.jit
def zero_of_step(use):
    """Return 0, given a number that is not below 0, so that the compiler cannot tell.

    Addresses of a tile with such an index are computed in each step. Otherwise the compiler computes those of all
    products before the loop, and spills them.
    """
    opaque = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(use)], gl.int32, False, 1)
    return gl.minimum(opaque, 0)


@gluon.jit
def init_neg_delta(delta, layout: gl.constexpr):
    """Initialise dP to -delta of each column, [WG_ROWS, columns]: delta then needs no registers of its own.

    An instruction of its own makes each register. Of two registers that hold the same the compiler makes one and a
    copy, and lets products wait for that.
    """
    COLUMNS: gl.constexpr = delta.shape[0]
    column = delta.load(gl.SliceLayout(0, layout))[None, :]
    tile = gl.zeros([WG_ROWS, COLUMNS], gl.float32, layout) + column
    return gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [tile], gl.float32, False, 1)
