"""Correctness before speed: outputs and gradients of a short case, and sampled rows of both of the whole one.

A row of the output and of q's gradient depends on the keys before it alone, so that both are cheap at any length.

All are compared with the reference in float64; the budget is twice the error of the reference in the case's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


class _Exact(NamedTuple):
    truth: Tensor
    budget: float


class Gate:
    """The right results of a case, with its positions or (`bare`) without any."""

    def __init__(self, inputs: Inputs, bare: bool) -> None:
        self.inputs = inputs
        self.keywords = {**inputs.keywords(), **({"position": NoPosition()} if bare else {})}
        self.bare = bare
        self._whole: list[_Exact] | None = None
        self._blocks: list[tuple[int, int, int, list[_Exact]]] | None = None

    def check_all(self, results: Sequence[Tensor], whole: bool) -> Verdict:
        """Compare an output and its gradients, whole tensors or shards. For short cases alone."""
        if self._whole is None:
            self._whole = list(self._attend_whole())
        expected = self._whole
        if not whole:
            layout = self.inputs.layout
            expected = [
                exact._replace(truth=shard_sequence(exact.truth, layout)) if index < len(_NAMES) else exact
                for index, exact in enumerate(expected)
            ]
        names = [*_NAMES, *("a parameter's gradient" for _ in self.inputs.learned)][: len(results)]
        valid = None if whole else self.inputs.layout.valid
        return _worst(
            (name, _real(result, valid if index < len(_NAMES) else None), exact)
            for index, (name, result, exact) in enumerate(zip(names, results, expected, strict=True))
        )

    def check_rows(self, results: Sequence[Tensor], whole: bool) -> Verdict:
        """Compare sampled rows of the output and of q's gradient: a few tokens of a few places, in some heads."""
        if self._blocks is None:
            self._blocks = list(self._attend_blocks())
        group = self.inputs.case.q_heads // self.inputs.case.k_heads

        def rows() -> Iterator[tuple[str, Tensor, _Exact]]:
            for local, start, head, exacts in self._blocks or ():
                at = start if whole else local
                for name, result, exact in zip(_NAMES, results, exacts, strict=False):
                    count = exact.truth.shape[1]
                    yield name, result[:, at : at + count, head * group : (head + 1) * group], exact

        return _worst(rows())

    def _attend_whole(self) -> Iterator[_Exact]:
        truths, plains = (self._compute(dtype) for dtype in (torch.float64, self.inputs.case.torch_dtype))
        for truth, plain in zip(truths, plains, strict=True):
            yield _exact(truth, plain.to(self.inputs.case.torch_dtype))

    def _compute(self, dtype: torch.dtype) -> list[Tensor]:
        inputs, bounds = self.inputs, self.inputs.layout.cu_seqlens
        leaves = [x.to(dtype).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        learned = tuple(x.detach().requires_grad_() for x in inputs.learned)
        keywords: dict[str, Any] = {**self.keywords, "impl": "reference"}
        if learned:
            keywords |= inputs.keywords(learned)
        if bounds is None:
            out = attention(*leaves, **keywords)
        else:
            bounds = bounds.int()
            keywords |= {"layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
            out = attention(*(x[0] for x in leaves), **keywords)[None]
        return [out.detach(), *torch.autograd.grad(out, (*leaves, *learned), inputs.grad.to(dtype))]

    def _attend_blocks(self) -> Iterator[tuple[int, int, int, list[_Exact]]]:
        """Yield (place in the shard, place in the sequence, key head, the right rows)."""
        layout, case = self.inputs.layout, self.inputs.case
        n, group = layout.n_local, case.q_heads // case.k_heads
        indices = layout.indices.tolist()
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
            truths, plains = (
                self._attend_rows(slice(start, stop), slice(first, stop), heads, head, dtype)
                for dtype in (torch.float64, case.torch_dtype)
            )
            yield local, start, head, [_exact(truth, plain) for truth, plain in zip(truths, plains, strict=True)]

    def _attend_rows(self, rows: slice, keys: slice, heads: slice, head: int, dtype: torch.dtype) -> list[Tensor]:
        """Attend from some tokens to the keys up to them: `causal` ends where the rows end. Also q's gradient."""
        inputs = self.inputs
        q = inputs.q[:, rows, heads].to(dtype).requires_grad_()
        k, v = (x[:, keys, head : head + 1].to(dtype) for x in (inputs.k, inputs.v))
        keywords = dict(self.keywords)
        if inputs.parameters and not self.bare:
            keywords |= inputs.keywords(tuple(x.detach()[..., heads] for x in inputs.parameters))
        out: Tensor = attention(q, k, v, impl="reference", **keywords)
        return [out.detach(), *torch.autograd.grad(out, q, inputs.grad[:, rows, heads].to(dtype))]


def _real(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zero the rows of padding tokens."""
    return x if valid is None else x.masked_fill(~valid[:, None, None], 0)


def _exact(truth: Tensor, plain: Tensor) -> _Exact:
    return _Exact(truth, error_budget(truth, plain, _ROUNDINGS))


def _worst(found: Iterator[tuple[str, Tensor, _Exact]]) -> Verdict:
    """Return the largest error as a multiple of its budget, of 1."""
    worst = Verdict(0.0, 1.0, None)
    for name, result, exact in found:
        error = max_error([result], [exact.truth])
        share = error / exact.budget if exact.budget > 0 else (0.0 if error == 0 else float("inf"))
        if share > worst.error:
            worst = Verdict(share, 1.0, f"the error of {name} is past the budget" if share > 1 else None)
    return worst
