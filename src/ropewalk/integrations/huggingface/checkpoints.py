"""Checkpoints of transformers' layers that recompute what their forward ran, after a handle was removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

_NAME = "_gradient_checkpointing_func"  # of a module that transformers checkpoints


class _HeldCheckpoint:
    """A module's checkpoint function, whose forward and recomputation run with a replacement."""

    def __init__(self, module: nn.Module, hold: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module, self.original = module, vars(module)[_NAME]
        self.hold: Callable[[], AbstractContextManager[Any]] | None = hold

    def __call__(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        hold = self.hold
        if hold is None or torch.compiler.is_compiling():  # a compiled graph recomputes what it traced
            return self.original(function, *args, **keywords)

        def run(*args: Any, **keywords: Any) -> Any:
            with hold():
                return function(*args, **keywords)

        return self.original(run, *args, **keywords)

    def release(self) -> None:
        """Hold nothing in later forwards."""
        self.hold = None
        if vars(self.module).get(_NAME) is self:
            setattr(self.module, _NAME, self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)  # a copy of the module holds nothing


def _itself(x: Any) -> Any:
    return x


def hold_in_checkpoints(
    model: nn.Module, hold: Callable[[], AbstractContextManager[Any]]
) -> tuple[_HeldCheckpoint, ...]:
    """Let the layers of a model that transformers checkpoints enter `hold()` in forward and recomputation.

    Returns:
        What to release.
    """
    held = tuple(_HeldCheckpoint(module, hold) for module in model.modules() if _NAME in vars(module))
    for each in held:
        setattr(each.module, _NAME, each)
    return held
