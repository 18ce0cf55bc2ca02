"""Score functions on a tile of a warp group, and biases by distance, for the kernels for Hopper.

A bias by distance is read from a head's row of a table: one number for each distance, the same from `largest` on. Only
tiles with a nearer pair read it. In others it is a constant, which a row's maximum and log-sum-exp take up: those tiles
cost what they cost without a bias. A tile of M × N scores has M + N − 1 distances, of which a thread reads what it
needs: neighbours, which the L1 cache holds.

A slope takes a number off for each token of distance. In a tile whose keys are all on one side of the queries that is a
number of the row, one of the column, and nothing else. What a thread's columns differ by are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon
from ropewalk.ops.attention.hopper.tiles import BLOCK_N
from ropewalk.ops.attention.triton.masking import PAST
from ropewalk.ops.attention.triton.scheduler import sequence_info
from ropewalk.ops.attention.triton.score_mods import BIAS_MARGIN, DECAY, DECAY_RATE
from ropewalk.ops.attention.triton.tiles import load_positions as load_float_positions
from ropewalk.ops.attention.triton.tiles import numbers_of_head, params_of_head, position_origin


class Bias(NamedTuple):
    """The bias by distance of one head, for the tiles of one warp group."""

    ptr: Any  # of distance 0
    largest: Any  # from this distance on it is the same
    behind: Any  # the bias of keys so far behind their query
    ahead: Any  # of keys so far ahead
    start: Any  # the warp group's first row: a key, or the key index of a query
    tile_start: Any  # that of the program's tile


class Slope(NamedTuple):
    """A number that each token of distance takes off the scores of one head, for the tiles of one warp group."""

    number: Any  # in the unit of products
    start: Any  # as those of `Bias`
    tile_start: Any


class TilePositions(NamedTuple):
    """Positions that tokens are given, float32 from an origin that queries and keys share."""

    rows: Any  # [WG_ROWS]: of the warp group's own tokens
    columns: Any  # pointer: of the tokens that its loop streams, from their sequence's first one on
    n_columns: Any


class HeadScores(NamedTuple):
    """`Scores` at one head, and what score functions read beside."""

    params: Any
    scale: Any
    cap: Any
    exp2_scale: Any
    bias: Any  # Bias; None: there is none
    slope: Any  # Slope; likewise
    positions: Any  # TilePositions; None: positions are indices


@triton.jit
def bias_table_kernel(
    table_ptr,  # (heads, 2 · (largest + MARGIN) + 1), float32: the bias of each distance, keys behind first
    params_ptr,  # (heads, params_stride)
    params_stride,
    largest,
    scale,
    BIAS: tl.constexpr,  # ScoreMod.bias
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one head's biases by distance, in the unit of products that the scale will multiply."""
    head = tl.program_id(0).to(tl.int64)
    width = 2 * (largest + MARGIN) + 1
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        distance = tl.minimum(tl.maximum(index - (largest + MARGIN), -largest), largest)
        bias = BIAS(distance.to(tl.float32), params_ptr + head * params_stride) / scale
        tl.store(table_ptr + head * width + index, bias, index < width)


@triton.jit
def relative_positions_kernel(
    q_out_ptr,  # (B, Tq) and (B, Tk), float32: from the first key's position of each sequence
    k_out_ptr,
    positions_q,  # Positions
    positions_k,
    packed,  # Packed | None
    bounds,  # Bounds
    n_queries,
    n_keys,
    PROGRAMS: tl.constexpr,  # of a sequence
    BLOCK: tl.constexpr,
):
    """Write a part of one sequence's positions."""
    sequence = tl.program_id(0) // PROGRAMS
    first = tl.program_id(0) % PROGRAMS * BLOCK
    batch = sequence if packed is None else sequence * 0
    q_offset, k_offset, kv_capacity, seqlens = sequence_info(sequence, packed, bounds, n_queries, n_keys, 0, None)
    origin = position_origin(positions_k, batch, k_offset)
    q_out_ptr += batch.to(tl.int64) * n_queries + q_offset
    k_out_ptr += batch.to(tl.int64) * n_keys + k_offset
    for start in range(first, seqlens.n_queries, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        default = start + seqlens.causal_offset
        position = load_float_positions(positions_q, batch, q_offset, start, default, origin, BLOCK)
        tl.store(q_out_ptr + index, position, index < seqlens.n_queries)
    for start in range(first, kv_capacity, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        position = load_float_positions(positions_k, batch, k_offset, start, start, origin, BLOCK)
        tl.store(k_out_ptr + index, position, index < kv_capacity)


@gluon.jit
def load_bias(scores, batch, head, start, tile_start):
    """Return the `Bias` of a head, for a warp group and a tile whose first rows have key indices; None without any."""
    bias = None
    if scores.largest is not None:
        ptr = params_of_head(scores, batch, head)
        reach = scores.largest + BIAS_MARGIN
        bias = Bias(ptr + reach, scores.largest, gl.load(ptr), gl.load(ptr + 2 * reach), start, tile_start)
    return bias


@gluon.jit
def load_slope(scores, batch, head, start, tile_start):
    """Return the `Slope` of a head, likewise."""
    slope = None
    if scores.slopes is not None:
        slope = Slope(_slope_of_head(scores, batch, head), start, tile_start)
    return slope


@gluon.jit
def _slope_of_head(scores, batch, head):
    """Return what each token of distance takes off the products of a head."""
    return gl.load(numbers_of_head(scores.slopes, scores, batch, head)) / scores.scale


@gluon.jit
def exp2_scale_of_head(scores, batch, head):
    """Return what makes a head's scores exponents of 2."""
    exp2_scale = scores.exp2_scale
    if scores.factors is not None:
        factor = gl.load(numbers_of_head(scores.factors, scores, batch, head))
        exp2_scale *= gl.maximum(factor, 1e-30)  # times 0 a score of -inf would be NaN
    return exp2_scale


@gluon.jit
def load_positions(scores, tile, seqlens, row, ROWS_ARE_KEYS: gl.constexpr):
    """Return the `TilePositions` of a warp group, given the indices of its rows in their sequence."""
    q_pos = scores.q_pos + (tile.batch.to(gl.int64) * scores.q_pos_stride_batch + tile.q_offset)
    k_pos = scores.k_pos + (tile.batch.to(gl.int64) * scores.k_pos_stride_batch + tile.k_offset)
    if ROWS_ARE_KEYS:
        rows = k_pos
        n_rows = seqlens.n_keys
        columns = q_pos
        n_columns = seqlens.n_queries
    else:
        rows = q_pos
        n_rows = seqlens.n_queries
        columns = k_pos
        n_columns = seqlens.n_keys
    return TilePositions(gl.load(rows + row, row < n_rows, other=0.0), columns, n_columns)


@triton.jit
def has_near_pair(ahead, largest, N_QUERIES: tl.constexpr, N_KEYS: tl.constexpr):
    """Return whether a pair of a tile, whose first key is `ahead` of its first query, is less than `largest` apart."""
    return (ahead + (N_KEYS - 1) > -largest) & (ahead - (N_QUERIES - 1) < largest)


# Numbers are added one by one. A tile of them would take as many registers as the scores.
_ADD_LOADED = gl.constexpr("{ .reg .f32 bias; ld.global.f32 bias, [$2]; add.f32 $0, $1, bias; }")


@gluon.jit
def _add_near_bias(s, bias, ahead, is_near, ROWS_ARE_KEYS: gl.constexpr):
    """Add the biases of a tile of scores, whose first key is `ahead` of the first query, if a pair is near."""
    if is_near:
        row = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        ptr = bias.ptr + ahead
        address = (ptr + row) - column if ROWS_ARE_KEYS else (ptr - row) + column
        s = gl.inline_asm_elementwise(_ADD_LOADED, "=f,f,l", [s, address.to(gl.int64)], gl.float32, True, 1)
    return s


@gluon.jit
def shift_lse(lse, scores, batch, head, ahead, column, flags, N_KEYS: gl.constexpr):
    """Take off a tile's log-sum-exp what is added to the scores, but for what its rows add; for the load warp.

    The first key is `ahead` of the first query. Of a bias by distance that is a number of all pairs, or 0 if one is
    near; of slopes it is the first key's, for each query.
    """
    N_QUERIES: gl.constexpr = lse.shape[0]
    if scores.largest is not None and scores.q_pos is None:
        reach = scores.largest + BIAS_MARGIN
        bias = gl.load(params_of_head(scores, batch, head) + gl.where(ahead > 0, 2 * reach, 0))
        lse -= gl.where(has_near_pair(ahead, scores.largest, N_QUERIES, N_KEYS), 0.0, bias) * scores.exp2_scale
    if scores.slopes is not None:
        number = _slope_of_head(scores, batch, head) * scores.exp2_scale
        number = _signed(number, ahead, N_QUERIES, flags)
        lse -= number * (ahead - column).to(gl.float32)
    return lse


@gluon.jit
def _signed(number, ahead, N_QUERIES: gl.constexpr, flags):
    """Return what a tile's scores grow by from one key to the next; of one with keys on both sides as if all behind."""
    if flags.SIDE != PAST:
        number = gl.where(ahead > N_QUERIES - 1, -number, number)
    return number


@gluon.jit
def _is_crossed(ahead, N_QUERIES: gl.constexpr, N_KEYS: gl.constexpr):
    """Return whether a tile, whose first key is `ahead` of its first query, has keys on both sides of a query."""
    return (ahead + (N_KEYS - 1) > 0) & (ahead <= N_QUERIES - 1)


@gluon.jit
def _load_columns(positions, start, column):
    """Load the positions of a tile's streamed tokens; 0 past the sequence's last one."""
    index = start + column
    return gl.load(positions.columns + index, index < positions.n_columns, other=0.0)


@gluon.jit
def _bias_of_positions(bias, q_pos, k_pos):
    """Return the bias of each pair of positions."""
    largest = bias.largest.to(gl.float32)
    ahead = gl.minimum(gl.maximum(k_pos - q_pos, -largest), largest)
    return gl.load(bias.ptr + ahead.to(gl.int32))


@gluon.constexpr_function
def _is_decay(mod):
    """Say whether the decay stands for a function of a `ScoreMod`."""
    return mod == DECAY.value


@gluon.constexpr_function
def _power_of_two(exponent):
    return 2.0**exponent


@gluon.jit
def _powers(eighth, EXPONENT: gl.constexpr):
    """Return 2^(EXPONENT · eighth) below 16, which the compiler folds to constants: it does not fold exp2."""
    powers = gl.where(eighth % 2 == 1, _power_of_two(EXPONENT), 1.0)
    powers *= gl.where(eighth // 2 % 2 == 1, _power_of_two(2 * EXPONENT), 1.0)
    powers *= gl.where(eighth // 4 % 2 == 1, _power_of_two(4 * EXPONENT), 1.0)
    return powers * gl.where(eighth // 8 % 2 == 1, _power_of_two(8 * EXPONENT), 1.0)


@gluon.jit
def _weight(scores):
    """Return the square of a head's weight; 1 without weights."""
    weight = 1.0
    if scores.params is not None:
        weight = gl.load(scores.params)
    return weight


@gluon.jit
def _decay(tile, row, weight, ROWS_AHEAD: gl.constexpr, COLUMNS_AHEAD: gl.constexpr, ADJOINT: gl.constexpr):
    """Multiply a tile by ExpoSB's decay of the distances from its columns, from 0 on, to positions of its rows.

    2^(-rate · |distance|) is the smaller one of a product for rows ahead of columns and one for columns ahead, if both
    may be. From one eight of columns to the next it changes by constants, and a thread holds two columns of each eight:
    so few numbers are its own. The adjoint multiplies in another order, or the compiler would keep a tile of decays.
    """
    RATE: gl.constexpr = DECAY_RATE
    gl.static_assert(tile.shape[1] <= 128)
    pieces = gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8])
    layout: gl.constexpr = gl.SliceLayout(1, pieces.type.layout)
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
    eighth = gl.arange(0, tile.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, pieces.type.layout)))
    eighth = eighth[None, :, None]
    share = 0.3
    if not (ROWS_AHEAD and COLUMNS_AHEAD):
        share *= weight
    if ROWS_AHEAD:
        if ADJOINT:
            behind = gl.exp2(row * -RATE) * (gl.exp2(column * RATE) * share)
        else:
            behind = (gl.exp2(row * -RATE) * share) * gl.exp2(column * RATE)
        decay = behind[:, None, :] * _powers(eighth, 8 * RATE)
    if COLUMNS_AHEAD:
        if ADJOINT:
            ahead = gl.exp2(row * RATE) * (gl.exp2(column * -RATE) * share)
        else:
            ahead = (gl.exp2(row * RATE) * share) * gl.exp2(column * -RATE)
        other = ahead[:, None, :] * _powers(eighth, -8 * RATE)
        decay = gl.minimum(decay, other) * weight if ROWS_AHEAD else other
    return gl.convert_layout(gl.reshape(pieces * (0.7 * weight + decay), tile.shape), tile.type.layout)


@gluon.jit
def modify_scores(s, q_idx, n_start, column, seqlens, scores, flags, score_flags):
    """Return the score function of a tile of scaled scores, [queries, keys]."""
    if scores.positions is None:
        q_pos = (q_idx + (seqlens.causal_offset - n_start)).to(gl.float32)
        if _is_decay(score_flags.MOD):
            s = _decay(s, q_pos, _weight(scores), True, flags.SIDE != PAST, False)
        else:
            k_pos = column.to(gl.float32)
            s = score_flags.MOD(s, q_pos[:, None], k_pos[None, :], scores.params, flags.SIDE == PAST)
    else:
        k_pos = _load_columns(scores.positions, n_start, column)
        s = score_flags.MOD(s, scores.positions.rows[:, None], k_pos[None, :], scores.params, False)
    return s


@gluon.jit
def modify_transposed_scores(s, m_start, column, k_idx, seqlens, scores, flags, score_flags):
    """Return the score function of a tile of scaled scores, [keys, queries]."""
    if scores.positions is None:
        k_pos = (k_idx - (m_start + seqlens.causal_offset)).to(gl.float32)
        if _is_decay(score_flags.MOD):
            s = _decay(s, k_pos, _weight(scores), flags.SIDE != PAST, True, False)
        else:
            s = score_flags.MOD(s, column.to(gl.float32)[None, :], k_pos[:, None], scores.params, flags.SIDE == PAST)
    else:
        q_pos = _load_columns(scores.positions, m_start, column)
        s = score_flags.MOD(s, q_pos[None, :], scores.positions.rows[:, None], scores.params, False)
    return s


@gluon.jit
def add_bias(s, n_start, column, scores):
    """Add the bias by distance to a tile [queries, keys]; return that of all its pairs apart, or 0 if one is near."""
    bias = scores.bias
    if scores.positions is None:
        ahead = n_start - bias.start
        is_near = has_near_pair(ahead, bias.largest, s.shape[0], s.shape[1])
        s = _add_near_bias(s, bias, ahead, is_near, False)
        rest = gl.where(is_near, 0.0, gl.where(ahead > 0, bias.ahead, bias.behind))
    else:
        k_pos = _load_columns(scores.positions, n_start, column)
        s += _bias_of_positions(bias, scores.positions.rows[:, None], k_pos[None, :])
        rest = bias.behind * 0.0
    return s, rest


@gluon.jit
def add_transposed_bias(s, m_start, column, seqlens, scores):
    """Add the bias by distance to a tile [keys, queries] if a pair is near; otherwise the load warp took it off lse."""
    bias = scores.bias
    if scores.positions is None:
        start = m_start + seqlens.causal_offset
        is_near = has_near_pair(bias.tile_start - start, bias.largest, s.shape[1], BLOCK_N)
        s = _add_near_bias(s, bias, bias.start - start, is_near, True)
    else:
        q_pos = _load_columns(scores.positions, m_start, column)
        s += _bias_of_positions(bias, q_pos[None, :], scores.positions.rows[:, None])
    return s


@gluon.jit
def add_slopes(s, q_idx, n_start, seqlens, slope, flags):
    """Add slopes to a tile [queries, keys], but for numbers of each row and thread, [queries, 4], returned apart."""
    pieces = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = pieces.type.layout
    rest_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    ahead = n_start - slope.start
    number = _signed(slope.number, ahead, s.shape[0], flags)
    eighth = gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    steps = (8 * eighth).to(gl.float32)[None, :, None, None] + odd.to(gl.float32)[None, None, None, :]
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, rest_layout))[None, :]
    query = gl.convert_layout(q_idx, gl.SliceLayout(1, rest_layout))[:, None]
    # How far a thread's first key is behind each query.
    behind = (query + seqlens.causal_offset - (n_start + 2 * pair)).to(gl.float32)
    if flags.SIDE != PAST:  # noqa: SIM102
        if _is_crossed(ahead, s.shape[0], s.shape[1]):
            pieces -= 2 * number * gl.maximum(steps - behind[:, None, :, None], 0.0)
    pieces += number * steps
    s = gl.convert_layout(gl.reshape(pieces, s.shape), s.type.layout)  # which moves nothing
    return s, number * -behind


@gluon.jit
def add_transposed_slopes(exponents, m_start, column, k_idx, seqlens, scores, flags):
    """Add slopes to exponents [keys, queries]: the load warp took off lse what is the first key's."""
    slope = scores.slope
    start = m_start + seqlens.causal_offset
    ahead = slope.tile_start - start
    number = _signed(slope.number * scores.exp2_scale, ahead, exponents.shape[1], flags)
    exponents += (number * (k_idx - slope.tile_start).to(gl.float32))[:, None]
    if flags.SIDE != PAST:  # noqa: SIM102
        if _is_crossed(ahead, exponents.shape[1], BLOCK_N):
            ahead_of = k_idx[:, None] - (start + column)[None, :]
            exponents -= 2 * number * gl.maximum(ahead_of, 0).to(gl.float32)
    return exponents


@gluon.jit
def differentiate_mod(ds, scaled, m_start, k_idx, seqlens, scores, flags, score_flags):
    """Return the gradient of a tile of scaled scores, [keys, queries], given that of their score function."""
    column = gl.arange(0, ds.shape[1], layout=gl.SliceLayout(0, ds.type.layout))
    if scores.positions is None:
        k_pos = (k_idx - (m_start + seqlens.causal_offset)).to(gl.float32)
        if _is_decay(score_flags.MOD_BWD):
            ds = _decay(ds, k_pos, _weight(scores), flags.SIDE != PAST, True, True)
        else:
            ds = score_flags.MOD_BWD(
                ds, scaled, column.to(gl.float32)[None, :], k_pos[:, None], scores.params, flags.SIDE == PAST
            )
    else:
        q_pos = _load_columns(scores.positions, m_start, column)
        ds = score_flags.MOD_BWD(ds, scaled, q_pos[None, :], scores.positions.rows[:, None], scores.params, False)
    return ds


@gluon.jit
def sum_distances(ds, m_start, k_idx, seqlens, flags):
    """Return Σ dS · |distance| of a tile's rows, [keys, queries], as far as each thread holds them, [rows, 4].

    Of every eight columns the first one's distance is a number of its own, and the others' differ from it by constants.
    A tile of distances would take as many registers as dS; the compiler would keep one from `modify_transposed_scores`
    to here.
    """
    pieces = gl.reshape(ds, [ds.shape[0], ds.shape[1] // 8, 8])
    layout: gl.constexpr = gl.SliceLayout(1, pieces.type.layout)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, layout)) + (m_start + seqlens.causal_offset)
    row = gl.convert_layout(k_idx, gl.SliceLayout(1, layout))
    eighth = gl.arange(0, ds.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, pieces.type.layout)))
    distance = (column[None, :] - row[:, None]).to(gl.float32)[:, None, :]
    distance += (8 * eighth).to(gl.float32)[None, :, None]
    if flags.SIDE != PAST:  # where keys ahead have no dS there is none below 0
        distance = gl.abs(distance)
    sums = gl.sum(pieces * distance, 1)
    return gl.sum(gl.reshape(sums, [ds.shape[0], 4, 2]), 2)
