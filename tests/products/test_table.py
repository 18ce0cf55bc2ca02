"""The table of products says all that there is: each argument, each field of a call, each option of a scheme."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from products import calls, cover, table
from products.table import FEATURES, NEUTRAL, NOT_VALUES, RULES, Row, names_a_call, plainest
from ropewalk import (
    Alibi,
    BlockLists,
    ExpoSB,
    NoPosition,
    QKNorm,
    QuantizedProducts,
    ReRope,
    Rope,
    SelfExtend,
    T5Bias,
    attention,
    schemes,
)
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import KERNELS
from ropewalk.ops.attention.call import LEAVES, NOT_IN_PROGRAM, AttentionCall, flatten

SCHEMES = (NoPosition, Rope, Alibi, T5Bias, ExpoSB, ReRope, SelfExtend)
CHOICES = [(name, value) for name, feature in FEATURES.items() for value in feature.values]

# Leaves of a call that `attention` fills in after a backend was chosen, and the features that they come from.
FILLED_IN = {"gate": "gate", "seed": "dropout", "row_logits": "results"}
ELSEWHERE = {
    "far_given_q_past": "context_parallel rotates it",
    "far_given_q_future": "context_parallel rotates it",
    "far_given_k": "context_parallel rotates it",
}


def unlisted(function: Callable[..., Any]) -> set[str]:
    """Return the arguments that are in no feature, and the features' arguments that the function lacks."""
    listed = {name for feature in FEATURES.values() for name in feature.arguments} | set(NOT_VALUES)
    return listed ^ set(inspect.signature(function).parameters)


def rows() -> Iterator[Row]:
    """Go through the plainest calls of all values, in inference and in training, and of keys that come rotated."""
    for choice in CHOICES:
        row = plainest(choice)
        assert row is not None, f"no call has {choice}"
        yield row
        if row["gradients"] == "none" and names_a_call({**row, "gradients": "all"}):
            yield {**row, "gradients": "all"}
    yield {**NEUTRAL, "scheme": "rope", "keys_rotated": "yes"}  # q alone reads its table


@pytest.fixture(scope="module")
def keywords() -> list[dict[str, Any]]:
    """The keywords of the calls of all rows."""
    found = []
    for row in rows():
        call = calls.build(row, 0, torch.device("cpu"), calls.CPU)
        given = call.keywords({name: x.requires_grad_(name in call.learned) for name, x in call.leaves.items()})
        found.append({**given, "needs": row["gradients"] != "none"})
    return found


def leaves_of(call: AttentionCall) -> dict[str, Any]:
    """Return all that a call holds, by name."""
    return {**dict(zip(LEAVES, flatten(call), strict=True)), **{name: getattr(call, name) for name in NOT_IN_PROGRAM}}


def differs(x: Any, neutral: Any) -> bool:
    """Say whether a value is another than the neutral one."""
    if isinstance(x, Tensor) or isinstance(neutral, Tensor):
        return x is not neutral
    return bool(x != neutral)


def never_set(all_keywords: list[dict[str, Any]], names: Collection[str]) -> set[str]:
    """Return which of some leaves are neutral in every call."""
    missing = set(names) - {name for name in FILLED_IN if len(FEATURES[FILLED_IN[name]].values) > 1}
    for given in all_keywords:
        given = dict(given)
        given.pop("norm", None)
        with torch.set_grad_enabled(given.pop("needs")):
            try:
                call = make_call(**given)
            except ValueError:
                continue
        neutral = leaves_of(AttentionCall(call.q, call.k, call.v))
        missing -= {name for name, x in leaves_of(call).items() if differs(x, neutral[name])}
    return missing - {"q", "k", "v"}


def options_of(all_keywords: list[dict[str, Any]], kind: type) -> set[str]:
    """Return the fields of a class that are as by default in all of its objects."""
    names = ("position", "norm", "blocks", "precision")
    objects = [given.get(name) for given in all_keywords for name in names]
    objects += [x.rope for x in objects if isinstance(x, ReRope | SelfExtend) and x.rope is not None]
    objects = [x for x in objects if type(x) is kind]
    return {
        field.name
        for field in dataclasses.fields(kind)
        if not any(differs(getattr(x, field.name), field.default) for x in objects)
    }


def test_each_argument_has_a_feature():
    assert unlisted(attention) == set(), "enter it in tests/products/table.py, and build it in calls.py"


def test_an_argument_more_is_found():
    signature = inspect.signature(attention)
    more = inspect.Parameter("logit_bias", inspect.Parameter.KEYWORD_ONLY, default=None)

    def longer() -> None: ...

    longer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    assert unlisted(longer) == {"logit_bias"}


def test_each_leaf_of_a_call_is_set(keywords):
    names = [*LEAVES, *NOT_IN_PROGRAM]
    assert never_set(keywords, names) == set(ELSEWHERE)
    assert never_set(keywords[:2], names) > {"softcap", "sinks"}


@pytest.mark.parametrize("kind", [*SCHEMES, QKNorm, BlockLists, QuantizedProducts], ids=lambda kind: kind.__name__)
def test_each_option_is_another_than_by_default(keywords, kind):
    assert options_of(keywords, kind) == set()


def test_an_option_more_is_found(keywords):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Longer(ExpoSB):
        floor: float = 0.0

    given = [{"position": Longer(distance_decay=True, band_weights=torch.ones(4))}]
    assert options_of(given, Longer) == {"floor"}
    assert options_of([{"norm": QKNorm(offset=0.0)}], QKNorm) == {field.name for field in dataclasses.fields(QKNorm)}


def test_schemes_are_all_of_them():
    public = {x for x in vars(schemes).values() if inspect.isclass(x) and issubclass(x, schemes.PositionScheme)}
    assert public - {schemes.PositionScheme, schemes.TwoRangeScheme} == set(SCHEMES)


# Rules against rows that are no call, or the call of another row.
WITHOUT_MEANING = {
    ("bounds", "layout"): "a dense call has no sequences",
    ("bounds", "pages"): "key_lengths are the bounds of keys in pages",
    ("tokens", "layout", "bounds", "pages"): "sequences of equal bounds have as many queries as keys",
    ("pages", "layout"): "packed queries alone read a dense cache",
    ("results", "gradients"): "a call without gradients has none of its log-sum-exp",
    ("grad memory", "gradients"): "a call without gradients reads none of its output",
    ("memory", "layout", "batch"): "a batch of 1 is not expanded",
}


def is_refused(row: Row) -> bool:
    """Say whether there is no call of a row, or `attention` raises."""
    try:
        return cover.refusal(row, None, calls.CPU) is not None
    except (ValueError, IndexError, KeyError):
        return True


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(rule.features))
def test_each_rule_is_needed(monkeypatch, rule):
    monkeypatch.setattr(table, "RULES", tuple(other for other in RULES if other is not rule))
    forbidden = [
        values
        for values in itertools.product(*(FEATURES[name].values for name in rule.features))
        if not rule.allows(*values)
    ]
    alone = [row for row in (plainest(*zip(rule.features, values, strict=True)) for values in forbidden) if row]
    assert alone, "other rules forbid the same"
    assert any(map(is_refused, alone)) or rule.features in WITHOUT_MEANING


def test_rows_run_by_each_backend_with_kernels():
    assert set(cover.IMPLS) == set(KERNELS) == set(NOT_BY) - {"reference"}


NOT_BY = {
    "triton": {"dtype": {"float64"}, "scheme": {"own score_mod"}},
    "gluon": {
        "dtype": {"float32", "float64"},
        "head_dim": {"20", "512"},
        "scheme": {"own score_mod", "own kernel", "own kernel learned"},
        "pages": {"own 16", "own 64", "dense cache"},
        "blocks": {"own 64"},
    },
    "reference": {},
}


@pytest.mark.parametrize("impl", NOT_BY)
def test_a_backend_runs_all_values_but_some(impl):
    found: dict[str, set[str]] = {}
    for name, value in CHOICES:
        row = plainest((name, value))
        assert row is not None
        if cover.refusal(row, impl) is not None:
            found.setdefault(name, set()).add(value)
    assert found == NOT_BY[impl]
