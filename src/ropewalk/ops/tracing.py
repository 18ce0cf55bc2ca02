"""Tests for plain eager calls, which nothing traces, transforms or intercepts."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def is_intercepted() -> bool:
    """Say whether a mode, a tracer or a transform follows an eager call's operators."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Say whether a call is eager, its tensors are what they seem, and no mode or tracer intercepts it."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for x in tensors:  # noqa: SIM110 (a generator takes 1 µs more of host time)
        # The memory of a lazily negated view holds the opposite values: the dispatcher resolves it.
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg()):
            return False
    return True


def is_dtensor(x: Tensor | None) -> bool:
    """Say whether x is a DTensor, whose module is loaded by then."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_transformed() -> bool:
    """Say whether a torch.func transform or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
