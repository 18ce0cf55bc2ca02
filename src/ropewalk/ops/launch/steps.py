"""The steps of a launcher: they run at once, or each time that a plan of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ropewalk import device as gpu

Sizes = TypeVar("Sizes", bound=tuple[Any, ...])
Result = TypeVar("Result")
ALIGNED = 16  # bytes: the addresses that most kernels are compiled for
Grid = int | tuple[int, int]  # programs, of one axis or of two


def as_grid(grid: Grid) -> tuple[int, ...]:
    """Return a grid as Triton takes it: without numbers that plans take anew in each run."""
    return (int(grid),) if isinstance(grid, int) else grid


class UnplannableError(Exception):
    """A launcher takes a step that no plan can repeat: the call runs without one."""


class Steps(Protocol):
    """The steps of a launcher: they run at once, or each time that a plan of them runs."""

    def launch(self, kernel: Any, grid: Grid, /, **arguments: Any) -> None:
        """Launch a kernel."""

    def attempt(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that launches; where it raises, because a kernel does not fit, no launch of it is a step."""

    def operate(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that writes into tensors and allocates nothing that a later step reads."""

    def per_stream(self, make: Callable[[torch.device], Tensor], like: Tensor) -> Tensor:
        """Return memory that belongs to the stream of each run, on the device of a tensor."""

    def device_of(self, like: Tensor) -> torch.device:
        """Return the device of a tensor that may be a plan's, without memory."""

    def measure(self, function: Callable[..., Sizes], work: Any, *arguments: Any) -> Sizes:
        """Return a function's numbers, which a plan of caches of all lengths takes anew in each run."""

    def longest(self, n_keys: int) -> int | None:
        """Return the longest cache that the steps are for; None if it is this one alone."""


class AtOnce:
    """Steps that run at once."""

    def launch(self, kernel: Any, grid: Grid, /, **arguments: Any) -> None:
        """Launch a kernel by Triton."""
        gpu.ensure_context()
        kernel[as_grid(grid)](**arguments)

    def attempt(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function: what ran before a kernel that does not fit runs again with smaller tiles."""
        return function(*arguments)

    def operate(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function."""
        function(*arguments)

    def per_stream(self, make: Callable[[torch.device], Tensor], like: Tensor) -> Tensor:
        """Return the memory of the current stream."""
        return make(like.device)

    def device_of(self, like: Tensor) -> torch.device:
        """Return the tensor's device."""
        return like.device

    def measure(self, function: Callable[..., Sizes], work: Any, *arguments: Any) -> Sizes:
        """Call the function."""
        return function(work, *arguments)

    def longest(self, n_keys: int) -> int | None:
        """Return None: the cache is the one at hand."""
        return None


AT_ONCE = AtOnce()
