"""An attention that is not right must not be timed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.bench.attention_cases import SCHEMES, AttentionCase, AttentionInputs, make_attention_inputs
from ropewalk.bench.attention_gate import AttentionGate
from ropewalk.bench.gate import Verdict
from ropewalk.ops.attention.api import attention

CASE = AttentionCase("small", 2, 19, 4, 2, 16)
FORMS = [CASE, replace(CASE, causal=True), replace(CASE, padded=True), replace(CASE, batch=1, q_heads=1, k_heads=1)]


def ours(case: AttentionCase, inputs: AttentionInputs, scheme: str, **changes: Any) -> Callable[..., Tensor]:
    keywords = {
        "position": SCHEMES[scheme](case.q_heads),
        "causal": case.causal,
        "key_lengths": inputs.key_lengths,
        "impl": "reference",
        **changes,
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, **keywords)
        return out

    return attend


def check(attend: Callable[..., Tensor], case: AttentionCase, device: torch.device, scheme: str = "none") -> Verdict:
    return AttentionGate(case, make_attention_inputs(case, device)).check(attend, scheme, backward=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", FORMS, ids=lambda case: f"{case.causal}-{case.padded}-{case.batch}")
def test_a_right_attention_passes(case: AttentionCase, scheme: str, device: torch.device) -> None:
    inputs = make_attention_inputs(case, device)
    gate = AttentionGate(case, inputs)
    for backward in (False, True):
        verdict = gate.check(ours(case, inputs, scheme), scheme, backward=backward)
        assert verdict.complaint is None
        assert 0 < verdict.error <= verdict.budget


@pytest.mark.parametrize("scheme", ["rope", "alibi", "exposb", "exposb-decay"])
def test_another_scheme_is_wrong(scheme: str, device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    verdict = AttentionGate(CASE, inputs).check(ours(CASE, inputs, "none"), scheme, backward=False)
    assert verdict.complaint == "the error of the output is past the budget"
    assert verdict.error > verdict.budget


@pytest.mark.parametrize("changes", [{"causal": True}, {"scale": 0.1}, {"window": 3}])
def test_another_attention_is_wrong(changes: dict[str, Any], device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    assert check(ours(CASE, inputs, "none", **changes), CASE, device).complaint is not None


def test_lengths_that_are_not_obeyed_are_wrong(device: torch.device) -> None:
    case = replace(CASE, padded=True)
    inputs = make_attention_inputs(case, device)
    assert check(ours(case, inputs, "none", key_lengths=None), case, device).complaint is not None


class Spoilt(torch.autograd.Function):
    """Passes the output on, and spoils what comes back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 1.5


def test_wrong_gradients_are_wrong(device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    right = ours(CASE, inputs, "none")

    def spoilt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = Spoilt.apply(right(q, k, v))
        return out

    gate = AttentionGate(CASE, inputs)
    assert gate.check(spoilt, "none", backward=False).complaint is None
    complaint = gate.check(spoilt, "none", backward=True).complaint
    assert complaint is not None
    assert "gradient" in complaint


def test_late_rows_of_a_causal_attention_count(device: torch.device) -> None:
    """Their outputs are small: beside those of the first rows, much could be wrong with them."""
    case = AttentionCase("long", 1, 1024, 1, 1, 16, causal=True)
    inputs = make_attention_inputs(case, device)
    right = ours(case, inputs, "none")

    def weaken_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v)
        return torch.cat((out[:, :900], out[:, 900:] * 0.6), 1)

    assert AttentionGate(case, inputs).check(weaken_late, "none", backward=False).complaint is not None


def test_nan_other_shapes_and_overwritten_inputs_are_wrong(device: torch.device) -> None:
    right = ours(CASE, make_attention_inputs(CASE, device), "none")

    def overwriting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v)
        with torch.no_grad():
            k.mul_(2)
        return out

    def check_forward(attend: Callable[..., Tensor]) -> Verdict:
        return AttentionGate(CASE, make_attention_inputs(CASE, device)).check(attend, "none", backward=False)

    assert check_forward(lambda q, k, v: right(q, k, v) * torch.nan).error == float("inf")
    assert check_forward(lambda q, k, v: right(q, k, v)[:, 1:]).complaint == "the output has shape (2, 18, 4, 16)"
    assert check_forward(overwriting).complaint == "it wrote into its inputs"
