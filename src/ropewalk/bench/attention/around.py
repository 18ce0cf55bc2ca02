"""Attention by more than one call: ReRoPE by two calls and of ready pairs, and the layers of today's models.

ReRoPE's are of dense causal cases with a far window. A layer is QK-norm, RoPE of half the features and an output gate
around attention: q lies beside its gate in one projection, as in Qwen3-Next, and the gate and the norms' weights are
leaves of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import BASE, AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.bench.rope.peers import compile_whole
from ropewalk.compat.rerope import rerope_attention
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import Rope

EPS = 1e-6
# q, k and v -> what the timed call takes: of `rerope_attention` near and far queries, near and far keys, and values.
Before = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def near_keywords(case: AttentionCase, impl: str) -> dict[str, Any]:
    """Return the keywords of the call of `attention` to near keys."""
    return {"position": Rope(BASE), "causal": True, "window": case.far_window, "return_lse": True, "impl": impl}


def build_two_calls(case: AttentionCase, inputs: AttentionInputs, impl: str) -> Attend:
    """Build a sliding window with RoPE and plain causal attention of far keys, merged by compiled PyTorch."""
    near, window, merge = near_keywords(case, impl), _window(case), compile_whole(_merge)
    far: dict[str, Any] = {"causal": True, "return_lse": True, "impl": impl}
    cos, sin = (x[window:] for x in _far_tables(case, inputs))

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


def make_pairs(case: AttentionCase, inputs: AttentionInputs) -> Before:
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


class Layer(NamedTuple):
    gate: Tensor  # (B, T, H, D), beside memory for q
    weights: tuple[Tensor, ...]  # of the norms of q and k, (D,)
    beside_gate: Before  # puts q beside the gate, as one projection leaves both
    around: Callable[[Callable[[], Attend], bool], Attend]  # an attention without positions, compiled or not


def make_layer(case: AttentionCase, inputs: AttentionInputs) -> Layer:
    """Make the parameters of a case's layer, and what PyTorch does before and after attention."""
    _, (drawn, *weights) = SETTINGS["norm-gate"].make(case, inputs.q.device)
    fused = torch.cat((torch.zeros_like(inputs.q), drawn.detach()), -1)
    gate = fused[..., case.head_dim :].requires_grad_()
    inv_freq, _ = inverse_frequencies("default", case.head_dim // 2, BASE)
    tables = rope_table(torch.arange(case.tokens), inv_freq, device=inputs.q.device)
    cos, sin = (x[:, None] for x in tables)  # over heads
    q_weight, k_weight = weights

    def norm_and_rotate(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.float())
        return rotate_plainly(normed, cos, sin, False).to(x.dtype)

    def before(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return norm_and_rotate(q, q_weight), norm_and_rotate(k, k_weight)

    def after(out: Tensor) -> Tensor:
        return (out.float() * torch.sigmoid(gate.float())).to(out.dtype)

    def around(build: Callable[[], Attend], compiled: bool) -> Attend:
        attend = build()
        first: Callable[..., tuple[Tensor, Tensor]] = compile_whole(before) if compiled else before
        last = compile_whole(after) if compiled else after
        return lambda q, k, v: last(attend(*first(q, k), v))

    def beside_gate(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.cat((q, gate.detach()), -1)[..., : q.shape[-1]], k, v

    return Layer(gate, tuple(weights), beside_gate, around)
