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
    """Keywords of `attention`, built from a case and parameters: float32, the last entries are the query heads'.

    Those of a layer are of the case's dtype: a gate (B, T, H, D), and weights (D,) of the norms of q and k.
    """

    keywords_of: Callable[..., dict[str, Any]]
    draw: Callable[[AttentionCase], tuple[Tensor, ...]] = lambda case: ()  # the parameters
    learned: bool = False  # whether the parameters get gradients
    by_index: bool = False  # whether it matters which row and head of the whole tensors it is that is computed
    is_layer: bool = False
    # Of 8-bit products: the setting that has the exact result, and the largest relative error of an output.
    exact: str | None = None
    largest_error: float = 0.0

    def make(self, case: AttentionCase, device: torch.device) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the keywords for a case, and those parameters in them that get gradients."""
        dtype = case.torch_dtype if self.is_layer else torch.float32
        parameters = tuple(x.to(device, dtype).requires_grad_(self.learned) for x in self.draw(case))
        return self.keywords_of(case, *parameters), parameters if self.learned else ()


def _scheme(make: Callable[..., object], *more: Any) -> Setting:
    return Setting(lambda case, *parameters: {"position": make(*parameters)}, *more)


def _normal(*shape: int, around: float | None = None) -> Tensor:
    """Draw by a seed, exact in bfloat16: a baseline in it computes with the same numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    return x if around is None else (around + x / 8).bfloat16().float()


def _layer(case: AttentionCase, gate: Tensor | None = None, *weights: Tensor) -> dict[str, Any]:
    parts = {"gate": gate, "norm": QKNorm(weights[0], weights[1], offset=1.0) if weights else None}
    present = {name: part for name, part in parts.items() if part is not None}
    return {"position": Rope(BASE, rotary_dim=case.head_dim // 2), **present}


def _gate(case: AttentionCase) -> tuple[Tensor, ...]:
    return (_normal(case.batch, case.tokens, case.q_heads, case.out_head_dim),)


def _weights(case: AttentionCase) -> tuple[Tensor, ...]:
    return tuple(_normal(2, case.head_dim, around=0))


def _products(exact: str, largest_error: float, **keywords: Any) -> Setting:
    return Setting(lambda case: keywords, exact=exact, largest_error=largest_error)


_ALIBI = _scheme(Alibi, lambda case: (alibi_slopes(case.q_heads),))
_T5 = _scheme(lambda table: T5Bias(table, bidirectional=False), lambda case: (_normal(32, case.q_heads),))
SETTINGS: dict[str, Setting] = {
    "none": Setting(lambda case: {}),
    "rope": _scheme(lambda: Rope(BASE)),
    "rerope": Setting(lambda case: {"position": ReRope(case.far_window, rope=Rope(BASE))}),
    "alibi": _ALIBI,
    "exposb": _scheme(ExpoSB),
    "exposb-decay": _scheme(lambda: ExpoSB(distance_decay=True)),
    "t5": _T5,
    "alibi-learned": _ALIBI._replace(learned=True),
    "exposb-bands-learned": _scheme(
        lambda weights: ExpoSB(band_weights=weights), lambda case: (_normal(case.q_heads, around=1),), True
    ),
    "t5-learned": _T5._replace(learned=True),
    "dropout": Setting(lambda case: {"dropout_p": 0.1}, by_index=True),
    "deterministic": Setting(lambda case: {"deterministic": True}),
    # Scores of a scale of 1/√D would hardly be capped.
    "softcap": Setting(lambda case: {"softcap": 50.0, "scale": 1.0}),
    "sinks": Setting(lambda case, sinks: {"sinks": sinks}, lambda case: (_normal(case.q_heads),), learned=True),
    **{
        f"{prefix}{name}": _products(exact, largest, precision=name, **position)
        for name, largest in (("int8", 0.013), ("int8-fp8", 0.04))
        for prefix, exact, position in (("", "none", {}), ("rope-", "rope", {"position": Rope(BASE)}))
    },
    # Of other libraries, which state no bound: past it a result is taken for another computation.
    "other-8bit": _products("none", 0.1),
    "rope-other-8bit": _products("rope", 0.1, position=Rope(BASE)),
    "half-rope": Setting(_layer, is_layer=True),
    "norm": Setting(lambda case, *weights: _layer(case, None, *weights), _weights, learned=True, is_layer=True),
    "gate": Setting(_layer, _gate, learned=True, is_layer=True),
    "norm-gate": Setting(_layer, lambda case: _gate(case) + _weights(case), learned=True, is_layer=True),
}
PRODUCTS = ("rope-int8", "rope-int8-fp8", "int8", "int8-fp8")
LAYERS = ("half-rope", "norm", "gate", "norm-gate")
SCHEMES = ("alibi", "exposb", "exposb-decay", "t5")
LEARNED = ("alibi", "alibi-learned", "exposb", "exposb-bands-learned", "t5", "t5-learned")
VARIANTS = ("dropout", "softcap", "sinks", "deterministic")
