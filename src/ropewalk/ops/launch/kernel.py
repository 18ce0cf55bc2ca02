"""Kernels that are compiled by the values of their arguments, and what their launchers share.

Triton's `kernel[grid](...)` specialises each number and each address; lengths and strides that differ from call to call
would compile kernels without end. A `Kernel` is compiled for the dtypes of tensors, for constants, and for one
alignment of all tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from ropewalk import device as gpu
from ropewalk.ops.launch.bind import load_kernel

WIDEST_ACCESS = 16  # bytes
LETTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_CUDA_OPTIONS = ("maxnreg", "launch_pdl")  # options that other targets do not have


class Kernel:
    """A `triton.jit` function that is compiled by the values of its arguments.

    Pointers go by their dtypes, and None is a constant. Numbers are int32, strides all of them int64 where one needs
    it. Beside the kernel's arguments a launch takes Triton's options, with `threads` of a program for `num_warps`.

    unaligned: pointers to what is read element by element, whose addresses are not looked at. unsigned: numbers that
    are uint32. wide: numbers that are int64.
    """

    is_by_values = True  # `warmup` takes the alignment of tensors that have no address

    def __init__(
        self,
        function: Any,
        *,
        unaligned: Collection[str] = (),
        unsigned: Collection[str] = (),
        wide: Collection[str] = (),
    ) -> None:
        self.function = function
        self.signature = inspect.signature(function.fn)
        parameters = self.signature.parameters
        self.arg_names = list(parameters)
        self.aligned = [name for name in parameters if name not in unaligned]
        self.constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
        self.numbers = dict.fromkeys(parameters, "i32") | dict.fromkeys(unsigned, "u32") | dict.fromkeys(wide, "i64")
        self.strides = [name for name in parameters if "_stride" in name]
        self.compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """Return the function that launches at once, on the current stream of the tensors' device."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], /, **arguments: Any) -> None:
        values = {name: arguments[name] for name in self.arg_names}
        if gpu.is_interpreted():
            self.function[grid](**values)
            return
        addresses = {name: x.data_ptr() for name, x in values.items() if isinstance(x, Tensor)}
        index = next(x.get_device() for x in values.values() if isinstance(x, Tensor))
        with torch.cuda.device(index):
            alignment = alignment_of(addresses[name] for name in self.aligned if name in addresses)
            compiled = self.warmup(grid=grid, alignment=alignment, **arguments)
            run = load_kernel(compiled)
            driver = triton.runtime.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            x, y, z, *_ = (*grid, 1, 1)
            launched = (values | addresses).values()
            run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *launched)

    def warmup(self, *, grid: Any, alignment: int = WIDEST_ACCESS, **arguments: Any) -> Any:
        """Return the kernel compiled for the current device, once."""
        options = {name: value for name, value in arguments.items() if name not in self.numbers}
        signature, constants, _ = self._describe(alignment, arguments)
        device = triton.runtime.driver.active.get_current_device()
        values = constants.values()  # True is 1 to a tuple, but another constant to a kernel
        key = (device, alignment, *signature.values(), *values, *map(type, values), *options.items())
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.compiled[key] = self.compile(None, alignment=alignment, **arguments)
        return compiled

    def compile(self, target: Any, *, alignment: int = WIDEST_ACCESS, **arguments: Any) -> Any:
        """Compile for a target, None for that of the current GPU; it needs no GPU, and tensors need no memory."""
        target = target or triton.runtime.driver.active.get_current_target()
        options = {name: value for name, value in arguments.items() if name not in self.numbers}
        if "threads" in options:
            options["num_warps"] = max(1, options.pop("threads") // target.warp_size)
        if target.backend != "cuda":
            options = {name: value for name, value in options.items() if name not in _CUDA_OPTIONS}
        return triton.compile(self.source(alignment=alignment, **arguments), target=target, options=options)

    def source(self, *, alignment: int = WIDEST_ACCESS, **arguments: Any) -> ASTSource:
        """Return the source that Triton compiles."""
        signature, constants, attributes = self._describe(alignment, arguments)
        return ASTSource(self.function, signature, constexprs=constants, attrs=attributes)

    def _describe(self, alignment: int, arguments: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], Any]:
        """Return the types of arguments, the constants among them, and the attributes of the others."""
        signature, constants, attributes = {}, {}, {}
        most = max((arguments[name] or 0 for name in self.strides), default=0)
        numbers = self.numbers | dict.fromkeys(self.strides, "i32" if most < 2**31 else "i64")
        for index, name in enumerate(self.arg_names):
            value = arguments[name]
            if value is None or name in self.constants:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = f"*{LETTERS[value.dtype]}"
                if name in self.aligned:
                    attributes[index,] = [["tt.divisibility", alignment]]
            else:
                signature[name] = numbers[name]
        return signature, constants, attributes


def alignment_of(numbers: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides addresses, or strides."""
    union = WIDEST_ACCESS
    for number in numbers:
        union |= number
    return union & -union


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Return strides in elements, 0 for a dimension of one element."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))


def is_dense(x: Tensor) -> bool:
    """Say whether the last dimension is dense in memory."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def division_by(divisor: int) -> tuple[int, int]:
    """Return a multiplier m and a shift s such that n // divisor == n · m >> s for all 0 ≤ n < 2³¹."""
    shift = 31 + max(divisor - 1, 0).bit_length()
    return -(-(1 << shift) // max(divisor, 1)), shift


def compute_dtype(x: Tensor) -> Any:
    """Return Triton's dtype of the arithmetic with a tensor's features."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
