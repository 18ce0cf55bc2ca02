"""Plans of `append_kv`: calls of one kind find theirs by a matcher, and no call takes that of another kind."""

import gc
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from ropewalk import QKNorm, append_kv
from ropewalk.ops.cache import operator

N, H, K, D, PAGES, SIZE = 3, 4, 2, 32, 5, 8


@pytest.fixture
def searches(monkeypatch):
    """The calls whose plan was looked for by a key."""
    searches, find = [], operator._find

    def find_and_note(call):
        searches.append(call)
        return find(call)

    monkeypatch.setattr(operator, "_recent", ())
    monkeypatch.setattr(operator, "_find", find_and_note)
    return searches


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


def test_calls_of_one_kind_search_once(searches):
    for _ in range(3):
        append_kv(**draw())
    assert len(searches) == 1
    for _ in range(2):  # kinds take turns
        append_kv(**draw(), q=torch.randn(N, H, D))
        append_kv(**draw(torch.float16))
        append_kv(**draw())
    assert len(searches) == 3


@pytest.mark.parametrize(
    ("change", "n_searches"),
    [
        (lambda call: call | {"k": torch.randn(K, N, D).transpose(0, 1)}, 1),
        (lambda call: call | {"k": torch._neg_view(call["k"])}, 0),  # the dispatcher resolves it
        (lambda call: call | {"k_cache": call["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)}, 1),
        (lambda call: call | {"slots": call["slots"].int()}, 1),
        (lambda call: call | {"slots": call["slots"][:2]}, 1),
        (lambda call: call | {"positions": torch.tensor([3, 1, 2])}, 1),
        (lambda call: call | {"interleaved": True}, 1),
        (lambda call: call | {"rotary_offset": 2, "cos": call["cos"][:, :8], "sin": call["sin"][:, :8]}, 1),
        (lambda call: call | {"norm": QKNorm(None, torch.rand(D))}, 1),
        (lambda call: call | {"norm": QKNorm(None, torch.rand(K, D)), "q": torch.randn(N, H, D)}, 1),
        (lambda call: call | {"norm": QKNorm(torch.rand(D)), "q": torch.randn(N, H, D)}, 1),
        (lambda call: call | {"norm": QKNorm(eps=1e-2)}, 1),
        (lambda call: call | {"v": call["k"]}, 1),
        (lambda call: call | {"cos": call["cos"].half(), "sin": call["sin"].half()}, 1),
        (lambda call: call | quantized(()), 1),
        (lambda call: call | quantized((K,)), 1),
    ],
    ids=[
        *("strides", "negated", "cache", "slots", "fewer slots", "positions", "interleaved", "offset", "norm"),
        *("norm of k", "norm of q", "eps", "twice", "tables", "one scale", "scales"),
    ],
)
def test_a_call_of_another_kind_is_its_own(searches, change, n_searches):
    append_kv(**draw())
    append_kv(**draw(), q=torch.randn(N, H, D), norm=QKNorm(torch.rand(D), torch.rand(D)))
    call = change(draw())
    expected = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    append_kv(**call | expected, impl="reference")
    before = len(searches)
    for _ in range(2):
        append_kv(**call)
        for name, cache in expected.items():
            assert torch.equal(call[name].view(torch.uint8), cache.view(torch.uint8)), name
            call[name].zero_()
    assert len(searches) == before + n_searches


def quantized(shape):
    caches = torch.zeros(2, PAGES, SIZE, K, D, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(2, *shape) + 0.1
    return {"k_cache": caches[0], "v_cache": caches[1], "k_scale": scales[0], "v_scale": scales[1]}


@pytest.mark.parametrize("shape", [(), (K,)])
def test_a_repeated_call_reads_its_own_values(searches, shape):
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
    assert len(searches) == 2  # once for each impl


def test_one_tensor_may_be_two_arguments(searches):
    """Both norms may have one weight, and both caches one scale."""
    weight, other = torch.rand(2, D)
    scale = torch.tensor(0.5)
    pages = quantized(()) | {"k_scale": scale, "v_scale": scale}
    call = draw() | pages | {"q": torch.randn(N, H, D)}
    for weights in ((weight, weight), (weight, other), (other, other), (other, weight)):
        first = append_kv(**call, norm=QKNorm(*weights))
        assert torch.equal(first, append_kv(**call, norm=QKNorm(*weights), impl=None))
        assert not torch.equal(first, append_kv(**call))
    assert len(searches) == 3  # twins, none, and no norm


def test_without_guards_calls_go_by_their_keys(searches, monkeypatch):
    monkeypatch.setattr(operator, "has_guards", lambda: False)
    call = draw()
    for _ in range(2):
        append_kv(**call)
    assert len(searches) == 2
    assert call["k_cache"].any()


def test_plans_keep_no_memory(searches):
    call = draw()
    for _ in range(2):
        append_kv(**call)
    kept = weakref.ref(call["k_cache"])
    searches.clear()
    del call
    gc.collect()
    assert kept() is None


def test_the_operator_takes_plans_and_refuses_gradients(searches):
    def arguments(call):
        return (*[call[name] for name in ("k", "v", "k_cache", "v_cache", "slots", "cos", "sin")], *[None] * 7)

    call = draw()
    append_kv(**call)
    version = call["k_cache"]._version
    torch.ops.ropewalk.append_kv(*arguments(call))
    assert len(searches) == 1
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


def test_forward_differentiation_takes_no_plan(searches):
    append_kv(**draw())
    with forward_ad.dual_level():
        append_kv(**draw())
    assert len(searches) == 2


def test_a_gradient_and_inference_mode_are_seen(searches):
    append_kv(**draw())
    call = draw()
    with pytest.raises(ValueError, match="k requires grad"):
        append_kv(**call | {"k": call["k"].requires_grad_()})
    with torch.inference_mode():
        inside = draw()
        for _ in range(2):
            append_kv(**inside)
        assert inside["k_cache"].any()
    append_kv(**draw())


def test_errors_come_before_guards(searches):
    append_kv(**draw())
    with pytest.raises(TypeError, match="v is None"):
        append_kv(**draw() | {"v": None})
    with pytest.raises(ValueError, match="slots holds 99"):
        append_kv(**draw() | {"slots": torch.tensor([9, 3, 99])})


@pytest.mark.parametrize("offset", [0.0, False])
def test_an_offset_of_another_type_finds_no_plan(offset):
    k = torch.randn(4, 2, 8)
    caches, slots, table = torch.zeros(2, 3, 8, 2, 8), torch.arange(4), torch.ones(4, 4)
    for _ in range(2):
        append_kv(k, k, *caches, slots, cos=table, sin=table)
    with pytest.raises(TypeError, match="rotary_offset is"):
        append_kv(k, k, *caches, slots, cos=table, sin=table, rotary_offset=offset)
