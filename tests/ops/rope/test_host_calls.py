"""The Python functions that an eager call by the CUDA extension enters: on a GPU they are most of its time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropewalk import apply_rope
from ropewalk.ops.rope.cuda import load as native


def python_calls(function: Callable[[], object]) -> int:
    """Count the Python functions that a call enters, beside itself."""
    calls = []

    def profile(frame: object, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls) - 1


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arguments each call passes to the extension, which is loaded as far as `apply_rope` can tell.

    Its operators are functions of Python here, as `OpOverload.__call__` is.
    """
    passed = []

    def rotate(*arguments: object) -> bool:
        passed.append(len(arguments))
        return True

    def rotated(*arguments: Tensor | None) -> tuple[Tensor | None, ...]:
        passed.append(len(arguments))
        q, k = arguments[:2]
        return torch.empty_like(q), None if k is None else torch.empty_like(k)

    monkeypatch.setattr(native, "_rotate", rotate)
    monkeypatch.setattr(native, "_rotated", rotated)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(torch.Tensor.is_cpu.__get__), raising=False)
    return passed


@pytest.mark.parametrize(
    ("mode", "positions", "most_calls", "arguments"),
    [
        ("in place", None, 11, 5),
        ("in place", "tensor", 12, 8),
        ("in place", 3, 12, 12),
        ("out of place", None, 11, 5),
        ("out of place", "tensor", 12, 6),
        ("recording", None, 16, 5),
    ],
)
def test_a_call_enters_few_functions_and_passes_few_arguments(
    passed: list[int], mode: str, positions: str | int | None, most_calls: int, arguments: int
) -> None:
    q, k = (torch.randn(2, 8, heads, 16, requires_grad=mode == "recording") for heads in (4, 2))
    table = torch.rand(16, 8)
    index = torch.arange(8)[None] if positions == "tensor" else positions

    def call() -> object:
        return apply_rope(q, k, table, table, positions=index, inplace=mode == "in place")

    call()
    assert python_calls(call) <= most_calls
    assert passed == [arguments] * 2
