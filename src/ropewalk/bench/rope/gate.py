"""Correctness before speed: a rotation is timed only if its result is right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropewalk.bench.core.gate import Verdict, is_within, max_error, worst
from ropewalk.bench.core.timing import Call
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.testing import error_budget

NORM_EPS = 1e-6
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rotation:
    """One implementation's rotation of q and k, in the form that it wants; the views there and back are not timed."""

    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    to_native: View = lambda x: x  # from the case's layout
    from_native: View = lambda x: x
    weights: tuple[Tensor, ...] = field(default=(), kw_only=True)  # of a norm: the backward has their gradients too

    def forward(self, xs: Sequence[Tensor], recording: bool = False) -> Call:
        native = (self.to_native(x) for x in xs)
        return functools.partial(self.rotate, *(x.detach().requires_grad_() if recording else x for x in native))

    def backward(self, xs: Sequence[Tensor], grads: Sequence[Tensor], inplace: bool) -> Callable[[], Sequence[Tensor]]:
        """Rotate q and k forward; return the backward to the native gradients of q, k and weights."""
        leaves = [self.to_native(x).detach().requires_grad_() for x in xs]
        with torch.enable_grad():
            # A leaf must not be overwritten; the derivative of `clone` moves no data.
            rotated = self.rotate(*(leaf.clone() for leaf in leaves) if inplace else leaves)
        wanted, native = (*leaves, *self.weights), [self.to_native(grad.clone()) for grad in grads]
        return functools.partial(torch.autograd.grad, rotated, wanted, native, retain_graph=True)


class Gate:
    """The right result of one case and mode, and the error budget."""

    def __init__(self, case: Case, inputs: Inputs, mode: str) -> None:
        self.case, self.inputs, self.backward = case, inputs, mode == "bwd"
        originals, generator = (inputs.q, inputs.k), torch.Generator(inputs.q.device).manual_seed(1)
        draw = functools.partial(torch.randn, generator=generator, device=inputs.q.device)
        self.originals, self.grads = originals, [draw(x.shape).to(x.dtype) for x in originals]
        self.truth, plain = (self._compute(dtype) for dtype in (torch.float64, case.torch_dtype))
        self.budgets = list(map(error_budget, self.truth, plain))
        self.budget = worst(self.budgets[:2])

    def judge(self, build: Callable[..., Rotation]) -> tuple[Verdict, tuple[Rotation, Inputs, Sequence[Tensor]]]:
        """Return the verdict on what is built; and what it is timed by, without the gate and its float64 tensors."""
        rotation = build(self.case, self.inputs, self.backward)
        verdict = self.check(rotation)
        if self.backward and verdict.complaint is None:
            backward = rotation.backward(self.originals, self.grads, self.case.inplace)
            for _ in range(2):  # not every backward can run again over one forward
                backward()
        return verdict, (rotation, self.inputs, self.grads)

    def check(self, rotation: Rotation) -> Verdict:
        """Run `rotation` once on copies and compare; every exception of the implementation is let through."""
        xs = [x.clone() for x in self.originals]
        if self.backward:
            native: Sequence[Tensor] = rotation.backward(xs, self.grads, self.case.inplace)()
        else:
            with torch.no_grad():
                native = rotation.rotate(*map(rotation.to_native, xs))
        results = [*map(rotation.from_native, native[:2]), *native[2:]]
        if self.case.inplace and not self.backward:
            results = xs  # what is returned does not matter, what is overwritten does
        elif not all(map(torch.equal, xs, self.originals)):
            return Verdict(math.inf, self.budget, "it wrote into its inputs")
        error, complaint = max_error(results[:2], self.truth[:2]), None
        weight_grads = zip(results[2:], self.truth[2:], self.budgets[2:], strict=True)
        if not all(is_within(max_error([result], [exact]), budget) for result, exact, budget in weight_grads):
            complaint = "the error of a weight's gradient is past its budget"
        elif not is_within(error, self.budget):
            complaint = "the error is past the budget"
        return Verdict(error, self.budget, complaint)

    @torch.enable_grad()
    def _compute(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Rotate in plain PyTorch of one dtype, after the norm if there is one; or differentiate that."""
        inputs, case, positions = self.inputs, self.case, self.inputs.token_positions[..., None]
        if inputs.axes is not None and inputs.positions is not None:
            positions = inputs.positions[inputs.axes].movedim(0, -1)
        angles = (positions.double() * inputs.inv_freq).unsqueeze(-3 if case.layout == "bhtd" else -2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # (…, 1, R/2), the head axis where the layout has it
        leaves = [x.to(dtype, copy=True).requires_grad_(self.backward) for x in (*self.originals, *inputs.weights)]
        if inputs.weights:
            outs = [norm_plainly(x, weight, cos, sin, case) for x, weight in zip(leaves, leaves[2:], strict=False)]
        else:
            outs = [rotate_plainly(x, cos, sin, case.interleaved) for x in leaves]
        return torch.autograd.grad(outs, leaves, [x.to(dtype) for x in self.grads]) if self.backward else outs


def norm_plainly(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, case: Case) -> Tensor:
    """Normalise as models do, and rotate, in plain PyTorch: the statistic is of float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
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
