"""A wrong rotation must not be timed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import apply_rope
from ropewalk.bench.core.gate import max_error
from ropewalk.bench.rope.cases import Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation

CASE = Case("small", 2, 6, 3, 1, 16)


def ours(inputs: Inputs, **flags: Any) -> Rotation:
    return Rotation(lambda q, k: apply_rope(q, k, inputs.cos, inputs.sin, **flags))


@pytest.mark.parametrize("direction", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_right_rotation_passes(
    direction: str, inplace: bool, interleaved: bool, dtype: str, device: torch.device
) -> None:
    case = replace(CASE, inplace=inplace, interleaved=interleaved, dtype=dtype)
    inputs = make_inputs(case, device)
    verdict = Gate(case, inputs, direction).check(ours(inputs, inplace=inplace, interleaved=interleaved))
    assert verdict.complaint is None
    assert 0 < verdict.error <= verdict.budget


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("flags", [{"inverse": True}, {"interleaved": True}])
def test_another_convention_is_wrong(direction: str, flags: dict[str, bool], device: torch.device) -> None:
    inputs = make_inputs(CASE, device)
    verdict = Gate(CASE, inputs, direction).check(ours(inputs, **flags))
    assert verdict.complaint == "the error is past the budget"
    assert verdict.error > verdict.budget


def test_overwriting_inputs_out_of_place_is_wrong(device: torch.device) -> None:
    inputs = make_inputs(CASE, device)
    verdict = Gate(CASE, inputs, "fwd").check(ours(inputs, inplace=True))
    assert verdict.complaint == "it wrote into its inputs"


def test_leaving_inputs_alone_in_place_is_wrong(device: torch.device) -> None:
    case = replace(CASE, inplace=True)
    inputs = make_inputs(case, device)
    assert Gate(case, inputs, "fwd").check(ours(inputs)).complaint == "the error is past the budget"


def test_nan_and_other_shapes_are_infinitely_wrong() -> None:
    exact = [torch.zeros(3, dtype=torch.float64)]
    assert max_error([torch.tensor([0.0, float("nan"), 0.0])], exact) == float("inf")
    assert max_error([torch.zeros(4)], exact) == float("inf")


def test_native_form_leads_there_and_back(device: torch.device) -> None:
    inputs = make_inputs(CASE, device)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(q, k, inputs.cos, inputs.sin, layout="bhtd")
        return rotated

    def transpose(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    for direction in ("fwd", "bwd"):
        assert Gate(CASE, inputs, direction).check(Rotation(rotate, transpose, transpose)).complaint is None
