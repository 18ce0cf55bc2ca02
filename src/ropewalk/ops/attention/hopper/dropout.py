"""Dropout in the registers of matrix products, for the kernels for Hopper: `ropewalk.ops.attention.dropout` defines it.

Philox gives words of four numbers, each a byte. Here a byte's top bit says that its probability stays. In the layout of
a product one thread holds the probabilities of all bytes of a call, or, of a tile [keys, queries], those of two. PTX
spreads top bits over pairs of 16-bit probabilities, and over dP.
"""

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon
from ropewalk.ops.attention.hopper.tiles import WG_ROWS, wgmma_layout, zero_of_step
from ropewalk.ops.attention.triton.arguments import RowDropout
from ropewalk.ops.attention.triton.softmax import dropped_numbers, philox


@gluon.jit
def _compare_bytes(word, threshold):
    """Return a word in which each byte's top bit says that it is not below the threshold's byte."""
    difference = (word | 0x80808080) - (threshold & 0x7F7F7F7F)
    return (word & ~threshold) | (~(word ^ threshold) & difference)


@gluon.jit
def _kept_words(dropout, m, block, call):
    """Return which keys of a block of 64 stay for queries m, by calls of Philox, 0 to 3 in the block.

    Bit 7 - w of a byte is that of the byte in Philox's word w; the others are 0.
    """
    w0, w1, w2, w3 = philox(dropout.seed, block * 4 + call, m, dropout.row, dropout.sequence)
    threshold = dropped_numbers(dropout, block) * 0x01010101
    w0 = _compare_bytes(w0, threshold) & 0x80808080
    w1 = (_compare_bytes(w1, threshold) >> 1) & 0x40404040
    w2 = (_compare_bytes(w2, threshold) >> 2) & 0x20202020
    w3 = (_compare_bytes(w3, threshold) >> 3) & 0x10101010
    return w0 | w1 | w2 | w3


@gluon.jit
def kept_keys(dropout, q_idx, n_start, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return which of BLOCK_N keys stay for queries, as words [WG_ROWS, 4, BLOCK_N / 64] of 16 keys of 64.

    The layout is that of `sum_in_threads`.
    """
    m = gl.convert_layout(q_idx, gl.SliceLayout(1, layout))[:, None]
    call = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    words = _kept_words(dropout, m, n_start // 64, call)
    if BLOCK_N == 64:
        words = gl.reshape(words, [WG_ROWS, 4, 1])
    else:
        gl.static_assert(BLOCK_N == 128)
        words = gl.join(words, _kept_words(dropout, m, n_start // 64 + 1, call))
    return words


# Of two rows in turn two neighbours, then those 8 keys on. A byte's top bit fills half a register.
_DROP_KEYS = gl.constexpr(
    "{ .reg .b32 low, high; "
    "prmt.b32 low, $8, $8, 0x9988; and.b32 $0, $4, low; prmt.b32 low, $10, $10, 0x9988; and.b32 $1, $5, low; "
    "prmt.b32 high, $8, $8, 0xBBAA; and.b32 $2, $6, high; prmt.b32 high, $10, $10, 0xBBAA; and.b32 $3, $7, high; }"
)
_DROP_KEYS_OPERANDS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))


@gluon.jit
def drop_keys(p_half, words):
    """Return P [queries, keys] of 16 bits with zeros where `kept_keys` says that it does not stay."""
    COLUMNS: gl.constexpr = p_half.shape[1]
    pieces = gl.reshape(p_half, [WG_ROWS, COLUMNS // 16, 2, 4, 2])
    words = gl.join(gl.join(words, words << 1), gl.join(words << 2, words << 3))
    words = gl.reshape(gl.permute(words, (0, 2, 4, 3, 1)), [WG_ROWS, COLUMNS // 16, 4])
    words = gl.convert_layout(words, gl.SliceLayout(2, gl.SliceLayout(4, pieces.type.layout)))[:, :, None, :, None]
    pieces = gl.inline_asm_elementwise(_DROP_KEYS, _DROP_KEYS_OPERANDS, [pieces, words], p_half.dtype, True, 8)
    return gl.convert_layout(gl.reshape(pieces, p_half.shape), p_half.type.layout)  # which moves nothing


@gluon.constexpr_function
def _split_keys(layout, dims):
    """Return a layout without dimensions of a tile [4, 2, 4, 2, queries]: its keys are those of a warp group."""
    for dim in sorted(dims, reverse=True):
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def _count_dropped(dropout, use, m_start, n_start, QUERIES: gl.constexpr):
    """Return which of 64 keys do not stay for a tile of QUERIES, as words [4, queries] of 16 bits, by calls of Philox.

    Bit 12 - w + 4 (n mod 2) - 8 is for key n below 8 of 16, of warp w; 8 bits above is that of 8 keys on.
    """
    # The compiler computes keys of rounds before the loop, and spills them, if it can.
    zero = zero_of_step(use)
    dropout = RowDropout(
        dropout.seed + zero, dropout.steps, dropout.rescale, dropout.row + zero, dropout.sequence, dropout.zero
    )
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    m = m_start + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))[None, :]
    call = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))[:, None]
    dropped = ~_kept_words(dropout, m, (n_start + zero) // 64, call)
    dropped = (dropped & 0xF0F0F0F0) | ((dropped << 4) & 0x0F000F00)
    return (((dropped >> 16) & 0xFF00) | ((dropped >> 8) & 0xFF)).to(gl.uint16)


@gluon.jit
def dropped_queries(dropout, use, m_start, n_start, QUERIES: gl.constexpr):
    """Return which of a warp group's keys do not stay for a tile of QUERIES, as words [1, 1, 4, 1, queries] of 16 bits.

    Words move between threads: a call of Philox gives the numbers of 16 keys for one query, and four warps need them.
    """
    tile = gl.zeros([WG_ROWS, QUERIES], gl.float32, wgmma_layout(QUERIES))
    layout: gl.constexpr = gl.reshape(tile, [4, 2, 4, 2, QUERIES]).type.layout
    dropped = _count_dropped(dropout, use, m_start, n_start, QUERIES)
    return gl.convert_layout(dropped, _split_keys(layout, (0, 1, 3)))[None, None, :, None, :]


# Two neighbouring queries of one key, then of the key 8 on, whose bits one register has. `lop3` makes
# P | (word & the sign bit).
_NEGATE_DROPPED = gl.constexpr(
    "{ .reg .b32 word, high; shl.b32 word, $9, $10; lop3.b32 $3, $7, word, 0x80000000, 0xF8; "
    "shl.b32 high, word, 8; lop3.b32 $1, $5, high, 0x80000000, 0xF8; "
    "shl.b32 high, word, 16; lop3.b32 $2, $6, high, 0x80000000, 0xF8; "
    "shl.b32 high, word, 24; lop3.b32 $0, $4, high, 0x80000000, 0xF8; }"
)
_NEGATE_DROPPED_OPERANDS = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 6))


@gluon.jit
def negate_dropped(p, words):
    """Return P [keys, queries], negative where `dropped_queries` says that it does not stay: its sign bit is free."""
    pieces = gl.reshape(p, [4, 2, 4, 2, p.shape[1]])
    layout: gl.constexpr = pieces.type.layout
    warp = gl.arange(0, 4, layout=_split_keys(layout, (1, 2, 3, 4)))[:, None, None, None, None]
    odd = gl.arange(0, 2, layout=_split_keys(layout, (0, 1, 2, 4)))[None, None, None, :, None]
    pieces = gl.inline_asm_elementwise(
        _NEGATE_DROPPED, _NEGATE_DROPPED_OPERANDS, [pieces, words, warp + 4 - 4 * odd], gl.float32, True, 4
    )
    return gl.convert_layout(gl.reshape(pieces, p.shape), p.type.layout)  # which moves nothing


@gluon.jit
def to_half_or_zero(p, DTYPE: gl.constexpr):
    """Convert P to 16 bits, with zeros where it is negative, in one instruction for two."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        p_half = gl.inline_asm_elementwise("cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, True, 2)
    else:
        p_half = gl.inline_asm_elementwise("cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, True, 2)
    return p_half


@gluon.jit
def differentiate_dropped(p, dp, delta):
    """Return P (dP - delta) where P >= 0, otherwise P delta; delta is [queries], in shared memory.

    P is from `negate_dropped`. dP and delta are at the scale of the forward without its factor for those that stay.
    """
    delta = delta.load(gl.SliceLayout(0, p.type.layout))[None, :]
    return gl.maximum(p, 0.0) * dp - gl.abs(p) * delta
