"""What every launch of the Triton kernels of attention asks of a call: score functions, tables, strides.

Shape letters: B batch, T tokens, R rotary dim.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.prepare import Prepared
from ropewalk.ops.attention.triton_scores import UNCHANGED, ScoreFunctions

LOG2_E = math.log2(math.e)


def score_functions(prepared: Prepared) -> ScoreFunctions | None:
    """The scheme's score functions; None where the scores go into the softmax as they are, but for a scale above 0."""
    if prepared.score is None:
        return None if prepared.scale > 0 or prepared.softcap is not None else UNCHANGED
    module, _, attribute = prepared.score.partition(":")
    functions = getattr(importlib.import_module(module), attribute)
    if not isinstance(functions, ScoreFunctions):
        raise TypeError(f"{prepared.score} is {type(functions).__name__}, but must be ScoreFunctions")
    return functions


def place_table(cos: Tensor | None, sin: Tensor | None) -> tuple[tuple[Any, ...] | None, int]:
    """cos, sin and their strides of batch and token, as kernels take them, and R."""
    if cos is None or sin is None:
        return None, 0
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return (cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)), 2 * cos.shape[2]


def broadcast_strides(x: Tensor, count: int) -> tuple[int, ...]:
    """The first `count` strides; 0 for a dimension that serves any index."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))
