"""The array holds every pair; its rows are right by the reference, and a part, another each day, by "triton"."""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

import prove_products
import pytest
import torch
from helpers.modes import INTERPRETED, ON_GPU, needs_kernels
from torch import Tensor

from products import calls, compare, cover, run
from products.table import FEATURES, NEUTRAL, Row, names_a_call

pytestmark = pytest.mark.skipif(ON_GPU, reason="`make products-gpu` runs all rows there")
CPU = torch.device("cpu")
PARTS = 16
DAY = os.environ.get("ROPEWALK_PRODUCTS_SEED") or datetime.date.today().isoformat()
PER_DAY = 48  # rows that a day's gate interprets


def check(row: Row, impl: str, seed: int) -> list[run.Fault]:
    return run.check(row, [impl], seed, CPU, calls.CPU, seed, planned=0).faults


@pytest.mark.slow
@pytest.mark.parametrize("impl", [*cover.IMPLS, None])
def test_the_array_has_every_pair_that_a_backend_runs(impl: str | None) -> None:
    rows = [row for row, impls in cover.load() if impl in impls]
    missing = cover.uncovered(rows, cover.supported_pairs()[impl])
    assert not missing, f"{len(missing)} pairs, {sorted(map(sorted, missing))[:3]}: run `tools/prove_products.py rows`"


def test_the_page_is_of_the_record() -> None:
    record = json.loads(prove_products.RECORD.read_text())
    assert prove_products.PAGE.read_text() == prove_products.render(record), "run python tools/prove_products.py page"
    assert {"array", "sequences", "pairs"} <= record.keys()
    assert prove_products.what_is_wrong(record) is None


def test_a_run_that_proves_less_says_so() -> None:
    record = json.loads(prove_products.RECORD.read_text())
    array = record["array"]
    for part in (
        {"faults": [{}]},
        {"first_pass": [None, *array["first_pass"][1:]]},
        {"exit_codes": [-9, *array["exit_codes"][1:]]},
    ):
        assert prove_products.what_is_wrong({**record, "array": {**array, **part}})
    assert prove_products.what_is_wrong({**record, "pairs": {"triton": {"supported": 2, "missing": 1}}})


def test_the_array_has_every_value() -> None:
    found = {choice for row, _ in cover.load() for choice in row.items()}
    assert found == {(name, value) for name, feature in FEATURES.items() for value in feature.values}
    assert all(names_a_call(row) for row, _ in cover.load())


@pytest.mark.parametrize("part", range(PARTS))
def test_rows_by_the_reference(part: int) -> None:
    faults = [
        fault.describe()
        for number, (row, _) in enumerate(cover.load())
        if number % PARTS == part
        for fault in check(row, "reference", number)
    ]
    assert not faults


def rows_of_day(day: str, n: int) -> list[Row]:
    """Return rows that the interpreter runs, others each day: it has no bfloat16, and rounds to e4m3 wrongly."""
    runs = [row for row, impls in cover.load() if "triton" in impls]
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(hash_of(day))).tolist()
    dtypes = {"none": "float32", "int8": "float16"}  # in float32, 8-bit products are refused: nothing is compared
    rows = [runs[i] for i in order[:n]]
    return [{**x, "dtype": dtypes.get(x["precision"], "float32")} if x["dtype"] == "bfloat16" else x for x in rows]


def hash_of(day: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(day)) % 2**31


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("number", range(PER_DAY))
def test_rows_of_the_day_by_triton(number: int) -> None:
    row = rows_of_day(DAY, PER_DAY)[number]
    faults = [fault.describe() for fault in check(row, "triton", number)]
    assert not faults, f"again: ROPEWALK_PRODUCTS_SEED={DAY}"


@needs_kernels
@pytest.mark.parametrize("number", range(3))
def test_a_row_by_triton(number: int) -> None:
    assert not check(rows_of_day("always", 3)[number], "triton", number)


@pytest.mark.parametrize("which", ["softcap=given"])
def test_a_feature_runs_beside_every_other(monkeypatch: pytest.MonkeyPatch, capsys: Any, which: str) -> None:
    name, value = which.split("=")
    ran: list[Row] = []
    fault = run.Fault(NEUTRAL, "triton", 0, 0, "call 1", ["wrong"])

    def check(row: Row, *arguments: Any, **keywords: Any) -> run.Counted:
        ran.append(row)
        return run.Counted(1, [fault] if row["scheme"] == "alibi learned" and row["gradients"] == "all" else [])

    monkeypatch.setattr(run, "check", check)
    with pytest.raises(SystemExit):
        prove_products.main(["feature", which])
    assert {row[name] for row in ran} == {value}
    others = {choice for row in ran for choice in row.items() if choice[0] not in (name, "dtype")}
    assert len(others) > 100
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{len(ran)} calls, 1 wrong")


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("nosuch", "NAME is 'nosuch', but must be a feature: .*softcap"),
        ("window=nope", "VALUE is 'nope', but must be one of window's: "),
        ("window=", "VALUE is '', but must be one of window's: "),
    ],
)
def test_a_feature_that_is_none_is_named(which: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said) as refused:
        prove_products.main(["feature", which])
    assert "\n" not in str(refused.value)


# === planted faults: each kind is found, and is cut down to the features that it takes ===


def without_sinks_beside_a_gate(keywords: dict[str, Any]) -> dict[str, Any]:
    """Leave out one of two features, as where they share a slot."""
    return {n: x for n, x in keywords.items() if n != "sinks" or keywords.get("gate") is None}


def as_if_dense(keywords: dict[str, Any]) -> dict[str, Any]:
    """Read k as if its features were dense."""

    def densify(x: Tensor) -> Tensor:
        if x.stride(-1) == 1 or x.numel() == 0:
            return x
        return x.as_strided(x.shape, torch.empty(x.shape).stride())

    return {n: densify(x) if n == "k" else x for n, x in keywords.items()}


def without_a_window_of_lists(keywords: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in keywords.items() if n != "window" or "blocks" not in keywords}


PLANTED = {
    "two features in one slot": (without_sinks_beside_a_gate, {"sinks", "gate"}),
    "features taken as dense": (as_if_dense, {"memory"}),
    "a mask that lists hide": (without_a_window_of_lists, {"window", "blocks"}),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found_and_cut_down(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, features = PLANTED[kind]
    attend = run.compare.attention
    monkeypatch.setattr(compare, "attention", lambda **keywords: attend(**change(keywords)))
    for number, (row, _) in enumerate(cover.load()):
        faults = check(row, "reference", number)
        if faults and not INTERPRETED:
            smallest = run.shrink(faults[0], CPU, calls.CPU).row
            left = {name for name, x in smallest.items() if x != NEUTRAL[name]}
            assert features <= left
            assert len(left - features) <= 2  # without which this row does not show it
            return
    pytest.fail("no row finds it")
