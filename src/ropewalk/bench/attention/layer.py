"""Today's attention layers: QK-norm, RoPE of half the features and an output gate around attention.

q lies beside its gate in one projection, as in Qwen3-Next. The gate and the norms' weights are leaves of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import BASE, AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.frequencies import inverse_frequencies, rope_table

EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer, and what PyTorch does before and after attention."""

    gate: Tensor  # (B, T, H, D), beside memory for q
    weights: tuple[Tensor, Tensor]  # of the norms of q and k, (D,)
    before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    after: Callable[[Tensor], Tensor]

    def beside_gate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put q beside the gate, as one projection leaves both."""
        return torch.cat((q, self.gate.detach()), -1)[..., : q.shape[-1]], k, v

    def around(self, build: Callable[[], Attend], compiled: bool) -> Attend:
        """Build PyTorch's layer around an attention without positions."""
        attend = build()
        before: Callable[..., tuple[Tensor, Tensor]] = self.before
        after: Callable[..., Tensor] = self.after
        if compiled:
            before = torch.compile(before, fullgraph=True, dynamic=False)
            after = torch.compile(after, fullgraph=True, dynamic=False)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return after(attend(*before(q, k), v))

        return call


def make_layer(case: AttentionCase, inputs: AttentionInputs) -> Layer:
    """Make the layer of a case."""
    _, drawn = SETTINGS["norm-gate"].make(case, inputs.q.device)
    fused = torch.cat((torch.zeros_like(inputs.q), drawn[0].detach()), -1)
    gate = fused[..., case.head_dim :].requires_grad_()
    q_weight, k_weight = drawn[1:]
    rotated = case.head_dim // 2
    inv_freq, _ = inverse_frequencies("default", rotated, BASE)
    tables = rope_table(torch.arange(case.tokens), inv_freq, device=inputs.q.device)
    cos, sin = (x[:, None] for x in tables)  # over heads

    def before(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = functools.partial(_norm_and_rotate, cos=cos, sin=sin, rotated=rotated)
        return normed(q, q_weight), normed(k, k_weight)

    def after(out: Tensor) -> Tensor:
        return (out.float() * torch.sigmoid(gate.float())).to(out.dtype)

    return Layer(gate, (q_weight, k_weight), before, after)


def _norm_and_rotate(x: Tensor, weight: Tensor, *, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.float())
    turned = rotate_plainly(normed[..., :rotated], cos, sin, False)
    return torch.cat((turned, normed[..., rotated:]), -1).to(x.dtype)
