"""Score mods of a user's own, which no backend knows by name."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.score_mods import ScoreMod


@triton.jit
def _log_bias(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return scores - tl.load(parameters_ptr) * tl.log(1.0 + tl.abs(query_position - key_position))


@triton.jit
def _log_bias_parameters(sums, gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
    return sums - tl.sum(gradient * tl.log(1.0 + tl.abs(query_position - key_position)), 1)[:, None]


LOG_BIAS = ScoreMod(_log_bias, None)
LEARNED_LOG_BIAS = ScoreMod(_log_bias, None, _log_bias_parameters)
