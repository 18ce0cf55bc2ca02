"""Constants that Triton 3.6 loses in groups of groups, told by any Triton: no version beside it does so.

Triton 3.6 fills a callee's arguments in, field by field: first what is no constant, then constants. With each field
that is no group it notes the types of all fields of the group around it. So a constant of a group inside, such as a
stride of 1, is only noted where a constant field follows in the group around it. A loop then takes the constant for
None, without a word where None has a meaning.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from triton._C.libtriton import ir
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import make_backend
from triton.language import constexpr
from triton.language import tuple as group

from helpers.targets import TARGETS


def _has_constants(value: Any) -> bool:
    if isinstance(value, group):
        return any(map(_has_constants, value.values))
    return isinstance(value, constexpr) and value.value is not None


def lost_constants(value: Any, name: str) -> Iterator[str]:
    """Name the groups in an argument of a jitted function whose constants a loop would not see."""
    if not isinstance(value, group):
        return
    fields = value.type.fields or [str(i) for i in range(len(value.values))]
    constants = [i for i, x in enumerate(value.values) if isinstance(x, constexpr)]
    has_plain_fields = any(not isinstance(x, group) for x in value.values)
    for i, (field, x) in enumerate(zip(fields, value.values, strict=True)):
        noted = not has_plain_fields or (constants and i < constants[-1])
        if isinstance(x, group) and not noted and _has_constants(x):
            yield f"{name}.{field}"
        yield from lost_constants(x, f"{name}.{field}")


@contextlib.contextmanager
def watch_groups() -> Iterator[list[str]]:
    """Collect what `lost_constants` finds in all calls of jitted functions that are compiled meanwhile."""
    found: list[str] = []
    call = CodeGenerator.call_JitFunction

    def watch(self: Any, fn: Any, args: Any, kwargs: Any, **more: Any) -> Any:
        args = list(args)
        for name, value in zip(fn.arg_names, args, strict=False):
            found.extend(f"{fn.__name__}: {lost}" for lost in lost_constants(value, name))
        return call(self, fn, args, kwargs, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodeGenerator, "call_JitFunction", watch)
        yield found


def translate(source: Any, options: dict[str, Any]) -> None:
    """Translate a kernel into Triton's language of tiles for Hopper, and no further."""
    backend = make_backend(TARGETS["sm_90"])
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = [parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context]
    if "target" in inspect.signature(source.make_ir).parameters:
        given.insert(0, TARGETS["sm_90"])
    source.make_ir(*given)
