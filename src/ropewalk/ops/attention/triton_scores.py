"""How schemes change scores inside the Triton kernels: a jitted function and its adjoint for each.

A score function takes a tile of scaled scores and the positions of its queries and of its keys, float32 from an origin
that they share, which broadcast against the scores; it returns the tile that the softmax is taken of. `parameters_ptr`
points at the scheme's numbers for this head. Its adjoint takes the gradient of what the function returned, and what the
function was given, and returns the gradient of the scores. A tile is as often [keys, queries] as [queries, keys]:
nothing may depend on it.

PAST says that no query stands before a key, and that a few hundred positions from the origin lie the queries or the
keys: what then splits into a query's part and a key's costs a tile's edges, and not all of it. It may be ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ScoreFunctions(NamedTuple):
    """A scheme's score function and its adjoint; no adjoint where the function adds what depends on positions alone."""

    score: Any  # (scores, query_position, key_position, parameters_ptr, PAST) -> scores
    adjoint: Any  # the same with the gradient in front -> gradient, or None


@triton.jit
def _unchanged(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores


@triton.jit
def _alibi(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores - tl.load(parameters_ptr) * tl.abs(query_position - key_position)


_DECAY_RATE = tl.constexpr(0.005 * 1.4426950408889634)  # to base 2


@triton.jit
def _exposb_decay(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    if PAST:
        decay = (0.3 * tl.exp2(query_position * -_DECAY_RATE)) * tl.exp2(key_position * _DECAY_RATE)
    else:
        decay = 0.3 * tl.exp2(tl.abs(query_position - key_position) * -_DECAY_RATE)
    return scores * (0.7 + decay)


@triton.jit
def _exposb_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    if PAST:
        # In another order than above, so that the compiler keeps no tile of decays in registers from there to here.
        decayed = gradient * (0.3 * tl.exp2(query_position * -_DECAY_RATE)) * tl.exp2(key_position * _DECAY_RATE)
        return gradient * 0.7 + decayed
    return _exposb_decay(gradient, query_position, key_position, parameters_ptr, PAST)


UNCHANGED = ScoreFunctions(_unchanged, None)
ALIBI = ScoreFunctions(_alibi, None)
EXPOSB_DECAY = ScoreFunctions(_exposb_decay, _exposb_decay_adjoint)
