"""The records of calls: their tensors and numbers, the schema of their operators, and what keys hold of them.

All of it is derived from a record's annotations, once. What is written out as an expression takes the host a third of
the time that loops over the fields take.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, NewType, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from ropewalk.ops.tracing import make_matcher

Varying = NewType("Varying", int)  # a number that no key holds: plans take it anew in each run
AnyRecord = TypeVar("AnyRecord", bound=tuple[Any, ...])
_SCHEMA_TYPES = {
    (Tensor, False): "Tensor",
    (Tensor, True): "Tensor?",
    (bool, False): "bool",
    (bool, True): "bool?",
    (int, False): "int",
    (int, True): "SymInt?",
    (Varying, False): "SymInt",
    (float, False): "float",
    (float, True): "float?",
    (str, False): "str",
    (str, True): "str?",
}


class Field(NamedTuple):
    """A field of a record."""

    name: str
    kind: Any  # its type, without None
    is_optional: bool  # whether it may be None
    fields: tuple[Field, ...] = ()  # of the record that it holds, if it holds one


class Leaf(NamedTuple):
    """A tensor or a number of a record, or of one that it holds."""

    name: str  # with the names of the fields that hold it before its own
    kind: Any
    is_optional: bool
    path: str  # the expression that reads it from a record r


def fields_of(record: type[Any], leave_out: Collection[str] = ()) -> tuple[Field, ...]:
    """Return the fields of a record, but for some."""
    fields = []
    for name, hint in get_type_hints(record).items():
        if name not in leave_out:
            kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
            kind = kinds[0] if len(kinds) == 1 else Any
            inner = fields_of(kind, leave_out) if hasattr(kind, "_fields") else ()
            fields.append(Field(name, kind, type(None) in get_args(hint), inner))
    return tuple(fields)


def leaves_of(fields: tuple[Field, ...], prefix: str = "", holder: str = "r", lacks: str = "") -> tuple[Leaf, ...]:
    """Return the leaves of a record, those of a record that it holds in its place; all may be None if it may.

    holder: the expression that reads the record, which is None where the expression `lacks` is true; "" where its
    fields are variables, those of `unpacked`.
    """
    leaves: list[Leaf] = []
    for field in fields:
        name = prefix + field.name
        path = f"{holder}.{field.name}" if holder else name
        if field.fields:
            absent = [x for x in (lacks, f"{path} is None" if field.is_optional else "") if x]
            leaves += leaves_of(field.fields, f"{name}_", path if holder or absent else "", " or ".join(absent))
        else:
            read = f"None if {lacks} else {path}" if lacks else path
            leaves.append(Leaf(name, field.kind, bool(lacks) or field.is_optional, read))
    return tuple(leaves)


def unpacked(kind: Any, fields: tuple[Field, ...], prefix: str = "") -> str:
    """Return the variables that a record is unpacked into; one that it holds is one of them if it may be None."""
    known = {field.name: field for field in fields}
    names = []
    for name in kind._fields:
        field = known.get(name)
        if field is not None and field.fields and not field.is_optional:
            names.append(unpacked(field.kind, field.fields, f"{prefix}{name}_"))
        else:
            names.append("_" if field is None else prefix + name)
    return _tuple(names)


def unflatten_fields(record: Any, fields: tuple[Field, ...], values: Iterator[Any], is_optional: bool = False) -> Any:
    """Return a record of its leaves' values. A record that may be None is None where it would hold nothing."""
    held = {}
    is_empty = is_optional
    for name, kind, may_lack, inner in fields:
        held[name] = value = unflatten_fields(kind, inner, values, may_lack) if inner else next(values)
        is_empty = is_empty and value is None
    return None if is_empty else record(**held)


class Record(Generic[AnyRecord]):
    """A type of records, and what follows from its annotations."""

    def __init__(
        self,
        kind: type[AnyRecord],
        leave_out: Collection[str] = (),
        identify: Mapping[Any, Callable[[Any], Any]] = MappingProxyType({}),
    ) -> None:
        """Describe a type.

        leave_out: fields of it, or of records that it holds, that are not read. identify: by the type of a leaf that is
        neither a tensor nor plain data, the function that returns a key of all that it holds.
        """
        self.kind, self.fields, self.identify = kind, fields_of(kind, leave_out), identify
        self.leaves = leaves_of(self.fields)
        self.names = tuple([leaf.name for leaf in self.leaves])
        self.tensors = tuple([leaf.name for leaf in self.leaves if leaf.kind is Tensor])
        self.numbers = tuple([leaf.name for leaf in self.leaves if leaf.kind not in (Tensor, Varying)])
        self.varying = tuple([leaf.name for leaf in self.leaves if leaf.kind is Varying])
        paths = {leaf.name: leaf.path for leaf in self.leaves}
        self.flatten: Callable[[AnyRecord], tuple[Any, ...]] = write(_tuple(paths.values()))
        self.tensors_of: Callable[[AnyRecord], tuple[Tensor | None, ...]] = write(_tuple(map(paths.get, self.tensors)))
        self.varying_of: Callable[[AnyRecord], tuple[int, ...]] = write(_tuple(map(paths.get, self.varying)))
        self._pick_numbers = pick(self.names, self.numbers)
        self._put_back = pick((*self.tensors, *self.numbers, *self.varying), self.names)
        self.key: Callable[[AnyRecord], tuple[Any, ...]] = self._write_key(paths)
        self._paths = paths

    def write_reader(self, names: Iterable[str]) -> Callable[[AnyRecord], tuple[Any, ...]]:
        """Return the function that reads some leaves of a record."""
        return write(_tuple(map(self._paths.get, names)))

    @property
    def schema(self) -> str:
        """Return the leaves as arguments in the schema of an operator."""
        return ", ".join(f"{_SCHEMA_TYPES[leaf.kind, leaf.is_optional]} {leaf.name}" for leaf in self.leaves)

    def unflatten(self, leaves: Sequence[Any]) -> AnyRecord:
        """Undo `flatten`; fields that were left out have their defaults."""
        record: AnyRecord = unflatten_fields(self.kind, self.fields, iter(leaves))
        return record

    def with_others(self, record: AnyRecord, tensors: Sequence[Tensor | None], varying: Sequence[int]) -> AnyRecord:
        """Return the record with other tensors, and other numbers that vary."""
        numbers = self._pick_numbers(self.flatten(record))
        return self.unflatten(self._put_back((*tensors, *numbers, *varying)))

    def _write_key(self, paths: dict[str, str]) -> Callable[[AnyRecord], tuple[Any, ...]]:
        """Write the function that returns the key of a record: all but its values and addresses, and what varies."""
        lines, parts = [], []
        for index, leaf in enumerate(self.leaves):
            if leaf.kind is Varying:
                continue
            x = f"x{index}"
            lines.append(f"    {x} = {leaf.path}\n")
            if leaf.kind is Tensor:
                metadata = ", ".join(f"{x}.{name}" for name in _METADATA)
                parts.append(f"None if {x} is None else (type({x}), {metadata})")
            elif leaf.kind in self.identify:
                parts.append(f"identify_{leaf.kind.__name__}({x})")
            else:  # True is 1 to a tuple, and no width
                parts.append(f"{x}, {_type_of(leaf, x)}")
        names = [f"x{index}" for index, leaf in enumerate(self.leaves) if leaf.kind is Tensor]
        parts.append(f"tuple(map({{}}.setdefault, map(id, {_tuple(names)}), range({len(names)})))")  # which are one
        scope: dict[str, Any] = {f"identify_{kind.__name__}": identify for kind, identify in self.identify.items()}
        exec(f"def key(r):\n{''.join(lines)}    return {_tuple(parts)}\n", scope)
        key: Callable[[AnyRecord], tuple[Any, ...]] = scope["key"]
        return key

    def make_match(
        self, record: AnyRecord, write_body: Callable[[list[str], list[str]], str] | None = None, **scope: Any
    ) -> Callable[[AnyRecord], Any]:
        """Return a function that says whether a record is of the same kind as this one, in the same surroundings.

        As `make_matcher` says it of the tensors; numbers are equal and of one type, but for those that vary.
        write_body: the function that returns the source of what is done then, which reads names of `scope`, of the
        variables of the tensors that there are, and of those of the numbers that vary.
        """
        leaves, values = leaves_of(self.fields, holder=""), self.flatten(record)
        tests, presence, there, varying, tensors = [], [], [], [], []
        for index, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            known, path = f"_{index}", f"({leaf.path})"
            if leaf.kind is Varying:
                varying.append(path)
            elif leaf.kind is not Tensor and leaf.kind in self.identify:
                identify = self.identify[leaf.kind]
                scope |= {f"_identify{index}": identify, known: identify(value)}
                tests.append(f"_identify{index}({path}) == {known}")
            elif leaf.kind is not Tensor:
                scope[known] = value
                same_type = f"{_type_of(leaf, path)} == {_type_of(leaf, known)}"
                tests.append(f"({path} is {known} or ({path} == {known} and {same_type}))")
            elif value is not None:
                there.append(path)
                tensors.append(value)
            if leaf.kind is Tensor and (leaf.is_optional or value is None):
                presence.append(f"{path} is None" if value is None else f"{path} is not None")
        scope["__name__"], scope["_check"] = __name__, make_matcher(*tensors)
        # PyTorch's check ends the process where a tensor is nested; it tells by itself what is no tensor.
        strided = [f"not getattr({path}, 'is_nested', True)" for path in there]
        tests = [*presence, *strided, f"_check({', '.join(there)})", *tests]  # what fails early first
        body = "return True" if write_body is None else write_body(there, varying)
        source = f"""
def match(r):
    {unpacked(self.kind, self.fields)} = r
    if {" and ".join(tests)}:
{textwrap.indent(body, " " * 8)}
"""
        exec(_compiled(source), scope)
        match: Callable[[AnyRecord], Any] = scope["match"]
        return match


_METADATA = ("shape", "stride()", "dtype", "device", "is_neg()", "requires_grad")


def _type_of(leaf: Leaf, x: str) -> str:
    """Return the expression of the type of a leaf, or of the types in it."""
    is_plain = leaf.kind in (bool, int, float, str)
    return f"type({x})" if is_plain else f"(tuple(map(type, {x})) if type({x}) is tuple else type({x}))"


def pick(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function that picks the wanted of values that have names."""
    return pick_at([names.index(name) for name in wanted])


def pick_at(indices: Iterable[int | None]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function that picks values by their indices, and None for None: a sequence, of whatever length."""
    indices = list(indices)
    slices = [slice(index, index + 1) for index in indices if index is not None]
    if 0 < len(slices) == len(indices):  # in C
        return itemgetter(*(indices if len(indices) > 1 else slices))
    return write(_tuple("None" if index is None else f"r[{index}]" for index in indices))


def _tuple(parts: Iterable[Any]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def write(expression: str) -> Callable[[Any], Any]:
    """Return the function of r that an expression is."""
    written: Callable[[Any], Any] = eval(f"lambda r: {expression}")
    return written


@functools.lru_cache(maxsize=512)
def _compiled(source: str) -> Any:
    return compile(source, "<kind>", "exec")


_is_deterministic = torch._C._get_deterministic_algorithms
_allows_tf32 = torch._C._get_cublas_allow_tf32
_allows_cudnn = torch._C._get_cudnn_sdp_enabled
_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def switches() -> tuple[bool, ...]:
    """Return PyTorch's switches that decide what is launched, and what is recorded of it."""
    return (
        torch.is_grad_enabled(),
        _is_deterministic(),
        _allows_tf32(),
        _allows_cudnn(),
        _hooks(True) is not None,  # pack what a forward saves, as those of checkpoints and of `save_on_cpu` do
    )
