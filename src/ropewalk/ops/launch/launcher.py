"""The launcher in C, which runs all launches of a plan by one call. Plans work without it, by Triton's launchers.

Triton's own build compiles it at the first plan, with any C compiler, and keeps it in Triton's cache.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ropewalk import device as gpu

TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9))  # whose launchers pass the parameters that `pack` packs
is_enabled = True  # False: later plans launch by Triton
_SOURCE = Path(__file__).with_suffix(".c")
_MAX_SHARED = 228 << 10  # bytes; beyond, newer launchers set one more attribute
_MAX_KERNELS = 8  # of one call
_MAP, _MAP_ALIGNMENT = 128, 64  # bytes of a descriptor
_ADDRESS = 8  # bytes
# As Triton's launchers read numbers, by the kernel's signature.
_FORMATS = {
    "i1": "i",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "I",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}


class Address(NamedTuple):
    """An address among the parameters: that of a slot, and an offset; or a number that a slot holds."""

    slot: int
    offset: int


class Map(NamedTuple):
    """A descriptor among the parameters: its address, and what encodes it."""

    address: Address
    encode: Callable[[int], Any]


class Packed(NamedTuple):
    """A kernel's launch, as `make` of launcher.c takes it."""

    function: int
    grid: int
    threads: int
    shared: int
    is_cooperative: bool
    has_pdl: bool
    bytes: bytes  # the parameters, with zeros for addresses and descriptors
    offsets: tuple[int, ...]  # of each parameter
    pointers: tuple[tuple[int, int, int], ...]  # where an address goes, its slot and its offset
    descriptors: tuple[tuple[int, int, int, Callable[[int], Any]], ...]  # likewise, and what encodes it


def why_missing() -> str | None:
    """Say why there is no launcher here; None if there is."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Any, str | None]:
    """Compile and load the module; or return the reason why it is missing."""
    import triton

    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "Python runs without the GIL"
    if gpu.release_of(triton.__version__) not in TRITONS:
        return None, f"Triton {triton.__version__} is not one that it was tested with"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    try:
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(_SOURCE.read_text(), "ropewalk_launcher", include_dirs=[str(include)])
    except Exception as error:  # of Triton's build, of the compiler or of the loader: all are a reason
        return None, f"it cannot be built: {error}"
    return (module, None) if callable(getattr(module, "make", None)) else (None, "what was built has no function make")


def pack(compiled: Any, n_programs: Any, parameters: Sequence[tuple[str, Any]]) -> Packed | None:
    """Pack a launch's parameters; None where the launcher does not run such a launch.

    parameters: pairs of the kind, as the kernel's signature names it or "map", and the value: a number, an `Address` or
    a `Map`.
    """
    n_warps, n_ctas, shared = compiled.packed_metadata
    if not is_enabled or n_ctas != 1 or shared > _MAX_SHARED or why_missing() is not None:
        return None
    packed, offsets, pointers, descriptors = bytearray(), [], [], []
    for kind, value in (*parameters, ("*", 0), ("*", 0)):  # the last two: memory that Triton would allocate
        is_map, is_pointer = kind == "map", kind.startswith("*")
        letter = "Q" if is_pointer else _FORMATS.get(kind)
        if letter is None and not is_map:
            return None
        # A number from a slot has room for 8 bytes, of which a kernel reads the lower ones.
        is_address = isinstance(value, Address)
        size = _MAP if is_map else _ADDRESS if is_address else struct.calcsize(str(letter))
        packed += bytes(-len(packed) % (_MAP_ALIGNMENT if is_map else size))
        offsets.append(len(packed))
        if is_map:
            descriptors.append((len(packed), *value.address, value.encode))
            packed += bytes(_MAP)
        elif is_address:
            pointers.append((len(packed), *value))
            packed += bytes(size)
        else:
            packed += struct.pack(f"={letter}", (value or 0) if is_pointer else value)
    flags = (bool(compiled.run.launch_cooperative_grid), bool(compiled.run.launch_pdl))
    return Packed(
        *(compiled.function, n_programs, 32 * n_warps, shared, *flags),
        *(bytes(packed), tuple(offsets), tuple(pointers), tuple(descriptors)),
    )


def make(kernels: Sequence[Packed], device: int) -> list[Callable[[list[int], int], None]]:
    """Return functions of addresses and a stream that launch kernels, in their order."""
    module, _ = _load()
    starts = range(0, len(kernels), _MAX_KERNELS)
    return [module.make(list(map(tuple, kernels[start : start + _MAX_KERNELS])), device).run for start in starts]
