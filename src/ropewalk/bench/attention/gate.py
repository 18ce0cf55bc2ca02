"""Correctness before speed: an attention is timed only if its output and its gradients are right.

The truth is the reference in float64, on slices: of a dense batch the first row with the first key head and the query
heads that share it, and the last with the last; of packed sequences and of caches every one, each with some key head
and as if it were alone. Scores of a slice are never whole, so that no length is too large. Parameters' gradients are
sums over the batch, and what is dropped goes by index: there the slice is the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.settings import SETTINGS, Setting
from ropewalk.bench.core.gate import Verdict, max_error
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.ops.attention.api import attention, make_call
from ropewalk.ops.attention.reference import attend
from ropewalk.testing import error_budget

# q, k, v -> out, all as `AttentionInputs` has them; its setting is part of it.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Results on the way that are rounded to the dtype: mapped features, scores, probabilities, and what comes of them.
_ROUNDINGS = 4
# Outputs of late queries and gradients of late keys are small beside those of early ones when causal: each stretch of
# tokens has a budget of its own. It is not of few tokens: the first query's gradient is a 0 that rounding never is.
_STRETCHES = 8
_FEWEST = 16
_NAMES = ("the output", "q's gradient", "k's gradient", "v's gradient")
_EVERY = slice(None)


class _Slice(NamedTuple):
    rows: slice
    queries: slice
    keys: slice
    key_heads: slice

    def heads(self, group: int) -> slice:
        """Return the slice of a tensor with `group` heads for each key head."""
        bounds = (None if x is None else x * group for x in (self.key_heads.start, self.key_heads.stop))
        return slice(*bounds)

    def cut(self, index: int, x: Tensor, group: int) -> Tensor:
        """Cut from the output, or from the gradient that `_NAMES` has at `index`, or from a tensor of its shape."""
        x = x[None] if x.ndim == 3 else x  # packed sequences are one row
        of_queries = index < 2
        return x[self.rows, self.queries if of_queries else self.keys, self.heads(group if of_queries else 1)]


# Of every slice, for every result: the truth and the budget of each stretch.
_Expected = list[tuple[_Slice, list[list[tuple[Tensor, float]]]]]


class AttentionGate:
    """The right results of one case, for every setting, and the error budget of each."""

    def __init__(self, case: AttentionCase, inputs: AttentionInputs) -> None:
        self.case, self.inputs = case, inputs
        self._known: dict[str, _Expected] = {}

    def check(self, candidate: Attend, setting: str, *, backward: bool, parameters: Sequence[Tensor] = ()) -> Verdict:
        """Run `candidate` once on copies and compare; every exception of the implementation is let through.

        `parameters` are those of the setting that get gradients, as the candidate has them. The verdict's error and
        budget are those of the stretch that comes nearest to its budget, or is furthest past.
        """
        originals = (self.inputs.q, self.inputs.k, self.inputs.v)
        xs = [x.clone() for x in originals]
        torch.manual_seed(0)  # what is dropped goes by it
        if backward:
            leaves = [*(x.requires_grad_() for x in xs), *parameters]
            out = candidate(*leaves[:3])
            results = [out.detach(), *torch.autograd.grad(out, leaves, self.inputs.grad)]
        else:
            with torch.no_grad():
                results = [candidate(*xs)]
        if not all(map(torch.equal, xs, originals)):
            return Verdict(math.inf, 0.0, "it wrote into its inputs")
        names = [*_NAMES, *("a parameter's gradient" for _ in parameters)]
        shapes = [x.shape for x in (self.inputs.grad, *originals, *parameters)]
        expected, worst = self._expected(setting), Verdict(0.0, math.inf, None)
        for index, result in enumerate(results):
            if result.shape != shapes[index]:
                return Verdict(math.inf, 0.0, f"{names[index]} has shape {tuple(result.shape)}")
            for at, of_results in expected:
                for piece, (truth, budget) in zip(self._cut(index, result, at), of_results[index], strict=True):
                    error = max_error([piece], [truth])
                    if _share(error, budget) > _share(worst.error, worst.budget):
                        complaint = None if error <= budget else f"the error of {names[index]} is past the budget"
                        worst = Verdict(error, budget, complaint)
        return worst if math.isfinite(worst.budget) else replace(worst, budget=0.0)

    def _cut(self, index: int, result: Tensor, at: _Slice) -> Sequence[Tensor]:
        return _chunk(index, at.cut(index, result, self.case.group) if index < len(_NAMES) else result)

    def _slices(self, setting: Setting) -> list[_Slice]:
        case, inputs = self.case, self.inputs
        if case.form == "packed":
            assert inputs.cu_seqlens is not None
            spans = [slice(start, end) for start, end in pairwise(inputs.cu_seqlens.tolist()) if end > start]
            return [_Slice(_EVERY, span, span, _one(s % case.k_heads)) for s, span in enumerate(spans)]
        if case.form == "cache":
            assert inputs.key_lengths is not None
            lengths = inputs.key_lengths.tolist()
            return [_Slice(_one(b), _EVERY, slice(0, end), _one(b % case.k_heads)) for b, end in enumerate(lengths)]
        if setting.learned or setting.by_index:
            return [_Slice(_EVERY, _EVERY, _EVERY, _EVERY)]
        corners = dict.fromkeys(((0, 0), (case.batch - 1, case.k_heads - 1)))
        return [_Slice(_one(row), _EVERY, _EVERY, _one(head)) for row, head in corners]

    def _expected(self, name: str) -> _Expected:
        if name not in self._known:
            setting, dtype = SETTINGS[name], self.case.torch_dtype
            found: _Expected = []
            for at in self._slices(setting):
                truths, baselines = (self._compute(setting, at, each) for each in (torch.float64, dtype))
                of_results = []
                for index, results in enumerate(zip(truths, baselines, strict=True)):
                    pairs = zip(*(_chunk(index, x) for x in results), strict=True)
                    of_results.append(
                        [(truth, error_budget(truth, plain.to(dtype), _ROUNDINGS)) for truth, plain in pairs]
                    )
                found.append((at, of_results))
            self._known[name] = found
        return self._known[name]

    def _compute(self, setting: Setting, at: _Slice, dtype: torch.dtype) -> list[Tensor]:
        """Compute the reference's output and gradients in `dtype`."""
        case, inputs, causal = self.case, self.inputs, self.case.causal
        q, k, v = leaves = [
            at.cut(index, x, case.group).to(dtype).detach().requires_grad_()
            for index, x in enumerate((inputs.q, inputs.k, inputs.v), 1)
        ]
        if setting.of_layer:
            drawn = [x.to(q.device, dtype) for x in setting.draw(case)]
        else:
            drawn = [x[..., at.heads(case.group)].to(q.device) for x in setting.draw(case)]
        parameters = [x.requires_grad_(setting.learned) for x in drawn]
        keywords = setting.keywords_of(case, *parameters)
        if case.form == "cache":  # the query is at the last key, and keys are rotated already
            if "position" in keywords:
                q = rotate_plainly(q, inputs.cos[at.rows, :, None], inputs.sin[at.rows, :, None], False)
            keywords, causal, lengths = {}, False, None
        else:
            lengths = None if inputs.key_lengths is None else inputs.key_lengths[at.rows]
        keywords |= {"causal": causal, "key_lengths": lengths, "window": case.window}
        if setting.of_layer:
            out = attention(q, k, v, impl="reference", **keywords)
        else:
            call = make_call(q, k, v, **keywords)
            if call.dropout_p:
                torch.manual_seed(0)
                call = call._replace(seed=torch.randint(2**63 - 1, (1,), device=q.device))  # as `attention` draws it
            out = attend(call)[0].transpose(1, 2)
        wanted = [*leaves, *parameters] if setting.learned else leaves
        grads = torch.autograd.grad(out, wanted, at.cut(0, inputs.grad, case.group).to(dtype))
        return [out.detach(), *grads]


def _chunk(index: int, x: Tensor) -> Sequence[Tensor]:
    """Cut a result (B, T, H, D) into stretches; a parameter's gradient is one."""
    return x.chunk(min(max(1, x.shape[1] // _FEWEST), _STRETCHES), 1) if index < len(_NAMES) else [x]


def _one(index: int) -> slice:
    return slice(index, index + 1)


def _share(error: float, budget: float) -> float:
    """Return the used part of the budget."""
    if error == 0:
        return 0.0
    return error / budget if budget > 0 else math.inf
