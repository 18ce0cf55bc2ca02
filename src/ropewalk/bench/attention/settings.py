"""Settings of attention beside shapes and masks, by name: position schemes, softcap, sinks, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import BASE, AttentionCase
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, T5Bias, alibi_slopes


class Setting(NamedTuple):
    """Keywords of `attention`, made of parameters: float32 tensors whose last entries are the query heads'."""

    keywords: Callable[..., dict[str, Any]]
    draw: Callable[[int], tuple[Tensor, ...]] = lambda heads: ()  # the parameters for so many query heads
    learned: bool = False  # whether the parameters get gradients
    by_index: bool = False  # whether it matters which row and head of the whole tensors it is that is computed
    far: bool = False  # whether the keywords are made of a case's far window, and then of parameters

    def keywords_of(self, case: AttentionCase, *parameters: Tensor) -> dict[str, Any]:
        """The keywords for a case, of given parameters."""
        return self.keywords(case.far_window, *parameters) if self.far else self.keywords(*parameters)

    def make(self, case: AttentionCase, device: torch.device) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the keywords for a case, and those parameters in them that get gradients."""
        parameters = tuple(x.to(device).requires_grad_(self.learned) for x in self.draw(case.q_heads))
        return self.keywords_of(case, *parameters), parameters if self.learned else ()


def _normal(*shape: int) -> Tensor:
    """Draw by a seed, exact in bfloat16: a baseline in it computes with the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def _slopes(heads: int) -> tuple[Tensor, ...]:
    return (alibi_slopes(heads),)


def _bands(heads: int) -> tuple[Tensor, ...]:
    return ((1 + _normal(heads) / 8).bfloat16().float(),)


def _table(heads: int) -> tuple[Tensor, ...]:
    return (_normal(32, heads),)


def _t5(table: Tensor) -> dict[str, Any]:
    return {"position": T5Bias(table, bidirectional=False)}


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
    "sinks": Setting(lambda sinks: {"sinks": sinks}, lambda heads: (_normal(heads),), learned=True),
}
SCHEMES = ("alibi", "exposb", "exposb-decay")
LEARNED = ("alibi", "alibi-learned", "exposb", "exposb-bands-learned", "t5", "t5-learned")
VARIANTS = ("dropout", "softcap", "sinks")
