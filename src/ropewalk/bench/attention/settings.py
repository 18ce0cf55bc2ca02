"""Settings of attention beside shapes and masks, by name: position schemes, softcap, sinks, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import BASE, AttentionCase
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, T5Bias, alibi_slopes


class Setting(NamedTuple):
    """Keywords of `attention`, made of parameters: float32 tensors whose last entries are the query heads'.

    Those of a layer are a gate (B, T, H, D), and weights (D,) of the norms of q and k.
    """

    keywords: Callable[..., dict[str, Any]]
    draw: Callable[[AttentionCase], tuple[Tensor, ...]] = lambda case: ()  # the parameters
    learned: bool = False  # whether the parameters get gradients
    by_index: bool = False  # whether it matters which row and head of the whole tensors it is that is computed
    far: bool = False  # whether the keywords are made of a case's far window, and then of parameters
    of_layer: bool = False  # whether the keywords are made of a case, and then of parameters in its dtype

    def keywords_of(self, case: AttentionCase, *parameters: Tensor) -> dict[str, Any]:
        """The keywords for a case, of given parameters."""
        if self.of_layer:
            return self.keywords(case, *parameters)
        return self.keywords(case.far_window, *parameters) if self.far else self.keywords(*parameters)

    def make(self, case: AttentionCase, device: torch.device) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the keywords for a case, and those parameters in them that get gradients."""
        dtype = case.torch_dtype if self.of_layer else torch.float32
        parameters = tuple(x.to(device, dtype).requires_grad_(self.learned) for x in self.draw(case))
        return self.keywords_of(case, *parameters), parameters if self.learned else ()


def _normal(*shape: int) -> Tensor:
    """Draw by a seed, exact in bfloat16: a baseline in it computes with the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def _slopes(case: AttentionCase) -> tuple[Tensor, ...]:
    return (alibi_slopes(case.q_heads),)


def _bands(case: AttentionCase) -> tuple[Tensor, ...]:
    return ((1 + _normal(case.q_heads) / 8).bfloat16().float(),)


def _table(case: AttentionCase) -> tuple[Tensor, ...]:
    return (_normal(32, case.q_heads),)


def _t5(table: Tensor) -> dict[str, Any]:
    return {"position": T5Bias(table, bidirectional=False)}


def _gate(case: AttentionCase) -> tuple[Tensor, ...]:
    return (_normal(case.batch, case.tokens, case.q_heads, case.out_head_dim),)


def _weights(case: AttentionCase) -> tuple[Tensor, ...]:
    q_weight, k_weight = (_normal(2, case.head_dim) / 8).bfloat16().float()
    return q_weight, k_weight


def _half_rope(case: AttentionCase, *more: Any) -> dict[str, Any]:
    return {"position": Rope(BASE, rotary_dim=case.head_dim // 2)}


def _normed(case: AttentionCase, q_weight: Tensor, k_weight: Tensor) -> dict[str, Any]:
    return {**_half_rope(case), "norm": QKNorm(q_weight, k_weight, offset=1.0)}


def _gated(case: AttentionCase, gate: Tensor) -> dict[str, Any]:
    return {**_half_rope(case), "gate": gate}


def _normed_and_gated(case: AttentionCase, gate: Tensor, *weights: Tensor) -> dict[str, Any]:
    return {**_normed(case, *weights), "gate": gate}


SETTINGS: dict[str, Setting] = {
    "none": Setting(dict),
    "rope": Setting(lambda: {"position": Rope(BASE)}),
    "rerope": Setting(lambda window: {"position": ReRope(window, rope=Rope(BASE))}, far=True),
    "alibi": Setting(lambda slopes: {"position": Alibi(slopes)}, _slopes),
    "exposb": Setting(lambda: {"position": ExpoSB()}),
    "exposb-decay": Setting(lambda: {"position": ExpoSB(distance_decay=True)}),
    "t5": Setting(_t5, _table),
    "alibi-learned": Setting(lambda slopes: {"position": Alibi(slopes)}, _slopes, learned=True),
    "exposb-bands-learned": Setting(lambda weights: {"position": ExpoSB(band_weights=weights)}, _bands, learned=True),
    "t5-learned": Setting(_t5, _table, learned=True),
    "dropout": Setting(lambda: {"dropout_p": 0.1}, by_index=True),
    "softcap": Setting(lambda: {"softcap": 50.0, "scale": 1.0}),  # scores of a scale of 1/√D would hardly be capped
    "sinks": Setting(lambda sinks: {"sinks": sinks}, lambda case: (_normal(case.q_heads),), learned=True),
    "half-rope": Setting(_half_rope, of_layer=True),
    "norm": Setting(_normed, _weights, learned=True, of_layer=True),
    "gate": Setting(_gated, _gate, learned=True, of_layer=True),
    "norm-gate": Setting(_normed_and_gated, lambda case: (*_gate(case), *_weights(case)), learned=True, of_layer=True),
}
LAYERS = ("half-rope", "norm", "gate", "norm-gate")
SCHEMES = ("alibi", "exposb", "exposb-decay")
LEARNED = ("alibi", "alibi-learned", "exposb", "exposb-bands-learned", "t5", "t5-learned")
VARIANTS = ("dropout", "softcap", "sinks")
