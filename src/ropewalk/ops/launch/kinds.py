"""Kinds of calls, and their plans: known by the last calls, or by a key; bounded in number and in bytes that they read.

A plan depends neither on values on a device nor on a tensor's version: whatever derives from tensors is an input of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Generic

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk import device as gpu
from ropewalk.ops.launch.record import AnyRecord, Record, pick_at, switches
from ropewalk.ops.launch.remembered import are_remembered
from ropewalk.ops.launch.steps import ALIGNED, AT_ONCE, UnplannableError
from ropewalk.ops.tracing import has_guards

MAX_PLANS = 1024
MAX_TABLE_BYTES = 1 << 30  # of the schemes' tables that plans read, and so keep alive
MAX_PLAIN = 64  # causalities and scales of models' layers
MAX_BACKWARDS = 32  # of one forward: gradients that are slices of ever-new lengths have ever-new strides
on_gpu = True
on_cpu = False  # in Triton's interpreter, for tests
MAX_RECENT = 4  # kinds of layers that take turns
UNKNOWN = object()  # no plan was looked for


class Cache:
    """Plans by key, built at a key's second call: a length that never comes again is not worth one."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.seen: set[int] = set()
        self.plain: dict[Any, Any] = {}  # the last one for a causality and a scale: `repeat_plain`
        self.tables: dict[int, int] = {}  # bytes that plans keep alive, by the storages' addresses
        self.lock = threading.Lock()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the plan of a key; None where there is none yet, or none is possible, as for a key without a hash.

        A plan's `constants` are all tensors that it keeps.
        """
        try:
            plan = self.found.get(key, UNKNOWN)
        except TypeError:  # a flag that is not hashable
            return None
        if plan is not UNKNOWN:
            return plan
        digest = hash(key)
        with self.lock:
            if digest not in self.seen:
                if len(self.seen) >= 8 * MAX_PLANS:
                    self.seen.clear()
                self.seen.add(digest)
                return None
        plan = make()
        constants = getattr(plan, "constants", ())
        if not are_remembered(constants):
            for device in {x.device for x in constants if x.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # the next reader may be on another stream
        tables = {x.data_ptr(): x.nbytes() for x in (y.untyped_storage() for y in constants)}
        with self.lock:
            if len(self.found) >= MAX_PLANS or sum((self.tables | tables).values()) > MAX_TABLE_BYTES:
                self._forget()
            self.found[key] = plan
            self.tables |= tables
        return plan

    def clear(self) -> None:
        """Drop all plans."""
        with self.lock:
            self._forget()
            self.seen.clear()

    def _forget(self) -> None:
        self.found.clear()
        self.plain.clear()
        self.tables.clear()
        for operation in _OPERATIONS:
            operation.forget()


def addresses_of(inputs: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of tensors; None where one is no multiple of 16 bytes, which kernels are compiled for.

    None, too, where a tensor has no memory: it is empty, or PyTorch knows its values without, as those of zeros.
    """
    addresses: list[int] = []
    union = 0
    try:
        for x in inputs:  # one loop: a map, a reduction and a search take the host longer
            address = x.data_ptr()
            if not address:
                return None
            addresses.append(address)
            union |= address
    except RuntimeError:  # a tensor that outlived its transform of torch.func: autograd unwraps it, a plan does not
        return None
    return None if union & 15 else addresses


def plan_or_none(kind: Callable[..., Any], *arguments: Any) -> Any:
    """Make a plan; None where a launcher takes a step that no plan can repeat."""
    try:
        return kind(*arguments)
    except UnplannableError:
        return None


def existing(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def may_plan(x: Tensor) -> bool:
    """Say whether a call may run by a plan now: nothing captures or watches launches."""
    if not x.is_cuda:
        return on_cpu and x.is_cpu
    return on_gpu and not torch._C._cuda_isCurrentStreamCapturing() and not gpu.is_launch_watched()


Launcher = Callable[..., Sequence["Tensor | None"]]  # of a record and `Steps`


def plain(launcher: Launcher) -> Launcher:
    """Mark a launcher that computes by PyTorch: it gets no plan."""
    launcher.is_plain = True  # type: ignore[attr-defined]
    return launcher


def run_at_once(launcher: Launcher, record: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Run a launcher's steps at once, on the device of the tensors."""
    if not (tensors and tensors[0].is_cuda) or tensors[0].get_device() == torch.cuda.current_device():
        return launcher(record, AT_ONCE)
    with torch.cuda.device(tensors[0].device):
        return launcher(record, AT_ONCE)


def key_or_none(record: Record[AnyRecord], values: AnyRecord) -> Any:
    """Return the key of a record; None where it has none, as with a wrong argument, which a check is to name.

    Only this is tried: an error of a plan's making is a fault of ours.
    """
    try:
        return record.key(values)
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or sparse ones
        return None


class Kind(Generic[AnyRecord]):
    """A kind of calls: the launcher of their records, which were checked by one of them, and its plans."""

    constants = ()

    def __init__(self, record: Record[AnyRecord], example: AnyRecord, launcher: Launcher) -> None:
        self.record, self.launcher = record, launcher
        tensors = record.tensors_of(example)
        self.is_plain = getattr(launcher, "is_plain", False) or not existing(tensors)
        self.before = getattr(launcher, "before", None)  # checks of values and addresses, in each call
        self.inputs_of = record.write_reader(
            [name for name, x in zip(record.tensors, tensors, strict=True) if x is not None]
        )
        self.is_cuda = any(x is not None and x.is_cuda for x in tensors)
        self.matches: Callable[[AnyRecord], bool] = matches_nothing
        self.switches: tuple[bool, ...] = ()
        self.plans: dict[Any, Any] = {}  # by alignments of addresses: a plan, and what picks the launcher's results
        self.aligned: Sequence[Sequence[int]] = [range(len(existing(tensors)))]  # as a plan has it
        self.repeat: Callable[[AnyRecord], Any] = repeats_nothing  # `run` of a record that matches, by a plan

    def run(self, record: AnyRecord) -> Sequence[Tensor | None]:
        """Return the results of a record of this kind."""
        if self.is_plain and self.before is None:
            return self.launcher(record, AT_ONCE)
        inputs = self.inputs_of(record)
        addresses = list(map(Tensor.data_ptr, inputs))
        if self.before is not None:
            self.before(record, addresses)
        return self._run(record, inputs, addresses)

    def _run(self, record: AnyRecord, inputs: Any, addresses: list[int]) -> Sequence[Tensor | None]:
        # Without an address are tensors without elements, and those that PyTorch knows as zero.
        has_zeros = 0 in addresses and any(x.numel() and not x.data_ptr() for x in inputs)
        if self.is_plain or has_zeros or not may_plan(inputs[0]):
            return run_at_once(self.launcher, record, inputs)
        plan, pick_results = self.plans.get(self._alignments(addresses)) or self._make_plan(record, addresses)
        if plan is None:
            return run_at_once(self.launcher, record, inputs)
        if self.record.varying:
            numbers = self.record.varying_of(record)
            inputs, addresses = (*inputs, *numbers), [*addresses, *numbers]
        results: Sequence[Tensor | None] = plan.run(inputs, addresses, plan.results)
        return pick_results(results) if pick_results else results

    def _alignments(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return the largest powers of two, up to 16, that divide the addresses of each launch that asks."""
        found = []
        for indices in self.aligned:
            union = ALIGNED
            for index in indices:
                union |= addresses[index]
            found.append(union & -union)
        return tuple(found)

    def _make_plan(self, record: AnyRecord, addresses: Sequence[int]) -> tuple[Any, Any]:
        """Make the plan for addresses of some alignments, and what picks the launcher's results among its memory."""
        plan, indices = plan_or_none(make_plan, self.record, record, self.launcher, addresses) or (None, ())
        if plan is not None:
            self.aligned = plan.aligned
        has_more = plan is None or plan.per_stream or plan.workspace or None in indices
        found = self.plans[self._alignments(addresses)] = plan, pick_at(indices) if has_more else None
        return found

    def learn(self, record: AnyRecord) -> None:
        """Write `repeat`, if there is a plan: one function does what ten do, each of which takes the host 60 ns."""
        plan: Any = next((plan for plan, _ in self.plans.values() if plan is not None), None)
        if plan is None:
            return
        results = {f"_like{index}": x for index, x in enumerate(plan.results)}
        is_launch = len(plan.launches) == 1 and not plan.workspace and not plan.per_stream

        def write_body(tensors: list[str], varying: list[str]) -> str:
            unions = [" | ".join([str(ALIGNED), *(f"_addresses[{x}]" for x in indices)]) for indices in self.aligned]
            alignments = "".join(f"_union{index} & -_union{index}, " for index in range(len(unions)))
            may_launch = "_kinds.on_cpu"
            if self.is_cuda:
                may_launch = "(_kinds.on_gpu and _device() == _index and not _capturing() and not _watched())"
            every = "".join(f"{x}, " for x in (*tensors, *varying))
            memory = [f"_result{index}" for index in range(len(results))]
            lines = [
                f"if _forward_ad._current_level >= 0{' or _switches() != _known' if self.switches else ''}:",
                "    return None",
                f"_addresses = [{', '.join(f'{x}.data_ptr()' for x in tensors)}]",
                "_before(r, _addresses)" if self.before else "",
                *(f"_union{index} = {union}" for index, union in enumerate(unions)),
                f"_plan, _pick = _plans.get(({alignments}), _NOTHING)",
                f"if _plan is None or 0 in _addresses or not {may_launch}:",
                f"    return _run(r, ({', '.join(tensors)},), _addresses)",
                f"_addresses += ({', '.join(varying)},)" if varying else "",
            ]
            if is_launch:  # what the plan's `run` does
                lines += [f"{x} = _empty_like({like})" for x, like in zip(memory, results, strict=True)]
                lines += [f"_addresses.append({x}.data_ptr())" for x in memory]
                lines += ["_plan.launches[0](_addresses, _stream(_index))"]
                lines += [f"_memory = ({''.join(f'{x}, ' for x in memory)})"]
            else:
                lines += [f"_memory = _plan.run(({every}), _addresses, _plan.results)"]
            return "\n".join([*lines, "return _pick(_memory) if _pick else _memory"])

        scope = {
            "_forward_ad": forward_ad,
            "_switches": switches,
            "_known": self.switches,
            "_NOTHING": (None, None),
            "_kinds": sys.modules[__name__],
            "_device": getattr(torch._C, "_cuda_getDevice", None),
            "_capturing": getattr(torch._C, "_cuda_isCurrentStreamCapturing", None),
            "_watched": gpu.is_launch_watched,
            "_before": self.before,
            "_run": self._run,
            "_plans": self.plans,
            "_empty_like": torch.empty_like,
            "_stream": plan.current_stream,
        }
        self.repeat = self.record.make_match(record, write_body, _index=plan.index, **scope, **results)


def make_plan(
    record: Record[AnyRecord], example: AnyRecord, launcher: Launcher, addresses: Sequence[int] = ()
) -> tuple[Any, list[int | None]]:
    """Return the plan of a launcher's results, and the index of each result among those that are not None.

    The plan's inputs are the record's tensors, and the numbers that vary. addresses: of the tensors.
    """
    from ropewalk.ops.launch.plan import Builder

    tensors = record.tensors_of(example)
    inputs = existing(tensors)
    builder = Builder(inputs[0].device, addresses=addresses)
    meta_tensors: dict[int, Tensor | None] = {id(None): None}
    for x in inputs:
        if id(x) in meta_tensors:  # one that comes twice is one tensor to the launcher, too
            builder.skip()
        else:
            meta_tensors[id(x)] = builder.input(x)
    numbers = [builder.number(number) for number in record.varying_of(example)]
    results = builder.follow(launcher, record.with_others(example, [meta_tensors[id(x)] for x in tensors], numbers))
    plan = builder.finish(existing(results))
    indices = iter(range(len(results)))
    return plan, [None if x is None else next(indices) for x in results]


def matches_nothing(*records: Any) -> bool:
    """Match nothing: a kind has no matcher yet."""
    return False


def repeats_nothing(*records: Any) -> None:
    """Run nothing: a kind has no plan yet."""


class _NoKind:
    matches, switches = staticmethod(matches_nothing), None


_NO_KIND = _NoKind()
_OPERATIONS: list[Any] = []  # all of them


class Operation(Generic[AnyRecord]):
    """The calls of one operation.

    choose: checks a record by metadata and flags, and returns its launcher, or one that is `plain`. A launcher's
    `before(record, addresses)` runs before each launch of a record, whose tensors have these addresses.
    """

    reads_switches = False  # whether launches depend on PyTorch's switches

    def __init__(self, record: type[AnyRecord] | Record[AnyRecord], choose: Callable[[AnyRecord], Launcher]) -> None:
        self.record: Record[AnyRecord] = record if isinstance(record, Record) else Record(record)
        self.choose = choose
        self.forget()
        _OPERATIONS.append(self)

    def forget(self) -> None:
        """Forget the last kinds."""
        self.recent: tuple[Any, ...] = ()
        self.last: Any = _NO_KIND

    def repeat(self, record: AnyRecord) -> Any:
        """Return the kind of a record, if it is one of the last calls'. Dynamo must not trace it.

        The check finds out, too, that nothing intercepts the call.
        """
        last, wanted = self.last, switches() if self.reads_switches else ()
        if not (last.switches == wanted and last.matches(record)):
            last = None
            for kind in self.recent:
                if kind.switches == wanted and kind.matches(record):
                    self.last = last = kind
                    break
        return None if forward_ad._current_level >= 0 else last

    def find(self, record: AnyRecord) -> Any:
        """Return the kind of a plain eager call; None for the first one of a kind, and for one that has no key."""
        try:
            kind = self.repeat(record)
        except (
            AttributeError,
            RuntimeError,
            TypeError,
        ):  # as `key_or_none`: a wrong argument, which a check is to name
            return None
        return self.look_up(record) if kind is None else kind

    def look_up(self, record: AnyRecord) -> Any:
        """Return the kind of a record that is none of the last calls', as `find` does."""
        found = switches() if self.reads_switches else ()
        identity = key_or_none(self.record, record)
        if identity is None:
            return None
        key = (self, identity, found)
        kind = KINDS.find(key, lambda: self.make(record))
        if kind is not None and has_guards():
            if not kind.matches(record):  # matchers know more than keys, such as inference mode
                kind = copy(kind)  # the calls of the other matcher find theirs, too
                kind.matches, kind.switches = self.record.make_match(record), found
                kind.repeat = repeats_nothing
                KINDS.found[key] = kind
            self.recent = (kind, *[x for x in self.recent if x is not kind])[:MAX_RECENT]
            self.last = kind
        return kind

    def make(self, record: AnyRecord) -> Any:
        """Return the kind of a call, at the second one of its key. Raise for a wrong call."""
        return Kind(self.record, record, self.choose(record))

    def run(self, record: AnyRecord) -> Sequence[Tensor | None]:
        """Return the results of a plain eager call."""
        results: Sequence[Tensor | None] | None = self.rerun(record)
        if results is not None:
            return results
        kind: Kind[AnyRecord] | None = self.find(record)
        if kind is None:
            launcher, tensors = self.choose(record), existing(self.record.tensors_of(record))
            if (before := getattr(launcher, "before", None)) is not None:
                before(record, list(map(Tensor.data_ptr, tensors)))
            return run_at_once(launcher, record, tensors)
        results = kind.run(record)
        if kind.repeat is repeats_nothing and has_guards():
            kind.learn(record)
        return results

    def rerun(self, record: AnyRecord) -> Any:
        """Return the results of a record of the kind of one of the last calls, run by its plan; None for any other.

        As `repeat` does, the check finds out that nothing intercepts the call.
        """
        for kind in self.recent:
            results = kind.repeat(record)
            if results is not None:
                return results
        return None


KINDS = Cache()
