"""Plans of `append_kv`: no call runs as one of another kind, and checks of values and addresses are made each time."""

import pytest
import torch
from helpers.modes import INTERPRETED
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from ropewalk import QKNorm, append_kv
from ropewalk.ops.cache import operator
from ropewalk.ops.launch import kinds

pytestmark = pytest.mark.both_modes  # by plans of the kernel in the interpreter, and by kinds of the reference

N, H, K, D, PAGES, SIZE = 3, 4, 2, 32, 5, 8


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    """The calls whose metadata was checked."""
    checks, choose = [], operator.OPERATION.choose

    def choose_and_note(call):
        checks.append(call)
        return choose(call)

    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    monkeypatch.setattr(operator.OPERATION, "choose", choose_and_note)
    kinds.KINDS.clear()
    yield checks
    kinds.KINDS.clear()


def draw(dtype=torch.float32):
    k, v = torch.randn(2, N, K, D, dtype=dtype)
    cos, sin = torch.randn(2, 16, D // 2)
    caches = torch.zeros(2, PAGES, SIZE, K, D, dtype=dtype)
    return {
        "k": k,
        "v": v,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slots": torch.tensor([9, 3, -1]),
        "cos": cos,
        "sin": sin,
    }


def test_calls_of_one_kind_are_checked_twice(checks):
    """At once, and where their kind is kept."""
    for _ in range(3):
        append_kv(**draw())
    assert len(checks) == 2
    for _ in range(4):  # kinds take turns
        append_kv(**draw(), q=torch.randn(N, H, D))
        append_kv(**draw(torch.float16))
        append_kv(**draw())
    assert len(checks) == 6


def quantized(shape):
    caches = torch.zeros(2, PAGES, SIZE, K, D, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(2, *shape) + 0.1
    return {"k_cache": caches[0], "v_cache": caches[1], "k_scale": scales[0], "v_scale": scales[1]}


@pytest.mark.parametrize("shape", [(), (K,)])
def test_a_repeated_call_reads_its_own_values(shape):
    """Slots, positions, scales and weights may hold anything in a call that follows a plan."""

    def call(slots, positions):
        weights = torch.rand(2, D)
        tensors = {"q": torch.randn(N, H, D), "positions": torch.tensor(positions), "norm": QKNorm(*weights)}
        return draw() | quantized(shape) | tensors | {"slots": torch.tensor(slots)}

    for slots, positions in (([9, 3, -1], [1, 2, 3]), ([-1, 39, 0], [15, 0, 99]), ([8, 9, 10], [4, 4, 4])):
        calls = [call(slots, positions)]
        calls.append(calls[0] | {name: calls[0][name].clone() for name in ("k_cache", "v_cache")})
        q, expected = append_kv(**calls[0]), append_kv(**calls[1], impl="reference")
        torch.testing.assert_close(q, expected, equal_nan=True)
        for name in ("k_cache", "v_cache"):
            x, y = (each[name].float() for each in calls)
            # One step of float8_e4m3fn: of a normal number with the smallest significand, or of a subnormal one.
            torch.testing.assert_close(x, y, rtol=2**-3, atol=2**-9, equal_nan=True)


def test_the_operator_takes_plans_and_refuses_gradients():
    def arguments(call):
        return (*[call[name] for name in ("k", "v", "k_cache", "v_cache", "slots", "cos", "sin")], *[None] * 7)

    call = draw()
    append_kv(**call)
    version = call["k_cache"]._version
    torch.ops.ropewalk.append_kv(*arguments(call))
    assert call["k_cache"]._version > version
    differentiable = draw()
    differentiable["k"].requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            torch.ops.ropewalk.append_kv(*arguments(differentiable))
    differentiable["k_cache"].zero_()
    for run in (lambda: torch.ops.ropewalk.append_kv(*arguments(differentiable)), lambda: append_kv(**differentiable)):
        with pytest.raises(ValueError, match="k requires grad"):
            run()
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="k requires grad"):
            torch.compile(run, backend="eager", fullgraph=True)()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="k requires grad"):
        torch.ops.ropewalk.append_kv(*arguments(differentiable))
    assert not differentiable["k_cache"].any()


def test_surroundings_are_seen():
    for _ in range(3):
        append_kv(**draw())
    with forward_ad.dual_level():
        call = draw()
        append_kv(**call)
        assert call["k_cache"].any()
    with pytest.raises(ValueError, match="k requires grad"):
        append_kv(**call | {"k": call["k"].requires_grad_()})
    with torch.inference_mode():
        inside = draw()
        for _ in range(3):
            append_kv(**inside)
        assert inside["k_cache"].any()
    append_kv(**draw())


def test_each_call_is_checked_by_values_and_addresses():
    for _ in range(3):
        append_kv(**draw())
    call = draw()
    for error, change, message in (
        (TypeError, {"v": None}, "v is None"),
        (ValueError, {"slots": torch.tensor([9, 3, 99])}, "slots holds 99"),
        (ValueError, {"v_cache": call["k_cache"]}, "v_cache shares memory with k_cache"),
        (TypeError, {"rotary_offset": 0.0}, "rotary_offset is 0.0"),
        (TypeError, {"rotary_offset": False}, "rotary_offset is False"),
    ):
        version = call["k_cache"]._version
        with pytest.raises(error, match=message):
            append_kv(**call | change)
        assert call["k_cache"]._version == version
    assert not call["k_cache"].any()
