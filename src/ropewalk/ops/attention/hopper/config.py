"""Configurations of the Gluon kernels for Hopper, and the calls that they are for, as measured.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.call import AttentionCall, Precision
from ropewalk.ops.attention.hopper.backward_warps import ALTERNATING, BY_HEADS
from ropewalk.ops.attention.hopper.ranges import goes_by_ranges
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, DQ_CHUNK, WG_ROWS
from ropewalk.ops.attention.triton.config import Features
from ropewalk.ops.attention.triton.launch_common import load_score_mod
from ropewalk.ops.attention.triton.score_mods import ScoreMod

L2_SECTION_BYTES = 24 << 20  # half of the L2 cache: tensors of the heads that programs work on at a time
_PROGRAMS_PER_SECTION = 128  # nearly one for each multiprocessor of an H100 or H200
_FAST_MEMORY = 4e12  # bytes a second: an H100 has 3.35e12, an H200 4.8e12
LINE = 32  # float32 elements of a line of the dQ workspace: as many as a swizzled row of shared memory has
_CHUNK_LINES = DQ_CHUNK.value**2 // LINE
# Lines of dQ that a warp group gives away at a time: 64 features, or as many as shared memory has room for.
DQ_LINES = {64: _CHUNK_LINES, 128: _CHUNK_LINES, 192: _CHUNK_LINES, 256: _CHUNK_LINES // 2}


def cut_features(head_dim: int, v_head_dim: int) -> Features:
    """Return the blocks of features of q and k, and of v: values are not wider than keys, but for 192."""
    widest = max(head_dim, v_head_dim)
    if widest <= 64:
        return Features(64, 1, 64)
    if widest <= 128:
        return Features(128, 1, 128)
    if widest <= 192 and v_head_dim <= 128:
        return Features(64, 3, 128)
    return Features(256, 1, 256)


class ForwardConfig(NamedTuple):
    """Constants of the forward kernel's pipeline."""

    CONSUMERS: int
    BLOCK_N: int
    K_STAGES: int
    V_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PIN_EXP2: bool = False
    CONVERT_P_EARLY: bool = False
    PINGPONG: bool = False
    OUT_IN_Q: bool = False
    Q_STAGES: int = 1  # of each compute warp group; two load the next tile's queries before this one's last step
    HALVES: int = 1  # of a program, each with a load warp, and work items of its own
    LAGS: bool = False  # look for a row's maximum only where sums of exponentials are large

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.CONSUMERS * int(WG_ROWS.value)


class Traits(NamedTuple):
    """Properties of a forward call that decide its configuration."""

    causal: bool = False
    dropout: bool = False
    far: bool = False
    listed: bool = False  # blocks, or those of ranges by positions per token: a tile of queries is one block
    cut: bool = False  # by bits, a score function or ranges, which takes more registers than two halves have
    function: bool = False  # a score function that kernels apply
    bias: bool = False  # by distance, in the unit of products
    changed: bool = False  # scores whose changes take the registers of lagging maxima, or maxima that are needed
    short_lengths: bool = False
    long: bool = False  # keys enough for lagging maxima
    small_tiles: bool = False  # tiles of 128 queries are faster than those of 192
    unsuited: bool = False  # to halves: too few tiles, or scores that take more registers
    lags: bool = False  # at 64 features
    windowed: bool = False


class Rule(NamedTuple):
    """A configuration, and the traits that a call has for it."""

    config: ForwardConfig
    traits: Traits = Traits()

    def fits(self, traits: Traits) -> bool:
        """Say whether a call has all traits of the rule."""
        return all(has for has, needs in zip(traits, self.traits, strict=True) if needs)


THREE = ForwardConfig(3, 128, 2, 2, 160, 32, CONVERT_P_EARLY=True, PINGPONG=True)
# A score function at 64 features takes more registers than three compute warp groups have.
TWO = ForwardConfig(2, 128, 2, 2, 240, 24, CONVERT_P_EARLY=True, PINGPONG=True)
# Two halves with tiles of 128 queries, each of which begins and ends beside the other's steps.
HALVES = ForwardConfig(2, 64, 4, 4, 112, 32, CONVERT_P_EARLY=True, HALVES=2)
TWO_LISTED = TWO._replace(K_STAGES=3, V_STAGES=3)
_D128 = ForwardConfig(2, 128, 2, 2, 232, 40, Q_STAGES=2)
_D128_EARLY = _D128._replace(CONVERT_P_EARLY=True)
_D192 = ForwardConfig(2, 128, 2, 2, 232, 40, CONVERT_P_EARLY=True, PINGPONG=True, OUT_IN_Q=True)
_D256 = ForwardConfig(2, 64, 2, 2, 240, 24, OUT_IN_Q=True)
_D256_EARLY = _D256._replace(CONVERT_P_EARLY=True)

# By `Features.widest`: the first rule that fits a call gives its configuration.
# With dropout, P is converted before the wait for O: 16 bits of each number are masked in registers.
FORWARD = {
    64: (
        Rule(TWO._replace(LAGS=True), Traits(dropout=True, causal=True)),  # three groups have no registers for it
        Rule(TWO, Traits(dropout=True)),
        Rule(TWO_LISTED, Traits(listed=True, cut=True)),
        Rule(HALVES, Traits(listed=True)),
        Rule(TWO, Traits(function=True)),
        Rule(TWO, Traits(far=True, short_lengths=True)),
        Rule(THREE, Traits(far=True)),
        Rule(TWO, Traits(small_tiles=True, unsuited=True)),
        Rule(HALVES, Traits(small_tiles=True)),
        Rule(THREE._replace(LAGS=True), Traits(lags=True)),
        Rule(THREE),
    ),
    128: (
        Rule(_D128_EARLY, Traits(dropout=True)),
        Rule(_D128._replace(LAGS=True), Traits(listed=True)),
        Rule(_D128._replace(PINGPONG=True, LAGS=True), Traits(bias=True, long=True)),
        Rule(_D128_EARLY._replace(PINGPONG=True), Traits(changed=True)),
        Rule(_D128._replace(LAGS=True), Traits(causal=True, long=True)),
        Rule(_D128, Traits(causal=True)),
        Rule(_D128_EARLY._replace(PINGPONG=True, LAGS=True), Traits(long=True)),
        Rule(_D128_EARLY._replace(PINGPONG=True)),
    ),
    192: (
        Rule(_D192, Traits(dropout=True)),
        Rule(_D192, Traits(changed=True)),
        Rule(_D192._replace(LAGS=True), Traits(causal=True)),
        Rule(_D192, Traits(windowed=True)),  # both sides of a window take the registers of lagging maxima
        Rule(_D192._replace(LAGS=True)),
    ),
    256: (
        Rule(_D256_EARLY, Traits(dropout=True)),
        Rule(_D256._replace(PIN_EXP2=True, PINGPONG=True)),
    ),
}


class Constants8(NamedTuple):
    """Constants of the pipeline of the forward by 8-bit products."""

    CONSUMERS: int
    BLOCK_N: int
    K_STAGES: int
    V_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PIN_EXP2: bool = False
    PINGPONG: bool = False
    FLUSH: int = 0  # tiles whose products in e4m3 add up before float32 adds them to O; 0: all


class Config8(NamedTuple):
    """A configuration of the forward by 8-bit products: never by lengths or layout.

    So a row has the same bits in calls of a prefix of its sequence.
    """

    block_d: int
    constants: Constants8

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.constants.CONSUMERS * int(WG_ROWS.value)


# By the block of features, and whether values are in e4m3.
FORWARD_8BIT = {
    (64, False): Constants8(3, 128, 2, 2, 160, 32, PIN_EXP2=True, PINGPONG=True),
    (64, True): Constants8(3, 128, 3, 3, 160, 32, PIN_EXP2=True, PINGPONG=True, FLUSH=8),
    (128, False): Constants8(2, 128, 2, 2, 240, 24),
    (128, True): Constants8(2, 128, 3, 3, 240, 24, FLUSH=8),
    (256, False): Constants8(2, 64, 2, 2, 240, 24),
    (256, True): Constants8(2, 128, 2, 2, 240, 24, PIN_EXP2=True, FLUSH=12),
}
# A tile of queries is one listed block.
LISTED_8BIT = {
    False: Constants8(2, 128, 3, 3, 240, 24, PIN_EXP2=True),
    True: Constants8(2, 128, 3, 3, 240, 24, PIN_EXP2=True, FLUSH=8),
}
UNCENTRED_FLUSH = 4  # a sum loses more of what values have in common


def choose_8bit(widest: int, precision: Precision, listed: bool) -> Config8:
    """Return the configuration for heads whose widest features, of keys or values, are so many."""
    block_d = 64 if widest <= 64 else 128 if widest <= 128 else 256
    constants = FORWARD_8BIT[block_d, precision.float8_values]
    if block_d == 64 and listed:
        constants = LISTED_8BIT[precision.float8_values]
    if precision.float8_values and not precision.centre:
        constants = constants._replace(FLUSH=UNCENTRED_FLUSH)
    return Config8(block_d, constants)


HALVES_COST = 1.09  # their time for a tile's row, of that of three groups, whose tiles have 192 rows
HALVES_TILES_PER_SM = 4  # with fewer tiles, halves fill the multiprocessors unevenly
NARROW_WINDOW = 1024  # keys: tiles of 192 queries have more pairs outside of windows up to that
SHORT_LENGTHS = 2048  # keys: up to so many, tiles of three groups are not the fastest with key lengths
SHORT_KEYS = 768  # up to so many, each step of 128 features has its maxima, which takes less time than lagging ones


def choose_forward(call: AttentionCall, score_mod: ScoreMod | None, widest: int, n_sms: int) -> ForwardConfig:
    """Return the configuration of a call's forward; `score_mod` is the one that kernels apply."""
    traits = _traits(call, score_mod, n_sms)
    return next(rule.config for rule in FORWARD[widest] if rule.fits(traits))


def _traits(call: AttentionCall, score_mod: ScoreMod | None, n_sms: int) -> Traits:
    """Return the traits of a call."""
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    source, has_ranges = load_score_mod(call), goes_by_ranges(call)
    in_products = source if score_mod is None else None
    has_bias = in_products is not None and in_products.bias is not None
    has_slopes = in_products is not None and in_products.is_slope
    has_factors = in_products is not None and in_products.is_factor
    keeps_registers = source is None or has_factors or (has_slopes and call.causal)
    has_lengths = not call.causal and call.key_lengths is not None
    n_tiles = batch * heads * triton.cdiv(queries, HALVES.block_m)
    is_small = keys <= TWO.BLOCK_N or n_tiles < HALVES_TILES_PER_SM * n_sms
    return Traits(
        causal=call.causal,
        dropout=call.dropout_p > 0,
        far=call.far is not None,
        listed=has_ranges or call.blocks is not None,
        cut=has_ranges or source is not None or (call.blocks is not None and call.blocks.bits is not None),
        function=score_mod is not None,
        bias=has_bias,
        changed=not keeps_registers or call.is_capped or call.row_logits is not None,
        short_lengths=has_lengths and keys <= SHORT_LENGTHS,
        long=call.far is not None or keys > SHORT_KEYS,
        small_tiles=(has_lengths and keys <= SHORT_LENGTHS) or _wastes_tiles_of_three(call),
        unsuited=is_small or (has_bias if call.causal else has_slopes),
        lags=has_bias or (has_slopes and call.causal) or (has_lengths and source is None and not call.is_capped),
        windowed=call.has_window,
    )


def _wastes_tiles_of_three(call: AttentionCall) -> bool:
    """Say whether tiles of three groups have so many rows or pairs too many that those of two are faster."""
    left, right = call.window_left, 0 if call.causal else call.window_right
    if left is not None and right is not None and left + right <= NARROW_WINDOW:
        return True
    sizes = (HALVES.block_m, THREE.block_m)
    queries = call.q.shape[2]
    if call.cu_seqlens_q is None:
        rows_of_halves, rows_of_three = (triton.cdiv(queries, size) * size for size in sizes)
    else:  # half of a sequence's last tile is empty, in the mean; tokens may be of no sequence
        mean = queries / max(1, call.cu_seqlens_q.shape[0] - 1)
        rows_of_halves, rows_of_three = (mean + size / 2 for size in sizes)
    return bool(HALVES_COST * rows_of_halves < rows_of_three)


class BackwardConfig(NamedTuple):
    """Constants of the backward kernel's pipeline."""

    BLOCK_M: int
    DEFER_DQ: bool
    STAGES: int
    CONSUMER_REGISTERS: int
    OTHER_REGISTERS: int


# By `Features.widest`.
BACKWARD = {64: BackwardConfig(128, True, 2, 240, 24), 128: BackwardConfig(64, False, 2, 240, 24)}


class WideConfig(NamedTuple):
    """Constants of a backward kernel's pipeline for head dims above 128."""

    BLOCK_M: int
    Q_STAGES: int
    DO_STAGES: int
    CONSUMER_REGISTERS: int
    OTHER_REGISTERS: int


# Of the kernel of dV; and of that of dK and dQ, or of all, by `Features.widest`.
BACKWARD_DV = WideConfig(64, 2, 2, 240, 24)
BACKWARD_DK = {192: BACKWARD_DV, 256: WideConfig(64, 1, 1, 240, 24)}


def has_plain_scores(call: AttentionCall) -> bool:
    """Say whether a call has no score function, soft cap, far pairs or dropout."""
    return load_score_mod(call) is None and not call.is_capped and call.far is None and call.dropout_p == 0


def choose_step_order(call: AttentionCall, device: torch.device, heads_per_key: int, keys: int, widest: int) -> int:
    """Choose the order of a backward's steps, a value of `Problem.STEP_ORDER`, as measured.

    Where heads alternate, nothing of a step may depend on its head. Programs of a section must run at the same time.
    The order costs a few instructions of a step, and saves loads from memory. Longer loops do not gain, and groups of 4
    and 5 heads up to 128 features do where memory is slow.
    """
    is_dense = call.cu_seqlens_q is None and call.blocks is None and not goes_by_ranges(call)
    has_scores = load_score_mod(call) is not None or call.far is not None or call.dropout_p > 0
    if not (is_dense and call.causal) or has_scores or call.has_window or call.deterministic:
        return int(BY_HEADS.value)
    fewest_heads = 4 if widest > 128 or gpu.memory_bandwidth(device) < _FAST_MEMORY else 6
    most_tiles = 128 if widest > 128 else 64
    alternates = widest >= 128 and heads_per_key >= fewest_heads and triton.cdiv(keys, BLOCK_N.value) <= most_tiles
    return int((ALTERNATING if alternates else BY_HEADS).value)


def heads_per_l2_section(heads: int, *read: Tensor | None) -> int:
    """Return how many query heads a section has: those whose keys and values stay in the L2 cache."""
    tensors = [x for x in read if x is not None]
    bytes_of_head = sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)
    return max(1, L2_SECTION_BYTES // bytes_of_head) * (heads // tensors[0].shape[1])


def key_heads_per_l2_section(q: Tensor, heads_per_key: int, keys: int, block_d: int) -> int:
    """Return how many key heads a section of the backward has: those whose Q, dO and dQ stay in the L2 cache.

    It has at least one program for each multiprocessor. Causal programs differ in length; with fewer heads the longest
    ones of the last section would begin late, and leave most multiprocessors idle at the end.
    """
    bytes_of_head = heads_per_key * q.shape[2] * block_d * (2 * q.element_size() + 4)
    tiles: int = math.ceil(keys / BLOCK_N.value)
    return max(L2_SECTION_BYTES // bytes_of_head, math.ceil(_PROGRAMS_PER_SECTION / tiles))
