"""Plain calls of a library: `repeat_plain` repeats the last one, and nothing that differs from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.modes import ON_GPU
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import attention
from ropewalk.integrations.huggingface import attention as door
from ropewalk.ops import tracing
from ropewalk.ops.attention import api, backends
from ropewalk.ops.attention.api import repeat_plain
from ropewalk.ops.attention.libraries.sdpa import Sdpa
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS

B, H, T, D = 2, 2, 24, 16
SCALE = 0.25
DTYPE = torch.float16 if ON_GPU else torch.float32  # what cuDNN runs
MOST_FUNCTIONS = 5  # the layer's, `repeat_plain`, a constant for torch.compile, the bound operator; one to spare


@pytest.fixture(autouse=True, params=["guards", "python"])
def plan_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan calls of CPU tensors, with PyTorch's guards and without them; on a GPU as well a library attends."""
    monkeypatch.setattr(kinds, "on_cpu", True)
    monkeypatch.setattr(backends, "_rules", lambda device: (backends.Rule(backends.CUDNN_FIRST),))
    if request.param == "python":
        monkeypatch.setattr(tracing, "has_guards", lambda: False)
    else:
        assert tracing.has_guards()
    KINDS.clear()
    yield
    KINDS.clear()


def draw(device: torch.device, tokens: int = T) -> list[Tensor]:
    return [torch.randn(B, H, tokens, D, device=device, dtype=DTYPE) for _ in range(3)]


def attend(tensors: list[Tensor], **keywords: Any) -> Tensor:
    out: Tensor = attention(*tensors, causal=True, scale=SCALE, layout="bhtd", **keywords)
    return out


def learn(tensors: list[Tensor]) -> list[Tensor]:
    """Let `repeat_plain` know the kind of a call: a plan is made at the second one, and run at the third."""
    for _ in range(3):
        attend(tensors)
    return tensors


@pytest.fixture
def known(device: torch.device) -> list[Tensor]:
    return learn(draw(device))


def repeat(tensors: list[Tensor], causal: bool = True, scale: float = SCALE) -> Tensor | None:
    return repeat_plain(*tensors, causal, scale)


def assert_close(x: Tensor | None, y: Tensor) -> None:
    assert x is not None
    torch.testing.assert_close(x, y, rtol=1e-2 if ON_GPU else 0, atol=1e-2 if ON_GPU else 0)


def test_a_known_call_is_repeated(known: list[Tensor]) -> None:
    others = [torch.randn_like(x) for x in known]
    out = repeat(others)
    expected = attend(others)
    assert_close(out, expected)
    assert out is not None
    assert out.stride() == expected.stride()


def test_a_known_call_is_differentiated_twice(device: torch.device) -> None:
    tensors = learn([x.requires_grad_() for x in draw(device)])
    for x, y in zip(
        torch.autograd.grad(repeat(tensors).square().sum(), tensors),  # type: ignore[union-attr]
        torch.autograd.grad(attend(tensors).square().sum(), tensors),
        strict=True,
    ):
        assert_close(x, y)


class _Watches(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def deterministic() -> AbstractContextManager[Any]:
    class Deterministic:
        def __enter__(self) -> None:
            torch.use_deterministic_algorithms(True)

        def __exit__(self, *error: object) -> None:
            torch.use_deterministic_algorithms(False)

    return Deterministic()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cuda" if ON_GPU else "cpu", torch.bfloat16),
    "a dispatch mode": _Watches,
    "forward-mode": forward_ad.dual_level,
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no cuDNN": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_other_surroundings_are_another_call(known: list[Tensor], name: str) -> None:
    assert repeat(known) is not None
    with CONTEXTS[name]():
        assert repeat(known) is None
    assert repeat(known) is not None


def test_transforms_tracers_and_shards_are_other_surroundings(
    known: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    torch.func.vmap(lambda x: (found.append(repeat(known)), x)[1])(known[0])
    torch.func.grad(lambda x: (found.append(repeat(known)), x.sum())[1])(known[0])
    torch.jit.trace(lambda x: (found.append(repeat(known)), x + 1)[1], known[0], check_trace=False)
    monkeypatch.setattr(api, "find_sharded", lambda: None)
    assert [*found, repeat(known)] == [None] * 4


def misalign(x: Tensor) -> Tensor:
    size = x.numel()
    return x.new_zeros(size + 1)[1:].view(x.shape)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x[:1],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": Tensor.bfloat16,
    "type": nn.Parameter,
    "needs a gradient": lambda x: x.clone().requires_grad_(),
    "negated": torch._neg_view,
    "misaligned": misalign,
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", CHANGES)
def test_another_tensor_is_another_call(known: list[Tensor], name: str, place: int) -> None:
    changed = list(known)
    changed[place] = CHANGES[name](known[place])
    assert repeat(changed) is None


def test_other_flags_are_other_calls(device: torch.device) -> None:
    tensors = learn([x.requires_grad_() for x in draw(device)])
    assert repeat(tensors) is not None
    with torch.no_grad():
        assert repeat(tensors) is None
    assert repeat([x.detach() for x in tensors]) is None
    assert repeat(tensors, causal=False) is repeat(tensors, scale=0.5) is None
    others: list[dict[str, Any]] = [{"impl": "sdpa"}, {"deterministic": False, "impl": "reference"}]
    for keywords in (*others, *([] if ON_GPU else [{"window": 4}])):  # no library there takes a window
        KINDS.clear()
        for _ in range(4):
            attend(tensors, **keywords)
        assert repeat(tensors) is None


def test_lengths_take_turns(device: torch.device) -> None:
    short, long = draw(device, tokens=T // 2), learn(draw(device))
    learn(short)
    assert repeat(long) is None
    assert_close(repeat(short), attend(short))
    attend(long)
    assert_close(repeat(long), attend(long))


def test_what_is_known_is_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "MAX_PLAIN", 4)
    tensors = draw(device)
    for index in range(9):
        for _ in range(3):
            attention(*tensors, scale=1.0 + index, layout="bhtd")
    assert len(KINDS.plain) <= 4
    assert repeat(tensors, causal=False, scale=9.0) is not None


def test_a_layer_of_transformers_enters_few_functions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # a stand-in for cuDNN's operator
        monkeypatch.setattr(Sdpa, "bind", lambda backend, call: lambda q, k, v: q)
    tensors = learn([x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(device)])
    layer: Any = SimpleNamespace(is_causal=True, training=True)
    keywords = {"scaling": SCALE, "dropout": 0.0, "position_ids": None, "use_cache": False, "sliding_window": T}
    entered: list[str] = []
    out = door._attend(layer, *tensors, None, **keywords)[0]
    assert out.shape == (B, T, H, D)
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        door._attend(layer, *tensors, None, **keywords)
    finally:
        sys.setprofile(None)
    if tracing.has_guards():
        assert len(entered) <= MOST_FUNCTIONS, entered
    assert "attention" not in entered


def test_a_layer_of_transformers_asks_what_is_not_plain(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, asked = learn(draw(device)), []
    monkeypatch.setattr(door, "attention", lambda q, *others, **keywords: (asked.append(keywords), q)[1])
    layer: Any = SimpleNamespace(is_causal=True, training=True)
    for keywords in (
        {"dropout": 0.1},
        {"softcap": 3.0},
        {"s_aux": torch.zeros(H, device=device)},
        {"sliding_window": 3},
        {"deterministic": True},
        {"is_causal": False},
        {"attention_mask": torch.ones(B, 1, 1, T, dtype=torch.bool, device=device)},
    ):
        given = {"attention_mask": None, "scaling": SCALE, **keywords}
        door._attend(layer, *tensors, **given)
        assert len(asked) == 1, keywords
        asked.clear()
    door._attend(layer, *tensors, None, scaling=SCALE)
    assert not asked


def test_torch_compile_sees_the_operator_alone(known: list[Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: repeat_plain(*tensors, True, SCALE) is None, backend="eager")
    assert compiled(*known)
