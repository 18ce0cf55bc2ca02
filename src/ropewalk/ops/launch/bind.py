"""Binding compiled kernels to launches that differ in addresses alone: the boundary to Triton's launchers for NVIDIA.

Triton's `kernel[grid](...)` specialises, looks up and encodes all arguments in each call. A bound launch has done so:
it reads addresses from a list, and calls Triton's C launcher. `join` makes one call of several launches, where our
launcher in C is there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from triton.runtime.driver import driver

from ropewalk import device as gpu
from ropewalk.ops.launch import launcher
from ropewalk.ops.launch.steps import Grid, UnplannableError

MAX_DESCRIPTORS = 64  # of one argument: the addresses that a model's layers have

Launch = Callable[[list[int], int], None]  # (addresses, stream)


class Number(int):
    """A number that differs from run to run, as those of a cache that grows, with its index among the addresses."""

    slot: int

    def __new__(cls, value: int, slot: int) -> Number:
        """Make the number of the run at hand."""
        number = super().__new__(cls, value)
        number.slot = slot
        return number


class _Descriptors(dict[int, Any]):
    """Descriptors of one argument, by address, of which they are a function."""

    def __init__(self, encode: Callable[..., Any], *geometry: Any) -> None:
        super().__init__()
        self.encode, self.geometry = encode, geometry

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_DESCRIPTORS:
            self.clear()
        descriptor = self[address] = self.make(address)
        return descriptor

    def make(self, address: int) -> Any:
        """Encode a descriptor, and do not keep it."""
        return self.encode(address, *self.geometry)


class _Writer:
    """Writes a kernel's arguments as an expression of `addresses`, and collects the names that it reads.

    `parameters` are the same for `launcher.pack`.
    """

    def __init__(self, compiled: Any, address_of: Callable[[Tensor], tuple[int, int]]) -> None:
        self.address_of = address_of
        self.names: dict[str, Any] = {}
        self.parameters: list[tuple[str, Any]] = []
        self.numbers: set[int] = set()  # the slots of numbers
        self.descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def name(self, value: Any) -> str:
        name = f"x{len(self.names)}"
        self.names[name] = value
        return name

    def address(self, x: Tensor) -> str:
        slot, offset = self.address_of(x)
        return f"addresses[{slot}]" if offset == 0 else f"addresses[{slot}] + {self.name(offset)}"

    def write(self, value: Any, kind: Any) -> str:
        if isinstance(kind, tuple):
            return "(" + "".join(f"{self.write(*pair)}, " for pair in zip(value, kind, strict=True)) + ")"
        if kind == "constexpr":
            return "None"
        if kind.startswith("tensordesc"):
            numbers, descriptors = (*value.shape, *value.strides), self.describe(value)
            address = launcher.Address(*self.address_of(value.base))
            self.parameters.append(("map", launcher.Map(address, descriptors.make)))
            self.parameters += zip(("i32",) * len(value.shape) + ("i64",) * len(value.strides), numbers, strict=True)
            written = ", ".join(map(self.name, numbers))
            return f"{self.name(descriptors)}[{self.address(value.base)}], {written}"
        if type(value) is Number:
            self.numbers.add(value.slot)
            self.parameters.append((kind, launcher.Address(value.slot, 0)))
            return f"addresses[{value.slot}]"
        is_tensor = isinstance(value, Tensor)
        self.parameters.append((kind, launcher.Address(*self.address_of(value)) if is_tensor else value))
        return self.address(value) if is_tensor else self.name(value)

    def describe(self, descriptor: Any) -> _Descriptors:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        encoding = next(self.descriptors, None)
        if encoding is None or encoding["fp4_padded"] or getattr(descriptor, "round_f32_to_tf32", False):
            raise UnplannableError("a descriptor is not one of TMA's plain ones")
        utils = driver.active.utils
        encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # Triton 3.6: the last
        return _Descriptors(
            encode,
            encoding["swizzle"],
            encoding["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[encoding["elem_type"]],
            encoding["block_size"],
            list(descriptor.shape),
            list(descriptor.strides),
            1 if descriptor.padding == "nan" else 0,
        )


def load_kernel(compiled: Any) -> Any:
    """Load a compiled kernel onto the current device, and return its launcher."""
    run = compiled.run
    if compiled.function is None:  # another thread is loading it: Triton has the launcher before the function
        compiled._init_handles()
    return run


def bind(compiled: Any, grid: Grid, values: Sequence[Any], address_of: Callable[[Tensor], tuple[int, int]]) -> Launch:
    """Bind a compiled kernel's arguments, all but the addresses of its tensors and each `Number`.

    values: all arguments, in the order of the kernel's signature; tensors, alone or in descriptors, stand for memory.
    address_of: the index of a tensor's memory among the addresses, and the tensor's offset there in bytes.
    """
    run, kinds = load_kernel(compiled), compiled.src.signature.values()
    if gpu.is_rocm() and "tensordesc" in str(list(kinds)):
        raise UnplannableError("descriptors are bound for NVIDIA's driver alone")
    writer = _Writer(compiled, address_of)
    arguments = "".join(f"{writer.write(value, kind)}, " for value, kind in zip(values, kinds, strict=True))
    if gpu.is_rocm():
        head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        return cast(Launch, _write(writer, run, grid, head, arguments))
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        raise UnplannableError("a kernel reads memory that Triton allocates")
    parameters = list(writer.parameters)  # without the grid
    # Grid, stream, function, flags, metadata, and no hooks and no scratch memory; in the order of each Triton.
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "arg_annotations"):
        launch = driver.active.utils.launch
        head = (
            *(*flags, compiled.packed_metadata, None, None, None, None, None),
            *(run.arg_annotations, run.kernel_signature),
        )
        arguments = f"({arguments})"
    else:  # Triton 3.6, where a closure encodes descriptors before the launcher runs
        launch = run.launch
        if hasattr(launch, "__closure__"):
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        head = (*flags, None, None, compiled.packed_metadata, *(None,) * 3)
    bound = _write(writer, launch, grid, (compiled.function, *head), arguments)
    bound.packed = launcher.pack(compiled, grid, parameters) if type(grid) is int else None
    return cast(Launch, bound)


def _write(writer: _Writer, launch: Any, grid: Grid, head: Sequence[Any], arguments: str) -> Any:
    """Return the call of a launcher as a function of addresses and a stream."""
    programs, rows = (grid, 1) if isinstance(grid, int) else grid
    written = writer.write(programs, "i32")
    names = [writer.name(value) for value in head]
    source = f"launch({written}, {rows}, 1, stream, {', '.join(names)}, {arguments})"
    bound: Any = _compile(source, tuple(writer.names))(launch, *writer.names.values())
    bound.numbers = writer.numbers
    return bound


def join(launches: Sequence[Launch]) -> list[Launch]:
    """Return functions that do what some launches do, in their order: as few as can be."""
    joined: list[Launch] = []
    for is_packed, group in itertools.groupby(launches, lambda launch: getattr(launch, "packed", None) is not None):
        found: list[Any] = list(group)
        if is_packed:
            joined += launcher.make([launch.packed for launch in found], driver.active.get_current_device())
        else:
            joined += found
    return joined


@functools.lru_cache(maxsize=512)
def _compile(source: str, names: tuple[str, ...]) -> Callable[..., Launch]:
    """Compile the function that makes a bound launch of the launcher and named values.

    Written out, a launch takes the host a third of the time that loops over its arguments take.
    """
    program = f"def make(launch, {', '.join(names)}):\n    return lambda addresses, stream: {source}\n"
    scope: dict[str, Any] = {}
    exec(program, scope)
    make: Callable[..., Launch] = scope["make"]
    return make
