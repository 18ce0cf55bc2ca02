"""Correctness before speed: an attention is timed only if its output and its gradients are right.

The truth is the reference in float64, on slices: of a dense batch the first row with the first key head and the query
heads that share it, and the last with the last; of packed sequences and of caches every one, as if it were alone, with
some key head. Parameters' gradients are sums over the batch, and what is dropped goes by index: there it is the whole.
8-bit products have a bound of their own, of the error's norm over that of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.settings import SETTINGS, Setting
from ropewalk.bench.core.gate import Verdict, is_within, max_error, worst
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
_STRETCHES, _FEWEST = 8, 16
_NAMES = ("the output", "q's gradient", "k's gradient", "v's gradient")
_EVERY = slice(None)
_Slice = tuple[slice, slice, slice, slice, slice]  # of rows, queries, keys, query heads and key heads


class AttentionGate:
    """The right results of one case, for every setting, and the error budget of each."""

    def __init__(self, case: AttentionCase, inputs: AttentionInputs) -> None:
        self.case, self.inputs = case, inputs
        # By setting: of each slice and result, its index, and the truth and the budget of each stretch.
        self._known: dict[str, list[tuple[_Slice, int, list[tuple[Tensor, float]]]]] = {}
        self._outputs: dict[str, list[tuple[_Slice, Tensor]]] = {}  # by setting: each slice and its exact output

    def check(self, candidate: Attend, setting: str, *, backward: bool, parameters: Sequence[Tensor] = ()) -> Verdict:
        """Run `candidate` once on copies and compare; every exception of the implementation is let through.

        `parameters` are the setting's that get gradients. The verdict is of the stretch that uses most of its budget.
        """
        originals = (self.inputs.q, self.inputs.k, self.inputs.v)
        xs = [x.clone() for x in originals]
        torch.manual_seed(0)  # what is dropped goes by it
        with torch.set_grad_enabled(backward):
            leaves = [*(x.requires_grad_(backward) for x in xs), *parameters]
            out = candidate(*leaves[:3])
            results = [out.detach(), *(torch.autograd.grad(out, leaves, self.inputs.grad) if backward else ())]
        if not all(map(torch.equal, xs, originals)):
            return Verdict(math.inf, 0.0, "it wrote into its inputs")
        names = [*_NAMES, *("a parameter's gradient" for _ in parameters)]
        for name, result, like in zip(names, results, (self.inputs.grad, *originals, *parameters), strict=False):
            if result.shape != like.shape:
                return Verdict(math.inf, 0.0, f"{name} has shape {tuple(result.shape)}")
        if SETTINGS[setting].exact is not None:
            return self._check_products(results[0], SETTINGS[setting])
        if setting not in self._known:
            self._known[setting] = list(self._expect(SETTINGS[setting]))
        found = []
        for at, index, expected in self._known[setting]:
            if index >= len(results):
                continue
            for piece, (truth, budget) in zip(
                _chunk(index, self._cut(at, index, results[index])), expected, strict=True
            ):
                error = max_error([piece], [truth])
                share = worst([error / budget]) if budget > 0 else math.inf if error else 0.0
                complaint = None if is_within(error, budget) else f"the error of {names[index]} is past the budget"
                found.append((share, Verdict(error, budget, complaint)))
        return max(found, key=lambda one: one[0])[1]

    def _check_products(self, out: Tensor, setting: Setting) -> Verdict:
        """Hold an output of 8-bit products against the relative error that these may have."""
        exact, bound = setting.exact, setting.largest_error
        assert exact is not None
        if exact not in self._outputs:
            plain = SETTINGS[exact]
            self._outputs[exact] = [
                (at, self._compute(plain, at, torch.float64, backward=False)[0]) for at in self._slices(plain)
            ]
        error = worst(
            float((self._cut(at, 0, out).double() - truth).norm() / truth.norm()) for at, truth in self._outputs[exact]
        )
        complaint = None if is_within(error, bound) else "the relative error of the output is past the bound"
        return Verdict(error, bound, complaint)

    def _cut(self, at: _Slice, index: int, x: Tensor) -> Tensor:
        """Cut from the output, or from the gradient that `_NAMES` has at `index`, or from a tensor of its shape."""
        if index >= len(_NAMES):
            return x
        tokens, heads = (at[1], at[3]) if index < 2 else (at[2], at[4])
        return (x[None] if x.ndim == 3 else x)[at[0], tokens, heads]  # packed sequences are one row

    def _slices(self, setting: Setting) -> list[_Slice]:
        case, lengths, ends = self.case, self.inputs.key_lengths, self.inputs.cu_seqlens

        def head_slice(row: slice, queries: slice, keys: slice, head: int) -> _Slice:
            head %= case.k_heads
            return row, queries, keys, slice(head * case.group, (head + 1) * case.group), slice(head, head + 1)

        if ends is not None:
            spans = [slice(start, end) for start, end in pairwise(ends.tolist()) if end > start]
            return [head_slice(_EVERY, span, span, s) for s, span in enumerate(spans)]
        rows = [slice(row, row + 1) for row in range(case.batch)]
        if case.form == "cache" and lengths is not None:
            return [head_slice(rows[b], _EVERY, slice(end), b) for b, end in enumerate(lengths.tolist())]
        if setting.learned or setting.by_index:
            return [(_EVERY, _EVERY, _EVERY, _EVERY, _EVERY)]
        corners = dict.fromkeys(((0, 0), (case.batch - 1, case.k_heads - 1)))
        return [head_slice(rows[row], _EVERY, _EVERY, head) for row, head in corners]

    def _expect(self, setting: Setting) -> Iterator[tuple[_Slice, int, list[tuple[Tensor, float]]]]:
        dtype = self.case.torch_dtype
        for at in self._slices(setting):
            truths, baselines = (self._compute(setting, at, each) for each in (torch.float64, dtype))
            for index, both in enumerate(zip(truths, baselines, strict=True)):
                pairs = zip(*(_chunk(index, x) for x in both), strict=True)
                yield at, index, [(truth, error_budget(truth, x.to(dtype), _ROUNDINGS)) for truth, x in pairs]

    def _compute(self, setting: Setting, at: _Slice, dtype: torch.dtype, *, backward: bool = True) -> list[Tensor]:
        """Compute the reference's output and gradients in `dtype`."""
        case, inputs, lengths = self.case, self.inputs, self.inputs.key_lengths
        originals = enumerate((inputs.q, inputs.k, inputs.v), 1)
        leaves = [self._cut(at, index, x).to(dtype).detach().requires_grad_(backward) for index, x in originals]
        q, k, v = leaves
        drawn = (x.to(dtype) if setting.is_layer else x[..., at[3]] for x in setting.draw(case))
        parameters = [x.to(q.device).requires_grad_(setting.learned) for x in drawn]
        keywords = setting.keywords_of(case, *parameters)
        if case.form != "cache":
            rows = None if lengths is None else lengths[at[0]]
            keywords |= {"causal": case.causal, "key_lengths": rows, "window": case.window}
        elif "position" in keywords:  # the query is at the last key, and keys are rotated already
            q = rotate_plainly(q, inputs.cos[at[0], :, None], inputs.sin[at[0], :, None], False)
            keywords = {}
        if setting.is_layer:
            out = attention(q, k, v, impl="reference", **keywords)
        else:
            call = make_call(q, k, v, **keywords)
            if call.dropout_p:
                torch.manual_seed(0)
                call = call._replace(seed=torch.randint(2**63 - 1, (1,), device=q.device))  # as `attention` draws it
            out = attend(call)[0].transpose(1, 2)
        if not backward:
            return [out.detach()]
        wanted = [*leaves, *parameters] if setting.learned else leaves
        grads = torch.autograd.grad(out, wanted, self._cut(at, 0, inputs.grad).to(dtype))
        return [out.detach(), *grads]


def _chunk(index: int, x: Tensor) -> Sequence[Tensor]:
    """Cut a result (B, T, H, D) into stretches; a parameter's gradient is one."""
    return x.chunk(min(max(1, x.shape[1] // _FEWEST), _STRETCHES), 1) if index < len(_NAMES) else [x]
