"""Correctness before speed: a rotation is timed only if its result is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropewalk.bench.core.gate import Verdict, max_error
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.testing import error_budget


@dataclass(frozen=True)
class Rotation:
    """One implementation's rotation of the q and k of one case.

    `rotate` takes and returns q and k in the form that the implementation wants: `to_native` makes that form from the
    case's layout as a view, and `from_native` leads back. Neither is timed.
    """

    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    to_native: Callable[[Tensor], Tensor] = lambda x: x
    from_native: Callable[[Tensor], Tensor] = lambda x: x
    weights: tuple[Tensor, ...] = field(default=(), kw_only=True)  # of a norm: the backward has their gradients too

    def prepare_backward(self, q: Tensor, k: Tensor, inplace: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        """Rotate q and k forward, and return the function from the results' gradients to theirs, all in native form.

        The gradients of the norm's weights follow those of q and k.
        """
        leaves = [self.to_native(x).detach().requires_grad_() for x in (q, k)]
        with torch.enable_grad():
            # A leaf must not be overwritten; the derivative of `clone` moves no data.
            rotated = self.rotate(*(leaf.clone() for leaf in leaves) if inplace else leaves)

        def backward(q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(rotated, (*leaves, *self.weights), (q_grad, k_grad), retain_graph=True)

        return backward


class Gate:
    """The right result of one case and mode, and the error budget."""

    def __init__(self, case: Case, inputs: Inputs, mode: str) -> None:
        self.case, self.inputs = case, inputs
        self.backward = mode == "bwd"
        generator = torch.Generator(inputs.q.device).manual_seed(1)
        self.grads = [
            torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in (inputs.q, inputs.k)
        ]
        if case.norm_offset is None:
            sources = self.grads if self.backward else [inputs.q, inputs.k]
            self.truth = [self._rotate_exactly(x) for x in sources]
            plain = [self._rotate_in_own_dtype(x) for x in sources]
        else:
            self.truth, plain = self._norm(torch.float64), self._norm(case.torch_dtype)
        self.budgets = [error_budget(exact, x) for exact, x in zip(self.truth, plain, strict=True)]
        self.budget = max(self.budgets[:2])

    def check(self, rotation: Rotation) -> Verdict:
        """Run `rotation` once on copies and compare; every exception of the implementation is let through."""
        originals = (self.inputs.q, self.inputs.k)
        xs = [x.clone() for x in originals]
        if self.backward:
            grads = [rotation.to_native(grad.clone()) for grad in self.grads]
            native = rotation.prepare_backward(xs[0], xs[1], self.case.inplace)(*grads)
        else:
            with torch.no_grad():
                native = rotation.rotate(*(rotation.to_native(x) for x in xs))
        results = [*map(rotation.from_native, native[:2]), *native[2:]]
        if self.case.inplace and not self.backward:
            results = xs  # what is returned does not matter, what is overwritten does
        elif not all(torch.equal(x, original) for x, original in zip(xs, originals, strict=True)):
            return Verdict(float("inf"), self.budget, "it wrote into its inputs")
        error = max_error(results[:2], self.truth[:2])
        for result, exact, budget in zip(results[2:], self.truth[2:], self.budgets[2:], strict=True):
            if max_error([result], [exact]) > budget:
                return Verdict(error, self.budget, "the error of a weight's gradient is past its budget")
        return Verdict(error, self.budget, None if error <= self.budget else "the error is past the budget")

    def _norm(self, dtype: torch.dtype) -> list[Tensor]:
        """Normalise and rotate in plain PyTorch of one dtype, or differentiate that: of q, k, and their weights."""
        inputs, cos, sin = self.inputs, *self._tables(dtype)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (inputs.q, inputs.k, *inputs.weights)]
        with torch.set_grad_enabled(self.backward):
            outs = [
                norm_plainly(x, weight, cos, sin, self.case) for x, weight in zip(leaves[:2], leaves[2:], strict=True)
            ]
            if not self.backward:
                return outs
            return list(torch.autograd.grad(outs, leaves, [grad.to(dtype) for grad in self.grads]))

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self._angles()
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _angles(self) -> Tensor:
        """Return angles (…, 1, R/2) in float64, to be broadcast over heads; the head axis is the layout's."""
        angles = self.inputs.pair_positions().double() * self.inputs.inv_freq
        return angles.unsqueeze(-3 if self.case.layout == "bhtd" else -2)

    def _rotate_exactly(self, x: Tensor) -> Tensor:
        angles = self._angles()
        sin = angles.sin()
        return rotate_plainly(x.double(), angles.cos(), -sin if self.backward else sin, self.case.interleaved)

    def _rotate_in_own_dtype(self, x: Tensor) -> Tensor:
        cos, sin = self._tables(x.dtype)
        return rotate_plainly(x, cos, -sin if self.backward else sin, self.case.interleaved)


NORM_EPS = 1e-6


def norm_plainly(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, case: Case) -> Tensor:
    """Normalise as models do, and rotate, in plain PyTorch: the statistic is of float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
    assert case.norm_offset is not None
    if case.norm_offset:
        normed = (wide * (weight.to(wide.dtype) + case.norm_offset)).to(x.dtype)
    else:
        normed = wide.to(x.dtype) * weight
    return rotate_plainly(normed, cos, sin, case.interleaved)


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate in plain PyTorch: arithmetic in the larger of x's and the tables' dtypes."""
    width = 2 * cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
