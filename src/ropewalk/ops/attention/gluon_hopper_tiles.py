"""Tiles in the kernels for Hopper: parts of them, what no sequence has, and how they reach memory."""

from ropewalk.ops.attention.gluon_shim import fence_async_shared, gl, gluon

ROWS = gl.constexpr(64)  # that a consumer has, of queries or of keys: four warps' instructions take so many
KEYS = gl.constexpr(128)  # that a program of the backward has
PART = gl.constexpr(64)  # rows, and features, of what a consumer of the backward has for the queries of a step


@gluon.jit
def clear_missing(values, n_start, first_key, n_keys, BLOCK_N: gl.constexpr, HAS_STARTS: gl.constexpr):
    """Write zeros over values that a row may not read: their probabilities are zero, and zero times NaN is NaN.

    Each consumer writes them all, and reads after that: that another one writes the same zeros meanwhile is of no
    account.
    """
    SLICE: gl.constexpr = 16
    width: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    for start in gl.static_range(0, BLOCK_N, SLICE):
        n = n_start + start
        missing = n + SLICE > n_keys
        if HAS_STARTS:
            missing = missing | (n < first_key)
        if missing:
            part = values.slice(start, SLICE, 0)
            token = n + gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
            exists = token < n_keys
            if HAS_STARTS:
                exists = exists & (token >= first_key)
            part.store(gl.where(exists[:, None], part.load(layout), gl.zeros([SLICE, width], values.dtype, layout)))
    fence_async_shared()


@gluon.jit
def store_rows(place, tile, batch, head, offset, start, n_rows):
    """Store a tile's rows that exist: no descriptor ends where a packed batch's next sequence follows."""
    ptr, stride_batch, stride_head, stride_token, head_dim = place
    width: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    feature = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    offsets = (offset + row).to(gl.int64)[:, None] * stride_token + feature[None, :]
    mask = (row < n_rows)[:, None] & (feature < head_dim)[None, :]
    first = batch.to(gl.int64) * stride_batch + head.to(gl.int64) * stride_head
    gl.store(ptr + first + offsets, tile.load(layout), mask)


@gluon.jit
def _split_pairs(tile, INTERLEAVED: gl.constexpr):
    """The first and the second features of a tile's pairs, [ROWS, D / 2] each: a thread has both of a pair."""
    PAIRS: gl.constexpr = tile.shape[1] // 2
    if INTERLEAVED:
        a, b = gl.split(gl.reshape(tile, [ROWS, PAIRS, 2]))
    else:
        a, b = gl.split(gl.permute(gl.reshape(tile, [ROWS, 2, PAIRS]), (0, 2, 1)))
    return a, b


@gluon.jit
def load_table(table, batch, rows, n_rows, tile, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """cos and sin for the pairs of a tile's tokens, [ROWS, D / 2]: 1 and 0 past the last token, and past R."""
    pairs, _ = _split_pairs(tile, INTERLEAVED)
    PAIRS: gl.constexpr = pairs.shape[1]
    layout: gl.constexpr = pairs.type.layout
    cos_ptr, sin_ptr, stride_batch, stride_token = table
    row = rows + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
    mask = (row < n_rows)[:, None] & (pair < R // 2)
    offsets = batch.to(gl.int64) * stride_batch + row.to(gl.int64)[:, None] * stride_token + pair
    return gl.load(cos_ptr + offsets, mask, other=1.0), gl.load(sin_ptr + offsets, mask, other=0.0)


@gluon.jit
def read_angles(cos_tile, sin_tile, tile, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """cos and sin for the pairs of a tile's tokens, [ROWS, D / 2], from shared memory: 1 and 0 past R."""
    pairs, _ = _split_pairs(tile, INTERLEAVED)
    PAIRS: gl.constexpr = pairs.shape[1]
    layout: gl.constexpr = pairs.type.layout
    cos = cos_tile.load(layout)
    if R < 2 * PAIRS:  # where the table has no columns TMA writes zeros
        pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
        cos = gl.where(pair < R // 2, cos, 1.0)
    return cos, sin_tile.load(layout)


@gluon.jit
def turn_back_keys(tile, cos, sin, INTERLEAVED: gl.constexpr):
    """Rotate a tile's gradients back, [ROWS, D] in float32. Half-split pairs must be those of the whole tile: R = D."""
    FEATURES: gl.constexpr = tile.shape[1]
    a, b = _split_pairs(tile, INTERLEAVED)
    turned = gl.join(a * cos + b * sin, b * cos - a * sin)
    if not INTERLEAVED:
        turned = gl.permute(turned, (0, 2, 1))
    return gl.convert_layout(gl.reshape(turned, [ROWS, FEATURES]), tile.type.layout)  # which moves nothing


@gluon.jit
def change_keys(tile, of_tile, table, batch, rows, n_rows, R: gl.constexpr, INTERLEAVED: gl.constexpr):
    """What `turn_back_keys` by `table` makes the same of as of `tile` by its own table, or as `tile` if it has none."""
    cos, sin = load_table(table, batch, rows, n_rows, tile, R, INTERLEAVED)
    square = cos * cos + sin * sin
    inverse = gl.where(square > 0, 1 / square, 0.0)
    cos *= inverse
    sin *= inverse
    if of_tile is None:
        by_cos = cos
        by_sin = -sin
    else:
        own_cos, own_sin = load_table(of_tile, batch, rows, n_rows, tile, R, INTERLEAVED)
        by_cos = own_cos * cos + own_sin * sin
        by_sin = own_sin * cos - own_cos * sin
    return turn_back_keys(tile, by_cos, by_sin, INTERLEAVED)


@gluon.jit
def own_gradients(gradients, CONSUMER: gl.constexpr):
    """Of a step's gradients of scores, [KEYS, queries], those that a consumer's part of the queries' gradients needs.

    Of 64 queries consumers have half of the features each, of 128 half of the queries.
    """
    own = gradients
    if gradients.shape[1] > PART:
        own = gradients.slice(CONSUMER * PART, PART, 1)
    return own


@gluon.jit
def as_threads_have_it(part):
    """A part in an order in which each thread's elements lie four by four: [128, 32], not moved but named anew.

    A thread has two neighbouring features of every eight, of two rows that are eight apart. `finish_kernel` undoes it.
    """
    pieces = gl.permute(gl.reshape(part, [4, 2, 8, 8, 4, 2]), (0, 3, 2, 4, 1, 5))
    return gl.reshape(pieces, [128, 32])


@gluon.jit
def begin_with(taken_off, layout: gl.constexpr):
    """What a product's sum begins with, so that it ends less a number of each column, [ROWS, columns].

    Taken off afterwards, these numbers would need registers of their own. Each register is made by an instruction of
    its own: of two that hold the same the compiler makes one and a copy, and lets products wait for that.
    """
    COLUMNS: gl.constexpr = taken_off.shape[0]
    numbers = taken_off.load(gl.SliceLayout(0, layout))[None, :]
    numbers = gl.zeros([ROWS, COLUMNS], gl.float32, layout) + numbers
    return gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [numbers], gl.float32, False, 1)
