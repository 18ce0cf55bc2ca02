"""How schemes change scores inside the Triton kernels: a jitted function and its adjoint for each.

A score function takes a tile of scaled scores and the positions of its queries and keys, as int32 or int64 that
broadcast against it, and returns the tile that the softmax is taken of. `parameters_ptr` points at the scheme's numbers
for this head. Its adjoint takes the gradient of what the function returned, and what the function was given, and
returns the gradient of the scores. A tile is as often [keys, queries] as [queries, keys]: nothing may depend on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ScoreFunctions(NamedTuple):
    """A scheme's score function and its adjoint; no adjoint where the function adds what depends on positions alone."""

    score: Any  # (scores, query_position, key_position, parameters_ptr) -> scores
    adjoint: Any  # (gradient, scores, query_position, key_position, parameters_ptr) -> gradient, or None


@triton.jit
def _unchanged(scores, query_position, key_position, parameters_ptr):
    return scores


@triton.jit
def _alibi(scores, query_position, key_position, parameters_ptr):
    distance = tl.abs(query_position - key_position).to(tl.float32)
    return scores - tl.load(parameters_ptr) * distance


@triton.jit
def _exposb_decay(scores, query_position, key_position, parameters_ptr):
    distance = tl.abs(query_position - key_position).to(tl.float32)
    return scores * (0.7 + 0.3 * tl.exp(-0.005 * distance))


@triton.jit
def _exposb_decay_adjoint(gradient, scores, query_position, key_position, parameters_ptr):
    return _exposb_decay(gradient, query_position, key_position, parameters_ptr)


UNCHANGED = ScoreFunctions(_unchanged, None)
ALIBI = ScoreFunctions(_alibi, None)
EXPOSB_DECAY = ScoreFunctions(_exposb_decay, _exposb_decay_adjoint)
