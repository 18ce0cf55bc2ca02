"""The autograd function of all operations: a step says how a call runs, what it saves, and how it is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk.ops.tracing import refuse_tangents


class Step(Protocol):
    """A call that autograd records.

    `ctx` is PyTorch's; the first of `ctx.needs_input_grad` is the step's own.
    """

    def forward(self, ctx: Any, *tensors: Tensor | None) -> Any:
        """Return the results of a call, and save in `ctx` what `backward` reads."""

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors."""


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *tensors: Tensor | None) -> Any:
        ctx.step = step
        return step.forward(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_tangents(grads)
        return (None, *ctx.step.backward(ctx, *grads))


class Recorder:
    """The calls that a graph of autograd shows under one name."""

    def __init__(self, name: str) -> None:
        """Name the nodes of calls: `name` and "Backward"."""
        function: Any = type(name, (_Recorded,), {})
        # Both are of a step and tensors. `record` lacks PyTorch's tests for a setup_context and for active transforms,
        # which take 2 of 7 us: nothing is recorded so under these, and tensors that outlived theirs are unwrapped.
        self.record: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        self.record_any: Callable[..., Any] = function.apply


unwrap_if_dead: Callable[[Any], Any] = torch._C._functorch.unwrap_if_dead


def step_of(node: Any) -> Step | None:
    """Return the step that recorded a node of autograd's graph; None for the node of something else."""
    step: Step | None = getattr(node, "step", None)
    return step
