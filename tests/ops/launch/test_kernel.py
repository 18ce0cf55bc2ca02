"""Kernels that are compiled by the values of their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from helpers.rope_launches import specialise
from helpers.targets import TARGETS

from ropewalk.ops.launch.kernel import alignment_of, division_by, is_dense, strides_of
from ropewalk.ops.rope.launch import KERNEL


class Asked:
    """All that Triton is asked to compile, on devices that are not there."""

    def __init__(self) -> None:
        self.device, self.target = 0, TARGETS["sm_90"]
        self.sources: list[Any] = []
        self.options: list[dict[str, Any]] = []

    def get_current_device(self) -> int:
        return self.device

    def get_current_target(self) -> Any:
        return self.target

    def compile(self, source: Any, target: Any, options: dict[str, Any]) -> object:
        self.sources.append(source)
        self.options.append(options)
        return object()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Triton, without a GPU."""
    asked = Asked()
    monkeypatch.setattr(triton, "compile", asked.compile)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=asked))
    monkeypatch.setattr(KERNEL, "compiled", {})
    return asked


def warm_up(alignment: int = 16, **call: Any) -> Any:
    return KERNEL.warmup(grid=(1,), alignment=alignment, **specialise(**call).arguments)


def test_lengths_and_offsets_share_a_binary(asked: Asked) -> None:
    first = warm_up(tokens=4096)
    assert warm_up(tokens=5000) is first
    assert KERNEL.warmup(grid=(2,), **specialise().arguments | {"offset": 7}) is first
    assert len(asked.sources) == 1


def test_what_a_binary_is_compiled_for_is_told_apart(asked: Asked) -> None:
    found = [
        warm_up(),
        *(warm_up(alignment) for alignment in (2, 4, 8)),
        warm_up(dtype="fp16"),
        warm_up(kind="tokens"),
        warm_up(kind="tokens", index_dtype=torch.int32),
        warm_up(kind="axes"),
        warm_up(interleaved=True),
        warm_up(far=True),
    ]
    asked.device = 1  # a compiled kernel holds the function of the device that it was loaded onto
    found.append(warm_up())
    assert len({id(x) for x in found}) == len(found) == len(asked.sources)


def test_equal_constants_of_another_type_are_told_apart(asked: Asked) -> None:
    arguments = specialise(interleaved=True).arguments
    name, value = next((name, x) for name, x in arguments.items() if x is True and name in KERNEL.constants)
    found = [KERNEL.warmup(grid=(1,), **arguments | {name: x}) for x in (value, 1, 1.0)]
    assert len({id(x) for x in found}) == 3


def test_strides_are_wide_together(asked: Asked) -> None:
    for far, dtype in ((False, "i32"), (True, "i64")):
        signature = specialise(far=far).source.signature
        assert {kind for name, kind in signature.items() if "_stride" in name} == {dtype, "constexpr"}
        assert signature["batch_multiplier"] == "u32"
        assert signature["n_tokens"] == signature["offset"] == "i32"


def test_pointers_to_single_elements_have_no_alignment(asked: Asked) -> None:
    source = specialise(kind="tokens", alignment=8).source
    aligned = {KERNEL.arg_names[index] for (index,), attribute in source.attrs.items()}
    assert aligned == {"q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_ptr", "sin_ptr"}
    assert all(attribute == [["tt.divisibility", 8]] for attribute in source.attrs.values())


def test_options_are_those_of_the_target(asked: Asked) -> None:
    arguments = specialise().arguments | {"threads": 128, "maxnreg": 64, "launch_pdl": True}
    KERNEL.compile(TARGETS["sm_90"], **arguments)
    KERNEL.compile(TARGETS["gfx942"], **arguments)
    assert asked.options == [{"num_warps": 4, "maxnreg": 64, "launch_pdl": True}, {"num_warps": 2}]


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 4096, 1_000_003, 2**31 - 1])
def test_a_division_is_a_product_and_a_shift(divisor: int) -> None:
    multiplier, shift = division_by(divisor)
    assert multiplier < 2**32
    for n in (0, 1, divisor - 1, divisor, 2 * divisor + 1, 2**31 - 1):
        assert n * multiplier >> shift == n // divisor


def test_strides_and_units() -> None:
    x = torch.empty(4, 1, 6, 8)[..., ::2]
    assert strides_of(x) == (48, 0, 8, 2)
    assert alignment_of(strides_of(x)) == 2
    assert alignment_of(()) == 16
    assert not is_dense(x)
    assert is_dense(x[..., :1])
    assert is_dense(x[:0])
