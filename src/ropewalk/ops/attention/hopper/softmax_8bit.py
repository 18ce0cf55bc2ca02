"""The softmax of a tile of 8-bit products, for the kernels for Hopper.

In the layout of a product a thread has the keys of one group of each block, so that all its products of a row have one
unit. `unit` is that unit, of which products are exponents of 2, as threads have it, [rows, 4]; `rest` is what all
exponents of a row lack: the product with what was taken off keys.
"""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon
from ropewalk.ops.attention.hopper.lists import select_keys
from ropewalk.ops.attention.hopper.softmax import (
    RESCALE_THRESHOLD,
    masked_scores,
    pin_exp2,
    tile_attends,
)
from ropewalk.ops.attention.triton.arguments import MaskFlags

# P in e4m3 is 2^8 at its row's reference, which exponents exceed by 0.8 at most: 448 is the largest number.
P_OFFSET = gl.constexpr(8.0)
P_SLACK = gl.constexpr(0.8)
_HIDDEN = gl.constexpr(-(2**31))  # a product that is masked: others are below 2^22
_HIDDEN_FLOAT = gl.constexpr(-(2.0**31))
_SMALLEST_UNIT = gl.constexpr(1e-37)  # times 0 a score of -inf would be NaN


class Units(NamedTuple):
    """The units of a tile's products, as threads have them."""

    q: Any  # [rows]: of queries
    k: Any  # [4]: of the groups of keys
    shift: Any  # [rows]: products with what was taken off keys, unrounded
    v: Any  # the unit of the values of these keys; 1 where they are of 16 bits


class SoftmaxOptions(NamedTuple):
    """Constants of the softmax."""

    DTYPE: Any  # of P
    P_LAYOUT: Any  # of P as an operand
    IS_PLAIN: Any  # products are scores, but for a scale
    PIN_EXP2: Any


@gluon.jit
def _unit_of_products(units):
    """Return the units of a tile's products, [rows, 4]."""
    return units.q[:, None] * units.k[None, :]


@gluon.jit
def dequantise(s, units):
    """Return a tile of products as float32 scores, in the unit of features."""
    pieces = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2]).to(gl.float32)
    unit = _as_pieces(_unit_of_products(units), pieces)
    shift = _rows_as_pieces(units.shift, pieces)
    pieces = pieces * unit[:, None, :, None] + shift[:, None, None, None]
    return gl.convert_layout(gl.reshape(pieces, s.shape), s.type.layout)  # which moves nothing


@gluon.jit
def _as_pieces(x, pieces):
    """Return numbers of rows and threads, [rows, 4], beside a tile's pieces [rows, n, 4, 2]."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, pieces.type.layout)))


@gluon.jit
def _rows_as_pieces(x, pieces):
    """Return numbers of rows beside a tile's pieces [rows, n, 4, 2]."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, pieces.type.layout))))


@gluon.jit
def _largest_in_threads(s):
    """Return the largest number of each row that a thread has, [rows, 4]; of integers by instructions of three."""
    N: gl.constexpr = s.shape[1] // 8
    pieces = gl.permute(gl.reshape(s, [s.shape[0], N, 4, 2]), (0, 2, 1, 3))
    return gl.max(gl.reshape(pieces, [s.shape[0], 4, 2 * N]), 2)


@gluon.jit
def _exponent_unit(units, exp2_scale):
    """Return the units of products in exponents of 2, [rows, 4]; NaN stays NaN."""
    unit = _unit_of_products(units) * exp2_scale
    return gl.where(unit < _SMALLEST_UNIT, _SMALLEST_UNIT, unit)


@gluon.jit
def _products_and_maxima(s, unit, q_idx, n_start, mask, flags):
    """Return a tile's products in float32, the largest of each row and thread, and units without NaN of hidden keys.

    Masks select integers first: two branches that convert the same ones would do so before they part, and keep both.
    """
    layout: gl.constexpr = unit.type.layout
    if flags.PARTIAL_TILES:
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(tile_attends(q_idx, n_start, column, mask, flags), s, _HIDDEN)
        products = s.to(gl.float32)
        products = gl.where(products == _HIDDEN_FLOAT, float("-inf"), products)
        if mask.ranges is not None:
            products = select_keys(products, q_idx, n_start, column, mask, flags.RANGE)
        largest = gl.convert_layout(_largest_in_threads(products), layout)
        unit = gl.where(largest == float("-inf"), 1.0, unit)
    else:
        products = s.to(gl.float32)
        largest = gl.convert_layout(_largest_in_threads(s), layout).to(gl.float32)
    return products, largest, unit


@gluon.constexpr_function
def is_e4m3(dtype):
    """Say whether numbers are of e4m3."""
    return dtype == gl.float8e4nv


@gluon.constexpr_function
def _one_of(dtype):
    return (dtype,)


@gluon.constexpr_function
def _packing(dtype):
    """Return PTX that packs as many numbers as 32 bits hold, into as many equal results."""
    if is_e4m3(dtype):
        low, high = (f"cvt.rn.satfinite.e4m3x2.f32 {x}, ${b}, ${a};" for x, a, b in (("low", 4, 5), ("high", 6, 7)))
        copies = " ".join(f"mov.b32 ${i}, $0;" for i in (1, 2, 3))
        return f"{{ .reg .b16 low, high; {low} {high} mov.b32 $0, {{low, high}}; {copies} }}"
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $3, $2; mov.b32 $1, $0;"


@gluon.constexpr_function
def _packing_operands(dtype):
    n = 32 // dtype.primitive_bitwidth
    return ",".join(["=&r"] * n + ["f"] * n)


@gluon.constexpr_function
def _unpacking_operands(dtype):
    return ",".join(["=r"] + ["r"] * (32 // dtype.primitive_bitwidth))


@gluon.jit
def _pack_p(p, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Return P rounded, in 32 bits each, in the order in which a thread has an operand's columns.

    Values in e4m3 lie in memory in that order too. What a branch or a loop hands over takes a register of 16 bits for
    each number.
    """
    ROWS: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1] * 8
    PTX: gl.constexpr = _packing(DTYPE)
    OPERANDS: gl.constexpr = _packing_operands(DTYPE)
    if is_e4m3(DTYPE):
        p = gl.permute(gl.reshape(p, [ROWS, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
        operand = gl.convert_layout(gl.reshape(p, [ROWS, N]), layout, assert_trivial=True)
        packed = gl.inline_asm_elementwise(PTX, OPERANDS, [operand], gl.int32, True, 4)
        packed, _same = gl.split(gl.reshape(packed, [ROWS, N // 4, 2, 2]))
        packed, _same = gl.split(packed)
    else:
        operand = gl.convert_layout(gl.reshape(p, [ROWS, N]), layout, assert_trivial=True)
        packed = gl.inline_asm_elementwise(PTX, OPERANDS, [operand], gl.int32, True, 2)
        packed, _same = gl.split(gl.reshape(packed, [ROWS, N // 2, 2]))
    return packed


@gluon.jit
def unpack_p(packed, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Return an operand, [rows, keys], of P as `softmax_8bit` packed it."""
    ROWS: gl.constexpr = packed.shape[0]
    EACH: gl.constexpr = 32 // DTYPE.primitive_bitwidth
    N: gl.constexpr = packed.shape[1] * EACH
    OPERANDS: gl.constexpr = _unpacking_operands(DTYPE)
    like = gl.reshape(gl.zeros([ROWS, N], gl.int32, layout), [ROWS, N // EACH, EACH])
    like_layout: gl.constexpr = like.type.layout
    packed = gl.convert_layout(packed, gl.SliceLayout(2, like_layout), assert_trivial=True)[:, :, None]
    packed, _like = gl.broadcast(packed, like)
    packed = gl.convert_layout(gl.reshape(packed, [ROWS, N]), layout, assert_trivial=True)
    DTYPES: gl.constexpr = _one_of(DTYPE)
    (operand,) = gl.inline_asm_elementwise("mov.b32 $0, $1;", OPERANDS, [packed], DTYPES, True, EACH)
    return operand


@gluon.jit
def _softmax_8bit(s, units, rows, q_idx, n_start, mask, scores, flags, score_flags, options):
    """Return P packed, alpha that rescales earlier sums, new references, sums in threads, largest scores, and NaN.

    Each row has a reference, an exponent of 2, which grows where an exponent exceeds it by more than a slack. P in e4m3
    is of probabilities times the unit of their values, so that products of all tiles add up, and 2^P_OFFSET at the
    reference. Sums are of unrounded probabilities. The last result is NaN for rows that attend values with a unit of
    NaN, and 0 for others. `rows` are earlier references, sums, scores and NaN.
    """
    row_max, row_sum, row_logit, row_nan = rows
    IS_E4M3: gl.constexpr = is_e4m3(options.DTYPE)
    SLACK: gl.constexpr = P_SLACK if IS_E4M3 else RESCALE_THRESHOLD
    ROWS: gl.constexpr = s.shape[0]
    thread_layout: gl.constexpr = row_sum.type.layout
    if options.IS_PLAIN:
        unit = _exponent_unit(units, scores.exp2_scale)
        products, largest, unit = _products_and_maxima(s, unit, q_idx, n_start, mask, flags)
        rest = (units.shift * scores.exp2_scale)[:, None]
        exponent = gl.max(largest * unit, 1) + units.shift * scores.exp2_scale
    else:
        products, lacks, row_logit = masked_scores(
            dequantise(s, units), row_logit, q_idx, n_start, mask, scores, flags, score_flags
        )
        unit = scores.exp2_scale
        largest = gl.convert_layout(_largest_in_threads(products), thread_layout)
        rest = gl.zeros([ROWS, 4], gl.float32, thread_layout)
        if scores.slope is not None:
            rest = gl.convert_layout(lacks, thread_layout)
        if scores.bias is not None:
            rest += lacks
        rest *= unit
        exponent = gl.max(largest * unit + rest, 1)
    reference = exponent
    if IS_E4M3:
        nan = units.v * 0.0  # or 0
        v_unit = gl.where(units.v == units.v, units.v, 1.0)
        v_exponent = gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [v_unit], gl.float32, True, 1)
        per_v_unit = gl.exp2(-v_exponent)
        reference += v_exponent
        if flags.PARTIAL_TILES:
            row_nan += gl.where(exponent == float("-inf"), 0.0, nan)
        else:
            row_nan += nan
    grows = reference - row_max > SLACK
    new_max = gl.where(grows, reference, row_max)
    alpha = gl.where(grows, gl.exp2(row_max - new_max), 1.0)
    shift = -new_max
    if IS_E4M3:
        shift += P_OFFSET
    if flags.PARTIAL_TILES:
        shift = gl.where(new_max == float("-inf"), 0.0, shift)
    if IS_E4M3:
        shift += v_exponent
    pieces = gl.reshape(products, [ROWS, products.shape[1] // 8, 4, 2])
    if options.IS_PLAIN:
        shift += units.shift * scores.exp2_scale
        factor = _as_pieces(unit, pieces)[:, None, :, None]
        p = gl.exp2(pieces * factor + _rows_as_pieces(shift, pieces)[:, None, None, None])
    else:
        rest = _as_pieces(rest + shift[:, None], pieces)
        p = gl.exp2(pieces * unit + rest[:, None, :, None])
    sums = gl.sum(gl.sum(p, 3), 1)
    if options.PIN_EXP2:
        sums = pin_exp2(sums)
    sums = gl.convert_layout(sums, thread_layout)
    if IS_E4M3:
        sums *= per_v_unit
    row_sum = row_sum * alpha[:, None] + sums
    return _pack_p(p, options.DTYPE, options.P_LAYOUT), alpha, new_max, row_sum, row_logit, row_nan


@gluon.constexpr_function
def _with_partial_tiles(flags, PARTIAL_TILES):
    flags = MaskFlags(*flags)  # Triton 3.6 hands over a tuple without names
    return MaskFlags(*map(gl.constexpr, flags._replace(PARTIAL_TILES=PARTIAL_TILES)))


@gluon.jit
def softmax_8bit(s, units, rows, q_idx, n_start, mask, scores, flags, score_flags, options):
    """Return `_softmax_8bit`, which masked tiles have one of their own of: what they select takes no time in others."""
    WHOLE: gl.constexpr = _with_partial_tiles(flags, False)
    if flags.PARTIAL_TILES:
        if mask.masked:
            p, alpha, new_max, new_sum, new_logit, new_nan = _softmax_8bit(
                s, units, rows, q_idx, n_start, mask, scores, flags, score_flags, options
            )
        else:
            p, alpha, new_max, new_sum, new_logit, new_nan = _softmax_8bit(
                s, units, rows, q_idx, n_start, mask, scores, WHOLE, score_flags, options
            )
    else:
        p, alpha, new_max, new_sum, new_logit, new_nan = _softmax_8bit(
            s, units, rows, q_idx, n_start, mask, scores, flags, score_flags, options
        )
    return p, alpha, new_max, new_sum, new_logit, new_nan
