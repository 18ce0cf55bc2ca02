"""Correctness before speed: an attention is timed only if its output and its gradients are right.

The truth is the reference in float64, on slices: the first batch row with the first key head and the query heads that
share it, and the last with the last. Scores of a slice are never whole, so that no length is too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.bench.attention_cases import SCHEMES, AttentionCase, AttentionInputs
from ropewalk.bench.gate import Verdict, max_error
from ropewalk.ops.attention.checks import as_bhtd, check_call
from ropewalk.ops.attention.reference import attend
from ropewalk.positions import Alibi
from ropewalk.testing import error_budget

# q, k, v -> out, all (B, T, H, D); its position scheme is part of it.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Results on the way that are rounded to the dtype: mapped features, scores, probabilities, and what comes of them.
_ROUNDINGS = 4
# Outputs of late queries and gradients of late keys are small beside those of early ones when causal: each stretch of
# tokens has a budget of its own.
_STRETCHES = 8
_NAMES = ("the output", "q's gradient", "k's gradient", "v's gradient")


class _Slice(NamedTuple):
    row: int
    key_head: int

    def of(self, x: Tensor, group: int) -> Tensor:
        """The slice of a tensor with `group` heads for each key head."""
        heads = slice(self.key_head * group, (self.key_head + 1) * group)
        return x[self.row : self.row + 1, :, heads]


class _Stretch(NamedTuple):
    """Some tokens of a slice of one result."""

    truth: Tensor
    budget: float


class AttentionGate:
    """The right results of one case, for every scheme that is asked for, and how far from them results may be."""

    def __init__(self, case: AttentionCase, inputs: AttentionInputs) -> None:
        self.case, self.inputs = case, inputs
        self.slices = list(dict.fromkeys((_Slice(0, 0), _Slice(case.batch - 1, case.k_heads - 1))))
        self._known: dict[str, list[list[list[_Stretch]]]] = {}

    def check(self, candidate: Attend, scheme: str, *, backward: bool) -> Verdict:
        """Run `candidate` once on copies and compare; every exception of the implementation is let through.

        The verdict's error and budget are those of the stretch that comes nearest to its budget, or is furthest past.
        """
        originals = (self.inputs.q, self.inputs.k, self.inputs.v)
        xs = [x.clone() for x in originals]
        if backward:
            leaves = [x.requires_grad_() for x in xs]
            out = candidate(*leaves)
            results = [out.detach(), *torch.autograd.grad(out, leaves, self.inputs.grad)]
        else:
            with torch.no_grad():
                results = [candidate(*xs)]
        if not all(torch.equal(x, original) for x, original in zip(xs, originals, strict=True)):
            return Verdict(math.inf, 0.0, "it wrote into its inputs")
        groups = (self.case.group, self.case.group, 1, 1)
        shapes = [tuple(x.shape) for x in (self.inputs.q, *originals)]
        worst = Verdict(0.0, math.inf, None)
        for index, result in enumerate(results):
            if tuple(result.shape) != shapes[index]:
                return Verdict(math.inf, 0.0, f"{_NAMES[index]} has shape {tuple(result.shape)}")
            for at, known in zip(self.slices, self._expected(scheme), strict=True):
                pieces = at.of(result, groups[index]).chunk(_STRETCHES, 1)
                for piece, stretch in zip(pieces, known[index], strict=True):
                    error = max_error([piece], [stretch.truth])
                    if _share(error, stretch.budget) > _share(worst.error, worst.budget):
                        fits = error <= stretch.budget
                        complaint = None if fits else f"the error of {_NAMES[index]} is past the budget"
                        worst = Verdict(error, stretch.budget, complaint)
        return worst if math.isfinite(worst.budget) else replace(worst, budget=0.0)

    def _expected(self, scheme: str) -> list[list[list[_Stretch]]]:
        """By slice, by result (out and the gradients of q, k and v), by stretch."""
        if scheme not in self._known:
            self._known[scheme] = [self._stretches(scheme, at) for at in self.slices]
        return self._known[scheme]

    def _stretches(self, scheme: str, at: _Slice) -> list[list[_Stretch]]:
        truths = self._compute(scheme, at, torch.float64)
        baselines = self._compute(scheme, at, self.case.torch_dtype)
        return [
            [
                _Stretch(exact, error_budget(exact, plain, _ROUNDINGS))
                for exact, plain in zip(truth.chunk(_STRETCHES, 1), baseline.chunk(_STRETCHES, 1), strict=True)
            ]
            for truth, baseline in zip(truths, baselines, strict=True)
        ]

    def _compute(self, scheme: str, at: _Slice, dtype: torch.dtype) -> list[Tensor]:
        """The reference's output and gradients, every step in `dtype`."""
        case, inputs = self.case, self.inputs
        position = SCHEMES[scheme](case.q_heads)
        if isinstance(position, Alibi):  # the one scheme that asks which head it is
            assert position.slopes is not None
            position = Alibi(position.slopes.unflatten(0, (case.k_heads, case.group))[at.key_head])
        lengths = inputs.key_lengths
        if lengths is not None:
            lengths = lengths[at.row : at.row + 1]
        q, k, v = leaves = [
            at.of(x, group).to(dtype).detach().requires_grad_()
            for x, group in ((inputs.q, case.group), (inputs.k, 1), (inputs.v, 1))
        ]
        call = check_call(q, k, v, position=position, causal=case.causal, key_lengths=lengths)
        out = attend(as_bhtd(q, "bthd"), as_bhtd(k, "bthd"), as_bhtd(v, "bthd"), call)[0].transpose(1, 2)
        grads = torch.autograd.grad(out, leaves, at.of(inputs.grad, case.group).to(dtype))
        return [out.detach(), *grads]


def _share(error: float, budget: float) -> float:
    """How much of the budget is used up."""
    if error == 0:
        return 0.0
    return error / budget if budget > 0 else math.inf
