"""A scheme's tables and numbers: what is remembered is what would be made anew."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from attention_calls import SCHEMES, B, D, H
from torch import nn

from ropewalk.ops.attention import prepare as memory
from ropewalk.ops.attention.checks import check_call
from ropewalk.ops.attention.prepare import Prepared, prepare
from ropewalk.positions import Alibi, ExpoSB, NoPosition, PositionScheme, Rope, Rotation


@pytest.fixture(autouse=True)
def _forget():
    memory._remembered.clear()
    memory._captured.clear()


def prepared(device, scheme, queries=5, keys=5, heads=H, **call):
    q, k = torch.empty(B, heads, queries, D, device=device), torch.empty(B, heads, keys, D, device=device)
    return prepare(q, k, check_call(q, k, k, position=scheme, layout="bhtd", **call))


def made(monkeypatch, kind, name):
    """Counts the calls of a scheme's method."""
    calls = []
    right = getattr(kind, name)

    def counting(self, *arguments):
        calls.append(arguments)
        return right(self, *arguments)

    monkeypatch.setattr(kind, name, counting)
    return calls


LENGTHS = [
    (1, 1),
    (5, 5),
    (255, 256),
    (256, 256),
    (257, 257),
    (1, 1000),
    (1000, 1),
    (300, 20),
    (600, 300),
    (0, 4),
    (4, 0),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_remembered_is_what_would_be_made(device, scheme):
    scheme = SCHEMES[scheme]
    for queries, keys in LENGTHS * 2:  # the second time from memory, with whatever the others left there
        result = prepared(device, scheme, queries, keys)
        for tokens, start, cos, sin in (
            (queries, keys - queries, result.cos_q, result.sin_q),
            (keys, 0, result.cos_k, result.sin_k),
        ):
            fresh = scheme.rotation(torch.arange(start, start + tokens, device=device)[None], D)
            assert (fresh is None) == (cos is None)
            if fresh is not None:
                assert torch.equal(cos, fresh.cos)
                assert torch.equal(sin, fresh.sin)
                assert result.interleaved == fresh.interleaved
                assert (result.weights is None) == (fresh.weights is None)
        if scheme.score_functions() is not None:
            numbers = scheme.score_parameters(H, device)
            assert (result.parameters is None) == (numbers is None)
            assert numbers is None or torch.equal(result.parameters, numbers)


def test_everything_else_goes_through(device):
    mask = torch.ones(B, 1, 5, 7, dtype=torch.bool, device=device)
    lengths = torch.tensor([7, 2], device=device)
    result = prepared(device, NoPosition(), 5, 7, mask=mask, key_lengths=lengths, causal=True, window=3, scale=0.5)
    nothing = dict.fromkeys(Prepared._fields)
    assert result == Prepared(
        **{**nothing, "interleaved": False, "causal": True, "window": 3, "scale": 0.5, "mask": result.mask},
    )._replace(key_lengths=lengths)
    assert result.mask.data_ptr() == mask.data_ptr()


def test_positions_reach_score_functions_and_tables(device):
    positions_q = torch.tensor([[4, 4, 100000, 0, 7]], device=device, dtype=torch.int32)
    positions_k = torch.randint(0, 50, (B, 5), device=device)
    result = prepared(device, Rope(), positions_q=positions_q, positions_k=positions_k)
    assert result.positions_q is None  # no score function reads them
    assert torch.equal(result.cos_q, Rope().rotation(positions_q.long(), D).cos)
    assert torch.equal(result.cos_k, Rope().rotation(positions_k, D).cos)
    result = prepared(device, Alibi(), positions_q=positions_q)
    assert result.positions_q is positions_q
    assert result.positions_k is None
    assert result.cos_q is None


def test_tables_are_made_once_for_many_lengths(device, monkeypatch):
    calls = made(monkeypatch, Rope, "rotation")
    for tokens in (1, 2, 100, 255, 256):
        prepared(device, Rope(), tokens, tokens)
        prepared(device, Rope(), 1, tokens)
    assert len(calls) == 1
    prepared(device, Rope(), 257, 257)
    assert len(calls) == 2


def test_numbers_are_made_once_for_as_many_heads(device, monkeypatch):
    calls = made(monkeypatch, Alibi, "score_parameters")
    for tokens in (1, 100, 1000):
        prepared(device, Alibi(), tokens, tokens)
    prepared(device, Alibi(), heads=6)
    assert [call[0] for call in calls] == [H, 6]


def test_equal_schemes_share_their_tables_and_others_do_not(device, monkeypatch):
    calls = made(monkeypatch, Rope, "rotation")
    first = prepared(device, Rope(500.0))
    assert torch.equal(prepared(device, Rope(500.0)).cos_q, first.cos_q)
    assert len(calls) == 1
    for other in (Rope(501.0), Rope(500.0, rotary_dim=4), Rope(500.0, attention_factor=2.0), ExpoSB()):
        assert not torch.equal(prepared(device, other).cos_q[..., :2], first.cos_q[..., :2]) or other.rotary_dim == 4
    assert prepared(device, Rope(500.0, interleaved=True)).interleaved
    assert len(calls) == 5


def test_a_tensor_that_was_written_to_is_noticed(device):
    inv_freq, slopes = torch.rand(8, device=device), torch.rand(H, device=device)
    rope, alibi = Rope(inv_freq=inv_freq), Alibi(slopes)
    before = prepared(device, rope).cos_q.clone(), prepared(device, alibi).parameters.clone()
    inv_freq.mul_(2)
    slopes.add_(1)
    assert torch.equal(prepared(device, rope).cos_q, rope.rotation(torch.arange(5, device=device)[None], D).cos)
    assert not torch.equal(prepared(device, rope).cos_q, before[0])
    assert torch.equal(prepared(device, alibi).parameters, before[1] + 1)


def test_a_tensor_at_the_address_of_another_is_not_mistaken_for_it(device):
    for _ in range(40):
        scheme = Rope(inv_freq=torch.rand(8, device=device))
        assert torch.equal(prepared(device, scheme).cos_q, scheme.rotation(torch.arange(5, device=device)[None], D).cos)
        del scheme


def test_the_memory_does_not_grow_without_end(device, monkeypatch):
    inv_freq = torch.rand(8, device=device)
    first = weakref.ref(inv_freq)
    prepared(device, Rope(inv_freq=inv_freq))
    del inv_freq
    for base in range(50):
        prepared(device, Rope(100.0 + base))
    gc.collect()
    assert len(memory._remembered) <= memory._MOST_REMEMBERED
    assert first() is None
    calls = made(monkeypatch, Rope, "rotation")
    prepared(device, Rope(149.0))  # the newest is still there
    assert not calls


def test_what_was_used_last_is_kept_longest(device, monkeypatch):
    for base in range(memory._MOST_REMEMBERED):
        prepared(device, Rope(100.0 + base))
    prepared(device, Rope(100.0))
    prepared(device, Rope(1.5))
    calls = made(monkeypatch, Rope, "rotation")
    prepared(device, Rope(100.0))
    assert not calls
    prepared(device, Rope(101.0))
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_a_mode_makes_serves_training(device, mode):
    with mode():
        prepared(device, ExpoSB(distance_decay=True), 3, 7)
        prepared(device, Alibi())
    for result in (prepared(device, ExpoSB(distance_decay=True), 3, 7), prepared(device, Alibi())):
        for x in result:
            assert not isinstance(x, torch.Tensor) or not x.is_inference()


def test_what_is_to_be_learned_is_made_anew(device):
    slopes = nn.Parameter(torch.rand(H, device=device))
    with torch.no_grad():
        prepared(device, Alibi(slopes))
    assert prepared(device, Alibi(slopes)).parameters.requires_grad
    assert not memory._remembered


@dataclass(frozen=True, eq=False)
class Listed(PositionScheme):
    """A scheme with a value that no memory can be kept under."""

    rates: list

    def rotation(self, positions, head_dim):
        angles = positions[..., None] * torch.tensor(self.rates, device=positions.device)
        return Rotation(angles.cos(), angles.sin(), False, None)


class Plain(PositionScheme):
    """A scheme that is no dataclass of its own."""

    def __init__(self, rate):
        self.rate = rate

    def rotation(self, positions, head_dim):
        angles = positions[..., None] * torch.tensor([self.rate], device=positions.device)
        return Rotation(angles.cos(), angles.sin(), False, None)


@pytest.mark.parametrize("make", [lambda rate: Listed([rate]), Plain], ids=["list", "no dataclass"])
def test_schemes_with_other_values_are_not_mistaken_for_one_another(device, make):
    for rate in (0.5, 0.25):
        scheme = make(rate)
        expected = scheme.rotation(torch.arange(5, device=device)[None], D).cos
        assert torch.equal(prepared(device, scheme).cos_q, expected)
    if isinstance(scheme, Listed):
        scheme.rates[0] = 2.0
        assert torch.equal(prepared(device, scheme).cos_q, scheme.rotation(torch.arange(5, device=device)[None], D).cos)


def test_threads_share_the_memory(device):
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            base = 100.0 + int(torch.randint(0, 30, (), generator=generator))
            expected = Rope(base).rotation(torch.arange(5, device=device)[None], D).cos
            if not torch.equal(prepared(device, Rope(base)).cos_q, expected):
                wrong.append(base)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
