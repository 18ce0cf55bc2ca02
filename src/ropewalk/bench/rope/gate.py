"""Correctness before speed: a rotation is timed only if its result is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.bench.core.gate import Verdict, max_error
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.testing import error_budget


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Rotation:
    """One implementation's rotation of the q and k of one case.

    `rotate` takes and returns q and k in the form that the implementation wants: `to_native` makes that form from the
    case's layout as a view, and `from_native` leads back. Neither is timed.
    """

    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    to_native: Callable[[Tensor], Tensor] = _unchanged
    from_native: Callable[[Tensor], Tensor] = _unchanged

    def prepare_backward(self, q: Tensor, k: Tensor, inplace: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        """Rotate q and k forward, and return the function from the results' gradients to theirs, all in native form."""
        leaves = [self.to_native(x).detach().requires_grad_() for x in (q, k)]
        with torch.enable_grad():
            # A leaf must not be overwritten; the derivative of `clone` moves no data.
            rotated = self.rotate(*(leaf.clone() for leaf in leaves) if inplace else leaves)

        def backward(q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(rotated, leaves, (q_grad, k_grad), retain_graph=True)

        return backward


class Gate:
    """The right result of one case and direction, and the error budget."""

    def __init__(self, case: Case, inputs: Inputs, direction: str) -> None:
        self.case, self.inputs = case, inputs
        self.backward = direction == "bwd"
        generator = torch.Generator(inputs.q.device).manual_seed(1)
        self.grads = [
            torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in (inputs.q, inputs.k)
        ]
        sources = self.grads if self.backward else [inputs.q, inputs.k]
        self.truth = [self._rotate_exactly(x) for x in sources]
        self.budget = max(
            error_budget(exact, self._rotate_in_own_dtype(x)) for x, exact in zip(sources, self.truth, strict=True)
        )

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
        results = [rotation.from_native(x) for x in native]
        if self.case.inplace and not self.backward:
            results = xs  # what is returned does not matter, what is overwritten does
        elif not all(torch.equal(x, original) for x, original in zip(xs, originals, strict=True)):
            return Verdict(float("inf"), self.budget, "it wrote into its inputs")
        error = max_error(results, self.truth)
        return Verdict(error, self.budget, None if error <= self.budget else "the error is past the budget")

    def _angles(self) -> Tensor:
        """Return angles (…, 1, R/2) in float64, to be broadcast over heads; the head axis is the layout's."""
        angles = self.inputs.token_positions[..., None].double() * self.inputs.inv_freq
        return angles.unsqueeze(-3 if self.case.layout == "bhtd" else -2)

    def _rotate_exactly(self, x: Tensor) -> Tensor:
        angles = self._angles()
        sin = angles.sin()
        return rotate_plainly(x.double(), angles.cos(), -sin if self.backward else sin, self.case.interleaved)

    def _rotate_in_own_dtype(self, x: Tensor) -> Tensor:
        angles = self._angles()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return rotate_plainly(x, cos, -sin if self.backward else sin, self.case.interleaved)


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate in plain PyTorch: arithmetic in the larger of x's and the tables' dtypes."""
    width = 2 * cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
