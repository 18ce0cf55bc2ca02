"""Sequences of calls agree with the truth, and planted faults of plans are found and cut down."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

pytest.importorskip("triton")
from helpers.modes import ON_GPU, needs_kernels

from products import sequences
from products.sequences import SEED, replay, run_sequences
from ropewalk.ops.attention.plans.inputs import UNCHECKED, Inputs
from ropewalk.ops.attention.plans.norms import NORMS
from ropewalk.ops.launch import kinds, record
from ropewalk.ops.launch.record import Record
from ropewalk.ops.tracing import make_matcher
from ropewalk.schemes import PositionScheme

pytestmark = needs_kernels


def assert_right(report: sequences.Report, least: int) -> None:
    assert not report.failures, "\n\n".join(failure.text for failure in report.failures)
    assert report.calls >= least
    assert report.refused < report.calls / 10


# Whose calls take the interpreter tens of milliseconds.
QUICK = [
    {"scheme": "rope", "positions": "one tensor"},
    {"scheme": "alibi", "causal": "yes", "positions": "two tensors", "mask": "keys"},
    {"scheme": "rope", "norm": "before", "sinks": "fixed"},
    {"scheme": "rope", "tokens": "one query", "keys_rotated": "yes"},
    {"layout": "thd", "bounds": "unequal", "scheme": "rope"},
]


def test_sequences_of_forwards_are_right() -> None:
    assert_right(run_sequences(SEED, 60, rows=QUICK, most_calls=130), 100)


def test_sequences_of_calls_with_gradients_are_right() -> None:
    rows = [{"scheme": "rope", "gradients": "all"}, {"scheme": "alibi learned", "gradients": "all", "gate": "head"}]
    assert_right(run_sequences(SEED, 60, rows=rows, most_calls=25), 20)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "gluon", None] if ON_GPU else ["triton", None])
def test_the_sequences_of_a_day_are_right(impl: str | None) -> None:
    seed = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    print("seed", seed)
    assert_right(run_sequences(seed, 60, impl), 100)


# === planted faults ===

Patch = tuple[Any, str, Any]  # an object, its attribute, and the value that is wrong


def in_key(key: Any, of: Record[Any] = UNCHECKED) -> list[Patch]:
    """Plant a fault in the keys of a record, and let no matcher find kinds before."""
    return [(kinds, "has_guards", lambda: False), (of, "key", key)]


def in_both(wrong: Record[Any]) -> list[Patch]:
    """Let another record's keys and matchers stand for those of `attention`."""
    return [(UNCHECKED, name, getattr(wrong, name)) for name in ("key", "make_match")]


def without_identity(of: Record[Any] = UNCHECKED) -> Any:
    key = of.key
    return lambda call: key(call)[:-1]


def without_strides() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_METADATA", [name for name in record._METADATA if name != "stride()"])
        return Record(UNCHECKED.kind, identify=UNCHECKED.identify).key


def in_one_slot(call: Any, key: Any = UNCHECKED.key) -> Any:
    """Tell which tensors there are, and not which arguments they are."""
    return tuple(part for part in key(call)[:-1] if part is not None)


def matcher_without_identity(*tensors: Any) -> Any:
    check = make_matcher(*apart(tensors))
    return lambda *others: check(*apart(others))


def apart(tensors: Any) -> list[Any]:
    """Return tensors of which none comes twice."""
    return [x.detach() if any(x is y for y in tensors[:index]) else x for index, x in enumerate(tensors)]


def gather_once(inputs: Any, call: Any, gather: Any = Inputs.gather) -> Any:
    """Read the positions of the first call: its plan has a stale table."""
    if not hasattr(inputs, "stale"):
        names = ("positions_q", "positions_k")
        inputs.stale = {name: getattr(call.arguments, name).clone() for name in names}
    return gather(inputs, call._replace(arguments=call.arguments._replace(**inputs.stale)))


INFERENCE = {"gradients": "none"}
ONE_TENSOR = {"scheme": "rope", "positions": "one tensor", **INFERENCE}
FAULTS: dict[str, tuple[dict[str, str], list[Patch]]] = {
    "identity": (ONE_TENSOR, in_key(without_identity())),
    "identity in a matcher": (ONE_TENSOR, [(record, "make_matcher", matcher_without_identity)]),
    "identity of a norm": ({**ONE_TENSOR, "norm": "before"}, in_key(without_identity(NORMS.record), NORMS.record)),
    "strides": ({"mask": "pairs", **INFERENCE}, in_key(without_strides())),
    "slots": ({"key_starts": "given", **INFERENCE}, in_key(in_one_slot)),
    "scale": (
        {"scale": "given", **INFERENCE},
        in_both(Record(UNCHECKED.kind, ("scale",), UNCHECKED.identify)),
    ),
    "scheme": (
        {"scheme": "rope", **INFERENCE},
        in_both(Record(UNCHECKED.kind, identify={PositionScheme: type})),
    ),
    "stale table": (ONE_TENSOR, [(Inputs, "gather", gather_once)]),
}


@pytest.mark.skipif(ON_GPU, reason="its changes compile kernels there")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    row, patches = FAULTS[kind]
    for owner, name, fault in patches:
        monkeypatch.setattr(owner, name, fault)
    report = run_sequences(5, 120, rows=[row], most_failures=1, most_calls=500)
    (failure,) = report.failures
    print(report.calls, failure.text)
    assert sum(step.action == "call" for step in failure.steps) <= 4
    assert sum(len(step.changes) for step in failure.steps) <= 4
    monkeypatch.undo()
    assert replay(failure.row, failure.steps) is None
