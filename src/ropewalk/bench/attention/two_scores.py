"""ReRoPE in other ways than one call of `attention`: by two calls of attention with one encoding, and of ready pairs.

Both are of dense causal cases with a far window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import BASE, AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend
from ropewalk.compat.rerope import rerope_attention
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import Rope

# q, k and v -> what `rerope_attention` takes: near and far queries, near and far keys, and values.
Pairs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def near_keywords(case: AttentionCase, impl: str) -> dict[str, Any]:
    """Return the keywords of the call of `attention` to near keys."""
    return {"position": Rope(BASE), "causal": True, "window": case.far_window, "return_lse": True, "impl": impl}


def build_two_calls(case: AttentionCase, inputs: AttentionInputs, impl: str) -> Attend:
    """Build a sliding window with RoPE and plain causal attention of far keys, merged by compiled PyTorch."""
    window = _window(case)
    near: dict[str, Any] = near_keywords(case, impl)
    far: dict[str, Any] = {"causal": True, "return_lse": True, "impl": impl}
    cos, sin = _far_tables(case, inputs)
    cos, sin = cos[window:], sin[window:]
    merge = torch.compile(_merge, fullgraph=True, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        late = apply_rope(q[:, window:], None, cos, sin)
        return merge(*attention(q, k, v, **near), *attention(late, k[:, :-window], v[:, :-window], **far))

    return attend


def _merge(near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor) -> Tensor:
    """Weigh the last rows of one output and another by their shares of both sums; (B, T, H, D) and (B, H, T)."""
    first = near.shape[1] - far.shape[1]
    near_lse = near_lse[..., first:]
    lse = torch.logaddexp(near_lse, far_lse)
    near_share, far_share = ((x - lse).exp().transpose(1, 2)[..., None] for x in (near_lse, far_lse))
    merged = near[:, first:] * near_share + far * far_share
    return torch.cat((near[:, :first], merged.to(near.dtype)), 1)


def make_pairs(case: AttentionCase, inputs: AttentionInputs) -> Pairs:
    """Make the function that rotates queries and keys for `rerope_attention`."""
    cos, sin = _far_tables(case, inputs)

    def make(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        near_q, near_k = apply_rope(q, k, inputs.cos, inputs.sin)
        far_q = apply_rope(q, None, cos, sin)
        return tuple(x.transpose(1, 2) for x in (near_q, far_q, near_k, k, v))

    return make


def build_of_pairs(case: AttentionCase, impl: str) -> Callable[..., Tensor]:
    """Build the call of `rerope_attention` on pairs of `make_pairs`."""
    window, scale = _window(case), case.head_dim**-0.5

    def attend(near_q: Tensor, far_q: Tensor, near_k: Tensor, far_k: Tensor, v: Tensor) -> Tensor:
        return rerope_attention(near_q, far_q, near_k, far_k, v, True, scale, window, impl=impl).transpose(1, 2)

    return attend


def _far_tables(case: AttentionCase, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Make the tables of far queries: the window's row, for each token."""
    window = _window(case)
    return inputs.cos[window].repeat(case.tokens, 1), inputs.sin[window].repeat(case.tokens, 1)


def _window(case: AttentionCase) -> int:
    assert case.far_window is not None
    return case.far_window
