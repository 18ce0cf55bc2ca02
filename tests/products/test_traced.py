"""Rows of the table under tracers, transforms and checkpoints: other rows by other ways each day.

ROPEWALK_PRODUCTS_SEED sets the day's number, which the message of a failure says. The few cases of `make test` are the
same each day.
"""

from __future__ import annotations

import datetime
import os
import random
import re
import time

import pytest
import torch
from helpers.modes import HAS_KERNELS, INTERPRETED, ON_GPU, needs_kernels

from products import calls, traced
from products.table import FEATURES, Row, names_a_call, plainest
from ropewalk import explain_choice

DAY = int(os.environ.get("ROPEWALK_PRODUCTS_SEED", datetime.date.today().toordinal()))
SECONDS = float(os.environ.get("ROPEWALK_PRODUCTS_SECONDS", 25))
FIXED = ("export", "checkpoint", "vjp", "jvp", "twice", "vmap of grad", "make_fx", "fake")
CHOICES = [(name, value) for name, feature in FEATURES.items() for value in feature.values]
TRACERS = ("compile", "compile whole", "export", "make_fx", "vjp", "vmap")


def draw_row(picked: random.Random, impl: str | None) -> Row:
    """Return the plainest row that has two values, with gradients where there may be some."""
    while True:
        row = plainest(*picked.sample(CHOICES, 2))
        if row is None:
            continue
        if row["dtype"] == "bfloat16" or INTERPRETED:
            row = {**row, "dtype": "float32"}
        if row["gradients"] == "none" and names_a_call({**row, "gradients": "all"}):
            row = {**row, "gradients": "all"}
        if names_a_call(row) and runs(row, impl):
            return row


def runs(row: Row, impl: str | None) -> bool:
    """Say whether a backend runs a row here."""
    call = calls.build(row, 0, place(), traced.SIZES)
    leaves = {name: x.requires_grad_() if name in call.learned else x for name, x in call.leaves.items()}
    with torch.set_grad_enabled(bool(call.learned)):
        try:
            explain_choice(**call.keywords(leaves), impl=impl)
        except (TypeError, ValueError):
            return False
    return True


def place() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


def check(name: str, row: Row, impl: str | None, seed: int) -> bool:
    """Compare a row with the truth, or its error with what it must say; False if the way is not for it."""
    way = traced.WAYS[name]
    made = traced.build(way, row, seed, place(), traced.SIZES)
    if not way.needs(made[0]):
        return False
    shown = {key: value for key, value in row.items() if value != FEATURES[key].values[0]}
    text = traced.refusal(name, made[0], impl)
    try:
        wrong = traced.faults(way, made, impl)
    except Exception as error:
        if text is None or not re.search(text, str(error)):
            raise AssertionError(f"{name} of {shown} by {impl}, ROPEWALK_PRODUCTS_SEED={seed}: {error!r}") from error
        return True
    assert text is None, f"{name} of {shown} by {impl} raised nothing, but must raise: {text}"
    assert not wrong, f"{name} of {shown} by {impl}, ROPEWALK_PRODUCTS_SEED={seed}: {'; '.join(wrong)}"
    return True


def run_for(seconds: float, impl: str | None, ways: tuple[str, ...]) -> int:
    """Run rows by ways until the time is over, and return how many."""
    picked, end, n = random.Random(DAY), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += check(picked.choice(ways), draw_row(picked, impl), impl, DAY)
    return n


@pytest.mark.parametrize("name", [*FIXED, pytest.param("compile", marks=pytest.mark.slow)])
def test_a_row_is_right_by_a_way(name: str) -> None:
    picked = random.Random((*FIXED, "compile").index(name))
    while not check(name, draw_row(picked, "reference"), "reference", 0):
        pass


@pytest.mark.slow
def test_rows_of_the_day_are_right_by_the_reference() -> None:
    ways = tuple(name for name, way in traced.WAYS.items() if not way.is_costly)
    assert run_for(SECONDS, "reference", ways) > 5


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "impl", ["triton", pytest.param("gluon", marks=pytest.mark.gpu), pytest.param(None, marks=pytest.mark.gpu)], ids=str
)
def test_rows_of_the_day_are_right_by_kernels(impl: str | None) -> None:
    assert HAS_KERNELS
    ways = ("compile", "compile lengths", "export", "checkpoint", "checkpoint reentrant", "fake", "twice", "vjp")
    assert run_for(SECONDS, impl, ways) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile inductor", "aot inductor"])
def test_a_row_is_right_by_inductor(name: str) -> None:
    if name == "aot inductor" and ON_GPU:
        pytest.skip("with torch 2.11 the package of a lone nn.Linear crashed the process on a GPU")
    assert check(name, plainest(("scheme", "rope"), ("dtype", "float32"), ("gradients", "all")), "reference", DAY)


@pytest.mark.parametrize("name", TRACERS)
def test_a_new_block_mask_is_refused_by_name(name: str) -> None:
    row = plainest(("blocks", "BlockMask"), ("dtype", "float32"), ("gradients", "all"))
    way = traced.WAYS[name]
    made = [calls.build(row, seed, place(), traced.SIZES) for seed in range(2 if way.second else 1)]
    with pytest.raises(Exception, match=r"mask_mod was not evaluated yet, but must be for torch.compile and tracers"):
        traced.faults(way, made, "reference")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export lengths", "compile lengths", "make_fx symbolic"])
@pytest.mark.parametrize("choice", [("results", "max logits"), ("pages", "int4 16"), ("pages", "fp8 16")], ids=str)
def test_lengths_stay_free(name: str, choice: tuple[str, str]) -> None:
    row = plainest(choice, ("dtype", "float32"))
    assert check(name, row, "reference", 0)
