"""Triton's interpreter without work that it does for nothing, three quarters of its time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any


def make_faster() -> None:
    """Spare the interpreter what changes no result."""
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_language_once(interpreter)
    _remember_types(tl.core, interpreter)
    # It computes whether integers overflow, and drops the answer, as `debug` is off.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_language_once(interpreter: Any) -> None:
    """Patch `triton.language` once in a launch for each module, and not in each call of a device function."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # modules' dictionaries

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **keywords: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **keywords)
        finally:
            patched.clear()  # the interpreter takes its patches back

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _remember_types(core: Any, interpreter: Any) -> None:
    """Make the types of tensors once, and those of tuples where somebody asks: they are made anew for each result."""
    numpy_of, make_block = interpreter._get_np_dtype, core.block_type.__init__
    numpy_of_scalar = functools.cache(numpy_of)

    def numpy_of_any(type: Any) -> Any:
        scalar = type.scalar
        return numpy_of(scalar) if isinstance(scalar, core.pointer_type) else numpy_of_scalar(scalar)

    @functools.cache
    def block_of(element_ty: Any, shape: tuple[Any, ...]) -> dict[str, Any]:
        block = object.__new__(core.block_type)
        make_block(block, element_ty, list(shape))  # `tuple` is a class of its own there
        known: dict[str, Any] = vars(block)
        return known

    def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        if isinstance(element_ty, core.pointer_type):  # they have no hash
            make_block(self, element_ty, shape)
        else:
            vars(self).update(block_of(element_ty, tuple(shape)))

    @functools.cache
    def constants_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants_of(tuple(type.shape) if type.is_block() else ())

    def init_tuple(self: Any, args: Sequence[Any], type: Any = None) -> None:
        self.values = list(args)
        self.type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of_tuple(self: Any) -> Any:
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    interpreter._get_np_dtype = numpy_of_any
    core.block_type.__init__, core.tensor.__init__, core.tuple.__init__ = init_block, init_tensor, init_tuple
    core.tuple.type = property(type_of_tuple, lambda self, type: vars(self).update(_type=type))
