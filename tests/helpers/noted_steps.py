"""Steps that note the launches of a launcher, for the compile checks: tensors without memory are enough."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Noted(NamedTuple):
    """A launch of a `Kernel`, whose tensors have addresses of one alignment."""

    kernel: Any
    grid: Any
    arguments: dict[str, Any]
    alignment: int

    def __getitem__(self, name: Any) -> Any:
        """Return an argument, or an option."""
        return self.arguments[name]

    @property
    def name(self) -> str:
        return self.kernel.function.__name__

    @property
    def source(self) -> Any:
        """Return what Triton compiles."""
        return self.kernel.source(alignment=self.alignment, **self.arguments)

    def compile(self, target: Any, **changes: Any) -> Any:
        """Compile for a target, perhaps with other arguments."""
        return self.kernel.compile(target, alignment=self.alignment, **self.arguments | changes)


class NotingSteps:
    """`Steps` that run nothing."""

    def __init__(self, alignment: int = 16) -> None:
        self.alignment = alignment
        self.launches: dict[str, Noted] = {}  # by the kernel's name

    def launch(self, kernel: Any, grid: Any, /, **arguments: Any) -> None:
        noted = Noted(kernel, grid, arguments, self.alignment)
        self.launches[noted.name] = noted

    def operate(self, function: Any, *arguments: Any) -> None:
        """Do nothing."""

    def device_of(self, like: torch.Tensor) -> torch.device:
        """Return a device of which nothing is known."""
        return torch.device("cpu")
