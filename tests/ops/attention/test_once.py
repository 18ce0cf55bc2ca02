"""Gradients of kernels refuse to be differentiated: none is silently a constant."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from helpers.attention_calls import draw
from helpers.modes import needs_kernels

import ropewalk
from ropewalk import attention
from ropewalk.ops.once import differentiable_once


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (2 * x * grad,)


@pytest.mark.parametrize("weight_learns", [False, True])
def test_a_penalty_of_gradients_is_refused(device, weight_learns):
    x = torch.randn(3, device=device, requires_grad=True)
    weight = torch.ones(3, device=device, requires_grad=weight_learns)
    (grad,) = torch.autograd.grad(Square.apply(x), x, weight, create_graph=True)
    torch.testing.assert_close(grad, 2 * x)
    with pytest.raises(RuntimeError, match="is differentiable once"):
        (x.sum() + grad.square().sum()).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="is differentiable once"):
        torch.autograd.grad(x.sum() + grad.square().sum(), x)


@needs_kernels
@pytest.mark.parametrize("planned", [False, True])
def test_a_penalty_of_gradients_of_kernels_is_refused(device, planned):
    tensors = [x.requires_grad_() for x in draw(device)]
    for _ in range(4 if planned else 1):
        out = attention(*tensors, impl="triton")
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out), create_graph=True)
    loss = out.sum() + grads[0].square().sum()
    with pytest.raises(RuntimeError, match="attention by our kernels is differentiable once"):
        loss.backward(retain_graph=True)
    for x in tensors:
        with pytest.raises(RuntimeError, match="attention by our kernels is differentiable once"):
            torch.autograd.grad(loss, x, retain_graph=True)


def test_no_backward_is_marked_by_pytorchs_own():
    root = Path(ropewalk.__file__).parent
    users = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(
            isinstance(node, ast.ImportFrom) and any(x.name == "once_differentiable" for x in node.names)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert users == [], "it lets gradients be constants where those of the results are: take ops.once"
