"""Tests for plain eager calls, which nothing traces, transforms or intercepts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def is_untraced() -> bool:
    """Say whether a call is eager, and no mode or tracer intercepts it."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Say whether a call is untraced, and its tensors are what they seem."""
    if not is_untraced():
        return False
    for x in tensors:  # noqa: SIM110 (a generator takes 1 µs more of host time)
        # The memory of a lazily negated view holds the opposite values: the dispatcher resolves it.
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg()):
            return False
    return True


def is_transformed() -> bool:
    """Say whether a torch.func transform or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
