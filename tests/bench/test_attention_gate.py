"""An attention that is not right must not be timed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.bench.attention.candidates import candidates_of
from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.bench.core.gate import Verdict
from ropewalk.ops.attention.api import attention

CASE = AttentionCase("small", 2, 19, 4, 2, 16, far_window=6)
PACKED = replace(CASE, batch=4, causal=True, form="packed", shortest=3)
CACHE = replace(CASE, batch=3, form="cache", shortest=5)
FORMS = [CASE, replace(CASE, causal=True), replace(CASE, padded=True), replace(CASE, batch=1, q_heads=1, k_heads=1)]


def ours(case: AttentionCase, inputs: AttentionInputs, setting: str, **changes: Any) -> Callable[..., Tensor]:
    keywords = {
        **SETTINGS[setting].make(case, inputs.q.device)[0],
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", FORMS, ids=lambda case: f"{case.causal}-{case.padded}-{case.batch}")
def test_a_right_attention_passes(case: AttentionCase, setting: str, device: torch.device) -> None:
    inputs = make_attention_inputs(case, device)
    gate = AttentionGate(case, inputs)
    for backward in (False, True) if SETTINGS[setting].exact is None else (False,):
        verdict = gate.check(ours(case, inputs, setting), setting, backward=backward)
        assert verdict.complaint is None
        assert 0 < verdict.error <= verdict.budget


@pytest.mark.parametrize("case", [PACKED, CACHE], ids=lambda case: case.form)
def test_every_sequence_and_every_cache_counts(case: AttentionCase, device: torch.device) -> None:
    inputs = make_attention_inputs(case, device)
    gate, backward = AttentionGate(case, inputs), case is PACKED
    found = candidates_of(case, inputs, ("reference",), [])["train" if backward else "decode"]
    right = found[0].build()
    assert gate.check(right, "rope", backward=backward).complaint is None
    for index in range(case.batch):
        bounds = inputs.cu_seqlens
        rows = slice(index, index + 1) if bounds is None else slice(int(bounds[index]), int(bounds[index + 1]))

        def spoilt(q: Tensor, k: Tensor, v: Tensor, rows: slice = rows) -> Tensor:
            factor = torch.ones_like(q[..., :1])
            factor[rows] = 1.1
            return right(q, k, v) * factor

        assert gate.check(spoilt, "rope", backward=backward).complaint is not None


@pytest.mark.parametrize("changes", [{"cu_seqlens_q": "one"}, {"causal": False}])
def test_packed_sequences_that_are_mixed_up_are_wrong(changes: dict[str, Any], device: torch.device) -> None:
    inputs = make_attention_inputs(PACKED, device)
    assert inputs.cu_seqlens is not None
    bounds = inputs.cu_seqlens[[0, -1]] if "cu_seqlens_q" in changes else inputs.cu_seqlens
    keywords: dict[str, Any] = {**changes, "cu_seqlens_q": bounds, "layout": "thd", "key_lengths": None}
    mixed = ours(PACKED, inputs, "rope", **keywords)
    assert AttentionGate(PACKED, inputs).check(mixed, "rope", backward=False).complaint is not None


@pytest.mark.parametrize("changes", [{"keys_rotated": False}, {"query_starts": None}, {"key_lengths": None}])
def test_caches_that_are_read_otherwise_are_wrong(changes: dict[str, Any], device: torch.device) -> None:
    inputs = make_attention_inputs(CACHE, device)
    assert inputs.key_lengths is not None
    keywords = {"keys_rotated": True, "query_starts": inputs.key_lengths - 1, **changes}
    other = ours(CACHE, inputs, "rope", **keywords)
    assert AttentionGate(CACHE, inputs).check(other, "rope", backward=False).complaint is not None


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.learned])
def test_gradients_of_parameters_count(name: str, device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    keywords, parameters = SETTINGS[name].make(CASE, device)
    right = ours(CASE, inputs, name, **keywords)
    gate = AttentionGate(CASE, inputs)
    assert gate.check(right, name, backward=True, parameters=parameters).complaint is None

    def forget(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Parameters of the same values, and gradients of 0 for those that were given."""
        out = ours(CASE, inputs, name)(q, k, v)
        for x in parameters:
            out = out + (0 * x).sum()
        return out

    complaint = gate.check(forget, name, backward=True, parameters=parameters).complaint
    assert complaint == "the error of a parameter's gradient is past the budget"


def test_other_probabilities_that_are_dropped_are_wrong(device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    right = ours(CASE, inputs, "dropout")

    def another_seed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return right(q, k, v)

    assert AttentionGate(CASE, inputs).check(another_seed, "dropout", backward=False).complaint is not None


@pytest.mark.parametrize(
    "setting", [name for name, one in SETTINGS.items() if name not in ("none", "deterministic") and one.exact != "none"]
)
def test_another_setting_is_wrong(setting: str, device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    verdict = AttentionGate(CASE, inputs).check(ours(CASE, inputs, "none"), setting, backward=False)
    is_exact = SETTINGS[setting].exact is None
    said = "the error of the output is past the budget" if is_exact else "the relative error of the output is past"
    assert (verdict.complaint or "").startswith(said)
    assert verdict.error > verdict.budget


@pytest.mark.parametrize("part", [0.005, 0.05])
def test_8_bit_products_have_a_bound_of_the_errors_norm(part: float, device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    right = ours(CASE, inputs, "none")
    noise = torch.randn(inputs.grad.shape, generator=torch.Generator(device).manual_seed(0), device=device)

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v).float()
        return out + noise * (part * out.norm() / noise.norm())

    gate = AttentionGate(CASE, inputs)
    found = {name: gate.check(rounded, name, backward=False) for name in ("int8", "int8-fp8", "other-8bit")}
    assert [one.complaint is None for one in found.values()] == ([True] * 3 if part < 0.01 else [False, False, True])
    assert all(0.5 * part < one.error < 2 * part for one in found.values())
    assert gate.check(lambda q, k, v: rounded(q, k, v) * torch.nan, "int8", backward=False).complaint is not None


@pytest.mark.parametrize("changes", [{"causal": True}, {"scale": 0.1}, {"window": 3}])
def test_another_attention_is_wrong(changes: dict[str, Any], device: torch.device) -> None:
    inputs = make_attention_inputs(CASE, device)
    assert check(ours(CASE, inputs, "none", **changes), CASE, device).complaint is not None


@pytest.mark.parametrize("causal", [False, True])
def test_another_far_window_and_rope_throughout_are_wrong(causal: bool, device: torch.device) -> None:
    case = replace(CASE, causal=causal)
    inputs = make_attention_inputs(case, device)
    gate = AttentionGate(case, inputs)
    for other, setting in ((replace(case, far_window=12), "rerope"), (case, "rope")):
        assert gate.check(ours(other, inputs, setting), "rerope", backward=False).complaint is not None


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
