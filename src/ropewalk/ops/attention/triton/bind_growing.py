"""Binding compiled kernels to launches that differ in addresses and in some numbers, as those over a cache that grows.

As in `bind`, whose launches differ in addresses alone; these take numbers at their places among the addresses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.runtime.driver import driver

from ropewalk.ops.attention.backend import UnplannableError
from ropewalk.ops.attention.triton.bind import Launch


class Number(int):
    """A number that differs from run to run, with its index among a run's addresses."""

    slot: int

    def __new__(cls, value: int, slot: int) -> Number:
        """Make the number of the run at hand."""
        number = super().__new__(cls, value)
        number.slot = slot
        return number


def bind_growing(
    compiled: Any, n_programs: int, values: Sequence[Any], address_of: Callable[[Tensor], tuple[int, int]]
) -> Launch:
    """Bind a compiled kernel's arguments, all but the addresses of its tensors and each `Number`.

    values: all arguments, in the order of the kernel's signature; tensors stand for memory, descriptors are refused.
    address_of: the index of a tensor's memory among the addresses, and the tensor's offset there in bytes.
    """
    run = compiled.run  # loads the kernel onto the current device
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        raise UnplannableError("a kernel reads memory that Triton allocates")
    if getattr(compiled.metadata, "tensordesc_meta", None):
        raise UnplannableError("descriptors of a cache that grows")
    names: dict[str, Any] = {}

    def name(value: Any) -> str:
        key = f"x{len(names)}"
        names[key] = value
        return key

    def write(value: Any, kind: Any) -> str:
        if isinstance(kind, tuple):
            return "(" + "".join(f"{write(*pair)}, " for pair in zip(value, kind, strict=True)) + ")"
        if kind == "constexpr":
            return "None"
        if type(value) is Number:
            return f"addresses[{value.slot}]"
        if isinstance(value, Tensor):
            slot, offset = address_of(value)
            return f"addresses[{slot}]" + (f" + {name(offset)}" if offset else "")
        return name(value)

    kinds = compiled.src.signature.values()
    arguments = "".join(f"{write(value, kind)}, " for value, kind in zip(values, kinds, strict=True))
    grid = write(n_programs, "i32")
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "arg_annotations"):  # since Triton 3.7
        launcher, arguments = driver.active.utils.launch, f"({arguments})"
        head: tuple[Any, ...] = (
            *(*flags, compiled.packed_metadata, None, None, None, None, None),
            *(run.arg_annotations, run.kernel_signature),
        )
    else:
        launcher = run.launch
        if hasattr(launcher, "__closure__"):
            launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
        head = (*flags, None, None, compiled.packed_metadata, *(None,) * 3)
    fixed = ", ".join(name(value) for value in (compiled.function, *head))
    scope: dict[str, Any] = {"launch": launcher, **names}
    bound: Launch = eval(f"lambda addresses, stream: launch({grid}, 1, 1, stream, {fixed}, {arguments})", scope)
    return bound
