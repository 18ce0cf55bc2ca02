"""Random sequences of calls that change one thing at a time, each compared with the truth: where stale plans answer.

A *state* is a call of a row with some changes of `CHANGES`, made in the table's order; states share all tensors that
their changes leave alone. A *step* names a state by its changes, and what to do with it: to call `attention`, to write
a tensor in place, and so on. A sequence is a row and its steps, all by name, so that steps can be left out: `shrink`
looks for the fewest that still fail, and `Failure.text` prints them as lines to run.

A later feature joins by a value in `table.py`, whose changes `_of_rows` makes, or by one line of `CHANGES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import linecache
import os
import random
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from helpers.kinds import without_plans
from helpers.modes import ON_GPU
from torch import Tensor

from products import calls, compare, pack
from products.calls import Call
from products.compare import Expected, Results
from products.run import begin, spread
from products.table import FEATURES, NEUTRAL, Row, names_a_call
from ropewalk import ExpoSB, ReRope, Rope, SelfExtend, T5Bias, attention
from ropewalk.ops.attention import tables
from ropewalk.ops.launch import kinds, remembered
from ropewalk.ops.launch.kinds import KINDS

SEED = 11  # of all tensors: a truth is for every sequence
MOST_TRUTHS = 300
MOST_PENDING = 4  # calls before the next comparison, which waits for the device
EXTRA_BINARIES = 3  # of a row on a GPU: its changes that need other kernels
# In the interpreter a program takes milliseconds, whatever its tile: few heads, and one tile each.
TINY = calls.CPU._replace(
    head_dims={name: (32, 16) if "/" in name else (16, 16) for name in calls.CPU.head_dims},
    tokens={
        "equal": ((12, 12), (8, 8), (16, 16)),
        "odd": ((9, 9), (13, 13), (7, 7)),
        "fewer queries": ((6, 14), (5, 13), (7, 15)),
        "more queries": ((14, 6), (13, 5), (15, 7)),
        "one query": ((1, 14), (1, 9), (1, 16)),
        "few queries": ((3, 15), (3, 11), (3, 16)),
        "no keys": ((6, 0), (5, 0), (7, 0)),
    },
    window=5,
    page={"16": 4, "64": 8},
)
_FEW_HEADS = {"4/2": "2/1", "4/4": "2/2", "6/1": "3/1", "21/3": "2/1"}


# === tensors ===


class Cell:
    """A tensor of states, whose values are one of two."""

    def __init__(self, name: str, values: Sequence[Tensor], tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        is_expanded = 0 in tensor.stride() and tensor.numel() > 1
        self.values = values[:1] if is_expanded else values  # an element of memory that stands for many is not written
        self.version = 0

    def write(self, by_data: bool) -> None:
        """Write the other values in place."""
        self.version += 1
        with torch.no_grad():
            (self.tensor.data if by_data else self.tensor).copy_(self.values[self.bit])

    @property
    def bit(self) -> int:
        """Return which values it has."""
        return self.version % 2


def _other_values(name: str, x: Tensor, row: Row) -> Tensor | None:
    """Return other values that a call may have instead of these; None if nothing else is known to be right."""
    is_over_cache = row["pages"] != "none" and row["layout"] == "thd"
    if name == "mask":
        return x.flip(-1)
    if name in ("positions_q", "positions_k"):
        return x * 2 + 1
    if name in ("cu_seqlens_q", "cu_seqlens_k"):
        has_rest = row["bounds"] == "with a tail" or is_over_cache
        return None if has_rest else x[-1] - x.flip(0)
    if name == "key_lengths":
        return None if is_over_cache else (x - 2).clamp_min(0)
    if name == "key_starts":
        return x.flip(0)
    if name == "query_starts":
        return x + 1
    if name == "block_table":
        return x.flip(0)
    if x.is_floating_point() and x.dtype.itemsize > 1:
        return x * 0.7
    return None


# === states ===


class State:
    """A call with some changes."""

    def __init__(self, world: World, row: Row) -> None:
        self.world, self.row, self.variant = world, dict(row), 0
        self.device: torch.device = world.device
        self.of_position: Callable[[Any], Any] = lambda scheme: scheme
        self.numbers: dict[str, Any] = {}  # keywords that are no tensors, instead of the call's
        self.same: dict[str, str] = {}  # keywords that are the tensor of another
        self.gradient = "as it is"
        self.circumstances: list[str] = []
        self.meaning: tuple[Any, ...] = ()  # changes of the results
        self.call: Call
        self.cells: dict[str, Cell]
        self.learned: tuple[str, ...]
        self.kept: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Make the call of the row."""
        self.key = (*self.row.values(), self.variant, str(self.device))
        self.call, cells = self.world.make_call(self.row, self.variant, self.device)
        self.cells, self.learned = dict(cells), self.call.learned

    def move(self, name: str, change: str, lay_out: Callable[[Tensor], Tensor]) -> bool:
        """Put a tensor's values into another tensor, as a function of dense ones."""
        cell = self.cells.get(name)
        is_stored = name in ("k", "v") and cell is not None and cell.tensor.dtype.itemsize == 1  # numbers of a cache
        if cell is None or is_stored or 0 in cell.tensor.stride():
            return False
        made = self.world.keep(
            (self.key, self.meaning, change), lambda: Cell(name, cell.values, lay_out(cell.values[0].clone()))
        )
        self.cells[name] = made
        return True

    def replace(self, name: str, change: str, make: Callable[[Tensor], Tensor]) -> bool:
        """Give a tensor of other values, as a function of those that it has."""
        cell = self.cells.get(name)
        if cell is None or name in self.call.leaves:
            return False
        made = [make(x) for x in cell.values]
        if torch.equal(made[0], cell.values[0]):
            return False
        first, *_ = made
        tensor = first if 0 in first.stride() else first.clone()
        self.cells[name] = self.world.keep((self.key, self.meaning, change), lambda: Cell(name, made, tensor))
        return True

    def keywords(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Return the keywords of `attention`."""
        made = self.call.keywords(leaves)
        made |= {name: cell.tensor for name, cell in self.cells.items() if name in made and name not in leaves}
        made |= {name: made[of] for name, of in self.same.items()}
        made |= self.numbers
        if "position" in made:
            made["position"] = self.of_position(made["position"])
        return {name: x for name, x in made.items() if x is not None}

    def current(self) -> Call:
        """Return the call of the state's tensors."""
        leaves = {name: self.cells[name].tensor for name in self.call.leaves}
        weights = functools.partial(self.world.weights, self, False)
        of_lse = functools.partial(self.world.weights, self, True)
        return self.call._replace(leaves=leaves, keywords=self.keywords, weights=weights, lse_weights=of_lse)


# === changes ===


SAME, FEW = "the same", "others"  # binaries of a change; or a group, whose changes need the same ones


class Change(NamedTuple):
    """A change of a call. binaries: on a GPU a row has all changes of `SAME` and of groups, and a few of `FEW`."""

    slot: str  # a state has one change of a slot
    apply: Callable[[State], bool | None]  # False: the change says nothing here
    is_of_row: bool = False
    keeps_results: bool = False
    binaries: str = FEW
    place: str = "anywhere"


def _of_rows(*features: str) -> dict[str, Change]:
    """Return the changes to each value of some features."""

    def change(feature: str, value: str) -> Change:
        def apply(state: State) -> bool:
            if state.row[feature] == value:
                return False
            state.row[feature] = value
            return names_a_call(state.row)

        return Change(feature, apply, is_of_row=True)

    return {f"{name}: {value}": change(name, value) for name in features for value in FEATURES[name].values}


def _sizes(variant: int) -> Change:
    def apply(state: State) -> None:
        state.variant = variant

    return Change("lengths", apply, is_of_row=True, binaries=SAME)


def _other_device(state: State) -> None:
    state.device = torch.device("cuda", 1)


def _moved(
    names: Sequence[str], how: str, lay_out: Callable[[Tensor], Tensor], binaries: str = SAME
) -> dict[str, Change]:
    """Return the changes of some tensors' memory."""

    def change(name: str, called: str) -> Change:
        return Change(
            f"memory of {name}",
            lambda state: state.move(name, called, lay_out),
            keeps_results=True,
            binaries=binaries,
        )

    return {called: change(name, called) for name, called in ((name, f"{name}: {how}") for name in names)}


def _replaced(name: str, how: str, make: Callable[[Tensor], Tensor], binaries: str = SAME) -> dict[str, Change]:
    """Return the change to another tensor of other values."""
    change = f"{name}: {how}"
    return {change: Change(name, lambda state: state.replace(name, change, make), binaries=binaries)}


def _number(name: str, value: Callable[[Any], Any]) -> dict[str, Change]:
    """Return the change of a number that the call has."""

    def apply(state: State) -> bool:
        now = state.call.keywords(state.call.leaves).get(name)
        if not now:
            return False
        state.numbers[name] = value(now)
        return True

    return {f"{name}: another": Change(name, apply, binaries=SAME)}


def _as_tensor_of(name: str, of: str, adds: bool = False) -> dict[str, Change]:
    """Return the change by which a keyword's tensor is another keyword's."""

    def apply(state: State) -> bool:
        made = state.call.keywords(state.call.leaves)
        x, y = made.get(name), made.get(of)
        if y is None or x is y or (x is None and not adds) or (x is not None and x.shape != y.shape):
            return False
        state.same[name] = of
        return True

    return {f"{name}: the tensor of {of}": Change(name, apply)}


def _given_as(name: str, other: str) -> dict[str, Change]:
    """Return the change by which a tensor is another argument."""

    def apply(state: State) -> bool:
        made = state.call.keywords(state.call.leaves)
        if name not in made or other in made:
            return False
        state.same[other], state.numbers[name] = name, None
        return True

    return {f"{name}: as {other}": Change(name, apply)}


def _without(*names: str) -> dict[str, Change]:
    """Return the changes by which a call has no such argument."""

    def apply(state: State, name: str) -> bool:
        given = state.call.keywords(state.call.leaves)
        if name not in given or name in state.call.leaves:
            return False
        if name == "cu_seqlens_k" and state.row["bounds"] == "unequal":
            return False  # the queries' bounds would end behind the keys, which no GPU checks
        state.numbers[name] = None
        return True

    return {f"{name}: none": Change(name, functools.partial(apply, name=name)) for name in names}


def _another_number(scheme: Any) -> Any:
    """Return a scheme of other numbers; the scheme itself if it has none."""
    if isinstance(scheme, ReRope | SelfExtend):
        return dataclasses.replace(scheme, window=scheme.window - 3)
    if isinstance(scheme, Rope) and scheme.inv_freq is None:
        return dataclasses.replace(scheme, base=scheme.base / 7)
    if isinstance(scheme, Rope):
        return dataclasses.replace(scheme, attention_factor=0.9)
    if isinstance(scheme, T5Bias):
        return dataclasses.replace(scheme, max_distance=scheme.max_distance + 9)
    if isinstance(scheme, ExpoSB) and scheme.distance_decay:
        return dataclasses.replace(scheme, distance_decay=False)
    return scheme


def _other_scheme(state: State) -> bool:
    scheme = state.call.keywords(state.call.leaves).get("position")
    state.of_position = _another_number
    return scheme is not None and _another_number(scheme) is not scheme


def _gradient(kind: str, *, keeps_results: bool = False, binaries: str = SAME) -> dict[str, Change]:
    def apply(state: State) -> bool:
        state.gradient = kind
        return bool(state.learned)

    return {f"gradient: {kind}": Change("gradient", apply, keeps_results=keeps_results, binaries=binaries)}


def _learns(how: str, pick: Callable[[tuple[str, ...]], tuple[str, ...]], binaries: str = FEW) -> dict[str, Change]:
    def apply(state: State) -> bool:
        before, state.learned = state.learned, pick(state.learned)
        return state.learned != before

    return {f"requires grad: {how}": Change("requires grad", apply, keeps_results=True, binaries=binaries)}


def _under(name: str, *, slot: str | None = None, place: str = "anywhere", binaries: str = SAME) -> dict[str, Change]:
    """Return the change of a call's circumstances: see `_CONTEXTS`."""

    def apply(state: State) -> bool:
        if name == "autocast" and state.row["dtype"] not in ("bfloat16", "float16"):
            return False
        if name == "TF32" and state.row["dtype"] != "float32":
            return False
        if name == "a graph" and (state.row["dropout"] != "none" or "hooks" in state.circumstances):
            return False
        state.circumstances.append(name)
        return True

    keeps_results = name != "TF32"  # whose budget is another one
    return {f"under: {name}": Change(slot or name, apply, False, keeps_results, binaries, place)}


def _off(elements: int) -> Callable[[Tensor], Tensor]:
    """Return a function that puts values some elements behind the beginning of an allocation."""

    def lay_out(x: Tensor) -> Tensor:
        memory = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
        return memory[elements:].view(x.shape).copy_(x)

    return lay_out


def _tokens_behind_heads(x: Tensor) -> Tensor:
    axis = -2 if x.ndim < 4 else 1
    other = 0 if x.ndim < 4 else 2
    return x.transpose(axis, other).contiguous().transpose(axis, other) if x.ndim > 2 else x.clone()


def _spread(x: Tensor) -> Tensor:
    memory = torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device)
    return memory[..., 0].copy_(x)


def _features_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else _spread(x)


def _negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


_NUMBERS = ("key_lengths", "key_starts", "query_starts", "cu_seqlens_q", "cu_seqlens_k", "block_table")
_GIVEN = (*_NUMBERS, "positions_q", "positions_k")
_LEAVES = ("q", "k", "v", "gate", "sinks", "slopes", "table", "bands", "rates", "inv_freq", "norm_q", "norm_k")
CHANGES: dict[str, Change] = {
    # Another row of the table of features.
    **_of_rows("layout", "tokens", "scheme", "positions", "keys_rotated", "causal", "window", "mask", "blocks"),
    **_of_rows("key_lengths", "key_starts", "query_starts", "scale", "softcap", "sinks", "dropout", "norm", "gate"),
    **_of_rows("results", "gradients", "deterministic", "precision", "heads", "bounds"),
    "lengths: others": _sizes(1),
    "lengths: more others": _sizes(2),
    "device: another": Change("device", _other_device, True, binaries=SAME, place="two GPUs"),
    # Which tensors, and where they lie.
    **_moved(
        ("key_lengths", "key_starts", "query_starts", "cu_seqlens_q", "cu_seqlens_k", "mask"), "a copy", Tensor.clone
    ),
    **_moved(("positions_q", "positions_k"), "a copy", Tensor.clone, "two positions"),
    **_moved(_LEAVES, "a copy", Tensor.clone),
    **_moved(("q", "k", "v", "gate"), "tokens behind heads", _tokens_behind_heads),
    **_moved(("q", "k", "v", "gate"), "32 elements on", _off(32)),
    **_moved((*_LEAVES, *_GIVEN), "misaligned", _off(1), FEW),
    **_moved(_LEAVES, "features apart", _features_apart, FEW),
    **_moved(_GIVEN, "spread", _spread, FEW),
    **_moved(_LEAVES, "negated", _negated),
    # Other values in another tensor, and the identity of two.
    **_replaced("positions_q", "others", lambda x: x + 4, "two positions"),
    **_replaced("positions_k", "others", lambda x: x * 3, "two positions"),
    **_replaced("cu_seqlens_q", "others", lambda x: torch.where((x > 0) & (x < x[-1]), x - 1, x)),
    **_replaced("cu_seqlens_k", "others", lambda x: torch.where((x > 0) & (x < x[-1]), x - 2, x), "two bounds"),
    **_replaced("key_lengths", "others", lambda x: x.flip(0)),
    **_replaced("query_starts", "others", lambda x: x + 2),
    **_replaced("mask", "others", lambda x: x.roll(1, -1)),
    **_replaced("mask", "of one row", lambda x: x[..., :1, :], FEW),
    **_replaced("mask", "one row, expanded", lambda x: x[..., :1, :].expand_as(x)),
    **_as_tensor_of("positions_k", "positions_q", adds=True),
    **_as_tensor_of("positions_q", "positions_k", adds=True),
    **_as_tensor_of("cu_seqlens_k", "cu_seqlens_q", adds=True),
    **_as_tensor_of("k", "q"),
    **_as_tensor_of("v", "k"),
    **_without(*_GIVEN, "mask"),
    **_given_as("key_starts", "key_lengths"),
    **_given_as("key_lengths", "key_starts"),
    **_given_as("positions_q", "positions_k"),
    **_given_as("positions_k", "positions_q"),
    # Numbers.
    **_number("scale", lambda x: x * 1.3),
    **_number("softcap", lambda x: x * 0.6),
    **_number("dropout_p", lambda x: 0.45),
    **_number("window", lambda x: x - 4 if isinstance(x, int) else tuple(n - 4 if n > 4 else n for n in x)),
    "position: other numbers": Change("numbers of position", _other_scheme),
    # Gradients.
    **_gradient("expanded"),
    **_gradient("transposed", keeps_results=True),
    **_gradient("negated", keeps_results=True),
    **_gradient("zero"),
    **_gradient("misaligned", keeps_results=True, binaries=FEW),
    **_learns("nothing", lambda names: (), "no gradients"),
    **_learns("q", lambda names: names[:1]),
    **_learns("k and v", lambda names: names[1:3]),
    **_learns("all but q, k and v", lambda names: names[3:]),
    # Circumstances.
    **_under("no_grad", slot="grad mode", binaries="no gradients"),
    **_under("inference_mode", slot="grad mode", binaries="no gradients"),
    **_under("kept objects"),
    **_under("a kept graph"),
    **_under("autocast"),
    **_under("TF32", binaries="TF32", place="GPU"),
    **_under("deterministic algorithms", binaries=FEW),
    **_under("hooks"),
    **_under("a launch hook", place="GPU"),
    **_under("a thread"),
    **_under("a stream", slot="stream", place="GPU"),
    **_under("a slow stream", slot="stream", place="GPU"),
    **_under("another stream", slot="stream", place="GPU"),
    **_under("a graph", place="GPU"),
}
_ORDER = {name: index for index, name in enumerate(CHANGES)}


@contextlib.contextmanager
def _deterministically() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _with_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def _watching_launches() -> Iterator[None]:
    import triton

    before = triton.knobs.runtime.launch_enter_hook

    def note(metadata: Any) -> None:
        pass

    if hasattr(before, "add"):
        before.add(note)
    else:
        triton.knobs.runtime.launch_enter_hook = note
    try:
        yield
    finally:
        if hasattr(before, "remove"):
            before.remove(note)
        else:
            triton.knobs.runtime.launch_enter_hook = before


# Around the forward and the backward of a call.
_CONTEXTS: dict[str, Callable[[State], AbstractContextManager[Any]]] = {
    "no_grad": lambda state: torch.no_grad(),
    "inference_mode": lambda state: torch.inference_mode(),
    "autocast": lambda state: torch.autocast(state.device.type, calls.DTYPES[state.row["dtype"]]),
    "TF32": lambda state: _with_tf32(),
    "deterministic algorithms": lambda state: _deterministically(),
    "hooks": lambda state: torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x),
    "a launch hook": lambda state: _watching_launches(),
}


# === steps ===


class Step(NamedTuple):
    """A state by its changes, and what to do.

    An action is "call", "forward" (whose backward comes later), "backward" of the oldest such one, "write" or "write
    data of" a tensor, "collect garbage", "free" all tensors of other states, "forget" plans, or "keep few" plans.
    """

    changes: tuple[str, ...] = ()
    action: str = "call"


class Failure(NamedTuple):
    """Steps of which the last one fails."""

    row: Row
    impl: str | None
    steps: tuple[Step, ...]
    message: str

    @property
    def text(self) -> str:
        """Return the sequence as lines to run."""
        row = {name: value for name, value in self.row.items() if value != NEUTRAL[name]}
        lines = [f"# {self.message}", "from products.sequences import Step, replay", "print(replay(", f"    {row},"]
        lines += ["    [", *(f"        Step({step.changes!r}, {step.action!r})," for step in self.steps), "    ],"]
        return "\n".join([*lines, f"    impl={self.impl!r},", "))"])


class Report(NamedTuple):
    """What a run of sequences did."""

    calls: int
    sequences: int
    refused: int
    truths: int
    failures: list[Failure]


class RefusedError(Exception):
    """A call that `attention` does not take."""


class _Begun(NamedTuple):
    """A call whose results are there, and whose gradients are not."""

    state: State
    call: Call
    given: dict[str, Tensor]
    keywords: dict[str, Any]
    results: list[Tensor]
    versions: list[tuple[Cell, int]]


# === worlds ===


class World:
    """All that the states of a sequence share: tensors by what made them, streams, graphs, and calls to compare."""

    truths: ClassVar[OrderedDict[Any, Expected]] = OrderedDict()  # of all worlds
    n_truths = 0

    def __init__(self, row: Row, impl: str | None, device: torch.device, sizes: calls.Sizes) -> None:
        self.row, self.impl, self.device, self.sizes = {**NEUTRAL, **row}, impl, device, sizes
        self.states: dict[frozenset[str], State | None] = {}
        self.kept: dict[Any, Any] = {}
        self.begun: list[tuple[_Begun, Expected]] = []
        self.graphs: dict[int, tuple[Any, Results]] = {}
        self.pending: list[tuple[int, Results, Expected]] = []
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self.ready: torch.cuda.Event | None = None  # after which all tensors are as they were written last

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for a key."""
        if key not in self.kept:
            self.kept[key] = make()
            self.ready = None
        return self.kept[key]

    def make_call(self, row: Row, variant: int, device: torch.device) -> tuple[Call, dict[str, Cell]]:
        """Return the call of a row and a cell for each of its tensors."""

        def make() -> tuple[Call, dict[str, Cell]]:
            few = {} if self.sizes is not TINY else {"heads": _FEW_HEADS[row["heads"]]}
            call = calls.build({**row, **few}, SEED, device, self.sizes, variant)
            found: dict[str, Tensor] = dict(call.leaves)
            keywords = call.keywords(call.leaves)
            for name, x in keywords.items():
                if isinstance(x, Tensor) and name not in call.leaves:
                    found[name] = x
            cells: dict[int, Cell] = {}
            for name, x in found.items():
                if id(x) not in cells:
                    other = _other_values(name, x, row)
                    values = [x.clone()] if other is None else [x.clone(), other]
                    cells[id(x)] = Cell(name, values, x)
            return call, {name: cells[id(x)] for name, x in found.items()}

        return self.keep((*row.values(), variant, str(device)), make)  # type: ignore[no-any-return]

    def state(self, changes: Sequence[str]) -> State | None:
        """Return the state of some changes; None if they say nothing together."""
        key = frozenset(changes)
        if key not in self.states:
            self.states[key] = self._make(sorted(changes, key=_ORDER.__getitem__))
        return self.states[key]

    def _make(self, names: list[str]) -> State | None:
        state = State(self, self.row)
        of_row = [name for name in names if CHANGES[name].is_of_row]
        if any(CHANGES[name].apply(state) is False for name in of_row) or not names_a_call(state.row):
            return None
        try:
            state.begin()
        except ValueError:  # `calls.build` knows no such row
            return None
        for name in names:
            change = CHANGES[name]
            if change.is_of_row:
                continue
            if change.apply(state) is False:
                return None
            if not change.keeps_results:
                state.meaning = (*state.meaning, name)
        return state

    def weights(self, state: State, of_lse: bool, like: Tensor) -> Tensor:
        """Return the gradient of an output."""
        kind, of_call = state.gradient, state.call.lse_weights if of_lse else state.call.weights
        shape, device = tuple(like.shape), like.device

        def make() -> Tensor:
            made = of_call(torch.empty_like(like).contiguous()).clone()
            if kind == "expanded":
                return made.flatten()[:1].expand(shape)
            if kind == "transposed" and made.ndim > 1:
                return made.mT.contiguous().mT
            if kind == "negated":
                return _negated(made)
            if kind == "misaligned":
                return _off(1)(made)
            return made

        if kind == "zero":
            wide = like.dtype == torch.float64 and state.row["dtype"] != "float64"
            zero = torch.zeros if wide else torch._efficientzerotensor
            return zero(shape, dtype=like.dtype, device=device)
        return self.keep(("weights", state.key, kind, of_lse, shape, like.dtype), make)  # type: ignore[no-any-return]

    # === truths ===

    def expect(self, state: State) -> Expected:
        """Return the truth of a state's tensors as they are now."""
        bits = tuple((name, cell.bit) for name, cell in sorted(state.cells.items()) if cell.bit)
        key = (state.key, state.meaning, bits)
        found = self.truths.get(key)
        if found is None:
            World.n_truths += 1
            call = state.current()
            if state.call.row["dropout"] != "none" and "dropout_p" in state.numbers:
                call = call._replace(row=state.row)
            try:
                found = compare.expect(call)
            except TypeError as error:  # a user's own map of features: no truth knows it
                raise RefusedError(str(error)) from error
            if "TF32" in state.circumstances:
                halves = {name: x.half() if name in ("q", "k", "v", "gate") else x for name, x in call.leaves.items()}
                found = found._replace(baseline=_as_float32(compare.expect(call._replace(leaves=halves)).baseline))
            self.truths[key] = found
            while len(self.truths) > MOST_TRUTHS:
                self.truths.popitem(last=False)
        else:
            self.truths.move_to_end(key)
        return self._of_wanted(state, found)

    @staticmethod
    def _of_wanted(state: State, expected: Expected) -> Expected:
        """Return the truth of what a call returns and differentiates."""
        differentiates = not {"no_grad", "inference_mode"} & set(state.circumstances)
        grads = {f"grad of {name}" for name in state.learned if differentiates}

        def pick(results: Results) -> Results:
            return {name: x for name, x in results.items() if not name.startswith("grad of ") or name in grads}

        return Expected(pick(expected.exact), pick(expected.baseline))

    # === calls ===

    def begin(self, state: State) -> _Begun:
        """Run a forward."""
        call = state.current()._replace(learned=state.learned)
        versions = [(cell, cell.version) for cell in state.cells.values()]
        given, keywords = self._objects(state, call)
        with self._around(state):
            if call.row["dropout"] != "none":
                torch.manual_seed(call.seed)
            try:
                results = attention(**keywords, impl=self.impl)
            except (ValueError, TypeError, NotImplementedError) as error:
                if _is_refusal(error) and self._is_refused_without_plans(keywords):
                    raise RefusedError(str(error)) from error
                raise
        listed = list(results) if isinstance(results, tuple) else [results]
        return _Begun(state, call, given, keywords, listed, versions)

    def _is_refused_without_plans(self, keywords: dict[str, Any]) -> bool:
        try:
            with without_plans():
                attention(**keywords, impl=self.impl)
        except (ValueError, TypeError, NotImplementedError):
            return True
        return False

    @staticmethod
    def _objects(state: State, call: Call) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if state.kept is not None and "kept objects" in state.circumstances:
            return state.kept
        given = {name: x.detach().requires_grad_(name in call.learned) for name, x in call.leaves.items()}
        state.kept = given, call.keywords(given)
        return state.kept

    def finish(self, begun: _Begun) -> Results:
        """Run the backward, and name all results."""
        state, call = begun.state, begun.call
        with self._around(state):
            if "a kept graph" in state.circumstances and call.learned and begun.results[0].requires_grad:
                out, *_ = begun.results
                leaves = [begun.given[name] for name in call.learned]
                weights = call.weights(out.detach())
                torch.autograd.grad(out, leaves, weights.mT.contiguous().mT, retain_graph=True, allow_unused=True)
            return compare.finish(call, begun.given, begun.keywords, tuple(begun.results))

    @contextlib.contextmanager
    def _around(self, state: State) -> Iterator[None]:
        with ExitStack() as stack:
            if state.device.type == "cuda":
                stack.enter_context(torch.cuda.device(state.device))
            stack.enter_context(torch.set_grad_enabled(bool(state.learned)))
            for name in state.circumstances:
                if name in _CONTEXTS:
                    stack.enter_context(_CONTEXTS[name](state))
            yield

    def run(self, state: State) -> tuple[Results, Expected]:
        """Run a call under a state's circumstances."""

        def work() -> Results:
            return self.finish(self.begin(state))

        circumstances = state.circumstances
        if "a graph" in circumstances:
            found = self._replay_graph(state)
        elif "a thread" in circumstances:
            found = _in_thread(work)
        elif any("stream" in name for name in circumstances) and state.device == self.device:
            found = self._run_on_stream(work, circumstances)
        else:
            found = work()
        return found, self.expect(state)

    def _run_on_stream(self, work: Callable[[], Results], circumstances: Sequence[str]) -> Results:
        """Run a call on a stream that waits for the caller's tensors alone, and not for other calls."""
        stream, main = self.streams["another stream" in circumstances], torch.cuda.current_stream(self.device)
        if self.ready is None:
            self.ready = torch.cuda.Event()
            self.ready.record(main)
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            if "a slow stream" in circumstances:
                torch.cuda._sleep(3_000_000)
            found = work()
        for x in found.values():
            x.record_stream(main)
        if self.ready is None:  # the call's first use made tensors of the sequence here
            self.join()
        return found

    def join(self) -> None:
        """Let the main stream wait for the others."""
        for stream in self.streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def _replay_graph(self, state: State) -> Results:
        """Capture a call at its first time, and replay it for the tensors' values of now."""
        self.join()
        key = id(state)
        if key not in self.graphs:
            torch.cuda.synchronize()
            stream, *_ = self.streams
            with torch.cuda.stream(stream):
                self.finish(self.begin(state))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            gc.collect()
            gc.disable()  # it would free older graphs, which ends a capture
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    found = self.finish(self.begin(state))
            finally:
                gc.enable()
            self.graphs[key] = graph, found
        graph, found = self.graphs[key]
        graph.replay()
        return {name: x.clone() for name, x in found.items()}

    # === steps ===

    def take(self, index: int, step: Step) -> str | None:
        """Take a step, and say what is wrong; comparisons may come later."""
        if step.action in _ACTIONS:
            _ACTIONS[step.action](self)
            return None
        state = self.state(step.changes)
        if state is None:
            return None
        if step.action.startswith("write "):
            return self._write(state, step.action)
        if step.action == "forward":
            if not {"a graph", "a stream", "a slow stream", "another stream"} & set(state.circumstances):
                begun = self.begin(state)
                self.begun.append((begun, self.expect(state)))
            return None
        if step.action == "backward":
            return self._run_backward(index)
        found, expected = self.run(state)
        self.pending.append((index, found, expected))
        return None

    def _write(self, state: State, action: str) -> str | None:
        by_data = action.startswith("write data of ")
        cell = state.cells.get(action.removeprefix("write data of " if by_data else "write "))
        if cell is not None and len(cell.values) > 1:
            self.join()
            self.ready = None
            cell.write(by_data)
        return None

    def _run_backward(self, index: int) -> str | None:
        """Run the oldest backward that waits; not if its tensors were written since, which autograd refuses."""
        if self.begun:
            begun, expected = self.begun.pop(0)
            if all(cell.version == version for cell, version in begun.versions):
                self.pending.append((index, self.finish(begun), expected))
        return None

    def compare(self) -> tuple[int, str] | None:
        """Compare all results that wait, and return the first that is wrong."""
        self.join()
        pending, self.pending = self.pending, []
        for index, found, expected in pending:
            wrong = compare.faults(found, expected)
            if wrong and not _are_roundings(found, expected):
                return index, "; ".join(wrong)
        return None


def _are_roundings(found: Results, expected: Expected) -> bool:
    """Say whether errors over their budgets are still of rounding: a stale plan's are as large as the results.

    A sum of few terms may have a baseline that happens to be exact, or be zero.
    """
    if any(name not in found or found[name].shape != x.shape for name, x in expected.exact.items()):
        return False
    if any(found[name].dtype != x.dtype for name, x in expected.baseline.items() if name != "max_logits"):
        return False
    sizes, errors = [], []
    for name, exact in expected.exact.items():
        mine, baseline = found[name].double(), expected.baseline[name].double()
        if exact.numel() == 0:
            continue
        finite = exact.isfinite()
        if not torch.equal(torch.where(finite, 0, exact), torch.where(finite, 0, mine)):
            return False
        size, error, allowed = (
            torch.where(finite, x, 0).abs().max().item() for x in (exact, mine - exact, baseline - exact)
        )
        sizes.append(size)
        errors.append((error, allowed, torch.finfo(found[name].dtype).eps))
    return all(error <= compare.CLEAR * (2 * allowed + eps * max(sizes)) for error, allowed, eps in errors)


def _is_refusal(error: BaseException) -> bool:
    """Say whether the library raised an error by a statement of its own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    path = trace.tb_frame.f_code.co_filename
    return "ropewalk" in path and linecache.getline(path, trace.tb_lineno).strip().startswith("raise ")


def _as_float32(results: Results) -> Results:
    return {name: x.float() for name, x in results.items()}


def _in_thread(work: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, BaseException):
        raise result
    return result


def _free(world: World) -> None:
    """Let all tensors go, so that later ones have their addresses."""
    world.join()
    world.states.clear()
    world.begun.clear()
    world.kept.clear()
    world.graphs.clear()
    gc.collect()


def _keep_few(world: World) -> None:
    kinds.MAX_PLANS, kinds.MAX_BACKWARDS = 3, 1


_ACTIONS: dict[str, Callable[[World], Any]] = {
    "collect garbage": lambda world: gc.collect(),
    "free": _free,
    "forget": lambda world: forget(),
    "keep few": _keep_few,
}


def forget() -> None:
    """Drop all that calls of the library left behind: plans, tables and what was read of schemes."""
    KINDS.clear()
    remembered._remembered.clear()
    tables._fixed.clear()


@contextlib.contextmanager
def _planning(device: torch.device) -> Iterator[None]:
    """Plan calls on a device, and leave nothing behind."""
    before = kinds.on_cpu, kinds.MAX_PLANS, kinds.MAX_BACKWARDS
    kinds.on_cpu = device.type == "cpu"
    forget()
    try:
        yield
    finally:
        kinds.on_cpu, kinds.MAX_PLANS, kinds.MAX_BACKWARDS = before
        forget()


def device_here() -> torch.device:
    """Return the device of this run, as tests have it."""
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def _sizes_on(device: torch.device) -> calls.Sizes:
    return calls.GPU if device.type == "cuda" else TINY


class _Play:
    """A sequence that is being played."""

    def __init__(self, row: Row, impl: str | None, device: torch.device) -> None:
        self.world = World(row, impl, device, _sizes_on(device))
        self.row, self.impl = row, impl
        self.steps: list[Step] = []
        self.calls = self.refused = 0

    def take(self, step: Step) -> Failure | None:
        """Take a step, and return what is found to be wrong."""
        self.steps.append(step)
        index, world = len(self.steps) - 1, self.world
        try:
            world.take(index, step)
            self.calls += step.action in ("call", "backward")
            if len(world.pending) < MOST_PENDING:
                return None
            return self.compare()
        except RefusedError:
            self.refused += 1
            raise
        except Exception as error:
            return self.fail(index, f"{type(error).__name__}: {error}")

    def compare(self) -> Failure | None:
        """Compare the results that wait."""
        wrong = self.world.compare()
        return None if wrong is None else self.fail(*wrong)

    def fail(self, index: int, message: str) -> Failure:
        """Return a failure of the steps up to one."""
        return Failure(self.world.row, self.impl, tuple(self.steps[: index + 1]), message.splitlines()[0])


def replay(
    row: Row, steps: Sequence[Step], impl: str | None = "triton", device: torch.device | None = None
) -> Failure | None:
    """Take the steps of a sequence as in a new process, and return the first failure."""
    device = device_here() if device is None else device
    with _planning(device):
        play = _Play({**NEUTRAL, **row}, impl, device)
        for step in steps:
            try:
                failure = play.take(step)
            except RefusedError:
                continue
            if failure is not None:
                return failure
        return play.compare()


# === random sequences ===


def allowed_changes(row: Row, device: torch.device) -> list[str]:
    """Return the changes that sequences of a row may make; on a GPU few of those that need other kernels."""
    n_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    places = {"anywhere": True, "GPU": n_gpus > 0, "two GPUs": n_gpus > 1}
    names = [name for name, change in CHANGES.items() if places[change.place]]
    if n_gpus == 0:
        return names
    extra = set(extra_changes(row))
    return [name for name in names if CHANGES[name].binaries != FEW or name in extra]


def extra_changes(row: Row) -> list[str]:
    """Return the few changes of a row that need other kernels: the same for a row in every process."""
    return list(_extra_changes(tuple(sorted(row.items()))))


@functools.cache
def _extra_changes(of_row: tuple[tuple[str, str], ...]) -> list[str]:
    row, made = dict(of_row), random.Random(zlib.crc32(repr(of_row).encode()))
    names = [name for name, change in CHANGES.items() if change.binaries == FEW]
    made.shuffle(names)
    world = World(row, None, torch.device("cpu"), TINY)
    found: list[str] = []
    for name in names:
        if len(found) < EXTRA_BINARIES and world.state((name,)) is not None:
            found.append(name)
    return found


_OF_ROWS = 0.25  # of changes: they change the key most, and keep least of it
_RARE = {"collect garbage": 0.03, "free": 0.02, "forget": 0.005, "forward": 0.05, "backward": 0.07}
_SPOKES = 24  # changes of one state before another state is changed


class _Walk:
    """Draws the steps of a sequence: around a state that is planned, changes of one thing each; then around another."""

    def __init__(self, seed: int, row: Row, device: torch.device) -> None:
        self.random = random.Random(seed)
        self.names = allowed_changes(row, device)
        self.few_binaries = device.type == "cuda"
        self.hub: tuple[str, ...] = ()
        self.now: tuple[str, ...] = ()
        self.seen: list[tuple[str, ...]] = []
        self.waiting: dict[bool, list[str]] = {}  # changes of the hub that are not made yet: of its row, and others
        self.refused: set[tuple[str, ...]] = set()

    def steps(self, world: World) -> Iterator[Step]:
        """Go through steps without an end."""
        made = self.random
        if made.random() < 0.15:
            yield Step((), "keep few")
        while True:
            yield from self._move_hub(world)
            for _ in range(_SPOKES):
                if self.hub in self.refused:
                    break
                yield from self._act(world)
                self.now = self._draw(world)
                for _ in range(made.choice((1, 1, 1, 1, 2, 3))):
                    yield Step(self.now)
                    if self.now in self.refused:
                        self.now = self.hub
                        break
                else:
                    self.seen.append(self.now)
                if made.random() < 0.3:
                    self.now = self.hub
                    yield Step(self.now)

    def _move_hub(self, world: World) -> Iterator[Step]:
        """Go to a state that was called before, and call it until it is planned."""
        made = self.random
        self.hub = self.now = made.choice(self.seen) if self.seen else ()
        self.waiting = {kind: [x for x in self.names if CHANGES[x].is_of_row is kind] for kind in (True, False)}
        for names in self.waiting.values():
            made.shuffle(names)
        for _ in range(3):
            yield Step(self.hub)
            if self.hub in self.refused:
                return

    def _act(self, world: World) -> Iterator[Step]:
        """Do something else than to call, at times."""
        draw = self.random.random()
        for action, share in _RARE.items():
            draw -= share
            if draw < 0:
                yield Step(self.now, action)
                return
        state = world.state(self.now)
        if draw > 0.15 or state is None:
            return
        names = [name for name, cell in state.cells.items() if len(cell.values) > 1]
        yield Step(self.now, f"{self.random.choice(('write', 'write', 'write data of'))} {self.random.choice(names)}")
        yield Step(self.now)

    def _draw(self, world: World) -> tuple[str, ...]:
        """Return the hub with one change, or a state that was called before."""
        if self.seen and self.random.random() < 0.15:
            return self.random.choice(self.seen)
        waiting = self.waiting[self.random.random() < _OF_ROWS]
        while waiting:
            name = waiting.pop()
            change = CHANGES[name]
            kept = [x for x in self.hub if CHANGES[x].slot != change.slot]
            if self.few_binaries and change.binaries != SAME:
                kept = [x for x in kept if CHANGES[x].binaries == SAME]
            changes = tuple(sorted((*kept[-4:], name), key=_ORDER.__getitem__))
            if changes not in self.refused and world.state(changes) is not None:
                return changes
        return self.hub


def run_sequences(
    seed: int,
    seconds: float,
    impl: str | None = "triton",
    *,
    rows: Sequence[Row] | None = None,
    device: torch.device | None = None,
    length: int = 60,
    most_failures: int = 3,
    most_calls: float = float("inf"),
    shrinks: bool = True,
) -> Report:
    """Play random sequences for some seconds, and cut failures down.

    seed: of the sequences; their tensors are the same for all. length: the steps of one.
    """
    device = device_here() if device is None else device
    rows = list(ROWS if rows is None else rows)
    start, n_calls, n_sequences, n_refused, truths = time.monotonic(), 0, 0, 0, World.n_truths
    failures: list[Failure] = []
    order = random.Random(seed)
    while time.monotonic() - start < seconds and len(failures) < most_failures and n_calls < most_calls:
        row = on_device({**NEUTRAL, **order.choice(rows)}, device)
        walk = _Walk(order.randrange(2**31), row, device)
        failure = None
        with _planning(device):
            play = _Play(row, impl, device)
            for step in walk.steps(play.world):
                try:
                    failure = play.take(step)
                except RefusedError:
                    walk.refused.add(step.changes)
                is_over = len(play.steps) >= length or n_calls + play.calls >= most_calls
                if failure is not None or is_over or time.monotonic() - start >= seconds:
                    break
            failure = failure or play.compare()
        n_calls, n_sequences, n_refused = n_calls + play.calls, n_sequences + 1, n_refused + play.refused
        del play
        if failure is not None:
            is_lost = "CUDA error" in failure.message  # the process's context
            failures.append(failure if is_lost or not shrinks else shrink(failure, device))
            if is_lost:
                break
    return Report(n_calls, n_sequences, n_refused, World.n_truths - truths, failures)


def on_device(row: Row, device: torch.device) -> Row:
    """Return a row as a device runs it: the interpreter cuts to bfloat16 and does not round."""
    if device.type == "cuda":
        return row
    needs_rows = row["layout"] == "thd" or row["pages"] != "none" or row["key_lengths"] != "none"
    return {**row, "dtype": "float32", "batch": row["batch"] if needs_rows else "1"}


# === failures ===


def shrink(failure: Failure, device: torch.device | None = None, seconds: float = 60) -> Failure:
    """Leave out steps and changes, and on a CPU features of the row, while a sequence fails."""
    device = device_here() if device is None else device
    stop = time.monotonic() + seconds

    def fails(row: Row, steps: Sequence[Step]) -> Failure | None:
        return replay(row, steps, failure.impl, device) if time.monotonic() < stop else None

    best = fails(failure.row, failure.steps)
    if best is None:
        return failure._replace(message=f"{failure.message} (not when it is replayed)")
    is_smaller = True
    while is_smaller:
        before = best
        best = _drop_steps(best, fails)
        for name in {name: None for step in best.steps for name in step.changes}:
            steps = [step._replace(changes=tuple(x for x in step.changes if x != name)) for step in best.steps]
            best = fails(best.row, steps) or best
        for index, step in enumerate(best.steps):
            for name in step.changes:
                steps = list(best.steps)
                if index < len(steps):
                    steps[index] = step._replace(changes=tuple(x for x in steps[index].changes if x != name))
                    best = fails(best.row, steps) or best
        for name, value in best.row.items() if device.type == "cpu" else ():
            row = {**best.row, name: NEUTRAL[name]}
            if value != NEUTRAL[name] and name != "dtype" and names_a_call(row):
                best = fails(row, best.steps) or best
        is_smaller = _size(best) < _size(before)
    return best


def _size(failure: Failure) -> int:
    plain = sum(value == NEUTRAL[name] for name, value in failure.row.items())
    return sum(1 + len(step.changes) for step in failure.steps) - plain


def _drop_steps(failure: Failure, fails: Callable[[Row, Sequence[Step]], Failure | None]) -> Failure:
    """Leave out halves, quarters and single steps."""
    best, size = failure, max(len(failure.steps) // 2, 1)
    while True:
        index = 0
        while index < len(best.steps) and len(best.steps) > 1:
            found = fails(best.row, best.steps[:index] + best.steps[index + size :])
            if found is None:
                index += size
            else:
                best = found
        if size == 1:
            return best
        size = max(size // 2, 1)


# === rows, and what a run of them needs ===


def _row(**features: str) -> Row:
    return {"gradients": "all", **{name.replace("_of", ""): value for name, value in features.items()}}


_DECODE = {"gradients": "none", "key_lengths": "given", "keys_rotated": "yes"}
ROWS: tuple[Row, ...] = (
    # Dense.
    _row(),
    _row(scheme="rope", causal="yes"),
    _row(scheme="rope", positions="one tensor"),
    _row(scheme="rope", positions="two tensors", head_dim="128"),
    _row(scheme="rope", norm="before", positions="one tensor"),
    _row(scheme="rope interleaved", gate="feature", causal="yes", layout="bhtd"),
    _row(scheme="alibi", causal="yes", mask="keys"),
    _row(scheme="alibi learned", positions="two tensors"),
    _row(scheme="t5 learned", results="lse and its gradient"),
    _row(scheme="exposb bands decay", causal="yes"),
    _row(scheme="rerope", positions="queries", causal="yes"),
    _row(scheme="self-extend", window="int"),
    _row(scheme="rope frequencies", softcap="given", sinks="learned", scale="given"),
    _row(sinks="fixed", gate="head", results="all", causal="yes"),
    _row(scheme="rope", dropout="given", causal="yes"),
    _row(scheme="rope", blocks="sliding"),
    _row(scheme="alibi", blocks="own 128"),
    _row(mask="heads", heads="4/4"),
    _row(scheme="rope", key_lengths="given", key_starts="given", causal="yes"),
    _row(scheme="own kernel learned", tokens="odd"),
    _row(scheme="rope", deterministic="yes", causal="yes", heads="6/1"),
    _row(scheme="rope", dtype="float32", causal="yes"),
    _row(scheme="rope", dtype="float16", memory="sliced heads", tokens="fewer queries", norm="after"),
    # Packed.
    _row(scheme="rope", layout="thd", causal="yes"),
    _row(scheme="rope", layout="thd", bounds="equal", positions="one tensor"),
    _row(scheme="rope", layout="thd", bounds="unequal", tokens="more queries", causal="yes"),
    _row(scheme="alibi learned", layout="thd", bounds="unequal", positions="two tensors"),
    _row(scheme="rope", layout="thd", norm="per head", gate="head"),
    _row(scheme="self-extend", layout="thd", bounds="with a tail"),
    _row(scheme="t5", layout="thd", bounds="with empty", dropout="given"),
    # Few queries over a cache, and over its pages.
    {"scheme": "rope", "tokens": "one query", **_DECODE},
    {"scheme": "alibi", "tokens": "few queries", "gradients": "none", "softcap": "given"},
    {"tokens": "one query", "gradients": "none", "results": "lse"},
    {"scheme": "rope", "tokens": "one query", "pages": "own 16", **_DECODE},
    {"scheme": "rope", "tokens": "few queries", "pages": "int8 16", "causal": "yes", **_DECODE},
    {"tokens": "one query", "pages": "fp8 16", "gradients": "none", "key_lengths": "given", "sinks": "fixed"},
    {"scheme": "rope", "tokens": "few queries", "pages": "own 64", "layout": "thd", "causal": "yes", **_DECODE},
)


IMPLS = ("triton", "gluon", None)


def jobs(rows: Sequence[Row] = ROWS) -> list[pack.Job]:
    """Return what compiles all kernels that sequences of rows need on a GPU."""
    groups = {change.binaries: name for name, change in reversed(CHANGES.items()) if change.binaries not in (SAME, FEW)}
    found: list[pack.Job] = []
    for row in rows:
        full = {**NEUTRAL, **row}
        world = World(full, None, torch.device("cpu"), TINY)
        names = [name for name in groups.values() if world.state((name,)) is not None]
        for changes in ([], *([name] for name in (*names, *extra_changes(full)))):
            found.append(pack.Job("products.sequences:run_job", [row, changes, list(IMPLS)]))
    return found


def run_job(row: Row, names: Sequence[str], impls: Sequence[str | None]) -> None:
    """Run a call by each backend that takes it, forward and backward, without a comparison."""
    for impl in impls:
        world = World(row, impl, device_here(), calls.GPU)
        state = world.state(names)
        if state is not None:
            with contextlib.suppress(RefusedError):
                world.finish(world.begin(state))


# === many processes on one GPU ===


class Work(NamedTuple):
    """What one process does."""

    rank: int
    seconds: float
    folder: str


def run_part(work: Work) -> None:
    """Run sequences by one of the backends, and write what they did as JSON."""
    watched, start = begin(), time.monotonic()
    impl = IMPLS[work.rank % len(IMPLS)]
    report = run_sequences(work.rank, work.seconds, impl, device=torch.device("cuda", 0))
    found = report._asdict()
    found["failures"] = [failure.text for failure in report.failures]
    found |= {"seconds": time.monotonic() - start, "compiled": len(watched.kernels), "impl": impl}
    Path(work.folder, f"part{work.rank}.json").write_text(json.dumps(found))


def run_all(workers: int, seconds: float, folder: str) -> dict[str, Any]:
    """Run sequences on a GPU by many processes."""
    os.makedirs(folder, exist_ok=True)
    start = time.monotonic()
    codes = spread(run_part, [Work(rank, seconds, folder) for rank in range(workers)], seconds + 240)
    parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("part*.json"))]
    return {
        **{name: sum(part[name] for part in parts) for name in ("calls", "sequences", "refused", "truths", "compiled")},
        "seconds": max((part["seconds"] for part in parts), default=0.0),
        "with_starts": time.monotonic() - start,
        "exit_codes": codes,
        "faults": [text for part in parts for text in part["failures"]],
    }
