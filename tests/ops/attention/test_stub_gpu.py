"""The stub of a GPU: attention launches through it, and it records what the driver was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import stub_gpu

from ropewalk import Rope, attention

pytestmark = pytest.mark.compile
TOKENS, HEADS, D = 200, 3, 64


def train(impl: str) -> dict[str, Any]:
    """Record a forward and a backward, twice, and a forward with fewer tokens."""
    q, k, v = (torch.zeros(2, TOKENS, HEADS, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    lengths, position = torch.full((2,), 150, dtype=torch.int32), Rope()

    def forward(tokens: int = TOKENS) -> torch.Tensor:
        xs = [x[:, :tokens] for x in (q, k, v)]
        return attention(*xs, impl=impl, position=position, key_lengths=lengths)

    forward()  # compiles
    records, counts = [], []
    for tokens in (TOKENS, TOKENS, 100):
        stub_gpu.clear()
        out = forward(tokens)
        n_forward = stub_gpu.counts().launches
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        records.append(stub_gpu.launches())
        counts.append((n_forward, *stub_gpu.counts()))
    with torch.no_grad():
        for _ in range(3):  # the second one makes kinds, which the third one finds
            forward()
        calls = [stub_gpu.python_calls(forward) for _ in range(2)]
        best = stub_gpu.best(forward, calls=2, rounds=3)
    addresses = {"v": v.data_ptr(), "lengths": lengths.data_ptr()}
    return {"records": records, "counts": counts, "calls": calls, "best": best, "addresses": addresses}


def decode() -> dict[str, Any]:
    """Record a step over a cache of rotated keys."""
    q = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 4096, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((1,), 4096, dtype=torch.int32)
    bounds = {"key_lengths": lengths, "query_starts": lengths - 1}
    out = attention(q, k, v, impl="triton", causal=True, keys_rotated=True, position=Rope(), **bounds)
    addresses = [x.data_ptr() for x in (q, k, v, out, lengths)]
    return {"records": stub_gpu.launches(), "addresses": addresses}


def read(records: list[Any]) -> list[stub_gpu.Launch]:
    return [stub_gpu.Launch(*record) for record in records]


def addresses_of(launch: stub_gpu.Launch) -> set[int]:
    """The addresses among a launch's arguments, and in its descriptors."""
    return {argument[1] for argument in launch.args if isinstance(argument, list)}


def without_addresses(launch: stub_gpu.Launch) -> list[Any]:
    args = [[argument[0], *argument[2:]] if isinstance(argument, list) else argument for argument in launch.args]
    return [*launch[:-1], args]


@pytest.mark.parametrize(
    ("impl", "kernels"),
    [
        ("triton", ["rotate_kernel", "forward_kernel", "backward_dq_kernel", "backward_dkdv_kernel"]),
        (
            "gluon",
            ["rotate_kernel", "forward_kernel", "bwd_preprocess_kernel", "backward_kernel", "bwd_postprocess_kernel"],
        ),
    ],
)
def test_training_is_recorded(impl: str, kernels: list[str]) -> None:
    recorded = stub_gpu.run(train, impl)
    first, second, shorter = map(read, recorded["records"])
    assert [launch.name for launch in first] == kernels
    assert [n_launches for _, n_launches, _ in recorded["counts"]] == [len(kernels)] * 3
    assert [n_forward for n_forward, _, _ in recorded["counts"]] == [2] * 3
    n_descriptors = recorded["counts"][0][2]
    assert n_descriptors > 0
    assert (
        sum(argument[0] == "descriptor" for x in first for argument in x.args if isinstance(argument, list))
        == n_descriptors
    )

    rotation, forward, *_ = first
    assert all(launch.threads % 32 == 0 and min(launch.grid) > 0 for launch in first)
    assert forward.shared > 48 << 10
    assert {recorded["addresses"][name] for name in ("v", "lengths")} <= addresses_of(forward)
    assert recorded["addresses"]["v"] not in addresses_of(rotation)
    assert TOKENS in forward.args
    # Attribute 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
    begin_early = [launch.name for launch in first if any(identity == 6 for identity, *_ in launch.attributes)]
    assert begin_early == (kernels[3:] if impl == "gluon" else [])

    # The same call launches the same; fewer tokens change scalars and descriptors.
    assert [*map(without_addresses, first)] == [*map(without_addresses, second)]
    assert all(without_addresses(a) != without_addresses(b) for a, b in zip(first, shorter, strict=True))
    hashes = [{x[2] for x in launches[1].args if isinstance(x, list) and len(x) == 3} for launches in (first, shorter)]
    assert hashes[0].isdisjoint(hashes[1])

    assert recorded["calls"][0] == recorded["calls"][1] > 0
    assert recorded["best"] > 0


def test_decoding_is_recorded() -> None:
    recorded = stub_gpu.run(decode)
    main, combine = read(recorded["records"])
    q, k, v, out, lengths = recorded["addresses"]
    assert {q, k, v, lengths} <= addresses_of(main)
    assert out in addresses_of(combine)


def fail() -> None:
    raise ValueError("the child's own error")


def test_a_failure_of_the_child_is_told() -> None:
    with pytest.raises(pytest.fail.Exception, match="the child's own error"):
        stub_gpu.run(fail)
