"""Schemes of one's own that cannot be meant: the error names the class, and what it must define or return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ropewalk import Alibi, NoPosition, PositionScheme, Rope, attention, explain_choice
from ropewalk.schemes.heads import OfHeads

B, T, H, D = 2, 6, 3, 8


def make(base: type, **methods: Any) -> PositionScheme:
    """A scheme of a class with these methods."""
    scheme: PositionScheme = dataclass(frozen=True, eq=False)(type("Oops", (base,), methods))()
    return scheme


def call(scheme: PositionScheme) -> None:
    q = torch.randn(B, T, H, D)
    attention(q, q, q, position=scheme)


def unchanged(self, scores, distance):
    return scores


NEITHER = "Oops defines neither rotation nor score_mod"
NOTHING_READS = "Oops is a scheme with a method that nothing reads"
UNUSED = {
    "misspelt": (PositionScheme, ("score_modification",), f"{NEITHER}.*did you mean score_mod"),
    "another": (PositionScheme, ("helper",), NEITHER),
    "nothing": (PositionScheme, (), NEITHER),
    "of no position": (NoPosition, (), NEITHER),
    "kernel form alone": (
        PositionScheme,
        ("kernel_score_mod",),
        f"{NEITHER}.*kernel_score_mod is read beside score_mod",
    ),
    "parameters alone": (
        PositionScheme,
        ("score_mod_params",),
        f"{NEITHER}.*score_mod_params is read beside score_mod",
    ),
    "far rotation alone": (PositionScheme, ("far_rotation",), f"{NEITHER}.*far_rotation is read beside far_window"),
    "kernel form of a Rope": (Rope, ("kernel_score_mod",), f"{NOTHING_READS}.*kernel_score_mod"),
    "far rotation of a Rope": (Rope, ("far_rotation",), f"{NOTHING_READS}.*far_rotation"),
    "misspelt beside another": (Rope, ("score_modification",), f"{NOTHING_READS}.*did you mean score_mod"),
    "misspelt of ALiBi": (Alibi, ("scoremod",), f"{NOTHING_READS}.*did you mean score_mod"),
    "a letter too many": (Rope, ("rotations",), f"{NOTHING_READS}.*did you mean rotation"),
    "a letter too few": (Alibi, ("kernel_scor_mod",), f"{NOTHING_READS}.*did you mean kernel_score_mod"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_class_of_which_something_is_not_used_is_refused(case):
    base, names, message = UNUSED[case]
    scheme = make(base, **dict.fromkeys(names, unchanged))
    for given in (scheme, OfHeads(scheme, 0, H)):
        with pytest.raises(TypeError, match=message):
            call(given)
    q = torch.randn(B, T, H, D)
    with pytest.raises(TypeError, match="Oops"):
        explain_choice(q, q, q, position=scheme)


def test_a_class_that_is_read_may_have_helpers_of_any_name():
    call(make(PositionScheme, score_mod=unchanged, rotations=unchanged))


def test_the_base_class_is_no_scheme():
    with pytest.raises(TypeError, match="PositionScheme defines neither rotation nor score_mod"):
        call(PositionScheme())


def test_helpers_are_left_alone():
    call(make(PositionScheme, score_mod=unchanged, scores=unchanged, rotation_matrix=unchanged, _rotation=unchanged))
    call(make(Rope, rotate=unchanged, has_bias=unchanged))


RETURNED = {
    "one row": lambda scores, distance: scores[:1],
    "one head": lambda scores, distance: scores[:, :1],
    "another shape": lambda scores, distance: scores[0, 0],
    "another dtype": lambda scores, distance: scores.double(),
    "a mask": lambda scores, distance: scores > 0,
    "nothing": lambda scores, distance: None,
    "a number": lambda scores, distance: 1.0,
}


@pytest.mark.parametrize("returned", RETURNED)
def test_a_score_mod_must_return_scores(returned):
    scheme = make(PositionScheme, score_mod=lambda self, scores, distance: RETURNED[returned](scores, distance))
    message = r"score_mod of Oops returned .*, but must return .* torch.float32 of shape \(2, 3, 6, 6\)"
    with pytest.raises(TypeError, match=message):
        call(scheme)


RAISED = {
    "shape": (RuntimeError, lambda scores, distance: scores + torch.zeros(T, 1, 1)),
    "index": (IndexError, lambda scores, distance: scores[:, 9]),
    "type": (TypeError, lambda scores, distance: scores + "1"),
    "attribute": (AttributeError, lambda scores, distance: scores.nothing),
}


@pytest.mark.parametrize("raised", RAISED)
def test_an_error_in_a_score_mod_names_the_scheme(raised):
    error, change = RAISED[raised]
    scheme = make(PositionScheme, score_mod=lambda self, scores, distance: change(scores, distance))
    with pytest.raises(
        error, match=r"score_mod of Oops raised: .*\(2, 3, 6, 6\), \(B, H, Tq, Tk\).*layout is the wrong one"
    ):
        call(scheme)
    with pytest.raises(error, match="score_mod of Oops raised"):
        call(OfHeads(scheme, 0, H))


class OwnError(RuntimeError):
    """An error that takes other arguments than a sentence."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def test_errors_of_other_types_pass():
    def raise_own(self, scores, distance):
        raise OwnError(1, 2)

    with pytest.raises(OwnError):
        call(make(PositionScheme, score_mod=raise_own))


def test_a_scheme_under_another_keyword_is_meant_for_position():
    q = torch.randn(B, T, H, D)
    for name in ("positions", "scheme", "rope"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': did you mean position\\?"):
            attention(q, q, q, **{name: Alibi()})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': did you mean position\\?"):
            explain_choice(q, q, q, **{name: Alibi()})
    with pytest.raises(TypeError, match="'positions': did you mean positions_q"):
        attention(q, q, q, positions=torch.arange(T))
