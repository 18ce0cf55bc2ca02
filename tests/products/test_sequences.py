"""Sequences of calls agree with the truth, and planted faults of plans are found and cut down."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
from helpers.modes import ON_GPU, needs_kernels

from products import sequences
from products.sequences import SEED, replay, run_sequences
from ropewalk.ops.attention import plans
from ropewalk.ops.attention.plans import find, leaves, made, norms
from ropewalk.ops.attention.tables import identity_of

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


def describe_without_identity(tensors: Any) -> Any:
    return tuple((index, *rest) for index, _, *rest in leaves.describe(tensors))


def describe_without_strides(tensors: Any) -> Any:
    return tuple((*a, *b) for *a, _, b in ((*x[:4], x[4], x[5:]) for x in leaves.describe(tensors)))


def describe_in_one_slot(tensors: Any) -> Any:
    """Tell which tensors there are, and not which arguments they are."""
    return tuple(tuple(rest) for _, _, *rest in leaves.describe(tensors))


def forget_flag(name: str) -> Callable[..., Any]:
    index = leaves.Flags._fields.index(name)

    def find_call(given: Any, position: Any, flags: Any, of_blocks: Any) -> Any:
        return find.find_call(given, position, (*flags[:index], None, *flags[index + 1 :]), of_blocks)

    return find_call


def identity_without_values(position: Any) -> Any:
    return None if identity_of(position) is None else (type(position),)


def make_once(rows: Any, given: Any, position: Any) -> Any:
    """Return the table of the first call: a stale one."""
    if not hasattr(rows, "stale"):
        rows.stale = _make(rows, given, position)
    return rows.stale


_make = made.Rows.make
INFERENCE = {"gradients": "none"}
ONE_TENSOR = {"scheme": "rope", "positions": "one tensor", **INFERENCE}
FAULTS: dict[str, tuple[dict[str, str], list[tuple[Any, str, Any]]]] = {
    "identity": (ONE_TENSOR, [(find, "describe", describe_without_identity)]),
    "identity of a norm": (
        {**ONE_TENSOR, "norm": "before"},
        [(find, "describe", describe_without_identity), (norms, "describe", describe_without_identity)],
    ),
    "strides": ({"mask": "pairs", **INFERENCE}, [(find, "describe", describe_without_strides)]),
    "slots": ({"key_starts": "given", **INFERENCE}, [(find, "describe", describe_in_one_slot)]),
    "scale": ({"scale": "given", **INFERENCE}, [(plans, "find_call", forget_flag("scale"))]),
    "scheme": ({"scheme": "rope", **INFERENCE}, [(find, "identity_of", identity_without_values)]),
    "stale table": (ONE_TENSOR, [(made.Rows, "make", make_once)]),
}


@pytest.mark.skipif(ON_GPU, reason="its changes compile kernels there")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    row, places = FAULTS[kind]
    for place, name, fault in places:
        monkeypatch.setattr(place, name, fault)
    report = run_sequences(5, 120, rows=[row], most_failures=1, most_calls=500)
    (failure,) = report.failures
    print(report.calls, failure.text)
    assert sum(step.action == "call" for step in failure.steps) <= 4
    assert sum(len(step.changes) for step in failure.steps) <= 4
    monkeypatch.undo()
    assert replay(failure.row, failure.steps) is None
