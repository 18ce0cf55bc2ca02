"""The host's part of an eager `append_kv`, on the stub of a GPU: what reaches the driver, and by how much Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers import stub_gpu

from ropewalk import QKNorm, append_kv
from ropewalk.ops.cache import operator
from ropewalk.ops.launch import kinds

pytestmark = pytest.mark.compile
N, H, K, D, PAGES, SIZE = 4, 4, 2, 64, 3, 16
# Ropewalk's functions that a repeated call enters, in their order
ENTERED = ["append_kv", "rerun", "match", "before"]
ENTERED_BY_TWINS = ["append_kv", "rerun", "match", "check_repeats", "before"]  # one tensor is two arguments


def draw(kind: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return a call's tensors, each in memory of its own."""
    weights = torch.ones(2, D)
    k_cache, v_cache = (torch.zeros(PAGES, SIZE, K, D, dtype=kind) for _ in "kv")
    scales = [torch.ones(PAGES, SIZE, K) for _ in "kv"] if kind == torch.int8 else [None, None]
    return {
        "k": torch.zeros(N, K, D, dtype=torch.bfloat16),
        "v": torch.zeros(N, K, D, dtype=torch.bfloat16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": torch.arange(N),
        "cos": torch.zeros(N, D // 2),
        "sin": torch.zeros(N, D // 2),
        "q": torch.zeros(N, H, D, dtype=torch.bfloat16),
        "positions": torch.arange(N),
        "norm": QKNorm(weights[0], weights[1]),
        "k_scale": scales[0],
        "v_scale": scales[1],
    }


def addresses_of(call: dict[str, Any], out: torch.Tensor) -> list[int]:
    """Return the addresses in the kernel's order."""
    norm = call["norm"]
    weights = [norm.q_weight, norm.k_weight]
    names = ("k_cache", "v_cache", "cos", "sin")
    caches = [call[name] for name in names]
    tensors = [call["q"], call["k"], call["v"], out, *caches, *weights, call["k_scale"], call["v_scale"]]
    return [x.data_ptr() for x in (*tensors, call["positions"], call["slots"]) if x is not None]


def launch(call: dict[str, Any]) -> dict[str, Any]:
    """Return what a call launches, and the addresses of its tensors."""
    stub_gpu.clear()
    out = append_kv(**call)
    return {"records": stub_gpu.launches(), "addresses": addresses_of(call, out)}


def functions_of(call: dict[str, Any]) -> list[str]:
    """Return the names of Ropewalk's functions that a call enters."""
    names = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("ropewalk."):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        append_kv(**call)
    finally:
        sys.setprofile(None)
    return names


def repeat() -> dict[str, Any]:
    """Record calls of one kind, and of kinds like it."""
    kinds.on_cpu = True
    shared = torch.ones(D)
    long = torch.zeros(1 + N * H * D, dtype=torch.bfloat16)
    calls = [draw() for _ in range(3)]
    results = {"equal": [launch(call) for call in calls]}
    results["int8"] = [launch(draw(torch.int8)) for _ in range(3)]
    results["shared"] = [launch(draw() | {"norm": QKNorm(shared, shared)}) for _ in range(3)]
    results["misaligned"] = [launch(draw() | {"q": long[1:].view(N, H, D)}) for _ in range(2)]
    results["dense"] = [launch(draw() | {"q": torch.zeros(N, H, 2 * D, dtype=torch.bfloat16)[..., ::2]})] * 3
    like = {"equal": calls[0], "int8": draw(torch.int8), "shared": draw() | {"norm": QKNorm(shared, shared)}}
    entered = {}
    for name, call in like.items():
        operator.OPERATION.forget()  # the matchers of other kinds
        for _ in range(3):
            append_kv(**call)
        entered[name] = functions_of(call)
    return {"results": results, "entered": entered}


def test_a_repeated_call_launches_by_its_plan() -> None:
    found = stub_gpu.run(repeat)
    first: dict[str, stub_gpu.Launch] = {}
    for name, results in found["results"].items():
        for result in results:
            (record,) = (stub_gpu.Launch(*record) for record in result["records"])
            given = [argument[1] for argument in record.args if isinstance(argument, list)]
            if name != "dense":  # that launches copies
                assert given[: len(result["addresses"])] == result["addresses"], name
            rest = [argument for argument in record.args if not isinstance(argument, list)]
            kept = first.setdefault(name, record)
            assert (record.function, record.grid) == (kept.function, kept.grid)
            assert rest == [argument for argument in kept.args if not isinstance(argument, list)], name
    assert first["shared"].function == first["equal"].function
    assert first["misaligned"].function != first["equal"].function
    assert found["entered"] == {"equal": ENTERED, "int8": ENTERED, "shared": ENTERED_BY_TWINS}


def refuse() -> dict[str, list[str]]:
    """Append into caches of one memory, by the plan of calls whose caches are of two: the errors, and what else is."""
    kinds.on_cpu = True
    errors, calls = [], []
    for kind in (torch.bfloat16, torch.int8):
        call = draw(kind)
        for _ in range(3):
            append_kv(**call)
        numbers = torch.zeros(2 * call["k_cache"].numel(), dtype=kind)
        scales = torch.zeros(2 * PAGES * SIZE * K)
        shape, step = (PAGES, SIZE, K, D), SIZE * K * D
        k_cache, later, apart = (numbers[i * step :][: PAGES * step].view(shape) for i in (0, 1, PAGES))
        call |= {"k_cache": k_cache, "v_cache": apart}
        if kind == torch.int8:
            k_scale, later_scale, apart_scale = (
                scales[i * K :][: PAGES * SIZE * K].view(PAGES, SIZE, K) for i in (0, 1, PAGES * SIZE)
            )
            call |= {"k_scale": k_scale, "v_scale": apart_scale}
        wrong = [{"v_cache": k_cache}, {"v_cache": later}]
        wrong += [{"v_scale": later_scale}] if kind == torch.int8 else []
        for change in wrong:
            with pytest.raises(ValueError, match="shares memory") as caught:
                append_kv(**(call | change))
            errors.append(str(caught.value).partition(",")[0])
        operator.OPERATION.forget()  # the matchers of those calls
        for _ in range(3):
            append_kv(**call)
        calls.append(functions_of(call))
    return {"errors": errors, "entered": calls}


def test_a_plan_refuses_caches_that_share_memory() -> None:
    found = stub_gpu.run(refuse)
    caches, scales = (f"v_{x} shares memory with k_{x}" for x in ("cache", "scale"))
    assert found["errors"] == [caches, caches, caches, caches, scales]
    assert found["entered"] == [ENTERED, ENTERED]
