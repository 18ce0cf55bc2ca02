"""Plans of `append_kv`: calls of one kind find theirs by guards, and no call takes that of another kind."""

import pytest
import torch

from ropewalk import QKNorm, append_kv
from ropewalk.ops.cache import operator

N, H, K, D, PAGES, SIZE = 3, 4, 2, 32, 5, 8


@pytest.fixture
def searches(monkeypatch):
    """The calls whose plan was looked for by a key."""
    searches, find = [], operator._find

    def find_and_note(call, tensors):
        searches.append(call)
        return find(call, tensors)

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
    "change",
    [
        lambda call: call | {"k": torch.randn(K, N, D).transpose(0, 1)},
        lambda call: call | {"k": torch._neg_view(call["k"])},
        lambda call: call | {"k_cache": call["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)},
        lambda call: call | {"slots": call["slots"].int()},
        lambda call: call | {"positions": torch.tensor([3, 1, 2])},
        lambda call: call | {"interleaved": True},
        lambda call: call | {"norm": QKNorm(None, torch.rand(D))},
        lambda call: call | {"v": call["k"]},  # a tensor twice has no guards
        lambda call: call | {"cos": call["cos"].half(), "sin": call["sin"].half()},
    ],
    ids=["strides", "negated", "cache", "slots", "positions", "interleaved", "norm", "twice", "tables"],
)
def test_a_call_of_another_kind_is_its_own(searches, change):
    append_kv(**draw())
    call = change(draw())
    expected = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    append_kv(**call | expected, impl="reference")
    for _ in range(2):
        append_kv(**call)
        for name, cache in expected.items():
            assert torch.equal(call[name], cache), name
            call[name].zero_()


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
