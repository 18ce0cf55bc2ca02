"""Correctness before speed: outputs and gradients of a short case, and sampled rows of both of the whole one.

A row of the output and of q's gradient depends on the keys before it alone, so that both are cheap at any length.

All are compared with the reference in float64; the budget is twice the error of the reference in the case's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ropewalk.bench.core.gate import Verdict, max_error
from ropewalk.bench.parallel.cases import Inputs
from ropewalk.ops.attention.api import attention
from ropewalk.parallel import shard_sequence
from ropewalk.schemes import NoPosition
from ropewalk.testing import error_budget

SHORT = 2048  # tokens of the case whose gradients are compared
_ROUNDINGS = 4  # of intermediate results to the case's dtype
_ROWS = 8  # sampled beside each other
_NAMES = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
Exact = tuple[Tensor, float]  # the right result, and the budget of errors


class Gate:
    """The right results of a case, with its positions or (`bare`) without any."""

    def __init__(self, inputs: Inputs, bare: bool) -> None:
        self.inputs, self.bare = inputs, {"position": NoPosition()} if bare else {}

    def check_all(self, results: Sequence[Tensor], whole: bool) -> Verdict:
        """Compare an output and its gradients, whole tensors or shards. For short cases alone."""
        layout, found = self.inputs.layout, []
        for index, (result, (truth, budget)) in enumerate(zip(results, self._whole, strict=True)):
            is_parameters = index >= len(_NAMES)
            if not whole and not is_parameters:
                truth = shard_sequence(truth, layout)
                result = result.masked_fill(~layout.valid[:, None, None], 0)  # rows of padding
            found.append(("a parameter's gradient" if is_parameters else _NAMES[index], result, (truth, budget)))
        return _worst(found)

    def check_rows(self, results: Sequence[Tensor], whole: bool) -> Verdict:
        """Compare sampled rows of the output and of q's gradient: a few tokens of a few places, in some heads."""
        found: list[tuple[str, Tensor, Exact]] = []
        for local, start, heads, exacts in self._rows:
            at, count = start if whole else local, exacts[0][0].shape[1]
            found += zip(_NAMES, (x[:, at : at + count, heads] for x in results[: len(exacts)]), exacts, strict=False)
        return _worst(found)

    @cached_property
    def _whole(self) -> list[Exact]:
        inputs = self.inputs
        parameters = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs.parameters)
        return self._exact(inputs.whole, (inputs.q, inputs.k, inputs.v), 3, parameters, inputs.grad)

    @cached_property
    def _rows(self) -> list[tuple[int, int, slice, list[Exact]]]:
        return list(self._sample())

    def _sample(self) -> Iterator[tuple[int, int, slice, list[Exact]]]:
        """Yield (place in the shard, place in the sequence, query heads, the right rows)."""
        layout, case, inputs = self.inputs.layout, self.inputs.case, self.inputs
        n, group, indices = layout.n_local, case.q_heads // case.k_heads, layout.indices.tolist()
        places = dict.fromkeys((0, n // 2 - _ROWS, n // 2, n - _ROWS))
        for number, local in enumerate(place for place in places if place >= 0):
            found = indices[local : local + _ROWS]
            if found[0] < 0 or found != list(range(found[0], found[0] + len(found))):
                continue  # no run of real tokens
            start, stop, first = found[0], found[0] + len(found), 0
            if layout.bounds is not None:
                first = max(bound for bound in layout.bounds if bound < stop)
                local, start = local + max(0, first - start), max(start, first)
            if stop - start < 2:
                continue  # a document's first token alone: q's gradient is 0, and no scale for errors
            head = number % case.k_heads
            heads = slice(head * group, (head + 1) * group)
            # From these tokens to the keys up to them: `causal` ends where the rows end.
            q, grad = (x[:, start:stop, heads] for x in (inputs.q, inputs.grad))
            k, v = (x[:, first:stop, head : head + 1] for x in (inputs.k, inputs.v))
            parameters = tuple(x.detach()[..., heads] for x in inputs.parameters)
            yield local, start, heads, self._exact(attention, (q, k, v), 1, parameters, grad)

    def _exact(
        self, run: Callable[..., Tensor], qkv: Sequence[Tensor], n: int, parameters: tuple[Tensor, ...], grad: Tensor
    ) -> list[Exact]:
        """Return the reference's output, the gradients of the first `n` of q, k, v and of the parameters; budgets."""
        found, plainly = [], self.inputs.case.torch_dtype
        for dtype in (torch.float64, plainly):
            own = [x.to(dtype).detach().requires_grad_(index < n) for index, x in enumerate(qkv)]
            out = run(*own, impl="reference", **{**self.inputs.keywords(parameters), **self.bare})
            wanted = [x for x in (*own, *parameters) if x.requires_grad]
            found.append([out.detach(), *torch.autograd.grad(out, wanted, grad.to(dtype))])
        pairs = zip(found[0], found[1], strict=True)
        return [(truth, error_budget(truth, plain.to(plainly), _ROUNDINGS)) for truth, plain in pairs]


def _worst(found: Iterable[tuple[str, Tensor, Exact]]) -> Verdict:
    """Return the largest error as a multiple of its budget, of 1."""
    worst = Verdict(0.0, 1.0, None)
    for name, result, (truth, budget) in found:
        error = max_error([result], [truth])
        share = error / budget if budget > 0 else (0.0 if error == 0 else float("inf"))
        if share > worst.error:
            worst = Verdict(share, 1.0, f"the error of {name} is past the budget" if share > 1 else None)
    return worst
