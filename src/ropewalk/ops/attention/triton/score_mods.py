"""Score mods inside the Triton kernels: a jitted function for each, and its backward.

A score function takes a tile of scaled scores and the positions of its queries and of its keys, float32 from an origin
that they share, which broadcast against the scores; it returns the tile that the softmax is taken of. `parameters_ptr`
points at the scheme's numbers for this head. Its backward takes the gradient of the function's result, and its
arguments, and returns the gradient of the scores. A tile is as often [keys, queries] as [queries, keys]:
nothing may depend on it.

PAST says that no query stands before a key, and that a few hundred positions from the origin lie the queries or the
keys: what then splits into a query's part and a key's costs a tile's edges, and not all of it. It may be ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Distances beyond the largest that a table of biases has room for on either side: those of a tile with a nearer pair.
BIAS_MARGIN = tl.constexpr(256)
# In place of a function and its backward: kernels for Hopper have their own of what `ScoreMod.decays` says.
DECAY = tl.constexpr("decay")


class ScoreMod(NamedTuple):
    """A score mod and its backward; None where it adds a number that depends on positions alone."""

    forward: Any  # (scores, query_position, key_position, parameters_ptr, PAST) -> scores
    backward: Any  # the same with the gradient in front -> gradient, or None
    # (sums, gradient, scores, …) -> sums [queries, parameters]: adds each row's part of the gradient of each parameter;
    # its tiles are always [queries, keys]. None: the parameters cannot be learned.
    param_grad: Any = None
    # (distance, parameters_ptr) -> bias, where a score mod adds a bias that is the same from some distance on, and its
    # parameters end with a number for each distance up to there, on both sides: kernels for Hopper make a table of it.
    bias: Any = None
    # Whether the scores are multiplied by the one parameter of a head, a square, and by what depends on positions:
    # kernels for Hopper take the parameter's gradient from that of the queries.
    is_factor: bool = False
    # Whether the one parameter of a head is taken off for each token of distance.
    is_slope: bool = False
    # Whether scores are multiplied by ExpoSB's decay of the distance: of rows and columns apart, in kernels for Hopper.
    decays: bool = False
    # Whether scores are multiplied by something that is not below 0: a scale above 0 may then come later.
    multiplies: bool = False
    reads_positions: bool = True  # whether its result depends on positions
    hides_keys: bool = True  # whether its result may be −inf, as of a pair that a mask forbids
    # Whether kernels for Hopper run it: its functions compute each score by itself, or it has a `bias`.
    runs_on_hopper: bool = False


@triton.jit
def _unchanged(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores


@triton.jit
def _alibi(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores - tl.load(parameters_ptr) * tl.abs(query_position - key_position)


@triton.jit
def _alibi_parameters(sums, gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return sums - tl.sum(gradient * tl.abs(query_position - key_position), 1)[:, None]


DECAY_RATE = tl.constexpr(0.005 * 1.4426950408889634)  # to base 2


@triton.jit
def _exposb_decay(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    if PAST:
        decay = (0.3 * tl.exp2(query_position * -DECAY_RATE)) * tl.exp2(key_position * DECAY_RATE)
    else:
        decay = 0.3 * tl.exp2(tl.abs(query_position - key_position) * -DECAY_RATE)
    return scores * (0.7 + decay)


@triton.jit
def _exposb_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    if PAST:
        # In another order than above, so that the compiler keeps no tile of decays in registers from there to here.
        decayed = gradient * (0.3 * tl.exp2(query_position * -DECAY_RATE)) * tl.exp2(key_position * DECAY_RATE)
        return gradient * 0.7 + decayed
    return _exposb_decay(gradient, query_position, key_position, parameters_ptr, PAST)


@triton.jit
def _bands(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores * tl.load(parameters_ptr)


@triton.jit
def _bands_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return gradient * tl.load(parameters_ptr)


@triton.jit
def _bands_parameters(sums, gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return sums + tl.sum(gradient * scores, 1)[:, None]


@triton.jit
def _bands_decay(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return _exposb_decay(scores * tl.load(parameters_ptr), query_position, key_position, parameters_ptr, PAST)


@triton.jit
def _bands_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    gradient = gradient * tl.load(parameters_ptr)
    return _exposb_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST)


@triton.jit
def _bands_decay_parameters(sums, gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    gradient = _exposb_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST)
    return sums + tl.sum(gradient * scores, 1)[:, None]


# A head's parameters: the largest distance, the number of buckets, a bias for each, and the buckets of the distances
# from the smallest, −largest, on.


@triton.jit
def _t5_ahead(query_position, key_position, parameters_ptr):
    """Return how far each key is ahead, the largest distance, and whether all are as far: one bucket a side then."""
    ahead = key_position - query_position
    largest = tl.load(parameters_ptr)
    return ahead, largest, tl.max((tl.abs(ahead) < largest).to(tl.int32)) == 0


@triton.jit
def _t5_bucket(ahead, largest, parameters_ptr):
    index = 2 + tl.load(parameters_ptr + 1) + largest + tl.minimum(tl.maximum(ahead, -largest), largest)
    return tl.load(parameters_ptr + index.to(tl.int32)).to(tl.int32)


@triton.jit
def _t5_bias(ahead, parameters_ptr):
    return tl.load(parameters_ptr + 2 + _t5_bucket(ahead, tl.load(parameters_ptr), parameters_ptr))


@triton.jit
def _t5(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    ahead, largest, is_far = _t5_ahead(query_position, key_position, parameters_ptr)
    if is_far:
        behind = tl.load(parameters_ptr + 2 + _t5_bucket(-largest, largest, parameters_ptr))
        scores += tl.where(
            ahead > 0, tl.load(parameters_ptr + 2 + _t5_bucket(largest, largest, parameters_ptr)), behind
        )
    else:
        scores += tl.load(parameters_ptr + 2 + _t5_bucket(ahead, largest, parameters_ptr))
    return scores


@triton.jit
def _t5_parameters(sums, gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    ahead, largest, is_far = _t5_ahead(query_position, key_position, parameters_ptr)
    column = tl.arange(0, sums.shape[1])[None, :] - 2
    if is_far:
        forward = tl.sum(tl.where(ahead > 0, gradient, 0.0), 1)[:, None]
        behind = tl.sum(gradient, 1)[:, None] - forward
        sums += tl.where(column == _t5_bucket(largest, largest, parameters_ptr), forward, 0.0)
        sums += tl.where(column == _t5_bucket(-largest, largest, parameters_ptr), behind, 0.0)
    else:
        bucket = _t5_bucket(ahead, largest, parameters_ptr)
        for number in tl.range(tl.min(bucket), tl.max(bucket) + 1):
            part = tl.sum(tl.where(bucket == number, gradient, 0.0), 1)[:, None]
            sums += tl.where(column == number, part, 0.0)
    return sums


UNCHANGED = ScoreMod(_unchanged, None, reads_positions=False, hides_keys=False, runs_on_hopper=True)
ALIBI = UNCHANGED._replace(forward=_alibi, param_grad=_alibi_parameters, is_slope=True, reads_positions=True)
EXPOSB_DECAY = UNCHANGED._replace(
    forward=_exposb_decay, backward=_exposb_decay_adjoint, decays=True, multiplies=True, reads_positions=True
)
EXPOSB_BANDS = UNCHANGED._replace(
    forward=_bands, backward=_bands_adjoint, param_grad=_bands_parameters, is_factor=True, multiplies=True
)
EXPOSB_BANDS_DECAY = EXPOSB_DECAY._replace(
    forward=_bands_decay, backward=_bands_decay_adjoint, param_grad=_bands_decay_parameters, is_factor=True
)
T5_BIAS = UNCHANGED._replace(forward=_t5, param_grad=_t5_parameters, bias=_t5_bias, reads_positions=True)
