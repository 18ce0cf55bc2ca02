"""What dropout keeps: Philox as its equations have it, in Triton's order of words, and as random as it must be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.modes import HAS_KERNELS, needs_kernels
from helpers.plain_philox import as_seed, stays, words

from ropewalk.ops.attention import dropout as philox

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
COUNTERS = [(0, 0, 0, 0), (1, 2, 3, 4), (2**32 - 1,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]


def stays_by_torch(
    seed: int, p: float, rows: torch.Tensor, queries: torch.Tensor, keys: int, sequence: int = 0
) -> torch.Tensor:
    """(R, M, keys)."""
    device = rows.device
    sequences = torch.full((1,), sequence, device=device)
    return philox.dropout_mask(
        as_seed(seed, device), p, rows[:, None, None], sequences, queries[:, None], torch.arange(keys, device=device)
    )


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_those_of_the_equations(device, seed, counter):
    found = philox.philox(as_seed(seed, device), *(torch.tensor([c], device=device) for c in counter))
    assert [int(word) for word in found] == words(seed, counter)


def test_ten_rounds_give_the_published_words(device, monkeypatch):
    monkeypatch.setattr(philox, "ROUNDS", 10)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    found = philox.philox(zero, zero, zero, zero, zero)
    assert [int(word) for word in found] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(("keys", "sequence"), [(0, 0), (1, 0), (63, 3), (200, 0), (130, 70_000)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", SEEDS[1:3])
def test_what_is_kept_goes_by_seed_and_indices(device, seed, p, keys, sequence):
    rows, queries = torch.tensor([0, 5, 100_000], device=device), torch.tensor([3, 0, 2**20 + 1], device=device)
    found = stays_by_torch(seed, p, rows, queries, keys, sequence)
    assert (found.shape, found.dtype) == ((3, 3, keys), torch.bool)
    indices = itertools.product(rows.tolist(), [sequence], queries.tolist(), range(keys))
    assert found.flatten().tolist() == [stays(seed, p, *index) for index in indices]


def test_rates_are_multiples_of_a_step():
    assert philox.dropped_steps(0.0) == 0
    assert philox.dropped_steps(0.5) == 32768
    assert philox.dropped_steps(0.1) == 6554
    assert philox.rescale(0.0) == 1.0
    assert philox.rescale(0.5) == 2.0
    assert philox.rescale(0.1) == 1 / (1 - 6554 / 65536)


def test_a_number_equal_to_the_rate_is_kept(device):
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    number = words(5, (0, 0, 0, 0))[0] % 256
    assert [bool(stays_by_torch(5, (number + more) / 256, zero, zero, 1)) for more in (0, 1)] == [True, False]


def test_nothing_is_dropped_at_a_rate_of_0_and_something_stays_near_1(device):
    numbers = torch.arange(20, device=device)
    assert stays_by_torch(3, 0.0, numbers, numbers, 50).all()
    assert philox.dropped_steps(1 - 2**-40) == 255 * 256
    assert 0 < stays_by_torch(3, 1 - 2**-40, numbers, numbers, 200).double().mean() < 0.01


@pytest.mark.parametrize("p", [0.1, 0.3, 1 / 65536 * 1000, 2 / 65536])
def test_each_probability_is_dropped_at_the_exact_rate(device, p):
    """Over all starts that a seed may give, the first numbers of 256 that drop average to the rate."""
    row = torch.zeros(1, dtype=torch.int64, device=device)
    keys = 64 * 256  # a turn for each of 256 blocks
    phases = [(block * 0x61C88647 + start * 2**24) % 2**32 // 2**24 for start in range(256) for block in range(4)]
    assert sorted(phases) == sorted(list(range(256)) * 4)
    steps = philox.dropped_steps(p)
    dropped = [steps // 256 + (phase < steps % 256) for phase in phases]
    assert sum(dropped) / len(dropped) / 256 == steps / 65536
    rate = 1 - stays_by_torch(11, p, row, torch.arange(40, device=device), keys).double().mean()
    assert abs(rate - p) < 5 * math.sqrt(p / (40 * keys))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_rate_is_as_asked(device, seed, p):
    rows, queries, keys = 12, 100, 333
    kept = stays_by_torch(
        seed, p, torch.arange(rows, device=device), torch.arange(queries, device=device), keys
    ).double()
    rate = 1 - philox.dropped_steps(p) / 2**16  # and blocks of keys differ from it by up to 1/256
    deviation = math.sqrt(rate * (1 - rate))
    for axes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):  # of all; of each key, query and row
        count = math.prod(kept.shape[axis] for axis in axes)
        assert (kept.mean(axes) - rate).abs().max() < 5 * deviation / math.sqrt(count)


def test_neighbours_rows_and_seeds_know_nothing_of_each_other(device):
    p, rows, queries, keys = 0.3, 8, 128, 256
    numbers = torch.arange(rows, device=device), torch.arange(queries, device=device)
    one, other, high = (
        stays_by_torch(seed, p, *numbers, keys).double() - 1 + philox.dropped_steps(p) / 2**16
        for seed in (7, 8, 7 + 2**32)
    )
    pairs = {
        "seeds": (one, other),
        "upper halves of seeds": (one, high),
        "queries and keys": (one[:, :, :128], one[:, :, :128].mT),
    }
    for step in (1, 2, 3, 4, 7, 8, 16):
        pairs[f"keys {step} apart"] = one[..., step:], one[..., :-step]
        pairs[f"queries {step} apart"] = one[:, step:], one[:, :-step]
    for step in (1, 2, 4):
        pairs[f"rows {step} apart"] = one[step:], one[:-step]
    for name, (a, b) in pairs.items():
        if name == "queries and keys":  # the diagonal is itself
            a, b = a.triu(1), b.triu(1)
        count = (a != 0).sum()
        correlation = (a * b).sum() / (one.square().mean() * count)
        assert correlation.abs() < 5 / math.sqrt(count), name


if HAS_KERNELS:
    import triton
    import triton.language as tl

    @triton.jit
    def triton_words(seed_ptr, counters_ptr, words_ptr):
        """The four words of Triton's own Philox, for one counter."""
        c0, c1, c2, c3 = tl.philox(
            tl.load(seed_ptr),
            tl.load(counters_ptr),
            tl.load(counters_ptr + 1),
            tl.load(counters_ptr + 2),
            tl.load(counters_ptr + 3),
            n_rounds=7,
        )
        tl.store(words_ptr, c0)
        tl.store(words_ptr + 1, c1)
        tl.store(words_ptr + 2, c2)
        tl.store(words_ptr + 3, c3)


@needs_kernels
@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_has_the_same_words(device, seed, counter):
    counters = torch.tensor(counter, dtype=torch.int64).to(torch.uint32).to(device)
    found = torch.zeros(4, dtype=torch.uint32, device=device)
    triton_words[(1,)](as_seed(seed, device), counters, found)
    expected = philox.philox(as_seed(seed, device), *(torch.tensor([c], device=device) for c in counter))
    assert found.tolist() == [int(word) for word in expected]
