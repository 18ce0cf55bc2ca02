"""Records: every leaf of every operation's record is in its key and its matcher, its schema and its copies."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import ropewalk
from ropewalk.ops import tracing
from ropewalk.ops.attention.gate import operation as gate_operation
from ropewalk.ops.attention.plans import backward, find
from ropewalk.ops.attention.plans.inputs import UNCHECKED
from ropewalk.ops.attention.tables import identity_of, signature_of
from ropewalk.ops.launch.kinds import _OPERATIONS
from ropewalk.ops.launch.record import Record, Varying, make_matcher
from ropewalk.schemes import Alibi, NoPosition, PositionScheme, Rope

ROOT = Path(ropewalk.__file__).parents[1]
SOURCES = {path: path.read_text() for path in ROOT.rglob("*.py")}
for path, source in SOURCES.items():
    if re.search(r"^\w.* = Operation\(", source, re.MULTILINE):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
gate_operation._operations()
RECORDS: dict[str, Record[Any]] = {
    **{x.record.kind.__name__: x.record for x in _OPERATIONS},
    "cache": find._REST,  # of calls over caches of all lengths, but what grows
}
LEAVES = [(name, leaf.name) for name, record in RECORDS.items() for leaf in record.leaves]
# Two values of each type of leaves; those of other types are strings, which all records take.
VALUES: dict[Any, tuple[Any, Any]] = {
    bool: (False, True),
    int: (3, 4),
    Varying: (5, 6),
    float: (0.5, 1.5),
    PositionScheme: (Rope(), Rope(base=7.0)),
}


TENSOR = torch.zeros(2, 4)


def plain_tensor() -> Tensor:
    return torch.zeros(2, 4)


def leaf_values(record: Record[Any], *, is_full: bool) -> dict[str, Any]:
    """Return a value for each leaf; without those that may be None, unless it is full."""
    found: dict[str, Any] = {}
    for leaf in record.leaves:
        if leaf.is_optional and not is_full:
            found[leaf.name] = None
        else:
            found[leaf.name] = plain_tensor() if leaf.kind is Tensor else VALUES.get(leaf.kind, ("a", "b"))[0]
    return found


def test_each_operation_is_here() -> None:
    made = sum(
        len(re.findall(r"(?<!class )\b(?:Operation|_Launches|_Norms|_Attention)\(\w", x)) for x in SOURCES.values()
    )
    assert len(_OPERATIONS) >= made > len(RECORDS) / 2  # other tests make some, and load modules again


def make(record: Record[Any], values: dict[str, Any]) -> Any:
    """Return a record of leaves; those that it leaves out, as those of a cache that grows, are all the same."""
    whole = UNCHECKED if record is find._REST else record
    values = {**dict.fromkeys(whole.tensors, TENSOR), **values}
    return whole.unflatten([values[name] for name in whole.names])


def others(x: Any) -> Iterator[Any]:
    """Yield what differs from a leaf's value in one thing."""
    if not isinstance(x, Tensor):
        if isinstance(x, (bool, int, float)):
            yield from (
                type(x)(x + 1),
                *(kind(x) for kind in (bool, int, float) if kind is not type(x) and kind(x) == x),
            )
        yield {PositionScheme: VALUES[PositionScheme][1]}.get(type(x).__base__, "another")
        return
    yield torch.zeros(2, 5)
    yield torch.zeros(4, 2).t()
    yield x.half()
    yield torch.empty(2, 4, device="meta")
    yield torch.nn.Parameter(x, requires_grad=False)
    yield torch.zeros(2, 4).requires_grad_()
    yield torch._neg_view(x)


@pytest.mark.parametrize(("record", "leaf"), LEAVES, ids=lambda x: x)
@pytest.mark.parametrize("is_full", [True, False])
def test_every_leaf_is_in_the_key_and_in_the_matcher(record: str, leaf: str, is_full: bool) -> None:
    of, values = RECORDS[record], leaf_values(RECORDS[record], is_full=is_full)
    (kind,) = [x.kind for x in of.leaves if x.name == leaf]
    first = make(of, values)
    key, matches = of.key(first), of.make_match(first)
    again = make(of, leaf_values(of, is_full=is_full))
    assert of.key(again) == key
    assert hash(of.key(again)) == hash(key)
    assert matches(again)
    changed = [plain_tensor() if kind is Tensor else 7] if values[leaf] is None else [None, *others(values[leaf])]
    if kind is PositionScheme:
        changed = [VALUES[PositionScheme][1], NoPosition(), Rope(attention_factor=0.5)]
    for value in changed:
        other = make(of, {**values, leaf: value})
        is_told = kind is not Varying
        assert (of.key(other) != key) == is_told, value
        with contextlib.suppress(TypeError):  # guards take no other objects for tensors
            assert matches(other) != is_told, value


@pytest.mark.parametrize("record", RECORDS)
def test_which_tensors_are_one_is_in_the_key_and_in_the_matcher(record: str) -> None:
    of, values = RECORDS[record], leaf_values(RECORDS[record], is_full=True)
    apart = make(of, values)
    for index, name in enumerate(of.tensors):
        for other in of.tensors[:index]:
            one = make(of, {**values, name: values[other]})
            assert of.key(one) != of.key(apart)
            assert of.make_match(one)(one)
            assert not of.make_match(one)(apart)
            with contextlib.suppress(RuntimeError):
                assert not of.make_match(apart)(one)


@pytest.mark.parametrize("record", [name for name in RECORDS if name != "cache"])
@pytest.mark.parametrize("is_full", [True, False])
def test_a_record_is_flattened_and_made_again(record: str, is_full: bool) -> None:
    of, values = RECORDS[record], leaf_values(RECORDS[record], is_full=is_full)
    made = make(of, values)
    assert [*of.flatten(made)] == [*values.values()]
    assert make(of, dict(zip(of.names, of.flatten(made), strict=True))) == made
    assert of.tensors_of(made) == tuple(values[name] for name in of.tensors)
    tensors, numbers = [plain_tensor() for _ in of.tensors], [9 for _ in of.varying]
    changed = dict(zip(of.names, of.flatten(of.with_others(made, tensors, numbers)), strict=True))
    assert [changed[name] for name in of.tensors] == tensors
    assert all(changed[name] is values[name] for name in of.numbers)
    assert [changed[name] for name in of.varying] == numbers


@pytest.mark.parametrize("record", RECORDS)
def test_no_field_of_a_record_is_left_out(record: str) -> None:
    """All but what a launch does not depend on, or which is in the key by other means."""
    missing: dict[str, Any] = {"cache": ("k", "v", "mask"), "ShiftedRotation": ("offset",)}
    missing |= {**dict.fromkeys(("ForwardCall", "BackwardCall"), backward._NOT_READ)}

    def names_of(kind: Any, prefix: str = "") -> Iterator[str]:
        for name, hint in get_type_hints(kind).items():
            inner = [x for x in (get_args(hint) or (hint,)) if hasattr(x, "_fields")]
            if name not in missing.get(record, ()):
                yield from names_of(inner[0], f"{prefix}{name}_") if inner else [prefix + name]

    assert [*names_of(RECORDS[record].kind)] == [*RECORDS[record].names]


class Inner(NamedTuple):
    x: Tensor
    n: int


class Outer(NamedTuple):
    x: Tensor
    inner: Inner | None
    pair: int | tuple[int, int] | None
    offset: Varying


def test_a_record_that_may_be_none_has_leaves_that_may_be_none() -> None:
    record = Record(Outer)
    assert Record(Outer, ("pair",)).schema == "Tensor x, Tensor? inner_x, SymInt? inner_n, SymInt offset"
    assert [(leaf.name, leaf.is_optional) for leaf in record.leaves] == [
        *(("x", False), ("inner_x", True), ("inner_n", True), ("pair", True), ("offset", False))
    ]
    x = plain_tensor()
    assert record.flatten(Outer(x, None, 1, Varying(2))) == (x, None, None, 1, 2)
    assert record.unflatten((x, None, None, 1, 2)).inner is None


@pytest.mark.parametrize(("pair", "other"), [(1, True), (1, 1.0), ((1, 0), (True, 0)), ((1, 0), (1.0, 0)), (1, None)])
def test_equal_numbers_of_another_type_are_others(pair: Any, other: Any) -> None:
    record = Record(Outer)
    mine, theirs = (Outer(plain_tensor(), None, x, Varying(0)) for x in (pair, other))
    assert record.key(mine) != record.key(theirs)
    assert not record.make_match(mine)(theirs)
    assert not record.make_match(theirs)(mine)


def test_a_new_field_is_in_all() -> None:
    """A field that is added to a record needs no other line."""
    wider: Any = NamedTuple("Wider", [*get_type_hints(Outer).items(), ("added", Tensor | None)])  # type: ignore[misc]
    record: Record[Any] = Record(wider)
    without, given = (wider(plain_tensor(), None, 1, 0, x) for x in (None, plain_tensor()))
    assert record.key(without) != record.key(given)
    assert not record.make_match(without)(given)
    assert record.tensors[-1] == "added"


class _Custom(PositionScheme):
    def __init__(self, value: Any) -> None:
        self.value = value


def test_schemes_are_known_by_exact_values() -> None:
    values = [True, 1, 1.0, 0, False, 0.0, -0.0, "1", None]
    values += [torch.tensor([x]) for x in (0.0, -0.0, 1.0)] + [torch.tensor([1]), torch.tensor([True])]
    for key_of in (identity_of, signature_of):
        assert len({key_of(_Custom(value)) for value in values}) == len(values)
        nan = torch.tensor([float("nan"), 2.0])
        assert key_of(_Custom(nan)) == key_of(_Custom(nan.clone()))
        assert key_of(_Custom(torch._neg_view(-nan[1:]))) is not None
    ones = torch.ones(2)
    assert identity_of(_Custom(torch._neg_view(-ones))) == identity_of(_Custom(ones))


def test_a_scheme_that_is_written_is_another() -> None:
    slopes = torch.ones(2)
    record, call = UNCHECKED, leaf_values(UNCHECKED, is_full=False)
    call |= {"arguments_position": Alibi(slopes)}
    key, matches = record.key(make(record, call)), record.make_match(make(record, call))
    slopes.data.add_(1)  # raises no version
    assert record.key(make(record, call)) != key
    assert not matches(make(record, call))


@pytest.mark.parametrize("name", ["autocast", "inference mode", "a transform", "a dispatch mode"])
@pytest.mark.parametrize("has_guards", [True, False])
def test_matchers_know_their_surroundings(monkeypatch: pytest.MonkeyPatch, name: str, has_guards: bool) -> None:
    monkeypatch.setattr(tracing, "has_guards", lambda: has_guards)
    x, y = plain_tensor(), plain_tensor()
    matches = make_matcher(x)
    assert matches(y)
    found = []
    if name == "a transform":
        torch.func.vmap(lambda z: (found.append(matches(y)), z)[1])(x)
    else:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watches(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return function(*args, **(kwargs or {}))

        around = {"autocast": lambda: torch.autocast("cpu"), "inference mode": torch.inference_mode}.get(name, Watches)
        with around():
            found.append(matches(y))
    assert found == [False]
    assert matches(y)
